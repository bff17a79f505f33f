//! A row of messages through its answers: what each one expects, and what becomes of them.

use super::*;
use crate::relay::outcome::Doubt;
use proptest::prelude::*;

const ACK_TIMEOUT: Duration = Duration::from_secs(5);

struct Bench {
    sequence: Sequence,
    now: Instant,
    next: u64,
}

impl Bench {
    /// The stream ends at 40.
    fn new(replicated: bool) -> Bench {
        let now = Instant::now();
        let mut sequence = Sequence::new("_INBOX.me".into(), replicated, 100, now);
        sequence.begin_behind(40);
        Bench { sequence, now, next: 1 }
    }

    /// Reply subject, and the header lines that were added.
    fn send(&mut self) -> (String, String) {
        let id = format!("id-{}", self.next);
        self.send_as(&id)
    }

    fn send_as(&mut self, id: &str) -> (String, String) {
        let message = Message::bare("events.a", id);
        let (mut reply, mut head) = (String::new(), String::new());
        self.sequence.stamp(Attempt(self.next), &message, self.now, &mut reply, &mut head);
        self.next += 1;
        let own = message.head().strip_suffix("\r\n").unwrap();
        let added = head.strip_prefix(own).unwrap().strip_suffix("\r\n\r\n").unwrap();
        assert!(head.len() - message.head().len() <= FENCE_BYTES);
        (reply, added.replace("\r\n", " | "))
    }

    fn send_many(&mut self, count: usize) -> Vec<String> {
        (0..count).map(|_| self.send().0).collect()
    }

    fn hear(&mut self, subject: &str, body: &str) -> Vec<Answer> {
        self.sequence.on_reply(subject, Reply::parse(body.as_bytes()), self.now)
    }

