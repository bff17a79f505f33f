//! Dead letters after the burial: runs that wait behind one, redrive and discard, by the commands
//! that an operator has, through crashes of the relay.

use std::time::Duration;

use crate::support::look::{edit_stream, metric, publish};
use crate::support::told::{status, until};
use crate::support::{SETTLE, log_tail, options};
use outboxd::sandbox::{STREAM, World, WorldOptions};
use serde_json::Value;
use tokio_postgres::Client;
use uuid::Uuid;

/// The stream takes no larger messages until the limit is raised.
const LIMIT: i64 = 4_096;
const SOON: Duration = Duration::from_secs(30);
const BLOCK_RUN: &str = "on_dead_letter = \"block-run\"\n";

/// An installation whose stream refuses large messages, which the relay does not know.
struct Place {
    world: World,
    client: Client,
    broker: async_nats::Client,
}

impl Place {
    async fn start(destination: &str) -> Place {
        Place::start_with(WorldOptions { destination: destination.to_owned(), ..options() }).await
    }

    async fn start_with(options: WorldOptions) -> Place {
        let world = World::start(options).await.unwrap();
        let client = world.postgres.connect().await.unwrap();
        let broker = world.broker.connect().await.unwrap();
        let place = Place { world, client, broker };
        place.limit(LIMIT).await;
        place
    }

    async fn limit(&self, bytes: i64) {
        edit_stream(&self.broker, STREAM, |config| config["max_msg_size"] = bytes.into()).await;
    }

