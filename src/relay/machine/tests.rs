//! Scenes that the simulation meets rarely, each by itself.

use bytes::Bytes;

use super::*;
use crate::event::{EventId, Fault, Reason, RunHash};
use crate::lsn::Position;
use crate::message::{Envelope, Template};
use crate::relay::destination::Phase;
use crate::relay::outcome::{
    Attempt, Doubt, Floor, Found, Outcome, Pipeline, ReadFrom, Refusal, Retention, StreamFacts,
};

pub(crate) const FIRST: DestinationId = DestinationId(0);

pub(crate) fn event(seq: i64, run: &str) -> Arc<Event> {
    Arc::new(Event {
        seq,
        position: Some(Position { commit_lsn: Lsn(100), index: 0 }),
        id: EventId::Uuid(uuid::Uuid::from_u128(u128::try_from(seq).unwrap_or_default())),
        run: Some(Bytes::copy_from_slice(run.as_bytes())),
        run_hash: RunHash::of_run(run.as_bytes()),
        kind: Bytes::from_static(b"k"),
        tenant: None,
        version: None,
        payload: Some(Bytes::from_static(b"{}")),
        headers: None,
        created_at: None,
        committed_at: None,
        fault: None,
    })
}

pub(crate) fn floor(created: &str, seq: u64) -> Floor {
    Floor { created: created.to_owned(), seq }
}

pub(crate) fn spec(name: &str, floor: Option<Floor>) -> DestinationSpec {
    let envelope = Envelope {
        relay: "orders".to_owned(),
        generation: 1,
        stream: "EVENTS".to_owned(),
        template: Template::parse("events.{kind}").unwrap(),
        id_suffix: None,
        replay: None,
    };
    DestinationSpec { floor, ..DestinationSpec::new(name, envelope, 100) }
}

pub(crate) fn facts(created: &str, last_seq: u64, pipeline: Pipeline) -> StreamFacts {
    StreamFacts {
        stream: "EVENTS".to_owned(),
        created: created.to_owned(),
        replicas: 1,
        retention: Retention::Limits,
        last_seq,
        first_seq: 1,
        max_message_bytes: 10_000,
        max_payload_bytes: 10_000,
        duplicate_window: Duration::from_secs(120),
        server_version: "2.15.1".to_owned(),
        pipeline,
        why: String::new(),
    }
}

/// A relay, its clock, and what it wants done.
pub(crate) struct Scene {
    pub relay: Relay,
    pub now: Instant,
    pub lsn: u64,
}

impl Scene {
    pub fn new(specs: Vec<DestinationSpec>) -> Scene {
        let limits = Limits {
            memory_bytes: 1_000_000,
            receipt_interval: Duration::from_millis(100),
            receipt_events: 1_000,
            waiting_numbers: 50_000,
        };
        let relay = Relay::new(limits, Lsn(10), specs, 1);
        Scene { relay, now: Instant::now(), lsn: 100 }
    }

