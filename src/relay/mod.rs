//! The core: what is read, what may be sent, what is decided, what may be confirmed. Pure: time
//! comes in as an argument, nothing here waits, logs or touches a socket.
//!
//! Reading order: [`machine`] (inputs and actions), [`destination`] (the procedure after an unknown
//! outcome), [`lanes`] (order), [`attempts`] (the floor), [`receipts`], [`watermark`] (what may be
//! confirmed); then `hand_over`, [`waiting`] and [`slow`] (what does not go straight from WAL to
//! lane), and [`again`] (dead letters).

pub mod again;
pub mod attempts;
pub mod awaited;
pub mod backoff;
mod caution;
pub mod destination;
mod hand_over;
pub mod lanes;
pub mod late;
pub mod machine;
pub mod outcome;
pub mod ranges;
pub mod receipts;
pub mod route;
pub mod slow;
pub mod standing;
pub mod waiting;
pub mod watermark;

pub use machine::{Action, Input, Limits, Relay};
