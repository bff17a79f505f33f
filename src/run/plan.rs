//! What a session does, from what it finds: stream, stream with a gap, relay from the table and see
//! to a slot, or refuse with the next command. And what a destination's stream is, once it is reached.
//! Decides; asks nobody.
//!
//! The slot says from where: never the ledger, which may know more or less than the slot brings, and
//! never the server's present end.

mod table;

use crate::error::{Failure, Kind};
use crate::lsn::Lsn;
use crate::relay::outcome::{Anchor, Floor, StreamFacts};
use crate::store::history::Continuity;
use crate::store::slot::{Slot, SlotState};

pub use table::table;

/// What is known when a session begins.
#[derive(Debug, Clone)]
pub struct Found {
    /// `run --no-stream`.
    pub no_stream: bool,
    /// `wal_level`.
    pub wal_level: String,
    /// The cluster, beside the one in which the ledger was written last.
    pub cluster: Cluster,
    /// The ledger, beside the outbox.
    pub ledger: Continuity,
    /// The slot.
    pub slot: SlotState,
    /// Name of it, for the words.
    pub name: String,
    /// The relay never confirmed the slot above this; `None`: it never confirmed one.
    pub ceiling: Option<Lsn>,
    /// Who uses it, when it is not a relay that is just ending.
    pub stranger: Option<String>,
    /// `[source] auto_recreate`
    pub may_make: bool,
    /// Is the publication there?
    pub publication: bool,
    /// How the last session failed.
    pub last_failure: Option<Kind>,
}

/// The cluster that was reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cluster {
    /// The same, on the same timeline.
    Same,
    /// The same on a later timeline: a standby was promoted, or a backup was restored.
    Promoted {
        /// The ledger's.
        was: u32,
        /// The cluster's.
        now: u32,
    },
    /// The same on an earlier timeline than the ledger's.
    Behind {
        /// The ledger's.
        was: u32,
        /// The cluster's.
        now: u32,
    },
    /// Another one: pg_upgrade, or dump and restore.
    Other {
        /// The ledger's.
        was: String,
        /// The cluster's.
        now: String,
    },
}

impl Cluster {
    /// Compares system identifiers and timelines, the ledger's first.
    pub fn compare(was: (&str, u32), now: (&str, u32)) -> Cluster {
        if was.0 != now.0 {
            return Cluster::Other { was: was.0.to_owned(), now: now.0.to_owned() };
        }
        let (was, now) = (was.1, now.1);
        match was.cmp(&now) {
            std::cmp::Ordering::Equal => Cluster::Same,
            std::cmp::Ordering::Less => Cluster::Promoted { was, now },
            std::cmp::Ordering::Greater => Cluster::Behind { was, now },
        }
    }
}

/// What follows.
#[derive(Debug, PartialEq, Eq)]
pub enum Plan {
    /// Stream from the slot.
    Stream(Slot),
    /// The same, and first send from the table what the slot does not bring.
    Gap {
        /// From where.
        slot: Slot,
        /// Why rows may be missing.
        why: String,
    },
    /// The table is all there is: a gap that a slot may end.
    Table {
        /// Why; `None`: it was asked for.
        why: Option<Failure>,
        /// Make a slot meanwhile.
        make: Option<Make>,
    },
    /// An earlier session of this relay is about to end.
    Wait(Failure),
    /// Going on would break a promise.
    Refuse(Failure),
}

impl Plan {
    /// The slot to stream from.
    pub fn slot(&self) -> Option<&Slot> {
        match self {
            Plan::Stream(slot) | Plan::Gap { slot, .. } => Some(slot),
            Plan::Table { .. } | Plan::Wait(_) | Plan::Refuse(_) => None,
        }
    }
}

/// How a slot is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Make {
    /// There is none.
    New,
    /// The one there is of no use any more.
    Anew,
}

/// The plan. A slot is never made where the WAL that it needs is not written, nor in the place of
/// somebody else's.
pub fn plan(found: Found) -> Plan {
    if let Some(failure) = broken_history(&found) {
        return Plan::Refuse(failure);
    }
    if found.no_stream {
        return Plan::Table { why: None, make: None };
    }
    let missing = missing_before(&found);
    let Found { wal_level, slot, name, stranger, may_make, .. } = found;
    let table = |kind, detail: String, make: Option<Make>| Plan::Table {
        why: Some(Failure::new(kind, detail)),
        make: make.filter(|_| may_make && wal_level == "logical" && found.publication),
    };
    if wal_level != "logical" {
        return table(Kind::WalLevel, format!("wal_level is {wal_level}"), None);
    }
    match slot {
        SlotState::Ok(Slot { active_pid: Some(pid), .. }) => match stranger {
            Some(who) => {
                table(Kind::SlotHeld, format!("slot `{name}` is used by {who} (pid {pid})"), None)
            }
            None => {
                let detail = format!("slot `{name}` is used by backend {pid}");
                Plan::Wait(Failure::new(Kind::SlotHeld, detail))
            }
        },
        SlotState::Ok(_) if !found.publication => {
            let detail = format!("the publication of slot `{name}` is not there");
            table(Kind::PublicationMissing, detail, None)
        }
        // The server looks for the publication as it was at the slot's position, and goes on
        // looking there.
        SlotState::Ok(_) if found.last_failure == Some(Kind::PublicationMissing) => {
            let detail = format!("the publication is younger than the position of slot `{name}`");
            table(Kind::PublicationMissing, detail, Some(Make::Anew))
        }
        SlotState::Ok(slot) => match missing {
            Some(why) => Plan::Gap { slot, why },
            None => Plan::Stream(slot),
        },
        SlotState::Missing => {
            table(Kind::SlotMissing, format!("there is no slot `{name}`"), Some(Make::New))
        }
        SlotState::Creating { .. } => {
            let detail = format!(
                "slot `{name}` is still being created: it waits for transactions that were open then"
            );
            table(Kind::SlotHeld, detail, None)
        }
        SlotState::Lost { reason } => {
            table(Kind::SlotLost, format!("slot `{name}` is lost: {reason}"), Some(Make::Anew))
        }
        SlotState::Foreign { why } => {
            table(Kind::SlotForeign, format!("slot `{name}`: {why}"), None)
        }
    }
}

