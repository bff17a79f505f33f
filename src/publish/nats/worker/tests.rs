//! The task of a connection against a scripted server.

use super::super::peer::{Heard, PATIENCE, Peer, meet};
use super::super::{Cause, Connection, Delivery, Event, Subscriber, UNSENT_MAX};
use super::*;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::yield_now;

async fn next(events: &mut UnboundedReceiver<Event>) -> Event {
    timeout(PATIENCE, events.recv()).await.unwrap().unwrap()
}

fn complaint(words: &str) -> Event {
    Event::Complaint(words.to_owned())
}

#[tokio::test]
async fn an_end_is_told_by_the_servers_last_words_and_by_no_earlier_ones() {
    for (said, complaints, cause) in [
        (
            "-ERR 'User Authentication Expired'\r\n",
            &["User Authentication Expired"][..],
            Cause::Said("User Authentication Expired".to_owned()),
        ),
        // It was for another reason that the server closed the connection.
        (
            "-ERR 'Unheard Of'\r\nPING\r\n",
            &["Unheard Of"],
            Cause::Seen("it was closed by the server".to_owned()),
        ),
        (
            "-ERR 'maximum subscriptions exceeded'\r\n",
            &["maximum subscriptions exceeded"],
            Cause::Seen("it was closed by the server".to_owned()),
        ),
        (
            "-ERR 'Stale Connection'\r\nHTTP/1.1 400\r\n",
            &["Stale Connection"],
            Cause::Seen("this is not the protocol of NATS: HTTP/1.1 400".to_owned()),
        ),
    ] {
        let (_connection, mut peer, mut events) = meet().await;
        peer.say(said).await;
        // The end only: what the client answers is still read.
        tokio::io::AsyncWriteExt::shutdown(&mut peer.socket).await.unwrap();
        for words in complaints {
            assert_eq!(next(&mut events).await, complaint(words));
        }
        assert_eq!(next(&mut events).await, Event::Ended(cause));
    }
}

/// An open inbox, after its subscription has come to the server; its number there.
async fn subscribed(connection: &Connection, peer: &mut Peer) -> (Subscriber, String) {
    let (inbox, subscriber) = connection.open_inbox();
    loop {
        let Heard::Line(line) = peer.hear().await else { panic!("no subscription") };
        if let Some(sid) = line.strip_prefix(&format!("SUB {inbox}.> ")) {
            return (subscriber, sid.to_owned());
        }
    }
}

async fn delivered(subscriber: &mut Subscriber) -> Option<Delivery> {
    timeout(PATIENCE, subscriber.next()).await.unwrap()
}

#[tokio::test]
async fn a_ping_is_answered_behind_what_was_sent() {
    let (connection, mut peer, _events) = meet().await;
    let (mut subscriber, sid) = subscribed(&connection, &mut peer).await;
    connection.publish("a", "b", "", b"x");
    peer.say(format!("PING\r\n+OK\r\nPONG\r\nMSG a {sid} 1\r\ny\r\nPING\r\n")).await;
    assert!(matches!(peer.hear().await, Heard::Message { body, .. } if body == b"x"));
    for _ in 0..2 {
        assert_eq!(peer.hear().await, Heard::line("PONG"));
    }
    assert_eq!(&*delivered(&mut subscriber).await.unwrap().payload, b"y");
}

#[tokio::test]
async fn a_server_is_asked_twice_and_then_dead_unless_it_says_something() {
    let mut pulse = Pulse { tick: interval(PING_INTERVAL), heard: true, unanswered: 0 };
    assert_eq!(pulse.asks(), Ok(false));
    for _ in 0..2 {
        assert_eq!([pulse.asks(), pulse.asks()], [Ok(true), Ok(true)]);
        pulse.heard = true;
        assert_eq!(pulse.asks(), Ok(false));
    }
    assert_eq!([pulse.asks(), pulse.asks()], [Ok(true), Ok(true)]);
    assert!(pulse.asks().is_err());
}

