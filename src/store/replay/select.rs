//! What a replay takes: numbers by the receipts' positions, narrowed down by the rows themselves,
//! in the order in which they are to be published. Reads only.
//!
//! A receipt says of its numbers between which positions they committed and when they were
//! recorded, and no more: one that reaches into what is asked for is taken whole. So a replay brings
//! an event too many before one too few.

use serde::{Deserialize, Serialize};
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use super::super::dead_letters::desk::like;
use super::super::sql::{multirange, parse_multirange, quote_ident, quote_name};
use super::super::{failed, unexpected};
use crate::config::{Filter, SourceConfig};
use crate::error::Failure;

/// What was asked for; what is not given, takes all. Positions and times are as PostgreSQL reads
/// them, so that a job can be compared with what is asked for later.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Selection {
    /// Committed there or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_lsn: Option<String>,
    /// Committed there or before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until_lsn: Option<String>,
    /// Recorded as published then or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_time: Option<String>,
    /// Recorded then or before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until_time: Option<String>,
    /// Ordering key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// Kind; `*` stands for any text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Numbers or ids.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<String>,
}

/// What a selection comes to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Inclusive ranges of numbers that the receipts gave.
    pub seqs: Vec<(i64, i64)>,
    /// Of these numbers, those without a row.
    pub missing: u64,
    /// Events with a row that the filters take.
    pub selected: u64,
    /// The first and the last of them, by number.
    pub span: Option<(i64, i64)>,
}

/// Where the ledger of a destination begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beginning {
    /// Position of the oldest receipt; `None` when it has none.
    pub lsn: Option<String>,
    /// When it was recorded.
    pub time: String,
    /// Receipts before it were removed, as far as can be told.
    pub is_cut: bool,
}

// A receipt that was merged has the time of its newest part, and parts of the same five minutes.
const NUMBERS: &str = "\
    SELECT coalesce(range_agg(p.part), '{}')::text FROM ( \
        SELECT part FROM outbox.receipt AS r, unnest(r.seqs) AS part \
        WHERE r.relay = $1::text AND r.destination = $2::text AND r.outcome = 'published' \
          AND ($3::text IS NULL OR r.last_lsn IS NULL OR r.last_lsn >= $3::text::pg_lsn) \
          AND ($4::text IS NULL OR r.first_lsn IS NULL OR r.first_lsn <= $4::text::pg_lsn) \
          AND ($5::text IS NULL OR r.recorded_at >= $5::text::timestamptz) \
          AND ($6::text IS NULL OR date_bin('5 minutes', r.recorded_at, 'epoch') \
                                   <= $6::text::timestamptz) \
        UNION ALL \
        SELECT int8range(l.seq, l.seq, '[]') FROM outbox.dead_letter AS l \
        WHERE l.relay = $1::text AND l.destination = $2::text AND l.state = 'redriven' \
          AND ($3::text IS NULL OR l.commit_lsn IS NULL OR l.commit_lsn >= $3::text::pg_lsn) \
          AND ($4::text IS NULL OR l.commit_lsn IS NULL OR l.commit_lsn <= $4::text::pg_lsn) \
          AND ($5::text IS NULL OR l.state_changed_at >= $5::text::timestamptz) \
          AND ($6::text IS NULL OR l.state_changed_at <= $6::text::timestamptz)) AS p";

// Retention removes receipts from the oldest on, when their rows are gone.
const BEGINNING: &str = "\
    SELECT first.first_lsn::text, to_char(first.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'), \
           coalesce(d.created_at < first.recorded_at - interval '5 minutes' \
                    AND d.began_after + 1 < first.seq, false) \
    FROM (SELECT min(r.first_lsn) AS first_lsn, min(r.recorded_at) AS recorded_at, \
                 min(lower(r.seqs)) AS seq \
          FROM outbox.receipt AS r \
          WHERE r.relay = $1::text AND r.destination = $2::text AND NOT isempty(r.seqs) \
            AND r.outcome <> 'handed') AS first \
         LEFT JOIN outbox.destination AS d ON d.relay = $1::text AND d.name = $2::text \
    WHERE first.recorded_at IS NOT NULL";

const CURSOR: &str = "outboxd_replay";

/// What of a destination's filter and a selection can be asked of a row.
struct Wanted {
    run: Option<String>,
    kind: Option<String>,
    kinds: Vec<String>,
    tenants: Vec<String>,
}

impl Wanted {
    fn new(selection: &Selection, takes: &Filter) -> Wanted {
        let patterns = |all: &[String]| all.iter().map(|one| like(one)).collect();
        Wanted {
            run: selection.run.clone(),
            kind: selection.kind.as_deref().map(like),
            kinds: patterns(&takes.kinds),
            tenants: patterns(&takes.tenants),
        }
    }

