//! What the relay costs the primary in WAL: bytes per event that it writes itself, by each way to keep
//! account of what is published. Owns the verdict; [`measure`] owns the servers.
//! `cargo bench --bench wal -- --seconds 20 --rounds 3`

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panic")]

mod measure;

use std::path::Path;
use std::process::ExitCode;

use measure::{Bench, LIMIT, MODES, Mode, RATE, Round};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let (seconds, rounds) = (argument("--seconds", 20), argument("--rounds", 3));
    println!("{rounds} rounds of {seconds} s at {RATE} events/s, alone and with the relay in turn");
    let mut table = String::new();
    let mut ok = true;
    for mode in MODES {
        let mut measured = Vec::new();
        let mut bench = Bench::on(Path::new(env!("CARGO_BIN_EXE_outboxd")), mode).await;
        for _ in 0..rounds {
            let round = bench.round(seconds).await;
            println!("{}: {round:.2?}", mode.name);
            measured.push(round);
        }
        let (line, good) = judge(mode, &measured);
        table += &line;
        ok &= good;
    }
    println!("\n| mode | inserts alone | with the relay | the relay's (spread) | receipts/s | |");
    println!("|---|---|---|---|---|---|\n{table}\nWAL bytes per event, medians");
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn argument(name: &str, default: u64) -> u64 {
    let mut arguments = std::env::args().skip_while(|argument| argument != name).skip(1);
    arguments.next().map_or(default, |text| text.parse().unwrap()).max(1)
}

fn judge(mode: &Mode, rounds: &[Round]) -> (String, bool) {
    let of = |figure: fn(&Round) -> f64| {
        let mut figures: Vec<f64> = rounds.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        figures
    };
    let median = |figures: &[f64]| figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN);
    let own = of(|round| round.own());
    let good = !mode.limited || median(&own) <= LIMIT;
    let verdict = match (mode.limited, good) {
        (true, true) => format!("PASS (≤ {LIMIT})"),
        (true, false) => format!("FAIL (> {LIMIT})"),
        (false, _) => "for comparison".to_owned(),
    };
    let line = format!(
        "| {} | {:.1} | {:.1} | {:.2} ({:.2} … {:.2}) | {:.1} | {verdict} |\n",
        mode.name,
        median(&of(|round| round.alone)),
        median(&of(|round| round.with_relay)),
        median(&own),
        own.first().copied().unwrap_or(f64::NAN),
        own.last().copied().unwrap_or(f64::NAN),
        median(&of(|round| round.receipts)),
    );
    (line, good)
}
