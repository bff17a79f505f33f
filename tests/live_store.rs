//! The statements of `store/` on a real server: schema, ledger, dead letters, lock, identity.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::sync::Arc;

use bytes::Bytes;
use outboxd::config::{ColumnMap, QualifiedName, SourceConfig};
use outboxd::error::Kind;
use outboxd::event::{Event, EventId, Reason, RunHash, UnixMicros};
use outboxd::lsn::{Lsn, Position};
use outboxd::relay::outcome::Floor;
use outboxd::sandbox::Postgres;
use outboxd::store::dead_letters::DeadLetter;
use outboxd::store::ledger::{Receipt, ReceiptOutcome, Recorded};
use outboxd::store::schema::Payload;
use outboxd::store::{Store, identity, lock, publication, schema, shape};
use tokio_postgres::{Client, NoTls};

fn source() -> SourceConfig {
    SourceConfig {
        url: String::new().into(),
        replication_url: None,
        slot: "outboxd_orders".into(),
        publication: "outboxd_orders".into(),
        table: QualifiedName { schema: "outbox".into(), name: "event".into() },
        columns: ColumnMap::default(),
        mark: Default::default(),
        connect_timeout: std::time::Duration::from_secs(10),
    }
}

async fn ready(postgres: &Postgres) -> (Client, Store) {
    let client = postgres.connect().await.unwrap();
    schema::migrate(&client, Payload::Json).await.unwrap();
    let store = Store::open(&client, "orders", &source()).await.unwrap();
    (client, store)
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(async { connection.await.is_ok() });
    client
}

