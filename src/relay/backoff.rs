//! Jittered exponential back-off, pure: the dice are a seeded counter, so that a simulation repeats.

use std::time::Duration;

/// Longest wait between two tries.
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Wait before the second try, before jitter.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(100);

/// Counts failures in a row. A clean try resets it.
#[derive(Debug, Clone)]
pub struct Backoff {
    failures: u32,
    dice: u64,
}

impl Backoff {
    /// `seed` spreads relays that fail at the same moment.
    pub fn new(seed: u64) -> Backoff {
        Backoff { failures: 0, dice: seed }
    }

    /// How long to wait after one more failure: doubles up to [`BACKOFF_MAX`], between half and
    /// all of it, so that many clients don't come back in step.
    pub fn next_wait(&mut self) -> Duration {
        let wait = self.wait_after(self.failures);
        self.failures = (self.failures + 1).min(16);
        wait
    }

    /// The same for somebody who counts the earlier failures himself.
    pub fn wait_after(&mut self, failures: u32) -> Duration {
        let doubled = BACKOFF_FIRST.saturating_mul(1u32.checked_shl(failures).unwrap_or(u32::MAX));
        let whole = doubled.min(BACKOFF_MAX);
        // splitmix64: any well-mixed function will do.
        self.dice = self.dice.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.dice ^ (self.dice >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let share = u32::try_from((mixed >> 32) % 512).unwrap_or(0);
        whole.mul_f64(0.5 + f64::from(share) / 1024.0)
    }

    /// The last try was clean.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Failures in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_the_limit_and_stays_there() {
        let mut backoff = Backoff::new(7);
        let waits: Vec<_> = (0..40).map(|_| backoff.next_wait()).collect();
        assert!(waits[0] >= BACKOFF_FIRST / 2 && waits[0] <= BACKOFF_FIRST);
        assert!(waits.iter().all(|wait| *wait <= BACKOFF_MAX));
        assert!(waits[20..].iter().all(|wait| *wait >= BACKOFF_MAX / 2));
        backoff.reset();
        assert!(backoff.next_wait() <= BACKOFF_FIRST);
    }
}
