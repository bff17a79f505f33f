//! How fast a backlog goes: the relay is started, and it is over with its last ack. Beside it the
//! limit, on the same backlog.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outboxd::sandbox::Relay;

use crate::args::Args;
use crate::backlog::{Backlog, Socket, Spec, Way};
use crate::figures::Spread;
use crate::frames::{Frames, Template};
use crate::limit::Limit;
use crate::report::{Check, Curve, Drained, Report, Section, Table};
use crate::{Result, process};

const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Without a single event in this time something is wrong.
const SILENCE: Duration = Duration::from_secs(120);
const SETTLE: Duration = Duration::from_secs(300);
pub const PAYLOAD: usize = 200;

/// One drain.
pub struct Run {
    pub seconds: f64,
    /// Seconds, and messages in the stream by then.
    pub stored: Vec<(f64, u64)>,
    /// CPU seconds of the relay, the walsender and nats-server.
    pub cpu: [f64; 3],
    pub peak_mib: f64,
}

/// The same backlog drained in one way, again and again.
pub struct Series {
    pub spec: Spec,
    pub way: Way,
    pub runs: Vec<Run>,
    pub limits: Vec<Limit>,
}

impl Series {
    /// Events per second.
    pub fn rate(&self) -> Spread {
        Spread::of(self.runs.iter().map(|run| self.spec.events as f64 / run.seconds))
    }

    /// Time of the relay over time of the limit, round by round.
    pub fn ratio(&self) -> Spread {
        let pairs = self.runs.iter().zip(&self.limits);
        Spread::of(pairs.map(|(run, limit)| run.seconds / limit.seconds()))
    }

    pub fn peak_mib(&self) -> Spread {
        Spread::of(self.runs.iter().map(|run| run.peak_mib))
    }

    /// Microseconds per event of the relay, the walsender, nats-server.
    pub fn cpu_micros(&self) -> [Spread; 3] {
        [0, 1, 2].map(|who| {
            let seconds = self.runs.iter().filter_map(|run| run.cpu.get(who));
            Spread::of(seconds.map(|seconds| seconds * 1e6 / self.spec.events as f64))
        })
    }

    fn row(&self) -> Vec<String> {
        let rate = |seconds: &dyn Fn(&Limit) -> f64| {
            let events = self.spec.events as f64;
            Spread::of(self.limits.iter().map(|limit| events / seconds(limit))).show(0)
        };
        let [relay, walsender, nats] = self.cpu_micros().map(|cpu| format!("{:.1}", cpu.median));
        vec![
            self.spec.name.to_owned(),
            self.way.socket_name().to_owned(),
            self.way.pipeline.clone(),
            self.rate().show(0),
            rate(&|limit| limit.read_seconds),
            rate(&|limit| limit.publish_seconds),
            self.ratio().show(2),
            format!("{relay} / {walsender} / {nats}"),
            format!("{:.0}", self.peak_mib().max),
        ]
    }
}

const HEAD: [&str; 9] = [
    "backlog",
    "socket",
    "pipeline",
    "relay, events/s",
    "pg_recvlogical, events/s",
    "raw publisher, events/s",
    "time ÷ limit's",
    "CPU µs/event: relay / walsender / nats-server",
    "relay's peak RSS, MiB",
];

const TEXT: &str = "\
The relay is started on a backlog; the clock runs from the start of its process to the moment when its \
own count of acks is complete. Every arm reads the same WAL from the same position, into an empty \
stream. The limit is the slower of `pg_recvlogical` (same slot, same options, to /dev/null) and a plain \
socket that sends the relay's own messages, encoded before, in the way of the pipeline, both at once. \
Payloads have 200 bytes unless the name says otherwise. After each drain table and stream were \
compared: every event once, each run in order.";