    /// One destination, connected, proven, everything may be sent.
    pub fn flowing(pipeline: Pipeline) -> Scene {
        let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10)))]);
        scene.feed(Input::Up(FIRST, facts("s1", 10, pipeline)));
        scene.resume("s1", 10);
        scene.commit(&[(1, "warm")]);
        let sent = scene.sent();
        assert_eq!(sent.len(), 1, "one event alone");
        scene.answer(sent[0], Outcome::Stored { stream_seq: 11, duplicate: false });
        scene.resume("s1", 11);
        assert_eq!(scene.phase(), Phase::Flow);
        scene
    }

    pub fn feed(&mut self, input: Input) {
        self.relay.handle(self.now, input).unwrap();
    }

    pub fn commit(&mut self, rows: &[(i64, &str)]) {
        let events = rows.iter().map(|(seq, run)| Event::clone(&event(*seq, run)));
        self.commit_events(events.collect());
    }

    pub fn commit_events(&mut self, events: Vec<Event>) {
        self.lsn += 100;
        let commit_lsn = Lsn(self.lsn);
        self.feed(Input::Begin { commit_lsn });
        for (event, index) in events.into_iter().zip(0..) {
            let position = Some(Position { commit_lsn, index });
            self.feed(Input::Event(Event { position, ..event }));
        }
        self.feed(Input::Commit { end_lsn: Lsn(self.lsn + 50) });
    }

    pub fn poll(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.relay.poll(self.now)).collect()
    }

    pub fn sent(&mut self) -> Vec<u64> {
        let attempt = |action| match action {
            Action::Send { attempt, .. } => Some(attempt.0),
            Action::Bury { .. } | Action::Resume { .. } | Action::Record(_) => None,
            Action::Load { .. } | Action::ReadWaiting { .. } => None,
        };
        self.poll().into_iter().filter_map(attempt).collect()
    }

    /// The next action is a Resume; it reads up to `last_seq` and finds nothing.
    pub fn resume(&mut self, created: &str, last_seq: u64) -> Floor {
        let from = self.ordered();
        self.found(created, last_seq, &[]);
        from.floor
    }

    /// The next action is a Resume.
    pub fn ordered(&mut self) -> ReadFrom {
        let Some(Action::Resume { from, .. }) = self.relay.poll(self.now) else {
            panic!("no Resume")
        };
        from
    }

    pub fn found(&mut self, created: &str, last_seq: u64, seqs: &[i64]) {
        let seqs = seqs.iter().map(|seq| (*seq, *seq)).collect();
        let created = created.to_owned();
        self.feed(Input::Resumed(
            FIRST,
            Verified { created, last_seq, seqs, ..Verified::default() },
        ));
    }

    pub fn answer(&mut self, attempt: u64, outcome: Outcome) {
        let (first, last) = (Attempt(attempt), Attempt(attempt));
        self.feed(Input::Answer(FIRST, Answer { first, last, outcome }));
    }

    pub fn drafts(&mut self) -> Vec<ReceiptDraft> {
        let drafts = |action| match action {
            Action::Record(drafts) => Some(drafts),
            Action::Send { .. }
            | Action::Bury { .. }
            | Action::Resume { .. }
            | Action::Load { .. }
            | Action::ReadWaiting { .. } => None,
        };
        self.poll().into_iter().find_map(drafts).unwrap_or_default()
    }

    pub fn phase(&self) -> Phase {
        self.relay.destinations()[0].phase()
    }

    pub fn pass(&mut self, time: Duration) {
        self.now += time;
    }
}

pub(crate) fn refused(permanent: Option<Reason>) -> Outcome {
    Outcome::Refused(Refusal { permanent, code: 10_077, detail: "full".to_owned() })
}

#[test]
fn the_second_resume_begins_where_the_first_one_ended() {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10)))]);
    scene.feed(Input::Up(FIRST, facts("s1", 30, Pipeline::PerRun)));
    assert_eq!(scene.resume("s1", 30), floor("s1", 10));
    scene.commit(&[(1, "r")]);
    let sent = scene.sent();
    // 31 was stored late, by an attempt that nobody answered; the probe stands behind it.
    scene.answer(sent[0], Outcome::Stored { stream_seq: 32, duplicate: false });
    assert_eq!(scene.resume("s1", 32), floor("s1", 30));
    assert_eq!(scene.relay.destinations()[0].floor(), floor("s1", 32));
}

#[test]
fn a_duplicate_proves_nothing() {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10)))]);
    scene.feed(Input::Up(FIRST, facts("s1", 12, Pipeline::Batch)));
    scene.resume("s1", 12);
    scene.commit(&[(1, "r"), (2, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], Outcome::Stored { stream_seq: 11, duplicate: true });
    scene.resume("s1", 12);
    assert_eq!(scene.phase(), Phase::Probe);
}

