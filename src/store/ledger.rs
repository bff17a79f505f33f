//! The ledger: append-only receipts, one row per destination and flush. Only receipts decide
//! whether an event is done.

use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::sql::{array, multirange, parse_multirange};
use super::{Store, failed, unexpected};
use crate::error::{Failure, Kind};
use crate::event::RunHash;
use crate::lsn::Lsn;
use crate::relay::outcome::{Anchor, Floor};

/// What became of the numbers of a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReceiptOutcome {
    /// In the stream; numbers between that matched no filter of the destination may be listed too.
    Published,
    /// In `outbox.dead_letter`.
    Dead,
    /// Taken by no filter of the destination.
    Unmatched,
    /// The row went away while it was undecided.
    Gone,
    /// Not final: the numbers wait, and the ledger holds them instead of memory. See
    /// [`Store::waiting`].
    Handed,
}

impl ReceiptOutcome {
    /// As stored.
    pub fn as_str(self) -> &'static str {
        match self {
            ReceiptOutcome::Published => "published",
            ReceiptOutcome::Dead => "dead",
            ReceiptOutcome::Unmatched => "unmatched",
            ReceiptOutcome::Gone => "gone",
            ReceiptOutcome::Handed => "handed",
        }
    }
}

/// One row to append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// Name of the destination.
    pub destination: String,
    /// Holds for every number, but for those counted by `unmatched`.
    pub outcome: ReceiptOutcome,
    /// Inclusive ranges of decided (or handed) numbers; empty in a receipt that records a floor
    /// alone.
    pub seqs: Vec<(i64, i64)>,
    /// Of the numbers, those that were decided behind a higher one of their run, in that order, each
    /// with the number behind which it belongs.
    pub late: Vec<(i64, i64)>,
    /// Only of [`ReceiptOutcome::Handed`], else empty: the same numbers in commit order, with the
    /// hashes of their runs.
    pub handed: Vec<(i64, RunHash)>,
    /// How many of the numbers have `outcome`.
    pub events: u64,
    /// How many of the numbers matched no filter (only in a `Published` receipt that lists them so
    /// that its ranges stay contiguous).
    pub unmatched: u64,
    /// Lowest commit LSN of the numbers; `None` when the WAL never showed them.
    pub first_lsn: Option<Lsn>,
    /// Highest commit LSN of the numbers, or a position above it.
    pub last_lsn: Option<Lsn>,
    /// Stream of the destination.
    pub stream: String,
    /// The stream's creation time, as the server writes it.
    pub stream_created: String,
    /// Stream sequence of the last message known to be stored.
    pub stream_seq: u64,
    /// Its message id; empty when none is known, or when the message may be somebody else's.
    pub stream_msg_id: String,
    /// Nothing of ours at or below this stream sequence has an unknown outcome.
    pub floor: u64,
}

/// Numbers that are final at a destination or handed over, merged from many receipts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// Name of the destination.
    pub destination: String,
    /// Handed over, and final since or not; otherwise final.
    pub handed: bool,
    /// Inclusive ranges, ascending, not adjacent.
    pub seqs: Vec<(i64, i64)>,
    /// When the watermark is above this, the WAL brings none of the numbers any more and they may
    /// be forgotten. `None` for numbers that the WAL never showed.
    pub last_lsn: Option<Lsn>,
}

/// The end of the ledger for one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Latest {
    /// Name of the stream at that time.
    pub stream: String,
    /// Where Resume starts; its `created` says in which stream.
    pub floor: Floor,
    /// Stream sequence of the last message known to be stored: a stream that was made at
    /// `floor.created` and ends below lost its tail.
    pub stream_seq: u64,
    /// Its message id.
    pub stream_msg_id: String,
    /// Id of the receipt.
    pub id: i64,
}

impl Latest {
    /// Its message, if it names one.
    pub fn anchor(&self) -> Option<Anchor> {
        let Latest { stream_seq, stream_msg_id, .. } = self;
        (!stream_msg_id.is_empty()).then(|| Anchor { seq: *stream_seq, id: stream_msg_id.clone() })
    }
}

