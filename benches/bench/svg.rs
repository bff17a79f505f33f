//! Line plots as SVG. Colours of middling lightness and no background: readable on light and dark.

use std::fmt::Write as _;

use crate::report::Curve;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 196.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;

const TEXT: &str = "#808890";
const GRID: &str = "#808890";
const COLOURS: [&str; 6] = ["#2f81f7", "#e0762f", "#3fa65a", "#b565d8", "#d9a520", "#d64a5b"];

/// One axis.
pub struct Axis {
    pub title: &'static str,
    /// Value, and the word for it.
    pub ticks: Vec<(f64, String)>,
    /// Distances are ratios.
    pub logarithmic: bool,
}

impl Axis {
    /// From 0 to a round number at or above the largest value.
    pub fn linear(title: &'static str, largest: f64) -> Axis {
        let rough = (largest / 5.0).max(f64::MIN_POSITIVE);
        let power = 10_f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * power);
        let step = steps.into_iter().find(|step| step * 5.0 >= largest).unwrap_or(largest);
        let ticks = (0..=5).map(|n| f64::from(n) * step).map(|at| (at, word(at))).collect();
        Axis { title, ticks, logarithmic: false }
    }

    /// From one power of ten to another.
    pub fn logarithmic(title: &'static str, values: impl Iterator<Item = f64> + Clone) -> Axis {
        let values = values.filter(|value| *value > 0.0);
        let smallest = values.clone().fold(f64::INFINITY, f64::min);
        let largest = values.fold(f64::MIN_POSITIVE, f64::max);
        let mut at = 10_f64.powf(smallest.min(largest).log10().floor());
        let mut ticks = vec![(at, word(at))];
        while at < largest {
            at *= 10.0;
            ticks.push((at, word(at)));
        }
        Axis { title, ticks, logarithmic: true }
    }

    /// 0 to 1 between the first and the last tick.
    fn place(&self, value: f64) -> f64 {
        let bend = |value: f64| match self.logarithmic {
            true => value.max(f64::MIN_POSITIVE).ln(),
            false => value,
        };
        let end = |tick: Option<&(f64, String)>| tick.map_or(0.0, |(value, _)| bend(*value));
        let (first, last) = (end(self.ticks.first()), end(self.ticks.last()));
        ((bend(value) - first) / (last - first).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
    }
}

fn word(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{} M", value / 1e6),
        value if value >= 1e3 => format!("{} k", value / 1e3),
        value => {
            let text = format!("{value:.3}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

/// A plot of its own.
pub fn plot(title: &str, x: &Axis, y: &Axis, curves: &[Curve]) -> String {
    let across = |value: f64| LEFT + x.place(value) * (WIDTH - LEFT - RIGHT);
    let up = |value: f64| HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM);
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"{TEXT}\">\n\
         <title>{title}</title>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\" font-weight=\"600\">{title}</text>\n"
    );
    let mut add = |text: String| svg.push_str(&text);
    for (value, word) in &x.ticks {
        let at = across(*value);
        add(format!(
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"{GRID}\" \
             stroke-opacity=\"0.25\"/>\n<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{word}</text>\n",
            bottom + 16.0
        ));
    }
    for (value, word) in &y.ticks {
        let at = up(*value);
        add(format!(
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"{GRID}\" \
             stroke-opacity=\"0.25\"/>\n<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{word}</text>\n",
            LEFT - 8.0,
            at + 4.0
        ));
    }
    add(format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
         <text x=\"16\" y=\"{:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {:.1})\">{}</text>\n",
        f64::midpoint(LEFT, right),
        HEIGHT - 10.0,
        x.title,
        f64::midpoint(TOP, bottom),
        f64::midpoint(TOP, bottom),
        y.title
    ));
    for (curve, line) in curves.iter().zip(0_u32..) {
        let colour = COLOURS.get(curve.colour % COLOURS.len()).copied().unwrap_or(TEXT);
        let dash = if curve.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
        let mut path = String::new();
        for (at, value) in &curve.points {
            let verb = if path.is_empty() { 'M' } else { 'L' };
            write!(path, "{verb}{:.1} {:.1}", across(*at), up(*value)).unwrap_or_default();
        }
        let place = TOP + 8.0 + f64::from(line) * 18.0;
        add(format!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-linejoin=\"round\"{dash}/>\n\
             <line x1=\"{:.1}\" y1=\"{place:.1}\" x2=\"{:.1}\" y2=\"{place:.1}\" stroke=\"{colour}\" \
             stroke-width=\"3\"{dash}/>\n<text x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
            right + 12.0,
            right + 28.0,
            right + 34.0,
            place + 4.0,
            curve.name
        ));
    }
    svg.push_str("</svg>\n");
    svg
}