    /// Of row `t`, with the parameters from `$first` on.
    fn sql(source: &SourceConfig, first: usize) -> String {
        let columns = &source.columns;
        let tenant = columns.tenant.as_deref();
        format!(
            "(${run}::text IS NULL OR t.{run_column}::text = ${run}::text) \
             AND (${kind}::text IS NULL OR t.{kind_column}::text LIKE ${kind}::text) \
             AND (${kinds}::text[] = '{{}}' OR t.{kind_column}::text LIKE ANY (${kinds}::text[])) \
             AND (${tenants}::text[] = '{{}}' OR {tenant}::text LIKE ANY (${tenants}::text[]))",
            run = first,
            kind = first + 1,
            kinds = first + 2,
            tenants = first + 3,
            run_column = quote_ident(&columns.run),
            kind_column = quote_ident(&columns.kind),
            tenant = tenant.map_or("NULL".to_owned(), |name| format!("t.{}", quote_ident(name))),
        )
    }
}

/// The numbers of published events that a selection's positions and times take.
pub async fn numbers(
    client: &Client,
    relay: &str,
    destination: &str,
    selection: &Selection,
) -> Result<Vec<(i64, i64)>, Failure> {
    let Selection { since_lsn, until_lsn, since_time, until_time, .. } = selection;
    let values: [&(dyn ToSql + Sync); 6] =
        [&relay, &destination, since_lsn, until_lsn, since_time, until_time];
    let row = client.query_one(NUMBERS, &values).await;
    let ranges: String = row
        .and_then(|row| row.try_get(0))
        .map_err(|error| failed("cannot read the ledger", &error))?;
    parse_multirange(&ranges).ok_or_else(|| unexpected(format_args!("numbers {ranges}")))
}

/// Where the ledger begins; `None` when nothing was ever published.
pub async fn beginning(
    client: &Client,
    relay: &str,
    destination: &str,
) -> Result<Option<Beginning>, Failure> {
    let read = async {
        let Some(row) = client.query_opt(BEGINNING, &[&relay, &destination]).await? else {
            return Ok(None);
        };
        let (lsn, time, is_cut) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        Ok(Some(Beginning { lsn, time, is_cut }))
    };
    read.await.map_err(|error| failed("cannot read where the ledger begins", &error))
}

/// The numbers of the rows with this number or this id.
pub async fn numbers_of(
    client: &Client,
    source: &SourceConfig,
    event: &str,
) -> Result<Vec<i64>, Failure> {
    let (table, columns) = (quote_name(&source.table), &source.columns);
    let seq = quote_ident(&columns.seq);
    let read = async {
        let rows = match event.parse::<i64>() {
            Ok(number) => {
                let sql = format!("SELECT {seq}::int8 FROM {table} WHERE {seq} = $1::int8");
                client.query(&sql, &[&number]).await?
            }
            // There is no index by id: the whole table is read.
            Err(_) => {
                let id = quote_ident(&columns.id);
                let sql = format!("SELECT {seq}::int8 FROM {table} WHERE {id}::text = $1::text");
                client.query(&sql, &[&event]).await?
            }
        };
        rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()
    };
    read.await.map_err(|error| failed("cannot look for an event's row", &error))
}

/// Counts what these numbers come to.
pub async fn plan(
    client: &Client,
    source: &SourceConfig,
    takes: &Filter,
    selection: &Selection,
    seqs: Vec<(i64, i64)>,
) -> Result<Plan, Failure> {
    let sql = format!(
        "SELECT count(*), count(*) FILTER (WHERE {wanted}), \
                min(t.{seq}::int8) FILTER (WHERE {wanted}), \
                max(t.{seq}::int8) FILTER (WHERE {wanted}) \
         FROM unnest($1::text::int8multirange) AS part \
              JOIN {table} AS t ON t.{seq} >= lower(part) AND t.{seq} < upper(part)",
        wanted = Wanted::sql(source, 2),
        seq = quote_ident(&source.columns.seq),
        table = quote_name(&source.table),
    );
    let Wanted { run, kind, kinds, tenants } = Wanted::new(selection, takes);
    let read = async {
        let values: [&(dyn ToSql + Sync); 5] = [&multirange(&seqs), &run, &kind, &kinds, &tenants];
        let row = client.query_one(&sql, &values).await?;
        let (present, selected): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let span: (Option<i64>, Option<i64>) = (row.try_get(2)?, row.try_get(3)?);
        Ok((present.unsigned_abs(), selected.unsigned_abs(), span))
    };
    let (present, selected, span) =
        read.await.map_err(|error| failed("cannot count the events to replay", &error))?;
    let width = |(first, last): &(i64, i64)| last.abs_diff(*first).saturating_add(1);
    let numbers: u64 = seqs.iter().map(width).sum();
    Ok(Plan { missing: numbers.saturating_sub(present), selected, span: span.0.zip(span.1), seqs })
}

