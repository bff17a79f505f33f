//! What is decided and not yet recorded, per destination: the next receipt in the making.

use crate::event::RunHash;
use crate::lsn::Lsn;
use crate::relay::ranges::RangeSet;
use crate::relay::watermark::TxnId;

/// Who brought an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The WAL: a transaction waits for the event.
    Wal(TxnId),
    /// The table.
    Table {
        /// It committed at or below.
        until: Lsn,
        /// The ledger has it as waiting.
        handed: bool,
    },
    /// A dead letter that is sent again: its number is decided, and stays so whatever comes of it.
    Letter {
        /// Number of the letter.
        letter: i64,
        /// It committed at or below; zero when no WAL showed it.
        until: Lsn,
    },
}

impl Origin {
    /// WAL from above brings the event no more.
    pub fn until(self) -> Lsn {
        match self {
            Origin::Wal(TxnId(lsn))
            | Origin::Table { until: lsn, .. }
            | Origin::Letter { until: lsn, .. } => lsn,
        }
    }

    /// The dead letter that it comes from.
    pub fn letter(self) -> Option<i64> {
        match self {
            Origin::Letter { letter, .. } => Some(letter),
            Origin::Wal(_) | Origin::Table { .. } => None,
        }
    }
}

/// How a number was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// In the stream, by an ack or by Resume.
    Published,
    /// In the dead letters, durably.
    Dead,
    /// The destination's filter does not take it.
    Unmatched,
    /// Its row went away while it was waiting.
    Gone,
}

/// One destination's share of what a ledger write records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decided {
    /// Published and unmatched numbers together, so that their ranges stay contiguous.
    pub published: RangeSet,
    /// Dead letters.
    pub dead: RangeSet,
    /// Numbers whose rows went away.
    pub gone: RangeSet,
    /// Letters that were sent again and are in the stream now.
    pub letters: Vec<i64>,
    /// Decided behind a higher number of their run: each with the number behind which it belongs.
    pub late: Vec<(i64, i64)>,
    /// Handed over, in commit order. Not decided, and to be recorded like decisions.
    pub handed: Vec<(i64, RunHash)>,
    /// How many were published.
    pub published_events: u64,
    /// How many were unmatched.
    pub unmatched_events: u64,
    /// How many are dead letters.
    pub dead_events: u64,
    /// How many are gone.
    pub gone_events: u64,
    /// Lowest commit LSN among them.
    pub first_lsn: Option<Lsn>,
    /// Highest commit LSN among them.
    pub last_lsn: Option<Lsn>,
    /// Transactions that wait for this write, and for how many events.
    pub waiting: Vec<(TxnId, u64)>,
}

impl Decided {
    /// One more decision.
    pub fn add(&mut self, seq: i64, origin: Origin, decision: Decision) {
        match decision {
            Decision::Published => {
                self.published.insert(seq);
                self.published_events += 1;
                self.letters.extend(origin.letter());
            }
            Decision::Unmatched => {
                self.published.insert(seq);
                self.unmatched_events += 1;
            }
            Decision::Dead => {
                self.dead.insert(seq);
                self.dead_events += 1;
            }
            Decision::Gone => {
                self.gone.insert(seq);
                self.gone_events += 1;
            }
        }
        self.count(origin);
    }

    /// One more that is handed over.
    pub fn hand(&mut self, seq: i64, run: RunHash, origin: Origin) {
        self.handed.push((seq, run));
        self.count(origin);
    }

    /// Some of those that are handed over are final in the ledger. What waits for the next receipt
    /// goes on to wait for it.
    pub fn take_back(&mut self, seqs: &RangeSet) {
        self.handed.retain(|(seq, _)| !seqs.contains(*seq));
    }

    fn count(&mut self, origin: Origin) {
        self.last_lsn = self.last_lsn.max(Some(origin.until()));
        let Origin::Wal(txn) = origin else { return };
        let lsn = txn.0;
        self.first_lsn = Some(self.first_lsn.map_or(lsn, |first| first.min(lsn)));
        match self.waiting.last_mut() {
            Some((last, count)) if *last == txn => *count += 1,
            _ => self.waiting.push((txn, 1)),
        }
    }

    /// Is this number decided here?
    pub fn has(&self, seq: i64) -> bool {
        [&self.published, &self.dead, &self.gone].iter().any(|set| set.contains(seq))
    }

    /// The decided numbers as ranges; they can overlap.
    pub fn ranges(&self) -> impl Iterator<Item = (i64, i64)> + '_ {
        [&self.published, &self.dead, &self.gone].into_iter().flat_map(RangeSet::iter)
    }

    /// How many decisions, and how many handed over.
    pub fn len(&self) -> u64 {
        let decided = self.published_events + self.unmatched_events + self.dead_events;
        decided + self.gone_events + self.handed.len() as u64
    }

    /// None, and nothing that waits for a receipt?
    pub fn is_empty(&self) -> bool {
        self.len() == 0 && self.waiting.is_empty()
    }
}
