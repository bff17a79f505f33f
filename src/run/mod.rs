//! The join: the pump with the one `select!`, the session around it, the supervisor around that.
//!
//! `supervise` keeps sessions going and decides by a failure's fate how; `session` is one life of
//! the paired connections; `pump` is the only place where PostgreSQL, the core and NATS meet.

mod caretaker;
mod ceiling;
pub mod clock;
mod letters;
mod lost_tail;
pub mod plan;
mod pump;
mod reporting;
mod session;
mod slow_work;
mod standby;
mod supervise;
mod sweeper;
mod work;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::admin::{self, Status};
use crate::config::Config;
use crate::error::Failure;

/// Runs the relay until `shutdown` is cancelled, then stops it in order: nothing new is read, what
/// is in flight is waited for within `relay.shutdown_timeout`, recorded and confirmed.
///
/// An application can run it as a task of its own. The TLS library's process-wide provider is set
/// to ring if the application has set none.
///
/// # Errors
///
/// [`Kind::AdminAddress`](crate::error::Kind::AdminAddress) when the admin address is taken, or a
/// failure after which going on would break a promise ([`Fate::Refuse`](crate::error::Fate)).
/// Everything else is waited out, logged, and shown by the status.
pub async fn run(config: Config, shutdown: CancellationToken) -> Result<(), Failure> {
    crate::publish::provide_tls();
    let status = Status::new(&config);
    let ended = CancellationToken::new();
    let endpoints = match config.admin.listen {
        Some(listen) => {
            let listener = admin::bind(listen).await?;
            Some(admin::answer(listener, Arc::clone(&status), ended.clone()))
        }
        None => None,
    };
    let relay = async {
        let result = supervise::run(&config, &status, &shutdown).await;
        // The endpoints answer until the relay has stopped.
        ended.cancel();
        result
    };
    match endpoints {
        Some(endpoints) => {
            let (result, served) = tokio::join!(relay, endpoints);
            result.and(served)
        }
        None => relay.await,
    }
}

#[cfg(test)]
mod tests {
    /// An application spawns the relay on any runtime, so it must be `Send`.
    #[test]
    fn the_relay_can_be_a_task_of_its_own() {
        fn is_send<T: Send>(_: &T) {}
        let text = r#"
            [relay]
            name = "orders"
            [source]
            url = "postgres://outboxd@localhost/app"
            [destination.events]
            servers = ["nats://localhost:4222"]
            stream = "EVENTS"
        "#;
        let config = crate::config::Config::parse("outboxd.toml", text).unwrap();
        is_send(&super::run(config, Default::default()));
    }
}
