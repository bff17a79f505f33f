//! What the pump asks of the database while it goes on: receipts, burials, and the check of what
//! Resume found. All on the control connection, which answers in the order of asking.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Failure, Kind};
use crate::event::{Event, EventId, Fault};
use crate::lsn::Lsn;
use crate::message::{Envelope, message_id};
use crate::relay::late::late_of_any_run;
use crate::relay::machine::{Burial, Loaded, ReceiptDraft, Verified, WaitingPart};
use crate::relay::outcome::{DestinationId, Found, Resumed};
use crate::relay::ranges::RangeSet;
use crate::run::letters;
use crate::run::lost_tail::LostTail;
use crate::run::plan::Plan;
use crate::run::sweeper::Looked;
use crate::store::dead_letters::DeadLetter;
use crate::store::history::Since;
use crate::store::ledger::{Receipt, ReceiptOutcome};
use crate::store::orphans::Question;
use crate::store::rows::Rows;
use crate::store::{Pulse, Store, identity};
use tokio_postgres::Client;

/// What a session's database jobs share.
#[derive(Debug)]
pub struct Ledger {
    /// The control connection.
    pub client: Arc<Client>,
    /// Its prepared statements.
    pub store: Store,
    /// Generation of the database's history.
    pub generation: i32,
    /// System identifier and timeline of the cluster.
    pub here: (String, u32),
    /// What commits from here on the WAL brings; `None`: no WAL is read.
    pub wal_from: Option<Lsn>,
}

/// Where a destination's receipts say that its messages are.
#[derive(Debug, Clone)]
pub struct Place {
    /// Name of the destination.
    pub destination: String,
    /// How its messages look; names the stream.
    pub envelope: Envelope,
    /// Does a run wait behind its dead letter?
    pub blocks_runs: bool,
    /// How the database goes on since the stream was compared with it.
    pub since: Since,
}

impl Place {
    fn message_id(&self, id: &EventId) -> String {
        message_id(id, &self.envelope).unwrap_or_default()
    }
}

/// A finished job.
#[derive(Debug)]
pub enum Done {
    /// Receipts are durable, or the session is over.
    Recorded(Result<i64, Failure>),
    /// A dead letter is durable, or must be tried again.
    Buried(Burial, Result<(), Failure>),
    /// What Resume found is checked and in the ledger, or the session is over.
    Verified(DestinationId, Result<Verified, Failure>),
    /// The control connection answered, or did not.
    Pinged(Result<Pulse, Failure>),
    /// The first of the waiting events' rows.
    Loaded(DestinationId, Result<Loaded, Failure>),
    /// More of what waits in the ledger.
    WaitingRead(DestinationId, Result<WaitingPart, Failure>),
    /// A look through the table.
    Looked(Result<Looked, Failure>),
    /// Rows that a look found.
    Rows(Result<Rows, Failure>),
    /// How far the looks came is recorded.
    Advanced(Result<(), Failure>),
    /// How far a stream that lost its tail is still the one that the ledger describes.
    TailFound(DestinationId, Result<LostTail, Failure>),
    /// The slot may be confirmed up to here.
    CeilingRaised(Result<Lsn, Failure>),
    /// A slot is made.
    SlotMade(Result<Lsn, Failure>),
    /// What can be done about the slot now.
    SlotSeen(Result<Plan, Failure>),
    /// What the dead letters said, or the session is over.
    Letters(Result<letters::Answer, Failure>),
}

/// Silence after which the control connection counts as dead.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

impl Ledger {
    /// Asks the control connection for a sign of life; without one the lock may be gone.
    pub async fn ping(self: Arc<Self>) -> Done {
        let pulse = self.store.pulse(&self.client);
        Done::Pinged(match tokio::time::timeout(PING_TIMEOUT, pulse).await {
            Ok(pulse) => pulse,
            Err(_) => {
                let detail = format!("no answer on the control connection for {PING_TIMEOUT:?}");
                Err(Failure::new(Kind::SourceSilent, detail))
            }
        })
    }

    /// Writes receipts in one statement. The drafts of one destination become up to two rows:
    /// what is in the stream, with the unmatched numbers between, and what is in the dead letters.
    ///
    /// The letters that were sent again come before: a floor above their messages hides them.
    pub async fn record(self: Arc<Self>, drafts: Vec<(Place, ReceiptDraft)>) -> Done {
        let redriven: Vec<i64> =
            drafts.iter().flat_map(|(_, draft)| draft.decided.letters.iter().copied()).collect();
        if let Err(failure) = self.store.redriven(&self.client, &redriven).await {
            return Done::Recorded(Err(failure));
        }
        let receipts: Vec<Receipt> =
            drafts.iter().flat_map(|(place, draft)| receipts(place, draft)).collect();
        let written = self.store.append(&self.client, self.generation, &receipts).await;
        Done::Recorded(written.map(|ids| ids.into_iter().max().unwrap_or(0)))
    }

