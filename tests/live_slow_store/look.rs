//! What a look at the table finds, and what it costs.

use std::collections::BTreeSet;

use outboxd::store::Store;
use outboxd::store::destinations::Progress;
use outboxd::store::ledger::{Receipt, ReceiptOutcome};
use outboxd::store::sweep::{AFTER_LOOK, BEFORE_LOOK, look_sql};
use tokio_postgres::types::ToSql;

use crate::{below, dice, publish, ready, receipt, source};

fn progress(frontier: i64, holes: &[(i64, i64)], receipt_id: i64) -> Progress {
    let name = "events".into();
    Progress { name, frontier, holes: holes.to_vec(), receipt_id, gap: None }
}

fn numbers(ranges: &[(i64, i64)]) -> BTreeSet<i64> {
    ranges.iter().flat_map(|(first, last)| *first..=*last).collect()
}

const OUTCOMES: [ReceiptOutcome; 5] = [
    ReceiptOutcome::Published,
    ReceiptOutcome::Dead,
    ReceiptOutcome::Unmatched,
    ReceiptOutcome::Gone,
    ReceiptOutcome::Handed,
];

/// Random rows, receipts, holes and held numbers against sets of numbers.
#[tokio::test]
async fn a_look_finds_the_rows_without_a_receipt() {
    let (_postgres, client, store) = ready().await;
    let mut dice = dice();
    const LAST: i64 = 300;
    publish(&client, LAST).await;
    let partition = "CREATE TABLE outbox.event_2020 PARTITION OF outbox.event \
                     FOR VALUES FROM ('2020-01-01') TO ('2021-01-01')";
    client.batch_execute(partition).await.unwrap();
    client
        .batch_execute(
            "UPDATE outbox.event SET created_at = '2020-02-02' WHERE seq % 3 = 0;
             DELETE FROM outbox.event WHERE seq % 7 = 0",
        )
        .await
        .unwrap();
    let ranges = |dice: &mut _, count: i64| -> Vec<(i64, i64)> {
        let one = |_| {
            let first = 1 + below(dice, LAST);
            (first, first + below(dice, 12))
        };
        (0..count).map(one).collect()
    };
    let mut found_any = 0;
    for _ in 0..40 {
        client.batch_execute("DELETE FROM outbox.receipt").await.unwrap();
        let mut recorded: Vec<(i64, Receipt)> = Vec::new();
        for _ in 0..below(&mut dice, 12) {
            let count = below(&mut dice, 4);
            let outcome = OUTCOMES[usize::try_from(below(&mut dice, 5)).unwrap()];
            let receipt = receipt(outcome, &ranges(&mut dice, count));
            let ids = store.append(&client, 1, std::slice::from_ref(&receipt)).await.unwrap();
            recorded.push((ids[0], receipt));
        }
        let other = Receipt { destination: "audit".into(), ..receipt(OUTCOMES[0], &[(1, LAST)]) };
        store.append(&client, 1, &[other]).await.unwrap();

        let frontier = below(&mut dice, LAST);
        let to = frontier + below(&mut dice, LAST);
        let count = below(&mut dice, 6);
        let holes: Vec<_> = ranges(&mut dice, count)
            .into_iter()
            .filter(|(first, _)| *first <= frontier)
            .map(|(first, last)| (first, last.min(frontier)))
            .collect();
        let count = below(&mut dice, 4);
        let held = ranges(&mut dice, count);
        let skipped = usize::try_from(below(&mut dice, 4)).unwrap().min(recorded.len());
        let receipt_id = skipped.checked_sub(1).map_or(0, |last| recorded[last].0);

        // Never below a receipt that it saw: with that one the number would be undecided for ever.
        let ends = recorded[skipped..].iter().flat_map(|(_, receipt)| &receipt.seqs);
        let upto = ends.map(|(_, last)| *last).max().unwrap_or(0).max(to);
        let mut expected = numbers(&holes);
        expected.extend(frontier + 1..=upto);
        let left_out = recorded[skipped..].iter().flat_map(|(_, receipt)| numbers(&receipt.seqs));
        let recorded_later: BTreeSet<i64> = left_out.collect();
        let mut still_held = numbers(&held);
        still_held.retain(|seq| expected.contains(seq) && !recorded_later.contains(seq));
        let left_out: BTreeSet<i64> = recorded_later.union(&numbers(&held)).copied().collect();
        expected.retain(|seq| !left_out.contains(seq) && *seq <= LAST && seq % 7 != 0);
        let expected: Vec<i64> = expected.into_iter().collect();
        found_any += usize::from(!expected.is_empty());

        let progress = progress(frontier, &holes, receipt_id);
        let look = store.look(&client, &progress, to, &held, 1_000).await.unwrap();
        assert_eq!(look.undecided, expected, "{progress:?} {to} {held:?} {recorded:?}");
        assert_eq!((look.covered_to, look.to), (upto, upto));
        assert_eq!(numbers(&look.held), still_held, "{progress:?} {to} {held:?} {recorded:?}");
        let open = numbers(&look.open);
        assert!(expected.iter().all(|seq| open.contains(seq)) && open.is_disjoint(&left_out));
        assert_eq!(look.receipt_id, recorded.last().map_or(0, |(id, _)| *id).max(receipt_id));

        let limit = 1 + usize::try_from(below(&mut dice, 20)).unwrap();
        let look = store.look(&client, &progress, to, &held, limit).await.unwrap();
        let first = &expected[..limit.min(expected.len())];
        assert_eq!(look.undecided, first);
        let cut = expected.len() >= limit;
        assert_eq!(look.covered_to, if cut { *first.last().unwrap() } else { upto });
    }
    assert!(found_any > 10);
}

