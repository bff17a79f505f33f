//! Dead letters as the running relay needs them: what stands in the way at a start, what is to be
//! sent again, and what became of that. Who decides is the operator; here it is carried out.

use std::time::Duration;

use bytes::Bytes;
use tokio_postgres::types::PgLsn;
use tokio_postgres::{Client, Row, Statement};

use super::super::sql::storable;
use super::super::{Store, failed, unexpected};
use super::{CHANNEL, TIME};
use crate::config::SourceConfig;
use crate::error::Failure;
use crate::event::{Event, EventId, Fault, Reason, RunHash, UnixMicros};
use crate::lsn::{Lsn, Position};

/// Letters read at once.
const LETTERS: i64 = 100;

/// Closed letters deleted in one statement.
pub const EXPIRED_AT_ONCE: u64 = 1_000;

/// A letter that is there when a session begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Name of the destination.
    pub destination: String,
    /// Number of the event.
    pub seq: i64,
    /// Its identity, as text.
    pub event_id: String,
    /// Its run.
    pub run_hash: RunHash,
    /// Where it committed.
    pub position: Option<Position>,
    /// Does the run wait behind it now?
    pub blocks: bool,
}

/// A letter to be sent again.
#[derive(Debug, Clone)]
pub struct Again {
    /// Its number.
    pub id: i64,
    /// Name of the destination.
    pub destination: String,
    /// The event, as it was buried.
    pub event: Event,
}

/// A message in the stream that says from which letter it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Number of the letter.
    pub id: i64,
    /// Number of the event.
    pub seq: i64,
    /// Its identity, as text.
    pub event_id: String,
}

/// Prepared with the session's other statements.
#[derive(Debug)]
pub(in crate::store) struct Statements {
    to_send: Statement,
    released: Statement,
    redriven: Statement,
    /// Ids of a uuid column are their own message ids.
    uuid_ids: bool,
}

// What blocks; and what the ledger may not have yet, since a letter is durable before its receipt.
// That is what WAL brings again, and what was buried about when the last receipt was written: the
// events of such a letter are in the next one.
const STANDING: &str = "\
    SELECT destination, seq, event_id, run_hash, commit_lsn, commit_index, \
           blocks_run AND state IN ('buried', 'redriving') \
    FROM outbox.dead_letter AS l LEFT JOIN ( \
         SELECT d.name, (SELECT r.recorded_at FROM outbox.receipt AS r \
                         WHERE r.relay = $1::text AND r.destination = d.name \
                         ORDER BY r.id DESC LIMIT 1) AS recorded_at \
         FROM unnest($3::text[]) AS d (name)) AS newest ON newest.name = l.destination \
    WHERE relay = $1::text AND destination = ANY ($3::text[]) \
      AND ((blocks_run AND state IN ('buried', 'redriving')) OR commit_lsn >= $2::pg_lsn \
           OR coalesce(buried_at > newest.recorded_at - interval '1 hour', true)) \
    ORDER BY id";

// The first letters whose bodies fit together. `octet_length` does not read a body that is stored
// out of line.
const TO_SEND: &str = "\
    SELECT id, destination, seq, event_id, run_id, run_hash, kind, tenant, version, payload, headers, \
           (extract(epoch FROM event_created_at) * 1000000)::int8, commit_lsn, commit_index, reason, \
           detail \
    FROM (SELECT *, sum(coalesce(octet_length(payload), 0)) OVER (ORDER BY id) \
                    - coalesce(octet_length(payload), 0) AS bytes_before \
          FROM outbox.dead_letter \
          WHERE relay = $1::text AND state = 'redriving' AND id <> ALL ($2::int8[]) \
            AND destination = ANY ($5::text[]) \
          ORDER BY id LIMIT $3::int8) AS l \
    WHERE bytes_before < $4::int8 ORDER BY id";

