//! P1 and P3 while the outbox table changes under the relay, and with everything beside rows that
//! a server puts into the stream: types, origins, messages, truncations, empty transactions.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use outboxd::sandbox::{Broker, Nats, Postgres, World, WorldOptions};
use support::look::{self, metric, sessions, until};
use support::{SETTLE, log_tail, options};
use tokio_postgres::Client;
use uuid::Uuid;

/// A relay of a table of the application's own. `ddl` makes the table `app.outbox`.
async fn world_of(ddl: &str) -> World {
    let postgres = Postgres::start().await.unwrap();
    let client = postgres.connect().await.unwrap();
    client.batch_execute(ddl).await.unwrap();
    let broker = Broker::Single(Box::new(Nats::start().await.unwrap()));
    let mut source = "table = \"app.outbox\"\n[source.columns]\n".to_owned();
    for column in ["tenant", "version", "headers", "created_at"] {
        if !ddl.contains(column) {
            source.push_str(&format!("{column} = false\n"));
        }
    }
    World::assemble(WorldOptions { source, ..options() }, postgres, broker).await.unwrap()
}

/// What was committed, in order. The table may have lost it since.
#[derive(Default)]
struct Committed(Vec<Uuid>);

impl Committed {
    /// Inserts one row of run `r`.
    async fn insert(&mut self, client: &Client) {
        self.insert_with(client, "payload").await;
    }

    async fn insert_with(&mut self, client: &Client, payload: &str) {
        let id = Uuid::new_v4();
        let n = self.0.len() + 1;
        let sql = format!(
            "INSERT INTO app.outbox (id, run_id, kind, {payload}) \
             VALUES ('{id}', 'r', 'opened', '{{\"id\":\"{id}\",\"run\":\"r\",\"n\":{n}}}')"
        );
        client.batch_execute(&sql).await.unwrap();
        self.0.push(id);
    }

    /// Waits until the position is past everything that is committed; then every row but the
    /// `buried` ones is in the stream, once, in order, with its own body.
    async fn arrive(&self, world: &World, client: &Client, buried: &[usize]) {
        let end = look::wal_end(client).await;
        until("the position", SETTLE, || async {
            let confirmed = look::confirmed(client).await;
            (confirmed >= end)
                .then_some(())
                .ok_or_else(|| format!("confirmed {confirmed} of {end}\n{}", log_tail(world)))
        })
        .await;
        let expected: Vec<(Uuid, i64)> = (1..)
            .zip(&self.0)
            .filter(|(n, _)| !buried.contains(&usize::try_from(*n).unwrap()))
            .map(|(n, id)| (*id, n))
            .collect();
        let messages = world.messages().await.unwrap();
        let found: Vec<(Uuid, i64)> = messages
            .iter()
            .map(|seen| {
                let event = seen.event.as_ref().unwrap_or_else(|| panic!("{seen:?}"));
                assert_eq!(seen.msg_id, event.id.to_string());
                (event.id, event.n)
            })
            .collect();
        assert_eq!(found, expected, "{}", log_tail(world));
        let letters = world.buried().await.unwrap();
        assert_eq!(letters.len(), buried.len());
        for n in buried {
            assert!(letters.contains(self.0.get(n - 1).unwrap()), "number {n}");
        }
    }
}

const EVOLVING: &str = "\
    CREATE SCHEMA app; \
    CREATE TABLE app.outbox ( \
        seq bigint GENERATED ALWAYS AS IDENTITY (CACHE 1), \
        id uuid NOT NULL, \
        run_id text NOT NULL, \
        kind text NOT NULL, \
        extra text, \
        headers jsonb, \
        payload json); \
    CREATE INDEX ON app.outbox (seq)";

/// The table lives on while rows are in the WAL. Returns which rows have no payload column.
async fn change_columns(client: &Client, committed: &mut Committed) -> Vec<usize> {
    let alter = async |what: &str| {
        client.batch_execute(&format!("ALTER TABLE app.outbox {what}")).await.unwrap();
    };
    committed.insert(client).await;
    alter("RENAME extra TO other").await;
    committed.insert(client).await;
    alter("DROP other").await;
    alter("ADD added text DEFAULT 'x'").await;
    committed.insert(client).await;
    client.batch_execute("BEGIN").await.unwrap();
    committed.insert(client).await;
    alter("ADD more int DEFAULT 7").await;
    committed.insert(client).await;
    client.batch_execute("COMMIT").await.unwrap();
    // The payload's neighbour, dropped and there again at another place.
    alter("DROP headers").await;
    alter("ADD headers jsonb").await;
    committed.insert(client).await;
    // The payload itself away and back, with one row between.
    alter("RENAME payload TO body").await;
    committed.insert_with(client, "body").await;
    let without_payload = committed.0.len();
    alter("RENAME body TO payload").await;
    committed.insert(client).await;
    // A column in its place, then the payload of another type at the end.
    alter("RENAME payload TO extra").await;
    alter("ADD payload jsonb").await;
    committed.insert(client).await;
    alter("DROP more, DROP added").await;
    alter("DROP payload").await;
    alter("RENAME extra TO payload").await;
    committed.insert(client).await;
    // As it was before.
    alter("ADD extra text").await;
    vec![without_payload]
}

