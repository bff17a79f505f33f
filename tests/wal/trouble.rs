//! What goes wrong with a stream, and the kind by which it is known.

use std::time::Duration;

use outboxd::error::{Failure, Kind};
use outboxd::sandbox::{Mode, Postgres, PostgresOptions, Proxy, Signal, Stop, signal};
use outboxd::wal::{WalStream, connect};
use tokio::time::{Instant, timeout};
use tokio_postgres::Client;

use super::{PATIENCE, eventually, read_transactions, server, source, stream, text, walsender_pid};

async fn start(postgres: &Postgres, slot: &str, publication: &str) -> Result<WalStream, Failure> {
    let link = connect(&source(&postgres.unix_url())).await.unwrap();
    link.replication.start(slot, publication).await
}

async fn refusal(postgres: &Postgres, slot: &str) -> Kind {
    let failure = start(postgres, slot, "pub").await.expect_err(slot);
    assert!(failure.detail.contains(slot), "{failure}");
    failure.kind
}

/// Reads on until the stream fails.
async fn end(stream: &mut WalStream) -> Failure {
    timeout(PATIENCE, async {
        loop {
            if let Err(failure) = stream.next().await {
                return failure;
            }
        }
    })
    .await
    .expect("the stream goes on")
}

#[tokio::test]
async fn slots_that_cannot_be_used_are_told_apart() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    client.batch_execute("CREATE DATABASE other").await.unwrap();
    let sql = "SELECT pg_create_physical_replication_slot('physical');
               SELECT pg_create_logical_replication_slot('decoding', 'test_decoding')";
    client.batch_execute(sql).await.unwrap();
    assert_eq!(refusal(&postgres, "absent").await, Kind::SlotMissing);
    assert_eq!(refusal(&postgres, "physical").await, Kind::SlotForeign);
    assert_eq!(refusal(&postgres, "decoding").await, Kind::SlotForeign);
    let elsewhere = connect(&source(&postgres.url_of("postgres", "other"))).await.unwrap();
    let failure = elsewhere.replication.start("slot", "pub").await.expect_err("other database");
    assert_eq!(failure.kind, Kind::SlotForeign, "{failure}");

    let (_control, _held) = stream(&postgres).await;
    assert_eq!(refusal(&postgres, "slot").await, Kind::SlotHeld);
}

#[tokio::test]
async fn a_publication_that_is_missing_at_the_slots_position() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    let mut stream = start(&postgres, "slot", "later").await.unwrap();
    client.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    client.batch_execute("CREATE PUBLICATION later FOR TABLE t").await.unwrap();
    let failure = end(&mut stream).await;
    // PostgreSQL 18 warns and goes on without its rows, older ones give up.
    assert_eq!(failure.kind, Kind::PublicationMissing, "{failure}");
}

#[tokio::test]
async fn a_lost_slot() {
    let options = PostgresOptions::default().set("max_slot_wal_keep_size", "1MB");
    let (postgres, client) = server(options).await;
    eventually("the slot is lost", async || {
        for _ in 0..3 {
            let sql = "SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000))";
            client.query(sql, &[]).await.unwrap();
            client.query("SELECT pg_switch_wal()", &[]).await.unwrap();
        }
        client.batch_execute("CHECKPOINT").await.unwrap();
        text(&client, "SELECT wal_status FROM pg_replication_slots").await.unwrap() == "lost"
    })
    .await;
    assert_eq!(refusal(&postgres, "slot").await, Kind::SlotLost);
}

#[tokio::test]
async fn a_frozen_walsender_is_noticed() {
    let options = PostgresOptions::default().set("wal_sender_timeout", "2s");
    let (postgres, client) = server(options).await;
    let (_control, mut stream) = stream(&postgres).await;
    client.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    read_transactions(&mut stream, 1).await;
    let pid = walsender_pid(&client).await;
    signal(pid, Signal::Stop).unwrap();
    let start = Instant::now();
    let failure = end(&mut stream).await;
    let took = start.elapsed();
    signal(pid, Signal::Continue).unwrap();
    assert_eq!(failure.kind, Kind::SourceSilent, "{failure}");
    assert!(took < Duration::from_secs(4), "{took:?}");
}

#[tokio::test]
async fn a_frozen_network_is_noticed_and_a_cut_one_at_once() {
    let options = PostgresOptions::default().set("wal_sender_timeout", "2s");
    let (postgres, _client) = server(options).await;
    let proxy = Proxy::start(postgres.port()).await.unwrap();
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());

    let link = connect(&source(&url)).await.unwrap();
    let mut stream = link.replication.start("slot", "pub").await.unwrap();
    proxy.set(Mode::Stall);
    assert_eq!(end(&mut stream).await.kind, Kind::SourceSilent);
    proxy.set(Mode::Pass);
    proxy.cut();

    let mut config = source(&url);
    config.connect_timeout = Duration::from_secs(1);
    let link = connect(&config).await.unwrap();
    proxy.set(Mode::Stall);
    assert_eq!(link.control.ping().await.unwrap_err().kind, Kind::SourceSilent);
    let unreachable = connect(&config).await.err().unwrap();
    assert_eq!(unreachable.kind, Kind::SourceUnreachable, "{unreachable}");
    proxy.cut();
    let closed = timeout(PATIENCE, link.control.closed()).await.unwrap();
    assert_eq!(closed.kind, Kind::SourceUnreachable, "{closed}");
}

async fn terminate(client: &Client, whom: &str) {
    let sql = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {whom}");
    assert_eq!(client.query(&sql, &[]).await.unwrap().len(), 1, "{whom}");
}

#[tokio::test]
async fn terminated_backends_are_told_by_sqlstate() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    let (control, mut stream) = stream(&postgres).await;
    terminate(&client, "backend_type = 'walsender'").await;
    let failure = end(&mut stream).await;
    assert_eq!(failure.kind, Kind::SourceShutdown, "{failure}");
    assert_eq!(failure.sqlstate.as_deref(), Some("57P01"));
    let stopped = stream.stop(PATIENCE).await.unwrap_err();
    assert_eq!(stopped, failure);

    terminate(&client, "application_name = 'outboxd' AND backend_type = 'client backend'").await;
    for _ in 0..2 {
        let closed = timeout(PATIENCE, control.closed()).await.unwrap();
        assert_eq!(closed.sqlstate.as_deref(), Some("57P01"), "{closed}");
    }
    assert!(control.ping().await.is_err());
}

#[tokio::test]
async fn an_unconfirmed_event_does_not_hold_up_a_fast_shutdown() {
    let (mut postgres, client) = server(PostgresOptions::default()).await;
    // The control connection, whose end would tell, is not looked at.
    let (_control, mut stream) = stream(&postgres).await;
    client.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    read_transactions(&mut stream, 1).await;
    drop(client);
    let reader = tokio::spawn(async move { end(&mut stream).await });
    let took = postgres.stop(Stop::Fast).await.unwrap();
    assert!(took < Duration::from_secs(3), "{took:?}");
    let failure = reader.await.unwrap();
    assert_eq!(failure.kind, Kind::SourceShutdown, "{failure}");
}

#[tokio::test]
async fn a_killed_server_ends_both_connections() {
    let (mut postgres, _client) = server(PostgresOptions::default()).await;
    let (control, mut stream) = stream(&postgres).await;
    postgres.kill9().unwrap();
    for failure in [end(&mut stream).await, control.closed().await] {
        // A backend may have had the time to say that another one crashed (57P02).
        let known = [Kind::SourceUnreachable, Kind::SourceShutdown];
        assert!(known.contains(&failure.kind), "{failure}");
    }
}
