//! PostgreSQL: writers whose transactions interleave, the table, and a slot that sends committed
//! transactions in commit order from its confirmed position on. A row can be visible some time
//! after its commit record, the publication can leave rows out, and a slot can be lost.

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use outboxd::event::{Event, EventId, Fault, Reason, RunHash};
use outboxd::lsn::{Lsn, Position};

use crate::broker::Micros;
use crate::dice::Dice;
use crate::ledger::Ledger;

/// Messages over this are too large.
pub const MAX_MESSAGE_BYTES: usize = 2_000;
pub const KINDS: [&str; 3] = ["order.created", "order.paid", "stock.moved"];
/// The server refuses this body for good.
pub const POISON: &[u8] = b"poison";
/// Writers at a time.
const OPEN_MAX: usize = 6;

#[derive(Debug)]
pub struct Txn {
    pub id: u64,
    pub commit_lsn: Lsn,
    pub end_lsn: Lsn,
    pub rows: Vec<Event>,
    /// When a standby has it too: until then its locks are held and its rows are not seen.
    pub visible_at: Micros,
    /// The publication did not have the table then: no WAL brings the rows.
    pub left_out: bool,
    /// The transactional message of a sweep.
    pub marker: Option<u64>,
}

#[derive(Debug)]
struct Open {
    id: u64,
    rows: Vec<Event>,
    /// It does not end before.
    until: Micros,
}

/// What the writers do at this moment, beside the usual.
#[derive(Debug, Clone, Copy, Default)]
pub struct Habits {
    /// A transaction that begins now lasts so long at least.
    pub lasts: Micros,
    /// One that commits now is visible so much later.
    pub unseen: Micros,
}

/// A slot was made.
#[derive(Debug, Clone)]
pub struct Start {
    /// What committed below, no WAL brings.
    pub lsn: Lsn,
}

#[derive(Debug, Default)]
pub struct Postgres {
    /// Committed, in commit order.
    pub wal: Vec<Txn>,
    /// Committed rows by number: index of the transaction, index of the row in it.
    pub rows: BTreeMap<i64, (usize, usize)>,
    pub deleted: HashSet<i64>,
    pub confirmed: Lsn,
    /// There is a slot.
    pub slot: bool,
    pub starts: Vec<Start>,
    /// The publication does not have the table.
    pub leaves_out: bool,
    pub ledger: Ledger,
    open: Vec<Open>,
    lsn: u64,
    last_seq: i64,
    ids: u64,
}

impl Postgres {
    pub fn new() -> Postgres {
        Postgres { lsn: 1_000, confirmed: Lsn(1_000), slot: true, ..Postgres::default() }
    }

    pub fn row(&self, seq: i64) -> Option<&Event> {
        let (txn, row) = self.rows.get(&seq)?;
        self.wal[*txn].rows.get(*row)
    }

    pub fn txn_of(&self, seq: i64) -> Option<&Txn> {
        self.rows.get(&seq).map(|(txn, _)| &self.wal[*txn])
    }

    pub fn insert_lsn(&self) -> Lsn {
        Lsn(self.lsn)
    }

    /// The sequence's last value.
    pub fn last_seq(&self) -> i64 {
        self.last_seq
    }

    /// Does a statement that begins now see the row?
    pub fn sees(&self, now: Micros, seq: i64) -> bool {
        let here = self.txn_of(seq).is_some_and(|txn| txn.visible_at <= now);
        here && !self.deleted.contains(&seq)
    }

    /// The row as the table shows it.
    pub fn read(&self, now: Micros, seq: i64) -> Option<Event> {
        let row = self.row(seq).filter(|_| self.sees(now, seq))?;
        Some(Event { position: None, committed_at: None, ..row.clone() })
    }

    /// Transactions that hold a lock on the table.
    pub fn holders(&self, now: Micros) -> HashSet<u64> {
        let late = self.wal.iter().rev().take(2_000).filter(|txn| txn.visible_at > now);
        let late = late.filter(|txn| !txn.rows.is_empty()).map(|txn| txn.id);
        late.chain(self.open.iter().map(|open| open.id)).collect()
    }

    /// The lowest number that an open transaction holds, or the next one.
    pub fn lowest_open(&self) -> i64 {
        let open = self.open.iter().flat_map(|open| &open.rows).map(|row| row.seq).min();
        open.unwrap_or(self.last_seq + 1)
    }

    /// One step of one of the writers. `runs` bounds the ordering keys.
    pub fn write(&mut self, now: Micros, dice: &mut Dice, runs: u64, habits: Habits) {
        match dice.between(0, 9) {
            0 | 1 if self.open.len() < OPEN_MAX => {
                self.ids += 1;
                let (id, until) = (self.ids, now + habits.lasts);
                self.open.push(Open { id, rows: Vec::new(), until });
            }
            2..=6 if !self.open.is_empty() => {
                let event = self.insert(dice, runs);
                let at = usize::try_from(dice.between(0, self.open.len() as u64 - 1)).unwrap();
                self.open[at].rows.push(event);
            }
            7 | 8 if !self.open.is_empty() => self.finish(now, dice, true, habits.unseen),
            9 if !self.open.is_empty() && dice.coin() => self.finish(now, dice, false, 0),
            // Another table's transaction: WAL that holds nothing of ours.
            _ => self.lsn += dice.between(1, 500),
        }
    }

    pub fn close(&mut self, now: Micros, dice: &mut Dice) {
        while !self.open.is_empty() {
            self.open.iter_mut().for_each(|open| open.until = 0);
            self.finish(now, dice, true, 0);
        }
        self.lsn += 77;
    }

    /// A transactional message; its position.
    pub fn mark(&mut self, now: Micros, generation: u64) -> Lsn {
        self.ids += 1;
        let commit_lsn = Lsn(self.lsn);
        self.lsn += 60;
        self.wal.push(Txn {
            id: self.ids,
            commit_lsn,
            end_lsn: Lsn(self.lsn),
            rows: Vec::new(),
            visible_at: now,
            left_out: false,
            marker: Some(generation),
        });
        commit_lsn
    }

    /// A new slot begins here; what committed before, it does not bring.
    pub fn make_slot(&mut self) {
        self.lsn += 100;
        self.slot = true;
        self.confirmed = Lsn(self.lsn);
        self.starts.push(Start { lsn: self.confirmed });
    }

    /// The first start above a position.
    pub fn start_above(&self, lsn: Lsn) -> Option<&Start> {
        self.starts.iter().find(|start| start.lsn > lsn)
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

    fn finish(&mut self, now: Micros, dice: &mut Dice, commit: bool, unseen: Micros) {
        let at = usize::try_from(dice.between(0, self.open.len() as u64 - 1)).unwrap();
        if self.open[at].until > now {
            return;
        }
        let Open { id, mut rows, .. } = self.open.swap_remove(at);
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
        self.wal.push(Txn {
            id,
            commit_lsn,
            end_lsn: Lsn(self.lsn),
            rows,
            visible_at: now + unseen,
            left_out: self.leaves_out,
            marker: None,
        });
    }
}
