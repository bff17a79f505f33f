//! Which plots there are.

use crate::report::Report;
use crate::svg::{Axis, plot};

/// File name, what it shows in words, and the plot, of those that there are figures for.
pub fn all(report: &Report) -> Vec<(&'static str, &'static str, String)> {
    let mut plots = Vec::new();
    let values = |curves: &[crate::report::Curve]| -> Vec<f64> {
        curves.iter().flat_map(|curve| curve.points.iter().map(|(_, value)| *value)).collect()
    };
    let curves = &report.drain_curves;
    if !curves.is_empty() {
        let points = || curves.iter().flat_map(|curve| curve.points.iter());
        let end = points().map(|(at, _)| *at).fold(0.0, f64::max);
        let top = points().map(|(_, rate)| *rate).fold(0.0, f64::max);
        let x = Axis::linear("seconds since the process started", end);
        let y = Axis::linear("thousand events per second", top);
        let title = "Drain of a backlog, 100 rows per transaction";
        plots.push(("drain.svg", title, plot(title, &x, &y, curves)));
    }
    let curves = &report.latency_curves;
    if !curves.is_empty() {
        // Distance from 100 %, so that each nine has its room.
        let mirrored = curves.iter().map(|curve| {
            let mut curve = curve.clone();
            for (at, _) in &mut curve.points {
                *at = 100.0 / (100.0 - *at);
            }
            curve
        });
        let mirrored: Vec<_> = mirrored.collect();
        let nines = ["0 %", "90 %", "99 %", "99.9 %", "99.99 %"];
        let ticks = nines.iter().zip(0..).map(|(word, n)| (10_f64.powi(n), (*word).to_owned()));
        let x = Axis {
            title: "share of events that were faster",
            ticks: ticks.collect(),
            logarithmic: true,
        };
        let y = Axis::logarithmic("milliseconds from commit to ack", values(curves).into_iter());
        let title = "Latency, distribution";
        plots.push(("latency.svg", title, plot(title, &x, &y, &mirrored)));
    }
    let curves = &report.rate_curves;
    if !curves.is_empty() {
        let rates: Vec<f64> =
            curves.iter().flat_map(|curve| curve.points.iter().map(|(rate, _)| *rate)).collect();
        let x = Axis::logarithmic("events per second", rates.into_iter());
        let y = Axis::logarithmic("milliseconds from commit to ack", values(curves).into_iter());
        let title = "Latency against rate";
        plots.push(("latency-rate.svg", title, plot(title, &x, &y, curves)));
    }
    plots
}
