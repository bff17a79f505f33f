//! Which server a connection reached, and whether the relay can work with it.

use std::time::Duration;
use tokio::time::Instant;

use crate::error::{Failure, Kind};
use crate::event::UnixMicros;

/// Asked on both connections, by the simple protocol: everything is text.
///
/// The timeline comes from the file that is being written, since the control file tells the new one
/// only after the checkpoint that follows a promotion.
pub(super) const FACTS: &str = "\
    SELECT system_identifier::pg_catalog.text, \
    extract(epoch FROM pg_catalog.pg_postmaster_start_time())::pg_catalog.text, \
    CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL ELSE \
    pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) END, \
    pg_catalog.current_database(), \
    pg_catalog.current_setting('server_version_num'), \
    pg_catalog.pg_is_in_recovery()::pg_catalog.text, \
    pg_catalog.current_setting('default_transaction_read_only'), \
    (SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'), \
    (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::pg_catalog.int8 \
    FROM pg_catalog.pg_control_system()";

/// Who the server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Of the cluster, made by initdb.
    pub system_identifier: String,
    /// Goes up with every promotion.
    pub timeline: u32,
    /// The database of both connections.
    pub database: String,
    /// `server_version_num`, e.g. 180006.
    pub server_version: u32,
    /// Start of the server process, seconds since 1970 as the server writes them.
    pub started: String,
}

/// The server's clock, carried on by ours.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerClock {
    told: UnixMicros,
    at: Instant,
}

impl ServerClock {
    pub(super) fn now(&self, now: Instant) -> UnixMicros {
        let passed = now.saturating_duration_since(self.at).as_micros();
        UnixMicros(self.told.0.saturating_add(i64::try_from(passed).unwrap_or(i64::MAX)))
    }
}

/// What one connection says about its server.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub identity: Identity,
    /// `None`: the server never gives up on a silent client.
    pub wal_sender_timeout: Option<Duration>,
    pub clock: ServerClock,
}

fn unreadable(what: &str) -> Failure {
    Failure::new(Kind::Database, format!("the server's {what} can't be read"))
}

impl Facts {
    /// From the row of [`FACTS`]; a server that takes no writes is a failure.
    pub(super) fn read(row: &[Option<String>], now: Instant) -> Result<Facts, Failure> {
        let [system, started, timeline, database, version, recovery, read_only, timeout, clock] =
            row
        else {
            return Err(unreadable("identity"));
        };
        if recovery.as_deref() != Some("false") {
            return Err(Failure::new(Kind::SourceReadOnly, "the server is a standby"));
        }
        if read_only.as_deref() != Some("off") {
            let detail = "default_transaction_read_only is on for this database, role or server";
            return Err(Failure::new(Kind::SourceReadOnly, detail));
        }
        let text = |value: &Option<String>, what| value.clone().ok_or_else(|| unreadable(what));
        let millis: u64 = number(timeout, 10, "wal_sender_timeout")?;
        Ok(Facts {
            identity: Identity {
                system_identifier: text(system, "system identifier")?,
                timeline: number(timeline, 16, "timeline")?,
                database: text(database, "database")?,
                server_version: number(version, 10, "version")?,
                started: text(started, "start time")?,
            },
            wal_sender_timeout: (millis > 0).then(|| Duration::from_millis(millis)),
            clock: ServerClock { told: UnixMicros(number(clock, 10, "clock")?), at: now },
        })
    }
}

fn number<T: TryFrom<i128>>(value: &Option<String>, radix: u32, what: &str) -> Result<T, Failure> {
    value
        .as_deref()
        .and_then(|text| i128::from_str_radix(text, radix).ok())
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| unreadable(what))
}

impl Identity {
    /// Refuses a server that is on an earlier timeline of the same cluster.
    pub fn is_followed_by(&self, found: &Identity) -> Result<(), Failure> {
        if self.system_identifier != found.system_identifier || self.timeline <= found.timeline {
            return Ok(());
        }
        let detail = format!(
            "the server is on timeline {}, and this relay has been on {}: a primary that a failover \
             has left behind (if a copy of then was put back on purpose, start the relay anew)",
            found.timeline, self.timeline
        );
        Err(Failure::new(Kind::SourceReadOnly, detail))
    }

    /// Both connections must have reached one server process: behind a load balancer, or in the
    /// seconds of a failover, they may not.
    /// Refuses another server than this one.
    pub fn same_server(&self, other: &Identity) -> Result<(), Failure> {
        if self == other {
            return Ok(());
        }
        let show = |identity: &Identity| {
            format!(
                "system {} timeline {} database {} started {}",
                identity.system_identifier, identity.timeline, identity.database, identity.started
            )
        };
        Err(Failure::new(
            Kind::SourceUnreachable,
            format!(
                "the two connections reached different servers: {}, {}",
                show(self),
                show(other)
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Vec<Option<String>> {
        ["76", "1.5", "0000000A", "app", "180006", "false", "off", "60000", "1000000"]
            .map(|text| Some(text.to_owned()))
            .to_vec()
    }

    #[test]
    fn a_server_that_a_failover_has_left_behind_is_refused() {
        let now = Facts::read(&row(), Instant::now()).unwrap().identity;
        let on = |timeline| Identity { timeline, started: "2".to_owned(), ..now.clone() };
        assert!(now.is_followed_by(&on(11)).is_ok() && now.is_followed_by(&on(10)).is_ok());
        assert_eq!(now.is_followed_by(&on(9)).unwrap_err().kind, Kind::SourceReadOnly);
        let other = Identity { system_identifier: "77".to_owned(), ..on(1) };
        assert!(now.is_followed_by(&other).is_ok());
    }

    #[test]
    fn facts_are_read_and_read_only_servers_refused() {
        let now = Instant::now();
        let facts = Facts::read(&row(), now).unwrap();
        assert_eq!(facts.identity.timeline, 10);
        assert_eq!(facts.identity.server_version, 180_006);
        assert_eq!(facts.wal_sender_timeout, Some(Duration::from_secs(60)));
        assert_eq!(facts.clock.now(now + Duration::from_secs(1)), UnixMicros(2_000_000));

        let change = |index: usize, value: Option<&str>| {
            let mut row = row();
            row[index] = value.map(str::to_owned);
            Facts::read(&row, now)
        };
        assert_eq!(change(7, Some("0")).unwrap().wal_sender_timeout, None);
        assert_eq!(change(5, Some("true")).unwrap_err().kind, Kind::SourceReadOnly);
        assert_eq!(change(6, Some("on")).unwrap_err().kind, Kind::SourceReadOnly);
        for index in 0..9 {
            assert!(change(index, None).is_err(), "column {index}");
        }
        assert!(Facts::read(&[], now).is_err());
    }
}