    fn ack(&mut self, subject: &str, seq: u64) -> Vec<Answer> {
        self.hear(subject, &format!(r#"{{"stream":"S","seq":{seq}}}"#))
    }

    fn wrong_last(&mut self, subject: &str, last: u64) -> Vec<Answer> {
        self.refuse(subject, 10071, &format!("wrong last sequence: {last}"))
    }

    fn refuse(&mut self, subject: &str, code: u64, words: &str) -> Vec<Answer> {
        let error = format!(r#"{{"code":400,"err_code":{code},"description":"{words}"}}"#);
        self.hear(subject, &format!(r#"{{"error":{error},"stream":"S","seq":0}}"#))
    }
}

fn rows(answers: &[Answer]) -> Vec<(u64, u64, &'static str)> {
    let word = |outcome: &Outcome| match outcome {
        Outcome::Stored { .. } => "stored",
        Outcome::Unknown(_) => "unknown",
        Outcome::Refused(_) => "refused",
        Outcome::NotSent => "not sent",
    };
    answers.iter().map(|a| (a.first.0, a.last.0, word(&a.outcome))).collect()
}

#[test]
fn each_message_expects_the_one_before_it() {
    let mut bench = Bench::new(false);
    let (first, added) = bench.send();
    assert_eq!(added, "Nats-Expected-Last-Sequence: 40");
    let second = "Nats-Expected-Last-Sequence: 41 | Nats-Expected-Last-Msg-Id: id-1";
    assert_eq!(bench.send().1, second);
    assert_eq!(rows(&bench.ack(&first, 41)), [(1, 1, "stored")]);
    assert!(bench.ack(&first, 41).is_empty(), "once");
    let third = "Nats-Expected-Last-Sequence: 42 | Nats-Expected-Last-Msg-Id: id-2";
    assert_eq!(bench.send().1, third);
    assert!(bench.sequence.takes_next() && !bench.sequence.is_idle());
    // Replicas would part over the ids.
    let mut bench = Bench::new(true);
    bench.send();
    assert_eq!(bench.send().1, "Nats-Expected-Last-Sequence: 41");
}

#[test]
fn what_is_known_to_be_stored_needs_no_name() {
    let mut bench = Bench::new(false);
    let first = bench.send().0;
    bench.ack(&first, 41);
    assert!(bench.sequence.is_idle());
    assert_eq!(bench.send().1, "Nats-Expected-Last-Sequence: 41");
    // One whose name is too long is waited for.
    let long = "x".repeat(ID_MAX + 1);
    let mut bench = Bench::new(false);
    let first = bench.send_as(&long).0;
    assert!(!bench.sequence.takes_next());
    bench.ack(&first, 41);
    assert!(bench.sequence.takes_next());
}

#[test]
fn the_window_counts_what_is_not_reported() {
    let mut bench = Bench::new(true);
    let replies = bench.send_many(100);
    assert!(!bench.sequence.takes_next());
    assert!(bench.ack(&replies[1], 42).is_empty(), "the first one is not answered");
    assert!(!bench.sequence.takes_next());
    assert_eq!(rows(&bench.ack(&replies[0], 41)), [(1, 2, "stored")]);
    assert!(bench.sequence.takes_next());
}

#[test]
fn behind_a_refusal_nothing_is_sent_and_nothing_blamed() {
    let mut bench = Bench::new(false);
    let replies = bench.send_many(4);
    bench.ack(&replies[0], 41);
    let refused = bench.refuse(&replies[1], 10054, "message size exceeds maximum allowed");
    assert_eq!(rows(&refused), [(2, 2, "refused")]);
    assert!(!bench.sequence.takes_next() && bench.sequence.is_broken());
    assert_eq!(rows(&bench.wrong_last(&replies[2], 41)), [(3, 3, "not sent")]);
    // It came to no stream, and would have found no place there.
    let last = bench.sequence.on_reply(&replies[3], Reply::NoResponders, bench.now);
    assert_eq!(rows(&last), [(4, 4, "not sent")]);
    assert_eq!(bench.sequence.take_breach(), None);
    bench.sequence.begin_behind(41);
    assert_eq!(bench.send().1, "Nats-Expected-Last-Sequence: 41");
}

#[test]
fn a_refusal_that_overtakes_waits_for_what_was_sent_before() {
    let mut bench = Bench::new(true);
    let replies = bench.send_many(3);
    let early = bench.refuse(&replies[1], 10054, "message size exceeds maximum allowed");
    assert!(early.is_empty() && !bench.sequence.takes_next());
    assert_eq!(bench.sequence.deadline(ACK_TIMEOUT), Some(bench.now + BROKEN_PATIENCE));
    assert_eq!(rows(&bench.ack(&replies[0], 41)), [(1, 1, "stored"), (2, 2, "refused")]);
    // Another server may have it, while leaders change.
    assert_eq!(rows(&bench.wrong_last(&replies[2], 41)), [(3, 3, "unknown")]);
    assert_eq!(bench.sequence.take_breach(), None);
}

#[test]
fn a_duplicate_is_stored_and_what_is_behind_it_is_not() {
    let mut bench = Bench::new(false);
    let replies = bench.send_many(2);
    let duplicate = bench.hear(&replies[0], r#"{"stream":"S","seq":12,"duplicate": true}"#);
    let outcome = Outcome::Stored { stream_seq: 12, duplicate: true };
    assert_eq!(duplicate, [Answer { first: Attempt(1), last: Attempt(1), outcome }]);
    assert!(bench.sequence.is_broken());
    assert_eq!(rows(&bench.wrong_last(&replies[1], 40)), [(2, 2, "not sent")]);
    assert_eq!(bench.sequence.take_breach(), None);
    // A duplicate of what was only proposed is none.
    let mut bench = Bench::new(true);
    let replies = bench.send_many(1);
    let duplicate = bench.hear(&replies[0], r#"{"stream":"S","seq":0,"duplicate": true}"#);
    assert_eq!(rows(&duplicate), [(1, 1, "unknown")]);
}

#[test]
fn a_message_of_others_is_noticed_by_the_first_that_it_stops() {
    for replicated in [false, true] {
        let mut bench = Bench::new(replicated);
        let replies = bench.send_many(3);
        bench.ack(&replies[0], 41);
        // Or it is our own, from a connection that was given up: only the stream can tell.
        assert_eq!(rows(&bench.wrong_last(&replies[1], 42)), [(2, 2, "unknown")]);
        let words = "wrong last sequence: 42".to_owned();
        assert_eq!(bench.sequence.take_breach(), Some(Breach::Intruded(words)));
        bench.wrong_last(&replies[2], 42);
        assert_eq!(bench.sequence.take_breach(), None, "once");
    }
    // In the place of a lost one of ours, by its id.
    let mut bench = Bench::new(false);
    let replies = bench.send_many(2);
    bench.ack(&replies[0], 41);
    let refused = bench.refuse(&replies[1], 10070, "wrong last msg ID: ");
    assert_eq!(rows(&refused), [(2, 2, "unknown")]);
    assert!(matches!(bench.sequence.take_breach(), Some(Breach::Intruded(_))));
    // A stream that ends before it should was not written by others.
    let mut bench = Bench::new(false);
    let replies = bench.send_many(1);
    bench.wrong_last(&replies[0], 12);
    assert_eq!(bench.sequence.take_breach(), None);
}

#[test]
fn one_stored_before_an_earlier_one_is_told() {
    let mut bench = Bench::new(true);
    let replies = bench.send_many(2);
    assert!(bench.ack(&replies[1], 42).is_empty());
    let answers = bench.refuse(&replies[0], 10054, "message size exceeds maximum allowed");
    assert_eq!(rows(&answers), [(1, 1, "refused"), (2, 2, "stored")]);
    assert_eq!(bench.sequence.take_breach(), Some(Breach::Overtaken(42)));
    // And one in another place ends the row.
    let mut bench = Bench::new(true);
    let replies = bench.send_many(1);
    assert_eq!(rows(&bench.ack(&replies[0], 43)), [(1, 1, "stored")]);
    assert!(bench.sequence.is_broken());
}

#[test]
fn silence_leaves_all_that_is_unanswered_unknown() {
    let mut bench = Bench::new(false);
    let replies = bench.send_many(3);
    let began = bench.now;
    assert_eq!(bench.sequence.deadline(ACK_TIMEOUT), Some(began + ACK_TIMEOUT));
    bench.now += Duration::from_secs(3);
    bench.ack(&replies[0], 41);
    assert_eq!(bench.sequence.deadline(ACK_TIMEOUT), Some(bench.now + ACK_TIMEOUT), "it moves");
    bench.ack(&replies[2], 43);
    assert_eq!(bench.sequence.deadline(ACK_TIMEOUT), Some(bench.now + ACK_TIMEOUT));
    let answers = bench.sequence.expire(bench.now + ACK_TIMEOUT);
    assert_eq!(rows(&answers), [(2, 2, "unknown"), (3, 3, "stored")]);
    assert_eq!(answers[0].outcome, Outcome::Unknown(Doubt::Silence));
    assert_eq!(bench.sequence.deadline(ACK_TIMEOUT), None);
    // Behind a failure that is known, less patience is due.
    let mut bench = Bench::new(true);
    let replies = bench.send_many(2);
    bench.wrong_last(&replies[1], 40);
    let answers = bench.sequence.expire(bench.now + BROKEN_PATIENCE);
    assert_eq!(rows(&answers), [(1, 1, "unknown"), (2, 2, "unknown")]);
    assert_eq!(answers[0].outcome, Outcome::Unknown(Doubt::Gap));
}

#[test]
fn what_a_subject_forbids_is_refused_and_ends_the_row() {
    let mut bench = Bench::new(false);
    let replies = bench.send_many(1);
    let message = Message::bare("events.secret", "s");
    let (mut reply, mut head) = (String::new(), String::new());
    bench.sequence.stamp(Attempt(2), &message, bench.now, &mut reply, &mut head);
    let words = ServerError::undelivered("not allowed".to_owned());
    assert!(bench.sequence.on_forbidden("events.secret", &words, bench.now).is_empty());
    assert_eq!(rows(&bench.ack(&replies[0], 41)), [(1, 1, "stored"), (2, 2, "refused")]);
    assert!(bench.sequence.is_broken());
}

#[test]
fn disconnection_answers_everything_once() {
    let mut bench = Bench::new(false);
    let replies = bench.send_many(3);
    bench.ack(&replies[1], 42);
    let answers = bench.sequence.give_up(&End::Disconnected, bench.now);
    assert_eq!(rows(&answers), [(1, 1, "unknown"), (2, 2, "stored"), (3, 3, "unknown")]);
    assert!(bench.sequence.give_up(&End::Disconnected, bench.now).is_empty());
}

/// A server with one replica, in small: sequence, id before, size; others write between.
struct Server {
    stored: Vec<Option<u64>>,
    dedupes_first: bool,
}

impl Server {
    fn take(
        &mut self,
        nth: u64,
        expected: u64,
        before: Option<u64>,
        fits: bool,
    ) -> Result<u64, (u64, String)> {
        let last = self.stored.len() as u64;
        let duplicate = self.stored.contains(&Some(nth));
        if duplicate && self.dedupes_first {
            return Err((0, String::new()));
        }
        if expected != last {
            return Err((10071, format!("wrong last sequence: {last}")));
        }
        if duplicate {
            return Err((0, String::new()));
        }
        if before.is_some() && self.stored.last() != Some(&before) {
            return Err((10070, "wrong last msg ID: x".to_owned()));
        }
        if !fits {
            return Err((10054, "message size exceeds maximum allowed".to_owned()));
        }
        self.stored.push(Some(nth));
        Ok(last + 1)
    }
}

proptest! {
    /// Whatever others write and the server refuses: ours are stored in order, none is taken for
    /// stored that is not, and with everything answered all go on and arrive.
    #[test]
    fn order_holds_whoever_else_writes(
        dice in prop::collection::vec(0u8..12, 20..200), dedupes_first: bool,
    ) {
        let mut server = Server { stored: vec![None; 40], dedupes_first };
        let mut bench = Bench::new(false);
        let mut dice = dice.into_iter();
        let (mut done, total, mut rounds) = (0u64, 30u64, 0);
        while done < total {
            rounds += 1;
            prop_assert!(rounds < 500);
            // A row of messages on their way, some of them lost; then the answers.
            let mut ways = Vec::new();
            for nth in done + 1..=total.min(done + 8) {
                if !bench.sequence.takes_next() {
                    break;
                }
                let (reply, added) = bench.send_as(&format!("n-{nth}"));
                let mut lines = added.split(" | ");
                let expected = lines.next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
                let before = lines.next().map(|line| line.rsplit("n-").next().unwrap().parse().unwrap());
                ways.push((nth, reply, expected, before));
            }
            prop_assert!(!ways.is_empty());
            let mut answers = Vec::new();
            for (nth, reply, expected, before) in &ways {
                let chance = dice.next().unwrap_or(11);
                if chance < 2 {
                    server.stored.push(None);
                }
                if chance == 3 {
                    continue;
                }
                let taken = server.take(*nth, *expected, *before, chance != 4);
                if chance == 5 {
                    continue;
                }
                answers.extend(match taken {
                    Ok(seq) => bench.ack(reply, seq),
                    Err((0, _)) => bench.hear(reply, r#"{"stream":"S","seq":1,"duplicate": true}"#),
                    Err((code, words)) => bench.refuse(reply, code, &words),
                });
            }
            answers.extend(bench.sequence.give_up(&End::Silence, bench.now));
            let stored = answers.iter().filter(|it| matches!(it.outcome, Outcome::Stored { .. }));
            let first = bench.next - ways.len() as u64;
            for attempt in stored.flat_map(|it| it.first.0..=it.last.0) {
                let nth = ways[usize::try_from(attempt - first).unwrap()].0;
                prop_assert!(server.stored.contains(&Some(nth)), "{} is not stored", nth);
            }
            let answered: u64 = answers.iter().map(|it| it.last.0 - it.first.0 + 1).sum();
            prop_assert_eq!(answered, ways.len() as u64);
            // The stream is read, and what it holds is done.
            let ours: Vec<u64> = server.stored.iter().flatten().copied().collect();
            prop_assert!(ours.iter().copied().eq(1..=ours.len() as u64), "{:?}", ours);
            done = ours.len() as u64;
            bench.sequence.begin_behind(server.stored.len() as u64);
        }
    }
}
