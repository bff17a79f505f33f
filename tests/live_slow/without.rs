//! Where there is no slot to stream from, the table is relayed, and the relay says why. When there
//! is one again, it streams, and no run has lost its order.

use std::fs;
use std::time::Duration;

use outboxd::config::{ColumnMap, QualifiedName, SourceConfig};
use outboxd::sandbox::{PostgresOptions, Stop, World, WorldOptions};
use tokio_postgres::Client;

use crate::support::look::until;
use crate::support::{SETTLE, log_tail, options};
use crate::{arrived, drop_slot, judge, not_ready, swept_often, wait_for, write};

async fn slots(client: &Client) -> i64 {
    let sql = "SELECT count(*) FROM pg_replication_slots";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

fn edit(world: &World, from: &str, to: &str) {
    let file = world.relay.configuration();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(&file, text.replace(from, to)).unwrap();
}

/// WAL that holds too little for a stream: prepared and run without one, then told to stream, then
/// able to.
async fn without_logical_wal(settings: PostgresOptions) {
    let relay = "stream = false".into();
    let options = WorldOptions { relay, postgres: settings, ..options() };
    let mut world = World::prepare(options).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 20).await;
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 21, 20).await;
    arrived(&world, 80).await;
    assert_eq!(slots(&client).await, 0);
    world.relay.terminate(SETTLE).await.unwrap();

    edit(&world, "stream = false", "stream = true");
    write(&client, &["a", "b"], 41, 20).await;
    world.relay.start().unwrap();
    not_ready(&world, &["relaying from the table", "wal-level"]).await;
    write(&client, &["a", "b"], 61, 20).await;
    arrived(&world, 160).await;
    assert_eq!(slots(&client).await, 0);
    let (status, body) = world.relay.get("/healthz").await.unwrap();
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("set wal_level = logical"), "{body}");

    world.postgres.stop(Stop::Fast).await.unwrap();
    for (name, value) in [("wal_level", "logical"), ("max_wal_senders", "10")] {
        world.postgres.configure(name, value).unwrap();
    }
    world.postgres.restart().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 81, 20).await;
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    write(&client, &["a", "b"], 101, 20).await;
    judge(&world, 240).await;
    world.relay.wait_ready(SETTLE).await.unwrap();
}

#[tokio::test]
async fn wal_level_replica() {
    without_logical_wal(PostgresOptions::default().set("wal_level", "replica")).await;
}

#[tokio::test]
async fn wal_level_minimal_without_walsenders() {
    let settings = PostgresOptions::default().set("wal_level", "minimal");
    without_logical_wal(settings.set("max_wal_senders", "0")).await;
}

fn source(url: &str) -> SourceConfig {
    SourceConfig {
        url: url.to_owned().into(),
        replication_url: None,
        slot: "outboxd_world".into(),
        publication: "outboxd_world".into(),
        table: QualifiedName { schema: "outbox".into(), name: "event".into() },
        columns: ColumnMap::default(),
        mark: Default::default(),
        connect_timeout: Duration::from_secs(10),
    }
}

/// Somebody else reads from the slot, and goes.
#[tokio::test]
async fn a_slot_that_a_stranger_holds() {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(SETTLE).await.unwrap();
    let url = format!("{}?application_name=curious", world.postgres.unix_url());
    let link = outboxd::wal::connect(&source(&url)).await.unwrap();
    let stream = link.replication.start("outboxd_world", "outboxd_world").await.unwrap();
    write(&client, &["a", "b"], 11, 20).await;
    world.relay.start().unwrap();
    not_ready(&world, &["slot-held", "outboxd_world", "curious"]).await;
    write(&client, &["a", "b"], 31, 20).await;
    arrived(&world, 100).await;
    drop(stream);
    write(&client, &["a", "b"], 51, 20).await;
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    write(&client, &["a", "b"], 71, 20).await;
    judge(&world, 180).await;
    world.relay.wait_ready(SETTLE).await.unwrap();
    assert_eq!(slots(&client).await, 1);
    assert!(!world.relay.log().contains("made a new slot"), "{}", log_tail(&world));
}

const PUBLISH: &str = "CREATE PUBLICATION outboxd_world FOR TABLE outbox.event \
                       WITH (publish = 'insert, truncate', publish_via_partition_root = true)";

