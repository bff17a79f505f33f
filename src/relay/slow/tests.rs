//! Scenes of hand-over, of the way back from the ledger, and of rows that the WAL did not bring.

use super::*;
use crate::event::{Fault, Reason};
use crate::relay::machine::tests::{FIRST, Scene, event, facts, floor, refused, spec};
use crate::relay::machine::{Action, Input, ReceiptDraft, Verified};
use crate::relay::outcome::{Doubt, Outcome, Pipeline};
use crate::relay::waiting::Waiting;
use std::time::Duration;

pub(crate) fn stored(stream_seq: u64) -> Outcome {
    Outcome::Stored { stream_seq, duplicate: false }
}

pub(crate) fn waiter(seq: i64, run: &str, old: bool) -> Waiter {
    Waiter { seq, run: RunHash::of_run(run.as_bytes()), until: Lsn(100), old }
}

/// Two destinations, of which the first flows and the second was never there.
pub(crate) fn two() -> Scene {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10))), spec("b", None)]);
    begin_to_flow(&mut scene, &[]);
    scene
}

/// One destination that knows this from the ledger, up to its first event alone.
pub(crate) fn knows(waiting: Vec<Waiter>, gap: bool) -> Scene {
    let mut known = spec("a", Some(floor("s1", 10)));
    (known.waiting, known.gap) = (waiting, gap);
    let mut scene = Scene::new(vec![known]);
    scene.feed(Input::Up(FIRST, facts("s1", 10, Pipeline::Batch)));
    scene.resume("s1", 10);
    scene
}

fn begin_to_flow(scene: &mut Scene, rows: &[(i64, &str)]) {
    scene.feed(Input::Up(FIRST, facts("s1", 10, Pipeline::PerRun)));
    scene.resume("s1", 10);
    scene.commit(&[(1, "warm")]);
    scene.commit(rows);
    let sent = scene.sent();
    scene.answer(sent[0], stored(11));
    scene.resume("s1", 11);
}

/// One destination whose run `r` is refused; the lane waits for the clock.
pub(crate) fn blocked(rows: &[(i64, &str)]) -> Scene {
    let mut scene = Scene::flowing(Pipeline::PerRun);
    record(&mut scene);
    scene.commit(rows);
    for _ in 0..9 {
        scene.pass(Duration::from_secs(60));
        let sent = scene.sent();
        scene.answer(sent[0], refused(None));
    }
    scene
}

/// For a moment.
pub(crate) fn pressure(scene: &mut Scene) {
    scene.feed(Input::WalPressure(true));
    scene.relay.looked_at = None;
    scene.relay.hand_over(scene.now);
    scene.feed(Input::WalPressure(false));
}

/// What the next receipts say.
pub(crate) fn record(scene: &mut Scene) -> Vec<ReceiptDraft> {
    scene.pass(Duration::from_millis(100));
    let drafts = scene.drafts();
    scene.feed(Input::Recorded { newest: 7 });
    drafts
}

pub(crate) fn handed(draft: &ReceiptDraft) -> Vec<i64> {
    draft.decided.handed.iter().map(|(seq, _)| *seq).collect()
}

pub(crate) fn load_of(actions: Vec<Action>) -> Vec<i64> {
    let numbers = |action| match action {
        Action::Load { waiters, .. } => Some(waiters.iter().map(|waiter| waiter.seq).collect()),
        Action::Send { .. } | Action::Bury { .. } | Action::Resume { .. } => None,
        Action::Record(_) | Action::ReadWaiting { .. } => None,
    };
    actions.into_iter().find_map(numbers).unwrap_or_default()
}

/// The same of the next action alone.
fn load_first(scene: &mut Scene) -> Vec<i64> {
    load_of(scene.relay.poll(scene.now).into_iter().collect())
}

pub(crate) fn loaded(scene: &mut Scene, count: usize, rows: &[(i64, &str)]) {
    let events = rows.iter().map(|(seq, run)| Event::clone(&event(*seq, run))).collect();
    scene.feed(Input::Loaded(FIRST, Loaded { count, events }));
}

