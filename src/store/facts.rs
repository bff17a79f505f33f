//! What the database looks like to this role, in one go, for `outboxd check`. Reads only.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokio_postgres::Client;
use tokio_postgres::types::Json;

use super::lock::{self, Holder};
use super::publication::{self, Publication};
use super::slot::{self, SlotState};
use super::{failed, identity, schema, shape};
use crate::config::{Config, QualifiedName};
use crate::error::Failure;
use crate::store::identity::RelayRow;

/// Everything that the rules look at.
#[derive(Debug, Clone)]
pub struct SourceFacts {
    /// Server and role.
    pub server: Server,
    /// Version of the schema `outbox`; a failure when this role may not read it.
    pub schema: Result<Option<i32>, Failure>,
    /// The outbox table.
    pub table: Option<shape::Table>,
    /// Rights of this role.
    pub rights: Vec<Right>,
    /// The publication.
    pub publication: Option<Publication>,
    /// The slot.
    pub slot: SlotState,
    /// The relay's row; `None` when there is none, or the schema can't be read.
    pub relay: Result<Option<RelayRow>, Failure>,
    /// Who runs a relay of this name now.
    pub holder: Option<Holder>,
}

/// Server and role.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Server {
    /// E.g. 180006.
    pub version: i32,
    /// A standby.
    pub in_recovery: bool,
    /// Values of settings as this role's sessions start with, in the setting's base unit.
    pub settings: BTreeMap<String, String>,
    /// This role.
    pub role: String,
    /// Superuser, REPLICATION, or a member of `rds_replication`.
    pub may_replicate: bool,
    /// The role that stands for REPLICATION on Amazon RDS exists here.
    pub is_rds: bool,
    /// Slots in use, of any kind.
    pub slots_used: i64,
    /// Walsenders in use.
    pub senders_used: i64,
    /// Physical slots: standbys that follow this server.
    pub standbys: Vec<PhysicalSlot>,
}

/// The slot of a standby, on the primary.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PhysicalSlot {
    /// Its name.
    pub name: String,
    /// A standby is connected.
    pub active: bool,
    /// Invalidated.
    pub lost: bool,
    /// The standby says which rows it needs.
    pub feedback: bool,
}

/// What a standby tells of itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct StandbyFacts {
    /// E.g. 180006.
    pub version: i32,
    /// Those of its settings that this role may see.
    pub settings: BTreeMap<String, String>,
    /// The slot of this name there.
    pub copy: Option<SlotCopy>,
}

/// A slot on a standby.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SlotCopy {
    /// It is one that follows the primary's.
    #[serde(default)]
    pub synced: bool,
    /// A promotion does not keep it.
    pub temporary: bool,
    /// It is of no use any more.
    pub invalidation_reason: Option<String>,
}

impl Server {
    /// A setting's value; empty when this server has no such setting.
    pub fn setting(&self, name: &str) -> &str {
        self.settings.get(name).map_or("", String::as_str)
    }

    /// A numeric setting in its base unit.
    pub fn number(&self, name: &str) -> Option<i64> {
        self.setting(name).parse().ok()
    }
}

/// One right that a relay's role needs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Right {
    /// On what.
    pub object: String,
    /// Which.
    pub right: String,
    /// Is it held? `None` when the object does not exist.
    pub held: Option<bool>,
}

const SERVER: &str = "\
    SELECT jsonb_build_object( \
      'version', current_setting('server_version_num')::int4, \
      'in_recovery', pg_is_in_recovery(), \
      'settings', (SELECT jsonb_object_agg(name, reset_val) FROM pg_settings WHERE name = ANY ($1)), \
      'role', current_user, \
      'may_replicate', r.rolsuper OR r.rolreplication OR coalesce(pg_has_role(rds.oid, 'MEMBER'), false), \
      'is_rds', rds.oid IS NOT NULL, \
      'slots_used', (SELECT count(*) FROM pg_replication_slots), \
      'senders_used', (SELECT count(*) FROM pg_stat_replication), \
      'standbys', (SELECT coalesce(jsonb_agg(jsonb_build_object( \
            'name', slot_name, 'active', active, 'lost', wal_status IS NOT DISTINCT FROM 'lost', \
            'feedback', xmin IS NOT NULL OR catalog_xmin IS NOT NULL)), '[]') \
          FROM pg_replication_slots WHERE slot_type = 'physical')) \
    FROM pg_roles r LEFT JOIN pg_roles rds ON rds.rolname = 'rds_replication' \
    WHERE r.rolname = current_user";

const STANDBY: &str = "\
    SELECT jsonb_build_object( \
      'version', current_setting('server_version_num')::int4, \
      'settings', (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name = ANY ($1)), \
      'copy', (SELECT to_jsonb(s) FROM pg_replication_slots AS s WHERE slot_name = $2::text))";

