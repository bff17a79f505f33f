//! One pass of retention: partitions made ahead, settled ones dropped, settled rows deleted, the
//! ledger compacted. Step by step, each a short transaction; locks that are not to be had are tried
//! again after a pause. The schedule of `run` and `outboxd prune` do the same.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio_postgres::Client;

use super::Job;
use super::patience::Patience;
use crate::admin::Status;
use crate::admin::retention::Figures;
use crate::config::Config;
use crate::error::Failure;
use crate::store::retention::{self, Bounds, SCAN_BYTES, Step, StepKind, Wanted};
use crate::store::schema;

/// Least pause after a batch. A longer batch is followed by a pause of its own length, so that
/// autovacuum, replicas and the application get at least half of the time.
const PAUSE: Duration = Duration::from_millis(50);

/// Least pause after a partition: those that waited for it go on meanwhile.
const BREATH: Duration = Duration::from_millis(10);

/// SQLSTATE of a lock that was not to be had in time.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// What a pass does, and how.
#[derive(Debug, Clone)]
pub struct Pass<'a> {
    /// The relay's configuration.
    pub config: &'a Config,
    /// How long rows stay; `None`: for ever.
    pub keep: Option<Duration>,
    /// Attach partitions though the default partition is large, and INSERTs wait meanwhile.
    pub hold_inserts: bool,
    /// Say what would be done.
    pub dry_run: bool,
}

/// What a pass came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Partitions made.
    pub partitions_made: u64,
    /// Partitions dropped.
    pub partitions_dropped: u64,
    /// Rows that went, with partitions or one by one.
    pub rows: u64,
    /// Of these, undecided at an optional destination; each counts once per destination.
    pub gone: u64,
    /// Receipts merged into others.
    pub receipts_merged: u64,
    /// Receipts deleted.
    pub receipts_deleted: u64,
    /// Steps that were given up for now, since a lock was not to be had.
    pub busy: u64,
}

impl Summary {
    /// Adds what a step did.
    pub fn add(&mut self, step: &Step) {
        self.rows += step.rows * u64::from(step.step.is_progress());
        self.gone += step.gone;
        match step.step {
            StepKind::Made => self.partitions_made += 1,
            StepKind::Dropped => self.partitions_dropped += 1,
            StepKind::Busy => self.busy += 1,
            StepKind::Deleted | StepKind::Waiting | StepKind::Kept | StepKind::Skipped => {}
        }
    }

    /// As the status counts.
    fn figures(&self) -> Figures {
        Figures {
            rows: self.rows,
            gone: self.gone,
            partitions_made: self.partitions_made,
            partitions_dropped: self.partitions_dropped,
            receipts: self.receipts_merged + self.receipts_deleted,
            passes: 0,
            busy: self.busy,
        }
    }

    /// Was anything done?
    pub fn did_something(&self) -> bool {
        *self != Summary { busy: self.busy, ..Summary::default() }
    }
}

