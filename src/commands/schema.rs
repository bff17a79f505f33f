//! `outboxd schema`: the SQL, for teams whose own migrations hold all DDL. Opens nothing.

use std::fmt::Write as _;

use super::{Stopped, say};
use crate::config::{Config, QualifiedName};
use crate::store::{grants, publication, schema};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
With a configuration (file, variables or --set) the SQL ends with publication and slot, whose names
and table it gives; without one they are left out.

Examples:
  outboxd schema > V7__outbox.sql
  outboxd schema --grants --role outboxd --writer app | psql
  outboxd schema --from 1                 only what is newer than version 1")]
pub struct Args {
    /// Role of the relay: print its grants too.
    #[arg(long, value_name = "ROLE")]
    pub role: Option<String>,

    /// Role that writes events: print its grants too; may be repeated.
    #[arg(long, value_name = "ROLE")]
    pub writer: Vec<String>,

    /// Print grants alone [role when none is named: outboxd].
    #[arg(long)]
    pub grants: bool,

    /// Type of the payload column.
    #[arg(long, value_enum, default_value_t)]
    pub payload: schema::Payload,

    /// Leave out migrations up to this version.
    #[arg(long, value_name = "VERSION", default_value_t = 0)]
    pub from: i32,
}

/// Prints the SQL. Names of publication, slot and table come from the configuration where there is
/// one.
pub fn run(args: &Args, config: Option<&Config>) -> Result<(), Stopped> {
    say(&text(args, config))?;
    Ok(())
}

fn text(args: &Args, config: Option<&Config>) -> String {
    let own = QualifiedName { schema: "outbox".into(), name: "event".into() };
    let table = config.map_or(&own, |config| &config.source.table);
    let mut sql = String::new();
    if !args.grants {
        for (number, migration) in schema::migrations(args.from, args.payload) {
            sql.push_str(&heading(&format!("outboxd: migration {number}")));
            sql.push_str(&migration);
        }
    }
    let default = (args.grants && args.role.is_none() && args.writer.is_empty())
        .then(|| "outboxd".to_owned());
    if let Some(role) = args.role.as_ref().or(default.as_ref()) {
        sql.push_str(&heading(&format!(
            "outboxd: rights of the relay's role {role}, which also needs LOGIN and REPLICATION"
        )));
        let removes_rows = config.is_none_or(|config| config.retention.removes_rows());
        lines(&mut sql, schema::relay_grants(role, table, removes_rows));
        if let Some(config) = config {
            lines(&mut sql, grants::table_grants(role, &config.source));
        }
    }
    for writer in &args.writer {
        sql.push_str(&heading(&format!("outboxd: rights of the writing role {writer}")));
        lines(&mut sql, schema::writer_grants(writer));
    }
    if let Some(config) = config.filter(|_| !args.grants && args.from == 0) {
        let source = &config.source;
        sql.push_str(&heading("outboxd: publication; `outboxd init` makes it when it is missing"));
        lines(&mut sql, vec![publication::create_sql(&source.publication, &source.table)]);
        sql.push_str("\n-- Then the slot, never before: ");
        sql.push_str("the server looks for the publication as of the slot's position.\n");
        sql.push_str("-- Leave out failover before PostgreSQL 17.\n-- ");
        let slot = source.slot.replace('\'', "''");
        let call = "pg_create_logical_replication_slot";
        let call = format!("SELECT {call}('{slot}', 'pgoutput', failover => true);");
        lines(&mut sql, vec![call]);
    }
    sql
}

fn heading(text: &str) -> String {
    // A role's name may hold a line break, and must not end the comment.
    format!("\n-- {}\n\n", text.replace(char::is_control, " "))
}

fn lines(sql: &mut String, lines: Vec<String>) {
    for line in lines {
        // Writing to a String can't fail.
        writeln!(sql, "{line}").unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn of(line: &[&str]) -> String {
        text(&Line::try_parse_from([&["schema"], line].concat()).unwrap().args, None)
    }

    #[test]
    fn the_whole_schema_or_grants_alone() {
        let all = of(&["--payload", "bytea", "--role", "relay", "--writer", "app"]);
        for part in ["CREATE SCHEMA", "payload     bytea", "TO \"relay\";", "TO \"app\";"] {
            assert!(all.contains(part), "{part} is missing");
        }
        let grants = of(&["--grants"]);
        assert!(grants.contains("TO \"outboxd\";") && !grants.contains("CREATE"));
        assert!(!of(&["--grants", "--writer", "app"]).contains("\"outboxd\""));
        assert!(of(&["--from", "1"]).is_empty());
    }

    #[test]
    fn publication_and_slot_come_with_a_configuration() {
        let config = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://u@h/d\"\n\
                      [destination.events]\nservers = [\"nats://h\"]\nstream = \"EVENTS\"\n";
        let config = Config::parse("test", config).unwrap();
        let args = Line::try_parse_from(["schema"]).unwrap().args;
        let sql = text(&args, Some(&config));
        for part in [
            "CREATE PUBLICATION \"outboxd_orders\"",
            "pg_create_logical_replication_slot('outboxd_orders', 'pgoutput', failover => true);",
        ] {
            assert!(sql.contains(part), "{part} is missing");
        }
        assert!(!text(&args, None).contains("PUBLICATION"));
    }

    #[test]
    fn a_role_can_not_end_the_comment() {
        let sql = of(&["--grants", "--role", "a\nDROP TABLE x; --"]);
        assert!(sql.contains("relay's role a DROP TABLE x; --, which"), "{sql}");
        assert!(sql.contains("TO \"a\nDROP TABLE x; --\";"), "{sql}");
    }
}
