//! Everything that the database knows about one event: row, receipts, dead letters. Reads only.
//! Receipts have no index by number: each of the relay's is looked at.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio_postgres::types::Json;
use tokio_postgres::{Client, Error};

use super::dead_letters::TIME;
use super::failed;
use super::sql::{quote_ident, quote_name};
use crate::config::{Mark, SourceConfig};
use crate::error::Failure;

/// Its row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Number.
    pub seq: i64,
    /// Identity.
    pub id: Option<String>,
    /// Ordering key.
    pub run: Option<String>,
    /// Kind.
    pub kind: Option<String>,
    /// When the row says it was made.
    pub created_at: Option<String>,
    /// When it committed, where the server keeps that.
    pub committed_at: Option<String>,
}

/// A receipt that has its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Whose.
    pub destination: String,
    /// Its id.
    pub id: i64,
    /// What became of the number; `handed` is not the end of it.
    pub outcome: String,
    /// Lowest commit LSN of the receipt's numbers.
    pub first_lsn: Option<String>,
    /// Highest one.
    pub last_lsn: Option<String>,
    /// When it was written; of a merged one the newest part.
    pub recorded_at: String,
    /// Stream.
    pub stream: String,
    /// When that was made.
    pub stream_created: String,
    /// Last message of the receipt.
    pub stream_seq: u64,
    /// The message is above this: what the receipt before it knew.
    pub above: u64,
    /// The same if the receipt is a merged one.
    pub surely_above: u64,
}

/// A dead letter of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Letter {
    /// Whose.
    pub destination: String,
    /// Its number among the letters.
    pub id: i64,
    /// The event's number.
    pub seq: i64,
    /// The event's identity.
    pub event_id: String,
    /// Where it stands.
    pub state: String,
    /// Why it was buried.
    pub reason: String,
    /// In words.
    pub detail: String,
    /// When it was buried.
    pub buried_at: String,
    /// Position of its commit.
    pub commit_lsn: Option<String>,
}

/// Where the look through the table stands with the number, for one destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Whose.
    pub destination: String,
    /// Up to the frontier and in no hole: decided, whether its receipt is still there or not.
    pub passed: bool,
    /// The destination did not exist when the number was given.
    pub before: bool,
    /// Nothing of ours in the stream at or below this is unknown.
    pub floor: u64,
}

/// Time as every command prints it.
fn time(column: &str) -> String {
    TIME.replace("$time", column)
}

/// Rows of one JSON document each.
fn documents<T: DeserializeOwned>(rows: &[tokio_postgres::Row]) -> Result<Vec<T>, Error> {
    rows.iter().map(|row| row.try_get(0).map(|Json(document)| document)).collect()
}

/// The rows with this number, or with this id.
pub async fn rows(
    client: &Client,
    source: &SourceConfig,
    event: &str,
) -> Result<Vec<Row>, Failure> {
    let columns = &source.columns;
    let created = columns.created_at.as_deref().map_or("NULL::timestamptz".to_owned(), |name| {
        format!("t.{}::timestamptz", quote_ident(name))
    });
    let by = match event.parse::<i64>() {
        Ok(_) => format!("t.{} = $1::text::int8", quote_ident(&columns.seq)),
        Err(_) => format!("t.{}::text = $1::text", quote_ident(&columns.id)),
    };
    let read = async {
        let setting = "SELECT current_setting('track_commit_timestamp')::bool";
        let keeps: bool = client.query_one(setting, &[]).await?.try_get(0)?;
        // A mark is an UPDATE: the row then has the time of the mark.
        let committed = match keeps && source.mark != Mark::Column {
            true => "pg_xact_commit_timestamp(t.xmin)",
            false => "NULL::timestamptz",
        };
        let sql = format!(
            "SELECT jsonb_build_object('seq', t.{seq}::int8, 'id', t.{id}::text, 'run', t.{run}::text, \
                 'kind', t.{kind}::text, 'created_at', {created}, 'committed_at', {committed}) \
             FROM {table} AS t WHERE {by} ORDER BY t.{seq}",
            seq = quote_ident(&columns.seq),
            id = quote_ident(&columns.id),
            run = quote_ident(&columns.run),
            kind = quote_ident(&columns.kind),
            created = time(&created),
            committed = time(committed),
            table = quote_name(&source.table),
        );
        let rows = client.query(&sql, &[&event]).await?;
        documents(&rows)
    };
    read.await.map_err(|error| failed("cannot look for the event's row", &error))
}

