//! One outbox row as every layer sees it. Owns the event's bytes; knows neither PostgreSQL's wire
//! format nor NATS.

use bytes::Bytes;
use std::fmt;

use crate::lsn::Position;

/// The identity that consumers see: one id is one event.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EventId {
    /// A `uuid` column.
    Uuid(uuid::Uuid),
    /// A `bigint`, `integer` or `smallint` column: unique only within this outbox, so the message
    /// id carries the relay's name and the generation as well.
    Int(i64),
    /// A `text` or `varchar` column.
    Text(Box<str>),
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EventId::Uuid(id) => id.fmt(f),
            EventId::Int(id) => id.fmt(f),
            EventId::Text(id) => id.fmt(f),
        }
    }
}

/// Microseconds since 1970-01-01 UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct UnixMicros(pub i64);

/// Why a row can never become a message, found before anything was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which rule it breaks.
    pub reason: Reason,
    /// What was found, for a person: names the column and quotes a short, printable form.
    pub detail: String,
    /// JetStream's error code, when the server refused the message.
    pub server_code: Option<u64>,
}

impl Fault {
    /// A fault that was found here.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Fault {
        Fault { reason, detail: detail.into(), server_code: None }
    }
}

/// How an event gets out of the dead letters and into the stream after all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WayOut {
    /// Mend what the detail names, then redrive the letter.
    Redrive,
    /// The row itself can't become a message, whatever is mended: write another one.
    Rewrite,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident $code:literal $way_out:ident $remedy:literal;)*) => {
        /// Reasons of dead letters: the closed list that metrics and `outbox.dead_letter.reason`
        /// use. What fails by itself is in [`crate::error`]; these are about one event, and their
        /// fate is always the same: the event becomes a dead letter.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// Every reason, in the table's order.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)*];

            /// Stable lower-case name, as stored and as a metric's label.
            pub fn as_str(self) -> &'static str {
                match self { $(Reason::$name => $code,)* }
            }

            /// Can the letter itself be sent again?
            pub fn way_out(self) -> WayOut {
                match self { $(Reason::$name => WayOut::$way_out,)* }
            }

            /// What the operator can do.
            pub fn remedy(self) -> &'static str {
                match self { $(Reason::$name => $remedy,)* }
            }
        }
    };
}

reasons! {
    /// A column is missing, NULL where it must not be (`id`, `kind`), empty (`kind`), or has a
    /// value that can't be read.
    Unmappable "unmappable" Rewrite
        "mend the table or whoever writes such rows, write the event anew, and discard the letter";
    /// Headers and body together are larger than what server (`max_payload`) and stream
    /// (`max_msg_size`) accept now, or the headers are over 65,535 bytes.
    TooLarge "too_large" Redrive
        "raise max_msg_size of the stream or max_payload of the server and redrive the letter; or write a smaller event and discard it";
    /// The template needs a value that is NULL or empty, or the subject has more than 1,024 bytes.
    Subject "subject" Redrive
        "change `subject` of the destination, restart the relay and redrive the letter; or write another event and discard it";
    /// A header that must not be sent: a name that is reserved or no name, a value with a control
    /// character.
    Header "header" Redrive
        "mend whoever writes such rows, write the event anew, and discard the letter; redrive it only when the rule itself has changed";
}

impl Reason {
    /// The reason of that name.
    pub fn named(name: &str) -> Option<Reason> {
        Reason::ALL.iter().copied().find(|reason| reason.as_str() == name)
    }
}

/// 64-bit FNV-1a of the ordering key, or of the sequence number for a row without one. Two runs of
/// one hash share a lane: slower, never wrong. The ledger stores it, so the function is fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunHash(pub u64);

impl RunHash {
    /// Hash of an ordering key.
    pub fn of_run(run: &[u8]) -> RunHash {
        RunHash(fnv1a(0xcbf2_9ce4_8422_2325, run))
    }

    /// As PostgreSQL's `bigint` stores it: the same 64 bits.
    pub fn signed(self) -> i64 {
        self.0.cast_signed()
    }

    /// Reads it back from a `bigint`.
    pub fn of_signed(hash: i64) -> RunHash {
        RunHash(hash.cast_unsigned())
    }

    /// A row without an ordering key waits for nobody: it has a lane of its own.
    pub fn of_seq(seq: i64) -> RunHash {
        RunHash(fnv1a(fnv1a(0xcbf2_9ce4_8422_2325, b"\0seq"), &seq.to_be_bytes()))
    }
}

fn fnv1a(start: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// One committed outbox row.
///
/// Strings and payload are slices of one buffer that holds this row only: an event that waits for
/// hours pins its own bytes and nothing else.
#[derive(Debug, Clone)]
pub struct Event {
    /// The table's sequence number.
    pub seq: i64,
    /// Absent when only the slow path saw the row.
    pub position: Option<Position>,
    /// Identity.
    pub id: EventId,
    /// Ordering key; `None` is a row without order.
    pub run: Option<Bytes>,
    /// Hash of `run`, or of `seq`.
    pub run_hash: RunHash,
    /// Kind of event (valid UTF-8).
    pub kind: Bytes,
    /// Tenant (valid UTF-8).
    pub tenant: Option<Bytes>,
    /// Schema version of the payload.
    pub version: Option<i32>,
    /// Untouched body; `None` is SQL NULL, a tombstone.
    pub payload: Option<Bytes>,
    /// The row's own headers: a JSON object's text, not yet parsed.
    pub headers: Option<Bytes>,
    /// When the row says it was made.
    pub created_at: Option<UnixMicros>,
    /// Commit time of its transaction, by the database's clock; for latency figures.
    pub committed_at: Option<UnixMicros>,
    /// Set when the row can't become a message; it goes to the dead letters in its turn.
    pub fault: Option<Fault>,
}

/// Bookkeeping per event beside its bytes: struct, `Arc`, lane entry and transaction entry.
pub const EVENT_OVERHEAD_BYTES: usize = 600;

impl Event {
    /// What this event counts for in the memory budget.
    pub fn budget_bytes(&self) -> usize {
        let part = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        EVENT_OVERHEAD_BYTES
            + self.kind.len()
            + part(&self.run)
            + part(&self.tenant)
            + part(&self.payload)
            + part(&self.headers)
    }

    /// A text column; columns are checked to be UTF-8 when the event is made.
    pub fn text(bytes: &Bytes) -> &str {
        std::str::from_utf8(bytes).unwrap_or("\u{fffd}")
    }
}
