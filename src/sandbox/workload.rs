//! Applications that write events: several sessions at once, transactions of several rows, some of
//! them interleaved so that sequence order is not commit order, some rolled back in whole or part.
//!
//! Commit order can't be read off a table. Here it is known because a run belongs to one writer,
//! and that writer commits one transaction after the other: it gives out the numbers of a run in
//! the order in which it is going to commit, whatever the order of the INSERTs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls};

use super::dice::Dice;
use super::{Result, SandboxError};

/// How long a writer tries to get the database back.
const RECONNECT_DEADLINE: Duration = Duration::from_secs(120);
/// Failures of one writer in a row that a server's restart can cause.
const TRIES: u32 = 5;
const RECONNECT_INTERVAL: Duration = Duration::from_millis(50);

/// What is written.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Rows that commit, in all; some more when the database goes away at a COMMIT.
    pub events: u64,
    /// Ordering keys.
    pub runs: u64,
    /// Writers at once, each with two sessions.
    pub writers: u64,
    /// Rows in a second, all writers together; as fast as it goes when absent.
    pub rate: Option<u64>,
    /// Rows in a transaction at most.
    pub rows: u64,
    /// Interleave, roll back, use savepoints.
    pub adversary: bool,
    /// Size of a body, about.
    pub payload_bytes: usize,
    /// Repeats the choices, not the timing.
    pub seed: u64,
}

impl Default for Workload {
    fn default() -> Workload {
        Workload {
            events: 5_000,
            runs: 100,
            writers: 4,
            rate: None,
            rows: 10,
            adversary: true,
            payload_bytes: 200,
            seed: Dice::fresh_seed(),
        }
    }
}

/// A load under way.
#[derive(Debug)]
pub struct Load {
    committed: watch::Receiver<u64>,
    tasks: JoinSet<Result<()>>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    url: String,
    what: Workload,
    /// Rows that writers have taken on themselves to commit.
    taken: AtomicU64,
    /// Nothing more is taken.
    enough: AtomicBool,
    committed: watch::Sender<u64>,
    start: Instant,
}

impl Workload {
    /// Starts the writers on a database that `outboxd init` has prepared.
    #[must_use]
    pub fn start(self, url: &str) -> Load {
        let (committed, watched) = watch::channel(0);
        let writers = self.writers.clamp(1, self.runs.max(1));
        let shared = Arc::new(Shared {
            url: url.to_owned(),
            what: self,
            taken: AtomicU64::new(0),
            enough: AtomicBool::new(false),
            committed,
            start: Instant::now(),
        });
        let mut tasks = JoinSet::new();
        for index in 0..writers {
            tasks.spawn(Writer::work(Arc::clone(&shared), index, writers));
        }
        Load { committed: watched, tasks, shared }
    }
}

impl Load {
    /// Rows whose COMMIT was answered.
    #[must_use]
    pub fn committed(&self) -> u64 {
        *self.committed.borrow()
    }

    /// The same count to watch.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.committed.clone()
    }

    /// Waits until so many rows are committed, or the writers are done.
    pub async fn reach(&mut self, count: u64) {
        // An error means that all writers ended.
        drop(self.committed.wait_for(|committed| *committed >= count).await);
    }

    /// Tells the writers to end with what they have begun, for a load that lasts as long as the
    /// faults do.
    pub fn enough(&self) {
        self.shared.enough.store(true, Ordering::Relaxed);
    }

    /// Waits for the writers.
    ///
    /// # Errors
    /// The first error of a writer: a statement that the database refused.
    pub async fn finish(&mut self) -> Result<()> {
        while let Some(ended) = self.tasks.join_next().await {
            ended.map_err(|error| SandboxError::new(format!("a writer: {error}")))??;
        }
        Ok(())
    }
}

/// One row to insert.
struct Row {
    id: uuid::Uuid,
    run: String,
    n: i64,
    /// Taken back by a savepoint or with its whole transaction.
    lost: bool,
}

/// A transaction, planned whole before its first INSERT.
#[derive(Default)]
struct Plan {
    rows: Vec<Row>,
    rolled_back: bool,
}

