//! The message that tells consumers of a new generation: what this relay publishes from here on
//! belongs to a history that was restored, and messages before it may be of one that is lost.

use serde_json::json;

use super::identity::{GENERATION, ID, RELAY};
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
    let body = json!({
        "relay": relay,
        "generation": generation,
        "previous_generation": boundary.previous,
        "last_seq": boundary.last_seq,
        "orphans": boundary.orphans,
    });
    let fields = [
        (ID, id.as_str()),
        ("Nats-Expected-Stream", stream),
        (RELAY, relay),
        (GENERATION, &generation.to_string()),
        (FROM, &boundary.previous.to_string()),
        ("Outbox-Kind", KIND),
    ];
    Message::of_fields(template.sample(KIND), &fields, body.to_string().into())
}
