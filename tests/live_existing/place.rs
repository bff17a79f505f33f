//! A database with a table of the application's own, a relay of it under a role with the printed
//! grants alone, and a writer that knows what it committed.

use std::collections::HashMap;

use outboxd::sandbox::verdict::{Event, Verdict};
use outboxd::sandbox::{Broker, Nats, Postgres, World, WorldOptions, stream};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::look::{self, until};
use crate::support::{SETTLE, log_tail, options};

/// What differs between tables.
pub struct Shape {
    /// SQL before the table is made.
    pub before: &'static str,
    /// Type and origin of the number column.
    pub number: &'static str,
    /// Type of the payload column.
    pub payload: &'static str,
    /// How `$4`, a JSON text, becomes such a payload.
    pub body: &'static str,
}

/// The most usual one.
pub const JSON: Shape =
    Shape { before: "", number: "bigserial PRIMARY KEY", payload: "json", body: "$4::text::json" };

/// See the module.
pub struct Place {
    pub world: World,
    body: &'static str,
    committed: Vec<Event>,
    last: HashMap<String, i64>,
}

/// Columns under other names, in another order.
const SOURCE: &str = "\
table = \"app.Outbox\"
[source.columns]
seq = \"No\"
id = \"event_id\"
run = \"aggregate\"
kind = \"event type\"
payload = \"body\"
tenant = \"customer\"
version = false
headers = \"extra\"
created_at = \"at\"
";

impl Place {
    pub async fn new(shape: Shape) -> Place {
        let relay =
            "receipt_interval = \"3s\"\nmax_retained_wal = \"16MiB\"\nsweep_interval = \"1s\"";
        Place::with(shape, relay, "").await
    }

    /// `relay`: lines of its section; `source`: further ones of `[source]`.
    pub async fn with(shape: Shape, relay: &str, source: &str) -> Place {
        Place::with_more(shape, relay, source, "").await
    }

    /// `more`: whole tables of the configuration.
    pub async fn with_more(shape: Shape, relay: &str, source: &str, more: &str) -> Place {
        let postgres = Postgres::start().await.unwrap();
        let client = postgres.connect().await.unwrap();
        let Shape { before, number, payload, body } = shape;
        let ddl = format!(
            "CREATE ROLE relay LOGIN REPLICATION; CREATE SCHEMA app; {before} \
             CREATE TABLE app.\"Outbox\" (body {payload}, \"event type\" varchar(40) NOT NULL, \
                 noise int DEFAULT 7, aggregate text NOT NULL, extra json, customer text, \
                 published_at timestamptz, at timestamp DEFAULT now(), \"No\" {number}, \
                 event_id uuid NOT NULL UNIQUE)"
        );
        client.batch_execute(&ddl).await.unwrap();
        let broker = Broker::Single(Box::new(Nats::start().await.unwrap()));
        let options = WorldOptions {
            relay: relay.to_owned(),
            source: format!("{source}\n{SOURCE}"),
            more: more.to_owned(),
            create: "duplicate_window = \"100ms\"".into(),
            ..options()
        };
        let as_relay = postgres.url_of("relay", "postgres");
        let admin = postgres.unix_url();
        let world = World::assemble(options, postgres, broker).await.unwrap();
        world.relay.run(&["init", "--role", "relay"]).await.unwrap();
        let place = Place { world, body, committed: Vec::new(), last: HashMap::new() };
        place.configure(&admin, &as_relay);
        place
    }

    /// Changes the relay's configuration file.
    pub fn configure(&self, from: &str, to: &str) {
        let file = self.world.relay.configuration();
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{from} is not in {text}");
        std::fs::write(&file, text.replace(from, to)).unwrap();
    }

    pub async fn client(&self) -> Client {
        self.world.postgres.connect().await.unwrap()
    }

    /// So many events of each run, one transaction after the other.
    pub async fn write(&mut self, runs: &[&str], count: usize) {
        let client = self.client().await;
        let sql = format!(
            "INSERT INTO app.\"Outbox\" (event_id, aggregate, \"event type\", body, extra, customer) \
             VALUES ($1, $2, $3, {}, '{{\"x\": \"1\"}}', 'acme')",
            self.body
        );
        for _ in 0..count {
            for run in runs {
                let n = self.last.entry((*run).to_owned()).or_default();
                *n += 1;
                let event = Event { id: Uuid::new_v4(), run: (*run).to_owned(), n: *n };
                let body = format!(r#"{{"id":"{}","run":"{run}","n":{n}}}"#, event.id);
                client.execute(&sql, &[&event.id, run, &"k", &body]).await.unwrap();
                self.committed.push(event);
            }
        }
    }

    /// Waits for so many messages.
    pub async fn in_stream(&self, count: usize) {
        until("messages", SETTLE, || async {
            let client = self.world.broker.connect().await.map_err(|error| error.to_string())?;
            let state =
                stream::state(&client, "EVENTS").await.map_err(|error| error.to_string())?;
            let there = usize::try_from(state.messages).unwrap();
            let words = || format!("{there} of {count}\n{}", log_tail(&self.world));
            (there >= count).then_some(()).ok_or_else(words)
        })
        .await;
    }

    pub async fn all_in_stream(&self) {
        self.in_stream(self.committed.len()).await;
    }

    /// Everything is in the stream, and the position is past it.
    pub async fn settle(&self) {
        self.all_in_stream().await;
        let client = self.client().await;
        let end = look::wal_end(&client).await;
        until("the position", SETTLE, || async {
            let confirmed = look::confirmed(&client).await;
            let words = || format!("{confirmed} of {end}\n{}", log_tail(&self.world));
            (confirmed >= end).then_some(()).ok_or_else(words)
        })
        .await;
        self.judge().await;
    }

    /// Every event is there once, and in order.
    pub async fn judge(&self) {
        let seen = self.world.messages().await.unwrap();
        let verdict = Verdict::of(&self.committed, &Default::default(), &seen, &[]);
        assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&self.world));
    }
}
