//! Rules about the outbox table, its columns and its sequence.

use super::table_name;
use crate::config::{ColumnMap, Mark, SourceConfig};
use crate::finding::{Finding, Severity};
use crate::store::shape::{Column, Sequence, Table};

const INTEGERS: &[&str] = &["bigint", "integer", "smallint"];
const WORDS: &[&str] =
    &["text", "character varying", "character", "uuid", "bigint", "integer", "smallint", "enum"];
const IDS: &[&str] =
    &["uuid", "bigint", "integer", "smallint", "text", "character varying", "character"];
const BODIES: &[&str] = &["json", "jsonb", "text", "character varying", "bytea", "enum"];
const OBJECTS: &[&str] = &["jsonb", "json", "text", "character varying"];
const TIMES: &[&str] = &["timestamp with time zone", "timestamp without time zone"];

/// The table, what it must have, and what the sweeper relies on.
pub fn table(table: Option<&Table>, source: &SourceConfig) -> Vec<Finding> {
    let name = table_name(source);
    let Some(table) = table else {
        return vec![Finding::failure(
            "source.table",
            format!("table {name}"),
            "does not exist",
            "run `outboxd init`, or set [source] table to the table that holds the events",
        )];
    };
    let mut findings = vec![kind(table, &name)];
    findings.extend(row_security(table, &name));
    findings.extend(default_partition(table, &name));
    findings.extend(columns(table, &name, &source.columns));
    findings.extend(marking(table, &name, source));
    findings.extend(index(table, &name, &source.columns));
    findings.extend(sequence(table, &name, &source.columns));
    findings
}

fn kind(table: &Table, name: &str) -> Finding {
    const ID: &str = "source.table";
    let object = format!("table {name}");
    let remedy = "events must be rows of a table that is written to the WAL";
    if !matches!(table.kind.as_str(), "r" | "p") {
        return Finding::failure(ID, object, "is no table", remedy);
    }
    match table.without_wal.as_slice() {
        [] => Finding::ok(ID, object, "exists"),
        parts => {
            let found = format!("is not written to the WAL in {}", parts.join(", "));
            Finding::failure(ID, object, found, remedy)
        }
    }
}

/// A row that is hidden looks like one that never committed.
fn row_security(table: &Table, name: &str) -> Option<Finding> {
    table.row_security.then(|| {
        Finding::failure(
            "source.row-security",
            format!("table {name}"),
            "has row security that applies to this role: rows may be hidden from the relay",
            "ALTER ROLE … BYPASSRLS, or a policy for this role with USING (true)",
        )
    })
}

fn default_partition(table: &Table, name: &str) -> Option<Finding> {
    (!table.takes_every_row).then(|| {
        Finding::warning(
            "source.default-partition",
            format!("table {name}"),
            "has no default partition: an INSERT fails when its partition is missing",
            "CREATE TABLE … PARTITION OF … DEFAULT",
        )
    })
}

fn columns(table: &Table, name: &str, map: &ColumnMap) -> Vec<Finding> {
    const ID: &str = "source.columns";
    let wanted: [(&str, Option<&String>, &[&str]); 9] = [
        ("seq", Some(&map.seq), &["bigint"]),
        ("id", Some(&map.id), IDS),
        ("run", Some(&map.run), WORDS),
        ("kind", Some(&map.kind), WORDS),
        ("payload", Some(&map.payload), BODIES),
        ("tenant", map.tenant.as_ref(), WORDS),
        ("version", map.version.as_ref(), INTEGERS),
        ("headers", map.headers.as_ref(), OBJECTS),
        ("created_at", map.created_at.as_ref(), TIMES),
    ];
    let mut findings = Vec::new();
    for (role, column, types) in wanted {
        let Some(column) = column else { continue };
        let object = format!("column {name}.{column}");
        let found = table.columns.iter().find(|each| each.name == *column);
        let (found, remedy) = match found {
            None if role == "seq" => ("does not exist (seq)".to_owned(), numbered(name)),
            None => (
                format!("does not exist ({role})"),
                format!("add it, or name another one in [source.columns] {role}"),
            ),
            Some(Column { computed: true, .. }) => (
                "is computed, and the server does not stream such columns".to_owned(),
                "use a column that is stored by the writer".to_owned(),
            ),
            Some(Column { type_name, is_enum, .. }) => {
                let is = if *is_enum { "enum" } else { type_name.as_str() };
                if types.contains(&is) {
                    continue;
                }
                let right = match role {
                    "seq" => numbered(name),
                    _ => format!("{role} must be {}", types.join(", ")),
                };
                (format!("has type {type_name}"), right)
            }
        };
        findings.push(Finding::failure(ID, object, found, remedy));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(ID, format!("table {name}"), "has every column it needs"));
    }
    findings
}

