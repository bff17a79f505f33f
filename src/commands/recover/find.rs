//! Sorts what a stream has of this relay: events of this database, and orphans.

use serde::Serialize;
use tokio_postgres::Client;

use crate::config::DestinationConfig;
use crate::error::Failure;
use crate::relay::outcome::{Found, Resumed};
use crate::relay::ranges::RangeSet;
use crate::store::Store;

/// Messages compared at once.
const AT_ONCE: usize = 10_000;

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

/// Sorts them. A number that no row has may get one from a transaction that is open now, so it is
/// looked at again when all of these have ended. `known_to`: what receipts say of higher numbers is
/// about other events.
pub async fn sort(
    store: &Store,
    client: &Client,
    destination: &DestinationConfig,
    resumed: Resumed,
    known_to: i64,
) -> Result<Seen, Failure> {
    let Resumed { created, last_seq, found } = resumed;
    let mut seen = Seen {
        destination: destination.name.clone(),
        stream: destination.stream.clone(),
        messages: found.len(),
        events: 0,
        generation: found.iter().map(|one| one.generation).max(),
        read_to: last_seq,
        orphans: Vec::new(),
        quarantined: 0,
        boundary: None,
        created,
        published: RangeSet::default(),
    };
    let absent = compare(store, client, found, &mut seen).await?;
    let absent = unknown(store, client, destination, absent, known_to).await?;
    if !absent.is_empty() {
        let open = store.mark_frontier(client).await?.open;
        store.all_ended(client, open).await?;
        let absent = compare(store, client, absent, &mut seen).await?;
        let absent = unknown(store, client, destination, absent, known_to).await?;
        seen.orphans.extend(absent.into_iter().map(|one| orphan(one, false)));
    }
    seen.orphans.sort_by_key(|orphan| orphan.stream_seq);
    Ok(seen)
}

/// Compares them with the table; those are left whose number no row has.
async fn compare(
    store: &Store,
    client: &Client,
    found: Vec<Found>,
    seen: &mut Seen,
) -> Result<Vec<Found>, Failure> {
    let mut absent = Vec::new();
    for chunk in found.chunks(AT_ONCE) {
        let seqs: Vec<i64> = chunk.iter().map(|one| one.seq).collect();
        let holders = store.holders(client, &seqs).await?;
        for one in chunk {
            match holders.get(&one.seq) {
                None => absent.push(one.clone()),
                Some(rows) if rows.iter().any(|row| row.is_of(one)) => {
                    seen.events += usize::from(!seen.published.contains(one.seq));
                    seen.published.insert(one.seq);
                }
                Some(_) => seen.orphans.push(orphan(one.clone(), true)),
            }
        }
    }
    Ok(absent)
}

/// Those that no receipt is about.
async fn unknown(
    store: &Store,
    client: &Client,
    destination: &DestinationConfig,
    absent: Vec<Found>,
    known_to: i64,
) -> Result<Vec<Found>, Failure> {
    let mut unknown = Vec::new();
    for chunk in absent.chunks(AT_ONCE) {
        let seqs: Vec<i64> = chunk.iter().map(|one| one.seq).collect();
        let recorded = store.recorded(client, &destination.name, &seqs).await?;
        let is_unknown = |one: &&Found| one.seq > known_to || !recorded.contains(&one.seq);
        unknown.extend(chunk.iter().filter(is_unknown).cloned());
    }
    Ok(unknown)
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
