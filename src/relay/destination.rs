//! One destination in the core: its lanes, its attempts, and the procedure after an unknown
//! outcome. That is (1) Resume; (2) one event alone, and from 1 again until its ack is not a
//! duplicate, since only that proves a working broker; (3) Resume; (4) go on.
//!
//! An event alone can have no answer for a reason of its own, again and again. So its run waits by
//! its own tries, and the next event alone is the one that was tried least; after that the oldest
//! again, since only by itself can it be told from the others that are sent with it.

use hashbrown::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::event::{Event, Fault, Reason, RunHash};
use crate::lsn::Lsn;
use crate::message::{self, Message};
use crate::relay::attempts::Attempts;
use crate::relay::awaited::Awaited;
use crate::relay::backoff::Backoff;
use crate::relay::caution::Caution;
use crate::relay::lanes::{Entry, Lanes, Slot};
use crate::relay::late::Newest;
use crate::relay::outcome::{
    Anchor, Answer, Attempt, Floor, Found, Outcome, ReadFrom, Refusal, StreamFacts,
};
use crate::relay::receipts::{Decided, Decision, Origin};
use crate::relay::slow::Remembered;
use crate::relay::waiting::{Waiter, Waiting};

pub use crate::relay::standing::{Counts, DestinationSpec, LastAcked, Phase};

/// What a destination wants done.
#[derive(Debug)]
pub(super) enum Step {
    Send(Attempt, Message),
    Bury(Slot, Box<Event>, Fault, u32, Option<i64>),
    Resume(ReadFrom),
    Load(Vec<Waiter>),
    ReadWaiting(i64, usize),
}

/// Entries that a Resume found in the stream.
#[derive(Debug)]
pub(super) struct Finds {
    /// The ledger has them.
    pub recorded: Vec<Entry>,
    /// Proven by WAL and stream; to be recorded.
    pub undoubted: Vec<Entry>,
}

/// Runs that are tried before their time for each event that is stored while a stream heals.
const WOKEN_PER_STORED: usize = 2;

/// Attempts between the oldest unanswered one and the newest, in multiples of `max_in_flight`: one
/// silent attempt must not let the record of answered ones behind it grow without end.
const SPAN_FACTOR: usize = 16;

/// See the module.
#[derive(Debug)]
pub struct Destination {
    pub(super) spec: DestinationSpec,
    pub(super) lanes: Lanes,
    pub(super) decided: Decided,
    pub(super) counts: Counts,
    pub(super) attempts: Attempts,
    phase: Phase,
    /// A Resume is ordered and not answered. Until it is, no other one is ordered, so that an
    /// answer that a reconnect overtook is not taken for a newer one's.
    reading: bool,
    facts: Option<StreamFacts>,
    created: String,
    /// What the ledger has; `None`: nothing, this destination was never connected.
    recorded_floor: Option<Floor>,
    backoff: Backoff,
    /// Events alone without an answer, in a row.
    unproven: u32,
    caution: Caution,
    to_bury: Vec<(Slot, Fault)>,
    /// What receipts that are being written decide and hand over.
    pub(super) writing: Decided,
    pub(super) awaited: Awaited,
    pub(super) waiting: Waiting,
    pub(super) remembered: Remembered,
    /// Runs of missed rows that left their lanes since the last look through the table began.
    pub(super) let_go: HashSet<RunHash>,
    /// Newest receipt of it in the ledger, as far as known.
    pub(super) recorded_id: i64,
    /// When an event was decided last, or the first came after none were left.
    pub(super) moved_at: Option<Instant>,
    /// While memory is short: when, and behind which of its events then, it was looked whether it
    /// lags.
    pub(super) crowded: Option<(Instant, u64)>,
    last_acked: Option<LastAcked>,
    order: Newest,
    /// From send to ack, of the events acked since the pump last asked.
    waits: Vec<Duration>,
}

