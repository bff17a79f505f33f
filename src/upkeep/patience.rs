//! How often, and after what pauses, a step is tried again whose lock was not to be had. Each try
//! makes INSERTs wait for up to 100 ms, so the pauses grow; together they outlast a transaction of
//! a minute.

use std::time::Duration;

const PAUSES: &[u64] = &[1, 2, 4, 8, 15, 30, 30, 30];

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct Patience(usize);

impl Patience {
    /// The pause before the next try; `None` when there is none.
    pub fn next_pause(&mut self) -> Option<Duration> {
        let pause = PAUSES.get(self.0)?;
        self.0 += 1;
        Some(Duration::from_secs(*pause))
    }

    /// Was there no try in vain yet?
    pub fn is_fresh(&self) -> bool {
        self.0 == 0
    }

    /// The lock was to be had.
    pub fn reset(&mut self) {
        self.0 = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_outlasts_a_minute_and_ends() {
        let mut patience = Patience::default();
        let first: Vec<_> = std::iter::from_fn(|| patience.next_pause()).collect();
        assert!(first.iter().sum::<Duration>() > Duration::from_secs(60));
        assert!(first.is_sorted() && patience.next_pause().is_none());
        patience.reset();
        assert_eq!(patience.next_pause(), Some(Duration::from_secs(1)));
    }
}
