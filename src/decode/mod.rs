//! Bytes to rows: pgoutput protocol 1 with checked reads. Owns the order of frames within a
//! connection; pure, and input never panics.
//!
//! One [`Decoder`] lives as long as one replication connection: the server describes each relation
//! before its first row on that connection and again after each change, and rows are mapped by the
//! column names of the description last seen, never by the live catalog.
//!
//! In reading order: `cursor` (checked reads), `frame` (layout of the frames), `relation` (columns
//! to roles), `value` (one column's value), `row` (a row to an event), `table` (the same for rows that
//! were read from the table), `quote` (foreign text in messages).

mod cursor;
mod frame;
mod quote;
mod relation;
mod row;
mod table;
mod value;

use bytes::Bytes;
use std::fmt;

use crate::config::{ColumnMap, QualifiedName};
use crate::event::{Event, UnixMicros};
use crate::lsn::{Lsn, Position};
pub use frame::Value;
use frame::{Frame, FrameError, Tuple};
use relation::{PerRole, Relations};
pub use table::{TableColumn, TablePlan};

/// What one frame means to the relay.
#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all are events; a box would be one more \
    allocation for each"
)]
pub enum Decoded {
    /// A committed transaction follows. Those without a change to published tables may be left out
    /// by the server.
    Begin {
        /// Start of its commit record.
        commit_lsn: Lsn,
        /// Commit time by the database's clock.
        committed_at: UnixMicros,
        /// Transaction id.
        xid: u32,
    },
    /// A row of the outbox. One that can't become a message has its `fault` set; if it's the id
    /// that can't be read, `id` is the empty text.
    Event(Event),
    /// The transaction is complete.
    Commit {
        /// As in its Begin.
        commit_lsn: Lsn,
        /// End of its commit record: where WAL goes on.
        end_lsn: Lsn,
    },
    /// A logical message (`pg_logical_emit_message`), by anyone in this database.
    Message {
        /// Came with its transaction; others arrive at once, also outside transactions and of
        /// transactions that are rolled back.
        transactional: bool,
        /// Position of the message.
        lsn: Lsn,
        /// Whose message it is.
        prefix: String,
        /// What it says.
        content: Bytes,
    },
    /// Tables were truncated.
    Truncate {
        /// The outbox is among them.
        of_outbox: bool,
    },
    /// Nothing to act on: other tables, updates, deletes, types, origins, relations.
    Other,
}

/// The stream can't be read on: going on could skip an event. The caller knows the LSN.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct DecodeError {
    /// First byte of the frame; `None` when the message was empty.
    pub byte: Option<u8>,
    /// What is wrong with it, printable and bounded.
    pub what: String,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.byte {
            Some(byte) if byte.is_ascii_graphic() => {
                write!(f, "pgoutput frame `{}` (0x{byte:02x}): {}", char::from(byte), self.what)
            }
            Some(byte) => write!(f, "pgoutput frame 0x{byte:02x}: {}", self.what),
            None => write!(f, "pgoutput: {}", self.what),
        }
    }
}

/// The transaction whose frames are arriving.
#[derive(Debug)]
struct Transaction {
    commit_lsn: Lsn,
    committed_at: UnixMicros,
    /// Index of the next outbox row.
    next_index: u32,
}

/// Decodes the frames of one replication connection. After an error it is of no use: the
/// connection must be given up.
#[derive(Debug)]
pub struct Decoder {
    relations: Relations,
    transaction: Option<Transaction>,
}

impl Decoder {
    /// For a new connection: nothing that an earlier one described is known.
    pub fn new(table: QualifiedName, columns: ColumnMap) -> Decoder {
        Decoder { relations: Relations::new(table, columns), transaction: None }
    }

