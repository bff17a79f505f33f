//! JetStream out: one task per destination that keeps a connection, chooses a pipeline, sends what
//! the core hands it in that order, and answers every attempt exactly once. Knows no PostgreSQL and
//! decides nothing about order: after anything but a plain success it stops and reports.

mod ack;
pub mod anchors;
mod batch;
mod connect;
mod facts;
mod in_flight;
mod intruders;
mod login;
pub mod look;
mod nats;
mod outcome;
mod pipe;
pub mod recovery;
pub mod rehearsal;
mod resume;
mod sequence;
mod session;
pub mod streams;
mod task;
mod telling;

pub use login::provide_tls;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use intruders::Intruders;
use task::Task;

use crate::config::DestinationConfig;
use crate::error::Failure;
use crate::message::{Envelope, Message};
use crate::relay::outcome::{Answer, Attempt, DestinationId, ReadFrom, Resumed, StreamFacts};

/// One try to publish one event.
#[derive(Debug)]
pub struct Shipment {
    /// Number of the try.
    pub attempt: Attempt,
    /// What to publish.
    pub message: Message,
}

/// What the core tells a publisher.
#[derive(Debug)]
pub enum Order {
    /// Send these behind whatever was shipped before, in this order; attempts ascend.
    Ship(Vec<Shipment>),
    /// Read what of ours the stream holds above the floor.
    Resume(ReadFrom),
}

/// What a publisher tells the core.
#[derive(Debug)]
pub enum Report {
    /// Connected; nothing is in flight, and nothing is sent before a Resume. After an earlier `Up`
    /// without `Down`: the stream's configuration changed, and everything shipped was answered.
    Up(StreamFacts),
    /// Not connected, or connected and unable to publish; reported once per change.
    Down(Failure),
    /// Connected, and the user may not publish a message's subject. Its answer comes by itself.
    Forbidden(Failure),
    /// What became of attempts, in their order, except where single publishes are answered out of
    /// order. After an unknown outcome, and in `batch` and `sequence` after a refusal, what is shipped
    /// and not yet sent is `NotSent` until a Resume succeeds: the core may have shipped more before it
    /// hears of it.
    Answers(Vec<Answer>),
    /// Answer to [`Order::Resume`], exactly one each.
    Resumed(Result<Resumed, Failure>),
}

/// Handle of a destination's task.
#[derive(Debug, Clone)]
pub struct Publisher {
    orders: mpsc::UnboundedSender<Order>,
}

impl Publisher {
    /// Starts the task; it ends when `stop` is cancelled or the handle is dropped.
    pub fn spawn(
        id: DestinationId,
        config: DestinationConfig,
        envelope: Envelope,
        reports: mpsc::UnboundedSender<(DestinationId, Report)>,
        stop: CancellationToken,
        tasks: &TaskTracker,
    ) -> Publisher {
        let (sender, orders) = mpsc::unbounded_channel();
        let intruders = Intruders::default();
        let task = Task { id, config, envelope, reports, orders, stop, intruders };
        tasks.spawn(task.run());
        Publisher { orders: sender }
    }

    /// Hands an order over; never blocks. Without effect when the task has ended.
    pub fn order(&self, order: Order) {
        self.orders.send(order).unwrap_or_default();
    }
}
