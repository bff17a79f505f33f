//! The broker's side of `init` and `check`: what is there, what is missing, what must be allowed.

use serde_json::json;
use std::time::Duration;
use tokio::time::timeout;

use super::ack::Reply;
use super::connect::{AskError, Link};
use super::facts::{self, BATCH_SINCE, StreamInfo, version};
use super::login::REQUEST_TIMEOUT;
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::relay::outcome::StreamFacts;

pub use super::connect::ServerFacts;

/// JetStream's default dedupe window.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);
/// The probe's word in a subject, where the configuration names no kind.
const PROBE: &str = "outboxd-probe";

/// A connection for commands.
pub struct Broker {
    link: Link,
    config: DestinationConfig,
    /// What a stream that is made stores: the subjects of every destination that writes it.
    subjects: Vec<String>,
}

/// A stream as it is configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamView {
    /// Subjects it stores.
    pub subjects: Vec<String>,
    /// `limits`, `interest` or `workqueue`. Only `limits` lets a restart see what is stored.
    pub retention: String,
    /// `file` or `memory`.
    pub storage: String,
    /// `old` or `new`.
    pub discard: String,
    /// Replicas.
    pub replicas: u16,
    /// Dedupe window.
    pub duplicate_window: Duration,
    /// Largest message that server and stream accept, headers counted.
    pub max_message_bytes: usize,
    /// Takes batches.
    pub allow_batched: bool,
    /// Stores everything the destination's template can render.
    pub covers_template: bool,
}

/// What is found at a destination.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// The server we are connected to.
    pub server: ServerFacts,
    /// `None` when there is no such stream.
    pub stream: Option<StreamView>,
    /// What the relay would work with, or why it would not start.
    pub usable: Result<StreamFacts, Failure>,
}

/// Result of a publish that no stream stores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// Allowed, and the stream's server answers.
    Allowed,
    /// The user may not publish there, or not hear the answer; the server's words.
    Forbidden(String),
    /// Nothing listens on this subject.
    NoStream(String),
    /// No answer in time.
    Silent,
}

/// What a NATS user of the relay needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permissions {
    /// Subjects to publish to.
    pub publish: Vec<String>,
    /// Subjects to subscribe to.
    pub subscribe: Vec<String>,
    /// Further subjects to publish to, for `init --create-streams` only.
    pub publish_for_init: Vec<String>,
}

/// Connects with the configuration's credentials.
pub async fn connect(config: &DestinationConfig) -> Result<Broker, Failure> {
    super::provide_tls();
    let subjects = vec![config.subject.filter_subject()];
    Ok(Broker { link: Link::connect(config).await?, config: config.clone(), subjects })
}

impl Broker {
    /// The server we are connected to.
    pub fn server(&self) -> ServerFacts {
        self.link.server_facts()
    }

    /// Looks at the stream. Whether a single server syncs each message to disk can't be seen from
    /// here: by default it does so every two minutes.
    pub async fn inspect(&self) -> Result<Inspection, Failure> {
        let server = self.link.server_facts();
        let what = format!("stream `{}`", self.config.stream);
        let verb = format!("STREAM.INFO.{}", self.config.stream);
        let info: StreamInfo = match self.link.ask(&verb, None).await {
            Ok(info) => info,
            Err(error) => {
                let failure = error.into_failure(&what);
                if failure.kind != Kind::StreamMissing {
                    return Err(failure);
                }
                return Ok(Inspection { server, stream: None, usable: Err(failure) });
            }
        };
        let usable = facts::facts(&info, &server, &self.config);
        let filter = self.config.subject.filter_subject();
        let nanos = u64::try_from(info.config.duplicate_window).unwrap_or(0);
        let stream = StreamView {
            covers_template: info.config.subjects.iter().any(|own| facts::covers(own, &filter)),
            max_message_bytes: facts::max_message_bytes(&info.config, &server),
            replicas: info.config.num_replicas.max(1),
            duplicate_window: Duration::from_nanos(nanos),
            allow_batched: info.config.allow_batched,
            subjects: info.config.subjects,
            retention: info.config.retention,
            storage: info.config.storage,
            discard: info.config.discard,
        };
        Ok(Inspection { server, stream: Some(stream), usable })
    }

