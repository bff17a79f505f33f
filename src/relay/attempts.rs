//! Attempts that are not answered yet, and the floor that follows from them: the stream sequence
//! below which no outcome of ours is unknown. Resume reads from there.

use std::collections::{BTreeMap, VecDeque};

use crate::relay::lanes::Slot;
use crate::relay::outcome::Attempt;

/// An attempt that is not answered yet.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// What was sent.
    pub slot: Slot,
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
    pub fn send(&mut self, slot: Slot) -> Attempt {
        let number = self.next_number();
        self.open.push_back(Some(Sent { slot, known: self.known }));
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
    /// stored above it as long as the broker is not `proven`, so the next read begins here.
    pub fn resumed(&mut self, seq: u64, proven: bool) {
        self.learn(seq);
        self.doubtful = (!proven).then_some(seq);
    }

    /// Attempts from the oldest unanswered one on.
    pub fn span(&self) -> usize {
        self.open.len()
    }

    /// Another stream, or a first one: nothing above `seq` is known.
    pub fn restart(&mut self, seq: u64) {
        self.known = seq;
        self.doubtful = None;
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
