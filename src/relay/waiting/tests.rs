//! Waiting numbers against plain lists: what each run has waiting anywhere, the ledger with its
//! receipts, and the lanes that numbers come from and go to.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

const RUNS: u64 = 4;

/// A number in a lane.
#[derive(Debug, Clone, Copy)]
struct InLane {
    waiter: Waiter,
    /// The WAL brought it there: the ledger does not have it.
    wal: bool,
}

/// The last reading of the ledger, while it is under way.
#[derive(Debug)]
struct Reading {
    after: i64,
    /// What the statement saw, once it ran.
    seen: Option<(Vec<Waiter>, i64, bool)>,
}

/// Numbers rise, so the order of a run is that of its numbers.
#[derive(Debug)]
struct World {
    waiting: Waiting,
    lanes: BTreeMap<u64, VecDeque<InLane>>,
    /// Receipts: id, and what is handed over in it.
    ledger: Vec<(i64, Vec<Waiter>)>,
    newest: i64,
    unrecorded: Vec<Waiter>,
    reading: Option<Reading>,
    taken: Vec<Waiter>,
    last: i64,
    done: BTreeSet<i64>,
    /// The newest that was sent, of each run.
    sent: BTreeMap<u64, i64>,
}

impl World {
    fn new(limit: usize) -> World {
        World {
            waiting: Waiting::new(&[], None, false, limit),
            lanes: BTreeMap::new(),
            ledger: Vec::new(),
            newest: 0,
            unrecorded: Vec::new(),
            reading: None,
            taken: Vec::new(),
            last: 0,
            done: BTreeSet::new(),
            sent: BTreeMap::new(),
        }
    }

    fn lane(&mut self, run: u64) -> &mut VecDeque<InLane> {
        self.lanes.entry(run).or_default()
    }

    /// The rule of `Destination::place`.
    fn must_wait(&mut self, run: u64) -> bool {
        let wal = self.lane(run).iter().any(|it| it.wal);
        let whole = self.waiting.is_slow_as_a_whole() && !wal;
        self.waiting.has(RunHash(run)) || whole
    }

    fn wal(&mut self, run: u64) {
        self.last += 1;
        let waiter = waiter(self.last, run);
        if self.must_wait(run) {
            self.unrecorded.push(waiter);
            self.waiting.hand(waiter, self.newest);
        } else {
            self.lane(run).push_back(InLane { waiter, wal: true });
        }
    }

    fn hand_over(&mut self, runs: &[u64]) {
        let mut all: Vec<InLane> = Vec::new();
        for run in runs {
            if !self.waiting.is_loading(RunHash(*run)) {
                all.extend(self.lane(*run).drain(..));
            }
        }
        all.sort_by_key(|it| it.waiter.seq);
        self.unrecorded.extend(all.iter().filter(|it| it.wal).map(|it| it.waiter));
        self.waiting.put_first(all.iter().map(|it| it.waiter));
    }

    /// Publishes the first of a lane.
    fn settle(&mut self, run: u64) {
        if let Some(it) = self.lane(run).pop_front() {
            assert!(self.done.insert(it.waiter.seq), "{} twice", it.waiter.seq);
            let before = self.sent.insert(run, it.waiter.seq);
            assert!(before < Some(it.waiter.seq), "{before:?} before {}", it.waiter.seq);
        }
    }

    fn take(&mut self, most: usize, runs: &[u64]) {
        let lanes = &self.lanes;
        self.waiting.bring_back(|run| lanes.get(&run.0).is_none_or(VecDeque::is_empty));
        let taken = self.waiting.take(most, |run| runs.contains(&run.0));
        assert!(taken.len() <= most && (taken.is_empty() || self.taken.is_empty()));
        assert!(taken.iter().all(|waiter| runs.contains(&waiter.run.0)));
        self.taken.extend(taken);
    }

    fn loaded(&mut self, count: usize) {
        let count = count.min(self.taken.len());
        let loaded = self.waiting.loaded(count);
        assert_eq!(loaded, self.taken[..count]);
        self.taken.clear();
        for waiter in loaded {
            if !self.done.contains(&waiter.seq) {
                self.lane(waiter.run.0).push_back(InLane { waiter, wal: false });
            }
        }
    }

