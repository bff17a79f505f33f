//! Passes through the table for rows that the WAL does not bring: when, and what follows from what
//! is found. Decides; the pump asks the database and tells the core.
//!
//! No clock says that a row was missed. A pass looks, under one snapshot, for rows without a receipt;
//! then it commits a marker, and when the WAL brings the marker it has brought all that the snapshot
//! saw, as far as it ever will. What the core does not know then was missed. Without a WAL stream
//! the marker proves only that the rows are durable, and what the core does not know is new.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::event::RunHash;
use crate::lsn::Lsn;
use crate::relay::Relay;
use crate::relay::destination::Destination;
use crate::relay::machine::Input;
use crate::relay::outcome::DestinationId;
use crate::relay::ranges::RangeSet;
use crate::store::destinations::Progress;
use crate::store::rows::Rows;
use crate::store::sweep::{FrontierMark, Look};

/// Between two passes while the table is all there is: what an idle outbox costs then.
const TABLE_EVERY: Duration = Duration::from_millis(250);
/// The same while rows keep coming: each pass commits a marker, and one for each row would be dear.
const TABLE_BUSY: Duration = Duration::from_millis(20);
/// Between two passes while rows are looked for that no WAL brings.
const GAP_EVERY: Duration = Duration::from_millis(500);
/// After a pass that left out what a destination or a run misses that does not go on at the moment.
const SKIPPED_EVERY: Duration = Duration::from_secs(5);
/// After a pass that failed.
const FAILED_EVERY: Duration = Duration::from_secs(10);
/// How often progress is recorded while pass follows pass: it only saves the next start some work.
const SAVE_EVERY: Duration = Duration::from_secs(10);
/// Undecided rows that a pass looks at, for each destination.
pub const LOOK_LIMIT: usize = 10_000;
/// Ranges of holes that a destination's progress may have: about 300 KB of text, and a look that looks
/// each of them up takes half a second.
pub const HOLES_MAX: usize = 10_000;
/// Ranges of rows that are left out because their runs take none, for each destination.
const PARKED_MAX: usize = 100_000;
/// Rows read at once.
const ROWS_AT_ONCE: usize = 1_000;

/// What a pass asks of the database first.
#[derive(Debug)]
pub struct LookRequest {
    /// An earlier mark whose transactions have not all ended.
    pub mark: Option<FrontierMark>,
    /// For each destination: where to begin, and what memory has.
    pub ways: Vec<(Progress, Vec<(i64, i64)>)>,
    /// For the marker.
    pub token: String,
}

/// The answer.
#[derive(Debug)]
pub struct Looked {
    /// A new mark, or what is left of the earlier one.
    pub mark: FrontierMark,
    /// For each destination.
    pub looks: Vec<Look>,
    /// Where the marker was written; `None` when nothing was found.
    pub marker: Option<Lsn>,
}

/// What the pump is to do.
#[derive(Debug)]
pub enum Ask {
    /// Tell the core that a pass begins, then look.
    Look(LookRequest),
    /// Read these rows.
    Rows(Vec<i64>, usize),
    /// Feed these to the core; record progress.
    End(Vec<Input>, Vec<Advance>),
}

/// How far a destination has come, to be recorded.
#[derive(Debug)]
pub struct Advance {
    /// Its progress.
    pub progress: Progress,
    /// The gap is closed by it.
    pub closes_gap: bool,
}

#[derive(Debug)]
enum Stage {
    /// The database is asked.
    Asked,
    /// The WAL has not brought the marker yet.
    Marker,
    /// These rows are to be read, for these destinations.
    Rows(VecDeque<(i64, Vec<DestinationId>)>),
}

#[derive(Debug)]
struct Pass {
    token: String,
    looks: Vec<Look>,
    /// Every number up to it that no row has is void.
    cleared: Option<i64>,
    until: Lsn,
    delivered: bool,
    stage: Stage,
    /// Rows being read, and for whom.
    reading: BTreeMap<i64, Vec<DestinationId>>,
    /// Missed, for each destination.
    found: Vec<usize>,
    /// Their destination does not go on: rows for it would only fill memory.
    skipped: Vec<bool>,
    /// There was no room for all rows.
    cut: bool,
}

/// One destination.
#[derive(Debug)]
struct Way {
    progress: Progress,
    saved: Progress,
    saved_at: Option<Instant>,
    /// Ranges of holes that the last look left, whether progress has them or not.
    holes: usize,
    /// With a gap: the mark that was taken first in this session.
    bridge_to: Option<i64>,
    /// Rows that were refused, for each run that takes none at the moment. They are not looked up
    /// again as long as it takes none, so that they don't hide the rows of others; and nothing of
    /// the run is taken behind them.
    parked: HashMap<RunHash, RangeSet>,
    /// Ranges in all of these.
    parked_ranges: usize,
    /// When the first of them was refused.
    parked_at: Option<Instant>,
}

