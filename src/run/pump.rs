//! The one loop: WAL into the core, the core's actions out to publishers and ledger, their answers
//! back, and what the core allows confirmed to the server. It decides nothing itself.
//! `answers` has what follows from the database's answers.

mod answers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::config::DestinationConfig;
use crate::decode::{Decoded, Decoder};
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;
use crate::publish::{Order, Publisher, Report, Shipment};
use crate::relay::machine::{ProtocolViolation, Verified};
use crate::relay::outcome::{DestinationId, Resumed, StreamFacts};
use crate::relay::{Action, Input, Relay};
use crate::run::caretaker::{self, Caretaker};
use crate::run::ceiling::Ceiling;
use crate::run::plan::Stream;
use crate::run::reporting::Reporter;
use crate::run::session::Ended;
use crate::run::sweeper::{Ask, Sweeper};
use crate::run::work::{Done, Ledger, Place, letter};
use crate::run::{clock, letters};
use crate::store::history::Since;
use crate::store::sweep::{parse_marker, parse_request};
use crate::wal::{Control, WalItem, WalStream};

/// The server's goodbye is waited for this long, however late it is.
const GOODBYE_MIN: Duration = Duration::from_secs(1);
/// Answers taken from the publishers before the core is asked what follows from them.
const REPORTS_AT_ONCE: usize = 64;

/// What a session hands to its loop.
pub struct Pump<'a> {
    pub relay: &'a mut Relay,
    pub control: &'a mut Control,
    /// `None`: the table is all there is.
    pub wal: Option<WalStream>,
    pub decoder: Decoder,
    pub ledger: Arc<Ledger>,
    pub places: Vec<Place>,
    pub publishers: Vec<Publisher>,
    pub reports: mpsc::UnboundedReceiver<(DestinationId, Report)>,
    pub reporter: Reporter,
    pub sweeper: Sweeper,
    /// Sees to a slot while there is no WAL.
    pub caretaker: Option<Caretaker>,
    /// How far the slot may be confirmed.
    pub ceiling: Ceiling,
    /// It is looked for what a stream lost.
    pub looking_for_tail: bool,
    /// Their configuration, in the order of the destinations.
    pub brokers: Vec<DestinationConfig>,
    /// Jobs that may wait for others' transactions: they say nothing of the connection.
    pub patient: usize,
    /// How often the control connection, which idles between receipts, is asked for a sign of life.
    pub ping_every: Duration,
    pub letters: letters::Clock,
    pub shutdown: CancellationToken,
    pub shutdown_timeout: Duration,
    pub max_retained_wal_bytes: u64,
}

/// An orderly end under way.
struct Stop {
    by: Instant,
    ended: Ended,
}

type Jobs = FuturesUnordered<BoxFuture<'static, Done>>;

