//! Numbers that are handed over: the ledger has them as waiting, in commit order with the hashes of
//! their runs, so the position may pass them; their events are read from the table when their turn
//! comes. Owns the order among them, and says which runs are slow because of them.
//!
//! Memory holds so many numbers at most. Beyond that the destination is slow as a whole: whatever
//! WAL brings is handed, and the numbers are read back from the ledger, behind a receipt's id.

mod outside;

use hashbrown::{HashMap, HashSet};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::event::RunHash;
use crate::lsn::Lsn;
use crate::relay::ranges::RangeSet;

/// Numbers in memory at which a destination becomes slow as a whole, at most.
pub const NUMBERS_MAX: usize = 50_000;
/// What a number takes, with a run of its own.
pub const NUMBER_BYTES: usize = 160;

/// A number that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiter {
    /// The event.
    pub seq: i64,
    /// Its run.
    pub run: RunHash,
    /// It committed at or below.
    pub until: Lsn,
    /// Handed over before the gap began: goes ahead of what is missing.
    pub old: bool,
}

/// Whose rows are still being looked for that no WAL brings: what WAL brings of them waits behind.
#[derive(Debug)]
enum Bridge {
    /// Any run's.
    All,
    /// Those of these runs, which take none at the moment; of none when the gap is bridged.
    Of(HashSet<RunHash>),
}

#[derive(Debug, Clone, Copy)]
struct Turn {
    ordinal: i64,
    waiter: Waiter,
}

/// The numbers that one destination has waiting.
#[derive(Debug)]
pub struct Waiting {
    runs: HashMap<RunHash, VecDeque<Turn>>,
    /// First turn of each run.
    fronts: BTreeMap<i64, RunHash>,
    len: usize,
    old: usize,
    /// Ordinals of the last put in front, and behind.
    front: i64,
    back: i64,
    /// Taken, and their events not here yet.
    loading: Vec<Turn>,
    loading_runs: HashSet<RunHash>,
    /// The ledger has more, in receipts above this one.
    beyond: Option<i64>,
    reading: bool,
    /// Handed while the ledger is read: what it may not have shown.
    tail: Vec<Waiter>,
    bridge: Bridge,
    /// What the ledger has beyond may be from before the gap.
    old_beyond: bool,
    /// Nothing that could be taken was found; until something changes there is no use in looking.
    barren: bool,
    /// Runs whose lanes waited for the clock when they were handed over: nothing of them is taken
    /// before that time, so that a run that is refused goes on to wait, and others get past it.
    held: HashMap<RunHash, Instant>,
    held_until: Option<Instant>,
    /// Numbers in memory at which the destination becomes slow as a whole.
    limit: usize,
    /// Runs whose numbers are not kept; those that have some, with a receipt below all of them.
    parked: HashMap<RunHash, Option<i64>>,
    /// Runs of which only the first numbers are kept; are there any from before the gap behind them?
    short: HashMap<RunHash, bool>,
    /// Of both, runs that go on as soon as the ledger was read to its end.
    returning: Vec<RunHash>,
}

impl Waiting {
    /// `known`: what the ledger has, in its order; `beyond`: the receipt behind which it has more.
    /// `limit`: numbers in memory.
    pub fn new(known: &[Waiter], beyond: Option<i64>, bridging: bool, limit: usize) -> Waiting {
        let mut waiting = Waiting {
            runs: HashMap::new(),
            fronts: BTreeMap::new(),
            len: 0,
            old: 0,
            front: 0,
            back: 0,
            loading: Vec::new(),
            loading_runs: HashSet::new(),
            beyond,
            reading: false,
            tail: Vec::new(),
            bridge: if bridging { Bridge::All } else { Bridge::Of(HashSet::new()) },
            old_beyond: bridging && beyond.is_some() && known.iter().all(|waiter| waiter.old),
            barren: false,
            held: HashMap::new(),
            held_until: None,
            limit,
            parked: HashMap::new(),
            short: HashMap::new(),
            returning: Vec::new(),
        };
        known.iter().for_each(|waiter| waiting.append(*waiter));
        waiting
    }

