//! Rows of the outbox that the ledger has not decided, for commands: what is at stake when a slot is
//! dropped or made anew. Reads only, the newest rows alone, and not for long.

use std::fmt;

use tokio_postgres::Client;

use super::failed;
use super::sql::{quote_ident, quote_name};
use crate::config::SourceConfig;
use crate::error::Failure;

/// Rows that are looked at: the newest by number.
const NEWEST: i64 = 100_000;

/// What the outbox holds of one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unrecorded {
    /// Name of the destination.
    pub destination: String,
    /// Rows looked at.
    pub looked_at: i64,
    /// Those without a receipt.
    pub rows: i64,
    /// Lowest and highest number among these.
    pub seqs: Option<(i64, i64)>,
}

impl fmt::Display for Unrecorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let newest = if self.looked_at < NEWEST { "" } else { "newest " };
        let Unrecorded { destination, looked_at, rows, .. } = self;
        write!(
            f,
            "destination {destination}: {rows} of the {newest}{looked_at} rows have no receipt"
        )?;
        match self.seqs {
            Some((first, last)) => write!(f, ", seq {first} to {last}"),
            None => Ok(()),
        }
    }
}

/// Counts them for each destination.
pub async fn count(
    client: &Client,
    relay: &str,
    source: &SourceConfig,
    destinations: &[&str],
) -> Result<Vec<Unrecorded>, Failure> {
    // Receipts are not indexed by number, and a ledger can be long.
    const BEGIN: &str = "SET statement_timeout = '30s'";
    const END: &str = "SET statement_timeout = 0";
    let read = async {
        client.batch_execute(BEGIN).await?;
        let rows = client.query(&sql(source), &[&relay, &destinations, &NEWEST]).await;
        client.batch_execute(END).await?;
        let mut all = Vec::new();
        for row in rows? {
            let (first, last): (Option<i64>, Option<i64>) = (row.try_get(3)?, row.try_get(4)?);
            all.push(Unrecorded {
                destination: row.try_get(0)?,
                looked_at: row.try_get(1)?,
                rows: row.try_get(2)?,
                seqs: first.zip(last),
            });
        }
        Ok(all)
    };
    read.await.map_err(|error| failed("cannot count the rows without a receipt", &error))
}

// unnest first: range_agg takes multiranges only from PostgreSQL 15 on.
fn sql(source: &SourceConfig) -> String {
    format!(
        "WITH newest AS MATERIALIZED ( \
             SELECT t.{seq}::int8 AS seq FROM {table} AS t ORDER BY t.{seq} DESC LIMIT $3::int8), \
         decided AS ( \
             SELECT r.destination, range_agg(part) AS seqs \
             FROM outbox.receipt AS r, unnest(r.seqs) AS part \
             WHERE r.relay = $1::text AND r.outcome <> 'handed' \
               AND upper(r.seqs) > (SELECT min(seq) FROM newest) \
             GROUP BY r.destination), \
         open AS ( \
             SELECT d.name, d.place, n.seq, NOT coalesce(decided.seqs @> n.seq, false) AS open \
             FROM unnest($2::text[]) WITH ORDINALITY AS d (name, place) \
                  LEFT JOIN decided ON decided.destination = d.name LEFT JOIN newest AS n ON true) \
         SELECT name, count(seq), count(seq) FILTER (WHERE open), \
                min(seq) FILTER (WHERE open), max(seq) FILTER (WHERE open) \
         FROM open GROUP BY name, place ORDER BY place",
        seq = quote_ident(&source.columns.seq),
        table = quote_name(&source.table),
    )
}
