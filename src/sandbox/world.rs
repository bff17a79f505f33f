//! A whole installation on throw-away servers: PostgreSQL, NATS, a configuration, the relay. And
//! the questions that can be asked of it from outside.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::verdict::{Event, Sample, Seen, Verdict};
use super::{
    Load, Nats, NatsCluster, NatsOptions, Postgres, PostgresOptions, Relay, Result, Sampling,
    SandboxError, Workload, free_port, stream,
};
use crate::lsn::Lsn;

/// The stream of the only destination.
pub const STREAM: &str = "EVENTS";

const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// A debug build on a busy machine connects, locks and reads the stream in this time.
const READY_DEADLINE: Duration = Duration::from_secs(60);

/// One server or three.
#[derive(Debug)]
pub enum Broker {
    /// One.
    Single(Box<Nats>),
    /// Three; the stream is made with three replicas.
    Cluster(NatsCluster),
}

impl Broker {
    /// Where clients connect.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        match self {
            Broker::Single(nats) => vec![nats.url()],
            Broker::Cluster(cluster) => cluster.urls(),
        }
    }

    /// A client of its own.
    ///
    /// # Errors
    /// When no server answers.
    pub async fn connect(&self) -> Result<async_nats::Client> {
        match self {
            Broker::Single(nats) => nats.connect().await,
            Broker::Cluster(cluster) => cluster.connect().await,
        }
    }
}

/// What an installation is made with.
#[derive(Debug, Clone, Default)]
pub struct WorldOptions {
    /// The program `outboxd`.
    pub program: PathBuf,
    /// PostgreSQL.
    pub postgres: PostgresOptions,
    /// NATS.
    pub nats: NatsOptions,
    /// Three nodes, three replicas.
    pub cluster: bool,
    /// Lines of `[relay]`, e.g. `memory = "8MiB"`.
    pub relay: String,
    /// Lines of `[source]`, e.g. `table = "app.outbox"`.
    pub source: String,
    /// Lines of `[destination.events]`, e.g. `pipeline = "per-run"`.
    pub destination: String,
    /// Whole tables at the end, e.g. `[destination.other]`.
    pub more: String,
    /// Lines of `[destination.events.create]`, e.g. `duplicate_window = "2s"`.
    pub create: String,
    /// `[log] level`, when it is not the default.
    pub log_level: Option<String>,
    /// The relay's way to PostgreSQL, when it is not the Unix socket (a proxy, say).
    pub source_url: Option<String>,
    /// The relay's way to NATS, when it is not the servers' own ports.
    pub servers: Option<Vec<String>>,
}

/// A running installation.
#[derive(Debug)]
pub struct World {
    // In this order they end.
    /// The relay.
    pub relay: Relay,
    /// NATS.
    pub broker: Broker,
    /// PostgreSQL.
    pub postgres: Postgres,
}

impl World {
    /// Starts the servers, runs `outboxd init --create-streams`, starts the relay and waits until
    /// it is ready.
    ///
    /// # Errors
    /// When a server does not come up, or `init` or the relay fails.
    pub async fn start(options: WorldOptions) -> Result<World> {
        let mut world = World::prepare(options).await?;
        world.start_relay().await?;
        Ok(world)
    }

    /// The same without starting the relay.
    ///
    /// # Errors
    /// When a server does not come up, or `init` fails.
    pub async fn prepare(options: WorldOptions) -> Result<World> {
        let (postgres, broker) =
            tokio::try_join!(Postgres::start_with(options.postgres.clone()), broker(&options))?;
        World::assemble(options, postgres, broker).await
    }

    /// The same with servers that run already.
    ///
    /// # Errors
    /// When `init` fails.
    pub async fn assemble(
        options: WorldOptions,
        postgres: Postgres,
        broker: Broker,
    ) -> Result<World> {
        let admin_port = free_port()?;
        let text = configuration(&options, &postgres, &broker, admin_port);
        let relay = Relay::prepare(&options.program, &text, admin_port, options.postgres.keep)?;
        relay.run(&["init", "--create-streams"]).await?;
        Ok(World { relay, broker, postgres })
    }

