//! Writes the header block: ours, then the row's, straight into the form that it has on the wire.
//! Lets nothing in that could be read as something else than the one field it was meant as.

use bytes::Bytes;
use serde::de::{Deserializer as _, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

use super::Envelope;
use super::digits::{push_lsn, push_signed, push_time};
use super::identity::{CREATED_AT, GENERATION, ID, LSN, REDRIVEN, RELAY, REPLAY, SEQ, push_id};
use super::template::MAX_SUBJECT_BYTES;
use crate::event::{Event, Fault, Reason};

/// Largest header block: the server keeps its length in 16 bits and refuses longer ones (10097).
pub const MAX_HEADER_BYTES: usize = 65_535;

/// The version line.
const BEGIN: &str = "NATS/1.0\r\n";
const SEPARATOR: &str = ": ";
const LINE_END: &str = "\r\n";
/// Where the message id stands: it is the first header.
const ID_AT: usize = BEGIN.len() + ID.len() + SEPARATOR.len();

/// Names, numbers and line ends of our own headers, all of them there.
const OWN_BYTES: usize = 420;

/// About what a message's subject and headers take: enough, but for values that must be escaped.
pub(super) fn room_for(event: &Event, envelope: &Envelope) -> usize {
    let len = |part: &Option<Bytes>| part.as_ref().map_or(0, Bytes::len);
    let row = len(&event.run) + len(&event.tenant) + len(&event.headers) + event.kind.len();
    let job = envelope.replay.as_ref().map_or(0, |job| 2 * job.len() + 24);
    let names = envelope.relay.len() + envelope.stream.len() + job;
    // The subject repeats columns.
    let room = OWN_BYTES + names + 2 * row;
    room.min(MAX_HEADER_BYTES + MAX_SUBJECT_BYTES)
}

/// The message id in a block, which has so many bytes.
pub(super) fn id_of(head: &str, id_bytes: usize) -> &str {
    head.get(ID_AT..ID_AT + id_bytes).unwrap_or_default()
}

/// A header block in the making, behind whatever stands before it in the same text.
pub(super) struct Block {
    text: String,
    from: usize,
}

impl Block {
    pub(super) fn begin(mut text: String) -> Block {
        let from = text.len();
        text.push_str(BEGIN);
        Block { text, from }
    }

    /// Headers that say what the message is and where it comes from; the length of its id.
    pub(super) fn identity(&mut self, event: &Event, envelope: &Envelope) -> Result<usize, Fault> {
        let id_from = self.name(ID);
        push_id(&mut self.text, &event.id, envelope)?;
        let id_bytes = self.text.len() - id_from;
        self.checked(id_from, "id")?;
        self.own("Nats-Expected-Stream", &envelope.stream, "stream")?;
        self.own(RELAY, &envelope.relay, "relay")?;
        self.number(GENERATION, i64::from(envelope.generation));
        self.number(SEQ, event.seq);
        if let Some(position) = event.position {
            self.name(LSN);
            push_lsn(&mut self.text, position.commit_lsn);
            self.text.push_str(LINE_END);
        }
        self.own("Outbox-Kind", Event::text(&event.kind), "kind")?;
        if let Some(run) = &event.run {
            self.own("Outbox-Run", Event::text(run), "run")?;
        }
        if let Some(tenant) = &event.tenant {
            self.own("Outbox-Tenant", Event::text(tenant), "tenant")?;
        }
        if let Some(version) = event.version {
            self.number("Outbox-Version", i64::from(version));
        }
        if let Some(created) = event.created_at {
            let before = self.text.len();
            self.name(CREATED_AT);
            // A time outside the years -9999 to 9999 has no such text, and then no header.
            match push_time(&mut self.text, created) {
                true => self.text.push_str(LINE_END),
                false => self.text.truncate(before),
            }
        }
        if event.payload.is_none() {
            self.own("Outbox-Tombstone", "true", "")?;
        }
        if let Some(job) = &envelope.replay {
            self.own(REPLAY, job, "")?;
        }
        Ok(id_bytes)
    }

    /// The dead letter that it comes from.
    pub(super) fn redriven(&mut self, letter: i64) {
        self.number(REDRIVEN, letter);
    }

    /// Begins a line; where its value begins.
    fn name(&mut self, name: &str) -> usize {
        self.text.push_str(name);
        self.text.push_str(SEPARATOR);
        self.text.len()
    }

    fn number(&mut self, name: &str, number: i64) {
        self.name(name);
        push_signed(&mut self.text, number);
        self.text.push_str(LINE_END);
    }

    /// A line of ours.
    pub(super) fn own(&mut self, name: &str, value: &str, column: &str) -> Result<(), Fault> {
        let from = self.name(name);
        self.text.push_str(value);
        self.checked(from, column)
    }

    /// Ends the line if its value may stand in it.
    fn checked(&mut self, from: usize, column: &str) -> Result<(), Fault> {
        if !is_plain(self.text.get(from..).unwrap_or_default()) {
            return Err(fault(format!("column `{column}` {CONTROL}")));
        }
        self.text.push_str(LINE_END);
        Ok(())
    }

    /// The row's own headers: a JSON object of strings, numbers and booleans, or of arrays of them
    /// for a header that occurs more than once; `null` is a header that is not there.
    pub(super) fn row(&mut self, text: &Bytes) -> Result<(), Fault> {
        let mut json = serde_json::Deserializer::from_slice(text);
        let outcome = json.deserialize_any(RowHeaders(self)).and_then(|()| json.end());
        outcome
            .map_err(|error| fault(format!("column `headers`: {}", printable(&error.to_string()))))
    }

    fn push_row(&mut self, name: &str, value: &str) -> Result<(), String> {
        let quoted = printable(name);
        let lower = name.to_ascii_lowercase();
        if lower.starts_with("nats-") || lower.starts_with("outbox-") {
            return Err(format!("header `{quoted}`: names with Nats- and Outbox- are reserved"));
        }
        // Clients take an empty message with a header of exactly this name for a word of the
        // server, and drop it.
        if name == "Status" {
            return Err(format!("header `{quoted}`: this name is reserved by NATS clients"));
        }
        if name.is_empty() || !name.bytes().all(is_token_byte) {
            return Err(format!("header `{quoted}`: the name is not a token of ASCII characters"));
        }
        if !is_plain(value) {
            return Err(format!("header `{quoted}` {CONTROL}"));
        }
        self.name(name);
        self.text.push_str(value);
        self.text.push_str(LINE_END);
        Ok(())
    }

    /// What stood before, and the block.
    pub(super) fn finish(mut self) -> Result<String, Fault> {
        self.text.push_str(LINE_END);
        let bytes = self.text.len() - self.from;
        if bytes > MAX_HEADER_BYTES {
            let detail = format!("the headers have {bytes} bytes, more than {MAX_HEADER_BYTES}");
            return Err(Fault::new(Reason::TooLarge, detail));
        }
        Ok(self.text)
    }
}

const CONTROL: &str = "holds a control character such as CR, LF or NUL";

/// Has it no control character but tabs?
fn is_plain(value: &str) -> bool {
    // Every byte is looked at, which is quicker than to stop: nearly all values are plain, and
    // whole words of them are compared at once.
    let (mut control, mut beyond_ascii) = (false, false);
    for byte in value.bytes() {
        control |= (byte < b' ') & (byte != b'\t') | (byte == 0x7F);
        beyond_ascii |= byte > 0x7F;
    }
    if beyond_ascii {
        control |= value.chars().any(|char| char.is_control() && char != '\t');
    }
    !control
}

fn fault(detail: String) -> Fault {
    Fault::new(Reason::Header, detail)
}

/// RFC 9110's token: what every HTTP-like header parser takes for a name.
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// A short form that can stand in a log line or a table.
fn printable(text: &str) -> String {
    const SHOWN: usize = 120;
    let shown: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() { format!("{shown}…") } else { shown }
}

/// Reads the object straight into the block: no tree of values in between, numbers keep their
/// digits, and a repeated key is a repeated header instead of a silently lost one.
struct RowHeaders<'a>(&'a mut Block);

impl<'de> Visitor<'de> for RowHeaders<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value::<&'de RawValue>()?.get();
            if value == "null" {
                continue;
            }
            let values = match value.strip_prefix('[') {
                Some(_) => serde_json::from_str::<Vec<&RawValue>>(value)
                    .map_err(A::Error::custom)?
                    .into_iter()
                    .map(RawValue::get)
                    .collect(),
                None => vec![value],
            };
            for value in values {
                let text = scalar(value).ok_or_else(|| {
                    let name = printable(&name);
                    A::Error::custom(format!(
                        "header `{name}` is not text, a number, true, false, or a list of such"
                    ))
                })?;
                self.0.push_row(&name, &text).map_err(A::Error::custom)?;
            }
        }
        Ok(())
    }
}

/// The text of a JSON string, number, or boolean.
fn scalar(json: &str) -> Option<Cow<'_, str>> {
    match json.as_bytes().first()? {
        b'"' => serde_json::from_str(json).ok().map(Cow::Owned),
        b'-' | b'0'..=b'9' | b't' | b'f' => Some(Cow::Borrowed(json)),
        _ => None,
    }
}
