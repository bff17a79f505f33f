//! Which events went behind a higher number of their run: transactions of one run that overlap commit
//! in another order than they draw their numbers in. Receipts keep numbers as ranges, and with these
//! exceptions the order in which a run was published can be told from them later.
//!
//! An exception names the number behind which the event belongs: the highest of its run so far. Sorted
//! by that number, or by its own, exceptions behind the others and among themselves as they came,
//! every run is in the order in which it was decided. Bounded: what is forgotten is taken for a run
//! that had the highest number of all, which gives an exception too many and no wrong order.

use hashbrown::HashMap;

use crate::event::RunHash;

/// Runs that are remembered: one mebibyte, and more than are written to between two overlapping
/// commits.
const RUNS_MAX: usize = 1 << 15;

/// Highest numbers of a destination's runs.
#[derive(Debug)]
pub struct Newest {
    runs: HashMap<RunHash, i64>,
    /// Highest number of all runs.
    newest: i64,
    /// No run that is not remembered had a higher one.
    forgotten: i64,
    runs_max: usize,
}

impl Newest {
    /// Nothing was decided above `newest`.
    pub fn new(newest: i64) -> Newest {
        Newest { runs: HashMap::new(), newest, forgotten: newest, runs_max: RUNS_MAX }
    }

    /// One more is decided; the number behind which it belongs, if that is not its own place.
    pub fn note(&mut self, run: RunHash, seq: i64) -> Option<i64> {
        if self.runs.len() >= self.runs_max && !self.runs.contains_key(&run) {
            self.forget(seq);
        }
        let before = self.runs.get(&run).copied().unwrap_or(self.forgotten);
        self.newest = self.newest.max(seq);
        self.runs.insert(run, before.max(seq));
        (before > seq).then_some(before)
    }

    /// Some were decided that nobody noted, of whatever runs, none of them above `seq`.
    pub fn forget(&mut self, seq: i64) {
        self.newest = self.newest.max(seq);
        self.forgotten = self.newest;
        self.runs.clear();
    }

    /// Highest number of all.
    pub fn newest(&self) -> i64 {
        self.newest
    }
}

/// The exceptions among events of any runs, in the order in which they were published, when none
/// before them had a higher number than `newest`.
pub fn late_of_any_run(newest: i64, seqs: impl IntoIterator<Item = i64>) -> Vec<(i64, i64)> {
    let mut newest = newest;
    let mut late = Vec::new();
    for seq in seqs {
        if seq < newest {
            late.push((seq, newest));
        }
        newest = newest.max(seq);
    }
    late
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap as Map;

    #[derive(Debug, Clone)]
    enum Step {
        Decide(u8, i64),
        /// Found in the stream, runs unknown.
        Find(Vec<(u8, i64)>),
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0u8..4, 0i64..60).prop_map(|(run, seq)| Step::Decide(run, seq)),
            1 => prop::collection::vec((0u8..4, 0i64..60), 1..4).prop_map(Step::Find),
            1 => Just(Step::Restart),
        ]
    }

    proptest! {
        /// Whatever was forgotten: sorted by the exceptions, each run is as it was decided.
        #[test]
        fn the_order_of_every_run_can_be_told(
            steps in prop::collection::vec(step(), 0..60),
            runs_max in 1usize..5,
        ) {
            let mut order = Newest { runs_max, ..Newest::new(i64::MIN) };
            let mut decided: Vec<(u8, i64)> = Vec::new();
            let mut late: Vec<(i64, i64)> = Vec::new();
            for step in steps {
                let is_new = |all: &[(u8, i64)], seq: i64| all.iter().all(|(_, one)| *one != seq);
                match step {
                    Step::Decide(run, seq) if is_new(&decided, seq) => {
                        let behind = order.note(RunHash(u64::from(run)), seq);
                        late.extend(behind.map(|behind| (seq, behind)));
                        decided.push((run, seq));
                    }
                    Step::Decide(..) => {}
                    Step::Find(found) => {
                        let mut news = Vec::new();
                        for (run, seq) in found {
                            if is_new(&decided, seq) {
                                decided.push((run, seq));
                                news.push(seq);
                            }
                        }
                        late.extend(late_of_any_run(order.newest(), news.iter().copied()));
                        if let Some(highest) = news.iter().max() {
                            order.forget(*highest);
                        }
                    }
                    Step::Restart => {
                        let newest = decided.iter().map(|(_, seq)| *seq).max();
                        order = Newest { runs_max, ..Newest::new(newest.unwrap_or(i64::MIN)) };
                    }
                }
            }
            let place: Map<i64, (i64, usize)> = late
                .iter()
                .enumerate()
                .map(|(place, (seq, behind))| (*seq, (*behind, place + 1)))
                .collect();
            let mut told = decided.clone();
            told.sort_by_key(|(_, seq)| place.get(seq).copied().unwrap_or((*seq, 0)));
            for run in 0..4 {
                let of = |all: &[(u8, i64)]| {
                    all.iter().filter(|(of, _)| *of == run).map(|(_, seq)| *seq).collect::<Vec<_>>()
                };
                prop_assert_eq!(of(&told), of(&decided), "run {}: {:?}", run, late);
            }
        }
    }

    #[test]
    fn numbers_in_their_order_are_no_exceptions() {
        let mut order = Newest::new(0);
        let run = |seq: i64| RunHash(seq.unsigned_abs() % 70_000);
        assert!((1..200_000).all(|seq| order.note(run(seq), seq).is_none()));
        assert_eq!(order.note(run(199_999), 199_000), Some(199_999));
    }
}
