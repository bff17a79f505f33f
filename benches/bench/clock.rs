//! The clock that PostgreSQL and nats-server put on what they store: both run on this machine.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970.
#[expect(clippy::disallowed_methods, reason = "compared with what the servers read off this clock")]
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// Notices that somebody set the clock: times across that are worth nothing.
pub struct Watch {
    wall: i64,
    steady: Instant,
}

impl Watch {
    pub fn start() -> Watch {
        Watch { wall: now(), steady: Instant::now() }
    }

    /// Milliseconds by which the clock was set since then, if that is more than two looks at two
    /// clocks take.
    pub fn jump(&self) -> Option<f64> {
        const LOOKS_MS: f64 = 0.5;
        let steady = self.steady.elapsed().as_secs_f64() * 1e3;
        let jump = (now() - self.wall) as f64 / 1e6 - steady;
        (jump.abs() > LOOKS_MS).then_some(jump)
    }
}
