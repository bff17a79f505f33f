//! Text that goes into SQL: identifiers, integer ranges, strings that any database can store. Pure.

use std::fmt::Write as _;

use crate::config::QualifiedName;

/// An identifier, always quoted: no list of key words to keep, no case folding to think of.
pub fn quote_ident(name: &str) -> String {
    let mut quoted = String::with_capacity(name.len() + 2);
    quoted.push('"');
    for character in name.chars() {
        if character == '"' {
            quoted.push('"');
        }
        quoted.push(character);
    }
    quoted.push('"');
    quoted
}

/// A schema-qualified relation, both parts quoted.
pub fn quote_name(name: &QualifiedName) -> String {
    format!("{}.{}", quote_ident(&name.schema), quote_ident(&name.name))
}

/// Inclusive ranges as the text of an `int8multirange`. The server sorts and merges.
pub fn multirange(ranges: &[(i64, i64)]) -> String {
    let parts: Vec<_> = ranges.iter().map(|(first, last)| format!("[{first},{last}]")).collect();
    format!("{{{}}}", parts.join(","))
}

/// Numbers as the text of an `int8[]`.
pub fn array(numbers: impl Iterator<Item = i64>) -> String {
    let mut text = String::from("{");
    for number in numbers {
        if text.len() > 1 {
            text.push(',');
        }
        // Writing to a String can't fail.
        write!(text, "{number}").unwrap_or_default();
    }
    text.push('}');
    text
}

/// The text of an `int8multirange` as inclusive ranges. The server writes it in canonical form,
/// `{[1,5),[7,9)}`; a range without a bound can't stand in the ledger. `None` for anything else.
pub fn parse_multirange(text: &str) -> Option<Vec<(i64, i64)>> {
    let inner = text.strip_prefix('{')?.strip_suffix('}')?;
    if inner.is_empty() {
        return Some(Vec::new());
    }
    let inner = inner.strip_prefix('[')?.strip_suffix(')')?;
    let range = |part: &str| {
        let (first, end) = part.split_once(',')?;
        let (first, end): (i64, i64) = (first.parse().ok()?, end.parse().ok()?);
        (first < end).then(|| (first, end - 1))
    };
    inner.split("),[").map(range).collect()
}

/// A string that a `text` column takes, whatever is in it: NUL can't be stored at all, and outside
/// UTF8 a character that the database's encoding lacks is an error, which would keep a dead letter
/// from being buried for ever.
pub fn storable(text: &str, database_is_utf8: bool) -> String {
    let keep = |c: &char| *c != '\0' && (database_is_utf8 || c.is_ascii());
    if text.chars().all(|c| keep(&c)) {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if keep(&character) {
            out.push(character);
        } else {
            out.extend(character.escape_unicode());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_quoted_whatever_they_hold() {
        assert_eq!(quote_ident("event"), "\"event\"");
        assert_eq!(quote_ident("Mixed Case"), "\"Mixed Case\"");
        assert_eq!(quote_ident("a\"; drop table b; --"), "\"a\"\"; drop table b; --\"");
        let name = QualifiedName { schema: "s.x".into(), name: "t".into() };
        assert_eq!(quote_name(&name), "\"s.x\".\"t\"");
    }

    #[test]
    fn ranges_are_written_inclusive_and_read_canonical() {
        assert_eq!(multirange(&[]), "{}");
        assert_eq!(multirange(&[(1, 4), (7, 7)]), "{[1,4],[7,7]}");
        assert_eq!(parse_multirange("{}"), Some(vec![]));
        assert_eq!(parse_multirange("{[1,5),[7,8)}"), Some(vec![(1, 4), (7, 7)]));
        assert_eq!(parse_multirange("{[-9,-8)}"), Some(vec![(-9, -9)]));
    }

    #[test]
    fn arrays_are_lists_in_braces() {
        assert_eq!(array([].into_iter()), "{}");
        assert_eq!(array([-1, i64::MAX].into_iter()), "{-1,9223372036854775807}");
    }

    #[test]
    fn other_text_is_no_multirange() {
        for text in ["", "{", "{[1,2]}", "{(1,2)}", "{[1,)}", "{[2,2)}", "{[1,2),}", "{[a,b)}"] {
            assert_eq!(parse_multirange(text), None, "{text:?}");
        }
    }

    #[test]
    fn hostile_text_becomes_storable() {
        assert_eq!(storable("plain", false), "plain");
        assert_eq!(storable("größer", true), "größer");
        assert_eq!(storable("größer\0", false), "gr\\u{f6}\\u{df}er\\u{0}");
        assert_eq!(storable("a\0b\r\n", true), "a\\u{0}b\r\n");
    }
}
