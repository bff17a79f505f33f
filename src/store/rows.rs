//! Whole rows of the outbox by number, as events. Reads only; what a row means is decided by
//! [`crate::decode`], as for rows of the WAL.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::HashMap;
use tokio_postgres::types::{FromSql, Type};
use tokio_postgres::{Client, Row, Statement};

use super::sql::{quote_ident, quote_name};
use super::{Store, failed, unexpected};
use crate::config::{ColumnMap, QualifiedName, SourceConfig};
use crate::decode::{TableColumn, TablePlan, Value};
use crate::error::{Failure, Kind};
use crate::event::Event;

/// Rows of one statement. The client buffers whatever the server sends, so this times the largest
/// payload is what a read may hold beyond the bytes it was allowed: 128 rows of 64 KiB are 8 MiB.
const CHUNK_ROWS: usize = 128;

/// What [`Store::rows_bounded`] read.
#[derive(Debug)]
pub struct Rows {
    /// In the order asked for; numbers without a row are left out.
    pub events: Vec<Event>,
    /// How many of the numbers, from the first on, were looked up. What follows was not.
    pub looked_up: usize,
}

/// Reads rows while the table keeps its columns; made anew when they change.
#[derive(Debug)]
pub(super) struct Reader {
    table: QualifiedName,
    columns: ColumnMap,
    prepared: Mutex<Option<Arc<Prepared>>>,
}

#[derive(Debug)]
struct Prepared {
    plan: TablePlan,
    statement: Statement,
    /// Wanted columns whose type has no binary form: read as text, as the WAL has them.
    as_text: Vec<bool>,
}

// The columns that the WAL would bring, with the base types that it would name: not those that are
// computed, and domains by what is below them. A type without a send function goes out as text.
const COLUMNS: &str = "\
    SELECT a.attname::text, a.atttypid, n.nspname::text, b.typname::text, t.typsend::oid = 0 \
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid CROSS JOIN LATERAL ( \
         WITH RECURSIVE below AS ( \
             SELECT t.typname, t.typnamespace, t.typtype, t.typbasetype \
             UNION ALL \
             SELECT u.typname, u.typnamespace, u.typtype, u.typbasetype \
             FROM below JOIN pg_type u ON u.oid = below.typbasetype WHERE below.typtype = 'd') \
         SELECT typname, typnamespace FROM below WHERE typtype <> 'd') AS b \
         JOIN pg_namespace n ON n.oid = b.typnamespace \
    WHERE a.attrelid = $1::text::regclass AND a.attnum > 0 AND NOT a.attisdropped \
      AND a.attgenerated = '' \
    ORDER BY a.attnum";

impl Reader {
    pub(super) fn new(source: &SourceConfig) -> Reader {
        Reader {
            table: source.table.clone(),
            columns: source.columns.clone(),
            prepared: Mutex::new(None),
        }
    }

    fn known(&self) -> Option<Arc<Prepared>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn remember(&self, prepared: Option<Arc<Prepared>>) {
        *self.prepared.lock().unwrap_or_else(PoisonError::into_inner) = prepared;
    }

    async fn prepare(&self, client: &Client) -> Result<Arc<Prepared>, Failure> {
        let columns = columns(client, &self.table)
            .await
            .map_err(|error| failed("cannot look at the columns of the outbox table", &error))?;
        let found: Vec<TableColumn> = columns.iter().map(|(column, _)| column.clone()).collect();
        let plan = TablePlan::new(&self.columns, &found);
        if !found.iter().any(|column| column.name == self.columns.seq) {
            let detail = format!("{} has no column {}", quote_name(&self.table), self.columns.seq);
            return Err(Failure::new(Kind::TableShape, detail));
        }
        let mut list = Vec::new();
        let mut as_text = Vec::new();
        for (column, text) in plan.wanted().into_iter().filter_map(|index| columns.get(index)) {
            let cast = if *text { "::text" } else { "" };
            list.push(format!("t.{}{cast}", quote_ident(&column.name)));
            as_text.push(*text);
        }
        let sql = format!(
            "SELECT {list} FROM {table} AS t WHERE t.{seq} = ANY ($1::int8[])",
            list = list.join(", "),
            table = quote_name(&self.table),
            seq = quote_ident(&self.columns.seq),
        );
        let statement = client.prepare(&sql).await;
        let statement = statement
            .map_err(|error| failed("cannot prepare to read rows of the outbox", &error))?;
        let prepared = Arc::new(Prepared { plan, statement, as_text });
        // A column that appears would not be noticed: such a table is looked at each time.
        if prepared.plan.is_complete() {
            self.remember(Some(Arc::clone(&prepared)));
        }
        Ok(prepared)
    }

