//! One event in the stream, for `outboxd trace`: its message between two sequences, and what each
//! durable consumer has done about it. Reads headers only, and a bounded number of messages.

use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;
use tokio::time::timeout;

use super::connect::Link;
use super::facts::{StreamInfo, covers};
use super::nats::Delivery;
use super::resume::{create_consumer, last_of, message_id_at};
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::message::{Envelope, parse_identity, replay_of};
use crate::relay::outcome::Retention;

/// Messages that are read in one go.
const PULL: u64 = 500;
/// A request ends after this long without a message, and our patience with it.
const PULL_EXPIRES: Duration = Duration::from_secs(1);
const PULL_PATIENCE: Duration = Duration::from_secs(5);
/// Consumers of one answer, at least: the server sends up to 256, and never none when there are more.
const PAGES_MAX: u32 = 1_000;

/// The stream as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// When it was made.
    pub created: String,
    /// Lowest sequence that is stored.
    pub first_seq: u64,
    /// Highest sequence.
    pub last_seq: u64,
}

/// A message of the event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Seen {
    /// Stream sequence.
    pub stream_seq: u64,
    /// When the server stored it, nanoseconds since 1970-01-01 UTC.
    #[serde(skip)]
    pub stored_at_nanos: i64,
    /// Subject.
    pub subject: String,
    /// `Outbox-Seq`.
    pub seq: i64,
    /// The event's id, from the message id.
    pub event_id: String,
    /// `Outbox-Lsn`.
    pub commit_lsn: Option<String>,
    /// `Outbox-Replay`.
    pub replay: Option<String>,
}

/// The event that is looked for; what is not known may be anything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Its number.
    pub seq: Option<i64>,
    /// Its identity.
    pub id: Option<String>,
}

/// What came of looking for them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// In the order of the stream.
    pub seen: Vec<Seen>,
    /// Not all of the range was looked at.
    pub cut: bool,
}

/// Where a consumer stands with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// Its filter does not take the subject.
    NotForIt,
    /// It was made later, and begins behind the message.
    BeginsLater,
    /// Not delivered yet.
    Pending,
    /// Delivered. Whether it was acknowledged the server does not say for a single message: others
    /// before it are not.
    Delivered,
    /// Delivered; the consumer acknowledges nothing.
    DeliveredWithoutAcks,
    /// Acknowledged, or given up.
    Acked,
}

/// A durable consumer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Consumer {
    /// Name.
    pub name: String,
    /// Where it stands with the message.
    pub standing: Standing,
    /// Messages delivered and not acknowledged, of all.
    pub ack_pending: u64,
    /// Messages not delivered yet, of all.
    pub pending: u64,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    total: u64,
    #[serde(default)]
    consumers: Option<Vec<Info>>,
}

#[derive(Deserialize)]
struct Info {
    name: String,
    created: String,
    config: Config,
    delivered: Place,
    ack_floor: Place,
    #[serde(default)]
    num_ack_pending: u64,
    #[serde(default)]
    num_pending: u64,
}

#[derive(Deserialize)]
struct Config {
    durable_name: Option<String>,
    #[serde(default)]
    ack_policy: String,
    #[serde(default)]
    deliver_policy: String,
    #[serde(default)]
    filter_subject: String,
    #[serde(default)]
    filter_subjects: Vec<String>,
}

#[derive(Deserialize)]
struct Place {
    #[serde(default)]
    stream_seq: u64,
}

/// A connection that looks.
pub struct Looker<'a> {
    link: Link,
    config: &'a DestinationConfig,
}

