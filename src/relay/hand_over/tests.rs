//! Scenes of hand-over.

use super::*;
use std::collections::VecDeque;

use crate::lsn::Lsn;
use crate::relay::machine::tests::{FIRST, Scene, facts, floor, refused, spec};
use crate::relay::machine::{Action, Input, Verified};
use crate::relay::outcome::{Answer, DestinationId, Pipeline};
use crate::relay::slow::tests::{
    blocked, first, handed, in_lanes, knows, leave, load_of, loaded, missed, pressure, record,
    stored, two, waiter,
};

const SECOND: DestinationId = DestinationId(1);

#[test]
fn when_memory_is_full_whoever_stands_still_hands_over() {
    let mut scene = two();
    scene.relay.limits.memory_bytes = 6_000;
    scene.commit(&[(2, "r"), (3, "r")]);
    assert_eq!(leave(&mut scene), [2, 3]);
    scene.pass(Duration::from_secs(3));
    (4..12).for_each(|seq| scene.commit(&[(seq, "r")]));
    assert!(!scene.relay.wants_wal());
    assert_eq!(leave(&mut scene), (4..12).collect::<Vec<_>>());
    record(&mut scene);
    assert!(scene.relay.wants_wal());
    let end = Lsn(scene.lsn + 50);
    assert_eq!(scene.relay.confirmable(), end, "handed over and recorded");
    let second = &scene.relay.destinations()[1];
    assert_eq!((second.lanes().len(), second.waiting().len(), second.counts().handed), (0, 11, 11));
    // What comes now for its runs waits behind.
    scene.commit(&[(12, "r"), (13, "other")]);
    let second = &scene.relay.destinations()[1];
    assert_eq!((second.lanes().len(), second.waiting().len()), (1, 12));
}

#[test]
fn when_nobody_goes_on_wal_holds_the_events() {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10))), spec("b", None)]);
    scene.relay.limits.memory_bytes = 2_000;
    scene.commit(&[(1, "r"), (2, "s"), (3, "t"), (4, "u")]);
    scene.pass(Duration::from_secs(3));
    assert!(scene.poll().is_empty() && !scene.relay.wants_wal());
    assert!(scene.relay.wake_at().is_some(), "it looks again");
    assert_eq!((in_lanes(&scene).len(), first(&scene).counts().handed), (4, 0));
}

#[test]
fn under_wal_pressure_everything_that_stands_still_is_handed_over() {
    let mut scene = Scene::new(vec![spec("a", Some(floor("s1", 10))), spec("b", None)]);
    scene.relay.limits.memory_bytes = 1;
    scene.commit(&[(1, "r"), (2, "s")]);
    scene.pass(Duration::from_secs(3));
    pressure(&mut scene);
    let drafts = record(&mut scene);
    assert_eq!(drafts.iter().map(handed).collect::<Vec<_>>(), [[1, 2], [1, 2]]);
    assert_eq!(scene.relay.confirmable(), Lsn(scene.lsn + 50));
    assert_eq!(scene.relay.held_bytes(), 0);
}

/// The ledger has it in its place, ahead of what follows in its run; whatever becomes of it, it is in
/// its lane.
#[test]
fn what_is_in_flight_is_recorded_with_the_rest_and_stays() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    record(&mut scene);
    scene.commit(&[(2, "r"), (3, "s"), (4, "r")]);
    let sent = scene.sent();
    assert_eq!(sent.len(), 3);
    scene.commit(&[(5, "r"), (6, "t")]);
    scene.pass(Duration::from_secs(60));
    pressure(&mut scene);
    assert_eq!(in_lanes(&scene), [2, 3, 4]);
    // Answered before the ledger has it as handed over: one flush has both.
    scene.answer(sent[0], stored(12));
    let drafts = record(&mut scene);
    assert_eq!(handed(&drafts[0]), [2, 3, 4, 5, 6]);
    assert!(drafts[0].decided.published.contains(2));
    assert_eq!(scene.relay.confirmable(), Lsn(scene.lsn + 50));
    // The rest is being read. The run is slow: what comes now waits behind.
    scene.commit(&[(7, "r")]);
    assert_eq!((in_lanes(&scene), first(&scene).waiting().len()), (vec![3, 4], 3));
    scene.answer(sent[1], stored(13));
    scene.answer(sent[2], stored(14));
    loaded(&mut scene, 2, &[(5, "r"), (6, "t")]);
    assert_eq!(load_of(scene.poll()), [7]);
    loaded(&mut scene, 1, &[(7, "r")]);
    assert_eq!(in_lanes(&scene), [5, 6, 7]);
    assert!(first(&scene).waiting().is_over());
}

/// Not a second time as long as nothing new came: the ledger has all of it.
#[test]
fn what_is_in_flight_is_handed_over_once() {
    let mut scene = Scene::flowing(Pipeline::Batch);
    record(&mut scene);
    scene.commit(&[(2, "r")]);
    let sent = scene.sent();
    scene.pass(Duration::from_secs(60));
    pressure(&mut scene);
    pressure(&mut scene);
    assert_eq!(handed(&record(&mut scene)[0]), [2]);
    pressure(&mut scene);
    assert!(record(&mut scene).is_empty());
    scene.answer(sent[0], stored(12));
    assert!(record(&mut scene)[0].decided.published.contains(2));
    assert!(in_lanes(&scene).is_empty());
}