/// The receipts that have a number, oldest first.
pub async fn receipts(client: &Client, relay: &str, seq: i64) -> Result<Vec<Receipt>, Failure> {
    // A merged receipt has parts of its five minutes: only what was recorded before these is surely
    // before its messages.
    let before = |which: &str| {
        format!(
            "coalesce((SELECT p.floor_seq FROM outbox.receipt AS p \
                       WHERE p.relay = r.relay AND p.destination = r.destination \
                         AND p.stream_created = r.stream_created AND p.id < r.id {which} \
                       ORDER BY p.id DESC LIMIT 1), 0)"
        )
    };
    let sql = format!(
        "SELECT jsonb_build_object('destination', r.destination, 'id', r.id, 'outcome', r.outcome, \
             'first_lsn', r.first_lsn::text, 'last_lsn', r.last_lsn::text, \
             'recorded_at', {recorded}, 'stream', r.stream, 'stream_created', r.stream_created, \
             'stream_seq', r.stream_seq, 'above', {above}, 'surely_above', {surely}) \
         FROM outbox.receipt AS r \
         WHERE r.relay = $1::text AND r.seqs @> $2::int8 ORDER BY r.id",
        recorded = time("r.recorded_at"),
        above = before(""),
        surely = before("AND p.recorded_at < date_bin('5 minutes', r.recorded_at, 'epoch')"),
    );
    let read = async {
        let rows = client.query(&sql, &[&relay, &seq]).await?;
        documents(&rows)
    };
    read.await.map_err(|error| failed("cannot look through the ledger", &error))
}

/// The dead letters of an event, by its number or its id.
pub async fn letters(client: &Client, relay: &str, event: &str) -> Result<Vec<Letter>, Failure> {
    let sql = format!(
        "SELECT jsonb_build_object('destination', l.destination, 'id', l.id, 'seq', l.seq, \
             'event_id', l.event_id, 'state', l.state, 'reason', l.reason, 'detail', l.detail, \
             'buried_at', {buried}, 'commit_lsn', l.commit_lsn::text) \
         FROM outbox.dead_letter AS l \
         WHERE l.relay = $1::text AND (l.seq = $2::int8 OR l.event_id = $3::text) ORDER BY l.id",
        buried = time("l.buried_at"),
    );
    let seq: Option<i64> = event.parse().ok();
    let id = seq.is_none().then_some(event);
    let read = async {
        let rows = client.query(&sql, &[&relay, &seq, &id]).await?;
        documents(&rows)
    };
    read.await.map_err(|error| failed("cannot look through the dead letters", &error))
}

/// Where each destination stands with a number.
pub async fn standings(client: &Client, relay: &str, seq: i64) -> Result<Vec<Standing>, Failure> {
    const SQL: &str = "\
        SELECT jsonb_build_object('destination', d.name, \
            'passed', $2::int8 <= d.frontier AND NOT d.holes @> $2::int8, \
            'before', $2::int8 <= d.began_after, \
            'floor', coalesce((SELECT r.floor_seq FROM outbox.receipt AS r \
                               WHERE r.relay = d.relay AND r.destination = d.name \
                                 AND r.outcome NOT IN ('gone', 'adopted') \
                               ORDER BY r.id DESC LIMIT 1), 0)) \
        FROM outbox.destination AS d WHERE d.relay = $1::text";
    let read = async {
        let rows = client.query(SQL, &[&relay, &seq]).await?;
        documents(&rows)
    };
    read.await.map_err(|error| failed("cannot read the destinations", &error))
}