    /// Records how far the slot may be confirmed.
    pub async fn raise_ceiling(self: Arc<Self>, to: Lsn) -> Done {
        let raised = identity::set_ceiling(&self.client, self.store.relay(), to).await;
        Done::CeilingRaised(raised.map(|()| to))
    }

    /// Writes one dead letter.
    pub async fn bury(self: Arc<Self>, burial: Burial, letter: DeadLetter) -> Done {
        let written = self.store.bury(&self.client, self.generation, &[letter]).await;
        Done::Buried(burial, written.map(drop))
    }

    /// A message counts only if the table has its row, by number and id; what counts is recorded
    /// before the core hears of it, so that it is final in memory and ledger at once.
    pub async fn verify(
        self: Arc<Self>,
        id: DestinationId,
        place: Place,
        resumed: Resumed,
        candidates: Vec<Found>,
        (floor, newest): (u64, i64),
    ) -> Done {
        Done::Verified(id, self.verified(place, resumed, candidates, (floor, newest)).await)
    }

    async fn verified(
        &self,
        place: Place,
        resumed: Resumed,
        candidates: Vec<Found>,
        (floor, newest): (u64, i64),
    ) -> Result<Verified, Failure> {
        let (name, since) = (place.destination.clone(), place.since);
        let verified = self.compared(place, resumed, candidates, (floor, newest)).await?;
        if since != Since::Same {
            let (system, timeline) = &self.here;
            self.store.set_compared(&self.client, &[&name], (system, *timeline)).await?;
        }
        Ok(verified)
    }

    async fn compared(
        &self,
        place: Place,
        resumed: Resumed,
        candidates: Vec<Found>,
        (floor, newest): (u64, i64),
    ) -> Result<Verified, Failure> {
        let mut seqs = RangeSet::default();
        let mut events = 0;
        let mut until = None;
        // What was sent from a letter is known by the letter, whether its row is there or not.
        let (redriven, candidates): (Vec<Found>, Vec<Found>) =
            candidates.into_iter().partition(|found| found.letter.is_some());
        let claims: Vec<&Found> = redriven.iter().collect();
        let letters = self.claim(&place.destination, &claims).await?;
        for found in
            redriven.iter().filter(|one| one.letter.is_some_and(|id| letters.contains(&id)))
        {
            if !seqs.contains(found.seq) {
                events += 1;
                seqs.insert(found.seq);
            }
        }
        // Bounded statements: a stream that was never read can hold millions of our messages.
        for chunk in candidates.chunks(10_000) {
            let wanted: Vec<(i64, EventId)> =
                chunk.iter().map(|found| (found.seq, found.id.clone())).collect();
            let existing = self.store.existing(&self.client, &wanted).await?;
            until = until.max(existing.until);
            for seq in existing.seqs {
                if !seqs.contains(seq) {
                    events += 1;
                    seqs.insert(seq);
                }
            }
        }
        self.require_history(&place, &candidates, &seqs).await?;
        let is_stranger = |found: &&Found| !seqs.contains(found.seq);
        let strangers: Vec<Found> = candidates.iter().filter(is_stranger).cloned().collect();
        if !strangers.is_empty() {
            tracing::info!(
                destination = place.destination,
                messages = strangers.len(),
                "the stream holds messages of this relay whose rows are not in the table \
                 (deleted, not visible yet, or of another history): not sent again if the WAL \
                 brings their events, and left alone otherwise"
            );
        }
        let counted =
            || candidates.iter().chain(&redriven).filter(|found| seqs.contains(found.seq));
        let last = counted().max_by_key(|found| found.stream_seq);
        let known: Option<Vec<Lsn>> = counted().map(|found| found.commit_lsn).collect();
        let known = known.filter(|_| place.since != Since::Other);
        // A message that only the slow path sent does not say where its event was committed, and one
        // from another cluster not where that is here: then somewhere below the position at which
        // its row was seen.
        let last_lsn = known.as_ref().map_or(until, |lsns| lsns.iter().max().copied());
        let first_lsn = known.and_then(|lsns| lsns.into_iter().min());
        if let Some(last) = last {
            let of_stream = candidates.iter().filter(|found| seqs.contains(found.seq));
            let found: Vec<i64> = of_stream.map(|found| found.seq).collect();
            let receipt = Receipt {
                stream_msg_id: place.message_id(&last.id),
                destination: place.destination,
                outcome: ReceiptOutcome::Published,
                seqs: seqs.iter().collect(),
                late: late_of_any_run(newest, found),
                handed: Vec::new(),
                events,
                unmatched: 0,
                first_lsn,
                last_lsn,
                stream: place.envelope.stream,
                stream_created: resumed.created.clone(),
                stream_seq: last.stream_seq,
                floor,
            };
            self.store.append(&self.client, self.generation, &[receipt]).await?;
        }
        let Resumed { created, last_seq, .. } = resumed;
        Ok(Verified { created, last_seq, seqs, strangers, last_lsn, letters })
    }
}

