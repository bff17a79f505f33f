//! Compares what the table holds with what the stream holds. Pure; trusts nothing that the relay
//! says of itself.
//!
//! Each event carries its id, its run and its number in the run's commit order in its body (see
//! `workload`), so the order in the stream can be judged without knowing how it came about.

use std::collections::{HashMap, HashSet};
use std::fmt;

use uuid::Uuid;

use crate::lsn::Lsn;

/// An event as its writer numbered it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Event {
    /// Identity.
    pub id: Uuid,
    /// Ordering key.
    pub run: String,
    /// Place in the run's commit order, from 1.
    pub n: i64,
}

/// A message as a plain consumer reads it.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Place in the stream.
    pub stream_seq: u64,
    /// When JetStream stored it, nanoseconds since 1970.
    pub stored_at: i128,
    /// `Nats-Msg-Id`.
    pub msg_id: String,
    /// `Outbox-Lsn`.
    pub commit_lsn: Option<Lsn>,
    /// The body, when it is one of ours.
    pub event: Option<Event>,
}

/// The slot's confirmed position, and how far the stream was just after.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// `confirmed_flush_lsn`, read first.
    pub confirmed: Lsn,
    /// The stream's last sequence, read second.
    pub stream_last: u64,
}

/// What was found; the lists hold words for a person, a few per kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Events that committed.
    pub events: usize,
    /// Committed, and neither in the stream nor in the dead letters.
    pub missing: Findings,
    /// Messages of events that did not commit, or that are not what was committed.
    pub phantoms: Findings,
    /// Messages beyond the first of an event.
    pub copies: Findings,
    /// First messages of events that came after a later event of their run.
    pub order_violations: Findings,
    /// Samples at which the slot's position was past an event that was not in the stream.
    pub unsafe_positions: Findings,
}

/// How many, and the first of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// All of them.
    pub count: usize,
    /// The first in words.
    pub first: Vec<String>,
}

impl Findings {
    const SHOWN: usize = 5;

    fn add(&mut self, words: impl FnOnce() -> String) {
        self.count += 1;
        if self.first.len() < Findings::SHOWN {
            self.first.push(words());
        }
    }
}

impl Verdict {
    /// Judges a stream against the table. `buried` are the ids in the dead letters.
    #[must_use]
    pub fn of(
        committed: &[Event],
        buried: &HashSet<Uuid>,
        stream: &[Seen],
        samples: &[Sample],
    ) -> Verdict {
        let mut verdict = Verdict { events: committed.len(), ..Verdict::default() };
        let known: HashMap<Uuid, &Event> =
            committed.iter().map(|event| (event.id, event)).collect();
        let mut first: HashMap<Uuid, u64> = HashMap::new();
        let mut newest: HashMap<&str, i64> = HashMap::new();
        for seen in stream {
            let Some(event) = genuine(seen, &known) else {
                verdict.phantoms.add(|| format!("message {} ({})", seen.stream_seq, seen.msg_id));
                continue;
            };
            if let Some(earlier) = first.get(&event.id) {
                verdict.copies.add(|| {
                    format!("{event} is message {earlier} and message {}", seen.stream_seq)
                });
                continue;
            }
            first.insert(event.id, seen.stream_seq);
            let newest = newest.entry(&event.run).or_insert(0);
            if event.n < *newest {
                verdict.order_violations.add(|| {
                    format!("{event}, message {}, came after number {newest}", seen.stream_seq)
                });
            }
            *newest = event.n.max(*newest);
        }
        for event in committed {
            if !first.contains_key(&event.id) && !buried.contains(&event.id) {
                verdict.missing.add(|| event.to_string());
            }
        }
        verdict.judge_positions(stream, &first, samples);
        verdict
    }

    /// Whatever committed below a confirmed position will never be sent by the server again, so it
    /// must have been stored before.
    fn judge_positions(&mut self, stream: &[Seen], first: &HashMap<Uuid, u64>, samples: &[Sample]) {
        let mut stored: Vec<(Lsn, u64)> = stream
            .iter()
            .filter_map(|seen| {
                let lsn = seen.commit_lsn?;
                Some((lsn, *first.get(&seen.event.as_ref()?.id)?))
            })
            .collect();
        stored.sort_unstable();
        let mut samples = samples.to_vec();
        samples.sort_unstable_by_key(|sample| sample.confirmed);
        let mut stored = stored.into_iter().peekable();
        let mut needed = 0;
        for sample in samples {
            while let Some((_, seq)) = stored.next_if(|(lsn, _)| *lsn < sample.confirmed) {
                needed = needed.max(seq);
            }
            if needed > sample.stream_last {
                self.unsafe_positions.add(|| {
                    format!(
                        "confirmed {} when the stream ended at {}, and message {needed} committed \
                         before",
                        sample.confirmed, sample.stream_last
                    )
                });
            }
        }
    }

