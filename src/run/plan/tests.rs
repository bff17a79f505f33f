//! Every combination of what can be found, against properties.

use super::*;
use crate::lsn::Lsn;

fn slot(active_pid: Option<i32>) -> SlotState {
    SlotState::Ok(Slot {
        confirmed_flush: Lsn(1),
        restart_lsn: Lsn(1),
        active_pid,
        wal_status: "reserved".to_owned(),
        safe_wal_size_bytes: None,
        failover: None,
        retained_bytes: 0,
        behind_bytes: 0,
    })
}

fn all() -> Vec<Found> {
    let slots = || {
        vec![
            slot(None),
            slot(Some(7)),
            SlotState::Missing,
            SlotState::Creating { active_pid: Some(7) },
            SlotState::Lost { reason: "wal_removed".to_owned() },
            SlotState::Foreign { why: "a physical slot".to_owned() },
        ]
    };
    let flags = [false, true];
    let mut all = Vec::new();
    for no_stream in flags {
        for wal_level in ["minimal", "replica", "logical"] {
            for stranger in [None, Some("psql".to_owned())] {
                for may_make in flags {
                    for publication in flags {
                        for last_failure in [None, Some(Kind::PublicationMissing)] {
                            all.extend(slots().into_iter().map(|slot| Found {
                                no_stream,
                                wal_level: wal_level.to_owned(),
                                slot,
                                name: "outboxd_orders".to_owned(),
                                stranger: stranger.clone(),
                                may_make,
                                publication,
                                last_failure,
                            }));
                        }
                    }
                }
            }
        }
    }
    all
}

#[test]
fn every_plan_keeps_to_the_rules() {
    let mut makes = 0;
    for found in all() {
        let words = format!("{found:?}");
        let usable = matches!(&found.slot, SlotState::Ok(slot) if slot.active_pid.is_none());
        let foreign = matches!(found.slot, SlotState::Foreign { .. });
        let used = matches!(&found.slot, SlotState::Ok(slot) if slot.active_pid.is_some());
        let logical = found.wal_level == "logical";
        let (may_make, no_stream, publication) =
            (found.may_make, found.no_stream, found.publication);
        match plan(found) {
            Plan::Stream(_) => {
                assert!(usable && logical && publication && !no_stream, "{words}");
            }
            Plan::Table { why, make } => {
                assert_eq!(why.is_none(), no_stream, "a cause is named: {words}");
                assert!(make.is_none() || (may_make && logical && publication), "{words}");
                assert!(make.is_none() || !(foreign || used || no_stream), "not ours: {words}");
                makes += usize::from(make.is_some());
            }
            // An earlier session of ours is about to end.
            Plan::Fail(failure) => {
                assert!(used && logical && !no_stream, "{words}");
                assert_eq!(failure.kind, Kind::SlotHeld);
            }
        }
    }
    assert!(makes > 0);
}

#[test]
fn a_usable_slot_is_streamed_from_and_a_lost_one_made_anew() {
    let found = |slot, last_failure| Found {
        no_stream: false,
        wal_level: "logical".to_owned(),
        slot,
        name: "outboxd_orders".to_owned(),
        stranger: None,
        may_make: true,
        publication: true,
        last_failure,
    };
    assert!(matches!(plan(found(slot(None), None)), Plan::Stream(_)));
    let make = |found| match plan(found) {
        Plan::Table { make, .. } => make,
        Plan::Stream(_) | Plan::Fail(_) => None,
    };
    assert_eq!(make(found(SlotState::Missing, None)), Some(Make::New));
    let lost = SlotState::Lost { reason: "wal_removed".to_owned() };
    assert_eq!(make(found(lost, None)), Some(Make::Anew));
    assert_eq!(make(found(slot(None), Some(Kind::PublicationMissing))), Some(Make::Anew));
}
