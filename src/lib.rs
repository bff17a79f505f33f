//! outboxd streams the inserts of a PostgreSQL outbox table into NATS JetStream: in commit order,
//! losing nothing, without polling and without marking rows.
//!
//! ```text
//!                 ┌────────────────────────── run: session, pump ──────────────────────────┐
//!  PostgreSQL ──► wal ──► decode ──► relay (route → lanes → watermark) ──► publish ──► JetStream
//!       ▲          ▲                   │        ▲                             │
//!       │          └── confirm LSN ────┤        └────── answers, Resume ──────┘
//!       └── store: receipts, dead ─────┘
//!           letters, lock
//! ```
//!
//! One event can be followed by opening one module after the other: [`wal`] → [`decode`] →
//! [`relay`] → [`publish`] → [`relay`] → [`store`] → [`wal`]. The pump in [`mod@run`] is the only
//! junction.
//!
//! # What always holds
//!
//! * **Only receipts decide.** An event is done when the ledger says so: published, dead, unmatched.
//! * **Ack, receipt, confirm: in that order.** The slot moves over a contiguous prefix of
//!   transactions whose events are decided and recorded, never over anything else
//!   ([`relay::watermark`]).
//! * **One lane per destination and run**, first in, first out. After a failure the lane starts
//!   again at its first undecided event ([`relay::lanes`]).
//! * **An unknown outcome is answered by the stream itself.** Start, reconnect, timeout and refusal
//!   lead to Resume, one event alone, Resume, and only then to more ([`relay::destination`]).
//! * **One writer**: the session that holds the advisory lock of the relay's name
//!   ([`store::lock`]).
//! * **Memory is bounded by configured bytes**, not by transactions or outages
//!   ([`Relay::wants_wal`](relay::Relay::wants_wal)).
//!
//! # Modules
//!
//! Nouns: [`lsn`], [`event`], [`message`], [`error`], [`config`]. Pure: [`decode`], [`relay`].
//! I/O: [`wal`] (PostgreSQL's WAL), [`publish`] (NATS), [`store`] (SQL), [`admin`] (HTTP).
//! Joints: [`mod@run`], [`replay`], [`upkeep`], [`commands`], [`cli`]. [`sandbox`] starts throw-away servers for the demo and
//! the tests.
//!
//! # As a library
//!
//! An application can run the relay as a task of its own: see [`run()`].

pub mod admin;
pub mod cli;
pub mod commands;
pub mod config;
pub mod decode;
pub mod error;
pub mod event;
pub mod finding;
pub mod logging;
pub mod lsn;
pub mod message;
pub mod publish;
pub mod relay;
pub mod replay;
pub mod run;
pub mod sandbox;
pub mod store;
pub mod upkeep;
pub mod wal;

pub use run::run;
