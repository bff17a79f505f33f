//! Parameters and `PG*` variables as settings: which there are, what they default to, and which
//! values they take.

use secrecy::SecretString;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::settings::{
    ChannelBinding, Dsn, Endpoint, RootCertificates, SOCKET_DIRECTORIES, SslMode, Target,
    TcpSettings, TlsSettings,
};
use super::{DsnError, parse};

/// What a parameter is to this program.
enum Support {
    /// Read below; the variable that gives its default.
    Yes(&'static str),
    /// Has no meaning here and does no harm.
    Ignored,
    /// libpq has it, and leaving it out silently could weaken security or change the server.
    No(&'static Refused),
}

/// A parameter of libpq that this program does not have.
struct Refused {
    parameter: &'static str,
    /// The variable that gives its default in libpq; empty when there is none.
    variable: &'static str,
    /// The one value that asks for what is done anyway; empty when there is none.
    harmless: &'static str,
    why: &'static str,
}

const fn refused(
    parameter: &'static str,
    variable: &'static str,
    harmless: &'static str,
    why: &'static str,
) -> Refused {
    Refused { parameter, variable, harmless, why }
}

const NOT_SUPPORTED: &str = "not supported";
const NO_SERVICES: &str = "service files are not read: write the parameters out";
const NO_REVOCATION: &str = "revocation lists are not checked";

const REFUSED: &[Refused] = &[
    refused("replication", "", "", "the program sets it itself"),
    refused("service", "PGSERVICE", "", NO_SERVICES),
    // The variable alone does nothing.
    refused("servicefile", "", "", NO_SERVICES),
    refused("sslpassword", "", "", "encrypted keys can't be read: use a key without pass phrase"),
    refused("sslcrl", "PGSSLCRL", "", NO_REVOCATION),
    refused("sslcrldir", "PGSSLCRLDIR", "", NO_REVOCATION),
    refused("sslcertmode", "PGSSLCERTMODE", "allow", NOT_SUPPORTED),
    refused("requiressl", "PGREQUIRESSL", "0", "use sslmode=require"),
    refused("requirepeer", "PGREQUIREPEER", "", NOT_SUPPORTED),
    refused("require_auth", "PGREQUIREAUTH", "", NOT_SUPPORTED),
    refused("load_balance_hosts", "PGLOADBALANCEHOSTS", "disable", NOT_SUPPORTED),
    refused("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION", "TLSv1.2", NOT_SUPPORTED),
    refused("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION", "", NOT_SUPPORTED),
    refused("min_protocol_version", "PGMINPROTOCOLVERSION", "3.0", NOT_SUPPORTED),
    refused("max_protocol_version", "PGMAXPROTOCOLVERSION", "3.0", NOT_SUPPORTED),
    refused("scram_client_key", "", "", NOT_SUPPORTED),
    refused("scram_server_key", "", "", NOT_SUPPORTED),
    refused("sslkeylogfile", "", "", NOT_SUPPORTED),
    refused("oauth_issuer", "", "", NOT_SUPPORTED),
    refused("oauth_client_id", "", "", NOT_SUPPORTED),
    refused("oauth_client_secret", "", "", NOT_SUPPORTED),
    refused("oauth_scope", "", "", NOT_SUPPORTED),
];

fn support(parameter: &str) -> Option<Support> {
    use Support::{Ignored, No, Yes};
    Some(match parameter {
        "host" => Yes("PGHOST"),
        "hostaddr" => Yes("PGHOSTADDR"),
        "port" => Yes("PGPORT"),
        "dbname" => Yes("PGDATABASE"),
        "user" => Yes("PGUSER"),
        "password" => Yes("PGPASSWORD"),
        "passfile" => Yes("PGPASSFILE"),
        "options" => Yes("PGOPTIONS"),
        "application_name" => Yes("PGAPPNAME"),
        "sslmode" => Yes("PGSSLMODE"),
        "sslnegotiation" => Yes("PGSSLNEGOTIATION"),
        "sslcert" => Yes("PGSSLCERT"),
        "sslkey" => Yes("PGSSLKEY"),
        "sslrootcert" => Yes("PGSSLROOTCERT"),
        "sslsni" => Yes("PGSSLSNI"),
        "channel_binding" => Yes("PGCHANNELBINDING"),
        "connect_timeout" => Yes("PGCONNECT_TIMEOUT"),
        "target_session_attrs" => Yes("PGTARGETSESSIONATTRS"),
        "gssencmode" => Yes("PGGSSENCMODE"),
        "client_encoding"
        | "fallback_application_name"
        | "keepalives"
        | "keepalives_idle"
        | "keepalives_interval"
        | "keepalives_count"
        | "tcp_user_timeout" => Yes(""),
        "sslcompression" | "krbsrvname" | "gsslib" | "gssdelegation" => Ignored,
        _ => No(REFUSED.iter().find(|refused| refused.parameter == parameter)?),
    })
}

/// Values by name; empty ones count as absent, as in libpq.
struct Values<'a> {
    given: BTreeMap<String, String>,
    env: &'a dyn Fn(&str) -> Option<String>,
}

impl Values<'_> {
    /// A value and the name under which it was given, for errors.
    fn get(&self, parameter: &'static str) -> Option<(String, String)> {
        if let Some(value) = self.given.get(parameter) {
            return (!value.is_empty()).then(|| (parameter.to_owned(), value.clone()));
        }
        let variable = match support(parameter) {
            Some(Support::Yes(variable)) if !variable.is_empty() => variable,
            _ => return None,
        };
        self.env(variable).map(|value| (variable.to_owned(), value))
    }