const STANDBY_SETTINGS: &[&str] =
    &["hot_standby_feedback", "primary_conninfo", "primary_slot_name", "sync_replication_slots"];

const MAY_REPLICATE: &str = "\
    SELECT r.rolsuper OR r.rolreplication OR coalesce(pg_has_role(r.oid, rds.oid, 'MEMBER'), false) \
    FROM pg_roles r LEFT JOIN pg_roles rds ON rds.rolname = 'rds_replication' \
    WHERE r.rolname = $1::text";

const SETTINGS: &[&str] = &[
    "default_transaction_read_only",
    "fsync",
    "idle_replication_slot_timeout",
    "max_replication_slots",
    "max_slot_wal_keep_size",
    "max_wal_senders",
    "server_encoding",
    "synchronized_standby_slots",
    "synchronous_commit",
    "synchronous_standby_names",
    "wal_level",
    "wal_sender_timeout",
];

// By object id: the functions that take a name fail for an object that is not there, or is in a
// schema that this role may not look into.
const RIGHTS: &str = "\
    SELECT jsonb_build_object('object', w.kind || ' ' || w.space || coalesce('.' || w.name, ''), \
        'right', w.right, 'held', CASE w.kind \
            WHEN 'schema' THEN has_schema_privilege(n.oid, w.right) \
            WHEN 'sequence' THEN has_sequence_privilege(c.oid, w.right) \
            WHEN 'function' THEN has_function_privilege(p.oid, w.right) \
            ELSE has_table_privilege(c.oid, w.right) END) \
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) \
             WITH ORDINALITY AS w (kind, space, name, \"right\", place) \
         LEFT JOIN pg_namespace n ON n.nspname = w.space \
         LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name \
         LEFT JOIN pg_proc p ON p.pronamespace = n.oid AND p.proname = w.name \
              AND w.kind = 'function' \
    ORDER BY w.place";

/// Collects them. Fails only when the database can't be asked.
pub async fn collect(client: &Client, config: &Config) -> Result<SourceFacts, Failure> {
    let (relay, source) = (config.relay.name.as_str(), &config.source);
    let (server, table, rights, publication, slot, holder) = tokio::try_join!(
        server(client),
        shape::find(client, &source.table, &source.columns),
        rights(client, &source.table, config.retention.removes_rows()),
        publication::find(client, &source.publication, &source.table),
        slot::find(client, &source.slot),
        lock::holder(client, relay),
    )?;
    let schema = schema::version(client).await;
    let relay = match &schema {
        Ok(Some(schema::VERSION)) => identity::read(client, relay, &source.table).await,
        Ok(_) | Err(_) => Ok(None),
    };
    Ok(SourceFacts { server, schema, table, rights, publication, slot, relay, holder })
}

/// Server and role alone.
pub async fn server(client: &Client) -> Result<Server, Failure> {
    let row = client.query_one(SERVER, &[&SETTINGS]).await;
    row.and_then(|row| row.try_get::<_, Json<Server>>(0))
        .map(|Json(server)| server)
        .map_err(|error| failed("cannot look at the server", &error))
}

/// Asks a standby about itself and the slot of this name.
pub async fn standby(client: &Client, slot: &str) -> Result<StandbyFacts, Failure> {
    let row = client.query_one(STANDBY, &[&STANDBY_SETTINGS, &slot]).await;
    row.and_then(|row| row.try_get::<_, Json<StandbyFacts>>(0))
        .map(|Json(facts)| facts)
        .map_err(|error| failed("cannot look at the standby", &error))
}

/// May a role use replication? `None` when there is no such role.
pub async fn may_replicate(client: &Client, role: &str) -> Result<Option<bool>, Failure> {
    let row = client.query_opt(MAY_REPLICATE, &[&role]).await;
    row.and_then(|row| row.map(|row| row.try_get(0)).transpose())
        .map_err(|error| failed("cannot look at a role", &error))
}

async fn rights(
    client: &Client,
    table: &QualifiedName,
    removes_rows: bool,
) -> Result<Vec<Right>, Failure> {
    let mut kinds = Vec::new();
    let (mut spaces, mut names, mut needed) = (Vec::new(), Vec::new(), Vec::new());
    for right in schema::relay_rights(table, removes_rows) {
        kinds.push(right.kind);
        spaces.push(right.schema);
        names.push(right.name);
        needed.push(right.right);
    }
    let read = async {
        let rows = client.query(RIGHTS, &[&kinds, &spaces, &names, &needed]).await?;
        rows.iter()
            .map(|row| row.try_get::<_, Json<Right>>(0).map(|Json(right)| right))
            .collect::<Result<Vec<_>, _>>()
    };
    read.await.map_err(|error| failed("cannot look at the rights of this role", &error))
}
