//! What this connection was told of relations and types. Owns the way from a relation's columns to
//! the roles they play in an event; reads no row.

use hashbrown::HashMap;

use super::frame::{ColumnFrame, RelationFrame};
use super::quote::quote;
use crate::config::{ColumnMap, QualifiedName};
use crate::event::{Fault, Reason};

/// How a type's values are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Int2,
    Int4,
    Int8,
    Uuid,
    Text,
    /// `character(n)`: trailing blanks mean nothing.
    Bpchar,
    Json,
    Jsonb,
    Bytea,
    Timestamptz,
    Timestamp,
    /// A type that PostgreSQL doesn't ship: an enum, or of an extension. Both are sent as text or
    /// as something that is visibly no text.
    Foreign,
    /// A known type that no column of an outbox has.
    Other,
}

impl Shape {
    /// Types have fixed OIDs below 10,000 (`pg_type.dat`).
    fn of_oid(oid: u32) -> Shape {
        match oid {
            21 => Shape::Int2,
            23 => Shape::Int4,
            20 => Shape::Int8,
            2950 => Shape::Uuid,
            25 | 1043 | 19 => Shape::Text,
            1042 => Shape::Bpchar,
            114 => Shape::Json,
            3802 => Shape::Jsonb,
            17 => Shape::Bytea,
            1184 => Shape::Timestamptz,
            1114 => Shape::Timestamp,
            _ => Shape::Other,
        }
    }

    /// A Type frame names the base type of a domain; types of `pg_catalog` have no namespace in it.
    pub(super) fn of_name(namespace: &[u8], name: &[u8]) -> Shape {
        if !namespace.is_empty() && namespace != b"pg_catalog" {
            return Shape::Foreign;
        }
        match name {
            b"int2" => Shape::Int2,
            b"int4" => Shape::Int4,
            b"int8" => Shape::Int8,
            b"uuid" => Shape::Uuid,
            b"text" | b"varchar" | b"name" => Shape::Text,
            b"bpchar" => Shape::Bpchar,
            b"json" => Shape::Json,
            b"jsonb" => Shape::Jsonb,
            b"bytea" => Shape::Bytea,
            b"timestamptz" => Shape::Timestamptz,
            b"timestamp" => Shape::Timestamp,
            _ => Shape::Other,
        }
    }
}

/// Something for each part of an event.
#[derive(Debug, Default)]
pub(super) struct PerRole<T> {
    pub(super) seq: T,
    pub(super) id: T,
    pub(super) run: T,
    pub(super) kind: T,
    pub(super) payload: T,
    pub(super) tenant: T,
    pub(super) version: T,
    pub(super) headers: T,
    pub(super) created_at: T,
}

/// Names a field of [`PerRole`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Seq,
    Id,
    Run,
    Kind,
    Payload,
    Tenant,
    Version,
    Headers,
    CreatedAt,
}

impl<T> PerRole<T> {
    pub(super) fn get_mut(&mut self, role: Role) -> &mut T {
        match role {
            Role::Seq => &mut self.seq,
            Role::Id => &mut self.id,
            Role::Run => &mut self.run,
            Role::Kind => &mut self.kind,
            Role::Payload => &mut self.payload,
            Role::Tenant => &mut self.tenant,
            Role::Version => &mut self.version,
            Role::Headers => &mut self.headers,
            Role::CreatedAt => &mut self.created_at,
        }
    }
}

/// A column that plays a role.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) type_oid: u32,
}

/// How the rows of a relation with certain columns become events.
#[derive(Debug)]
pub(super) struct Plan {
    /// Columns of the relation, with or without a role.
    pub(super) width: usize,
    /// Which columns fill which roles, in column order. A column may fill several.
    pub(super) roles: Vec<(usize, Role)>,
    /// The columns by role; `None` where the relation has no such column.
    pub(super) columns: PerRole<Option<Column>>,
    /// Set when a required column other than `seq` is missing: no row can become a message.
    pub(super) fault: Option<Fault>,
    /// Set when `seq` is missing: rows can't even be told apart.
    pub(super) no_seq: Option<String>,
}