async fn text(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

fn published(seqs: &[(i64, i64)], last_lsn: Option<u64>, floor: u64) -> Receipt {
    Receipt {
        destination: "events".into(),
        outcome: ReceiptOutcome::Published,
        seqs: seqs.to_vec(),
        late: vec![],
        handed: vec![],
        events: 1,
        unmatched: 0,
        first_lsn: last_lsn.map(Lsn),
        last_lsn: last_lsn.map(Lsn),
        stream: "EVENTS".into(),
        stream_created: "2026-11-30T15:08:00.123456789Z".into(),
        stream_seq: floor,
        stream_msg_id: "id".into(),
        floor,
    }
}

fn event(seq: i64) -> Event {
    Event {
        seq,
        position: Some(Position { commit_lsn: Lsn(0x1_0000_0010), index: 2 }),
        id: EventId::Int(seq),
        run: Some(Bytes::from_static(b"run\0\xff")),
        run_hash: RunHash::of_seq(seq),
        kind: Bytes::from_static(b"order.created\r\n"),
        tenant: None,
        version: Some(3),
        payload: Some(Bytes::from_static(b"\0\xff'\"")),
        headers: Some(Bytes::from_static(br#"{"a":"\r\n"}"#)),
        created_at: Some(UnixMicros(i64::MAX)),
        committed_at: Some(UnixMicros(1_000_001)),
        fault: None,
    }
}

#[tokio::test]
async fn migrating_twice_changes_nothing() {
    let postgres = Postgres::start().await.unwrap();
    let client = postgres.connect().await.unwrap();
    assert_eq!(schema::version(&client).await.unwrap(), None);
    let missing = Store::open(&client, "orders", &source()).await.unwrap_err();
    assert_eq!(missing.kind, Kind::SchemaMissing);
    assert_eq!(schema::migrate(&client, Payload::Json).await.unwrap(), [1]);
    assert_eq!(schema::migrate(&client, Payload::Json).await.unwrap(), [0; 0]);
    assert_eq!(schema::version(&client).await.unwrap(), Some(schema::VERSION));
    client.execute("INSERT INTO outbox.schema_version VALUES (1000)", &[]).await.unwrap();
    for refused in [
        schema::require(&client).await.unwrap_err(),
        schema::migrate(&client, Payload::Json).await.unwrap_err(),
    ] {
        assert_eq!(refused.kind, Kind::SchemaVersion);
        assert!(refused.detail.contains("1000"), "{refused}");
    }
}

#[tokio::test]
async fn a_migration_that_fails_leaves_nothing() {
    let postgres = Postgres::start().await.unwrap();
    let client = postgres.connect().await.unwrap();
    client.batch_execute("CREATE SCHEMA outbox; CREATE TABLE outbox.relay ()").await.unwrap();
    let refused = schema::migrate(&client, Payload::Json).await.unwrap_err();
    assert!(refused.detail.contains("\"relay\" already exists"), "{refused}");
    assert_eq!(schema::version(&client).await.unwrap(), None);
}

#[tokio::test]
async fn every_payload_type_makes_a_schema_and_publish_takes_it() {
    let postgres = Postgres::start().await.unwrap();
    let client = postgres.connect().await.unwrap();
    for (payload, name) in [
        (Payload::Json, "json"),
        (Payload::Jsonb, "jsonb"),
        (Payload::Bytea, "bytea"),
        (Payload::Text, "text"),
    ] {
        schema::migrate(&client, payload).await.unwrap();
        let publish = format!("SELECT outbox.publish('r', 'k', '{{}}'::{name})::text");
        text(&client, &publish).await;
        let found = text(&client, "SELECT pg_typeof(payload)::text FROM outbox.event").await;
        assert_eq!(found, name);
        client.batch_execute("DROP SCHEMA outbox CASCADE").await.unwrap();
    }
}

#[tokio::test]
async fn writers_need_execute_only_and_choose_no_number() {
    let postgres = Postgres::start().await.unwrap();
    let (client, _) = ready(&postgres).await;
    client.batch_execute("CREATE ROLE writer LOGIN").await.unwrap();
    client.batch_execute(&schema::writer_grants("writer").join("\n")).await.unwrap();
    let writer = connect(&postgres.url_of("writer", "postgres")).await;
    let id = text(&writer, "SELECT outbox.publish('r', 'k', '{\"a\" : 1}')::text").await;
    let given = "00000000-0000-0000-0000-000000000001";
    let publish = format!(
        "SELECT outbox.publish(kind => 'k', run_id => 'r', payload => NULL, id => '{given}', \
         tenant => 't', version => 2, headers => '{{\"h\": \"v\"}}')::text"
    );
    assert_eq!(text(&writer, &publish).await, given);
    let rows = client.query("SELECT seq, id::text FROM outbox.event ORDER BY seq", &[]).await;
    let rows: Vec<(i64, String)> =
        rows.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(rows, [(1, id), (2, given.into())]);
    for forbidden in [
        "INSERT INTO outbox.event (run_id, kind) VALUES ('r', 'k')",
        "SELECT nextval('outbox.event_seq')",
        "SELECT setval('outbox.event_seq', 100)",
        "SELECT FROM outbox.event",
        "DELETE FROM outbox.receipt",
    ] {
        let error = writer.batch_execute(forbidden).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "42501", "{forbidden}");
    }
}

#[tokio::test]
async fn a_relay_role_needs_its_grants_only() {
    let postgres = Postgres::start().await.unwrap();
    let (client, _) = ready(&postgres).await;
    client.batch_execute("CREATE ROLE relay LOGIN").await.unwrap();
    client
        .batch_execute(&schema::relay_grants("relay", &source().table, true).join("\n"))
        .await
        .unwrap();
    let relay = connect(&postgres.url_of("relay", "postgres")).await;
    let store = Store::open(&relay, "orders", &source()).await.unwrap();
    assert!(lock::try_lock(&relay, "orders").await.unwrap());
    identity::read_or_create(&relay, "orders", &source().table, "7", 1).await.unwrap();
    identity::move_on(&relay, "orders", "7", 2).await.unwrap();
    store.append(&relay, 1, &[published(&[(1, 1)], Some(9), 1)]).await.unwrap();
    store.load(&relay, Lsn::ZERO).await.unwrap();
    store.latest(&relay, "events").await.unwrap();
    store.existing(&relay, &[(1, EventId::Int(1))]).await.unwrap();
}

#[tokio::test]
async fn the_ledger_returns_what_was_appended() {
    let postgres = Postgres::start().await.unwrap();
    let (client, store) = ready(&postgres).await;
    assert_eq!(store.latest(&client, "events").await.unwrap(), None);
    assert_eq!(store.load(&client, Lsn::ZERO).await.unwrap(), []);
    store.append(&client, 1, &[]).await.unwrap();

    // A floor alone, before anything was sent.
    store.append(&client, 1, &[published(&[], None, 7)]).await.unwrap();
    let latest = store.latest(&client, "events").await.unwrap().unwrap();
    assert_eq!(latest.floor, Floor { created: "2026-11-30T15:08:00.123456789Z".into(), seq: 7 });
    assert_eq!(store.load(&client, Lsn::ZERO).await.unwrap(), []);

    let far = u64::from(u32::MAX) << 32;
    let receipts = [
        published(&[(1, 500)], Some(0x10), 507),
        Receipt { outcome: ReceiptOutcome::Dead, ..published(&[(501, 501)], Some(far), 507) },
        published(&[(502, 600), (700, 700)], Some(0x30), 608),
        published(&[(900, 900)], None, 609),
        Receipt { destination: "audit".into(), ..published(&[(1, 1)], Some(0x40), 3) },
    ];
    store.append(&client, 1, &receipts).await.unwrap();
    let recorded = |destination: &str, seqs: &[(i64, i64)], last_lsn: Option<u64>| Recorded {
        handed: false,
        destination: destination.into(),
        seqs: seqs.to_vec(),
        last_lsn: last_lsn.map(Lsn),
    };
    assert_eq!(
        store.load(&client, Lsn(0x10)).await.unwrap(),
        [
            recorded("audit", &[(1, 1)], Some(0x40)),
            recorded("events", &[(1, 600), (700, 700)], Some(far)),
            recorded("events", &[(900, 900)], None),
        ]
    );
    assert_eq!(
        store.load(&client, Lsn(0x41)).await.unwrap(),
        [recorded("events", &[(501, 501)], Some(far)), recorded("events", &[(900, 900)], None)]
    );
    let latest = store.latest(&client, "events").await.unwrap().unwrap();
    assert_eq!((latest.floor.seq, latest.stream_seq), (609, 609));
    // Receipts of another relay are none of ours.
    let other = Store::open(&client, "other", &source()).await.unwrap();
    assert_eq!(other.load(&client, Lsn::ZERO).await.unwrap(), []);
    assert_eq!(other.latest(&client, "events").await.unwrap(), None);
}

#[tokio::test]
async fn a_long_ledger_is_merged_by_the_thousand() {
    let postgres = Postgres::start().await.unwrap();
    let (client, store) = ready(&postgres).await;
    let receipts: Vec<Receipt> = (1..=2_500_u32)
        .map(|n| published(&[(i64::from(n), i64::from(n))], Some(n.into()), n.into()))
        .collect();
    store.append(&client, 1, &receipts).await.unwrap();
    let recorded = store.load(&client, Lsn::ZERO).await.unwrap();
    let ranges: Vec<_> = recorded.iter().map(|r| (r.seqs.clone(), r.last_lsn)).collect();
    assert_eq!(
        ranges,
        [
            (vec![(1, 1_000)], Some(Lsn(1_000))),
            (vec![(1_001, 2_000)], Some(Lsn(2_000))),
            (vec![(2_001, 2_500)], Some(Lsn(2_500))),
        ]
    );
}

#[tokio::test]
async fn the_session_waits_for_the_flush_whatever_the_role_says() {
    let postgres = Postgres::start().await.unwrap();
    let (client, _) = ready(&postgres).await;
    for (role, becomes) in
        [("off", "on"), ("local", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")]
    {
        let alter = format!(
            "ALTER ROLE postgres SET synchronous_commit = '{role}';
             ALTER ROLE postgres SET statement_timeout = '1s';
             ALTER ROLE postgres SET idle_in_transaction_session_timeout = '1s';
             ALTER ROLE postgres SET search_path = 'public'"
        );
        client.batch_execute(&alter).await.unwrap();
        let session = postgres.connect().await.unwrap();
        assert_eq!(text(&session, "SHOW synchronous_commit").await, role);
        Store::open(&session, "orders", &source()).await.unwrap();
        assert_eq!(text(&session, "SHOW synchronous_commit").await, becomes);
        assert_eq!(text(&session, "SHOW statement_timeout").await, "0");
        assert_eq!(text(&session, "SHOW idle_in_transaction_session_timeout").await, "0");
        assert_eq!(text(&session, "SHOW search_path").await, "");
    }
}

#[tokio::test]
async fn burying_twice_leaves_one_letter_with_every_byte() {
    let postgres = Postgres::start().await.unwrap();
    let (client, store) = ready(&postgres).await;
    let letter = |seq| DeadLetter {
        destination: "events".into(),
        event: Arc::new(event(seq)),
        reason: Reason::TooLarge,
        detail: "5 MiB over \0 the limit ✓".into(),
        server_code: Some(10_054),
        attempts: 2,
        blocks_run: false,
    };
    assert_eq!(store.bury(&client, 1, &[]).await.unwrap(), 0);
    assert_eq!(store.bury(&client, 1, &[letter(1)]).await.unwrap(), 1);
    assert_eq!(store.bury(&client, 1, &[letter(1), letter(2)]).await.unwrap(), 1);
    let row = client
        .query_one(
            "SELECT run_id, kind, payload, headers, event_created_at IS NULL, \
                    extract(epoch FROM committed_at)::text, commit_lsn::text, commit_index, \
                    reason, detail, server_code, attempts, version, event_id, generation \
             FROM outbox.dead_letter WHERE seq = 1 AND state = 'buried'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, &str>(0), "run\\u{0}\u{fffd}");
    assert_eq!(row.get::<_, &str>(1), "order.created\r\n");
    assert_eq!(row.get::<_, &[u8]>(2), b"\0\xff'\"");
    assert_eq!(row.get::<_, &str>(3), r#"{"a":"\r\n"}"#);
    assert!(row.get::<_, bool>(4), "a time that can't be stored is left out");
    assert_eq!(row.get::<_, &str>(5), "1.000001");
    assert_eq!(row.get::<_, &str>(6), "1/10");
    assert_eq!(row.get::<_, i64>(7), 2);
    assert_eq!(row.get::<_, &str>(8), "too_large");
    assert_eq!(row.get::<_, &str>(9), "5 MiB over \\u{0} the limit ✓");
    assert_eq!((row.get::<_, i64>(10), row.get::<_, i64>(11)), (10_054, 2));
    assert_eq!((row.get::<_, i32>(12), row.get::<_, &str>(13)), (3, "1"));
    assert_eq!(row.get::<_, i32>(14), 1);
}

#[tokio::test]
async fn a_letter_is_buried_in_a_database_of_any_encoding() {
    let postgres = Postgres::start().await.unwrap();
    let admin = postgres.connect().await.unwrap();
    let create = "CREATE DATABASE latin ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' \
                  TEMPLATE template0";
    admin.batch_execute(create).await.unwrap();
    let client = connect(&postgres.url_of("postgres", "latin")).await;
    schema::migrate(&client, Payload::Json).await.unwrap();
    let store = Store::open(&client, "orders", &source()).await.unwrap();
    let letter = DeadLetter {
        destination: "events".into(),
        event: Arc::new(event(1)),
        reason: Reason::Unmappable,
        detail: "✓".into(),
        server_code: None,
        attempts: 0,
        blocks_run: false,
    };
    assert_eq!(store.bury(&client, 1, &[letter]).await.unwrap(), 1);
    assert_eq!(text(&client, "SELECT detail FROM outbox.dead_letter").await, "\\u{2713}");
}

#[tokio::test]
async fn a_row_exists_when_number_and_id_agree() {
    let postgres = Postgres::start().await.unwrap();
    let (client, store) = ready(&postgres).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        let id = text(&client, "SELECT outbox.publish('r', 'k', '{}')::text").await;
        ids.push(EventId::Uuid(id.parse().unwrap()));
    }
    let asked = [
        (3, ids[2].clone()),
        (1, ids[0].clone()),
        (1, ids[0].clone()),
        (2, ids[0].clone()),
        (4, ids[0].clone()),
        (2, EventId::Text("x".into())),
    ];
    let existing = store.existing(&client, &asked).await.unwrap();
    assert_eq!(existing.seqs, [1, 3]);
    let now = text(&client, "SELECT pg_current_wal_insert_lsn()::text").await;
    assert!(existing.until.is_some_and(|until| until <= now.parse().unwrap()));
    let none = store.existing(&client, &[]).await.unwrap();
    assert_eq!((none.seqs, none.until), (vec![], None));
}

#[tokio::test]
async fn one_session_holds_the_lock() {
    let postgres = Postgres::start().await.unwrap();
    let first = postgres.connect().await.unwrap();
    let second = postgres.connect().await.unwrap();
    assert_eq!(lock::holder(&second, "orders").await.unwrap(), None);
    assert!(lock::try_lock(&first, "orders").await.unwrap());
    assert!(!lock::try_lock(&second, "orders").await.unwrap());
    assert!(lock::try_lock(&second, "another").await.unwrap());
    let pid: i32 = first.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    assert_eq!(lock::holder(&second, "orders").await.unwrap().map(|h| h.pid), Some(pid));
    let end = format!("SELECT pg_terminate_backend({pid}, 10000)");
    second.query_one(&end, &[]).await.unwrap();
    assert!(lock::try_lock(&second, "orders").await.unwrap());
}

#[tokio::test]
async fn a_relay_row_is_made_once_and_keeps_to_its_table() {
    let postgres = Postgres::start().await.unwrap();
    let (client, _) = ready(&postgres).await;
    let table = source().table;
    assert_eq!(identity::read(&client, "orders", &table).await.unwrap(), None);
    let made = identity::read_or_create(&client, "orders", &table, "18446744073709551615", 1);
    let made = made.await.unwrap();
    assert!(made.created);
    assert_eq!((made.generation, made.timeline), (1, 1));
    let again = identity::read_or_create(&client, "orders", &table, "1", 9).await.unwrap();
    assert_eq!(again, identity::RelayRow { created: false, ..made.clone() });
    identity::move_on(&client, "orders", "2", 3).await.unwrap();
    let moved = identity::read(&client, "orders", &table).await.unwrap().unwrap();
    assert_eq!((moved.system_identifier.as_str(), moved.timeline), ("2", 3));
    let other = QualifiedName { schema: "app".into(), name: "event".into() };
    let refused = identity::read(&client, "orders", &other).await.unwrap_err();
    assert!(refused.detail.contains("outbox.event") && refused.detail.contains("app.event"));
}

#[tokio::test]
async fn a_table_or_publication_that_lost_its_shape_is_refused() {
    let postgres = Postgres::start().await.unwrap();
    let (client, _) = ready(&postgres).await;
    let source = source();
    let kind = async || shape::require(&client, &source).await.err().map(|failure| failure.kind);
    assert_eq!(kind().await, Some(Kind::PublicationMissing));
    publication::create(&client, &source.publication, &source.table).await.unwrap();
    assert_eq!(kind().await, None);
    client.batch_execute("ALTER SEQUENCE outbox.event_seq CACHE 5").await.unwrap();
    assert_eq!(kind().await, None, "only the sweeper relies on it");
    let only_updates = "ALTER PUBLICATION outboxd_orders SET (publish = 'update')";
    client.batch_execute(only_updates).await.unwrap();
    assert_eq!(kind().await, Some(Kind::PublicationShape));
    client.batch_execute("ALTER TABLE outbox.event RENAME kind TO sort").await.unwrap();
    let refused = shape::require(&client, &source).await.unwrap_err();
    assert_eq!(refused.kind, Kind::TableShape);
    assert!(refused.detail.contains("outbox.event.kind does not exist"), "{refused}");
}

/// The statement under a mark of docs/operations.md, which names relay `orders`, destination
/// `events` and slot `outboxd_orders`.
fn documented(mark: &str) -> String {
    let page = include_str!("../docs/operations.md");
    let (_, rest) = page.split_once(&format!("<!-- sql: {mark} -->\n```sql\n")).unwrap();
    rest.split_once("```").unwrap().0.to_owned()
}

async fn numbers(client: &Client, sql: &str) -> Vec<i64> {
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get("seq")).collect()
}

const ALL: &str = "SELECT seq FROM outbox.event ORDER BY seq";

#[tokio::test]
async fn the_documented_statements_delete_what_is_settled() {
    let postgres = Postgres::start().await.unwrap();
    let (client, store) = ready(&postgres).await;
    let rows = "SELECT outbox.publish('run-' || n, 'k', '{}') FROM generate_series(1, 8) AS n";
    client.execute(rows, &[]).await.unwrap();
    let age = "UPDATE outbox.event SET created_at = now() - interval '30 days' WHERE seq <> 5";
    client.execute(age, &[]).await.unwrap();
    let receipts = [
        published(&[(1, 2), (4, 5)], Some(10), 2),
        Receipt { outcome: ReceiptOutcome::Dead, ..published(&[(7, 7)], Some(20), 2) },
        // Another destination, another relay and the empty receipt of a floor cover nothing here.
        Receipt { destination: "audit".into(), ..published(&[(3, 3)], Some(20), 2) },
        published(&[], None, 2),
    ];
    store.append(&client, 1, &receipts).await.unwrap();
    let other = Store::open(&client, "invoices", &source()).await.unwrap();
    other.append(&client, 1, &[published(&[(6, 6)], Some(20), 2)]).await.unwrap();

    // Decided for long enough: not 5.
    identity::read_or_create(&client, "orders", &source().table, "1", 1).await.unwrap();
    let records = "INSERT INTO outbox.destination (relay, name, frontier) \
                       VALUES ('orders', 'events', 0), ('orders', 'retired', 0); \
                   UPDATE outbox.receipt SET recorded_at = now() - interval '30 days', \
                                             seqs = seqs - '{[5,6)}'";
    client.batch_execute(records).await.unwrap();
    client.batch_execute(&documented("delete events")).await.unwrap();
    assert_eq!(numbers(&client, ALL).await.len(), 8, "a destination of an old relay has a say");
    client
        .batch_execute(&documented("retire").replace("'old'", "'orders' AND name = 'retired'"))
        .await
        .unwrap();
    let settled = documented("settled");
    assert!(!client.query_one(&settled, &[]).await.unwrap().get::<_, bool>(0));
    client.batch_execute(&documented("delete events")).await.unwrap();
    assert_eq!(numbers(&client, ALL).await, [3, 5, 6, 8]);
}
