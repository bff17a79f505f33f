//! Foreign text in messages for people: printable and short, whatever the bytes were.

use std::fmt::Write as _;

/// Characters of a quoted value that are shown.
const SHOWN_CHARS: usize = 64;

/// The bytes between back quotes: control and invisible characters escaped, invalid UTF-8 as
/// U+FFFD, the tail cut. Reads no more of a large value than it shows.
pub(super) fn quote(bytes: &[u8]) -> String {
    // A character has at most four bytes.
    let head = bytes.get(..SHOWN_CHARS * 4).unwrap_or(bytes);
    let text = String::from_utf8_lossy(head);
    let mut chars = text.chars();
    let mut quoted = String::from("`");
    for char in chars.by_ref().take(SHOWN_CHARS) {
        match char {
            '"' | '\'' => quoted.push(char),
            '`' => quoted.push_str("\\`"),
            other => quoted.extend(other.escape_debug()),
        }
    }
    quoted.push('`');
    if head.len() < bytes.len() || chars.next().is_some() {
        // Writing to a String can't fail.
        let written = write!(quoted, "… ({} bytes)", bytes.len());
        debug_assert!(written.is_ok());
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_invisible_characters_are_escaped() {
        assert_eq!(quote(b"a\r\nb\0\x1b[31m"), "`a\\r\\nb\\0\\u{1b}[31m`");
        assert_eq!(quote("x\u{202e}y\u{2028}".as_bytes()), "`x\\u{202e}y\\u{2028}`");
        assert_eq!(quote(b"it's \"`\\"), "`it's \"\\`\\\\`");
        assert_eq!(quote(b"\xff\xfe"), "`\u{fffd}\u{fffd}`");
    }

    #[test]
    fn long_values_are_cut() {
        let quoted = quote(&vec![1; 1 << 20]);
        assert!(quoted.len() < 1000, "{} bytes", quoted.len());
        assert!(quoted.ends_with("… (1048576 bytes)"));
    }
}
