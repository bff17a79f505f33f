//! outboxd: see the README.

pub mod admin;
pub mod cli;
pub mod commands;
pub mod config;
pub mod decode;
pub mod error;
pub mod event;
pub mod logging;
pub mod lsn;
pub mod message;
pub mod publish;
pub mod relay;
pub mod run;
pub mod sandbox;
pub mod store;
pub mod wal;
