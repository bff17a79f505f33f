//! Where the server programs are: an environment variable, else what `make fetch` unpacked.

use std::env;
use std::path::{Path, PathBuf};

use super::{Result, SandboxError};

/// Directory of `postgres` and `initdb`: `OUTBOXD_PG_BIN`, else `.dev/postgres-18/bin`.
///
/// # Errors
/// When neither holds the programs.
pub fn postgres_bin() -> Result<PathBuf> {
    find("OUTBOXD_PG_BIN", ".dev/postgres-18/bin", |dir| dir.join("postgres").is_file())
}

/// The program `nats-server`: `OUTBOXD_NATS_SERVER`, else `.dev/nats-2.15/nats-server`.
///
/// # Errors
/// When neither is there.
pub fn nats_server() -> Result<PathBuf> {
    find("OUTBOXD_NATS_SERVER", ".dev/nats-2.15/nats-server", Path::is_file)
}

/// The environment wins; `.dev` is looked for in the working directory and above it, so that the
/// programs are found from any directory of the project.
fn find(variable: &str, fetched: &str, usable: impl Fn(&Path) -> bool) -> Result<PathBuf> {
    if let Some(value) = env::var_os(variable).filter(|value| !value.is_empty()) {
        // Servers start in another directory.
        let path = std::path::absolute(value)
            .map_err(|error| SandboxError::new(format!("{variable}: {error}")))?;
        return match usable(&path) {
            true => Ok(path),
            false => Err(SandboxError::new(format!(
                "{variable} is {}, and what it should name is not there",
                path.display()
            ))),
        };
    }
    let here = env::current_dir().map_err(|error| {
        SandboxError::new(format!("the working directory can't be read: {error}"))
    })?;
    here.ancestors().map(|dir| dir.join(fetched)).find(|path| usable(path)).ok_or_else(|| {
        SandboxError::new(format!(
            "{fetched} is missing: run `make fetch` in the project's directory, or set {variable}"
        ))
    })
}
