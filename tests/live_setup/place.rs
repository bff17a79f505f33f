//! A database to set up, and the program beside it.

use std::process::Output;

use assert_cmd::Command;
use outboxd::sandbox::{Postgres, PostgresOptions};
use serde_json::Value;
use tokio_postgres::Client;

pub const NOTHING: &str = "schema 0, publications 0, slots 0";
pub const EVERYTHING: &str = "schema 1, publications 1, slots 1";

/// A database to set up, and how to call the program on it.
pub struct Place {
    pub postgres: Postgres,
    pub client: Client,
    pub directory: tempfile::TempDir,
    pub url: String,
    /// Further keys of `[destination.events]`, after `servers`.
    pub broker: String,
}

/// What the program said.
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Place {
    pub async fn new() -> Place {
        Place::with(PostgresOptions::default()).await
    }

    pub async fn with(options: PostgresOptions) -> Place {
        let postgres = Postgres::start_with(options).await.unwrap();
        let client = postgres.connect().await.unwrap();
        let (url, directory) = (postgres.url(), tempfile::tempdir().unwrap());
        let broker = "servers = [\"nats://127.0.0.1:1\"]".to_owned();
        Place { postgres, client, directory, url, broker }
    }

    /// The same database as another role.
    pub fn used_by(mut self, role: &str) -> Place {
        self.url = self.postgres.url_of(role, "postgres");
        self
    }

    pub fn config(&self) -> String {
        format!(
            "[relay]\nname = \"orders\"\n[source]\nurl = \"{}\"\n[destination.events]\n\
             stream = \"EVENTS\"\n{}\n",
            self.url, self.broker
        )
    }

    /// Runs the program in a thread of its own: the client's connection is served meanwhile.
    pub async fn outboxd(&self, line: &str) -> Said {
        std::fs::write(self.directory.path().join("outboxd.toml"), self.config()).unwrap();
        let mut command = Command::cargo_bin("outboxd").unwrap();
        command.current_dir(self.directory.path()).args(line.split_whitespace());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("OUTBOXD_") || name.starts_with("PG") {
                command.env_remove(name);
            }
        }
        let run = tokio::task::spawn_blocking(move || command.output().unwrap());
        let Output { status, stdout, stderr } = run.await.unwrap();
        Said {
            code: status.code(),
            out: String::from_utf8(stdout).unwrap(),
            err: String::from_utf8(stderr).unwrap(),
        }
    }

    pub async fn done(&self, line: &str) -> String {
        let said = self.outboxd(line).await;
        assert_eq!(said.code, Some(0), "{line}: {}{}", said.out, said.err);
        said.out
    }

    /// The program refuses, and says these words.
    pub async fn refused(&self, line: &str, words: &[&str]) {
        let said = self.outboxd(line).await;
        assert_eq!(said.code, Some(1), "{line}: {}{}", said.out, said.err);
        for word in words {
            assert!(said.err.contains(word), "{word:?} is not in {}", said.err);
        }
    }

    pub async fn sql(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap();
    }

    pub async fn text(&self, sql: &str) -> String {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    pub async fn server_version(&self) -> i32 {
        self.text("SHOW server_version_num").await.parse().unwrap()
    }

    /// Schema, publication, slot, in one line each, as far as they exist.
    pub async fn found(&self) -> String {
        self.text(
            "SELECT format('schema %s, publications %s, slots %s', \
                 (SELECT count(*) FROM pg_namespace WHERE nspname = 'outbox'), \
                 (SELECT count(*) FROM pg_publication), \
                 (SELECT count(*) FROM pg_replication_slots))",
        )
        .await
    }

    /// Findings about the source that are not ok.
    pub async fn faults(&self) -> Vec<String> {
        let mut faults = self.all_faults().await;
        faults.retain(|fault| fault.contains(" source."));
        faults
    }

    /// Findings that are not ok: `severity id`, sorted.
    pub async fn all_faults(&self) -> Vec<String> {
        let said = self.outboxd("check --json").await;
        let report: Value = serde_json::from_str(&said.out).unwrap();
        let mut faults = Vec::new();
        for finding in report["findings"].as_array().unwrap() {
            let part = |key: &str| finding[key].as_str().unwrap().to_owned();
            let (id, severity) = (part("id"), part("severity"));
            assert_eq!(severity == "ok", part("remedy").is_empty(), "{finding}");
            // The sandbox has no limit for slots and does not sync to disk.
            let by_design = ["source.slot-limit", "source.fsync"].contains(&id.as_str());
            if severity != "ok" && !by_design {
                faults.push(format!("{severity} {id}"));
            }
        }
        faults.sort();
        faults
    }
}
