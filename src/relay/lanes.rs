//! One lane per run: first in, first out, with go-back-N. This is where promise P3 (order) is kept.
//!
//! An entry leaves its lane when it is final. Only a lane's `next` entry can be sent; after a
//! failure the lane takes nothing out until everything it has in flight is answered, then starts
//! again at its first undecided entry. Between lanes the order is that of commits.

mod blocked;
mod gates;
mod leaving;

use hashbrown::HashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Instant;

use crate::event::{Event, RunHash};
use crate::relay::receipts::Origin;
pub use blocked::Block;
use gates::Gate;
pub use leaving::Left;

/// Index of an entry; reused after the entry is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(u32);

const NONE: Slot = Slot(u32::MAX);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    InFlight,
}

/// One event that one destination has not decided yet.
#[derive(Debug)]
pub struct Entry {
    /// The event; shared with the other destinations.
    pub event: Arc<Event>,
    /// Who brought it.
    pub origin: Origin,
    /// How often it was sent.
    pub attempts: u32,
    ordinal: u64,
    state: State,
    prev: Slot,
    next: Slot,
}

impl Entry {
    /// Its place in the order of commits, among the events of its destination.
    pub fn ordinal(&self) -> u64 {
        self.ordinal
    }
}

#[derive(Debug)]
struct Lane {
    head: Slot,
    tail: Slot,
    /// First entry that was not sent since the lane last started over; `NONE`: all were.
    next: Slot,
    in_flight: u32,
    len: u32,
    /// Events of it that the WAL brought.
    wal: u32,
    gate: Gate,
    /// Does `ready` hold this lane's `next`?
    listed: bool,
}

/// The lanes of one destination.
#[derive(Debug)]
pub struct Lanes {
    slots: Vec<Option<Entry>>,
    free: Vec<Slot>,
    lanes: HashMap<RunHash, Lane>,
    /// (ordinal, lane) of each lane's `next`; stale pairs are skipped when they come up.
    ready: BinaryHeap<Reverse<(u64, RunHash)>>,
    /// Lanes that wait for the clock.
    timers: BinaryHeap<Reverse<(Instant, RunHash)>>,
    ordinal: u64,
    /// Events of one run in flight at most.
    window: u32,
    in_flight: usize,
    len: usize,
    /// Events that were missed: neither the WAL nor the ledger has them.
    missed: usize,
    /// Events that the ledger has as waiting.
    handed: usize,
    /// Runs that wait behind a dead letter, and how many there ever were.
    blocked: HashMap<RunHash, Block>,
    blocks: u64,
}

impl Lanes {
    /// No events. `window`: how many of one run may be in flight.
    pub fn new(window: u32) -> Lanes {
        Lanes {
            slots: Vec::new(),
            free: Vec::new(),
            lanes: HashMap::new(),
            ready: BinaryHeap::new(),
            timers: BinaryHeap::new(),
            ordinal: 0,
            window,
            in_flight: 0,
            len: 0,
            missed: 0,
            handed: 0,
            blocked: HashMap::new(),
            blocks: 0,
        }
    }

    /// Undecided events.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No undecided events?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Undecided events that were missed.
    pub fn missed(&self) -> usize {
        self.missed
    }

