//! How long events took, measured twice: by the relay up to the ack, and from outside up to the
//! stream.

use std::collections::HashMap;
use std::fmt;

use crate::sandbox::{Result, SandboxError, World};

const HISTOGRAM: &str = "outboxd_commit_to_ack_seconds_bucket{";

/// A time, or a word where there is none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Millis(Option<f64>);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(millis) => write!(f, "{millis:.2}ms"),
            None => write!(f, "unknown"),
        }
    }
}

/// Percentiles over all events.
#[derive(Debug)]
pub struct Latency {
    /// Commit to ack, half were faster.
    pub ack_p50: Millis,
    /// Commit to ack, 99 of 100 were faster.
    pub ack_p99: Millis,
    /// Commit to the stream's timestamp.
    pub stream_p50: Millis,
    /// Commit to the stream's timestamp.
    pub stream_p99: Millis,
}

impl Latency {
    /// Asks the relay for its histogram, and both servers for the times that they noted.
    pub async fn measure(world: &World) -> Result<Latency> {
        let (_, metrics) = world.relay.get("/metrics").await?;
        let buckets = buckets(&metrics);
        let times = times(world).await?;
        Ok(Latency {
            ack_p50: Millis(percentile_of_buckets(&buckets, 0.50)),
            ack_p99: Millis(percentile_of_buckets(&buckets, 0.99)),
            stream_p50: Millis(percentile(&times, 50)),
            stream_p99: Millis(percentile(&times, 99)),
        })
    }
}

/// Milliseconds from PostgreSQL's commit timestamp to JetStream's, ascending. Both servers read the
/// same clock.
async fn times(world: &World) -> Result<Vec<f64>> {
    let client = world.postgres.connect().await?;
    let sql = "SELECT id, (extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1e6)::bigint \
                 FROM outbox.event";
    let rows = client.query(sql, &[]).await.map_err(SandboxError::from)?;
    let committed: HashMap<uuid::Uuid, i64> =
        rows.iter().filter_map(|row| Some((row.get(0), row.get::<_, Option<i64>>(1)?))).collect();
    let messages = world.messages().await?;
    let mut times: Vec<f64> = messages
        .iter()
        .filter_map(|seen| {
            let committed = i128::from(*committed.get(&seen.event.as_ref()?.id)?) * 1_000;
            let nanos = i64::try_from(seen.stored_at.checked_sub(committed)?).ok()?;
            #[expect(clippy::cast_precision_loss, reason = "shown with two digits")]
            let nanos = nanos as f64;
            Some(nanos / 1e6)
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}

/// Nearest rank.
fn percentile(ascending: &[f64], percent: usize) -> Option<f64> {
    let rank = (ascending.len() * percent).div_ceil(100).max(1);
    ascending.get(rank - 1).copied()
}

/// Upper bound in seconds, events at or below it; ascending.
fn buckets(metrics: &str) -> Vec<(f64, f64)> {
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(HISTOGRAM));
    lines
        .filter_map(|line| {
            let (labels, count) = line.split_once("} ")?;
            let bound = labels.split("le=\"").nth(1)?.split('"').next()?;
            Some((bound.replace("+Inf", "inf").parse().ok()?, count.trim().parse().ok()?))
        })
        .collect()
}

/// Milliseconds; events are taken to be spread evenly inside their bucket.
fn percentile_of_buckets(buckets: &[(f64, f64)], share: f64) -> Option<f64> {
    let all = buckets.last().map(|(_, count)| *count).filter(|count| *count > 0.0)?;
    let wanted = all * share;
    let (mut lower, mut below) = (0.0, 0.0);
    for (bound, count) in buckets {
        if *count >= wanted {
            let inside = if *count > below { (wanted - below) / (count - below) } else { 1.0 };
            // The last bucket has no upper bound.
            let width = if bound.is_finite() { bound - lower } else { 0.0 };
            return Some((lower + width * inside) * 1e3);
        }
        (lower, below) = (*bound, *count);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_come_from_cumulative_buckets() {
        let text = "\
# TYPE outboxd_commit_to_ack_seconds histogram
outboxd_commit_to_ack_seconds_bucket{le=\"0.001\"} 50
outboxd_commit_to_ack_seconds_bucket{le=\"0.002\"} 100
outboxd_commit_to_ack_seconds_bucket{le=\"+Inf\"} 100
outboxd_commit_to_ack_seconds_count 100
";
        let buckets = buckets(text);
        assert_eq!(buckets.len(), 3);
        assert_eq!(percentile_of_buckets(&buckets, 0.25), Some(0.5));
        assert_eq!(percentile_of_buckets(&buckets, 0.50), Some(1.0));
        assert_eq!(percentile_of_buckets(&buckets, 0.75), Some(1.5));
        assert_eq!(percentile_of_buckets(&[], 0.5), None);
    }

    #[test]
    fn percentiles_of_a_list_are_its_members() {
        let times: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&times, 50), Some(100.0));
        assert_eq!(percentile(&times, 99), Some(198.0));
        assert_eq!(percentile(&[7.0], 99), Some(7.0));
        assert_eq!(percentile(&[], 50), None);
    }
}
