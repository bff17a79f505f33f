//! WAL that the server writes with the relay, less what the same inserts alone write. Owns its servers;
//! `make bench` measures with it, too.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panic")]

use std::path::Path;
use std::time::{Duration, Instant};

use outboxd::lsn::Lsn;
use outboxd::sandbox::{Broker, Nats, Postgres, PostgresOptions, World, WorldOptions};
use tokio_postgres::Client;

/// Events per second, in transactions of ten.
pub const RATE: u64 = 2_000;
const IN_ONE: u64 = 10;
/// Bytes per event of the ledger that are too many.
pub const LIMIT: f64 = 5.0;
/// The relay is done with the last event long before.
const SETTLE: Duration = Duration::from_secs(120);

/// A way to keep account of what is published.
pub struct Mode {
    pub name: &'static str,
    /// Lines of the destination.
    destination: &'static str,
    /// `column` or `delete`, which only a table of the application's own has.
    mark: Option<&'static str>,
    /// Is it held to the limit?
    pub limited: bool,
}

/// The ledger alone first.
pub const MODES: &[Mode] = &[
    Mode { name: "ledger", destination: "", mark: None, limited: true },
    Mode {
        name: "ledger, filter takes every second",
        destination: "kinds = [\"even\"]",
        mark: None,
        limited: true,
    },
    Mode { name: "mark = column", destination: "", mark: Some("column"), limited: false },
    Mode { name: "mark = delete", destination: "", mark: Some("delete"), limited: false },
];

/// WAL bytes per event of one round.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    pub alone: f64,
    pub with_relay: f64,
    /// Written in a second.
    pub receipts: f64,
}

impl Round {
    /// What the relay writes.
    pub fn own(&self) -> f64 {
        self.with_relay - self.alone
    }
}

/// One installation.
pub struct Bench {
    world: World,
    client: Client,
    insert: &'static str,
}

impl Bench {
    pub async fn on(program: &Path, mode: &Mode) -> Bench {
        let postgres = PostgresOptions::default()
            // Both would fall on one half of a round and not on the other.
            .set("autovacuum", "off")
            .set("checkpoint_timeout", "1h")
            .set("max_wal_size", "16GB");
        let mut options = WorldOptions {
            program: program.to_owned(),
            postgres,
            destination: mode.destination.into(),
            ..WorldOptions::default()
        };
        let server = Postgres::start_with(options.postgres.clone()).await.unwrap();
        let mut insert = INSERT;
        if let Some(mark) = mode.mark {
            server.connect().await.unwrap().batch_execute(OWN_TABLE).await.unwrap();
            options.source = format!("table = \"public.outbox\"\nmark = \"{mark}\"");
            insert = OWN_INSERT;
        }
        let broker = Broker::Single(Box::new(Nats::start().await.unwrap()));
        let world = World::assemble(options, server, broker).await.unwrap();
        // Partitions are made once a day, and are no cost of an event.
        world.relay.run(&["prune"]).await.unwrap();
        let client = world.postgres.connect().await.unwrap();
        Bench { world, client, insert }
    }

    /// So many seconds of inserts alone, and as many with the relay.
    pub async fn round(&mut self, seconds: u64) -> Round {
        let transactions = seconds * RATE / IN_ONE;
        let alone = self.half(transactions, false).await;
        self.world.start_relay().await.unwrap();
        // What was inserted without it is not counted twice.
        self.caught_up().await;
        self.marked().await;
        let receipts = self.receipts().await;
        let start = Instant::now();
        let with_relay = self.half(transactions, true).await;
        let took = start.elapsed().as_secs_f64();
        let receipts = (self.receipts().await - receipts) as f64 / took;
        self.world.relay.terminate(SETTLE).await.unwrap();
        Round { alone, with_relay, receipts }
    }

    /// WAL bytes per event while the events are inserted and, with the relay, published and
    /// recorded. A checkpoint first: then each half pays for the same pages once more in full.
    async fn half(&mut self, transactions: u64, with_relay: bool) -> f64 {
        self.client.batch_execute("CHECKPOINT").await.unwrap();
        let before = self.end().await;
        let start = Instant::now();
        for n in 0..transactions {
            let due = Duration::from_micros(n * IN_ONE * 1_000_000 / RATE);
            tokio::time::sleep_until((start + due).into()).await;
            self.client.batch_execute(self.insert).await.unwrap();
        }
        let took = start.elapsed().as_secs_f64();
        let wanted = (transactions * IN_ONE) as f64 / RATE as f64;
        if took > wanted * 1.1 {
            println!("the machine is busy: {took:.1} s in place of {wanted:.1} s");
        }
        if with_relay {
            self.caught_up().await;
            self.marked().await;
        }
        (self.end().await.0 - before.0) as f64 / (transactions * IN_ONE) as f64
    }

    async fn end(&self) -> Lsn {
        let sql = "SELECT pg_current_wal_insert_lsn()::text";
        self.client.query_one(sql, &[]).await.unwrap().get::<_, &str>(0).parse().unwrap()
    }

    async fn caught_up(&self) {
        let (end, start) = (self.end().await, Instant::now());
        while self.world.confirmed().await.unwrap() < end {
            assert!(start.elapsed() < SETTLE, "{}", self.world.relay.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Rows are marked a moment after their receipts.
    async fn marked(&self) {
        if self.insert == INSERT {
            return;
        }
        let start = Instant::now();
        loop {
            let sql = "SELECT count(*) FROM public.outbox WHERE published_at IS NULL";
            let left: i64 = self.client.query_one(sql, &[]).await.unwrap().get(0);
            if left == 0 {
                return;
            }
            assert!(start.elapsed() < SETTLE, "{left} left\n{}", self.world.relay.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn receipts(&self) -> i64 {
        let sql = "SELECT count(*) FROM outbox.receipt";
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }
}

/// About what an application's event is; every second one is of the kind that the filter takes.
const INSERT: &str = "\
    SELECT outbox.publish(run_id => 'run-' || n, kind => CASE n % 2 WHEN 0 THEN 'even' ELSE 'odd' END, \
                          payload => ('{\"fill\":\"' || repeat('x', 200) || '\"}')::json) \
      FROM generate_series(1, 10) n";

const OWN_TABLE: &str = "\
    CREATE TABLE public.outbox ( \
      seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id uuid NOT NULL DEFAULT gen_random_uuid(), \
      tenant text, run_id text NOT NULL, kind text NOT NULL, version int, payload json, \
      headers jsonb, created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz)";

const OWN_INSERT: &str = "\
    INSERT INTO public.outbox (run_id, kind, payload) \
    SELECT 'run-' || n, 'even', ('{\"fill\":\"' || repeat('x', 200) || '\"}')::json \
      FROM generate_series(1, 10) n";
