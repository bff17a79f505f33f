//! Rows that are read from the table are the events that the WAL gives.

use outboxd::config::{ColumnMap, QualifiedName};
use outboxd::decode::{Decoded, Decoder};
use outboxd::event::{EVENT_OVERHEAD_BYTES, Event, EventId, Reason};
use outboxd::store::Store;
use outboxd::store::{publication, slot};
use tokio_postgres::Client;

use crate::{publish, ready, source};

/// Columns of a table by name and type, and the values of its rows, seq first.
struct Table {
    columns: &'static str,
    rows: &'static [&'static str],
    faults: usize,
}

const TABLES: &[(&str, Table)] = &[
    (
        "usual",
        Table {
            columns: "seq bigint, id uuid, tenant text, run_id text, kind text, version int, \
                      payload json, headers jsonb, created_at timestamptz",
            rows: &[
                "1, '0191e0d4-5d3c-7000-8000-000000000001', 't', 'r', 'k', 2, \
                 ' {\"a\" : 1.0}\n', '{\"h\": \"ü\"}', '2026-01-02 03:04:05.000006+02'",
                "2, '0191e0d4-5d3c-7000-8000-000000000002', NULL, 'r', 'k', NULL, NULL, NULL, NULL",
                "3, NULL, 't', NULL, '', 1, '1', '1', 'infinity'",
            ],
            faults: 1,
        },
    ),
    (
        "binary",
        Table {
            columns: "noise text, seq bigint, id bigint, run_id int, kind varchar(9), \
                      payload bytea, version smallint, created_at timestamp, more int DEFAULT 7",
            rows: &[
                "'x', 1, -5, 7, 'k', '\\x00ff27', -1, '1969-12-31 23:59:59.5'",
                "NULL, 2, 9223372036854775807, NULL, 'k', NULL, NULL, NULL",
                "NULL, 3, NULL, 1, NULL, '\\x', 1, '-infinity'",
            ],
            faults: 1,
        },
    ),
    (
        "typed",
        Table {
            columns: "seq app.number, id text, run_id app.run_key, kind app.kind, \
                      tenant character(6), payload app.document, headers text, version bigint",
            rows: &[
                "1, 'a', 'r', 'opened', 't', '{\"b\": [1,  2]}', '{\"h\":\"v\"}', 3",
                "2, '  ', NULL, 'closed ''x''', NULL, NULL, NULL, NULL",
                "3, 'c', 'r', 'opened', '', '1', 'no json', 5000000000",
            ],
            faults: 2,
        },
    ),
    (
        "odd",
        Table {
            columns: "seq bigint, id int, run_id app.kind_key, kind uuid, payload app.kind, \
                      tenant app.pair, version numeric, headers hstore_like, created_at date",
            rows: &[
                "1, 4, 'opened', '0191e0d4-5d3c-7000-8000-000000000001', 'opened', NULL, NULL, \
                 NULL, NULL",
                "2, 5, 'opened', '0191e0d4-5d3c-7000-8000-000000000001', 'opened', '(1,x)', 1.5, \
                 '(2,y)', '2026-01-01'",
            ],
            // A type that nothing can be read from is a fault whatever is in it.
            faults: 2,
        },
    ),
    (
        "bare",
        Table {
            columns: "seq bigint, kind text, id uuid, junk aclitem, run_id aclitem, payload text",
            // aclitem has no binary form: it is sent as text.
            rows: &[
                "1, 'k', '0191e0d4-5d3c-7000-8000-000000000001', NULL, 'postgres=r/postgres', 'ü'",
            ],
            faults: 1,
        },
    ),
    (
        "missing",
        Table {
            columns: "seq bigint, id uuid, run_id text, a int",
            rows: &["1, NULL, 'r', 2"],
            faults: 1,
        },
    ),
];

/// All that both ways can know.
fn comparable(event: &Event) -> String {
    format!("{:?}", Event { position: None, committed_at: None, ..event.clone() })
}

async fn from_wal(client: &Client, table: &QualifiedName) -> Vec<Event> {
    let mut decoder = Decoder::new(table.clone(), ColumnMap::default());
    let sql = "SELECT data FROM pg_logical_slot_peek_binary_changes('outboxd_orders', NULL, NULL, \
               'proto_version', '1', 'publication_names', 'outboxd_orders', 'binary', 'true')";
    let mut events = Vec::new();
    for row in client.query(sql, &[]).await.unwrap() {
        if let Decoded::Event(event) = decoder.decode(row.get(0)).unwrap() {
            assert!(event.position.is_some() && event.committed_at.is_some());
            events.push(event);
        }
    }
    events
}

