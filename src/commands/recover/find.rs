//! Sorts what a stream has of this relay: events of this database, and orphans.

use serde::Serialize;
use tokio_postgres::Client;

use crate::config::DestinationConfig;
use crate::error::Failure;
use crate::relay::outcome::{Found, Resumed};
use crate::relay::ranges::RangeSet;
use crate::store::Store;
use crate::store::orphans::Question;

/// One destination.
#[derive(Debug, Serialize)]
pub struct Seen {
    /// Its name.
    pub destination: String,
    /// Its stream.
    pub stream: String,
    /// Messages of this relay that were compared.
    pub messages: usize,
    /// Of them, events of this database.
    pub events: usize,
    /// Of them, those that have number and id of a row, while nothing tells whether it is theirs.
    pub unclear: usize,
    /// Highest generation among the messages.
    pub generation: Option<i32>,
    /// The stream was read up to here.
    pub read_to: u64,
    /// Messages whose events this database does not know.
    pub orphans: Vec<Orphan>,
    /// Of them, copied to the quarantine.
    pub quarantined: usize,
    /// Where the stream has the message that tells of the new generation.
    pub boundary: Option<u64>,
    #[serde(skip)]
    pub created: String,
    #[serde(skip)]
    pub published: RangeSet,
}

/// A message whose event this database does not know.
#[derive(Debug, Clone, Serialize)]
pub struct Orphan {
    /// Its place in the stream.
    pub stream_seq: u64,
    /// `Outbox-Seq`.
    pub seq: i64,
    /// The event's id.
    pub id: String,
    /// `Outbox-Generation`.
    pub generation: i32,
    /// `Outbox-Lsn`.
    pub commit_lsn: Option<String>,
    /// Its number belongs to another event now.
    pub reused: bool,
}

/// Sorts them, by the same rule as the relay.
pub async fn sort(
    store: &Store,
    client: &Client,
    destination: &DestinationConfig,
    resumed: Resumed,
    question: Question<'_>,
) -> Result<Seen, Failure> {
    let Resumed { created, last_seq, found } = resumed;
    let generation = found.iter().map(|one| one.generation).max();
    let sorted = store.sort_messages(client, question, &found).await?;
    let published: RangeSet = sorted.ours.iter().map(|one| (one.seq, one.seq)).collect();
    let events: u64 = published.iter().map(|(first, last)| last.abs_diff(first) + 1).sum();
    let mut orphans: Vec<Orphan> =
        sorted.orphans.into_iter().map(|(one, reused)| orphan(one, reused)).collect();
    orphans.sort_by_key(|orphan| orphan.stream_seq);
    Ok(Seen {
        destination: destination.name.clone(),
        stream: destination.stream.clone(),
        messages: found.len(),
        events: usize::try_from(events).unwrap_or(usize::MAX),
        unclear: sorted.unclear.len(),
        generation,
        read_to: last_seq,
        orphans,
        quarantined: 0,
        boundary: None,
        created,
        published,
    })
}

fn orphan(found: Found, reused: bool) -> Orphan {
    Orphan {
        stream_seq: found.stream_seq,
        seq: found.seq,
        id: found.id.to_string(),
        generation: found.generation,
        commit_lsn: found.commit_lsn.map(|lsn| lsn.to_string()),
        reused,
    }
}
