//! The classic: a relay that polls. Every 100 ms it locks what is not published yet, publishes it
//! pipelined, marks it, commits; after a full batch it looks again at once.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use outboxd::sandbox::Postgres;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls, Statement};

use crate::Result;
use crate::wire::Wire;

const INTERVAL: Duration = Duration::from_millis(100);
const BATCH: usize = 1_000;
/// Where its acks come to.
pub const INBOX: &str = "bench-poller";
/// Its stream takes `polled.>`.
pub const STREAM: &str = "POLLED";

/// Creates what it needs in the database: the outbox, and the index that finds what is left to do.
pub const TABLE: &str = "\
    CREATE TABLE public.polled ( \
      seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id uuid NOT NULL DEFAULT gen_random_uuid(), \
      tenant text, run_id text NOT NULL, kind text NOT NULL, version int, payload json, \
      headers jsonb, created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz); \
    CREATE INDEX ON public.polled (seq) WHERE published_at IS NULL";

/// A stream on disk, as the relay's is.
pub async fn make_stream(nats: &async_nats::Client, name: &str, subject: &str) -> Result<()> {
    let config = async_nats::jetstream::stream::Config {
        name: name.to_owned(),
        subjects: vec![subject.to_owned()],
        ..Default::default()
    };
    async_nats::jetstream::new(nats.clone()).create_stream(config).await?;
    Ok(())
}

/// A polling relay at work. Ends when it is dropped.
pub struct Poller {
    stop: Arc<AtomicBool>,
    working: Option<JoinHandle<Result<()>>>,
}

impl Poller {
    pub fn start(postgres: &Postgres, nats_port: u16) -> Poller {
        let stop = Arc::new(AtomicBool::new(false));
        let (url, stopped) = (postgres.unix_url(), Arc::clone(&stop));
        let working = tokio::task::spawn_blocking(move || work(&url, nats_port, &stopped));
        Poller { stop, working: Some(working) }
    }

    /// Lets it finish what it has begun.
    pub async fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        match self.working.take() {
            Some(working) => working.await?,
            None => Ok(()),
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn work(url: &str, nats_port: u16, stop: &AtomicBool) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut wire = Wire::connect(nats_port)?;
    wire.subscribe(&format!("{INBOX}.>"))?;
    let (client, select, update) = runtime.block_on(connect(url))?;
    while !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        let count = runtime.block_on(async {
            client.batch_execute("BEGIN").await?;
            let rows = client.query(&select, &[]).await?;
            let mut frames = Vec::new();
            let mut seqs: Vec<i64> = Vec::new();
            for row in &rows {
                let (seq, id, body): (i64, uuid::Uuid, &str) = (row.get(0), row.get(1), row.get(2));
                frames.extend_from_slice(frame(seq, id, body).as_bytes());
                seqs.push(seq);
            }
            wire.send(&frames)?;
            for _ in &seqs {
                let ack = wire.next()?;
                if ack.payload.windows(7).any(|part| part == b"\"error\"") {
                    return Err(String::from_utf8_lossy(&ack.payload).into_owned().into());
                }
            }
            client.execute(&update, &[&seqs]).await?;
            client.batch_execute("COMMIT").await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(seqs.len())
        })?;
        if count < BATCH {
            std::thread::sleep((start + INTERVAL).saturating_duration_since(Instant::now()));
        }
    }
    Ok(())
}

async fn connect(url: &str) -> Result<(Client, Statement, Statement)> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    // Its error is also what every statement of the client returns.
    tokio::spawn(async { connection.await.is_ok() });
    let select = format!(
        "SELECT seq, id, payload::text FROM public.polled WHERE published_at IS NULL \
          ORDER BY seq LIMIT {BATCH} FOR UPDATE SKIP LOCKED"
    );
    let select = client.prepare(&select).await?;
    let update = "UPDATE public.polled SET published_at = now() WHERE seq = ANY ($1)";
    let update = client.prepare(update).await?;
    Ok((client, select, update))
}

fn frame(seq: i64, id: uuid::Uuid, body: &str) -> String {
    let head = format!("NATS/1.0\r\nNats-Msg-Id: {id}\r\nNats-Expected-Stream: {STREAM}\r\n\r\n");
    let (total, mut frame) = (head.len() + body.len(), String::new());
    let subject = "polled.order.created";
    write!(frame, "HPUB {subject} {INBOX}.{seq} {} {total}\r\n{head}{body}\r\n", head.len())
        .unwrap_or_default();
    frame
}