impl Destination {
    /// `numbers`: how many that wait it may have in memory.
    pub(super) fn new(spec: DestinationSpec, first_attempt: u64, numbers: usize) -> Destination {
        let mix = |seed: u64, byte: u8| seed.rotate_left(9) ^ u64::from(byte);
        let seed = spec.name.bytes().fold(first_attempt, mix);
        let recorded_floor = spec.floor.clone().filter(|floor| !floor.created.is_empty());
        let mut waiting = Waiting::new(&spec.waiting, spec.waiting_beyond, spec.gap, numbers);
        let mut lanes = Lanes::new(u32::MAX);
        for (run, seq, position) in &spec.letters.blocked {
            lanes.block(*run, *seq, *position, None);
            waiting.park(*run);
        }
        Destination {
            waiting,
            remembered: Remembered::default(),
            let_go: HashSet::new(),
            recorded_id: spec.recorded_id,
            order: Newest::new(spec.highest),
            moved_at: None,
            crowded: None,
            spec,
            lanes,
            decided: Decided::default(),
            counts: Counts::default(),
            attempts: Attempts::new(first_attempt),
            phase: Phase::Down,
            reading: false,
            facts: None,
            created: String::new(),
            recorded_floor,
            backoff: Backoff::new(seed),
            unproven: 0,
            caution: Caution::default(),
            to_bury: Vec::new(),
            writing: Decided::default(),
            awaited: Awaited::default(),
            last_acked: None,
            waits: Vec::new(),
        }
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// What the stream announced at the last connect.
    pub fn facts(&self) -> Option<&StreamFacts> {
        self.facts.as_ref()
    }

    /// Its name in the configuration.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its lanes.
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Its counters.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Newest message known to be in the stream by an ack.
    pub fn last_acked(&self) -> Option<&LastAcked> {
        self.last_acked.as_ref()
    }

    /// Highest stream sequence known; like [`Self::floor`] by the ledger before the first connect.
    pub fn known(&self) -> u64 {
        if self.created.is_empty() { self.spec.recorded_known } else { self.attempts.known() }
    }

    /// The newest message that is known to be in the stream.
    pub fn newest(&self) -> Option<Anchor> {
        if let Some(LastAcked { stream_seq, id }) = &self.last_acked {
            let id = message::message_id(id, &self.spec.envelope).ok()?;
            return Some(Anchor { seq: *stream_seq, id });
        }
        let here = |floor: &&Floor| self.created.is_empty() || floor.created == self.created;
        self.spec.floor.as_ref().filter(here).and(self.spec.recorded_newest.clone())
    }

    /// Where Resume would start. Before the first connect that is what the ledger says, so that a
    /// receipt written until then does not replace it with less.
    pub fn floor(&self) -> Floor {
        if self.created.is_empty() {
            return self.recorded_floor.clone().unwrap_or_default();
        }
        let seq = self.attempts.floor();
        let seq = self.awaited.floor().map_or(seq, |floor| floor.min(seq));
        Floor { created: self.created.clone(), seq }
    }

    /// Highest sequence of the stream made at `created` below which the *ledger* has everything. A
    /// receipt for what Resume found names this one: acks may be decided and not yet recorded, and
    /// Resume does not look below [`Self::floor`] for their messages.
    pub fn recorded_floor(&self, created: &str) -> u64 {
        let floor = self.recorded_floor.as_ref().filter(|floor| floor.created == created);
        floor.map_or(0, |floor| floor.seq)
    }

    pub(super) fn take_waits(&mut self) -> std::vec::Drain<'_, Duration> {
        self.waits.drain(..)
    }

    /// Does nothing of it wait for an answer, a burial or a ledger write?
    pub(super) fn is_quiet(&self) -> bool {
        self.lanes.in_flight() == 0 && self.to_bury.is_empty() && self.decided.is_empty()
    }

