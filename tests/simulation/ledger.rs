//! The ledger's tables. Everything here is durable.

use std::collections::{BTreeSet, HashMap, HashSet};

use outboxd::event::RunHash;
use outboxd::lsn::Lsn;
use outboxd::relay::machine::WaitingPart;
use outboxd::relay::outcome::Floor;
use outboxd::relay::ranges::RangeSet;
use outboxd::relay::waiting::Waiter;

#[derive(Debug, Clone, Default)]
pub struct Receipt {
    pub destination: usize,
    /// Published, unmatched, dead, gone; of a receipt of what is handed over: its numbers.
    pub seqs: RangeSet,
    /// Handed over, in commit order.
    pub handed: Vec<(i64, RunHash)>,
    pub last_lsn: Option<Lsn>,
    /// `None`: written by somebody else than the relay.
    pub floor: Option<Floor>,
    /// Highest sequence known then of the stream that the floor names.
    pub known: u64,
}

/// Rows were committed that no WAL brings.
#[derive(Debug, Clone)]
pub struct Gap {
    /// Newest receipt when it began: what is handed over up to it goes first.
    pub receipt: i64,
    /// Once there is a slot: the highest number then, and who held a lock.
    pub mark: Option<(i64, HashSet<u64>)>,
}

#[derive(Debug, Default)]
pub struct Ledger {
    /// Receipt n is at n - 1.
    receipts: Vec<Receipt>,
    /// The newest final receipt of each number.
    finals: HashMap<(usize, i64), usize>,
    handed: HashSet<(usize, i64)>,
    pub dead_letters: BTreeSet<(usize, i64)>,
    pub gaps: HashMap<usize, Gap>,
}

/// What a session knows of the ledger when it begins.
#[derive(Debug, Default)]
pub struct Loaded {
    pub recorded: RangeSet,
    pub handed: RangeSet,
    pub to: Lsn,
}

impl Ledger {
    pub fn append(&mut self, receipt: Receipt) {
        let id = self.receipts.len() + 1;
        if receipt.handed.is_empty() {
            for seq in receipt.seqs.iter().flat_map(|(start, end)| start..=end) {
                self.finals.insert((receipt.destination, seq), id);
            }
        }
        let handed = receipt.handed.iter().map(|(seq, _)| (receipt.destination, *seq));
        self.handed.extend(handed);
        self.receipts.push(receipt);
    }

    pub fn newest(&self) -> i64 {
        i64::try_from(self.receipts.len()).unwrap()
    }

    /// The highest number that is final.
    pub fn highest(&self, destination: usize) -> i64 {
        let of = self.finals.keys().filter(|(of, _)| *of == destination);
        of.map(|(_, seq)| *seq).max().unwrap_or(i64::MIN)
    }

    pub fn is_final(&self, destination: usize, seq: i64) -> bool {
        self.finals.contains_key(&(destination, seq))
    }

    /// Final or waiting.
    pub fn is_recorded(&self, destination: usize, seq: i64) -> bool {
        self.is_final(destination, seq) || self.handed.contains(&(destination, seq))
    }

    /// A gap opens while one is open: what was handed over in that one is undecided again. The lowest
    /// number of these.
    pub fn take_back(&mut self, destination: usize, above: i64) -> Option<i64> {
        let mut back = Vec::new();
        let above = usize::try_from(above).unwrap();
        for receipt in self.receipts.iter_mut().skip(above) {
            if receipt.destination == destination && !receipt.handed.is_empty() {
                back.extend(receipt.handed.drain(..).map(|(seq, _)| seq));
                receipt.seqs = RangeSet::default();
            }
        }
        for seq in &back {
            self.handed.remove(&(destination, *seq));
        }
        back.into_iter().filter(|seq| !self.is_final(destination, *seq)).min()
    }

    /// Receipts whose last position is at or above `from`, or unknown.
    pub fn load(&self, destination: usize, from: Lsn) -> Loaded {
        let mut found = Loaded::default();
        for receipt in self.receipts.iter().filter(|each| each.destination == destination) {
            if receipt.seqs.is_empty() || receipt.last_lsn.is_some_and(|last| last < from) {
                continue;
            }
            let set =
                if receipt.handed.is_empty() { &mut found.recorded } else { &mut found.handed };
            set.extend(receipt.seqs.iter());
            found.to = found.to.max(receipt.last_lsn.unwrap_or(Lsn(u64::MAX)));
        }
        found
    }

    /// What waits, in receipts above `after`: whole receipts, until there are `most` numbers.
    pub fn waiting(&self, destination: usize, after: i64, most: usize) -> WaitingPart {
        let (mut waiters, mut upto, mut complete) = (Vec::new(), after, true);
        let old_to = self.gaps.get(&destination).map_or(0, |gap| gap.receipt);
        let above = usize::try_from(after).unwrap();
        for (receipt, id) in self.receipts.iter().zip(1..).skip(above) {
            if receipt.destination != destination || receipt.handed.is_empty() {
                continue;
            }
            if waiters.len() >= most {
                complete = false;
                break;
            }
            upto = i64::try_from(id).unwrap();
            let until = receipt.last_lsn.expect("of what is handed over");
            for (seq, run) in &receipt.handed {
                if self.finals.get(&(destination, *seq)).is_none_or(|last| *last < id) {
                    let old = upto <= old_to;
                    waiters.push(Waiter { seq: *seq, run: *run, until, old });
                }
            }
        }
        WaitingPart { waiters, upto, complete }
    }

    fn latest(&self, destination: usize) -> Option<&Receipt> {
        let mut newest = self.receipts.iter().rev();
        newest.find(|each| each.destination == destination && each.floor.is_some())
    }

    pub fn floor(&self, destination: usize) -> Option<Floor> {
        self.latest(destination).and_then(|each| each.floor.clone())
    }

    pub fn known(&self, destination: usize) -> u64 {
        self.latest(destination).map_or(0, |each| each.known)
    }
}
