//! What the endpoints say: figures for people and programs, and the verdicts on them. Pure but for
//! the clock that the status was read with.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

use super::destination::{DestinationStatus, Unpublished};
use super::histogram::Percentiles;
use super::retention::Figures;
use super::status::{Failed, Phase, Snapshot, Status};
use crate::error::Fate;

/// `/api/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Its name.
    pub relay: String,
    /// Version of the program.
    pub version: String,
    /// Since the process started.
    pub uptime_seconds: f64,
    /// Where it stands.
    pub phase: Phase,
    /// Since when.
    pub phase_seconds: f64,
    /// `/readyz`.
    pub ready: Verdict,
    /// `/healthz`.
    pub healthy: Verdict,
    /// How far the destinations are behind the commits at this moment; `null` on a standby.
    pub lag_seconds: Option<f64>,
    /// Newest failure of a session, over or not.
    pub failure: Option<FailureReport>,
    /// PostgreSQL.
    pub source: SourceReport,
    /// Rows of the outbox that were read.
    pub read: u64,
    /// Events in memory.
    pub undecided: Undecided,
    /// Of the last minute, from commit to ack.
    pub commit_to_ack: Option<Latency>,
    /// What retention did since the process started.
    pub retention: Figures,
    /// In the configuration's order.
    pub destinations: Vec<DestinationReport>,
}

/// A yes or no with the causes of a no.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Yes?
    pub ok: bool,
    /// Why not.
    pub causes: Vec<String>,
}

impl Verdict {
    fn of(causes: Vec<String>) -> Verdict {
        Verdict { ok: causes.is_empty(), causes }
    }
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FailureReport {
    /// Its kind.
    pub code: String,
    /// What was seen.
    pub detail: String,
    /// What the operator can do.
    pub remedy: String,
    /// When.
    pub seconds_ago: f64,
}

/// The database and the slot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceReport {
    /// Of the cluster; empty before the first connect, like what follows.
    pub system_identifier: String,
    /// Timeline.
    pub timeline: u32,
    /// Database.
    pub database: String,
    /// E.g. 180006.
    pub server_version: u32,
    /// Name of the slot.
    pub slot: String,
    /// Is this process reading from it?
    pub slot_active: bool,
    /// WAL it holds back; `null` when the server was not asked lately.
    pub slot_retained_bytes: Option<u64>,
    /// WAL received up to here.
    pub received_lsn: String,
    /// WAL confirmed up to here.
    pub confirmed_lsn: String,
    /// Since the WAL stream last gave a sign of life.
    pub silent_seconds: f64,
}

/// Events that are read and not decided; one that two destinations wait for counts twice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Undecided {
    /// Number.
    pub events: u64,
    /// What they take of the budget.
    pub bytes: u64,
    /// The budget.
    pub budget_bytes: u64,
    /// Since the oldest one's commit.
    pub oldest_seconds: Option<f64>,
}

/// Percentiles of the last minute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Events.
    pub count: u64,
    /// Half were faster.
    pub p50_ms: f64,
    /// 99 of 100 were faster.
    pub p99_ms: f64,
}

/// One destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DestinationReport {
    /// Name in the configuration.
    pub name: String,
    /// Does readiness wait for it?
    pub required: bool,
    /// Connected and able to publish?
    pub up: bool,
    /// Since when.
    pub since_seconds: Option<f64>,
    /// What it is doing, e.g. `flowing`, `resuming`.
    pub procedure: String,
    /// Its stream, from the last connect.
    pub stream: Option<StreamReport>,
    /// Newest failure, over or not.
    pub failure: Option<FailureReport>,
    /// Counters since the process started.
    pub events: Stages,
    /// Rows of the table that are not decided, as the database counts them; `null` when it was not
    /// asked lately.
    pub unpublished: Option<Unpublished>,
    /// Age of the oldest of them by the last count, however old that is: it has not become younger
    /// since.
    #[serde(skip)]
    pub(super) waiting_seconds: Option<f64>,
    /// Undecided events.
    pub waiting: u64,
    /// Sent and not answered.
    pub in_flight: u64,
    /// Runs with undecided events.
    pub lanes: u64,
    /// Of these, waiting for a retry or a dead letter.
    pub retrying: u64,
    /// Runs whose events wait in the ledger, as far as memory knows.
    pub slow_runs: u64,
    /// Is every event waiting, whatever its run?
    pub slow: bool,
    /// Runs that wait behind a dead letter.
    pub blocked: u64,
    /// Ranges of undecided numbers that the last pass through the table left.
    pub holes: u64,
    /// From handing over to ack, last minute.
    pub publish_duration: Option<Latency>,
}

