//! Which rows go: settled ones, and no others.

use outboxd::store::retention::StepKind;

use crate::place::{DAY, Place, objects};

#[tokio::test]
async fn a_row_goes_when_it_is_final_everywhere_for_long_enough() {
    let place = Place::new().await;
    place.rows(8, 20).await;
    // Nobody has said what the destinations are.
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 0);
    place.known().await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 0, "nothing is decided");
    place.receipt("events", "published", "{[1,3)}", 2.0).await;
    place.receipt("events", "dead", "{[3,4)}", 2.0).await;
    place.receipt("events", "unmatched", "{[4,5)}", 2.0).await;
    place.receipt("events", "published", "{[5,6)}", 0.5).await;
    place.receipt("events", "handed", "{[6,8)}", 3.0).await;
    place.receipt("events", "published", "{[6,7)}", 2.0).await;
    place.receipt("audit", "published", "{[1,2)}", 2.0).await;
    let (_, dry) = place.try_pass(Some(DAY), true).await.unwrap();
    assert_eq!(dry.rows, 5);
    assert_eq!(place.seqs().await.len(), 8, "a dry run removes nothing");

    // 5 was decided too late, 7 waits, 8 is in no receipt; of the others the optional destination
    // has 1 alone.
    let (_, summary) = place.pass(Some(DAY)).await;
    assert_eq!((summary.rows, summary.gone), (5, 4));
    assert_eq!(place.seqs().await, [5, 7, 8]);
    let gone = "SELECT string_agg(destination || seqs::text, ' ') FROM outbox.receipt \
                WHERE outcome = 'gone'";
    assert_eq!(place.text(gone).await, "audit{[2,5),[6,7)}");
    // A gone row is decided: the relay does not wait for it.
    let open = "SELECT outbox.undecided('orders', 'audit')::text";
    assert_eq!(place.text(open).await, "{[5,6),[7,)}");

    // Time goes on, and another destination becomes required.
    place.sql("UPDATE outbox.receipt SET recorded_at = recorded_at - interval '9 days'").await;
    place.sql("UPDATE outbox.destination SET required = true").await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 0);
    place.receipt("audit", "published", "{[5,6)}", 2.0).await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 1);
    assert_eq!(place.seqs().await, [7, 8]);
    // One that is not in the configuration any more holds nothing up.
    place.receipt("events", "published", "{[7,9)}", 2.0).await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 0);
    place.sql("UPDATE outbox.destination SET active = false WHERE name = 'audit'").await;
    assert_eq!(place.pass(None).await.1.rows, 0, "kept for ever");
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 2);
    // Without any active destination nothing goes.
    place.rows(1, 20).await;
    place.sql("UPDATE outbox.destination SET active = false, frontier = 100").await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 0);
}

#[tokio::test]
async fn the_frontier_covers_what_has_no_receipt() {
    let place = Place::new().await;
    place.known().await;
    place.rows(6, 20).await;
    let frontier = "UPDATE outbox.destination SET frontier = 5, holes = '{[2,3)}'";
    place.sql(frontier).await;
    place.receipt("events", "published", "{[4,5)}", 0.1).await;
    place.receipt("events", "handed", "{[3,4)}", 3.0).await;
    // 2 is a hole, 3 waits, 4 is too young, 6 is above.
    let (_, summary) = place.pass(Some(DAY)).await;
    assert_eq!((summary.rows, summary.gone), (2, 0));
    assert_eq!(place.seqs().await, [2, 3, 4, 6]);
    // What was there before a destination was known is not older than that.
    place.sql("UPDATE outbox.destination SET holes = '{}', created_at = now()").await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 0);
}

