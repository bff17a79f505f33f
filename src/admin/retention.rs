//! What retention did since the process started. Written by its job, read by the endpoints.

use std::sync::atomic::{AtomicU64, Ordering};

/// See the module.
#[derive(Debug, Default)]
pub struct RetentionStatus {
    rows: AtomicU64,
    gone: AtomicU64,
    made: AtomicU64,
    dropped: AtomicU64,
    receipts: AtomicU64,
    passes: AtomicU64,
    busy: AtomicU64,
}

/// The figures at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Figures {
    /// Rows that went, with partitions or one by one.
    pub rows: u64,
    /// Of these, undecided at an optional destination; each counts once per destination.
    pub gone: u64,
    /// Partitions made.
    pub partitions_made: u64,
    /// Partitions dropped.
    pub partitions_dropped: u64,
    /// Receipts merged into others or deleted.
    pub receipts: u64,
    /// Passes that came to their end.
    pub passes: u64,
    /// Steps given up for the next pass, since a lock was not to be had.
    pub busy: u64,
}

impl RetentionStatus {
    /// More was done.
    pub fn add(&self, more: &Figures) {
        let add = |counter: &AtomicU64, more| counter.fetch_add(more, Ordering::Relaxed);
        add(&self.rows, more.rows);
        add(&self.gone, more.gone);
        add(&self.made, more.partitions_made);
        add(&self.dropped, more.partitions_dropped);
        add(&self.receipts, more.receipts);
        add(&self.passes, more.passes);
        add(&self.busy, more.busy);
    }

    /// The figures now.
    pub fn figures(&self) -> Figures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Figures {
            rows: read(&self.rows),
            gone: read(&self.gone),
            partitions_made: read(&self.made),
            partitions_dropped: read(&self.dropped),
            receipts: read(&self.receipts),
            passes: read(&self.passes),
            busy: read(&self.busy),
        }
    }
}
