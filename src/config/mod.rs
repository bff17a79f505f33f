//! What the user configured, checked and complete: every fault is found here, before anything is
//! opened. Owns keys, defaults and units; opens nothing but the configuration file.
//!
//! In reading order: `keys` is the table of all keys, `form` how a value is read; `file` and
//! `overlay` say what was given (`given`), `read` and `cross` what it means; `fault`, `show` and
//! `reference` are for people.

mod cross;
mod fault;
mod file;
mod form;
mod given;
pub mod keys;
mod load;
mod overlay;
mod read;
pub mod reference;
mod rules;
pub mod show;
mod units;

pub use fault::{Fault, Faults, Origin};
pub use form::{Form, Raw};
pub use load::{Loaded, Places};
pub use overlay::variable;
pub use read::Shown;
pub use units::duration;

use secrecy::SecretString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The whole configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// `[relay]`
    pub relay: RelayConfig,
    /// `[source]`
    pub source: SourceConfig,
    /// `[destination.NAME]`, in the file's order; at least one.
    pub destinations: Vec<DestinationConfig>,
    /// `[retention]`
    pub retention: RetentionConfig,
    /// `[dead_letters]`
    pub dead_letters: DeadLetterConfig,
    /// `[admin]`
    pub admin: AdminConfig,
    /// `[log]`
    pub log: LogConfig,
    /// `[health]`
    pub health: HealthConfig,
}

/// What a message on its way takes beside its event: a map of about ten headers. Measured, rounded
/// down: the row's own headers count with the event.
const MESSAGE_BYTES: usize = 2 << 10;

impl Config {
    /// Part of `memory` for events that are read and not yet decided.
    pub fn event_bytes(&self) -> usize {
        self.relay.memory_bytes - self.message_bytes()
    }

    /// Part of `memory` for messages on their way, of all destinations.
    fn message_bytes(&self) -> usize {
        self.relay.memory_bytes / 4
    }

    /// Events of a destination that may be sent and unanswered: its own limit, as far as `memory`
    /// allows.
    pub fn max_in_flight(&self, destination: &DestinationConfig) -> usize {
        let share = self.message_bytes() / self.destinations.len().max(1);
        destination.max_in_flight.min(share / MESSAGE_BYTES).max(1)
    }
}

/// `[relay]`
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// `Outbox-Relay`, the lock's name, and the default of slot and publication.
    pub name: String,
    /// Memory for events and their messages, bytes (`memory`, default 32 MiB).
    pub memory_bytes: usize,
    /// How long a stop waits for acks before it leaves (`shutdown_timeout`, default 10 s).
    pub shutdown_timeout: Duration,
    /// Longest time between an ack and its receipt (`receipt_interval`, default 100 ms).
    pub receipt_interval: Duration,
    /// A receipt is written at this many decided events at the latest (`receipt_events`, 10,000).
    pub receipt_events: usize,
    /// Is the WAL read (`stream`, default true)?
    pub stream: bool,
    /// Is a missing or lost slot made (`auto_recreate`, default true)?
    pub auto_recreate: bool,
    /// Silence after which a standby ends the holder's sessions (`take_over_after`, absent).
    pub take_over_after: Option<Duration>,
    /// Time between two looks through the table (`sweep_interval`, default 1 m).
    pub sweep_interval: Duration,
    /// WAL that undecided events may hold back (`max_retained_wal`, default 1 GiB).
    pub max_retained_wal_bytes: u64,
}

/// `[source]`
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// libpq URL or keyword DSN (session pooling breaks the lock).
    pub url: SecretString,
    /// Used in place of `url` by everything that connects, where a pooler is in the way.
    pub replication_url: Option<SecretString>,
    /// Slot name, default `outboxd_<relay name>` with `-` and `.` as `_`.
    pub slot: String,
    /// Publication name, same default.
    pub publication: String,
    /// Schema-qualified outbox table, default `outbox.event`.
    pub table: QualifiedName,
    /// Names of the columns that carry an event.
    pub columns: ColumnMap,
    /// What the table itself shows of what is done (`mark`, default `ledger`).
    pub mark: Mark,
    /// Deadline for TCP connect, TLS, authentication, and each start-up statement (10 s).
    pub connect_timeout: Duration,
}

