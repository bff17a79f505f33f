//! One server process: spawn with a log file, signal, wait, end. Knows no server by name.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::place::Place;
use super::{Result, SandboxError};

/// Between two looks at a process that is to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// After this long a server that ignores its last signal is killed.
const LAST_SIGNAL_PATIENCE: Duration = Duration::from_secs(5);

/// What can be sent to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Ends nothing: reload of the configuration.
    Hangup,
    /// Ctrl-C; PostgreSQL's fast shutdown.
    Interrupt,
    /// PostgreSQL's immediate shutdown.
    Quit,
    /// Please end; PostgreSQL's smart shutdown.
    Terminate,
    /// `kill -9`.
    Kill,
    /// Freeze.
    Stop,
    /// Thaw.
    Continue,
    /// nats-server: lame duck mode.
    User2,
}

impl Signal {
    fn raw(self) -> rustix::process::Signal {
        use rustix::process::Signal as Raw;
        match self {
            Signal::Hangup => Raw::HUP,
            Signal::Interrupt => Raw::INT,
            Signal::Quit => Raw::QUIT,
            Signal::Terminate => Raw::TERM,
            Signal::Kill => Raw::KILL,
            Signal::Stop => Raw::STOP,
            Signal::Continue => Raw::CONT,
            Signal::User2 => Raw::USR2,
        }
    }
}

/// Sends a signal to a process that the caller started, or that a server of the sandbox did (a
/// walsender, say).
///
/// # Errors
/// When there is no such process.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let to = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let to = to.ok_or_else(|| SandboxError::new(format!("{pid} is no process id")))?;
    rustix::process::kill_process(to, signal.raw())
        .map_err(|error| SandboxError::new(format!("can't send {signal:?} to {pid}: {error}")))
}

/// Direct children of a process, from `/proc`; empty when it is gone.
fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Does it hold memory and files still? A zombie does not, whether or not somebody reaps it.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may hold anything.
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// A running server. Dropping it ends it at once.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    log: PathBuf,
    /// What its `Drop` sends first.
    last_signal: Signal,
    ended: bool,
}

impl Server {
    pub(crate) fn spawn(
        mut command: Command,
        log: &Path,
        last_signal: Signal,
        place: &mut Place,
    ) -> Result<Server> {
        let open = || File::options().create(true).append(true).open(log);
        let files = open().and_then(|out| Ok((open()?, out)));
        let (err, out) = files.map_err(|error| SandboxError::io("can't write", log, &error))?;
        let program = command.get_program().to_owned();
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            // A Ctrl-C of the terminal is ours to handle.
            .process_group(0)
            .spawn()
            .map_err(|error| SandboxError::io("can't start", Path::new(&program), &error))?;
        let server = Server { child, log: log.to_owned(), last_signal, ended: false };
        place.watch(server.pid())?;
        Ok(server)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, what: Signal) -> Result<()> {
        signal(self.pid(), what)
    }

    pub(crate) fn exited(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten();
        self.ended |= status.is_some();
        status
    }

    /// The error to return when it ended too early: with the end of its log.
    pub(crate) fn failed(&self, what: &str) -> SandboxError {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n");
        SandboxError::new(format!("{what}; the end of {}:\n{tail}", self.log.display()))
    }

    /// Waits until it ended by itself or by a signal sent before; how long that took.
    pub(crate) async fn wait(&mut self, deadline: Duration) -> Result<Duration> {
        let start = Instant::now();
        while self.exited().is_none() {
            if start.elapsed() > deadline {
                return Err(self.failed(&format!("it did not end within {deadline:?}")));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(start.elapsed())
    }

    /// `kill -9` of the process and of its children, as a machine that loses power would; returns
    /// when all are gone, since PostgreSQL refuses to start beside a process that was of the old one.
    pub(crate) fn kill(&mut self) {
        if self.exited().is_some() {
            return;
        }
        // Frozen, it can't start another child behind our back. Gone already is as good.
        drop(self.signal(Signal::Stop));
        let children = children(self.pid());
        for pid in children.iter().copied().chain([self.pid()]) {
            drop(signal(pid, Signal::Kill));
        }
        drop(self.child.wait());
        self.ended = true;
        let start = Instant::now();
        while children.iter().any(|pid| runs(*pid)) && start.elapsed() < LAST_SIGNAL_PATIENCE {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.exited().is_none() && self.signal(self.last_signal).is_ok() {
            let start = Instant::now();
            while self.exited().is_none() && start.elapsed() < LAST_SIGNAL_PATIENCE {
                std::thread::sleep(LOOK_INTERVAL);
            }
        }
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_server_is_gone_and_its_directory_too() {
        let mut place = Place::make("test", false).unwrap();
        let dir = place.path().to_owned();
        let mut command = Command::new("sleep");
        command.arg("600");
        let server = Server::spawn(command, &dir.join("log"), Signal::Quit, &mut place).unwrap();
        let pid = server.pid();
        assert!(dir.exists());
        drop(server);
        assert!(signal(pid, Signal::Continue).is_err());
        drop(place);
        assert!(!dir.exists());
    }
}
