//! The statements of a sweep: up to which number everything is decided in the database, which of
//! those numbers have a row and no receipt, and the marker that the WAL brings back. Reads only,
//! but for the marker.

use std::time::Duration;

use tokio_postgres::types::{PgLsn, ToSql};
use tokio_postgres::{Client, Statement};

use super::destinations::Progress;
use super::shape::SEQUENCE_OF;
use super::sql::{multirange, parse_multirange, quote_ident, quote_name};
use super::{Store, failed, unexpected};
use crate::config::SourceConfig;
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;

/// A number, and who may still commit or take back rows up to it.
///
/// When all of `open` have ended, a snapshot taken after that sees every row up to `last` that will
/// ever exist: an INSERT takes its lock on the table before it draws a number, and keeps it until
/// its transaction's end, when the row is visible or never will be. (A rule by transaction id would
/// be wrong: drawing a number takes no id.)
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontierMark {
    /// The sequence's last value.
    pub last: i64,
    /// Transactions, as pg_locks names them (`virtualtransaction`), prepared ones too.
    pub open: Vec<String>,
}

/// What a look at the table found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Numbers that have a row and no receipt, ascending.
    pub undecided: Vec<i64>,
    /// Inclusive ranges of numbers without a receipt, with or without a row, ascending; those that
    /// memory has are left out.
    pub open: Vec<(i64, i64)>,
    /// The look went up to this number: no receipt that it saw is about a higher one.
    pub to: i64,
    /// Of the numbers that memory has, those without a receipt: one may have come after memory was
    /// asked.
    pub held: Vec<(i64, i64)>,
    /// All undecided numbers up to this one are among them.
    pub covered_to: i64,
    /// The newest receipt that the look has taken into account.
    pub receipt_id: i64,
}

/// How often it is looked whether a transaction has ended.
const OPEN_EVERY: Duration = Duration::from_millis(200);

/// Prefix of our logical messages.
pub const MARKER_PREFIX: &str = "outboxd";

/// First word of a marker's content.
const MARKER_WORD: &str = "marker";
/// First word of a request to look through the table now.
const SWEEP_WORD: &str = "sweep";

/// The sequence (as text), whether this role may read it, and its last value. One that has given no
/// number since it was set may stand above numbers that it gave before: then the highest row says.
fn last_sql(source: &SourceConfig) -> String {
    format!(
        "WITH q AS MATERIALIZED ( \
             SELECT {SEQUENCE_OF} AS oid \
             FROM pg_class c JOIN pg_attribute s ON s.attrelid = c.oid \
             WHERE c.oid = $1::text::regclass AND s.attname = $2::text), \
         p AS MATERIALIZED ( \
             SELECT q.oid, has_sequence_privilege(q.oid, 'USAGE, SELECT') AS readable FROM q) \
         SELECT p.oid::regclass::text, coalesce(p.readable, false), \
                CASE WHEN p.readable \
                     THEN coalesce(pg_sequence_last_value(p.oid), \
                                   (SELECT max(t.{seq})::int8 FROM {table} AS t), 0) END \
         FROM p",
        seq = quote_ident(&source.columns.seq),
        table = quote_name(&source.table),
    )
}

// Every lock that lets one write, not only an INSERT's: whoever holds a stronger one may have
// inserted under it. Not those of VACUUM and CREATE INDEX, which last for hours and write no row. A
// lock that is only waited for hides nobody: numbers are drawn under the lock.
const WRITERS: &str = "\
    WITH RECURSIVE tree AS ( \
        SELECT $1::text::regclass::oid AS oid \
        UNION SELECT i.inhrelid FROM pg_inherits AS i JOIN tree ON i.inhparent = tree.oid) \
    SELECT DISTINCT l.virtualtransaction \
    FROM pg_locks AS l JOIN tree ON tree.oid = l.relation \
    WHERE l.locktype = 'relation' AND l.granted \
      AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', \
                     'AccessExclusiveLock') \
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
      AND l.pid IS DISTINCT FROM pg_backend_pid() \
    ORDER BY 1";