/// Three shapes of transactions.
pub async fn part(args: &Args, report: &mut Report) -> Result<()> {
    let events = args.scaled(1_000_000);
    let shapes = [
        shape("1 row per transaction", events, 1),
        shape("100 rows per transaction", events, 100),
        shape("1 transaction", events, events),
    ];
    let mut ways = ways(args);
    ways.splice(1..1, args.pipelines.first().map(|name| Way::new(name, Socket::Tcp)));
    let mut table = Table::new(&HEAD);
    for shape in shapes {
        for series in series(args, report, shape, &ways).await? {
            table.push(series.row());
            let most = match series.way.pipeline.as_str() {
                "batch" => Some(1.25),
                "sequence" => Some(1.5),
                _ => None,
            };
            if let Some(most) = most {
                let what = format!(
                    "drain, {}, `{}`, {}: time ÷ limit's",
                    shape.name,
                    series.way.pipeline,
                    series.way.socket_name()
                );
                report.check(Check::at_most(what, series.ratio().median, most, 2));
            }
            if shape.rows_per_transaction == 100 {
                keep(report, &series);
            }
        }
    }
    report.section(Section::new("Drain", TEXT).with(table));
    Ok(())
}

/// What the others build on: the rate, and the curves of the first round.
fn keep(report: &mut Report, series: &Series) {
    if series.way.socket == Socket::Tcp {
        return;
    }
    if report.drained.is_none() {
        report.drained = Some(drained(series));
        let raw = series.limits.first().map(|limit| limit.acked.clone());
        report
            .drain_curves
            .extend(raw.map(|points| Curve::of_rate("raw publisher", &points, 0, true)));
    }
    let name = format!("relay, {}", series.way.pipeline);
    let colour = report.drain_curves.len();
    let first = series.runs.first().map(|run| Curve::of_rate(&name, &run.stored, colour, false));
    report.drain_curves.extend(first);
}

fn drained(series: &Series) -> Drained {
    Drained { rate: series.rate().median, cpu: series.cpu_micros(), peak_mib: series.peak_mib() }
}

/// What the other parts compare with: measured now when the drain was not.
pub async fn reference(args: &Args, report: &mut Report) -> Result<Drained> {
    if report.drained.is_none() {
        let ways: Vec<Way> = ways(args).into_iter().take(1).collect();
        let spec = shape("100 rows per transaction", args.scaled(1_000_000), 100);
        let all = series(args, report, spec, &ways).await?;
        report.drained = all.first().map(drained);
    }
    report.drained.ok_or_else(|| "no pipeline to drain with".into())
}

fn ways(args: &Args) -> Vec<Way> {
    args.pipelines.iter().map(|name| Way::new(name, Socket::Unix)).collect()
}

fn shape(name: &'static str, events: u64, rows_per_transaction: u64) -> Spec {
    Spec { name, events, rows_per_transaction, runs: 1_000, payload_bytes: PAYLOAD }
}

/// One hot run, many runs, large payloads.
pub async fn shapes(args: &Args, report: &mut Report) -> Result<()> {
    let spec = |name, events, runs, payload_bytes| Spec {
        name,
        events: args.scaled(events),
        rows_per_transaction: if payload_bytes > PAYLOAD { 10 } else { 100 },
        runs,
        payload_bytes,
    };
    let ways: Vec<Way> = ways(args).into_iter().take(1).collect();
    let mut table = Table::new(&HEAD);
    for shape in [
        spec("one hot run", 1_000_000, 1, PAYLOAD),
        spec("100,000 runs", 1_000_000, 100_000, PAYLOAD),
        spec("64 KiB payloads", 20_000, 1_000, 64 << 10),
        spec("900 KiB payloads", 1_000, 100, 900 << 10),
    ] {
        for series in series(args, report, shape, &ways).await? {
            table.push(series.row());
        }
    }
    let text = "As above, with 100 rows per transaction, or 10 of the large payloads.";
    report.section(Section::new("Hot run, many runs, large payloads", text).with(table));
    Ok(())
}

