//! The words that core and publishers share: attempts, outcomes, what Resume found. No logic.

use std::time::Duration;

use crate::event::{EventId, Reason, UnixMicros};
use crate::lsn::Lsn;

/// Index of a destination in the configuration's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DestinationId(pub u16);

/// Number of one try to publish one event at one destination. Unique in the life of the process,
/// across reconnects and sessions, so that a late answer can't settle a newer attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt(pub u64);

/// What became of a contiguous row of attempts `first..=last` of one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// First attempt of the row.
    pub first: Attempt,
    /// Last attempt of the row; equal to `first` for a single answer.
    pub last: Attempt,
    /// Holds for each of them.
    pub outcome: Outcome,
}

/// The four things that can become of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// In the stream, as durable as JetStream's ack.
    Stored {
        /// Stream sequence of the last attempt of the row.
        stream_seq: u64,
        /// The server had it already (dedupe window).
        duplicate: bool,
    },
    /// May or may not be in the stream: only the stream itself can tell (Resume).
    Unknown(Doubt),
    /// Surely not in the stream, and the server said why.
    Refused(Refusal),
    /// Surely not in the stream: never left this process, or behind a gap that the server closed.
    NotSent,
}

/// Why an outcome is unknown; label of `outboxd_unknown_outcomes_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Doubt {
    /// No answer within `ack_timeout`.
    Silence,
    /// The connection went away while the answer was due.
    Disconnected,
    /// The server reported a gap in the batch, or abandoned it (10208).
    Gap,
    /// PubAck that proves nothing: `seq` 0, or a replicated batch whose last message is not there.
    Unproven,
    /// Duplicate of a message that is still being decided (10158).
    InProgress,
    /// Any other error of the server.
    ServerError,
}

impl Doubt {
    /// Every cause.
    pub const ALL: &'static [Doubt] = &[
        Doubt::Silence,
        Doubt::Disconnected,
        Doubt::Gap,
        Doubt::Unproven,
        Doubt::InProgress,
        Doubt::ServerError,
    ];

    /// Stable name, as a metric's label.
    pub fn as_str(self) -> &'static str {
        match self {
            Doubt::Silence => "silence",
            Doubt::Disconnected => "disconnected",
            Doubt::Gap => "gap",
            Doubt::Unproven => "unproven",
            Doubt::InProgress => "in_progress",
            Doubt::ServerError => "server_error",
        }
    }
}

/// A refusal by the server or by our own checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Will the same message be refused for ever? Then it is a dead letter with this reason.
    pub permanent: Option<Reason>,
    /// JetStream `err_code`, 0 when it was not a server's answer.
    pub code: u64,
    /// The server's or our own words.
    pub detail: String,
}

/// What a destination announced when it came up; taken anew at every connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamFacts {
    /// Stream name.
    pub stream: String,
    /// The stream's creation time as the server writes it: another value is another stream.
    pub created: String,
    /// Replicas; above 1 a batch's ack needs proof.
    pub replicas: u16,
    /// Which messages it keeps.
    pub retention: Retention,
    /// Highest stream sequence at connect.
    pub last_seq: u64,
    /// Lowest sequence still stored.
    pub first_seq: u64,
    /// Largest message (headers counted) that server *and* stream accept, bytes.
    pub max_message_bytes: usize,
    /// Largest that the server accepts: one above it costs the connection.
    pub max_payload_bytes: usize,
    /// Dedupe window.
    pub duplicate_window: Duration,
    /// nats-server version, e.g. `2.15.1`.
    pub server_version: String,
    /// Chosen pipeline.
    pub pipeline: Pipeline,
    /// Why that one and no faster one; shown by `status`, logged once.
    pub why: String,
}

/// Which messages a stream keeps: with anything but `Limits`, a message that is not there may have
/// been consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Retention {
    /// All, until a limit.
    Limits,
    /// Those that some consumer still wants.
    Interest,
    /// Those that no consumer acknowledged. The server lets nobody else read them.
    WorkQueue,
}

impl Retention {
    /// From the server's word; one that is not known is taken for the default.
    pub fn of(word: &str) -> Retention {
        match word {
            "interest" => Retention::Interest,
            "workqueue" => Retention::WorkQueue,
            _ => Retention::Limits,
        }
    }
}

/// Ways to publish in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pipeline {
    /// Fast-ingest batches (ADR-50): any number of events of a run in flight.
    Batch,
    /// Plain publishes, each behind the one before it: any number of events of a run in flight.
    Sequence,
    /// Plain publishes: one event of a run in flight.
    PerRun,
}

impl Pipeline {
    /// Is a run's next event sent before the one before it is stored?
    pub fn sends_ahead(self) -> bool {
        match self {
            Pipeline::Batch | Pipeline::Sequence => true,
            Pipeline::PerRun => false,
        }
    }

    /// Stable name as in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Pipeline::Batch => "batch",
            Pipeline::Sequence => "sequence",
            Pipeline::PerRun => "per-run",
        }
    }
}

/// Where Resume starts: everything at or below `seq` of the stream made at `created` is known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Floor {
    /// The stream's creation time; empty when nothing was ever recorded.
    pub created: String,
    /// Stream sequence.
    pub seq: u64,
}

/// A message of ours that is known to be stored, and where.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Anchor {
    /// Stream sequence.
    pub seq: u64,
    /// Its `Nats-Msg-Id`.
    pub id: String,
}

/// What Resume is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadFrom {
    /// Where to start.
    pub floor: Floor,
    /// Highest sequence known of the stream that the floor names: if it ends below, it lost
    /// messages that were acknowledged, or whoever answers does not have them.
    pub known: u64,
    /// The newest message of ours that is known to be in that stream: where another one is in its
    /// place, the stream was put back to an older state and went on from there.
    pub newest: Option<Anchor>,
    /// Everything committed below this is decided and recorded, so that nobody asks for it.
    pub confirmable: Lsn,
}

/// One message of ours that Resume saw in the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// `Outbox-Seq`.
    pub seq: i64,
    /// From `Nats-Msg-Id`, in the form the table's id column has.
    pub id: EventId,
    /// `Outbox-Lsn`; absent when only the slow path saw the event.
    pub commit_lsn: Option<Lsn>,
    /// `Outbox-Generation`.
    pub generation: i32,
    /// `Outbox-Created-At`.
    pub created_at: Option<UnixMicros>,
    /// Its stream sequence.
    pub stream_seq: u64,
    /// `Outbox-Redriven`: the dead letter that it was sent from.
    pub letter: Option<i64>,
}

/// Result of reading the stream from the floor to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumed {
    /// The stream read.
    pub created: String,
    /// Nothing of ours at or below it is unknown any more: where reading ended, or the floor when
    /// there was nothing to read. The stream itself may go on behind it.
    pub last_seq: u64,
    /// Our messages between floor and end that may not be recorded yet, in stream order, copies of
    /// replays left out.
    pub found: Vec<Found>,
}
