//! The stream: one task that reads the socket, reports what is confirmed, and notices when the
//! server is dead or wants to go. It never waits for the consumer.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use pgwire_replication::protocol::framing::MAX_MESSAGE_SIZE;
use pgwire_replication::protocol::{ReplicationCopyData, parse_copy_data};
use postgres_protocol::message::frontend;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::feedback::Feedback;
use super::identity::ServerClock;
use super::queue::{Queue, WalItem};
use super::socket::Socket;
use super::sqlstate::{failure_of_notice, failure_of_response};
use super::wire::{Wire, broken, unexpected};
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;

/// Room for one read. A walsender writes message by message, so that a read brings what piled up
/// since the last one.
const READ_BYTES: usize = 128 << 10;

/// A running stream. Dropping it closes the connection at once, without a goodbye.
#[derive(Debug)]
pub struct WalStream {
    queue: Arc<Queue>,
    confirmed: watch::Sender<Lsn>,
    stop: CancellationToken,
    task: JoinHandle<Result<(), Failure>>,
}

impl WalStream {
    pub(super) fn spawn(
        wire: Wire,
        clock: ServerClock,
        wal_sender_timeout: Option<Duration>,
        queue_bytes: usize,
    ) -> WalStream {
        let queue = Arc::new(Queue::new(queue_bytes));
        let (confirmed, confirmations) = watch::channel(Lsn::ZERO);
        let stop = CancellationToken::new();
        let worker = Worker {
            socket: wire.socket,
            unread: wire.unread,
            oversized: false,
            unsent: BytesMut::new(),
            flushed: true,
            items: Vec::new(),
            feedback: Feedback::new(Instant::now(), wal_sender_timeout),
            clock,
            queue: Arc::clone(&queue),
            confirmations,
            stop: stop.clone(),
            phase: Phase::Streaming,
        };
        let task = tokio::spawn(worker.run());
        WalStream { queue, confirmed, stop, task }
    }

    /// Whatever has come, in the stream's order, at least one item. After a failure there is
    /// nothing but this failure. Cancel-safe.
    pub async fn next(&mut self) -> Result<Vec<WalItem>, Failure> {
        self.queue.take().await
    }

    /// The server may forget everything below `lsn`. A lower one than before changes nothing.
    pub fn confirm(&self, lsn: Lsn) {
        self.confirmed.send_if_modified(|confirmed| {
            let higher = lsn > *confirmed;
            *confirmed = lsn.max(*confirmed);
            higher
        });
    }

    /// Reports what is confirmed, ends the stream and waits for the server's goodbye: after `Ok`
    /// the server has read the report. What it still sends is dropped.
    pub async fn stop(mut self, within: Duration) -> Result<(), Failure> {
        self.stop.cancel();
        match timeout(within, &mut self.task).await {
            Ok(Ok(ending)) => ending,
            Ok(Err(error)) => Err(Failure::new(Kind::Internal, format!("stream task: {error}"))),
            Err(_) => {
                let detail = format!("the server did not end the stream within {within:?}");
                Err(Failure::new(Kind::SourceSilent, detail))
            }
        }
    }
}

impl Drop for WalStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A server in the middle of a transaction answers CopyDone only after it has sent the whole of it.
/// After this time it is told to terminate, which it does between two messages.
const ENDING_PATIENCE: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Streaming,
    /// We said CopyDone; data is dropped. When to say Terminate.
    Ending(Instant),
    /// We said Terminate: the end of the connection is the answer.
    Terminating,
    /// The server said ReadyForQuery.
    Ended,
}

struct Worker {
    socket: Socket,
    /// Read, and not yet a whole message.
    unread: BytesMut,
    /// `unread` has grown for a message that needed more than a read.
    oversized: bool,
    /// Reports that the socket has not taken yet.
    unsent: BytesMut,
    flushed: bool,
    /// Messages of the read at hand.
    items: Vec<WalItem>,
    feedback: Feedback,
    clock: ServerClock,
    queue: Arc<Queue>,
    confirmations: watch::Receiver<Lsn>,
    stop: CancellationToken,
    phase: Phase,
}

impl Worker {
    async fn run(mut self) -> Result<(), Failure> {
        let ending = self.stream().await;
        self.queue.push(&mut self.items);
        self.queue.close(match &ending {
            Ok(()) => Failure::new(Kind::SourceUnreachable, "the stream was stopped"),
            Err(failure) => failure.clone(),
        });
        ending
    }

