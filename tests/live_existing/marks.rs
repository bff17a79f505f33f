//! Rows that show that they are done: by a column, or by their absence. The ledger stays the truth.

use std::time::Duration;

use crate::place::{JSON, Place};
use crate::support::look::{self, metric, until};
use crate::support::{SETTLE, log_tail};

/// How many rows are there, and how many of them have no mark.
async fn rows(place: &Place) -> (i64, i64) {
    let sql = "SELECT count(*), count(*) FILTER (WHERE published_at IS NULL) FROM app.\"Outbox\"";
    let row = place.client().await.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

async fn become_rows(place: &Place, expected: (i64, i64)) {
    until("marks", SETTLE, || async {
        let found = rows(place).await;
        let words = || format!("{found:?}, not {expected:?}\n{}", log_tail(&place.world));
        (found == expected).then_some(()).ok_or_else(words)
    })
    .await;
}

/// Marked behind the receipts, also after a crash in between, and when what was handed over arrives;
/// dead letters too. A row that somebody has locked is marked when it is free, and no other waits.
#[tokio::test]
async fn a_column_says_what_is_done() {
    let relay = "max_retained_wal = \"16MiB\"\nsweep_interval = \"1s\"";
    let mut place = Place::with(JSON, relay, "mark = \"column\"").await;
    place.world.start_relay().await.unwrap();
    place.write(&["a", "b"], 1_200).await;
    place.settle().await;
    become_rows(&place, (2_400, 0)).await;

    let client = place.client().await;
    let lock = "BEGIN; SELECT FROM app.\"Outbox\" WHERE \"No\" = 2405 FOR UPDATE";
    place.world.relay.kill9().unwrap();
    place.write(&["a", "b"], 10).await;
    client.batch_execute(lock).await.unwrap();
    place.world.start_relay().await.unwrap();
    place.all_in_stream().await;
    become_rows(&place, (2_420, 1)).await;
    place.write(&["a", "b"], 5).await;
    become_rows(&place, (2_430, 1)).await;
    client.batch_execute("COMMIT").await.unwrap();
    become_rows(&place, (2_430, 0)).await;

    let poison = "INSERT INTO app.\"Outbox\" (event_id, aggregate, \"event type\", body) \
                  VALUES (gen_random_uuid(), 'x', '', '{}')";
    client.batch_execute(poison).await.unwrap();
    become_rows(&place, (2_431, 0)).await;

    place.world.nats().unwrap().kill9().unwrap();
    place.write(&["a", "c"], 20).await;
    let written = look::wal_end(&client).await;
    look::noise(&client, 24, Duration::from_secs(2)).await;
    until("the position passes what NATS has not", SETTLE, || async {
        let confirmed = look::confirmed(&client).await;
        (confirmed >= written).then_some(()).ok_or_else(|| log_tail(&place.world))
    })
    .await;
    // Waiting is not done.
    assert_eq!(rows(&place).await, (2_471, 40));
    place.world.nats().unwrap().restart().await.unwrap();
    become_rows(&place, (2_471, 0)).await;
    place.settle().await;
    assert!(metric(&place.world, "outboxd_marked_rows_total", "").await.unwrap() > 40.0);

    // After an orderly stop there is nothing that the table does not say.
    place.write(&["a"], 200).await;
    place.all_in_stream().await;
    place.world.relay.terminate(SETTLE).await.unwrap();
    assert_eq!(rows(&place).await, (2_671, 0));
    let faults: i64 = client
        .query_one("SELECT count(*) FROM outbox.destination WHERE marked_receipt = 0", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(faults, 0);
}

/// Rows go when every destination has them, the optional ones too: what is handed over for one that is
/// away needs its row.
#[tokio::test]
async fn rows_that_are_done_go() {
    let mut away = outboxd::sandbox::Nats::start().await.unwrap();
    let more = format!(
        "[destination.archive]\nservers = [\"{}\"]\nstream = \"ARCHIVE\"\nrequired = false\n\
         subject = \"archive.{{kind}}\"",
        away.url()
    );
    let relay = "max_retained_wal = \"16MiB\"\nsweep_interval = \"1s\"";
    let mut place = Place::with_more(JSON, relay, "mark = \"delete\"", &more).await;
    place.world.start_relay().await.unwrap();
    place.write(&["a", "b"], 600).await;
    place.settle().await;
    become_rows(&place, (0, 0)).await;

    away.kill9().unwrap();
    place.write(&["a", "b"], 20).await;
    let client = place.client().await;
    let written = look::wal_end(&client).await;
    look::noise(&client, 24, Duration::from_secs(2)).await;
    until("the position passes what the archive has not", SETTLE, || async {
        let confirmed = look::confirmed(&client).await;
        (confirmed >= written).then_some(()).ok_or_else(|| log_tail(&place.world))
    })
    .await;
    place.all_in_stream().await;
    assert_eq!(rows(&place).await.0, 40);
    // A crash: what one destination had, and the other had not, is known from the ledger.
    place.world.relay.kill9().unwrap();
    place.world.start_relay().await.unwrap();
    away.restart().await.unwrap();
    become_rows(&place, (0, 0)).await;
    place.settle().await;
    let archived = outboxd::sandbox::stream::state(&away.connect().await.unwrap(), "ARCHIVE").await;
    assert_eq!(archived.unwrap().messages, 1_240);

    // The rows are gone: what the ledger says keeps the next start from sending anything again.
    place.world.relay.kill9().unwrap();
    place.write(&["a"], 5).await;
    place.world.start_relay().await.unwrap();
    place.settle().await;
    become_rows(&place, (0, 0)).await;
}
