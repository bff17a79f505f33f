//! The start-up plan: slots that somebody else moved, clusters that are not the one in which the
//! ledger was written, ledgers that do not belong to the outbox beside them.

use outboxd::sandbox::World;
use tokio_postgres::Client;

use crate::support::{SETTLE, log_tail};
use crate::{WATCHED, gap_closed, judge, not_ready, swept_often, write};

const SLOT: &str = "outboxd_world";

/// A world whose relay was stopped in order, after twenty events.
pub async fn stopped() -> (World, Client) {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(SETTLE).await.unwrap();
    (world, client)
}

/// While the relay is away the slot is dropped and made again under the same name, between rows of
/// the same runs: those before it go first.
#[tokio::test]
async fn a_slot_that_was_made_again_behind_its_back() {
    let (mut world, client) = stopped().await;
    write(&client, &["a", "b"], 11, 25).await;
    client.query("SELECT pg_drop_replication_slot($1::text)", &[&SLOT]).await.unwrap();
    let sql = "SELECT pg_create_logical_replication_slot($1::text, 'pgoutput')";
    client.query(sql, &[&SLOT]).await.unwrap();
    write(&client, &["a", "b"], 36, 25).await;
    world.start_relay().await.unwrap();
    judge(&world, 120).await;
    assert!(world.relay.log().contains("somebody moved it"), "{}", log_tail(&world));
    gap_closed(&world, &client).await;
    world.relay.terminate(SETTLE).await.unwrap();
    write(&client, &["a", "b"], 61, 5).await;
    world.start_relay().await.unwrap();
    judge(&world, 130).await;
    let told = world.relay.log().matches("somebody moved it").count();
    assert_eq!(told, 1, "the next start finds nothing: {}", log_tail(&world));
}

/// The same for a slot that was moved forward.
#[tokio::test]
async fn a_slot_that_was_moved_behind_its_back() {
    let (mut world, client) = stopped().await;
    write(&client, &["a", "b"], 11, 25).await;
    let sql = "SELECT pg_replication_slot_advance($1::text, pg_current_wal_lsn())";
    client.query(sql, &[&SLOT]).await.unwrap();
    write(&client, &["a", "b"], 36, 25).await;
    world.start_relay().await.unwrap();
    judge(&world, 120).await;
    assert!(world.relay.log().contains("somebody moved it"), "{}", log_tail(&world));
}

/// A crash of the server may take the slot back, which is no reason for a gap; neither is a stop.
#[tokio::test]
async fn a_slot_that_was_left_alone() {
    let (mut world, client) = stopped().await;
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 11, 25).await;
    world.settle(SETTLE).await.unwrap();
    drop(client);
    world.postgres.kill9().unwrap();
    world.relay.kill9().unwrap();
    world.postgres.restart().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 36, 5).await;
    world.start_relay().await.unwrap();
    judge(&world, 80).await;
    assert!(!world.relay.log().contains("does not bring"), "{}", log_tail(&world));
}

/// The ledger says that it was written elsewhere, and fits: as after pg_upgrade. What its receipts
/// have as positions lies above all that this cluster has written.
#[tokio::test]
async fn another_cluster_with_the_same_history() {
    let (mut world, client) = stopped().await;
    client
        .batch_execute(
            "UPDATE outbox.relay SET system_identifier = '1'; \
             UPDATE outbox.receipt SET last_lsn = 'FFFF/0' WHERE last_lsn IS NOT NULL; \
             SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots",
        )
        .await
        .unwrap();
    write(&client, &["a", "b"], 11, 25).await;
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 36, 5).await;
    judge(&world, 80).await;
    gap_closed(&world, &client).await;
    let sql = "SELECT generation, system_identifier = (SELECT system_identifier::text \
                 FROM pg_control_system()), \
                 (SELECT count(*) FROM outbox.receipt WHERE last_lsn > pg_current_wal_lsn()) \
                 FROM outbox.relay";
    let row = client.query_one(sql, &[]).await.unwrap();
    let found: (i32, bool, i64) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(found, (1, true, 0));
}

/// Nothing is published, and the cause is told.
async fn refused(world: &mut World, word: &str) {
    let before = world.messages().await.unwrap().len();
    world.relay.start().unwrap();
    not_ready(world, &[word]).await;
    tokio::time::sleep(WATCHED).await;
    assert_eq!(world.messages().await.unwrap().len(), before, "{}", log_tail(world));
}

/// The outbox is older than its ledger: its numbers are given again, to other events.
#[tokio::test]
async fn an_outbox_that_was_restored_without_its_ledger() {
    let (mut world, client) = stopped().await;
    client
        .batch_execute(
            "DELETE FROM outbox.event WHERE seq > 10; SELECT setval('outbox.event_seq', 10)",
        )
        .await
        .unwrap();
    write(&client, &["c"], 1, 5).await;
    refused(&mut world, "ledger-ahead").await;
}

/// The ledger is older than the outbox: it does not know what was published.
#[tokio::test]
async fn a_ledger_that_was_restored_without_its_outbox() {
    let (mut world, client) = stopped().await;
    // So that the ledger is known to be further.
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 11, 25).await;
    world.settle(SETTLE).await.unwrap();
    world.relay.terminate(SETTLE).await.unwrap();
    client
        .batch_execute(
            "UPDATE outbox.destination SET receipt_id = (SELECT max(id) FROM outbox.receipt); \
             DELETE FROM outbox.receipt WHERE id > 2",
        )
        .await
        .unwrap();
    refused(&mut world, "ledger-short").await;
}