impl Way {
    fn park(&mut self, now: Instant, run: RunHash, seq: i64) {
        self.parked_at.get_or_insert(now);
        let parked = self.parked.entry(run).or_default();
        if self.parked_ranges < PARKED_MAX {
            let before = parked.range_count();
            parked.insert(seq);
            self.parked_ranges = (self.parked_ranges + parked.range_count()).saturating_sub(before);
        }
    }

    /// Runs that take rows again are looked up again from their first one on; and now and then all
    /// are, since rows can be deleted.
    fn unpark(&mut self, now: Instant, every: Duration, destination: &Destination) {
        if self.parked_at.is_some_and(|at| now >= at + every) {
            self.parked.clear();
            self.parked_at = None;
        }
        self.parked.retain(|run, _| !takes(destination, *run));
        self.parked_ranges = self.parked.values().map(RangeSet::range_count).sum();
    }
}

/// What was handed over before the gap goes first; and a lane that does not go on, or is long, or left
/// memory because it did not, would only fill memory.
fn takes(destination: &Destination, run: RunHash) -> bool {
    let waiting = destination.waiting();
    !waiting.has_old(run) && !waiting.holds(run) && destination.lanes().may_grow(run)
}

/// See the module.
#[derive(Debug)]
pub struct Sweeper {
    every: Duration,
    streaming: bool,
    session: String,
    passes: u64,
    next_at: Instant,
    /// Another pass was asked for while one was under way.
    asked: bool,
    pass: Option<Pass>,
    mark: Option<FrontierMark>,
    ways: Vec<Way>,
}

impl Sweeper {
    /// A session begins; `session` tells its markers from those of others. The first pass is due.
    pub fn new(
        every: Duration,
        streaming: bool,
        session: String,
        progress: Vec<Progress>,
        now: Instant,
    ) -> Sweeper {
        let way = |progress: Progress| Way {
            saved: progress.clone(),
            progress,
            saved_at: None,
            holes: 0,
            bridge_to: None,
            parked: HashMap::new(),
            parked_ranges: 0,
            parked_at: None,
        };
        let ways = progress.into_iter().map(way).collect();
        Sweeper {
            every,
            streaming,
            session,
            passes: 0,
            next_at: now,
            asked: false,
            pass: None,
            mark: None,
            ways,
        }
    }

    /// When time alone brings something to do.
    pub fn wake_at(&self) -> Option<Instant> {
        self.pass.is_none().then_some(self.next_at)
    }

    /// A pass is due now, whatever the schedule says; one that is under way may have looked already.
    pub fn hurry(&mut self, now: Instant) {
        self.next_at = self.next_at.min(now);
        self.asked = self.pass.is_some();
    }

