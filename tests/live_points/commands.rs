//! Commands that change the database, killed in the middle: what they began is undone or done, and the
//! same command goes on.

use std::collections::HashSet;
use std::process::Stdio;
use std::time::Duration;

use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{STREAM, World, WorldOptions, stream};
use tokio::process::{Child, Command};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::look::{noise, publish, until};
use crate::support::{SETTLE, log_tail, options, oracle};
use crate::{FORGETFUL, end_sessions, judge, stored, write};

/// Starts a command of the program, to be killed.
fn begin(world: &World, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outboxd"));
    command.arg("-c").arg(world.relay.configuration()).args(arguments).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.kill_on_drop(true).spawn().unwrap()
}

/// Waits until a session is in the trap, kills the command, and takes the trap away.
async fn kill_in_the_trap(client: &Client, mut command: Child, table: &str) {
    until("the command is in the trap", SETTLE, || async {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
        let trapped: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (trapped == 1).then_some(()).ok_or_else(|| trapped.to_string())
    })
    .await;
    command.kill().await.unwrap();
    end_sessions(client).await;
    client.batch_execute(&format!("DROP TRIGGER trap ON {table}")).await.unwrap();
}

async fn recorded(world: &World, events: usize) {
    until("recorded", SETTLE, || async {
        let recorded = world.recorded("events").await.unwrap().len();
        (recorded >= events).then_some(()).ok_or_else(|| recorded.to_string())
    })
    .await;
}

/// Half of a batch of rows is deleted when prune is killed, and the relay with it; rows that nobody has
/// published stand behind them.
#[tokio::test]
async fn during_prune() {
    let more = "[retention]\nkeep = \"1m\"\nevery = \"1h\"\n".to_owned();
    let create = FORGETFUL.to_owned();
    let mut world = World::start(WorldOptions { more, create, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    old(&client, 1, 50).await;
    world.settle(SETTLE).await.unwrap();
    recorded(&world, 50).await;
    client
        .batch_execute(
            "UPDATE outbox.receipt SET recorded_at = now() - interval '1 hour'; \
             CREATE FUNCTION public.trap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF (OLD.payload->>'n')::int = 25 THEN PERFORM pg_sleep(3600); END IF; \
               RETURN OLD; END $$; \
             CREATE TRIGGER trap BEFORE DELETE ON outbox.event \
               FOR EACH ROW EXECUTE FUNCTION public.trap()",
        )
        .await
        .unwrap();
    world.nats().unwrap().kill9().unwrap();
    old(&client, 51, 20).await;
    let committed = world.committed().await.unwrap();
    let prune = begin(&world, &["prune"]);
    world.relay.kill9().unwrap();
    kill_in_the_trap(&client, prune, "outbox.event").await;
    assert_eq!(world.committed().await.unwrap().len(), 70, "undone");
    world.relay.run(&["prune"]).await.unwrap();
    assert_eq!(world.committed().await.unwrap(), committed[50..], "what is not published stays");
    world.nats().unwrap().restart().await.unwrap();
    world.start_relay().await.unwrap();
    stored(&world, 70).await;
    world.settle(SETTLE).await.unwrap();
    let verdict = Verdict::of(&committed, &HashSet::new(), &world.messages().await.unwrap(), &[]);
    oracle("during prune", &verdict, "50 rows went, 20 stayed");
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
}

/// Rows of a day that no partition has, so that they go one by one.
async fn old(client: &Client, first: i64, count: i64) {
    for n in first..first + count {
        let id = Uuid::new_v4();
        let body = format!(r#"{{"id":"{id}","run":"a","n":{n}}}"#);
        let sql = "INSERT INTO outbox.event (run_id, kind, payload, id, created_at) \
                   VALUES ('a', 'k', $1::text::json, $2, now() - interval '40 days')";
        client.execute(sql, &[&body, &id]).await.unwrap();
    }
}

/// The outbox is older than its ledger. `recover` is killed when it has told the consumers, and before
/// the ledger knows: the relay still refuses, and the same command finds the same orphans.
#[tokio::test]
async fn during_recover() {
    let create = FORGETFUL.to_owned();
    let mut world = World::start(WorldOptions { create, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    recorded(&world, 20).await;
    world.relay.terminate(SETTLE).await.unwrap();
    client
        .batch_execute(
            "DELETE FROM outbox.event WHERE seq > 10; SELECT setval('outbox.event_seq', 10); \
             CREATE FUNCTION public.trap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               PERFORM pg_sleep(3600); RETURN NEW; END $$; \
             CREATE TRIGGER trap BEFORE UPDATE OF generation ON outbox.relay \
               FOR EACH ROW EXECUTE FUNCTION public.trap()",
        )
        .await
        .unwrap();
    for n in 1..=5 {
        publish(&client, "c", "k", n).await;
    }
    let recover = begin(&world, &["recover", "--yes"]);
    kill_in_the_trap(&client, recover, "outbox.relay").await;
    let told = count(&world).await;
    assert_eq!(told, 21, "the boundary is in the stream");

    world.relay.start().unwrap();
    until("the relay refuses", SETTLE, || async {
        let (status, body) = world.relay.get("/readyz").await.map_err(|one| one.to_string())?;
        let refuses = status == 503 && body.contains("ledger-ahead");
        refuses.then_some(()).ok_or_else(|| format!("{status} {body}\n{}", log_tail(&world)))
    })
    .await;
    world.relay.terminate(SETTLE).await.unwrap();
    assert_eq!(count(&world).await, told, "nothing is published meanwhile");

    world.relay.run(&["recover", "--yes"]).await.unwrap();
    world.start_relay().await.unwrap();
    stored(&world, 27).await;
    world.settle(SETTLE).await.unwrap();
    let verdict = world.judge(&[]).await.unwrap();
    let note = "10 orphans and two boundaries are phantoms here";
    oracle("during recover", &verdict, note);
    let faults = [&verdict.missing, &verdict.copies, &verdict.order_violations];
    assert!(faults.iter().all(|one| one.count == 0), "{verdict}\n{}", log_tail(&world));
    assert_eq!((verdict.events, verdict.phantoms.count), (15, 12), "{verdict}");
}

async fn count(world: &World) -> u64 {
    stream::state(&world.broker.connect().await.unwrap(), STREAM).await.unwrap().messages
}

/// The relay is away and its slot fills the disk: it is given up, and what no slot brings comes from the
/// table.
#[tokio::test]
async fn the_slot_is_given_up_for_the_disk() {
    let create = FORGETFUL.to_owned();
    let relay = "sweep_interval = \"1s\"".to_owned();
    let mut world = World::start(WorldOptions { create, relay, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, 1, 10).await;
    stored(&world, 20).await;
    world.relay.kill9().unwrap();
    end_sessions(&client).await;
    write(&client, 11, 10).await;
    noise(&client, 32, Duration::ZERO).await;
    world.relay.run(&["deinit", "--slot-only", "--yes"]).await.unwrap();
    let slots = "SELECT count(*) FROM pg_replication_slots";
    assert_eq!(client.query_one(slots, &[]).await.unwrap().get::<_, i64>(0), 0);
    write(&client, 21, 10).await;
    world.relay.start().unwrap();
    stored(&world, 60).await;
    write(&client, 31, 10).await;
    world.relay.wait_ready(SETTLE).await.unwrap();
    let verdict = judge(&world, "the slot is given up while the relay is away", "").await;
    assert_eq!(verdict.events, 80);
}
