//! Lanes that leave memory: which may, and what of a lane stays. Owns no state of its own.

use std::time::Instant;

use super::{Entry, Gate, Lane, Lanes, NONE};
use crate::event::RunHash;
use crate::relay::receipts::Origin;

/// What became of a lane.
#[derive(Debug, Default)]
pub struct Left {
    /// Number and origin of the events of the WAL that are in flight, in their order. They stay,
    /// and are from now on what the ledger has as waiting.
    pub kept: Vec<(u64, i64, Origin)>,
    /// The others, in their order.
    pub gone: Vec<Entry>,
}

impl Lanes {
    /// Lanes that can leave. Those that wait for the clock or behind a dead letter can when nothing
    /// of them is in flight; `all`: every lane that is not about to start over.
    ///
    /// None of which an event is on its way to the dead letters. Of a blocked run nothing goes that
    /// committed before its letter's event: it would be sent behind the letter then.
    fn idle(&self, all: bool) -> impl Iterator<Item = (RunHash, &Lane)> {
        let stands = move |run: RunHash, lane: &Lane| match lane.gate {
            Gate::Burying(_) => false,
            _ if self.is_blocked(run) => lane.in_flight == 0 && self.waits_blocked(run, lane.head),
            Gate::Until(_) => lane.in_flight == 0,
            Gate::Rewinding => all && lane.in_flight == 0,
            Gate::Open => all,
        };
        let lanes = self.lanes.iter().map(|(run, lane)| (*run, lane));
        lanes.filter(move |(run, lane)| stands(*run, lane))
    }

    /// The runs of idle lanes, each with the time that its lane waits for; `wal`: only those that
    /// hold events of the WAL.
    pub fn idle_runs(&self, all: bool, wal: bool) -> Vec<(RunHash, Option<Instant>)> {
        let idle = self.idle(all).filter(|(_, lane)| !wal || lane.wal > 0);
        idle.map(|(run, lane)| match lane.gate {
            Gate::Until(at) => (run, Some(at)),
            Gate::Open | Gate::Rewinding | Gate::Burying(_) => (run, None),
        })
        .collect()
    }

    /// The events of idle lanes that are not in flight.
    pub fn idle_len(&self, all: bool) -> usize {
        let len = |lane: &Lane| usize::try_from(lane.len - lane.in_flight).unwrap_or(usize::MAX);
        self.idle(all).map(|(_, lane)| len(lane)).sum()
    }

    /// Takes the events of an idle lane out, but for those in flight. These are before all others
    /// of the lane; the ledger gets them together with the others, since it would have them behind
    /// these otherwise when the WAL brings them again.
    pub fn leave(&mut self, run: RunHash) -> Left {
        let mut left = Left::default();
        let Some(lane) = self.lanes.get(&run) else { return left };
        let first = if lane.in_flight == 0 { lane.head } else { lane.next };
        let mut slot = lane.head;
        let (mut last, mut from_wal) = (NONE, 0);
        while slot != first
            && let Some(entry) = self.entry_mut(slot)
        {
            (last, slot) = (slot, entry.next);
            if let origin @ Origin::Wal(_) = entry.origin {
                entry.origin = Origin::Table { until: origin.until(), handed: true };
                left.kept.push((entry.ordinal, entry.event.seq, origin));
                from_wal += 1;
            }
        }
        self.handed += left.kept.len();
        while let Some(entry) = self.vacate(slot) {
            slot = entry.next;
            from_wal += u32::from(matches!(entry.origin, Origin::Wal(_)));
            left.gone.push(entry);
        }
        if last == NONE {
            self.lanes.remove(&run);
        } else {
            if let Some(entry) = self.entry_mut(last) {
                entry.next = NONE;
            }
            if let Some(lane) = self.lanes.get_mut(&run) {
                (lane.tail, lane.next, lane.listed) = (last, NONE, false);
                lane.len = lane.in_flight;
                lane.wal -= from_wal;
            }
        }
        left
    }
}
