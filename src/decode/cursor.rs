//! Checked reads over one frame. Owns the only place that takes bytes off a slice; knows no frame.

use std::fmt;

/// Why a read failed; `field` names what was being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// The frame ends before the field does.
    Short { field: &'static str, wanted: usize, left: usize },
    /// A string without its closing NUL.
    Unterminated { field: &'static str },
    /// A length or count below zero, or another value the protocol doesn't have.
    Value { field: &'static str, found: i64 },
    /// Bytes behind the frame's last field.
    Trailing { left: usize },
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Short { field, wanted, left } => {
                write!(f, "{field} takes {wanted} bytes and {left} are left")
            }
            Broken::Unterminated { field } => write!(f, "{field} has no closing NUL"),
            Broken::Value { field, found } => write!(f, "{field} is {found}"),
            Broken::Trailing { left } => write!(f, "{left} bytes follow the last field"),
        }
    }
}

/// The unread rest of a frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(rest: &'a [u8]) -> Cursor<'a> {
        Cursor { rest }
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Broken> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(Broken::Short { field, wanted: N, left: self.rest.len() });
        };
        self.rest = rest;
        Ok(*head)
    }

    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, Broken> {
        self.array(field).map(|[byte]: [u8; 1]| byte)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, Broken> {
        self.array(field).map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, Broken> {
        self.array(field).map(u64::from_be_bytes)
    }

    pub(super) fn i64(&mut self, field: &'static str) -> Result<i64, Broken> {
        self.array(field).map(i64::from_be_bytes)
    }

    /// A 16-bit count, which PostgreSQL sends signed.
    pub(super) fn count16(&mut self, field: &'static str) -> Result<u16, Broken> {
        let count = self.array(field).map(i16::from_be_bytes)?;
        u16::try_from(count).map_err(|_| Broken::Value { field, found: i64::from(count) })
    }

    /// A 32-bit length or count, which PostgreSQL sends signed.
    pub(super) fn count32(&mut self, field: &'static str) -> Result<usize, Broken> {
        let count = self.array(field).map(i32::from_be_bytes)?;
        usize::try_from(count).map_err(|_| Broken::Value { field, found: i64::from(count) })
    }

    pub(super) fn take(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], Broken> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(Broken::Short { field, wanted: len, left: self.rest.len() });
        };
        self.rest = rest;
        Ok(head)
    }

    /// A string up to its NUL, which is read and not returned. Not necessarily UTF-8.
    pub(super) fn string(&mut self, field: &'static str) -> Result<&'a [u8], Broken> {
        let nul = self.rest.iter().position(|byte| *byte == 0);
        let text = nul.and_then(|at| self.rest.split_at_checked(at));
        let Some((text, [_, rest @ ..])) = text else {
            return Err(Broken::Unterminated { field });
        };
        self.rest = rest;
        Ok(text)
    }

    /// The frame must end here.
    pub(super) fn finish(self) -> Result<(), Broken> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(Broken::Trailing { left }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_read_takes_nothing() {
        let mut cursor = Cursor::new(&[1, 2, 3]);
        assert_eq!(cursor.u32("x"), Err(Broken::Short { field: "x", wanted: 4, left: 3 }));
        assert!(cursor.take(4, "x").is_err());
        assert_eq!(cursor.string("x"), Err(Broken::Unterminated { field: "x" }));
        assert_eq!(cursor.take(3, "x"), Ok(&[1, 2, 3][..]));
        assert_eq!(cursor.finish(), Ok(()));
    }

    #[test]
    fn lengths_below_zero_are_refused() {
        let mut cursor = Cursor::new(&[0xff; 6]);
        assert_eq!(cursor.count16("n"), Err(Broken::Value { field: "n", found: -1 }));
        assert_eq!(cursor.count32("n"), Err(Broken::Value { field: "n", found: -1 }));
    }

    #[test]
    fn strings_end_at_their_nul() {
        let mut cursor = Cursor::new(b"\0ab\0c");
        assert_eq!(cursor.string("s"), Ok(&b""[..]));
        assert_eq!(cursor.string("s"), Ok(&b"ab"[..]));
        assert_eq!(cursor.finish(), Err(Broken::Trailing { left: 1 }));
    }
}