    /// Starts the relay and waits until it is ready.
    ///
    /// # Errors
    /// When it ends before, or is not ready within a minute.
    pub async fn start_relay(&mut self) -> Result<()> {
        self.relay.start()?;
        self.relay.wait_ready(READY_DEADLINE).await
    }

    /// The only nats-server.
    ///
    /// # Errors
    /// When there are three.
    pub fn nats(&mut self) -> Result<&mut Nats> {
        match &mut self.broker {
            Broker::Single(nats) => Ok(nats),
            Broker::Cluster(_) => Err(SandboxError::new("this world has a cluster")),
        }
    }

    /// The three nats-servers.
    ///
    /// # Errors
    /// When there is one.
    pub fn cluster(&mut self) -> Result<&mut NatsCluster> {
        match &mut self.broker {
            Broker::Cluster(cluster) => Ok(cluster),
            Broker::Single(_) => Err(SandboxError::new("this world has one nats-server")),
        }
    }

    /// Starts writers.
    #[must_use]
    pub fn load(&self, what: Workload) -> Load {
        what.start(&self.postgres.unix_url())
    }

    /// What committed, from the table, in the order of the numbers that the sequence gave.
    ///
    /// # Errors
    /// When PostgreSQL refuses.
    pub async fn committed(&self) -> Result<Vec<Event>> {
        let client = self.postgres.connect().await?;
        let sql = "SELECT id, run_id, (payload->>'n')::bigint FROM outbox.event ORDER BY seq";
        let rows = client.query(sql, &[]).await.map_err(|error| words("outbox.event", &error))?;
        Ok(rows
            .iter()
            .map(|row| Event { id: row.get(0), run: row.get(1), n: row.get(2) })
            .collect())
    }

