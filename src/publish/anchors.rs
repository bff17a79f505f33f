//! Compares what the ledger says of a stream with the stream: is the message that a receipt names
//! still where it was?

use super::connect::Link;
use super::facts::StreamInfo;
use super::resume::{Place, message_at};
use crate::config::DestinationConfig;
use crate::error::Failure;
use crate::relay::outcome::{Anchor, Retention};

/// How far a stream reaches, and what it keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reach {
    /// When the stream was made, as the server writes it.
    pub created: String,
    /// Lowest sequence still stored.
    pub first_seq: u64,
    /// Highest sequence; 0 when nothing was ever stored.
    pub last_seq: u64,
    /// Which messages it keeps.
    pub retention: Retention,
}

/// A connection for comparisons.
pub struct Comparison {
    link: Link,
    stream: String,
}

impl Comparison {
    /// Connects, and asks how far the stream reaches.
    pub async fn begin(config: &DestinationConfig) -> Result<(Comparison, Reach), Failure> {
        let link = Link::connect(config).await?;
        let info: StreamInfo =
            link.ask(&format!("STREAM.INFO.{}", config.stream), None).await.map_err(|error| {
                error.into_failure(&format!("asking how far stream `{}` reaches", config.stream))
            })?;
        let reach = Reach {
            created: info.created,
            first_seq: info.state.first_seq,
            last_seq: info.state.last_seq,
            retention: Retention::of(&info.config.retention),
        };
        Ok((Comparison { link, stream: config.stream.clone() }, reach))
    }

    /// Is the message there? `None`: there is none at this sequence, which proves nothing.
    pub async fn holds(&self, anchor: &Anchor) -> Result<Option<bool>, Failure> {
        match message_at(&self.link, &self.stream, anchor.seq).await {
            Ok(Place::Empty) => Ok(None),
            Ok(Place::Message(id)) => Ok(Some(id.as_ref() == Some(&anchor.id))),
            Err(error) => Err(error.into_failure("comparing the stream with the ledger")),
        }
    }
}
