//! The broker's side of `outboxd recover`: reads what a stream has of this relay, whatever its
//! generation, copies messages to another stream, and tells consumers of the new generation.

use std::str::FromStr as _;

use async_nats::header::NATS_MESSAGE_ID;
use async_nats::message::OutboundMessage;
use async_nats::{HeaderMap, HeaderName, HeaderValue, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;

use super::ack::Reply;
use super::connect::{AskError, Link};
use super::facts::StreamInfo;
use super::login::REQUEST_TIMEOUT;
use super::resume::{base64_decode, resume};
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::message::{Envelope, Message};
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
        let (inbox, answers) = link.open_inbox().await?;
        Ok(Desk { link, config: config.clone(), inbox, answers, sent: 0 })
    }

    /// Every message of ours above the floor, or of the whole stream when it is another one than the
    /// floor names.
    pub async fn read(&self, envelope: &Envelope, floor: Floor) -> Result<Resumed, Failure> {
        let from = ReadFrom { floor, ..ReadFrom::default() };
        resume(&self.link, &self.config, envelope, &from).await
    }

    /// Publishes one message and waits for its place in the stream.
    pub async fn publish(&mut self, message: Message) -> Result<u64, Failure> {
        let Message { subject, headers, payload, .. } = message;
        self.store(subject.to_string(), headers, payload).await
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
        let block = base64_decode(&hdrs).ok_or_else(unreadable)?;
        let payload = base64_decode(&data).ok_or_else(unreadable)?;
        let mut headers = own_headers(&block);
        for (name, value) in [
            ("Outbox-Quarantined-From", from.clone()),
            ("Outbox-Quarantined-Sequence", seq.to_string()),
        ] {
            let value = HeaderValue::from_str(&value).map_err(|_| unreadable())?;
            headers.insert(HeaderName::from_static(name), value);
        }
        let id = format!("outboxd-quarantine:{from}:{seq}");
        headers.insert(NATS_MESSAGE_ID, HeaderValue::from_str(&id).map_err(|_| unreadable())?);
        let subject = match &to.subject {
            Ok(stem) => format!("{stem}{subject}"),
            Err(subject) => subject.clone(),
        };
        self.store(subject, headers, payload.into()).await.map(drop)
    }

    async fn store(
        &mut self,
        subject: String,
        headers: HeaderMap,
        payload: Bytes,
    ) -> Result<u64, Failure> {
        self.sent += 1;
        let reply = format!("{}.{}", self.inbox, self.sent);
        self.link
            .publish(OutboundMessage {
                subject: subject.clone().into(),
                reply: Some(reply.into()),
                payload,
                headers: Some(headers),
            })
            .await?;
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
            Ok(Some(answer)) if answer.status == Some(StatusCode::NO_RESPONDERS) => {
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

/// Every header but the server's own.
fn own_headers(block: &[u8]) -> HeaderMap {
    let text = String::from_utf8_lossy(block);
    let mut headers = HeaderMap::new();
    for line in text.split("\r\n").skip(1) {
        let Some((name, value)) = line.split_once(':') else { continue };
        if name.to_ascii_lowercase().starts_with("nats-") {
            continue;
        }
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_str(name), HeaderValue::from_str(value.trim()))
        {
            headers.append(name, value);
        }
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_the_server_stay_behind() {
        let headers = own_headers(b"NATS/1.0\r\nNats-Msg-Id: a\r\nOutbox-Seq: 7\r\nX: \r\n\r\n");
        assert_eq!(headers.len(), 2);
        assert_eq!(headers.get("Outbox-Seq").map(|value| value.as_str()), Some("7"));
    }
}
