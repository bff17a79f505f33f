//! Do ledger and outbox belong together? One of them can be restored without the other. And in which
//! history of the database each stream was compared with it.

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

/// How the database goes on since the stream of a destination was last compared with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// As it was.
    Same,
    /// A standby was promoted, or a backup restored: what was committed last may be lost, and so may
    /// receipts of what the slot does not bring any more.
    Promoted,
    /// Never, or in another cluster: positions say nothing here.
    Other,
}

impl Since {
    fn of(compared_in: Option<&str>, (system, timeline): (&str, u32)) -> Since {
        let (was, then) = compared_in.and_then(|place| place.split_once('/')).unwrap_or_default();
        match (was == system, then == timeline.to_string()) {
            (true, true) => Since::Same,
            (true, false) => Since::Promoted,
            (false, _) => Since::Other,
        }
    }
}

const COMPARED: &str = "\
    SELECT d.compared_in \
    FROM unnest($2::text[]) WITH ORDINALITY AS w (name, place) \
         LEFT JOIN outbox.destination AS d ON d.relay = $1::text AND d.name = w.name \
    ORDER BY w.place";

const SET_COMPARED: &str = "\
    UPDATE outbox.destination SET compared_in = $3::text, updated_at = now() \
    WHERE relay = $1::text AND name = ANY ($2::text[]) AND compared_in IS DISTINCT FROM $3::text";

impl Store {
    /// Of each of these destinations, in this order, how this cluster goes on since its stream was
    /// compared.
    pub async fn since(
        &self,
        client: &Client,
        names: &[&str],
        here: (&str, u32),
    ) -> Result<Vec<Since>, Failure> {
        let read = async {
            let rows = client.query(COMPARED, &[&self.relay, &names]).await?;
            let since = |row: &tokio_postgres::Row| Ok(Since::of(row.try_get(0)?, here));
            rows.iter().map(since).collect::<Result<_, tokio_postgres::Error>>()
        };
        read.await.map_err(|error| failed("cannot read where streams were compared", &error))
    }

    /// The streams of these destinations are compared here.
    pub async fn set_compared(
        &self,
        client: &Client,
        names: &[&str],
        (system, timeline): (&str, u32),
    ) -> Result<(), Failure> {
        let here = format!("{system}/{timeline}");
        let set = client.execute(SET_COMPARED, &[&self.relay, &names, &here]).await;
        set.map(drop).map_err(|error| failed("cannot record where a stream was compared", &error))
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_timeline_is_told_from_another_cluster() {
        let of = |place| Since::of(place, ("7123", 2));
        assert_eq!(of(Some("7123/2")), Since::Same);
        assert_eq!((of(Some("7123/1")), of(Some("7123/3"))), (Since::Promoted, Since::Promoted));
        let others = [Some("71/2"), Some("7123"), Some(""), None].map(of);
        assert_eq!(others, [Since::Other; 4]);
    }
}