    /// An event that is too large for the stream.
    async fn poison(&self, run: &str, n: i64) -> Uuid {
        let (id, fill) = (Uuid::new_v4(), "x".repeat(8_000));
        let body = format!(r#"{{"id":"{id}","run":"{run}","n":{n},"fill":"{fill}"}}"#);
        let sql = "SELECT outbox.publish(run_id => $1, kind => 'large', \
                   payload => $2::text::json, id => $3, headers => '{\"X-Odd\": \"a\"}')";
        self.client.query_one(sql, &[&run, &body, &id]).await.unwrap();
        id
    }

    /// The run `r`: 1, then 2 which is too large, then 3 and 4.
    async fn poisoned_run(&self) -> Uuid {
        publish(&self.client, "r", "good", 1).await;
        let id = self.poison("r", 2).await;
        publish(&self.client, "r", "good", 3).await;
        publish(&self.client, "r", "good", 4).await;
        self.letters("buried", 1).await;
        id
    }

    /// Waits for so many letters in a state.
    async fn letters(&self, state: &str, count: i64) {
        let sql = "SELECT count(*) FROM outbox.dead_letter WHERE state = $1";
        until(&format!("{count} letters {state}"), SOON, async || {
            self.client.query_one(sql, &[&state]).await.unwrap().get::<_, i64>(0) == count
        })
        .await;
    }

    /// Numbers of a run in the order of the stream.
    async fn stored(&self, run: &str) -> Vec<i64> {
        let messages = self.world.messages().await.unwrap();
        let events = messages.into_iter().filter_map(|seen| seen.event);
        events.filter(|event| event.run == run).map(|event| event.n).collect()
    }

    async fn is_stored(&self, run: &str, numbers: &[i64]) {
        until(&format!("{numbers:?} of {run}"), SOON, async || self.stored(run).await == numbers)
            .await;
    }

    /// Runs `outboxd dead-letters`; its exit code and JSON.
    async fn command(&self, arguments: &[&str]) -> (i32, Value) {
        let all = [&["dead-letters"], arguments, &["--json"]].concat();
        let output = self.world.relay.output(&all).await.unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        let json = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{words}"));
        (output.status.code().unwrap(), json)
    }

    /// The only letter.
    async fn letter(&self) -> String {
        let row = self.client.query_one("SELECT id::text FROM outbox.dead_letter", &[]).await;
        row.unwrap().get(0)
    }

    /// Everything that is known of all letters.
    async fn all(&self) -> String {
        let sql = "SELECT coalesce(jsonb_agg(to_jsonb(l) ORDER BY id), '[]')::text \
                   FROM outbox.dead_letter AS l";
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }
}

#[tokio::test]
async fn a_run_goes_on_and_its_letter_arrives_behind_the_later_events() {
    let place = Place::start("").await;
    let id = place.poisoned_run().await;
    place.is_stored("r", &[1, 3, 4]).await;
    let letter = place.letter().await;

    let (code, list) = place.command(&["list", "--run", "r", "--since", "1h"]).await;
    assert_eq!((code, &list["more"]), (0, &Value::from(0)));
    let listed = &list["letters"][0];
    assert_eq!(listed["event_id"], id.to_string());
    assert_eq!(listed["reason"], "too_large");
    assert_eq!(listed["server_code"], 10054);
    assert_eq!((&listed["state"], &listed["attempts"]), (&"buried".into(), &1.into()));
    assert!(listed["commit_lsn"].is_string() && listed["commit_index"] == 0, "{listed}");
    for other in [["--run", "q"], ["--kind", "good*"], ["--reason", "header"], ["--until", "1h"]] {
        let (code, list) = place.command(&["list", other[0], other[1]]).await;
        assert_eq!((code, list["letters"].as_array().unwrap().len()), (0, 0), "{other:?}");
    }

    let file = place.world.relay.configuration().with_file_name("body");
    let (_, shown) = place.command(&["show", &letter, "--payload", file.to_str().unwrap()]).await;
    let body = std::fs::read(&file).unwrap();
    assert_eq!(shown["payload"]["bytes"], body.len());
    assert_eq!(
        (&shown["payload"]["form"], &shown["payload"]["cut"]),
        (&"text".into(), &true.into())
    );
    assert!(
        String::from_utf8(body).unwrap().starts_with(shown["payload"]["shown"].as_str().unwrap())
    );
    assert_eq!(shown["headers"], "{\"X-Odd\": \"a\"}");
    assert_eq!(shown["history"][0]["state"], "buried");

    let before = place.all().await;
    let (code, tried) = place.command(&["redrive", &letter, "--dry-run"]).await;
    assert_eq!((code, &tried["dry_run"]), (0, &true.into()), "{tried}");
    let overtaken = &tried["letters"][0]["overtaken"];
    assert_eq!((&overtaken["published"], &overtaken["complete"]), (&2.into(), &true.into()));
    place.command(&["discard", &letter, "--dry-run"]).await;
    assert_eq!(place.all().await, before, "a dry run changed something");

    place.limit(-1).await;
    let why = ["--why", "limit raised", "--by", "ann"];
    let (code, done) = place.command(&[&["redrive", &*letter], &why[..]].concat()).await;
    assert_eq!((code, &done["letters"][0]["state"]), (0, &"redriven".into()), "{done}");
    assert_eq!(place.stored("r").await, [1, 3, 4, 2]);
    let (_, shown) = place.command(&["show", &letter]).await;
    let states: Vec<_> = shown["history"].as_array().unwrap().iter().collect();
    assert_eq!(states.len(), 3, "{shown}");
    assert!(states[1]["by"].as_str().unwrap().starts_with("ann as "), "{shown}");
    assert_eq!((&states[1]["why"], &states[2]["by"]), (&"limit raised".into(), &"relay".into()));
    assert!(place.world.recorded("events").await.unwrap().contains(&id));
    let stream = async_nats::jetstream::new(place.broker.clone()).get_stream(STREAM).await.unwrap();
    let message = stream.get_raw_message(4).await.unwrap();
    assert_eq!(message.headers.get("Outbox-Redriven").unwrap().as_str(), letter);
    assert_eq!(message.headers.get("Nats-Msg-Id").unwrap().as_str(), id.to_string());
    until("counted", SOON, async || {
        metric(&place.world, "outboxd_redriven_letters_total", "").await == Some(1.0)
    })
    .await;
    let (code, refused) = place.command(&[&["redrive", &*letter], &why[..]].concat()).await;
    assert_eq!(code, 1);
    assert!(refused["refused"].as_str().unwrap().contains("is redriven"), "{refused}");
}

async fn a_blocked_run_waits_for_its_letter(pipeline: &str) {
    let mut place = Place::start(&format!("{BLOCK_RUN}{pipeline}")).await;
    place.poisoned_run().await;
    publish(&place.client, "other", "good", 1).await;
    place.is_stored("other", &[1]).await;
    assert_eq!(place.stored("r").await, [1], "{}", log_tail(&place.world));
    until("told", SOON, async || status(&place.world.relay, "/destinations/0/blocked").await == 1)
        .await;
    assert_eq!(metric(&place.world, "outboxd_blocked_runs", "").await, Some(1.0));
    assert!(place.world.relay.run(&["status"]).await.unwrap().contains("1 runs BLOCKED"));

    // A restart changes nothing.
    place.world.relay.kill9().unwrap();
    place.world.start_relay().await.unwrap();
    publish(&place.client, "r", "good", 5).await;
    publish(&place.client, "other", "good", 2).await;
    place.is_stored("other", &[1, 2]).await;
    assert_eq!(place.stored("r").await, [1]);

    // Refused again: it stays in front.
    let letter = place.letter().await;
    let redrive = ["redrive", &*letter, "--why", "try"];
    let (code, again) = place.command(&redrive).await;
    assert_eq!((code, &again["letters"][0]["state"]), (1, &"buried".into()), "{again}");
    let (_, shown) = place.command(&["show", &letter]).await;
    assert_eq!((&shown["attempts"], &shown["blocks_run"]), (&2.into(), &true.into()), "{shown}");
    assert_eq!(shown["history"].as_array().unwrap().len(), 3);
    assert_eq!(place.stored("r").await, [1]);

    // Mended: it goes first, and the run behind it.
    place.limit(-1).await;
    let (code, done) = place.command(&redrive).await;
    assert_eq!((code, &done["letters"][0]["state"]), (0, &"redriven".into()), "{done}");
    assert_eq!(done["letters"][0]["overtaken"]["published"], 0);
    assert_eq!(done["letters"][0]["overtaken"]["undecided"], 3, "{done}");
    place.is_stored("r", &[1, 2, 3, 4, 5]).await;
    place.world.settle(SETTLE).await.unwrap();
    let verdict = place.world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}");
    until("free", SOON, async || {
        metric(&place.world, "outboxd_blocked_runs", "").await == Some(0.0)
    })
    .await;
}

