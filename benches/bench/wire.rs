//! NATS in its plainest form: a blocking socket, frames in, bytes out. What a client library costs
//! would be a part of the limit otherwise, and of every time that is taken.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::{Result, clock};

/// Silence that means that something is wrong.
const SILENCE: Duration = Duration::from_secs(60);
/// How often a silent socket is asked whether it is still wanted.
pub const TICK: Duration = Duration::from_millis(50);

/// One connection.
pub struct Wire {
    socket: TcpStream,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are dealt with.
    done: usize,
    /// When the last bytes came.
    read_at: i64,
}

/// A message that was delivered.
pub struct Message {
    pub payload: Vec<u8>,
    /// When its bytes were read from the socket.
    pub at: i64,
}

enum Frame {
    Message(Message),
    Pong,
    Other,
}

impl Wire {
    pub fn connect(port: u16) -> Result<Wire> {
        let socket = TcpStream::connect(("127.0.0.1", port))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(TICK))?;
        let mut wire = Wire { socket, buffer: Vec::new(), done: 0, read_at: 0 };
        wire.send(b"CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\n")?;
        wire.flush()?;
        Ok(wire)
    }

    /// The server knows it when this returns.
    pub fn subscribe(&mut self, subject: &str) -> Result<()> {
        self.send(format!("SUB {subject} 1\r\n").as_bytes())?;
        self.flush()
    }

    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.socket.write_all(bytes)?)
    }

    /// Waits until the server has read all that was sent; nothing may be on its way to us.
    fn flush(&mut self) -> Result<()> {
        self.send(b"PING\r\n")?;
        let start = Instant::now();
        while start.elapsed() < SILENCE {
            if let Some(Frame::Pong) = self.frame()? {
                return Ok(());
            }
        }
        Err("nats-server does not answer a PING".into())
    }

    /// The next message, or nothing within a tick.
    pub fn poll(&mut self) -> Result<Option<Message>> {
        loop {
            match self.frame()? {
                Some(Frame::Message(message)) => return Ok(Some(message)),
                Some(Frame::Pong | Frame::Other) => {}
                None => return Ok(None),
            }
        }
    }

    /// The next message.
    pub fn next(&mut self) -> Result<Message> {
        let start = Instant::now();
        while start.elapsed() < SILENCE {
            if let Some(message) = self.poll()? {
                return Ok(message);
            }
        }
        Err("nats-server is silent".into())
    }

    fn frame(&mut self) -> Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.parse()? {
                return Ok(Some(frame));
            }
            self.buffer.drain(..self.done);
            self.done = 0;
            let mut piece = [0; 65_536];
            match self.socket.read(&mut piece) {
                Ok(0) => return Err("nats-server closed the connection".into()),
                Ok(count) => {
                    self.read_at = clock::now();
                    self.buffer.extend_from_slice(piece.get(..count).unwrap_or_default());
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A whole frame of the buffer, if there is one.
    fn parse(&mut self) -> Result<Option<Frame>> {
        let rest = self.buffer.get(self.done..).unwrap_or_default();
        let Some(length) = rest.windows(2).position(|two| two == b"\r\n") else { return Ok(None) };
        let line = String::from_utf8_lossy(rest.get(..length).unwrap_or_default()).into_owned();
        let mut words = line.split_ascii_whitespace();
        let verb = words.next().unwrap_or_default();
        let mut whole = length + 2;
        let frame = match verb {
            "MSG" | "HMSG" => {
                let numbers: Vec<usize> = words.rev().map_while(|word| word.parse().ok()).collect();
                let size = numbers.first().copied().ok_or_else(|| format!("frame {line:?}"))?;
                let head = if verb == "HMSG" { numbers.get(1).copied().unwrap_or(0) } else { 0 };
                let Some(payload) = rest.get(whole + head..whole + size) else { return Ok(None) };
                if rest.len() < whole + size + 2 {
                    return Ok(None);
                }
                whole += size + 2;
                Frame::Message(Message { payload: payload.to_vec(), at: self.read_at })
            }
            "PING" => {
                self.socket.write_all(b"PONG\r\n")?;
                Frame::Other
            }
            "PONG" => Frame::Pong,
            "-ERR" => return Err(format!("nats-server: {line}").into()),
            _ => Frame::Other,
        };
        self.done += whole;
        Ok(Some(frame))
    }
}
