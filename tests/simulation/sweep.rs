//! Looks through the table for rows that the WAL did not bring, and gaps: the same duties as the
//! real sweeper, without I/O.

use outboxd::event::RunHash;
use outboxd::relay::Input;
use outboxd::relay::outcome::DestinationId;
use outboxd::relay::ranges::RangeSet;

use crate::control::Job;
use crate::ledger::Gap;
use crate::world::{Happening, MS, World};

use outboxd::lsn::Lsn;

/// One look, for all destinations.
#[derive(Debug)]
pub struct Sweep {
    generation: u64,
    /// Visible rows without a receipt.
    candidates: Vec<Vec<i64>>,
    /// There were no more than these.
    complete: Vec<bool>,
    /// Everybody had ended before the look who could still commit below the slot's start.
    settled: Vec<bool>,
    /// What was found committed below.
    until: Lsn,
}

impl World {
    pub fn sweep(&mut self) {
        let wait = self.dice.between(100 * MS, self.sweeps_every);
        self.after(wait, Happening::Sweep(self.epoch));
        self.begin_sweep();
    }

    pub fn begin_sweep(&mut self) {
        let count = self.sites.len();
        self.generation += 1;
        let Some(session) = &mut self.session else { return };
        if session.sweep.is_some() || session.stopping {
            return;
        }
        session.sweep = Some(Sweep {
            generation: self.generation,
            candidates: vec![Vec::new(); count],
            complete: vec![false; count],
            settled: vec![false; count],
            until: Lsn::ZERO,
        });
        self.feed(Input::SweepBegins);
        let session = self.session.as_ref().expect("still there");
        let skip = session.relay.destinations().iter().map(|each| each.unrecorded()).collect();
        self.ask(Job::SweepRead(skip));
    }

    /// Under one snapshot.
    pub fn sweep_read(&mut self, skip: &[RangeSet]) {
        let limit = self.dice.pick(&[2, 20, 1_000]);
        let holding = self.postgres.holders(self.now);
        for (at, skip) in skip.iter().enumerate() {
            self.move_frontier(at);
            let settled = self.postgres.ledger.gaps.get(&at).is_none_or(|gap| {
                gap.mark.as_ref().is_some_and(|(_, holders)| holders.is_disjoint(&holding))
            });
            let rows = self.postgres.rows.range(self.frontiers[at] + 1..);
            let missing = rows.map(|(seq, _)| *seq).filter(|seq| {
                self.postgres.sees(self.now, *seq)
                    && !self.postgres.ledger.is_recorded(at, *seq)
                    && !skip.contains(*seq)
            });
            let mut candidates: Vec<i64> = missing.take(limit + 1).collect();
            let complete = candidates.len() <= limit;
            candidates.truncate(limit);
            let Some(sweep) = self.session.as_mut().and_then(|it| it.sweep.as_mut()) else {
                return;
            };
            sweep.candidates[at] = candidates;
            (sweep.complete[at], sweep.settled[at]) = (complete, settled);
        }
        self.ask(Job::SweepMark);
    }

    /// Every number up to the frontier is recorded, or no row has it and none will.
    fn move_frontier(&mut self, at: usize) {
        let bound = self.postgres.lowest_open();
        while self.frontiers[at] + 1 < bound {
            let seq = self.frontiers[at] + 1;
            let here = self.postgres.rows.contains_key(&seq);
            let deleted = self.postgres.deleted.contains(&seq);
            if here && !deleted && !self.postgres.ledger.is_recorded(at, seq) {
                break;
            }
            self.frontiers[at] = seq;
        }
    }

    /// A transaction after the look: what was seen is durable, and the stream says when it has
    /// brought everything that was seen.
    pub fn sweep_mark(&mut self) {
        let Some(session) = &mut self.session else { return };
        let Some(sweep) = &mut session.sweep else { return };
        let generation = sweep.generation;
        sweep.until = self.postgres.mark(self.now, generation);
        if !session.streams {
            self.marked(generation);
        }
    }

    /// The stream delivered it.
    pub fn marked(&mut self, generation: u64) {
        let Some(session) = &self.session else { return };
        let Some(sweep) = session.sweep.as_ref().filter(|it| it.generation == generation) else {
            return;
        };
        let each = session.relay.destinations().iter().zip(&sweep.candidates);
        let missed: Vec<Vec<i64>> = each.map(|(each, seqs)| each.missed(seqs)).collect();
        self.swarm.count("sweep");
        if missed.iter().all(Vec::is_empty) {
            self.sweep_ends(Some(vec![Vec::new(); self.sites.len()]));
        } else {
            self.ask(Job::SweepRows(missed));
        }
    }

