//! The state of the one fast-ingest batch (ADR-50) that may be open or unanswered. Pure: it says
//! which reply subject the next message carries and what an answer means, and sends nothing.
//!
//! A batch lives in reply subjects: `<inbox>.<batch>.<flow>.fail.<seq>.<op>.$FI`, where `op` is
//! start, append, commit with this message, or end without a message. Its answers come back on the
//! subject of the message they are about.

use std::time::{Duration, Instant};

use super::ack::{Reply, ServerError};
use super::outcome::{End, Said, Verdict, judge};
use super::pipe::Step;
use crate::message::{Message, push_decimal};
use crate::relay::outcome::{Answer, Attempt};

/// Messages in one batch at most. Measured: 2,000 with one batch unanswered reach the rate of an
/// endless batch, 200 cost a fifth of it.
pub(super) const MESSAGES_MAX: u64 = 2_000;
/// A batch takes no further message after this long. Looked at when the next message is there: an
/// empty queue commits at once. A batch whose window is closed may stay open longer, which costs
/// nothing: the server would acknowledge its end only after everything that is outstanding, and the
/// flow answer that opens the window comes before that.
const AGE_MAX: Duration = Duration::from_millis(10);
/// Messages per flow answer that are asked for; the server allows 500 at most.
const FLOW: u64 = 500;
/// Flow answers that may be outstanding, by ADR-50.
const FLOWS_OUTSTANDING: u64 = 2;

const START: u8 = 0;
const APPEND: u8 = 1;
const COMMIT: u8 = 2;
const END: u8 = 3;

/// An ended batch.
#[derive(Debug)]
pub(super) struct Settled {
    attempts: Vec<Attempt>,
    /// What became of its messages.
    pub(super) verdict: Verdict,
    /// The stream does not take batches any more.
    pub(super) disabled: bool,
    /// With several replicas: this id must be found at this stream sequence.
    pub(super) proof: Option<(u64, String)>,
}

impl Settled {
    /// The answers, in order.
    pub(super) fn answers(&self) -> Vec<Answer> {
        let mut attempts = self.attempts.iter();
        let mut answers = Vec::with_capacity(self.verdict.rows.len());
        for (count, outcome) in &self.verdict.rows {
            let row = attempts.by_ref().take(usize::try_from(*count).unwrap_or(usize::MAX));
            let mut row = row.copied();
            if let Some(first) = row.next() {
                let last = row.last().unwrap_or(first);
                answers.push(Answer { first, last, outcome: outcome.clone() });
            }
        }
        answers
    }

    /// The proof did not come.
    pub(super) fn disprove(&mut self) {
        self.verdict = Verdict::unproven(self.sent());
    }

    fn sent(&self) -> u64 {
        u64::try_from(self.attempts.len()).unwrap_or(u64::MAX)
    }
}

/// Makes one batch after the other.
#[derive(Debug)]
pub(super) struct Batches {
    inbox: String,
    stem: String,
    made: u64,
    replicated: bool,
    open: Option<Batch>,
}

#[derive(Debug)]
struct Batch {
    id: String,
    /// Up to and with the gap mode.
    prefix: String,
    attempts: Vec<Attempt>,
    subjects: Texts,
    /// Message ids, kept only where a proof may be asked for.
    ids: Texts,
    opened: Instant,
    progress: Instant,
    acked: u64,
    window: u64,
    closed: bool,
    said: Said,
}

impl Batches {
    /// `stem` begins every batch id of this connection: it must never have been used before.
    pub(super) fn new(inbox: String, stem: String, replicated: bool) -> Batches {
        Batches { inbox, stem, made: 0, replicated, open: None }
    }

    /// May the next message be sent now?
    pub(super) fn takes_next(&self) -> bool {
        self.open.as_ref().is_none_or(|batch| {
            !batch.closed
                && batch.said == Said::default()
                && batch.sent() - batch.acked < batch.window
        })
    }

    /// Is nothing open and nothing unanswered?
    pub(super) fn is_idle(&self) -> bool {
        self.open.is_none()
    }

    /// When silence makes the open batch unknown.
    pub(super) fn deadline(&self, ack_timeout: Duration) -> Option<Instant> {
        self.open.as_ref().map(|batch| batch.progress + ack_timeout)
    }

