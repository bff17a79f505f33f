//! One life of the paired connections: connect, lock, look, load, stream. What memory knows of the
//! ledger begins and ends here.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::status::{Phase, Status};
use crate::config::{Config, DestinationConfig, Mark, OnDeadLetter};
use crate::decode::Decoder;
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;
use crate::message::Envelope;
use crate::publish::Publisher;
use crate::relay::destination::DestinationSpec;
use crate::relay::outcome::DestinationId;
use crate::relay::ranges::RangeSet;
use crate::relay::waiting::{NUMBERS_MAX, Waiter};
use crate::relay::{Limits, Relay};
use crate::run::caretaker::{self, Caretaker, Past};
use crate::run::ceiling::Ceiling;
use crate::run::lost_tail::LostTail;
use crate::run::plan::{Cluster, Plan};
use crate::run::pump::Pump;
use crate::run::reporting::Reporter;
use crate::run::slow_work::waiters;
use crate::run::standby::take_lock;
use crate::run::sweeper::Sweeper;
use crate::run::work::{Ledger, Place};
use crate::run::{clock, letters};
use crate::store::dead_letters::again::Standing;
use crate::store::destinations::Progress;
use crate::store::history::Since;
use crate::store::ledger::Latest;
use crate::store::lost_tail::Withdrawn;
use crate::store::{Store, identity, lock, shape, slot};
use crate::upkeep;
use crate::wal::{self, Control, Identity, Link, Replication, Wanted};

/// How often the control connection, which idles between receipts, is asked for a sign of life.
const PING_EVERY: Duration = Duration::from_secs(5);

/// Silence of the WAL stream after which the relay is not ready: a healthy server answers the
/// request for a reply that goes out every quarter of `wal_sender_timeout` (60 s by default).
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

/// How a session ended without a failure.
pub enum Ended {
    /// By an orderly stop.
    Stopped,
    /// The next one can do better: a slot is there that was not, or can be made. It is told why
    /// there was none, where that is not to be seen.
    Again(Option<Kind>),
    /// A stream lost what the ledger calls published: the next session withdraws the receipts.
    LostTail(LostTail),
}

/// What one session leaves to the next.
#[derive(Debug, Default)]
pub struct Carried {
    /// Attempt numbers are unique in the life of the process.
    pub next_attempt: u64,
    /// How the last session failed.
    pub last_failure: Option<Kind>,
    /// The server on which the relay worked last.
    pub server: Option<Identity>,
    /// Streams that lost their tails.
    pub lost_tails: Vec<LostTail>,
}

