//! The replication connection before and at the start of the stream: its statements and
//! START_REPLICATION.

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use std::time::Duration;
use tokio::time::{Instant, timeout};

use super::identity::{FACTS, Facts};
use super::login::Session;
use super::stream::WalStream;
use super::wire::{Wire, unexpected};
use crate::error::{Failure, Kind};

/// Default bound of what is read ahead. While the consumer works on one chunk of at most this size
/// the next is read: twice as much is held at most, plus one message of any size.
pub const QUEUE_BYTES: usize = 2 << 20;

/// A connection that can stream.
#[derive(Debug)]
pub struct Replication {
    wire: Wire,
    facts: Facts,
    deadline: Duration,
    queue_bytes: usize,
}

impl Replication {
    pub(super) async fn open(session: Session, deadline: Duration) -> Result<Replication, Failure> {
        let mut wire = session.wire;
        let identified = wire.query("IDENTIFY_SYSTEM").await?;
        let rows = wire.query(FACTS).await?;
        let facts = Facts::read(rows.first().map_or(&[][..], Vec::as_slice), Instant::now())?;
        match identified.first().and_then(|row| row.first()) {
            Some(Some(system)) if *system == facts.identity.system_identifier => {}
            _ => {
                let detail = "IDENTIFY_SYSTEM and pg_control_system() differ";
                return Err(Failure::new(Kind::SourceUnreachable, detail));
            }
        }
        // A warning may be all that tells of a missing publication.
        wire.query("SET client_min_messages = warning").await?;
        if facts.identity.server_version >= 140_000 {
            // The stream starts only when the ledger is read: that may take long.
            wire.query("SET idle_session_timeout = 0").await?;
        }
        Ok(Replication { wire, facts, deadline, queue_bytes: QUEUE_BYTES })
    }

    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Bounds what is read ahead of the consumer.
    #[must_use]
    pub fn with_queue_bytes(self, queue_bytes: usize) -> Replication {
        Replication { queue_bytes, ..self }
    }

    /// Starts streaming where the slot stands. The server is told no position: it would silently
    /// go on from the slot's own if ours were lower, and silently skip if ours were higher.
    pub async fn start(mut self, slot: &str, publication: &str) -> Result<WalStream, Failure> {
        let command = start_command(slot, publication, self.facts.identity.server_version)?;
        match timeout(self.deadline, self.begin(&command)).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => return Err(in_start(failure, slot)),
            Err(_) => {
                let detail = format!("no answer to START_REPLICATION within {:?}", self.deadline);
                return Err(Failure::new(Kind::SourceSilent, detail));
            }
        }
        let Facts { wal_sender_timeout, clock, .. } = self.facts;
        Ok(WalStream::spawn(self.wire, clock, wal_sender_timeout, self.queue_bytes))
    }

    async fn begin(&mut self, command: &str) -> Result<(), Failure> {
        let mut out = BytesMut::new();
        frontend::query(command, &mut out)
            .map_err(|error| Failure::new(Kind::Internal, format!("START_REPLICATION: {error}")))?;
        self.wire.send(&out).await?;
        loop {
            match self.wire.message().await?.tag {
                // CopyBothResponse
                b'W' => return Ok(()),
                b'S' => {}
                tag => return Err(unexpected(tag, "in answer to START_REPLICATION")),
            }
        }
    }
}

/// An error to START_REPLICATION is about the slot when its code alone doesn't tell.
fn in_start(mut failure: Failure, slot: &str) -> Failure {
    // Another plugin than pgoutput refuses our options.
    if failure.kind == Kind::Database && failure.sqlstate.as_deref() == Some("22023") {
        failure.kind = Kind::SlotForeign;
    }
    failure.detail = format!("slot {slot}: {}", failure.detail);
    failure
}

fn start_command(slot: &str, publication: &str, version: u32) -> Result<String, Failure> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if slot.is_empty() || slot.len() > 63 || !slot.chars().all(plain) {
        let detail = "a slot's name has 1 to 63 lower-case letters, digits and underscores";
        return Err(Failure::new(Kind::SlotMissing, detail));
    }
    if publication.is_empty() || publication.contains('\0') {
        let detail = "the publication's name is empty or holds a NUL byte";
        return Err(Failure::new(Kind::PublicationMissing, detail));
    }
    // An identifier in a list that is an SQL string: quoted twice.
    let publication = publication.replace('"', "\"\"").replace('\'', "''");
    let newer = if version >= 140_000 { ", binary 'true', messages 'true'" } else { "" };
    Ok(format!(
        "START_REPLICATION SLOT \"{slot}\" LOGICAL 0/0 \
         (proto_version '1', publication_names '\"{publication}\"'{newer})"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_quoted() {
        assert_eq!(
            start_command("outboxd_a1", "my \"pub\" o'n", 180_000).as_deref(),
            Ok("START_REPLICATION SLOT \"outboxd_a1\" LOGICAL 0/0 (proto_version '1', \
                publication_names '\"my \"\"pub\"\" o''n\"', binary 'true', messages 'true')")
        );
        assert!(!start_command("s", "p", 130_000).unwrap().contains("binary"));
        for slot in ["", "A", "a-b", "a\"b", "ä", &"a".repeat(64)] {
            assert!(start_command(slot, "p", 180_000).is_err(), "{slot:?}");
        }
        assert!(start_command("s", "", 180_000).is_err());
    }
}
