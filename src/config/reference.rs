//! The table of keys for people: docs/configuration.md's table and the sample file.

use super::keys::{self, Absent, Section, Spec};

/// The reference as Markdown: one table per section.
pub fn markdown() -> String {
    let mut text = String::new();
    for section in Section::ALL.iter().copied() {
        let gap = if text.is_empty() { "" } else { "\n" };
        text.push_str(&format!("{gap}### `[{}]`\n\n{}\n\n", section.path(), section.doc()));
        text.push_str("| key | value | default | |\n|---|---|---|---|\n");
        for spec in keys::of(section) {
            let words = (spec.words)().replace('|', "\\|");
            let absent = match spec.absent {
                Absent::Required => "**required**".to_owned(),
                Absent::Default(value) => format!("`{value}`"),
                Absent::Derived(how) | Absent::Nothing(how) => how.to_owned(),
            };
            text.push_str(&format!("| `{}` | {words} | {absent} | {} |\n", spec.name, spec.doc));
        }
    }
    text
}

/// A file to start from: what must be set is set, everything else is there as a comment.
pub fn sample() -> String {
    let mut text = String::from(
        "# outboxd configuration. Lines that are commented out show the defaults, or an example.\n\
         # Every key is also a variable, e.g. OUTBOXD_RELAY__NAME; variables go over this file.\n",
    );
    for section in Section::ALL.iter().copied() {
        let heading = format!("[{}]", section.path().replace("NAME", "events"));
        let needed = keys::of(section).any(|spec| spec.absent == Absent::Required);
        let mark = if needed { "" } else { "# " };
        text.push_str(&format!("\n# {}\n{mark}{heading}\n", section.doc()));
        for spec in keys::of(section) {
            let mark = if spec.absent == Absent::Required { "" } else { "# " };
            text.push_str(&format!("{mark}{} = {}\n", spec.name, value(spec)));
        }
    }
    text
}

fn value(spec: &Spec) -> String {
    match spec.absent {
        Absent::Default(text) if matches!(text, "true" | "false") => text.to_owned(),
        Absent::Default(text) if text.bytes().all(|b| b.is_ascii_digit()) => text.to_owned(),
        Absent::Default(text) => format!("{text:?}"),
        Absent::Required | Absent::Derived(_) | Absent::Nothing(_) => spec.example.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_sample_is_a_valid_configuration() {
        let config = Config::parse("sample", &sample()).unwrap();
        assert_eq!(config.relay.name, "orders");
    }

    #[test]
    fn every_line_of_the_sample_is_valid() {
        // One login and the rest: a sample with every key set at once would be contradictory.
        let others = ["# nkey_file", "# user", "# password_file", "# token_file"];
        let uncommented: Vec<String> = sample()
            .lines()
            .filter(|line| !others.iter().any(|other| line.starts_with(other)))
            .map(|line| match line.strip_prefix("# ") {
                Some(code) if code.contains(" = ") || code.starts_with('[') => code.to_owned(),
                Some(_) | None => line.to_owned(),
            })
            .collect();
        let config = Config::parse("sample", &uncommented.join("\n")).unwrap();
        assert_eq!(config.destinations.len(), 1);
        assert!(config.destinations[0].create.max_age.is_some());
    }
}
