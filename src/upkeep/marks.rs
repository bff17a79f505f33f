//! Which numbers are to be marked next, from what each destination has decided. Decides; asks nobody.
//!
//! Receipts come in the order of their ids, one destination by itself. A number is ready when every
//! destination has it. Behind a destination's first number that is not marked yet its receipts are
//! read again at the next start.

use std::collections::VecDeque;

use crate::relay::ranges::RangeSet;
use crate::store::mark::{Part, Place};

/// Numbers of one batch: a transaction of some milliseconds.
pub const BATCH: usize = 1_000;
/// Ranges that a destination may have waiting for the others; then it is not read on.
const RANGES_MAX: usize = 50_000;
/// Pieces of the ledger that are told apart; then they are joined.
const PIECES_MAX: usize = 100;

/// One destination.
#[derive(Debug)]
struct Side {
    name: String,
    began_after: i64,
    /// Receipts up to this one were read.
    read: i64,
    /// Everything is marked that receipts up to this one decided.
    done: i64,
    saved: i64,
    /// Receipts that were there before this job began may be about numbers whose other half was
    /// read by an earlier one.
    catching_up: bool,
    /// Decided and not marked, in pieces of the ledger.
    pieces: VecDeque<(i64, RangeSet)>,
    /// The same in one, and what the others asked about.
    has: RangeSet,
}

/// See the module.
#[derive(Debug)]
pub struct Marks {
    sides: Vec<Side>,
    ready: RangeSet,
    /// Batches are taken from here on, so that one locked row does not keep the others.
    cursor: i64,
    size: usize,
}

impl Marks {
    /// From what was recorded.
    pub fn new(places: Vec<Place>) -> Marks {
        let side = |place: Place| Side {
            name: place.name,
            began_after: place.began_after,
            read: place.marked_receipt,
            done: place.marked_receipt,
            saved: place.marked_receipt,
            catching_up: true,
            pieces: VecDeque::new(),
            has: RangeSet::default(),
        };
        let sides = places.into_iter().map(side).collect();
        Marks { sides, ready: RangeSet::default(), cursor: i64::MIN, size: BATCH }
    }

    /// How many destinations there are.
    pub fn len(&self) -> usize {
        self.sides.len()
    }

    /// Name of a destination, and behind which receipt to read; `None` when it has enough for now.
    pub fn wants(&self, side: usize) -> Option<(&str, i64)> {
        let side = self.sides.get(side)?;
        (side.has.range_count() <= RANGES_MAX).then_some((&*side.name, side.read))
    }

    /// The destinations that must be asked which of these numbers they have.
    pub fn to_ask(&self, of: usize) -> Vec<(usize, String)> {
        let catching_up = self.sides.get(of).is_some_and(|side| side.catching_up);
        let others = self.sides.iter().enumerate().filter(|(index, _)| catching_up && *index != of);
        others.map(|(index, side)| (index, side.name.clone())).collect()
    }

    /// A destination turned out to have these too.
    pub fn also(&mut self, side: usize, seqs: &[(i64, i64)]) {
        if let Some(side) = self.sides.get_mut(side) {
            side.has.extend(seqs.iter().copied());
        }
    }

    /// More of a destination's receipts.
    pub fn take(&mut self, of: usize, part: &Part) {
        let mut fresh: RangeSet = part.seqs.iter().copied().collect();
        if let Some(side) = self.sides.get_mut(of) {
            side.catching_up &= part.more;
            side.read = part.upto;
            side.has.extend(fresh.iter());
            let many = side.pieces.len() >= PIECES_MAX;
            match side.pieces.back_mut() {
                Some((upto, left)) if many => {
                    *upto = part.upto;
                    left.extend(fresh.iter());
                }
                Some(_) | None => side.pieces.push_back((part.upto, fresh.clone())),
            }
            side.settle();
        }
        for side in &self.sides {
            let mut decided = fresh.intersection(&side.has);
            let older = [(i64::MIN, side.began_after)].into_iter().collect();
            decided.extend(fresh.intersection(&older).iter());
            fresh = decided;
        }
        self.ready.extend(fresh.iter());
    }

    /// The next numbers; none when all that was ready is marked.
    pub fn batch(&self) -> Vec<i64> {
        let from = |cursor: i64| {
            let numbers = self.ready.iter().filter(move |(_, end)| *end >= cursor);
            numbers.flat_map(move |(start, end)| start.max(cursor)..=end)
        };
        let next: Vec<i64> = from(self.cursor).take(self.size).collect();
        if next.is_empty() { from(i64::MIN).take(self.size).collect() } else { next }
    }

    /// These are marked.
    pub fn marked(&mut self, batch: &[i64]) {
        self.size = BATCH;
        let marked: RangeSet = batch.iter().map(|seq| (*seq, *seq)).collect();
        for (start, end) in marked.iter() {
            self.ready.remove_range(start, end);
            for side in &mut self.sides {
                side.has.remove_range(start, end);
                for (_, left) in &mut side.pieces {
                    left.remove_range(start, end);
                }
            }
        }
        self.sides.iter_mut().for_each(Side::settle);
    }

