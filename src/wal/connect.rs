//! From a connection string to open sessions: tries the servers in turn and pairs the two
//! connections. Owns deadlines and the rules on falling back.

use secrecy::ExposeSecret;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;

use super::control::Control;
use super::dsn::{Dsn, Endpoint, SslMode, Target, check_dsn};
use super::identity::Identity;
use super::login::{Purpose, Session, log_in};
use super::replication::Replication;
use super::socket::{Encryption, Socket};
use super::tls::Tls;
use super::wire::Wire;
use crate::config::SourceConfig;
use crate::error::{Failure, Kind};

/// Two connections to one server.
pub struct Link {
    /// For statements.
    pub control: Control,
    /// For the stream.
    pub replication: Replication,
    /// The server that both reached.
    pub identity: Identity,
}

/// Which of the servers in the list will do, beside that it takes writes.
#[derive(Debug, Clone, Copy)]
pub enum Wanted<'a> {
    /// Any.
    Any,
    /// None that a failover has left behind: a primary of before comes back where it was, takes
    /// writes, and knows nothing of what happened since.
    NotBefore(&'a Identity),
    /// This one: what is done there belongs to a session that is connected to it.
    Same(&'a Identity),
}

impl Wanted<'_> {
    fn accepts(self, found: &Identity) -> Result<(), Failure> {
        match self {
            Wanted::Any => Ok(()),
            Wanted::Same(wanted) => wanted.same_server(found),
            Wanted::NotBefore(last) => last.is_followed_by(found),
        }
    }
}

/// Opens both connections, to the first server in the list that takes writes.
pub async fn connect(config: &SourceConfig) -> Result<Link, Failure> {
    connect_to(config, Wanted::Any).await
}

/// The same, to the first server that is wanted.
pub async fn connect_to(config: &SourceConfig, wanted: Wanted<'_>) -> Result<Link, Failure> {
    let connector = Connector::new(config, wanted)?;
    let mut failures = Failures::default();
    for target in &connector.dsn.targets {
        for address in connector.addresses(target, &mut failures).await {
            match connector.link(&address).await {
                Ok(link) => return Ok(link),
                Err(failure) => failures.add(&address, failure)?,
            }
        }
    }
    Err(failures.into_one())
}

/// Opens a control connection alone, for commands.
pub async fn connect_control(config: &SourceConfig) -> Result<(Control, Identity), Failure> {
    connect_control_to(config, Wanted::Any).await
}

/// The same, to the first server that is wanted.
pub async fn connect_control_to(
    config: &SourceConfig,
    wanted: Wanted<'_>,
) -> Result<(Control, Identity), Failure> {
    Connector::new(config, wanted)?.any_control().await
}

/// The same for work beside the relay's own, told from it by its `application_name`.
pub async fn connect_upkeep(config: &SourceConfig) -> Result<(Control, Identity), Failure> {
    connect_upkeep_to(config, Wanted::Any).await
}

/// The same, to the first server that is wanted.
pub async fn connect_upkeep_to(
    config: &SourceConfig,
    wanted: Wanted<'_>,
) -> Result<(Control, Identity), Failure> {
    let mut connector = Connector::new(config, wanted)?;
    let name = connector.dsn.application_name.take();
    connector.dsn.application_name =
        Some(format!("{} upkeep", name.as_deref().unwrap_or("outboxd")));
    connector.any_control().await
}

/// Opens a connection to each server in the list that takes no writes, or says why a server can't be
/// asked. For looking at standbys: the relay works on none.
pub async fn connect_standbys(
    config: &SourceConfig,
) -> Result<Vec<(String, Result<Control, Failure>)>, Failure> {
    let connector = Connector::new(config, Wanted::Any)?;
    let mut found = Vec::new();
    for target in &connector.dsn.targets {
        let (mut failures, before, mut primary) = (Failures::default(), found.len(), false);
        for address in connector.addresses(target, &mut failures).await {
            match connector.standby(&address).await {
                Ok(None) => primary = true,
                Ok(Some(control)) => found.push((address.to_string(), Ok(control))),
                Err(failure) => failures.note(&address, failure),
            }
        }
        // A name may have addresses on which nobody listens.
        if !primary && found.len() == before {
            found.push((target.to_string(), Err(failures.into_one())));
        }
    }
    Ok(found)
}

struct Connector<'a> {
    wanted: Wanted<'a>,
    dsn: Dsn,
    tls: Tls,
    deadline: Duration,
}

