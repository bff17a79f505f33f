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

/// Runs the demo; `stop` ends everything that it started.
pub async fn run(args: &Args, stop: CancellationToken) -> Result<(), Stopped> {
    let world = tokio::select! {
        ended = show(args) => ended?,
        () = stop.cancelled() => return Err(Stopped::Interrupted),
    };
    if let Some(world) = world {
        stop.cancelled().await;
        drop(world);
    }
    Ok(())
}

/// The demo up to its verdict; the world when it is to be kept.
async fn show(args: &Args) -> Result<Option<World>, Stopped> {
    let start = Instant::now();
    let mut world = World::start(options()?).await?;
    introduce(&world, start.elapsed()).await?;

    let sampling = world.sample().await?;
    let mut load = world.load(workload(args));
    follow(&world, args.events, &mut load).await?;
    world.settle(SETTLE).await?;
    let samples = sampling.stop().await?;

    let verdict = world.judge(&samples).await?;
    let latency = Latency::measure(&world).await?;
    conclude(&verdict, &latency, &samples)?;
    if args.keep {
        say(&how_to_connect(&world))?;
        return if verdict.is_ok() { Ok(Some(world)) } else { Err(Stopped::Refused) };
    }
    let (status, _) = world.relay.terminate(STOP).await?;
    if !status.success() {
        say(&format!("the relay ended with {status}:\n{}", world.relay.log()))?;
        return Err(Stopped::Refused);
    }
    if verdict.is_ok() { Ok(None) } else { Err(Stopped::Refused) }
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

fn conclude(verdict: &Verdict, latency: &Latency, samples: &[Sample]) -> Result<(), Stopped> {
    say(&format!(
        "commit to ack    p50 {} p99 {}: from the time that PostgreSQL gave the commit to JetStream's \
         ack at the relay, by the relay's histogram\n\
         commit to stream p50 {} p99 {}: to the time that the stream gave the message, exact\n\
         slot position    {} samples, {} of them past an event that was not in the stream",
        latency.ack_p50,
        latency.ack_p99,
        latency.stream_p50,
        latency.stream_p99,
        samples.len(),
        verdict.unsafe_positions.count,
    ))?;
    let word = if verdict.is_ok() { "ok" } else { "failed" };
    let text = verdict.to_string();
    let (line, findings) = text.split_once('\n').unwrap_or((&text, ""));
    if !findings.is_empty() {
        say(findings)?;
    }
    say(&format!("verdict: {word} {line} p50={} p99={}", latency.ack_p50, latency.ack_p99))?;
    Ok(())
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
