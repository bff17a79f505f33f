//! What was handed over and is not final yet.

use std::collections::HashMap;

use outboxd::event::RunHash;
use outboxd::lsn::Lsn;
use outboxd::store::ledger::{Receipt, ReceiptOutcome, Recorded};
use outboxd::store::waiting::{Waiter, Waiting};

use crate::{below, dice, ready, receipt, text};

fn run(seq: i64) -> RunHash {
    RunHash::of_seq(seq)
}

fn handed(seqs: &[i64], last_lsn: u64) -> Receipt {
    let ranges: Vec<(i64, i64)> = seqs.iter().map(|seq| (*seq, *seq)).collect();
    Receipt {
        late: vec![],
        handed: seqs.iter().map(|seq| (*seq, run(*seq))).collect(),
        events: u64::try_from(seqs.len()).unwrap(),
        last_lsn: Some(Lsn(last_lsn)),
        ..receipt(ReceiptOutcome::Handed, &ranges)
    }
}

fn waiter(seq: i64, until: u64, receipt_id: i64) -> Waiter {
    Waiter { seq, run: run(seq), until: Lsn(until), receipt_id }
}

#[tokio::test]
async fn handed_numbers_wait_in_commit_order_until_a_later_receipt_has_them() {
    let (_postgres, client, store) = ready().await;
    let nothing = store.waiting(&client, "events", 0, 10).await.unwrap();
    assert_eq!(nothing, Waiting { entries: vec![], last_id: 0, complete: true });

    let first = [
        // Final before it was handed over: no word about what came after.
        receipt(ReceiptOutcome::Published, &[(4, 4)]),
        handed(&[7, 4, 5], 100),
        receipt(ReceiptOutcome::Published, &[(5, 6)]),
        handed(&[6, 9, 8], 200),
        Receipt { destination: "audit".into(), ..receipt(ReceiptOutcome::Dead, &[(1, 100)]) },
    ];
    let ids = store.append(&client, 1, &first).await.unwrap();
    assert!(ids.is_sorted() && ids.len() == 5);
    let waiting = store.waiting(&client, "events", 0, 10).await.unwrap();
    let (first, second) = ((100, ids[1]), (200, ids[3]));
    let entries = [(7, first), (4, first), (6, second), (9, second), (8, second)];
    assert_eq!(waiting.entries, entries.map(|(seq, (until, id))| waiter(seq, until, id)));
    assert_eq!((waiting.last_id, waiting.complete), (ids[3], true));
    assert_eq!(store.waiting(&client, "events", ids[1], 10).await.unwrap().entries.len(), 3);

    // Every final outcome ends the waiting.
    for (outcome, seq) in [
        (ReceiptOutcome::Dead, 7),
        (ReceiptOutcome::Gone, 4),
        (ReceiptOutcome::Unmatched, 9),
        (ReceiptOutcome::Published, 8),
    ] {
        store.append(&client, 1, &[receipt(outcome, &[(seq, seq)])]).await.unwrap();
    }
    let waiting = store.waiting(&client, "events", 0, 10).await.unwrap();
    assert_eq!(waiting.entries, [waiter(6, 200, ids[3])]);

    // Nothing of it is final by itself: not for the WAL that is read again.
    let recorded = store.load(&client, Lsn::ZERO).await.unwrap();
    let is_final = |r: &&Recorded| r.destination == "events" && !r.handed;
    let seqs: Vec<_> = recorded.iter().filter(is_final).collect();
    assert_eq!(seqs[0].seqs, [(4, 9)]);
    let arrays = "SELECT handed_seqs::text || handed_runs::text FROM outbox.receipt \
                  WHERE outcome = 'handed' ORDER BY id LIMIT 1";
    let runs = [run(7), run(4), run(5)].map(|run| run.signed().to_string());
    assert_eq!(text(&client, arrays).await, format!("{{7,4,5}}{{{}}}", runs.join(",")));
    let other = "SELECT count(*)::text FROM outbox.receipt \
                 WHERE outcome <> 'handed' AND (handed_seqs, handed_runs) IS NOT NULL";
    assert_eq!(text(&client, other).await, "0");
}