    /// Resume finds some numbers, wherever they are but in a lane.
    fn found(&mut self, some: u64) {
        let numbers: Vec<i64> = self.waiting.numbers().collect();
        let beyond = self.ledger.iter().flat_map(|(_, part)| part).map(|waiter| waiter.seq);
        let in_lane: BTreeSet<i64> =
            self.lanes.values().flatten().map(|it| it.waiter.seq).collect();
        let found = numbers.into_iter().chain(beyond).filter(|seq| {
            seq.unsigned_abs() % 3 == some % 3 && !in_lane.contains(seq) && !self.done.contains(seq)
        });
        let found: RangeSet = found.map(|seq| (seq, seq)).collect();
        self.done.extend(found.iter().flat_map(|(start, end)| start..=end));
        self.waiting.remove(&found);
    }

    fn record(&mut self) {
        self.newest += 1;
        self.ledger.push((self.newest, std::mem::take(&mut self.unrecorded)));
    }

    fn read(&mut self) {
        if let Some(after) = self.waiting.read(self.unrecorded.clone().into_iter()) {
            assert!(self.reading.is_none(), "two at a time");
            self.reading = Some(Reading { after, seen: None });
        }
    }

    /// The statement runs: whole receipts, until enough is read.
    fn run_statement(&mut self) {
        let Some(reading) = &mut self.reading else { return };
        let (mut seen, mut upto) = (Vec::new(), reading.after);
        let mut rest = self.ledger.iter().filter(|(id, _)| *id > reading.after).peekable();
        while seen.len() < self.waiting.read_most()
            && let Some((id, part)) = rest.next()
        {
            upto = *id;
            seen.extend(part.iter().filter(|waiter| !self.done.contains(&waiter.seq)).copied());
        }
        let complete = rest.peek().is_none();
        reading.seen.get_or_insert((seen, upto, complete));
    }

    fn was_read(&mut self, fails: bool) {
        self.run_statement();
        let Some(Reading { seen: Some((seen, upto, complete)), .. }) = self.reading.take() else {
            return;
        };
        if fails {
            return self.waiting.read_failed();
        }
        let in_lanes = self.lanes.values().flatten().map(|it| it.waiter.seq);
        let known = in_lanes.chain(self.waiting.numbers()).chain(self.done.iter().copied());
        self.waiting.was_read(&seen, upto, complete, &known.collect());
    }

    /// Runs with a number that is not in its lane.
    fn outside(&self) -> BTreeSet<u64> {
        let in_lane: BTreeSet<i64> =
            self.lanes.values().flatten().map(|it| it.waiter.seq).collect();
        let ledger = self.ledger.iter().flat_map(|(_, part)| part).chain(&self.unrecorded);
        let outside = ledger
            .filter(|waiter| !in_lane.contains(&waiter.seq) && !self.done.contains(&waiter.seq));
        outside.map(|waiter| waiter.run.0).collect()
    }

    fn check(&mut self) {
        for run in self.outside() {
            assert!(self.must_wait(run), "run {run} has numbers outside and is not slow");
            assert!(self.waiting.is_slow(RunHash(run)), "{run}");
        }
        // After a crash they come back in the order of the ledger.
        let mut recorded: BTreeMap<RunHash, i64> = BTreeMap::new();
        for waiter in self.ledger.iter().flat_map(|(_, part)| part).chain(&self.unrecorded) {
            let before = recorded.insert(waiter.run, waiter.seq);
            assert!(before < Some(waiter.seq), "{before:?} before {} in the ledger", waiter.seq);
        }
        let numbers: Vec<i64> = self.waiting.numbers().collect();
        assert_eq!(numbers.len(), self.waiting.len());
        let unique: BTreeSet<i64> = numbers.iter().copied().collect();
        assert_eq!(unique.len(), numbers.len(), "a number waits twice");
        let bytes = (numbers.len() + self.waiting.tail().count()) * NUMBER_BYTES;
        assert_eq!(self.waiting.bytes(), bytes);
    }

    /// Nothing more comes in: everything is sent, and no run stays slow.
    fn drain(&mut self) {
        let all: Vec<u64> = (0..RUNS).collect();
        for _ in 0..10_000 {
            self.record();
            self.take(usize::MAX, &all);
            self.loaded(usize::MAX);
            all.iter().for_each(|run| (0..1_000).for_each(|_| self.settle(*run)));
            self.waiting.look_again();
            self.read();
            self.was_read(false);
            self.check();
            if self.waiting.is_over() && self.lanes.values().all(VecDeque::is_empty) {
                break;
            }
        }
        assert!(self.waiting.is_over(), "{:?}", self.waiting);
        assert_eq!(self.waiting.slow_runs(), 0);
        assert!(all.iter().all(|run| !self.waiting.is_slow(RunHash(*run))));
        assert_eq!(self.done, (1..=self.last).collect(), "lost");
    }
}