/// Runs one session.
pub async fn run(
    config: &Config,
    status: &Arc<Status>,
    shutdown: &CancellationToken,
    carried: &mut Carried,
) -> Result<Ended, Failure> {
    status.phase(Phase::Starting);
    let connected = tokio::select! {
        connected = connect(config, carried.server.as_ref()) => connected?,
        () = shutdown.cancelled() => return Ok(Ended::Stopped),
    };
    let (mut control, replication, identity) = connected;
    if !take_lock(config, status, &mut control, shutdown).await? {
        return Ok(Ended::Stopped);
    }
    let prepared = tokio::select! {
        prepared = prepare(config, &control, &identity, carried) => prepared?,
        failure = control.closed() => return Err(failure),
        () = shutdown.cancelled() => return Ok(Ended::Stopped),
    };
    carried.lost_tails.clear();
    carried.server = Some(identity.clone());
    let (wal, start, table) = match &prepared.plan {
        Plan::Wait(failure) | Plan::Refuse(failure) => return Err(failure.clone()),
        Plan::Stream(slot) | Plan::Gap { slot, .. } => {
            let Some(replication) = replication else {
                let detail = "a slot to stream from, and no replication connection";
                return Err(Failure::new(Kind::SourceFull, detail));
            };
            let wal = replication.start(&config.source.slot, &config.source.publication).await?;
            tracing::info!(
                slot = config.source.slot,
                from = %slot.confirmed_flush,
                server_version = identity.server_version,
                generation = prepared.ledger.generation,
                "streaming"
            );
            (Some(wal), slot.confirmed_flush, None)
        }
        Plan::Table { why, make } => {
            drop(replication);
            say_why(status, why.as_ref());
            let caretaker = Caretaker::new(config, &identity, why.clone(), *make);
            (None, Lsn::ZERO, Some(caretaker))
        }
    };
    let phase = if wal.is_some() { Phase::Streaming } else { Phase::Table };

    let tasks = TaskTracker::new();
    let stop_publishers = CancellationToken::new();
    // Dropped with the session, however it ends: nothing of it goes on sending.
    let _stop_on_drop = stop_publishers.clone().drop_guard();
    let (reports_in, reports) = mpsc::unbounded_channel();
    let places = places(config, &prepared);
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
    upkeep::start(config, &identity, status, &stop_publishers, &tasks);
    tasks.close();

    let specs = specs(config, &places, &prepared);
    let mut relay = Relay::new(limits(config), start, specs, carried.next_attempt);
    let reporter =
        Reporter::new(Arc::clone(status), &identity, SILENCE_LIMIT, wal.is_some(), clock::now());
    let sweeper = Sweeper::new(
        config.relay.sweep_interval,
        wal.is_some(),
        format!("{:x}", clock::wall().0),
        prepared.progress,
        clock::now(),
    );
    status.phase(phase);
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
        sweeper,
        caretaker: table,
        ceiling: Ceiling::new(prepared.ceiling),
        looking_for_tail: false,
        brokers: config.destinations.clone(),
        patient: 0,
        ping_every: ping_every(config.relay.take_over_after),
        letters: letters::Clock::new(clock::now(), config.dead_letters.retention),
        shutdown: shutdown.clone(),
        shutdown_timeout: config.relay.shutdown_timeout,
        max_retained_wal_bytes: config.relay.max_retained_wal_bytes,
    };
    let ended = pump.run().await;
    carried.next_attempt = relay.next_attempt();
    stop_publishers.cancel();
    tasks.wait().await;
    if let (Ok(Ended::Stopped), true) = (&ended, config.source.mark != Mark::Ledger) {
        finish_marks(config, status, &control).await;
    }
    ended
}

/// After an orderly stop the table says what the ledger says, so that another program can go on from
/// there. The next start would do it, too.
async fn finish_marks(config: &Config, status: &Arc<Status>, control: &Control) {
    let marks = upkeep::mark::MarkJob::finish(config, status, &control.client);
    let why = match tokio::time::timeout(config.relay.shutdown_timeout, marks).await {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure.to_string(),
        Err(_) => "not done within shutdown_timeout".to_owned(),
    };
    tracing::warn!("stopped before every row that is done was marked as such: {why}");
}

/// Both connections, or control alone where no WAL is to be read or none can be.
async fn connect(
    config: &Config,
    last: Option<&Identity>,
) -> Result<(Control, Option<Replication>, Identity), Failure> {
    let wanted = last.map_or(Wanted::Any, Wanted::NotBefore);
    let alone = async || {
        let (control, identity) = wal::connect_control_to(&config.source, wanted).await?;
        Ok((control, None, identity))
    };
    if !config.relay.stream {
        return alone().await;
    }
    match wal::connect_to(&config.source, wanted).await {
        Ok(Link { control, replication, identity }) => Ok((control, Some(replication), identity)),
        // With wal_level = minimal there is no place for a walsender at all.
        Err(failure) if failure.kind == Kind::SourceFull => {
            let (control, none, identity) = alone().await?;
            let around = slot::surroundings(&control.client, &config.source.publication, None);
            match around.await?.wal_level.as_str() {
                "logical" => Err(failure),
                _ => Ok((control, none, identity)),
            }
        }
        Err(failure) => Err(failure),
    }
}

fn say_why(status: &Status, why: Option<&Failure>) {
    let Some(why) = why else {
        tracing::info!("relaying from the table; no WAL is read");
        return;
    };
    status.failed(why);
    tracing::warn!(
        code = why.kind.code(),
        remedy = why.kind.remedy(),
        "no WAL to read, so relaying from the table, in the order of the rows' numbers: {}",
        why.detail
    );
}

