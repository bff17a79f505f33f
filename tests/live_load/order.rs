//! P1, P2, P3 on real servers without faults: concurrent writers whose transactions interleave,
//! roll back and take savepoints back; both pipelines.

use crate::support::{finish_and_judge, options, workload};
use outboxd::sandbox::{Workload, World, WorldOptions};

async fn relays_everything_once_in_order(options: WorldOptions, load: Workload) {
    let mut world = World::start(options).await.unwrap();
    let sampling = world.sample().await.unwrap();
    let load = world.load(load);
    let verdict = finish_and_judge(&world, load, sampling).await;
    assert!(verdict.events > 0);
    let (status, _) = world.relay.terminate(std::time::Duration::from_secs(15)).await.unwrap();
    assert!(status.success(), "{status}\n{}", world.relay.log());
}

#[tokio::test]
async fn concurrent_writers_of_many_runs() {
    relays_everything_once_in_order(options(), workload()).await;
}

#[tokio::test]
async fn one_run_alone() {
    let load = Workload { runs: 1, ..workload() };
    relays_everything_once_in_order(options(), load).await;
}

#[tokio::test]
async fn the_pipeline_with_one_event_of_a_run_in_flight() {
    let options = WorldOptions { destination: "pipeline = \"per-run\"".to_owned(), ..options() };
    relays_everything_once_in_order(options, workload()).await;
}

/// A relay that starts late finds a backlog in the slot.
#[tokio::test]
async fn a_backlog_written_before_the_relay_started() {
    let mut world = World::prepare(options()).await.unwrap();
    let sampling = world.sample().await.unwrap();
    let mut load = world.load(workload());
    load.finish().await.unwrap();
    world.start_relay().await.unwrap();
    finish_and_judge(&world, load, sampling).await;
}
