//! Receipts beside a stream that lost its tail: which message each names, and how those are withdrawn
//! that speak of what is lost.

use tokio_postgres::Client;

use super::{Store, failed};
use crate::error::{Failure, Kind};
use crate::relay::outcome::Anchor;

const ANCHORS: &str = "\
    SELECT r.id, r.stream_seq, r.stream_msg_id FROM outbox.receipt AS r \
    WHERE r.relay = $1::text AND r.destination = $2::text AND r.stream_created = $3::text \
      AND r.stream_seq <= $4::int8 AND r.id < $5::int8 AND r.outcome = 'published' \
      AND r.stream_msg_id <> '' \
    ORDER BY r.id DESC LIMIT $6::int8";

const WITHDRAW: &str = "\
    SELECT receipts, events, letters \
    FROM outbox.withdraw($1::text, $2::text, $3::text, $4::int8, $5::text)";

/// What was taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Withdrawn {
    /// Receipts.
    pub receipts: i64,
    /// Events that they called published.
    pub events: i64,
    /// Dead letters that had been sent again, and will be once more.
    pub letters: i64,
}

impl Store {
    /// The last messages that receipts of a stream name at or below `upto`, newest receipt first, of
    /// receipts below `before`; and the oldest of these receipts, `None` at the end.
    pub async fn anchors(
        &self,
        client: &Client,
        destination: &str,
        created: &str,
        (upto, before): (u64, i64),
        limit: usize,
    ) -> Result<(Vec<Anchor>, Option<i64>), Failure> {
        let upto = i64::try_from(upto).unwrap_or(i64::MAX);
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let read = async {
            let (mut anchors, mut oldest) = (Vec::new(), None);
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
                [&self.relay, &destination, &created, &upto, &before, &limit];
            for row in client.query(ANCHORS, &values).await? {
                oldest = Some(row.try_get(0)?);
                let seq: i64 = row.try_get(1)?;
                anchors.push(Anchor { seq: seq.unsigned_abs(), id: row.try_get(2)? });
            }
            Ok((anchors, oldest))
        };
        read.await.map_err(|error| failed("cannot read what receipts say of the stream", &error))
    }

    /// Takes back what receipts say of messages of a stream above this one, in one transaction. Until
    /// the rows are found the destination has a gap.
    pub async fn withdraw(
        &self,
        client: &Client,
        destination: &str,
        created: &str,
        upto: &Anchor,
    ) -> Result<Withdrawn, Failure> {
        let seq = i64::try_from(upto.seq)
            .map_err(|_| Failure::new(Kind::Internal, "a stream sequence is above 2^63"))?;
        let withdraw = async {
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
                [&self.relay, &destination, &created, &seq, &upto.id];
            let row = client.query_one(WITHDRAW, &values).await?;
            Ok(Withdrawn {
                receipts: row.try_get(0)?,
                events: row.try_get(1)?,
                letters: row.try_get(2)?,
            })
        };
        withdraw.await.map_err(|error| failed("cannot withdraw receipts", &error))
    }
}
