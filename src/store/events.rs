//! Looks into the outbox table itself. Reads only.

use std::collections::HashMap;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::sql::{quote_ident, quote_name};
use super::{Store, failed};
use crate::config::{ColumnMap, QualifiedName, SourceConfig};
use crate::error::Failure;
use crate::event::{EventId, UnixMicros};
use crate::lsn::Lsn;
use crate::relay::outcome::Found;

/// Rows that are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Existing {
    /// Their numbers, ascending.
    pub seqs: Vec<i64>,
    /// All of them committed below this position; `None` when there are none.
    pub until: Option<Lsn>,
}

/// A row that has a number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its id, as text.
    pub id: String,
    /// When it was made, if the table says so.
    pub created_at: Option<UnixMicros>,
}

impl Holder {
    /// Is it the row of this message, for certain? A uuid is one of a kind; any other id is used again
    /// with its number after a restore, and then only the time tells.
    pub fn is_of(&self, message: &Found) -> bool {
        let same_time = || self.created_at.is_some() && self.created_at == message.created_at;
        self.id == message.id.to_string() && (matches!(message.id, EventId::Uuid(_)) || same_time())
    }

    /// Is it the row of another event, for certain?
    pub fn is_other(&self, message: &Found) -> bool {
        let other_time = || {
            let times = self.created_at.zip(message.created_at);
            times.is_some_and(|(ours, theirs)| ours != theirs)
        };
        self.id != message.id.to_string()
            || (!matches!(message.id, EventId::Uuid(_)) && other_time())
    }
}

/// Numbers are looked up by index, ids compared here: one plan for every type of id column. The
/// position is that of a time after the statement's snapshot was taken.
pub(super) fn existing_sql(table: &QualifiedName, columns: &ColumnMap) -> String {
    format!(
        "SELECT {seq}::int8, {id}::text, pg_current_wal_insert_lsn() \
         FROM {table} WHERE {seq} = ANY ($1::int8[])",
        seq = quote_ident(&columns.seq),
        id = quote_ident(&columns.id),
        table = quote_name(table),
    )
}

/// The same with the time of the row, in microseconds since 1970, whatever type a time has.
pub(super) fn holders_sql(source: &SourceConfig) -> Option<String> {
    let SourceConfig { table, columns, .. } = source;
    let created_at = quote_ident(columns.created_at.as_deref()?);
    Some(format!(
        "SELECT {seq}::int8, {id}::text, CASE WHEN isfinite({created_at}) \
             THEN (extract(epoch FROM {created_at}) * 1000000)::int8 END \
         FROM {table} WHERE {seq} = ANY ($1::int8[])",
        seq = quote_ident(&columns.seq),
        id = quote_ident(&columns.id),
        table = quote_name(table),
    ))
}

impl Store {
    /// Which of these events have their row in the table, by number *and* id, ascending. After a
    /// restore a number is used again by another event, so the number alone says nothing.
    pub async fn existing(
        &self,
        client: &Client,
        events: &[(i64, EventId)],
    ) -> Result<Existing, Failure> {
        let mut wanted: HashMap<i64, Vec<String>> = HashMap::with_capacity(events.len());
        for (seq, id) in events {
            wanted.entry(*seq).or_default().push(id.to_string());
        }
        let seqs: Vec<i64> = wanted.keys().copied().collect();
        let read = async {
            let (mut found, mut until) = (Vec::with_capacity(seqs.len()), None);
            for row in client.query(&self.existing, &[&seqs]).await? {
                let (seq, id): (i64, Option<&str>) = (row.try_get(0)?, row.try_get(1)?);
                if wanted.get(&seq).is_some_and(|ids| ids.iter().any(|one| Some(&**one) == id)) {
                    found.push(seq);
                    let lsn: PgLsn = row.try_get(2)?;
                    until = until.max(Some(Lsn(lsn.into())));
                }
            }
            Ok((found, until))
        };
        let (mut seqs, until) = read
            .await
            .map_err(|error| failed("cannot look for rows in the outbox table", &error))?;
        seqs.sort_unstable();
        seqs.dedup();
        Ok(Existing { seqs, until })
    }
}
