//! Scenes of dead letters: runs that wait behind one, and letters that are sent again.

use std::time::Duration;

use super::*;
use crate::event::Reason;
use crate::lsn::Lsn;
use crate::relay::machine::tests::{FIRST, Scene, event, facts, floor, refused, spec};
use crate::relay::machine::{Action, Burial, Input, ReceiptDraft, WaitingPart};
use crate::relay::outcome::{Outcome, Pipeline};
use crate::relay::standing::Letters;
use crate::relay::waiting::Waiter;

const LETTER: i64 = 7;
const NOTHING: [i64; 0] = [];

/// A scene, and what it wanted beside sending.
struct Stage {
    scene: Scene,
    burials: Vec<Burial>,
    drafts: Vec<ReceiptDraft>,
    loads: usize,
    /// Receipts behind which the ledger is to be read.
    reads: Vec<i64>,
}

/// A destination whose policy is block-run, proven and flowing.
fn blocking(pipeline: Pipeline) -> Stage {
    with(pipeline, |letters| letters.blocks_runs = true)
}

fn with(pipeline: Pipeline, set: impl FnOnce(&mut Letters)) -> Stage {
    let mut spec = spec("a", Some(floor("s1", 10)));
    set(&mut spec.letters);
    let mut scene = Scene::new(vec![spec]);
    scene.feed(Input::Up(FIRST, facts("s1", 10, pipeline)));
    scene.resume("s1", 10);
    scene.commit(&[(1, "warm")]);
    let mut stage =
        Stage { scene, burials: Vec::new(), drafts: Vec::new(), loads: 0, reads: Vec::new() };
    stage.store_next(1);
    stage.sent();
    stage.scene.found("s1", 11, &[]);
    stage
}

impl Stage {
    /// Attempt and event of what is sent now.
    fn sent(&mut self) -> Vec<(u64, i64)> {
        let mut sent = Vec::new();
        for action in self.scene.poll() {
            match action {
                Action::Send { attempt, message, .. } => {
                    let seq = message.headers().get("Outbox-Seq").unwrap();
                    sent.push((attempt.0, seq.parse().unwrap()));
                }
                Action::Bury { burial, .. } => self.burials.push(burial),
                Action::Record(drafts) => self.drafts.extend(drafts),
                Action::Load { waiters, .. } => self.loads += waiters.len(),
                Action::ReadWaiting { after, .. } => self.reads.push(after),
                Action::Resume { .. } => {}
            }
        }
        sent
    }

    fn seqs(&mut self) -> Vec<i64> {
        self.sent().into_iter().map(|(_, seq)| seq).collect()
    }

    fn store(&mut self, attempt: u64) {
        let stream_seq = 10 + attempt;
        self.scene.answer(attempt, Outcome::Stored { stream_seq, duplicate: false });
    }

    fn store_next(&mut self, seq: i64) {
        let now = self.sent();
        assert_eq!(now.iter().map(|(_, seq)| *seq).collect::<Vec<_>>(), [seq]);
        self.store(now[0].0);
    }

    /// The event that is sent now is refused for good; its burial.
    fn refuse_next(&mut self, seq: i64) -> Burial {
        let now = self.sent();
        assert_eq!(now.iter().map(|(_, seq)| *seq).collect::<Vec<_>>(), [seq]);
        self.scene.answer(now[0].0, refused(Some(Reason::TooLarge)));
        self.sent();
        self.burials.pop().expect("a burial")
    }

    /// Lets the time for a Resume come; it finds nothing.
    fn read_back(&mut self) {
        self.scene.pass(Duration::from_secs(60));
        self.sent();
        self.scene.found("s1", 100, &[]);
    }

    /// Everything decided is recorded; the last receipt.
    fn recorded(&mut self) -> ReceiptDraft {
        let mut last = None;
        loop {
            self.scene.pass(Duration::from_secs(1));
            self.sent();
            let Some(draft) = self.drafts.pop() else { return last.expect("a receipt") };
            last = Some(draft);
            self.scene.feed(Input::Recorded { newest: 0 });
        }
    }

    fn question(&mut self) -> Question {
        self.scene.relay.ask_letters()
    }

    fn again(&mut self, seq: i64, run: &str) {
        let event = Event::clone(&event(seq, run));
        let again = vec![Redrive { destination: FIRST, letter: LETTER, event }];
        self.scene.feed(Input::Letters { again, released: Vec::new() });
    }

