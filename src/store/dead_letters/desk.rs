//! Dead letters as an operator sees them: found by filters, shown whole, redriven or discarded.
//! Changes states and nothing else; the running relay does the sending.

use serde::{Deserialize, Serialize};
use tokio_postgres::Client;
use tokio_postgres::types::Json;

use super::super::failed;
use super::{CHANNEL, TIME};
use crate::error::Failure;

/// Where a letter stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Waits for a decision.
    Buried,
    /// To be sent again by the relay.
    Redriving,
    /// In the stream after all.
    Redriven,
    /// Never to be sent.
    Discarded,
}

impl State {
    /// As stored.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Buried => "buried",
            State::Redriving => "redriving",
            State::Redriven => "redriven",
            State::Discarded => "discarded",
        }
    }
}

/// A point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Microseconds since 1970-01-01 UTC.
    At(i64),
    /// Microseconds before now, by the database's clock.
    Ago(i64),
}

/// Which letters of one relay. What is not given, takes all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Numbers of letters; empty takes all.
    pub ids: Vec<i64>,
    /// States; empty takes all.
    pub states: Vec<State>,
    /// Name of the destination.
    pub destination: Option<String>,
    /// Ordering key.
    pub run: Option<String>,
    /// Kind; `*` stands for any text.
    pub kind: Option<String>,
    /// Reason.
    pub reason: Option<&'static str>,
    /// Buried then or later.
    pub since: Option<When>,
    /// Buried before.
    pub until: Option<When>,
}

/// One letter, without its body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Letter {
    /// Its number.
    pub id: i64,
    /// Where it stands.
    pub state: State,
    /// Name of the destination.
    pub destination: String,
    /// Generation of the database's history.
    pub generation: i32,
    /// The event's number.
    pub seq: i64,
    /// Its identity.
    pub event_id: String,
    /// Ordering key.
    pub run_id: Option<String>,
    /// Kind.
    pub kind: String,
    /// Tenant.
    pub tenant: Option<String>,
    /// Schema version of the payload.
    pub version: Option<i32>,
    /// Size of the body; `null` is a tombstone.
    pub payload_bytes: Option<i64>,
    /// When the row says it was made; times are UTC, as RFC 3339 has them.
    pub event_created_at: Option<String>,
    /// When its transaction committed.
    pub committed_at: Option<String>,
    /// Where the commit record begins; `null` when the WAL did not show the event.
    pub commit_lsn: Option<String>,
    /// Its place in the transaction.
    pub commit_index: Option<i64>,
    /// Which rule it breaks.
    pub reason: String,
    /// What was found, or the server's words.
    pub detail: String,
    /// JetStream's error code.
    pub server_code: Option<i64>,
    /// How often it was sent.
    pub attempts: i64,
    /// Does its run wait behind it while it is open?
    pub blocks_run: bool,
    /// When.
    pub buried_at: String,
    /// When the state changed last; `null` when it never did.
    pub state_changed_at: Option<String>,
    /// Who changed it.
    pub state_changed_by: Option<String>,
    /// Why.
    pub state_reason: Option<String>,
}

/// One state that a letter was in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// When.
    pub at: String,
    /// Into which state.
    pub state: State,
    /// Who did it.
    pub by: String,
    /// Why.
    pub why: String,
}

/// A letter with what the event carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// The letter.
    pub letter: Letter,
    /// The row's own headers, JSON's text.
    pub headers: Option<String>,
    /// The beginning of the body, or all of it.
    pub payload: Option<Vec<u8>>,
    /// Its states, oldest first.
    pub history: Vec<Change>,
}

/// Letters that a filter took, oldest first, and how many more there are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The first ones.
    pub letters: Vec<Letter>,
    /// Left out by the limit.
    pub more: i64,
}

fn letter_columns() -> String {
    let plain = [
        "id",
        "state",
        "destination",
        "generation",
        "seq",
        "event_id",
        "run_id",
        "kind",
        "tenant",
        "version",
        "commit_lsn",
        "commit_index",
        "reason",
        "detail",
        "server_code",
        "attempts",
        "blocks_run",
        "state_changed_by",
        "state_reason",
    ];
    let times = ["event_created_at", "committed_at", "buried_at", "state_changed_at"];
    let plain = plain.iter().map(|name| format!("'{name}', l.{name}"));
    let times = times
        .iter()
        .map(|name| format!("'{name}', {}", TIME.replace("$time", &format!("l.{name}"))));
    let columns: Vec<String> = plain.chain(times).collect();
    format!("jsonb_build_object({}, 'payload_bytes', octet_length(l.payload))", columns.join(", "))
}

/// Parameters $1 to $11.
const WHERE: &str = "\
    l.relay = $1::text \
    AND ($2::int8[] = '{}' OR l.id = ANY ($2::int8[])) \
    AND ($3::text[] = '{}' OR l.state = ANY ($3::text[])) \
    AND coalesce(l.destination = $4::text, true) \
    AND ($5::text IS NULL OR l.run_id IS NOT DISTINCT FROM $5::text) \
    AND coalesce(l.kind LIKE $6::text, true) \
    AND coalesce(l.reason = $7::text, true) \
    AND coalesce(l.buried_at >= coalesce( \
            timestamptz 'epoch' + $8::int8 * interval '1 microsecond', \
            now() - $9::int8 * interval '1 microsecond'), true) \
    AND coalesce(l.buried_at < coalesce( \
            timestamptz 'epoch' + $10::int8 * interval '1 microsecond', \
            now() - $11::int8 * interval '1 microsecond'), true)";

