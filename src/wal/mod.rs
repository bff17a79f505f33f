//! PostgreSQL in: sockets, TLS, log-in, the paired control connection, and the replication stream
//! with its feedback. Knows no NATS and takes no frame apart.
//!
//! In reading order: [`check_dsn`] says what a connection string means, `connect` tries its servers
//! in turn, `socket`, `tls` and `login` open one connection, `identity` tells whether two reached
//! the same server, [`Control`] runs statements, [`Replication`] starts the stream, and
//! [`WalStream`] reads it while `feedback` decides what to tell the server and when.

mod connect;
mod control;
mod dsn;
mod feedback;
mod handover;
mod identity;
mod login;
mod queue;
mod replication;
mod socket;
mod sqlstate;
mod stream;
mod tls;
mod wire;

pub use connect::{
    Link, Wanted, connect, connect_control, connect_control_to, connect_standbys, connect_to,
    connect_upkeep, connect_upkeep_to,
};
pub use control::Control;
pub use dsn::{Dsn, DsnError, check_dsn};
pub use identity::Identity;
pub use queue::WalItem;
pub use replication::{QUEUE_BYTES, Replication};
pub use sqlstate::failure_of;
pub use stream::WalStream;
