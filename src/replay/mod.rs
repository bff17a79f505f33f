//! Replay: publishes retained events once more, beside the relay. Joins what is there already: rows of
//! the table in the order of a plan ([`crate::store::replay`]), the core, which keeps the order of
//! runs and knows what to do after an unknown outcome, and a publisher. In place of receipts the
//! core's records go to `outbox.replay`. Decides nothing about order.
//!
//! Why no copy after a kill: the core records a floor before the first message leaves; with every
//! step the numbers that are done and the floor go into one row, durably; and whoever goes on reads
//! the stream from that floor to its end for messages with this job's header before it sends any.

mod feed;
mod pace;
mod pump;

pub use pace::Rate;
pub use pump::Replayer;

use crate::event::Fault;
use crate::store::replay::Tally;

/// How a replay ended, where nothing failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Nothing is left.
    Finished,
    /// It was told to stop; everything that was sent is accounted for, as far as there was time.
    Stopped,
    /// The stream was made anew since the job began: what the job sent is gone with the old one.
    Replaced,
}

/// How it goes.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    /// Of the whole job, earlier runs included.
    pub tally: Tally,
    /// Events acknowledged and not yet recorded.
    pub unrecorded: u64,
    /// Why it does not go on, for as long as that is so.
    pub waits: Option<String>,
    /// The first refused events of this run: their numbers, and why.
    pub refused: Vec<(i64, Fault)>,
}
