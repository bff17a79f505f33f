//! Lanes against a model: per run a plain list.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::event::EventId;
use crate::lsn::Lsn;

const TABLE: Origin = Origin::Table { until: Lsn::ZERO, handed: false };

fn event(seq: i64, run: u64) -> Arc<Event> {
    Arc::new(Event {
        seq,
        position: None,
        id: EventId::Int(seq),
        run: None,
        run_hash: RunHash(run),
        kind: Bytes::from_static(b"k"),
        tenant: None,
        version: None,
        payload: None,
        headers: None,
        created_at: None,
        committed_at: None,
        fault: None,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stands {
    Waits,
    Flies(Slot),
    IsBuried(Slot),
}

#[derive(Debug, Default)]
struct Run {
    list: Vec<(i64, Stands)>,
    /// Something came back, and not everything that was in flight then is answered.
    rewinds: bool,
}

impl Run {
    fn flying(&self) -> usize {
        self.list.iter().filter(|(_, stands)| matches!(stands, Stands::Flies(_))).count()
    }

    fn is_burying(&self) -> bool {
        self.list.iter().any(|(_, stands)| matches!(stands, Stands::IsBuried(_)))
    }
}

#[derive(Debug, Clone)]
enum Op {
    Push(u64),
    Take,
    Settle(prop::sample::Index),
    GiveBack(prop::sample::Index, Option<u64>),
    Bury(prop::sample::Index),
    Buried(prop::sample::Index),
    Exhume(prop::sample::Index, u64),
    Found(prop::sample::Index),
    Pass(u64),
    Window(u32),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let index = any::<prop::sample::Index>;
    let op = prop_oneof![
        6 => (0u64..4).prop_map(Op::Push),
        8 => Just(Op::Take),
        4 => index().prop_map(Op::Settle),
        3 => (index(), prop::option::of(0u64..50)).prop_map(|(at, ms)| Op::GiveBack(at, ms)),
        1 => index().prop_map(Op::Bury),
        1 => index().prop_map(Op::Buried),
        1 => (index(), 0u64..50).prop_map(|(at, ms)| Op::Exhume(at, ms)),
        1 => index().prop_map(Op::Found),
        2 => (0u64..30).prop_map(Op::Pass),
        1 => prop_oneof![Just(1), Just(2), Just(u32::MAX)].prop_map(Op::Window),
    ];
    prop::collection::vec(op, 1..300)
}

struct Both {
    lanes: Lanes,
    runs: BTreeMap<u64, Run>,
    window: u32,
}

impl Both {
    fn all(&self, wanted: impl Fn(Stands) -> bool) -> Vec<(u64, usize)> {
        let each = self.runs.iter().flat_map(|(run, it)| (0..it.list.len()).map(|at| (*run, at)));
        each.filter(|(run, at)| wanted(self.runs[run].list[*at].1)).collect()
    }

    fn choose(
        &self,
        at: prop::sample::Index,
        wanted: impl Fn(Stands) -> bool,
    ) -> Option<(u64, usize)> {
        let all = self.all(wanted);
        (!all.is_empty()).then(|| all[at.index(all.len())])
    }

    fn slot(&self, (run, at): (u64, usize)) -> Slot {
        match self.runs[&run].list[at].1 {
            Stands::Flies(slot) | Stands::IsBuried(slot) => slot,
            Stands::Waits => panic!("waits"),
        }
    }

    fn landed(&mut self, (run, at): (u64, usize)) {
        let run = self.runs.get_mut(&run).unwrap();
        run.list[at].1 = Stands::Waits;
        run.rewinds = run.flying() > 0;
    }

    fn remove(&mut self, (run, at): (u64, usize)) -> i64 {
        let it = self.runs.get_mut(&run).unwrap();
        let (seq, _) = it.list.remove(at);
        it.rewinds &= it.flying() > 0;
        seq
    }

    fn take(&mut self) -> bool {
        let Some(slot) = self.lanes.take() else { return false };
        let taken = self.lanes.get(slot).unwrap();
        let (seq, run) = (taken.event.seq, taken.event.run_hash.0);
        let run = self.runs.get_mut(&run).unwrap();
        let at = run.list.iter().position(|(each, _)| *each == seq).unwrap();
        assert_eq!(run.list[at].1, Stands::Waits, "{seq} taken twice");
        for (before, stands) in &run.list[..at] {
            assert!(matches!(stands, Stands::Flies(_)), "{seq} taken before {before}");
        }
        assert!(!run.rewinds, "{seq} taken while the lane goes back");
        assert!(!run.is_burying(), "{seq} taken during a burial");
        run.list[at].1 = Stands::Flies(slot);
        assert!(run.flying() <= self.window as usize, "window");
        true
    }

    fn step(&mut self, op: Op, next: &mut i64, now: &mut Instant) {
        let flies = |stands| matches!(stands, Stands::Flies(_));
        let buried = |stands| matches!(stands, Stands::IsBuried(_));
        match op {
            Op::Push(run) => {
                *next += 1;
                self.lanes.push(event(*next, run), TABLE);
                self.runs.entry(run).or_default().list.push((*next, Stands::Waits));
            }
            Op::Take => {
                self.take();
            }
            Op::Settle(at) => {
                if let Some(at) = self.choose(at, flies) {
                    let entry = self.lanes.settle(self.slot(at)).unwrap();
                    assert_eq!(entry.event.seq, self.remove(at));
                }
            }
            Op::GiveBack(at, ms) => {
                if let Some(at) = self.choose(at, flies) {
                    let retry_at = ms.map(|ms| *now + Duration::from_millis(ms));
                    self.lanes.give_back(self.slot(at), retry_at);
                    self.landed(at);
                }
            }
            Op::Bury(at) => {
                if let Some(at) = self.choose(at, flies) {
                    let slot = self.slot(at);
                    let expected = !self.runs[&at.0].is_burying();
                    assert_eq!(self.lanes.bury(slot), expected);
                    self.landed(at);
                    if expected {
                        self.runs.get_mut(&at.0).unwrap().list[at.1].1 = Stands::IsBuried(slot);
                    }
                }
            }
            Op::Buried(at) => {
                if let Some(at) = self.choose(at, buried) {
                    let entry = self.lanes.settle(self.slot(at)).unwrap();
                    assert_eq!(entry.event.seq, self.remove(at));
                    let run = self.runs.get_mut(&at.0).unwrap();
                    run.rewinds = run.flying() > 0;
                }
            }
            Op::Exhume(at, ms) => {
                if let Some(at) = self.choose(at, buried) {
                    self.lanes.exhume(self.slot(at), *now + Duration::from_millis(ms));
                    self.landed(at);
                }
            }
            Op::Found(at) => {
                if let Some(at) = self.choose(at, |stands| !flies(stands)) {
                    let seq = self.runs[&at.0].list[at.1].0;
                    let slots = self.lanes.find_waiting(|event| event.seq == seq);
                    assert_eq!(slots.len(), 1);
                    self.lanes.settle(slots[0]).unwrap();
                    self.remove(at);
                }
            }
            Op::Pass(ms) => {
                *now += Duration::from_millis(ms);
                self.lanes.wake(*now);
                assert!(self.lanes.wake_at().is_none_or(|at| at > *now), "wakes in the past");
            }
            Op::Window(window) => {
                // What is in flight already may be more.
                if self.lanes.in_flight() == 0 {
                    self.window = window;
                    self.lanes.set_window(window);
                }
            }
        }
    }

    fn agree(&self) {
        let flying = self.all(|stands| matches!(stands, Stands::Flies(_))).len();
        assert_eq!(self.lanes.len(), self.runs.values().map(|run| run.list.len()).sum::<usize>());
        assert_eq!(self.lanes.in_flight(), flying);
        let live = self.runs.values().filter(|run| !run.list.is_empty()).count();
        assert_eq!(self.lanes.lane_count(), live);
        assert!(self.lanes.ready.len() <= 64 + 2 * live.max(1), "stale pairs pile up");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn a_lane_is_a_list(ops in ops()) {
        let mut now = Instant::now();
        let mut next = 0;
        let mut both =
            Both { lanes: Lanes::new(u32::MAX), runs: BTreeMap::new(), window: u32::MAX };
        for op in ops {
            both.step(op, &mut next, &mut now);
            both.agree();
        }
        // Whatever happened, everything can still be sent, each run in its order.
        for kind in [0, 1] {
            let stands = |each: Stands| match kind {
                0 => matches!(each, Stands::IsBuried(_)),
                _ => matches!(each, Stands::Flies(_)),
            };
            while let Some(at) = both.all(stands).pop() {
                both.lanes.settle(both.slot(at)).unwrap();
                both.remove(at);
            }
        }
        for run in both.runs.values_mut() {
            run.rewinds = false;
        }
        now += Duration::from_secs(3600);
        both.lanes.wake(now);
        while both.take() {
            while let Some(at) = both.all(|each| matches!(each, Stands::Flies(_))).pop() {
                both.lanes.settle(both.slot(at)).unwrap();
                both.remove(at);
            }
        }
        both.agree();
        prop_assert!(both.lanes.is_empty(), "something can't be sent any more");
        prop_assert_eq!(both.lanes.wake_at(), None);
        prop_assert!(both.lanes.slots.is_empty() && both.lanes.free.is_empty());
        prop_assert!(both.lanes.ready.is_empty() && both.lanes.timers.is_empty());
    }
}

#[test]
fn lanes_that_start_over_for_hours_leave_nothing_behind() {
    let mut lanes = Lanes::new(u32::MAX);
    for seq in 0..200 {
        lanes.push(event(seq, 7), TABLE);
    }
    for _ in 0..10_000 {
        let slot = lanes.take().unwrap();
        assert_eq!(lanes.get(slot).unwrap().event.seq, 0);
        lanes.give_back(slot, None);
        assert!(lanes.ready.len() <= 70);
    }
}
