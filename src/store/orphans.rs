//! Which messages of this relay are of events that this database does not know: one rule for Resume
//! and for `outboxd recover`. Reads only.
//!
//! A number alone proves little. It is given again after a restore, and after a crash the sequence
//! goes on up to 32 numbers further than it had come, so that a number may look given that was
//! given in a history that is lost. So a message is known by its row, or by a receipt, or not at
//! all; and what has neither is looked at again when everybody has ended who could be about to commit
//! its row.

use std::collections::HashSet;

use tokio_postgres::Client;

use super::Store;
use super::events::Holder;
use crate::error::Failure;
use crate::lsn::Lsn;
use crate::relay::outcome::Found;

/// Messages compared at once.
const AT_ONCE: usize = 10_000;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Whose ledger.
    pub destination: &'a str,
    /// What receipts say of higher numbers is about other events.
    pub known_to: i64,
    /// The messages' positions are those of this cluster: what is beyond the end of its WAL is of
    /// no transaction here.
    pub same_cluster: bool,
    /// What committed there or later the WAL will bring, if it is of this history: without a row
    /// it may be deleted, or wait for a standby.
    pub wal_from: Option<Lsn>,
}

/// What the messages are, each in the order in which they were given.
#[derive(Debug, Default)]
pub struct Sorted {
    /// Events of this database, as their rows say.
    pub ours: Vec<Found>,
    /// Events whose rows are gone, as a receipt says.
    pub recorded: Vec<Found>,
    /// A row has the number and the id, and nothing tells whether it is the same event.
    pub unclear: Vec<Found>,
    /// Left to the WAL.
    pub left: Vec<Found>,
    /// Of another history; true: its number belongs to another event now.
    pub orphans: Vec<(Found, bool)>,
}

impl Sorted {
    fn take(&mut self, other: Sorted) {
        self.ours.extend(other.ours);
        self.recorded.extend(other.recorded);
        self.unclear.extend(other.unclear);
        self.left.extend(other.left);
        self.orphans.extend(other.orphans);
    }
}

/// What the database could know of a message, and does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    /// The last number that the outbox has given.
    last_seq: i64,
    /// Where its WAL ends; `None` for positions of another cluster.
    wal_end: Option<Lsn>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Ours,
    Recorded,
    Unclear,
    Orphan {
        reused: bool,
    },
    /// No row and no receipt.
    Absent,
}

/// By the rows that have its number now, and by whether a receipt has it.
fn judge(message: &Found, holders: Option<&[Holder]>, recorded: bool, known: Known) -> Verdict {
    let beyond = known.wal_end.zip(message.commit_lsn).is_some_and(|(end, lsn)| lsn > end);
    match holders {
        Some(rows) if rows.iter().any(|row| row.is_of(message)) => Verdict::Ours,
        Some(rows) if rows.iter().all(|row| row.is_other(message)) => {
            Verdict::Orphan { reused: true }
        }
        Some(_) if beyond && !recorded => Verdict::Orphan { reused: true },
        Some(_) => Verdict::Unclear,
        None if recorded => Verdict::Recorded,
        None if beyond || message.seq > known.last_seq => Verdict::Orphan { reused: false },
        None => Verdict::Absent,
    }
}

impl Store {
    /// Sorts messages of this generation or an earlier one. Waits for open transactions when a
    /// message has neither row nor receipt and is not left to the WAL.
    pub async fn sort_messages(
        &self,
        client: &Client,
        question: Question<'_>,
        messages: &[Found],
    ) -> Result<Sorted, Failure> {
        let mut sorted = Sorted::default();
        let mut absent = Vec::new();
        for chunk in messages.chunks(AT_ONCE) {
            absent.extend(self.look_at(client, question, chunk, &mut sorted).await?);
        }
        let left = |one: &Found| {
            question.wal_from.zip(one.commit_lsn).is_some_and(|(from, lsn)| lsn >= from)
        };
        let (left, absent): (Vec<Found>, Vec<Found>) = absent.into_iter().partition(left);
        sorted.left.extend(left);
        if absent.is_empty() {
            return Ok(sorted);
        }
        let open = self.mark_frontier(client).await?.open;
        if !open.is_empty() {
            tracing::info!(
                destination = question.destination,
                messages = absent.len(),
                transactions = open.len(),
                "messages of this relay have no row here yet: waiting until the transactions have \
                 ended that write to the outbox now"
            );
        }
        self.all_ended(client, open).await?;
        let mut again = Sorted::default();
        for chunk in absent.chunks(AT_ONCE) {
            let absent = self.look_at(client, question, chunk, &mut again).await?;
            again.orphans.extend(absent.into_iter().map(|one| (one, false)));
        }
        sorted.take(again);
        Ok(sorted)
    }

