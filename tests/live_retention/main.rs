//! Retention, erasure and the database's own lag on real servers: what goes and what stays, that no
//! INSERT waits for it, and that the relay goes on whatever goes under it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

#[path = "../support/mod.rs"]
mod support;

mod between;
mod commands;
mod lag;
mod ledger;
mod partitions;
mod place;
mod rows;
