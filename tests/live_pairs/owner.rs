//! P1, P3, P9 while the owner of broker and stream changes things under a running relay:
//! permissions, passwords, the stream itself, its configuration.

use std::collections::HashSet;
use std::time::Duration;

use crate::support::batches;
use crate::support::look::{edit_stream, publish};
use crate::support::told::{status, until};
use crate::support::{SETTLE, finish_and_judge, log_tail, options, workload};
use async_nats::jetstream;
use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{NatsOptions, STREAM, Workload, World, WorldOptions};
use serde_json::json;

/// Noticed, and told, within this time.
const BOUND: Duration = Duration::from_secs(60);
/// Longest back-off, and a try.
const RECOVERY: Duration = Duration::from_secs(45);

/// A relay that logs in as `relay`; everybody else is nobody in particular and may do all.
struct Guarded {
    world: World,
    // Removed at the end.
    _secrets: tempfile::TempDir,
}

fn users(password: &str, permissions: &str) -> String {
    format!(
        "authorization {{ users: [ {{ user: all, password: all }}, \
         {{ user: relay, password: {password}, permissions: {{ {permissions} }} }} ] }}\n\
         no_auth_user: all\n"
    )
}

const EVERYTHING: &str = "publish: \">\", subscribe: \">\"";

impl Guarded {
    async fn start() -> Guarded {
        let secrets = tempfile::tempdir().unwrap();
        let file = secrets.path().join("password");
        std::fs::write(&file, "first").unwrap();
        let destination = format!("user = \"relay\"\npassword_file = {file:?}\n");
        let mut nats = NatsOptions::default();
        nats.config = users("first", EVERYTHING);
        let options = WorldOptions { nats, destination, ..options() };
        Guarded { world: World::start(options).await.unwrap(), _secrets: secrets }
    }

    fn reconfigure(&mut self, config: &str) {
        self.world.nats().unwrap().reconfigure(config).unwrap();
    }
}

/// Not ready, for this reason; and alive.
async fn is_unready(world: &World, code: &str) -> bool {
    let (live, _) = world.relay.get("/livez").await.unwrap();
    assert_eq!(live, 200);
    let (ready, body) = world.relay.get("/readyz").await.unwrap();
    ready == 503 && body.contains(code)
}

/// Becomes unready for this reason within the bound, and stays so.
async fn stays_unready(world: &World, code: &str, time: Duration) {
    until(code, BOUND, async || is_unready(world, code).await).await;
    let remedy = status(&world.relay, "/destinations/0/failure/remedy").await;
    assert!(remedy.as_str().is_some_and(|words| !words.is_empty()), "{remedy}");
    let start = std::time::Instant::now();
    while start.elapsed() < time {
        let (ready, body) = world.relay.get("/readyz").await.unwrap();
        assert_eq!(ready, 503, "{body}\n{}", log_tail(world));
        assert!(body.contains(code), "{body}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn is_ready(world: &World) {
    until("it is ready again", RECOVERY, async || {
        world.relay.get("/readyz").await.is_ok_and(|(status, _)| status == 200)
    })
    .await;
}

#[tokio::test]
async fn the_right_to_publish_is_revoked_and_granted() {
    let mut guarded = Guarded::start().await;
    let denied = users("first", "publish: { deny: \"events.>\" }, subscribe: \">\"");
    let client = guarded.world.postgres.connect().await.unwrap();
    publish(&client, "r", "k", 1).await;
    guarded.world.settle(SETTLE).await.unwrap();
    guarded.reconfigure(&denied);
    publish(&client, "r", "k", 2).await;
    stays_unready(&guarded.world, "broker-permission", Duration::from_secs(10)).await;
    guarded.reconfigure(&users("first", EVERYTHING));
    is_ready(&guarded.world).await;
    guarded.world.settle(SETTLE).await.unwrap();
    let verdict = guarded.world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok() && verdict.events == 2, "{verdict}");
}

#[tokio::test]
async fn the_password_is_refused_and_taken() {
    let mut guarded = Guarded::start().await;
    let client = guarded.world.postgres.connect().await.unwrap();
    guarded.reconfigure(&users("second", EVERYTHING));
    publish(&client, "r", "k", 1).await;
    stays_unready(&guarded.world, "broker-login", Duration::from_secs(5)).await;
    let told = status(&guarded.world.relay, "").await.to_string() + &guarded.world.relay.log();
    assert!(!told.contains("first"), "the password is told");
    guarded.reconfigure(&users("first", EVERYTHING));
    is_ready(&guarded.world).await;
    guarded.world.settle(SETTLE).await.unwrap();
    let verdict = guarded.world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok() && verdict.events == 1, "{verdict}");
}

/// Events of the first stream are gone with it; what came after is in the second one, once, and
/// nothing that was acknowledged is sent again.
#[tokio::test]
async fn the_stream_is_deleted_and_made_again() {
    let world = World::start(options()).await.unwrap();
    world.load(Workload { events: 500, ..workload() }).finish().await.unwrap();
    world.settle(SETTLE).await.unwrap();
    let before: HashSet<_> = world.committed().await.unwrap().into_iter().collect();
    let broker = jetstream::new(world.broker.connect().await.unwrap());
    broker.delete_stream(STREAM).await.unwrap();
    world.load(Workload { events: 500, ..workload() }).finish().await.unwrap();
    until("stream-missing", RECOVERY, async || is_unready(&world, "stream-missing").await).await;
    world.relay.run(&["init", "--create-streams"]).await.unwrap();
    is_ready(&world).await;
    let mut after = world.committed().await.unwrap();
    after.retain(|event| !before.contains(event));
    until("all are in the new stream", SETTLE, async || {
        world.messages().await.is_ok_and(|messages| messages.len() >= after.len())
    })
    .await;
    let messages = world.messages().await.unwrap();
    let verdict = Verdict::of(&after, &HashSet::new(), &messages, &[]);
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
}

#[tokio::test]
async fn batches_are_switched_off_and_on() {
    let world = World::start(options()).await.unwrap();
    let client = world.broker.connect().await.unwrap();
    if !batches::taken_by(&client, "batches_are_switched_off_and_on").await {
        return;
    }
    let sampling = world.sample().await.unwrap();
    let load = world.load(Workload { events: u64::MAX, rate: Some(300), ..workload() });
    let owner = world.broker.connect().await.unwrap();
    for _ in 0..2 {
        for (on, pipeline) in [(false, "per-run"), (true, "batch")] {
            edit_stream(&owner, STREAM, |config| {
                if let Some(config) = config.as_object_mut() {
                    config.insert("allow_batched".to_owned(), json!(on));
                }
            })
            .await;
            until(pipeline, RECOVERY, async || {
                let stream = status(&world.relay, "/destinations/0/stream").await;
                let why = stream.get("why").and_then(|why| why.as_str());
                assert_ne!(why, Some(""), "says why");
                stream.get("pipeline") == Some(&json!(pipeline))
            })
            .await;
        }
        if !crate::support::drill() {
            break;
        }
    }
    load.enough();
    finish_and_judge(&world, load, sampling).await;
}
