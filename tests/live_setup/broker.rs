//! The broker's side: streams, and what a NATS user must be allowed.

use std::time::{Duration, Instant};

use outboxd::sandbox::{Nats, NatsOptions, Relay, free_port, stream};
use serde_json::Value;

use super::place::{NOTHING, Place};

#[tokio::test]
async fn streams_are_made_when_told_and_then_fit() {
    let nats = Nats::start().await.unwrap();
    let mut place = Place::new().await;
    place.refused("init --create-streams", &["broker-unreachable"]).await;
    assert_eq!(place.found().await, NOTHING);

    place.broker = format!("servers = [\"{}\"]", nats.url());
    place.done("init").await;
    assert_eq!(place.all_faults().await, ["failure destination.stream"]);
    let dry = place.done("init --create-streams --dry-run").await;
    assert!(dry.contains("would make stream EVENTS"), "{dry}");
    let made = place.done("init --create-streams").await;
    assert!(made.contains("make       stream EVENTS"), "{made}");
    let kept = place.done("init --create-streams").await;
    assert!(kept.contains("keep       stream EVENTS"), "{kept}");
    // One server: an ack is not a sync to disk.
    let mut faults = place.all_faults().await;
    // Servers before 2.14 take no batches.
    faults.retain(|fault| fault != "warning destination.pipeline");
    assert_eq!(faults, ["warning destination.durability"]);
    assert_eq!(place.outboxd("check").await.code, Some(0));

    // A stream that stores other subjects is refused, not changed.
    place.broker += "\nsubject = \"other.{kind}\"";
    place.refused("init --create-streams", &["stream-subjects"]).await;
    assert!(place.all_faults().await.contains(&"failure destination.stream".to_owned()));
}

#[tokio::test]
async fn printed_permissions_suffice_and_each_is_needed() {
    let mut place = Place::new().await;
    place.done("init").await;
    let printed = place.done("check --print-permissions").await;
    let api = |verb: &str| format!("$JS.API.{verb}");
    // What is taken away, and which finding then names it.
    let needed = [
        ("events.>".to_owned(), "destination.permission"),
        ("_INBOX.>".to_owned(), "destination.stream"),
        (api("STREAM.INFO.EVENTS"), "destination.stream"),
        (api("STREAM.MSG.GET.EVENTS"), "destination.resume"),
        (api("CONSUMER.CREATE.EVENTS.>"), "destination.resume"),
        (api("CONSUMER.MSG.NEXT.EVENTS.>"), "destination.resume"),
    ];
    let mut users = format!(
        "{{ user: admin, password: secret }}, {{ user: relay, password: secret, {printed} }}"
    );
    for (number, (subject, _)) in needed.iter().enumerate() {
        let (quoted, less) = (format!("{subject:?}"), "\"nothing\"");
        assert!(printed.contains(&quoted), "{quoted} is not in {printed}");
        let less = printed.replace(&quoted, less);
        users += &format!(", {{ user: without{number}, password: secret, {less} }}");
    }
    let mut options = NatsOptions::default();
    options.config = format!("authorization {{ users: [ {users} ] }}");
    let nats = Nats::start_with(options).await.unwrap();
    let password = place.directory.path().join("password");
    std::fs::write(&password, "secret").unwrap();
    let user = |name: &str| {
        let (url, file) = (nats.url(), password.display());
        format!("servers = [\"{url}\"]\nuser = \"{name}\"\npassword_file = \"{file}\"")
    };
    place.broker = user("admin");
    place.done("init --create-streams").await;

    for (number, (subject, id)) in needed.iter().enumerate() {
        place.broker = user(&format!("without{number}"));
        let said = place.outboxd("check --json").await;
        assert_eq!(said.code, Some(1), "without {subject}: {}", said.out);
        let report: Value = serde_json::from_str(&said.out).unwrap();
        let failures: Vec<_> = report["findings"].as_array().unwrap().iter().collect();
        let failures: Vec<_> = failures.iter().filter(|one| one["severity"] == "failure").collect();
        let ids: Vec<_> = failures.iter().map(|one| one["id"].as_str().unwrap()).collect();
        assert_eq!(ids, [*id], "without {subject}: {report:#}");
        let found = failures[0]["found"].as_str().unwrap();
        let start = subject.trim_end_matches('>');
        assert!(found.contains("Permissions Violation") && found.contains(start), "{found}");
    }

    place.broker = user("relay");
    assert_eq!(place.outboxd("check").await.code, Some(0));
    let port = free_port().unwrap();
    let config = format!("{}[admin]\nlisten = \"127.0.0.1:{port}\"\n", place.config());
    let program = assert_cmd::cargo::cargo_bin("outboxd");
    let mut relay = Relay::prepare(&program, &config, port, false).unwrap();
    let login = async_nats::ConnectOptions::with_user_and_password("admin".into(), "secret".into());
    let client = login.connect(nats.url()).await.unwrap();
    for events in 1..=2 {
        relay.start().unwrap();
        relay.wait_ready(Duration::from_secs(60)).await.unwrap();
        place.sql("SELECT outbox.publish('r', 'order.created', '{}')").await;
        let deadline = Instant::now() + Duration::from_secs(30);
        let messages = async || stream::state(&client, "EVENTS").await.unwrap().messages;
        while messages().await < events {
            assert!(Instant::now() < deadline, "{}", relay.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // Killed: what the ledger may not have yet is read back from the stream.
        relay.kill9().unwrap();
        assert_eq!(messages().await, events, "{}", relay.log());
    }
    assert!(!relay.log().contains("ermissions"), "{}", relay.log());
}