#[tokio::test]
async fn a_blocked_run_waits_for_its_letter_in_batches() {
    a_blocked_run_waits_for_its_letter("").await;
}

#[tokio::test]
async fn a_blocked_run_waits_for_its_letter_per_run() {
    a_blocked_run_waits_for_its_letter("pipeline = \"per-run\"").await;
}

/// More waits behind a letter than memory holds: nobody else waits, and the order is kept.
#[tokio::test]
async fn a_blocked_run_leaves_memory_to_the_others() {
    let (destination, relay) = (BLOCK_RUN.to_owned(), "memory = \"4MiB\"\n".to_owned());
    let mut place = Place::start_with(WorldOptions { destination, relay, ..options() }).await;
    place.poisoned_run().await;
    let many = "INSERT INTO outbox.event (id, run_id, kind, payload) \
                SELECT id, 'r', 'good', json_build_object('id', id, 'run', 'r', 'n', n) \
                FROM (SELECT gen_random_uuid() AS id, n \
                      FROM generate_series($1::int8, $2::int8) AS n ORDER BY n) AS rows";
    for first in (5..8_005).step_by(500) {
        let last = first + 499;
        place.client.execute(many, &[&i64::from(first), &i64::from(last)]).await.unwrap();
        publish(&place.client, "other", "good", i64::from(last / 500)).await;
    }
    let others: Vec<i64> = (1..=16).collect();
    place.is_stored("other", &others).await;
    assert_eq!(place.stored("r").await, [1], "{}", log_tail(&place.world));
    until("events handed over", SOON, async || {
        metric(&place.world, "outboxd_handed_events_total", "").await > Some(0.0)
    })
    .await;
    place.world.relay.kill9().unwrap();
    place.world.start_relay().await.unwrap();
    publish(&place.client, "other", "good", 17).await;
    place.is_stored("other", &(1..=17).collect::<Vec<_>>()).await;
    assert_eq!(place.stored("r").await, [1]);

    place.limit(-1).await;
    let letter = place.letter().await;
    let (code, done) = place.command(&["redrive", &letter, "--why", "limit raised"]).await;
    assert_eq!((code, &done["letters"][0]["state"]), (0, &"redriven".into()), "{done}");
    place.world.settle(SETTLE).await.unwrap();
    let verdict = place.world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}");
    assert_eq!(place.stored("r").await, (1..=8_004).collect::<Vec<_>>());
}

