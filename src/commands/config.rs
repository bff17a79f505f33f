//! `outboxd config show|sample|reference`.

use super::{Stopped, say};
use crate::config::{Places, reference, show};

/// Which.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print the configuration in effect, where each value comes from, secrets redacted.
    Show {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print a configuration file to start from.
    Sample,
    /// Print every key with its meaning, as Markdown.
    Reference,
}

/// Prints it.
pub fn run(command: &Command, places: &Places) -> Result<(), Stopped> {
    let text = match command {
        Command::Show { json: false } => show::toml(&places.load()?.shown),
        Command::Show { json: true } => format!("{:#}", show::json(&places.load()?.shown)),
        Command::Sample => reference::sample(),
        Command::Reference => reference::markdown(),
    };
    say(&text)?;
    Ok(())
}
