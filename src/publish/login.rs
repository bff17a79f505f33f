//! Who we are to a NATS server: secrets from their files, and the answer to its challenge. Also how
//! servers are named and chosen.

use async_nats::{ConnectInfo, Protocol, ServerAddr, ServerInfo};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use nkeys::KeyPair;
use std::path::Path;
use std::time::Duration;

use crate::config::{DestinationConfig, NatsAuth};
use crate::error::{Failure, Kind};

/// Deadline of a request to the JetStream API.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Sets the TLS library's process-wide provider to ring. One that the application has chosen stays.
pub fn provide_tls() {
    // An error says that there is one.
    drop(rustls::crypto::ring::default_provider().install_default());
}

/// What the server is told of us. Reads the secrets' files, at each connect.
pub(super) fn introduction(
    config: &DestinationConfig,
    address: &ServerAddr,
    server: &ServerInfo,
) -> Result<ConnectInfo, Failure> {
    let mut info = ConnectInfo {
        verbose: false,
        pedantic: false,
        user_jwt: None,
        nkey: None,
        signature: None,
        name: Some(format!("outboxd {}", config.name)),
        echo: true,
        lang: "rust".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: Protocol::Dynamic,
        tls_required: config.tls.required || address.tls_required(),
        user: None,
        pass: None,
        auth_token: None,
        headers: true,
        no_responders: true,
    };
    log_in(&mut info, &config.auth, address, &server.nonce)?;
    Ok(info)
}

fn log_in(
    info: &mut ConnectInfo,
    auth: &NatsAuth,
    address: &ServerAddr,
    nonce: &str,
) -> Result<(), Failure> {
    if let Some(file) = &auth.creds_file {
        let words = read(file)?;
        let [jwt, seed] = between_dashes(&words).ok_or_else(|| {
            let what = "a token and a seed, each between two lines of dashes, are not in it";
            let detail = format!("{} is not a credentials file: {what}", file.display());
            Failure::new(Kind::BrokerLogin, detail)
        })?;
        info.user_jwt = Some(jwt.to_owned());
        info.signature = Some(sign(file, seed, nonce)?.1);
    } else if let Some(file) = &auth.nkey_file {
        let (public, signature) = sign(file, read(file)?.trim(), nonce)?;
        info.nkey = Some(public);
        info.signature = Some(signature);
    } else if let Some(file) = &auth.token_file {
        info.auth_token = Some(read(file)?);
    } else if let Some(user) = &auth.user {
        let password = auth.password_file.as_deref().map(read).transpose()?;
        info.user = Some(user.clone());
        info.pass = Some(password.unwrap_or_default());
    } else {
        match (address.username(), address.password()) {
            (Some(user), Some(password)) => {
                info.user = Some(user.to_owned());
                info.pass = Some(password.to_owned());
            }
            (token, _) => info.auth_token = token.map(ToOwned::to_owned),
        }
    }
    Ok(())
}

/// Public key and signature of the server's challenge.
fn sign(file: &Path, seed: &str, nonce: &str) -> Result<(String, String), Failure> {
    let refused = |error: nkeys::error::Error| {
        let detail = format!("the seed in {} can't be used: {error}", file.display());
        Failure::new(Kind::BrokerLogin, detail)
    };
    let pair = KeyPair::from_seed(seed).map_err(refused)?;
    let signature = pair.sign(nonce.as_bytes()).map_err(refused)?;
    Ok((pair.public_key(), BASE64_URL_SAFE_NO_PAD.encode(signature)))
}

/// The two lines of a credentials file that stand between lines of dashes: token and seed.
fn between_dashes(words: &str) -> Option<[&str; 2]> {
    let lines: Vec<&str> = words.lines().map(str::trim).collect();
    let is_rule = |line: &str| line.starts_with("---") && line.ends_with("---");
    let is_word = |line: &str| {
        let part = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.=".contains(&byte);
        !line.is_empty() && line.bytes().all(part)
    };
    let mut found = lines.windows(3).filter_map(|window| match window {
        [above, line, below] if is_rule(above) && is_rule(below) && is_word(line) => Some(*line),
        _ => None,
    });
    Some([found.next()?, found.next()?])
}

fn read(file: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        Failure::new(Kind::BrokerLogin, format!("can't read {}: {error}", file.display()))
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// The server's words for logins that were good once: "User Authentication Expired",
/// "Account Authentication Expired", "User Authentication Revoked", "Authorization Violation".
pub(super) fn is_about_login(words: &str) -> bool {
    let words = words.to_ascii_lowercase();
    words.contains("authentication") || words.contains("authorization")
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

    #[test]
    fn a_credentials_file_has_a_token_and_a_seed() {
        let words = "-----BEGIN NATS USER JWT-----\r\neyJ0.e30.s_-\r\n------END NATS USER JWT------\r\n\r\n\
                     ************************* IMPORTANT *************************\r\n\
                     NKEY Seed printed below can be used to sign and prove identity.\r\n\r\n\
                     -----BEGIN USER NKEY SEED-----\r\nSUAB\r\n------END USER NKEY SEED------\r\n";
        assert_eq!(between_dashes(words), Some(["eyJ0.e30.s_-", "SUAB"]));
        assert_eq!(between_dashes("SUAB"), None);
        assert_eq!(between_dashes("---\na\n---\n---\n\n---"), None);
    }
}
