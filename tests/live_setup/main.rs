//! `schema`, `init`, `deinit` and `check`, as an operator meets them: the program against real
//! servers.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

mod broker;
mod place;

use outboxd::sandbox::{Nats, PostgresOptions};
use serde_json::Value;

use place::{EVERYTHING, NOTHING, Place};

#[tokio::test]
async fn init_makes_everything_once() {
    let place = Place::new().await;
    let dry = place.done("init --dry-run").await;
    assert_eq!(place.found().await, NOTHING);
    assert_eq!(dry.matches("would make").count(), 5, "{dry}");

    place.done("init").await;
    assert_eq!(place.found().await, EVERYTHING);
    let published = "SELECT format('%s %s %s %s %s', pubinsert, pubtruncate, pubupdate, pubdelete, \
                     pubviaroot) FROM pg_publication WHERE pubname = 'outboxd_orders'";
    assert_eq!(place.text(published).await, "t t f f t");
    let slot = "SELECT (to_jsonb(s) - 'active_pid')::text FROM pg_replication_slots s";
    let before = place.text(slot).await;
    let facts: Value = serde_json::from_str(&before).unwrap();
    assert_eq!(
        (facts["slot_name"].as_str(), facts["plugin"].as_str()),
        (Some("outboxd_orders"), Some("pgoutput"))
    );
    if place.server_version().await >= 170_000 {
        assert_eq!(facts["failover"], true);
    }

    let again = place.done("init").await;
    assert_eq!(again.matches("keep ").count(), 5, "{again}");
    assert_eq!(place.text(slot).await, before);
    assert_eq!(place.faults().await, [""; 0]);
}

#[tokio::test]
async fn init_adopts_what_others_made() {
    let place = Place::new().await;
    let sql = place.done("schema").await;
    place.sql(&sql).await;
    place.sql("SELECT pg_create_logical_replication_slot('outboxd_orders', 'pgoutput')").await;
    let kept = place.done("init").await;
    assert_eq!(kept.matches("keep ").count(), 3, "{kept}");
    assert_eq!(place.faults().await, [""; 0]);
}

#[tokio::test]
async fn init_refuses_what_does_not_fit_and_changes_nothing() {
    let place = Place::new().await;
    let slot = |plugin: &str| {
        format!("SELECT pg_create_logical_replication_slot('outboxd_orders', '{plugin}')")
    };
    let no_slot = "SELECT pg_drop_replication_slot('outboxd_orders')";

    place.sql("SELECT pg_create_physical_replication_slot('outboxd_orders')").await;
    place.refused("init", &["slot-foreign", "physical"]).await;
    place.sql(no_slot).await;

    // The server looks for the publication as of the slot's position.
    place.sql(&slot("pgoutput")).await;
    place.refused("init", &["publication-missing", "deinit --slot-only"]).await;
    place.sql(no_slot).await;
    assert_eq!(place.found().await, NOTHING);

    place.sql("CREATE TABLE other (); CREATE PUBLICATION outboxd_orders FOR TABLE other").await;
    place.refused("init", &["publication-shape", "partitions", "via_partition_root"]).await;
    place.sql("DROP PUBLICATION outboxd_orders").await;

    place.sql("CREATE SCHEMA outbox; CREATE TABLE outbox.event (id int)").await;
    place.refused("init", &["table-shape", "outbox.event.run_id", "does not exist"]).await;
    place.sql("DROP SCHEMA outbox CASCADE").await;
    assert_eq!(place.found().await, NOTHING);

    place.done("init --payload text").await;
    place.refused("init --payload bytea", &["has type text, not bytea"]).await;
    place.sql("INSERT INTO outbox.schema_version VALUES (99)").await;
    place.refused("init", &["schema-version", "version 99"]).await;
    assert_eq!(place.outboxd("init --payload xml").await.code, Some(2));
}

