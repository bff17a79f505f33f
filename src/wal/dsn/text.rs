//! Percent-encoding of URLs, and the quoting of keyword strings and password files. Pure text.

use super::DsnError;

/// Decodes `%XX`. Refuses a malformed escape, NUL, and what is not UTF-8.
pub(super) fn percent_decode(text: &str) -> Result<String, DsnError> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| byte.and_then(|b| char::from(b).to_digit(16));
        let value = digit(bytes.next()).zip(digit(bytes.next())).map(|(high, low)| high * 16 + low);
        match value.and_then(|value| u8::try_from(value).ok()) {
            Some(0) => return Err(DsnError::whole("%00 stands for a NUL byte, which is refused")),
            Some(value) => decoded.push(value),
            None => {
                return Err(DsnError::whole(
                    "a `%` is not followed by two hexadecimal digits (write a literal `%` as %25)",
                ));
            }
        }
    }
    String::from_utf8(decoded)
        .map_err(|_| DsnError::whole("percent-encoded bytes are not valid UTF-8"))
}

/// Splits off the next `keyword = value` of a keyword string. `None` when only blanks are left.
pub(super) fn next_keyword(text: &str) -> Result<Option<(&str, String, &str)>, DsnError> {
    let text = text.trim_start();
    if text.is_empty() {
        return Ok(None);
    }
    let Some((keyword, value)) = text.split_once('=') else {
        return Err(DsnError::whole(
            "expected a postgres:// URL or `keyword=value` pairs: a `=` is missing",
        ));
    };
    let keyword = keyword.trim_end();
    if keyword.is_empty() || keyword.contains(char::is_whitespace) {
        return Err(DsnError::whole(
            "expected `keyword=value` pairs: a `=` has not exactly one word in front of it \
             (a value with blanks stands in single quotes)",
        ));
    }
    let value = value.trim_start();
    let (value, rest) = match value.strip_prefix('\'') {
        Some(quoted) => unquote(quoted, Some('\'')),
        None => unquote(value, None),
    }
    .ok_or_else(|| DsnError::of(keyword, "the quoted value has no closing quote"))?;
    if value.contains('\0') {
        return Err(DsnError::of(keyword, "the value holds a NUL byte"));
    }
    Ok(Some((keyword, value, rest)))
}

/// Reads a value up to its closing quote, or up to a blank; a backslash takes the next character
/// as it is.
fn unquote(text: &str, quote: Option<char>) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.chars();
    loop {
        let before = chars.as_str();
        match (chars.next(), quote) {
            (None, None) => return Some((value, "")),
            (None, Some(_)) => return None,
            (Some('\\'), _) => value.extend(chars.next()),
            (Some(c), Some(quote)) if c == quote => return Some((value, chars.as_str())),
            (Some(c), None) if c.is_whitespace() => return Some((value, before)),
            (Some(c), _) => value.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_escapes() {
        assert_eq!(percent_decode("a%20b%2Fc%c3%a4"), Ok("a b/cä".to_owned()));
        for bad in ["%", "%4", "%zz", "%00", "%ff", "a%+1"] {
            assert!(percent_decode(bad).is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn keyword_values_with_quotes_and_escapes() {
        let read = |text: &'static str| next_keyword(text);
        assert_eq!(read("  "), Ok(None));
        assert_eq!(read("host = db1 port=1"), Ok(Some(("host", "db1".into(), " port=1"))));
        assert_eq!(read(r"p='a \'b\\' x=1"), Ok(Some(("p", r"a 'b\".into(), " x=1"))));
        assert_eq!(read(r"p=a\ b\'c"), Ok(Some(("p", "a b'c".into(), ""))));
        assert_eq!(read("p='' x=1"), Ok(Some(("p", String::new(), " x=1"))));
        assert!(read("p='open").is_err());
        assert!(read("just words").is_err());
        assert!(read("two words=1").is_err());
        assert!(read("=1").is_err());
    }
}
