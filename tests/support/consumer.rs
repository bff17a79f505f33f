//! A sample consumer that loses nothing and does nothing twice: it keeps the ids that it has done in
//! its own database, in the transaction in which it does the work, and acknowledges after that. It can
//! be made to crash at the two places where that matters.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use futures_util::StreamExt as _;
use outboxd::sandbox::verdict::{Event, Seen, Verdict};
use outboxd::sandbox::{STREAM, World};
use tokio_postgres::Client;

/// A message that was not acknowledged comes again after this.
const ACK_WAIT: Duration = Duration::from_millis(500);
/// Nothing new for so long: it has caught up.
const IDLE: Duration = Duration::from_secs(2);

/// Where it crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// It has the message, and its transaction is not committed.
    BeforeCommit,
    /// Its transaction is committed, and the message is not acknowledged.
    BeforeAck,
}

/// What it did until it had caught up or crashed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Messages whose work was done.
    pub done: u64,
    /// Messages that it knew already.
    pub known: u64,
    /// It crashed.
    pub crashed: bool,
}

/// Makes the consumer's tables, and the durable consumer that remembers how far it is.
pub async fn prepare(world: &World) {
    let client = world.postgres.connect().await.unwrap();
    client
        .batch_execute(
            "CREATE SCHEMA IF NOT EXISTS consumer; \
             CREATE TABLE consumer.receipt (event_id text PRIMARY KEY); \
             CREATE TABLE consumer.effect ( \
                 place bigint GENERATED ALWAYS AS IDENTITY, event_id text, run text, n bigint)",
        )
        .await
        .unwrap();
    durable(world).await;
}

/// One message at a time, so that one that comes again comes before the next.
async fn durable(world: &World) -> PullConsumer {
    let config = pull::Config {
        durable_name: Some("sample".to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: ACK_WAIT,
        max_ack_pending: 1,
        ..pull::Config::default()
    };
    let client = world.broker.connect().await.unwrap();
    let stream = jetstream::new(client).get_stream(STREAM).await.unwrap();
    stream.get_or_create_consumer("sample", config).await.unwrap()
}

/// Works until it has caught up, or until `crash` says so for the next message, counted from 0. A
/// crash leaves connections and transaction as they are: nothing is said to anybody.
pub async fn work(world: &World, crash: impl Fn(u64) -> Option<Crash>) -> Work {
    let mut database = world.postgres.connect().await.unwrap();
    let consumer = durable(world).await;
    let mut messages = consumer.stream().max_messages_per_batch(1).messages().await.unwrap();
    let mut work = Work::default();
    while let Ok(Some(message)) = tokio::time::timeout(IDLE, messages.next()).await {
        let message = message.unwrap();
        let crash = crash(work.done + work.known);
        let transaction = database.transaction().await.unwrap();
        let is_new = transaction
            .execute(
                "INSERT INTO consumer.receipt (event_id) VALUES ($1) ON CONFLICT DO NOTHING",
                &[&event_id(&message)],
            )
            .await
            .unwrap();
        if is_new == 1 {
            let body: serde_json::Value = serde_json::from_slice(&message.payload).unwrap();
            let run = body.get("run").and_then(serde_json::Value::as_str).unwrap();
            let n = body.get("n").and_then(serde_json::Value::as_i64).unwrap();
            transaction
                .execute(
                    "INSERT INTO consumer.effect (event_id, run, n) VALUES ($1, $2, $3)",
                    &[&event_id(&message), &run, &n],
                )
                .await
                .unwrap();
        }
        if crash == Some(Crash::BeforeCommit) {
            return Work { crashed: true, ..work };
        }
        transaction.commit().await.unwrap();
        match is_new {
            1 => work.done += 1,
            _ => work.known += 1,
        }
        if crash == Some(Crash::BeforeAck) {
            return Work { crashed: true, ..work };
        }
        message.double_ack().await.unwrap();
    }
    work
}

/// The event, whichever copy of it this is: a replay's id ends in its job.
fn event_id(message: &jetstream::Message) -> String {
    let headers = message.headers.as_ref().unwrap();
    let header = |name: &str| headers.get(name).map(|value| value.as_str());
    let id = header("Nats-Msg-Id").unwrap();
    match header("Outbox-Replay") {
        Some(job) => id.strip_suffix(&format!(":replay:{job}")).unwrap().to_owned(),
        None => id.to_owned(),
    }
}

/// Judges the effects as if they were a stream: each event has had its effect once, and the effects of a
/// run are in the order of its commits.
pub async fn verdict_of_effects(client: &Client, events: &[Event]) -> Verdict {
    let effect = |(place, (id, run, n)): (u64, (String, String, i64))| Seen {
        stream_seq: place,
        stored_at: 0,
        msg_id: id.clone(),
        commit_lsn: None,
        event: Some(Event { id: id.parse().unwrap(), run, n }),
    };
    let seen: Vec<Seen> = (1..).zip(effects(client).await).map(effect).collect();
    Verdict::of(events, &HashSet::new(), &seen, &[])
}

/// Effects as they came about: id, run, number in the run.
async fn effects(client: &Client) -> Vec<(String, String, i64)> {
    let sql = "SELECT event_id, run, n FROM consumer.effect ORDER BY place";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}
