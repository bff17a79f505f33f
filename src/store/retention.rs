//! Rows, partitions and receipts that may go: the statements of retention, each one bounded step in
//! a transaction of its own. What may go is decided in the database, by `migrations/0001_retention.sql`.

use std::time::Duration;

use tokio_postgres::Client;

use super::erase::Batch;
use super::{failed, unexpected};
use crate::config::QualifiedName;
use crate::error::Failure;

/// Rows of one statement.
pub const BATCH_ROWS: i32 = 1_000;
/// Rows that a dry run counts.
pub const DRY_RUN_ROWS: i32 = 1_000_000;
/// Size of the default partition up to which a new partition is attached: some 50 ms of reading,
/// while INSERTs into the default partition wait.
pub const SCAN_BYTES: i64 = 32 << 20;

/// What one step did, or what stands in its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StepKind {
    /// A partition was made.
    Made,
    /// A settled partition was dropped.
    Dropped,
    /// Rows were deleted.
    Deleted,
    /// A lock was not to be had: left for the next pass.
    Busy,
    /// A lock was not to be had, and is tried for again.
    Waiting,
    /// A partition stays, since rows in it are not settled.
    Kept,
    /// A partition can't be made.
    Skipped,
}

impl StepKind {
    fn parse(text: &str) -> Option<StepKind> {
        Some(match text {
            "made" => StepKind::Made,
            "dropped" => StepKind::Dropped,
            "deleted" => StepKind::Deleted,
            "busy" => StepKind::Busy,
            "kept" => StepKind::Kept,
            "skipped" => StepKind::Skipped,
            _ => return None,
        })
    }

    /// As the database and `--json` say it.
    pub fn as_str(self) -> &'static str {
        match self {
            StepKind::Made => "made",
            StepKind::Dropped => "dropped",
            StepKind::Deleted => "deleted",
            StepKind::Busy => "busy",
            StepKind::Waiting => "waiting",
            StepKind::Kept => "kept",
            StepKind::Skipped => "skipped",
        }
    }

    /// Was something done, so that there may be more to do?
    pub fn is_progress(self) -> bool {
        matches!(self, StepKind::Made | StepKind::Dropped | StepKind::Deleted)
    }
}

/// One row of `outbox.maintain()`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Step {
    /// What.
    pub step: StepKind,
    /// With what.
    pub object: String,
    /// Rows that went.
    pub rows: u64,
    /// Of these, undecided at an optional destination; each counts once per destination.
    pub gone: u64,
    /// Why, where something stands in the way.
    pub note: Option<String>,
    /// Where the next batch begins.
    #[serde(skip)]
    pub last_seq: Option<i64>,
}

/// One kind of step that `outbox.maintain()` is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The next partition.
    Make,
    /// The oldest settled partition.
    Drop,
    /// Settled rows of the default partition.
    Delete,
}

impl Wanted {
    fn as_str(self) -> &'static str {
        match self {
            Wanted::Make => "make",
            Wanted::Drop => "drop",
            Wanted::Delete => "delete",
        }
    }
}

/// How `outbox.maintain()` is asked.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// How long rows stay after they are final; `None`: for ever.
    pub keep: Option<Duration>,
    /// How far ahead partitions are made.
    pub ahead: Duration,
    /// Size of the default partition up to which it may be read under a lock.
    pub scan_bytes: i64,
    /// Say what would be done, all of it.
    pub dry_run: bool,
}

const MAINTAIN: &str = "\
    SELECT step, object, row_count, gone, note, last_seq \
    FROM outbox.maintain(make_interval(secs => $1::float8), make_interval(secs => $2::float8), \
                         ARRAY[$3::text], $4::int4, $5::int8, $6::int8, $7::bool)";

