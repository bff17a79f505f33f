//! Runs that wait behind a dead letter, for as long as an operator takes: memory holds none of their
//! numbers, so that they leave room for those of others. When such a run goes on, the ledger is read
//! again.

use super::{Turn, Waiter, Waiting};
use crate::event::RunHash;

impl Waiting {
    /// Nothing of this run will be taken until it is said; its numbers leave memory.
    pub fn park(&mut self, run: RunHash) {
        self.parked.entry(run).or_insert(None);
        let Some(turns) = self.runs.remove(&run) else { return };
        if let Some(first) = turns.front() {
            self.fronts.remove(&first.ordinal);
        }
        self.len -= turns.len();
        self.old -= turns.iter().filter(|turn| turn.waiter.old).count();
        self.leave_out(run, 0);
    }

    /// The run goes on.
    pub fn unpark(&mut self, run: RunHash) {
        self.barren = false;
        let Some(Some(after)) = self.parked.remove(&run) else { return };
        // Those of before the gap may be among them.
        self.old_beyond |= self.misses(run);
        if self.reading {
            self.read_again = Some(self.read_again.map_or(after, |first| first.min(after)));
        } else {
            self.beyond = Some(self.beyond.map_or(after, |first| first.min(after)));
        }
    }

    /// Has a parked run numbers in the ledger?
    pub(super) fn is_left_out(&self, run: RunHash) -> bool {
        !self.parked.is_empty() && self.parked.get(&run).is_some_and(Option::is_some)
    }

    /// Parked runs that have numbers in the ledger.
    pub(super) fn left_out(&self) -> usize {
        self.parked.values().filter(|after| after.is_some()).count()
    }

    /// A number that is not to be kept, since its run is parked; the ledger has it, or will have it,
    /// in a receipt above `after`.
    pub(super) fn keeps_out(&mut self, waiter: &Waiter, after: i64) -> bool {
        let parked = !self.parked.is_empty() && self.parked.contains_key(&waiter.run);
        if parked {
            self.leave_out(waiter.run, after);
        }
        parked
    }

    fn leave_out(&mut self, run: RunHash, after: i64) {
        if let Some(first) = self.parked.get_mut(&run) {
            *first = Some(first.map_or(after, |first| first.min(after)));
        }
    }

    /// The same for one that was in memory already: its receipt may be any.
    pub(super) fn keeps_turn_out(&mut self, turn: &Turn) -> bool {
        self.keeps_out(&turn.waiter, 0)
    }
}