    /// Counts the message in and writes its reply subject. `last` commits the batch with it.
    pub(super) fn stamp(
        &mut self,
        attempt: Attempt,
        message: &Message,
        last: bool,
        now: Instant,
        reply: &mut String,
    ) {
        let replicated = self.replicated;
        let batch = match &mut self.open {
            Some(batch) => batch,
            None => {
                self.made += 1;
                let id = format!("{}-{}", self.stem, self.made);
                let prefix = format!("{}.{id}.{FLOW}.fail", self.inbox);
                self.open.insert(Batch::new(id, prefix, now))
            }
        };
        batch.attempts.push(attempt);
        batch.subjects.push(message.subject());
        if replicated {
            batch.ids.push(message.id());
        }
        batch.progress = now;
        let full = batch.sent() >= MESSAGES_MAX || now.duration_since(batch.opened) >= AGE_MAX;
        batch.closed = last || full;
        let op = match (batch.closed, batch.sent()) {
            (true, _) => COMMIT,
            (false, 1) => START,
            (false, _) => APPEND,
        };
        batch.reply_subject(batch.sent(), op, reply);
    }

    /// What an answer means. `subject` is the reply subject it came on.
    pub(super) fn on_reply(&mut self, subject: &str, reply: Reply, now: Instant) -> Step {
        let Some(batch) = &mut self.open else { return Step::Nothing };
        // Answers to earlier batches settle nothing: 10208 for what was sent behind a failure.
        let Some(seq) = batch.seq_of(&self.inbox, subject) else { return Step::Nothing };
        batch.progress = now;
        let end = match reply {
            Reply::Flow { seq, every } => {
                batch.acked = batch.acked.max(seq.min(batch.sent()));
                batch.window = every.max(1).saturating_mul(FLOWS_OUTSTANDING);
                return Step::Nothing;
            }
            Reply::Gap => {
                batch.said.gap = true;
                return Step::Nothing;
            }
            Reply::Err { seq, error } => {
                batch.said.refused.get_or_insert((seq, error));
                return Step::Nothing;
            }
            Reply::Unreadable => return Step::Nothing,
            Reply::PubAck { seq, count, duplicate } => End::PubAck { seq, count, duplicate },
            Reply::NoResponders => {
                let error = ServerError::nobody_listens(batch.subject_of(seq));
                return self.refused(seq, error);
            }
            Reply::Refused(error) if error.err_code == ServerError::BATCH_UNKNOWN => End::Abandoned,
            Reply::Refused(error) => return self.refused(seq, error),
        };
        self.settled(&end)
    }

    /// Does this answer say that a message is missing, and nothing yet why? The server's word about
    /// it comes before, but on another way through the client.
    pub(super) fn misses_one(&self, subject: &str, reply: &Reply) -> bool {
        let missing = match reply {
            Reply::Gap => true,
            Reply::Refused(error) => error.err_code == ServerError::BATCH_UNKNOWN,
            Reply::Flow { .. }
            | Reply::Err { .. }
            | Reply::PubAck { .. }
            | Reply::NoResponders
            | Reply::Unreadable => false,
        };
        let of_open = |batch: &Batch| {
            batch.said == Said::default() && batch.seq_of(&self.inbox, subject).is_some()
        };
        missing && self.open.as_ref().is_some_and(of_open)
    }

    /// One message was refused by itself.
    fn refused(&mut self, seq: u64, error: ServerError) -> Step {
        if seq == 1 {
            return self.settled(&End::FirstRefused(error));
        }
        let Some(batch) = &mut self.open else { return Step::Nothing };
        batch.said.refused.get_or_insert((seq, error));
        // The batch was not looked up: the server still waits for this number. A message behind it
        // shows the gap; without one, the batch is ended.
        if seq < batch.sent() { Step::Nothing } else { batch.end(seq) }
    }

