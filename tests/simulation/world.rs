//! The clock and everything that happens on it, one event at a time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use outboxd::config::Filter;
use outboxd::message::{Envelope, Template};
use outboxd::publish::{Order, Report};
use outboxd::relay::Input;
use outboxd::relay::outcome::{Answer, DestinationId, Pipeline};

use crate::broker::{Broker, Micros, Packet, Reply};
use crate::checks::{self, Streams};
use crate::dice::{Dice, Fault, Swarm};
use crate::postgres::{Habits, Postgres};
use crate::publisher::{Effect, Ids, Publisher, Watched};
use crate::pump::Session;

pub const MS: Micros = 1_000;
pub const SECOND: Micros = 1_000_000;
const ACK_TIMEOUT: Micros = 5 * SECOND;
/// After the faults end; the longest back-off is 30 s, and a few may follow each other.
const DRAIN_BOUND: Micros = 600 * SECOND;
/// Happenings of one run; ten times what the busiest of thousands needed.
const ENDLESS: u64 = 200_000;

/// Not faults, but the runs prove nothing without them.
pub const MUST_HAPPEN: [&str; 27] = [
    "proposals lost",
    "session",
    "stop completed",
    "crash between ledger write and its answer",
    "duplicate",
    "dead letter",
    "unmatched",
    "found by Resume",
    "batch",
    "per-run",
    "sequence",
    "sweep",
    "missed",
    "missed row behind old ones",
    "handed over",
    "loaded",
    "loaded in part",
    "waited for a row that is not visible",
    "gone",
    "slow as a whole",
    "waiting numbers read from the ledger",
    "more waits than is read at start",
    "gap",
    "gap bridged",
    "gap bridged but for some runs",
    "missed row of a run that takes none",
    "gap closed",
];

/// One destination and its surroundings.
#[derive(Debug)]
pub struct Site {
    pub broker: Broker,
    pub publisher: Publisher,
    /// Of lost sessions that have not noticed yet.
    pub zombies: Vec<Publisher>,
    /// When the last message sent in sequence arrives.
    pub arrived: Micros,
    pub filter: Filter,
    /// Longest time from proposal to decision.
    deciding: Micros,
    /// Longest time that an answer is on its way: a destination behind a bad line moves and is slow.
    pub answers: Micros,
    pub envelope: Envelope,
    orders_at: Micros,
    reports_at: Micros,
    /// Packets of a dead connection that arrive later than this are lost.
    pub cut: HashMap<u64, Micros>,
}

#[derive(Debug)]
pub enum Happening {
    Write,
    Calm,
    Read(u64),
    Order(u64, usize, Order),
    Report(u64, usize, Report),
    Packet(usize, Packet),
    Reply(usize, u64, Reply),
    Watch(u64, usize, Watched),
    Decide(usize),
    Connect(u64, usize),
    Job(u64),
    Late(u64, DestinationId, Answer),
    Trouble,
    Quorum(usize),
    Space(usize),
    Start(usize),
    Session,
    /// The core is polled after everything that happens.
    Wake,
    StopBound(u64),
    Bury(usize),
    Sweep(u64),
    SweepAgain(u64),
    /// The publication has the table again.
    Published,
    /// The position has gone on.
    Relief(u64),
    /// There may be a slot again.
    SlotReturns(u64),
}

pub struct World {
    pub now: Micros,
    base: Instant,
    pub dice: Dice,
    pub swarm: Swarm,
    pub postgres: Postgres,
    pub streams: Streams,
    pub sites: Vec<Site>,
    pub session: Option<Session>,
    /// Number of the session; everything of an older one is stale.
    pub epoch: u64,
    pub next_attempt: u64,
    /// How many processes ended.
    pub processes: u64,
    ids: Ids,
    queue: BinaryHeap<Reverse<(Micros, u64)>>,
    happenings: HashMap<u64, Happening>,
    runs: u64,
    /// Longest way of an order, a report or an answer.
    lag: Micros,
    /// Longest time from one trouble to the next.
    pub calm_between: Micros,
    /// Longest time from one look through the table to the next.
    pub sweeps_every: Micros,
    /// Number of the last look.
    pub generation: u64,
    /// Up to which number everything is decided, of each destination.
    pub frontiers: Vec<i64>,
    writing_until: Micros,
    /// Nobody writes any more.
    pub closed: bool,
    /// Up to which number everything is final, of each destination.
    pub finals: Vec<i64>,
}

