//! Looks at an installation from outside: sessions of the relay, its metrics, WAL written beside
//! the outbox, the configuration of a stream.

use std::time::{Duration, Instant};

use outboxd::lsn::Lsn;
use outboxd::sandbox::World;
use serde_json::Value;
use tokio_postgres::Client;

/// A session of the relay at the server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session {
    /// `walsender` or `client backend`.
    pub kind: String,
    /// Its process.
    pub pid: i32,
    /// When it began; process ids are used again.
    pub since: String,
}

/// The relay's sessions, the walsender last.
pub async fn sessions(client: &Client) -> Vec<Session> {
    let sql = "SELECT backend_type, pid, backend_start::text FROM pg_stat_activity \
                WHERE application_name = 'outboxd' ORDER BY 1, 2";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter()
        .map(|row| Session { kind: row.get(0), pid: row.get(1), since: row.get(2) })
        .collect()
}

/// Asks until the answer is yes; panics with the last words when the time is over.
pub async fn until<F>(what: &str, deadline: Duration, mut ask: impl FnMut() -> F) -> Duration
where
    F: Future<Output = Result<(), String>>,
{
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(()) => return start.elapsed(),
            Err(words) if start.elapsed() > deadline => {
                panic!("{what}: not within {deadline:?}: {words}")
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// The sum of a metric's samples whose labels contain `label`; `None` when there is none.
pub async fn metric(world: &World, name: &str, label: &str) -> Option<f64> {
    let (_, text) = world.relay.get("/metrics").await.ok()?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let samples = lines.filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let (series_name, labels) = series.split_once('{').unwrap_or((series, ""));
        (series_name == name && labels.contains(label)).then(|| value.parse::<f64>().ok())?
    });
    samples.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

/// Waits until every run is back on the fast path.
pub async fn no_slow_run(world: &World) {
    until("no slow run", super::SETTLE, || async {
        let slow = metric(world, "outboxd_slow_runs", "").await.unwrap_or(-1.0);
        (slow == 0.0).then_some(()).ok_or_else(|| format!("{slow}\n{}", super::log_tail(world)))
    })
    .await;
}

/// Where the server writes next.
pub async fn wal_end(client: &Client) -> Lsn {
    lsn(client, "SELECT pg_current_wal_insert_lsn()::text").await
}

/// The answer of a statement that selects one LSN as text.
pub async fn lsn(client: &Client, sql: &str) -> Lsn {
    client.query_one(sql, &[]).await.unwrap().get::<_, &str>(0).parse().unwrap()
}

/// The slot's confirmed position.
pub async fn confirmed(client: &Client) -> Lsn {
    lsn(client, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots").await
}

/// Writes about `megabytes` of WAL into a table that nobody publishes, evenly over `time`.
pub async fn noise(client: &Client, megabytes: u64, time: Duration) {
    client.batch_execute("CREATE TABLE IF NOT EXISTS noise (text text)").await.unwrap();
    let start = Instant::now();
    for written in 0..megabytes {
        let due = time * u32::try_from(written).unwrap() / u32::try_from(megabytes).unwrap();
        tokio::time::sleep_until((start + due).into()).await;
        // A row is about 1 kB of WAL.
        let sql = "INSERT INTO noise SELECT repeat('x', 1000) FROM generate_series(1, 1000)";
        client.batch_execute(sql).await.unwrap();
    }
}

/// Writes one event with a body that the verdict can judge.
pub async fn publish(client: &Client, run: &str, kind: &str, n: i64) -> uuid::Uuid {
    let id = uuid::Uuid::new_v4();
    let body = format!(r#"{{"id":"{id}","run":"{run}","n":{n}}}"#);
    let sql =
        "SELECT outbox.publish(run_id => $1, kind => $2, payload => $3::text::json, id => $4)";
    client.query_one(sql, &[&run, &kind, &body, &id]).await.unwrap();
    id
}

/// Changes a stream's configuration as its owner would. The client library leaves out fields that
/// it does not know, so the JSON is changed itself.
pub async fn edit_stream(client: &async_nats::Client, stream: &str, edit: impl FnOnce(&mut Value)) {
    let mut info = ask(client, format!("$JS.API.STREAM.INFO.{stream}"), "").await;
    let mut config = info.get_mut("config").unwrap().take();
    edit(&mut config);
    let answer = ask(client, format!("$JS.API.STREAM.UPDATE.{stream}"), &config.to_string()).await;
    assert!(answer.get("error").is_none(), "{answer}");
}

async fn ask(client: &async_nats::Client, subject: String, body: &str) -> Value {
    let answer = client.request(subject, body.to_owned().into()).await.unwrap();
    serde_json::from_slice(&answer.payload).unwrap()
}
