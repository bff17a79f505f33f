//! Restores to an older point with real copies of a data directory: the relay refuses, `outboxd recover`
//! lists what was lost, and the new history arrives whole though its numbers were used before.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use outboxd::sandbox::{
    Broker, Nats, Postgres, PostgresOptions, STREAM, Stop, World, WorldOptions, stream,
};
use serde_json::Value;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::look::{self, until};
use crate::support::{SETTLE, log_tail, options};
use crate::{WATCHED, not_ready, skipped, swept_often, write};

const QUARANTINE: &str = "LOST";

fn run(command: &mut Command) {
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}

fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-a").arg(from).arg(to));
}

/// Events of fifty runs in one transaction each hundred, numbered from these two on.
async fn write_many(client: &Client, first: i64, last: i64) {
    let sql = "SELECT outbox.publish(run_id => 'run-' || n % 50, kind => 'k', id => id, \
                 payload => format('{\"id\":\"%s\",\"run\":\"run-%s\",\"n\":%s}', id, n % 50, n)::json) \
               FROM (SELECT n, gen_random_uuid() AS id FROM generate_series($1::int8, $2::int8) n) r";
    for from in (first..=last).step_by(100) {
        client.query(sql, &[&from, &(from + 99).min(last)]).await.unwrap();
    }
}

