//! `/metrics`: names, labels and help texts, filled from the status at each scrape, so that nothing
//! on the way of an event touches a metrics library. The recorder is our own and not the process's:
//! an application that embeds the relay keeps its own.

use metrics::{Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};

use super::histogram::{BOUNDS_MICROS, Histogram};
use super::report::Report;
use super::retention::Figures;
use super::status::Status;
use crate::event::Reason;
use crate::relay::outcome::Doubt;

const META: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// Name, labels and help text of every metric; its type follows from the name.
const HELP: &[(&str, &str, &str)] = &[
    (EVENTS, "destination, stage", "Events by stage: read, sent, acked, recorded"),
    (COMMIT_TO_ACK, "", "From the commit to the ack, on the database's clock"),
    (PUBLISH_DURATION, "destination", "From handing a message over to its ack"),
    (OLDEST, "", "Age of the oldest undecided event, or silence of the database; NaN on a standby"),
    (UNDECIDED_EVENTS, "", "Events read and not decided"),
    (UNDECIDED_BYTES, "", "Bytes of the memory budget in use"),
    (IN_FLIGHT, "destination", "Events sent and not answered"),
    (RETRYING, "destination", "Runs that wait for a retry or a dead letter"),
    (BLOCKED, "destination", "Runs that wait behind a dead letter"),
    (UP, "destination", "1 when the destination is connected and able to publish"),
    (SLOT_RETAINED, "", "WAL that the slot holds back; NaN when the server was not asked lately"),
    (SLOT_ACTIVE, "", "1 while this process reads from the slot"),
    (READY, "", "1 when /readyz says so"),
    (
        UNPUBLISHED,
        "destination",
        "Rows of the table that are not decided, counted by the database up to 100,000; NaN when it was not asked lately",
    ),
    (
        UNPUBLISHED_AGE,
        "destination",
        "Age of the oldest of these; NaN likewise, or without created_at",
    ),
    (PRUNED, "", "Rows that retention removed, with partitions or one by one"),
    (GONE, "", "Rows that retention removed while an optional destination had not decided them"),
    (PARTITIONS, "action", "Partitions made and dropped"),
    (COMPACTED, "", "Receipts merged into others or deleted"),
    (PASSES, "", "Passes of retention that came to their end"),
    (BUSY, "", "Steps of retention left for the next pass, since a lock was not to be had"),
    (MARKED, "", "Rows marked as done, or deleted, by `[source] mark`"),
    (DEAD_LETTERS, "destination, reason", "Events written to outbox.dead_letter"),
    (REDRIVEN, "destination", "Dead letters that were sent again and are in the stream"),
    (DUPLICATES, "destination", "Acks that said the stream had the message already"),
    (UNKNOWN, "destination, cause", "Publish outcomes that only the stream could tell"),
    (RESUMED, "destination", "Undecided events that were found in the stream"),
    (SLOW_RUNS, "destination", "Runs whose events wait in the ledger, as far as memory knows"),
    (
        HOLES,
        "destination",
        "Ranges of undecided numbers that the last pass through the table left; above 10,000 passes become dear",
    ),
    (HANDED, "destination", "Events handed over: they wait in the ledger and the table"),
    (
        SWEPT,
        "destination, outcome",
        "Rows that no WAL brought: missed (found in the table; without a stream that is every row), gone",
    ),
    (FAILURES, "kind", "Failures by kind"),
    (BUILD, "version", "1, with the version"),
];

/// Prometheus' type of a metric.
fn kind(name: &str) -> &'static str {
    match name {
        COMMIT_TO_ACK | PUBLISH_DURATION => "histogram",
        name if name.ends_with("_total") => "counter",
        _ => "gauge",
    }
}

/// The metrics as a Markdown table, for docs/monitoring.md.
pub fn markdown() -> String {
    let mut text = String::from("| metric | type | labels | |\n|---|---|---|---|\n");
    for (name, labels, help) in HELP {
        text.push_str(&format!("| `{name}` | {} | {labels} | {help} |\n", kind(name)));
    }
    text
}

