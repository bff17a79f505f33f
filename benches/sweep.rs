//! What a look at an idle outbox costs: it must read as many pages over ten times as many retained
//! rows. Owns its server; needs no broker. `make bench-sweep ARGS="--rows 10000000"`

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panic")]

use std::process::ExitCode;
use std::time::Instant;

use outboxd::config::{ColumnMap, QualifiedName, SourceConfig};
use outboxd::sandbox::{Postgres, PostgresOptions};
use outboxd::store::Store;
use outboxd::store::destinations::Progress;
use outboxd::store::ledger::{Receipt, ReceiptOutcome};
use outboxd::store::schema::{self, Payload};
use outboxd::store::sweep::{AFTER_LOOK, BEFORE_LOOK, look_sql};
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

/// Retained rows unless `--rows` says otherwise; the first look is at a tenth of them.
const ROWS: i64 = 10_000_000;
/// Numbers of a transaction that was rolled back: nothing will ever be in any receipt for them.
const ABORTED: i64 = 100_000;
/// Numbers of one receipt.
const FLUSH: i64 = 10_000;
const LIMIT: usize = 10_000;

struct Bench {
    client: Client,
    store: Store,
    source: SourceConfig,
}

/// Pages that a look read.
#[derive(Debug, Clone, Copy)]
struct Cost {
    idle: i64,
    aborted: i64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let rows = rows();
    println!("looks at an outbox of {} and of {rows} retained rows, all decided", rows / 10);
    let options = PostgresOptions::default()
        .set("wal_level", "minimal")
        .set("max_wal_senders", "0")
        .set("max_wal_size", "8GB")
        .set("shared_buffers", "256MB")
        // What it does, and when, is not what is measured.
        .set("autovacuum", "off");
    let postgres = Postgres::start_with(options).await.unwrap();
    let bench = Bench::on(&postgres).await;
    let few = bench.cost(rows / 10).await;
    let many = bench.cost(rows - rows / 10).await;
    let mut ok = true;
    for (what, few, many) in [
        ("nothing undecided", few.idle, many.idle),
        ("100,000 aborted numbers", few.aborted, many.aborted),
    ] {
        // Pages are few: one more or less is within the measure.
        let same = (many - few).abs() <= (few / 10).max(1);
        ok &= same;
        let verdict = if same { "PASS" } else { "FAIL" };
        println!("{verdict} {what}: {few} pages over {} rows, {many} over {rows}", rows / 10);
    }
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// `--rows N`; what cargo passes besides is of no interest.
fn rows() -> i64 {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--rows").skip(1);
    arguments.next().map_or(ROWS, |rows| rows.parse().expect("--rows takes a number")).max(10)
}

impl Bench {
    async fn on(postgres: &Postgres) -> Bench {
        let client = postgres.connect().await.unwrap();
        schema::migrate(&client, Payload::Json).await.unwrap();
        // Its rows are made for this one look: no WAL for them.
        client.batch_execute("ALTER TABLE outbox.event_default SET UNLOGGED").await.unwrap();
        let source = SourceConfig {
            url: String::new().into(),
            replication_url: None,
            slot: "outboxd_bench".into(),
            publication: "outboxd_bench".into(),
            table: QualifiedName { schema: "outbox".into(), name: "event".into() },
            columns: ColumnMap::default(),
            mark: Default::default(),
            connect_timeout: std::time::Duration::from_secs(10),
        };
        let store = Store::open(&client, "bench", &source).await.unwrap();
        store.ensure_destinations(&client, &[("events", true)]).await.unwrap();
        Bench { client, store, source }
    }

