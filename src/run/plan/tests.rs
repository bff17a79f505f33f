//! Every combination of what can be found, against properties.

use super::table::{at, healthy, synchronised};
use super::*;

const CEILING: Lsn = Lsn(50);

fn slots() -> Vec<SlotState> {
    vec![
        at(Lsn(40), None),
        at(CEILING, None),
        at(Lsn(60), None),
        synchronised(at(Lsn(40), None)),
        synchronised(at(Lsn(60), None)),
        at(CEILING, Some(7)),
        SlotState::Missing,
        SlotState::Creating { active_pid: Some(7) },
        SlotState::Lost { reason: "wal_removed".to_owned() },
        SlotState::Foreign { why: "a physical slot".to_owned() },
    ]
}

fn clusters() -> Vec<Cluster> {
    vec![
        Cluster::Same,
        Cluster::Promoted { was: 1, now: 2 },
        Cluster::Behind { was: 2, now: 1 },
        Cluster::Other { was: "1".to_owned(), now: "2".to_owned() },
    ]
}

fn ledgers() -> Vec<Continuity> {
    vec![
        Continuity::Fits,
        Continuity::Ahead { known: 9, last: 5 },
        Continuity::Short { destination: "events".to_owned(), known: 9, newest: 0 },
    ]
}

/// Each of `founds` with each of `values`.
fn times<T: Clone>(
    founds: Vec<Found>,
    values: &[T],
    set: impl Fn(&mut Found, T) + Copy,
) -> Vec<Found> {
    let each = |found: Found| {
        values.iter().cloned().map(move |value| {
            let mut found = found.clone();
            set(&mut found, value);
            found
        })
    };
    founds.into_iter().flat_map(each).collect()
}

fn all() -> Vec<Found> {
    let flags = [false, true];
    let mut all = vec![healthy()];
    all = times(all, &flags, |found, flag| found.no_stream = flag);
    all = times(all, &["minimal", "replica", "logical"], |found, word| {
        found.wal_level = word.to_owned();
    });
    all = times(all, &[None, Some("psql".to_owned())], |found, who| found.stranger = who);
    all = times(all, &flags, |found, flag| found.may_make = flag);
    all = times(all, &flags, |found, flag| found.publication = flag);
    all = times(all, &[None, Some(Kind::PublicationMissing)], |found, kind| {
        found.last_failure = kind;
    });
    all = times(all, &slots(), |found, slot| found.slot = slot);
    all = times(all, &[None, Some(CEILING)], |found, ceiling| found.ceiling = ceiling);
    all = times(all, &clusters(), |found, cluster| found.cluster = cluster);
    times(all, &ledgers(), |found, ledger| found.ledger = ledger)
}

#[test]
fn every_plan_keeps_to_the_rules() {
    let (mut makes, mut gaps, mut streams) = (0, 0, 0);
    for found in all() {
        let words = format!("{found:?}");
        let slot = if let SlotState::Ok(slot) = &found.slot { Some(slot.clone()) } else { None };
        let used = slot.as_ref().is_some_and(|slot| slot.active_pid.is_some());
        let usable = slot.is_some() && !used;
        let foreign = matches!(found.slot, SlotState::Foreign { .. });
        let logical = found.wal_level == "logical";
        let one_history =
            found.ledger == Continuity::Fits && !matches!(found.cluster, Cluster::Behind { .. });
        let elsewhere = matches!(found.cluster, Cluster::Other { .. });
        let above = found
            .ceiling
            .zip(slot.as_ref())
            .is_some_and(|(ceiling, slot)| slot.confirmed_flush > ceiling);
        let made_since = matches!(found.cluster, Cluster::Promoted { .. })
            && slot.as_ref().is_some_and(|slot| slot.failover != Some(true));
        let Found { may_make, no_stream, publication, .. } = found;
        let plan = plan(found);
        assert_eq!(!one_history, matches!(plan, Plan::Refuse(_)), "{words}");
        if let Some(from) = plan.slot() {
            // Never from what the ledger has, and never from elsewhere.
            assert_eq!(Some(from), slot.as_ref(), "{words}");
            assert!(usable && logical && publication && !no_stream, "{words}");
        }
        match plan {
            Plan::Stream(_) => {
                assert!(!above && !elsewhere && !made_since, "rows may be missing: {words}");
                streams += 1;
            }
            Plan::Gap { .. } => {
                assert!(above || elsewhere || made_since, "nothing is missing: {words}");
                gaps += 1;
            }
            Plan::Table { why, make } => {
                assert_eq!(why.is_none(), no_stream, "a cause is named: {words}");
                assert!(make.is_none() || (may_make && logical && publication), "{words}");
                assert!(make.is_none() || !(foreign || used || no_stream), "not ours: {words}");
                makes += usize::from(make.is_some());
            }
            // An earlier session of ours is about to end.
            Plan::Wait(failure) => {
                assert!(used && logical && !no_stream, "{words}");
                assert_eq!(failure.kind, Kind::SlotHeld);
            }
            Plan::Refuse(failure) => {
                let next = failure.kind.remedy();
                assert!(next.contains("outboxd ") || next.contains("backup"), "{next}");
            }
        }
    }
    assert!(makes > 0 && gaps > 0 && streams > 0);
}

