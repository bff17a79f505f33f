//! Messages of the frontend/backend protocol over a socket, one at a time: for log-in and for
//! statements on the replication connection. The stream itself is read in bulk by `stream`.

use bytes::{Buf, Bytes, BytesMut};
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::socket::Socket;
use super::sqlstate::failure_of_response;
use crate::error::{Failure, Kind};

/// Longest message before the stream starts. The longest legitimate ones are error reports.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// A message from the server.
#[derive(Debug)]
pub(super) struct Message {
    pub tag: u8,
    pub body: Bytes,
}

/// Rows of text values, as the simple protocol gives them.
pub(super) type Rows = Vec<Vec<Option<String>>>;

/// A socket and what has been read from it and not yet used.
#[derive(Debug)]
pub(super) struct Wire {
    pub socket: Socket,
    pub unread: BytesMut,
}

pub(super) fn broken(error: &io::Error) -> Failure {
    // An alert in answer to our certificate comes only after the handshake has ended for us.
    if error.get_ref().is_some_and(|cause| cause.is::<rustls::Error>()) {
        return Failure::new(Kind::SourceTls, format!("TLS: {error}"));
    }
    let detail = if error.kind() == io::ErrorKind::UnexpectedEof {
        "the server closed the connection".to_owned()
    } else {
        format!("the connection broke: {error}")
    };
    Failure::new(Kind::SourceUnreachable, detail)
}

pub(super) fn unexpected(tag: u8, when: &str) -> Failure {
    let detail = format!("unexpected message `{}` {when}", tag.escape_ascii());
    Failure::new(Kind::SourceUnreachable, detail)
}

impl Wire {
    pub(super) fn new(socket: Socket) -> Wire {
        Wire { socket, unread: BytesMut::with_capacity(8 << 10) }
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.socket.write_all(bytes).await.map_err(|error| broken(&error))?;
        self.socket.flush().await.map_err(|error| broken(&error))
    }

    /// The next message, whatever it is.
    pub(super) async fn any(&mut self) -> Result<Message, Failure> {
        loop {
            if let Some(message) = self.split()? {
                return Ok(message);
            }
            match self.socket.read_buf(&mut self.unread).await {
                Ok(0) => return Err(broken(&io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) => return Err(broken(&error)),
            }
        }
    }

    /// The next message that is neither notice nor error; an error becomes the failure.
    pub(super) async fn message(&mut self) -> Result<Message, Failure> {
        loop {
            let message = self.any().await?;
            match message.tag {
                b'N' | b'A' => {}
                b'E' => return Err(failure_of_response(&message.body)),
                _ => return Ok(message),
            }
        }
    }

    fn split(&mut self) -> Result<Option<Message>, Failure> {
        let Some((&[tag, a, b, c, d], _)) = self.unread.split_first_chunk::<5>() else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        if !(4..=MAX_MESSAGE_BYTES).contains(&length) {
            let detail = format!("a message of impossible length {length}: is it PostgreSQL?");
            return Err(Failure::new(Kind::SourceUnreachable, detail));
        }
        if self.unread.len() <= length {
            return Ok(None);
        }
        let mut body = self.unread.split_to(1 + length).freeze();
        body.advance(5);
        Ok(Some(Message { tag, body }))
    }

    /// Runs one statement by the simple protocol, which is the only one a walsender speaks.
    pub(super) async fn query(&mut self, sql: &str) -> Result<Rows, Failure> {
        let mut request = BytesMut::new();
        postgres_protocol::message::frontend::query(sql, &mut request)
            .map_err(|error| Failure::new(Kind::Internal, format!("query: {error}")))?;
        self.send(&request).await?;
        let (mut rows, mut error) = (Rows::new(), None);
        loop {
            let message = self.any().await?;
            match message.tag {
                b'D' => rows.push(row(&message.body).ok_or_else(|| {
                    Failure::new(Kind::SourceUnreachable, "a result row can't be read")
                })?),
                b'E' => {
                    let failure = failure_of_response(&message.body);
                    // After a FATAL error no ReadyForQuery follows.
                    if message.body.windows(6).any(|part| part == b"VFATAL") {
                        return Err(failure);
                    }
                    error = Some(failure);
                }
                b'Z' => return error.map_or(Ok(rows), Err),
                b'T' | b'C' | b'I' | b'N' | b'S' | b'A' => {}
                tag => return Err(unexpected(tag, "in the answer to a statement")),
            }
        }
    }
}

/// A DataRow.
fn row(mut body: &[u8]) -> Option<Vec<Option<String>>> {
    let columns = body.try_get_u16().ok()?;
    let mut values = Vec::with_capacity(usize::from(columns));
    for _ in 0..columns {
        let length = body.try_get_i32().ok()?;
        values.push(match usize::try_from(length) {
            Ok(length) => {
                let (value, rest) = body.split_at_checked(length)?;
                body = rest;
                Some(String::from_utf8_lossy(value).into_owned())
            }
            Err(_) => None,
        });
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_with_checks() {
        let full = b"\0\x02\0\0\0\x02ab\xff\xff\xff\xff";
        assert_eq!(row(full), Some(vec![Some("ab".to_owned()), None]));
        assert_eq!(row(b"\0\0"), Some(Vec::new()));
        for cut in 0..full.len() {
            assert_eq!(row(&full[..cut]), None, "{cut} bytes");
        }
    }
}
