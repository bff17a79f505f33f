//! A core in small: one run of events, shipped go-back-N by the rules that the publisher states.

use outboxd::config::{DestinationConfig, Filter, NatsAuth, NatsTls, PipelineChoice, StreamCreate};
use outboxd::event::{Event, EventId, RunHash};
use outboxd::lsn::{Lsn, Position};
use outboxd::message::{Envelope, Message, Template, encode};
use outboxd::publish::{Order, Publisher, Report, Shipment};
use outboxd::relay::outcome::{
    Answer, Attempt, DestinationId, Floor, Outcome, Pipeline, ReadFrom, Resumed, StreamFacts,
};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn destination(servers: Vec<String>) -> DestinationConfig {
    DestinationConfig {
        name: "events".into(),
        servers,
        stream: "EVENTS".into(),
        subject: Template::default(),
        filter: Filter::default(),
        required: true,
        pipeline: PipelineChoice::Auto,
        exclusive: false,
        on_dead_letter: outboxd::config::OnDeadLetter::Continue,
        ack_timeout: Duration::from_secs(2),
        max_in_flight: 10_000,
        shares_stream: false,
        auth: NatsAuth::default(),
        tls: NatsTls::default(),
        inbox_prefix: None,
        js_domain: None,
        create: StreamCreate { enabled: true, replicas: 1, ..StreamCreate::default() },
    }
}

/// Commit LSN of the event with this number.
pub fn lsn_of(seq: i64) -> Lsn {
    Lsn(1_000 + seq.unsigned_abs())
}

pub fn message(seq: i64, payload: Vec<u8>, envelope: &Envelope) -> Message {
    message_of("order.created", seq, payload, envelope)
}

pub fn message_of(kind: &str, seq: i64, payload: Vec<u8>, envelope: &Envelope) -> Message {
    let event = Event {
        seq,
        position: Some(Position { commit_lsn: lsn_of(seq), index: 0 }),
        id: EventId::Int(seq),
        run: Some("run-1".into()),
        run_hash: RunHash::of_run(b"run-1"),
        kind: kind.to_owned().into(),
        tenant: None,
        version: None,
        payload: Some(payload.into()),
        headers: None,
        created_at: None,
        committed_at: None,
        fault: None,
    };
    encode(&event, envelope).unwrap()
}

/// A publisher and the reports it makes.
pub struct Wire {
    pub publisher: Publisher,
    pub envelope: Envelope,
    reports: UnboundedReceiver<(DestinationId, Report)>,
    stop: CancellationToken,
    tasks: TaskTracker,
    next_attempt: u64,
}

impl Wire {
    pub fn open(config: DestinationConfig) -> Wire {
        let envelope = Envelope::new("orders", 1, &config);
        let (sender, reports) = unbounded_channel();
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let publisher = Publisher::spawn(
            DestinationId(0),
            config,
            envelope.clone(),
            sender,
            stop.clone(),
            &tasks,
        );
        Wire { publisher, envelope, reports, stop, tasks, next_attempt: 1 }
    }

    pub async fn report(&mut self) -> Report {
        timeout(PATIENCE, self.reports.recv()).await.expect("a report in time").unwrap().1
    }

    /// Skips what comes before `Up`.
    pub async fn up(&mut self) -> StreamFacts {
        loop {
            if let Report::Up(facts) = self.report().await {
                return facts;
            }
        }
    }

    pub async fn resume(&mut self, floor: Floor) -> Resumed {
        self.read(ReadFrom { known: floor.seq, floor, ..ReadFrom::default() }).await
    }

    pub async fn read(&mut self, from: ReadFrom) -> Resumed {
        self.publisher.order(Order::Resume(from));
        let report = self.report().await;
        let Report::Resumed(Ok(resumed)) = report else { panic!("{report:?}") };
        resumed
    }

    /// Ships in one order; the attempts' numbers.
    pub fn ship(&mut self, messages: impl IntoIterator<Item = Message>) -> Vec<u64> {
        let mut attempts = Vec::new();
        let shipments = messages.into_iter().map(|message| {
            let attempt = Attempt(self.next_attempt);
            self.next_attempt += 1;
            attempts.push(attempt.0);
            Shipment { attempt, message }
        });
        let shipments = shipments.collect();
        self.publisher.order(Order::Ship(shipments));
        attempts
    }

    /// Answers until every one of these attempts has one.
    pub async fn outcomes(&mut self, attempts: &[u64]) -> Vec<Outcome> {
        let mut outcomes = BTreeMap::new();
        while outcomes.len() < attempts.len() {
            let Report::Answers(answers) = self.report().await else { continue };
            for Answer { first, last, outcome } in answers {
                for attempt in attempts.iter().filter(|a| (first.0..=last.0).contains(*a)) {
                    let before = outcomes.insert(*attempt, outcome.clone());
                    assert_eq!(before, None, "attempt {attempt} was answered twice");
                }
            }
        }
        outcomes.into_values().collect()
    }

