//! From an event to the NATS message: subject, headers, message id, size; and back from a stored
//! message's headers to the event it came from. Pure: no clock, no socket, no log.
//!
//! What a consumer sees is fixed here: `Nats-Msg-Id` is the event's identity, the `Outbox-*`
//! headers say where it comes from, the row's own headers follow, and the body is the payload's
//! bytes as the database holds them. Everything that a row can put into a subject or a header is
//! checked or escaped here, so that no row can write a second header, a second message, or
//! somebody else's subject.

pub mod boundary;
mod headers;
mod identity;
mod template;

pub use headers::MAX_HEADER_BYTES;
pub use identity::{message_id, parse_identity, replay_of};
pub use template::{MAX_SUBJECT_BYTES, Template, TemplateError, unescape};

use async_nats::{HeaderMap, Subject};
use bytes::Bytes;

use crate::config::DestinationConfig;
use crate::event::{Event, Fault};
use headers::Block;

/// What every message of one destination shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// `Outbox-Relay`: the relay's name.
    pub relay: String,
    /// `Outbox-Generation`.
    pub generation: i32,
    /// `Nats-Expected-Stream`.
    pub stream: String,
    /// Gives the subject.
    pub template: Template,
    /// The destination's name when it shares its stream with another one: it becomes the end of
    /// the message id, since the dedupe window is per stream and would swallow the second copy.
    pub id_suffix: Option<String>,
    /// The replay that sends it: the message says so, in a header and at the end of its id.
    pub replay: Option<String>,
}

impl Envelope {
    /// The envelope of one destination.
    pub fn new(relay: &str, generation: i32, destination: &DestinationConfig) -> Envelope {
        Envelope {
            relay: relay.to_owned(),
            generation,
            stream: destination.stream.clone(),
            template: destination.subject.clone(),
            id_suffix: destination.shares_stream.then(|| destination.name.clone()),
            replay: None,
        }
    }
}

/// A message as it goes to the NATS client.
#[derive(Debug, Clone)]
pub struct Message {
    /// Where to.
    pub subject: Subject,
    /// All headers.
    pub headers: HeaderMap,
    /// Body.
    pub payload: Bytes,
    /// Bytes of header block and body, as the server counts them against its limits.
    pub size: usize,
}

impl Message {
    /// `Nats-Msg-Id`; empty only for a message that [`encode`] did not make.
    pub fn id(&self) -> &str {
        self.headers.get(async_nats::header::NATS_MESSAGE_ID).map_or("", |value| value.as_str())
    }
}

/// Makes the message of an event, or says which rule the row breaks. The same event and envelope
/// always give the same message.
pub fn encode(event: &Event, envelope: &Envelope) -> Result<Message, Fault> {
    encode_again(event, envelope, None)
}

/// The same for an event that is sent from a dead letter: a header names it. The identity stays the
/// event's, since its message was never stored.
pub fn encode_again(
    event: &Event,
    envelope: &Envelope,
    letter: Option<i64>,
) -> Result<Message, Fault> {
    if let Some(fault) = &event.fault {
        return Err(fault.clone());
    }
    let subject = envelope.template.render(event)?;
    let mut block = Block::new();
    block.identity(event, envelope)?;
    if let Some(letter) = letter {
        block.redriven(letter)?;
    }
    if let Some(text) = &event.headers {
        block.row(text)?;
    }
    let (headers, header_bytes) = block.finish()?;
    let payload = event.payload.clone().unwrap_or_default();
    let size = header_bytes.saturating_add(payload.len());
    Ok(Message { subject: Subject::from(subject), headers, payload, size })
}

#[cfg(test)]
mod tests;
