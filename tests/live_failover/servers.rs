//! Which server the relay works on: none that takes no writes, none that a failover has left behind,
//! and never two.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use outboxd::sandbox::{Stop, free_port};
use tokio::net::{TcpListener, TcpStream};

use crate::place::{Place, not_ready, servers};
use crate::support::look::{publish, until};
use crate::support::{SETTLE, log_tail};

/// Nothing was published for so long.
const WATCHED: Duration = Duration::from_secs(3);

/// While there is only a standby the relay is not ready, says why, and keeps no session there.
#[tokio::test]
async fn a_standby_is_not_idled_on() {
    let Some(servers) = servers("a_standby_is_not_idled_on", "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.guard().await;
    let client = place.world.postgres.connect().await.unwrap();
    publish(&client, "a", "k", 1).await;
    place.world.settle(SETTLE).await.unwrap();
    place.world.postgres.stop(Stop::Immediate).await.unwrap();
    for _ in 0..2 {
        not_ready(&place.world, &["source-read-only", "the server is a standby"]).await;
        let standby = place.other.connect().await.unwrap();
        until("no session is kept", SETTLE, || async {
            let sql = "SELECT count(*) FROM pg_stat_activity \
                        WHERE application_name LIKE 'outboxd%' AND backend_start < now() - '5s'::interval";
            let kept: i64 = standby.query_one(sql, &[]).await.unwrap().get(0);
            (kept == 0).then_some(()).ok_or_else(|| format!("{kept}"))
        })
        .await;
        // A fresh process does the same.
        place.world.relay.kill9().unwrap();
        place.world.relay.start().unwrap();
    }
    place.other.promote().await.unwrap();
    std::mem::swap(&mut place.world.postgres, &mut place.other);
    let client = place.world.postgres.connect().await.unwrap();
    publish(&client, "a", "k", 2).await;
    place.judge_events(2).await;
}

/// The primary that failed comes back as what it was, first in the list, and takes writes.
#[tokio::test]
async fn a_primary_that_a_failover_left_behind_comes_back() {
    let test = "a_primary_that_a_failover_left_behind_comes_back";
    let Some(servers) = servers(test, "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.guard().await;
    let client = place.world.postgres.connect().await.unwrap();
    publish(&client, "a", "k", 1).await;
    place.world.settle(SETTLE).await.unwrap();
    drop(client);
    place.fail_over(Stop::Immediate).await;
    let client = place.world.postgres.connect().await.unwrap();
    publish(&client, "a", "k", 2).await;
    place.world.settle(SETTLE).await.unwrap();
    for name in ["synchronous_standby_names", "synchronized_standby_slots"] {
        place.other.configure(name, "").unwrap();
    }
    place.other.restart().await.unwrap();
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                WHERE application_name LIKE 'outboxd%'";
    let ended: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    assert!(ended >= 2, "{ended} sessions");
    publish(&client, "a", "k", 3).await;
    place.judge_events(3).await;
    let log = place.world.relay.log();
    assert!(log.contains("left behind"), "{}", log_tail(&place.world));
}

/// One address, two servers: each connection goes to the next of them, or, when told so, all go to the
/// second.
async fn alternate(ports: [u16; 2]) -> (u16, Arc<AtomicBool>) {
    let port = free_port().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let settled = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&settled);
    drop(tokio::spawn(async move {
        let mut turn = 0;
        while let Ok((mut client, _)) = listener.accept().await {
            turn = if told.load(Ordering::Relaxed) { 1 } else { 1 - turn };
            let to = (Ipv4Addr::LOCALHOST, ports[turn]);
            drop(tokio::spawn(async move {
                let Ok(mut server) = TcpStream::connect(to).await else { return };
                drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
            }));
        }
    }));
    (port, settled)
}

/// The standby was promoted while the primary goes on, and both are behind one address: a session of
/// the one and the stream of the other would confirm what was never recorded.
#[tokio::test]
async fn two_servers_behind_one_address() {
    let Some(servers) = servers("two_servers_behind_one_address", "18") else { return };
    let mut place = Place::prepare(servers).await;
    place.world.start_relay().await.unwrap();
    place.guard().await;
    let client = place.world.postgres.connect().await.unwrap();
    publish(&client, "a", "k", 1).await;
    place.world.settle(SETTLE).await.unwrap();
    place.world.relay.terminate(SETTLE).await.unwrap();
    drop(client);
    place.other.promote().await.unwrap();
    std::mem::swap(&mut place.world.postgres, &mut place.other);
    let client = place.world.postgres.connect().await.unwrap();
    publish(&client, "a", "k", 2).await;

    let (port, settled) = alternate([place.other.port(), place.world.postgres.port()]).await;
    let file = place.world.relay.configuration();
    let text = std::fs::read_to_string(&file).unwrap();
    let one = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    std::fs::write(&file, text.replace(&place.url, &one)).unwrap();
    place.world.relay.start().unwrap();
    not_ready(&place.world, &["the two connections reached different servers"]).await;
    tokio::time::sleep(WATCHED).await;
    assert_eq!(place.world.messages().await.unwrap().len(), 1, "{}", log_tail(&place.world));
    settled.store(true, Ordering::Relaxed);
    place.judge_events(2).await;
}