    fn release(&mut self, released: Vec<BlockedRun>) {
        self.scene.feed(Input::Letters { again: Vec::new(), released });
    }
}

/// The run `r` with 2 good, 3 buried, and 4 behind it; `other` with 5. A batch ends at 3.
fn poisoned(mut stage: Stage, pipeline: Pipeline) -> Stage {
    stage.scene.commit(&[(2, "r"), (3, "r"), (4, "r"), (5, "other")]);
    let mut over = false;
    while !over {
        let now = stage.sent();
        assert!(!now.is_empty(), "3 is not sent");
        for (attempt, seq) in now {
            match seq {
                3 => stage.scene.answer(attempt, refused(Some(Reason::TooLarge))),
                _ if over => stage.scene.answer(attempt, Outcome::NotSent),
                _ => stage.store(attempt),
            }
            over |= seq == 3;
        }
    }
    stage.sent();
    let burial = stage.burials.pop().expect("a burial");
    stage.scene.feed(Input::Buried(burial, true));
    if pipeline == Pipeline::Batch {
        stage.read_back();
        stage.store_next(5);
    }
    stage
}

#[test]
fn a_run_goes_on_behind_its_letter_unless_it_is_told_to_wait() {
    let mut stage = poisoned(with(Pipeline::PerRun, |_| {}), Pipeline::PerRun);
    assert_eq!(stage.seqs(), [4]);
    let mut stage = poisoned(blocking(Pipeline::PerRun), Pipeline::PerRun);
    assert_eq!(stage.seqs(), NOTHING);
    stage.scene.commit(&[(6, "r"), (7, "other")]);
    assert_eq!(stage.seqs(), [7], "another run waits");
    assert_eq!(stage.question().blocked.len(), 1);
    assert_eq!(stage.scene.relay.destinations()[0].lanes().blocked().len(), 1);
}

#[test]
fn a_discarded_letter_lets_its_run_go_on() {
    let mut stage = poisoned(blocking(Pipeline::PerRun), Pipeline::PerRun);
    let blocked = stage.question().blocked;
    stage.release(blocked.clone());
    // Blocked once more, behind another letter: the earlier answer says nothing about that.
    stage.scene.commit(&[(6, "r")]);
    let burial = stage.refuse_next(4);
    stage.scene.feed(Input::Buried(burial, true));
    stage.release(blocked);
    assert_eq!(stage.seqs(), NOTHING);
}

#[test]
fn a_letter_goes_ahead_of_what_waits_behind_it() {
    let mut stage = poisoned(blocking(Pipeline::Batch), Pipeline::Batch);
    stage.recorded();
    stage.scene.commit(&[(6, "r")]);
    stage.again(3, "r");
    stage.store_next(3);
    assert_eq!(stage.seqs(), NOTHING, "before the letter's state is durable");
    let draft = stage.recorded();
    assert_eq!(draft.decided.letters, [LETTER]);
    assert!(draft.decided.published.contains(3));
    assert!(stage.scene.relay.take_letters_changed());
    let blocked = stage.question().blocked;
    stage.release(blocked);
    assert_eq!(stage.seqs(), [4, 6]);
}

#[test]
fn what_committed_before_the_letter_still_goes_and_before_it() {
    let mut stage = blocking(Pipeline::Batch);
    // 3 is found unfit when its turn comes, with 2 in flight ahead of it.
    let event = |seq| Event::clone(&event(seq, "r"));
    let unfit = Event { kind: bytes::Bytes::new(), ..event(3) };
    stage.scene.commit_events(vec![event(2), unfit, event(4)]);
    let first = stage.sent();
    assert_eq!(first.len(), 1);
    let burial = stage.burials.pop().expect("3 is unfit");
    stage.scene.feed(Input::Buried(burial, true));
    stage.scene.answer(first[0].0, Outcome::NotSent);
    stage.read_back();
    stage.again(3, "r");
    assert_eq!(stage.seqs(), [2, 3]);
}

#[test]
fn a_run_is_blocked_after_a_restart_too_and_its_letter_is_not_judged_again() {
    let buried = event(3, "r");
    let mut stage = with(Pipeline::PerRun, |letters| {
        letters.blocked.push((buried.run_hash, 3, buried.position));
        letters.buried.insert(3, buried.id.to_string());
    });
    stage.recorded();
    stage.scene.commit(&[(3, "r"), (4, "other"), (5, "r")]);
    assert_eq!(stage.seqs(), [4]);
    assert!(stage.recorded().decided.dead.contains(3));
    assert_eq!(stage.question().blocked.len(), 1);
    // Another event of that number is another event.
    let mut stage = with(Pipeline::PerRun, |letters| {
        letters.buried.insert(3, "somebody else".to_owned());
    });
    stage.scene.commit(&[(3, "r")]);
    assert_eq!(stage.seqs(), [3]);
}

