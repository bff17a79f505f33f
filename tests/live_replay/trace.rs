//! `outboxd trace`: what happened to an event, told from outside of the relay.

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use futures_util::StreamExt as _;
use serde_json::Value;
use uuid::Uuid;

use crate::place::Place;
use crate::support::SETTLE;
use crate::support::look::{publish, until};

async fn trace(place: &Place, arguments: &[&str]) -> Value {
    let said = place.world.relay.run(&[&["trace"], arguments, &["--json"]].concat()).await.unwrap();
    serde_json::from_str(&said).unwrap()
}

async fn seq_of(place: &Place, id: Uuid) -> String {
    let sql = "SELECT seq::text FROM outbox.event WHERE id = $1";
    place.client.query_one(sql, &[&id]).await.unwrap().get(0)
}

async fn consumer(place: &Place, name: &str, config: pull::Config) {
    let config = pull::Config { durable_name: Some(name.to_owned()), ..config };
    place.stream().await.create_consumer(config).await.unwrap();
}

/// Takes so many messages, and acknowledges them or not.
async fn take(place: &Place, name: &str, count: usize, ack: bool) {
    let consumer: async_nats::jetstream::consumer::PullConsumer =
        place.stream().await.get_consumer(name).await.unwrap();
    let mut messages = consumer.fetch().max_messages(count).messages().await.unwrap();
    let mut taken = 0;
    while let Some(message) = messages.next().await {
        taken += 1;
        if ack {
            message.unwrap().double_ack().await.unwrap();
        }
    }
    assert_eq!(taken, count, "{name}");
}

#[tokio::test]
async fn an_event_is_followed_from_its_commit_to_every_consumer() {
    let place = Place::start_with_times().await;
    let explicit = pull::Config { ack_policy: AckPolicy::Explicit, ..pull::Config::default() };
    for name in ["acks", "takes", "sleeps"] {
        consumer(&place, name, explicit.clone()).await;
    }
    let filter_subject = "events.order.shipped".to_owned();
    consumer(&place, "picky", pull::Config { filter_subject, ..explicit.clone() }).await;
    let none = pull::Config { ack_policy: AckPolicy::None, ..pull::Config::default() };
    consumer(&place, "careless", none).await;
    let before = place.position().await;
    let mut ids = Vec::new();
    for n in 1..=5 {
        ids.push(publish(&place.client, "r", "order.paid", n).await);
    }
    place.recorded().await;
    let after = place.position().await;
    let deliver_policy = DeliverPolicy::New;
    consumer(&place, "late", pull::Config { deliver_policy, ..explicit }).await;
    take(&place, "acks", 4, true).await;
    take(&place, "takes", 4, false).await;
    take(&place, "careless", 4, false).await;

    let seq = seq_of(&place, ids[2]).await;
    let by_number = trace(&place, &[&seq]).await;
    assert_eq!(by_number, trace(&place, &[&ids[2].to_string()]).await);
    let told = |pointer: &str| by_number.pointer(pointer).cloned().unwrap_or(Value::Null);
    assert_eq!(told("/id"), ids[2].to_string());
    assert_eq!(told("/row/run"), "r");
    let lsn: outboxd::lsn::Lsn = told("/commit_lsn").as_str().unwrap().parse().unwrap();
    assert!(before <= lsn && lsn < after, "{lsn}");
    let sql = "SELECT pg_xact_commit_timestamp(xmin) = $1::text::timestamptz FROM outbox.event \
               WHERE id = $2";
    let committed = told("/committed_at").as_str().unwrap().to_owned();
    let row = place.client.query_one(sql, &[&committed, &ids[2]]).await.unwrap();
    assert!(row.get::<_, bool>(0), "{committed}");
    assert_eq!(told("/destinations/0/state"), "published");
    assert_eq!(told("/destinations/0/receipts/0/outcome"), "published");
    let seen = place.messages().await;
    let seen = seen.iter().find(|seen| seen.msg_id == ids[2].to_string()).unwrap();
    assert_eq!(told("/destinations/0/messages/0/stream_seq"), seen.stream_seq);
    assert_eq!(told("/destinations/0/messages/0/subject"), "events.order.paid");
    let stored = told("/destinations/0/messages/0/stored_at");
    let stored: jiff::Timestamp = stored.as_str().unwrap().parse().unwrap();
    assert_eq!(stored.as_nanosecond(), seen.stored_at);
    let standings = |traced: &Value| -> Vec<String> {
        let consumers = traced.pointer("/destinations/0/consumers").unwrap().as_array().unwrap();
        let mut told: Vec<String> = consumers
            .iter()
            .map(|one| {
                format!("{} {}", one["name"].as_str().unwrap(), one["standing"].as_str().unwrap())
            })
            .collect();
        told.sort();
        told
    };
    let expected = [
        "acks acked",
        "careless delivered_without_acks",
        "late begins_later",
        "picky not_for_it",
        "sleeps pending",
        "takes delivered",
    ];
    assert_eq!(standings(&by_number), expected);
    // The last one: nobody but those who took all has it.
    let last = trace(&place, &[&ids[4].to_string()]).await;
    assert!(standings(&last).contains(&"acks pending".to_owned()), "{last:#}");

    let text = place.world.relay.run(&["trace", &seq]).await.unwrap();
    for words in
        ["event        seq ", "row          there: run r", "  receipt    ", "acks: acknowledged"]
    {
        assert!(text.contains(words), "{text}");
    }
}

