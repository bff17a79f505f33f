//! The header block: ours, then the row's. Counts its bytes as it goes, and lets nothing in that
//! could be read as something else than the one field it was meant as.

use async_nats::header::{NATS_EXPECTED_STREAM, NATS_MESSAGE_ID};
use async_nats::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;
use serde::de::{Deserializer as _, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use super::Envelope;
use super::identity::{CREATED_AT, GENERATION, LSN, REDRIVEN, RELAY, REPLAY, SEQ, message_id};
use crate::event::{Event, Fault, Reason};

/// Largest header block: the server keeps its length in 16 bits and refuses longer ones (10097).
pub const MAX_HEADER_BYTES: usize = 65_535;

/// The version line and the empty line at the end.
const FRAME_BYTES: usize = "NATS/1.0\r\n\r\n".len();
/// `: ` and the line's end.
const LINE_BYTES: usize = ": \r\n".len();

/// A header block in the making.
pub(super) struct Block {
    map: HeaderMap,
    bytes: usize,
}

impl Block {
    pub(super) fn new() -> Block {
        Block { map: HeaderMap::new(), bytes: FRAME_BYTES }
    }

    /// Headers that say what the message is and where it comes from.
    pub(super) fn identity(&mut self, event: &Event, envelope: &Envelope) -> Result<(), Fault> {
        self.own(NATS_MESSAGE_ID, &message_id(&event.id, envelope)?, "id")?;
        self.own(NATS_EXPECTED_STREAM, &envelope.stream, "stream")?;
        self.own(HeaderName::from_static(RELAY), &envelope.relay, "relay")?;
        self.own(HeaderName::from_static(GENERATION), &envelope.generation.to_string(), "")?;
        self.own(HeaderName::from_static(SEQ), &event.seq.to_string(), "seq")?;
        if let Some(position) = event.position {
            self.own(HeaderName::from_static(LSN), &position.commit_lsn.to_string(), "")?;
        }
        self.own(HeaderName::from_static("Outbox-Kind"), Event::text(&event.kind), "kind")?;
        if let Some(run) = &event.run {
            self.own(HeaderName::from_static("Outbox-Run"), Event::text(run), "run")?;
        }
        if let Some(tenant) = &event.tenant {
            self.own(HeaderName::from_static("Outbox-Tenant"), Event::text(tenant), "tenant")?;
        }
        if let Some(version) = event.version {
            self.own(HeaderName::from_static("Outbox-Version"), &version.to_string(), "")?;
        }
        // A time outside the years -9999 to 9999 has no such text, and then no header.
        let created = event.created_at.and_then(|at| jiff::Timestamp::from_microsecond(at.0).ok());
        if let Some(created) = created {
            self.own(HeaderName::from_static(CREATED_AT), &created.to_string(), "")?;
        }
        if event.payload.is_none() {
            self.own(HeaderName::from_static("Outbox-Tombstone"), "true", "")?;
        }
        if let Some(job) = &envelope.replay {
            self.own(HeaderName::from_static(REPLAY), job, "")?;
        }
        Ok(())
    }

    /// The dead letter that it comes from.
    pub(super) fn redriven(&mut self, letter: i64) -> Result<(), Fault> {
        self.own(HeaderName::from_static(REDRIVEN), &letter.to_string(), "")
    }

    fn own(&mut self, name: HeaderName, value: &str, column: &str) -> Result<(), Fault> {
        self.push(name, value).map_err(|what| fault(format!("column `{column}` {what}")))
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
        let parsed = HeaderName::from_str(name)
            .map_err(|_| format!("header `{quoted}`: the name is not a header's"))?;
        self.push(parsed, value).map_err(|what| format!("header `{quoted}` {what}"))
    }

    fn push(&mut self, name: HeaderName, value: &str) -> Result<(), &'static str> {
        if value.chars().any(|char| char.is_control() && char != '\t') {
            return Err("holds a control character such as CR, LF or NUL");
        }
        let parsed = HeaderValue::from_str(value).map_err(|_| "can't be a header's value")?;
        let name_bytes: &[u8] = name.as_ref();
        self.bytes = self.bytes.saturating_add(name_bytes.len() + value.len() + LINE_BYTES);
        self.map.append(name, parsed);
        Ok(())
    }

    /// The block and its length on the wire.
    pub(super) fn finish(self) -> Result<(HeaderMap, usize), Fault> {
        if self.bytes > MAX_HEADER_BYTES {
            let detail =
                format!("the headers have {} bytes, more than {MAX_HEADER_BYTES}", self.bytes);
            return Err(Fault::new(Reason::TooLarge, detail));
        }
        Ok((self.map, self.bytes))
    }
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
