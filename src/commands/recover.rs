//! `outboxd recover`: after a restore to an older point the stream has messages that the database does
//! not know. Shows them, and begins a new generation in which the relay goes on.

mod find;
mod report;

use serde::Serialize;
use tokio_postgres::Client;

use super::{Stopped, say};
use crate::config::{Config, DestinationConfig};
use crate::error::{Failure, Kind};
use crate::message::Envelope;
use crate::message::boundary::{self, Boundary};
use crate::publish::recovery::Desk;
use crate::relay::outcome::Floor;
use crate::run::plan::Cluster;
use crate::store::generation::Beginning;
use crate::store::history::Continuity;
use crate::store::orphans::Question;
use crate::store::slot::{self, SlotState};
use crate::store::{Store, identity, lock, shape};
use crate::wal::connect_control;
use find::Seen;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
For a database that was restored to an older point: the stream has messages of events that the database
does not know any more, and their numbers are given again, to other events. `outboxd run` refuses to go on
over that (history-lost, ledger-ahead, ledger-short), and this command is its way out. Stop the relay
first.

It reads the streams from where the ledger says that everything is known, compares each message with the
table, waits until transactions that were open have ended, and lists the orphans: messages of this relay
whose number has another event, or none and no receipt. With --yes it begins a generation above all
that were seen. What is in the streams and in the table is recorded as published; each stream gets a
message that tells consumers where the new history begins (see docs/messages.md); orphans stay where they
are, and --quarantine copies them. Then start `outboxd run`. It is done for all destinations or for none.

Exit code 1: something was found, and --yes was not given; or a relay of this name is running.

Examples:
  outboxd recover --dry-run                        look, change nothing
  outboxd recover --json | jq '.destinations[].orphans'
  outboxd recover --yes --quarantine LOST_EVENTS")]
pub struct Args {
    /// Look and say, change nothing, exit with 0.
    #[arg(long)]
    pub dry_run: bool,

    /// Really begin the new generation.
    #[arg(long)]
    pub yes: bool,

    /// Copy the orphans to this stream first; it is made if there is none.
    #[arg(long, value_name = "STREAM")]
    pub quarantine: Option<String>,

    /// Begin a generation although nothing was found: ids that are no uuids, in a table without
    /// `created_at`, look the same when they are used again.
    #[arg(long)]
    pub force: bool,

    /// As JSON: one object at the end.
    #[arg(long)]
    pub json: bool,
}

/// Everything that is found.
#[derive(Debug, Serialize)]
struct Found {
    relay: String,
    system_identifier: String,
    timeline: u32,
    cluster: String,
    /// Does the ledger fit the outbox?
    ledger: String,
    slot: String,
    wal_end: String,
    /// The outbox's last number.
    last_seq: i64,
    /// The table's.
    generation: i32,
    new_generation: i32,
    destinations: Vec<Seen>,
    /// The new generation has begun.
    done: bool,
    #[serde(skip)]
    continuity: Continuity,
    #[serde(skip)]
    same_cluster: bool,
}

impl Found {
    fn orphans(&self) -> usize {
        self.destinations.iter().map(|one| one.orphans.len()).sum()
    }

    fn is_sound(&self) -> bool {
        let known = |one: &Seen| one.generation.is_none_or(|seen| seen <= self.generation);
        self.continuity == Continuity::Fits
            && self.orphans() == 0
            && self.destinations.iter().all(known)
    }
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let (control, server) = connect_control(&config.source).await?;
    let (client, relay, source) = (&control.client, &config.relay.name, &config.source);
    let store = Store::open(client, relay, source).await?;
    shape::require(client, source).await?;
    if !lock::try_lock(client, relay).await? {
        let holder = lock::holder(client, relay).await?;
        let pid = holder.map_or_else(String::new, |holder| format!(" (backend {})", holder.pid));
        return refused(&format!("relay {relay} runs{pid}: stop it first"));
    }
    let Some(row) = identity::read(client, relay, &source.table).await? else {
        return refused(&format!("relay {relay} is not known here: run `outboxd init` first"));
    };
    let now = (server.system_identifier.as_str(), server.timeline);
    let cluster = Cluster::compare((&row.system_identifier, row.timeline), now);
    let continuity = store.continuity(client).await?;
    let mut found = Found {
        relay: relay.clone(),
        system_identifier: server.system_identifier.clone(),
        timeline: server.timeline,
        cluster: report::cluster(&cluster),
        ledger: report::ledger(&continuity),
        slot: slot_words(&slot::find(client, &source.slot).await?),
        wal_end: store.pulse(client).await?.wal_end.to_string(),
        last_seq: store.last_number(client).await?,
        generation: row.generation,
        new_generation: row.generation,
        destinations: Vec::new(),
        done: false,
        continuity,
        same_cluster: !matches!(cluster, Cluster::Other { .. }),
    };
    for destination in &config.destinations {
        if !args.json {
            let stream = &destination.stream;
            say(&format!("{:<11}stream {stream} of destination {}", "read", destination.name))?;
        }
        let seen = look(&store, client, destination, &found).await?;
        found.destinations.push(seen);
    }
    let highest = found.destinations.iter().filter_map(|one| one.generation).max();
    found.new_generation = highest.unwrap_or(0).max(row.generation).saturating_add(1);
    if found.is_sound() && !args.force {
        return Ok(say(&report::told(args.json, &found))?);
    }
    if !args.yes || args.dry_run {
        say(&report::told(args.json, &found))?;
        if args.dry_run {
            return Ok(());
        }
        if !args.json {
            say("refused    add --yes to begin the new generation")?;
        }
        return Err(Stopped::Refused);
    }
    begin(args, config, &store, client, &mut found).await?;
    Ok(say(&report::told(args.json, &found))?)
}

