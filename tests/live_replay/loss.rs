//! Messages are lost, and come back.

use outboxd::sandbox::{Signal, WorldOptions};

use crate::place::{FORGETS, Place, number};
use crate::support::{SETTLE, events, options};

/// Purged after 1,000 events; what came later is asked for, and nothing else comes.
#[tokio::test]
async fn a_purged_stream_gets_back_exactly_what_is_asked_for_in_run_order() {
    let place = Place::start().await;
    // Two receipts at least: of the first, nothing is asked for below.
    place.write(500).await;
    place.write(500).await;
    let rows = place.world.committed().await.unwrap().len();
    let since = place.position().await.to_string();
    place.write(events()).await;
    let lost = place.since(rows).await;
    place.purge().await;

    let report = place.done(&["--since-lsn", &since, "--rate", "unlimited"]).await;
    println!("{} events in {} s", number(&report, "stored"), report["seconds"]);
    assert_eq!(number(&report, "stored"), lost.len() as u64, "{report:#}");
    place.has_exactly(&lost).await;
    let job = report["job"].as_str().unwrap();
    let ending = format!(":replay:{job}");
    assert!(place.messages().await.iter().all(|seen| seen.msg_id.ends_with(&ending)));

    // The receipt before the loss itself: it is taken whole, so that none is missing.
    place.purge().await;
    let last = "SELECT max(last_lsn)::text FROM outbox.receipt WHERE last_lsn < $1::text::pg_lsn";
    let last: String = place.client.query_one(last, &[&since]).await.unwrap().get(0);
    let report = place.done(&["--since-lsn", &last, "--rate", "unlimited"]).await;
    let all = place.world.committed().await.unwrap();
    let stored = number(&report, "stored");
    assert!(stored > lost.len() as u64 && stored < all.len() as u64, "{report:#}");
    let verdict = place.judge(&all).await;
    assert_eq!(verdict.missing.count as u64, all.len() as u64 - stored, "{verdict}");
    assert_eq!((verdict.copies.count, verdict.order_violations.count), (0, 0), "{verdict}");
    let verdict = place.judge(&lost).await;
    assert_eq!(verdict.missing.count, 0, "{verdict}");
}

/// Killed again and again, long after the server has forgotten every id.
#[tokio::test]
async fn killed_half_way_and_run_again_there_is_no_copy() {
    let mut place = Place::start().await;
    place.write(events()).await;
    let lost = place.since(0).await;
    let half = lost.len() as u64 / 2;
    place.purge().await;
    let arguments = ["--since-lsn", "0/0", "--job", "back", "--rate", "2000"];
    for part in [half / 4, half / 2, half] {
        let mut child = place.begin(&arguments);
        place.reach(part).await;
        child.kill().await.unwrap();
    }
    // The relay does not take the copies for its own messages, nor the other way round.
    place.world.relay.kill9().unwrap();
    place.world.start_relay().await.unwrap();
    let before = place.count().await;
    assert!(before < lost.len() as u64, "it was killed too late");
    let report = place.done(&["--job", "back", "--rate", "unlimited"]).await;
    assert_eq!(number(&report, "stored"), lost.len() as u64);
    place.has_exactly(&lost).await;

    // Once more: it is done.
    let again = place.done(&["--job", "back"]).await;
    assert_eq!(number(&again, "stored"), lost.len() as u64);
    place.has_exactly(&lost).await;
}

/// Ended in order: nothing is unknown, and it says how to go on.
#[tokio::test]
async fn ended_by_ctrl_c_it_says_how_to_go_on() {
    let place = Place::start().await;
    place.write(1_000).await;
    let lost = place.since(0).await;
    place.purge().await;
    let child = place.begin(&["--since-lsn", "0/0", "--job", "slow", "--rate", "200", "--json"]);
    place.reach(100).await;
    outboxd::sandbox::signal(child.id().unwrap(), Signal::Interrupt).unwrap();
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(output.status.code(), Some(130));
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("next: outboxd replay --job slow goes on"), "{words}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["state"], "stopped");
    assert_eq!(number(&report, "stored"), place.count().await);
    assert_eq!(number(&report, "left"), lost.len() as u64 - place.count().await);
    place.done(&["--job", "slow", "--rate", "unlimited"]).await;
    place.has_exactly(&lost).await;
}

/// What a relay had sent when it was killed is recorded by the next one, from the stream: the order of
/// runs is not lost with the memory of the first.
#[tokio::test]
async fn the_order_of_runs_outlives_kills_of_the_relay() {
    let mut place = Place::start().await;
    let what = outboxd::sandbox::Workload {
        events: 4_000,
        runs: 12,
        rate: Some(800),
        ..crate::support::workload()
    };
    let mut load = place.world.load(what);
    for part in [800, 1_600, 2_400] {
        load.reach(part).await;
        place.world.relay.kill9().unwrap();
        place.world.start_relay().await.unwrap();
    }
    load.finish().await.unwrap();
    place.recorded().await;
    let lost = place.since(0).await;
    place.has_exactly(&lost).await;
    let late = "SELECT coalesce(sum(cardinality(late_seqs)), 0)::bigint FROM outbox.receipt";
    let late: i64 = place.client.query_one(late, &[]).await.unwrap().get(0);
    println!("{late} of {} events behind a higher number of their run", lost.len());
    assert!(late > 0, "the load had no overlapping transactions");
    place.purge().await;
    place.done(&["--since-time", "1h", "--rate", "unlimited"]).await;
    place.has_exactly(&lost).await;
}

