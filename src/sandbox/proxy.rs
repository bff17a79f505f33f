//! A TCP proxy on loopback that can be told to misbehave. Knows no protocol.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{Result, SandboxError};

/// What the proxy does with bytes and connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Hands on both ways.
    Pass,
    /// Hands on what the client says; what the server says is lost. Such a connection is broken
    /// for good, and is closed when the mode changes.
    DropReplies,
    /// Hands on nothing, loses nothing: a frozen network.
    Stall,
    /// Hands on so many bytes of what each client says from now on, and holds the rest; answers
    /// pass.
    HoldAfter(u64),
    /// Hands on so many bytes a second, each way: a thin line.
    Narrow(u32),
    /// Hands on each piece of the server's answers this much later.
    Delay(Duration),
    /// Closes all connections and refuses new ones.
    Refuse,
}

/// A running proxy. Dropping it closes everything.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    control: watch::Sender<(Mode, u64)>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// A proxy to a port of 127.0.0.1.
    ///
    /// # Errors
    /// When it can't listen.
    pub async fn start(target: u16) -> Result<Proxy> {
        let words = |error: std::io::Error| SandboxError::new(format!("the proxy: {error}"));
        let port = super::free_port()?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(words)?;
        let (control, watched) = watch::channel((Mode::Pass, 0));
        let task = tokio::spawn(accept(listener, target, watched));
        Ok(Proxy { port, control, task })
    }

    /// Port to connect to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes what it does, for connections that are open too.
    pub fn set(&self, mode: Mode) {
        self.control.send_modify(|(now, _)| *now = mode);
    }

    /// Closes the connections that are open; new ones are taken.
    pub fn cut(&self) {
        self.control.send_modify(|(_, cuts)| *cuts += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, target: u16, control: watch::Receiver<(Mode, u64)>) {
    // Ends the connections when the accepting task is aborted.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        if control.borrow().0 != Mode::Refuse {
            connections.spawn(connection(client, target, control.clone()));
        }
    }
}

async fn connection(client: TcpStream, target: u16, mut control: watch::Receiver<(Mode, u64)>) {
    // Before the connection is visible at the target, so that whoever sees it there can cut it.
    let cuts = control.borrow().1;
    let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await else { return };
    if client.set_nodelay(true).and(server.set_nodelay(true)).is_err() {
        return;
    }
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = server.into_split();
    let requests = pump(client_in, server_out, control.clone(), false);
    let replies = pump(server_in, client_out, control.clone(), true);
    tokio::select! {
        () = requests => {}
        () = replies => {}
        _ = control.wait_for(|(mode, now)| *mode == Mode::Refuse || *now != cuts) => {}
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut control: watch::Receiver<(Mode, u64)>,
    replies: bool,
) {
    let mut buffer = vec![0; 64 * 1024];
    let mut passed = 0;
    loop {
        let Ok(count) = from.read(&mut buffer).await else { return };
        let Some(bytes) = buffer.get(..count).filter(|bytes| !bytes.is_empty()) else { return };
        let Ok(mode) = control.wait_for(|(mode, _)| *mode != Mode::Stall).await.map(|now| now.0)
        else {
            return;
        };
        let mut held = bytes.len();
        match mode {
            Mode::DropReplies if replies => return lose(from, buffer, control).await,
            Mode::Delay(delay) if replies => tokio::time::sleep(delay).await,
            Mode::HoldAfter(limit) if !replies => {
                held = usize::try_from(limit.saturating_sub(passed)).unwrap_or(held).min(held);
            }
            Mode::Pass
            | Mode::DropReplies
            | Mode::Stall
            | Mode::HoldAfter(_)
            | Mode::Narrow(_)
            | Mode::Delay(_)
            | Mode::Refuse => {}
        }
        let (now, later) = bytes.split_at_checked(held).unwrap_or((bytes, &[]));
        passed = if matches!(mode, Mode::HoldAfter(_)) { passed + now.len() as u64 } else { 0 };
        if to.write_all(now).await.is_err() {
            return;
        }
        if let Mode::Narrow(bytes_per_second) = mode {
            let seconds = now.len() as f64 / f64::from(bytes_per_second.max(1));
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        }
        if !later.is_empty() {
            let over = control.wait_for(|(mode, _)| !matches!(mode, Mode::HoldAfter(_)));
            let over = over.await.is_ok();
            if !over || to.write_all(later).await.is_err() {
                return;
            }
        }
    }
}

/// Reads and forgets, until the mode changes or the server closes.
async fn lose(
    mut from: OwnedReadHalf,
    mut buffer: Vec<u8>,
    mut control: watch::Receiver<(Mode, u64)>,
) {
    let over = control.wait_for(|(mode, _)| *mode != Mode::DropReplies);
    let reading = async { while from.read(&mut buffer).await.is_ok_and(|count| count > 0) {} };
    tokio::select! {
        _ = over => {}
        () = reading => {}
    }
}
