//! An inserted row to an event. Owns the rules of what every event must have; what is broken in a
//! row becomes its fault, so that the row is dead-lettered in its turn and stops nothing.

use bytes::Bytes;

use super::frame::Value;
use super::quote::quote;
use super::relation::{Column, PerRole, Plan};
use super::value::{self, Part};
use crate::event::{Event, EventId, Fault, Reason, RunHash, UnixMicros};
use crate::lsn::Position;

/// The first thing that is wrong with a row.
#[derive(Default)]
struct Faults(Option<Fault>);

impl Faults {
    fn add(&mut self, column: &Column, words: &str) {
        self.0.get_or_insert_with(|| {
            Fault::new(
                Reason::Unmappable,
                format!("column {} {words}", quote(column.name.as_bytes())),
            )
        });
    }

    /// Reads a column if the relation has it; an unreadable value is a fault and nothing.
    fn read<'a, T>(
        &mut self,
        column: Option<&Column>,
        value: Value<'a>,
        read: impl FnOnce(&Column, Value<'a>) -> Result<Option<T>, String>,
    ) -> Option<T> {
        let column = column?;
        read(column, value).unwrap_or_else(|words| {
            self.add(column, &words);
            None
        })
    }
}

/// Makes the event. Without a sequence number the row can't be accounted for: the words are the
/// error then.
pub(super) fn event(
    plan: &Plan,
    values: &PerRole<Value<'_>>,
    position: Option<Position>,
    committed_at: Option<UnixMicros>,
) -> Result<Event, String> {
    let seq = sequence(plan, values.seq)?;
    let columns = &plan.columns;
    let mut faults = Faults(plan.fault.clone());

    let id = columns.id.as_ref().and_then(|column| {
        value::identity(column, values.id).map_err(|words| faults.add(column, &words)).ok()
    });
    let run = faults.read(columns.run.as_ref(), values.run, value::word);
    let kind =
        faults.read(columns.kind.as_ref(), values.kind, |column, value| {
            match value::word(column, value)? {
                Some(part) if part.len() > 0 => Ok(Some(part)),
                Some(_) => Err("is empty".to_owned()),
                None => Err("is NULL".to_owned()),
            }
        });
    let tenant = faults.read(columns.tenant.as_ref(), values.tenant, value::word);
    let version = faults.read(columns.version.as_ref(), values.version, |column, value| {
        let out_of_range = |number: i64| format!("is {number}, beyond 32 bits");
        let narrow = |number| i32::try_from(number).map_err(|_| out_of_range(number));
        value::integer(column, value)?.map(narrow).transpose()
    });
    let payload = faults.read(columns.payload.as_ref(), values.payload, value::body);
    let headers = faults.read(columns.headers.as_ref(), values.headers, value::document);
    let created_at = faults.read(columns.created_at.as_ref(), values.created_at, value::instant);

    let [run, kind, tenant, payload, headers] = copy([run, kind, tenant, payload, headers]);
    Ok(Event {
        seq,
        position,
        id: id.unwrap_or_else(|| EventId::Text("".into())),
        run_hash: run.as_deref().map_or_else(|| RunHash::of_seq(seq), RunHash::of_run),
        run,
        kind: kind.unwrap_or_default(),
        tenant,
        version,
        payload,
        headers,
        created_at,
        committed_at,
        fault: faults.0,
    })
}

fn sequence(plan: &Plan, value: Value<'_>) -> Result<i64, String> {
    let Some(column) = &plan.columns.seq else {
        return Err(plan.no_seq.clone().unwrap_or_default());
    };
    let words = match value::integer(column, value) {
        Ok(Some(seq)) => return Ok(seq),
        Ok(None) => "is NULL".to_owned(),
        Err(words) => words,
    };
    Err(format!("column {} {words}", quote(column.name.as_bytes())))
}

/// Copies the parts into one buffer of exactly their size and returns its slices.
fn copy<const N: usize>(parts: [Option<Part<'_>>; N]) -> [Option<Bytes>; N] {
    let size = parts.iter().flatten().map(Part::len).sum();
    let mut buffer = Vec::with_capacity(size);
    for part in parts.iter().flatten() {
        part.copy_to(&mut buffer);
    }
    let mut rest = Bytes::from(buffer);
    parts.map(|part| part.map(|part| rest.split_to(part.len().min(rest.len()))))
}