/// Rows are mapped by the names that the stream said last, never by what the catalog has now.
#[tokio::test]
async fn columns_change_with_wal_pending_and_while_it_runs() {
    let mut world = world_of(EVOLVING).await;
    let client = world.postgres.connect().await.unwrap();
    let mut committed = Committed::default();
    world.start_relay().await.unwrap();
    committed.insert(&client).await;
    committed.arrive(&world, &client, &[]).await;

    // Nobody reads meanwhile.
    let (status, _) = world.relay.terminate(Duration::from_secs(15)).await.unwrap();
    assert!(status.success());
    let mut buried = change_columns(&client, &mut committed).await;
    world.start_relay().await.unwrap();
    committed.arrive(&world, &client, &buried).await;

    // The relay reads along.
    buried.extend(change_columns(&client, &mut committed).await);
    committed.arrive(&world, &client, &buried).await;

    // The connection is lost between the server's description of the table and rows.
    for _ in 0..3 {
        let found = sessions(&client).await;
        let walsender = found.iter().find(|session| session.kind == "walsender").unwrap();
        client.query_one("SELECT pg_terminate_backend($1)", &[&walsender.pid]).await.unwrap();
        buried.extend(change_columns(&client, &mut committed).await);
        committed.arrive(&world, &client, &buried).await;
    }
    let sql = "SELECT DISTINCT reason || ': ' || detail FROM outbox.dead_letter";
    let rows = client.query(sql, &[]).await.unwrap();
    let words: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    println!("{words:?}");
    assert!(words.iter().all(|words| words.starts_with("unmappable: ")), "{words:?}");
    assert!(words.iter().all(|words| words.contains("payload")), "{words:?}");
    let told = metric(&world, "outboxd_dead_letters_total", "reason=\"unmappable\"").await;
    println!("{told:?} dead letters since the last start");
}

const TYPED: &str = "\
    CREATE SCHEMA app; \
    CREATE TYPE app.kind AS ENUM ('opened', 'closed'); \
    CREATE DOMAIN app.run AS text CHECK (value <> ''); \
    CREATE DOMAIN app.document AS json; \
    CREATE TABLE app.outbox ( \
        seq bigint GENERATED ALWAYS AS IDENTITY (CACHE 1), \
        id uuid NOT NULL UNIQUE, \
        run_id app.run NOT NULL, \
        kind app.kind NOT NULL, \
        payload app.document); \
    CREATE INDEX ON app.outbox (seq); \
    CREATE TABLE app.published (a int PRIMARY KEY); \
    CREATE TABLE app.child (id uuid REFERENCES app.outbox (id));";

/// Everything that is no row of ours, each followed by one that is.
async fn everything_but_rows(publication: &str) {
    let mut world = world_of(&format!("{TYPED} {publication}")).await;
    let client = world.postgres.connect().await.unwrap();
    world.start_relay().await.unwrap();
    let before = sessions(&client).await;
    let steps: &[(&str, &str)] = &[
        ("nothing", "SELECT 1"),
        ("another table", "INSERT INTO app.published SELECT count(*) + 10 FROM app.published"),
        (
            "its update and delete",
            "UPDATE app.published SET a = a + 1000; DELETE FROM app.published",
        ),
        ("its truncation", "TRUNCATE app.published"),
        ("a transactional message", "SELECT pg_logical_emit_message(true, 'app', 'x')"),
        ("a message outside", "SELECT pg_logical_emit_message(false, 'app', 'x')"),
        ("an empty transaction", "BEGIN; SELECT pg_current_xact_id(); COMMIT"),
        (
            "a rolled back row",
            "BEGIN; INSERT INTO app.published SELECT count(*) + 10 FROM app.published; ROLLBACK",
        ),
        ("our truncation", "TRUNCATE app.outbox CASCADE"),
        ("truncation of several", "TRUNCATE app.outbox, app.published, app.child"),
        (
            "truncation and a row in one transaction",
            "BEGIN; TRUNCATE app.outbox CASCADE; INSERT INTO app.published SELECT count(*) + 10 FROM app.published; COMMIT",
        ),
        (
            "an origin",
            "SELECT pg_replication_origin_create('elsewhere'); \
             SELECT pg_replication_origin_session_setup('elsewhere')",
        ),
        (
            "an origin with a position",
            "BEGIN; SELECT pg_replication_origin_xact_setup('0/1234', now()); \
             INSERT INTO app.published SELECT count(*) + 10 FROM app.published; COMMIT",
        ),
        ("the origin's end", "SELECT pg_replication_origin_session_reset()"),
        ("a type that grows", "ALTER TYPE app.kind ADD VALUE 'reopened'"),
    ];
    let mut committed = Committed::default();
    committed.insert(&client).await;
    for (what, sql) in steps {
        println!("{what}");
        client.batch_execute(sql).await.unwrap();
        committed.insert(&client).await;
        committed.arrive(&world, &client, &[]).await;
    }
    assert_eq!(sessions(&client).await, before, "{}", log_tail(&world));
    let log = world.relay.log();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("truncated")).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told.iter().all(|line| line.contains("WARN") && line.contains("lsn=")), "{told:?}");

    // All of it at once after a crash, from the slot.
    world.relay.kill9().unwrap();
    for (_, sql) in
        steps.iter().filter(|(what, _)| !what.contains("origin") && !what.contains("type"))
    {
        client.batch_execute(sql).await.unwrap();
        committed.insert(&client).await;
    }
    world.start_relay().await.unwrap();
    committed.arrive(&world, &client, &[]).await;
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for seen in world.messages().await.unwrap() {
        *kinds.entry(seen.event.unwrap().run).or_default() += 1;
    }
    assert_eq!(kinds, BTreeMap::from([("r".to_owned(), committed.0.len())]));
}

#[tokio::test]
async fn everything_but_rows_with_a_publication_of_our_own() {
    everything_but_rows("").await;
}

/// Then other tables come through the stream, too.
#[tokio::test]
async fn everything_but_rows_with_a_publication_of_all_tables() {
    everything_but_rows(
        "CREATE PUBLICATION outboxd_world FOR ALL TABLES WITH (publish_via_partition_root = true)",
    )
    .await;
}
