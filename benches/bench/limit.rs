//! How fast a backlog could go: `pg_recvlogical` throws the same WAL away while a plain socket
//! publishes the same messages, both at once, since the relay has one machine for both, too.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Instant;

use tokio::process::Command;
use tokio::sync::mpsc;

use crate::Result;
use crate::backlog::{Backlog, Socket};
use crate::frames::Frames;

/// Times of the two arms.
pub struct Limit {
    pub read_seconds: f64,
    pub publish_seconds: f64,
    /// Seconds, and messages acknowledged by then.
    pub acked: Vec<(f64, u64)>,
}

impl Limit {
    /// Who is slower is the limit.
    pub fn seconds(&self) -> f64 {
        self.read_seconds.max(self.publish_seconds)
    }

    pub async fn measure(
        backlog: &mut Backlog,
        socket: Socket,
        frames: Arc<Frames>,
    ) -> Result<Limit> {
        backlog.rewind().await?;
        let port = backlog.world.nats()?.port();
        let start = Instant::now();
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let publishing = tokio::task::spawn_blocking(move || {
            frames.publish(port, |acked| {
                // Nobody listens any more when the bench was interrupted.
                sender.send((start.elapsed().as_secs_f64(), acked)).unwrap_or_default();
            })
        });
        let reading = async {
            read(backlog, socket).await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(start.elapsed().as_secs_f64())
        };
        let publishing = async {
            publishing.await??;
            Ok(start.elapsed().as_secs_f64())
        };
        let (read_seconds, publish_seconds) = tokio::try_join!(reading, publishing)?;
        let mut acked = Vec::new();
        while let Ok(sample) = receiver.try_recv() {
            acked.push(sample);
        }
        match backlog.stored().await? {
            stored if stored == backlog.spec.events => {}
            stored => return Err(format!("the raw publisher stored {stored} messages").into()),
        }
        Ok(Limit { read_seconds, publish_seconds, acked })
    }
}

/// Reads the slot to the backlog's end, with the options of the relay.
async fn read(backlog: &Backlog, socket: Socket) -> Result<()> {
    let postgres = &backlog.world.postgres;
    let mut command = Command::new(postgres.bin().join("pg_recvlogical"));
    command.args(["--start", "--no-loop", "-f", "/dev/null", "-d", "postgres", "-U", "postgres"]);
    command.args(["-h", &backlog.host(socket), "-p", &postgres.port().to_string()]);
    command.args(["--slot", backlog.slot(), "--endpos", &backlog.end.to_string()]);
    for option in [
        "proto_version=1",
        "binary=true",
        "messages=true",
        &format!("publication_names={}", backlog.slot()),
    ] {
        command.args(["-o", option]);
    }
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let words = String::from_utf8_lossy(&output.stderr);
            Err(format!("pg_recvlogical: {}: {words}", output.status).into())
        }
    }
}
