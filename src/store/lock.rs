//! The one writer: a session advisory lock named after the relay, held by the control connection.
//! The server gives it free when that connection ends, however it ends.

use tokio_postgres::Client;

use super::failed;
use crate::error::Failure;

// The key is computed by the server so that an operator can ask pg_locks for it by hand. All
// contenders are sessions of one server, hence it need not be the same on another version.
const KEY: &str = "hashtextextended('outboxd relay ' || $1::text, 0)";

/// Takes the lock of this relay's name if it is free. Held until the session ends.
///
/// What the ledger says must be read in a statement *after* this one returned true: an earlier
/// snapshot may miss the last receipts of the previous holder.
pub async fn try_lock(client: &Client, relay: &str) -> Result<bool, Failure> {
    let sql = format!("SELECT pg_try_advisory_lock({KEY})");
    let row = client.query_one(&sql, &[&relay]).await;
    row.and_then(|row| row.try_get(0))
        .map_err(|error| failed("cannot ask for the relay's lock", &error))
}

/// A session that holds a relay's lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its backend's process id.
    pub pid: i32,
    /// Its `application_name`; empty when this role may not see it.
    pub application: String,
    /// Its client's address; `None` on a Unix socket, or when this role may not see it.
    pub address: Option<String>,
    /// When it connected, as text; `None` when this role may not see it.
    pub since: Option<String>,
}

/// Who holds the lock of this relay's name.
pub async fn holder(client: &Client, relay: &str) -> Result<Option<Holder>, Failure> {
    let sql = format!(
        "SELECT l.pid, coalesce(a.application_name, ''), host(a.client_addr), \
                to_char(a.backend_start, 'YYYY-MM-DD HH24:MI:SS TZ') \
         FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid) \
         WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 \
           AND l.database = (SELECT oid FROM pg_database \
                             WHERE datname = current_database()) \
           AND (l.classid::bigint << 32 | l.objid::bigint) = {KEY}"
    );
    let read = async {
        let Some(row) = client.query_opt(&sql, &[&relay]).await? else { return Ok(None) };
        Ok(Some(Holder {
            pid: row.try_get(0)?,
            application: row.try_get(1)?,
            address: row.try_get(2)?,
            since: row.try_get(3)?,
        }))
    };
    read.await.map_err(|error| failed("cannot look for the holder of the relay's lock", &error))
}
