//! Resume: reads which of our messages a stream holds above a floor, from the stream itself.
//!
//! The end is the last message under our filter as the leader's MSG.GET knows it, and the reader
//! goes on until it got there: a consumer's "nothing pending" can be a lagging peer's view. The
//! reader is an ephemeral consumer, headers only, without acknowledgements; its numbers must come
//! without a gap, otherwise it starts again behind the last message it saw.
//!
//! A stream that ends below what was known of it, or has another message where our newest was, is
//! refused: it lost its tail. The result says how far was read, and
//! not how far the stream reaches: two questions can be answered by two servers that both think
//! that they lead.
//!
//! On a stream of retention `interest` the reader is one more consumer, which takes nothing from
//! the others; what they have all consumed is not found. On a work queue the server allows no
//! reader beside them: nothing is read, and only the dedupe window prevents copies.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::json;
use std::time::Duration;
use tokio::time::timeout;

use super::connect::{AskError, Link};
use super::facts::StreamInfo;
use super::nats::Delivery;
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::message::{Envelope, Headers, parse_identity};
use crate::relay::outcome::{Found, ReadFrom, Resumed, Retention};

/// How often an answer that can't be right is asked for again, and how long between: a deposed
/// leader notices within some seconds.
const TRIES: u32 = 10;
/// On several servers a leader that lost its followers notices after ten seconds; until then it may
/// answer that the stream is shorter than it is.
const TRIES_SHORTER: u32 = 40;
const TRY_AGAIN: Duration = Duration::from_millis(500);
/// How often the last message of ours is asked for again when the stream goes on behind it, and
/// how long between. What follows is mostly somebody else's; but a deposed leader does not have our
/// newest messages, and hears from the next one within a second.
const ASK_AGAIN: u32 = 3;
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// Messages per request to the consumer.
const PULL: u64 = 1_000;
/// A request to the consumer ends after this long without a message.
const PULL_EXPIRES: Duration = Duration::from_secs(2);
/// Requests in a row without a message, after which another consumer is tried.
const EMPTY_PULLS: u32 = 5;
/// Our own patience with one, longer than the server's.
const PULL_PATIENCE: Duration = Duration::from_secs(5);
/// The server removes a consumer that nobody asks.
const CONSUMER_LIFE: Duration = Duration::from_secs(10);
/// A consumer's words for a request that ends without all messages that it asked for.
const NOTHING_FOUND: u16 = 404;
const EXPIRED: u16 = 408;
/// JetStream's "no message found".
const NO_MESSAGE: u64 = 10037;

/// What was read, and how far the stream reached before: everything of ours up to there is known.
/// Reading may have gone on behind it, and a message of somebody else may be its last.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) resumed: Resumed,
    pub(super) reached: u64,
}

/// Reads the stream from the floor to its end.
pub(super) async fn resume(
    link: &Link,
    config: &DestinationConfig,
    envelope: &Envelope,
    from: &ReadFrom,
) -> Result<Read, Failure> {
    let filter = config.subject.filter_subject();
    let mut reader = Reader {
        link,
        config,
        envelope,
        from,
        filter,
        created: String::new(),
        found: Vec::new(),
        read_to: 0,
        reached: 0,
        replicated: false,
    };
    let mut tries = 0;
    loop {
        tries += 1;
        match reader.read_all().await {
            Ok(()) => {
                let Reader { created, found, read_to: last_seq, reached, .. } = reader;
                return Ok(Read { resumed: Resumed { created, last_seq, found }, reached });
            }
            Err(Trouble::Final(failure)) => return Err(failure),
            Err(Trouble::Again(failure)) if tries >= reader.patience(&failure) => {
                return Err(failure);
            }
            Err(Trouble::Again(_)) => tokio::time::sleep(TRY_AGAIN).await,
        }
    }
}

/// What is at a stream sequence.
pub(super) enum Place {
    /// Nothing, or nothing any more.
    Empty,
    /// A message, with its id if it has one.
    Message(Option<String>),
}

