//! Records what a PostgreSQL server sends through pgoutput, as a fixture for `tests/decoder.rs`.
//! Owns the scenario; the expected rows come from the server's own RETURNING, not from our decoder.
//!
//! `cargo run --example capture-pgoutput -- postgres://postgres@localhost/postgres > FIXTURE`, on an
//! empty database of a scratch server with `wal_level = logical` and `max_prepared_transactions`
//! above 0.

use std::error::Error;
use tokio_postgres::{Client, NoTls};

/// An outbox table of the scenario and how its rows are told as JSON.
struct Table {
    name: &'static str,
    ddl: &'static str,
    columns: &'static str,
    payload: &'static str,
}

const EVENT: Table = Table {
    name: "event",
    ddl: "(seq bigint GENERATED ALWAYS AS IDENTITY, id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
           tenant text, run_id text, kind text, version int, note text, payload json,
           headers jsonb, created_at timestamptz DEFAULT now())",
    columns: "tenant, run_id, kind, version, payload, headers",
    payload: "convert_to(payload::text, 'UTF8')",
};

/// Enum, domains, varchar, smallint, json headers, timestamp.
const TYPED: Table = Table {
    name: "typed",
    ddl: "(seq int GENERATED ALWAYS AS IDENTITY, id bigint, run_id app.run_key, kind app.kind,
           payload app.document, tenant varchar(20), version smallint, headers json,
           created_at timestamp)",
    columns: "id, run_id, kind, payload, tenant, version, headers, created_at",
    payload: "convert_to(payload::text, 'UTF8')",
};

/// Text id, uuid run, bytea payload, padded tenant, bigint version; faults are possible here.
const BLOBS: Table = Table {
    name: "blobs",
    ddl: "(seq bigint GENERATED ALWAYS AS IDENTITY, id text, run_id uuid, kind name,
           payload bytea, tenant character(8), version bigint, created_at timestamptz)",
    columns: "id, run_id, kind, payload, tenant, version, created_at",
    payload: "payload",
};

/// Partitioned; bigint run, text payload.
const PARTED: Table = Table {
    name: "parted",
    ddl: "(seq bigint GENERATED ALWAYS AS IDENTITY, id uuid DEFAULT gen_random_uuid(),
           run_id bigint, kind text, payload text, created_at timestamptz DEFAULT now())
          PARTITION BY RANGE (created_at)",
    columns: "run_id, kind, payload, created_at",
    payload: "convert_to(payload, 'UTF8')",
};

/// Types that no event can be read from.
const ODD: Table = Table {
    name: "odd",
    ddl: "(seq bigint GENERATED ALWAYS AS IDENTITY, id float8, run_id text, kind app.pair,
           payload numeric)",
    columns: "id, run_id, kind, payload",
    payload: "NULL::bytea",
};

/// The sequence column is a numeric.
const NOSEQ: Table = Table {
    name: "noseq",
    ddl: "(seq numeric, id bigint, run_id text, kind text, payload text)",
    columns: "seq, id, run_id, kind, payload",
    payload: "NULL::bytea",
};

struct Capture {
    client: Client,
    /// One JSON object per committed row, in commit order.
    expected: Vec<String>,
}

type Done = Result<(), Box<dyn Error>>;

impl Capture {
    async fn run(&self, sql: &str) -> Done {
        Ok(self.client.batch_execute(sql).await?)
    }

    /// Inserts rows given as a SQL source (`VALUES …` or `SELECT …`) and expects them.
    async fn insert(&mut self, table: &Table, rows: &str) -> Done {
        let told = returning(&self.client, table, rows, None).await?;
        self.expected.extend(told);
        Ok(())
    }

    /// Inserts a row that can't become a message because of the named column.
    async fn faulty(&mut self, table: &Table, column: &str, rows: &str) -> Done {
        let told = returning(&self.client, table, rows, Some(column)).await?;
        self.expected.extend(told);
        Ok(())
    }

    async fn scenario(&mut self, other: &Client) -> Done {
        self.values().await?;
        self.frames().await?;
        self.transactions(other).await?;
        self.columns().await
    }

