//! What the relay's role needs beside [`super::schema::relay_grants`] for a table of the user's own:
//! its sequence, whose name only the database knows.

use super::shape::SEQUENCE_OF;
use super::sql::{quote_ident, quote_name};
use crate::config::SourceConfig;
use crate::store::schema::is_own;

/// Grants on what belongs to the table; none for `outbox.event`, whose objects are known.
pub fn table_grants(role: &str, source: &SourceConfig) -> Vec<String> {
    match is_own(&source.table) {
        true => Vec::new(),
        false => vec![sequence(role, source)],
    }
}

/// The sequence is found when the grant is applied: one that the column owns, or one that its
/// default draws from.
fn sequence(role: &str, source: &SourceConfig) -> String {
    let (table, column) = (quote_name(&source.table), &source.columns.seq);
    let grant = format!("GRANT SELECT ON SEQUENCE %s TO {}", quote_ident(role).replace('%', "%%"));
    let body = format!(
        "DECLARE\n    \
             drawn regclass := (\n        \
                 SELECT {SEQUENCE_OF}\n        \
                   FROM pg_class c JOIN pg_attribute s ON s.attrelid = c.oid\n        \
                  WHERE c.oid = {table}::regclass AND s.attname = {column});\n\
         BEGIN\n    \
             IF drawn IS NULL THEN\n        \
                 RAISE EXCEPTION 'column % of % draws from no sequence', {column}, {table};\n    \
             END IF;\n    \
             EXECUTE format({grant}, drawn);\n\
         END",
        table = literal(&table),
        column = literal(column),
        grant = literal(&grant),
    );
    let mut tag = "sequence".to_owned();
    while body.contains(&format!("${tag}$")) {
        tag.push('_');
    }
    format!("DO ${tag}$\n{body}\n${tag}$;")
}

/// A text as SQL writes it, whatever `standard_conforming_strings` is.
fn literal(text: &str) -> String {
    let quoted = text.replace('\\', "\\\\").replace('\'', "''");
    if quoted.contains('\\') { format!("E'{quoted}'") } else { format!("'{quoted}'") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn source(table: &str) -> SourceConfig {
        let text = format!(
            "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://u@h/d\"\ntable = \"{table}\"\n\
             [destination.events]\nservers = [\"nats://h\"]\nstream = \"EVENTS\"\n"
        );
        Config::parse("test", &text).unwrap().source
    }

    #[test]
    fn our_own_table_needs_nothing_more() {
        assert!(table_grants("relay", &source("outbox.event")).is_empty());
    }

    #[test]
    fn names_stay_names() {
        let grants = table_grants("a'%$sequence$\\", &source("app.Box")).join("\n");
        assert!(grants.starts_with("DO $sequence_$\n"), "{grants}");
        assert!(grants.contains("'\"app\".\"Box\"'::regclass"), "{grants}");
        let granted = "format(E'GRANT SELECT ON SEQUENCE %s TO \"a''%%$sequence$\\\\\"', drawn)";
        assert!(grants.contains(granted), "{grants}");
    }
}
