//! The places between commit and consumer where a crash matters, each forced and not left to chance;
//! those that other tests do not force already. What the oracle says of each goes into the table of
//! `make drill`.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

mod commands;
mod off;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{Signal, World, WorldOptions, signal};
use support::look::{self, metric, publish, until};
use support::{SETTLE, log_tail, options, oracle};
use tokio_postgres::Client;

/// The server forgets ids at once: what is sent twice is there twice.
const FORGETFUL: &str = "duplicate_window = \"100ms\"";

async fn start() -> (World, Client) {
    let world = World::start(WorldOptions { create: FORGETFUL.into(), ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    (world, client)
}

/// Events of two runs, numbered from `first` on, each in a transaction of its own.
async fn write(client: &Client, first: i64, count: i64) {
    for n in first..first + count {
        publish(client, "a", "k", n).await;
        publish(client, "b", "k", n).await;
    }
}

/// Everything that committed is there once and in order, and nothing else.
async fn judge(world: &World, point: &str, note: &str) -> Verdict {
    if let Err(error) = world.settle(SETTLE).await {
        panic!("{error}");
    }
    let verdict = world.judge(&[]).await.unwrap();
    oracle(point, &verdict, note);
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(world));
    verdict
}

/// So many messages are in the stream.
async fn stored(world: &World, messages: usize) {
    until("stored", SETTLE, || async {
        let seen = world.messages().await.unwrap().len();
        (seen >= messages).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(world)))
    })
    .await;
}

/// Ends what a killed process left in the database, whatever it was about to do.
async fn end_sessions(client: &Client) {
    let sql = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity \
                WHERE application_name LIKE 'outboxd%'";
    until("its sessions end", SETTLE, || async {
        let left: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (left == 0).then_some(()).ok_or_else(|| left.to_string())
    })
    .await;
}

/// Of three transactions that are open while the relay dies one commits while it is away, one when it is
/// back, and one dies with its own session.
#[tokio::test]
async fn before_the_commit() {
    let (mut world, client) = start().await;
    write(&client, 1, 10).await;
    stored(&world, 20).await;
    let writers = [
        world.postgres.connect().await.unwrap(),
        world.postgres.connect().await.unwrap(),
        world.postgres.connect().await.unwrap(),
    ];
    for (writer, run) in writers.iter().zip(["early", "late", "never"]) {
        writer.batch_execute("BEGIN").await.unwrap();
        for n in 1..=10 {
            publish(writer, run, "k", n).await;
        }
    }
    write(&client, 11, 5).await;
    stored(&world, 30).await;
    world.relay.kill9().unwrap();
    let [early, late, never] = &writers;
    early.batch_execute("COMMIT").await.unwrap();
    let pid: i32 = never.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    client.query("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await.unwrap();
    world.start_relay().await.unwrap();
    write(&client, 16, 5).await;
    stored(&world, 50).await;
    late.batch_execute("COMMIT").await.unwrap();
    let note = "10 events of a transaction that never commits";
    let verdict = judge(&world, "before the commit", note).await;
    assert_eq!(verdict.events, 60);
}

/// The server has the commit, and the walsender, which is stopped, has sent nothing of it.
#[tokio::test]
async fn after_the_commit_before_the_relay_sees_it() {
    let (mut world, client) = start().await;
    write(&client, 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    let walsender = look::sessions(&client).await.pop().unwrap();
    assert_eq!(walsender.kind, "walsender");
    let pid = u32::try_from(walsender.pid).unwrap();
    signal(pid, Signal::Stop).unwrap();
    write(&client, 11, 10).await;
    // What it may have sent before is read by now.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let read = metric(&world, "outboxd_events_total", "stage=\"read\"").await;
    world.relay.kill9().unwrap();
    client.query("SELECT pg_terminate_backend($1)", &[&walsender.pid]).await.unwrap();
    signal(pid, Signal::Continue).unwrap();
    assert_eq!(read, Some(20.0), "the relay has seen nothing of it");
    end_sessions(&client).await;
    world.start_relay().await.unwrap();
    write(&client, 21, 5).await;
    let verdict = judge(&world, "after the commit, before the relay sees it", "").await;
    assert_eq!(verdict.events, 50);
}

/// A receipt waits in the database while a session of the test holds the lock.
const GATE: &str = "\
    CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
      IF NEW.outcome = 'published' AND NEW.events > 0 THEN \
        PERFORM pg_advisory_xact_lock_shared(1); END IF; RETURN NEW; END $$; \
    CREATE TRIGGER gate BEFORE INSERT ON outbox.receipt \
      FOR EACH ROW EXECUTE FUNCTION public.gate();";

/// The stream has the messages, and the receipt does not come, or comes after the relay's death.
async fn after_the_broker_stored_it(arrives: bool) {
    let (mut world, client) = start().await;
    write(&client, 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    client.batch_execute(GATE).await.unwrap();
    client.batch_execute("SELECT pg_advisory_lock(1)").await.unwrap();
    write(&client, 11, 20).await;
    stored(&world, 60).await;
    until("the receipt waits", SETTLE, || async {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
        let waits: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (waits > 0).then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    world.relay.kill9().unwrap();
    assert_eq!(world.recorded("events").await.unwrap().len(), 20);
    if !arrives {
        end_sessions(&client).await;
    }
    client.batch_execute("SELECT pg_advisory_unlock(1)").await.unwrap();
    world.start_relay().await.unwrap();
    write(&client, 31, 10).await;
    let note = if arrives { "the receipt commits after the death" } else { "the receipt is lost" };
    let verdict = judge(&world, "after the broker stored it, before the receipt", note).await;
    assert_eq!(verdict.events, 80);
}

#[tokio::test]
async fn after_the_broker_stored_it_and_the_receipt_is_lost() {
    after_the_broker_stored_it(false).await;
}

#[tokio::test]
async fn after_the_broker_stored_it_and_the_receipt_comes_late() {
    after_the_broker_stored_it(true).await;
}
