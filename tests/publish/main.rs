//! The publisher on a real nats-server: order through kills, refusals in the middle of a batch,
//! one event at a time, and a Resume that finds exactly what is stored.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

#[path = "../support/batches.rs"]
mod batches;
mod driver;
mod login;
mod odd;
mod sequence;

use driver::{PATIENCE, Run, Wire, destination, lsn_of, message};
use futures_util::StreamExt as _;
use outboxd::config::{DestinationConfig, PipelineChoice};
use outboxd::error::Kind;
use outboxd::event::{EventId, Reason};
use outboxd::message::Message;
use outboxd::publish::streams::{self, Probe};
use outboxd::publish::{Order, Report};
use outboxd::relay::outcome::{Floor, Outcome, Pipeline, ReadFrom, Refusal};
use outboxd::sandbox::{Nats, NatsCluster, NatsOptions};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

async fn create(config: &DestinationConfig) {
    streams::connect(config).await.unwrap().create_stream().await.unwrap();
}

/// Changes the stream's configuration.
async fn update(nats: &Nats, key: &str, value: Value) {
    let client = nats.connect().await.unwrap();
    let answer = client.request("$JS.API.STREAM.INFO.EVENTS", "".into()).await.unwrap();
    let mut config = serde_json::from_slice::<Value>(&answer.payload).unwrap()["config"].take();
    config[key] = value;
    let body = config.to_string().into();
    let answer = client.request("$JS.API.STREAM.UPDATE.EVENTS", body).await.unwrap();
    let answer: Value = serde_json::from_slice(&answer.payload).unwrap();
    assert_eq!(answer["error"], Value::Null);
}

