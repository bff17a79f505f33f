//! Consumers are off for an hour's worth of work, and the relay while it is written: the source goes on as if
//! nothing were, every stage tells how far behind it is, and all of them end up with the same.

use outboxd::sandbox::{Workload, World};
use serde_json::Value;

use crate::support::consumer::{Work, prepare, verdict_of_effects, work};
use crate::support::look::{confirmed, metric, until, wal_end};
use crate::support::{SETTLE, log_tail, options, oracle, workload};

/// An event a second.
const HOUR: u64 = 3_600;

async fn write(world: &World) {
    let mut load = world.load(Workload { events: HOUR, ..workload() });
    load.finish().await.unwrap();
}

async fn lag(client: &tokio_postgres::Client) -> i64 {
    let sql = "SELECT coalesce(sum(unpublished), 0)::bigint FROM outbox.lag()";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// What `trace` says of the sample consumer, by the newest event.
async fn consumer(world: &World, event: &str) -> Value {
    let told = world.relay.run(&["trace", event, "--json"]).await.unwrap();
    let told: Value = serde_json::from_str(&told).unwrap();
    told.pointer("/destinations/0/consumers/0").unwrap().clone()
}

#[tokio::test]
async fn consumers_are_off_for_an_hours_worth() {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    prepare(&world).await;
    world.relay.terminate(SETTLE).await.unwrap();
    write(&world).await;
    let first = world.committed().await.unwrap().len();
    assert_eq!(lag(&client).await, i64::try_from(first).unwrap(), "the relay's stage is behind");

    world.start_relay().await.unwrap();
    world.settle(SETTLE).await.unwrap();
    until("the relay's stage has caught up", SETTLE, || async {
        let told = metric(&world, "outboxd_unpublished_events", "").await;
        let left = lag(&client).await;
        (left == 0 && told == Some(0.0)).then_some(()).ok_or_else(|| format!("{left} {told:?}"))
    })
    .await;
    let (ready, body) = world.relay.get("/readyz").await.unwrap();
    assert_eq!(ready, 200, "{body}");
    let end = wal_end(&client).await;
    until("no consumer holds the source's WAL", SETTLE, || async {
        let confirmed = confirmed(&client).await;
        (confirmed >= end).then_some(()).ok_or_else(|| format!("{confirmed} of {end}"))
    })
    .await;
    let events = world.committed().await.unwrap();
    let newest = events.last().unwrap().id.to_string();
    let told = consumer(&world, &newest).await;
    assert_eq!((&told["standing"], &told["pending"]), (&"pending".into(), &events.len().into()));

    let caught_up = work(&world, |_| None).await;
    assert_eq!(caught_up, Work { done: events.len() as u64, known: 0, crashed: false });
    assert_eq!(consumer(&world, &newest).await["standing"], "acked");
    let verdict = verdict_of_effects(&client, &events).await;
    oracle("consumers off for an hour's worth", &verdict, "effects at the consumer");
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
}
