//! P5 and P6: the primary is safe. An idle outbox never pins WAL, an undecided event holds the
//! position back, a fast shutdown is not held up, and lost sessions come back without a human.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod support;

use std::time::{Duration, Instant};

use outboxd::lsn::Lsn;
use outboxd::sandbox::{
    Broker, Nats, Postgres, PostgresOptions, STREAM, Stop, World, WorldOptions, stream,
};
use support::look::{self, Session, metric, publish, sessions, until};
use support::{SETTLE, drill, finish_and_judge, log_tail, options, paced};

/// How long nothing happens, and after what silence the server ends a walsender.
fn idle() -> (Duration, &'static str) {
    if drill() { (Duration::from_secs(60), "10s") } else { (Duration::from_secs(12), "2s") }
}

fn with_timeout(wal_sender_timeout: &str) -> WorldOptions {
    let postgres = PostgresOptions::default().set("wal_sender_timeout", wal_sender_timeout);
    WorldOptions { postgres, ..options() }
}

/// No reconnect, no log line, no receipt, no lag.
#[tokio::test]
async fn an_idle_relay_keeps_its_sessions_and_writes_nothing() {
    let (time, timeout) = idle();
    let world = World::start(with_timeout(timeout)).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    publish(&client, "r", "k", 1).await;
    world.settle(SETTLE).await.unwrap();
    let receipts = "SELECT count(*) FROM outbox.receipt";
    let count = || async { client.query_one(receipts, &[]).await.unwrap().get::<_, i64>(0) };
    // The receipt of the last event is written, and what it wrote is confirmed.
    let (before, written) = (sessions(&client).await, count().await);
    assert_eq!(before.len(), 2, "{before:?}");
    let log = world.relay.log();
    let start = Instant::now();
    while start.elapsed() < time {
        assert_eq!(sessions(&client).await, before, "{}", log_tail(&world));
        let (status, body) = world.relay.get("/readyz").await.unwrap();
        assert_eq!(status, 200, "{body}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(world.relay.log(), log, "an idle relay has nothing to say");
    assert_eq!(count().await, written, "an idle relay has nothing to record");
    let server_log = world.postgres.log();
    assert!(!server_log.contains("replication timeout"), "{server_log}");
}

/// Nothing for us in the WAL, from our database and from another one: the position follows.
#[tokio::test]
async fn the_position_follows_wal_of_other_tables_and_databases() {
    let world = World::start(with_timeout("10s")).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    client.batch_execute("CREATE DATABASE other").await.unwrap();
    let url = world.postgres.url_of("postgres", "other");
    let (other, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    drop(tokio::spawn(connection));
    let before = sessions(&client).await;
    let (megabytes, time, within) = match drill() {
        true => (200, Duration::from_secs(60), Duration::from_secs(60)),
        false => (15, Duration::from_secs(3), Duration::from_secs(8)),
    };
    let begin = look::wal_end(&client).await;
    for database in [&client, &other] {
        look::noise(database, megabytes, time).await;
        let end = look::wal_end(&client).await;
        let took = until("confirmed position", within, || async {
            let confirmed = look::confirmed(&client).await;
            (confirmed >= end).then_some(()).ok_or_else(|| format!("{confirmed} of {end}"))
        })
        .await;
        println!("{} bytes of WAL, confirmed after {took:?}", end.0 - begin.0);
    }
    // What the server keeps follows: it looks at a checkpoint.
    let end = look::wal_end(&client).await;
    until("restart_lsn", within, || async {
        client.batch_execute("CHECKPOINT").await.unwrap();
        let sql = "SELECT restart_lsn::text FROM pg_replication_slots";
        let restart = look::lsn(&client, sql).await;
        (restart >= end).then_some(()).ok_or_else(|| format!("{restart} of {end}"))
    })
    .await;
    assert_eq!(sessions(&client).await, before, "{}", log_tail(&world));
    let events = client.query_one("SELECT count(*) FROM outbox.event", &[]).await.unwrap();
    assert_eq!(events.get::<_, i64>(0), 0);
}

/// The same with one event that can't be decided: the position stays, and metrics tell.
#[tokio::test]
async fn one_undecided_event_holds_the_position_and_is_told() {
    let mut world = World::start(with_timeout("10s")).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    world.nats().unwrap().kill9().unwrap();
    publish(&client, "r", "k", 1).await;
    let (committed, written) = (look::wal_end(&client).await, Instant::now());
    let (megabytes, time) = match drill() {
        true => (200, Duration::from_secs(60)),
        false => (15, Duration::from_secs(3)),
    };
    let (noise, ()) = (world.postgres.connect().await.unwrap(), ());
    let mut highest = Lsn(0);
    {
        let writing = look::noise(&noise, megabytes, time);
        tokio::pin!(writing);
        loop {
            tokio::select! {
                () = &mut writing => break,
                () = tokio::time::sleep(Duration::from_millis(50)) => {
                    highest = highest.max(look::confirmed(&client).await);
                }
            }
        }
    }
    let end = look::wal_end(&client).await;
    // The server is asked every five seconds.
    until("outboxd_slot_retained_bytes", Duration::from_secs(15), || async {
        let retained = metric(&world, "outboxd_slot_retained_bytes", "").await.unwrap_or(0.0);
        let least = (megabytes * 1_000_000) as f64;
        (retained >= least).then_some(()).ok_or_else(|| format!("{retained}"))
    })
    .await;
    let age = metric(&world, "outboxd_oldest_unsettled_seconds", "").await.unwrap();
    assert!(age >= written.elapsed().as_secs_f64() - 5.0, "{age} s");
    let (_, body) = world.relay.get("/api/status").await.unwrap();
    println!("after {} bytes: {body}", end.0 - committed.0);
    highest = highest.max(look::confirmed(&client).await);
    // It is read again after a crash, so nothing had been confirmed past it.
    world.relay.kill9().unwrap();
    world.nats().unwrap().restart().await.unwrap();
    world.start_relay().await.unwrap();
    world.settle(SETTLE).await.unwrap();
    let messages = world.messages().await.unwrap();
    let [only] = &messages[..] else { panic!("{messages:?}") };
    let commit = only.commit_lsn.unwrap();
    assert!(highest <= commit, "confirmed {highest} with {commit} undecided");
}

/// A fast shutdown waits for walsenders: ours must not keep it.
async fn stops_fast(undecided: bool, limit: Duration) {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    for n in 1..=100 {
        publish(&client, "r", "k", n).await;
    }
    world.settle(SETTLE).await.unwrap();
    if undecided {
        world.nats().unwrap().kill9().unwrap();
        for n in 101..=200 {
            publish(&client, "r", "k", n).await;
        }
        until("undecided events", SETTLE, || async {
            let held = metric(&world, "outboxd_undecided_events", "").await;
            (held == Some(100.0)).then_some(()).ok_or_else(|| format!("{held:?}"))
        })
        .await;
    }
    drop(client);
    let pid = world.relay.pid();
    let took = world.postgres.stop(Stop::Fast).await.unwrap();
    println!("stopped in {took:?}");
    assert!(took < limit, "{took:?}\n{}\n{}", world.postgres.log(), log_tail(&world));
    until("not ready", Duration::from_secs(5), || async {
        let (status, _) = world.relay.get("/readyz").await.unwrap();
        (status != 200).then_some(()).ok_or_else(|| "ready without a database".to_owned())
    })
    .await;
    world.postgres.restart().await.unwrap();
    if undecided {
        world.nats().unwrap().restart().await.unwrap();
    }
    let client = world.postgres.connect().await.unwrap();
    publish(&client, "r", "k", 201).await;
    world.settle(SETTLE).await.unwrap();
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
    assert!(world.relay.is_running() && world.relay.pid() == pid, "the relay was restarted");
}

#[tokio::test]
async fn a_fast_shutdown_of_an_idle_server() {
    stops_fast(false, Duration::from_secs(3)).await;
}

#[tokio::test]
async fn a_fast_shutdown_with_undecided_events() {
    stops_fast(true, Duration::from_secs(15)).await;
}

/// Ends the relay's sessions of one kind again and again under load.
async fn survives_termination(kind: &str) {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let sampling = world.sample().await.unwrap();
    let load = paced();
    let events = load.events;
    let mut load = world.load(load);
    let pid = world.relay.pid();
    let (mut ended, times): (Vec<Session>, u64) = (Vec::new(), 3);
    for time in 1..=times {
        load.reach(events * time / (times + 1)).await;
        until("a new session", SETTLE, || async {
            let found = sessions(&client).await;
            let next = found.iter().find(|session| session.kind == kind);
            next.is_some_and(|next| !ended.contains(next)).then_some(()).ok_or(format!("{found:?}"))
        })
        .await;
        let found = sessions(&client).await;
        let victim = found.into_iter().find(|session| session.kind == kind).unwrap();
        client.query_one("SELECT pg_terminate_backend($1)", &[&victim.pid]).await.unwrap();
        ended.push(victim);
    }
    finish_and_judge(&world, load, sampling).await;
    assert!(world.relay.is_running() && world.relay.pid() == pid, "the relay was restarted");
    let failures = metric(&world, "outboxd_failures_total", "").await.unwrap();
    assert!(failures >= times as f64, "{failures} failures were counted");
}

#[tokio::test]
async fn the_walsender_is_terminated_under_load() {
    survives_termination("walsender").await;
}

#[tokio::test]
async fn the_control_connection_is_terminated_under_load() {
    survives_termination("client backend").await;
}

/// Two destinations on two streams, each with its own kinds of events.
async fn two_destinations() -> World {
    let nats = Nats::start().await.unwrap();
    let postgres = PostgresOptions::default().set("wal_sender_timeout", "10s");
    let more = format!(
        "[destination.slow]\nservers = [{:?}]\nstream = \"SLOW\"\nsubject = \"slow.{{kind}}\"\n\
         kinds = [\"slow\"]\nack_timeout = \"1s\"\n",
        nats.url()
    );
    let destination = "kinds = [\"fast\"]".to_owned();
    let options = WorldOptions { postgres: postgres.clone(), destination, more, ..options() };
    let postgres = Postgres::start_with(postgres).await.unwrap();
    let broker = Broker::Single(Box::new(nats));
    let mut world = World::assemble(options, postgres, broker).await.unwrap();
    world.start_relay().await.unwrap();
    world
}

/// One destination can't store its event: the other is not delayed by it, and the position does not
/// pass it, whatever commits behind it.
async fn one_destination_refuses(
    refuse: impl AsyncFnOnce(&async_nats::Client),
    restore: impl AsyncFnOnce(&World, &async_nats::Client),
) {
    let mut world = two_destinations().await;
    let client = world.postgres.connect().await.unwrap();
    let noise = world.postgres.connect().await.unwrap();
    let broker = world.broker.connect().await.unwrap();
    refuse(&broker).await;
    let first = publish(&client, "slow", "slow", 1).await;
    let (fast, megabytes) = (49, if drill() { 200 } else { 5 });
    let time = Duration::from_secs(if drill() { 60 } else { 5 });
    let mut highest = Lsn(0);
    let mut slowest = Duration::ZERO;
    let work = async {
        for n in 1..=fast {
            publish(&client, "fast", "fast", n).await;
            let committed = Instant::now();
            until("a fast event", Duration::from_secs(2), || async {
                let state = stream::state(&broker, STREAM).await.unwrap();
                let there = state.messages == u64::try_from(n).unwrap();
                there.then_some(()).ok_or_else(|| format!("{n}: {state:?}"))
            })
            .await;
            slowest = slowest.max(committed.elapsed());
            highest = highest.max(look::confirmed(&client).await);
            tokio::time::sleep(time / u32::try_from(fast).unwrap()).await;
        }
    };
    tokio::join!(work, look::noise(&noise, megabytes, time));
    println!("slowest fast event {slowest:?}");
    highest = highest.max(look::confirmed(&client).await);
    assert!(metric(&world, "outboxd_undecided_events", "").await == Some(1.0));
    world.relay.kill9().unwrap();
    restore(&world, &broker).await;
    world.start_relay().await.unwrap();
    until("the slow event", SETTLE, || async {
        let buried = world.buried().await.unwrap();
        assert!(buried.is_empty(), "{buried:?}");
        let seen = stream::read(&broker, "SLOW", 1).await.unwrap();
        seen.iter().any(|seen| seen.event.is_some()).then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    let end = look::wal_end(&client).await;
    until("the position", Duration::from_secs(10), || async {
        let confirmed = look::confirmed(&client).await;
        (confirmed >= end).then_some(()).ok_or_else(|| format!("{confirmed} of {end}"))
    })
    .await;
    let mut slow = stream::read(&broker, "SLOW", 1).await.unwrap();
    slow.retain(|seen| seen.event.is_some());
    let [seen] = &slow[..] else { panic!("{slow:?}") };
    assert_eq!(seen.event.as_ref().unwrap().id, first);
    let commit = seen.commit_lsn.unwrap();
    assert!(highest <= commit, "confirmed {highest} with {commit} undecided");
    let numbers: Vec<i64> =
        world.messages().await.unwrap().iter().map(|seen| seen.event.as_ref().unwrap().n).collect();
    assert_eq!(numbers, (1..=fast).collect::<Vec<_>>(), "each fast event once and in order");
}

#[tokio::test]
async fn a_full_stream_holds_the_position_and_delays_no_other_destination() {
    let limit = |broker: async_nats::Client, limit: i64| async move {
        look::edit_stream(&broker, "SLOW", |config| {
            config["discard"] = "new".into();
            config["max_msgs"] = limit.into();
        })
        .await;
    };
    one_destination_refuses(
        async |broker| {
            broker.request("slow.other", "not ours".into()).await.unwrap();
            limit(broker.clone(), 1).await;
        },
        async |_, broker| limit(broker.clone(), -1).await,
    )
    .await;
}

#[tokio::test]
async fn a_deleted_stream_holds_the_position_and_delays_no_other_destination() {
    one_destination_refuses(
        async |broker| {
            async_nats::jetstream::new(broker.clone()).delete_stream("SLOW").await.unwrap();
        },
        async |world, _| {
            world.relay.run(&["init", "--create-streams"]).await.unwrap();
        },
    )
    .await;
}
