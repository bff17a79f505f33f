//! From what was given to a [`Config`]: every key is read once, with its default, and what it came
//! to is kept for `config show`. Rules that join several keys are in `cross`.

use super::fault::{Fault, Origin};
use super::form::Raw;
use super::given::{All, Given, Scope};
use super::keys::{self, Absent, Key, Section, Spec};
use super::{
    AdminConfig, ColumnMap, Config, DeadLetterConfig, DestinationConfig, Filter, HealthConfig,
    LogConfig, Mark, NatsAuth, NatsTls, QualifiedName, RelayConfig, RetentionConfig, SourceConfig,
    StreamCreate, cross,
};

/// One key as it took effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Its table, e.g. `destination.events`.
    pub table: String,
    /// Its name.
    pub key: &'static str,
    /// The value in TOML's notation, secrets redacted; `None` when nothing is set.
    pub value: Option<String>,
    /// Where it came from.
    pub origin: Origin,
}

/// Reads keys, collecting faults and what took effect.
pub(super) struct Reader {
    file: String,
    given: All,
    shown: Vec<Shown>,
}

impl Reader {
    /// A reader of what was given; `file` is named where something is missing.
    pub fn new(file: String, given: All) -> Reader {
        Reader { file, given, shown: Vec::new() }
    }

    /// The value, the default, or `None` when there is neither or a fault was noted.
    fn get<T>(&mut self, scope: Scope, key: &'static Key<T>) -> Option<T> {
        let spec = &key.spec;
        let (raw, origin) = match (self.given.values.get(&(scope, spec.name)), spec.absent) {
            (Some(Given { raw, origin }), _) => (raw.clone(), origin.clone()),
            (None, Absent::Default(text)) => (Raw::Text(text.to_owned()), Origin::Default),
            (None, Absent::Derived(_)) => return None,
            (None, Absent::Nothing(_)) => {
                self.show(scope, spec, None, Origin::Default);
                return None;
            }
            (None, Absent::Required) => {
                self.missing(scope, spec, (spec.words)());
                return None;
            }
        };
        let blank = matches!(&raw, Raw::Text(text) if text.trim().is_empty());
        let read = if blank { Err("is blank".to_owned()) } else { key.form.read(&raw) };
        match read {
            Ok(value) => {
                let text = if spec.secret { redacted(&raw) } else { key.form.typed(&raw).toml() };
                self.show(scope, spec, Some(text), origin);
                Some(value)
            }
            Err(wrong) => {
                match key.form.blame(&raw).filter(|_| !blank) {
                    Some((variable, wrong)) => self.blamed(variable, wrong),
                    None => {
                        let key = self.name(scope, spec);
                        self.given.fault(origin, &key, wrong, (spec.words)());
                    }
                }
                None
            }
        }
    }

    /// Notes a fault of a variable that is no key: once, though several keys take it in.
    fn blamed(&mut self, variable: String, wrong: String) {
        let origin = Origin::Variable(variable);
        if !self.given.faults.iter().any(|fault| fault.origin == origin) {
            self.given.fault(origin, "", wrong, "");
        }
    }

    /// As `get`, for a key whose default comes from another; without that one, no fault is noted.
    fn derived(
        &mut self,
        scope: Scope,
        key: &'static Key<String>,
        from: &'static str,
        default: Option<String>,
    ) -> Option<String> {
        if self.is_given(scope, &key.spec) {
            return self.get(scope, key);
        }
        let text = default.as_ref().map(|text| Raw::Text(text.clone()).toml());
        self.show(scope, &key.spec, text, Origin::Derived(from));
        default
    }

    /// A default that gives way to another key's value: shown as what it came to.
    fn lowered(&mut self, scope: Scope, spec: &Spec, to: &Spec) {
        let table = self.table(scope);
        let value = |shown: &Shown| {
            (shown.table == table && shown.key == to.name).then(|| shown.value.clone())
        };
        let value = self.shown.iter().find_map(value).flatten();
        self.shown.retain(|shown| shown.table != table || shown.key != spec.name);
        self.show(scope, spec, value, Origin::Derived(to.name));
    }

