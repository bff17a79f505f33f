//! Rows that were read from the table itself, by the rules for rows of the WAL: the same row gives
//! the same event, but for its position and commit time, which a table does not have.

use hashbrown::HashMap;

use super::frame::{ColumnFrame, Value};
use super::relation::{PerRole, Plan, Shape};
use super::row;
use crate::config::ColumnMap;
use crate::event::Event;

/// A column of the outbox table, as the catalog has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableColumn {
    /// Name.
    pub name: String,
    /// Type.
    pub type_oid: u32,
    /// Schema and name of the type, below all domains.
    pub base_type: (String, String),
}

/// How the rows of a table with these columns become events.
#[derive(Debug)]
pub struct TablePlan {
    plan: Plan,
    complete: bool,
}

/// Types with a lower OID come with every server: the WAL describes only the others.
const FIRST_DESCRIBED_OID: u32 = 10_000;

impl TablePlan {
    /// `columns`: those that the server would stream, in the table's order.
    pub fn new(map: &ColumnMap, columns: &[TableColumn]) -> TablePlan {
        let frames: Vec<ColumnFrame<'_>> = columns
            .iter()
            .map(|column| ColumnFrame { name: column.name.as_bytes(), type_oid: column.type_oid })
            .collect();
        let types: HashMap<u32, Shape> = columns
            .iter()
            .filter(|column| column.type_oid >= FIRST_DESCRIBED_OID)
            .map(|column| {
                let (namespace, name) = &column.base_type;
                (column.type_oid, Shape::of_name(namespace.as_bytes(), name.as_bytes()))
            })
            .collect();
        let plan = Plan::new(map, &frames, &types);
        let optional = [&map.tenant, &map.version, &map.headers, &map.created_at];
        let wanted = 5 + optional.into_iter().flatten().count();
        TablePlan { complete: plan.roles.len() == wanted, plan }
    }

    /// Has the table every column that is asked for, those that may be missing too?
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Places, among the columns given, of those that an event is made of; ascending, each once.
    pub fn wanted(&self) -> Vec<usize> {
        let mut wanted: Vec<usize> = self.plan.roles.iter().map(|(index, _)| *index).collect();
        wanted.dedup();
        wanted
    }

    /// Makes the event of a row from the values of the wanted columns, in their order. What can't
    /// be read is the event's fault; only a row without a number is an error, in words.
    pub fn event(&self, row: &[Value<'_>]) -> Result<Event, String> {
        let mut values: PerRole<Value<'_>> = PerRole::default();
        let mut row = row.iter();
        let mut last = None;
        for (index, role) in &self.plan.roles {
            // One column may play several roles.
            let value = match last {
                Some((before, value)) if before == index => value,
                _ => *row.next().ok_or("the row has fewer columns than were asked for")?,
            };
            last = Some((index, value));
            *values.get_mut(*role) = value;
        }
        row::event(&self.plan, &values, None, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{EventId, Reason};

    fn column(name: &str, type_oid: u32) -> TableColumn {
        let base_type = ("pg_catalog".into(), "text".into());
        TableColumn { name: name.into(), type_oid, base_type }
    }

    #[test]
    fn one_column_may_play_two_roles_and_others_none() {
        let map = ColumnMap { id: "seq".into(), ..ColumnMap::default() };
        let least = ColumnMap {
            tenant: None,
            version: None,
            headers: None,
            created_at: None,
            ..map.clone()
        };
        // 20,000: a domain over text.
        let columns = [
            column("noise", 25),
            column("seq", 20),
            column("run_id", 20_000),
            column("kind", 25),
            column("payload", 17),
        ];
        let plan = TablePlan::new(&map, &columns);
        assert_eq!(plan.wanted(), [1, 2, 3, 4]);
        assert!(!plan.is_complete(), "there is no tenant");
        let row = [
            Value::Binary(&[0, 0, 0, 0, 0, 0, 0, 7]),
            Value::Binary(b"r"),
            Value::Text(b"k"),
            Value::Null,
        ];
        let event = plan.event(&row).unwrap();
        assert_eq!((event.seq, event.id), (7, EventId::Int(7)));
        assert_eq!((event.run.as_deref(), &*event.kind), (Some(&b"r"[..]), &b"k"[..]));
        assert_eq!((event.payload, event.position, event.fault), (None, None, None));
        assert!(plan.event(&row[..3]).is_err());
        assert!(TablePlan::new(&least, &columns).is_complete());
    }

    #[test]
    fn a_missing_column_is_the_fault_of_every_row() {
        let columns = [column("seq", 20), column("id", 25), column("run_id", 25)];
        let plan = TablePlan::new(&ColumnMap::default(), &columns);
        let seq = Value::Binary(&[0, 0, 0, 0, 0, 0, 0, 7]);
        let event = plan.event(&[seq, Value::Text(b"i"), Value::Null]).unwrap();
        let fault = event.fault.unwrap();
        assert_eq!(fault.reason, Reason::Unmappable);
        assert!(fault.detail.contains("`kind` is missing; the table has `seq`"), "{fault:?}");
    }

    #[test]
    fn a_row_without_a_number_is_an_error() {
        let columns = [column("id", 25), column("seq", 20)];
        let plan = TablePlan::new(&ColumnMap::default(), &columns);
        assert!(plan.event(&[Value::Null, Value::Null]).unwrap_err().contains("`seq` is NULL"));
        let plan = TablePlan::new(&ColumnMap::default(), &columns[..1]);
        assert!(plan.event(&[Value::Null]).unwrap_err().contains("`seq` is missing"));
    }
}
