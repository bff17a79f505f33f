//! Runs that wait behind a dead letter: nothing of them is taken out until the letter is closed.
//! What committed before the letter's event still goes, and so does the letter itself when it is
//! sent again, ahead of all that waits.

use std::sync::Arc;

use super::{Entry, Gate, Lanes, NONE, Slot, State};
use crate::event::{Event, RunHash};
use crate::lsn::Position;
use crate::relay::receipts::Origin;

/// Where a run stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Tells this stop from a later one of the same run.
    pub number: u64,
    /// The buried event.
    seq: i64,
    position: Option<Position>,
    /// Its place in the lane, if it was in one since the session began.
    ordinal: Option<u64>,
}

impl Block {
    /// Must the entry wait? A lane is in commit order. After a restart the positions tell, and
    /// numbers where the WAL did not show both; what was handed over waited behind the letter's
    /// event already.
    fn bars(&self, entry: &Entry) -> bool {
        match (entry.origin, self.ordinal) {
            (Origin::Letter { .. }, _) => false,
            (_, Some(buried)) => entry.ordinal > buried,
            (Origin::Table { handed: true, .. }, None) => true,
            (_, None) => match (entry.event.position, self.position) {
                (Some(own), Some(buried)) => own > buried,
                _ => entry.event.seq > self.seq,
            },
        }
    }
}

impl Lanes {
    /// The run takes nothing out behind this event any more. A run that is blocked already stays
    /// blocked where it is.
    pub fn block(
        &mut self,
        run: RunHash,
        seq: i64,
        position: Option<Position>,
        ordinal: Option<u64>,
    ) {
        self.blocks += 1;
        let number = self.blocks;
        self.blocked.entry(run).or_insert(Block { number, seq, position, ordinal });
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.listed = false;
            self.list(run);
        }
    }

    /// The run goes on; `false` when it is not blocked by that block any more.
    pub fn release(&mut self, run: RunHash, number: u64) -> bool {
        let blocked = self.blocked.get(&run).is_some_and(|block| block.number == number);
        if blocked {
            self.blocked.remove(&run);
            self.list(run);
        }
        blocked
    }

    /// Blocked runs, whether something waits in them or not.
    pub fn blocked(&self) -> impl ExactSizeIterator<Item = (RunHash, u64)> + '_ {
        self.blocked.iter().map(|(run, block)| (*run, block.number))
    }

    /// Is the run blocked?
    pub fn is_blocked(&self, run: RunHash) -> bool {
        !self.blocked.is_empty() && self.blocked.contains_key(&run)
    }

    /// Events in blocked runs.
    pub fn blocked_len(&self) -> usize {
        let lanes = self.blocked.keys().filter_map(|run| self.lanes.get(run));
        lanes.map(|lane| usize::try_from(lane.len).unwrap_or(usize::MAX)).sum()
    }

    /// Must this entry of the run wait?
    pub(super) fn is_barred(&self, run: RunHash, slot: Slot) -> bool {
        !self.blocked.is_empty()
            && self
                .blocked
                .get(&run)
                .is_some_and(|block| self.get(slot).is_some_and(|entry| block.bars(entry)))
    }

    /// Does a lane have nothing but letters before what waits?
    pub(super) fn waits_blocked(&self, run: RunHash, head: Slot) -> bool {
        let mut slot = head;
        while let Some(entry) = self.get(slot).filter(|entry| entry.origin.letter().is_some()) {
            slot = entry.next;
        }
        self.is_barred(run, slot)
    }

    /// Puts a letter to be sent again into its lane: ahead of what waits behind it, otherwise at
    /// the end.
    pub fn push_letter(&mut self, event: Arc<Event>, origin: Origin) {
        let run = event.run_hash;
        let waits = self.blocked.get(&run).copied().and_then(|block| {
            let mut slot = self.lanes.get(&run)?.head;
            while let Some(entry) = self.get(slot) {
                if block.bars(entry) {
                    return Some(slot);
                }
                slot = entry.next;
            }
            None
        });
        match waits {
            Some(next) => self.insert(event, origin, next),
            None => self.push(event, origin),
        }
    }

    fn insert(&mut self, event: Arc<Event>, origin: Origin, next: Slot) {
        let run = event.run_hash;
        let ordinal = self.ordinal;
        self.ordinal += 1;
        self.len += 1;
        let prev = self.get(next).map_or(NONE, |entry| entry.prev);
        let state = State::Waiting;
        let slot = self.store(Entry { event, origin, attempts: 0, ordinal, state, prev, next });
        if let Some(before) = self.entry_mut(prev) {
            before.next = slot;
        }
        if let Some(after) = self.entry_mut(next) {
            after.prev = slot;
        }
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.len += 1;
        if lane.head == next {
            lane.head = slot;
        }
        if lane.next == next {
            lane.next = slot;
            lane.listed = false;
            self.list(run);
        } else if lane.gate == Gate::Open {
            // What comes behind it was sent already: the lane starts over.
            lane.gate = Gate::Rewinding;
            self.restart_when_idle(run);
        }
    }

    /// Letters that are being sent again, with their slots.
    pub fn letters(&self) -> impl Iterator<Item = (Slot, i64)> + '_ {
        let letter = |(entry, index): (&Option<Entry>, u32)| {
            Some((Slot(index), entry.as_ref()?.origin.letter()?))
        };
        self.slots.iter().zip(0u32..).filter_map(letter)
    }
}