    fn env(&self, variable: &str) -> Option<String> {
        (self.env)(variable).filter(|value| !value.is_empty())
    }

    fn text(&self, parameter: &'static str) -> Option<String> {
        self.get(parameter).map(|(_, value)| value)
    }

    fn path(&self, parameter: &'static str) -> Option<PathBuf> {
        self.text(parameter).map(PathBuf::from)
    }

    fn home(&self, file: &str) -> Option<PathBuf> {
        self.env("HOME").map(|home| Path::new(&home).join(file))
    }

    fn word<T: Copy>(
        &self,
        parameter: &'static str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, DsnError> {
        let Some((name, value)) = self.get(parameter) else { return Ok(None) };
        match words.iter().find(|(word, _)| *word == value) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => {
                let known: Vec<_> = words.iter().map(|(word, _)| *word).collect();
                Err(DsnError::of(&name, format!("expected one of {}", known.join(", "))))
            }
        }
    }

    fn number(&self, parameter: &'static str) -> Result<Option<u32>, DsnError> {
        let Some((name, value)) = self.get(parameter) else { return Ok(None) };
        match value.trim().parse::<i32>() {
            // libpq takes zero and negative numbers as "the system's default".
            Ok(number) => Ok(u32::try_from(number).ok().filter(|number| *number > 0)),
            Err(_) => Err(DsnError::of(&name, "expected a whole number")),
        }
    }

    fn seconds(&self, parameter: &'static str) -> Result<Option<Duration>, DsnError> {
        Ok(self.number(parameter)?.map(|seconds| Duration::from_secs(u64::from(seconds))))
    }

    fn switch(&self, parameter: &'static str) -> Result<bool, DsnError> {
        Ok(self.word(parameter, &[("0", false), ("1", true)])?.unwrap_or(true))
    }
}

