//! The end of a run: when everything is in order again, and what must hold then.

use outboxd::lsn::Lsn;

use crate::world::World;

impl World {
    /// Is no run slow any more, while there is still inflow?
    pub fn waits_nowhere(&self) -> bool {
        self.session.as_ref().is_some_and(|session| {
            session.relay.destinations().iter().all(|each| each.waiting().is_over())
        })
    }

    pub fn is_drained(&mut self) -> bool {
        if !self.closed || !self.waits_nowhere() || !self.postgres.ledger.gaps.is_empty() {
            return false;
        }
        let (postgres, last) = (&self.postgres, self.postgres.last_seq());
        for (at, upto) in self.finals.iter_mut().enumerate() {
            let done = |seq| {
                let here = postgres.rows.contains_key(&seq) && !postgres.deleted.contains(&seq);
                !here || postgres.ledger.is_final(at, seq)
            };
            while *upto < last && done(*upto + 1) {
                *upto += 1;
            }
            if *upto < last {
                return false;
            }
        }
        let end = self.postgres.wal.last().map_or(Lsn::ZERO, |txn| txn.end_lsn);
        self.session.as_ref().is_some_and(|session| {
            let empty = |each: &outboxd::relay::destination::Destination| each.lanes().is_empty();
            session.relay.confirmable() >= end.max(self.postgres.insert_lsn())
                && session.relay.destinations().iter().all(empty)
        })
    }

    /// The checks of the end: P1 for every row, everywhere.
    pub fn end(&mut self) {
        let rows: Vec<i64> = self.postgres.rows.keys().copied().collect();
        for seq in rows {
            for at in 0..self.sites.len() {
                let row = self.postgres.row(seq).expect("a row");
                let takes = row.fault.is_some() || self.sites[at].takes(row);
                let dead = self.postgres.ledger.dead_letters.contains(&(at, seq));
                if self.postgres.deleted.contains(&seq) {
                    continue;
                }
                assert!(self.postgres.ledger.is_final(at, seq), "P1: {seq} is in no receipt");
                assert!(!takes || dead || self.streams.has(at, seq), "P1: {seq} is lost");
                if !takes {
                    self.swarm.count("unmatched");
                }
            }
        }
        let session = self.session.as_ref().expect("a session");
        assert_eq!(session.relay.held_bytes(), 0, "P8: bytes held by nothing");
        assert_eq!(session.relay.oldest_held(), None);
        for destination in session.relay.destinations() {
            assert_eq!(destination.waiting().slow_runs(), 0, "slow runs at the end");
        }
    }
}