/// Rows between are of no publication that the slot knows of; waiting does not help.
#[tokio::test]
async fn a_publication_that_is_made_again() {
    let world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    client.batch_execute("DROP PUBLICATION outboxd_world").await.unwrap();
    write(&client, &["a", "b"], 11, 25).await;
    // The server has come to these rows.
    not_ready(&world, &["publication-missing"]).await;
    client.batch_execute(PUBLISH).await.unwrap();
    write(&client, &["a", "b"], 36, 25).await;
    judge(&world, 120).await;
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    write(&client, &["a", "b"], 61, 10).await;
    judge(&world, 140).await;
    assert!(world.relay.log().contains("made a new slot"), "{}", log_tail(&world));
}

/// The order in which a hurried operator does it: the slot, a row, and the publication last.
#[tokio::test]
async fn a_publication_that_is_younger_than_the_slot() {
    let mut world = World::prepare(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let make = "SELECT pg_create_logical_replication_slot('outboxd_world', 'pgoutput')";
    client.batch_execute("DROP PUBLICATION outboxd_world").await.unwrap();
    drop_slot(&client).await;
    client.query(make, &[]).await.unwrap();
    write(&client, &["a", "b"], 1, 25).await;
    client.batch_execute(PUBLISH).await.unwrap();
    world.relay.start().unwrap();
    write(&client, &["a", "b"], 26, 25).await;
    judge(&world, 100).await;
    assert!(world.relay.log().contains("made a new slot"), "{}", log_tail(&world));
    world.relay.wait_ready(SETTLE).await.unwrap();
}

/// The operator wants to make slots by hand: nobody else does, and the table is relayed meanwhile.
#[tokio::test]
async fn a_slot_that_only_the_operator_makes() {
    let relay = "sweep_interval = \"1s\"\nauto_recreate = false".into();
    let mut world = World::start(WorldOptions { relay, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    drop_slot(&client).await;
    write(&client, &["a", "b"], 11, 25).await;
    not_ready(&world, &["slot-missing", "outboxd_world"]).await;
    arrived(&world, 70).await;
    let (status, body) = world.relay.get("/healthz").await.unwrap();
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("outboxd init"), "{body}");
    // Also a relay that starts now does not make it.
    world.relay.terminate(SETTLE).await.unwrap();
    write(&client, &["a", "b"], 36, 10).await;
    world.relay.start().unwrap();
    arrived(&world, 90).await;
    assert_eq!(slots(&client).await, 0);
    world.relay.run(&["init"]).await.unwrap();
    write(&client, &["a", "b"], 46, 10).await;
    until("it streams", SETTLE, || async {
        let (status, body) = world.relay.get("/readyz").await.map_err(|one| one.to_string())?;
        (status == 200).then_some(()).ok_or_else(|| format!("{body}\n{}", log_tail(&world)))
    })
    .await;
    write(&client, &["a", "b"], 56, 10).await;
    judge(&world, 130).await;
    assert!(!world.relay.log().contains("made a new slot"), "{}", log_tail(&world));
}

/// More rows of a run that waits behind a dead letter than one look takes: the others are found behind
/// them, and all of it goes in its order when the letter is closed.
#[tokio::test]
async fn a_blocked_run_hides_no_other_where_only_the_table_is_relayed() {
    let (relay, destination) = ("stream = false".into(), "on_dead_letter = \"block-run\"".into());
    let options = WorldOptions { relay, destination, ..options() };
    let mut world = World::prepare(options).await.unwrap();
    world.start_relay().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let poison = "SELECT outbox.publish('blocked', 'bad', '{}', headers => '{\"Status\": \"1\"}')";
    client.batch_execute(poison).await.unwrap();
    until("the letter", SETTLE, || async {
        let sql = "SELECT count(*) FROM outbox.dead_letter";
        let letters: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (letters == 1).then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    let many = "SELECT outbox.publish('blocked', 'k', id => id, \
                  payload => format('{\"id\":\"%s\",\"run\":\"blocked\",\"n\":%s}', id, n)::json) \
                FROM (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 25000) n) r";
    client.query(many, &[]).await.unwrap();
    write(&client, &["a", "b"], 1, 5).await;
    arrived(&world, 10).await;
    assert_eq!(world.messages().await.unwrap().len(), 10);
    let discard = ["dead-letters", "discard", "--all", "--why", "a test"];
    world.relay.run(&discard).await.unwrap();
    arrived(&world, 25_010).await;
    client.batch_execute("DELETE FROM outbox.event WHERE kind = 'bad'").await.unwrap();
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
}