pub(crate) fn missed(scene: &mut Scene, seq: i64, run: &str) {
    let event = Event::clone(&event(seq, run));
    scene.feed(Input::Missed { destination: FIRST, event, until: Lsn(900) });
}

pub(crate) fn in_lanes(scene: &Scene) -> Vec<i64> {
    let mut numbers: Vec<i64> = first(scene).lanes().numbers().collect();
    numbers.sort_unstable();
    numbers
}

pub(crate) fn first(scene: &Scene) -> &Destination {
    &scene.relay.destinations()[0]
}

/// Numbers in the order in which they leave; each is stored at once.
pub(crate) fn leave(scene: &mut Scene) -> Vec<i64> {
    let mut seqs = Vec::new();
    while let Some(action) = scene.relay.poll(scene.now) {
        if let Action::Send { attempt, message, .. } = action {
            seqs.push(message.headers().get("Outbox-Seq").unwrap().parse().unwrap());
            scene.answer(attempt.0, stored(100 + seqs.len() as u64));
        } else if let Action::Resume { .. } = action {
            scene.found("s1", 100 + seqs.len() as u64, &[]);
        } else if let Action::Record(_) = action {
            scene.feed(Input::Recorded { newest: 7 });
        }
    }
    seqs
}

#[test]
fn a_run_that_is_handed_over_again_keeps_its_order_and_gets_no_second_receipt() {
    let mut scene = blocked(&[(2, "r"), (3, "r"), (4, "r")]);
    pressure(&mut scene);
    assert_eq!(handed(&record(&mut scene)[0]), [2, 3, 4]);
    // Its time to try again has not come.
    assert!(load_of(scene.poll()).is_empty());
    scene.pass(Duration::from_secs(60));
    assert_eq!(load_of(scene.poll()), [2, 3, 4]);
    // What WAL brings meanwhile waits behind; it is the only one without a receipt.
    scene.commit(&[(5, "r")]);
    loaded(&mut scene, 2, &[(2, "r"), (3, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], refused(None));
    scene.feed(Input::LoadFailed(FIRST));
    scene.relay.limits.memory_bytes = 500;
    scene.relay.looked_at = None;
    scene.commit(&[(6, "r")]);
    scene.poll();
    assert!(in_lanes(&scene).is_empty());
    assert_eq!(handed(&record(&mut scene)[0]), [5, 6]);
    scene.relay.limits.memory_bytes = 1_000_000;
    scene.pass(Duration::from_secs(60));
    assert_eq!(load_of(scene.poll()), [2, 3, 4, 5, 6]);
    loaded(&mut scene, 5, &[(2, "r"), (3, "r"), (4, "r"), (5, "r"), (6, "r")]);
    // The run is not slow any more.
    scene.commit(&[(7, "r")]);
    assert_eq!(first(&scene).waiting().slow_runs(), 0);
    assert_eq!(leave(&mut scene), [2, 3, 4, 5, 6, 7]);
}

#[test]
fn a_run_whose_rows_are_being_read_is_not_handed_over() {
    let mut scene = knows(vec![waiter(2, "r", false)], false);
    assert_eq!(load_of(scene.poll()), [2]);
    missed(&mut scene, 1, "r");
    scene.feed(Input::Down(FIRST));
    scene.pass(Duration::from_secs(60));
    scene.relay.limits.memory_bytes = 1;
    pressure(&mut scene);
    assert_eq!(in_lanes(&scene), [1]);
}

/// The broker comes back before its rows are read: nothing of it is read or sent again, and no
/// receipt brings it back as waiting.
#[test]
fn what_resume_finds_of_those_that_wait_is_over() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    record(&mut scene);
    scene.commit(&[(2, "r"), (3, "s")]);
    for attempt in scene.sent() {
        scene.answer(attempt, Outcome::Unknown(Doubt::Silence));
    }
    scene.pass(Duration::from_secs(60));
    scene.feed(Input::WalPressure(true));
    let from = scene.ordered();
    scene.feed(Input::WalPressure(false));
    assert_eq!(from.confirmable, Lsn::ZERO, "the position will pass them");
    // The receipt for what is found is being written.
    assert!(record(&mut scene).is_empty(), "behind it they would wait again");
    assert!(scene.relay.wake_at().is_none_or(|at| at > scene.now), "no use in waking");
    scene.found("s1", 12, &[2]);
    let draft = record(&mut scene).remove(0);
    assert_eq!((handed(&draft), draft.decided.published.is_empty()), (vec![3], true));
    assert_eq!(scene.relay.confirmable(), Lsn(scene.lsn + 50));
    assert_eq!(first(&scene).counts().resumed, 1);
    assert_eq!(first(&scene).waiting().numbers().collect::<Vec<_>>(), [3]);
}

