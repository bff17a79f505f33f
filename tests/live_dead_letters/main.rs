//! P1 and P7 with events that can't be published: they go to the dead letters with reason and
//! detail, their neighbours leave once and in order, and what may heal is waited for.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

mod redrive;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use futures_util::StreamExt;
use outboxd::sandbox::{STREAM, Workload, World, WorldOptions, stream};
use support::look::{self, metric, publish, sessions, until};
use support::{SEQUENCE, SETTLE, drill, finish_and_judge, log_tail, options, paced, workload};
use tokio_postgres::Client;
use uuid::Uuid;

const PER_RUN: &str = "pipeline = \"per-run\"";

fn with(destination: &str) -> WorldOptions {
    WorldOptions { destination: destination.to_owned(), ..options() }
}

/// A row that no stream takes.
struct Bad {
    kind: String,
    /// JSON text.
    headers: Option<String>,
    /// Bytes of the body beyond the least.
    fill: usize,
    reason: &'static str,
    /// Part of the detail.
    words: &'static str,
}

fn bad(reason: &'static str, words: &'static str) -> Bad {
    Bad { kind: "bad".to_owned(), headers: None, fill: 0, reason, words }
}

/// `limit`: what the server takes in one message.
fn bad_rows(limit: usize) -> Vec<Bad> {
    let kind = |kind: String, reason, words| Bad { kind, ..bad(reason, words) };
    let fill = |fill| Bad { fill, ..bad("too_large", "bytes, headers counted") };
    let headers = |text: &str, words| Bad { headers: Some(text.into()), ..bad("header", words) };
    let long = format!(r#"{{"X": "{}"}}"#, "x".repeat(70_000));
    let mut rows = vec![
        // The body alone would fit.
        fill(limit - 200),
        fill(5 * limit),
        Bad { headers: Some(long), ..bad("too_large", "65535") },
        kind("k".repeat(1_100), "subject", "1024"),
        kind(String::new(), "unmappable", "is empty"),
        kind("a\r\nPUB other 1\r\nx".to_owned(), "header", "control character"),
        kind("a\nb".to_owned(), "header", "control character"),
        headers(r#"{"X": "a\r\nX-Injected: 1"}"#, "control character"),
        headers(r#"{"X": "a\r\n\r\nrest"}"#, "control character"),
        headers(r#"{"X": "a\nb"}"#, "control character"),
        headers(r#"{"X": ["good", "a\rb"]}"#, "control character"),
        headers(r#"{"a b": "x"}"#, "not a token"),
        headers(r#"{"a:b": "x"}"#, "not a token"),
        headers(r#"{"ä": "x"}"#, "not a token"),
        headers(r#"{"": "x"}"#, "not a token"),
        headers(r#"{"X\r\nX-Injected": "x"}"#, "not a token"),
        headers(r#"[1]"#, "a JSON object"),
        headers(r#""text""#, "a JSON object"),
        headers(r#"1"#, "a JSON object"),
        headers(r#"{"a": {"b": 1}}"#, "is not text"),
        headers(r#"{"a": [["b"]]}"#, "is not text"),
        headers(r#"{"Status": "409"}"#, "reserved"),
    ];
    for name in ["Nats-Msg-Id", "nats-rollup", "NATS-Expected-Last-Sequence", "outbox-seq"] {
        rows.push(headers(&format!(r#"{{"{name}": "1"}}"#), "reserved"));
    }
    rows
}

/// One row as an application would insert it.
async fn insert(client: &Client, run: &str, n: i64, row: &Bad) -> Uuid {
    let id = Uuid::new_v4();
    let fill = "x".repeat(row.fill);
    let run_json = serde_json::to_string(run).unwrap();
    let body = format!(r#"{{"id":"{id}","run":{run_json},"n":{n},"fill":"{fill}"}}"#);
    let sql = "INSERT INTO outbox.event (id, run_id, kind, payload, headers) \
               VALUES ($1, $2, $3, $4::text::json, $5::text::jsonb)";
    client.execute(sql, &[&id, &run, &row.kind, &body, &row.headers]).await.unwrap();
    id
}

/// A row whose values look dangerous and are none.
fn odd() -> Bad {
    Bad {
        kind: "a b\t.*.>".to_owned(),
        headers: Some(
            r#"{"X-Text": "ü\t✓ ", "x-n": 1.50, "X-Yes": true, "X-Many": ["1", 2], "X-No": null}"#
                .to_owned(),
        ),
        ..bad("", "")
    }
}

/// Every bad row in the middle of its run, in one transaction with its neighbours and by itself.
async fn write_all(client: &Client, rows: &[Bad]) -> BTreeMap<Uuid, usize> {
    let mut expected = BTreeMap::new();
    let good = Bad { kind: "good".to_owned(), ..bad("", "") };
    for (index, row) in rows.iter().enumerate() {
        let run = format!("bad-{index}");
        client.batch_execute("BEGIN").await.unwrap();
        insert(client, &run, 1, &good).await;
        expected.insert(insert(client, &run, 2, row).await, index);
        insert(client, &run, 3, &odd()).await;
        client.batch_execute("COMMIT").await.unwrap();
        insert(client, &run, 4, &good).await;
        expected.insert(insert(client, &run, 5, row).await, index);
        insert(client, &run, 6, &good).await;
    }
    // All of them in one run, two in a row each time.
    client.batch_execute("BEGIN").await.unwrap();
    for (index, n) in (0..rows.len()).zip((1..).step_by(2)) {
        expected.insert(insert(client, "mixed", n, rows.get(index).unwrap()).await, index);
        if index % 2 == 1 {
            insert(client, "mixed", n + 1, &good).await;
        }
    }
    client.batch_execute("COMMIT").await.unwrap();
    expected
}

/// What is in the dead letters, and what the metrics say, is what was expected.
async fn letters_are(world: &World, rows: &[Bad], expected: &BTreeMap<Uuid, usize>) {
    let client = world.postgres.connect().await.unwrap();
    let sql = "SELECT d.event_id::uuid, d.reason, d.detail, d.commit_lsn IS NOT NULL, \
                      d.payload = convert_to(e.payload::text, 'UTF8') AND d.run_id = e.run_id \
                        AND d.headers IS NOT DISTINCT FROM e.headers::text, \
                      (d.server_code IS NOT NULL) = (d.detail LIKE '%(JetStream error %') \
                 FROM outbox.dead_letter d JOIN outbox.event e ON e.seq = d.seq";
    let letters = client.query(sql, &[]).await.unwrap();
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for letter in &letters {
        let (id, reason, detail): (Uuid, &str, &str) =
            (letter.get(0), letter.get(1), letter.get(2));
        let index = expected.get(&id).unwrap_or_else(|| panic!("buried: {reason}, {detail}"));
        let row = rows.get(*index).unwrap();
        assert_eq!(reason, row.reason, "{detail}");
        assert!(detail.contains(row.words), "{detail:?} without {:?}", row.words);
        assert!(!detail.chars().any(char::is_control), "{detail:?}");
        assert!(letter.get::<_, bool>(3) && letter.get::<_, bool>(4), "{detail}: not the row");
        assert!(letter.get::<_, bool>(5), "{detail}: the server's code");
        *counts.entry(row.reason).or_default() += 1;
    }
    assert_eq!(letters.len(), expected.len(), "letters");
    for (reason, count) in counts {
        let label = format!("reason=\"{reason}\"");
        until("outboxd_dead_letters_total", Duration::from_secs(5), || async {
            let told = metric(world, "outboxd_dead_letters_total", &label).await;
            (told == Some(count as f64)).then_some(()).ok_or(format!("{told:?}, not {count}"))
        })
        .await;
    }
}

/// No message has a header or a subject that nobody stated.
async fn nothing_is_injected(world: &World) {
    let client = world.broker.connect().await.unwrap();
    let jetstream = async_nats::jetstream::new(client.clone());
    let count = stream::state(&client, STREAM).await.unwrap().messages;
    let config = pull::OrderedConfig { deliver_policy: DeliverPolicy::All, ..Default::default() };
    let consumer = jetstream.get_stream(STREAM).await.unwrap().create_consumer(config).await;
    let mut messages = consumer.unwrap().messages().await.unwrap();
    let ours = ["Nats-Msg-Id", "Nats-Expected-Stream", "Nats-Expected-Last-", "Outbox-"];
    let theirs = ["X-Text", "x-n", "X-Yes", "X-Many"];
    for _ in 0..count {
        let message = messages.next().await.unwrap().unwrap();
        let headers = message.headers.as_ref().unwrap();
        for (name, _) in headers.iter() {
            let name: &str = name.as_ref();
            let known = ours.iter().any(|ours| name.starts_with(ours)) || theirs.contains(&name);
            assert!(known, "{name} in {message:?}");
        }
        if headers.get("X-Text").is_some() {
            assert_eq!(message.subject.as_str(), "events.a%20b%09.%2A.%3E");
            assert_eq!(headers.get("X-Text").unwrap().as_str().trim_end(), "ü\t✓");
            assert_eq!(headers.get("x-n").unwrap().as_str(), "1.50");
            assert_eq!(headers.get_all("X-Many").count(), 2);
        }
    }
    // Nor does a log line begin with a row's words, or a metric's.
    for line in world.relay.log().lines() {
        assert!(line.starts_with("20"), "{line}");
    }
    let (_, metrics) = world.relay.get("/metrics").await.unwrap();
    let known =
        |line: &str| line.is_empty() || line.starts_with("outboxd_") || line.starts_with('#');
    assert!(metrics.lines().all(known), "{metrics}");
}

/// Limits of server and stream; `limit` is the smaller.
async fn bad_rows_stop_nothing(destination: &str, max_msg_size: Option<usize>) {
    let mut world = World::start(with(destination)).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let broker = world.broker.connect().await.unwrap();
    if let Some(size) = max_msg_size {
        // The relay is connected already, and knows another limit.
        look::edit_stream(&broker, STREAM, |config| config["max_msg_size"] = size.into()).await;
    }
    let rows = bad_rows(max_msg_size.unwrap_or(1 << 20));
    let before = sessions(&client).await;
    let sampling = world.sample().await.unwrap();
    let events = workload().events.min(5_000);
    let load = world.load(Workload { events, rate: Some(events / 3), ..workload() });
    let mut expected = write_all(&client, &rows).await;
    // A run whose name can't be told has no good neighbours.
    let nameless = Bad { kind: "good".to_owned(), ..bad("header", "control character") };
    expected.insert(insert(&client, "run\r\nX-Injected: 1", 1, &nameless).await, rows.len());
    let rows: Vec<Bad> = rows.into_iter().chain([nameless]).collect();
    finish_and_judge(&world, load, sampling).await;
    letters_are(&world, &rows, &expected).await;
    nothing_is_injected(&world).await;
    assert_eq!(sessions(&client).await, before, "{}", log_tail(&world));
    let log = world.relay.log();
    assert_eq!(log.matches("destination is up").count(), 1, "{}", log_tail(&world));
    let server_log = world.nats().unwrap().log();
    assert!(
        !server_log.contains("Maximum Payload") && !server_log.contains("arser"),
        "{server_log}"
    );
}

#[tokio::test]
async fn bad_rows_stop_nothing_in_batches() {
    bad_rows_stop_nothing("", None).await;
}

#[tokio::test]
async fn bad_rows_stop_nothing_per_run() {
    bad_rows_stop_nothing(PER_RUN, None).await;
}

#[tokio::test]
async fn bad_rows_stop_nothing_in_sequence() {
    bad_rows_stop_nothing(SEQUENCE, None).await;
}

/// What the core takes for small enough is refused by the stream (10054): as final as the core's.
#[tokio::test]
async fn a_streams_limit_lowered_while_connected_in_batches() {
    bad_rows_stop_nothing("", Some(64 << 10)).await;
}

#[tokio::test]
async fn a_streams_limit_lowered_while_connected_per_run() {
    bad_rows_stop_nothing(PER_RUN, Some(64 << 10)).await;
}

#[tokio::test]
async fn a_streams_limit_lowered_while_connected_in_sequence() {
    bad_rows_stop_nothing(SEQUENCE, Some(64 << 10)).await;
}

/// A server that takes less than it said, with rows above, below and around in flight.
async fn a_servers_limit_lowered(destination: &str) {
    let mut world = World::start(with(destination)).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let sampling = world.sample().await.unwrap();
    let limit = 64 << 10;
    let load = world.load(paced());
    world.nats().unwrap().reconfigure(&format!("max_payload: {limit}")).unwrap();
    until("the lower limit", Duration::from_secs(5), || async {
        let told = world.broker.connect().await.unwrap().server_info().max_payload;
        (told == limit).then_some(()).ok_or_else(|| told.to_string())
    })
    .await;
    let fill = |fill| Bad { fill, ..bad("too_large", "headers counted") };
    let rows = [fill(limit - 200), fill(limit + 5_000), fill(500_000)];
    let expected = write_all(&client, &rows).await;
    finish_and_judge(&world, load, sampling).await;
    letters_are(&world, &rows, &expected).await;
    println!("{} connections", world.relay.log().matches("destination is up").count());
}

#[tokio::test]
async fn a_servers_limit_lowered_while_connected_in_batches() {
    a_servers_limit_lowered("").await;
}

#[tokio::test]
async fn a_servers_limit_lowered_while_connected_per_run() {
    a_servers_limit_lowered(PER_RUN).await;
}

/// Between burial and receipt, and between receipt and confirmation, a crash changes nothing.
#[tokio::test]
async fn letters_are_written_once_when_the_relay_is_killed() {
    let mut world = World::prepare(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let rows = bad_rows(1 << 20);
    let expected = write_all(&client, &rows).await;
    let sampling = world.sample().await.unwrap();
    let load = world.load(paced());
    for kill in 1..=5 {
        world.relay.start().unwrap();
        until("some letters", SETTLE, || async {
            let buried = world.buried().await.unwrap().len();
            (buried >= kill * 10).then_some(()).ok_or_else(|| buried.to_string())
        })
        .await;
        world.relay.kill9().unwrap();
    }
    world.start_relay().await.unwrap();
    finish_and_judge(&world, load, sampling).await;
    let buried = world.buried().await.unwrap();
    assert!(buried.iter().eq(buried.iter().filter(|id| expected.contains_key(id))));
    assert_eq!(buried.len(), expected.len());
}

/// Processor time of a process so far.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).unwrap().parse::<u64>().unwrap();
    // A hundred ticks a second on every Linux that we run on.
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

/// How long a fault that may heal is held.
fn fault_time() -> Duration {
    Duration::from_secs(if drill() { 30 } else { 6 })
}

async fn a_full_stream_is_waited_for(destination: &str) {
    let world = World::start(with(destination)).await.unwrap();
    let broker = world.broker.connect().await.unwrap();
    let limit = |limit: i64| {
        look::edit_stream(&broker, STREAM, move |config| {
            config["discard"] = "new".into();
            config["max_msgs"] = limit.into();
        })
    };
    limit(500).await;
    let sampling = world.sample().await.unwrap();
    let mut load = world.load(Workload { events: 5_000, ..workload() });
    load.finish().await.unwrap();
    until("a full stream", SETTLE, || async {
        let state = stream::state(&broker, STREAM).await.unwrap();
        (state.messages == 500).then_some(()).ok_or(format!("{state:?}"))
    })
    .await;
    // The first tries follow quickly.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let spent = processor_time(world.relay.pid());
    let sent = metric(&world, "outboxd_events_total", "stage=\"sent\"").await.unwrap();
    tokio::time::sleep(fault_time()).await;
    let spent = processor_time(world.relay.pid()) - spent;
    let sent = metric(&world, "outboxd_events_total", "stage=\"sent\"").await.unwrap() - sent;
    println!("waiting for {:?}: {spent:?} of a processor, {sent} sent", fault_time());
    assert!(spent < fault_time() / 5, "busy: {spent:?} in {:?}", fault_time());
    assert_eq!(world.buried().await.unwrap().len(), 0, "{}", log_tail(&world));
    limit(-1).await;
    let healed = Instant::now();
    finish_and_judge(&world, load, sampling).await;
    println!("all stored {:?} after the stream had room again", healed.elapsed());
    assert!(healed.elapsed() < Duration::from_secs(45));
    assert_eq!(world.buried().await.unwrap().len(), 0);
}

#[tokio::test]
async fn a_full_stream_is_waited_for_in_batches() {
    a_full_stream_is_waited_for("").await;
}

#[tokio::test]
async fn a_full_stream_is_waited_for_per_run() {
    a_full_stream_is_waited_for(PER_RUN).await;
}

#[tokio::test]
async fn a_full_stream_is_waited_for_in_sequence() {
    a_full_stream_is_waited_for(SEQUENCE).await;
}

/// One subject takes nothing more: the runs that need it wait, each in order, and no other.
async fn a_full_subject_stops_only_its_runs(destination: &str) {
    let world = World::start(with(destination)).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let broker = world.broker.connect().await.unwrap();
    publish(&client, "k1", "hot", 1).await;
    world.settle(SETTLE).await.unwrap();
    let limit = |limit: i64| {
        look::edit_stream(&broker, STREAM, move |config| {
            config["discard"] = "new".into();
            config["max_msgs_per_subject"] = limit.into();
            config["discard_new_per_subject"] = (limit > 0).into();
        })
    };
    limit(1).await;
    // In one transaction: k1's first is refused, so its second has to wait.
    client.batch_execute("BEGIN").await.unwrap();
    publish(&client, "k1", "hot", 2).await;
    publish(&client, "k1", "other.k1", 3).await;
    publish(&client, "k2", "other.0", 1).await;
    client.batch_execute("COMMIT").await.unwrap();
    let start = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut n = 1;
    // Rarely enough for the back-off to grow in between.
    while start.elapsed() < fault_time() {
        tokio::time::sleep(fault_time() / 4).await;
        n += 1;
        publish(&client, "k2", &format!("other.{n}"), n).await;
        let committed = Instant::now();
        until("an event of another run", Duration::from_secs(40), || async {
            let messages = stream::state(&broker, STREAM).await.unwrap().messages;
            (i64::try_from(messages).unwrap() == n + 1).then_some(()).ok_or(format!("{messages}"))
        })
        .await;
        slowest = slowest.max(committed.elapsed());
    }
    println!("slowest event of the other run: {slowest:?}");
    assert!(slowest < Duration::from_secs(2), "{slowest:?}\n{}", log_tail(&world));
    let messages = world.messages().await.unwrap();
    let of_k1 = messages.iter().filter(|seen| seen.event.as_ref().unwrap().run == "k1").count();
    assert_eq!(of_k1, 1, "k1 went on without its refused event");
    assert_eq!(world.buried().await.unwrap().len(), 0);
    limit(-1).await;
    world.settle(SETTLE).await.unwrap();
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}");
}

#[tokio::test]
async fn a_full_subject_stops_only_its_runs_in_batches() {
    a_full_subject_stops_only_its_runs("").await;
}

#[tokio::test]
async fn a_full_subject_stops_only_its_runs_per_run() {
    a_full_subject_stops_only_its_runs(PER_RUN).await;
}

#[tokio::test]
async fn a_full_subject_stops_only_its_runs_in_sequence() {
    a_full_subject_stops_only_its_runs(SEQUENCE).await;
}
