//! From commit to JetStream's ack: of the relay, of a polling relay, and how long one raw publish
//! takes, in turn on the same servers.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use outboxd::sandbox::verdict::{Event, Seen, Verdict};
use outboxd::sandbox::{PostgresOptions, STREAM, World, WorldOptions, stream};

use crate::args::Args;
use crate::figures::{Percentiles, Spread, percentile};
use crate::poller::{self, Poller};
use crate::report::{Check, Curve, Report, Section, Table};
use crate::tap::{Acks, Tap};
use crate::wire::Wire;
use crate::writer::{Load, Written};
use crate::{Result, clock, drain};

/// `[destination] inbox_prefix`, so that the relay's acks can be told from others.
const INBOX: &str = "bench-relay";
const SETTLE: Duration = Duration::from_secs(600);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Events for the poller at most: at rates that it can't keep up with its times are those of its
/// queue, which only grows.
const POLLED_MAX: f64 = 100_000.0;
/// Single publishes, one after the other.
const ROUND_TRIPS: u32 = 500;
const RAW: &str = "RAW";

const TEXT: &str = "\
Sessions commit at the rate, at times by chance (Poisson), and note when the COMMIT has returned to \
them. Transactions have 1 event up to 1,000 events/s, 10 at 10,000, and 100 above; every commit is on \
disk before it is told (`fsync`, `synchronous_commit` on). JetStream's ack is a message on the \
publisher's inbox: a second subscriber of that inbox, on a connection of its own, takes the time when it \
comes, for the relay and for the poller alike. So nothing is asked of whoever is measured. All times \
are read off one clock, that of the machine.\n\n\
* *return → ack*: from the return of the COMMIT to the ack. A session that is woken late makes this \
shorter, which is why there are the next two.\n\
* *record → ack*: from the time in the commit record, which PostgreSQL takes **before** it writes the \
WAL to disk: the time of that write is in it. An upper bound, and the clock of \
`outboxd_commit_to_ack_seconds` and of `make demo`.\n\
* *return → stored*: to the time that nats-server put on the message. A lower bound.\n\n\
The poller looks every 100 ms for 1,000 rows (`FOR UPDATE SKIP LOCKED`, publishes pipelined, `UPDATE … \
published_at`), and again at once after a full batch. It is given 100,000 events at most: at a rate that \
it can't keep up with its times are those of its queue, which only grows. Milliseconds.";

/// Which time it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Span {
    ReturnToAck,
    RecordToAck,
    ReturnToStored,
    PollerReturnToAck,
}

impl Span {
    const ALL: [Span; 4] =
        [Span::ReturnToAck, Span::RecordToAck, Span::ReturnToStored, Span::PollerReturnToAck];

    fn name(self) -> &'static str {
        match self {
            Span::ReturnToAck => "relay, return → ack",
            Span::RecordToAck => "relay, record → ack",
            Span::ReturnToStored => "relay, return → stored",
            Span::PollerReturnToAck => "poller, return → ack",
        }
    }
}

/// What a rate showed, round by round.
#[derive(Default)]
struct Seconds {
    spans: HashMap<Span, Vec<Percentiles>>,
    /// Milliseconds of the first round, ascending.
    first: HashMap<Span, Vec<f64>>,
    reached: Vec<f64>,
    round_trip: Vec<f64>,
}

impl Seconds {
    fn add(&mut self, span: Span, mut times: Vec<f64>) -> Percentiles {
        times.sort_unstable_by(f64::total_cmp);
        let percentiles = Percentiles::of(&times);
        self.spans.entry(span).or_default().push(percentiles);
        self.first.entry(span).or_insert(times);
        percentiles
    }

    fn spread(&self, span: Span, nth: usize) -> Spread {
        let rounds = self.spans.get(&span).into_iter().flatten();
        Spread::of(rounds.filter_map(|round| round.all().get(nth).copied()))
    }

    /// p50 of each round.
    fn medians(&self, span: Span) -> impl Iterator<Item = f64> {
        self.spans.get(&span).into_iter().flatten().map(|round| round.p50)
    }

