//! Rules about the standbys: does the slot survive a promotion, and can a promoted standby lack what
//! was published?

use crate::finding::{Finding, Severity};
use crate::store::facts::{PhysicalSlot, Server, SourceFacts, StandbyFacts};
use crate::store::slot::{Slot, SlotState};

/// First version that synchronises slots.
const SYNCED_FROM: i32 = 170_000;
const LIST: &str = "synchronized_standby_slots";

/// As the primary sees it. `name` is the relay's slot.
pub fn failover(facts: &SourceFacts, name: &str) -> Vec<Finding> {
    let server = &facts.server;
    let mut findings: Vec<Finding> = standbys(server).into_iter().collect();
    findings.extend(listed(server).filter_map(|listed| missing(server, listed)));
    if server.version >= SYNCED_FROM && has_standbys(server) {
        findings.extend(not_kept(facts, name));
        findings.extend(server.standbys.iter().filter_map(no_feedback));
    }
    findings
}

fn has_standbys(server: &Server) -> bool {
    !server.setting("synchronous_standby_names").is_empty() || !server.standbys.is_empty()
}

fn listed(server: &Server) -> impl Iterator<Item = &str> {
    let names = server.setting(LIST).split(',').map(|name| name.trim().trim_matches('"'));
    names.filter(|name| !name.is_empty())
}

/// The server streams a transaction when its own disk has it. After a failover the new primary may
/// never have had it: an event without a row.
fn standbys(server: &Server) -> Option<Finding> {
    const ID: &str = "source.standbys";
    if !has_standbys(server) && listed(server).next().is_none() {
        return None;
    }
    let (object, found) = match server.setting("synchronous_standby_names") {
        "" => ("standbys", format!("follow this server, {} with a slot", server.standbys.len())),
        names => ("synchronous_standby_names", format!("is {names}")),
    };
    if listed(server).next().is_some() {
        let found = format!(
            "is {}: nothing is published that these standbys have not flushed, and while one of \
             them is down nothing is published at all",
            server.setting(LIST)
        );
        return Some(Finding::ok(ID, LIST, found));
    }
    let remedy = match server.version >= SYNCED_FROM {
        true => {
            "list the slots of the standbys that may be promoted in synchronized_standby_slots; a listed standby that is down then stops the stream"
        }
        false => "PostgreSQL 17 and newer can hold the stream back: synchronized_standby_slots",
    };
    let found = format!(
        "{found}: events may be published that a promoted standby does not know, since \
         synchronized_standby_slots is not set"
    );
    Some(Finding::warning(ID, object, found, remedy))
}

/// The walsender waits for every slot that is listed: also for one that is gone.
fn missing(server: &Server, listed: &str) -> Option<Finding> {
    let found = match server.standbys.iter().find(|slot| slot.name == listed) {
        None => "is listed in synchronized_standby_slots and is no physical slot of this server",
        Some(slot) if slot.lost => "is listed in synchronized_standby_slots and is invalidated",
        Some(slot) if !slot.active => {
            "is listed in synchronized_standby_slots, and no standby uses it now"
        }
        Some(_) => return None,
    };
    Some(Finding::failure(
        "source.listed-standby",
        format!("slot {listed}"),
        format!("{found}: nothing is published until the standby is back"),
        "bring the standby back, or take its slot off synchronized_standby_slots (a reload is enough): what it lacks at a promotion may then have been published",
    ))
}

/// Only a failover slot is kept on standbys, and only for one does the server wait for them.
fn not_kept(facts: &SourceFacts, name: &str) -> Option<Finding> {
    let SlotState::Ok(Slot { failover: Some(false), .. }) = &facts.slot else { return None };
    let held = match listed(&facts.server).next() {
        Some(_) => ", and synchronized_standby_slots holds nothing of it back",
        None => "",
    };
    Some(Finding::warning(
        "source.slot-failover",
        format!("slot {name}"),
        format!("is no failover slot: no standby keeps a copy of it{held}"),
        format!(
            "stop the relay and send ALTER_REPLICATION_SLOT {name} (FAILOVER) on a replication \
             connection: psql \"… replication=database\" -c \"…\""
        ),
    ))
}

/// A standby that sends feedback holds its rows by its slot's xmin.
fn no_feedback(slot: &PhysicalSlot) -> Option<Finding> {
    (slot.active && !slot.feedback).then(|| {
        Finding::warning(
            "source.standby-feedback",
            format!("the standby of slot {}", slot.name),
            "sends no feedback, without which it keeps no copies of slots",
            "set hot_standby_feedback = on there",
        )
    })
}