/// A pattern with `*` as LIKE has it.
pub(in crate::store) fn like(pattern: &str) -> String {
    let mut like = String::with_capacity(pattern.len());
    for char in pattern.chars() {
        match char {
            '*' => like.push('%'),
            '%' | '_' | '\\' => like.extend(['\\', char]),
            other => like.push(other),
        }
    }
    like
}

/// The letters that a filter takes: the oldest `limit` of them, and how many more.
pub async fn find(
    client: &Client,
    relay: &str,
    filter: &Filter,
    limit: i64,
) -> Result<Found, Failure> {
    let sql = format!(
        "SELECT {}, count(*) OVER () FROM outbox.dead_letter AS l \
         WHERE {WHERE} ORDER BY l.id LIMIT $12::int8",
        letter_columns()
    );
    let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
    let kind = filter.kind.as_deref().map(like);
    let times = [filter.since, filter.until].map(|when| match when {
        None => (None, None),
        Some(When::At(micros)) => (Some(micros), None),
        Some(When::Ago(micros)) => (None, Some(micros)),
    });
    let [(since, since_ago), (until, until_ago)] = times;
    let read = async {
        let rows = client
            .query(
                &sql,
                &[
                    &relay,
                    &filter.ids,
                    &states,
                    &filter.destination,
                    &filter.run,
                    &kind,
                    &filter.reason,
                    &since,
                    &since_ago,
                    &until,
                    &until_ago,
                    &limit,
                ],
            )
            .await?;
        let mut found = Found::default();
        for row in rows {
            let Json(letter) = row.try_get(0)?;
            found.letters.push(letter);
            found.more = row.try_get(1)?;
        }
        found.more -= i64::try_from(found.letters.len()).unwrap_or(found.more);
        Ok(found)
    };
    read.await.map_err(|error| failed("cannot look into the dead letters", &error))
}

/// One letter whole, with at most so many bytes of its body.
pub async fn show(
    client: &Client,
    relay: &str,
    id: i64,
    payload_bytes: i32,
) -> Result<Option<Contents>, Failure> {
    let sql = format!(
        "SELECT {}, l.headers, substring(l.payload FOR $3::int4), l.history \
         FROM outbox.dead_letter AS l WHERE l.relay = $1::text AND l.id = $2::int8",
        letter_columns()
    );
    let read = async {
        let Some(row) = client.query_opt(&sql, &[&relay, &id, &payload_bytes]).await? else {
            return Ok(None);
        };
        let (Json(letter), Json(history)) = (row.try_get(0)?, row.try_get(3)?);
        let (headers, payload) = (row.try_get(1)?, row.try_get(2)?);
        Ok(Some(Contents { letter, headers, payload, history }))
    };
    read.await.map_err(|error| failed("cannot read the dead letter", &error))
}

/// Moves letters into another state (a discarded one blocks its run never again), those that are still in one of `from`, and tells the running
/// relay; their numbers. `by` is followed by the role of the database, which nobody can choose
/// freely.
pub async fn change(
    client: &Client,
    relay: &str,
    ids: &[i64],
    from: &[State],
    to: State,
    (by, why): (&str, &str),
) -> Result<Vec<i64>, Failure> {
    let sql = format!(
        "UPDATE outbox.dead_letter AS l \
         SET state = $4::text, state_changed_at = clock_timestamp(), state_changed_by = who.name, \
             state_reason = $6::text, \
             blocks_run = l.blocks_run AND $4::text <> 'discarded', \
             history = l.history || jsonb_build_array(jsonb_build_object( \
                 'at', {now}, 'state', $4::text, 'by', who.name, 'why', $6::text)) \
         FROM (SELECT concat_ws(' as ', nullif($5::text, ''), session_user::text) AS name) AS who \
         WHERE l.relay = $1::text AND l.id = ANY ($2::int8[]) AND l.state = ANY ($3::text[]) \
         RETURNING l.id",
        now = TIME.replace("$time", "clock_timestamp()")
    );
    let from: Vec<&str> = from.iter().map(|state| state.as_str()).collect();
    let write = async {
        let rows = client.query(&sql, &[&relay, &ids, &from, &to.as_str(), &by, &why]).await?;
        let mut changed = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()?;
        changed.sort_unstable();
        client.query(&format!("SELECT pg_notify('{CHANNEL}', $1::text)"), &[&relay]).await?;
        Ok(changed)
    };
    write.await.map_err(|error| failed("cannot change the dead letters", &error))
}

/// Where letters stand now.
pub async fn states(client: &Client, ids: &[i64]) -> Result<Vec<(i64, State)>, Failure> {
    const SQL: &str = "SELECT to_jsonb(l.state), l.id FROM outbox.dead_letter AS l \
                       WHERE l.id = ANY ($1::int8[]) ORDER BY l.id";
    let read = async {
        let rows = client.query(SQL, &[&ids]).await?;
        let read = |row: &tokio_postgres::Row| {
            let Json(state) = row.try_get(0)?;
            Ok((row.try_get(1)?, state))
        };
        rows.iter().map(read).collect::<Result<Vec<_>, _>>()
    };
    read.await.map_err(|error| failed("cannot read the state of the dead letters", &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_star_is_a_pattern() {
        assert_eq!(like("order.*"), "order.%");
        assert_eq!(like("50%_a\\b"), "50\\%\\_a\\\\b");
    }
}
