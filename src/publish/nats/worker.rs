//! The task of a connection: sends what senders wrote, hands out what comes in, and notices when
//! the server is dead. Decides nothing about messages.

use bytes::BytesMut;
use std::fmt::Display;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::handshake::Socket;
use super::wire::{self, Op};
use super::{Cause, Event, Shared};
use crate::publish::connect::ServerFacts;

/// A link without a word in so long is asked for one; with a second question unanswered it is dead,
/// within 20 s.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const UNANSWERED_MAX: u32 = 2;
/// A server that is told of the end closes within this.
const GOODBYE: Duration = Duration::from_secs(2);
/// Room for one read.
const READ_BYTES: usize = 32 << 10;
/// A large message leaves no more than this behind.
const KEEP_BYTES: usize = 256 << 10;

/// Complaints after which a server goes on, in lower case: they are the cause of no end.
const GOES_ON: [&str; 4] = [
    "permissions violation",
    "maximum subscriptions exceeded",
    "invalid subject",
    "invalid publish subject",
];

/// What is on its way into the socket.
#[derive(Debug, Default)]
pub(super) struct Sending {
    bytes: Vec<u8>,
    sent: usize,
    flushed: bool,
}

enum Moved {
    /// Everything taken is sent.
    Sent,
    /// So many bytes came; 0 is the end.
    Read(usize),
}

/// See the module.
pub(super) struct Worker {
    pub(super) socket: Socket,
    pub(super) unread: BytesMut,
    pub(super) sending: Sending,
    /// A complaint that nothing has followed yet: what a server says before it closes.
    pub(super) last_words: Option<String>,
    pub(super) shared: Arc<Shared>,
    pub(super) close: CancellationToken,
    pub(super) events: Box<dyn FnMut(Event) + Send>,
}

impl Worker {
    /// Ends with the connection, or when its handle is dropped.
    pub(super) async fn run(mut self) {
        let cause = self.work().await.err().unwrap_or(Cause::Unwanted);
        // Whoever finds that nothing comes any more can tell why.
        let unwanted = cause == Cause::Unwanted;
        (self.events)(Event::Ended(cause));
        self.shared.lock().end();
        self.shared.taken.notify_one();
        if unwanted {
            self.part().await;
        }
    }

    /// Closes a connection that works. To close a socket while something comes in resets it, and
    /// that takes back what the server has not read; so the server is told of the end, and closes.
    async fn part(mut self) {
        if self.shared.lock().given_up {
            // Without effect on a socket that is gone.
            self.socket.tcp().set_zero_linger().unwrap_or_default();
            return;
        }
        let goodbye = async {
            self.socket.shutdown().await?;
            self.unread.clear();
            while self.socket.read_buf(&mut self.unread).await? > 0 {
                self.unread.clear();
            }
            io::Result::Ok(())
        };
        // Nobody waits for it, and a server that reads nothing is not waited for.
        drop(timeout(GOODBYE, goodbye).await);
    }

