//! The message id, and the way back from a stored message's headers to the event.
//!
//! A uuid is its own message id. Any other id is unique only within its outbox, so relay and
//! generation stand before it: two outboxes whose ids both start at 1 may feed one stream.

use async_nats::{HeaderMap, HeaderName};

use super::Envelope;
use crate::event::{EventId, Fault, Reason, UnixMicros};
use crate::relay::outcome::Found;

pub(super) const RELAY: &str = "Outbox-Relay";
pub(super) const GENERATION: &str = "Outbox-Generation";
pub(super) const SEQ: &str = "Outbox-Seq";
pub(super) const LSN: &str = "Outbox-Lsn";
pub(super) const CREATED_AT: &str = "Outbox-Created-At";
/// Number of the dead letter that the message was sent from.
pub(super) const REDRIVEN: &str = "Outbox-Redriven";
/// Names the replay job; such a copy counts for its own job only.
pub(super) const REPLAY: &str = "Outbox-Replay";

/// The message id of an event.
pub fn message_id(id: &EventId, envelope: &Envelope) -> Result<String, Fault> {
    let mut text = match id {
        EventId::Uuid(id) => id.to_string(),
        EventId::Int(id) => format!("{}:{}:{id}", envelope.relay, envelope.generation),
        EventId::Text(id) => {
            // Header parsers cut blanks, and an id that is nothing else would be no id at all.
            if id.trim() != &**id || id.is_empty() {
                let detail = "the id is empty, or begins or ends with a blank".to_owned();
                return Err(Fault::new(Reason::Unmappable, detail));
            }
            format!("{}:{}:{id}", envelope.relay, envelope.generation)
        }
    };
    if let Some(suffix) = &envelope.id_suffix {
        text.push(':');
        text.push_str(suffix);
    }
    // A purge keeps the ids of what it removes: within the window the event's own id would be
    // swallowed as a duplicate of a message that is gone.
    if let Some(job) = &envelope.replay {
        text.push_str(":replay:");
        text.push_str(job);
    }
    Ok(text)
}

/// The event that a stored message came from, if it is one of this relay's and this destination's;
/// for a replay one of its own copies, and otherwise no replay's. An id of digits is taken for an
/// integer: compare ids by their text.
pub fn parse_identity(headers: &HeaderMap, envelope: &Envelope, stream_seq: u64) -> Option<Found> {
    let text = |name| headers.get(HeaderName::from_static(name)).map(|value| value.as_str());
    if text(RELAY)? != envelope.relay || text(REPLAY) != envelope.replay.as_deref() {
        return None;
    }
    let generation: i32 = text(GENERATION)?.parse().ok()?;
    let message_id = headers.get(async_nats::header::NATS_MESSAGE_ID)?.as_str();
    let id = match &envelope.replay {
        Some(job) => message_id.strip_suffix(job.as_str())?.strip_suffix(":replay:")?,
        None => message_id,
    };
    let id = match &envelope.id_suffix {
        Some(suffix) => id.strip_suffix(suffix.as_str())?.strip_suffix(':')?,
        None => id,
    };
    Some(Found {
        seq: text(SEQ)?.parse().ok()?,
        id: event_id(id, &envelope.relay, generation)?,
        commit_lsn: text(LSN).and_then(|lsn| lsn.parse().ok()),
        generation,
        created_at: text(CREATED_AT).and_then(instant),
        stream_seq,
        letter: text(REDRIVEN).and_then(|letter| letter.parse().ok()),
    })
}

/// The replay that sent a message, if one did.
pub fn replay_of(headers: &HeaderMap) -> Option<String> {
    headers.get(HeaderName::from_static(REPLAY)).map(|job| job.as_str().to_owned())
}

fn instant(text: &str) -> Option<UnixMicros> {
    text.parse::<jiff::Timestamp>().ok().map(|at| UnixMicros(at.as_microsecond()))
}

fn event_id(text: &str, relay: &str, generation: i32) -> Option<EventId> {
    if let Some(own) = text.strip_prefix(&format!("{relay}:{generation}:")) {
        let number = own.parse::<i64>().ok().filter(|number| number.to_string() == own);
        return Some(number.map_or_else(|| EventId::Text(own.into()), EventId::Int));
    }
    uuid::Uuid::parse_str(text).ok().filter(|id| id.to_string() == text).map(EventId::Uuid)
}
