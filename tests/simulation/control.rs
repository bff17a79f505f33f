//! Statements on the control connection, in the order of asking: what they do to the database, and
//! their answers.

use std::collections::HashSet;

use outboxd::publish::Report;
use outboxd::relay::Input;
use outboxd::relay::machine::{Burial, Loaded, ReceiptDraft, Verified};
use outboxd::relay::outcome::{DestinationId, Floor, Resumed};
use outboxd::relay::ranges::RangeSet;
use outboxd::relay::waiting::Waiter;

use crate::checks;
use crate::dice::Fault;
use crate::ledger::Receipt;
use crate::world::{Happening, MS, World};

/// A statement.
#[derive(Debug)]
pub enum Job {
    Record(Vec<ReceiptDraft>),
    Bury(Burial),
    Verify {
        id: DestinationId,
        resumed: Resumed,
        floor: Floor,
    },
    Load {
        id: DestinationId,
        waiters: Vec<Waiter>,
        max_bytes: usize,
        /// Who held a lock when a row was not there.
        holders: Option<HashSet<u64>>,
    },
    ReadWaiting {
        id: DestinationId,
        after: i64,
        most: usize,
    },
    /// Rows without a receipt, but for those that memory has.
    SweepRead(Vec<RangeSet>),
    SweepMark,
    SweepRows(Vec<Vec<i64>>),
    CloseGap(usize),
}

impl Job {
    /// Does it change nothing that must be finished before a stop?
    pub fn may_be_left(&self) -> bool {
        !matches!(self, Job::Record(_) | Job::Bury(_))
    }
}

impl World {
    pub fn ask(&mut self, job: Job) {
        let longest = match self.swarm.strikes(&mut self.dice, Fault::LedgerHangs) {
            true => 30_000 * MS,
            false => 5 * MS,
        };
        let wait = self.dice.between(100, longest);
        self.ask_after(wait, job);
    }

    fn ask_after(&mut self, wait: u64, job: Job) {
        let Some(session) = &mut self.session else { return };
        session.jobs.push_back(job);
        session.jobs_at = session.jobs_at.max(self.now + wait);
        let wait = session.jobs_at - self.now;
        self.after(wait, Happening::Job(self.epoch));
    }

    /// The oldest statement is done.
    pub fn job(&mut self) {
        let Some(job) = self.session.as_mut().and_then(|session| session.jobs.pop_front()) else {
            return;
        };
        match job {
            Job::Bury(burial) if self.swarm.strikes(&mut self.dice, Fault::BurialFails) => {
                if self.dice.coin() {
                    self.write_durably(&job);
                }
                self.feed(Input::Buried(burial, false));
            }
            Job::Record(_) | Job::Bury(_) | Job::Verify { .. } => self.written(job),
            job if self.swarm.strikes(&mut self.dice, Fault::ReadFails) => self.read_failed(&job),
            Job::Load { id, waiters, max_bytes, holders } => {
                self.load(id, waiters, max_bytes, holders);
            }
            Job::ReadWaiting { id, after, most } => {
                let at = usize::from(id.0);
                let part = self.postgres.ledger.waiting(at, after, most);
                self.swarm.count("waiting numbers read from the ledger");
                self.feed(Input::WaitingRead(id, part));
            }
            Job::SweepRead(skip) => self.sweep_read(&skip),
            Job::SweepMark => self.sweep_mark(),
            Job::SweepRows(missed) => self.sweep_rows(&missed),
            Job::CloseGap(at) => self.close_gap(at),
        }
    }

    fn read_failed(&mut self, job: &Job) {
        match job {
            Job::Load { id, .. } => self.feed(Input::LoadFailed(*id)),
            Job::ReadWaiting { id, .. } => self.feed(Input::WaitingReadFailed(*id)),
            Job::SweepRead(_) | Job::SweepMark | Job::SweepRows(_) => self.sweep_ends(None),
            _ => {}
        }
    }

    fn written(&mut self, job: Job) {
        let verified = self.write_durably(&job);
        if self.swarm.strikes(&mut self.dice, Fault::CrashAfterWrite) {
            self.swarm.count("crash between ledger write and its answer");
            return self.end_session(true);
        }
        match job {
            Job::Record(_) => {
                let newest = self.postgres.ledger.newest();
                self.feed(Input::Recorded { newest });
            }
            Job::Bury(burial) => {
                self.swarm.count("dead letter");
                self.feed(Input::Buried(burial, true));
            }
            Job::Verify { id, .. } => self.resumed(id, verified),
            _ => {}
        }
    }

    /// Rows by number. One that is not there may not be visible yet: it is gone when it is still not
    /// there after everybody ended who held a lock when it was looked for first.
    fn load(
        &mut self,
        id: DestinationId,
        waiters: Vec<Waiter>,
        max_bytes: usize,
        holders: Option<HashSet<u64>>,
    ) {
        let holding = self.postgres.holders(self.now);
        let ended = holders.as_ref().is_some_and(|holders| holders.is_disjoint(&holding));
        let mut loaded = Loaded::default();
        let (mut bytes, mut absent) = (0, false);
        for waiter in &waiters {
            if bytes >= max_bytes {
                break;
            }
            if let Some(event) = self.postgres.read(self.now, waiter.seq) {
                bytes += event.budget_bytes();
                loaded.events.push(event);
            } else if ended {
                let deleted = self.postgres.deleted.contains(&waiter.seq);
                assert!(deleted, "P1: {} is taken for gone and is there", waiter.seq);
            } else {
                absent = true;
                break;
            }
            loaded.count += 1;
        }
        if absent && (loaded.count == 0 || self.dice.coin()) {
            self.swarm.count("waited for a row that is not visible");
            let holders = Some(holders.unwrap_or(holding));
            return self.ask_after(20 * MS, Job::Load { id, waiters, max_bytes, holders });
        }
        self.swarm.count("loaded");
        if loaded.count < waiters.len() {
            self.swarm.count("loaded in part");
        }
        self.feed(Input::Loaded(id, loaded));
    }

