//! Marks of rows that are done, in a table of the application's own: a time in a column, or the row
//! goes. What is done, receipts say; these statements read them in the order in which they were
//! written, and change rows by number.

use tokio_postgres::{Client, SimpleQueryMessage};

use super::sql::{array, multirange, parse_multirange, quote_ident, quote_name};
use super::{failed, unexpected};
use crate::config::{Mark, SourceConfig};
use crate::error::Failure;

/// SQLSTATE of a lock that was not to be had in time.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// A destination that must have decided a row before it is marked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// What receipts up to this id decided is marked.
    pub marked_receipt: i64,
    /// Numbers up to this one were given before the destination was known.
    pub began_after: i64,
}

/// Receipts of one destination, in the order of their ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Numbers that became final, as inclusive ranges.
    pub seqs: Vec<(i64, i64)>,
    /// The last receipt that was read.
    pub upto: i64,
    /// There are more.
    pub more: bool,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marked {
    /// So many rows were marked; the others were before, or are not there.
    Rows(u64),
    /// Somebody has locked one of the rows, or the table; nothing was done.
    Busy,
}

/// Receipts read at once.
const RECEIPTS: i64 = 1_000;

const PLACES: &str = "\
    SELECT d.name, d.marked_receipt, d.began_after \
    FROM (SELECT *, bool_or(required) OVER () AS any_required FROM outbox.destination \
          WHERE relay = $1::text AND active) AS d \
    WHERE $2::bool OR d.required OR NOT d.any_required ORDER BY d.name";

// What was handed over is not final, and what was adopted has its mark already.
const PART: &str = "\
    WITH next AS MATERIALIZED ( \
        SELECT id, CASE WHEN outcome IN ('handed', 'adopted') THEN '{}'::int8multirange \
                        ELSE seqs END AS seqs \
        FROM outbox.receipt WHERE relay = $1::text AND destination = $2::text AND id > $3::int8 \
        ORDER BY id LIMIT $4::int8) \
    SELECT coalesce((SELECT max(id) FROM next), $3::int8), (SELECT count(*) FROM next) = $4::int8, \
           coalesce((SELECT range_agg(part) FROM next, unnest(next.seqs) AS part), '{}')::text";

const AMONG: &str = "\
    SELECT (coalesce(range_agg(part), '{}') * $3::text::int8multirange)::text \
    FROM outbox.receipt AS r, unnest(r.seqs) AS part \
    WHERE r.relay = $1::text AND r.destination = $2::text \
      AND r.outcome NOT IN ('handed', 'adopted')";

const SAVE: &str = "\
    UPDATE outbox.destination SET marked_receipt = $3::int8, updated_at = now() \
    WHERE relay = $1::text AND name = $2::text AND marked_receipt < $3::int8";

/// The destinations that a mark waits for. A row that is deleted is gone for the optional ones too,
/// so that waits for all.
pub async fn places(client: &Client, relay: &str, mark: Mark) -> Result<Vec<Place>, Failure> {
    let read = async {
        let rows: Vec<tokio_postgres::Row> =
            client.query(PLACES, &[&relay, &(mark == Mark::Delete)]).await?;
        let place = |row: &tokio_postgres::Row| {
            Ok(Place {
                name: row.try_get(0)?,
                marked_receipt: row.try_get(1)?,
                began_after: row.try_get(2)?,
            })
        };
        rows.iter().map(place).collect::<Result<Vec<Place>, tokio_postgres::Error>>()
    };
    read.await.map_err(|error| failed("cannot read how far rows are marked", &error))
}

/// What became final behind a receipt.
pub async fn part(
    client: &Client,
    relay: &str,
    destination: &str,
    after: i64,
) -> Result<Part, Failure> {
    let read = async {
        let row = client.query_one(PART, &[&relay, &destination, &after, &RECEIPTS]).await?;
        Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))
    };
    let read: Result<(i64, bool, String), _> = read.await;
    let (upto, more, seqs) =
        read.map_err(|error| failed("cannot read what is to be marked", &error))?;
    Ok(Part { seqs: ranges(&seqs)?, upto, more })
}

/// Which of these numbers are final at a destination, by all of its receipts.
pub async fn among(
    client: &Client,
    relay: &str,
    destination: &str,
    seqs: &[(i64, i64)],
) -> Result<Vec<(i64, i64)>, Failure> {
    let row = client.query_one(AMONG, &[&relay, &destination, &multirange(seqs)]).await;
    let seqs: Result<String, _> = row.and_then(|row| row.try_get(0));
    ranges(&seqs.map_err(|error| failed("cannot read what is to be marked", &error))?)
}

fn ranges(text: &str) -> Result<Vec<(i64, i64)>, Failure> {
    parse_multirange(text).ok_or_else(|| unexpected(format_args!("numbers {text}")))
}

/// Records that everything is marked that receipts up to this one decided.
pub async fn save(
    client: &Client,
    relay: &str,
    destination: &str,
    receipt: i64,
) -> Result<(), Failure> {
    let saved = client.execute(SAVE, &[&relay, &destination, &receipt]).await;
    saved.map(drop).map_err(|error| failed("cannot record how far rows are marked", &error))
}

/// Marks the rows of these numbers, all or none. No lock is waited for longer than a moment. Need
/// not be durable when it returns: what a crash takes back is marked again.
pub async fn mark(client: &Client, source: &SourceConfig, seqs: &[i64]) -> Result<Marked, Failure> {
    let (table, seq) = (quote_name(&source.table), quote_ident(&source.columns.seq));
    let chosen = format!("t.{seq} = ANY ('{}'::int8[])", array(seqs.iter().copied()));
    let change = match source.mark {
        Mark::Ledger => return Ok(Marked::Rows(0)),
        Mark::Column => {
            let column = quote_ident(&source.columns.published_at);
            format!(
                "UPDATE {table} AS t SET {column} = now() WHERE {chosen} AND t.{column} IS NULL"
            )
        }
        Mark::Delete => format!("DELETE FROM {table} AS t WHERE {chosen}"),
    };
    // One simple query is one transaction. Rows are found by index, whatever the statistics say.
    let sql = format!(
        "SET LOCAL lock_timeout = '100ms'; SET LOCAL synchronous_commit = off; \
         SET LOCAL enable_seqscan = off; {change}"
    );
    match client.simple_query(&sql).await {
        Ok(answers) => Ok(Marked::Rows(answers.iter().rev().find_map(rows).unwrap_or(0))),
        Err(error) if error.code().is_some_and(|code| code.code() == LOCK_NOT_AVAILABLE) => {
            Ok(Marked::Busy)
        }
        Err(error) => Err(failed("cannot mark rows as done", &error)),
    }
}

fn rows(answer: &SimpleQueryMessage) -> Option<u64> {
    if let SimpleQueryMessage::CommandComplete(rows) = answer { Some(*rows) } else { None }
}
