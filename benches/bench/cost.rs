//! What the relay costs: CPU, memory, WAL, and what the primary's other work feels of it.

use std::time::{Duration, Instant};

use outboxd::sandbox::{World, WorldOptions};

use crate::args::Args;
use crate::backlog::{Socket, Spec, Way};
use crate::drain;
use crate::figures::Spread;
use crate::report::{Check, Report, Section, Table};
use crate::{Result, load, process, wal};

/// Long enough for the first looks of the sweeper and the connections' first pings.
const REST: Duration = Duration::from_secs(5);

const TEXT: &str = "\
CPU is user and system time of the process from its start to the last ack. RSS is `VmRSS` while idle \
and `VmHWM`, the peak of a fresh process, under load. The large transaction \
has payloads of 1,800 bytes; the server sends it after its commit. WAL is counted as `make bench-wal` does: what \
the server writes with the relay, less what the same inserts write alone.";

pub async fn part(args: &Args, report: &mut Report) -> Result<()> {
    let mut table = Table::new(&["", "median (min … max)", "unit"]);
    let mut row = |what: &str, figures: Spread, digits, unit: &str| {
        table.push(vec![what.to_owned(), figures.show(digits), unit.to_owned()]);
    };

    let drained = drain::reference(args, report).await?;
    let [relay, walsender, nats] = drained.cpu;
    row("relay's CPU in the drain, 100 rows per transaction", relay, 2, "µs/event");
    row("walsender's, beside it", walsender, 2, "µs/event");
    row("nats-server's, beside it", nats, 2, "µs/event");
    report.check(Check::at_most("relay's CPU in the drain, µs/event", relay.median, 4.0, 2));
    row("relay's RSS in the drain, peak", drained.peak_mib, 1, "MiB");
    report.check(Check::at_most("RSS in the drain, MiB", drained.peak_mib.max, 64.0, 1));

    let (bytes, large) = large_transaction(args, report).await?;
    let what = format!("one transaction of {:.2} GB", bytes as f64 / 1e9);
    row(&format!("relay's RSS during {what}, peak"), large, 1, "MiB");
    report.check(Check::at_most(format!("RSS during {what}, MiB"), large.max, 64.0, 1));

    let (resident, cpu) = idle(args).await?;
    row("relay's RSS, idle", resident, 1, "MiB");
    report.check(Check::at_most("RSS idle, MiB", resident.max, 20.0, 1));
    row("relay's CPU, idle", cpu, 3, "% of a core");
    report.check(Check::at_most("CPU idle, % of a core", cpu.median, 0.2, 3));

    for mode in wal::MODES.iter().filter(|mode| mode.limited) {
        let rounds = wal_bytes(args, mode).await;
        let written = Spread::of(rounds.iter().map(wal::Round::own));
        let what = format!("WAL that the relay writes, at 2,000 events/s: {}", mode.name);
        row(&what, written, 2, "bytes/event");
        let receipts = Spread::of(rounds.iter().map(|round| round.receipts));
        row("receipts beside it", receipts, 1, "1/s");
        let what = format!("WAL, bytes per event: {}", mode.name);
        report.check(Check::at_most(what, written.median, wal::LIMIT, 2));
    }
    report.section(Section::new("Cost", TEXT).with(table));
    load::part(args, report).await
}

/// Bytes of payload, and the peak in MiB.
async fn large_transaction(args: &Args, report: &mut Report) -> Result<(u64, Spread)> {
    let events = args.scaled(1_200_000);
    let spec = Spec {
        name: "a large transaction",
        events,
        rows_per_transaction: events,
        runs: 1_000,
        // Just below what would go out of line and be compressed.
        payload_bytes: 1_800,
    };
    let pipeline = args.pipelines.first().map_or("batch", String::as_str);
    let all = drain::series(args, report, spec, &[Way::new(pipeline, Socket::Unix)]).await?;
    let peak = all.first().map(drain::Series::peak_mib).ok_or("no pipeline to drain with")?;
    Ok((events * spec.payload_bytes as u64, peak))
}

/// MiB, and percent of a core.
async fn idle(args: &Args) -> Result<(Spread, Spread)> {
    let options = WorldOptions { program: args.program.clone(), ..WorldOptions::default() };
    let world = World::start(options).await?;
    let pid = world.relay.pid();
    tokio::time::sleep(REST).await;
    let (mut resident, mut cpu) = (Vec::new(), Vec::new());
    for round in 0..args.rounds() {
        let (start, before) = (Instant::now(), process::cpu_seconds(pid)?);
        tokio::time::sleep(Duration::from_secs(args.seconds(60))).await;
        let used = process::cpu_seconds(pid)? - before;
        let percent = used / start.elapsed().as_secs_f64() * 100.0;
        let mib = process::resident_mib(pid)?;
        println!("idle, round {}: {percent:.3} % of a core, {mib:.1} MiB", round + 1);
        cpu.push(percent);
        resident.push(mib);
    }
    Ok((Spread::of(resident), Spread::of(cpu)))
}

async fn wal_bytes(args: &Args, mode: &wal::Mode) -> Vec<wal::Round> {
    let mut bench = wal::Bench::on(&args.program, mode).await;
    let mut rounds = Vec::new();
    for round in 0..args.rounds() {
        let measured = bench.round(args.seconds(10)).await;
        println!("WAL, {}, round {}: {measured:.2?}", mode.name, round + 1);
        rounds.push(measured);
    }
    rounds
}