    fn show(&mut self, scope: Scope, spec: &Spec, value: Option<String>, origin: Origin) {
        self.shown.push(Shown { table: self.table(scope), key: spec.name, value, origin });
    }

    /// Was the key given anywhere?
    pub fn is_given(&self, scope: Scope, spec: &Spec) -> bool {
        self.given.values.contains_key(&(scope, spec.name))
    }

    /// Notes that a key is needed, at its table.
    pub fn missing(&mut self, scope: Scope, spec: &Spec, right: String) {
        let table = self.given.tables.get(&scope).cloned();
        let origin = table.unwrap_or_else(|| Origin::WholeFile(self.file.clone()));
        let key = self.name(scope, spec);
        self.given.fault(origin, &key, "is missing".to_owned(), right);
    }

    /// Notes a fault of a key that was given.
    pub fn wrong(&mut self, scope: Scope, spec: &Spec, wrong: &str, right: &str) {
        let at = self.given.values.get(&(scope, spec.name)).map(|given| given.origin.clone());
        let key = self.name(scope, spec);
        self.given.fault(at.unwrap_or(Origin::Default), &key, wrong.to_owned(), right);
    }

    fn table(&self, scope: Scope) -> String {
        let name = scope.destination.and_then(|at| self.given.destinations.get(at));
        scope.section.path().replace("NAME", name.map_or("NAME", String::as_str))
    }

    fn name(&self, scope: Scope, spec: &Spec) -> String {
        format!("{}.{}", self.table(scope), spec.name)
    }

    /// The configuration, or every fault.
    pub fn config(mut self) -> Result<(Config, Vec<Shown>), Vec<Fault>> {
        let relay = self.relay();
        let source = self.source(relay.as_ref().map(|relay| relay.name.as_str()));
        let names = self.given.destinations.clone();
        let destinations: Vec<_> =
            names.into_iter().enumerate().map(|(at, name)| self.destination(at, name)).collect();
        if destinations.is_empty() {
            let right = "a table for each stream, e.g. [destination.events] with \
                         servers = [\"nats://localhost:4222\"] and stream = \"EVENTS\"";
            let wrong = "no destination: events have nowhere to go".to_owned();
            self.given.fault(Origin::WholeFile(self.file.clone()), "destination", wrong, right);
        }
        let retention = self.retention();
        let letters = self.get(only(Section::DeadLetters), &keys::DEAD_LETTER_RETENTION);
        let admin = self.get(only(Section::Admin), &keys::LISTEN);
        let health = self.get(only(Section::Health), &keys::MAX_LAG);
        let level = self.get(only(Section::Log), &keys::LOG_LEVEL);
        let format = self.get(only(Section::Log), &keys::LOG_FORMAT);
        let whole = (|| {
            Some(Config {
                relay: relay?,
                source: source?,
                destinations: destinations.into_iter().collect::<Option<_>>()?,
                retention: retention?,
                dead_letters: DeadLetterConfig { retention: letters? },
                admin: AdminConfig { listen: admin? },
                log: LogConfig { format: format?, level: level? },
                health: HealthConfig { max_lag: health? },
            })
        })();
        if let Some(config) = &whole {
            cross::alone(&mut self, &config.destinations);
        }
        match whole {
            Some(mut config) if self.given.faults.is_empty() => {
                cross::share_streams(&mut config.destinations);
                Ok((config, self.shown))
            }
            Some(_) | None => Err(self.given.faults),
        }
    }

