//! What the database answered, handed on to whom it concerns. Decides nothing.

use super::Pump;
use crate::error::Failure;
use crate::relay::Input;
use crate::run::clock;
use crate::run::letters;
use crate::run::session::Ended;
use crate::run::work::Done;
use crate::store::Pulse;
use crate::store::history::Since;

impl Pump<'_> {
    /// A job is done; how the session is to end, if it may for a better one.
    pub(super) fn done(&mut self, done: Done) -> Result<Option<Ended>, Failure> {
        if let Done::SlotMade(_) | Done::Loaded(..) | Done::TailFound(..) | Done::Verified(..) =
            done
        {
            self.patient = self.patient.saturating_sub(1);
        }
        match done {
            Done::Recorded(result) => {
                let newest = result?;
                self.feed(Input::Recorded { newest })?;
            }
            Done::Buried(burial, result) => {
                if let Err(failure) = &result {
                    tracing::warn!(
                        code = failure.kind.code(),
                        "dead letter not written: {}",
                        failure.detail
                    );
                }
                self.feed(Input::Buried(burial, result.is_ok()))?;
            }
            Done::Verified(id, result) => {
                let verified = result?;
                if let Some(place) = self.places.get_mut(usize::from(id.0)) {
                    place.since = Since::Same;
                }
                if !verified.seqs.is_empty() {
                    self.reporter.resumed(id, &verified);
                }
                self.feed(Input::Resumed(id, verified))?;
            }
            Done::Letters(result) => {
                let answer = result?;
                self.letters.answered(clock::now(), &answer);
                let letters::Answer { again, released, .. } = answer;
                self.feed(Input::Letters { again, released })?;
            }
            Done::Pinged(result) => {
                let pulse = result?;
                self.reporter.pulse(&pulse);
                self.feel_wal_pressure(&pulse)?;
            }
            Done::Loaded(id, result) => self.feed(Input::Loaded(id, result?))?,
            Done::WaitingRead(id, result) => self.feed(Input::WaitingRead(id, result?))?,
            Done::Looked(Ok(looked)) => self.sweeper.looked(looked),
            Done::Rows(Ok(rows)) => {
                for input in self.sweeper.rows(clock::now(), rows, self.relay) {
                    self.feed(input)?;
                }
            }
            Done::Looked(Err(failure)) | Done::Rows(Err(failure)) => {
                // Without a stream nothing goes on that way.
                if self.wal.is_none() {
                    return Err(failure);
                }
                self.reporter.sweep_failed(&failure);
                self.sweeper.failed(clock::now());
                self.feed(Input::SweepEnds)?;
            }
            // Only the next start has more to look through.
            Done::Advanced(Err(failure)) => self.reporter.sweep_failed(&failure),
            Done::Advanced(Ok(())) => {}
            Done::TailFound(id, result) => {
                self.looking_for_tail = false;
                match result {
                    Ok(tail) => return Ok(Some(Ended::LostTail(tail))),
                    Err(failure) => self.reporter.resume_failed(id, &failure),
                }
            }
            Done::CeilingRaised(to) => self.ceiling.raised(to?),
            Done::SlotMade(made) => {
                let better = self.caretaker.as_mut().is_some_and(|one| one.made(&made));
                return Ok(better.then_some(Ended::Again(None)));
            }
            Done::SlotSeen(plan) => {
                let plan = plan?;
                return Ok(self.caretaker.as_ref().and_then(|one| one.seen(&plan)));
            }
        }
        Ok(None)
    }

    /// Counts only what our own undecided events hold back: nothing is gained by handing over when
    /// somebody else's transaction does.
    fn feel_wal_pressure(&mut self, pulse: &Pulse) -> Result<(), Failure> {
        let ours = self.relay.oldest_held().map_or(0, |lsn| pulse.wal_end.0.saturating_sub(lsn.0));
        let limit = self.max_retained_wal_bytes;
        // The server drops the slot when its limit is reached: three quarters are near enough.
        let in_danger = pulse.slot.is_some_and(|slot| {
            slot.safe_wal_size_bytes.is_some_and(|safe| safe < slot.retained_bytes / 3)
                && ours > slot.retained_bytes / 2
        });
        // Nobody moves the slot while no WAL is read.
        let idle = pulse.slot.filter(|slot| self.wal.is_none() && slot.retained_bytes > limit);
        self.reporter.idle_slot(idle.map(|slot| slot.retained_bytes));
        let pressed = ours > limit || in_danger;
        self.reporter.wal_pressure(pressed, ours);
        self.feed(Input::WalPressure(pressed))
    }
}