/// Can a row be marked as done, if that is wanted?
fn marking(table: &Table, name: &str, source: &SourceConfig) -> Vec<Finding> {
    const ID: &str = "source.mark";
    const RIGHT: &str = "source.mark-right";
    let grants = "apply the grants of `outboxd schema --grants --role ROLE`";
    let column = &source.columns.published_at;
    match source.mark {
        Mark::Ledger => Vec::new(),
        Mark::Delete if table.may_delete => {
            vec![Finding::ok(ID, format!("table {name}"), "loses its rows when they are done")]
        }
        Mark::Delete => {
            let found = "may not be deleted from by this role, as mark = \"delete\" needs";
            vec![Finding::failure(RIGHT, format!("table {name}"), found, grants)]
        }
        Mark::Column => {
            let object = format!("column {name}.{column}");
            let Some(found) = table.columns.iter().find(|each| each.name == *column) else {
                let remedy = format!(
                    "name it in [source.columns] published_at, or ALTER TABLE {name} ADD COLUMN \
                     {column} timestamptz"
                );
                return vec![Finding::failure(ID, object, "does not exist (published_at)", remedy)];
            };
            if found.not_null || found.computed || !TIMES.contains(&found.type_name.as_str()) {
                let found = format!("has type {} or is never NULL", found.type_name);
                let remedy =
                    format!("published_at must be {}, NULL until then", TIMES.join(" or "));
                return vec![Finding::failure(ID, object, found, remedy)];
            }
            if table.may_mark != Some(true) {
                let found = "may not be updated by this role, as mark = \"column\" needs";
                return vec![Finding::failure(RIGHT, object, found, grants)];
            }
            vec![Finding::ok(ID, object, "is set when a row is done")]
        }
    }
}

/// Receipts, lanes, sweeps and the position are told by a row's number, in every mode of marking.
fn numbered(name: &str) -> String {
    format!(
        "name a bigint column that a sequence fills in [source.columns] seq; a table without one gets \
         it by ALTER TABLE {name} ADD COLUMN seq bigint GENERATED ALWAYS AS IDENTITY, which rewrites \
         the table, or as docs/existing-table.md says, which does not"
    )
}

fn index(table: &Table, name: &str, map: &ColumnMap) -> Option<Finding> {
    (!table.seq_indexed).then(|| {
        Finding::warning(
            "source.seq-index",
            format!("table {name}"),
            format!("has no index that begins with {}: looking for rows reads all of it", map.seq),
            format!("CREATE INDEX CONCURRENTLY ON {name} ({})", map.seq),
        )
    })
}

