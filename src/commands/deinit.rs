//! `outboxd deinit`: takes away what `init` made; data only when it is told so twice.

use tokio_postgres::Client;

use super::{Stopped, say};
use crate::config::Config;
use crate::store::facts::{self, SourceFacts};
use crate::store::slot::{Slot, SlotState};
use crate::store::{publication, schema, settle, slot, unrecorded};
use crate::wal::connect_control;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Drops slot and publication; schema, events and ledger stay. Events that are committed while there
is no slot, and those that the slot would still bring, are found in the table later, in the order of
their numbers and not in that of their commits; those that were deleted by then are lost. So a slot
that is behind is dropped only with --yes, and the refusal says how far it is behind.

Examples:
  outboxd deinit --dry-run
  outboxd deinit --slot-only              the slot is lost: drop it, then `outboxd init`
  outboxd deinit --schema --yes           drop events, ledger and dead letters too")]
pub struct Args {
    /// Say what would be done and do nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// Drop the slot and keep the publication.
    #[arg(long, conflicts_with = "schema")]
    pub slot_only: bool,

    /// Drop the schema `outbox` too: events, ledger and dead letters of every relay.
    #[arg(long)]
    pub schema: bool,

    /// Really drop the schema, or a slot that is behind and so may hold undelivered events.
    #[arg(long)]
    pub yes: bool,
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let (control, _) = connect_control(&config.source).await?;
    let client = &control.client;
    settle(client).await?;
    let facts = facts::collect(client, config).await?;
    if let Some(why) = obstacle(args, config, &facts) {
        say(&format!("{:<11}{why}", "refused"))?;
        return Err(Stopped::Refused);
    }
    if let SlotState::Ok(slot) = &facts.slot
        && slot.behind_bytes > 0
    {
        let stake = at_stake(client, config, slot).await;
        if !args.yes && !args.dry_run {
            say(&format!("{:<11}{stake}: add --yes to drop it all the same", "refused"))?;
            return Err(Stopped::Refused);
        }
        say(&format!("{:<11}{stake}", "note"))?;
    }
    let source = &config.source;
    let object = format!("slot {}", source.slot);
    if facts.slot == SlotState::Missing {
        absent(&object)?;
    } else if begin(args, &object)? {
        slot::drop(client, &source.slot).await?;
    }
    if args.slot_only {
        return Ok(());
    }
    let object = format!("publication {}", source.publication);
    if facts.publication.is_none() {
        absent(&object)?;
    } else if begin(args, &object)? {
        publication::drop(client, &source.publication).await?;
    }
    if args.schema {
        let object = "schema outbox";
        if facts.schema == Ok(None) {
            absent(object)?;
        } else if begin(args, object)? {
            schema::drop(client).await?;
        }
    }
    Ok(())
}

/// Looked for before anything is dropped.
fn obstacle(args: &Args, config: &Config, facts: &SourceFacts) -> Option<String> {
    let slot = &config.source.slot;
    if let Some(holder) = &facts.holder {
        let relay = &config.relay.name;
        return Some(format!("relay {relay} runs (backend {}): stop it first", holder.pid));
    }
    let active_pid = match &facts.slot {
        SlotState::Foreign { why } => return Some(format!("slot {slot} is {why}, none of ours")),
        SlotState::Ok(slot) => slot.active_pid,
        SlotState::Creating { active_pid } => *active_pid,
        SlotState::Missing | SlotState::Lost { .. } => None,
    };
    if let Some(pid) = active_pid {
        return Some(format!("backend {pid} uses slot {slot}: end it first"));
    }
    (args.schema && !args.yes && !args.dry_run).then(|| {
        "--schema drops events, ledger and dead letters of every relay: add --yes".to_owned()
    })
}

/// What a slot would still bring: bytes of WAL, and rows as far as the table still has them.
async fn at_stake(client: &Client, config: &Config, slot: &Slot) -> String {
    let names: Vec<_> = config.destinations.iter().map(|each| each.name.as_str()).collect();
    let rows = unrecorded::count(client, &config.relay.name, &config.source, &names).await;
    let rows = match rows {
        Ok(rows) => rows.iter().map(|each| format!("; {each}")).collect(),
        // Without schema or rights: the bytes alone must do.
        Err(failure) => format!("; {failure}"),
    };
    format!(
        "slot {} is {} bytes of WAL behind, from {} on: undelivered events in them are left to \
         the table{rows}",
        config.source.slot, slot.behind_bytes, slot.confirmed_flush
    )
}

fn begin(args: &Args, object: &str) -> Result<bool, Stopped> {
    let mark = if args.dry_run { "would drop" } else { "drop" };
    say(&format!("{mark:<11}{object}"))?;
    Ok(!args.dry_run)
}

fn absent(object: &str) -> Result<(), Stopped> {
    say(&format!("{:<11}{object}", "absent"))?;
    Ok(())
}
