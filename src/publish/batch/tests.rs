//! One batch through its answers: what each reply subject says, and what each answer settles.

use super::*;
use crate::relay::outcome::Outcome;

struct Bench {
    batches: Batches,
    now: Instant,
    next: u64,
}

impl Bench {
    fn new(replicated: bool) -> Bench {
        let batches = Batches::new("_INBOX.me".into(), "b".into(), replicated);
        Bench { batches, now: Instant::now(), next: 1 }
    }

    fn send(&mut self, last: bool) -> String {
        let attempt = Attempt(self.next);
        let id = format!("id-{}", self.next);
        self.next += 1;
        let (message, mut reply) = (Message::bare("events.a", &id), String::new());
        self.batches.stamp(attempt, &message, last, self.now, &mut reply);
        reply
    }

    fn hear(&mut self, subject: &str, body: &str) -> Step {
        self.batches.on_reply(subject, Reply::parse(body.as_bytes()), self.now)
    }
}

fn settled(step: Step) -> Settled {
    let Step::Settled(settled) = step else { panic!("{step:?}") };
    settled
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
fn one_message_commits_itself() {
    let mut bench = Bench::new(false);
    assert!(bench.batches.is_idle() && bench.batches.takes_next());
    let subject = bench.send(true);
    assert_eq!(subject, "_INBOX.me.b-1.500.fail.1.2.$FI");
    assert!(!bench.batches.takes_next());
    let step = bench.hear(&subject, r#"{"stream":"S","seq":4,"batch":"b-1","count":1}"#);
    assert_eq!(rows(&settled(step).answers()), [(1, 1, "stored")]);
    assert!(bench.batches.is_idle());
    assert_eq!(bench.send(true), "_INBOX.me.b-2.500.fail.1.2.$FI");
}

#[test]
fn a_batch_starts_appends_and_commits() {
    let mut bench = Bench::new(false);
    let first = bench.send(false);
    assert!(first.ends_with(".1.0.$FI"));
    assert!(bench.send(false).ends_with(".2.1.$FI"));
    let last = bench.send(true);
    assert!(last.ends_with(".3.2.$FI"));
    assert!(matches!(bench.hear(&first, r#"{"type":"ack","seq":0,"msgs":500}"#), Step::Nothing));
    let step = bench.hear(&last, r#"{"stream":"S","seq":9,"batch":"b-1","count":3}"#);
    assert_eq!(rows(&settled(step).answers()), [(1, 3, "stored")]);
}

#[test]
fn size_and_age_commit_a_batch() {
    let mut bench = Bench::new(false);
    for nth in 1..=MESSAGES_MAX {
        let subject = bench.send(false);
        let commits = subject.ends_with(&format!(".{COMMIT}.$FI"));
        assert_eq!(commits, nth == MESSAGES_MAX);
        bench.hear(&subject, &format!(r#"{{"type":"ack","seq":{nth},"msgs":500}}"#));
    }
    let mut bench = Bench::new(false);
    bench.send(false);
    bench.now += AGE_MAX;
    assert!(bench.send(false).ends_with(".2.2.$FI"));
}

#[test]
fn flow_answers_open_the_window_and_settle_nothing() {
    let mut bench = Bench::new(false);
    let first = bench.send(false);
    bench.hear(&first, r#"{"type":"ack","seq":0,"msgs":2}"#);
    for _ in 0..3 {
        assert!(bench.batches.takes_next());
        bench.send(false);
    }
    assert!(!bench.batches.takes_next(), "four unanswered of two times two");
    bench.hear(&first, r#"{"type":"ack","seq":2,"msgs":2}"#);
    assert!(bench.batches.takes_next() && !bench.batches.is_idle());
}

#[test]
fn a_refusal_in_the_middle_waits_for_the_batch_to_end() {
    let mut bench = Bench::new(false);
    let subjects: Vec<_> = (0..5).map(|_| bench.send(false)).collect();
    let err = r#"{"type":"err","seq":3,"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}"#;
    assert!(matches!(bench.hear(&subjects[2], err), Step::Nothing));
    assert!(!bench.batches.takes_next());
    let step = bench.hear(&subjects[2], r#"{"stream":"S","seq":9,"batch":"b-1","count":2}"#);
    let answers = settled(step).answers();
    assert_eq!(rows(&answers), [(1, 2, "stored"), (3, 3, "refused"), (4, 5, "not sent")]);
    let late = r#"{"error":{"code":400,"err_code":10208,"description":"batch publish ID unknown"},"stream":"S","seq":0}"#;
    bench.send(false);
    assert!(matches!(bench.hear(&subjects[3], late), Step::Nothing), "it is of an earlier batch");
    assert!(bench.batches.takes_next());
}

const TOO_LARGE: &str = r#"{"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"},"stream":"S","seq":0}"#;

#[test]
fn a_batch_that_the_server_left_open_is_ended() {
    for commits in [false, true] {
        let mut bench = Bench::new(false);
        bench.send(false);
        let last = bench.send(commits);
        let Step::End { subject, reply } = bench.hear(&last, TOO_LARGE) else { panic!() };
        assert_eq!(
            (subject.as_str(), reply.as_str()),
            ("events.a", "_INBOX.me.b-1.500.fail.2.3.$FI")
        );
        let step = bench.hear(&reply, r#"{"stream":"S","seq":9,"batch":"b-1","count":1}"#);
        assert_eq!(rows(&settled(step).answers()), [(1, 1, "stored"), (2, 2, "refused")]);
    }
}

#[test]
fn a_gap_ends_the_batch_without_our_help() {
    let mut bench = Bench::new(false);
    let subjects: Vec<_> = (0..3).map(|_| bench.send(false)).collect();
    assert!(matches!(bench.hear(&subjects[1], TOO_LARGE), Step::Nothing));
    assert!(matches!(
        bench.hear(&subjects[2], r#"{"type":"gap","last_seq":2,"seq":3}"#),
        Step::Nothing
    ));
    let step = bench.hear(&subjects[2], r#"{"stream":"S","seq":9,"batch":"b-1","count":1}"#);
    let answers = settled(step).answers();
    assert_eq!(rows(&answers), [(1, 1, "stored"), (2, 2, "refused"), (3, 3, "not sent")]);
}

#[test]
fn a_refused_first_message_settles_all_at_once() {
    let mut bench = Bench::new(false);
    let first = bench.send(false);
    bench.send(false);
    let step = bench.hear(&first, TOO_LARGE);
    assert_eq!(rows(&settled(step).answers()), [(1, 1, "refused"), (2, 2, "not sent")]);
}

#[test]
fn a_stream_that_takes_no_batches_is_told_apart() {
    let mut bench = Bench::new(false);
    let first = bench.send(true);
    let body = r#"{"error":{"code":400,"err_code":10205,"description":"batch publish is disabled"},"stream":"S","seq":0}"#;
    let settled = settled(bench.hear(&first, body));
    assert!(settled.disabled);
    assert_eq!(rows(&settled.answers()), [(1, 1, "refused")]);
}

#[test]
fn replicas_must_show_the_last_message() {
    let mut bench = Bench::new(true);
    bench.send(false);
    let last = bench.send(true);
    let mut settled =
        settled(bench.hear(&last, r#"{"stream":"S","seq":9,"batch":"b-1","count":2}"#));
    assert_eq!(settled.proof, Some((9, "id-2".to_owned())));
    assert_eq!(rows(&settled.answers()), [(1, 2, "stored")]);
    settled.disprove();
    assert_eq!(rows(&settled.answers()), [(1, 2, "unknown")]);
}

#[test]
fn silence_and_disconnection_leave_everything_unknown() {
    let mut bench = Bench::new(false);
    bench.send(false);
    bench.now += Duration::from_millis(5);
    bench.send(true);
    let timeout = Duration::from_secs(5);
    assert_eq!(bench.batches.deadline(timeout), Some(bench.now + timeout));
    let settled = bench.batches.settle(&End::Silence).unwrap();
    assert_eq!(rows(&settled.answers()), [(1, 2, "unknown")]);
    assert!(bench.batches.settle(&End::Disconnected).is_none());
}

/// Batches of these subjects; the last message of none commits.
fn of(subjects: &[&str]) -> (Bench, Vec<String>) {
    let mut bench = Bench::new(false);
    let mut replies = Vec::new();
    for (subject, nth) in subjects.iter().zip(1..) {
        let (message, mut reply) = (Message::bare(subject, "x"), String::new());
        bench.batches.stamp(Attempt(nth), &message, false, bench.now, &mut reply);
        replies.push(reply);
    }
    (bench, replies)
}

fn forbid(bench: &mut Bench, subject: &str) -> Step {
    bench.batches.on_forbidden(subject, ServerError::undelivered("not allowed".to_owned()))
}

#[test]
fn a_message_that_nobody_stores_is_refused_by_itself() {
    let (mut bench, replies) = of(&["a", "b", "a"]);
    assert!(matches!(
        bench.batches.on_reply(&replies[1], Reply::NoResponders, bench.now),
        Step::Nothing
    ));
    let step = bench.hear(&replies[2], r#"{"stream":"S","seq":9,"batch":"b-1","count":1}"#);
    let answers = settled(step).answers();
    assert_eq!(rows(&answers), [(1, 1, "stored"), (2, 2, "refused"), (3, 3, "not sent")]);

    let (mut bench, replies) = of(&["b", "a"]);
    let answers =
        settled(bench.batches.on_reply(&replies[0], Reply::NoResponders, bench.now)).answers();
    assert_eq!(rows(&answers), [(1, 1, "refused"), (2, 2, "not sent")]);
    let Outcome::Refused(refusal) = &answers[0].outcome else { panic!() };
    assert!(refusal.permanent.is_none() && refusal.detail.contains("`b`"), "{refusal:?}");
}

#[test]
fn a_forbidden_message_splits_its_batch() {
    let (mut bench, _) = of(&["a", "b", "a"]);
    assert!(matches!(forbid(&mut bench, "c"), Step::Nothing));
    assert!(bench.batches.takes_next());
    assert!(matches!(forbid(&mut bench, "b"), Step::Nothing), "the third shows the gap");
    assert!(!bench.batches.takes_next());
    let (mut bench, replies) = of(&["a", "b", "a"]);
    assert!(bench.batches.misses_one(&replies[2], &Reply::Gap));
    assert!(!bench.batches.misses_one("_INBOX.me.b-0.500.fail.3.1.$FI", &Reply::Gap));
    assert!(!bench.batches.misses_one(&replies[2], &Reply::NoResponders));
    forbid(&mut bench, "b");
    assert!(!bench.batches.misses_one(&replies[2], &Reply::Gap), "it is known");
    // At the end, nothing does.
    let (mut bench, _) = of(&["a", "b", "b"]);
    let Step::End { subject, reply } = forbid(&mut bench, "b") else { panic!() };
    assert_eq!((subject.as_str(), reply.as_str()), ("a", "_INBOX.me.b-1.500.fail.2.3.$FI"));
    assert!(matches!(forbid(&mut bench, "b"), Step::Nothing), "once");
    let step = bench.hear(&reply, r#"{"stream":"S","seq":9,"batch":"b-1","count":1}"#);
    let answers = settled(step).answers();
    assert_eq!(rows(&answers), [(1, 1, "stored"), (2, 2, "refused"), (3, 3, "not sent")]);
    // At the beginning there is no batch; with several nobody knows which was meant.
    let (mut bench, _) = of(&["b", "a"]);
    let answers = settled(forbid(&mut bench, "b")).answers();
    assert_eq!(rows(&answers), [(1, 1, "refused"), (2, 2, "not sent")]);
    let (mut bench, _) = of(&["b", "a", "b"]);
    assert_eq!(rows(&settled(forbid(&mut bench, "b")).answers()), [(1, 3, "unknown")]);
}
