//! A polling relay as such are written: takes the oldest unpublished rows under a lock, publishes one
//! after the other, marks them, commits. It has given up on one run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::HeaderMap;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

/// One that works.
pub struct Poller {
    stop: Arc<AtomicBool>,
    task: JoinHandle<usize>,
}

const INTERVAL: Duration = Duration::from_millis(20);

impl Poller {
    pub fn start(client: Client, nats: async_nats::Client) -> Poller {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let mut published = 0;
            while !stopped.load(Ordering::Relaxed) {
                match batch(&client, &nats).await {
                    0 => tokio::time::sleep(INTERVAL).await,
                    rows => published += rows,
                }
            }
            published
        });
        Poller { stop, task }
    }

    /// In order: the batch under way is published and marked. How many rows it published.
    pub async fn stop(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

async fn batch(client: &Client, nats: &async_nats::Client) -> usize {
    let jetstream = async_nats::jetstream::new(nats.clone());
    client.batch_execute("BEGIN").await.unwrap();
    let rows = client
        .query(
            "SELECT id, event_id, event_type, payload::text FROM public.outbox \
             WHERE published_at IS NULL AND aggregate_id <> 'stuck' ORDER BY id LIMIT 50 FOR UPDATE SKIP LOCKED",
            &[],
        )
        .await
        .unwrap();
    let mut done: Vec<i64> = Vec::new();
    for row in &rows {
        let (event, kind, body): (uuid::Uuid, &str, String) = (row.get(1), row.get(2), row.get(3));
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Msg-Id", event.to_string());
        let subject = format!("events.{kind}");
        let ack = jetstream.publish_with_headers(subject, headers, body.into()).await.unwrap();
        ack.await.unwrap();
        done.push(row.get(0));
    }
    let mark = "UPDATE public.outbox SET published_at = now() WHERE id = ANY ($1)";
    client.execute(mark, &[&done]).await.unwrap();
    client.batch_execute("COMMIT").await.unwrap();
    rows.len()
}
