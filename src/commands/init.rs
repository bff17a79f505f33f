//! `outboxd init`: makes what is missing, adopts what fits, refuses what doesn't. Looks first: a
//! refusal leaves the database as it was.

use tokio_postgres::Client;

use super::{Stopped, say};
use crate::config::{Config, DestinationConfig};
use crate::error::{Failure, Kind};
use crate::finding::Finding;
use crate::publish::streams::{self, Broker};
use crate::store::facts::{self, SourceFacts};
use crate::store::retention::{Step, StepKind};
use crate::store::schema::Payload;
use crate::store::slot::SlotState;
use crate::store::{Store, grants, identity, publication, rules, schema, settle, slot};
use crate::upkeep::retention::Pass;
use crate::wal::{Identity, connect_control};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Makes schema, grants, publication, the relay's rows and its slot, in this order, and may be run again
at any time. Needs the right to create a schema and a publication, and REPLICATION.

A relay that ran before and has lost its slot gets a new one. What was committed in between is in no
slot's reach: the relay finds it in the table, ahead of what the new slot brings.

With [relay] stream = false no slot is made.

Examples:
  outboxd init --dry-run
  outboxd init --role outboxd --writer app --create-streams")]
pub struct Args {
    /// Say what would be done and do nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// Create every stream that is missing, with the settings of [destination.NAME.create].
    #[arg(long)]
    pub create_streams: bool,

    /// Type of the payload column [default: json].
    #[arg(long, value_enum)]
    pub payload: Option<Payload>,

    /// Role that runs the relay: grant it what it needs.
    #[arg(long, value_name = "ROLE")]
    pub role: Option<String>,

    /// Role that writes events: grant it what it needs; may be repeated.
    #[arg(long, value_name = "ROLE")]
    pub writer: Vec<String>,

    /// Make the slot without copies on standbys (PostgreSQL 17 and newer make them).
    #[arg(long)]
    pub no_failover: bool,
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let (control, server) = connect_control(&config.source).await?;
    let client = &control.client;
    settle(client).await?;
    let facts = facts::collect(client, config).await?;
    refuse_misfits(args, config, &facts, &server)?;
    let streams = Streams::look(args, config).await?;
    let steps = Steps { args, config, client };
    steps.schema(&facts).await?;
    steps.partitions(&facts).await?;
    steps.grants().await?;
    steps.publication(&facts).await?;
    steps.relay(&facts, &server).await?;
    steps.destinations(&facts).await?;
    steps.slot(&facts).await?;
    steps.streams(&streams).await
}

/// The streams that `init` was told to create.
struct Streams<'a> {
    present: Vec<&'a DestinationConfig>,
    missing: Vec<(&'a DestinationConfig, Broker)>,
}

impl Streams<'_> {
    /// Connects to their brokers, before anything is made.
    async fn look<'a>(args: &Args, config: &'a Config) -> Result<Streams<'a>, Failure> {
        let mut streams = Streams { present: Vec::new(), missing: Vec::new() };
        let told = |each: &&DestinationConfig| args.create_streams || each.create.enabled;
        for destination in config.destinations.iter().filter(told) {
            if streams.missing.iter().any(|(first, _)| first.is_beside(destination)) {
                continue;
            }
            let mut broker = streams::connect(destination).await?;
            let inspection = broker.inspect().await?;
            match inspection.stream {
                None => {
                    // The first of those that write one stream says how it is made.
                    let beside =
                        config.destinations.iter().filter(|one| one.is_beside(destination));
                    beside.for_each(|one| broker.share(one));
                    streams.missing.push((destination, broker));
                }
                Some(_) => {
                    inspection.usable?;
                    streams.present.push(destination);
                }
            }
        }
        Ok(streams)
    }
}

