//! What relay and ledger tell, held against the stream.

use std::collections::HashSet;
use std::time::Duration;

use outboxd::sandbox::{Relay, World};
use serde_json::Value;

/// Looks until it is so.
pub async fn until(what: &str, within: Duration, mut look: impl AsyncFnMut() -> bool) {
    let start = std::time::Instant::now();
    while !look().await {
        assert!(start.elapsed() < within, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A value of `/api/status`, named as RFC 6901 does; null while the relay does not answer.
pub async fn status(relay: &Relay, pointer: &str) -> Value {
    let answer = relay.get("/api/status").await.map(|(_, body)| body).unwrap_or_default();
    let report = serde_json::from_str::<Value>(&answer).unwrap_or_default();
    report.pointer(pointer).cloned().unwrap_or_default()
}

/// Everything that the ledger calls published is in the stream. Asked while the relay works: the
/// ledger is read first.
pub async fn assert_recorded_is_stored(world: &World) {
    let recorded = world.recorded("events").await.unwrap();
    let stored: HashSet<_> = world
        .messages()
        .await
        .unwrap()
        .into_iter()
        .filter_map(|seen| Some(seen.event?.id))
        .collect();
    let lost: Vec<_> = recorded.difference(&stored).collect();
    assert!(
        lost.is_empty(),
        "{} events are published by the ledger and not in the stream, of {} and {}: {:?}\n{}",
        lost.len(),
        recorded.len(),
        stored.len(),
        lost.first(),
        super::log_tail(world)
    );
    println!("ledger {} stream {}", recorded.len(), stored.len());
}