    /// A new connection. Whatever is still in flight here crossed the news on its way; the
    /// publisher answers it unsent, since it takes nothing before a Resume.
    pub(super) fn up(&mut self, facts: StreamFacts) {
        self.lanes.set_window(if facts.pipeline.sends_ahead() { u32::MAX } else { 1 });
        if self.created != facts.created {
            match &self.recorded_floor {
                Some(floor) if self.created.is_empty() && floor.created == facts.created => {
                    self.attempts.restart(floor.seq, self.spec.recorded_known);
                }
                // Never connected: nothing of ours is in any stream.
                None => self.attempts.restart(facts.last_seq, facts.last_seq),
                // Another stream of that name: what we sent lately may be anywhere in it.
                Some(_) => self.attempts.restart(0, 0),
            }
            self.created.clone_from(&facts.created);
            self.awaited.clear();
            self.last_acked = None;
        }
        self.phase = match self.recorded_floor {
            Some(_) => Phase::ResumeAt { at: None, proven: false },
            None => Phase::RecordFloor,
        };
        self.facts = Some(facts);
        self.waiting.look_again();
        self.caution.reset();
    }

    pub(super) fn down(&mut self) {
        self.phase = Phase::Down;
    }

    /// Must a receipt with the floor, even an empty one, be written before anything is sent?
    pub(super) fn wants_floor_recorded(&self) -> bool {
        self.phase == Phase::RecordFloor
    }

    /// May a receipt be drafted? What Resume finds gets a receipt before its answer is here; one of a
    /// hand-over that came behind that would have the same numbers as waiting again.
    pub(super) fn may_record(&self) -> bool {
        !self.reading || self.decided.handed.is_empty()
    }

    /// Everything decided since the last receipt; remembered until it is recorded.
    pub(super) fn take_decided(&mut self) -> Decided {
        self.writing = std::mem::take(&mut self.decided);
        self.writing.clone()
    }

    /// Is this number final here, recorded or not? Says `false` for what the ledger recorded
    /// before the watermark: WAL brings none of that.
    pub fn is_decided(&self, seq: i64) -> bool {
        self.spec.recorded.contains(seq) || self.writing.has(seq) || self.decided.has(seq)
    }

    /// The ledger has what [`Self::take_decided`] took, and this floor with it.
    pub(super) fn recorded(&mut self, decided: &Decided, floor: Floor) {
        self.counts.recorded += decided.len();
        self.writing = Decided::default();
        if floor.created.is_empty() {
            return;
        }
        self.recorded_floor = Some(floor);
        if self.phase == Phase::RecordFloor {
            self.phase = Phase::ResumeAt { at: None, proven: false };
        }
    }

    /// Resume read the stream to `last_seq`; `spec.recorded` has what it found. The entries
    /// returned were waiting here and are in stream and ledger.
    pub(super) fn resumed(
        &mut self,
        now: Instant,
        created: &str,
        last_seq: u64,
        strangers: Vec<Found>,
    ) -> Finds {
        self.reading = false;
        let mut undoubted = Vec::new();
        if created == self.created && !strangers.is_empty() {
            strangers.into_iter().for_each(|found| self.awaited.insert(found));
            let Destination { lanes, awaited, .. } = self;
            let slots = lanes.find_waiting(|event| awaited.take(event));
            self.counts.resumed += slots.len() as u64;
            undoubted.extend(slots.into_iter().filter_map(|slot| self.lanes.settle(slot)));
        }
        if !self.has_handed() {
            self.awaited.forget_below(Lsn::ZERO);
        }
        if let Phase::Resuming { proven } = self.phase {
            if created == self.created {
                self.attempts.resumed(last_seq, proven);
                self.phase = if proven { Phase::Flow } else { Phase::Probe };
            } else {
                // Replaced while it was read; the publisher will come `up` with the new one.
                self.retry_resume(now);
            }
        }
        if self.spec.recorded.is_empty() {
            return Finds { recorded: Vec::new(), undoubted };
        }
        let slots = self.lanes.find_waiting(|event| self.spec.recorded.contains(event.seq));
        self.counts.resumed += slots.len() as u64;
        let recorded = slots.into_iter().filter_map(|slot| self.lanes.settle(slot)).collect();
        Finds { recorded, undoubted }
    }

    /// Did Resume see this very event in the stream, though its row was not to be seen?
    pub(super) fn is_in_stream(&mut self, event: &Event) -> bool {
        let seen = self.awaited.take(event);
        self.counts.resumed += u64::from(seen);
        seen
    }

