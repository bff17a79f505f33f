//! What the parts found out, as a page: figures, targets, and which of them are missed.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::args::Args;
use crate::figures::Spread;
use crate::{Result, machine, plots};

/// What is written by hand below this line survives the next run.
const BY_HAND: &str = "<!-- Below this line the page is written by hand and kept. -->";

/// A machine that is busier than that on its own account is not one to measure on.
const LOAD_MAX: f64 = 0.5;

/// See the module.
pub struct Report {
    machine: Vec<(&'static str, String)>,
    sections: Vec<Section>,
    checks: Vec<Check>,
    notes: Vec<String>,
    /// The drain that the others are compared with.
    pub drained: Option<Drained>,
    pub drain_curves: Vec<Curve>,
    /// Percent of events from 0 up to below 100, and milliseconds.
    pub latency_curves: Vec<Curve>,
    /// Events per second, and milliseconds.
    pub rate_curves: Vec<Curve>,
}

/// A drain with 100 rows per transaction, the first pipeline, over the Unix socket.
#[derive(Debug, Clone, Copy)]
pub struct Drained {
    /// Events per second.
    pub rate: f64,
    /// Microseconds per event: relay, walsender, nats-server.
    pub cpu: [Spread; 3],
    /// Of the relay.
    pub peak_mib: Spread,
}

/// A line of a plot.
#[derive(Debug, Clone)]
pub struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// What belongs together has one colour.
    pub colour: usize,
    /// What the relay is compared with.
    pub dashed: bool,
}

impl Curve {
    /// Thousands of events per second over seconds, from counts: each point is the mean since the
    /// one before it.
    pub fn of_rate(name: &str, counts: &[(f64, u64)], colour: usize, dashed: bool) -> Curve {
        const POINTS: f64 = 40.0;
        let last = counts.last().map_or(0.0, |(at, _)| *at);
        let mut points = Vec::new();
        let (mut then, mut before) = (0.0, 0);
        for (at, count) in counts {
            if at - then >= last / POINTS {
                points.push((*at, (count - before) as f64 / 1e3 / (at - then)));
                (then, before) = (*at, *count);
            }
        }
        Curve { name: name.to_owned(), points, colour, dashed }
    }
}

/// A target, and what was seen.
pub struct Check {
    what: String,
    target: String,
    seen: String,
    met: bool,
}

impl Check {
    pub fn at_most(what: impl Into<String>, seen: f64, most: f64, digits: usize) -> Check {
        let target = format!("≤ {most}");
        Check { what: what.into(), target, seen: format!("{seen:.digits$}"), met: seen <= most }
    }

    pub fn at_least(what: impl Into<String>, seen: f64, least: f64, digits: usize) -> Check {
        let target = format!("≥ {least}");
        Check { what: what.into(), target, seen: format!("{seen:.digits$}"), met: seen >= least }
    }
}

/// One part of the page.
pub struct Section {
    title: String,
    text: String,
    tables: Vec<Table>,
}

impl Section {
    pub fn new(title: &str, text: &str) -> Section {
        Section { title: title.to_owned(), text: text.to_owned(), tables: Vec::new() }
    }

    #[must_use]
    pub fn with(mut self, table: Table) -> Section {
        self.tables.push(table);
        self
    }
}

/// Cells as they are shown.
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(head: &[&str]) -> Table {
        Table { head: head.iter().map(|&name| name.to_owned()).collect(), rows: Vec::new() }
    }

    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = format!("|{}\n", "---|".repeat(self.head.len()));
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!("{}{rule}{rows}", line(&self.head))
    }
}

