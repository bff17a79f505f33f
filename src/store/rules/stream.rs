//! Rules about publication and slot.

use super::table_name;
use crate::config::SourceConfig;
use crate::error::Kind;
use crate::finding::{Finding, Severity};
use crate::store::publication::Publication;
use crate::store::slot::SlotState;

/// The publication must bring every INSERT of the outbox under the outbox table's name.
pub fn publication(publication: Option<&Publication>, source: &SourceConfig) -> Vec<Finding> {
    const ID: &str = "source.publication";
    let name = &source.publication;
    let table = table_name(source);
    let object = format!("publication {name}");
    let Some(publication) = publication else {
        return vec![Finding::failure(ID, object, "does not exist", "run `outboxd init`")];
    };
    let mut findings = Vec::new();
    let mut fault = |found: String, remedy: String| {
        findings.push(Finding::failure(ID, &object, found, remedy));
    };
    if !publication.insert {
        let remedy = format!("ALTER PUBLICATION {name} SET (publish = 'insert, truncate')");
        fault("does not publish INSERT".into(), remedy);
    }
    if !publication.via_root {
        let remedy = format!("ALTER PUBLICATION {name} SET (publish_via_partition_root = true)");
        fault("names partitions instead of their root".into(), remedy);
    } else if !publication.has_table {
        let remedy = format!("ALTER PUBLICATION {name} ADD TABLE {table}");
        fault(format!("does not hold {table}"), remedy);
    }
    if let Some(filter) = &publication.row_filter {
        let remedy = format!("ALTER PUBLICATION {name} SET TABLE {table}");
        fault(format!("leaves out rows of {table}: WHERE {filter}"), remedy);
    }
    let absent = absent_columns(publication, source);
    if !absent.is_empty() {
        let remedy = format!("ALTER PUBLICATION {name} SET TABLE {table}");
        fault(format!("leaves out columns of {table}: {}", absent.join(", ")), remedy);
    }
    findings.extend(waste(publication, source, &object));
    if findings.iter().all(|finding| finding.severity == Severity::Ok) {
        let truncate = match publication.truncate {
            true => "INSERT and TRUNCATE",
            false => "INSERT (a TRUNCATE of the outbox would pass unnoticed)",
        };
        findings.push(Finding::ok(ID, object, format!("brings {truncate} of {table}")));
    }
    findings
}

/// A column list that lacks a column of the map.
fn absent_columns<'a>(publication: &Publication, source: &'a SourceConfig) -> Vec<&'a str> {
    let map = &source.columns;
    let required = [&map.seq, &map.id, &map.run, &map.kind, &map.payload];
    let optional = [&map.tenant, &map.version, &map.headers, &map.created_at];
    required
        .into_iter()
        .chain(optional.into_iter().flatten())
        .filter(|column| !publication.columns.is_empty() && !publication.columns.contains(column))
        .map(String::as_str)
        .collect()
}

/// Changes that the server sends and the relay throws away: harmless, and never free.
fn waste(publication: &Publication, source: &SourceConfig, object: &str) -> Option<Finding> {
    let mut waste = Vec::new();
    if publication.update || publication.delete {
        waste.push("UPDATE or DELETE".to_owned());
    }
    if publication.all_tables {
        waste.push("every table".to_owned());
    }
    if !publication.others.is_empty() {
        waste.push(publication.others.join(", "));
    }
    (!waste.is_empty()).then(|| {
        Finding::warning(
            "source.publication-waste",
            object,
            format!("brings what the relay throws away: {}", waste.join(", ")),
            format!(
                "a publication of {} alone, with publish = 'insert, truncate'",
                table_name(source)
            ),
        )
    })
}

