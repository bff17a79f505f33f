//! Which LSN may be confirmed: the end of the longest prefix of transactions that hold nothing
//! back. This is promise P5 (and the "never pins WAL" half of P6); nothing else computes an LSN.

use std::collections::BTreeMap;

use crate::lsn::Lsn;

/// A transaction, named by its commit LSN (unique within one history).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TxnId(pub Lsn);

#[derive(Debug)]
struct Txn {
    /// Where the next transaction may begin; `None` while the transaction is still being read.
    end: Option<Lsn>,
    /// Events of it, counted once per destination, that are not yet decided *and* recorded.
    held: u64,
}

/// Transactions in commit order, from the first that holds something.
///
/// Settled transactions behind an unsettled one are folded into their neighbour, so the map is
/// bounded by what is held and not by how long one event has been stuck.
#[derive(Debug, Default)]
pub struct Watermark {
    txns: BTreeMap<TxnId, Txn>,
    open: Option<TxnId>,
    confirmable: Lsn,
}

impl Watermark {
    /// Nothing read yet; `start` is what the slot has confirmed already.
    pub fn new(start: Lsn) -> Watermark {
        Watermark { confirmable: start, ..Watermark::default() }
    }

    /// A transaction's first frame. Until its commit it holds the watermark by being open.
    pub fn begin(&mut self, commit_lsn: Lsn) -> TxnId {
        let txn = TxnId(commit_lsn);
        self.open = Some(txn);
        self.txns.insert(txn, Txn { end: None, held: 0 });
        txn
    }

    /// One more (event, destination) that must be recorded before the transaction is settled.
    pub fn hold(&mut self, txn: TxnId) {
        if let Some(entry) = self.txns.get_mut(&txn) {
            entry.held += 1;
        }
    }

    /// The open transaction is complete.
    pub fn commit(&mut self, end_lsn: Lsn) {
        if let Some(txn) = self.open.take() {
            if let Some(entry) = self.txns.get_mut(&txn) {
                entry.end = Some(end_lsn);
            }
            self.fold(txn);
        }
    }

    /// `count` holds of a transaction are recorded.
    pub fn release(&mut self, txn: TxnId, count: u64) {
        if let Some(entry) = self.txns.get_mut(&txn) {
            debug_assert!(entry.held >= count, "more released than held");
            entry.held = entry.held.saturating_sub(count);
            self.fold(txn);
        }
    }

    /// The server has sent everything that commits below `wal_end`. In the middle of a transaction
    /// that says nothing about the rest of it; behind an undecided one it moves the end of what
    /// becomes confirmable with it, and no more.
    pub fn keepalive(&mut self, wal_end: Lsn) {
        if self.open.is_some() {
            return;
        }
        match self.txns.last_entry() {
            None => self.confirmable = self.confirmable.max(wal_end),
            Some(mut last) => {
                let last = last.get_mut();
                last.end = last.end.max(Some(wal_end));
            }
        }
    }

    /// The highest LSN that may be confirmed now. Never goes back.
    pub fn confirmable(&self) -> Lsn {
        self.confirmable
    }

    /// Commit LSN of the first transaction that still holds something.
    pub fn oldest_held(&self) -> Option<Lsn> {
        self.txns.first_key_value().map(|(txn, _)| txn.0)
    }

    fn fold(&mut self, txn: TxnId) {
        let Some(end) = self.settled_end(txn) else { return };
        if let Some((&next, _)) = self.txns.range(next_after(txn)..).next()
            && let Some(next_end) = self.settled_end(next)
        {
            self.txns.remove(&next);
            self.txns.insert(txn, Txn { end: Some(next_end), held: 0 });
            return self.fold(txn);
        }
        match self.txns.range(..txn).next_back().map(|(&before, _)| before) {
            None => {
                self.txns.remove(&txn);
                self.confirmable = self.confirmable.max(end);
            }
            Some(before) if self.settled_end(before).is_some() => {
                self.txns.remove(&txn);
                self.txns.insert(before, Txn { end: Some(end), held: 0 });
            }
            Some(_) => {}
        }
    }

    fn settled_end(&self, txn: TxnId) -> Option<Lsn> {
        self.txns.get(&txn).filter(|entry| entry.held == 0).and_then(|entry| entry.end)
    }
}

fn next_after(txn: TxnId) -> TxnId {
    TxnId(Lsn(txn.0.0.saturating_add(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The model: all transactions ever, none folded. What may be confirmed is found by walking.
    #[derive(Default)]
    struct Model(Vec<(u64, Option<u64>, u64)>);

    impl Model {
        fn confirmable(&self) -> u64 {
            let settled = |txn: &&(u64, Option<u64>, u64)| txn.1.is_some() && txn.2 == 0;
            self.0.iter().take_while(settled).filter_map(|txn| txn.1).last().unwrap_or(0)
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_model(steps in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 1..200)) {
            let mut watermark = Watermark::default();
            let mut model = Model::default();
            let mut lsn = 0;
            let mut quiet_end = 0;
            let mut open = false;
            for (step, index) in steps {
                match step {
                    0 if !open => {
                        lsn += 10;
                        watermark.begin(Lsn(lsn));
                        model.0.push((lsn, None, 0));
                        open = true;
                    }
                    1 if open => {
                        let txn = model.0.last_mut().unwrap();
                        watermark.hold(TxnId(Lsn(txn.0)));
                        txn.2 += 1;
                    }
                    2 if open => {
                        lsn += 10;
                        watermark.commit(Lsn(lsn));
                        model.0.last_mut().unwrap().1 = Some(lsn);
                        open = false;
                    }
                    3 => {
                        lsn += 10;
                        watermark.keepalive(Lsn(lsn));
                        if let Some(txn) = model.0.last_mut() {
                            if !open { txn.1 = Some(lsn) }
                        } else {
                            quiet_end = lsn;
                        }
                    }
                    4 if !model.0.is_empty() => {
                        let at = index.index(model.0.len());
                        let txn = &mut model.0[at];
                        if txn.2 > 0 {
                            watermark.release(TxnId(Lsn(txn.0)), 1);
                            txn.2 -= 1;
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(watermark.confirmable(), Lsn(model.confirmable().max(quiet_end)));
                let unsettled = model.0.iter().filter(|txn| txn.1.is_none() || txn.2 > 0).count();
                prop_assert!(watermark.txns.len() <= 2 * unsettled, "not bounded by what is held");
            }
        }
    }

    #[test]
    fn a_keepalive_inside_a_transaction_moves_nothing() {
        let mut watermark = Watermark::new(Lsn(5));
        watermark.begin(Lsn(100));
        watermark.keepalive(Lsn(500));
        assert_eq!(watermark.confirmable(), Lsn(5));
        watermark.commit(Lsn(110));
        assert_eq!(watermark.confirmable(), Lsn(110));
    }
}
