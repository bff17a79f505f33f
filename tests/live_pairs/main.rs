//! P1, P3, P4 where two share something: two destinations one stream, two outboxes one stream, two
//! relays one name.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod owner;
#[path = "../support/mod.rs"]
mod support;

use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{
    Broker, Nats, NatsOptions, Postgres, PostgresOptions, Relay, STREAM, Signal, Workload, World,
    WorldOptions, free_port,
};
use support::told::{status, until};
use support::{
    SETTLE, drill, finish, finish_and_judge, log_tail, options, oracle, paced, workload,
};

const READY: Duration = Duration::from_secs(60);
/// DESIGN: a standby takes over within seconds.
const TAKE_OVER: Duration = Duration::from_secs(5);

/// One outbox, two destinations, one stream: both copies are stored, since their ids differ, also
/// when the relay is killed.
#[tokio::test]
async fn two_destinations_share_a_stream() {
    let (postgres, nats) = tokio::try_join!(
        Postgres::start_with(PostgresOptions::default()),
        Nats::start_with(NatsOptions::default())
    )
    .unwrap();
    let more = format!(
        "[destination.second]\nservers = [\"{}\"]\nstream = \"{STREAM}\"\nsubject = \
         \"second.{{kind}}\"\n",
        nats.url()
    );
    let options = WorldOptions { more, ..options() };
    let broker = Broker::Single(Box::new(nats));
    let mut world = World::assemble(options, postgres, broker).await.unwrap();
    world.start_relay().await.unwrap();
    let load = paced();
    let events = load.events;
    let mut load = world.load(load);
    for kill in 1..=2 {
        load.reach(events * kill / 3).await;
        world.relay.kill9().unwrap();
        world.relay.start().unwrap();
    }
    load.finish().await.unwrap();
    world.settle(SETTLE).await.unwrap();
    let committed = world.committed().await.unwrap();
    let messages = world.messages().await.unwrap();
    assert_eq!(messages.len(), committed.len() * 2);
    for name in ["events", "second"] {
        let own: Vec<_> =
            messages.iter().filter(|seen| seen.msg_id.ends_with(name)).cloned().collect();
        let verdict = Verdict::of(&committed, &HashSet::new(), &own, &[]);
        assert!(verdict.is_ok(), "{name}: {verdict}\n{}", log_tail(&world));
        let recorded = world.recorded(name).await.unwrap();
        assert_eq!(recorded.len(), committed.len());
    }
}

