//! Puts together what database and brokers know of an event.

use tokio_postgres::Client;

use super::{Message, Place, Traced};
use crate::commands::Stopped;
use crate::config::{Config, DestinationConfig};
use crate::error::Failure;
use crate::message::Envelope;
use crate::publish::look::{Extent, Look, Looker, Seen, Wanted};
use crate::relay::route;
use crate::store::trace::{self, Letter, Receipt, Row, Standing};
use crate::store::{Store, identity};

/// Messages that are looked at in one go.
pub const MOST: u64 = 200_000;

/// Everything; `None` when nobody knows it.
pub async fn find(
    client: &Client,
    config: &Config,
    places: &[&DestinationConfig],
    event: &str,
) -> Result<Option<Traced>, Stopped> {
    let relay = &config.relay.name;
    let store = Store::open(client, relay, &config.source).await?;
    let generation = identity::read(client, relay, &config.source.table).await?;
    let generation = generation.map_or(1, |row| row.generation);
    let envelope = |place: &DestinationConfig| Envelope::new(relay, generation, place);
    let row = trace::rows(client, &config.source, event).await?.into_iter().next();
    let letters = trace::letters(client, relay, event).await?;
    let number = event.parse().ok().or(row.as_ref().map(|row| row.seq));
    let number = number.or_else(|| letters.first().map(|letter| letter.seq));
    let seq = match number {
        Some(seq) => seq,
        None => {
            let wanted = Wanted { id: Some(event.to_owned()), seq: None };
            let mut found = None;
            for place in places {
                let look = last_messages(place, &envelope(place), &wanted).await?;
                found = found.or(look.seen.first().map(|seen| seen.seq));
            }
            let Some(seq) = found else { return Ok(None) };
            seq
        }
    };
    let receipts = trace::receipts(client, relay, seq).await?;
    let standings = trace::standings(client, relay, seq).await?;
    let id = row.as_ref().and_then(|row| row.id.clone());
    let id = id.or_else(|| letters.first().map(|letter| letter.event_id.clone()));
    let takes = match row {
        Some(_) => store.rows(client, &[seq]).await?.into_iter().next(),
        None => None,
    };
    let mut destinations = Vec::new();
    for place in places {
        let of = |name: &String| *name == place.name;
        let receipts: Vec<Receipt> =
            receipts.iter().filter(|one| of(&one.destination)).cloned().collect();
        let letters: Vec<Letter> =
            letters.iter().filter(|one| of(&one.destination)).cloned().collect();
        let standing = standings.iter().find(|one| of(&one.destination));
        let taken = takes.as_ref().is_none_or(|event| route::takes(&place.filter, event));
        let state = state(&receipts, standing, taken);
        let mut traced = Place {
            destination: place.name.clone(),
            stream: place.stream.clone(),
            state,
            receipts,
            letters,
            ..Place::default()
        };
        if matches!(state, "published" | "dead" | "undecided" | "waiting" | "forgotten") {
            let wanted = Wanted { seq: Some(seq), id: id.clone() };
            let floor = standing.map_or(0, |standing| standing.floor);
            if let Err(failure) =
                ask_broker(place, &envelope(place), &wanted, floor, &mut traced).await
            {
                traced.error = Some(failure.to_string());
            }
        }
        destinations.push(traced);
    }
    let known = |place: &Place| {
        !place.receipts.is_empty() || !place.letters.is_empty() || !place.messages.is_empty()
    };
    let failed = destinations.iter().any(|place| place.error.is_some());
    if row.is_none() && !failed && !destinations.iter().any(known) {
        return Ok(None);
    }
    Ok(Some(traced(relay, seq, id, row, destinations)))
}