#[tokio::test]
async fn a_row_is_the_same_event_whichever_way_it_comes() {
    let (_postgres, client, _) = ready().await;
    client
        .batch_execute(
            "CREATE SCHEMA app;
             CREATE TYPE app.kind AS ENUM ('opened', 'closed ''x''');
             CREATE DOMAIN app.kind_key AS app.kind;
             CREATE TYPE app.pair AS (a int, b text);
             CREATE TYPE public.hstore_like AS (a int, b text);
             CREATE DOMAIN app.number AS bigint;
             CREATE DOMAIN app.run_key AS text;
             CREATE DOMAIN app.plain AS jsonb;
             CREATE DOMAIN app.document AS app.plain",
        )
        .await
        .unwrap();
    for (name, table) in TABLES {
        let create = format!(
            "SET search_path = public;
             CREATE TABLE app.{name} (gone1 int, {}, gone2 text);
             ALTER TABLE app.{name} DROP gone1, DROP gone2",
            table.columns
        );
        client.batch_execute(&create).await.unwrap();
    }
    publication::create(&client, "outboxd_orders", &source("app", "usual").table).await.unwrap();
    for (name, _) in &TABLES[1..] {
        let add = format!("ALTER PUBLICATION outboxd_orders ADD TABLE app.{name}");
        client.batch_execute(&add).await.unwrap();
    }
    slot::create(&client, "outboxd_orders", false).await.unwrap();
    for (name, table) in TABLES {
        for values in table.rows {
            client
                .batch_execute(&format!("INSERT INTO app.{name} VALUES ({values})"))
                .await
                .unwrap();
        }
    }
    for (name, table) in TABLES {
        let source = source("app", name);
        let expected = from_wal(&client, &source.table).await;
        assert_eq!(expected.len(), table.rows.len(), "{name}");
        let faults = expected.iter().filter(|event| event.fault.is_some()).count();
        assert_eq!(faults, table.faults, "{name}: {expected:#?}");
        let store = Store::open(&client, "orders", &source).await.unwrap();
        let seqs: Vec<i64> = expected.iter().map(|event| event.seq).collect();
        let found = store.rows(&client, &seqs).await.unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.position.is_none() && found.committed_at.is_none());
            assert_eq!(comparable(found), comparable(expected), "{name}");
        }
        assert_eq!(found.len(), expected.len(), "{name}");
    }
}

#[tokio::test]
async fn rows_come_in_the_order_asked_for() {
    let (_postgres, client, store) = ready().await;
    publish(&client, 400).await;
    client.batch_execute("DELETE FROM outbox.event WHERE seq = 7").await.unwrap();
    // A number that is not unique is two events.
    let twice = "INSERT INTO outbox.event (seq, run_id, kind) VALUES (9, 'twice', 'k')";
    client.batch_execute(twice).await.unwrap();
    let seqs = |events: &[Event]| events.iter().map(|event| event.seq).collect::<Vec<_>>();
    let found = store.rows(&client, &[12, 7, 9, 1_000, 3]).await.unwrap();
    assert_eq!(seqs(&found), [12, 9, 9, 3]);
    assert!(store.rows(&client, &[]).await.unwrap().is_empty());
    let all: Vec<i64> = (100..=400).rev().collect();
    assert_eq!(seqs(&store.rows(&client, &all).await.unwrap()), all);
}

#[tokio::test]
async fn reading_ends_where_the_bytes_are_reached() {
    let (_postgres, client, store) = ready().await;
    let sql = "SELECT outbox.publish('r', 'k', to_json(repeat('x', 65536))) \
               FROM generate_series(1, 300)";
    client.execute(sql, &[]).await.unwrap();
    client.batch_execute("DELETE FROM outbox.event WHERE seq = 2").await.unwrap();
    let one = EVENT_OVERHEAD_BYTES + 65_536 + "\"\"".len() + "rk".len();
    let seqs: Vec<i64> = (1..=300).collect();
    for (bytes, events, looked_up) in [
        (0, 1, 1),
        (1, 1, 1),
        (one, 1, 1),
        (one + 1, 2, 3),
        (150 * one, 150, 151),
        (300 * one, 299, 300),
    ] {
        let rows = store.rows_bounded(&client, &seqs, bytes).await.unwrap();
        assert_eq!((rows.events.len(), rows.looked_up), (events, looked_up), "{bytes} bytes");
    }
    // Numbers without a row are done as well.
    let rows = store.rows_bounded(&client, &[2, 1_000], 0).await.unwrap();
    assert_eq!((rows.events.len(), rows.looked_up), (0, 1));
}

#[tokio::test]
async fn a_table_that_changes_is_read_as_it_is() {
    let (_postgres, client, store) = ready().await;
    publish(&client, 2).await;
    let read = async |seq: i64| store.rows(&client, &[seq]).await.unwrap().remove(0);
    assert!(read(1).await.fault.is_none());
    for (change, fault) in [
        ("ADD more text DEFAULT 'x'", None),
        ("DROP version", None),
        ("ALTER id TYPE text", None),
        ("RENAME kind TO sort", Some("`kind` is missing")),
        ("RENAME sort TO kind", None),
    ] {
        client.batch_execute(&format!("ALTER TABLE outbox.event {change}")).await.unwrap();
        let event = read(1).await;
        let detail = event.fault.map(|fault| {
            assert_eq!(fault.reason, Reason::Unmappable);
            fault.detail
        });
        match fault {
            None => assert_eq!(detail, None, "{change}"),
            Some(part) => assert!(detail.unwrap().contains(part), "{change}"),
        }
    }
    assert!(matches!(read(2).await.id, EventId::Text(_)));
    client.batch_execute("ALTER TABLE outbox.event RENAME seq TO number").await.unwrap();
    let refused = store.rows(&client, &[1]).await.unwrap_err();
    assert_eq!(refused.kind, outboxd::error::Kind::TableShape, "{refused}");
}