    async fn stream(&mut self) -> Result<(), Failure> {
        // The first messages may have come together with the answer to START_REPLICATION.
        self.absorb()?;
        while self.phase != Phase::Ended {
            let now = Instant::now();
            if matches!(self.phase, Phase::Ending(patience) if patience <= now) {
                frontend::terminate(&mut self.unsent);
                self.phase = Phase::Terminating;
            }
            let reading = self.phase != Phase::Streaming || !self.queue.is_full();
            self.feedback.pause(now, !reading);
            if self.phase == Phase::Streaming && self.feedback.due(now) <= now {
                self.report(now);
            }
            let dead_at = self.feedback.dead_at();
            let mut wake = dead_at.unwrap_or(now + Duration::from_secs(3600));
            match self.phase {
                Phase::Streaming => wake = wake.min(self.feedback.due(now)),
                Phase::Ending(patience) => wake = wake.min(patience),
                Phase::Terminating | Phase::Ended => {}
            }

            // In order of urgency. The socket comes before the clock: a server is silent only if
            // there is nothing to read. Reports wait for neither: they were looked at above.
            tokio::select! {
                biased;
                () = self.stop.cancelled(), if self.phase == Phase::Streaming => {
                    self.feedback.confirm(*self.confirmations.borrow_and_update());
                    self.say_goodbye();
                }
                Ok(()) = self.confirmations.changed(), if self.phase == Phase::Streaming => {
                    self.feedback.confirm(*self.confirmations.borrow_and_update());
                }
                read = transfer(
                    &mut self.socket, &mut self.unread, &mut self.unsent, &mut self.flushed, reading
                ) => {
                    match read {
                        // It read everything up to Terminate.
                        Ok(0) if self.phase == Phase::Terminating => return Ok(()),
                        Ok(0) => return Err(broken(&io::ErrorKind::UnexpectedEof.into())),
                        Ok(_) => self.absorb()?,
                        Err(error) => return Err(broken(&error)),
                    }
                }
                () = self.queue.emptied(), if !reading => {}
                () = sleep_until(wake) => {
                    if dead_at.is_some_and(|at| at <= Instant::now()) {
                        return Err(Failure::new(
                            Kind::SourceSilent,
                            format!("nothing came from the server for {:?}", self.feedback.silence()),
                        ));
                    }
                }
            }
        }
        // Only politeness: what is confirmed has arrived.
        frontend::terminate(&mut self.unsent);
        self.socket.write_all(&self.unsent).await.and(Ok(())).or(Ok(()))
    }

    fn report(&mut self, now: Instant) {
        self.feedback.report(now).encode(self.clock.now(now), &mut self.unsent);
    }

    /// Last report, then CopyDone: the server handles them in this order.
    fn say_goodbye(&mut self) {
        let now = Instant::now();
        self.report(now);
        frontend::copy_done(&mut self.unsent);
        self.phase = Phase::Ending(now + ENDING_PATIENCE);
    }

    /// Every whole message that was read.
    fn absorb(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        self.feedback.heard(now);
        let (whole, missing) = whole_messages(&self.unread)?;
        let block = self.unread.split_to(whole).freeze();
        let mut at = 0;
        let mut verdict = Ok(());
        while let (Ok(()), Some((tag, total))) = (&verdict, header(&block, at)) {
            verdict = self.message(now, tag, block.slice(at + 5..at + total));
            at += total;
        }
        self.make_room(missing);
        self.queue.push(&mut self.items);
        verdict
    }

    /// Room for the next read, and for the whole of a message that has begun. Gives the memory of
    /// a large one back afterwards.
    fn make_room(&mut self, missing: usize) {
        if self.oversized && missing <= READ_BYTES {
            let mut fresh = BytesMut::with_capacity(READ_BYTES.max(missing));
            fresh.put_slice(&self.unread);
            self.unread = fresh;
            self.oversized = false;
        }
        self.oversized |= missing > READ_BYTES;
        let room = self.unread.capacity() - self.unread.len();
        if room < missing || room < READ_BYTES / 4 {
            self.unread.reserve(missing.max(READ_BYTES));
        }
    }

    fn message(&mut self, now: Instant, tag: u8, body: Bytes) -> Result<(), Failure> {
        match (tag, self.phase) {
            (b'd', Phase::Streaming) => self.copy_data(now, body),
            (b'd' | b'c' | b'C', _) if self.phase != Phase::Streaming => Ok(()),
            (b'Z', Phase::Ending(_) | Phase::Terminating) => {
                self.phase = Phase::Ended;
                Ok(())
            }
            (b'c' | b'C', _) => {
                Err(Failure::new(Kind::SourceShutdown, "the server ended the stream"))
            }
            (b'E', _) => Err(failure_of_response(&body)),
            (b'N', _) => failure_of_notice(&body).map_or(Ok(()), Err),
            (b'S' | b'A', _) => Ok(()),
            (tag, _) => Err(unexpected(tag, "in the stream")),
        }
    }

    fn copy_data(&mut self, now: Instant, body: Bytes) -> Result<(), Failure> {
        let message = parse_copy_data(body)
            .map_err(|error| Failure::new(Kind::Undecodable, format!("stream: {error}")))?;
        match message {
            ReplicationCopyData::XLogData { wal_start, wal_end, data, .. } => {
                let (wal_start, wal_end) = (Lsn(wal_start.0), Lsn(wal_end.0));
                self.feedback.data(wal_end);
                self.items.push(WalItem::Data { wal_start, wal_end, payload: data });
            }
            ReplicationCopyData::KeepAlive { wal_end, reply_requested, .. } => {
                let wal_end = Lsn(wal_end.0);
                // One right behind another replaces it: a hasty server can't fill the queue.
                match self.items.last_mut() {
                    Some(WalItem::Keepalive { wal_end: last }) => *last = wal_end,
                    _ => self.items.push(WalItem::Keepalive { wal_end }),
                }
                self.feedback.keepalive(now, wal_end, reply_requested)?;
            }
        }
        Ok(())
    }
}

