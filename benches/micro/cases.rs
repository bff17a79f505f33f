//! What is measured: each case prepares its state once, and one turn of it is the same work again.

use std::hint::black_box;
use std::time::{Duration, Instant};

use outboxd::config::{ColumnMap, QualifiedName};
use outboxd::decode::{Decoded, Decoder};
use outboxd::event::Event;
use outboxd::lsn::Lsn;
use outboxd::message::{Envelope, Template, encode};
use outboxd::relay::destination::DestinationSpec;
use outboxd::relay::machine::Verified;
use outboxd::relay::outcome::{
    Answer, Attempt, DestinationId, Floor, Outcome, Pipeline, Retention, StreamFacts,
};
use outboxd::relay::ranges::RangeSet;
use outboxd::relay::{Action, Input, Limits, Relay};

use crate::frames;

type Turn = Box<dyn FnMut()>;

/// One thing to measure.
pub struct Case {
    /// For people, and for the baseline.
    pub name: &'static str,
    /// Events of one turn.
    pub events: u64,
    /// Makes the state; the turn is what is measured.
    pub prepare: fn() -> Turn,
}

/// In the order of an event's way.
pub const CASES: &[Case] = &[
    Case { name: "decode-insert", events: 1, prepare: decode_insert },
    Case { name: "core-transaction-of-100", events: 100, prepare: || core(100) },
    Case { name: "core-transaction-of-1", events: 1, prepare: || core(1) },
    Case { name: "message", events: 1, prepare: || message(None) },
    Case { name: "message-with-row-headers", events: 1, prepare: || message(Some(ROW_HEADERS)) },
    Case { name: "decided-look-up", events: 1, prepare: look_up },
    Case { name: "decided-in-sequence", events: 1, prepare: in_sequence },
    Case { name: "decided-out-of-sequence", events: 1, prepare: out_of_sequence },
];

const ROW_HEADERS: &str = r#"{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "content-type": "application/json"}"#;

fn decoder() -> Decoder {
    let table = QualifiedName { schema: "outbox".to_owned(), name: frames::TABLE.to_owned() };
    let mut decoder = Decoder::new(table, ColumnMap::default());
    for frame in [frames::relation(), frames::begin(0x1000)] {
        decoder.decode(&frame).unwrap();
    }
    decoder
}

fn event(seq: i64, run: &str, headers: Option<&str>) -> Event {
    match decoder().decode(&frames::insert(seq, run, headers)).unwrap() {
        Decoded::Event(event) => event,
        other => panic!("{other:?}"),
    }
}

fn envelope() -> Envelope {
    Envelope {
        relay: "orders".to_owned(),
        generation: 1,
        stream: "EVENTS".to_owned(),
        template: Template::default(),
        id_suffix: None,
        replay: None,
    }
}

fn decode_insert() -> Turn {
    let (mut decoder, frame) = (decoder(), frames::insert(1_000_000, "run-417", None));
    Box::new(move || {
        black_box(decoder.decode(black_box(&frame)).unwrap());
    })
}

fn message(headers: Option<&str>) -> Turn {
    let (event, envelope) = (event(1_000_000, "run-417", headers), envelope());
    Box::new(move || {
        black_box(encode(black_box(&event), &envelope).unwrap());
    })
}

/// Holes as a relay has them whose destination takes every second kind of event, say.
fn holes() -> RangeSet {
    (0..10_000).map(|n| (n * 10, n * 10 + 7)).collect()
}

fn look_up() -> Turn {
    let (decided, mut number) = (holes(), 0);
    Box::new(move || {
        number = (number + 7_919) % 100_000;
        black_box(decided.contains(black_box(number)));
    })
}

fn in_sequence() -> Turn {
    let (mut decided, mut number) = (RangeSet::default(), 0);
    Box::new(move || {
        number += 1;
        decided.insert(black_box(number));
    })
}

