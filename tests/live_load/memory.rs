//! P8 on real servers: a transaction far larger than the memory that the relay may use, before a
//! broker that stands still, then is slow, then sees the relay killed half way.

use std::time::{Duration, Instant};

use crate::support::look::{self, metric, sessions, until};
use crate::support::{SETTLE, drill, finish_and_judge, log_tail, options, workload};
use outboxd::sandbox::{
    Broker, Mode, Nats, Postgres, PostgresOptions, Proxy, STREAM, Workload, World, WorldOptions,
    stream,
};

/// What the relay may use beyond what it has when idle, in MiB: `memory` (4), twice, since an
/// allocator keeps about as much again between blocks in use; the WAL queue and the read beside it
/// (3); the client's buffers towards the broker, receipts, answers (5).
const GROWTH_MIB: u64 = 16;

/// Peak and current resident memory of a process in MiB.
fn resident_mib(pid: u32) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let of = |name: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    };
    (of("VmHWM:"), of("VmRSS:"))
}

/// The design's limit at full load, in MiB.
const LIMIT_MIB: u64 = 64;

/// One transaction of `rows` events in `runs` runs, bodies of `fill` bytes and a little more.
async fn giant(client: &tokio_postgres::Client, rows: i64, runs: i64, fill: i32) {
    let sql = "\
        INSERT INTO outbox.event (id, run_id, kind, payload) \
        SELECT id, run, 'giant', json_build_object('id', id, 'run', run, 'n', n, \
                                                   'fill', repeat('x', $3::int4)) \
          FROM (SELECT gen_random_uuid() AS id, 'giant-' || i % $2::int8 AS run, \
                       i / $2::int8 + 1 AS n \
                  FROM generate_series(0, $1::int8 - 1) AS i ORDER BY i) AS rows";
    assert_eq!(
        client.execute(sql, &[&rows, &runs, &fill]).await.unwrap(),
        u64::try_from(rows).unwrap()
    );
}

/// A relay that reaches its broker through a proxy.
async fn behind_a_proxy(relay: &str, destination: &str) -> (World, Proxy) {
    let nats = Nats::start().await.unwrap();
    let proxy = Proxy::start(nats.port()).await.unwrap();
    let server = PostgresOptions::default().set("wal_sender_timeout", "10s");
    let options = WorldOptions {
        postgres: server.clone(),
        relay: relay.to_owned(),
        destination: destination.to_owned(),
        servers: Some(vec![format!("nats://127.0.0.1:{}", proxy.port())]),
        ..options()
    };
    let postgres = Postgres::start_with(server).await.unwrap();
    let broker = Broker::Single(Box::new(nats));
    let mut world = World::assemble(options, postgres, broker).await.unwrap();
    world.start_relay().await.unwrap();
    (world, proxy)
}

#[tokio::test]
async fn a_giant_transaction_before_a_slow_broker_stays_within_the_bound() {
    let rows: i64 = if drill() { 200_000 } else { 30_000 };
    let (mut world, proxy) = behind_a_proxy("memory = \"4MiB\"", "").await;
    let client = world.postgres.connect().await.unwrap();
    let sampling = world.sample().await.unwrap();
    let (_, idle) = resident_mib(world.relay.pid());
    let before = sessions(&client).await;

    // The broker stands still, for longer than the server waits for a walsender's client.
    proxy.set(Mode::Stall);
    giant(&client, rows, 100, 900).await;
    let load = world.load(Workload { events: 500, rows: 3, ..workload() });
    let stalled = Instant::now();
    while stalled.elapsed() < Duration::from_secs(12) {
        let (_, now) = resident_mib(world.relay.pid());
        assert!(now <= idle + GROWTH_MIB, "{now} MiB, {idle} when idle");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(sessions(&client).await, before, "{}", log_tail(&world));
    let held = metric(&world, "outboxd_undecided_events", "").await.unwrap();
    assert!(held > 1_000.0 && held < rows as f64, "{held} undecided");
    let budget = metric(&world, "outboxd_undecided_bytes", "").await.unwrap();
    println!(
        "stalled: {held} events, {budget} bytes held, {:?} MiB",
        resident_mib(world.relay.pid())
    );

    // It is slow, and the relay is killed half way through the transaction.
    proxy.set(Mode::Delay(Duration::from_millis(20)));
    let broker = world.broker.connect().await.unwrap();
    until("half of the transaction", SETTLE, || async {
        let stored = stream::state(&broker, STREAM).await.unwrap().messages;
        (stored >= u64::try_from(rows / 2).unwrap()).then_some(()).ok_or(format!("{stored}"))
    })
    .await;
    let (peak, _) = resident_mib(world.relay.pid());
    world.relay.kill9().unwrap();
    let stored = stream::state(&broker, STREAM).await.unwrap().messages;
    assert!(stored < u64::try_from(rows).unwrap(), "the kill came after the transaction");
    world.start_relay().await.unwrap();

    let start = Instant::now();
    let verdict = finish_and_judge(&world, load, sampling).await;
    let (second_peak, _) = resident_mib(world.relay.pid());
    println!(
        "idle {idle} MiB, peak {peak} MiB, killed at {stored} of {rows}, peak after that \
         {second_peak} MiB, {:?} to the end, {} events",
        start.elapsed(),
        verdict.events
    );
    assert!(peak.max(second_peak) <= idle + GROWTH_MIB, "{peak}, {second_peak}; idle {idle} MiB");
    let log = world.postgres.log();
    assert!(!log.contains("replication timeout"), "{log}");
    let confirmed = look::confirmed(&client).await;
    println!("confirmed {confirmed}");
}

/// Small events, each in a run of its own, cost the most beside their bytes: with the defaults of
/// `memory` and `max_in_flight` that fits, too.
#[tokio::test]
async fn a_giant_transaction_of_small_events_with_the_defaults() {
    let rows: i64 = if drill() { 1_000_000 } else { 100_000 };
    let (world, proxy) = behind_a_proxy("", "").await;
    let client = world.postgres.connect().await.unwrap();
    proxy.set(Mode::Stall);
    giant(&client, rows, rows, 0).await;
    // Full, and everything that may be sent was handed over.
    until("a full memory", SETTLE, || async {
        let held = metric(&world, "outboxd_undecided_bytes", "").await.unwrap();
        (held >= f64::from(24 << 20)).then_some(()).ok_or_else(|| held.to_string())
    })
    .await;
    let held = metric(&world, "outboxd_undecided_events", "").await.unwrap();
    println!("stalled: {held} events, {:?} MiB", resident_mib(world.relay.pid()));
    proxy.set(Mode::Delay(Duration::from_millis(5)));
    world.settle(SETTLE).await.unwrap();
    let (peak, after) = resident_mib(world.relay.pid());
    println!("peak {peak} MiB, {after} MiB at the end");
    assert!(peak <= LIMIT_MIB, "{peak} MiB");
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}");
}
