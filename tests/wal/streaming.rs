//! The stream in good times.

use outboxd::error::Kind;
use outboxd::lsn::Lsn;
use outboxd::sandbox::{PostgresOptions, Stop};
use outboxd::wal::{Link, WalItem, connect};
use std::time::Duration;
use tokio::time::{Instant, timeout};

use super::{
    PATIENCE, confirmed, eventually, lsn, read_transactions, server, source, stream, text,
    walsender_pid,
};

#[tokio::test]
async fn what_is_confirmed_moves_the_slot_and_nothing_else_does() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    let (_control, mut stream) = stream(&postgres).await;
    client.batch_execute("INSERT INTO t VALUES (1, 'first')").await.unwrap();
    let (end, inserts) = read_transactions(&mut stream, 1).await;
    // Binary: an int8 of 8 bytes, then the text as it is.
    assert!(inserts[0].windows(17).any(|part| part == b"b\0\0\0\x08\0\0\0\0\0\0\0\x01b\0\0\0"));
    assert!(inserts[0].ends_with(b"first"));

    eventually("the server knows that we received it", async || {
        text(&client, "SELECT write_lsn::text FROM pg_stat_replication")
            .await
            .is_some_and(|write| write.parse::<Lsn>().unwrap() >= end)
    })
    .await;
    assert!(confirmed(&client).await < end);
    stream.confirm(end);
    eventually("the slot moves", async || confirmed(&client).await == end).await;
    stream.confirm(Lsn(1));

    client.batch_execute("INSERT INTO t VALUES (2, 'second')").await.unwrap();
    let (second, _) = read_transactions(&mut stream, 1).await;
    stream.confirm(second);
    // The last confirmation is not lost, however soon the end follows.
    stream.stop(PATIENCE).await.unwrap();
    assert_eq!(confirmed(&client).await, second);
    eventually("the walsender left", async || {
        text(&client, "SELECT count(*)::text FROM pg_stat_replication").await.unwrap() == "0"
    })
    .await;
}

#[tokio::test]
async fn a_dropped_stream_leaves_the_slot_where_it_was_and_free() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    let before = confirmed(&client).await;
    let (_control, mut first) = stream(&postgres).await;
    client.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    read_transactions(&mut first, 1).await;
    drop(first);
    eventually("the slot is free", async || {
        text(&client, "SELECT active::text FROM pg_replication_slots").await.unwrap() == "false"
    })
    .await;
    assert_eq!(confirmed(&client).await, before);
    let (_control, mut second) = stream(&postgres).await;
    let (_, again) = read_transactions(&mut second, 1).await;
    assert!(again[0].ends_with(b"x"));
}

#[tokio::test]
async fn keepalives_bring_the_position_when_others_write() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    let (_control, mut stream) = stream(&postgres).await;
    client
        .batch_execute("CREATE TABLE noise (b text); INSERT INTO noise SELECT repeat('x', 1000) FROM generate_series(1, 5000)")
        .await
        .unwrap();
    let end = lsn(&client, "SELECT pg_current_wal_lsn()::text").await;
    let mut reached = Lsn::ZERO;
    while reached < end {
        for item in timeout(PATIENCE, stream.next()).await.unwrap().unwrap() {
            if let WalItem::Keepalive { wal_end } = item {
                assert!(wal_end >= reached);
                reached = wal_end;
                stream.confirm(reached);
            }
        }
    }
    eventually("the slot follows", async || confirmed(&client).await >= end).await;
}