#[tokio::test]
async fn every_relay_of_a_table_has_a_say() {
    let place = Place::new().await;
    place.known().await;
    place.rows(2, 20).await;
    place.receipt("events", "published", "{[1,3)}", 2.0).await;
    let other = "INSERT INTO outbox.relay (name, event_table, system_identifier, timeline) \
                     VALUES ('other', 'outbox.event', '1', 1)";
    place.sql(other).await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 0, "its destinations are not known");
    let known = "INSERT INTO outbox.destination (relay, name, frontier, created_at) \
                     VALUES ('other', 'events', 1, now() - interval '9 days')";
    place.sql(known).await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 1);
    // A relay of another table has none.
    place.sql("UPDATE outbox.relay SET event_table = 'app.events' WHERE name = 'other'").await;
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 1);
}

#[tokio::test]
async fn many_rows_go_in_batches_around_one_that_is_locked() {
    let place = Place::new().await;
    place.known().await;
    place.rows(3_500, 20).await;
    place.receipt("events", "published", "{[1,3501)}", 2.0).await;
    // Partitions first: a transaction that is open would put them off.
    place.pass(None).await;
    let other = place.postgres.connect().await.unwrap();
    other.batch_execute("BEGIN; SELECT FROM outbox.event WHERE seq = 7 FOR UPDATE").await.unwrap();
    let (steps, summary) = place.pass(Some(DAY)).await;
    assert_eq!(objects(&steps, StepKind::Deleted).len(), 4, "{steps:?}");
    assert!(steps.iter().all(|step| step.rows <= 1_000), "{steps:?}");
    assert_eq!((summary.rows, summary.gone), (3_499, 3_499));
    assert_eq!(place.seqs().await, [7]);
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(place.pass(Some(DAY)).await.1.rows, 1);
}

const OWN_TABLE: &str = "\
    CREATE SCHEMA app; \
    CREATE TABLE app.\"Outbox\" (no bigserial PRIMARY KEY, key text, at timestamptz DEFAULT now()); \
    INSERT INTO app.\"Outbox\" (key) SELECT 'r' FROM generate_series(1, 1500)";

/// A table of the application's own: the relay's role deletes with its own right, or not at all.
#[tokio::test]
async fn rows_of_another_table_go_with_the_relays_own_right() {
    let place = Place::new().await;
    place.sql(OWN_TABLE).await;
    place.known().await;
    let columns = r#"{"seq": "no", "run": "key", "created_at": "at"}"#;
    place
        .sql(&format!(
            "UPDATE outbox.relay SET event_table = 'app.Outbox', columns = '{columns}'; \
             CREATE ROLE relay LOGIN"
        ))
        .await;
    place.receipt("events", "published", "{[1,1401)}", 2.0).await;
    let table = outboxd::config::QualifiedName { schema: "app".into(), name: "Outbox".into() };
    let grants =
        |removes| outboxd::store::schema::relay_grants("relay", &table, removes).join("\n");
    place.sql(&grants(false)).await;
    let mut config = place.config.clone();
    config.source.table = table.clone();
    let place = Place { config, ..place };
    let relay = async || {
        let url = place.postgres.url_of("relay", "postgres");
        let (client, connection) =
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(async { connection.await.is_ok() });
        let pass = outboxd::upkeep::retention::Pass {
            config: &place.config,
            keep: Some(DAY),
            hold_inserts: false,
            dry_run: false,
        };
        pass.run(&client, &mut |_| ()).await
    };
    let refused = relay().await.unwrap_err();
    assert_eq!(refused.kind, outboxd::error::Kind::Privilege, "{refused}");
    place.sql(&grants(true)).await;
    let summary = relay().await.unwrap();
    assert_eq!((summary.rows, summary.gone), (1_400, 1_400));
    assert_eq!(place.number("SELECT count(*) FROM app.\"Outbox\"").await, 100);
}

