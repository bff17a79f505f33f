//! How a replay goes, on standard error: a bar on a terminal, a line now and then elsewhere; and what
//! came of it.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::commands::{Stopped, plain};
use crate::config::{Config, DestinationConfig};
use crate::replay::{End, Progress, Rate};
use crate::store::replay::select::Selection;
use crate::store::replay::{Job, Tally};

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
const BAR: &str = "{wide_bar} {pos}/{len} {per_sec}, {eta} left\n{msg}";

/// Speaks while it runs.
pub struct Teller {
    job: String,
    first_line: String,
    planned: u64,
    before: u64,
    started: Instant,
    bar: Option<ProgressBar>,
    line_at: Instant,
}

impl Teller {
    pub fn start(job: &Job, rate: Rate, now: Instant) -> Teller {
        let before = job.tally.total();
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(job.planned).with_position(before);
            bar.reset_eta();
            ProgressStyle::with_template(BAR).map_or(bar.clone(), |style| bar.with_style(style))
        });
        let rate = rate
            .0
            .map_or("as fast as it goes".to_owned(), |rate| format!("at most {rate} a second"));
        let verb = if before > 0 { "goes on" } else { "begins" };
        let first_line = format!(
            "replay {} {verb}: {} of {} events to {}, {rate}",
            job.name,
            job.planned.saturating_sub(before),
            job.planned,
            job.destination,
        );
        let line_at = now + LINE_EVERY;
        let (job, planned) = (job.name.clone(), job.planned);
        Teller { job, first_line, planned, before, started: now, bar, line_at }
    }

    pub fn begin(&self) {
        line(&self.first_line);
    }

    pub fn tell(&mut self, progress: &Progress, now: Instant) {
        let done = progress.tally.total() + progress.unrecorded;
        let waits = progress.waits.as_deref().map(plain);
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.set_message(waits.map_or(String::new(), |why| format!("waits: {why}")));
            return;
        }
        if now < self.line_at {
            return;
        }
        self.line_at = now + LINE_EVERY;
        let waits = waits.map_or(String::new(), |why| format!("; waits: {why}"));
        let sent = done.saturating_sub(self.before);
        let millis = u64::try_from(self.elapsed(now).as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = sent.saturating_mul(1_000) / millis;
        let left = self.planned.saturating_sub(done);
        let eta = left.checked_div(rate).map_or(String::new(), |secs| format!(", {secs} s left"));
        line(&format!("{done} of {}, {rate} a second{eta}{waits}", self.planned));
    }

    /// Takes the bar away.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    pub fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    pub fn how_to_go_on(&self) {
        line(&format!("next: outboxd replay --job {} goes on where this ended", self.job));
    }
}

fn line(text: &str) {
    // Nobody reads: the exit code is what is left to say.
    drop(writeln!(io::stderr(), "{text}"));
}

/// An event that can't be published.
#[derive(Debug, Serialize)]
struct Refused {
    seq: i64,
    reason: &'static str,
    detail: String,
}

/// What came of it, or would.
#[derive(Debug, Serialize)]
pub struct Report {
    job: String,
    relay: String,
    destination: String,
    stream: String,
    /// `planned`, `finished`, `stopped` or `replaced`.
    state: &'static str,
    selection: Selection,
    planned: u64,
    #[serde(flatten)]
    tally: Tally,
    left: u64,
    refused_events: Vec<Refused>,
    seconds: f64,
}

impl Report {
    pub fn new(config: &Config, destination: &DestinationConfig, job: &Job) -> Report {
        Report {
            job: job.name.clone(),
            relay: config.relay.name.clone(),
            destination: destination.name.clone(),
            stream: destination.stream.clone(),
            state: if job.finished { "finished" } else { "planned" },
            selection: job.selection.clone(),
            planned: job.planned,
            tally: job.tally,
            left: job.planned.saturating_sub(job.tally.total()),
            refused_events: Vec::new(),
            seconds: 0.0,
        }
    }

    pub fn ended(self, end: End, progress: &Progress, took: Duration) -> Report {
        let state = match end {
            End::Finished => "finished",
            End::Stopped => "stopped",
            End::Replaced => "replaced",
        };
        let tally = progress.tally;
        let refused = progress.refused.iter().map(|(seq, fault)| Refused {
            seq: *seq,
            reason: fault.reason.as_str(),
            detail: fault.detail.clone(),
        });
        Report {
            state,
            tally,
            left: self.planned.saturating_sub(tally.total()),
            refused_events: refused.collect(),
            seconds: took.as_secs_f64(),
            ..self
        }
    }

    /// Is everything that was planned in the stream now?
    pub fn verdict(&self) -> Result<(), Stopped> {
        match self.tally.stored == self.planned {
            true => Ok(()),
            false => Err(Stopped::Refused),
        }
    }

    pub fn text(&self, json: bool) -> String {
        if json {
            // What is printed can't fail to become JSON.
            return serde_json::to_string_pretty(self).unwrap_or_default();
        }
        let Tally { stored, duplicates, refused, gone } = self.tally;
        let Report { job, destination, stream, state, planned, left, .. } = self;
        let mut text = match *state {
            "planned" => {
                format!("replay {job} would send {left} events to {destination} (stream {stream})")
            }
            state => format!(
                "replay {job} {state}: {stored} of {planned} events stored in stream {stream}, {left} \
                 left"
            ),
        };
        // Writing to a String can't fail.
        let mut add = |words: &str| write!(text, "\n{words}").unwrap_or_default();
        if duplicates > 0 {
            add(&format!(
                "{duplicates} were acknowledged as duplicates of messages that the stream does not have: \
                 it was purged after they had been sent. Another --job sends them again"
            ));
        }
        if gone > 0 {
            add(&format!("{gone} lost their rows before their turn came"));
        }
        if refused > 0 {
            add(&format!("{refused} can't be published as server and stream are now"));
        }
        for Refused { seq, reason, detail } in &self.refused_events {
            add(&format!("  seq {seq}: {reason}: {}", plain(detail)));
        }
        text
    }
}