    /// Must an event of this run wait?
    pub fn is_slow(&self, run: RunHash) -> bool {
        self.is_slow_as_a_whole() || self.has(run)
    }

    /// Has this run numbers in memory, or is it known to have some outside?
    pub fn has(&self, run: RunHash) -> bool {
        let here = self.runs.contains_key(&run) || self.is_loading(run);
        here || self.is_left_out(run) || self.misses_one(run)
    }

    /// Are events of this run being read from the table?
    pub fn is_loading(&self, run: RunHash) -> bool {
        self.loading_runs.contains(&run)
    }

    /// Must every event wait?
    pub fn is_slow_as_a_whole(&self) -> bool {
        self.is_bridging() || self.beyond.is_some()
    }

    /// Are rows of any run still being looked for that no WAL brings?
    pub fn is_bridging(&self) -> bool {
        matches!(self.bridge, Bridge::All)
    }

    /// Are rows of this run?
    pub fn misses(&self, run: RunHash) -> bool {
        self.is_bridging() || self.misses_one(run)
    }

    fn misses_one(&self, run: RunHash) -> bool {
        matches!(&self.bridge, Bridge::Of(runs) if !runs.is_empty() && runs.contains(&run))
    }

    /// Runs of which rows are still being looked for, while others go on.
    pub fn missing_runs(&self) -> usize {
        match &self.bridge {
            Bridge::All => 0,
            Bridge::Of(runs) => runs.len(),
        }
    }

    /// Does nothing wait, and need nothing wait?
    pub fn is_over(&self) -> bool {
        let nothing_here = self.len == 0 && self.loading.is_empty();
        let nobody_waits = || self.missing_runs() == 0 && !self.has_left_out();
        nothing_here && !self.is_slow_as_a_whole() && nobody_waits()
    }

    /// Does this run wait for what was handed over before the gap began, as far as is known?
    pub fn has_old(&self, run: RunHash) -> bool {
        let old = |turn: &Turn| turn.waiter.old;
        let loading = || self.loading.iter().any(|turn| turn.waiter.run == run && old(turn));
        let waits = || self.runs.get(&run).is_some_and(|turns| turns.iter().any(old));
        self.old_beyond || self.may_have_old_outside(run) || loading() || (self.old > 0 && waits())
    }

    /// Runs that are slow, as far as memory knows.
    pub fn slow_runs(&self) -> usize {
        let whole = usize::from(self.is_slow_as_a_whole() && self.runs.is_empty());
        let here = self.runs.len().max(whole).max(usize::from(!self.loading.is_empty()));
        let Bridge::Of(missing) = &self.bridge else { return here + self.left_out() };
        let elsewhere = |run: &&RunHash| {
            !self.runs.contains_key(*run) && !self.is_loading(**run) && !self.is_left_out(**run)
        };
        here + self.left_out() + missing.iter().filter(elsewhere).count()
    }

    /// Numbers in memory.
    pub fn len(&self) -> usize {
        self.len + self.loading.len()
    }

    /// None in memory?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What they take of the budget.
    pub fn bytes(&self) -> usize {
        self.len().saturating_add(self.tail.len()).saturating_mul(NUMBER_BYTES)
    }

