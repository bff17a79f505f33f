//! O1 to O4 when the primary is lost: the standby is promoted under load, with and without a copy of
//! the relay's slot, and the relay follows by its list of hosts.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

mod check;
mod cut;
mod pair;
mod place;
mod promote;
mod servers;
#[path = "../support/mod.rs"]
mod support;
