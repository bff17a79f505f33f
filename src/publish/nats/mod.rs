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
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::connect::ServerFacts;
use crate::config::DestinationConfig;
use crate::error::Failure;
pub(super) use wire::Delivery;

/// Bytes that may wait for the socket's task: whoever has more to say lets it run first, so that
/// the server works while the next ones are encoded.
const UNSENT_MAX: usize = 64 << 10;
/// The subscription that every request's answer comes on: one for the connection, and below its
/// inbox one word per request.
const REQUESTS: u64 = 1;

/// What a connection is asked for.
struct State {
    /// Written by senders, taken whole by the task.
    unsent: Vec<u8>,
    subscriptions: Vec<(u64, mpsc::UnboundedSender<Delivery>)>,
    last_sid: u64,
    /// Requests without an answer yet.
    requests: Vec<(u64, oneshot::Sender<Delivery>)>,
    last_request: u64,
    /// What is on its way is not wanted any more, either.
    given_up: bool,
    ended: bool,
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

impl State {
    /// A request's word, and its answer to come. `None`: the connection has ended.
    fn expect_answer(&mut self) -> Option<(u64, oneshot::Receiver<Delivery>)> {
        if self.ended {
            return None;
        }
        let (sender, answer) = oneshot::channel();
        self.last_request += 1;
        self.requests.retain(|(_, sender)| !sender.is_closed());
        self.requests.push((self.last_request, sender));
        Some((self.last_request, answer))
    }

    /// Hands a message to whoever waits for it; without effect when that was given up.
    fn deliver(&mut self, sid: u64, delivery: Delivery) {
        if sid == REQUESTS {
            let token = delivery.subject().rsplit('.').next().and_then(|word| word.parse().ok());
            let at = self.requests.iter().position(|(own, _)| Some(*own) == token);
            if let Some(at) = at {
                self.requests.swap_remove(at).1.send(delivery).unwrap_or_default();
            }
        } else if let Some((_, to)) = self.subscriptions.iter().find(|(own, _)| *own == sid) {
            to.send(delivery).unwrap_or_default();
        }
    }

    /// Nothing comes any more.
    fn end(&mut self) {
        self.ended = true;
        self.subscriptions.clear();
        self.requests.clear();
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

/// Handle of an open connection. Dropping it closes it: what is unsent stays so, since a message that
/// nobody waits for may come behind its successors; what the socket has taken still arrives.
pub(super) struct Connection {
    shared: Arc<Shared>,
    inbox: String,
    close: CancellationToken,
}

impl Connection {
    /// Connects and logs in. `events` hears what the server says from then on.
    pub(super) async fn open(
        config: &DestinationConfig,
        server: &str,
        events: impl FnMut(Event) + Send + 'static,
    ) -> Result<Connection, Failure> {
        let opened = handshake::open(config, server).await?;
        let prefix = config.inbox_prefix.as_deref().unwrap_or("_INBOX");
        let inbox = format!("{prefix}.{}", uuid::Uuid::new_v4().simple());
        let mut unsent = Vec::new();
        wire::subscribe(&mut unsent, &format!("{inbox}.{REQUESTS}.*"), REQUESTS);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                unsent,
                subscriptions: Vec::new(),
                last_sid: REQUESTS,
                requests: Vec::new(),
                last_request: 0,
                given_up: false,
                ended: false,
                facts: opened.facts,
            }),
            wake: Notify::new(),
            taken: Notify::new(),
        });
        let close = CancellationToken::new();
        let worker = worker::Worker {
            socket: opened.socket,
            unread: opened.unread,
            sending: worker::Sending::default(),
            last_words: None,
            shared: Arc::clone(&shared),
            close: close.clone(),
            events: Box::new(events),
        };
        tokio::spawn(worker.run());
        Ok(Connection { shared, inbox, close })
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
        let waits = |state: &State| state.unsent.len() >= UNSENT_MAX && !state.ended;
        while waits(&self.shared.lock()) {
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

    /// Closes the connection together with what the socket has taken and not delivered, as far as
    /// that can be: the answers were given up, and a message must not be stored after the stream was
    /// read back.
    pub(super) fn give_up(&self) {
        self.shared.lock().given_up = true;
        self.close.cancel();
    }

    /// Publishes a message and waits for its one answer. `None`: the connection has ended.
    /// Cancel-safe: a request that is given up hears nothing any more.
    pub(super) async fn request(&self, subject: &str, payload: &[u8]) -> Option<Delivery> {
        let (token, answer) = self.shared.lock().expect_answer()?;
        self.publish(subject, &format!("{}.{REQUESTS}.{token}", self.inbox), "", payload);
        answer.await.ok()
    }

    /// An inbox of its own, and what comes below it.
    pub(super) fn open_inbox(&self) -> (String, Subscriber) {
        let (sender, deliveries) = mpsc::unbounded_channel();
        let mut state = self.shared.lock();
        state.last_sid += 1;
        let sid = state.last_sid;
        if !state.ended {
            state.subscriptions.push((sid, sender));
        }
        drop(state);
        let inbox = format!("{}.{sid}", self.inbox);
        self.write(|unsent| wire::subscribe(unsent, &format!("{inbox}.>"), sid));
        (inbox, Subscriber { shared: Arc::clone(&self.shared), sid, deliveries })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close.cancel();
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

#[cfg(test)]
mod tests;
