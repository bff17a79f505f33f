//! What Resume will need, tried once: a permission that is missing is better found by `outboxd check`
//! than by the first restart. Leaves behind a reader that the server removes within seconds.

use serde_json::json;
use tokio::time::timeout;

use super::connect::{Link, NO_RESPONDERS};
use super::facts::StreamInfo;
use super::login::REQUEST_TIMEOUT;
use super::resume::{consumer_name, create_consumer, last_of};
use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::relay::outcome::Retention;

/// One step of reading the stream back.
#[derive(Debug)]
pub struct Step {
    /// What was tried, in words that follow "can't".
    pub what: &'static str,
    /// How it went.
    pub result: Result<(), Failure>,
}

/// Tries them all. A subject that is forbidden ends a connection's use, so each step has its own.
pub async fn rehearse(config: &DestinationConfig) -> Vec<Step> {
    super::provide_tls();
    let reader = create(config).await;
    let name = reader.as_ref().ok().cloned().flatten();
    vec![
        Step { what: "look for its last message", result: last(config).await },
        Step { what: "create a reader", result: reader.map(drop) },
        Step { what: "ask a reader for messages", result: pull(config, name).await },
    ]
}

async fn last(config: &DestinationConfig) -> Result<(), Failure> {
    let link = Link::connect(config).await?;
    let filter = config.subject.filter_subject();
    let found = last_of(&link, &config.stream, &filter).await;
    found.map(drop).map_err(|error| error.into_failure("looking for the last message"))
}

/// `None` when Resume would not make a reader.
async fn create(config: &DestinationConfig) -> Result<Option<String>, Failure> {
    let link = Link::connect(config).await?;
    let info: StreamInfo = link
        .ask(&format!("STREAM.INFO.{}", config.stream), None)
        .await
        .map_err(|error| error.into_failure("reading the stream's configuration"))?;
    let retention = Retention::of(&info.config.retention);
    if retention == Retention::WorkQueue {
        // The server lets only its workers read such a stream, so Resume does not try.
        return Ok(None);
    }
    let made = create_consumer(&link, config, 1, retention).await;
    made.map(Some).map_err(|error| error.into_failure("creating a reader"))
}

/// Without a reader nobody can answer, and the server says so: the request was allowed.
async fn pull(config: &DestinationConfig, reader: Option<String>) -> Result<(), Failure> {
    let link = Link::connect(config).await?;
    let (inbox, mut answers) = link.open_inbox();
    let exists = reader.is_some();
    let name = reader.unwrap_or_else(consumer_name);
    let verb = format!("CONSUMER.MSG.NEXT.{}.{name}", config.stream);
    let one = json!({ "batch": 1, "no_wait": true });
    link.tell(&verb, &format!("{inbox}.0"), &one);
    let answer = tokio::select! {
        biased;
        answer = timeout(REQUEST_TIMEOUT, answers.next()) => answer,
        failure = link.ended() => return Err(failure),
    };
    let failed = |what: &str| Err(Failure::new(Kind::BrokerJetStream, what));
    match answer {
        Ok(Some(answer)) if exists && answer.status() == Some(NO_RESPONDERS) => {
            failed("the reader that was just created does not answer")
        }
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(link.broken_or_closed()),
        Err(_) => failed("the reader does not answer in time"),
    }
}
