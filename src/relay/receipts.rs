//! What is decided and not yet recorded, per destination: the next receipt in the making.

use crate::lsn::Lsn;
use crate::relay::ranges::RangeSet;
use crate::relay::watermark::TxnId;

/// How a number was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// In the stream, by an ack or by Resume.
    Published,
    /// In the dead letters, durably.
    Dead,
    /// The destination's filter does not take it.
    Unmatched,
}

/// One destination's share of what a ledger write records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decided {
    /// Published and unmatched numbers together, so that their ranges stay contiguous.
    pub published: RangeSet,
    /// Dead letters.
    pub dead: RangeSet,
    /// How many were published.
    pub published_events: u64,
    /// How many were unmatched.
    pub unmatched_events: u64,
    /// How many are dead letters.
    pub dead_events: u64,
    /// Lowest commit LSN among them.
    pub first_lsn: Option<Lsn>,
    /// Highest commit LSN among them.
    pub last_lsn: Option<Lsn>,
    /// Transactions that wait for this write, and for how many events.
    pub waiting: Vec<(TxnId, u64)>,
}

impl Decided {
    /// One more decision.
    pub fn add(&mut self, seq: i64, txn: Option<TxnId>, decision: Decision) {
        match decision {
            Decision::Published => {
                self.published.insert(seq);
                self.published_events += 1;
            }
            Decision::Unmatched => {
                self.published.insert(seq);
                self.unmatched_events += 1;
            }
            Decision::Dead => {
                self.dead.insert(seq);
                self.dead_events += 1;
            }
        }
        let Some(txn) = txn else { return };
        let lsn = txn.0;
        self.first_lsn = Some(self.first_lsn.map_or(lsn, |first| first.min(lsn)));
        self.last_lsn = self.last_lsn.max(Some(lsn));
        match self.waiting.last_mut() {
            Some((last, count)) if *last == txn => *count += 1,
            _ => self.waiting.push((txn, 1)),
        }
    }

    /// How many decisions.
    pub fn len(&self) -> u64 {
        self.published_events + self.unmatched_events + self.dead_events
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