    /// Decodes one message, the payload of an XLogData frame.
    pub fn decode(&mut self, data: &[u8]) -> Result<Decoded, DecodeError> {
        let byte = data.first().copied();
        let frame = Frame::parse(data).map_err(|error| match error {
            FrameError::Empty => "the message is empty".to_owned(),
            FrameError::Unknown => "protocol 1 has no such frame".to_owned(),
            FrameError::Broken(broken) => broken.to_string(),
        });
        frame.and_then(|frame| self.accept(frame)).map_err(|what| DecodeError { byte, what })
    }

    fn accept(&mut self, frame: Frame<'_>) -> Result<Decoded, String> {
        match frame {
            Frame::Begin { commit_lsn, committed_at, xid } => {
                self.begin(commit_lsn, committed_at)?;
                Ok(Decoded::Begin { commit_lsn, committed_at, xid })
            }
            Frame::Commit { commit_lsn, end_lsn } => {
                self.commit(commit_lsn)?;
                Ok(Decoded::Commit { commit_lsn, end_lsn })
            }
            Frame::Insert { oid, tuple } => self.insert(oid, tuple),
            Frame::Update { oid } | Frame::Delete { oid } => {
                self.inside()?;
                self.relations.get(oid)?;
                Ok(Decoded::Other)
            }
            Frame::Truncate { oids } => {
                self.inside()?;
                let mut of_outbox = false;
                for oid in oids.iter() {
                    of_outbox |= self.relations.get(oid)?.is_some();
                }
                Ok(Decoded::Truncate { of_outbox })
            }
            Frame::Message { transactional, lsn, prefix, content } => {
                if transactional {
                    self.inside()?;
                }
                Ok(Decoded::Message {
                    transactional,
                    lsn,
                    // Anyone may send messages: a prefix in another encoding is no reason to stop.
                    prefix: String::from_utf8_lossy(prefix).into_owned(),
                    content: Bytes::copy_from_slice(content),
                })
            }
            Frame::Relation(relation) => {
                self.relations.learn(&relation);
                Ok(Decoded::Other)
            }
            Frame::Type { oid, namespace, name } => {
                self.relations.learn_type(oid, namespace, name);
                Ok(Decoded::Other)
            }
            Frame::Origin => Ok(Decoded::Other),
        }
    }

    fn begin(&mut self, commit_lsn: Lsn, committed_at: UnixMicros) -> Result<(), String> {
        if let Some(open) = &self.transaction {
            return Err(format!("inside the transaction of commit {}", open.commit_lsn));
        }
        self.transaction = Some(Transaction { commit_lsn, committed_at, next_index: 0 });
        Ok(())
    }

    fn commit(&mut self, commit_lsn: Lsn) -> Result<(), String> {
        match self.transaction.take() {
            None => Err(outside()),
            Some(open) if open.commit_lsn != commit_lsn => {
                Err(format!("commit {commit_lsn} ends the transaction of {}", open.commit_lsn))
            }
            Some(_) => Ok(()),
        }
    }

    fn inside(&self) -> Result<(), String> {
        self.transaction.as_ref().map(|_| ()).ok_or_else(outside)
    }

    fn insert(&mut self, oid: u32, tuple: Tuple<'_>) -> Result<Decoded, String> {
        let open = self.transaction.as_mut().ok_or_else(outside)?;
        let Some(plan) = self.relations.get(oid)? else { return Ok(Decoded::Other) };

        let mut values: PerRole<Value<'_>> = PerRole::default();
        let mut roles = plan.roles.iter().peekable();
        tuple
            .read(plan.width, |index, value| {
                while let Some((_, role)) = roles.next_if(|(column, _)| *column == index) {
                    *values.get_mut(*role) = value;
                }
            })
            .map_err(|broken| broken.to_string())?;

        let position = Position { commit_lsn: open.commit_lsn, index: open.next_index };
        let event = row::event(plan, &values, Some(position), Some(open.committed_at))?;
        let next = open.next_index.checked_add(1);
        open.next_index = next.ok_or("the transaction has more rows than an index can count")?;
        Ok(Decoded::Event(event))
    }
}

fn outside() -> String {
    "outside a transaction".to_owned()
}