    /// The server let a message of this subject not through. The first of them is meant, or with
    /// permissions that changed meanwhile a later one: how many are stored tells.
    pub(super) fn on_forbidden(&mut self, subject: &str, error: ServerError) -> Step {
        let Some(batch) = self.open.as_mut().filter(|batch| batch.said.refused.is_none()) else {
            return Step::Nothing;
        };
        let mut those = batch.subjects.iter().zip(1..).filter(|(each, _)| *each == subject);
        let Some((_, seq)) = those.next() else { return Step::Nothing };
        let others = those.count() as u64;
        if seq == 1 && others == 0 {
            return self.settled(&End::FirstRefused(error));
        }
        batch.said.refused = Some((seq, error));
        if seq == 1 {
            // No batch began, or nobody can tell where it ends.
            return self.settled(&End::Silence);
        }
        // The tail alone is missing: nothing behind it shows the gap.
        if seq + others == batch.sent() { batch.end(seq) } else { Step::Nothing }
    }

    fn settled(&mut self, end: &End) -> Step {
        self.settle(end).map_or(Step::Nothing, Step::Settled)
    }

    /// Ends the open batch, if there is one.
    pub(super) fn settle(&mut self, end: &End) -> Option<Settled> {
        let batch = self.open.take()?;
        let verdict = judge(batch.sent(), self.replicated, &batch.said, end);
        let proof = match (verdict.proof, end) {
            (Some(nth), End::PubAck { seq, .. }) => {
                let nth = usize::try_from(nth).unwrap_or(usize::MAX);
                Some((*seq, batch.ids.get(nth.saturating_sub(1)).to_owned()))
            }
            _ => None,
        };
        let disabled = matches!(
            end, End::FirstRefused(error) if error.err_code == ServerError::BATCH_DISABLED
        ) || batch
            .said
            .refused
            .as_ref()
            .is_some_and(|(_, error)| error.err_code == ServerError::BATCH_DISABLED);
        Some(Settled { attempts: batch.attempts, verdict, disabled, proof })
    }
}

impl Batch {
    fn new(id: String, prefix: String, now: Instant) -> Batch {
        Batch {
            id,
            prefix,
            attempts: Vec::new(),
            subjects: Texts::default(),
            ids: Texts::default(),
            opened: now,
            progress: now,
            acked: 0,
            window: FLOW * FLOWS_OUTSTANDING,
            closed: false,
            said: Said::default(),
        }
    }

    fn sent(&self) -> u64 {
        u64::try_from(self.attempts.len()).unwrap_or(u64::MAX)
    }

    /// Ends it where the server waits for this number.
    fn end(&mut self, seq: u64) -> Step {
        self.closed = true;
        // The first one is of a subject that the stream stores: there would be no batch otherwise.
        let subject = self.subjects.get(0).to_owned();
        let mut reply = String::new();
        self.reply_subject(seq, END, &mut reply);
        Step::End { subject, reply }
    }

    fn subject_of(&self, seq: u64) -> &str {
        let nth = usize::try_from(seq).unwrap_or(usize::MAX).saturating_sub(1);
        self.subjects.get(nth)
    }

    fn reply_subject(&self, seq: u64, op: u8, reply: &mut String) {
        reply.push_str(&self.prefix);
        reply.push('.');
        push_decimal(reply, seq);
        reply.push('.');
        push_decimal(reply, u64::from(op));
        reply.push_str(".$FI");
    }

    /// The number of this batch's message that an answer is about.
    fn seq_of(&self, inbox: &str, subject: &str) -> Option<u64> {
        let rest = subject.strip_prefix(inbox)?.strip_prefix('.')?;
        let rest = rest.strip_prefix(self.id.as_str())?.strip_prefix('.')?;
        rest.split('.').nth(2)?.parse().ok()
    }
}

/// Many short texts, one behind the other in one piece of memory.
#[derive(Debug, Default)]
struct Texts {
    all: String,
    ends: Vec<usize>,
}

impl Texts {
    fn push(&mut self, text: &str) {
        self.all.push_str(text);
        self.ends.push(self.all.len());
    }

    /// Empty beyond the last.
    fn get(&self, nth: usize) -> &str {
        let from = nth.checked_sub(1).and_then(|before| self.ends.get(before)).copied();
        let end = self.ends.get(nth).copied().unwrap_or(0);
        self.all.get(from.unwrap_or(0)..end).unwrap_or_default()
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.ends.len()).map(|nth| self.get(nth))
    }
}

#[cfg(test)]
mod tests;
