//! `outboxd dead-letters`: finds events that could not be published, shows them, and carries out
//! what was decided about them. The running relay does the sending.

mod change;
mod report;
mod select;
mod show;

use serde::Serialize;
use std::fmt::Write as _;

use super::{Stopped, plain, say};
use crate::config::Config;
use crate::store::dead_letters::desk::{self, Found, Letter, State};
use crate::store::settle;
use crate::wal::{Control, connect_control};
use select::Select;
pub(super) use select::when;

/// Which.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
Examples:
  outboxd dead-letters list
  outboxd dead-letters show 17
  outboxd dead-letters redrive 17 --why 'max_msg_size of the stream raised'
  outboxd dead-letters redrive --reason too_large --all --why 'max_msg_size raised' --dry-run
  outboxd dead-letters discard --run order-4711 --all --why 'order was a test'
  outboxd dead-letters list --state all --since 1d --json | jq '.letters[].event_id'")]
pub enum Command {
    /// List letters, the oldest first; open ones unless --state says otherwise.
    List(ListArgs),
    /// Show one letter with all that is needed to decide about it.
    Show(show::Args),
    /// Have the relay send letters again, at the end of their runs; ahead of what waits for them
    /// where a run is blocked.
    Redrive(change::RedriveArgs),
    /// Give letters up: never to be sent. Runs that wait behind them go on.
    Discard(change::DiscardArgs),
}

/// Arguments of `list`.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    #[command(flatten)]
    select: Select,

    /// Letters at most; how many more there are is said.
    #[arg(long, value_name = "N", default_value_t = 50)]
    limit: u32,

    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Runs one of them.
pub async fn run(command: &Command, config: &Config) -> Result<(), Stopped> {
    match command {
        Command::List(args) => list(args, config).await,
        Command::Show(args) => show::run(args, config).await,
        Command::Redrive(args) => change::redrive(args, config).await,
        Command::Discard(args) => change::discard(args, config).await,
    }
}

/// A settled session.
async fn connect(config: &Config) -> Result<Control, Stopped> {
    let (control, _) = connect_control(&config.source).await?;
    settle(&control.client).await?;
    Ok(control)
}

/// JSON of `list`.
#[derive(Debug, Serialize)]
struct List<'a> {
    letters: &'a [Letter],
    more: i64,
}

async fn list(args: &ListArgs, config: &Config) -> Result<(), Stopped> {
    let control = connect(config).await?;
    let open = [State::Buried, State::Redriving];
    let filter = args.select.filter(&open);
    let limit = i64::from(args.limit);
    let found = desk::find(&control.client, &config.relay.name, &filter, limit).await?;
    let text = if args.json {
        json(&List { letters: &found.letters, more: found.more })
    } else {
        table(&found)
    };
    say(&text)?;
    Ok(())
}

/// Pretty JSON; the types that are printed can't fail to become it.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// Two lines for each letter: what it is, and what is wrong with it.
fn table(found: &Found) -> String {
    let mut text = String::new();
    for letter in &found.letters {
        let blocks =
            if letter.blocks_run && is_open(letter.state) { ", blocks its run" } else { "" };
        // Writing to a String can't fail.
        writeln!(
            text,
            "{:<7} {:<10} {} {}{blocks}",
            letter.id,
            letter.state.as_str(),
            letter.buried_at,
            plain(&event(letter)),
        )
        .unwrap_or_default();
        writeln!(text, "{:18} {}: {}", "", letter.reason, plain(&letter.detail))
            .unwrap_or_default();
    }
    match (found.letters.is_empty(), found.more) {
        (true, 0) => text.push_str("no dead letters\n"),
        (_, 0) => {}
        (_, more) => writeln!(text, "{more} more: see --limit").unwrap_or_default(),
    }
    text
}

/// An event in a few words.
fn event(letter: &Letter) -> String {
    let run = letter.run_id.as_ref().map_or(String::new(), |run| format!(" run {run}"));
    format!("{}: seq {}{run} kind {}", letter.destination, letter.seq, letter.kind)
}

fn is_open(state: State) -> bool {
    matches!(state, State::Buried | State::Redriving)
}

#[cfg(test)]
mod tests;
