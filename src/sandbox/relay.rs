//! One relay as a process of its own, started as an operator would: a configuration file and the
//! program. Knows the program from outside only: arguments, signals, exit codes, HTTP.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::place::Place;
use super::process::{Server, Signal};
use super::{Result, SandboxError};

const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// An endpoint answers from memory.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);

/// A relay, running or not.
#[derive(Debug)]
pub struct Relay {
    // Declared before `place`: the process ends first, then its directory goes.
    server: Option<Server>,
    place: Place,
    program: PathBuf,
    admin_port: u16,
}

impl Relay {
    /// Writes the configuration; starts nothing. `admin_port` is what it says in `[admin] listen`.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn prepare(
        program: &Path,
        configuration: &str,
        admin_port: u16,
        keep: bool,
    ) -> Result<Relay> {
        let place = Place::make("relay", keep)?;
        let relay = Relay { server: None, place, program: program.to_owned(), admin_port };
        let file = relay.configuration();
        fs::write(&file, configuration)
            .map_err(|error| SandboxError::io("can't write", &file, &error))?;
        Ok(relay)
    }

    /// The configuration file.
    #[must_use]
    pub fn configuration(&self) -> PathBuf {
        self.place.path().join("outboxd.toml")
    }

    /// `outboxd -c FILE` with nothing of our environment that could change what it means.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir("/").arg("-c").arg(self.configuration());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("PG") || text.starts_with("OUTBOXD_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// Runs another verb to its end.
    ///
    /// # Errors
    /// When the program can't be started.
    pub async fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = tokio::process::Command::from(self.command());
        command.args(arguments).kill_on_drop(true).stdin(std::process::Stdio::null());
        command.output().await.map_err(|error| SandboxError::io("can't run", &self.program, &error))
    }

    /// The same, where anything but success is an error; standard output.
    ///
    /// # Errors
    /// When the program can't be started, or fails.
    pub async fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.output(arguments).await?;
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(out);
        }
        let words = String::from_utf8_lossy(&output.stderr);
        let verb = arguments.join(" ");
        Err(SandboxError::new(format!("outboxd {verb}: {}\n{out}{words}", output.status)))
    }

    /// Starts `outboxd run` and does not wait.
    ///
    /// # Errors
    /// When it runs already, or can't be started.
    pub fn start(&mut self) -> Result<()> {
        if self.is_running() {
            return Err(SandboxError::new("the relay is running already"));
        }
        let mut command = self.command();
        command.arg("run");
        let log = self.log_file();
        self.server = Some(Server::spawn(command, &log, Signal::Kill, &mut self.place)?);
        Ok(())
    }

    /// Waits until `/readyz` says yes.
    ///
    /// # Errors
    /// When it ends before, or is not ready in time.
    pub async fn wait_ready(&mut self, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let answer = self.get("/readyz").await;
            if answer.as_ref().is_ok_and(|(status, _)| *status == 200) {
                return Ok(());
            }
            let server = self.server.as_mut();
            let server = server.ok_or_else(|| SandboxError::new("the relay does not run"))?;
            if let Some(status) = server.exited() {
                return Err(server.failed(&format!("the relay ended with {status}")));
            }
            if start.elapsed() > deadline {
                return Err(server.failed(&format!("the relay is not ready: {answer:?}")));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// SIGTERM; waits for the end; its exit status and how long that took.
    ///
    /// # Errors
    /// When it does not run, or did not end in time.
    pub async fn terminate(&mut self, deadline: Duration) -> Result<(ExitStatus, Duration)> {
        self.signal(Signal::Terminate)?;
        let mut server =
            self.server.take().ok_or_else(|| SandboxError::new("the relay does not run"))?;
        let took = server.wait(deadline).await?;
        let status = server.exited().unwrap_or_else(|| ExitStatus::from_raw(0));
        self.place.watch(0)?;
        Ok((status, took))
    }

    /// `kill -9`.
    ///
    /// # Errors
    /// When the watchdog is gone.
    pub fn kill9(&mut self) -> Result<()> {
        if let Some(mut server) = self.server.take() {
            server.kill();
        }
        self.place.watch(0)
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal(&self, what: Signal) -> Result<()> {
        let server = self.server.as_ref();
        server.ok_or_else(|| SandboxError::new("the relay does not run"))?.signal(what)
    }

    /// Is the process alive?
    pub fn is_running(&mut self) -> bool {
        self.server.as_mut().is_some_and(|server| server.exited().is_none())
    }

    /// Process id, 0 when it does not run.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.as_ref().map_or(0, Server::pid)
    }

    /// `http://127.0.0.1:PORT`
    #[must_use]
    pub fn admin_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.admin_port)
    }

    /// Status and body of one of its pages.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let words = |error: &dyn std::fmt::Display| {
            SandboxError::new(format!("GET {}{path}: {error}", self.admin_url()))
        };
        let ask = async {
            let mut socket = TcpStream::connect(("127.0.0.1", self.admin_port)).await?;
            let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
            socket.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            socket.read_to_string(&mut answer).await?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = tokio::time::timeout(ANSWER_DEADLINE, ask)
            .await
            .map_err(|error| words(&error))?
            .map_err(|error| words(&error))?;
        let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
        status.zip(body).ok_or_else(|| words(&"no HTTP answer"))
    }

    /// Where its log lines go.
    #[must_use]
    pub fn log_file(&self) -> PathBuf {
        self.place.path().join("log")
    }

    /// All that it logged so far, restarts included.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }
}