    /// Another destination writes the stream, too: one that is made stores its subjects as well.
    pub fn share(&mut self, other: &DestinationConfig) {
        let subject = other.subject.filter_subject();
        // A server refuses a subject that another one of the stream covers.
        if !self.subjects.iter().any(|own| facts::covers(own, &subject)) {
            self.subjects.retain(|own| !facts::covers(&subject, own));
            self.subjects.push(subject);
        }
    }

    /// The configuration that [`Broker::create_stream`] would send.
    pub fn stream_plan(&self) -> serde_json::Value {
        let create = &self.config.create;
        let window = create.duplicate_window.unwrap_or(DUPLICATE_WINDOW);
        let window = create.max_age.map_or(window, |age| window.min(age));
        let mut plan = json!({
            "name": self.config.stream,
            "subjects": self.subjects,
            "retention": "limits",
            "storage": "file",
            "num_replicas": create.replicas.max(1),
            "max_bytes": create.max_bytes.unwrap_or(-1),
            "max_age": nanos(create.max_age.unwrap_or(Duration::ZERO)),
            "duplicate_window": nanos(window),
        });
        // An older server may refuse a setting that it does not know.
        if version(&self.server().version).is_some_and(|version| version >= BATCH_SINCE)
            && let Some(plan) = plan.as_object_mut()
        {
            plan.insert("allow_batched".to_owned(), json!(true));
        }
        plan
    }

    /// Creates the stream. An existing one of the same configuration is left as it is; one of
    /// another configuration is a failure.
    pub async fn create_stream(&self) -> Result<(), Failure> {
        let verb = format!("STREAM.CREATE.{}", self.config.stream);
        let answer = self.link.ask::<serde_json::Value>(&verb, Some(self.stream_plan())).await;
        let what = format!("creating stream `{}`", self.config.stream);
        answer.map(drop).map_err(|error| {
            // Another stream has the subjects already.
            let overlap = matches!(&error, AskError::Refused(refused) if refused.err_code == 10065);
            let failure = error.into_failure(&what);
            if overlap { Failure { kind: Kind::StreamSubjects, ..failure } } else { failure }
        })
    }

    /// Publishes to a subject of the template what no stream stores, since it names a stream that
    /// can't be there: the refusal shows that publishing is allowed. Ends the connection's use
    /// when it is not.
    pub async fn probe(&self) -> Result<Probe, Failure> {
        let kinds = &self.config.filter.kinds;
        let word = kinds.iter().find(|kind| !kind.contains('*')).map_or(PROBE, String::as_str);
        let subject = self.config.subject.sample(word);
        let (inbox, mut answers) = self.link.open_inbox();
        let head = format!("NATS/1.0\r\nNats-Expected-Stream: {PROBE}\r\n\r\n");
        self.link.publish(&subject, &format!("{inbox}.probe"), &head, b"");
        let answer = tokio::select! {
            biased;
            answer = timeout(REQUEST_TIMEOUT, answers.next()) => answer,
            forbidden = self.link.forbidden() => return Ok(Probe::Forbidden(forbidden.words)),
            failure = self.link.ended() => {
                return if failure.kind == Kind::BrokerPermission {
                    Ok(Probe::Forbidden(failure.detail))
                } else {
                    Err(failure)
                };
            }
        };
        let Ok(Some(answer)) = answer else { return Ok(Probe::Silent) };
        if answer.status().is_some() {
            return Ok(Probe::NoStream(subject));
        }
        let refused = matches!(Reply::parse(&answer.payload), Reply::Refused(_));
        Ok(if refused { Probe::Allowed } else { Probe::Silent })
    }
}

/// Everything the relay publishes and subscribes to at this destination.
pub fn permissions(config: &DestinationConfig) -> Permissions {
    let api =
        config.js_domain.as_ref().map_or("$JS.API".to_owned(), |own| format!("$JS.{own}.API"));
    let stream = &config.stream;
    let inbox = config.inbox_prefix.as_deref().unwrap_or("_INBOX");
    Permissions {
        publish: vec![
            config.subject.filter_subject(),
            format!("{api}.STREAM.INFO.{stream}"),
            format!("{api}.STREAM.MSG.GET.{stream}"),
            format!("{api}.CONSUMER.CREATE.{stream}.>"),
            format!("{api}.CONSUMER.MSG.NEXT.{stream}.>"),
        ],
        subscribe: vec![format!("{inbox}.>")],
        publish_for_init: vec![format!("{api}.STREAM.CREATE.{stream}")],
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
