//! How many rows each destination has not decided, and the age of the oldest: asked of the database,
//! so that it is true also of what the stream has not brought yet.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio_postgres::Client;

use super::Job;
use crate::admin::Status;
use crate::admin::destination::Unpublished;
use crate::config::Config;
use crate::error::Failure;
use crate::store::lag;

/// Between two looks.
pub const EVERY: Duration = Duration::from_secs(5);

/// Rows that are counted: a huge backlog is told as "at least so many", and costs some 50 ms.
const COUNT_TO: i64 = 100_000;

/// See the module.
pub struct LagJob {
    config: Arc<Config>,
    status: Arc<Status>,
}

impl LagJob {
    /// For a session that begins.
    pub fn new(config: Arc<Config>, status: Arc<Status>) -> LagJob {
        LagJob { config, status }
    }
}

impl Job for LagJob {
    fn name(&self) -> &'static str {
        "lag"
    }

    fn every(&self) -> Duration {
        EVERY
    }

    fn keeps_connection(&self) -> bool {
        true
    }

    fn run_once<'a>(&'a mut self, client: &'a Client) -> BoxFuture<'a, Result<(), Failure>> {
        async {
            for found in lag::lag(client, &self.config.relay.name, COUNT_TO).await? {
                let Some(events) = found.unpublished else { continue };
                let oldest_seconds = found.oldest_seconds;
                let at_least = !found.counted_all;
                self.status.unpublished(
                    &found.destination,
                    Unpublished { events, at_least, oldest_seconds },
                );
            }
            Ok(())
        }
        .boxed()
    }
}