fn waiter(seq: i64, run: u64) -> Waiter {
    Waiter { seq, run: RunHash(run), until: Lsn(seq.unsigned_abs()), old: false }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn order_is_kept_and_nothing_is_lost(
        limit in 1usize..8,
        steps in prop::collection::vec((0u8..13, 0..RUNS, 0usize..6), 1..150),
    ) {
        let mut world = World::new(limit);
        for (step, run, count) in steps {
            let some: Vec<u64> = (0..RUNS).filter(|each| (each + run) % 3 > 0).collect();
            match step {
                0 | 1 => (0..count).for_each(|_| world.wal(run)),
                2 => world.wal(run),
                3 => world.settle(run),
                4 => world.hand_over(&some),
                5 => world.hand_over(&[run]),
                6 => {
                    world.waiting.look_again();
                    world.take(count + 1, &some);
                }
                7 => world.loaded(count),
                8 => world.record(),
                9 => world.read(),
                10 => world.run_statement(),
                11 => world.waiting.shorten(|run| some.contains(&run.0)),
                _ if count == 0 => world.found(run),
                _ => world.was_read(count == 1),
            }
            world.check();
        }
        world.drain();
    }
}

#[test]
fn numbers_beyond_the_limit_are_read_back() {
    let mut world = World::new(4);
    (0..2).for_each(|_| world.wal(0));
    world.hand_over(&[0]);
    (0..20).for_each(|_| world.wal(0));
    assert!(world.waiting.is_slow_as_a_whole() && world.waiting.len() == 4);
    // Of another run, too, since what the ledger has of it is not known.
    world.wal(1);
    assert!(world.lane(1).is_empty() && world.waiting.is_slow(RunHash(3)));
    world.check();
    world.drain();
}

#[test]
fn a_run_whose_lane_waits_for_the_clock_is_not_taken_before() {
    let now = Instant::now();
    let mut waiting = Waiting::new(&[], None, false, 100);
    waiting.hold(RunHash(1), now + Duration::from_secs(9));
    waiting.put_first([waiter(1, 1), waiter(2, 2), waiter(3, 1)].into_iter());
    assert_eq!(waiting.take(9, |_| true), [waiter(2, 2)]);
    waiting.loaded(1);
    assert!(waiting.take(9, |_| true).is_empty() && !waiting.wants());
    waiting.release(now + Duration::from_secs(8));
    assert!(!waiting.wants());
    assert_eq!(waiting.held_until(), Some(now + Duration::from_secs(9)));
    waiting.release(now + Duration::from_secs(9));
    assert!(waiting.wants() && waiting.held_until().is_none());
    assert_eq!(waiting.take(9, |_| true), [waiter(1, 1), waiter(3, 1)]);
}

#[test]
fn a_run_that_stands_still_leaves_room_and_comes_back_in_order() {
    let now = Instant::now();
    let mut waiting = Waiting::new(&[], None, false, 8);
    waiting.hold(RunHash(1), now + Duration::from_secs(9));
    let first: Vec<Waiter> = (1..=10).map(|seq| waiter(seq, 1)).collect();
    first.iter().for_each(|waiter| waiting.hand(*waiter, 3));
    assert!(waiting.wants(), "it became full");
    assert!(waiting.is_slow(RunHash(2)) && waiting.take(9, |_| true).is_empty());
    assert!(!waiting.wants());
    waiting.shorten(|_| false);
    assert_eq!((waiting.len(), waiting.read(std::iter::empty())), (2, Some(3)));
    waiting.was_read(&[waiter(9, 1), waiter(10, 1), waiter(11, 2)], 5, true, &HashSet::new());
    assert_eq!(waiting.take(9, |_| true), [waiter(11, 2)]);
    waiting.loaded(1);
    assert!(waiting.is_slow(RunHash(1)) && !waiting.is_slow(RunHash(2)));
    assert_eq!(waiting.slow_runs(), 1);
    waiting.release(now + Duration::from_secs(9));
    assert_eq!(waiting.take(9, |_| true), [waiter(1, 1), waiter(2, 1)]);
    waiting.bring_back(|_| true);
    assert_eq!(waiting.read(std::iter::empty()), None, "they are on their way");
    waiting.loaded(2);
    waiting.bring_back(|_| false);
    assert!(waiting.take(9, |_| true).is_empty() && waiting.is_slow(RunHash(1)));
    assert_eq!(waiting.read(std::iter::empty()), None, "they are in their lane");
    waiting.bring_back(|_| true);
    assert_eq!(waiting.read(std::iter::empty()), Some(0));
    waiting.was_read(&first, 4, false, &[1, 2].into());
    assert_eq!(waiting.take(9, |_| true), first[2..]);
}

