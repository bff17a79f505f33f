//! One life of the paired connections: connect, lock, look, load, stream. What memory knows of the
//! ledger begins and ends here.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::status::{Phase, Status};
use crate::config::Config;
use crate::decode::Decoder;
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;
use crate::message::Envelope;
use crate::publish::Publisher;
use crate::relay::destination::DestinationSpec;
use crate::relay::outcome::DestinationId;
use crate::relay::ranges::RangeSet;
use crate::relay::{Limits, Relay};
use crate::run::clock;
use crate::run::pump::Pump;
use crate::run::reporting::Reporter;
use crate::run::work::{Ledger, Place};
use crate::store::ledger::Latest;
use crate::store::slot::{self, Slot, SlotState};
use crate::store::{Store, identity, lock, shape};
use crate::wal::{self, Control, Identity, Link};

/// How often a standby asks for the lock: a take-over within seconds, at one cheap query each.
const LOCK_POLL: Duration = Duration::from_secs(1);

/// Silence of the WAL stream after which the relay is not ready: a healthy server answers the
/// request for a reply that goes out every quarter of `wal_sender_timeout` (60 s by default).
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

/// How a session ended without a failure.
pub enum Ended {
    /// By an orderly stop.
    Stopped,
}

/// Runs one session. `next_attempt` keeps attempt numbers unique in the life of the process.
pub async fn run(
    config: &Config,
    status: &Arc<Status>,
    shutdown: &CancellationToken,
    next_attempt: &mut u64,
) -> Result<Ended, Failure> {
    status.phase(Phase::Starting);
    let link = tokio::select! {
        link = wal::connect(&config.source) => link?,
        () = shutdown.cancelled() => return Ok(Ended::Stopped),
    };
    let Link { mut control, replication, identity } = link;
    if !take_lock(config, status, &mut control, shutdown).await? {
        return Ok(Ended::Stopped);
    }
    let prepared = tokio::select! {
        prepared = prepare(config, &control, &identity) => prepared?,
        failure = control.closed() => return Err(failure),
        () = shutdown.cancelled() => return Ok(Ended::Stopped),
    };
    let wal = replication.start(&config.source.slot, &config.source.publication).await?;
    tracing::info!(
        slot = config.source.slot,
        from = %prepared.slot.confirmed_flush,
        server_version = identity.server_version,
        generation = prepared.ledger.generation,
        "streaming"
    );

    let tasks = TaskTracker::new();
    let stop_publishers = CancellationToken::new();
    // Dropped with the session, however it ends: nothing of it goes on sending.
    let _stop_on_drop = stop_publishers.clone().drop_guard();
    let (reports_in, reports) = mpsc::unbounded_channel();
    let places = places(config, prepared.ledger.generation);
    let publishers: Vec<Publisher> = config
        .destinations
        .iter()
        .zip(&places)
        .zip(0u16..)
        .map(|((destination, place), index)| {
            let (id, envelope) = (DestinationId(index), place.envelope.clone());
            let (reports, stop) = (reports_in.clone(), stop_publishers.clone());
            Publisher::spawn(id, destination.clone(), envelope, reports, stop, &tasks)
        })
        .collect();
    tasks.close();

    let specs = specs(config, &places, &prepared);
    let mut relay = Relay::new(limits(config), prepared.slot.confirmed_flush, specs, *next_attempt);
    let reporter = Reporter::new(Arc::clone(status), &identity, SILENCE_LIMIT, clock::now());
    status.phase(Phase::Streaming);
    let pump = Pump {
        relay: &mut relay,
        control: &mut control,
        wal,
        decoder: Decoder::new(config.source.table.clone(), config.source.columns.clone()),
        ledger: prepared.ledger,
        places,
        publishers,
        reports,
        reporter,
        shutdown: shutdown.clone(),
        shutdown_timeout: config.relay.shutdown_timeout,
    };
    let ended = pump.run().await;
    *next_attempt = relay.next_attempt();
    stop_publishers.cancel();
    tasks.wait().await;
    ended.map(|()| Ended::Stopped)
}

/// Waits until this relay is the one writer. `false`: shut down while waiting.
async fn take_lock(
    config: &Config,
    status: &Status,
    control: &mut Control,
    shutdown: &CancellationToken,
) -> Result<bool, Failure> {
    let name = &config.relay.name;
    let mut told = false;
    let limit = config.source.connect_timeout;
    while !within(limit, lock::try_lock(&control.client, name)).await? {
        if !told {
            told = true;
            let holder = within(limit, lock::holder(&control.client, name)).await?;
            let pid = holder.as_ref().map_or(0, |holder| holder.pid);
            tracing::info!(
                relay = name,
                holder_pid = pid,
                "standby: another relay of this name is active"
            );
            status.phase(Phase::Standby);
        }
        tokio::select! {
            failure = control.closed() => return Err(failure),
            () = shutdown.cancelled() => return Ok(false),
            () = tokio::time::sleep(LOCK_POLL) => {}
        }
    }
    status.phase(Phase::Starting);
    Ok(true)
}