    /// Events by number; more than one where a number is not unique.
    async fn read(
        &self,
        client: &Client,
        seqs: &[i64],
    ) -> Result<HashMap<i64, Vec<Event>>, Failure> {
        let mut fresh = false;
        let (prepared, rows) = loop {
            let prepared = match self.known() {
                Some(prepared) => prepared,
                None => {
                    fresh = true;
                    self.prepare(client).await?
                }
            };
            match client.query(&prepared.statement, &[&seqs]).await {
                Ok(rows) => break (prepared, rows),
                // The table may have got other columns since, in ways that have many codes.
                Err(error) if error.as_db_error().is_some() && !fresh => self.remember(None),
                Err(error) => return Err(failed("cannot read rows of the outbox", &error)),
            }
        };
        let mut events: HashMap<i64, Vec<Event>> = HashMap::with_capacity(rows.len());
        for row in &rows {
            let event = prepared.event(row)?;
            events.entry(event.seq).or_default().push(event);
        }
        Ok(events)
    }
}

async fn columns(
    client: &Client,
    table: &QualifiedName,
) -> Result<Vec<(TableColumn, bool)>, tokio_postgres::Error> {
    let rows = client.query(COLUMNS, &[&quote_name(table)]).await?;
    let column = |row: &Row| {
        let base_type = (row.try_get(2)?, row.try_get(3)?);
        let column = TableColumn { name: row.try_get(0)?, type_oid: row.try_get(1)?, base_type };
        Ok((column, row.try_get(4)?))
    };
    rows.iter().map(column).collect()
}

/// A value as it was sent, whatever its type.
struct Sent<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Sent<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Sent<'a>, Box<dyn Error + Sync + Send>> {
        Ok(Sent(raw))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

impl Prepared {
    fn event(&self, row: &Row) -> Result<Event, Failure> {
        let mut values = Vec::with_capacity(self.as_text.len());
        for (index, as_text) in self.as_text.iter().enumerate() {
            let sent: Option<Sent<'_>> =
                row.try_get(index).map_err(|error| failed("cannot read a row", &error))?;
            values.push(match sent {
                None => Value::Null,
                Some(Sent(bytes)) if *as_text => Value::Text(bytes),
                Some(Sent(bytes)) => Value::Binary(bytes),
            });
        }
        self.plan.event(&values).map_err(unexpected)
    }
}

impl Store {
    /// The events of these numbers, in the order asked for. Numbers without a row are left out; a
    /// row that can't be mapped is an event with its fault.
    pub async fn rows(&self, client: &Client, seqs: &[i64]) -> Result<Vec<Event>, Failure> {
        self.rows_bounded(client, seqs, usize::MAX).await.map(|rows| rows.events)
    }

    /// The same up to a number of bytes, as the memory budget counts them: ends with the event
    /// that reaches them. At least one number is looked up.
    pub async fn rows_bounded(
        &self,
        client: &Client,
        seqs: &[i64],
        max_bytes: usize,
    ) -> Result<Rows, Failure> {
        let mut rows = Rows { events: Vec::new(), looked_up: 0 };
        let mut bytes: usize = 0;
        for chunk in seqs.chunks(CHUNK_ROWS) {
            let mut found = self.reader.read(client, chunk).await?;
            for seq in chunk {
                for event in found.remove(seq).unwrap_or_default() {
                    bytes = bytes.saturating_add(event.budget_bytes());
                    rows.events.push(event);
                }
                rows.looked_up += 1;
                if bytes >= max_bytes {
                    return Ok(rows);
                }
            }
        }
        Ok(rows)
    }
}