    /// Nothing missing, no phantom, order kept, position safe, no copies.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.copies.count == 0 && self.is_ok_with_copies()
    }

    /// The same where copies are allowed: the stream lost its memory of ids, say.
    #[must_use]
    pub fn is_ok_with_copies(&self) -> bool {
        [&self.missing, &self.phantoms, &self.order_violations, &self.unsafe_positions]
            .iter()
            .all(|findings| findings.count == 0)
    }
}

/// The committed event that a message is, if message id and body say the same.
fn genuine<'a>(seen: &Seen, known: &HashMap<Uuid, &'a Event>) -> Option<&'a Event> {
    let event = seen.event.as_ref()?;
    let row = *known.get(&event.id)?;
    // Destinations that share a stream have `<id>:<destination>`.
    let id = seen.msg_id.split(':').next()?;
    (row == event && id == event.id.to_string()).then_some(row)
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "number {} of {} ({})", self.n, self.run, self.id)
    }
}

impl fmt::Display for Verdict {
    /// `events=… missing=…`, then a line for each finding.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [
            ("missing", &self.missing),
            ("phantoms", &self.phantoms),
            ("copies", &self.copies),
            ("order_violations", &self.order_violations),
            ("unsafe_positions", &self.unsafe_positions),
        ];
        write!(f, "events={}", self.events)?;
        for (name, findings) in all {
            write!(f, " {name}={}", findings.count)?;
        }
        for (name, findings) in all {
            for words in &findings.first {
                write!(f, "\n  {name}: {words}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: u128, n: i64) -> Event {
        Event { id: Uuid::from_u128(id), run: "r".to_owned(), n }
    }

    fn seen(stream_seq: u64, lsn: u64, event: &Event) -> Seen {
        Seen {
            stream_seq,
            stored_at: 0,
            msg_id: event.id.to_string(),
            commit_lsn: Some(Lsn(lsn)),
            event: Some(event.clone()),
        }
    }

    fn counts(verdict: &Verdict) -> [usize; 5] {
        [
            verdict.missing.count,
            verdict.phantoms.count,
            verdict.copies.count,
            verdict.order_violations.count,
            verdict.unsafe_positions.count,
        ]
    }

    #[test]
    fn each_kind_of_fault_is_found_and_nothing_else() {
        let (a, b, c) = (event(1, 1), event(2, 2), event(3, 3));
        let all = [a.clone(), b.clone(), c.clone()];
        let none = HashSet::new();
        let judge = |stream: &[Seen], samples: &[Sample]| {
            counts(&Verdict::of(&all, &none, stream, samples))
        };
        let good = [seen(1, 10, &a), seen(2, 20, &b), seen(3, 30, &c)];
        let sample = |confirmed, stream_last| Sample { confirmed: Lsn(confirmed), stream_last };
        assert_eq!(judge(&good, &[sample(5, 0), sample(20, 1), sample(99, 3)]), [0; 5]);
        assert_eq!(judge(&good, &[sample(21, 1)]), [0, 0, 0, 0, 1]);
        assert_eq!(judge(&good[..2], &[]), [1, 0, 0, 0, 0]);
        let copied = [good.to_vec(), vec![seen(4, 10, &a)]].concat();
        assert_eq!(judge(&copied, &[sample(99, 3)]), [0, 0, 1, 0, 0]);
        let swapped = [seen(1, 10, &a), seen(2, 30, &c), seen(3, 20, &b)];
        assert_eq!(judge(&swapped, &[]), [0, 0, 0, 1, 0]);
        let phantom = [good.to_vec(), vec![seen(4, 40, &event(9, 4))]].concat();
        assert_eq!(judge(&phantom, &[]), [0, 1, 0, 0, 0]);
        let mut forged = good.to_vec();
        forged[1].msg_id = c.id.to_string();
        assert_eq!(judge(&forged, &[]), [1, 1, 0, 0, 0]);
        let buried = HashSet::from([c.id]);
        assert_eq!(counts(&Verdict::of(&all, &buried, &good[..2], &[])), [0; 5]);
    }
}
