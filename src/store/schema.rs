//! The schema `outbox`: its SQL, its version, and who may do what in it.

use tokio_postgres::Client;

use super::failed;
use super::sql::{quote_ident, quote_name};
use crate::config::QualifiedName;
use crate::error::{Failure, Kind};

/// The version that this program reads and writes.
pub const VERSION: i32 = 1;

const MIGRATIONS: &[(i32, &str)] = &[(1, include_str!("../../migrations/0001_outbox.sql"))];

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
    fn type_name(self) -> &'static str {
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
    let read = async {
        let sql = "SELECT to_regclass('outbox.schema_version') IS NOT NULL";
        if !client.query_one(sql, &[]).await?.try_get::<_, bool>(0)? {
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

/// What a relay's role needs to run, and nothing more.
pub fn relay_grants(role: &str, table: &QualifiedName) -> Vec<String> {
    let role = quote_ident(role);
    let mut grants = vec![
        format!("GRANT USAGE ON SCHEMA outbox TO {role};"),
        format!("GRANT SELECT ON outbox.schema_version, outbox.event TO {role};"),
        format!("GRANT SELECT ON SEQUENCE outbox.event_seq TO {role};"),
        format!("GRANT SELECT, INSERT, UPDATE ON outbox.relay, outbox.dead_letter TO {role};"),
        format!("GRANT SELECT, INSERT ON outbox.receipt TO {role};"),
    ];
    if (table.schema.as_str(), table.name.as_str()) != ("outbox", "event") {
        grants.push(format!("GRANT USAGE ON SCHEMA {} TO {role};", quote_ident(&table.schema)));
        grants.push(format!("GRANT SELECT ON {} TO {role};", quote_name(table)));
    }
    grants
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
        assert!(all.contains("payload     json,"), "mark is not replaced");
        let bytea: String = migrations(0, Payload::Bytea).map(|(_, sql)| sql).collect();
        assert!(bytea.contains("payload     bytea,"));
        assert_eq!(migrations(VERSION, Payload::Json).count(), 0);
    }

    #[test]
    fn grants_quote_the_role() {
        let table = QualifiedName { schema: "app".into(), name: "Events".into() };
        let grants = relay_grants("my\"role", &table).join("\n");
        assert!(grants.contains("GRANT SELECT ON \"app\".\"Events\" TO \"my\"\"role\";"));
        assert!(writer_grants("w").iter().all(|grant| grant.ends_with("TO \"w\";")));
    }
}