/// Without WAL the letters are the same.
#[tokio::test]
async fn a_run_is_blocked_without_a_stream_too() {
    let (destination, relay) =
        (BLOCK_RUN.to_owned(), "stream = false\nsweep_interval = \"1s\"\n".to_owned());
    let mut place = Place::start_with(WorldOptions { destination, relay, ..options() }).await;
    place.poisoned_run().await;
    publish(&place.client, "other", "good", 1).await;
    place.is_stored("other", &[1]).await;
    place.world.relay.kill9().unwrap();
    place.world.start_relay().await.unwrap();
    publish(&place.client, "other", "good", 2).await;
    place.is_stored("other", &[1, 2]).await;
    assert_eq!(place.stored("r").await, [1], "{}", log_tail(&place.world));
    place.limit(-1).await;
    let letter = place.letter().await;
    let (code, done) = place.command(&["redrive", &letter, "--why", "limit raised"]).await;
    assert_eq!((code, &done["letters"][0]["state"]), (0, &"redriven".into()), "{done}");
    place.is_stored("r", &[1, 2, 3, 4]).await;
}

#[tokio::test]
async fn a_discarded_letter_releases_its_run() {
    let place = Place::start(BLOCK_RUN).await;
    place.poisoned_run().await;
    place.poison("q", 1).await;
    publish(&place.client, "q", "good", 2).await;
    place.letters("buried", 2).await;
    let before = place.all().await;
    let (code, refused) = place.command(&["discard", "--kind", "large", "--why", "x"]).await;
    assert_eq!(code, 1);
    assert!(refused["refused"].as_str().unwrap().contains("--all"), "{refused}");
    let (code, _) = place.command(&["discard", "1", "999", "--why", "x"]).await;
    assert_eq!(code, 1);
    assert_eq!(place.all().await, before, "refused, and changed something");

    let (code, done) = place.command(&["discard", "--run", "r", "--why", "a test"]).await;
    assert_eq!((code, &done["letters"][0]["state"]), (0, &"discarded".into()), "{done}");
    place.is_stored("r", &[1, 3, 4]).await;
    assert_eq!(place.stored("q").await, Vec::<i64>::new());
    // It was a mistake: now it comes behind.
    place.limit(-1).await;
    let all = ["redrive", "--state", "discarded", "--all", "--why", "after all"];
    let (code, done) = place.command(&all).await;
    assert_eq!((code, &done["letters"][0]["state"]), (0, &"redriven".into()), "{done}");
    place.is_stored("r", &[1, 3, 4, 2]).await;
    let (_, all) = place.command(&["list", "--state", "all", "--limit", "1"]).await;
    assert_eq!((all["letters"].as_array().unwrap().len(), &all["more"]), (1, &1.into()));
}

