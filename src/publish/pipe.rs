//! The three ways to publish in order, as the session uses them: what the next message looks like,
//! and what an answer means. Pure.

use std::time::{Duration, Instant};

use super::ack::{Reply, ServerError};
use super::batch::{Batches, Settled};
use super::in_flight::InFlight;
use super::outcome::End;
use super::sequence::{Breach, Sequence};
use crate::message::Message;
use crate::relay::outcome::{Answer, Attempt, Outcome, Pipeline, StreamFacts};

/// What to do about an answer.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing, or wait for more.
    Nothing,
    /// Send an empty message that ends the batch.
    End {
        /// Any subject of the stream.
        subject: String,
        /// Its reply subject.
        reply: String,
    },
    /// The batch is over.
    Settled(Settled),
    /// Single publishes are answered.
    Answered(Vec<Answer>),
}

/// One of the three.
pub(super) enum Pipe {
    /// Fast-ingest batches, one at a time.
    Batch(Box<Batches>),
    /// Single publishes, each behind the one before it.
    Sequence(Box<Sequence>),
    /// Single publishes, independent of each other.
    PerRun(InFlight),
}

/// What the next message is sent with.
#[derive(Debug, Default)]
pub(super) struct Stamp {
    /// Reply subject.
    pub(super) reply: String,
    /// Header block; the message's own when empty.
    pub(super) head: String,
}

impl Pipe {
    /// That of a new connection, whose answers come below `inbox`.
    pub(super) fn new(facts: &StreamFacts, inbox: String, window: usize, now: Instant) -> Pipe {
        let (replicated, window) = (facts.replicas > 1, window.max(1));
        match facts.pipeline {
            Pipeline::Batch => {
                let stem = uuid::Uuid::new_v4().simple().to_string();
                Pipe::Batch(Box::new(Batches::new(inbox, stem, replicated)))
            }
            Pipeline::Sequence => {
                Pipe::Sequence(Box::new(Sequence::new(inbox, replicated, window, now)))
            }
            Pipeline::PerRun => Pipe::PerRun(InFlight::new(inbox, replicated, window)),
        }
    }

    /// The stream was read, up to this sequence at least.
    pub(super) fn begin_behind(&mut self, seq: u64) {
        if let Pipe::Sequence(sequence) = self {
            sequence.begin_behind(seq);
        }
    }

    /// May the next message be sent now?
    pub(super) fn takes_next(&self) -> bool {
        match self {
            Pipe::Batch(batches) => batches.takes_next(),
            Pipe::Sequence(sequence) => sequence.takes_next(),
            Pipe::PerRun(flight) => flight.takes_next(),
        }
    }

    /// Counts the message in. `last`: nothing is queued behind it.
    pub(super) fn stamp(
        &mut self,
        attempt: Attempt,
        message: &Message,
        last: bool,
        now: Instant,
        stamp: &mut Stamp,
    ) {
        let Stamp { reply, head } = stamp;
        reply.clear();
        head.clear();
        match self {
            Pipe::Batch(batches) => batches.stamp(attempt, message, last, now, reply),
            Pipe::Sequence(sequence) => sequence.stamp(attempt, message, now, reply, head),
            Pipe::PerRun(flight) => flight.stamp(attempt, message.subject(), now, reply),
        }
    }

    /// What an answer means. `subject` is the reply subject it came on.
    pub(super) fn on_reply(&mut self, subject: &str, reply: Reply, now: Instant) -> Step {
        match self {
            Pipe::Batch(batches) => batches.on_reply(subject, reply, now),
            Pipe::Sequence(sequence) => Step::Answered(sequence.on_reply(subject, reply, now)),
            Pipe::PerRun(flight) => {
                Step::Answered(flight.on_reply(subject, reply).into_iter().collect())
            }
        }
    }