async fn ids(client: &Client, above: i64) -> HashSet<Uuid> {
    let sql = "SELECT id FROM outbox.event WHERE (payload->>'n')::int8 > $1";
    client.query(sql, &[&above]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// Everything that is committed is in stream *and* ledger.
async fn recorded(world: &World) {
    world.settle(SETTLE).await.unwrap();
    let committed = world.committed().await.unwrap().len();
    until("receipts", SETTLE, || async {
        let recorded = world.recorded("events").await.unwrap().len();
        (recorded >= committed).then_some(()).ok_or_else(|| format!("{recorded}"))
    })
    .await;
}

async fn count(world: &World, name: &str) -> u64 {
    stream::state(&world.broker.connect().await.unwrap(), name).await.unwrap().messages
}

/// `outboxd recover` with these arguments: its report, and whether it was content.
async fn recover(world: &World, arguments: &[&str]) -> (Value, bool) {
    let arguments = [&["recover", "--json"], arguments].concat();
    let output = world.relay.output(&arguments).await.unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout);
    (report.unwrap_or_else(|error| panic!("{error}: {words}")), output.status.success())
}

fn orphans(report: &Value) -> Vec<Uuid> {
    let listed = report["destinations"][0]["orphans"].as_array().unwrap();
    listed.iter().map(|one| one["id"].as_str().unwrap().parse().unwrap()).collect()
}

/// The relay refuses and publishes nothing; `recover` lists exactly what was lost, and nothing happens
/// without `--yes`; then all that is new arrives, once and in order, and what was there does not again.
async fn goes_on(world: &mut World, client: &Client, lost: &HashSet<Uuid>, new: usize) {
    let before = count(world, STREAM).await;
    world.relay.start().unwrap();
    not_ready(world, &["history-lost"]).await;
    let (_, health) = world.relay.get("/healthz").await.unwrap();
    assert!(health.contains("outboxd recover"), "the next command: {health}");
    tokio::time::sleep(WATCHED).await;
    assert_eq!(count(world, STREAM).await, before, "{}", log_tail(world));
    world.relay.terminate(SETTLE).await.unwrap();

    let (report, content) = recover(world, &[]).await;
    assert!(!content, "{report}");
    let listed = orphans(&report);
    assert_eq!(listed.len(), lost.len(), "listed once each");
    assert_eq!(&listed.into_iter().collect::<HashSet<_>>(), lost);
    let (report, content) = recover(world, &["--dry-run"]).await;
    assert!(content && report["done"] == false, "{report}");
    assert_eq!(count(world, STREAM).await, before);

    let (report, content) = recover(world, &["--yes", "--quarantine", QUARANTINE]).await;
    assert!(content && report["done"] == true, "{report}");
    assert_eq!(report["new_generation"], 2, "{report}");
    assert_eq!(count(world, QUARANTINE).await, u64::try_from(lost.len()).unwrap());
    assert_eq!(count(world, STREAM).await, before + 1, "the boundary");

    world.start_relay().await.unwrap();
    let committed = world.committed().await.unwrap().len();
    until("the new history", SETTLE, || async {
        let verdict = world.judge(&[]).await.unwrap();
        (verdict.missing.count == 0).then_some(()).ok_or_else(|| format!("{verdict}"))
    })
    .await;
    tokio::time::sleep(WATCHED).await;
    let verdict = world.judge(&[]).await.unwrap();
    println!("{verdict}");
    assert_eq!(verdict.events, committed);
    let faults = [&verdict.missing, &verdict.copies, &verdict.order_violations];
    assert!(faults.iter().all(|one| one.count == 0), "{verdict}\n{}", log_tail(world));
    // What was lost stays where it is, and the boundary is no event.
    assert_eq!(verdict.phantoms.count, lost.len() + 1, "{verdict}");
    let total = before + 1 + u64::try_from(new).unwrap();
    assert_eq!(count(world, STREAM).await, total, "all of the new, and nothing else");

    // The next start has nothing to say.
    world.relay.kill9().unwrap();
    write(client, &["last"], 1, 5).await;
    world.start_relay().await.unwrap();
    until("five more", SETTLE, || async {
        let messages = count(world, STREAM).await;
        (messages == total + 5).then_some(()).ok_or_else(|| format!("{messages}"))
    })
    .await;
    let (report, content) = {
        world.relay.terminate(SETTLE).await.unwrap();
        recover(world, &[]).await
    };
    assert!(content && orphans(&report).is_empty(), "{report}");
}

/// A copy of the files of the stopped server, put back after a thousand more events.
#[tokio::test]
async fn a_thousand_events_back() {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write_many(&client, 1, 500).await;
    recorded(&world).await;
    drop(client);
    world.relay.terminate(SETTLE).await.unwrap();
    world.postgres.stop(Stop::Fast).await.unwrap();
    let backup = tempfile::tempdir().unwrap();
    let (data, saved) = (world.postgres.data_dir(), backup.path().join("data"));
    copy(&data, &saved);

    world.postgres.restart().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    world.start_relay().await.unwrap();
    write_many(&client, 501, 1_500).await;
    recorded(&world).await;
    let lost = ids(&client, 500).await;
    assert_eq!(lost.len(), 1_000);
    drop(client);
    world.relay.terminate(SETTLE).await.unwrap();
    world.postgres.stop(Stop::Fast).await.unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    copy(&saved, &data);

    world.postgres.restart().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write_many(&client, 501, 1_000).await;
    goes_on(&mut world, &client, &lost, 500).await;
}

/// Where WAL segments go; the server's user writes there.
fn archiving() -> (WorldOptions, PathBuf) {
    let archive = tempfile::tempdir().unwrap().keep();
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(&archive, std::fs::Permissions::from_mode(0o777)).unwrap();
    let command = format!("cp %p {}/%f", archive.display());
    let postgres = PostgresOptions::default()
        .set("archive_mode", "on")
        .set("archive_command", &command)
        .set("restore_command", &format!("cp {}/%f %p", archive.display()));
    (WorldOptions { postgres, ..swept_often() }, archive)
}

/// A base backup while the server runs, and the archive of its WAL, replayed to a position between two
/// transactions. Such a backup has no slots: the restored server has none.
#[tokio::test]
async fn back_to_a_position() {
    let (options, archive) = archiving();
    let mut world = World::start(options).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    let version = client.query_one("SELECT current_setting('server_version_num')::int4", &[]);
    if version.await.unwrap().get::<_, i32>(0) < 150_000 {
        return skipped("back_to_a_position", "the backup functions have other names");
    }
    write_many(&client, 1, 100).await;
    recorded(&world).await;

    let backup = tempfile::tempdir().unwrap();
    let (data, saved) = (world.postgres.data_dir(), backup.path().join("data"));
    client.query("SELECT pg_backup_start('test', true)", &[]).await.unwrap();
    copy(&data, &saved);
    let stopped = client.query_one("SELECT labelfile FROM pg_backup_stop()", &[]).await.unwrap();
    let label: String = stopped.get(0);
    write_many(&client, 101, 200).await;
    recorded(&world).await;
    let row = client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap();
    let target: String = row.get(0);
    write_many(&client, 201, 500).await;
    recorded(&world).await;
    let lost = ids(&client, 200).await;
    client.query("SELECT pg_switch_wal()", &[]).await.unwrap();
    until("WAL archived", SETTLE, || async {
        let sql = "SELECT last_archived_wal IS NOT NULL AND last_archived_wal >= \
                   pg_walfile_name($1::text::pg_lsn) FROM pg_stat_archiver";
        let done: bool = client.query_one(sql, &[&target]).await.unwrap().get(0);
        done.then_some(()).ok_or_else(|| "not yet".to_owned())
    })
    .await;
    drop(client);
    world.relay.terminate(SETTLE).await.unwrap();
    world.postgres.stop(Stop::Fast).await.unwrap();

    std::fs::remove_dir_all(&data).unwrap();
    copy(&saved, &data);
    for place in ["pg_replslot", "pg_wal"] {
        let place = data.join(place);
        for entry in std::fs::read_dir(&place).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true if entry.file_name() == "archive_status" => {}
                true => std::fs::remove_dir_all(entry.path()).unwrap(),
                false => std::fs::remove_file(entry.path()).unwrap(),
            }
        }
    }
    std::fs::remove_file(data.join("postmaster.pid")).unwrap();
    world.postgres.write_file("backup_label", &label).unwrap();
    world.postgres.write_file("recovery.signal", "").unwrap();
    world.postgres.configure("recovery_target_lsn", &target).unwrap();
    world.postgres.configure("recovery_target_action", "promote").unwrap();
    world.postgres.restart().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    until("promoted", SETTLE, || async {
        let sql = "SELECT pg_is_in_recovery()";
        let standby: bool = client.query_one(sql, &[]).await.unwrap().get(0);
        (!standby).then_some(()).ok_or_else(|| "in recovery".to_owned())
    })
    .await;
    let row = client.query_one("SELECT count(*) FROM outbox.event", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 200);
    write_many(&client, 201, 350).await;
    goes_on(&mut world, &client, &lost, 150).await;
    std::fs::remove_dir_all(archive).unwrap();
}