/// Pairs of neighbours change places, as when two writers commit in turn.
fn out_of_sequence() -> Turn {
    let (mut decided, mut number) = (RangeSet::default(), 0);
    Box::new(move || {
        number += 1;
        decided.insert(black_box(number ^ 1));
    })
}

const FIRST: DestinationId = DestinationId(0);
const CREATED: &str = "2026-01-01T00:00:00Z";

/// A transaction comes in, is sent, acknowledged by one answer, and recorded.
fn core(events: usize) -> Turn {
    let mut core = Core::flowing();
    let template: Vec<Event> =
        (0..events).map(|n| event(0, &format!("run-{}", n % 50), None)).collect();
    Box::new(move || core.transaction(&template))
}

struct Core {
    relay: Relay,
    now: Instant,
    lsn: u64,
    seq: i64,
    stream_seq: u64,
}

impl Core {
    /// Connected, proven: everything may be sent.
    fn flowing() -> Core {
        let floor = Some(Floor { created: CREATED.to_owned(), seq: 0 });
        let spec = DestinationSpec { floor, ..DestinationSpec::new("events", envelope(), 4_000) };
        let limits = Limits {
            memory_bytes: 32 << 20,
            receipt_interval: Duration::ZERO,
            receipt_events: 10_000,
            waiting_numbers: 50_000,
        };
        let relay = Relay::new(limits, Lsn(1), vec![spec], 1);
        let mut core = Core { relay, now: Instant::now(), lsn: 1, seq: 0, stream_seq: 0 };
        core.feed(Input::Up(FIRST, facts()));
        core.resume();
        core.transaction(&[event(0, "probe", None)]);
        core
    }

    fn feed(&mut self, input: Input) {
        self.relay.handle(self.now, input).unwrap();
    }

    fn resume(&mut self) {
        let (created, last_seq) = (CREATED.to_owned(), self.stream_seq);
        self.feed(Input::Resumed(FIRST, Verified { created, last_seq, ..Verified::default() }));
    }

    fn transaction(&mut self, events: &[Event]) {
        self.lsn += 100;
        self.feed(Input::Begin { commit_lsn: Lsn(self.lsn) });
        for event in events {
            self.seq += 1;
            self.feed(Input::Event(Event { seq: self.seq, ..event.clone() }));
        }
        self.feed(Input::Commit { end_lsn: Lsn(self.lsn + 50) });
        while let Some(sent) = self.act() {
            self.stream_seq += sent.1.0 - sent.0.0 + 1;
            let outcome = Outcome::Stored { stream_seq: self.stream_seq, duplicate: false };
            let answer = Answer { first: sent.0, last: sent.1, outcome };
            self.feed(Input::Answer(FIRST, answer));
        }
        assert_eq!(self.relay.confirmable(), Lsn(self.lsn + 50));
    }

    /// Does what the core wants; the attempts that it sent, if there were any.
    fn act(&mut self) -> Option<(Attempt, Attempt)> {
        let mut sent = None;
        while let Some(action) = self.relay.poll(self.now) {
            match action {
                Action::Send { attempt, message, .. } => {
                    black_box(message);
                    sent = Some((sent.map_or(attempt, |(first, _)| first), attempt));
                }
                Action::Record(_) => self.feed(Input::Recorded { newest: 1 }),
                Action::Resume { .. } => self.resume(),
                other => panic!("{other:?}"),
            }
        }
        sent
    }
}

fn facts() -> StreamFacts {
    StreamFacts {
        stream: "EVENTS".to_owned(),
        created: CREATED.to_owned(),
        replicas: 1,
        retention: Retention::Limits,
        last_seq: 0,
        first_seq: 1,
        max_message_bytes: 1 << 20,
        max_payload_bytes: 1 << 20,
        duplicate_window: Duration::from_secs(120),
        server_version: "2.15.1".to_owned(),
        pipeline: Pipeline::Batch,
        why: String::new(),
    }
}