/// Receipts at random; read page by page it must be what a plain map says.
#[tokio::test]
async fn pages_of_whole_receipts_hold_what_waits() {
    let (_postgres, client, store) = ready().await;
    let mut dice = dice();
    for round in 0..10 {
        client.batch_execute("DELETE FROM outbox.receipt").await.unwrap();
        let mut receipts = Vec::new();
        for _ in 0..below(&mut dice, 60) {
            let first = below(&mut dice, 400);
            let mut seqs: Vec<i64> = (first..=first + below(&mut dice, 12)).collect();
            if dice.percent(40) {
                seqs.reverse();
                receipts.push(handed(&seqs, dice.below(1_000)));
            } else {
                let ranges = [(first, first + 2), (first + 6, first + 9)];
                receipts.push(receipt(ReceiptOutcome::Published, &ranges));
            }
        }
        let ids = store.append(&client, 1, &receipts).await.unwrap();
        let mut final_at: HashMap<i64, i64> = HashMap::new();
        let mut expected = Vec::new();
        for (receipt, id) in receipts.iter().zip(&ids).rev() {
            for (seq, _) in receipt.handed.iter().rev() {
                if !final_at.contains_key(seq) {
                    expected.push(waiter(*seq, receipt.last_lsn.unwrap().0, *id));
                }
            }
            if receipt.outcome != ReceiptOutcome::Handed {
                let seqs = receipt.seqs.iter().flat_map(|(first, last)| *first..=*last);
                final_at.extend(seqs.map(|seq| (seq, *id)));
            }
        }
        expected.reverse();

        let (mut found, mut after, mut pages) = (Vec::new(), 0, 0);
        let limit = 1 + below(&mut dice, 40);
        loop {
            let limit = usize::try_from(limit).unwrap();
            let page = store.waiting(&client, "events", after, limit).await.unwrap();
            let handed: Vec<_> = receipts
                .iter()
                .zip(&ids)
                .filter(|(receipt, id)| {
                    !receipt.handed.is_empty() && (after + 1..=page.last_id).contains(*id)
                })
                .collect();
            let numbers: usize = handed.iter().map(|(receipt, _)| receipt.handed.len()).sum();
            assert!(numbers <= limit || handed.len() == 1, "round {round}: {numbers} of {limit}");
            found.extend(page.entries);
            pages += 1;
            if page.complete {
                break;
            }
            assert!(page.last_id > after);
            after = page.last_id;
        }
        assert_eq!(found, expected, "round {round} in {pages} pages");
    }
}

#[tokio::test]
async fn a_long_ledger_behind_it_is_read_once() {
    let (_postgres, client, store) = ready().await;
    let seqs: Vec<i64> = (1..=20_000).collect();
    store.append(&client, 1, &[handed(&seqs, 5)]).await.unwrap();
    // All numbers but each tenth, 100,000 receipts.
    client
        .batch_execute(
            "INSERT INTO outbox.receipt (relay, generation, destination, outcome, seqs, events, \
                 stream, stream_created, stream_seq, stream_msg_id, floor_seq)
             SELECT 'orders', 1, 'events', 'published',
                    int8multirange(int8range(n * 10 + 1, n * 10 + 9, '[]')), 9, 's', 'c', 1, 'x', 1
             FROM generate_series(0, 99999) AS n",
        )
        .await
        .unwrap();
    let start = std::time::Instant::now();
    let waiting = store.waiting(&client, "events", 0, 100_000).await.unwrap();
    let seqs: Vec<i64> = waiting.entries.iter().map(|waiter| waiter.seq).collect();
    assert_eq!(seqs, (1..=2_000).map(|n| n * 10).collect::<Vec<_>>());
    // A second on an idle machine; receipts times numbers would take minutes.
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}
