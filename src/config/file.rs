//! The file: TOML with the place of every key. Finds syntax errors; reads no value.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::fault::{Fault, Faults, Origin};
use super::form::Raw;
use super::given::{self, All, Given, printable};

/// Takes what the text gives. Syntax errors end it: what follows one means little.
pub(super) fn read(path: &str, text: &str, all: &mut All) -> Result<(), Faults> {
    let places = Places { path, text };
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        walk(&places, &mut Vec::new(), table.get_ref(), all);
        return Ok(());
    }
    let fault = |error: toml::de::Error| Fault {
        origin: error.span().map_or(Origin::WholeFile(path.to_owned()), |at| places.at(at)),
        key: String::new(),
        wrong: format!("not TOML: {}", error.message().replace('\n', ", ")),
        right: String::new(),
    };
    Err(Faults(errors.into_iter().map(fault).collect()))
}

struct Places<'a> {
    path: &'a str,
    text: &'a str,
}

impl Places<'_> {
    fn at(&self, span: Range<usize>) -> Origin {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Origin::File {
            path: self.path.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before.get(line_start..).unwrap_or_default().chars().count() + 1,
        }
    }
}

fn walk<'t>(places: &Places<'_>, path: &mut Vec<&'t str>, table: &'t DeTable<'_>, all: &mut All) {
    // The parser sorts by name; a reader goes from top to bottom.
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in entries {
        path.push(key.get_ref());
        let shown = path.iter().map(|word| printable(word)).collect::<Vec<_>>().join(".");
        if let DeValue::Table(inner) = value.get_ref() {
            let origin = places.at(key.span());
            if path.as_slice() == ["destination"] || all.open(path, origin.clone()) {
                walk(places, path, inner, all);
            } else {
                all.fault(origin, &shown, "unknown table".to_owned(), given::like_table(path));
            }
        } else if path.as_slice() == ["destination"] || super::keys::Section::at(path).is_some() {
            let name = if path.len() == 1 && shown == "destination" { ".NAME" } else { "" };
            let right = format!("a table: [{shown}{name}]");
            all.fault(places.at(key.span()), &shown, "is not a table".to_owned(), right);
        } else {
            let table = path.split_last().map_or(&[][..], |(_, table)| table);
            let known = super::keys::Section::at(table)
                .is_some_and(|section| super::keys::find(section, key.get_ref()).is_some());
            // What is wrong with a known key is its value.
            let span = if known { value.span() } else { key.span() };
            all.put(path, Given { raw: raw(value.get_ref()), origin: places.at(span) });
        }
        path.pop();
    }
}

fn raw(value: &DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or(Raw::Other("a number that is too large"), Raw::Integer),
        DeValue::Boolean(on) => Raw::Switch(*on),
        DeValue::Array(items) => {
            let text = |item: &DeValue<'_>| match raw(item) {
                Raw::Text(text) => Some(text),
                Raw::Integer(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => None,
            };
            let items: Option<Vec<_>> = items.iter().map(|item| text(item.get_ref())).collect();
            items.map_or(Raw::Other("a list of other things than text"), Raw::List)
        }
        DeValue::Float(_) => Raw::Other("a number with a fraction"),
        DeValue::Datetime(_) => Raw::Other("a date"),
        DeValue::Table(_) => Raw::Other("a table"),
    }
}
