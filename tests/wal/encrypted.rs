//! TLS: what each sslmode takes and refuses, client certificates, and the log-in that is bound to
//! the session. A front of ours stands before the server, since PostgreSQL may be built without.

use std::path::{Path, PathBuf};

use outboxd::error::{Failure, Kind};
use outboxd::sandbox::{Postgres, PostgresOptions};
use outboxd::wal::connect;

use super::front::{Authority, Front, Issued, Plain, Scram};
use super::{eventually, server, source, text};

/// Files of one test.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        mode(&path, 0o600);
        path
    }
}

fn mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Both connections, asked for a sign of life through TLS or not.
async fn attempt(port: u16, parameters: &str) -> Result<(), Failure> {
    let dsn = format!(
        "hostaddr=127.0.0.1 port={port} user=postgres dbname=postgres connect_timeout=5 {parameters}"
    );
    let link = connect(&source(&dsn)).await?;
    link.control.ping().await
}

/// Attempts, with what must come of each: `Ok(true)` inside TLS, `Ok(false)` without.
async fn expect(front: &Front, table: &[(&str, Result<bool, Kind>)]) {
    for (parameters, expected) in table {
        let before = front.sessions();
        let outcome = attempt(front.port(), parameters).await;
        let encrypted = front.sessions() - before;
        let found = outcome.as_ref().map(|()| encrypted == 2).map_err(|failure| failure.kind);
        assert_eq!(found, *expected, "{parameters}: {outcome:?}, {encrypted} sessions in TLS");
    }
}

#[tokio::test]
async fn each_mode_checks_what_it_promises() {
    let postgres = Postgres::start().await.unwrap();
    let files = Files::new();
    let (ours, other) = (Authority::new(), Authority::new());
    let ca = files.write("ca.pem", &ours.pem());
    let (ca, other) = (ca.display(), files.write("other.pem", &other.pem()));
    let other = other.display();
    let front = Front::start(postgres.port(), ours.issue(&["db.test", "127.0.0.1"])).await;
    let bad = Err(Kind::SourceTls);
    expect(
        &front,
        &[
            ("host=db.test sslmode=disable", Ok(false)),
            ("host=db.test sslmode=allow", Ok(false)),
            ("host=db.test sslmode=prefer", Ok(true)),
            ("host=db.test sslmode=require", Ok(true)),
            ("host=wrong.test sslmode=require", Ok(true)),
            (&format!("host=wrong.test sslmode=require sslrootcert={ca}"), Ok(true)),
            (&format!("host=db.test sslmode=require sslrootcert={other}"), bad),
            (&format!("host=db.test sslmode=prefer sslrootcert={other}"), Ok(false)),
            (&format!("host=wrong.test sslmode=verify-ca sslrootcert={ca}"), Ok(true)),
            (&format!("host=db.test sslmode=verify-ca sslrootcert={other}"), bad),
            (&format!("host=db.test sslmode=verify-full sslrootcert={ca}"), Ok(true)),
            (&format!("sslmode=verify-full sslrootcert={ca}"), Ok(true)),
            (&format!("host=wrong.test sslmode=verify-full sslrootcert={ca}"), bad),
            (&format!("host=db.test sslmode=verify-full sslrootcert={other}"), bad),
            ("host=db.test sslmode=verify-full sslrootcert=/absent", bad),
            // The platform doesn't know our authority.
            ("host=db.test sslmode=verify-ca", bad),
            ("host=db.test sslrootcert=system", bad),
            (
                &format!("host=db.test sslmode=require sslnegotiation=direct sslrootcert={ca}"),
                Ok(true),
            ),
        ],
    )
    .await;
}