#[test]
fn resume_is_told_what_is_known_and_what_nobody_asks_for() {
    let mut known = spec("a", Some(floor("s1", 10)));
    known.recorded_known = 40;
    let mut scene = Scene::new(vec![known]);
    scene.feed(Input::Keepalive { wal_end: Lsn(77) });
    scene.feed(Input::Up(FIRST, facts("s1", 60, Pipeline::Batch)));
    let from = scene.ordered();
    assert_eq!(
        from,
        ReadFrom { floor: floor("s1", 10), known: 40, newest: None, confirmable: Lsn(77) }
    );
    // It got to 20 only: what is between was not read.
    scene.found("s1", 20, &[]);
    scene.commit(&[(1, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], Outcome::Stored { stream_seq: 61, duplicate: false });
    let from = scene.ordered();
    assert_eq!((from.floor, from.known), (floor("s1", 20), 61));
    // The next answer is one that a reconnect overtook.
    // Of another stream nothing is known.
    scene.feed(Input::Up(FIRST, facts("s2", 5, Pipeline::Batch)));
    scene.found("s1", 61, &[]);
    let from = scene.ordered();
    assert_eq!((from.floor, from.known), (floor("s2", 0), 0));
}

#[test]
fn reading_that_ends_below_what_is_known_is_done_again_from_there() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], refused(None));
    assert_eq!(scene.resume("s1", 9), floor("s1", 11), "proven, and the last message is gone");
    assert_eq!(scene.phase(), Phase::Flow);
    assert_eq!(scene.relay.destinations()[0].floor(), floor("s1", 9));
}

#[test]
fn a_receipt_without_an_ack_keeps_what_the_ledger_knew() {
    let mut odd = spec("a", Some(floor("s1", 10)));
    odd.recorded_known = 40;
    odd.filter.kinds = vec!["other".to_owned()];
    let mut scene = Scene::new(vec![odd]);
    scene.commit(&[(1, "r")]);
    scene.pass(Duration::from_millis(100));
    let draft = scene.drafts().remove(0);
    assert_eq!((draft.floor, draft.last, draft.known), (floor("s1", 10), None, 40));
    scene.feed(Input::Recorded { newest: 0 });
    scene.feed(Input::Up(FIRST, facts("s1", 60, Pipeline::PerRun)));
    scene.commit(&[(2, "r")]);
    scene.pass(Duration::from_millis(100));
    assert_eq!(scene.ordered().known, 40);
    assert_eq!(scene.drafts()[0].known, 40);
}

#[test]
fn an_event_that_nobody_answers_holds_up_no_other_run() {
    for pipeline in [Pipeline::Batch, Pipeline::PerRun] {
        let mut scene = Scene::flowing(pipeline);
        scene.commit(&[(2, "silent"), (3, "silent")]);
        let unanswered = |scene: &mut Scene| {
            for attempt in scene.sent() {
                scene.answer(attempt, Outcome::Unknown(Doubt::Silence));
            }
            scene.pass(Duration::from_secs(60));
            scene.resume("s1", 11);
        };
        for _ in 0..100 {
            unanswered(&mut scene);
        }
        // Its time has come again, and it is the oldest; the other one has its turn all the same.
        scene.commit(&[(4, "s")]);
        let mut seqs: Vec<i64> = Vec::new();
        while scene.phase() == Phase::Probe {
            let Some(Action::Send { attempt, message, .. }) = scene.relay.poll(scene.now) else {
                panic!("nothing is tried")
            };
            assert!(scene.sent().is_empty(), "one alone");
            let seq = message.headers().get("Outbox-Seq").unwrap().parse().unwrap();
            seqs.push(seq);
            if seq == 4 {
                scene.answer(attempt.0, Outcome::Stored { stream_seq: 12, duplicate: false });
                scene.resume("s1", 12);
            } else {
                scene.answer(attempt.0, Outcome::Unknown(Doubt::Silence));
                scene.pass(Duration::from_secs(60));
                scene.resume("s1", 11);
            }
        }
        assert!(seqs == [4] || seqs == [2, 4], "{seqs:?}");
        assert_eq!(scene.phase(), Phase::Flow);
    }
}

