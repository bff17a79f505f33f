//! One nats-server with JetStream: started, stopped, killed, started again on the same port and
//! store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;

use super::place::{Place, free_port};
use super::process::{Server, Signal};
use super::{Result, SandboxError, nats_server};

/// Recovery of a store of a million messages takes seconds.
const START_DEADLINE: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// What a server is made with.
#[derive(Debug, Clone, Default)]
pub struct NatsOptions {
    /// The program; [`nats_server`] when absent.
    pub program: Option<PathBuf>,
    /// Lines of the configuration file's top level, e.g. `max_payload: 64KB`.
    pub config: String,
    /// Lines inside its `jetstream` block, e.g. `sync_interval: always`.
    pub jetstream: String,
    /// Listen for monitoring (`/varz`) as well.
    pub monitor: bool,
    /// Leave the directory behind.
    pub keep: bool,
    /// Name, and what [`super::NatsCluster`] adds.
    pub(crate) node: Option<Node>,
}

/// A server's part in a cluster.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) cluster_port: u16,
    pub(crate) routes: Vec<u16>,
}

/// A nats-server of our own.
#[derive(Debug)]
pub struct Nats {
    // Declared before `place`: the server ends first, then its directory goes.
    server: Option<Server>,
    place: Place,
    options: NatsOptions,
    program: PathBuf,
    port: u16,
    monitor_port: Option<u16>,
}

impl Nats {
    /// A server with the default options.
    ///
    /// # Errors
    /// When the program is missing or the server does not come up.
    pub async fn start() -> Result<Nats> {
        Nats::start_with(NatsOptions::default()).await
    }

