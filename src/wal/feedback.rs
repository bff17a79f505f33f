//! When to report to the server, and when to give it up. Pure: time comes in as an argument.

use bytes::{BufMut, BytesMut};
use std::time::Duration;
use tokio::time::Instant;

use crate::error::{Failure, Kind};
use crate::event::UnixMicros;
use crate::lsn::Lsn;

/// Longest time between two reports: `pg_stat_replication` and the slot are this fresh.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// Shortest time between two reports of a moving position: 10 a second cost nothing and keep the
/// slot close behind.
const REPORT_CHANGE_AFTER: Duration = Duration::from_millis(100);
/// Silence that is taken for death when the server has `wal_sender_timeout = 0`.
const SILENCE_DEFAULT: Duration = Duration::from_secs(60);

/// A server that shuts down asks for one position over and over, tens of thousands of times a
/// second, until it is confirmed. An idle healthy server asks twice for one position too, but
/// seconds apart.
const ASKED_AGAIN_WITHIN: Duration = Duration::from_millis(100);
/// So many hurried repetitions mean shutdown.
const ASKED_AGAIN_LIMIT: u32 = 20;
/// Pause before a hurried repetition is answered: what is on its way to being confirmed gets the
/// chance to be, and the server does not spin. 20 of them take 100 ms.
const ANSWER_AGAIN_AFTER: Duration = Duration::from_millis(5);

/// What is known of both sides.
#[derive(Debug)]
pub(super) struct Feedback {
    received: Lsn,
    confirmed: Lsn,
    /// Time of the last report, and the confirmed position in it.
    reported: Option<(Instant, Lsn)>,
    /// The server wants a report: the position it asked with, and when to answer.
    asked: Option<(Lsn, Instant)>,
    /// Our last answer to such a wish.
    answered: Option<(Lsn, Instant)>,
    asked_again: u32,
    /// When we last asked the server for a sign of life, and last got one.
    probed: Instant,
    heard: Instant,
    /// Reading stands still since the queue is full: silence means nothing.
    paused: bool,
    silence: Duration,
}

/// One report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Status {
    /// Received.
    pub write: Lsn,
    /// Confirmed: the server forgets what is below.
    pub flush: Lsn,
    /// The server shall answer.
    pub probe: bool,
}

impl Feedback {
    pub(super) fn new(now: Instant, wal_sender_timeout: Option<Duration>) -> Feedback {
        Feedback {
            received: Lsn::ZERO,
            confirmed: Lsn::ZERO,
            reported: None,
            asked: None,
            answered: None,
            asked_again: 0,
            probed: now,
            heard: now,
            paused: false,
            silence: wal_sender_timeout.unwrap_or(SILENCE_DEFAULT),
        }
    }

    /// Bytes came.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// A message with data came.
    pub(super) fn data(&mut self, wal_end: Lsn) {
        self.received = self.received.max(wal_end);
        self.answered = None;
    }

    /// A keepalive came. Fails when the server is shutting down and waits for a position that is
    /// not confirmed: staying would hold it up.
    pub(super) fn keepalive(
        &mut self,
        now: Instant,
        wal_end: Lsn,
        asks: bool,
    ) -> Result<(), Failure> {
        self.received = self.received.max(wal_end);
        if !asks {
            return Ok(());
        }
        let again = self.answered.is_some_and(|(position, at)| {
            position == wal_end && now.saturating_duration_since(at) < ASKED_AGAIN_WITHIN
        });
        self.asked_again = if again { self.asked_again + 1 } else { 0 };
        if self.asked_again >= ASKED_AGAIN_LIMIT {
            return Err(Failure::new(
                Kind::SourceShutdown,
                format!("the server waits for {wal_end} to be confirmed, as it does in a shutdown"),
            ));
        }
        self.asked = Some((wal_end, if again { now + ANSWER_AGAIN_AFTER } else { now }));
        Ok(())
    }

    /// The position up to which the server may forget.
    pub(super) fn confirm(&mut self, confirmed: Lsn) {
        self.confirmed = self.confirmed.max(confirmed);
    }

    /// Reading stops or goes on.
    pub(super) fn pause(&mut self, now: Instant, paused: bool) {
        if self.paused && !paused {
            self.heard = now;
        }
        self.paused = paused;
    }

    fn probe_at(&self) -> Option<Instant> {
        // While we don't read, answers would only pile up.
        (!self.paused).then(|| self.probed.max(self.heard) + self.silence / 4)
    }

    /// When the next report is due.
    pub(super) fn due(&self, now: Instant) -> Instant {
        let Some((at, confirmed)) = self.reported else { return now };
        let moved = confirmed != self.confirmed;
        let change = moved.then_some(at + REPORT_CHANGE_AFTER);
        let answer = self.asked.map(|(_, when)| if moved { now } else { when });
        [Some(at + REPORT_EVERY), change, answer, self.probe_at()]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(now)
    }

    /// When the server counts as dead unless it says something.
    pub(super) fn dead_at(&self) -> Option<Instant> {
        (!self.paused).then(|| self.heard + self.silence)
    }

    /// How long a healthy server may say nothing.
    pub(super) fn silence(&self) -> Duration {
        self.silence
    }

    /// Makes the report.
    pub(super) fn report(&mut self, now: Instant) -> Status {
        let probe = self.probe_at().is_some_and(|at| at <= now);
        if probe {
            self.probed = now;
        }
        if let Some((position, _)) = self.asked.take() {
            self.answered = Some((position, now));
        }
        self.reported = Some((now, self.confirmed));
        Status { write: self.received.max(self.confirmed), flush: self.confirmed, probe }
    }
}

impl Status {
    /// Appends the report as a CopyData message with a standby status update.
    pub(super) fn encode(self, clock: UnixMicros, out: &mut BytesMut) {
        const LENGTH: u32 = 4 + 1 + 4 * 8 + 1;
        out.put_u8(b'd');
        out.put_u32(LENGTH);
        out.put_u8(b'r');
        out.put_u64(self.write.0);
        out.put_u64(self.flush.0);
        // Applied: the same, an event is as good as processed when it is recorded.
        out.put_u64(self.flush.0);
        out.put_i64(pgwire_replication::protocol::unix_to_pg_timestamp(clock.0));
        out.put_u8(u8::from(self.probe));
    }
}