impl World {
    pub fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let swarm = Swarm::new(&mut dice);
        let count = dice.between(1, 3);
        let sites: Vec<Site> = (0..count).map(|index| Site::new(index, &mut dice)).collect();
        let sweeps_every = dice.pick(&[300 * MS, 3 * SECOND]);
        let calm_between = dice.pick(&[200 * MS, SECOND, 5 * SECOND]);
        let lag = dice.pick(&[500, 20 * MS, 150 * MS]);
        let (runs, writing_until) = (dice.pick(&[1, 3, 40]), dice.between(2, 40) * SECOND);
        World {
            now: 0,
            base: Instant::now(),
            dice,
            swarm,
            postgres: Postgres::new(),
            streams: Streams::default(),
            frontiers: vec![0; sites.len()],
            finals: vec![0; sites.len()],
            sweeps_every,
            generation: 0,
            closed: false,
            sites,
            session: None,
            epoch: 0,
            next_attempt: 1,
            processes: 0,
            ids: Ids::default(),
            queue: BinaryHeap::new(),
            happenings: HashMap::new(),
            runs,
            lag,
            calm_between,
            writing_until,
        }
    }

    pub fn instant(&self, at: Micros) -> Instant {
        self.base + Duration::from_micros(at)
    }

    pub fn base(&self) -> Instant {
        self.base
    }

    pub fn after(&mut self, wait: Micros, happening: Happening) {
        let number = self.ids.next();
        self.happenings.insert(number, happening);
        self.queue.push(Reverse((self.now + wait, number)));
    }

    /// Runs to the end; what happened, counted.
    pub fn run(mut self) -> BTreeMap<String, u64> {
        self.after(0, Happening::Write);
        self.after(1, Happening::Session);
        self.after(2, Happening::Trouble);
        // The backlog still has to get through the faults for a while.
        let calm = self.writing_until + self.dice.between(0, 60) * SECOND;
        self.after(calm, Happening::Calm);
        let mut steps = 0;
        while let Some(Reverse((at, number))) = self.queue.pop() {
            self.now = at;
            steps += 1;
            assert!(steps < ENDLESS, "going round in circles");
            let happening = self.happenings.remove(&number).expect("queued once");
            self.happen(happening);
            self.act();
            self.look();
            if !self.swarm.on && !self.closed && self.waits_nowhere() {
                self.closed = true;
                self.postgres.close(self.now, &mut self.dice);
            }
            if !self.swarm.on && self.is_drained() {
                self.end();
                return self.swarm.happened;
            }
            assert!(
                self.now < self.writing_until + DRAIN_BOUND,
                "did not drain: {:#?}",
                self.session.as_ref().map(|session| &session.relay)
            );
        }
        panic!("nothing left to happen, and not drained");
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Write => self.write(),
            Happening::Calm => self.calm(),
            Happening::Read(epoch) => self.read(epoch),
            Happening::Order(epoch, at, order) if epoch == self.epoch => {
                let fails = matches!(order, Order::Resume(_))
                    && self.swarm.strikes(&mut self.dice, Fault::ResumeFails);
                let site = &mut self.sites[at];
                let effects =
                    site.publisher.order(self.now, order, &site.broker, &mut self.ids, fails);
                self.effects(at, effects);
            }
            Happening::Report(epoch, at, report) if epoch == self.epoch => self.report(at, report),
            Happening::Packet(at, packet) => self.packet(at, packet),
            Happening::Reply(at, conn, reply) => {
                let site = &mut self.sites[at];
                if site.publisher.conn == Some(conn) {
                    let effects = site.publisher.reply(reply, &site.broker, &mut self.ids);
                    self.effects(at, effects);
                } else if let Some(zombie) =
                    site.zombies.iter_mut().find(|zombie| zombie.conn == Some(conn))
                {
                    // It goes on sending what it was given; nobody hears its reports.
                    let mut effects = zombie.reply(reply, &site.broker, &mut self.ids);
                    effects.retain(|effect| matches!(effect, Effect::Send(_)));
                    self.effects(at, effects);
                }
            }
            Happening::Watch(epoch, at, watched) if epoch == self.epoch => {
                let effects = self.sites[at].publisher.silence(watched);
                self.effects(at, effects);
            }
            Happening::Decide(at) => {
                let replies = self.sites[at].broker.decide(self.now);
                self.replies(at, replies);
            }
            Happening::Connect(epoch, at) if epoch == self.epoch => self.connect(at),
            Happening::Job(epoch) if epoch == self.epoch => self.job(),
            Happening::Late(process, id, late) if process == self.processes => self.late(id, late),
            Happening::Trouble => self.trouble(),
            Happening::Quorum(at) => self.quorum_returns(at),
            Happening::Space(at) => self.sites[at].broker.full = false,
            Happening::Start(at) if !self.sites[at].broker.up => {
                self.sites[at].broker.restart();
                let wait = self.dice.between(0, 200 * MS);
                self.after(wait, Happening::Connect(self.epoch, at));
            }
            Happening::Session if self.session.is_none() => self.begin_session(),
            Happening::Sweep(epoch) if epoch == self.epoch => self.sweep(),
            Happening::SweepAgain(epoch) if epoch == self.epoch => self.begin_sweep(),
            Happening::Published => self.postgres.leaves_out = false,
            Happening::Relief(epoch) if epoch == self.epoch => {
                self.feed(Input::WalPressure(false));
            }
            Happening::SlotReturns(epoch) if epoch == self.epoch => self.end_session(false),
            Happening::StopBound(epoch) if epoch == self.epoch => {
                panic!("asked to stop long ago and not quiet")
            }
            Happening::Bury(at) => {
                for zombie in std::mem::take(&mut self.sites[at].zombies) {
                    self.cut(at, zombie.conn);
                }
            }
            // Stale, or only there for the core to be polled.
            _ => {}
        }
    }

    fn write(&mut self) {
        if self.closed {
            return;
        }
        // Writing never ends before everything is in order again; at last there is little of it.
        let (most, wait) = match self.now < self.writing_until {
            true => (self.dice.pick(&[1, 1, 5, 40, 100]), self.dice.between(1, 1_000) * MS),
            // Less than one event at a time gets through the slowest of the networks.
            false => (1, SECOND),
        };
        for _ in 0..most {
            let mut habits = Habits::default();
            if self.swarm.strikes(&mut self.dice, Fault::LongTransaction) {
                habits.lasts = self.dice.between(0, 20 * SECOND);
            }
            if self.swarm.strikes(&mut self.dice, Fault::LateVisible) {
                habits.unseen = self.dice.between(0, 10 * SECOND);
            }
            self.postgres.write(self.now, &mut self.dice, self.runs, habits);
        }
        self.after(wait, Happening::Write);
    }

    fn connect(&mut self, at: usize) {
        let changes = self.swarm.strikes(&mut self.dice, Fault::PipelineChange);
        let site = &mut self.sites[at];
        if self.session.is_none() || !site.broker.up || site.publisher.conn.is_some() {
            return;
        }
        let mut pipeline = site.publisher.pipeline;
        if changes {
            pipeline = match pipeline {
                Pipeline::Batch => Pipeline::Sequence,
                Pipeline::Sequence => Pipeline::PerRun,
                Pipeline::PerRun => Pipeline::Batch,
            };
        }
        let effect = site.publisher.connect(self.ids.next(), pipeline, &site.broker);
        self.swarm.count(pipeline.as_str());
        self.effects(at, vec![effect]);
    }

    pub fn effects(&mut self, at: usize, effects: Vec<Effect>) {
        // Messages of one batch go one way, and so do those in sequence; plain ones are free to
        // overtake each other.
        let mut arrival = self.now + self.dice.between(50, 2 * MS);
        for effect in effects {
            match effect {
                Effect::Report(report) => self.send_report(at, report),
                Effect::Watch(watched) => {
                    self.after(ACK_TIMEOUT, Happening::Watch(self.epoch, at, watched));
                }
                Effect::Send(mut packet) => {
                    packet.sent_at = self.now;
                    packet.stale = self.sites[at].publisher.conn != Some(packet.conn);
                    self.swarm.count("sent");
                    if packet.batch.is_none() && packet.expected.is_none() {
                        arrival = self.now + self.dice.between(50, 2 * MS);
                    }
                    arrival += self.dice.between(0, 20);
                    if packet.expected.is_some() {
                        arrival = arrival.max(self.sites[at].arrived);
                        self.sites[at].arrived = arrival;
                    }
                    if self.swarm.strikes(&mut self.dice, Fault::LateStore) {
                        // Often about when the publisher gives up.
                        let least = self.dice.pick(&[10 * MS, ACK_TIMEOUT, ACK_TIMEOUT]);
                        arrival += least + self.dice.between(0, 40 * self.lag);
                    }
                    if !self.swarm.strikes(&mut self.dice, Fault::LostBeforeStore) {
                        self.after(arrival - self.now, Happening::Packet(at, packet));
                    }
                }
            }
        }
    }

    fn packet(&mut self, at: usize, packet: Packet) {
        let site = &mut self.sites[at];
        if site.cut.get(&packet.conn).is_some_and(|until| self.now > *until) {
            self.swarm.count("lost with its connection");
            return;
        }
        let conn = packet.conn;
        let reply = site.broker.receive(self.now, packet);
        if site.broker.has_proposals() {
            let wait = self.dice.between(100, site.deciding);
            self.after(wait, Happening::Decide(at));
        }
        self.replies(at, reply.map(|reply| (conn, reply)).into_iter().collect());
    }

    fn replies(&mut self, at: usize, replies: Vec<(u64, Reply)>) {
        for (conn, reply) in replies {
            if matches!(
                reply,
                Reply::Ack { duplicate: true, .. } | Reply::BatchAck { duplicate: true, .. }
            ) {
                self.swarm.count("duplicate");
            }
            if !self.swarm.strikes(&mut self.dice, Fault::LostAck) {
                let wait = self.dice.between(50, 2 * MS + self.lag + self.sites[at].answers);
                self.after(wait, Happening::Reply(at, conn, reply));
            }
        }
    }

    pub fn send_order(&mut self, at: usize, order: Order) {
        let site = &mut self.sites[at];
        site.orders_at = site.orders_at.max(self.now + self.dice.between(0, self.lag));
        let wait = site.orders_at - self.now;
        self.after(wait, Happening::Order(self.epoch, at, order));
    }

    pub fn send_report(&mut self, at: usize, report: Report) {
        let site = &mut self.sites[at];
        site.reports_at = site.reports_at.max(self.now + self.dice.between(0, self.lag));
        let wait = site.reports_at - self.now;
        self.after(wait, Happening::Report(self.epoch, at, report));
    }

    /// The checks of the moment.
    pub fn look(&mut self) {
        for (site, at) in self.sites.iter_mut().zip(0..) {
            let incarnation = site.broker.incarnation;
            for message in site.broker.news.drain(..) {
                self.streams.stored(at, incarnation, &message, &self.postgres, &mut self.swarm);
            }
        }
        if let Some(session) = &mut self.session {
            let lsn = session.relay.confirmable();
            let count = self.sites.len();
            checks::confirmable(lsn, &mut session.checked, count, &self.postgres);
        }
    }
}

