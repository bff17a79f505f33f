//! The plan's table for the documentation: what is found, one thing after the other, and what the
//! code makes of it.

use super::{Cluster, Found, Make, Plan, Stream, plan};
use crate::lsn::Lsn;
use crate::store::history::Continuity;
use crate::store::slot::{Slot, SlotState};

/// Everything as it should be.
pub(super) fn healthy() -> Found {
    Found {
        no_stream: false,
        wal_level: "logical".to_owned(),
        cluster: Cluster::Same,
        ledger: Continuity::Fits,
        slot: at(Lsn(50), None),
        name: "outboxd_orders".to_owned(),
        ceiling: Some(Lsn(50)),
        stranger: None,
        may_make: true,
        publication: true,
        last_failure: None,
    }
}

/// A usable slot.
pub(super) fn at(confirmed_flush: Lsn, active_pid: Option<i32>) -> SlotState {
    SlotState::Ok(Slot {
        confirmed_flush,
        restart_lsn: Lsn(1),
        active_pid,
        wal_status: "reserved".to_owned(),
        safe_wal_size_bytes: None,
        failover: None,
        retained_bytes: 0,
        behind_bytes: 0,
    })
}

/// The same as a failover slot.
pub(super) fn synchronised(mut slot: SlotState) -> SlotState {
    if let SlotState::Ok(slot) = &mut slot {
        slot.failover = Some(true);
    }
    slot
}

/// What differs from a healthy start, in words, and as it is found.
fn cases() -> Vec<(&'static str, Found)> {
    let slot = |slot| Found { slot, ..healthy() };
    let cluster = |cluster| Found { cluster, ..healthy() };
    let ledger = |ledger| Found { ledger, ..healthy() };
    let other = || Cluster::Other { was: "1".to_owned(), now: "2".to_owned() };
    vec![
        ("nothing out of the ordinary", healthy()),
        ("the slot is below what was confirmed (a crash of the server)", slot(at(Lsn(40), None))),
        (
            "the slot is above all that was ever confirmed: moved, or made again",
            slot(at(Lsn(60), None)),
        ),
        ("the slot is used by an earlier session of this relay", slot(at(Lsn(50), Some(7)))),
        (
            "the slot is used by somebody else",
            Found { stranger: Some("psql".to_owned()), ..slot(at(Lsn(50), Some(7))) },
        ),
        ("there is no slot", slot(SlotState::Missing)),
        (
            "there is no slot, and `auto_recreate = false`",
            Found { may_make: false, ..slot(SlotState::Missing) },
        ),
        ("the slot is lost", slot(SlotState::Lost { reason: "wal_removed".to_owned() })),
        ("the slot is still being created", slot(SlotState::Creating { active_pid: Some(7) })),
        (
            "the slot is of another plugin, database or kind",
            slot(SlotState::Foreign { why: "a physical slot".to_owned() }),
        ),
        ("there is no publication", Found { publication: false, ..healthy() }),
        (
            "the publication is younger than the slot's position",
            Found { last_failure: Some(crate::error::Kind::PublicationMissing), ..healthy() },
        ),
        ("`wal_level` is not logical", Found { wal_level: "replica".to_owned(), ..healthy() }),
        (
            "a later timeline (failover), and a failover slot",
            Found {
                slot: synchronised(at(Lsn(50), None)),
                ..cluster(Cluster::Promoted { was: 1, now: 2 })
            },
        ),
        (
            "a later timeline, and another slot, which was made since",
            cluster(Cluster::Promoted { was: 1, now: 2 }),
        ),
        (
            "a later timeline, and no slot",
            Found { slot: SlotState::Missing, ..cluster(Cluster::Promoted { was: 1, now: 2 }) },
        ),
        ("an earlier timeline than the ledger's", cluster(Cluster::Behind { was: 2, now: 1 })),
        ("another cluster (pg_upgrade), ledger and outbox fit together", cluster(other())),
        ("another cluster, and no slot", Found { slot: SlotState::Missing, ..cluster(other()) }),
        (
            "the ledger knows numbers that the outbox has not given",
            ledger(Continuity::Ahead { known: 9, last: 5 }),
        ),
        (
            "receipts are not there that were",
            ledger(Continuity::Short { destination: "events".to_owned(), known: 9, newest: 0 }),
        ),
        ("`[relay] stream = false`", Found { no_stream: true, ..healthy() }),
    ]
}

/// The table in Markdown.
pub fn table() -> String {
    let line =
        |(words, found): (&str, Found)| format!("| {words} | {} |\n", words_of(&plan(found)));
    let lines: String = cases().into_iter().map(line).collect();
    let stream = |(words, stream)| format!("| {words} | {} |\n", words_of_stream(stream));
    let streams: String = streams().into_iter().map(stream).collect();
    format!(
        "| found | plan |\n|---|---|\n{lines}\n\
         And for each destination, when its stream is reached:\n\n\
         | the stream | plan |\n|---|---|\n{streams}{READ}"
    )
}

fn streams() -> Vec<(&'static str, Stream)> {
    vec![
        ("was never written to", Stream::New),
        ("has what it had, as far as its limits leave it", Stream::Same),
        ("has nothing of what was published (purged, or beyond its limits)", Stream::Purged),
        ("is another one of the same name", Stream::Rebuilt),
        ("ends before what it acknowledged, or has another message there", Stream::Shorter),
    ]
}

/// What only reading the stream shows.
const READ: &str = "\
    | has a message of ours whose number has another event, or that has neither row nor receipt and \
    that no WAL will bring; or one of a later generation | **refuse** \
    ([`history-lost`](errors.md#history-lost)) |\n";

fn words_of_stream(stream: Stream) -> &'static str {
    match stream {
        Stream::New => "its end is recorded as floor, then publish",
        Stream::Same => "Resume from the floor",
        Stream::Purged => {
            "Resume from the floor; what is gone is not sent again by itself, but by `outboxd replay`"
        }
        Stream::Rebuilt => {
            "Resume from its beginning, for what is undecided; what is recorded is not sent again by \
             itself, but by `outboxd replay`"
        }
        Stream::Shorter => {
            "a gap: receipts above the last message that is where the ledger has it are withdrawn, \
             Resume from there, and what it does not find is sent from the table"
        }
    }
}

fn words_of(plan: &Plan) -> String {
    let code = |kind: crate::error::Kind| format!("[`{0}`](errors.md#{0})", kind.code());
    match plan {
        Plan::Stream(_) => "stream from the slot".to_owned(),
        Plan::Gap { .. } => "stream from the slot, with a gap".to_owned(),
        Plan::Table { why, make } => {
            let make = match make {
                Some(Make::New) => "; makes a slot",
                Some(Make::Anew) => "; makes the slot anew",
                None => "",
            };
            let why = why.as_ref().map(|why| format!(" ({})", code(why.kind))).unwrap_or_default();
            format!("a gap: relay from the table{why}{make}")
        }
        Plan::Wait(failure) => format!("wait ({})", code(failure.kind)),
        Plan::Refuse(failure) => format!("**refuse** ({})", code(failure.kind)),
    }
}