#[tokio::test]
async fn a_consumer_that_does_not_read_keeps_its_connection_and_misses_nothing() {
    let options = PostgresOptions::default().set("wal_sender_timeout", "2s");
    let (postgres, client) = server(options).await;
    let Link { control: _control, replication, .. } =
        connect(&source(&postgres.unix_url())).await.unwrap();
    let mut stream = replication.with_queue_bytes(64 << 10).start("slot", "pub").await.unwrap();
    // More than queue and socket hold: the walsender stands still in the middle.
    client
        .batch_execute("INSERT INTO t SELECT i, repeat('x', 10000) FROM generate_series(1, 5000) i")
        .await
        .unwrap();
    let pid = walsender_pid(&client).await;
    let replied = "SELECT extract(epoch FROM reply_time)::float8::text FROM pg_stat_replication";
    let replied = async || text(&client, replied).await.unwrap().parse::<f64>().unwrap();
    let start = replied().await;
    eventually("three timeouts pass, with reports", async || replied().await - start > 6.0).await;
    let (_, inserts) = read_transactions(&mut stream, 1).await;
    assert_eq!(inserts.len(), 5000);
    assert_eq!(walsender_pid(&client).await, pid, "the connection was lost");
}

#[tokio::test]
async fn messages_larger_than_any_buffer_come_whole() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    let (_control, mut stream) = stream(&postgres).await;
    for (number, bytes) in [(1, 40_000_000), (2, 10), (3, 140_000), (4, 1)] {
        let sql = format!("INSERT INTO t VALUES ({number}, repeat('y', {bytes}))");
        client.batch_execute(&sql).await.unwrap();
        let (_, inserts) = read_transactions(&mut stream, 1).await;
        assert!(inserts[0].len() >= bytes && inserts[0].len() < bytes + 60);
        assert!(inserts[0][inserts[0].len() - bytes..].iter().all(|byte| *byte == b'y'));
    }
}

#[tokio::test]
async fn a_stop_in_the_middle_of_a_transaction_is_quick_and_loses_no_confirmation() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    let Link { control: _control, replication, .. } =
        connect(&source(&postgres.unix_url())).await.unwrap();
    let mut stream = replication.with_queue_bytes(64 << 10).start("slot", "pub").await.unwrap();
    client.batch_execute("INSERT INTO t VALUES (1, 'small')").await.unwrap();
    let (end, _) = read_transactions(&mut stream, 1).await;
    client
        .batch_execute("INSERT INTO t SELECT i, repeat('x', 2000) FROM generate_series(1, 60000) i")
        .await
        .unwrap();
    timeout(PATIENCE, stream.next()).await.unwrap().unwrap();
    stream.confirm(end);
    let start = Instant::now();
    stream.stop(PATIENCE).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(confirmed(&client).await, end);
    eventually("the slot is free", async || {
        text(&client, "SELECT active::text FROM pg_replication_slots").await.unwrap() == "false"
    })
    .await;
}

#[tokio::test]
async fn an_idle_stream_stays_far_beyond_the_timeout() {
    let options = PostgresOptions::default().set("wal_sender_timeout", "1s");
    let (postgres, client) = server(options).await;
    let (control, mut stream) = stream(&postgres).await;
    let idle = async {
        loop {
            for item in stream.next().await.unwrap() {
                if let WalItem::Keepalive { wal_end } = item {
                    stream.confirm(wal_end);
                }
            }
        }
    };
    assert!(timeout(Duration::from_secs(5), idle).await.is_err());
    control.ping().await.unwrap();
    assert!(!postgres.log().contains("replication timeout"));
    client.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    read_transactions(&mut stream, 1).await;
}

#[tokio::test]
async fn an_idle_stream_does_not_hold_up_a_fast_shutdown() {
    let (mut postgres, client) = server(PostgresOptions::default()).await;
    let (control, mut stream) = stream(&postgres).await;
    client.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    let (end, _) = read_transactions(&mut stream, 1).await;
    stream.confirm(end);
    let follower = tokio::spawn(async move {
        loop {
            match stream.next().await {
                Ok(items) => items.iter().for_each(|item| {
                    if let WalItem::Keepalive { wal_end } = item {
                        stream.confirm(*wal_end);
                    }
                }),
                Err(failure) => return failure,
            }
        }
    });
    let took = postgres.stop(Stop::Fast).await.unwrap();
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(follower.await.unwrap().kind, Kind::SourceShutdown);
    assert_eq!(control.closed().await.kind, Kind::SourceShutdown);
}