#[test]
fn the_ledger_has_handed_over_what_wal_brings_again() {
    let mut known = spec("a", Some(floor("s1", 10)));
    known.waiting = vec![waiter(2, "r", false)];
    known.handed = [(2, 2)].into_iter().collect();
    known.recorded_to = Lsn(200);
    let mut scene = Scene::new(vec![known]);
    scene.commit(&[(2, "r")]);
    assert_eq!((in_lanes(&scene).len(), first(&scene).waiting().len()), (0, 1));
    assert_eq!(scene.relay.confirmable(), Lsn(250));
}

#[test]
fn a_row_that_went_away_is_gone_and_counted() {
    let mut scene = knows(vec![waiter(2, "r", false), waiter(3, "r", false)], false);
    assert_eq!(load_of(scene.poll()), [2, 3]);
    loaded(&mut scene, 2, &[(3, "r")]);
    assert_eq!(first(&scene).counts().gone, 1);
    let draft = record(&mut scene).remove(0);
    assert_eq!(draft.decided.gone.iter().collect::<Vec<_>>(), [(2, 2)]);
    assert_eq!((draft.decided.last_lsn, draft.decided.first_lsn), (Some(Lsn(100)), None));
    assert_eq!(in_lanes(&scene), [3]);
}

/// Its message is in the stream: Resume saw it, while the row was not to be seen any more.
#[test]
fn a_row_that_went_away_after_it_was_published_is_not_gone() {
    let mut scene = knows(vec![waiter(2, "r", false)], false);
    assert_eq!(load_of(scene.poll()), [2]);
    scene.feed(Input::Up(FIRST, facts("s1", 11, Pipeline::Batch)));
    scene.ordered();
    let id = event(2, "r").id.clone();
    let found = crate::relay::outcome::Found {
        letter: None,
        seq: 2,
        id,
        commit_lsn: None,
        generation: 1,
        created_at: None,
        stream_seq: 11,
    };
    let created = "s1".to_owned();
    let verified =
        Verified { created, last_seq: 11, strangers: vec![found], ..Verified::default() };
    scene.feed(Input::Resumed(FIRST, verified));
    loaded(&mut scene, 1, &[]);
    assert_eq!((first(&scene).counts().gone, first(&scene).counts().resumed), (0, 1));
    assert_eq!(record(&mut scene)[0].decided.published.iter().collect::<Vec<_>>(), [(2, 2)]);
}

#[test]
fn rows_that_are_read_in_part_or_not_at_all_wait_on() {
    let waiting = (2..6).map(|seq| waiter(seq, "r", false)).collect();
    let mut scene = knows(waiting, false);
    assert_eq!(load_of(scene.poll()), [2, 3, 4, 5]);
    scene.feed(Input::LoadFailed(FIRST));
    assert_eq!(load_of(scene.poll()), [2, 3, 4, 5]);
    loaded(&mut scene, 1, &[(2, "r")]);
    assert_eq!(load_of(scene.poll()), [3, 4, 5]);
    scene.commit(&[(6, "r")]);
    loaded(&mut scene, 3, &[(3, "r"), (4, "r"), (5, "r")]);
    assert_eq!(load_of(scene.poll()), [6]);
}