/// Reads what a stream has of this relay. Where the ledger can't be trusted, all of it.
async fn look(
    store: &Store,
    client: &Client,
    destination: &DestinationConfig,
    found: &Found,
) -> Result<Seen, Failure> {
    let latest = store.latest(client, &destination.name).await?;
    let trusted = latest.filter(|_| found.continuity == Continuity::Fits);
    let floor = trusted.map_or_else(Floor::default, |latest| latest.floor);
    let envelope = Envelope::new(&found.relay, found.generation, destination);
    let resumed = Desk::open(destination).await?.read(&envelope, floor).await?;
    let known_to = match found.continuity {
        Continuity::Ahead { last, .. } => last,
        Continuity::Fits | Continuity::Short { .. } => i64::MAX,
    };
    let question = Question {
        destination: &destination.name,
        known_to,
        same_cluster: found.same_cluster,
        wal_from: None,
    };
    find::sort(store, client, destination, resumed, question).await
}

/// First what consumers and people may look at, then the ledger: a command that is cut off between
/// the two is run again, and finds the same.
async fn begin(
    args: &Args,
    config: &Config,
    store: &Store,
    client: &Client,
    found: &mut Found,
) -> Result<(), Stopped> {
    let (generation, relay) = (found.new_generation, found.relay.clone());
    let boundary =
        Boundary { previous: generation - 1, last_seq: found.last_seq, orphans: found.orphans() };
    let mut beginnings = Vec::new();
    for (destination, seen) in config.destinations.iter().zip(&mut found.destinations) {
        let mut desk = Desk::open(destination).await?;
        if let Some(stream) = &args.quarantine {
            let to = desk.quarantine(stream).await?;
            for orphan in &seen.orphans {
                desk.copy(orphan.stream_seq, &to).await?;
                seen.quarantined += 1;
            }
        }
        let envelope = Envelope::new(&relay, generation, destination);
        let message = boundary::encode(&boundary, &envelope)
            .ok_or_else(|| Failure::new(Kind::Internal, "names that can't be headers"))?;
        let at = match desk.publish(message).await {
            Ok(seq) => seq,
            // A stream for some kinds only need not store this one.
            Err(failure) if failure.kind == Kind::StreamSubjects => seen.read_to,
            Err(failure) => return Err(failure.into()),
        };
        seen.boundary = Some(at).filter(|at| *at > seen.read_to);
        beginnings.push(Beginning {
            destination: destination.name.clone(),
            stream: destination.stream.clone(),
            floor: Floor { created: seen.created.clone(), seq: at },
            published: seen.published.iter().collect(),
            events: seen.events,
        });
    }
    let now = (found.system_identifier.as_str(), found.timeline);
    store.begin_generation(client, generation, now, &found.continuity, &beginnings).await?;
    found.done = true;
    Ok(())
}

fn slot_words(slot: &SlotState) -> String {
    match slot {
        SlotState::Ok(slot) => format!("confirmed {}", slot.confirmed_flush),
        SlotState::Missing => {
            "missing: the relay makes one, and sends what it does not bring".into()
        }
        SlotState::Creating { .. } => "still being created".into(),
        SlotState::Lost { reason } => format!("lost: {reason}"),
        SlotState::Foreign { why } => why.clone(),
    }
}

fn refused(why: &str) -> Result<(), Stopped> {
    say(&format!("{:<11}{why}", "refused"))?;
    Err(Stopped::Refused)
}