/// A server that answers nothing must not look like a standby that waits.
async fn within<T>(
    limit: Duration,
    statement: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::time::timeout(limit, statement).await.unwrap_or_else(|_| {
        let detail = format!("no answer on the control connection within {limit:?}");
        Err(Failure::new(Kind::SourceSilent, detail))
    })
}

/// What a session knows before it reads WAL.
struct Prepared {
    ledger: Arc<Ledger>,
    slot: Slot,
    /// In the order of the configuration's destinations.
    recorded: Vec<(RangeSet, Lsn)>,
    latest: Vec<Option<Latest>>,
}

/// Reads what the ledger has from the slot's position on. Every statement comes after the lock.
async fn prepare(
    config: &Config,
    control: &Control,
    identity: &Identity,
) -> Result<Prepared, Failure> {
    let client = Arc::clone(&control.client);
    let name = &config.relay.name;
    let limit = config.source.connect_timeout;
    let store = within(limit, Store::open(&client, name, &config.source)).await?;
    within(limit, shape::require(&client, &config.source)).await?;
    let (system, timeline) = (&identity.system_identifier, identity.timeline);
    let row =
        identity::read_or_create(&client, name, &config.source.table, system, timeline).await?;
    row.require_cluster(name, system)?;
    if row.timeline != timeline {
        tracing::warn!(
            was = row.timeline,
            now = timeline,
            "the server was promoted or restored since the relay last ran"
        );
        identity::move_on(&client, name, system, timeline).await?;
    }
    let slot = usable(&config.source.slot, slot::find(&client, &config.source.slot).await?)?;
    let mut recorded = vec![(RangeSet::default(), Lsn::ZERO); config.destinations.len()];
    for part in store.load(&client, slot.confirmed_flush).await? {
        let found = config.destinations.iter().position(|each| each.name == part.destination);
        if let Some((seqs, to)) = found.and_then(|index| recorded.get_mut(index)) {
            seqs.extend(part.seqs);
            *to = (*to).max(part.last_lsn.unwrap_or(Lsn(u64::MAX)));
        }
    }
    let mut latest = Vec::new();
    for destination in &config.destinations {
        latest.push(store.latest(&client, &destination.name).await?);
    }
    let ledger = Arc::new(Ledger { client, store, generation: row.generation });
    Ok(Prepared { ledger, slot, recorded, latest })
}

fn usable(name: &str, state: SlotState) -> Result<Slot, Failure> {
    let (kind, detail) = match state {
        SlotState::Ok(slot) => match slot.active_pid {
            None => return Ok(slot),
            Some(pid) => (Kind::SlotHeld, format!("slot `{name}` is used by backend {pid}")),
        },
        SlotState::Missing => (Kind::SlotMissing, format!("there is no slot `{name}`")),
        SlotState::Creating { .. } => (
            Kind::SlotHeld,
            format!(
                "slot `{name}` is still being created: it waits for transactions that were open then"
            ),
        ),
        SlotState::Lost { reason } => (Kind::SlotLost, format!("slot `{name}` is lost: {reason}")),
        SlotState::Foreign { why } => (Kind::SlotForeign, format!("slot `{name}`: {why}")),
    };
    Err(Failure::new(kind, detail))
}

fn places(config: &Config, generation: i32) -> Vec<Place> {
    let place = |destination: &crate::config::DestinationConfig| Place {
        destination: destination.name.clone(),
        envelope: Envelope::new(&config.relay.name, generation, destination),
    };
    config.destinations.iter().map(place).collect()
}

fn specs(config: &Config, places: &[Place], prepared: &Prepared) -> Vec<DestinationSpec> {
    let known = prepared.recorded.iter().zip(&prepared.latest);
    let each = config.destinations.iter().zip(places).zip(known);
    each.map(|((destination, place), ((recorded, recorded_to), latest))| DestinationSpec {
        name: destination.name.clone(),
        filter: destination.filter.clone(),
        envelope: place.envelope.clone(),
        max_in_flight: config.max_in_flight(destination),
        recorded: recorded.clone(),
        recorded_to: *recorded_to,
        floor: latest.as_ref().map(|latest| latest.floor.clone()),
        recorded_known: latest.as_ref().map_or(0, |latest| latest.stream_seq),
    })
    .collect()
}

fn limits(config: &Config) -> Limits {
    Limits {
        memory_bytes: config.event_bytes(),
        receipt_interval: config.relay.receipt_interval,
        receipt_events: u64::try_from(config.relay.receipt_events).unwrap_or(u64::MAX),
    }
}
