//! Frames that no server sends: the decoder answers with errors, never with a panic, a large
//! allocation or an event that isn't one.

use super::fixture::{Stream, unhex};
use super::{TABLES, decoder, streams};
use outboxd::decode::{DecodeError, Decoded};
use proptest::prelude::*;
use std::sync::LazyLock;

static STREAMS: LazyLock<Vec<Stream>> =
    LazyLock::new(|| streams().map(|(_, stream)| stream).collect());

#[test]
fn nothing_is_known_on_a_new_connection() {
    let stream = &STREAMS[0];
    for byte in *b"IUDT" {
        let frame = stream.frames.iter().find(|frame| frame[0] == byte).unwrap();
        let mut decoder = decoder("event");
        assert!(matches!(decoder.decode(&begin(7)), Ok(Decoded::Begin { .. })));
        let error = decoder.decode(frame).unwrap_err();
        assert!(error.what.contains("not announced on this connection"), "{error}");
    }
}

fn begin(lsn: u64) -> Vec<u8> {
    [&b"B"[..], &lsn.to_be_bytes(), &[0; 12]].concat()
}

fn commit(lsn: u64) -> Vec<u8> {
    [&b"C\0"[..], &lsn.to_be_bytes(), &(lsn + 1).to_be_bytes(), &[0; 8]].concat()
}

fn error_of(frames: &[Vec<u8>]) -> DecodeError {
    let mut decoder = decoder("event");
    let (last, before) = frames.split_last().unwrap();
    for frame in before {
        decoder.decode(frame).unwrap();
    }
    decoder.decode(last).unwrap_err()
}

#[test]
fn frames_out_of_turn_are_errors() {
    let stream = &STREAMS[0];
    let relation = stream.frames.iter().find(|frame| frame[0] == b'R').unwrap();
    let insert = stream.frames.iter().find(|frame| frame[0] == b'I').unwrap();
    let marker = unhex("4d01000000000155d4286f7574626f78640000000000");
    for (frames, words) in [
        (vec![relation.clone(), insert.clone()], "outside a transaction"),
        (vec![marker], "outside a transaction"),
        (vec![commit(7)], "outside a transaction"),
        (vec![begin(7), begin(8)], "inside the transaction of commit 0/7"),
        (vec![begin(7), commit(8)], "commit 0/8 ends the transaction of 0/7"),
        (vec![vec![]], "the message is empty"),
    ] {
        let error = error_of(&frames);
        assert_eq!(error.what, words);
    }
}

#[test]
fn an_unknown_frame_is_named() {
    assert_eq!(
        error_of(&[b"S\0\0\0\x01\x01".to_vec()]).to_string(),
        "pgoutput frame `S` (0x53): protocol 1 has no such frame"
    );
    assert_eq!(
        error_of(&[b"\n".to_vec()]).to_string(),
        "pgoutput frame 0x0a: protocol 1 has no such frame"
    );
}

#[test]
fn cut_and_padded_frames_are_errors() {
    let stream = &STREAMS[0];
    let (mut decoder, mut again) = (decoder("event"), decoder("event"));
    for frame in &stream.frames {
        let outbox = matches!(decoder.decode(frame), Ok(Decoded::Event(_)));
        // Rows of other tables and changes of rows are passed over, whatever they hold.
        if !outbox && !b"BCORYTM".contains(&frame[0]) {
            continue;
        }
        // A frame that can't be read leaves the decoder where it was.
        for len in 0..frame.len() {
            assert!(again.decode(&frame[..len]).is_err());
        }
        assert!(again.decode(&[frame, &b"\0"[..]].concat()).is_err());
        again.decode(frame).unwrap();
    }
}

/// A Relation frame of `app.event` with text columns.
fn relation(columns: &[&str]) -> Vec<u8> {
    let mut frame = b"R\0\0\0\x09app\0event\0d".to_vec();
    frame.extend(u16::try_from(columns.len()).unwrap().to_be_bytes());
    for column in columns {
        let type_oid: u32 = if *column == "seq" { 20 } else { 25 };
        frame.push(0);
        frame.extend(column.as_bytes());
        frame.push(0);
        frame.extend(type_oid.to_be_bytes());
        frame.extend((-1_i32).to_be_bytes());
    }
    frame
}

/// An Insert into it, of values in text form.
fn insert(values: &[&[u8]]) -> Vec<u8> {
    let mut frame = b"I\0\0\0\x09N".to_vec();
    frame.extend(u16::try_from(values.len()).unwrap().to_be_bytes());
    for value in values {
        frame.push(b't');
        frame.extend(u32::try_from(value.len()).unwrap().to_be_bytes());
        frame.extend(*value);
    }
    frame
}

const COLUMNS: [&str; 5] = ["seq", "id", "run_id", "kind", "payload"];
const ROW: [&[u8]; 5] = [b"1", b"id", b"run", b"k", b"p"];

#[test]
fn a_row_that_is_no_new_row_is_an_error() {
    let before = vec![begin(7), relation(&COLUMNS)];
    let error = |row: Vec<u8>| error_of(&[before.clone(), vec![row]].concat()).what;

    // The payload as unchanged TOAST value, which only an update has.
    let mut unchanged = insert(&ROW);
    unchanged.truncate(unchanged.len() - 6);
    unchanged.push(b'u');
    assert_eq!(error(unchanged), "value kind is 117");

    let mut old_key = insert(&ROW);
    old_key[5] = b'K';
    assert_eq!(error(old_key), "tuple kind is 75");

    assert_eq!(error(insert(&ROW[..4])), "column count (the relation has another) is 4");
    let mut negative = insert(&ROW);
    negative[9..13].copy_from_slice(&(-1_i32).to_be_bytes());
    assert_eq!(error(negative), "value length is -1");
}