impl Pass<'_> {
    /// The pass. `tell` hears of every step that did something, and of what stands in the way once.
    pub async fn run(
        &self,
        client: &Client,
        tell: &mut (dyn FnMut(&Step) + Send),
    ) -> Result<Summary, Failure> {
        let mut summary = Summary::default();
        let mut tell = |step: &Step| {
            summary.add(step);
            tell(step);
        };
        if self.config.retention.manage {
            for wanted in [Wanted::Make, Wanted::Drop, Wanted::Delete] {
                self.steps(client, wanted, &mut tell).await?;
            }
        }
        if !self.dry_run {
            self.compact(client, &mut summary).await?;
        }
        Ok(summary)
    }

    /// The partitions ahead alone.
    pub async fn partitions(
        &self,
        client: &Client,
        tell: &mut (dyn FnMut(&Step) + Send),
    ) -> Result<(), Failure> {
        self.steps(client, Wanted::Make, tell).await
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            keep: self.keep,
            ahead: self.config.retention.ahead,
            scan_bytes: if self.hold_inserts { i64::MAX } else { SCAN_BYTES },
            dry_run: self.dry_run,
        }
    }

    /// Steps of one kind, until there are no more.
    async fn steps(
        &self,
        client: &Client,
        wanted: Wanted,
        tell: &mut (dyn FnMut(&Step) + Send),
    ) -> Result<(), Failure> {
        let mut patience = Patience::default();
        let mut after = None;
        loop {
            let began = Instant::now();
            let steps = self.step(client, wanted, after).await?;
            let progress = steps.iter().any(|step| step.step.is_progress());
            let busy = steps.iter().find(|step| step.step == StepKind::Busy);
            after = steps.iter().filter_map(|step| step.last_seq).next_back();
            let pause = match busy {
                Some(busy) => {
                    if patience.is_fresh() {
                        tell(&Step { step: StepKind::Waiting, ..busy.clone() });
                    }
                    patience.next_pause()
                }
                None => {
                    patience.reset();
                    let least = if wanted == Wanted::Make { BREATH } else { PAUSE };
                    (progress && !self.dry_run).then(|| least.max(began.elapsed()))
                }
            };
            // What stands in the way is said again by the call that finds nothing more to do.
            steps
                .iter()
                .filter(|step| step.step.is_progress() || pause.is_none())
                .for_each(&mut *tell);
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return Ok(()),
            }
        }
    }

    /// One statement of one kind. Only `outbox.event` has partitions of ours; rows of another table
    /// go with this role's own rights.
    async fn step(
        &self,
        client: &Client,
        wanted: Wanted,
        after: Option<i64>,
    ) -> Result<Vec<Step>, Failure> {
        let (table, bounds) = (&self.config.source.table, self.bounds());
        let done = if schema::is_own(table) {
            retention::maintain(client, wanted, &bounds, after).await
        } else if wanted == Wanted::Delete && self.keep.is_some() {
            retention::prune_rows(client, table, &bounds, after).await
        } else {
            Ok(Vec::new())
        };
        match done {
            Err(failure) if failure.sqlstate.as_deref() == Some(LOCK_NOT_AVAILABLE) => {
                Ok(vec![Step {
                    step: StepKind::Busy,
                    object: format!("{}.{}", table.schema, table.name),
                    rows: 0,
                    gone: 0,
                    note: Some(failure.detail),
                    last_seq: after,
                }])
            }
            done => done,
        }
    }

    async fn compact(&self, client: &Client, summary: &mut Summary) -> Result<(), Failure> {
        let (relay, slot) = (&self.config.relay.name, &self.config.source.slot);
        // A ledger whose rows somebody else removes is compacted by the same clock.
        let mut next = None;
        loop {
            let began = Instant::now();
            let done = retention::compact(client, relay, slot, self.keep, next.as_ref()).await?;
            summary.receipts_merged += done.merged;
            summary.receipts_deleted += done.deleted;
            if done.next.is_none() {
                return Ok(());
            }
            next = done.next;
            tokio::time::sleep(PAUSE.max(began.elapsed())).await;
        }
    }
}

/// The pass by the clock of `[retention] every`.
pub struct RetentionJob {
    config: Arc<Config>,
    status: Arc<Status>,
    /// What stood in the way in the last pass: said again when it changes.
    in_the_way: Vec<(String, Option<String>)>,
}

impl RetentionJob {
    /// For a session that begins.
    pub fn new(config: Arc<Config>, status: Arc<Status>) -> RetentionJob {
        RetentionJob { config, status, in_the_way: Vec::new() }
    }

    async fn pass(&mut self, client: &Client) -> Result<(), Failure> {
        let config = Arc::clone(&self.config);
        let keep = config.retention.keep;
        let pass = Pass { config: &config, keep, hold_inserts: false, dry_run: false };
        let mut in_the_way = Vec::new();
        let status = Arc::clone(&self.status);
        let mut tell = |step: &Step| {
            let mut done = Summary::default();
            done.add(step);
            status.retention.add(&done.figures());
            match step.step {
                StepKind::Busy | StepKind::Skipped => {
                    in_the_way.push((step.object.clone(), step.note.clone()));
                }
                StepKind::Dropped => {
                    tracing::info!(
                        partition = step.object,
                        rows = step.rows,
                        "dropped: all settled"
                    );
                }
                StepKind::Made | StepKind::Deleted | StepKind::Waiting | StepKind::Kept => {}
            }
        };
        let summary = pass.run(client, &mut tell).await?;
        let receipts = summary.receipts_merged + summary.receipts_deleted;
        self.status.retention.add(&Figures { receipts, passes: 1, ..Figures::default() });
        if summary.gone > 0 {
            tracing::warn!(
                events = summary.gone,
                "rows went that were undecided at an optional destination"
            );
        }
        if in_the_way != self.in_the_way {
            for (object, note) in &in_the_way {
                let note = note.as_deref().unwrap_or_default();
                tracing::info!(partition = object, "left for the next time: {note}");
            }
            self.in_the_way = in_the_way;
        }
        Ok(())
    }
}

impl Job for RetentionJob {
    fn name(&self) -> &'static str {
        "retention"
    }

    fn every(&self) -> Duration {
        self.config.retention.every
    }

    fn keeps_connection(&self) -> bool {
        false
    }

    fn run_once<'a>(&'a mut self, client: &'a Client) -> BoxFuture<'a, Result<(), Failure>> {
        self.pass(client).boxed()
    }
}
