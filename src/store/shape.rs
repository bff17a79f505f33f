//! The outbox table as it is: columns, sequence, and who may write past it.

use serde::Deserialize;
use tokio_postgres::Client;
use tokio_postgres::types::{Json, ToSql};

use super::{failed, publication, rules};
use crate::config::{ColumnMap, QualifiedName, SourceConfig};
use crate::error::{Failure, Kind};

/// A table, as the catalog has it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Table {
    /// `pg_class.relkind`: `r` table, `p` partitioned, anything else can't be an outbox.
    pub kind: String,
    /// Itself and its partitions whose changes aren't written to the WAL (unlogged, temporary,
    /// foreign).
    pub without_wal: Vec<String>,
    /// Row security hides rows from this role.
    pub row_security: bool,
    /// Is there a partition for rows that no other takes? True for a plain table.
    pub takes_every_row: bool,
    /// Columns that are not dropped.
    pub columns: Vec<Column>,
    /// An index begins with the seq column.
    pub seq_indexed: bool,
    /// The sequence behind the seq column.
    pub sequence: Option<Sequence>,
    /// Roles that may INSERT a number of their own choice; the owner's and superusers' right is
    /// not listed.
    pub seq_writers: Vec<String>,
    /// This role may set the column that marks a row as done; `None` when there is none.
    pub may_mark: Option<bool>,
    /// This role may delete rows.
    pub may_delete: bool,
}

/// A column.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Column {
    /// Name.
    pub name: String,
    /// Type, below all domains.
    #[serde(rename = "type")]
    pub type_name: String,
    /// An enum type.
    pub is_enum: bool,
    /// NOT NULL.
    pub not_null: bool,
    /// `GENERATED ALWAYS AS (expression)`: the server sends no such column.
    pub computed: bool,
    /// `GENERATED ALWAYS AS IDENTITY`.
    pub identity_always: bool,
}

/// A sequence.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Sequence {
    /// Name with schema.
    pub name: String,
    /// Type.
    #[serde(rename = "type")]
    pub type_name: String,
    /// Numbers that a session draws at once.
    pub cache: i64,
    /// Step.
    pub increment: i64,
    /// Starts again after its end.
    pub cycle: bool,
    /// This role may see its last value.
    pub readable: bool,
    /// Roles that may draw or set numbers outside of an INSERT.
    pub drawers: Vec<String>,
}

/// The sequence of column `s` (pg_attribute) of table `c` (pg_class), as an SQL expression: the one
/// owned by the column (identity, serial), or else the one that the column's default draws from.
macro_rules! sequence_of {
    () => {
        "coalesce( \
          (SELECT objid FROM pg_depend \
           WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_class'::regclass \
             AND refobjid = c.oid AND refobjsubid = s.attnum AND deptype IN ('a', 'i') \
             AND objid IN (SELECT seqrelid FROM pg_sequence) LIMIT 1), \
          (SELECT d.refobjid FROM pg_attrdef f JOIN pg_depend d \
             ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid \
            AND d.refclassid = 'pg_class'::regclass \
           WHERE f.adrelid = c.oid AND f.adnum = s.attnum \
             AND d.refobjid IN (SELECT seqrelid FROM pg_sequence) LIMIT 1))"
    };
}
pub(super) const SEQUENCE_OF: &str = sequence_of!();

