//! The cut-over of docs/migrate-from-polling.md, with a polling relay as such are written, writers that
//! never pause, and a way back.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod poller;
#[path = "../support/mod.rs"]
mod support;
mod writer;

use std::sync::Arc;
use std::time::Duration;

use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{Broker, Nats, Postgres, World, WorldOptions, stream};
use tokio_postgres::Client;

use poller::Poller;
use support::look::{no_slow_run, until};
use support::{SETTLE, log_tail, options};
use writer::{Writers, insert};

/// As an application has it that polls.
const TABLE: &str = "\
CREATE TABLE public.outbox (
    id           bigserial   PRIMARY KEY,
    event_id     uuid        NOT NULL DEFAULT gen_random_uuid(),
    aggregate_id text        NOT NULL,
    event_type   text        NOT NULL,
    payload      jsonb       NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    published_at timestamptz
);
CREATE INDEX outbox_open ON public.outbox (id) WHERE published_at IS NULL;
CREATE ROLE relay LOGIN REPLICATION;";

const SOURCE: &str = "\
table = \"public.outbox\"
mark = \"column\"
[source.columns]
seq = \"id\"
id = \"event_id\"
run = \"aggregate_id\"
kind = \"event_type\"
tenant = false
version = false
headers = false";

struct Place {
    world: World,
    client: Client,
    writers: Writers,
}

impl Place {
    /// Steps 1 and 2: `init` beside the poller that works.
    async fn start(before: &[(&str, i64)]) -> (Place, Poller) {
        let postgres = Postgres::start().await.unwrap();
        let client = postgres.connect().await.unwrap();
        client.batch_execute(TABLE).await.unwrap();
        let nats = Nats::start().await.unwrap();
        let poller_nats = nats.connect().await.unwrap();
        let create = async_nats::jetstream::stream::Config {
            name: "EVENTS".into(),
            subjects: vec!["events.>".into()],
            duplicate_window: Duration::from_millis(100),
            ..Default::default()
        };
        async_nats::jetstream::new(poller_nats.clone()).create_stream(create).await.unwrap();
        let writers = Writers::default();
        for (run, n) in before {
            insert(&client, &writers, run, *n).await;
        }
        let poller = Poller::start(postgres.connect().await.unwrap(), poller_nats);
        writers.start(&postgres, 8).await;
        let (url, admin) = (postgres.url_of("relay", "postgres"), postgres.unix_url());
        let broker = Broker::Single(Box::new(nats));
        let relay = "sweep_interval = \"1s\"".into();
        let options = WorldOptions { relay, source: SOURCE.into(), ..options() };
        let world = World::assemble(options, postgres, broker).await.unwrap();
        world.relay.run(&["init", "--role", "relay"]).await.unwrap();
        let file = world.relay.configuration();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace(&admin, &url)).unwrap();
        (Place { world, client, writers }, poller)
    }

    async fn count(&self, what: &str) -> i64 {
        let client = self.world.postgres.connect().await.unwrap();
        let sql = format!("SELECT count(*) FROM public.outbox WHERE {what}");
        client.query_one(&sql, &[]).await.unwrap().get(0)
    }

    /// More rows are committed than there are now.
    async fn grows(&self, by: i64) {
        let before = self.count("true").await;
        until("more rows", SETTLE, || async {
            let now = self.count("true").await;
            (now >= before + by).then_some(()).ok_or_else(|| format!("{now}"))
        })
        .await;
    }

    async fn adopt(&self) -> String {
        self.world.relay.run(&["adopt"]).await.unwrap()
    }

    /// Everything that committed is in the stream, and marked.
    async fn arrives(&self) {
        until("all events", SETTLE, || async {
            let client = self.world.broker.connect().await.map_err(|error| error.to_string())?;
            let state =
                stream::state(&client, "EVENTS").await.map_err(|error| error.to_string())?;
            let (all, open) = (self.count("true").await, self.count("published_at IS NULL").await);
            let words = || {
                format!("{} of {all}, {open} unmarked\n{}", state.messages, log_tail(&self.world))
            };
            let there = i64::try_from(state.messages).unwrap();
            (there >= all && open == 0).then_some(()).ok_or_else(words)
        })
        .await;
    }

    /// Every event once, in the order of its run.
    async fn judge(&self) {
        let seen = self.world.messages().await.unwrap();
        let committed = self.writers.committed();
        let verdict = Verdict::of(&committed, &Default::default(), &seen, &[]);
        println!("{verdict}");
        assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&self.world));
        assert_eq!(i64::try_from(committed.len()).unwrap(), self.count("true").await);
    }
}

