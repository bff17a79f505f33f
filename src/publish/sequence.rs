//! Single publishes that name their place: each is stored only behind the one before it, so that a
//! window of them may be in flight and the stream holds a prefix. For a stream that nobody else
//! writes. Pure.
//!
//! A message carries `Nats-Expected-Last-Sequence`, which is what the stream's last sequence will be
//! when everything sent before it is stored. After the first that is not stored the server refuses
//! all later ones (10071), until the stream was read and its end is known anew.
//!
//! What a server compares, and when (`processJetStreamMsg` and, with replicas,
//! `processClusteredInboundMsg` in its sources):
//!
//! | | one replica | several |
//! |---|---|---|
//! | up to 2.11 | dedupe, then the sequence | dedupe when proposed, which keeps the id of what is refused for the whole window; the sequence when applied |
//! | from 2.12 | the sequence, then dedupe | dedupe, then the sequence with proposals under way counted in; both when proposed, by the leader alone |
//!
//! So a duplicate is stored nowhere, whatever the version, and everything sent behind it is refused.
//! Streams of several replicas are not used: a message of somebody else's that makes the first of a row
//! be refused takes its place in number, too, and the second one fits.
//!
//! **Others.** The sequence says how many messages there are and not whose they are: somebody else's
//! could take the place of one of ours that got lost. On one replica a message therefore names the one
//! before it, too (`Nats-Expected-Last-Msg-Id`), unless that one is known to be stored. Replicas compare
//! ids when they apply a message, each with its own memory of the last one, which a replica that
//! caught up does not have: they would part for good, so there the sequence must do.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ack::{Reply, ServerError};
use super::in_flight::InFlight;
use super::outcome::End;
use super::pipe::join;
use crate::message::{Message, push_decimal};
use crate::relay::outcome::{Answer, Attempt, Doubt, Outcome};

const LAST_SEQUENCE: &str = "Nats-Expected-Last-Sequence: ";
const LAST_ID: &str = "Nats-Expected-Last-Msg-Id: ";
const LINE_END: &str = "\r\n";
/// Behind a message of a longer id nothing is sent until it is answered.
const ID_MAX: usize = 128;
/// Digits of the largest sequence.
const DIGITS_MAX: usize = 20;
/// What a message grows by, at most.
pub(super) const FENCE_BYTES: usize =
    LAST_SEQUENCE.len() + DIGITS_MAX + LAST_ID.len() + ID_MAX + 2 * LINE_END.len();
/// Refusals can overtake the acknowledgements of what was sent before them, by the time that replicas
/// need. Behind a failure no answer is waited for longer than this.
const BROKEN_PATIENCE: Duration = Duration::from_secs(1);

/// The stream is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Breach {
    /// It goes on behind our last message, in the server's words.
    Intruded(String),
    /// The message at this sequence is stored, and one that was sent before it is not.
    Overtaken(u64),
}

/// What was sent and not reported, and what the next one has to expect.
#[derive(Debug)]
pub(super) struct Sequence {
    flight: InFlight,
    replicated: bool,
    window: usize,
    /// In order.
    row: VecDeque<Place>,
    /// The stream's last sequence when everything sent is stored.
    last: u64,
    /// Id of the message that was sent last.
    before: String,
    /// Not everything sent is stored where it should be: nothing more is sent.
    broken: bool,
    /// The same of what was reported.
    failed: bool,
    /// When the row's first message became the first, and when an answer came last.
    moved: Instant,
    heard: Instant,
    breach: Option<Breach>,
}

/// A message on its way.
#[derive(Debug)]
struct Place {
    attempt: Attempt,
    /// The sequence that it is to have.
    seq: u64,
    outcome: Option<Outcome>,
    /// Refused because the stream goes on behind the message before it.
    passed: Option<String>,
}

impl Sequence {
    pub(super) fn new(inbox: String, replicated: bool, window: usize, now: Instant) -> Sequence {
        Sequence {
            flight: InFlight::new(inbox, replicated, window),
            replicated,
            window,
            row: VecDeque::new(),
            last: 0,
            before: String::new(),
            broken: false,
            failed: false,
            moved: now,
            heard: now,
            breach: None,
        }
    }

    /// The stream was read: everything of ours up to this sequence is known, and nothing is behind it
    /// as far as anybody knows. If there is, the next message is refused.
    pub(super) fn begin_behind(&mut self, seq: u64) {
        self.last = seq;
        self.broken = false;
        self.failed = false;
    }

    /// May the next message be sent now?
    pub(super) fn takes_next(&self) -> bool {
        let can_be_named = self.replicated || self.row.is_empty() || self.before.len() <= ID_MAX;
        !self.broken && self.row.len() < self.window && can_be_named
    }

    /// Is nothing unanswered?
    pub(super) fn is_idle(&self) -> bool {
        self.row.is_empty()
    }

    /// Must the stream be read before anything is sent?
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// What was noticed since this was asked last.
    pub(super) fn take_breach(&mut self) -> Option<Breach> {
        self.breach.take()
    }

    /// When silence makes what is unanswered unknown.
    pub(super) fn deadline(&self, ack_timeout: Duration) -> Option<Instant> {
        self.row.front()?;
        let first = self.moved + ack_timeout;
        let behind = self.heard + BROKEN_PATIENCE;
        Some(if self.broken { first.min(behind) } else { first })
    }

