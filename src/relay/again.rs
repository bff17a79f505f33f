//! Dead letters in the core: events that have their letter already, runs that wait behind one, and
//! letters that are sent again. Parts of [`Relay`] and [`Destination`].
//!
//! A letter that is sent again was decided when it was buried: it holds no transaction, and what
//! becomes of it changes the letter alone.

use std::sync::Arc;
use std::time::Instant;

use crate::event::{Event, RunHash};
use crate::lsn::Lsn;
use crate::relay::destination::Destination;
use crate::relay::machine::{Relay, Verified, let_go};
use crate::relay::outcome::DestinationId;
use crate::relay::receipts::{Decided, Origin};

/// Bytes of letters that are read at once, at most and at least.
const BYTES_MAX: usize = 4 << 20;
const BYTES_MIN: usize = 64 << 10;

/// What is to be asked of the dead letters, from time to time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Question {
    /// Letters that are being sent again: not wanted a second time.
    pub under_way: Vec<i64>,
    /// Room for more of them; none with zero.
    pub max_bytes: usize,
    /// Runs that are blocked: which of them are not, any more?
    pub blocked: Vec<BlockedRun>,
}

/// A run that waits behind a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockedRun {
    /// Where.
    pub destination: DestinationId,
    /// Which.
    pub run: RunHash,
    /// Tells this stop from a later one of the same run.
    pub number: u64,
}

/// A letter to be sent again.
#[derive(Debug)]
pub struct Redrive {
    /// Where it could not go.
    pub destination: DestinationId,
    /// Its number.
    pub letter: i64,
    /// The event.
    pub event: Event,
}

impl Destination {
    /// Is this event in the dead letters, and the ledger does not know it yet?
    pub(super) fn has_letter(&self, event: &Event) -> bool {
        let buried = &self.spec.letters.buried;
        !buried.is_empty() && buried.get(&event.seq).is_some_and(|id| *id == event.id.to_string())
    }

    /// The run waits behind this event's letter, if that is the policy. A row without an ordering
    /// key has nobody behind it.
    pub(super) fn block_behind(&mut self, event: &Event, ordinal: u64) {
        if self.spec.letters.blocks_runs && event.run.is_some() {
            self.lanes.block(event.run_hash, event.seq, event.position, Some(ordinal));
            self.waiting.park(event.run_hash);
        }
    }

    /// Letters that are being sent again, or are sent and not recorded.
    fn letters_under_way(&self) -> impl Iterator<Item = i64> + '_ {
        let lanes = self.lanes.letters().map(|(_, letter)| letter);
        lanes.chain(self.writing.letters.iter().chain(&self.decided.letters).copied())
    }
}

impl Relay {
    /// What to ask the dead letters. An answer to an earlier question must be in before.
    pub fn ask_letters(&mut self) -> Question {
        // What was closed until now is durable, so the answer does not have it.
        self.closed_letters.clear();
        let mut question = Question::default();
        for (destination, index) in self.destinations.iter().zip(0u16..) {
            question.under_way.extend(destination.letters_under_way());
            let destination_id = DestinationId(index);
            question.blocked.extend(destination.lanes.blocked().map(|(run, number)| BlockedRun {
                destination: destination_id,
                run,
                number,
            }));
        }
        // Under a long drain the memory is never empty: a little is taken all the same.
        let half = self.limits.memory_bytes / 2;
        question.max_bytes = match half.saturating_sub(self.used_bytes()).min(BYTES_MAX) {
            _ if self.stopping => 0,
            room if room < BYTES_MIN && question.under_way.is_empty() => BYTES_MIN,
            room => room,
        };
        question
    }

    /// The answer.
    pub(super) fn letters(&mut self, now: Instant, again: Vec<Redrive>, released: &[BlockedRun]) {
        for one in released {
            self.each(one.destination, |each| each.release(one.run, one.number));
        }
        for Redrive { destination, letter, event } in again {
            let closed = self.closed_letters.contains(&letter);
            let Some(place) = self.destinations.get_mut(usize::from(destination.0)) else {
                continue;
            };
            if closed || place.letters_under_way().any(|under_way| under_way == letter) {
                continue;
            }
            self.held_bytes += event.budget_bytes();
            let until = event.position.map_or(Lsn::ZERO, |position| position.commit_lsn);
            if place.lanes.is_empty() {
                place.moved_at = Some(now);
            }
            place.lanes.push_letter(Arc::new(event), Origin::Letter { letter, until });
        }
    }

    /// Letters in receipts that are written now.
    pub(super) fn letters_recorded(&mut self, decided: &Decided) {
        self.letters_changed |= !decided.letters.is_empty();
        self.closed_letters.extend(decided.letters.iter().copied());
    }

    /// Did the relay itself close letters since this was last asked? Runs may be free by that.
    pub fn take_letters_changed(&mut self) -> bool {
        std::mem::take(&mut self.letters_changed)
    }

    /// Resume found letters in the stream, and their state is changed.
    pub(super) fn letters_found(&mut self, id: DestinationId, verified: &Verified) {
        if verified.letters.is_empty() {
            return;
        }
        self.letters_changed = true;
        self.closed_letters.extend(verified.letters.iter().copied());
        let Some(destination) = self.destinations.get_mut(usize::from(id.0)) else { return };
        let found = destination.lanes.letters().filter(|(_, one)| verified.letters.contains(one));
        let slots: Vec<_> = found.map(|(slot, _)| slot).collect();
        for slot in slots {
            destination.counts.redriven += 1;
            if let Some(entry) = destination.lanes.settle(slot) {
                let_go(&mut self.held_bytes, entry);
            }
        }
    }
}

#[cfg(test)]
mod tests;
