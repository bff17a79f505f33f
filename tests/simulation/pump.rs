//! Sessions and the loop around the core: the same duties as the real pump, without I/O.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use outboxd::publish::{Report, Shipment};
use outboxd::relay::destination::DestinationSpec;
use outboxd::relay::machine::{Burial, ReceiptDraft, Verified};
use outboxd::relay::outcome::{Answer, Attempt, DestinationId, Floor, Outcome, Resumed};
use outboxd::relay::ranges::RangeSet;
use outboxd::relay::{Action, Input, Limits, Relay};

use crate::broker::Micros;
use crate::checks::{self, Watch};
use crate::dice::Fault;
use crate::postgres::{MAX_MESSAGE_BYTES, Receipt};
use crate::publisher::Publisher;
use crate::world::{Happening, MS, World};
use outboxd::publish::Order;

/// Frames handed to the core before it is asked whether it wants more.
const CHUNK: u64 = 12;
/// Steps in one turn that can only be a loop without end.
const ENDLESS: u32 = 20_000;

/// One life of the core, from connect to disconnect.
#[derive(Debug)]
pub struct Session {
    pub relay: Relay,
    /// First transaction not yet known to be final.
    pub checked: usize,
    watch: Watch,
    memory_bytes: usize,
    /// Next transaction to send, and the frame of it.
    cursor: (usize, usize),
    jobs: VecDeque<Job>,
    jobs_at: Micros,
    confirm_sent: bool,
    confirmed: u64,
    wake: Option<Micros>,
    stopping: bool,
}

/// A statement on the control connection.
#[derive(Debug)]
pub enum Job {
    Record(Vec<ReceiptDraft>),
    Bury(Burial),
    Verify { id: DestinationId, resumed: Resumed, floor: Floor },
}

impl World {
    pub fn begin_session(&mut self) {
        self.epoch += 1;
        self.swarm.count("session");
        let confirmed = self.postgres.confirmed;
        let specs = (0..self.sites.len()).map(|at| self.spec(at)).collect();
        let limits = Limits {
            memory_bytes: self.dice.pick(&[3_000, 30_000, 1_000_000]),
            receipt_interval: Duration::from_millis(100),
            receipt_events: self.dice.pick(&[1, 20, 10_000]),
        };
        let memory_bytes = limits.memory_bytes;
        let start = self.postgres.wal.partition_point(|txn| txn.commit_lsn < confirmed);
        self.session = Some(Session {
            relay: Relay::new(limits, confirmed, specs, self.next_attempt),
            checked: start,
            watch: Watch::new(self.sites.len()),
            memory_bytes,
            cursor: (start, 0),
            jobs: VecDeque::new(),
            jobs_at: self.now,
            confirm_sent: false,
            confirmed: 0,
            wake: None,
            stopping: false,
        });
        for at in 0..self.sites.len() {
            let wait = self.dice.between(0, 50 * MS);
            self.after(wait, Happening::Connect(self.epoch, at));
        }
        self.after(MS, Happening::Read(self.epoch));
    }

    fn spec(&mut self, at: usize) -> DestinationSpec {
        let (recorded, recorded_to) = self.postgres.ledger.load(at, self.postgres.confirmed);
        DestinationSpec {
            name: format!("site-{at}"),
            filter: self.sites[at].filter.clone(),
            envelope: self.sites[at].envelope.clone(),
            max_in_flight: self.dice.pick(&[1, 5, 1_000]),
            recorded,
            recorded_to,
            floor: self.postgres.ledger.floor(at),
            recorded_known: self.postgres.ledger.known(at),
        }
    }

    /// Connections close. Statements under way have an effect, or not, in the order of asking.
    pub fn end_session(&mut self, process: bool) {
        let Some(session) = self.session.take() else { return };
        let done = self.dice.between(0, session.jobs.len() as u64);
        for job in session.jobs.into_iter().take(usize::try_from(done).unwrap()) {
            self.write_durably(&job);
        }
        for at in 0..self.sites.len() {
            let site = &mut self.sites[at];
            let publisher =
                std::mem::replace(&mut site.publisher, Publisher::new(site.envelope.clone()));
            site.publisher.pipeline = publisher.pipeline;
            if !process && self.swarm.strikes(&mut self.dice, Fault::TwoAtOnce) {
                self.sites[at].zombies.push(publisher);
                let wait = self.dice.between(MS, 10_000 * MS);
                self.after(wait, Happening::Bury(at));
            } else {
                self.cut(at, publisher.conn);
            }
        }
        self.next_attempt = if process { 1 } else { session.relay.next_attempt() };
        self.processes += u64::from(process);
        self.epoch += 1;
        let longest = self.dice.pick(&[10 * MS, 300 * MS, 12_000 * MS]);
        let wait = self.dice.between(0, longest);
        self.after(wait, Happening::Session);
    }