    /// Adds so many rows with their receipts, and looks when nothing is undecided, then again with
    /// numbers that were drawn in vain.
    async fn cost(&self, rows: i64) -> Cost {
        let first = self.last().await + 1;
        let start = Instant::now();
        self.insert(rows).await;
        let last = self.last().await;
        println!("\n{rows} rows in {:.1} s", start.elapsed().as_secs_f64());
        let receipts: Vec<Receipt> = (0..=(last - first) / FLUSH)
            .map(|n| receipt(first + n * FLUSH, (first + (n + 1) * FLUSH - 1).min(last)))
            .collect();
        let ids = self.store.append(&self.client, 1, &receipts).await.unwrap();
        let receipt_id = ids.last().copied().unwrap();
        self.advance(last, receipt_id).await;
        let idle = self.look("nothing undecided").await;

        self.client.batch_execute("BEGIN").await.unwrap();
        self.insert(ABORTED).await;
        self.client.batch_execute("ROLLBACK").await.unwrap();
        let aborted = self.look("100,000 aborted numbers").await;
        let last = self.last().await;
        self.advance(last, receipt_id).await;
        Cost { idle, aborted }
    }

    async fn advance(&self, frontier: i64, receipt_id: i64) {
        let name = "events".to_owned();
        let progress = Progress { name, frontier, holes: Vec::new(), receipt_id, gap: None };
        self.store.advance(&self.client, &progress).await.unwrap();
    }

    async fn insert(&self, rows: i64) {
        let sql = "INSERT INTO outbox.event (id, run_id, kind) \
                   SELECT '0191e0d4-5d3c-7000-8000-000000000001', 'r', 'k' \
                   FROM generate_series(1, $1::int8)";
        self.client.execute(sql, &[&rows]).await.unwrap();
    }

    async fn last(&self) -> i64 {
        self.store.last_number(&self.client).await.unwrap()
    }

    /// Pages of the very statement, explained, and then what the store makes of it.
    async fn look(&self, what: &str) -> i64 {
        let progress = self.store.progress(&self.client, &["events"]).await.unwrap().remove(0);
        let last = self.last().await;
        let pages = self.explain(what, &progress, last).await;
        let start = Instant::now();
        let look = self.store.look(&self.client, &progress, last, &[], LIMIT).await.unwrap();
        println!("again: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
        assert_eq!((look.undecided.len(), look.covered_to), (0, last));
        pages
    }

    async fn explain(&self, what: &str, progress: &Progress, last: i64) -> i64 {
        let Progress { name, frontier, receipt_id, .. } = progress;
        let (holes, held, limit) = ("{}", "{}", i64::try_from(LIMIT).unwrap());
        let values: [&(dyn ToSql + Sync); 8] =
            [&"bench", name, receipt_id, &holes, frontier, &last, &held, &limit];
        let sql = format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {}", look_sql(&self.source));
        self.client.batch_execute(BEFORE_LOOK).await.unwrap();
        let plan = self.client.query(&sql, &values).await.unwrap();
        self.client.batch_execute(AFTER_LOOK).await.unwrap();
        let plan: Vec<&str> = plan.iter().map(|row| row.get(0)).collect();
        println!("\n{what}:\n{}", plan.join("\n"));
        pages(&plan)
    }
}

/// Pages of the whole statement: the line under the plan's first.
fn pages(plan: &[&str]) -> i64 {
    let line = plan.get(1).and_then(|line| line.trim().strip_prefix("Buffers: shared "));
    let of = |name: &str| {
        let word = line.and_then(|line| line.split([' ', ',']).find_map(|w| w.strip_prefix(name)));
        word.map_or(0, |pages| pages.parse::<i64>().unwrap())
    };
    of("hit=") + of("read=")
}

fn receipt(first: i64, last: i64) -> Receipt {
    Receipt {
        destination: "events".into(),
        outcome: ReceiptOutcome::Published,
        seqs: vec![(first, last)],
        late: vec![],
        handed: vec![],
        events: 1,
        unmatched: 0,
        first_lsn: None,
        last_lsn: None,
        stream: "EVENTS".into(),
        stream_created: "2026-11-30T15:08:00.123456789Z".into(),
        stream_seq: 1,
        stream_msg_id: "id".into(),
        floor: 1,
    }
}
