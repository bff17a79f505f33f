//! A broker that is put back to an older copy of its store: what the stream had acknowledged and has
//! not any more arrives again, once and in order. And streams that were purged or made anew, of which
//! nothing is sent again by itself.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use outboxd::sandbox::{STREAM, World, WorldOptions, stream};

use crate::support::look::{self, until};
use crate::support::{SETTLE, log_tail};
use crate::{WATCHED, gap_closed, judge, swept_often, write};

/// A copy of the store as it is on disk, taken while the server is stopped.
struct Copy(tempfile::TempDir, PathBuf);

impl Copy {
    async fn of(world: &mut World) -> Copy {
        let nats = world.nats().unwrap();
        nats.stop().await.unwrap();
        let copy = Copy(tempfile::tempdir().unwrap(), nats.store_dir());
        copy_over(&copy.1, &copy.0.path().join("store"));
        nats.restart().await.unwrap();
        copy
    }

    /// The server must be stopped.
    fn put_back(&self) {
        std::fs::remove_dir_all(&self.1).unwrap();
        copy_over(&self.0.path().join("store"), &self.1);
    }
}

fn copy_over(from: &std::path::Path, to: &std::path::Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

/// A world with forty events in the copy, and twenty more in stream and ledger.
async fn before() -> (World, tokio_postgres::Client, Copy) {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 20).await;
    world.settle(SETTLE).await.unwrap();
    let copy = Copy::of(&mut world).await;
    write(&client, &["a", "b"], 21, 10).await;
    world.settle(SETTLE).await.unwrap();
    recorded(&world, 60).await;
    (world, client, copy)
}

async fn recorded(world: &World, events: usize) {
    until("receipts", SETTLE, || async {
        let recorded = world.recorded("events").await.unwrap().len();
        (recorded >= events).then_some(()).ok_or_else(|| format!("{recorded}"))
    })
    .await;
}

async fn withdrawn(world: &World, client: &tokio_postgres::Client) {
    let log = world.relay.log();
    assert_eq!(log.matches("is withdrawn").count(), 1, "{}", log_tail(world));
    gap_closed(world, client).await;
}

#[tokio::test]
async fn a_tail_that_is_lost_while_the_relay_runs() {
    let (mut world, client, copy) = before().await;
    world.nats().unwrap().stop().await.unwrap();
    copy.put_back();
    write(&client, &["a", "b"], 31, 10).await;
    world.nats().unwrap().restart().await.unwrap();
    write(&client, &["a", "b"], 41, 10).await;
    judge(&world, 100).await;
    withdrawn(&world, &client).await;
    // And what comes later is told from what came before.
    world.relay.kill9().unwrap();
    write(&client, &["a", "b"], 51, 5).await;
    world.start_relay().await.unwrap();
    judge(&world, 110).await;
    withdrawn(&world, &client).await;
}

#[tokio::test]
async fn a_tail_that_is_lost_while_the_relay_is_away() {
    let (mut world, client, copy) = before().await;
    world.relay.terminate(SETTLE).await.unwrap();
    world.nats().unwrap().stop().await.unwrap();
    copy.put_back();
    world.nats().unwrap().restart().await.unwrap();
    write(&client, &["a", "b"], 31, 10).await;
    world.start_relay().await.unwrap();
    judge(&world, 80).await;
    withdrawn(&world, &client).await;
}