const RELEASED: &str = "\
    SELECT b.place \
    FROM unnest($2::text[], $3::int8[]) WITH ORDINALITY AS b (destination, run_hash, place) \
    WHERE NOT EXISTS ( \
        SELECT FROM outbox.dead_letter AS l \
        WHERE l.relay = $1::text AND l.destination = b.destination AND l.run_hash = b.run_hash \
          AND l.blocks_run AND l.state IN ('buried', 'redriving'))";

/// A change of state by the relay; `$set` and `$where` differ.
const BY_RELAY: &str = "\
    UPDATE outbox.dead_letter AS l \
    SET state = $state, state_changed_at = clock_timestamp(), state_changed_by = 'relay', \
        state_reason = $why, \
        history = l.history || jsonb_build_array(jsonb_build_object( \
            'at', $now, 'state', $state, 'by', 'relay', 'why', $why))$more \
    $where";

fn by_relay(state: &str, why: &str, more: &str, condition: &str) -> String {
    BY_RELAY
        .replace("$state", &format!("'{state}'"))
        .replace("$why", why)
        .replace("$now", &TIME.replace("$time", "clock_timestamp()"))
        .replace("$more", more)
        .replace("$where", condition)
}

/// Is the id column of type uuid?
async fn uuid_ids(client: &Client, source: &SourceConfig) -> Result<bool, tokio_postgres::Error> {
    const SQL: &str = "\
        SELECT EXISTS (SELECT FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid \
                       JOIN pg_namespace n ON n.oid = c.relnamespace \
                       WHERE n.nspname = $1 AND c.relname = $2 AND a.attname = $3 \
                         AND a.atttypid = 'pg_catalog.uuid'::regtype)";
    let SourceConfig { table, columns, .. } = source;
    client.query_one(SQL, &[&table.schema, &table.name, &columns.id]).await?.try_get(0)
}

impl Statements {
    pub(in crate::store) async fn prepare(
        client: &Client,
        source: &SourceConfig,
    ) -> Result<Statements, tokio_postgres::Error> {
        let redriven = by_relay(
            "redriven",
            "'acknowledged by the stream'::text",
            "",
            "WHERE l.relay = $1::text AND l.id = ANY ($2::int8[]) AND l.state <> 'redriven'",
        );
        let listen = format!("LISTEN {CHANNEL}");
        let (to_send, released, redriven, uuid_ids, ()) = tokio::try_join!(
            client.prepare(TO_SEND),
            client.prepare(RELEASED),
            client.prepare(&redriven),
            uuid_ids(client, source),
            client.batch_execute(&listen),
        )?;
        Ok(Statements { to_send, released, redriven, uuid_ids })
    }
}

impl Store {
    /// Letters of these destinations whose events may come again, by the WAL from `from` on or from
    /// the table, and those that a run waits behind.
    pub async fn standing(
        &self,
        client: &Client,
        from: Lsn,
        destinations: &[&str],
    ) -> Result<Vec<Standing>, Failure> {
        let from = PgLsn::from(from.0);
        let read = async {
            let rows = client.query(STANDING, &[&self.relay, &from, &destinations]).await?;
            let read = |row: &Row| {
                Ok(Standing {
                    destination: row.try_get(0)?,
                    seq: row.try_get(1)?,
                    event_id: row.try_get(2)?,
                    run_hash: RunHash(row.try_get::<_, i64>(3)?.cast_unsigned()),
                    position: position(row.try_get(4)?, row.try_get(5)?),
                    blocks: row.try_get(6)?,
                })
            };
            rows.iter().map(read).collect::<Result<Vec<_>, _>>()
        };
        read.await.map_err(|error| failed("cannot read the dead letters", &error))
    }

