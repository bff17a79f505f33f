//! What does not go straight from WAL to lane: the way back from the ledger, and rows that the WAL
//! did not bring. Parts of [`Relay`] and [`Destination`].
//!
//! An event joins its lane, unless its run has numbers waiting outside it; then it joins those.
//! Rows that were missed are older than what waits and join the lane itself.

use hashbrown::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use crate::event::{Event, RunHash};
use crate::lsn::Lsn;
use crate::relay::destination::{Destination, Phase, Step};
use crate::relay::machine::Relay;
use crate::relay::outcome::DestinationId;
use crate::relay::ranges::RangeSet;
use crate::relay::receipts::{Decision, Origin};
use crate::relay::route;
use crate::relay::waiting::Waiter;

/// Numbers taken from those waiting at once: one look-up by index.
const LOAD_NUMBERS: usize = 1_000;
/// Undecided events of a destination below which more of those waiting are read.
const LOAD_BELOW: usize = 2_000;
/// Bytes of rows read at once, at least, if that is an eighth of the budget.
const LOAD_BYTES_MIN: usize = 64 << 10;

/// The first rows of those asked for.
#[derive(Debug, Default)]
pub struct Loaded {
    /// How many of the numbers are accounted for, from the first on; the others wait on.
    pub count: usize,
    /// Their rows, each with its number's place.
    pub events: Vec<Event>,
}

/// A part of what the ledger has waiting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingPart {
    /// In commit order.
    pub waiters: Vec<Waiter>,
    /// The last receipt that was read.
    pub upto: i64,
    /// There was none above it.
    pub complete: bool,
}

/// What became of an event that came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    /// It is in its lane.
    InLane,
    /// It is decided or handed over, and the ledger is to have that.
    ToRecord,
}

/// What was decided or handed over since somebody asked the database, so that an older answer of it
/// is not taken for the present.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    users: u32,
    decided: RangeSet,
    handed: RangeSet,
}

impl Remembered {
    /// A decision.
    pub fn note(&mut self, seq: i64) {
        if self.users > 0 {
            self.decided.insert(seq);
        }
    }

    fn note_handed(&mut self, seq: i64) {
        if self.users > 0 {
            self.handed.insert(seq);
        }
    }
}

impl Destination {
    /// What waits outside the lanes.
    pub fn waiting(&self) -> &crate::relay::waiting::Waiting {
        &self.waiting
    }

    /// From now on remember what is decided.
    pub(super) fn remember(&mut self) {
        let Destination { remembered, decided, writing, .. } = self;
        remembered.users += 1;
        for each in [decided, writing] {
            remembered.decided.extend(each.ranges());
            remembered.handed.extend(each.handed.iter().map(|(seq, _)| (*seq, *seq)));
        }
    }

    /// Nobody needs it any more, or one fewer does.
    pub(super) fn forget(&mut self) {
        self.remembered.users = self.remembered.users.saturating_sub(1);
        if self.remembered.users == 0 {
            self.remembered = Remembered::default();
        }
    }

    /// Is this number decided, recorded or not, or was it since somebody began to remember?
    fn is_done(&self, seq: i64) -> bool {
        self.is_decided(seq) || self.remembered.decided.contains(seq)
    }

    /// Puts an event where it belongs.
    pub(super) fn place(&mut self, now: Instant, event: &Arc<Event>, origin: Origin) -> Placed {
        let seq = event.seq;
        if self.has_letter(event) {
            self.decide_number(seq, origin, Decision::Dead);
        } else if self.is_in_stream(event) {
            self.decide_number(seq, origin, Decision::Published);
        } else if event.fault.is_none() && !route::takes(&self.spec.filter, event) {
            self.counts.unmatched += 1;
            self.decide_number(seq, origin, Decision::Unmatched);
        } else if matches!(origin, Origin::Wal(_)) && self.must_wait(event.run_hash) {
            self.note_handed(seq, event.run_hash, origin);
            let waiter = Waiter { seq, run: event.run_hash, until: origin.until(), old: false };
            self.waiting.hand(waiter, self.recorded_id);
        } else {
            if self.lanes.is_empty() {
                self.moved_at = Some(now);
            }
            self.lanes.push(Arc::clone(event), origin);
            return Placed::InLane;
        }
        Placed::ToRecord
    }

