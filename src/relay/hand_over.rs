//! Hand-over: whose events leave memory, or stop holding back WAL, when there is not enough of it.
//! Parts of [`Relay`] and [`Destination`].

use std::time::{Duration, Instant};

use crate::event::RunHash;
use crate::relay::destination::{Destination, Phase};
use crate::relay::lanes::{Entry, Left};
use crate::relay::machine::{Relay, let_go};
use crate::relay::receipts::Origin;
use crate::relay::waiting::Waiter;

/// A destination without a single decision for so long, with events to decide, stands still.
const STANDSTILL: Duration = Duration::from_secs(2);
/// How often it is looked for what can be handed over, since that looks at every lane.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A destination that has not decided within this time what it had lags. Less is an ordinary backlog.
const LAG: Duration = Duration::from_secs(10);
/// A destination has much more to do than another one with so many times its undecided events.
const MUCH_MORE: usize = 4;

/// Which lanes are handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// Those that wait for the clock or behind a dead letter.
    Idle,
    /// All.
    All,
}

impl Destination {
    /// Is nothing decided though there is something to decide? When it is only some runs that are
    /// refused, others could go on, and may be in the WAL; so can they when all that is left waits
    /// behind dead letters.
    fn stands_still(&self, now: Instant) -> bool {
        let moves = self.moved_at.is_some_and(|at| now < at + STANDSTILL);
        let only_runs = || self.phase() == Phase::Flow && self.lanes.going_len() == 0;
        self.lanes.len() > self.lanes.blocked_len()
            && !moves
            && (self.is_hopeless() || !only_runs())
    }

    /// Which of its lanes can be handed over?
    fn reach(&self, now: Instant) -> Reach {
        if self.stands_still(now) { Reach::All } else { Reach::Idle }
    }

    /// Has it had events for so long that others should not wait for them? It has when of those that
    /// it had at an earlier look some are still there. Asked at each look while memory is short.
    fn lags(&mut self, now: Instant) -> bool {
        let oldest = self.lanes.oldest().map(Entry::ordinal);
        let since =
            self.crowded.filter(|(_, newest)| oldest.is_some_and(|oldest| oldest < *newest));
        let (since, _) = *self.crowded.insert(since.unwrap_or((now, self.lanes.next_ordinal())));
        now >= since + LAG
    }

    /// Hands lanes over; `wal`: only those that hold back WAL. The events leave memory and wait in
    /// the ledger, but for those in flight.
    ///
    /// Missed rows are let go without a receipt: it would have them behind what waits already. The
    /// next look through the table finds them again.
    fn hand_over(&mut self, reach: Reach, wal: bool, held_bytes: &mut usize) -> bool {
        let mut runs = self.lanes.idle_runs(reach == Reach::All, wal);
        runs.retain(|(run, _)| !self.waiting.is_loading(*run));
        let mut entries: Vec<Entry> = Vec::new();
        let mut handed: Vec<(u64, i64, RunHash, Origin)> = Vec::new();
        for (run, until) in runs {
            let Left { kept, gone } = self.lanes.leave(run);
            handed
                .extend(kept.into_iter().map(|(ordinal, seq, origin)| (ordinal, seq, run, origin)));
            entries.extend(gone);
            until.into_iter().for_each(|until| self.waiting.hold(run, until));
        }
        entries.sort_by_key(Entry::ordinal);
        let mut waiters = Vec::with_capacity(entries.len());
        let some = !entries.is_empty() || !handed.is_empty();
        for entry in entries {
            let (seq, run, origin) = (entry.event.seq, entry.event.run_hash, entry.origin);
            match origin {
                // Letters have their place outside: they are read again when there is room.
                Origin::Letter { .. } => {}
                Origin::Table { handed: false, .. } => drop(self.let_go.insert(run)),
                Origin::Wal(_) | Origin::Table { handed: true, .. } => {
                    // Only what is older than the gap comes to a lane from the ledger before the
                    // run's missed rows do.
                    let old = self.waiting.misses(run);
                    waiters.push(Waiter { seq, run, until: origin.until(), old });
                    if matches!(origin, Origin::Wal(_)) {
                        handed.push((entry.ordinal(), seq, run, origin));
                    }
                }
            }
            let_go(held_bytes, entry);
        }
        handed.sort_unstable_by_key(|(ordinal, ..)| *ordinal);
        for (_, seq, run, origin) in handed {
            self.note_handed(seq, run, origin);
        }
        self.waiting.put_first(waiters.into_iter());
        some
    }
}

impl Relay {
    /// Frees memory, or WAL, from events of whoever stands still or lags. Says whether there is room
    /// for events that wait in the ledger.
    ///
    /// When the budget is full, or what waits finds no room in it, the lanes that stand still at the
    /// destination with most of them are handed over, as long as another destination goes on. So are
    /// all lanes of one that moves and is too slow, when another one goes on with far fewer, or WAL is
    /// pressed. When nobody goes on, reading stops and WAL holds the events. Under WAL pressure
    /// everything that stands still is handed over.
    pub(super) fn hand_over(&mut self, now: Instant) -> bool {
        let due = self.looked_at.is_none_or(|at| now >= at + LOOK_EVERY);
        if due && self.wants_hand_over() {
            self.looked_at = Some(now);
            let (cramped, pressed) = (self.is_cramped(), self.wal_pressure);
            let mut handed = false;
            let (destinations, held) = (&mut self.destinations, &mut self.held_bytes);
            if pressed {
                for destination in &mut *destinations {
                    handed |= destination.hand_over(destination.reach(now), true, held);
                }
            }
            if cramped && destinations.iter().any(|each| !each.stands_still(now)) {
                let idle = |each: &Destination| each.lanes.idle_len(each.reach(now) == Reach::All);
                let most = destinations.iter_mut().max_by_key(|each| idle(each));
                handed |= most.is_some_and(|each| each.hand_over(each.reach(now), false, held));
            }
            if handed {
                self.undecided_since.get_or_insert(now);
            }
            if self.is_cramped() {
                self.hand_over_the_slow(now);
            }
        }
        self.has_room()
    }

    /// Somebody moves, is too slow, and has the memory that another one could use, or that holds back
    /// WAL.
    fn hand_over_the_slow(&mut self, now: Instant) {
        let pressed = self.wal_pressure;
        let (destinations, held) = (&mut self.destinations, &mut self.held_bytes);
        let others = destinations.iter().filter(|each| each.goes_on());
        let least = others.map(|each| each.lanes.len()).min().unwrap_or(usize::MAX);
        let most = destinations.iter_mut().max_by_key(|each| each.lanes.len());
        let slow = most.filter(|each| pressed || each.lanes.len() / MUCH_MORE >= least.max(1));
        if let Some(slow) = slow
            && slow.lags(now)
            && slow.hand_over(Reach::All, pressed, held)
        {
            self.undecided_since.get_or_insert(now);
        }
    }

    /// When to look again.
    pub(super) fn hand_over_at(&self) -> Option<Instant> {
        self.looked_at.filter(|_| self.wants_hand_over()).map(|at| at + LOOK_EVERY)
    }

    fn wants_hand_over(&self) -> bool {
        !self.stopping && (self.wal_pressure || self.is_cramped())
    }

    /// Is there no memory to read WAL, or for what waits of somebody who could go on with it?
    fn is_cramped(&self) -> bool {
        let (used, most) = (self.used_bytes(), self.limits.memory_bytes);
        let wants_room = || self.destinations.iter().any(Destination::wants_room);
        used >= most || (used >= most / 2 && wants_room())
    }
}

#[cfg(test)]
mod tests;
