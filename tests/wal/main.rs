//! WAL in, on a real server: every way to connect, the stream with its feedback, and what a server
//! can do to it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

mod connecting;
mod encrypted;
mod front;
mod streaming;
mod trouble;

use std::time::Duration;

use outboxd::config::{ColumnMap, QualifiedName, SourceConfig};
use outboxd::lsn::Lsn;
use outboxd::sandbox::{Postgres, PostgresOptions};
use outboxd::wal::{Control, Link, WalItem, WalStream, connect};
use tokio::time::{Instant, timeout};
use tokio_postgres::Client;

/// Long enough for a busy machine, short enough to see a hang.
const PATIENCE: Duration = Duration::from_secs(30);

fn source(url: &str) -> SourceConfig {
    SourceConfig {
        url: url.to_owned().into(),
        replication_url: None,
        slot: "slot".to_owned(),
        publication: "pub".to_owned(),
        table: QualifiedName { schema: "public".to_owned(), name: "t".to_owned() },
        columns: ColumnMap::default(),
        mark: Default::default(),
        connect_timeout: Duration::from_secs(10),
    }
}

/// A server with a table, its publication and a slot, and a session of the superuser.
async fn server(options: PostgresOptions) -> (Postgres, Client) {
    let postgres = Postgres::start_with(options).await.unwrap();
    let client = postgres.connect().await.unwrap();
    client
        .batch_execute(
            "CREATE TABLE t (i int8, b text); CREATE PUBLICATION pub FOR TABLE t;
             ALTER TABLE t ALTER COLUMN b SET STORAGE EXTERNAL;",
        )
        .await
        .unwrap();
    client
        .query("SELECT pg_create_logical_replication_slot('slot', 'pgoutput')", &[])
        .await
        .unwrap();
    (postgres, client)
}

/// A running stream, and the control connection beside it.
async fn stream(postgres: &Postgres) -> (Control, WalStream) {
    let Link { control, replication, .. } = connect(&source(&postgres.unix_url())).await.unwrap();
    let stream = replication.start("slot", "pub").await.unwrap();
    (control, stream)
}

async fn text(client: &Client, sql: &str) -> Option<String> {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

async fn lsn(client: &Client, sql: &str) -> Lsn {
    text(client, sql).await.unwrap().parse().unwrap()
}

async fn confirmed(client: &Client) -> Lsn {
    lsn(client, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots").await
}

async fn walsender_pid(client: &Client) -> u32 {
    let pid = text(client, "SELECT pid::text FROM pg_stat_replication").await;
    pid.unwrap().parse().unwrap()
}

/// Asks again and again until the answer is yes.
async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Reads up to the end of the `count`-th transaction: its commit's end and all inserts' payloads.
async fn read_transactions(stream: &mut WalStream, count: usize) -> (Lsn, Vec<bytes::Bytes>) {
    let (mut seen, mut inserts) = (0, Vec::new());
    loop {
        for item in timeout(PATIENCE, stream.next()).await.unwrap().unwrap() {
            let WalItem::Data { payload, .. } = item else { continue };
            match payload[0] {
                b'I' => inserts.push(payload),
                // tag, flags, commit LSN, end LSN
                b'C' => {
                    seen += 1;
                    if seen == count {
                        let end = payload[10..18].try_into().unwrap();
                        return (Lsn(u64::from_be_bytes(end)), inserts);
                    }
                }
                _ => {}
            }
        }
    }
}
