//! The statements of the slow path on a real server: where a sweep begins, what it finds, what was
//! handed over, and the rows themselves.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]
#![allow(clippy::indexing_slicing, reason = "a test fails by panic")]

mod destinations;
mod frontier;
mod look;
mod order;
mod rows;
mod waiting;
mod withdrawn;

use outboxd::config::{ColumnMap, QualifiedName, SourceConfig};
use outboxd::lsn::Lsn;
use outboxd::sandbox::{Dice, Postgres, PostgresOptions};
use outboxd::store::Store;
use outboxd::store::ledger::{Receipt, ReceiptOutcome};
use outboxd::store::schema::{self, Payload};
use tokio_postgres::{Client, NoTls};

/// The relay's source with this table.
pub fn source(schema: &str, name: &str) -> SourceConfig {
    SourceConfig {
        url: String::new().into(),
        replication_url: None,
        slot: "outboxd_orders".into(),
        publication: "outboxd_orders".into(),
        table: QualifiedName { schema: schema.into(), name: name.into() },
        columns: ColumnMap::default(),
        mark: Default::default(),
        connect_timeout: std::time::Duration::from_secs(10),
    }
}

/// A server with the schema, a session, and the statements of relay `orders` on the own table.
pub async fn ready() -> (Postgres, Client, Store) {
    let options = PostgresOptions::default().set("max_prepared_transactions", "5");
    let postgres = Postgres::start_with(options).await.unwrap();
    let client = postgres.connect().await.unwrap();
    schema::migrate(&client, Payload::Json).await.unwrap();
    let store = Store::open(&client, "orders", &source("outbox", "event")).await.unwrap();
    (postgres, client, store)
}

/// A session of any role.
pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(async { connection.await.is_ok() });
    client
}

/// The one value of a query.
pub async fn text(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Writes so many events, one run.
pub async fn publish(client: &Client, events: i64) {
    let sql = "SELECT outbox.publish('run', 'k', '{}') FROM generate_series(1, $1::int8)";
    client.execute(sql, &[&events]).await.unwrap();
}

/// A receipt for destination `events`.
pub fn receipt(outcome: ReceiptOutcome, seqs: &[(i64, i64)]) -> Receipt {
    Receipt {
        destination: "events".into(),
        outcome,
        seqs: seqs.to_vec(),
        late: vec![],
        handed: vec![],
        events: 1,
        unmatched: 0,
        first_lsn: None,
        last_lsn: Some(Lsn(10)),
        stream: "EVENTS".into(),
        stream_created: "2026-11-30T15:08:00.123456789Z".into(),
        stream_seq: 1,
        stream_msg_id: "id".into(),
        floor: 1,
    }
}

/// Dice whose seed is told, so that a failure can be repeated.
pub fn dice() -> Dice {
    let seed = std::env::var("OUTBOXD_TEST_SEED").ok().map(|seed| seed.parse().unwrap());
    let seed = seed.unwrap_or_else(Dice::fresh_seed);
    println!("OUTBOXD_TEST_SEED={seed}");
    Dice::new(seed)
}

/// A number below `bound`.
pub fn below(dice: &mut Dice, bound: i64) -> i64 {
    i64::try_from(dice.below(u64::try_from(bound).unwrap())).unwrap()
}