const EVENTS: &str = "outboxd_events_total";
const DEAD_LETTERS: &str = "outboxd_dead_letters_total";
const DUPLICATES: &str = "outboxd_duplicates_total";
const UNKNOWN: &str = "outboxd_unknown_outcomes_total";
const RESUMED: &str = "outboxd_resumed_events_total";
const SLOW_RUNS: &str = "outboxd_slow_runs";
const HANDED: &str = "outboxd_handed_events_total";
const SWEPT: &str = "outboxd_swept_total";
const FAILURES: &str = "outboxd_failures_total";
const OLDEST: &str = "outboxd_oldest_unsettled_seconds";
const UNDECIDED_EVENTS: &str = "outboxd_undecided_events";
const UNDECIDED_BYTES: &str = "outboxd_undecided_bytes";
const IN_FLIGHT: &str = "outboxd_in_flight_events";
const RETRYING: &str = "outboxd_retrying_runs";
const BLOCKED: &str = "outboxd_blocked_runs";
const HOLES: &str = "outboxd_sweep_holes";
const REDRIVEN: &str = "outboxd_redriven_letters_total";
const UP: &str = "outboxd_destination_up";
const SLOT_RETAINED: &str = "outboxd_slot_retained_bytes";
const SLOT_ACTIVE: &str = "outboxd_slot_active";
const READY: &str = "outboxd_ready";
const UNPUBLISHED: &str = "outboxd_unpublished_events";
const UNPUBLISHED_AGE: &str = "outboxd_oldest_unpublished_seconds";
const PRUNED: &str = "outboxd_pruned_rows_total";
const GONE: &str = "outboxd_gone_events_total";
const PARTITIONS: &str = "outboxd_partitions_total";
const COMPACTED: &str = "outboxd_compacted_receipts_total";
const PASSES: &str = "outboxd_retention_passes_total";
const BUSY: &str = "outboxd_retention_busy_total";
const MARKED: &str = "outboxd_marked_rows_total";
const BUILD: &str = "outboxd_build_info";
const COMMIT_TO_ACK: &str = "outboxd_commit_to_ack_seconds";
const PUBLISH_DURATION: &str = "outboxd_publish_duration_seconds";

/// Labels of a metric.
type Labels<'a> = &'a [(&'static str, &'a str)];

/// Turns the status into Prometheus' text.
pub(super) struct Exporter {
    recorder: PrometheusRecorder,
}

impl Exporter {
    pub fn new() -> Exporter {
        let recorder = PrometheusBuilder::new().build_recorder();
        for (name, _, help) in HELP {
            match kind(name) {
                "counter" => recorder.describe_counter((*name).into(), None, (*help).into()),
                "gauge" => recorder.describe_gauge((*name).into(), None, (*help).into()),
                _ => {}
            }
        }
        Exporter { recorder }
    }

    fn count(&self, name: &'static str, labels: Labels<'_>, value: u64) {
        self.recorder.register_counter(&key(name, labels), &META).absolute(value);
    }

    fn gauge(&self, name: &'static str, labels: Labels<'_>, value: f64) {
        self.recorder.register_gauge(&key(name, labels), &META).set(value);
    }

    /// The text at this moment.
    pub fn render(&self, status: &Status) -> String {
        let report = Report::of(status);
        self.relay(status, &report);
        self.destinations(status, &report);
        let handle = self.recorder.handle();
        handle.run_upkeep();
        let mut text = handle.render();
        heading(&mut text, COMMIT_TO_ACK);
        histogram(&mut text, COMMIT_TO_ACK, "", &status.commit_to_ack);
        heading(&mut text, PUBLISH_DURATION);
        for one in status.destinations() {
            // Names of destinations are letters, digits, - and _: nothing to escape.
            let label = format!("destination=\"{}\"", one.name);
            histogram(&mut text, PUBLISH_DURATION, &label, &one.publish_duration);
        }
        text
    }

    fn relay(&self, status: &Status, report: &Report) {
        let flag = |on: bool| f64::from(u8::from(on));
        self.gauge(BUILD, &[("version", &report.version)], 1.0);
        self.gauge(READY, &[], flag(report.ready.ok));
        self.gauge(OLDEST, &[], report.lag_seconds.unwrap_or(f64::NAN));
        self.gauge(UNDECIDED_EVENTS, &[], real(report.undecided.events));
        self.gauge(UNDECIDED_BYTES, &[], real(report.undecided.bytes));
        self.gauge(SLOT_ACTIVE, &[], flag(report.source.slot_active));
        let retained = report.source.slot_retained_bytes.map_or(f64::NAN, real);
        self.gauge(SLOT_RETAINED, &[], retained);
        for (kind, count) in status.failures() {
            self.count(FAILURES, &[("kind", kind.code())], count);
        }
        self.retention(&report.retention);
        self.count(MARKED, &[], status.marked_rows());
    }

