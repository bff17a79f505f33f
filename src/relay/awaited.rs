//! Messages of ours that Resume saw in the stream while the table does not show their rows: the row
//! was deleted (in the transaction that inserted it, perhaps), or its commit waits for a synchronous
//! standby and is not visible yet. The WAL decides: when it brings that very event, the event is in
//! the stream already. Until then the floor stays below them.

use hashbrown::HashMap;

use crate::event::Event;
use crate::lsn::Lsn;
use crate::relay::outcome::Found;

/// See the module. By number; within one generation that is one event.
#[derive(Debug, Default)]
pub struct Awaited(HashMap<i64, Found>);

impl Awaited {
    /// One more.
    pub fn insert(&mut self, found: Found) {
        self.0.insert(found.seq, found);
    }

    /// Is this event one of them? It is not awaited any longer then. Ids are compared as text: one
    /// of digits is read back as an integer whatever the column's type is.
    pub fn take(&mut self, event: &Event) -> bool {
        !self.0.is_empty()
            && self
                .0
                .remove(&event.seq)
                .is_some_and(|found| found.id.to_string() == event.id.to_string())
    }

    /// The same for an event of which only the number is left.
    pub fn take_number(&mut self, seq: i64) -> bool {
        self.0.remove(&seq).is_some()
    }

    /// WAL from `confirmable` on brings nothing that committed below, nor what has no commit LSN: a
    /// message of a row that was read from the table.
    pub fn forget_below(&mut self, confirmable: Lsn) {
        self.0.retain(|_, found| found.commit_lsn.is_some_and(|lsn| lsn >= confirmable));
    }

    /// Another stream: what was seen in the old one says nothing.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// How far a floor may go.
    pub fn floor(&self) -> Option<u64> {
        self.0.values().map(|found| found.stream_seq.saturating_sub(1)).min()
    }
}