impl Report {
    pub async fn new(args: &Args) -> Result<Report> {
        let machine = machine::lines(args)?;
        for (name, value) in &machine {
            println!("{name:<12} {value}");
        }
        let mut report = Report {
            machine,
            sections: Vec::new(),
            checks: Vec::new(),
            notes: Vec::new(),
            drained: None,
            drain_curves: Vec::new(),
            latency_curves: Vec::new(),
            rate_curves: Vec::new(),
        };
        let load = machine::load()?;
        if load > LOAD_MAX {
            report.note(format!(
                "The machine was not idle: {load:.1} processes wanted its cores when the bench began. \
                 The figures are those of a machine that is shared."
            ));
        }
        Ok(report)
    }

    pub fn section(&mut self, section: Section) {
        for table in &section.tables {
            println!("\n{}", table.markdown());
        }
        self.sections.push(section);
    }

    pub fn check(&mut self, check: Check) {
        println!("{}: {} ({})", check.what, check.seen, check.verdict());
        self.checks.push(check);
    }

    /// Something that a reader of the figures must know.
    pub fn note(&mut self, words: String) {
        if !self.notes.contains(&words) {
            println!("note: {words}");
            self.notes.push(words);
        }
    }

    pub fn met(&self) -> bool {
        self.checks.iter().all(|check| check.met)
    }

    /// A line for each target.
    pub fn verdict(&self) -> String {
        let mut table = Table::new(&["target", "", "seen", ""]);
        for check in &self.checks {
            let verdict = check.verdict();
            table.push(vec![check.what.clone(), check.target.clone(), check.seen.clone(), verdict]);
        }
        table.markdown()
    }

    /// Writes page and plots; the page's place.
    pub fn write(&self, args: &Args, minutes: f64) -> Result<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (page_dir, image_dir, images) = match &args.out {
            None if args.is_full() => (root.join("benches"), root.join("docs/img"), "../docs/img"),
            None => (root.join("target/bench"), root.join("target/bench"), "."),
            Some(out) => (out.clone(), out.clone(), "."),
        };
        fs::create_dir_all(&page_dir)?;
        fs::create_dir_all(&image_dir)?;
        let mut shown = Vec::new();
        for (name, words, svg) in plots::all(self) {
            fs::write(image_dir.join(name), svg)?;
            shown.push(format!("![{words}]({images}/{name})"));
        }
        let page = page_dir.join("RESULTS.md");
        let kept = fs::read_to_string(&page).unwrap_or_default();
        let kept = kept.split_once(BY_HAND).map_or("\n", |(_, kept)| kept);
        let text = format!("{}\n{BY_HAND}{kept}", self.page(args, minutes, &shown));
        fs::write(&page, text)?;
        Ok(page)
    }

    fn page(&self, args: &Args, minutes: f64, plots: &[String]) -> String {
        let mut page = format!(
            "# Results\n\nWritten by `make bench` in {minutes:.0} minutes; what each part measures, and \
             how, is said beside it. Figures are medians of {} rounds, with the smallest and the \
             largest; arms that are compared ran in turn in the same round.\n",
            args.rounds()
        );
        if !args.is_full() {
            page += "\n**Not a full run**: smaller, shorter or in part. Good for trying out, not for \
                     quoting.\n";
        }
        page += "\n| | |\n|---|---|\n";
        for (name, value) in &self.machine {
            writeln!(page, "| {name} | {value} |").unwrap_or_default();
        }
        write!(page, "\n## Targets\n\n{}", self.verdict()).unwrap_or_default();
        for note in &self.notes {
            write!(page, "\n{note}\n").unwrap_or_default();
        }
        for section in &self.sections {
            write!(page, "\n## {}\n\n{}\n", section.title, section.text).unwrap_or_default();
            for table in &section.tables {
                write!(page, "\n{}", table.markdown()).unwrap_or_default();
            }
        }
        if !plots.is_empty() {
            write!(page, "\n## Plots\n\n{}\n", plots.join("\n\n")).unwrap_or_default();
        }
        page
    }
}

impl Check {
    fn verdict(&self) -> String {
        (if self.met { "met" } else { "**missed**" }).to_owned()
    }
}
