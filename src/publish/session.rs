//! One connection at work: sends what is queued as the pipeline allows, turns answers into
//! outcomes, and stops behind the first that is not a plain success.
//!
//! **Halt.** When a batch does not end well, the messages behind it must not be sent, and neither
//! must those that the core ships before it has heard of it. So the session halts: whatever comes
//! before a Resume succeeds is answered `NotSent`.

use async_nats::message::OutboundMessage;
use async_nats::{Message, Subscriber};
use futures_util::{FutureExt as _, StreamExt as _};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::time::{sleep_until, timeout};

use super::ack;
use super::batch::{Batches, Settled, Step};
use super::connect::Link;
use super::facts::same_apart_from_state;
use super::outcome::End;
use super::per_run::InFlight;
use super::resume::{message_id_at, resume};
use super::task::{Task, read_facts};
use super::{Order, Report, Shipment};
use crate::error::{Failure, Kind};
use crate::event::Reason;
use crate::relay::outcome::{Answer, Attempt, Floor, Outcome, Pipeline, Refusal, StreamFacts};

/// Silences in a row, without a word from the server in between, after which the connection is
/// given up.
const SILENCES_MAX: u32 = 2;
/// How often the stream's configuration is looked at: its owner may change it.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Messages sent before answers are looked at again.
const SEND_RUN: usize = 512;

/// How a session ends. Everything shipped is answered then.
pub(super) enum Ended {
    /// The task is to end; nobody waits for answers.
    Stopped,
    /// The connection is of no use any more.
    Failed(Failure),
    /// The stream's configuration changed.
    Changed(StreamFacts),
}

enum Pipe {
    Batch(Box<Batches>),
    PerRun(InFlight),
}