#[test]
fn rows_of_the_table_are_filtered_and_buried_like_others() {
    let mut scene = knows(vec![waiter(2, "r", false), waiter(3, "r", false)], false);
    assert_eq!(load_of(scene.poll()), [2, 3]);
    let (mut odd, mut bad) = (Event::clone(&event(2, "r")), Event::clone(&event(3, "r")));
    odd.kind = bytes::Bytes::from_static(b"other");
    bad.fault = Some(Fault::new(Reason::Unmappable, ""));
    scene.relay.destinations[0].spec.filter.kinds = vec!["k".to_owned()];
    scene.feed(Input::Loaded(FIRST, Loaded { count: 2, events: vec![odd, bad] }));
    let Some(Action::Bury { burial, .. }) = scene.relay.poll(scene.now) else {
        panic!("not buried")
    };
    scene.feed(Input::Buried(burial, true));
    let draft = record(&mut scene).remove(0);
    assert_eq!((draft.decided.unmatched_events, draft.decided.dead_events), (1, 1));
    assert_eq!(scene.relay.held_bytes(), 0);
}

#[test]
fn while_a_gap_is_open_wal_waits_missed_rows_go_ahead_and_old_ones_first() {
    let mut scene = knows(vec![waiter(2, "r", true)], true);
    scene.commit(&[(9, "r"), (8, "s")]);
    assert!(in_lanes(&scene).is_empty() && first(&scene).waiting().is_slow_as_a_whole());
    assert!(first(&scene).waiting().has_old(RunHash::of_run(b"r")));
    assert!(!first(&scene).waiting().has_old(RunHash::of_run(b"s")));
    assert_eq!(load_of(scene.poll()), [2]);
    loaded(&mut scene, 1, &[(2, "r")]);
    assert!(!first(&scene).waiting().has_old(RunHash::of_run(b"r")));
    missed(&mut scene, 5, "r");
    missed(&mut scene, 6, "s");
    scene.feed(Input::Bridged(FIRST, Vec::new()));
    assert_eq!(first(&scene).waiting().missing_runs(), 2, "they are still in their lanes");
    assert_eq!(leave(&mut scene), [2, 5, 6]);
    assert_eq!(load_of(scene.poll()), Vec::<i64>::new());
    scene.feed(Input::Bridged(FIRST, Vec::new()));
    assert_eq!(load_of(scene.poll()), [9, 8]);
    loaded(&mut scene, 2, &[(9, "r"), (8, "s")]);
    scene.commit(&[(10, "r")]);
    assert_eq!(leave(&mut scene), [9, 8, 10]);
    assert!(first(&scene).waiting().is_over());
}

#[test]
fn a_run_that_takes_no_missed_rows_keeps_no_other_behind_the_gap() {
    let mut scene = knows(Vec::new(), true);
    let odd = RunHash::of_run(b"odd");
    scene.commit(&[(9, "odd"), (8, "r"), (7, "s")]);
    missed(&mut scene, 5, "r");
    scene.feed(Input::Bridged(FIRST, vec![odd]));
    // What WAL brought of s goes, and joins its lane from now on; r waits for its row in the lane.
    assert_eq!(load_first(&mut scene), [7]);
    loaded(&mut scene, 1, &[(7, "s")]);
    scene.commit(&[(10, "odd"), (11, "r"), (12, "s")]);
    assert_eq!(leave(&mut scene), [5, 7, 12]);
    assert_eq!(first(&scene).waiting().slow_runs(), 2);
    scene.feed(Input::Bridged(FIRST, vec![odd]));
    assert_eq!(load_first(&mut scene), [8, 11]);
    loaded(&mut scene, 2, &[(8, "r"), (11, "r")]);
    assert_eq!(leave(&mut scene), [8, 11]);
    // The run takes rows again: the missed one goes ahead of those that wait.
    missed(&mut scene, 4, "odd");
    scene.feed(Input::Bridged(FIRST, Vec::new()));
    assert_eq!(leave(&mut scene), [4]);
    scene.feed(Input::Bridged(FIRST, Vec::new()));
    assert_eq!(load_first(&mut scene), [9, 10]);
    loaded(&mut scene, 2, &[(9, "odd"), (10, "odd")]);
    assert!(first(&scene).waiting().is_over());
}

