//! Dead letters while the relay runs: when they are asked, and what is asked on the control
//! connection. Decides nothing about an event; the core does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::error::Failure;
use crate::event::Fault;
use crate::relay::Relay;
use crate::relay::machine::{BlockedRun, Burial, Question, Redrive};
use crate::relay::outcome::{DestinationId, Found};
use crate::relay::ranges::RangeSet;
use crate::relay::standing::Letters;
use crate::run::work::{Done, Ledger};
use crate::store::dead_letters::again::{Claim, EXPIRED_AT_ONCE, Standing};

/// Commands tell the relay that they changed something; where that is lost, it is found so soon.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// How often it is looked for letters whose retention is over.
const EXPIRE_EVERY: Duration = Duration::from_secs(3600);

/// What the dead letters said.
#[derive(Debug, Default)]
pub struct Answer {
    /// Letters to send again.
    pub again: Vec<Redrive>,
    /// Runs that nothing blocks any more.
    pub released: Vec<BlockedRun>,
    /// Closed letters that were deleted, if that was asked.
    expired: Option<u64>,
}

/// What is asked.
#[derive(Debug)]
pub struct Asked {
    question: Question,
    expire: Option<Duration>,
}

/// When to ask.
#[derive(Debug)]
pub struct Clock {
    next: Instant,
    next_expiry: Instant,
    retention: Option<Duration>,
    asking: bool,
}

impl Clock {
    /// A session begins.
    pub fn new(now: Instant, retention: Option<Duration>) -> Clock {
        Clock { next: now, next_expiry: now + ASK_EVERY, retention, asking: false }
    }

    /// Something was changed: do not wait.
    pub fn hurry(&mut self, now: Instant) {
        self.next = now;
    }

    /// When to look here again.
    pub fn wake_at(&self) -> Option<Instant> {
        (!self.asking).then_some(self.next)
    }

    /// The question, when it is time for one and none is open.
    pub fn due(&mut self, now: Instant, relay: &mut Relay) -> Option<Asked> {
        if self.asking {
            return None;
        }
        if relay.take_letters_changed() {
            self.next = now;
        }
        if now < self.next {
            return None;
        }
        self.asking = true;
        self.next = now + ASK_EVERY;
        let expire = self.retention.filter(|_| now >= self.next_expiry);
        Some(Asked { question: relay.ask_letters(), expire })
    }

    /// The answer came.
    pub fn answered(&mut self, now: Instant, answer: &Answer) {
        self.asking = false;
        if let Some(expired) = answer.expired {
            let more = expired >= EXPIRED_AT_ONCE;
            self.next_expiry = if more { now } else { now + EXPIRE_EVERY };
        }
        // There may be more than are read at once; where there is no room, it does not hurry.
        if answer.again.len() > 1 {
            self.next = now;
        }
    }
}

impl Ledger {
    /// Asks the dead letters of these destinations.
    pub async fn letters(self: Arc<Self>, asked: Asked, destinations: Vec<String>) -> Done {
        Done::Letters(self.ask(asked, &destinations).await)
    }

    async fn ask(&self, asked: Asked, destinations: &[String]) -> Result<Answer, Failure> {
        let Asked { question: Question { under_way, max_bytes, blocked }, expire } = asked;
        let mut answer = Answer::default();
        let named = |one: &BlockedRun| {
            let name = destinations.get(usize::from(one.destination.0));
            (name.cloned().unwrap_or_default(), one.run)
        };
        let runs: Vec<_> = blocked.iter().map(named).collect();
        for place in self.store.released(&self.client, &runs).await? {
            answer.released.extend(blocked.get(place).copied());
        }
        if max_bytes > 0 {
            let (client, store) = (&self.client, &self.store);
            let again = store.to_send_again(client, destinations, &under_way, max_bytes).await?;
            answer.again.extend(again.into_iter().filter_map(|one| {
                let at = destinations.iter().position(|name| *name == one.destination)?;
                let destination = DestinationId(u16::try_from(at).ok()?);
                Some(Redrive { destination, letter: one.id, event: one.event })
            }));
        }
        if let Some(retention) = expire {
            answer.expired = Some(self.expire(retention).await);
        }
        Ok(answer)
    }

    /// Old letters do no harm: where they can't be deleted, that is told and tried again later.
    async fn expire(&self, retention: Duration) -> u64 {
        match self.store.expire_letters(&self.client, retention).await {
            Ok(0) => 0,
            Ok(letters) => {
                tracing::info!(letters, "closed dead letters deleted: their retention is over");
                letters
            }
            Err(failure) => {
                tracing::warn!(code = failure.kind.code(), "{}", failure.detail);
                0
            }
        }
    }

    /// Buries a letter again that was refused for good once more.
    pub async fn bury_again(
        self: Arc<Self>,
        burial: Burial,
        letter: i64,
        fault: Fault,
        attempts: u32,
    ) -> Done {
        let attempts = u64::from(attempts);
        let buried = self.store.bury_again(&self.client, letter, &fault, attempts).await;
        Done::Buried(burial, buried)
    }

    /// Changes the state of letters whose messages Resume found; the claims that were news.
    pub async fn claim(&self, destination: &str, claims: &[&Found]) -> Result<Vec<i64>, Failure> {
        let claim = |found: &&Found| {
            let (id, event_id) = (found.letter?, found.id.to_string());
            Some(Claim { id, seq: found.seq, event_id })
        };
        let claims: Vec<Claim> = claims.iter().filter_map(claim).collect();
        self.store.found(&self.client, destination, &claims).await
    }
}

/// What the core must know of a destination's letters when a session begins.
pub fn at_start(
    standing: &[Standing],
    destination: &str,
    blocks_runs: bool,
    recorded: &RangeSet,
) -> Letters {
    let mut letters = Letters { blocks_runs, blocked: Vec::new(), buried: HashMap::new() };
    for one in standing.iter().filter(|one| one.destination == destination) {
        if one.blocks {
            letters.blocked.push((one.run_hash, one.seq, one.position));
        }
        if !recorded.contains(one.seq) {
            letters.buried.insert(one.seq, one.event_id.clone());
        }
    }
    letters
}
