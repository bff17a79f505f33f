//! The slow path on real servers: what the WAL does not bring arrives all the same, and what a
//! destination can't take leaves memory and WAL.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod command;
mod handed;
mod inflow;
mod kills;
mod late;
mod lost;
mod rights;
#[path = "../support/mod.rs"]
mod support;
mod without;

use std::time::Duration;

use outboxd::sandbox::{World, WorldOptions};
use support::look::{metric, no_slow_run, publish, until};
use support::{SETTLE, log_tail, options};
use tokio_postgres::Client;

/// Passes follow quickly.
fn swept_often() -> WorldOptions {
    WorldOptions { relay: "sweep_interval = \"1s\"".into(), ..options() }
}

/// So many events of each of these runs, numbered from `first` on, one after the other.
async fn write(client: &Client, runs: &[&str], first: i64, count: i64) {
    for n in first..first + count {
        for run in runs {
            publish(client, run, "k", n).await;
        }
    }
}

/// Events of fifty runs in one statement, whose numbers are from these two on.
async fn write_many(client: &Client, first: i64, last: i64) {
    let sql = "SELECT outbox.publish(run_id => 'run-' || n % 50, kind => 'k', id => id, \
                 payload => format('{\"id\":\"%s\",\"run\":\"run-%s\",\"n\":%s}', id, n % 50, n)::json) \
               FROM (SELECT n, gen_random_uuid() AS id FROM generate_series($1::int8, $2::int8) n) r";
    client.query(sql, &[&first, &last]).await.unwrap();
}

/// Waits until so many messages are in the stream.
async fn arrived(world: &World, least: usize) {
    until("events in the stream", SETTLE, || async {
        let seen = world.messages().await.unwrap().len();
        (seen >= least).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(world)))
    })
    .await;
}

/// Waits until the relay is not ready, and says all of this of it.
async fn not_ready(world: &World, words: &[&str]) {
    until("not ready", SETTLE, || async {
        let (status, body) = world.relay.get("/readyz").await.map_err(|one| one.to_string())?;
        let told = status == 503 && words.iter().all(|word| body.contains(word));
        told.then_some(()).ok_or_else(|| format!("{status} {body}\n{}", log_tail(world)))
    })
    .await;
}

/// Does a statement of the relay wait for somebody's lock?
async fn blocked_now(client: &Client) -> bool {
    let sql = "SELECT EXISTS (SELECT FROM pg_stat_activity \
                WHERE application_name = 'outboxd' AND wait_event_type = 'Lock')";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Waits until it does.
async fn blocked(client: &Client, world: &World) {
    until("the relay waits for a lock", SETTLE, || async {
        blocked_now(client).await.then_some(()).ok_or_else(|| log_tail(world))
    })
    .await;
}

/// Every event is there once, and in order.
async fn judge(world: &World, events: usize) {
    if let Err(error) = world.settle(SETTLE).await {
        panic!("{error}");
    }
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(world));
    assert_eq!(verdict.events, events, "{verdict}");
    // Resume at the next start finds nothing to do, and nothing is sent again.
    no_slow_run(world).await;
}

async fn wait_for(world: &World, name: &str, label: &str, least: f64) {
    until(name, SETTLE, || async {
        let value = metric(world, name, label).await.unwrap_or(0.0);
        (value >= least).then_some(()).ok_or_else(|| format!("{value}\n{}", log_tail(world)))
    })
    .await;
}