    /// Does this answer say that a message is missing, and nothing yet why?
    pub(super) fn misses_one(&self, subject: &str, reply: &Reply) -> bool {
        match self {
            Pipe::Batch(batches) => batches.misses_one(subject, reply),
            Pipe::Sequence(_) | Pipe::PerRun(_) => false,
        }
    }

    /// The server let a message of this subject not through.
    pub(super) fn on_forbidden(&mut self, subject: &str, error: ServerError, now: Instant) -> Step {
        match self {
            Pipe::Batch(batches) => batches.on_forbidden(subject, error),
            Pipe::Sequence(sequence) => Step::Answered(sequence.on_forbidden(subject, &error, now)),
            Pipe::PerRun(flight) => Step::Answered(flight.on_forbidden(subject, &error)),
        }
    }

    /// Must nothing more be sent before a Resume, after these answers?
    pub(super) fn is_over(&self, answers: &[Answer]) -> bool {
        match self {
            Pipe::Batch(_) | Pipe::PerRun(_) => {
                answers.iter().any(|answer| matches!(answer.outcome, Outcome::Unknown(_)))
            }
            Pipe::Sequence(sequence) => sequence.is_broken(),
        }
    }

    /// What was noticed of others who write the stream.
    pub(super) fn take_breach(&mut self) -> Option<Breach> {
        match self {
            Pipe::Sequence(sequence) => sequence.take_breach(),
            Pipe::Batch(_) | Pipe::PerRun(_) => None,
        }
    }

    /// When silence makes something unknown.
    pub(super) fn deadline(&self, ack_timeout: Duration) -> Option<Instant> {
        match self {
            Pipe::Batch(batches) => batches.deadline(ack_timeout),
            Pipe::Sequence(sequence) => sequence.deadline(ack_timeout),
            Pipe::PerRun(flight) => flight.deadline(ack_timeout),
        }
    }

    /// The deadline has passed.
    pub(super) fn expire(&mut self, now: Instant, ack_timeout: Duration) -> Vec<Answer> {
        match self {
            Pipe::Batch(batches) => answers_of(batches.settle(&End::Silence)),
            Pipe::Sequence(sequence) => sequence.expire(now),
            Pipe::PerRun(flight) => flight.expire(now, ack_timeout),
        }
    }

    /// The connection is gone, or of no more use: answers of everything unanswered.
    pub(super) fn disconnect(&mut self, now: Instant) -> Vec<Answer> {
        match self {
            Pipe::Batch(batches) => answers_of(batches.settle(&End::Disconnected)),
            Pipe::Sequence(sequence) => sequence.give_up(&End::Disconnected, now),
            Pipe::PerRun(flight) => flight.give_up(&End::Disconnected),
        }
    }

    /// May the stream's configuration be looked at? Not while a batch is open: its outcome would be
    /// unknown if there was something new. Nor while the answers behind a failure are awaited.
    pub(super) fn may_look(&self) -> bool {
        match self {
            Pipe::Batch(batches) => batches.is_idle(),
            Pipe::Sequence(sequence) => sequence.is_idle() || !sequence.is_broken(),
            Pipe::PerRun(_) => true,
        }
    }
}

fn answers_of(settled: Option<Settled>) -> Vec<Answer> {
    settled.map_or_else(Vec::new, |settled| settled.answers())
}

/// Appends an answer, or makes the last one longer by it when both attempts and both places in the
/// stream follow each other.
pub(super) fn join(answers: &mut Vec<Answer>, next: Answer) {
    if let Some(Answer { last, outcome: Outcome::Stored { stream_seq, duplicate: false }, .. }) =
        answers.last_mut()
        && let Outcome::Stored { stream_seq: place, duplicate: false } = next.outcome
        && (last.0.checked_add(1), stream_seq.checked_add(1)) == (Some(next.first.0), Some(place))
        && next.first == next.last
    {
        (*last, *stream_seq) = (next.last, place);
    } else {
        answers.push(next);
    }
}
