//! Arguments to exit code; no logic.

use std::io;
use std::process::ExitCode;

use clap::Parser;
use outboxd::cli::Cli;
use outboxd::commands::{self, Stopped};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match relay(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(stopped) => stopped.report(),
    }
}

fn relay(cli: Cli) -> Result<(), Stopped> {
    let stop = CancellationToken::new();
    listen(stop.clone())?;
    Builder::new_current_thread().enable_all().build()?.block_on(commands::run(cli, stop))
}

/// The first SIGTERM or SIGINT asks to stop, the second ends the process. A thread of its own hears
/// them also while the main one is busy.
fn listen(stop: CancellationToken) -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let (mut term, mut int) = {
        let _inside = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let heard = async move {
        loop {
            let code = tokio::select! { _ = term.recv() => 143, _ = int.recv() => 130 };
            if stop.is_cancelled() {
                #[expect(clippy::disallowed_methods, reason = "asked twice: at once, as promised")]
                std::process::exit(code);
            }
            stop.cancel();
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || runtime.block_on(heard))
        .map(drop)
}
