//! Every SQL statement of the relay: schema, slot and publication, lock, ledger, dead letters.
//! Decides nothing but what one statement can say; knows no NATS.
//!
//! In the order of a relay's start: [`lock`] → [`schema`] → [`shape`] → [`identity`] → [`history`] →
//! [`ledger`] → [`events`]; while it runs [`ledger`] and [`dead_letters`]. The slow path: [`destinations`] says
//! where a sweep begins, [`sweep`] finds undecided rows, [`waiting`] those that were handed over,
//! [`rows`] reads them. [`publication`] and [`slot`] are made by `outboxd init`; [`unrecorded`] says
//! what is at stake when a slot goes. [`retention`], [`lag`] and [`erase`] call functions of the schema, on
//! connections of their own.

pub mod adopt;
pub mod dead_letters;
pub mod destinations;
pub mod erase;
pub mod events;
pub mod facts;
pub mod generation;
pub mod grants;
pub mod history;
pub mod identity;
pub mod lag;
pub mod ledger;
pub mod lock;
pub mod lost_tail;
pub mod mark;
pub mod orphans;
pub mod publication;
pub mod replay;
pub mod retention;
pub mod rows;
pub mod rules;
pub mod schema;
pub mod shape;
pub mod slot;
pub mod sql;
pub mod sweep;
pub mod trace;
pub mod unrecorded;
pub mod waiting;

use tokio_postgres::types::PgLsn;
use tokio_postgres::{Client, Statement};

use crate::config::SourceConfig;
use crate::error::{Failure, Kind};
use crate::event::UnixMicros;
use crate::lsn::Lsn;
use crate::wal::failure_of;

/// The statements of one session of one relay, prepared once. Dies with its connection.
#[derive(Debug)]
pub struct Store {
    relay: String,
    database_is_utf8: bool,
    append: Statement,
    load: Statement,
    latest: Statement,
    existing: Statement,
    holders: Option<String>,
    bury: Statement,
    again: dead_letters::again::Statements,
    pulse: Statement,
    waiting: Statement,
    destinations: destinations::Statements,
    sweep: sweep::Statements,
    reader: rows::Reader,
    slot: String,
}

impl Store {
    /// Settles the session, requires this program's schema version, prepares the statements.
    pub async fn open(
        client: &Client,
        relay: &str,
        source: &SourceConfig,
    ) -> Result<Store, Failure> {
        settle(client).await?;
        schema::require(client).await?;
        let existing = events::existing_sql(&source.table, &source.columns);
        let refused = |error| failed("cannot prepare the relay's statements", &error);
        let database_is_utf8 = async {
            let row = client.query_one("SELECT current_setting('server_encoding')", &[]);
            row.await?.try_get::<_, String>(0)
        };
        let (append, load, latest, existing, bury, pulse, waiting, encoding) = tokio::try_join!(
            client.prepare(ledger::APPEND),
            client.prepare(ledger::LOAD),
            client.prepare(ledger::LATEST),
            client.prepare(&existing),
            client.prepare(dead_letters::BURY),
            client.prepare(PULSE),
            client.prepare(waiting::WAITING),
            database_is_utf8,
        )
        .map_err(refused)?;
        let (destinations, sweep, again) = tokio::try_join!(
            destinations::Statements::prepare(client),
            sweep::Statements::prepare(client, source),
            dead_letters::again::Statements::prepare(client, source),
        )
        .map_err(refused)?;
        Ok(Store {
            relay: relay.to_owned(),
            database_is_utf8: encoding == "UTF8",
            append,
            load,
            latest,
            existing,
            holders: events::holders_sql(source),
            bury,
            again,
            pulse,
            waiting,
            destinations,
            sweep,
            reader: rows::Reader::new(source),
            slot: source.slot.clone(),
        })
    }
}

/// What the database says at each sign of life.
#[derive(Debug, Clone, Copy)]
pub struct Pulse {
    /// Its clock.
    pub server_now: UnixMicros,
    /// End of its WAL.
    pub wal_end: Lsn,
    /// The slot, when it is there.
    pub slot: Option<SlotPulse>,
}

/// What the slot costs.
#[derive(Debug, Clone, Copy)]
pub struct SlotPulse {
    /// WAL that it holds back.
    pub retained_bytes: u64,
    /// WAL that may still be written before it is lost; `None` without a limit.
    pub safe_wal_size_bytes: Option<u64>,
}

impl Store {
    /// The database's clock, and the WAL that the relay's slot holds back.
    pub async fn pulse(&self, client: &Client) -> Result<Pulse, Failure> {
        let read = async {
            let row = client.query_one(&self.pulse, &[&self.slot]).await?;
            let wal_end: PgLsn = row.try_get(1)?;
            let (retained, safe): (Option<i64>, Option<i64>) = (row.try_get(2)?, row.try_get(3)?);
            let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
            Ok(Pulse {
                server_now: UnixMicros(row.try_get(0)?),
                wal_end: Lsn(wal_end.into()),
                slot: retained.map(|retained| SlotPulse {
                    retained_bytes: bytes(retained),
                    safe_wal_size_bytes: safe.map(bytes),
                }),
            })
        };
        read.await.map_err(|error| failed("cannot ask the database for a sign of life", &error))
    }

    /// Name of the relay.
    pub fn relay(&self) -> &str {
        &self.relay
    }
}

const PULSE: &str = "\
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8, pg_current_wal_lsn(), \
           pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::int8, s.safe_wal_size \
    FROM (SELECT) AS one LEFT JOIN pg_replication_slots AS s ON s.slot_name = $1::text";

/// Makes the session independent of what the role or the database set for theirs.
///
/// `synchronous_commit`: a receipt that a crash takes back would let the slot pass events that
/// nobody knows to be done, so commits wait at least for the flush, here and on a synchronous
/// standby (`remote_apply` stays). Set for the session and not per transaction, since `SET LOCAL`
/// needs a transaction block, three round trips for each receipt instead of one.
///
/// Time limits: the session idles between receipts by design. `row_security = off` turns a policy
/// that would hide rows into an error: a hidden row looks like one that never committed. An empty
/// search path (pg_catalog is always searched) keeps objects of others out of our statements.
///
/// `jit`: it starts by the planner's guess at the rows of a multirange, which is far too high, and
/// takes longer than our statements do.
pub async fn settle(client: &Client) -> Result<(), Failure> {
    const SETTLE: &str = "\
        SELECT set_config(name, CASE name \
                   WHEN 'synchronous_commit' THEN 'on' \
                   WHEN 'row_security' THEN 'off' \
                   WHEN 'search_path' THEN '' \
                   WHEN 'jit' THEN 'off' \
                   ELSE '0' END, false) \
        FROM pg_settings \
        WHERE name IN ('statement_timeout', 'lock_timeout', 'idle_session_timeout', \
                       'idle_in_transaction_session_timeout', 'transaction_timeout', \
                       'row_security', 'search_path', 'jit') \
           OR (name = 'synchronous_commit' AND setting NOT IN ('on', 'remote_apply'))";
    client
        .query(SETTLE, &[])
        .await
        .map(drop)
        .map_err(|error| failed("cannot settle the session", &error))
}

/// A failed statement as a failure: what was tried, then the server's words.
fn failed(doing: &str, error: &tokio_postgres::Error) -> Failure {
    let mut failure = failure_of(error);
    failure.detail = format!("{doing}: {}", failure.detail);
    failure
}

/// A value that the server can't have sent if the schema is ours.
fn unexpected(what: impl std::fmt::Display) -> Failure {
    Failure::new(Kind::Database, format!("unexpected value from the database: {what}"))
}