/// The broker loses its whole store: the relay goes on in a new stream, and what was in the old one
/// comes back beside it.
#[tokio::test]
async fn a_broker_that_lost_its_store_gets_its_events_back() {
    let mut place = Place::start().await;
    place.write(events()).await;
    let rows = place.world.committed().await.unwrap().len();
    let position = place.position().await.to_string();
    place.world.relay.terminate(SETTLE).await.unwrap();
    let nats = place.world.nats().unwrap();
    nats.stop().await.unwrap();
    std::fs::remove_dir_all(nats.store_dir()).unwrap();
    nats.restart().await.unwrap();
    place.world.relay.run(&["init", "--create-streams"]).await.unwrap();
    place.world.start_relay().await.unwrap();
    place.write(500).await;
    let lost: Vec<_> = place.since(0).await.into_iter().take(rows).collect();
    let kept = place.since(rows).await;

    // The first half of it into the stream as it is, then that one is lost as well.
    let arguments = ["--since-lsn", "0/0", "--until-lsn", &*position, "--job", "first"];
    let mut child = place.begin(&[&arguments[..], &["--rate", "1000"]].concat());
    place.reach(kept.len() as u64 + 200).await;
    child.kill().await.unwrap();
    place.world.relay.terminate(SETTLE).await.unwrap();
    let nats = place.world.nats().unwrap();
    nats.stop().await.unwrap();
    std::fs::remove_dir_all(nats.store_dir()).unwrap();
    nats.restart().await.unwrap();
    place.world.relay.run(&["init", "--create-streams"]).await.unwrap();
    place.world.start_relay().await.unwrap();
    let (code, report, words) = place.replay(&arguments).await;
    assert_eq!((code, &report["state"]), (1, &"replaced".into()), "{words}");
    assert!(words.contains("was made anew since job first began"), "{words}");

    let [.., job] = arguments;
    assert_eq!(job, "first");
    let arguments = [&arguments[..4], &["--job", "second", "--rate", "unlimited"]].concat();
    let report = place.done(&arguments).await;
    assert_eq!(number(&report, "stored"), lost.len() as u64);
    place.has_exactly(&lost).await;
}

/// A server that remembers ids swallows what it had from the same job: that is told, and not counted.
#[tokio::test]
async fn what_the_server_swallows_does_not_count_as_stored() {
    let create = "duplicate_window = \"2m\"".to_owned();
    assert_ne!(create, FORGETS);
    let place = Place::start_with(WorldOptions { create, ..options() }).await;
    place.write(500).await;
    let lost = place.since(0).await;
    place.purge().await;
    let all = ["--since-lsn", "0/0", "--job", "same"];
    let mut child = place.begin(&[&all[..], &["--rate", "200"]].concat());
    place.reach(100).await;
    child.kill().await.unwrap();
    // Somebody loses the job's record, and purges once more.
    place.client.batch_execute("DELETE FROM outbox.replay").await.unwrap();
    place.purge().await;
    let (code, report, words) = place.replay(&[&all[..], &["--rate", "unlimited"]].concat()).await;
    assert_eq!((code, &report["state"]), (1, &"finished".into()), "{words}");
    let (stored, duplicates) = (number(&report, "stored"), number(&report, "duplicates"));
    assert!(duplicates >= 100, "{report:#}");
    assert_eq!((stored + duplicates, stored), (lost.len() as u64, place.count().await));
}

/// The same with the messages still there: they are the job's, and count.
#[tokio::test]
async fn what_the_job_had_stored_before_counts_as_stored() {
    let place = Place::start_with(options()).await;
    place.write(300).await;
    let all = ["--since-lsn", "0/0", "--job", "same"];
    let before = place.count().await;
    let mut child = place.begin(&[&all[..], &["--rate", "200"]].concat());
    place.reach(before + 100).await;
    child.kill().await.unwrap();
    place.client.batch_execute("DELETE FROM outbox.replay").await.unwrap();
    let report = place.done(&[&all[..], &["--rate", "unlimited"]].concat()).await;
    assert_eq!((number(&report, "stored"), number(&report, "duplicates")), (before, 0));
    assert_eq!(place.count().await, 2 * before);
}

/// Three replicas, and their leader dies again and again while it is written to.
#[tokio::test]
async fn on_three_replicas_a_replay_outlives_their_leaders() {
    let mut place = Place::start_with(WorldOptions { cluster: true, ..options() }).await;
    place.write(2_000).await;
    let lost = place.since(0).await;
    place.purge().await;
    let child = place.begin(&["--since-lsn", "0/0", "--job", "three", "--rate", "300", "--json"]);
    for part in [300, 800, 1_300] {
        place.reach(part).await;
        let cluster = place.world.cluster().unwrap();
        let leader = cluster.wait_leader(outboxd::sandbox::STREAM).await.unwrap();
        cluster.kill9(leader).unwrap();
        cluster.restart(leader).await.unwrap();
    }
    let output = child.wait_with_output().await.unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(number(&report, "stored"), lost.len() as u64, "{report:#}\n{words}");
    assert_eq!(place.messages().await.len(), lost.len());
    let verdict = place.judge(&lost).await;
    assert!(verdict.is_ok(), "{verdict}\n{words}");
}
