//! The order in which runs were published, as receipts have it: also when they are merged, and when an
//! event was published twice.

use outboxd::config::Filter;
use outboxd::lsn::Lsn;
use outboxd::store::history::Continuity;
use outboxd::store::ledger::{Receipt, ReceiptOutcome};
use outboxd::store::replay::select::{self, Selection};
use outboxd::store::replay::{Job, Tally};
use tokio_postgres::Client;

use crate::{publish, ready, receipt, source, text};

/// Numbers that the WAL showed, or the table alone; some behind another one.
fn decided(seqs: &[i64], late: &[(i64, i64)], seen: bool) -> Receipt {
    let ranges: Vec<(i64, i64)> = seqs.iter().map(|seq| (*seq, *seq)).collect();
    let first_lsn = seen.then_some(Lsn(10));
    Receipt { late: late.to_vec(), first_lsn, ..receipt(ReceiptOutcome::Published, &ranges) }
}

/// The numbers as a replay would publish them.
async fn order(client: &Client) -> Vec<i64> {
    let job = Job {
        name: "job".into(),
        destination: "events".into(),
        selection: Selection::default(),
        seqs: vec![(1, 9)],
        done: vec![],
        planned: 9,
        tally: Tally::default(),
        floor: Default::default(),
        stream_seq: 0,
        finished: false,
    };
    let source = source("outbox", "event");
    select::open(client, "orders", &source, &Filter::default(), &job).await.unwrap();
    let next = select::next(client, 100).await.unwrap();
    client.batch_execute("CLOSE ALL").await.unwrap();
    next.into_iter().map(|(seq, _)| seq).collect()
}

/// Writes them, an hour ago; the order before and after compaction, and how many are left.
async fn told(receipts: &[Receipt]) -> (Vec<i64>, Vec<i64>, String) {
    let (_postgres, client, store) = ready().await;
    let table = source("outbox", "event").table;
    outboxd::store::identity::read_or_create(&client, "orders", &table, "1", 1).await.unwrap();
    publish(&client, 9).await;
    for one in receipts {
        store.append(&client, 1, std::slice::from_ref(one)).await.unwrap();
    }
    // The newest is left alone.
    store.append(&client, 1, &[decided(&[], &[], true)]).await.unwrap();
    let before = order(&client).await;
    let aged = "UPDATE outbox.receipt SET recorded_at = date_bin('5 minutes', \
                now() - interval '1 hour', 'epoch') + (id % 100) * interval '1 s'";
    client.batch_execute(aged).await.unwrap();
    client.batch_execute("SELECT outbox.compact('orders', 'none', NULL)").await.unwrap();
    let left = text(&client, "SELECT count(*)::text FROM outbox.receipt").await;
    (before, order(&client).await, left)
}

/// 2 was published with its neighbours, and once more after a loss.
#[tokio::test]
async fn a_copy_does_not_move_an_event() {
    let all: Vec<i64> = (1..=9).collect();
    let (before, after, left) =
        told(&[decided(&all, &[], true), decided(&[2, 3], &[(2, 9), (3, 9)], true)]).await;
    assert_eq!((before, after), (all.clone(), all));
    assert_eq!(left, "2");
}

/// Receipts of rows that no WAL showed stand between others.
#[tokio::test]
async fn exceptions_keep_their_order_when_receipts_are_merged() {
    let receipts = [
        decided(&[1, 2, 3, 9], &[], true),
        decided(&[5], &[(5, 9)], false),
        decided(&[4], &[(4, 9)], true),
        decided(&[6], &[(6, 9)], false),
        decided(&[8, 7], &[(8, 9), (7, 9)], false),
    ];
    let (before, after, left) = told(&receipts).await;
    assert_eq!(before, [1, 2, 3, 9, 5, 4, 6, 8, 7]);
    assert_eq!(after, before);
    assert_eq!(left, "5", "the last two are one");
}

/// A ledger that is ahead of its outbox forgets the numbers that were not given, also as those behind
/// which others went.
#[tokio::test]
async fn numbers_of_a_lost_history_are_behind_nothing() {
    let (_postgres, client, store) = ready().await;
    let table = source("outbox", "event").table;
    outboxd::store::identity::read_or_create(&client, "orders", &table, "1", 1).await.unwrap();
    store.ensure_destinations(&client, &[("events", true)]).await.unwrap();
    let receipts = [
        decided(&[1, 2, 3, 4, 9], &[(2, 3), (4, 9)], true),
        decided(&[7], &[(7, 9)], true),
        decided(&[5], &[(5, 9)], true),
    ];
    store.append(&client, 1, &receipts).await.unwrap();
    let ahead = Continuity::Ahead { known: 9, last: 5 };
    store.begin_generation(&client, 2, ("1", 1), &ahead, &[]).await.unwrap();
    assert_eq!(store.highest(&client, "events").await.unwrap(), 5);
    let late = "SELECT string_agg(coalesce(late_seqs::text || late_behind::text, '-'), ' ' ORDER BY id) \
                FROM outbox.receipt";
    assert_eq!(text(&client, late).await, "{2,4}{3,5} - {5}{5}");
}