    /// A server with these options.
    ///
    /// # Errors
    /// When the program is missing or the server does not come up.
    pub async fn start_with(options: NatsOptions) -> Result<Nats> {
        let mut nats = Nats::prepare(options)?;
        // Between our look and the server's bind, somebody may have taken the port.
        for attempt in 1.. {
            match nats.restart().await {
                Ok(()) => break,
                Err(_) if attempt < 4 && nats.log().contains("address already in use") => {
                    nats.port = free_port()?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(nats)
    }

    pub(crate) fn prepare(options: NatsOptions) -> Result<Nats> {
        let program = options.program.clone().map_or_else(nats_server, Ok)?;
        let monitor_port = options.monitor.then(free_port).transpose()?;
        let place = Place::make("nats", options.keep)?;
        Ok(Nats { server: None, place, options, program, port: free_port()?, monitor_port })
    }

    /// Starts the stopped or killed server again: same store, same port.
    ///
    /// # Errors
    /// When it runs, or does not come up within a minute.
    pub async fn restart(&mut self) -> Result<()> {
        self.launch()?;
        self.wait_ready().await
    }

    /// Starts the process and does not wait: a node of a cluster is ready with its peers only.
    pub(crate) fn launch(&mut self) -> Result<()> {
        if self.is_running() {
            return Err(SandboxError::new("nats-server is running already"));
        }
        let file = self.place.path().join("nats.conf");
        fs::write(&file, self.configuration())
            .map_err(|error| SandboxError::io("can't write", &file, &error))?;
        let mut command = Command::new(&self.program);
        command.current_dir("/").arg("-c").arg(&file);
        let log = self.place.path().join("log");
        self.server = Some(Server::spawn(command, &log, Signal::Kill, &mut self.place)?);
        Ok(())
    }

    /// A server greets once JetStream has recovered its streams.
    pub(crate) async fn wait_ready(&mut self) -> Result<()> {
        let start = Instant::now();
        while !greets(self.port).await {
            let Some(server) = self.server.as_mut() else { break };
            if let Some(status) = server.exited() {
                let error = server.failed(&format!("nats-server ended with {status}"));
                self.server = None;
                return Err(error);
            }
            if start.elapsed() > START_DEADLINE {
                return Err(server.failed("nats-server is not ready"));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    fn configuration(&self) -> String {
        let mut text = format!("listen: \"127.0.0.1:{}\"\n", self.port);
        if let Some(port) = self.monitor_port {
            text += &format!("http: \"127.0.0.1:{port}\"\n");
        }
        let store = self.place.path().join("store");
        text += &format!(
            "jetstream {{\n  store_dir: \"{}\"\n{}\n}}\n",
            store.display(),
            self.options.jetstream
        );
        if let Some(node) = &self.options.node {
            let routes: Vec<String> =
                node.routes.iter().map(|port| format!("\"nats://127.0.0.1:{port}\"")).collect();
            text += &format!(
                "server_name: {}\ncluster {{\n  name: sandbox\n  listen: \"127.0.0.1:{}\"\n  \
                 routes: [{}]\n}}\n",
                node.name,
                node.cluster_port,
                routes.join(", ")
            );
        }
        text += &self.options.config;
        text.push('\n');
        text
    }

    /// Stops the server in its own time: consumers and connections are told, files are synced.
    ///
    /// # Errors
    /// When it does not run, or did not end within a minute.
    pub async fn stop(&mut self) -> Result<Duration> {
        let server =
            self.server.as_mut().ok_or_else(|| SandboxError::new("nats-server does not run"))?;
        server.signal(Signal::Terminate)?;
        let took = server.wait(START_DEADLINE).await?;
        self.gone()?;
        Ok(took)
    }

    /// `kill -9`.
    ///
    /// # Errors
    /// When the watchdog is gone.
    pub fn kill9(&mut self) -> Result<()> {
        if let Some(mut server) = self.server.take() {
            server.kill();
        }
        self.gone()
    }

    /// Sends a signal to the server: STOP freezes it, HUP reloads its configuration.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal(&self, what: Signal) -> Result<()> {
        let server = self.server.as_ref();
        server.ok_or_else(|| SandboxError::new("nats-server does not run"))?.signal(what)
    }

    /// Replaces the extra lines of the configuration and reloads; `max_payload` can change so.
    ///
    /// # Errors
    /// When the file can't be written, or the server does not run.
    pub fn reconfigure(&mut self, config: &str) -> Result<()> {
        config.clone_into(&mut self.options.config);
        let file = self.place.path().join("nats.conf");
        fs::write(&file, self.configuration())
            .map_err(|error| SandboxError::io("can't write", &file, &error))?;
        self.signal(Signal::Hangup)
    }

    fn gone(&mut self) -> Result<()> {
        self.server = None;
        self.place.watch(0)
    }

    /// Is the process alive?
    pub fn is_running(&mut self) -> bool {
        self.server.as_mut().is_some_and(|server| server.exited().is_none())
    }

    /// `nats://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// `http://127.0.0.1:PORT` of the monitoring endpoints, when asked for.
    #[must_use]
    pub fn monitor_url(&self) -> Option<String> {
        self.monitor_port.map(|port| format!("http://127.0.0.1:{port}"))
    }

    /// Client port; the same after a restart.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Process id, 0 when it does not run.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.as_ref().map_or(0, Server::pid)
    }

    /// JetStream's store.
    #[must_use]
    pub fn store_dir(&self) -> PathBuf {
        self.place.path().join("store")
    }

    /// The program that runs.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// All that the server logged so far, restarts included.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.place.path().join("log")).unwrap_or_default()
    }

    /// A client of its own.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn connect(&self) -> Result<async_nats::Client> {
        async_nats::connect(self.url())
            .await
            .map_err(|error| SandboxError::new(format!("can't connect to nats-server: {error}")))
    }
}

async fn greets(port: u16) -> bool {
    let greeting = async {
        let socket = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        BufReader::new(socket).lines().next_line().await.ok()?
    };
    let line = tokio::time::timeout(Duration::from_secs(1), greeting).await;
    line.is_ok_and(|line| line.is_some_and(|line| line.starts_with("INFO ")))
}
