//! Attempts that are not answered yet, and the floor that follows from them: the stream sequence
//! below which no outcome of ours is unknown. Resume reads from there.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::relay::lanes::Slot;
use crate::relay::outcome::Attempt;

/// An attempt that is not answered yet.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// What was sent.
    pub slot: Slot,
    /// When.
    pub at: Instant,
    /// Highest stream sequence known at that moment: the message can only be above it.
    known: u64,
}

/// The attempts of one destination.
#[derive(Debug)]
pub struct Attempts {
    /// Oldest first; answered ones between unanswered ones are `None`.
    open: VecDeque<Option<Sent>>,
    /// Number of `open[0]`.
    first: u64,
    /// `known` of each unanswered attempt, counted.
    at_send: BTreeMap<u64, u64>,
    /// Smallest `known` of an attempt with unknown outcome, since the last Resume.
    doubtful: Option<u64>,
    known: u64,
}

impl Attempts {
    /// Numbers start at `first`; they are never used twice in the life of the process.
    pub fn new(first: u64) -> Attempts {
        Attempts {
            open: VecDeque::new(),
            first,
            at_send: BTreeMap::new(),
            doubtful: None,
            known: 0,
        }
    }

    /// A new attempt for `slot`.
    pub fn send(&mut self, slot: Slot, at: Instant) -> Attempt {
        let number = self.next_number();
        self.open.push_back(Some(Sent { slot, at, known: self.known }));
        *self.at_send.entry(self.known).or_default() += 1;
        Attempt(number)
    }

    /// The number that the next attempt will get.
    pub fn next_number(&self) -> u64 {
        self.first + self.open.len() as u64
    }

    /// The attempt is answered; `None` when it was answered before or was never made: a late
    /// answer settles nothing.
    pub fn answer(&mut self, number: u64) -> Option<Sent> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let sent = self.open.get_mut(index)?.take()?;
        while let Some(None) = self.open.front() {
            self.open.pop_front();
            self.first += 1;
        }
        if let Some(count) = self.at_send.get_mut(&sent.known) {
            *count -= 1;
            if *count == 0 {
                self.at_send.remove(&sent.known);
            }
        }
        Some(sent)
    }

    /// The answer was no answer: the message may be anywhere above what was known when it was sent.
    pub fn doubt(&mut self, sent: &Sent) {
        self.doubtful = Some(self.doubtful.map_or(sent.known, |from| from.min(sent.known)));
    }

    /// The stream was seen at `seq`.
    pub fn learn(&mut self, seq: u64) {
        self.known = self.known.max(seq);
    }

    /// The stream was read up to `seq`: there is no doubt below it. What was in doubt can still be
    /// stored above it as long as the broker is not `proven`, so the next read begins here; and so
    /// it does when reading ended below what is known, since nothing between was seen.
    pub fn resumed(&mut self, seq: u64, proven: bool) {
        self.doubtful = (!proven || seq < self.known).then_some(seq);
        self.learn(seq);
    }

    /// Attempts from the oldest unanswered one on.
    pub fn span(&self) -> usize {
        self.open.len()
    }

    /// Another stream, or a first one: it reached `known`, and of ours nothing above `floor` is
    /// known.
    pub fn restart(&mut self, floor: u64, known: u64) {
        self.known = known.max(floor);
        self.doubtful = (floor < known).then_some(floor);
    }

    /// Highest stream sequence known.
    pub fn known(&self) -> u64 {
        self.known
    }

    /// Where Resume would start.
    pub fn floor(&self) -> u64 {
        let in_flight = self.at_send.first_key_value().map(|(known, _)| *known);
        [in_flight, self.doubtful].into_iter().flatten().fold(self.known, u64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsn::Lsn;
    use crate::relay::lanes::Lanes;
    use crate::relay::receipts::Origin;
    use proptest::prelude::*;

    fn slot() -> Slot {
        let mut lanes = Lanes::new(1);
        let origin = Origin::Table { until: Lsn::ZERO, handed: false };
        lanes.push(crate::relay::machine::tests::event(1, "run"), origin);
        lanes.take().unwrap()
    }

    proptest! {
        /// The model: what each unanswered or doubtful attempt knew when it was sent.
        #[test]
        fn the_floor_is_below_everything_unknown(
            steps in prop::collection::vec((0u8..6, any::<prop::sample::Index>(), 0u64..5), 1..200)
        ) {
            let (slot, now) = (slot(), Instant::now());
            let mut attempts = Attempts::new(40);
            let mut open: BTreeMap<u64, u64> = BTreeMap::new();
            let mut doubtful: Vec<u64> = Vec::new();
            let (mut known, mut next) = (0u64, 40u64);
            for (step, index, more) in steps {
                match step {
                    0 | 1 => {
                        prop_assert_eq!(attempts.send(slot, now), Attempt(next));
                        open.insert(next, known);
                        next += 1;
                    }
                    2 | 3 if !open.is_empty() => {
                        let (&number, &at) = open.iter().nth(index.index(open.len())).unwrap();
                        open.remove(&number);
                        let sent = attempts.answer(number).unwrap();
                        prop_assert!(attempts.answer(number).is_none(), "answered twice");
                        if step == 2 {
                            known += more;
                            attempts.learn(known);
                        } else {
                            attempts.doubt(&sent);
                            doubtful.push(at);
                        }
                    }
                    4 if open.is_empty() => {
                        // Up to two below what is known, and up to two above.
                        let read = (known + more).saturating_sub(2);
                        attempts.resumed(read, more % 2 == 0);
                        let sure = more % 2 == 0 && read >= known;
                        doubtful = if sure { Vec::new() } else { vec![read] };
                        known = known.max(read);
                    }
                    5 if open.is_empty() => {
                        known = more + 2;
                        attempts.restart(more, known);
                        doubtful = vec![more];
                    }
                    _ => prop_assert!(attempts.answer(next + more).is_none(), "never made"),
                }
                let unknown = open.values().chain(&doubtful).copied().min();
                prop_assert_eq!(attempts.floor(), unknown.unwrap_or(known).min(known));
                prop_assert_eq!(attempts.next_number(), next);
                let oldest = open.keys().next().copied().unwrap_or(next);
                prop_assert_eq!(attempts.span() as u64, next - oldest, "remembers too much");
            }
        }
    }
}