    /// The runs that have some.
    pub fn missed_runs(&self) -> impl Iterator<Item = RunHash> + '_ {
        let entries = if self.missed > 0 { self.slots.as_slice() } else { &[] };
        let missed = |entry: &&Entry| matches!(entry.origin, Origin::Table { handed: false, .. });
        entries.iter().flatten().filter(missed).map(|entry| entry.event.run_hash)
    }

    /// Undecided events that the ledger has as waiting.
    pub fn handed(&self) -> usize {
        self.handed
    }

    /// Has the run undecided events?
    pub fn has(&self, run: RunHash) -> bool {
        self.lanes.contains_key(&run)
    }

    /// Has the run's lane an event that the WAL brought? Then all that it brought since is there.
    pub fn has_wal(&self, run: RunHash) -> bool {
        self.lanes.get(&run).is_some_and(|lane| lane.wal > 0)
    }

    /// The ordinal of the event that comes next.
    pub fn next_ordinal(&self) -> u64 {
        self.ordinal
    }

    /// Runs with undecided events.
    pub fn lane_count(&self) -> usize {
        self.lanes.len()
    }

    /// Events sent and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Changes the window for what is taken from now on.
    pub fn set_window(&mut self, window: u32) {
        self.window = window;
        let runs: Vec<RunHash> = self.lanes.keys().copied().collect();
        for run in runs {
            self.list(run);
        }
    }

    /// Appends an event to its lane.
    pub fn push(&mut self, event: Arc<Event>, origin: Origin) {
        let run = event.run_hash;
        let ordinal = self.ordinal;
        self.ordinal += 1;
        self.len += 1;
        let from_wal = u32::from(matches!(origin, Origin::Wal(_)));
        match origin {
            Origin::Wal(_) | Origin::Letter { .. } => {}
            Origin::Table { handed: true, .. } => self.handed += 1,
            Origin::Table { handed: false, .. } => self.missed += 1,
        }
        let tail = self.lanes.get(&run).map_or(NONE, |lane| lane.tail);
        let entry = Entry {
            event,
            origin,
            attempts: 0,
            ordinal,
            state: State::Waiting,
            prev: tail,
            next: NONE,
        };
        let slot = self.store(entry);
        if let Some(before) = self.entry_mut(tail) {
            before.next = slot;
        }
        let lane = self.lanes.entry(run).or_insert(Lane {
            head: slot,
            tail: slot,
            next: NONE,
            in_flight: 0,
            len: 0,
            wal: 0,
            gate: Gate::Open,
            listed: false,
        });
        lane.tail = slot;
        lane.len += 1;
        lane.wal += from_wal;
        if lane.next == NONE {
            lane.next = slot;
        }
        self.list(run);
    }

    /// Takes the next sendable event in commit order and marks it in flight.
    pub fn take(&mut self) -> Option<Slot> {
        while let Some(Reverse((ordinal, run))) = self.ready.pop() {
            if self.ready_entry(run).is_some_and(|entry| entry.ordinal == ordinal) {
                return self.take_of(run);
            }
        }
        None
    }

    /// The same with the event that was tried least often. Looks at every lane.
    pub fn take_least_tried(&mut self) -> Option<Slot> {
        let ready = self.lanes.keys().filter_map(|run| {
            let entry = self.ready_entry(*run)?;
            Some((entry.attempts, entry.ordinal, *run))
        });
        let (_, _, run) = ready.min()?;
        self.take_of(run)
    }

    /// What a lane would send now.
    fn ready_entry(&self, run: RunHash) -> Option<&Entry> {
        let lane = self.lanes.get(&run).filter(|lane| lane.listed && lane.gate == Gate::Open)?;
        self.get(lane.next)
    }

    fn take_of(&mut self, run: RunHash) -> Option<Slot> {
        let lane = self.lanes.get_mut(&run)?;
        let slot = lane.next;
        let entry = get_mut(&mut self.slots, slot)?;
        entry.state = State::InFlight;
        entry.attempts = entry.attempts.saturating_add(1);
        lane.next = entry.next;
        lane.in_flight += 1;
        lane.listed = false;
        self.in_flight += 1;
        self.list(run);
        Some(slot)
    }

    /// The entry, while it is undecided.
    pub fn get(&self, slot: Slot) -> Option<&Entry> {
        let index = usize::try_from(slot.0).ok()?;
        self.slots.get(index).and_then(Option::as_ref)
    }

    /// The event is final: it leaves its lane.
    pub fn settle(&mut self, slot: Slot) -> Option<Entry> {
        let entry = self.vacate(slot)?;
        let run = entry.event.run_hash;
        if let Some(before) = self.entry_mut(entry.prev) {
            before.next = entry.next;
        }
        if let Some(after) = self.entry_mut(entry.next) {
            after.prev = entry.prev;
        }
        if let Some(lane) = self.lanes.get_mut(&run) {
            let stood_for = match lane.gate {
                Gate::Until(_) => lane.head == slot,
                Gate::Burying(buried) => buried == slot,
                Gate::Open | Gate::Rewinding => false,
            };
            if stood_for {
                lane.gate = Gate::Rewinding;
            }
            if lane.head == slot {
                lane.head = entry.next;
            }
            if lane.tail == slot {
                lane.tail = entry.prev;
            }
            if lane.next == slot {
                lane.next = entry.next;
                lane.listed = false;
            }
            if entry.state == State::InFlight {
                lane.in_flight -= 1;
                self.in_flight -= 1;
            }
            lane.len -= 1;
            lane.wal -= u32::from(matches!(entry.origin, Origin::Wal(_)));
            if lane.head == NONE {
                self.lanes.remove(&run);
            } else {
                self.restart_when_idle(run);
                self.list(run);
            }
        }
        Some(entry)
    }

    /// Slots of the events not in flight that `wanted` picks, in no particular order. Letters are
    /// left out: their numbers were decided long ago.
    pub fn find_waiting(&self, mut wanted: impl FnMut(&Event) -> bool) -> Vec<Slot> {
        let mut waiting = |entry: &Entry| {
            let plain = entry.state == State::Waiting && entry.origin.letter().is_none();
            plain && wanted(&entry.event)
        };
        let numbered = self.slots.iter().zip(0u32..);
        numbered
            .filter(|(entry, _)| entry.as_ref().is_some_and(&mut waiting))
            .map(|(_, index)| Slot(index))
            .collect()
    }

    /// The undecided event with the smallest ordinal, in flight or not.
    pub fn oldest(&self) -> Option<&Entry> {
        let heads = self.lanes.values().filter_map(|lane| self.get(lane.head));
        heads.min_by_key(|entry| entry.ordinal)
    }

    /// The numbers of all events.
    pub fn numbers(&self) -> impl Iterator<Item = i64> + '_ {
        self.slots.iter().flatten().map(|entry| entry.event.seq)
    }

    /// Puts the lane's `next` among the ready ones if it may be sent and isn't there yet.
    fn list(&mut self, run: RunHash) {
        if !self.blocked.is_empty()
            && self.lanes.get(&run).is_some_and(|lane| self.is_barred(run, lane.next))
        {
            return;
        }
        if let Some(lane) = self.lanes.get_mut(&run)
            && !lane.listed
            && lane.gate == Gate::Open
            && lane.in_flight < self.window
            && let Some(entry) = get_mut(&mut self.slots, lane.next)
        {
            lane.listed = true;
            self.ready.push(Reverse((entry.ordinal, run)));
            if self.ready.len() > 64 + 2 * self.lanes.len() {
                self.forget_stale();
            }
        }
    }

    /// Lanes that start over leave pairs behind, one each time; they must not pile up in hours of
    /// fruitless tries.
    fn forget_stale(&mut self) {
        let (lanes, slots) = (&self.lanes, &self.slots);
        let mut pairs = std::mem::take(&mut self.ready).into_vec();
        pairs.retain(|Reverse((ordinal, run))| {
            lanes.get(run).is_some_and(|lane| {
                let next = usize::try_from(lane.next.0).ok().and_then(|index| slots.get(index));
                lane.listed
                    && next.and_then(Option::as_ref).is_some_and(|it| it.ordinal == *ordinal)
            })
        });
        pairs.sort_unstable();
        pairs.dedup();
        self.ready = BinaryHeap::from(pairs);
    }

    fn store(&mut self, entry: Entry) -> Slot {
        if let Some(slot) = self.free.pop()
            && let Some(place) =
                usize::try_from(slot.0).ok().and_then(|index| self.slots.get_mut(index))
        {
            *place = Some(entry);
            return slot;
        }
        let slot = Slot(u32::try_from(self.slots.len()).unwrap_or(u32::MAX));
        self.slots.push(Some(entry));
        slot
    }

    fn vacate(&mut self, slot: Slot) -> Option<Entry> {
        let index = usize::try_from(slot.0).ok()?;
        let entry = self.slots.get_mut(index)?.take()?;
        self.len -= 1;
        match entry.origin {
            Origin::Wal(_) | Origin::Letter { .. } => {}
            Origin::Table { handed: true, .. } => self.handed -= 1,
            Origin::Table { handed: false, .. } => self.missed -= 1,
        }
        if self.len == 0 {
            // A burst leaves no memory behind.
            self.slots.clear();
            self.slots.shrink_to(1024);
            self.free.clear();
            self.free.shrink_to(1024);
            self.ready.clear();
            self.timers.clear();
        } else {
            self.free.push(slot);
        }
        Some(entry)
    }

    fn entry_mut(&mut self, slot: Slot) -> Option<&mut Entry> {
        get_mut(&mut self.slots, slot)
    }
}

fn get_mut(slots: &mut [Option<Entry>], slot: Slot) -> Option<&mut Entry> {
    let index = usize::try_from(slot.0).ok()?;
    slots.get_mut(index)?.as_mut()
}

#[cfg(test)]
mod tests;
