//! `sequence`: what the server refuses, and others who write a stream that should be ours alone.

use crate::driver::{Run, Wire, destination, message};
use crate::{create, is_stored, one_is_too_large, ready, stored};
use outboxd::config::{DestinationConfig, PipelineChoice};
use outboxd::relay::outcome::{Floor, Outcome, Pipeline};
use outboxd::sandbox::Nats;
use std::time::Duration;

fn in_sequence(config: &mut DestinationConfig) {
    config.pipeline = PipelineChoice::Sequence;
    config.exclusive = true;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_message_stops_those_behind_it() {
    for refused in [4_i64, 10, 1] {
        let (nats, mut wire) = ready(in_sequence).await;
        let rest = one_is_too_large(&nats, &mut wire, refused).await;
        wire.resume(Floor::default()).await;
        let attempts = wire.ship(rest);
        assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
        let expected: Vec<_> = (1..=10).filter(|seq| *seq != refused).collect();
        assert_eq!(stored(nats.connect().await.unwrap()).await, expected);
        wire.close().await;
    }
}

/// A message that the stream holds already is stored nowhere, on every version, and what is sent
/// behind it stops there, and is not blamed on others.
#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_stops_those_behind_it() {
    let (nats, mut wire) = ready(in_sequence).await;
    let messages = |range: std::ops::RangeInclusive<i64>, wire: &Wire| {
        range.map(|seq| message(seq, b"x".to_vec(), &wire.envelope)).collect::<Vec<_>>()
    };
    let first = messages(1..=3, &wire);
    let attempts = wire.ship(first);
    assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
    let again = messages(3..=5, &wire);
    let attempts = wire.ship(again);
    let outcomes = wire.outcomes(&attempts).await;
    let duplicate = Outcome::Stored { stream_seq: 3, duplicate: true };
    assert_eq!(outcomes, [duplicate, Outcome::NotSent, Outcome::NotSent]);
    wire.resume(Floor::default()).await;
    let rest = messages(4..=5, &wire);
    let attempts = wire.ship(rest);
    assert!(wire.outcomes(&attempts).await.iter().all(is_stored));
    assert_eq!(stored(nats.connect().await.unwrap()).await, [1, 2, 3, 4, 5]);
    wire.close().await;
}

/// One message of somebody else costs a look at the stream. When they go on, each run has one event
/// in flight for a while; order holds, and nothing is lost or stored twice.
#[tokio::test(flavor = "multi_thread")]
async fn others_who_write_the_stream_are_borne_and_then_avoided() {
    let nats = Nats::start().await.unwrap();
    let mut config = destination(vec![nats.url()]);
    in_sequence(&mut config);
    config.create.duplicate_window = Some(Duration::from_millis(100));
    create(&config).await;
    let client = nats.connect().await.unwrap();
    let events = 20_000;
    let mut run = Run::new(Wire::open(config), events);
    let mut foreign = 0;
    while !run.is_done() {
        run.step().await;
        if run.stored >= 2_000 && run.pipelines.len() < 2 {
            client.request("events.order.theirs", "x".into()).await.unwrap();
            foreign += 1;
        }
    }
    // What has a message's place can be that message: only the stream can tell.
    assert!((1..=foreign).contains(&i64::try_from(run.unknown).unwrap()), "{}", run.unknown);
    assert!(run.turned_away > 0 && foreign > 1, "theirs were felt");
    assert_eq!(run.pipelines, [Pipeline::Sequence, Pipeline::PerRun]);
    let context = async_nats::jetstream::new(client);
    let stream = context.get_stream("EVENTS").await.unwrap();
    for seq in 1..=u64::try_from(events + foreign).unwrap() {
        if stream.get_raw_message(seq).await.unwrap().headers.get("Outbox-Seq").is_none() {
            stream.delete_message(seq).await.unwrap();
        }
    }
    assert_eq!(stored(nats.connect().await.unwrap()).await, (1..=events).collect::<Vec<_>>());
    run.wire.close().await;
}
