//! What a new job comes to, or why it can't be: nothing there, not retained any more, not published.

use tokio_postgres::Client;

use super::Args;
use crate::commands::{Stopped, refuse};
use crate::config::{Config, DestinationConfig};
use crate::lsn::Lsn;
use crate::relay::ranges::RangeSet;
use crate::store::replay::select::{self, Beginning, Plan, Selection};

/// The database's clock, microseconds since 1970-01-01 UTC.
pub async fn now(client: &Client) -> Result<i64, Stopped> {
    Ok(select::now(client).await?)
}

/// Finds what the selection takes, and refuses what can't be brought back.
pub async fn make(
    args: &Args,
    config: &Config,
    destination: &DestinationConfig,
    asked: &Selection,
    client: &Client,
) -> Result<Plan, Stopped> {
    let (relay, place) = (&config.relay.name, &destination.name);
    let Some(beginning) = select::beginning(client, relay, place).await? else {
        return Err(refuse(
            &format!("the ledger of relay {relay} has nothing that was published to {place}"),
            "look at what there is with `outboxd status`",
        ));
    };
    let numbers = select::numbers(client, relay, place, asked).await?;
    let numbers = match asked.events.is_empty() {
        true => {
            if !args.retained_only && is_before(asked, &beginning) {
                return Err(not_retained_back_to(place, &beginning));
            }
            numbers
        }
        false => narrow(config, place, asked, &numbers, client).await?,
    };
    let plan = select::plan(client, &config.source, &destination.filter, asked, numbers).await?;
    if plan.missing > 0 && !args.retained_only {
        let narrowed = asked.run.is_some() || asked.kind.is_some();
        let note = if narrowed { ", some of which may have been of this selection" } else { "" };
        return Err(refuse(
            &format!(
                "{} events in this range have no row any more{note}; {} are left to replay",
                plan.missing, plan.selected
            ),
            "narrow the range down, or add --retained-only to replay those that are left",
        ));
    }
    if plan.selected == 0 {
        return Err(refuse(
            &format!("nothing that was published to {place} fits this selection"),
            "try a wider one with --dry-run; what is undecided or a dead letter is not replayed \
             (`outboxd status`, `outboxd dead-letters list`)",
        ));
    }
    Ok(plan)
}

/// Does it ask for what was removed from the ledger?
fn is_before(asked: &Selection, beginning: &Beginning) -> bool {
    let lsn = |text: &Option<String>| text.as_deref().and_then(|text| text.parse::<Lsn>().ok());
    let by_lsn = lsn(&asked.since_lsn).zip(lsn(&beginning.lsn));
    let by_time = asked.since_time.as_deref().and_then(micros).zip(micros(&beginning.time));
    let inside = by_lsn.is_some_and(|(since, first)| since >= first)
        || by_time.is_some_and(|(since, first)| since >= first);
    beginning.is_cut && !inside
}

fn micros(text: &str) -> Option<i64> {
    text.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_microsecond)
}

fn not_retained_back_to(place: &str, beginning: &Beginning) -> Stopped {
    let lsn = beginning.lsn.as_deref().unwrap_or("unknown");
    refuse(
        &format!(
            "the ledger of {place} begins with LSN {lsn}, recorded at {}: what was published before is \
             not retained",
            beginning.time
        ),
        "ask from there on, or add --retained-only to replay what is left",
    )
}

/// The numbers of the events that were named; refuses when one of them was not published, or has no
/// row any more.
async fn narrow(
    config: &Config,
    place: &str,
    asked: &Selection,
    numbers: &[(i64, i64)],
    client: &Client,
) -> Result<Vec<(i64, i64)>, Stopped> {
    let published: RangeSet = numbers.iter().copied().collect();
    let mut named = RangeSet::default();
    for event in &asked.events {
        let found = select::numbers_of(client, &config.source, event).await?;
        if found.is_empty() {
            return Err(refuse(
                &format!("event {event} has no row (any more)"),
                "its message can come from a backup of the database only",
            ));
        }
        if !found.iter().any(|seq| published.contains(*seq)) {
            return Err(refuse(
                &format!("event {event} is not published to {place}, or not within this range"),
                "an undecided one is on its way (`outboxd status`); a dead letter is sent with \
                 `outboxd dead-letters redrive`",
            ));
        }
        found.into_iter().for_each(|seq| named.insert(seq));
    }
    Ok(published.intersection(&named).iter().collect())
}