#[tokio::test]
async fn a_sequence_that_went_back_gives_nothing_to_look_at() {
    let (_postgres, client, store) = ready().await;
    publish(&client, 5).await;
    let look = store.look(&client, &progress(100, &[(2, 3)], 0), 4, &[], 10).await.unwrap();
    assert_eq!((look.undecided, look.covered_to), (vec![2, 3], 100));
}

/// Pages that the look reads, with the statement, the setting and the parameters that it uses.
async fn pages(client: &tokio_postgres::Client, table: &str, values: Progress, to: i64) -> i64 {
    let (holes, held) = (outboxd::store::sql::multirange(&values.holes), "{}");
    let Progress { name, frontier, receipt_id, .. } = &values;
    let parameters: [&(dyn ToSql + Sync); 8] =
        [&"orders", name, receipt_id, &holes, frontier, &to, &held, &LIMIT];
    client.batch_execute(BEFORE_LOOK).await.unwrap();
    let sql = look_sql(&source("outbox", table));
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}");
    let row = client.query_one(&explain, &parameters).await.unwrap();
    client.batch_execute(AFTER_LOOK).await.unwrap();
    let plan: serde_json::Value = row.get(0);
    let of = |name: &str| plan[0]["Plan"][name].as_i64().unwrap();
    of("Shared Hit Blocks") + of("Shared Read Blocks")
}

const LIMIT: i64 = 5_000;

#[tokio::test]
async fn a_look_walks_the_index_and_stops_at_the_limit() {
    let (_postgres, client, store) = ready().await;
    // What autovacuum would find out is what the planner must not need.
    client
        .batch_execute(
            "ALTER TABLE outbox.event_default SET (autovacuum_enabled = off);
             INSERT INTO outbox.event (run_id, kind) SELECT 'r', 'k' FROM generate_series(1, 200000)",
        )
        .await
        .unwrap();
    let idle = pages(&client, "event", progress(200_000, &[], 0), 200_000).await;
    assert!(idle < 10, "{idle} pages for nothing");
    // 5,000 rows and their entries in the index are on about 100 pages; all rows are on 2,700.
    let all = pages(&client, "event", progress(0, &[], 0), 200_000).await;
    assert!((20..200).contains(&all), "{all} pages for {LIMIT} of 200,000 rows");
    let holes: Vec<_> = (1..=2_000).map(|n| (n * 100, n * 100)).collect();
    let holes = pages(&client, "event", progress(200_000, &holes, 0), 200_000).await;
    assert!((2_000..12_000).contains(&holes), "{holes} pages for 2,000 holes");

    let limit = usize::try_from(LIMIT).unwrap();
    let look = store.look(&client, &progress(0, &[], 0), 200_000, &[], limit).await.unwrap();
    assert_eq!((look.undecided.len(), look.covered_to), (limit, LIMIT));
    let setting = client.query_one("SHOW enable_sort", &[]).await.unwrap();
    assert_eq!(setting.get::<_, &str>(0), "on", "only the look goes without sorts");
}

#[tokio::test]
async fn ten_thousand_holes_are_looked_up() {
    let (_postgres, client, _) = ready().await;
    let table = source("outbox", "event");
    let store = Store::open(&client, "orders", &table).await.unwrap();
    publish(&client, 20_000).await;
    let holes: Vec<_> = (1..=10_000).map(|n| (n * 2, n * 2)).collect();
    let look = store.look(&client, &progress(20_000, &holes, 0), 20_000, &[], 20_000).await;
    let expected: Vec<i64> = (1..=10_000).map(|n| n * 2).collect();
    assert_eq!(look.unwrap().undecided, expected);
}