/// The state of the letter can't be changed, the relay dies, and the window is over: the stream
/// itself tells that the message is there.
#[tokio::test]
async fn a_relay_killed_between_ack_and_record_sends_no_copy() {
    let create = "duplicate_window = \"1s\"".to_owned();
    let mut place = Place::start_with(WorldOptions { create, ..options() }).await;
    place.poisoned_run().await;
    place.is_stored("r", &[1, 3, 4]).await;
    place.world.settle(SETTLE).await.unwrap();
    place.world.relay.kill9().unwrap();
    place.limit(-1).await;
    let letter = place.letter().await;
    let (code, waits) = place.command(&["redrive", &letter, "--why", "limit raised"]).await;
    assert_eq!((code, &waits["relay_running"]), (0, &false.into()), "{waits}");
    assert_eq!(waits["letters"][0]["state"], "redriving");

    let mut locker = place.world.postgres.connect().await.unwrap();
    let lock = locker.transaction().await.unwrap();
    lock.execute("SELECT FROM outbox.dead_letter FOR UPDATE", &[]).await.unwrap();
    place.world.start_relay().await.unwrap();
    place.is_stored("r", &[1, 3, 4, 2]).await;
    let blocked = "FROM pg_stat_activity \
                   WHERE wait_event_type = 'Lock' AND query LIKE '%outbox.dead_letter%'";
    let count = format!("SELECT count(*) {blocked}");
    until("the relay at the letter", SOON, async || {
        place.client.query_one(&count, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    place.world.relay.kill9().unwrap();
    // The server would go on for a client that it does not know to be gone.
    let end = format!("SELECT pg_terminate_backend(pid) {blocked}");
    place.client.query(&end, &[]).await.unwrap();
    until("nobody at the letter", SOON, async || {
        place.client.query_one(&count, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    lock.rollback().await.unwrap();
    // Its row is gone, too.
    place.client.execute("DELETE FROM outbox.event WHERE kind = 'large'", &[]).await.unwrap();
    place.letters("redriving", 1).await;
    // Longer than the stream's window: from here on the server would store a copy.
    tokio::time::sleep(Duration::from_secs(2)).await;

    place.world.start_relay().await.unwrap();
    place.letters("redriven", 1).await;
    let (_, shown) = place.command(&["show", &letter]).await;
    assert_eq!(shown["state_reason"], "found in the stream", "{shown}");
    publish(&place.client, "r", "good", 5).await;
    place.is_stored("r", &[1, 3, 4, 2, 5]).await;
}

#[tokio::test]
async fn what_is_no_message_can_only_be_discarded() {
    let more = "[dead_letters]\nretention = \"1h\"\n".to_owned();
    let place = Place::start_with(WorldOptions { more, ..options() }).await;
    publish(&place.client, "r", "", 1).await;
    place.letters("buried", 1).await;
    let letter = place.letter().await;
    let (code, refused) = place.command(&["redrive", &letter, "--why", "x"]).await;
    assert_eq!(code, 1);
    assert!(refused["refused"].as_str().unwrap().contains("unmappable"), "{refused}");
    let text = place.world.relay.run(&["dead-letters", "show", &letter]).await.unwrap();
    assert!(text.contains("reason       unmappable") && text.contains("next "), "{text}");
    place.world.relay.run(&["dead-letters", "discard", &letter, "--why", "x"]).await.unwrap();

    // Open ones stay however old they are; closed ones go when their time is over.
    place.poison("r", 2).await;
    place.letters("buried", 1).await;
    let aged = "UPDATE outbox.dead_letter SET buried_at = now() - interval '1 year', \
                state_changed_at = now() - interval '2 hours'";
    place.client.execute(aged, &[]).await.unwrap();
    place.letters("discarded", 0).await;
    place.letters("buried", 1).await;
    let list = place.world.relay.run(&["dead-letters", "list"]).await.unwrap();
    assert!(list.contains("too_large: "), "{list}");
}
