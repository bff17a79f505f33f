//! The table row by row as the design states it, then every combination against what must hold
//! whatever the answer.

use super::*;

fn error(err_code: u64, description: &str) -> ServerError {
    ServerError { code: 400, err_code, description: description.into(), undelivered: false }
}

fn too_large() -> ServerError {
    error(10054, "message size exceeds maximum allowed")
}

fn ack(seq: u64, count: u64) -> End {
    End::PubAck { seq, count, duplicate: false }
}

fn stored(stream_seq: u64) -> Outcome {
    Outcome::Stored { stream_seq, duplicate: false }
}

fn refused_at(seq: u64) -> Said {
    Said { refused: Some((seq, too_large())), gap: false }
}

#[test]
fn one_event_is_final_on_any_number_of_replicas() {
    for replicated in [false, true] {
        let verdict = judge(1, replicated, &Said::default(), &ack(9, 1));
        assert_eq!(verdict, Verdict { rows: vec![(1, stored(9))], proof: None });
        let duplicate = End::PubAck { seq: 9, count: 1, duplicate: true };
        let rows = vec![(1, Outcome::Stored { stream_seq: 9, duplicate: true })];
        let verdict = judge(1, replicated, &Said::default(), &duplicate);
        assert_eq!(verdict, Verdict { rows, proof: None });
        let verdict = judge(1, replicated, &Said::default(), &ack(0, 1));
        assert_eq!(verdict, Verdict::all(1, Doubt::Unproven));
        let verdict = judge(1, replicated, &Said::default(), &End::FirstRefused(too_large()));
        assert!(matches!(
            verdict.rows.as_slice(),
            [(1, Outcome::Refused(Refusal { permanent: Some(Reason::TooLarge), code: 10054, .. }))]
        ));
    }
}

#[test]
fn a_whole_batch_needs_proof_only_with_replicas() {
    let verdict = judge(5, false, &Said::default(), &ack(9, 5));
    assert_eq!(verdict, Verdict { rows: vec![(5, stored(9))], proof: None });
    let verdict = judge(5, true, &Said::default(), &ack(9, 5));
    assert_eq!(verdict, Verdict { rows: vec![(5, stored(9))], proof: Some(5) });
}

#[test]
fn a_prefix_leaves_the_rest_unsent_on_one_replica_and_unknown_on_more() {
    let refusal = too_large().outcome(false);
    let verdict = judge(5, false, &refused_at(3), &ack(9, 2));
    let rows = vec![(2, stored(9)), (1, refusal.clone()), (2, Outcome::NotSent)];
    assert_eq!(verdict, Verdict { rows, proof: None });
    let verdict = judge(5, true, &refused_at(3), &ack(9, 2));
    let rows = vec![(2, stored(9)), (1, refusal.clone()), (2, Outcome::Unknown(Doubt::Gap))];
    assert_eq!(verdict, Verdict { rows, proof: Some(2) });

    let gap = Said { refused: None, gap: true };
    let verdict = judge(5, false, &gap, &ack(9, 2));
    assert_eq!(verdict.rows, vec![(2, stored(9)), (3, Outcome::NotSent)]);
    let verdict = judge(5, true, &gap, &ack(9, 2));
    assert_eq!(verdict.rows, vec![(2, stored(9)), (3, Outcome::Unknown(Doubt::Gap))]);
    let verdict = judge(5, false, &gap, &ack(0, 0));
    assert_eq!(verdict.rows, vec![(5, Outcome::NotSent)]);
}

#[test]
fn a_count_that_covers_a_refused_message_proves_nothing() {
    let verdict = judge(5, false, &refused_at(3), &ack(9, 5));
    assert_eq!(verdict, Verdict::all(5, Doubt::ServerError));
}

#[test]
fn doubts_are_told_apart() {
    let gap = Said { refused: None, gap: true };
    for (said, end, doubt) in [
        (Said::default(), End::Silence, Doubt::Silence),
        (gap.clone(), End::Silence, Doubt::Gap),
        (refused_at(2), End::Silence, Doubt::ServerError),
        (Said::default(), End::Abandoned, Doubt::Gap),
        (gap, End::Disconnected, Doubt::Disconnected),
        (Said::default(), ack(9, 6), Doubt::Unproven),
    ] {
        for replicated in [false, true] {
            assert_eq!(judge(5, replicated, &said, &end), Verdict::all(5, doubt), "{end:?}");
        }
    }
}

#[test]
fn a_refused_first_message_ends_its_batch_unless_the_store_failed() {
    let rest = |error: ServerError| {
        let mut rows = judge(5, false, &Said::default(), &End::FirstRefused(error)).rows;
        rows.pop().unwrap()
    };
    assert_eq!(rest(too_large()), (4, Outcome::NotSent));
    assert_eq!(rest(error(10205, "batch publish is disabled")), (4, Outcome::NotSent));
    assert_eq!(rest(ServerError::nobody_listens("events.a")), (4, Outcome::NotSent));
    let unknown = (4, Outcome::Unknown(Doubt::ServerError));
    assert_eq!(rest(error(10077, "maximum bytes exceeded")), unknown);
    assert_eq!(rest(error(10077, "no space left on device")), unknown);
    assert_eq!(rest(error(19999, "something new")), unknown);
}