    /// Every readable type, and rows that have no message.
    async fn values(&mut self) -> Done {
        let row = r#"VALUES ('acme', 'order-1', 'order.created', 1, '{"a":  1, "b" : [ ] }',
                             '{"traceparent": "00-ab", "n": 1}')"#;
        self.insert(&EVENT, row).await?;
        self.insert(&EVENT, "VALUES (NULL, NULL, 'Bestellung ✓ ü', NULL, NULL, NULL)").await?;
        self.insert(&EVENT, "VALUES ('', '', 'k', -2147483648, '\"\"', '{}')").await?;
        let long = "SELECT 't', 'r', 'large', 2,
                      to_json((SELECT string_agg(md5(n::text), '') FROM generate_series(1, 100) n)),
                      NULL";
        self.insert(&EVENT, long).await?;
        let typed = r#"VALUES
            (9223372036854775807, 'a/b', 'opened', '{"z": 1, "a": [1, 2]}', 'x', 32767,
             '{ "H":"v" }', '2026-01-02 03:04:05.000006'),
            (-1, NULL, 'closed ''x''', NULL, NULL, -1, NULL, NULL),
            (0, 'ü', 'opened', '1', '', 0, '{}', '1969-12-31 23:59:59.999999')"#;
        self.insert(&TYPED, typed).await?;
        let blobs = r"VALUES
            ('id-1', '11111111-2222-3333-4444-555555555555', 'bytes', '\x00ff5c0d0a', 'pad', 1,
             '2026-06-01 12:00:00+00'),
            (' id 2 ', NULL, 'none', NULL, NULL, NULL, '0001-01-01 00:00:00+00'),
            ('id-3', NULL, 'empty', '', '        ', NULL, NULL)";
        self.insert(&BLOBS, blobs).await?;
        let fault = [
            ("id", "(NULL, NULL, 'k', '', NULL, 1, NULL)"),
            ("id", "('', NULL, 'k', '', NULL, 1, NULL)"),
            ("id", "(E' \\t\\n', NULL, 'k', '', NULL, 1, NULL)"),
            ("kind", "('f4', NULL, NULL, '', NULL, 1, NULL)"),
            ("kind", "('f5', NULL, '', '', NULL, 1, NULL)"),
            ("version", "('f6', NULL, 'k', '', NULL, 2147483648, NULL)"),
            ("created_at", "('f7', NULL, 'k', '', NULL, 1, 'infinity')"),
        ];
        for (column, values) in fault {
            self.faulty(&BLOBS, column, &format!("VALUES {values}")).await?;
        }
        self.insert(&PARTED, "VALUES (5, 'jan', 'text', '2026-01-15 00:00:00+00')").await?;
        self.insert(&PARTED, "VALUES (-6, 'rest', '', '2030-01-15 00:00:00+00')").await?;
        self.faulty(&ODD, "id", "VALUES (1.5, 'r', ROW(1, 'x')::app.pair, 7)").await?;
        self.run("INSERT INTO app.noseq VALUES (1.5, 1, 'r', 'k', 'p')").await
    }

    /// Frames other than inserts, each followed by a row.
    async fn frames(&mut self) -> Done {
        let next = "VALUES ('t', 'frames', 'next', 1, '1', NULL)";
        self.run("UPDATE app.event SET note = 'x'; DELETE FROM app.event WHERE kind = 'k'").await?;
        self.insert(&EVENT, next).await?;
        self.run("INSERT INTO app.other VALUES (1, 'x'); UPDATE app.other SET b = 'y'").await?;
        self.run("TRUNCATE app.other").await?;
        self.insert(&EVENT, next).await?;
        self.run("TRUNCATE app.event").await?;
        self.insert(&EVENT, next).await?;
        self.run("TRUNCATE app.parted").await?;
        self.insert(&PARTED, "VALUES (5, 'again', 'x', '2026-01-15 00:00:00+00')").await?;
        self.run(
            "CREATE TABLE app.reply (event_id uuid REFERENCES app.event);
             ALTER PUBLICATION tables ADD TABLE app.reply;
             INSERT INTO app.reply SELECT id FROM app.event",
        )
        .await?;
        self.run("TRUNCATE app.event RESTART IDENTITY CASCADE; DROP TABLE app.reply").await?;
        self.insert(&EVENT, next).await?;
        self.run(
            "SELECT pg_replication_origin_create('elsewhere');
             SELECT pg_replication_origin_session_setup('elsewhere')",
        )
        .await?;
        self.insert(&EVENT, next).await?;
        self.run("SELECT pg_replication_origin_session_reset()").await?;
        self.run("SELECT pg_logical_emit_message(true, 'outboxd', '\\x00ff6d'::bytea)").await?;
        self.run("SELECT pg_logical_emit_message(false, 'elsewhere', 'no transaction')").await?;
        self.run("BEGIN; SELECT pg_logical_emit_message(true, 'outboxd', '')").await?;
        self.insert(&EVENT, next).await?;
        self.run("SELECT pg_logical_emit_message(false, 'outboxd', 'in one'); COMMIT").await?;
        self.run("BEGIN; SELECT pg_logical_emit_message(false, 'outboxd', 'kept')").await?;
        self.run("SELECT pg_logical_emit_message(true, 'outboxd', 'taken back')").await?;
        self.run("ROLLBACK; CREATE TABLE app.unpublished (a int)").await?;
        self.run("INSERT INTO app.unpublished VALUES (1)").await?;
        self.run("BEGIN; SELECT pg_current_xact_id(); COMMIT").await?;
        self.insert(&EVENT, next).await
    }

    /// Order, subtransactions, rollbacks, a prepared transaction.
    async fn transactions(&mut self, other: &Client) -> Done {
        let values = |kind: &str| format!("VALUES ('t', 'tx', '{kind}', 1, '1', NULL)");
        let many = "SELECT 't', 'tx', 'many', n, to_json(n), NULL FROM generate_series(1, 5) n";
        self.insert(&EVENT, many).await?;
        let kept = self.expected.len();
        self.run("BEGIN").await?;
        self.insert(&EVENT, &values("taken back")).await?;
        self.run("ROLLBACK").await?;
        self.expected.truncate(kept);

        self.run("BEGIN").await?;
        self.insert(&EVENT, &values("outer")).await?;
        self.run("SAVEPOINT a").await?;
        self.insert(&EVENT, &values("released")).await?;
        self.run("RELEASE a; SAVEPOINT b").await?;
        let kept = self.expected.len();
        self.insert(&EVENT, &values("rolled back")).await?;
        self.run("SAVEPOINT c").await?;
        self.insert(&EVENT, &values("rolled back too")).await?;
        self.run("ROLLBACK TO b").await?;
        self.expected.truncate(kept);
        self.insert(&TYPED, "VALUES (5, 'r', 'opened', '{}', 't', 1, '{}', NULL)").await?;
        self.insert(&EVENT, &values("last")).await?;
        self.run("COMMIT").await?;

        self.run("BEGIN").await?;
        let late = self.expected.len();
        self.insert(&EVENT, &values("begun first, committed last")).await?;
        let late = self.expected.split_off(late);
        let between = returning(other, &EVENT, &values("between"), None).await?;
        self.expected.extend(between);
        self.expected.extend(late);
        self.insert(&EVENT, &values("end of the late one")).await?;
        self.run("COMMIT").await?;

        self.run("BEGIN").await?;
        self.insert(&EVENT, &values("prepared")).await?;
        self.run("PREPARE TRANSACTION 'p'").await?;
        self.run("COMMIT PREPARED 'p'").await
    }

    /// The table changes while WAL is pending.
    async fn columns(&mut self) -> Done {
        let values = |run: &str| format!("VALUES ('t', '{run}', 'ddl', 1, '{{\"r\": 1}}', NULL)");
        self.insert(&EVENT, &values("r1")).await?;
        self.run("ALTER TABLE app.event RENAME note TO remark").await?;
        self.insert(&EVENT, &values("r2")).await?;
        self.run(
            "ALTER TABLE app.event DROP remark;
             ALTER TABLE app.event ADD extra int DEFAULT 7",
        )
        .await?;
        self.insert(&EVENT, &values("r3")).await?;
        self.run("BEGIN").await?;
        self.insert(&EVENT, &values("r4")).await?;
        self.run("ALTER TABLE app.event ADD more text").await?;
        self.insert(&EVENT, &values("r5")).await?;
        self.run("COMMIT").await?;
        self.run("ALTER TABLE app.event DROP version; ALTER TABLE app.event ADD version int")
            .await?;
        self.insert(&EVENT, &values("r6")).await?;
        self.run("ALTER TABLE app.event DROP payload; ALTER TABLE app.event ADD payload json")
            .await?;
        self.insert(&EVENT, &values("r6b")).await?;

        self.run("ALTER TABLE app.event RENAME payload TO body").await?;
        let renamed = Table { columns: "tenant, run_id, kind, version, body, headers", ..EVENT };
        self.faulty(&renamed, "payload", &values("r7")).await?;
        self.run("ALTER TABLE app.event RENAME body TO payload").await?;
        self.insert(&EVENT, &values("r8")).await?;
        self.run("ALTER TABLE app.event RENAME tenant TO customer").await?;
        let customer =
            Table { columns: "customer, run_id, kind, version, payload, headers", ..EVENT };
        self.insert(&customer, &values("no tenant")).await?;
        self.run("ALTER TABLE app.event RENAME customer TO tenant").await?;

        self.run("ALTER TABLE app.event RENAME TO event_old").await?;
        self.run("INSERT INTO app.event_old (kind) VALUES ('another table now')").await?;
        self.run("ALTER TABLE app.event_old RENAME TO event").await?;
        self.insert(&EVENT, &values("back")).await?;
        self.run(&format!(
            "DROP TABLE app.event; CREATE TABLE app.event {};
             ALTER PUBLICATION tables ADD TABLE app.event",
            EVENT.ddl
        ))
        .await?;
        self.insert(&EVENT, &values("new table")).await
    }
}

