//! From an event to the NATS message: subject, headers, message id, size; and back from a stored
//! message's headers to the event it came from. Pure: no clock, no socket, no log.
//!
//! What a consumer sees is fixed here: `Nats-Msg-Id` is the event's identity, the `Outbox-*`
//! headers say where it comes from, the row's own headers follow, and the body is the payload's
//! bytes as the database holds them. Everything that a row can put into a subject or a header is
//! checked or escaped here, so that no row can write a second header, a second message, or
//! somebody else's subject.

pub mod boundary;
mod digits;
mod fields;
mod headers;
mod identity;
mod template;

pub use digits::{Room, decimal, push_decimal};
pub use fields::Headers;
pub use headers::MAX_HEADER_BYTES;
pub use identity::{message_id, parse_identity, replay_of};
pub use template::{MAX_SUBJECT_BYTES, Template, TemplateError, unescape};

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

/// A message as it goes to the server: subject and header block are written once, in the form that
/// they have on the wire.
#[derive(Debug, Clone)]
pub struct Message {
    /// The subject, and the header block right behind it.
    text: String,
    subject_bytes: usize,
    id_bytes: usize,
    /// Body.
    pub payload: Bytes,
}

impl Message {
    /// One with nothing but an id.
    #[cfg(test)]
    pub(crate) fn bare(subject: &str, id: &str) -> Message {
        let text = format!("{subject}NATS/1.0\r\nNats-Msg-Id: {id}\r\n\r\n");
        let (subject_bytes, id_bytes) = (subject.len(), id.len());
        Message { text, subject_bytes, id_bytes, payload: Bytes::from_static(b"x") }
    }

    /// One of a few fields, the first of which is its id. `None` when one can't be a header.
    fn of_fields(subject: String, fields: &[(&str, &str)], payload: Bytes) -> Option<Message> {
        let subject_bytes = subject.len();
        let id_bytes = fields.first().map_or(0, |(_, id)| id.len());
        let mut block = Block::begin(subject);
        for (name, value) in fields {
            block.own(name, value, "").ok()?;
        }
        Some(Message { text: block.finish().ok()?, subject_bytes, id_bytes, payload })
    }

    /// Where to.
    pub fn subject(&self) -> &str {
        self.text.get(..self.subject_bytes).unwrap_or_default()
    }

    /// The header block, from its version line to its empty line.
    pub fn head(&self) -> &str {
        self.text.get(self.subject_bytes..).unwrap_or_default()
    }

    /// All headers.
    pub fn headers(&self) -> Headers<'_> {
        Headers::of(self.head().as_bytes())
    }

    /// `Nats-Msg-Id`.
    pub fn id(&self) -> &str {
        headers::id_of(self.head(), self.id_bytes)
    }

    /// Bytes of header block and body, as the server counts them against its limits.
    pub fn size(&self) -> usize {
        self.head().len().saturating_add(self.payload.len())
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
    let mut text = String::with_capacity(headers::room_for(event, envelope));
    envelope.template.render_onto(&mut text, event)?;
    let subject_bytes = text.len();
    let mut block = Block::begin(text);
    let id_bytes = block.identity(event, envelope)?;
    if let Some(letter) = letter {
        block.redriven(letter);
    }
    if let Some(text) = &event.headers {
        block.row(text)?;
    }
    let text = block.finish()?;
    let payload = event.payload.clone().unwrap_or_default();
    Ok(Message { text, subject_bytes, id_bytes, payload })
}

#[cfg(test)]
mod tests;
