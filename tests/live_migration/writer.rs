//! Writers that never pause: each commits the events of its runs one after the other, so that the order
//! of a run is known.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use outboxd::sandbox::Postgres;
use outboxd::sandbox::verdict::Event;
use tokio::task::JoinHandle;
use tokio_postgres::Client;
use uuid::Uuid;

/// See the module.
#[derive(Default)]
pub struct Writers {
    committed: Arc<Mutex<Vec<Event>>>,
    stop: Arc<AtomicBool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// Between two transactions of a writer.
const PAUSE: Duration = Duration::from_millis(15);

impl Writers {
    /// Starts writers, each with three runs of its own. Every fifth transaction has several rows, every
    /// seventh is rolled back.
    pub async fn start(&self, postgres: &Postgres, count: usize) {
        for writer in 0..count {
            let client = postgres.connect().await.unwrap();
            let (committed, stop) = (Arc::clone(&self.committed), Arc::clone(&self.stop));
            let task = tokio::spawn(async move {
                let mut next = [1_i64; 3];
                for turn in 0_usize.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let rolls_back = turn % 7 == 3;
                    let rows = if turn % 5 == 0 { 4 } else { 1 };
                    let mut written = Vec::new();
                    let mut numbers = next;
                    client.batch_execute("BEGIN").await.unwrap();
                    for row in 0..rows {
                        let number = numbers.get_mut((turn + row) % 3).unwrap();
                        let run = format!("run-{writer}-{}", (turn + row) % 3);
                        written.push(row_of(&client, &run, *number).await);
                        *number += 1;
                    }
                    if rolls_back {
                        client.batch_execute("ROLLBACK").await.unwrap();
                    } else {
                        client.batch_execute("COMMIT").await.unwrap();
                        next = numbers;
                        committed.lock().unwrap().extend(written);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            });
            self.tasks.lock().unwrap().push(task);
        }
    }

    /// Ends them behind their transactions.
    pub async fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap());
        for task in tasks {
            task.await.unwrap();
        }
    }

    /// What was committed.
    pub fn committed(&self) -> Vec<Event> {
        self.committed.lock().unwrap().clone()
    }

    /// Events 1 to `count` of a run, in a transaction that stays open.
    pub async fn begin(&self, postgres: &Postgres, run: &str, count: i64) -> Open {
        let client = postgres.connect().await.unwrap();
        client.batch_execute("BEGIN").await.unwrap();
        let mut events = Vec::new();
        for n in 1..=count {
            events.push(row_of(&client, run, n).await);
        }
        Open { client, events, committed: Arc::clone(&self.committed) }
    }
}

/// A transaction under way.
pub struct Open {
    client: Client,
    events: Vec<Event>,
    committed: Arc<Mutex<Vec<Event>>>,
}

impl Open {
    pub async fn commit(self) {
        self.client.batch_execute("COMMIT").await.unwrap();
        self.committed.lock().unwrap().extend(self.events);
    }
}

/// One event in a transaction of its own.
pub async fn insert(client: &Client, writers: &Writers, run: &str, n: i64) {
    let event = row_of(client, run, n).await;
    writers.committed.lock().unwrap().push(event);
}

async fn row_of(client: &Client, run: &str, n: i64) -> Event {
    let event = Event { id: Uuid::new_v4(), run: run.to_owned(), n };
    let body = format!(r#"{{"id":"{}","run":"{run}","n":{n}}}"#, event.id);
    let sql = "INSERT INTO public.outbox (event_id, aggregate_id, event_type, payload) \
               VALUES ($1, $2, 'changed', $3::text::jsonb)";
    client.execute(sql, &[&event.id, &run, &body]).await.unwrap();
    event
}
