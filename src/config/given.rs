//! What the user gave, from every place, before it means anything: the last place that gives a key
//! wins. Finds unknown keys; reads no value.

use std::collections::BTreeMap;

use super::fault::{Fault, Origin, near, quote};
use super::form::Raw;
use super::keys::{self, Section, Spec};
use super::rules;

/// A table that exists once, or once per destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Scope {
    pub section: Section,
    /// Index of the destination.
    pub destination: Option<usize>,
}

/// A value and where it stands.
#[derive(Debug, Clone)]
pub(super) struct Given {
    pub raw: Raw,
    pub origin: Origin,
}

/// Everything that was given.
#[derive(Debug, Default)]
pub(super) struct All {
    pub values: BTreeMap<(Scope, &'static str), Given>,
    /// Where each table starts, for keys that it lacks.
    pub tables: BTreeMap<Scope, Origin>,
    /// Names in the order of their first mention.
    pub destinations: Vec<String>,
    pub faults: Vec<Fault>,
}

impl All {
    /// Notes a fault.
    pub fn fault(&mut self, origin: Origin, key: &str, wrong: String, right: impl Into<String>) {
        self.faults.push(Fault { origin, key: key.to_owned(), wrong, right: right.into() });
    }

    /// Takes a value over what earlier places gave.
    pub fn put(&mut self, path: &[&str], given: Given) {
        let Some((name, table)) = path.split_last() else { return };
        let key = path.join(".");
        let Some(section) = Section::at(table) else {
            let right = belongs(name).or_else(|| like(&key)).unwrap_or_else(tables);
            return self.fault(given.origin, &key, "unknown key".to_owned(), right);
        };
        let Some(spec) = keys::find(section, name) else {
            let right = sibling(section, &table.join("."), name)
                .or_else(|| belongs(name))
                .unwrap_or_else(|| names(section));
            return self.fault(given.origin, &key, "unknown key".to_owned(), right);
        };
        if let Some(scope) = self.scope(section, table, &given.origin) {
            self.values.insert((scope, spec.name), given);
        }
    }

    /// Takes notice of a table; false if there is none of that path.
    pub fn open(&mut self, path: &[&str], origin: Origin) -> bool {
        let Some(section) = Section::at(path) else { return false };
        if let Some(scope) = self.scope(section, path, &origin) {
            self.tables.entry(scope).or_insert(origin);
        }
        true
    }

    fn scope(&mut self, section: Section, table: &[&str], origin: &Origin) -> Option<Scope> {
        let destination = match table {
            ["destination", name, ..] => Some(self.destination(name, origin)?),
            _ => None,
        };
        Some(Scope { section, destination })
    }

    /// Index of a destination, which a first mention makes. Names are one if their variables are.
    fn destination(&mut self, name: &str, origin: &Origin) -> Option<usize> {
        let same = |other: &String| variable_part(other) == variable_part(name);
        if let Some(at) = self.destinations.iter().position(same) {
            let exact = self.destinations.get(at).is_some_and(|other| other == name);
            let by_variable = matches!(origin, Origin::Variable(_));
            if !exact && !by_variable {
                let wrong = "two destinations' names differ only in case, - or _".to_owned();
                let key = format!("destination.{name}");
                // Told at its table, and not again at each of its keys.
                if !self.faults.iter().any(|fault| fault.key == key && fault.wrong == wrong) {
                    self.fault(origin.clone(), &key, wrong, "names whose variables differ");
                }
                return None;
            }
            return Some(at);
        }
        self.destinations.push(name.to_owned());
        if let Err(wrong) = rules::destination_name(name) {
            let key = format!("destination.{name}");
            self.fault(origin.clone(), &key, wrong, rules::DESTINATION_WORDS);
        }
        Some(self.destinations.len() - 1)
    }
}

/// How a destination's name or a key stands in a variable's name.
pub(super) fn variable_part(name: &str) -> String {
    name.to_ascii_uppercase().replace('-', "_")
}

fn sibling(section: Section, table: &str, name: &str) -> Option<String> {
    near(name, keys::of(section).map(|spec| spec.name)).map(|found| {
        let dot = if table.is_empty() { "" } else { "." };
        format!("did you mean {table}{dot}{found}?")
    })
}

fn belongs(name: &str) -> Option<String> {
    let place = |spec: &&&Spec| spec.name == name;
    keys::ALL.iter().find(place).map(|spec| format!("{name} belongs in [{}]", spec.section.path()))
}

/// A path as a whole that is a slip of one that exists.
fn like(path: &str) -> Option<String> {
    let all: Vec<String> =
        keys::ALL.iter().map(|spec| format!("{}.{}", spec.section.path(), spec.name)).collect();
    near(path, all.iter().map(String::as_str)).map(|found| format!("did you mean {found}?"))
}

fn names(section: Section) -> String {
    let names: Vec<_> = keys::of(section).map(|spec| spec.name).collect();
    format!("one of {}", names.join(", "))
}

/// The tables there are.
pub(super) fn tables() -> String {
    let paths: Vec<_> = Section::ALL.iter().map(|one| format!("[{}]", one.path())).collect();
    format!("one of {}", paths.join(", "))
}

/// The table that `path` is probably a slip of.
pub(super) fn like_table(path: &[&str]) -> String {
    let found = match path {
        ["destination", _, last] => near(last, ["create"].into_iter()),
        ["source", last] => near(last, ["columns"].into_iter()),
        [one] => {
            near(one, ["relay", "source", "destination", "admin", "health", "log"].into_iter())
        }
        _ => None,
    };
    found.map_or_else(tables, |found| format!("did you mean {found}?"))
}

/// Short form of a path that a fault shows; a file's key can hold anything.
pub(super) fn printable(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { quote(word) }
}
