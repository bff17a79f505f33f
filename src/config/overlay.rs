//! Environment and `--set`: what they give goes over the file. Reads no value.

use std::ffi::OsString;

use super::fault::{Origin, near};
use super::form::Raw;
use super::given::{All, Given, variable_part};
use super::keys::{self, Section};

const PREFIX: &str = "OUTBOXD_";

/// Variables that are not keys; the last two name the servers of `outboxd demo` and the tests.
const OTHERS: &[&str] = &["OUTBOXD_CONFIG", "OUTBOXD_PG_BIN", "OUTBOXD_NATS_SERVER"];

/// Takes every `OUTBOXD_<SECTION>__<KEY>`; any other variable with the prefix is a fault.
pub(super) fn environment(variables: &[(OsString, OsString)], all: &mut All) {
    let mut ours: Vec<_> = variables
        .iter()
        .filter_map(|(name, value)| Some((name.to_str()?, value)))
        .filter(|(name, _)| name.starts_with(PREFIX) && !foreign(name))
        .collect();
    ours.sort_unstable();
    for (name, value) in ours {
        let origin = Origin::Variable(name.to_owned());
        let Some(text) = value.to_str() else {
            all.fault(origin, "", "is not UTF-8".to_owned(), "");
            continue;
        };
        let words = name.trim_start_matches(PREFIX).to_ascii_lowercase();
        let path: Vec<&str> = words.split("__").collect();
        let known = path
            .split_last()
            .and_then(|(key, table)| Some((key, Section::at(table)?)))
            .is_some_and(|(key, section)| keys::find(section, key).is_some());
        if known {
            all.put(&path, Given { raw: Raw::Text(text.to_owned()), origin });
        } else {
            let right = similar(name, &path);
            all.fault(origin, "", "unknown variable".to_owned(), right);
        }
    }
}

/// Starts of names that others set: Kubernetes does so for every service of a namespace, and one may
/// be called `outboxd`; the last ones are of our own tests, which start the program.
const FOREIGN: &[&str] = &["OUTBOXD_PORT_", "OUTBOXD_SERVICE_", "OUTBOXD_TEST_", "OUTBOXD_SIM_"];

fn foreign(name: &str) -> bool {
    OTHERS.contains(&name)
        || name == "OUTBOXD_PORT"
        || FOREIGN.iter().any(|start| name.starts_with(start))
}

/// The variable that was probably meant.
fn similar(name: &str, path: &[&str]) -> String {
    let destination = match path {
        ["destination", name, ..] => variable_part(name),
        _ => "NAME".to_owned(),
    };
    let all: Vec<String> = keys::ALL
        .iter()
        .map(|spec| variable(spec.section, &destination, spec.name))
        .chain(OTHERS.iter().map(|other| (*other).to_owned()))
        .collect();
    near(name, all.iter().map(String::as_str)).map_or_else(
        || "OUTBOXD_<SECTION>__<KEY>, e.g. OUTBOXD_RELAY__NAME".to_owned(),
        |found| format!("did you mean {found}?"),
    )
}

/// Name of a key's variable.
pub fn variable(section: Section, destination: &str, key: &str) -> String {
    let table = section.path().replace("NAME", destination).replace('.', "__");
    format!("{PREFIX}{}__{}", variable_part(&table), variable_part(key))
}

/// Takes each `KEY=VALUE`.
pub(super) fn flags(settings: &[String], all: &mut All) {
    for setting in settings {
        let Some((key, value)) = setting.split_once('=') else {
            // The text may hold a secret, so it is not repeated.
            let origin = Origin::Flag(String::new());
            all.fault(origin, "", "has no =".to_owned(), "--set relay.memory=64MiB");
            continue;
        };
        let key = key.trim();
        let path: Vec<&str> = key.split('.').collect();
        let origin = Origin::Flag(key.to_owned());
        all.put(&path, Given { raw: Raw::Text(value.to_owned()), origin });
    }
}
