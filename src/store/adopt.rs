//! What another relay of the same table did, taken into the ledger: rows that it marked as published
//! are decided, the others are to be sent. Run between the two relays; changes the ledger alone.

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

use super::failed;
use super::sql::{quote_ident, quote_name};
use crate::config::SourceConfig;
use crate::error::Failure;

/// What there is to adopt, and what is left to send.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Adopted {
    /// For each destination: where its next look through the table begins, and how many rows behind
    /// that are taken as published.
    pub destinations: Vec<(String, i64, i64)>,
    /// Rows without a mark: they will be sent.
    pub open: i64,
    /// Lowest and highest number of these.
    pub open_seqs: Option<(i64, i64)>,
    /// Of these, rows without a number: they can't be sent.
    pub unnumbered: i64,
}

/// A session that has rows of the table locked, or is about to: pid, and its name for a person.
pub async fn holders(
    client: &Client,
    source: &SourceConfig,
) -> Result<Vec<(i32, String)>, Failure> {
    // SELECT … FOR UPDATE takes RowShareLock; an INSERT does not.
    const HOLDERS: &str = "\
        WITH RECURSIVE tree AS ( \
            SELECT $1::text::regclass::oid AS oid \
            UNION SELECT i.inhrelid FROM pg_inherits AS i JOIN tree ON i.inhparent = tree.oid) \
        SELECT DISTINCT l.pid, coalesce(nullif(a.application_name, ''), 'a session') \
                               || coalesce(' of ' || a.usename, '') \
        FROM pg_locks AS l JOIN tree ON tree.oid = l.relation \
             LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid \
        WHERE l.locktype = 'relation' AND l.mode = 'RowShareLock' AND l.pid IS NOT NULL \
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
          AND l.pid <> pg_backend_pid() \
        ORDER BY 1";
    let read = async {
        let rows = client.query(HOLDERS, &[&quote_name(&source.table)]).await?;
        let holder = |row: &Row| Ok((row.try_get(0)?, row.try_get(1)?));
        rows.iter().map(holder).collect::<Result<Vec<_>, tokio_postgres::Error>>()
    };
    read.await.map_err(|error| failed("cannot see who has rows of the table locked", &error))
}

/// Adopts, or with `dry_run` only says what it would. Every transaction must have ended that could
/// still commit a row up to `proven`: a number without a row up to there is void.
///
/// A destination that never decided anything is looked through from below its first open row. One
/// that did keeps its place: what it has decided must not be looked at again.
pub async fn adopt(
    client: &Client,
    relay: &str,
    source: &SourceConfig,
    generation: i32,
    proven: i64,
    dry_run: bool,
) -> Result<Adopted, Failure> {
    let work = async {
        // One snapshot for all.
        client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
        let adopted = within(client, relay, source, generation, proven).await?;
        client.batch_execute(if dry_run { "ROLLBACK" } else { "COMMIT" }).await?;
        Ok(adopted)
    };
    let worked = work.await;
    if worked.is_err() {
        // The error that is told is the first one; the connection ends with the command.
        client.batch_execute("ROLLBACK").await.unwrap_or_default();
    }
    worked.map_err(|error| failed("cannot adopt what another relay published", &error))
}

async fn within(
    client: &Client,
    relay: &str,
    source: &SourceConfig,
    generation: i32,
    proven: i64,
) -> Result<Adopted, tokio_postgres::Error> {
    let (table, seq) = (quote_name(&source.table), quote_ident(&source.columns.seq));
    let mark = quote_ident(&source.columns.published_at);
    let open = format!(
        "SELECT count(*), count(*) FILTER (WHERE t.{seq} IS NULL), min(t.{seq}), max(t.{seq}) \
         FROM {table} AS t WHERE t.{mark} IS NULL"
    );
    let row = client.query_one(&open, &[]).await?;
    let (first, last): (Option<i64>, Option<i64>) = (row.try_get(2)?, row.try_get(3)?);
    let mut adopted = Adopted {
        destinations: Vec::new(),
        open: row.try_get(0)?,
        open_seqs: first.zip(last),
        unnumbered: row.try_get(1)?,
    };
    let below = first.map_or(proven, |first| first.saturating_sub(1)).min(proven);
    let receipts = format!(
        "INSERT INTO outbox.receipt (relay, destination, generation, outcome, seqs, events, \
             last_lsn, stream, stream_created, stream_seq, stream_msg_id, floor_seq) \
         SELECT $1::text, $2::text, $3::int4, 'adopted', \
                range_agg(int8range(t.{seq}, t.{seq}, '[]')), count(*)::int4, \
                pg_current_wal_insert_lsn(), '', '', 0, '', 0 \
         FROM {table} AS t WHERE t.{mark} IS NOT NULL AND t.{seq} > $4::int8 \
         GROUP BY t.{seq} / 1000000 RETURNING events"
    );
    client.execute(OPEN_GAPS, &[&relay]).await?;
    for row in client.query(DESTINATIONS, &[&relay, &below]).await? {
        let (name, from): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
        let values: [&(dyn ToSql + Sync); 4] = [&relay, &name, &generation, &from];
        let mut rows: i64 = 0;
        for receipt in client.query(&receipts, &values).await? {
            rows += i64::from(receipt.try_get::<_, i32>(0)?);
        }
        client.execute(MOVE, &[&relay, &name, &from]).await?;
        adopted.destinations.push((name, from, rows));
    }
    Ok(adopted)
}

/// Name, and the number behind which rows are looked at: for one that decided something, the number
/// below its first hole.
const DESTINATIONS: &str = "\
    SELECT d.name, least(d.frontier, CASE WHEN ran.it THEN lower(d.holes) - 1 ELSE $2::int8 END) \
    FROM outbox.destination AS d, LATERAL ( \
         SELECT EXISTS (SELECT FROM outbox.receipt AS r \
                        WHERE r.relay = d.relay AND r.destination = d.name \
                          AND r.outcome <> 'adopted' AND NOT isempty(r.seqs)) AS it) AS ran \
    WHERE d.relay = $1::text AND d.active ORDER BY d.name";

// What no slot brings is sent first, in the order of the numbers, as the other relay would have: that
// is what a gap means. Rows behind the slot's position follow in the order of their commits.
const OPEN_GAPS: &str = "\
    SELECT outbox.open_gap(d.relay, d.name) FROM outbox.destination AS d \
    WHERE d.relay = $1::text AND d.active";

const MOVE: &str = "\
    UPDATE outbox.destination AS d \
    SET frontier = CASE WHEN ran.it THEN d.frontier ELSE $3::int8 END, \
        holes = CASE WHEN ran.it THEN d.holes ELSE '{}' END, \
        began_after = least(d.began_after, $3::int8), \
        updated_at = now() \
    FROM (SELECT EXISTS (SELECT FROM outbox.receipt AS r \
                         WHERE r.relay = $1::text AND r.destination = $2::text \
                           AND r.outcome <> 'adopted' AND NOT isempty(r.seqs)) AS it) AS ran \
    WHERE d.relay = $1::text AND d.name = $2::text";
