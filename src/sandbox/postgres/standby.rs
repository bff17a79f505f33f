//! A standby of a running server: a base backup by the low-level functions (PostgreSQL's manual,
//! "Making a Base Backup Using the Low Level API"), replication through a slot of its own, and its
//! promotion.

use std::fs;

use tokio_postgres::Client;

use super::{LOOK_INTERVAL, Postgres, START_DEADLINE};
use crate::sandbox::{Result, SandboxError};

/// The files of a running server may go while they are copied.
const COPIES: u32 = 5;

impl Postgres {
    /// A hot standby with the primary's options, which follows it through a physical slot. `name` is
    /// that slot's, and the one that `synchronous_standby_names` knows it by. From PostgreSQL 17 on it
    /// keeps copies of the primary's failover slots.
    ///
    /// # Errors
    /// When the backup fails, or the standby does not come up.
    pub async fn standby_of(primary: &Postgres, name: &str) -> Result<Postgres> {
        let mut options = primary.options.clone();
        let client = primary.connect().await?;
        let sql = "SELECT current_setting('server_version_num')::int4";
        let version: i32 = client.query_one(sql, &[]).await?.get(0);
        let conninfo = format!(
            "host={} port={} user=postgres dbname=postgres application_name={name}",
            primary.socket_dir().display(),
            primary.port
        );
        options = options
            .set("primary_conninfo", &conninfo)
            .set("primary_slot_name", name)
            .set("hot_standby_feedback", "on")
            .set("wal_receiver_status_interval", "1s");
        if version >= 170_000 {
            options = options.set("sync_replication_slots", "on");
        }
        let sql = "SELECT pg_create_physical_replication_slot($1::text, true)";
        client.query(sql, &[&name]).await?;
        let mut standby = Postgres::place(options, primary.bin.clone(), primary.user)?;
        standby.back_up(primary, &client, version).await?;
        standby.write_file("standby.signal", "")?;
        standby.first_start().await?;
        Ok(standby)
    }

    async fn back_up(&self, primary: &Postgres, client: &Client, version: i32) -> Result<()> {
        let (begin, end) = match version >= 150_000 {
            true => ("pg_backup_start('standby', true)", "pg_backup_stop(false)"),
            false => ("pg_start_backup('standby', true, false)", "pg_stop_backup(false, false)"),
        };
        client.query(&format!("SELECT {begin}"), &[]).await?;
        let data = self.data_dir();
        for copy in 1.. {
            match self.copy_data(&primary.data_dir()) {
                Ok(()) => break,
                Err(error) if copy == COPIES => return Err(error),
                Err(_) => fs::remove_dir_all(&data)
                    .map_err(|error| SandboxError::io("can't remove", &data, &error))?,
            }
        }
        let label: String =
            client.query_one(&format!("SELECT labelfile FROM {end}"), &[]).await?.get(0);
        self.write_file("backup_label", &label)?;
        let slots = data.join("pg_replslot");
        let cleared = fs::remove_file(data.join("postmaster.pid"))
            .and_then(|()| fs::read_dir(&slots))
            .and_then(|mut slots| slots.try_for_each(|slot| fs::remove_dir_all(slot?.path())));
        cleared.map_err(|error| SandboxError::io("can't clear", &data, &error))
    }

    /// Makes a primary of a standby, and waits until it is one.
    ///
    /// # Errors
    /// When it is none, or does not take writes within a minute.
    pub async fn promote(&self) -> Result<()> {
        let client = self.connect().await?;
        let wait = i32::try_from(START_DEADLINE.as_secs()).unwrap_or(i32::MAX);
        let promoted = client.query_one("SELECT pg_promote(true, $1)", &[&wait]).await?;
        match promoted.get(0) {
            true => Ok(()),
            false => Err(SandboxError::new("the standby was not promoted")),
        }
    }

    /// Waits until this standby has a copy of a slot that a promotion keeps.
    ///
    /// # Errors
    /// When it has none within a minute: with what it has.
    pub async fn synced(&self, primary: &Postgres, slot: &str) -> Result<()> {
        let (here, there) = (self.connect().await?, primary.connect().await?);
        let sql = "SELECT to_jsonb(s)::text, synced AND NOT temporary AND invalidation_reason IS NULL \
                   FROM pg_replication_slots AS s WHERE slot_name = $1::text";
        let start = std::time::Instant::now();
        loop {
            let row = here.query_opt(sql, &[&slot]).await?;
            if row.as_ref().is_some_and(|row| row.get(1)) {
                return Ok(());
            }
            if start.elapsed() > START_DEADLINE {
                let seen: Option<String> = row.map(|row| row.get(0));
                return Err(SandboxError::new(format!("slot {slot} is not synced: {seen:?}")));
            }
            // The copy is kept when the slot has moved beyond what the standby began with, which
            // takes a snapshot in the WAL.
            there.query("SELECT pg_log_standby_snapshot()", &[]).await?;
            tokio::time::sleep(LOOK_INTERVAL * 20).await;
        }
    }
}
