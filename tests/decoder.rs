//! The decoder against what PostgreSQL 14, 16 and 18 really send, and against what no server sends.
//! The expected rows were told by the servers themselves (`support/capture_pgoutput.rs`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::wildcard_enum_match_arm,
    reason = "a test stops at what it did not expect"
)]

#[path = "support/fixture.rs"]
mod fixture;
#[path = "decoder/hostile.rs"]
mod hostile;

use fixture::{Fixture, Stream};
use outboxd::config::{ColumnMap, QualifiedName};
use outboxd::decode::{Decoded, Decoder};
use outboxd::event::{Event, Reason, RunHash, UnixMicros};
use outboxd::lsn::Lsn;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Tables of the scenario that have a readable sequence column.
const TABLES: [&str; 5] = ["event", "typed", "blobs", "parted", "odd"];

fn decoder(table: &str) -> Decoder {
    let table = QualifiedName { schema: "app".into(), name: table.into() };
    Decoder::new(table, ColumnMap::default())
}

fn streams() -> impl Iterator<Item = (Fixture, Stream)> {
    fixture::all().into_iter().flat_map(|mut fixture| {
        let streams = std::mem::take(&mut fixture.streams);
        let fixtures = streams.into_iter().map(move |stream| {
            let (server, rows) = (fixture.server, fixture.rows.clone());
            (Fixture { server, rows, streams: Vec::new() }, stream)
        });
        fixtures.collect::<Vec<_>>()
    })
}

fn decode_all(table: &str, stream: &Stream) -> Vec<Decoded> {
    let mut decoder = decoder(table);
    let decoded = stream.frames.iter().map(|frame| decoder.decode(frame));
    decoded.collect::<Result<_, _>>().unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An event in the words of the fixture's rows.
fn told(table: &str, xid: u32, event: &Event) -> Value {
    let mut told = json!({ "table": table, "seq": event.seq, "xid": xid });
    let row = told.as_object_mut().unwrap();
    if let Some(fault) = &event.fault {
        assert_eq!(fault.reason, Reason::Unmappable);
        let column = fault.detail.split('`').nth(1).unwrap();
        row.insert("fault".into(), column.into());
        return told;
    }
    let mut add = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            row.insert(key.into(), value);
        }
    };
    add("id", Some(event.id.to_string().into()));
    add("kind", Some(Event::text(&event.kind).into()));
    add("run", event.run.as_ref().map(|run| Event::text(run).into()));
    add("tenant", event.tenant.as_ref().map(|tenant| Event::text(tenant).into()));
    add("headers", event.headers.as_ref().map(|headers| Event::text(headers).into()));
    add("payload", event.payload.as_ref().map(|payload| hex(payload).into()));
    add("version", event.version.map(Value::from));
    add("created_at", event.created_at.map(|UnixMicros(micros)| micros.into()));
    told
}

#[test]
fn every_committed_row_is_an_event_in_commit_order() {
    for (fixture, stream) in streams() {
        for table in TABLES {
            let expected: Vec<Value> = fixture
                .rows
                .iter()
                .map(|row| serde_json::from_str::<Value>(row).unwrap())
                .filter(|row| row["table"] == table)
                .collect();
            let mut xid = 0;
            let mut events = Vec::new();
            for decoded in decode_all(table, &stream) {
                match decoded {
                    Decoded::Begin { xid: begun, .. } => xid = begun,
                    Decoded::Event(event) => events.push(told(table, xid, &event)),
                    _ => {}
                }
            }
            let place = format!("PostgreSQL {} {} {table}", fixture.server, stream.name);
            assert!(expected.len() > usize::from(table != "odd"), "{place}: nothing expected");
            similar(&place, &expected, &events);
        }
    }
}

fn similar(place: &str, expected: &[Value], events: &[Value]) {
    for (index, (expected, event)) in expected.iter().zip(events).enumerate() {
        assert_eq!(event, expected, "{place}: row {index}");
    }
    assert_eq!(events.len(), expected.len(), "{place}");
}

#[test]
fn positions_follow_the_commits() {
    for (_, stream) in streams() {
        let mut open = None;
        let mut last_end = Lsn::ZERO;
        let mut index = 0;
        for decoded in decode_all("event", &stream) {
            match decoded {
                Decoded::Begin { commit_lsn, committed_at, .. } => {
                    assert!(commit_lsn >= last_end);
                    open = Some((commit_lsn, committed_at));
                    index = 0;
                }
                Decoded::Event(event) => {
                    let position = event.position.unwrap();
                    let (commit_lsn, committed_at) = open.unwrap();
                    assert_eq!((position.commit_lsn, position.index), (commit_lsn, index));
                    assert_eq!(event.committed_at, Some(committed_at));
                    // Both are the server's clock, at start and commit. Not always in this order:
                    // a session with a replication origin states its own commit time.
                    let created_at = event.created_at.unwrap();
                    assert!(committed_at.0.abs_diff(created_at.0) < 60_000_000);
                    index += 1;
                }
                Decoded::Commit { commit_lsn, end_lsn } => {
                    assert_eq!(open.take().unwrap().0, commit_lsn);
                    assert!(end_lsn > commit_lsn);
                    last_end = end_lsn;
                }
                Decoded::Message { .. } | Decoded::Truncate { .. } | Decoded::Other => {}
            }
        }
        assert_eq!(open, None);
    }
}

