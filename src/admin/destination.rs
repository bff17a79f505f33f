//! One destination's part of the status. Written by the pump, read by the admin endpoints.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::histogram::Histogram;
use super::lock;
use super::status::Failed;
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::relay::destination::{Counts, Destination, Phase};
use crate::relay::outcome::StreamFacts;

/// What is known of one destination.
#[derive(Debug)]
pub struct DestinationStatus {
    /// Its name in the configuration.
    pub name: String,
    /// Do readiness and health wait for it?
    pub required: bool,
    /// From handing a message over to its ack.
    pub publish_duration: Histogram,
    unpublished: Mutex<Option<(Unpublished, Instant)>>,
    link: Mutex<Link>,
    counters: Mutex<Counters>,
    lanes: Lanes,
}

/// Rows that a destination has not decided, as the database counts them.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Unpublished {
    /// How many.
    pub events: u64,
    /// There are more than were counted.
    pub at_least: bool,
    /// Age of the oldest; `null` when the table has no time.
    pub oldest_seconds: Option<f64>,
}

/// Age up to which the database's count is passed on: it is asked every five seconds.
const UNPUBLISHED_FRESH: Duration = Duration::from_secs(30);

/// The connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Link {
    /// What the stream announced; kept while the destination is down.
    pub facts: Option<StreamFacts>,
    /// Connected, and nothing is known that stands in the way of publishing.
    pub up: bool,
    pub since: Option<Instant>,
    pub failed: Option<Failed>,
    pub procedure: &'static str,
    connected: bool,
    /// The stream could not be read back since.
    unreadable: bool,
    /// A permission was missing when so many events were acked: a new connection proves nothing,
    /// only one more ack does.
    forbidden_at: Option<u64>,
}

impl Link {
    /// Makes a change; true when the destination is up by it.
    fn change(&mut self, change: impl FnOnce(&mut Link)) -> bool {
        change(self);
        let up = self.connected && !self.unreadable && self.forbidden_at.is_none();
        let risen = up && !self.up;
        if up != self.up {
            self.since = Some(Instant::now());
            self.up = up;
        }
        risen
    }

    /// Was this failure told before, and nothing better since?
    fn knows(&self, failure: &Failure) -> bool {
        !self.up && self.failed.as_ref().is_some_and(|failed| failed.failure == *failure)
    }
}

/// Counters of the process, and those of the running session that are in them already.
#[derive(Debug, Default)]
struct Counters {
    total: Counts,
    seen: Counts,
}

#[derive(Debug, Default)]
struct Lanes {
    events: AtomicUsize,
    lanes: AtomicUsize,
    in_flight: AtomicUsize,
    retrying: AtomicUsize,
    slow_runs: AtomicUsize,
    slow: AtomicBool,
    blocked: AtomicUsize,
    holes: AtomicUsize,
}

/// Figures of the lanes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LaneFigures {
    pub events: usize,
    pub lanes: usize,
    pub in_flight: usize,
    pub retrying: usize,
    pub slow_runs: usize,
    pub slow: bool,
    pub blocked: usize,
    pub holes: usize,
}

impl DestinationStatus {
    /// A destination that was not yet connected.
    pub fn new(config: &DestinationConfig) -> DestinationStatus {
        DestinationStatus {
            name: config.name.clone(),
            required: config.required,
            publish_duration: Histogram::default(),
            unpublished: Mutex::default(),
            link: Mutex::default(),
            counters: Mutex::default(),
            lanes: Lanes::default(),
        }
    }

    /// Connected, with these facts. True when the destination is up by it, or up in another way.
    pub fn up(&self, facts: &StreamFacts) -> bool {
        let mut link = lock(&self.link);
        let pipeline = link.facts.as_ref().map(|facts| facts.pipeline);
        let risen = link.change(|link| {
            link.connected = true;
            link.facts = Some(facts.clone());
        });
        risen || (link.up && pipeline != Some(facts.pipeline))
    }

    /// Not connected. False when this is nothing new.
    pub(super) fn down(&self, failure: &Failure) -> bool {
        let acked = lock(&self.counters).total.acked;
        let mut link = lock(&self.link);
        let news = !link.knows(failure);
        link.change(|link| {
            link.connected = false;
            link.unreadable = false;
            if failure.kind == Kind::BrokerPermission {
                link.forbidden_at = Some(acked);
            }
            link.failed = Some(Failed::now(failure));
        });
        news
    }

    /// Connected, and a subject may not be published. False when this is nothing new.
    pub(super) fn forbidden(&self, failure: &Failure) -> bool {
        let acked = lock(&self.counters).total.acked;
        let mut link = lock(&self.link);
        let news = !link.knows(failure);
        link.change(|link| {
            link.forbidden_at = Some(acked);
            link.failed = Some(Failed::now(failure));
        });
        news
    }

    /// Connected perhaps, and the stream could not be read: nothing is published until it can.
    pub(super) fn unreadable(&self, failure: &Failure) -> bool {
        let mut link = lock(&self.link);
        let news = !link.knows(failure);
        link.change(|link| {
            link.unreadable = true;
            link.failed = Some(Failed::now(failure));
        });
        news
    }

    /// A new session begins: the core counts from zero again.
    pub(super) fn session(&self) {
        lock(&self.counters).seen = Counts::default();
    }