/// Tag and whole length of the message that starts at `at`, if its header is there.
fn header(bytes: &[u8], at: usize) -> Option<(u8, usize)> {
    let (&[tag, a, b, c, d], _) = bytes.get(at..)?.split_first_chunk::<5>()?;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
    Some((tag, length.saturating_add(1)))
}

/// How many bytes are whole messages, and how many are missing for the one that has begun.
fn whole_messages(bytes: &[u8]) -> Result<(usize, usize), Failure> {
    let mut whole = 0;
    while let Some((_, total)) = header(bytes, whole) {
        if !(5..=MAX_MESSAGE_SIZE).contains(&total) {
            let detail = format!("a message of impossible length {total}");
            return Err(Failure::new(Kind::SourceUnreachable, detail));
        }
        if bytes.len() - whole < total {
            return Ok((whole, total - (bytes.len() - whole)));
        }
        whole += total;
    }
    Ok((whole, 0))
}

/// Moves bytes both ways: sends what is unsent and, when asked, reads once. Resolves with the number
/// of bytes read, 0 at the end. Cancel-safe.
async fn transfer(
    socket: &mut Socket,
    unread: &mut BytesMut,
    unsent: &mut BytesMut,
    flushed: &mut bool,
    reading: bool,
) -> io::Result<usize> {
    poll_fn(|cx| {
        if let Poll::Ready(Err(error)) = poll_send(socket, unsent, flushed, cx) {
            // The server's last words may still be there to be read.
            if !reading {
                return Poll::Ready(Err(error));
            }
            unsent.clear();
            *flushed = true;
        }
        if !reading {
            return Poll::Pending;
        }
        pin!(socket.read_buf(unread)).poll(cx)
    })
    .await
}

fn poll_send(
    socket: &mut Socket,
    unsent: &mut BytesMut,
    flushed: &mut bool,
    cx: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    while !unsent.is_empty() {
        let sent = ready!(Pin::new(&mut *socket).poll_write(cx, unsent))?;
        if sent == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        unsent.advance(sent);
        *flushed = false;
    }
    if !*flushed {
        ready!(Pin::new(socket).poll_flush(cx))?;
        *flushed = true;
    }
    Poll::Ready(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pgwire_replication::protocol::framing::MessageReader;
    use proptest::prelude::*;

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![tag];
        bytes.extend_from_slice(&u32::try_from(body.len() + 4).unwrap().to_be_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    /// What `absorb` makes of the bytes when they come in pieces of these sizes.
    fn in_pieces(bytes: &[u8], sizes: &[usize]) -> Vec<(u8, Bytes)> {
        let (mut unread, mut found, mut rest) = (BytesMut::new(), Vec::new(), bytes);
        for size in sizes.iter().copied().cycle() {
            let (piece, later) = rest.split_at(size.min(rest.len()));
            rest = later;
            unread.extend_from_slice(piece);
            let (whole, missing) = whole_messages(&unread).unwrap();
            assert!(rest.is_empty() || missing <= bytes.len());
            let block = unread.split_to(whole).freeze();
            let mut at = 0;
            while let Some((tag, total)) = header(&block, at) {
                found.push((tag, block.slice(at + 5..at + total)));
                at += total;
            }
            if rest.is_empty() {
                break;
            }
        }
        assert!(unread.is_empty());
        found
    }

    proptest! {
        /// The protocol crate's own reader is the oracle.
        #[test]
        fn messages_come_apart_as_the_protocol_crate_reads_them(
            bodies in prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..40)), 0..20),
            sizes in prop::collection::vec(1_usize..30, 1..10),
        ) {
            let bytes: Vec<u8> =
                bodies.iter().flat_map(|(tag, body)| message(*tag, body)).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let expected = runtime.block_on(async {
                let (mut reader, mut source) = (MessageReader::new(), bytes.as_slice());
                let mut expected = Vec::new();
                while !source.is_empty() {
                    let message = reader.read(&mut source).await.unwrap();
                    expected.push((message.tag, message.payload));
                }
                expected
            });
            prop_assert_eq!(in_pieces(&bytes, &sizes), expected);
        }

        #[test]
        fn any_bytes_are_messages_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok((whole, _)) = whole_messages(&bytes) {
                prop_assert!(whole <= bytes.len());
            }
        }
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for length in [0_u32, 3, u32::MAX] {
            let mut bytes = vec![b'd'];
            bytes.extend_from_slice(&length.to_be_bytes());
            assert!(whole_messages(&bytes).is_err(), "{length}");
        }
    }
}
