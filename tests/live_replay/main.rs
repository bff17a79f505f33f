//! `outboxd replay` on real servers: streams that are purged or made anew get back what the ledger says
//! they had, in the order of runs, once; whatever is killed meanwhile.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

#[path = "../support/mod.rs"]
mod support;

mod beside;
mod consumer;
mod jobs;
mod loss;
mod place;
mod trace;
