//! A promotion under load.

use outboxd::sandbox::{Stop, Workload};

use crate::place::{Place, servers};
use crate::support::look::no_slow_run;
use crate::support::{log_tail, workload};

/// PostgreSQL 17 and newer: the standby has the slot, and the stream was never ahead of the standby.
#[tokio::test]
async fn the_standby_has_the_slot() {
    let Some(servers) = servers("the_standby_has_the_slot", "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.guard().await;
    let mut load = place.load(workload());
    load.reach(1_000).await;
    place.fail_over(Stop::Immediate).await;
    let committed = load.committed();
    load.reach(committed + 1_000).await;
    place.judge(load).await;
    let log = place.world.relay.log();
    assert!(!log.contains("made a new slot"), "{log}");
    assert!(!log.contains("does not bring"), "{log}");
}

/// Before 17 the standby has no slot: rows that the new one does not bring come from the table, in the
/// order of their numbers, which is that of the commits where a run has one transaction after the
/// other. A primary that is stopped in order sends everything to its standby first.
#[tokio::test]
async fn the_standby_has_no_slot() {
    let Some(servers) = servers("the_standby_has_no_slot", "16") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    let mut load = place.load(Workload { adversary: false, ..workload() });
    load.reach(1_000).await;
    place.fail_over(Stop::Fast).await;
    let committed = load.committed();
    load.reach(committed + 1_000).await;
    place.judge(load).await;
    no_slow_run(&place.world).await;
    assert!(place.world.relay.log().contains("made a new slot"), "{}", log_tail(&place.world));
}
