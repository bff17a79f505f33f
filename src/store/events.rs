//! Looks into the outbox table itself. Reads only.

use std::collections::HashMap;
use tokio_postgres::Client;

use super::sql::{quote_ident, quote_name};
use super::{Store, failed};
use crate::config::{ColumnMap, QualifiedName};
use crate::error::Failure;
use crate::event::EventId;

/// Numbers are looked up by index, ids compared here: one plan for every type of id column.
pub(super) fn existing_sql(table: &QualifiedName, columns: &ColumnMap) -> String {
    format!(
        "SELECT {seq}::int8, {id}::text FROM {table} WHERE {seq} = ANY ($1::int8[])",
        seq = quote_ident(&columns.seq),
        id = quote_ident(&columns.id),
        table = quote_name(table),
    )
}

impl Store {
    /// Which of these events have their row in the table, by number *and* id, ascending. After a
    /// restore a number is used again by another event, so the number alone says nothing.
    pub async fn existing(
        &self,
        client: &Client,
        events: &[(i64, EventId)],
    ) -> Result<Vec<i64>, Failure> {
        let mut wanted: HashMap<i64, Vec<String>> = HashMap::with_capacity(events.len());
        for (seq, id) in events {
            wanted.entry(*seq).or_default().push(id.to_string());
        }
        let seqs: Vec<i64> = wanted.keys().copied().collect();
        let read = async {
            let mut found = Vec::with_capacity(seqs.len());
            for row in client.query(&self.existing, &[&seqs]).await? {
                let (seq, id): (i64, Option<&str>) = (row.try_get(0)?, row.try_get(1)?);
                if wanted.get(&seq).is_some_and(|ids| ids.iter().any(|one| Some(&**one) == id)) {
                    found.push(seq);
                }
            }
            Ok(found)
        };
        let mut found: Vec<i64> = read
            .await
            .map_err(|error| failed("cannot look for rows in the outbox table", &error))?;
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}
