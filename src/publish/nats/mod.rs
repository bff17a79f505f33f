//! A connection to NATS of our own. It is used until it breaks and never comes back: a client that
//! reconnects by itself drops what was written and sends what was queued, which is a gap followed
//! by later messages.
//!
//! Messages are written once, where they are encoded, into the buffer that goes to the socket; a
//! task takes that buffer whole and hands out what comes in. So there is no queue of messages, a
//! message costs two copies of its bytes, and one that is alone leaves at once.
//!
//! In reading order: `wire` (the protocol as bytes), `handshake` (to an open connection), `worker`
//! (the task that moves bytes).

mod handshake;
#[cfg(test)]
pub(super) mod peer;
mod wire;
mod worker;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::connect::ServerFacts;
use crate::config::DestinationConfig;
use crate::error::Failure;
pub(super) use wire::Delivery;

/// Bytes that may wait for the socket's task: whoever has more to say lets it run first, so that
/// the server works while the next ones are encoded.
const UNSENT_MAX: usize = 64 << 10;

/// What a connection is asked for.
struct State {
    /// Written by senders, taken whole by the task.
    unsent: Vec<u8>,
    subscriptions: Vec<(u64, mpsc::UnboundedSender<Delivery>)>,
    last_sid: u64,
    facts: ServerFacts,
}

struct Shared {
    state: Mutex<State>,
    /// There is something to send.
    wake: Notify,
    /// The task took what there was, or has ended.
    taken: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the server says, or its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// A complaint in its words.
    Complaint(String),
    /// The connection is over, and why.
    Ended(Cause),
}

/// Why a connection is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// The server's last words before it closed it.
    Said(String),
    /// What was seen on this side.
    Seen(String),
    /// Nobody wants it any more.
    Unwanted,
}

impl From<String> for Cause {
    fn from(seen: String) -> Cause {
        Cause::Seen(seen)
    }
}

/// Handle of an open connection; dropping it closes it at once, with whatever is still unsent.
pub(super) struct Connection {
    shared: Arc<Shared>,
    inbox: String,
    ended: watch::Receiver<bool>,
    _close: DropGuard,
}

impl Connection {
    /// Connects and logs in. `events` hears what the server says from then on.
    pub(super) async fn open(
        config: &DestinationConfig,
        server: &str,
        events: impl FnMut(Event) + Send + 'static,
    ) -> Result<Connection, Failure> {
        let opened = handshake::open(config, server).await?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                unsent: Vec::new(),
                subscriptions: Vec::new(),
                last_sid: 0,
                facts: opened.facts,
            }),
            wake: Notify::new(),
            taken: Notify::new(),
        });
        let close = CancellationToken::new();
        let (ended_in, ended) = watch::channel(false);
        let worker = worker::Worker {
            socket: opened.socket,
            unread: opened.unread,
            sending: worker::Sending::default(),
            last_words: None,
            shared: Arc::clone(&shared),
            close: close.clone(),
            events: Box::new(events),
            ended: ended_in,
        };
        tokio::spawn(worker.run());
        let prefix = config.inbox_prefix.as_deref().unwrap_or("_INBOX");
        let inbox = format!("{prefix}.{}", uuid::Uuid::new_v4().simple());
        Ok(Connection { shared, inbox, ended, _close: close.drop_guard() })
    }

    /// What the server said about itself last.
    pub(super) fn facts(&self) -> ServerFacts {
        self.shared.lock().facts.clone()
    }

    /// Is there room for a message now?
    pub(super) fn has_room(&self) -> bool {
        self.shared.lock().unsent.len() < UNSENT_MAX
    }

    /// Waits for room, or for the end of the connection.
    pub(super) async fn room(&self) {
        while !self.has_room() && !*self.ended.borrow() {
            self.shared.taken.notified().await;
        }
    }

    /// Writes a message, room or not; `head` is a whole header block or empty. Without effect when
    /// the connection has ended.
    pub(super) fn publish(&self, subject: &str, reply: &str, head: &str, payload: &[u8]) {
        self.write(|unsent| wire::publish(unsent, subject, reply, head, payload));
    }

    fn write(&self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.shared.lock();
        let idle = state.unsent.is_empty();
        write(&mut state.unsent);
        drop(state);
        if idle {
            self.shared.wake.notify_one();
        }
    }

    /// An inbox of its own, and what comes below it.
    pub(super) fn open_inbox(&self) -> (String, Subscriber) {
        let (sender, deliveries) = mpsc::unbounded_channel();
        let mut state = self.shared.lock();
        state.last_sid += 1;
        let sid = state.last_sid;
        state.subscriptions.push((sid, sender));
        drop(state);
        let inbox = format!("{}.{sid}", self.inbox);
        self.write(|unsent| wire::subscribe(unsent, &format!("{inbox}.>"), sid));
        (inbox, Subscriber { shared: Arc::clone(&self.shared), sid, deliveries })
    }
}

/// What comes in below an inbox; ends with the connection.
pub(super) struct Subscriber {
    shared: Arc<Shared>,
    sid: u64,
    deliveries: mpsc::UnboundedReceiver<Delivery>,
}

impl Subscriber {
    /// The next message. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Delivery> {
        self.deliveries.recv().await
    }

    /// The next message if it is there.
    pub(super) fn ready(&mut self) -> Option<Delivery> {
        self.deliveries.try_recv().ok()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.subscriptions.retain(|(sid, _)| *sid != self.sid);
        wire::unsubscribe(&mut state.unsent, self.sid);
        drop(state);
        self.shared.wake.notify_one();
    }
}
