//! Messages of this relay whose events the database does not know, and the generation that begins
//! when its history was replaced.

use std::collections::{HashMap, HashSet};

use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

use super::events::Holder;
use super::history::Continuity;
use super::sql::multirange;
use super::{Store, failed, identity};
use crate::error::Failure;
use crate::event::UnixMicros;
use crate::relay::outcome::Floor;

// unnest first: range_agg takes multiranges only from PostgreSQL 15 on.
const RECORDED: &str = "\
    WITH all_of AS MATERIALIZED ( \
        SELECT range_agg(part) AS seqs FROM outbox.receipt AS r, unnest(r.seqs) AS part \
        WHERE r.relay = $1::text AND r.destination = $2::text) \
    SELECT asked.seq FROM unnest($3::int8[]) AS asked (seq), all_of WHERE all_of.seqs @> asked.seq";

/// What a destination begins the new generation with.
#[derive(Debug, Clone)]
pub struct Beginning {
    /// Its name.
    pub destination: String,
    /// Its stream.
    pub stream: String,
    /// Nothing of ours in the stream is unknown up to here.
    pub floor: Floor,
    /// Numbers whose events are in the stream.
    pub published: Vec<(i64, i64)>,
    /// How many.
    pub events: usize,
}

// Compaction would merge what is sound into what is taken out; and no row may go that was settled by
// what is.
const ALONE: &str = "\
    SELECT pg_advisory_xact_lock(hashtextextended('outboxd compact ' || $1::text, 0)), \
           pg_advisory_xact_lock(hashtextextended('outboxd withdraw ' || $1::text, 0))";

// A ledger that is further than its outbox: what it says of numbers that were not given is about other
// events; and what waits is found again by the next look.
const CUT: [&str; 5] = [
    "UPDATE outbox.destination AS d \
     SET frontier = least(d.frontier, $2::int8), \
         holes = (d.holes + coalesce(outbox.waiting(d.relay, d.name), '{}')) \
                 * int8multirange(int8range(NULL, least(d.frontier, $2::int8), '[]')), \
         began_after = least(d.began_after, $2::int8), updated_at = now() \
     WHERE d.relay = $1::text",
    "UPDATE outbox.receipt AS r \
     SET outcome = 'published', seqs = '{}', events = 0, handed_seqs = NULL, handed_runs = NULL \
     WHERE r.relay = $1::text AND r.outcome = 'handed' AND $2::int8 IS NOT NULL",
    "UPDATE outbox.receipt AS r \
     SET seqs = r.seqs * int8multirange(int8range(NULL, $2::int8, '[]')) \
     WHERE r.relay = $1::text AND upper(r.seqs) - 1 > $2::int8",
    "UPDATE outbox.receipt AS r SET late_seqs = l.seqs, late_behind = l.behind \
     FROM outbox.receipt AS c CROSS JOIN LATERAL ( \
         SELECT array_agg(e.seq ORDER BY e.place) AS seqs, \
                array_agg(least(e.behind, $2::int8) ORDER BY e.place) AS behind \
         FROM unnest(c.late_seqs, c.late_behind) WITH ORDINALITY AS e (seq, behind, place) \
         WHERE e.seq <= $2::int8) AS l \
     WHERE c.relay = $1::text AND $2::int8 < ANY (c.late_behind) \
       AND (r.relay, r.destination, r.id) = (c.relay, c.destination, c.id)",
    "UPDATE outbox.dead_letter AS l \
     SET state = 'discarded', state_changed_at = clock_timestamp(), state_changed_by = 'recover', \
         state_reason = 'its event is of a history that was lost' \
     WHERE l.relay = $1::text AND l.seq > $2::int8 AND l.state IN ('buried', 'redriving')",
];

// The newest receipt counts for as much as there is.
const REWIND: &str = "\
    UPDATE outbox.destination AS d \
    SET receipt_id = least(d.receipt_id, coalesce( \
            (SELECT max(r.id) FROM outbox.receipt AS r \
             WHERE r.relay = d.relay AND r.destination = d.name), 0)), updated_at = now() \
    WHERE d.relay = $1::text";

const GAPS: &str = "\
    SELECT outbox.open_gap(d.relay, d.name) FROM outbox.destination AS d WHERE d.relay = $1::text";

const GENERATION: &str = "\
    UPDATE outbox.relay SET generation = $2::int4, updated_at = now() WHERE name = $1::text";