/// The look: relay, destination, receipt id, holes, frontier, `to`, held ranges, limit.
///
/// One statement, hence one snapshot: a row that is seen while its receipt is not would be sent
/// again. Numbers handed over since the frontier wait already and are left out with the final ones;
/// older ones are in no hole.
///
/// The cost must not depend on how many rows are retained. Ranges come up in ascending order, each
/// is looked up by the index on the number, and reading ends at the limit: that is a nested loop
/// over ordered index scans, and the caller sees to it that nothing is sorted (see [`Store::look`]).
pub fn look_sql(source: &SourceConfig) -> String {
    format!(
        "WITH later AS MATERIALIZED ( \
             SELECT r.id, r.seqs FROM outbox.receipt AS r \
             WHERE r.relay = $1::text AND r.destination = $2::text AND r.id > $3::int8 \
             ORDER BY r.id), \
         upto AS MATERIALIZED ( \
             SELECT greatest($5::int8, $6::int8, \
                             (SELECT max(upper(later.seqs)) - 1 FROM later)) AS number), \
         unrecorded AS MATERIALIZED ( \
             SELECT $4::text::int8multirange \
                  + int8multirange(int8range($5::int8, (SELECT number FROM upto), '(]')) \
                  - coalesce((SELECT range_agg(part) FROM later, unnest(later.seqs) AS part), '{{}}') \
                  AS ranges), \
         open AS MATERIALIZED ( \
             SELECT u.ranges - $7::text::int8multirange AS ranges FROM unrecorded AS u) \
         SELECT coalesce((SELECT max(later.id) FROM later), $3::int8), \
                (SELECT number FROM upto), (SELECT open.ranges::text FROM open), \
                (SELECT (u.ranges * $7::text::int8multirange)::text FROM unrecorded AS u), \
                ARRAY(SELECT found.seq \
                      FROM open, unnest(open.ranges) AS part, LATERAL ( \
                           SELECT t.{seq}::int8 AS seq FROM {table} AS t \
                           WHERE t.{seq} >= lower(part) AND t.{seq} < upper(part) \
                           ORDER BY t.{seq} LIMIT $8::int8) AS found \
                      LIMIT $8::int8)",
        seq = quote_ident(&source.columns.seq),
        table = quote_name(&source.table),
    )
}

/// Around the look. The planner knows nothing of the ranges, and for a table that was never
/// analyzed it would rather read all of a range and sort it than walk the index up to the limit.
pub const BEFORE_LOOK: &str = "SET enable_sort = off";
/// Undoes [`BEFORE_LOOK`].
pub const AFTER_LOOK: &str = "RESET enable_sort";

// bytea, so that no encoding of the database changes it.
const MARKER: &str = "SELECT pg_logical_emit_message(true, $1::text, $2::bytea)";
// Not transactional: nothing of the database hangs on it.
const ASK: &str = "SELECT pg_logical_emit_message(false, $1::text, $2::bytea)";

/// The statements of this file.
#[derive(Debug)]
pub(super) struct Statements {
    table: String,
    seq: String,
    last: Statement,
    writers: Statement,
    look: Statement,
    marker: Statement,
}

impl Statements {
    pub(super) async fn prepare(
        client: &Client,
        source: &SourceConfig,
    ) -> Result<Statements, tokio_postgres::Error> {
        let (last, look) = (last_sql(source), look_sql(source));
        let (last, writers, look, marker) = tokio::try_join!(
            client.prepare(&last),
            client.prepare(WRITERS),
            client.prepare(&look),
            client.prepare(MARKER),
        )?;
        let (table, seq) = (quote_name(&source.table), source.columns.seq.clone());
        Ok(Statements { table, seq, last, writers, look, marker })
    }
}