/// A missed row is found by its number: below a certain number everything is committed or void.
/// That is provable only when numbers are drawn within the INSERT, one at a time, upwards.
fn sequence(table: &Table, name: &str, map: &ColumnMap) -> Vec<Finding> {
    const ID: &str = "source.sequence";
    let Some(sequence) = &table.sequence else {
        return vec![Finding::failure(
            ID,
            format!("column {name}.{}", map.seq),
            "draws from no sequence",
            "give it GENERATED ALWAYS AS IDENTITY, or a default of nextval('…')",
        )];
    };
    let object = format!("sequence {}", sequence.name);
    let mut findings = numbers(sequence, &object);
    let always = table.columns.iter().any(|c| c.name == map.seq && c.identity_always);
    if !always && !sequence.drawers.is_empty() {
        findings.push(Finding::warning(
            "source.sequence-rights",
            &object,
            format!("can be drawn from outside of an INSERT by {}", sequence.drawers.join(", ")),
            format!(
                "make {} an identity column (GENERATED ALWAYS), which needs no right on the sequence, \
                 and REVOKE ALL ON SEQUENCE {} FROM …; or see to it that nobody calls nextval or \
                 setval by itself",
                map.seq, sequence.name
            ),
        ));
    }
    if !always && !table.seq_writers.is_empty() {
        findings.push(Finding::warning(
            "source.sequence-rights",
            format!("column {name}.{}", map.seq),
            format!("can be set to any number by {}", table.seq_writers.join(", ")),
            "make it GENERATED ALWAYS AS IDENTITY, or grant INSERT on the other columns only (for \
             outbox.event: EXECUTE on outbox.publish)",
        ));
    }
    if findings.iter().all(|finding| finding.severity == Severity::Ok) {
        findings.push(Finding::ok(ID, object, "is bigint, CACHE 1, and only INSERT draws from it"));
    }
    findings
}

