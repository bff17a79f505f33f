//! A destination's publisher as the core may expect it: every attempt is answered exactly once,
//! and after Up, Down, an unknown outcome or (in a batch or in sequence) a refusal it takes nothing
//! until Resume.

use std::collections::{BTreeSet, VecDeque};

use outboxd::error::{Failure, Kind};
use outboxd::event::Reason;
use outboxd::message::{Envelope, parse_identity};
use outboxd::publish::{Order, Report, Shipment};
use outboxd::relay::outcome::{
    Answer, Attempt, Doubt, Outcome, Pipeline, ReadFrom, Refusal, Resumed, Retention, StreamFacts,
};

use crate::broker::{Broker, Expected, Micros, Nth, Packet, Reply};
use crate::postgres::{MAX_MESSAGE_BYTES, POISON};

#[derive(Debug)]
pub enum Effect {
    Send(Packet),
    Report(Report),
    /// Ask again in `ack_timeout`: is this still unanswered?
    Watch(Watched),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    Batch(u64),
    One(u64),
}

#[derive(Debug)]
struct Batch {
    id: u64,
    attempts: Vec<u64>,
    ids: Vec<String>,
}

#[derive(Debug)]
pub struct Publisher {
    pub conn: Option<u64>,
    pub pipeline: Pipeline,
    replicated: bool,
    envelope: Envelope,
    fenced: bool,
    queue: VecDeque<Shipment>,
    batch: Option<Batch>,
    ones: BTreeSet<u64>,
    /// In sequence: the stream's last message when everything sent is stored.
    last: (u64, String),
    /// When the last Resume read the stream.
    pub resumed_at: Micros,
}

/// Never used twice, by no connection and no process.
#[derive(Debug, Default)]
pub struct Ids(u64);

