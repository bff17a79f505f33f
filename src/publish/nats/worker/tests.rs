//! The task of a connection against a scripted server.

use super::super::peer::{PATIENCE, meet};
use super::super::{Cause, Event};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;

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
