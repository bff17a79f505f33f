//! To the far end: a consumer that keeps receipts of its own, crashed where it matters, off for long, and
//! sent everything once more.

use outboxd::sandbox::verdict::{Event, Verdict};

use crate::place::{Place, number};
use crate::support::consumer::{Crash, Work, prepare, verdict_of_effects, work};
use crate::support::look::publish;
use crate::support::oracle;

/// Every event has had its effect once, and the effects of a run are in the order of its commits.
async fn each_effect_once(place: &Place, events: &[Event]) -> Verdict {
    let verdict = verdict_of_effects(&place.client, events).await;
    assert!(verdict.is_ok(), "{verdict}");
    verdict
}

#[tokio::test]
async fn crashes_before_its_commit_and_before_its_ack_make_no_second_effect() {
    let place = Place::start().await;
    prepare(&place.world).await;
    for n in 1..=20 {
        publish(&place.client, "a", "order.paid", n).await;
        publish(&place.client, "b", "order.paid", n).await;
    }
    let events = place.since(0).await;
    let (mut done, mut known) = (0, 0);
    for round in 0..10 {
        let at = round % 4;
        let point = if round % 2 == 0 { Crash::BeforeCommit } else { Crash::BeforeAck };
        let Work { crashed, done: more, known: again } =
            work(&place.world, |message| (message == at).then_some(point)).await;
        assert!(crashed, "round {round}");
        (done, known) = (done + more, known + again);
    }
    let Work { crashed, done: more, known: again } = work(&place.world, |_| None).await;
    assert!(!crashed);
    assert_eq!(done + more, events.len() as u64);
    // Each crash before an ack brought its message once more; one before a commit did nothing.
    assert_eq!(known + again, 5);
    let verdict = each_effect_once(&place, &events).await;
    let note = "effects at the consumer; 10 crashes, 5 messages again";
    oracle("the consumer before its commit, and before its ack", &verdict, note);
}

/// A stream is purged behind a consumer that had come half way: the replay brings back all, and what it
/// had done is not done again. The other half comes in the order of its runs.
#[tokio::test]
async fn what_a_replay_brings_again_has_no_second_effect() {
    let place = Place::start().await;
    prepare(&place.world).await;
    place.write(300).await;
    let events = place.since(0).await;
    let half = work(&place.world, |message| (message == 150).then_some(Crash::BeforeAck)).await;
    assert_eq!((half.crashed, half.done), (true, 151));
    place.purge().await;
    let report = place.done(&["--since-lsn", "0/0", "--rate", "unlimited"]).await;
    assert_eq!(number(&report, "stored"), events.len() as u64);
    let rest = work(&place.world, |_| None).await;
    assert_eq!(rest, Work { done: events.len() as u64 - 151, known: 151, crashed: false });
    each_effect_once(&place, &events).await;
}

/// The consumer is off while all is written: the source goes on, the lag is seen at the place where it
/// is, and afterwards all stages agree.
#[tokio::test]
async fn a_consumer_that_was_off_catches_up_and_its_lag_is_told_meanwhile() {
    let place = Place::start().await;
    prepare(&place.world).await;
    place.write(1_000).await;
    let events = place.since(0).await;
    let first = events[0].id.to_string();
    let told = place.world.relay.run(&["trace", &first, "--json"]).await.unwrap();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let consumer = told.pointer("/destinations/0/consumers/0").unwrap();
    assert_eq!(consumer["standing"], "pending", "{told:#}");
    assert_eq!(consumer["pending"], events.len(), "{told:#}");
    let caught_up = work(&place.world, |_| None).await;
    assert_eq!(caught_up, Work { done: events.len() as u64, known: 0, crashed: false });
    each_effect_once(&place, &events).await;
    let told = place.world.relay.run(&["trace", &first]).await.unwrap();
    assert!(told.contains("sample: acknowledged"), "{told}");
    place.has_exactly(&events).await;
}