    pub fn stop(&mut self) {
        if let Some(session) = &mut self.session {
            session.stopping = true;
        }
        self.feed(Input::Stop);
    }

    pub fn feed(&mut self, input: Input) {
        let now = self.instant(self.now);
        if let Some(session) = &mut self.session {
            session.relay.handle(now, input).expect("PostgreSQL sends no such thing");
        }
    }

    /// Lets the core do what it wants to do now.
    pub fn act(&mut self) {
        let now = self.instant(self.now);
        let mut ships: BTreeMap<usize, Vec<Shipment>> = BTreeMap::new();
        for step in 0.. {
            assert!(step < ENDLESS, "the core never says that it has nothing to do");
            let Some(session) = &mut self.session else { return };
            let Some(action) = session.relay.poll(now) else { break };
            match action {
                Action::Send { destination, attempt, message } => {
                    let at = usize::from(destination.0);
                    let found = outboxd::message::parse_identity(
                        &message.headers,
                        &self.sites[at].envelope,
                        0,
                    );
                    let seq = found.expect("our own headers").seq;
                    let run = self.postgres.row(seq).expect("P2: sent and never committed");
                    let run = run.run.as_ref().map(|run| run.to_vec());
                    session.watch.sent(destination, attempt.0, seq, run);
                    ships.entry(at).or_default().push(Shipment { attempt, message });
                }
                Action::Resume { destination, from } => {
                    self.send_order(usize::from(destination.0), Order::Resume(from));
                }
                Action::Bury { burial, .. } => self.ask(Job::Bury(burial)),
                Action::Record(drafts) => self.ask(Job::Record(drafts)),
            }
        }
        for (at, ship) in ships {
            self.send_order(at, Order::Ship(ship));
        }
        self.after_acting();
    }

    fn after_acting(&mut self) {
        let now = self.now;
        let Some(session) = &mut self.session else { return };
        let chunk = usize::try_from(CHUNK).unwrap() * (MAX_MESSAGE_BYTES + 1_000);
        let bound = session.memory_bytes + chunk;
        assert!(session.relay.held_bytes() <= bound, "P8: {} held", session.relay.held_bytes());
        let confirmable = session.relay.confirmable();
        if confirmable.0 > session.confirmed {
            session.confirmed = confirmable.0;
            session.confirm_sent = !self.swarm.strikes(&mut self.dice, Fault::LostConfirm);
        }
        if session.confirm_sent {
            session.confirm_sent = false;
            // Looked at before the server may forget.
            let count = self.sites.len();
            checks::confirmable(confirmable, &mut session.checked, count, &self.postgres);
            self.postgres.confirmed = self.postgres.confirmed.max(confirmable);
        }
        if session.stopping && session.relay.is_quiet() {
            assert!(session.watch.is_idle(), "quiet with something in flight");
            let reads = |job: &Job| matches!(job, Job::Verify { .. });
            assert!(session.jobs.iter().all(reads), "quiet with a statement under way");
            self.swarm.count("stop completed");
            return self.end_session(true);
        }
        let wake = session.relay.wake_at();
        let Some(wake) = wake else { return };
        let wake = u64::try_from(wake.duration_since(self.base()).as_micros()).unwrap() + 1;
        assert!(wake > now, "the core wants to be woken in the past");
        let session = self.session.as_mut().expect("still there");
        if session.wake.is_none_or(|known| known <= now || wake < known) {
            session.wake = Some(wake);
            self.after(wake - now, Happening::Wake);
        }
    }

    fn ask(&mut self, job: Job) {
        let longest = match self.swarm.strikes(&mut self.dice, Fault::LedgerHangs) {
            true => 30_000 * MS,
            false => 5 * MS,
        };
        let wait = self.dice.between(100, longest);
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
        if let Job::Bury(burial) = &job
            && self.swarm.strikes(&mut self.dice, Fault::BurialFails)
        {
            if self.dice.coin() {
                self.write_durably(&job);
            }
            return self.feed(Input::Buried(*burial, false));
        }
        let verified = self.write_durably(&job);
        if self.swarm.strikes(&mut self.dice, Fault::CrashAfterWrite) {
            self.swarm.count("crash between ledger write and its answer");
            return self.end_session(true);
        }
        match job {
            Job::Record(_) => self.feed(Input::Recorded),
            Job::Bury(burial) => {
                self.swarm.count("dead letter");
                self.feed(Input::Buried(burial, true));
            }
            Job::Verify { id, .. } => self.resumed(id, verified),
        }
    }

