//! P1, P3, P4, P5 on a stream with three replicas: leaders that step down and die, and the loss of
//! the quorum in the middle of a batch, where acknowledgements lie.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod support;

use std::collections::HashSet;
use std::time::Duration;

use async_nats::client::traits::Publisher as _;
use async_nats::message::OutboundMessage;
use futures_util::StreamExt as _;
use outboxd::event::{Event, EventId, RunHash, UnixMicros};
use outboxd::message::{Envelope, Message, Template, encode};
use outboxd::sandbox::{Dice, Mode, Proxy, STREAM, Workload, World, WorldOptions};
use support::batches;
use support::look::metric;
use support::told::{assert_recorded_is_stored, status, until};
use support::{SETTLE, drill, finish_and_judge, log_tail, options, workload};

/// Short, so that the relay sees silence, reads back and sends again while there is no quorum.
const IMPATIENT: &str = "ack_timeout = \"500ms\"\n";

fn cluster(destination: &str) -> WorldOptions {
    let destination = format!("{IMPATIENT}{destination}");
    WorldOptions { cluster: true, destination, ..options() }
}

/// A load without end: the test says when it is enough.
fn steady(rate: u64) -> Workload {
    Workload { events: u64::MAX, rate: Some(rate), ..workload() }
}

/// A leader that steps down, twice, then one that is killed: three times.
async fn survives_changes_of_the_leader(destination: &str, load: Workload) {
    let mut world = World::start(cluster(destination)).await.unwrap();
    let sampling = world.sample().await.unwrap();
    let mut dice = Dice::new(load.seed);
    let mut load = world.load(load);
    let mut next = |load: &outboxd::sandbox::Load| load.committed() + 100 + dice.below(200);
    for _ in 0..3 {
        for _ in 0..2 {
            load.reach(next(&load)).await;
            let cluster = world.cluster().unwrap();
            cluster.wait_leader(STREAM).await.unwrap();
            cluster.step_down(STREAM).await.unwrap();
        }
        load.reach(next(&load)).await;
        let cluster = world.cluster().unwrap();
        let leader = cluster.wait_leader(STREAM).await.unwrap();
        cluster.kill9(leader).unwrap();
        load.reach(next(&load)).await;
        let cluster = world.cluster().unwrap();
        cluster.wait_leader(STREAM).await.unwrap();
        cluster.restart(leader).await.unwrap();
    }
    load.reach(next(&load)).await;
    load.enough();
    finish_and_judge(&world, load, sampling).await;
    assert_recorded_is_stored(&world).await;
    println!("{}", status(&world.relay, "/destinations/0/events").await);
}

#[tokio::test]
async fn leaders_step_down_and_die_under_load_in_batches() {
    survives_changes_of_the_leader("", steady(400)).await;
}

#[tokio::test]
async fn leaders_step_down_and_die_with_one_event_of_a_run_in_flight() {
    survives_changes_of_the_leader("pipeline = \"per-run\"", steady(200)).await;
}

fn rounds(quick: u64) -> u64 {
    if drill() { 10 } else { quick }
}

/// The relay alone: what it sent without a quorum it sends again, and the leader, which has it as
/// an undecided proposal, skips it as a duplicate.
async fn survives_loss_of_quorum(destination: &str, rounds: u64) {
    let mut world = World::start(cluster(destination)).await.unwrap();
    let sampling = world.sample().await.unwrap();
    // A drill lasts minutes, and reads the whole stream each time.
    let what = steady(if drill() { 100 } else { 300 });
    let mut dice = Dice::new(what.seed);
    let mut load = world.load(what);
    for _ in 0..rounds {
        load.reach(load.committed() + 200 + dice.below(200)).await;
        flows(&world).await;
        let cluster = world.cluster().unwrap();
        let leader = cluster.wait_leader(STREAM).await.unwrap();
        let followers = others(leader);
        tokio::time::sleep(Duration::from_millis(dice.below(50))).await;
        for follower in followers {
            cluster.kill9(follower).unwrap();
        }
        doubt(&world).await;
        // The scenario: the relay tries again, for as long as chance has it.
        tokio::time::sleep(Duration::from_millis(dice.below(4_000))).await;
        bring_back(&mut world, leader, followers).await;
    }
    load.enough();
    finish_and_judge(&world, load, sampling).await;
    assert_recorded_is_stored(&world).await;
}

#[tokio::test]
async fn quorum_is_lost_under_load_in_batches() {
    survives_loss_of_quorum("", rounds(2)).await;
}

