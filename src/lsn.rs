//! WAL positions. Owns their text form and their order; knows nothing of connections or events.

use std::fmt;
use std::str::FromStr;

/// A byte position in the write-ahead log, written `16/B374D848` as PostgreSQL's `pg_lsn` does.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// `0/0`: no position. START_REPLICATION takes it as "where the slot stands".
    pub const ZERO: Lsn = Lsn(0);
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

impl fmt::Debug for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not `X/X` with one to eight hexadecimal digits on each side.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an LSN: expected two hexadecimal numbers such as 16/B374D848")]
pub struct ParseLsnError(pub String);

impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let half = |part: &str| {
            let plain =
                (1..=8).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            plain.then(|| u64::from_str_radix(part, 16).ok()).flatten()
        };
        text.split_once('/')
            .and_then(|(high, low)| Some(Lsn(half(high)? << 32 | half(low)?)))
            .ok_or_else(|| ParseLsnError(text.to_owned()))
    }
}

/// Where an event stands in commit order: its transaction's commit LSN, then its index among the
/// outbox rows of that transaction. Event LSNs alone are not ordered, since transactions interleave
/// in the WAL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Start of the commit record, as in pgoutput's Begin and Commit.
    pub commit_lsn: Lsn,
    /// 0 for the first outbox row of the transaction.
    pub index: u32,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.commit_lsn, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips() {
        for text in ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"] {
            assert_eq!(text.parse::<Lsn>().map(|lsn| lsn.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in ["", "/", "1", "1/", "/1", "G/1", "+1/1", "123456789/1", "1/1/1", " 1/1"] {
            assert!(text.parse::<Lsn>().is_err(), "{text:?} was accepted");
        }
    }
}
