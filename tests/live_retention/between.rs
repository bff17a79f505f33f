//! Rows that go between ack and receipt, and a ledger that was compacted under a stopped relay: the
//! relay goes on, refuses nothing, and sends nothing twice.

use std::time::Duration;

use outboxd::sandbox::{Broker, Nats, Postgres, World, WorldOptions, stream};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::look::{self, metric, publish, until};
use crate::support::{SETTLE, log_tail, options};

/// The records of the destinations, where the relay has not written them.
pub async fn known(client: &Client) {
    let sql = "INSERT INTO outbox.destination (relay, name, required, frontier) \
               SELECT r.name, d.name, d.name = 'events', 0 FROM outbox.relay r, \
                      (SELECT DISTINCT destination AS name FROM outbox.receipt \
                       UNION SELECT 'events') AS d ON CONFLICT DO NOTHING";
    client.batch_execute(sql).await.unwrap();
}

/// Writes one event of a day that no partition has, so that it goes by itself. (An UPDATE of
/// `created_at` would move the row, which the WAL shows as one more INSERT.)
pub async fn publish_old(client: &Client, run: &str, n: i64) -> Uuid {
    let id = Uuid::new_v4();
    let body = format!(r#"{{"id":"{id}","run":"{run}","n":{n}}}"#);
    let sql = "INSERT INTO outbox.event (run_id, kind, payload, id, created_at) \
               VALUES ($1, 'k', $2::text::json, $3, now() - interval '40 days')";
    client.execute(sql, &[&run, &body, &id]).await.unwrap();
    id
}

/// Receipts of `extra` hang while the test holds the lock 42; those of rows that went do not.
const HANG: &str = "\
    CREATE FUNCTION public.hang() RETURNS trigger LANGUAGE plpgsql AS \
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NEW; END $$; \
    CREATE TRIGGER hang BEFORE INSERT ON outbox.receipt FOR EACH ROW \
        WHEN (NEW.outcome <> 'gone' AND NEW.destination = 'extra' AND NOT isempty(NEW.seqs)) \
        EXECUTE FUNCTION public.hang()";

/// A relay with a required and an optional destination.
async fn two_destinations() -> World {
    let postgres = Postgres::start().await.unwrap();
    let nats = Nats::start().await.unwrap();
    let more = format!(
        "[destination.extra]\nservers = [\"{}\"]\nstream = \"EXTRA\"\nsubject = \"extra.{{kind}}\"\n\
         required = false\n[retention]\nkeep = \"1m\"\nevery = \"1s\"\n",
        nats.url()
    );
    let options = WorldOptions { more, ..options() };
    let mut world =
        World::assemble(options, postgres, Broker::Single(Box::new(nats))).await.unwrap();
    world.start_relay().await.unwrap();
    world
}

/// How the row of number 2 goes away.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Erase,
    Prune,
    Delete,
}

async fn remove(world: &World, client: &Client, how: How) {
    match how {
        How::Erase => {
            world.relay.run(&["erase", "--run", "second", "--yes"]).await.unwrap();
        }
        How::Delete => {
            client.execute("DELETE FROM outbox.event WHERE run_id = 'second'", &[]).await.unwrap();
        }
        // The required destination has it for long; the relay itself does the rest, by its clock.
        How::Prune => {
            let sql = "INSERT INTO outbox.receipt (relay, destination, generation, outcome, seqs, \
                           events, last_lsn, stream, stream_created, stream_seq, stream_msg_id, \
                           floor_seq, recorded_at) \
                       SELECT 'world', 'events', 1, 'published', int8multirange(int8range(seq, seq, \
                           '[]')), 1, pg_current_wal_lsn(), stream, stream_created, stream_seq, \
                           stream_msg_id, floor_seq, now() - interval '1 hour' \
                       FROM outbox.event, (SELECT * FROM outbox.receipt WHERE destination = 'events' \
                           ORDER BY id DESC LIMIT 1) AS newest WHERE run_id = 'second'";
            client.execute(sql, &[]).await.unwrap();
        }
    }
    until("the row is gone", Duration::from_secs(30), || async {
        let sql = "SELECT count(*) FROM outbox.event WHERE run_id = 'second'";
        let left: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (left == 0).then_some(()).ok_or_else(|| log_tail(world))
    })
    .await;
}

/// Messages of both streams, by their ids.
async fn stored(world: &World) -> Vec<Vec<String>> {
    let nats = world.broker.connect().await.unwrap();
    let mut all = Vec::new();
    for name in ["EVENTS", "EXTRA"] {
        let seen = stream::read(&nats, name, 1).await.unwrap();
        all.push(seen.iter().map(|seen| seen.msg_id.clone()).collect());
    }
    all
}

