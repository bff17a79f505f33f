//! Events that were committed while no relay ran, and the way back to that moment: every arm reads
//! the same WAL again, into an empty stream, with a ledger that knows of nothing.

use std::path::Path;
use std::time::{Duration, Instant};

use outboxd::lsn::Lsn;
use outboxd::sandbox::{PostgresOptions, STREAM, World, WorldOptions};
use serde_json::Value;
use tokio_postgres::Client;

use crate::Result;

/// The relay's slot; a copy of it stays where the backlog begins.
const SLOT: &str = "outboxd_world";
const STOP: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What is written.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub name: &'static str,
    pub events: u64,
    pub rows_per_transaction: u64,
    pub runs: u64,
    pub payload_bytes: usize,
}

/// How the relay goes about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    pub pipeline: String,
    pub socket: Socket,
}

/// The way to PostgreSQL; nats-server has TCP only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Socket {
    Unix,
    Tcp,
}

impl Way {
    pub fn new(pipeline: &str, socket: Socket) -> Way {
        Way { pipeline: pipeline.to_owned(), socket }
    }

    pub fn socket_name(&self) -> &'static str {
        match self.socket {
            Socket::Unix => "Unix",
            Socket::Tcp => "TCP",
        }
    }
}

/// See the module.
pub struct Backlog {
    pub world: World,
    pub spec: Spec,
    /// Behind its last transaction.
    pub end: Lsn,
    pub nats: async_nats::Client,
    client: Client,
    /// As the sandbox wrote it.
    configuration: String,
}

impl Backlog {
    pub async fn write(program: &Path, spec: Spec) -> Result<Backlog> {
        let start = Instant::now();
        // Neither what autovacuum does nor a checkpoint belongs to one arm alone.
        let postgres = PostgresOptions::default()
            .set("autovacuum", "off")
            .set("checkpoint_timeout", "1h")
            .set("max_wal_size", "32GB");
        let options = WorldOptions {
            program: program.to_owned(),
            postgres,
            destination: "pipeline = \"auto\"".to_owned(),
            ..WorldOptions::default()
        };
        let world = World::prepare(options).await?;
        let client = world.postgres.connect().await?;
        // Alone: no slot is made in a transaction that writes.
        client.batch_execute(KEEP_SLOT).await?;
        client.batch_execute(PREPARE).await?;
        insert(&world, spec).await?;
        client.batch_execute("CHECKPOINT").await?;
        let end = client.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await?;
        println!(
            "{}: {} events written in {:.1} s",
            spec.name,
            spec.events,
            start.elapsed().as_secs_f64()
        );
        Ok(Backlog {
            spec,
            end: end.get::<_, &str>(0).parse()?,
            nats: world.broker.connect().await?,
            client,
            configuration: std::fs::read_to_string(world.relay.configuration())?,
            world,
        })
    }

    /// Chooses the relay's way. False when the program does not know it.
    pub async fn choose(&self, way: &Way) -> Result<bool> {
        let url = match way.socket {
            Socket::Unix => self.world.postgres.unix_url(),
            Socket::Tcp => self.world.postgres.url(),
        };
        let exclusive = if way.pipeline == "sequence" { "exclusive = true\n" } else { "" };
        let lines = self.configuration.lines().map(|line| match line {
            _ if line.starts_with("url = ") => format!("url = \"{url}\"\n"),
            _ if line.starts_with("pipeline = ") => {
                format!("pipeline = \"{}\"\n{exclusive}", way.pipeline)
            }
            _ => format!("{line}\n"),
        });
        std::fs::write(self.world.relay.configuration(), lines.collect::<String>())?;
        let shown = self.world.relay.output(&["config", "show"]).await?;
        Ok(shown.status.success())
    }