    /// Ranges of holes that the last look left, for each destination. With more than [`HOLES_MAX`]
    /// looks always begin at the same place.
    pub fn holes(&self) -> impl Iterator<Item = (DestinationId, usize)> + '_ {
        (0u16..).map(DestinationId).zip(self.ways.iter().map(|way| way.holes))
    }

    /// The receipt up to which what was handed over is older than a destination's gap.
    pub fn gap(&self, id: DestinationId) -> Option<i64> {
        self.ways.get(usize::from(id.0)).and_then(|way| way.progress.gap)
    }

    /// The next thing to do, if there is one now.
    pub fn next(&mut self, now: Instant, relay: &Relay) -> Option<Ask> {
        if self.pass.is_none() && now >= self.next_at {
            // Finds that memory can't take would only be looked for again.
            if !relay.has_room() {
                self.next_at = now + TABLE_EVERY;
                return None;
            }
            return Some(Ask::Look(self.begin(now, relay)));
        }
        let pass = self.pass.as_mut()?;
        if matches!(pass.stage, Stage::Marker) && (pass.delivered || !self.streaming) {
            let missed = pass.missed(relay);
            pass.stage = Stage::Rows(missed);
        }
        let Stage::Rows(wanted) = &mut pass.stage else { return None };
        if !pass.reading.is_empty() {
            return None;
        }
        if !wanted.is_empty() && relay.has_room() {
            let next = wanted.len().min(ROWS_AT_ONCE);
            pass.reading = wanted.drain(..next).collect();
            return Some(Ask::Rows(pass.reading.keys().copied().collect(), relay.load_bytes()));
        }
        pass.cut = !wanted.is_empty();
        Some(self.end(now, relay))
    }

    fn begin(&mut self, now: Instant, relay: &Relay) -> LookRequest {
        self.passes += 1;
        let token = format!("{}-{}", self.session, self.passes);
        let mut held: Vec<RangeSet> =
            relay.destinations().iter().map(|destination| destination.unrecorded()).collect();
        for ((destination, way), held) in
            relay.destinations().iter().zip(&mut self.ways).zip(&mut held)
        {
            way.unpark(now, self.every, destination);
            way.parked.values().for_each(|parked| held.extend(parked.iter()));
        }
        let ways = self.ways.iter().zip(&held);
        let ways = ways.map(|(way, held)| (way.progress.clone(), held.iter().collect()));
        let request =
            LookRequest { mark: self.mark.take(), ways: ways.collect(), token: token.clone() };
        self.pass = Some(Pass {
            token,
            found: vec![0; held.len()],
            skipped: vec![false; held.len()],
            looks: Vec::new(),
            cleared: None,
            until: Lsn::ZERO,
            delivered: false,
            stage: Stage::Asked,
            reading: BTreeMap::new(),
            cut: false,
        });
        request
    }

    /// The database answered.
    pub fn looked(&mut self, looked: Looked) {
        let Looked { mark, looks, marker } = looked;
        for way in &mut self.ways {
            way.bridge_to.get_or_insert(mark.last);
        }
        let Some(pass) = &mut self.pass else { return };
        pass.looks = looks;
        if mark.open.is_empty() {
            pass.cleared = Some(mark.last);
        } else {
            self.mark = Some(mark);
        }
        match marker {
            Some(lsn) => {
                pass.until = lsn;
                pass.stage = Stage::Marker;
            }
            None => pass.stage = Stage::Rows(VecDeque::new()),
        }
    }

    /// The WAL brought a marker of this relay.
    pub fn delivered(&mut self, token: &str) {
        if let Some(pass) = self.pass.as_mut().filter(|pass| pass.token == token) {
            pass.delivered = true;
        }
    }

    /// Rows that were asked for: what the core is to be told.
    pub fn rows(&mut self, now: Instant, rows: Rows, relay: &Relay) -> Vec<Input> {
        let Some(pass) = &mut self.pass else { return Vec::new() };
        let mut reading = std::mem::take(&mut pass.reading);
        let asked: Vec<i64> = reading.keys().copied().collect();
        let mut inputs = Vec::new();
        for event in rows.events {
            for destination in reading.remove(&event.seq).unwrap_or_default() {
                let index = usize::from(destination.0);
                let run = event.run_hash;
                let (Some(way), Some(each)) =
                    (self.ways.get_mut(index), relay.destinations().get(index))
                else {
                    continue;
                };
                if way.parked.contains_key(&run) || !takes(each, run) {
                    way.park(now, run, event.seq);
                    continue;
                }
                add(&mut pass.found, index);
                let (event, until) = (event.clone(), pass.until);
                inputs.push(Input::Missed { destination, event, until });
            }
        }
        // Those that were not looked up for want of room come next; a row that is not there any
        // more was deleted.
        if let Stage::Rows(wanted) = &mut pass.stage {
            let left = asked.iter().skip(rows.looked_up).rev();
            let left = left.filter_map(|seq| reading.remove_entry(seq));
            left.for_each(|one| wanted.push_front(one));
        }
        inputs
    }

    /// The database could not be asked.
    pub fn failed(&mut self, now: Instant) {
        self.pass = None;
        self.next_at = now + FAILED_EVERY;
    }

    fn end(&mut self, now: Instant, relay: &Relay) -> Ask {
        let mut inputs = vec![Input::SweepEnds];
        let mut advances = Vec::new();
        let Some(pass) = self.pass.take() else { return Ask::End(inputs, advances) };
        let mut again = pass.cut || std::mem::take(&mut self.asked);
        let (mut bridging, mut waits, mut busy) = (false, false, false);
        let places = relay.destinations().iter().zip(0u16..).zip(&mut self.ways);
        let counts = pass.found.iter().zip(&pass.skipped);
        let finds = pass.looks.iter().zip(counts);
        for (((destination, id), way), (look, (found, skipped))) in places.zip(finds) {
            way.holes = take(&mut way.progress, look, pass.cleared);
            let all = !pass.cut && look.covered_to >= look.to && !skipped;
            // Full of rows that there is no room to remember, the next look would be the same.
            again |= !all && !skipped && (*found > 0 || way.parked_ranges < PARKED_MAX);
            busy |= *found > 0;
            let bridged_to = way.bridge_to.filter(|to| pass.cleared.is_some_and(|at| at >= *to));
            let waiting = destination.waiting();
            let open = waiting.is_bridging() || waiting.missing_runs() > 0;
            if open && self.streaming {
                again |= *found > 0;
                if all && bridged_to.is_some() {
                    let but = way.parked.keys().copied().collect();
                    inputs.push(Input::Bridged(DestinationId(id), but));
                }
            }
            let closes_gap = self.streaming
                && !waiting.is_bridging()
                && way.progress.gap.is_some()
                && bridged_to.is_some_and(|to| is_settled(&way.progress, to));
            way.progress.gap = way.progress.gap.filter(|_| !closes_gap);
            // Bridged is not closed: what is handed over until then is taken back by another gap. Rows
            // of runs that take none can wait.
            if open || way.progress.gap.is_some() {
                let lanes = destination.lanes();
                let go = lanes.missed_runs().any(|run| !lanes.stands(run));
                bridging |= go || way.parked.is_empty();
                waits = true;
            }
            let saved_long_ago = way.saved_at.is_none_or(|at| now >= at + SAVE_EVERY);
            if way.progress != way.saved && (closes_gap || saved_long_ago) {
                way.saved = way.progress.clone();
                way.saved_at = Some(now);
                advances.push(Advance { progress: way.progress.clone(), closes_gap });
            }
        }
        let pause = match (self.streaming, bridging) {
            _ if again && relay.has_room() => Duration::ZERO,
            (false, _) if busy => TABLE_BUSY,
            (false, _) => TABLE_EVERY,
            (true, true) => GAP_EVERY,
            (true, false) if waits || pass.skipped.contains(&true) => self.every.min(SKIPPED_EVERY),
            (true, false) => self.every,
        };
        self.next_at = now + pause;
        Ask::End(inputs, advances)
    }
}

