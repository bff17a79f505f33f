//! A database with the schema, a relay's records written by hand, and passes of retention over it.

use std::time::Duration;

use outboxd::config::Config;
use outboxd::error::Failure;
use outboxd::sandbox::Postgres;
use outboxd::store::retention::{Step, StepKind};
use outboxd::store::schema::{self, Payload};
use outboxd::store::settle;
use outboxd::upkeep::retention::{Pass, Summary};
use tokio_postgres::Client;

pub const DAY: Duration = Duration::from_secs(86_400);

/// See the module. Destination `events` is required, `audit` is not.
pub struct Place {
    pub postgres: Postgres,
    pub client: Client,
    pub config: Config,
}

impl Place {
    pub async fn new() -> Place {
        Place::with("").await
    }

    /// `more`: tables at the end of the configuration.
    pub async fn with(more: &str) -> Place {
        let postgres = Postgres::start().await.unwrap();
        let client = postgres.connect().await.unwrap();
        schema::migrate(&client, Payload::Json).await.unwrap();
        settle(&client).await.unwrap();
        let text = format!(
            "[relay]\nname = \"orders\"\n[source]\nurl = \"{}\"\n\
             [destination.events]\nservers = [\"nats://localhost\"]\nstream = \"EVENTS\"\n{more}",
            postgres.unix_url()
        );
        let config = Config::parse("test.toml", &text).unwrap();
        Place { postgres, client, config }
    }

    /// The relay's records: what `init` and a first start leave, a month ago.
    pub async fn known(&self) {
        let table = &self.config.source.table;
        let sql = format!(
            "INSERT INTO outbox.relay (name, event_table, system_identifier, timeline) \
                 VALUES ('orders', '{}.{}', '1', 1); \
             INSERT INTO outbox.destination (relay, name, required, frontier, created_at) \
                 VALUES ('orders', 'events', true, 0, now() - interval '30 days'), \
                        ('orders', 'audit', false, 0, now() - interval '30 days')",
            table.schema, table.name
        );
        self.sql(&sql).await;
    }

    pub async fn sql(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    pub async fn text(&self, sql: &str) -> String {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Rows, so many days old.
    pub async fn rows(&self, count: u32, days: u32) {
        let sql = format!(
            "INSERT INTO outbox.event (run_id, kind, payload, created_at) \
             SELECT 'run-' || n % 3, 'k', '{{}}', now() - interval '{days} days' \
             FROM generate_series(1, {count}) AS n"
        );
        self.sql(&sql).await;
    }

    /// The partition of a day so long ago, which only time makes by itself.
    pub async fn old_partition(&self, days: u32) -> String {
        let name = self
            .text(&format!(
                "SELECT to_char((now() - interval '{days} days') AT TIME ZONE 'UTC', \
                                '\"event_p\"YYYYMMDD')"
            ))
            .await;
        let day = format!("date_trunc('day', (now() - interval '{days} days') AT TIME ZONE 'UTC')");
        self.sql(&format!(
            "DO $$ BEGIN \
                 CREATE TABLE outbox.{name} (LIKE outbox.event INCLUDING ALL); \
                 EXECUTE format('ALTER TABLE outbox.event ATTACH PARTITION outbox.{name} \
                     FOR VALUES FROM (%L) TO (%L)', {day} AT TIME ZONE 'UTC', \
                     ({day} + interval '1 day') AT TIME ZONE 'UTC'); \
             END $$"
        ))
        .await;
        format!("outbox.{name}")
    }

    /// A receipt of numbers, so many days old.
    pub async fn receipt(&self, destination: &str, outcome: &str, seqs: &str, days: f64) {
        let sql = format!(
            "INSERT INTO outbox.receipt (relay, destination, generation, outcome, seqs, events, \
                 first_lsn, last_lsn, stream, stream_created, stream_seq, stream_msg_id, floor_seq, \
                 recorded_at, handed_seqs, handed_runs) \
             SELECT 'orders', '{destination}', 1, '{outcome}', '{seqs}', 1, '0/10', '0/20', 'EVENTS', \
                 'then', 1, 'id', 1, now() - {days} * interval '1 day', h.seqs, h.seqs \
             FROM (SELECT CASE WHEN '{outcome}' = 'handed' THEN array(\
                 SELECT n FROM unnest('{seqs}'::int8multirange) AS part, \
                               generate_series(lower(part), upper(part) - 1) AS n) END AS seqs) AS h"
        );
        self.sql(&sql).await;
    }

    /// One pass; its steps and what they came to.
    pub async fn pass(&self, keep: Option<Duration>) -> (Vec<Step>, Summary) {
        self.try_pass(keep, false).await.unwrap()
    }

    pub async fn try_pass(
        &self,
        keep: Option<Duration>,
        dry_run: bool,
    ) -> Result<(Vec<Step>, Summary), Failure> {
        let client = self.postgres.connect().await.unwrap();
        settle(&client).await?;
        let pass = Pass { config: &self.config, keep, hold_inserts: false, dry_run };
        let mut steps = Vec::new();
        let summary = pass.run(&client, &mut |step| steps.push(step.clone())).await?;
        Ok((steps, summary))
    }

    /// Numbers in the table.
    pub async fn seqs(&self) -> Vec<i64> {
        let rows = self.client.query("SELECT seq FROM outbox.event ORDER BY seq", &[]).await;
        rows.unwrap().iter().map(|row| row.get(0)).collect()
    }
}

/// The objects of the steps of one kind.
pub fn objects(steps: &[Step], kind: StepKind) -> Vec<&str> {
    steps.iter().filter(|step| step.step == kind).map(|step| step.object.as_str()).collect()
}