    pub(super) fn resume_failed(&mut self, now: Instant) {
        self.reading = false;
        if matches!(self.phase, Phase::Resuming { .. }) {
            self.retry_resume(now);
        }
    }

    fn retry_resume(&mut self, now: Instant) {
        self.phase = Phase::ResumeAt { at: Some(now + self.backoff.next_wait()), proven: false };
    }

    /// What became of a row of attempts. Entries that are final are returned.
    pub(super) fn answer(&mut self, now: Instant, answer: &Answer) -> Vec<Entry> {
        let mut stored = Vec::new();
        let mut answered = 0u64;
        let alone = self.phase == Phase::Probe;
        for number in answer.first.0..=answer.last.0 {
            let Some(sent) = self.attempts.answer(number) else { continue };
            answered += 1;
            match &answer.outcome {
                Outcome::Stored { .. } => {
                    self.waits.push(now.saturating_duration_since(sent.at));
                    stored.extend(self.lanes.settle(sent.slot));
                }
                Outcome::Unknown(_) => {
                    self.attempts.doubt(&sent);
                    let retry_at = alone.then(|| self.retry_at(now, sent.slot));
                    self.lanes.give_back(sent.slot, retry_at);
                }
                Outcome::NotSent => {
                    self.lanes.unsend(sent.slot);
                    self.lanes.give_back(sent.slot, None);
                }
                Outcome::Refused(refusal) => self.refused(now, sent.slot, refusal),
            }
        }
        if answered == 0 {
            return stored;
        }
        self.waiting.look_again();
        match &answer.outcome {
            Outcome::Stored { stream_seq, duplicate } => {
                self.counts.acked += stored.len() as u64;
                self.stored(*stream_seq, *duplicate, &stored);
            }
            Outcome::Unknown(doubt) => {
                *self.counts.doubts.entry(doubt.as_str()).or_default() += answered;
                self.unproven = if alone { self.unproven.saturating_add(1) } else { 0 };
                if matches!(self.phase, Phase::Flow | Phase::Probe | Phase::Drain { .. }) {
                    self.phase = Phase::Drain { proven: false, wait: true };
                }
            }
            Outcome::Refused(_) => self.row_ended(false),
            // Behind a gap that the server saw; or the connection is about to be told down.
            Outcome::NotSent => self.row_ended(true),
        }
        if let Phase::Drain { proven, wait } = self.phase
            && self.lanes.in_flight() == 0
        {
            let at = wait.then(|| now + self.backoff.next_wait());
            self.phase = Phase::ResumeAt { at, proven };
        }
        stored
    }

    fn stored(&mut self, stream_seq: u64, duplicate: bool, entries: &[Entry]) {
        self.counts.duplicates += u64::from(duplicate);
        let runs = entries.len().saturating_mul(WOKEN_PER_STORED);
        if self.caution.stored() && !self.lanes.wake_early(runs) {
            self.caution.healed();
        }
        // Single acks come out of order, and a duplicate's is that of an old message.
        if stream_seq >= self.attempts.known()
            && let Some(entry) = entries.last()
        {
            self.last_acked = Some(LastAcked { stream_seq, id: entry.event.id.clone() });
        }
        self.attempts.learn(stream_seq);
        // A duplicate while events flow is one fewer to send; alone it proves nothing.
        if !duplicate || self.phase == Phase::Flow {
            self.backoff.reset();
        }
        if self.phase == Phase::Probe {
            self.phase = Phase::ResumeAt { at: None, proven: !duplicate };
        }
    }

    /// A refusal ends what is sent ahead, and so does a gap. What was on its way to the publisher then must
    /// not be stored before what was sent back, so the publisher takes nothing until Resume tells
    /// it that the core knows. (Per run there is one event in flight, and nothing on its way behind
    /// it.)
    fn row_ended(&mut self, wait: bool) {
        if self.facts.as_ref().is_some_and(|facts| facts.pipeline.sends_ahead()) {
            match self.phase {
                Phase::Flow => self.phase = Phase::Drain { proven: true, wait },
                Phase::Probe => self.phase = Phase::Drain { proven: false, wait },
                Phase::Down
                | Phase::RecordFloor
                | Phase::ResumeAt { .. }
                | Phase::Resuming { .. }
                | Phase::Drain { .. } => {}
            }
        }
    }

