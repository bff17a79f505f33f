//! Values of single columns, in text or binary form. Owns what is readable as what; an unreadable
//! value gives words that follow the column's name: "is NULL", "is `x`, no integer".

use super::frame::{POSTGRES_EPOCH_MICROS, Value};
use super::quote::quote;
use super::relation::{Column, Shape};
use crate::event::{EventId, UnixMicros};

/// Bytes of an event, not yet copied: their length is known before the buffer is made.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part<'a> {
    /// As sent.
    Slice(&'a [u8]),
    /// Text form of an integer or uuid.
    Short([u8; 36], usize),
    /// Hexadecimal digits, checked, two for each byte.
    Hex(&'a [u8]),
}

impl Part<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Part::Slice(bytes) => bytes.len(),
            Part::Short(_, len) => *len,
            Part::Hex(digits) => digits.len() / 2,
        }
    }

    pub(super) fn copy_to(&self, buffer: &mut Vec<u8>) {
        match self {
            Part::Slice(bytes) => buffer.extend_from_slice(bytes),
            Part::Short(bytes, len) => buffer.extend_from_slice(bytes.get(..*len).unwrap_or(bytes)),
            Part::Hex(digits) => buffer.extend(
                digits
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .map(|[high, low]| nibble(*high) << 4 | nibble(*low)),
            ),
        }
    }
}

fn nibble(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        b'A'..=b'F' => digit - b'A' + 10,
        _ => 0,
    }
}

fn unsuited(column: &Column, as_what: &str) -> String {
    format!("has a type that can't be read as {as_what} (type OID {})", column.type_oid)
}

fn wrong_length(bytes: &[u8], what: &str) -> String {
    format!("has {} bytes, which is no binary {what}", bytes.len())
}

/// An integer of any width; `None` is NULL.
pub(super) fn integer(column: &Column, value: Value<'_>) -> Result<Option<i64>, String> {
    let width = match column.shape {
        Shape::Int2 => 2,
        Shape::Int4 => 4,
        Shape::Int8 => 8,
        Shape::Uuid
        | Shape::Text
        | Shape::Bpchar
        | Shape::Json
        | Shape::Jsonb
        | Shape::Bytea
        | Shape::Timestamptz
        | Shape::Timestamp
        | Shape::Foreign
        | Shape::Other => return Err(unsuited(column, "an integer")),
    };
    match value {
        Value::Null => Ok(None),
        Value::Binary(bytes) if bytes.len() != width => Err(wrong_length(bytes, "integer")),
        Value::Binary(bytes) => {
            let negative = bytes.first().is_some_and(|byte| byte & 0x80 != 0);
            let start = if negative { -1 } else { 0 };
            Ok(Some(bytes.iter().fold(start, |number, byte| number << 8 | i64::from(*byte))))
        }
        Value::Text(text) => str::from_utf8(text)
            .ok()
            .and_then(|text| text.parse().ok())
            .map(Some)
            .ok_or_else(|| format!("is {}, no integer", quote(text))),
    }
}

/// A uuid; the column's type is known to be one.
fn uuid(value: Value<'_>) -> Result<Option<uuid::Uuid>, String> {
    match value {
        Value::Null => Ok(None),
        Value::Binary(bytes) => {
            uuid::Uuid::from_slice(bytes).map(Some).map_err(|_| wrong_length(bytes, "uuid"))
        }
        Value::Text(text) => uuid::Uuid::try_parse_ascii(text)
            .map(Some)
            .map_err(|_| format!("is {}, no uuid", quote(text))),
    }
}

/// Text as such: UTF-8 as the session's `client_encoding` promises, without padding.
fn characters<'a>(column: &Column, value: Value<'a>) -> Result<Option<&'a [u8]>, String> {
    let (Value::Text(bytes) | Value::Binary(bytes)) = value else { return Ok(None) };
    if str::from_utf8(bytes).is_err() {
        return Err(format!("is {}, which is not UTF-8", quote(bytes)));
    }
    // Composites, ranges and hstore have binary lengths in them, ltree begins with a version.
    let binary = matches!((column.shape, value), (Shape::Foreign, Value::Binary(_)));
    if binary && bytes.iter().any(|byte| *byte < b'\t') {
        return Err(unsuited(column, "text"));
    }
    if column.shape == Shape::Bpchar {
        let end = bytes.iter().rposition(|byte| *byte != b' ').map_or(0, |last| last + 1);
        return Ok(bytes.get(..end));
    }
    Ok(Some(bytes))
}

