//! The publication: what the server sends. It must be older than the slot, since the server looks
//! it up as of the WAL position that it decodes.

use tokio_postgres::Client;

use super::failed;
use super::sql::{quote_ident, quote_name};
use crate::config::QualifiedName;
use crate::error::Failure;

/// A publication as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// Publishes every table of the database.
    pub all_tables: bool,
    /// Publishes INSERT.
    pub insert: bool,
    /// Publishes UPDATE.
    pub update: bool,
    /// Publishes DELETE.
    pub delete: bool,
    /// Publishes TRUNCATE.
    pub truncate: bool,
    /// Changes of a partition go out under the name of the partitioned table.
    pub via_root: bool,
    /// The outbox table is in it under its own name.
    pub has_table: bool,
    /// Other tables in it (a few names at most).
    pub others: Vec<String>,
    /// Row filter on the outbox table (PostgreSQL 15 and newer).
    pub row_filter: Option<String>,
    /// Published columns of the outbox table; empty before PostgreSQL 15, which sends all.
    pub columns: Vec<String>,
}

// to_jsonb, since attnames and rowfilter came with PostgreSQL 15.
const FIND: &str = "\
    SELECT p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, \
           t.facts IS NOT NULL, t.facts->>'rowfilter', \
           ARRAY(SELECT jsonb_array_elements_text(t.facts->'attnames')), \
           CASE WHEN p.puballtables THEN '{}'::text[] ELSE \
                ARRAY(SELECT o.schemaname || '.' || o.tablename FROM pg_publication_tables o \
                      WHERE o.pubname = p.pubname \
                        AND (o.schemaname, o.tablename) <> ($2::text, $3::text) \
                      ORDER BY 1 LIMIT 5) END \
    FROM pg_publication p LEFT JOIN LATERAL \
         (SELECT to_jsonb(t) AS facts FROM pg_publication_tables t \
          WHERE t.pubname = p.pubname AND t.schemaname = $2::text AND t.tablename = $3::text) t \
         ON true \
    WHERE p.pubname = $1::text";

/// Looks for a publication; `None` when there is none of that name.
pub async fn find(
    client: &Client,
    name: &str,
    table: &QualifiedName,
) -> Result<Option<Publication>, Failure> {
    let read = async {
        let row = client.query_opt(FIND, &[&name, &table.schema, &table.name]).await?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some(Publication {
            all_tables: row.try_get(0)?,
            insert: row.try_get(1)?,
            update: row.try_get(2)?,
            delete: row.try_get(3)?,
            truncate: row.try_get(4)?,
            via_root: row.try_get(5)?,
            has_table: row.try_get(6)?,
            row_filter: row.try_get(7)?,
            columns: row.try_get(8)?,
            others: row.try_get(9)?,
        }))
    };
    read.await.map_err(|error| failed("cannot look for the publication", &error))
}

/// The statement that makes a publication of the right shape. TRUNCATE is in it so that a
/// truncated outbox is noticed and said; nothing is published for it.
pub fn create_sql(name: &str, table: &QualifiedName) -> String {
    format!(
        "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert, truncate', \
         publish_via_partition_root = true);",
        quote_ident(name),
        quote_name(table),
    )
}

/// Makes the publication. Needs ownership of the table and CREATE on the database.
pub async fn create(client: &Client, name: &str, table: &QualifiedName) -> Result<(), Failure> {
    let made = client.batch_execute(&create_sql(name, table)).await;
    made.map_err(|error| failed(&format!("cannot create publication {name}"), &error))
}

/// Drops the publication if it exists.
pub async fn drop(client: &Client, name: &str) -> Result<(), Failure> {
    let sql = format!("DROP PUBLICATION IF EXISTS {};", quote_ident(name));
    let dropped = client.batch_execute(&sql).await;
    dropped.map_err(|error| failed(&format!("cannot drop publication {name}"), &error))
}
