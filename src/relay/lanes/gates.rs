//! Why and until when a lane takes nothing out: what came back, what is refused, what is being buried.
//! Owns the gates and their timers; what is in the lanes stays where it is.

use std::cmp::Reverse;
use std::time::Instant;

use super::{Lane, Lanes, Slot, State, get_mut};
use crate::event::RunHash;

/// A lane of fewer events may be filled up from the table: enough for a batch of one run, and a
/// run that stops holds few.
const LANE_SHORT: u32 = 2_000;

/// Why a lane takes nothing out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    Open,
    /// Something came back: wait until nothing of the lane is in flight.
    Rewinding,
    /// Wait for the clock.
    Until(Instant),
    /// This event is being written to the dead letters.
    Burying(Slot),
}

impl Lanes {
    /// The event was taken and then not sent.
    pub fn unsend(&mut self, slot: Slot) {
        if let Some(entry) = self.entry_mut(slot) {
            entry.attempts = entry.attempts.saturating_sub(1);
        }
    }

    /// The event is not in the stream: the lane goes back to its first undecided entry, at
    /// `retry_at` if given.
    pub fn give_back(&mut self, slot: Slot, retry_at: Option<Instant>) {
        let Some(run) = self.land(slot) else { return };
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.listed = false;
            match (lane.gate, retry_at) {
                (Gate::Until(_) | Gate::Burying(_), _) => {}
                (Gate::Open | Gate::Rewinding, Some(at)) => {
                    lane.gate = Gate::Until(at);
                    self.timers.push(Reverse((at, run)));
                }
                (Gate::Open | Gate::Rewinding, None) => lane.gate = Gate::Rewinding,
            }
        }
        self.restart_when_idle(run);
    }

    /// The event will never be in the stream: the lane waits until it is in the dead letters.
    /// `false`: another event of the lane is being buried; this one will have its turn again.
    pub fn bury(&mut self, slot: Slot) -> bool {
        let Some(run) = self.land(slot) else { return false };
        let Some(lane) = self.lanes.get_mut(&run) else { return false };
        if let Gate::Burying(_) = lane.gate {
            return false;
        }
        lane.listed = false;
        lane.gate = Gate::Burying(slot);
        true
    }

    /// The burial failed: the lane tries again at `at`, beginning with the same event.
    pub fn exhume(&mut self, slot: Slot, at: Instant) {
        let Some(run) = self.get(slot).map(|entry| entry.event.run_hash) else { return };
        if let Some(lane) = self.lanes.get_mut(&run)
            && lane.gate == Gate::Burying(slot)
        {
            lane.gate = Gate::Until(at);
            self.timers.push(Reverse((at, run)));
        }
    }

    /// When the first waiting lane wants to go on.
    pub fn wake_at(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// Lanes that wait for the clock or for a burial.
    pub fn retrying(&self) -> usize {
        let held = |lane: &&Lane| matches!(lane.gate, Gate::Until(_) | Gate::Burying(_));
        self.lanes.values().filter(held).count()
    }

    /// Opens the lanes whose time has come; says whether there was one.
    pub fn wake(&mut self, now: Instant) -> bool {
        let mut woke = false;
        while let Some(Reverse((at, _))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            woke |= self.wake_next();
        }
        woke
    }

    /// Opens the lane of the next timer; `false` when the lane does not wait for it any more.
    fn wake_next(&mut self) -> bool {
        let Some(Reverse((at, run))) = self.timers.pop() else { return false };
        let Some(lane) = self.lanes.get_mut(&run) else { return false };
        let waits = lane.gate == Gate::Until(at);
        if waits {
            lane.gate = Gate::Rewinding;
            self.restart_when_idle(run);
        }
        waits
    }

    /// Opens so many of the lanes that wait for the clock, the next ones first. `false`: no lane
    /// waits any more.
    pub fn wake_early(&mut self, lanes: usize) -> bool {
        let mut left = lanes;
        while left > 0 {
            if self.timers.is_empty() {
                return false;
            }
            left -= usize::from(self.wake_next());
        }
        true
    }

    /// The events of lanes that go on: neither the clock, a burial nor a dead letter holds them.
    pub fn going_len(&self) -> usize {
        let goes = |(run, lane): &(&RunHash, &Lane)| {
            let open = matches!(lane.gate, Gate::Open | Gate::Rewinding);
            open && !self.waits_blocked(**run, lane.head)
        };
        let lens = self.lanes.iter().filter(goes).map(|(_, lane)| usize::try_from(lane.len));
        lens.map(|len| len.unwrap_or(usize::MAX)).sum()
    }

    /// May events of this run be read from the table, since its lane goes on and is short?
    pub fn may_grow(&self, run: RunHash) -> bool {
        !self.is_blocked(run)
            && self.lanes.get(&run).is_none_or(|lane| {
                matches!(lane.gate, Gate::Open | Gate::Rewinding) && lane.len < LANE_SHORT
            })
    }

    /// Does nothing of this run go on before the clock or an operator lets it?
    pub fn stands(&self, run: RunHash) -> bool {
        let waits = |lane: &Lane| matches!(lane.gate, Gate::Until(_));
        self.is_blocked(run) || self.lanes.get(&run).is_some_and(waits)
    }

    /// In flight → waiting; the lane's run.
    fn land(&mut self, slot: Slot) -> Option<RunHash> {
        let entry = get_mut(&mut self.slots, slot)?;
        if entry.state != State::InFlight {
            return None;
        }
        entry.state = State::Waiting;
        let run = entry.event.run_hash;
        self.lanes.get_mut(&run)?.in_flight -= 1;
        self.in_flight -= 1;
        Some(run)
    }

    pub(super) fn restart_when_idle(&mut self, run: RunHash) {
        if let Some(lane) = self.lanes.get_mut(&run)
            && lane.gate == Gate::Rewinding
            && lane.in_flight == 0
        {
            lane.gate = Gate::Open;
            lane.next = lane.head;
            lane.listed = false;
            self.list(run);
        }
    }
}
