//! What the primary's other work feels: pgbench beside events that are relayed, polled, or only
//! inserted, in turn.

use std::process::Stdio;
use std::time::Duration;

use outboxd::sandbox::{PostgresOptions, World, WorldOptions};
use tokio::process::Command;

use crate::Result;
use crate::args::Args;
use crate::figures::Spread;
use crate::poller::{self, Poller};
use crate::report::{Check, Report, Section, Table};
use crate::writer::Load;

const RATE: f64 = 2_000.0;
const SETTLE: Duration = Duration::from_secs(300);
/// Accounts are 100,000 times that: larger than the cache, so that it is the usual mixture of reads
/// and writes and not a queue at one row.
const SCALE: &str = "20";
const CLIENTS: &str = "4";

const TEXT: &str = "\
`pgbench` (TPC-B-like, scale 20, 4 clients, prepared) while sessions insert 2,000 events/s in \
transactions of ten, the same inserts into the same table in every arm: with nobody that publishes \
them, with the relay, with the poller. The three arms run in turn in each round; what an arm left \
over was published, marked and vacuumed before the next. All processes share the machine, \
nats-server's too, so CPU that is taken from pgbench by them counts.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    Nobody,
    Relay,
    Poller,
}

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Arm::Nobody => "inserts alone",
            Arm::Relay => "with the relay",
            Arm::Poller => "with the poller",
        }
    }
}

pub async fn part(args: &Args, report: &mut Report) -> Result<()> {
    let mut bench = Bench::start(args).await?;
    let mut arms = [Arm::Nobody, Arm::Relay, Arm::Poller];
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..args.rounds() {
        for arm in arms {
            let rate = bench.arm(arm, args.seconds(30)).await?;
            println!("pgbench {}, round {}: {rate:.0} transactions/s", arm.name(), round + 1);
            if let Some(rates) = rates.get_mut(arm as usize) {
                rates.push(rate);
            }
        }
        // Nobody is always the first behind what comes before.
        arms.rotate_left(1);
    }
    let [alone, relay, poller] = &rates;
    let ratio = |with: &[f64]| Spread::of(with.iter().zip(alone).map(|(with, alone)| with / alone));
    let mut table =
        Table::new(&["pgbench", "transactions/s", "ratio to inserts alone, pair by pair"]);
    for (arm, rates) in [(Arm::Nobody, alone), (Arm::Relay, relay), (Arm::Poller, poller)] {
        let rate = Spread::of(rates.iter().copied());
        table.push(vec![arm.name().to_owned(), rate.show(0), ratio(rates).show(3)]);
    }
    let what = "pgbench with the relay ÷ without, at 2,000 events/s";
    report.check(Check::at_least(what, ratio(relay).median, 0.95, 3));
    report.section(Section::new("Load on the primary", TEXT).with(table));
    Ok(())
}

struct Bench {
    world: World,
    client: tokio_postgres::Client,
    port: u16,
}

impl Bench {
    async fn start(args: &Args) -> Result<Bench> {
        let postgres = PostgresOptions { fsync: true, ..PostgresOptions::default() }
            .set("shared_buffers", "256MB")
            .set("max_wal_size", "8GB")
            .set("checkpoint_timeout", "1h");
        let server = outboxd::sandbox::Postgres::start_with(postgres.clone()).await?;
        let client = server.connect().await?;
        client.batch_execute(poller::TABLE).await?;
        let options = WorldOptions {
            program: args.program.clone(),
            postgres,
            source: "table = \"public.polled\"".to_owned(),
            ..WorldOptions::default()
        };
        let nats = Box::new(outboxd::sandbox::Nats::start().await?);
        let port = nats.port();
        poller::make_stream(&nats.connect().await?, poller::STREAM, "polled.>").await?;
        let broker = outboxd::sandbox::Broker::Single(nats);
        let world = World::assemble(options, server, broker).await?;
        let bench = Bench { world, client, port };
        bench.pgbench(&["-i", "-q", "-s", SCALE]).await?;
        Ok(bench)
    }

    /// pgbench's transactions per second.
    async fn arm(&mut self, arm: Arm, seconds: u64) -> Result<f64> {
        self.clear().await?;
        let mut poller = None;
        match arm {
            Arm::Nobody => {}
            Arm::Relay => self.world.start_relay().await?,
            Arm::Poller => poller = Some(Poller::start(&self.world.postgres, self.port)),
        }
        let load = Load {
            rows: 10,
            // From before pgbench's first transaction to behind its last.
            seconds: seconds + 2,
            ..Load::at(self.world.postgres.unix_url(), "public.polled", RATE, seconds)
        };
        let time = seconds.to_string();
        let pgbench = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.pgbench(&["-n", "-M", "prepared", "-c", CLIENTS, "-j", "1", "-T", &time]).await
        };
        let (written, said) = tokio::try_join!(load.write(), pgbench)?;
        let rate = written.len() as f64 / load.seconds as f64;
        if rate < RATE * 0.9 {
            println!("{}: {rate:.0} events/s instead of {RATE}", arm.name());
        }
        if let Some(poller) = poller {
            poller.stop().await?;
        }
        if self.world.relay.is_running() {
            self.world.settle(SETTLE).await?;
            self.world.relay.terminate(SETTLE).await?;
        }
        let line = said.lines().find_map(|line| line.strip_prefix("tps = "));
        let rate = line.and_then(|rest| rest.split(' ').next()?.parse().ok());
        rate.ok_or_else(|| format!("pgbench said no rate:\n{said}").into())
    }

    /// Everything is published and marked, whoever did it, and the dead rows are gone.
    async fn clear(&mut self) -> Result<()> {
        self.world.start_relay().await?;
        self.world.settle(SETTLE).await?;
        self.world.relay.terminate(SETTLE).await?;
        let mark = "UPDATE public.polled SET published_at = now() WHERE published_at IS NULL";
        for sql in
            [mark, "VACUUM public.polled", "VACUUM pgbench_branches, pgbench_tellers", "CHECKPOINT"]
        {
            self.client.batch_execute(sql).await?;
        }
        Ok(())
    }

    async fn pgbench(&self, arguments: &[&str]) -> Result<String> {
        let postgres = &self.world.postgres;
        let mut command = Command::new(postgres.bin().join("pgbench"));
        command.arg("-h").arg(postgres.socket_dir()).args(["-p", &postgres.port().to_string()]);
        command.args(["-U", "postgres"]).args(arguments).arg("postgres");
        let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => {
                let words = String::from_utf8_lossy(&output.stderr);
                Err(format!("pgbench: {}: {words}", output.status).into())
            }
        }
    }
}