const FIND: &str = concat!(
    "\
    SELECT jsonb_build_object( \
      'kind', c.relkind, \
      'without_wal', array( \
          SELECT p.oid::regclass::text FROM pg_class p \
          WHERE (p.oid = c.oid OR p.oid IN (SELECT relid FROM pg_partition_tree(c.oid))) \
            AND (p.relpersistence <> 'p' OR p.relkind NOT IN ('r', 'p')) ORDER BY 1), \
      'row_security', row_security_active(c.oid), \
      'takes_every_row', c.relkind <> 'p' OR EXISTS ( \
          SELECT FROM pg_partitioned_table WHERE partrelid = c.oid AND partdefid <> 0), \
      'columns', array( \
          SELECT jsonb_build_object('name', a.attname, 'type', format_type(b.oid, NULL), \
                 'is_enum', b.typtype = 'e', 'not_null', a.attnotnull, \
                 'computed', a.attgenerated <> '', 'identity_always', a.attidentity = 'a') \
          FROM pg_attribute a CROSS JOIN LATERAL ( \
               WITH RECURSIVE below AS ( \
                   SELECT t.* FROM pg_type t WHERE t.oid = a.atttypid \
                   UNION ALL \
                   SELECT t.* FROM below JOIN pg_type t ON t.oid = below.typbasetype \
                   WHERE below.typtype = 'd') \
               SELECT oid, typtype FROM below WHERE typtype <> 'd') AS b \
          WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum), \
      'seq_indexed', EXISTS ( \
          SELECT FROM pg_index WHERE indrelid = c.oid AND indisvalid AND indpred IS NULL \
                               AND indkey[0] = s.attnum), \
      'sequence', ( \
          SELECT jsonb_build_object('name', q.oid::regclass::text, \
                 'type', format_type(seqtypid, NULL), 'cache', seqcache, \
                 'increment', seqincrement, 'cycle', seqcycle, \
                 'readable', has_sequence_privilege(q.oid, 'USAGE, SELECT'), \
                 'drawers', array( \
                     SELECT DISTINCT coalesce(r.rolname, 'PUBLIC') \
                     FROM aclexplode(q.relacl) g LEFT JOIN pg_roles r ON r.oid = g.grantee \
                     WHERE g.privilege_type IN ('USAGE', 'UPDATE') AND g.grantee <> q.relowner \
                     ORDER BY 1)) \
          FROM pg_sequence JOIN pg_class q ON q.oid = seqrelid \
          WHERE seqrelid = ",
    sequence_of!(),
    "), \
      'seq_writers', array( \
          SELECT DISTINCT coalesce(r.rolname, 'PUBLIC') \
          FROM (SELECT * FROM aclexplode(c.relacl) \
                UNION ALL SELECT * FROM aclexplode(s.attacl)) g \
               LEFT JOIN pg_roles r ON r.oid = g.grantee \
          WHERE g.privilege_type = 'INSERT' AND g.grantee <> c.relowner ORDER BY 1), \
      'may_mark', ( \
          SELECT has_column_privilege(c.oid, m.attnum, 'UPDATE') FROM pg_attribute m \
          WHERE m.attrelid = c.oid AND m.attname = $4 AND m.attnum > 0), \
      'may_delete', has_table_privilege(c.oid, 'DELETE')) \
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         LEFT JOIN pg_attribute s ON s.attrelid = c.oid AND s.attname = $3 AND s.attnum > 0 \
    WHERE n.nspname = $1 AND c.relname = $2"
);

/// Looks at the outbox table; `None` when it does not exist.
pub async fn find(
    client: &Client,
    table: &QualifiedName,
    columns: &ColumnMap,
) -> Result<Option<Table>, Failure> {
    let read = async {
        let names = [&table.schema, &table.name, &columns.seq, &columns.published_at];
        let names = names.each_ref().map(|name| *name as &(dyn ToSql + Sync));
        let row = client.query_opt(FIND, &names).await?;
        row.map(|row| row.try_get::<_, Json<Table>>(0).map(|Json(table)| table)).transpose()
    };
    read.await.map_err(|error| failed("cannot look at the outbox table", &error))
}

/// Refuses a table or publication that can't work, with every difference named. What only the
/// sweeper needs of the sequence is left to `outboxd check`.
pub async fn require(client: &Client, source: &SourceConfig) -> Result<(), Failure> {
    let (table, publication) = tokio::try_join!(
        find(client, &source.table, &source.columns),
        publication::find(client, &source.publication, &source.table),
    )?;
    let mut findings = rules::table(table.as_ref(), source);
    findings.retain(|finding| finding.id != "source.sequence");
    rules::refuse(Kind::TableShape, &findings)?;
    let kind = match publication {
        None => Kind::PublicationMissing,
        Some(_) => Kind::PublicationShape,
    };
    rules::refuse(kind, &rules::publication(publication.as_ref(), source))
}
