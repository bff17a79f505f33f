//! Feeds the decoder the frames of one connection. An input is a byte that picks the table, then
//! frames, each behind its length in two bytes.
//!
//! `cargo run --example seed` in this directory writes a corpus from the captured frames, then
//! `cargo +nightly fuzz run decode`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use outboxd::config::{ColumnMap, QualifiedName};
use outboxd::decode::{Decoded, Decoder};

const TABLES: [&str; 6] = ["event", "typed", "blobs", "parted", "odd", "noseq"];

fuzz_target!(|input: &[u8]| {
    let Some((pick, mut rest)) = input.split_first() else { return };
    let table = TABLES[usize::from(*pick) % TABLES.len()];
    let table = QualifiedName { schema: "app".into(), name: table.into() };
    let mut decoder = Decoder::new(table, ColumnMap::default());
    while let Some((len, behind)) = rest.split_first_chunk::<2>() {
        let len = usize::from(u16::from_be_bytes(*len)).min(behind.len());
        let (frame, next) = behind.split_at(len);
        rest = next;
        match decoder.decode(frame) {
            Ok(Decoded::Event(event)) => {
                for word in [Some(&event.kind), event.run.as_ref(), event.tenant.as_ref()] {
                    assert!(word.is_none_or(|word| str::from_utf8(word).is_ok()));
                }
                match event.fault {
                    Some(fault) => printable(&fault.detail),
                    None => assert!(!event.kind.is_empty() && !blank(&event.id.to_string())),
                }
            }
            Ok(_) => {}
            Err(error) => printable(&error.to_string()),
        }
    }
});

fn blank(text: &str) -> bool {
    text.trim().is_empty()
}

fn printable(words: &str) {
    assert!(words.len() < 2_000 && !words.chars().any(char::is_control), "{words:?}");
}
