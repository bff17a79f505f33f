//! The table of keys. Parsing, `config show`, the sample file and docs/configuration.md follow
//! from it; a key that is not here does not exist.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

use super::form::{
    Choice, Column, Count, Dsn, File, Form, Kept, Lasting, Levels, List, Listen, Relation, Size,
    Subject, Switch,
};
use super::{LogFormat, Mark, OnDeadLetter, PipelineChoice, QualifiedName, rules};
use crate::message::Template;

/// A table of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Section {
    /// `[relay]`
    Relay,
    /// `[source]`
    Source,
    /// `[source.columns]`
    Columns,
    /// `[destination.NAME]`
    Destination,
    /// `[destination.NAME.create]`
    Create,
    /// `[retention]`
    Retention,
    /// `[dead_letters]`
    DeadLetters,
    /// `[admin]`
    Admin,
    /// `[health]`
    Health,
    /// `[log]`
    Log,
}

impl Section {
    /// Every section, in the order of the sample file.
    pub const ALL: &'static [Section] = &[
        Section::Relay,
        Section::Source,
        Section::Columns,
        Section::Destination,
        Section::Create,
        Section::Retention,
        Section::DeadLetters,
        Section::Admin,
        Section::Health,
        Section::Log,
    ];

    /// Its path, with `NAME` for a destination's name.
    pub fn path(self) -> &'static str {
        match self {
            Section::Relay => "relay",
            Section::Source => "source",
            Section::Columns => "source.columns",
            Section::Destination => "destination.NAME",
            Section::Create => "destination.NAME.create",
            Section::Retention => "retention",
            Section::DeadLetters => "dead_letters",
            Section::Admin => "admin",
            Section::Health => "health",
            Section::Log => "log",
        }
    }

    /// The section at a path of the file.
    pub(super) fn at(path: &[&str]) -> Option<Section> {
        Some(match path {
            ["relay"] => Section::Relay,
            ["source"] => Section::Source,
            ["source", "columns"] => Section::Columns,
            ["destination", _] => Section::Destination,
            ["destination", _, "create"] => Section::Create,
            ["retention"] => Section::Retention,
            ["dead_letters"] => Section::DeadLetters,
            ["admin"] => Section::Admin,
            ["health"] => Section::Health,
            ["log"] => Section::Log,
            _ => return None,
        })
    }

    /// What the section is for, one sentence.
    pub fn doc(self) -> &'static str {
        match self {
            Section::Relay => "The relay itself: its name and its bounds.",
            Section::Source => "The PostgreSQL database and its outbox table.",
            Section::Columns => {
                "Names of the columns that carry an event, for a table of your own."
            }
            Section::Destination => "One stream of one NATS system. At least one destination.",
            Section::Create => "How `outboxd init --create-streams` makes the stream.",
            Section::Retention => "When rows of the outbox table go, and who makes its partitions.",
            Section::DeadLetters => "Events that could not be published.",
            Section::Admin => "Health, metrics, status and the console page.",
            Section::Health => "When `/healthz` turns red.",
            Section::Log => "Log lines, on standard error.",
        }
    }
}

