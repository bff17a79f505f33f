//! Up to which number everything is decided, and the marker that the WAL brings back.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use outboxd::config::{ColumnMap, QualifiedName};
use outboxd::decode::{Decoded, Decoder};
use outboxd::lsn::Lsn;
use outboxd::sandbox::{Postgres, PostgresOptions};
use outboxd::store::Store;
use outboxd::store::destinations::Progress;
use outboxd::store::sweep::parse_marker;
use outboxd::store::{publication, schema, slot};
use tokio_postgres::Client;

use crate::{connect, publish, ready, source, text};

const PUBLISH: &str = "SELECT outbox.publish('r', 'k', '{}')";

/// The transaction of a session as pg_locks names it.
async fn transaction(client: &Client) -> String {
    let own = "SELECT virtualtransaction FROM pg_locks \
               WHERE pid = pg_backend_pid() AND locktype = 'virtualxid'";
    text(client, own).await
}

#[tokio::test]
async fn whoever_may_still_commit_a_number_is_seen() {
    let (postgres, client, store) = ready().await;
    let sessions = async || postgres.connect().await.unwrap();
    let (root, partition, taken_back) = (sessions().await, sessions().await, sessions().await);
    let (reader, elsewhere, indexer) = (sessions().await, sessions().await, sessions().await);
    client.batch_execute("CREATE TABLE public.elsewhere (a int)").await.unwrap();
    for (session, sql) in [
        (&root, PUBLISH),
        (&partition, "INSERT INTO outbox.event_default (run_id, kind) VALUES ('r', 'k')"),
        (&reader, "SELECT FROM outbox.event"),
        (&elsewhere, "INSERT INTO public.elsewhere VALUES (1)"),
        (&indexer, "LOCK TABLE outbox.event_default IN SHARE UPDATE EXCLUSIVE MODE"),
        // Its number is void already.
        (&taken_back, "SAVEPOINT a; SELECT outbox.publish('r', 'k', '{}'); ROLLBACK TO a"),
    ] {
        session.batch_execute(&format!("BEGIN; {sql}")).await.unwrap();
    }
    let expected = BTreeSet::from([transaction(&root).await, transaction(&partition).await]);

    let mark = store.mark_frontier(&client).await.unwrap();
    assert_eq!(mark.last, 3);
    assert_eq!(BTreeSet::from_iter(mark.open.clone()), expected);
    assert_eq!(store.still_open(&client, &mark.open).await.unwrap(), mark.open);

    // Those that come later are of later numbers.
    let later = sessions().await;
    later.batch_execute(&format!("BEGIN; {PUBLISH}")).await.unwrap();
    partition.batch_execute("ROLLBACK").await.unwrap();
    let left = [transaction(&root).await];
    assert_eq!(store.still_open(&client, &mark.open).await.unwrap(), left);

    // A prepared transaction has no session, and the name that it had.
    root.batch_execute("PREPARE TRANSACTION 'p'").await.unwrap();
    drop(root);
    assert_eq!(store.still_open(&client, &mark.open).await.unwrap(), left);
    assert!(store.mark_frontier(&client).await.unwrap().open.contains(&left[0]));

    client.batch_execute("COMMIT PREPARED 'p'").await.unwrap();
    assert_eq!(store.still_open(&client, &mark.open).await.unwrap(), [""; 0]);
    let progress =
        Progress { name: "events".into(), frontier: 0, holes: vec![], receipt_id: 0, gap: None };
    let look = store.look(&client, &progress, mark.last, &[], 100).await.unwrap();
    assert_eq!((look.undecided, look.covered_to), (vec![1], 3));
}

#[tokio::test]
async fn our_own_session_and_partitions_of_partitions() {
    let (postgres, client, store) = ready().await;
    client
        .batch_execute(
            "CREATE TABLE outbox.event_2020 PARTITION OF outbox.event \
                 FOR VALUES FROM ('2020-01-01') TO ('2021-01-01') PARTITION BY LIST (kind);
             CREATE TABLE outbox.event_2020_k PARTITION OF outbox.event_2020 DEFAULT",
        )
        .await
        .unwrap();
    let old = "BEGIN; INSERT INTO outbox.event_2020_k (run_id, kind, created_at) \
               VALUES ('r', 'k', '2020-02-02')";
    client.batch_execute(old).await.unwrap();
    assert_eq!(store.mark_frontier(&client).await.unwrap().open, [""; 0]);
    client.batch_execute("COMMIT").await.unwrap();
    let writer = postgres.connect().await.unwrap();
    writer.batch_execute(old).await.unwrap();
    let mark = store.mark_frontier(&client).await.unwrap();
    assert_eq!((mark.last, mark.open), (2, vec![transaction(&writer).await]));
}