    /// One of these is locked: fewer are tried next, and behind a single one that is, the others.
    /// False: a moment should pass first.
    pub fn busy(&mut self, batch: &[i64]) -> bool {
        if batch.len() > 1 {
            self.size = (batch.len() / 2).max(1);
            return true;
        }
        let Some(seq) = batch.first() else { return false };
        self.cursor = seq.saturating_add(1);
        self.size = BATCH;
        self.ready.iter().any(|(_, end)| end > *seq)
    }

    /// Begin at the lowest again.
    pub fn again(&mut self) {
        self.cursor = i64::MIN;
    }

    /// What can be recorded; taken as recorded.
    pub fn take_saves(&mut self) -> Vec<(String, i64)> {
        let changed = self.sides.iter_mut().filter(|side| side.done > side.saved);
        changed
            .map(|side| {
                side.saved = side.done;
                (side.name.clone(), side.done)
            })
            .collect()
    }
}

impl Side {
    fn settle(&mut self) {
        while let Some((upto, _)) = self.pieces.front().filter(|(_, left)| left.is_empty()) {
            self.done = *upto;
            self.pieces.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str, marked_receipt: i64, began_after: i64) -> Place {
        Place { name: name.into(), marked_receipt, began_after }
    }

    fn part(seqs: &[(i64, i64)], upto: i64) -> Part {
        Part { seqs: seqs.to_vec(), upto, more: false }
    }

    #[test]
    fn one_destination_marks_what_it_decides_in_batches() {
        let mut marks = Marks::new(vec![place("a", 3, 0)]);
        assert_eq!(marks.wants(0), Some(("a", 3)));
        assert!(marks.to_ask(0).is_empty());
        marks.take(0, &part(&[(1, 1_500)], 9));
        let first = marks.batch();
        assert_eq!((first.len(), first[0]), (BATCH, 1));
        assert!(marks.take_saves().is_empty());
        marks.marked(&first);
        let rest = marks.batch();
        assert_eq!(rest.len(), 500);
        marks.marked(&rest);
        assert_eq!((marks.batch().len(), marks.take_saves()), (0, vec![("a".to_owned(), 9)]));
        assert!(marks.take_saves().is_empty());
    }

    #[test]
    fn a_row_waits_for_every_destination_that_was_there() {
        let mut marks = Marks::new(vec![place("a", 0, 0), place("b", 0, 5)]);
        marks.take(0, &part(&[(4, 8)], 10));
        assert_eq!(marks.batch(), [4, 5]);
        marks.marked(&[4, 5]);
        marks.take(1, &part(&[(6, 7), (20, 20)], 11));
        assert_eq!(marks.batch(), [6, 7]);
        marks.marked(&[6, 7]);
        assert!(marks.batch().is_empty() && marks.take_saves().is_empty());
        marks.take(1, &part(&[(8, 8)], 12));
        marks.marked(&marks.batch());
        assert_eq!(marks.take_saves(), [("a".to_owned(), 10)]);
        marks.take(0, &part(&[(20, 20)], 13));
        marks.marked(&marks.batch());
        assert_eq!(marks.take_saves(), [("a".to_owned(), 13), ("b".to_owned(), 12)]);
    }

    /// An earlier job marked 1 to 10, and recorded less of one destination than of the other.
    #[test]
    fn what_was_marked_before_holds_nothing_up() {
        let mut marks = Marks::new(vec![place("a", 0, 0), place("b", 7, 0)]);
        assert_eq!(marks.to_ask(0), [(1, "b".to_owned())]);
        marks.also(1, &[(1, 10)]);
        marks.take(0, &part(&[(1, 10)], 6));
        assert!(marks.to_ask(0).is_empty());
        marks.marked(&marks.batch());
        assert_eq!(marks.take_saves(), [("a".to_owned(), 6)]);
    }

    #[test]
    fn a_locked_row_keeps_no_other() {
        let mut marks = Marks::new(vec![place("a", 0, 0)]);
        marks.take(0, &part(&[(1, 4)], 1));
        let locked = 2;
        let mut tries = 0;
        let mut marked = Vec::new();
        loop {
            let batch = marks.batch();
            tries += 1;
            assert!(tries < 20, "{marks:?}");
            if !batch.contains(&locked) {
                marks.marked(&batch);
                marked.extend(batch);
            } else if !marks.busy(&batch) {
                break;
            }
            if marked.len() == 3 {
                break;
            }
        }
        marked.sort_unstable();
        assert_eq!(marked, [1, 3, 4]);
        assert!(marks.take_saves().is_empty());
        marks.again();
        assert_eq!(marks.batch(), [locked]);
    }
}
