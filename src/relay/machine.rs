//! The relay as a state machine: every input goes through [`Relay::handle`], every effect comes
//! out of [`Relay::poll`]. It keeps P1–P5 and the bounds of P8; see the crate's documentation.

mod interface;

use hashbrown::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::event::{Event, UnixMicros};
use crate::lsn::Lsn;
pub use crate::relay::again::{BlockedRun, Question, Redrive};
use crate::relay::destination::{Destination, DestinationSpec, Step};
use crate::relay::lanes::Entry;
use crate::relay::outcome::{Answer, DestinationId};
use crate::relay::ranges::RangeSet;
use crate::relay::receipts::{Decided, Decision, Origin};
use crate::relay::slow::Placed;
pub use crate::relay::slow::{Loaded, WaitingPart};
use crate::relay::watermark::{TxnId, Watermark};
pub use interface::{Action, Burial, Input, Limits, ProtocolViolation, ReceiptDraft, Verified};

/// Burials under way at most: each is a statement on the one control connection, before which
/// receipts must not queue up, and holds a copy of its event.
const BURIALS_AT_ONCE: usize = 64;

/// What a decision without receipt costs at worst: a range of its own, a transaction of its own in
/// the watermark and in the draft, and the draft's copy.
const DECISION_BYTES: usize = 160;

/// See the module.
#[derive(Debug)]
pub struct Relay {
    pub(super) limits: Limits,
    pub(super) destinations: Vec<Destination>,
    watermark: Watermark,
    open: Option<TxnId>,
    last_begun: Option<Lsn>,
    pub(super) held_bytes: usize,
    /// Undecided events hold back too much WAL.
    pub(super) wal_pressure: bool,
    /// When it was last looked for what can be handed over.
    pub(super) looked_at: Option<Instant>,
    /// Receipts being written.
    writing: Option<Vec<ReceiptDraft>>,
    /// When the oldest decision among them was made.
    writing_since: Option<Instant>,
    /// When the oldest decision without receipt was made.
    pub(super) undecided_since: Option<Instant>,
    burials: usize,
    /// Letters that were closed or buried again since the dead letters were asked.
    pub(super) closed_letters: HashSet<i64>,
    pub(super) letters_changed: bool,
    pub(super) stopping: bool,
    /// Commit times of events acked since the pump last asked.
    acked: Vec<UnixMicros>,
    turn: usize,
}

impl Relay {
    /// `start` is the slot's confirmed LSN; attempts are numbered from `first_attempt`.
    pub fn new(
        limits: Limits,
        start: Lsn,
        destinations: Vec<DestinationSpec>,
        first_attempt: u64,
    ) -> Relay {
        let numbers = limits.waiting_numbers(destinations.len());
        let make = |spec| Destination::new(spec, first_attempt, numbers);
        Relay {
            limits,
            destinations: destinations.into_iter().map(make).collect(),
            watermark: Watermark::new(start),
            open: None,
            last_begun: None,
            held_bytes: 0,
            wal_pressure: false,
            looked_at: None,
            writing: None,
            writing_since: None,
            undecided_since: None,
            burials: 0,
            closed_letters: HashSet::new(),
            letters_changed: false,
            stopping: false,
            acked: Vec::new(),
            turn: 0,
        }
    }

    /// Takes one input. An error means that the stream can't be trusted any more.
    pub fn handle(&mut self, now: Instant, input: Input) -> Result<(), ProtocolViolation> {
        match input {
            Input::Begin { commit_lsn } => return self.begin(commit_lsn),
            Input::Event(event) => return self.event(now, event),
            Input::Commit { end_lsn } => {
                self.open
                    .take()
                    .ok_or_else(|| violation("Commit outside a transaction", end_lsn))?;
                self.watermark.commit(end_lsn);
                self.forget_recorded();
            }
            Input::Keepalive { wal_end } => self.watermark.keepalive(wal_end),
            Input::Up(id, facts) => self.each(id, |destination| destination.up(facts)),
            Input::Down(id) => self.each(id, Destination::down),
            Input::Answer(id, answer) => self.answer(now, id, &answer),
            Input::Resumed(id, verified) => self.resumed(now, id, verified),
            Input::ResumeFailed(id) => self.each(id, |destination| destination.resume_failed(now)),
            Input::Buried(burial, done) => self.buried(now, burial, done),
            Input::Recorded { newest } => self.recorded(newest),
            Input::Loaded(id, loaded) => self.loaded(now, id, loaded),
            Input::LoadFailed(id) => self.loaded(now, id, Loaded::default()),
            Input::WaitingRead(id, part) => self.each(id, |each| each.waiting_read(&part)),
            Input::WaitingReadFailed(id) => self.each(id, Destination::waiting_read_failed),
            Input::SweepBegins => {
                self.destinations.iter_mut().for_each(Destination::sweep_begins);
            }
            Input::SweepEnds => self.destinations.iter_mut().for_each(Destination::forget),
            Input::Missed { destination, event, until } => {
                self.missed_row(now, destination, event, until);
            }
            Input::Bridged(id, but) => self.each(id, |destination| destination.bridged(but)),
            Input::WalPressure(on) => self.wal_pressure = on,
            Input::Letters { again, released } => self.letters(now, again, &released),
            Input::Stop => self.stopping = true,
        }
        Ok(())
    }

