//! P1, P3, P4, P5 when the relay is killed: at random moments, under load, and with a dedupe window
//! that has long passed when it comes back.

use std::time::Duration;

use crate::support::{drill, finish_and_judge, options, oracle, paced, paced_over};
use outboxd::sandbox::{Dice, Workload, World, WorldOptions};

/// Kills the relay `kills` times, spread over the load, each time a random moment after a mark.
async fn survives_kills(
    what: &str,
    options: WorldOptions,
    load: Workload,
    kills: u64,
    pause: Duration,
) {
    let mut world = World::start(options).await.unwrap();
    let sampling = world.sample().await.unwrap();
    let mut dice = Dice::new(load.seed);
    let events = load.events;
    let mut load = world.load(load);
    for kill in 1..=kills {
        load.reach(events * kill / (kills + 1)).await;
        tokio::time::sleep(Duration::from_millis(dice.below(100))).await;
        assert!(load.committed() < events, "the fault came after the load");
        world.relay.kill9().unwrap();
        // The scenario: rows go on coming while nobody relays.
        tokio::time::sleep(pause).await;
        world.relay.start().unwrap();
    }
    let verdict = finish_and_judge(&world, load, sampling).await;
    oracle(&format!("the relay at any moment, {what}"), &verdict, &format!("killed {kills} times"));
}

#[tokio::test]
async fn the_relay_is_killed_under_load_of_many_runs() {
    survives_kills("many runs", options(), paced(), 5, Duration::ZERO).await;
}

#[tokio::test]
async fn the_relay_is_killed_under_load_of_one_run() {
    let load = Workload { runs: 1, ..paced() };
    survives_kills("one run", options(), load, 5, Duration::ZERO).await;
}

#[tokio::test]
async fn the_relay_is_killed_with_one_event_of_a_run_in_flight() {
    let options = WorldOptions { destination: "pipeline = \"per-run\"".to_owned(), ..options() };
    survives_kills("one event of a run in flight", options, paced(), 3, Duration::ZERO).await;
}

/// What Resume is for: the broker has forgotten the ids, so only reading the stream avoids copies.
#[tokio::test]
async fn the_relay_is_killed_and_away_for_longer_than_the_dedupe_window() {
    let (window, pause) = if drill() { ("2s", 10) } else { ("1s", 2) };
    let options = WorldOptions { create: format!("duplicate_window = \"{window}\""), ..options() };
    let (kills, load) = (3, paced_over(if drill() { 30 } else { 4 } + 4 * pause));
    survives_kills(
        "away for longer than the dedupe window",
        options,
        load,
        kills,
        Duration::from_secs(pause),
    )
    .await;
}
