//! `outboxd trace`: follows one event from its commit to the stream's consumers. Asks the database and
//! the brokers, and not the relay: it may be down.

mod find;
mod text;

use serde::Serialize;

use super::{Stopped, plain, refuse, say};
use crate::config::Config;
use crate::publish::look::{Consumer, Seen};
use crate::store::settle;
use crate::store::trace::{Letter, Receipt, Row};
use crate::wal::connect_upkeep;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Says when and at which position the event committed and whether its row is still there; for each
destination by which receipt it was recorded, its dead letters, where its message is in the stream and
since when; and for each durable consumer of that stream whether it has it. Changes nothing, and needs
no running relay.

The message is looked for where the receipt says, and then among the last 200,000 of the stream. By an
id the table is read as a whole, since there is no index by it; by number it is not.

Exit code 1: nothing is known of the event, or a broker could not be asked.

Examples:
  outboxd trace 4711
  outboxd trace 2f1c7d54-3c0e-4d0c-9a39-8a4f4ac4f2b0 --json
  outboxd trace 4711 --destination events")]
pub struct Args {
    /// The event: its number (seq, Outbox-Seq) or its id.
    #[arg(value_name = "EVENT")]
    pub event: String,

    /// At this destination only.
    #[arg(long, value_name = "NAME")]
    pub destination: Option<String>,

    /// As JSON.
    #[arg(long)]
    pub json: bool,
}

/// What is known of an event.
#[derive(Debug, Serialize)]
struct Traced {
    relay: String,
    seq: i64,
    id: Option<String>,
    /// `null`: it is gone, or never was there.
    row: Option<Row>,
    /// When it committed: as the server kept it.
    committed_at: Option<String>,
    /// Position of its commit record: of the message, or of its letter.
    commit_lsn: Option<String>,
    /// Otherwise between these, by its receipts.
    commit_between: Option<(String, String)>,
    destinations: Vec<Place>,
}

/// What became of it at a destination.
#[derive(Debug, Default, Serialize)]
struct Place {
    destination: String,
    stream: String,
    /// `published`, `dead`, `unmatched`, `gone`, `adopted`, `waiting`, `undecided`, `forgotten`,
    /// `before` or `unknown`.
    state: &'static str,
    receipts: Vec<Receipt>,
    letters: Vec<Letter>,
    messages: Vec<Message>,
    /// What is to be said about the messages.
    note: Option<String>,
    /// Relative to the first of the messages.
    consumers: Vec<Consumer>,
    /// Why the broker could not be asked.
    error: Option<String>,
}

/// A message of it.
#[derive(Debug, Serialize)]
struct Message {
    #[serde(flatten)]
    seen: Seen,
    /// When the server stored it.
    stored_at: Option<String>,
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let chosen = |name: &String| args.destination.as_ref().is_none_or(|one| one == name);
    let places: Vec<_> = config.destinations.iter().filter(|one| chosen(&one.name)).collect();
    if places.is_empty() {
        let names: Vec<&str> = config.destinations.iter().map(|one| one.name.as_str()).collect();
        return Err(refuse(
            "the configuration has no such destination",
            &format!("name one of these with --destination: {}", names.join(", ")),
        ));
    }
    let (control, _) = connect_upkeep(&config.source).await?;
    settle(&control.client).await?;
    let traced = find::find(&control.client, config, &places, &args.event).await?;
    let Some(traced) = traced else {
        let event = plain(&args.event);
        return Err(refuse(
            &format!(
                "nothing is known of event {event}: no row, no receipt, no dead letter, and no message \
                 among the last {} of {}",
                find::MOST,
                places.iter().map(|one| one.stream.as_str()).collect::<Vec<_>>().join(", ")
            ),
            "is it of this relay, and did it commit? By its number (seq, header Outbox-Seq) older ones \
             are found than by its id",
        ));
    };
    say(&match args.json {
        // What is printed can't fail to become JSON.
        true => serde_json::to_string_pretty(&traced).unwrap_or_default(),
        false => text::text(&traced),
    })?;
    match traced.destinations.iter().any(|place| place.error.is_some()) {
        true => Err(Stopped::Refused),
        false => Ok(()),
    }
}
