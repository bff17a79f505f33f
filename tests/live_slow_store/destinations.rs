//! Rows of `outbox.destination`.

use outboxd::error::Kind;
use outboxd::event::RunHash;
use outboxd::store::Store;
use outboxd::store::destinations::Progress;
use outboxd::store::ledger::{Receipt, ReceiptOutcome};
use outboxd::store::schema;

use crate::{connect, publish, ready, receipt, source, text};

fn begun(name: &str, frontier: i64, receipt_id: i64) -> Progress {
    Progress { name: name.into(), frontier, holes: vec![], receipt_id, gap: None }
}

fn come(name: &str, frontier: i64, holes: &[(i64, i64)], receipt_id: i64) -> Progress {
    Progress { holes: holes.to_vec(), ..begun(name, frontier, receipt_id) }
}

/// Which version of each row there is: changes with every write.
const VERSIONS: &str = "\
    SELECT coalesce(string_agg(name || ' ' || active || ' ' || required || ' ' || ctid::text || ' ' \
               || xmin::text, ', ' ORDER BY name), '') \
    FROM outbox.destination";

#[tokio::test]
async fn a_destination_begins_with_what_is_written_from_now_on() {
    let (_postgres, client, store) = ready().await;
    let first = store.ensure_destinations(&client, &[("events", true)]).await.unwrap();
    assert_eq!(first, [begun("events", 0, 0)]);
    publish(&client, 3).await;
    store.append(&client, 1, &[receipt(ReceiptOutcome::Published, &[(1, 3)])]).await.unwrap();
    let both = [("audit", false), ("events", true)];
    let found = store.ensure_destinations(&client, &both).await.unwrap();
    assert_eq!(found, [begun("audit", 3, 0), begun("events", 0, 0)]);
    // A number that was drawn in vain counts as well. Receipts of before are about numbers of before.
    client.batch_execute("SELECT nextval('outbox.event_seq')").await.unwrap();
    client.batch_execute("DELETE FROM outbox.destination WHERE name = 'events'").await.unwrap();
    let found = store.ensure_destinations(&client, &both).await.unwrap();
    assert_eq!(found, [begun("audit", 3, 0), begun("events", 4, 1)]);
    assert_eq!(store.progress(&client, &["events", "none"]).await.unwrap(), found[1..]);
}

/// A row that is written and not committed when a destination begins is in no slot's reach where there
/// is none: the beginning waits for it, so that nothing that commits later is below.
#[tokio::test]
async fn without_a_slot_a_destination_begins_behind_those_who_write() {
    let (postgres, client, store) = ready().await;
    let writer = postgres.connect().await.unwrap();
    writer.batch_execute("BEGIN; SELECT outbox.publish('r', 'k', '{}')").await.unwrap();
    let begin = async || store.begin_destinations(&client, &[("events", true)]).await.unwrap();
    let waited = tokio::time::timeout(std::time::Duration::from_millis(600), begin()).await;
    assert!(waited.is_err(), "{waited:?}");
    assert_eq!(store.progress(&client, &["events"]).await.unwrap(), []);
    // Written while it waits: above its beginning.
    let (begun, ()) = tokio::join!(begin(), async {
        publish(&client, 2).await;
        writer.batch_execute("COMMIT").await.unwrap();
    });
    assert!(begun[0].frontier >= 1 && begun[0].frontier <= 3, "{begun:?}");
    // Nobody to wait for.
    assert_eq!(begin().await, begun);
}

#[tokio::test]
async fn nothing_is_written_when_nothing_changes() {
    let (_postgres, client, store) = ready().await;
    let other = Store::open(&client, "other", &source("outbox", "event")).await.unwrap();
    other.ensure_destinations(&client, &[("events", true)]).await.unwrap();
    client.batch_execute("DELETE FROM outbox.destination").await.unwrap();
    let both = [("events", true), ("audit", false)];
    store.ensure_destinations(&client, &both).await.unwrap();
    store.advance(&client, &come("events", 9, &[(2, 3)], 7)).await.unwrap();
    store.open_gap(&client, &["events"]).await.unwrap();
    let before = text(&client, VERSIONS).await;
    assert!(before.starts_with("audit true false (0,"), "{before}");
    store.ensure_destinations(&client, &both).await.unwrap();
    store.advance(&client, &come("events", 9, &[(2, 3)], 7)).await.unwrap();
    store.open_gap(&client, &["events"]).await.unwrap();
    store.close_gap(&client, "audit").await.unwrap();
    assert_eq!(text(&client, VERSIONS).await, before);
}

