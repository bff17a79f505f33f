//! pgoutput frames of an outbox, as a server writes them with `binary`.

/// The table that the frames are of.
pub const TABLE: &str = "event";

const OID: u32 = 16_400;
const INT4: u32 = 23;
const INT8: u32 = 20;
const TEXT: u32 = 25;
const JSON: u32 = 114;
const TIMESTAMPTZ: u32 = 1184;
const UUID: u32 = 2950;
const JSONB: u32 = 3802;

const COLUMNS: &[(&str, u32)] = &[
    ("seq", INT8),
    ("id", UUID),
    ("tenant", TEXT),
    ("run_id", TEXT),
    ("kind", TEXT),
    ("version", INT4),
    ("payload", JSON),
    ("headers", JSONB),
    ("created_at", TIMESTAMPTZ),
];

/// Describes the table.
pub fn relation() -> Vec<u8> {
    let mut frame = vec![b'R'];
    frame.extend(OID.to_be_bytes());
    for name in ["outbox", TABLE] {
        frame.extend(name.as_bytes());
        frame.push(0);
    }
    frame.push(b'd');
    frame.extend(u16::try_from(COLUMNS.len()).unwrap().to_be_bytes());
    for (name, oid) in COLUMNS {
        frame.push(0);
        frame.extend(name.as_bytes());
        frame.push(0);
        frame.extend(oid.to_be_bytes());
        frame.extend((-1_i32).to_be_bytes());
    }
    frame
}

/// Begins a transaction.
pub fn begin(commit_lsn: u64) -> Vec<u8> {
    let mut frame = vec![b'B'];
    frame.extend(commit_lsn.to_be_bytes());
    frame.extend(820_000_000_000_000_i64.to_be_bytes());
    frame.extend(777_u32.to_be_bytes());
    frame
}

/// A row with a payload of 200 bytes, and with these headers of its own.
pub fn insert(seq: i64, run: &str, headers: Option<&str>) -> Vec<u8> {
    let id = 0x0192_7f3e_aaaa_7bbb_8ccc_0000_0000_0000_u128 | u128::from(seq.unsigned_abs());
    let payload = format!(r#"{{"n":{seq:07},"fill":"{}"}}"#, "x".repeat(180));
    let headers = headers.map(|text| [&[1], text.as_bytes()].concat());
    let values: [Option<Vec<u8>>; 9] = [
        Some(seq.to_be_bytes().to_vec()),
        Some(id.to_be_bytes().to_vec()),
        None,
        Some(run.into()),
        Some("order.created".into()),
        Some(1_i32.to_be_bytes().to_vec()),
        Some(payload.into()),
        headers,
        Some(820_000_000_123_456_i64.to_be_bytes().to_vec()),
    ];
    let mut frame = vec![b'I'];
    frame.extend(OID.to_be_bytes());
    frame.push(b'N');
    frame.extend(u16::try_from(values.len()).unwrap().to_be_bytes());
    for value in values {
        match value {
            None => frame.push(b'n'),
            Some(bytes) => {
                frame.push(b'b');
                frame.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
                frame.extend(bytes);
            }
        }
    }
    frame
}
