//! The frames of pgoutput protocol 1, borrowed from the message. Owns their layout and knows
//! nothing of the outbox: which rows matter is decided above.

use super::cursor::{Broken, Cursor};
use crate::event::UnixMicros;
use crate::lsn::Lsn;

/// PostgreSQL counts microseconds from 2000-01-01 UTC.
pub(super) const POSTGRES_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// One frame. Rows that are updated or deleted aren't read: an outbox only grows.
#[derive(Debug)]
pub(super) enum Frame<'a> {
    Begin { commit_lsn: Lsn, committed_at: UnixMicros, xid: u32 },
    Commit { commit_lsn: Lsn, end_lsn: Lsn },
    Origin,
    Relation(RelationFrame<'a>),
    Type { oid: u32, namespace: &'a [u8], name: &'a [u8] },
    Insert { oid: u32, tuple: Tuple<'a> },
    Update { oid: u32 },
    Delete { oid: u32 },
    Truncate { oids: Oids<'a> },
    Message { transactional: bool, lsn: Lsn, prefix: &'a [u8], content: &'a [u8] },
}

/// A relation as the server describes it before its first row and after each change.
#[derive(Debug)]
pub(super) struct RelationFrame<'a> {
    pub(super) oid: u32,
    pub(super) namespace: &'a [u8],
    pub(super) name: &'a [u8],
    pub(super) columns: Vec<ColumnFrame<'a>>,
}

/// One column of a [`RelationFrame`].
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnFrame<'a> {
    pub(super) name: &'a [u8],
    pub(super) type_oid: u32,
}

/// What [`Frame::parse`] can't read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameError {
    /// A message of no bytes.
    Empty,
    /// A frame that protocol 1 doesn't have.
    Unknown,
    /// A known frame whose fields don't fit.
    Broken(Broken),
}

impl From<Broken> for FrameError {
    fn from(broken: Broken) -> Self {
        FrameError::Broken(broken)
    }
}

impl<'a> Frame<'a> {
    /// Reads one message. Rows are left unread, all other frames must be complete.
    pub(super) fn parse(data: &'a [u8]) -> Result<Frame<'a>, FrameError> {
        let Some((byte, body)) = data.split_first() else { return Err(FrameError::Empty) };
        let mut body = Cursor::new(body);
        let frame = match byte {
            b'I' => return Ok(insert(body)?),
            b'U' => return Ok(Frame::Update { oid: body.u32("relation OID")? }),
            b'D' => return Ok(Frame::Delete { oid: body.u32("relation OID")? }),
            b'B' => begin(&mut body)?,
            b'C' => commit(&mut body)?,
            b'O' => {
                body.u64("origin LSN")?;
                body.string("origin name")?;
                Frame::Origin
            }
            b'R' => Frame::Relation(relation(&mut body)?),
            b'Y' => Frame::Type {
                oid: body.u32("type OID")?,
                namespace: body.string("type namespace")?,
                name: body.string("type name")?,
            },
            b'T' => truncate(&mut body)?,
            b'M' => message(&mut body)?,
            _ => return Err(FrameError::Unknown),
        };
        body.finish()?;
        Ok(frame)
    }
}

fn begin<'a>(body: &mut Cursor<'a>) -> Result<Frame<'a>, Broken> {
    let commit_lsn = Lsn(body.u64("commit LSN")?);
    let since_2000 = body.i64("commit time")?;
    let committed_at = since_2000
        .checked_add(POSTGRES_EPOCH_MICROS)
        .map(UnixMicros)
        .ok_or(Broken::Value { field: "commit time", found: since_2000 })?;
    Ok(Frame::Begin { commit_lsn, committed_at, xid: body.u32("transaction id")? })
}

fn commit<'a>(body: &mut Cursor<'a>) -> Result<Frame<'a>, Broken> {
    body.u8("commit flags")?;
    let commit_lsn = Lsn(body.u64("commit LSN")?);
    let end_lsn = Lsn(body.u64("end LSN")?);
    body.i64("commit time")?;
    Ok(Frame::Commit { commit_lsn, end_lsn })
}

fn relation<'a>(body: &mut Cursor<'a>) -> Result<RelationFrame<'a>, Broken> {
    let oid = body.u32("relation OID")?;
    let namespace = body.string("relation namespace")?;
    let name = body.string("relation name")?;
    body.u8("replica identity")?;
    let count = body.count16("column count")?;
    // Grows as columns are read: the count alone allocates nothing.
    let mut columns = Vec::new();
    for _ in 0..count {
        body.u8("column flags")?;
        let name = body.string("column name")?;
        let type_oid = body.u32("column type OID")?;
        body.u32("column type modifier")?;
        columns.push(ColumnFrame { name, type_oid });
    }
    Ok(RelationFrame { oid, namespace, name, columns })
}

fn insert(mut body: Cursor<'_>) -> Result<Frame<'_>, Broken> {
    let oid = body.u32("relation OID")?;
    match body.u8("tuple kind")? {
        b'N' => Ok(Frame::Insert { oid, tuple: Tuple(body) }),
        other => Err(Broken::Value { field: "tuple kind", found: i64::from(other) }),
    }
}

fn truncate<'a>(body: &mut Cursor<'a>) -> Result<Frame<'a>, Broken> {
    let count = body.count32("relation count")?;
    body.u8("truncate options")?;
    let oids = body.take(count.saturating_mul(4), "relation OIDs")?;
    Ok(Frame::Truncate { oids: Oids(oids) })
}

fn message<'a>(body: &mut Cursor<'a>) -> Result<Frame<'a>, Broken> {
    let transactional = body.u8("message flags")? & 1 != 0;
    let lsn = Lsn(body.u64("message LSN")?);
    let prefix = body.string("message prefix")?;
    let len = body.count32("message length")?;
    let content = body.take(len, "message content")?;
    Ok(Frame::Message { transactional, lsn, prefix, content })
}

/// The relations of a Truncate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Oids<'a>(&'a [u8]);

impl Oids<'_> {
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.as_chunks::<4>().0.iter().map(|oid| u32::from_be_bytes(*oid))
    }
}

/// A column's value as sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Value<'a> {
    /// SQL NULL, and a column that the relation doesn't have.
    #[default]
    Null,
    /// The type's text form.
    Text(&'a [u8]),
    /// The type's binary form.
    Binary(&'a [u8]),
}

/// An inserted row, unread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tuple<'a>(Cursor<'a>);

impl<'a> Tuple<'a> {
    /// Gives `each` every value in column order and checks that the row has `columns` of them and
    /// nothing else.
    pub(super) fn read(
        self,
        columns: usize,
        mut each: impl FnMut(usize, Value<'a>),
    ) -> Result<(), Broken> {
        let Tuple(mut body) = self;
        let count = usize::from(body.count16("column count")?);
        if count != columns {
            let found = i64::try_from(count).unwrap_or(i64::MAX);
            return Err(Broken::Value { field: "column count (the relation has another)", found });
        }
        for index in 0..count {
            let value = match body.u8("value kind")? {
                b'n' => Value::Null,
                b't' => Value::Text(sized(&mut body)?),
                b'b' => Value::Binary(sized(&mut body)?),
                // 'u', an unchanged TOAST value, has no place in a new row.
                other => {
                    return Err(Broken::Value { field: "value kind", found: i64::from(other) });
                }
            };
            each(index, value);
        }
        body.finish()
    }
}

fn sized<'a>(body: &mut Cursor<'a>) -> Result<&'a [u8], Broken> {
    let len = body.count32("value length")?;
    body.take(len, "value")
}