/// While a gap is open nothing can be taken of any run: numbers that wait for that are kept.
#[test]
fn a_gap_is_no_reason_to_read_the_ledger_again_and_again() {
    let mut waiting = Waiting::new(&[], None, true, 8);
    (1..=9).for_each(|seq| waiting.hand(waiter(seq, seq.unsigned_abs()), 3));
    assert!(waiting.take(9, |_| true).is_empty());
    waiting.shorten(|_| false);
    waiting.bring_back(|_| true);
    assert_eq!((waiting.len(), waiting.read(std::iter::empty())), (8, None));
    assert!(!waiting.wants());
    waiting.bridged(HashSet::new());
    assert_eq!(waiting.take(9, |_| true).len(), 8);
}

/// One run that is refused has more numbers from before the gap than memory holds.
#[test]
fn old_numbers_of_a_run_that_stands_still_keep_no_other_from_its_missed_rows() {
    let old = |seq, run| Waiter { old: true, ..waiter(seq, run) };
    let known: Vec<Waiter> = (1..=8).map(|seq| old(seq, 1)).collect();
    let mut waiting = Waiting::new(&known, Some(4), true, 8);
    assert!(waiting.has_old(RunHash(2)), "nobody knows");
    assert!(waiting.take(9, |run| run.0 != 1).is_empty());
    waiting.shorten(|run| run.0 == 1);
    assert_eq!(waiting.read(std::iter::empty()), Some(4));
    waiting.was_read(&[old(9, 1), old(10, 3), waiter(11, 2)], 6, true, &HashSet::new());
    let has_old = [1, 2, 3].map(|run| waiting.has_old(RunHash(run)));
    assert_eq!(has_old, [true, false, true]);
    assert_eq!(waiting.take(9, |run| run.0 != 1), [old(10, 3)]);
    waiting.loaded(1);
    // It goes on: what is here, then the others, and the rows that it missed behind all of them.
    assert_eq!(waiting.take(9, |_| true), known[..2]);
    waiting.loaded(2);
    waiting.bring_back(|_| true);
    assert!(waiting.has_old(RunHash(1)));
    assert_eq!(waiting.read(std::iter::empty()), Some(0));
    waiting.was_read(&[old(3, 1), old(9, 1), waiter(11, 2)], 6, true, &[11].into());
    assert_eq!(waiting.take(9, |_| true), [old(3, 1), old(9, 1)]);
    waiting.loaded(2);
    assert!(!waiting.has_old(RunHash(1)));
}

/// Each reading comes to the ledger's end, however often runs go on meanwhile.
#[test]
fn a_run_that_goes_on_begins_no_reading_anew() {
    let mut waiting = Waiting::new(&[waiter(1, 1)], Some(7), false, 8);
    waiting.park(RunHash(1));
    assert_eq!(waiting.read(std::iter::empty()), Some(7));
    waiting.was_read(&[waiter(5, 1), waiter(6, 2)], 9, false, &HashSet::new());
    waiting.unpark(RunHash(1));
    assert_eq!(waiting.read(std::iter::empty()), Some(9));
    waiting.was_read(&[waiter(7, 3)], 10, true, &HashSet::new());
    assert_eq!(waiting.take(9, |_| true), [waiter(6, 2), waiter(7, 3)]);
    assert_eq!(waiting.read(std::iter::empty()), Some(0));
}

/// A reading that began behind what a run has in the ledger alone brings none of its later numbers.
#[test]
fn a_run_that_goes_on_while_the_ledger_is_read_keeps_its_order() {
    let mut waiting = Waiting::new(&[waiter(1, 1)], Some(7), false, 8);
    waiting.park(RunHash(1));
    assert_eq!(waiting.read(std::iter::empty()), Some(7));
    waiting.unpark(RunHash(1));
    waiting.was_read(&[waiter(5, 1)], 9, true, &HashSet::new());
    assert!(waiting.take(9, |_| true).is_empty());
    assert_eq!(waiting.read(std::iter::empty()), Some(0));
    waiting.was_read(&[waiter(1, 1), waiter(5, 1)], 9, true, &HashSet::new());
    assert_eq!(waiting.take(9, |_| true), [waiter(1, 1), waiter(5, 1)]);
}

