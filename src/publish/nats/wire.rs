//! The client protocol of NATS as bytes: what is written, and what is read. Pure; what a server
//! sends never panics.

use async_nats::ServerInfo;
use bytes::{Bytes, BytesMut};
use std::ops::Range;

use crate::message::{Headers, Room, decimal};

/// Longest line that is read. The longest by far is INFO, which lists the servers of a cluster.
const LINE_MAX: usize = 1 << 20;
/// Largest message that is read; a server takes 64 MiB at most.
const BODY_MAX: usize = 128 << 20;

/// What a server says.
#[derive(Debug)]
pub(super) enum Op {
    /// About itself: at first, and when something changes.
    Info(Box<ServerInfo>),
    /// A message for this subscription.
    Deliver(u64, Delivery),
    Ping,
    Pong,
    /// A complaint; the connection may or may not end by it.
    Complaint(String),
    /// It agrees. Not asked for.
    Fine,
}

/// A message that came in. Its parts are slices of what was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::publish) struct Delivery {
    subject: Bytes,
    reply: Bytes,
    head: Bytes,
    /// Body.
    pub(in crate::publish) payload: Bytes,
}

impl Delivery {
    #[cfg(test)]
    pub(in crate::publish) fn with_reply(reply: &str) -> Delivery {
        Delivery { reply: Bytes::copy_from_slice(reply.as_bytes()), ..Delivery::default() }
    }

    /// Where it was sent to.
    pub(in crate::publish) fn subject(&self) -> &str {
        str::from_utf8(&self.subject).unwrap_or_default()
    }

    /// Where its answer is wanted; empty when it is wanted nowhere.
    pub(in crate::publish) fn reply(&self) -> &str {
        str::from_utf8(&self.reply).unwrap_or_default()
    }

    /// Its headers.
    pub(in crate::publish) fn headers(&self) -> Headers<'_> {
        Headers::of(&self.head)
    }

    /// The server's word about a message that is not there.
    pub(in crate::publish) fn status(&self) -> Option<u16> {
        if self.head.is_empty() { None } else { self.headers().status() }
    }
}

/// Takes the next whole operation off what was read. `None`: it is not whole yet, and room for
/// the rest of it is reserved. An error: this is no NATS server.
pub(super) fn take(unread: &mut BytesMut) -> Result<Option<Op>, String> {
    let Some(end) = unread.iter().position(|byte| *byte == b'\n') else {
        return match unread.len() > LINE_MAX {
            true => Err("a line without an end".to_owned()),
            false => Ok(None),
        };
    };
    let line = unread.get(..end).unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let (verb, rest) = match line.iter().position(|byte| *byte == b' ') {
        Some(blank) => line.split_at_checked(blank).unwrap_or_default(),
        None => (line, &[][..]),
    };
    let op = match verb {
        b"MSG" | b"HMSG" => return message(unread, end),
        b"PING" => Op::Ping,
        b"PONG" => Op::Pong,
        b"+OK" => Op::Fine,
        b"-ERR" => {
            let words = String::from_utf8_lossy(rest);
            Op::Complaint(words.trim().trim_matches('\'').to_owned())
        }
        b"INFO" => {
            let info = serde_json::from_slice(rest);
            Op::Info(Box::new(info.map_err(|error| format!("INFO that can't be read: {error}"))?))
        }
        _ => return Err(unreadable(line)),
    };
    drop(unread.split_to(end + 1));
    Ok(Some(op))
}