#[test]
fn a_usable_slot_is_streamed_from_and_a_lost_one_made_anew() {
    let found = |slot, last_failure| Found { slot, last_failure, ..healthy() };
    assert!(matches!(plan(healthy()), Plan::Stream(_)));
    let make = |found| if let Plan::Table { make, .. } = plan(found) { make } else { None };
    assert_eq!(make(found(SlotState::Missing, None)), Some(Make::New));
    let lost = SlotState::Lost { reason: "wal_removed".to_owned() };
    assert_eq!(make(found(lost, None)), Some(Make::Anew));
    assert_eq!(make(found(at(CEILING, None), Some(Kind::PublicationMissing))), Some(Make::Anew));
}

#[test]
fn clusters_are_compared_by_identifier_and_timeline() {
    let compare = |was, now| Cluster::compare(("1", was), ("1", now));
    assert_eq!(compare(3, 3), Cluster::Same);
    assert_eq!(compare(3, 4), Cluster::Promoted { was: 3, now: 4 });
    assert_eq!(compare(4, 3), Cluster::Behind { was: 4, now: 3 });
    assert!(matches!(Cluster::compare(("1", 3), ("2", 3)), Cluster::Other { .. }));
}

#[test]
fn a_stream_is_told_by_its_creation_its_end_and_its_beginning() {
    let facts = |created: &str, first_seq, last_seq| StreamFacts {
        stream: "EVENTS".to_owned(),
        created: created.to_owned(),
        replicas: 1,
        retention: crate::relay::outcome::Retention::Limits,
        last_seq,
        first_seq,
        max_message_bytes: 1,
        max_payload_bytes: 1,
        duplicate_window: std::time::Duration::ZERO,
        server_version: String::new(),
        pipeline: crate::relay::outcome::Pipeline::Batch,
        why: String::new(),
    };
    let numbers =
        |upto: u64| (0..=upto).flat_map(move |one| (0..=one).map(move |other| (one, other)));
    let mut seen = std::collections::HashSet::new();
    for (created, now) in [("", "new"), ("old", "old"), ("old", "new")] {
        for ((known, newest), (end, first)) in
            numbers(3).flat_map(|one| numbers(5).map(move |other| (one, other)))
        {
            let last = end.saturating_sub(1);
            let floor = Floor { created: created.to_owned(), seq: 0 };
            let anchor = Anchor { seq: newest, id: "x".to_owned() };
            let anchor = Some(&anchor).filter(|_| newest > 0);
            let stream = Stream::compare(&floor, known, anchor, &facts(now, first, last));
            seen.insert(stream.words());
            let same = created == now;
            assert_eq!(stream == Stream::New, created.is_empty());
            assert_eq!(stream == Stream::Rebuilt, !created.is_empty() && !same);
            assert_eq!(stream == Stream::Shorter, same && last < known);
            let nothing_left = newest > 0 && newest < first;
            assert_eq!(stream == Stream::Purged, same && last >= known && nothing_left);
        }
    }
    assert_eq!(seen.len(), 4);
}
