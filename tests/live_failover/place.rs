//! A primary, its standby and a relay that knows both.

use std::io::Write as _;
use std::path::Path;

use outboxd::sandbox::{
    Broker, Load, Nats, Postgres, PostgresOptions, Stop, Workload, World, WorldOptions,
};

use crate::support::look::until;
use crate::support::{SETTLE, log_tail, options};

/// Name of the standby and of its slot.
pub const STANDBY: &str = "standby";
/// The relay's slot.
pub const SLOT: &str = "outboxd_world";

/// An installation on two servers, of which the standby confirms each commit.
pub struct Place {
    /// The relay, NATS, and whoever is the primary.
    pub world: World,
    /// The standby, later the primary that was.
    pub other: Postgres,
    /// Both, for a writer or a relay.
    pub url: String,
    /// What the relay was made with.
    pub options: WorldOptions,
}

/// The servers of a version, if they were fetched; tells on standard error, past the capture of tests'
/// output, that a test leaves itself out.
pub fn servers(test: &str, version: &str) -> Option<PostgresOptions> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let bin = root.join(format!(".dev/postgres-{version}/bin"));
    if !bin.join("postgres").is_file() {
        let words = format!("skipped: {test}: PostgreSQL {version} is not in .dev\n");
        std::io::stderr().write_all(words.as_bytes()).unwrap();
        return None;
    }
    Some(PostgresOptions { bin: Some(bin), ..PostgresOptions::default() })
}

/// Both servers under one address list, the first one first.
pub fn hosts(first: u16, second: u16) -> String {
    format!(
        "postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres\
         ?target_session_attrs=read-write"
    )
}

impl Place {
    /// Starts the servers and makes everything; starts no relay.
    pub async fn prepare(servers: PostgresOptions) -> Place {
        let nats = async { Nats::start_with(Default::default()).await };
        let pair = async {
            let primary = Postgres::start_with(servers).await?;
            let standby = Postgres::standby_of(&primary, STANDBY).await?;
            Ok((primary, standby))
        };
        let ((mut primary, standby), nats) = tokio::try_join!(pair, nats).unwrap();
        primary.configure("synchronous_standby_names", STANDBY).unwrap();
        primary.reload().unwrap();
        let url = hosts(primary.port(), standby.port());
        // The server keeps no copies out: that is the relay's business.
        let create = "duplicate_window = \"100ms\"".to_owned();
        let relay = "sweep_interval = \"1s\"".to_owned();
        let options = WorldOptions { source_url: Some(url.clone()), create, relay, ..options() };
        let broker = Broker::Single(Box::new(nats));
        let world = World::assemble(options.clone(), primary, broker).await.unwrap();
        Place { world, other: standby, url, options }
    }

    /// Keeps the stream behind the standby, and waits until that one has a copy of the relay's slot.
    pub async fn guard(&mut self) {
        self.world.postgres.configure("synchronized_standby_slots", STANDBY).unwrap();
        self.world.postgres.reload().unwrap();
        self.other.synced(&self.world.postgres, SLOT).await.unwrap();
    }

    /// Writers that follow the primary, for as long as the faults last.
    pub fn load(&self, what: Workload) -> Load {
        Workload { events: u64::MAX, rate: Some(500), ..what }.start(&self.url)
    }

    /// The primary is gone, and the standby takes its place.
    pub async fn fail_over(&mut self, how: Stop) {
        self.world.postgres.stop(how).await.unwrap();
        self.other.promote().await.unwrap();
        std::mem::swap(&mut self.world.postgres, &mut self.other);
    }

    /// Every event is there once and in order, in the history that there was.
    pub async fn judge(&self, mut load: Load) {
        load.enough();
        load.finish().await.unwrap();
        let settled = self.world.settle(SETTLE).await;
        let verdict = self.world.judge(&[]).await.unwrap();
        println!("{verdict}");
        if let Err(error) = settled {
            panic!("{error}\n{verdict}");
        }
        assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&self.world));
        let client = self.world.postgres.connect().await.unwrap();
        let sql = "SELECT generation, timeline FROM outbox.relay";
        let row = client.query_one(sql, &[]).await.unwrap();
        assert_eq!((row.get::<_, i32>(0), row.get::<_, i64>(1)), (1, 2));
    }

    /// The same of so many events that were written one by one.
    pub async fn judge_events(&self, events: usize) {
        if let Err(error) = self.world.settle(SETTLE).await {
            panic!("{error}");
        }
        let verdict = self.world.judge(&[]).await.unwrap();
        assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&self.world));
        assert_eq!(verdict.events, events, "{verdict}");
    }
}

/// Waits until the relay is not ready, and says all of this of it.
pub async fn not_ready(world: &World, words: &[&str]) {
    until("not ready", SETTLE, || async {
        let (status, body) = world.relay.get("/readyz").await.map_err(|one| one.to_string())?;
        let told = status == 503 && words.iter().all(|word| body.contains(word));
        told.then_some(()).ok_or_else(|| format!("{status} {body}\n{}", log_tail(world)))
    })
    .await;
}