/// A server that answers nothing must not look like a standby that waits.
pub async fn within<T>(
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
    plan: Plan,
    ceiling: Option<Lsn>,
    progress: Vec<Progress>,
    /// In the order of the configuration's destinations.
    known: Vec<Known>,
    since: Vec<Since>,
    letters: Vec<Standing>,
}

/// What the ledger says of a destination.
#[derive(Default)]
struct Known {
    latest: Option<Latest>,
    /// Final, and WAL may bring it again.
    recorded: RangeSet,
    /// Handed over, likewise.
    handed: RangeSet,
    /// Highest position of both.
    to: Lsn,
    waiting: Vec<Waiter>,
    beyond: Option<i64>,
    /// Highest number that is decided.
    highest: i64,
}

/// Reads what the ledger has from the slot's position on. Every statement comes after the lock.
async fn prepare(
    config: &Config,
    control: &Control,
    identity: &Identity,
    carried: &Carried,
) -> Result<Prepared, Failure> {
    let client = Arc::clone(&control.client);
    let name = &config.relay.name;
    let limit = config.source.connect_timeout;
    let store = within(limit, Store::open(&client, name, &config.source)).await?;
    within(limit, lock::bound_silence(&client, name)).await?;
    within(limit, shape::require(&client, &config.source)).await?;
    let (system, timeline) = (&identity.system_identifier, identity.timeline);
    let row =
        identity::read_or_create(&client, name, &config.source.table, system, timeline).await?;
    identity::name_columns(&client, name, &config.source.columns).await?;
    for tail in &carried.lost_tails {
        withdraw(&store, &client, tail).await?;
    }
    let was = (row.system_identifier.as_str(), row.timeline);
    let cluster = Cluster::compare(was, (system, timeline));
    let ledger = store.continuity(&client).await?;
    let past = Past { cluster: cluster.clone(), ledger, ceiling: row.ceiling };
    let plan = caretaker::look(&client, config, Some(past), carried.last_failure).await?;
    if let Plan::Wait(failure) | Plan::Refuse(failure) = &plan {
        return Err(failure.clone());
    }
    let required: Vec<(&str, bool)> =
        config.destinations.iter().map(|each| (each.name.as_str(), each.required)).collect();
    let names: Vec<&str> = required.iter().map(|(name, _)| *name).collect();
    let mut progress = match plan.slot() {
        None => store.begin_destinations(&client, &required).await?,
        Some(_) => store.ensure_destinations(&client, &required).await?,
    };
    if !matches!(plan, Plan::Stream(_)) {
        // Before a slot is made, and before a row is sent that no WAL brought: a crash from here on
        // is known to the next session.
        store.open_gap(&client, &names).await?;
        progress = store.progress(&client, &names).await?;
    }
    let mut ceiling = row.ceiling;
    if let Plan::Gap { slot, why } = &plan {
        tracing::warn!("rows that the slot does not bring are sent first, from the table: {why}");
        ceiling = Some(slot.confirmed_flush);
        identity::set_ceiling(&client, name, slot.confirmed_flush).await?;
    }
    arrive(&client, name, &cluster, (system, timeline)).await?;
    let mut known: Vec<Known> = config.destinations.iter().map(|_| Known::default()).collect();
    if let Some(slot) = plan.slot() {
        for part in store.load(&client, slot.confirmed_flush).await? {
            let found = config.destinations.iter().position(|each| each.name == part.destination);
            let Some(known) = found.and_then(|index| known.get_mut(index)) else { continue };
            let set = if part.handed { &mut known.handed } else { &mut known.recorded };
            set.extend(part.seqs);
            known.to = known.to.max(part.last_lsn.unwrap_or(Lsn(u64::MAX)));
        }
    }
    let most = limits(config).waiting_numbers(config.destinations.len());
    for ((destination, known), progress) in
        config.destinations.iter().zip(&mut known).zip(&progress)
    {
        known.latest = store.latest(&client, &destination.name).await?;
        known.highest = store.highest(&client, &destination.name).await?;
        let part = store.waiting(&client, &destination.name, 0, most).await?;
        known.beyond = (!part.complete).then_some(part.last_id);
        known.waiting = waiters(&part, progress.gap);
    }
    let names: Vec<&str> = config.destinations.iter().map(|each| each.name.as_str()).collect();
    // Without a slot no WAL brings anything.
    let from = plan.slot().map_or(Lsn(u64::MAX), |slot| slot.confirmed_flush);
    let letters = store.standing(&client, from, &names).await?;
    let since = store.since(&client, &names, (system, timeline)).await?;
    let wal_from = plan.slot().map(|slot| slot.confirmed_flush);
    let here = (system.clone(), timeline);
    let ledger = Arc::new(Ledger { client, store, generation: row.generation, here, wal_from });
    Ok(Prepared { ledger, plan, ceiling, progress, known, since, letters })
}