/// Everything that is there must fit: what differs is named, and nothing is changed.
fn refuse_misfits(
    args: &Args,
    config: &Config,
    facts: &SourceFacts,
    server: &Identity,
) -> Result<(), Failure> {
    let source = &config.source;
    let needs_slot = facts.slot == SlotState::Missing;
    for finding in rules::server(&facts.server, needs_slot) {
        // An existing slot needs no right of ours; the relay's role may be another.
        let of_slot = ["source.replication-right", "source.wal-level", "source.free-slot"];
        if config.relay.stream && (needs_slot || finding.id != "source.replication-right")
            || !of_slot.contains(&finding.id)
        {
            rules::refuse(kind_of(finding.id), &[finding])?;
        }
    }
    match &facts.schema {
        Err(failure) => return Err(failure.clone()),
        Ok(Some(found)) if *found > schema::VERSION => {
            let detail = format!(
                "schema outbox has version {found}, this program knows versions up to {}",
                schema::VERSION
            );
            return Err(Failure::new(Kind::SchemaVersion, detail));
        }
        Ok(_) => {}
    }
    if facts.table.is_some() || !schema::is_own(&source.table) || facts.schema != Ok(None) {
        let findings: Vec<Finding> = rules::table(facts.table.as_ref(), source)
            .into_iter()
            // About the relay's role, which may be another.
            .filter(|finding| !["source.row-security", "source.mark-right"].contains(&finding.id))
            .collect();
        rules::refuse(Kind::TableShape, &findings)?;
    }
    refuse_other_payload(args, config, facts)?;
    if let Some(found) = &facts.publication {
        let findings = rules::publication(Some(found), source);
        rules::refuse(Kind::PublicationShape, &findings)?;
    }
    let finding = rules::slot(&facts.slot, source);
    match &facts.slot {
        SlotState::Missing => {}
        SlotState::Lost { .. } => rules::refuse(Kind::SlotLost, &[finding])?,
        SlotState::Foreign { .. } => rules::refuse(Kind::SlotForeign, &[finding])?,
        SlotState::Creating { .. } => rules::refuse(Kind::SlotHeld, &[finding])?,
        SlotState::Ok(_) if facts.publication.is_none() => {
            let detail = format!(
                "slot {} exists and publication {} does not",
                source.slot, source.publication
            );
            return Err(Failure::new(Kind::PublicationMissing, detail));
        }
        SlotState::Ok(_) => {}
    }
    match facts.relay.clone()? {
        Some(row) => row.require_cluster(&config.relay.name, &server.system_identifier),
        None => Ok(()),
    }
}

fn kind_of(id: &str) -> Kind {
    match id {
        "source.wal-level" => Kind::WalLevel,
        "source.primary" => Kind::SourceReadOnly,
        "source.replication-right" => Kind::Privilege,
        "source.free-slot" => Kind::SourceFull,
        _ => Kind::Database,
    }
}

fn refuse_other_payload(args: &Args, config: &Config, facts: &SourceFacts) -> Result<(), Failure> {
    let (Some(payload), Some(table)) = (args.payload, &facts.table) else { return Ok(()) };
    let name = &config.source.columns.payload;
    let found = table.columns.iter().find(|column| column.name == *name);
    match found {
        Some(column) if column.type_name != payload.type_name() => {
            let detail =
                format!("column {name} has type {}, not {}", column.type_name, payload.type_name());
            Err(Failure::new(Kind::TableShape, detail))
        }
        _ => Ok(()),
    }
}

struct Steps<'a> {
    args: &'a Args,
    config: &'a Config,
    client: &'a Client,
}

