//! Progress after looks against what the numbers are.

use proptest::prelude::*;

use super::*;

/// What became of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// In a receipt.
    Recorded,
    /// Memory has it, the ledger does not.
    Held,
    /// A row without a receipt.
    Undecided,
    /// Rolled back.
    Void,
    /// Its transaction is open: it may become anything.
    Open,
}

fn fates() -> impl Strategy<Value = Vec<Fate>> {
    use Fate::{Held, Open, Recorded, Undecided, Void};
    let fate = prop::sample::select(vec![Recorded, Recorded, Held, Undecided, Void, Open]);
    prop::collection::vec(fate, 1..60)
}

/// The database's answer. Numbers up to `cleared` have no open transaction.
fn look(progress: &Progress, fates: &[Fate], to: i64, limit: usize) -> Look {
    let of = |seq: i64| usize::try_from(seq - 1).ok().and_then(|at| fates.get(at)).copied();
    let mut asked: RangeSet = progress.holes.iter().copied().collect();
    asked.insert_range(progress.frontier + 1, to);
    let numbers = (1..=to).filter(|seq| asked.contains(*seq));
    let numbers: Vec<(i64, Fate)> = numbers.filter_map(|seq| Some((seq, of(seq)?))).collect();
    let chosen = |wanted: fn(Fate) -> bool| {
        let all = numbers.iter().filter(move |(_, fate)| wanted(*fate));
        all.map(|(seq, _)| *seq).collect::<Vec<i64>>()
    };
    let mut undecided = chosen(|fate| fate == Fate::Undecided);
    undecided.truncate(limit);
    let full = undecided.len() == limit;
    let covered_to = undecided.last().copied().filter(|_| full).unwrap_or(to);
    let open = chosen(|fate| !matches!(fate, Fate::Recorded | Fate::Held));
    let open: RangeSet = open.into_iter().map(|seq| (seq, seq)).collect();
    let held: Vec<(i64, i64)> =
        chosen(|fate| fate == Fate::Held).into_iter().map(|seq| (seq, seq)).collect();
    let open = open.iter().collect();
    Look { undecided, open, held, to, covered_to, receipt_id: 7 }
}

proptest! {
    /// Whatever was looked at, with whatever limit: a number that the next look leaves out is in a
    /// receipt or void, and no receipt that is counted as seen is about a number above.
    #[test]
    fn nothing_is_left_out_that_may_be_missing(
        rounds in prop::collection::vec((fates(), 1usize..20, any::<bool>(), 0i64..70), 1..5)
    ) {
        let name = "events".to_owned();
        let (holes, gap) = (Vec::new(), None);
        let mut progress = Progress { name, frontier: 0, holes, receipt_id: 0, gap };
        let mut known: Vec<Fate> = Vec::new();
        for (fates, limit, clears, cleared) in rounds {
            // What is decided stays so; what was open became what this round says.
            for (at, fate) in fates.into_iter().enumerate() {
                match known.get_mut(at) {
                    Some(Fate::Recorded | Fate::Void) => {}
                    Some(before) if *before == Fate::Open || fate == Fate::Recorded => *before = fate,
                    Some(_) => {}
                    None => known.push(fate),
                }
            }
            let to = i64::try_from(known.len()).unwrap().max(progress.frontier);
            // Cleared says that no transaction is open up to there.
            let first_open = known.iter().position(|fate| *fate == Fate::Open);
            let below = first_open.map_or(to, |at| i64::try_from(at).unwrap());
            let cleared = clears.then_some(cleared.min(below));
            let look = look(&progress, &known, to, limit);
            take(&mut progress, &look, cleared);
            prop_assert_eq!(progress.frontier, to);
            let holes: RangeSet = progress.holes.iter().copied().collect();
            for (fate, seq) in known.iter().zip(1i64..) {
                let accounted = matches!(fate, Fate::Recorded | Fate::Void);
                prop_assert!(accounted || holes.contains(seq), "{seq} is {fate:?}: {progress:?}");
                prop_assert!(!is_settled(&progress, seq) || accounted, "{seq} is {fate:?}");
            }
            prop_assert!(progress.holes.iter().all(|(_, end)| *end <= to));
        }
    }
}

#[test]
fn without_anything_open_the_holes_close() {
    let (name, holes) = ("events".to_owned(), vec![(2, 2), (5, 9)]);
    let mut progress = Progress { name, frontier: 9, holes, receipt_id: 3, gap: None };
    let look = look(&progress, &[Fate::Void; 12], 12, 10);
    take(&mut progress, &look, Some(12));
    assert_eq!((progress.frontier, progress.holes.len(), progress.receipt_id), (12, 0, 7));
    assert!(is_settled(&progress, 12) && !is_settled(&progress, 13));
}

/// What would have to be left out, or thrown together with what is decided, is looked at again.
#[test]
fn with_too_many_holes_progress_stands() {
    let (name, holes) = ("events".to_owned(), vec![(2, 2)]);
    let mut progress = Progress { name, frontier: 9, holes, receipt_id: 3, gap: None };
    let before = progress.clone();
    let most = i64::try_from(HOLES_MAX).unwrap();
    let every_second = |count: i64| (0..count).map(|n| (n * 2, n * 2)).collect::<Vec<_>>();
    let held = every_second(most + 1);
    let to = most * 2;
    let look = Look { undecided: vec![], open: vec![], held, to, covered_to: to, receipt_id: 7 };
    take(&mut progress, &look, Some(to));
    assert_eq!(progress, before);
    take(&mut progress, &Look { held: every_second(most), ..look }, Some(to));
    assert_eq!((progress.frontier, progress.holes.len(), progress.receipt_id), (to, HOLES_MAX, 7));
}
