//! Plain publishes, each answered by itself. That is all of pipeline `per-run`, where order within a
//! run is the caller's: it ships the next event of a run when the one before is stored. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ack::{Reply, ServerError};
use super::outcome::{End, Said, judge};
use crate::message::push_decimal;
use crate::relay::outcome::{Answer, Attempt, Doubt, Outcome};

/// What was sent and not answered.
#[derive(Debug)]
pub(super) struct InFlight {
    inbox: String,
    replicated: bool,
    window: usize,
    /// Ascending by attempt, and so by time; answered ones in the middle are marked.
    sent: VecDeque<Sent>,
    unanswered: usize,
}

#[derive(Debug)]
struct Sent {
    attempt: Attempt,
    subject: String,
    at: Instant,
    answered: bool,
}

impl InFlight {
    pub(super) fn new(inbox: String, replicated: bool, window: usize) -> InFlight {
        InFlight { inbox, replicated, window, sent: VecDeque::new(), unanswered: 0 }
    }

    /// May the next message be sent now?
    pub(super) fn takes_next(&self) -> bool {
        self.unanswered < self.window
    }

    /// When silence makes the oldest one unknown.
    pub(super) fn deadline(&self, ack_timeout: Duration) -> Option<Instant> {
        self.sent.front().map(|sent| sent.at + ack_timeout)
    }

    /// Counts the message in and writes its reply subject.
    pub(super) fn stamp(
        &mut self,
        attempt: Attempt,
        subject: &str,
        now: Instant,
        reply: &mut String,
    ) {
        let subject = subject.to_owned();
        self.sent.push_back(Sent { attempt, subject, at: now, answered: false });
        self.unanswered += 1;
        reply.push_str(&self.inbox);
        reply.push_str(".one.");
        push_decimal(reply, attempt.0);
    }

    /// What an answer means. `subject` is the reply subject it came on.
    pub(super) fn on_reply(&mut self, subject: &str, reply: Reply) -> Option<Answer> {
        let rest = subject.strip_prefix(self.inbox.as_str())?.strip_prefix(".one.")?;
        let attempt = Attempt(rest.parse().ok()?);
        let index = self.sent.binary_search_by_key(&attempt, |sent| sent.attempt).ok()?;
        let sent = self.sent.get_mut(index).filter(|sent| !sent.answered)?;
        let end = match reply {
            Reply::PubAck { seq, duplicate, .. } => End::PubAck { seq, count: 1, duplicate },
            Reply::Refused(error) => End::FirstRefused(error),
            Reply::NoResponders => End::FirstRefused(ServerError::nobody_listens(&sent.subject)),
            Reply::Flow { .. } | Reply::Gap | Reply::Err { .. } | Reply::Unreadable => return None,
        };
        sent.answered = true;
        self.unanswered -= 1;
        self.trim();
        Some(self.answer(attempt, &end))
    }

    /// The server let a message of this subject not through. When only one of them is unanswered
    /// it is that one. With several, permissions may have changed between them, and some of them
    /// may be stored.
    pub(super) fn on_forbidden(&mut self, subject: &str, error: &ServerError) -> Vec<Answer> {
        let those = self.sent.iter_mut().filter(|sent| !sent.answered && sent.subject == subject);
        let mut attempts = Vec::new();
        for sent in those {
            sent.answered = true;
            attempts.push(sent.attempt);
        }
        self.unanswered -= attempts.len();
        self.trim();
        if let [attempt] = attempts[..] {
            return vec![self.answer(attempt, &End::FirstRefused(error.clone()))];
        }
        let unknown = |attempt| Answer {
            first: attempt,
            last: attempt,
            outcome: Outcome::Unknown(Doubt::ServerError),
        };
        attempts.into_iter().map(unknown).collect()
    }

    /// Those whose time is over.
    pub(super) fn expire(&mut self, now: Instant, ack_timeout: Duration) -> Vec<Answer> {
        let mut answers = Vec::new();
        while let Some(sent) = self.sent.front()
            && now.duration_since(sent.at) >= ack_timeout
        {
            answers.push(self.answer(sent.attempt, &End::Silence));
            self.sent.pop_front();
            self.unanswered -= 1;
            self.trim();
        }
        answers
    }

