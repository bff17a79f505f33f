//! What a connection's owner sees, against a scripted server.

use super::peer::{Heard, PATIENCE, Peer, meet};
use super::*;
use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;

/// Reads the request for a subject; where its answer goes.
async fn asked(peer: &mut Peer, wanted: &str) -> String {
    let heard = peer.hear().await;
    let Heard::Message { subject, reply, .. } = &heard else { panic!("{wanted}: {heard:?}") };
    assert_eq!(subject, wanted);
    reply.clone()
}

async fn answer(peer: &mut Peer, reply: &str, body: &str) {
    peer.say(format!("MSG {reply} {REQUESTS} {}\r\n{body}\r\n", body.len())).await;
}

fn text(answer: Option<Delivery>) -> String {
    String::from_utf8(answer.unwrap().payload.to_vec()).unwrap()
}

#[tokio::test]
async fn requests_share_a_subscription_and_each_hears_its_own_answer() {
    let (connection, mut peer, _events) = meet().await;
    let script = async {
        let Heard::Line(line) = peer.hear().await else { panic!("no subscription") };
        assert_eq!(line, format!("SUB {}.{REQUESTS}.* {REQUESTS}", connection.inbox));
        let first = asked(&mut peer, "a").await;
        let second = asked(&mut peer, "b").await;
        answer(&mut peer, &second, "of b").await;
        answer(&mut peer, &first, "of a").await;
        answer(&mut peer, &first, "of a, again").await;
        answer(&mut peer, "nobody.asked", "at all").await;
    };
    let (first, second, ()) =
        tokio::join!(connection.request("a", b""), connection.request("b", b""), script);
    assert_eq!((text(first), text(second)), ("of a".to_owned(), "of b".to_owned()));

    // One that is given up leaves its answer to nobody.
    let mut late = Box::pin(connection.request("c", b""));
    let given_up = tokio::select! {
        biased;
        _ = &mut late => panic!("answered"),
        reply = asked(&mut peer, "c") => reply,
    };
    drop(late);
    let script = async {
        let reply = asked(&mut peer, "d").await;
        answer(&mut peer, &given_up, "of c").await;
        answer(&mut peer, &reply, "of d").await;
    };
    let (answered, ()) = tokio::join!(connection.request("d", b""), script);
    assert_eq!(text(answered), "of d");
    assert!(connection.shared.lock().requests.is_empty());

    let script = async {
        asked(&mut peer, "e").await;
        drop(peer);
    };
    let (answered, ()) = tokio::join!(timeout(PATIENCE, connection.request("e", b"")), script);
    assert_eq!(answered.unwrap(), None);
    assert_eq!(timeout(PATIENCE, connection.request("f", b"")).await.unwrap(), None);
    let (_, mut closed) = connection.open_inbox();
    assert_eq!(timeout(PATIENCE, closed.next()).await.unwrap(), None);
}

#[tokio::test]
async fn what_the_socket_took_arrives_unless_the_connection_is_given_up() {
    for give_up in [false, true] {
        let (connection, mut peer, _events) = meet().await;
        // More than the buffers of both sides hold.
        connection.publish("a", "b", "", &vec![b'x'; 32 << 20]);
        assert!(matches!(peer.hear().await, Heard::Line(line) if line.starts_with("SUB ")));
        // The message is on its way.
        assert_eq!(peer.socket.read_u8().await.unwrap(), b'P');
        if give_up {
            connection.give_up();
        }
        drop(connection);
        // Unread in a socket that is closed, this would reset it.
        peer.say("PING\r\n").await;
        let mut rest = Vec::new();
        let read = timeout(PATIENCE, peer.socket.read_to_end(&mut rest)).await.unwrap();
        assert_eq!(read.is_err(), give_up, "{read:?}");
        assert!(rest.starts_with(b"UB a b 33554432\r\nxxx") && rest.len() < 32 << 20);
    }
}
