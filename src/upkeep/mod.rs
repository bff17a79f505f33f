//! What the relay does beside its stream, by the clock: retention, marks of rows that are done, and the
//! lag as the database knows it. Every job has one shape, `run_once` on a connection of its own, and one loop repeats it.
//!
//! Nothing here touches the control connection, so a long statement delays no receipt; and nothing
//! here decides about an event. A job that fails is told and tried again, the stream goes on.

pub mod lag;
pub mod mark;
mod marks;
pub mod patience;
pub mod retention;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::Status;
use crate::config::{Config, Mark};
use crate::error::Failure;
use crate::relay::backoff::Backoff;
use crate::store::settle;
use crate::wal::{self, Control, Identity, Wanted};

/// The first run comes this soon after the start, if it is not due sooner.
const FIRST: Duration = Duration::from_secs(1);

/// One job.
pub trait Job: Send + 'static {
    /// For log lines.
    fn name(&self) -> &'static str;
    /// From the end of one run to the next.
    fn every(&self) -> Duration;
    /// Is the connection worth keeping between two runs?
    fn keeps_connection(&self) -> bool;
    /// Does what there is to do now.
    fn run_once<'a>(&'a mut self, client: &'a Client) -> BoxFuture<'a, Result<(), Failure>>;
}

/// Starts the jobs of a session; they end with `stop`. The caller holds the relay's lock meanwhile.
pub fn start(
    config: &Config,
    server: &Identity,
    status: &Arc<Status>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) {
    let config = Arc::new(config.clone());
    let mut jobs: Vec<Box<dyn Job>> = vec![
        Box::new(lag::LagJob::new(Arc::clone(&config), Arc::clone(status))),
        Box::new(retention::RetentionJob::new(Arc::clone(&config), Arc::clone(status))),
    ];
    if config.source.mark != Mark::Ledger {
        jobs.push(Box::new(mark::MarkJob::new(Arc::clone(&config), Arc::clone(status))));
    }
    for job in jobs {
        let repeated = repeat(job, Arc::clone(&config), server.clone());
        let stop = stop.clone();
        tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = repeated => {}
            }
        });
    }
}

/// The one loop.
async fn repeat(mut job: Box<dyn Job>, config: Arc<Config>, server: Identity) {
    let mut backoff = Backoff::new(u64::from(std::process::id()));
    let mut told: Option<Failure> = None;
    let mut open: Option<Control> = None;
    tokio::time::sleep(FIRST.min(job.every())).await;
    loop {
        let pause = match run_once(&mut *job, &config, &server, &mut open).await {
            Ok(()) => {
                backoff.reset();
                if told.take().is_some() {
                    tracing::info!(job = job.name(), "works again");
                }
                job.every()
            }
            Err(failure) => {
                open = None;
                // Once, however often it comes again.
                if told.as_ref() != Some(&failure) {
                    let (code, remedy) = (failure.kind.code(), failure.kind.remedy());
                    tracing::warn!(job = job.name(), code, remedy, "{}", failure.detail);
                    told = Some(failure);
                }
                backoff.next_wait().max(FIRST)
            }
        };
        if !job.keeps_connection() {
            open = None;
        }
        tokio::time::sleep(pause).await;
    }
}

async fn run_once(
    job: &mut dyn Job,
    config: &Config,
    server: &Identity,
    open: &mut Option<Control>,
) -> Result<(), Failure> {
    let control = match open.take() {
        Some(control) => control,
        None => connect(config, server).await?,
    };
    let control = open.insert(control);
    tokio::select! {
        done = job.run_once(&control.client) => done,
        failure = control.closed() => Err(failure),
    }
}

/// A settled connection to the server that the session streams from.
async fn connect(config: &Config, server: &Identity) -> Result<Control, Failure> {
    let wanted = Wanted::Same(server);
    let (control, _) = wal::connect_upkeep_to(&config.source, wanted).await?;
    settle(&control.client).await?;
    Ok(control)
}
