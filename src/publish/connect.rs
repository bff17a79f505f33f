//! One connection to NATS: login, TLS, the inbox for answers, requests to the JetStream API.
//!
//! A connection is used until it breaks and never comes back: a client that reconnects by itself
//! drops what was written and sends what was queued, which is a gap followed by later messages.
//! async-nats can't be told not to reconnect, so that it gets one more address where nobody
//! listens: its only second try goes there, and the client ends.

use async_nats::client::traits::Publisher as _;
use async_nats::message::OutboundMessage;
use async_nats::{
    Client, Event, ReconnectToServer, RequestErrorKind, ServerAddr, ServerError as ServerWord,
    Subject, Subscriber,
};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::timeout;

use super::ack::ServerError;
use super::login::{REQUEST_TIMEOUT, connect_failure, is_about_login, options, shown, shuffled};
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};

/// The end of a session waits for this.
const ABANDON_WITHIN: Duration = Duration::from_millis(250);
/// Nobody can listen on port 0.
const NOWHERE: &str = "nats://127.0.0.1:0";

/// What has become of a connection.
#[derive(Debug, Clone, Default)]
struct Condition {
    closed: bool,
    /// The server's last complaint, e.g. an expired login.
    complaint: Option<String>,
    /// A subject that we may not use, and can't do without.
    violation: Option<String>,
}

/// A publish that the server did not let through, for its subject.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Forbidden {
    /// Which one.
    pub(super) subject: String,
    /// The server's words.
    pub(super) words: String,
}

/// An open connection.
pub(super) struct Link {
    client: Client,
    condition: watch::Receiver<Condition>,
    forbidden: Mutex<mpsc::UnboundedReceiver<Forbidden>>,
    api: String,
    server: String,
}

/// What the server says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFacts {
    /// Its version.
    pub version: String,
    /// Largest message, headers counted.
    pub max_payload: usize,
}

/// What every answer of the JetStream API may have.
#[derive(serde::Deserialize)]
struct AnswerHead {
    error: Option<ServerError>,
}

/// Why a request to the JetStream API has no answer to use.
#[derive(Debug)]
pub(super) enum AskError {
    /// The server answered with an error.
    Refused(ServerError),
    /// Nobody listens: JetStream is off, or its domain is another.
    NoResponders,
    /// No answer in time.
    Silence,
    /// The connection broke, or a permission is missing.
    Link(Failure),
    /// An answer that is not of the expected form.
    Unreadable(String),
}

impl AskError {
    /// The failure this is, when it was about the stream as a whole.
    pub(super) fn into_failure(self, what: &str) -> Failure {
        match self {
            AskError::Refused(error) => {
                let kind = match error.err_code {
                    10059 => Kind::StreamMissing,
                    10008 | 10118 | 10194 => Kind::StreamBusy,
                    10035 | 10039 | 10076 => Kind::BrokerJetStream,
                    _ => Kind::StreamBusy,
                };
                Failure::new(kind, format!("{what}: {error}"))
            }
            AskError::NoResponders => {
                Failure::new(Kind::BrokerJetStream, format!("{what}: nobody answers requests"))
            }
            AskError::Silence => {
                Failure::new(Kind::BrokerJetStream, format!("{what}: no answer in time"))
            }
            AskError::Link(failure) => failure,
            AskError::Unreadable(detail) => {
                Failure::new(Kind::BrokerJetStream, format!("{what}: {detail}"))
            }
        }
    }
}

impl Link {
    /// Connects to one of the servers, in random order.
    pub(super) async fn connect(config: &DestinationConfig) -> Result<Link, Failure> {
        let mut last = Failure::new(Kind::BrokerUnreachable, "`servers` is empty");
        for server in shuffled(&config.servers) {
            match Link::connect_to(config, server).await {
                Ok(link) => return Ok(link),
                // A refused login says more than an address that does not answer.
                Err(failure) if last.kind != Kind::BrokerLogin => last = failure,
                Err(_) => {}
            }
        }
        Err(last)
    }