/// `mark`: the ledger alone decides; this is what it leaves in the table for others to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mark {
    /// Nothing: rows are not touched.
    #[default]
    Ledger,
    /// The time in a column.
    Column,
    /// The row goes.
    Delete,
}

/// A schema-qualified relation name, unquoted parts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct QualifiedName {
    /// Schema.
    pub schema: String,
    /// Relation.
    pub name: String,
}

/// Which column of the outbox table carries what; the defaults are those of `outbox.event`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnMap {
    /// bigint, from a sequence with CACHE 1.
    pub seq: String,
    /// uuid, an integer type, or text.
    pub id: String,
    /// text; the ordering key.
    pub run: String,
    /// text.
    pub kind: String,
    /// json, jsonb, text or bytea.
    pub payload: String,
    /// text; may be absent from the table.
    pub tenant: Option<String>,
    /// integer; may be absent.
    pub version: Option<String>,
    /// jsonb or json object of strings; may be absent.
    pub headers: Option<String>,
    /// timestamptz; may be absent.
    pub created_at: Option<String>,
    /// timestamptz: when the row was done, with [`Mark::Column`]; read by `outboxd adopt`.
    pub published_at: String,
}

impl QualifiedName {
    /// Is it the table that our schema brings?
    pub fn is_outbox_event(&self) -> bool {
        (self.schema.as_str(), self.name.as_str()) == ("outbox", "event")
    }
}

impl Default for ColumnMap {
    fn default() -> Self {
        let name = str::to_owned;
        ColumnMap {
            seq: name("seq"),
            id: name("id"),
            run: name("run_id"),
            kind: name("kind"),
            payload: name("payload"),
            tenant: Some(name("tenant")),
            version: Some(name("version")),
            headers: Some(name("headers")),
            created_at: Some(name("created_at")),
            published_at: name("published_at"),
        }
    }
}

/// `[destination.NAME]`
#[derive(Debug, Clone)]
pub struct DestinationConfig {
    /// NAME: a word of letters, digits, `_` and `-`.
    pub name: String,
    /// nats:// or tls:// URLs.
    pub servers: Vec<String>,
    /// JetStream stream that must store every message (`Nats-Expected-Stream`).
    pub stream: String,
    /// Subject template, default `events.{kind}`; checked by [`crate::message::Template`].
    pub subject: crate::message::Template,
    /// Which events go there; empty lists take all.
    pub filter: Filter,
    /// Governs readiness and health (default true).
    pub required: bool,
    /// Which pipeline to use.
    pub pipeline: PipelineChoice,
    /// Does nobody else write the stream?
    pub exclusive: bool,
    /// What becomes of a run whose event can't be published.
    pub on_dead_letter: OnDeadLetter,
    /// Silence that makes an outcome unknown (5 s).
    pub ack_timeout: Duration,
    /// Events sent and unanswered at most (10,000).
    pub max_in_flight: usize,
    /// Message id carries the destination's name, since another destination may share the stream.
    pub shares_stream: bool,
    /// How to log in.
    pub auth: NatsAuth,
    /// TLS files and switch.
    pub tls: NatsTls,
    /// `inbox_prefix`, default `_INBOX`.
    pub inbox_prefix: Option<String>,
    /// `js_domain`.
    pub js_domain: Option<String>,
    /// Stream settings that `init` uses when it is told to create the stream.
    pub create: StreamCreate,
}

/// Events a destination takes. Patterns are literal but for `*`, which stands for any text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Patterns of `kind`.
    pub kinds: Vec<String>,
    /// Patterns of `tenant`; a row without tenant matches only an empty list.
    pub tenants: Vec<String>,
}