/// What the leader has at a stream sequence.
pub(super) async fn message_at(link: &Link, stream: &str, seq: u64) -> Result<Place, AskError> {
    let verb = format!("STREAM.MSG.GET.{stream}");
    match link.ask::<Got>(&verb, Some(json!({ "seq": seq }))).await {
        Ok(got) => Ok(Place::Message(got.message.message_id())),
        Err(AskError::Refused(error)) if error.err_code == NO_MESSAGE => Ok(Place::Empty),
        Err(error) => Err(error),
    }
}

/// The message id that the leader has at a stream sequence, if there is a message.
pub(super) async fn message_id_at(
    link: &Link,
    stream: &str,
    seq: u64,
) -> Result<Option<String>, AskError> {
    match message_at(link, stream, seq).await? {
        Place::Message(id) => Ok(id),
        Place::Empty => Ok(None),
    }
}

/// Sequence of the last message under a filter, as the leader knows it.
pub(super) async fn last_of(
    link: &Link,
    stream: &str,
    filter: &str,
) -> Result<Option<u64>, AskError> {
    let verb = format!("STREAM.MSG.GET.{stream}");
    match link.ask::<Got>(&verb, Some(json!({ "last_by_subj": filter }))).await {
        Ok(got) => Ok(Some(got.message.seq)),
        Err(AskError::Refused(error)) if error.err_code == NO_MESSAGE => Ok(None),
        Err(error) => Err(error),
    }
}

/// Creates the ephemeral reader of the destination's subjects from a sequence on; its name.
pub(super) async fn create_consumer(
    link: &Link,
    config: &DestinationConfig,
    start: u64,
    retention: Retention,
) -> Result<String, AskError> {
    let name = consumer_name();
    let stream = &config.stream;
    let create = json!({
        "stream_name": stream,
        "action": "create",
        "config": {
            "name": name,
            "description": format!("outboxd {} reads back what it published", config.name),
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": config.subject.filter_subject(),
            "headers_only": true,
            "mem_storage": true,
            // One is enough, but with interest it must be the stream's number, which is 0.
            "num_replicas": u8::from(retention == Retention::Limits),
            "inactive_threshold": nanos(CONSUMER_LIFE),
        },
    });
    let verb = format!("CONSUMER.CREATE.{stream}.{name}");
    link.ask::<serde_json::Value>(&verb, Some(create)).await?;
    Ok(name)
}

/// A name that no other reader has.
pub(super) fn consumer_name() -> String {
    format!("outboxd-{}", uuid::Uuid::new_v4().simple())
}

#[derive(Deserialize)]
struct Got {
    message: Stored,
}

#[derive(Deserialize)]
struct Stored {
    seq: u64,
    hdrs: Option<String>,
}

impl Stored {
    /// `Nats-Msg-Id` of the stored header block, which comes in base64.
    fn message_id(&self) -> Option<String> {
        let block = BASE64_STANDARD.decode(self.hdrs.as_deref()?).ok()?;
        Headers::of(&block).get("Nats-Msg-Id").map(ToOwned::to_owned)
    }
}

enum Trouble {
    Again(Failure),
    Final(Failure),
}

impl From<AskError> for Trouble {
    fn from(error: AskError) -> Trouble {
        let again =
            matches!(&error, AskError::NoResponders | AskError::Silence | AskError::Unreadable(_))
                || matches!(&error, AskError::Refused(error) if error.code >= 500);
        let failure = error.into_failure("reading the stream back");
        if again { Trouble::Again(failure) } else { Trouble::Final(failure) }
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble::Final(failure)
    }
}

struct Reader<'a> {
    link: &'a Link,
    config: &'a DestinationConfig,
    envelope: &'a Envelope,
    from: &'a ReadFrom,
    filter: String,
    created: String,
    found: Vec<Found>,
    /// Everything up to here is in `found`.
    read_to: u64,
    /// Where the stream ended when this try began.
    reached: u64,
    /// Has the stream several replicas?
    replicated: bool,
}

