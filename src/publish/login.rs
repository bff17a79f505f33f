//! How a connection is asked for: servers, secrets, TLS; and what its refusal means.

use async_nats::{ConnectErrorKind, ConnectOptions, ServerAddr};
use std::error::Error as StdError;
use std::path::Path;
use std::time::Duration;

use crate::config::{DestinationConfig, NatsAuth};
use crate::error::{Failure, Kind};

/// Dead links are noticed after three unanswered pings, within 20 s.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Deadline of TCP, TLS and login together, for each address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Deadline of a request to the JetStream API.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Answers that may wait to be read: more than any window, since one that finds no room is lost.
const ANSWERS_MAX: usize = 128 * 1024;
/// Messages between us and the client's task: enough to fill its write buffer.
const SENDER_CAPACITY: usize = 1024;

/// Sets the TLS library's process-wide provider, which the NATS client takes, to ring. One that the
/// application has chosen stays.
pub fn provide_tls() {
    // An error says that there is one.
    drop(rustls::crypto::ring::default_provider().install_default());
}

pub(super) fn options(
    config: &DestinationConfig,
    address: &ServerAddr,
) -> Result<ConnectOptions, Failure> {
    let mut options = login(ConnectOptions::new(), &config.auth, address)?
        .name(format!("outboxd {}", config.name))
        .max_reconnects(1)
        .connection_timeout(CONNECT_TIMEOUT)
        .request_timeout(Some(REQUEST_TIMEOUT))
        .ping_interval(PING_INTERVAL)
        .subscription_capacity(ANSWERS_MAX)
        .client_capacity(SENDER_CAPACITY)
        .ignore_discovered_servers()
        // Subjects are made by the template's rule and reply subjects by us.
        .skip_subject_validation(true)
        .require_tls(config.tls.required);
    if let Some(prefix) = &config.inbox_prefix {
        options = options.custom_inbox_prefix(prefix);
    }
    if let Some(file) = &config.tls.ca_file {
        options = options.add_root_certificates(file.clone());
    }
    if let (Some(cert), Some(key)) = (&config.tls.cert_file, &config.tls.key_file) {
        options = options.add_client_certificate(cert.clone(), key.clone());
    }
    Ok(options)
}

/// Reads the secrets' files, at each connect.
fn login(
    options: ConnectOptions,
    auth: &NatsAuth,
    address: &ServerAddr,
) -> Result<ConnectOptions, Failure> {
    if let Some(file) = &auth.creds_file {
        let words = read(file)?;
        return options.credentials(&words).map_err(|error| {
            let detail = format!("{} is not a credentials file: {error}", file.display());
            Failure::new(Kind::BrokerLogin, detail)
        });
    }
    if let Some(file) = &auth.nkey_file {
        return Ok(options.nkey(read(file)?));
    }
    if let Some(file) = &auth.token_file {
        return Ok(options.token(read(file)?));
    }
    if let Some(user) = &auth.user {
        let password = auth.password_file.as_deref().map(read).transpose()?;
        return Ok(options.user_and_password(user.clone(), password.unwrap_or_default()));
    }
    Ok(match (address.username(), address.password()) {
        (Some(user), Some(password)) => {
            options.user_and_password(user.to_owned(), password.to_owned())
        }
        (Some(token), None) => options.token(token.to_owned()),
        (None, _) => options,
    })
}

fn read(file: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        Failure::new(Kind::BrokerLogin, format!("can't read {}: {error}", file.display()))
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

pub(super) fn connect_failure(server: &str, error: &async_nats::ConnectError) -> Failure {
    let server = shown(server);
    let detail = format!("{server}: {error}");
    let kind = match error.kind() {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            Kind::BrokerLogin
        }
        ConnectErrorKind::Tls => Kind::BrokerTls,
        _ if is_about_tls(error) => Kind::BrokerTls,
        ConnectErrorKind::Io if is_about_login(&detail) => Kind::BrokerLogin,
        ConnectErrorKind::ServerParse
        | ConnectErrorKind::Dns
        | ConnectErrorKind::TimedOut
        | ConnectErrorKind::Io
        | ConnectErrorKind::MaxReconnects => Kind::BrokerUnreachable,
    };
    Failure::new(kind, detail)
}

/// The server's words for logins that were good once: "User Authentication Expired",
/// "Account Authentication Expired", "User Authentication Revoked", "Authorization Violation".
pub(super) fn is_about_login(words: &str) -> bool {
    let words = words.to_ascii_lowercase();
    words.contains("authentication") || words.contains("authorization")
}

fn is_about_tls(error: &async_nats::ConnectError) -> bool {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = cause {
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if error.is::<rustls::Error>() || inner.is_some_and(|inner| inner.is::<rustls::Error>()) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// A server's URL without what stands before `@`.
pub(super) fn shown(server: &str) -> String {
    match (server.split_once("://"), server.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        (None, Some((_, host))) => host.to_owned(),
        (_, None) => server.to_owned(),
    }
}

pub(super) fn shuffled(servers: &[String]) -> Vec<&str> {
    let mut keyed: Vec<_> =
        servers.iter().map(|server| (uuid::Uuid::new_v4(), server.as_str())).collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, server)| server).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_in_urls_are_not_shown() {
        assert_eq!(shown("nats://user:p@ss@db:4222"), "nats://db:4222");
        assert_eq!(shown("token@db"), "db");
        assert_eq!(shown("nats://db:4222"), "nats://db:4222");
    }
}