    fn relay(&mut self) -> Option<RelayConfig> {
        let scope = only(Section::Relay);
        let name = self.get(scope, &keys::NAME);
        let memory = self.get(scope, &keys::MEMORY);
        let interval = self.get(scope, &keys::RECEIPT_INTERVAL);
        let events = self.get(scope, &keys::RECEIPT_EVENTS);
        let shutdown = self.get(scope, &keys::SHUTDOWN_TIMEOUT);
        let stream = self.get(scope, &keys::STREAM_ON);
        let recreate = self.get(scope, &keys::AUTO_RECREATE);
        let take_over_after = self.get(scope, &keys::TAKE_OVER_AFTER);
        let sweep = self.get(scope, &keys::SWEEP_INTERVAL);
        let retained = self.get(scope, &keys::MAX_RETAINED_WAL);
        Some(RelayConfig {
            name: name?,
            memory_bytes: usize::try_from(memory?).ok()?,
            shutdown_timeout: shutdown?,
            receipt_interval: interval?,
            receipt_events: usize::try_from(events?).ok()?,
            stream: stream?,
            auto_recreate: recreate?,
            take_over_after,
            sweep_interval: sweep?,
            max_retained_wal_bytes: retained?,
        })
    }

    fn source(&mut self, relay: Option<&str>) -> Option<SourceConfig> {
        let scope = only(Section::Source);
        let url = self.get(scope, &keys::URL);
        let replication_url = self.get(scope, &keys::REPLICATION_URL);
        let default = relay.map(cross::object_name);
        let slot = self.derived(scope, &keys::SLOT, "relay.name", default.clone());
        let publication = self.derived(scope, &keys::PUBLICATION, "relay.name", default);
        let table = self.get(scope, &keys::TABLE);
        let mark = self.get(scope, &keys::MARK);
        let timeout = self.get(scope, &keys::CONNECT_TIMEOUT);
        let columns = self.columns(mark == Some(Mark::Column));
        if mark.is_some_and(|mark| mark != Mark::Ledger)
            && table.as_ref().is_some_and(QualifiedName::is_outbox_event)
        {
            let right = "ledger: outbox.event has retention";
            self.wrong(scope, &keys::MARK.spec, "is for a table of your own", right);
        }
        Some(SourceConfig {
            url: url?,
            replication_url,
            slot: slot?,
            publication: publication?,
            table: table?,
            columns: columns?,
            mark: mark?,
            connect_timeout: timeout?,
        })
    }

    fn retention(&mut self) -> Option<RetentionConfig> {
        let scope = only(Section::Retention);
        let keep = self.get(scope, &keys::RETENTION_KEEP);
        let manage = self.get(scope, &keys::RETENTION_MANAGE);
        let ahead = self.get(scope, &keys::RETENTION_AHEAD);
        let every = self.get(scope, &keys::RETENTION_EVERY);
        Some(RetentionConfig { keep: keep?, manage: manage?, ahead: ahead?, every: every? })
    }

    fn columns(&mut self, marks: bool) -> Option<ColumnMap> {
        let scope = only(Section::Columns);
        let seq = self.get(scope, &keys::COLUMN_SEQ);
        let id = self.get(scope, &keys::COLUMN_ID);
        let run = self.get(scope, &keys::COLUMN_RUN);
        let kind = self.get(scope, &keys::COLUMN_KIND);
        let payload = self.get(scope, &keys::COLUMN_PAYLOAD);
        let tenant = self.get(scope, &keys::COLUMN_TENANT);
        let version = self.get(scope, &keys::COLUMN_VERSION);
        let headers = self.get(scope, &keys::COLUMN_HEADERS);
        let created_at = self.get(scope, &keys::COLUMN_CREATED_AT);
        let published_at = self.get(scope, &keys::COLUMN_PUBLISHED_AT);
        let map = ColumnMap {
            seq: seq?,
            id: id?,
            run: run?,
            kind: kind?,
            payload: payload?,
            tenant: tenant?,
            version: version?,
            headers: headers?,
            created_at: created_at?,
            published_at: published_at?,
        };
        cross::columns(self, scope, &map, marks);
        Some(map)
    }

