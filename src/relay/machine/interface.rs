//! What goes into the core and what comes out of it. No rule is here.

use std::time::Duration;

use crate::event::{Event, Fault, Reason, RunHash};
use crate::lsn::Lsn;
use crate::message::Message;
use crate::relay::again::{BlockedRun, Redrive};
use crate::relay::destination::LastAcked;
use crate::relay::lanes::Slot;
use crate::relay::outcome::{Answer, Attempt, DestinationId, Floor, Found, ReadFrom, StreamFacts};
use crate::relay::ranges::RangeSet;
use crate::relay::receipts::Decided;
use crate::relay::slow::{Loaded, WaitingPart};
use crate::relay::waiting::{NUMBER_BYTES, Waiter};

/// Bounds, from the configuration.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Events read and undecided, bytes.
    pub memory_bytes: usize,
    /// Longest wait between a decision and its receipt.
    pub receipt_interval: Duration,
    /// Decisions at which a receipt is due at once.
    pub receipt_events: u64,
    /// Numbers that wait outside the lanes and are in memory, of each destination, as far as
    /// [`Limits::waiting_numbers`] allows.
    pub waiting_numbers: usize,
}

impl Limits {
    /// Numbers that wait may fill a quarter of memory; the destinations share it.
    pub fn waiting_numbers(&self, destinations: usize) -> usize {
        let share = self.memory_bytes / 4 / NUMBER_BYTES / destinations.max(1);
        self.waiting_numbers.min(share).max(1)
    }
}

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// First frame of a transaction.
    Begin {
        /// Start of its commit record.
        commit_lsn: Lsn,
    },
    /// An outbox row of the open transaction.
    Event(Event),
    /// Last frame of a transaction.
    Commit {
        /// Where the next one may begin.
        end_lsn: Lsn,
    },
    /// The server has sent everything below this.
    Keepalive {
        /// Its position.
        wal_end: Lsn,
    },
    /// A destination is connected.
    Up(DestinationId, StreamFacts),
    /// A destination has no connection; everything it had is answered.
    Down(DestinationId),
    /// What became of attempts.
    Answer(DestinationId, Answer),
    /// The stream was read from the floor on, and the ledger has what was found.
    Resumed(DestinationId, Verified),
    /// The stream could not be read.
    ResumeFailed(DestinationId),
    /// A burial is durable, or failed.
    Buried(Burial, bool),
    /// The ledger has what [`Action::Record`] asked for, in receipts up to this one.
    Recorded {
        /// Id of the newest receipt written.
        newest: i64,
    },
    /// The first of the rows that [`Action::Load`] asked for.
    Loaded(DestinationId, Loaded),
    /// The rows could not be read.
    LoadFailed(DestinationId),
    /// What [`Action::ReadWaiting`] asked for.
    WaitingRead(DestinationId, WaitingPart),
    /// The ledger could not be read.
    WaitingReadFailed(DestinationId),
    /// A look through the table begins: what is decided from now on is remembered.
    SweepBegins,
    /// The look is over.
    SweepEnds,
    /// A row that the WAL has not brought and won't.
    Missed {
        /// Where it is missing.
        destination: DestinationId,
        /// The row.
        event: Event,
        /// It committed below.
        until: Lsn,
    },
    /// A whole look through the table left no row that the WAL did not bring outside the lanes, but
    /// for those of these runs, and no other can come any more: what waits may go, but behind those
    /// of its own run that are left, in lanes or outside. To be said again after each whole look
    /// until [`crate::relay::waiting::Waiting::missing_runs`] are none.
    Bridged(DestinationId, Vec<RunHash>),
    /// Undecided events hold back more WAL than they may, or no longer.
    WalPressure(bool),
    /// The dead letters' answer to [`crate::relay::Relay::ask_letters`].
    Letters {
        /// Letters to send again.
        again: Vec<Redrive>,
        /// Runs that nothing blocks any more.
        released: Vec<BlockedRun>,
    },
    /// Take nothing new; finish what is in flight.
    Stop,
}

/// What Resume found, after the table confirmed the rows and the ledger has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    /// The stream that was read.
    pub created: String,
    /// Where it ended.
    pub last_seq: u64,
    /// Numbers that are in it.
    pub seqs: RangeSet,
    /// Messages in it whose rows the table does not show.
    pub strangers: Vec<Found>,
    /// Highest commit LSN among them; `None`: not known for all, so they are kept for good.
    pub last_lsn: Option<Lsn>,
    /// Letters whose messages are in it, and whose state says so now.
    pub letters: Vec<i64>,
}

/// Names a burial in its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burial {
    /// Where the event can't go.
    pub destination: DestinationId,
    /// Its number.
    pub seq: i64,
    /// Why.
    pub reason: Reason,
    /// The letter that was sent again, and is to be buried once more.
    pub letter: Option<i64>,
    pub(super) slot: Slot,
}

/// What is to be done.
#[derive(Debug)]
pub enum Action {
    /// Publish, in the order in which these come.
    Send {
        /// Where.
        destination: DestinationId,
        /// To be answered exactly once.
        attempt: Attempt,
        /// What.
        message: Message,
    },
    /// Write to the dead letters, durably, then say so.
    Bury {
        /// For the answer.
        burial: Burial,
        /// The event.
        event: Box<Event>,
        /// What is wrong with it.
        fault: Fault,
        /// How often it was sent.
        attempts: u32,
    },
    /// Read the stream from the floor on.
    Resume {
        /// Which.
        destination: DestinationId,
        /// From where.
        from: ReadFrom,
    },
    /// Write receipts in one synchronous transaction, then say so. One at a time.
    Record(Vec<ReceiptDraft>),
    /// Read the rows of these numbers, or the first of them.
    Load {
        /// For the answer.
        destination: DestinationId,
        /// In the order in which they go.
        waiters: Vec<Waiter>,
        /// Enough is read when the rows have so many bytes.
        max_bytes: usize,
    },
    /// Read the numbers that wait from the ledger, in receipts above this one.
    ReadWaiting {
        /// Whose.
        destination: DestinationId,
        /// Receipt.
        after: i64,
        /// Enough is read with so many numbers; a receipt is read as a whole.
        most: usize,
    },
}

/// One destination's receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiptDraft {
    /// Whose.
    pub destination: DestinationId,
    /// What was decided; empty when only the floor is recorded.
    pub decided: Decided,
    /// Where Resume would start.
    pub floor: Floor,
    /// Newest message known to be stored by an ack.
    pub last: Option<LastAcked>,
    /// Highest stream sequence known, whoever's message it is.
    pub known: u64,
}

/// A frame sequence that PostgreSQL never sends: nothing may be confirmed after it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProtocolViolation(pub String);
