//! P1, P3, P4, P5 when nats-server is killed and started again under load, alone and together with
//! the relay; when answers are lost on the way, within the dedupe window and outside it; and when
//! the way is slow.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod support;

use std::time::Duration;

use outboxd::sandbox::{
    Broker, Dice, Mode, Nats, NatsOptions, Postgres, PostgresOptions, Proxy, STREAM, Workload,
    World, WorldOptions,
};
use support::look::metric;
use support::{SEQUENCE, drill, finish_and_judge, log_tail, options, paced, paced_over};

const PER_RUN: &str = "pipeline = \"per-run\"\n";

/// Kills nats-server three times, spread over the load. Between two of these the relay is killed
/// and stays away for `relay_away`, when that is given.
async fn survives_broker_kills(
    options: WorldOptions,
    load: Workload,
    relay_away: Option<Duration>,
) {
    let mut world = World::start(options).await.unwrap();
    let sampling = world.sample().await.unwrap();
    let mut dice = Dice::new(load.seed);
    let events = load.events;
    let kills = 3;
    let mut load = world.load(load);
    for kill in 1..=kills {
        load.reach(events * (2 * kill - 1) / (2 * kills + 1)).await;
        tokio::time::sleep(Duration::from_millis(dice.below(50))).await;
        assert!(load.committed() < events, "the fault came after the load");
        world.nats().unwrap().kill9().unwrap();
        world.nats().unwrap().restart().await.unwrap();
        load.reach(events * (2 * kill) / (2 * kills + 1)).await;
        if let Some(away) = relay_away {
            tokio::time::sleep(Duration::from_millis(dice.below(50))).await;
            assert!(load.committed() < events, "the fault came after the load");
            world.relay.kill9().unwrap();
            tokio::time::sleep(away).await;
            world.relay.start().unwrap();
        }
    }
    finish_and_judge(&world, load, sampling).await;
}