/// What a stream announced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamReport {
    /// Name.
    pub name: String,
    /// Replicas.
    pub replicas: u16,
    /// Version of nats-server.
    pub server_version: String,
    /// How order is kept.
    pub pipeline: String,
    /// Why so, and no faster.
    pub why: String,
}

/// What became of a destination's events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stages {
    /// Attempts handed over.
    pub sent: u64,
    /// Final by an ack.
    pub acked: u64,
    /// Found in the stream by Resume.
    pub resumed: u64,
    /// Decisions recorded in the ledger.
    pub recorded: u64,
    /// Not taken by the filter.
    pub unmatched: u64,
    /// Acks that said duplicate.
    pub duplicates: u64,
    /// Outcomes that were unknown.
    pub unknown: u64,
    /// Dead letters.
    pub dead: u64,
    /// Handed over: waiting in the ledger and the table.
    pub handed: u64,
    /// Found in the table, since no WAL brought them.
    pub missed: u64,
    /// Rows that went away while they waited.
    pub gone: u64,
    /// Dead letters that were sent again and are in the stream.
    pub redriven: u64,
}

impl Report {
    /// The report at this moment.
    pub fn of(status: &Status) -> Report {
        let now = status.snapshot();
        let destinations: Vec<_> =
            status.destinations().iter().map(|one| DestinationReport::of(one)).collect();
        let lag = lag(&now, status.memory_bytes, &destinations);
        let ready = Verdict::of(not_ready(&now, status.memory_bytes, &destinations));
        let mut causes = unhealthy(&now, lag, status.max_lag, &destinations);
        let late = lag.is_some_and(|lag| lag > status.max_lag);
        causes.extend(held_up(is_full(&now, status.memory_bytes), late, &destinations));
        let healthy = Verdict::of(causes);
        Report {
            relay: status.relay.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: seconds(status.started.elapsed()),
            phase: now.phase,
            phase_seconds: seconds(now.phase_for),
            ready,
            healthy,
            lag_seconds: lag.map(seconds),
            failure: now.failed.as_ref().map(FailureReport::of),
            source: SourceReport::of(&now, &status.slot),
            read: now.read,
            undecided: Undecided {
                events: now.undecided_events,
                bytes: now.undecided_bytes,
                budget_bytes: u64::try_from(status.memory_bytes).unwrap_or(u64::MAX),
                oldest_seconds: now.oldest_for.map(seconds),
            },
            commit_to_ack: status.commit_to_ack.recent().map(Latency::of),
            retention: status.retention.figures(),
            destinations,
        }
    }
}

/// Has the server been silent for longer than a healthy one is? Not when it is we who don't read.
fn silent(now: &Snapshot, memory_bytes: usize) -> bool {
    let limit = now.source.as_ref().map(|source| source.silence_limit);
    !is_full(now, memory_bytes) && limit.is_some_and(|limit| now.silent_for > limit)
}

/// Has reading stopped, since undecided events take the whole budget?
fn is_full(now: &Snapshot, memory_bytes: usize) -> bool {
    u64::try_from(memory_bytes).is_ok_and(|budget| now.undecided_bytes >= budget)
}

