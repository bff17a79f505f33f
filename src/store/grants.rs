//! What the relay's role needs beside [`super::schema::relay_grants`] for a table of the user's own:
//! its sequence, whose name only the database knows, and what marking its rows takes.

use super::shape::SEQUENCE_OF;
use super::sql::{quote_ident, quote_name};
use crate::config::{Mark, SourceConfig};
use crate::store::schema::is_own;

/// Grants on what belongs to the table; none for `outbox.event`, whose objects are known.
pub fn table_grants(role: &str, source: &SourceConfig) -> Vec<String> {
    match is_own(&source.table) {
        true => Vec::new(),
        false => mark(role, source).into_iter().chain([sequence(role, source)]).collect(),
    }
}

/// What marking a row takes, in the mode that marks.
fn mark(role: &str, source: &SourceConfig) -> Option<String> {
    let (table, role) = (quote_name(&source.table), quote_ident(role));
    match source.mark {
        Mark::Ledger => None,
        Mark::Column => {
            let column = quote_ident(&source.columns.published_at);
            Some(format!("GRANT UPDATE ({column}) ON TABLE {table} TO {role};"))
        }
        Mark::Delete => Some(format!("GRANT DELETE ON TABLE {table} TO {role};")),
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
    fn only_a_mode_that_marks_may_write() {
        let granted = |mark| {
            let source = SourceConfig { mark, ..source("app.box") };
            table_grants("r", &source).join("\n")
        };
        assert!(!granted(Mark::Ledger).contains("ON TABLE"));
        let column = "GRANT UPDATE (\"published_at\") ON TABLE \"app\".\"box\" TO \"r\";";
        assert!(granted(Mark::Column).contains(column));
        assert!(granted(Mark::Delete).contains("GRANT DELETE ON TABLE \"app\".\"box\" TO \"r\";"));
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
