//! P3, for the first occurrences of one run in one stream. What is promised depends on who brought
//! the rows to the relay:
//!
//! 1. Rows that only WAL brought: commit order, through hand-over, gaps and everything else.
//! 2. Rows that only looks through the table found: sequence order, but for a row that was found
//!    first by a later look than the other (it was not visible before).
//! 3. A row that was missed and committed before a slot's start comes before every row that WAL
//!    brought and that committed behind that start.
//! 4. A row that only WAL brought comes before a row that was missed, not left out by the publication,
//!    and committed behind it.
//!
//! Nothing is promised between a row that the publication left out and those that WAL brought
//! around it, and nothing for a row that went away while it waited: a message of it whose outcome
//! was unknown can be stored after a whole recovery, when nobody waits for it any more.

use std::collections::BTreeMap;

use outboxd::lsn::Position;

use crate::postgres::Postgres;

/// Who brought a row to the core.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fed {
    pub wal: bool,
    /// The first look that found it missed.
    pub missed: Option<u64>,
}

#[derive(Debug, Default)]
pub struct RunOrder {
    /// Of those that only WAL brought.
    newest_wal: Option<Position>,
    /// Of those that were missed because a slot was lost.
    newest_missed: Option<Position>,
    /// First look → highest number, of those that only looks found.
    found: BTreeMap<u64, i64>,
}

impl RunOrder {
    /// The first message of a row was stored.
    pub fn first_of(&mut self, destination: usize, seq: i64, fed: Fed, postgres: &Postgres) {
        let txn = postgres.txn_of(seq).expect("a committed row");
        if postgres.deleted.contains(&seq) && postgres.ledger.is_final(destination, seq) {
            return;
        }
        let position = postgres.row(seq).and_then(|row| row.position).expect("a committed row");
        let what = |other: Option<Position>| {
            format!("{seq} at {position} stored first behind {other:?}, destination {destination}")
        };
        let Some(look) = fed.missed else {
            assert!(self.newest_wal <= Some(position), "P3.1: {}", what(self.newest_wal));
            assert!(self.newest_missed <= Some(position), "P3.4: {}", what(self.newest_missed));
            self.newest_wal = Some(position);
            return;
        };
        let start = postgres.start_above(txn.commit_lsn);
        if let Some(start) = start {
            let behind = self.newest_wal.filter(|newest| newest.commit_lsn >= start.lsn);
            assert!(behind.is_none(), "P3.3: {}, slot from {}", what(behind), start.lsn);
            if !txn.left_out {
                self.newest_missed = self.newest_missed.max(Some(position));
            }
        }
        if !fed.wal {
            let above = self.found.range(look..).map(|(_, seq)| *seq).max();
            assert!(
                above < Some(seq),
                "P3.2: {seq} stored first behind {above:?} of {destination}"
            );
            let highest = self.found.entry(look).or_insert(seq);
            *highest = seq.max(*highest);
        }
    }
}