// Arrays of one length each are all that unnest takes apart: lists of numbers go in as text.
pub(super) const APPEND: &str = "\
    INSERT INTO outbox.receipt (relay, generation, destination, outcome, seqs, events, unmatched, \
        first_lsn, last_lsn, stream, stream_created, stream_seq, stream_msg_id, floor_seq, \
        handed_seqs, handed_runs, late_seqs, late_behind) \
    SELECT $1::text, $2::int4, r.destination, r.outcome, r.seqs::int8multirange, r.events, \
        r.unmatched, r.first_lsn, r.last_lsn, r.stream, r.stream_created, r.stream_seq, \
        r.stream_msg_id, r.floor_seq, r.handed_seqs::int8[], r.handed_runs::int8[], \
        r.late_seqs::int8[], r.late_behind::int8[] \
    FROM unnest($3::text[], $4::text[], $5::text[], $6::int4[], $7::int4[], $8::pg_lsn[], \
                $9::pg_lsn[], $10::text[], $11::text[], $12::int8[], $13::text[], $14::int8[], \
                $15::text[], $16::text[], $17::text[], $18::text[]) \
         WITH ORDINALITY AS r (destination, outcome, seqs, events, unmatched, first_lsn, last_lsn, \
                stream, stream_created, stream_seq, stream_msg_id, floor_seq, handed_seqs, \
                handed_runs, late_seqs, late_behind, place) \
    ORDER BY r.place \
    RETURNING id";

// A destination that was down for a day leaves hundreds of thousands of receipts of the others
// above the watermark. The server merges them, so that memory holds their ranges and not their
// rows; by the thousand, so that they can be forgotten bit by bit while the watermark rises.
// (unnest first: range_agg takes multiranges only from PostgreSQL 15 on.)
pub(super) const LOAD: &str = "\
    SELECT destination, range_agg(part)::text, max(last_lsn), handed \
    FROM (SELECT destination, seqs, last_lsn, handed, unseen, \
                 (row_number() OVER (PARTITION BY destination, handed, unseen ORDER BY id) - 1) \
                     / 1000 AS thousand \
          FROM (SELECT id, destination, seqs, last_lsn, outcome = 'handed' AS handed, \
                       last_lsn IS NULL AS unseen \
                FROM outbox.receipt \
                WHERE relay = $1::text AND (last_lsn >= $2::pg_lsn OR last_lsn IS NULL) \
                  AND NOT isempty(seqs)) AS receipt) AS numbered, \
         unnest(seqs) AS part \
    GROUP BY destination, handed, unseen, thousand \
    ORDER BY destination, handed, unseen, thousand";

pub(super) const LATEST: &str = "\
    SELECT stream, stream_created, floor_seq, stream_seq, stream_msg_id, id \
    FROM outbox.receipt \
    WHERE relay = $1::text AND destination = $2::text AND outcome NOT IN ('gone', 'adopted') \
    ORDER BY id DESC LIMIT 1";

const NEWEST: &str = "\
    SELECT greatest(max(upper(seqs)) - 1, max((SELECT max(one) FROM unnest(late_behind) AS one))) \
    FROM outbox.receipt \
    WHERE relay = $1::text AND destination = $2::text AND outcome <> 'handed'";

impl Store {
    /// Appends receipts: one statement, all or none, durable when it returns (see
    /// [`Store::open`]). Only after that may the slot be confirmed beyond their events. Returns
    /// their ids, in order.
    pub async fn append(
        &self,
        client: &Client,
        generation: i32,
        receipts: &[Receipt],
    ) -> Result<Vec<i64>, Failure> {
        if receipts.is_empty() {
            return Ok(Vec::new());
        }
        let each = |part: fn(&Receipt) -> &str| receipts.iter().map(part).collect::<Vec<&str>>();
        let count = |events: u64| i32::try_from(events).unwrap_or(i32::MAX);
        let seqs: Vec<String> = receipts.iter().map(|r| multirange(&r.seqs)).collect();
        let lsn = |lsn: Option<Lsn>| lsn.map(|lsn| PgLsn::from(lsn.0));
        let handed = |part: fn(&(i64, RunHash)) -> i64| {
            let lists = receipts
                .iter()
                .map(|r| (!r.handed.is_empty()).then(|| array(r.handed.iter().map(part))));
            lists.collect::<Vec<Option<String>>>()
        };
        let late = |part: fn(&(i64, i64)) -> i64| {
            let lists = receipts
                .iter()
                .map(|r| (!r.late.is_empty()).then(|| array(r.late.iter().map(part))));
            lists.collect::<Vec<Option<String>>>()
        };
        let result = client
            .query(
                &self.append,
                &[
                    &self.relay,
                    &generation,
                    &each(|r| &r.destination),
                    &each(|r| r.outcome.as_str()),
                    &seqs,
                    &receipts.iter().map(|r| count(r.events)).collect::<Vec<i32>>(),
                    &receipts.iter().map(|r| count(r.unmatched)).collect::<Vec<i32>>(),
                    &receipts.iter().map(|r| lsn(r.first_lsn)).collect::<Vec<_>>(),
                    &receipts.iter().map(|r| lsn(r.last_lsn)).collect::<Vec<_>>(),
                    &each(|r| &r.stream),
                    &each(|r| &r.stream_created),
                    &signed(receipts.iter().map(|r| r.stream_seq))?,
                    &each(|r| &r.stream_msg_id),
                    &signed(receipts.iter().map(|r| r.floor))?,
                    &handed(|(seq, _)| *seq),
                    &handed(|(_, run)| run.signed()),
                    &late(|(seq, _)| *seq),
                    &late(|(_, behind)| *behind),
                ],
            )
            .await;
        result
            .and_then(|rows| rows.iter().map(|row| row.try_get(0)).collect())
            .map_err(|error| failed("cannot append to the ledger", &error))
    }

