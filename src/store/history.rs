//! Do ledger and outbox belong together? One of them can be restored without the other. Reads only.

use tokio_postgres::Client;

use super::{Store, failed};
use crate::error::Failure;

/// What the ledger says of the outbox that it is found beside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Continuity {
    /// Nothing speaks against it.
    Fits,
    /// The ledger knows a number that the outbox's sequence has not given yet: the outbox is older.
    Ahead {
        /// Highest number that the ledger knows.
        known: i64,
        /// Last number that the sequence gave.
        last: i64,
    },
    /// Receipts are not there that were: the ledger is older than the outbox, or lost a part.
    Short {
        /// Of this destination.
        destination: String,
        /// A receipt that was taken into account.
        known: i64,
        /// The newest that there is; 0 when there is none.
        newest: i64,
    },
}

// The newest receipt of a destination is never removed, so their ids only grow; nor is a number
// known that was not drawn.
const KNOWN: &str = "\
    SELECT d.name, d.receipt_id, \
           coalesce((SELECT max(r.id) FROM outbox.receipt AS r \
                     WHERE r.relay = d.relay AND r.destination = d.name), 0), \
           greatest(d.frontier, \
                    (SELECT max(upper(r.seqs)) - 1 FROM outbox.receipt AS r \
                     WHERE r.relay = d.relay AND r.destination = d.name AND r.id > d.receipt_id)) \
    FROM outbox.destination AS d WHERE d.relay = $1::text ORDER BY d.name";

impl Store {
    /// Compares them. The sequence is asked last, since it goes on.
    pub async fn continuity(&self, client: &Client) -> Result<Continuity, Failure> {
        let read = async {
            let mut highest: Option<i64> = None;
            for row in client.query(KNOWN, &[&self.relay]).await? {
                let (known, newest): (i64, i64) = (row.try_get(1)?, row.try_get(2)?);
                if known > newest {
                    let destination = row.try_get(0)?;
                    return Ok(Err(Continuity::Short { destination, known, newest }));
                }
                highest = highest.max(row.try_get(3)?);
            }
            Ok(Ok(highest))
        };
        let read =
            read.await.map_err(|error| failed("cannot compare ledger and outbox", &error))?;
        let known = match read {
            Ok(Some(known)) => known,
            Ok(None) => return Ok(Continuity::Fits),
            Err(short) => return Ok(short),
        };
        let last = self.last_number(client).await?;
        Ok(if known > last { Continuity::Ahead { known, last } } else { Continuity::Fits })
    }
}
