//! The schema `outbox`: its SQL, its version, and who may do what in it.

use tokio_postgres::Client;

use super::failed;
use super::sql::{quote_ident, quote_name};
use crate::config::QualifiedName;
use crate::error::{Failure, Kind};

/// The version that this program reads and writes.
pub const VERSION: i32 = 1;

const MIGRATIONS: &[(i32, &str)] = &[(
    1,
    concat!(
        include_str!("../../migrations/0001_outbox.sql"),
        "\n",
        include_str!("../../migrations/0001_retention.sql")
    ),
)];

/// Stands once in the migrations, where the type of the payload column is given.
const PAYLOAD_MARK: &str = "json /* payload type */";

/// Type of `outbox.event.payload`. The message's body is the bytes of the value as the column
/// holds them: as written, except for `jsonb`, which PostgreSQL normalises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Payload {
    /// JSON, kept as written.
    #[default]
    Json,
    /// JSON, normalised.
    Jsonb,
    /// Any bytes.
    Bytea,
    /// Any text.
    Text,
}

impl Payload {
    /// As PostgreSQL writes it.
    pub fn type_name(self) -> &'static str {
        match self {
            Payload::Json => "json",
            Payload::Jsonb => "jsonb",
            Payload::Bytea => "bytea",
            Payload::Text => "text",
        }
    }
}

/// The SQL of every migration above `version` (0 for all), with its number.
pub fn migrations(version: i32, payload: Payload) -> impl Iterator<Item = (i32, String)> {
    MIGRATIONS
        .iter()
        .filter(move |(number, _)| *number > version)
        .map(move |(number, sql)| (*number, sql.replace(PAYLOAD_MARK, payload.type_name())))
}

/// The version of the schema in the database; `None` when there is none.
pub async fn version(client: &Client) -> Result<Option<i32>, Failure> {
    // By the catalog: to_regclass() fails for a role without USAGE on the schema.
    const EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_class c \
        JOIN pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname = 'outbox' AND c.relname = 'schema_version')";
    let read = async {
        if !client.query_one(EXISTS, &[]).await?.try_get::<_, bool>(0)? {
            return Ok(None);
        }
        let sql = "SELECT max(version) FROM outbox.schema_version";
        client.query_one(sql, &[]).await?.try_get(0)
    };
    read.await.map_err(|error| failed("cannot read the version of schema outbox", &error))
}

/// Refuses any version but this program's.
pub async fn require(client: &Client) -> Result<(), Failure> {
    match version(client).await? {
        Some(VERSION) => Ok(()),
        Some(found) => Err(wrong_version(found)),
        None => Err(Failure::new(
            Kind::SchemaMissing,
            "there is no table outbox.schema_version in this database",
        )),
    }
}

fn wrong_version(found: i32) -> Failure {
    let detail =
        format!("schema outbox has version {found}, this program works with version {VERSION}");
    Failure::new(Kind::SchemaVersion, detail)
}

/// Brings the schema to this program's version and says which migrations were applied. Each is
/// applied whole or not at all; two calls at once don't meet.
pub async fn migrate(client: &Client, payload: Payload) -> Result<Vec<i32>, Failure> {
    const LOCK: &str = "SELECT pg_advisory_lock(\
                            hashtextextended('outboxd migrate', 0))";
    const UNLOCK: &str = "SELECT pg_advisory_unlock(\
                              hashtextextended('outboxd migrate', 0))";
    let locked = client.query_one(LOCK, &[]).await;
    locked.map_err(|error| failed("cannot lock the schema against other migrations", &error))?;
    let result = migrate_locked(client, payload).await;
    let unlocked = client.query_one(UNLOCK, &[]).await;
    let applied = result?;
    unlocked.map_err(|error| failed("cannot unlock the schema", &error))?;
    Ok(applied)
}

async fn migrate_locked(client: &Client, payload: Payload) -> Result<Vec<i32>, Failure> {
    let found = version(client).await?.unwrap_or(0);
    if found > VERSION {
        return Err(wrong_version(found));
    }
    let mut applied = Vec::new();
    for (number, sql) in migrations(found, payload) {
        // Statements sent in one simple query are one transaction.
        let result = client.batch_execute(&sql).await;
        result.map_err(|error| failed(&format!("cannot apply migration {number}"), &error))?;
        applied.push(number);
    }
    Ok(applied)
}

/// Takes the schema away with all that is in it. What does not belong to it stays, and so does the
/// schema then: the server names it.
pub const DROP: &str = "\
DROP FUNCTION IF EXISTS outbox.publish, outbox.maintain, outbox.prune_rows, outbox.compact, \
                        outbox.erase_rows, outbox.lag, outbox.record_gone, outbox.has_rows, \
                        outbox.span, outbox.settled, outbox.undecided, outbox.waiting, outbox.column_of, \
                        outbox.quoted, outbox.open_gap, outbox.withdraw;
DROP TABLE IF EXISTS outbox.receipt, outbox.dead_letter, outbox.destination, outbox.relay, \
                     outbox.replay, outbox.event, outbox.schema_version;
DROP SCHEMA IF EXISTS outbox;
";

/// Runs [`DROP`], whole or not at all.
pub async fn drop(client: &Client) -> Result<(), Failure> {
    let dropped = client.batch_execute(DROP).await;
    dropped.map_err(|error| failed("cannot drop schema outbox", &error))
}

