//! `outboxd adopt`: takes over a table from a relay that marks its rows, so that what it published is
//! not sent again and what it left is sent in order.

use super::{Stopped, say};
use crate::config::Config;
use crate::error::{Failure, Kind};
use crate::finding::Severity;
use crate::store::{Store, adopt, identity, lock, rules, schema, settle, shape};
use crate::wal::connect_upkeep;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
For the moment between a polling relay that sets [source.columns] published_at and this one. Run
`outboxd init` while the other relay still works, stop that one in order, then run this, then `outboxd
run`. Rows that have the mark are recorded as published; rows that have not are sent, those that no slot
brings first, in the order of their numbers. May be repeated, and run again after a time with the other
relay. docs/migrate-from-polling.md says why in this order.

Waits for transactions that write to the table now, and holds up none of them. Reads the whole table,
unless an index knows the rows without a mark. Needs SELECT on it, INSERT on outbox.receipt and UPDATE on
outbox.destination: the relay's role has them.

Examples:
  outboxd adopt --dry-run
  outboxd adopt")]
pub struct Args {
    /// Say what would be recorded, and record nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let (relay, source) = (&config.relay.name, &config.source);
    let (control, server) = connect_upkeep(source).await?;
    let client = &control.client;
    settle(client).await?;
    schema::require(client).await?;
    if source.table.is_outbox_event() {
        return refused("outbox.event has no other relay: adopt is for a table of your own");
    }
    let marked =
        crate::config::SourceConfig { mark: crate::config::Mark::Column, ..source.clone() };
    let table = shape::find(client, &source.table, &source.columns).await?;
    let findings = rules::table(table.as_ref(), &marked);
    let misfits = findings.into_iter().filter(|finding| {
        finding.severity == Severity::Failure && finding.id != "source.mark-right"
    });
    rules::refuse(Kind::TableShape, &misfits.collect::<Vec<_>>())?;
    if !lock::try_lock(client, relay).await? {
        let holder = lock::holder(client, relay).await?;
        let pid = holder.map_or_else(String::new, |holder| format!(" (backend {})", holder.pid));
        return refused(&format!("relay {relay} runs{pid}: stop it first, in order (SIGTERM)"));
    }
    let row = identity::read(client, relay, &source.table).await?;
    let Some(row) = row else {
        return refused(&format!("relay {relay} is not known here: run `outboxd init` first"));
    };
    row.require_cluster(relay, &server.system_identifier)?;

    let store = Store::open(client, relay, source).await?;
    let mark = store.mark_frontier(client).await?;
    let open = mark.open.len();
    if open > 0 {
        say(&format!("{:<11}for {open} transactions that write to the table", "wait"))?;
    }
    store.all_ended(client, mark.open).await?;
    if let Some((pid, name)) = adopt::holders(client, source).await?.first() {
        return refused(&format!(
            "backend {pid} ({name}) has rows of {}.{} locked, as a polling relay does: stop it first",
            source.table.schema, source.table.name
        ));
    }
    let adopted =
        adopt::adopt(client, relay, source, row.generation, mark.last, args.dry_run).await?;
    report(args, &adopted)
}

fn report(args: &Args, adopted: &adopt::Adopted) -> Result<(), Stopped> {
    let does = if args.dry_run { "would take" } else { "take" };
    for (name, from, rows) in &adopted.destinations {
        say(&format!(
            "{does:<11}destination {name}: {rows} rows above seq {from} as published by another relay"
        ))?;
    }
    let left = match adopted.open_seqs {
        Some((first, last)) => format!("{} rows to send, seq {first} to {last}", adopted.open),
        None => "no row to send".to_owned(),
    };
    say(&format!("{:<11}{left}", "left"))?;
    if adopted.unnumbered > 0 {
        let detail = format!(
            "{} rows without a mark have no number, and can't be sent: let the other relay publish them",
            adopted.unnumbered
        );
        return Err(Failure::new(Kind::TableShape, detail).into());
    }
    Ok(())
}

fn refused(why: &str) -> Result<(), Stopped> {
    say(&format!("{:<11}{why}", "refused"))?;
    Err(Stopped::Refused)
}
