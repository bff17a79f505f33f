//! Runs that have numbers which the ledger alone keeps, so that they leave room for those of others:
//! all of a run that waits behind a dead letter, for as long as an operator takes, and all but the
//! first of one that stands still while memory is full. When such a run goes on, the ledger is read
//! again.

use super::{Turn, Waiter, Waiting};
use crate::event::RunHash;

/// Of `limit` numbers, how many memory keeps of runs that stand still when it is full: one of so many.
const KEPT_OF_LIMIT: usize = 4;

impl Waiting {
    /// Nothing of this run will be taken until it is said; its numbers leave memory.
    pub fn park(&mut self, run: RunHash) {
        let short = self.short.remove(&run).is_some();
        self.parked.entry(run).or_insert(None);
        self.returning.retain(|returns| *returns != run);
        let turns = self.runs.remove(&run);
        if let Some(turns) = &turns {
            if let Some(first) = turns.front() {
                self.fronts.remove(&first.ordinal);
            }
            self.len -= turns.len();
            self.old -= turns.iter().filter(|turn| turn.waiter.old).count();
        }
        if short || turns.is_some() {
            self.leave_out(run, 0);
        }
    }

    /// The run goes on; but not before a reading came to the ledger's end, which is not begun anew
    /// for it, and brings what comes later than what the run has outside.
    pub fn unpark(&mut self, run: RunHash) {
        self.barren = false;
        if self.beyond.is_some() {
            self.returning.push(run);
        } else {
            self.come_back(run);
        }
    }

    /// The ledger was read to its end.
    pub(super) fn take_back(&mut self) {
        for run in std::mem::take(&mut self.returning) {
            self.come_back(run);
        }
    }

    fn come_back(&mut self, run: RunHash) {
        let (after, old) = match self.short.remove(&run) {
            Some(old) => (Some(0), old),
            None => (self.parked.remove(&run).flatten(), true),
        };
        // Those of before the gap may be among them.
        self.old_beyond |= old && after.is_some() && self.misses(run);
        self.beyond = self.beyond.into_iter().chain(after).min();
    }

    /// The ledger has more than memory has room for, and what can be taken may be there: of runs
    /// that stand still, as `stands` says, memory keeps the first numbers alone.
    pub fn shorten(&mut self, stands: impl Fn(RunHash) -> bool) {
        let full = self.beyond.is_some() && self.len > self.limit / 2;
        if !full || self.reading || !self.loading.is_empty() {
            return;
        }
        // While any run's rows are looked for, those who wait for them are no reason to read on:
        // what comes later waits as well.
        let runs = self.runs.keys().copied();
        let runs: Vec<RunHash> =
            runs.filter(|run| self.holds(*run) || self.misses_one(*run) || stands(*run)).collect();
        let keep = self.limit / KEPT_OF_LIMIT / runs.len().max(1);
        for run in runs {
            let Some(turns) = self.runs.get_mut(&run).filter(|turns| turns.len() > keep) else {
                continue;
            };
            let first = turns.front().map(|turn| turn.ordinal);
            let gone = turns.split_off(keep);
            if keep == 0 {
                self.runs.remove(&run);
                first.and_then(|first| self.fronts.remove(&first));
            }
            let old = gone.iter().filter(|turn| turn.waiter.old).count();
            self.len -= gone.len();
            self.old -= old;
            *self.short.entry(run).or_default() |= old > 0;
        }
    }

    /// Runs that were cut short are read again when nothing of them is left, here or in a lane
    /// (`empty`): what was kept of them was sent.
    pub fn bring_back(&mut self, empty: impl Fn(RunHash) -> bool) {
        if self.short.is_empty() || self.beyond.is_some() {
            return;
        }
        let here = |run| self.runs.contains_key(&run) || self.is_loading(run) || self.holds(run);
        let may_go = |run, old| old || !self.misses(run);
        let short = self.short.iter().map(|(run, old)| (*run, *old));
        let back = short.filter(|(run, old)| may_go(*run, *old) && !here(*run) && empty(*run));
        for run in back.map(|(run, _)| run).collect::<Vec<_>>() {
            self.come_back(run);
        }
    }

    /// Has the run numbers that memory has not?
    pub(super) fn is_left_out(&self, run: RunHash) -> bool {
        let parked = || self.parked.get(&run).is_some_and(Option::is_some);
        let short = !self.short.is_empty() && self.short.contains_key(&run);
        short || (!self.parked.is_empty() && parked())
    }

    /// Can some of them be from before a gap?
    pub(super) fn may_have_old_outside(&self, run: RunHash) -> bool {
        self.is_left_out(run) && self.short.get(&run).is_none_or(|old| *old)
    }

    /// Has any run?
    pub(super) fn has_left_out(&self) -> bool {
        !self.short.is_empty() || self.parked.values().any(Option::is_some)
    }

    /// Runs that have numbers in the ledger alone.
    pub(super) fn left_out(&self) -> usize {
        let nowhere_else =
            |run: &&RunHash| !self.runs.contains_key(*run) && !self.is_loading(**run);
        let parked = self.parked.values().filter(|after| after.is_some()).count();
        parked + self.short.keys().filter(nowhere_else).count()
    }

    /// A number that is not to be kept behind what memory has of its run; the ledger has it, or will
    /// have it, in a receipt above `after`.
    pub(super) fn keeps_out(&mut self, waiter: &Waiter, after: i64) -> bool {
        if !self.short.is_empty()
            && let Some(old) = self.short.get_mut(&waiter.run)
        {
            *old |= waiter.old;
            return true;
        }
        self.is_parked(waiter.run) && {
            self.leave_out(waiter.run, after);
            true
        }
    }

    /// The same for one that goes ahead of what memory has of its run: its receipt may be any.
    pub(super) fn keeps_turn_out(&mut self, turn: &Turn) -> bool {
        self.is_parked(turn.waiter.run) && {
            self.leave_out(turn.waiter.run, 0);
            true
        }
    }

    fn is_parked(&self, run: RunHash) -> bool {
        !self.parked.is_empty() && self.parked.contains_key(&run)
    }

    fn leave_out(&mut self, run: RunHash, after: i64) {
        if let Some(first) = self.parked.get_mut(&run) {
            *first = Some(first.map_or(after, |first| first.min(after)));
        }
    }
}
