//! What the kernel says of a process.

use std::fs;

use crate::Result;

/// The unit of times in `/proc/PID/stat`, the same on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Seconds that a process used so far, user and system, its ended threads included.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in parentheses, may hold anything; the state is the first field behind it.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: Vec<f64> = fields.skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
    match ticks[..] {
        [user, system] => Ok((user + system) / TICKS_PER_SECOND),
        _ => Err(format!("/proc/{pid}/stat: no times in {stat:?}").into()),
    }
}

/// MiB that a process has in memory now.
pub fn resident_mib(pid: u32) -> Result<f64> {
    status_mib(pid, "VmRSS:")
}

/// MiB that it had at most since it started.
pub fn resident_peak_mib(pid: u32) -> Result<f64> {
    status_mib(pid, "VmHWM:")
}

fn status_mib(pid: u32, name: &str) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.ok_or_else(|| format!("/proc/{pid}/status has no {name}"))? / 1024.0)
}