impl<'a> Connector<'a> {
    fn new(config: &SourceConfig, wanted: Wanted<'a>) -> Result<Connector<'a>, Failure> {
        let (key, url) = match &config.replication_url {
            Some(url) => ("replication_url", url),
            None => ("url", &config.url),
        };
        let dsn = check_dsn(url.expose_secret())
            .map_err(|error| Failure::new(Kind::SourceLogin, format!("[source] {key}: {error}")))?;
        let deadline = config.connect_timeout;
        let deadline = dsn.connect_timeout.map_or(deadline, |own| own.min(deadline));
        Ok(Connector { wanted, tls: Tls::load(&dsn.tls)?, dsn, deadline })
    }

    async fn any_control(&self) -> Result<(Control, Identity), Failure> {
        let mut failures = Failures::default();
        for target in &self.dsn.targets {
            for address in self.addresses(target, &mut failures).await {
                match self.control(&address).await {
                    Ok(control) => return Ok(control),
                    Err(failure) => failures.add(&address, failure)?,
                }
            }
        }
        Err(failures.into_one())
    }

    /// The target once for each address of its name: each has the whole deadline, as in libpq, and
    /// both connections go to the same one.
    async fn addresses(&self, target: &Target, failures: &mut Failures) -> Vec<Target> {
        let Endpoint::Tcp { host, address: None } = &target.endpoint else {
            return vec![target.clone()];
        };
        let look_up = tokio::net::lookup_host((host.as_str(), target.port));
        let reason = match timeout(self.deadline, look_up).await {
            Ok(Ok(found)) => {
                let at = |address: SocketAddr| Target {
                    endpoint: Endpoint::Tcp { host: host.clone(), address: Some(address.ip()) },
                    port: target.port,
                };
                let found: Vec<_> = found.map(at).collect();
                if !found.is_empty() {
                    return found;
                }
                "the name has no address".to_owned()
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the name was not resolved within {:?}", self.deadline),
        };
        failures.note(target, Failure::new(Kind::SourceUnreachable, reason));
        Vec::new()
    }

    async fn link(&self, target: &Target) -> Result<Link, Failure> {
        let session = self.session(target, Purpose::Replication).await?;
        let opening = Replication::open(session, self.deadline);
        let replication = self.statement("the replication connection", opening).await?;
        let (control, identity) = self.control(target).await?;
        replication.facts().identity.same_server(&identity)?;
        Ok(Link { control, replication, identity })
    }

    async fn control(&self, target: &Target) -> Result<(Control, Identity), Failure> {
        let session = self.session(target, Purpose::Control).await?;
        let opening = Control::open(session, self.deadline);
        let (control, facts) = self.statement("the control connection", opening).await?;
        // The next server may do, and then nobody else tells of this one.
        let accepted = self.wanted.accepts(&facts.identity);
        accepted.inspect_err(|failure| tracing::warn!("passed over {target}: {failure}"))?;
        Ok((control, facts.identity))
    }

    /// A connection to a server if it is a standby.
    async fn standby(&self, target: &Target) -> Result<Option<Control>, Failure> {
        let session = self.session(target, Purpose::Control).await?;
        let opening = async {
            let control = Control::open_any(session, self.deadline).await?;
            Ok(control.is_in_recovery().await?.then_some(control))
        };
        self.statement("the connection", opening).await
    }

    async fn statement<T>(
        &self,
        what: &str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        timeout(self.deadline, work).await.unwrap_or_else(|_| {
            let detail = format!("no answer on {what} within {:?}", self.deadline);
            Err(Failure::new(Kind::SourceSilent, detail))
        })
    }

    /// Logs in, with and without TLS as sslmode says.
    async fn session(&self, target: &Target, purpose: Purpose) -> Result<Session, Failure> {
        let (first, second) = encryption(self.dsn.tls.mode, &target.endpoint);
        match (self.try_session(target, purpose, first).await, second) {
            (Err(failure), Some(second)) if is_about_encryption(&failure) => {
                self.try_session(target, purpose, second).await
            }
            (outcome, _) => outcome,
        }
    }

    async fn try_session(
        &self,
        target: &Target,
        purpose: Purpose,
        encryption: Encryption,
    ) -> Result<Session, Failure> {
        let work = async {
            let socket = Socket::open(target, &self.dsn.tcp, encryption, &self.tls).await?;
            log_in(Wire::new(socket), &self.dsn, target, purpose).await
        };
        timeout(self.deadline, work).await.unwrap_or_else(|_| {
            let detail = format!("not connected within {:?}", self.deadline);
            Err(Failure::new(Kind::SourceUnreachable, detail))
        })
    }
}

/// The first attempt, and the one after a failure that may be about encryption. A Unix socket needs
/// none: nobody reads along.
fn encryption(mode: SslMode, endpoint: &Endpoint) -> (Encryption, Option<Encryption>) {
    if matches!(endpoint, Endpoint::Unix(_)) {
        return (Encryption::None, None);
    }
    match mode {
        SslMode::Disable => (Encryption::None, None),
        SslMode::Allow => (Encryption::None, Some(Encryption::Required)),
        SslMode::Prefer => (Encryption::IfOffered, Some(Encryption::None)),
        SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => (Encryption::Required, None),
    }
}

/// The handshake failed, or pg_hba.conf has no line for a connection of this kind (28000; a wrong
/// password is 28P01).
fn is_about_encryption(failure: &Failure) -> bool {
    failure.kind == Kind::SourceTls || failure.sqlstate.as_deref() == Some("28000")
}

/// Why no server would do.
#[derive(Default)]
struct Failures(Vec<(String, Failure)>);

impl Failures {
    fn note(&mut self, target: &Target, failure: Failure) {
        self.0.push((target.to_string(), failure));
    }

    /// Notes a failure, or ends the search: a server that refused the log-in is the right one, and
    /// the next would be asked with the same wrong password.
    fn add(&mut self, target: &Target, failure: Failure) -> Result<(), Failure> {
        let last = failure.kind == Kind::SourceLogin;
        self.note(target, failure);
        if last { Err(std::mem::take(self).into_one()) } else { Ok(()) }
    }

    /// All of them in one, of the most telling kind: a server that answered says more than one that
    /// did not.
    fn into_one(self) -> Failure {
        let silent = |kind| matches!(kind, Kind::SourceUnreachable | Kind::SourceSilent);
        let kind = |pick: &dyn Fn(&Failure) -> bool| {
            let found = self.0.iter().rev().find(|(_, failure)| pick(failure));
            found.map(|(_, failure)| (failure.kind, failure.sqlstate.clone()))
        };
        let (kind, sqlstate) = kind(&|failure| !silent(failure.kind))
            .or_else(|| kind(&|_| true))
            .unwrap_or((Kind::SourceUnreachable, None));
        let details: Vec<_> = self
            .0
            .iter()
            .map(|(target, failure)| format!("{target}: {}", failure.detail))
            .collect();
        Failure { kind, detail: details.join("; "), sqlstate }
    }
}
