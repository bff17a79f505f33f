//! The tree keeps its shape: walls between modules, a first line that says what a file owns, short
//! files, no placeholders, no promise without a test that exists. Reads text; runs nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// What must not occur in the code of some files, and why.
struct Wall {
    /// Files whose path begins so.
    of: &'static [&'static str],
    /// Words that their code must not have; a word stands for itself and everything below it.
    never: &'static [&'static str],
    /// Uses that are allowed, with the whole path.
    but: &'static [&'static str],
    reason: &'static str,
}

const CLOCKS: &[&str] = &["Instant::now", "SystemTime", "elapsed()"];

const WALLS: &[Wall] = &[
    Wall {
        of: &["src/wal"],
        never: &["async_nats", "crate::publish", "crate::relay", "crate::run", "crate::store"],
        but: &[],
        reason: "wal/ is PostgreSQL in: it knows no NATS, and nothing of what becomes of a row",
    },
    Wall {
        of: &["src/publish"],
        never: &["tokio_postgres", "postgres_protocol", "crate::store", "crate::wal", "crate::run"],
        but: &[],
        reason: "publish/ is JetStream out: it knows no PostgreSQL",
    },
    Wall {
        of: &["src/publish"],
        never: &["crate::relay"],
        but: &["crate::relay::outcome", "crate::relay::backoff"],
        reason: "publish/ shares words with the core, and none of its state",
    },
    Wall {
        of: &["src/decode", "src/relay"],
        never: &["tokio", "tokio_util", "tokio_postgres", "futures_util", "tracing", "std::fs"],
        but: &[],
        reason: "decode/ and relay/ decide: no await, no socket, no log",
    },
    Wall {
        of: &["src/decode", "src/relay"],
        never: &["async_nats", "crate::publish", "crate::store", "crate::wal", "crate::run"],
        but: &[],
        reason: "what decides knows messages by crate::message, and nobody who does",
    },
    Wall {
        of: &["src/decode", "src/relay", "src/message", "src/event.rs", "src/lsn.rs"],
        never: CLOCKS,
        but: &[],
        reason: "time comes in as an argument, so that a simulation repeats",
    },
    Wall {
        of: &["src/decode"],
        never: &["crate::relay", "crate::message", "crate::error"],
        but: &[],
        reason: "decode/ makes rows of bytes; what becomes of them is not its concern",
    },
    Wall {
        of: &["src/message", "src/event.rs", "src/lsn.rs", "src/finding.rs"],
        never: &["tokio", "tokio_postgres", "crate::publish", "crate::store", "crate::wal"],
        but: &[],
        reason: "the nouns that every layer shares know no layer",
    },
    Wall {
        of: &["src/store"],
        never: &["async_nats", "crate::publish", "crate::run", "crate::admin"],
        but: &[],
        reason: "store/ is SQL: it knows no NATS",
    },
    Wall {
        of: &["src/store"],
        never: &["crate::wal", "crate::relay"],
        but: &["crate::wal::failure_of", "crate::wal::Identity", "crate::relay::outcome"],
        reason: "store/ shares the words for failures, servers and outcomes, and reads no WAL",
    },
    Wall {
        of: &["src/upkeep"],
        never: &["async_nats", "crate::publish", "crate::run", "crate::commands", "crate::sandbox"],
        but: &[],
        reason: "upkeep/ works on the database beside the stream, and on no event",
    },
    Wall {
        of: &["src/config"],
        never: &[
            "tokio",
            "async_nats",
            "crate::publish",
            "crate::run",
            "crate::store",
            "crate::wal",
        ],
        but: &["crate::wal::check_dsn"],
        reason: "a configuration is found valid before anything is opened",
    },
    Wall {
        of: &["src/admin"],
        never: &["tokio_postgres", "async_nats", "crate::publish", "crate::store", "crate::wal"],
        but: &[],
        reason: "admin/ answers from memory, also while both servers hang",
    },
    Wall {
        of: &[
            "src/wal",
            "src/publish",
            "src/store",
            "src/decode",
            "src/relay",
            "src/run",
            "src/replay",
        ],
        never: &["crate::commands", "crate::cli", "crate::sandbox"],
        but: &[],
        reason: "the relay is a library: it knows no command line and no throw-away server",
    },
];

/// A file of this many lines is where reading stops.
const LINES_MAX: usize = 500;

/// Longer files, each with its reason.
const LONG: &[(&str, &str)] = &[
    ("src/relay/destination.rs", "the procedure after an unknown outcome is read in one place"),
    ("tests/simulation/world.rs", "the clock, and all that happens on it"),
    ("src/relay/machine/tests.rs", "scenes, each by itself: nobody reads them in a row"),
];