struct Writer {
    shared: Arc<Shared>,
    dice: Dice,
    runs: Vec<String>,
    /// Last number committed per run.
    numbers: HashMap<String, i64>,
    sessions: [Client; 2],
}

impl Writer {
    async fn work(shared: Arc<Shared>, index: u64, writers: u64) -> Result<()> {
        let step = usize::try_from(writers).unwrap_or(1);
        let runs = (index..shared.what.runs.max(1)).step_by(step);
        let seed = shared.what.seed.wrapping_add(index);
        let mut writer = Writer {
            dice: Dice::new(seed),
            runs: runs.map(|run| format!("run-{run}")).collect(),
            numbers: HashMap::new(),
            sessions: [connect(&shared.url).await?, connect(&shared.url).await?],
            shared,
        };
        // Runs go on where an earlier load left them.
        writer.read_numbers().await?;
        let mut failures = 0;
        loop {
            let plans = writer.plan();
            let count = plans.iter().map(Plan::committed).sum::<u64>();
            if count == 0 && writer.budget() == 0 {
                return Ok(());
            }
            writer.keep_pace(count).await;
            match writer.execute(&plans).await {
                Ok(()) => {
                    failures = 0;
                    writer.shared.committed.send_modify(|sum| *sum += count);
                }
                // The statement may be wrong, or the server may be down: after a reconnect the
                // next one tells.
                Err(error) if failures < TRIES => {
                    failures += 1;
                    writer.shared.taken.fetch_sub(count, Ordering::Relaxed);
                    writer.come_back().await.map_err(|then| {
                        SandboxError::new(format!("a writer: {error}; then: {then}"))
                    })?;
                }
                Err(error) => {
                    return Err(SandboxError::new(format!("a writer's statement: {error:?}")));
                }
            }
        }
    }

    /// Rows that may still be taken.
    fn budget(&self) -> u64 {
        if self.shared.enough.load(Ordering::Relaxed) {
            return 0;
        }
        self.shared.what.events.saturating_sub(self.shared.taken.load(Ordering::Relaxed))
    }

    /// One or two transactions in the order of their commits. Numbers are given out in that order.
    fn plan(&mut self) -> Vec<Plan> {
        let adversary = self.shared.what.adversary;
        let transactions = if adversary && self.dice.percent(50) { 2 } else { 1 };
        let mut plans = Vec::new();
        for _ in 0..transactions {
            let mut plan =
                Plan { rolled_back: adversary && self.dice.percent(10), rows: Vec::new() };
            for _ in 0..=self.dice.below(self.shared.what.rows) {
                let lost = plan.rolled_back || (adversary && self.dice.percent(10));
                if !lost && !self.take() {
                    break;
                }
                let place = usize::try_from(self.dice.below(self.runs.len() as u64)).unwrap_or(0);
                let run = self.runs.get(place).cloned().unwrap_or_default();
                let number = self.numbers.entry(run.clone()).or_insert(0);
                // A lost row has the number that the next one will have: it must not be seen.
                let n = *number + 1;
                *number += i64::from(!lost);
                plan.rows.push(Row { id: uuid::Uuid::new_v4(), run, n, lost });
            }
            plans.push(plan);
        }
        plans
    }