    pub fn resumed(&mut self, id: DestinationId, verified: Verified) {
        if !verified.seqs.is_empty() {
            self.swarm.count("found by Resume");
        }
        if !verified.strangers.is_empty() {
            self.swarm.count("found by Resume without a visible row");
        }
        let at = usize::from(id.0);
        if let Some(session) = &mut self.session
            && session.watch.resumed(id, true)
        {
            self.streams.recovered(at, self.sites[at].publisher.resumed_at);
        }
        self.feed(Input::Resumed(id, verified));
    }

    pub fn write_durably(&mut self, job: &Job) -> Verified {
        match job {
            Job::Record(drafts) => drafts.iter().for_each(|draft| self.record(draft)),
            Job::Bury(burial) => {
                let letter = (usize::from(burial.destination.0), burial.seq);
                self.postgres.ledger.dead_letters.insert(letter);
            }
            Job::Verify { id, resumed, floor } => return self.verify(*id, resumed, floor),
            _ => {}
        }
        Verified::default()
    }

    /// What is handed over goes first: a number that is final since is so by a later receipt.
    fn record(&mut self, draft: &ReceiptDraft) {
        let (destination, decided) = (usize::from(draft.destination.0), &draft.decided);
        let site = &self.sites[destination];
        let takes = |event: &_| site.takes(event);
        checks::receipt(destination, decided, takes, &self.postgres, &self.streams);
        let known = draft.last.as_ref().map_or(draft.known, |last| last.stream_seq);
        let receipt = Receipt {
            destination,
            last_lsn: decided.last_lsn,
            floor: Some(draft.floor.clone()),
            known,
            ..Receipt::default()
        };
        if !decided.handed.is_empty() {
            *self.swarm.happened.entry("handed over".to_owned()).or_default() +=
                decided.handed.len() as u64;
            let seqs = decided.handed.iter().map(|(seq, _)| (*seq, *seq)).collect();
            let handed = decided.handed.clone();
            self.postgres.ledger.append(Receipt { seqs, handed, ..receipt.clone() });
        }
        let gone = decided.gone.iter().map(|(start, end)| (end - start + 1).unsigned_abs());
        let gone: u64 = gone.sum();
        if gone > 0 {
            *self.swarm.happened.entry("gone".to_owned()).or_default() += gone;
        }
        let seqs: RangeSet = decided.ranges().collect();
        if !seqs.is_empty() || decided.handed.is_empty() {
            self.postgres.ledger.append(Receipt { seqs, ..receipt });
        }
    }

    /// A message without commit LSN is of a row that the table shows: it committed below the end.
    fn verify(&mut self, id: DestinationId, resumed: &Resumed, floor: &Floor) -> Verified {
        let Resumed { created, last_seq, found } = resumed.clone();
        let known = found.last().map_or(0, |found| found.stream_seq);
        let (visible, strangers): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|found| self.postgres.sees(self.now, found.seq));
        let seqs: RangeSet = visible.iter().map(|found| (found.seq, found.seq)).collect();
        let end = self.postgres.insert_lsn();
        let last_lsn = visible.iter().map(|found| found.commit_lsn.unwrap_or(end)).max();
        if !seqs.is_empty() {
            self.postgres.ledger.append(Receipt {
                destination: usize::from(id.0),
                seqs: seqs.clone(),
                last_lsn,
                floor: Some(floor.clone()),
                known,
                ..Receipt::default()
            });
        }
        Verified { created, last_seq, seqs, last_lsn, strangers, ..Verified::default() }
    }

    pub fn report(&mut self, at: usize, report: Report) {
        let id = DestinationId(u16::try_from(at).unwrap());
        let Some(session) = &mut self.session else { return };
        match report {
            Report::Up(facts) => {
                session.watch.up(id, facts.pipeline);
                self.feed(Input::Up(id, facts));
            }
            Report::Down(_) => self.feed(Input::Down(id)),
            Report::Forbidden(_) => {}
            Report::Answers(answers) => {
                for answer in answers {
                    self.answer(at, id, answer);
                }
            }
            Report::Resumed(Err(_)) => {
                session.watch.resumed(id, false);
                self.feed(Input::ResumeFailed(id));
            }
            Report::Resumed(Ok(mut resumed)) => {
                let destination = &session.relay.destinations()[at];
                resumed.found.retain(|found| !destination.is_decided(found.seq));
                let seq = destination.recorded_floor(&resumed.created);
                let floor = Floor { created: resumed.created.clone(), seq };
                if resumed.found.is_empty() {
                    let Resumed { created, last_seq, .. } = resumed;
                    self.resumed(id, Verified { created, last_seq, ..Verified::default() });
                } else {
                    self.ask(Job::Verify { id, resumed, floor });
                }
            }
        }
    }
}
