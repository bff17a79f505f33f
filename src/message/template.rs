//! Subject templates: their grammar, the escape rule, and the filter that finds what they render.
//!
//! A template is a subject with `{column}` in it. A value becomes exactly one token: ASCII letters,
//! digits, `-` and `_` stay, every other byte of its UTF-8 form becomes `%` and two upper-case
//! hexadecimal digits. `{kind}` alone keeps its dots (`order.created` in `events.{kind}` is
//! `events.order.created`), which is why it must stand at the template's end; a kind with an empty
//! part (`.a`, `a..b`, `b.`) has its dots escaped like any other byte. [`unescape`] takes the rule
//! back, so different values never give the same subject.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;

use crate::event::{Event, Fault, Reason};

/// Longest subject that is sent. A server reads subject and reply subject in one control line of
/// 4,096 bytes by default; this leaves room for the reply and for consumers' own prefixes.
pub const MAX_SUBJECT_BYTES: usize = 1_024;

/// A parsed subject template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Column(Column),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Kind,
    Run,
    Tenant,
    Version,
    Id,
    Seq,
}

impl Column {
    const ALL: [(&'static str, Column); 6] = [
        ("kind", Column::Kind),
        ("run_id", Column::Run),
        ("tenant", Column::Tenant),
        ("version", Column::Version),
        ("id", Column::Id),
        ("seq", Column::Seq),
    ];

    fn name(self) -> &'static str {
        Column::ALL.iter().find(|(_, column)| *column == self).map_or("", |(name, _)| name)
    }
}

/// What is wrong with a template, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at byte {offset}: {message}")]
pub struct TemplateError {
    /// Byte in the template's text.
    pub offset: usize,
    /// What was expected.
    pub message: String,
}

fn error<T>(offset: usize, message: impl Into<String>) -> Result<T, TemplateError> {
    Err(TemplateError { offset, message: message.into() })
}

impl Template {
    /// Reads a template such as `events.{kind}`.
    pub fn parse(text: &str) -> Result<Template, TemplateError> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut chars = text.char_indices();
        while let Some((offset, char)) = chars.next() {
            match char {
                '{' => {
                    let rest = text.get(offset + 1..).unwrap_or_default();
                    let Some((name, _)) = rest.split_once('}') else {
                        return error(offset, "`{` without `}`");
                    };
                    let Some((_, column)) = Column::ALL.iter().find(|(known, _)| *known == name)
                    else {
                        let known = Column::ALL.map(|(name, _)| format!("{{{name}}}")).join(", ");
                        return error(offset, format!("no column `{{{name}}}`; there are {known}"));
                    };
                    if !literal.is_empty() {
                        parts.push(Part::Literal(std::mem::take(&mut literal)));
                    }
                    parts.push(Part::Column(*column));
                    // The name and its closing brace are one byte per character.
                    for _ in 0..=name.len() {
                        chars.next();
                    }
                }
                '}' => return error(offset, "`}` without `{`"),
                '*' | '>' => return error(offset, format!("`{char}` is a wildcard")),
                _ if char.is_whitespace() || char.is_control() => {
                    return error(offset, "a subject has no blanks or control characters");
                }
                _ => literal.push(char),
            }
        }
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        check_tokens(text)?;
        check_kind_is_last(text, &parts)?;
        Ok(Template { text: text.to_owned(), parts })
    }

    /// The subject of an event.
    pub fn render(&self, event: &Event) -> Result<String, Fault> {
        let mut subject = String::with_capacity(self.text.len() + 32);
        self.render_onto(&mut subject, event)?;
        Ok(subject)
    }

    /// The same at the end of what is there already.
    pub(super) fn render_onto(&self, subject: &mut String, event: &Event) -> Result<(), Fault> {
        let from = subject.len();
        for part in &self.parts {
            match part {
                Part::Literal(text) => subject.push_str(text),
                Part::Column(column) => {
                    let before = subject.len();
                    append(subject, *column, event);
                    if subject.len() == before {
                        let detail = format!(
                            "column `{}` is empty or NULL, and subject `{}` needs it",
                            column.name(),
                            self.text
                        );
                        return Err(Fault::new(Reason::Subject, detail));
                    }
                }
            }
        }
        let bytes = subject.len() - from;
        if bytes > MAX_SUBJECT_BYTES {
            let detail =
                format!("the subject would have {bytes} bytes, more than {MAX_SUBJECT_BYTES}");
            return Err(Fault::new(Reason::Subject, detail));
        }
        Ok(())
    }

    /// The filter that matches every subject this template can give: a token with a column in it
    /// is `*`, the last one with `{kind}` is `>`.
    pub fn filter_subject(&self) -> String {
        let mut tokens = Vec::new();
        for token in self.text.split('.') {
            tokens.push(match token {
                _ if token.contains("{kind}") => ">",
                _ if token.contains('{') => "*",
                _ => token,
            });
        }
        tokens.join(".")
    }

    /// A subject of this template with `word` in every column's place, as its kind or value.
    pub fn sample(&self, word: &str) -> String {
        let mut subject = String::new();
        for part in &self.parts {
            match part {
                Part::Literal(text) => subject.push_str(text),
                Part::Column(column) => {
                    let word = word.as_bytes();
                    let keep_dots = *column == Column::Kind && has_only_full_parts(word);
                    escape(&mut subject, word, keep_dots);
                }
            }
        }
        subject
    }
}

