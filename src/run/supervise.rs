//! Sessions one after the other. What follows a failure is its fate, from the table in
//! [`crate::error`]; this file decides nothing else.

use std::sync::Arc;
use std::time::Duration;

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
                continue;
            }
            Err(failure) => failure,
        };
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
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
        if shutdown.is_cancelled() {
            return Ok(());
        }
    }
}
