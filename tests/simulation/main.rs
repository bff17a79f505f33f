//! A seeded simulation of everything around the core: PostgreSQL, ledger, JetStream, network and
//! clock, with faults as swarm. It checks the promises P1–P5 and P8 after every step, then
//! switches the faults off and checks that everything drains.
//!
//! `OUTBOXD_SIM_SEED=<n>` replays one run, `OUTBOXD_SIM_RUNS=<n>` asks for more of them.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::wildcard_enum_match_arm,
    reason = "a test may panic, and what it does not name is none of its business"
)]

mod broker;
mod checks;
mod control;
mod dice;
mod drain;
mod ledger;
mod order;
mod postgres;
mod publisher;
mod pump;
mod sweep;
mod trouble;
mod world;

use std::collections::BTreeMap;

use dice::Fault;
use world::World;

/// Enough for every kind of fault to occur many times, in less than a minute without optimisation.
const RUNS: u64 = 100;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn promises_hold_under_swarms_of_faults() {
    if let Some(seed) = number("OUTBOXD_SIM_SEED") {
        let happened = World::new(seed).run();
        println!("{happened:#?}");
        return;
    }
    let mut happened: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 1..=number("OUTBOXD_SIM_RUNS").unwrap_or(RUNS) {
        let one = std::panic::catch_unwind(|| World::new(seed).run());
        let one = one.unwrap_or_else(|_| panic!("replay with OUTBOXD_SIM_SEED={seed}"));
        for (what, times) in one {
            *happened.entry(what).or_default() += times;
        }
    }
    println!("{happened:#?}");
    for fault in Fault::ALL {
        assert!(happened.contains_key(&format!("{fault:?}")), "{fault:?} never occurred");
    }
    for what in world::MUST_HAPPEN {
        assert!(happened.contains_key(what), "`{what}` never occurred");
    }
}

#[test]
fn one_seed_is_one_run() {
    assert_eq!(World::new(77).run(), World::new(77).run());
}
