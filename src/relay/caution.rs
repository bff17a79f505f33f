//! How careful a destination is after refusals that may heal: a full stream refuses everything, a
//! full subject only the runs that need it, and an answer doesn't tell which. So each refused run
//! waits by itself, and after some refusals in a row events are tried one at a time with pauses:
//! quick enough to get past refused runs to one that is taken, rare enough for a long outage.

use std::time::{Duration, Instant};

/// Refusals in a row, over all runs, that make a destination careful.
const REFUSALS_MAX: u32 = 4;
/// Pause after each further refusal: a hundred tries a second are a few percent of a processor,
/// and pass a thousand refused runs in ten seconds.
const PAUSE: Duration = Duration::from_millis(10);
/// After so many refusals in a row it is the stream, and a healthy run is not to be found.
const REFUSALS_LONG: u32 = 1_000;
/// Pause then: it bounds how long a run that would be taken waits.
const PAUSE_LONG: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Caution {
    refusals: u32,
    paused_until: Option<Instant>,
    /// Something was stored after a row of refusals, and nothing refused since.
    healing: bool,
}

impl Caution {
    /// An event was refused.
    pub fn refused(&mut self, now: Instant) {
        self.healing = false;
        self.refusals = self.refusals.saturating_add(1);
        if self.is_careful() {
            let pause = if self.refusals < REFUSALS_LONG { PAUSE } else { PAUSE_LONG };
            self.paused_until = Some(now + pause);
        }
    }

    /// Events were stored. True: runs that wait may be tried before their time, some for each
    /// event, so that all are back soon after a stream has room again, and a few tries too many
    /// are made when it was one subject only.
    pub fn stored(&mut self) -> bool {
        self.healing |= self.is_careful();
        self.refusals = 0;
        self.paused_until = None;
        self.healing
    }

    /// No run waits any more.
    pub fn healed(&mut self) {
        self.healing = false;
    }

    /// A new connection.
    pub fn reset(&mut self) {
        *self = Caution::default();
    }

    /// Is nothing to be sent now?
    pub fn is_paused(&mut self, now: Instant) -> bool {
        self.paused_until = self.paused_until.filter(|until| *until > now);
        self.paused_until.is_some()
    }

    /// When the pause ends.
    pub fn wake_at(&self) -> Option<Instant> {
        self.paused_until
    }

    /// Is it the stream, and not some runs?
    pub fn is_hopeless(&self) -> bool {
        self.refusals >= REFUSALS_LONG
    }

    /// One event at a time?
    pub fn is_careful(&self) -> bool {
        self.refusals >= REFUSALS_MAX
    }
}
