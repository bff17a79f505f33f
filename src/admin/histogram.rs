//! Latencies in fixed buckets: recording is two atomic additions, so nothing grows between scrapes,
//! and a whole batch can be recorded at once. Knows no text format.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::lock;

/// Upper bounds, microseconds: 0.1 ms to 60 s, three to four a decade, finer around 1 ms, where the
/// target is.
pub const BOUNDS_MICROS: [u64; 31] = [
    100, 200, 300, 500, 700, 1_000, 1_500, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 20_000,
    30_000, 50_000, 70_000, 100_000, 150_000, 200_000, 300_000, 500_000, 700_000, 1_000_000,
    2_000_000, 3_000_000, 5_000_000, 10_000_000, 20_000_000, 30_000_000, 60_000_000,
];

/// Buckets with the last, open one.
const BUCKETS: usize = BOUNDS_MICROS.len() + 1;

/// Events per bucket, not cumulative.
pub type Counts = [u64; BUCKETS];

/// How many marks are kept: the window of percentiles is this many calls of `mark` long.
const MARKS: usize = 12;

/// See the module.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; BUCKETS],
    sum_micros: AtomicU64,
    marks: Mutex<VecDeque<Counts>>,
}

/// Percentiles of a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Percentiles {
    /// Events in the window.
    pub count: u64,
    /// Half were faster.
    pub p50: Duration,
    /// 99 of 100 were faster.
    pub p99: Duration,
}

impl Histogram {
    /// Records one event.
    pub fn record(&self, value: Duration) {
        self.record_many(value, 1);
    }

    /// Records events that took equally long.
    pub fn record_many(&self, value: Duration, events: u64) {
        let micros = u64::try_from(value.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_MICROS.partition_point(|bound| *bound < micros);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(events, Ordering::Relaxed);
        }
        self.sum_micros.fetch_add(micros.saturating_mul(events), Ordering::Relaxed);
    }

    /// Events per bucket since the start.
    pub fn counts(&self) -> Counts {
        std::array::from_fn(|at| {
            self.counts.get(at).map_or(0, |count| count.load(Ordering::Relaxed))
        })
    }

    /// Sum of all values.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_micros.load(Ordering::Relaxed))
    }

    /// Moves the window on; to be called at regular intervals.
    pub fn mark(&self) {
        let mut marks = lock(&self.marks);
        marks.push_back(self.counts());
        if marks.len() > MARKS {
            marks.pop_front();
        }
    }

    /// Percentiles since the oldest mark; `None` when nothing was recorded.
    pub fn recent(&self) -> Option<Percentiles> {
        let before = lock(&self.marks).front().copied().unwrap_or([0; BUCKETS]);
        let mut counts = self.counts();
        counts.iter_mut().zip(before).for_each(|(now, then)| *now = now.saturating_sub(then));
        let count: u64 = counts.iter().sum();
        let at = |share| percentile(&counts, count, share);
        (count > 0).then(|| Percentiles { count, p50: at(500), p99: at(990) })
    }
}

/// The value below which `per_mille` of `count` events lie, evenly spread inside a bucket.
fn percentile(counts: &Counts, count: u64, per_mille: u64) -> Duration {
    let rank = (u128::from(count) * u128::from(per_mille)).div_ceil(1000);
    let mut below = 0u128;
    let mut low = 0u64;
    for (inside, high) in counts.iter().zip(BOUNDS_MICROS) {
        let inside = u128::from(*inside);
        if below + inside >= rank && inside > 0 {
            let part = u128::from(high - low) * (rank - below) / inside;
            return Duration::from_micros(low + u64::try_from(part).unwrap_or(0));
        }
        below += inside;
        low = high;
    }
    Duration::from_micros(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_the_window() {
        let histogram = Histogram::default();
        assert_eq!(histogram.recent(), None);
        histogram.record_many(Duration::from_micros(900), 98);
        histogram.record(Duration::from_millis(40));
        histogram.record(Duration::from_secs(3600));
        let recent = histogram.recent().unwrap();
        assert_eq!(recent.count, 100);
        assert!((700..=1000).contains(&recent.p50.as_micros()), "{recent:?}");
        assert_eq!(recent.p99, Duration::from_millis(50));
        for _ in 0..=MARKS {
            histogram.mark();
        }
        assert_eq!(histogram.recent(), None);
        assert_eq!(histogram.counts().iter().sum::<u64>(), 100);
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::default();
        histogram.record(Duration::from_micros(100));
        histogram.record(Duration::from_micros(101));
        assert_eq!(histogram.counts()[..3], [1, 1, 0]);
        assert_eq!(histogram.sum(), Duration::from_micros(201));
    }
}