/// Two databases with tables of their own shape, whose integer ids both begin at 1, feed one
/// stream through two relays.
#[tokio::test]
async fn two_outboxes_with_integer_ids_share_a_stream() {
    let (postgres, nats) = tokio::try_join!(
        Postgres::start_with(PostgresOptions::default()),
        Nats::start_with(NatsOptions::default())
    )
    .unwrap();
    let superuser = postgres.connect().await.unwrap();
    let mut relays = Vec::new();
    let mut sessions = Vec::new();
    for name in ["left", "right"] {
        superuser.batch_execute(&format!("CREATE DATABASE \"{name}\"")).await.unwrap();
        let url = postgres.url_of("postgres", name);
        let (client, connection) =
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute(TABLE).await.unwrap();
        let port = free_port().unwrap();
        let text = format!(
            "[relay]\nname = \"{name}\"\n\
             [source]\nurl = \"{url}\"\ntable = \"public.messages\"\n\
             [source.columns]\nseq = \"number\"\nid = \"number\"\nrun = \"topic\"\n\
             kind = \"what\"\npayload = \"body\"\ntenant = false\nversion = false\n\
             headers = false\ncreated_at = false\n\
             [destination.events]\nservers = [\"{}\"]\nstream = \"{STREAM}\"\n\
             [admin]\nlisten = \"127.0.0.1:{port}\"\n",
            nats.url()
        );
        let mut relay = Relay::prepare(&options().program, &text, port, false).unwrap();
        relay.run(&["init", "--create-streams"]).await.unwrap();
        relay.start().unwrap();
        relay.wait_ready(READY).await.unwrap();
        relays.push(relay);
        sessions.push(client);
    }
    let rows = 200;
    for _ in 0..2 {
        for client in &sessions {
            let sql = "INSERT INTO messages (topic, what, body) \
                       SELECT 't' || i % 5, 'k', 'b' FROM generate_series(1, $1::int) i";
            client.execute(sql, &[&(rows / 2)]).await.unwrap();
        }
        // Between the two halves both relays die.
        for relay in &mut relays {
            relay.kill9().unwrap();
            relay.start().unwrap();
        }
    }
    let broker = nats.connect().await.unwrap();
    let wanted: BTreeSet<String> =
        ["left", "right"].into_iter().flat_map(|name| ids(name, rows)).collect();
    let mut seen = Vec::new();
    until("both outboxes are in the stream", SETTLE, async || {
        let read = outboxd::sandbox::stream::read(&broker, STREAM, 1).await;
        seen = read.unwrap_or_default().into_iter().map(|seen| seen.msg_id).collect();
        seen.len() >= wanted.len()
    })
    .await;
    assert_eq!(seen.len(), wanted.len(), "a copy, or a stranger");
    for name in ["left", "right"] {
        let own: Vec<&String> = seen.iter().filter(|id| id.starts_with(name)).collect();
        let order: Vec<String> = ids(name, rows).collect();
        // One transaction after the other: commit order is the order of the numbers.
        for topic in 0..5 {
            let of_topic =
                |id: &&String| order.iter().position(|one| one == *id).unwrap() % 5 == topic;
            assert!(
                own.iter()
                    .copied()
                    .filter(of_topic)
                    .is_sorted_by_key(|id| { order.iter().position(|one| one == id) })
            );
        }
    }
    assert_eq!(seen.into_iter().collect::<BTreeSet<_>>(), wanted);
}

fn ids(name: &str, rows: i32) -> impl Iterator<Item = String> {
    (1..=rows).map(move |number| format!("{name}:1:{number}"))
}

const TABLE: &str = "\
    CREATE TABLE messages (\
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
        topic text NOT NULL, what text NOT NULL, body text NOT NULL)";

/// A second relay of the world's name, with the same configuration but its admin address.
fn another(world: &World, options: &WorldOptions) -> Relay {
    let text = std::fs::read_to_string(world.relay.configuration()).unwrap();
    let port = free_port().unwrap();
    let own = world.relay.admin_url().replace("http://", "");
    let text = text.replace(&own, &format!("127.0.0.1:{port}"));
    Relay::prepare(&options.program, &text, port, false).unwrap()
}

async fn acked(relay: &Relay) -> u64 {
    status(relay, "/destinations/0/events/acked").await.as_u64().unwrap_or(0)
}

/// The active relay is killed, the standby takes over, the killed one comes back as standby; and
/// so on.
#[tokio::test]
async fn a_standby_takes_over_when_the_active_relay_is_killed() {
    let options = WorldOptions { create: "duplicate_window = \"100ms\"".to_owned(), ..options() };
    let mut world = World::start(options.clone()).await.unwrap();
    let mut standby = another(&world, &options);
    let sampling = world.sample().await.unwrap();
    let load = world.load(Workload { events: u64::MAX, rate: Some(500), ..workload() });
    standby.start().unwrap();
    let rounds = if drill() { 20 } else { 3 };
    let mut took = Vec::new();
    for _ in 0..rounds {
        until("the other is standby", READY, async || {
            status(&standby, "/phase").await == "standby"
        })
        .await;
        let (ready, body) = standby.get("/readyz").await.unwrap();
        assert_eq!(ready, 200, "{body}");
        until("the active one works", READY, async || {
            status(&world.relay, "/destinations/0/procedure").await == "flowing"
        })
        .await;
        let before = world.messages().await.unwrap().len();
        world.relay.kill9().unwrap();
        let start = Instant::now();
        until("the standby publishes", TAKE_OVER, async || acked(&standby).await > 0).await;
        took.push(start.elapsed());
        println!("taken over within {:?}, at message {before}", start.elapsed());
        std::mem::swap(&mut world.relay, &mut standby);
        standby.start().unwrap();
    }
    load.enough();
    let verdict = finish_and_judge(&world, load, sampling).await;
    let note =
        format!("taken over within {} ms, {rounds} times", took.iter().max().unwrap().as_millis());
    oracle("the active relay of two is killed", &verdict, &note);
    let (status, _) = standby.terminate(Duration::from_secs(10)).await.unwrap();
    assert!(status.success(), "{status}: {}", standby.log());
}