    fn begin(&mut self, commit_lsn: Lsn) -> Result<(), ProtocolViolation> {
        if self.open.is_some() {
            return Err(violation("Begin inside a transaction", commit_lsn));
        }
        if self.last_begun.is_some_and(|last| commit_lsn <= last) {
            return Err(violation("transactions out of commit order", commit_lsn));
        }
        self.last_begun = Some(commit_lsn);
        self.open = Some(self.watermark.begin(commit_lsn));
        Ok(())
    }

    /// Each destination gets the event exactly once: final by the ledger, unmatched, or in a lane.
    fn event(&mut self, now: Instant, event: Event) -> Result<(), ProtocolViolation> {
        let Some(txn) = self.open else {
            return Err(ProtocolViolation(format!("row {} outside a transaction", event.seq)));
        };
        let event = Arc::new(event);
        for destination in &mut self.destinations {
            let DestinationSpec { recorded, handed, .. } = &destination.spec;
            if recorded.contains(event.seq) || handed.contains(event.seq) {
                continue;
            }
            self.watermark.hold(txn);
            if destination.place(now, &event, Origin::Wal(txn)) == Placed::ToRecord {
                self.undecided_since.get_or_insert(now);
            }
        }
        if Arc::strong_count(&event) > 1 {
            self.held_bytes += event.budget_bytes();
        }
        Ok(())
    }

    fn answer(&mut self, now: Instant, id: DestinationId, answer: &Answer) {
        let Some(destination) = self.destinations.get_mut(usize::from(id.0)) else { return };
        for entry in destination.answer(now, answer) {
            destination.decide(now, &entry, Decision::Published);
            destination.counts.redriven += u64::from(entry.origin.letter().is_some());
            self.undecided_since.get_or_insert(now);
            self.acked.extend(entry.event.committed_at);
            let_go(&mut self.held_bytes, entry);
        }
    }

    fn resumed(&mut self, now: Instant, id: DestinationId, verified: Verified) {
        self.letters_found(id, &verified);
        let Some(destination) = self.destinations.get_mut(usize::from(id.0)) else { return };
        let spec = &mut destination.spec;
        if !verified.seqs.is_empty() {
            spec.recorded.extend(verified.seqs.iter());
            spec.recorded_to = spec.recorded_to.max(verified.last_lsn.unwrap_or(Lsn(u64::MAX)));
            destination.found(&verified.seqs);
            let newest = verified.seqs.iter().last().map(|(_, last)| last);
            newest.into_iter().for_each(|newest| destination.forget_order(newest));
        }
        destination.waiting.look_again();
        let strangers = verified.strangers;
        let resumed = destination.resumed(now, &verified.created, verified.last_seq, strangers);
        for entry in resumed.undoubted {
            destination.decide(now, &entry, Decision::Published);
            self.undecided_since.get_or_insert(now);
            let_go(&mut self.held_bytes, entry);
        }
        for entry in resumed.recorded {
            // The ledger has it already: nothing is left to record.
            if let Origin::Wal(txn) = entry.origin {
                self.watermark.release(txn, 1);
            }
            let_go(&mut self.held_bytes, entry);
        }
    }