    /// Takes over what the core knows. Counters are the core's own, since its session began. True
    /// when the destination is up by it.
    pub fn observe(&self, core: &Destination) -> bool {
        let acked = {
            let mut counters = lock(&self.counters);
            counters.take(core.counts());
            counters.total.acked
        };
        let risen = lock(&self.link).change(|link| {
            link.procedure = core.phase().as_str();
            // Read to the end; and further on, proven by an ack.
            link.unreadable &= !matches!(core.phase(), Phase::Probe | Phase::Flow);
            link.forbidden_at = link.forbidden_at.filter(|before| acked <= *before);
        });
        let lanes = core.lanes();
        self.lanes.events.store(lanes.len(), Ordering::Relaxed);
        self.lanes.lanes.store(lanes.lane_count(), Ordering::Relaxed);
        self.lanes.in_flight.store(lanes.in_flight(), Ordering::Relaxed);
        self.lanes.retrying.store(lanes.retrying(), Ordering::Relaxed);
        let waiting = core.waiting();
        self.lanes.slow_runs.store(waiting.slow_runs(), Ordering::Relaxed);
        self.lanes.slow.store(waiting.is_slow_as_a_whole(), Ordering::Relaxed);
        self.lanes.blocked.store(lanes.blocked().len(), Ordering::Relaxed);
        risen
    }

    /// Ranges of undecided numbers that the last pass through the table left; those of the one before.
    pub fn holes(&self, ranges: usize) -> usize {
        self.lanes.holes.swap(ranges, Ordering::Relaxed)
    }

    /// The database counted.
    pub(super) fn count_unpublished(&self, found: Unpublished) {
        *lock(&self.unpublished) = Some((found, Instant::now()));
    }

    /// What the database counted lately. The age goes on by itself, as that of a row does.
    pub(super) fn unpublished(&self) -> Option<Unpublished> {
        let (found, passed) = self.last_count()?;
        (passed < UNPUBLISHED_FRESH).then_some(found)
    }

    /// Age of the oldest event by the last count.
    pub(super) fn oldest_unpublished(&self) -> Option<f64> {
        self.last_count().and_then(|(found, _)| found.oldest_seconds)
    }

    fn last_count(&self) -> Option<(Unpublished, Duration)> {
        let (mut found, at) = (*lock(&self.unpublished))?;
        let passed = at.elapsed();
        if found.events > 0 {
            found.oldest_seconds = found.oldest_seconds.map(|age| age + passed.as_secs_f64());
        }
        Some((found, passed))
    }

    pub(super) fn link(&self) -> Link {
        lock(&self.link).clone()
    }

    pub(super) fn totals(&self) -> Counts {
        lock(&self.counters).total.clone()
    }

    pub(super) fn lanes(&self) -> LaneFigures {
        LaneFigures {
            events: self.lanes.events.load(Ordering::Relaxed),
            lanes: self.lanes.lanes.load(Ordering::Relaxed),
            in_flight: self.lanes.in_flight.load(Ordering::Relaxed),
            retrying: self.lanes.retrying.load(Ordering::Relaxed),
            slow_runs: self.lanes.slow_runs.load(Ordering::Relaxed),
            slow: self.lanes.slow.load(Ordering::Relaxed),
            blocked: self.lanes.blocked.load(Ordering::Relaxed),
            holes: self.lanes.holes.load(Ordering::Relaxed),
        }
    }
}

impl Counters {
    fn take(&mut self, now: &Counts) {
        let Counters { total, seen } = self;
        if now == seen {
            return;
        }
        let add = |total: &mut u64, now: u64, seen: u64| *total += now.saturating_sub(seen);
        add(&mut total.sent, now.sent, seen.sent);
        add(&mut total.acked, now.acked, seen.acked);
        add(&mut total.resumed, now.resumed, seen.resumed);
        add(&mut total.duplicates, now.duplicates, seen.duplicates);
        add(&mut total.unmatched, now.unmatched, seen.unmatched);
        add(&mut total.recorded, now.recorded, seen.recorded);
        add(&mut total.redriven, now.redriven, seen.redriven);
        add(&mut total.refusals, now.refusals, seen.refusals);
        add(&mut total.handed, now.handed, seen.handed);
        add(&mut total.missed, now.missed, seen.missed);
        add(&mut total.gone, now.gone, seen.gone);
        add_each(&mut total.doubts, &now.doubts, &seen.doubts);
        add_each(&mut total.dead, &now.dead, &seen.dead);
        seen.clone_from(now);
    }
}

fn add_each(
    total: &mut BTreeMap<&'static str, u64>,
    now: &BTreeMap<&'static str, u64>,
    seen: &BTreeMap<&'static str, u64>,
) {
    for (label, count) in now {
        let before = seen.get(label).copied().unwrap_or(0);
        *total.entry(label).or_default() += count.saturating_sub(before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_go_on_over_sessions() {
        let mut counters = Counters::default();
        let counts = |sent, silence| Counts {
            sent,
            doubts: BTreeMap::from([("silence", silence)]),
            ..Counts::default()
        };
        counters.take(&counts(5, 1));
        counters.take(&counts(7, 1));
        counters.seen = Counts::default();
        counters.take(&counts(2, 3));
        assert_eq!(counters.total, counts(9, 4));
    }
}