/// There, back, and there again; writers go on all the time, and one of them holds a transaction open
/// over each of the cuts.
#[tokio::test]
async fn there_and_back_again() {
    let (place, poller) = Place::start(&[("stuck", 1), ("free", 1)]).await;
    place.grows(200).await;
    let early = place.writers.begin(&place.world.postgres, "early", 2).await;
    let refused = place.world.relay.output(&["adopt", "--dry-run"]);
    let lock = "BEGIN; SELECT FROM public.outbox WHERE id = 1 FOR UPDATE";
    place.client.batch_execute(lock).await.unwrap();
    let published = poller.stop().await;
    assert!(published > 100, "{published}");
    // Nobody publishes for a while: a backlog in the WAL, behind one that no WAL has.
    place.grows(100).await;
    insert(&place.world.postgres.connect().await.unwrap(), &place.writers, "stuck", 2).await;
    // It waits for who writes, and refuses while rows are locked.
    early.commit().await;
    let refused = refused.await.unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let words = String::from_utf8(refused.stdout).unwrap();
    assert!(words.contains("has rows of public.outbox locked"), "{words}");
    place.client.batch_execute("COMMIT").await.unwrap();

    let late = place.writers.begin(&place.world.postgres, "late", 2).await;
    let adopt = place.adopt();
    let committing = async {
        place.grows(50).await;
        late.commit().await;
    };
    let (said, ()) = tokio::join!(adopt, committing);
    assert!(said.contains("rows to send, seq 1 to"), "{said}");
    let mut place = place;
    place.world.start_relay().await.unwrap();
    place.grows(200).await;

    // Back: an orderly stop leaves nothing unmarked that was sent.
    place.world.relay.terminate(SETTLE).await.unwrap();
    let client = place.world.postgres.connect().await.unwrap();
    let poller = Poller::start(client, place.world.broker.connect().await.unwrap());
    place.grows(200).await;
    assert!(poller.stop().await > 100);

    // And there again.
    place.grows(50).await;
    place.adopt().await;
    place.world.start_relay().await.unwrap();
    place.grows(100).await;
    place.writers.stop().await;
    place.arrives().await;
    place.judge().await;
    no_slow_run(&place.world).await;
}

/// The slot was dropped on the way back, so as not to pin WAL: the next time what lies between is
/// taken from the table.
#[tokio::test]
async fn back_without_the_slot() {
    let (mut place, poller) = Place::start(&[]).await;
    place.grows(100).await;
    poller.stop().await;
    place.adopt().await;
    place.world.start_relay().await.unwrap();
    place.grows(100).await;
    place.world.relay.terminate(SETTLE).await.unwrap();
    let client = place.world.postgres.connect().await.unwrap();
    let nats = place.world.broker.connect().await.unwrap();
    client.batch_execute("SELECT pg_drop_replication_slot('outboxd_world')").await.unwrap();
    let poller = Poller::start(place.world.postgres.connect().await.unwrap(), nats);
    place.grows(200).await;
    assert!(poller.stop().await > 100);
    place.grows(50).await;
    let admin = Arc::new(place.world.postgres.unix_url());
    let set = format!("source.url={admin}");
    place.world.relay.run(&["--set", &set, "init"]).await.unwrap();
    place.grows(50).await;
    place.adopt().await;
    place.world.start_relay().await.unwrap();
    place.grows(100).await;
    place.writers.stop().await;
    place.arrives().await;
    place.judge().await;
}