    fn multiple_of_raw(&self) -> Spread {
        let pairs = self.medians(Span::ReturnToAck).zip(&self.round_trip);
        Spread::of(pairs.map(|(relay, raw)| relay / raw))
    }

    fn multiple_of_poller(&self) -> Spread {
        let pairs = self.medians(Span::PollerReturnToAck).zip(self.medians(Span::ReturnToAck));
        Spread::of(pairs.map(|(poller, relay)| poller / relay))
    }
}

pub async fn part(args: &Args, report: &mut Report) -> Result<()> {
    let drained = drain::reference(args, report).await?.rate;
    let mut bench = Bench::start(args).await?;
    let mut table =
        Table::new(&["events/s", "reached", "times", "p50", "p90", "p99", "p99.9", "max"]);
    let high = (drained * 0.8 / 1_000.0).round() * 1_000.0;
    let mut curves: HashMap<(Span, usize), Vec<(f64, f64)>> = HashMap::new();
    let mut multiples = Table::new(&[
        "events/s",
        "one raw publish",
        "relay's p50 ÷ that",
        "poller's p50 ÷ relay's",
    ]);
    let mut rates = [100.0, 1_000.0, 10_000.0, high];
    rates.sort_by(f64::total_cmp);
    for rate in rates {
        let mut seen = Seconds::default();
        for round in 0..args.rounds() {
            bench.round(rate, args.seconds(10), &mut seen, report).await?;
            let p = |span, nth| {
                seen.spans.get(&span).and_then(|all| all.last()?.all().get(nth).copied())
            };
            println!(
                "{rate} events/s, round {}: relay p50 {:.2} p99 {:.2} ms, poller p50 {:.1} ms, one raw \
                 publish {:.3} ms",
                round + 1,
                p(Span::ReturnToAck, 0).unwrap_or(f64::NAN),
                p(Span::ReturnToAck, 2).unwrap_or(f64::NAN),
                p(Span::PollerReturnToAck, 0).unwrap_or(f64::NAN),
                seen.round_trip.last().unwrap_or(&f64::NAN),
            );
        }
        let name =
            if rate == high { format!("{rate} (80 % of the drain)") } else { rate.to_string() };
        for span in Span::ALL {
            let cells = (0..Percentiles::NAMES.len()).map(|nth| seen.spread(span, nth).show(2));
            let reached = Spread::of(seen.reached.iter().copied()).show(0);
            table.push(
                [vec![name.clone(), reached, span.name().to_owned()], cells.collect()].concat(),
            );
        }
        for (span, nth) in [
            (Span::ReturnToAck, 0),
            (Span::ReturnToAck, 2),
            (Span::PollerReturnToAck, 0),
            (Span::PollerReturnToAck, 2),
        ] {
            let point = (rate, seen.spread(span, nth).median);
            curves.entry((span, nth)).or_default().push(point);
        }
        distribution(report, &name, &seen);
        multiples.push(vec![
            name,
            Spread::of(seen.round_trip.iter().copied()).show(3),
            seen.multiple_of_raw().show(1),
            seen.multiple_of_poller().show(0),
        ]);
        if rate == 1_000.0 {
            judge(report, &seen);
        }
    }
    let mut curves: Vec<_> = curves.into_iter().collect();
    curves.sort_by_key(|((span, nth), _)| (*span, *nth));
    for ((span, nth), points) in curves {
        let who = if span == Span::ReturnToAck { "relay" } else { "poller" };
        let percentile = Percentiles::NAMES.get(nth).copied().unwrap_or_default();
        report.rate_curves.push(Curve {
            name: format!("{who}, {percentile}"),
            points,
            colour: usize::from(nth > 0),
            dashed: span == Span::PollerReturnToAck,
        });
    }
    report.section(Section::new("Latency", TEXT).with(table).with(multiples));
    Ok(())
}