/// `MSG subject sid [reply] bytes`, or `HMSG subject sid [reply] header-bytes all-bytes`. The line
/// ends at `end`.
fn message(unread: &mut BytesMut, end: usize) -> Result<Option<Op>, String> {
    let line = unread.get(..end).unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut words: [Range<usize>; 6] = Default::default();
    let (mut count, mut at) = (0, 0);
    for word in line.split(|byte| *byte == b' ') {
        if let Some(place) = words.get_mut(count) {
            *place = at..at + word.len();
        }
        (count, at) = (count + 1, at + word.len() + 1);
    }
    let with_head = line.first() == Some(&b'H');
    let number = |range: &Range<usize>| {
        let text = str::from_utf8(line.get(range.clone())?).ok()?;
        text.parse::<usize>().ok()
    };
    let [_, subject, sid, fourth, fifth, sixth] = &words;
    let (reply, head, total) = match (with_head, count) {
        (false, 4) => (0..0, Some(0), number(fourth)),
        (false, 5) => (fourth.clone(), Some(0), number(fifth)),
        (true, 5) => (0..0, number(fourth), number(fifth)),
        (true, 6) => (fourth.clone(), number(fifth), number(sixth)),
        _ => return Err(unreadable(line)),
    };
    let (Some(sid), Some(head), Some(total)) = (number(sid), head, total) else {
        return Err(unreadable(line));
    };
    // Whoever else publishes to the stream may have subjects that are no text.
    if head > total || total > BODY_MAX {
        return Err(unreadable(line));
    }
    let body = end + 1;
    let whole = body + total + 2;
    if unread.len() < whole {
        unread.reserve(whole - unread.len());
        return Ok(None);
    }
    let block = unread.split_to(whole).freeze();
    if !block.ends_with(b"\r\n") {
        return Err("a message that does not end where it says".to_owned());
    }
    let delivery = Delivery {
        subject: block.slice(subject.clone()),
        reply: block.slice(reply),
        head: block.slice(body..body + head),
        payload: block.slice(body + head..body + total),
    };
    Ok(Some(Op::Deliver(u64::try_from(sid).unwrap_or(u64::MAX), delivery)))
}

fn unreadable(line: &[u8]) -> String {
    let shown: Vec<u8> = line.iter().take(80).copied().collect();
    format!("this is not the protocol of NATS: {}", String::from_utf8_lossy(&shown).escape_debug())
}

/// Appends a message; `head` is a whole header block or empty.
pub(super) fn publish(out: &mut Vec<u8>, subject: &str, reply: &str, head: &str, payload: &[u8]) {
    let mut room = Room::default();
    let verb: &[u8] = if head.is_empty() { b"PUB " } else { b"HPUB " };
    // The numbers, blanks and line ends take less than this.
    out.reserve(64 + subject.len() + reply.len() + head.len() + payload.len());
    out.extend_from_slice(verb);
    out.extend_from_slice(subject.as_bytes());
    out.push(b' ');
    out.extend_from_slice(reply.as_bytes());
    out.push(b' ');
    if !head.is_empty() {
        out.extend_from_slice(decimal(&mut room, count(head.len())));
        out.push(b' ');
    }
    let total = head.len() + payload.len();
    out.extend_from_slice(decimal(&mut room, count(total)));
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(payload);
    out.extend_from_slice(b"\r\n");
}

fn count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Appends a subscription.
pub(super) fn subscribe(out: &mut Vec<u8>, subject: &str, sid: u64) {
    out.extend_from_slice(format!("SUB {subject} {sid}\r\n").as_bytes());
}

/// Appends the end of a subscription.
pub(super) fn unsubscribe(out: &mut Vec<u8>, sid: u64) {
    out.extend_from_slice(format!("UNSUB {sid}\r\n").as_bytes());
}

