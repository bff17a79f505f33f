//! The relay is killed at each step of a hand-over, and at random moments of many: nothing is lost,
//! nothing comes twice, and every run keeps its order.

use std::time::Duration;

use outboxd::sandbox::{Dice, Signal, Workload, World, WorldOptions, signal};
use tokio_postgres::Client;

use crate::support::look::{self, metric, sessions, until};
use crate::support::{SETTLE, drill, finish_and_judge, log_tail, options, oracle, paced_over};
use crate::{blocked, blocked_now, judge, wait_for, write, write_many};

const RUNS: [&str; 3] = ["a", "b", "c"];

/// A receipt waits in the database while a session of the test holds the lock of its kind.
const GATE: &str = "\
    CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
      IF NEW.outcome = 'handed' THEN PERFORM pg_advisory_xact_lock_shared(1); END IF; \
      IF NEW.outcome = 'published' AND NEW.events > 0 THEN \
        PERFORM pg_advisory_xact_lock_shared(2); END IF; \
      RETURN NEW; END $$; \
    CREATE TRIGGER gate BEFORE INSERT ON outbox.receipt \
      FOR EACH ROW EXECUTE FUNCTION public.gate();";

/// The server forgets ids at once: what is sent twice is there twice.
const FORGETFUL: &str = "duplicate_window = \"100ms\"";

const HANDED: u32 = 1;
const PUBLISHED: u32 = 2;

async fn close(client: &Client, gate: u32) {
    client.batch_execute(&format!("SELECT pg_advisory_lock({gate})")).await.unwrap();
}

async fn open(client: &Client, gate: u32) {
    client.batch_execute(&format!("SELECT pg_advisory_unlock({gate})")).await.unwrap();
}

