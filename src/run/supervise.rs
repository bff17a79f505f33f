//! Sessions one after the other. What follows a failure is its fate, from the table in
//! [`crate::error`]; this file decides nothing else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::admin::{Phase, Status};
use crate::config::Config;
use crate::error::{Failure, Fate};
use crate::relay::backoff::Backoff;
use crate::run::clock;
use crate::run::session::{self, Carried, Ended};

/// Pause of the fates that only ask again.
const WAIT: Duration = Duration::from_secs(1);
/// Pause after a failure that needs the operator: soon enough after the repair, no busy loop. Only
/// the second time: a session that lasted may have lost its slot, and the next one can relay from
/// the table meanwhile.
const SETUP: Duration = Duration::from_secs(30);
/// A session that lasted this long was a clean try.
const CLEAN: Duration = Duration::from_secs(10);

/// See [`super::run`].
pub async fn run(
    config: &Config,
    status: &Arc<Status>,
    shutdown: &CancellationToken,
) -> Result<(), Failure> {
    let wall = clock::wall();
    let mut backoff = Backoff::new(wall.0.unsigned_abs());
    let mut carried = Carried::default();
    let mut tail_found: Option<Instant> = None;
    loop {
        let began = clock::now();
        let ended = session::run(config, status, shutdown, &mut carried).await;
        let failure = match ended {
            Ok(Ended::Stopped) => return Ok(()),
            Ok(Ended::Again(reason)) => {
                carried.last_failure = reason;
                continue;
            }
            Ok(Ended::LostTail(tail)) => {
                carried.lost_tails.push(tail);
                // A stream that seems to lose its tail again and again must not keep the others busy.
                let again = tail_found.replace(clock::now()).is_some_and(|at| at.elapsed() < SETUP);
                if again && is_stopped_within(backoff.next_wait(), shutdown).await {
                    return Ok(());
                }
                continue;
            }
            Err(failure) => failure,
        };
        // Another relay may have worked since: it is looked for again.
        carried.lost_tails.clear();
        carried.last_failure = Some(failure.kind);
        status.failed(&failure);
        if shutdown.is_cancelled() {
            tracing::warn!(code = failure.kind.code(), "stopped while failing: {}", failure.detail);
            return Ok(());
        }
        let lasted = began.elapsed() > CLEAN;
        if lasted {
            backoff.reset();
        }
        let pause = match failure.kind.fate() {
            Fate::Transient => backoff.next_wait(),
            Fate::Wait => WAIT,
            Fate::Setup if lasted => WAIT,
            Fate::Setup => SETUP,
            Fate::Refuse => {
                tracing::error!(
                    code = failure.kind.code(),
                    remedy = failure.kind.remedy(),
                    "{}",
                    failure.detail
                );
                return Err(failure);
            }
        };
        tracing::warn!(
            code = failure.kind.code(),
            remedy = failure.kind.remedy(),
            retry_in_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
            "{}",
            failure.detail
        );
        status.phase(Phase::Waiting);
        if is_stopped_within(pause, shutdown).await {
            return Ok(());
        }
    }
}

/// Waits so long, or until the relay is to stop: is it?
async fn is_stopped_within(pause: Duration, shutdown: &CancellationToken) -> bool {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = tokio::time::sleep(pause) => {}
    }
    shutdown.is_cancelled()
}