impl Ledger {
    /// Refuses to go on over messages of a history that this database does not have.
    async fn require_history(
        &self,
        place: &Place,
        candidates: &[Found],
        matched: &RangeSet,
    ) -> Result<(), Failure> {
        let doubtful =
            |one: &&Found| !matches!(one.id, EventId::Uuid(_)) || !matched.contains(one.seq);
        let doubtful = candidates.iter().filter(doubtful);
        let question = Question {
            destination: &place.destination,
            known_to: i64::MAX,
            same_cluster: place.since != Since::Other,
            wal_from: self.wal_from.filter(|_| place.since == Since::Same),
        };
        let doubtful: Vec<Found> = doubtful.cloned().collect();
        let sorted = self.store.sort_messages(&self.client, question, &doubtful).await?;
        let orphans = sorted.orphans.len();
        let first = sorted.orphans.iter().map(|(one, _)| one).min_by_key(|one| one.stream_seq);
        let Some(first) = first else { return Ok(()) };
        let detail = format!(
            "destination `{}`: stream `{}` has {orphans} messages of this relay whose events this \
             database does not know, the first at {}, number {}",
            place.destination, place.envelope.stream, first.stream_seq, first.seq
        );
        Err(Failure::new(Kind::HistoryLost, detail))
    }
}

/// Handed over first: what is final stands behind it, also when one flush has both.
fn receipts(place: &Place, draft: &ReceiptDraft) -> Vec<Receipt> {
    let decided = &draft.decided;
    // What Resume found for certain can be behind the last ack: then no message is named.
    let is_behind = decided.published_events > 0;
    let last = draft.last.as_ref().filter(|last| !is_behind || last.stream_seq >= draft.known);
    let stream_seq = last.map_or(draft.known, |last| last.stream_seq);
    let stream_msg_id = last.map(|last| place.message_id(&last.id)).unwrap_or_default();
    let receipt = |outcome, seqs: &RangeSet, events, unmatched| Receipt {
        destination: place.destination.clone(),
        outcome,
        seqs: seqs.iter().collect(),
        late: decided.late.iter().copied().filter(|(seq, _)| seqs.contains(*seq)).collect(),
        handed: Vec::new(),
        events,
        unmatched,
        first_lsn: decided.first_lsn,
        last_lsn: decided.last_lsn,
        stream: place.envelope.stream.clone(),
        stream_created: draft.floor.created.clone(),
        stream_seq,
        stream_msg_id: stream_msg_id.clone(),
        floor: draft.floor.seq,
    };
    let mut rows = Vec::new();
    if !decided.handed.is_empty() {
        let seqs: RangeSet = decided.handed.iter().map(|(seq, _)| (*seq, *seq)).collect();
        let events = decided.handed.len() as u64;
        let handed = decided.handed.clone();
        rows.push(Receipt { handed, ..receipt(ReceiptOutcome::Handed, &seqs, events, 0) });
    }
    for (outcome, seqs, events) in [
        (ReceiptOutcome::Dead, &decided.dead, decided.dead_events),
        (ReceiptOutcome::Gone, &decided.gone, decided.gone_events),
    ] {
        if !seqs.is_empty() {
            rows.push(receipt(outcome, seqs, events, 0));
        }
    }
    if decided.published_events == 0 && decided.unmatched_events > 0 {
        let unmatched = decided.unmatched_events;
        rows.push(receipt(ReceiptOutcome::Unmatched, &decided.published, unmatched, 0));
    } else if !decided.published.is_empty() || rows.is_empty() {
        let (events, unmatched) = (decided.published_events, decided.unmatched_events);
        rows.push(receipt(ReceiptOutcome::Published, &decided.published, events, unmatched));
    }
    rows
}

/// The dead letter of an event. A row without an ordering key has nobody behind it.
pub fn letter(place: Place, event: Event, fault: Fault, attempts: u32) -> DeadLetter {
    DeadLetter {
        destination: place.destination,
        blocks_run: place.blocks_runs && event.run.is_some(),
        event: Arc::new(event),
        reason: fault.reason,
        detail: fault.detail,
        server_code: fault.server_code,
        attempts: u64::from(attempts),
    }
}

#[cfg(test)]
mod tests;
