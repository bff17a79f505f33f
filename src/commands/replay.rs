//! `outboxd replay`: publishes retained events once more, beside the relay, for a stream that has lost
//! them. What is asked for becomes a job; a job that was ended goes on where it was.

mod plan;
mod tell;

use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::dead_letters::when;
use super::{Stopped, refuse, say};
use crate::config::{Config, DestinationConfig};
use crate::lsn::Lsn;
use crate::replay::{End, Rate, Replayer};
use crate::run::clock;
use crate::store::dead_letters::desk::When;
use crate::store::replay::select::Selection;
use crate::store::replay::{self as jobs, Job};
use crate::store::{Store, settle};
use crate::wal::connect_upkeep;
use tell::{Report, Teller};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Takes events that the ledger has as published and whose rows are still in the table, and publishes them
again to one destination. Each copy says so: header Outbox-Replay, and `:replay:JOB` at the end of its
message id. May run beside the relay, whose events it does not delay at a moderate --rate.

What is asked for is a job. Ended by Ctrl-C, a kill or a failure, it goes on with `outboxd replay --job
JOB`, and sends nothing twice, however long ago that was: it reads its own messages back from the
stream first. A receipt tells between which positions its events committed, and no more: those that
reach into the range are taken whole.

The events of a run come in the order in which they were published. What was redriven from a dead
letter comes at its own place.

Exit code 1: refused, or not everything that was planned is in the stream now.

Examples:
  outboxd replay --since-lsn 16/B374D848 --dry-run       what would be sent
  outboxd replay --since-time 2h --job after-the-purge   what was published in the last two hours
  outboxd replay --job after-the-purge                   go on
  outboxd replay --run order-4711 --destination audit
  outboxd replay --since-lsn 0/0 --retained-only         all that is left")]
pub struct Args {
    /// Committed at this LSN or later: the last_lsn of the last receipt before the loss, say.
    #[arg(long, value_name = "LSN")]
    pub since_lsn: Option<Lsn>,

    /// Committed at this LSN or before.
    #[arg(long, value_name = "LSN")]
    pub until_lsn: Option<Lsn>,

    /// Recorded as published then or later: a time such as 2026-11-30T18:00:00Z, or how long ago,
    /// such as 2h.
    #[arg(long, value_name = "TIME", value_parser = when)]
    pub since_time: Option<When>,

    /// Recorded as published then or before.
    #[arg(long, value_name = "TIME", value_parser = when)]
    pub until_time: Option<When>,

    /// Of this run (ordering key).
    #[arg(long, value_name = "RUN")]
    pub run: Option<String>,

    /// This event, by its number (seq) or id; may be repeated.
    #[arg(long = "event", value_name = "EVENT")]
    pub events: Vec<String>,

    /// Of this kind; `*` stands for any text.
    #[arg(long, value_name = "KIND")]
    pub kind: Option<String>,

    /// To this destination; not needed where there is only one.
    #[arg(long, value_name = "NAME")]
    pub destination: Option<String>,

    /// Say what would be sent, and do nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// Replay what is left though not all that is asked for is retained.
    #[arg(long)]
    pub retained_only: bool,

    /// Events per second at most, or `unlimited`.
    #[arg(long, value_name = "N", default_value = "1000")]
    pub rate: Rate,

    /// Name of the job: a new one, or the one to go on with. Made up and printed by default.
    #[arg(long, value_name = "JOB", value_parser = job_name)]
    pub job: Option<String>,

    /// As JSON: one object at the end.
    #[arg(long)]
    pub json: bool,
}

/// It stands in a header and at the end of message ids.
fn job_name(text: &str) -> Result<String, String> {
    const LONGEST: usize = 64;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match !text.is_empty() && text.len() <= LONGEST && text.bytes().all(fits) {
        true => Ok(text.to_owned()),
        false => Err(format!("has to be 1 to {LONGEST} letters, digits, `-`, `_` or `.`")),
    }
}

/// Runs it.
pub async fn run(args: &Args, config: &Config, stop: &CancellationToken) -> Result<(), Stopped> {
    let prepared = async {
        let (control, _) = connect_upkeep(&config.source).await?;
        settle(&control.client).await?;
        let store = Store::open(&control.client, &config.relay.name, &config.source).await?;
        let prepared = prepare(args, config, &control.client).await?;
        Ok::<_, Stopped>((control, store, prepared))
    };
    let (control, store, (job, destination)) = tokio::select! {
        prepared = prepared => prepared?,
        () = stop.cancelled() => return Err(Stopped::Interrupted),
    };
    let report = Report::new(config, destination, &job);
    if args.dry_run {
        return Ok(say(&report.text(args.json))?);
    }
    if job.finished {
        say(&report.text(args.json))?;
        return report.verdict();
    }
    let mut teller = Teller::start(&job, args.rate, clock::now());
    teller.begin();
    let client = &control;
    let replayer = Replayer::start(config, destination, client, &store, &job, args.rate).await;
    let ended = match replayer {
        Ok(replayer) => {
            replayer.run(stop, &mut |progress| teller.tell(progress, clock::now())).await
        }
        Err(failure) => Err(failure),
    };
    teller.end();
    let (end, progress) = match ended {
        Ok(ended) => ended,
        Err(failure) => {
            teller.how_to_go_on();
            return Err(failure.into());
        }
    };
    let report = report.ended(end, &progress, teller.elapsed(clock::now()));
    say(&report.text(args.json))?;
    match end {
        End::Finished => report.verdict(),
        End::Stopped => {
            teller.how_to_go_on();
            Err(Stopped::Interrupted)
        }
        End::Replaced => Err(refuse(
            &format!(
                "stream {} was made anew since job {} began: what the job sent is gone with the old \
                 one",
                destination.stream, job.name
            ),
            "begin again under another --job, with the same selection",
        )),
    }
}

