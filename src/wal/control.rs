//! The control connection: statements beside the stream. Owns its life; the statements are
//! `store`'s.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tokio_postgres::config::SslMode;
use tokio_postgres::{
    AsyncMessage, Client, Connection, NoTls, SimpleQueryMessage, tls::NoTlsStream,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::failure_of;
use super::handover::Handover;
use super::identity::{FACTS, Facts};
use super::login::Session;
use crate::error::{Failure, Kind};

/// How long a dropped connection may take for its goodbye.
const GOODBYE: Duration = Duration::from_secs(2);

/// A connection for statements. Dropping it ends it.
pub struct Control {
    /// Runs statements.
    pub client: Arc<Client>,
    closed: watch::Receiver<Option<Failure>>,
    notified: Arc<Notify>,
    deadline: Duration,
    _goodbye: DropGuard,
}

impl Control {
    pub(super) async fn open(
        session: Session,
        deadline: Duration,
    ) -> Result<(Control, Facts), Failure> {
        let control = Control::open_any(session, deadline).await?;
        let facts = control.facts().await?;
        control.prepare_session(facts.identity.server_version).await?;
        Ok((control, facts))
    }

    /// To whatever server it is, which is asked nothing.
    pub(super) async fn open_any(session: Session, deadline: Duration) -> Result<Control, Failure> {
        // Already logged in and, where configured, inside TLS: what is set here is only said to
        // the handover, which keeps it to itself.
        let (client, connection) = tokio_postgres::Config::new()
            .user("logged-in")
            .ssl_mode(SslMode::Disable)
            .connect_raw(Handover::new(session), NoTls)
            .await
            .map_err(|error| failure_of(&error))?;
        let (ended, closed) = watch::channel(None);
        let goodbye = CancellationToken::new();
        let notified = Arc::new(Notify::new());
        tokio::spawn(live(connection, ended, Arc::clone(&notified), goodbye.clone()));
        Ok(Control {
            client: Arc::new(client),
            closed,
            notified,
            deadline,
            _goodbye: goodbye.drop_guard(),
        })
    }

    async fn facts(&self) -> Result<Facts, Failure> {
        let answer = self.client.simple_query(FACTS).await.map_err(|error| failure_of(&error))?;
        let mut row = Vec::new();
        for message in &answer {
            if let SimpleQueryMessage::Row(found) = message {
                row = (0..found.len()).map(|i| found.get(i).map(str::to_owned)).collect();
            }
        }
        Facts::read(&row, Instant::now())
    }

    pub(super) async fn is_in_recovery(&self) -> Result<bool, Failure> {
        let row = self.client.query_one("SELECT pg_catalog.pg_is_in_recovery()", &[]).await;
        row.and_then(|row| row.try_get(0)).map_err(|error| failure_of(&error))
    }

    /// Limits that a role or database may carry are meant for applications. The lock lives as long
    /// as this session does, so the server is to notice within seconds that our host is gone, and
    /// let a standby take over.
    async fn prepare_session(&self, version: u32) -> Result<(), Failure> {
        let mut limits = "SET statement_timeout = 0; SET lock_timeout = 0; \
                          SET idle_in_transaction_session_timeout = 0; \
                          SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 5; \
                          SET tcp_keepalives_count = 3; SET tcp_user_timeout = 20000;"
            .to_owned();
        if version >= 140_000 {
            limits.push_str("SET idle_session_timeout = 0;");
        }
        if version >= 170_000 {
            limits.push_str("SET transaction_timeout = 0;");
        }
        self.client.batch_execute(&limits).await.map_err(|error| failure_of(&error))
    }

    /// Resolves when the connection has ended, with the reason. Cancel-safe, and any number of
    /// times.
    pub async fn closed(&self) -> Failure {
        let mut closed = self.closed.clone();
        match closed.wait_for(Option::is_some).await {
            Ok(failure) => failure.clone(),
            Err(_) => None,
        }
        .unwrap_or_else(|| Failure::new(Kind::Internal, "the control connection's task is gone"))
    }

    /// Resolves when the server passed on a NOTIFY that this session listens for, once for all that
    /// came since the last time. Cancel-safe.
    pub async fn notified(&self) {
        self.notified.notified().await;
    }

    /// Asks for a sign of life, for as long as a connection may take.
    pub async fn ping(&self) -> Result<(), Failure> {
        match timeout(self.deadline, self.client.simple_query("")).await {
            Ok(answer) => answer.map(drop).map_err(|error| failure_of(&error)),
            Err(_) => {
                let detail = format!("no answer to a ping within {:?}", self.deadline);
                Err(Failure::new(Kind::SourceSilent, detail))
            }
        }
    }
}

/// Drives the connection to its end.
async fn live(
    mut connection: Connection<Handover, NoTlsStream>,
    ended: watch::Sender<Option<Failure>>,
    notified: Arc<Notify>,
    goodbye: CancellationToken,
) {
    let drive = async {
        while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(_) = message? {
                notified.notify_one();
            }
        }
        Ok::<(), tokio_postgres::Error>(())
    };
    tokio::pin!(drive);
    let ending = tokio::select! {
        ending = &mut drive => Some(ending),
        () = goodbye.cancelled() => timeout(GOODBYE, drive).await.ok(),
    };
    ended.send_replace(Some(match ending {
        Some(Err(error)) => failure_of(&error),
        Some(Ok(())) => Failure::new(Kind::SourceUnreachable, "the control connection ended"),
        None => Failure::new(Kind::SourceSilent, "the control connection did not end in time"),
    }));
}