/// Words of unfinished work, cut in two so that this file does not have them.
const PLACEHOLDERS: &[(&str, &str)] = &[
    ("todo", "!("),
    ("unimplemented", "!("),
    ("#[ign", "ore"),
    ("dbg", "!("),
    ("TO", "DO"),
    ("FIX", "ME"),
    ("XX", "X"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Rust files below these directories, by their path from here, with their text.
fn files(directories: &[&str]) -> Vec<(String, String)> {
    let mut open: Vec<PathBuf> = directories.iter().map(|each| root().join(each)).collect();
    let mut files = Vec::new();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let built = path.ends_with("target");
            let entries = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
            open.extend(entries.filter(|_| !built));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
            files.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
    files.sort();
    assert!(!files.is_empty());
    files
}

/// Numbered lines of code, without comments and without the tests at the end of a file.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().zip(1..).map(|(line, number)| (number, line));
    let product = lines.take_while(|(_, line)| !line.starts_with("#[cfg(test)]"));
    product
        .map(|(number, line)| (number, line.split("//").next().unwrap_or("")))
        .filter(|(_, line)| !line.trim().is_empty())
}

/// Does the line use the word, not as a part of a longer one, and not only as what is allowed?
fn uses(line: &str, word: &str, but: &[&str]) -> bool {
    let inside = |char: char| char.is_alphanumeric() || char == '_';
    line.match_indices(word).any(|(at, _)| {
        let (before, rest) = line.split_at(at);
        let behind = rest.strip_prefix(word).unwrap_or("");
        let whole = !before.ends_with(inside) && !behind.starts_with(inside);
        whole && !but.iter().any(|allowed| rest.starts_with(allowed))
    })
}

fn is_test_module(file: &str) -> bool {
    file.ends_with("/tests.rs")
}

/// Fails with everything that was found, not with the first of it.
fn report(rule: &str, broken: &str) {
    assert!(broken.is_empty(), "{rule}:\n{broken}");
}

#[test]
fn walls_stand() {
    let mut broken = String::new();
    let files = files(&["src"]);
    for Wall { of, never, but, reason } in WALLS {
        let mut fenced = 0;
        for (file, text) in &files {
            if is_test_module(file) || !of.iter().any(|place| file.starts_with(place)) {
                continue;
            }
            fenced += 1;
            for (number, line) in code(text) {
                for word in never.iter().filter(|word| uses(line, word, but)) {
                    writeln!(broken, "  {file}:{number}: `{word}`: {reason}").unwrap();
                }
            }
        }
        assert!(fenced > 0, "no file is behind the wall of {of:?}");
    }
    report("a wall is broken", &broken);
}

#[test]
fn a_wall_would_be_felt() {
    assert!(uses("use crate::wal::Link;", "crate::wal", &[]));
    assert!(uses("use tokio::time;", "tokio", &[]));
    assert!(!uses("use tokio_postgres::Client;", "tokio", &[]));
    assert!(!uses("use crate::wal::failure_of;", "crate::wal", &["crate::wal::failure_of"]));
    let text = "use a;\n// use b;\n#[cfg(test)]\nmod tests { use c; }\n";
    assert_eq!(code(text).collect::<Vec<_>>(), [(1, "use a;")]);
}

#[test]
fn every_file_says_first_what_it_owns() {
    let mut broken = String::new();
    for (file, text) in files(&["src", "tests", "benches"]) {
        if !text.starts_with("//! ") {
            writeln!(broken, "  {file}:1: no `//!` that says what it owns").unwrap();
        }
    }
    report("a file without its first line", &broken);
}

#[test]
fn files_are_short() {
    let mut broken = String::new();
    let files = files(&["src", "tests", "fuzz", "benches"]);
    for (file, text) in &files {
        let lines = text.lines().count();
        if lines > LINES_MAX && !LONG.iter().any(|(long, _)| long == file) {
            writeln!(broken, "  {file}:{lines}: more than {LINES_MAX} lines").unwrap();
        }
    }
    for (long, reason) in LONG {
        if reason.is_empty() || !files.iter().any(|(file, _)| file == long) {
            writeln!(broken, "  {long}: is not there, or has no reason to be long").unwrap();
        }
    }
    report("a file is too long", &broken);
}

#[test]
fn nothing_is_left_for_later() {
    let mut broken = String::new();
    for (file, text) in files(&["src", "tests", "fuzz", "benches"]) {
        for (number, line) in (1..).zip(text.lines()) {
            for (one, other) in PLACEHOLDERS {
                let word = format!("{one}{other}");
                if line.contains(&word) {
                    writeln!(broken, "  {file}:{number}: {word}").unwrap();
                }
            }
        }
    }
    report("a placeholder", &broken);
}

/// Rows `| P1 | … | tests |` of README.md: the promise's name and the tests in its last cell.
fn promises(readme: &str) -> Vec<(&str, Vec<&str>)> {
    let rows = readme.lines().filter(|line| line.starts_with("| P"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let tests = cells.last().unwrap().split('`').skip(1).step_by(2);
        (*cells.first().unwrap(), tests.collect())
    })
    .collect()
}

/// The files of a test binary.
fn binary(name: &str) -> Vec<(String, String)> {
    let alone = format!("tests/{name}.rs");
    let whole = format!("tests/{name}");
    let places: Vec<&str> =
        [&*alone, &*whole].into_iter().filter(|place| root().join(place).exists()).collect();
    if places.is_empty() { Vec::new() } else { files(&places) }
}

#[test]
fn every_promise_names_tests_that_exist() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let promises = promises(&readme);
    let names: Vec<&str> = promises.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9"]);
    let mut broken = String::new();
    for (promise, tests) in promises {
        if tests.is_empty() {
            writeln!(broken, "  {promise} names no test").unwrap();
        }
        for test in tests {
            let (name, function) = test.split_once("::").unwrap_or((test, ""));
            let files = binary(name);
            let declared = format!("fn {}(", function.rsplit("::").next().unwrap_or(""));
            if files.is_empty() {
                writeln!(broken, "  {promise}: there is no test binary `{name}`").unwrap();
            } else if !function.is_empty()
                && !files.iter().any(|(_, text)| text.contains(&declared))
            {
                writeln!(broken, "  {promise}: `{name}` has no test `{function}`").unwrap();
            }
        }
    }
    report("README.md promises what no test proves", &broken);
}

