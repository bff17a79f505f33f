//! Connection strings and variables against what libpq makes of them.

use proptest::prelude::*;
use secrecy::ExposeSecret;

use super::*;
use crate::wal::dsn::Lookup;

fn with_env(text: &str, env: &[(&str, &str)]) -> Result<Dsn, DsnError> {
    resolve(text, &|name| {
        env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
}

fn dsn(text: &str) -> Dsn {
    with_env(text, &[("USER", "os")]).unwrap_or_else(|fault| panic!("{text}: {fault}"))
}

fn fault(text: &str) -> DsnError {
    with_env(text, &[("USER", "os")]).expect_err(text)
}

fn targets(text: &str) -> Vec<String> {
    dsn(text).targets.iter().map(Target::to_string).collect()
}

fn password(dsn: &Dsn) -> Option<String> {
    match dsn.password_for(dsn.targets.first()?) {
        Lookup::Found(password) => Some(password.expose_secret().to_owned()),
        Lookup::Nothing(_) => None,
    }
}

#[test]
fn servers_in_the_order_in_which_they_are_tried() {
    let table: &[(&str, &[&str])] = &[
        ("", &["/var/run/postgresql/.s.PGSQL.5432", "/tmp/.s.PGSQL.5432"]),
        ("postgres://db", &["db:5432"]),
        ("postgres://a:1,b,[::1]:3", &["a:1", "b:5432", "[::1]:3"]),
        ("host=a,b,c port=7", &["a:7", "b:7", "c:7"]),
        ("host=a,b port=7,8", &["a:7", "b:8"]),
        ("host=a,b port=,8", &["a:5432", "b:8"]),
        ("host=/run/pg,b port=7", &["/run/pg/.s.PGSQL.7", "b:7"]),
        ("postgres://%2Frun%2Fpg:9/x", &["/run/pg/.s.PGSQL.9"]),
        ("host=db hostaddr=10.0.0.1", &["db:5432 (10.0.0.1)"]),
        ("hostaddr=10.0.0.1,::1", &["10.0.0.1:5432", "[::1]:5432"]),
    ];
    for (text, expected) in table {
        assert_eq!(targets(text), *expected, "{text}");
    }
}

#[test]
fn a_later_parameter_wins_and_an_empty_one_is_absent() {
    let both = dsn("postgres://u:p@db/app?user=v&sslmode=&application_name=x");
    assert_eq!((both.user.as_str(), both.database.as_str()), ("v", "app"));
    assert_eq!(both.tls.mode, SslMode::Prefer);
    assert_eq!(both.application_name.as_deref(), Some("x"));
    assert_eq!(password(&both).as_deref(), Some("p"));
    assert_eq!(dsn("host=db").database, "os");
    assert_eq!(dsn("fallback_application_name=f").application_name.as_deref(), Some("f"));
    assert!(with_env("host=db", &[]).is_err(), "no user at all");
}

#[test]
fn variables_are_defaults() {
    let env = [
        ("PGHOST", "h1,h2"),
        ("PGPORT", "6000"),
        ("PGUSER", "u"),
        ("PGPASSWORD", "secret"),
        ("PGDATABASE", "d"),
        ("PGSSLMODE", "verify-full"),
        ("PGSSLROOTCERT", "/ca.pem"),
        ("PGAPPNAME", "app"),
        ("PGCONNECT_TIMEOUT", "3"),
        ("PGCHANNELBINDING", "require"),
        ("PGOPTIONS", ""),
    ];
    let all = with_env("", &env).unwrap();
    assert_eq!(all.redacted(), "postgres://u:***@h1:6000,h2:6000/d");
    assert_eq!(all.tls.mode, SslMode::VerifyFull);
    assert_eq!(all.tls.roots, RootCertificates::File("/ca.pem".into()));
    assert_eq!(all.channel_binding, ChannelBinding::Require);
    assert_eq!(all.connect_timeout, Some(Duration::from_secs(3)));
    assert_eq!(all.options, None);
    assert_eq!(password(&all).as_deref(), Some("secret"));
    let own = with_env("host=x port=1 user=y password=z sslmode=disable", &env).unwrap();
    assert_eq!(own.redacted(), "postgres://y:***@x:1/d");
    assert_eq!(own.tls.mode, SslMode::Disable);

    let wrong = with_env("host=x", &[("USER", "u"), ("PGSSLMODE", "tls")]).unwrap_err();
    assert_eq!(wrong.parameter.as_deref(), Some("PGSSLMODE"));
}

#[test]
fn tls_settings() {
    let home = [("USER", "os"), ("HOME", "/h/os")];
    let plain = with_env("host=x", &home).unwrap();
    assert_eq!(
        plain.tls.roots,
        RootCertificates::Default(Some("/h/os/.postgresql/root.crt".into()))
    );
    assert_eq!(plain.tls.client, None);
    assert!(plain.tls.default_client.is_some());
    let certificate = with_env("host=x sslcert=/c.pem", &home).unwrap();
    assert_eq!(
        certificate.tls.client,
        Some(("/c.pem".into(), "/h/os/.postgresql/postgresql.key".into()))
    );
    let system = dsn("host=x sslrootcert=system");
    assert_eq!(
        (system.tls.mode, system.tls.roots),
        (SslMode::VerifyFull, RootCertificates::System)
    );
    assert!(dsn("host=x sslmode=require sslnegotiation=direct sslsni=0").tls.direct);
}

#[test]
fn faults_name_their_parameter() {
    let table = [
        ("host=x colour=red", "colour"),
        ("postgres://x/d?colour=red", "colour"),
        ("host=x sslmode=on", "sslmode"),
        ("host=x sslrootcert=system sslmode=require", "sslmode"),
        ("host=x sslnegotiation=direct", "sslnegotiation"),
        ("host=x sslcrl=/x", "sslcrl"),
        ("host=x sslkey=/x", "sslkey"),
        ("host=x channel_binding=yes", "channel_binding"),
        ("host=x target_session_attrs=standby", "target_session_attrs"),
        ("host=x gssencmode=require", "gssencmode"),
        ("host=x client_encoding=latin1", "client_encoding"),
        ("host=x replication=true", "replication"),
        ("host=x service=y", "service"),
        ("host=x connect_timeout=soon", "connect_timeout"),
        ("host=x keepalives=2", "keepalives"),
        ("host=a,b,c port=1,2", "port"),
        ("host=a port=0", "port"),
        ("host=a port=70000", "port"),
        ("host=a,b hostaddr=10.0.0.1", "hostaddr"),
        ("hostaddr=db", "hostaddr"),
        ("host=@abstract", "host"),
        ("password='open", "password"),
        ("postgres://u:%zz@h", "password"),
    ];
    for (text, parameter) in table {
        let parameter = if parameter == "sslkey" { "sslcert" } else { parameter };
        assert_eq!(fault(text).parameter.as_deref(), Some(parameter), "{text}");
    }
}

#[test]
fn no_fault_and_no_form_shows_a_password() {
    for text in [
        "postgres://u:hunter/2@db/app",
        "postgres://u:hunter@2@db/app",
        "postgres://u:hunter%zz@db",
        "postgres://u:hunter2@db/app?x=hunter2",
        "password=hunter 2",
        "password='hunter2",
        "user=u password=hunter2 port=hunter2",
        "hunter2",
    ] {
        let shown = fault(text).to_string();
        assert!(!shown.contains("hunter"), "{text}: {shown}");
    }
    let good = dsn("postgres://u:hunter2@db/app");
    for shown in [format!("{good}"), format!("{good:?}"), good.redacted()] {
        assert!(!shown.contains("hunter2") && shown.contains("***"), "{shown}");
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,60}") {
        drop(with_env(&text, &[("USER", "os")]));
    }

    #[test]
    fn any_url_is_read_or_refused(text in "postgres://[a-z:@/?&=%,\\[\\]0-9']{0,40}") {
        drop(with_env(&text, &[("USER", "os")]));
    }

    #[test]
    fn encoded_passwords_come_back(secret in "[^\\x00]{1,20}") {
        let encoded: String = secret.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let url = dsn(&format!("postgres://u:{encoded}@db:1/app"));
        prop_assert_eq!(password(&url), Some(secret.clone()));
        let quoted = secret.replace('\\', "\\\\").replace('\'', "\\'");
        let keywords = dsn(&format!("host=db password='{quoted}' user = u"));
        prop_assert_eq!(password(&keywords), Some(secret));
    }
}

#[test]
fn a_variable_that_is_not_supported_is_a_fault_that_names_it() {
    for variable in ["PGSERVICE", "PGREQUIREAUTH", "PGSSLCRL", "PGREQUIREPEER", "PGSSLCERTMODE"] {
        let fault = with_env("host=db user=u", &[(variable, "x")]).expect_err(variable);
        assert_eq!(fault.variable(), Some(variable));
    }
    let fault = with_env("host=db user=u", &[("PGSSLMODE", "foo")]).expect_err("PGSSLMODE");
    assert_eq!(fault.variable(), Some("PGSSLMODE"));
    let fault = with_env("host=db user=u sslmode=foo", &[]).expect_err("sslmode");
    assert_eq!((fault.variable(), fault.parameter.as_deref()), (None, Some("sslmode")));
    for (variable, value) in [
        ("PGSERVICE", ""),
        ("PGSERVICEFILE", "/etc/pg_service.conf"),
        ("PGSSLCERTMODE", "allow"),
        ("PGLOADBALANCEHOSTS", "disable"),
        ("PGSSLMINPROTOCOLVERSION", "TLSv1.2"),
        ("PGCLIENTENCODING", "LATIN1"),
        ("PGTZ", "UTC"),
    ] {
        assert!(with_env("host=db user=u", &[(variable, value)]).is_ok(), "{variable}={value}");
    }
}