/// While the broker was away events were handed over to ledger and table: they are younger than those that
/// it lost, and stay behind them.
#[tokio::test]
async fn a_tail_that_is_lost_while_events_wait() {
    let relay = "sweep_interval = \"1s\"\nmax_retained_wal = \"16MiB\"".to_owned();
    let mut world = World::start(WorldOptions { relay, ..swept_often() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 20).await;
    world.settle(SETTLE).await.unwrap();
    let copy = Copy::of(&mut world).await;
    write(&client, &["a", "b"], 21, 10).await;
    world.settle(SETTLE).await.unwrap();
    recorded(&world, 60).await;
    world.nats().unwrap().stop().await.unwrap();
    write(&client, &["a", "b"], 31, 10).await;
    until("events handed over", SETTLE, || async {
        look::noise(&client, 8, Duration::ZERO).await;
        let sql = "SELECT count(*) FROM outbox.receipt WHERE outcome = 'handed'";
        let handed: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (handed > 0).then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    copy.put_back();
    write(&client, &["a", "b"], 41, 5).await;
    world.nats().unwrap().restart().await.unwrap();
    judge(&world, 90).await;
    withdrawn(&world, &client).await;
}

/// A dead letter had been sent again, and its message was lost: it is sent once more.
#[tokio::test]
async fn a_letter_whose_message_was_lost() {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let limit = async |world: &World, bytes: i64| {
        let broker = world.broker.connect().await.unwrap();
        look::edit_stream(&broker, STREAM, |config| config["max_msg_size"] = bytes.into()).await;
    };
    write(&client, &["a"], 1, 5).await;
    world.settle(SETTLE).await.unwrap();
    limit(&world, 900).await;
    let id = uuid::Uuid::new_v4();
    let body = format!(r#"{{"id":"{id}","run":"big","n":1,"pad":"{}"}}"#, "x".repeat(1_000));
    let sql =
        "SELECT outbox.publish(run_id => 'big', kind => 'k', payload => $1::text::json, id => $2)";
    client.query_one(sql, &[&body, &id]).await.unwrap();
    world.settle(SETTLE).await.unwrap();
    assert!(world.buried().await.unwrap().contains(&id), "{}", log_tail(&world));
    limit(&world, -1).await;
    let copy = Copy::of(&mut world).await;
    write(&client, &["a"], 6, 5).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.run(&["dead-letters", "redrive", "--run", "big", "--why", "room"]).await.unwrap();
    let redriven = async || {
        until("redriven", SETTLE, || async {
            let letters = world.buried().await.unwrap().len();
            (letters == 0).then_some(()).ok_or_else(|| log_tail(&world))
        })
        .await;
    };
    redriven().await;
    recorded(&world, 10).await;
    world.nats().unwrap().stop().await.unwrap();
    copy.put_back();
    world.nats().unwrap().restart().await.unwrap();
    write(&client, &["a"], 11, 5).await;
    until("withdrawn", SETTLE, || async {
        let told = world.relay.log().contains("is withdrawn");
        told.then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    judge(&world, 16).await;
    assert_eq!(world.buried().await.unwrap().len(), 0, "{}", log_tail(&world));
    withdrawn(&world, &client).await;
}

/// By the time that the relay is back the stream is longer than it ever was: only its messages show
/// that it is not the same.
#[tokio::test]
async fn a_tail_that_somebody_else_wrote_over() {
    let (mut world, client, copy) = before().await;
    world.relay.kill9().unwrap();
    world.nats().unwrap().stop().await.unwrap();
    copy.put_back();
    world.nats().unwrap().restart().await.unwrap();
    let other = async_nats::jetstream::new(world.broker.connect().await.unwrap());
    for _ in 0..50 {
        other.publish("events.other", "theirs".into()).await.unwrap().await.unwrap();
    }
    write(&client, &["a", "b"], 31, 10).await;
    world.start_relay().await.unwrap();
    until("all events", SETTLE, || async {
        let seen = world.messages().await.unwrap().len();
        (seen >= 80 + 50).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let verdict = world.judge(&[]).await.unwrap();
    // Theirs are of no event of ours.
    assert_eq!(verdict.phantoms.count, 50, "{verdict}");
    let faults = [&verdict.missing, &verdict.copies, &verdict.order_violations];
    assert!(faults.iter().all(|one| one.count == 0), "{verdict}\n{}", log_tail(&world));
    withdrawn(&world, &client).await;
}

/// Some of the messages that receipts name were deleted: the next older ones show how far the stream
/// is the same, and what is in it is not sent again.
#[tokio::test]
async fn a_message_that_is_absent_proves_nothing() {
    let (mut world, client, copy) = before().await;
    world.relay.terminate(SETTLE).await.unwrap();
    world.nats().unwrap().stop().await.unwrap();
    copy.put_back();
    world.nats().unwrap().restart().await.unwrap();
    let jetstream = async_nats::jetstream::new(world.broker.connect().await.unwrap());
    let events = jetstream.get_stream(STREAM).await.unwrap();
    events.delete_message(40).await.unwrap();
    write(&client, &["a", "b"], 31, 10).await;
    world.start_relay().await.unwrap();
    // The deleted one may come again, others may not.
    until("all events", SETTLE, || async {
        let verdict = world.judge(&[]).await.unwrap();
        (verdict.missing.count <= 1).then_some(()).ok_or_else(|| format!("{verdict}"))
    })
    .await;
    gap_closed(&world, &client).await;
    let verdict = world.judge(&[]).await.unwrap();
    assert_eq!((verdict.copies.count, verdict.order_violations.count), (0, 0), "{verdict}");
    withdrawn(&world, &client).await;
}

/// What was in the stream is gone, by somebody's wish or not: it is not sent again by itself.
#[tokio::test]
async fn a_stream_that_was_purged_stays_empty() {
    let (mut world, client, _copy) = before().await;
    let jetstream = async_nats::jetstream::new(world.broker.connect().await.unwrap());
    jetstream.get_stream(STREAM).await.unwrap().purge().await.unwrap();
    world.relay.kill9().unwrap();
    world.start_relay().await.unwrap();
    tokio::time::sleep(WATCHED).await;
    assert_eq!(world.messages().await.unwrap().len(), 0);
    only_new(&world, &client).await;
}

/// The same for one of the same name that was made anew.
#[tokio::test]
async fn a_stream_that_was_made_anew_has_new_events_only() {
    let (mut world, client, _copy) = before().await;
    let broker = world.broker.connect().await.unwrap();
    let jetstream = async_nats::jetstream::new(broker);
    world.relay.terminate(SETTLE).await.unwrap();
    jetstream.delete_stream(STREAM).await.unwrap();
    world.relay.run(&["init", "--create-streams"]).await.unwrap();
    world.start_relay().await.unwrap();
    tokio::time::sleep(WATCHED).await;
    assert_eq!(world.messages().await.unwrap().len(), 0);
    only_new(&world, &client).await;
    let log = world.relay.log();
    assert!(log.contains("another stream of this name"), "{}", log_tail(&world));
}

async fn only_new(world: &World, client: &tokio_postgres::Client) {
    write(client, &["a"], 31, 10).await;
    until("new events", SETTLE, || async {
        let state = stream::state(&world.broker.connect().await.unwrap(), STREAM).await.unwrap();
        let enough = state.messages >= 10;
        enough.then_some(()).ok_or_else(|| format!("{}\n{}", state.messages, log_tail(world)))
    })
    .await;
    tokio::time::sleep(WATCHED).await;
    let verdict = world.judge(&[]).await.unwrap();
    assert_eq!((verdict.missing.count, verdict.copies.count), (60, 0), "{verdict}");
}