/// The slot.
pub fn slot(state: &SlotState, source: &SourceConfig) -> Finding {
    const ID: &str = "source.slot";
    let object = format!("slot {}", source.slot);
    match state {
        SlotState::Missing => {
            Finding::failure(ID, object, "does not exist", Kind::SlotMissing.remedy())
        }
        SlotState::Creating { active_pid } => Finding::failure(
            ID,
            object,
            format!(
                "is still being made{}: it waits for transactions that are open",
                active_pid.map(|pid| format!(" by backend {pid}")).unwrap_or_default()
            ),
            "wait, or end the oldest transaction of pg_stat_activity",
        ),
        SlotState::Lost { reason } => {
            Finding::failure(ID, object, format!("is lost: {reason}"), Kind::SlotLost.remedy())
        }
        SlotState::Foreign { why } => {
            Finding::failure(ID, object, format!("is {why}"), Kind::SlotForeign.remedy())
        }
        SlotState::Ok(slot) if slot.wal_status == "unreserved" => Finding::warning(
            ID,
            object,
            format!("is about to be lost: it keeps {} bytes of WAL", slot.retained_bytes),
            "start the relay, or raise max_slot_wal_keep_size, before the next checkpoint",
        ),
        SlotState::Ok(slot) => {
            let reader = slot.active_pid.map(|pid| format!(", read by backend {pid}"));
            let copies = (slot.failover == Some(true)).then_some(", kept on standbys");
            let found = format!(
                "is confirmed up to {}, keeps {} bytes of WAL{}{}",
                slot.confirmed_flush,
                slot.retained_bytes,
                copies.unwrap_or_default(),
                reader.unwrap_or_default(),
            );
            Finding::ok(ID, object, found)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ColumnMap, QualifiedName};
    use crate::lsn::Lsn;
    use crate::store::slot::Slot;

    fn source() -> SourceConfig {
        SourceConfig {
            url: String::new().into(),
            replication_url: None,
            slot: "s".into(),
            publication: "p".into(),
            table: QualifiedName { schema: "outbox".into(), name: "event".into() },
            columns: ColumnMap::default(),
            mark: Default::default(),
            connect_timeout: std::time::Duration::from_secs(1),
        }
    }

    fn good() -> Publication {
        Publication {
            all_tables: false,
            insert: true,
            update: false,
            delete: false,
            truncate: true,
            via_root: true,
            has_table: true,
            others: vec![],
            row_filter: None,
            columns: vec![],
        }
    }

    fn bad(change: impl FnOnce(&mut Publication)) -> Vec<(&'static str, Severity)> {
        let mut facts = good();
        change(&mut facts);
        let findings = publication(Some(&facts), &source());
        assert!(findings.iter().all(|f| (f.severity == Severity::Ok) == f.remedy.is_empty()));
        findings
            .iter()
            .filter(|finding| finding.severity != Severity::Ok)
            .map(|finding| (finding.id, finding.severity))
            .collect()
    }

    #[test]
    fn each_fault_of_a_publication_is_found() {
        let fault = [("source.publication", Severity::Failure)];
        let waste = [("source.publication-waste", Severity::Warning)];
        assert_eq!(bad(|_| ()), []);
        assert_eq!(bad(|p| p.truncate = false), []);
        assert_eq!(bad(|p| p.insert = false), fault);
        assert_eq!(bad(|p| p.via_root = false), fault);
        assert_eq!(bad(|p| p.has_table = false), fault);
        assert_eq!(bad(|p| p.row_filter = Some("(seq > 5)".into())), fault);
        assert_eq!(bad(|p| p.columns = vec!["seq".into(), "id".into()]), fault);
        assert_eq!(bad(|p| p.delete = true), waste);
        assert_eq!(bad(|p| p.all_tables = true), waste);
        assert_eq!(bad(|p| p.others.push("app.orders".into())), waste);
        assert_eq!(publication(None, &source())[0].severity, Severity::Failure);
    }

    #[test]
    fn a_slot_is_good_only_when_it_can_be_streamed_from() {
        let ok = Slot {
            confirmed_flush: Lsn(16),
            restart_lsn: Lsn(8),
            active_pid: None,
            wal_status: "reserved".into(),
            safe_wal_size_bytes: None,
            failover: Some(true),
            retained_bytes: 8,
            behind_bytes: 0,
        };
        let soon = Slot { wal_status: "unreserved".into(), ..ok.clone() };
        for (state, severity) in [
            (SlotState::Ok(ok), Severity::Ok),
            (SlotState::Ok(soon), Severity::Warning),
            (SlotState::Missing, Severity::Failure),
            (SlotState::Creating { active_pid: None }, Severity::Failure),
            (SlotState::Lost { reason: "wal_removed".into() }, Severity::Failure),
            (SlotState::Foreign { why: "a physical slot".into() }, Severity::Failure),
        ] {
            let finding = slot(&state, &source());
            assert_eq!(finding.severity, severity, "{finding:?}");
            assert_eq!(finding.severity == Severity::Ok, finding.remedy.is_empty());
        }
    }
}
