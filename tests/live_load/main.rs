//! The main path under load, on real servers: order without faults, kills of the relay, and memory.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod crash;
mod memory;
mod order;
#[path = "../support/mod.rs"]
mod support;
