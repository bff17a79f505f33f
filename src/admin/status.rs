//! What the process knows of itself. The pump and the supervisor write it, the endpoints read it;
//! nobody waits for the database or for NATS to do either, so it can be asked while both hang.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::destination::{DestinationStatus, Unpublished};
use super::histogram::Histogram;
use super::lock;
use super::retention::RetentionStatus;
use crate::config::Config;
use crate::error::{Failure, Kind};
use crate::event::UnixMicros;
use crate::lsn::Lsn;
use crate::relay::Relay;
use crate::relay::lanes::Entry;
use crate::relay::outcome::DestinationId;

/// Where the relay stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Connecting, or reading the ledger.
    Starting,
    /// Another relay of this name is active; this one takes over when it ends.
    Standby,
    /// WAL is read and published.
    Streaming,
    /// Relaying from the table, since no WAL can be read or none is wanted.
    Table,
    /// Something failed; it is tried again.
    Waiting,
    /// Told to stop: finishing what is in flight.
    Stopping,
}

impl Phase {
    /// As in the JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Starting => "starting",
            Phase::Standby => "standby",
            Phase::Streaming => "streaming",
            Phase::Table => "table",
            Phase::Waiting => "waiting",
            Phase::Stopping => "stopping",
        }
    }
}

/// A failure and when it was seen.
#[derive(Debug, Clone)]
pub(super) struct Failed {
    pub failure: Failure,
    pub at: Instant,
}

impl Failed {
    pub fn now(failure: &Failure) -> Failed {
        Failed { failure: failure.clone(), at: Instant::now() }
    }
}

/// The database of the running or last session.
#[derive(Debug, Clone)]
pub struct Source {
    /// `system_identifier` of the cluster.
    pub system_identifier: String,
    /// Timeline.
    pub timeline: u32,
    /// Database name.
    pub database: String,
    /// `server_version_num`, e.g. 180006.
    pub server_version: u32,
    /// Longest time in which a healthy server sends nothing. Silence beyond it makes the relay not
    /// ready; half of `wal_sender_timeout` is right, since a reply is asked for every quarter.
    pub silence_limit: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Status {
    /// From the commit, on the database's clock, to the ack.
    pub commit_to_ack: Histogram,
    /// What retention did.
    pub retention: RetentionStatus,
    marked: AtomicU64,
    pub(super) relay: String,
    pub(super) slot: String,
    pub(super) memory_bytes: usize,
    streams: bool,
    pub(super) max_lag: Duration,
    pub(super) started: Instant,
    destinations: Vec<Arc<DestinationStatus>>,
    state: Mutex<State>,
    failures: Vec<(Kind, AtomicU64)>,
    clock: Mutex<Option<(UnixMicros, Instant)>>,
    /// Microseconds from `started` to the last sign of life of the WAL stream.
    heard: AtomicU64,
    read: AtomicU64,
    received: AtomicU64,
    confirmed: AtomicU64,
    undecided_events: AtomicU64,
    undecided_bytes: AtomicU64,
    /// Commit time of the oldest undecided event; `NO_TIME` when there is none.
    oldest: AtomicI64,
}

/// Stands for no commit time in an atomic.
const NO_TIME: i64 = i64::MAX;

#[derive(Debug)]
struct State {
    phase: Phase,
    since: Instant,
    failed: Option<Failed>,
    source: Option<Source>,
    retained: Option<(u64, Instant)>,
}

impl Status {
    /// The status of a relay that is about to start.
    pub fn new(config: &Config) -> Arc<Status> {
        let started = Instant::now();
        let new = |config| Arc::new(DestinationStatus::new(config));
        Arc::new(Status {
            commit_to_ack: Histogram::default(),
            retention: RetentionStatus::default(),
            marked: AtomicU64::new(0),
            relay: config.relay.name.clone(),
            slot: config.source.slot.clone(),
            memory_bytes: config.event_bytes(),
            streams: config.relay.stream,
            max_lag: config.health.max_lag,
            started,
            destinations: config.destinations.iter().map(new).collect(),
            state: Mutex::new(State {
                phase: Phase::Starting,
                since: started,
                failed: None,
                source: None,
                retained: None,
            }),
            failures: Kind::ALL.iter().map(|kind| (*kind, AtomicU64::new(0))).collect(),
            clock: Mutex::new(None),
            heard: AtomicU64::new(0),
            read: AtomicU64::new(0),
            received: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
            undecided_events: AtomicU64::new(0),
            undecided_bytes: AtomicU64::new(0),
            oldest: AtomicI64::new(NO_TIME),
        })
    }

