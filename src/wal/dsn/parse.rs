//! A connection string as parameters: the two forms libpq knows. Knows no parameter's meaning.

use super::DsnError;
use super::text::{next_keyword, percent_decode};

/// Parameters in the order in which they were written; a later one overrides an earlier one.
pub(super) type Parameters = Vec<(String, String)>;

/// Takes either form apart.
pub(super) fn parse(text: &str) -> Result<Parameters, DsnError> {
    let text = text.trim();
    match text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://")) {
        Some(rest) => url(rest),
        None if scheme_of(text).is_some() => {
            Err(DsnError::whole("the URL's scheme is neither postgres:// nor postgresql://"))
        }
        None => keywords(text),
    }
}

fn scheme_of(text: &str) -> Option<&str> {
    let (scheme, _) = text.split_once("://")?;
    let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    (!scheme.is_empty() && scheme.chars().all(word)).then_some(scheme)
}

fn keywords(mut text: &str) -> Result<Parameters, DsnError> {
    let mut found = Parameters::new();
    while let Some((keyword, value, rest)) = next_keyword(text)? {
        found.push((keyword.to_owned(), value));
        text = rest;
    }
    Ok(found)
}

/// `[user[:password]@][host[:port][,…]][/dbname][?name=value[&…]]`
fn url(text: &str) -> Result<Parameters, DsnError> {
    let mut found = Parameters::new();
    let mut put = |name: &str, value: &str| -> Result<(), DsnError> {
        let value = percent_decode(value).map_err(|fault| DsnError::of(name, fault.message))?;
        found.push((name.to_owned(), value));
        Ok(())
    };

    // As libpq: the first `@` in front of the first `/` ends the credentials.
    let credentials_end = text.find(['@', '/']).filter(|at| text[*at..].starts_with('@'));
    let rest = match credentials_end.map(|at| text.split_at(at)) {
        Some((credentials, rest)) => {
            let (user, password) = match credentials.split_once(':') {
                Some((user, password)) => (user, Some(password)),
                None => (credentials, None),
            };
            if !user.is_empty() {
                put("user", user)?;
            }
            if let Some(password) = password.filter(|password| !password.is_empty()) {
                put("password", password)?;
            }
            rest.strip_prefix('@').unwrap_or(rest)
        }
        None => text,
    };

    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, Some(query)),
        None => (rest, None),
    };
    let (hosts, database) = match rest.split_once('/') {
        Some((hosts, database)) => (hosts, Some(database)),
        None => (rest, None),
    };
    if !hosts.is_empty() {
        let (names, ports) = host_list(hosts)?;
        if names.split(',').any(|name| !name.is_empty()) {
            put("host", &names)?;
        }
        if ports.split(',').any(|port| !port.is_empty()) {
            put("port", &ports)?;
        }
    }
    if let Some(database) = database.filter(|database| !database.is_empty()) {
        if database.contains('@') {
            return Err(misplaced_at());
        }
        put("dbname", database)?;
    }
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(DsnError::whole("a parameter behind the `?` has no `=`"));
        };
        let name = percent_decode(name)?;
        match (name.as_str(), value) {
            // JDBC's spelling, which libpq takes too.
            ("ssl", "true") => put("sslmode", "require")?,
            _ => put(&name, value)?,
        }
    }
    Ok(found)
}

/// libpq would take a piece of the password for host, port or database.
fn misplaced_at() -> DsnError {
    DsnError::whole(
        "an `@` stands where hosts or the database are: write `/` as %2F and `@` as %40 in user, \
         password and database",
    )
}

/// `a:1,[::1]:2` as `a,::1` and `1,2`. No part is quoted in an error: with a `/` in the password
/// the "port" is a piece of it.
fn host_list(hosts: &str) -> Result<(String, String), DsnError> {
    let (mut names, mut ports) = (Vec::new(), Vec::new());
    for host in hosts.split(',') {
        let (name, rest) = match host.strip_prefix('[') {
            Some(bracketed) => bracketed
                .split_once(']')
                .ok_or_else(|| DsnError::of("host", "`[` of an IPv6 address has no `]`"))?,
            None => host.split_at(host.find(':').unwrap_or(host.len())),
        };
        let port = match rest.strip_prefix(':') {
            Some(port) => port,
            None if rest.is_empty() => "",
            None => return Err(DsnError::of("host", "text follows the `]` of an IPv6 address")),
        };
        if name.contains('@') || port.contains('@') {
            return Err(misplaced_at());
        }
        names.push(name);
        ports.push(port);
    }
    Ok((names.join(","), ports.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        parse(text).unwrap_or_else(|fault| panic!("{text}: {fault}"))
    }

    fn expect(text: &str, expected: &[(&str, &str)]) {
        let expected: Vec<_> =
            expected.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        assert_eq!(pairs(text), expected, "{text}");
    }

    #[test]
    fn urls_come_apart_as_in_libpq() {
        expect("postgres://", &[]);
        expect("postgresql://localhost", &[("host", "localhost")]);
        expect(
            "postgres://u:p%40ss@db:5433/app?sslmode=verify-full&application_name=a%20b",
            &[
                ("user", "u"),
                ("password", "p@ss"),
                ("host", "db"),
                ("port", "5433"),
                ("dbname", "app"),
                ("sslmode", "verify-full"),
                ("application_name", "a b"),
            ],
        );
        expect(
            "postgres://a:1,b,[::1]:3/x",
            &[("host", "a,b,::1"), ("port", "1,,3"), ("dbname", "x")],
        );
        expect(
            "postgres://u@%2Frun%2Fpg:5433/app",
            &[("user", "u"), ("host", "/run/pg"), ("port", "5433"), ("dbname", "app")],
        );
        expect("postgres:///app?host=/tmp", &[("dbname", "app"), ("host", "/tmp")]);
        expect("postgres://:5433?ssl=true", &[("port", "5433"), ("sslmode", "require")]);
        expect("postgres://u:a?b@h", &[("user", "u"), ("password", "a?b"), ("host", "h")]);
    }

    #[test]
    fn broken_urls_are_refused_without_their_text() {
        for text in [
            "postgres://u:sec/ret@db/app",
            "postgres://u:sec%zzret@db/app",
            "postgres://[::1/app",
            "postgres://[::1]x/app",
            "postgres://db/app?sec",
            "mysql://u:sec@db/app",
            "sec",
        ] {
            let fault = parse(text).expect_err(text);
            assert!(!fault.to_string().contains("sec"), "{text}: {fault}");
        }
    }
}
