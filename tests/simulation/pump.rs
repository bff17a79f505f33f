//! Sessions and the loop around the core: the same duties as the real pump, without I/O.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use outboxd::publish::Shipment;
use outboxd::relay::destination::{Destination, DestinationSpec};
use outboxd::relay::outcome::{Answer, Attempt, DestinationId, Outcome};
use outboxd::relay::{Action, Input, Limits, Relay};

use crate::broker::Micros;
use crate::checks::{self, Watch};
use crate::control::Job;
use crate::dice::Fault;
use crate::postgres::MAX_MESSAGE_BYTES;
use crate::publisher::Publisher;
use crate::sweep::Sweep;
use crate::world::{Happening, MS, SECOND, World};
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
    pub watch: Watch,
    /// There is a slot, and it streams.
    pub streams: bool,
    pub sweep: Option<Sweep>,
    memory_bytes: usize,
    /// Next transaction to send, and the frame of it.
    cursor: (usize, usize),
    pub jobs: VecDeque<Job>,
    pub jobs_at: Micros,
    confirm_sent: bool,
    confirmed: u64,
    wake: Option<Micros>,
    pub stopping: bool,
}

impl World {
    pub fn begin_session(&mut self) {
        self.epoch += 1;
        self.swarm.count("session");
        let make = !self.swarm.strikes(&mut self.dice, Fault::NoSlot);
        let streams = self.find_slot(make);
        if !streams {
            self.swarm.count("session without a slot");
            let wait = self.dice.between(SECOND, 20 * SECOND);
            self.after(wait, Happening::SlotReturns(self.epoch));
        }
        let confirmed = self.postgres.confirmed;
        let limits = Limits {
            memory_bytes: self.dice.pick(&[3_000, 30_000, 1_000_000]),
            receipt_interval: Duration::from_millis(100),
            receipt_events: self.dice.pick(&[1, 20, 10_000]),
            waiting_numbers: self.dice.pick(&[2, 10, 50_000]),
        };
        let most = (limits.waiting_numbers(self.sites.len()) / 2).max(1);
        let specs = (0..self.sites.len()).map(|at| self.spec(at, most)).collect();
        let memory_bytes = limits.memory_bytes;
        let start = self.postgres.wal.partition_point(|txn| txn.commit_lsn < confirmed);
        self.session = Some(Session {
            relay: Relay::new(limits, confirmed, specs, self.next_attempt),
            checked: start,
            watch: Watch::new(self.sites.len()),
            streams,
            sweep: None,
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
        let wait = self.dice.between(0, self.sweeps_every);
        self.after(wait, Happening::Sweep(self.epoch));
    }

    fn spec(&mut self, at: usize, most: usize) -> DestinationSpec {
        let ledger = &self.postgres.ledger;
        let loaded = ledger.load(at, self.postgres.confirmed);
        let part = ledger.waiting(at, 0, most);
        let gap = ledger.gaps.contains_key(&at);
        if !part.complete {
            self.swarm.count("more waits than is read at start");
        }
        DestinationSpec {
            name: format!("site-{at}"),
            filter: self.sites[at].filter.clone(),
            envelope: self.sites[at].envelope.clone(),
            max_in_flight: self.dice.pick(&[1, 5, 1_000]),
            recorded: loaded.recorded,
            recorded_to: loaded.to,
            floor: self.postgres.ledger.floor(at),
            recorded_known: self.postgres.ledger.known(at),
            recorded_newest: None,
            highest: self.postgres.ledger.highest(at),
            recorded_id: self.postgres.ledger.newest(),
            handed: loaded.handed,
            waiting: part.waiters,
            waiting_beyond: Some(part.upto).filter(|_| !part.complete),
            gap,
            letters: outboxd::relay::standing::Letters::default(),
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
                        message.headers(),
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
                Action::Load { destination: id, waiters, max_bytes } => {
                    self.ask(Job::Load { id, waiters, max_bytes, holders: None });
                }
                Action::ReadWaiting { destination: id, after, most } => {
                    self.ask(Job::ReadWaiting { id, after, most });
                }
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
        // Rows of the table are read until half of the budget is full, for each destination by
        // itself.
        let rows = self.sites.len() * (session.memory_bytes / 2 + MAX_MESSAGE_BYTES + 1_000);
        let bound = session.memory_bytes + chunk + rows;
        let whole = |each: &Destination| each.waiting().is_slow_as_a_whole();
        if session
            .relay
            .destinations()
            .iter()
            .any(|each| whole(each) && !each.waiting().is_bridging())
        {
            self.swarm.count("slow as a whole");
        }
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
            let left = session.jobs.iter().all(Job::may_be_left);
            assert!(left, "quiet with a statement under way");
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

    pub fn answer(&mut self, at: usize, id: DestinationId, answer: Answer) {
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
        let reads = |session: &Session| session.streams && session.relay.wants_wal();
        if !self.session.as_ref().is_some_and(reads) {
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
        if let Some(row) = txn.rows.get(frame - 1).filter(|_| !txn.left_out) {
            self.streams.brought(self.sites.len(), row.seq);
            return Some(Input::Event(row.clone()));
        }
        session.cursor = (at + 1, 0);
        let (end_lsn, marker) = (txn.end_lsn, txn.marker);
        marker.into_iter().for_each(|generation| self.marked(generation));
        Some(Input::Commit { end_lsn })
    }
}