async fn a_row_goes_between_ack_and_receipt(how: How, crash: bool) {
    let mut world = two_destinations().await;
    let client = world.postgres.connect().await.unwrap();
    let first = publish(&client, "first", "k", 1).await;
    world.settle(SETTLE).await.unwrap();
    known(&client).await;
    client.batch_execute(HANG).await.unwrap();
    client.execute("SELECT pg_advisory_lock(42)", &[]).await.unwrap();
    let second = publish_old(&client, "second", 2).await;
    let both = || {
        vec![
            vec![first.to_string(), second.to_string()],
            vec![first.to_string(), second.to_string()],
        ]
    };
    until("acked, and the receipt hangs", SETTLE, || async {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                   AND objid = 42";
        let hangs: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        let stored = stored(&world).await;
        (hangs > 0 && stored == both()).then_some(()).ok_or_else(|| format!("{hangs} {stored:?}"))
    })
    .await;

    remove(&world, &client, how).await;
    let gone = "SELECT count(*) FROM outbox.receipt WHERE outcome = 'gone'";
    let gone: i64 = client.query_one(gone, &[]).await.unwrap().get(0);
    // At both destinations, at the optional one, without a word.
    let expected = match how {
        How::Erase => 2,
        How::Prune => 1,
        How::Delete => 0,
    };
    assert_eq!(gone, expected, "{}", log_tail(&world));

    if crash {
        world.relay.kill9().unwrap();
        // The server notices a client's death when it writes; until then the receipt is pending.
        let end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity \
                   WHERE application_name LIKE 'outboxd%'";
        client.query(end, &[]).await.unwrap();
    }
    client.execute("SELECT pg_advisory_unlock(42)", &[]).await.unwrap();
    if crash {
        world.start_relay().await.unwrap();
    }
    // It goes on: a third event arrives, the position passes all, nothing is there twice.
    let third = publish(&client, "third", "k", 3).await;
    let end = look::wal_end(&client).await;
    until("the position", SETTLE, || async {
        let confirmed = look::confirmed(&client).await;
        (confirmed >= end)
            .then_some(())
            .ok_or_else(|| format!("confirmed {confirmed} of {end}\n{}", log_tail(&world)))
    })
    .await;
    let ids = vec![first.to_string(), second.to_string(), third.to_string()];
    assert_eq!(stored(&world).await, [ids.clone(), ids], "{}", log_tail(&world));
    let (ready, body) = world.relay.get("/readyz").await.unwrap();
    assert_eq!(ready, 200, "{body}");
    let duplicates = metric(&world, "outboxd_duplicates_total", "").await;
    assert_eq!(duplicates, Some(0.0), "none was sent again");
    let letters: i64 =
        client.query_one("SELECT count(*) FROM outbox.dead_letter", &[]).await.unwrap().get(0);
    assert_eq!(letters, 0);
}

#[tokio::test]
async fn erase_between_ack_and_receipt() {
    a_row_goes_between_ack_and_receipt(How::Erase, false).await;
}

#[tokio::test]
async fn erase_between_ack_and_receipt_and_a_crash() {
    a_row_goes_between_ack_and_receipt(How::Erase, true).await;
}

#[tokio::test]
async fn prune_between_ack_and_receipt() {
    a_row_goes_between_ack_and_receipt(How::Prune, false).await;
}

#[tokio::test]
async fn prune_between_ack_and_receipt_and_a_crash() {
    a_row_goes_between_ack_and_receipt(How::Prune, true).await;
}

#[tokio::test]
async fn an_applications_delete_between_ack_and_receipt() {
    a_row_goes_between_ack_and_receipt(How::Delete, false).await;
}

#[tokio::test]
async fn an_applications_delete_between_ack_and_receipt_and_a_crash() {
    a_row_goes_between_ack_and_receipt(How::Delete, true).await;
}

/// The WAL is read again from before all of it, and only merged receipts say that it is done.
#[tokio::test]
async fn a_compacted_ledger_lets_nothing_be_sent_again() {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let copy = "SELECT pg_copy_logical_replication_slot('outboxd_world', 'before')";
    client.query(copy, &[]).await.unwrap();
    let mut receipts = 0;
    for n in 1..=20 {
        publish(&client, &format!("r{}", n % 3), "k", n).await;
        until("a receipt", SETTLE, || async {
            let sql = "SELECT count(*) FROM outbox.receipt";
            let found: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
            (found > receipts).then_some(()).ok_or_else(|| found.to_string())
        })
        .await;
        let sql = "SELECT count(*) FROM outbox.receipt";
        receipts = client.query_one(sql, &[]).await.unwrap().get(0);
    }
    world.relay.terminate(Duration::from_secs(15)).await.unwrap();
    let before = world.messages().await.unwrap().len();
    assert_eq!(before, 20);

    let age = "UPDATE outbox.receipt SET recorded_at = \
                   date_bin('5 minutes', now(), 'epoch') - interval '20 minutes' \
                   + (recorded_at - (SELECT min(recorded_at) FROM outbox.receipt))";
    client.execute(age, &[]).await.unwrap();
    world.relay.run(&["prune"]).await.unwrap();
    let sql = "SELECT count(*) FROM outbox.receipt";
    let left: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    println!("{receipts} receipts became {left}");
    assert!(receipts >= 20 && left <= 4, "{receipts} became {left}");

    for sql in [
        "SELECT pg_drop_replication_slot('outboxd_world')",
        "SELECT pg_copy_logical_replication_slot('before', 'outboxd_world')",
        "SELECT pg_drop_replication_slot('before')",
    ] {
        client.query(sql, &[]).await.unwrap();
    }
    world.start_relay().await.unwrap();
    publish(&client, "r", "k", 21).await;
    world.settle(SETTLE).await.unwrap();
    let messages = world.messages().await.unwrap();
    assert_eq!(messages.len(), 21, "{}", log_tail(&world));
    until("all are read again, and one is sent", SETTLE, || async {
        let sent = metric(&world, "outboxd_events_total", "stage=\"sent\"").await;
        let read = metric(&world, "outboxd_events_total", "stage=\"read\"").await;
        let right = (read, sent) == (Some(21.0), Some(1.0));
        right.then_some(()).ok_or_else(|| format!("{read:?} {sent:?}"))
    })
    .await;
}
