//! One file per verb of the command line. Here: which verb runs, how it can end, how it speaks.

pub mod adopt;
pub mod check;
pub mod completions;
pub mod config;
pub mod dead_letters;
pub mod deinit;
pub mod demo;
pub mod erase;
pub mod init;
pub mod prune;
pub mod recover;
pub mod replay;
pub mod run;
pub mod schema;
pub mod status;
pub mod sweep;
pub mod trace;

use std::io::{self, Write};
use std::process::ExitCode;

use tokio_util::sync::CancellationToken;

use crate::cli::{Cli, Command};
use crate::config::Faults;
use crate::error::Failure;
use crate::sandbox::SandboxError;

/// `EX_CONFIG` of sysexits.h.
const EXIT_CONFIG: u8 = 78;

/// As a shell reports SIGINT.
const EXIT_INTERRUPTED: u8 = 130;

/// Why a command stopped before it was done.
#[derive(Debug)]
pub enum Stopped {
    /// The configuration has faults.
    Config(Faults),
    /// Something failed.
    Failure(Failure),
    /// The demo's servers.
    Sandbox(SandboxError),
    /// Standard output can't be written.
    Output(io::Error),
    /// The command looked, and the answer is no; it has said so.
    Refused,
    /// SIGINT or SIGTERM.
    Interrupted,
}

impl From<Faults> for Stopped {
    fn from(faults: Faults) -> Stopped {
        Stopped::Config(faults)
    }
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Stopped {
        Stopped::Failure(failure)
    }
}

impl From<SandboxError> for Stopped {
    fn from(error: SandboxError) -> Stopped {
        Stopped::Sandbox(error)
    }
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Stopped {
        Stopped::Output(error)
    }
}

impl Stopped {
    /// Says on standard error what happened and what to do; the exit code.
    pub fn report(&self) -> ExitCode {
        let (text, code) = match self {
            Stopped::Config(faults) => (format!("error: {faults}\n"), EXIT_CONFIG),
            Stopped::Failure(failure) => {
                (format!("error: {failure}\nnext: {}\n", failure.kind.remedy()), 1)
            }
            Stopped::Sandbox(error) => (format!("error: {error}\n"), 1),
            // The reader of a pipe had enough: that is how `outboxd … | head` ends.
            Stopped::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                return ExitCode::SUCCESS;
            }
            Stopped::Output(error) => (format!("error: can't write the output: {error}\n"), 1),
            Stopped::Refused => return ExitCode::FAILURE,
            Stopped::Interrupted => ("error: interrupted\n".to_owned(), EXIT_INTERRUPTED),
        };
        match io::stderr().write_all(text.as_bytes()) {
            // Nobody reads: the exit code is what is left to say.
            Ok(()) | Err(_) => ExitCode::from(code),
        }
    }
}

/// Runs the command. A command that goes on until it is told takes `stop`; any other is dropped
/// where it stands when `stop` comes.
pub async fn run(cli: Cli, stop: CancellationToken) -> Result<(), Stopped> {
    let places = cli.places();
    let goes_on = matches!(cli.command, Command::Run(_) | Command::Demo(_) | Command::Replay(_));
    let short = async {
        match cli.command {
            Command::Run(args) => run::run(&args, &places, stop.clone()).await,
            Command::Schema(args) => {
                let loaded = places.exist().then(|| places.load()).transpose()?;
                schema::run(&args, loaded.as_ref().map(|loaded| &loaded.config))
            }
            Command::Init(args) => init::run(&args, &places.load()?.config).await,
            Command::Deinit(args) => deinit::run(&args, &places.load()?.config).await,
            Command::Adopt(args) => adopt::run(&args, &places.load()?.config).await,
            Command::Check(args) => check::run(&args, &places.load()?.config).await,
            Command::Status(args) => status::run(&args, &places).await,
            Command::Sweep(args) => sweep::run(&args, &places.load()?.config).await,
            Command::Replay(args) => replay::run(&args, &places.load()?.config, &stop).await,
            Command::Trace(args) => trace::run(&args, &places.load()?.config).await,
            Command::Prune(args) => prune::run(&args, &places.load()?.config).await,
            Command::Erase(args) => erase::run(&args, &places.load()?.config).await,
            Command::Recover(args) => recover::run(&args, &places.load()?.config).await,
            Command::DeadLetters(command) => {
                dead_letters::run(&command, &places.load()?.config).await
            }
            Command::Demo(args) => demo::run(&args, stop.clone()).await,
            Command::Config(command) => config::run(&command, &places),
            Command::Completions(args) => completions::run(&args),
        }
    };

    tokio::select! {
        ended = short => ended,
        () = stop.cancelled(), if !goes_on => Err(Stopped::Interrupted),
    }
}

/// A text in which nothing moves the cursor or breaks the line.
fn plain(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(escape).collect()
}

/// Says on standard error why not, and what to do.
fn refuse(what: &str, next: &str) -> Stopped {
    // Nobody reads: the exit code is what is left to say.
    drop(writeln!(io::stderr(), "error: {what}\nnext: {next}"));
    Stopped::Refused
}

/// Prints to standard output.
pub fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}
