//! Runs that have numbers which the ledger alone keeps, so that they leave room for those of others:
//! all of a run that waits behind a dead letter, for as long as an operator takes, and all but the
//! first of one that stands still while memory is full. When such a run goes on, the ledger is read
//! again.

use super::{Turn, Waiter, Waiting};
use crate::event::RunHash;

/// Of `limit` numbers, how many memory keeps of runs that stand still when it is full: one of so many.
const KEPT_OF_LIMIT: usize = 4;

/// What memory has not of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outside {
    /// A receipt below all of it; `None`: there is nothing.
    after: Option<i64>,
    /// None of its numbers is kept, until it is said.
    whole: bool,
}

impl Waiting {
    /// Nothing of this run will be taken until it is said; its numbers leave memory.
    pub fn park(&mut self, run: RunHash) {
        let outside = self.outside.entry(run).or_insert(Outside { after: None, whole: true });
        outside.whole = true;
        self.returning.retain(|returns| *returns != run);
        let Some(turns) = self.runs.remove(&run) else { return };
        if let Some(first) = turns.front() {
            self.fronts.remove(&first.ordinal);
        }
        self.len -= turns.len();
        self.old -= turns.iter().filter(|turn| turn.waiter.old).count();
        self.leave_out(run, 0);
    }

    /// The run goes on. Not before a reading ends that is under way: it may have begun behind what
    /// memory has not, and brings what comes later.
    pub fn unpark(&mut self, run: RunHash) {
        self.barren = false;
        if self.reading {
            self.returning.push(run);
            return;
        }
        let Some(Outside { after: Some(after), whole }) = self.outside.remove(&run) else { return };
        // Those of before the gap may be among them.
        self.old_beyond |= whole && self.misses(run);
        self.beyond = Some(self.beyond.map_or(after, |first| first.min(after)));
    }

    /// A reading ended.
    pub(super) fn take_back(&mut self) {
        self.barren = false;
        std::mem::take(&mut self.returning).into_iter().for_each(|run| self.unpark(run));
    }

    /// The ledger has more than memory has room for. What can be taken may be there: of runs that
    /// stand still, as `stands` says, memory keeps the first numbers alone. Those of before a gap
    /// stay.
    pub fn shorten(&mut self, stands: impl Fn(RunHash) -> bool) {
        let full = self.beyond.is_some() && self.len > self.limit / 2;
        if !full || self.reading || !self.loading.is_empty() {
            return;
        }
        let runs = self.runs.keys().copied();
        let runs: Vec<RunHash> = runs
            .filter(|run| self.held.contains_key(run) || self.misses(*run) || stands(*run))
            .collect();
        let keep = self.limit / KEPT_OF_LIMIT / runs.len().max(1);
        for run in runs {
            let Some(turns) = self.runs.get_mut(&run) else { continue };
            let (before, first) = (turns.len(), turns.front().map(|turn| turn.ordinal));
            while turns.len() > keep && turns.back().is_some_and(|turn| !turn.waiter.old) {
                turns.pop_back();
            }
            let (after, none) = (turns.len(), turns.is_empty());
            if after == before {
                continue;
            }
            if none {
                self.runs.remove(&run);
                first.and_then(|first| self.fronts.remove(&first));
            }
            self.len -= before - after;
            self.outside.entry(run).or_insert(Outside { after: None, whole: false });
            self.leave_out(run, 0);
        }
    }

    /// Runs that were cut short, and of which nothing is left here, are read again as soon as they
    /// can be taken.
    pub(super) fn bring_back(&mut self, ready: impl Fn(RunHash) -> bool) {
        if self.outside.is_empty() || self.reading {
            return;
        }
        let goes = |run| !self.runs.contains_key(&run) && !self.held.contains_key(&run);
        let short = self.outside.iter().filter(|(_, outside)| !outside.whole);
        let back = short.map(|(run, _)| *run).filter(|run| goes(*run) && ready(*run));
        back.collect::<Vec<_>>().into_iter().for_each(|run| self.unpark(run));
    }

    /// Has the run numbers that memory has not?
    pub(super) fn is_left_out(&self, run: RunHash) -> bool {
        self.outside_of(run).is_some_and(|outside| outside.after.is_some())
    }

    /// Can some of them be from before a gap?
    pub(super) fn may_have_old_outside(&self, run: RunHash) -> bool {
        self.outside_of(run).is_some_and(|outside| outside.whole && outside.after.is_some())
    }

    /// Runs that have numbers in the ledger alone.
    pub(super) fn left_out(&self) -> usize {
        let nowhere_else = |run: &RunHash| !self.runs.contains_key(run) && !self.is_loading(*run);
        let outside = self.outside.iter();
        outside.filter(|(run, outside)| outside.after.is_some() && nowhere_else(run)).count()
    }

    fn outside_of(&self, run: RunHash) -> Option<&Outside> {
        if self.outside.is_empty() { None } else { self.outside.get(&run) }
    }

    /// A number that is not to be kept behind what memory has of its run; the ledger has it, or will
    /// have it, in a receipt above `after`.
    pub(super) fn keeps_out(&mut self, waiter: &Waiter, after: i64) -> bool {
        let outside = self.outside_of(waiter.run);
        let out = outside.is_some_and(|outside| outside.whole || !waiter.old);
        if out {
            self.leave_out(waiter.run, after);
        }
        out
    }

    /// The same for one that goes ahead of what memory has of its run: its receipt may be any.
    pub(super) fn keeps_turn_out(&mut self, turn: &Turn) -> bool {
        let out = self.outside_of(turn.waiter.run).is_some_and(|outside| outside.whole);
        if out {
            self.leave_out(turn.waiter.run, 0);
        }
        out
    }

    fn leave_out(&mut self, run: RunHash, after: i64) {
        if let Some(outside) = self.outside.get_mut(&run) {
            outside.after = Some(outside.after.map_or(after, |first| first.min(after)));
        }
    }
}
