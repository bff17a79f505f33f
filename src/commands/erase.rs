//! `outboxd erase`: removes what the database holds of one run, say of a person who asks for it.

use super::{Stopped, say};
use crate::config::{Config, DestinationConfig};
use crate::store::erase::Batch;
use crate::store::{erase, schema, settle};
use crate::wal::connect_upkeep;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Removes the run's rows from the outbox table, decided or not, and its dead letters. What was not yet
published is recorded as gone, so that nobody waits for it; what the relay has in memory or WAL at
that moment is still published. Stop writing events of the run first.

The ledger holds numbers alone. Messages that are in a stream stay there: the command says how to
find them. Needs DELETE on the table and on outbox.dead_letter, which the relay's role does not have:
run it as their owner. May run beside the relay.

Examples:
  outboxd --set source.url=postgres://admin@db/app erase --run customer-17
  outboxd --set source.url=postgres://admin@db/app erase --run customer-17 --yes --json")]
pub struct Args {
    /// The run: the value of the ordering key.
    #[arg(long, value_name = "RUN")]
    pub run: String,

    /// Count, and do nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// As JSON: one object at the end.
    #[arg(long)]
    pub json: bool,

    /// Really remove it.
    #[arg(long)]
    pub yes: bool,
}

/// What went, or would.
#[derive(Debug, Clone, Copy, Default, serde::Serialize)]
struct Erased {
    rows: u64,
    gone: u64,
    dead_letters: u64,
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let (control, _) = connect_upkeep(&config.source).await?;
    let client = &control.client;
    settle(client).await?;
    schema::require(client).await?;
    let (table, count_only) = (&config.source.table, args.dry_run || !args.yes);
    let mut erased = Erased::default();
    let mut after = None;
    loop {
        let Batch { rows, gone, last_seq } =
            erase::rows(client, table, &args.run, after, count_only).await?;
        erased.rows += rows;
        erased.gone += gone;
        if last_seq.is_none() {
            break;
        }
        after = last_seq;
    }
    erased.dead_letters = erase::letters(client, table, &args.run, count_only).await?;
    let streams: Vec<_> =
        config.destinations.iter().map(|one| left_behind(one, &args.run)).collect();
    if args.json {
        let report = serde_json::json!({
            "run": args.run,
            "dry_run": count_only,
            "erased": erased,
            "streams": streams,
        });
        say(&format!("{report:#}"))?;
    } else {
        say(&text(args, count_only, &erased, &streams))?;
    }
    if count_only && !args.dry_run {
        if !args.json {
            say("refused    add --yes to remove it")?;
        }
        return Err(Stopped::Refused);
    }
    Ok(())
}

/// Where messages of the run may be, and how their owner removes them.
#[derive(Debug, serde::Serialize)]
struct LeftBehind {
    destination: String,
    stream: String,
    header: String,
    remedy: String,
}

fn left_behind(destination: &DestinationConfig, run: &str) -> LeftBehind {
    let DestinationConfig { name, stream, subject, .. } = destination;
    let template = subject.to_string();
    let remedy = if template.contains("{run_id}") {
        format!(
            "the run is part of the subject ({template}): `nats stream purge {stream} --subject …` \
             removes all of it at once"
        )
    } else {
        format!(
            "find them by their header and remove each with `nats stream rmm {stream} SEQUENCE`, \
             which overwrites it"
        )
    };
    let header = format!("Outbox-Run: {run}");
    LeftBehind { destination: name.clone(), stream: stream.clone(), header, remedy }
}

fn text(args: &Args, count_only: bool, erased: &Erased, streams: &[LeftBehind]) -> String {
    let Erased { rows, gone, dead_letters } = erased;
    let mark = if count_only { "would erase" } else { "erased" };
    let mut text =
        format!("{mark:<13}{rows} rows and {dead_letters} dead letters of run {}", args.run);
    if *gone > 0 {
        text.push_str(&format!(
            "\n{:<13}{gone} of them were undecided at a destination, and are recorded as gone",
            "note"
        ));
    }
    for LeftBehind { destination, stream, header, remedy } in streams {
        text.push_str(&format!(
            "\n{:<13}destination {destination}: what is in stream {stream} stays there \
             ({header}): {remedy}",
            "note"
        ));
    }
    let escape = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_how_to_remove_messages() {
        let config = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://u@h/d\"\n\
                      [destination.all]\nservers = [\"nats://h\"]\nstream = \"ALL\"\n\
                      [destination.runs]\nservers = [\"nats://h\"]\nstream = \"RUNS\"\n\
                      subject = \"runs.{run_id}\"\n";
        let config = Config::parse("test", config).unwrap();
        let left: Vec<_> = config.destinations.iter().map(|one| left_behind(one, "r")).collect();
        assert!(left[0].remedy.contains("nats stream rmm ALL"), "{left:?}");
        assert!(left[1].remedy.contains("nats stream purge RUNS"), "{left:?}");
        let args = Args { run: "r\x1b[2J".into(), dry_run: true, json: false, yes: false };
        let told = text(&args, true, &Erased { rows: 2, gone: 1, dead_letters: 1 }, &left);
        assert!(
            told.starts_with("would erase  2 rows and 1 dead letters of run r [2J\n"),
            "{told}"
        );
    }
}