#[test]
fn what_is_known_is_not_missed() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    scene.commit(&[(2, "r"), (3, "r"), (4, "s"), (5, "s")]);
    let sent = scene.sent();
    scene.feed(Input::SweepBegins);
    scene.answer(sent[0], stored(12));
    record(&mut scene);
    // 1 was decided before the look and 2 after it; 3 to 5 are in their lanes.
    assert_eq!(first(&scene).missed(&[2, 3, 4, 5, 6]), [6]);
    sent[1..].iter().for_each(|attempt| scene.answer(*attempt, Outcome::NotSent));
    scene.pass(Duration::from_secs(60));
    pressure(&mut scene);
    scene.feed(Input::Resumed(FIRST, Verified { created: "s1".to_owned(), ..Verified::default() }));
    record(&mut scene);
    assert_eq!(first(&scene).counts().handed, 3);
    assert_eq!(first(&scene).missed(&[2, 3, 4, 5, 6]), [6], "they wait");
    for seq in 2..6 {
        missed(&mut scene, seq, "r");
    }
    assert_eq!(first(&scene).counts().missed, 0);
    scene.feed(Input::SweepEnds);
}

#[test]
fn one_refused_run_that_fills_memory_stops_nobody() {
    let rows: Vec<(i64, &str)> = (2..12).map(|seq| (seq, "r")).collect();
    let mut scene = blocked(&rows);
    scene.relay.limits.memory_bytes = 4_000;
    // Nothing was decided for long, and nothing else is in memory.
    for _ in 0..20 {
        scene.pass(Duration::from_secs(60));
        if let Some(attempt) = scene.sent().first() {
            scene.answer(*attempt, refused(None));
        }
        scene.relay.looked_at = None;
        scene.poll();
    }
    record(&mut scene);
    assert!(scene.relay.wants_wal());
    scene.commit(&[(12, "s")]);
    assert_eq!(leave(&mut scene), [12]);
}

#[test]
fn what_waits_gets_room_from_whoever_stands_still() {
    let mut scene = two();
    leave(&mut scene);
    record(&mut scene);
    scene.commit(&[(2, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], refused(None));
    pressure(&mut scene);
    record(&mut scene);
    // The other one holds more than half, and no WAL comes that would fill the rest.
    scene.commit(&[(3, "x"), (4, "y"), (5, "z")]);
    leave(&mut scene);
    record(&mut scene);
    scene.relay.limits.memory_bytes = 3_500;
    scene.pass(Duration::from_secs(60));
    assert!(scene.relay.wants_wal());
    scene.poll();
    record(&mut scene);
    assert_eq!(first(&scene).waiting().len(), 1);
    assert!(first(&scene).waiting().is_loading(RunHash::of_run(b"r")));
}

#[test]
fn a_burial_makes_room_for_its_run() {
    let mut scene = knows(vec![waiter(2, "r", false), waiter(3, "r", false)], false);
    assert_eq!(load_of(scene.poll()), [2, 3]);
    let mut bad = Event::clone(&event(2, "r"));
    bad.headers = Some(bytes::Bytes::from_static(br#"{"Nats-Msg-Id":"x"}"#));
    scene.feed(Input::Loaded(FIRST, Loaded { count: 1, events: vec![bad] }));
    let Some(Action::Load { .. }) = scene.relay.poll(scene.now) else { panic!("not read") };
    let Some(Action::Bury { burial, .. }) = scene.relay.poll(scene.now) else {
        panic!("not buried")
    };
    scene.feed(Input::LoadFailed(FIRST));
    assert!(scene.poll().is_empty(), "its lane does not go on");
    scene.feed(Input::Buried(burial, true));
    assert_eq!(load_of(scene.poll()), [3]);
}

/// Handed at once it would be ahead of the lane in the ledger.
#[test]
fn an_event_joins_its_lane_though_the_destination_is_slow_as_a_whole() {
    let mut known = spec("a", None);
    known.waiting = vec![waiter(1, "w", false)];
    let mut scene = Scene::new(vec![known]);
    scene.commit(&[(2, "r")]);
    scene.relay.destinations[0].waiting = Waiting::new(&[waiter(1, "w", false)], Some(3), false, 9);
    scene.commit(&[(3, "r"), (4, "s")]);
    assert_eq!(in_lanes(&scene), [2, 3]);
    scene.pass(Duration::from_secs(60));
    pressure(&mut scene);
    scene.commit(&[(5, "r")]);
    assert_eq!(handed(&record(&mut scene)[0]), [4, 2, 3, 5]);
}
