//! Beside live traffic: events are not delayed, nothing is confused, the limit is kept.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use outboxd::sandbox::Workload;
use outboxd::sandbox::verdict::{Seen, Verdict};

use crate::place::{Place, number};
use crate::support::{SETTLE, workload};

/// The relay is killed in the middle of it, too: what it sends and what the replay sends are kept
/// apart by both of them.
#[tokio::test]
async fn beside_live_traffic_the_limit_holds_and_nothing_is_confused() {
    const RATE: u64 = 400;
    let mut place = Place::start_with_times().await;
    place.write(2_000).await;
    let old = place.since(0).await;
    let until = place.position().await.to_string();
    place.purge().await;
    let rate = RATE.to_string();
    let child = place.begin(&[
        "--since-lsn",
        "0/0",
        "--until-lsn",
        &until,
        "--job",
        "beside",
        "--rate",
        &rate,
        "--json",
    ]);
    let mut load = place.world.load(Workload { events: 1_500, rate: Some(300), ..workload() });
    load.reach(500).await;
    place.world.relay.kill9().unwrap();
    place.world.start_relay().await.unwrap();
    load.finish().await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(number(&report, "stored"), old.len() as u64, "{words}");
    place.recorded().await;
    place.world.relay.terminate(SETTLE).await.unwrap();

    let (copies, live): (Vec<_>, Vec<_>) =
        place.messages().await.into_iter().partition(|seen| seen.msg_id.contains(":replay:"));
    let verdict = Verdict::of(&old, &HashSet::new(), &copies, &[]);
    assert!(verdict.is_ok(), "{verdict}");
    let verdict = Verdict::of(&place.since(old.len()).await, &HashSet::new(), &live, &[]);
    assert!(verdict.is_ok(), "{verdict}");
    let mut waits = waits(&place, &live).await;
    waits.sort_unstable();
    let at = |percent: usize| waits.get(waits.len() * percent / 100).copied().unwrap_or_default();
    println!("live events, from commit to stream: p50 {:?}, p99 {:?}", at(50), at(99));
    // Any second has no more than it may have, and a timer's lateness.
    let times: Vec<i128> = copies.iter().map(|seen| seen.stored_at).collect();
    let second = i128::try_from(Duration::from_secs(1).as_nanos()).unwrap();
    let most = times.iter().enumerate().map(|(first, at)| {
        times.iter().skip(first).take_while(|other| **other < at + second).count()
    });
    let most = most.max().unwrap();
    println!("at most {most} copies in a second");
    assert!(most <= usize::try_from(RATE + RATE / 4).unwrap(), "{most} in a second");
}

/// From the commit to the stream, of live events.
async fn waits(place: &Place, live: &[Seen]) -> Vec<Duration> {
    let sql = "SELECT id, (extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000000)::bigint \
               FROM outbox.event";
    let rows = place.client.query(sql, &[]).await.unwrap();
    let committed: HashMap<uuid::Uuid, i64> =
        rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let wait = |seen: &Seen| {
        let committed = i128::from(*committed.get(&seen.event.as_ref()?.id)?) * 1_000;
        u64::try_from(seen.stored_at - committed).ok().map(Duration::from_nanos)
    };
    live.iter().filter_map(wait).collect()
}
