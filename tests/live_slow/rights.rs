//! What the relay's role and a writer's may do: exactly what the program prints as grants.

use std::fs;
use std::time::Duration;

use outboxd::sandbox::{World, WorldOptions};
use tokio_postgres::{Client, NoTls};

use crate::support::look::{self, publish, until};
use crate::support::{SETTLE, log_tail, options};
use crate::{drop_slot, judge, not_ready, wait_for, write};

const ROLES: &str = "CREATE ROLE relay_role LOGIN REPLICATION; CREATE ROLE writer_role LOGIN";

/// An installation that a superuser made, with roles that have what the program prints, and the
/// relay's in its configuration.
async fn world(relay: &str) -> World {
    let relay = relay.to_owned();
    let world = World::prepare(WorldOptions { relay, ..options() }).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    client.batch_execute(ROLES).await.unwrap();
    let verb = ["schema", "--grants", "--role", "relay_role", "--writer", "writer_role"];
    client.batch_execute(&world.relay.run(&verb).await.unwrap()).await.unwrap();
    let file = world.relay.configuration();
    let text = fs::read_to_string(&file).unwrap();
    let own = world.postgres.url_of("relay_role", "postgres");
    fs::write(&file, text.replace(&world.postgres.unix_url(), &own)).unwrap();
    world
}

async fn writer(world: &World) -> Client {
    let url = world.postgres.url_of("writer_role", "postgres");
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(async { connection.await.is_ok() });
    client
}

/// Streams, sweeps, makes a slot, hands over, and writes a dead letter; replays and traces.
#[tokio::test]
async fn the_relay_does_everything_with_its_grants_alone() {
    let mut world = world("sweep_interval = \"1s\"\nmax_retained_wal = \"16MiB\"").await;
    let owner = world.postgres.connect().await.unwrap();
    let writer = writer(&world).await;
    world.start_relay().await.unwrap();
    write(&writer, &["a", "b"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();

    owner.batch_execute("ALTER PUBLICATION outboxd_world DROP TABLE outbox.event").await.unwrap();
    write(&writer, &["a", "b"], 11, 10).await;
    owner.batch_execute("ALTER PUBLICATION outboxd_world ADD TABLE outbox.event").await.unwrap();
    wait_for(&world, "outboxd_swept_total", "missed", 20.0).await;

    drop_slot(&owner).await;
    write(&writer, &["a", "b"], 21, 10).await;
    judge(&world, 60).await;
    wait_for(&world, "outboxd_slot_active", "", 1.0).await;
    assert!(world.relay.log().contains("made a new slot"), "{}", log_tail(&world));

    world.nats().unwrap().kill9().unwrap();
    write(&writer, &["a", "b"], 31, 10).await;
    let written = look::wal_end(&owner).await;
    look::noise(&owner, 24, Duration::from_secs(1)).await;
    until("the position passes", SETTLE, || async {
        let confirmed = look::confirmed(&owner).await;
        (confirmed >= written).then_some(()).ok_or_else(|| log_tail(&world))
    })
    .await;
    world.nats().unwrap().restart().await.unwrap();

    let sql = "SELECT outbox.publish(run_id => 'c', kind => 'k', \
                 payload => '{\"id\":\"0\",\"run\":\"c\",\"n\":1}', headers => '{\"Nats-X\":\"y\"}')";
    writer.query(sql, &[]).await.unwrap();
    publish(&writer, "a", "k", 41).await;
    judge(&world, 82).await;
    assert_eq!(world.buried().await.unwrap().len(), 1);

    let said = world.relay.run(&["replay", "--run", "b", "--job", "granted"]).await.unwrap();
    assert!(said.contains("replay granted finished: 40 of 40 events stored"), "{said}");
    let said = world.relay.run(&["trace", "1"]).await.unwrap();
    assert!(said.contains("events (stream EVENTS): published"), "{said}");
    for word in ["privilege", "permission denied"] {
        assert!(!world.relay.log().contains(word), "{}", log_tail(&world));
    }
}

/// With its grants nothing is missing; without one of them, it is that one which is named.
#[tokio::test]
async fn check_names_each_right_that_is_missing() {
    let world = world("").await;
    let owner = world.postgres.connect().await.unwrap();
    let said = world.relay.run(&["check"]).await.unwrap();
    assert!(said.contains("role relay_role has every right that it needs"), "{said}");
    assert!(said.contains(" 0 failures"), "{said}");
    let verb = ["schema", "--grants", "--role", "relay_role"];
    let sql = world.relay.run(&verb).await.unwrap();
    let grants: Vec<&str> = sql.lines().filter(|line| line.starts_with("GRANT ")).collect();
    assert!(grants.len() > 10, "{sql}");
    for grant in grants {
        let revoke = grant.replacen("GRANT", "REVOKE", 1).replacen(" TO ", " FROM ", 1);
        owner.batch_execute(&revoke).await.unwrap();
        let output = world.relay.output(&["check"]).await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // GRANT right ON KIND "schema"."name" TO …
        let [_, right, _, kind, object, ..] = grant.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{grant}")
        };
        let (kind, object) = (kind.to_lowercase(), object.replace('"', ""));
        let lacks = format!("lacks {right} on {kind} {object}");
        assert!(!output.status.success() && said.contains(&lacks), "{lacks}:\n{said}");
        assert!(said.contains("--grants --role relay_role"), "{said}");
        owner.batch_execute(grant).await.unwrap();
    }
    owner.batch_execute("ALTER ROLE relay_role NOREPLICATION").await.unwrap();
    let output = world.relay.output(&["check"]).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains("source.replication-right"), "{said}");
}

