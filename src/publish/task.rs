//! A destination's task: connect, announce, serve, and again after a failure, for ever. Answers
//! what it is told while there is no connection.

use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio_util::sync::CancellationToken;

use super::connect::Link;
use super::facts::{StreamInfo, facts};
use super::intruders::Intruders;
use super::session::{Ended, Session};
use super::{Order, Report};
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::message::Envelope;
use crate::relay::backoff::Backoff;
use crate::relay::outcome::{Answer, DestinationId, Outcome, StreamFacts};

/// A connection that lived this long, or that stored something, was a clean one.
const CLEAN_AFTER: Duration = Duration::from_secs(30);

/// What a destination's task owns.
pub(super) struct Task {
    pub(super) id: DestinationId,
    pub(super) config: DestinationConfig,
    pub(super) envelope: Envelope,
    pub(super) reports: UnboundedSender<(DestinationId, Report)>,
    pub(super) orders: UnboundedReceiver<Order>,
    pub(super) stop: CancellationToken,
    pub(super) intruders: Intruders,
}

/// The handle is gone: the task is to end.
pub(super) struct Stopped;

impl Task {
    /// Ends with the token or with the handle; either way there is nobody left to tell. A stop
    /// waits for nothing that a server may be slow at.
    pub(super) async fn run(mut self) {
        let stop = self.stop.clone();
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            Stopped = self.serve_while_wanted() => {}
        }
    }

    async fn serve_while_wanted(&mut self) -> Stopped {
        let seed = u64::try_from(uuid::Uuid::new_v4().as_u128() >> 64).unwrap_or(0);
        let mut backoff = Backoff::new(seed);
        let mut told: Option<Failure> = None;
        let mut failure = Failure::new(Kind::BrokerUnreachable, "not connected yet");
        loop {
            let config = self.config.clone();
            let opened = match self.saying_no(open(&config), &failure).await {
                Ok(opened) => opened,
                Err(stopped) => return stopped,
            };
            failure = match opened {
                Ok((link, facts)) => {
                    told = None;
                    let began = Instant::now();
                    let facts = self.intruders.temper(facts, began);
                    match self.serve(&link, facts).await {
                        Ok((failure, stored)) => {
                            if stored || began.elapsed() >= CLEAN_AFTER {
                                backoff.reset();
                            }
                            failure
                        }
                        Err(stopped) => return stopped,
                    }
                }
                Err(failure) => failure,
            };
            if told.as_ref() != Some(&failure) {
                self.report(Report::Down(failure.clone()));
                told = Some(failure.clone());
            }
            let wait = tokio::time::sleep(backoff.next_wait());
            if let Err(stopped) = self.saying_no(wait, &failure).await {
                return stopped;
            }
        }
    }

    /// One connection, from its first `Up` to its end. True when something was stored by it.
    async fn serve(
        &mut self,
        link: &Link,
        mut facts: StreamFacts,
    ) -> Result<(Failure, bool), Stopped> {
        let mut stored = false;
        loop {
            self.report(Report::Up(facts.clone()));
            let mut session = Session::new(self, link, link.open_inbox(), facts);
            let ended = session.run().await;
            stored |= session.has_stored();
            facts = match ended {
                Ended::Stopped => return Err(Stopped),
                Ended::Failed(failure) => {
                    link.give_up();
                    return Ok((failure, stored));
                }
                Ended::Changed(facts) => facts,
            };
        }
    }

    /// Runs `work` and says no to everything that is ordered meanwhile.
    async fn saying_no<T>(
        &mut self,
        work: impl Future<Output = T>,
        failure: &Failure,
    ) -> Result<T, Stopped> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                order = self.orders.recv() => match order {
                    None => return Err(Stopped),
                    Some(Order::Ship(shipments)) => {
                        let attempts = shipments.iter().map(|shipment| shipment.attempt);
                        let answers = attempts.map(|attempt| Answer {
                            first: attempt,
                            last: attempt,
                            outcome: Outcome::NotSent,
                        });
                        let answers = answers.collect();
                        self.report(Report::Answers(answers));
                    }
                    Some(Order::Resume(_)) => {
                        self.report(Report::Resumed(Err(failure.clone())));
                    }
                },
            }
        }
    }

    /// Without effect when nobody listens any more: then the orders end, too.
    pub(super) fn report(&self, report: Report) {
        self.reports.send((self.id, report)).unwrap_or_default();
    }
}

async fn open(config: &DestinationConfig) -> Result<(Link, StreamFacts), Failure> {
    let link = Link::connect(config).await?;
    let facts = read_facts(&link, config).await?;
    Ok((link, facts))
}

/// Asks for the stream's facts.
pub(super) async fn read_facts(
    link: &Link,
    config: &DestinationConfig,
) -> Result<StreamFacts, Failure> {
    let verb = format!("STREAM.INFO.{}", config.stream);
    let info: StreamInfo = link
        .ask(&verb, None)
        .await
        .map_err(|error| error.into_failure(&format!("stream `{}`", config.stream)))?;
    facts(&info, &link.server_facts(), config)
}
