//! Compaction: fewer receipts, and everything that reads them finds the same.

use outboxd::lsn::Lsn;
use outboxd::store::Store;

use crate::place::{DAY, Place};

const RECEIPTS: &str = "SELECT count(*) FROM outbox.receipt";

/// A day of receipts: every ten seconds one, now and then another outcome, and gaps.
async fn a_day_of_receipts(place: &Place, days: u32) {
    place
        .sql(&format!(
            "INSERT INTO outbox.receipt (relay, destination, generation, outcome, seqs, events, \
                 first_lsn, last_lsn, stream, stream_created, stream_seq, stream_msg_id, floor_seq, \
                 recorded_at) \
             SELECT 'orders', d.name, 1, CASE n % 50 WHEN 7 THEN 'dead' ELSE 'published' END, \
                 CASE WHEN n % 90 = 3 THEN '{{}}' ELSE \
                     int8multirange(int8range(n * 10, n * 10 + 10 - n % 2)) END, 10, \
                 CASE WHEN n % 90 <> 3 THEN '0/0'::pg_lsn + n END, \
                 CASE WHEN n % 90 <> 3 THEN '0/0'::pg_lsn + n + 5 END, \
                 'EVENTS', 'then', n, 'id' || n, n, \
                 now() - interval '{days} days' + n * interval '10 s' \
             FROM generate_series(1, 3000) AS n, outbox.destination AS d ORDER BY n"
        ))
        .await;
}

/// Everything that the relay, a sweep and retention read of the ledger.
async fn readings(place: &Place) -> String {
    let store = Store::open(&place.client, "orders", &place.config.source).await.unwrap();
    let mut all = String::new();
    for from in [0, 1, 1_500, 2_999, 3_004, 9_999] {
        let mut found = std::collections::BTreeMap::new();
        for part in store.load(&place.client, Lsn(from)).await.unwrap() {
            let seqs: &mut outboxd::relay::ranges::RangeSet =
                found.entry(part.destination).or_default();
            seqs.extend(part.seqs);
        }
        // A merged receipt is read as long as any of its parts was, so it may bring more.
        let at_most = found.values().map(|seqs| seqs.iter().last()).collect::<Vec<_>>();
        all.push_str(&format!("{from}: {at_most:?}\n"));
        if from <= 1 {
            all.push_str(&format!("{found:?}\n"));
        }
    }
    for destination in ["events", "audit"] {
        all.push_str(&format!("{:?}\n", store.latest(&place.client, destination).await.unwrap()));
        let undecided = format!("SELECT outbox.undecided('orders', '{destination}')::text");
        all.push_str(&place.text(&undecided).await);
    }
    let sql = "SELECT outbox.settled('outbox.event', '1 hour')::text";
    all.push_str(&place.text(sql).await);
    let sums = "SELECT sum(events)::text || ' ' || min(first_lsn)::text || ' ' || max(last_lsn)::text \
                FROM outbox.receipt WHERE outcome <> 'gone'";
    all.push_str(&place.text(sums).await);
    all
}

#[tokio::test]
async fn merged_receipts_say_what_their_parts_said() {
    let place = Place::new().await;
    place.known().await;
    a_day_of_receipts(&place, 2).await;
    // A sweep has come as far as somewhere in the middle, with holes.
    place
        .sql(
            "UPDATE outbox.destination SET frontier = 16678, holes = '{[19,20),[39,40)}', \
                 receipt_id = 3333",
        )
        .await;
    place.receipt("events", "handed", "{[29000,29005),[40000,40002)}", 1.0).await;
    place.receipt("events", "published", "{[40000,40001)}", 0.5).await;
    let (before, all) = (readings(&place).await, place.number(RECEIPTS).await);
    let (_, summary) = place.pass(None).await;
    let left = place.number(RECEIPTS).await;
    println!("{all} receipts became {left}: {summary:?}");
    assert!(left < all / 15, "{left} of {all}");
    assert_eq!(u64::try_from(all - left).unwrap(), summary.receipts_merged);
    for (found, before) in readings(&place).await.lines().zip(before.lines()) {
        assert!(found == before, "{:.2000}\n{:.2000}", found, before);
    }
    // A receipt for five minutes, in the order of time, and once it is so it stays so.
    let per_slice = "SELECT max(n) FROM (SELECT count(*) AS n FROM outbox.receipt \
                     WHERE outcome = 'published' AND last_lsn IS NOT NULL \
                     GROUP BY destination, date_bin('5 minutes', recorded_at, 'epoch')) AS s";
    assert!(place.number(per_slice).await <= 2, "the newest of a destination is left alone");
    let inverted = "SELECT count(*) FROM (SELECT recorded_at - lag(recorded_at) OVER (\
                    PARTITION BY destination, outcome ORDER BY id) AS step FROM outbox.receipt) AS s \
                    WHERE step < interval '0'";
    assert_eq!(place.number(inverted).await, 0);
    // Five minutes that lay on the border of two statements are merged by the next pass.
    assert!(place.pass(None).await.1.receipts_merged < 10);
    assert_eq!(place.pass(None).await.1.receipts_merged, 0);
    for (found, before) in readings(&place).await.lines().zip(before.lines()) {
        assert!(found == before, "{found:.2000}\n{before:.2000}");
    }
}