impl Pass {
    /// Rows to read: in the order of their numbers, each once.
    fn missed(&mut self, relay: &Relay) -> VecDeque<(i64, Vec<DestinationId>)> {
        let mut wanted: BTreeMap<i64, Vec<DestinationId>> = BTreeMap::new();
        let looks = self.looks.iter().zip(&mut self.skipped);
        for ((destination, id), (look, skipped)) in
            relay.destinations().iter().zip(0u16..).zip(looks)
        {
            if !destination.goes_on() {
                *skipped = !look.undecided.is_empty();
                continue;
            }
            for seq in destination.missed(&look.undecided) {
                wanted.entry(seq).or_default().push(DestinationId(id));
            }
        }
        wanted.into_iter().collect()
    }
}

/// After a look: every number up to the look's end is decided, void, or a hole.
///
/// Void is only what no row has up to `cleared`, and up to where the look came if it was cut. Above
/// that a number without a row may still get one, and is a hole. With too many of them the next look
/// begins where this one did. Says how many ranges of holes there are.
///
/// Of what memory held only that is a hole which had no receipt when the look was taken: later looks
/// don't read the receipts that this one saw.
fn take(progress: &mut Progress, look: &Look, cleared: Option<i64>) -> usize {
    let proven = cleared.map_or(i64::MIN, |cleared| cleared.min(look.covered_to));
    let mut holes: RangeSet = look.held.iter().copied().collect();
    holes.extend(look.undecided.iter().map(|seq| (*seq, *seq)));
    let above = look.open.iter().filter(|(_, end)| *end > proven);
    holes.extend(above.map(|(start, end)| ((*start).max(proven.saturating_add(1)), *end)));
    let upto = |(start, end): (i64, i64)| (start <= look.to).then_some((start, end.min(look.to)));
    let holes: Vec<(i64, i64)> = holes.iter().filter_map(upto).collect();
    let count = holes.len();
    // Fewer would have to hold numbers that are decided, and their rows would be taken for finds.
    if count <= HOLES_MAX {
        progress.holes = holes;
        progress.frontier = look.to;
        progress.receipt_id = look.receipt_id;
    }
    count
}

/// Is every number up to this one in a receipt, or void?
fn is_settled(progress: &Progress, to: i64) -> bool {
    progress.frontier >= to && progress.holes.first().is_none_or(|(start, _)| *start > to)
}

fn add(counts: &mut [usize], index: usize) {
    if let Some(count) = counts.get_mut(index) {
        *count += 1;
    }
}

#[cfg(test)]
mod tests;
