//! Marks rows that are done, for `[source] mark` other than `ledger`: reads receipts as they come,
//! and marks what every destination has decided. Behind the receipts by a moment, never ahead.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio_postgres::Client;

use super::Job;
use super::marks::Marks;
use crate::admin::Status;
use crate::config::Config;
use crate::error::Failure;
use crate::store::mark::{self, Marked};

/// How often receipts are looked for: one look-up by index.
const EVERY: Duration = Duration::from_millis(250);
/// How often it is recorded how far rows are marked: it only saves the next start some work.
const SAVE_EVERY: Duration = Duration::from_secs(10);

/// See the module.
pub struct MarkJob {
    config: Arc<Config>,
    status: Arc<Status>,
    marks: Option<Marks>,
    saved_at: Option<Instant>,
}

impl MarkJob {
    /// For a session.
    pub fn new(config: Arc<Config>, status: Arc<Status>) -> MarkJob {
        MarkJob { config, status, marks: None, saved_at: None }
    }

    /// The last time in a session that stops: to the end, and recorded.
    pub async fn finish(
        config: &Config,
        status: &Arc<Status>,
        client: &Client,
    ) -> Result<(), Failure> {
        let mut job = MarkJob::new(Arc::new(config.clone()), Arc::clone(status));
        job.pass(client).await
    }

    async fn pass(&mut self, client: &Client) -> Result<(), Failure> {
        let (relay, source) = (&self.config.relay.name, &self.config.source);
        let marks = match &mut self.marks {
            Some(marks) => marks,
            None => {
                let places = mark::places(client, relay, source.mark).await?;
                self.marks.insert(Marks::new(places))
            }
        };
        marks.again();
        let mut more = true;
        while more {
            more = false;
            for side in 0..marks.len() {
                let Some((name, after)) = marks.wants(side) else { continue };
                let part = mark::part(client, relay, name, after).await?;
                for (other, name) in marks.to_ask(side) {
                    let seqs = mark::among(client, relay, &name, &part.seqs).await?;
                    marks.also(other, &seqs);
                }
                more |= part.more;
                marks.take(side, &part);
            }
            loop {
                let batch = marks.batch();
                if batch.is_empty() {
                    break;
                }
                match mark::mark(client, source, &batch).await? {
                    Marked::Rows(rows) => {
                        self.status.marked(rows);
                        marks.marked(&batch);
                    }
                    Marked::Busy if marks.busy(&batch) => {}
                    Marked::Busy => break,
                }
            }
        }
        let now = Instant::now();
        if self.saved_at.is_none_or(|at| now >= at + SAVE_EVERY) {
            self.saved_at = Some(now);
            for (destination, receipt) in marks.take_saves() {
                mark::save(client, relay, &destination, receipt).await?;
            }
        }
        Ok(())
    }
}

impl Job for MarkJob {
    fn name(&self) -> &'static str {
        "mark"
    }

    fn every(&self) -> Duration {
        EVERY
    }

    fn keeps_connection(&self) -> bool {
        true
    }

    fn run_once<'a>(&'a mut self, client: &'a Client) -> BoxFuture<'a, Result<(), Failure>> {
        async move {
            let passed = self.pass(client).await;
            if passed.is_err() {
                // What was read and not marked is read again.
                self.marks = None;
            }
            passed
        }
        .boxed()
    }
}