#[tokio::test]
async fn quorum_is_lost_under_load_with_one_event_of_a_run_in_flight() {
    survives_loss_of_quorum("pipeline = \"per-run\"", rounds(1)).await;
}

fn others(leader: usize) -> [usize; 2] {
    [(leader + 1) % 3, (leader + 2) % 3]
}

async fn doubts(world: &World, cause: &str) -> f64 {
    metric(world, "outboxd_unknown_outcomes_total", cause).await.unwrap_or(0.0)
}

/// Waits until the relay knows that something is wrong: by an unknown outcome, or, when the leader
/// has stepped down already, by a refusal that stops the flow or lets runs wait.
async fn doubt(world: &World) {
    let before = doubts(world, "").await;
    until("the relay is in doubt", Duration::from_secs(60), async || {
        let procedure = status(&world.relay, "/destinations/0/procedure").await;
        let retrying = status(&world.relay, "/destinations/0/retrying").await;
        procedure.as_str().is_some_and(|now| now != "flowing")
            || retrying.as_u64().is_some_and(|runs| runs > 0)
            || doubts(world, "").await > before
    })
    .await;
}

/// Kills the leader, lets the followers elect one of them, looks whether something is lost, and
/// brings the old leader back, with all that it had proposed.
async fn bring_back(world: &mut World, leader: usize, followers: [usize; 2]) {
    let cluster = world.cluster().unwrap();
    cluster.kill9(leader).unwrap();
    for follower in followers {
        cluster.restart(follower).await.unwrap();
    }
    cluster.wait_leader(STREAM).await.unwrap();
    assert_recorded_is_stored(world).await;
    world.cluster().unwrap().restart(leader).await.unwrap();
}

/// A second connection has the same events, and is ahead when the quorum goes: the relay's batch
/// has begun and is stored in part; the rest of it is skipped as duplicates of what the other one
/// proposed and what will be lost; and the batch is acknowledged as a whole.
#[tokio::test]
async fn quorum_is_lost_within_a_batch_whose_rest_another_connection_proposed() {
    let postgres = outboxd::sandbox::PostgresOptions::default();
    let nats = outboxd::sandbox::NatsOptions::default();
    let (postgres, nodes) = tokio::try_join!(
        outboxd::sandbox::Postgres::start_with(postgres),
        outboxd::sandbox::NatsCluster::start_with(&nats)
    )
    .unwrap();
    let mut nodes = nodes;
    let client = nodes.connect().await.unwrap();
    if !batches::taken_by(&client, "quorum_is_lost_within_a_batch").await {
        return;
    }
    // The only way of the relay leads to one node, which is made the leader.
    let proxy = Proxy::start(nodes.node(0).unwrap().port()).await.unwrap();
    let servers = Some(vec![format!("nats://127.0.0.1:{}", proxy.port())]);
    // Long enough that the held batch is not given up before it goes on.
    let destination = "ack_timeout = \"8s\"\npipeline = \"batch\"\n".to_owned();
    let options = WorldOptions { servers, destination, ..options() };
    let broker = outboxd::sandbox::Broker::Cluster(nodes);
    let mut world = World::assemble(options, postgres, broker).await.unwrap();
    world.start_relay().await.unwrap();
    let sampling = world.sample().await.unwrap();
    let mut lies = 0.0;
    let mut dice = Dice::new(workload().seed);
    for _ in 0..rounds(2) {
        world.cluster().unwrap().lead(STREAM, 0).await.unwrap();
        // The first event after a doubt goes alone: one that is not part of the scenario.
        world.load(Workload { events: 10, ..plain() }).finish().await.unwrap();
        until("the relay is done with that", SETTLE, async || {
            status(&world.relay, "/destinations/0/waiting").await == 0
        })
        .await;
        flows(&world).await;
        let known = stored(&world).await.len();
        proxy.set(Mode::HoldAfter(3_000 + dice.below(20_000)));
        let what = Workload { events: 2_000, rows: 2_000, writers: 1, runs: 20, ..plain() };
        world.load(what).finish().await.unwrap();
        // What reached the server is stored before the followers go; there is no other sign of it
        // than that the stream stands still.
        let mut held = HashSet::new();
        until("the batch is stored in part", Duration::from_secs(20), async || {
            let before = std::mem::replace(&mut held, stored(&world).await);
            tokio::time::sleep(Duration::from_millis(200)).await;
            held.len() > known && held == before
        })
        .await;
        for follower in others(0) {
            world.cluster().unwrap().kill9(follower).unwrap();
        }
        let before = doubts(&world, "unproven").await;
        propose_from_elsewhere(&mut world, &held).await;
        proxy.set(Mode::Pass);
        doubt(&world).await;
        tokio::time::sleep(Duration::from_millis(dice.below(2_000))).await;
        lies += doubts(&world, "unproven").await - before;
        bring_back(&mut world, 0, others(0)).await;
    }
    println!("{lies} events behind an acknowledgement that proved nothing");
    assert!(lies > 0.0, "the scenario never came about");
    let load = world.load(Workload { events: 100, ..plain() });
    finish_and_judge(&world, load, sampling).await;
    assert_recorded_is_stored(&world).await;
}