    fn destination(&mut self, at: usize, name: String) -> Option<DestinationConfig> {
        let scope = Scope { section: Section::Destination, destination: Some(at) };
        let servers = self.get(scope, &keys::SERVERS);
        if servers.as_ref().is_some_and(Vec::is_empty) {
            self.wrong(scope, &keys::SERVERS.spec, "is empty", "at least one server");
        }
        let stream = self.get(scope, &keys::STREAM);
        let subject = self.get(scope, &keys::SUBJECT);
        let filter = Filter {
            kinds: self.get(scope, &keys::KINDS).unwrap_or_default(),
            tenants: self.get(scope, &keys::TENANTS).unwrap_or_default(),
        };
        let required = self.get(scope, &keys::REQUIRED);
        let pipeline = self.get(scope, &keys::PIPELINE);
        let exclusive = self.get(scope, &keys::EXCLUSIVE);
        cross::exclusive(self, scope, pipeline, exclusive);
        let on_dead_letter = self.get(scope, &keys::ON_DEAD_LETTER);
        let ack_timeout = self.get(scope, &keys::ACK_TIMEOUT);
        let max_in_flight = self.get(scope, &keys::MAX_IN_FLIGHT);
        let auth = NatsAuth {
            creds_file: self.get(scope, &keys::CREDS_FILE),
            nkey_file: self.get(scope, &keys::NKEY_FILE),
            user: self.get(scope, &keys::USER),
            password_file: self.get(scope, &keys::PASSWORD_FILE),
            token_file: self.get(scope, &keys::TOKEN_FILE),
        };
        let tls_required = self.get(scope, &keys::TLS);
        let (ca_file, cert_file, key_file) = (
            self.get(scope, &keys::CA_FILE),
            self.get(scope, &keys::CERT_FILE),
            self.get(scope, &keys::KEY_FILE),
        );
        let inbox_prefix = self.get(scope, &keys::INBOX_PREFIX);
        let js_domain = self.get(scope, &keys::JS_DOMAIN);
        cross::credentials(self, scope);
        let create = self.create(at);
        Some(DestinationConfig {
            name,
            servers: servers?,
            stream: stream?,
            subject: subject?,
            filter,
            required: required?,
            pipeline: pipeline?,
            exclusive: exclusive?,
            on_dead_letter: on_dead_letter?,
            ack_timeout: ack_timeout?,
            max_in_flight: usize::try_from(max_in_flight?).ok()?,
            shares_stream: false,
            auth,
            tls: NatsTls { required: tls_required?, ca_file, cert_file, key_file },
            inbox_prefix,
            js_domain,
            create: create?,
        })
    }

    fn create(&mut self, at: usize) -> Option<StreamCreate> {
        let scope = Scope { section: Section::Create, destination: Some(at) };
        let enabled = self.get(scope, &keys::CREATE_ENABLED);
        let replicas = self.get(scope, &keys::CREATE_REPLICAS);
        let max_bytes = self.get(scope, &keys::CREATE_MAX_BYTES);
        let max_age = self.get(scope, &keys::CREATE_MAX_AGE);
        let mut window = self.get(scope, &keys::CREATE_DUPLICATE_WINDOW);
        if let (Some(age), Some(longer)) = (max_age, window)
            && longer > age
        {
            let spec = &keys::CREATE_MAX_AGE.spec;
            if self.is_given(scope, &keys::CREATE_DUPLICATE_WINDOW.spec) {
                let right = "max_age at least as long";
                self.wrong(scope, spec, "is shorter than duplicate_window", right);
            } else {
                window = max_age;
                self.lowered(scope, &keys::CREATE_DUPLICATE_WINDOW.spec, spec);
            }
        }
        Some(StreamCreate {
            enabled: enabled?,
            replicas: u16::try_from(replicas?).ok()?,
            max_bytes: max_bytes.map(i64::try_from).transpose().ok()?,
            max_age,
            duplicate_window: window,
        })
    }
}

/// The scope of a table that exists once.
fn only(section: Section) -> Scope {
    Scope { section, destination: None }
}

/// A connection string with its secrets taken out.
fn redacted(raw: &Raw) -> String {
    match raw {
        Raw::Text(text) => Raw::Text(super::show::without_secrets(text)).toml(),
        Raw::Integer(_) | Raw::Switch(_) | Raw::List(_) | Raw::Other(_) => String::new(),
    }
}
