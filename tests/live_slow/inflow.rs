//! Runs come back from the slow path while events keep coming in for them.

use std::time::Duration;

use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{Nats, Workload, World, WorldOptions, stream};

use crate::support::look::{metric, until};
use crate::support::{SETTLE, drill, log_tail, options, workload};
use crate::wait_for;

/// Of the destination that everybody waits for.
fn outage() -> Duration {
    Duration::from_secs(if drill() { 60 } else { 8 })
}

/// The required destination is away, the other one goes on, so that memory is emptied into the
/// ledger. Afterwards a thousand runs are back on the fast path although none of them ever pauses.
#[tokio::test]
async fn steady_inflow_into_a_thousand_runs() {
    let other = Nats::start().await.unwrap();
    let more = format!(
        "[destination.archive]\nservers = [\"{}\"]\nstream = \"ARCHIVE\"\nrequired = false\n\
         subject = \"archive.{{kind}}\"",
        other.url()
    );
    let relay = "memory = \"4MiB\"\nsweep_interval = \"1s\"".into();
    let mut world = World::start(WorldOptions { relay, more, ..options() }).await.unwrap();
    let sampling = world.sample().await.unwrap();
    // Less than a build without optimisation can send from the table.
    let (events, rate) = (u64::MAX, Some(if drill() { 500 } else { 1_000 }));
    let mut load =
        world.load(Workload { events, rate, runs: 1_000, payload_bytes: 1_000, ..workload() });
    load.reach(500).await;
    world.nats().unwrap().kill9().unwrap();
    tokio::time::sleep(outage()).await;
    wait_for(&world, "outboxd_slow_runs", "events", 500.0).await;
    world.nats().unwrap().restart().await.unwrap();
    let back = std::time::Instant::now();
    // Back are they when a thousand more events go by and none of them waits.
    let handed = loop {
        until("no slow run", SETTLE, || async {
            let slow = metric(&world, "outboxd_slow_runs", "events").await.unwrap_or(-1.0);
            (slow == 0.0).then_some(()).ok_or_else(|| format!("{slow}\n{}", log_tail(&world)))
        })
        .await;
        let before = handed(&world).await;
        load.reach(load.committed() + 1_000).await;
        if before == handed(&world).await {
            break before;
        }
        assert!(back.elapsed() < SETTLE, "{before} handed over, and more\n{}", log_tail(&world));
    };
    println!("{handed} events handed over; back on the fast path after {:?}", back.elapsed());
    load.enough();
    load.finish().await.unwrap();
    let settled = world.settle(SETTLE).await;
    let samples = sampling.stop().await.unwrap();
    let verdict = world.judge(&samples).await.unwrap();
    println!("{verdict}");
    settled.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
    let client = other.connect().await.unwrap();
    let committed = world.committed().await.unwrap();
    until("the archive has all", SETTLE, || async {
        let seen = stream::state(&client, "ARCHIVE").await.unwrap().messages;
        let all = seen >= committed.len() as u64;
        all.then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let archived = stream::read(&client, "ARCHIVE", 1).await.unwrap();
    let verdict = Verdict::of(&committed, &Default::default(), &archived, &[]);
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
}

async fn handed(world: &World) -> f64 {
    metric(world, "outboxd_handed_events_total", "events").await.unwrap()
}
