//! Directories, ports and the unprivileged user that servers get, and the watchdog that clears up
//! when this process can't.
//!
//! Destructors don't run in a process that is killed. Each place therefore has a watchdog: a shell
//! that reads our pipe. It learns the server's process id from us, and when the pipe closes, for
//! whatever reason, it ends the server and removes the directory.

use std::fs::{self, DirBuilder, Permissions};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Result, SandboxError};

/// QUIT is PostgreSQL's immediate stop, which takes its backends along; nats-server ends too.
const WATCHDOG: &str = r#"
trap '' INT TERM HUP QUIT
pid=0
while read -r line; do pid=$line; done
if [ "$pid" -gt 0 ] && kill -QUIT "$pid" 2>/dev/null; then
    n=0
    while [ "$n" -lt 50 ] && kill -0 "$pid" 2>/dev/null; do n=$((n + 1)); sleep 0.1; done
    kill -KILL "$pid" 2>/dev/null
fi
if [ "$2" = remove ]; then rm -rf -- "$1"; fi
"#;

/// Below Linux's range for outgoing connections: a client that retries a port of that range while
/// the server is down can be given the very port as its own and talk to itself.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// A port of 127.0.0.1 that nobody listens on, never given twice by this process.
///
/// # Errors
/// When none is free.
pub fn free_port() -> Result<u16> {
    static GIVEN: Mutex<Vec<u16>> = Mutex::new(Vec::new());
    let mut given = GIVEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let start = u16::from_ne_bytes({
        let [a, b, ..] = *uuid::Uuid::new_v4().as_bytes();
        [a, b]
    });
    let width = PORTS.end - PORTS.start;
    (0..width)
        .map(|step| PORTS.start + (start % width + step) % width)
        .find(|port| {
            !given.contains(port) && TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()
        })
        .inspect(|port| given.push(*port))
        .ok_or_else(|| SandboxError::new("no free port between 15000 and 32000 on 127.0.0.1"))
}

/// The user that PostgreSQL runs as; it refuses root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unprivileged {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Unprivileged {
    /// `None` when this process is not root: then servers run as its own user.
    pub(crate) fn find() -> Result<Option<Unprivileged>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let passwd = Path::new("/etc/passwd");
        let text = fs::read_to_string(passwd)
            .map_err(|error| SandboxError::io("can't read", passwd, &error))?;
        let found = ["nobody", "postgres", "daemon"].iter().find_map(|name| {
            text.lines().find_map(|line| {
                let mut fields = line.split(':');
                let user = fields.next()?;
                let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
                (user == *name && uid != 0).then_some(Unprivileged { uid, gid })
            })
        });
        found.map(Some).ok_or_else(|| {
            SandboxError::new(
                "PostgreSQL refuses to run as root, and there is no user nobody, postgres or daemon",
            )
        })
    }

    pub(crate) fn own(user: Option<Unprivileged>, path: &Path) -> Result<()> {
        match user {
            Some(user) => chown(path, Some(user.uid), Some(user.gid))
                .map_err(|error| SandboxError::io("can't give away", path, &error)),
            None => Ok(()),
        }
    }
}

/// The directory under which all places of this user are: `/tmp/outboxd-sandbox-UID`.
///
/// Another user could have made it first, so its owner is checked.
pub(crate) fn base() -> Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let base = std::env::temp_dir().join(format!("outboxd-sandbox-{uid}"));
    make_dir(&base, 0o755)?;
    let owner = fs::symlink_metadata(&base)
        .map_err(|error| SandboxError::io("can't look at", &base, &error))?;
    if owner.uid() != uid || !owner.is_dir() {
        return Err(SandboxError::new(format!("{} belongs to somebody else", base.display())));
    }
    Ok(base)
}

pub(crate) fn make_dir(path: &Path, mode: u32) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(|error| SandboxError::io("can't make", path, &error))
}

/// A name that no other process and no earlier call used.
pub(crate) fn unique(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("{prefix}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A server's directory, with its watchdog; removed at the end unless it is kept.
#[derive(Debug)]
pub(crate) struct Place {
    dir: PathBuf,
    keep: bool,
    watchdog: Child,
}

impl Place {
    pub(crate) fn make(prefix: &str, keep: bool) -> Result<Place> {
        let dir = base()?.join(unique(prefix));
        make_dir(&dir, 0o755)?;
        let watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "outboxd-watchdog"])
            .arg(&dir)
            .arg(if keep { "keep" } else { "remove" })
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of reach of the terminal's Ctrl-C: it must outlive us.
            .process_group(0)
            .spawn()
            .map_err(|error| SandboxError::new(format!("can't start sh: {error}")))?;
        Ok(Place { dir, keep, watchdog })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    /// The server to end with us; 0 when it ended.
    pub(crate) fn watch(&mut self, pid: u32) -> Result<()> {
        let stdin = self.watchdog.stdin.as_mut();
        stdin.map_or(Ok(()), |pipe| writeln!(pipe, "{pid}").and_then(|()| pipe.flush())).map_err(
            |error| SandboxError::new(format!("the watchdog of {}: {error}", self.dir.display())),
        )
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The server's own value has ended it before; the watchdog only has the directory to remove.
        drop(self.watchdog.stdin.take());
        let ended = self.watchdog.wait();
        if !self.keep && ended.is_err() {
            drop(fs::remove_dir_all(&self.dir));
        }
    }
}
