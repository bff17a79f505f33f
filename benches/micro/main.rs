//! What one event costs in each pure part of its way, so that a regression shows where it is.
//! Owns no server, reads no clock, and uses nothing random: the same work every time.
//!
//! `micro --bench` measures time, with criterion: `make bench-micro`.
//! `micro --count NAME TIMES` does the work that often and says nothing: `make bench-check` runs it
//! under callgrind, and compares instructions.

#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a benchmark fails by panic"
)]

mod cases;
mod frames;

use cases::CASES;
use criterion::{Criterion, Throughput};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        // One line for each: its name, and how many events one turn of it is.
        ["--names"] => CASES.iter().for_each(|case| println!("{} {}", case.name, case.events)),
        ["--count", name, times] => {
            let case = CASES.iter().find(|case| case.name == name).unwrap();
            let mut turn = (case.prepare)();
            (0..times.parse().unwrap()).for_each(|_: u64| turn());
        }
        _ => {
            let mut criterion = Criterion::default().configure_from_args();
            for case in CASES {
                let mut group = criterion.benchmark_group("micro");
                group.throughput(Throughput::Elements(case.events));
                group.bench_function(case.name, |bencher| bencher.iter((case.prepare)()));
                group.finish();
            }
            criterion.final_summary();
        }
    }
}