fn traced(
    relay: &str,
    seq: i64,
    id: Option<String>,
    row: Option<Row>,
    destinations: Vec<Place>,
) -> Traced {
    let messages = || destinations.iter().flat_map(|place| &place.messages);
    let letters = || destinations.iter().flat_map(|place| &place.letters);
    let commit_lsn = messages()
        .find_map(|message| message.seen.commit_lsn.clone())
        .or_else(|| letters().find_map(|letter| letter.commit_lsn.clone()));
    // Receipts of several destinations tell of one commit: the narrowest says most.
    let receipts = destinations.iter().flat_map(|place| &place.receipts);
    let lsn = |text: &str| text.parse::<crate::lsn::Lsn>().unwrap_or_default().0;
    let between = receipts
        .filter_map(|receipt| receipt.first_lsn.clone().zip(receipt.last_lsn.clone()))
        .min_by_key(|(first, last)| lsn(last).saturating_sub(lsn(first)));
    Traced {
        relay: relay.to_owned(),
        seq,
        id: id.or_else(|| messages().map(|message| message.seen.event_id.clone()).next()),
        committed_at: row.as_ref().and_then(|row| row.committed_at.clone()),
        commit_between: between.filter(|_| commit_lsn.is_none()),
        commit_lsn,
        row,
        destinations,
    }
}

/// What the ledger says of the number, in one word.
fn state(receipts: &[Receipt], standing: Option<&Standing>, taken: bool) -> &'static str {
    let last = receipts.iter().rev().find(|receipt| receipt.outcome != "handed");
    match (last.map(|receipt| receipt.outcome.as_str()), standing) {
        // What no filter took stands in one receipt with its neighbours.
        (Some("published" | "unmatched"), _) if !taken => "unmatched",
        (Some("published"), _) => "published",
        (Some("dead"), _) => "dead",
        (Some("unmatched"), _) => "unmatched",
        (Some("gone"), _) => "gone",
        (Some("adopted"), _) => "adopted",
        (Some(_), _) | (None, None) => "unknown",
        (None, Some(_)) if !receipts.is_empty() => "waiting",
        (None, Some(standing)) if standing.before => "before",
        (None, Some(standing)) if standing.passed => "forgotten",
        (None, Some(_)) => "undecided",
    }
}

async fn last_messages(
    place: &DestinationConfig,
    envelope: &Envelope,
    wanted: &Wanted,
) -> Result<Look, Failure> {
    let looker = Looker::connect(place).await?;
    let Extent { last_seq, .. } = looker.extent().await?;
    looker.messages(envelope, wanted, (last_seq.saturating_sub(MOST), last_seq), MOST).await
}

/// Looks for the messages where the receipt says, then in wider and wider places; and where the
/// consumers stand with the first one.
async fn ask_broker(
    config: &DestinationConfig,
    envelope: &Envelope,
    wanted: &Wanted,
    floor: u64,
    place: &mut Place,
) -> Result<(), Failure> {
    let looker = Looker::connect(config).await?;
    let Extent { created, first_seq, last_seq } = looker.extent().await?;
    let published = place.receipts.iter().rev().find(|one| one.outcome == "published");
    let mut windows = Vec::new();
    match published {
        Some(receipt) if receipt.stream_created == created => {
            let Receipt { above, surely_above, stream_seq, .. } = receipt;
            windows.extend([(above + 1, *stream_seq), (surely_above + 1, *stream_seq)]);
            if *stream_seq < first_seq {
                let what = "messages up to there are not in the stream any more (deleted, purged, or \
                            removed by its limits)";
                place.note = Some(format!("it was at or below {stream_seq}: {what}"));
            }
        }
        Some(receipt) => {
            place.note = Some(format!(
                "it was in a stream made at {}; this one was made at {created}",
                receipt.stream_created
            ));
        }
        None => windows.push((floor + 1, last_seq)),
    }
    windows.push((last_seq.saturating_sub(MOST), last_seq));
    windows.dedup();
    let mut cut = false;
    for window in windows {
        let look = looker.messages(envelope, wanted, window, MOST).await?;
        cut |= look.cut;
        if !look.seen.is_empty() {
            place.messages = look.seen.into_iter().map(message).collect();
            break;
        }
    }
    let Some(first) = place.messages.first() else {
        if place.note.is_none() && place.state == "published" {
            place.note = Some(match cut {
                true => format!("it was not found among {MOST} messages of where it should be"),
                false => {
                    "it is not in the stream any more (deleted, or removed by its limits)".into()
                }
            });
        }
        return Ok(());
    };
    place.note = None;
    place.consumers = looker.consumers(&first.seen).await?;
    Ok(())
}

fn message(seen: Seen) -> Message {
    let at = jiff::Timestamp::from_nanosecond(i128::from(seen.stored_at_nanos)).ok();
    Message { stored_at: at.map(|at| at.to_string()), seen }
}