    /// Rows were marked as done in the table.
    pub fn marked(&self, rows: u64) {
        self.marked.fetch_add(rows, Ordering::Relaxed);
    }

    pub(super) fn marked_rows(&self) -> u64 {
        self.marked.load(Ordering::Relaxed)
    }

    /// The relay is now in `phase`.
    pub fn phase(&self, phase: Phase) {
        let mut state = lock(&self.state);
        // A standby hears nothing and owes nothing: its silence counts from the moment it takes over.
        if matches!(phase, Phase::Streaming | Phase::Table) || state.phase == Phase::Standby {
            self.heard();
        }
        if state.phase != phase {
            state.phase = phase;
            state.since = Instant::now();
        }
    }

    /// A session or an attempt at one failed: counted, and shown with its remedy.
    pub fn failed(&self, failure: &Failure) {
        self.count(failure);
        lock(&self.state).failed = Some(Failed::now(failure));
    }

    /// A destination has no connection: counted and shown. False when this is nothing new.
    pub fn destination_down(&self, id: DestinationId, failure: &Failure) -> bool {
        self.count(failure);
        self.destination(id).is_some_and(|destination| destination.down(failure))
    }

    /// A destination may not publish a subject. False when this is nothing new.
    pub fn destination_forbidden(&self, id: DestinationId, failure: &Failure) -> bool {
        self.destination(id).is_some_and(|destination| destination.forbidden(failure))
    }

    /// A destination's stream can't be read: shown. False when this is nothing new.
    pub fn destination_unreadable(&self, id: DestinationId, failure: &Failure) -> bool {
        self.destination(id).is_some_and(|destination| destination.unreadable(failure))
    }

