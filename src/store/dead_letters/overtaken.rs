//! What a letter would overtake if it were sent now. Looks at a bounded number of rows; changes
//! nothing.

use serde::Serialize;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::super::failed;
use super::super::sql::{quote_ident, quote_name};
use super::desk::{Letter, like};
use crate::config::{Filter, SourceConfig};
use crate::error::Failure;
use crate::lsn::Lsn;

/// Rows behind the letter's event that are looked at.
const ROWS: i64 = 10_000;

/// Receipts are not indexed by number, and a ledger can be long: then nothing is said.
const PATIENCE: &str = "SET statement_timeout = '5s'";
const PATIENT: &str = "SET statement_timeout = 0";
const CANCELED: &str = "57014";

/// Later events of a letter's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Overtaken {
    /// Recorded as published: the letter arrives behind them.
    pub published: i64,
    /// Not decided yet.
    pub undecided: i64,
    /// Were all rows behind the event looked at? Otherwise there may be more of both.
    pub complete: bool,
}

/// Counts the later events of the letter's run, as far as the table still has their rows. `None`:
/// the event has no run, or the ledger is too long to be asked.
pub async fn look(
    client: &Client,
    relay: &str,
    source: &SourceConfig,
    takes: &Filter,
    letter: &Letter,
) -> Result<Option<Overtaken>, Failure> {
    let Some(run) = &letter.run_id else { return Ok(None) };
    let patterns = |all: &[String]| all.iter().map(|one| like(one)).collect::<Vec<_>>();
    let lsn: Option<Lsn> = letter.commit_lsn.as_deref().and_then(|lsn| lsn.parse().ok());
    let read = async {
        client.batch_execute(PATIENCE).await?;
        let counted = client
            .query_one(
                &sql(source),
                &[
                    &relay,
                    &letter.destination,
                    &letter.seq,
                    run,
                    &patterns(&takes.kinds),
                    &patterns(&takes.tenants),
                    &lsn.map(|lsn| PgLsn::from(lsn.0)),
                    &ROWS,
                ],
            )
            .await;
        client.batch_execute(PATIENT).await?;
        match counted {
            Ok(row) => Ok(Some(Overtaken {
                published: row.try_get(0)?,
                undecided: row.try_get(1)?,
                complete: row.try_get::<_, i64>(2)? < ROWS,
            })),
            Err(error) if error.code().is_some_and(|code| code.code() == CANCELED) => Ok(None),
            Err(error) => Err(error),
        }
    };
    read.await.map_err(|error| failed("cannot look for later events of the run", &error))
}

// A receipt whose highest position is below the letter's holds nothing that committed behind it.
// (unnest first: range_agg takes multiranges only from PostgreSQL 15 on.)
fn sql(source: &SourceConfig) -> String {
    let columns = &source.columns;
    let tenant = columns
        .tenant
        .as_deref()
        .map_or("NULL".to_owned(), |name| format!("t.{}", quote_ident(name)));
    format!(
        "WITH later AS MATERIALIZED ( \
             SELECT t.{seq}::int8 AS seq, t.{run}::text AS run, t.{kind}::text AS kind, \
                    {tenant}::text AS tenant \
             FROM {table} AS t WHERE t.{seq} > $3::int8 ORDER BY t.{seq} LIMIT $8::int8), \
         of_run AS MATERIALIZED ( \
             SELECT seq FROM later WHERE run = $4::text \
               AND ($5::text[] = '{{}}' OR kind LIKE ANY ($5::text[])) \
               AND ($6::text[] = '{{}}' OR tenant LIKE ANY ($6::text[]))), \
         decided AS ( \
             SELECT range_agg(part) AS settled, \
                    range_agg(part) FILTER (WHERE r.outcome = 'published') AS published \
             FROM outbox.receipt AS r, unnest(r.seqs) AS part \
             WHERE r.relay = $1::text AND r.destination = $2::text AND r.outcome <> 'handed' \
               AND (r.last_lsn IS NULL OR r.last_lsn >= coalesce($7::pg_lsn, '0/0'::pg_lsn)) \
               AND upper(r.seqs) > (SELECT min(seq) FROM of_run) \
               AND lower(r.seqs) <= (SELECT max(seq) FROM of_run)) \
         SELECT count(*) FILTER (WHERE decided.published @> of_run.seq), \
                count(*) FILTER (WHERE NOT coalesce(decided.settled @> of_run.seq, false)), \
                (SELECT count(*) FROM later) \
         FROM decided LEFT JOIN of_run ON true WHERE of_run.seq IS NOT NULL",
        seq = quote_ident(&columns.seq),
        run = quote_ident(&columns.run),
        kind = quote_ident(&columns.kind),
        table = quote_name(&source.table),
    )
}