#[tokio::test]
async fn a_message_may_come_in_pieces_and_others_for_nobody() {
    let (connection, mut peer, _events) = meet().await;
    let (mut subscriber, sid) = subscribed(&connection, &mut peer).await;
    let text = format!(
        "MSG a 99 1\r\nn\r\nHMSG a.b {sid} c.d 12 15\r\nNATS/1.0\r\n\r\none\r\nMSG a {sid} 3\r\ntwo\r\n"
    );
    for byte in text.bytes() {
        peer.say([byte]).await;
        // The client reads it.
        yield_now().await;
    }
    let first = delivered(&mut subscriber).await.unwrap();
    assert_eq!((first.subject(), first.reply(), &*first.payload), ("a.b", "c.d", &b"one"[..]));
    assert_eq!(&*delivered(&mut subscriber).await.unwrap().payload, b"two");
}

#[tokio::test]
async fn a_huge_message_goes_through_whole_and_its_room_is_given_back() {
    const BYTES: usize = 16 << 20;
    let (connection, mut peer, _events) = meet().await;
    let (mut subscriber, sid) = subscribed(&connection, &mut peer).await;
    let huge: Vec<u8> = (0..=250).cycle().take(BYTES).collect();
    connection.publish("a", "b", "", &huge);
    assert!(matches!(peer.hear().await, Heard::Message { body, .. } if body == huge));
    connection.publish("a", "b", "", b"small");
    assert!(matches!(peer.hear().await, Heard::Message { body, .. } if body == b"small"));
    assert!(connection.shared.lock().unsent.capacity() <= KEEP_BYTES);

    let say = async {
        peer.say(format!("MSG a {sid} {BYTES}\r\n")).await;
        peer.say(&huge).await;
        peer.say("\r\n").await;
    };
    let (delivery, ()) = tokio::join!(delivered(&mut subscriber), say);
    assert!(delivery.unwrap().payload == huge);
}

#[tokio::test]
async fn of_a_message_that_ends_in_its_middle_nothing_is_delivered() {
    let (connection, mut peer, mut events) = meet().await;
    let (mut subscriber, sid) = subscribed(&connection, &mut peer).await;
    peer.say(format!("MSG a {sid} 5\r\nwhole\r\nMSG a {sid} 10\r\nhalf")).await;
    drop(peer);
    assert_eq!(&*delivered(&mut subscriber).await.unwrap().payload, b"whole");
    assert_eq!(delivered(&mut subscriber).await, None);
    let closed = Cause::Seen("it was closed by the server".to_owned());
    assert_eq!(next(&mut events).await, Event::Ended(closed));
}

#[tokio::test]
async fn what_waits_for_a_slow_reader_is_bounded_and_keeps_its_order() {
    const PAYLOAD: usize = 1_000;
    let (connection, mut peer, _events) = meet().await;
    let (_subscriber, _) = subscribed(&connection, &mut peer).await;
    // More than the buffers of both sides hold; the task has it when its first byte is there.
    connection.publish("a", "b", "", &vec![0; 32 << 20]);
    let mut first = [0];
    timeout(PATIENCE, peer.socket.peek(&mut first)).await.unwrap().unwrap();
    let mut sent = 0_u32;
    while connection.has_room() {
        let mut payload = vec![b'x'; PAYLOAD];
        payload[..4].copy_from_slice(&sent.to_be_bytes());
        connection.publish("c", "d", "", &payload);
        sent += 1;
    }
    let waiting = connection.shared.lock().unsent.len();
    assert!((UNSENT_MAX..UNSENT_MAX + PAYLOAD + 100).contains(&waiting), "{waiting}");
    let is_full = tokio::select! {
        biased;
        () = connection.room() => false,
        () = std::future::ready(()) => true,
    };
    assert!(is_full);
    let read = async {
        assert!(matches!(peer.hear().await, Heard::Message { body, .. } if body.len() == 32 << 20));
        for n in 0..sent {
            let Heard::Message { subject, body, .. } = peer.hear().await else { panic!("{n}") };
            assert_eq!((&*subject, &body[..4]), ("c", &n.to_be_bytes()[..]));
        }
    };
    let (room, ()) = tokio::join!(timeout(PATIENCE, connection.room()), read);
    assert!(room.is_ok() && connection.has_room());
}
