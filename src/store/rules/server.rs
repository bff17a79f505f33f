//! Rules about the server's settings and this role.

use crate::error::Kind;
use crate::finding::Finding;
use crate::store::facts::Server;

const OLDEST: i32 = 140_000;

/// Server and role. `needs_slot`: a slot is still to be made.
pub fn server(server: &Server, needs_slot: bool) -> Vec<Finding> {
    let mut findings = vec![version(server), primary(server), wal_level(server), role(server)];
    findings.extend(room(server, needs_slot));
    findings.push(slot_limit(server));
    findings.extend(idle_limit(server));
    findings.push(sender_timeout(server));
    findings.push(synchronous_commit(server));
    findings.extend(durability(server));
    findings.extend(encoding(server));
    findings
}

fn version(server: &Server) -> Finding {
    const ID: &str = "source.version";
    let found = format!("is {}.{}", server.version / 10_000, server.version % 10_000);
    if server.version >= OLDEST {
        return Finding::ok(ID, "server version", found);
    }
    Finding::failure(ID, "server version", found, "upgrade to PostgreSQL 14 or newer")
}

fn primary(server: &Server) -> Finding {
    const ID: &str = "source.primary";
    if server.in_recovery {
        let found = "is a standby: nothing can be recorded there";
        return Finding::failure(ID, "server", found, Kind::SourceReadOnly.remedy());
    }
    if server.setting("default_transaction_read_only") == "on" {
        return Finding::failure(
            ID,
            "default_transaction_read_only",
            format!("is on for role {}", server.role),
            format!("ALTER ROLE {} SET default_transaction_read_only = off", server.role),
        );
    }
    Finding::ok(ID, "server", "is a primary and takes writes")
}

fn wal_level(server: &Server) -> Finding {
    const ID: &str = "source.wal-level";
    let found = format!("is {}", server.setting("wal_level"));
    if server.setting("wal_level") == "logical" {
        return Finding::ok(ID, "wal_level", found);
    }
    Finding::failure(ID, "wal_level", found, Kind::WalLevel.remedy())
}

fn role(server: &Server) -> Finding {
    const ID: &str = "source.replication-right";
    let object = format!("role {}", server.role);
    if server.may_replicate {
        return Finding::ok(ID, object, "may use replication");
    }
    let remedy = match server.is_rds {
        true => format!("GRANT rds_replication TO {}", server.role),
        false => format!("ALTER ROLE {} REPLICATION", server.role),
    };
    Finding::failure(ID, object, "may not use replication", remedy)
}

/// Free slots and walsenders. A running relay has its own already, hence only a lack is reported,
/// and as a warning where it may be ours.
fn room(server: &Server, needs_slot: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(most) = server.number("max_replication_slots")
        && needs_slot
        && server.slots_used >= most
    {
        findings.push(Finding::failure(
            "source.free-slot",
            "max_replication_slots",
            format!("is {most}, and all are in use"),
            "drop a slot that nobody uses, or raise max_replication_slots and restart",
        ));
    }
    if let Some(most) = server.number("max_wal_senders")
        && server.senders_used >= most
    {
        findings.push(Finding::warning(
            "source.free-sender",
            "max_wal_senders",
            format!("is {most}, and all are in use"),
            "raise max_wal_senders and restart, or the relay can't connect again",
        ));
    }
    findings
}

/// Unit: MB. Without a limit the slot of a relay that is down keeps WAL until the disk is full.
fn slot_limit(server: &Server) -> Finding {
    const ID: &str = "source.slot-limit";
    const OBJECT: &str = "max_slot_wal_keep_size";
    match server.number(OBJECT) {
        Some(limit) if limit >= 1024 => Finding::ok(ID, OBJECT, format!("is {limit} MB")),
        Some(limit) if limit >= 0 => Finding::warning(
            ID,
            OBJECT,
            format!("is {limit} MB: the slot is lost after that much WAL without the relay"),
            "raise it to what an outage of some hours writes, within the free disk",
        ),
        _ => Finding::warning(
            ID,
            OBJECT,
            "is -1: a relay that is down can fill the primary's disk with WAL",
            "set it to less than the free disk, e.g. ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'",
        ),
    }
}

/// PostgreSQL 18 and newer.
fn idle_limit(server: &Server) -> Option<Finding> {
    const OBJECT: &str = "idle_replication_slot_timeout";
    server.number(OBJECT).filter(|limit| *limit > 0).map(|_| {
        Finding::warning(
            "source.idle-slot-limit",
            OBJECT,
            "is on: the slot is lost when the relay is down for longer",
            "set it to 0, and let max_slot_wal_keep_size protect the disk",
        )
    })
}