#[test]
fn while_a_gap_is_open_only_old_numbers_go() {
    let old = |seq, run| Waiter { old: true, ..waiter(seq, run) };
    let known = [old(1, 1), old(2, 2), waiter(5, 1)];
    let mut waiting = Waiting::new(&known, None, true, 100);
    assert!(waiting.has_old(RunHash(1)) && !waiting.has_old(RunHash(3)));
    assert_eq!(waiting.take(9, |run| run.0 == 1), [old(1, 1)]);
    assert!(waiting.has_old(RunHash(1)), "on its way");
    waiting.loaded(1);
    assert!(!waiting.has_old(RunHash(1)));
    assert_eq!(waiting.take(9, |_| true), [old(2, 2)]);
    waiting.loaded(1);
    assert!(waiting.take(9, |_| true).is_empty());
    waiting.bridged(HashSet::new());
    assert_eq!(waiting.take(9, |_| true), [waiter(5, 1)]);
}

#[test]
fn a_gap_is_bridged_but_for_some_runs_and_those_only_become_fewer() {
    let old = |seq, run| Waiter { old: true, ..waiter(seq, run) };
    let runs = |runs: &[u64]| runs.iter().copied().map(RunHash).collect::<HashSet<_>>();
    let mut waiting = Waiting::new(&[old(1, 1), waiter(5, 1), waiter(6, 2)], None, true, 100);
    waiting.bridged(runs(&[1, 3]));
    assert!(!waiting.is_slow_as_a_whole() && waiting.is_slow(RunHash(3)));
    assert!(!waiting.is_slow(RunHash(4)));
    assert_eq!((waiting.slow_runs(), waiting.missing_runs()), (3, 2));
    assert_eq!(waiting.take(9, |_| true), [old(1, 1), waiter(6, 2)]);
    waiting.loaded(2);
    waiting.bridged(runs(&[1, 4]));
    assert!(!waiting.is_slow(RunHash(3)) && !waiting.is_slow(RunHash(4)));
    assert!(waiting.take(9, |_| true).is_empty() && !waiting.is_over());
    waiting.bridged(runs(&[]));
    assert_eq!(waiting.take(9, |_| true), [waiter(5, 1)]);
    waiting.loaded(1);
    assert!(waiting.is_over());
}

/// What a run has from before the gap comes first, though it left memory while it was blocked.
#[test]
fn old_numbers_of_a_run_that_goes_on_are_waited_for() {
    let old = |seq, run| Waiter { old: true, ..waiter(seq, run) };
    let mut waiting = Waiting::new(&[old(1, 1), waiter(5, 1)], None, true, 100);
    waiting.park(RunHash(1));
    waiting.bridged([RunHash(1)].into_iter().collect());
    waiting.unpark(RunHash(1));
    assert!(waiting.has_old(RunHash(1)), "the ledger is not read yet");
    assert_eq!(waiting.read(std::iter::empty()), Some(0));
    waiting.was_read(&[old(1, 1), waiter(5, 1)], 9, true, &HashSet::new());
    assert_eq!(waiting.take(9, |_| true), [old(1, 1)]);
    assert!(waiting.has_old(RunHash(1)));
    waiting.loaded(1);
    assert!(!waiting.has_old(RunHash(1)));
}

/// What is not read yet may be of any run.
#[test]
fn what_the_ledger_has_beyond_can_be_old() {
    let old = |seq, run| Waiter { old: true, ..waiter(seq, run) };
    let mut waiting = Waiting::new(&[old(1, 1)], Some(10), true, 2);
    assert!(waiting.has_old(RunHash(7)));
    assert_eq!(waiting.read(std::iter::empty()), Some(10));
    waiting.was_read(&[old(2, 2), waiter(3, 3)], 11, false, &HashSet::new());
    assert!(waiting.has_old(RunHash(2)) && !waiting.has_old(RunHash(7)), "those behind are new");
    let waiting = Waiting::new(&[old(1, 1), waiter(2, 2)], Some(10), true, 2);
    assert!(!waiting.has_old(RunHash(7)));
}
