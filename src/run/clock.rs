//! The one place where the relay reads clocks. Lag is told on the database's clock: the offset
//! between the two is measured at connect.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::event::UnixMicros;

/// Monotonic time.
pub fn now() -> Instant {
    Instant::now()
}

/// This machine's wall clock.
#[expect(clippy::disallowed_methods, reason = "this is the one place")]
pub fn wall() -> UnixMicros {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMicros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}