    async fn connect_to(config: &DestinationConfig, server: &str) -> Result<Link, Failure> {
        let address: ServerAddr = server.parse().map_err(|error: std::io::Error| {
            Failure::new(Kind::BrokerUnreachable, format!("server `{}`: {error}", shown(server)))
        })?;
        let api = config
            .js_domain
            .as_ref()
            .map_or_else(|| "$JS.API".to_owned(), |domain| format!("$JS.{domain}.API"));
        let (conditions, condition) = watch::channel(Condition::default());
        let (forbidden_in, forbidden) = mpsc::unbounded_channel();
        let own_api = api.clone();
        let options = options(config, &address)?
            .event_callback(move |event| {
                match forbidden_message(&event, &own_api) {
                    // Without effect when the connection is given up.
                    Some(message) => forbidden_in.send(message).unwrap_or_default(),
                    None => conditions.send_modify(|condition| condition.note(event)),
                }
                std::future::ready(())
            })
            .reconnect_to_server_callback(only_once(address.clone()));
        let nowhere: ServerAddr = NOWHERE.parse().map_err(|error: std::io::Error| {
            Failure::new(Kind::Internal, format!("address `{NOWHERE}`: {error}"))
        })?;
        let client = options
            .connect(vec![address, nowhere])
            .await
            .map_err(|error| connect_failure(server, &error))?;
        let forbidden = Mutex::new(forbidden);
        Ok(Link { client, condition, forbidden, api, server: shown(server) })
    }

    /// What the server said about itself at connect.
    pub(super) fn server_facts(&self) -> ServerFacts {
        let info = self.client.server_info();
        ServerFacts { version: info.version, max_payload: info.max_payload }
    }

    /// Sends a message that wants an answer below an inbox.
    pub(super) async fn publish(&self, message: OutboundMessage) -> Result<(), Failure> {
        self.client.publish_message(message).await.map_err(|error| {
            self.broken().unwrap_or_else(|| {
                Failure::new(Kind::BrokerUnreachable, format!("{}: {error}", self.server))
            })
        })
    }

    /// Sends an empty message that wants an answer below an inbox.
    pub(super) async fn signal(&self, subject: Subject, reply: String) -> Result<(), Failure> {
        let message = OutboundMessage {
            subject,
            reply: Some(reply.into()),
            payload: Bytes::new(),
            headers: None,
        };
        self.publish(message).await
    }

    /// Asks the JetStream API. `verb` follows the API's prefix.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        verb: &str,
        body: Option<serde_json::Value>,
    ) -> Result<T, AskError> {
        let body = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let subject = format!("{}.{verb}", self.api);
        let mut condition = self.condition.clone();
        let request = timeout(REQUEST_TIMEOUT, self.client.request(subject, body));
        let answer = tokio::select! {
            biased;
            answer = request => answer,
            _ = condition.wait_for(|condition| condition.is_broken()) => {
                return Err(AskError::Link(self.broken_or_closed()));
            }
        };
        let message = match answer {
            Err(_) => return Err(AskError::Silence),
            Ok(Err(error)) => {
                return Err(match error.kind() {
                    RequestErrorKind::NoResponders => AskError::NoResponders,
                    RequestErrorKind::TimedOut => AskError::Silence,
                    RequestErrorKind::InvalidSubject
                    | RequestErrorKind::MaxPayloadExceeded
                    | RequestErrorKind::Other => AskError::Link(self.broken_or_closed()),
                });
            }
            Ok(Ok(message)) => message,
        };
        let unreadable = |error: serde_json::Error| AskError::Unreadable(error.to_string());
        let head: AnswerHead = serde_json::from_slice(&message.payload).map_err(unreadable)?;
        match head.error {
            Some(error) => Err(AskError::Refused(error)),
            None => serde_json::from_slice(&message.payload).map_err(unreadable),
        }
    }

    /// Sends a request of the JetStream API whose answers come below an inbox.
    pub(super) async fn tell(
        &self,
        verb: &str,
        reply: String,
        body: &serde_json::Value,
    ) -> Result<(), Failure> {
        let message = OutboundMessage {
            subject: format!("{}.{verb}", self.api).into(),
            reply: Some(reply.into()),
            payload: body.to_string().into(),
            headers: None,
        };
        self.publish(message).await
    }

    /// An inbox of its own, and what comes below it.
    pub(super) async fn open_inbox(&self) -> Result<(String, Subscriber), Failure> {
        let inbox = self.client.new_inbox();
        let answers = self
            .client
            .subscribe(format!("{inbox}.>"))
            .await
            .map_err(|_| self.broken_or_closed())?;
        Ok((inbox, answers))
    }

    /// Waits until the connection is of no more use, and says why.
    pub(super) async fn ended(&self) -> Failure {
        let mut condition = self.condition.clone();
        // An error here means that the client's tasks are gone, which is an end too.
        condition.wait_for(Condition::is_broken).await.map(drop).unwrap_or_default();
        self.broken_or_closed()
    }

    /// Waits for the next message, not of the JetStream API, that the server did not let through.
    pub(super) async fn forbidden(&self) -> Forbidden {
        match self.forbidden.lock().await.recv().await {
            Some(forbidden) => forbidden,
            // The client's tasks are gone, which `ended` tells.
            None => std::future::pending().await,
        }
    }

    /// Closes the connection with whatever is still unsent.
    pub(super) async fn abandon(&self) {
        // A client that is stuck in a full socket takes no such wish; it is dropped all the same.
        let closed = timeout(ABANDON_WITHIN, self.client.force_reconnect()).await;
        // Without effect when the client's task has ended.
        closed.unwrap_or(Ok(())).unwrap_or_default();
    }

    /// Why the connection is of no more use, if that is so.
    pub(super) fn broken(&self) -> Option<Failure> {
        let condition = self.condition.borrow();
        if let Some(violation) = &condition.violation {
            return Some(Failure::new(Kind::BrokerPermission, violation.clone()));
        }
        if !condition.closed {
            return None;
        }
        Some(match &condition.complaint {
            Some(complaint) if is_about_login(complaint) => {
                Failure::new(Kind::BrokerLogin, format!("{}: {complaint}", self.server))
            }
            Some(complaint) => Failure::new(
                Kind::BrokerUnreachable,
                format!("{} closed the connection: {complaint}", self.server),
            ),
            None => Failure::new(
                Kind::BrokerUnreachable,
                format!("the connection to {} broke", self.server),
            ),
        })
    }

    pub(super) fn broken_or_closed(&self) -> Failure {
        self.broken().unwrap_or_else(|| {
            let detail = format!("the connection to {} ended", self.server);
            Failure::new(Kind::BrokerUnreachable, detail)
        })
    }
}

