//! Sees the acks of JetStream to somebody else, and when they came.
//!
//! An ack is a message on the reply subject that the publisher chose. A second subscriber of that
//! publisher's inbox is sent the same message in the same moment, over a connection of its own. So the
//! time is taken outside of whoever is measured, and by the same means for each.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use tokio::task::JoinHandle;

use crate::Result;
use crate::wire::{Message, Wire};

/// See the module. Ends when it is dropped.
pub struct Tap {
    stop: Arc<AtomicBool>,
    listening: Option<JoinHandle<Result<Vec<Message>>>>,
}

/// When each stream sequence was acknowledged.
pub type Acks = HashMap<u64, i64>;

impl Tap {
    /// Listens on everything below the inbox from now on.
    pub async fn start(port: u16, inbox: &str) -> Result<Tap> {
        let stop = Arc::new(AtomicBool::new(false));
        let subject = format!("{inbox}.>");
        let mut wire = tokio::task::spawn_blocking(move || {
            let mut wire = Wire::connect(port)?;
            wire.subscribe(&subject)?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(wire)
        })
        .await??;
        let stopped = Arc::clone(&stop);
        let listening = tokio::task::spawn_blocking(move || {
            let mut seen = Vec::new();
            loop {
                match wire.poll()? {
                    Some(message) => seen.push(message),
                    // What was on its way has arrived.
                    None if stopped.load(Ordering::Relaxed) => return Ok(seen),
                    None => {}
                }
            }
        });
        Ok(Tap { stop, listening: Some(listening) })
    }

    /// What it heard of a stream.
    pub async fn stop(mut self, stream: &str) -> Result<Acks> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(listening) = self.listening.take() else { return Ok(Acks::new()) };
        let mut acks = Acks::new();
        for message in listening.await?? {
            let Ok(body) = serde_json::from_slice::<Value>(&message.payload) else { continue };
            let number = |name: &str| body.get(name).and_then(Value::as_u64);
            if body.get("stream").and_then(Value::as_str) != Some(stream) {
                continue;
            }
            let (Some(last), count) = (number("seq"), number("count").unwrap_or(1)) else {
                continue;
            };
            // The ack of a batch is about all of its messages.
            for seq in (last + 1).saturating_sub(count)..=last {
                acks.entry(seq).or_insert(message.at);
            }
        }
        Ok(acks)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
