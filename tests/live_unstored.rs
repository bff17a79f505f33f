//! P3 and P7 with events that come to no stream: nobody stores their subject, or somebody takes them
//! and says nothing. Their runs wait, each in order, and the others go on; nothing is lost or
//! doubled when the cause is gone.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod support;

use std::time::{Duration, Instant};

use outboxd::sandbox::{STREAM, World, WorldOptions, stream};
use support::look::{self, publish, until};
use support::{SEQUENCE, SETTLE, log_tail, options};

const PER_RUN: &str = "pipeline = \"per-run\"";

/// Why nothing comes of the subject `events.hot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// Nobody listens.
    Unstored,
    /// Somebody listens who is no stream.
    Silent,
}

/// Three runs need the subject; a fourth does not, and its events leave all the same.
async fn its_runs_wait_and_no_others(cause: Cause, pipeline: &str) {
    let lines = "kinds = [\"hot\", \"other.*\"]\nack_timeout = \"1s\"\n";
    let destination = format!("{lines}{pipeline}");
    let world = World::start(WorldOptions { destination, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let broker = world.broker.connect().await.unwrap();
    let store = |subject: &'static str| {
        look::edit_stream(&broker, STREAM, move |config| config["subjects"] = [subject].into())
    };
    store("events.other.>").await;
    let mut deaf = None;
    if cause == Cause::Silent {
        deaf = Some(broker.subscribe("events.hot").await.unwrap());
        broker.flush().await.unwrap();
    }
    for run in ["k1", "k2", "k3"] {
        publish(&client, run, "hot", 1).await;
        publish(&client, run, "other.hot", 2).await;
    }
    let mut slowest = Duration::ZERO;
    for n in 1..=6 {
        publish(&client, "free", &format!("other.{n}"), n).await;
        let committed = Instant::now();
        until("an event of another run", Duration::from_secs(60), || async {
            let messages = stream::state(&broker, STREAM).await.unwrap().messages;
            (i64::try_from(messages).unwrap() == n).then_some(()).ok_or(format!("{messages}"))
        })
        .await;
        slowest = slowest.max(committed.elapsed());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    println!("{cause:?}: slowest event of the other run: {slowest:?}");
    // Silence costs `ack_timeout` and a back-off for each run that is found out.
    let bound = if cause == Cause::Silent { 20 } else { 2 };
    assert!(slowest < Duration::from_secs(bound), "{slowest:?}\n{}", log_tail(&world));
    if cause == Cause::Unstored {
        let log = log_tail(&world);
        assert!(log.contains("events.hot"), "the subject is not named: {log}");
    }
    assert_eq!(world.buried().await.unwrap().len(), 0);
    drop(deaf);
    broker.flush().await.unwrap();
    store("events.>").await;
    world.settle(SETTLE).await.unwrap();
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}");
}

/// A run that nobody stores has more events than memory may have numbers of: it alone waits.
#[tokio::test]
async fn a_flood_that_nobody_stores_stops_no_other_run() {
    let destination = "kinds = [\"hot\", \"other\"]".into();
    let options = WorldOptions { relay: "memory = \"4MiB\"".into(), destination, ..options() };
    let world = World::start(options).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let broker = world.broker.connect().await.unwrap();
    let store = |subject: &'static str| {
        look::edit_stream(&broker, STREAM, move |config| config["subjects"] = [subject].into())
    };
    store("events.other").await;
    let flood = "SELECT outbox.publish('flood', 'hot', id => id, \
                   payload => format('{\"id\":\"%s\",\"run\":\"flood\",\"n\":%s}', id, n)::json) \
                 FROM (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 30000) n) r";
    client.query(flood, &[]).await.unwrap();
    for n in 1..=20 {
        publish(&client, &format!("free-{}", n % 4), "other", n).await;
        until("an event of another run", SETTLE, || async {
            let messages = stream::state(&broker, STREAM).await.unwrap().messages;
            let all = i64::try_from(messages).unwrap() == n;
            all.then_some(()).ok_or_else(|| format!("{messages} of {n}\n{}", log_tail(&world)))
        })
        .await;
    }
    let handed = look::metric(&world, "outboxd_handed_events_total", "").await.unwrap();
    assert!(handed >= 30_000.0, "{handed} handed over\n{}", log_tail(&world));
    store("events.>").await;
    world.settle(SETTLE).await.unwrap();
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}");
    look::no_slow_run(&world).await;
}

#[tokio::test]
async fn an_unstored_subject_stops_only_its_runs_in_batches() {
    its_runs_wait_and_no_others(Cause::Unstored, "").await;
}

#[tokio::test]
async fn an_unstored_subject_stops_only_its_runs_per_run() {
    its_runs_wait_and_no_others(Cause::Unstored, PER_RUN).await;
}

#[tokio::test]
async fn an_unstored_subject_stops_only_its_runs_in_sequence() {
    its_runs_wait_and_no_others(Cause::Unstored, SEQUENCE).await;
}

#[tokio::test]
async fn a_silent_subject_stops_only_its_runs_in_batches() {
    its_runs_wait_and_no_others(Cause::Silent, "").await;
}

#[tokio::test]
async fn a_silent_subject_stops_only_its_runs_per_run() {
    its_runs_wait_and_no_others(Cause::Silent, PER_RUN).await;
}

#[tokio::test]
async fn a_silent_subject_stops_only_its_runs_in_sequence() {
    its_runs_wait_and_no_others(Cause::Silent, SEQUENCE).await;
}
