//! Receipts as they are made from what the core decided.

use super::*;
use crate::config::Config;
use crate::relay::outcome::Floor;
use crate::relay::receipts::{Decided, Decision, Origin};
use crate::relay::standing::LastAcked;

fn place() -> Place {
    let text = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://outboxd@db/app\"\n\
                [destination.events]\nservers = [\"nats://localhost\"]\nstream = \"EVENTS\"\n";
    let config = Config::parse("test.toml", text).unwrap();
    let envelope = Envelope::new("orders", 1, &config.destinations[0]);
    Place { destination: "events".to_owned(), envelope, blocks_runs: false, since: Since::Same }
}

fn draft(decision: Decision, acked: u64) -> ReceiptDraft {
    let mut decided = Decided::default();
    decided.add(1, Origin::Table { until: Lsn(9), handed: false }, decision);
    ReceiptDraft {
        destination: DestinationId(0),
        decided,
        floor: Floor { created: "then".to_owned(), seq: 3 },
        last: Some(LastAcked { stream_seq: acked, id: EventId::Int(7) }),
        known: 20,
    }
}

/// A receipt must not be kept for a message above the one it names: see `outbox.withdraw`.
#[test]
fn what_may_be_behind_the_last_ack_names_no_message() {
    let named = |decision, acked| {
        let rows = receipts(&place(), &draft(decision, acked));
        let [row] = rows.as_slice() else { panic!("{rows:?}") };
        (row.stream_seq, row.stream_msg_id.clone())
    };
    assert_eq!(named(Decision::Published, 20), (20, "orders:1:7".to_owned()));
    assert_eq!(named(Decision::Published, 10), (20, String::new()), "found by Resume, up to 20");
    assert_eq!(named(Decision::Unmatched, 10), (10, "orders:1:7".to_owned()));
}