    fn refused(&mut self, now: Instant, slot: Slot, refusal: &Refusal) {
        if let Some(reason) = refusal.permanent {
            let detail = self.words_of(slot, refusal);
            let server_code = Some(refusal.code).filter(|code| *code != 0);
            self.condemn(slot, Fault { reason, detail, server_code });
            return;
        }
        self.counts.refusals += 1;
        self.caution.refused(now);
        let retry_at = self.retry_at(now, slot);
        self.lanes.give_back(slot, Some(retry_at));
    }

    /// By the event's own tries: failures of others don't add up to the longest wait.
    fn retry_at(&mut self, now: Instant, slot: Slot) -> Instant {
        let tries = self.lanes.get(slot).map_or(1, |entry| entry.attempts);
        now + self.backoff.wait_after(tries.saturating_sub(1))
    }

    fn words_of(&self, slot: Slot, refusal: &Refusal) -> String {
        let mut words = refusal.detail.clone();
        if refusal.code != 0 {
            words.push_str(&format!(" (JetStream error {})", refusal.code));
            let message = self.lanes.get(slot).map(|entry| self.message(entry));
            if let Some(Ok(message)) = message {
                let size = message.size();
                words.push_str(&format!("; the message has {size} bytes, headers counted"));
            }
        }
        words
    }

    /// Holds the lane until the event is in the dead letters.
    fn condemn(&mut self, slot: Slot, fault: Fault) {
        if self.lanes.bury(slot) {
            self.to_bury.push((slot, fault));
        }
    }

    /// The event is in the dead letters, durably.
    pub(super) fn buried(&mut self, slot: Slot, seq: i64, reason: Reason) -> Option<Entry> {
        let entry = self.lanes.get(slot).filter(|entry| entry.event.seq == seq)?;
        if entry.origin.letter().is_none() {
            let (event, ordinal) = (Arc::clone(&entry.event), entry.ordinal());
            *self.counts.dead.entry(reason.as_str()).or_default() += 1;
            self.block_behind(&event, ordinal);
        }
        self.lanes.settle(slot)
    }

    /// Nothing blocks this run any more.
    pub(super) fn release(&mut self, run: RunHash, number: u64) {
        if self.lanes.release(run, number) {
            self.waiting.unpark(run);
        }
    }

    /// The dead letters could not be written: the event is tried again from the start.
    pub(super) fn burial_failed(&mut self, now: Instant, slot: Slot, seq: i64) {
        if self.lanes.get(slot).is_some_and(|entry| entry.event.seq == seq) {
            self.lanes.exhume(slot, now + self.backoff.next_wait());
        }
    }

    /// Records a decision for the next receipt.
    pub(super) fn decide(&mut self, now: Instant, entry: &Entry, decision: Decision) {
        self.moved_at = Some(now);
        let (seq, run) = (entry.event.seq, entry.event.run_hash);
        // A letter's number was decided when it was buried, and has its place.
        if entry.origin.letter().is_none() {
            let behind = self.order.note(run, seq);
            self.decided.late.extend(behind.map(|behind| (seq, behind)));
        }
        self.decide_number(seq, entry.origin, decision);
    }

    /// Highest number decided here.
    pub fn highest(&self) -> i64 {
        self.order.newest()
    }

    /// Resume found numbers up to this one in the stream, and the ledger has their order.
    pub(super) fn forget_order(&mut self, newest: i64) {
        self.order.forget(newest);
    }

    /// The same for an event that never was in a lane.
    pub(super) fn decide_number(&mut self, seq: i64, origin: Origin, decision: Decision) {
        self.remembered.note(seq);
        self.decided.add(seq, origin, decision);
    }

    /// The clock goes on.
    pub(super) fn wake(&mut self, now: Instant) {
        if self.lanes.wake(now) {
            self.waiting.look_again();
        }
        self.waiting.release(now);
    }