/// What was committed between two slots is in neither; the relay is told to look for it first.
#[tokio::test]
async fn a_new_slot_for_a_relay_that_ran_leaves_a_gap_to_bridge() {
    let place = Place::new().await;
    let gaps = async || {
        let sql = "SELECT count(*) FROM outbox.destination WHERE gap_since IS NOT NULL";
        place.client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    place.done("init").await;
    place.done("init").await;
    assert_eq!(gaps().await, 0);
    place.sql("SELECT pg_drop_replication_slot('outboxd_orders')").await;
    let said = place.done("init").await;
    assert!(said.contains("a gap at events"), "{said}");
    assert_eq!((gaps().await, place.found().await.as_str()), (1, EVERYTHING));
}

#[tokio::test]
async fn a_ledger_of_another_cluster_is_refused() {
    let place = Place::new().await;
    place.done("init").await;
    place.sql("UPDATE outbox.relay SET system_identifier = '1'").await;
    assert_eq!(place.faults().await, ["failure source.relay"]);
    place.refused("init", &["other-cluster", "was written in cluster 1"]).await;
    place.sql("SELECT pg_drop_replication_slot('outboxd_orders')").await;
    place.refused("init", &["other-cluster"]).await;
    assert_eq!(place.found().await, "schema 1, publications 1, slots 0");
}

#[tokio::test]
async fn init_needs_logical_wal() {
    let place = Place::with(PostgresOptions::default().set("wal_level", "replica")).await;
    place.refused("init", &["wal-level", "set wal_level = logical"]).await;
    assert_eq!(place.found().await, NOTHING);
    assert!(place.faults().await.contains(&"failure source.wal-level".to_owned()));
}

#[tokio::test]
async fn deinit_takes_data_only_when_told_twice() {
    let place = Place::new().await;
    place.done("init").await;
    place.sql("SELECT outbox.publish('r', 'k', '{}')").await;
    place.done("deinit --dry-run --schema").await;
    assert_eq!(place.found().await, EVERYTHING);
    let said = place.outboxd("deinit --slot-only").await;
    assert_eq!(said.code, Some(1));
    for words in ["bytes of WAL behind", "1 of the 1 rows have no receipt, seq 1 to 1", "--yes"] {
        assert!(said.out.contains(words), "{words:?} is not in {}", said.out);
    }
    assert_eq!(place.found().await, EVERYTHING);
    place.done("deinit --slot-only --yes").await;
    assert_eq!(place.found().await, "schema 1, publications 1, slots 0");
    place.done("init").await;
    assert_eq!(place.outboxd("deinit --schema").await.code, Some(1));
    assert_eq!(place.found().await, EVERYTHING);
    place.done("deinit --yes").await;
    assert_eq!(place.found().await, "schema 1, publications 0, slots 0");
    place.sql("CREATE VIEW outbox.mine AS SELECT 1").await;
    place.refused("deinit --schema --yes", &["mine"]).await;
    place.sql("DROP VIEW outbox.mine").await;
    place.done("deinit --schema --yes").await;
    assert_eq!(place.found().await, NOTHING);
    let absent = place.done("deinit --schema --yes").await;
    assert_eq!(absent.matches("absent").count(), 3, "{absent}");
}

#[tokio::test]
async fn deinit_leaves_a_running_relay_alone() {
    let place = Place::new().await;
    place.done("init").await;
    assert!(outboxd::store::lock::try_lock(&place.client, "orders").await.unwrap());
    let said = place.outboxd("deinit").await;
    assert_eq!((said.code, said.out.contains("stop it first")), (Some(1), true));
    assert_eq!(place.found().await, EVERYTHING);
    let holds = place.outboxd("check").await.out;
    assert!(holds.contains("holds its lock"), "{holds}");
}

#[tokio::test]
async fn check_names_what_is_broken() {
    let nats = Nats::start().await.unwrap();
    let mut place = Place::new().await;
    place.broker = format!("servers = [\"{}\"]", nats.url());
    assert_eq!(
        place.faults().await,
        [
            "failure source.publication",
            "failure source.schema",
            "failure source.slot",
            "failure source.table"
        ]
    );
    place.done("init --create-streams").await;
    place.sql("CREATE ROLE app; GRANT USAGE ON SEQUENCE outbox.event_seq TO app").await;
    place.sql("GRANT INSERT ON outbox.event TO app").await;
    let rights = "warning source.sequence-rights";
    assert_eq!(place.faults().await, [rights, rights]);
    place.sql("REVOKE ALL ON SEQUENCE outbox.event_seq FROM app").await;
    place.sql("REVOKE ALL ON outbox.event FROM app").await;

    for (harm, fault, heal) in [
        (
            "ALTER SEQUENCE outbox.event_seq CACHE 10",
            "failure source.sequence",
            "ALTER SEQUENCE outbox.event_seq CACHE 1",
        ),
        (
            "ALTER SEQUENCE outbox.event_seq AS int",
            "failure source.sequence",
            "ALTER SEQUENCE outbox.event_seq AS bigint",
        ),
        (
            "ALTER TABLE outbox.event RENAME payload TO body",
            "failure source.columns",
            "ALTER TABLE outbox.event RENAME body TO payload",
        ),
        (
            "ALTER TABLE outbox.event ALTER kind TYPE float USING 0",
            "failure source.columns",
            "ALTER TABLE outbox.event ALTER kind TYPE text",
        ),
        (
            "DROP INDEX outbox.event_seq_idx",
            "warning source.seq-index",
            "CREATE INDEX event_seq_idx ON outbox.event (seq)",
        ),
        (
            "ALTER TABLE outbox.event DETACH PARTITION outbox.event_default",
            "warning source.default-partition",
            "ALTER TABLE outbox.event ATTACH PARTITION outbox.event_default DEFAULT",
        ),
        (
            "ALTER PUBLICATION outboxd_orders SET (publish = 'update')",
            "failure source.publication",
            "ALTER PUBLICATION outboxd_orders SET (publish = 'insert')",
        ),
        (
            "ALTER PUBLICATION outboxd_orders SET (publish = 'insert, delete')",
            "warning source.publication-waste",
            "ALTER PUBLICATION outboxd_orders SET (publish = 'insert')",
        ),
        (
            "ALTER PUBLICATION outboxd_orders DROP TABLE outbox.event",
            "failure source.publication",
            "ALTER PUBLICATION outboxd_orders ADD TABLE outbox.event",
        ),
        (
            "INSERT INTO outbox.schema_version VALUES (9)",
            "failure source.schema",
            "DELETE FROM outbox.schema_version WHERE version = 9",
        ),
        (
            "UPDATE outbox.relay SET event_table = 'app.event'",
            "failure source.relay",
            "UPDATE outbox.relay SET event_table = 'outbox.event'",
        ),
        (
            "SELECT pg_drop_replication_slot('outboxd_orders')",
            "failure source.slot",
            "SELECT pg_create_logical_replication_slot('outboxd_orders', 'pgoutput')",
        ),
    ] {
        place.sql(harm).await;
        let faults = place.faults().await;
        assert!(faults.contains(&fault.to_owned()), "{harm}: {faults:?}");
        let loud = faults.iter().any(|fault| fault.starts_with("failure"));
        assert_eq!(place.outboxd("check").await.code, Some(i32::from(loud)), "{harm}");
        place.sql(heal).await;
        assert_eq!(place.faults().await, [""; 0], "after {heal}");
    }
    if place.server_version().await >= 150_000 {
        let narrow = "ALTER PUBLICATION outboxd_orders SET TABLE outbox.event (seq, id, run_id)";
        place.sql(narrow).await;
        assert_eq!(place.faults().await, ["failure source.publication"]);
        let filter = "ALTER PUBLICATION outboxd_orders SET TABLE outbox.event WHERE (seq > 1)";
        place.sql(filter).await;
        assert_eq!(place.faults().await, ["failure source.publication"]);
    }
}

#[tokio::test]
async fn check_runs_as_the_relay_and_names_each_missing_right() {
    let place = Place::new().await;
    place.done("init").await;
    place.sql("CREATE ROLE relay LOGIN").await;
    let place = place.used_by("relay");
    let said = place.outboxd("check").await;
    assert_eq!(said.code, Some(1));
    for words in [
        "role relay may not use replication",
        "ALTER ROLE relay REPLICATION",
        "role relay lacks USAGE on schema outbox",
        "role relay lacks SELECT on sequence outbox.event_seq",
        "role relay lacks UPDATE on table outbox.dead_letter",
        "schema outbox can't be read",
        "outboxd schema --grants --role relay",
    ] {
        assert!(said.out.contains(words), "{words:?} is not in {}", said.out);
    }
    let grants = place.done("schema --grants --role relay").await;
    place.sql(&grants).await;
    place.sql("ALTER ROLE relay REPLICATION").await;
    assert_eq!(place.faults().await, [""; 0]);

    place.sql("ALTER TABLE outbox.event ENABLE ROW LEVEL SECURITY").await;
    assert_eq!(place.faults().await, ["failure source.row-security"]);
    place.sql("ALTER ROLE relay BYPASSRLS").await;
    assert_eq!(place.faults().await, [""; 0]);
}

#[tokio::test]
async fn init_can_grant_to_relay_and_writers() {
    let place = Place::new().await;
    place.sql("CREATE ROLE \"my relay\" LOGIN; CREATE ROLE app LOGIN").await;
    let said = place.done("init --role app --writer app").await;
    assert!(said.contains("ALTER ROLE app REPLICATION"), "{said}");
    place.refused("init --writer nobody_here", &["nobody_here"]).await;
    let place = place.used_by("app");
    let rights = place.faults().await;
    assert_eq!(rights, ["failure source.replication-right"]);
}

#[tokio::test]
async fn a_table_of_the_application_is_checked_like_ours() {
    let place = Place::new().await;
    place
        .sql(
            "CREATE TYPE kind AS ENUM ('a'); CREATE DOMAIN key AS text; \
             CREATE TABLE orders_outbox (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
                 id bigint, run_id key, kind kind, payload bytea); \
             CREATE ROLE app; GRANT INSERT ON orders_outbox TO app",
        )
        .await;
    let table = "--set source.table=public.orders_outbox --set source.columns.tenant=false \
                 --set source.columns.version=false --set source.columns.headers=false \
                 --set source.columns.created_at=false";
    let said = place.outboxd(&format!("check --json {table}")).await;
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let of = |id: &str| {
        let findings = report["findings"].as_array().unwrap().iter();
        findings.filter(|f| f["id"] == id).map(|f| f["severity"].as_str().unwrap()).collect()
    };
    let (table, columns, sequence): (Vec<_>, Vec<_>, Vec<_>) =
        (of("source.table"), of("source.columns"), of("source.sequence"));
    assert_eq!((table, columns, sequence), (vec!["ok"], vec!["ok"], vec!["ok"]), "{report:#}");
}
