//! One PostgreSQL server: made from a template, started, stopped, killed, started again.

mod standby;

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tokio_postgres::{Client, NoTls};

use super::place::{Place, Unprivileged, base, free_port, make_dir, unique};
use super::process::{Server, Signal};
use super::{Result, SandboxError, postgres_bin};

/// Recovery after a kill under load takes seconds on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// How to stop the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Ends the sessions, writes a checkpoint; waits for walsenders to be caught up.
    Fast,
    /// Like a crash, but the processes end by themselves.
    Immediate,
    /// Waits for the sessions to leave.
    Smart,
}

/// What a server is made with.
#[derive(Debug, Clone, Default)]
pub struct PostgresOptions {
    /// Directory of `postgres` and `initdb`; [`postgres_bin`] when absent.
    pub bin: Option<PathBuf>,
    /// Lines of postgresql.conf, after ours, so that they win.
    pub settings: Vec<(String, String)>,
    /// The whole pg_hba.conf; everybody is trusted when absent.
    pub hba: Option<String>,
    /// Survive a crash of the *machine*: off by default, since only processes are killed here.
    pub fsync: bool,
    /// Leave the directory behind.
    pub keep: bool,
}

impl PostgresOptions {
    /// Adds a setting.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> PostgresOptions {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A PostgreSQL server of our own, superuser and database `postgres`, `wal_level = logical`.
#[derive(Debug)]
pub struct Postgres {
    // Declared before `place`: the server ends first, then its directory goes.
    server: Option<Server>,
    place: Place,
    options: PostgresOptions,
    bin: PathBuf,
    user: Option<Unprivileged>,
    port: u16,
}

impl Postgres {
    /// A server with the default options.
    ///
    /// # Errors
    /// When the programs are missing or the server does not come up.
    pub async fn start() -> Result<Postgres> {
        Postgres::start_with(PostgresOptions::default()).await
    }

    /// A server with these options.
    ///
    /// # Errors
    /// When the programs are missing or the server does not come up.
    pub async fn start_with(options: PostgresOptions) -> Result<Postgres> {
        let user = Unprivileged::find()?;
        let found = options.bin.clone().map_or_else(postgres_bin, Ok)?;
        let bin = reachable(&found, user)?;
        let template = template(&bin, user)?;
        let mut postgres = Postgres::place(options, bin, user)?;
        postgres.copy_data(&template)?;
        postgres.first_start().await?;
        Ok(postgres)
    }

    /// A directory with a log and no data yet.
    fn place(
        options: PostgresOptions,
        bin: PathBuf,
        user: Option<Unprivileged>,
    ) -> Result<Postgres> {
        let mut place = Place::make("postgres", options.keep)?;
        Unprivileged::own(user, place.path())?;
        let log = place.path().join("log");
        fs::write(&log, "").map_err(|error| SandboxError::io("can't write", &log, &error))?;
        place.watch(0)?;
        Ok(Postgres { server: None, place, options, bin, user, port: free_port()? })
    }

    fn copy_data(&self, from: &Path) -> Result<()> {
        let mut copy = as_user("cp", self.user);
        copy.arg("-R").arg(from).arg(self.data_dir());
        complete(copy, &format!("copy {}", from.display()))?;
        make_private(&self.data_dir())
    }

    /// Between our look and the server's bind, somebody may have taken the port.
    async fn first_start(&mut self) -> Result<()> {
        for attempt in 1.. {
            match self.restart().await {
                Err(_) if attempt < 4 && self.log().contains("could not bind") => {
                    self.port = free_port()?;
                }
                ended => return ended,
            }
        }
        Ok(())
    }