#[test]
fn a_receipt_before_the_first_connect_keeps_the_ledgers_floor() {
    let mut odd = spec("a", Some(floor("s1", 10)));
    odd.filter.kinds = vec!["other".to_owned()];
    let mut scene = Scene::new(vec![odd]);
    scene.commit(&[(1, "r")]);
    scene.pass(Duration::from_millis(100));
    assert_eq!(scene.drafts()[0].floor, floor("s1", 10));
}

#[test]
fn nothing_is_sent_before_the_first_floor_is_in_the_ledger() {
    let mut odd = spec("a", None);
    odd.filter.kinds = vec!["other".to_owned()];
    let mut scene = Scene::new(vec![odd]);
    scene.commit(&[(1, "r")]);
    scene.pass(Duration::from_millis(100));
    assert_eq!(scene.drafts()[0].floor, Floor::default());
    // This receipt is under way when the destination comes up; it has no floor.
    scene.feed(Input::Up(FIRST, facts("s1", 7, Pipeline::Batch)));
    scene.feed(Input::Recorded { newest: 0 });
    assert_eq!(scene.phase(), Phase::RecordFloor);
    // Nor does a reconnect make up for it.
    scene.feed(Input::Down(FIRST));
    scene.feed(Input::Up(FIRST, facts("s1", 9, Pipeline::Batch)));
    assert_eq!(scene.phase(), Phase::RecordFloor);
    let drafts = scene.drafts();
    assert!(drafts[0].decided.is_empty() && drafts[0].floor == floor("s1", 7), "{drafts:?}");
    scene.feed(Input::Recorded { newest: 0 });
    assert_eq!(scene.resume("s1", 9), floor("s1", 7));
}

#[test]
fn after_a_refusal_a_batch_begins_anew_with_a_resume() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r"), (3, "r"), (4, "s")]);
    let sent = scene.sent();
    scene.answer(sent[0], refused(Some(Reason::TooLarge)));
    scene.commit(&[(5, "t")]);
    let actions = scene.poll();
    assert!(matches!(actions[..], [Action::Bury { .. }]), "{actions:?}");
    scene.answer(sent[1], Outcome::NotSent);
    scene.answer(sent[2], Outcome::NotSent);
    scene.resume("s1", 11);
    // No probe: nothing is unknown. Run `r` waits for its dead letter, the others go on.
    assert_eq!(scene.sent().len(), 2);
}

/// The publisher takes nothing behind a gap until it is asked to read back: sending again at once
/// would go round and round.
#[test]
fn after_a_gap_a_batch_begins_anew_with_a_resume() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r"), (3, "r"), (4, "s")]);
    let sent = scene.sent();
    scene.answer(sent[0], Outcome::Stored { stream_seq: 12, duplicate: false });
    scene.answer(sent[1], Outcome::NotSent);
    scene.answer(sent[2], Outcome::NotSent);
    assert!(scene.poll().is_empty(), "it waits a moment");
    scene.pass(Duration::from_secs(1));
    scene.resume("s1", 12);
    assert_eq!(scene.sent().len(), 2);
}

#[test]
fn a_refusal_of_one_run_does_not_stop_the_others() {
    let mut scene = Scene::flowing(Pipeline::PerRun);
    scene.commit(&[(2, "r"), (3, "r"), (4, "s")]);
    let sent = scene.sent();
    assert_eq!(sent.len(), 2);
    scene.answer(sent[0], refused(None));
    scene.commit(&[(5, "t")]);
    assert_eq!(scene.sent().len(), 1);
}

#[test]
fn many_refusals_of_one_moment_are_one_failure() {
    let mut scene = Scene::flowing(Pipeline::PerRun);
    let runs: Vec<String> = (0..60).map(|run| format!("run-{run}")).collect();
    let rows: Vec<(i64, &str)> =
        runs.iter().zip(2..).map(|(run, seq)| (seq, run.as_str())).collect();
    scene.commit(&rows);
    for attempt in scene.sent() {
        scene.answer(attempt, refused(None));
    }
    let wake = |scene: &Scene| scene.relay.destinations()[0].wake_at().unwrap() - scene.now;
    assert!(wake(&scene) < Duration::from_secs(2), "{:?}", wake(&scene));
    scene.pass(Duration::from_secs(2));
    let sent = scene.sent();
    assert_eq!(sent.len(), 1, "one alone tells whether the stream takes events again");
    scene.answer(sent[0], Outcome::Stored { stream_seq: 12, duplicate: false });
    assert_eq!(scene.sent().len(), 59);
}