/// A table of the application's own with numbers as ids: the new events have number *and* id of lost ones,
/// and committed at positions that the old history had used, too. They are not taken for published, and
/// the server, which remembers ids for two minutes, does not take them for copies.
#[tokio::test]
async fn ids_that_are_used_again() {
    let postgres = Postgres::start().await.unwrap();
    let client = postgres.connect().await.unwrap();
    client
        .batch_execute(
            "CREATE SCHEMA app; CREATE TABLE app.outbox (seq bigserial PRIMARY KEY, \
                 id bigint NOT NULL, run_id text NOT NULL, kind text NOT NULL, payload json, \
                 created_at timestamp DEFAULT now())",
        )
        .await
        .unwrap();
    let source = "table = \"app.outbox\"\n[source.columns]\ntenant = false\nversion = false\n\
                  headers = false\n";
    let options = WorldOptions { source: source.to_owned(), ..options() };
    let broker = Broker::Single(Box::new(Nats::start().await.unwrap()));
    let insert = "INSERT INTO app.outbox (id, run_id, kind, payload) \
                  SELECT n, 'run', 'k', '{}' FROM generate_series($1::int8, $2::int8) AS n";
    let mut world = World::assemble(options, postgres, broker).await.unwrap();
    client.query(insert, &[&31_i64, &40_i64]).await.unwrap();
    world.start_relay().await.unwrap();
    arrived(&world, 10).await;
    world.relay.terminate(SETTLE).await.unwrap();
    drop(client);
    world.postgres.stop(Stop::Fast).await.unwrap();
    let backup = tempfile::tempdir().unwrap();
    let (data, saved) = (world.postgres.data_dir(), backup.path().join("data"));
    copy(&data, &saved);

    world.postgres.restart().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    world.start_relay().await.unwrap();
    client.query(insert, &[&41_i64, &60_i64]).await.unwrap();
    arrived(&world, 30).await;
    world.relay.terminate(SETTLE).await.unwrap();
    drop(client);
    world.postgres.stop(Stop::Fast).await.unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    copy(&saved, &data);

    world.postgres.restart().await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    client.query(insert, &[&41_i64, &60_i64]).await.unwrap();
    // The WAL is further than it ever was.
    look::noise(&client, 2, Duration::ZERO).await;
    world.relay.start().unwrap();
    not_ready(&world, &["history-lost"]).await;
    assert_eq!(count(&world, STREAM).await, 30);
    world.relay.terminate(SETTLE).await.unwrap();
    let (report, content) = recover(&world, &["--yes"]).await;
    assert!(content, "{report}");
    assert_eq!(report["destinations"][0]["orphans"].as_array().unwrap().len(), 20, "{report}");
    world.start_relay().await.unwrap();
    arrived(&world, 30 + 1 + 20).await;
    tokio::time::sleep(WATCHED).await;
    let messages = world.messages().await.unwrap();
    let ids: Vec<String> = messages.iter().skip(31).map(|seen| seen.msg_id.clone()).collect();
    let wanted: Vec<String> = (41..=60).map(|id| format!("world:2:{id}")).collect();
    assert_eq!(ids, wanted);
}