    fn retention(&self, figures: &Figures) {
        self.count(PRUNED, &[], figures.rows);
        self.count(GONE, &[], figures.gone);
        self.count(PARTITIONS, &[("action", "made")], figures.partitions_made);
        self.count(PARTITIONS, &[("action", "dropped")], figures.partitions_dropped);
        self.count(COMPACTED, &[], figures.receipts);
        self.count(PASSES, &[], figures.passes);
        self.count(BUSY, &[], figures.busy);
    }

    fn destinations(&self, status: &Status, report: &Report) {
        for (one, shown) in status.destinations().iter().zip(&report.destinations) {
            let name = ("destination", one.name.as_str());
            let totals = one.totals();
            for (stage, count) in [
                ("read", report.read),
                ("sent", totals.sent),
                ("acked", totals.acked),
                ("recorded", totals.recorded),
            ] {
                self.count(EVENTS, &[name, ("stage", stage)], count);
            }
            self.count(DUPLICATES, &[name], totals.duplicates);
            self.count(RESUMED, &[name], totals.resumed);
            self.count(REDRIVEN, &[name], totals.redriven);
            for reason in Reason::ALL.iter().map(|reason| reason.as_str()) {
                let count = totals.dead.get(reason).copied().unwrap_or(0);
                self.count(DEAD_LETTERS, &[name, ("reason", reason)], count);
            }
            for cause in Doubt::ALL.iter().map(|doubt| doubt.as_str()) {
                let count = totals.doubts.get(cause).copied().unwrap_or(0);
                self.count(UNKNOWN, &[name, ("cause", cause)], count);
            }
            let unpublished = shown.unpublished.as_ref();
            let events = unpublished.map_or(f64::NAN, |found| real(found.events));
            let oldest = unpublished.and_then(|found| found.oldest_seconds).unwrap_or(f64::NAN);
            self.gauge(UNPUBLISHED, &[name], events);
            self.gauge(UNPUBLISHED_AGE, &[name], oldest);
            self.gauge(UP, &[name], f64::from(u8::from(shown.up)));
            self.gauge(IN_FLIGHT, &[name], real(shown.in_flight));
            self.gauge(RETRYING, &[name], real(shown.retrying));
            self.gauge(SLOW_RUNS, &[name], real(shown.slow_runs));
            self.count(HANDED, &[name], totals.handed);
            self.count(SWEPT, &[name, ("outcome", "missed")], totals.missed);
            self.count(SWEPT, &[name, ("outcome", "gone")], totals.gone);
            self.gauge(BLOCKED, &[name], real(shown.blocked));
            self.gauge(HOLES, &[name], real(shown.holes));
        }
    }
}

fn key(name: &'static str, labels: Labels<'_>) -> Key {
    let label = |(name, value): &(&'static str, &str)| Label::new(*name, (*value).to_owned());
    Key::from_parts(name, labels.iter().map(label).collect::<Vec<_>>())
}

/// A gauge's value. Prometheus has doubles only; beyond 2^53 the last digits go.
fn real(value: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "the format has no integers")]
    let real = value as f64;
    real
}

fn heading(text: &mut String, name: &str) {
    let help = HELP.iter().find(|(known, _, _)| *known == name).map_or("", |(_, _, help)| help);
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} histogram\n"));
}

fn histogram(text: &mut String, name: &str, label: &str, histogram: &Histogram) {
    let counts = histogram.counts();
    let comma = if label.is_empty() { "" } else { "," };
    let bounds = BOUNDS_MICROS.iter().map(|micros| (real(*micros) / 1e6).to_string());
    let mut sum = 0;
    let mut lines = String::new();
    for (count, bound) in counts.iter().zip(bounds.chain(["+Inf".to_owned()])) {
        sum += count;
        lines.push_str(&format!("{name}_bucket{{{label}{comma}le=\"{bound}\"}} {sum}\n"));
    }
    let label = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
    lines.push_str(&format!("{name}_sum{label} {}\n", histogram.sum().as_secs_f64()));
    lines.push_str(&format!("{name}_count{label} {sum}\n"));
    text.push_str(&lines);
}