    fn buried(&mut self, now: Instant, burial: Burial, done: bool) {
        self.burials = self.burials.saturating_sub(1);
        let index = usize::from(burial.destination.0);
        let Some(destination) = self.destinations.get_mut(index) else { return };
        destination.waiting.look_again();
        if !done {
            destination.burial_failed(now, burial.slot, burial.seq);
        } else if let Some(entry) = destination.buried(burial.slot, burial.seq, burial.reason) {
            match entry.origin.letter() {
                Some(letter) => {
                    self.closed_letters.insert(letter);
                }
                None => {
                    destination.decide(now, &entry, Decision::Dead);
                    self.undecided_since.get_or_insert(now);
                }
            }
            let_go(&mut self.held_bytes, entry);
        }
    }

    fn recorded(&mut self, newest: i64) {
        self.writing_since = None;
        for draft in self.writing.take().unwrap_or_default() {
            self.letters_recorded(&draft.decided);
            for (txn, count) in &draft.decided.waiting {
                self.watermark.release(*txn, *count);
            }
            self.each(draft.destination, |destination| {
                destination.recorded(&draft.decided, draft.floor);
                destination.recorded_id = destination.recorded_id.max(newest);
            });
        }
        self.forget_recorded();
    }

    /// WAL beyond the ledger's newest position brings nothing that it has.
    fn forget_recorded(&mut self) {
        let confirmable = self.watermark.confirmable();
        for destination in &mut self.destinations {
            if !destination.has_handed() {
                destination.awaited.forget_below(confirmable);
            }
            let spec = &mut destination.spec;
            if spec.recorded_to < confirmable {
                spec.recorded = RangeSet::default();
                spec.handed = RangeSet::default();
            }
        }
    }

    /// The next thing to do; call until it says `None`.
    pub fn poll(&mut self, now: Instant) -> Option<Action> {
        let count = self.destinations.len();
        let confirmable = self.watermark.confirmable();
        // All of them first: somebody who can go on again may need room.
        self.destinations.iter_mut().for_each(|destination| destination.wake(now));
        let room = self.hand_over(now);
        for turn in 0..count {
            // Destinations take turns, so that none starves behind a busy one.
            let index = (self.turn + turn) % count;
            let destination = self.destinations.get_mut(index)?;
            let id = DestinationId(u16::try_from(index).unwrap_or(u16::MAX));
            let sending = !self.stopping && self.burials < BURIALS_AT_ONCE;
            let Some(step) = destination.poll(now, sending, room, confirmable) else { continue };
            self.turn = index;
            return Some(match step {
                Step::Send(attempt, message) => Action::Send { destination: id, attempt, message },
                Step::Resume(from) => Action::Resume { destination: id, from },
                Step::Load(waiters) => {
                    let max_bytes = self.load_bytes();
                    Action::Load { destination: id, waiters, max_bytes }
                }
                Step::ReadWaiting(after, most) => {
                    Action::ReadWaiting { destination: id, after, most }
                }
                Step::Bury(slot, event, fault, attempts, letter) => {
                    self.burials += 1;
                    let seq = event.seq;
                    let reason = fault.reason;
                    let burial = Burial { destination: id, seq, reason, letter, slot };
                    Action::Bury { burial, event, fault, attempts }
                }
            });
        }
        self.turn = (self.turn + 1) % count.max(1);
        self.record(now).map(Action::Record)
    }

    fn record(&mut self, now: Instant) -> Option<Vec<ReceiptDraft>> {
        if self.writing.is_some() {
            return None;
        }
        let floors_only = self.destinations.iter().any(Destination::wants_floor_recorded);
        let ready = self.destinations.iter().filter(|each| each.may_record());
        let events: u64 = ready.map(|each| each.decided.len()).sum();
        let due = self.undecided_since.is_some_and(|since| {
            self.stopping
                || events >= self.limits.receipt_events
                || now >= since + self.limits.receipt_interval
        });
        let due = due && self.may_record();
        if !due && !floors_only {
            return None;
        }
        self.writing_since = self.undecided_since.take().or(Some(now));
        let mut drafts = Vec::new();
        for (destination, index) in self.destinations.iter_mut().zip(0u16..) {
            let empty = destination.decided.is_empty() && !destination.wants_floor_recorded();
            if empty || !destination.may_record() {
                continue;
            }
            drafts.push(ReceiptDraft {
                destination: DestinationId(index),
                floor: destination.floor(),
                last: destination.last_acked().cloned(),
                known: destination.known(),
                decided: destination.take_decided(),
            });
        }
        if self.destinations.iter().any(|each| !each.decided.is_empty()) {
            self.undecided_since = self.writing_since;
        }
        self.writing = Some(drafts.clone());
        Some(drafts)
    }

