//! What a session does, from what it finds: stream, or relay from the table and see to a slot.
//! Decides; asks nobody.

use crate::error::{Failure, Kind};
use crate::store::slot::{Slot, SlotState};

/// What is known when a session begins.
#[derive(Debug)]
pub struct Found {
    /// `run --no-stream`.
    pub no_stream: bool,
    /// `wal_level`.
    pub wal_level: String,
    /// The slot.
    pub slot: SlotState,
    /// Name of it, for the words.
    pub name: String,
    /// Who uses it, when it is not a relay that is just ending.
    pub stranger: Option<String>,
    /// `[source] auto_recreate`
    pub may_make: bool,
    /// Is the publication there?
    pub publication: bool,
    /// How the last session failed.
    pub last_failure: Option<Kind>,
}

/// What follows.
#[derive(Debug, PartialEq, Eq)]
pub enum Plan {
    /// Stream from the slot.
    Stream(Slot),
    /// The table is all there is.
    Table {
        /// Why; `None`: it was asked for.
        why: Option<Failure>,
        /// Make a slot meanwhile.
        make: Option<Make>,
    },
    /// Nothing can be done now.
    Fail(Failure),
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
    let Found { no_stream, wal_level, slot, name, stranger, may_make, .. } = found;
    if no_stream {
        return Plan::Table { why: None, make: None };
    }
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
                Plan::Fail(Failure::new(Kind::SlotHeld, detail))
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
        SlotState::Ok(slot) => Plan::Stream(slot),
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

#[cfg(test)]
mod tests;