/// An installation whose NATS is away, with ten events of each run published before.
async fn without_nats() -> (World, Client) {
    let (relay, create) = ("max_retained_wal = \"16MiB\"".into(), FORGETFUL.into());
    let mut world = World::start(WorldOptions { relay, create, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    client.batch_execute(GATE).await.unwrap();
    write(&client, &RUNS, 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    world.nats().unwrap().kill9().unwrap();
    (world, client)
}

/// More WAL than events may hold back.
async fn press(client: &Client) {
    look::noise(client, 24, Duration::from_millis(500)).await;
}

async fn handed_receipts(client: &Client) -> i64 {
    let sql = "SELECT coalesce(sum(events), 0) FROM outbox.receipt WHERE outcome = 'handed'";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Receipts that are done are deleted: only their numbers go up.
async fn newest_handed(client: &Client) -> i64 {
    let sql = "SELECT coalesce(max(id), 0) FROM outbox.receipt WHERE outcome = 'handed'";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

async fn handed_over(client: &Client, world: &World, events: i64) {
    until("handed over", SETTLE, || async {
        let handed = handed_receipts(client).await;
        (handed >= events).then_some(()).ok_or_else(|| format!("{handed}\n{}", log_tail(world)))
    })
    .await;
}

/// Ends what a killed relay left in the database, whatever it was about to do.
async fn end_sessions(client: &Client) {
    until("its sessions end", SETTLE, || async {
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                    WHERE application_name = 'outboxd'";
        let left: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (left == 0).then_some(()).ok_or(format!("{left}"))
    })
    .await;
}

/// The relay comes back, then NATS, and there are new events before, between and behind.
async fn come_back(world: &mut World, client: &Client, point: &str) {
    write(client, &RUNS, 111, 10).await;
    world.relay.start().unwrap();
    write(client, &RUNS, 121, 10).await;
    world.nats().unwrap().restart().await.unwrap();
    write(client, &RUNS, 131, 10).await;
    judge(world, 3 * 140).await;
    oracle(point, &world.judge(&[]).await.unwrap(), "events are handed over");
}

/// The receipt is on its way when the relay dies, and comes too late, or after the death.
async fn killed_at_the_handed_receipt(arrives: bool) {
    let (mut world, client) = without_nats().await;
    write(&client, &RUNS, 11, 100).await;
    close(&client, HANDED).await;
    press(&client).await;
    blocked(&client, &world).await;
    world.relay.kill9().unwrap();
    if !arrives {
        end_sessions(&client).await;
    }
    open(&client, HANDED).await;
    if arrives {
        handed_over(&client, &world, 1).await;
    } else {
        assert_eq!(handed_receipts(&client).await, 0);
    }
    let which = if arrives { "which commits afterwards" } else { "which is lost" };
    come_back(&mut world, &client, &format!("at the handed receipt, {which}")).await;
}

#[tokio::test]
async fn killed_before_the_handed_receipt() {
    killed_at_the_handed_receipt(false).await;
}

#[tokio::test]
async fn killed_and_the_handed_receipt_commits_afterwards() {
    killed_at_the_handed_receipt(true).await;
}

/// The ledger has the events, and the slot brings them once more.
#[tokio::test]
async fn killed_between_the_handed_receipt_and_the_position() {
    let (mut world, client) = without_nats().await;
    write(&client, &RUNS, 11, 100).await;
    until("the relay has read them", SETTLE, || async {
        let read = metric(&world, "outboxd_events_total", "stage=\"read\"").await;
        (read >= Some(330.0)).then_some(()).ok_or_else(|| format!("{read:?}"))
    })
    .await;
    let written = look::wal_end(&client).await;
    let walsender = sessions(&client).await.pop().unwrap();
    assert_eq!(walsender.kind, "walsender");
    let pid = u32::try_from(walsender.pid).unwrap();
    signal(pid, Signal::Stop).unwrap();
    press(&client).await;
    handed_over(&client, &world, 300).await;
    world.relay.kill9().unwrap();
    // It ends before it reads what the relay may have confirmed.
    client.query("SELECT pg_terminate_backend($1)", &[&walsender.pid]).await.unwrap();
    signal(pid, Signal::Continue).unwrap();
    end_sessions(&client).await;
    let confirmed = look::confirmed(&client).await;
    assert!(confirmed < written, "{confirmed} of {written}");
    come_back(&mut world, &client, "between the handed receipt and the position").await;
}

/// Only ledger and table have the events.
#[tokio::test]
async fn killed_after_the_position_has_passed() {
    let (mut world, client) = without_nats().await;
    write(&client, &RUNS, 11, 100).await;
    let written = look::wal_end(&client).await;
    press(&client).await;
    until("the position passes", SETTLE, || async {
        let confirmed = look::confirmed(&client).await;
        (confirmed >= written).then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    world.relay.kill9().unwrap();
    come_back(&mut world, &client, "after the position has passed").await;
}

/// Waiting events are in the stream, and no receipt says so: it never comes, or comes late.
async fn killed_before_the_receipts_of_what_waited(arrives: bool) {
    let (mut world, client) = without_nats().await;
    write(&client, &RUNS, 11, 100).await;
    press(&client).await;
    handed_over(&client, &world, 300).await;
    close(&client, PUBLISHED).await;
    world.nats().unwrap().restart().await.unwrap();
    blocked(&client, &world).await;
    world.relay.kill9().unwrap();
    let stored = world.messages().await.unwrap().len();
    assert!(stored > 30, "{stored}");
    if !arrives {
        end_sessions(&client).await;
    }
    open(&client, PUBLISHED).await;
    world.nats().unwrap().kill9().unwrap();
    let which = if arrives { "which commit afterwards" } else { "which are lost" };
    come_back(&mut world, &client, &format!("at the receipts of what waited, {which}")).await;
}

#[tokio::test]
async fn killed_before_the_receipts_of_what_waited_and_was_sent() {
    killed_before_the_receipts_of_what_waited(false).await;
}

#[tokio::test]
async fn killed_and_the_receipts_of_what_waited_commit_afterwards() {
    killed_before_the_receipts_of_what_waited(true).await;
}

/// Rows of waiting events are read in several pieces; the relay is killed at each but the first,
/// the last included, with what came before already published.
#[tokio::test]
async fn killed_at_each_load() {
    const EVENTS: i64 = 3_000;
    let (mut world, client) = without_nats().await;
    let locker = world.postgres.connect().await.unwrap();
    write_many(&client, 1, EVENTS).await;
    press(&client).await;
    handed_over(&client, &world, EVENTS).await;
    let all = 3_030;
    let mut left = vec![3_000];
    loop {
        // The next statement that reads the table waits, and nothing behind it is asked.
        locker.batch_execute(LOCK_TABLE).await.unwrap();
        world.nats().unwrap().restart().await.unwrap();
        blocked(&client, &world).await;
        let mut stored = all - left.last().unwrap();
        // One after the other passes, until one has brought rows: the lock stands in line behind it.
        while stored == all - left.last().unwrap() {
            locker.batch_execute("COMMIT").await.unwrap();
            locker.batch_execute(LOCK_TABLE).await.unwrap();
            stored = between_loads(&client, &world, all).await;
        }
        if stored == all {
            break;
        }
        left.push(all - stored);
        world.relay.kill9().unwrap();
        end_sessions(&client).await;
        locker.batch_execute("COMMIT").await.unwrap();
        world.nats().unwrap().kill9().unwrap();
        world.relay.start().unwrap();
        wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    }
    locker.batch_execute("COMMIT").await.unwrap();
    println!("killed with so many left to load: {left:?}");
    assert!(left.len() > 2 && left.last().is_some_and(|left| *left <= 1_000), "{left:?}");
    write_many(&client, EVENTS + 1, EVENTS + 30).await;
    judge(&world, all + 30).await;
    oracle("at each load of what waited", &world.judge(&[]).await.unwrap(), "");
}

/// Waits until what was loaded is published, and the next load waits or there is none; messages in
/// the stream.
async fn between_loads(client: &Client, world: &World, all: usize) -> usize {
    until("all that was loaded is published", SETTLE, || async {
        let undecided = metric(world, "outboxd_undecided_events", "").await.unwrap_or(-1.0);
        let stored = world.messages().await.unwrap().len();
        let waits = stored == all || blocked_now(client).await;
        let words = || format!("{stored}, {undecided}\n{}", log_tail(world));
        (waits && undecided == 0.0).then_some(()).ok_or_else(words)
    })
    .await;
    world.messages().await.unwrap().len()
}

const LOCK_TABLE: &str = "BEGIN; LOCK TABLE outbox.event IN ACCESS EXCLUSIVE MODE";

/// NATS goes and comes, WAL is written beside the outbox, memory is small, and the relay is killed
/// at any moment of it, mostly while events are handed over or come back.
#[tokio::test]
async fn killed_at_random_moments() {
    let relay = "max_retained_wal = \"16MiB\"\nsweep_interval = \"1s\"\nmemory = \"4MiB\"".into();
    let create = FORGETFUL.into();
    let mut world = World::start(WorldOptions { relay, create, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let rounds = if drill() { 12 } else { 3 };
    let what = Workload { payload_bytes: 1_000, ..paced_over(10 * rounds) };
    let mut dice = Dice::new(what.seed);
    let load = world.load(what);
    let sampling = world.sample().await.unwrap();
    for round in 0..rounds {
        let before = newest_handed(&client).await;
        world.nats().unwrap().kill9().unwrap();
        press(&client).await;
        until("handed over", SETTLE, || async {
            let newest = newest_handed(&client).await;
            (newest > before).then_some(()).ok_or_else(|| log_tail(&world))
        })
        .await;
        for _ in 0..=dice.below(2) {
            tokio::time::sleep(Duration::from_millis(dice.below(1_500))).await;
            world.relay.kill9().unwrap();
            world.relay.start().unwrap();
        }
        world.nats().unwrap().restart().await.unwrap();
        for _ in 0..=dice.below(3) {
            tokio::time::sleep(Duration::from_millis(dice.below(1_500))).await;
            world.relay.kill9().unwrap();
            world.relay.start().unwrap();
        }
        println!("round {round}: {} handed events in the ledger", handed_receipts(&client).await);
    }
    let verdict = finish_and_judge(&world, load, sampling).await;
    oracle("the relay at any moment, while events are handed over", &verdict, "");
    look::no_slow_run(&world).await;
}
