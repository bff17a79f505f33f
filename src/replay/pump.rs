//! The loop of a replay: rows into the core as if each were a transaction of its own, the core's
//! messages to the publisher, its records to the job's row, answers back.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::feed::Feed;
use super::pace::{Pace, Rate};
use super::{End, Progress};
use crate::config::{Config, DestinationConfig, PipelineChoice};
use crate::error::{Failure, Fate, Kind};
use crate::lsn::Lsn;
use crate::message::Envelope;
use crate::publish::look::Looker;
use crate::publish::{Order, Publisher, Report, Shipment};
use crate::relay::destination::{Destination, DestinationSpec};
use crate::relay::machine::{Limits, ProtocolViolation, ReceiptDraft, Verified};
use crate::relay::outcome::{Answer, DestinationId, Outcome, Resumed};
use crate::relay::ranges::RangeSet;
use crate::relay::standing::Counts;
use crate::relay::{Action, Input, Relay};
use crate::run::clock;
use crate::store::replay::{self, Job, Step, Tally, select};
use crate::store::{Store, identity};
use crate::wal::Control;

/// Bytes of rows on their way.
const MEMORY_BYTES: usize = 8 << 20;
/// Time between two looks at how it goes.
const TELL_EVERY: Duration = Duration::from_millis(200);
/// Answers taken before the core is asked what follows from them.
const REPORTS_AT_ONCE: usize = 64;
/// Refused events that are told one by one.
const REFUSED_TOLD: usize = 10;
const ONLY: DestinationId = DestinationId(0);

/// See the module.
pub struct Replayer<'a> {
    control: &'a Control,
    store: &'a Store,
    job: &'a Job,
    relay: Relay,
    publisher: Publisher,
    reports: mpsc::UnboundedReceiver<(DestinationId, Report)>,
    feed: Feed,
    pace: Pace,
    undecided_max: usize,
    /// Numbers of the job that the stream has or never will; those of this run are added.
    done: RangeSet,
    to: &'a DestinationConfig,
    /// Where acks not recorded yet say that there was a message before.
    duplicates: Vec<u64>,
    fed: u64,
    progress: Progress,
    shutdown_timeout: Duration,
    tasks: TaskTracker,
    stop_publisher: CancellationToken,
}