impl<'a> Looker<'a> {
    /// Connects with the destination's credentials.
    pub async fn connect(config: &'a DestinationConfig) -> Result<Looker<'a>, Failure> {
        super::provide_tls();
        Ok(Looker { link: Link::connect(config).await?, config })
    }

    /// Where the stream begins and ends.
    pub async fn extent(&self) -> Result<Extent, Failure> {
        let info = self.info().await?;
        let state = info.state;
        Ok(Extent { created: info.created, first_seq: state.first_seq, last_seq: state.last_seq })
    }

    async fn info(&self) -> Result<StreamInfo, Failure> {
        let verb = format!("STREAM.INFO.{}", self.config.stream);
        let info = self.link.ask(&verb, None).await;
        info.map_err(|error| error.into_failure(&format!("stream `{}`", self.config.stream)))
    }

    /// The id of the message at a sequence, when there is one.
    pub async fn message_id(&self, seq: u64) -> Result<Option<String>, Failure> {
        let id = message_id_at(&self.link, &self.config.stream, seq).await;
        id.map_err(|error| error.into_failure("looking for a message"))
    }

    /// The messages of the event from one sequence to another, at most so many of the destination's
    /// looked at.
    pub async fn messages(
        &self,
        envelope: &Envelope,
        event: &Wanted,
        (from, to): (u64, u64),
        most: u64,
    ) -> Result<Look, Failure> {
        let info = self.info().await?;
        let retention = Retention::of(&info.config.retention);
        let fault = |error: super::connect::AskError| error.into_failure("looking for the message");
        let filter = self.config.subject.filter_subject();
        let last = last_of(&self.link, &self.config.stream, &filter).await.map_err(fault)?;
        let to = last.unwrap_or(0).min(to);
        let from = from.max(info.state.first_seq).max(1);
        let mut look = Look::default();
        // The server lets only its workers read a work queue.
        if retention == Retention::WorkQueue || to < from {
            look.cut = retention == Retention::WorkQueue;
            return Ok(look);
        }
        let name =
            create_consumer(&self.link, self.config, from, retention).await.map_err(fault)?;
        let (inbox, mut answers) = self.link.open_inbox();
        let verb = format!("CONSUMER.MSG.NEXT.{}.{name}", self.config.stream);
        let expires = u64::try_from(PULL_EXPIRES.as_nanos()).unwrap_or(u64::MAX);
        let pull = json!({ "batch": PULL, "expires": expires });
        let mut looked_at = 0;
        for request in 0_u64.. {
            self.link.tell(&verb, &format!("{inbox}.{request}"), &pull);
            for _ in 0..PULL {
                let message = tokio::select! {
                    biased;
                    message = timeout(PULL_PATIENCE, answers.next()) => message,
                    failure = self.link.ended() => return Err(failure),
                };
                let message = message.ok().flatten().filter(|message| message.status().is_none());
                // The end of a request, or silence: what is not shown by now is not to be seen.
                let Some((place, at, message)) = message.and_then(delivery) else {
                    look.cut = true;
                    return Ok(look);
                };
                looked_at += 1;
                look.seen.extend(of_event(&message, envelope, event, place, at));
                if place >= to {
                    return Ok(look);
                }
                if looked_at >= most {
                    look.cut = true;
                    return Ok(look);
                }
            }
        }
        Ok(look)
    }

    /// Every durable consumer of the stream, and where it stands with a message.
    pub async fn consumers(&self, message: &Seen) -> Result<Vec<Consumer>, Failure> {
        let verb = format!("CONSUMER.LIST.{}", self.config.stream);
        let mut consumers = Vec::new();
        let mut offset = 0;
        for _ in 0..PAGES_MAX {
            let page = self.link.ask::<List>(&verb, Some(json!({ "offset": offset }))).await;
            let page =
                page.map_err(|error| error.into_failure("listing the stream's consumers"))?;
            let of_page = page.consumers.unwrap_or_default();
            let count = u64::try_from(of_page.len()).unwrap_or(u64::MAX);
            let durable = of_page.into_iter().filter(|info| info.config.durable_name.is_some());
            consumers.extend(durable.map(|info| Consumer {
                standing: standing(&info, message),
                name: info.name,
                ack_pending: info.num_ack_pending,
                pending: info.num_pending,
            }));
            offset += count;
            if count == 0 || offset >= page.total {
                return Ok(consumers);
            }
        }
        Err(Failure::new(Kind::BrokerJetStream, "the list of consumers has no end"))
    }
}

fn of_event(
    message: &Delivery,
    envelope: &Envelope,
    event: &Wanted,
    stream_seq: u64,
    stored_at_nanos: i64,
) -> Option<Seen> {
    let headers = message.headers();
    let replay = replay_of(headers);
    let of_job = Envelope { replay: replay.clone(), ..envelope.clone() };
    let found = parse_identity(headers, &of_job, stream_seq)?;
    let event_id = found.id.to_string();
    let is_it = event.seq.is_none_or(|seq| seq == found.seq)
        && event.id.as_ref().is_none_or(|id| *id == event_id);
    is_it.then(|| Seen {
        stream_seq,
        seq: found.seq,
        stored_at_nanos,
        subject: message.subject().to_owned(),
        event_id,
        commit_lsn: found.commit_lsn.map(|lsn| lsn.to_string()),
        replay,
    })
}

/// Stream sequence and time of a delivery, from its reply subject; see `resume`.
fn delivery(message: Delivery) -> Option<(u64, i64, Delivery)> {
    let tokens: Vec<&str> = message.reply().split('.').collect();
    let at = if tokens.len() == 9 { 5 } else { 7 };
    let (seq, time) = (tokens.get(at)?.parse().ok()?, tokens.get(at + 2)?.parse().ok()?);
    Some((seq, time, message))
}

fn standing(info: &Info, message: &Seen) -> Standing {
    let Config { filter_subject, filter_subjects, .. } = &info.config;
    let mut filters = filter_subjects.iter().chain([filter_subject]).filter(|one| !one.is_empty());
    let takes_all = filter_subject.is_empty() && filter_subjects.is_empty();
    if !takes_all && !filters.any(|filter| covers(filter, &message.subject)) {
        return Standing::NotForIt;
    }
    let made = info.created.parse::<jiff::Timestamp>().map(jiff::Timestamp::as_nanosecond);
    let made_later = made.is_ok_and(|made| made > i128::from(message.stored_at_nanos));
    if made_later && info.config.deliver_policy != "all" {
        return Standing::BeginsLater;
    }
    match info.config.ack_policy.as_str() {
        _ if info.delivered.stream_seq < message.stream_seq => Standing::Pending,
        "none" => Standing::DeliveredWithoutAcks,
        _ if info.ack_floor.stream_seq >= message.stream_seq => Standing::Acked,
        _ => Standing::Delivered,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Seen {
        Seen {
            stream_seq: 10,
            stored_at_nanos: 1_700_000_000_000_000_000,
            subject: "events.order.paid".to_owned(),
            seq: 1,
            event_id: "x".to_owned(),
            commit_lsn: None,
            replay: None,
        }
    }

    fn with(config: &str, delivered: u64, acked: u64) -> Standing {
        let info = format!(
            r#"{{"name":"c","created":"2023-11-14T22:13:21Z","config":{{"durable_name":"c",{config}}},
                "delivered":{{"consumer_seq":1,"stream_seq":{delivered}}},
                "ack_floor":{{"consumer_seq":1,"stream_seq":{acked}}}}}"#
        );
        standing(&serde_json::from_str(&info).unwrap(), &message())
    }

    #[test]
    fn a_consumer_stands_before_at_or_behind_a_message() {
        let all = r#""ack_policy":"explicit","deliver_policy":"all""#;
        assert_eq!(with(all, 9, 9), Standing::Pending);
        assert_eq!(with(all, 10, 9), Standing::Delivered);
        assert_eq!(with(all, 12, 10), Standing::Acked);
        assert_eq!(
            with(r#""ack_policy":"none","deliver_policy":"all""#, 12, 0),
            Standing::DeliveredWithoutAcks
        );
        let new = r#""ack_policy":"explicit","deliver_policy":"new""#;
        assert_eq!(with(new, 12, 12), Standing::BeginsLater);
        let filter = format!(r#"{all},"filter_subject":"events.order.*""#);
        assert_eq!(with(&filter, 9, 9), Standing::Pending);
        let others = format!(r#"{all},"filter_subjects":["events.stock.>","other"]"#);
        assert_eq!(with(&others, 12, 12), Standing::NotForIt);
    }
}