/// Refuses the first event that is sent; in a batch those behind it are not stored.
fn refuse_first(scene: &mut Scene, pipeline: Pipeline) {
    let sent = scene.sent();
    for (index, attempt) in sent.iter().enumerate() {
        scene.answer(*attempt, if index == 0 { refused(None) } else { Outcome::NotSent });
    }
    if pipeline == Pipeline::Batch && !sent.is_empty() {
        scene.resume("s1", 11);
    }
}

#[test]
fn a_run_that_is_refused_for_long_holds_up_no_other() {
    for pipeline in [Pipeline::Batch, Pipeline::PerRun] {
        let mut scene = Scene::flowing(pipeline);
        scene.commit(&[(2, "r"), (3, "r")]);
        for _ in 0..100 {
            refuse_first(&mut scene, pipeline);
            scene.pass(Duration::from_secs(30));
        }
        // Its time has come again, and it comes first.
        scene.commit(&[(4, "s")]);
        refuse_first(&mut scene, pipeline);
        scene.pass(Duration::from_millis(10));
        let sent = scene.sent();
        assert_eq!(sent.len(), 1);
        scene.answer(sent[0], Outcome::Stored { stream_seq: 12, duplicate: false });
        let lanes = scene.relay.destinations()[0].lanes();
        assert_eq!((lanes.len(), lanes.oldest().map(|entry| entry.event.seq)), (2, Some(2)));
    }
}

#[test]
fn a_ship_that_crosses_an_up_is_waited_for() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r")]);
    let sent = scene.sent();
    scene.feed(Input::Down(FIRST));
    scene.feed(Input::Up(FIRST, facts("s1", 11, Pipeline::PerRun)));
    assert!(scene.poll().is_empty(), "Resume with something in flight");
    assert_eq!(scene.relay.destinations()[0].wake_at(), None);
    scene.answer(sent[0], Outcome::NotSent);
    scene.resume("s1", 11);
    assert_eq!(scene.sent().len(), 1);
}

#[test]
fn an_overtaken_resume_settles_what_it_found_and_nothing_more() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r"), (3, "s")]);
    let sent = scene.sent();
    for attempt in sent {
        scene.answer(attempt, Outcome::Unknown(Doubt::Silence));
    }
    scene.pass(Duration::from_secs(60));
    assert!(scene.poll().iter().any(|action| matches!(action, Action::Resume { .. })));
    // Its finds are being recorded while the connection is lost and comes back.
    scene.feed(Input::Down(FIRST));
    scene.feed(Input::Up(FIRST, facts("s1", 12, Pipeline::Batch)));
    assert!(scene.poll().is_empty(), "a second Resume beside the first");
    scene.found("s1", 12, &[2]);
    assert_eq!(scene.relay.destinations()[0].lanes().len(), 1, "2 is in stream and ledger");
    assert_eq!(scene.resume("s1", 12), floor("s1", 11), "the doubt stays");
    assert_eq!(scene.phase(), Phase::Probe);
}

#[test]
fn a_stream_replaced_while_it_was_read_is_read_again() {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10)))]);
    scene.feed(Input::Up(FIRST, facts("s1", 10, Pipeline::Batch)));
    scene.resume("s2", 3);
    assert!(matches!(scene.phase(), Phase::ResumeAt { at: Some(_), proven: false }));
    scene.feed(Input::Up(FIRST, facts("s2", 3, Pipeline::Batch)));
    assert_eq!(scene.resume("s2", 3), floor("s2", 0), "ours may be anywhere in it");
}

