//! A trace for people: one line for each thing that happened to the event.

use std::fmt::Write as _;

use super::{Message, Place, Traced};
use crate::commands::plain;
use crate::publish::look::{Consumer, Standing};
use crate::store::trace::{Letter, Receipt, Row};

pub fn text(traced: &Traced) -> String {
    let mut text = String::new();
    // Writing to a String can't fail.
    let mut line = |name: &str, words: &str| {
        writeln!(text, "{name:<12} {}", plain(words)).unwrap_or_default();
    };
    let id = traced.id.as_deref().unwrap_or("of unknown id");
    line("event", &format!("seq {}, id {id}, relay {}", traced.seq, traced.relay));
    match &traced.row {
        Some(Row { run, kind, .. }) => {
            let or_dash = |word: &Option<String>| word.clone().unwrap_or_else(|| "-".to_owned());
            line("row", &format!("there: run {}, kind {}", or_dash(run), or_dash(kind)));
        }
        None => line("row", "not in the table (any more)"),
    }
    line("committed", &committed(traced));
    for place in &traced.destinations {
        line(
            "destination",
            &format!("{} (stream {}): {}", place.destination, place.stream, state(place)),
        );
        for receipt in &place.receipts {
            line("  receipt", &of_receipt(receipt));
        }
        for Letter { id, state, reason, detail, buried_at, .. } in &place.letters {
            line("  letter", &format!("{id}, {state}, buried {buried_at}: {reason}: {detail}"));
        }
        for Message { seen, stored_at } in &place.messages {
            let at = stored_at.as_deref().unwrap_or("an unknown time");
            let job =
                seen.replay.as_ref().map_or(String::new(), |job| format!(", by replay {job}"));
            line(
                "  message",
                &format!("sequence {} on {}, stored {at}{job}", seen.stream_seq, seen.subject),
            );
        }
        if let Some(note) = &place.note {
            line("  message", note);
        }
        for consumer in &place.consumers {
            line("  consumer", &of_consumer(consumer));
        }
        if !place.messages.is_empty() && place.consumers.is_empty() && place.error.is_none() {
            line("  consumer", "the stream has no durable ones");
        }
        if let Some(error) = &place.error {
            line("  error", error);
        }
    }
    text
}

fn committed(traced: &Traced) -> String {
    let created = traced.row.as_ref().and_then(|row| row.created_at.as_deref());
    let at = match (&traced.committed_at, created) {
        (Some(at), _) => at.clone(),
        (None, Some(at)) => {
            format!("{at} by the row's created_at (the server keeps no time of its commit)")
        }
        (None, None) => "at an unknown time".to_owned(),
    };
    match (&traced.commit_lsn, &traced.commit_between) {
        (Some(lsn), _) => format!("{at}, LSN {lsn}"),
        (None, Some((first, last))) if first == last => format!("{at}, LSN {first}"),
        (None, Some((first, last))) => format!("{at}, LSN {first} to {last}"),
        (None, None) => format!("{at}, at a position that is not known"),
    }
}

fn state(place: &Place) -> &'static str {
    match place.state {
        "published" => "published",
        "dead" => "a dead letter",
        "unmatched" => "not taken by its filter",
        "gone" => "its row went while it was undecided",
        "adopted" => "published by a relay before this one",
        "waiting" => "handed over to the ledger; waits for its turn",
        "undecided" => "undecided: on its way, or the destination can't take it (`outboxd status`)",
        "forgotten" => "decided; its receipt was removed since",
        "before" => "not sent: it is older than the destination",
        _ => "nothing is known: the relay has not run with this destination",
    }
}

fn of_receipt(receipt: &Receipt) -> String {
    let Receipt { id, outcome, first_lsn, last_lsn, recorded_at, stream_seq, .. } = receipt;
    let positions = match (first_lsn, last_lsn) {
        (Some(first), Some(last)) => format!("LSN {first} to {last}"),
        _ => "no position of a commit".to_owned(),
    };
    format!("{id}, {outcome}, recorded {recorded_at}, {positions}, stream up to {stream_seq}")
}

fn of_consumer(consumer: &Consumer) -> String {
    let Consumer { name, standing, ack_pending, pending } = consumer;
    let words = match standing {
        Standing::NotForIt => "its filter does not take it".to_owned(),
        Standing::BeginsLater => "was made later, and begins behind it".to_owned(),
        Standing::Pending => format!("not delivered yet ({pending} to deliver)"),
        Standing::Delivered => {
            format!("delivered; it or one before it is not acknowledged ({ack_pending} are not)")
        }
        Standing::DeliveredWithoutAcks => "delivered (it acknowledges nothing)".to_owned(),
        Standing::Acked => "acknowledged".to_owned(),
    };
    format!("{name}: {words}")
}