    fn resumed(&mut self, id: DestinationId, verified: Verified) {
        if !verified.seqs.is_empty() {
            self.swarm.count("found by Resume");
        }
        let at = usize::from(id.0);
        if let Some(session) = &mut self.session
            && session.watch.resumed(id, true)
        {
            self.streams.recovered(at, self.sites[at].publisher.resumed_at);
        }
        self.feed(Input::Resumed(id, verified));
    }

    fn write_durably(&mut self, job: &Job) -> Verified {
        match job {
            Job::Record(drafts) => {
                for draft in drafts {
                    let (destination, decided) = (usize::from(draft.destination.0), &draft.decided);
                    let site = &self.sites[destination];
                    checks::receipt(
                        destination,
                        decided.published.iter().flat_map(|(start, end)| start..=end),
                        decided.dead.iter().flat_map(|(start, end)| start..=end),
                        |event| site.takes(event),
                        &self.postgres,
                        &self.streams,
                    );
                    let all = decided.published.iter().chain(decided.dead.iter());
                    let (seqs, last_lsn) = (all.collect(), decided.last_lsn);
                    let floor = draft.floor.clone();
                    let known = draft.last.as_ref().map_or(draft.known, |last| last.stream_seq);
                    let receipt = Receipt { destination, seqs, last_lsn, floor, known };
                    self.postgres.ledger.append(receipt);
                }
            }
            Job::Bury(burial) => {
                let letter = (usize::from(burial.destination.0), burial.seq);
                self.postgres.ledger.dead_letters.insert(letter);
            }
            Job::Verify { id, resumed, floor } => {
                let seqs: RangeSet =
                    resumed.found.iter().map(|found| (found.seq, found.seq)).collect();
                let last_lsn = resumed.found.iter().filter_map(|found| found.commit_lsn).max();
                self.postgres.ledger.append(Receipt {
                    destination: usize::from(id.0),
                    seqs: seqs.clone(),
                    last_lsn,
                    floor: floor.clone(),
                    known: resumed.found.last().map_or(0, |found| found.stream_seq),
                });
                let (created, last_seq) = (resumed.created.clone(), resumed.last_seq);
                return Verified { created, last_seq, seqs, last_lsn, strangers: Vec::new() };
            }
        }
        Verified::default()
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

    fn answer(&mut self, at: usize, id: DestinationId, answer: Answer) {
        if let Outcome::Unknown(_) = answer.outcome
            && self.swarm.strikes(&mut self.dice, Fault::LateAnswer)
        {
            let stream_seq = self.sites[at].broker.last_seq().max(1);
            let outcome = Outcome::Stored { stream_seq, duplicate: false };
            let late = Answer { outcome, ..answer.clone() };
            let wait = self.dice.between(0, 9_000 * MS);
            self.after(wait, Happening::Late(self.processes, id, late));
        }
        if let Some(session) = &mut self.session {
            session.watch.answered(id, &answer);
        }
        self.feed(Input::Answer(id, answer));
    }

    /// An answer to an attempt that was given up, maybe in an earlier session.
    pub fn late(&mut self, id: DestinationId, late: Answer) {
        let Attempt(last) = late.last;
        if self.session.as_ref().is_some_and(|session| last < session.relay.next_attempt()) {
            self.feed(Input::Answer(id, late));
        }
    }

    /// The walsender has something to say.
    pub fn read(&mut self, epoch: u64) {
        if epoch != self.epoch {
            return;
        }
        let wait = self.dice.between(1, 60) * MS;
        self.after(wait, Happening::Read(epoch));
        // A whole chunk is handed over before the core is asked again.
        if !self.session.as_ref().is_some_and(|session| session.relay.wants_wal()) {
            return;
        }
        for _ in 0..self.dice.between(0, CHUNK) {
            if let Some(input) = self.frame() {
                self.feed(input);
            }
        }
    }

    fn frame(&mut self) -> Option<Input> {
        let keepalive = self.dice.per_mille(200);
        let session = self.session.as_mut()?;
        let (at, frame) = session.cursor;
        let Some(txn) = self.postgres.wal.get(at) else {
            let wal_end = self.postgres.insert_lsn();
            return keepalive.then_some(Input::Keepalive { wal_end });
        };
        if keepalive {
            let before = at.checked_sub(1).and_then(|before| self.postgres.wal.get(before));
            let between = before.map_or(self.postgres.confirmed, |before| before.end_lsn);
            // In the middle of a transaction it may name its end, or more.
            let wal_end = if frame > 0 { txn.end_lsn } else { between };
            return Some(Input::Keepalive { wal_end });
        }
        session.cursor = (at, frame + 1);
        if frame == 0 {
            return Some(Input::Begin { commit_lsn: txn.commit_lsn });
        }
        if let Some(row) = txn.rows.get(frame - 1) {
            return Some(Input::Event(row.clone()));
        }
        session.cursor = (at + 1, 0);
        Some(Input::Commit { end_lsn: txn.end_lsn })
    }
}
