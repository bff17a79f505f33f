//! P1, P3, P4, P5 when nats-server is killed and started again under load, alone and together with
//! the relay.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod support;

use std::time::Duration;

use outboxd::sandbox::{Dice, Workload, World, WorldOptions};
use support::{finish_and_judge, options, paced};

async fn survives_broker_kills(options: WorldOptions, load: Workload, kill_the_relay_too: bool) {
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
        if kill_the_relay_too {
            tokio::time::sleep(Duration::from_millis(dice.below(50))).await;
            world.relay.kill9().unwrap();
            world.relay.start().unwrap();
        }
    }
    finish_and_judge(&world, load, sampling).await;
}

#[tokio::test]
async fn nats_server_is_killed_under_load_of_many_runs() {
    survives_broker_kills(options(), Workload { runs: 1_000, ..paced() }, false).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_under_load_of_one_run() {
    survives_broker_kills(options(), Workload { runs: 1, ..paced() }, true).await;
}

#[tokio::test]
async fn nats_server_and_relay_are_killed_under_load_of_many_runs() {
    survives_broker_kills(options(), Workload { runs: 1_000, ..paced() }, true).await;
}

#[tokio::test]
async fn nats_server_is_killed_with_one_event_of_a_run_in_flight() {
    let options = WorldOptions { destination: "pipeline = \"per-run\"".to_owned(), ..options() };
    survives_broker_kills(options, paced(), false).await;
}
