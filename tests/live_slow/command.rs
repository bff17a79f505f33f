//! `outboxd sweep`.

use outboxd::sandbox::{World, WorldOptions};
use serde_json::Value;

use crate::support::{SETTLE, log_tail, options};
use crate::{judge, write};

/// The schedule is a day away: the command finds what was missed, and has it sent.
#[tokio::test]
async fn what_was_missed_is_counted_and_sent_on_demand() {
    let relay = "sweep_interval = \"1d\"".into();
    let mut world = World::start(WorldOptions { relay, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    let nothing: Value =
        serde_json::from_str(&world.relay.run(&["sweep", "--dry-run", "--json"]).await.unwrap())
            .unwrap();
    assert_eq!(nothing.pointer("/destinations/0/undecided"), Some(&Value::from(0)), "{nothing}");
    client.batch_execute("ALTER PUBLICATION outboxd_world DROP TABLE outbox.event").await.unwrap();
    write(&client, &["b"], 1, 50).await;
    client.batch_execute("ALTER PUBLICATION outboxd_world ADD TABLE outbox.event").await.unwrap();
    let said = world.relay.run(&["sweep", "--dry-run"]).await.unwrap();
    assert!(said.contains("events: 50 rows without a receipt"), "{said}\n{}", log_tail(&world));
    assert_eq!(world.messages().await.unwrap().len(), 10);
    let said = world.relay.run(&["sweep", "--json"]).await.unwrap();
    let report: Value = serde_json::from_str(&said).unwrap();
    let count = |name: &str| report.pointer(&format!("/destinations/0/{name}")).cloned();
    assert_eq!((count("undecided"), count("left")), (Some(50.into()), Some(0.into())), "{said}");
    judge(&world, 60).await;
    world.relay.terminate(SETTLE).await.unwrap();
    let alone = world.relay.output(&["sweep"]).await.unwrap();
    assert_eq!(alone.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&alone.stderr).contains("no relay of this name"), "{alone:?}");
}
