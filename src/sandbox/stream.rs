//! Reads a stream with a plain consumer, as any application would.

use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use async_nats::jetstream::stream::{self, LastRawMessageErrorKind};
use futures_util::StreamExt;
use serde::Deserialize;

use super::verdict::{Event, Seen};
use super::{Result, SandboxError};

/// Silence of a healthy server that means that something is wrong.
const SILENCE: Duration = Duration::from_secs(30);

fn words(error: &dyn std::fmt::Display) -> SandboxError {
    SandboxError::new(format!("can't read the stream: {error}"))
}

/// State of a stream.
///
/// # Errors
/// When JetStream does not answer or the stream is missing.
pub async fn state(client: &async_nats::Client, name: &str) -> Result<stream::State> {
    let mut stream =
        jetstream::new(client.clone()).get_stream(name).await.map_err(|error| words(&error))?;
    Ok(stream.info().await.map_err(|error| words(&error))?.state.clone())
}

/// All messages from a sequence to the end that the stream's leader knows now. A consumer's "nothing
/// pending" can be a lagging peer's view, so it ends nothing.
///
/// # Errors
/// When JetStream does not answer or the stream is missing.
pub async fn read(client: &async_nats::Client, name: &str, from: u64) -> Result<Vec<Seen>> {
    let stream =
        jetstream::new(client.clone()).get_stream(name).await.map_err(|error| words(&error))?;
    let last = match stream.get_last_raw_message_by_subject(">").await {
        Ok(message) => message.sequence,
        Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => 0,
        Err(error) => return Err(words(&error)),
    };
    if last < from {
        return Ok(Vec::new());
    }
    let config = pull::OrderedConfig {
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: from.max(1) },
        ..Default::default()
    };
    let consumer = stream.create_consumer(config).await.map_err(|error| words(&error))?;
    let mut messages = consumer.messages().await.map_err(|error| words(&error))?;
    let mut all = Vec::new();
    loop {
        let next = tokio::time::timeout(SILENCE, messages.next()).await;
        let message = next.map_err(|error| words(&error))?;
        let message = message.ok_or_else(|| words(&"it ended"))?.map_err(|error| words(&error))?;
        let place = of(&message)?;
        let done = place.stream_seq >= last;
        all.push(place);
        if done {
            return Ok(all);
        }
    }
}

#[derive(Deserialize)]
struct Body {
    id: String,
    run: String,
    n: i64,
}

fn of(message: &jetstream::Message) -> Result<Seen> {
    let info = message.info().map_err(|error| words(&error))?;
    let header = |name: &str| {
        let value = message.headers.as_ref().and_then(|headers| headers.get(name));
        value.map(|value| value.as_str().to_owned())
    };
    let event = serde_json::from_slice::<Body>(&message.payload).ok();
    Ok(Seen {
        stream_seq: info.stream_sequence,
        stored_at: info.published.unix_timestamp_nanos(),
        msg_id: header("Nats-Msg-Id").unwrap_or_default(),
        commit_lsn: header("Outbox-Lsn").and_then(|lsn| lsn.parse().ok()),
        event: event.and_then(|Body { id, run, n }| Some(Event { id: id.parse().ok()?, run, n })),
    })
}
