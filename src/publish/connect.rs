//! One connection to NATS as the publisher uses it: messages, an inbox for answers, requests to the
//! JetStream API, and what the server's complaints mean for it.

use async_nats::ServerInfo;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::timeout;

use super::ack::ServerError;
use super::login::{REQUEST_TIMEOUT, is_about_login, shown, shuffled};
use super::nats::{Cause, Connection, Event, Subscriber};
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};

/// The server's word that nobody listens on a subject.
pub(super) const NO_RESPONDERS: u16 = 503;

/// What has become of a connection.
#[derive(Debug, Clone, Default)]
struct Condition {
    ended: Option<Cause>,
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
    connection: Connection,
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

impl ServerFacts {
    pub(super) fn of(info: &ServerInfo) -> ServerFacts {
        ServerFacts { version: info.version.clone(), max_payload: info.max_payload }
    }
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
        let mut refused = false;
        for server in shuffled(&config.servers) {
            match Link::connect_to(config, server).await {
                Ok(link) => return Ok(link),
                // What a server refuses says more than an address that does not answer.
                Err(failure) if failure.kind == Kind::BrokerUnreachable && refused => {}
                Err(failure) => {
                    refused = failure.kind != Kind::BrokerUnreachable;
                    last = failure;
                }
            }
        }
        Err(last)
    }

    async fn connect_to(config: &DestinationConfig, server: &str) -> Result<Link, Failure> {
        let api = config
            .js_domain
            .as_ref()
            .map_or_else(|| "$JS.API".to_owned(), |domain| format!("$JS.{domain}.API"));
        let (conditions, condition) = watch::channel(Condition::default());
        let (forbidden_in, forbidden) = mpsc::unbounded_channel();
        let own_api = api.clone();
        let connection = Connection::open(config, server, move |event| {
            match forbidden_message(&event, &own_api) {
                // Without effect when the connection is given up.
                Some(message) => forbidden_in.send(message).unwrap_or_default(),
                None => conditions.send_modify(|condition| condition.note(event)),
            }
        });
        let connection = connection.await?;
        let forbidden = Mutex::new(forbidden);
        Ok(Link { connection, condition, forbidden, api, server: shown(server) })
    }

    /// Ends the connection's use at once; what is on its way may be lost, and should be.
    pub(super) fn give_up(&self) {
        self.connection.give_up();
    }

    /// What the server said about itself.
    pub(super) fn server_facts(&self) -> ServerFacts {
        self.connection.facts()
    }

    /// May a message be sent without waiting?
    pub(super) fn has_room(&self) -> bool {
        self.connection.has_room()
    }

    /// Waits until a message may be sent, or the connection has ended. Cancel-safe.
    pub(super) async fn room(&self) {
        self.connection.room().await;
    }

    /// Sends a message that wants an answer below an inbox. `head` is a header block or empty.
    pub(super) fn publish(&self, subject: &str, reply: &str, head: &str, payload: &[u8]) {
        self.connection.publish(subject, reply, head, payload);
    }

