//! A stream that ends, or goes on, before what it acknowledged: how far it is still the one that the
//! ledger describes. By the receipts' last messages, from the newest back. A message that is absent
//! proves nothing, since limits and deletes remove messages, too: then the next older one is looked
//! for.

use std::sync::Arc;

use crate::config::DestinationConfig;
use crate::error::{Failure, Kind};
use crate::publish::anchors::{Comparison, Reach};
use crate::relay::outcome::{Anchor, DestinationId, Retention};
use crate::run::work::{Done, Ledger};

/// Receipts read at once.
const ANCHORS: usize = 500;

/// What is left of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostTail {
    /// Name of the destination.
    pub destination: String,
    /// The stream.
    pub created: String,
    /// The last message that is where the ledger has it. Without one: what may have been removed by
    /// the stream's limits, up to here, is left alone.
    pub upto: Anchor,
}

impl Ledger {
    /// Looks for the last receipt whose message is in the stream.
    pub async fn find_lost_tail(
        self: Arc<Self>,
        id: DestinationId,
        config: DestinationConfig,
    ) -> Done {
        Done::TailFound(id, self.lost_tail(&config).await)
    }

    async fn lost_tail(&self, config: &DestinationConfig) -> Result<LostTail, Failure> {
        let (comparison, reach) = Comparison::begin(config).await?;
        let Reach { created, first_seq, last_seq, retention } = reach;
        if retention != Retention::Limits {
            let detail = format!(
                "stream `{}` lost messages that it acknowledged, and keeps only what nobody has \
                 consumed: what is missing can't be found out",
                config.stream
            );
            return Err(Failure::new(Kind::StreamShorter, detail));
        }
        let mut before = i64::MAX;
        loop {
            let (anchors, oldest) = self
                .store
                .anchors(&self.client, &config.name, &created, (last_seq, before), ANCHORS)
                .await?;
            let Some(oldest) = oldest else { break };
            before = oldest;
            for anchor in anchors {
                if anchor.seq >= first_seq && comparison.holds(&anchor).await? == Some(true) {
                    return Ok(LostTail {
                        destination: config.name.clone(),
                        created,
                        upto: anchor,
                    });
                }
            }
        }
        let upto = Anchor { seq: first_seq.saturating_sub(1).min(last_seq), id: String::new() };
        Ok(LostTail { destination: config.name.clone(), created, upto })
    }
}