impl Plan {
    pub(super) fn new(
        map: &ColumnMap,
        relation: &[ColumnFrame<'_>],
        types: &HashMap<u32, Shape>,
    ) -> Plan {
        let wanted = [
            (Role::Seq, Some(&map.seq)),
            (Role::Id, Some(&map.id)),
            (Role::Run, Some(&map.run)),
            (Role::Kind, Some(&map.kind)),
            (Role::Payload, Some(&map.payload)),
            (Role::Tenant, map.tenant.as_ref()),
            (Role::Version, map.version.as_ref()),
            (Role::Headers, map.headers.as_ref()),
            (Role::CreatedAt, map.created_at.as_ref()),
        ];
        let mut plan = Plan {
            width: relation.len(),
            roles: Vec::with_capacity(wanted.len()),
            columns: PerRole::default(),
            fault: None,
            no_seq: None,
        };
        for (role, name) in wanted {
            let Some(name) = name else { continue };
            let found = relation.iter().position(|column| column.name == name.as_bytes());
            let found = found.and_then(|index| Some((index, relation.get(index)?)));
            if let Some((index, ColumnFrame { type_oid, .. })) = found {
                let fixed = Shape::of_oid(*type_oid);
                let shape = types.get(type_oid).copied().unwrap_or(fixed);
                *plan.columns.get_mut(role) =
                    Some(Column { name: name.clone(), shape, type_oid: *type_oid });
                plan.roles.push((index, role));
                continue;
            }
            match role {
                Role::Seq => plan.no_seq = Some(missing(name, relation)),
                Role::Id | Role::Run | Role::Kind | Role::Payload => {
                    plan.fault.get_or_insert_with(|| {
                        Fault::new(Reason::Unmappable, missing(name, relation))
                    });
                }
                Role::Tenant | Role::Version | Role::Headers | Role::CreatedAt => {}
            }
        }
        plan.roles.sort_by_key(|(index, _)| *index);
        plan
    }
}

fn missing(name: &str, relation: &[ColumnFrame<'_>]) -> String {
    let mut has = String::new();
    for column in relation {
        has.push_str(if has.is_empty() { "" } else { ", " });
        // The detail stays bounded: a table may have 1,600 columns of 63 bytes.
        if has.len() > 300 {
            has.push('…');
            break;
        }
        has.push_str(&quote(column.name));
    }
    format!("column {} is missing; the table has {has}", quote(name.as_bytes()))
}

/// Everything this connection was told. Tables other than the outbox cost an entry without
/// columns each, so that a publication FOR ALL TABLES stays cheap.
#[derive(Debug)]
pub(super) struct Relations {
    table: QualifiedName,
    map: ColumnMap,
    types: HashMap<u32, Shape>,
    relations: HashMap<u32, Option<Box<Plan>>>,
}

impl Relations {
    pub(super) fn new(table: QualifiedName, map: ColumnMap) -> Relations {
        Relations { table, map, types: HashMap::new(), relations: HashMap::new() }
    }

    /// A Type frame precedes the Relation frames that use the type.
    pub(super) fn learn_type(&mut self, oid: u32, namespace: &[u8], name: &[u8]) {
        self.types.insert(oid, Shape::of_name(namespace, name));
    }

    /// The frame replaces what was known under its OID: later rows have these columns.
    pub(super) fn learn(&mut self, frame: &RelationFrame<'_>) {
        let outbox = frame.namespace == self.table.schema.as_bytes()
            && frame.name == self.table.name.as_bytes();
        let plan = outbox.then(|| Box::new(Plan::new(&self.map, &frame.columns, &self.types)));
        self.relations.insert(frame.oid, plan);
    }

    /// The outbox's plan, or `None` for another table. A relation that was never announced could
    /// be the outbox: no row of it can be passed over.
    pub(super) fn get(&self, oid: u32) -> Result<Option<&Plan>, String> {
        match self.relations.get(&oid) {
            Some(plan) => Ok(plan.as_deref()),
            None => Err(format!("relation OID {oid} was not announced on this connection")),
        }
    }
}
