//! Throw-away PostgreSQL, nats-server and relay on loopback, for `outboxd demo` and the live tests.
//!
//! Owns the processes it starts, their directories and ports; knows the relay only from outside,
//! as a program with a configuration. What it started ends with the value that stands for it, and
//! also when this process is killed.
//!
//! In reading order: [`Postgres`], [`Nats`], [`NatsCluster`], [`Relay`] and [`Proxy`] are single
//! processes; [`Workload`] writes events, [`stream`] reads them back, [`verdict`] compares;
//! [`World`] is all of it together.

mod binaries;
mod cluster;
mod dice;
mod nats;
mod place;
mod postgres;
mod process;
mod proxy;
mod relay;
mod sampling;
pub mod stream;
pub mod verdict;
mod workload;
mod world;

pub use binaries::{nats_server, postgres_bin};
pub use cluster::NatsCluster;
pub use dice::Dice;
pub use nats::{Nats, NatsOptions};
pub use place::free_port;
pub use postgres::{Postgres, PostgresOptions, Stop};
pub use process::{Signal, signal};
pub use proxy::{Mode, Proxy};
pub use relay::Relay;
pub use sampling::Sampling;
pub use workload::{Load, Workload};
pub use world::{Broker, STREAM, World, WorldOptions};

use std::path::Path;

/// What went wrong with a server of the sandbox, in words, with the end of its log.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SandboxError(String);

impl SandboxError {
    pub(crate) fn new(words: impl Into<String>) -> SandboxError {
        SandboxError(words.into())
    }

    pub(crate) fn io(what: &str, path: &Path, error: &std::io::Error) -> SandboxError {
        SandboxError(format!("{what} {}: {error}", path.display()))
    }
}

impl From<tokio_postgres::Error> for SandboxError {
    fn from(error: tokio_postgres::Error) -> SandboxError {
        let words = error.as_db_error().map_or_else(|| error.to_string(), ToString::to_string);
        SandboxError(format!("PostgreSQL: {words}"))
    }
}

/// Result of this module.
pub type Result<T> = std::result::Result<T, SandboxError>;
