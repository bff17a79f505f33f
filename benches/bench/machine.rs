//! Where and with what the figures were made.

use std::fs;
use std::process::Command;

use outboxd::sandbox::{nats_server, postgres_bin};

use crate::args::Args;
use crate::{Result, clock};

/// Lines for the report, name and value.
pub fn lines(args: &Args) -> Result<Vec<(&'static str, String)>> {
    let cores = std::thread::available_parallelism()?;
    let memory: f64 = number(&fs::read_to_string("/proc/meminfo")?, "MemTotal:").unwrap_or(0.0);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let now = jiff::Timestamp::from_second(clock::now() / 1_000_000_000)?;
    Ok(vec![
        ("CPU", format!("{}, {cores} cores", model()?)),
        ("memory", format!("{:.1} GiB", memory / f64::from(1 << 20))),
        ("kernel", kernel.trim().to_owned()),
        ("PostgreSQL", said(&postgres_bin()?.join("postgres"), "-V")?),
        ("nats-server", said(&nats_server()?, "-v")?),
        ("outboxd", said(&args.program, "--version")?),
        ("commit", commit()),
        ("date", now.to_string()),
        ("rounds", args.rounds().to_string()),
        ("load before", format!("{:.2}", load()?)),
    ])
}

fn model() -> Result<String> {
    let text = fs::read_to_string("/proc/cpuinfo")?;
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_owned());
    Ok(name.unwrap_or_else(|| std::env::consts::ARCH.to_owned()))
}

/// What others do: processes that ran or wanted to, the average over a minute.
pub fn load() -> Result<f64> {
    let text = fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().parse()?)
}

fn number(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

fn said(program: &std::path::Path, flag: &str) -> Result<String> {
    let output = Command::new(program).arg(flag).output();
    let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Of the sources, when they are a git clone.
fn commit() -> String {
    let root = env!("CARGO_MANIFEST_DIR");
    let arguments = ["-C", root, "describe", "--always", "--dirty", "--abbrev=9"];
    let output = Command::new("git").args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.ok().filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}
