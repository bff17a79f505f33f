//! What the source must look like, and what to do when it doesn't. Pure: facts to findings.
//!
//! What is said here about PostgreSQL is in its manual: chapters "Logical Decoding", "Logical
//! Replication" (restrictions, publication), "Replication" and "Write Ahead Log" of the server
//! configuration, `CREATE SEQUENCE`, `pg_replication_slots`, "Replication Slot Synchronization".

mod failover;
mod server;
mod stream;
mod table;

pub use failover::standby;
pub use server::server;
pub use stream::{publication, slot};
pub use table::table;

use super::facts::SourceFacts;
use super::schema;
use crate::config::{Config, SourceConfig};
use crate::error::{Failure, Kind};
use crate::finding::{Finding, Severity};

/// Every precondition of the source, in the order in which they build on each other. `cluster` is the
/// server's system identifier.
pub fn source(facts: &SourceFacts, config: &Config, cluster: &str) -> Vec<Finding> {
    let source = &config.source;
    let mut findings = server(&facts.server, matches!(facts.slot, super::slot::SlotState::Missing));
    findings.push(version(facts));
    findings.extend(rights(facts));
    findings.extend(table(facts.table.as_ref(), source));
    findings.extend(publication(facts.publication.as_ref(), source));
    findings.push(slot(&facts.slot, source));
    findings.extend(failover::failover(facts, &source.slot));
    findings.extend(relay(facts, &config.relay.name, cluster));
    findings
}

/// The failures among findings as one failure: what differs, all of it.
pub fn refuse(kind: Kind, findings: &[Finding]) -> Result<(), Failure> {
    let wrong: Vec<_> = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Failure)
        .map(|finding| match finding.remedy.as_str() {
            remedy if remedy == kind.remedy() => format!("{} {}", finding.object, finding.found),
            remedy => format!("{} {} ({remedy})", finding.object, finding.found),
        })
        .collect();
    if wrong.is_empty() { Ok(()) } else { Err(Failure::new(kind, wrong.join("; "))) }
}

fn version(facts: &SourceFacts) -> Finding {
    const ID: &str = "source.schema";
    let object = "schema outbox";
    match &facts.schema {
        Ok(Some(schema::VERSION)) => {
            Finding::ok(ID, object, format!("has version {}", schema::VERSION))
        }
        Ok(Some(found)) => Finding::failure(
            ID,
            object,
            format!("has version {found}; this program works with {}", schema::VERSION),
            Kind::SchemaVersion.remedy(),
        ),
        Ok(None) => Finding::failure(ID, object, "is missing", Kind::SchemaMissing.remedy()),
        Err(failure) => {
            Finding::failure(ID, object, format!("can't be read: {failure}"), failure.kind.remedy())
        }
    }
}

fn rights(facts: &SourceFacts) -> Vec<Finding> {
    const ID: &str = "source.rights";
    let role = &facts.server.role;
    let missing: Vec<Finding> = facts
        .rights
        .iter()
        .filter(|right| right.held == Some(false))
        .map(|right| {
            Finding::failure(
                ID,
                format!("role {role}"),
                format!("lacks {} on {}", right.right, right.object),
                format!("apply the grants of `outboxd schema --grants --role {role}`"),
            )
        })
        .collect();
    if missing.is_empty() && facts.rights.iter().any(|right| right.held == Some(true)) {
        return vec![Finding::ok(ID, format!("role {role}"), "has every right that it needs")];
    }
    missing
}

fn relay(facts: &SourceFacts, name: &str, cluster: &str) -> Vec<Finding> {
    const ID: &str = "source.relay";
    let object = format!("relay {name}");
    let mut findings = match &facts.relay {
        Ok(None) => Vec::new(),
        Ok(Some(row)) => match row.require_cluster(name, cluster) {
            Ok(()) => {
                vec![Finding::ok(ID, &object, format!("is known, generation {}", row.generation))]
            }
            Err(failure) => vec![Finding::failure(ID, &object, &failure, failure.kind.remedy())],
        },
        Err(failure) => vec![Finding::failure(ID, &object, failure, failure.kind.remedy())],
    };
    if let Some(holder) = &facts.holder {
        let found = format!("runs: backend {} holds its lock", holder.pid);
        findings.push(Finding::ok("source.lock", object, found));
    }
    findings
}

/// The outbox table's name, as people write it.
fn table_name(source: &SourceConfig) -> String {
    format!("{}.{}", source.table.schema, source.table.name)
}