/// A word of an event: run, kind or tenant. Integers and uuids are taken in PostgreSQL's text form.
pub(super) fn word<'a>(column: &Column, value: Value<'a>) -> Result<Option<Part<'a>>, String> {
    match column.shape {
        Shape::Text | Shape::Bpchar | Shape::Foreign => {
            Ok(characters(column, value)?.map(Part::Slice))
        }
        Shape::Uuid => Ok(uuid(value)?.map(|uuid| {
            let mut short = [0; 36];
            let len = uuid.hyphenated().encode_lower(&mut short).len();
            Part::Short(short, len)
        })),
        Shape::Int2 | Shape::Int4 | Shape::Int8 => Ok(integer(column, value)?.map(decimal)),
        Shape::Json
        | Shape::Jsonb
        | Shape::Bytea
        | Shape::Timestamptz
        | Shape::Timestamp
        | Shape::Other => Err(unsuited(column, "text")),
    }
}

fn decimal(number: i64) -> Part<'static> {
    use std::io::Write as _;
    let mut short = [0; 36];
    let mut free = short.as_mut_slice();
    // 20 characters at most, so the write always fits.
    let left = write!(free, "{number}").map_or(36, |()| free.len());
    Part::Short(short, 36 - left)
}

/// The payload: the bytes to publish, which nobody looks into.
pub(super) fn body<'a>(column: &Column, value: Value<'a>) -> Result<Option<Part<'a>>, String> {
    match column.shape {
        Shape::Json | Shape::Text => match value {
            Value::Null => Ok(None),
            Value::Text(bytes) | Value::Binary(bytes) => Ok(Some(Part::Slice(bytes))),
        },
        Shape::Jsonb => jsonb(value),
        Shape::Bytea => bytea(value),
        Shape::Foreign => Ok(characters(column, value)?.map(Part::Slice)),
        Shape::Bpchar
        | Shape::Int2
        | Shape::Int4
        | Shape::Int8
        | Shape::Uuid
        | Shape::Timestamptz
        | Shape::Timestamp
        | Shape::Other => Err(unsuited(column, "json, jsonb, text or bytea")),
    }
}

/// A JSON text that is looked into later.
pub(super) fn document<'a>(column: &Column, value: Value<'a>) -> Result<Option<Part<'a>>, String> {
    match column.shape {
        Shape::Json | Shape::Text => Ok(characters(column, value)?.map(Part::Slice)),
        Shape::Jsonb => {
            let part = jsonb(value)?;
            match part {
                Some(Part::Slice(bytes)) if str::from_utf8(bytes).is_err() => {
                    Err(format!("is {}, which is not UTF-8", quote(bytes)))
                }
                part => Ok(part),
            }
        }
        Shape::Bpchar
        | Shape::Int2
        | Shape::Int4
        | Shape::Int8
        | Shape::Uuid
        | Shape::Bytea
        | Shape::Timestamptz
        | Shape::Timestamp
        | Shape::Foreign
        | Shape::Other => Err(unsuited(column, "json, jsonb or text")),
    }
}