/// One transaction after the other, so that the numbers of the sequence are in commit order.
fn plain() -> Workload {
    Workload { writers: 1, adversary: false, ..workload() }
}

/// Waits until the relay flows on.
async fn flows(world: &World) {
    let destination = async |name| status(&world.relay, &["/destinations/0", name].concat()).await;
    let start = std::time::Instant::now();
    while destination("/up").await != true || destination("/procedure").await != "flowing" {
        let told = destination("").await;
        assert!(start.elapsed() < SETTLE, "still waiting: {told}\n{}", log_tail(world));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn stored(world: &World) -> HashSet<uuid::Uuid> {
    let seen = world.messages().await.unwrap();
    seen.into_iter().filter_map(|seen| Some(seen.event?.id)).collect()
}

/// A connection that publishes the relay's events from the table, same ids, subjects and bodies:
/// proposes everything that is not stored, in commit order and in one batch that is left open;
/// returns when the leader has taken all of it.
async fn propose_from_elsewhere(world: &mut World, stored: &HashSet<uuid::Uuid>) {
    let messages = messages(world, stored).await;
    let client = world.cluster().unwrap().node(0).unwrap().connect().await.unwrap();
    let inbox = client.new_inbox();
    let mut answers = client.subscribe(format!("{inbox}.>")).await.unwrap();
    let batch = uuid::Uuid::new_v4().simple().to_string();
    let reply = |seq: usize, op: u8| format!("{inbox}.{batch}.500.fail.{seq}.{op}.$FI");
    let count = messages.len();
    for (message, seq) in messages.into_iter().zip(1..) {
        let mut headers = async_nats::HeaderMap::new();
        message.headers().iter().for_each(|(name, value)| headers.append(name, value));
        let (subject, payload) = (message.subject().to_owned().into(), message.payload);
        let reply = Some(reply(seq, u8::from(seq > 1)).into());
        let message = OutboundMessage { subject, reply, payload, headers: Some(headers) };
        client.publish_message(message).await.unwrap();
    }
    let ping = reply(count, 4);
    let message = OutboundMessage {
        subject: "events.demo".into(),
        reply: Some(ping.clone().into()),
        payload: bytes::Bytes::new(),
        headers: None,
    };
    client.publish_message(message).await.unwrap();
    let answered = async { while answers.next().await.unwrap().subject.as_str() != ping {} };
    tokio::time::timeout(Duration::from_secs(10), answered).await.unwrap();
    println!("another connection proposed {count} events");
}

/// The messages of all rows but some, as the relay makes them, without the commit's position.
async fn messages(world: &World, but: &HashSet<uuid::Uuid>) -> Vec<Message> {
    let envelope = Envelope {
        relay: "world".to_owned(),
        generation: 1,
        stream: STREAM.to_owned(),
        template: Template::parse("events.{kind}").unwrap(),
        id_suffix: None,
        replay: None,
    };
    let client = world.postgres.connect().await.unwrap();
    let sql = "SELECT seq, id, run_id, kind, payload::text, \
                      (extract(epoch FROM created_at) * 1000000)::bigint \
                 FROM outbox.event ORDER BY seq";
    let mut messages = Vec::new();
    for row in client.query(sql, &[]).await.unwrap() {
        let id: uuid::Uuid = row.get(1);
        if but.contains(&id) {
            continue;
        }
        let bytes = |index| bytes::Bytes::from(row.get::<_, String>(index));
        let run = bytes(2);
        let event = Event {
            seq: row.get(0),
            position: None,
            id: EventId::Uuid(id),
            run_hash: RunHash::of_run(&run),
            run: Some(run),
            kind: bytes(3),
            tenant: None,
            version: None,
            payload: Some(bytes(4)),
            headers: None,
            created_at: Some(UnixMicros(row.get(5))),
            committed_at: None,
            fault: None,
        };
        messages.push(encode(&event, &envelope).unwrap());
    }
    messages
}
