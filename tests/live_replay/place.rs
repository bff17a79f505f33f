//! An installation to lose messages in, and `outboxd replay` as an operator runs it.

use std::process::Stdio;
use std::time::Duration;

use async_nats::jetstream;
use outboxd::lsn::Lsn;
use outboxd::sandbox::verdict::{Event, Seen, Verdict};
use outboxd::sandbox::{PostgresOptions, STREAM, World, WorldOptions};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio_postgres::Client;

use crate::support::look::{until, wal_end};
use crate::support::{SETTLE, options, workload};

/// A server that forgets ids at once, so that copies are seen.
pub const FORGETS: &str = "duplicate_window = \"100ms\"";

/// See the module.
pub struct Place {
    pub world: World,
    pub client: Client,
}

impl Place {
    /// With a broker that forgets ids at once.
    pub async fn start() -> Place {
        Place::start_with(WorldOptions { create: FORGETS.into(), ..options() }).await
    }

    /// With a server that keeps the times of commits, too.
    pub async fn start_with_times() -> Place {
        let postgres = PostgresOptions::default().set("track_commit_timestamp", "on");
        let create = FORGETS.into();
        Place::start_with(WorldOptions { create, postgres, ..options() }).await
    }

    pub async fn start_with(options: WorldOptions) -> Place {
        let world = World::start(options).await.unwrap();
        let client = world.postgres.connect().await.unwrap();
        Place { world, client }
    }

    /// So many more events, by writers whose numbers are not in the order of their commits; until
    /// they are recorded.
    pub async fn write(&self, events: u64) {
        let mut load = self.world.load(outboxd::sandbox::Workload { events, ..workload() });
        load.finish().await.unwrap();
        self.recorded().await;
    }

    /// Waits until the ledger has every row.
    pub async fn recorded(&self) {
        let sql = "SELECT coalesce(sum(unpublished), 0)::bigint FROM outbox.lag()";
        until("recorded", SETTLE, || async {
            let left: i64 = self.client.query_one(sql, &[]).await.unwrap().get(0);
            (left == 0).then_some(()).ok_or_else(|| format!("{left} are not"))
        })
        .await;
    }

    /// A position between what is recorded and what is not written yet.
    pub async fn position(&self) -> Lsn {
        wal_end(&self.client).await
    }

    /// The events that were committed later than so many rows, in the order of their numbers.
    pub async fn since(&self, rows: usize) -> Vec<Event> {
        self.world.committed().await.unwrap().split_off(rows)
    }

    pub async fn purge(&self) {
        self.stream().await.purge().await.unwrap();
    }

    pub async fn stream(&self) -> jetstream::stream::Stream {
        let client = self.world.broker.connect().await.unwrap();
        jetstream::new(client).get_stream(STREAM).await.unwrap()
    }

    pub async fn count(&self) -> u64 {
        self.counted().await.unwrap()
    }

    async fn counted(&self) -> Result<u64, String> {
        let client = self.world.broker.connect().await.map_err(|error| error.to_string())?;
        let state = outboxd::sandbox::stream::state(&client, STREAM).await;
        state.map(|state| state.messages).map_err(|error| error.to_string())
    }

    pub async fn messages(&self) -> Vec<Seen> {
        self.world.messages().await.unwrap()
    }

    /// Runs `outboxd replay … --json`; its exit code and JSON, or its words.
    pub async fn replay(&self, arguments: &[&str]) -> (i32, Value, String) {
        let all = [&["replay"], arguments, &["--json"]].concat();
        let output = self.world.relay.output(&all).await.unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code().unwrap(), json, words)
    }

    /// The same, which has to do all that it planned.
    pub async fn done(&self, arguments: &[&str]) -> Value {
        let (code, report, words) = self.replay(arguments).await;
        assert_eq!(code, 0, "{report:#}\n{words}");
        assert_eq!((&report["state"], &report["left"]), (&"finished".into(), &0.into()), "{words}");
        report
    }

    /// The words with which it refuses.
    pub async fn refused(&self, arguments: &[&str]) -> String {
        let (code, report, words) = self.replay(arguments).await;
        assert_eq!((code, report), (1, Value::Null), "{words}");
        assert!(words.contains("\nnext: "), "{words}");
        words
    }

    /// Starts it, to be ended by a signal.
    pub fn begin(&self, arguments: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboxd"));
        command.arg("-c").arg(self.world.relay.configuration()).arg("replay").args(arguments);
        command.current_dir("/").kill_on_drop(true).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Waits until the stream has so many messages.
    pub async fn reach(&self, messages: u64) {
        until("messages in the stream", Duration::from_secs(60), || async {
            let count = self.counted().await?;
            (count >= messages).then_some(()).ok_or_else(|| format!("{count} of {messages}"))
        })
        .await;
    }

    /// Judges the stream as one that has these events and no others.
    pub async fn judge(&self, events: &[Event]) -> Verdict {
        let none = std::collections::HashSet::new();
        let verdict = Verdict::of(events, &none, &self.messages().await, &[]);
        println!("{verdict}");
        verdict
    }

    /// Every event once, in the order of its run, and nothing else.
    pub async fn has_exactly(&self, events: &[Event]) {
        let verdict = self.judge(events).await;
        assert!(verdict.is_ok(), "{verdict}");
        assert_eq!(self.count().await, events.len() as u64);
    }
}

pub fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name} of {report:#}"))
}