/// Applies grants.
pub async fn grant(client: &Client, grants: &[String]) -> Result<(), Failure> {
    let granted = client.batch_execute(&grants.join("\n")).await;
    granted.map_err(|error| failed("cannot grant", &error))
}

/// One right that a relay's role needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededRight {
    /// `schema`, `sequence`, `table` or `function`.
    pub kind: &'static str,
    /// Schema.
    pub schema: String,
    /// Relation; `None` for the schema itself.
    pub name: Option<String>,
    /// SELECT, …
    pub right: &'static str,
}

/// What a relay's role needs to run, and nothing more; printed as grants, looked at by `check`.
/// `removes_rows`: retention deletes rows of a table that is not `outbox.event`.
pub fn relay_rights(table: &QualifiedName, removes_rows: bool) -> Vec<NeededRight> {
    let of = |kind, schema: &str, name: Option<&str>, rights: &[&'static str]| {
        let right = |right: &&'static str| NeededRight {
            kind,
            schema: schema.to_owned(),
            name: name.map(str::to_owned),
            right,
        };
        rights.iter().map(right).collect::<Vec<_>>()
    };
    let mut rights = of("schema", "outbox", None, &["USAGE"]);
    rights.extend(of("table", "outbox", Some("schema_version"), &["SELECT"]));
    rights.extend(of("table", "outbox", Some("event"), &["SELECT"]));
    rights.extend(of("sequence", "outbox", Some("event_seq"), &["SELECT"]));
    // Compaction needs more than to append; only maintain() reaches the events.
    let ledger = ["SELECT", "INSERT", "UPDATE", "DELETE"];
    rights.extend(of("table", "outbox", Some("receipt"), &ledger));
    rights.extend(of("function", "outbox", Some("maintain"), &["EXECUTE"]));
    for name in ["relay", "destination", "dead_letter", "replay"] {
        rights.extend(of("table", "outbox", Some(name), &["SELECT", "INSERT", "UPDATE"]));
    }
    rights.extend(of("table", "outbox", Some("dead_letter"), &["DELETE"]));
    if !is_own(table) {
        rights.extend(of("schema", &table.schema, None, &["USAGE"]));
        let all = ["SELECT", "DELETE"];
        let needed = if removes_rows { all.as_slice() } else { &["SELECT"] };
        rights.extend(of("table", &table.schema, Some(&table.name), needed));
    }
    rights
}

/// Is it the table that this schema brings?
pub fn is_own(table: &QualifiedName) -> bool {
    (table.schema.as_str(), table.name.as_str()) == ("outbox", "event")
}

/// The grants of [`relay_rights`].
pub fn relay_grants(role: &str, table: &QualifiedName, removes_rows: bool) -> Vec<String> {
    let role = quote_ident(role);
    let grant = |right: &NeededRight| {
        let object = match &right.name {
            None => quote_ident(&right.schema),
            Some(name) => {
                quote_name(&QualifiedName { schema: right.schema.clone(), name: name.clone() })
            }
        };
        format!("GRANT {} ON {} {object} TO {role};", right.right, right.kind.to_uppercase())
    };
    relay_rights(table, removes_rows).iter().map(grant).collect()
}

/// What an application's role needs to write events, and nothing more.
pub fn writer_grants(role: &str) -> Vec<String> {
    let role = quote_ident(role);
    vec![
        format!("GRANT USAGE ON SCHEMA outbox TO {role};"),
        format!("GRANT EXECUTE ON FUNCTION outbox.publish TO {role};"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_numbered_without_a_gap_up_to_the_version() {
        let numbers: Vec<i32> = MIGRATIONS.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (1..=VERSION).collect::<Vec<_>>());
    }

    #[test]
    fn the_payload_type_is_given_in_one_place() {
        let all: String = migrations(0, Payload::Json).map(|(_, sql)| sql).collect();
        assert_eq!(
            MIGRATIONS.iter().map(|(_, sql)| sql.matches(PAYLOAD_MARK).count()).sum::<usize>(),
            1
        );
        assert!(all.is_ascii(), "a database of another encoding can't take it");
        assert!(all.contains("payload     json,"), "mark is not replaced");
        let bytea: String = migrations(0, Payload::Bytea).map(|(_, sql)| sql).collect();
        assert!(bytea.contains("payload     bytea,"));
        assert_eq!(migrations(VERSION, Payload::Json).count(), 0);
    }

    #[test]
    fn grants_quote_the_role() {
        let table = QualifiedName { schema: "app".into(), name: "Events".into() };
        let grants = relay_grants("my\"role", &table, false).join("\n");
        assert!(grants.contains("GRANT SELECT ON TABLE \"app\".\"Events\" TO \"my\"\"role\";"));
        assert!(!grants.contains("GRANT DELETE ON TABLE \"app\""), "{grants}");
        let grants = relay_grants("r", &table, true).join("\n");
        assert!(grants.contains("GRANT DELETE ON TABLE \"app\".\"Events\""), "{grants}");
        assert!(grants.contains("GRANT EXECUTE ON FUNCTION \"outbox\".\"maintain\""), "{grants}");
        assert!(writer_grants("w").iter().all(|grant| grant.ends_with("TO \"w\";")));
    }
}