    /// Asks the JetStream API. `verb` follows the API's prefix.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        verb: &str,
        body: Option<serde_json::Value>,
    ) -> Result<T, AskError> {
        let body = body.map_or_else(String::new, |body| body.to_string());
        let subject = format!("{}.{verb}", self.api);
        let request = self.connection.request(&subject, body.as_bytes());
        let mut condition = self.condition.clone();
        let answer = tokio::select! {
            biased;
            answer = timeout(REQUEST_TIMEOUT, request) => answer,
            _ = condition.wait_for(|condition| condition.is_broken()) => Ok(None),
        };
        let answer = match answer {
            Err(_) => return Err(AskError::Silence),
            Ok(None) => return Err(AskError::Link(self.ended().await)),
            Ok(Some(answer)) if answer.status() == Some(NO_RESPONDERS) => {
                return Err(AskError::NoResponders);
            }
            Ok(Some(answer)) => answer,
        };
        let unreadable = |error: serde_json::Error| AskError::Unreadable(error.to_string());
        let head: AnswerHead = serde_json::from_slice(&answer.payload).map_err(unreadable)?;
        match head.error {
            Some(error) => Err(AskError::Refused(error)),
            None => serde_json::from_slice(&answer.payload).map_err(unreadable),
        }
    }

    /// Sends a request of the JetStream API whose answers come below an inbox.
    pub(super) fn tell(&self, verb: &str, reply: &str, body: &serde_json::Value) {
        let subject = format!("{}.{verb}", self.api);
        self.publish(&subject, reply, "", &Bytes::from(body.to_string()));
    }

    /// An inbox of its own, and what comes below it.
    pub(super) fn open_inbox(&self) -> (String, Subscriber) {
        self.connection.open_inbox()
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

    /// Why the connection is of no more use, if that is so.
    pub(super) fn broken(&self) -> Option<Failure> {
        let condition = self.condition.borrow();
        if let Some(violation) = &condition.violation {
            return Some(Failure::new(Kind::BrokerPermission, violation.clone()));
        }
        Some(match condition.ended.as_ref()? {
            Cause::Said(words) if is_about_login(words) => {
                Failure::new(Kind::BrokerLogin, format!("{}: {words}", self.server))
            }
            Cause::Said(words) | Cause::Seen(words) => Failure::new(
                Kind::BrokerUnreachable,
                format!("the connection to {} broke: {words}", self.server),
            ),
            Cause::Unwanted => self.closed(),
        })
    }

    pub(super) fn broken_or_closed(&self) -> Failure {
        self.broken().unwrap_or_else(|| self.closed())
    }

    fn closed(&self) -> Failure {
        let detail = format!("the connection to {} ended", self.server);
        Failure::new(Kind::BrokerUnreachable, detail)
    }
}

impl Condition {
    fn is_broken(&self) -> bool {
        self.ended.is_some() || self.violation.is_some()
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Ended(cause) => self.ended = Some(cause),
            Event::Complaint(words) => {
                if words.to_ascii_lowercase().contains("permissions violation") {
                    self.violation.get_or_insert(words);
                }
            }
        }
    }
}

/// The message that a server did not let through, when it is one that can be done without. The
/// words are `Permissions Violation for Publish to "SUBJECT"`.
fn forbidden_message(event: &Event, api: &str) -> Option<Forbidden> {
    let Event::Complaint(words) = event else { return None };
    let (verdict, rest) = words.split_once(" to \"")?;
    if !verdict.eq_ignore_ascii_case("permissions violation for publish") {
        return None;
    }
    let subject = rest.strip_suffix('"')?;
    let of_api = subject.strip_prefix(api).is_some_and(|verb| verb.starts_with('.'));
    (!of_api).then(|| Forbidden { subject: subject.to_owned(), words: words.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_and_an_end_break_a_connection_and_other_words_do_not() {
        let mut condition = Condition::default();
        condition.note(Event::Complaint("Maximum Subscriptions".into()));
        assert!(!condition.is_broken());
        let words = "Permissions Violation for Subscription to \"_INBOX.a\"";
        condition.note(Event::Complaint(words.into()));
        assert!(condition.is_broken() && condition.violation.as_deref() == Some(words));
        let mut condition = Condition::default();
        condition.note(Event::Ended(Cause::Unwanted));
        assert!(condition.is_broken());
    }

    #[test]
    fn only_a_message_can_be_done_without() {
        let subject = |words: &str| {
            let event = Event::Complaint(words.to_owned());
            forbidden_message(&event, "$JS.API").map(|forbidden| forbidden.subject)
        };
        let publish = |to: &str| subject(&format!("Permissions Violation for Publish to \"{to}\""));
        assert_eq!(publish("events.a").as_deref(), Some("events.a"));
        assert_eq!(publish("$JS.API.STREAM.INFO.EVENTS"), None);
        assert_eq!(subject("Permissions Violation for Publish with Reply of \"_INBOX.a\""), None);
        assert_eq!(subject("Permissions Violation for Subscription to \"_INBOX.a\""), None);
    }
}
