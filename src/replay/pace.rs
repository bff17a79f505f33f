//! How fast events go: a limit per second without bursts. Pure: time comes in.

use std::str::FromStr;
use std::time::{Duration, Instant};

/// What was not used of the last moments may be made up for: a timer is late by a millisecond or two.
const CREDIT: Duration = Duration::from_millis(20);

/// Events per second; `None`: as fast as it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate(pub Option<u32>);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        if text == "unlimited" {
            return Ok(Rate(None));
        }
        let rate = text.parse().ok().filter(|rate| *rate > 0);
        rate.map(|rate| Rate(Some(rate)))
            .ok_or_else(|| "is neither a number of events per second nor `unlimited`".to_owned())
    }
}

impl Rate {
    /// Events that may be on their way and undecided: a second's worth, so that what gathered while
    /// the broker was away does not leave at once.
    pub fn undecided_max(self) -> usize {
        const UNLIMITED: usize = 4_096;
        let second = self.0.map_or(UNLIMITED, |rate| usize::try_from(rate).unwrap_or(UNLIMITED));
        second.clamp(16, UNLIMITED)
    }
}

/// Tells when the next event may go.
#[derive(Debug)]
pub struct Pace {
    each: Duration,
    next: Instant,
}

impl Pace {
    pub fn new(rate: Rate, now: Instant) -> Pace {
        let each = rate.0.map_or(Duration::ZERO, |rate| Duration::from_secs(1) / rate.max(1));
        Pace { each, next: now }
    }

    /// May one go now? Then it counts.
    pub fn take(&mut self, now: Instant) -> bool {
        if self.next > now {
            return false;
        }
        let earliest = now.checked_sub(CREDIT).unwrap_or(now);
        self.next = self.next.max(earliest) + self.each;
        true
    }

    /// When the next one may go.
    pub fn next(&self) -> Instant {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_as_many_events_as_it_may_have() {
        let start = Instant::now();
        for rate in [1, 7, 1_000, 50_000] {
            let mut pace = Pace::new(Rate(Some(rate)), start);
            let mut taken = 0;
            // Looked at every millisecond, and not for some seconds in between.
            for millis in (0..1_000).chain(5_000..6_000) {
                while pace.take(start + Duration::from_millis(millis)) {
                    taken += 1;
                }
            }
            let credit = u64::from(rate) * 20 / 1_000;
            let most = 2 * u64::from(rate) + credit + 2;
            assert!(taken <= most && taken + 2 >= 2 * u64::from(rate).min(most), "{rate}: {taken}");
        }
    }

    #[test]
    fn rates_are_numbers_or_unlimited() {
        assert_eq!("500".parse(), Ok(Rate(Some(500))));
        assert_eq!("unlimited".parse(), Ok(Rate(None)));
        for text in ["0", "-1", "fast", "1.5", ""] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        let mut free = Pace::new(Rate(None), Instant::now());
        let now = Instant::now();
        assert!((0..100_000).all(|_| free.take(now)));
    }
}
