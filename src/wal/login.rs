//! Start-up and authentication, the same for both connections. Owns the rules on when a password
//! may be sent and when the log-in must be bound to the TLS session.

use bytes::BytesMut;
use pgwire_replication::protocol::messages::{auth, parse_auth_request};
use postgres_protocol::authentication::{md5_hash, sasl};
use postgres_protocol::message::frontend;
use secrecy::{ExposeSecret, SecretString};
use std::io;

use super::dsn::{ChannelBinding, Dsn, Lookup, Target};
use super::wire::{Message, Wire, unexpected};
use crate::error::{Failure, Kind};

/// What the connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Control,
    Replication,
}

/// A connection that is ready for its first statement.
#[derive(Debug)]
pub(super) struct Session {
    pub wire: Wire,
    /// ParameterStatus, BackendKeyData and ReadyForQuery as they came, for whoever takes over.
    pub greeting: BytesMut,
}

fn refused(text: impl Into<String>) -> Failure {
    Failure::new(Kind::SourceLogin, text)
}

fn internal(error: &io::Error) -> Failure {
    Failure::new(Kind::Internal, format!("encoding a log-in message: {error}"))
}

/// Logs in. The caller holds the deadline.
pub(super) async fn log_in(
    mut wire: Wire,
    dsn: &Dsn,
    target: &Target,
    purpose: Purpose,
) -> Result<Session, Failure> {
    let application = dsn.application_name.as_deref().unwrap_or("outboxd");
    let mut parameters = vec![
        ("user", dsn.user.as_str()),
        ("database", dsn.database.as_str()),
        ("client_encoding", "UTF8"),
        ("application_name", application),
    ];
    if let Some(options) = &dsn.options {
        parameters.push(("options", options));
    }
    if purpose == Purpose::Replication {
        parameters.push(("replication", "database"));
    }
    let mut out = BytesMut::new();
    // Fails on NUL bytes, which the connection string can't hold.
    frontend::startup_message(parameters, &mut out).map_err(|error| refused(error.to_string()))?;
    wire.send(&out).await?;

    Authentication { wire: &mut wire, dsn, target }.run().await?;

    let mut greeting = BytesMut::new();
    loop {
        let Message { tag, body } = wire.message().await?;
        if !matches!(tag, b'S' | b'K' | b'Z') {
            return Err(unexpected(tag, "after the log-in"));
        }
        greeting.extend_from_slice(&[tag]);
        let length = u32::try_from(body.len() + 4).unwrap_or(u32::MAX);
        greeting.extend_from_slice(&length.to_be_bytes());
        greeting.extend_from_slice(&body);
        if tag == b'Z' {
            return Ok(Session { wire, greeting });
        }
    }
}

struct Authentication<'a> {
    wire: &'a mut Wire,
    dsn: &'a Dsn,
    target: &'a Target,
}