    /// Letters of these destinations to send again, the oldest first, without those that are under
    /// way; as many as have about so many bytes, and at least one.
    pub async fn to_send_again(
        &self,
        client: &Client,
        destinations: &[String],
        under_way: &[i64],
        max_bytes: usize,
    ) -> Result<Vec<Again>, Failure> {
        let max_bytes = i64::try_from(max_bytes).unwrap_or(i64::MAX);
        let parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)] =
            &[&self.relay, &under_way, &LETTERS, &max_bytes, &destinations];
        let read = async {
            let rows = client.query(&self.again.to_send, parameters).await?;
            rows.iter().map(|row| self.again(row)).collect::<Result<Vec<_>, _>>()
        };
        read.await.map_err(|error| failed("cannot read the dead letters to send again", &error))
    }

    fn again(&self, row: &Row) -> Result<Again, tokio_postgres::Error> {
        let text =
            |at: usize| row.try_get::<_, Option<String>>(at).map(|text| text.map(Bytes::from));
        let (id, event_id): (String, String) = (row.try_get(3)?, row.try_get(3)?);
        let (reason, detail): (String, String) = (row.try_get(14)?, row.try_get(15)?);
        let mut event = Event {
            seq: row.try_get(2)?,
            position: position(row.try_get(12)?, row.try_get(13)?),
            id: event_id_of(id, self.again.uuid_ids),
            run: text(4)?,
            run_hash: RunHash(row.try_get::<_, i64>(5)?.cast_unsigned()),
            kind: text(6)?.unwrap_or_default(),
            tenant: text(7)?,
            version: row.try_get(8)?,
            payload: row.try_get::<_, Option<Vec<u8>>>(9)?.map(Bytes::from),
            headers: text(10)?,
            created_at: row.try_get::<_, Option<i64>>(11)?.map(UnixMicros),
            // It would count as an event that is late since it was buried.
            committed_at: None,
            fault: None,
        };
        event.fault = self.unsendable(&event, &event_id, &reason, detail);
        Ok(Again { id: row.try_get(0)?, destination: row.try_get(1)?, event })
    }

    /// What a letter can't give back: a row that was no message, and text that the database could
    /// not store as it was.
    fn unsendable(&self, event: &Event, id: &str, reason: &str, detail: String) -> Option<Fault> {
        if Reason::named(reason) == Some(Reason::Unmappable) {
            return Some(Fault::new(Reason::Unmappable, detail));
        }
        let texts = [Some(&event.kind), event.run.as_ref(), event.tenant.as_ref()];
        let texts = texts.into_iter().chain([event.headers.as_ref()]).flatten();
        let escaped = texts.map(Event::text).chain([id]).any(|text| text.contains("\\u{"));
        (!self.database_is_utf8 && escaped).then(|| {
            let detail = "the database's encoding could not store its text as it was: write the \
                          event anew";
            Fault::new(Reason::Unmappable, detail)
        })
    }

    /// Which of these blocked runs (destination, run) no open letter blocks any more: their places
    /// in the list.
    pub async fn released(
        &self,
        client: &Client,
        blocked: &[(String, RunHash)],
    ) -> Result<Vec<usize>, Failure> {
        if blocked.is_empty() {
            return Ok(Vec::new());
        }
        let destinations: Vec<&str> = blocked.iter().map(|(name, _)| name.as_str()).collect();
        let runs: Vec<i64> = blocked.iter().map(|(_, run)| run.signed()).collect();
        let rows = client.query(&self.again.released, &[&self.relay, &destinations, &runs]).await;
        let rows = rows.map_err(|error| failed("cannot look for blocked runs", &error))?;
        let place = |row: &Row| {
            let place: i64 = row.try_get(0).map_err(|error| failed("a place", &error))?;
            let place = usize::try_from(place).ok().and_then(|place| place.checked_sub(1));
            place.ok_or_else(|| unexpected("a place that is none"))
        };
        rows.iter().map(place).collect()
    }

    /// These letters are in the stream, by an ack, whatever was decided meanwhile. Must be durable before a receipt is written whose
    /// floor is above their messages: Resume would not see them any more.
    pub async fn redriven(&self, client: &Client, letters: &[i64]) -> Result<(), Failure> {
        if letters.is_empty() {
            return Ok(());
        }
        let written = client.execute(&self.again.redriven, &[&self.relay, &letters]).await;
        written.map(drop).map_err(|error| failed("cannot record what was redriven", &error))
    }

    /// Messages that Resume found and that name their letters: what is in the stream is redriven,
    /// whatever was thought of it. The claims that were news.
    pub async fn found(
        &self,
        client: &Client,
        destination: &str,
        claims: &[Claim],
    ) -> Result<Vec<i64>, Failure> {
        if claims.is_empty() {
            return Ok(Vec::new());
        }
        let sql = by_relay(
            "redriven",
            "'found in the stream'::text",
            "",
            "FROM unnest($3::int8[], $4::int8[], $5::text[]) AS c (id, seq, event_id) \
             WHERE l.relay = $1::text AND l.destination = $2::text AND l.id = c.id \
               AND l.seq = c.seq AND l.event_id = c.event_id AND l.state <> 'redriven' \
             RETURNING l.id",
        );
        let ids: Vec<i64> = claims.iter().map(|claim| claim.id).collect();
        let seqs: Vec<i64> = claims.iter().map(|claim| claim.seq).collect();
        let event_ids: Vec<&str> = claims.iter().map(|claim| claim.event_id.as_str()).collect();
        let write = async {
            let rows =
                client.query(&sql, &[&self.relay, &destination, &ids, &seqs, &event_ids]).await?;
            rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<_>, _>>()
        };
        write.await.map_err(|error| failed("cannot record what was redriven", &error))
    }

    /// A letter was refused for good once more.
    pub async fn bury_again(
        &self,
        client: &Client,
        letter: i64,
        fault: &Fault,
        attempts: u64,
    ) -> Result<(), Failure> {
        let sql = by_relay(
            "buried",
            "$3::text || ': ' || $4::text",
            ", reason = $3::text, detail = $4::text, server_code = $5::int8, \
               attempts = l.attempts + $6::int8",
            "WHERE l.relay = $1::text AND l.id = $2::int8 AND l.state = 'redriving'",
        );
        let detail = storable(&fault.detail, self.database_is_utf8);
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let (code, attempts) = (fault.server_code.map(count), count(attempts));
        let reason = fault.reason.as_str();
        let written =
            client.execute(&sql, &[&self.relay, &letter, &reason, &detail, &code, &attempts]).await;
        written.map(drop).map_err(|error| failed("cannot bury a dead letter again", &error))
    }

    /// Deletes letters that are closed for longer than `retention`, some at a time; how many.
    pub async fn expire_letters(
        &self,
        client: &Client,
        retention: Duration,
    ) -> Result<u64, Failure> {
        const SQL: &str = "\
            DELETE FROM outbox.dead_letter WHERE id IN ( \
                SELECT id FROM outbox.dead_letter \
                WHERE relay = $1::text AND state IN ('redriven', 'discarded') \
                  AND state_changed_at < now() - $2::int8 * interval '1 microsecond' \
                ORDER BY id LIMIT $3::int8 FOR UPDATE SKIP LOCKED)";
        let micros = i64::try_from(retention.as_micros()).unwrap_or(i64::MAX);
        let limit = i64::try_from(EXPIRED_AT_ONCE).unwrap_or(i64::MAX);
        let deleted = client.execute(SQL, &[&self.relay, &micros, &limit]).await;
        deleted.map_err(|error| failed("cannot delete closed dead letters", &error))
    }
}

fn position(lsn: Option<PgLsn>, index: Option<i64>) -> Option<Position> {
    let index = u32::try_from(index?).ok()?;
    Some(Position { commit_lsn: Lsn(lsn?.into()), index })
}

/// An id as the table's column has it; those that are not uuids differ in nothing that is sent.
fn event_id_of(text: String, uuid_ids: bool) -> EventId {
    let uuid = || text.parse().ok().filter(|_| uuid_ids).map(EventId::Uuid);
    let int = || text.parse().ok().filter(|id: &i64| id.to_string() == text).map(EventId::Int);
    uuid().or_else(int).unwrap_or_else(|| EventId::Text(text.as_str().into()))
}