impl<'a> Replayer<'a> {
    /// Opens the list of what is left, and begins to connect.
    pub async fn start(
        config: &Config,
        destination: &'a DestinationConfig,
        control: &'a Control,
        store: &'a Store,
        job: &'a Job,
        rate: Rate,
    ) -> Result<Replayer<'a>, Failure> {
        let (client, name) = (&control.client, &config.relay.name);
        let row = identity::read(client, name, &config.source.table).await?;
        let generation = row.map_or(1, |row| row.generation);
        select::open(client, name, &config.source, &destination.filter, job).await?;
        let envelope = Envelope {
            replay: Some(job.name.clone()),
            ..Envelope::new(name, generation, destination)
        };
        // Each message has its own ack then, which says whether the stream grew by it.
        let to = DestinationConfig { pipeline: PipelineChoice::PerRun, ..destination.clone() };
        let (reports_in, reports) = mpsc::unbounded_channel();
        let (tasks, stop_publisher) = (TaskTracker::new(), CancellationToken::new());
        let stop = stop_publisher.clone();
        let publisher = Publisher::spawn(ONLY, to, envelope.clone(), reports_in, stop, &tasks);
        tasks.close();
        let limits = Limits {
            memory_bytes: MEMORY_BYTES,
            receipt_interval: config.relay.receipt_interval,
            receipt_events: u64::try_from(config.relay.receipt_events).unwrap_or(u64::MAX),
            waiting_numbers: 1,
        };
        let undecided_max = rate.undecided_max().min(config.max_in_flight(destination));
        // The list has been through the destination's filter.
        let spec = DestinationSpec {
            floor: Some(job.floor.clone()).filter(|floor| !floor.created.is_empty()),
            recorded_known: job.stream_seq,
            ..DestinationSpec::new(&destination.name, envelope, undecided_max)
        };
        Ok(Replayer {
            control,
            store,
            job,
            relay: Relay::new(limits, Lsn::ZERO, vec![spec], 0),
            publisher,
            reports,
            feed: Feed::default(),
            pace: Pace::new(rate, clock::now()),
            undecided_max,
            done: job.done.iter().copied().collect(),
            to: destination,
            duplicates: Vec::new(),
            fed: 0,
            progress: Progress { tally: job.tally, ..Progress::default() },
            shutdown_timeout: config.relay.shutdown_timeout,
            tasks,
            stop_publisher,
        })
    }

    /// Runs until nothing is left, or until it is told to stop. `tell` hears now and then how it goes.
    pub async fn run(
        mut self,
        stop: &CancellationToken,
        tell: &mut dyn FnMut(&Progress),
    ) -> Result<(End, Progress), Failure> {
        let ended = self.work(stop, tell).await;
        self.stop_publisher.cancel();
        self.tasks.wait().await;
        Ok((ended?, self.progress))
    }

    async fn work(
        &mut self,
        stop: &CancellationToken,
        tell: &mut dyn FnMut(&Progress),
    ) -> Result<End, Failure> {
        let mut stop_by: Option<Instant> = None;
        let mut tell_at = clock::now();
        loop {
            self.act().await?;
            if stop_by.is_some_and(|by| self.relay.is_quiet() || clock::now() >= by) {
                self.write(Step::default()).await?;
                return Ok(End::Stopped);
            }
            if self.undecided() == 0 && self.relay.is_quiet() && self.feed.is_over() {
                // Rows that went between the count and the list count as those that went later.
                let listed = self.progress.tally.total();
                let listed = listed + u64::try_from(self.feed.gone.len()).unwrap_or(0);
                let gone = self.job.planned.saturating_sub(listed);
                let tally = Tally { gone, ..Tally::default() };
                self.write(Step { tally, ..Step::default() }).await?;
                let (client, relay) = (&self.control.client, self.store.relay());
                replay::finish(client, relay, &self.job.name).await?;
                return Ok(End::Finished);
            }
            let may_feed = stop_by.is_none() && self.has_room();
            if may_feed && self.pace.take(clock::now()) {
                self.feed_one().await?;
            }
            let now = clock::now();
            if now >= tell_at {
                tell_at = now + TELL_EVERY;
                tell(&self.progress());
            }
            let next = may_feed.then(|| self.pace.next());
            let wake = [self.relay.wake_at(), stop_by, next, Some(tell_at)];
            let wake = wake.into_iter().flatten().min().unwrap_or(tell_at);
            tokio::select! {
                biased;
                failure = self.control.closed() => return Err(failure),
                () = stop.cancelled(), if stop_by.is_none() => {
                    self.hand(Input::Stop)?;
                    stop_by = Some(clock::now() + self.shutdown_timeout);
                }
                Some((_, report)) = self.reports.recv() => {
                    let mut reports = vec![report];
                    while reports.len() < REPORTS_AT_ONCE
                        && let Ok((_, report)) = self.reports.try_recv()
                    {
                        reports.push(report);
                    }
                    for report in reports {
                        if let Some(end) = self.hear(report).await? {
                            return Ok(end);
                        }
                    }
                }
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
    }

    fn has_room(&self) -> bool {
        let fits = self.undecided() < self.undecided_max && self.relay.wants_wal();
        fits && !self.feed.is_over()
    }

    /// One row, as a transaction of its own: the core's positions are places in the list.
    async fn feed_one(&mut self) -> Result<(), Failure> {
        let Some(event) = self.feed.next(&self.control.client, self.store).await? else {
            return Ok(());
        };
        if self.done.contains(event.seq) {
            // Resume found it in the stream since the list was made.
            let range = self.feed.range(event.seq);
            self.done.extend([range]);
            return self.write(Step { done: vec![range], ..Step::default() }).await;
        }
        self.fed += 1;
        self.hand(Input::Begin { commit_lsn: Lsn(self.fed * 2) })?;
        self.hand(Input::Event(event))?;
        self.hand(Input::Commit { end_lsn: Lsn(self.fed * 2 + 1) })
    }

    /// Does what the core wants now.
    async fn act(&mut self) -> Result<(), Failure> {
        let mut ship = Vec::new();
        while let Some(action) = self.relay.poll(clock::now()) {
            match action {
                Action::Send { attempt, message, .. } => ship.push(Shipment { attempt, message }),
                Action::Resume { from, .. } => self.publisher.order(Order::Resume(from)),
                Action::Record(drafts) => {
                    for draft in drafts {
                        self.record(draft).await?;
                    }
                    self.hand(Input::Recorded { newest: 0 })?;
                }
                // Its row in the outbox stays, and so does the dead letter that it may have.
                Action::Bury { burial, fault, .. } => {
                    if self.progress.refused.len() < REFUSED_TOLD {
                        self.progress.refused.push((burial.seq, fault));
                    }
                    self.hand(Input::Buried(burial, true))?;
                }
                Action::Load { .. } | Action::ReadWaiting { .. } => {
                    let detail = "a replay hands nothing over, and was asked to read it back";
                    return Err(Failure::new(Kind::Internal, detail));
                }
            }
        }
        if !ship.is_empty() {
            self.publisher.order(Order::Ship(ship));
        }
        Ok(())
    }

    async fn record(&mut self, draft: ReceiptDraft) -> Result<(), Failure> {
        let decided = draft.decided;
        let duplicates = self.swallowed().await.min(decided.published_events);
        let mut done = Vec::new();
        for (first, last) in decided.ranges() {
            done.extend((first..=last).map(|seq| self.feed.range(seq)));
        }
        let tally = Tally {
            stored: decided.published_events - duplicates,
            duplicates,
            refused: decided.dead_events,
            gone: 0,
        };
        self.write(Step { done, tally, stream: Some((draft.floor, draft.known)) }).await
    }

    /// How many of the acknowledged duplicates have no message of this job in the stream. One that has
    /// was sent before, and stored behind the back of the Resume that looked for it.
    async fn swallowed(&mut self) -> u64 {
        let places = std::mem::take(&mut self.duplicates);
        let mut swallowed = u64::try_from(places.len()).unwrap_or(u64::MAX);
        if places.is_empty() {
            return swallowed;
        }
        let Ok(looker) = Looker::connect(self.to).await else { return swallowed };
        let ending = format!(":replay:{}", self.job.name);
        for place in places {
            // A broker that does not answer has not shown it.
            let id = looker.message_id(place).await.ok().flatten();
            swallowed -= u64::from(id.is_some_and(|id| id.ends_with(&ending)));
        }
        swallowed
    }

    /// Records a step, and with it the rows that were looked for and are gone.
    async fn write(&mut self, mut step: Step) -> Result<(), Failure> {
        let gone = std::mem::take(&mut self.feed.gone);
        step.tally.gone += u64::try_from(gone.len()).unwrap_or(0);
        step.done.extend(gone);
        if step == Step::default() {
            return Ok(());
        }
        let (client, relay) = (&self.control.client, self.store.relay());
        replay::advance(client, relay, &self.job.name, &step).await?;
        self.done.extend(step.done);
        self.progress.tally.add(step.tally);
        Ok(())
    }

    async fn hear(&mut self, report: Report) -> Result<Option<End>, Failure> {
        match report {
            Report::Up(facts) => {
                let began = &self.job.floor.created;
                if !began.is_empty() && *began != facts.created {
                    return Ok(Some(End::Replaced));
                }
                self.progress.waits = None;
                self.hand(Input::Up(ONLY, facts))?;
            }
            Report::Down(failure) => {
                self.hand(Input::Down(ONLY))?;
                match failure.kind.fate() {
                    Fate::Transient | Fate::Wait => {
                        self.progress.waits = Some(failure.to_string());
                    }
                    Fate::Setup | Fate::Refuse => return Err(failure),
                }
            }
            Report::Forbidden(failure) => return Err(failure),
            Report::Answers(answers) => {
                for answer in answers {
                    self.note(&answer);
                    self.hand(Input::Answer(ONLY, answer))?;
                }
            }
            Report::Resumed(Ok(resumed)) => self.found(resumed).await?,
            Report::Resumed(Err(failure)) => {
                self.progress.waits = Some(failure.to_string());
                self.hand(Input::ResumeFailed(ONLY))?;
            }
        }
        Ok(None)
    }

    fn note(&mut self, answer: &Answer) {
        match &answer.outcome {
            Outcome::Stored { stream_seq, duplicate } => {
                self.progress.waits = None;
                self.duplicates.extend(duplicate.then_some(*stream_seq));
            }
            Outcome::Refused(refusal) if refusal.permanent.is_none() => {
                self.progress.waits = Some(refusal.detail.clone());
            }
            Outcome::Refused(_) | Outcome::Unknown(_) | Outcome::NotSent => {}
        }
    }

    /// What the stream has of this job and the job's row does not: sent, and the answer was lost, or
    /// whoever waited for it was killed. Recorded first, then the core hears of it.
    async fn found(&mut self, resumed: Resumed) -> Result<(), Failure> {
        let Resumed { created, last_seq, found } = resumed;
        let mut seqs = RangeSet::default();
        let mut step = Step::default();
        for seq in found.into_iter().map(|found| found.seq) {
            let decided = self.destination().is_some_and(|only| only.is_decided(seq));
            if !decided && !self.done.contains(seq) && !seqs.contains(seq) {
                seqs.insert(seq);
                step.tally.stored += 1;
                step.done.push(self.feed.range(seq));
            }
        }
        self.write(step).await?;
        let verified = Verified { created, last_seq, seqs, ..Verified::default() };
        self.hand(Input::Resumed(ONLY, verified))
    }

    fn progress(&self) -> Progress {
        let counts = self.counts();
        let answered = counts.acked + counts.dead.values().sum::<u64>();
        Progress { unrecorded: answered.saturating_sub(counts.recorded), ..self.progress.clone() }
    }

    /// The only one.
    fn destination(&self) -> Option<&Destination> {
        self.relay.destinations().first()
    }

    fn counts(&self) -> Counts {
        self.destination().map(Destination::counts).cloned().unwrap_or_default()
    }

    /// Events that are neither stored nor refused.
    fn undecided(&self) -> usize {
        self.destination().map_or(0, |only| only.lanes().len())
    }

    fn hand(&mut self, input: Input) -> Result<(), Failure> {
        let handled = self.relay.handle(clock::now(), input);
        handled.map_err(|ProtocolViolation(what)| Failure::new(Kind::Internal, what))
    }
}