/// A command that is cut off between the message to consumers and the ledger is run again: it finds the
/// same, begins the same generation, and the message is there once.
#[tokio::test]
async fn a_recovery_that_is_cut_off() {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a"], 1, 10).await;
    recorded(&world).await;
    world.relay.terminate(SETTLE).await.unwrap();
    let lost = ids(&client, 5).await;
    client
        .batch_execute(
            "DELETE FROM outbox.event WHERE seq > 5; SELECT setval('outbox.event_seq', 5); \
             ALTER TABLE outbox.receipt ADD CONSTRAINT stop CHECK (generation < 2) NOT VALID",
        )
        .await
        .unwrap();
    let output = world.relay.output(&["recover", "--yes", "--json"]).await.unwrap();
    assert!(!output.status.success());
    assert_eq!(count(&world, STREAM).await, 11);
    client.batch_execute("ALTER TABLE outbox.receipt DROP CONSTRAINT stop").await.unwrap();
    let (report, content) = recover(&world, &["--yes"]).await;
    assert!(content && report["new_generation"] == 2, "{report}");
    assert_eq!(orphans(&report).into_iter().collect::<HashSet<_>>(), lost);
    write(&client, &["b"], 1, 5).await;
    arrives(&mut world, lost.len() + 1).await;
}

async fn arrived(world: &World, messages: u64) {
    until("messages", SETTLE, || async {
        let seen = count(world, STREAM).await;
        (seen == messages).then_some(()).ok_or_else(|| format!("{seen}\n{}", log_tail(world)))
    })
    .await;
}

/// Restored to before an earlier recovery: the stream is of a later generation than the table, and the new
/// one is above both. What both have is not sent again.
#[tokio::test]
async fn a_stream_of_a_later_generation() {
    let mut world = World::prepare(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    client.batch_execute("UPDATE outbox.relay SET generation = 4").await.unwrap();
    world.start_relay().await.unwrap();
    write(&client, &["a"], 1, 10).await;
    recorded(&world).await;
    world.relay.terminate(SETTLE).await.unwrap();
    let restored =
        "UPDATE outbox.relay SET generation = 1; UPDATE outbox.receipt SET floor_seq = 0";
    client.batch_execute(restored).await.unwrap();
    write(&client, &["a"], 11, 5).await;
    world.relay.start().unwrap();
    not_ready(&world, &["history-lost", "generation 4"]).await;
    world.relay.terminate(SETTLE).await.unwrap();
    let words = String::from_utf8(world.relay.output(&["recover"]).await.unwrap().stdout).unwrap();
    println!("{words}");
    for word in
        ["generation 4", "10 events of this database, 0 orphans", "generation 5 would begin"]
    {
        assert!(words.contains(word), "{word}: {words}");
    }
    let (report, content) = recover(&world, &["--yes"]).await;
    assert!(content && report["new_generation"] == 5, "{report}");
    arrives(&mut world, 1).await;
}

/// The outbox alone is older: the ledger calls numbers published that other events have now.
#[tokio::test]
async fn an_outbox_without_its_ledger() {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    recorded(&world).await;
    world.relay.terminate(SETTLE).await.unwrap();
    let lost = ids(&client, 5).await;
    client
        .batch_execute(
            "DELETE FROM outbox.event WHERE seq > 10; SELECT setval('outbox.event_seq', 10)",
        )
        .await
        .unwrap();
    write(&client, &["c"], 1, 5).await;
    let (report, content) = recover(&world, &["--yes"]).await;
    assert!(content, "{report}");
    assert_eq!(orphans(&report).into_iter().collect::<HashSet<_>>(), lost);
    arrives(&mut world, lost.len() + 1).await;
}

/// The ledger alone is older: what was published is in the stream, and is not sent again.
#[tokio::test]
async fn a_ledger_without_its_outbox() {
    let mut world = World::start(swept_often()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 10).await;
    recorded(&world).await;
    world.relay.terminate(SETTLE).await.unwrap();
    client
        .batch_execute(
            "UPDATE outbox.destination SET receipt_id = (SELECT max(id) FROM outbox.receipt); \
             DELETE FROM outbox.receipt WHERE id > 1; \
             UPDATE outbox.destination SET frontier = 2, holes = '{}'",
        )
        .await
        .unwrap();
    write(&client, &["a", "b"], 11, 5).await;
    let (report, content) = recover(&world, &["--yes"]).await;
    assert!(content && orphans(&report).is_empty(), "{report}");
    assert_eq!(report["destinations"][0]["events"], 20, "{report}");
    arrives(&mut world, 1).await;
}

/// All that is committed arrives once and in order, beside so many other messages.
async fn arrives(world: &mut World, others: usize) {
    world.start_relay().await.unwrap();
    until("everything", SETTLE, || async {
        let verdict = world.judge(&[]).await.unwrap();
        (verdict.missing.count == 0).then_some(()).ok_or_else(|| format!("{verdict}"))
    })
    .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let verdict = world.judge(&[]).await.unwrap();
    let faults = [&verdict.missing, &verdict.copies, &verdict.order_violations];
    assert!(faults.iter().all(|one| one.count == 0), "{verdict}\n{}", log_tail(world));
    assert_eq!(verdict.phantoms.count, others, "{verdict}");
}