    /// Counts the message in, and writes its reply subject and its header block.
    pub(super) fn stamp(
        &mut self,
        attempt: Attempt,
        message: &Message,
        now: Instant,
        reply: &mut String,
        head: &mut String,
    ) {
        let whole = message.head();
        head.push_str(whole.strip_suffix(LINE_END).unwrap_or(whole));
        head.push_str(LAST_SEQUENCE);
        push_decimal(head, self.last);
        head.push_str(LINE_END);
        if self.row.is_empty() {
            self.moved = now;
        } else if !self.replicated {
            head.push_str(LAST_ID);
            head.push_str(&self.before);
            head.push_str(LINE_END);
        }
        head.push_str(LINE_END);
        self.before.clear();
        self.before.push_str(message.id());
        self.last = self.last.saturating_add(1);
        self.row.push_back(Place { attempt, seq: self.last, outcome: None, passed: None });
        self.flight.stamp(attempt, message.subject(), now, reply);
    }

    /// What an answer means. `subject` is the reply subject it came on.
    pub(super) fn on_reply(&mut self, subject: &str, reply: Reply, now: Instant) -> Vec<Answer> {
        let wrong = if let Reply::Refused(error) = &reply { Some(error) } else { None };
        let wrong = wrong.filter(|error| error.is_wrong_last()).cloned();
        let Some(answer) = self.flight.on_reply(subject, reply) else { return Vec::new() };
        self.heard = now;
        self.note(answer, wrong);
        self.report(now)
    }

    /// The server let a message of this subject not through.
    pub(super) fn on_forbidden(
        &mut self,
        subject: &str,
        error: &ServerError,
        now: Instant,
    ) -> Vec<Answer> {
        let answers = self.flight.on_forbidden(subject, error);
        self.heard = now;
        self.note_all(answers, now)
    }

    /// The deadline has passed. What was sent later can't be stored if the first is not, and if it
    /// is, only the stream can tell.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Answer> {
        let end = if self.broken { End::Abandoned } else { End::Silence };
        self.give_up(&end, now)
    }

    /// None of the unanswered is waited for any more.
    pub(super) fn give_up(&mut self, end: &End, now: Instant) -> Vec<Answer> {
        let answers = self.flight.give_up(end);
        self.note_all(answers, now)
    }

    fn note_all(&mut self, answers: Vec<Answer>, now: Instant) -> Vec<Answer> {
        answers.into_iter().for_each(|answer| self.note(answer, None));
        self.report(now)
    }

    fn note(&mut self, answer: Answer, wrong: Option<ServerError>) {
        let index = self.row.binary_search_by_key(&answer.first, |place| place.attempt);
        let Some(place) = index.ok().and_then(|index| self.row.get_mut(index)) else { return };
        self.broken |= !place.is_kept_by(&answer.outcome);
        let has_passed = |error: &ServerError| last_of(error).is_none_or(|last| last >= place.seq);
        place.passed = wrong.filter(has_passed).map(|error| error.description);
        // What has the place may be this very message, from a connection that was given up.
        let doubtful = place.passed.is_some() && answer.outcome == Outcome::NotSent;
        let outcome = if doubtful { Outcome::Unknown(Doubt::Gap) } else { answer.outcome };
        place.outcome = Some(outcome);
    }

    /// Answers of the row's first messages, in order.
    fn report(&mut self, now: Instant) -> Vec<Answer> {
        let mut answers = Vec::new();
        while let Some(Place { outcome: Some(_), .. }) = self.row.front()
            && let Some(mut place) = self.row.pop_front()
            && let Some(outcome) = place.outcome.take()
        {
            self.moved = now;
            let outcome = self.in_row(&place, outcome);
            let answer = Answer { first: place.attempt, last: place.attempt, outcome };
            join(&mut answers, answer);
        }
        answers
    }

    /// What the outcome of one message says when those before it are looked at.
    fn in_row(&mut self, place: &Place, outcome: Outcome) -> Outcome {
        let failed_before = self.failed;
        self.failed |= !place.is_kept_by(&outcome);
        match outcome {
            Outcome::Stored { stream_seq, duplicate: false } if failed_before => {
                self.breach = Some(Breach::Overtaken(stream_seq));
            }
            // Whatever the server said: it would not have been stored.
            Outcome::Refused(_) if failed_before => return Outcome::NotSent,
            Outcome::Stored { .. }
            | Outcome::Refused(_)
            | Outcome::NotSent
            | Outcome::Unknown(_) => {
                if !failed_before && let Some(words) = &place.passed {
                    self.breach.get_or_insert(Breach::Intruded(words.clone()));
                }
            }
        }
        outcome
    }
}

impl Place {
    /// Is it stored where it should be?
    fn is_kept_by(&self, outcome: &Outcome) -> bool {
        matches!(outcome, Outcome::Stored { stream_seq, duplicate: false } if *stream_seq == self.seq)
    }
}

/// The stream's last sequence, from the words about a wrong one.
fn last_of(error: &ServerError) -> Option<u64> {
    error.description.strip_prefix("wrong last sequence: ")?.parse().ok()
}

#[cfg(test)]
mod tests;
