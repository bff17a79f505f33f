//! How far the outbox was looked through for each destination: rows of `outbox.destination`. Serves
//! the sweeper alone; whether an event is done, only receipts say.

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Statement};

use super::sql::{multirange, parse_multirange};
use super::sweep::FrontierMark;
use super::{Store, failed, unexpected};
use crate::error::Failure;

/// Where a destination's next sweep begins.
///
/// Every number up to `frontier` that is not in `holes` is in a receipt (final or handed), or no
/// visible row has it and none ever will.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Name of the destination.
    pub name: String,
    /// Numbers up to this one were looked at.
    pub frontier: i64,
    /// Inclusive ranges up to the frontier that may have rows without a receipt, ascending.
    pub holes: Vec<(i64, i64)>,
    /// Receipts up to this id are in frontier and holes already.
    pub receipt_id: i64,
    /// Rows were committed that no slot will bring, and not all of them were sent. What receipts up
    /// to this id handed over is older than those rows.
    pub gap: Option<i64>,
}

const MISSING: &str = "\
    SELECT w.name, w.required, coalesce((SELECT max(r.id) FROM outbox.receipt AS r \
               WHERE r.relay = $1::text AND r.destination = w.name), 0) \
    FROM unnest($2::text[], $3::bool[]) WITH ORDINALITY AS w (name, required, place) \
    WHERE NOT EXISTS (SELECT FROM outbox.destination AS d \
                      WHERE d.relay = $1::text AND d.name = w.name) \
    ORDER BY w.place";

const ADD: &str = "\
    INSERT INTO outbox.destination (relay, name, required, receipt_id, frontier, began_after) \
    SELECT $1::text, w.name, w.required, w.receipt_id, $5::int8, $5::int8 \
    FROM unnest($2::text[], $3::bool[], $4::int8[]) AS w (name, required, receipt_id) \
    ON CONFLICT (relay, name) DO NOTHING";

// One that comes back has missed what was committed meanwhile.
const COMES_BACK: &str = "\
    SELECT outbox.open_gap(d.relay, d.name) FROM outbox.destination AS d \
    WHERE d.relay = $1::text AND d.name = ANY ($2::text[]) AND NOT d.active";

const SET: &str = "\
    UPDATE outbox.destination AS d \
    SET active = n.active, required = n.required, updated_at = now() \
    FROM (SELECT o.name, w.name IS NOT NULL AS active, coalesce(w.required, o.required) AS required \
          FROM outbox.destination AS o \
               LEFT JOIN unnest($2::text[], $3::bool[]) AS w (name, required) ON w.name = o.name \
          WHERE o.relay = $1::text) AS n \
    WHERE d.relay = $1::text AND d.name = n.name \
      AND (d.active, d.required) IS DISTINCT FROM (n.active, n.required)";

const PROGRESS: &str = "\
    SELECT d.name, d.frontier, d.holes::text, d.receipt_id, d.gap_receipt \
    FROM unnest($2::text[]) WITH ORDINALITY AS w (name, place) \
         JOIN outbox.destination AS d ON d.relay = $1::text AND d.name = w.name \
    ORDER BY w.place";

const OPEN_GAP: &str = "SELECT outbox.open_gap($1::text, name) FROM unnest($2::text[]) AS name";

const CLOSE_GAP: &str = "\
    UPDATE outbox.destination SET gap_since = NULL, gap_receipt = NULL, updated_at = now() \
    WHERE relay = $1::text AND name = $2::text AND gap_since IS NOT NULL";

const ADVANCE: &str = "\
    UPDATE outbox.destination \
    SET frontier = $3::int8, holes = $4::text::int8multirange, receipt_id = $5::int8, \
        updated_at = now() \
    WHERE relay = $1::text AND name = $2::text \
      AND (frontier, holes, receipt_id) \
          IS DISTINCT FROM ($3::int8, $4::text::int8multirange, $5::int8)";

/// The statements of this file.
#[derive(Debug)]
pub(super) struct Statements {
    missing: Statement,
    add: Statement,
    comes_back: Statement,
    set: Statement,
    progress: Statement,
    open_gap: Statement,
    close_gap: Statement,
    advance: Statement,
}

impl Statements {
    pub(super) async fn prepare(client: &Client) -> Result<Statements, tokio_postgres::Error> {
        let (missing, add, comes_back, set, progress, open_gap, close_gap, advance) = tokio::try_join!(
            client.prepare(MISSING),
            client.prepare(ADD),
            client.prepare(COMES_BACK),
            client.prepare(SET),
            client.prepare(PROGRESS),
            client.prepare(OPEN_GAP),
            client.prepare(CLOSE_GAP),
            client.prepare(ADVANCE),
        )?;
        Ok(Statements { missing, add, comes_back, set, progress, open_gap, close_gap, advance })
    }
}

impl Store {
    /// [`Store::ensure_destinations`] where no slot brings what is not committed yet: before a
    /// destination begins, everybody has ended who may commit a row below its beginning.
    pub async fn begin_destinations(
        &self,
        client: &Client,
        destinations: &[(&str, bool)],
    ) -> Result<Vec<Progress>, Failure> {
        self.ensure(client, destinations, true).await
    }