/// One step of what is wanted; in a dry run all of them.
pub async fn maintain(
    client: &Client,
    wanted: Wanted,
    bounds: &Bounds,
    after: Option<i64>,
) -> Result<Vec<Step>, Failure> {
    let keep = bounds.keep.map(|keep| keep.as_secs_f64());
    let ahead = bounds.ahead.as_secs_f64();
    let rows = if bounds.dry_run { DRY_RUN_ROWS } else { BATCH_ROWS };
    let (wanted, scan, dry_run) = (wanted.as_str(), bounds.scan_bytes, bounds.dry_run);
    let read = async {
        let rows = client
            .query(MAINTAIN, &[&keep, &ahead, &wanted, &rows, &after, &scan, &dry_run])
            .await?;
        let step = |row: &tokio_postgres::Row| {
            let kind: String = row.try_get(0)?;
            let (rows, gone): (i64, i64) = (row.try_get(2)?, row.try_get(3)?);
            Ok((kind, row.try_get(1)?, rows, gone, row.try_get(4)?, row.try_get(5)?))
        };
        rows.iter().map(step).collect::<Result<Vec<_>, tokio_postgres::Error>>()
    };
    let steps = read.await.map_err(|error| failed("cannot maintain the outbox table", &error))?;
    let step = |(kind, object, rows, gone, note, last_seq): (String, _, i64, i64, _, _)| {
        let step = StepKind::parse(&kind).ok_or_else(|| unexpected(format_args!("step {kind}")))?;
        let (rows, gone) = (rows.unsigned_abs(), gone.unsigned_abs());
        Ok(Step { step, object, rows, gone, note, last_seq })
    };
    steps.into_iter().map(step).collect()
}

const PRUNE_ROWS: &str = "\
    SELECT row_count, gone, last_seq \
    FROM outbox.prune_rows($1::text, make_interval(secs => $2::float8), $3::int4, $4::int8, \
                           dry_run => $5::bool)";

/// Deletes the next batch of settled rows of a table that is not `outbox.event`, with this role's
/// own rights. No step when there was none.
pub async fn prune_rows(
    client: &Client,
    table: &QualifiedName,
    bounds: &Bounds,
    after: Option<i64>,
) -> Result<Vec<Step>, Failure> {
    let object = super::identity::table_name(table);
    let keep = bounds.keep.map(|keep| keep.as_secs_f64());
    let rows = if bounds.dry_run { DRY_RUN_ROWS } else { BATCH_ROWS };
    let read = async {
        let dry_run = &bounds.dry_run;
        let row = client.query_one(PRUNE_ROWS, &[&object, &keep, &rows, &after, dry_run]).await?;
        Batch::of(&row)
    };
    let Batch { rows, gone, last_seq } =
        read.await.map_err(|error| failed("cannot delete rows", &error))?;
    let step = Step { step: StepKind::Deleted, object, rows, gone, note: None, last_seq };
    Ok(if last_seq.is_some() { vec![step] } else { Vec::new() })
}

/// What one call of `outbox.compact()` came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Receipts merged into others.
    pub merged: u64,
    /// Receipts deleted.
    pub deleted: u64,
    /// Where the next call begins; `None` when there is none.
    pub next: Option<(String, i64)>,
}

const COMPACT: &str = "\
    SELECT merged, deleted, last_destination, last_id \
    FROM outbox.compact($1::text, $2::text, make_interval(secs => $3::float8), \
                        after_destination => $4::text, after_id => $5::int8)";

/// Compacts the next receipts of a relay. `after`: what the call before returned.
pub async fn compact(
    client: &Client,
    relay: &str,
    slot: &str,
    keep: Option<Duration>,
    after: Option<&(String, i64)>,
) -> Result<Compacted, Failure> {
    let (destination, id) = after.map_or(("", 0), |(destination, id)| (destination, *id));
    let keep = keep.map(|keep| keep.as_secs_f64());
    let read = async {
        let row = client.query_one(COMPACT, &[&relay, &slot, &keep, &destination, &id]).await?;
        let (merged, deleted): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let (destination, id): (Option<String>, Option<i64>) = (row.try_get(2)?, row.try_get(3)?);
        Ok(Compacted {
            merged: merged.unsigned_abs(),
            deleted: deleted.unsigned_abs(),
            next: destination.zip(id),
        })
    };
    read.await.map_err(|error| failed("cannot compact the ledger", &error))
}
