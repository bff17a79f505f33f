//! Log-in and the choice of a server.

use std::time::Duration;

use outboxd::error::{Failure, Kind};
use outboxd::sandbox::{Postgres, PostgresOptions, free_port};
use outboxd::wal::{Identity, connect, connect_control};
use tokio::time::Instant;

use super::{server, source};

async fn identity(url: &str) -> Result<Identity, Failure> {
    let link = connect(&source(url)).await?;
    link.control.ping().await?;
    Ok(link.identity)
}

async fn failure(url: &str) -> Failure {
    identity(url).await.expect_err(url)
}

#[tokio::test]
async fn tcp_and_unix_socket_lead_to_one_server() {
    let postgres = Postgres::start().await.unwrap();
    let tcp = identity(&postgres.url()).await.unwrap();
    assert_eq!(identity(&postgres.unix_url()).await.unwrap(), tcp);
    assert_eq!(tcp.database, "postgres");
    assert!(tcp.server_version >= 140_000, "{tcp:?}");
    assert_eq!(tcp.timeline, 1);
    let keywords = format!(
        "host={} port={} user=postgres application_name='an outbox'",
        postgres.socket_dir().display(),
        postgres.port()
    );
    let (control, found) = connect_control(&source(&keywords)).await.unwrap();
    assert_eq!(found, tcp);
    let row = control.client.query_one("SELECT current_setting('application_name')", &[]).await;
    assert_eq!(row.unwrap().get::<_, &str>(0), "an outbox");
}

#[tokio::test]
async fn session_limits_of_the_role_do_not_hold() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    client
        .batch_execute(
            "ALTER ROLE postgres SET statement_timeout = 1000;
             ALTER ROLE postgres SET idle_session_timeout = 1000;
             ALTER ROLE postgres SET idle_in_transaction_session_timeout = 1000;",
        )
        .await
        .unwrap();
    let link = connect(&source(&postgres.unix_url())).await.unwrap();
    for setting in
        ["statement_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout"]
    {
        let sql = format!("SELECT current_setting('{setting}')");
        let row = link.control.client.query_one(&sql, &[]).await.unwrap();
        assert_eq!(row.get::<_, &str>(0), "0", "{setting}");
    }
}

#[tokio::test]
async fn a_dead_server_in_the_list_is_passed_over() {
    let postgres = Postgres::start().await.unwrap();
    // One refuses, one takes connections and says nothing, one is no server's.
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{},%2Fno-such-directory,127.0.0.1:{}/postgres?connect_timeout=1",
        free_port().unwrap(),
        mute.local_addr().unwrap().port(),
        postgres.port(),
    );
    let start = Instant::now();
    identity(&url.replace("127.0.0.1", "localhost")).await.unwrap_or_else(|failure| {
        panic!("every address of the name is tried: {failure}");
    });
    identity(&url).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test]
async fn when_no_server_answers_every_one_is_named() {
    let (one, two) = (free_port().unwrap(), free_port().unwrap());
    let failure = failure(&format!("postgres://u:hunter2@127.0.0.1:{one},127.0.0.1:{two}/d")).await;
    assert_eq!(failure.kind, Kind::SourceUnreachable);
    for word in [one.to_string(), two.to_string()] {
        assert!(failure.detail.contains(&word), "{failure}");
    }
    assert!(!failure.detail.contains("hunter2"), "{failure}");
}

#[tokio::test]
async fn passwords_by_every_method() {
    let hba = "local all postgres trust\nlocal all plain password\n\
               host all plain 127.0.0.1/32 password\nhost all hashed 127.0.0.1/32 md5\n\
               host all salted 127.0.0.1/32 scram-sha-256\nhost all rejected 127.0.0.1/32 reject\n";
    let options = PostgresOptions { hba: Some(hba.to_owned()), ..PostgresOptions::default() };
    let (postgres, client) = server(options).await;
    client
        .batch_execute(
            "SET password_encryption = 'md5';
             CREATE ROLE hashed LOGIN REPLICATION PASSWORD 'right';
             SET password_encryption = 'scram-sha-256';
             CREATE ROLE salted LOGIN REPLICATION PASSWORD 'right';
             CREATE ROLE plain LOGIN REPLICATION PASSWORD 'right';
             CREATE ROLE rejected LOGIN REPLICATION",
        )
        .await
        .unwrap();
    let url = |user: &str, password: &str| {
        format!("postgres://{user}:{password}@127.0.0.1:{}/postgres", postgres.port())
    };
    identity(&url("hashed", "right")).await.unwrap();
    identity(&url("salted", "right")).await.unwrap();
    for user in ["hashed", "salted"] {
        let wrong = failure(&url(user, "wrong")).await;
        assert_eq!((wrong.kind, wrong.sqlstate.as_deref()), (Kind::SourceLogin, Some("28P01")));
        let none = failure(&postgres.url_of(user, "postgres")).await;
        assert_eq!(none.kind, Kind::SourceLogin);
        assert!(none.detail.contains("password"), "{none}");
    }

    let unencrypted = failure(&url("plain", "right")).await;
    assert_eq!(unencrypted.kind, Kind::SourceLogin);
    assert!(unencrypted.detail.contains("plain text"), "{unencrypted}");
    let unix = postgres.unix_url().replace("postgres@", "plain:right@");
    identity(&unix).await.unwrap();

    assert_eq!(failure(&url("rejected", "x")).await.kind, Kind::SourceLogin);
    let bound = failure(&format!("{}?channel_binding=require", url("salted", "right"))).await;
    assert_eq!(bound.kind, Kind::SourceLogin);
    assert!(bound.detail.contains("channel_binding"), "{bound}");
    let missing = failure(&format!("{}x", url("salted", "right"))).await;
    assert_eq!((missing.kind, missing.sqlstate.as_deref()), (Kind::SourceLogin, Some("3D000")));

    let passfile = postgres.socket_dir().join("pgpass");
    std::fs::write(&passfile, "127.0.0.1:*:*:salted:right\n").unwrap();
    let from_file =
        format!("{}?passfile={}", postgres.url_of("salted", "postgres"), passfile.display());
    let ignored = failure(&from_file).await;
    assert!(ignored.detail.contains("0600"), "{ignored}");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&passfile, std::fs::Permissions::from_mode(0o600)).unwrap();
    identity(&from_file).await.unwrap();
}

#[tokio::test]
async fn what_a_role_may_not_do_is_told_by_kind() {
    let (postgres, client) = server(PostgresOptions::default()).await;
    client
        .batch_execute(
            "CREATE ROLE nobody LOGIN; CREATE ROLE reader LOGIN REPLICATION;
             ALTER ROLE reader SET default_transaction_read_only = on;",
        )
        .await
        .unwrap();
    let privilege = failure(&postgres.url_of("nobody", "postgres")).await;
    assert_eq!((privilege.kind, privilege.sqlstate.as_deref()), (Kind::Privilege, Some("42501")));
    let read_only = failure(&postgres.url_of("reader", "postgres")).await;
    assert_eq!(read_only.kind, Kind::SourceReadOnly);
}

#[tokio::test]
async fn a_server_that_is_full_or_too_low_a_wal_level_is_told_by_kind() {
    let options =
        PostgresOptions::default().set("wal_level", "replica").set("max_wal_senders", "1");
    let postgres = Postgres::start_with(options).await.unwrap();
    let link = connect(&source(&postgres.url())).await.unwrap();
    assert_eq!(failure(&postgres.url()).await.kind, Kind::SourceFull);
    let refused = link.replication.start("slot", "pub").await.expect_err("wal_level");
    assert_eq!(refused.kind, Kind::WalLevel, "{refused}");
}