impl Ids {
    pub fn next(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

impl Publisher {
    pub fn new(envelope: Envelope) -> Publisher {
        Publisher {
            conn: None,
            pipeline: Pipeline::Batch,
            replicated: false,
            envelope,
            fenced: true,
            queue: VecDeque::new(),
            batch: None,
            ones: BTreeSet::new(),
            last: (0, String::new()),
            resumed_at: 0,
        }
    }

    pub fn connect(&mut self, conn: u64, pipeline: Pipeline, broker: &Broker) -> Effect {
        self.conn = Some(conn);
        self.pipeline = pipeline;
        self.replicated = broker.replicated;
        self.fenced = true;
        Effect::Report(Report::Up(StreamFacts {
            stream: "EVENTS".to_owned(),
            created: broker.created(),
            replicas: if broker.replicated { 3 } else { 1 },
            retention: Retention::Limits,
            last_seq: broker.last_seq(),
            first_seq: 1,
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_payload_bytes: MAX_MESSAGE_BYTES,
            duplicate_window: std::time::Duration::from_micros(broker.window),
            server_version: "2.15.1".to_owned(),
            pipeline,
            why: String::new(),
        }))
    }

    pub fn disconnect(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.conn.take().is_some() {
            self.unknown(Doubt::Disconnected, &mut effects);
            self.give_up(Doubt::Disconnected, &mut effects);
            effects.push(Effect::Report(Report::Down(failure("gone"))));
        }
        effects
    }

    pub fn order(
        &mut self,
        now: Micros,
        order: Order,
        broker: &Broker,
        ids: &mut Ids,
        fails: bool,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        match order {
            Order::Ship(shipments) => {
                self.queue.extend(shipments);
                if self.fenced {
                    self.drop_queue(&mut effects);
                }
                self.send(ids, &mut effects);
            }
            Order::Resume(_) if self.conn.is_none() || fails => {
                effects.push(Effect::Report(Report::Resumed(Err(failure("no answer")))));
            }
            Order::Resume(ReadFrom { floor, known, confirmable, .. }) => {
                self.fenced = false;
                self.last = (broker.last_seq(), String::new());
                self.resumed_at = now;
                let same = floor.created == broker.created();
                let from = if same { floor.seq } else { 0 };
                let reached = broker.last_seq();
                assert!(!same || (from..=reached).contains(&known), "{known} is not known");
                let found = (from + 1..=reached).filter_map(|seq| {
                    let found = parse_identity(broker.get(seq)?.headers(), &self.envelope, seq)?;
                    found.commit_lsn.is_none_or(|lsn| lsn >= confirmable).then_some(found)
                });
                effects.push(Effect::Report(Report::Resumed(Ok(Resumed {
                    created: broker.created(),
                    last_seq: broker.last_seq(),
                    found: found.collect(),
                }))));
            }
        }
        effects
    }

    fn send(&mut self, ids: &mut Ids, effects: &mut Vec<Effect>) {
        let Some(conn) = self.conn else { return };
        match self.pipeline {
            Pipeline::PerRun | Pipeline::Sequence => {
                while let Some(shipment) = self.queue.pop_front() {
                    let attempt = shipment.attempt.0;
                    let mut packet = self.packet(conn, &shipment, None);
                    if self.pipeline == Pipeline::Sequence {
                        let (seq, id) = self.last.clone();
                        let named = !self.replicated && !self.ones.is_empty();
                        packet.expected = Some(Expected { seq, msg_id: named.then_some(id) });
                        self.last = (seq + 1, packet.msg_id.clone());
                    }
                    self.ones.insert(attempt);
                    effects.push(Effect::Send(packet));
                    effects.push(Effect::Watch(Watched::One(attempt)));
                }
            }
            Pipeline::Batch if self.batch.is_none() && !self.queue.is_empty() => {
                let id = ids.next();
                // Any length will do; this one makes many of them.
                let length = self.queue.len().min(12);
                let mut batch = Batch { id, attempts: Vec::new(), ids: Vec::new() };
                for (shipment, nth) in
                    self.queue.drain(..length).collect::<Vec<_>>().iter().zip(1..)
                {
                    batch.attempts.push(shipment.attempt.0);
                    batch.ids.push(shipment.message.id().to_owned());
                    let place = Nth { batch: id, nth, commit: nth == length as u64 };
                    effects.push(Effect::Send(self.packet(conn, shipment, Some(place))));
                }
                self.batch = Some(batch);
                effects.push(Effect::Watch(Watched::Batch(id)));
            }
            Pipeline::Batch => {}
        }
    }

    fn packet(&self, conn: u64, shipment: &Shipment, batch: Option<Nth>) -> Packet {
        let message = &shipment.message;
        let found = parse_identity(message.headers(), &self.envelope, 0).expect("our own headers");
        Packet {
            conn,
            attempt: shipment.attempt.0,
            batch,
            expected: None,
            seq: found.seq,
            msg_id: message.id().to_owned(),
            head: message.head().to_owned(),
            poison: message.payload == POISON,
            resumed_at: self.resumed_at,
            sent_at: 0,
            stale: false,
        }
    }

    /// What was watched had `ack_timeout` to be answered.
    pub fn silence(&mut self, watched: Watched) -> Vec<Effect> {
        let mut effects = Vec::new();
        match watched {
            Watched::Batch(id) if self.batch.as_ref().is_some_and(|batch| batch.id == id) => {
                self.unknown(Doubt::Silence, &mut effects);
            }
            Watched::One(attempt) if self.ones.contains(&attempt) => match self.pipeline {
                Pipeline::Sequence => {
                    self.give_up(Doubt::Silence, &mut effects);
                    self.fence(&mut effects);
                }
                Pipeline::PerRun | Pipeline::Batch => {
                    self.one(attempt, Outcome::Unknown(Doubt::Silence), &mut effects);
                }
            },
            Watched::Batch(_) | Watched::One(_) => {}
        }
        effects
    }

    pub fn reply(&mut self, reply: Reply, broker: &Broker, ids: &mut Ids) -> Vec<Effect> {
        let mut effects = Vec::new();
        match reply {
            Reply::Ack { attempt, seq, duplicate } => {
                self.one(attempt, Outcome::Stored { stream_seq: seq, duplicate }, &mut effects);
            }
            Reply::InProgress { attempt } => {
                let waits = self.batch.as_ref().map(|batch| batch.attempts.as_slice());
                if waits == Some(&[attempt]) {
                    self.unknown(Doubt::InProgress, &mut effects);
                } else {
                    self.one(attempt, Outcome::Unknown(Doubt::InProgress), &mut effects);
                }
            }
            Reply::Refused { attempt, permanent } => {
                self.one(attempt, Outcome::Refused(refusal(permanent)), &mut effects);
            }
            Reply::WrongLast { attempt } => {
                let outcome = match broker.replicated {
                    true => Outcome::Unknown(Doubt::Gap),
                    false => Outcome::NotSent,
                };
                self.one(attempt, outcome, &mut effects);
            }
            Reply::BatchAck { batch, seq, count, duplicate } => {
                if let Some(open) = self.take(batch) {
                    let proof = broker
                        .get(seq)
                        .is_some_and(|stored| Some(&stored.msg_id) == open.ids.last());
                    let stands = count == 1 || !broker.replicated || proof;
                    let (first, last) = ends(&open.attempts);
                    if stands && seq > 0 {
                        let outcome = Outcome::Stored { stream_seq: seq, duplicate };
                        effects.push(answer(first, last, outcome));
                    } else {
                        self.batch = Some(open);
                        self.unknown(Doubt::Unproven, &mut effects);
                    }
                }
            }
            Reply::BatchRefused { batch, seq, count, permanent } => {
                let Some(open) = self.take(batch) else { return effects };
                let count = usize::try_from(count).unwrap();
                let (first, last) = ends(&open.attempts);
                if count > 0 && broker.replicated {
                    self.batch = Some(open);
                    self.unknown(Doubt::Gap, &mut effects);
                    return effects;
                }
                let refused = open.attempts[count];
                if count > 0 {
                    let outcome = Outcome::Stored { stream_seq: seq, duplicate: false };
                    effects.push(answer(first, refused - 1, outcome));
                }
                let outcome = Outcome::Refused(refusal(permanent));
                effects.push(answer(refused, refused, outcome));
                if refused < last {
                    effects.push(answer(refused + 1, last, Outcome::NotSent));
                }
                self.fence(&mut effects);
            }
            Reply::BatchGap { batch } => {
                if self.batch.as_ref().is_some_and(|open| open.id == batch) {
                    self.unknown(Doubt::Gap, &mut effects);
                }
            }
        }
        self.send(ids, &mut effects);
        effects
    }

    fn take(&mut self, batch: u64) -> Option<Batch> {
        self.batch.take_if(|open| open.id == batch)
    }

    fn one(&mut self, attempt: u64, outcome: Outcome, effects: &mut Vec<Effect>) {
        if self.ones.remove(&attempt) {
            let in_sequence = self.pipeline == Pipeline::Sequence;
            let over = match outcome {
                Outcome::Unknown(_) => true,
                Outcome::Stored { duplicate: false, .. } => false,
                Outcome::Stored { .. } | Outcome::Refused(_) | Outcome::NotSent => in_sequence,
            };
            let outcome = match outcome {
                // It would not have been stored behind what failed.
                Outcome::Refused(_) if in_sequence && self.fenced => Outcome::NotSent,
                other => other,
            };
            effects.push(answer(attempt, attempt, outcome));
            if over {
                self.fence(effects);
            }
        }
    }

    /// None of the single ones is waited for any more.
    fn give_up(&mut self, doubt: Doubt, effects: &mut Vec<Effect>) {
        for attempt in std::mem::take(&mut self.ones) {
            effects.push(answer(attempt, attempt, Outcome::Unknown(doubt)));
        }
    }

    /// Nobody can tell what became of the open batch.
    fn unknown(&mut self, doubt: Doubt, effects: &mut Vec<Effect>) {
        if let Some(batch) = self.batch.take() {
            let (first, last) = ends(&batch.attempts);
            effects.push(answer(first, last, Outcome::Unknown(doubt)));
        }
        self.fence(effects);
    }

    fn fence(&mut self, effects: &mut Vec<Effect>) {
        self.fenced = true;
        self.drop_queue(effects);
    }

    fn drop_queue(&mut self, effects: &mut Vec<Effect>) {
        for shipment in self.queue.drain(..) {
            effects.push(answer(shipment.attempt.0, shipment.attempt.0, Outcome::NotSent));
        }
    }
}

fn ends(attempts: &[u64]) -> (u64, u64) {
    (attempts[0], attempts[attempts.len() - 1])
}

fn answer(first: u64, last: u64, outcome: Outcome) -> Effect {
    let answer = Answer { first: Attempt(first), last: Attempt(last), outcome };
    Effect::Report(Report::Answers(vec![answer]))
}

fn refusal(permanent: bool) -> Refusal {
    let permanent = permanent.then_some(Reason::TooLarge);
    Refusal { permanent, code: 10_077, detail: "planted".to_owned() }
}

fn failure(detail: &str) -> Failure {
    Failure::new(Kind::SourceUnreachable, detail)
}