/// Unit: milliseconds.
fn sender_timeout(server: &Server) -> Finding {
    const ID: &str = "source.sender-timeout";
    const OBJECT: &str = "wal_sender_timeout";
    match server.number(OBJECT) {
        Some(0) => Finding::warning(
            ID,
            OBJECT,
            "is 0: the server never notices a dead relay, whose slot stays in use",
            "set it to 60s",
        ),
        Some(limit) if limit < 5_000 => Finding::warning(
            ID,
            OBJECT,
            format!("is {limit} ms: a short pause of the network ends the stream"),
            "set it to 10s or more",
        ),
        Some(limit) => Finding::ok(ID, OBJECT, format!("is {limit} ms")),
        None => Finding::ok(ID, OBJECT, "is unknown"),
    }
}

/// The relay raises it for itself, so that a receipt survives a crash; the writers' is theirs: the
/// server streams a transaction only when its WAL is flushed.
fn synchronous_commit(server: &Server) -> Finding {
    const ID: &str = "source.synchronous-commit";
    let value = server.setting("synchronous_commit");
    let found = match value {
        "on" | "remote_apply" => format!("is {value}"),
        _ => format!("is {value} for role {}; the relay's own sessions use on", server.role),
    };
    Finding::ok(ID, "synchronous_commit", found)
}

fn durability(server: &Server) -> Option<Finding> {
    (server.setting("fsync") == "off").then(|| {
        Finding::warning(
            "source.fsync",
            "fsync",
            "is off: a crash of the machine loses committed rows and receipts",
            "set fsync = on, except in tests",
        )
    })
}

fn encoding(server: &Server) -> Option<Finding> {
    (server.setting("server_encoding") == "SQL_ASCII").then(|| {
        Finding::warning(
            "source.encoding",
            "server_encoding",
            "is SQL_ASCII: texts that are not UTF-8 become dead letters",
            "use a database with encoding UTF8",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Severity, worst};

    fn good() -> Server {
        let settings = [
            ("default_transaction_read_only", "off"),
            ("fsync", "on"),
            ("idle_replication_slot_timeout", "0"),
            ("max_replication_slots", "10"),
            ("max_slot_wal_keep_size", "51200"),
            ("max_wal_senders", "10"),
            ("server_encoding", "UTF8"),
            ("synchronous_commit", "on"),
            ("wal_level", "logical"),
            ("wal_sender_timeout", "60000"),
        ];
        Server {
            version: 180_006,
            settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            role: "outboxd".into(),
            may_replicate: true,
            ..Server::default()
        }
    }

    #[test]
    fn a_good_server_passes() {
        assert_eq!(worst(&server(&good(), true)), Severity::Ok);
    }

    #[test]
    fn each_setting_that_harms_is_found_with_a_remedy() {
        for (name, value, id, severity) in [
            ("default_transaction_read_only", "on", "source.primary", Severity::Failure),
            ("wal_level", "replica", "source.wal-level", Severity::Failure),
            ("max_replication_slots", "0", "source.free-slot", Severity::Failure),
            ("max_wal_senders", "0", "source.free-sender", Severity::Warning),
            ("max_slot_wal_keep_size", "-1", "source.slot-limit", Severity::Warning),
            ("max_slot_wal_keep_size", "1", "source.slot-limit", Severity::Warning),
            ("idle_replication_slot_timeout", "60", "source.idle-slot-limit", Severity::Warning),
            ("wal_sender_timeout", "0", "source.sender-timeout", Severity::Warning),
            ("wal_sender_timeout", "1000", "source.sender-timeout", Severity::Warning),
            ("fsync", "off", "source.fsync", Severity::Warning),
            ("server_encoding", "SQL_ASCII", "source.encoding", Severity::Warning),
        ] {
            let mut facts = good();
            facts.settings.insert(name.to_owned(), value.to_owned());
            let findings = server(&facts, true);
            let bad: Vec<_> = findings.iter().filter(|f| f.severity != Severity::Ok).collect();
            assert_eq!(bad.len(), 1, "{name} = {value}: {bad:?}");
            assert_eq!((bad[0].id, bad[0].severity), (id, severity));
            assert!(!bad[0].remedy.is_empty());
        }
    }

    #[test]
    fn standby_old_version_and_missing_right_are_failures() {
        for facts in [
            Server { version: 130_022, ..good() },
            Server { in_recovery: true, ..good() },
            Server { may_replicate: false, ..good() },
        ] {
            assert_eq!(worst(&server(&facts, false)), Severity::Failure, "{facts:?}");
        }
        let rds = Server { may_replicate: false, is_rds: true, ..good() };
        assert!(server(&rds, false).iter().any(|f| f.remedy.contains("rds_replication")));
    }

    #[test]
    fn a_lack_of_slots_matters_only_when_one_is_to_be_made() {
        let facts = Server { slots_used: 10, ..good() };
        assert_eq!(worst(&server(&facts, true)), Severity::Failure);
        assert_eq!(worst(&server(&facts, false)), Severity::Ok);
    }
}