    /// The progress of these destinations (name, required), in this order. One without a row gets
    /// it: it begins at the sequence's last value, with what is written from now on. Those that
    /// are not named become inactive. Writes nothing when nothing changes.
    pub async fn ensure_destinations(
        &self,
        client: &Client,
        destinations: &[(&str, bool)],
    ) -> Result<Vec<Progress>, Failure> {
        self.ensure(client, destinations, false).await
    }

    async fn ensure(
        &self,
        client: &Client,
        destinations: &[(&str, bool)],
        after_writers: bool,
    ) -> Result<Vec<Progress>, Failure> {
        let ours = &self.destinations;
        let fault = |error: &_| failed("cannot record the destinations", error);
        let (names, required): (Vec<&str>, Vec<bool>) = destinations.iter().copied().unzip();
        let missing = client.query(&ours.missing, &[&self.relay, &names, &required]).await;
        let missing = missing.map_err(|error| fault(&error))?;
        if !missing.is_empty() {
            // After the receipts were looked at: those that there were are about numbers that the
            // sequence had given by then.
            let last = match after_writers {
                false => self.last_number(client).await?,
                true => self.settled_number(client).await?,
            };
            let add = async {
                let (mut names, mut required, mut receipts) = (Vec::new(), Vec::new(), Vec::new());
                for row in &missing {
                    names.push(row.try_get::<_, &str>(0)?);
                    required.push(row.try_get::<_, bool>(1)?);
                    receipts.push(row.try_get::<_, i64>(2)?);
                }
                let values: [&(dyn ToSql + Sync); 5] =
                    [&self.relay, &names, &required, &receipts, &last];
                client.execute(&ours.add, &values).await
            };
            add.await.map_err(|error| fault(&error))?;
        }
        let set = async {
            client.execute(&ours.comes_back, &[&self.relay, &names]).await?;
            client.execute(&ours.set, &[&self.relay, &names, &required]).await
        };
        set.await.map_err(|error| fault(&error))?;
        self.progress(client, &names).await
    }

    /// The sequence's last value, when everybody has ended who may commit a row up to it.
    async fn settled_number(&self, client: &Client) -> Result<i64, Failure> {
        let FrontierMark { last, open } = self.mark_frontier(client).await?;
        if !open.is_empty() {
            tracing::info!(
                transactions = open.len(),
                "a destination begins when the transactions that write to the outbox now have ended"
            );
        }
        self.all_ended(client, open).await?;
        Ok(last)
    }

    /// The progress of these destinations, in this order; those without a row are left out.
    pub async fn progress(
        &self,
        client: &Client,
        names: &[&str],
    ) -> Result<Vec<Progress>, Failure> {
        let rows = client.query(&self.destinations.progress, &[&self.relay, &names]).await;
        let rows = rows.map_err(|error| failed("cannot read the destinations", &error))?;
        rows.iter().map(progress).collect()
    }

    /// From now on what the WAL brings for these destinations waits: rows were committed that no
    /// slot will bring. What was handed over until now goes ahead of those rows; where a gap is open
    /// already, what was handed over in it is taken back, to be found as a row that is missing.
    pub async fn open_gap(&self, client: &Client, names: &[&str]) -> Result<(), Failure> {
        let values: [&(dyn ToSql + Sync); 2] = [&self.relay, &names];
        let opened = client.execute(&self.destinations.open_gap, &values).await;
        opened.map(drop).map_err(|error| failed("cannot record a gap", &error))
    }

    /// Every row of the gap is sent.
    pub async fn close_gap(&self, client: &Client, name: &str) -> Result<(), Failure> {
        let closed = client.execute(&self.destinations.close_gap, &[&self.relay, &name]).await;
        closed.map(drop).map_err(|error| failed("cannot record the end of a gap", &error))
    }

    /// Records how far a sweep came: [`Progress`] says what must hold for it. Writes nothing when
    /// nothing changes.
    pub async fn advance(&self, client: &Client, progress: &Progress) -> Result<(), Failure> {
        let Progress { name, frontier, holes, receipt_id, .. } = progress;
        let holes = multirange(holes);
        let values: [&(dyn ToSql + Sync); 5] = [&self.relay, name, frontier, &holes, receipt_id];
        let advanced = client.execute(&self.destinations.advance, &values).await;
        advanced.map(drop).map_err(|error| failed("cannot record how far a sweep came", &error))
    }
}

fn progress(row: &Row) -> Result<Progress, Failure> {
    let read = || {
        let holes: String = row.try_get(2)?;
        let progress = Progress {
            name: row.try_get(0)?,
            frontier: row.try_get(1)?,
            holes: Vec::new(),
            receipt_id: row.try_get(3)?,
            gap: row.try_get(4)?,
        };
        Ok((progress, holes))
    };
    let (progress, text) =
        read().map_err(|error| failed("cannot read the destinations", &error))?;
    let holes = parse_multirange(&text)
        .ok_or_else(|| unexpected(format_args!("destination with holes {text}")))?;
    Ok(Progress { holes, ..progress })
}
