//! The sandbox itself: servers come up, survive `kill -9` with their data, and leave nothing behind.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::time::{Duration, Instant};

use outboxd::sandbox::{Mode, Nats, NatsCluster, Postgres, Proxy, Signal, Stop, signal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn count(postgres: &Postgres) -> i64 {
    let client = postgres.connect().await.unwrap();
    client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn postgres_keeps_what_was_committed_through_kill_and_stop() {
    let mut postgres = Postgres::start().await.unwrap();
    let client = postgres.connect().await.unwrap();
    client.batch_execute("CREATE TABLE t (); INSERT INTO t DEFAULT VALUES").await.unwrap();
    postgres.kill9().unwrap();
    assert!(!postgres.is_running());
    assert!(postgres.connect().await.is_err());
    postgres.restart().await.unwrap();
    assert_eq!(count(&postgres).await, 1);
    for how in [Stop::Fast, Stop::Immediate] {
        postgres.stop(how).await.unwrap();
        postgres.restart().await.unwrap();
        assert_eq!(count(&postgres).await, 1);
    }
    let url = postgres.unix_url();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    let task = tokio::spawn(connection);
    let level = client.query_one("SHOW wal_level", &[]).await.unwrap();
    assert_eq!(level.get::<_, &str>(0), "logical");
    drop(client);
    task.await.unwrap().unwrap();
    let dir = postgres.socket_dir().to_owned();
    drop(postgres);
    assert!(!dir.exists());
}

#[tokio::test]
async fn nats_keeps_its_store_and_port_through_kill() {
    let mut nats = Nats::start().await.unwrap();
    let jetstream = async_nats::jetstream::new(nats.connect().await.unwrap());
    let config = async_nats::jetstream::stream::Config {
        name: "S".into(),
        subjects: vec!["s".into()],
        ..Default::default()
    };
    jetstream.create_stream(config).await.unwrap();
    jetstream.publish("s", "x".into()).await.unwrap().await.unwrap();
    let port = nats.port();
    nats.kill9().unwrap();
    nats.restart().await.unwrap();
    assert_eq!(nats.port(), port);
    let jetstream = async_nats::jetstream::new(nats.connect().await.unwrap());
    let info = jetstream.get_stream("S").await.unwrap().get_info().await.unwrap();
    assert_eq!(info.state.messages, 1);
    let dir = nats.store_dir();
    drop(nats);
    assert!(!dir.exists());
}

#[tokio::test]
async fn a_cluster_finds_another_leader_when_one_is_killed() {
    let mut cluster = NatsCluster::start().await.unwrap();
    let jetstream = async_nats::jetstream::new(cluster.connect().await.unwrap());
    let config = async_nats::jetstream::stream::Config {
        name: "S".into(),
        subjects: vec!["s".into()],
        num_replicas: 3,
        ..Default::default()
    };
    jetstream.create_stream(config).await.unwrap();
    let first = cluster.wait_leader("S").await.unwrap();
    cluster.step_down("S").await.unwrap();
    let second = cluster.wait_leader("S").await.unwrap();
    cluster.kill9(second).unwrap();
    let start = Instant::now();
    while cluster.wait_leader("S").await.unwrap() == second {
        assert!(start.elapsed() < Duration::from_secs(60), "n{second} is dead and leads");
    }
    cluster.restart(second).await.unwrap();
    assert!(first < 3);
}

#[tokio::test]
async fn the_proxy_loses_replies_stalls_and_cuts() {
    let target = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(target.local_addr().unwrap().port()).await.unwrap();
    let connect = || async {
        let client = tokio::net::TcpStream::connect(("127.0.0.1", proxy.port())).await.unwrap();
        (client, target.accept().await.unwrap().0)
    };
    let mut byte = [0];
    let (mut client, mut server) = connect().await;
    client.write_all(b"a").await.unwrap();
    server.read_exact(&mut byte).await.unwrap();
    server.write_all(b"b").await.unwrap();
    client.read_exact(&mut byte).await.unwrap();
    assert_eq!(&byte, b"b");

    proxy.set(Mode::Stall);
    server.write_all(b"c").await.unwrap();
    let silent = tokio::time::timeout(Duration::from_millis(50), client.read(&mut byte)).await;
    assert!(silent.is_err());
    proxy.set(Mode::Pass);
    client.read_exact(&mut byte).await.unwrap();
    assert_eq!(&byte, b"c");

    proxy.set(Mode::DropReplies);
    server.write_all(b"d").await.unwrap();
    client.write_all(b"e").await.unwrap();
    server.read_exact(&mut byte).await.unwrap();
    assert_eq!(&byte, b"e");
    let silent = tokio::time::timeout(Duration::from_millis(50), client.read(&mut byte)).await;
    assert!(silent.is_err());
    proxy.set(Mode::Pass);
    assert_eq!(client.read(&mut byte).await.unwrap(), 0);

    let (mut client, _server) = connect().await;
    proxy.cut();
    assert_eq!(client.read(&mut byte).await.unwrap(), 0);
    proxy.set(Mode::Refuse);
    let mut client = tokio::net::TcpStream::connect(("127.0.0.1", proxy.port())).await.unwrap();
    assert_eq!(client.read(&mut byte).await.unwrap(), 0);
}

/// Run by the next test in a process of its own: starts a server, tells its pid, never ends.
#[tokio::test]
async fn hold_a_server() {
    let Some(report) = std::env::var_os("SANDBOX_HOLD") else { return };
    let postgres = Postgres::start().await.unwrap();
    let words = format!("{} {}\n", postgres.pid(), postgres.data_dir().display());
    std::fs::write(report, words).unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_server_ends_with_the_process_that_started_it_even_by_kill() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report");
    let mut owner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hold_a_server"])
        .env("SANDBOX_HOLD", &report)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let told = until("the server runs", || {
        std::fs::read_to_string(&report).ok().filter(|words| words.ends_with('\n'))
    })
    .await;
    let (pid, data) = told.trim_end().split_once(' ').unwrap();
    let pid = pid.parse().unwrap();
    signal(pid, Signal::Continue).unwrap();
    owner.kill().unwrap();
    owner.wait().unwrap();
    until("the server ends", || signal(pid, Signal::Continue).is_err().then_some(())).await;
    until("its directory goes", || (!std::path::Path::new(data).exists()).then_some(())).await;
}

async fn until<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
