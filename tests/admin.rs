//! The admin endpoints tell the truth: verdicts, figures and metrics from the status in memory.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use assert_cmd::Command;
use outboxd::admin::{self, Phase, Source, Status};
use outboxd::config::Config;
use outboxd::error::{Failure, Kind};
use outboxd::event::UnixMicros;
use outboxd::relay::outcome::{DestinationId, Pipeline, Retention, StreamFacts};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const CONFIG: &str = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://me@db/app\"\n\
    [destination.events]\nservers = [\"nats://a\"]\nstream = \"EVENTS\"\n\
    [destination.extra]\nservers = [\"nats://a\"]\nstream = \"EXTRA\"\nrequired = false\n\
    [health]\nmax_lag = \"30s\"\n";

struct Admin {
    status: Arc<Status>,
    address: SocketAddr,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<Result<(), Failure>>,
}

impl Admin {
    async fn start() -> Admin {
        let status = Status::new(&Config::parse("t.toml", CONFIG).unwrap());
        let stop = CancellationToken::new();
        let listener = admin::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(admin::answer(listener, Arc::clone(&status), stop.clone()));
        Admin { status, address, stop, server }
    }

    /// Code and body.
    async fn get(&self, path: &str) -> (u16, String) {
        let asked = async {
            let mut stream = TcpStream::connect(self.address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            (head[9..12].parse().unwrap(), body.to_owned())
        };
        timeout(Duration::from_secs(1), asked).await.expect("endpoints answer within 1 s")
    }

    async fn json(&self, path: &str) -> (u16, Value) {
        let (code, body) = self.get(path).await;
        (code, serde_json::from_str(&body).unwrap())
    }

    async fn codes(&self) -> [u16; 3] {
        let mut codes = [0; 3];
        for (code, path) in codes.iter_mut().zip(["/livez", "/readyz", "/healthz"]) {
            *code = self.get(path).await.0;
        }
        codes
    }
}

fn source(silence_limit: Duration) -> Source {
    Source {
        system_identifier: "7412345678901234567".to_owned(),
        timeline: 1,
        database: "app".to_owned(),
        server_version: 180_006,
        silence_limit,
    }
}

fn facts() -> StreamFacts {
    StreamFacts {
        stream: "EVENTS".to_owned(),
        created: "2026-01-01T00:00:00Z".to_owned(),
        replicas: 1,
        retention: Retention::Limits,
        last_seq: 0,
        first_seq: 1,
        max_message_bytes: 1 << 20,
        max_payload_bytes: 1 << 20,
        duplicate_window: Duration::from_secs(120),
        server_version: "2.15.1".to_owned(),
        pipeline: Pipeline::Batch,
        why: "the stream allows batches".to_owned(),
    }
}

/// A relay that streams, with its required destination up.
async fn streaming() -> Admin {
    let admin = Admin::start().await;
    admin.status.session(source(Duration::from_secs(30)));
    admin.status.clock(UnixMicros(1_000_000_000));
    admin.status.phase(Phase::Streaming);
    admin.status.destination(DestinationId(0)).unwrap().up(&facts());
    admin
}

#[tokio::test]
async fn a_start_is_alive_and_not_ready() {
    let admin = Admin::start().await;
    assert_eq!(admin.codes().await, [200, 503, 503]);
    let (_, ready) = admin.json("/readyz").await;
    assert_eq!(ready["causes"][0], "starting");
    assert_eq!(ready["causes"][1], "destination events is not connected yet");
    admin.status.failed(&Failure::new(Kind::SourceUnreachable, "db:5432: refused"));
    let (_, ready) = admin.json("/readyz").await;
    assert_eq!(ready["causes"][0], "starting: source-unreachable: db:5432: refused");
}

#[tokio::test]
async fn a_streaming_relay_is_ready_without_its_optional_destination() {
    let admin = streaming().await;
    assert_eq!(admin.codes().await, [200, 200, 200]);
    let (_, status) = admin.json("/api/status").await;
    assert_eq!((&status["phase"], &status["lag_seconds"]), (&"streaming".into(), &0.0.into()));
    assert_eq!(status["destinations"][0]["stream"]["pipeline"], "batch");
    assert_eq!(status["source"]["slot_active"], true);
}

#[tokio::test]
async fn a_standby_is_ready_and_has_no_lag() {
    let admin = Admin::start().await;
    admin.status.phase(Phase::Standby);
    assert_eq!(admin.codes().await, [200, 200, 200]);
    let (_, ready) = admin.json("/readyz").await;
    assert_eq!((&ready["ok"], &ready["phase"]), (&true.into(), &"standby".into()));
    let (_, status) = admin.json("/api/status").await;
    assert_eq!(status["lag_seconds"], Value::Null);
    assert!(admin.get("/metrics").await.1.contains("outboxd_oldest_unsettled_seconds NaN"));
}

#[tokio::test]
async fn a_required_destination_that_is_down_is_red_and_heals() {
    let admin = streaming().await;
    let id = DestinationId(0);
    admin.status.destination_down(id, &Failure::new(Kind::BrokerUnreachable, "a:4222: refused"));
    assert_eq!(admin.codes().await, [200, 503, 503]);
    let (_, ready) = admin.json("/readyz").await;
    let cause = "destination events is down: broker-unreachable: a:4222: refused";
    assert_eq!(ready["causes"][0], cause);
    admin.status.destination(id).unwrap().up(&facts());
    assert_eq!(admin.codes().await, [200, 200, 200]);
}

#[tokio::test]
async fn a_silent_database_is_not_ready_and_its_lag_grows() {
    let admin = streaming().await;
    admin.status.session(source(Duration::from_millis(20)));
    let deadline = Instant::now() + Duration::from_secs(5);
    while admin.get("/readyz").await.0 == 200 {
        assert!(Instant::now() < deadline, "silence was never noticed");
    }
    let lag = async || admin.json("/api/status").await.1["lag_seconds"].as_f64().unwrap();
    let (first, second) = (lag().await, lag().await);
    assert!(first > 0.02 && second > first, "{first} {second}");
    admin.status.session(source(Duration::from_secs(30)));
    admin.status.heard();
    assert_eq!(admin.codes().await, [200, 200, 200]);
}

#[tokio::test]
async fn lag_grows_while_the_source_is_away() {
    let admin = streaming().await;
    admin.status.phase(Phase::Waiting);
    admin.status.failed(&Failure::new(Kind::SourceUnreachable, "db:5432: refused"));
    let lag = async || admin.json("/api/status").await.1["lag_seconds"].as_f64().unwrap();
    let (first, second) = (lag().await, lag().await);
    assert!(first > 0.0 && second > first, "{first} {second}");
    assert_eq!(admin.codes().await, [200, 503, 200], "healthy while the lag is small");
    admin.status.failed(&Failure::new(Kind::SlotLost, "slot outboxd_orders"));
    assert_eq!(admin.codes().await, [200, 503, 503], "what waits for the operator is red at once");
}

#[tokio::test]
async fn metrics_have_their_names_and_values() {
    let admin = streaming().await;
    admin.status.read(7);
    admin.status.commit_to_ack.record_many(Duration::from_millis(1), 5);
    admin.status.failed(&Failure::new(Kind::SourceShutdown, "57P01"));
    admin.status.retained(4096);
    let (code, text) = admin.get("/metrics").await;
    assert_eq!(code, 200);
    for line in [
        "outboxd_events_total{destination=\"events\",stage=\"read\"} 7",
        "outboxd_events_total{destination=\"extra\",stage=\"recorded\"} 0",
        "outboxd_commit_to_ack_seconds_bucket{le=\"0.0007\"} 0",
        "outboxd_commit_to_ack_seconds_bucket{le=\"0.001\"} 5",
        "outboxd_commit_to_ack_seconds_bucket{le=\"+Inf\"} 5",
        "outboxd_commit_to_ack_seconds_sum 0.005",
        "outboxd_commit_to_ack_seconds_count 5",
        "outboxd_publish_duration_seconds_count{destination=\"events\"} 0",
        "outboxd_oldest_unsettled_seconds 0",
        "outboxd_slot_retained_bytes 4096",
        "outboxd_slot_active 1",
        "outboxd_dead_letters_total{destination=\"events\",reason=\"too_large\"} 0",
        "outboxd_duplicates_total{destination=\"events\"} 0",
        "outboxd_unknown_outcomes_total{destination=\"events\",cause=\"silence\"} 0",
        "outboxd_failures_total{kind=\"source-shutdown\"} 1",
        concat!("outboxd_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        "# TYPE outboxd_commit_to_ack_seconds histogram",
        "# TYPE outboxd_events_total counter",
        "# TYPE outboxd_slot_active gauge",
    ] {
        assert!(text.lines().any(|one| one == line), "{line} is not in:\n{text}");
    }
}

#[tokio::test]
async fn every_metric_is_documented_and_every_documented_one_is_there() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/monitoring.md");
    let (start, end) = ("<!-- metrics: begin -->\n", "<!-- metrics: end -->");
    let page = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(start).unwrap();
    let (written, tail) = rest.split_once(end).unwrap();
    let right = format!("\n{}\n", admin::metrics::markdown());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{start}{right}{end}{tail}")).unwrap();
    } else {
        assert!(written == right, "run `UPDATE_DOCS=1 cargo test --test admin` and commit it");
    }
    let text = streaming().await.get("/metrics").await.1;
    let mut shown: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let mut named: Vec<String> = right
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .map(|(name, rest)| format!("{name} {}", rest.split_once(' ').unwrap().0))
        .collect();
    shown.sort_unstable();
    named.sort_unstable();
    assert_eq!(shown, named);
}

#[tokio::test]
async fn a_takeover_does_not_owe_the_time_of_the_standby() {
    let admin = Admin::start().await;
    admin.status.phase(Phase::Standby);
    let started = std::time::Instant::now();
    while started.elapsed() < Duration::from_millis(50) {
        assert_eq!(admin.get("/readyz").await.0, 200);
    }
    admin.status.phase(Phase::Starting);
    let (_, status) = admin.json("/api/status").await;
    let seconds = |name: &str| status[name].as_f64().unwrap();
    assert!(seconds("lag_seconds") + 0.05 < seconds("uptime_seconds"), "{status}");
}

#[tokio::test]
async fn the_console_needs_nothing_from_elsewhere() {
    let admin = streaming().await;
    let (code, page) = admin.get("/").await;
    assert_eq!(code, 200);
    assert!(page.contains("<title>outboxd</title>"));
    for foreign in ["http://", "https://", "src=", "@import", "innerHTML"] {
        assert!(!page.contains(foreign), "the page has {foreign}");
    }
    assert_eq!(admin.get("/nothing").await.0, 404);
}

#[tokio::test]
async fn a_stop_ends_the_server_though_a_client_lingers() {
    let admin = streaming().await;
    let mut lingering = TcpStream::connect(admin.address).await.unwrap();
    lingering.write_all(b"GET /livez HTTP/1.1\r\n").await.unwrap();
    assert_eq!(admin.get("/livez").await.0, 200);
    admin.stop.cancel();
    let ended = timeout(Duration::from_secs(3), admin.server).await;
    ended.expect("ends in time").unwrap().unwrap();
}

#[tokio::test]
async fn an_address_in_use_is_told() {
    let admin = Admin::start().await;
    let failure = admin::serve(admin.address, Arc::clone(&admin.status), admin.stop.clone());
    let failure = failure.await.unwrap_err();
    assert_eq!(failure.kind, Kind::AdminAddress);
    assert!(failure.detail.contains(&admin.address.to_string()), "{failure}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_command_asks_the_relay() {
    let admin = streaming().await;
    let address = admin.address.to_string();
    let status = move |more: &'static [&'static str]| {
        let mut command = Command::cargo_bin("outboxd").unwrap();
        command.args(["status", "--admin", &address]).args(more);
        tokio::task::spawn_blocking(move || command.output().unwrap())
    };
    let output = status(&[]).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    for part in ["orders (outboxd", "streaming", "ready", "stream EVENTS R1, batch: the stream"] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
    let output = status(&["--json"]).await.unwrap();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["relay"], "orders");
    assert!(status(&["--check"]).await.unwrap().status.success());
    admin.status.phase(Phase::Waiting);
    let output = status(&["--check"]).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("NOT READY"), "{text}");
    assert!(status(&[]).await.unwrap().status.success());
    admin.stop.cancel();
    admin.server.await.unwrap().unwrap();
    let output = status(&[]).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("no relay answers on") && text.contains("next: start it"), "{text}");
}
