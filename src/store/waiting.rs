//! What was handed over and is not final yet: numbers that wait in the ledger instead of in memory.
//! Reads only.

use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::{Store, failed, unexpected};
use crate::error::Failure;
use crate::event::RunHash;
use crate::lsn::Lsn;

/// One number that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiter {
    /// The number.
    pub seq: i64,
    /// Hash of its run.
    pub run: RunHash,
    /// The WAL read from above this brings it no more.
    pub until: Lsn,
    /// The receipt that handed it over.
    pub receipt_id: i64,
}

/// What [`Store::waiting`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// In the order of their receipts, within a receipt in commit order.
    pub entries: Vec<Waiter>,
    /// The last receipt looked at; the next call goes on after it.
    pub last_id: i64,
    /// There are no later ones.
    pub complete: bool,
}

/// Receipts that are looked at in one go: numbers alone would not bound it when most of the
/// receipts are small.
const RECEIPTS: i64 = 1_000;

// A number is final when a later receipt than the one that handed it over has it, and an earlier
// one says nothing. Later receipts can be hundreds of thousands, so they are read once: each of
// their ranges is cut to the numbers asked for by two binary searches in a sorted array
// (width_bucket: how many elements are at or below). A window and no join puts both together, since
// the planner guesses a few rows, and would loop over one side for each row of the other.
pub(super) const WAITING: &str = "\
    WITH next AS MATERIALIZED ( \
        SELECT r.id, r.last_lsn, r.handed_seqs, r.handed_runs, \
               count(*) OVER counted AS place, sum(r.events) OVER counted AS numbers \
        FROM (SELECT * FROM outbox.receipt \
              WHERE relay = $1::text AND destination = $2::text AND id > $3::int8 \
                AND outcome = 'handed' \
              ORDER BY id LIMIT $5::int8 + 1) AS r \
        WINDOW counted AS (ORDER BY r.id)), \
    batch AS MATERIALIZED ( \
        SELECT * FROM next WHERE place = 1 OR numbers <= $4::int8 AND place <= $5::int8), \
    handed AS MATERIALIZED ( \
        SELECT b.id, b.last_lsn, u.seq, u.run, u.place \
        FROM batch AS b, unnest(b.handed_seqs, b.handed_runs) WITH ORDINALITY AS u (seq, run, place)), \
    asked AS MATERIALIZED (SELECT array_agg(DISTINCT seq ORDER BY seq) AS seqs FROM handed), \
    final AS MATERIALIZED ( \
        SELECT (SELECT seqs FROM asked)[i] AS seq, r.id \
        FROM outbox.receipt AS r, unnest(r.seqs) AS part, \
             generate_series(width_bucket(lower(part) - 1, (SELECT seqs FROM asked)) + 1, \
                             width_bucket(upper(part) - 1, (SELECT seqs FROM asked))) AS i \
        WHERE r.relay = $1::text AND r.destination = $2::text AND r.outcome <> 'handed' \
          AND r.id > (SELECT min(id) FROM batch)), \
    merged AS ( \
        SELECT a.*, max(a.final) OVER (PARTITION BY a.seq) AS settled \
        FROM (SELECT id, last_lsn, seq, run, place, NULL::int8 AS final FROM handed \
              UNION ALL \
              SELECT NULL, NULL, seq, NULL, NULL, id FROM final) AS a), \
    waiting AS MATERIALIZED ( \
        SELECT * FROM merged WHERE id IS NOT NULL AND (settled IS NULL OR settled < id)) \
    SELECT coalesce((SELECT max(id) FROM batch), $3::int8), \
           NOT EXISTS (SELECT FROM next WHERE id > (SELECT max(id) FROM batch)), \
           coalesce(array_agg(w.seq ORDER BY w.id, w.place), '{}'), \
           coalesce(array_agg(w.run ORDER BY w.id, w.place), '{}'), \
           coalesce(array_agg(w.last_lsn ORDER BY w.id, w.place), '{}'), \
           coalesce(array_agg(w.id ORDER BY w.id, w.place), '{}') \
    FROM waiting AS w";

// What a prune or an erasure recorded: there are few of these, and no index by number.
const NOT_GONE: &str = "\
    SELECT asked.seq FROM unnest($3::int8[]) AS asked (seq) \
    WHERE NOT EXISTS (SELECT FROM outbox.receipt AS r \
                      WHERE r.relay = $1::text AND r.destination = $2::text \
                        AND r.outcome = 'gone' AND r.seqs @> asked.seq)";

impl Store {
    /// Those of these numbers that the ledger does not have as gone.
    pub async fn not_gone(
        &self,
        client: &Client,
        destination: &str,
        seqs: &[i64],
    ) -> Result<Vec<i64>, Failure> {
        let read = async {
            let rows = client.query(NOT_GONE, &[&self.relay, &destination, &seqs]).await?;
            rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()
        };
        read.await.map_err(|error| failed("cannot look for rows that went", &error))
    }

    /// What waits for a destination, from the receipts after this one: whole receipts, of about
    /// `limit` numbers together (one receipt at least). Few entries do not mean that it is the
    /// end: what was handed over long ago is final.
    pub async fn waiting(
        &self,
        client: &Client,
        destination: &str,
        after: i64,
        limit: usize,
    ) -> Result<Waiting, Failure> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let read = async {
            let row = client
                .query_one(&self.waiting, &[&self.relay, &destination, &after, &limit, &RECEIPTS])
                .await?;
            let seqs: Vec<i64> = row.try_get(2)?;
            let runs: Vec<i64> = row.try_get(3)?;
            let until: Vec<Option<PgLsn>> = row.try_get(4)?;
            let ids: Vec<i64> = row.try_get(5)?;
            Ok((row.try_get(0)?, row.try_get(1)?, seqs, runs, until, ids))
        };
        let (last_id, complete, seqs, runs, until, ids) =
            read.await.map_err(|error| failed("cannot read what was handed over", &error))?;
        if seqs.len() != runs.len() || seqs.len() != until.len() {
            return Err(unexpected("receipts of handed numbers without their runs"));
        }
        let waiter =
            |(((seq, run), until), receipt_id): (((i64, i64), Option<PgLsn>), i64)| Waiter {
                seq,
                run: RunHash::of_signed(run),
                // A receipt without a position could be about anything that the WAL brings.
                until: until.map_or(Lsn(u64::MAX), |lsn| Lsn(lsn.into())),
                receipt_id,
            };
        let entries = seqs.into_iter().zip(runs).zip(until).zip(ids).map(waiter).collect();
        Ok(Waiting { entries, last_id, complete })
    }
}
