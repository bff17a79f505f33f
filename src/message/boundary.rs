//! The message that tells consumers of a new generation: what this relay publishes from here on
//! belongs to a history that was restored, and messages before it may be of one that is lost.

use async_nats::header::{NATS_EXPECTED_STREAM, NATS_MESSAGE_ID};
use async_nats::{HeaderMap, HeaderName, HeaderValue, Subject};
use serde_json::json;

use super::identity::{GENERATION, RELAY};
use super::{Envelope, Message};

/// Kind of the message, and what stands for every column of the subject's template.
pub const KIND: &str = "outboxd.restored";
const FROM: &str = "Outbox-Restored-From";

/// What is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boundary {
    /// The highest generation before.
    pub previous: i32,
    /// The last number that the restored outbox has given.
    pub last_seq: i64,
    /// Messages of the stream whose events the restored database does not know.
    pub orphans: usize,
}

/// The message, for the envelope of the new generation. It has no `Outbox-Seq`: it is no event.
pub fn encode(boundary: &Boundary, envelope: &Envelope) -> Option<Message> {
    let Envelope { relay, generation, stream, template, id_suffix, replay: _ } = envelope;
    let suffix = id_suffix.as_ref().map(|suffix| format!(":{suffix}")).unwrap_or_default();
    let id = format!("{relay}:{generation}:restored{suffix}");
    let mut headers = HeaderMap::new();
    for (name, text) in [
        (HeaderName::from_static(RELAY), relay.clone()),
        (HeaderName::from_static(GENERATION), generation.to_string()),
        (HeaderName::from_static(FROM), boundary.previous.to_string()),
        (HeaderName::from_static("Outbox-Kind"), KIND.to_owned()),
    ] {
        headers.insert(name, text.parse::<HeaderValue>().ok()?);
    }
    headers.insert(NATS_MESSAGE_ID, id.parse::<HeaderValue>().ok()?);
    headers.insert(NATS_EXPECTED_STREAM, stream.parse::<HeaderValue>().ok()?);
    let body = json!({
        "relay": relay,
        "generation": generation,
        "previous_generation": boundary.previous,
        "last_seq": boundary.last_seq,
        "orphans": boundary.orphans,
    });
    let payload = body.to_string();
    let size = payload.len();
    let subject = Subject::from(template.sample(KIND));
    Some(Message { subject, headers, payload: payload.into(), size })
}
