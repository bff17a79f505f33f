//! The wait for the lock of the relay's name. Decides nothing but whether the holder is to be ended.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::admin::status::{Phase, Status};
use crate::config::Config;
use crate::error::Failure;
use crate::run::session::within;
use crate::store::lock;
use crate::wal::Control;

/// How often a standby asks for the lock: a take-over within seconds, at one cheap query each.
const POLL: Duration = Duration::from_secs(1);

/// A walsender that is told to end so often and does not is waited for like any other.
const TOLD_MAX: u32 = 5;

/// Waits until this relay is the one writer. `false`: shut down while waiting.
pub async fn take_lock(
    config: &Config,
    status: &Status,
    control: &mut Control,
    shutdown: &CancellationToken,
) -> Result<bool, Failure> {
    let name = &config.relay.name;
    let mut told = false;
    let limit = config.source.connect_timeout;
    while !within(limit, lock::try_lock(&control.client, name)).await? {
        if !told {
            told = true;
            let holder = within(limit, lock::holder(&control.client, name)).await?;
            let pid = holder.as_ref().map_or(0, |holder| holder.pid);
            tracing::info!(
                relay = name,
                holder_pid = pid,
                "standby: another relay of this name is active"
            );
            status.phase(Phase::Standby);
        }
        if let Some(silence) = config.relay.take_over_after {
            let told = within(limit, lock::end_silent(&control.client, name, silence)).await?;
            if let Some(holder) = told {
                tracing::warn!(
                    relay = name,
                    holder_pid = holder.pid,
                    "the active relay said nothing for longer than take_over_after: its session is \
                     ended"
                );
                continue;
            }
        }
        tokio::select! {
            failure = control.closed() => return Err(failure),
            () = shutdown.cancelled() => return Ok(false),
            () = tokio::time::sleep(POLL) => {}
        }
    }
    if config.relay.take_over_after.is_some() {
        let slot = &config.source.slot;
        for _ in 0..TOLD_MAX {
            let told = within(limit, lock::end_walsender(&control.client, slot)).await?;
            let Some(walsender) = told else { break };
            let pid = walsender.pid;
            tracing::warn!(slot, pid, "an earlier relay left a walsender at the slot: it is ended");
            if walsender.is_gone {
                break;
            }
        }
    }
    status.phase(Phase::Starting);
    Ok(true)
}