#[tokio::test]
async fn a_server_without_tls_is_taken_only_where_that_is_allowed() {
    let postgres = Postgres::start().await.unwrap();
    let bad = Err(Kind::SourceTls);
    let refusing = Front::start_with(postgres.port(), None, Plain::Allowed).await;
    expect(
        &refusing,
        &[
            ("host=db.test sslmode=allow", Ok(false)),
            ("host=db.test sslmode=prefer", Ok(false)),
            ("host=db.test sslmode=require", bad),
            ("host=db.test sslmode=verify-full", bad),
            ("host=db.test channel_binding=require", Err(Kind::SourceLogin)),
        ],
    )
    .await;

    let issued = Authority::new().issue(&["db.test"]);
    let insisting = Front::start_with(postgres.port(), Some(issued), Plain::Rejected).await;
    expect(
        &insisting,
        &[
            ("host=db.test sslmode=allow", Ok(true)),
            ("host=db.test sslmode=prefer", Ok(true)),
            ("host=db.test sslmode=disable", Err(Kind::SourceLogin)),
        ],
    )
    .await;
}

#[tokio::test]
async fn a_self_signed_certificate_is_its_own_root() {
    let postgres = Postgres::start().await.unwrap();
    let files = Files::new();
    let own = Issued::self_signed(&["db.test"], false);
    let file = files.write("own.pem", &own.pem);
    let file = file.display();
    let front = Front::start(postgres.port(), own).await;
    let bad = Err(Kind::SourceTls);
    expect(
        &front,
        &[
            (&format!("host=db.test sslmode=verify-full sslrootcert={file}"), Ok(true)),
            (&format!("host=wrong.test sslmode=verify-ca sslrootcert={file}"), Ok(true)),
            (&format!("host=wrong.test sslmode=verify-full sslrootcert={file}"), bad),
        ],
    )
    .await;

    let expired = Issued::self_signed(&["db.test"], true);
    let file = files.write("expired.pem", &expired.pem);
    let front = Front::start(postgres.port(), expired).await;
    let parameters = format!("host=db.test sslmode=verify-ca sslrootcert={}", file.display());
    expect(&front, &[(&parameters, bad), ("host=db.test sslmode=require", Ok(true))]).await;
}

#[tokio::test]
async fn client_certificates() {
    let postgres = Postgres::start().await.unwrap();
    let files = Files::new();
    let (ours, other) = (Authority::new(), Authority::new());
    let write = |name: &str, issued: &Issued| {
        let certificate = files.write(&format!("{name}.crt"), &issued.pem);
        (certificate, files.write(&format!("{name}.key"), &issued.key_pem))
    };
    let good = write("good", &ours.issue(&["client"]));
    let stranger = write("stranger", &other.issue(&["client"]));
    let issued = ours.issue(&["db.test"]);
    let front = Front::demanding_certificates(postgres.port(), issued, &ours).await;
    let with = |pair: &(PathBuf, PathBuf)| {
        let (certificate, key) = (pair.0.display(), pair.1.display());
        format!("host=db.test sslmode=require sslcert={certificate} sslkey={key}")
    };
    let bad = Err(Kind::SourceTls);
    expect(
        &front,
        &[(&with(&good), Ok(true)), (&with(&stranger), bad), ("host=db.test sslmode=require", bad)],
    )
    .await;
    mode(&good.1, 0o644);
    let open = attempt(front.port(), &with(&good)).await.unwrap_err();
    assert!(open.kind == Kind::SourceTls && open.detail.contains("0600"), "{open}");
}

#[tokio::test]
async fn a_plain_password_is_sent_inside_tls_only() {
    let hba = "local all postgres trust\nhost all plain 127.0.0.1/32 password\n";
    let options = PostgresOptions { hba: Some(hba.to_owned()), ..PostgresOptions::default() };
    let (postgres, client) = server(options).await;
    client.batch_execute("CREATE ROLE plain LOGIN REPLICATION PASSWORD 'right'").await.unwrap();
    let front = Front::start(postgres.port(), Authority::new().issue(&["db.test"])).await;
    expect(
        &front,
        &[
            ("host=db.test sslmode=require user=plain password=right", Ok(true)),
            ("host=db.test sslmode=disable user=plain password=right", Err(Kind::SourceLogin)),
        ],
    )
    .await;
}