/// Binary jsonb is its text behind a version byte, which has always been 1.
fn jsonb(value: Value<'_>) -> Result<Option<Part<'_>>, String> {
    match value {
        Value::Null => Ok(None),
        Value::Text(text) | Value::Binary([1, text @ ..]) => Ok(Some(Part::Slice(text))),
        Value::Binary([version, ..]) => Err(format!("is jsonb of the unknown version {version}")),
        Value::Binary([]) => Err(wrong_length(&[], "jsonb")),
    }
}

fn bytea(value: Value<'_>) -> Result<Option<Part<'_>>, String> {
    match value {
        Value::Null => Ok(None),
        Value::Binary(bytes) => Ok(Some(Part::Slice(bytes))),
        Value::Text([b'\\', b'x', digits @ ..])
            if digits.len() % 2 == 0 && digits.iter().all(u8::is_ascii_hexdigit) =>
        {
            Ok(Some(Part::Hex(digits)))
        }
        Value::Text(text) => {
            Err(format!("is {}, no bytea in hexadecimal form (`bytea_output = hex`)", quote(text)))
        }
    }
}

/// The identity: a uuid, an integer, or text that isn't blank. Blank ids are refused since they
/// would share one message id, and NULL has none.
pub(super) fn identity(column: &Column, value: Value<'_>) -> Result<EventId, String> {
    let id = match column.shape {
        Shape::Uuid => uuid(value)?.map(EventId::Uuid),
        Shape::Int2 | Shape::Int4 | Shape::Int8 => integer(column, value)?.map(EventId::Int),
        Shape::Text | Shape::Bpchar | Shape::Foreign => {
            let text = characters(column, value)?.map(|bytes| str::from_utf8(bytes));
            match text {
                Some(Ok(text)) if text.trim().is_empty() => {
                    return Err(format!("is {}, which identifies nothing", quote(text.as_bytes())));
                }
                Some(Ok(text)) => Some(EventId::Text(text.into())),
                Some(Err(error)) => return Err(format!("is not UTF-8: {error}")),
                None => None,
            }
        }
        Shape::Json
        | Shape::Jsonb
        | Shape::Bytea
        | Shape::Timestamptz
        | Shape::Timestamp
        | Shape::Other => return Err(unsuited(column, "uuid, integer or text")),
    };
    id.ok_or_else(|| "is NULL".to_owned())
}

/// A point in time; `timestamp` is taken as UTC.
pub(super) fn instant(column: &Column, value: Value<'_>) -> Result<Option<UnixMicros>, String> {
    if !matches!(column.shape, Shape::Timestamptz | Shape::Timestamp) {
        return Err(unsuited(column, "a timestamp"));
    }
    match value {
        Value::Null => Ok(None),
        Value::Binary(bytes) => {
            let Ok(since_2000) = bytes.try_into().map(i64::from_be_bytes) else {
                return Err(wrong_length(bytes, "timestamp"));
            };
            if since_2000 == i64::MAX || since_2000 == i64::MIN {
                return Err("is infinite, no point in time".to_owned());
            }
            let micros = since_2000.checked_add(POSTGRES_EPOCH_MICROS).map(UnixMicros);
            micros.map(Some).ok_or_else(|| "is beyond all dates".to_owned())
        }
        Value::Text(text) => written_instant(column.shape, text)
            .map(|micros| Some(UnixMicros(micros)))
            .ok_or_else(|| format!("is {}, no ISO timestamp", quote(text))),
    }
}

fn written_instant(shape: Shape, text: &[u8]) -> Option<i64> {
    let text = str::from_utf8(text).ok()?;
    if shape == Shape::Timestamptz {
        return text.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_microsecond);
    }
    let civil: jiff::civil::DateTime = text.parse().ok()?;
    jiff::tz::TimeZone::UTC.to_timestamp(civil).ok().map(jiff::Timestamp::as_microsecond)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(shape: Shape) -> Column {
        Column { name: "c".into(), shape, type_oid: 16_500 }
    }

    fn bytes(part: Result<Option<Part<'_>>, String>) -> Vec<u8> {
        let part = part.unwrap().unwrap();
        let mut buffer = Vec::new();
        part.copy_to(&mut buffer);
        assert_eq!(buffer.len(), part.len());
        buffer
    }

    #[test]
    fn written_timestamps_are_read_in_any_session_zone() {
        for (shape, text, micros) in [
            (Shape::Timestamptz, "2026-01-02 03:04:05.000006+00", 1_767_323_045_000_006),
            (Shape::Timestamptz, "2026-01-02 08:34:05.000006+05:30", 1_767_323_045_000_006),
            (Shape::Timestamptz, "1970-01-01 00:00:20+00:00:20", 0),
            (Shape::Timestamptz, "1969-12-31 16:00:00.5-08", 500_000),
            (Shape::Timestamp, "1969-12-31 23:59:59.999999", -1),
        ] {
            let value = Value::Text(text.as_bytes());
            assert_eq!(instant(&column(shape), value), Ok(Some(UnixMicros(micros))), "{text}");
        }
        for text in ["infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "Fri Jan 02 2026", ""] {
            let value = Value::Text(text.as_bytes());
            assert!(instant(&column(Shape::Timestamptz), value).is_err(), "{text}");
        }
    }

    #[test]
    fn binary_timestamps_have_their_limits() {
        let at = |micros: i64| {
            instant(&column(Shape::Timestamptz), Value::Binary(&micros.to_be_bytes()))
        };
        assert_eq!(at(0), Ok(Some(UnixMicros(946_684_800_000_000))));
        for micros in [i64::MAX, i64::MAX - 1, i64::MIN] {
            assert!(at(micros).is_err());
        }
        assert!(instant(&column(Shape::Timestamp), Value::Binary(&[0; 4])).is_err());
    }

    #[test]
    fn integers_keep_their_sign_and_width() {
        for (shape, value, number) in [
            (Shape::Int2, Value::Binary(&[0xff, 0xfe]), -2),
            (Shape::Int4, Value::Binary(&[0x7f, 0xff, 0xff, 0xff]), 2_147_483_647),
            (Shape::Int8, Value::Binary(&[0x80, 0, 0, 0, 0, 0, 0, 0]), i64::MIN),
            (Shape::Int8, Value::Text(b"-9223372036854775808"), i64::MIN),
        ] {
            assert_eq!(integer(&column(shape), value), Ok(Some(number)));
            assert_eq!(bytes(word(&column(shape), value)), number.to_string().into_bytes());
        }
        assert!(integer(&column(Shape::Int4), Value::Binary(&[0; 8])).is_err());
        assert!(integer(&column(Shape::Int8), Value::Text(b"9223372036854775808")).is_err());
        assert!(integer(&column(Shape::Text), Value::Text(b"1")).is_err());
    }

    #[test]
    fn payloads_are_the_bytes_that_were_written() {
        for (shape, value, expected) in [
            (Shape::Bytea, Value::Text(br"\x00ffAb"), &b"\0\xff\xab"[..]),
            (Shape::Bytea, Value::Text(br"\x"), b""),
            (Shape::Bytea, Value::Binary(b"\0\r\n"), b"\0\r\n"),
            (Shape::Jsonb, Value::Binary(b"\x01{}"), b"{}"),
            (Shape::Jsonb, Value::Text(b"{}"), b"{}"),
            (Shape::Json, Value::Binary(b" {\"a\":1.0}\n"), b" {\"a\":1.0}\n"),
        ] {
            assert_eq!(bytes(body(&column(shape), value)), expected);
        }
        for (shape, value) in [
            (Shape::Bytea, Value::Text(br"\x0")),
            (Shape::Bytea, Value::Text(br"\x0g")),
            (Shape::Bytea, Value::Text(br"\000escaped")),
            (Shape::Jsonb, Value::Binary(b"\x02{}")),
            (Shape::Jsonb, Value::Binary(b"")),
            (Shape::Other, Value::Text(b"1.5")),
        ] {
            assert!(body(&column(shape), value).is_err());
        }
    }

    #[test]
    fn words_are_utf8_and_foreign_types_visibly_text() {
        let text = |shape, value| word(&column(shape), value).map(|_| ());
        assert_eq!(text(Shape::Foreign, Value::Binary("offen ü".as_bytes())), Ok(()));
        assert_eq!(text(Shape::Foreign, Value::Text(b"(1,x)")), Ok(()));
        // A composite of an integer and a text, and ltree's version byte.
        assert!(text(Shape::Foreign, Value::Binary(b"\0\0\0\x02\0\0\0\x17")).is_err());
        assert!(text(Shape::Foreign, Value::Binary(b"\x01a.b")).is_err());
        let latin = text(Shape::Text, Value::Binary(b"\xfcber\n"));
        assert_eq!(latin, Err("is `\u{fffd}ber\\n`, which is not UTF-8".to_owned()));
        assert_eq!(bytes(word(&column(Shape::Bpchar), Value::Text(b" a  "))), b" a");
    }

    #[test]
    fn blank_ids_identify_nothing() {
        for blank in ["", " ", "\t\n", "\u{a0}\u{2003}"] {
            assert!(identity(&column(Shape::Text), Value::Text(blank.as_bytes())).is_err());
        }
        assert!(identity(&column(Shape::Uuid), Value::Null).is_err());
        assert!(identity(&column(Shape::Uuid), Value::Binary(&[0; 15])).is_err());
        let id = identity(&column(Shape::Int8), Value::Text(b"7"));
        assert_eq!(id, Ok(EventId::Int(7)));
    }
}