    /// A run that has events of the WAL in its lane when the destination becomes slow as a whole
    /// has nothing outside: what WAL brings of it joins its lane. Handed at once it would be ahead
    /// of them in the ledger, once these are handed over.
    fn must_wait(&self, run: RunHash) -> bool {
        self.waiting.has(run) || (self.waiting.is_slow_as_a_whole() && !self.lanes.has_wal(run))
    }

    /// Has it events that the position may have passed? Their messages in the stream count then,
    /// whatever their LSN.
    pub(super) fn has_handed(&self) -> bool {
        !self.waiting.is_over() || self.lanes.handed() > 0
    }

    pub(super) fn note_handed(&mut self, seq: i64, run: RunHash, origin: Origin) {
        self.counts.handed += 1;
        self.remembered.note_handed(seq);
        self.decided.hand(seq, run, origin);
    }

    /// Resume found these in the stream, and the ledger has them.
    pub(super) fn found(&mut self, seqs: &RangeSet) {
        if self.remembered.users > 0 {
            self.remembered.decided.extend(seqs.iter());
        }
        let found = self.waiting.remove(seqs);
        self.counts.resumed += found as u64;
        self.decided.take_back(seqs);
    }

    /// What was handed over and the ledger does not have yet.
    fn handed_unrecorded(&self) -> impl Iterator<Item = Waiter> + '_ {
        [&self.writing, &self.decided].into_iter().flat_map(|decided| {
            // Handed over, so there is a highest LSN among them.
            let until = decided.last_lsn.unwrap_or(Lsn(u64::MAX));
            let handed = decided.handed.iter();
            handed.map(move |(seq, run)| Waiter { seq: *seq, run: *run, until, old: false })
        })
    }

    /// Does it need memory, to go on with what waits?
    pub(super) fn wants_room(&self) -> bool {
        self.goes_on() && !self.waiting.is_over() && self.waiting.wants()
    }

    /// Is it read from and written to, as far as is known?
    pub fn goes_on(&self) -> bool {
        matches!(self.phase(), Phase::Probe | Phase::Flow)
    }

    fn is_crowded(&self) -> bool {
        self.lanes.len() >= LOAD_BELOW && self.lanes.going_len() >= LOAD_BELOW
    }

    /// What is to be read next so that waiting events come to their lanes.
    pub(super) fn next_waiting(&mut self) -> Option<Step> {
        if !self.wants_room() || self.is_crowded() {
            return None;
        }
        self.waiting.bring_back(|run| !self.lanes.has(run));
        let waiters = self.waiting.take(LOAD_NUMBERS, |run| self.lanes.may_grow(run));
        if !waiters.is_empty() {
            self.remember();
            return Some(Step::Load(waiters));
        }
        self.waiting.shorten(|run| self.lanes.stands(run));
        let unrecorded: Vec<Waiter> = self.handed_unrecorded().collect();
        let after = self.waiting.read(unrecorded.into_iter())?;
        self.remember();
        Some(Step::ReadWaiting(after, self.waiting.read_most()))
    }

    /// Every row is found that no WAL brings, but for some of these runs. A row that is in its lane
    /// can leave it without a trace, or did so since the look began: its run is one of those, too.
    pub(super) fn bridged(&mut self, but: Vec<RunHash>) {
        let mut but: HashSet<RunHash> = but.into_iter().collect();
        but.extend(self.lanes.missed_runs());
        but.extend(&self.let_go);
        self.waiting.bridged(but);
    }

    /// A look through the table begins.
    pub(super) fn sweep_begins(&mut self) {
        self.let_go.clear();
        self.remember();
    }

    pub(super) fn waiting_read(&mut self, part: &WaitingPart) {
        let mut known: HashSet<i64> = self.lanes.numbers().chain(self.waiting.numbers()).collect();
        let done = part.waiters.iter().map(|waiter| waiter.seq).filter(|seq| self.is_done(*seq));
        known.extend(done.collect::<Vec<_>>());
        known.extend(self.waiting.tail().filter(|seq| self.is_done(*seq)).collect::<Vec<_>>());
        self.waiting.was_read(&part.waiters, part.upto, part.complete, &known);
        self.forget();
    }

    pub(super) fn waiting_read_failed(&mut self) {
        self.waiting.read_failed();
        self.forget();
    }

    /// Of these numbers of rows without a receipt, those that are neither decided nor in a lane nor
    /// waiting. They were missed when the WAL has brought all that committed with them, and
    /// everything decided since the rows were looked for is remembered.
    pub fn missed(&self, candidates: &[i64]) -> Vec<i64> {
        let here: HashSet<i64> = self.lanes.numbers().chain(self.waiting.numbers()).collect();
        let missed = |seq: &i64| {
            !here.contains(seq) && !self.is_done(*seq) && !self.remembered.handed.contains(*seq)
        };
        candidates.iter().copied().filter(missed).collect()
    }

    /// Numbers that memory has and the ledger has not: a row of theirs is no find.
    pub fn unrecorded(&self) -> RangeSet {
        let mut numbers: RangeSet = self.lanes.numbers().map(|seq| (seq, seq)).collect();
        for each in [&self.decided, &self.writing] {
            numbers.extend(each.ranges());
            numbers.extend(each.handed.iter().map(|(seq, _)| (*seq, *seq)));
        }
        numbers
    }
}

