//! One connection at work: sends what is queued as the pipeline allows, turns answers into
//! outcomes, and stops behind the first that is not a plain success.
//!
//! **Halt.** When a batch does not end well, the messages behind it must not be sent, and neither
//! must those that the core ships before it has heard of it. So the session halts: whatever comes
//! before a Resume succeeds is answered `NotSent`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::time::{sleep_until, timeout};

use super::ack::{self, ServerError};
use super::batch::Settled;
use super::connect::{Forbidden, Link, NO_RESPONDERS};
use super::facts::same_apart_from_state;
use super::nats::{Delivery, Subscriber};
use super::pipe::{Pipe, Stamp, Step, join};
use super::resume::{Read, message_id_at, resume};
use super::sequence::Breach;
use super::task::{Task, read_facts};
use super::telling::Telling;
use super::{Order, Report, Shipment};
use crate::error::{Failure, Kind};
use crate::relay::outcome::{Answer, Attempt, Outcome, ReadFrom, StreamFacts};

/// Silences in a row, without a word from the server in between, after which the connection is
/// given up.
const SILENCES_MAX: u32 = 2;
/// How often the stream's configuration is looked at: its owner may change it.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Messages sent before answers are looked at again.
const SEND_RUN: usize = 512;
/// A word of the server about a missing message is waited for so long, once for a batch.
const WORD_WITHIN: Duration = Duration::from_millis(20);

/// How a session ends. Everything shipped is answered then.
pub(super) enum Ended {
    /// The handle is gone; nobody waits for answers.
    Stopped,
    /// The connection is of no use any more.
    Failed(Failure),
    /// The stream's configuration changed.
    Changed(StreamFacts),
}