impl Steps<'_> {
    /// Says what is about to be done; true when it is to be done.
    fn begin(&self, object: &str, what: &str) -> Result<bool, Stopped> {
        let mark = if self.args.dry_run { "would make" } else { "make" };
        say(&format!("{mark:<11}{object}{what}"))?;
        Ok(!self.args.dry_run)
    }

    fn kept(object: &str, what: &str) -> Result<(), Stopped> {
        say(&format!("{:<11}{object}{what}", "keep"))?;
        Ok(())
    }

    async fn schema(&self, facts: &SourceFacts) -> Result<(), Stopped> {
        let found = facts.schema.clone()?.unwrap_or(0);
        if found == schema::VERSION {
            return Self::kept("schema outbox", &format!(", version {found}"));
        }
        let from = if found > 0 { format!(" from version {found}") } else { String::new() };
        let what = format!(", version {}{from}", schema::VERSION);
        if self.begin("schema outbox", &what)? {
            schema::migrate(self.client, self.args.payload.unwrap_or_default()).await?;
        }
        Ok(())
    }

    async fn grants(&self) -> Result<(), Stopped> {
        if let Some(role) = &self.args.role {
            if self.begin(&format!("grants for role {role}"), ", the relay's")? {
                let (source, removes_rows) =
                    (&self.config.source, self.config.retention.removes_rows());
                let mut grants = schema::relay_grants(role, &source.table, removes_rows);
                grants.extend(grants::table_grants(role, source));
                schema::grant(self.client, &grants).await?;
            }
            let note = match facts::may_replicate(self.client, role).await? {
                Some(true) => None,
                Some(false) => {
                    Some(format!("may not use replication: ALTER ROLE {role} REPLICATION"))
                }
                None => Some("does not exist".to_owned()),
            };
            if let Some(note) = note {
                say(&format!("{:<11}role {role} {note}", "note"))?;
            }
        }
        for role in &self.args.writer {
            if self.begin(&format!("grants for role {role}"), ", a writer's")? {
                schema::grant(self.client, &schema::writer_grants(role)).await?;
            }
        }
        Ok(())
    }

    async fn publication(&self, facts: &SourceFacts) -> Result<(), Stopped> {
        let source = &self.config.source;
        let object = format!("publication {}", source.publication);
        if facts.publication.is_some() {
            return Self::kept(&object, "");
        }
        let what = format!(" of {}.{}", source.table.schema, source.table.name);
        if self.begin(&object, &what)? {
            publication::create(self.client, &source.publication, &source.table).await?;
        }
        Ok(())
    }

    /// Before the slot, so that what is committed from here on is either in the slot's reach or
    /// above the place where the first look through the table begins.
    async fn destinations(&self, facts: &SourceFacts) -> Result<(), Stopped> {
        let destinations = &self.config.destinations;
        let wanted: Vec<(&str, bool)> =
            destinations.iter().map(|each| (each.name.as_str(), each.required)).collect();
        let names: Vec<&str> = wanted.iter().map(|(name, _)| *name).collect();
        if self.args.dry_run {
            return Ok(());
        }
        let (name, source) = (&self.config.relay.name, &self.config.source);
        let store = Store::open(self.client, name, source).await?;
        let known = store.progress(self.client, &names).await?;
        store.begin_destinations(self.client, &wanted).await?;
        if facts.slot == SlotState::Missing && !known.is_empty() && self.config.relay.stream {
            let known: Vec<&str> = known.iter().map(|one| one.name.as_str()).collect();
            store.open_gap(self.client, &known).await?;
            let what = "rows that no slot brings are sent first, from the table";
            say(&format!("{:<11}a gap at {}: {what}", "record", known.join(", ")))?;
        }
        Ok(())
    }

    async fn slot(&self, facts: &SourceFacts) -> Result<(), Stopped> {
        let name = &self.config.source.slot;
        let object = format!("slot {name}");
        if !self.config.relay.stream {
            return Self::kept(&object, ", not wanted: [relay] stream = false");
        }
        if let SlotState::Ok(slot) = &facts.slot {
            return Self::kept(&object, &format!(" at {}", slot.confirmed_flush));
        }
        if self.begin(&object, ", when the transactions that are open now have ended")? {
            let lsn = slot::create(self.client, name, !self.args.no_failover).await?;
            identity::set_ceiling(self.client, &self.config.relay.name, lsn).await?;
            say(&format!("{:<11}{object} streams from {lsn}", ""))?;
        }
        Ok(())
    }

    async fn relay(&self, facts: &SourceFacts, server: &Identity) -> Result<(), Stopped> {
        let name = &self.config.relay.name;
        let object = format!("relay {name}");
        if let Some(row) = facts.relay.clone()? {
            return Self::kept(&object, &format!(", generation {}", row.generation));
        }
        if self.begin(&object, &format!(" of cluster {}", server.system_identifier))? {
            let table = &self.config.source.table;
            let (system, timeline) = (&server.system_identifier, server.timeline);
            identity::read_or_create(self.client, name, table, system, timeline).await?;
            identity::name_columns(self.client, name, &self.config.source.columns).await?;
        }
        Ok(())
    }

    /// The partitions of the next days. The relay makes them too; here they come before the first
    /// row, and the default partition stays empty.
    async fn partitions(&self, facts: &SourceFacts) -> Result<(), Stopped> {
        let Config { retention, source, .. } = self.config;
        if !retention.manage || !schema::is_own(&source.table) {
            return Ok(());
        }
        let days = retention.ahead.as_secs() / 86_400;
        // The table may be yet to be made.
        if facts.table.is_none() && self.args.dry_run {
            self.begin("partitions of outbox.event", &format!(", {days} days ahead"))?;
            return Ok(());
        }
        let Args { dry_run, .. } = *self.args;
        let pass = Pass { config: self.config, keep: None, hold_inserts: false, dry_run };
        let mut made = 0;
        let mut count = |step: &Step| made += u64::from(step.step == StepKind::Made);
        pass.partitions(self.client, &mut count).await?;
        let object = "partitions of outbox.event";
        let what = format!(", {days} days ahead");
        if made == 0 {
            return Self::kept(object, &what);
        }
        self.begin(object, &format!("{what}: {made} more"))?;
        Ok(())
    }

    async fn streams(&self, streams: &Streams<'_>) -> Result<(), Stopped> {
        for destination in &streams.present {
            Self::kept(&format!("stream {}", destination.stream), "")?;
        }
        for (destination, broker) in &streams.missing {
            let object = format!("stream {}", destination.stream);
            if self.begin(&object, &format!(" {}", broker.stream_plan()))? {
                broker.create_stream().await?;
            }
        }
        Ok(())
    }
}