impl Authentication<'_> {
    async fn run(mut self) -> Result<(), Failure> {
        let (method, data) = self.request().await?;
        match method {
            auth::OK => return self.without_binding("trust"),
            auth::CLEARTEXT_PASSWORD => {
                self.without_binding("a plain password")?;
                if !self.wire.socket.is_private() {
                    return Err(refused(
                        "the server asks for the password in plain text over an unencrypted \
                         connection: use TLS (sslmode=require or stronger), a Unix socket, \
                         or scram-sha-256",
                    ));
                }
                let password = self.password()?;
                self.send_password(password.expose_secret().as_bytes()).await?;
            }
            auth::MD5_PASSWORD => {
                self.without_binding("md5")?;
                let salt = data
                    .first_chunk::<4>()
                    .ok_or_else(|| refused("the server's request for md5 is cut short"))?;
                let password = self.password()?;
                let user = self.dsn.user.as_bytes();
                let hash = md5_hash(user, password.expose_secret().as_bytes(), *salt);
                self.send_password(hash.as_bytes()).await?;
            }
            auth::SASL => self.scram(&data).await?,
            other => {
                return Err(refused(format!(
                    "the server asks for authentication method {other}, which is not supported \
                     (password, md5, scram-sha-256, certificates and trust are)"
                )));
            }
        }
        match self.request().await? {
            (auth::OK, _) => Ok(()),
            (other, _) => Err(refused(format!("the server went on with method {other}"))),
        }
    }

    async fn request(&mut self) -> Result<(i32, Vec<u8>), Failure> {
        let Message { tag, body } = self.wire.message().await?;
        if tag != b'R' {
            return Err(unexpected(tag, "during the log-in"));
        }
        let (method, data) =
            parse_auth_request(&body).map_err(|error| refused(error.to_string()))?;
        Ok((method, data.to_vec()))
    }

    fn without_binding(&self, method: &str) -> Result<(), Failure> {
        match self.dsn.channel_binding {
            ChannelBinding::Require => Err(refused(format!(
                "channel_binding=require, but the server chose {method} without it"
            ))),
            ChannelBinding::Disable | ChannelBinding::Prefer => Ok(()),
        }
    }

    fn password(&self) -> Result<SecretString, Failure> {
        match self.dsn.password_for(self.target) {
            Lookup::Found(password) => Ok(password),
            Lookup::Nothing(None) => Err(refused("the server asks for a password; none is given")),
            Lookup::Nothing(Some(why)) => {
                Err(refused(format!("the server asks for a password; none is given, and {why}")))
            }
        }
    }

    async fn send_password(&mut self, password: &[u8]) -> Result<(), Failure> {
        let mut out = BytesMut::new();
        frontend::password_message(password, &mut out).map_err(|error| internal(&error))?;
        self.wire.send(&out).await
    }

    async fn scram(&mut self, offered: &[u8]) -> Result<(), Failure> {
        let offers = |name: &str| offered.split(|byte| *byte == 0).any(|o| o == name.as_bytes());
        let end_point = match self.dsn.channel_binding {
            ChannelBinding::Disable => None,
            ChannelBinding::Prefer | ChannelBinding::Require => self.wire.socket.server_end_point(),
        };
        let (mechanism, binding) = match end_point {
            Some(hash) if offers(sasl::SCRAM_SHA_256_PLUS) => {
                (sasl::SCRAM_SHA_256_PLUS, sasl::ChannelBinding::tls_server_end_point(hash))
            }
            // "We could have": with it the server notices that someone took its offer away.
            Some(_) => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested()),
            None => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported()),
        };
        if mechanism != sasl::SCRAM_SHA_256_PLUS {
            self.without_binding("scram-sha-256")?;
            if !offers(mechanism) {
                return Err(refused("the server offers no SASL mechanism that is supported"));
            }
        }
        let password = self.password()?;
        let wrong = |error: io::Error| refused(format!("scram-sha-256: {error}"));
        let mut scram = sasl::ScramSha256::new(password.expose_secret().as_bytes(), binding);

        let mut out = BytesMut::new();
        frontend::sasl_initial_response(mechanism, scram.message(), &mut out)
            .map_err(|error| internal(&error))?;
        self.wire.send(&out).await?;
        scram.update(&self.sasl(auth::SASL_CONTINUE).await?).map_err(wrong)?;

        out.clear();
        frontend::sasl_response(scram.message(), &mut out).map_err(|error| internal(&error))?;
        self.wire.send(&out).await?;
        // The server proves here that it knows the password; an OK without this proof is refused.
        scram.finish(&self.sasl(auth::SASL_FINAL).await?).map_err(wrong)
    }

    async fn sasl(&mut self, expected: i32) -> Result<Vec<u8>, Failure> {
        match self.request().await? {
            (method, data) if method == expected => Ok(data),
            (method, _) => Err(refused(format!("scram-sha-256: step {method} out of turn"))),
        }
    }
}
