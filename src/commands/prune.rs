//! `outboxd prune`: one whole pass of retention now, with progress. The same steps as the schedule of
//! `outboxd run`.

use std::time::{Duration, Instant};

use super::{Stopped, say};
use crate::config::{self, Config};
use crate::store::retention::{Step, StepKind};
use crate::store::{schema, settle};
use crate::upkeep::retention::{Pass, Summary};
use crate::wal::connect_upkeep;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Makes partitions ahead, drops partitions and deletes rows that are settled, and compacts the ledger:
what `outboxd run` does every [retention] every. Only what is final for every required destination
of every relay of the table goes, and has been for [retention] keep. May run beside the relay.

Examples:
  outboxd prune --dry-run
  outboxd prune --keep 1d                 once, with another time
  outboxd prune --hold-inserts            in a quiet hour: begin with partitions though the default
                                          partition is large")]
pub struct Args {
    /// Say what would go and be made, and do nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// As JSON: one object at the end.
    #[arg(long)]
    pub json: bool,

    /// How long rows are kept, in place of `[retention] keep`.
    #[arg(long, value_name = "DURATION", value_parser = config::duration)]
    pub keep: Option<Duration>,

    /// Attach partitions though the default partition is large: INSERTs wait while it is read.
    #[arg(long)]
    pub hold_inserts: bool,
}

/// Between two lines about rows that go one by one.
const PROGRESS: Duration = Duration::from_secs(1);

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let (control, _) = connect_upkeep(&config.source).await?;
    let client = &control.client;
    settle(client).await?;
    schema::require(client).await?;
    let keep = args.keep.or(config.retention.keep);
    let Args { dry_run, hold_inserts, .. } = *args;
    let pass = Pass { config, keep, hold_inserts, dry_run };
    let mut teller = Teller::new(args);
    let summary = pass.run(client, &mut |step| teller.hear(step)).await?;
    teller.flush();
    let told = match args.json {
        true => {
            let report = serde_json::json!({
                "dry_run": dry_run,
                "steps": teller.steps,
                "summary": summary,
            });
            say(&format!("{report:#}"))
        }
        false => say(&text(config, keep, dry_run, &summary)),
    };
    teller.failed.map_or(told, Err)?;
    if summary.busy > 0 { Err(Stopped::Refused) } else { Ok(()) }
}

/// Says steps as they come; batches of one table in one line a second.
struct Teller {
    json: bool,
    dry_run: bool,
    steps: Vec<Step>,
    batches: Option<(Step, Instant)>,
    failed: Option<std::io::Error>,
}

impl Teller {
    fn new(args: &Args) -> Teller {
        let Args { json, dry_run, .. } = *args;
        Teller { json, dry_run, steps: Vec::new(), batches: None, failed: None }
    }

    fn hear(&mut self, step: &Step) {
        if step.step != StepKind::Deleted {
            self.flush();
            return self.tell(step.clone());
        }
        let Some((sum, since)) = &mut self.batches else {
            self.batches = Some((step.clone(), Instant::now()));
            return;
        };
        sum.rows += step.rows;
        sum.gone += step.gone;
        if !self.json && since.elapsed() > PROGRESS {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if let Some((step, _)) = self.batches.take() {
            self.tell(step);
        }
    }

    fn tell(&mut self, step: Step) {
        if !self.json
            && let Err(error) = say(&line(&step, self.dry_run))
        {
            self.failed.get_or_insert(error);
        }
        self.steps.push(step);
    }
}

fn line(step: &Step, dry_run: bool) -> String {
    let mark = match (step.step, dry_run) {
        (StepKind::Made, true) => "would make",
        (StepKind::Dropped, true) => "would drop",
        (StepKind::Deleted, true) => "would delete",
        (kind, _) => kind.as_str(),
    };
    let mut line = format!("{mark:<13}{}", step.object);
    if step.rows > 0 {
        line.push_str(&format!(", {} rows", step.rows));
    }
    if step.gone > 0 {
        line.push_str(&format!(", {} undecided at an optional destination", step.gone));
    }
    if let Some(note) = &step.note {
        line.push_str(&format!(": {}", note.replace(char::is_control, " ")));
    }
    line
}

fn text(config: &Config, keep: Option<Duration>, dry_run: bool, summary: &Summary) -> String {
    let mut text = String::new();
    if !config.retention.manage {
        text.push_str(
            "note         [retention] manage is false: rows and partitions are left alone\n",
        );
    } else if keep.is_none() {
        text.push_str("note         [retention] keep is \"forever\": no row goes\n");
    }
    let Summary { rows, partitions_made, partitions_dropped, .. } = summary;
    let would = if dry_run { "would: " } else { "" };
    text.push_str(&format!(
        "{would}{rows} rows pruned, {partitions_dropped} partitions dropped, {partitions_made} made"
    ));
    if !dry_run {
        let Summary { receipts_merged, receipts_deleted, .. } = summary;
        text.push_str(&format!("; {receipts_merged} receipts merged, {receipts_deleted} deleted"));
    }
    if summary.busy > 0 {
        text.push_str("\nsome was left, since a lock was not to be had: run it again");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_went_and_what_stood_in_the_way() {
        let mut step = Step {
            step: StepKind::Dropped,
            object: "outbox.event_p20261101".into(),
            rows: 7,
            gone: 2,
            note: None,
            last_seq: None,
        };
        assert_eq!(
            line(&step, true),
            "would drop   outbox.event_p20261101, 7 rows, 2 undecided at an optional destination"
        );
        step.step = StepKind::Busy;
        (step.rows, step.gone, step.note) = (0, 0, Some("a\nb".into()));
        assert_eq!(line(&step, false), "busy         outbox.event_p20261101: a b");
    }
}
