//! `outboxd demo`: the whole on throw-away servers, from a committed row to a verdict.
//!
//! Everything is real and separate: PostgreSQL, nats-server and the relay are processes of their
//! own, the relay this very program. The verdict compares table and stream and asks the relay
//! nothing; only the time to the ack is the relay's to tell.

mod latency;
mod progress;

use std::io;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::{Stopped, say};
use crate::sandbox::verdict::{Sample, Verdict};
use crate::sandbox::{
    Load, NatsOptions, PostgresOptions, SandboxError, Workload, World, WorldOptions,
};
use latency::Latency;
use progress::Progress;

/// The relay has this long for what is left when the writers are done.
const SETTLE: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(15);

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs PostgreSQL and nats-server: `make fetch` puts them into .dev/, or OUTBOXD_PG_BIN (directory of
postgres and initdb) and OUTBOXD_NATS_SERVER (the program) name them. Reads no configuration.

Examples:
  outboxd demo
  outboxd demo --events 100000 --rate 5000 --runs 1000
  outboxd demo --keep      leave all of it running, to look around")]
pub struct Args {
    /// Events to write.
    #[arg(long, default_value_t = 20_000, value_name = "N")]
    pub events: u64,
    /// Events in a second; 0: as fast as the writers can.
    #[arg(long, default_value_t = 2_000, value_name = "R")]
    pub rate: u64,
    /// Runs (ordering keys) that the events belong to.
    #[arg(long, default_value_t = 100, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub runs: u64,
    /// Leave servers and relay running until Ctrl-C, and print how to connect.
    #[arg(long)]
    pub keep: bool,
}

/// Runs the demo; `stop` ends everything that it started. The last line on standard output is a
/// verdict, however it ends.
pub async fn run(args: &Args, stop: CancellationToken) -> Result<(), Stopped> {
    let shown = tokio::select! {
        shown = show(args) => shown,
        () = stop.cancelled() => {
            say("verdict: none, stopped before the end")?;
            return Err(Stopped::Interrupted);
        }
    };
    match shown {
        Ok(End { ok, world }) => {
            if let Some(world) = world {
                stop.cancelled().await;
                drop(world);
            }
            if ok { Ok(()) } else { Err(Stopped::Refused) }
        }
        Err(Stopped::Output(error)) => Err(Stopped::Output(error)),
        Err(error) => {
            say("verdict: failed before there was anything to judge")?;
            Err(error)
        }
    }
}

/// How the demo ended.
struct End {
    ok: bool,
    /// Everything that runs, when it is to be kept.
    world: Option<World>,
}

/// The demo up to its verdict. What goes wrong once events flow is a part of the verdict.
async fn show(args: &Args) -> Result<End, Stopped> {
    let start = Instant::now();
    let mut world = World::start(options()?).await?;
    introduce(&world, start.elapsed()).await?;

    let sampling = world.sample().await?;
    let mut load = world.load(workload(args));
    let mut faults = Faults::default();
    match follow(&world, args.events, &mut load).await {
        Err(Stopped::Sandbox(error)) => faults.add(error),
        other => other?,
    }
    faults.take(world.settle(SETTLE).await);
    let samples = faults.take(sampling.stop().await).unwrap_or_default();
    let verdict = faults.take(world.judge(&samples).await);
    let latency = faults.take(Latency::measure(&world).await);
    if !args.keep {
        match world.relay.terminate(STOP).await {
            Ok((status, _)) if status.success() => {}
            Ok((status, _)) => {
                let log = world.relay.log();
                faults.add(SandboxError::new(format!("the relay ended with {status}:\n{log}")));
            }
            Err(error) => faults.add(error),
        }
    }
    let world = args.keep.then_some(world);
    let ok = conclude(verdict.as_ref(), latency.as_ref(), &samples, &faults, world.as_ref())?;
    Ok(End { ok, world })
}

/// What went wrong beside what the verdict counts.
#[derive(Default)]
struct Faults(Vec<SandboxError>);

impl Faults {
    fn add(&mut self, error: SandboxError) {
        self.0.push(error);
    }

    fn take<T>(&mut self, result: Result<T, SandboxError>) -> Option<T> {
        result.map_err(|error| self.add(error)).ok()
    }
}