/// Opens the list of what is left of a job, in the order in which its runs were published: by number,
/// but for the exceptions that receipts list ([`crate::relay::late`]). What was published twice is where
/// it was first. The server keeps the list; no
/// transaction stays open.
pub async fn open(
    client: &Client,
    relay: &str,
    source: &SourceConfig,
    takes: &Filter,
    job: &super::Job,
) -> Result<(), Failure> {
    // What lies between a number and the one before it is not selected, and is done with it: so
    // what is done stays a few ranges.
    let sql = format!(
        "DECLARE {CURSOR} NO SCROLL CURSOR WITH HOLD FOR \
         WITH listed AS MATERIALIZED ( \
             SELECT l.seq, l.behind, r.id, l.place \
             FROM outbox.receipt AS r \
                  CROSS JOIN unnest(r.late_seqs, r.late_behind) WITH ORDINALITY \
                             AS l (seq, behind, place) \
             WHERE r.relay = $7::text AND r.destination = $8::text AND r.late_seqs IS NOT NULL \
               AND r.seqs @> l.seq), \
         first AS MATERIALIZED ( \
             SELECT one.seq, min(r.id) AS id \
             FROM (SELECT range_agg(int8range(seq, seq, '[]')) AS seqs FROM listed) AS every \
                  JOIN outbox.receipt AS r ON r.seqs && every.seqs \
                  CROSS JOIN LATERAL unnest(r.seqs * every.seqs) AS part \
                  CROSS JOIN LATERAL generate_series(lower(part), upper(part) - 1) AS one (seq) \
             WHERE r.relay = $7::text AND r.destination = $8::text AND r.outcome = 'published' \
             GROUP BY one.seq), \
         late AS MATERIALIZED ( \
             SELECT DISTINCT ON (seq) seq, behind, id, place \
             FROM listed JOIN first USING (seq, id) ORDER BY seq, place) \
         SELECT o.seq, o.since FROM ( \
             SELECT t.{seq}::int8 AS seq, \
                    least(lag(t.{seq}::int8, 1, t.{seq}::int8 - 1) OVER (ORDER BY t.{seq}) + 1, \
                          t.{seq}::int8) AS since \
             FROM unnest($1::text::int8multirange) AS part \
                  JOIN {table} AS t ON t.{seq} >= lower(part) AND t.{seq} < upper(part) \
             WHERE {wanted}) AS o LEFT JOIN late ON late.seq = o.seq \
         WHERE NOT $2::text::int8multirange @> o.seq \
         ORDER BY coalesce(late.behind, o.seq), late.id NULLS FIRST, late.place, o.seq",
        wanted = Wanted::sql(source, 3),
        seq = quote_ident(&source.columns.seq),
        table = quote_name(&source.table),
    );
    let Wanted { run, kind, kinds, tenants } = Wanted::new(&job.selection, takes);
    let (seqs, done) = (multirange(&job.seqs), multirange(&job.done));
    let values: [&(dyn ToSql + Sync); 8] =
        [&seqs, &done, &run, &kind, &kinds, &tenants, &relay, &job.destination];
    let opened = client.execute(&sql, &values).await;
    opened.map(drop).map_err(|error| failed("cannot list the events to replay", &error))
}

/// The next numbers of the list, each with the first of those that are done with it.
pub async fn next(client: &Client, most: usize) -> Result<Vec<(i64, i64)>, Failure> {
    let read = async {
        let rows = client.query(&format!("FETCH FORWARD {most} FROM {CURSOR}"), &[]).await?;
        let pair = |row: &tokio_postgres::Row| Ok((row.try_get(0)?, row.try_get(1)?));
        rows.iter().map(pair).collect::<Result<Vec<(i64, i64)>, tokio_postgres::Error>>()
    };
    read.await.map_err(|error| failed("cannot read the list of events to replay", &error))
}

/// The database's clock, microseconds since 1970-01-01 UTC.
pub async fn now(client: &Client) -> Result<i64, Failure> {
    let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8";
    let row = client.query_one(sql, &[]).await;
    row.and_then(|row| row.try_get(0)).map_err(|error| failed("cannot read the clock", &error))
}
