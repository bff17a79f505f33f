//! Events that can never be published, buried with all that is needed to decide about them. Here:
//! the burial; [`desk`] is what an operator does with them, [`overtaken`] what he should know
//! before, [`again`] what the relay does with what was decided.

pub mod again;
pub mod desk;
pub mod overtaken;

use std::sync::Arc;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::sql::storable;
use super::{Store, failed};
use crate::error::Failure;
use crate::event::{Event, Reason, UnixMicros};

/// One event that a destination will never get.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// Name of the destination.
    pub destination: String,
    /// The event.
    pub event: Arc<Event>,
    /// Which rule it breaks.
    pub reason: Reason,
    /// What was found, or the server's words.
    pub detail: String,
    /// JetStream's error code when the server refused it.
    pub server_code: Option<u64>,
    /// How often it was sent.
    pub attempts: u64,
    /// Does the event's run wait until the letter is redriven or discarded?
    pub blocks_run: bool,
}

/// Commands notify relays here that states were changed.
pub(super) const CHANNEL: &str = "outboxd_dead_letters";

/// A time as RFC 3339 has it, in UTC, whatever the session's settings are.
pub(in crate::store) const TIME: &str =
    "to_char($time AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')";

pub(super) const BURY: &str = "\
    INSERT INTO outbox.dead_letter (relay, generation, destination, seq, event_id, run_id, run_hash, \
        kind, tenant, version, payload, headers, event_created_at, committed_at, commit_lsn, \
        commit_index, reason, detail, server_code, attempts, blocks_run, history) \
    SELECT $1::text, $2::int4, l.destination, l.seq, l.event_id, l.run_id, l.run_hash, l.kind, \
        l.tenant, l.version, l.payload, l.headers, \
        timestamptz 'epoch' + l.created_at * interval '1 microsecond', \
        timestamptz 'epoch' + l.committed_at * interval '1 microsecond', \
        l.commit_lsn, l.commit_index, l.reason, l.detail, l.server_code, l.attempts, \
        l.blocks_run, jsonb_build_array(jsonb_build_object( \
            'at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'), \
            'state', 'buried', 'by', 'relay', 'why', l.reason || ': ' || l.detail)) \
    FROM unnest($3::text[], $4::int8[], $5::text[], $6::text[], $7::text[], $8::text[], \
                $9::int4[], $10::bytea[], $11::text[], $12::int8[], $13::int8[], $14::pg_lsn[], \
                $15::int8[], $16::text[], $17::text[], $18::int8[], $19::int8[], $20::int8[], \
                $21::bool[]) \
         WITH ORDINALITY AS l (destination, seq, event_id, run_id, kind, tenant, version, payload, \
                headers, created_at, committed_at, commit_lsn, commit_index, reason, detail, \
                server_code, attempts, run_hash, blocks_run, place) \
    ORDER BY l.place \
    ON CONFLICT (relay, destination, seq, event_id) DO NOTHING";

impl Store {
    /// Buries events: one statement, durable when it returns, and only then may they count as
    /// decided. Burying one again changes nothing. Says how many were new.
    pub async fn bury(
        &self,
        client: &Client,
        generation: i32,
        letters: &[DeadLetter],
    ) -> Result<u64, Failure> {
        if letters.is_empty() {
            return Ok(0);
        }
        let text = |bytes: &[u8]| storable(&String::from_utf8_lossy(bytes), self.database_is_utf8);
        let each = |part: &dyn Fn(&Event) -> Option<String>| {
            letters.iter().map(|letter| part(&letter.event)).collect::<Vec<_>>()
        };
        let count = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let position = |event: &Event| event.position;
        let result = client
            .execute(
                &self.bury,
                &[
                    &self.relay,
                    &generation,
                    &letters.iter().map(|l| l.destination.as_str()).collect::<Vec<_>>(),
                    &letters.iter().map(|l| l.event.seq).collect::<Vec<_>>(),
                    &each(&|e| Some(text(e.id.to_string().as_bytes()))),
                    &each(&|e| e.run.as_deref().map(text)),
                    &each(&|e| Some(text(&e.kind))),
                    &each(&|e| e.tenant.as_deref().map(text)),
                    &letters.iter().map(|l| l.event.version).collect::<Vec<_>>(),
                    &letters.iter().map(|l| l.event.payload.as_deref()).collect::<Vec<_>>(),
                    &each(&|e| e.headers.as_deref().map(text)),
                    &letters.iter().map(|l| micros(l.event.created_at)).collect::<Vec<_>>(),
                    &letters.iter().map(|l| micros(l.event.committed_at)).collect::<Vec<_>>(),
                    &letters
                        .iter()
                        .map(|l| position(&l.event).map(|p| PgLsn::from(p.commit_lsn.0)))
                        .collect::<Vec<_>>(),
                    &letters
                        .iter()
                        .map(|l| position(&l.event).map(|p| i64::from(p.index)))
                        .collect::<Vec<_>>(),
                    &letters.iter().map(|l| l.reason.as_str()).collect::<Vec<_>>(),
                    &letters.iter().map(|l| text(l.detail.as_bytes())).collect::<Vec<_>>(),
                    &letters.iter().map(|l| l.server_code.map(count)).collect::<Vec<_>>(),
                    &letters.iter().map(|l| count(l.attempts)).collect::<Vec<_>>(),
                    &letters.iter().map(|l| l.event.run_hash.signed()).collect::<Vec<_>>(),
                    &letters.iter().map(|l| l.blocks_run).collect::<Vec<_>>(),
                ],
            )
            .await;
        result.map_err(|error| failed("cannot bury a dead letter", &error))
    }
}

/// A time that `timestamptz` can hold; `infinity` and its like would fail the statement for ever.
fn micros(time: Option<UnixMicros>) -> Option<i64> {
    const YEAR_1: i64 = -62_135_596_800_000_000;
    const YEAR_9999: i64 = 253_402_300_799_000_000;
    time.map(|UnixMicros(micros)| micros).filter(|micros| (YEAR_1..=YEAR_9999).contains(micros))
}