/// See the module.
pub(super) struct Session<'a> {
    task: &'a mut Task,
    link: &'a Link,
    replies: Subscriber,
    facts: StreamFacts,
    pipe: Pipe,
    queue: VecDeque<Shipment>,
    /// Of the message at hand.
    stamp: Stamp,
    answers: Vec<Answer>,
    /// Nothing is sent. At the start, until the first Resume: the queue of orders may hold what
    /// was meant for an earlier connection.
    halted: bool,
    resume: Option<ReadFrom>,
    silences: u32,
    stored: bool,
    look_at: Instant,
    telling: Telling,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        task: &'a mut Task,
        link: &'a Link,
        (inbox, replies): (String, Subscriber),
        facts: StreamFacts,
    ) -> Session<'a> {
        let now = Instant::now();
        let pipe = Pipe::new(&facts, inbox, task.config.max_in_flight, now);
        Session {
            task,
            link,
            replies,
            facts,
            pipe,
            queue: VecDeque::new(),
            stamp: Stamp::default(),
            answers: Vec::new(),
            halted: true,
            resume: None,
            silences: 0,
            stored: false,
            look_at: now + LOOK_EVERY,
            telling: Telling::default(),
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
            while let Ok(order) = self.task.orders.try_recv() {
                self.accept(order);
            }
            if let Some(from) = self.resume.take() {
                self.read_back(from).await?;
            }
            // Before the next batch: under load there is no other moment without one.
            if self.pipe.may_look()
                && Instant::now() >= self.look_at
                && let Some(changed) = self.look().await?
            {
                return Ok(Ended::Changed(changed));
            }
            self.send_queued();
            self.flush_answers();
            let look_at = self.pipe.may_look().then_some(self.look_at);
            let wake = self.deadline().into_iter().chain(look_at).min();
            let wake = wake.unwrap_or_else(|| Instant::now() + LOOK_EVERY);
            let more = !self.queue.is_empty() && self.may_send();
            // Results before new work, and an answer that is there before its deadline.
            tokio::select! {
                biased;
                answer = self.replies.next() => {
                    let Some(answer) = answer else { return Err(self.link.broken_or_closed()) };
                    self.hear(answer).await?;
                    self.hear_ready().await?;
                }
                failure = self.link.ended() => return Err(failure),
                forbidden = self.link.forbidden() => self.forbidden(&forbidden).await?,
                order = self.task.orders.recv() => match order {
                    Some(order) => self.accept(order),
                    None => return Ok(Ended::Stopped),
                },
                () = self.link.room(), if more => {}
                () = sleep_until(wake.into()) => self.expire(Instant::now())?,
            }
        }
    }

    fn accept(&mut self, order: Order) {
        match order {
            Order::Ship(shipments) if self.halted => {
                let attempts = shipments.into_iter().map(|shipment| shipment.attempt);
                self.not_sent(attempts);
            }
            Order::Ship(shipments) => self.queue.extend(shipments),
            Order::Resume(from) => self.resume = Some(from),
        }
    }

    async fn read_back(&mut self, from: ReadFrom) -> Result<(), Failure> {
        let Task { config, envelope, .. } = &*self.task;
        let result = resume(self.link, config, envelope, &from).await;
        let mut ended = None;
        match &result {
            Ok(Read { resumed, reached }) if resumed.created == self.facts.created => {
                self.pipe.begin_behind(resumed.last_seq.max(*reached));
                self.halted = false;
            }
            // Replaced since it was announced: the facts are those of another stream.
            Ok(_) => self.look_at = Instant::now(),
            Err(_) => ended = self.link.broken(),
        }
        self.flush_answers();
        self.task.report(Report::Resumed(result.map(|read| read.resumed)));
        ended.map_or(Ok(()), Err)
    }

    /// Sends what the pipeline and the connection take now. Waits for neither: answers and orders
    /// are heard meanwhile.
    fn send_queued(&mut self) {
        let now = Instant::now();
        for _ in 0..SEND_RUN {
            if !self.may_send() || !self.link.has_room() {
                break;
            }
            let Some(Shipment { attempt, message }) = self.queue.pop_front() else { break };
            let last = self.queue.is_empty();
            self.pipe.stamp(attempt, &message, last, now, &mut self.stamp);
            let Stamp { reply, head } = &self.stamp;
            let head = if head.is_empty() { message.head() } else { head };
            self.link.publish(message.subject(), reply, head, &message.payload);
        }
    }

    /// May the next message be sent, as far as the order of messages goes?
    fn may_send(&self) -> bool {
        !self.halted && self.pipe.takes_next()
    }

    /// Answers that are there already, so that a window's worth of them is one report.
    async fn hear_ready(&mut self) -> Result<(), Failure> {
        for _ in 0..SEND_RUN {
            let Some(answer) = self.replies.ready() else { break };
            self.hear(answer).await?;
        }
        Ok(())
    }

    async fn hear(&mut self, answer: Delivery) -> Result<(), Failure> {
        self.silences = 0;
        let reply = match answer.status() {
            Some(NO_RESPONDERS) => ack::Reply::NoResponders,
            _ => ack::Reply::parse(&answer.payload),
        };
        if self.pipe.misses_one(answer.subject(), &reply)
            && let Ok(forbidden) = timeout(WORD_WITHIN, self.link.forbidden()).await
        {
            self.forbidden(&forbidden).await?;
        }
        let step = self.pipe.on_reply(answer.subject(), reply, Instant::now());
        self.follow(step).await
    }

    /// The server let a message not through, and says so on no reply subject.
    async fn forbidden(&mut self, forbidden: &Forbidden) -> Result<(), Failure> {
        self.silences = 0;
        let error = error_of(forbidden);
        self.tell_forbidden(forbidden);
        let step = self.pipe.on_forbidden(&forbidden.subject, error, Instant::now());
        self.follow(step).await
    }

    /// Behind the acks that came before it, so that none of them passes for a later one.
    fn tell_forbidden(&mut self, forbidden: &Forbidden) {
        self.flush_answers();
        let failure = Failure::new(Kind::BrokerPermission, forbidden.words.clone());
        self.task.report(Report::Forbidden(failure));
    }

    /// Single publishes are answered, or nothing unanswered is waited for.
    fn answered(&mut self, answers: Vec<Answer>) {
        let over = self.pipe.is_over(&answers);
        for answer in answers {
            self.stored |= matches!(answer.outcome, Outcome::Stored { .. });
            join(&mut self.answers, answer);
        }
        if over && !self.halted {
            self.halt();
        }
        if let Some(breach) = self.pipe.take_breach() {
            self.breached(&breach);
        }
    }

    /// The stream is not ours alone.
    fn breached(&mut self, breach: &Breach) {
        let destination = self.task.config.name.as_str();
        let stream = self.facts.stream.as_str();
        match breach {
            Breach::Intruded(words) => {
                tracing::warn!(
                    destination,
                    "stream `{stream}` goes on behind our last message ({words}): somebody else \
                     writes it, which `exclusive` says nobody does, or one of ours came late. Nothing \
                     is lost, but each such message stops the flow: find out who it is (a replay is \
                     one), or set `exclusive = false`"
                );
                if self.task.intruders.noticed(words, Instant::now()) {
                    self.look_at = Instant::now();
                }
            }
            Breach::Overtaken(seq) => tracing::error!(
                destination,
                "message {seq} of stream `{stream}` was stored, and one that was sent before it was \
                 not: somebody else's took its place. If both are of one run, they are out of order"
            ),
        }
    }

    async fn follow(&mut self, step: Step) -> Result<(), Failure> {
        match step {
            Step::Nothing => {}
            Step::End { subject, reply } => self.link.publish(&subject, &reply, "", b""),
            Step::Settled(settled) => self.settle(settled).await,
            Step::Answered(answers) => self.answered(answers),
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
            self.telling.answers(&self.task.config.name, &answers, Instant::now());
            self.task.report(Report::Answers(answers));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.pipe.deadline(self.task.config.ack_timeout)
    }

    fn expire(&mut self, now: Instant) -> Result<(), Failure> {
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return Ok(());
        }
        // What waits to be sent is given up with the connection: later it would be too late.
        if !self.link.has_room() {
            let within = self.task.config.ack_timeout;
            let detail =
                format!("no answer within {within:?}, and the connection takes no more bytes");
            return Err(Failure::new(Kind::BrokerUnreachable, detail));
        }
        let answers = self.pipe.expire(now, self.task.config.ack_timeout);
        self.answered(answers);
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

    /// Reads the stream's configuration again. The new facts, when they are others and everything
    /// is answered.
    async fn look(&mut self) -> Result<Option<StreamFacts>, Failure> {
        self.look_at = Instant::now() + LOOK_EVERY;
        let facts = read_facts(self.link, &self.task.config).await;
        match facts.map(|facts| self.task.intruders.temper(facts, Instant::now())) {
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
        self.answers.extend(self.pipe.disconnect(Instant::now()));
        let queued: Vec<_> = self.queue.drain(..).map(|shipment| shipment.attempt).collect();
        self.not_sent(queued);
        self.flush_answers();
    }
}

fn error_of(forbidden: &Forbidden) -> ServerError {
    ServerError::undelivered(forbidden.words.clone())
}

#[cfg(test)]
mod tests;