/// What follows `Tests:` in a paragraph of a runbook. A name without a binary is of the one before.
fn steps_tried(runbook: &str) -> Vec<(String, String)> {
    let mut binary = String::new();
    let lists = runbook.split("Tests:").skip(1).filter_map(|rest| rest.split("\n\n").next());
    let names = lists.flat_map(|list| list.split('`').skip(1).step_by(2));
    names
        .map(|name| {
            if let Some((of, _)) = name.split_once("::") {
                of.clone_into(&mut binary);
            }
            (binary.clone(), name.rsplit("::").next().unwrap_or("").to_owned())
        })
        .collect()
}

#[test]
fn every_step_of_the_runbook_names_tests_that_exist() {
    let runbook = fs::read_to_string(root().join("docs/disaster-recovery.md")).unwrap();
    let mut broken = String::new();
    for section in runbook.split("\n## ").skip(1) {
        let heading = section.lines().next().unwrap_or("");
        let tried = steps_tried(section);
        if tried.is_empty() && !section.contains("untried here") {
            writeln!(broken, "  \"{heading}\" names no test").unwrap();
        }
        for (name, function) in tried {
            let declared = format!("fn {function}(");
            if !binary(&name).iter().any(|(_, text)| text.contains(&declared)) {
                writeln!(broken, "  \"{heading}\": `{name}` has no test `{function}`").unwrap();
            }
        }
    }
    report("the runbook has steps that no test tries", &broken);
}

#[test]
fn links_between_the_documents_lead_somewhere() {
    let mut broken = String::new();
    let mut documents = vec![root().join("README.md"), root().join("CHANGELOG.md")];
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    documents.extend(docs.filter(|path| path.extension().is_some_and(|end| end == "md")));
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for (number, line) in (1..).zip(text.lines()) {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            for target in targets.filter(|target| !target.contains("://")) {
                let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
                let path = match file {
                    "" => document.clone(),
                    _ => document.parent().unwrap().join(file),
                };
                let there = match fs::read_to_string(&path) {
                    Ok(text) => anchor.is_empty() || anchors(&text).any(|own| own == anchor),
                    Err(_) => path.is_dir(),
                };
                if !there {
                    let name = document.strip_prefix(root()).unwrap().display();
                    writeln!(broken, "  {name}:{number}: {target}").unwrap();
                }
            }
        }
    }
    report("a link leads nowhere", &broken);
}

/// The anchors that the headings of a page have where it is shown.
fn anchors(page: &str) -> impl Iterator<Item = String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| {
        let kept = |char: &char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_');
        let words: String = line.trim_start_matches('#').trim().chars().filter(kept).collect();
        words.to_lowercase().replace(' ', "-")
    })
}
