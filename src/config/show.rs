//! `config show`: the effective configuration as TOML with origins, or as JSON. Secrets go no
//! further than `without_secrets`.

use std::fmt::Write as _;

use super::fault::Origin;
use super::read::Shown;

/// TOML that gives the same configuration but for its secrets, an origin beside each value.
pub fn toml(shown: &[Shown]) -> String {
    let mut text = String::new();
    let mut table = "";
    for one in shown {
        if one.table != table {
            let gap = if table.is_empty() { "" } else { "\n" };
            table = &one.table;
            text.push_str(&format!("{gap}[{table}]\n"));
        }
        let line = match &one.value {
            Some(value) => format!("{} = {value}", one.key),
            None => format!("# {} is not set", one.key),
        };
        text.push_str(&match one.value {
            Some(_) => format!("{line:<48} # {}\n", one.origin),
            None => format!("{line}\n"),
        });
    }
    text
}

/// A JSON object: `{"relay.name": {"value": "\"orders\"", "origin": "outboxd.toml:2:8"}, …}`.
pub fn json(shown: &[Shown]) -> serde_json::Value {
    let entry = |one: &Shown| {
        // Values are TOML; what JSON writes alike becomes JSON, so numbers and lists are typed.
        let value = one.value.as_ref().map(|value| {
            let json = serde_json::from_str::<serde_json::Value>(value);
            json.unwrap_or_else(|_| value.trim_matches('\'').into())
        });
        let place = match &one.origin {
            Origin::File { path, line, column } => {
                serde_json::json!({"file": path, "line": line, "column": column})
            }
            Origin::WholeFile(path) => serde_json::json!({"file": path}),
            Origin::Variable(name) => serde_json::json!({"variable": name}),
            Origin::Flag(key) => serde_json::json!({"flag": key}),
            Origin::Default => serde_json::json!("default"),
            Origin::Derived(from) => serde_json::json!({"derived": from}),
        };
        (format!("{}.{}", one.table, one.key), serde_json::json!({"value": value, "origin": place}))
    };
    shown.iter().map(entry).collect::<serde_json::Map<_, _>>().into()
}

/// What a connection string may show of itself.
const PLAIN: &[&str] = &[
    "host",
    "hostaddr",
    "port",
    "user",
    "dbname",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "passfile",
    "target_session_attrs",
    "connect_timeout",
    "application_name",
    "options",
    "channel_binding",
    "load_balance_hosts",
    "keepalives",
    "keepalives_idle",
];

/// What stands for a secret.
const REDACTED: &str = "REDACTED";

/// A connection string without password: what is not known to be harmless is taken out. Text that
/// can't be taken apart is taken out whole.
pub(super) fn without_secrets(dsn: &str) -> String {
    match dsn.split_once("://") {
        Some((scheme, rest)) if scheme.bytes().all(|b| b.is_ascii_alphabetic()) => {
            url(scheme, rest)
        }
        Some(_) | None => keywords(dsn).unwrap_or_else(|| REDACTED.to_owned()),
    }
}

fn url(scheme: &str, rest: &str) -> String {
    // Is the ? a part of a password, or the @ of a parameter? Rather show nothing than guess.
    if rest.split_once('?').is_some_and(|(_, parameters)| parameters.contains('@')) {
        return format!("{scheme}://{REDACTED}");
    }
    let (place, parameters) = rest.split_once('?').unwrap_or((rest, ""));
    // A password may hold an unescaped @ or /: everything from the first colon to the last @ goes.
    let (login, place) = place.rsplit_once('@').map_or((None, place), |(l, p)| (Some(l), p));
    let mut text = format!("{scheme}://");
    if let Some(login) = login {
        let (user, password) = login.split_once(':').map_or((login, false), |(u, _)| (u, true));
        text.push_str(user);
        text.push_str(if password { ":REDACTED@" } else { "@" });
    }
    text.push_str(place);
    for (at, parameter) in parameters.split('&').filter(|one| !one.is_empty()).enumerate() {
        text.push(if at == 0 { '?' } else { '&' });
        match parameter.split_once('=') {
            Some((name, _)) if PLAIN.contains(&name) => text.push_str(parameter),
            Some((name, _)) => text.push_str(&format!("{name}={REDACTED}")),
            None => text.push_str(REDACTED),
        }
    }
    text
}

fn keywords(dsn: &str) -> Option<String> {
    let mut text = String::new();
    let mut rest = dsn.trim_start();
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=')?;
        let name = name.trim();
        let (value, left) = keyword_value(after.trim_start())?;
        let shown = if PLAIN.contains(&name) { value } else { REDACTED };
        let gap = if text.is_empty() { "" } else { " " };
        write!(text, "{gap}{name}={shown}").ok()?;
        rest = left.trim_start();
    }
    Some(text)
}

/// A value with its quotes, and what follows it; `None` if a quote stays open.
fn keyword_value(text: &str) -> Option<(&str, &str)> {
    let quoted = text.starts_with('\'');
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(usize::from(quoted)) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\'' if quoted => return Some(text.split_at(at + 1)),
            c if !quoted && c.is_whitespace() => return Some(text.split_at(at)),
            _ => {}
        }
    }
    (!quoted).then_some((text, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_strings_keep_no_secret() {
        for (dsn, shown) in [
            ("postgres://me@db/app", "postgres://me@db/app"),
            ("postgres://me:s3cret@db:5432/app", "postgres://me:REDACTED@db:5432/app"),
            ("postgres://me:s3cret@x/y@db/app", "postgres://me:REDACTED@db/app"),
            (
                "postgresql://db/app?user=me&password=s3cret",
                "postgresql://db/app?user=me&password=REDACTED",
            ),
            (
                "postgres://db/app?sslmode=require&sslpassword=s3cret",
                "postgres://db/app?sslmode=require&sslpassword=REDACTED",
            ),
            (
                "host=/run user=me password='s3cret \\' x' dbname=app",
                "host=/run user=me password=REDACTED dbname=app",
            ),
            ("host = db password = s3cret", "host=db password=REDACTED"),
            ("password='s3cret", "REDACTED"),
            ("postgres://me:s3cret?x@db/app", "postgres://REDACTED"),
            ("postgres://db/app?password=s3cret@x", "postgres://REDACTED"),
            ("s3cret", "REDACTED"),
        ] {
            assert_eq!(without_secrets(dsn), shown);
            assert!(!without_secrets(dsn).contains("s3cret"));
        }
    }
}
