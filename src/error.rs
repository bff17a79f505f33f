//! Kinds of failure, each with its fate and the operator's remedy, in one table.
//!
//! Whoever meets a failure first gives it its kind; from there on it is only passed along. It is
//! logged once, where it is handled: by the supervisor or by a command.

use std::fmt;

/// What happens after a failure of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Heals by itself: tried again with jittered back-off up to 30 s.
    Transient,
    /// Another relay or an older session has it: asked again every second.
    Wait,
    /// Needs the operator. Not ready, the remedy is shown, tried again every 30 s.
    Setup,
    /// Going on would break a promise: the process ends with the remedy.
    Refuse,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $code:literal $fate:ident $remedy:literal;)*) => {
        /// The closed list of failures.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Kind { $($(#[$doc])* $name,)* }

        impl Kind {
            /// Every kind, in the table's order.
            pub const ALL: &'static [Kind] = &[$(Kind::$name,)*];

            /// Stable name: log field, metric label, anchor in the docs.
            pub fn code(self) -> &'static str {
                match self { $(Kind::$name => $code,)* }
            }

            /// What happens next.
            pub fn fate(self) -> Fate {
                match self { $(Kind::$name => Fate::$fate,)* }
            }

            /// What the operator can do.
            pub fn remedy(self) -> &'static str {
                match self { $(Kind::$name => $remedy,)* }
            }
        }
    };
}

