//! What is left of a job, row by row: numbers from the list that the server keeps, their rows from
//! the table. Numbers whose rows are not there any more are counted.

use std::collections::VecDeque;

use hashbrown::{HashMap, HashSet};
use tokio_postgres::Client;

use crate::error::Failure;
use crate::event::Event;
use crate::store::Store;
use crate::store::replay::select;

/// Numbers that are asked for at once.
const NUMBERS: usize = 1_000;
/// Bytes of rows that are read ahead.
const BYTES: usize = 1 << 20;

/// See the module.
#[derive(Debug, Default)]
pub struct Feed {
    /// Numbers whose rows are not read yet, each with the first number that is done with it.
    numbers: VecDeque<(i64, i64)>,
    events: VecDeque<Event>,
    /// Numbers that were handed out, with the first number that is done with each.
    pub out: HashMap<i64, i64>,
    /// Ranges of numbers whose rows are gone.
    pub gone: Vec<(i64, i64)>,
    at_end: bool,
}

impl Feed {
    /// Was everything handed out?
    pub fn is_over(&self) -> bool {
        self.at_end && self.numbers.is_empty() && self.events.is_empty()
    }

    /// The next event; `None` at the end.
    pub async fn next(&mut self, client: &Client, store: &Store) -> Result<Option<Event>, Failure> {
        while self.events.is_empty() {
            if self.numbers.is_empty() && !self.at_end {
                let numbers = select::next(client, NUMBERS).await?;
                self.at_end = numbers.len() < NUMBERS;
                self.numbers.extend(numbers);
            }
            if self.numbers.is_empty() {
                return Ok(None);
            }
            self.read(client, store).await?;
        }
        Ok(self.events.pop_front())
    }

    async fn read(&mut self, client: &Client, store: &Store) -> Result<(), Failure> {
        let seqs: Vec<i64> = self.numbers.iter().map(|(seq, _)| *seq).collect();
        let rows = store.rows_bounded(client, &seqs, BYTES).await?;
        let looked_up = self.numbers.drain(..rows.looked_up.min(self.numbers.len()));
        self.out.extend(looked_up);
        let there: HashSet<i64> = rows.events.iter().map(|event| event.seq).collect();
        for seq in seqs.into_iter().take(rows.looked_up).filter(|seq| !there.contains(seq)) {
            let range = self.range(seq);
            self.gone.push(range);
        }
        self.events.extend(rows.events);
        Ok(())
    }

    /// The range that is done with this number.
    pub fn range(&mut self, seq: i64) -> (i64, i64) {
        (self.out.remove(&seq).unwrap_or(seq), seq)
    }
}