/// A server that offers channel binding gets it, with the hash of the certificate it showed; one
/// that binds to another certificate, as a man in the middle would, can't know the password.
#[tokio::test]
async fn scram_is_bound_to_the_certificate() {
    let issued = Authority::new().issue(&["db.test"]);
    let hash = ring::digest::digest(&ring::digest::SHA256, &issued.der);
    let mut expected = b"p=tls-server-end-point,,".to_vec();
    expected.extend_from_slice(hash.as_ref());

    let scram = Scram::start(issued.clone(), "right", true).await;
    for binding in ["prefer", "require"] {
        let parameters = format!("host=db.test user=u password=right channel_binding={binding}");
        let failure = attempt(scram.port(), &parameters).await.unwrap_err();
        assert!(failure.detail.contains("end of the script"), "{failure}");
        assert_eq!(scram.seen(), ("SCRAM-SHA-256-PLUS".to_owned(), expected.clone()));
    }
    let off = "host=db.test user=u password=right channel_binding=disable";
    let failure = attempt(scram.port(), off).await.unwrap_err();
    assert!(failure.detail.contains("end of the script"), "{failure}");
    assert_eq!(scram.seen(), ("SCRAM-SHA-256".to_owned(), b"n,,".to_vec()));

    // The server must prove that it knows the password.
    let impostor = Scram::start(issued.clone(), "guessed", true).await;
    let parameters = "host=db.test user=u password=right";
    let failure = attempt(impostor.port(), parameters).await.unwrap_err();
    assert_eq!(failure.kind, Kind::SourceLogin, "{failure}");

    // Without an offer: told that we could have, or refused.
    let weaker = Scram::start(issued, "right", false).await;
    let failure = attempt(weaker.port(), parameters).await.unwrap_err();
    assert!(failure.detail.contains("end of the script"), "{failure}");
    assert_eq!(weaker.seen(), ("SCRAM-SHA-256".to_owned(), b"y,,".to_vec()));
    let parameters = "host=db.test user=u password=right channel_binding=require";
    let failure = attempt(weaker.port(), parameters).await.unwrap_err();
    assert_eq!(failure.kind, Kind::SourceLogin, "{failure}");
    assert!(failure.detail.contains("channel_binding"), "{failure}");
}

/// Where PostgreSQL is built with TLS, its own; where it is not, its refusal.
#[tokio::test]
async fn the_servers_own_tls_with_channel_binding() {
    let hba = "local all postgres trust\nhostssl all salted 127.0.0.1/32 scram-sha-256\n";
    let options = PostgresOptions { hba: Some(hba.to_owned()), ..PostgresOptions::default() };
    let (mut postgres, client) = server(options).await;
    client.batch_execute("CREATE ROLE salted LOGIN REPLICATION PASSWORD 'right'").await.unwrap();
    let files = Files::new();
    let authority = Authority::new();
    let ca = files.write("ca.pem", &authority.pem());
    let issued = authority.issue(&["db.test"]);
    postgres.write_file("server.crt", &issued.pem).unwrap();
    postgres.write_file("server.key", &issued.key_pem).unwrap();
    postgres.configure("ssl", "on").unwrap();
    postgres.reload().unwrap();
    let mut on = false;
    eventually("the server took the setting or refused it", async || {
        on = text(&client, "SELECT current_setting('ssl')").await.unwrap() == "on";
        on || postgres.log().contains("not supported by this build")
    })
    .await;
    let parameters = format!(
        "host=db.test user=salted password=right sslmode=verify-full channel_binding=require \
         sslrootcert={}",
        ca.display()
    );
    let outcome = attempt(postgres.port(), &parameters).await;
    if !on {
        assert_eq!(outcome.unwrap_err().kind, Kind::SourceTls);
        return;
    }
    outcome.unwrap();
    let wrong = attempt(postgres.port(), &parameters.replace("right", "wrong")).await.unwrap_err();
    assert_eq!(wrong.sqlstate.as_deref(), Some("28P01"), "{wrong}");
    let plain = "host=db.test user=salted password=right sslmode=disable";
    let plain = attempt(postgres.port(), plain).await.unwrap_err();
    assert_eq!(plain.sqlstate.as_deref(), Some("28000"), "{plain}");
    let prefer = "host=db.test user=salted password=right sslmode=allow";
    attempt(postgres.port(), prefer).await.unwrap();
}