impl Reader<'_> {
    async fn read_all(&mut self) -> Result<(), Trouble> {
        let info: StreamInfo =
            self.link.ask(&format!("STREAM.INFO.{}", self.config.stream), None).await?;
        self.replicated = info.config.num_replicas > 1;
        self.reached = info.state.last_seq;
        if self.created != info.created {
            // Replaced since the last try: what was read is of another stream.
            self.created.clone_from(&info.created);
            self.found.clear();
            self.read_to = 0;
        }
        let same = self.from.floor.created == info.created;
        let (floor, known) = if same { (self.from.floor.seq, self.from.known) } else { (0, 0) };
        if info.state.last_seq < known {
            let detail = format!(
                "stream `{}` ends at {}, and {known} was acknowledged before",
                self.config.stream, info.state.last_seq
            );
            return Err(Trouble::Again(Failure::new(Kind::StreamShorter, detail)));
        }
        if same {
            self.newest_is_there(info.state.last_seq).await?;
        }
        self.read_to = self.read_to.max(floor);
        let retention = Retention::of(&info.config.retention);
        if retention == Retention::WorkQueue {
            return Ok(());
        }
        match self.end_of_ours(&info).await? {
            Some(end) if end > self.read_to => self.read_until(end, retention).await,
            _ => Ok(()),
        }
    }

    /// A stream that was put back to an older state, and went on since, has another message where
    /// ours was. One that is absent was removed by a limit, say.
    async fn newest_is_there(&self, last_seq: u64) -> Result<(), Trouble> {
        let Some(newest) = self.from.newest.as_ref().filter(|one| one.seq <= last_seq) else {
            return Ok(());
        };
        let stream = &self.config.stream;
        match message_at(self.link, stream, newest.seq).await? {
            Place::Message(id) if id.as_ref() != Some(&newest.id) => {
                let detail = format!(
                    "stream `{stream}` has another message at {}, where {} was acknowledged",
                    newest.seq, newest.id
                );
                Err(Trouble::Again(Failure::new(Kind::StreamShorter, detail)))
            }
            Place::Message(_) | Place::Empty => Ok(()),
        }
    }

    fn patience(&self, failure: &Failure) -> u32 {
        if self.replicated && failure.kind == Kind::StreamShorter { TRIES_SHORTER } else { TRIES }
    }

    /// Sequence of the last message of ours. On several servers it is asked for until it is where
    /// the stream ends or time has shown that somebody else's follow.
    async fn end_of_ours(&self, info: &StreamInfo) -> Result<Option<u64>, Trouble> {
        let reached = info.state.last_seq;
        let mut end = self.last_of_ours().await?;
        if info.config.num_replicas > 1 && self.read_to < reached {
            for _ in 0..ASK_AGAIN {
                if end >= Some(reached) {
                    break;
                }
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
                end = end.max(self.last_of_ours().await?);
            }
        }
        Ok(end)
    }

    async fn last_of_ours(&self) -> Result<Option<u64>, Trouble> {
        Ok(last_of(self.link, &self.config.stream, &self.filter).await?)
    }

    async fn read_until(&mut self, end: u64, retention: Retention) -> Result<(), Trouble> {
        let stream = &self.config.stream;
        let start = self.read_to + 1;
        let name = create_consumer(self.link, self.config, start, retention).await?;
        let (inbox, mut answers) = self.link.open_inbox();
        let next = format!("CONSUMER.MSG.NEXT.{stream}.{name}");
        let pull = json!({ "batch": PULL, "expires": nanos(PULL_EXPIRES) });
        let mut consumer_seq = 0;
        let mut empty = 0;
        for request in 0_u64.. {
            self.link.tell(&next, &format!("{inbox}.{request}"), &pull);
            let mut left = PULL;
            while left > 0 {
                let message = tokio::select! {
                    biased;
                    message = timeout(PULL_PATIENCE, answers.next()) => message,
                    failure = self.link.ended() => return Err(failure.into()),
                };
                let Ok(Some(message)) = message else {
                    return Err(self.again("the consumer fell silent"));
                };
                if let Some(status) = message.status() {
                    self.end_of_request(status, end).await?;
                    empty = if left == PULL { empty + 1 } else { 0 };
                    if empty >= EMPTY_PULLS {
                        return Err(self.again("the consumer does not get to the end"));
                    }
                    break;
                }
                let Some((stream_seq, seq)) = delivery(&message) else {
                    return Err(self.again("a message without its sequence"));
                };
                if seq != consumer_seq + 1 {
                    return Err(self.again("a message is missing between two"));
                }
                consumer_seq = seq;
                left -= 1;
                self.take(&message, stream_seq);
                if self.read_to >= end {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, message: &Delivery, stream_seq: u64) {
        self.read_to = stream_seq;
        let found = parse_identity(message.headers(), self.envelope, stream_seq);
        // A stream that was never read, or replaced, can hold millions that are long recorded. What
        // was sent from a dead letter is as old as its event, and may be recorded nowhere; and a later
        // generation than ours is to be told, wherever it committed.
        let (confirmable, ours) = (self.from.confirmable, self.envelope.generation);
        self.found.extend(found.filter(|it| {
            let is_open = it.commit_lsn.is_none_or(|lsn| lsn >= confirmable);
            is_open || it.letter.is_some() || it.generation > ours
        }));
    }

    /// A request ended before the message we wait for: that message may have been removed since.
    async fn end_of_request(&self, status: u16, end: u64) -> Result<(), Trouble> {
        if status != NOTHING_FOUND && status != EXPIRED {
            return Err(self.again(&format!("the consumer answered with status {status}")));
        }
        match self.last_of_ours().await? {
            Some(last) if last >= end => Ok(()),
            _ => Err(self.again("the last message went away while it was looked for")),
        }
    }

    fn again(&self, what: &str) -> Trouble {
        let detail =
            format!("stream `{}` read back from {}: {what}", self.config.stream, self.read_to);
        Trouble::Again(Failure::new(Kind::StreamBusy, detail))
    }
}

/// Stream and consumer sequence of a delivery, from its reply subject: of nine tokens as
/// `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>`, or of
/// eleven and more with domain and account behind `ACK`.
fn delivery(message: &Delivery) -> Option<(u64, u64)> {
    let tokens: Vec<&str> = message.reply().split('.').collect();
    let at = if tokens.len() == 9 { 5 } else { 7 };
    Some((tokens.get(at)?.parse().ok()?, tokens.get(at + 1)?.parse().ok()?))
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_from_a_stored_block() {
        let stored = Stored {
            seq: 1,
            hdrs: Some("TkFUUy8xLjANCk5hdHMtTXNnLUlkOiBhLWI6Yw0KWDogeQ0KDQo=".to_owned()),
        };
        assert_eq!(stored.message_id().as_deref(), Some("a-b:c"));
        assert_eq!(Stored { seq: 1, hdrs: None }.message_id(), None);
        assert_eq!(Stored { seq: 1, hdrs: Some("!".to_owned()) }.message_id(), None);
    }

    #[test]
    fn sequences_are_read_from_both_forms_of_the_reply_subject() {
        let message = Delivery::with_reply;
        let short = message("$JS.ACK.EVENTS.c.1.17.4.1700000000000000000.0");
        assert_eq!(delivery(&short), Some((17, 4)));
        let long = message("$JS.ACK.hub.ACC.EVENTS.c.1.17.4.1700000000000000000.0.x");
        assert_eq!(delivery(&long), Some((17, 4)));
        assert_eq!(delivery(&message("_INBOX.a")), None);
    }
}