#[tokio::test]
async fn nats_server_is_killed_under_load_of_many_runs() {
    survives_broker_kills(options(), Workload { runs: 1_000, ..paced() }, None).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_under_load_of_one_run() {
    survives_broker_kills(options(), Workload { runs: 1, ..paced() }, Some(Duration::ZERO)).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_under_load_of_many_runs() {
    survives_broker_kills(options(), Workload { runs: 1_000, ..paced() }, Some(Duration::ZERO))
        .await;
}

#[tokio::test]
async fn nats_server_is_killed_with_one_event_of_a_run_in_flight() {
    let options = WorldOptions { destination: PER_RUN.to_owned(), ..options() };
    survives_broker_kills(options, Workload { runs: 1_000, ..paced() }, None).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_with_the_one_event_of_the_one_run_in_flight() {
    let options = WorldOptions { destination: PER_RUN.to_owned(), ..options() };
    survives_broker_kills(options, Workload { runs: 1, ..paced() }, Some(Duration::ZERO)).await;
}

#[tokio::test]
async fn nats_server_is_killed_under_load_in_sequence() {
    let options = WorldOptions { destination: SEQUENCE.to_owned(), ..options() };
    survives_broker_kills(options, Workload { runs: 1_000, ..paced() }, None).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_under_load_of_one_run_in_sequence() {
    let options = WorldOptions { destination: SEQUENCE.to_owned(), ..options() };
    survives_broker_kills(options, Workload { runs: 1, ..paced() }, Some(Duration::ZERO)).await;
}

/// When the relay comes back, the broker has forgotten the ids of what it stored before the kill.
async fn survives_kills_past_the_dedupe_window(runs: u64) {
    let (window, away) = if drill() { ("2s", 10) } else { ("1s", 2) };
    let options = WorldOptions { create: format!("duplicate_window = \"{window}\""), ..options() };
    let load = Workload { runs, ..paced_over(if drill() { 30 } else { 4 } + 5 * away) };
    survives_broker_kills(options, load, Some(Duration::from_secs(away))).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_past_the_dedupe_window_with_many_runs() {
    survives_kills_past_the_dedupe_window(1_000).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_past_the_dedupe_window_with_one_run() {
    survives_kills_past_the_dedupe_window(1).await;
}

/// A world whose relay reaches NATS through a proxy.
async fn behind_a_proxy(destination: &str, create: &str) -> (World, Proxy) {
    let (postgres, nats) = tokio::try_join!(
        Postgres::start_with(PostgresOptions::default()),
        Nats::start_with(NatsOptions::default())
    )
    .unwrap();
    let proxy = Proxy::start(nats.port()).await.unwrap();
    let options = WorldOptions {
        servers: Some(vec![format!("nats://127.0.0.1:{}", proxy.port())]),
        destination: destination.to_owned(),
        create: create.to_owned(),
        ..options()
    };
    let broker = Broker::Single(Box::new(nats));
    let mut world = World::assemble(options, postgres, broker).await.unwrap();
    world.start_relay().await.unwrap();
    (world, proxy)
}

/// What the relay sends is stored, and no answer comes back for longer than it waits for one.
async fn survives_lost_answers(destination: &str, create: &str, silence: Duration) {
    let destination = format!("ack_timeout = \"1s\"\n{destination}");
    let (world, proxy) = behind_a_proxy(&destination, create).await;
    let sampling = world.sample().await.unwrap();
    let load = paced();
    let mut dice = Dice::new(load.seed);
    let events = load.events;
    let mut load = world.load(load);
    let faults = if drill() { 5 } else { 2 };
    for fault in 1..=faults {
        load.reach(events * fault / (faults + 1)).await;
        tokio::time::sleep(Duration::from_millis(dice.below(50))).await;
        proxy.set(Mode::DropReplies);
        tokio::time::sleep(silence).await;
        proxy.set(Mode::Pass);
    }
    finish_and_judge(&world, load, sampling).await;
    let resumed = metric(&world, "outboxd_resumed_events_total", "").await;
    assert!(resumed > Some(0.0), "nothing was stored without an answer: {resumed:?}");
    println!("{resumed:?} events were found in the stream");
}

#[tokio::test]
async fn answers_are_lost_and_heal_within_the_dedupe_window() {
    survives_lost_answers("", "", Duration::from_millis(2_500)).await;
}

/// The broker has forgotten the ids: only reading the stream avoids copies.
#[tokio::test]
async fn answers_are_lost_and_heal_outside_the_dedupe_window() {
    let create = "duplicate_window = \"500ms\"";
    survives_lost_answers("", create, Duration::from_millis(2_500)).await;
}

#[tokio::test]
async fn answers_are_lost_outside_the_window_with_one_event_of_a_run_in_flight() {
    let create = "duplicate_window = \"500ms\"";
    survives_lost_answers(PER_RUN, create, Duration::from_millis(2_500)).await;
}

#[tokio::test]
async fn answers_are_lost_outside_the_window_in_sequence() {
    let create = "duplicate_window = \"500ms\"";
    survives_lost_answers(SEQUENCE, create, Duration::from_millis(2_500)).await;
}

/// Slow is not broken, and nothing is sent twice.
async fn survives_a_slow_way(destination: &str, mode: Mode, events: u64) {
    let (world, proxy) = behind_a_proxy(destination, "duplicate_window = \"500ms\"").await;
    proxy.set(mode);
    let sampling = world.sample().await.unwrap();
    let load = world.load(Workload { events, ..paced() });
    finish_and_judge(&world, load, sampling).await;
}

#[tokio::test]
async fn answers_take_their_time() {
    survives_a_slow_way("", Mode::Delay(Duration::from_millis(200)), 5_000).await;
}

#[tokio::test]
async fn answers_take_their_time_with_one_event_of_a_run_in_flight() {
    survives_a_slow_way(PER_RUN, Mode::Delay(Duration::from_millis(50)), 2_000).await;
}

#[tokio::test]
async fn answers_take_their_time_in_sequence() {
    survives_a_slow_way(SEQUENCE, Mode::Delay(Duration::from_millis(200)), 5_000).await;
}

/// So thin that a window of messages takes longer than the relay waits for an answer.
#[tokio::test]
async fn the_line_is_thin() {
    survives_a_slow_way("ack_timeout = \"1s\"", Mode::Narrow(100_000), 2_000).await;
}

#[tokio::test]
async fn the_line_is_thin_in_sequence() {
    let destination = format!("ack_timeout = \"1s\"\n{SEQUENCE}");
    survives_a_slow_way(&destination, Mode::Narrow(100_000), 2_000).await;
}

/// Somebody else writes the stream that should be the relay's alone: now and then, and without end.
#[tokio::test]
async fn others_write_an_exclusive_stream() {
    let options = WorldOptions {
        destination: SEQUENCE.to_owned(),
        // Nothing but the sequence and what Resume reads avoids copies.
        create: "duplicate_window = \"500ms\"".to_owned(),
        ..options()
    };
    let world = World::start(options).await.unwrap();
    let sampling = world.sample().await.unwrap();
    let load = paced();
    let events = load.events;
    let mut load = world.load(load);
    let context = async_nats::jetstream::new(world.broker.connect().await.unwrap());
    let stream = context.get_stream(STREAM).await.unwrap();
    let mut theirs = Vec::new();
    for nth in 0..200 {
        // Three by themselves, the rest one behind the other.
        load.reach(events * u64::min(nth, 3) / 5).await;
        let ack = context.publish("events.theirs", "x".into()).await.unwrap();
        theirs.push(ack.await.unwrap().sequence);
    }
    // The verdict is on what the relay stored.
    for sequence in theirs {
        stream.delete_message(sequence).await.unwrap();
    }
    finish_and_judge(&world, load, sampling).await;
    let log = world.relay.log();
    assert!(log.contains("goes on behind our last message"), "{}", log_tail(&world));
    assert!(log.contains("per-run"), "{}", log_tail(&world));
}
