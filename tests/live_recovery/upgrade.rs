//! A new cluster with the old data: pg_upgrade, and dump and restore. The same generation goes on,
//! nothing is lost, nothing is sent twice, and there are no orphans.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use outboxd::sandbox::{Postgres, PostgresOptions, STREAM, Stop, World, WorldOptions, stream};

use crate::support::look::until;
use crate::support::{SETTLE, log_tail};
use crate::{gap_closed, judge, skipped, swept_often, write};

/// The programs of the old cluster: `OUTBOXD_TEST_OLD_PG_BIN`, with all that pg_upgrade needs, or the
/// new ones.
fn old_bin() -> Option<PathBuf> {
    std::env::var_os("OUTBOXD_TEST_OLD_PG_BIN").map(PathBuf::from)
}

/// Runs a program as the user that the servers run as.
fn as_owner(place: &Path, program: &Path) -> Command {
    let owner = std::fs::metadata(place).unwrap();
    let mut command = Command::new(program);
    command.current_dir(place).env("LC_ALL", "C");
    if owner.uid() != std::fs::metadata("/proc/self").unwrap().uid() {
        command.uid(owner.uid()).gid(owner.gid());
    }
    command
}

fn done(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {words}\n{errors}");
    words
}

/// Are there such programs?
fn has(test: &str, programs: &[&str]) -> bool {
    let bin = outboxd::sandbox::postgres_bin().unwrap();
    let missing = programs.iter().find(|one| !bin.join(one).is_file());
    if let Some(program) = missing {
        skipped(test, &format!("there is no {program} in {}", bin.display()));
    }
    missing.is_none()
}

/// Eighty events of which the last were published a moment before the relay was killed, twenty that it
/// did not see, and no slot.
async fn old() -> World {
    let postgres = PostgresOptions { bin: old_bin(), ..PostgresOptions::default() };
    let mut world = World::start(WorldOptions { postgres, ..swept_often() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 1, 20).await;
    world.settle(SETTLE).await.unwrap();
    write(&client, &["a", "b"], 21, 20).await;
    until("events in the stream", SETTLE, || async {
        let broker = world.broker.connect().await.unwrap();
        let seen = stream::state(&broker, STREAM).await.unwrap().messages;
        (seen >= 80).then_some(()).ok_or_else(|| format!("{seen}"))
    })
    .await;
    world.relay.kill9().unwrap();
    write(&client, &["a", "b"], 41, 10).await;
    until("slot dropped", SETTLE, || async {
        let sql = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots";
        client.query(sql, &[]).await.map(drop).map_err(|error| error.to_string())
    })
    .await;
    world
}

/// The relay goes on in the new cluster.
async fn goes_on(mut world: World, new: Postgres) {
    let file = world.relay.configuration();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace(&world.postgres.unix_url(), &new.unix_url())).unwrap();
    world.postgres = new;
    let client = world.postgres.connect().await.unwrap();
    write(&client, &["a", "b"], 51, 5).await;
    world.start_relay().await.unwrap();
    write(&client, &["a", "b"], 56, 5).await;
    judge(&world, 120).await;
    gap_closed(&world, &client).await;
    assert!(world.relay.log().contains("another cluster"), "{}", log_tail(&world));
    world.relay.terminate(SETTLE).await.unwrap();
    let sound = world.relay.run(&["recover"]).await.unwrap();
    assert!(sound.contains("nothing") && sound.contains("to recover"), "{sound}");
    let row = client.query_one("SELECT generation FROM outbox.relay", &[]).await.unwrap();
    assert_eq!(row.get::<_, i32>(0), 1);
}

/// A cluster with an identifier of its own: those of the sandbox are copies of one.
async fn fresh() -> Postgres {
    let mut new = Postgres::start().await.unwrap();
    new.stop(Stop::Fast).await.unwrap();
    std::fs::remove_dir_all(new.data_dir()).unwrap();
    let mut command = as_owner(new.socket_dir(), &new.bin().join("initdb"));
    command.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-D"]);
    done(command.arg(new.data_dir()));
    new
}

#[tokio::test]
async fn pg_upgrade() {
    if !has("pg_upgrade", &["pg_upgrade", "pg_controldata", "pg_resetwal", "pg_dump"]) {
        return;
    }
    let mut world = old().await;
    let client = world.postgres.connect().await.unwrap();
    let checksums = client.query_one("SHOW data_checksums", &[]).await.unwrap();
    let checksums = checksums.get::<_, String>(0) == "on";
    drop(client);
    world.postgres.stop(Stop::Fast).await.unwrap();
    let mut new = fresh().await;
    // Writes the configuration, whose number of slots pg_upgrade looks at.
    new.restart().await.unwrap();
    new.stop(Stop::Fast).await.unwrap();
    let place = new.socket_dir().to_owned();
    if !checksums {
        let mut command = as_owner(&place, &new.bin().join("pg_checksums"));
        // Without effect where there are none.
        drop(command.arg("--disable").arg(new.data_dir()).output().unwrap());
    }
    let mut command = as_owner(&place, &new.bin().join("pg_upgrade"));
    command.arg("-b").arg(world.postgres.bin()).arg("-B").arg(new.bin());
    command.arg("-d").arg(world.postgres.data_dir()).arg("-D").arg(new.data_dir());
    println!("{}", done(command.args(["-U", "postgres", "--no-sync"])));
    new.restart().await.unwrap();
    goes_on(world, new).await;
}

#[tokio::test]
async fn dump_and_restore() {
    if !has("dump_and_restore", &["pg_dump", "psql"]) {
        return;
    }
    let world = old().await;
    let mut new = fresh().await;
    new.restart().await.unwrap();
    let dump = tempfile::tempdir().unwrap().keep();
    let file = dump.join("dump.sql");
    let mut command = Command::new(new.bin().join("pg_dump"));
    done(command.arg("--dbname").arg(world.postgres.url()).arg("--file").arg(&file));
    let mut command = Command::new(new.bin().join("psql"));
    command.args(["-q", "-v", "ON_ERROR_STOP=1", "--dbname"]).arg(new.url());
    done(command.arg("--file").arg(&file));
    std::fs::remove_dir_all(dump).unwrap();
    goes_on(world, new).await;
}