impl Site {
    fn new(index: u64, dice: &mut Dice) -> Site {
        let envelope = Envelope {
            relay: "orders".to_owned(),
            generation: 1,
            stream: "EVENTS".to_owned(),
            template: Template::parse("events.{kind}").expect("a template"),
            id_suffix: None,
            replay: None,
        };
        let kinds = dice.pick(&[&[][..], &["order.*"][..], &["stock.moved"][..]]);
        let window = dice.pick(&[2 * SECOND, 10 * SECOND, 120 * SECOND]);
        let mut publisher = Publisher::new(envelope.clone());
        publisher.pipeline = dice.pick(&[Pipeline::Batch, Pipeline::Sequence, Pipeline::PerRun]);
        Site {
            broker: Broker::new(dice.coin(), dice.coin(), window),
            publisher,
            zombies: Vec::new(),
            arrived: 0,
            deciding: dice.pick(&[3 * MS, 3 * MS, 400 * MS]),
            answers: dice.pick(&[0, 0, 0, 600 * MS, 3 * SECOND]),
            filter: Filter {
                kinds: kinds.iter().filter(|_| index > 0).map(|kind| (*kind).to_owned()).collect(),
                tenants: Vec::new(),
            },
            envelope,
            orders_at: 0,
            reports_at: 0,
            cut: HashMap::new(),
        }
    }

    pub fn takes(&self, event: &outboxd::event::Event) -> bool {
        outboxd::relay::route::takes(&self.filter, event)
    }
}
