//! The promises, checked after every step against what is durable: they know the database and the
//! streams, and nothing of how the core works.

use std::collections::{BTreeMap, HashMap, HashSet};

use outboxd::event::Event;
use outboxd::lsn::Lsn;
use outboxd::relay::outcome::{Answer, DestinationId, Outcome, Pipeline};
use outboxd::relay::ranges::RangeSet;
use outboxd::relay::receipts::Decided;

use crate::broker::{Micros, Stored};
use crate::dice::Swarm;
use crate::order::{Fed, RunOrder};
use crate::postgres::Postgres;

/// One message in a stream.
#[derive(Debug, Clone, Copy)]
struct Copy {
    incarnation: u32,
    at: Micros,
    resumed_at: Micros,
    sent_at: Micros,
    stale: bool,
}

#[derive(Debug, Default)]
pub struct Streams {
    /// (destination, number) → where it was stored, in order.
    stored: HashMap<(usize, i64), Vec<Copy>>,
    /// (destination, number) → who brought it to the core.
    fed: HashMap<(usize, i64), Fed>,
    orders: HashMap<(usize, Vec<u8>), RunOrder>,
    /// When each completed recovery read the stream for the last time.
    recoveries: HashMap<usize, Vec<Micros>>,
}

impl Streams {
    /// WAL brought the row.
    pub fn brought(&mut self, destinations: usize, seq: i64) {
        for destination in 0..destinations {
            self.fed.entry((destination, seq)).or_default().wal = true;
        }
    }

    /// A look through the table found that it was missed.
    pub fn missed(&mut self, destination: usize, seq: i64, generation: u64) {
        let fed = self.fed.entry((destination, seq)).or_default();
        fed.missed.get_or_insert(generation);
    }

    /// P2, P3 and P4, for a message that has just been stored.
    pub fn stored(
        &mut self,
        destination: usize,
        incarnation: u32,
        message: &Stored,
        postgres: &Postgres,
        swarm: &mut Swarm,
    ) {
        let seq = message.seq;
        let row = postgres.row(seq);
        let row = row.unwrap_or_else(|| panic!("P2: {seq} is in the stream and never committed"));
        assert!(message.msg_id.ends_with(&row.id.to_string()), "P2: {seq} has the id of another");
        let copies = self.stored.entry((destination, seq)).or_default();
        let new = Copy {
            incarnation,
            at: message.at,
            resumed_at: message.resumed_at,
            sent_at: message.sent_at,
            stale: message.stale,
        };
        if copies.is_empty()
            && let Some(run) = &row.run
        {
            let fed = self.fed.get(&(destination, seq)).copied().unwrap_or_default();
            let order = self.orders.entry((destination, run.to_vec())).or_default();
            order.first_of(destination, seq, fed, postgres);
        }
        for old in copies.iter().filter(|old| old.incarnation == incarnation) {
            // A copy is allowed only when the first was not in the stream yet when the Resume
            // before the second send read it, ...
            let unseen = new.resumed_at < old.at;
            // ... or was on its way for longer than a whole recovery, which settled that it would
            // not come any more, ...
            let recoveries = self.recoveries.get(&destination).map_or(&[][..], Vec::as_slice);
            let overdue = recoveries.iter().any(|read| old.sent_at < *read && *read < old.at);
            // ... or was sent by a relay that had lost its session.
            let what = match (unseen, overdue, old.stale) {
                (true, _, _) => "copy: stored after the last Resume",
                (_, true, _) => "copy: stored after a whole recovery",
                (_, _, true) => "copy: by a relay without a session",
                _ => panic!(
                    "P4: {seq} stored at {} and again at {}, though Resume read at {}",
                    old.at, new.at, new.resumed_at
                ),
            };
            swarm.count(what);
        }
        copies.push(new);
    }

    pub fn recovered(&mut self, destination: usize, read: Micros) {
        self.recoveries.entry(destination).or_default().push(read);
    }

    pub fn has(&self, destination: usize, seq: i64) -> bool {
        self.stored.contains_key(&(destination, seq))
    }
}

/// P1 where it is decided: what a receipt calls final must be so.
pub fn receipt(
    destination: usize,
    decided: &Decided,
    takes: impl Fn(&Event) -> bool,
    postgres: &Postgres,
    streams: &Streams,
) {
    let numbers =
        |set: &RangeSet| -> Vec<i64> { set.iter().flat_map(|(start, end)| start..=end).collect() };
    for (seq, _) in &decided.handed {
        assert!(postgres.row(*seq).is_some(), "P2: {seq} handed over, no such row");
    }
    for seq in numbers(&decided.gone) {
        assert!(postgres.deleted.contains(&seq), "P1: {seq} is called gone and is there");
    }
    for seq in numbers(&decided.published) {
        let row = postgres.row(seq).unwrap_or_else(|| panic!("P2: receipt for {seq}, no such row"));
        let unmatched = row.fault.is_none() && !takes(row);
        assert!(
            unmatched || streams.has(destination, seq),
            "P1: the ledger calls {seq} published and the stream of {destination} never had it"
        );
    }
    for seq in numbers(&decided.dead) {
        let buried = postgres.ledger.dead_letters.contains(&(destination, seq));
        assert!(buried, "P1: the ledger calls {seq} dead and there is no dead letter");
    }
}

