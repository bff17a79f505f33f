//! What the pump tells the status: counters and lag for health, metrics and people. Decides
//! nothing; costs a glance at the clock per turn.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::admin::status::{Phase, Source, Status};
use crate::error::Failure;
use crate::lsn::Lsn;
use crate::relay::Relay;
use crate::relay::machine::Verified;
use crate::relay::outcome::{DestinationId, StreamFacts};
use crate::run::sweeper::HOLES_MAX;
use crate::store::Pulse;
use crate::wal::Identity;

/// How often the core's figures are taken over. Finding the oldest event looks at every lane.
const OBSERVE_EVERY: Duration = Duration::from_millis(250);

/// See the module.
pub struct Reporter {
    status: Arc<Status>,
    observed: Instant,
    dirty: bool,
    streaming: bool,
    pressed: bool,
    idle_slot: bool,
}

impl Reporter {
    /// For a session that begins now.
    pub fn new(
        status: Arc<Status>,
        identity: &Identity,
        silence_limit: Duration,
        streaming: bool,
        now: Instant,
    ) -> Reporter {
        status.session(Source {
            system_identifier: identity.system_identifier.clone(),
            timeline: identity.timeline,
            database: identity.database.clone(),
            server_version: identity.server_version,
            silence_limit,
        });
        Reporter { status, observed: now, dirty: true, streaming, pressed: false, idle_slot: false }
    }

    /// Once per turn of the loop.
    pub fn turn(&mut self, relay: &Relay, now: Instant) {
        if self.dirty && now >= self.observed + OBSERVE_EVERY {
            self.observed = now;
            self.dirty = false;
            self.observe(relay);
        }
    }

    /// Takes over the figures, whether they are due or not.
    pub fn observe(&self, relay: &Relay) {
        for destination in self.status.observe(relay) {
            tracing::info!(destination, "destination is up: it can be read, or took an event");
        }
    }

    /// When the figures are due.
    pub fn wake_at(&self) -> Option<Instant> {
        self.dirty.then(|| self.observed + OBSERVE_EVERY)
    }

    /// A pass through the table left so many ranges of holes.
    pub fn holes(&self, id: DestinationId, ranges: usize) {
        let Some(destination) = self.status.destination(id) else { return };
        if destination.holes(ranges) <= HOLES_MAX && ranges > HOLES_MAX {
            tracing::warn!(
                destination = destination.name,
                ranges,
                "too many ranges of numbers are undecided: each pass looks at all of the ledger since \
                 they began, and costs more and more, until runs that are blocked or refused go on"
            );
        }
    }

    /// WAL came in: so many rows, up to `received`.
    pub fn read(&mut self, rows: u64, received: Lsn) {
        self.dirty = true;
        self.status.heard();
        self.status.read(rows);
        self.status.received(received);
    }

    /// Events are acknowledged: their times since commit and since sending.
    pub fn acked(&mut self, id: DestinationId, relay: &mut Relay) {
        self.dirty = true;
        let server_now = self.status.server_now();
        for committed_at in relay.take_acked() {
            // The commit time of a session with a replication origin can lie in the future.
            let since = server_now.map(|now| now.0.saturating_sub(committed_at.0));
            if let Some(micros) = since.and_then(|since| u64::try_from(since).ok()) {
                self.status.commit_to_ack.record(Duration::from_micros(micros));
            }
        }
        if let Some(destination) = self.status.destination(id) {
            for wait in relay.take_waits(id) {
                destination.publish_duration.record(wait);
            }
        }
    }

    /// The database answered a ping.
    pub fn pulse(&mut self, pulse: &Pulse) {
        self.dirty = true;
        self.status.clock(pulse.server_now);
        if let Some(slot) = &pulse.slot {
            self.status.retained(slot.retained_bytes);
        }
    }

    /// The database answered.
    pub fn answered(&mut self) {
        if !self.streaming {
            self.status.heard();
        }
    }

    /// Undecided events hold back so much WAL; more than they may?
    pub fn wal_pressure(&mut self, pressed: bool, ours_bytes: u64) {
        if pressed && !self.pressed {
            tracing::warn!(
                ours_bytes,
                "undecided events hold back more WAL than they may: those of destinations that \
                 stand still, or are slow, are handed over to the ledger, and sent from the table later"
            );
        }
        self.pressed = pressed;
    }

    /// The slot holds back so much WAL while only the table is relayed: more than it may.
    pub fn idle_slot(&mut self, retained_bytes: Option<u64>) {
        if let Some(retained_bytes) = retained_bytes.filter(|_| !self.idle_slot) {
            tracing::warn!(
                retained_bytes,
                "the slot holds back WAL that nobody reads, since only the table is relayed: drop it \
                 (`outboxd deinit --slot-only`), or see to it that the relay can stream"
            );
        }
        self.idle_slot = retained_bytes.is_some();
    }

    /// A look through the table failed; it is tried again.
    pub fn sweep_failed(&mut self, failure: &Failure) {
        tracing::warn!(
            code = failure.kind.code(),
            remedy = failure.kind.remedy(),
            "could not look through the table for missed rows: {}",
            failure.detail
        );
    }

    /// A destination is connected.
    pub fn up(&mut self, id: DestinationId, facts: &StreamFacts) {
        self.dirty = true;
        if let Some(destination) = self.status.destination(id)
            && destination.up(facts)
        {
            tracing::info!(
                destination = destination.name,
                stream = facts.stream,
                server_version = facts.server_version,
                replicas = facts.replicas,
                pipeline = facts.pipeline.as_str(),
                why = facts.why,
                "destination is up"
            );
        }
    }

    /// A destination is not connected, or can't publish.
    pub fn down(&mut self, id: DestinationId, failure: &Failure) {
        self.dirty = true;
        if self.status.destination_down(id, failure) {
            self.warn(id, failure, "destination is down");
        }
    }

    /// A subject may not be published; told, until an ack shows that it may again.
    pub fn forbidden(&mut self, id: DestinationId, failure: &Failure) {
        self.dirty = true;
        if self.status.destination_forbidden(id, failure) {
            self.warn(id, failure, "a subject may not be published");
        }
    }

    /// The stream could not be read.
    pub fn resume_failed(&mut self, id: DestinationId, failure: &Failure) {
        self.dirty = true;
        if self.status.destination_unreadable(id, failure) {
            self.warn(id, failure, "the stream could not be read; trying again");
        }
    }

    /// Messages that were sent with unknown outcome are in the stream.
    pub fn resumed(&mut self, id: DestinationId, verified: &Verified) {
        self.dirty = true;
        let numbers: i64 = verified.seqs.iter().map(|(start, end)| end - start + 1).sum();
        if let Some(destination) = self.status.destination(id) {
            tracing::info!(
                destination = destination.name,
                events = numbers,
                stream_seq = verified.last_seq,
                "resumed: found in the stream, recorded, not sent again"
            );
        }
    }

    /// The stop has begun.
    pub fn stopping(&mut self) {
        self.status.phase(Phase::Stopping);
    }

    fn warn(&self, id: DestinationId, failure: &Failure, what: &str) {
        if let Some(destination) = self.status.destination(id) {
            tracing::warn!(
                destination = destination.name,
                code = failure.kind.code(),
                remedy = failure.kind.remedy(),
                "{what}: {}",
                failure.detail
            );
        }
    }
}
