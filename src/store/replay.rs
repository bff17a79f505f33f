//! Replay jobs: what was asked for, and how far it is, in `outbox.replay`. What a job takes is found by
//! [`select`].

pub mod select;

use tokio_postgres::Client;
use tokio_postgres::types::{Json, ToSql};

use super::sql::{multirange, parse_multirange};
use super::{failed, unexpected};
use crate::error::Failure;
use crate::relay::outcome::Floor;
use select::{Plan, Selection};

/// A job as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub name: String,
    /// Where it publishes.
    pub destination: String,
    /// What was asked for.
    pub selection: Selection,
    /// Inclusive ranges of numbers that the receipts gave.
    pub seqs: Vec<(i64, i64)>,
    /// Of them, those that need not be looked at any more.
    pub done: Vec<(i64, i64)>,
    /// Events it was to publish when it began.
    pub planned: u64,
    /// What became of them so far.
    pub tally: Tally,
    /// Where reading the stream back starts; `created` is empty before the first connect.
    pub floor: Floor,
    /// Highest sequence known of that stream.
    pub stream_seq: u64,
    /// Nothing is left of it.
    pub finished: bool,
}

/// What became of a job's events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Tally {
    /// Messages by which the stream grew.
    pub stored: u64,
    /// Acknowledged as duplicates of messages that it does not have.
    pub duplicates: u64,
    /// Can't be published.
    pub refused: u64,
    /// Their rows went away meanwhile.
    pub gone: u64,
}

impl Tally {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.stored + self.duplicates + self.refused + self.gone
    }

    /// One more step.
    pub fn add(&mut self, step: Tally) {
        self.stored += step.stored;
        self.duplicates += step.duplicates;
        self.refused += step.refused;
        self.gone += step.gone;
    }
}

/// One step of a job, to be recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Numbers that need not be looked at any more, inclusive ranges.
    pub done: Vec<(i64, i64)>,
    /// What it counts for.
    pub tally: Tally,
    /// Floor and highest known sequence; `None` leaves them.
    pub stream: Option<(Floor, u64)>,
}

// As the relay's lock, and held as long as the session.
const LOCK: &str = "\
    SELECT pg_try_advisory_lock(hashtextextended(\
        'outboxd replay ' || $1::text || ' ' || $2::text, 0))";

const FIND: &str = "\
    SELECT destination, selection, seqs::text, done::text, planned, \
           stored, duplicates, refused, gone, stream_created, floor_seq, stream_seq, \
           finished_at IS NOT NULL \
    FROM outbox.replay WHERE relay = $1::text AND job = $2::text";

const CREATE: &str = "\
    INSERT INTO outbox.replay (relay, job, destination, selection, seqs, planned) \
    VALUES ($1::text, $2::text, $3::text, $4::jsonb, $5::text::int8multirange, $6::int8)";

const ADVANCE: &str = "\
    UPDATE outbox.replay \
    SET done = done + $3::text::int8multirange, stored = stored + $4::int8, \
        duplicates = duplicates + $5::int8, refused = refused + $6::int8, gone = gone + $7::int8, \
        stream_created = coalesce($8::text, stream_created), \
        floor_seq = coalesce($9::int8, floor_seq), stream_seq = coalesce($10::int8, stream_seq), \
        updated_at = now() \
    WHERE relay = $1::text AND job = $2::text";

// The numbers can be many, and nobody asks for them any more.
const FINISH: &str = "\
    UPDATE outbox.replay SET finished_at = now(), updated_at = now(), seqs = '{}', done = '{}' \
    WHERE relay = $1::text AND job = $2::text";

/// Makes this session the only one that works on the job; false when another one does.
pub async fn try_lock(client: &Client, relay: &str, job: &str) -> Result<bool, Failure> {
    let row = client.query_one(LOCK, &[&relay, &job]).await;
    row.and_then(|row| row.try_get(0)).map_err(|error| failed("cannot lock the replay", &error))
}

/// The job of this name.
pub async fn find(client: &Client, relay: &str, job: &str) -> Result<Option<Job>, Failure> {
    let read = async {
        let Some(row) = client.query_opt(FIND, &[&relay, &job]).await? else { return Ok(None) };
        let Json(selection) = row.try_get(1)?;
        let number = |index: usize| row.try_get::<_, i64>(index).map(i64::unsigned_abs);
        let ranges: [String; 2] = [row.try_get(2)?, row.try_get(3)?];
        let tally = Tally {
            stored: number(5)?,
            duplicates: number(6)?,
            refused: number(7)?,
            gone: number(8)?,
        };
        let job = Job {
            name: job.to_owned(),
            destination: row.try_get(0)?,
            selection,
            seqs: Vec::new(),
            done: Vec::new(),
            planned: number(4)?,
            tally,
            floor: Floor { created: row.try_get(9)?, seq: number(10)? },
            stream_seq: number(11)?,
            finished: row.try_get(12)?,
        };
        Ok(Some((job, ranges)))
    };
    let read = read.await.map_err(|error| failed("cannot read the replay", &error))?;
    let Some((job, ranges)) = read else { return Ok(None) };
    let parse = |ranges: &String| {
        parse_multirange(ranges).ok_or_else(|| unexpected(format_args!("numbers {ranges}")))
    };
    let [seqs, done] = ranges.each_ref().map(parse);
    Ok(Some(Job { seqs: seqs?, done: done?, ..job }))
}

/// Records a job that begins.
pub async fn create(
    client: &Client,
    relay: &str,
    job: &str,
    destination: &str,
    selection: &Selection,
    plan: &Plan,
) -> Result<(), Failure> {
    let planned = signed(plan.selected);
    let values: [&(dyn ToSql + Sync); 6] =
        [&relay, &job, &destination, &Json(selection), &multirange(&plan.seqs), &planned];
    let created = client.execute(CREATE, &values).await;
    created.map(drop).map_err(|error| failed("cannot record the replay", &error))
}

/// Records a step, durably.
pub async fn advance(client: &Client, relay: &str, job: &str, step: &Step) -> Result<(), Failure> {
    let Tally { stored, duplicates, refused, gone } = step.tally;
    let counts = [stored, duplicates, refused, gone].map(signed);
    let [stored, duplicates, refused, gone] = &counts;
    let created = step.stream.as_ref().map(|(floor, _)| floor.created.as_str());
    let floor = step.stream.as_ref().map(|(floor, _)| signed(floor.seq));
    let known = step.stream.as_ref().map(|(_, known)| signed(*known));
    let done = multirange(&step.done);
    let values: [&(dyn ToSql + Sync); 10] =
        [&relay, &job, &done, stored, duplicates, refused, gone, &created, &floor, &known];
    let advanced = client.execute(ADVANCE, &values).await;
    match advanced.map_err(|error| failed("cannot record how far the replay is", &error))? {
        0 => Err(unexpected(format_args!("row of replay {job} is gone"))),
        _ => Ok(()),
    }
}

/// Records that nothing is left of it.
pub async fn finish(client: &Client, relay: &str, job: &str) -> Result<(), Failure> {
    let finished = client.execute(FINISH, &[&relay, &job]).await;
    finished.map(drop).map_err(|error| failed("cannot record the end of the replay", &error))
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
