//! One destination's part of the status. Written by the pump, read by the admin endpoints.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::histogram::Histogram;
use super::lock;
use super::status::Failed;
use crate::config::DestinationConfig;
use crate::error::Failure;
use crate::relay::destination::{Counts, Destination};
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
    link: Mutex<Link>,
    counters: Mutex<Counters>,
    lanes: Lanes,
}

/// The connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Link {
    /// What the stream announced; kept while the destination is down.
    pub facts: Option<StreamFacts>,
    pub up: bool,
    pub since: Option<Instant>,
    pub failed: Option<Failed>,
    pub procedure: &'static str,
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
}

/// Figures of the lanes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LaneFigures {
    pub events: usize,
    pub lanes: usize,
    pub in_flight: usize,
    pub retrying: usize,
}

impl DestinationStatus {
    /// A destination that was not yet connected.
    pub fn new(config: &DestinationConfig) -> DestinationStatus {
        DestinationStatus {
            name: config.name.clone(),
            required: config.required,
            publish_duration: Histogram::default(),
            link: Mutex::default(),
            counters: Mutex::default(),
            lanes: Lanes::default(),
        }
    }

    /// Connected, with these facts.
    pub fn up(&self, facts: &StreamFacts) {
        let mut link = lock(&self.link);
        if !link.up {
            link.since = Some(Instant::now());
        }
        link.up = true;
        link.facts = Some(facts.clone());
    }

    /// Not connected, or unable to publish.
    pub(super) fn down(&self, failure: &Failure) {
        let mut link = lock(&self.link);
        if link.up {
            link.since = Some(Instant::now());
        }
        link.up = false;
        link.failed = Some(Failed::now(failure));
    }

    /// A new session begins: the core counts from zero again.
    pub(super) fn session(&self) {
        lock(&self.counters).seen = Counts::default();
    }

    /// Takes over what the core knows. Counters are the core's own, since its session began.
    pub fn observe(&self, core: &Destination) {
        lock(&self.counters).take(core.counts());
        lock(&self.link).procedure = core.phase().as_str();
        let lanes = core.lanes();
        self.lanes.events.store(lanes.len(), Ordering::Relaxed);
        self.lanes.lanes.store(lanes.lane_count(), Ordering::Relaxed);
        self.lanes.in_flight.store(lanes.in_flight(), Ordering::Relaxed);
        self.lanes.retrying.store(lanes.retrying(), Ordering::Relaxed);
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
        add(&mut total.refusals, now.refusals, seen.refusals);
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