/// The job, locked; a new one is recorded unless this is a dry run.
async fn prepare<'a>(
    args: &Args,
    config: &'a Config,
    client: &Client,
) -> Result<(Job, &'a DestinationConfig), Stopped> {
    let relay = &config.relay.name;
    let name = args.job.clone().unwrap_or_else(made_up_name);
    if !args.dry_run && !jobs::try_lock(client, relay, &name).await? {
        return Err(refuse(
            &format!("another session works on job {name}"),
            "wait for it, or name another --job",
        ));
    }
    let asked = selection(args, client).await?;
    let is_asked = asked != Selection::default();
    if let Some(job) = jobs::find(client, relay, &name).await? {
        let other_place = args.destination.as_ref().is_some_and(|name| *name != job.destination);
        if other_place || (is_asked && asked != job.selection) {
            return Err(refuse(
                &format!("there is a job {name} that asks for something else: {}", plain(&job)),
                "leave out the selection to go on with it, or name another --job",
            ));
        }
        let destination = destination(config, Some(&job.destination))?;
        return Ok((job, destination));
    }
    if !is_asked {
        let what = match &args.job {
            Some(name) => format!("there is no job {name}"),
            None => "nothing is asked for".to_owned(),
        };
        return Err(refuse(
            &what,
            "say what to replay: --since-lsn, --since-time, --run, --event or --kind; all that is \
             retained is `--since-lsn 0/0 --retained-only`",
        ));
    }
    let destination = destination(config, args.destination.as_deref())?;
    let plan = plan::make(args, config, destination, &asked, client).await?;
    if !args.dry_run {
        jobs::create(client, relay, &name, &destination.name, &asked, &plan).await?;
    }
    let job = Job {
        name,
        destination: destination.name.clone(),
        selection: asked,
        seqs: plan.seqs,
        done: Vec::new(),
        planned: plan.selected,
        tally: jobs::Tally::default(),
        floor: crate::relay::outcome::Floor::default(),
        stream_seq: 0,
        finished: false,
    };
    Ok((job, destination))
}

fn plain(job: &Job) -> String {
    let selection = serde_json::to_string(&job.selection).unwrap_or_default();
    format!("{selection} at destination {}", job.destination)
}

fn destination<'a>(
    config: &'a Config,
    name: Option<&str>,
) -> Result<&'a DestinationConfig, Stopped> {
    let names = || {
        let names: Vec<&str> = config.destinations.iter().map(|one| one.name.as_str()).collect();
        names.join(", ")
    };
    match (name, config.destinations.as_slice()) {
        (None, [only]) => Ok(only),
        (None, _) => Err(refuse(
            &format!("there are several destinations: {}", names()),
            "name one of them with --destination",
        )),
        (Some(name), all) => all.iter().find(|one| one.name == name).ok_or_else(|| {
            refuse(
                &format!("destination {name} is not in the configuration"),
                &format!("name one of these with --destination: {}", names()),
            )
        }),
    }
}

/// What the arguments ask for, times as the database's clock has them.
async fn selection(args: &Args, client: &Client) -> Result<Selection, Stopped> {
    let now = plan::now(client).await?;
    let time = |when: When| {
        let micros = match when {
            When::At(micros) => micros,
            When::Ago(micros) => now.saturating_sub(micros),
        };
        jiff::Timestamp::from_microsecond(micros).map(|at| at.to_string()).ok()
    };
    let lsn = |lsn: Option<Lsn>| lsn.map(|lsn| lsn.to_string());
    Ok(Selection {
        since_lsn: lsn(args.since_lsn),
        until_lsn: lsn(args.until_lsn),
        since_time: args.since_time.and_then(time),
        until_time: args.until_time.and_then(time),
        run: args.run.clone(),
        kind: args.kind.clone(),
        events: args.events.clone(),
    })
}

fn made_up_name() -> String {
    let at = jiff::Timestamp::from_microsecond(clock::wall().0).unwrap_or_default();
    let random = uuid::Uuid::new_v4().simple().to_string();
    let random: String = random.chars().take(4).collect();
    format!("{}-{random}", at.strftime("%Y%m%d-%H%M%S"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_jobs_can_stand_in_a_header() {
        for text in [&*made_up_name(), "after-the-purge", "v1.2_b"] {
            assert_eq!(job_name(text).as_deref(), Ok(text));
        }
        for text in ["", "a b", "a:b", "ü", "a\r\nb", &"x".repeat(65)] {
            assert!(job_name(text).is_err(), "{text:?}");
        }
    }
}
