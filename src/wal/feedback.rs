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

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn reported() -> (Feedback, Instant) {
        let now = Instant::now();
        let mut feedback = Feedback::new(now, Some(MINUTE));
        assert_eq!(feedback.due(now), now, "the first report is due at once");
        let first = feedback.report(now);
        assert_eq!(first, Status { write: Lsn(0), flush: Lsn(0), probe: false });
        (feedback, now)
    }

    #[test]
    fn a_report_each_second_and_on_change_each_tenth() {
        let (mut feedback, now) = reported();
        assert_eq!(feedback.due(now), now + ms(1000));
        feedback.data(Lsn(50));
        assert_eq!(feedback.due(now), now + ms(1000), "received alone is no reason");
        feedback.confirm(Lsn(40));
        assert_eq!(feedback.due(now), now + ms(100));
        let then = now + ms(500);
        assert!(feedback.due(then) <= then, "after a pause a change is reported at once");
        let status = feedback.report(then);
        assert_eq!(status, Status { write: Lsn(50), flush: Lsn(40), probe: false });
        feedback.confirm(Lsn(30));
        assert_eq!(feedback.due(then), then + ms(1000), "a lower one changes nothing");
    }

    #[test]
    fn flush_is_what_was_confirmed_whatever_was_received() {
        let (mut feedback, now) = reported();
        feedback.keepalive(now, Lsn(900), true).unwrap();
        assert_eq!(feedback.due(now), now, "a wish is fulfilled at once");
        assert_eq!(feedback.report(now).flush, Lsn(0));
        feedback.confirm(Lsn(1000));
        let status = feedback.report(now);
        assert_eq!((status.write, status.flush), (Lsn(1000), Lsn(1000)));
    }

    #[test]
    fn twenty_hurried_repetitions_are_a_shutdown() {
        let (mut feedback, mut now) = reported();
        for count in 0..=20 {
            let verdict = feedback.keepalive(now, Lsn(7), true);
            assert_eq!(verdict.is_err(), count == 20, "repetition {count}");
            if verdict.is_err() {
                return;
            }
            let due = feedback.due(now);
            assert_eq!(due, if count == 0 { now } else { now + ms(5) });
            now = due;
            feedback.report(now);
            now += ms(1);
        }
    }

    #[test]
    fn a_slow_repetition_or_another_position_or_data_starts_anew() {
        let (mut feedback, mut now) = reported();
        for count in 0..200_u64 {
            let position = if count % 15 == 0 { Lsn(count) } else { Lsn(15 * (count / 15)) };
            if count % 40 == 0 {
                feedback.data(position);
            }
            feedback.keepalive(now, position, true).unwrap();
            feedback.report(now);
            now += ms(3);
        }
        for _ in 0..200 {
            feedback.keepalive(now, Lsn(9999), true).unwrap();
            feedback.report(now);
            now += ms(101);
        }
    }

    #[test]
    fn a_confirmation_cuts_the_pause_before_a_repetition_short() {
        let (mut feedback, now) = reported();
        feedback.keepalive(now, Lsn(7), true).unwrap();
        feedback.report(now);
        feedback.keepalive(now, Lsn(7), true).unwrap();
        assert_eq!(feedback.due(now), now + ms(5));
        feedback.confirm(Lsn(7));
        assert_eq!(feedback.due(now), now);
    }

    #[test]
    fn a_silent_server_is_probed_then_dead_but_not_while_reading_is_paused() {
        let (mut feedback, now) = reported();
        let late = now + ms(15_000);
        assert!(feedback.report(late).probe);
        assert!(!feedback.report(late + ms(10)).probe, "one probe per quarter");
        assert_eq!(feedback.dead_at(), Some(now + MINUTE));
        feedback.heard(late);
        assert_eq!(feedback.dead_at(), Some(late + MINUTE));

        feedback.pause(late, true);
        assert_eq!(feedback.dead_at(), None);
        assert!(!feedback.report(late + MINUTE * 60).probe);
        let much_later = late + MINUTE * 90;
        feedback.pause(much_later, false);
        assert_eq!(feedback.dead_at(), Some(much_later + MINUTE));
    }

    #[test]
    fn a_server_without_timeout_gets_a_minute_and_a_short_one_a_quarter_for_probes() {
        let now = Instant::now();
        assert_eq!(Feedback::new(now, None).dead_at(), Some(now + MINUTE));
        let mut short = Feedback::new(now, Some(ms(2000)));
        short.report(now);
        assert_eq!(short.due(now), now + ms(500));
    }

    #[test]
    fn a_report_is_encoded_as_the_protocol_crate_does() {
        let status = Status { write: Lsn(77), flush: Lsn(77), probe: true };
        let mut out = BytesMut::new();
        status.encode(UnixMicros(946_684_800_000_005), &mut out);
        let expected = pgwire_replication::protocol::encode_standby_status_update(
            pgwire_replication::Lsn(77),
            5,
            true,
        );
        assert_eq!(&out[5..], &expected[..]);
        assert_eq!(&out[..5], b"d\0\0\0\x26");
        assert_eq!(out.len(), 0x26 + 1);
    }
}
