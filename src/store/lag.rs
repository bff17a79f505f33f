//! How far the destinations are behind the table, as the database knows it. Reads only.

use tokio_postgres::Client;

use super::failed;
use crate::error::Failure;

/// One destination's lag.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Lag {
    /// Name of the destination.
    pub destination: String,
    /// Does retention wait for it?
    pub required: bool,
    /// Rows that it has not decided; `None` when the table is gone.
    pub unpublished: Option<u64>,
    /// Age of the oldest of them; `None` when the table has no time, or is gone.
    pub oldest_seconds: Option<f64>,
    /// False: there are more than were counted.
    pub counted_all: bool,
}

const LAG: &str = "\
    SELECT destination, required, unpublished, oldest_seconds, counted_all \
    FROM outbox.lag($2::int8) WHERE relay = $1::text";

/// The lag of a relay's active destinations; none when it never ran. Counts up to `count_to` rows.
pub async fn lag(client: &Client, relay: &str, count_to: i64) -> Result<Vec<Lag>, Failure> {
    let read = async {
        let rows = client.query(LAG, &[&relay, &count_to]).await?;
        let one = |row: &tokio_postgres::Row| {
            let unpublished: Option<i64> = row.try_get(2)?;
            Ok(Lag {
                destination: row.try_get(0)?,
                required: row.try_get(1)?,
                unpublished: unpublished.map(i64::unsigned_abs),
                oldest_seconds: row.try_get(3)?,
                counted_all: row.try_get(4)?,
            })
        };
        rows.iter().map(one).collect::<Result<Vec<_>, tokio_postgres::Error>>()
    };
    read.await.map_err(|error| failed("cannot ask for the lag", &error))
}
