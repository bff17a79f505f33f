//! Where a value came from, and what is wrong with it. Owns the words of the report; finds nothing.

use std::fmt;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The configuration file.
    File {
        /// Path as given.
        path: String,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
    },
    /// The file as a whole: it can't be read, or lacks a section.
    WholeFile(String),
    /// An environment variable.
    Variable(String),
    /// `--set KEY=VALUE`.
    Flag(String),
    /// Not given: the documented default.
    Default,
    /// Not given: made from another key.
    Derived(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { path, line, column } => write!(f, "{path}:{line}:{column}"),
            Origin::WholeFile(path) => f.write_str(path),
            Origin::Variable(name) => f.write_str(name),
            Origin::Flag(key) => write!(f, "--set {key}"),
            Origin::Default => f.write_str("default"),
            Origin::Derived(from) => write!(f, "from {from}"),
        }
    }
}

/// One fault of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where it is.
    pub origin: Origin,
    /// Dotted key, e.g. `relay.memory`; empty for a syntax error.
    pub key: String,
    /// What is wrong; never quotes a secret.
    pub wrong: String,
    /// What would be right; may be empty.
    pub right: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.wrong)?;
        if !self.right.is_empty() {
            write!(f, "\n    right: {}", self.right)?;
        }
        Ok(())
    }
}

/// All faults of a configuration, in the order in which a reader meets them. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("the configuration has a fault")?,
            many => write!(f, "the configuration has {many} faults")?,
        }
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Faults {}

/// Short printable form of what a user wrote: quoted, control characters escaped, cut.
pub(super) fn quote(text: &str) -> String {
    const LONGEST: usize = 60;
    let cut: String = text.chars().take(LONGEST).collect();
    let more = if cut.len() < text.len() { "…" } else { "" };
    format!("{cut:?}{more}")
}

/// The candidate that `word` is probably a slip of.
pub(super) fn near<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(2);
    candidates
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(far, candidate)| *far <= limit && *far < candidate.len())
        .min_by_key(|(far, _)| *far)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance, one row at a time.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut before = i + 1;
        let mut next = vec![before];
        for (right, above) in b.chars().zip(row.iter().skip(1)) {
            before = (diagonal + usize::from(left != right)).min(above + 1).min(before + 1);
            diagonal = *above;
            next.push(before);
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_is_levenshtein() {
        for (a, b, far) in
            [("", "abc", 3), ("name", "nmae", 2), ("memory", "memroy", 2), ("kitten", "sitting", 3)]
        {
            assert_eq!(distance(a, b), far, "{a} {b}");
            assert_eq!(distance(b, a), far, "{b} {a}");
        }
    }

    #[test]
    fn only_a_slip_is_suggested() {
        let keys = || ["memory", "name", "receipt_interval"].into_iter();
        assert_eq!(near("memmory", keys()), Some("memory"));
        assert_eq!(near("reciept_interval", keys()), Some("receipt_interval"));
        assert_eq!(near("zzz", keys()), None);
        assert_eq!(near("x", ["of"].into_iter()), None);
    }
}