/// Often enough that a standby does not take a healthy relay for a silent one.
fn ping_every(take_over_after: Option<Duration>) -> Duration {
    take_over_after.map_or(PING_EVERY, |silence| PING_EVERY.min(silence / 4))
}

/// Takes back what receipts say of messages that a stream lost.
async fn withdraw(store: &Store, client: &Client, tail: &LostTail) -> Result<(), Failure> {
    let LostTail { destination, created, upto } = tail;
    let Withdrawn { receipts, events, letters } =
        store.withdraw(client, destination, created, upto).await?;
    tracing::warn!(
        destination,
        upto = upto.seq,
        receipts,
        events,
        letters,
        "the stream lost messages that it had acknowledged: what the ledger says of those behind \
         `upto` is withdrawn; what is not in the stream is sent again, in the order of the numbers"
    );
    Ok(())
}

/// Records where the history goes on, once the gap that this may mean is on record.
async fn arrive(
    client: &Client,
    relay: &str,
    cluster: &Cluster,
    (system, timeline): (&str, u32),
) -> Result<(), Failure> {
    match cluster {
        Cluster::Same => return Ok(()),
        Cluster::Promoted { was, now } | Cluster::Behind { was, now } => {
            tracing::warn!(was, now, "the server was promoted or restored since the relay last ran")
        }
        Cluster::Other { was, now } => {
            let receipts = identity::rebase(client, relay).await?;
            tracing::warn!(
                was,
                now,
                receipts,
                "another cluster, in which ledger and outbox fit together: the relay goes on here, \
                 in the same generation"
            );
        }
    }
    identity::move_on(client, relay, system, timeline).await
}

fn places(config: &Config, prepared: &Prepared) -> Vec<Place> {
    let generation = prepared.ledger.generation;
    let place = |(destination, since): (&DestinationConfig, &Since)| Place {
        destination: destination.name.clone(),
        envelope: Envelope::new(&config.relay.name, generation, destination),
        blocks_runs: destination.on_dead_letter == OnDeadLetter::BlockRun,
        since: *since,
    };
    config.destinations.iter().zip(&prepared.since).map(place).collect()
}

fn specs(config: &Config, places: &[Place], prepared: &Prepared) -> Vec<DestinationSpec> {
    let known = prepared.known.iter().zip(&prepared.progress);
    let each = config.destinations.iter().zip(places).zip(known);
    each.map(|((destination, place), (known, progress))| {
        let latest = known.latest.as_ref();
        DestinationSpec {
            name: destination.name.clone(),
            filter: destination.filter.clone(),
            envelope: place.envelope.clone(),
            max_in_flight: config.max_in_flight(destination),
            recorded: known.recorded.clone(),
            recorded_to: known.to,
            floor: latest.map(|latest| latest.floor.clone()),
            recorded_known: latest.map_or(0, |latest| latest.stream_seq),
            recorded_newest: latest.and_then(Latest::anchor),
            highest: known.highest,
            recorded_id: latest.map_or(0, |latest| latest.id),
            handed: known.handed.clone(),
            waiting: known.waiting.clone(),
            waiting_beyond: known.beyond,
            gap: progress.gap.is_some(),
            letters: letters::at_start(
                &prepared.letters,
                &destination.name,
                place.blocks_runs,
                &known.recorded,
            ),
        }
    })
    .collect()
}

fn limits(config: &Config) -> Limits {
    Limits {
        memory_bytes: config.event_bytes(),
        receipt_interval: config.relay.receipt_interval,
        receipt_events: u64::try_from(config.relay.receipt_events).unwrap_or(u64::MAX),
        waiting_numbers: NUMBERS_MAX,
    }
}
