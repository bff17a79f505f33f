//! Replay: publishes retained events once more, beside the relay. Joins what is there already: rows of
//! the table in the order of a plan ([`crate::store::replay`]), the core, which keeps the order of
//! runs and knows what to do after an unknown outcome, and a publisher. In place of receipts the
//! core's records go to `outbox.replay`. Decides nothing about order.
//!
//! Why no copy after a kill: the core records a floor before the first message leaves; with every
//! step the numbers that are done and the floor go into one row, durably; and whoever goes on reads
//! the stream from that floor to its end for messages with this job's header before it sends any.

mod feed;
mod pace;
mod pump;

pub use pace::Rate;
pub use pump::{End, Progress, Replayer};