impl Condition {
    fn is_broken(&self) -> bool {
        self.closed || self.violation.is_some()
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Disconnected | Event::Closed => self.closed = true,
            Event::ServerError(ServerWord::Other(words)) => {
                if words.to_ascii_lowercase().contains("permissions violation") {
                    self.violation.get_or_insert(words);
                } else {
                    self.complaint = Some(words);
                }
            }
            Event::ServerError(error) => self.complaint = Some(error.to_string()),
            // An answer found no room, which the window makes impossible; acks time out then.
            Event::SlowConsumer(_) => {}
            Event::Connected | Event::LameDuckMode | Event::Draining | Event::ClientError(_) => {}
        }
    }
}

/// The message that a server did not let through, when it is one that can be done without. The
/// words are `Permissions Violation for Publish to "SUBJECT"`.
fn forbidden_message(event: &Event, api: &str) -> Option<Forbidden> {
    let Event::ServerError(ServerWord::Other(words)) = event else { return None };
    let (verdict, rest) = words.split_once(" to \"")?;
    if !verdict.eq_ignore_ascii_case("permissions violation for publish") {
        return None;
    }
    let subject = rest.strip_suffix('"')?;
    let of_api = subject.strip_prefix(api).is_some_and(|verb| verb.starts_with('.'));
    (!of_api).then(|| Forbidden { subject: subject.to_owned(), words: words.clone() })
}

/// Chooses the address the first time, and nowhere afterwards.
fn only_once(
    address: ServerAddr,
) -> impl Fn(
    Vec<async_nats::Server>,
    async_nats::ServerInfo,
) -> std::future::Ready<Option<ReconnectToServer>> {
    let used = AtomicBool::new(false);
    move |pool, _| {
        let addr = match used.swap(true, Ordering::Relaxed) {
            false => Some(address.clone()),
            true => pool.into_iter().map(|server| server.addr).find(|other| *other != address),
        };
        std::future::ready(addr.map(|addr| ReconnectToServer { addr, delay: Some(Duration::ZERO) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_and_an_end_break_a_connection_and_other_words_do_not() {
        let mut condition = Condition::default();
        condition.note(Event::Connected);
        condition.note(Event::ServerError(ServerWord::Other("Maximum Subscriptions".into())));
        assert!(!condition.is_broken());
        let words = "Permissions Violation for Subscription to \"_INBOX.a\"";
        condition.note(Event::ServerError(ServerWord::Other(words.into())));
        assert!(condition.is_broken() && condition.violation.as_deref() == Some(words));
        let mut condition = Condition::default();
        condition.note(Event::Disconnected);
        assert!(condition.is_broken());
    }

    #[test]
    fn only_a_message_can_be_done_without() {
        let subject = |words: &str| {
            let event = Event::ServerError(ServerWord::Other(words.to_owned()));
            forbidden_message(&event, "$JS.API").map(|forbidden| forbidden.subject)
        };
        let publish = |to: &str| subject(&format!("Permissions Violation for Publish to \"{to}\""));
        assert_eq!(publish("events.a").as_deref(), Some("events.a"));
        assert_eq!(publish("$JS.API.STREAM.INFO.EVENTS"), None);
        assert_eq!(subject("Permissions Violation for Publish with Reply of \"_INBOX.a\""), None);
        assert_eq!(subject("Permissions Violation for Subscription to \"_INBOX.a\""), None);
    }
}