fn options() -> Result<WorldOptions, Stopped> {
    let program = std::env::current_exe().map_err(|error: io::Error| {
        SandboxError::new(format!("this program's own path is not known: {error}"))
    })?;
    Ok(WorldOptions {
        program,
        // Times as they are on a real server: every commit is on disk before it is told.
        postgres: PostgresOptions { fsync: true, ..PostgresOptions::default() }
            .set("track_commit_timestamp", "on"),
        nats: NatsOptions::default(),
        ..WorldOptions::default()
    })
}

fn workload(args: &Args) -> Workload {
    Workload {
        events: args.events,
        runs: args.runs,
        writers: 4,
        rate: Some(args.rate).filter(|rate| *rate > 0),
        ..Workload::default()
    }
}

async fn introduce(world: &World, took: Duration) -> Result<(), Stopped> {
    let client = world.postgres.connect().await?;
    let version = client.query_one("SHOW server_version", &[]).await.map_err(SandboxError::from)?;
    let nats = world.broker.connect().await?.server_info().version;
    say(&format!(
        "PostgreSQL {} on port {}, nats-server {nats} on {}, outboxd on {}: ready after {:.1} s",
        version.get::<_, &str>(0),
        world.postgres.port(),
        world.broker.urls().join(", "),
        world.relay.admin_url(),
        took.as_secs_f64(),
    ))?;
    Ok(())
}

/// Shows the events flow until the writers are done.
async fn follow(world: &World, events: u64, load: &mut Load) -> Result<(), Stopped> {
    let progress = Progress::start(world, events, load.watch()).await?;
    let shown = tokio::select! {
        written = load.finish() => written.map_err(Stopped::from),
        stopped = progress.show() => stopped,
    };
    progress.end();
    shown
}

/// Says all that is known, the verdict last. Was it good?
fn conclude(
    verdict: Option<&Verdict>,
    latency: Option<&Latency>,
    samples: &[Sample],
    faults: &Faults,
    kept: Option<&World>,
) -> Result<bool, Stopped> {
    if let Some(latency) = latency {
        say(&format!(
            "commit to ack    p50 {} p99 {}: from the time that PostgreSQL gave the commit to \
             JetStream's ack at the relay, by the relay's histogram\n\
             commit to stream p50 {} p99 {}: to the time that the stream gave the message, exact",
            latency.ack_p50, latency.ack_p99, latency.stream_p50, latency.stream_p99,
        ))?;
    }
    if let Some(verdict) = verdict {
        say(&format!(
            "slot position    {} samples, {} of them past an event that was not in the stream",
            samples.len(),
            verdict.unsafe_positions.count,
        ))?;
    }
    if let Some(world) = kept {
        say(&how_to_connect(world))?;
    }
    for error in &faults.0 {
        say(&format!("fault: {error}"))?;
    }
    let ok = faults.0.is_empty() && verdict.is_some_and(Verdict::is_ok);
    let word = if ok { "ok" } else { "failed" };
    let text = verdict.map_or_else(|| "events=unknown".to_owned(), Verdict::to_string);
    let (line, findings) = text.split_once('\n').unwrap_or((&text, ""));
    if !findings.is_empty() {
        say(findings)?;
    }
    let times = latency.map_or_else(String::new, |latency| {
        format!(" p50={} p99={}", latency.ack_p50, latency.ack_p99)
    });
    say(&format!("verdict: {word} {line}{times}"))?;
    Ok(ok)
}

fn how_to_connect(world: &World) -> String {
    let fetched = world.postgres.bin().join("psql");
    let psql = if fetched.is_file() { fetched.display().to_string() } else { "psql".to_owned() };
    let psql = format!("{psql} {}", world.postgres.url());
    format!(
        "still running; Ctrl-C stops it all and removes it\n\
         \x20 PostgreSQL     {psql}\n\
         \x20 NATS           nats --server {} stream view EVENTS\n\
         \x20 console        {}/\n\
         \x20 configuration  {}\n\
         \x20 one event      {psql} -c \"SELECT outbox.publish('order-1', 'order.created', '{{}}')\"",
        world.broker.urls().join(","),
        world.relay.admin_url(),
        world.relay.configuration().display(),
    )
}
