//! What a destination is configured as, where it stands, and what it counted. No logic.

use hashbrown::HashMap;
use std::collections::BTreeMap;
use std::time::Instant;

use crate::config::Filter;
use crate::event::{EventId, RunHash};
use crate::lsn::{Lsn, Position};
use crate::message::Envelope;
use crate::relay::outcome::{Anchor, Floor};
use crate::relay::ranges::RangeSet;
use crate::relay::waiting::Waiter;

/// What the core must know of a destination.
#[derive(Debug, Clone)]
pub struct DestinationSpec {
    /// Its name in the configuration.
    pub name: String,
    /// What it takes.
    pub filter: Filter,
    /// How its messages look.
    pub envelope: Envelope,
    /// Events sent and unanswered at most.
    pub max_in_flight: usize,
    /// Numbers that the ledger has already, from the watermark on.
    pub recorded: RangeSet,
    /// Highest commit LSN among them: WAL beyond it brings none of them.
    pub recorded_to: Lsn,
    /// The ledger's floor; `None` when this destination was never connected.
    pub floor: Option<Floor>,
    /// Highest stream sequence that the ledger has seen, in the stream that the floor names.
    pub recorded_known: u64,
    /// The newest message that the ledger names, in that stream.
    pub recorded_newest: Option<Anchor>,
    /// Highest number that the ledger has as decided; `i64::MIN` when it has none.
    pub highest: i64,
    /// Newest receipt of it.
    pub recorded_id: i64,
    /// Numbers that the ledger has as handed over, final since or not, and that WAL may bring again.
    pub handed: RangeSet,
    /// Those that are not final, in commit order, as many as were read.
    pub waiting: Vec<Waiter>,
    /// The ledger has more of them, in receipts above this one.
    pub waiting_beyond: Option<i64>,
    /// Rows were committed that no WAL will bring: what WAL brings waits until they are found.
    pub gap: bool,
    /// Its dead letters.
    pub letters: Letters,
}

impl DestinationSpec {
    /// A destination of which the ledger knows nothing, and which takes every event.
    pub fn new(name: &str, envelope: Envelope, max_in_flight: usize) -> DestinationSpec {
        DestinationSpec {
            name: name.to_owned(),
            filter: Filter::default(),
            envelope,
            max_in_flight,
            recorded: RangeSet::default(),
            recorded_to: Lsn::ZERO,
            floor: None,
            recorded_known: 0,
            recorded_newest: None,
            highest: i64::MIN,
            recorded_id: 0,
            handed: RangeSet::default(),
            waiting: Vec::new(),
            waiting_beyond: None,
            gap: false,
            letters: Letters::default(),
        }
    }
}

/// What the core must know of a destination's dead letters.
#[derive(Debug, Clone, Default)]
pub struct Letters {
    /// Does a run wait behind the dead letter of its event?
    pub blocks_runs: bool,
    /// Runs that wait, each with the number and the position of the event in the letter.
    pub blocked: Vec<(RunHash, i64, Option<Position>)>,
    /// Events that have their letter, and no receipt yet: the letter is durable first. By number,
    /// with their ids as text.
    pub buried: HashMap<i64, String>,
}

/// Where a destination stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// No usable connection.
    Down,
    /// First connect ever: the floor must be in the ledger before the first send.
    RecordFloor,
    /// Resume is due, once the clock is there and nothing is in flight.
    ResumeAt {
        /// `None`: at once.
        at: Option<Instant>,
        /// The broker is proven: go on afterwards.
        proven: bool,
    },
    /// The stream is being read.
    Resuming {
        /// The broker is proven: go on afterwards.
        proven: bool,
    },
    /// One event alone, until its ack is not a duplicate.
    Probe,
    /// Everything that may be sent is sent.
    Flow,
    /// An outcome is unknown, or a batch ended early: nothing is sent until the rest is answered.
    Drain {
        /// The broker is proven: nothing is unknown, only a batch has to begin anew.
        proven: bool,
        /// Back off before Resume.
        wait: bool,
    },
}

impl Phase {
    /// Stable name for status.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Down => "down",
            Phase::RecordFloor => "first-connect",
            Phase::ResumeAt { .. } | Phase::Resuming { .. } => "resuming",
            Phase::Probe => "probing",
            Phase::Flow => "flowing",
            Phase::Drain { .. } => "draining",
        }
    }
}

/// Counted since the session began; the pump turns differences into metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Attempts handed to the publisher.
    pub sent: u64,
    /// Events final by an ack.
    pub acked: u64,
    /// Undecided events that Resume found in the stream.
    pub resumed: u64,
    /// Acks that said "duplicate".
    pub duplicates: u64,
    /// Events that the filter did not take.
    pub unmatched: u64,
    /// Decisions recorded.
    pub recorded: u64,
    /// Events handed over: they wait in the ledger, and their rows in the table.
    pub handed: u64,
    /// Rows that the WAL did not bring, found in the table.
    pub missed: u64,
    /// Events whose rows went away while they waited.
    pub gone: u64,
    /// Dead letters that were sent again and are in the stream.
    pub redriven: u64,
    /// Refusals that may heal.
    pub refusals: u64,
    /// Unknown outcomes by cause.
    pub doubts: BTreeMap<&'static str, u64>,
    /// Dead letters by reason.
    pub dead: BTreeMap<&'static str, u64>,
}

/// The newest message known to be in the stream; a receipt names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastAcked {
    /// Its stream sequence.
    pub stream_seq: u64,
    /// Its event.
    pub id: EventId,
}
