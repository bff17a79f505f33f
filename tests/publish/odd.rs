//! Odd circumstances: subjects that come to no stream, streams that forget or are replaced, servers
//! that say nothing.

use crate::driver::{Wire, destination, message, message_of};
use crate::{create, is_stored, ready, update};
use outboxd::config::PipelineChoice;
use outboxd::publish::Order;
use outboxd::relay::outcome::{Doubt, Floor, Outcome, Pipeline, ReadFrom, Refusal, Retention};
use outboxd::sandbox::{Nats, NatsOptions, Signal};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PIPELINES: [PipelineChoice; 3] =
    [PipelineChoice::Auto, PipelineChoice::Sequence, PipelineChoice::PerRun];

/// What the connection turns away is refused by itself, wherever it stands among others.
async fn one_subject_is_turned_away(wire: &mut Wire, pipeline: Pipeline, kind: &str) {
    let mut seq = 0;
    for bad in [1, 2, 0] {
        let messages = (0..3).map(|place| {
            seq += 1;
            let kind = if place == bad { kind } else { "order.created" };
            message_of(kind, seq, b"x".to_vec(), &wire.envelope)
        });
        let messages: Vec<_> = messages.collect();
        wire.resume(Floor::default()).await;
        let attempts = wire.ship(messages);
        let outcomes = wire.outcomes(&attempts).await;
        for (place, outcome) in (0..3).zip(&outcomes) {
            match outcome {
                Outcome::Refused(Refusal { permanent: None, detail, .. }) if place == bad => {
                    assert!(detail.contains(&format!("events.{kind}")), "{detail}");
                }
                Outcome::Stored { .. } if place < bad || !pipeline.sends_ahead() => {}
                Outcome::NotSent if place > bad && pipeline.sends_ahead() => {}
                Outcome::Stored { .. }
                | Outcome::Refused(_)
                | Outcome::NotSent
                | Outcome::Unknown(_) => panic!("{place} of {outcomes:?}"),
            }
        }
    }
    // Alone there is no doubt.
    wire.resume(Floor::default()).await;
    let attempts = wire.ship([message_of(kind, seq + 1, b"x".to_vec(), &wire.envelope)]);
    assert!(matches!(wire.outcomes(&attempts).await[..], [Outcome::Refused(_)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subject_that_nobody_stores_is_refused_alone() {
    for pipeline in PIPELINES {
        let nats = Nats::start().await.unwrap();
        let mut config = destination(vec![nats.url()]);
        config.pipeline = pipeline;
        config.exclusive = true;
        config.filter.kinds = vec!["order.created".into(), "other".into()];
        create(&config).await;
        update(&nats, "subjects", json!(["events.order.>"])).await;
        let mut wire = Wire::open(config);
        let facts = wire.up().await;
        one_subject_is_turned_away(&mut wire, facts.pipeline, "other").await;
        wire.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subject_that_we_may_not_publish_is_refused_alone() {
    // A stream for each: what another pipeline has stored would be duplicates.
    for pipeline in PIPELINES {
        let mut options = NatsOptions::default();
        options.config.push_str(
            r#"authorization { users: [
                { user: some, password: p, permissions: { publish: { deny: "events.secret" } } }
            ] }"#,
        );
        let nats = Nats::start_with(options).await.unwrap();
        let server = format!("nats://some:p@127.0.0.1:{}", nats.port());
        let mut config = destination(vec![server]);
        create(&config).await;
        config.exclusive = true;
        config.pipeline = pipeline;
        let mut wire = Wire::open(config);
        let facts = wire.up().await;
        wire.resume(Floor::default()).await;
        one_subject_is_turned_away(&mut wire, facts.pipeline, "secret").await;
        wire.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn single_publishes_stop_behind_an_unknown_outcome() {
    let (nats, mut wire) = ready(|config| {
        config.pipeline = PipelineChoice::PerRun;
        config.max_in_flight = 2;
        config.filter.kinds = vec!["order.created".into(), "other".into()];
    })
    .await;
    update(&nats, "subjects", json!(["events.order.>"])).await;
    // Somebody listens, and does not answer.
    let client = nats.connect().await.unwrap();
    let deaf = client.subscribe("events.other").await.unwrap();
    // An answer on this connection says that the server knows the subscription.
    client.request("$JS.API.INFO", "".into()).await.unwrap();
    let kinds = ["other", "other", "order.created"].iter().zip(1..);
    let messages = kinds.map(|(kind, seq)| message_of(kind, seq, vec![], &wire.envelope));
    let messages: Vec<_> = messages.collect();
    let attempts = wire.ship(messages);
    let unknown = Outcome::Unknown(Doubt::Silence);
    let outcomes = wire.outcomes(&attempts).await;
    assert_eq!(outcomes, [unknown.clone(), unknown, Outcome::NotSent]);
    drop(deaf);
    wire.close().await;
}

/// The server lets nobody read a work queue beside its consumers, and where consumers' interest
/// counts it wants the reader to be like them.
#[tokio::test(flavor = "multi_thread")]
async fn streams_that_forget_what_is_consumed_are_published_to() {
    for (word, retention, found) in
        [("workqueue", Retention::WorkQueue, 0), ("interest", Retention::Interest, 20)]
    {
        let nats = Nats::start().await.unwrap();
        let client = nats.connect().await.unwrap();
        let context = async_nats::jetstream::new(client.clone());
        let mut stream = json!({ "name": "EVENTS", "subjects": ["events.>"], "retention": word,
            "storage": "file" });
        if crate::batches::known_to(&client) {
            stream["allow_batched"] = true.into();
        }
        let created = client.request("$JS.API.STREAM.CREATE.EVENTS", stream.to_string().into());
        let answer: Value = serde_json::from_slice(&created.await.unwrap().payload).unwrap();
        assert_eq!(answer["error"], Value::Null);
        let consumer = async_nats::jetstream::consumer::pull::Config {
            durable_name: Some("theirs".into()),
            ack_policy: async_nats::jetstream::consumer::AckPolicy::Explicit,
            ..Default::default()
        };
        let mut stream = context.get_stream("EVENTS").await.unwrap();
        stream.create_consumer(consumer).await.unwrap();

        let mut wire = Wire::open(destination(vec![nats.url()]));
        let facts = wire.up().await;
        assert_eq!(facts.retention, retention);
        assert!(facts.why.contains(word), "{}", facts.why);
        let mut floor = Floor { created: facts.created, seq: 0 };
        for round in 0..2 {
            let resumed = wire.resume(floor.clone()).await;
            assert_eq!(resumed.found.len(), round * found, "{word}");
            floor.created = resumed.created;
            let messages = (1..=20).map(|seq| {
                let seq = seq + 20 * i64::try_from(round).unwrap();
                message(seq, b"x".to_vec(), &wire.envelope)
            });
            let messages: Vec<_> = messages.collect();
            let attempts = wire.ship(messages);
            assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
        }
        assert_eq!(stream.info().await.unwrap().state.messages, 40, "reading takes nothing");
        wire.close().await;
    }
}

/// Cut off, nothing is answered and nothing gets through; a stop waits for none of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_the_server() {
    let (nats, mut wire) = ready(|config| config.ack_timeout = Duration::from_secs(30)).await;
    nats.signal(Signal::Stop).unwrap();
    let messages = (1..=300).map(|seq| message(seq, vec![b'x'; 100_000], &wire.envelope));
    let messages: Vec<_> = messages.collect();
    wire.ship(messages);
    wire.publisher.order(Order::Resume(ReadFrom::default()));
    let began = Instant::now();
    wire.close().await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    nats.signal(Signal::Continue).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_replaced_is_announced_at_once() {
    let (nats, mut wire) = ready(|_| {}).await;
    let before = wire.resume(Floor::default()).await.created;
    let context = async_nats::jetstream::new(nats.connect().await.unwrap());
    context.delete_stream("EVENTS").await.unwrap();
    create(&destination(vec![nats.url()])).await;
    let began = Instant::now();
    let resumed = wire.resume(Floor { created: before.clone(), seq: 0 }).await;
    assert_ne!(resumed.created, before);
    let facts = wire.up().await;
    assert_eq!(facts.created, resumed.created);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    // Nothing goes to it that was meant for the other one.
    let attempts = wire.ship([message(1, b"x".to_vec(), &wire.envelope)]);
    assert_eq!(wire.outcomes(&attempts).await, [Outcome::NotSent]);
    wire.close().await;
}
