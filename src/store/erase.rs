//! Removing what belongs to one run: its rows, decided or not, and its dead letters. Each call is
//! one bounded statement.

use tokio_postgres::Client;

use super::failed;
use crate::config::QualifiedName;
use crate::error::Failure;

/// What a batch of rows came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Batch {
    /// Rows that went.
    pub rows: u64,
    /// Of these, undecided somewhere; each counts once per destination.
    pub gone: u64,
    /// Where the next one begins; `None` when there is none.
    pub last_seq: Option<i64>,
}

impl Batch {
    pub(super) fn of(row: &tokio_postgres::Row) -> Result<Batch, tokio_postgres::Error> {
        let (rows, gone): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let last_seq = row.try_get(2)?;
        Ok(Batch { rows: rows.unsigned_abs(), gone: gone.unsigned_abs(), last_seq })
    }
}

const ROWS: &str = "\
    SELECT row_count, gone, last_seq \
    FROM outbox.erase_rows($1::text, $2::text, $3::int8, dry_run => $4::bool)";

/// Removes the run's rows among the next rows of the table. `last_seq` is `None` at its end.
pub async fn rows(
    client: &Client,
    table: &QualifiedName,
    run: &str,
    after: Option<i64>,
    dry_run: bool,
) -> Result<Batch, Failure> {
    let table = super::identity::table_name(table);
    let row = client.query_one(ROWS, &[&table, &run, &after, &dry_run]).await;
    row.and_then(|row| Batch::of(&row)).map_err(|error| failed("cannot erase rows", &error))
}

/// Letters of every relay that relays this table.
const LETTERS: &str = "\
    SELECT l.id FROM outbox.dead_letter l JOIN outbox.relay r ON r.name = l.relay \
    WHERE r.event_table = $1::text AND l.run_id = $2::text";

/// Removes the run's dead letters, and says how many.
pub async fn letters(
    client: &Client,
    table: &QualifiedName,
    run: &str,
    dry_run: bool,
) -> Result<u64, Failure> {
    let table = super::identity::table_name(table);
    let sql = match dry_run {
        true => format!("SELECT count(*) FROM ({LETTERS}) AS l"),
        false => format!(
            "WITH erased AS (DELETE FROM outbox.dead_letter WHERE id IN ({LETTERS}) RETURNING 1) \
             SELECT count(*) FROM erased"
        ),
    };
    let row = client.query_one(&sql, &[&table, &run]).await;
    row.and_then(|row| row.try_get::<_, i64>(0))
        .map(i64::unsigned_abs)
        .map_err(|error| failed("cannot erase dead letters", &error))
}