    fn take(&self) -> bool {
        if self.shared.enough.load(Ordering::Relaxed) {
            return false;
        }
        let limit = self.shared.what.events;
        let more = |taken| (taken < limit).then_some(taken + 1);
        self.shared.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Waits until as many rows are due as were taken by all.
    async fn keep_pace(&self, count: u64) {
        let Some(rate) = self.shared.what.rate.filter(|rate| *rate > 0) else { return };
        let before = self.shared.taken.load(Ordering::Relaxed).saturating_sub(count);
        let due = Duration::from_micros(before.saturating_mul(1_000_000) / rate);
        tokio::time::sleep_until((self.shared.start + due).into()).await;
    }

    /// The INSERTs of two transactions alternate, the later commit first; then they commit in order.
    async fn execute(&self, plans: &[Plan]) -> std::result::Result<(), tokio_postgres::Error> {
        let open: Vec<(&Plan, &Client)> = plans.iter().zip(&self.sessions).collect();
        for (_, session) in &open {
            session.batch_execute("BEGIN").await?;
        }
        let most = plans.iter().map(|plan| plan.rows.len()).max().unwrap_or(0);
        let piece = if open.len() > 1 { most.div_ceil(2).max(1) } else { most.max(1) };
        for round in 0..most.div_ceil(piece) {
            for (plan, session) in open.iter().rev() {
                let rows = plan.rows.iter().skip(round * piece).take(piece);
                self.insert(session, &rows.collect::<Vec<_>>(), plan.rolled_back).await?;
            }
        }
        for (plan, session) in open {
            session.batch_execute(if plan.rolled_back { "ROLLBACK" } else { "COMMIT" }).await?;
        }
        Ok(())
    }

    /// Neighbours of one fate in one statement; lost ones of a commit inside a savepoint.
    async fn insert(
        &self,
        session: &Client,
        rows: &[&Row],
        rolled_back: bool,
    ) -> std::result::Result<(), tokio_postgres::Error> {
        for group in rows.chunk_by(|one, next| one.lost == next.lost) {
            let lost = !rolled_back && group.iter().any(|row| row.lost);
            if lost {
                session.batch_execute("SAVEPOINT s").await?;
            }
            let ids: Vec<uuid::Uuid> = group.iter().map(|row| row.id).collect();
            let runs: Vec<&str> = group.iter().map(|row| row.run.as_str()).collect();
            let bodies: Vec<String> =
                group.iter().map(|row| row.body(self.shared.what.payload_bytes)).collect();
            session.execute(INSERT, &[&ids, &runs, &bodies]).await?;
            if lost {
                session.batch_execute("ROLLBACK TO s").await?;
            }
        }
        Ok(())
    }

    /// New sessions. A COMMIT without an answer may have happened: the table tells.
    async fn come_back(&mut self) -> Result<()> {
        self.sessions = [connect(&self.shared.url).await?, connect(&self.shared.url).await?];
        self.read_numbers().await
    }

    async fn read_numbers(&mut self) -> Result<()> {
        let [session, _] = &self.sessions;
        let rows = session.query(NUMBERS, &[&self.runs]).await;
        let rows = rows.map_err(|error| SandboxError::new(format!("the last numbers: {error}")))?;
        self.numbers = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        Ok(())
    }
}

/// The function is the way in that the schema offers; a subject per kind shows that order holds
/// across subjects.
const INSERT: &str = "\
    SELECT outbox.publish(run_id => r, payload => p::json, id => i, \
                          kind => CASE o % 3 WHEN 1 THEN 'order.created' \
                                             WHEN 2 THEN 'order.paid' ELSE 'order.shipped' END) \
      FROM unnest($1::uuid[], $2::text[], $3::text[]) WITH ORDINALITY AS t (i, r, p, o) \
     ORDER BY o";

const NUMBERS: &str = "\
    SELECT run_id, max((payload->>'n')::bigint) FROM outbox.event \
     WHERE run_id = ANY ($1) GROUP BY run_id";

impl Row {
    fn body(&self, bytes: usize) -> String {
        let head = format!(r#"{{"id":"{}","run":"{}","n":{}"#, self.id, self.run, self.n);
        let fill = bytes.saturating_sub(head.len() + r#","fill":""}"#.len());
        format!(r#"{head},"fill":"{}"}}"#, "x".repeat(fill))
    }
}

impl Plan {
    fn committed(&self) -> u64 {
        self.rows.iter().filter(|row| !row.lost).count() as u64
    }
}

async fn connect(url: &str) -> Result<Client> {
    let start = Instant::now();
    loop {
        match tokio_postgres::connect(url, NoTls).await {
            Ok((client, connection)) => {
                // Its error is also what every pending statement of the client returns.
                tokio::spawn(async { connection.await.is_ok() });
                return Ok(client);
            }
            Err(error) if start.elapsed() > RECONNECT_DEADLINE => {
                return Err(SandboxError::new(format!("a writer can't connect: {error}")));
            }
            Err(_) => tokio::time::sleep(RECONNECT_INTERVAL).await,
        }
    }
}