    /// Ids in the dead letters, but for those that are in the stream after all.
    ///
    /// # Errors
    /// When PostgreSQL refuses.
    pub async fn buried(&self) -> Result<HashSet<uuid::Uuid>> {
        let client = self.postgres.connect().await?;
        let sql = "SELECT event_id::uuid FROM outbox.dead_letter WHERE state <> 'redriven'";
        let rows = client.query(sql, &[]).await.map_err(|error| words("dead letters", &error))?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Ids of the events that the ledger calls published at a destination.
    ///
    /// # Errors
    /// When PostgreSQL refuses.
    pub async fn recorded(&self, destination: &str) -> Result<HashSet<uuid::Uuid>> {
        let client = self.postgres.connect().await?;
        let rows = client.query(RECORDED, &[&destination]).await;
        let rows = rows.map_err(|error| words("the ledger", &error))?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// The slot's `confirmed_flush_lsn`.
    ///
    /// # Errors
    /// When PostgreSQL refuses, or there is no slot.
    pub async fn confirmed(&self) -> Result<Lsn> {
        let client = self.postgres.connect().await?;
        confirmed(&client).await
    }

    /// All messages of the stream. On a cluster a leader of this moment may not lead in the next:
    /// asked again.
    ///
    /// # Errors
    /// When JetStream does not answer for a minute.
    pub async fn messages(&self) -> Result<Vec<Seen>> {
        let start = Instant::now();
        loop {
            let read = async { stream::read(&self.broker.connect().await?, STREAM, 1).await };
            match read.await {
                Err(_) if start.elapsed() < READY_DEADLINE => {
                    tokio::time::sleep(LOOK_INTERVAL).await;
                }
                read => return read,
            }
        }
    }

    /// Waits until every committed event is in the stream or in the dead letters, as far as counting
    /// can tell, and the slot's position is past all of them.
    ///
    /// # Errors
    /// When that does not come about in time: with what was seen last and the relay's log.
    pub async fn settle(&self, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        let client = self.postgres.connect().await?;
        let row = client
            .query_one("SELECT count(*), pg_current_wal_insert_lsn()::text FROM outbox.event", &[])
            .await
            .map_err(|error| words("outbox.event", &error))?;
        let expected = u64::try_from(row.get::<_, i64>(0)).unwrap_or(0);
        let end: Lsn = row.get::<_, &str>(1).parse().map_err(|error| words("an LSN", &error))?;
        let mut seen = String::from("nothing");
        while start.elapsed() < deadline {
            match self.progress(&client).await {
                Ok((decided, confirmed)) if decided >= expected && confirmed >= end => {
                    return Ok(());
                }
                Ok((decided, confirmed)) => {
                    seen = format!(
                        "{decided} of {expected} events in the stream or buried, confirmed \
                         {confirmed} of {end}"
                    );
                }
                Err(error) => seen = error.to_string(),
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let log = self.relay.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(40)..).unwrap_or_default().join("\n");
        Err(SandboxError::new(format!("not settled within {deadline:?}: {seen}\n{tail}")))
    }

    async fn progress(&self, client: &tokio_postgres::Client) -> Result<(u64, Lsn)> {
        let state = stream::state(&self.broker.connect().await?, STREAM).await?;
        let row = client
            .query_one("SELECT count(*) FROM outbox.dead_letter WHERE state <> 'redriven'", &[])
            .await
            .map_err(|error| words("dead letters", &error))?;
        let buried = u64::try_from(row.get::<_, i64>(0)).unwrap_or(0);
        Ok((state.messages + buried, confirmed(client).await?))
    }

    /// Compares table and stream.
    ///
    /// # Errors
    /// When one of them can't be read.
    pub async fn judge(&self, samples: &[Sample]) -> Result<Verdict> {
        let committed = self.committed().await?;
        let buried = self.buried().await?;
        Ok(Verdict::of(&committed, &buried, &self.messages().await?, samples))
    }

    /// Samples the slot's position against the stream until the returned task is asked to stop.
    ///
    /// # Errors
    /// When a server can't be reached now.
    pub async fn sample(&self) -> Result<Sampling> {
        Sampling::start(&self.postgres, &self.broker).await
    }
}

const RECORDED: &str = "\
    SELECT DISTINCT e.id FROM outbox.receipt r CROSS JOIN unnest(r.seqs) AS s (seqs) \
      JOIN outbox.event e ON e.seq >= lower(s.seqs) AND e.seq < upper(s.seqs) \
     WHERE r.destination = $1 AND r.outcome = 'published'";

pub(super) async fn confirmed(client: &tokio_postgres::Client) -> Result<Lsn> {
    let sql = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots \
                WHERE confirmed_flush_lsn IS NOT NULL";
    let row = client.query_one(sql, &[]).await.map_err(|error| words("the slot", &error))?;
    row.get::<_, &str>(0).parse().map_err(|error| words("an LSN", &error))
}

pub(super) fn words(what: &str, error: &dyn std::fmt::Display) -> SandboxError {
    SandboxError::new(format!("{what}: {error}"))
}

async fn broker(options: &WorldOptions) -> Result<Broker> {
    Ok(match options.cluster {
        true => Broker::Cluster(NatsCluster::start_with(&options.nats).await?),
        false => Broker::Single(Box::new(Nats::start_with(options.nats.clone()).await?)),
    })
}

fn configuration(
    options: &WorldOptions,
    postgres: &Postgres,
    broker: &Broker,
    admin_port: u16,
) -> String {
    let url = options.source_url.clone().unwrap_or_else(|| postgres.unix_url());
    let servers = options.servers.clone().unwrap_or_else(|| broker.urls());
    let replicas = match broker {
        Broker::Single(_) => 1,
        Broker::Cluster(_) => 3,
    };
    let WorldOptions { relay, source, destination, create, more, .. } = options;
    let level = options.log_level.as_deref().unwrap_or("info");
    format!(
        "[relay]\nname = \"world\"\n{relay}\n\n\
         [source]\nurl = \"{url}\"\n{source}\n\n\
         [destination.events]\nservers = {servers:?}\nstream = \"{STREAM}\"\n{destination}\n\n\
         [destination.events.create]\nreplicas = {replicas}\n{create}\n\n\
         [admin]\nlisten = \"127.0.0.1:{admin_port}\"\n\n\
         [log]\nlevel = \"{level}\"\n\n\
         {more}\n"
    )
}
