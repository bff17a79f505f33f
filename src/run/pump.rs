//! The one loop: WAL into the core, the core's actions out to publishers and ledger, their answers
//! back, and what the core allows confirmed to the server. It decides nothing itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::decode::{Decoded, Decoder};
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;
use crate::publish::{Order, Publisher, Report, Shipment};
use crate::relay::machine::{ProtocolViolation, Verified};
use crate::relay::outcome::{DestinationId, Resumed};
use crate::relay::{Action, Input, Relay};
use crate::run::clock;
use crate::run::reporting::Reporter;
use crate::run::work::{Done, Ledger, Place, letter};
use crate::wal::{Control, WalItem, WalStream};

/// How often the control connection, which idles between receipts, is asked for a sign of life.
const PING_EVERY: Duration = Duration::from_secs(5);
/// The server's goodbye is waited for this long, however late it is.
const GOODBYE_MIN: Duration = Duration::from_secs(1);
/// Answers taken from the publishers before the core is asked what follows from them.
const REPORTS_AT_ONCE: usize = 64;

/// What a session hands to its loop.
pub struct Pump<'a> {
    pub relay: &'a mut Relay,
    pub control: &'a mut Control,
    pub wal: WalStream,
    pub decoder: Decoder,
    pub ledger: Arc<Ledger>,
    pub places: Vec<Place>,
    pub publishers: Vec<Publisher>,
    pub reports: mpsc::UnboundedReceiver<(DestinationId, Report)>,
    pub reporter: Reporter,
    pub shutdown: CancellationToken,
    pub shutdown_timeout: Duration,
}

type Jobs = FuturesUnordered<BoxFuture<'static, Done>>;

impl Pump<'_> {
    /// Runs until something fails or a stop is complete. On a stop everything that was sent is
    /// answered, recorded and confirmed, as far as `shutdown_timeout` allows.
    pub async fn run(mut self) -> Result<(), Failure> {
        let mut jobs = Jobs::new();
        jobs.push(Box::pin(Arc::clone(&self.ledger).ping()));
        let mut ships: Vec<Vec<Shipment>> = self.publishers.iter().map(|_| Vec::new()).collect();
        let mut stop_by: Option<Instant> = None;
        let mut next_ping = clock::now() + PING_EVERY;
        loop {
            self.act(&mut jobs, &mut ships);
            self.wal.confirm(self.relay.confirmable());
            self.reporter.turn(self.relay, clock::now());
            // A statement under way answers for the connection; one that waits for a synchronous
            // standby must not look like a dead server.
            if clock::now() >= next_ping {
                next_ping = clock::now() + PING_EVERY;
                if jobs.is_empty() {
                    jobs.push(Box::pin(Arc::clone(&self.ledger).ping()));
                }
            }
            if let Some(deadline) = stop_by
                && (self.relay.is_quiet() || clock::now() >= deadline)
            {
                break;
            }
            let wake = [self.relay.wake_at(), stop_by, self.reporter.wake_at(), Some(next_ping)];
            let wake = wake.into_iter().flatten().min().unwrap_or(next_ping);
            // Results before new work: an answer frees memory and moves the position, a row of
            // WAL takes some. Reading goes on only while the core has room.
            tokio::select! {
                biased;
                failure = self.control.closed() => return Err(failure),
                () = self.shutdown.cancelled(), if stop_by.is_none() => {
                    self.feed(Input::Stop)?;
                    stop_by = Some(clock::now() + self.shutdown_timeout);
                    self.reporter.stopping();
                }
                Some(done) = jobs.next() => self.done(done)?,
                Some((id, report)) = self.reports.recv() => {
                    self.report(id, report, &mut jobs)?;
                    for _ in 0..REPORTS_AT_ONCE {
                        let Ok((id, report)) = self.reports.try_recv() else { break };
                        self.report(id, report, &mut jobs)?;
                    }
                }
                items = self.wal.next(), if self.relay.wants_wal() => self.read(items?)?,
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
        self.leave(stop_by).await
    }

    /// The end of an orderly stop: says what is left behind, then takes leave of the server.
    async fn leave(self, stop_by: Option<Instant>) -> Result<(), Failure> {
        let confirmed = self.relay.confirmable();
        self.wal.confirm(confirmed);
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
        let left = stop_by.map(|by| by.saturating_duration_since(clock::now()));
        self.wal.stop(left.unwrap_or_default().max(GOODBYE_MIN)).await
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
                Action::Resume { destination, from } => {
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
                    let letter = letter(place.destination, *event, fault, attempts);
                    jobs.push(Box::pin(Arc::clone(&self.ledger).bury(burial, letter)));
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
        for item in items {
            match item {
                WalItem::Keepalive { wal_end } => {
                    received = wal_end;
                    self.feed(Input::Keepalive { wal_end })?;
                }
                WalItem::Data { wal_start, wal_end, payload } => {
                    received = wal_end;
                    let decoded = self.decoder.decode(&payload).map_err(|error| {
                        Failure::new(Kind::Undecodable, format!("at {wal_start}: {error}"))
                    })?;
                    match decoded {
                        Decoded::Begin { commit_lsn, .. } => {
                            self.feed(Input::Begin { commit_lsn })?
                        }
                        Decoded::Event(event) => {
                            rows += 1;
                            self.feed(Input::Event(event))?;
                        }
                        Decoded::Commit { end_lsn, .. } => self.feed(Input::Commit { end_lsn })?,
                        Decoded::Truncate { of_outbox: true } => tracing::warn!(
                            lsn = %wal_start,
                            "the outbox table was truncated: rows that were not streamed are gone"
                        ),
                        Decoded::Truncate { of_outbox: false }
                        | Decoded::Message { .. }
                        | Decoded::Other => {}
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
                self.feed(Input::ResumeFailed(id))
            }
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
        candidates
            .retain(|found| found.generation == generation && !destination.is_decided(found.seq));
        if candidates.is_empty() {
            let Resumed { created, last_seq, .. } = resumed;
            let verified = Verified { created, last_seq, ..Verified::default() };
            return self.feed(Input::Resumed(id, verified));
        }
        let floor = destination.recorded_floor(&resumed.created);
        let ledger = Arc::clone(&self.ledger);
        jobs.push(Box::pin(ledger.verify(id, place, resumed, candidates, floor)));
        Ok(())
    }

    fn done(&mut self, done: Done) -> Result<(), Failure> {
        match done {
            Done::Recorded(result) => {
                result?;
                self.feed(Input::Recorded)
            }
            Done::Buried(burial, result) => {
                if let Err(failure) = &result {
                    tracing::warn!(
                        code = failure.kind.code(),
                        "dead letter not written: {}",
                        failure.detail
                    );
                }
                self.feed(Input::Buried(burial, result.is_ok()))
            }
            Done::Verified(id, result) => {
                let verified = result?;
                self.reporter.resumed(id, &verified);
                self.feed(Input::Resumed(id, verified))
            }
            Done::Pinged(result) => {
                self.reporter.pulse(&result?);
                Ok(())
            }
        }
    }

    fn feed(&mut self, input: Input) -> Result<(), Failure> {
        let handled = self.relay.handle(clock::now(), input);
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
