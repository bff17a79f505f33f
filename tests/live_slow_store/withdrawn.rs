//! What is withdrawn when a stream lost its tail, and from where Resume reads then: acks come in any
//! order, a flush writes several receipts, and compaction merges them.

use outboxd::relay::outcome::Anchor;
use outboxd::store::Store;
use outboxd::store::ledger::{Receipt, ReceiptOutcome};
use tokio_postgres::Client;

use crate::{publish, ready, receipt, source, text};

const CREATED: &str = "2026-11-30T15:08:00.123456789Z";

/// A receipt of one number, with the last message of its flush and the floor after it.
fn flush(outcome: ReceiptOutcome, seq: i64, stream_seq: u64, floor: u64) -> Receipt {
    let stream_msg_id = format!("id{stream_seq}");
    Receipt { stream_seq, stream_msg_id, floor, ..receipt(outcome, &[(seq, seq)]) }
}

fn published(seq: i64, stream_seq: u64, floor: u64) -> Receipt {
    flush(ReceiptOutcome::Published, seq, stream_seq, floor)
}

/// The relay's own records, and where a sweep has come to.
async fn known(client: &Client, store: &Store) {
    let table = source("outbox", "event").table;
    outboxd::store::identity::read_or_create(client, "orders", &table, "1", 1).await.unwrap();
    store.ensure_destinations(client, &[("events", true)]).await.unwrap();
    publish(client, 9).await;
    client.batch_execute("UPDATE outbox.destination SET frontier = 9").await.unwrap();
}

/// Takes back what is behind a message: from where Resume reads then, and what is undecided.
async fn withdraw(client: &Client, store: &Store, upto: u64) -> (u64, String) {
    let upto = Anchor { seq: upto, id: format!("id{upto}") };
    store.withdraw(client, "events", CREATED, &upto).await.unwrap();
    let latest = store.latest(client, "events").await.unwrap().unwrap();
    assert_eq!(latest.anchor(), Some(upto));
    let undecided = text(client, "SELECT outbox.undecided('orders', 'events')::text").await;
    (latest.floor.seq, undecided)
}

/// Merges the receipts above `id`, as if they were an hour old and the others older.
async fn compact(client: &Client, id: i64) {
    let aged = format!(
        "UPDATE outbox.receipt SET recorded_at = date_bin('5 minutes', now() - interval '1 hour', \
             'epoch') + (id % 100) * interval '1 s' - (id <= {id})::int * interval '1 hour'"
    );
    client.batch_execute(&aged).await.unwrap();
    let merged = "SELECT merged::text FROM outbox.compact('orders', 'none', NULL)";
    assert_ne!(text(client, merged).await, "0");
}

/// The message of 2 is below that of 1, whose ack came first.
#[tokio::test]
async fn a_message_below_the_last_one_that_is_left_is_looked_for() {
    let (_postgres, client, store) = ready().await;
    known(&client, &store).await;
    let receipts = [published(0, 6, 6), published(1, 10, 8), published(2, 20, 20)];
    for one in receipts {
        store.append(&client, 1, &[one]).await.unwrap();
    }
    assert_eq!(withdraw(&client, &store, 10).await, (8, "{[2,3),[10,)}".into()));
    // What is lost now is in no receipt.
    assert_eq!(withdraw(&client, &store, 10).await, (8, "{[2,3),[10,)}".into()));
}

/// Resume found the message of 2, and wrote its receipt behind those of later messages.
#[tokio::test]
async fn what_resume_found_stands_behind_what_came_after_it() {
    let (_postgres, client, store) = ready().await;
    known(&client, &store).await;
    for one in [published(0, 5, 5), published(1, 12, 7), published(2, 9, 5), published(3, 20, 20)] {
        store.append(&client, 1, &[one]).await.unwrap();
    }
    assert_eq!(withdraw(&client, &store, 9).await, (5, "{[1,2),[3,4),[10,)}".into()));
}

/// The receipt before is of the same flush, and has its floor.
#[tokio::test]
async fn one_flush_has_one_floor() {
    let (_postgres, client, store) = ready().await;
    known(&client, &store).await;
    store.append(&client, 1, &[published(1, 10, 8)]).await.unwrap();
    let flush = [flush(ReceiptOutcome::Dead, 2, 20, 20), published(3, 20, 20)];
    store.append(&client, 1, &flush).await.unwrap();
    assert_eq!(withdraw(&client, &store, 10).await, (8, "{[3,4),[10,)}".into()));
}

/// The newest part of a merged receipt has not the last message of all.
#[tokio::test]
async fn a_merged_receipt_has_the_last_message_of_its_parts() {
    let (_postgres, client, store) = ready().await;
    known(&client, &store).await;
    for one in [published(0, 5, 5), published(1, 20, 6), published(2, 9, 5), published(3, 30, 30)] {
        store.append(&client, 1, &[one]).await.unwrap();
    }
    compact(&client, 0).await;
    let (floor, undecided) = withdraw(&client, &store, 15).await;
    assert_eq!((floor, undecided.as_str()), (0, "{[0,4),[10,)}"), "1 was at 20");
}

/// Receipts of rows that no WAL showed stand between those of others, and are merged by themselves.
#[tokio::test]
async fn a_merged_receipt_reaches_back_to_before_its_first_part() {
    let (_postgres, client, store) = ready().await;
    known(&client, &store).await;
    let seen = |receipt: Receipt| Receipt { first_lsn: receipt.last_lsn, ..receipt };
    for one in [
        seen(published(0, 4, 4)),
        seen(published(1, 10, 10)),
        published(2, 11, 11),
        published(3, 12, 12),
        seen(published(4, 20, 20)),
        seen(published(5, 30, 30)),
    ] {
        store.append(&client, 1, &[one]).await.unwrap();
    }
    compact(&client, 1).await;
    // 1 is in the stream at 5 to 10, and is taken back with 4, in whose receipt it is.
    assert_eq!(withdraw(&client, &store, 12).await, (4, "{[1,2),[4,6),[10,)}".into()));
}