/// A destination's stream, beside what is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// It was never written to.
    New,
    /// It has what it had, or as much of it as its limits leave.
    Same,
    /// It is the same, and nothing that was published is in it: purged, or older than its limits.
    Purged,
    /// Another one of this name.
    Rebuilt,
    /// It ends before what it acknowledged, or lost it and went on.
    Shorter,
}

impl Stream {
    /// Compares where the stream begins and ends with what was recorded. Whether it went on after it
    /// lost its tail only its messages tell: see [`crate::relay::outcome::ReadFrom::newest`].
    pub fn compare(
        floor: &Floor,
        known: u64,
        newest: Option<&Anchor>,
        facts: &StreamFacts,
    ) -> Stream {
        if floor.created.is_empty() {
            Stream::New
        } else if floor.created != facts.created {
            Stream::Rebuilt
        } else if facts.last_seq < known {
            Stream::Shorter
        } else if newest.is_some_and(|newest| newest.seq < facts.first_seq) {
            Stream::Purged
        } else {
            Stream::Same
        }
    }

    /// What a person is told. Nothing that is gone is sent again by itself but what a stream lost
    /// that promised to keep it: a purge was meant.
    pub fn words(self) -> Option<&'static str> {
        match self {
            Stream::New | Stream::Same => None,
            Stream::Purged => Some(
                "nothing that was published is in the stream any more (purged, or beyond its \
                 limits): it is not sent again by itself, `outboxd replay` brings it back",
            ),
            Stream::Rebuilt => Some(
                "another stream of this name: what the old one had is not sent again by itself, \
                 `outboxd replay` brings it back; of events on their way when it went some may be sent twice",
            ),
            Stream::Shorter => Some("the stream ends before what it acknowledged"),
        }
    }
}

/// Outbox and ledger that are not of one history: what the ledger calls decided may be other events.
fn broken_history(found: &Found) -> Option<Failure> {
    let refuse = |kind, detail| Some(Failure::new(kind, detail));
    match (&found.ledger, &found.cluster) {
        (Continuity::Ahead { known, last }, _) => refuse(
            Kind::LedgerAhead,
            format!("the ledger knows number {known}, and the outbox has given {last} so far"),
        ),
        (Continuity::Short { destination, known, newest }, _) => refuse(
            Kind::LedgerShort,
            format!(
                "destination `{destination}`: receipt {known} was taken into account, and the newest \
                 that is there is {newest}"
            ),
        ),
        (Continuity::Fits, Cluster::Behind { was, now }) => refuse(
            Kind::LedgerAhead,
            format!("the ledger was written on timeline {was}, and the cluster is on {now}"),
        ),
        (Continuity::Fits, Cluster::Same | Cluster::Promoted { .. } | Cluster::Other { .. }) => {
            None
        }
    }
}

/// Why a slot that can be used may not bring everything.
fn missing_before(found: &Found) -> Option<String> {
    if let Cluster::Other { was, now } = &found.cluster {
        return Some(format!(
            "the ledger was written in cluster {was}, this is cluster {now}, and its positions say \
             nothing here"
        ));
    }
    // Slots are not copied to standbys, but for failover slots (PostgreSQL 17).
    if let (Cluster::Promoted { was, now }, SlotState::Ok(slot)) = (&found.cluster, &found.slot)
        && slot.failover != Some(true)
    {
        return Some(format!(
            "the server was promoted (timeline {was} to {now}), and slot `{}` is no failover slot: it \
             was made since",
            found.name
        ));
    }
    match (&found.slot, found.ceiling) {
        // A slot below is one that a crash took back: the ledger has what it brings again.
        (SlotState::Ok(slot), Some(ceiling)) if slot.confirmed_flush > ceiling => Some(format!(
            "slot `{}` is at {}, and this relay never confirmed it above {ceiling}: somebody moved \
             it, or dropped it and made it again",
            found.name, slot.confirmed_flush
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
