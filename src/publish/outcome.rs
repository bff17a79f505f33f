//! The answer table: what the server's words, or its silence, say about the messages of a batch.
//! Pure. A single message is a batch of one.
//!
//! `Stored`, `Refused` and `NotSent` are statements of fact; whatever is not certain is `Unknown`,
//! and the stream itself is asked. Two sources of certainty are used: with gap mode `fail` the
//! server stores a prefix without gaps and nothing behind the first failure; and on one replica
//! the server that answers is the one that stores. A message that the connection itself turned
//! away (status 503, no permission) came to no stream at all. With more replicas an acknowledgement can count
//! messages that were only proposed (they are skipped as duplicates of proposals that may yet be
//! lost), so that it stands only after the leader showed the message at the place it named.

use super::ack::ServerError;
use crate::event::Reason;
use crate::relay::outcome::{Doubt, Outcome, Refusal};

/// How a batch ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// Acknowledged.
    PubAck {
        /// Stream sequence of the last message stored.
        seq: u64,
        /// Length of the stored prefix.
        count: u64,
        /// The message, the only one, was stored before.
        duplicate: bool,
    },
    /// The first message was refused with a plain error.
    FirstRefused(ServerError),
    /// The server does not know the batch (10208): it gave up waiting, or lost it.
    Abandoned,
    /// No answer in time.
    Silence,
    /// The connection went away.
    Disconnected,
}

/// What the server said about the batch before its end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// The first refused message and why.
    pub(super) refused: Option<(u64, ServerError)>,
    /// It reported a gap.
    pub(super) gap: bool,
}

/// What becomes of a batch's messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    /// From the first message on: so many share this outcome.
    pub(super) rows: Vec<(u64, Outcome)>,
    /// Number of the message that must be found at the acknowledged stream sequence for this to
    /// be true; otherwise all are unknown.
    pub(super) proof: Option<u64>,
}

impl Verdict {
    fn all(sent: u64, doubt: Doubt) -> Verdict {
        Verdict { rows: vec![(sent, Outcome::Unknown(doubt))], proof: None }
    }

    /// The verdict when the proof did not come.
    pub(super) fn unproven(sent: u64) -> Verdict {
        Verdict::all(sent, Doubt::Unproven)
    }

    /// Every message is stored.
    pub(super) fn is_success(&self) -> bool {
        self.rows.iter().all(|(_, outcome)| matches!(outcome, Outcome::Stored { .. }))
    }
}

/// The table.
pub(super) fn judge(sent: u64, replicated: bool, said: &Said, end: &End) -> Verdict {
    match end {
        End::PubAck { seq, count, duplicate } => {
            acknowledged(sent, replicated, said, *seq, *count, *duplicate)
        }
        End::FirstRefused(error) => {
            let rest = match error.ends_batch_at_once() {
                true => Outcome::NotSent,
                false => Outcome::Unknown(Doubt::ServerError),
            };
            let mut rows = vec![(1, error.outcome(replicated))];
            push(&mut rows, sent.saturating_sub(1), rest);
            Verdict { rows, proof: None }
        }
        End::Abandoned => Verdict::all(sent, Doubt::Gap),
        End::Silence if said.refused.is_some() => Verdict::all(sent, Doubt::ServerError),
        End::Silence if said.gap => Verdict::all(sent, Doubt::Gap),
        End::Silence => Verdict::all(sent, Doubt::Silence),
        End::Disconnected => Verdict::all(sent, Doubt::Disconnected),
    }
}

fn acknowledged(
    sent: u64,
    replicated: bool,
    said: &Said,
    seq: u64,
    count: u64,
    duplicate: bool,
) -> Verdict {
    // A message that failed inside a batch that went on: its number was acknowledged all the same.
    if said.refused.as_ref().is_some_and(|(refused, _)| *refused <= count) {
        return Verdict::all(sent, Doubt::ServerError);
    }
    // Nothing was stored by this batch, though the server counts messages as done.
    if count > sent || (seq == 0 && count > 0) {
        return Verdict::all(sent, Doubt::Unproven);
    }
    let mut rows = Vec::new();
    push(&mut rows, count, Outcome::Stored { stream_seq: seq, duplicate });
    let mut rest = sent - count;
    if let Some((refused, error)) = &said.refused
        && *refused == count + 1
        && rest > 0
    {
        push(&mut rows, 1, error.outcome(replicated));
        rest -= 1;
    }
    let behind = if replicated { Outcome::Unknown(Doubt::Gap) } else { Outcome::NotSent };
    push(&mut rows, rest, behind);
    let proof = (replicated && sent > 1 && count > 0).then_some(count);
    Verdict { rows, proof }
}