/// As a standby in the list of hosts tells itself.
pub fn standby(facts: &StandbyFacts, host: &str, name: &str) -> Vec<Finding> {
    const ID: &str = "source.standby";
    let object = format!("standby {host}");
    if facts.version < SYNCED_FROM {
        let found = "keeps no copies of slots, which PostgreSQL 17 and newer do: after a promotion \
                     the relay makes a new slot, and sends what it does not bring from the table";
        return vec![Finding::ok(ID, object, found)];
    }
    let mut findings = Vec::new();
    let mut warn = |found: String, remedy: String| {
        findings.push(Finding::warning(ID, &object, found, remedy));
    };
    let setting = |name: &str| facts.settings.get(name).map(String::as_str);
    for (name, why) in [
        ("sync_replication_slots", "it takes no copies of slots by itself"),
        ("hot_standby_feedback", "without it slots are not copied"),
    ] {
        if setting(name) == Some("off") {
            warn(format!("has {name} = off: {why}"), format!("set {name} = on there"));
        }
    }
    if setting("primary_slot_name") == Some("") {
        let remedy = "make a physical slot for it on the primary and name it there";
        warn("has no primary_slot_name: slots are not copied".into(), remedy.into());
    }
    // Shown to few roles only.
    if setting("primary_conninfo").is_some_and(|text| !text.contains("dbname")) {
        let remedy = "name a database there, e.g. dbname=postgres";
        warn("has no dbname in primary_conninfo: slots are not copied".into(), remedy.into());
    }
    let copy = match &facts.copy {
        None => Some("has no copy of slot".to_owned()),
        Some(copy) if !copy.synced => Some("has a slot of its own named".to_owned()),
        Some(copy) if copy.invalidation_reason.is_some() => {
            let reason = copy.invalidation_reason.as_deref().unwrap_or_default();
            Some(format!("has an invalidated copy ({reason}) of slot"))
        }
        Some(copy) if copy.temporary => {
            Some("has a copy, and can't keep it at a promotion yet, of slot".to_owned())
        }
        Some(_) => None,
    };
    if let Some(found) = copy {
        let remedy = "look at pg_replication_slots and the log there; if it was promoted now, the relay would make a new slot, and send what that does not bring from the table";
        warn(format!("{found} {name}"), remedy.into());
    }
    if findings.iter().all(|finding| finding.severity == Severity::Ok) {
        findings.push(Finding::ok(ID, object, format!("has a synced copy of slot {name}")));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::worst;
    use crate::store::facts::SlotCopy;

    fn server(list: &str) -> Server {
        let settings = [("synchronous_standby_names", "s"), (LIST, list)];
        Server {
            version: 180_000,
            settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            standbys: vec![PhysicalSlot {
                name: "s".into(),
                active: true,
                lost: false,
                feedback: true,
            }],
            ..Server::default()
        }
    }

    fn facts(server: Server, failover: bool) -> SourceFacts {
        let lsn = crate::lsn::Lsn(8);
        SourceFacts {
            server,
            schema: Ok(None),
            table: None,
            rights: vec![],
            publication: None,
            slot: SlotState::Ok(Slot {
                confirmed_flush: lsn,
                restart_lsn: lsn,
                active_pid: None,
                wal_status: "reserved".into(),
                safe_wal_size_bytes: None,
                failover: Some(failover),
                retained_bytes: 0,
                behind_bytes: 0,
            }),
            relay: Ok(None),
            holder: None,
        }
    }

    fn ids(facts: &SourceFacts) -> Vec<(&'static str, Severity)> {
        let findings = failover(facts, "mine");
        assert!(findings.iter().all(|f| (f.severity == Severity::Ok) == f.remedy.is_empty()));
        let bad = findings.iter().filter(|finding| finding.severity != Severity::Ok);
        bad.map(|finding| (finding.id, finding.severity)).collect()
    }

    #[test]
    fn each_fault_of_a_primary_is_found() {
        let warning = Severity::Warning;
        assert_eq!(failover(&facts(Server::default(), false), "mine"), []);
        assert_eq!(ids(&facts(server("s"), true)), []);
        assert_eq!(ids(&facts(server(""), true)), [("source.standbys", warning)]);
        assert_eq!(ids(&facts(server("s"), false)), [("source.slot-failover", warning)]);
        let gone = [("source.listed-standby", Severity::Failure)];
        assert_eq!(ids(&facts(server("s, \"t\""), true)), gone);
        let changed = |change: fn(&mut PhysicalSlot)| {
            let mut server = server("s");
            change(&mut server.standbys[0]);
            ids(&facts(server, true))
        };
        assert_eq!(changed(|slot| slot.active = false), gone);
        assert_eq!(changed(|slot| slot.lost = true), gone);
        let feedback = [("source.standby-feedback", warning)];
        assert_eq!(changed(|slot| slot.feedback = false), feedback);
    }

    #[test]
    fn each_fault_of_a_standby_is_found() {
        let copy = SlotCopy { synced: true, temporary: false, invalidation_reason: None };
        let settings = [
            ("sync_replication_slots", "on"),
            ("hot_standby_feedback", "on"),
            ("primary_slot_name", "s"),
            ("primary_conninfo", "host=x dbname=y"),
        ];
        let good = StandbyFacts {
            version: 180_000,
            settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            copy: Some(copy.clone()),
        };
        assert_eq!(worst(&standby(&good, "h", "mine")), Severity::Ok);
        for (name, value) in settings {
            let mut facts = good.clone();
            let bad = if value == "on" { "off" } else { "" };
            facts.settings.insert(name.to_owned(), bad.to_owned());
            let findings = standby(&facts, "h", "mine");
            assert_eq!((findings.len(), worst(&findings)), (1, Severity::Warning), "{name}");
        }
        for copy in [
            None,
            Some(SlotCopy { synced: false, ..copy.clone() }),
            Some(SlotCopy { temporary: true, ..copy.clone() }),
            Some(SlotCopy { invalidation_reason: Some("wal_removed".into()), ..copy }),
        ] {
            let findings = standby(&StandbyFacts { copy, ..good.clone() }, "h", "mine");
            assert_eq!((findings.len(), worst(&findings)), (1, Severity::Warning));
        }
        let old = StandbyFacts { version: 160_000, copy: None, ..good };
        assert_eq!(worst(&standby(&old, "h", "mine")), Severity::Ok);
    }
}