/// See the module.
pub(super) struct Session<'a> {
    task: &'a mut Task,
    link: &'a Link,
    replies: Subscriber,
    facts: StreamFacts,
    pipe: Pipe,
    queue: VecDeque<Shipment>,
    answers: Vec<Answer>,
    /// Nothing is sent. At the start, until the first Resume: the queue of orders may hold what
    /// was meant for an earlier connection.
    halted: bool,
    resume: Option<Floor>,
    reset: bool,
    silences: u32,
    stored: bool,
    look_at: Instant,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        task: &'a mut Task,
        link: &'a Link,
        (inbox, replies): (String, Subscriber),
        facts: StreamFacts,
    ) -> Session<'a> {
        let replicated = facts.replicas > 1;
        let pipe = match facts.pipeline {
            Pipeline::Batch => {
                let stem = uuid::Uuid::new_v4().simple().to_string();
                Pipe::Batch(Box::new(Batches::new(inbox, stem, replicated)))
            }
            Pipeline::PerRun => {
                Pipe::PerRun(InFlight::new(inbox, replicated, task.config.max_in_flight.max(1)))
            }
        };
        Session {
            task,
            link,
            replies,
            facts,
            pipe,
            queue: VecDeque::new(),
            answers: Vec::new(),
            halted: true,
            resume: None,
            reset: false,
            silences: 0,
            stored: false,
            look_at: Instant::now() + LOOK_EVERY,
        }
    }

    /// Did this session store a message?
    pub(super) fn has_stored(&self) -> bool {
        self.stored
    }

    pub(super) async fn run(&mut self) -> Ended {
        match self.work().await {
            Ok(ended) => ended,
            Err(failure) => {
                self.disconnect();
                Ended::Failed(failure)
            }
        }
    }

    async fn work(&mut self) -> Result<Ended, Failure> {
        loop {
            // What follows a Reset is for the next session, which announces itself first.
            while !self.reset
                && let Ok(order) = self.task.orders.try_recv()
            {
                self.accept(order).await?;
            }
            if self.reset {
                let facts = read_facts(self.link, &self.task.config).await?;
                return Ok(Ended::Changed(facts));
            }
            if let Some(floor) = self.resume.take()
                && self.read_back(floor).await?.is_none()
            {
                return Ok(Ended::Stopped);
            }
            self.send_queued().await?;
            if Instant::now() >= self.look_at
                && let Some(changed) = self.look().await?
            {
                return Ok(Ended::Changed(changed));
            }
            self.flush_answers();
            let deadline = self.deadline();
            let wake = deadline.into_iter().chain([self.look_at]).min().unwrap_or(self.look_at);
            let more = !self.halted && !self.queue.is_empty() && self.takes_next();
            // Results before new work, and an answer that is there before its deadline.
            tokio::select! {
                biased;
                () = self.task.stop.cancelled() => return Ok(Ended::Stopped),
                answer = self.replies.next() => {
                    let Some(answer) = answer else { return Err(self.link.broken_or_closed()) };
                    self.hear(answer).await?;
                    self.hear_ready().await?;
                }
                failure = self.link.ended() => return Err(failure),
                order = self.task.orders.recv() => match order {
                    Some(order) => self.accept(order).await?,
                    None => return Ok(Ended::Stopped),
                },
                () = std::future::ready(()), if more => {}
                () = sleep_until(wake.into()) => self.expire(Instant::now())?,
            }
        }
    }

    async fn accept(&mut self, order: Order) -> Result<(), Failure> {
        match order {
            Order::Ship(shipments) if self.halted => {
                let attempts = shipments.into_iter().map(|shipment| shipment.attempt);
                self.not_sent(attempts);
            }
            Order::Ship(shipments) => self.queue.extend(shipments),
            Order::Resume { floor } => self.resume = Some(floor),
            Order::Reset => {
                self.queue.clear();
                self.answers.clear();
                self.resume = None;
                self.halted = true;
                self.reset = true;
                match &mut self.pipe {
                    Pipe::PerRun(flight) => flight.abandon(),
                    Pipe::Batch(batches) => {
                        if let Some((subject, reply)) = batches.abandon() {
                            self.link.signal(subject, reply).await?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// `None` when the task is to end.
    async fn read_back(&mut self, floor: Floor) -> Result<Option<()>, Failure> {
        let Task { config, envelope, stop, .. } = &*self.task;
        let result = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(None),
            result = resume(self.link, config, envelope, &floor) => result,
        };
        let ended = match &result {
            Ok(_) => {
                self.halted = false;
                None
            }
            Err(_) => self.link.broken(),
        };
        self.flush_answers();
        self.task.report(Report::Resumed(result));
        ended.map_or(Ok(Some(())), Err)
    }

    async fn send_queued(&mut self) -> Result<(), Failure> {
        let limit = self.facts.max_message_bytes;
        for _ in 0..SEND_RUN {
            if self.halted || !self.takes_next() {
                return Ok(());
            }
            let Some(shipment) = self.queue.pop_front() else { return Ok(()) };
            if shipment.message.size > limit {
                self.too_large(shipment);
                continue;
            }
            let last = self.queue.front().is_none_or(|next| next.message.size > limit);
            let Shipment { attempt, message } = shipment;
            let now = Instant::now();
            let reply = match &mut self.pipe {
                Pipe::Batch(batches) => batches.stamp(attempt, &message, last, now),
                Pipe::PerRun(flight) => flight.stamp(attempt, now),
            };
            let message = OutboundMessage {
                subject: message.subject,
                reply: Some(reply.into()),
                payload: message.payload,
                headers: Some(message.headers),
            };
            let sent = timeout(self.task.config.ack_timeout, self.link.publish(message)).await;
            sent.unwrap_or_else(|_| {
                let detail = "the connection takes no more bytes".to_owned();
                Err(Failure::new(Kind::BrokerUnreachable, detail))
            })?;
        }
        Ok(())
    }

    fn takes_next(&self) -> bool {
        match &self.pipe {
            // A message over the limit ends the queue's batch, and is looked at when that is over.
            Pipe::Batch(batches) => batches.takes_next(),
            Pipe::PerRun(flight) => flight.takes_next(),
        }
    }

    /// The core checks this too; the limit may have changed since.
    fn too_large(&mut self, shipment: Shipment) {
        let detail = format!(
            "the message has {} bytes, headers counted; server and stream take {}",
            shipment.message.size, self.facts.max_message_bytes
        );
        let outcome =
            Outcome::Refused(Refusal { permanent: Some(Reason::TooLarge), code: 0, detail });
        let attempt = shipment.attempt;
        self.answers.push(Answer { first: attempt, last: attempt, outcome });
        if matches!(self.pipe, Pipe::Batch(_)) {
            self.halt();
        }
    }

    /// Answers that are there already, so that a window's worth of them is one report.
    async fn hear_ready(&mut self) -> Result<(), Failure> {
        for _ in 0..SEND_RUN {
            match self.replies.next().now_or_never() {
                Some(Some(answer)) => self.hear(answer).await?,
                Some(None) | None => break,
            }
        }
        Ok(())
    }

    async fn hear(&mut self, answer: Message) -> Result<(), Failure> {
        self.silences = 0;
        let reply = match answer.status {
            Some(async_nats::StatusCode::NO_RESPONDERS) => ack::Reply::NoResponders,
            _ => ack::Reply::parse(&answer.payload),
        };
        match &mut self.pipe {
            Pipe::PerRun(flight) => {
                if let Some(answer) = flight.on_reply(&answer.subject, reply) {
                    self.stored |= matches!(answer.outcome, Outcome::Stored { .. });
                    self.answers.push(answer);
                }
            }
            Pipe::Batch(batches) => {
                match batches.on_reply(&answer.subject, reply, Instant::now()) {
                    Step::Nothing => {}
                    Step::End { subject, reply } => self.link.signal(subject, reply).await?,
                    Step::Settled(settled) => self.settle(settled).await,
                }
            }
        }
        Ok(())
    }

    async fn settle(&mut self, mut settled: Settled) {
        if let Some((seq, id)) = &settled.proof {
            let shown = message_id_at(self.link, &self.facts.stream, *seq).await;
            if !shown.is_ok_and(|shown| shown.as_ref() == Some(id)) {
                settled.disprove();
            }
        }
        if settled.disabled {
            self.look_at = Instant::now();
        }
        let success = settled.verdict.is_success();
        self.stored |= success;
        self.answers.extend(settled.answers());
        if !success {
            self.halt();
        }
    }

    /// Nothing more is sent until a Resume tells that the core knows.
    fn halt(&mut self) {
        self.halted = true;
        let queued: Vec<_> = self.queue.drain(..).map(|shipment| shipment.attempt).collect();
        self.not_sent(queued);
        self.flush_answers();
    }

    fn not_sent(&mut self, attempts: impl IntoIterator<Item = Attempt>) {
        self.answers.extend(attempts.into_iter().map(|attempt| Answer {
            first: attempt,
            last: attempt,
            outcome: Outcome::NotSent,
        }));
    }

    fn flush_answers(&mut self) {
        if !self.answers.is_empty() {
            let answers = std::mem::take(&mut self.answers);
            self.task.report(Report::Answers(answers));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let ack_timeout = self.task.config.ack_timeout;
        match &self.pipe {
            Pipe::Batch(batches) => batches.deadline(ack_timeout),
            Pipe::PerRun(flight) => flight.deadline(ack_timeout),
        }
    }

    fn expire(&mut self, now: Instant) -> Result<(), Failure> {
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return Ok(());
        }
        match &mut self.pipe {
            Pipe::Batch(batches) => {
                if let Some(settled) = batches.settle(&End::Silence) {
                    self.answers.extend(settled.answers());
                    self.halt();
                }
            }
            Pipe::PerRun(flight) => {
                self.answers.extend(flight.expire(now, self.task.config.ack_timeout));
            }
        }
        self.silences += 1;
        if self.silences >= SILENCES_MAX {
            let detail = format!(
                "stream `{}` did not answer {SILENCES_MAX} times in a row within {:?}",
                self.facts.stream, self.task.config.ack_timeout
            );
            return Err(Failure::new(Kind::StreamBusy, detail));
        }
        Ok(())
    }

    /// Reads the stream's configuration again between two batches. The new facts, when they are
    /// others and everything is answered.
    async fn look(&mut self) -> Result<Option<StreamFacts>, Failure> {
        if let Pipe::Batch(batches) = &self.pipe
            && !batches.is_idle()
        {
            return Ok(None);
        }
        self.look_at = Instant::now() + LOOK_EVERY;
        match read_facts(self.link, &self.task.config).await {
            Ok(facts) if same_apart_from_state(&self.facts, &facts) => Ok(None),
            Ok(facts) => {
                self.disconnect();
                Ok(Some(facts))
            }
            // No leader for the moment, or no answer: whoever publishes will notice.
            Err(failure) if matches!(failure.kind, Kind::StreamBusy | Kind::BrokerJetStream) => {
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Answers everything that was shipped and is not answered.
    fn disconnect(&mut self) {
        match &mut self.pipe {
            Pipe::Batch(batches) => {
                if let Some(settled) = batches.settle(&End::Disconnected) {
                    self.answers.extend(settled.answers());
                }
            }
            Pipe::PerRun(flight) => self.answers.extend(flight.disconnect()),
        }
        let queued: Vec<_> = self.queue.drain(..).map(|shipment| shipment.attempt).collect();
        self.not_sent(queued);
        self.flush_answers();
    }
}
