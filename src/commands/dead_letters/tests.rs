//! How letters are told, and what is refused before anything is opened.

use clap::Parser;

use super::change::Verb;
use super::report::{Change, Kept, Report, text};
use super::*;
use crate::store::dead_letters::overtaken::Overtaken;

fn letter(id: i64) -> Letter {
    Letter {
        id,
        state: State::Buried,
        destination: "events".to_owned(),
        generation: 1,
        seq: 40 + id,
        event_id: "e".to_owned(),
        run_id: Some("order-1".to_owned()),
        kind: "a\nb".to_owned(),
        tenant: None,
        version: None,
        payload_bytes: Some(3),
        event_created_at: None,
        committed_at: None,
        commit_lsn: None,
        commit_index: None,
        reason: "too_large".to_owned(),
        detail: "the message has 9 bytes".to_owned(),
        server_code: None,
        attempts: 1,
        blocks_run: false,
        buried_at: "2026-11-30T18:00:00.000000Z".to_owned(),
        state_changed_at: None,
        state_changed_by: None,
        state_reason: None,
    }
}

#[test]
fn a_list_has_two_lines_for_each_letter_and_says_what_it_leaves_out() {
    let blocking = Letter { blocks_run: true, ..letter(8) };
    insta::assert_snapshot!(table(&Found { letters: vec![letter(7), blocking], more: 3 }), @r"
    7       buried     2026-11-30T18:00:00.000000Z events: seq 47 run order-1 kind a\nb
                       too_large: the message has 9 bytes
    8       buried     2026-11-30T18:00:00.000000Z events: seq 48 run order-1 kind a\nb, blocks its run
                       too_large: the message has 9 bytes
    3 more: see --limit
    ");
    assert_eq!(table(&Found::default()), "no dead letters\n");
}

#[test]
fn a_redrive_says_what_it_overtakes_and_what_it_left() {
    let mut report = Report::new(Verb::Redrive, false);
    for (id, state, blocks_run) in
        [(1, State::Redriving, false), (2, State::Redriven, true), (3, State::Buried, false)]
    {
        let mut change = Change::of(Letter { state, blocks_run, ..letter(id) });
        change.overtaken = Some(Overtaken { published: 5, undecided: 4, complete: id == 2 });
        report.letters.push(change);
    }
    report.kept.push(Kept { id: 4, state: State::Redriven, why: "is redriven".to_owned() });
    insta::assert_snapshot!(text(&report), @r"
    redriving     letter 1: events: seq 41 run order-1 kind a\nb
                  arrives behind at least 5 later events of its run, which are published
    redriven      letter 2: events: seq 42 run order-1 kind a\nb
                  its run is blocked: goes ahead of the events that wait (4 known)
    buried again  letter 3: events: seq 43 run order-1 kind a\nb
                  too_large: the message has 9 bytes
    left alone    letter 4 is redriven
                  no relay of this name runs: what is redriving waits until one does
    ");
    assert!(!report.is_good());
}

#[derive(Parser)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[test]
fn nothing_happens_to_letters_that_nobody_chose_or_without_a_reason() {
    let parse = |line: &[&str]| Line::try_parse_from([&["x"], line].concat()).map(drop);
    assert!(parse(&["redrive", "--why", "w"]).is_err(), "no letter chosen");
    assert!(parse(&["redrive", "7"]).is_err(), "no reason");
    assert!(parse(&["discard", "7", "--why", " "]).is_err(), "a blank reason");
    for line in [
        &["redrive", "7", "8", "--why", "w"][..],
        &["redrive", "--all", "--dry-run"],
        &["discard", "--reason", "header", "--why", "w", "--by", "me"],
        &["redrive", "7", "--why", "w", "--wait", "1m"],
        &["list", "--state", "all", "--since", "2h", "--limit", "3", "--json"],
    ] {
        parse(line).unwrap();
    }
}
