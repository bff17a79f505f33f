//! PostgreSQL: writers whose transactions interleave, a slot that sends committed ones in commit
//! order from its confirmed position on, and the ledger's tables.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use bytes::Bytes;
use outboxd::event::{Event, EventId, Fault, Reason, RunHash};
use outboxd::lsn::{Lsn, Position};
use outboxd::relay::outcome::Floor;
use outboxd::relay::ranges::RangeSet;

use crate::dice::Dice;

/// Messages over this are too large.
pub const MAX_MESSAGE_BYTES: usize = 2_000;
pub const KINDS: [&str; 3] = ["order.created", "order.paid", "stock.moved"];
/// The server refuses this body for good.
pub const POISON: &[u8] = b"poison";

#[derive(Debug)]
pub struct Txn {
    pub commit_lsn: Lsn,
    pub end_lsn: Lsn,
    pub rows: Vec<Event>,
}

#[derive(Debug, Default)]
pub struct Postgres {
    /// Committed, in commit order.
    pub wal: Vec<Txn>,
    /// Committed rows by number: index of the transaction, index of the row in it.
    pub rows: BTreeMap<i64, (usize, usize)>,
    pub confirmed: Lsn,
    pub ledger: Ledger,
    open: Vec<Vec<Event>>,
    lsn: u64,
    last_seq: i64,
}

impl Postgres {
    pub fn new() -> Postgres {
        Postgres { lsn: 1_000, confirmed: Lsn(1_000), ..Postgres::default() }
    }

    pub fn row(&self, seq: i64) -> Option<&Event> {
        let (txn, row) = self.rows.get(&seq)?;
        self.wal[*txn].rows.get(*row)
    }

    pub fn insert_lsn(&self) -> Lsn {
        Lsn(self.lsn)
    }

    /// One step of one of the writers. `runs` bounds the ordering keys.
    pub fn write(&mut self, dice: &mut Dice, runs: u64) {
        match dice.between(0, 9) {
            0 | 1 if self.open.len() < 4 => self.open.push(Vec::new()),
            2..=6 if !self.open.is_empty() => {
                let event = self.insert(dice, runs);
                let at = usize::try_from(dice.between(0, self.open.len() as u64 - 1)).unwrap();
                self.open[at].push(event);
            }
            7 | 8 if !self.open.is_empty() => self.finish(dice, true),
            9 if !self.open.is_empty() && dice.coin() => self.finish(dice, false),
            // Another table's transaction: WAL that holds nothing of ours.
            _ => self.lsn += dice.between(1, 500),
        }
    }

    pub fn close(&mut self, dice: &mut Dice) {
        while !self.open.is_empty() {
            self.finish(dice, true);
        }
        self.lsn += 77;
    }

    fn insert(&mut self, dice: &mut Dice, runs: u64) -> Event {
        self.last_seq += 1;
        self.lsn += 50;
        let seq = self.last_seq;
        let run = dice.per_mille(900).then(|| format!("run-{}", dice.between(1, runs)));
        let run = run.map(Bytes::from);
        let mut event = Event {
            seq,
            position: None,
            id: EventId::Uuid(uuid::Uuid::from_u128(0xABCD_0000 + u128::try_from(seq).unwrap())),
            run_hash: run.as_ref().map_or_else(|| RunHash::of_seq(seq), |run| RunHash::of_run(run)),
            run,
            kind: Bytes::from_static(dice.pick(&KINDS).as_bytes()),
            tenant: None,
            version: None,
            payload: Some(Bytes::from_static(b"{}")),
            headers: None,
            created_at: None,
            committed_at: None,
            fault: None,
        };
        match dice.between(0, 99) {
            0 => {
                event.fault = Some(Fault::new(Reason::Unmappable, "planted".to_owned()));
            }
            1 => event.headers = Some(Bytes::from_static(br#"{"Nats-Msg-Id":"stolen"}"#)),
            2 => event.payload = Some(Bytes::from(vec![b'x'; MAX_MESSAGE_BYTES])),
            3 => event.payload = Some(Bytes::from_static(POISON)),
            4..=9 => event.payload = Some(Bytes::from(vec![b'y'; 1_000])),
            _ => {}
        }
        event
    }

    fn finish(&mut self, dice: &mut Dice, commit: bool) {
        let at = usize::try_from(dice.between(0, self.open.len() as u64 - 1)).unwrap();
        let mut rows = self.open.swap_remove(at);
        if !commit || rows.is_empty() {
            return;
        }
        let commit_lsn = Lsn(self.lsn);
        self.lsn += 40;
        for (row, index) in rows.iter_mut().zip(0u32..) {
            row.position = Some(Position { commit_lsn, index });
        }
        for (row, index) in rows.iter().zip(0..) {
            self.rows.insert(row.seq, (self.wal.len(), index));
        }
        self.wal.push(Txn { commit_lsn, end_lsn: Lsn(self.lsn), rows });
    }
}

#[derive(Debug, Clone, Default)]
pub struct Receipt {
    pub destination: usize,
    /// Published, unmatched, dead.
    pub seqs: RangeSet,
    pub last_lsn: Option<Lsn>,
    pub floor: Floor,
    /// Highest sequence known then of the stream that the floor names.
    pub known: u64,
}

/// Everything here is durable.
#[derive(Debug, Default)]
pub struct Ledger {
    receipts: Vec<Receipt>,
    finals: HashSet<(usize, i64)>,
    pub dead_letters: BTreeSet<(usize, i64)>,
}

impl Ledger {
    pub fn append(&mut self, receipt: Receipt) {
        for (start, end) in receipt.seqs.iter() {
            self.finals.extend((start..=end).map(|seq| (receipt.destination, seq)));
        }
        self.receipts.push(receipt);
    }

    pub fn is_final(&self, destination: usize, seq: i64) -> bool {
        self.finals.contains(&(destination, seq))
    }

    /// Receipts whose last position is at or above `from`, or unknown.
    pub fn load(&self, destination: usize, from: Lsn) -> (RangeSet, Lsn) {
        let mut found = (RangeSet::default(), Lsn::ZERO);
        for receipt in self.receipts.iter().filter(|each| each.destination == destination) {
            if receipt.seqs.is_empty() || receipt.last_lsn.is_some_and(|last| last < from) {
                continue;
            }
            found.0.extend(receipt.seqs.iter());
            found.1 = found.1.max(receipt.last_lsn.unwrap_or(Lsn(u64::MAX)));
        }
        found
    }

    pub fn floor(&self, destination: usize) -> Option<Floor> {
        let mut newest = self.receipts.iter().rev();
        newest.find(|each| each.destination == destination).map(|each| each.floor.clone())
    }

    pub fn known(&self, destination: usize) -> u64 {
        let mut newest = self.receipts.iter().rev();
        newest.find(|each| each.destination == destination).map_or(0, |each| each.known)
    }
}
