//! What the slow path asks of the database: rows of waiting events, what waits in the ledger, looks
//! through the table. On the control connection, like [`super::work`], and in bounded statements,
//! since receipts must not queue up behind them.

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::Failure;
use crate::relay::machine::{Loaded, WaitingPart};
use crate::relay::outcome::DestinationId;
use crate::relay::waiting::Waiter;
use crate::run::sweeper::{Advance, LOOK_LIMIT, LookRequest, Looked};
use crate::run::work::{Done, Ledger};
use crate::store::waiting::Waiting;

/// As the core wants them. `gap`: the receipt up to which what was handed over is older than the
/// rows that are missing.
pub fn waiters(part: &Waiting, gap: Option<i64>) -> Vec<Waiter> {
    let waiter = |one: &crate::store::waiting::Waiter| Waiter {
        seq: one.seq,
        run: one.run,
        until: one.until,
        old: gap.is_some_and(|gap| one.receipt_id <= gap),
    };
    part.entries.iter().map(waiter).collect()
}

impl Ledger {
    /// Reads the rows of waiting events, in their order. A row that can't be seen may become
    /// visible yet: its transaction waits for a standby. When all have ended that were open, it was
    /// deleted.
    pub async fn load(
        self: Arc<Self>,
        id: DestinationId,
        destination: String,
        waiters: Vec<Waiter>,
        max_bytes: usize,
    ) -> Done {
        Done::Loaded(id, self.loaded(&destination, &waiters, max_bytes).await)
    }

    async fn loaded(
        &self,
        destination: &str,
        waiters: &[Waiter],
        max_bytes: usize,
    ) -> Result<Loaded, Failure> {
        let seqs: Vec<i64> = waiters.iter().map(|waiter| waiter.seq).collect();
        let rows = self.store.rows_bounded(&self.client, &seqs, max_bytes).await?;
        let (mut events, count) = (rows.events, rows.looked_up);
        let seen: HashSet<i64> = events.iter().map(|event| event.seq).collect();
        let absent: Vec<i64> =
            seqs.iter().take(count).copied().filter(|seq| !seen.contains(seq)).collect();
        let absent = match absent.is_empty() {
            true => absent,
            // What a prune or an erasure took need not be waited for.
            false => self.store.not_gone(&self.client, destination, &absent).await?,
        };
        if !absent.is_empty() {
            let open = self.store.mark_frontier(&self.client).await?.open;
            self.store.all_ended(&self.client, open).await?;
            let late = self.store.rows(&self.client, &absent).await?;
            let late_seqs: HashSet<i64> = late.iter().map(|event| event.seq).collect();
            let lost: Vec<i64> =
                absent.iter().copied().filter(|seq| !late_seqs.contains(seq)).collect();
            let lost = match lost.is_empty() {
                true => lost,
                false => self.store.not_gone(&self.client, destination, &lost).await?,
            };
            if !lost.is_empty() {
                tracing::error!(
                    destination,
                    events = lost.len(),
                    first_seq = lost.first(),
                    "rows were deleted while their events waited for this destination: they are \
                     lost to it"
                );
            }
            events.extend(late);
        }
        Ok(Loaded { count, events })
    }

    /// Reads more of what waits in the ledger: behind a receipt, about so many numbers.
    pub async fn read_waiting(
        self: Arc<Self>,
        id: DestinationId,
        destination: String,
        (after, most): (i64, usize),
        gap: Option<i64>,
    ) -> Done {
        let read = self.store.waiting(&self.client, &destination, after, most).await;
        let part = read.map(|part| WaitingPart {
            waiters: waiters(&part, gap),
            upto: part.last_id,
            complete: part.complete,
        });
        Done::WaitingRead(id, part)
    }

    /// Looks for rows without a receipt, and commits a marker when there are some.
    pub async fn look(self: Arc<Self>, request: LookRequest) -> Done {
        Done::Looked(self.looked(request).await)
    }

    async fn looked(&self, request: LookRequest) -> Result<Looked, Failure> {
        let LookRequest { mark, ways, token } = request;
        let mark = match mark {
            Some(mut mark) => {
                mark.open = self.store.still_open(&self.client, &mark.open).await?;
                mark
            }
            None => self.store.mark_frontier(&self.client).await?,
        };
        let to = self.store.last_number(&self.client).await?;
        let mut looks = Vec::with_capacity(ways.len());
        for (progress, held) in &ways {
            looks.push(self.store.look(&self.client, progress, to, held, LOOK_LIMIT).await?);
        }
        let marker = match looks.iter().any(|look| !look.undecided.is_empty()) {
            true => Some(self.store.marker(&self.client, &token).await?),
            false => None,
        };
        Ok(Looked { mark, looks, marker })
    }

    /// Reads rows that a look found.
    pub async fn read_rows(self: Arc<Self>, seqs: Vec<i64>, max_bytes: usize) -> Done {
        Done::Rows(self.store.rows_bounded(&self.client, &seqs, max_bytes).await)
    }

    /// Records how far the looks came.
    pub async fn advance(self: Arc<Self>, advances: Vec<Advance>) -> Done {
        Done::Advanced(self.advanced(&advances).await)
    }

    async fn advanced(&self, advances: &[Advance]) -> Result<(), Failure> {
        for Advance { progress, closes_gap } in advances {
            self.store.advance(&self.client, progress).await?;
            if *closes_gap {
                self.store.close_gap(&self.client, &progress.name).await?;
                tracing::info!(
                    destination = progress.name,
                    "the gap is closed: every row that no WAL brings is accounted for"
                );
            }
        }
        Ok(())
    }
}