    /// None of the unanswered is waited for any more.
    pub(super) fn give_up(&mut self, end: &End) -> Vec<Answer> {
        let sent = std::mem::take(&mut self.sent);
        self.unanswered = 0;
        let open = sent.into_iter().filter(|sent| !sent.answered);
        open.map(|sent| self.answer(sent.attempt, end)).collect()
    }

    fn trim(&mut self) {
        while self.sent.front().is_some_and(|sent| sent.answered) {
            self.sent.pop_front();
        }
    }

    fn answer(&self, attempt: Attempt, end: &End) -> Answer {
        let verdict = judge(1, self.replicated, &Said::default(), end);
        let outcome = verdict.rows.into_iter().next().map_or(Outcome::NotSent, |(_, row)| row);
        Answer { first: attempt, last: attempt, outcome }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::outcome::Doubt;

    fn reply(body: &str) -> Reply {
        Reply::parse(body.as_bytes())
    }

    fn stamp(flight: &mut InFlight, attempt: u64, subject: &str, now: Instant) -> String {
        let mut reply = String::new();
        flight.stamp(Attempt(attempt), subject, now, &mut reply);
        reply
    }

    #[test]
    fn answers_come_in_any_order_and_count_once() {
        let now = Instant::now();
        let mut flight = InFlight::new("_INBOX.me".into(), false, 2);
        let first = stamp(&mut flight, 5, "events.a", now);
        let second = stamp(&mut flight, 9, "events.a", now);
        assert!(!flight.takes_next());
        let answer = flight.on_reply(&second, reply(r#"{"stream":"S","seq":4}"#)).unwrap();
        let stored = Outcome::Stored { stream_seq: 4, duplicate: false };
        assert_eq!(answer, Answer { first: Attempt(9), last: Attempt(9), outcome: stored });
        assert!(flight.takes_next());
        assert_eq!(flight.on_reply(&second, reply(r#"{"stream":"S","seq":4}"#)), None);
        assert_eq!(flight.on_reply(&first, reply("nonsense")), None);
        let late = now + Duration::from_secs(5);
        let silent = Outcome::Unknown(Doubt::Silence);
        let answers = flight.expire(late, Duration::from_secs(5));
        assert_eq!(answers, [Answer { first: Attempt(5), last: Attempt(5), outcome: silent }]);
        assert_eq!(flight.on_reply(&first, reply(r#"{"stream":"S","seq":5}"#)), None);
        assert_eq!(flight.deadline(Duration::ZERO), None);
    }

    #[test]
    fn disconnection_leaves_the_unanswered_unknown() {
        let now = Instant::now();
        let mut flight = InFlight::new("_INBOX.me".into(), true, 10);
        let subjects: Vec<_> = (1..4).map(|n| stamp(&mut flight, n, "events.a", now)).collect();
        let answer = flight.on_reply(&subjects[1], Reply::NoResponders).unwrap();
        let Outcome::Refused(refusal) = answer.outcome else { panic!("{answer:?}") };
        assert!(refusal.permanent.is_none() && refusal.detail.contains("`events.a`"));
        let left: Vec<_> =
            flight.give_up(&End::Disconnected).iter().map(|answer| answer.first.0).collect();
        assert_eq!(left, [1, 3]);
        assert!(flight.give_up(&End::Disconnected).is_empty());
    }

    #[test]
    fn a_forbidden_subject_refuses_its_only_message_and_leaves_several_unknown() {
        let now = Instant::now();
        let mut flight = InFlight::new("_INBOX.me".into(), true, 10);
        for (n, subject) in [(1, "events.a"), (2, "events.b"), (3, "events.a")] {
            stamp(&mut flight, n, subject, now);
        }
        let words = ServerError::undelivered("not allowed".to_owned());
        let answers = flight.on_forbidden("events.b", &words);
        assert!(matches!(
            answers[..],
            [Answer { first: Attempt(2), outcome: Outcome::Refused(_), .. }]
        ));
        let outcomes = flight.on_forbidden("events.a", &words).into_iter().map(|it| it.outcome);
        let unknown = Outcome::Unknown(Doubt::ServerError);
        assert_eq!(outcomes.collect::<Vec<_>>(), [unknown.clone(), unknown]);
        assert!(flight.on_forbidden("events.a", &words).is_empty());
        assert_eq!(flight.deadline(Duration::ZERO), None);
    }
}
