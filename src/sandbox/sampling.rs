//! The slot's position against the stream, again and again while faults happen. A look that fails
//! while a server is away is no sample; sampling that does not come back is an error.

use std::time::{Duration, Instant};

use super::verdict::Sample;
use super::world::{Broker, STREAM, confirmed, words};
use super::{Postgres, Result, stream};

const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The last sample must come within this time after the faults.
const LAST_DEADLINE: Duration = Duration::from_secs(10);

/// Sampling under way.
#[derive(Debug)]
pub struct Sampling {
    stop: tokio::sync::oneshot::Sender<()>,
    task: tokio::task::JoinHandle<Result<Vec<Sample>>>,
}

impl Sampling {
    /// Begins with clients of its own.
    pub(super) async fn start(postgres: &Postgres, broker: &Broker) -> Result<Sampling> {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let eyes = Eyes {
            url: postgres.unix_url(),
            client: postgres.connect().await?,
            broker: broker.connect().await?,
        };
        Ok(Sampling { stop, task: tokio::spawn(eyes.watch(stopped)) })
    }

    /// Ends it with a last sample, which must succeed; all samples.
    ///
    /// # Errors
    /// When the last look fails: then sampling had ended before, unseen.
    pub async fn stop(self) -> Result<Vec<Sample>> {
        drop(self.stop);
        self.task.await.map_err(|error| words("sampling", &error))?
    }
}

struct Eyes {
    url: String,
    client: tokio_postgres::Client,
    broker: async_nats::Client,
}

impl Eyes {
    async fn watch(
        mut self,
        mut stopped: tokio::sync::oneshot::Receiver<()>,
    ) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        let mut last_by: Option<Instant> = None;
        loop {
            match (self.look().await, last_by) {
                (Ok(sample), None) => samples.push(sample),
                (Ok(sample), Some(_)) => {
                    samples.push(sample);
                    return Ok(samples);
                }
                // A server is away: that is what the tests are about.
                (Err(_), None) => {}
                (Err(error), Some(deadline)) if Instant::now() >= deadline => {
                    let taken = samples.len();
                    return Err(words(&format!("sampling ended after {taken} samples"), &error));
                }
                (Err(_), Some(_)) => {}
            }
            tokio::select! {
                _ = &mut stopped, if last_by.is_none() => {
                    last_by = Some(Instant::now() + LAST_DEADLINE);
                }
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
        }
    }

    async fn look(&mut self) -> Result<Sample> {
        if self.client.is_closed() {
            let connected = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await;
            let (client, connection) = connected.map_err(|error| words("PostgreSQL", &error))?;
            tokio::spawn(async { connection.await.is_ok() });
            self.client = client;
        }
        // The order matters: what the position has passed must be in the stream a moment later.
        let confirmed = confirmed(&self.client).await?;
        let state = stream::state(&self.broker, STREAM).await?;
        Ok(Sample { confirmed, stream_last: state.last_sequence })
    }
}