#[tokio::test]
async fn destinations_come_and_go_and_keep_their_place() {
    let (_postgres, client, store) = ready().await;
    let other = Store::open(&client, "other", &source("outbox", "event")).await.unwrap();
    other.ensure_destinations(&client, &[("audit", true)]).await.unwrap();
    store.ensure_destinations(&client, &[("events", true), ("audit", true)]).await.unwrap();
    store.advance(&client, &come("audit", 9, &[(2, 3), (4, 4), (7, 7)], 7)).await.unwrap();
    store.ensure_destinations(&client, &[("events", false)]).await.unwrap();
    let of = async |relay: &str| {
        let sql = "SELECT string_agg(name || ' ' || active || ' ' || required, ', ' ORDER BY name) \
                   FROM outbox.destination WHERE relay = $1";
        client.query_one(sql, &[&relay]).await.unwrap().get::<_, String>(0)
    };
    assert_eq!(of("orders").await, "audit false true, events true false");
    assert_eq!(of("other").await, "audit true true", "another relay's are none of ours");
    let found = store.ensure_destinations(&client, &[("audit", true)]).await.unwrap();
    // What was committed while it was away is a gap.
    let (holes, gap) = (vec![(2, 4), (7, 7)], Some(0));
    assert_eq!(found, [Progress { holes, gap, ..begun("audit", 9, 7) }]);
    assert_eq!(of("orders").await, "audit true true, events false false");
    assert_eq!(store.ensure_destinations(&client, &[]).await.unwrap(), []);
    assert_eq!(of("orders").await, "audit false true, events false false");
}

#[tokio::test]
async fn a_gap_keeps_the_time_at_which_it_opened() {
    let (_postgres, client, store) = ready().await;
    store.ensure_destinations(&client, &[("events", true), ("audit", true)]).await.unwrap();
    store.open_gap(&client, &["events"]).await.unwrap();
    let since = "SELECT gap_since::text FROM outbox.destination WHERE name = 'events'";
    let opened = text(&client, since).await;
    store.open_gap(&client, &["audit", "events"]).await.unwrap();
    assert_eq!(text(&client, since).await, opened);
    let gaps = async || {
        let found = store.progress(&client, &["events", "audit"]).await.unwrap();
        found.iter().map(|each| each.gap).collect::<Vec<_>>()
    };
    assert_eq!(gaps().await, [Some(0), Some(0)]);
    store.close_gap(&client, "events").await.unwrap();
    assert_eq!(gaps().await, [None, Some(0)]);
    // What is handed over by then goes ahead of what a new gap leaves out.
    store.append(&client, 1, &[receipt(ReceiptOutcome::Published, &[(1, 3)])]).await.unwrap();
    store.open_gap(&client, &["events", "audit"]).await.unwrap();
    assert_eq!(gaps().await, [Some(1), Some(0)]);
}