#[test]
fn late_answers_settle_nothing() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], Outcome::Unknown(Doubt::Silence));
    scene.answer(sent[0], Outcome::Stored { stream_seq: 12, duplicate: false });
    scene.answer(sent[0] + 1, Outcome::Stored { stream_seq: 12, duplicate: false });
    scene.answer(0, Outcome::Stored { stream_seq: 12, duplicate: false });
    scene.answer(u64::MAX, Outcome::Stored { stream_seq: 12, duplicate: false });
    let destination = &scene.relay.destinations()[0];
    assert_eq!((destination.lanes().len(), destination.known()), (1, 11));
}

#[test]
fn an_answer_of_an_earlier_session_settles_nothing() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r")]);
    let old = scene.sent()[0];
    let next = scene.relay.next_attempt();
    assert!(next > old);
    let specs = vec![spec("a", Some(floor("s1", 11)))];
    scene.relay = Relay::new(scene.relay.limits.clone(), Lsn(10), specs, next);
    scene.feed(Input::Up(FIRST, facts("s1", 11, Pipeline::Batch)));
    scene.resume("s1", 11);
    scene.commit(&[(9, "r")]);
    assert!(scene.sent()[0] > old);
    scene.answer(old, Outcome::Stored { stream_seq: 12, duplicate: false });
    assert_eq!(scene.relay.destinations()[0].lanes().len(), 1);
}

#[test]
fn confirmable_waits_for_the_ledger_of_every_destination() {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10))), spec("b", None)]);
    scene.feed(Input::Up(FIRST, facts("s1", 10, Pipeline::Batch)));
    scene.resume("s1", 10);
    scene.commit(&[(1, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], Outcome::Stored { stream_seq: 11, duplicate: false });
    scene.pass(Duration::from_secs(1));
    assert_eq!(scene.drafts().len(), 1);
    scene.feed(Input::Keepalive { wal_end: Lsn(900) });
    assert_eq!(scene.relay.confirmable(), Lsn(10));
    scene.feed(Input::Recorded { newest: 0 });
    assert_eq!(scene.relay.confirmable(), Lsn(10), "`b` has not decided it");
    assert_eq!(scene.relay.oldest_held(), Some(Lsn(200)));
}

#[test]
fn a_ledger_that_hangs_stops_reading_and_not_more() {
    let mut odd = spec("a", Some(floor("s1", 10)));
    odd.filter.kinds = vec!["other".to_owned()];
    let mut scene = Scene::new(vec![odd]);
    for seq in 1..100_000 {
        if !scene.relay.wants_wal() {
            break;
        }
        scene.commit(&[(seq, "r")]);
        scene.poll();
    }
    assert!(!scene.relay.wants_wal(), "reads on and on");
    assert_eq!(scene.relay.held_bytes(), 0);
    scene.feed(Input::Recorded { newest: 0 });
    scene.pass(Duration::from_secs(1));
    scene.poll();
    scene.feed(Input::Recorded { newest: 0 });
    assert!(scene.relay.wants_wal());
}

#[test]
fn one_silent_attempt_does_not_pile_up_answered_ones() {
    let mut scene = Scene::flowing(Pipeline::PerRun);
    scene.commit(&[(2, "silent")]);
    assert_eq!(scene.sent().len(), 1);
    let mut others = 0;
    for seq in 3..10_000 {
        scene.commit(&[(seq, "other")]);
        for attempt in scene.sent() {
            others += 1;
            scene.answer(attempt, Outcome::Stored { stream_seq: 100, duplicate: false });
        }
    }
    assert!((1_000..2_000).contains(&others), "{others}");
}

#[test]
fn frames_out_of_order_are_refused() {
    let scene = || Scene::new(vec![spec("a", None)]);
    let refused = |scene: &mut Scene, input| scene.relay.handle(scene.now, input).is_err();
    assert!(refused(&mut scene(), Input::Event(Event::clone(&event(1, "r")))));
    assert!(refused(&mut scene(), Input::Commit { end_lsn: Lsn(5) }));
    let mut twice = scene();
    twice.feed(Input::Begin { commit_lsn: Lsn(200) });
    assert!(refused(&mut twice, Input::Begin { commit_lsn: Lsn(300) }));
    let mut back = scene();
    back.commit(&[(1, "r")]);
    assert!(refused(&mut back, Input::Begin { commit_lsn: Lsn(200) }));
}

