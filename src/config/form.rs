//! Forms a value can have: how each is read, and the words that describe it in faults and in the
//! reference. Pure.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

use super::fault::quote;
use super::{QualifiedName, units};
use crate::message::Template;

/// A value as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Raw {
    /// A string of the file, or what a variable or flag holds.
    Text(String),
    /// An integer of the file.
    Integer(i64),
    /// `true` or `false` of the file.
    Switch(bool),
    /// A list of strings of the file.
    List(Vec<String>),
    /// Something that no key takes: its name, e.g. `a date`.
    Other(&'static str),
}

impl Raw {
    /// What it is, for a fault: never the value.
    fn what(&self) -> &'static str {
        match self {
            Raw::Text(_) => "text",
            Raw::Integer(_) => "a number",
            Raw::Switch(_) => "true or false",
            Raw::List(_) => "a list",
            Raw::Other(what) => what,
        }
    }

    fn text(&self) -> Result<&str, String> {
        match self {
            Raw::Text(text) => Ok(text),
            Raw::Integer(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => {
                Err(format!("is {}", self.what()))
            }
        }
    }

    /// The value in TOML's notation.
    pub(super) fn toml(&self) -> String {
        let quoted = |text: &String| toml::Value::String(text.clone()).to_string();
        match self {
            Raw::Text(text) => quoted(text),
            Raw::Integer(number) => number.to_string(),
            Raw::Switch(on) => on.to_string(),
            Raw::List(items) => {
                format!("[{}]", items.iter().map(quoted).collect::<Vec<_>>().join(", "))
            }
            Raw::Other(_) => String::new(),
        }
    }
}

/// One form.
pub trait Form<T>: Sync {
    /// What would be right, e.g. `a duration from 1s to 10m`.
    fn words(&self) -> String;
    /// The value, or what is wrong with it in words that follow the key.
    fn read(&self, raw: &Raw) -> Result<T, String>;
    /// The variable that is to blame for what is wrong, and the words that follow its name, when a
    /// value takes in variables that are no keys.
    fn blame(&self, _raw: &Raw) -> Option<(String, String)> {
        None
    }
    /// The value as a file would have it: variables, flags and defaults are text alone.
    fn typed(&self, raw: &Raw) -> Raw {
        raw.clone()
    }
}

