//! A logged-in socket for tokio-postgres, which wants to log in itself: its start-up message is
//! swallowed, and the server's greeting is given to it again. So there is one log-in, with one set
//! of rules on passwords, for both connections.

use bytes::{Bytes, BytesMut};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::login::Session;
use super::socket::Socket;

/// AuthenticationOk, which goes in front of the greeting.
const AUTHENTICATION_OK: &[u8] = b"R\0\0\0\x08\0\0\0\0";

/// The socket in tokio-postgres' hands.
#[derive(Debug)]
pub(super) struct Handover {
    socket: Socket,
    /// What is read before the socket is.
    replay: Bytes,
    startup: Startup,
}

/// How much of the start-up message is still to be swallowed.
#[derive(Debug)]
enum Startup {
    /// The first bytes of its length.
    Length(Vec<u8>),
    Body(usize),
}

impl Handover {
    pub(super) fn new(session: Session) -> Handover {
        let mut replay = BytesMut::from(AUTHENTICATION_OK);
        replay.extend_from_slice(&session.greeting);
        replay.extend_from_slice(&session.wire.unread);
        Handover {
            socket: session.wire.socket,
            replay: replay.freeze(),
            startup: Startup::Length(Vec::new()),
        }
    }

    /// Takes what belongs to the start-up message; 0 once it is complete.
    fn swallow(&mut self, bytes: &[u8]) -> usize {
        match &mut self.startup {
            Startup::Length(seen) => {
                let taken = bytes.len().min(4 - seen.len());
                seen.extend(bytes.iter().take(taken));
                if let Ok(length) = <[u8; 4]>::try_from(seen.as_slice()) {
                    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                    self.startup = Startup::Body(length.saturating_sub(4));
                }
                taken
            }
            Startup::Body(left) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                taken
            }
        }
    }
}

impl AsyncRead for Handover {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.replay.is_empty() {
            return Pin::new(&mut this.socket).poll_read(cx, buf);
        }
        let part = this.replay.len().min(buf.remaining());
        buf.put_slice(&this.replay.split_to(part));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Handover {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match this.swallow(buf) {
            0 => Pin::new(&mut this.socket).poll_write(cx, buf),
            taken => Poll::Ready(Ok(taken)),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(cx)
    }
}
