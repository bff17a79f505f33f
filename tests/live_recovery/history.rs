//! What a start makes of messages whose events the database may not know: after a promotion or a restore
//! the sequence goes on behind the numbers that are lost, the ledger may be older than the slot, and
//! in another cluster positions say nothing.

use std::collections::HashSet;

use outboxd::sandbox::{STREAM, World};
use serde_json::Value;
use tokio_postgres::Client;

use crate::support::look::until;
use crate::support::{SETTLE, log_tail};
use crate::{WATCHED, gap_closed, judge, not_ready, plan, write};

/// A world whose relay was stopped in order, after twenty events that the ledger has.
async fn stopped() -> (World, Client) {
    let (world, client) = plan::stopped().await;
    assert_eq!(world.recorded("events").await.unwrap().len(), 20);
    (world, client)
}

/// The ledger is as it was when it had fifteen of them, and the stream was compared on an earlier
/// timeline. The slot, and the sequence, are further.
const OLDER: &str = "\
    UPDATE outbox.receipt SET seqs = seqs * '{(,15]}', floor_seq = least(floor_seq, 15), \
        stream_seq = least(stream_seq, 15), stream_msg_id = ''; \
    UPDATE outbox.destination SET frontier = least(frontier, 15), \
        compared_in = split_part(compared_in, '/', 1) || '/0'";

async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Five events are lost with the old primary. Their numbers look as if they had been given: the sequence's
/// record in the WAL is up to 32 numbers ahead. And the WAL is further than they were.
#[tokio::test]
async fn lost_events_whose_numbers_look_given() {
    let (mut world, client) = stopped().await;
    let lost = "DELETE FROM outbox.event WHERE seq > 15 RETURNING id";
    let lost: HashSet<String> =
        client.query(lost, &[]).await.unwrap().iter().map(|row| id(row.get(0))).collect();
    client.batch_execute(OLDER).await.unwrap();
    world.relay.start().unwrap();
    not_ready(&world, &["history-lost", "5 messages"]).await;
    tokio::time::sleep(WATCHED).await;
    assert_eq!(world.messages().await.unwrap().len(), 20, "{}", log_tail(&world));
    world.relay.terminate(SETTLE).await.unwrap();
    let output = world.relay.output(&["recover", "--yes", "--json"]).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let orphans = report["destinations"][0]["orphans"].as_array().unwrap();
    let listed: HashSet<String> =
        orphans.iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(listed, lost);
    write(&client, &["a"], 21, 5).await;
    world.start_relay().await.unwrap();
    until("the new history", SETTLE, || async {
        let verdict = world.judge(&[]).await.unwrap();
        (verdict.missing.count == 0).then_some(()).ok_or_else(|| format!("{verdict}"))
    })
    .await;
}

fn id(id: uuid::Uuid) -> String {
    id.to_string()
}

/// A transaction that is about to commit what the stream has already is waited for.
#[tokio::test]
async fn a_row_that_is_about_to_be_seen() {
    let (mut world, client) = stopped().await;
    client.batch_execute(OLDER).await.unwrap();
    let writer = world.postgres.connect().await.unwrap();
    let away = "BEGIN; CREATE TEMP TABLE kept AS SELECT * FROM outbox.event WHERE seq > 15";
    writer.batch_execute(away).await.unwrap();
    client.batch_execute("DELETE FROM outbox.event WHERE seq > 15").await.unwrap();
    let back = "INSERT INTO outbox.event SELECT * FROM kept";
    writer.batch_execute(back).await.unwrap();
    world.relay.start().unwrap();
    until("it waits", SETTLE, || async {
        let told = world.relay.log().contains("waiting until the transactions have ended");
        told.then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    assert_eq!(world.messages().await.unwrap().len(), 20);
    writer.batch_execute("COMMIT").await.unwrap();
    world.relay.wait_ready(SETTLE).await.unwrap();
    write(&client, &["a"], 21, 5).await;
    judge(&world, 25).await;
}

/// A slot that was copied to the standby can be ahead of the ledger that it got: no WAL brings what
/// stands between, and the stream has it.
#[tokio::test]
async fn a_slot_that_is_ahead_of_the_ledger() {
    let (mut world, client) = stopped().await;
    client.batch_execute(OLDER).await.unwrap();
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 11, 5).await;
    judge(&world, 30).await;
    gap_closed(&world, &client).await;
    assert!(world.relay.log().contains("events=5 "), "{}", log_tail(&world));
    let compared = "SELECT count(*) FROM outbox.destination JOIN outbox.relay r ON r.name = relay \
                    WHERE compared_in = system_identifier || '/' || timeline";
    assert_eq!(number(&client, compared).await, 1);
}

/// What a message says of its position was true in the cluster that a dump was taken from. Its row is
/// gone since, and the receipt is there.
#[tokio::test]
async fn a_position_of_another_cluster() {
    let (mut world, client) = stopped().await;
    let broker = world.broker.connect().await.unwrap();
    let jetstream = async_nats::jetstream::new(broker);
    let stream = jetstream.get_stream(STREAM).await.unwrap();
    let first = stream.get_raw_message(1).await.unwrap();
    let mut headers = first.headers.clone();
    headers.insert("Outbox-Lsn", "FFFF/0");
    jetstream
        .publish_with_headers(first.subject, headers, first.payload)
        .await
        .unwrap()
        .await
        .unwrap();
    let gone = "DELETE FROM outbox.event WHERE seq = 1; \
                UPDATE outbox.destination SET compared_in = '1/1'";
    client.batch_execute(gone).await.unwrap();
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 11, 5).await;
    until("new events", SETTLE, || async {
        let messages = world.messages().await.unwrap().len();
        (messages == 31).then_some(()).ok_or_else(|| format!("{messages}\n{}", log_tail(&world)))
    })
    .await;
    let (status, body) = world.relay.get("/readyz").await.unwrap();
    assert_eq!(status, 200, "{body}");
}
