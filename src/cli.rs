//! What the user typed. Owns names, help and the shape of arguments; runs nothing.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::commands;
use crate::config::Places;

const ABOUT: &str = "Streams the inserts of a PostgreSQL outbox table into NATS JetStream: in commit order, in \
     milliseconds, losing nothing, without polling and without marking rows.";

const AFTER: &str = "\
Getting started:
  outboxd config sample > outboxd.toml   a configuration to edit
  outboxd init --create-streams          make schema, publication, slot and stream
  outboxd check                          is everything as it must be?
  outboxd run                            stream until SIGTERM or Ctrl-C
  outboxd status --watch                 see it work
  outboxd dead-letters list              what could not be published

  With roles of their own for the relay (LOGIN and REPLICATION) and for the application, which an
  administrator's role prepares:
  outboxd --set source.url=postgres://admin@db/app init --role outboxd --writer app --create-streams

Configuration:
  A flag goes over the environment, the environment over the file. The file is -c FILE, or
  OUTBOXD_CONFIG, or ./outboxd.toml. Every key is also a variable, OUTBOXD_<SECTION>__<KEY>:
  OUTBOXD_RELAY__NAME, OUTBOXD_DESTINATION__EVENTS__STREAM; and a flag, --set relay.name=orders.
  `outboxd config reference` lists all keys, `outboxd config show` what is in effect and why.
  PG* variables and the PostgreSQL password file work as in psql; a variable that would change the
  connection and is not supported, such as PGSERVICE, is refused.

Exit codes:
  0    done
  1    failed, a check failed, or refused: the last lines say what and what to do next
  2    wrong usage
  78   configuration invalid: every fault was printed, nothing was opened
  130  ended by Ctrl-C before it was done; 143: by a second SIGTERM";

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "outboxd", version, about = ABOUT, after_long_help = AFTER)]
#[command(after_help = "`outboxd --help` has examples, configuration and exit codes.")]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// Configuration file [variable: OUTBOXD_CONFIG] [default: ./outboxd.toml].
    #[arg(short, long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Set a key over environment and file, e.g. `--set log.level=debug`; may be repeated.
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub settings: Vec<String>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the SQL of schema, grants and publication.
    Schema(commands::schema::Args),
    /// Make schema, publication and slot; repeat at will.
    Init(commands::init::Args),
    /// Drop slot and publication, and on demand the schema.
    Deinit(commands::deinit::Args),
    /// Stream until SIGTERM or Ctrl-C.
    Run(commands::run::Args),
    /// Look at every precondition of source and destinations, with remedies.
    Check(commands::check::Args),
    /// Take over a table from a polling relay: what it published is not sent again.
    Adopt(commands::adopt::Args),
    /// Show the relay's state, as the running relay tells it.
    Status(commands::status::Args),
    /// Look through the table for rows that were missed, and have the relay send them.
    Sweep(commands::sweep::Args),
    /// Follow one event from its commit to the stream's consumers.
    Trace(commands::trace::Args),
    /// Publish retained events once more, for a stream that has lost them.
    Replay(commands::replay::Args),
    /// Remove what is settled and old enough, and make partitions ahead, now.
    Prune(commands::prune::Args),
    /// Remove the rows and dead letters of one run.
    Erase(commands::erase::Args),
    /// After a restore to an older point: show what the stream has beyond it, and go on.
    Recover(commands::recover::Args),
    /// Look at events that could not be published, and decide about them.
    #[command(subcommand)]
    DeadLetters(commands::dead_letters::Command),
    /// Watch it work on throw-away servers, and get a verdict.
    Demo(commands::demo::Args),
    /// Show or explain the configuration.
    #[command(subcommand)]
    Config(commands::config::Command),
    /// Print a completion script for a shell.
    Completions(commands::completions::Args),
}

impl Cli {
    /// Where the configuration is looked for.
    pub fn places(&self) -> Places {
        Places {
            file: self.config.clone(),
            environment: std::env::vars_os().collect(),
            settings: self.settings.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