impl Store {
    /// The last number that the sequence gave; 0 when it gave none.
    pub async fn last_number(&self, client: &Client) -> Result<i64, Failure> {
        let Statements { table, seq, last, .. } = &self.sweep;
        let read = async {
            let row = client.query_opt(last, &[table, seq]).await?;
            let Some(row) = row else { return Ok((None, false, None)) };
            Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))
        };
        let read = read.await.map_err(|error| failed("cannot read the outbox's sequence", &error));
        let (sequence, readable, last): (Option<String>, bool, Option<i64>) = read?;
        let Some(sequence) = sequence else {
            let detail = format!("column {seq} of {table} draws from no sequence");
            return Err(Failure::new(Kind::TableShape, detail));
        };
        if !readable {
            let detail = format!("this role may not read sequence {sequence}: GRANT SELECT on it");
            return Err(Failure::new(Kind::Privilege, detail));
        }
        last.ok_or_else(|| unexpected(format_args!("no last value of sequence {sequence}")))
    }

    /// The sequence's last value, and *after* that who holds a lock under which rows are written.
    pub async fn mark_frontier(&self, client: &Client) -> Result<FrontierMark, Failure> {
        // Two statements, one after the other: whoever draws a number up to `last` later than the
        // first had its lock before the second.
        let last = self.last_number(client).await?;
        Ok(FrontierMark { last, open: self.writers(client).await? })
    }

    /// Which of the transactions of a [`FrontierMark`] have not ended.
    pub async fn still_open(
        &self,
        client: &Client,
        open: &[String],
    ) -> Result<Vec<String>, Failure> {
        let writers = self.writers(client).await?;
        Ok(open.iter().filter(|one| writers.contains(one)).cloned().collect())
    }

    /// Waits until all of them have ended.
    pub async fn all_ended(&self, client: &Client, mut open: Vec<String>) -> Result<(), Failure> {
        while !open.is_empty() {
            tokio::time::sleep(OPEN_EVERY).await;
            open = self.still_open(client, &open).await?;
        }
        Ok(())
    }

    async fn writers(&self, client: &Client) -> Result<Vec<String>, Failure> {
        let read = async {
            let rows = client.query(&self.sweep.writers, &[&self.sweep.table]).await?;
            rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()
        };
        read.await.map_err(|error| failed("cannot see who writes to the outbox", &error))
    }

    /// Which numbers above the frontier up to `to`, and which of the holes, have a row and no
    /// receipt. Those that memory holds are left out. At most `limit` numbers.
    pub async fn look(
        &self,
        client: &Client,
        progress: &Progress,
        to: i64,
        held: &[(i64, i64)],
        limit: usize,
    ) -> Result<Look, Failure> {
        let limit = i64::try_from(limit.max(1)).unwrap_or(i64::MAX);
        let (holes, held) = (multirange(&progress.holes), multirange(held));
        let Progress { name, frontier, receipt_id, .. } = progress;
        let values: [&(dyn ToSql + Sync); 8] =
            [&self.relay, name, receipt_id, &holes, frontier, &to, &held, &limit];
        // Sent at once and answered in this order: one round trip. What others ask between the
        // three is planned without sorts, which is no harm; a transaction would catch it.
        let read = async {
            let ((), row, ()) = tokio::try_join!(
                client.batch_execute(BEFORE_LOOK),
                client.query_one(&self.sweep.look, &values),
                client.batch_execute(AFTER_LOOK),
            )?;
            let ranges: [String; 2] = [row.try_get(2)?, row.try_get(3)?];
            Ok((row.try_get(0)?, row.try_get(1)?, ranges, row.try_get(4)?))
        };
        let (receipt_id, to, ranges, undecided): (i64, i64, [String; 2], Vec<i64>) =
            read.await.map_err(|error| failed("cannot look for undecided rows", &error))?;
        let parse = |ranges: &String| {
            parse_multirange(ranges).ok_or_else(|| unexpected(format_args!("numbers {ranges}")))
        };
        let [open, held] = ranges.each_ref().map(parse);
        let (open, held) = (open?, held?);
        if !undecided.is_sorted() {
            return Err(unexpected("undecided numbers that do not ascend"));
        }
        let full = i64::try_from(undecided.len()).is_ok_and(|found| found >= limit);
        let covered_to = undecided.last().copied().filter(|_| full).unwrap_or(to);
        Ok(Look { undecided, open, held, to, covered_to, receipt_id })
    }

    /// Commits a message that the WAL brings back, durably. Returns a position above the commits
    /// of all that a snapshot taken before has seen. The token must have no blank in it.
    pub async fn marker(&self, client: &Client, token: &str) -> Result<Lsn, Failure> {
        let content = format!("{MARKER_WORD} {} {token}", self.relay).into_bytes();
        let row = client.query_one(&self.sweep.marker, &[&MARKER_PREFIX, &content]).await;
        row.and_then(|row| row.try_get::<_, PgLsn>(0))
            .map(|lsn| Lsn(lsn.into()))
            .map_err(|error| failed("cannot write a marker", &error))
    }
}

impl Store {
    /// Asks the running relay, by its WAL, to look through the table now.
    pub async fn ask_for_sweep(&self, client: &Client) -> Result<(), Failure> {
        let content = format!("{SWEEP_WORD} {}", self.relay).into_bytes();
        let asked = client.query_one(ASK, &[&MARKER_PREFIX, &content]).await;
        asked.map(drop).map_err(|error| failed("cannot ask for a sweep", &error))
    }
}

/// The relay that is asked to look through the table; `None` for any other logical message.
pub fn parse_request<'a>(prefix: &str, content: &'a [u8]) -> Option<&'a str> {
    let text = str::from_utf8(content).ok().filter(|_| prefix == MARKER_PREFIX)?;
    text.strip_prefix(SWEEP_WORD)?.strip_prefix(' ')
}

/// Relay and token of a marker; `None` for any other logical message.
pub fn parse_marker<'a>(prefix: &str, content: &'a [u8]) -> Option<(&'a str, &'a str)> {
    if prefix != MARKER_PREFIX {
        return None;
    }
    let rest = str::from_utf8(content).ok()?.strip_prefix(MARKER_WORD)?.strip_prefix(' ')?;
    rest.rsplit_once(' ').filter(|(relay, token)| !relay.is_empty() && !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_markers_are_parsed() {
        let parse = |content: &'static str| parse_marker("outboxd", content.as_bytes());
        assert_eq!(parse("marker orders 7-1"), Some(("orders", "7-1")));
        assert_eq!(parse("marker a b 1"), Some(("a b", "1")));
        for other in ["", "marker", "marker ", "marker x", "marker x ", "marker  1", "else a b"] {
            assert_eq!(parse(other), None, "{other:?}");
        }
        assert_eq!(parse_marker("other", b"marker orders 1"), None);
        assert_eq!(parse_marker("outboxd", b"marker \xff 1"), None);
        assert_eq!(parse_request("outboxd", b"sweep a b"), Some("a b"));
        assert_eq!(parse_request("outboxd", b"marker a 1"), None);
        assert_eq!(parse_request("other", b"sweep a"), None);
    }
}