    /// What is final among the events that the WAL brings again when it is read from `from`, and
    /// what is final that the WAL never showed.
    pub async fn load(&self, client: &Client, from: Lsn) -> Result<Vec<Recorded>, Failure> {
        let rows = client.query(&self.load, &[&self.relay, &PgLsn::from(from.0)]).await;
        let rows = rows.map_err(|error| failed("cannot read the ledger", &error))?;
        let read = |row: &tokio_postgres::Row| {
            let ranges: String = row.try_get(1)?;
            let last_lsn: Option<PgLsn> = row.try_get(2)?;
            let last_lsn = last_lsn.map(|lsn| Lsn(lsn.into()));
            Ok((row.try_get(0)?, ranges, last_lsn, row.try_get(3)?))
        };
        let mut recorded = Vec::with_capacity(rows.len());
        for row in &rows {
            let (destination, ranges, last_lsn, handed) =
                read(row).map_err(|error| failed("cannot read the ledger", &error))?;
            let seqs = parse_multirange(&ranges)
                .ok_or_else(|| unexpected(format_args!("receipt with seqs {ranges}")))?;
            recorded.push(Recorded { destination, handed, seqs, last_lsn });
        }
        Ok(recorded)
    }

    /// The highest number that was decided for a destination, as far as the ledger still has it;
    /// `i64::MIN` when there is none.
    pub async fn highest(&self, client: &Client, destination: &str) -> Result<i64, Failure> {
        let row = client.query_one(NEWEST, &[&self.relay, &destination]).await;
        row.and_then(|row| row.try_get::<_, Option<i64>>(0))
            .map(|newest| newest.unwrap_or(i64::MIN))
            .map_err(|error| failed("cannot read the highest number of the ledger", &error))
    }

    /// The newest receipt of a destination; `None` when nothing was ever recorded for it.
    pub async fn latest(
        &self,
        client: &Client,
        destination: &str,
    ) -> Result<Option<Latest>, Failure> {
        let read = async {
            let row = client.query_opt(&self.latest, &[&self.relay, &destination]).await?;
            let Some(row) = row else { return Ok(None) };
            let (floor, stream_seq): (i64, i64) = (row.try_get(2)?, row.try_get(3)?);
            Ok(Some(Latest {
                stream: row.try_get(0)?,
                floor: Floor { created: row.try_get(1)?, seq: floor.unsigned_abs() },
                stream_seq: stream_seq.unsigned_abs(),
                stream_msg_id: row.try_get(4)?,
                id: row.try_get(5)?,
            }))
        };
        read.await.map_err(|error| failed("cannot read the end of the ledger", &error))
    }
}

/// Stream sequences count from 1 and grow by one: 2^63 is out of reach, but input is input.
fn signed(values: impl Iterator<Item = u64>) -> Result<Vec<i64>, Failure> {
    let signed = values.map(i64::try_from).collect::<Result<_, _>>();
    signed.map_err(|_| Failure::new(Kind::Internal, "a stream sequence is above 2^63"))
}