    pub fn sweep_rows(&mut self, missed: &[Vec<i64>]) {
        let mut refused: Vec<Vec<RunHash>> = vec![Vec::new(); missed.len()];
        for (seqs, index) in missed.iter().zip(0u16..) {
            let id = DestinationId(index);
            let mut bytes = 0;
            let Some(session) = &self.session else { return };
            let most = session.relay.load_bytes();
            let Some((until, generation)) =
                session.sweep.as_ref().map(|it| (it.until, it.generation))
            else {
                return;
            };
            for seq in seqs {
                let Some(event) = self.postgres.read(self.now, *seq) else { continue };
                let session = self.session.as_mut().expect("still there");
                let each = &session.relay.destinations()[usize::from(index)];
                let (run, refuses) = (event.run_hash, &mut refused[usize::from(index)]);
                let behind_old = each.waiting().has_old(run);
                if refuses.contains(&run) || behind_old || !each.lanes().may_grow(run) {
                    refuses.push(run);
                    self.swarm.count(match behind_old {
                        true => "missed row behind old ones",
                        false => "missed row of a run that takes none",
                    });
                    continue;
                }
                if bytes >= most {
                    if let Some(sweep) = &mut session.sweep {
                        sweep.complete[usize::from(index)] = false;
                    }
                    break;
                }
                bytes += event.budget_bytes();
                self.swarm.count("missed");
                self.streams.missed(usize::from(index), *seq, generation);
                self.feed(Input::Missed { destination: id, event, until });
            }
        }
        self.sweep_ends(Some(refused));
    }

    /// `refused`: of which runs each destination takes no row now; `None`: the look failed.
    pub fn sweep_ends(&mut self, refused: Option<Vec<Vec<RunHash>>>) {
        let Some(sweep) = self.session.as_mut().and_then(|it| it.sweep.take()) else { return };
        self.feed(Input::SweepEnds);
        let Some(refused) = refused else { return };
        if sweep.complete.contains(&false) || refused.iter().any(|runs| !runs.is_empty()) {
            // There may be more than there was room for.
            let wait = self.dice.between(0, 100 * MS);
            self.after(wait, Happening::SweepAgain(self.epoch));
        }
        for (at, refused) in refused.into_iter().enumerate() {
            if !sweep.settled[at] {
                continue;
            }
            let id = DestinationId(u16::try_from(at).unwrap());
            let state = |world: &World| {
                let session = world.session.as_ref().expect("still there");
                let waiting = session.relay.destinations()[at].waiting();
                (waiting.is_bridging(), waiting.missing_runs() > 0)
            };
            if sweep.complete[at] && state(self) != (false, false) {
                self.feed(Input::Bridged(id, refused));
                self.swarm.count(match state(self).1 {
                    true => "gap bridged but for some runs",
                    false => "gap bridged",
                });
            }
            if !state(self).0 && self.postgres.ledger.gaps.contains_key(&at) {
                self.ask(Job::CloseGap(at));
            }
        }
    }

    /// Once every number up to the mark is in the ledger.
    pub fn close_gap(&mut self, at: usize) {
        self.move_frontier(at);
        let gap = self.postgres.ledger.gaps.get(&at).and_then(|gap| gap.mark.as_ref());
        if gap.is_some_and(|(mark, _)| self.frontiers[at] >= *mark) {
            self.postgres.ledger.gaps.remove(&at);
            self.swarm.count("gap closed");
        }
    }

    /// Is there no slot, a gap begins, and a slot is made, or not yet. Says whether there is one.
    pub fn find_slot(&mut self, make: bool) -> bool {
        if self.postgres.slot {
            return true;
        }
        let newest = self.postgres.ledger.newest();
        let mark = (self.postgres.last_seq(), self.postgres.holders(self.now));
        for at in 0..self.sites.len() {
            if let Some(open) = self.postgres.ledger.gaps.get(&at).map(|gap| gap.receipt)
                && let Some(lowest) = self.postgres.ledger.take_back(at, open)
            {
                self.frontiers[at] = self.frontiers[at].min(lowest - 1);
                self.swarm.count("gap in a gap");
            }
            let new = Gap { receipt: newest, mark: None };
            let gap = self.postgres.ledger.gaps.entry(at).or_insert(new);
            gap.mark = make.then(|| mark.clone());
        }
        if make {
            self.swarm.count("gap");
            self.postgres.make_slot();
        }
        make
    }
}