/// Inserts and returns the rows as the server tells them, one JSON object each.
async fn returning(
    client: &Client,
    table: &Table,
    rows: &str,
    fault: Option<&str>,
) -> Result<Vec<String>, Box<dyn Error>> {
    let Table { name, columns, .. } = table;
    let null = "NULL::text";
    let has = |column| fault.is_none() && table.ddl.contains(column);
    let headers = if has("headers") { "headers::text" } else { null };
    let micros =
        if has("created_at") { "(extract(epoch FROM created_at) * 1000000)::bigint" } else { null };
    let payload = if fault.is_none() { table.payload } else { "NULL::bytea" };
    let told = match fault {
        Some(column) => format!("'fault', '{column}'"),
        // Trailing blanks of character(n) mean nothing.
        None => "'id', r->>'id', 'run', r->>'run_id', 'kind', r->>'kind',
                 'tenant', rtrim(r->>'tenant', ' '), 'version', (r->>'version')::int,
                 'headers', told_headers, 'payload', encode(told_payload, 'hex'),
                 'created_at', told_micros"
            .to_owned(),
    };
    let sql = format!(
        "WITH inserted AS (
           INSERT INTO app.{name} ({columns}) {rows}
             RETURNING *, {headers} AS told_headers, {payload} AS told_payload,
               {micros} AS told_micros)
         SELECT jsonb_strip_nulls(jsonb_build_object('table', '{name}', 'seq', seq,
                  'xid', pg_current_xact_id()::text::bigint & 4294967295, {told}))::text
           FROM (SELECT to_jsonb(inserted) AS r, * FROM inserted) AS rows"
    );
    let rows = client.query(&sql, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

async fn connect(url: &str) -> Result<Client, Box<dyn Error>> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    drop(tokio::spawn(connection));
    Ok(client)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Done {
    let url = std::env::args().nth(1).ok_or("usage: capture-pgoutput URL")?;
    let client = connect(&url).await?;
    let other = connect(&url).await?;
    let mut capture = Capture { client, expected: Vec::new() };
    capture
        .run(
            "CREATE SCHEMA app;
             CREATE TYPE app.kind AS ENUM ('opened', 'closed ''x''');
             CREATE TYPE app.pair AS (a int, b text);
             CREATE DOMAIN app.run_key AS text;
             CREATE DOMAIN app.plain AS jsonb;
             CREATE DOMAIN app.document AS app.plain",
        )
        .await?;
    for table in [EVENT, TYPED, BLOBS, PARTED, ODD, NOSEQ] {
        capture.run(&format!("CREATE TABLE app.{} {}", table.name, table.ddl)).await?;
    }
    capture
        .run(
            "CREATE TABLE app.parted_jan PARTITION OF app.parted
               FOR VALUES FROM ('2026-01-01 00:00:00+00') TO ('2026-02-01 00:00:00+00');
             CREATE TABLE app.parted_rest PARTITION OF app.parted DEFAULT;
             ALTER TABLE app.event ALTER payload SET STORAGE EXTERNAL;
             ALTER TABLE app.event REPLICA IDENTITY FULL;
             CREATE TABLE app.other (a int PRIMARY KEY, b text);
             CREATE PUBLICATION tables FOR TABLE app.event, app.typed, app.blobs, app.parted,
               app.odd, app.noseq, app.other WITH (publish_via_partition_root = true);
             CREATE PUBLICATION everything FOR ALL TABLES
               WITH (publish_via_partition_root = true)",
        )
        .await?;
    capture.run("SELECT pg_create_logical_replication_slot('capture', 'pgoutput')").await?;
    capture.scenario(&other).await?;

    let version: String = capture.client.query_one("SHOW server_version", &[]).await?.get(0);
    println!("# PostgreSQL {version}, recorded by tests/support/capture_pgoutput.rs");
    println!("[rows]");
    for row in &capture.expected {
        println!("{row}");
    }
    let captures = [
        ("binary", "'publication_names', 'tables', 'binary', 'true', 'messages', 'true'"),
        ("text", "'publication_names', 'tables', 'messages', 'true'"),
        ("everything", "'publication_names', 'everything', 'binary', 'true'"),
    ];
    for (name, options) in captures {
        println!("[{name}]");
        let sql = format!(
            "SELECT encode(data, 'hex') FROM pg_logical_slot_peek_binary_changes(
               'capture', NULL, NULL, 'proto_version', '1', {options})"
        );
        for row in capture.client.query(&sql, &[]).await? {
            println!("{}", row.get::<_, String>(0));
        }
    }
    capture.run("SELECT pg_drop_replication_slot('capture')").await
}
