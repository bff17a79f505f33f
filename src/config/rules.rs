//! What single values must obey beyond their form. Pure.

use super::fault::quote;
use super::form::Text;
use crate::message::Template;

/// A name of a PostgreSQL object.
pub(super) const IDENTIFIER: Text = Text("a name of 1 to 63 bytes, without quotes", identifier);

/// A replication slot.
pub(super) const SLOT: Text = Text("1 to 63 of a-z, 0-9 and _", |text| {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_'))
});

/// A relay.
pub(super) const NAME: Text = Text("1 to 63 letters, digits, - _ or .", |text| {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
});

/// A JetStream stream.
pub(super) const STREAM: Text = Text("a stream's name: no spaces and none of . * > / \\", |text| {
    text.len() <= 255
        && !text.contains(['.', '*', '>', '/', '\\'])
        && !text.contains(|c: char| c.is_whitespace() || c.is_control())
});

/// The start of inbox subjects, or a JetStream domain: whole tokens without wildcards.
pub(super) const TOKENS: Text = Text("a subject without wildcards", |text| {
    text.len() <= 128
        && !text.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '*' | '>'))
        && text.split('.').all(|token| !token.is_empty())
});

/// A JetStream domain.
pub(super) const DOMAIN: Text = Text("one word: no spaces and none of . * >", |text| {
    text.len() <= 128
        && !text
            .contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '.' | '*' | '>'))
});

/// A user's name.
pub(super) const USER: Text =
    Text("a user's name", |text| text.len() <= 255 && !text.contains(char::is_control));

/// Is it a PostgreSQL identifier that survives quoting?
pub(super) fn identifier(text: &str) -> bool {
    (1..=63).contains(&text.len()) && !text.contains(|c: char| c.is_control() || c == '"')
}

/// Can a destination be called so, and be told from its variables' names?
pub(super) fn destination_name(text: &str) -> Result<(), String> {
    let good = (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        && !text.starts_with(['-', '_'])
        && !text.ends_with(['-', '_'])
        && !text.contains("__");
    good.then_some(()).ok_or_else(|| format!("{} can't name a destination", quote(text)))
}

/// Right names of destinations.
pub(super) const DESTINATION_WORDS: &str =
    "1 to 63 letters, digits, - and _, a letter or digit at both ends, no __";

/// A NATS server without credentials.
pub(super) fn server(text: &str) -> Result<(), String> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("nats", text));
    // The text is quoted only after it is known to hold no password.
    if rest.contains('@') {
        return Err("holds credentials: use user and password_file, or token_file".to_owned());
    }
    if !matches!(scheme, "nats" | "tls") {
        return Err(format!("{} is neither nats:// nor tls://", quote(text)));
    }
    let (host, port) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':').unwrap_or("?"))),
        None => rest.split_once(':').map_or((rest, None), |(host, port)| (host, Some(port))),
    };
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '/' | '?' | '#');
    if host.is_empty() || !host.chars().all(plain) {
        return Err(format!("{} has no host", quote(text)));
    }
    if port.is_some_and(|port| !port.parse::<u16>().is_ok_and(|port| port > 0)) {
        return Err(format!("{} has no valid port", quote(text)));
    }
    Ok(())
}

/// A pattern of a filter.
pub(super) fn pattern(text: &str) -> Result<(), String> {
    let bad = text.contains(char::is_control);
    if bad { Err(format!("{} holds a control character", quote(text))) } else { Ok(()) }
}

/// A subject template.
pub(super) fn template(text: &str) -> Result<Template, String> {
    Template::parse(text).map_err(|error| format!("{} {error}", quote(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::form::{Form, Raw};

    #[test]
    fn servers() {
        for good in
            ["nats://localhost:4222", "tls://nats.example", "127.0.0.1:4222", "nats://[::1]:4222"]
        {
            assert_eq!(server(good), Ok(()), "{good}");
        }
        for bad in ["http://x", "nats://", "nats://h:0", "nats://h:99999", "nats://h:x", "a b"] {
            assert!(server(bad).is_err(), "{bad:?} was accepted");
        }
        let wrong = server("nats://me:hunter2@host").unwrap_err();
        assert!(!wrong.contains("hunter2"), "{wrong}");
    }

    #[test]
    fn names() {
        let read = |form: &Text, text: &str| form.read(&Raw::Text(text.to_owned())).is_ok();
        assert!(read(&NAME, "orders.eu-1_a") && !read(&NAME, "a b") && !read(&NAME, ""));
        assert!(read(&SLOT, "outboxd_a1") && !read(&SLOT, "Outboxd") && !read(&SLOT, "a-b"));
        assert!(read(&STREAM, "EVENTS") && !read(&STREAM, "A.B") && !read(&STREAM, "A B"));
        assert!(read(&TOKENS, "_INBOX.a") && !read(&TOKENS, "a..b") && !read(&TOKENS, "a.>"));
        assert!(destination_name("a-b_c").is_ok());
        for bad in ["", "_a", "a_", "a__b", "a.b", "ä"] {
            assert!(destination_name(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