fn push(rows: &mut Vec<(u64, Outcome)>, count: u64, outcome: Outcome) {
    if count > 0 {
        rows.push((count, outcome));
    }
}

/// What an error code says, from `server/errors.json` and the places in `server/stream.go` and
/// `server/jetstream_batching.go` that answer with it.
///
/// Only size is about the message itself for good: everything else a server may object to in a
/// message it knows from `Nats-*` headers, which rows can't set. A refusal that hits every message
/// alike (a sealed stream, a counter stream, an expected stream that is another) must not send an
/// outbox to the dead letters.
impl ServerError {
    const MESSAGE_TOO_LARGE: u64 = 10054;
    const HEADERS_TOO_LARGE: u64 = 10097;
    const STORE_FAILED: u64 = 10077;
    const IN_PROGRESS: u64 = 10158;
    /// Another message is the stream's last than the one that was expected: its sequence, its id.
    const WRONG_LAST: [u64; 2] = [10071, 10070];
    /// The stream does not take batches.
    pub(super) const BATCH_DISABLED: u64 = 10205;
    /// The server does not know the batch.
    pub(super) const BATCH_UNKNOWN: u64 = 10208;

    /// What becomes of the one message that got this error.
    pub(super) fn outcome(&self, replicated: bool) -> Outcome {
        if self.err_code == ServerError::IN_PROGRESS {
            return Outcome::Unknown(Doubt::InProgress);
        }
        if self.is_wrong_last() {
            // While the leader changes two servers can get the message, and the other one store it.
            return if replicated { Outcome::Unknown(Doubt::Gap) } else { Outcome::NotSent };
        }
        if replicated && !self.is_before_proposal() {
            return Outcome::Unknown(Doubt::ServerError);
        }
        let too_large = matches!(
            self.err_code,
            ServerError::MESSAGE_TOO_LARGE | ServerError::HEADERS_TOO_LARGE
        ) || self.is_store_failure("message too large");
        Outcome::Refused(Refusal {
            permanent: too_large.then_some(Reason::TooLarge),
            code: self.err_code,
            detail: self.description.clone(),
        })
    }

    /// Was the message to be stored only behind another one, which was not the stream's last?
    pub(super) fn is_wrong_last(&self) -> bool {
        ServerError::WRONG_LAST.contains(&self.err_code)
    }

    /// Does the leader answer so before it proposes the message to its replicas? Then it is surely
    /// not stored, whatever the number of replicas.
    fn is_before_proposal(&self) -> bool {
        self.ends_batch_at_once()
            || self.is_store_failure("maximum ")
            || self.is_store_failure("message too large")
    }

    /// As the answer to a batch's first message, is it given before there is a batch, so that
    /// nothing behind it is stored either (it begins with its first message or never)? Not so for a failure of the store (10077) and for a
    /// server's lack of resources (10023), which are looked at again when the message is stored.
    fn ends_batch_at_once(&self) -> bool {
        let codes = matches!(
            self.err_code,
            10002 // account limits
                | 10028 // memory of the account
                | 10047 // storage of the account
                | 10054 // size
                | 10060 // another stream was expected
                | 10097 // header size
                | 10109 // sealed
                | 10120 // no limits for this tier
                | 10205 // batches are off
                | 10206 // pattern of the reply subject
                | 10207 // batch id
                | 10211 // too many batches
        );
        codes || self.undelivered
    }

    fn is_store_failure(&self, words: &str) -> bool {
        self.err_code == ServerError::STORE_FAILED && self.description.starts_with(words)
    }
}

#[cfg(test)]
mod tests;