/// Who holds up the reading for all destinations, required or not. A burst fills the memory for a
/// moment while everything flows: that is no cause, what is down or late is one.
fn held_up(full: bool, late: bool, destinations: &[DestinationReport]) -> Option<String> {
    let most = destinations.iter().max_by_key(|one| one.waiting).filter(|_| full)?;
    (late || !most.up).then(|| {
        format!(
            "[relay] memory is full, so that reading waits for destination {}, which has {} events",
            most.name, most.waiting
        )
    })
}

/// Age of the oldest event that is known to be undecided. While nothing is heard of the database
/// there may be older ones that nobody knows of: then the silence itself is the lag, so that it
/// grows and is never zero by ignorance. A standby has no lag: the active relay has.
///
/// What waits outside of memory the database counts; it is asked every few seconds, and its figure
/// goes on by the clock meanwhile, so it holds only where memory doesn't know better.
fn lag(
    now: &Snapshot,
    memory_bytes: usize,
    destinations: &[DestinationReport],
) -> Option<Duration> {
    let elsewhere = |one: &&DestinationReport| {
        now.phase == Phase::Table || one.slow || one.slow_runs > 0 || one.blocked > 0
    };
    let ages = destinations.iter().filter(elsewhere).filter_map(|one| one.waiting_seconds);
    let waiting = ages.fold(0.0, f64::max);
    let waiting = Duration::try_from_secs_f64(waiting).unwrap_or_default();
    let oldest = now.oldest_for.unwrap_or_default().max(waiting);
    match now.phase {
        Phase::Standby => None,
        Phase::Streaming | Phase::Table if !silent(now, memory_bytes) => Some(oldest),
        Phase::Starting | Phase::Streaming | Phase::Table | Phase::Waiting | Phase::Stopping => {
            Some(oldest.max(now.silent_for))
        }
    }
}

fn not_ready(
    now: &Snapshot,
    memory_bytes: usize,
    destinations: &[DestinationReport],
) -> Vec<String> {
    let mut causes = Vec::new();
    let last = now.failed.as_ref().map(|failed| format!(": {}", failed.failure));
    match now.phase {
        Phase::Standby => return causes,
        Phase::Streaming if silent(now, memory_bytes) => {
            causes.push(format!("the WAL stream is silent for {} s", now.silent_for.as_secs()));
        }
        Phase::Table if silent(now, memory_bytes) && !now.streams => {
            causes.push(format!("the database is silent for {} s", now.silent_for.as_secs()));
        }
        Phase::Table if now.streams => {
            causes.push(format!("relaying from the table{}", last.unwrap_or_default()));
            if silent(now, memory_bytes) {
                causes.push(format!("the database is silent for {} s", now.silent_for.as_secs()));
            }
        }
        Phase::Streaming | Phase::Table => {}
        Phase::Starting | Phase::Waiting => {
            causes.push(format!("{}{}", now.phase.as_str(), last.unwrap_or_default()));
        }
        Phase::Stopping => causes.push("stopping".to_owned()),
    }
    causes.extend(down(destinations));
    causes
}

fn unhealthy(
    now: &Snapshot,
    lag: Option<Duration>,
    max_lag: Duration,
    destinations: &[DestinationReport],
) -> Vec<String> {
    let mut causes = Vec::new();
    if let Some(lag) = lag.filter(|lag| *lag > max_lag) {
        causes.push(format!("lag is {} s, above {} s", lag.as_secs(), max_lag.as_secs()));
        causes.extend(blocked(destinations));
    }
    // What waits for the operator is red at once, with what to do about it, and not only when the
    // lag has grown.
    if let (Phase::Waiting | Phase::Table, Some(Failed { failure, .. })) = (now.phase, &now.failed)
        && now.streams
        && matches!(failure.kind.fate(), Fate::Setup | Fate::Refuse)
    {
        causes.push(format!("{failure}; {}", failure.kind.remedy()));
    }
    if now.phase != Phase::Standby {
        causes.extend(down(destinations));
    }
    causes
}

