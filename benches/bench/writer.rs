//! Applications that commit events at a rate, and note when each COMMIT returned to them.

use std::time::{Duration, Instant};

use outboxd::sandbox::Dice;
use outboxd::sandbox::verdict::Event;
use tokio_postgres::NoTls;

use crate::{Result, clock};

/// What is written, and how fast.
#[derive(Debug, Clone)]
pub struct Load {
    /// Of the database.
    pub url: String,
    /// `outbox.event` or a table that is like it.
    pub table: &'static str,
    /// Events per second, all sessions together.
    pub rate: f64,
    /// Events of a transaction.
    pub rows: u64,
    pub sessions: u64,
    pub seconds: u64,
    pub payload_bytes: usize,
}

/// An event, and when the session that committed it knew that.
pub struct Written {
    pub event: Event,
    pub returned: i64,
}

impl Load {
    /// About as many sessions as keep the rate when a commit takes a few milliseconds.
    pub fn at(url: String, table: &'static str, rate: f64, seconds: u64) -> Load {
        let rows = match rate {
            rate if rate <= 1_000.0 => 1,
            rate if rate <= 10_000.0 => 10,
            _ => 100,
        };
        let sessions = if rate <= 100.0 { 1 } else { 4 };
        Load { url, table, rate, rows, sessions, seconds, payload_bytes: crate::drain::PAYLOAD }
    }

    /// Writes all of it; the events of each session in the order of its commits.
    pub async fn write(&self) -> Result<Vec<Written>> {
        let mut sessions = tokio::task::JoinSet::new();
        for index in 0..self.sessions {
            let load = self.clone();
            // A thread of its own: nothing else of the bench may delay its look at the clock.
            sessions.spawn_blocking(move || load.session(index));
        }
        let mut all = Vec::new();
        while let Some(written) = sessions.join_next().await {
            all.extend(written??);
        }
        Ok(all)
    }

    fn session(&self, index: u64) -> Result<Vec<Written>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await?;
            // Its error is also what every statement of the client returns.
            tokio::spawn(async { connection.await.is_ok() });
            Ok::<_, tokio_postgres::Error>(client)
        })?;
        let insert = format!(
            "INSERT INTO {} (id, run_id, kind, payload) SELECT i, r, 'order.created', p::json \
               FROM unnest($1::uuid[], $2::text[], $3::text[]) WITH ORDINALITY AS t (i, r, p, o) \
              ORDER BY o",
            self.table
        );
        let insert = runtime.block_on(client.prepare(&insert))?;
        let mut dice = Dice::new(Dice::fresh_seed());
        // Numbers go on where those of an earlier load on this clock ended.
        let mut n = clock::now();
        let mut written = Vec::new();
        let start = Instant::now();
        let mut due = self.gap(&mut dice);
        while due < Duration::from_secs(self.seconds) {
            std::thread::sleep((start + due).saturating_duration_since(Instant::now()));
            let events: Vec<Event> =
                (0..self.rows).map(|_| event(&mut dice, index, &mut n)).collect();
            let ids: Vec<uuid::Uuid> = events.iter().map(|event| event.id).collect();
            let runs: Vec<&str> = events.iter().map(|event| event.run.as_str()).collect();
            let bodies: Vec<String> =
                events.iter().map(|event| body(event, self.payload_bytes)).collect();
            runtime.block_on(client.execute(&insert, &[&ids, &runs, &bodies]))?;
            let returned = clock::now();
            written.extend(events.into_iter().map(|event| Written { event, returned }));
            due += self.gap(&mut dice);
        }
        Ok(written)
    }

    /// Until the next transaction of a session: they come by chance, as those of many users do.
    fn gap(&self, dice: &mut Dice) -> Duration {
        let mean = (self.rows * self.sessions) as f64 / self.rate;
        let chance = (dice.below(1 << 52) + 1) as f64 / (1_u64 << 52) as f64;
        Duration::from_secs_f64(-chance.ln() * mean)
    }
}

/// A run belongs to one session, which gives out its numbers in the order of its commits.
fn event(dice: &mut Dice, session: u64, n: &mut i64) -> Event {
    *n += 1;
    Event { id: uuid::Uuid::new_v4(), run: format!("run-{session}-{}", dice.below(250)), n: *n }
}

/// As the sandbox reads it.
fn body(event: &Event, bytes: usize) -> String {
    let Event { id, run, n } = event;
    let head = format!(r#"{{"id":"{id}","run":"{run}","n":{n},"fill":""#);
    let fill = bytes.saturating_sub(head.len() + r#""}"#.len());
    format!(r#"{head}{}"}}"#, "x".repeat(fill))
}