/// `Outbox-Seq` of every message, in the stream's order.
async fn stored(client: async_nats::Client) -> Vec<i64> {
    let context = async_nats::jetstream::new(client);
    let config = async_nats::jetstream::consumer::pull::OrderedConfig {
        headers_only: true,
        ..Default::default()
    };
    // After a change of the leader it takes a moment until somebody answers.
    let open = async || {
        let mut stream = context.get_stream("EVENTS").await.ok()?;
        let messages = stream.info().await.ok()?.state.messages;
        Some((stream.create_consumer(config.clone()).await.ok()?, messages))
    };
    let opened = async {
        loop {
            if let Some(opened) = open().await {
                return opened;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let (consumer, messages) = tokio::time::timeout(PATIENCE, opened).await.unwrap();
    let read = consumer.messages().await.unwrap().take(usize::try_from(messages).unwrap());
    let seqs = read.map(|message| {
        let headers = message.unwrap().message.headers.unwrap();
        headers.get("Outbox-Seq").unwrap().as_str().parse::<i64>().unwrap()
    });
    tokio::time::timeout(PATIENCE, seqs.collect()).await.unwrap()
}

async fn takes_batches(test: &str) -> bool {
    let nats = Nats::start().await.unwrap();
    batches::taken_by(&nats.connect().await.unwrap(), test).await
}

/// Leaves the test when the server under test takes no batches.
macro_rules! needs_batches {
    ($test:literal) => {
        if !takes_batches($test).await {
            return;
        }
    };
}

fn is_stored(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Stored { .. })
}

/// A connected and resumed publisher on a new server with the stream.
async fn ready(change: impl FnOnce(&mut DestinationConfig)) -> (Nats, Wire) {
    let nats = Nats::start().await.unwrap();
    let mut config = destination(vec![nats.url()]);
    change(&mut config);
    create(&config).await;
    let mut wire = Wire::open(config);
    wire.up().await;
    wire.resume(Floor::default()).await;
    (nats, wire)
}

async fn order_survives_kills(pipeline: PipelineChoice, events: i64) {
    let mut nats = Nats::start().await.unwrap();
    let mut config = destination(vec![nats.url()]);
    config.pipeline = pipeline;
    config.exclusive = true;
    // Too short to help: whatever is sent twice is stored twice.
    config.create.duplicate_window = Some(Duration::from_millis(100));
    create(&config).await;
    let mut run = Run::new(Wire::open(config), events);
    let mut kills = 0;
    while !run.is_done() {
        run.step().await;
        if kills < 3 && run.stored > usize::try_from(events).unwrap() * (kills + 1) / 5 {
            kills += 1;
            nats.kill9().unwrap();
            nats.restart().await.unwrap();
        }
    }
    assert_eq!((kills, run.unknown > 0), (3, true), "the kills were felt");
    assert_eq!(stored(nats.connect().await.unwrap()).await, (1..=events).collect::<Vec<_>>());
    run.wire.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_kills_in_batches() {
    needs_batches!("order_survives_kills_in_batches");
    order_survives_kills(PipelineChoice::Batch, 40_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_kills_in_sequence() {
    order_survives_kills(PipelineChoice::Sequence, 40_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_kills_one_at_a_time() {
    order_survives_kills(PipelineChoice::PerRun, 2_000).await;
}

/// A cluster with the stream on three nodes, and a run that has begun on it.
async fn replicated(pipeline: PipelineChoice, events: i64) -> (NatsCluster, Run) {
    let cluster = NatsCluster::start().await.unwrap();
    let mut config = destination(cluster.urls());
    config.pipeline = pipeline;
    config.exclusive = true;
    config.create.replicas = 3;
    config.create.duplicate_window = Some(Duration::from_millis(100));
    create(&config).await;
    let mut run = Run::new(Wire::open(config), events);
    while run.stored < usize::try_from(events).unwrap() / 5 {
        run.step().await;
    }
    (cluster, run)
}

async fn finish(cluster: &NatsCluster, mut run: Run, events: i64) {
    while !run.is_done() {
        run.step().await;
    }
    assert!(run.unknown > 0, "the faults were felt");
    let client = cluster.connect().await.unwrap();
    assert_eq!(stored(client).await, (1..=events).collect::<Vec<_>>());
    run.wire.close().await;
}

async fn order_survives_changes_of_the_leader(pipeline: PipelineChoice) {
    let events = 20_000;
    let (mut cluster, mut run) = replicated(pipeline, events).await;
    cluster.step_down("EVENTS").await.unwrap();
    while run.stored < 10_000 {
        run.step().await;
    }
    let leader = cluster.wait_leader("EVENTS").await.unwrap();
    cluster.kill9(leader).unwrap();
    while run.stored < 15_000 {
        run.step().await;
    }
    cluster.restart(leader).await.unwrap();
    finish(&cluster, run, events).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_survives_changes_of_the_leader_in_batches() {
    needs_batches!("order_survives_changes_of_the_leader_in_batches");
    order_survives_changes_of_the_leader(PipelineChoice::Batch).await;
}

async fn nothing_is_taken_for_stored_without_a_quorum(pipeline: PipelineChoice) {
    let events = 20_000;
    let (mut cluster, mut run) = replicated(pipeline, events).await;
    let leader = cluster.wait_leader("EVENTS").await.unwrap();
    let followers: Vec<_> = (0..3).filter(|node| *node != leader).collect();
    for follower in &followers {
        cluster.kill9(*follower).unwrap();
    }
    while run.unknown == 0 {
        run.step().await;
    }
    cluster.kill9(leader).unwrap();
    for follower in followers {
        cluster.restart(follower).await.unwrap();
    }
    cluster.restart(leader).await.unwrap();
    finish(&cluster, run, events).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_taken_for_stored_without_a_quorum_in_batches() {
    needs_batches!("nothing_is_taken_for_stored_without_a_quorum_in_batches");
    nothing_is_taken_for_stored_without_a_quorum(PipelineChoice::Batch).await;
}

/// Of ten messages one is too large for the stream: those before it are stored, it is refused for good,
/// and those behind it are not sent. The latter.
async fn one_is_too_large(nats: &Nats, wire: &mut Wire, refused: i64) -> Vec<Message> {
    // After the connect, so that our own check does not see it.
    update(nats, "max_msg_size", json!(1_000)).await;
    let messages = (1..=10).map(|seq| {
        let bytes = if seq == refused { 2_000 } else { 10 };
        message(seq, vec![b'x'; bytes], &wire.envelope)
    });
    let messages: Vec<_> = messages.collect();
    let attempts = wire.ship(messages.clone());
    let outcomes = wire.outcomes(&attempts).await;
    for (seq, outcome) in (1..).zip(&outcomes) {
        match outcome {
            Outcome::Stored { .. } => assert!(seq < refused),
            Outcome::Refused(Refusal { permanent, code, .. }) => {
                assert_eq!((seq, *permanent), (refused, Some(Reason::TooLarge)));
                assert_eq!(*code, 10054);
            }
            Outcome::NotSent => assert!(seq > refused),
            Outcome::Unknown(doubt) => panic!("{seq} is in doubt: {doubt:?}"),
        }
    }
    let rest = messages.into_iter().zip(1..).filter(|(_, seq)| *seq > refused);
    rest.map(|(message, _)| message).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_message_splits_its_batch() {
    needs_batches!("a_refused_message_splits_its_batch");
    // Behind it in the batch, last in the batch, and first.
    for refused in [4_i64, 10, 1] {
        let (nats, mut wire) = ready(|_| {}).await;
        let rest = one_is_too_large(&nats, &mut wire, refused).await;
        // The rest goes on at once: the batch was ended, not left to the server's timeout.
        let began = Instant::now();
        wire.resume(Floor::default()).await;
        let attempts = wire.ship(rest);
        assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
        assert!(began.elapsed() < Duration::from_secs(2));
        let expected: Vec<_> = (1..=10).filter(|seq| *seq != refused).collect();
        assert_eq!(stored(nats.connect().await.unwrap()).await, expected);
        wire.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_shipped_before_a_failure_is_known_is_not_sent() {
    needs_batches!("what_is_shipped_before_a_failure_is_known_is_not_sent");
    let (nats, mut wire) = ready(|_| {}).await;
    update(&nats, "max_msg_size", json!(1_000)).await;
    let first = message(1, vec![b'x'; 2_000], &wire.envelope);
    let attempts = wire.ship([first]);
    // The answer is under way, and before anybody has taken it in, the next event is shipped.
    let outcomes = wire.outcomes(&attempts).await;
    assert!(matches!(&outcomes[0], Outcome::Refused(_)));
    let second = message(2, vec![b'x'; 10], &wire.envelope);
    let attempts = wire.ship([second.clone()]);
    assert_eq!(wire.outcomes(&attempts).await, [Outcome::NotSent]);
    wire.resume(Floor::default()).await;
    let attempts = wire.ship([second]);
    assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
    wire.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_finds_exactly_what_is_stored() {
    let (nats, mut wire) = ready(|_| {}).await;
    let messages = (1..=3_000).map(|seq| message(seq, b"x".to_vec(), &wire.envelope));
    let messages: Vec<_> = messages.collect();
    let attempts = wire.ship(messages);
    assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
    // Somebody else writes to the stream, before and behind ours.
    let client = nats.connect().await.unwrap();
    client.request("events.other", "theirs".into()).await.unwrap();
    let created = wire.resume(Floor::default()).await.created;

    let resumed = wire.resume(Floor { created: created.clone(), seq: 1_000 }).await;
    assert_eq!(resumed.last_seq, 3_001);
    let seqs: Vec<_> = resumed.found.iter().map(|found| found.seq).collect();
    assert_eq!(seqs, (1_001..=3_000).collect::<Vec<_>>());
    let last = resumed.found.last().unwrap();
    assert_eq!((last.stream_seq, &last.id), (3_000, &EventId::Int(3_000)));

    // What nobody asks for any more is read over.
    let floor = Floor { created: created.clone(), seq: 1_000 };
    let from = ReadFrom { known: 3_001, floor, newest: None, confirmable: lsn_of(2_999) };
    let resumed = wire.read(from).await;
    let seqs: Vec<_> = resumed.found.iter().map(|found| found.seq).collect();
    assert_eq!((resumed.last_seq, seqs), (3_001, vec![2_999, 3_000]));

    // Of another stream's time the floor says nothing.
    let other = Floor { created: "2020-01-01T00:00:00Z".into(), seq: 2_999 };
    assert_eq!(wire.resume(other).await.found.len(), 3_000);

    let context = async_nats::jetstream::new(client);
    context.get_stream("EVENTS").await.unwrap().purge().await.unwrap();
    let resumed = wire.resume(Floor { created: created.clone(), seq: 1_000 }).await;
    assert_eq!((resumed.last_seq, resumed.found.len()), (1_000, 0), "nothing was read");

    // The stream ends below what was acknowledged, whatever the floor: messages were lost.
    let floor = Floor { created, seq: 1_000 };
    let from = ReadFrom { floor, known: 3_002, ..ReadFrom::default() };
    wire.publisher.order(Order::Resume(from));
    let Report::Resumed(Err(failure)) = wire.report().await else { panic!() };
    assert_eq!(failure.kind, Kind::StreamShorter);
    wire.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pipeline_follows_the_stream() {
    needs_batches!("the_pipeline_follows_the_stream");
    let (nats, mut wire) = ready(|_| {}).await;
    update(&nats, "allow_batched", json!(false)).await;
    let event = message(1, b"x".to_vec(), &wire.envelope);
    let attempts = wire.ship([event.clone()]);
    let outcomes = wire.outcomes(&attempts).await;
    assert!(matches!(&outcomes[0], Outcome::Refused(Refusal { permanent: None, code: 10205, .. })));
    let facts = wire.up().await;
    assert_eq!(facts.pipeline, Pipeline::PerRun, "{}", facts.why);
    wire.resume(Floor::default()).await;
    let attempts = wire.ship([event]);
    assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
    assert_eq!(stored(nats.connect().await.unwrap()).await, [1]);
    wire.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_stands_in_the_way_is_named() {
    let mut options = NatsOptions::default();
    options.config.push_str(
        r#"authorization { users: [
            { user: all, password: p }
            { user: some, password: p, permissions: {
                publish: { deny: "events.>" }, subscribe: "_INBOX.>" } }
        ] }"#,
    );
    let nats = Nats::start_with(options).await.unwrap();
    let port = nats.port();
    let with = |login: &str| destination(vec![format!("nats://{login}@127.0.0.1:{port}")]);

    let mut wire = Wire::open(with("all:wrong"));
    let Report::Down(failure) = wire.report().await else { panic!() };
    assert_eq!(failure.kind, Kind::BrokerLogin, "{failure}");
    assert!(!failure.detail.contains("wrong"), "{failure}");
    wire.close().await;

    let mut wire = Wire::open(with("all:p"));
    let Report::Down(failure) = wire.report().await else { panic!() };
    assert_eq!(failure.kind, Kind::StreamMissing, "{failure}");
    create(&with("all:p")).await;
    wire.up().await;
    wire.close().await;

    let broker = streams::connect(&with("all:p")).await.unwrap();
    assert_eq!(broker.probe().await.unwrap(), Probe::Allowed);
    let seen = broker.inspect().await.unwrap();
    let stream = seen.stream.unwrap();
    assert!(seen.usable.is_ok() && stream.covers_template);
    let broker = streams::connect(&with("some:p")).await.unwrap();
    assert!(matches!(broker.probe().await.unwrap(), Probe::Forbidden(_)));

    let mut wire = Wire::open(with("some:p"));
    wire.up().await;
    wire.resume(Floor::default()).await;
    let event = message(1, b"x".to_vec(), &wire.envelope);
    let attempts = wire.ship([event]);
    let outcomes = wire.outcomes(&attempts).await;
    let Outcome::Refused(Refusal { permanent: None, detail, .. }) = &outcomes[0] else { panic!() };
    assert!(detail.contains("\"events.order.created\""), "{detail}");
    wire.close().await;
}
