//! A server of a few lines for tests of the protocol: it says what the test says, and reads when
//! the test reads.

use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Connection, Event};
use crate::config::DestinationConfig;
use crate::publish::facts::tests::destination;

/// How long anything that must come is waited for.
pub(in crate::publish) const PATIENCE: Duration = Duration::from_secs(60);

/// The server's side of one connection.
pub(in crate::publish) struct Peer {
    pub(in crate::publish) socket: TcpStream,
}

/// What a client sent.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::publish) enum Heard {
    Line(String),
    Message { subject: String, reply: String, body: Vec<u8> },
    End,
}

impl Heard {
    pub(in crate::publish) fn line(line: &str) -> Heard {
        Heard::Line(line.to_owned())
    }
}

/// A place to listen at, and a destination there.
pub(in crate::publish) async fn listen() -> (TcpListener, DestinationConfig) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = DestinationConfig {
        servers: vec![format!("nats://{}", listener.local_addr().unwrap())],
        ..destination("events.{kind}")
    };
    (listener, config)
}

/// A connection that is logged in, its server, and what it is told.
pub(super) async fn meet() -> (Connection, Peer, mpsc::UnboundedReceiver<Event>) {
    let (listener, config) = listen().await;
    let (told, events) = mpsc::unbounded_channel();
    let tell = move |event| told.send(event).unwrap_or_default();
    let (connection, peer) =
        tokio::join!(Connection::open(&config, &config.servers[0], tell), Peer::accept(&listener));
    let connection = connection.map_err(|failure| failure.to_string()).unwrap();
    (connection, peer, events)
}

impl Peer {
    /// Takes a connection and lets it log in.
    pub(in crate::publish) async fn accept(listener: &TcpListener) -> Peer {
        let (socket, _) = timeout(PATIENCE, listener.accept()).await.unwrap().unwrap();
        let mut peer = Peer { socket };
        peer.say("INFO {\"version\":\"2.15.1\",\"max_payload\":67108864,\"headers\":true}\r\n")
            .await;
        let Heard::Line(line) = peer.hear().await else { panic!("no CONNECT") };
        assert!(line.starts_with("CONNECT {"), "{line}");
        assert_eq!(peer.hear().await, Heard::line("PING"));
        peer.say("PONG\r\n").await;
        peer
    }

    pub(in crate::publish) async fn say(&mut self, words: impl AsRef<[u8]>) {
        timeout(PATIENCE, self.socket.write_all(words.as_ref())).await.unwrap().unwrap();
    }

    /// The next line or message. One byte at a time up to the line's end, so that nothing is read
    /// that was not asked for.
    pub(in crate::publish) async fn hear(&mut self) -> Heard {
        let Some(line) = timeout(PATIENCE, self.line()).await.unwrap() else { return Heard::End };
        let words: Vec<&str> = line.split(' ').collect();
        let (subject, reply, total) = match words[..] {
            ["PUB", subject, reply, total] | ["HPUB", subject, reply, _, total] => {
                (subject.to_owned(), reply.to_owned(), total.parse::<usize>().unwrap())
            }
            _ => return Heard::Line(line),
        };
        let mut body = vec![0; total + 2];
        match timeout(PATIENCE, self.socket.read_exact(&mut body)).await.unwrap() {
            Ok(_) => assert_eq!(body.split_off(total), b"\r\n"),
            Err(_) => return Heard::End,
        }
        Heard::Message { subject, reply, body }
    }

    async fn line(&mut self) -> Option<String> {
        let mut line = Vec::new();
        loop {
            match self.socket.read_u8().await {
                Ok(b'\n') => break,
                Ok(byte) => line.push(byte),
                Err(_) => return None,
            }
        }
        assert_eq!(line.pop(), Some(b'\r'));
        Some(String::from_utf8(line).unwrap())
    }
}
