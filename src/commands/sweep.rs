//! `outboxd sweep`: looks through the table for rows without a receipt, and has the running relay do
//! the same at once.

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_postgres::Client;

use super::{Stopped, say};
use crate::config::{Config, duration};
use crate::run::clock;
use crate::store::destinations::Progress;
use crate::store::{Store, lock, settle};
use crate::wal::connect_control;

/// Numbers looked at for each destination.
const LIMIT: usize = 100_000;
/// Between two looks while the relay is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Counts the rows that no receipt is about: events on their way, events of a destination that is away,
and rows that the WAL did not bring. The relay looks for the last ones by itself, at its start and
every [relay] sweep_interval; this asks it to do so now, and waits until every row that was found is
decided or handed over. Rows of a destination that is away stay, and are counted at the end.

Exit code 1: rows are left without a receipt, or no relay is running.

Examples:
  outboxd sweep --dry-run           count, change nothing
  outboxd sweep --wait 5m --json")]
pub struct Args {
    /// Look and say; do not ask the relay.
    #[arg(long)]
    pub dry_run: bool,

    /// How long to wait for the relay.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub wait: Duration,

    /// As JSON.
    #[arg(long)]
    pub json: bool,
}

/// What was found for one destination.
#[derive(Debug, Serialize)]
struct Found {
    destination: String,
    /// Rows without a receipt.
    undecided: usize,
    /// There may be more.
    at_least: bool,
    first_seq: Option<i64>,
    last_seq: Option<i64>,
    /// Of them, those that are left; `null` when the relay was not asked.
    left: Option<usize>,
    /// Rows are missing that no WAL brings, and the relay is looking for them.
    gap: bool,
    #[serde(skip)]
    progress: Progress,
    #[serde(skip)]
    seqs: Vec<i64>,
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let (control, _) = connect_control(&config.source).await?;
    let client = &control.client;
    settle(client).await?;
    let relay = &config.relay.name;
    let store = Store::open(client, relay, &config.source).await?;
    let names: Vec<&str> = config.destinations.iter().map(|each| each.name.as_str()).collect();
    let mut found = Vec::new();
    let to = store.last_number(client).await?;
    for progress in store.progress(client, &names).await? {
        let look = store.look(client, &progress, to, &[], LIMIT).await?;
        let (seqs, at_least) = (look.undecided, look.covered_to < look.to);
        found.push(Found {
            destination: progress.name.clone(),
            undecided: seqs.len(),
            at_least,
            first_seq: seqs.first().copied(),
            last_seq: seqs.last().copied(),
            left: None,
            gap: progress.gap.is_some(),
            progress,
            seqs,
        });
    }
    if args.dry_run {
        return Ok(say(&told(args, &found))?);
    }
    if lock::holder(client, relay).await?.is_none() {
        say(&told(args, &found))?;
        let words = "no relay of this name is running: start `outboxd run`, it looks by itself";
        eprintln_words(words);
        return Err(Stopped::Refused);
    }
    store.ask_for_sweep(client).await?;
    let deadline = clock::now() + args.wait;
    wait(client, &store, &mut found, deadline).await?;
    say(&told(args, &found))?;
    match found.iter().all(|one| one.left == Some(0)) {
        true => Ok(()),
        false => Err(Stopped::Refused),
    }
}

fn eprintln_words(words: &str) {
    use std::io::Write;
    // Nobody reads: the exit code is what is left to say.
    drop(writeln!(std::io::stderr(), "error: {words}"));
}

/// Looks again until none of what was found is left, or the time is over.
async fn wait(
    client: &Client,
    store: &Store,
    found: &mut [Found],
    deadline: Instant,
) -> Result<(), Stopped> {
    loop {
        let mut left = 0;
        for one in found.iter_mut().filter(|one| one.left != Some(0)) {
            let Some(last) = one.last_seq else {
                one.left = Some(0);
                continue;
            };
            let look = store.look(client, &one.progress, last, &[], LIMIT).await?;
            let still = one.seqs.iter().filter(|seq| look.undecided.binary_search(seq).is_ok());
            let still = still.count();
            one.left = Some(still);
            left += still;
        }
        if left == 0 || clock::now() >= deadline {
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn told(args: &Args, found: &[Found]) -> String {
    if args.json {
        let report = serde_json::json!({ "destinations": found });
        return format!("{report:#}");
    }
    let line = |one: &Found| {
        let least = if one.at_least { "at least " } else { "" };
        let seqs = one.first_seq.zip(one.last_seq);
        let seqs = seqs.map(|(first, last)| format!(", seq {first} to {last}"));
        let left = one.left.map(|left| format!("; {left} of them are left"));
        let gap = if one.gap { "; a gap is being bridged" } else { "" };
        format!(
            "destination {}: {least}{} rows without a receipt{}{}{gap}",
            one.destination,
            one.undecided,
            seqs.unwrap_or_default(),
            left.unwrap_or_default()
        )
    };
    found.iter().map(line).collect::<Vec<_>>().join("\n")
}
