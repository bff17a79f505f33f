//! What the live tests share: the sandbox's world with the program under test, and one way to
//! panic with all that is known.

#![allow(dead_code, reason = "each test binary uses a part")]

pub mod batches;
pub mod consumer;
pub mod look;
pub mod told;

use std::time::Duration;

use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{Load, Sampling, Workload, World, WorldOptions};

/// Everything a fault held up must be through after this.
pub const SETTLE: Duration = Duration::from_secs(120);

/// Events of a test: modest by default, `OUTBOXD_TEST_EVENTS` of them in `make drill`.
pub fn events() -> u64 {
    number("OUTBOXD_TEST_EVENTS").unwrap_or(5_000)
}

/// Is this `make drill`?
pub fn drill() -> bool {
    number("OUTBOXD_TEST_EVENTS").is_some()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// Options with the program under test; in a drill servers and relay are the same, the counts grow.
pub fn options() -> WorldOptions {
    WorldOptions { program: env!("CARGO_BIN_EXE_outboxd").into(), ..WorldOptions::default() }
}

/// A workload whose seed is told, so that a failure can be repeated (`OUTBOXD_TEST_SEED`).
pub fn workload() -> Workload {
    let mut load = Workload { events: events(), ..Workload::default() };
    if let Some(seed) = number("OUTBOXD_TEST_SEED") {
        load.seed = seed;
    }
    println!("seed {}", load.seed);
    load
}

/// The same, spread over some seconds, so that faults fall into it.
pub fn paced() -> Workload {
    paced_over(if drill() { 30 } else { 4 })
}

/// The same, for faults that themselves take seconds.
pub fn paced_over(seconds: u64) -> Workload {
    Workload { rate: Some(events() / seconds), ..workload() }
}

/// A verdict on the position needs at least so many looks at it: half a second of them.
const SAMPLES_MIN: usize = 10;

/// Waits for the writers and for the relay, then demands that every event is in the stream once,
/// in order, and that the slot's position was looked at, moved, and was never too high.
pub async fn finish_and_judge(world: &World, load: Load, sampling: Sampling) -> Verdict {
    let verdict = finish(world, load, sampling).await;
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(world));
    verdict
}

/// One line of the table that `make drill` prints (`scripts/drill.py`).
pub fn oracle(point: &str, verdict: &Verdict, note: &str) {
    println!(
        "oracle | {point} | {} | {} | {} | {} | {} | {note}",
        verdict.events,
        verdict.missing.count,
        verdict.phantoms.count,
        verdict.copies.count,
        verdict.order_violations.count,
    );
}

/// The same where copies are counted: everything is there, in order.
pub async fn finish(world: &World, mut load: Load, sampling: Sampling) -> Verdict {
    load.finish().await.unwrap();
    let settled = world.settle(SETTLE).await;
    let samples = sampling.stop().await.unwrap();
    let verdict = world.judge(&samples).await.unwrap();
    println!("{verdict}, {} samples", samples.len());
    if let Err(error) = settled {
        panic!("{error}\n{verdict}");
    }
    assert!(verdict.is_ok_with_copies(), "{verdict}\n{}", log_tail(world));
    assert!(samples.len() >= SAMPLES_MIN, "the position was looked at {} times", samples.len());
    let positions = || samples.iter().map(|sample| sample.confirmed);
    assert!(positions().min() < positions().max(), "the position stood still");
    verdict
}

/// Lines of `[destination.events]` for a stream that is the relay's alone, each message behind the one
/// before it.
pub const SEQUENCE: &str = "pipeline = \"sequence\"\nexclusive = true\n";

/// The end of the relay's log.
pub fn log_tail(world: &World) -> String {
    let log = world.relay.log();
    let lines: Vec<&str> = log.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(60)).copied().collect::<Vec<_>>().join("\n")
}