    /// The next thing to do, if there is one now.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        sending: bool,
        room: bool,
        confirmable: Lsn,
    ) -> Option<Step> {
        if sending
            && room
            && let Some(step) = self.next_waiting()
        {
            return Some(step);
        }
        let paused = self.caution.is_paused(now);
        loop {
            if let Some((slot, fault)) = self.to_bury.pop() {
                let Some(entry) = self.lanes.get(slot) else { continue };
                // A copy of the event, so that the lanes alone hold the shared one.
                let event = Box::new(Event::clone(&entry.event));
                let letter = entry.origin.letter();
                return Some(Step::Bury(slot, event, fault, entry.attempts, letter));
            }
            match self.phase {
                Phase::ResumeAt { at, proven } => {
                    if !self.may_resume() || at.is_some_and(|at| at > now) {
                        return None;
                    }
                    self.reading = true;
                    self.phase = Phase::Resuming { proven };
                    let (floor, known, newest) = (self.floor(), self.known(), self.newest());
                    // The position has passed what is handed over, and nobody knows whether it is
                    // in the stream.
                    let confirmable = if self.has_handed() { Lsn::ZERO } else { confirmable };
                    return Some(Step::Resume(ReadFrom { floor, known, newest, confirmable }));
                }
                Phase::Probe if self.lanes.in_flight() > 0 => return None,
                Phase::Flow if self.is_full() => return None,
                Phase::Probe | Phase::Flow if sending && !paused => {}
                Phase::Probe
                | Phase::Flow
                | Phase::Down
                | Phase::RecordFloor
                | Phase::Resuming { .. }
                | Phase::Drain { .. } => return None,
            }
            let another = self.phase == Phase::Probe && self.unproven % 2 == 1;
            let slot = if another { self.lanes.take_least_tried() } else { self.lanes.take() }?;
            let entry = self.lanes.get(slot)?;
            match self.encode(entry) {
                Ok(message) => {
                    self.counts.sent += 1;
                    return Some(Step::Send(self.attempts.send(slot, now), message));
                }
                Err(fault) => {
                    self.lanes.unsend(slot);
                    self.condemn(slot, fault);
                }
            }
        }
    }

    /// Is it the stream that takes nothing, and not some runs that are refused?
    pub(super) fn is_hopeless(&self) -> bool {
        self.caution.is_hopeless()
    }

    fn may_resume(&self) -> bool {
        !self.reading && self.lanes.in_flight() == 0
    }

    fn is_full(&self) -> bool {
        let max = if self.caution.is_careful() { 1 } else { self.spec.max_in_flight };
        self.lanes.in_flight() >= max
            || self.attempts.span() >= self.spec.max_in_flight.saturating_mul(SPAN_FACTOR)
    }

    fn message(&self, entry: &Entry) -> Result<Message, Fault> {
        message::encode_again(&entry.event, &self.spec.envelope, entry.origin.letter())
    }

    fn encode(&self, entry: &Entry) -> Result<Message, Fault> {
        let message = self.message(entry)?;
        // The stream's limit may just have been raised for a letter: then the stream decides.
        let limit = self.facts.as_ref().map_or(usize::MAX, |facts| match entry.origin.letter() {
            None => facts.max_message_bytes,
            Some(_) => facts.max_payload_bytes,
        });
        if message.size() > limit {
            let detail = format!(
                "the message has {} bytes, headers counted; server and stream take {limit}",
                message.size()
            );
            return Err(Fault::new(Reason::TooLarge, detail));
        }
        Ok(message)
    }

    /// When time alone brings something to do.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let phase = match self.phase {
            Phase::ResumeAt { at, .. } => at.filter(|_| self.may_resume()),
            Phase::Probe | Phase::Flow => self.caution.wake_at(),
            Phase::Down | Phase::RecordFloor | Phase::Resuming { .. } | Phase::Drain { .. } => None,
        };
        phase.into_iter().chain(self.lanes.wake_at()).chain(self.waiting.held_until()).min()
    }
}
