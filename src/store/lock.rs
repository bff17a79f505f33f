//! The one writer: a session advisory lock named after the relay, held by the control connection.
//! The server gives it free when that connection ends, however it ends.

use std::time::Duration;

use tokio_postgres::Client;

use super::failed;
use crate::error::Failure;

// The key is computed by the server so that an operator can ask pg_locks for it by hand. All
// contenders are sessions of one server, hence it need not be the same on another version.
const KEY: &str = "hashtextextended('outboxd relay ' || $1::text, 0)";

/// Held beside the lock by a session that pings. A command that has the lock may be silent for as long as
/// it reads a stream.
const PINGS: &str = "hashtextextended('outboxd relay ' || $1::text || ' pings', 0)";

/// Of a row of pg_locks, as `l`, the key of an advisory lock of this database.
const HELD: &str = "\
    l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 \
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
    AND (l.classid::bigint << 32 | l.objid::bigint)";

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

/// For the session that has the lock and pings every few seconds: says so, and has the server end it
/// after a silence of `wal_sender_timeout`. The server ends the walsender then, and a relay that is
/// stopped, or hangs, must not keep the lock for longer. (Three pings of five seconds must fit in.)
pub async fn bound_silence(client: &Client, relay: &str) -> Result<(), Failure> {
    let sql = format!(
        "SELECT pg_try_advisory_lock({PINGS}), set_config(bounded.name, \
                   greatest(CASE setting::int8 WHEN 0 THEN 60000 ELSE setting::int8 END, 15000)::text, \
                   false) \
         FROM pg_settings, (VALUES ('idle_session_timeout'), \
                                   ('idle_in_transaction_session_timeout')) AS bounded (name) \
         WHERE pg_settings.name = 'wal_sender_timeout'"
    );
    let bound = client.query(&sql, &[&relay]).await.map(drop);
    bound.map_err(|error| failed("cannot bound the silence of the session", &error))
}

/// Ends the session that has the lock of this relay's name and pings, when it has waited for its client for
/// so long, and is one of our role. One that works, or waits for another, is not silent.
pub async fn end_silent(
    client: &Client,
    relay: &str,
    silence: Duration,
) -> Result<Option<Told>, Failure> {
    let sql = format!(
        "SELECT {END} FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
         WHERE {HELD} = {PINGS} AND a.usename = session_user AND a.state LIKE 'idle%' \
           AND clock_timestamp() - a.state_change > $2::float8 * interval '1 s'"
    );
    let ended = client.query_opt(&sql, &[&relay, &silence.as_secs_f64()]).await;
    told(ended).map_err(|error| failed("cannot end the session of a silent relay", &error))
}

/// Ends the walsender that an earlier session of this relay left at its slot. Only whoever has the
/// lock may: then it is nobody's any more.
pub async fn end_walsender(client: &Client, slot: &str) -> Result<Option<Told>, Failure> {
    let sql = format!(
        "SELECT {END} FROM pg_replication_slots s JOIN pg_stat_activity a ON a.pid = s.active_pid \
         WHERE s.slot_name = $1::text AND a.backend_type = 'walsender' \
           AND a.usename = session_user \
           AND a.application_name = current_setting('application_name')"
    );
    let ended = client.query_opt(&sql, &[&slot]).await;
    told(ended).map_err(|error| failed("cannot end the walsender of an earlier session", &error))
}

// Among the results, where it is computed for nothing but what the query selects: a condition may be
// tried before others, on any session.
const END: &str = "a.pid, pg_terminate_backend(a.pid, 500)";

/// A session that was told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// Its backend's process id.
    pub pid: i32,
    /// It is gone. One that is busy with its last words to a client that does not read must be told
    /// once more.
    pub is_gone: bool,
}

fn told(
    answer: Result<Option<tokio_postgres::Row>, tokio_postgres::Error>,
) -> Result<Option<Told>, tokio_postgres::Error> {
    let Some(row) = answer? else { return Ok(None) };
    Ok(Some(Told { pid: row.try_get(0)?, is_gone: row.try_get(1)? }))
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
         FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid) WHERE {HELD} = {KEY}"
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
