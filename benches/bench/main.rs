//! `make bench`: how fast the relay is, beside what its two servers can do at most, on real servers.
//! Owns what is measured in which order, and what is made of it.
//!
//! In reading order: [`backlog`] and [`drain`] (how fast a backlog goes), [`limit`] (how fast it could
//! go), [`latency`] with [`writer`], [`tap`] and [`poller`], [`cost`] and [`load`]; [`wire`] and
//! [`process`] are what they measure with; [`report`] and [`plots`] are what is left of it.

#![allow(clippy::cast_precision_loss, reason = "figures are shown with three digits")]

mod args;
mod backlog;
mod clock;
mod cost;
mod drain;
mod figures;
mod frames;
mod latency;
mod limit;
mod load;
mod machine;
mod plots;
mod poller;
mod process;
mod report;
mod svg;
mod tap;
#[path = "../wal/measure.rs"]
mod wal;
mod wire;
mod writer;

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser as _;

use crate::args::{Args, Part};
use crate::report::Report;

/// Whatever goes wrong here ends the bench, with these words.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = tokio::select! {
        outcome = run(&args) => outcome,
        // What was started ends with the values that stand for it.
        signal = interrupted() => signal.and_then(|()| Err("interrupted".into())),
    };
    match outcome {
        Ok(met) if met || !args.strict => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            let causes = std::iter::successors(error.source(), |error| error.source());
            let words: String = causes.map(|cause| format!(": {cause}")).collect();
            eprintln!("bench: {error}{words}");
            ExitCode::FAILURE
        }
    }
}

async fn interrupted() -> Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        ended = tokio::signal::ctrl_c() => Ok(ended?),
        _ = terminate.recv() => Ok(()),
    }
}

/// Were all targets met?
async fn run(args: &Args) -> Result<bool> {
    let start = Instant::now();
    let mut report = Report::new(args).await?;
    for part in args.parts() {
        println!("\n== {part} ==");
        match part {
            Part::Drain => drain::part(args, &mut report).await?,
            Part::Shapes => drain::shapes(args, &mut report).await?,
            Part::Latency => latency::part(args, &mut report).await?,
            Part::Cost => cost::part(args, &mut report).await?,
        }
    }
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    println!("\n{}", report.verdict());
    let place = report.write(args, minutes)?;
    println!("\n{minutes:.0} minutes; written: {}", place.display());
    Ok(report.met())
}