impl Relay {
    /// Is there room for rows read from the table?
    pub fn has_room(&self) -> bool {
        !self.stopping && self.used_bytes() < self.limits.memory_bytes / 2
    }

    /// Bytes of rows that may be read from the table now: in pieces that leave half of the budget to
    /// the WAL, and none when it is full. The row that reaches it may go beyond.
    pub fn load_bytes(&self) -> usize {
        let (used, most) = (self.used_bytes(), self.limits.memory_bytes);
        if used >= most {
            return 0;
        }
        (most / 2).saturating_sub(used).max(LOAD_BYTES_MIN.min(most / 8))
    }

    /// Events that waited come to their lanes, in their order; one without row is gone.
    pub(super) fn loaded(&mut self, now: Instant, id: DestinationId, loaded: Loaded) {
        let Some(destination) = self.destinations.get_mut(usize::from(id.0)) else { return };
        let rows = loaded.events.into_iter().map(|event| (event.seq, event));
        let mut rows: HashMap<i64, Event> = rows.collect();
        for waiter in destination.waiting.loaded(loaded.count) {
            if destination.is_done(waiter.seq) {
                continue;
            }
            let origin = Origin::Table { until: waiter.until, handed: true };
            let Some(event) = rows.remove(&waiter.seq) else {
                if destination.awaited.take_number(waiter.seq) {
                    destination.counts.resumed += 1;
                    destination.decide_number(waiter.seq, origin, Decision::Published);
                } else {
                    destination.counts.gone += 1;
                    destination.decide_number(waiter.seq, origin, Decision::Gone);
                }
                self.undecided_since.get_or_insert(now);
                continue;
            };
            let bytes = event.budget_bytes();
            match destination.place(now, &Arc::new(event), origin) {
                Placed::InLane => self.held_bytes += bytes,
                Placed::ToRecord => {
                    self.undecided_since.get_or_insert(now);
                }
            }
        }
        destination.forget();
    }

    /// A row that the WAL has not brought joins its lane, ahead of what waits.
    pub(super) fn missed_row(&mut self, now: Instant, id: DestinationId, event: Event, until: Lsn) {
        let Some(destination) = self.destinations.get_mut(usize::from(id.0)) else { return };
        let handed = &destination.remembered.handed;
        if destination.is_done(event.seq) || handed.contains(event.seq) {
            return;
        }
        // The look did not see those that were in the lane when it began: they would come behind.
        if destination.let_go.contains(&event.run_hash) {
            return;
        }
        destination.counts.missed += 1;
        let bytes = event.budget_bytes();
        let origin = Origin::Table { until, handed: false };
        match destination.place(now, &Arc::new(event), origin) {
            Placed::InLane => self.held_bytes += bytes,
            Placed::ToRecord => {
                self.undecided_since.get_or_insert(now);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