fn judge(report: &mut Report, seen: &Seconds) {
    let what = |which: &str| format!("latency at 1,000 events/s, {which}");
    let relay = |nth| seen.spread(Span::ReturnToAck, nth).median;
    report.check(Check::at_most(what("p50, ms"), relay(0), 1.0, 2));
    report.check(Check::at_most(what("p99, ms"), relay(2), 5.0, 2));
    let times = seen.multiple_of_poller().median;
    report.check(Check::at_least(what("poller's p50 ÷ relay's"), times, 40.0, 0));
}

fn distribution(report: &mut Report, rate: &str, seen: &Seconds) {
    let colour = report.latency_curves.len() / 2;
    for (span, who) in [(Span::ReturnToAck, "relay"), (Span::PollerReturnToAck, "poller")] {
        let Some(times) = seen.first.get(&span) else { continue };
        // Equal steps where the plot has equal steps: in the logarithm of what is left.
        let shares = (0..=80).map(|n| 1.0 - 10_f64.powf(-f64::from(n) / 20.0));
        let resolved = shares.filter(|share| (1.0 - share) * times.len() as f64 >= 1.0);
        let points = resolved.map(|share| (share * 100.0, percentile(times, share))).collect();
        let rate = rate.split(' ').next().unwrap_or_default();
        report.latency_curves.push(Curve {
            name: format!("{who}, {rate}/s"),
            points,
            colour,
            dashed: span == Span::PollerReturnToAck,
        });
    }
}

struct Bench {
    world: World,
    nats: async_nats::Client,
    postgres: tokio_postgres::Client,
    port: u16,
}

impl Bench {
    async fn start(args: &Args) -> Result<Bench> {
        let options = WorldOptions {
            program: args.program.clone(),
            postgres: PostgresOptions { fsync: true, ..PostgresOptions::default() }
                .set("track_commit_timestamp", "on")
                .set("max_wal_size", "8GB"),
            destination: format!("inbox_prefix = \"{INBOX}\""),
            ..WorldOptions::default()
        };
        let mut world = World::prepare(options).await?;
        let postgres = world.postgres.connect().await?;
        postgres.batch_execute(poller::TABLE).await?;
        let nats = world.broker.connect().await?;
        poller::make_stream(&nats, poller::STREAM, "polled.>").await?;
        poller::make_stream(&nats, RAW, "raw.>").await?;
        let port = world.nats()?.port();
        Ok(Bench { world, nats, postgres, port })
    }

    async fn round(
        &mut self,
        rate: f64,
        seconds: u64,
        seen: &mut Seconds,
        report: &mut Report,
    ) -> Result<()> {
        let watch = clock::Watch::start();
        let port = self.port;
        seen.round_trip.push(tokio::task::spawn_blocking(move || round_trip(port)).await??);

        self.world.start_relay().await?;
        self.world.settle(SETTLE).await?;
        let tap = Tap::start(self.port, INBOX).await?;
        let relay = self.arm("outbox.event", STREAM, rate, seconds).await?;
        self.world.settle(SETTLE).await?;
        let acks = tap.stop(STREAM).await?;
        self.world.relay.terminate(SETTLE).await?;
        seen.reached.push(relay.written.len() as f64 / seconds as f64);
        let recorded = self.recorded(&relay).await?;
        seen.add(Span::ReturnToAck, relay.times(|written| Some(written.returned), &acks)?);
        let record = |written: &Written| recorded.get(&written.event.id).copied();
        seen.add(Span::RecordToAck, relay.times(record, &acks)?);
        seen.add(Span::ReturnToStored, relay.times_to_stored());

        let enough = (POLLED_MAX / rate).ceil().clamp(1.0, seconds as f64);
        let polled_seconds = Duration::from_secs_f64(enough).as_secs();
        let tap = Tap::start(self.port, poller::INBOX).await?;
        let poller = Poller::start(&self.world.postgres, self.port);
        let polled = self.arm("public.polled", poller::STREAM, rate, polled_seconds).await?;
        poller.stop().await?;
        let acks = tap.stop(poller::STREAM).await?;
        seen.add(Span::PollerReturnToAck, polled.times(|written| Some(written.returned), &acks)?);
        if let Some(jump) = watch.jump() {
            report.note(format!(
                "The machine's clock was set by {jump:.1} ms during the latency part."
            ));
        }
        Ok(())
    }