/// Rows that are committed while the table is not in the publication are in no stream; the sweeper
/// finds them.
#[tokio::test]
async fn rows_that_the_publication_left_out_arrive() {
    let world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["before"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    client.batch_execute("ALTER PUBLICATION outboxd_world DROP TABLE outbox.event").await.unwrap();
    write(&client, &["a", "b"], 1, 25).await;
    client.batch_execute("ALTER PUBLICATION outboxd_world ADD TABLE outbox.event").await.unwrap();
    write(&client, &["after"], 1, 10).await;
    judge(&world, 70).await;
    wait_for(&world, "outboxd_swept_total", "missed", 50.0).await;
    assert_eq!(metric(&world, "outboxd_swept_total", "missed").await, Some(50.0));
}

/// Ends the walsender and drops the slot, however quick the relay is to come back.
async fn drop_slot(client: &Client) {
    until("slot dropped", SETTLE, || async {
        let sql = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
                    WHERE active_pid IS NOT NULL";
        client.query(sql, &[]).await.unwrap();
        let sql = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots";
        client.query(sql, &[]).await.map(drop).map_err(|error| error.to_string())
    })
    .await;
}

/// A run that waits behind a dead letter has rows that no slot brings. No other run waits for it: what the
/// new slot brings of those arrives. When the letter is closed, the run's rows go in their order.
#[tokio::test]
async fn a_blocked_run_in_a_gap_keeps_no_other_waiting() {
    let destination = "on_dead_letter = \"block-run\"".into();
    let mut world = World::start(WorldOptions { destination, ..swept_often() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b", "blocked"], 1, 2).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(SETTLE).await.unwrap();
    drop_slot(&client).await;
    let poison = "SELECT outbox.publish('blocked', 'bad', '{}', headers => '{\"Status\": \"1\"}')";
    client.batch_execute(poison).await.unwrap();
    write(&client, &["a", "b", "blocked"], 3, 20).await;
    world.relay.start().unwrap();
    arrived(&world, 6 + 40).await;
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    write(&client, &["a", "b", "c", "blocked"], 23, 20).await;
    arrived(&world, 6 + 40 + 60).await;
    until("one slow run", SETTLE, || async {
        let slow = metric(&world, "outboxd_slow_runs", "").await;
        (slow == Some(1.0)).then_some(()).ok_or_else(|| format!("{slow:?}\n{}", log_tail(&world)))
    })
    .await;
    // So it does after a start, with the gap still open.
    world.relay.terminate(SETTLE).await.unwrap();
    write(&client, &["a", "b", "c", "blocked"], 43, 20).await;
    world.relay.start().unwrap();
    arrived(&world, 6 + 40 + 60 + 60).await;
    let discard = ["dead-letters", "discard", "--all", "--why", "a test"];
    world.relay.run(&discard).await.unwrap();
    client.batch_execute("DELETE FROM outbox.event WHERE kind = 'bad'").await.unwrap();
    judge(&world, 3 * 22 + 4 * 40).await;
}

/// The slot is gone and can't be made anew for a while, since a transaction is open: the table is
/// read meanwhile. Then the stream is back, and no run has lost its order.
#[tokio::test]
async fn a_slot_dropped_under_way() {
    let world = World::start(swept_often()).await.unwrap();
    let (client, other) =
        (world.postgres.connect().await.unwrap(), world.postgres.connect().await.unwrap());
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    other.batch_execute("BEGIN; SELECT txid_current();").await.unwrap();
    drop_slot(&client).await;
    write(&client, &["a", "b"], 11, 50).await;
    until("rows from the table", SETTLE, || async {
        let seen = world.messages().await.unwrap().len();
        (seen >= 120).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let (status, body) = world.relay.get("/readyz").await.unwrap();
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("slot-missing"), "{body}");
    other.batch_execute("COMMIT").await.unwrap();
    write(&client, &["a", "b"], 61, 50).await;
    judge(&world, 220).await;
    assert!(world.relay.log().contains("made a new slot"), "{}", log_tail(&world));
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    // Closed for good: the next start streams at once.
    until("gap closed", SETTLE, || async {
        let sql = "SELECT count(*) FROM outbox.destination WHERE gap_since IS NOT NULL";
        let open: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (open == 0).then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
}

/// The same while the relay is stopped, with rows before and after it starts again.
#[tokio::test]
async fn a_slot_dropped_while_the_relay_is_away() {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(SETTLE).await.unwrap();
    write(&client, &["a", "b"], 11, 25).await;
    drop_slot(&client).await;
    write(&client, &["a", "b"], 36, 25).await;
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 61, 10).await;
    judge(&world, 140).await;
}

/// No WAL is wanted: the table is enough, and the role's time limits do no harm.
#[tokio::test]
async fn the_table_alone_is_enough() {
    let relay = "stream = false".into();
    let mut world = World::prepare(WorldOptions { relay, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let limits = "ALTER ROLE postgres SET idle_in_transaction_session_timeout = '100ms'; \
                  ALTER ROLE postgres SET statement_timeout = '1s'";
    client.batch_execute(limits).await.unwrap();
    write(&client, &["a", "b"], 1, 50).await;
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 51, 50).await;
    until("all events", SETTLE, || async {
        let seen = world.messages().await.unwrap().len();
        (seen >= 200).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    world.relay.kill9().unwrap();
    write(&client, &["a", "b"], 101, 10).await;
    world.start_relay().await.unwrap();
    until("all events", Duration::from_secs(30), || async {
        let seen = world.messages().await.unwrap().len();
        (seen >= 220).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
}
