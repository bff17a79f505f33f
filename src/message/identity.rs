//! The message id, and the way back from a stored message's headers to the event.
//!
//! A uuid is its own message id. Any other id is unique only within its outbox, so relay and
//! generation stand before it: two outboxes whose ids both start at 1 may feed one stream.

use super::digits::push_signed;
use super::{Envelope, Headers};
use crate::event::{EventId, Fault, Reason, UnixMicros};
use crate::relay::outcome::Found;

pub(super) const ID: &str = "Nats-Msg-Id";
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
    let mut text = String::new();
    push_id(&mut text, id, envelope)?;
    Ok(text)
}

pub(super) fn push_id(text: &mut String, id: &EventId, envelope: &Envelope) -> Result<(), Fault> {
    match id {
        EventId::Uuid(id) => {
            let mut buffer = uuid::Uuid::encode_buffer();
            text.push_str(id.hyphenated().encode_lower(&mut buffer));
        }
        EventId::Int(id) => {
            push_outbox(text, envelope);
            push_signed(text, *id);
        }
        EventId::Text(id) => {
            // Header parsers cut blanks, and an id that is nothing else would be no id at all.
            if id.trim() != &**id || id.is_empty() {
                let detail = "the id is empty, or begins or ends with a blank".to_owned();
                return Err(Fault::new(Reason::Unmappable, detail));
            }
            push_outbox(text, envelope);
            text.push_str(id);
        }
    }
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
    Ok(())
}

fn push_outbox(text: &mut String, envelope: &Envelope) {
    text.push_str(&envelope.relay);
    text.push(':');
    push_signed(text, i64::from(envelope.generation));
    text.push(':');
}

/// The event that a stored message came from, if it is one of this relay's and this destination's;
/// for a replay one of its own copies, and otherwise no replay's. An id of digits is taken for an
/// integer: compare ids by their text.
pub fn parse_identity(headers: Headers<'_>, envelope: &Envelope, stream_seq: u64) -> Option<Found> {
    let text = |name| headers.get(name);
    if text(RELAY)? != envelope.relay || text(REPLAY) != envelope.replay.as_deref() {
        return None;
    }
    let generation: i32 = text(GENERATION)?.parse().ok()?;
    let message_id = text(ID)?;
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
pub fn replay_of(headers: Headers<'_>) -> Option<String> {
    headers.get(REPLAY).map(ToOwned::to_owned)
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
