//! The replication slot: the server's memory of what is confirmed.

use serde_json::Value;
use tokio_postgres::Client;

use super::{failed, unexpected};
use crate::error::Failure;
use crate::lsn::Lsn;

/// A replication slot as the server shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SlotState {
    /// No slot of that name.
    Missing,
    /// Still waiting for transactions that were open when its creation began.
    Creating {
        /// Backend that creates it.
        active_pid: Option<i32>,
    },
    /// Usable.
    Ok(Slot),
    /// The server removed WAL or rows that it needed; only a new slot helps.
    Lost {
        /// The server's reason, e.g. `wal_removed`; `wal_status` before PostgreSQL 17.
        reason: String,
    },
    /// Not a slot for this relay.
    Foreign {
        /// What it is instead.
        why: String,
    },
}

/// A usable slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Everything below is confirmed.
    pub confirmed_flush: Lsn,
    /// The server keeps WAL from here on.
    pub restart_lsn: Lsn,
    /// Backend that streams from it now.
    pub active_pid: Option<i32>,
    /// `reserved`, `extended` or `unreserved`.
    pub wal_status: String,
    /// WAL that may still be written before the slot is in danger; `None` without a limit.
    pub safe_wal_size_bytes: Option<i64>,
    /// Synchronised to standbys (PostgreSQL 17 and newer; `None` before).
    pub failover: Option<bool>,
    /// WAL kept for this slot, up to the server's present position.
    pub retained_bytes: i64,
    /// WAL behind the confirmed position, which the slot would still bring.
    pub behind_bytes: i64,
}

// to_jsonb: invalidation_reason and failover came with PostgreSQL 17. On a standby there is no
// insert position, and nothing to retain for us.
const FIND: &str = "\
    SELECT to_jsonb(s), s.database = current_database(), \
           s.confirmed_flush_lsn IS NOT NULL, \
           CASE WHEN pg_is_in_recovery() THEN 0::int8 ELSE \
                greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0)::int8 END, \
           CASE WHEN pg_is_in_recovery() THEN 0::int8 ELSE \
                greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn), 0)::int8 END \
    FROM pg_replication_slots s WHERE s.slot_name = $1::text";

/// Looks for the slot.
pub async fn find(client: &Client, name: &str) -> Result<SlotState, Failure> {
    let read = async {
        let Some(row) = client.query_opt(FIND, &[&name]).await? else { return Ok(None) };
        let (facts, ours): (Value, Option<bool>) = (row.try_get(0)?, row.try_get(1)?);
        let confirmed: bool = row.try_get(2)?;
        let (retained, behind): (Option<i64>, Option<i64>) = (row.try_get(3)?, row.try_get(4)?);
        let wal = Wal { retained: retained.unwrap_or(0), behind: behind.unwrap_or(0) };
        Ok(Some((facts, ours == Some(true), confirmed, wal)))
    };
    let found = read.await.map_err(|error| failed("cannot look for the slot", &error))?;
    match found {
        Some((facts, ours, confirmed, wal)) => classify(&facts, ours, confirmed, &wal),
        None => Ok(SlotState::Missing),
    }
}

/// What a slot holds back, and what it would still bring, in bytes.
struct Wal {
    retained: i64,
    behind: i64,
}