/// What a key is when it is not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absent {
    /// A fault.
    Required,
    /// This value, in the notation of a variable.
    Default(&'static str),
    /// Made from others; the words say how.
    Derived(&'static str),
    /// Nothing; the words say what that means.
    Nothing(&'static str),
}

/// What is known of a key whatever its type.
#[derive(Debug)]
pub struct Spec {
    /// Its table.
    pub section: Section,
    /// Its name.
    pub name: &'static str,
    /// Value when it is not given.
    pub absent: Absent,
    /// Never printed?
    pub secret: bool,
    /// One sentence.
    pub doc: &'static str,
    /// An example for the sample file where there is no default.
    pub example: &'static str,
    /// Words of its form.
    pub words: fn() -> String,
}

/// A key and how its value is read.
pub struct Key<T: 'static> {
    /// The untyped part.
    pub spec: Spec,
    /// Its form.
    pub form: &'static dyn Form<T>,
}

macro_rules! keys {
    ($($const:ident: $type:ty = $section:ident $name:literal, $form:expr, $absent:expr,
        $doc:literal $(=> $example:literal)? $(, $secret:ident)?;)*) => {
        $(
            #[doc = $doc]
            pub static $const: Key<$type> = Key {
                spec: Spec {
                    section: Section::$section,
                    name: $name,
                    absent: $absent,
                    secret: false $(|| keys!(@ $secret))?,
                    doc: $doc,
                    example: concat!("" $(, $example)?),
                    words: || $const.form.words(),
                },
                form: &$form,
            };
        )*
        /// Every key, in the order of the sample file.
        pub static ALL: &[&Spec] = &[$(&$const.spec,)*];
    };
    (@ secret) => { true };
}

use Absent::{Default, Derived, Nothing, Required};

keys! {
    NAME: String = Relay "name", rules::NAME, Required,
        "Name of this relay: header `Outbox-Relay`, the lock, and the defaults of slot and publication."
        => "\"orders\"";
    MEMORY: u64 = Relay "memory", Size("4MiB", "64GiB"), Default("32MiB"),
        "Memory for events that are read and not yet decided, a quarter of it for messages on their way; reading stops when it is full.";
    RECEIPT_INTERVAL: Duration = Relay "receipt_interval", Lasting("10ms", "10s"), Default("100ms"),
        "Longest time between an ack and its receipt in the ledger.";
    RECEIPT_EVENTS: u32 = Relay "receipt_events", Count(1, 100_000), Default("10000"),
        "A receipt is written at this many decided events at the latest.";
    SHUTDOWN_TIMEOUT: Duration = Relay "shutdown_timeout", Lasting("100ms", "10m"), Default("10s"),
        "How long a stop waits for outstanding acks.";

    STREAM_ON: bool = Relay "stream", Switch, Default("true"),
        "Read the WAL? Without it the table is read in its place: rows go in the order of their numbers, within a second or so.";
    AUTO_RECREATE: bool = Relay "auto_recreate", Switch, Default("true"),
        "Make the slot when it is missing or lost? What it can't bring is found in the table.";
    SWEEP_INTERVAL: Duration = Relay "sweep_interval", Lasting("1s", "1d"), Default("1m"),
        "How often the table is looked through for rows that the WAL did not bring; after every start as well.";
    TAKE_OVER_AFTER: Duration = Relay "take_over_after", Lasting("2s", "1h"), Nothing("the server ends it, after `wal_sender_timeout`"),
        "A standby ends the database sessions of a relay of this name that has said nothing on them for so long, and takes over."
        => "\"10s\"";
    MAX_RETAINED_WAL: u64 = Relay "max_retained_wal", Size("16MiB", "1024TiB"), Default("1GiB"),
        "WAL that undecided events may hold back; beyond it the events of a destination that stands still or lags wait in the ledger and the table instead.";

    URL: SecretString = Source "url", Dsn, Required,
        "The database, as a libpq URL or keywords. PG* variables and the password file fill what it leaves out. The connection must not go through a pooler."
        => "\"postgres://outboxd@db.example/app?sslmode=verify-full\"", secret;
    REPLICATION_URL: SecretString = Source "replication_url", Dsn, Nothing("`url`"),
        "Used in place of `url` by both connections of the relay and by every command, where `url` leads through a pooler."
        => "\"postgres://outboxd@db-direct.example/app\"", secret;
    SLOT: String = Source "slot", rules::SLOT, Derived("`outboxd_` and the relay's name in lower case, other characters than a-z, 0-9 as _"),
        "Replication slot." => "\"outboxd_orders\"";
    PUBLICATION: String = Source "publication", rules::IDENTIFIER, Derived("the same as the slot's default"),
        "Publication." => "\"outboxd_orders\"";
    TABLE: QualifiedName = Source "table", Relation, Default("outbox.event"),
        "The outbox table.";
    MARK: Mark = Source "mark",
        Choice(&[("ledger", Mark::Ledger), ("column", Mark::Column), ("delete", Mark::Delete)]), Default("ledger"),
        "What becomes of a row of a table of your own when its event is decided: nothing, `published_at` is set, or the row is deleted. The ledger is kept in each case.";
    CONNECT_TIMEOUT: Duration = Source "connect_timeout", Lasting("1s", "5m"), Default("10s"),
        "Deadline of each step of connecting: TCP, TLS, log-in, each start-up statement.";

    COLUMN_SEQ: String = Columns "seq", rules::IDENTIFIER, Default("seq"),
        "bigint, filled by a sequence.";
    COLUMN_ID: String = Columns "id", rules::IDENTIFIER, Default("id"),
        "uuid, an integer type or text: the identity consumers see.";
    COLUMN_RUN: String = Columns "run", rules::IDENTIFIER, Default("run_id"),
        "text: the ordering key.";
    COLUMN_KIND: String = Columns "kind", rules::IDENTIFIER, Default("kind"),
        "text: the kind of event.";
    COLUMN_PAYLOAD: String = Columns "payload", rules::IDENTIFIER, Default("payload"),
        "json, jsonb, text or bytea: the message's body.";
    COLUMN_TENANT: Option<String> = Columns "tenant", Column, Default("tenant"),
        "text.";
    COLUMN_VERSION: Option<String> = Columns "version", Column, Default("version"),
        "An integer type: schema version of the payload.";
    COLUMN_HEADERS: Option<String> = Columns "headers", Column, Default("headers"),
        "jsonb or json: an object of headers.";
    COLUMN_CREATED_AT: Option<String> = Columns "created_at", Column, Default("created_at"),
        "timestamptz: when the row was made.";
    COLUMN_PUBLISHED_AT: String = Columns "published_at", rules::IDENTIFIER, Default("published_at"),
        "timestamptz or timestamp: NULL until the row is done. Used with `mark = \"column\"` and by `outboxd adopt` only.";

    SERVERS: Vec<String> = Destination "servers",
        List("nats:// or tls:// URLs without credentials", rules::server), Required,
        "Servers of one NATS system, tried in turn." => "[\"nats://localhost:4222\"]";
    STREAM: String = Destination "stream", rules::STREAM, Required,
        "The JetStream stream that must store every message." => "\"EVENTS\"";
    SUBJECT: Template = Destination "subject", Subject, Default("events.{kind}"),
        "Subject of a message.";
    KINDS: Vec<String> = Destination "kinds",
        List("a list of patterns; * stands for any text", rules::pattern), Nothing("all"),
        "Kinds of events that go there." => "[\"order.*\"]";
    TENANTS: Vec<String> = Destination "tenants",
        List("a list of patterns; * stands for any text", rules::pattern), Nothing("all"),
        "Tenants whose events go there; a row without tenant matches no pattern."
        => "[\"acme\"]";
    REQUIRED: bool = Destination "required", Switch, Default("true"),
        "Do readiness, health and retention wait for it? Whatever it is, it delays no other destination: what it can't take is handed over to the ledger and the table when memory is full.";
    PIPELINE: PipelineChoice = Destination "pipeline",
        Choice(&[("auto", PipelineChoice::Auto), ("batch", PipelineChoice::Batch), ("sequence", PipelineChoice::Sequence), ("per-run", PipelineChoice::PerRun)]),
        Default("auto"),
        "How order is kept: `batch` (nats-server 2.14 or newer, stream with `allow_batched`), `sequence` (a stream of one replica with `exclusive = true`), `per-run` (one event of a run in flight), or the first of them that works.";
    EXCLUSIVE: bool = Destination "exclusive", Switch, Default("false"),
        "Is this destination all that ever writes the stream? Only you can know; `sequence` needs it. Messages of others, and of a replay, stop the flow for a moment each, and soon lead to `per-run` for a minute.";
    ON_DEAD_LETTER: OnDeadLetter = Destination "on_dead_letter",
        Choice(&[("continue", OnDeadLetter::Continue), ("block-run", OnDeadLetter::BlockRun)]),
        Default("continue"),
        "When an event of a run can't be published: `continue` with the run's next event, or `block-run`: the run waits until the dead letter is redriven or discarded.";
    ACK_TIMEOUT: Duration = Destination "ack_timeout", Lasting("100ms", "1m"), Default("5s"),
        "Silence after which an outcome counts as unknown and the stream is read to find out.";
    MAX_IN_FLIGHT: u32 = Destination "max_in_flight", Count(1, 1_000_000), Default("10000"),
        "Events sent and unanswered at most; all destinations together have 128 for each MiB of `memory`.";
    CREDS_FILE: PathBuf = Destination "creds_file", File, Nothing("no JWT"),
        "`.creds` file with JWT and seed." => "\"/etc/outboxd/nats.creds\"";
    NKEY_FILE: PathBuf = Destination "nkey_file", File, Nothing("no nkey"),
        "File with the seed of an nkey." => "\"/etc/outboxd/nats.nk\"";
    USER: String = Destination "user", rules::USER, Nothing("no user"),
        "User name; needs `password_file`." => "\"outboxd\"";
    PASSWORD_FILE: PathBuf = Destination "password_file", File, Nothing("no password"),
        "File with the user's password." => "\"/etc/outboxd/nats.password\"";
    TOKEN_FILE: PathBuf = Destination "token_file", File, Nothing("no token"),
        "File with a token." => "\"/etc/outboxd/nats.token\"";
    TLS: bool = Destination "tls", Switch, Default("false"),
        "Refuse to speak plain text, also to nats:// URLs.";
    CA_FILE: PathBuf = Destination "ca_file", File, Nothing("the system's certificates"),
        "Certificates that sign the servers', PEM." => "\"/etc/outboxd/ca.pem\"";
    CERT_FILE: PathBuf = Destination "cert_file", File, Nothing("no client certificate"),
        "Client certificate, PEM; needs `key_file`." => "\"/etc/outboxd/client.pem\"";
    KEY_FILE: PathBuf = Destination "key_file", File, Nothing("no client certificate"),
        "Key of the client certificate, PEM." => "\"/etc/outboxd/client.key\"";
    INBOX_PREFIX: String = Destination "inbox_prefix", rules::TOKENS, Nothing("_INBOX"),
        "Start of the subjects that answers come to." => "\"_INBOX_outboxd\"";
    JS_DOMAIN: String = Destination "js_domain", rules::DOMAIN, Nothing("the server's own"),
        "JetStream domain, for leaf nodes." => "\"hub\"";

    CREATE_ENABLED: bool = Create "enabled", Switch, Default("false"),
        "Does `outboxd init` make the stream when it is missing, without being told to?";
    CREATE_REPLICAS: u32 = Create "replicas", Count(1, 5), Default("1"),
        "Replicas.";
    CREATE_MAX_BYTES: u64 = Create "max_bytes", Size("1MiB", "1024TiB"), Nothing("no limit"),
        "Limit of the stream's size." => "\"10GiB\"";
    CREATE_MAX_AGE: Duration = Create "max_age", Lasting("1s", "36500d"), Nothing("no limit"),
        "Limit of the messages' age." => "\"7d\"";
    CREATE_DUPLICATE_WINDOW: Duration = Create "duplicate_window", Lasting("100ms", "36500d"), Default("2m"),
        "How long the stream remembers message ids; not above `max_age`, which lowers the default.";

    RETENTION_KEEP: Option<Duration> = Retention "keep", Kept("1m", "36500d"), Default("7d"),
        "How long a row stays after it is final for every required destination: published, dead letter, or not taken by its filter.";
    RETENTION_MANAGE: bool = Retention "manage", Switch, Default("true"),
        "Does the relay remove rows, and make and drop the daily partitions of `outbox.event`? With `false` it touches neither, so that pg_partman or a job of your own can; only its own ledger is compacted.";
    RETENTION_AHEAD: Duration = Retention "ahead", Lasting("1d", "366d"), Default("14d"),
        "How far ahead partitions are made.";
    RETENTION_EVERY: Duration = Retention "every", Lasting("1s", "7d"), Default("1h"),
        "How often the relay looks after rows, partitions and ledger.";
    DEAD_LETTER_RETENTION: Option<Duration> = DeadLetters "retention", Kept("1h", "36500d"), Default("30d"),
        "How long a dead letter is kept after it was redriven or discarded; one that is open is always kept.";

    LISTEN: Option<SocketAddr> = Admin "listen", Listen, Default("127.0.0.1:7790"),
        "Address of `/livez`, `/readyz`, `/healthz`, `/metrics`, `/api/status` and the console.";

    MAX_LAG: Duration = Health "max_lag", Lasting("1s", "365d"), Default("60s"),
        "`/healthz` is red while the oldest undecided event is older.";

    LOG_LEVEL: String = Log "level", Levels, Default("info"),
        "Which lines.";
    LOG_FORMAT: LogFormat = Log "format",
        Choice(&[("text", LogFormat::Text), ("json", LogFormat::Json)]), Default("text"),
        "`text` for people, `json` for one object a line.";
}

/// The key of a section.
pub(super) fn find(section: Section, name: &str) -> Option<&'static Spec> {
    of(section).find(|spec| spec.name == name)
}

/// The keys of a section.
pub fn of(section: Section) -> impl Iterator<Item = &'static Spec> {
    ALL.iter().copied().filter(move |spec| spec.section == section)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_is_there_twice_and_names_suit_variables() {
        for (at, spec) in ALL.iter().enumerate() {
            let twin = |other: &&Spec| (other.section, other.name) == (spec.section, spec.name);
            assert!(!ALL[..at].iter().any(twin), "{}", spec.name);
            let plain = |b: u8| b.is_ascii_lowercase() || b == b'_';
            assert!(spec.name.bytes().all(plain) && !spec.name.contains("__"), "{}", spec.name);
        }
    }

    #[test]
    fn sections_stand_together_in_their_order() {
        let sections: Vec<_> = ALL.iter().map(|spec| spec.section).collect();
        assert!(sections.is_sorted_by_key(|one| Section::ALL.iter().position(|s| s == one)));
    }

    #[test]
    fn what_has_no_default_has_an_example() {
        for spec in ALL {
            let given = matches!(spec.absent, Absent::Default(_));
            assert!(given == spec.example.is_empty(), "{}", spec.name);
        }
    }
}