#[tokio::test]
async fn young_receipts_are_left_alone() {
    let place = Place::new().await;
    place.known().await;
    for _ in 0..5 {
        place.receipt("events", "published", "{[1,2)}", 0.0).await;
    }
    assert_eq!(place.pass(None).await.1.receipts_merged, 0);
}

#[tokio::test]
async fn receipts_go_after_their_rows() {
    let place = Place::new().await;
    place.known().await;
    place.rows(6, 20).await;
    place.sql("UPDATE outbox.destination SET active = false WHERE name = 'audit'").await;
    for (seqs, days) in
        [("{[1,2)}", 9.0), ("{[2,3)}", 8.0), ("{[3,4)}", 7.0), ("{[4,6)}", 6.0), ("{[6,7)}", 0.5)]
    {
        place.receipt("events", "published", seqs, days).await;
    }
    place.receipt("events", "published", "{}", 0.1).await;
    // Partitions first: a transaction that is open would put them off.
    place.pass(None).await;
    let slot = "SELECT pg_create_logical_replication_slot('outboxd_orders', 'pgoutput')";
    place.sql(slot).await;
    // 2 is locked by somebody, so that it stays this time.
    let other = place.postgres.connect().await.unwrap();
    other.batch_execute("BEGIN; SELECT FROM outbox.event WHERE seq = 2 FOR UPDATE").await.unwrap();
    let receipts = "SELECT string_agg(seqs::text, ' ' ORDER BY id) FROM outbox.receipt";

    // No sweep has them in its frontier yet.
    let (_, summary) = place.pass(Some(DAY)).await;
    assert_eq!((summary.rows, summary.receipts_deleted), (4, 0));
    // The slot could bring one of them again.
    place.sql("UPDATE outbox.destination SET frontier = 6, receipt_id = 5").await;
    place.sql("UPDATE outbox.receipt SET last_lsn = 'FFFFFFFF/0' WHERE seqs = '{[3,4)}'").await;
    let (_, summary) = place.pass(Some(DAY)).await;
    assert_eq!(summary.receipts_deleted, 2);
    assert_eq!(place.text(receipts).await, "{[2,3)} {[3,4)} {[6,7)} {}");
    other.batch_execute("COMMIT").await.unwrap();
    let (_, summary) = place.pass(Some(DAY)).await;
    assert_eq!((summary.rows, summary.receipts_deleted), (1, 1));
    place.sql("SELECT pg_drop_replication_slot('outboxd_orders')").await;
    assert_eq!(place.pass(Some(DAY)).await.1.receipts_deleted, 1);
    assert_eq!(place.text(receipts).await, "{[6,7)} {}");

    // The newest has the floor, however old.
    place.sql("UPDATE outbox.receipt SET recorded_at = now() - interval '99 days'").await;
    place.sql("UPDATE outbox.destination SET receipt_id = 99").await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 1);
    assert_eq!(place.text(receipts).await, "{}");
}

#[tokio::test]
async fn what_waits_is_never_forgotten() {
    let place = Place::new().await;
    place.known().await;
    place.sql("UPDATE outbox.destination SET frontier = 99, receipt_id = 99").await;
    place.receipt("events", "handed", "{[1,4)}", 9.0).await;
    place.receipt("events", "handed", "{[4,6)}", 9.0).await;
    place.receipt("events", "published", "{[1,3)}", 8.0).await;
    place.receipt("events", "gone", "{[4,6)}", 8.0).await;
    place.receipt("events", "published", "{[90,91)}", 7.0).await;
    let undecided = "SELECT outbox.undecided('orders', 'events')::text";
    assert_eq!(place.text(undecided).await, "{[3,4),[100,)}");
    // No row is there, everything is old: what makes handed numbers final stays with them.
    place.pass(Some(DAY)).await;
    assert_eq!(place.text(undecided).await, "{[3,4),[100,)}");
    let receipts = "SELECT string_agg(outcome || seqs::text, ' ' ORDER BY id) FROM outbox.receipt";
    assert_eq!(place.text(receipts).await, "handed{[1,4)} published{[1,3)} published{[90,91)}");
    place.receipt("events", "published", "{[3,4)}", 0.0).await;
    place.pass(Some(DAY)).await;
    assert_eq!(place.text(undecided).await, "{[100,)}");
    assert_eq!(place.text(receipts).await, "published{[3,4)}");
}