#[test]
fn events_hold_one_buffer_of_their_own_bytes() {
    let (_, stream) = streams().next().unwrap();
    let mut seen = 0;
    for decoded in decode_all("event", &stream) {
        let Decoded::Event(event) = decoded else { continue };
        let expected = event.run.as_deref().map_or(RunHash::of_seq(event.seq), RunHash::of_run);
        assert_eq!(event.run_hash, expected);
        let kind = Some(event.kind);
        let parts = [event.run, kind, event.tenant, event.payload, event.headers];
        let parts: Vec<_> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
        for pair in parts.windows(2) {
            assert_eq!(pair[0].as_ptr().wrapping_add(pair[0].len()), pair[1].as_ptr());
            seen += 1;
        }
    }
    assert!(seen > 50);
}

#[test]
fn logical_messages_of_both_kinds_arrive() {
    for (fixture, stream) in streams() {
        let mut inside = false;
        let mut messages = Vec::new();
        for decoded in decode_all("event", &stream) {
            match decoded {
                Decoded::Begin { .. } => inside = true,
                Decoded::Commit { .. } => inside = false,
                Decoded::Message { transactional, lsn, prefix, content } => {
                    assert!(lsn > Lsn::ZERO);
                    assert_eq!(inside, transactional);
                    messages.push((transactional, prefix, content.to_vec()));
                }
                _ => {}
            }
        }
        let message = |transactional, prefix: &str, content: &[u8]| {
            (transactional, prefix.to_owned(), content.to_owned())
        };
        let expected = [
            message(true, "outboxd", b"\0\xffm"),
            message(false, "elsewhere", b"no transaction"),
            // Arrives when it is written, ahead of the transaction that it was written in.
            message(false, "outboxd", b"in one"),
            message(true, "outboxd", b""),
            message(false, "outboxd", b"kept"),
        ];
        let asked = stream.name != "everything";
        let expected = if asked { &expected[..] } else { &[] };
        assert_eq!(messages, expected, "PostgreSQL {} {}", fixture.server, stream.name);
    }
}

#[test]
fn truncates_tell_whether_the_outbox_is_hit() {
    for (_, stream) in streams() {
        let truncates = |table| -> Vec<bool> {
            let decoded = decode_all(table, &stream).into_iter();
            decoded
                .filter_map(|decoded| match decoded {
                    Decoded::Truncate { of_outbox } => Some(of_outbox),
                    _ => None,
                })
                .collect()
        };
        // Another table, the table alone, the partitioned one, then with CASCADE.
        assert_eq!(truncates("event"), [false, true, false, true]);
        assert_eq!(truncates("parted"), [false, false, true, false]);
    }
}

#[test]
fn fixtures_hold_every_frame() {
    for fixture in fixture::all() {
        let frames = fixture.streams.iter().flat_map(|stream| &stream.frames);
        let bytes: BTreeSet<u8> = frames.map(|frame| frame[0]).collect();
        assert_eq!(bytes, BTreeSet::from(*b"BCORYIUDTM"), "PostgreSQL {}", fixture.server);
    }
}

#[test]
fn a_row_without_readable_seq_stops_the_stream() {
    for (_, stream) in streams() {
        let mut decoder = decoder("noseq");
        let error = stream.frames.iter().find_map(|frame| decoder.decode(frame).err()).unwrap();
        assert_eq!(error.byte, Some(b'I'));
        assert!(error.what.starts_with("column `seq` has a type that can't be"), "{error}");
    }
}

#[test]
fn one_column_may_play_two_roles() {
    let (_, stream) = streams().next().unwrap();
    let table = QualifiedName { schema: "app".into(), name: "event".into() };
    let map = ColumnMap { id: "seq".into(), version: None, ..ColumnMap::default() };
    let mut decoder = Decoder::new(table, map);
    let mut events = 0;
    for frame in &stream.frames {
        if let Decoded::Event(event) = decoder.decode(frame).unwrap() {
            assert_eq!(event.id.to_string(), event.seq.to_string());
            assert_eq!(event.version, None);
            events += 1;
        }
    }
    assert!(events > 20);
}