#[test]
fn a_table_without_seq_stops_the_stream_at_its_first_row() {
    let columns = ["number", "id", "run_id", "kind", "payload"];
    let error = error_of(&[begin(7), relation(&columns), insert(&ROW)]);
    let words =
        "column `seq` is missing; the table has `number`, `id`, `run_id`, `kind`, `payload`";
    assert_eq!(error.what, words);
}

#[test]
fn hostile_text_stays_out_of_the_words() {
    let long = "\u{1b}[2J\r\n".repeat(10_000);
    let mut decoder = decoder("event");
    let names = ["seq", "id", "run_id", "kind", &long];
    decoder.decode(&begin(7)).unwrap();
    decoder.decode(&relation(&names)).unwrap();
    sound(decoder.decode(&insert(&ROW)));
    decoder.decode(&relation(&COLUMNS)).unwrap();
    let invalid = [long.as_bytes(), b"\xff"].concat();
    for at in 1..4 {
        let mut row = ROW;
        row[at] = &invalid;
        let decoded = decoder.decode(&insert(&row));
        assert!(matches!(&decoded, Ok(Decoded::Event(event)) if event.fault.is_some()));
        sound(decoded);
    }
    let mut row = ROW;
    row[0] = long.as_bytes();
    sound(decoder.decode(&insert(&row)));
}

/// A change to a captured frame.
#[derive(Debug, Clone)]
enum Mutation {
    Flip {
        at: prop::sample::Index,
        bit: u8,
    },
    Set {
        at: prop::sample::Index,
        byte: u8,
    },
    Cut {
        at: prop::sample::Index,
    },
    Insert {
        at: prop::sample::Index,
        bytes: Vec<u8>,
    },
    /// Counts and lengths: what makes readers allocate or overrun.
    Word {
        at: prop::sample::Index,
        word: u32,
    },
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<prop::sample::Index>;
    let word = prop_oneof![Just(u32::MAX), Just(0x7fff_ffff), Just(0x8000_0000), any::<u32>()];
    prop_oneof![
        (at(), 0..8_u8).prop_map(|(at, bit)| Mutation::Flip { at, bit }),
        (at(), any::<u8>()).prop_map(|(at, byte)| Mutation::Set { at, byte }),
        at().prop_map(|at| Mutation::Cut { at }),
        (at(), prop::collection::vec(any::<u8>(), 1..40))
            .prop_map(|(at, bytes)| Mutation::Insert { at, bytes }),
        (at(), word).prop_map(|(at, word)| Mutation::Word { at, word }),
    ]
}

fn mutate(frame: &mut Vec<u8>, mutation: Mutation) {
    if frame.is_empty() {
        return;
    }
    match mutation {
        Mutation::Flip { at, bit } => *at.get_mut(frame) ^= 1 << bit,
        Mutation::Set { at, byte } => *at.get_mut(frame) = byte,
        Mutation::Cut { at } => frame.truncate(at.index(frame.len())),
        Mutation::Insert { at, bytes } => {
            let at = at.index(frame.len());
            frame.splice(at..at, bytes);
        }
        Mutation::Word { at, word } => {
            let at = at.index(frame.len());
            let end = frame.len().min(at + 4);
            frame.splice(at..end, word.to_be_bytes());
        }
    }
}

/// What must hold of anything decoded, also from garbage.
fn sound(decoded: Result<Decoded, DecodeError>) {
    let printable = |text: &str| {
        assert!(text.len() < 2_000, "{} bytes", text.len());
        assert!(!text.chars().any(char::is_control), "{text:?}");
    };
    match decoded {
        Ok(Decoded::Event(event)) => {
            let words = [Some(&event.kind), event.run.as_ref(), event.tenant.as_ref()];
            for word in words.into_iter().flatten() {
                assert!(str::from_utf8(word).is_ok());
            }
            match event.fault {
                Some(fault) => printable(&fault.detail),
                None => {
                    assert!(!event.kind.is_empty());
                    assert!(!event.id.to_string().trim().is_empty());
                }
            }
        }
        Ok(_) => {}
        Err(error) => printable(&error.to_string()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn arbitrary_bytes_never_panic(
        byte in prop::sample::select(b"BCORYIUDTM\0".to_vec()),
        rest in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut decoder = decoder("event");
        decoder.decode(&begin(7)).unwrap();
        sound(decoder.decode(&rest));
        sound(decoder.decode(&[&[byte], &rest[..]].concat()));
    }

    /// Each mutated frame meets a decoder that knows the tables, as the original would have.
    #[test]
    fn mutated_frames_never_panic(
        stream in any::<prop::sample::Index>(),
        first in any::<prop::sample::Index>(),
        table in prop::sample::select(TABLES.to_vec()),
        changes in prop::collection::vec((0..8_usize, mutation()), 1..10),
    ) {
        let captured = &stream.get(&STREAMS).frames;
        let first = first.index(captured.len());
        let mut decoder = decoder(table);
        for frame in &captured[..first] {
            decoder.decode(frame).unwrap();
        }
        let mut frames: Vec<_> = captured[first..].iter().take(8).cloned().collect();
        for (index, mutation) in changes {
            let index = index % frames.len();
            mutate(&mut frames[index], mutation);
        }
        for frame in &frames {
            sound(decoder.decode(frame));
        }
    }
}