/// What the first destination sends, and what receipts hand over; the second one's is stored at once.
fn turn(scene: &mut Scene) -> (Vec<u64>, Vec<i64>) {
    let (mut sent, mut passed) = (Vec::new(), Vec::new());
    while let Some(action) = scene.relay.poll(scene.now) {
        match action {
            Action::Send { destination: FIRST, attempt, .. } => sent.push(attempt.0),
            Action::Send { destination, attempt: first, .. } => {
                let answer = Answer { first, last: first, outcome: stored(first.0 + 100) };
                scene.feed(Input::Answer(destination, answer));
            }
            Action::Resume { destination, .. } => {
                let verified =
                    Verified { created: "s1".into(), last_seq: 10, ..Default::default() };
                scene.feed(Input::Resumed(destination, verified));
            }
            Action::Record(drafts) => {
                passed.extend(drafts.iter().flat_map(handed));
                scene.feed(Input::Recorded { newest: 7 });
            }
            Action::Bury { .. } | Action::Load { .. } | Action::ReadWaiting { .. } => {}
        }
    }
    (sent, passed)
}

/// It decides an event a second, and has memory full of them.
#[test]
fn a_destination_that_moves_and_is_slow_holds_up_no_other() {
    let mut scene = two();
    scene.feed(Input::Up(SECOND, facts("s1", 10, Pipeline::PerRun)));
    turn(&mut scene);
    scene.pass(Duration::from_secs(1));
    turn(&mut scene);
    scene.relay.limits.memory_bytes = 24_000;
    scene.relay.destinations[0].spec.max_in_flight = 2;
    let (mut flying, mut passed, mut next) = (VecDeque::new(), Vec::new(), 10);
    let mut second = |scene: &mut Scene| {
        fill(scene, &mut next);
        let (sent, handed) = turn(scene);
        flying.extend(sent);
        passed.extend(handed);
        flying.pop_front().into_iter().for_each(|attempt| scene.answer(attempt, stored(30)));
        assert!(scene.relay.destinations()[1].lanes().is_empty());
        scene.pass(Duration::from_secs(1));
    };
    (0..10).for_each(|_| second(&mut scene));
    assert_eq!(first(&scene).counts().handed, 0, "it may be quick");
    (0..4).for_each(|_| second(&mut scene));
    // In commit order, with what was in flight then.
    let from = passed[0];
    assert!(from < 30 && passed.len() > 5, "{passed:?}");
    assert!(passed.iter().zip(from..).all(|(seq, due)| *seq == due), "{passed:?}");
    assert!(scene.relay.confirmable() > Lsn(100 * (passed.len() as u64)));
}

/// Rows until memory is full.
fn fill(scene: &mut Scene, next: &mut i64) {
    while scene.relay.wants_wal() {
        scene.commit(&[(*next, if *next % 2 == 0 { "r" } else { "s" })]);
        *next += 1;
    }
}

/// Alone it holds up nobody: WAL keeps what there is no room for, as long as it may.
#[test]
fn a_slow_destination_alone_is_waited_for_until_wal_is_pressed() {
    let mut scene = Scene::flowing(Pipeline::PerRun);
    record(&mut scene);
    scene.relay.limits.memory_bytes = 24_000;
    scene.relay.destinations[0].spec.max_in_flight = 2;
    let (mut flying, mut next) = (VecDeque::new(), 10);
    let mut second = |scene: &mut Scene| {
        fill(scene, &mut next);
        flying.extend(scene.sent());
        flying.pop_front().into_iter().for_each(|attempt| scene.answer(attempt, stored(30)));
        scene.feed(Input::Recorded { newest: 7 });
        scene.pass(Duration::from_secs(1));
    };
    (0..15).for_each(|_| second(&mut scene));
    assert_eq!(first(&scene).counts().handed, 0);
    scene.feed(Input::WalPressure(true));
    (0..14).for_each(|_| second(&mut scene));
    assert!(first(&scene).counts().handed > 0);
}

/// It holds no WAL, and would come and go as often as it is looked for.
#[test]
fn what_the_ledger_has_is_not_handed_over_for_wal() {
    let mut scene = blocked(&[(2, "r"), (3, "r")]);
    pressure(&mut scene);
    assert_eq!(handed(&record(&mut scene)[0]), [2, 3]);
    scene.pass(Duration::from_secs(60));
    assert_eq!(load_of(scene.poll()), [2, 3]);
    loaded(&mut scene, 2, &[(2, "r"), (3, "r")]);
    let sent = scene.sent();
    scene.answer(sent[0], refused(None));
    scene.pass(Duration::from_secs(1));
    pressure(&mut scene);
    assert_eq!(in_lanes(&scene), [2, 3]);
}

/// A receipt would have them behind what waits already.
#[test]
fn missed_rows_leave_their_lanes_without_a_receipt() {
    let mut scene = knows(vec![waiter(2, "r", true)], true);
    assert_eq!(load_of(scene.poll()), [2]);
    loaded(&mut scene, 1, &[(2, "r")]);
    missed(&mut scene, 5, "r");
    scene.feed(Input::Down(FIRST));
    scene.pass(Duration::from_secs(60));
    scene.relay.limits.memory_bytes = 1;
    scene.relay.destinations[0].moved_at = None;
    let held = &mut scene.relay.held_bytes;
    scene.relay.destinations[0].hand_over(Reach::All, false, held);
    assert_eq!(scene.relay.held_bytes(), 0);
    assert!(
        first(&scene).waiting().has_old(RunHash::of_run(b"r")),
        "2 is still older than the gap"
    );
    assert!(record(&mut scene).is_empty());
    assert_eq!(first(&scene).missed(&[2, 5]), [5], "to be found again");
    // Not by the look that is under way: it may not have seen those that were in the lane.
    missed(&mut scene, 6, "r");
    scene.feed(Input::Bridged(FIRST, Vec::new()));
    assert!(in_lanes(&scene).is_empty() && first(&scene).waiting().missing_runs() == 1);
    scene.feed(Input::SweepBegins);
    missed(&mut scene, 5, "r");
    assert_eq!(in_lanes(&scene), [5]);
}