    fn count(&self, failure: &Failure) {
        for (_, count) in self.failures.iter().filter(|(kind, _)| *kind == failure.kind) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A session has begun: the core counts from zero again.
    pub fn session(&self, source: Source) {
        self.destinations.iter().for_each(|destination| destination.session());
        lock(&self.state).source = Some(source);
    }

    /// What the database's clock said just now; to be told at each connect and each ping.
    pub fn clock(&self, server_now: UnixMicros) {
        *lock(&self.clock) = Some((server_now, Instant::now()));
    }

    /// The database's time; `None` before the first connect.
    pub fn server_now(&self) -> Option<UnixMicros> {
        let (then, at) = (*lock(&self.clock))?;
        let passed = i64::try_from(at.elapsed().as_micros()).unwrap_or(i64::MAX);
        Some(UnixMicros(then.0.saturating_add(passed)))
    }

    /// The WAL stream gave a sign of life.
    pub fn heard(&self) {
        let passed = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.heard.store(passed, Ordering::Relaxed);
    }

    /// So many outbox rows were read.
    pub fn read(&self, rows: u64) {
        self.read.fetch_add(rows, Ordering::Relaxed);
    }

    /// WAL was received up to here.
    pub fn received(&self, lsn: Lsn) {
        self.received.store(lsn.0, Ordering::Relaxed);
    }

    /// The slot may forget what is below.
    pub fn confirmed(&self, lsn: Lsn) {
        self.confirmed.store(lsn.0, Ordering::Relaxed);
    }

    /// WAL that the slot holds back, as the server sees it; to be told at each ping.
    pub fn retained(&self, bytes: u64) {
        lock(&self.state).retained = Some((bytes, Instant::now()));
    }

    /// What a destination has not decided, as the database counts it.
    pub fn unpublished(&self, destination: &str, found: Unpublished) {
        self.destinations
            .iter()
            .filter(|one| one.name == destination)
            .for_each(|one| one.count_unpublished(found));
    }

    /// Takes over what the core knows. Looks at every lane: to be called a few times a second, not
    /// at every turn of the loop. The destinations that are up by it.
    pub fn observe(&self, core: &Relay) -> Vec<&str> {
        let mut risen = Vec::new();
        let mut events = 0;
        let mut oldest = None;
        for (status, destination) in self.destinations.iter().zip(core.destinations()) {
            if status.observe(destination) {
                risen.push(status.name.as_str());
            }
            events += u64::try_from(destination.lanes().len()).unwrap_or(u64::MAX);
            // Rows of the table do not say when they were committed.
            let time = |entry: &Entry| entry.event.committed_at.or(entry.event.created_at);
            let first = destination.lanes().oldest().and_then(time);
            oldest = oldest.into_iter().chain(first).min();
        }
        self.undecided(events, u64::try_from(core.used_bytes()).unwrap_or(u64::MAX), oldest);
        self.confirmed(core.confirmable());
        risen
    }

    /// Sets the undecided events; one that two destinations wait for counts twice.
    pub(super) fn undecided(&self, events: u64, bytes: u64, oldest: Option<UnixMicros>) {
        self.undecided_events.store(events, Ordering::Relaxed);
        self.undecided_bytes.store(bytes, Ordering::Relaxed);
        self.oldest.store(oldest.map_or(NO_TIME, |time| time.0), Ordering::Relaxed);
    }

    /// The destinations, in the configuration's order.
    pub fn destinations(&self) -> &[Arc<DestinationStatus>] {
        &self.destinations
    }

    /// One of them.
    pub fn destination(&self, id: DestinationId) -> Option<&Arc<DestinationStatus>> {
        self.destinations.get(usize::from(id.0))
    }

    /// Moves the window of percentiles on.
    pub(super) fn mark(&self) {
        self.commit_to_ack.mark();
        self.destinations.iter().for_each(|destination| destination.publish_duration.mark());
    }

    pub(super) fn failures(&self) -> impl Iterator<Item = (Kind, u64)> {
        self.failures.iter().map(|(kind, count)| (*kind, count.load(Ordering::Relaxed)))
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let heard = Duration::from_micros(self.heard.load(Ordering::Relaxed));
        let state = lock(&self.state);
        let oldest = Some(self.oldest.load(Ordering::Relaxed)).filter(|time| *time != NO_TIME);
        Snapshot {
            phase: state.phase,
            phase_for: state.since.elapsed(),
            streams: self.streams,
            failed: state.failed.clone(),
            source: state.source.clone(),
            // A figure from before the database hung says nothing about now.
            retained_bytes: state
                .retained
                .filter(|(_, at)| at.elapsed() < RETAINED_FRESH)
                .map(|(bytes, _)| bytes),
            silent_for: self.started.elapsed().saturating_sub(heard),
            oldest_for: oldest.zip(self.server_now()).map(|(oldest, now)| {
                Duration::from_micros(u64::try_from(now.0.saturating_sub(oldest)).unwrap_or(0))
            }),
            read: self.read.load(Ordering::Relaxed),
            received: Lsn(self.received.load(Ordering::Relaxed)),
            confirmed: Lsn(self.confirmed.load(Ordering::Relaxed)),
            undecided_events: self.undecided_events.load(Ordering::Relaxed),
            undecided_bytes: self.undecided_bytes.load(Ordering::Relaxed),
        }
    }
}

/// Age up to which the server's figure of retained WAL is passed on: six pings.
const RETAINED_FRESH: Duration = Duration::from_secs(30);

/// Everything at one moment.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub phase: Phase,
    pub phase_for: Duration,
    pub failed: Option<Failed>,
    pub source: Option<Source>,
    pub retained_bytes: Option<u64>,
    pub silent_for: Duration,
    pub oldest_for: Option<Duration>,
    pub read: u64,
    pub received: Lsn,
    pub confirmed: Lsn,
    pub undecided_events: u64,
    pub undecided_bytes: u64,
    /// Is WAL to be read?
    pub streams: bool,
}