fn check_tokens(text: &str) -> Result<(), TemplateError> {
    let mut offset = 0;
    for token in text.split('.') {
        if token.is_empty() {
            return error(offset, "a token between dots must not be empty");
        }
        offset += token.len() + 1;
    }
    // Publishing there would be a request to the server itself.
    if text.starts_with("$JS.") || text.starts_with("$SYS.") {
        return error(0, "`$JS` and `$SYS` belong to the server");
    }
    Ok(())
}

fn check_kind_is_last(text: &str, parts: &[Part]) -> Result<(), TemplateError> {
    let before_last = parts.len().saturating_sub(1);
    if parts.iter().take(before_last).any(|part| *part == Part::Column(Column::Kind)) {
        let offset = text.find("{kind}").unwrap_or(0);
        return error(
            offset,
            "`{kind}` can have several tokens, so it must be the last of the subject",
        );
    }
    Ok(())
}

fn append(subject: &mut String, column: Column, event: &Event) {
    match column {
        Column::Kind => escape(subject, &event.kind, has_only_full_parts(&event.kind)),
        Column::Run => escape(subject, event.run.as_deref().unwrap_or_default(), false),
        Column::Tenant => escape(subject, event.tenant.as_deref().unwrap_or_default(), false),
        Column::Version => {
            if let Some(version) = event.version {
                escape(subject, version.to_string().as_bytes(), false);
            }
        }
        Column::Id => escape(subject, event.id.to_string().as_bytes(), false),
        Column::Seq => escape(subject, event.seq.to_string().as_bytes(), false),
    }
}

fn has_only_full_parts(kind: &[u8]) -> bool {
    kind.split(|byte| *byte == b'.').all(|part| !part.is_empty())
}

fn escape(subject: &mut String, value: &[u8], keep_dots: bool) {
    let stays = |byte: &u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') || (keep_dots && *byte == b'.')
    };
    if value.iter().all(stays) {
        // ASCII, so it is text.
        subject.push_str(str::from_utf8(value).unwrap_or_default());
        return;
    }
    for byte in value {
        if stays(byte) {
            subject.push(char::from(*byte));
        } else {
            // Writing to a String never fails.
            write!(subject, "%{byte:02X}").unwrap_or_default();
        }
    }
}

/// Takes the escape rule back: the value of a column from its token (or tokens, for `{kind}`).
/// `None` when the text was not made by the rule.
pub fn unescape(token: &str) -> Option<String> {
    let mut value = Vec::with_capacity(token.len());
    let mut bytes = token.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let digits = [bytes.next()?, bytes.next()?];
                let digits = std::str::from_utf8(&digits).ok()?;
                value.push(u8::from_str_radix(digits, 16).ok()?);
            }
            _ => value.push(byte),
        }
    }
    String::from_utf8(value).ok()
}

impl FromStr for Template {
    type Err = TemplateError;

    fn from_str(text: &str) -> Result<Template, TemplateError> {
        Template::parse(text)
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Default for Template {
    /// `events.{kind}`
    fn default() -> Template {
        Template {
            text: "events.{kind}".to_owned(),
            parts: vec![Part::Literal("events.".to_owned()), Part::Column(Column::Kind)],
        }
    }
}