kinds! {
    /// No TCP or socket connection, or it broke.
    SourceUnreachable "source-unreachable" Transient
        "check that PostgreSQL runs and that [source] url names its host and port";
    /// Password, certificate or pg_hba.conf (SQLSTATE class 28), or no such database (3D000).
    SourceLogin "source-login" Setup
        "check user, password and database in [source] url, and pg_hba.conf (a `replication` entry is not needed for logical replication, one for the database is)";
    /// The server's certificate or ours.
    SourceTls "source-tls" Setup
        "check sslmode, sslrootcert, sslcert and sslkey in [source] url against the server's certificate";
    /// The server is a standby, or default_transaction_read_only is on.
    SourceReadOnly "source-read-only" Transient
        "point [source] url at the primary, or list all hosts with target_session_attrs=read-write";
    /// The server shuts down or starts up (57P01, 57P02, 57P03).
    SourceShutdown "source-shutdown" Transient
        "nothing to do: the relay comes back with the server";
    /// The server fell silent.
    SourceSilent "source-silent" Transient
        "check the network path and the server's load; wal_sender_timeout bounds the silence";
    /// The server's max_wal_senders, max_replication_slots or max_connections are used up.
    SourceFull "source-full" Transient
        "raise max_connections, max_wal_senders or max_replication_slots, or end what uses them";
    /// `wal_level` is not `logical`.
    WalLevel "wal-level" Setup
        "set wal_level = logical and restart PostgreSQL";
    /// 42704 on the slot.
    SlotMissing "slot-missing" Setup
        "nothing to do unless [relay] auto_recreate is off: the relay makes the slot when the transactions that are open now have ended, and sends what no slot brings from the table. By hand: `outboxd init`";
    /// 55000 with an invalidated slot.
    SlotLost "slot-lost" Setup
        "the server removed WAL that the slot needed: raise max_slot_wal_keep_size. Unless [relay] auto_recreate is off the relay makes a new slot, and sends what no slot brings from the table. By hand: `outboxd deinit --slot-only`, then `outboxd init`";
    /// 55006: another session streams from the slot.
    SlotHeld "slot-held" Wait
        "another session uses the slot: see pg_replication_slots.active_pid; the relay goes on when it is gone";
    /// The slot is of another plugin, database or kind.
    SlotForeign "slot-foreign" Setup
        "the slot is not a pgoutput slot of this database: choose another name in [source] slot";
    /// 42704 on the publication, as of the slot's position in the WAL.
    PublicationMissing "publication-missing" Setup
        "create the publication (`outboxd schema` prints it, `outboxd init` makes it). It must be older than the slot's position: unless [relay] auto_recreate is off the relay makes a new slot then, and sends what no slot brings from the table. By hand: `outboxd deinit --slot-only`, then `outboxd init`";
    /// The publication leaves out rows, columns or INSERT.
    PublicationShape "publication-shape" Setup
        "make the publication fit: `outboxd check` lists what differs";
    /// The schema `outbox` is not there.
    SchemaMissing "schema-missing" Setup
        "run `outboxd init`, or apply the SQL of `outboxd schema`";
    /// The schema has another version than this program.
    SchemaVersion "schema-version" Setup
        "bring the schema to this program's version with `outboxd init`, or run the program that fits it";
    /// The outbox table lacks a column, or one has a type that can't be used.
    TableShape "table-shape" Setup
        "make the table fit: `outboxd check` lists what differs";
    /// The ledger was written in another cluster.
    OtherCluster "other-cluster" Setup
        "start `outboxd run`: it compares the ledger with the outbox that it finds, and where they fit together (pg_upgrade, dump and restore) goes on with a gap. Where this is the wrong cluster, correct [source] url first";
    /// The ledger is of a later history than the outbox, which was restored without it.
    LedgerAhead "ledger-ahead" Setup
        "restore the whole schema `outbox` from one backup, or: `outboxd recover` shows what the streams have beyond this outbox, and `outboxd recover --yes` takes out of the ledger what is about other events than those that now get their numbers";
    /// Receipts are missing: the outbox is there without its ledger, or with an older one.
    LedgerShort "ledger-short" Setup
        "restore the whole schema `outbox` from one backup, or: `outboxd recover` compares table and streams, and `outboxd recover --yes` records what is published";
    /// The stream has messages of this relay whose events the database does not know, or of a later
    /// generation: it was restored to an older point, or a failover lost transactions.
    HistoryLost "history-lost" Setup
        "`outboxd recover` shows them; `outboxd recover --yes` begins a new generation, and the relay goes on";
    /// 42501.
    Privilege "privilege" Setup
        "apply the grants of `outboxd schema --grants --role ROLE`; for slot and replication also ALTER ROLE … REPLICATION";
    /// A frame that this program can't read.
    Undecodable "undecodable" Refuse
        "the stream holds something this version can't read; nothing is confirmed past it: upgrade outboxd and report the frame";
    /// Any other error of the database.
    Database "database" Transient
        "see the server's message; the relay tries again";
    /// No connection to any of the servers.
    BrokerUnreachable "broker-unreachable" Transient
        "check that nats-server runs and that `servers` names it";
    /// Credentials refused.
    BrokerLogin "broker-login" Setup
        "check creds_file, nkey_file, user and password_file, or token_file";
    /// TLS with the broker failed.
    BrokerTls "broker-tls" Setup
        "check ca_file, cert_file and key_file against the server's certificate";
    /// A subject that the user may not publish or subscribe.
    BrokerPermission "broker-permission" Setup
        "grant what `outboxd check --print-permissions` lists";
    /// JetStream is off, or not answering.
    BrokerJetStream "broker-jetstream" Transient
        "enable JetStream on the server and in the account; check js_domain";
    /// The stream is not there.
    StreamMissing "stream-missing" Setup
        "create the stream, or run `outboxd init --create-streams`";
    /// The stream does not store the subjects of the template.
    StreamSubjects "stream-subjects" Setup
        "add the subjects to the stream's configuration, or change `subject`";
    /// The stream's configuration can't keep order with the configured pipeline.
    StreamPipeline "stream-pipeline" Setup
        "set allow_batched on the stream (nats-server 2.14 or newer), or `pipeline = \"auto\"`: the fastest that works";
    /// The stream is of a kind that can't be published to in order.
    StreamUnfit "stream-unfit" Setup
        "name another stream: one that stores what is published to it under its own subject, and acknowledges it";
    /// The stream ends below a sequence that was acknowledged, or has another message there: it lost
    /// its tail.
    StreamShorter "stream-shorter" Setup
        "nothing to do for a stream of retention `limits`: what it lost is found out and sent again. In any other what is missing can't be found out: restore the broker's newest store. By default a server syncs to disk every two minutes: use three replicas, or `sync_interval: always`";
    /// The stream or its replicas refuse or don't answer for now.
    StreamBusy "stream-busy" Transient
        "check the stream's limits and its replicas";
    /// The admin address can't be listened on.
    AdminAddress "admin-address" Refuse
        "end the process that has the address, or set another `listen` in [admin] (\"off\" for none)";
    /// No relay answers on its admin address.
    RelayUnreachable "relay-unreachable" Transient
        "start it with `outboxd run`, or name its address with --admin or [admin] listen";
    /// The configuration has the admin address off.
    AdminOff "admin-off" Setup
        "set `listen` in [admin] to an address and restart the relay, or name another relay's with --admin";
    /// The relay's status is not of this program's form.
    RelayVersion "relay-version" Setup
        "ask with the `outboxd` of the relay's version (--json passes its answer on as it is), or restart the relay with this one";
    /// A bug in this program.
    Internal "internal" Refuse
        "please report it with the log";
}

/// A failure with its kind and the words of whoever saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Decides what happens next.
    pub kind: Kind,
    /// What was seen: names the object (slot, stream, host), quotes the server.
    pub detail: String,
    /// PostgreSQL's code when the server gave one.
    pub sqlstate: Option<String>,
}

impl Failure {
    /// A failure without SQLSTATE.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Failure {
        Failure { kind, detail: detail.into(), sqlstate: None }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.code(), self.detail)?;
        if let Some(state) = &self.sqlstate {
            write!(f, " (SQLSTATE {state})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_code_of_its_own_and_a_remedy() {
        let mut codes: Vec<_> = Kind::ALL.iter().map(|kind| kind.code()).collect();
        codes.sort_unstable();
        let all = codes.len();
        codes.dedup();
        assert_eq!(codes.len(), all);
        assert!(Kind::ALL.iter().all(|kind| kind.remedy().len() > 10));
    }
}
