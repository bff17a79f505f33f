//! Shows events flow: a bar on a terminal, a line now and then elsewhere.

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::{Stopped, say};
use crate::sandbox::{STREAM, SandboxError, World, stream};

const BAR_INTERVAL: Duration = Duration::from_millis(200);
const LINE_INTERVAL: Duration = Duration::from_secs(1);
/// Rates are those of about this time.
const RATE_WINDOW: Duration = Duration::from_secs(2);

/// What is watched, and where it is shown.
pub struct Progress {
    events: u64,
    committed: watch::Receiver<u64>,
    postgres: tokio_postgres::Client,
    nats: async_nats::Client,
    bar: Option<ProgressBar>,
}

/// One look.
#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    committed: u64,
    stored: u64,
    behind_bytes: i64,
}

impl Progress {
    /// Connects to both servers.
    pub async fn start(
        world: &World,
        events: u64,
        committed: watch::Receiver<u64>,
    ) -> Result<Progress, Stopped> {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{wide_bar} {percent:>3}%\n{msg}");
            let bar = ProgressBar::new(events);
            style.map_or(bar.clone(), |style| bar.with_style(style))
        });
        let postgres = world.postgres.connect().await?;
        let nats = world.broker.connect().await?;
        Ok(Progress { events, committed, postgres, nats, bar })
    }

    /// Never ends by itself.
    pub async fn show(&self) -> Result<(), Stopped> {
        let mut ticks = interval(if self.bar.is_some() { BAR_INTERVAL } else { LINE_INTERVAL });
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks: VecDeque<Look> = VecDeque::new();
        loop {
            ticks.tick().await;
            let now = self.look().await?;
            while looks.get(1).is_some_and(|look| now.at - look.at >= RATE_WINDOW) {
                looks.pop_front();
            }
            if let Some(then) = looks.front() {
                self.tell(*then, now)?;
            }
            looks.push_back(now);
        }
    }

    async fn look(&self) -> Result<Look, Stopped> {
        let sql = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint \
                     FROM pg_replication_slots WHERE confirmed_flush_lsn IS NOT NULL";
        let row = self.postgres.query_one(sql, &[]).await.map_err(SandboxError::from)?;
        let stored = stream::state(&self.nats, STREAM).await?.messages;
        let committed = *self.committed.borrow();
        Ok(Look { at: Instant::now(), committed, stored, behind_bytes: row.get(0) })
    }

    fn tell(&self, then: Look, now: Look) -> Result<(), Stopped> {
        let millis = u64::try_from((now.at - then.at).as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = |count: u64| count.saturating_mul(1_000) / millis;
        let text = format!(
            "committed {} of {} ({}/s), in the stream {} ({}/s), slot {} kB behind",
            now.committed,
            self.events,
            rate(now.committed - then.committed),
            now.stored,
            rate(now.stored.saturating_sub(then.stored)),
            now.behind_bytes / 1_000,
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(now.stored.min(self.events));
                bar.set_message(text);
                Ok(())
            }
            None => Ok(say(&text)?),
        }
    }

    /// Takes the bar away.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