/// Who waits for the operator: what waits behind a dead letter is late until he decides.
fn blocked(destinations: &[DestinationReport]) -> impl Iterator<Item = String> {
    destinations.iter().filter(|one| one.blocked > 0).map(|one| {
        format!("destination {} has {} runs that wait behind dead letters", one.name, one.blocked)
    })
}

fn down(destinations: &[DestinationReport]) -> impl Iterator<Item = String> {
    destinations.iter().filter(|one| one.required && !one.up).map(|one| match &one.failure {
        Some(failure) => {
            format!("destination {} is down: {}: {}", one.name, failure.code, failure.detail)
        }
        None => format!("destination {} is not connected yet", one.name),
    })
}

impl FailureReport {
    fn of(failed: &Failed) -> FailureReport {
        FailureReport {
            code: failed.failure.kind.code().to_owned(),
            detail: match &failed.failure.sqlstate {
                Some(state) => format!("{} (SQLSTATE {state})", failed.failure.detail),
                None => failed.failure.detail.clone(),
            },
            remedy: failed.failure.kind.remedy().to_owned(),
            seconds_ago: seconds(failed.at.elapsed()),
        }
    }
}

impl SourceReport {
    fn of(now: &Snapshot, slot: &str) -> SourceReport {
        let source = now.source.as_ref();
        SourceReport {
            system_identifier: source.map(|one| one.system_identifier.clone()).unwrap_or_default(),
            timeline: source.map_or(0, |one| one.timeline),
            database: source.map(|one| one.database.clone()).unwrap_or_default(),
            server_version: source.map_or(0, |one| one.server_version),
            slot: slot.to_owned(),
            slot_active: now.phase == Phase::Streaming,
            slot_retained_bytes: now.retained_bytes,
            received_lsn: now.received.to_string(),
            confirmed_lsn: now.confirmed.to_string(),
            silent_seconds: seconds(now.silent_for),
        }
    }
}

impl Latency {
    fn of(one: Percentiles) -> Latency {
        let ms = |value: Duration| seconds(value) * 1000.0;
        Latency { count: one.count, p50_ms: ms(one.p50), p99_ms: ms(one.p99) }
    }
}

impl DestinationReport {
    fn of(status: &DestinationStatus) -> DestinationReport {
        let link = status.link();
        let lanes = status.lanes();
        let totals = status.totals();
        let wide = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        DestinationReport {
            name: status.name.clone(),
            required: status.required,
            up: link.up,
            since_seconds: link.since.as_ref().map(Instant::elapsed).map(seconds),
            procedure: link.procedure.to_owned(),
            stream: link.facts.map(|facts| StreamReport {
                name: facts.stream,
                replicas: facts.replicas,
                server_version: facts.server_version,
                pipeline: facts.pipeline.as_str().to_owned(),
                why: facts.why,
            }),
            failure: link.failed.as_ref().map(FailureReport::of),
            events: Stages {
                sent: totals.sent,
                acked: totals.acked,
                resumed: totals.resumed,
                recorded: totals.recorded,
                unmatched: totals.unmatched,
                duplicates: totals.duplicates,
                unknown: totals.doubts.values().sum(),
                dead: totals.dead.values().sum(),
                handed: totals.handed,
                missed: totals.missed,
                gone: totals.gone,
                redriven: totals.redriven,
            },
            unpublished: status.unpublished(),
            waiting_seconds: status.oldest_unpublished(),
            waiting: wide(lanes.events),
            in_flight: wide(lanes.in_flight),
            lanes: wide(lanes.lanes),
            retrying: wide(lanes.retrying),
            slow_runs: wide(lanes.slow_runs),
            slow: lanes.slow,
            blocked: wide(lanes.blocked),
            holes: wide(lanes.holes),
            publish_duration: status.publish_duration.recent().map(Latency::of),
        }
    }
}

/// Seconds with the precision that anyone needs.
fn seconds(duration: Duration) -> f64 {
    Duration::from_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)).as_secs_f64()
}

#[cfg(test)]
mod tests;