/// An orderly stop hands over as well.
#[tokio::test]
async fn a_standby_takes_over_when_the_active_relay_is_stopped() {
    let options = options();
    let mut world = World::start(options.clone()).await.unwrap();
    let mut standby = another(&world, &options);
    let sampling = world.sample().await.unwrap();
    let mut load = world.load(Workload { events: u64::MAX, rate: Some(500), ..workload() });
    standby.start().unwrap();
    until("the other is standby", READY, async || status(&standby, "/phase").await == "standby")
        .await;
    load.reach(500).await;
    let (ended, _) = world.relay.terminate(Duration::from_secs(15)).await.unwrap();
    assert!(ended.success(), "{ended}");
    until("the standby publishes", TAKE_OVER, async || acked(&standby).await > 0).await;
    std::mem::swap(&mut world.relay, &mut standby);
    load.enough();
    finish_and_judge(&world, load, sampling).await;
}

/// Messages that the stopped relay had in flight, at most.
const IN_FLIGHT: usize = 100;

/// The holder is stopped in full flight, the standby takes over, the holder wakes up: order is kept, and
/// there are no more copies than it had messages in flight, though the stream has forgotten the ids.
async fn stopped(relay: &str, wal_sender_timeout: &str, pauses: &[u64]) {
    let options = WorldOptions {
        relay: relay.to_owned(),
        destination: format!("max_in_flight = {IN_FLIGHT}"),
        create: "duplicate_window = \"100ms\"".to_owned(),
        ..options()
    };
    let mut world = World::prepare(options.clone()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let sql = format!("ALTER SYSTEM SET wal_sender_timeout = '{wal_sender_timeout}'");
    client.batch_execute(&sql).await.unwrap();
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    world.start_relay().await.unwrap();
    let mut standby = another(&world, &options);
    standby.start().unwrap();
    let sampling = world.sample().await.unwrap();
    let load = world.load(Workload { events: u64::MAX, rate: Some(500), ..workload() });
    let mut notes = Vec::new();
    for pause in pauses {
        until("one stands by", READY, async || status(&standby, "/phase").await == "standby").await;
        let before = acked(&world.relay).await;
        until("the other works", READY, async || acked(&world.relay).await > before + 500).await;
        world.relay.signal(Signal::Stop).unwrap();
        let start = Instant::now();
        until("the standby publishes", SETTLE, async || acked(&standby).await > 0).await;
        let took = start.elapsed();
        // The scenario: it sleeps for so long.
        tokio::time::sleep(Duration::from_secs(*pause).saturating_sub(took)).await;
        world.relay.signal(Signal::Continue).unwrap();
        until("the woken one stands by", READY, async || {
            status(&world.relay, "/phase").await == "standby"
        })
        .await;
        notes.push(format!("{pause} s: taken over within {} ms", took.as_millis()));
        std::mem::swap(&mut world.relay, &mut standby);
    }
    load.enough();
    let verdict = finish(&world, load, sampling).await;
    let most = IN_FLIGHT * pauses.len();
    let note = format!("{}; at most {most} copies", notes.join(", "));
    oracle("the active relay of two is stopped, and wakes up", &verdict, &note);
    assert!(verdict.copies.count <= most, "{verdict}");
}

#[tokio::test]
async fn a_standby_ends_the_sessions_of_a_holder_that_is_stopped() {
    let pauses: &[u64] = if drill() { &[5, 60, 300] } else { &[5] };
    stopped("take_over_after = \"2s\"", "60s", pauses).await;
}

/// Without leave to do that the server does it, when the holder has been silent for long.
#[tokio::test]
async fn the_server_ends_the_sessions_of_a_holder_that_is_stopped() {
    stopped("", "10s", if drill() { &[60] } else { &[20] }).await;
}