#[tokio::test]
async fn what_is_not_as_it_should_be_is_told() {
    let mut place = Place::start().await;
    let id = publish(&place.client, "r", "order.paid", 1).await;
    let sql = "SELECT outbox.publish(run_id => 'r', kind => 'odd', payload => '{}'::json, \
               headers => '{\"Nats-X\": \"1\"}')";
    let letter: Uuid = place.client.query_one(sql, &[]).await.unwrap().get(0);
    place.recorded().await;
    let seq = seq_of(&place, id).await;

    let dead = trace(&place, &[&letter.to_string()]).await;
    assert_eq!(dead.pointer("/destinations/0/state").unwrap(), "dead");
    assert_eq!(dead.pointer("/destinations/0/letters/0/reason").unwrap(), "header");
    assert_eq!(dead.pointer("/destinations/0/messages").unwrap(), &serde_json::json!([]));

    // Purged; replayed; its row removed. By its id the message alone tells, by its number all do.
    place.purge().await;
    let purged = trace(&place, &[&seq]).await;
    let note = purged.pointer("/destinations/0/note").unwrap().as_str().unwrap();
    assert!(note.contains("not in the stream any more"), "{note}");
    place.done(&["--event", &seq, "--job", "again"]).await;
    place.client.execute("DELETE FROM outbox.event WHERE id = $1", &[&id]).await.unwrap();
    for event in [&seq, &id.to_string()] {
        let traced = trace(&place, &[event]).await;
        assert_eq!(traced["row"], Value::Null);
        assert_eq!(traced["id"], id.to_string());
        let message = traced.pointer("/destinations/0/messages/0").unwrap();
        assert_eq!(message["replay"], "again", "{traced:#}");
        assert_eq!(traced.pointer("/destinations/0/state").unwrap(), "published");
    }

    for unknown in ["4711", "2f1c7d54-3c0e-4d0c-9a39-8a4f4ac4f2b0", "x\u{1b}"] {
        let output = place.world.relay.output(&["trace", unknown]).await.unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains("nothing is known of event") && words.contains("next: "), "{words}");
        assert!(!words.contains('\u{1b}'), "{words}");
    }

    // Without a broker the database still tells what it knows, and the exit code says that it is not all.
    place.world.nats().unwrap().stop().await.unwrap();
    let waits = publish(&place.client, "r", "order.paid", 2).await;
    let output = place.world.relay.output(&["trace", &waits.to_string(), "--json"]).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let traced: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(traced.pointer("/destinations/0/state").unwrap(), "undecided");
    assert!(traced.pointer("/destinations/0/error").unwrap().is_string(), "{traced:#}");
    place.world.nats().unwrap().restart().await.unwrap();
    until("sent", SETTLE, || async {
        let traced = trace(&place, &[&waits.to_string()]).await;
        let state = traced.pointer("/destinations/0/state").unwrap();
        (state == "published").then_some(()).ok_or_else(|| format!("{traced:#}"))
    })
    .await;
}
