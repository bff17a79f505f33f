//! `outboxd run`: the relay itself, until SIGTERM or Ctrl-C.

use tokio_util::sync::CancellationToken;

use super::Stopped;
use crate::config::Places;
use crate::error::{Failure, Kind};
use crate::logging;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs what `outboxd init` makes; needs no right to make anything itself. Keeps trying while
PostgreSQL or NATS is away. On SIGTERM or Ctrl-C it reads no more, waits for the answers to what it
has sent ([relay] shutdown_timeout), records and confirms them, and exits with 0.

Without a usable slot (missing, lost, held by somebody else, wal_level not logical) it relays from
the table and makes a new slot meanwhile, unless [relay] auto_recreate is off.

A second relay with the same [relay] name stands by and takes over when the first one ends.")]
pub struct Args {
    /// Read no WAL: relay from the table, in the order of the rows' numbers (`[relay] stream = false`).
    #[arg(long)]
    pub no_stream: bool,
}

/// Runs until told to stop.
pub async fn run(args: &Args, places: &Places, stop: CancellationToken) -> Result<(), Stopped> {
    let mut config = places.load()?.config;
    config.relay.stream &= !args.no_stream;
    logging::init(&config.log);
    crate::run(config, stop)
        .await
        .map_err(|failure| told(failure, tracing::enabled!(tracing::Level::ERROR)))
}

/// A failure that ends the relay is a log line like any other, in the log's form, and is not said a
/// second time on standard error.
fn told(failure: Failure, logged: bool) -> Stopped {
    if !logged {
        return failure.into();
    }
    // Without its address the relay never began: nobody has told of it yet.
    if failure.kind == Kind::AdminAddress {
        let (code, remedy) = (failure.kind.code(), failure.kind.remedy());
        tracing::error!(code, remedy, "{}", failure.detail);
    }
    Stopped::Refused
}
