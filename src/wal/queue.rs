//! What was read and not yet taken: a queue bounded by bytes between the socket's task and the
//! session. Items cross it in whole chunks, one lock for each.

use bytes::Bytes;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

use crate::error::Failure;
use crate::lsn::Lsn;

/// One message of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WalItem {
    /// A pgoutput message.
    Data {
        /// Where in the WAL it comes from; zero for some.
        wal_start: Lsn,
        /// The server's position when it sent it.
        wal_end: Lsn,
        /// A slice of the read buffer: copy what is kept, so that the buffer can be used again.
        payload: Bytes,
    },
    /// Everything up to here has been sent.
    Keepalive {
        /// The server's position.
        wal_end: Lsn,
    },
}

impl WalItem {
    /// What the item counts for in the queue.
    pub(super) fn weight(&self) -> usize {
        size_of::<WalItem>()
            + match self {
                WalItem::Data { payload, .. } => payload.len(),
                WalItem::Keepalive { .. } => 0,
            }
    }
}

#[derive(Debug, Default)]
struct State {
    items: Vec<WalItem>,
    bytes: usize,
    end: Option<Failure>,
}

/// Shared by one writer and one reader.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    limit_bytes: usize,
    filled: Notify,
    emptied: Notify,
}

impl Queue {
    pub(super) fn new(limit_bytes: usize) -> Queue {
        Queue {
            state: Mutex::default(),
            limit_bytes,
            filled: Notify::new(),
            emptied: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a chunk and leaves `items` empty. Full means stop reading; the chunk that fills the
    /// queue is taken whole.
    pub(super) fn push(&self, items: &mut Vec<WalItem>) {
        if items.is_empty() {
            return;
        }
        let mut state = self.lock();
        state.bytes += items.iter().map(WalItem::weight).sum::<usize>();
        match state.items.is_empty() {
            true => std::mem::swap(&mut state.items, items),
            false => state.items.append(items),
        }
        drop(state);
        self.filled.notify_one();
    }

    /// Nothing follows but this failure.
    pub(super) fn close(&self, failure: Failure) {
        self.lock().end.get_or_insert(failure);
        self.filled.notify_one();
    }

    pub(super) fn is_full(&self) -> bool {
        self.lock().bytes >= self.limit_bytes
    }

    /// Resolves after the reader took something.
    pub(super) async fn emptied(&self) {
        self.emptied.notified().await;
    }

    /// Everything that is there, at least one item; then, for good, the failure.
    pub(super) async fn take(&self) -> Result<Vec<WalItem>, Failure> {
        loop {
            {
                let mut state = self.lock();
                if !state.items.is_empty() {
                    let was_full = state.bytes >= self.limit_bytes;
                    state.bytes = 0;
                    let items = std::mem::take(&mut state.items);
                    drop(state);
                    if was_full {
                        self.emptied.notify_one();
                    }
                    return Ok(items);
                }
                if let Some(end) = &state.end {
                    return Err(end.clone());
                }
            }
            self.filled.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn item(bytes: usize) -> WalItem {
        let payload = Bytes::from(vec![0; bytes]);
        WalItem::Data { wal_start: Lsn::ZERO, wal_end: Lsn::ZERO, payload }
    }

    #[tokio::test]
    async fn chunks_keep_their_order_and_the_failure_comes_last() {
        let queue = Queue::new(1000);
        queue.push(&mut vec![item(1), item(2)]);
        queue.push(&mut vec![item(3)]);
        assert!(!queue.is_full());
        queue.push(&mut vec![item(1000)]);
        assert!(queue.is_full());
        queue.close(Failure::new(Kind::SourceSilent, "first"));
        queue.close(Failure::new(Kind::Internal, "second"));
        assert_eq!(queue.take().await, Ok(vec![item(1), item(2), item(3), item(1000)]));
        assert!(!queue.is_full());
        queue.emptied().await;
        for _ in 0..2 {
            assert_eq!(queue.take().await.map_err(|end| end.kind), Err(Kind::SourceSilent));
        }
    }
}