    /// Starts the stopped or killed server again: same data, same port, settings written anew.
    ///
    /// # Errors
    /// When it runs, or does not come up within a minute.
    pub async fn restart(&mut self) -> Result<()> {
        if self.is_running() {
            return Err(SandboxError::new("PostgreSQL is running already"));
        }
        self.write_configuration()?;
        let mut command = as_user(self.bin.join("postgres"), self.user);
        command.arg("-D").arg(self.data_dir());
        let log = self.place.path().join("log");
        self.server = Some(Server::spawn(command, &log, Signal::Quit, &mut self.place)?);
        let start = Instant::now();
        loop {
            let answer = self.try_connect().await;
            let Some(server) = self.server.as_mut() else { break };
            if let Some(status) = server.exited() {
                let error = server.failed(&format!("PostgreSQL ended with {status}"));
                self.server = None;
                return Err(error);
            }
            match answer {
                Ok(_) => break,
                Err(error) if start.elapsed() > START_DEADLINE => {
                    return Err(server.failed(&format!("PostgreSQL is not ready: {error}")));
                }
                Err(_) => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
        Ok(())
    }

    /// Stops the server, and says how long that took.
    ///
    /// # Errors
    /// When it does not run, or did not end within a minute.
    pub async fn stop(&mut self, how: Stop) -> Result<Duration> {
        let server =
            self.server.as_mut().ok_or_else(|| SandboxError::new("PostgreSQL does not run"))?;
        server.signal(match how {
            Stop::Fast => Signal::Interrupt,
            Stop::Immediate => Signal::Quit,
            Stop::Smart => Signal::Terminate,
        })?;
        let took = server.wait(START_DEADLINE).await?;
        self.gone()?;
        Ok(took)
    }

    /// `kill -9` of the server with all its processes.
    ///
    /// # Errors
    /// When the watchdog is gone.
    pub fn kill9(&mut self) -> Result<()> {
        if let Some(mut server) = self.server.take() {
            server.kill();
        }
        self.gone()
    }

    /// Sends a signal to the server's first process.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal(&self, what: Signal) -> Result<()> {
        let server = self.server.as_ref();
        server.ok_or_else(|| SandboxError::new("PostgreSQL does not run"))?.signal(what)
    }

    fn gone(&mut self) -> Result<()> {
        self.server = None;
        self.place.watch(0)
    }

    /// Is the first process alive?
    pub fn is_running(&mut self) -> bool {
        self.server.as_mut().is_some_and(|server| server.exited().is_none())
    }

    /// Changes a setting; it holds after [`Postgres::reload`] or a restart.
    ///
    /// # Errors
    /// When postgresql.conf can't be written.
    pub fn configure(&mut self, name: &str, value: &str) -> Result<()> {
        self.options.settings.push((name.to_owned(), value.to_owned()));
        self.write_configuration()
    }

    /// Tells the server to read its configuration again.
    ///
    /// # Errors
    /// When it does not run.
    pub fn reload(&self) -> Result<()> {
        self.signal(Signal::Hangup)
    }

    /// A file in the data directory that belongs to the server's user, mode 0600: a certificate.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn write_file(&self, name: &str, content: &str) -> Result<PathBuf> {
        let path = self.data_dir().join(name);
        fs::write(&path, content)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o600)))
            .map_err(|error| SandboxError::io("can't write", &path, &error))?;
        Unprivileged::own(self.user, &path)?;
        Ok(path)
    }

    fn write_configuration(&self) -> Result<()> {
        let port = self.port.to_string();
        let socket_dir = self.place.path().to_string_lossy().into_owned();
        let fsync = if self.options.fsync { "on" } else { "off" };
        let ours = [
            ("listen_addresses", "127.0.0.1"),
            ("port", &port),
            ("unix_socket_directories", &socket_dir),
            ("wal_level", "logical"),
            ("max_wal_senders", "10"),
            ("max_replication_slots", "10"),
            ("fsync", fsync),
            ("log_line_prefix", "%m [%p] "),
        ];
        let theirs = self.options.settings.iter();
        let lines = ours.into_iter().chain(theirs.map(|(name, value)| (&**name, &**value)));
        let text: String = lines
            .map(|(name, value)| format!("{name} = '{}'\n", value.replace('\'', "''")))
            .collect();
        self.write_file("postgresql.conf", &text)?;
        if let Some(hba) = &self.options.hba {
            self.write_file("pg_hba.conf", hba)?;
        }
        Ok(())
    }

    /// `postgres://postgres@127.0.0.1:PORT/postgres`
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of("postgres", "postgres")
    }

    /// The same over TCP for another user or database; parts must need no escaping.
    #[must_use]
    pub fn url_of(&self, user: &str, database: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/{database}", self.port)
    }

    /// The same server through its Unix socket.
    #[must_use]
    pub fn unix_url(&self) -> String {
        let dir = self.socket_dir().to_string_lossy().replace('/', "%2F");
        format!("postgres://postgres@{dir}:{}/postgres", self.port)
    }

    /// A session of the superuser, through the Unix socket. Its task ends with the client.
    ///
    /// # Errors
    /// When the server refuses.
    pub async fn connect(&self) -> Result<Client> {
        self.try_connect()
            .await
            .map_err(|error| SandboxError::new(format!("can't connect to PostgreSQL: {error}")))
    }

    async fn try_connect(&self) -> std::result::Result<Client, tokio_postgres::Error> {
        let mut config = tokio_postgres::Config::new();
        config.host_path(self.socket_dir()).port(self.port).user("postgres").dbname("postgres");
        let (client, connection) = config.connect(NoTls).await?;
        // Its error is also what every pending statement of the client returns.
        tokio::spawn(async { connection.await.is_ok() });
        Ok(client)
    }

    /// TCP port on 127.0.0.1; the same after a restart.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Process id of the first process, 0 when it does not run.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.as_ref().map_or(0, Server::pid)
    }

    /// Data directory.
    #[must_use]
    pub fn data_dir(&self) -> PathBuf {
        self.place.path().join("data")
    }

    /// Directory of the Unix socket.
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        self.place.path()
    }

    /// Directory of the programs that run.
    #[must_use]
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// All that the server logged so far, restarts included.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.place.path().join("log")).unwrap_or_default()
    }
}

