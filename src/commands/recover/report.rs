//! What `outboxd recover` says.

use super::Found;
use super::find::{Orphan, Seen};
use crate::run::plan::Cluster;
use crate::store::history::Continuity;

/// Orphans shown of each destination; `--json` has all.
const SHOWN: usize = 20;

/// The cluster beside the ledger's, in words.
pub fn cluster(cluster: &Cluster) -> String {
    match cluster {
        Cluster::Same => "the one in which the ledger was written".to_owned(),
        Cluster::Promoted { was, .. } => format!("the ledger was written on timeline {was}"),
        Cluster::Behind { was, .. } => {
            format!("the ledger was written on timeline {was}, which is later")
        }
        Cluster::Other { was, .. } => format!("the ledger was written in cluster {was}"),
    }
}

/// The ledger beside the outbox, in words.
pub fn ledger(ledger: &Continuity) -> String {
    match ledger {
        Continuity::Fits => "fits the outbox".to_owned(),
        Continuity::Ahead { known, last } => {
            format!("knows number {known}, and the outbox has given {last} so far")
        }
        Continuity::Short { destination, known, newest } => format!(
            "lacks receipts of destination {destination}: {known} was known, {newest} is the newest"
        ),
    }
}

/// Everything, as text or JSON.
pub fn told(json: bool, found: &Found) -> String {
    if json {
        return serde_json::to_string_pretty(found).unwrap_or_default();
    }
    let line = |mark: &str, words: String| format!("{mark:<11}{words}\n");
    let mut text = line(
        "cluster",
        format!("{}, timeline {}: {}", found.system_identifier, found.timeline, found.cluster),
    );
    text += &line("ledger", found.ledger.clone());
    text += &line("position", format!("slot {}; WAL ends at {}", found.slot, found.wal_end));
    text += &line("outbox", format!("last number {}", found.last_seq));
    for seen in &found.destinations {
        text += &of_destination(seen);
    }
    if found.done {
        let generation = found.new_generation;
        text += &line("done", format!("generation {generation} has begun: start `outboxd run`"));
    } else if found.is_sound() {
        text += &line("nothing", "to recover: streams, ledger and outbox fit together".to_owned());
    } else {
        let words = format!("generation {} would begin", found.new_generation);
        text += &line("next", format!("{words}, after {}", found.generation));
    }
    let escape = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    text.chars().map(escape).collect()
}

fn of_destination(seen: &Seen) -> String {
    let Seen { destination, stream, messages, events, orphans, .. } = seen;
    let generation = seen.generation.map(|seen| format!(", generation {seen}")).unwrap_or_default();
    let mut text = format!(
        "{:<11}destination {destination}: stream {stream} read to {}{generation}: {messages} messages \
         compared, {events} events of this database, {} orphans\n",
        "found",
        seen.read_to,
        orphans.len()
    );
    if seen.unclear > 0 {
        text += &format!(
            "{:<11}{} messages have number and id of a row, and no time tells whether it is theirs\n",
            "unclear", seen.unclear
        );
    }
    for Orphan { stream_seq, seq, id, commit_lsn, reused, .. } in orphans.iter().take(SHOWN) {
        let lsn = commit_lsn.as_deref().unwrap_or("-");
        let row = if *reused { "another event has its number" } else { "no row" };
        text += &format!(
            "{:<11}message {stream_seq}: seq {seq}, id {id}, lsn {lsn}: {row}\n",
            "orphan"
        );
    }
    if orphans.len() > SHOWN {
        let more = orphans.len() - SHOWN;
        text += &format!("{:<11}and {more} more: --json lists all\n", "");
    }
    if seen.quarantined > 0 {
        text += &format!("{:<11}{} messages to the quarantine\n", "copied", seen.quarantined);
    }
    if let Some(at) = seen.boundary {
        text += &format!("{:<11}message {at} of stream {stream} tells consumers\n", "boundary");
    }
    text
}
