//! Hand-over: what a destination can't take waits in the ledger and the table, and the slot's
//! position goes on.

use std::time::Duration;

use outboxd::sandbox::verdict::Verdict;
use outboxd::sandbox::{Mode, Proxy, World, WorldOptions};

use crate::support::look::{self, metric, no_slow_run, until};
use crate::support::{SETTLE, log_tail, options};
use crate::{judge, wait_for, write, write_many};

/// NATS is away, and its events would hold back more WAL than they may: the slot goes on, and
/// everything arrives in commit order afterwards.
#[tokio::test]
async fn wal_that_an_outage_holds_back_is_bounded() {
    let relay = "max_retained_wal = \"16MiB\"\nsweep_interval = \"1s\"".into();
    let mut world = World::start(WorldOptions { relay, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 5).await;
    world.settle(SETTLE).await.unwrap();
    world.nats().unwrap().kill9().unwrap();
    write(&client, &["a", "b"], 6, 100).await;
    let written = look::wal_end(&client).await;
    look::noise(&client, 24, Duration::from_secs(2)).await;
    until("the position passes what NATS has not", SETTLE, || async {
        let confirmed = look::confirmed(&client).await;
        let words = || format!("{confirmed} of {written}\n{}", log_tail(&world));
        (confirmed >= written).then_some(()).ok_or_else(words)
    })
    .await;
    assert_eq!(metric(&world, "outboxd_handed_events_total", "").await, Some(200.0));
    // It is loud, and later events of these runs wait behind.
    assert!(world.relay.log().contains("hold back more WAL"), "{}", log_tail(&world));
    write(&client, &["a", "b", "c"], 106, 10).await;
    // A crash now: the ledger has it all.
    world.relay.kill9().unwrap();
    world.relay.start().unwrap();
    write(&client, &["a", "b", "c"], 116, 10).await;
    world.nats().unwrap().restart().await.unwrap();
    write(&client, &["a", "b", "c"], 126, 10).await;
    judge(&world, 10 + 200 + 90).await;
}

/// A destination that nobody waits for is away for the whole test; the other one gets everything
/// at once, and the slot goes on. When it returns, it gets everything in order.
#[tokio::test]
async fn an_optional_destination_that_is_away_delays_nobody() {
    one_is_away("").await;
}

/// The same without WAL: what the destination misses stays in the table.
#[tokio::test]
async fn without_a_stream_a_destination_that_is_away_delays_nobody() {
    one_is_away("stream = false").await;
}

async fn one_is_away(mode: &str) {
    let mut away = outboxd::sandbox::Nats::start().await.unwrap();
    let more = format!(
        "[destination.archive]\nservers = [\"{}\"]\nstream = \"ARCHIVE\"\nrequired = false\n\
         subject = \"archive.{{kind}}\"",
        away.url()
    );
    let relay = format!("memory = \"4MiB\"\n{mode}");
    let mut world = World::prepare(WorldOptions { relay, more, ..options() }).await.unwrap();
    away.kill9().unwrap();
    world.start_relay().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    // More than memory holds, in a few transactions.
    let rows = 20_000_i64;
    for part in 0..10 {
        write_many(&client, part * rows / 10 + 1, (part + 1) * rows / 10).await;
    }
    until("the events", SETTLE, || async {
        let seen = world.messages().await.unwrap().len();
        let all = usize::try_from(rows).unwrap();
        (seen >= all).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
    if mode.is_empty() {
        world.settle(SETTLE).await.unwrap();
        let handed = metric(&world, "outboxd_handed_events_total", "archive").await.unwrap();
        assert!(handed > 1_000.0, "{handed}\n{}", log_tail(&world));
    }
    away.restart().await.unwrap();
    let archived = async || {
        let client = away.connect().await.unwrap();
        outboxd::sandbox::stream::read(&client, "ARCHIVE", 1).await.unwrap_or_default()
    };
    until("the archive has all", SETTLE, || async {
        let seen = archived().await.len();
        let all = usize::try_from(rows).unwrap();
        (seen >= all).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let committed = world.committed().await.unwrap();
    let verdict = Verdict::of(&committed, &Default::default(), &archived().await, &[]);
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
    wait_for(&world, "outboxd_destination_up", "archive", 1.0).await;
    if !mode.is_empty() {
        return;
    }
    no_slow_run(&world).await;
}

/// One that is there, behind a thin line: it gets what the line takes, the other one what there is.
#[tokio::test]
async fn an_optional_destination_behind_a_thin_line_delays_nobody() {
    let far = outboxd::sandbox::Nats::start().await.unwrap();
    let line = Proxy::start(far.port()).await.unwrap();
    let more = format!(
        "[destination.archive]\nservers = [\"nats://127.0.0.1:{}\"]\nstream = \"ARCHIVE\"\n\
         required = false\nmax_in_flight = 100\nsubject = \"archive.{{kind}}\"",
        line.port()
    );
    let relay = "memory = \"4MiB\"".into();
    let world = World::start(WorldOptions { relay, more, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a"], 1, 1).await;
    world.settle(SETTLE).await.unwrap();
    line.set(Mode::Narrow(100_000));
    let rows = 20_000_i64;
    for part in 0..10 {
        write_many(&client, part * rows / 10 + 1, (part + 1) * rows / 10).await;
    }
    let archived = async || {
        let client = far.connect().await.unwrap();
        outboxd::sandbox::stream::read(&client, "ARCHIVE", 1).await.unwrap_or_default()
    };
    let all = usize::try_from(rows).unwrap() + 1;
    until("the events", SETTLE, || async {
        let seen = world.messages().await.unwrap().len();
        (seen >= all).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let slow = archived().await.len();
    assert!(slow < all / 2, "{slow} of {all}: the other one went at this pace");
    let handed = metric(&world, "outboxd_handed_events_total", "archive").await.unwrap();
    assert!(handed > 1_000.0, "{handed}\n{}", log_tail(&world));
    line.set(Mode::Pass);
    until("the archive has all", SETTLE, || async {
        let seen = archived().await.len();
        (seen >= all).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(&world)))
    })
    .await;
    let (committed, seen) = (world.committed().await.unwrap(), archived().await);
    let verdict = Verdict::of(&committed, &Default::default(), &seen, &[]);
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
    let verdict = world.judge(&[]).await.unwrap();
    assert!(verdict.is_ok(), "{verdict}\n{}", log_tail(&world));
    no_slow_run(&world).await;
}

/// The application deletes rows while their events wait: what is lost is counted and said, and the
/// rest goes on.
#[tokio::test]
async fn rows_that_are_deleted_while_they_wait_are_told() {
    let relay = "max_retained_wal = \"16MiB\"".into();
    let mut world = World::start(WorldOptions { relay, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    world.nats().unwrap().kill9().unwrap();
    write(&client, &["a", "b"], 1, 20).await;
    look::noise(&client, 24, Duration::from_secs(1)).await;
    wait_for(&world, "outboxd_handed_events_total", "", 40.0).await;
    client.execute("DELETE FROM outbox.event WHERE seq IN (3, 4, 30)", &[]).await.unwrap();
    // One of them is in the ledger as gone: somebody meant it.
    let gone = "INSERT INTO outbox.receipt (relay, destination, generation, outcome, seqs, events, \
                    stream, stream_created, stream_seq, stream_msg_id, floor_seq) \
                SELECT relay, destination, generation, 'gone', '{[30,31)}', 1, stream, \
                    stream_created, stream_seq, '', floor_seq FROM outbox.receipt \
                ORDER BY id DESC LIMIT 1";
    client.execute(gone, &[]).await.unwrap();
    world.nats().unwrap().restart().await.unwrap();
    judge(&world, 37).await;
    wait_for(&world, "outboxd_swept_total", "gone", 3.0).await;
    let log = world.relay.log();
    assert!(log.contains("rows were deleted") && log.contains("events=2"), "{log}");
}