    pub async fn close(self) {
        self.stop.cancel();
        self.tasks.close();
        timeout(PATIENCE, self.tasks.wait()).await.expect("the task ends");
    }
}

/// Publishes all messages, as one run, through whatever happens to the server.
pub struct Run {
    pub wire: Wire,
    messages: Vec<Message>,
    decided: Vec<bool>,
    /// Stored so far; a test acts on it.
    pub stored: usize,
    shipped: usize,
    in_flight: BTreeMap<u64, usize>,
    floor: Floor,
    pipeline: Pipeline,
    phase: Phase,
    pub unknown: usize,
    /// Not stored, and known not to be.
    pub turned_away: usize,
    /// Pipelines that were announced, each once in a row.
    pub pipelines: Vec<Pipeline>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Down,
    Drain,
    Resuming { proven: bool },
    Probe,
    Flow,
}

impl Run {
    pub fn new(wire: Wire, events: i64) -> Run {
        let messages: Vec<_> =
            (1..=events).map(|seq| message(seq, vec![b'x'; 200], &wire.envelope)).collect();
        Run {
            wire,
            decided: vec![false; messages.len()],
            messages,
            stored: 0,
            shipped: 0,
            in_flight: BTreeMap::new(),
            floor: Floor::default(),
            pipeline: Pipeline::PerRun,
            phase: Phase::Down,
            unknown: 0,
            turned_away: 0,
            pipelines: Vec::new(),
        }
    }

    pub fn is_done(&self) -> bool {
        self.stored == self.messages.len()
    }

    /// One report and what follows from it.
    pub async fn step(&mut self) {
        match self.wire.report().await {
            Report::Up(facts) => {
                self.floor.created = facts.created;
                self.pipeline = facts.pipeline;
                if self.pipelines.last() != Some(&self.pipeline) {
                    self.pipelines.push(self.pipeline);
                }
                // What was shipped as the connection came up is still to be answered.
                if self.in_flight.is_empty() {
                    self.resume(false);
                } else {
                    self.phase = Phase::Drain;
                }
            }
            Report::Down(_) => self.phase = Phase::Down,
            Report::Forbidden(_) => {}
            Report::Resumed(Ok(resumed)) => {
                let Phase::Resuming { proven } = self.phase else { return };
                self.floor.seq = resumed.last_seq;
                for found in resumed.found {
                    self.decide(usize::try_from(found.seq - 1).unwrap());
                }
                self.shipped = self.decided.iter().take_while(|decided| **decided).count();
                assert_eq!(self.shipped, self.stored, "the stream holds a prefix");
                self.phase = if proven { Phase::Flow } else { Phase::Probe };
            }
            Report::Resumed(Err(_)) if self.phase != Phase::Down => self.resume(false),
            Report::Resumed(Err(_)) => {}
            Report::Answers(answers) => {
                for answer in answers {
                    self.answer(&answer);
                }
            }
        }
        self.ship();
    }

    fn answer(&mut self, answer: &Answer) {
        for attempt in answer.first.0..=answer.last.0 {
            let Some(index) = self.in_flight.remove(&attempt) else { continue };
            match answer.outcome {
                Outcome::Stored { duplicate, .. } => {
                    self.decide(index);
                    if self.phase == Phase::Probe {
                        self.resume(!duplicate);
                    }
                }
                Outcome::Unknown(_) | Outcome::NotSent | Outcome::Refused(_) => {
                    let unknown = matches!(answer.outcome, Outcome::Unknown(_));
                    self.unknown += usize::from(unknown);
                    self.turned_away += usize::from(!unknown);
                    if matches!(self.phase, Phase::Flow | Phase::Probe) {
                        self.phase = Phase::Drain;
                    }
                }
            }
        }
        if self.phase == Phase::Drain && self.in_flight.is_empty() {
            self.resume(false);
        }
    }

    fn decide(&mut self, index: usize) {
        self.stored += usize::from(!std::mem::replace(&mut self.decided[index], true));
    }

    fn resume(&mut self, proven: bool) {
        self.phase = Phase::Resuming { proven };
        let (floor, known) = (self.floor.clone(), self.floor.seq);
        let from = ReadFrom { floor, known, ..ReadFrom::default() };
        self.wire.publisher.order(Order::Resume(from));
    }

    fn ship(&mut self) {
        let window = match (self.phase, self.pipeline) {
            (Phase::Flow, Pipeline::Batch | Pipeline::Sequence) => 5_000,
            (Phase::Flow, Pipeline::PerRun) | (Phase::Probe, _) => 1,
            (Phase::Down | Phase::Drain | Phase::Resuming { .. }, _) => return,
        };
        let room = window - self.in_flight.len().min(window);
        let to = (self.shipped + room).min(self.messages.len());
        if to > self.shipped {
            let batch = self.messages[self.shipped..to].to_vec();
            let attempts = self.wire.ship(batch);
            self.in_flight.extend(attempts.into_iter().zip(self.shipped..to));
            self.shipped = to;
        }
    }
}
