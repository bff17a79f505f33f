//! What `redrive` and `discard` say of themselves, as text and as JSON. Asks nobody.

use serde::Serialize;

use super::change::Verb;
use super::{event, plain};
use crate::store::dead_letters::desk::{Letter, State};
use crate::store::dead_letters::overtaken::Overtaken;

/// JSON of both.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Which of them.
    pub action: Verb,
    /// Was nothing to be done?
    pub dry_run: bool,
    /// Why nothing was done at all.
    pub refused: Option<String>,
    /// Does a relay of this name run? It does the sending.
    pub relay_running: bool,
    /// Letters that were taken, or would be.
    pub letters: Vec<Change>,
    /// Letters that fit and were left as they are.
    pub kept: Vec<Kept>,
    /// Letters that fit beyond the limit.
    pub more: i64,
}

/// A letter that was taken, or would be.
#[derive(Debug, Serialize)]
pub struct Change {
    /// As it is now.
    #[serde(flatten)]
    pub letter: Letter,
    /// The state before.
    pub was: State,
    /// Later events of its run; `null` where they were not counted.
    pub overtaken: Option<Overtaken>,
}

impl Change {
    /// A letter as it was found.
    pub fn of(letter: Letter) -> Change {
        Change { was: letter.state, letter, overtaken: None }
    }
}

/// A letter that was left as it is.
#[derive(Debug, Serialize)]
pub struct Kept {
    /// Its number.
    pub id: i64,
    /// Its state.
    pub state: State,
    /// Why; the words follow its number.
    pub why: String,
}

impl Report {
    /// Nothing done yet.
    pub fn new(action: Verb, dry_run: bool) -> Report {
        Report {
            action,
            dry_run,
            refused: None,
            relay_running: false,
            letters: Vec::new(),
            kept: Vec::new(),
            more: 0,
        }
    }

    /// Did it do what it was told to, and no letter came back?
    pub fn is_good(&self) -> bool {
        let back = |change: &Change| !self.dry_run && change.letter.state == State::Buried;
        self.refused.is_none() && !self.letters.is_empty() && !self.letters.iter().any(back)
    }
}

/// For people.
pub fn text(report: &Report) -> String {
    let mut lines = Vec::new();
    let mut line = |mark: &str, words: String| lines.push(format!("{mark:<14}{}\n", plain(&words)));
    for change in &report.letters {
        let letter = &change.letter;
        line(mark(report, letter.state), format!("letter {}: {}", letter.id, event(letter)));
        if letter.state == State::Buried && !report.dry_run {
            line("", format!("{}: {}", letter.reason, letter.detail));
        } else {
            consequences(report.action, change).into_iter().for_each(|words| line("", words));
        }
    }
    for kept in &report.kept {
        line("left alone", format!("letter {} {}", kept.id, kept.why));
    }
    if report.more > 0 {
        line("", format!("{} more: see --limit", report.more));
    }
    match &report.refused {
        Some(words) => line("refused", words.clone()),
        None => ending(report).into_iter().for_each(|words| line("", words)),
    }
    lines.concat()
}

fn mark(report: &Report, state: State) -> &'static str {
    match (report.action, report.dry_run || report.refused.is_some()) {
        (Verb::Redrive, true) => "would redrive",
        (Verb::Discard, true) => "would discard",
        (Verb::Redrive | Verb::Discard, false) => match state {
            State::Buried => "buried again",
            State::Redriving => "redriving",
            State::Redriven => "redriven",
            State::Discarded => "discarded",
        },
    }
}

/// What the change means for the event's run.
fn consequences(verb: Verb, change: &Change) -> Option<String> {
    let blocked = change.letter.blocks_run;
    match verb {
        Verb::Discard => blocked.then(|| "its run waits behind it, and goes on".to_owned()),
        Verb::Redrive if blocked => {
            let waiting = change.overtaken.map_or(String::new(), |later| {
                format!(" ({} known)", at_least(later.undecided, later.complete))
            });
            Some(format!("its run is blocked: goes ahead of the events that wait{waiting}"))
        }
        Verb::Redrive => {
            change.letter.run_id.as_ref()?;
            Some(match change.overtaken {
                Some(Overtaken { published: 0, complete: true, .. }) => {
                    "no later event of its run is recorded as published".to_owned()
                }
                Some(Overtaken { published, complete, .. }) => format!(
                    "arrives behind {} later events of its run, which are published",
                    at_least(published, complete)
                ),
                None => {
                    "how many later events of its run it arrives behind was not counted".to_owned()
                }
            })
        }
    }
}

fn at_least(count: i64, complete: bool) -> String {
    if complete { count.to_string() } else { format!("at least {count}") }
}

fn ending(report: &Report) -> Option<String> {
    let waits = report.letters.iter().any(|change| change.letter.state == State::Redriving);
    match (report.relay_running, report.action) {
        _ if report.dry_run => None,
        (false, Verb::Redrive) => {
            Some("no relay of this name runs: what is redriving waits until one does".to_owned())
        }
        (true, Verb::Redrive) if waits => Some(
            "what is redriving has no outcome yet: `outboxd dead-letters list` shows it".to_owned(),
        ),
        (false | true, Verb::Redrive | Verb::Discard) => None,
    }
}
