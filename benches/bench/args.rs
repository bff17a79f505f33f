//! What the user typed, and what it means for the size of things.

use std::fmt;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Measures the relay on throw-away servers, beside the limit of those servers on this machine.
///
/// Writes benches/RESULTS.md and docs/img/*.svg when all parts ran in full size, else the same into
/// target/bench/. Takes about an hour and a half in full size, 15 GB of disk, and a machine that
/// does nothing else; Ctrl-C ends all that was started.
#[derive(Debug, Parser)]
#[command(after_help = "Example: make bench ARGS=\"--quick --parts drain,latency\"")]
pub struct Args {
    /// Events of a drain
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1_000..))]
    events: u64,
    /// Runs of every measurement, all arms in turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// What to measure; all when absent
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// Pipelines to drain with; what the program does not know is left out, and said
    #[arg(long, value_delimiter = ',', default_value = "batch,sequence,per-run")]
    pub pipelines: Vec<String>,
    /// A tenth of the size, one round
    #[arg(long)]
    pub quick: bool,
    /// End with 1 when a target is missed
    #[arg(long)]
    pub strict: bool,
    /// Directory for RESULTS.md and the plots
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// The program to measure; the one that was built with this bench when absent
    #[arg(long, default_value = env!("CARGO_BIN_EXE_outboxd"))]
    pub program: PathBuf,
    /// What cargo passes to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// A part of the bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// A backlog in three shapes of transactions, over TCP and the Unix socket
    Drain,
    /// One hot run, many runs, large payloads
    Shapes,
    /// From commit to ack, beside a polling relay
    Latency,
    /// CPU, memory, WAL, and what the primary feels of it
    Cost,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Drain => "drain",
            Part::Shapes => "shapes",
            Part::Latency => "latency",
            Part::Cost => "cost",
        })
    }
}

impl Args {
    /// In the order of the report: the latency needs the drain's rate.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let all = [Part::Drain, Part::Shapes, Part::Latency, Part::Cost];
        all.into_iter().filter(|part| self.parts.is_empty() || self.parts.contains(part))
    }

    /// So many of a thing that the full bench has `full` of, in proportion to `--events`.
    pub fn scaled(&self, full: u64) -> u64 {
        let of_a_million = u128::from(full) * u128::from(self.events) / 1_000_000;
        let scaled = u64::try_from(of_a_million).unwrap_or(full);
        (if self.quick { scaled / 10 } else { scaled }).max(1)
    }

    /// Runs of every measurement.
    pub fn rounds(&self) -> u64 {
        if self.quick { 1 } else { self.rounds }
    }

    /// How long something is watched that takes `full` seconds in full size.
    pub fn seconds(&self, full: u64) -> u64 {
        if self.quick { full.div_ceil(5) } else { full }
    }

    /// Is this what the committed report is made of?
    pub fn is_full(&self) -> bool {
        !self.quick && self.events >= 1_000_000 && self.rounds >= 5 && self.parts().count() == 4
    }
}