/// A right that is taken away under way is told, and when it is back nothing is lost.
#[tokio::test]
async fn a_relay_without_a_right_says_so_and_comes_back() {
    let mut world = world("sweep_interval = \"1s\"").await;
    let owner = world.postgres.connect().await.unwrap();
    world.start_relay().await.unwrap();
    write(&owner, &["a"], 1, 10).await;
    world.settle(SETTLE).await.unwrap();
    owner.batch_execute("REVOKE INSERT ON outbox.receipt FROM relay_role").await.unwrap();
    write(&owner, &["a"], 11, 10).await;
    not_ready(&world, &["privilege", "receipt"]).await;
    owner.batch_execute("GRANT INSERT ON outbox.receipt TO relay_role").await.unwrap();
    write(&owner, &["a"], 21, 10).await;
    judge(&world, 30).await;
}

/// A writer publishes, and can do nothing else: read no event, choose no number, draw none.
#[tokio::test]
async fn a_writer_can_publish_and_nothing_else() {
    let world = world("").await;
    let writer = writer(&world).await;
    write(&writer, &["a"], 1, 3).await;
    for sql in [
        "SELECT * FROM outbox.event",
        "INSERT INTO outbox.event (run_id, kind) VALUES ('a', 'k')",
        "INSERT INTO outbox.event_default (seq, run_id, kind) VALUES (1, 'a', 'k')",
        "UPDATE outbox.event SET kind = 'x'",
        "DELETE FROM outbox.event",
        "TRUNCATE outbox.event",
        "SELECT nextval('outbox.event_seq')",
        "SELECT setval('outbox.event_seq', 1)",
        "SELECT last_value FROM outbox.event_seq",
        "SELECT * FROM outbox.receipt",
        "SELECT * FROM outbox.dead_letter",
        "SELECT * FROM outbox.destination",
        "SELECT * FROM outbox.relay",
        "SELECT * FROM outbox.replay",
        "CREATE TABLE outbox.mine ()",
    ] {
        let error = writer.batch_execute(sql).await.expect_err(sql);
        let code = error.code().map(|code| code.code().to_owned());
        assert_eq!(code.as_deref(), Some("42501"), "{sql}: {error:?}");
    }
    assert_eq!(world.committed().await.unwrap().len(), 3);
}