/// Of two gaps, one in the other: what the slot between them brought is neither ahead of the first
/// gap's rows nor behind the second one's. Both are looked up in the order of their numbers.
#[tokio::test]
async fn what_was_handed_over_in_a_gap_is_undecided_when_another_opens() {
    let (_postgres, client, store) = ready().await;
    store.ensure_destinations(&client, &[("events", true), ("audit", true)]).await.unwrap();
    publish(&client, 9).await;
    let handed = |destination: &str, seqs: &[i64]| Receipt {
        destination: destination.into(),
        handed: seqs.iter().map(|seq| (*seq, RunHash::of_run(b"run"))).collect(),
        ..receipt(ReceiptOutcome::Handed, &[(seqs[0], seqs[seqs.len() - 1])])
    };
    store.append(&client, 1, &[handed("events", &[1, 2])]).await.unwrap();
    store.open_gap(&client, &["events"]).await.unwrap();
    // 3 is missing; a part of what was handed over is sent; the frontier has passed most of it.
    let later = [handed("events", &[4, 5, 6]), handed("events", &[7, 8]), handed("audit", &[4])];
    store.append(&client, 1, &later).await.unwrap();
    store.append(&client, 1, &[receipt(ReceiptOutcome::Published, &[(5, 5)])]).await.unwrap();
    store.advance(&client, &come("events", 7, &[(3, 3)], 5)).await.unwrap();
    let floor = store.latest(&client, "events").await.unwrap().unwrap();
    let undecided = "SELECT outbox.undecided('orders', 'events')::text";
    let before = text(&client, undecided).await;

    store.open_gap(&client, &["events"]).await.unwrap();
    let waiting = async |destination: &str| -> Vec<i64> {
        let waiting = store.waiting(&client, destination, 0, 100).await.unwrap();
        waiting.entries.iter().map(|waiter| waiter.seq).collect()
    };
    assert_eq!(waiting("events").await, [1, 2], "older than either gap");
    assert_eq!(waiting("audit").await, [4], "of another destination");
    let progress = store.progress(&client, &["events"]).await.unwrap().remove(0);
    assert_eq!((&progress.holes[..], progress.gap), (&[(3, 4), (6, 7)][..], Some(1)));
    let look = store.look(&client, &progress, 9, &[], 100).await.unwrap();
    assert_eq!(look.undecided, [3, 4, 6, 7, 8, 9]);
    assert_eq!(text(&client, undecided).await, before, "nothing is decided by it");
    assert_eq!(store.latest(&client, "events").await.unwrap().unwrap(), floor);
}

#[tokio::test]
async fn the_sequence_is_that_of_the_table() {
    let (postgres, client, _) = ready().await;
    let rest = "id uuid, run_id text, kind text, payload json, tenant text, version int, \
                headers jsonb, created_at timestamptz";
    client
        .batch_execute(&format!(
            "CREATE SCHEMA app;
             CREATE TABLE app.identity (seq bigint GENERATED ALWAYS AS IDENTITY, {rest});
             CREATE TABLE app.\"Serial\" (seq bigserial, {rest});
             CREATE SEQUENCE app.shared START 100;
             CREATE TABLE app.drawn (seq bigint DEFAULT nextval('app.shared'), {rest});
             CREATE TABLE app.plain (seq bigint, {rest});
             INSERT INTO app.identity (kind) VALUES ('a'), ('b');
             INSERT INTO app.\"Serial\" (kind) VALUES ('a');
             INSERT INTO app.drawn (kind) VALUES ('a'), ('b');"
        ))
        .await
        .unwrap();
    let open = async |table: &str| Store::open(&client, "r", &source("app", table)).await.unwrap();
    for (table, last) in [("identity", 2), ("Serial", 1), ("drawn", 101)] {
        assert_eq!(open(table).await.last_number(&client).await.unwrap(), last, "{table}");
    }
    let refused = open("plain").await.last_number(&client).await.unwrap_err();
    assert_eq!(refused.kind, Kind::TableShape, "{refused}");

    // A sequence that was set and has given nothing since says nothing about what it gave before.
    client.batch_execute("SELECT setval('app.shared', 500, false)").await.unwrap();
    assert_eq!(open("drawn").await.last_number(&client).await.unwrap(), 101);

    client.batch_execute("CREATE ROLE relay LOGIN").await.unwrap();
    let table = source("app", "drawn").table;
    client.batch_execute(&schema::relay_grants("relay", &table, true).join("\n")).await.unwrap();
    let relay = connect(&postgres.url_of("relay", "postgres")).await;
    let store = Store::open(&relay, "r", &source("app", "drawn")).await.unwrap();
    let refused = store.ensure_destinations(&relay, &[("events", true)]).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Privilege);
    assert!(refused.detail.contains("sequence app.shared"), "{refused}");
    client.batch_execute("GRANT SELECT ON SEQUENCE app.shared TO relay").await.unwrap();
    let found = store.ensure_destinations(&relay, &[("events", true)]).await.unwrap();
    assert_eq!(found, [begun("events", 101, 0)]);
}
