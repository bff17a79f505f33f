//! The relay's row: which outbox table, cluster and history its ledger belongs to.

use serde_json::json;
use tokio_postgres::Client;
use tokio_postgres::types::{Json, PgLsn};

use super::failed;
use crate::config::{ColumnMap, QualifiedName};
use crate::error::{Failure, Kind};
use crate::lsn::Lsn;

/// `outbox.relay` of one relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayRow {
    /// History of the database that the ledger belongs to.
    pub generation: i32,
    /// The cluster's identifier when the row was written; another one is another cluster.
    pub system_identifier: String,
    /// Timeline when the row was written; a higher one is a promoted standby.
    pub timeline: u32,
    /// The relay never confirmed its slot above this; `None` when it never confirmed it.
    pub ceiling: Option<Lsn>,
    /// True when this call made the row.
    pub created: bool,
}

impl RelayRow {
    /// Positions of WAL mean something in their own cluster only.
    pub fn require_cluster(&self, relay: &str, system_identifier: &str) -> Result<(), Failure> {
        if self.system_identifier == system_identifier {
            return Ok(());
        }
        let detail = format!(
            "the ledger of relay `{relay}` was written in cluster {}, this is cluster \
             {system_identifier}",
            self.system_identifier
        );
        Err(Failure::new(Kind::OtherCluster, detail))
    }
}

const CREATE: &str = "\
    INSERT INTO outbox.relay (name, event_table, system_identifier, timeline) \
    VALUES ($1::text, $2::text, $3::text, $4::int8) ON CONFLICT (name) DO NOTHING";

const READ: &str = "\
    SELECT generation, event_table, system_identifier, timeline, slot_ceiling \
    FROM outbox.relay WHERE name = $1::text";

const MOVE_ON: &str = "\
    UPDATE outbox.relay SET system_identifier = $2::text, timeline = $3::int8, updated_at = now() \
    WHERE name = $1::text";

// A position of another cluster says nothing here: what is above the end of this WAL committed below
// it all the same, since its row is here.
const REBASE: &str = "\
    UPDATE outbox.receipt SET first_lsn = NULL, last_lsn = pg_current_wal_insert_lsn() \
    WHERE relay = $1::text AND last_lsn > pg_current_wal_insert_lsn()";

const SET_CEILING: &str = "\
    UPDATE outbox.relay SET slot_ceiling = $2::pg_lsn, updated_at = now() \
    WHERE name = $1::text AND slot_ceiling IS DISTINCT FROM $2::pg_lsn";

/// Reads the relay's row, or makes it with generation 1 and the cluster's present identity.
/// Comparing the two is the caller's: see the start-up plan.
pub async fn read_or_create(
    client: &Client,
    relay: &str,
    table: &QualifiedName,
    system_identifier: &str,
    timeline: u32,
) -> Result<RelayRow, Failure> {
    let name = table_name(table);
    let created = client
        .execute(CREATE, &[&relay, &name, &system_identifier, &i64::from(timeline)])
        .await
        .map_err(|error| failed("cannot record the relay's identity", &error))?;
    match read(client, relay, table).await? {
        Some(row) => Ok(RelayRow { created: created == 1, ..row }),
        None => Err(super::unexpected("a relay's row that vanishes when it is read")),
    }
}

/// Reads the relay's row.
pub async fn read(
    client: &Client,
    relay: &str,
    table: &QualifiedName,
) -> Result<Option<RelayRow>, Failure> {
    let row = client.query_opt(READ, &[&relay]).await;
    let row = row.map_err(|error| failed("cannot read the relay's identity", &error))?;
    row.map(|row| decode(relay, table, &row)).transpose()
}

/// Receipts of another cluster, in which WAL went further than it has here, get positions that mean
/// something here.
pub async fn rebase(client: &Client, relay: &str) -> Result<u64, Failure> {
    let rebased = client.execute(REBASE, &[&relay]).await;
    rebased.map_err(|error| failed("cannot bring the ledger to this cluster", &error))
}

/// Records how far the slot may be confirmed from now on.
pub async fn set_ceiling(client: &Client, relay: &str, ceiling: Lsn) -> Result<(), Failure> {
    let set = client.execute(SET_CEILING, &[&relay, &PgLsn::from(ceiling.0)]).await;
    set.map(drop).map_err(|error| failed("cannot record how far the slot may be confirmed", &error))
}

/// Records that the same history goes on in this cluster and timeline (after a failover).
pub async fn move_on(
    client: &Client,
    relay: &str,
    system_identifier: &str,
    timeline: u32,
) -> Result<(), Failure> {
    let moved = client.execute(MOVE_ON, &[&relay, &system_identifier, &i64::from(timeline)]).await;
    moved.map(drop).map_err(|error| failed("cannot record the relay's identity", &error))
}

// Written when it changes alone: a start of an idle relay leaves no WAL.
const NAME_COLUMNS: &str = "\
    UPDATE outbox.relay SET columns = $2::jsonb, updated_at = now() \
    WHERE name = $1::text AND columns <> $2::jsonb";

/// Records how the table's columns are called, for the statements that the database runs by itself:
/// lag, retention, erasure.
pub async fn name_columns(
    client: &Client,
    relay: &str,
    columns: &ColumnMap,
) -> Result<(), Failure> {
    let names = json!({
        "seq": columns.seq,
        "run": columns.run,
        "created_at": columns.created_at,
    });
    let named = client.execute(NAME_COLUMNS, &[&relay, &Json(names)]).await;
    named.map(drop).map_err(|error| failed("cannot record the names of the columns", &error))
}

/// As `outbox.relay.event_table` has it.
pub(super) fn table_name(table: &QualifiedName) -> String {
    format!("{}.{}", table.schema, table.name)
}

/// A ledger speaks of the numbers of one table. Reading it for another would take events of that
/// one for done that were never sent.
fn decode(
    relay: &str,
    table: &QualifiedName,
    row: &tokio_postgres::Row,
) -> Result<RelayRow, Failure> {
    let fields = || -> Result<_, tokio_postgres::Error> {
        let (event_table, timeline): (String, i64) = (row.try_get(1)?, row.try_get(3)?);
        let generation = row.try_get(0)?;
        let system_identifier = row.try_get(2)?;
        let ceiling: Option<PgLsn> = row.try_get(4)?;
        let ceiling = ceiling.map(|lsn| Lsn(lsn.into()));
        Ok((event_table, timeline, generation, system_identifier, ceiling))
    };
    let (event_table, timeline, generation, system_identifier, ceiling) =
        fields().map_err(|error| failed("cannot read the relay's identity", &error))?;
    let name = table_name(table);
    if event_table != name {
        let detail = format!(
            "the ledger of relay `{relay}` belongs to table {event_table}, and [source] table is \
             {name}: give the relay another name"
        );
        return Err(Failure::new(Kind::TableShape, detail));
    }
    let timeline = u32::try_from(timeline)
        .map_err(|_| super::unexpected(format_args!("timeline {timeline}")))?;
    Ok(RelayRow { generation, system_identifier, timeline, ceiling, created: false })
}