fn make_private(data: &Path) -> Result<()> {
    fs::set_permissions(data, fs::Permissions::from_mode(0o700))
        .map_err(|error| SandboxError::io("can't change", data, &error))
}

/// A command that runs as the server's user, in a directory that exists for it, and takes no
/// libpq settings from our environment.
fn as_user(program: impl AsRef<std::ffi::OsStr>, user: Option<Unprivileged>) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/").env("LC_ALL", "C");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("PG") {
            command.env_remove(name);
        }
    }
    if let Some(user) = user {
        command.uid(user.uid).gid(user.gid);
    }
    command
}

fn complete(mut command: Command, what: &str) -> Result<String> {
    let output = command.output();
    let output = output.map_err(|error| SandboxError::new(format!("can't {what}: {error}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(SandboxError::new(format!("can't {what}: {}: {}", output.status, words.trim())))
}

/// The programs where the server's user may run them: as root, a project under `/root` is out of
/// its reach, and they are copied once.
fn reachable(bin: &Path, user: Option<Unprivileged>) -> Result<PathBuf> {
    let bin = fs::canonicalize(bin).map_err(|error| SandboxError::io("no such", bin, &error))?;
    let mut probe = as_user(bin.join("postgres"), user);
    probe.arg("-V");
    match complete(probe, "run postgres") {
        Ok(_) => return Ok(bin),
        Err(error) if user.is_none() => return Err(error),
        Err(_) => {}
    }
    // Programs find their libraries by relative paths of up to three directories.
    let root = bin.ancestors().nth(3).unwrap_or(&bin);
    let mut key = DefaultHasher::new();
    let made = fs::metadata(bin.join("postgres")).and_then(|file| file.modified()).ok();
    (&bin, made).hash(&mut key);
    let copy = base()?.join(format!("programs-{:016x}", key.finish()));
    let target = copy.join(bin.strip_prefix(root).unwrap_or(&bin));
    if !target.join("postgres").is_file() {
        let fresh = base()?.join(unique("programs"));
        let mut command = Command::new("cp");
        command.arg("-R").arg(root).arg(&fresh);
        complete(command, "copy PostgreSQL's programs")?;
        let mut command = Command::new("chmod");
        command.args(["-R", "a+rX"]).arg(&fresh);
        complete(command, "open PostgreSQL's programs")?;
        publish(&fresh, &copy)?;
    }
    Ok(target)
}

/// `initdb` takes over a second, a copy of what it made a tenth: made once per version.
fn template(bin: &Path, user: Option<Unprivileged>) -> Result<PathBuf> {
    let mut ask = as_user(bin.join("postgres"), user);
    ask.arg("-V");
    let version = complete(ask, "run postgres -V")?;
    let word: String = version.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '.').collect();
    let template = base()?.join(format!("template-{word}"));
    if template.join("data/PG_VERSION").is_file() {
        return Ok(template.join("data"));
    }
    let fresh = base()?.join(unique("template"));
    make_dir(&fresh, 0o755)?;
    Unprivileged::own(user, &fresh)?;
    let mut command = as_user(bin.join("initdb"), user);
    command.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-D"]);
    command.arg(fresh.join("data"));
    complete(command, "run initdb")?;
    publish(&fresh, &template)?;
    Ok(template.join("data"))
}

/// Another process may have been faster: then its work is as good.
fn publish(fresh: &Path, name: &Path) -> Result<()> {
    match fs::rename(fresh, name) {
        Ok(()) => Ok(()),
        Err(_) if name.exists() => fs::remove_dir_all(fresh)
            .map_err(|error| SandboxError::io("can't remove", fresh, &error)),
        Err(error) => Err(SandboxError::io("can't rename", fresh, &error)),
    }
}
