//! JetStream out: one task per destination that keeps a connection, chooses a pipeline, sends what
//! the core hands it in that order, and answers every attempt exactly once. Knows no PostgreSQL and
//! decides nothing about order: after anything but a plain success it stops and reports.

mod ack;
mod batch;
mod outcome;
mod per_run;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::DestinationConfig;
use crate::error::Failure;
use crate::message::{Envelope, Message};
use crate::relay::outcome::{Answer, Attempt, DestinationId, Floor, Resumed, StreamFacts};

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
    Resume {
        /// Where to start.
        floor: Floor,
    },
    /// Forget everything queued and in flight; none of it is answered any more.
    Reset,
}

/// What a publisher tells the core.
#[derive(Debug)]
pub enum Report {
    /// Connected; nothing is in flight. After an earlier `Up` without `Down`: facts have changed.
    Up(StreamFacts),
    /// Not connected, or connected and unable to publish; reported once per change.
    Down(Failure),
    /// What became of attempts.
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
        let (orders, receiver) = mpsc::unbounded_channel();
        tasks.spawn(async move {
            drop((id, config, envelope, reports, stop, receiver));
        });
        Publisher { orders }
    }

    /// Hands an order over; never blocks. Without effect when the task has ended.
    pub fn order(&self, order: Order) {
        drop(self.orders.send(order));
    }
}