pub(super) const PING: &[u8] = b"PING\r\n";
pub(super) const PONG: &[u8] = b"PONG\r\n";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(bytes: &[u8]) -> Result<Vec<Op>, String> {
        let mut unread = BytesMut::from(bytes);
        let mut ops = Vec::new();
        while let Some(op) = take(&mut unread)? {
            ops.push(op);
        }
        Ok(ops)
    }

    #[test]
    fn every_operation_is_read() {
        let text = "INFO {\"version\":\"2.15.1\",\"max_payload\":1048576}\r\nPING\r\nPONG\r\n+OK\r\n\
                    -ERR 'Authorization Violation'\r\n\
                    MSG a.b 7 3\r\n1\r\n\r\n\
                    MSG a.b 8 re.ply 0\r\n\r\n\
                    HMSG a.b 9 24 26\r\nNATS/1.0\r\nA: one two\r\n\r\nhi\r\n\
                    HMSG a.b 10 re 16 16\r\nNATS/1.0 503\r\n\r\n\r\n";
        let ops = all(text.as_bytes()).unwrap();
        assert!(
            matches!(&ops[0], Op::Info(info) if info.version == "2.15.1" && info.max_payload == 1 << 20)
        );
        assert!(matches!(&ops[1..4], [Op::Ping, Op::Pong, Op::Fine]));
        assert!(matches!(&ops[4], Op::Complaint(words) if words == "Authorization Violation"));
        let seen = ops[5..].iter().map(|op| {
            let Op::Deliver(sid, it) = op else { panic!("{op:?}") };
            let (subject, reply) = (it.subject().to_owned(), it.reply().to_owned());
            let header = it.headers().get("A").unwrap_or_default().to_owned();
            (*sid, subject, reply, header, it.status(), it.payload.to_vec())
        });
        let text = str::to_owned;
        assert_eq!(
            seen.collect::<Vec<_>>(),
            [
                (7, text("a.b"), text(""), text(""), None, b"1\r\n".to_vec()),
                (8, text("a.b"), text("re.ply"), text(""), None, Vec::new()),
                (9, text("a.b"), text(""), text("one two"), None, b"hi".to_vec()),
                (10, text("a.b"), text("re"), text(""), Some(503), Vec::new()),
            ]
        );
    }

    #[test]
    fn what_is_not_the_protocol_is_refused() {
        for text in [
            "HTTP/1.1 400 Bad Request\r\n",
            "MSG a 1\r\n",
            "MSG a x 1\r\n",
            "MSG a 1 b c 5\r\n",
            "MSG a 1 999999999999\r\n",
            "HMSG a 1 5 4\r\nabcd\r\n",
            "MSG a 1 2\r\nabcd",
            "INFO {\r\n",
        ] {
            assert!(all(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_written_is_what_the_protocol_says() {
        let mut out = Vec::new();
        publish(&mut out, "a.b", "re", "NATS/1.0\r\n\r\n", b"hi");
        publish(&mut out, "a.b", "re", "", b"");
        subscribe(&mut out, "in.>", 3);
        unsubscribe(&mut out, 3);
        let text = "HPUB a.b re 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPUB a.b re 0\r\n\r\nSUB in.> 3\r\nUNSUB 3\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), text);
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_give_the_same(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..10),
            sizes in prop::collection::vec(1_usize..30, 1..10),
        ) {
            let mut bytes = Vec::new();
            for body in &bodies {
                bytes.extend(format!("MSG s 1 {}\r\n", body.len()).into_bytes());
                bytes.extend(body);
                bytes.extend(b"\r\nPING\r\n");
            }
            let (mut unread, mut found, mut pings) = (BytesMut::new(), Vec::new(), 0);
            let mut rest = bytes.as_slice();
            for size in sizes.iter().copied().cycle() {
                let (piece, later) = rest.split_at(size.min(rest.len()));
                rest = later;
                unread.extend_from_slice(piece);
                while let Some(op) = take(&mut unread).unwrap() {
                    match op {
                        Op::Deliver(_, it) => found.push(it.payload.to_vec()),
                        Op::Ping => pings += 1,
                        Op::Info(_) | Op::Pong | Op::Complaint(_) | Op::Fine => {
                            panic!("{op:?}");
                        }
                    }
                }
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(pings, bodies.len());
            prop_assert_eq!(found, bodies);
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..60),
            text in "(MSG|HMSG|INFO|PING|-ERR) [a-z0-9 ]{0,20}\\r\\n[a-z\\r\\n]{0,20}",
        ) {
            all(&bytes).ok();
            all(text.as_bytes()).ok();
        }
    }
}
