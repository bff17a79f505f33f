//! Recovery on real servers: what a start makes of a slot, a ledger, a cluster or a stream that is not
//! what the relay left behind.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

mod history;
mod plan;
mod restore;
#[path = "../support/mod.rs"]
mod support;
mod tail;
mod upgrade;

use std::io::Write as _;
use std::time::Duration;

use outboxd::sandbox::{World, WorldOptions};
use support::look::{no_slow_run, publish, until};
use support::{SETTLE, log_tail, options};
use tokio_postgres::Client;

/// Passes follow quickly, and the server keeps no copy out.
fn swept_often() -> WorldOptions {
    let (relay, create) = ("sweep_interval = \"1s\"", "duplicate_window = \"100ms\"");
    WorldOptions { relay: relay.into(), create: create.into(), ..options() }
}

/// Says on standard error, past the capture of tests' output, that a test leaves itself out.
fn skipped(test: &str, why: &str) {
    let words = format!("skipped: {test}: {why}\n");
    std::io::stderr().write_all(words.as_bytes()).unwrap();
}

/// So many events of each of these runs, numbered from `first` on, one after the other.
async fn write(client: &Client, runs: &[&str], first: i64, count: i64) {
    for n in first..first + count {
        for run in runs {
            publish(client, run, "k", n).await;
        }
    }
}

/// Every event is there once, and in order.
async fn judge(world: &World, events: usize) {
    if let Err(error) = world.settle(SETTLE).await {
        panic!("{error}");
    }
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(world));
    assert_eq!(verdict.events, events, "{verdict}");
    no_slow_run(world).await;
}

/// Waits until the relay is not ready, and says all of this of it.
async fn not_ready(world: &World, words: &[&str]) {
    until("not ready", SETTLE, || async {
        let (status, body) = world.relay.get("/readyz").await.map_err(|one| one.to_string())?;
        let told = status == 503 && words.iter().all(|word| body.contains(word));
        told.then_some(()).ok_or_else(|| format!("{status} {body}\n{}", log_tail(world)))
    })
    .await;
}

/// Waits until no gap is open.
async fn gap_closed(world: &World, client: &Client) {
    until("gap closed", SETTLE, || async {
        let sql = "SELECT count(*) FROM outbox.destination WHERE gap_since IS NOT NULL";
        let open: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (open == 0).then_some(()).ok_or_else(|| log_tail(world))
    })
    .await;
}

/// A supervisor's patience: nothing was published for so long.
const WATCHED: Duration = Duration::from_secs(3);
