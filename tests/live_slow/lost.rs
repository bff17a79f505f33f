//! A slot that the server invalidates, since it may hold back only so much WAL: what it would have
//! brought arrives from the table, the relay says what is wrong, and does not run in circles.

use std::time::Duration;

use outboxd::sandbox::{PostgresOptions, Signal, World, WorldOptions};
use tokio_postgres::Client;

use crate::support::look::{self, until};
use crate::support::{SETTLE, log_tail};
use crate::{arrived, judge, not_ready, swept_often, wait_for, write};

/// How long the relay is watched while nothing can be done.
const WATCHED: Duration = Duration::from_secs(4);

fn scarce() -> WorldOptions {
    let postgres = PostgresOptions::default()
        .set("max_slot_wal_keep_size", "1MB")
        .set("min_wal_size", "32MB")
        .set("max_wal_size", "32MB")
        .set("log_connections", "on");
    WorldOptions { postgres, ..swept_often() }
}

/// Writes WAL until the server has no patience left.
async fn lose_slot(client: &Client) {
    until("slot invalidated", SETTLE, || async {
        look::noise(client, 20, Duration::ZERO).await;
        client.batch_execute("SELECT pg_switch_wal()").await.unwrap();
        client.batch_execute("CHECKPOINT").await.unwrap();
        let sql = "SELECT wal_status FROM pg_replication_slots";
        let status: Option<String> = client.query_one(sql, &[]).await.unwrap().get(0);
        (status.as_deref() == Some("lost")).then_some(()).ok_or(format!("{status:?}"))
    })
    .await;
}

/// Slot, cause and next step stand in the health; log lines and sessions are few.
async fn told_and_calm(world: &World) {
    not_ready(world, &["slot-lost", "outboxd_world"]).await;
    let (status, body) = world.relay.get("/healthz").await.unwrap();
    assert_eq!(status, 503, "{body}");
    for word in ["slot-lost", "outboxd_world", "max_slot_wal_keep_size", "outboxd init"] {
        assert!(body.contains(word), "{word}: {body}");
    }
    let sessions = || {
        let log = world.postgres.log();
        let ours = |line: &&str| line.ends_with("application_name=outboxd");
        log.lines().filter(ours).map(str::to_owned).collect::<Vec<_>>()
    };
    let (lines, before) = (world.relay.log().lines().count(), sessions().len());
    tokio::time::sleep(WATCHED).await;
    let (more, again) = (world.relay.log().lines().count() - lines, sessions().len() - before);
    assert!((1..12).contains(&before) && again <= 1, "{:#?}", sessions());
    assert!(lines < 60 && more <= 3, "{lines} lines, then {more}\n{}", log_tail(world));
}

#[tokio::test]
async fn a_slot_that_was_invalidated_while_the_relay_was_away() {
    let mut world = World::start(scarce()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let other = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(SETTLE).await.unwrap();
    write(&client, &["a", "b"], 11, 50).await;
    lose_slot(&client).await;
    // As long as it is open no slot can be made.
    other.batch_execute("BEGIN; SELECT txid_current();").await.unwrap();
    world.relay.start().unwrap();
    arrived(&world, 120).await;
    told_and_calm(&world).await;
    other.batch_execute("COMMIT").await.unwrap();
    write(&client, &["a", "b"], 61, 10).await;
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    judge(&world, 140).await;
}

#[tokio::test]
async fn a_slot_that_was_invalidated_under_way() {
    let mut world = World::start(scarce()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let other = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    world.nats().unwrap().kill9().unwrap();
    write(&client, &["a", "b"], 11, 50).await;
    // A relay that is awake hands over before it comes to that.
    world.relay.signal(Signal::Stop).unwrap();
    lose_slot(&client).await;
    other.batch_execute("BEGIN; SELECT txid_current();").await.unwrap();
    world.relay.signal(Signal::Continue).unwrap();
    told_and_calm(&world).await;
    world.nats().unwrap().restart().await.unwrap();
    arrived(&world, 120).await;
    write(&client, &["a", "b"], 61, 10).await;
    other.batch_execute("COMMIT").await.unwrap();
    write(&client, &["a", "b"], 71, 10).await;
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    judge(&world, 160).await;
}