    /// Writes, and waits until all of it is in the stream.
    async fn arm(&self, table: &'static str, name: &str, rate: f64, seconds: u64) -> Result<Arm> {
        let before = stream::state(&self.nats, name).await?.last_sequence;
        let load = Load::at(self.world.postgres.unix_url(), table, rate, seconds);
        let written = load.write().await?;
        let start = Instant::now();
        let wanted = before + written.len() as u64;
        loop {
            let last = stream::state(&self.nats, name).await?.last_sequence;
            if last >= wanted {
                break;
            }
            if start.elapsed() > SETTLE {
                let log = self.world.relay.log();
                return Err(format!("{last} of {wanted} messages are in {name}:\n{log}").into());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let seen = stream::read(&self.nats, name, before + 1).await?;
        let committed: Vec<Event> = written.iter().map(|written| written.event.clone()).collect();
        let verdict = Verdict::of(&committed, &HashSet::new(), &seen, &[]);
        match verdict.is_ok() {
            true => Ok(Arm { written, seen }),
            false => Err(format!("what was committed and stream {name} differ: {verdict}").into()),
        }
    }

    /// Times in the commit records, as far as PostgreSQL still has them.
    async fn recorded(&self, arm: &Arm) -> Result<HashMap<uuid::Uuid, i64>> {
        let ids: Vec<uuid::Uuid> = arm.written.iter().map(|written| written.event.id).collect();
        let sql = "SELECT id, (extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1e6)::bigint \
                     FROM outbox.event WHERE id = ANY ($1)";
        let rows = self.postgres.query(sql, &[&ids]).await?;
        let times = rows.iter().map(|row| (row.get(0), row.get::<_, i64>(1) * 1_000));
        Ok(times.collect())
    }
}

/// What was written in one arm, and what became of it.
struct Arm {
    written: Vec<Written>,
    seen: Vec<Seen>,
}

impl Arm {
    fn places(&self) -> HashMap<uuid::Uuid, &Seen> {
        self.seen.iter().filter_map(|seen| Some((seen.event.as_ref()?.id, seen))).collect()
    }

    /// Milliseconds to the acks.
    fn times(&self, from: impl Fn(&Written) -> Option<i64>, acks: &Acks) -> Result<Vec<f64>> {
        let places = self.places();
        let times = self.written.iter().map(|written| {
            let ack = places.get(&written.event.id).and_then(|seen| acks.get(&seen.stream_seq));
            let span = ack.zip(from(written)).map(|(ack, from)| (ack - from) as f64 / 1e6);
            span.ok_or_else(|| format!("{}: no commit or no ack was seen", written.event).into())
        });
        times.collect()
    }

    fn times_to_stored(&self) -> Vec<f64> {
        let places = self.places();
        let times = self.written.iter().filter_map(|written| {
            let stored = places.get(&written.event.id)?.stored_at;
            Some((stored - i128::from(written.returned)) as f64 / 1e6)
        });
        times.collect()
    }
}

/// Milliseconds that one publish takes until its ack, half of them.
fn round_trip(port: u16) -> Result<f64> {
    const REPLIES: &str = "bench-raw";
    let mut wire = Wire::connect(port)?;
    wire.subscribe(&format!("{REPLIES}.>"))?;
    let body = "x".repeat(drain::PAYLOAD);
    let mut times = Vec::new();
    for n in 0..ROUND_TRIPS {
        let start = Instant::now();
        wire.send(format!("PUB raw.one {REPLIES}.{n} {}\r\n{body}\r\n", body.len()).as_bytes())?;
        let answer = wire.next()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        if !answer.payload.windows(8).any(|part| part == b"\"stream\"") {
            let words = String::from_utf8_lossy(&answer.payload).into_owned();
            return Err(format!("a raw publish was answered with {words:?}").into());
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(percentile(&times, 0.5))
}
