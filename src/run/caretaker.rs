//! While the table is all there is: watches what stands in the way of streaming, and makes a slot
//! meanwhile, on a connection of its own, since that waits for transactions that are open.

use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio_postgres::Client;

use crate::config::Config;
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;
use crate::run::clock;
use crate::run::plan::{Cluster, Found, Make, Plan, plan};
use crate::run::session::Ended;
use crate::run::work::Done;
use crate::store::history::Continuity;
use crate::store::identity;
use crate::store::slot::{self, Slot, SlotState};
use crate::wal::{self, Identity, Wanted};

/// How often it is looked whether the slot can be used: soon after the repair, at two cheap queries.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// After a slot could not be made.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// See the module.
pub struct Caretaker {
    config: Config,
    identity: Identity,
    why: Option<Failure>,
    make: Option<Make>,
    making: bool,
    next_look: Instant,
}

impl Caretaker {
    /// For a session that relays from the table.
    pub fn new(
        config: &Config,
        identity: &Identity,
        why: Option<Failure>,
        make: Option<Make>,
    ) -> Caretaker {
        let (config, identity) = (config.clone(), identity.clone());
        let next_look = clock::now() + LOOK_EVERY;
        Caretaker { config, identity, why, make, making: false, next_look }
    }

    /// The slot to be made now, if one is.
    pub fn make(&mut self) -> Option<BoxFuture<'static, Done>> {
        let make = self.make.take()?;
        self.making = true;
        let (config, identity) = (self.config.clone(), self.identity.clone());
        Some(Box::pin(async move { Done::SlotMade(made(&config, &identity, make).await) }))
    }

    /// The slot is there, or could not be made. True: the session may end for a better one.
    pub fn made(&mut self, made: &Result<Lsn, Failure>) -> bool {
        self.making = false;
        match made {
            Ok(from) => {
                tracing::info!(slot = self.config.source.slot, %from, "made a new slot");
                true
            }
            Err(failure) => {
                self.next_look = clock::now() + RETRY_AFTER;
                tracing::warn!(
                    code = failure.kind.code(),
                    remedy = failure.kind.remedy(),
                    retry_in_s = RETRY_AFTER.as_secs(),
                    "no new slot: {}",
                    failure.detail
                );
                false
            }
        }
    }

    /// When to look at the slot.
    pub fn wake_at(&self) -> Option<Instant> {
        (self.why.is_some() && !self.making).then_some(self.next_look)
    }

    /// Is it time to look? Then the next time is set.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let due = self.wake_at().is_some_and(|at| now >= at);
        if due {
            self.next_look = now + LOOK_EVERY;
        }
        due
    }

    /// The configuration, for [`look`].
    pub fn config(&self) -> Config {
        self.config.clone()
    }

    /// Why the session reads no WAL, as far as it tells what the next one will meet: the server
    /// looks for the publication at the slot's position, and goes on looking there.
    pub fn reason(&self) -> Option<Kind> {
        let kind = self.why.as_ref().map(|why| why.kind);
        kind.filter(|kind| *kind == Kind::PublicationMissing)
    }

    /// What a look found; how the session is to end, if it may for a better one.
    pub fn seen(&self, plan: &Plan) -> Option<Ended> {
        match plan {
            Plan::Stream(_) | Plan::Gap { .. } => Some(Ended::Again(None)),
            Plan::Table { make: Some(_), why } if !self.making => {
                Some(Ended::Again(why.as_ref().map(|why| why.kind)))
            }
            Plan::Table { .. } | Plan::Wait(_) | Plan::Refuse(_) => None,
        }
    }
}

/// What is known of the time before the session.
#[derive(Debug, Clone)]
pub struct Past {
    /// The cluster, beside the ledger's.
    pub cluster: Cluster,
    /// The ledger, beside the outbox.
    pub ledger: Continuity,
    /// The relay never confirmed the slot above this.
    pub ceiling: Option<Lsn>,
}

/// It was looked at when the session began.
const KNOWN: Past = Past { cluster: Cluster::Same, ledger: Continuity::Fits, ceiling: None };

/// Looks at the slot and what is around it, and plans.
pub async fn look(
    client: &Client,
    config: &Config,
    past: Option<Past>,
    last_failure: Option<Kind>,
) -> Result<Plan, Failure> {
    let Past { cluster, ledger, ceiling } = past.unwrap_or(KNOWN);
    let source = &config.source;
    let slot = slot::find(client, &source.slot).await?;
    let pid = match &slot {
        SlotState::Ok(Slot { active_pid, .. }) => *active_pid,
        SlotState::Missing
        | SlotState::Creating { .. }
        | SlotState::Lost { .. }
        | SlotState::Foreign { .. } => None,
    };
    let around = slot::surroundings(client, &source.publication, pid).await?;
    Ok(plan(Found {
        no_stream: !config.relay.stream,
        wal_level: around.wal_level,
        cluster,
        ledger,
        slot,
        name: source.slot.clone(),
        ceiling,
        stranger: around.stranger,
        may_make: config.relay.auto_recreate,
        publication: around.publication,
        last_failure,
    }))
}

async fn made(config: &Config, identity: &Identity, make: Make) -> Result<Lsn, Failure> {
    let wanted = Wanted::Same(identity);
    let (control, _) = wal::connect_control_to(&config.source, wanted).await?;
    crate::store::settle(&control.client).await?;
    let name = &config.source.slot;
    if make == Make::Anew {
        slot::drop(&control.client, name).await?;
    }
    let from = slot::create(&control.client, name, true).await?;
    // The gap is on record; what stands above this now was moved by somebody else.
    identity::set_ceiling(&control.client, &config.relay.name, from).await?;
    Ok(from)
}