/// The function that runs with the owner's rights does not let its caller reach anything else.
#[tokio::test]
async fn the_relays_role_may_maintain_and_nothing_more() {
    let place = Place::new().await;
    place.known().await;
    place.rows(3, 20).await;
    place.sql("CREATE ROLE relay LOGIN; CREATE ROLE writer LOGIN").await;
    let table = &place.config.source.table;
    place.sql(&outboxd::store::schema::relay_grants("relay", table, true).join("\n")).await;
    place.sql(&outboxd::store::schema::writer_grants("writer").join("\n")).await;
    let maintain = "SELECT step FROM outbox.maintain('1 day')";
    let as_role = async |role: &str, sql: &str| {
        place.sql(&format!("SET ROLE {role}")).await;
        let done = place.client.simple_query(sql).await;
        place.sql("RESET ROLE").await;
        done.map(drop).map_err(|error| error.code().unwrap().code().to_owned())
    };
    assert_eq!(as_role("writer", maintain).await, Err("42501".into()));
    assert_eq!(as_role("relay", maintain).await, Ok(()));
    for forbidden in [
        "DELETE FROM outbox.event",
        "DROP TABLE outbox.event_default",
        "CREATE TABLE outbox.mine ()",
        "SELECT outbox.erase_rows('outbox.event', 'run-1')",
    ] {
        let done = as_role("relay", forbidden).await;
        assert_eq!(done, Err("42501".into()), "{forbidden}");
    }
    // Names that the relay's role writes lead its owner's rights nowhere else.
    let lie = "UPDATE outbox.relay SET columns = '{\"seq\": \"version\"}'";
    assert_eq!(as_role("relay", lie).await, Ok(()));
    place.receipt("events", "published", "{[1,2)}", 2.0).await;
    place.sql("UPDATE outbox.event SET version = 1").await;
    let (_, summary) = place.pass(Some(DAY)).await;
    assert_eq!(summary.rows, 1);
    assert_eq!(place.seqs().await, [2, 3]);
}

#[tokio::test]
async fn what_is_not_managed_is_left_alone() {
    let place = Place::with("[retention]\nmanage = false\n").await;
    place.known().await;
    place.rows(3, 20).await;
    place.receipt("events", "published", "{[1,4)}", 2.0).await;
    let (steps, summary) = place.pass(Some(DAY)).await;
    assert_eq!((steps.len(), summary.rows), (0, 0));
    let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox.event'::regclass";
    assert_eq!(place.number(partitions).await, 1);
}

/// Receipts are withdrawn, since the stream lost what they speak of, while rows are about to go by them.
#[tokio::test]
async fn no_row_goes_by_a_receipt_that_is_withdrawn() {
    let place = Place::new().await;
    place.known().await;
    let partition = place.old_partition(20).await;
    // Two in a partition of their own, two in the default one.
    place.rows(2, 20).await;
    place.rows(2, 30).await;
    let kept = format!("SELECT count(*) FROM {partition}");
    assert_eq!(place.number(&kept).await, 2);
    place.receipt("events", "published", "{[1,5)}", 2.0).await;
    place.sql("UPDATE outbox.receipt SET stream_seq = 9").await;
    let other = place.postgres.connect().await.unwrap();
    let withdraw = "BEGIN; SELECT outbox.withdraw('orders', 'events', 'then', 5, '')";
    other.batch_execute(withdraw).await.unwrap();
    for call in ["maintain('1 day', steps => '{drop}')", "prune_rows('outbox.event', '1 day')"] {
        let refused = place.client.query(&format!("SELECT outbox.{call}"), &[]).await.unwrap_err();
        assert_eq!(refused.code().unwrap().code(), "55P03", "{call}: the caller tries again");
    }
    assert_eq!(place.seqs().await, [1, 2, 3, 4]);
    other.batch_execute("COMMIT").await.unwrap();
    place.pass(Some(DAY)).await;
    assert_eq!(place.seqs().await, [1, 2, 3, 4], "they are undecided");
    place.receipt("events", "published", "{[1,5)}", 2.0).await;
    place.pass(Some(DAY)).await;
    assert_eq!(place.seqs().await, [0_i64; 0]);
}