#[test]
fn a_letter_that_is_refused_again_is_buried_again_and_nothing_is_decided_twice() {
    let mut stage = poisoned(blocking(Pipeline::PerRun), Pipeline::PerRun);
    stage.recorded();
    stage.question();
    stage.again(3, "r");
    let burial = stage.refuse_next(3);
    assert_eq!(burial.letter, Some(LETTER));
    stage.scene.feed(Input::Buried(burial, true));
    // An answer that was under way meanwhile does not bring it back.
    stage.again(3, "r");
    stage.scene.pass(Duration::from_secs(1));
    assert_eq!(stage.seqs(), NOTHING);
    assert!(stage.drafts.is_empty(), "decided again: {:?}", stage.drafts);
    assert_eq!(stage.question().blocked.len(), 1, "the run still waits");
    // The next one does.
    stage.again(3, "r");
    assert_eq!(stage.seqs(), [3]);
    assert_eq!(stage.question().under_way, [LETTER]);
    stage.again(3, "r");
    assert_eq!(stage.question().under_way, [LETTER], "taken twice");
}

#[test]
fn resume_takes_a_letter_for_stored_only_when_it_saw_the_letter() {
    let mut stage = poisoned(with(Pipeline::PerRun, |_| {}), Pipeline::PerRun);
    stage.store_next(4);
    stage.recorded();
    stage.scene.feed(Input::Down(FIRST));
    stage.question();
    stage.again(3, "r");
    stage.scene.feed(Input::Up(FIRST, facts("s1", 10, Pipeline::PerRun)));
    // The ledger has number 3, as dead; that says nothing about the letter.
    stage.sent();
    stage.scene.found("s1", 30, &[3]);
    let first = stage.sent();
    assert_eq!(first.len(), 1);
    let silence = Outcome::Unknown(crate::relay::outcome::Doubt::Silence);
    stage.scene.answer(first[0].0, silence);
    stage.scene.pass(Duration::from_secs(60));
    stage.sent();
    let (created, letters) = ("s1".to_owned(), vec![LETTER]);
    let verified = Verified { created, last_seq: 31, letters, ..Verified::default() };
    stage.scene.feed(Input::Resumed(FIRST, verified));
    stage.scene.pass(Duration::from_secs(60));
    stage.again(3, "r");
    assert_eq!(stage.seqs(), NOTHING);
    assert_eq!(stage.scene.relay.destinations()[0].counts().redriven, 1);
    assert_eq!(stage.scene.relay.held_bytes(), 0);
}

#[test]
fn a_blocked_run_does_not_fill_the_memory() {
    let mut stage = poisoned(blocking(Pipeline::PerRun), Pipeline::PerRun);
    stage.recorded();
    let mut seq = 100;
    while stage.scene.relay.wants_wal() {
        seq += 1;
        stage.scene.commit(&[(seq, "r")]);
    }
    stage.again(3, "r");
    stage.scene.pass(Duration::from_secs(10));
    let draft = stage.recorded();
    let handed: Vec<i64> = draft.decided.handed.iter().map(|(seq, _)| *seq).collect();
    assert_eq!((handed.first(), handed.last()), (Some(&4), Some(&seq)), "and not the letter");
    assert!(stage.scene.relay.wants_wal());
    stage.scene.commit(&[(seq + 1, "other")]);
    assert_eq!(stage.seqs(), [seq + 1], "another run is held up");
    assert_eq!(stage.loads, 0, "a blocked run's events are read back");
    assert!(stage.question().under_way.is_empty());
    let blocked = stage.question().blocked;
    assert!(stage.scene.relay.destinations()[0].waiting().is_empty(), "numbers fill the memory");
    stage.release(blocked);
    stage.sent();
    assert_eq!((&stage.reads[..], stage.loads), (&[0][..], 0));
    let run = event(4, "r").run_hash;
    let waiter = |seq| Waiter { seq, run, until: Lsn(u64::MAX), old: false };
    let waiters = handed.into_iter().map(waiter).collect();
    let part = WaitingPart { waiters, upto: 1, complete: true };
    stage.scene.feed(Input::WaitingRead(FIRST, part));
    stage.sent();
    assert!(stage.loads > 0);
}