/// P5: everything that WAL brought below what may be confirmed is final or waiting in the ledger, at
/// every destination. `from` is the first
/// transaction that was not looked at before.
pub fn confirmable(lsn: Lsn, from: &mut usize, destinations: usize, postgres: &Postgres) {
    while let Some(txn) = postgres.wal.get(*from).filter(|txn| txn.commit_lsn < lsn) {
        for row in txn.rows.iter().filter(|_| !txn.left_out) {
            for destination in 0..destinations {
                assert!(
                    postgres.ledger.is_recorded(destination, row.seq),
                    "P5: {lsn} may be confirmed and {} of {} is not recorded for {destination}",
                    row.seq,
                    txn.commit_lsn
                );
            }
        }
        *from += 1;
    }
}

/// The procedure after an unknown outcome, watched from outside: Resume, one event alone until its
/// ack is no duplicate, Resume, go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    NeedsResume,
    MayProbe,
    Probing,
    Proven,
    Flows,
}

/// Number and run of an event in flight.
type Flying = (i64, Option<Vec<u8>>);

#[derive(Debug)]
pub struct Watch {
    stages: Vec<(Stage, Pipeline)>,
    /// Open attempts: (destination, attempt) → number and run.
    open: BTreeMap<(usize, u64), Flying>,
    seqs: HashSet<(usize, i64)>,
    runs: HashMap<(usize, Vec<u8>), u64>,
}

impl Watch {
    pub fn new(destinations: usize) -> Watch {
        Watch {
            stages: vec![(Stage::NeedsResume, Pipeline::Batch); destinations],
            open: BTreeMap::new(),
            seqs: HashSet::new(),
            runs: HashMap::new(),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    pub fn up(&mut self, id: DestinationId, pipeline: Pipeline) {
        self.stages[usize::from(id.0)] = (Stage::NeedsResume, pipeline);
    }

    /// Is the recovery complete with this?
    pub fn resumed(&mut self, id: DestinationId, done: bool) -> bool {
        let stage = &mut self.stages[usize::from(id.0)].0;
        let complete = done && *stage == Stage::Proven;
        *stage = match *stage {
            Stage::NeedsResume if done => Stage::MayProbe,
            Stage::Proven if done => Stage::Flows,
            Stage::Proven => Stage::NeedsResume,
            other => other,
        };
        complete
    }

    pub fn sent(&mut self, id: DestinationId, attempt: u64, seq: i64, run: Option<Vec<u8>>) {
        let destination = usize::from(id.0);
        let (stage, pipeline) = &mut self.stages[destination];
        match *stage {
            Stage::MayProbe => *stage = Stage::Probing,
            Stage::Flows => {}
            other => panic!("{seq} sent to {destination} while {other:?}"),
        }
        assert!(self.seqs.insert((destination, seq)), "{seq} is in flight twice");
        if let Some(run) = &run {
            let flying = self.runs.entry((destination, run.clone())).or_default();
            *flying += 1;
            let bound = if *pipeline == Pipeline::PerRun { 1 } else { u64::MAX };
            assert!(*flying <= bound, "{flying} of one run in flight");
        }
        let before = self.open.insert((destination, attempt), (seq, run));
        assert!(before.is_none(), "attempt {attempt} used twice");
    }

    pub fn answered(&mut self, id: DestinationId, answer: &Answer) {
        let destination = usize::from(id.0);
        for attempt in answer.first.0..=answer.last.0 {
            let Some((seq, run)) = self.open.remove(&(destination, attempt)) else { continue };
            self.seqs.remove(&(destination, seq));
            if let Some(run) = run
                && let Some(flying) = self.runs.get_mut(&(destination, run))
            {
                *flying -= 1;
            }
            let (stage, _) = &mut self.stages[destination];
            *stage = match (&answer.outcome, *stage) {
                (Outcome::Unknown(_), _) => Stage::NeedsResume,
                (Outcome::Stored { duplicate: false, .. }, Stage::Probing) => Stage::Proven,
                (Outcome::Stored { .. }, Stage::Probing) => Stage::NeedsResume,
                (Outcome::NotSent | Outcome::Refused(_), Stage::Probing) => Stage::MayProbe,
                (_, other) => other,
            };
        }
    }
}