fn numbers(sequence: &Sequence, object: &str) -> Vec<Finding> {
    const ID: &str = "source.sequence";
    let name = &sequence.name;
    let mut findings = Vec::new();
    if sequence.type_name != "bigint" {
        let found = format!("is {}: it runs out", sequence.type_name);
        let remedy = format!("ALTER SEQUENCE {name} AS bigint");
        findings.push(Finding::failure(ID, object, found, remedy));
    }
    if sequence.cache != 1 {
        let found = format!("has CACHE {}: a session uses old numbers late", sequence.cache);
        let remedy = format!("ALTER SEQUENCE {name} CACHE 1");
        findings.push(Finding::failure(ID, object, found, remedy));
    }
    if !sequence.readable {
        let found = "can't be read by this role: how far the table was looked through is unknown";
        let remedy = format!("GRANT SELECT ON SEQUENCE {name} TO …");
        findings.push(Finding::failure(ID, object, found, remedy));
    }
    if sequence.increment <= 0 || sequence.cycle {
        let found = "counts down or starts again: numbers must rise";
        let remedy = format!("ALTER SEQUENCE {name} INCREMENT 1 NO CYCLE");
        findings.push(Finding::failure(ID, object, found, remedy));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::QualifiedName;
    use crate::finding::worst;

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

    fn good() -> Table {
        let columns = [
            ("seq", "bigint"),
            ("id", "uuid"),
            ("tenant", "text"),
            ("run_id", "text"),
            ("kind", "text"),
            ("version", "integer"),
            ("payload", "json"),
            ("headers", "jsonb"),
            ("created_at", "timestamp with time zone"),
        ];
        let column = |(name, type_name): (&str, &str)| Column {
            name: name.into(),
            type_name: type_name.into(),
            is_enum: false,
            not_null: false,
            computed: false,
            identity_always: false,
        };
        Table {
            kind: "p".into(),
            without_wal: vec![],
            row_security: false,
            takes_every_row: true,
            columns: columns.map(column).into(),
            seq_indexed: true,
            sequence: Some(Sequence {
                name: "outbox.event_seq".into(),
                type_name: "bigint".into(),
                cache: 1,
                increment: 1,
                cycle: false,
                readable: true,
                drawers: vec![],
            }),
            seq_writers: vec![],
            may_mark: None,
            may_delete: false,
        }
    }

    fn bad(change: impl FnOnce(&mut Table)) -> Vec<(&'static str, Severity)> {
        let mut facts = good();
        change(&mut facts);
        let findings = table(Some(&facts), &source());
        let bad = findings.iter().filter(|finding| finding.severity != Severity::Ok);
        bad.inspect(|finding| assert!(!finding.remedy.is_empty()))
            .map(|finding| (finding.id, finding.severity))
            .collect()
    }

    #[test]
    fn our_own_table_passes_and_a_missing_one_does_not() {
        assert_eq!(worst(&table(Some(&good()), &source())), Severity::Ok);
        assert_eq!(worst(&table(None, &source())), Severity::Failure);
    }

    #[test]
    fn each_fault_is_found() {
        use Severity::{Failure, Warning};
        let sequence = |change: fn(&mut Sequence)| {
            move |table: &mut Table| table.sequence.iter_mut().for_each(change)
        };
        assert_eq!(bad(|t| t.kind = "v".into()), [("source.table", Failure)]);
        assert_eq!(bad(|t| t.without_wal.push("x".into())), [("source.table", Failure)]);
        assert_eq!(bad(|t| t.row_security = true), [("source.row-security", Failure)]);
        assert_eq!(bad(|t| t.takes_every_row = false), [("source.default-partition", Warning)]);
        assert_eq!(bad(|t| t.seq_indexed = false), [("source.seq-index", Warning)]);
        assert_eq!(bad(|t| t.sequence = None), [("source.sequence", Failure)]);
        assert_eq!(bad(sequence(|s| s.cache = 10)), [("source.sequence", Failure)]);
        assert_eq!(bad(sequence(|s| s.increment = -1)), [("source.sequence", Failure)]);
        assert_eq!(bad(sequence(|s| s.cycle = true)), [("source.sequence", Failure)]);
        assert_eq!(bad(sequence(|s| s.readable = false)), [("source.sequence", Failure)]);
        let narrow = sequence(|s| s.type_name = "integer".into());
        assert_eq!(bad(narrow), [("source.sequence", Failure)]);
        let drawn = sequence(|s| s.drawers.push("app".into()));
        assert_eq!(bad(drawn), [("source.sequence-rights", Warning)]);
        let written = |t: &mut Table| t.seq_writers.push("app".into());
        assert_eq!(bad(written), [("source.sequence-rights", Warning)]);
    }

    #[test]
    fn a_row_can_be_marked_only_where_that_is_possible() {
        let marked = |mark: Mark, change: fn(&mut Table)| {
            let mut facts = good();
            change(&mut facts);
            let findings = table(Some(&facts), &SourceConfig { mark, ..source() });
            let bad = findings.iter().find(|finding| finding.severity != Severity::Ok);
            bad.map(|finding| finding.id)
        };
        let with = |table: &mut Table| {
            let column = Column { name: "published_at".into(), ..table.columns[8].clone() };
            table.columns.push(column);
            table.may_mark = Some(true);
            table.may_delete = true;
        };
        assert_eq!(marked(Mark::Ledger, |_| {}), None);
        assert_eq!(marked(Mark::Column, |_| {}), Some("source.mark"));
        assert_eq!(marked(Mark::Delete, |_| {}), Some("source.mark-right"));
        assert_eq!(marked(Mark::Column, with), None);
        assert_eq!(marked(Mark::Delete, with), None);
        let forbidden = |table: &mut Table| {
            let column = Column { name: "published_at".into(), ..table.columns[8].clone() };
            table.columns.push(column);
            table.may_mark = Some(false);
        };
        assert_eq!(marked(Mark::Column, forbidden), Some("source.mark-right"));
        let strict = |table: &mut Table| {
            let name = "published_at".into();
            table.columns.push(Column { name, not_null: true, ..table.columns[8].clone() });
        };
        assert_eq!(marked(Mark::Column, strict), Some("source.mark"));
    }

    #[test]
    fn identity_always_protects_the_numbers() {
        let none = bad(|table| {
            table.columns[0].identity_always = true;
            table.seq_writers.push("app".into());
            table.sequence.iter_mut().for_each(|s| s.drawers.push("app".into()));
        });
        assert_eq!(none, []);
    }

    #[test]
    fn columns_must_exist_be_stored_and_have_a_usable_type() {
        let fault = [("source.columns", Severity::Failure)];
        assert_eq!(bad(|t| drop(t.columns.remove(3))), fault);
        assert_eq!(bad(|t| t.columns[6].computed = true), fault);
        assert_eq!(bad(|t| t.columns[6].type_name = "xml".into()), fault);
        assert_eq!(bad(|t| t.columns[0].type_name = "integer".into()), fault);
        let of_enum = |t: &mut Table| {
            t.columns[4].type_name = "app.kind".into();
            t.columns[4].is_enum = true;
        };
        assert_eq!(bad(of_enum), []);
    }
}