    async fn work(&mut self) -> Result<(), Cause> {
        let mut tick = interval(PING_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pulse = Pulse { tick, heard: true, unanswered: 0 };
        // Something may have come together with the answer to the login.
        self.absorb()?;
        loop {
            self.take();
            tokio::select! {
                biased;
                () = self.close.cancelled() => return Ok(()),
                moved = transfer(&mut self.socket, &mut self.unread, &mut self.sending) => {
                    match moved {
                        Err(error) => return Err(self.lost(&error)),
                        Ok(Moved::Sent) => {}
                        Ok(Moved::Read(0)) => return Err(self.lost(&"it was closed by the server")),
                        Ok(Moved::Read(_)) => {
                            pulse.heard = true;
                            self.absorb()?;
                        }
                    }
                }
                () = self.shared.wake.notified() => {}
                _ = pulse.tick.tick() => {
                    if pulse.asks()? {
                        self.shared.lock().unsent.extend_from_slice(wire::PING);
                    }
                }
            }
        }
    }

    /// Why the socket has ended: its server's last words say more than what was seen of it.
    fn lost(&mut self, seen: &dyn Display) -> Cause {
        self.last_words.take().map_or_else(|| Cause::Seen(seen.to_string()), Cause::Said)
    }

    /// Takes what there is to send, unless something is still on its way.
    fn take(&mut self) {
        if !self.sending.bytes.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        if state.unsent.is_empty() {
            return;
        }
        std::mem::swap(&mut state.unsent, &mut self.sending.bytes);
        drop(state);
        self.shared.taken.notify_one();
    }

    /// Every whole operation that was read.
    fn absorb(&mut self) -> Result<(), String> {
        while let Some(op) = wire::take(&mut self.unread)? {
            self.last_words = None;
            match op {
                Op::Deliver(sid, delivery) => self.shared.lock().deliver(sid, delivery),
                Op::Ping => self.shared.lock().unsent.extend_from_slice(wire::PONG),
                Op::Info(info) => self.shared.lock().facts = ServerFacts::of(&info),
                Op::Complaint(words) => {
                    let lower = words.to_ascii_lowercase();
                    let goes_on = GOES_ON.iter().any(|begin| lower.starts_with(begin));
                    self.last_words = (!goes_on).then(|| words.clone());
                    (self.events)(Event::Complaint(words));
                }
                Op::Pong | Op::Fine => {}
            }
        }
        if self.unread.capacity() - self.unread.len() < READ_BYTES / 4 {
            self.unread.reserve(READ_BYTES);
        }
        Ok(())
    }
}

/// Says when the server is asked for a sign of life.
struct Pulse {
    tick: Interval,
    heard: bool,
    unanswered: u32,
}

impl Pulse {
    fn asks(&mut self) -> Result<bool, String> {
        if std::mem::take(&mut self.heard) {
            self.unanswered = 0;
            return Ok(false);
        }
        if self.unanswered >= UNANSWERED_MAX {
            return Err("the server answers no ping".to_owned());
        }
        self.unanswered += 1;
        Ok(true)
    }
}

/// Moves bytes both ways until everything taken is sent or something came. Cancel-safe.
async fn transfer(
    socket: &mut Socket,
    unread: &mut BytesMut,
    sending: &mut Sending,
) -> io::Result<Moved> {
    poll_fn(|cx| {
        let had = !sending.bytes.is_empty();
        // What came before the end is read before the end is told.
        let failed = match poll_send(socket, sending, cx) {
            Poll::Ready(Ok(())) if had => return Poll::Ready(Ok(Moved::Sent)),
            Poll::Ready(Err(error)) => Some(error),
            Poll::Ready(Ok(())) | Poll::Pending => None,
        };
        match (pin!(socket.read_buf(unread)).poll(cx), failed) {
            (Poll::Ready(Ok(bytes)), _) if bytes > 0 => Poll::Ready(Ok(Moved::Read(bytes))),
            (_, Some(error)) => Poll::Ready(Err(error)),
            (read, None) => read.map_ok(Moved::Read),
        }
    })
    .await
}

fn poll_send(
    socket: &mut Socket,
    sending: &mut Sending,
    cx: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    while let Some(rest) = sending.bytes.get(sending.sent..).filter(|rest| !rest.is_empty()) {
        let sent = ready!(Pin::new(&mut *socket).poll_write(cx, rest))?;
        if sent == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        sending.sent += sent;
        sending.flushed = false;
    }
    if !sending.flushed {
        ready!(Pin::new(socket).poll_flush(cx))?;
        sending.flushed = true;
    }
    sending.sent = 0;
    sending.bytes.clear();
    sending.bytes.shrink_to(KEEP_BYTES);
    Poll::Ready(Ok(()))
}

#[cfg(test)]
mod tests;