#[test]
fn only_size_is_a_messages_own_fault() {
    for code in 10000..10300 {
        let outcome = error(code, "whatever").outcome(false);
        if let Outcome::Refused(refusal) = outcome {
            assert_eq!(refusal.permanent.is_some(), [10054, 10097].contains(&code), "{code}");
            assert_eq!(refusal.code, code);
        } else {
            let expected = if code == 10158 {
                Outcome::Unknown(Doubt::InProgress)
            } else {
                assert!(ServerError::WRONG_LAST.contains(&code), "{code}");
                Outcome::NotSent
            };
            assert_eq!(outcome, expected);
        }
    }
    let large = error(10077, "message too large").outcome(true);
    assert!(matches!(large, Outcome::Refused(Refusal { permanent: Some(_), .. })));
}

#[test]
fn with_replicas_an_error_is_a_fact_only_before_the_proposal() {
    let facts = [
        too_large(),
        error(10077, "maximum messages exceeded"),
        error(10109, "invalid operation on sealed stream"),
        ServerError::nobody_listens("events.a"),
    ];
    assert!(facts.iter().all(|error| matches!(error.outcome(true), Outcome::Refused(_))));
    let doubts = [error(10077, "no space left on device"), error(10023, "x"), error(1, "x")];
    for doubt in doubts {
        assert_eq!(doubt.outcome(true), Outcome::Unknown(Doubt::ServerError), "{doubt}");
    }
    let wrong_place = error(10071, "wrong last sequence: 7");
    assert_eq!(
        wrong_place.outcome(true),
        Outcome::Unknown(Doubt::Gap),
        "another leader may have it"
    );
    assert_eq!(wrong_place.outcome(false), Outcome::NotSent);
}

/// Every combination of size, replicas, words and end, against what must hold for each.
#[test]
fn no_answer_claims_more_than_it_can() {
    let errors = [
        too_large(),
        error(10077, "no space left on device"),
        error(10158, "busy"),
        ServerError::nobody_listens("events.a"),
    ];
    let mut ends = vec![End::Abandoned, End::Silence, End::Disconnected];
    ends.extend(errors.iter().cloned().map(End::FirstRefused));
    for (seq, count) in (0..3).flat_map(|seq| (0..5).map(move |count| (seq, count))) {
        ends.extend([false, true].map(|duplicate| End::PubAck { seq, count, duplicate }));
    }
    let mut saids = vec![];
    for gap in [false, true] {
        saids.push(Said { refused: None, gap });
        for seq in 1..4 {
            saids.extend(errors.iter().map(|e| Said { refused: Some((seq, e.clone())), gap }));
        }
    }
    let mut looked_at = 0;
    for sent in 1..4 {
        for replicated in [false, true] {
            for (said, end) in saids.iter().flat_map(|said| ends.iter().map(move |end| (said, end)))
            {
                check(sent, replicated, said, end);
                looked_at += 1;
            }
        }
    }
    assert_eq!(looked_at, 3 * 2 * 26 * 37);
}

fn check(sent: u64, replicated: bool, said: &Said, end: &End) {
    let verdict = judge(sent, replicated, said, end);
    let context = format!("{sent} {replicated} {said:?} {end:?} gives {verdict:?}");
    let total: u64 = verdict.rows.iter().map(|(count, _)| count).sum();
    assert_eq!(total, sent, "every message gets one outcome: {context}");
    assert!(verdict.rows.iter().all(|(count, _)| *count > 0), "{context}");

    let mut position = 0;
    let mut failed = false;
    for (count, outcome) in &verdict.rows {
        position += count;
        match outcome {
            Outcome::Stored { stream_seq, .. } => {
                assert!(!failed, "stored only as a prefix: {context}");
                let End::PubAck { seq, count, .. } = end else {
                    panic!("stored without an acknowledgement: {context}");
                };
                assert!(seq == stream_seq && *seq > 0, "{context}");
                assert_eq!(position, *count, "exactly what was counted: {context}");
                assert!(said.refused.as_ref().is_none_or(|(at, _)| *at > position), "{context}");
                assert!(!replicated || sent == 1 || verdict.proof == Some(position), "{context}");
            }
            Outcome::Refused(_) => {
                assert_eq!(*count, 1, "{context}");
                let first = matches!(end, End::FirstRefused(_)) && position == 1;
                let told = said.refused.as_ref().is_some_and(|(at, _)| *at == position);
                assert!(first || told, "refused without the server's word: {context}");
                failed = true;
            }
            Outcome::NotSent => {
                let acked = matches!(end, End::PubAck { .. }) && !replicated;
                assert!(acked || matches!(end, End::FirstRefused(_)), "{context}");
                failed = true;
            }
            Outcome::Unknown(_) => failed = true,
        }
    }
}