/// All ways on one backlog, in turn; who goes first changes from round to round.
pub async fn series(
    args: &Args,
    report: &mut Report,
    spec: Spec,
    ways: &[Way],
) -> Result<Vec<Series>> {
    let mut backlog = Backlog::write(&args.program, spec).await?;
    let mut all = Vec::new();
    for way in ways {
        match backlog.choose(way).await? {
            true => {
                all.push(Series { spec, way: way.clone(), runs: Vec::new(), limits: Vec::new() })
            }
            false => report.note(format!("The program knows no pipeline `{}`.", way.pipeline)),
        }
    }
    let mut templates: HashMap<String, Arc<Frames>> = HashMap::new();
    for round in 0..args.rounds() {
        for series in &mut all {
            let frames = templates.get(&series.way.pipeline).cloned();
            // The very first has no messages of the relay to send again yet.
            if let Some(frames) = frames.filter(|_| round % 2 == 1) {
                series.limits.push(Limit::measure(&mut backlog, series.way.socket, frames).await?);
                series.runs.push(drain(&mut backlog, &series.way).await?);
            } else {
                series.runs.push(drain(&mut backlog, &series.way).await?);
                let pipeline = series.way.pipeline.clone();
                let frames = match templates.get(&pipeline) {
                    Some(frames) => Arc::clone(frames),
                    None => {
                        let template = Template::read(&backlog).await?;
                        let frames = Arc::new(Frames::encode(&template, &pipeline, spec.events));
                        // Those of the pipeline before take as much memory as the backlog.
                        Arc::clone(templates.entry(pipeline).or_insert(frames))
                    }
                };
                series.limits.push(Limit::measure(&mut backlog, series.way.socket, frames).await?);
            }
            tell(series, round);
        }
    }
    Ok(all)
}

fn tell(series: &Series, round: u64) {
    let (Some(run), Some(limit)) = (series.runs.last(), series.limits.last()) else { return };
    let rate = |seconds: f64| series.spec.events as f64 / seconds;
    println!(
        "{}, {}, {}, round {}: relay {:.0}/s, pg_recvlogical {:.0}/s, raw publisher {:.0}/s, time ÷ \
         limit's {:.2}",
        series.spec.name,
        series.way.socket_name(),
        series.way.pipeline,
        round + 1,
        rate(run.seconds),
        rate(limit.read_seconds),
        rate(limit.publish_seconds),
        run.seconds / limit.seconds(),
    );
}

/// One drain, its clock, and its verdict.
async fn drain(backlog: &mut Backlog, way: &Way) -> Result<Run> {
    backlog.choose(way).await?;
    backlog.rewind().await?;
    let nats = backlog.world.nats()?.pid();
    let nats_before = process::cpu_seconds(nats)?;
    let start = Instant::now();
    backlog.world.relay.start()?;
    let mut stored = vec![(0.0, 0)];
    let mut moved = Instant::now();
    while stored.last().is_none_or(|(_, count)| *count < backlog.spec.events) {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let count = backlog.stored().await?;
        if stored.last().is_some_and(|(_, before)| *before < count) {
            moved = Instant::now();
        } else if moved.elapsed() > SILENCE {
            return Err(format!(
                "the drain stands still at {count}:\n{}",
                backlog.world.relay.log()
            )
            .into());
        }
        stored.push((start.elapsed().as_secs_f64(), count));
    }
    while acked(&backlog.world.relay).await? < backlog.spec.events {
        if moved.elapsed() > SILENCE {
            return Err("the relay does not say that all is acknowledged".into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let seconds = start.elapsed().as_secs_f64();
    let relay = backlog.world.relay.pid();
    let walsender = backlog.walsender().await?.map_or(Ok(f64::NAN), process::cpu_seconds)?;
    let cpu = [process::cpu_seconds(relay)?, walsender, process::cpu_seconds(nats)? - nats_before];
    let peak_mib = process::resident_peak_mib(relay)?;
    backlog.settle().await?;
    let verdict = backlog.world.judge(&[]).await?;
    if !verdict.is_ok() {
        return Err(format!("table and stream differ: {verdict}").into());
    }
    backlog.world.relay.terminate(SETTLE).await?;
    Ok(Run { seconds, stored, cpu, peak_mib })
}

/// Events that the relay knows to be acknowledged.
async fn acked(relay: &Relay) -> Result<u64> {
    let (_, metrics) = relay.get("/metrics").await?;
    let mut lines = metrics.lines().filter(|line| line.starts_with("outboxd_events_total{"));
    let line = lines.find(|line| line.contains("stage=\"acked\""));
    let count = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count of events, written as a float"
    )]
    Ok(count.unwrap_or(0.0) as u64)
}