#[test]
fn a_stop_sends_nothing_new_and_becomes_quiet() {
    let mut scene = Scene::flowing(Pipeline::PerRun);
    scene.commit(&[(2, "r"), (3, "r")]);
    let sent = scene.sent();
    scene.feed(Input::Stop);
    assert!(!scene.relay.wants_wal() && !scene.relay.is_quiet());
    scene.answer(sent[0], Outcome::Stored { stream_seq: 12, duplicate: false });
    let actions = scene.poll();
    assert!(matches!(actions[..], [Action::Record(_)]), "{actions:?}");
    assert!(!scene.relay.is_quiet());
    scene.feed(Input::Recorded { newest: 0 });
    assert!(scene.relay.is_quiet());
}

/// A row that its own transaction deleted, or that waits for a synchronous standby: the table does
/// not show it, the stream has its message, the WAL brings it again.
#[test]
fn what_the_stream_has_and_the_table_does_not_show_is_not_sent_again() {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10)))]);
    scene.feed(Input::Up(FIRST, facts("s1", 12, Pipeline::Batch)));
    scene.commit(&[(1, "r")]);
    let Some(Action::Resume { .. }) = scene.relay.poll(scene.now) else { panic!("no Resume") };
    let stranger = |seq: i64, stream_seq| Found {
        letter: None,
        seq,
        id: event(seq, "r").id.clone(),
        commit_lsn: Some(Lsn(300)),
        generation: 1,
        created_at: None,
        stream_seq,
    };
    let mut other = stranger(3, 14);
    other.id = EventId::Int(3);
    let strangers = vec![stranger(1, 12), stranger(2, 13), other];
    let verified =
        Verified { created: "s1".to_owned(), last_seq: 14, strangers, ..Verified::default() };
    scene.feed(Input::Resumed(FIRST, verified));
    assert_eq!(scene.relay.destinations()[0].floor(), floor("s1", 12), "2 is not decided");
    scene.commit(&[(2, "r"), (3, "r")]);
    assert_eq!(scene.relay.destinations()[0].counts().resumed, 2);
    // 3 is another event than the one in the stream: it is sent.
    assert_eq!(scene.sent().len(), 1);
    assert_eq!(scene.relay.destinations()[0].floor(), floor("s1", 14));
    scene.pass(Duration::from_millis(100));
    let drafts = scene.drafts();
    assert_eq!(drafts[0].decided.published.iter().collect::<Vec<_>>(), [(1, 2)]);
}

#[test]
fn few_burials_are_under_way_at_a_time() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    let rows: Vec<(i64, String)> = (10..210).map(|seq| (seq, format!("r{seq}"))).collect();
    scene.lsn += 100;
    scene.feed(Input::Begin { commit_lsn: Lsn(scene.lsn) });
    for (seq, run) in &rows {
        let mut bad = Event::clone(&event(*seq, run));
        bad.fault = Some(Fault::new(Reason::Unmappable, ""));
        scene.feed(Input::Event(bad));
    }
    scene.feed(Input::Commit { end_lsn: Lsn(scene.lsn + 50) });
    let burials = |scene: &mut Scene| {
        let burial = |action| match action {
            Action::Bury { burial, .. } => Some(burial),
            Action::Send { .. } | Action::Resume { .. } | Action::Record(_) => None,
            Action::Load { .. } | Action::ReadWaiting { .. } => None,
        };
        scene.poll().into_iter().filter_map(burial).collect::<Vec<_>>()
    };
    let mut buried = 0;
    loop {
        let some = burials(&mut scene);
        assert!(some.len() <= BURIALS_AT_ONCE);
        if some.is_empty() {
            break;
        }
        buried += some.len();
        some.into_iter().for_each(|burial| scene.feed(Input::Buried(burial, true)));
    }
    assert_eq!(buried, rows.len());
}