    fn may_record(&self) -> bool {
        self.destinations.iter().any(|each| each.may_record() && !each.decided.is_empty())
    }

    /// Should more WAL be read? The budget may be overrun by the one event that fills it.
    /// Decisions without receipt count too: reading must not outrun a ledger that hangs.
    pub fn wants_wal(&self) -> bool {
        !self.stopping && self.used_bytes() < self.limits.memory_bytes
    }

    /// Bytes of the budget in use: undecided events, decisions without receipt, numbers that wait.
    pub fn used_bytes(&self) -> usize {
        let waiting: usize = self.destinations.iter().map(|each| each.waiting.bytes()).sum();
        // They have a bound of their own, and must not stop what would make them fewer.
        let waiting = waiting.min(self.limits.memory_bytes / 4);
        self.held_bytes.saturating_add(self.unrecorded_bytes()).saturating_add(waiting)
    }

    fn unrecorded_bytes(&self) -> usize {
        let gathered = self.destinations.iter().map(|each| &each.decided);
        let writing = self.writing.iter().flatten().map(|draft| &draft.decided);
        let events: u64 = gathered.chain(writing).map(Decided::len).sum();
        usize::try_from(events).unwrap_or(usize::MAX).saturating_mul(DECISION_BYTES)
    }

    /// What may be confirmed: a prefix that is decided and recorded, nothing else.
    pub fn confirmable(&self) -> Lsn {
        self.watermark.confirmable()
    }

    /// When time alone brings something to do.
    pub fn wake_at(&self) -> Option<Instant> {
        let receipt = self.undecided_since.map(|since| since + self.limits.receipt_interval);
        let receipt = receipt.filter(|_| self.writing.is_none() && self.may_record());
        let destinations = self.destinations.iter().filter_map(Destination::wake_at);
        destinations.chain(receipt).chain(self.hand_over_at()).min()
    }

    /// After [`Input::Stop`]: is everything that was begun finished and recorded?
    pub fn is_quiet(&self) -> bool {
        self.writing.is_none()
            && self.burials == 0
            && self.destinations.iter().all(Destination::is_quiet)
    }

    /// The destinations, in the configuration's order.
    pub fn destinations(&self) -> &[Destination] {
        &self.destinations
    }

    /// When the oldest decision was made that the ledger does not have yet.
    pub fn unrecorded_since(&self) -> Option<Instant> {
        self.writing_since.or(self.undecided_since)
    }

    /// Bytes of undecided events.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Commit LSN of the oldest transaction that is not decided and recorded.
    pub fn oldest_held(&self) -> Option<Lsn> {
        self.watermark.oldest_held()
    }

    /// Commit times of the events acked since the last call.
    pub fn take_acked(&mut self) -> std::vec::Drain<'_, UnixMicros> {
        self.acked.drain(..)
    }

    /// How long the events that a destination acked since the last call were under way.
    pub fn take_waits(&mut self, id: DestinationId) -> impl Iterator<Item = Duration> {
        let destination = self.destinations.get_mut(usize::from(id.0));
        destination.into_iter().flat_map(Destination::take_waits)
    }

    /// The number that no attempt of any destination has reached: where a next session starts.
    pub fn next_attempt(&self) -> u64 {
        let numbers = self.destinations.iter().map(|each| each.attempts.next_number());
        numbers.max().unwrap_or(0)
    }

    pub(super) fn each(&mut self, id: DestinationId, change: impl FnOnce(&mut Destination)) {
        if let Some(destination) = self.destinations.get_mut(usize::from(id.0)) {
            change(destination);
        }
    }
}

/// Gives an entry's bytes back to the budget when no other destination holds the event.
pub(super) fn let_go(held_bytes: &mut usize, entry: Entry) {
    if let Some(event) = Arc::into_inner(entry.event) {
        *held_bytes = held_bytes.saturating_sub(event.budget_bytes());
    }
}

fn violation(what: &str, lsn: Lsn) -> ProtocolViolation {
    ProtocolViolation(format!("{what} at {lsn}"))
}

#[cfg(test)]
pub(crate) mod tests;
