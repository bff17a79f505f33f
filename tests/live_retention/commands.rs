//! `outboxd prune` and `outboxd erase` as an operator meets them, and the schedule of `run`.

use std::time::Duration;

use outboxd::sandbox::{World, WorldOptions};
use serde_json::Value;

use crate::between::{known, publish_old};
use crate::support::look::{metric, publish, until};
use crate::support::{SETTLE, log_tail, options};

async fn json(world: &World, arguments: &[&str]) -> Value {
    let output = world.relay.output(arguments).await.unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Makes everything that was recorded look so old.
const AGE: &str = "UPDATE outbox.receipt SET recorded_at = recorded_at - interval '9 days'; \
                   UPDATE outbox.destination SET created_at = created_at - interval '9 days'";

#[tokio::test]
async fn prune_tells_what_it_does() {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    for n in 1..=3 {
        publish_old(&client, "r", n).await;
    }
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(Duration::from_secs(15)).await.unwrap();
    known(&client).await;

    let found = json(&world, &["prune", "--dry-run", "--json"]).await;
    assert_eq!((&found["dry_run"], &found["summary"]["rows"]), (&true.into(), &0.into()));
    client.batch_execute(AGE).await.unwrap();
    let found = json(&world, &["prune", "--dry-run", "--json"]).await;
    assert_eq!(found["summary"]["rows"], 3, "{found}");
    assert_eq!(found["steps"][0]["step"], "deleted");
    let text = world.relay.run(&["prune", "--keep", "30d"]).await.unwrap();
    assert!(text.contains("0 rows pruned"), "{text}");
    let text = world.relay.run(&["prune"]).await.unwrap();
    assert!(text.contains("deleted      outbox.event_default, 3 rows"), "{text}");
    let rows: i64 =
        client.query_one("SELECT count(*) FROM outbox.event", &[]).await.unwrap().get(0);
    assert_eq!(rows, 0);
    let output = world.relay.output(&["prune", "--keep", "soon"]).await.unwrap();
    assert_eq!(output.status.code(), Some(2));
}

/// The relay does it by its clock, counts it, and does not stop streaming for it.
#[tokio::test]
async fn the_relay_prunes_by_its_clock() {
    let more = "[retention]\nkeep = \"1m\"\nevery = \"1s\"\n".to_owned();
    let world = World::start(WorldOptions { more, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    for n in 1..=5 {
        publish_old(&client, "r", n).await;
    }
    world.settle(SETTLE).await.unwrap();
    known(&client).await;
    client.batch_execute(AGE).await.unwrap();
    until("pruned", Duration::from_secs(30), || async {
        let pruned = metric(&world, "outboxd_pruned_rows_total", "").await;
        (pruned == Some(5.0))
            .then_some(())
            .ok_or_else(|| format!("{pruned:?}\n{}", log_tail(&world)))
    })
    .await;
    let rows: i64 =
        client.query_one("SELECT count(*) FROM outbox.event", &[]).await.unwrap().get(0);
    assert_eq!(rows, 0);
    let found: Value =
        serde_json::from_str(&world.relay.get("/api/status").await.unwrap().1).unwrap();
    assert_eq!(found["retention"]["rows"], 5);
    until("a pass is over", Duration::from_secs(30), || async {
        let passes = metric(&world, "outboxd_retention_passes_total", "").await;
        (passes >= Some(1.0)).then_some(()).ok_or_else(|| format!("{passes:?}"))
    })
    .await;
}

#[tokio::test]
async fn erase_removes_one_run_and_its_letters() {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    publish(&client, "kept", "k", 1).await;
    publish(&client, "mine", "k", 2).await;
    // Can't be published: a dead letter.
    publish(&client, "mine", "", 3).await;
    publish(&client, "kept", "", 4).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(Duration::from_secs(15)).await.unwrap();
    known(&client).await;
    publish(&client, "mine", "k", 5).await;
    publish(&client, "kept", "k", 6).await;

    let dry = json(&world, &["erase", "--run", "mine", "--dry-run", "--json"]).await;
    assert_eq!((&dry["erased"]["rows"], &dry["erased"]["dead_letters"]), (&3.into(), &1.into()));
    assert_eq!(dry["streams"][0]["header"], "Outbox-Run: mine");
    let refused = world.relay.output(&["erase", "--run", "mine"]).await.unwrap();
    let text = String::from_utf8(refused.stdout).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("would erase  3 rows") && text.contains("add --yes"), "{text}");
    let done = json(&world, &["erase", "--run", "mine", "--yes", "--json"]).await;
    // The relay is down, and 5 was not published.
    assert_eq!((&done["erased"]["rows"], &done["erased"]["gone"]), (&3.into(), &1.into()));
    assert_eq!((&done["erased"]["dead_letters"], &done["dry_run"]), (&1.into(), &false.into()));
    let left = "SELECT count(*) FROM outbox.event WHERE run_id = 'mine' \
                UNION ALL SELECT count(*) FROM outbox.event \
                UNION ALL SELECT count(*) FROM outbox.dead_letter";
    let left: Vec<i64> =
        client.query(left, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(left, [0, 3, 1]);

    // Nobody waits for what is gone, and the WAL still has it: the ledger says that it is decided.
    let lag = "SELECT sum(unpublished)::bigint FROM outbox.lag()";
    let lag: i64 = client.query_one(lag, &[]).await.unwrap().get(0);
    assert_eq!(lag, 1);
    world.start_relay().await.unwrap();
    until("6 is published", SETTLE, || async {
        let runs: Vec<String> = world
            .messages()
            .await
            .unwrap()
            .into_iter()
            .map(|seen| seen.event.unwrap().run)
            .collect();
        (runs == ["kept", "mine", "kept"]).then_some(()).ok_or_else(|| format!("{runs:?}"))
    })
    .await;
}