impl Pump<'_> {
    /// Runs until something fails or a stop is complete. On a stop everything that was sent is
    /// answered, recorded and confirmed, as far as `shutdown_timeout` allows.
    pub async fn run(mut self) -> Result<Ended, Failure> {
        let mut jobs = Jobs::new();
        jobs.push(Box::pin(Arc::clone(&self.ledger).ping()));
        let mut ships: Vec<Vec<Shipment>> = self.publishers.iter().map(|_| Vec::new()).collect();
        let mut stop: Option<Stop> = None;
        let mut next_ping = clock::now() + self.ping_every;
        loop {
            if stop.is_none() {
                self.sweep(&mut jobs)?;
                self.see_to_the_slot(&mut jobs);
            }
            self.act(&mut jobs, &mut ships);
            self.confirm(&mut jobs);
            self.reporter.turn(self.relay, clock::now());
            // A statement under way answers for the connection; one that waits for a synchronous
            // standby must not look like a dead server. A job that itself waits answers for nothing.
            if clock::now() >= next_ping {
                next_ping = clock::now() + self.ping_every;
                if jobs.len() <= self.patient {
                    jobs.push(Box::pin(Arc::clone(&self.ledger).ping()));
                }
            }
            if stop.is_none()
                && let Some(asked) = self.letters.due(clock::now(), self.relay)
            {
                let names = self.places.iter().map(|place| place.destination.clone()).collect();
                jobs.push(Box::pin(Arc::clone(&self.ledger).letters(asked, names)));
            }
            if stop.as_ref().is_some_and(|stop| self.is_over(stop)) {
                break;
            }
            let wake = [
                self.relay.wake_at(),
                stop.as_ref().map(|stop| stop.by),
                self.reporter.wake_at(),
                self.sweeper.wake_at(),
                self.letters.wake_at().filter(|_| stop.is_none()),
                self.caretaker.as_ref().and_then(Caretaker::wake_at),
                Some(next_ping),
            ];
            let wake = wake.into_iter().flatten().min().unwrap_or(next_ping);
            // Results before new work: an answer frees memory and moves the position, a row of
            // WAL takes some. Reading goes on only while the core has room.
            tokio::select! {
                biased;
                failure = self.control.closed() => return Err(failure),
                () = self.shutdown.cancelled(), if !is_final(stop.as_ref()) => {
                    stop = Some(self.begin_stop(Ended::Stopped)?);
                    self.reporter.stopping();
                }
                Some(done) = jobs.next() => {
                    self.reporter.answered();
                    if let Some(ended) = self.done(done)?
                        && stop.is_none()
                    {
                        stop = Some(self.begin_stop(ended)?);
                    }
                }
                Some((id, report)) = self.reports.recv() => {
                    self.report(id, report, &mut jobs)?;
                    for _ in 0..REPORTS_AT_ONCE {
                        let Ok((id, report)) = self.reports.try_recv() else { break };
                        self.report(id, report, &mut jobs)?;
                    }
                }
                items = next_items(self.wal.as_mut()), if self.relay.wants_wal() => {
                    self.read(items?)?;
                }
                () = self.control.notified() => self.letters.hurry(clock::now()),
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
        self.leave(stop).await
    }

    /// What is decided and recorded, as far as the relay's row says so.
    fn confirm(&mut self, jobs: &mut Jobs) {
        let Some(wal) = &self.wal else { return };
        let confirmable = self.relay.confirmable();
        wal.confirm(self.ceiling.bound(confirmable));
        if let Some(to) = self.ceiling.wanted(confirmable) {
            jobs.push(Box::pin(Arc::clone(&self.ledger).raise_ceiling(to)));
        }
    }

    fn begin_stop(&mut self, ended: Ended) -> Result<Stop, Failure> {
        self.feed(Input::Stop)?;
        Ok(Stop { by: clock::now() + self.shutdown_timeout, ended })
    }

    fn is_over(&self, stop: &Stop) -> bool {
        self.relay.is_quiet() || clock::now() >= stop.by
    }

    /// The end of an orderly stop: says what is left behind, then takes leave of the server.
    async fn leave(self, stop: Option<Stop>) -> Result<Ended, Failure> {
        let confirmed = self.ceiling.bound(self.relay.confirmable());
        self.reporter.observe(self.relay);
        let destinations = self.relay.destinations();
        let in_flight: usize = destinations.iter().map(|each| each.lanes().in_flight()).sum();
        let waiting: usize = destinations.iter().map(|each| each.lanes().len()).sum();
        if self.relay.is_quiet() {
            tracing::info!(%confirmed, waiting, "stopped; everything that was sent is accounted for");
        } else {
            tracing::warn!(
                %confirmed,
                waiting,
                in_flight,
                "stopped by shutdown_timeout before everything sent was answered and recorded; \
                 the next start reads the stream to find out"
            );
        }
        let (by, ended) = stop.map_or((clock::now(), Ended::Stopped), |stop| (stop.by, stop.ended));
        if let Some(wal) = self.wal {
            wal.confirm(confirmed);
            // From here on exactly; without effect on anything but what the next start finds out.
            let exact = Arc::clone(&self.ledger).raise_ceiling(confirmed);
            drop(tokio::time::timeout(GOODBYE_MIN, exact).await);
            wal.stop(by.saturating_duration_since(clock::now()).max(GOODBYE_MIN)).await?;
        }
        Ok(ended)
    }

    /// Goes on with the pass through the table, if one is due or under way.
    fn sweep(&mut self, jobs: &mut Jobs) -> Result<(), Failure> {
        while let Some(ask) = self.sweeper.next(clock::now(), self.relay) {
            let ledger = Arc::clone(&self.ledger);
            match ask {
                Ask::Look(request) => {
                    self.feed(Input::SweepBegins)?;
                    jobs.push(Box::pin(ledger.look(request)));
                }
                Ask::Rows(seqs, max_bytes) => {
                    jobs.push(Box::pin(ledger.read_rows(seqs, max_bytes)));
                }
                Ask::End(inputs, advances) => {
                    for input in inputs {
                        self.feed(input)?;
                    }
                    self.sweeper.holes().for_each(|(id, holes)| self.reporter.holes(id, holes));
                    if !advances.is_empty() {
                        jobs.push(Box::pin(ledger.advance(advances)));
                    }
                }
            }
        }
        Ok(())
    }

    fn see_to_the_slot(&mut self, jobs: &mut Jobs) {
        let Some(caretaker) = &mut self.caretaker else { return };
        if let Some(make) = caretaker.make() {
            self.patient += 1;
            jobs.push(make);
        }
        if caretaker.is_due(clock::now()) {
            let (client, config) = (Arc::clone(&self.ledger.client), caretaker.config());
            let reason = caretaker.reason();
            jobs.push(Box::pin(async move {
                Done::SlotSeen(caretaker::look(&client, &config, None, reason).await)
            }));
        }
    }

    /// Does what the core wants now. Sends are gathered, so that a publisher is woken once.
    fn act(&mut self, jobs: &mut Jobs, ships: &mut [Vec<Shipment>]) {
        let now = clock::now();
        while let Some(action) = self.relay.poll(now) {
            match action {
                Action::Send { destination, attempt, message } => {
                    if let Some(ship) = ships.get_mut(usize::from(destination.0)) {
                        ship.push(Shipment { attempt, message });
                    }
                }
                Action::Resume { destination, mut from } => {
                    // In another history the ledger may have less than the position says.
                    let places = self.places.get(usize::from(destination.0));
                    if places.is_some_and(|place| place.since != Since::Same) {
                        from.confirmable = Lsn::ZERO;
                    }
                    self.order(destination, Order::Resume(from));
                }
                Action::Bury { burial, event, fault, attempts } => {
                    let Some(place) = self.place(burial.destination) else { continue };
                    tracing::warn!(
                        destination = place.destination,
                        seq = event.seq,
                        reason = fault.reason.as_str(),
                        "dead letter: {}",
                        fault.detail
                    );
                    let ledger = Arc::clone(&self.ledger);
                    jobs.push(match burial.letter {
                        Some(id) => Box::pin(ledger.bury_again(burial, id, fault, attempts)),
                        None => {
                            Box::pin(ledger.bury(burial, letter(place, *event, fault, attempts)))
                        }
                    });
                }
                Action::Load { destination, waiters, max_bytes } => {
                    let Some(place) = self.place(destination) else { continue };
                    let ledger = Arc::clone(&self.ledger);
                    self.patient += 1;
                    jobs.push(Box::pin(ledger.load(
                        destination,
                        place.destination,
                        waiters,
                        max_bytes,
                    )));
                }
                Action::ReadWaiting { destination, after, most } => {
                    let Some(place) = self.place(destination) else { continue };
                    let gap = self.sweeper.gap(destination);
                    let ledger = Arc::clone(&self.ledger);
                    jobs.push(Box::pin(ledger.read_waiting(
                        destination,
                        place.destination,
                        (after, most),
                        gap,
                    )));
                }
                Action::Record(drafts) => {
                    let with_place = |draft: crate::relay::machine::ReceiptDraft| {
                        self.place(draft.destination).map(|place| (place, draft))
                    };
                    let drafts = drafts.into_iter().filter_map(with_place).collect();
                    jobs.push(Box::pin(Arc::clone(&self.ledger).record(drafts)));
                }
            }
        }
        for (publisher, ship) in self.publishers.iter().zip(ships) {
            if !ship.is_empty() {
                publisher.order(Order::Ship(std::mem::take(ship)));
            }
        }
    }

    fn read(&mut self, items: Vec<WalItem>) -> Result<(), Failure> {
        let (mut rows, mut received) = (0, Lsn::ZERO);
        // One glance at the clock for all that came at once.
        let now = clock::now();
        for item in items {
            match item {
                WalItem::Keepalive { wal_end } => {
                    received = wal_end;
                    self.feed_at(now, Input::Keepalive { wal_end })?;
                }
                WalItem::Data { wal_start, wal_end, payload } => {
                    received = wal_end;
                    let decoded = self.decoder.decode(&payload).map_err(|error| {
                        Failure::new(Kind::Undecodable, format!("at {wal_start}: {error}"))
                    })?;
                    match decoded {
                        Decoded::Begin { commit_lsn, .. } => {
                            self.feed_at(now, Input::Begin { commit_lsn })?
                        }
                        Decoded::Event(event) => {
                            rows += 1;
                            self.feed_at(now, Input::Event(event))?;
                        }
                        Decoded::Commit { end_lsn, .. } => {
                            self.feed_at(now, Input::Commit { end_lsn })?
                        }
                        Decoded::Truncate { of_outbox: true } => tracing::warn!(
                            lsn = %wal_start,
                            "the outbox table was truncated: rows that were not streamed are gone"
                        ),
                        Decoded::Message { transactional: true, prefix, content, .. } => {
                            if let Some((relay, token)) = parse_marker(&prefix, &content)
                                && relay == self.ledger.store.relay()
                            {
                                self.sweeper.delivered(token);
                            }
                        }
                        Decoded::Message { transactional: false, prefix, content, .. } => {
                            let asked = parse_request(&prefix, &content);
                            if asked == Some(self.ledger.store.relay()) {
                                self.sweeper.hurry(clock::now());
                            }
                        }
                        Decoded::Truncate { of_outbox: false } | Decoded::Other => {}
                    }
                }
            }
        }
        self.reporter.read(rows, received);
        Ok(())
    }

    fn report(
        &mut self,
        id: DestinationId,
        report: Report,
        jobs: &mut Jobs,
    ) -> Result<(), Failure> {
        match report {
            Report::Up(facts) => {
                self.reporter.up(id, &facts);
                self.compare(id, &facts);
                self.feed(Input::Up(id, facts))
            }
            Report::Down(failure) => {
                self.reporter.observe(self.relay);
                self.reporter.down(id, &failure);
                self.feed(Input::Down(id))
            }
            Report::Forbidden(failure) => {
                self.reporter.observe(self.relay);
                self.reporter.forbidden(id, &failure);
                Ok(())
            }
            Report::Answers(answers) => {
                for answer in answers {
                    self.feed(Input::Answer(id, answer))?;
                }
                self.reporter.acked(id, self.relay);
                Ok(())
            }
            Report::Resumed(Ok(resumed)) => self.verify(id, resumed, jobs),
            Report::Resumed(Err(failure)) => {
                self.reporter.resume_failed(id, &failure);
                if failure.kind == Kind::StreamShorter {
                    self.find_tail(id, jobs);
                }
                self.feed(Input::ResumeFailed(id))
            }
        }
    }

    /// Tells when the stream is not as it was left. What follows from that Resume does, and proves.
    fn compare(&self, id: DestinationId, facts: &StreamFacts) {
        let Some(one) = self.relay.destinations().get(usize::from(id.0)) else { return };
        let (floor, newest) = (one.floor(), one.newest());
        let stream = Stream::compare(&floor, one.known(), newest.as_ref(), facts);
        if let Some(words) = stream.words() {
            tracing::warn!(destination = one.name(), stream = facts.stream, "{words}");
        }
    }

    /// The stream has not what it acknowledged: how far does it still fit the ledger?
    fn find_tail(&mut self, id: DestinationId, jobs: &mut Jobs) {
        let Some(broker) = self.brokers.get(usize::from(id.0)) else { return };
        if !std::mem::replace(&mut self.looking_for_tail, true) {
            self.patient += 1;
            jobs.push(Box::pin(Arc::clone(&self.ledger).find_lost_tail(id, broker.clone())));
        }
    }

    /// Resume's finds go to the ledger first, then to the core.
    fn verify(
        &mut self,
        id: DestinationId,
        resumed: Resumed,
        jobs: &mut Jobs,
    ) -> Result<(), Failure> {
        let generation = self.ledger.generation;
        let destination = self.relay.destinations().get(usize::from(id.0));
        let Some((destination, place)) = destination.zip(self.place(id)) else { return Ok(()) };
        let mut resumed = resumed;
        let mut candidates = std::mem::take(&mut resumed.found);
        if let Some(later) = candidates.iter().find(|found| found.generation > generation) {
            let detail = format!(
                "destination `{}`: message {} of stream `{}` is of generation {}, the ledger of \
                 generation {generation}",
                place.destination, later.stream_seq, place.envelope.stream, later.generation
            );
            return Err(Failure::new(Kind::HistoryLost, detail));
        }
        candidates.retain(|found| {
            let open = found.letter.is_some() || !destination.is_decided(found.seq);
            found.generation == generation && open
        });
        if candidates.is_empty() && place.since == Since::Same {
            let Resumed { created, last_seq, .. } = resumed;
            let verified = Verified { created, last_seq, ..Verified::default() };
            return self.feed(Input::Resumed(id, verified));
        }
        let floor = destination.recorded_floor(&resumed.created);
        let highest = destination.highest();
        self.patient += 1;
        let ledger = Arc::clone(&self.ledger);
        jobs.push(Box::pin(ledger.verify(id, place, resumed, candidates, (floor, highest))));
        Ok(())
    }

    fn feed(&mut self, input: Input) -> Result<(), Failure> {
        self.feed_at(clock::now(), input)
    }

    fn feed_at(&mut self, now: Instant, input: Input) -> Result<(), Failure> {
        let handled = self.relay.handle(now, input);
        handled.map_err(|ProtocolViolation(what)| Failure::new(Kind::Undecodable, what))
    }

    fn order(&self, id: DestinationId, order: Order) {
        if let Some(publisher) = self.publishers.get(usize::from(id.0)) {
            publisher.order(order);
        }
    }

    fn place(&self, id: DestinationId) -> Option<Place> {
        self.places.get(usize::from(id.0)).cloned()
    }
}

/// For ever without a stream.
async fn next_items(wal: Option<&mut WalStream>) -> Result<Vec<WalItem>, Failure> {
    match wal {
        Some(wal) => wal.next().await,
        None => std::future::pending().await,
    }
}

/// Is it a stop for good that is under way?
fn is_final(stop: Option<&Stop>) -> bool {
    stop.is_some_and(|stop| matches!(stop.ended, Ended::Stopped))
}