/// `pipeline`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PipelineChoice {
    /// The fastest that server and stream allow.
    #[default]
    Auto,
    /// Batches or nothing.
    Batch,
    /// Each message behind the one before it, or nothing.
    Sequence,
    /// One event of a run in flight.
    PerRun,
}

/// `on_dead_letter`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDeadLetter {
    /// The run goes on with its next event.
    #[default]
    Continue,
    /// The run waits until the letter is redriven or discarded.
    BlockRun,
}

/// Credentials; secrets come from files, read at each connect.
#[derive(Debug, Clone, Default)]
pub struct NatsAuth {
    /// `.creds` file with JWT and seed.
    pub creds_file: Option<PathBuf>,
    /// Seed of an nkey.
    pub nkey_file: Option<PathBuf>,
    /// User name, with `password_file`.
    pub user: Option<String>,
    /// File that holds the password.
    pub password_file: Option<PathBuf>,
    /// File that holds a token.
    pub token_file: Option<PathBuf>,
}

/// TLS towards NATS.
#[derive(Debug, Clone, Default)]
pub struct NatsTls {
    /// Refuse plain text even for nats:// URLs.
    pub required: bool,
    /// CA bundle, PEM; the platform's store when absent.
    pub ca_file: Option<PathBuf>,
    /// Client certificate, PEM.
    pub cert_file: Option<PathBuf>,
    /// Client key, PEM.
    pub key_file: Option<PathBuf>,
}

impl DestinationConfig {
    /// Do both write one stream of one NATS system, as far as the configuration can tell?
    pub fn is_beside(&self, other: &DestinationConfig) -> bool {
        let servers = |one: &DestinationConfig| {
            let mut servers = one.servers.clone();
            servers.sort_unstable();
            servers
        };
        self.stream == other.stream
            && self.js_domain == other.js_domain
            && servers(self) == servers(other)
    }
}

/// `[destination.NAME.create]`
#[derive(Debug, Clone, Default)]
pub struct StreamCreate {
    /// Does `init` create the stream when it is missing?
    pub enabled: bool,
    /// Replicas (1).
    pub replicas: u16,
    /// Limit in bytes; unlimited when absent.
    pub max_bytes: Option<i64>,
    /// Limit of age; unlimited when absent.
    pub max_age: Option<Duration>,
    /// Dedupe window (2 min, or `max_age` if that is shorter).
    pub duplicate_window: Option<Duration>,
}

/// `[retention]`
#[derive(Debug, Clone)]
pub struct RetentionConfig {
    /// How long a row stays after it is final for every required destination; `None`: for ever.
    pub keep: Option<Duration>,
    /// Are rows and partitions the relay's business?
    pub manage: bool,
    /// How far ahead partitions are made.
    pub ahead: Duration,
    /// How often all this is looked after.
    pub every: Duration,
}

impl RetentionConfig {
    /// Are rows removed at all?
    pub fn removes_rows(&self) -> bool {
        self.manage && self.keep.is_some()
    }
}

/// `[dead_letters]`
#[derive(Debug, Clone)]
pub struct DeadLetterConfig {
    /// How long closed letters are kept; `None`: for ever.
    pub retention: Option<Duration>,
}

/// `[admin]`
#[derive(Debug, Clone)]
pub struct AdminConfig {
    /// Address of health, metrics and status; `None` when `listen = "off"`.
    pub listen: Option<SocketAddr>,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// `text` or `json`.
    pub format: LogFormat,
    /// Filter as of tracing's `EnvFilter`, e.g. `info,outboxd=debug`.
    pub level: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For a person.
    Text,
    /// One JSON object per line.
    Json,
}

/// `[health]`
#[derive(Debug, Clone)]
pub struct HealthConfig {
    /// `/healthz` is red when the oldest undecided event is older (60 s).
    pub max_lag: Duration,
}

#[cfg(test)]
mod tests;