fn classify(
    facts: &Value,
    of_this_database: bool,
    is_confirmed: bool,
    wal: &Wal,
) -> Result<SlotState, Failure> {
    let text = |key: &str| facts.get(key).and_then(Value::as_str);
    let lsn = |key: &str| {
        let lsn = text(key).and_then(|text| text.parse().ok());
        lsn.ok_or_else(|| unexpected(format_args!("{key} of a slot: {:?}", facts.get(key))))
    };
    let active_pid =
        facts.get("active_pid").and_then(Value::as_i64).and_then(|pid| i32::try_from(pid).ok());
    let foreign = |why: String| Ok(SlotState::Foreign { why });
    if text("slot_type") != Some("logical") {
        return foreign("a physical slot".into());
    }
    if text("plugin") != Some("pgoutput") {
        return foreign(format!("a slot of the plugin {}", text("plugin").unwrap_or("?")));
    }
    if !of_this_database {
        return foreign(format!("a slot of the database {}", text("database").unwrap_or("?")));
    }
    if facts.get("temporary").and_then(Value::as_bool) == Some(true) {
        return foreign("a temporary slot of another session".into());
    }
    if let Some(reason) = text("invalidation_reason") {
        return Ok(SlotState::Lost { reason: reason.to_owned() });
    }
    if text("wal_status") == Some("lost") {
        return Ok(SlotState::Lost { reason: "wal_status is lost".into() });
    }
    // Before 17 a conflict with recovery (on a standby) is a flag only.
    if facts.get("conflicting").and_then(Value::as_bool) == Some(true) {
        return Ok(SlotState::Lost { reason: "conflicting".into() });
    }
    if !is_confirmed {
        return Ok(SlotState::Creating { active_pid });
    }
    Ok(SlotState::Ok(Slot {
        confirmed_flush: lsn("confirmed_flush_lsn")?,
        restart_lsn: lsn("restart_lsn")?,
        active_pid,
        wal_status: text("wal_status").unwrap_or("unknown").to_owned(),
        safe_wal_size_bytes: facts.get("safe_wal_size").and_then(Value::as_i64),
        failover: facts.get("failover").and_then(Value::as_bool),
        retained_bytes: wal.retained,
        behind_bytes: wal.behind,
    }))
}

/// Makes the slot and says from where it streams. Waits for the transactions that are open now.
/// `failover` makes standbys keep a copy; servers before 17 can't and ignore it.
pub async fn create(client: &Client, name: &str, failover: bool) -> Result<Lsn, Failure> {
    let made = async {
        let version: i32 = client.query_one(SERVER_VERSION, &[]).await?.try_get(0)?;
        let extra = if version >= 170_000 && failover { ", failover => true" } else { "" };
        let sql = format!(
            "SELECT lsn::text FROM pg_create_logical_replication_slot($1::text, 'pgoutput'{extra})"
        );
        client.query_one(&sql, &[&name]).await?.try_get::<_, String>(0)
    };
    let lsn = made.await.map_err(|error| failed(&format!("cannot create slot {name}"), &error))?;
    lsn.parse().map_err(unexpected)
}

const SERVER_VERSION: &str = "SELECT current_setting('server_version_num')::int4";

/// Drops the slot. Fails when a session streams from it.
pub async fn drop(client: &Client, name: &str) -> Result<(), Failure> {
    let dropped = client.query("SELECT pg_drop_replication_slot($1::text)", &[&name]).await;
    dropped.map(std::mem::drop).map_err(|error| failed(&format!("cannot drop slot {name}"), &error))
}

/// What else decides whether the slot can be streamed from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surroundings {
    /// `wal_level`.
    pub wal_level: String,
    /// The publication is there.
    pub publication: bool,
    /// Who uses the slot, when it is none of our sessions: its name for a person.
    pub stranger: Option<String>,
}

// A session of this role with our application_name is an earlier one of this relay, which is about
// to end: the lock of the relay's name is free.
const SURROUNDINGS: &str = "\
    SELECT current_setting('wal_level'), \
           EXISTS (SELECT FROM pg_publication WHERE pubname = $1::text), \
           (SELECT coalesce(nullif(a.application_name, ''), 'a session') \
                   || coalesce(' of ' || a.usename, '') \
            FROM pg_stat_activity AS a \
            WHERE a.pid = $2::int4 \
              AND (a.usename IS DISTINCT FROM session_user \
                   OR a.application_name IS DISTINCT FROM current_setting('application_name')))";

/// Looks at what is around the slot, whose user has this pid.
pub async fn surroundings(
    client: &Client,
    publication: &str,
    pid: Option<i32>,
) -> Result<Surroundings, Failure> {
    let read = async {
        let row = client.query_one(SURROUNDINGS, &[&publication, &pid]).await?;
        Ok(Surroundings {
            wal_level: row.try_get(0)?,
            publication: row.try_get(1)?,
            stranger: row.try_get(2)?,
        })
    };
    read.await.map_err(|error| failed("cannot look at the slot's surroundings", &error))
}