    /// One look at some; those are left that have neither row nor receipt.
    async fn look_at(
        &self,
        client: &Client,
        question: Question<'_>,
        messages: &[Found],
        sorted: &mut Sorted,
    ) -> Result<Vec<Found>, Failure> {
        let seqs: Vec<i64> = messages.iter().map(|one| one.seq).collect();
        let holders = self.holders(client, &seqs).await?;
        let is_clear = |one: &&Found| {
            holders.get(&one.seq).is_some_and(|rows| rows.iter().any(|row| row.is_of(one)))
        };
        let doubtful: Vec<i64> =
            messages.iter().filter(|one| !is_clear(one)).map(|one| one.seq).collect();
        let mut recorded = HashSet::new();
        let mut known = Known { last_seq: i64::MAX, wal_end: None };
        if !doubtful.is_empty() {
            recorded = self.recorded(client, question.destination, &doubtful).await?;
            // After the messages were read: what they could be is in the table by now.
            known.last_seq = self.last_number(client).await?;
            if question.same_cluster {
                known.wal_end = Some(self.pulse(client).await?.wal_end);
            }
        }
        let mut absent = Vec::new();
        for one in messages {
            let rows = holders.get(&one.seq).map(Vec::as_slice);
            let is_recorded = one.seq <= question.known_to && recorded.contains(&one.seq);
            match judge(one, rows, is_recorded, known) {
                Verdict::Ours => sorted.ours.push(one.clone()),
                Verdict::Recorded => sorted.recorded.push(one.clone()),
                Verdict::Unclear => sorted.unclear.push(one.clone()),
                Verdict::Orphan { reused } => sorted.orphans.push((one.clone(), reused)),
                Verdict::Absent => absent.push(one.clone()),
            }
        }
        Ok(absent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{EventId, UnixMicros};

    const KNOWN: Known = Known { last_seq: 10, wal_end: Some(Lsn(100)) };

    fn messages(each: impl Fn(&Found, bool)) {
        let uuid = EventId::Uuid(uuid::Uuid::from_u128(7));
        for seq in [9, 10, 11] {
            for lsn in [None, Some(99), Some(100), Some(101)] {
                for id in [uuid.clone(), EventId::Int(7)] {
                    for created_at in [None, Some(UnixMicros(1)), Some(UnixMicros(2))] {
                        let message = Found {
                            seq,
                            id: id.clone(),
                            commit_lsn: lsn.map(Lsn),
                            generation: 1,
                            created_at,
                            stream_seq: 1,
                            letter: None,
                        };
                        each(&message, lsn == Some(101));
                    }
                }
            }
        }
    }

    #[test]
    fn without_a_row_only_a_receipt_speaks_for_a_message() {
        messages(|message, beyond| {
            assert_eq!(judge(message, None, true, KNOWN), Verdict::Recorded);
            let never = beyond || message.seq > 10;
            let expected = if never { Verdict::Orphan { reused: false } } else { Verdict::Absent };
            assert_eq!(judge(message, None, false, KNOWN), expected);
            // A position of another cluster says nothing.
            let other = Known { wal_end: None, ..KNOWN };
            let orphan = judge(message, None, false, other) == Verdict::Orphan { reused: false };
            assert_eq!(orphan, message.seq > 10);
        });
    }

    #[test]
    fn a_row_speaks_for_itself() {
        messages(|message, beyond| {
            for recorded in [false, true] {
                let another = Holder { id: "another".to_owned(), created_at: message.created_at };
                let verdict = judge(message, Some(&[another]), recorded, KNOWN);
                assert_eq!(verdict, Verdict::Orphan { reused: true });
                for row_at in [None, Some(UnixMicros(1)), Some(UnixMicros(2))] {
                    let row = Holder { id: message.id.to_string(), created_at: row_at };
                    let same_time = row_at.is_some() && row_at == message.created_at;
                    let known_times = row_at.is_some() && message.created_at.is_some();
                    let is_uuid = matches!(message.id, EventId::Uuid(_));
                    let expected = if is_uuid || same_time {
                        Verdict::Ours
                    } else if known_times || (beyond && !recorded) {
                        Verdict::Orphan { reused: true }
                    } else {
                        Verdict::Unclear
                    };
                    assert_eq!(judge(message, Some(&[row]), recorded, KNOWN), expected);
                }
            }
        });
    }
}