/// A number where text reads as one.
fn typed_number(raw: &Raw) -> Raw {
    match raw {
        Raw::Text(text) => text.parse().map_or_else(|_| raw.clone(), Raw::Integer),
        Raw::Integer(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => raw.clone(),
    }
}

/// A switch where text reads as one.
fn typed_switch(raw: &Raw) -> Raw {
    match raw {
        Raw::Text(text) => text.parse().map_or_else(|_| raw.clone(), Raw::Switch),
        Raw::Integer(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => raw.clone(),
    }
}

/// The items of text that is separated by commas.
fn typed_list(raw: &Raw) -> Raw {
    match raw {
        Raw::Text(text) => Raw::List(text.split(',').map(|item| item.trim().to_owned()).collect()),
        Raw::Integer(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => raw.clone(),
    }
}

/// A duration in a range.
pub struct Lasting(pub &'static str, pub &'static str);

impl Form<Duration> for Lasting {
    fn words(&self) -> String {
        format!("a duration from {} to {}", self.0, self.1)
    }
    fn read(&self, raw: &Raw) -> Result<Duration, String> {
        let text = match raw {
            Raw::Integer(number) => return Err(format!("{number} has no unit")),
            Raw::Text(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => raw.text()?,
        };
        let value = units::duration(text)?;
        within(value, text, units::duration(self.0)?, self.0, units::duration(self.1)?, self.1)
    }
}

/// How long something is kept: a duration in a range, or for ever.
pub struct Kept(pub &'static str, pub &'static str);

impl Form<Option<Duration>> for Kept {
    fn words(&self) -> String {
        format!("a duration from {} to {}, or \"forever\"", self.0, self.1)
    }
    fn read(&self, raw: &Raw) -> Result<Option<Duration>, String> {
        match raw {
            Raw::Text(text) if text == "forever" => Ok(None),
            Raw::Text(_) | Raw::Integer(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => {
                Lasting(self.0, self.1).read(raw).map(Some)
            }
        }
    }
}

/// A number of bytes in a range.
pub struct Size(pub &'static str, pub &'static str);

impl Form<u64> for Size {
    fn words(&self) -> String {
        format!("a size from {} to {}", self.0, self.1)
    }
    fn read(&self, raw: &Raw) -> Result<u64, String> {
        let text = match raw {
            Raw::Integer(number) => number.to_string(),
            Raw::Text(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => raw.text()?.to_owned(),
        };
        let value = units::size(&text)?;
        within(value, &text, units::size(self.0)?, self.0, units::size(self.1)?, self.1)
    }
}

/// A whole number in a range.
pub struct Count(pub u32, pub u32);

impl Form<u32> for Count {
    fn words(&self) -> String {
        format!("a whole number from {} to {}", self.0, self.1)
    }
    fn read(&self, raw: &Raw) -> Result<u32, String> {
        let text = match raw {
            Raw::Integer(number) => number.to_string(),
            Raw::Text(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => raw.text()?.to_owned(),
        };
        let value: i128 =
            text.parse().map_err(|_| format!("{} is not a whole number", quote(&text)))?;
        let (least, most) = (self.0, self.1);
        let value = within(
            value,
            &text,
            i128::from(least),
            &least.to_string(),
            i128::from(most),
            &most.to_string(),
        )?;
        u32::try_from(value).map_err(|_| format!("{value} is above {most}"))
    }
    fn typed(&self, raw: &Raw) -> Raw {
        typed_number(raw)
    }
}

fn within<T: PartialOrd>(
    value: T,
    text: &str,
    least: T,
    least_text: &str,
    most: T,
    most_text: &str,
) -> Result<T, String> {
    if value < least {
        Err(format!("{} is below {least_text}", quote(text)))
    } else if value > most {
        Err(format!("{} is above {most_text}", quote(text)))
    } else {
        Ok(value)
    }
}

/// `true` or `false`.
pub struct Switch;

impl Form<bool> for Switch {
    fn words(&self) -> String {
        "true or false".to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<bool, String> {
        match raw {
            Raw::Switch(on) => Ok(*on),
            Raw::Text(text) => {
                text.parse().map_err(|_| format!("{} is neither true nor false", quote(text)))
            }
            Raw::Integer(_) | Raw::List(_) | Raw::Other(_) => Err(format!("is {}", raw.what())),
        }
    }
    fn typed(&self, raw: &Raw) -> Raw {
        typed_switch(raw)
    }
}

/// One of a few words.
pub struct Choice<T: 'static>(pub &'static [(&'static str, T)]);

impl<T: Copy + Sync> Form<T> for Choice<T> {
    fn words(&self) -> String {
        let words: Vec<_> = self.0.iter().map(|(word, _)| format!("{word:?}")).collect();
        words.join(" or ")
    }
    fn read(&self, raw: &Raw) -> Result<T, String> {
        let text = raw.text()?;
        let found = self.0.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| *value).ok_or_else(|| format!("{} is unknown", quote(text)))
    }
}

/// Text that a rule accepts.
pub struct Text(pub &'static str, pub fn(&str) -> bool);

impl Form<String> for Text {
    fn words(&self) -> String {
        self.0.to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<String, String> {
        let text = raw.text()?;
        if (self.1)(text) {
            Ok(text.to_owned())
        } else {
            Err(format!("{} is not allowed", quote(text)))
        }
    }
}

/// The name of a column, or `false`.
pub struct Column;

impl Form<Option<String>> for Column {
    fn words(&self) -> String {
        "a column's name, or false when the table has none".to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<Option<String>, String> {
        match raw {
            Raw::Switch(false) => Ok(None),
            Raw::Text(text) if text == "false" => Ok(None),
            Raw::Text(_) | Raw::Integer(_) | Raw::Switch(true) | Raw::List(_) | Raw::Other(_) => {
                super::rules::IDENTIFIER.read(raw).map(Some)
            }
        }
    }
    fn typed(&self, raw: &Raw) -> Raw {
        if matches!(raw, Raw::Text(text) if text == "false") {
            Raw::Switch(false)
        } else {
            raw.clone()
        }
    }
}

/// `schema.name`.
pub struct Relation;

impl Form<QualifiedName> for Relation {
    fn words(&self) -> String {
        "schema.table, without quotes and in the catalog's case".to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<QualifiedName, String> {
        let text = raw.text()?;
        let whole = |part: &str| super::rules::identifier(part) && !part.contains('.');
        match text.split_once('.') {
            Some((schema, name)) if whole(schema) && whole(name) => {
                Ok(QualifiedName { schema: schema.to_owned(), name: name.to_owned() })
            }
            Some(_) | None => Err(format!("{} is not a schema and a table", quote(text))),
        }
    }
}

/// Texts that a rule accepts; in variables and flags they are separated by commas.
pub struct List(pub &'static str, pub fn(&str) -> Result<(), String>);

impl Form<Vec<String>> for List {
    fn words(&self) -> String {
        self.0.to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<Vec<String>, String> {
        let Raw::List(items) = typed_list(raw) else {
            return Err(format!("is {}", raw.what()));
        };
        for (at, item) in items.iter().enumerate() {
            let number = at + 1;
            if item.trim().is_empty() {
                return Err(format!("item {number} is blank"));
            }
            (self.1)(item).map_err(|wrong| format!("item {number}: {wrong}"))?;
        }
        Ok(items)
    }
    fn typed(&self, raw: &Raw) -> Raw {
        typed_list(raw)
    }
}

/// A path; whether the file is there is looked at when it is needed.
pub struct File;

impl Form<PathBuf> for File {
    fn words(&self) -> String {
        "a path; a relative one starts at the working directory".to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<PathBuf, String> {
        raw.text().map(PathBuf::from)
    }
}

/// An address to listen on, or `off`.
pub struct Listen;

impl Form<Option<SocketAddr>> for Listen {
    fn words(&self) -> String {
        "an address and port such as 127.0.0.1:7790 or [::]:7790, or \"off\"".to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<Option<SocketAddr>, String> {
        match raw.text()? {
            "off" => Ok(None),
            text => text
                .parse()
                .map(Some)
                .map_err(|_| format!("{} is not an IP address with a port", quote(text))),
        }
    }
}

/// A filter of log lines.
pub struct Levels;

impl Form<String> for Levels {
    fn words(&self) -> String {
        "error, warn, info, debug or trace, or a filter such as \"info,outboxd::publish=debug\""
            .to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<String, String> {
        let text = raw.text()?;
        crate::logging::filter(text).map_err(|wrong| format!("{}: {wrong}", quote(text)))?;
        Ok(text.to_owned())
    }
}

/// A subject template.
pub struct Subject;

impl Form<Template> for Subject {
    fn words(&self) -> String {
        "a subject with placeholders {kind}, {run_id}, {tenant}, {version}, {id}, {seq}, \
         such as events.{kind}"
            .to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<Template, String> {
        super::rules::template(raw.text()?)
    }
}

/// A connection string, with the process's `PG*` variables: a secret, so no fault quotes it.
pub struct Dsn;

impl Form<SecretString> for Dsn {
    fn words(&self) -> String {
        "a libpq URL such as postgres://outboxd@db.example/app, or keywords such as \
         `host=/run/postgresql user=outboxd dbname=app`"
            .to_owned()
    }
    fn read(&self, raw: &Raw) -> Result<SecretString, String> {
        let text = raw.text()?;
        crate::wal::check_dsn(text).map_err(|error| error.to_string())?;
        Ok(SecretString::from(text.to_owned()))
    }
    fn blame(&self, raw: &Raw) -> Option<(String, String)> {
        let error = crate::wal::check_dsn(raw.text().ok()?).err()?;
        error.variable().map(|variable| (variable.to_owned(), error.message.clone()))
    }
}
