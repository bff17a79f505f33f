//! What `outboxd check` tells of standbys.

use std::collections::BTreeSet;
use std::process::Command;

use outboxd::sandbox::Stop;
use serde_json::Value;

use crate::place::{Place, SLOT, STANDBY, servers};
use crate::support::SETTLE;
use crate::support::look::until;

/// Names of what is not as it should be among what is looked at of standbys, with how bad it is, and all
/// that is said.
async fn faults(place: &Place) -> (BTreeSet<String>, String) {
    let output = place.world.relay.output(&["check", "--json"]).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report: Value = serde_json::from_str(&text).unwrap();
    let of_standbys = |id: &str| {
        ["standbys", "standby", "listed-standby", "slot-failover", "standby-feedback"]
            .iter()
            .any(|name| id.strip_prefix("source.") == Some(name))
    };
    let found = report["findings"].as_array().unwrap().iter();
    let found =
        found.filter(|one| one["severity"] != "ok" && of_standbys(one["id"].as_str().unwrap()));
    let names = found.map(|one| {
        format!("{} {}", one["id"].as_str().unwrap(), one["severity"].as_str().unwrap())
    });
    (names.collect(), text)
}

async fn expect(place: &Place, names: &[&str], words: &[&str]) {
    let (found, text) = faults(place).await;
    assert_eq!(found, names.iter().map(|&name| name.to_owned()).collect(), "{text}");
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[tokio::test]
async fn check_tells_what_a_promotion_would_lose() {
    let test = "check_tells_what_a_promotion_would_lose";
    let Some(servers) = servers(test, "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.other.synced(&place.world.postgres, SLOT).await.unwrap();
    let unlisted = "source.standbys warning";
    expect(&place, &[unlisted], &["a promoted standby does not know"]).await;
    place.guard().await;
    expect(
        &place,
        &[],
        &["has a synced copy of slot outboxd_world", "nothing is published at all"],
    )
    .await;

    place.other.stop(Stop::Immediate).await.unwrap();
    let gone = ["source.listed-standby failure", "source.standby warning"];
    expect(&place, &gone, &["no standby uses it now", "can't be asked"]).await;
    let client = place.world.postgres.connect().await.unwrap();
    client.query("SELECT pg_drop_replication_slot($1::text)", &[&STANDBY]).await.unwrap();
    expect(&place, &gone, &["is no physical slot of this server"]).await;
}

#[tokio::test]
async fn check_tells_of_a_standby_that_keeps_no_slots() {
    let test = "check_tells_of_a_standby_that_keeps_no_slots";
    let Some(servers) = servers(test, "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.guard().await;
    place.world.relay.terminate(SETTLE).await.unwrap();
    for name in ["sync_replication_slots", "hot_standby_feedback"] {
        place.other.configure(name, "off").unwrap();
    }
    place.other.reload().unwrap();
    let client = place.world.postgres.connect().await.unwrap();
    until("no feedback", SETTLE, || async {
        let sql = "SELECT xmin IS NULL AND catalog_xmin IS NULL FROM pg_replication_slots \
                    WHERE slot_name = 'standby'";
        let none: bool = client.query_one(sql, &[]).await.unwrap().get(0);
        none.then_some(()).ok_or_else(|| "there is".to_owned())
    })
    .await;
    let names = ["source.standby warning", "source.standby-feedback warning"];
    let words = ["sync_replication_slots = off", "hot_standby_feedback = off", "sends no feedback"];
    expect(&place, &names, &words).await;

    let sql = "SELECT pg_drop_replication_slot($1::text), \
                      pg_create_logical_replication_slot($1::text, 'pgoutput')";
    client.query(sql, &[&SLOT]).await.unwrap();
    let names = [&names[..], &["source.slot-failover warning"]].concat();
    expect(&place, &names, &["ALTER_REPLICATION_SLOT outboxd_world (FAILOVER)"]).await;

    // The remedy, as it is told.
    let psql = place.world.postgres.bin().join("psql");
    if psql.is_file() {
        let conninfo = format!(
            "host=127.0.0.1 port={} user=postgres dbname=postgres replication=database",
            place.world.postgres.port()
        );
        let command = "ALTER_REPLICATION_SLOT outboxd_world (FAILOVER)";
        let done = Command::new(psql).args([&conninfo, "-c", command]).status().unwrap();
        assert!(done.success(), "{done}");
        expect(&place, &names[..2], &[]).await;
    }
}