    /// Back to the moment before the first relay started.
    pub async fn rewind(&mut self) -> Result<()> {
        if self.world.relay.is_running() {
            self.world.relay.terminate(STOP).await?;
        }
        let start = Instant::now();
        while let Err(error) = self.client.batch_execute(REWIND_SLOT).await {
            // Its walsender takes a moment to notice that the relay is gone.
            if start.elapsed() > STOP {
                return Err(error.into());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        // Not purged: a purge keeps the ids that were seen.
        self.ask(&format!("STREAM.DELETE.{STREAM}"), "").await?;
        self.world.relay.run(&["init", "--create-streams"]).await?;
        self.client.batch_execute(REWIND_LEDGER).await?;
        Ok(())
    }

    /// Waits until the slot's position is behind the backlog: all of it is in the ledger.
    pub async fn settle(&self) -> Result<()> {
        let sql = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1";
        let start = Instant::now();
        loop {
            let confirmed: Lsn =
                self.client.query_one(sql, &[&SLOT]).await?.get::<_, &str>(0).parse()?;
            if confirmed >= self.end {
                return Ok(());
            }
            if start.elapsed() > STOP {
                let log = self.world.relay.log();
                return Err(format!("the slot is at {confirmed} of {}:\n{log}", self.end).into());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Messages in the stream.
    pub async fn stored(&self) -> Result<u64> {
        let info = self.ask(&format!("STREAM.INFO.{STREAM}"), "").await?;
        let messages = info.pointer("/state/messages").and_then(Value::as_u64);
        messages.ok_or_else(|| format!("no number of messages in {info}").into())
    }

    /// A question to JetStream.
    pub async fn ask(&self, verb: &str, body: &str) -> Result<Value> {
        let subject = format!("$JS.API.{verb}");
        let answer = self.nats.request(subject, body.to_owned().into()).await?;
        let answer: Value = serde_json::from_slice(&answer.payload)?;
        match answer.get("error") {
            Some(error) => Err(format!("{verb}: {error}").into()),
            None => Ok(answer),
        }
    }

    /// Process that sends the WAL to whoever reads the slot.
    pub async fn walsender(&self) -> Result<Option<u32>> {
        let sql = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1";
        let row = self.client.query_one(sql, &[&SLOT]).await?;
        Ok(row.get::<_, Option<i32>>(0).and_then(|pid| pid.try_into().ok()))
    }

    /// Where the slot's reader connects.
    pub fn host(&self, socket: Socket) -> String {
        match socket {
            Socket::Unix => self.world.postgres.socket_dir().to_string_lossy().into_owned(),
            Socket::Tcp => "127.0.0.1".to_owned(),
        }
    }

    pub fn slot(&self) -> &'static str {
        SLOT
    }
}

/// Several sessions where there are several transactions, each with runs of its own, so that the
/// numbers of a run ascend in the order of commits.
async fn insert(world: &World, spec: Spec) -> Result<()> {
    let sessions = if spec.rows_per_transaction < spec.events && spec.runs > 1 { 2 } else { 1 };
    let (rows, runs) = (spec.rows_per_transaction, spec.runs.next_multiple_of(sessions));
    let mut writers = tokio::task::JoinSet::new();
    for first in 1..=sessions {
        let client = world.postgres.connect().await?;
        let call = format!(
            "CALL bench.write({first}, {}, {sessions}, {rows}, {runs}, {})",
            spec.events, spec.payload_bytes
        );
        writers.spawn(async move {
            client.batch_execute("SET synchronous_commit = off").await?;
            client.batch_execute(&call).await
        });
    }
    while let Some(written) = writers.join_next().await {
        written??;
    }
    let client = world.postgres.connect().await?;
    let row = client.query_one("SELECT count(*) FROM outbox.event", &[]).await?;
    let count: i64 = row.get(0);
    match u64::try_from(count) {
        Ok(count) if count == spec.events => Ok(()),
        _ => Err(format!("{count} rows of {} were written", spec.events).into()),
    }
}

const KEEP_SLOT: &str = "SELECT pg_copy_logical_replication_slot('outboxd_world', 'bench_start')";

/// Bodies are those of the sandbox, which tells from them whether the stream is right. Large ones
/// stay as large as they are: `x`s would shrink to nothing.
const PREPARE: &str = r#"
    CREATE SCHEMA bench;
    CREATE TABLE bench.relay AS TABLE outbox.relay;
    CREATE TABLE bench.destination AS TABLE outbox.destination;
    CREATE TABLE bench.receipt AS TABLE outbox.receipt;
    ALTER TABLE outbox.event ALTER COLUMN payload SET STORAGE EXTERNAL;
    CREATE PROCEDURE bench.write(at bigint, last bigint, step bigint, rows bigint, runs bigint, bytes int)
    LANGUAGE plpgsql AS $$
    BEGIN
        WHILE at <= last LOOP
            INSERT INTO outbox.event (id, run_id, kind, payload)
            SELECT id, run, 'order.created',
                   (head || repeat('x', greatest(bytes - length(head) - 2, 0)) || '"}')::json
              FROM generate_series(at, least(at + (rows - 1) * step, last), step) AS n,
                   LATERAL (SELECT lpad(to_hex(n), 32, '0')::uuid AS id, 'run-' || n % runs AS run) AS who,
                   LATERAL (SELECT format('{"id":"%s","run":"%s","n":%s,"fill":"', id, run, n) AS head) AS h
             ORDER BY n;
            COMMIT;
            at := at + rows * step;
        END LOOP;
    END $$;
"#;

const REWIND_SLOT: &str = "\
    SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
     WHERE slot_name = 'outboxd_world'; \
    SELECT pg_copy_logical_replication_slot('bench_start', 'outboxd_world');";

const REWIND_LEDGER: &str = "\
    TRUNCATE outbox.relay, outbox.destination, outbox.receipt, outbox.dead_letter; \
    INSERT INTO outbox.relay SELECT * FROM bench.relay; \
    INSERT INTO outbox.destination SELECT * FROM bench.destination; \
    INSERT INTO outbox.receipt OVERRIDING SYSTEM VALUE SELECT * FROM bench.receipt; \
    CHECKPOINT";
