//! `outboxd completions SHELL`.

use clap::CommandFactory;

use super::{Stopped, say};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: outboxd completions bash > /etc/bash_completion.d/outboxd")]
pub struct Args {
    /// Which shell.
    pub shell: clap_complete::Shell,
}

/// Prints the script.
pub fn run(args: &Args) -> Result<(), Stopped> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::cli::Cli::command(), "outboxd", &mut script);
    say(&String::from_utf8_lossy(&script))?;
    Ok(())
}
