//! A primary that is lost while its standby lacks what it has committed.

use std::time::Duration;

use outboxd::sandbox::{STREAM, Stop, stream};
use serde_json::Value;
use tokio_postgres::Client;

use crate::place::{Place, not_ready, servers};
use crate::support::look::{publish, until};
use crate::support::{SETTLE, log_tail};

/// Nothing was published for so long.
const WATCHED: Duration = Duration::from_secs(3);

async fn count(place: &Place) -> u64 {
    stream::state(&place.world.broker.connect().await.unwrap(), STREAM).await.unwrap().messages
}

/// Twenty events that the standby has, and a session whose commits don't wait for it.
async fn begun(place: &mut Place) -> Client {
    let client = place.world.postgres.connect().await.unwrap();
    for n in 1..=20 {
        publish(&client, "a", "k", n).await;
    }
    place.world.settle(SETTLE).await.unwrap();
    client.batch_execute("SET synchronous_commit = local").await.unwrap();
    client
}

/// The standby gets no WAL from now on.
async fn cut(place: &mut Place, client: &Client) {
    place.other.configure("primary_conninfo", "host=127.0.0.1 port=1").unwrap();
    place.other.reload().unwrap();
    until("the standby is cut off", SETTLE, || async {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'standby'";
        let left: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (left == 0).then_some(()).ok_or_else(|| "it is there".to_owned())
    })
    .await;
}

/// What the standby has not got is held back, for as long as that lasts, and after a promotion it has
/// never been.
#[tokio::test]
async fn what_a_listed_standby_lacks_is_not_published() {
    let test = "what_a_listed_standby_lacks_is_not_published";
    let Some(servers) = servers(test, "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.guard().await;
    let client = begun(&mut place).await;
    cut(&mut place, &client).await;
    for n in 21..=30 {
        publish(&client, "a", "k", n).await;
    }
    tokio::time::sleep(WATCHED).await;
    assert_eq!(count(&place).await, 20, "{}", log_tail(&place.world));
    drop(client);
    place.fail_over(Stop::Immediate).await;
    let client = place.world.postgres.connect().await.unwrap();
    for n in 21..=25 {
        publish(&client, "a", "k", n).await;
    }
    place.judge_events(25).await;
}

/// Before PostgreSQL 17 nothing holds it back: the relay refuses to go on, and `recover` lists it.
#[tokio::test]
async fn what_only_the_lost_primary_had_is_listed() {
    let Some(servers) = servers("what_only_the_lost_primary_had_is_listed", "16") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    let client = begun(&mut place).await;
    cut(&mut place, &client).await;
    let mut lost = Vec::new();
    for n in 21..=30 {
        lost.push(publish(&client, "a", "k", n).await.to_string());
    }
    until("published", SETTLE, || async {
        let count = count(&place).await;
        (count == 30).then_some(()).ok_or_else(|| format!("{count}"))
    })
    .await;
    drop(client);
    place.fail_over(Stop::Immediate).await;
    not_ready(&place.world, &["history-lost"]).await;
    place.world.relay.terminate(SETTLE).await.unwrap();
    let output = place.world.relay.output(&["recover", "--yes", "--json"]).await.unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let orphans = report["destinations"][0]["orphans"].as_array().unwrap();
    let mut listed: Vec<_> = orphans.iter().map(|one| one["id"].as_str().unwrap()).collect();
    listed.sort_unstable();
    lost.sort_unstable();
    assert_eq!(listed, lost);
    let client = place.world.postgres.connect().await.unwrap();
    for n in 21..=25 {
        publish(&client, "a", "k", n).await;
    }
    place.world.start_relay().await.unwrap();
    until("the new history", SETTLE, || async {
        let verdict = place.world.judge(&[]).await.unwrap();
        (verdict.missing.count == 0).then_some(()).ok_or_else(|| format!("{verdict}"))
    })
    .await;
    let verdict = place.world.judge(&[]).await.unwrap();
    assert_eq!((verdict.copies.count, verdict.order_violations.count), (0, 0), "{verdict}");
    // The message that tells consumers is none of an event.
    assert_eq!(verdict.phantoms.count, lost.len() + 1, "{verdict}");
}