/// Writers commit and roll back at random; whenever all that were open at a mark are gone, the
/// numbers up to it are settled for ever.
#[tokio::test]
async fn below_a_mark_nothing_appears_any_more() {
    let (postgres, client, store) = ready().await;
    let mut writers = Vec::new();
    let end = Instant::now() + Duration::from_secs(2);
    for writer in 0..4 {
        let session = postgres.connect().await.unwrap();
        writers.push(tokio::spawn(async move {
            for turn in 0.. {
                if Instant::now() > end {
                    break;
                }
                let how = if (turn + writer) % 3 == 0 { "ROLLBACK" } else { "COMMIT" };
                let sql = format!("BEGIN; {PUBLISH}; SELECT pg_sleep(0.002); {PUBLISH}; {how}");
                session.batch_execute(&sql).await.unwrap();
            }
        }));
    }
    let rows = async |to: i64| {
        let sql = "SELECT count(*) FROM outbox.event WHERE seq <= $1";
        client.query_one(sql, &[&to]).await.unwrap().get::<_, i64>(0)
    };
    let (mut settled, mut waited) = (Vec::new(), 0);
    while Instant::now() < end {
        let mark = store.mark_frontier(&client).await.unwrap();
        let mut open = mark.open;
        while !open.is_empty() {
            waited += 1;
            open = store.still_open(&client, &open).await.unwrap();
        }
        settled.push((mark.last, rows(mark.last).await));
    }
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(waited > 10 && settled.len() > 10, "{waited} {}", settled.len());
    for (last, count) in settled {
        assert_eq!(rows(last).await, count, "rows up to {last} appeared after it was settled");
    }
}

#[tokio::test]
async fn the_stream_brings_the_marker_after_what_was_seen() {
    let (_postgres, client, store) = ready().await;
    publication::create(&client, "outboxd_orders", &source("outbox", "event").table).await.unwrap();
    slot::create(&client, "outboxd_orders", false).await.unwrap();
    publish(&client, 2).await;
    let lsn = store.marker(&client, "7-1").await.unwrap();
    publish(&client, 1).await;

    let table = QualifiedName { schema: "outbox".into(), name: "event".into() };
    let mut decoder = Decoder::new(table, ColumnMap::default());
    let sql = "SELECT data FROM pg_logical_slot_peek_binary_changes('outboxd_orders', NULL, NULL, \
               'proto_version', '1', 'publication_names', 'outboxd_orders', 'binary', 'true', \
               'messages', 'true')";
    let (mut commit, mut before, mut after, mut markers) = (Lsn::ZERO, 0, 0, 0);
    for row in client.query(sql, &[]).await.unwrap() {
        match decoder.decode(row.get(0)).unwrap() {
            Decoded::Begin { commit_lsn, .. } => commit = commit_lsn,
            Decoded::Event(_) if markers == 0 => {
                assert!(commit < lsn);
                before += 1;
            }
            Decoded::Event(_) => {
                assert!(commit > lsn);
                after += 1;
            }
            Decoded::Message { transactional, prefix, content, .. } => {
                assert!(transactional);
                assert_eq!(parse_marker(&prefix, &content), Some(("orders", "7-1")));
                assert!(commit >= lsn);
                markers += 1;
            }
            Decoded::Commit { .. } | Decoded::Truncate { .. } | Decoded::Other => {}
        }
    }
    assert_eq!((before, markers, after), (2, 1, 1));
}

/// Without a slot the relay works on a server of any `wal_level`, with its few rights.
#[tokio::test]
async fn any_wal_level_and_the_granted_rights_are_enough() {
    for level in ["replica", "minimal"] {
        let options =
            PostgresOptions::default().set("wal_level", level).set("max_wal_senders", "0");
        let postgres = Postgres::start_with(options).await.unwrap();
        let client = postgres.connect().await.unwrap();
        schema::migrate(&client, schema::Payload::Json).await.unwrap();
        client.batch_execute("CREATE ROLE relay LOGIN").await.unwrap();
        let source = source("outbox", "event");
        let grants = schema::relay_grants("relay", &source.table, true);
        client.batch_execute(&grants.join("\n")).await.unwrap();
        let relay = connect(&postgres.url_of("relay", "postgres")).await;
        let store = Store::open(&relay, "orders", &source).await.unwrap();

        let found = store.ensure_destinations(&relay, &[("events", true)]).await.unwrap();
        publish(&client, 3).await;
        let mark = store.mark_frontier(&relay).await.unwrap();
        assert!(mark.open.is_empty());
        let look = store.look(&relay, &found[0], mark.last, &[], 10).await.unwrap();
        assert_eq!(look.undecided, [1, 2, 3]);
        assert_eq!(store.rows(&relay, &look.undecided).await.unwrap().len(), 3);
        let now = "SELECT pg_current_wal_insert_lsn()::text";
        let before: Lsn = text(&client, now).await.parse().unwrap();
        let lsn = store.marker(&relay, "1").await.unwrap();
        assert!(before <= lsn && lsn <= text(&client, now).await.parse().unwrap());
        store.open_gap(&relay, &["events"]).await.unwrap();
        let to = Progress { frontier: mark.last, receipt_id: look.receipt_id, ..found[0].clone() };
        store.advance(&relay, &to).await.unwrap();
        store.close_gap(&relay, "events").await.unwrap();
        assert!(store.waiting(&relay, "events", 0, 10).await.unwrap().complete);
    }
}