    /// The numbers in memory, but for the tail.
    pub fn numbers(&self) -> impl Iterator<Item = i64> + '_ {
        let waiting = self.runs.values().flatten().chain(&self.loading);
        waiting.map(|turn| turn.waiter.seq)
    }

    /// Numbers handed over while the ledger is read.
    pub fn tail(&self) -> impl Iterator<Item = i64> + '_ {
        self.tail.iter().map(|waiter| waiter.seq)
    }

    /// One more, behind all others; `recorded`: newest receipt that the ledger has for sure.
    pub fn hand(&mut self, waiter: Waiter, recorded: i64) {
        if self.keeps_out(&waiter, recorded) {
            return;
        }
        if self.beyond.is_none() && self.len >= self.limit {
            self.beyond = Some(recorded);
            self.barren = false;
        }
        match self.beyond {
            None => self.append(waiter),
            Some(_) if self.reading => self.tail.push(waiter),
            Some(_) => {}
        }
    }

    fn append(&mut self, waiter: Waiter) {
        self.barren = false;
        self.back += 1;
        let turn = Turn { ordinal: self.back, waiter };
        self.len += 1;
        self.old += usize::from(waiter.old);
        let turns = self.runs.entry(waiter.run).or_default();
        if turns.is_empty() {
            self.fronts.insert(turn.ordinal, waiter.run);
        }
        turns.push_back(turn);
    }

    /// These come before all others, in this order.
    pub fn put_first(&mut self, waiters: impl DoubleEndedIterator<Item = Waiter>) {
        for waiter in waiters.rev() {
            self.front -= 1;
            let turn = Turn { ordinal: self.front, waiter };
            if !self.keeps_turn_out(&turn) {
                self.prepend(turn);
            }
        }
    }

    fn prepend(&mut self, turn: Turn) {
        self.barren = false;
        self.len += 1;
        self.old += usize::from(turn.waiter.old);
        let turns = self.runs.entry(turn.waiter.run).or_default();
        if let Some(first) = turns.front() {
            self.fronts.remove(&first.ordinal);
        }
        self.fronts.insert(turn.ordinal, turn.waiter.run);
        turns.push_front(turn);
    }

    /// Takes up to `most` numbers whose events are to be read from the table, in order, of runs
    /// that `ready` names. Nothing while others are being read, or while rows are looked for that
    /// go ahead of them.
    pub fn take(&mut self, most: usize, ready: impl Fn(RunHash) -> bool) -> Vec<Waiter> {
        if self.barren || !self.loading.is_empty() {
            return Vec::new();
        }
        let mut after = i64::MIN;
        while self.loading.len() < most {
            let Some((&ordinal, &run)) = self.fronts.range(after..).next() else { break };
            after = ordinal + 1;
            if !ready(run) || self.holds(run) {
                continue;
            }
            let old_only = self.misses(run);
            let Some(turns) = self.runs.get_mut(&run) else { continue };
            // Up to the turn of the next run, so that commit order is kept between runs, too.
            let next = self.fronts.range(after..).next().map_or(i64::MAX, |(&next, _)| next);
            self.fronts.remove(&ordinal);
            while let Some(turn) = turns.front().copied()
                && self.loading.len() < most
                && turn.ordinal < next
                && (turn.waiter.old || !old_only)
            {
                turns.pop_front();
                self.old -= usize::from(turn.waiter.old);
                self.len -= 1;
                self.loading.push(turn);
                self.loading_runs.insert(run);
            }
            match turns.front() {
                None => self.runs.remove(&run).map_or((), drop),
                Some(first) => self.fronts.insert(first.ordinal, run).map_or((), drop),
            }
        }
        self.barren = self.loading.is_empty();
        self.loading.iter().map(|turn| turn.waiter).collect()
    }

    /// The first `count` of those taken were read, or are known not to be there; the others wait
    /// on. Returns the first ones.
    pub fn loaded(&mut self, count: usize) -> Vec<Waiter> {
        let mut turns = std::mem::take(&mut self.loading);
        self.loading_runs.clear();
        let rest = turns.split_off(count.min(turns.len()));
        for turn in rest.into_iter().rev() {
            if !self.keeps_turn_out(&turn) {
                self.prepend(turn);
            }
        }
        turns.into_iter().map(|turn| turn.waiter).collect()
    }

    /// May there be something to take, or to read from the ledger?
    pub fn wants(&self) -> bool {
        let some = self.len > 0 || !self.short.is_empty();
        let takes = some && !self.barren && self.loading.is_empty();
        takes || (self.beyond.is_some() && !self.reading && self.len <= self.limit / 2)
    }

    /// Nothing of this run is to be taken before `until`.
    pub fn hold(&mut self, run: RunHash, until: Instant) {
        self.held.insert(run, until);
        self.held_until = Some(self.held_until.map_or(until, |first| first.min(until)));
    }

    /// Lets go of the runs whose time has come.
    pub fn release(&mut self, now: Instant) {
        if self.held_until.is_some_and(|first| first <= now) {
            self.held.retain(|_, until| *until > now);
            self.held_until = self.held.values().min().copied();
            self.barren = false;
        }
    }

    /// Is nothing of this run to be taken now?
    pub fn holds(&self, run: RunHash) -> bool {
        !self.held.is_empty() && self.held.contains_key(&run)
    }

    /// When the next run may be taken again.
    pub fn held_until(&self) -> Option<Instant> {
        self.held_until
    }

    /// How many numbers are to be read from the ledger at once.
    pub fn read_most(&self) -> usize {
        (self.limit / 2).max(1)
    }

    /// Something changed: lanes may have room.
    pub fn look_again(&mut self) {
        self.barren = false;
    }

    /// These are final: nothing of them is to be read. Says how many there were.
    pub fn remove(&mut self, seqs: &RangeSet) -> usize {
        if seqs.is_empty() || self.len == 0 {
            return 0;
        }
        self.barren = false;
        let before = self.len;
        let mut left: Vec<Turn> = self.runs.drain().flat_map(|(_, turns)| turns).collect();
        left.retain(|turn| !seqs.contains(turn.waiter.seq));
        left.sort_unstable_by_key(|turn| turn.ordinal);
        self.fronts.clear();
        (self.len, self.old) = (0, 0);
        left.into_iter().rev().for_each(|turn| self.prepend(turn));
        before - self.len
    }

    /// Every row is found that no WAL brings, but for those of these runs. What WAL brought of the
    /// others goes on; a run that had none any more at an earlier time has none now.
    pub fn bridged(&mut self, mut but: HashSet<RunHash>) {
        if let Bridge::Of(before) = &self.bridge {
            but.retain(|run| before.contains(run));
        }
        self.bridge = Bridge::Of(but);
        self.barren = false;
    }

    /// From which receipt on the ledger is to be read, if it is time to.
    pub fn read(&mut self, unrecorded: impl Iterator<Item = Waiter>) -> Option<i64> {
        let after = self.beyond.filter(|_| !self.reading && self.len <= self.limit / 2)?;
        self.reading = true;
        self.tail = unrecorded.collect();
        Some(after)
    }

    /// The ledger was read up to a receipt; `complete`: it had no more then. Those that are `known`
    /// are here already, or final.
    pub fn was_read(
        &mut self,
        waiters: &[Waiter],
        upto: i64,
        complete: bool,
        known: &HashSet<i64>,
    ) {
        self.reading = false;
        self.beyond = Some(upto).filter(|_| !complete);
        self.old_beyond &= !complete && waiters.iter().all(|waiter| waiter.old);
        let tail = std::mem::take(&mut self.tail);
        let tail = tail.iter().filter(|_| complete);
        let mut seen = HashSet::new();
        for waiter in waiters.iter().chain(tail) {
            let new = !known.contains(&waiter.seq) && seen.insert(waiter.seq);
            if new && !self.keeps_out(waiter, 0) {
                self.append(*waiter);
            }
        }
        self.barren = false;
        if self.beyond.is_none() {
            self.take_back();
        }
    }

    /// The ledger could not be read.
    pub fn read_failed(&mut self) {
        self.reading = false;
        self.tail.clear();
    }
}

#[cfg(test)]
mod tests;
