//! What a connection string settles, as types. Shows no password.

use secrecy::SecretString;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::passfile::{self, Lookup, Wanted};

/// A checked connection string. `Debug` and `Display` show no password.
#[derive(Clone)]
pub struct Dsn {
    /// Servers in the order in which they are tried; at least one.
    pub targets: Vec<Target>,
    /// Role.
    pub user: String,
    /// Database.
    pub database: String,
    /// `application_name` or `fallback_application_name`.
    pub application_name: Option<String>,
    /// Command-line options for the server process.
    pub options: Option<String>,
    /// TLS.
    pub tls: TlsSettings,
    /// Whether the log-in must be tied to the TLS session.
    pub channel_binding: ChannelBinding,
    /// Deadline for one server; the configuration's own is the other bound.
    pub connect_timeout: Option<Duration>,
    /// Socket options.
    pub tcp: TcpSettings,
    pub(super) password: Option<SecretString>,
    pub(super) passfile: Option<PathBuf>,
}

/// One server to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Where.
    pub endpoint: Endpoint,
    /// Port, also a part of a Unix socket's name.
    pub port: u16,
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A name, resolved when the connection is made, or with `hostaddr` an address that is not.
    Tcp {
        /// The name that the certificate must bear.
        host: String,
        /// Used instead of a look-up.
        address: Option<IpAddr>,
    },
    /// Directory of a Unix socket.
    Unix(PathBuf),
}

/// Debian's and upstream's directory for sockets; both are tried when no host is given.
pub(super) const SOCKET_DIRECTORIES: [&str; 2] = ["/var/run/postgresql", "/tmp"];

impl Endpoint {
    pub(super) fn is_default_directory(directory: &Path) -> bool {
        SOCKET_DIRECTORIES.iter().any(|default| directory == Path::new(default))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.endpoint {
            Endpoint::Tcp { host, address } => {
                match host.contains(':') {
                    true => write!(f, "[{host}]:{}", self.port)?,
                    false => write!(f, "{host}:{}", self.port)?,
                }
                match address {
                    Some(address) if address.to_string() != *host => write!(f, " ({address})"),
                    _ => Ok(()),
                }
            }
            Endpoint::Unix(_) => write!(f, "{}", self.socket_path().unwrap_or_default().display()),
        }
    }
}

impl Target {
    /// Path of the Unix socket; `None` for TCP.
    pub fn socket_path(&self) -> Option<PathBuf> {
        match &self.endpoint {
            Endpoint::Unix(directory) => Some(directory.join(format!(".s.PGSQL.{}", self.port))),
            Endpoint::Tcp { .. } => None,
        }
    }
}

/// `sslmode`, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SslMode {
    /// Never.
    Disable,
    /// Only if the server insists.
    Allow,
    /// If the server can.
    Prefer,
    /// Always; the certificate is checked only when there are root certificates.
    Require,
    /// Always; the certificate must come from a trusted authority.
    VerifyCa,
    /// Always; the certificate must bear the host's name as well.
    VerifyFull,
}

/// Where trusted root certificates come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootCertificates {
    /// `~/.postgresql/root.crt` when it exists, else the platform's store.
    Default(Option<PathBuf>),
    /// `sslrootcert=system`: the platform's store.
    System,
    /// A file that must exist.
    File(PathBuf),
}

/// TLS as configured; the files are read when a connection is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsSettings {
    /// `sslmode`
    pub mode: SslMode,
    /// `sslrootcert`
    pub roots: RootCertificates,
    /// `sslcert` and `sslkey`. Both must exist.
    pub client: Option<(PathBuf, PathBuf)>,
    /// Client certificate in libpq's default place, used when it exists.
    pub default_client: Option<(PathBuf, PathBuf)>,
    /// Send the host's name in the clear (`sslsni`).
    pub sni: bool,
    /// Start TLS without asking first (`sslnegotiation=direct`, PostgreSQL 17).
    pub direct: bool,
}

/// `channel_binding`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelBinding {
    /// Never.
    Disable,
    /// When both sides can.
    Prefer,
    /// No log-in without it.
    Require,
}

/// Socket options of TCP connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpSettings {
    /// `keepalives`
    pub keepalives: bool,
    /// `keepalives_idle`; 60 s when not given, since a relay's connections are quiet for hours.
    pub keepalives_idle: Duration,
    /// `keepalives_interval`
    pub keepalives_interval: Duration,
    /// `keepalives_count`
    pub keepalives_count: u32,
    /// `tcp_user_timeout`
    pub user_timeout: Option<Duration>,
}

impl Dsn {
    /// The password for one server: from the string or `PGPASSWORD`, else from the password file.
    pub fn password_for(&self, target: &Target) -> Lookup {
        if let Some(password) = &self.password {
            return Lookup::Found(password.clone());
        }
        let Some(file) = &self.passfile else { return Lookup::Nothing(None) };
        let Target { endpoint, port } = target;
        let (database, user) = (&self.database, &self.user);
        passfile::look_up(file, Wanted { endpoint, port: *port, database, user })
    }

    /// The string without its password, for logs and `config show`.
    pub fn redacted(&self) -> String {
        let hosts: Vec<_> = self.targets.iter().map(Target::to_string).collect();
        let secret = if self.password.is_some() { ":***" } else { "" };
        format!("postgres://{}{secret}@{}/{}", self.user, hosts.join(","), self.database)
    }
}

impl fmt::Display for Dsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted())
    }
}

impl fmt::Debug for Dsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dsn")
            .field("url", &self.redacted())
            .field("tls", &self.tls)
            .field("channel_binding", &self.channel_binding)
            .finish_non_exhaustive()
    }
}
