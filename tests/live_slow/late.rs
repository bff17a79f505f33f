//! A row whose number is drawn long before it commits, while thousands of later ones pass and the
//! table is looked through again and again: it arrives once, whoever brings it.

use std::time::{Duration, Instant};

use outboxd::sandbox::World;
use tokio_postgres::Client;

use crate::support::look::{metric, publish, until};
use crate::support::{SETTLE, drill, log_tail};
use crate::{drop_slot, judge, swept_often, wait_for, write_many};

/// The trigger sleeps as long as a session of the test holds this lock.
const LOCK: &str = "8086";

/// Of a statement; a look through the table must have passed the number by then.
fn asleep_for() -> Duration {
    Duration::from_secs(if drill() { 90 } else { 6 })
}

#[derive(Clone, Copy, PartialEq)]
enum Bringer {
    /// The WAL.
    Stream,
    /// The table: the publication does not have it when the row commits.
    Sweep,
    /// The table: the slot was made after the number was drawn.
    NewSlot,
}

async fn make_sleepy(client: &Client) {
    let sql = format!(
        "CREATE FUNCTION public.sleep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           IF NEW.run_id = 'late' THEN PERFORM pg_advisory_xact_lock_shared({LOCK}); END IF; \
           RETURN NEW; END $$; \
         CREATE TRIGGER sleep BEFORE INSERT ON outbox.event \
           FOR EACH ROW EXECUTE FUNCTION public.sleep(); \
         SELECT pg_advisory_lock({LOCK});"
    );
    client.batch_execute(&sql).await.unwrap();
}

async fn a_late_row(bringer: Bringer) {
    let world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    make_sleepy(&client).await;
    write_many(&client, 1, 1_000).await;
    world.settle(SETTLE).await.unwrap();
    let start = Instant::now();
    let sleeper = world.postgres.connect().await.unwrap();
    // A slot is made only when every transaction has ended that has an id by now.
    sleeper.batch_execute("BEGIN; SELECT txid_current();").await.unwrap();
    let sleeper = tokio::spawn(async move {
        publish(&sleeper, "late", "k", 1).await;
        sleeper.batch_execute("COMMIT").await.unwrap();
    });
    until("the INSERT sleeps", SETTLE, || async {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
        let count: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (count == 1).then_some(()).ok_or_else(|| "no".to_owned())
    })
    .await;
    let sql = "SELECT last_value FROM outbox.event_seq";
    let number: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    if bringer == Bringer::NewSlot {
        drop_slot(&client).await;
    }
    let mut last = 1_000;
    let mut passed = false;
    while !passed || start.elapsed() < asleep_for() {
        write_many(&client, last + 1, last + 1_000).await;
        last += 1_000;
        tokio::time::sleep(Duration::from_millis(500)).await;
        // Recorded every ten seconds.
        let sql = "SELECT frontier > $1 AND holes @> $1 FROM outbox.destination";
        passed |= client.query_one(sql, &[&number]).await.unwrap().get::<_, bool>(0);
        assert!(start.elapsed() < SETTLE, "no look has passed the number\n{}", log_tail(&world));
    }
    compact(&world, &client).await;
    write_many(&client, last + 1, last + 100).await;
    last += 100;
    let publication = |what: &str| format!("ALTER PUBLICATION outboxd_world {what}");
    if bringer == Bringer::Sweep {
        client.batch_execute(&publication("DROP TABLE outbox.event")).await.unwrap();
    }
    client.batch_execute(&format!("SELECT pg_advisory_unlock({LOCK})")).await.unwrap();
    sleeper.await.unwrap();
    if bringer == Bringer::Sweep {
        client.batch_execute(&publication("ADD TABLE outbox.event")).await.unwrap();
    }
    write_many(&client, last + 1, last + 10).await;
    judge(&world, usize::try_from(last).unwrap() + 11).await;
    let missed = metric(&world, "outboxd_swept_total", "missed").await.unwrap();
    match bringer {
        Bringer::Stream => assert_eq!(missed, 0.0, "{}", log_tail(&world)),
        Bringer::Sweep => assert_eq!(missed, 1.0, "{}", log_tail(&world)),
        Bringer::NewSlot => wait_for(&world, "outboxd_slot_active", "", 1.0).await,
    }
}

/// Merges receipts as if they were old, the number's neighbours into one.
async fn compact(world: &World, client: &Client) {
    let age = "UPDATE outbox.receipt SET recorded_at = recorded_at - interval '1 hour'";
    client.batch_execute(age).await.unwrap();
    let count = async || {
        let sql = "SELECT count(*) FROM outbox.receipt";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let before = count().await;
    let said = world.relay.run(&["prune"]).await.unwrap();
    let after = count().await;
    assert!(after < before, "{before} receipts, then {after}\n{said}");
}

#[tokio::test]
async fn an_insert_that_sleeps_and_the_stream() {
    a_late_row(Bringer::Stream).await;
}

#[tokio::test]
async fn an_insert_that_sleeps_and_no_stream_that_brings_it() {
    a_late_row(Bringer::Sweep).await;
}

#[tokio::test]
async fn an_insert_that_sleeps_and_a_slot_that_is_made_meanwhile() {
    a_late_row(Bringer::NewSlot).await;
}