const BEGIN: &str = "\
    INSERT INTO outbox.receipt (relay, generation, destination, outcome, seqs, events, last_lsn, \
        stream, stream_created, stream_seq, stream_msg_id, floor_seq) \
    VALUES ($1::text, $2::int4, $3::text, 'published', $4::text::int8multirange, $5::int4, \
        pg_current_wal_insert_lsn(), $6::text, $7::text, $8::int8, '', $8::int8)";

impl Store {
    /// The rows that have these numbers.
    pub async fn holders(
        &self,
        client: &Client,
        seqs: &[i64],
    ) -> Result<HashMap<i64, Vec<Holder>>, Failure> {
        let read = async {
            let (rows, timed) = self.held(client, seqs).await?;
            let mut holders: HashMap<i64, Vec<Holder>> = HashMap::new();
            for row in rows {
                let id: Option<String> = row.try_get(1)?;
                let created_at = if timed { row.try_get(2)? } else { None };
                let created_at = created_at.map(UnixMicros);
                let holder = Holder { id: id.unwrap_or_default(), created_at };
                holders.entry(row.try_get(0)?).or_default().push(holder);
            }
            Ok(holders)
        };
        read.await.map_err(|error| failed("cannot look for rows in the outbox table", &error))
    }

    /// True: with their times. A table may lack the column, or have no time in it.
    async fn held(
        &self,
        client: &Client,
        seqs: &[i64],
    ) -> Result<(Vec<Row>, bool), tokio_postgres::Error> {
        if let Some(sql) = &self.holders {
            match client.query(sql, &[&seqs]).await {
                Err(error)
                    if [SqlState::UNDEFINED_COLUMN, SqlState::UNDEFINED_FUNCTION]
                        .iter()
                        .any(|state| error.code() == Some(state)) => {}
                rows => return Ok((rows?, true)),
            }
        }
        Ok((client.query(&self.existing, &[&seqs]).await?, false))
    }

    /// Which of these numbers a receipt has: final, or waiting.
    pub async fn recorded(
        &self,
        client: &Client,
        destination: &str,
        seqs: &[i64],
    ) -> Result<HashSet<i64>, Failure> {
        let read = async {
            let rows = client.query(RECORDED, &[&self.relay, &destination, &seqs]).await?;
            rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()
        };
        read.await.map_err(|error| failed("cannot look for numbers in the ledger", &error))
    }

    /// Begins a generation, in one transaction: what the ledger can't know is taken out of it, and
    /// each destination gets what its stream has, and a floor.
    pub async fn begin_generation(
        &self,
        client: &Client,
        generation: i32,
        (system_identifier, timeline): (&str, u32),
        continuity: &Continuity,
        beginnings: &[Beginning],
    ) -> Result<(), Failure> {
        let fault = |error: &_| failed("cannot begin a generation", error);
        client.batch_execute("BEGIN").await.map_err(|error| fault(&error))?;
        let relay = self.relay.as_str();
        let work = async {
            let within = self.within(client, generation, continuity, beginnings).await;
            within.map_err(|error| fault(&error))?;
            identity::rebase(client, relay).await?;
            identity::move_on(client, relay, system_identifier, timeline).await
        };
        let worked = work.await;
        let end = if worked.is_ok() { "COMMIT" } else { "ROLLBACK" };
        let ended = client.batch_execute(end).await;
        // The error that is told is the first one.
        worked.and(ended.map_err(|error| fault(&error)))
    }

    async fn within(
        &self,
        client: &Client,
        generation: i32,
        continuity: &Continuity,
        beginnings: &[Beginning],
    ) -> Result<(), tokio_postgres::Error> {
        let relay = &self.relay;
        client.execute(ALONE, &[relay]).await?;
        match continuity {
            Continuity::Fits => {}
            Continuity::Ahead { last, .. } => {
                for statement in CUT {
                    client.execute(statement, &[relay, last]).await?;
                }
            }
            Continuity::Short { .. } => {
                client.execute(REWIND, &[relay]).await?;
            }
        }
        if *continuity != Continuity::Fits {
            client.query(GAPS, &[relay]).await?;
        }
        client.execute(GENERATION, &[relay, &generation]).await?;
        for one in beginnings {
            let Beginning { destination, stream, floor, published, events } = one;
            let seqs = multirange(published);
            let events = i32::try_from(*events).unwrap_or(i32::MAX);
            let seq = i64::try_from(floor.seq).unwrap_or(i64::MAX);
            let values: [&(dyn ToSql + Sync); 8] =
                [relay, &generation, destination, &seqs, &events, stream, &floor.created, &seq];
            client.execute(BEGIN, &values).await?;
        }
        Ok(())
    }
}