/// Every setting of a connection string.
pub(super) fn resolve(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Dsn, DsnError> {
    let mut given = BTreeMap::new();
    for (name, value) in parse::parse(text)? {
        match support(&name) {
            Some(Support::Yes(_)) => drop(given.insert(name, value)),
            Some(Support::Ignored) => {}
            Some(Support::No(refused)) if value.is_empty() || value == refused.harmless => {}
            Some(Support::No(refused)) => return Err(DsnError::of(&name, refused.why)),
            None => return Err(unknown(&name)),
        }
    }
    let values = Values { given, env };
    for refused in REFUSED.iter().filter(|refused| !refused.variable.is_empty()) {
        if values.env(refused.variable).is_some_and(|value| value != refused.harmless) {
            return Err(DsnError::of(refused.variable, refused.why));
        }
    }
    only_harmless(&values)?;
    let user = values
        .text("user")
        .or_else(|| values.env("USER"))
        .or_else(|| values.env("LOGNAME"))
        .ok_or_else(|| DsnError::of("user", "missing, and the environment names no user"))?;
    Ok(Dsn {
        targets: targets(&values)?,
        database: values.text("dbname").unwrap_or_else(|| user.clone()),
        user,
        application_name: values
            .text("application_name")
            .or_else(|| values.text("fallback_application_name")),
        options: values.text("options"),
        tls: tls(&values)?,
        channel_binding: values
            .word(
                "channel_binding",
                &[
                    ("disable", ChannelBinding::Disable),
                    ("prefer", ChannelBinding::Prefer),
                    ("require", ChannelBinding::Require),
                ],
            )?
            .unwrap_or(ChannelBinding::Prefer),
        connect_timeout: values.seconds("connect_timeout")?,
        tcp: TcpSettings {
            keepalives: values.switch("keepalives")?,
            keepalives_idle: values.seconds("keepalives_idle")?.unwrap_or(Duration::from_secs(60)),
            keepalives_interval: values
                .seconds("keepalives_interval")?
                .unwrap_or(Duration::from_secs(10)),
            keepalives_count: values.number("keepalives_count")?.unwrap_or(3),
            user_timeout: values
                .number("tcp_user_timeout")?
                .map(|millis| Duration::from_millis(u64::from(millis))),
        },
        password: values.text("password").map(SecretString::from),
        passfile: values.path("passfile").or_else(|| values.home(".pgpass")),
    })
}

/// An unknown name is quoted only if it looks like one: otherwise it may be a piece of a password
/// with a `?` or `=` in it.
fn unknown(name: &str) -> DsnError {
    let plain = name.len() <= 40 && name.bytes().all(|b| b.is_ascii_alphabetic() || b == b'_');
    match plain {
        true => DsnError::of(name, "unknown parameter"),
        false => DsnError::whole("a parameter has a name that libpq doesn't know"),
    }
}

/// Parameters with one harmless value and others that can't be honoured.
fn only_harmless(values: &Values<'_>) -> Result<(), DsnError> {
    values.word("gssencmode", &[("disable", ()), ("prefer", ())])?;
    // The relay writes: it always looks for a server that takes writes, as `read-write` says.
    values.word("target_session_attrs", &[("any", ()), ("read-write", ()), ("primary", ())])?;
    let utf8 = ["utf8", "utf-8", "unicode", "auto"];
    match values.get("client_encoding") {
        Some((name, value)) if !utf8.contains(&value.to_ascii_lowercase().as_str()) => {
            Err(DsnError::of(&name, "the program works in UTF8 only"))
        }
        _ => Ok(()),
    }
}

fn targets(values: &Values<'_>) -> Result<Vec<Target>, DsnError> {
    let list = |parameter| {
        let found: Option<(String, String)> = values.get(parameter);
        found.map_or_else(
            || (parameter.to_owned(), Vec::new()),
            |(name, value)| (name, value.split(',').map(|part| part.trim().to_owned()).collect()),
        )
    };
    let (hosts_name, hosts) = list("host");
    let (addresses_name, addresses) = list("hostaddr");
    let (ports_name, ports) = list("port");
    if !hosts.is_empty() && !addresses.is_empty() && hosts.len() != addresses.len() {
        let message = format!("{} addresses for {} hosts", addresses.len(), hosts.len());
        return Err(DsnError::of(&addresses_name, message));
    }
    let count = hosts.len().max(addresses.len()).max(1);
    if ports.len() > 1 && ports.len() != count {
        let message = format!("{} ports for {count} hosts: give one, or one each", ports.len());
        return Err(DsnError::of(&ports_name, message));
    }
    let mut found = Vec::with_capacity(count);
    for index in 0..count {
        let port = match ports.get(index).or_else(|| ports.first().filter(|_| ports.len() == 1)) {
            Some(port) if !port.is_empty() => port
                .parse()
                .ok()
                .filter(|port| *port > 0)
                .ok_or_else(|| DsnError::of(&ports_name, "expected numbers from 1 to 65535"))?,
            _ => 5432_u16,
        };
        let host = hosts.get(index).map(String::as_str).unwrap_or_default();
        let address = match addresses.get(index).filter(|address| !address.is_empty()) {
            Some(address) => Some(address.parse::<IpAddr>().map_err(|_| {
                DsnError::of(&addresses_name, "expected IP addresses; names belong into `host`")
            })?),
            None => None,
        };
        if host.starts_with('@') {
            return Err(DsnError::of(&hosts_name, "abstract Unix sockets are not supported"));
        }
        match (host, address) {
            ("", None) => found.extend(
                SOCKET_DIRECTORIES
                    .map(|path| Target { endpoint: Endpoint::Unix(PathBuf::from(path)), port }),
            ),
            (path, None) if path.starts_with('/') => {
                found.push(Target { endpoint: Endpoint::Unix(PathBuf::from(path)), port });
            }
            (host, address) => {
                let host = match (host, address) {
                    ("", Some(address)) => address.to_string(),
                    (host, _) => host.to_owned(),
                };
                found.push(Target { endpoint: Endpoint::Tcp { host, address }, port });
            }
        }
    }
    Ok(found)
}

fn tls(values: &Values<'_>) -> Result<TlsSettings, DsnError> {
    let roots = match values.text("sslrootcert") {
        None => RootCertificates::Default(values.home(".postgresql/root.crt")),
        Some(word) if word == "system" => RootCertificates::System,
        Some(file) => RootCertificates::File(PathBuf::from(file)),
    };
    let mode = values.word(
        "sslmode",
        &[
            ("disable", SslMode::Disable),
            ("allow", SslMode::Allow),
            ("prefer", SslMode::Prefer),
            ("require", SslMode::Require),
            ("verify-ca", SslMode::VerifyCa),
            ("verify-full", SslMode::VerifyFull),
        ],
    )?;
    let mode = match (mode, &roots) {
        (Some(mode), RootCertificates::System) if mode < SslMode::VerifyFull => {
            let message = "sslrootcert=system needs sslmode=verify-full: \
                           anyone can have a certificate from a public authority";
            return Err(DsnError::of("sslmode", message));
        }
        (Some(mode), _) => mode,
        (None, RootCertificates::System) => SslMode::VerifyFull,
        (None, _) => SslMode::Prefer,
    };
    let direct =
        values.word("sslnegotiation", &[("postgres", false), ("direct", true)])?.unwrap_or(false);
    if direct && mode < SslMode::Require {
        let message = "`direct` needs sslmode=require or stronger";
        return Err(DsnError::of("sslnegotiation", message));
    }
    let client = match (values.path("sslcert"), values.path("sslkey")) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (Some(certificate), None) => {
            let key = values
                .home(".postgresql/postgresql.key")
                .ok_or_else(|| DsnError::of("sslkey", "missing beside sslcert"))?;
            Some((certificate, key))
        }
        (None, Some(_)) => return Err(DsnError::of("sslcert", "missing beside sslkey")),
    };
    Ok(TlsSettings {
        mode,
        roots,
        client,
        default_client: values
            .home(".postgresql/postgresql.crt")
            .zip(values.home(".postgresql/postgresql.key")),
        sni: values.switch("sslsni")?,
        direct,
    })
}

#[cfg(test)]
mod tests;
