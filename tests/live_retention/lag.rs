//! `outbox.lag()` and what shows it: true while the relay is down, and cheap whatever is behind.

use std::time::Duration;

use outboxd::sandbox::World;
use serde_json::Value;

use crate::place::{DAY, Place};
use crate::support::look::{metric, publish, until};
use crate::support::told::status;
use crate::support::{SETTLE, options};

/// Destination, unpublished, whether the age is known, whether all was counted.
async fn lag(place: &Place, count_to: i64) -> Vec<(String, i64, bool, bool)> {
    let sql =
        "SELECT destination, unpublished, oldest_seconds > 0, counted_all FROM outbox.lag($1)";
    let rows = place.client.query(sql, &[&count_to]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect()
}

#[tokio::test]
async fn it_counts_what_is_not_decided() {
    let place = Place::new().await;
    place.known().await;
    let of = |name: &str, events, old, all| (name.to_owned(), events, old, all);
    assert_eq!(lag(&place, 9).await, [of("audit", 0, false, true), of("events", 0, false, true)]);
    place.rows(10, 2).await;
    assert_eq!(lag(&place, 9).await, [of("audit", 9, true, false), of("events", 9, true, false)]);
    // Handed ones are not published, unmatched ones are none.
    place.receipt("events", "published", "{[1,4)}", 0.0).await;
    place.receipt("events", "unmatched", "{[4,5)}", 0.0).await;
    place.receipt("events", "handed", "{[5,8)}", 0.0).await;
    place.receipt("events", "published", "{[5,6)}", 0.0).await;
    assert_eq!(lag(&place, 99).await, [of("audit", 10, true, true), of("events", 5, true, true)]);
    // From where the sweeps have come to: the frontier covers 1 to 9, but for the holes.
    place
        .sql(
            "UPDATE outbox.destination SET frontier = 9, holes = '{[2,4),[8,9)}' \
             WHERE name = 'audit'",
        )
        .await;
    assert_eq!(lag(&place, 99).await[0], of("audit", 4, true, true));
    place.sql("DELETE FROM outbox.event WHERE seq = 3").await;
    assert_eq!(lag(&place, 99).await[0], of("audit", 3, true, true));
    place.sql("UPDATE outbox.destination SET active = false WHERE name = 'audit'").await;
    assert_eq!(lag(&place, 99).await, [of("events", 5, true, true)]);
    let oldest = place.text("SELECT oldest_seconds::text FROM outbox.lag()").await;
    let oldest: f64 = oldest.parse().unwrap();
    assert!((oldest - 2.0 * DAY.as_secs_f64()).abs() < 60.0, "{oldest}");
    // A relay that was left behind, whose table is gone.
    place.sql("UPDATE outbox.relay SET event_table = 'app.gone'").await;
    let gone = "SELECT (unpublished IS NULL)::int::bigint FROM outbox.lag()";
    assert_eq!(place.number(gone).await, 1);
}

/// Who watches needs two columns of the events, and none of the others.
#[tokio::test]
async fn a_watcher_sees_no_payload() {
    let place = Place::new().await;
    place.known().await;
    place.rows(2, 0).await;
    let page = include_str!("../../docs/operations.md");
    let (_, rest) = page.split_once("<!-- sql: watcher -->\n```sql\n").unwrap();
    place.sql("CREATE ROLE watcher LOGIN").await;
    place.sql(rest.split_once("```").unwrap().0).await;
    place.sql("SET ROLE watcher").await;
    let sum = "SELECT sum(unpublished)::bigint FROM outbox.lag()";
    assert_eq!(place.number(sum).await, 4);
    let error = place.client.query("SELECT payload FROM outbox.event", &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "42501");
}

/// The cost follows what is behind, and not what is retained.
#[tokio::test]
async fn it_reads_little_of_a_long_table() {
    let place = Place::new().await;
    place.known().await;
    place.rows(100_000, 1).await;
    place.sql("UPDATE outbox.destination SET frontier = 99990").await;
    place.sql("VACUUM ANALYZE outbox.event").await;
    let sql = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM outbox.lag()";
    // Twice: the first time reads the catalog.
    let mut pages = 0;
    for _ in 0..2 {
        let plan: tokio_postgres::types::Json<Value> =
            place.client.query_one(sql, &[]).await.unwrap().get(0);
        let node = plan.0[0]["Plan"].clone();
        pages = node["Shared Hit Blocks"].as_i64().unwrap()
            + node["Shared Read Blocks"].as_i64().unwrap();
    }
    println!("{pages} pages");
    assert!(pages < 200, "{pages} pages for 20 rows of 100,000");
}

async fn shown(world: &World) -> Option<f64> {
    metric(world, "outboxd_unpublished_events", "destination=\"events\"").await
}

#[tokio::test]
async fn it_is_true_while_the_relay_is_down_and_shown_while_it_runs() {
    let mut world = World::start(options()).await.unwrap();
    let client = world.postgres.connect().await.unwrap();
    crate::between::known(&client).await;
    let within = Duration::from_secs(20);
    until("zero is shown", within, || async {
        let shown = shown(&world).await;
        (shown == Some(0.0)).then_some(()).ok_or_else(|| format!("{shown:?}"))
    })
    .await;
    publish(&client, "r", "k", 1).await;
    world.settle(SETTLE).await.unwrap();
    let lag = "SELECT sum(unpublished)::bigint FROM outbox.lag() WHERE relay = 'world'";
    until("all is recorded", within, || async {
        let lag: i64 = client.query_one(lag, &[]).await.unwrap().get(0);
        (lag == 0).then_some(()).ok_or_else(|| format!("{lag}"))
    })
    .await;

    world.relay.terminate(Duration::from_secs(15)).await.unwrap();
    for n in 2..=4 {
        publish(&client, "r", "k", n).await;
    }
    let lag: i64 = client.query_one(lag, &[]).await.unwrap().get(0);
    assert_eq!(lag, 3);
    let output = world.relay.output(&["status"]).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("destination events: 3 unpublished, oldest "), "{text}");
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(words.contains("no relay answers"), "{words}");
    let output = world.relay.output(&["status", "--json"]).await.unwrap();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["answers"], false);
    assert_eq!(json["database"]["destinations"][0]["unpublished"], 3);
    assert_eq!(json["database"]["destinations"][0]["counted_all"], true);

    // It runs again, and can't publish: what is behind is shown by metric and status.
    world.nats().unwrap().kill9().unwrap();
    world.relay.start().unwrap();
    until("three are shown", Duration::from_secs(60), || async {
        let shown = shown(&world).await;
        (shown == Some(3.0)).then_some(()).ok_or_else(|| format!("{shown:?}"))
    })
    .await;
    let oldest = "outboxd_oldest_unpublished_seconds";
    assert!(metric(&world, oldest, "events").await.unwrap() > 0.0);
    let told = status(&world.relay, "/destinations/0/unpublished/events").await;
    assert_eq!(told, 3);
}
