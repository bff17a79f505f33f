//! The broker's side of `outboxd recover`: reads what a stream has of this relay, whatever its
//! generation, copies messages to another stream, and tells consumers of the new generation.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;

use super::ack::Reply;
use super::connect::{AskError, Link, NO_RESPONDERS};
use super::facts::StreamInfo;
use super::login::REQUEST_TIMEOUT;
use super::nats::Subscriber;
use super::resume::resume;
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::message::{Envelope, Headers, Message};
use crate::relay::outcome::{Floor, ReadFrom, Resumed};

/// A connection for one destination.
pub struct Desk {
    link: Link,
    config: DestinationConfig,
    inbox: String,
    answers: Subscriber,
    sent: u64,
}

/// Where copies go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantine {
    stream: String,
    /// What stands before a copy's own subject; or the one subject that every copy has.
    subject: Result<String, String>,
}

#[derive(Deserialize)]
struct Got {
    message: Raw,
}

#[derive(Deserialize)]
struct Raw {
    subject: String,
    #[serde(default)]
    data: String,
    #[serde(default)]
    hdrs: String,
}

impl Desk {
    /// Connects with the configuration's credentials.
    pub async fn open(config: &DestinationConfig) -> Result<Desk, Failure> {
        super::provide_tls();
        let link = Link::connect(config).await?;
        let (inbox, answers) = link.open_inbox();
        Ok(Desk { link, config: config.clone(), inbox, answers, sent: 0 })
    }

    /// Every message of ours above the floor, or of the whole stream when it is another one than the
    /// floor names.
    pub async fn read(&self, envelope: &Envelope, floor: Floor) -> Result<Resumed, Failure> {
        let from = ReadFrom { floor, ..ReadFrom::default() };
        Ok(resume(&self.link, &self.config, envelope, &from).await?.resumed)
    }

    /// Publishes one message and waits for its place in the stream.
    pub async fn publish(&mut self, message: Message) -> Result<u64, Failure> {
        self.store(message.subject(), message.head(), &message.payload).await
    }

    /// Finds the stream for copies, or makes it.
    pub async fn quarantine(&self, stream: &str) -> Result<Quarantine, Failure> {
        let what = format!("stream `{stream}`");
        let verb = format!("STREAM.INFO.{stream}");
        let subjects = match self.link.ask::<StreamInfo>(&verb, None).await {
            Ok(info) => info.config.subjects,
            Err(AskError::Refused(error)) if error.err_code == 10059 => {
                let subjects = vec![format!("outboxd.quarantine.{stream}.>")];
                let plan = json!({ "name": stream, "subjects": subjects, "storage": "file" });
                let verb = format!("STREAM.CREATE.{stream}");
                let made = self.link.ask::<serde_json::Value>(&verb, Some(plan)).await;
                made.map_err(|error| error.into_failure(&format!("creating {what}")))?;
                subjects
            }
            Err(error) => return Err(error.into_failure(&what)),
        };
        let fits = |subject: &&String| !subject.contains('*');
        let Some(subject) = subjects.iter().find(fits) else {
            let detail = format!("{what} stores no subject that copies could have, such as `q.>`");
            return Err(Failure::new(Kind::StreamSubjects, detail));
        };
        let subject = match subject.strip_suffix('>') {
            Some(stem) => Ok(stem.to_owned()),
            None => Err(subject.clone()),
        };
        Ok(Quarantine { stream: stream.to_owned(), subject })
    }

    /// Copies the message at this sequence, as it is, with two headers that say where it is from.
    /// The copy's message id keeps a second run from copying it once more for a while.
    pub async fn copy(&mut self, seq: u64, to: &Quarantine) -> Result<(), Failure> {
        let from = self.config.stream.clone();
        let verb = format!("STREAM.MSG.GET.{from}");
        let got: Got = self
            .link
            .ask(&verb, Some(json!({ "seq": seq })))
            .await
            .map_err(|error| error.into_failure(&format!("reading message {seq} of {from}")))?;
        let Raw { subject, data, hdrs } = got.message;
        let unreadable = || {
            let detail = format!("message {seq} of stream `{from}` can't be read");
            Failure::new(Kind::BrokerJetStream, detail)
        };
        let decode = |text: &str| BASE64_STANDARD.decode(text).map_err(|_| unreadable());
        let (block, payload) = (decode(&hdrs)?, decode(&data)?);
        let head = format!(
            "NATS/1.0\r\nNats-Msg-Id: outboxd-quarantine:{from}:{seq}\r\n\
             Outbox-Quarantined-From: {from}\r\nOutbox-Quarantined-Sequence: {seq}\r\n{}\r\n",
            own_lines(&block)
        );
        let subject = match &to.subject {
            Ok(stem) => format!("{stem}{subject}"),
            Err(subject) => subject.clone(),
        };
        self.store(&subject, &head, &payload).await.map(drop)
    }

    async fn store(&mut self, subject: &str, head: &str, payload: &[u8]) -> Result<u64, Failure> {
        self.sent += 1;
        let reply = format!("{}.{}", self.inbox, self.sent);
        self.link.publish(subject, &reply, head, payload);
        let answer = tokio::select! {
            biased;
            answer = timeout(REQUEST_TIMEOUT, self.answers.next()) => answer,
            forbidden = self.link.forbidden() => {
                return Err(Failure::new(Kind::BrokerPermission, forbidden.words));
            }
            failure = self.link.ended() => return Err(failure),
        };
        let failed = |kind, what: String| Err(Failure::new(kind, format!("`{subject}`: {what}")));
        match answer {
            Ok(Some(answer)) if answer.status() == Some(NO_RESPONDERS) => {
                failed(Kind::StreamSubjects, "no stream stores this subject".to_owned())
            }
            Ok(Some(answer)) => match Reply::parse(&answer.payload) {
                Reply::PubAck { seq, .. } if seq > 0 => Ok(seq),
                Reply::Refused(error) => failed(Kind::StreamBusy, error.to_string()),
                Reply::Flow { .. }
                | Reply::Gap
                | Reply::Err { .. }
                | Reply::PubAck { .. }
                | Reply::NoResponders
                | Reply::Unreadable => {
                    failed(Kind::StreamBusy, "an answer that says nothing".to_owned())
                }
            },
            Ok(None) => Err(self.link.broken_or_closed()),
            Err(_) => failed(Kind::StreamBusy, "no answer in time".to_owned()),
        }
    }
}

/// The lines of every header but the server's own, and those that say where a copy is from.
fn own_lines(block: &[u8]) -> String {
    let text = String::from_utf8_lossy(block);
    let mut lines = String::new();
    for (name, value) in Headers::of(text.as_bytes()).iter() {
        let lower = name.to_ascii_lowercase();
        if !lower.starts_with("nats-") && !lower.starts_with("outbox-quarantined-") {
            lines.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_the_server_stay_behind() {
        let lines = own_lines(
            b"NATS/1.0\r\nNats-Msg-Id: a\r\nOutbox-Seq: 7\r\nX: \r\n\
              Outbox-Quarantined-From: b\r\n\r\n",
        );
        assert_eq!(lines, "Outbox-Seq: 7\r\nX: \r\n");
    }
}
