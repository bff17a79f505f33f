//! What a configuration means, and every fault of it.

use std::ffi::OsString;
use std::time::Duration;

use secrecy::ExposeSecret;

use super::{Config, Faults, Loaded, LogFormat, PipelineChoice, Places, keys, show};

const SMALL: &str = r#"
[relay]
name = "Orders.eu-1"
[source]
url = "postgres://me:hunter2@db/app?sslmode=require"
[destination.events]
servers = ["nats://localhost:4222"]
stream = "EVENTS"
"#;

fn parse(text: &str) -> Result<Config, Faults> {
    Config::parse("t.toml", text)
}

/// `place key` of each fault, in the report's order.
fn faults(text: &str) -> Vec<String> {
    told(&parse(text).unwrap_err())
}

fn told(faults: &Faults) -> Vec<String> {
    faults.0.iter().map(|fault| format!("{} {}", fault.origin, fault.key)).collect()
}

fn load(text: &str, environment: &[(&str, &str)], settings: &[&str]) -> Result<Loaded, Faults> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("t.toml");
    std::fs::write(&file, text).unwrap();
    let variable = |(name, value): &(&str, &str)| (OsString::from(name), OsString::from(value));
    Places {
        file: Some(file),
        environment: environment.iter().map(variable).collect(),
        settings: settings.iter().map(|one| (*one).to_owned()).collect(),
    }
    .load()
}

#[test]
fn a_small_file_and_the_defaults() {
    let config = parse(SMALL).unwrap();
    assert_eq!(config.relay.name, "Orders.eu-1");
    assert_eq!(config.relay.memory_bytes, 32 << 20);
    assert_eq!(config.relay.receipt_interval, Duration::from_millis(100));
    assert_eq!(config.relay.receipt_events, 10_000);
    assert_eq!(config.source.slot, "outboxd_orders_eu_1");
    assert_eq!(config.source.publication, "outboxd_orders_eu_1");
    assert_eq!(config.source.columns, super::ColumnMap::default());
    assert_eq!((&*config.source.table.schema, &*config.source.table.name), ("outbox", "event"));
    let destination = &config.destinations[0];
    assert_eq!((&*destination.name, &*destination.stream), ("events", "EVENTS"));
    assert!(destination.required && !destination.shares_stream && !destination.create.enabled);
    assert_eq!(destination.pipeline, PipelineChoice::Auto);
    assert_eq!(destination.create.duplicate_window, Some(Duration::from_secs(120)));
    assert_eq!(config.admin.listen, "127.0.0.1:7790".parse().ok());
    assert_eq!(config.log.format, LogFormat::Text);
    assert_eq!(config.health.max_lag, Duration::from_secs(60));
}

#[test]
fn all_faults_at_once_with_their_places() {
    let text = "[relay]\nname = \"a b\"\nmemroy = \"1MiB\"\n[source]\nurl = \"\"\n\
                [destination.x]\n  servers = [\"nats://a\"]\n  ack_timeout = 5\n";
    let report = parse(text).unwrap_err();
    assert_eq!(
        told(&report),
        [
            "t.toml:2:8 relay.name",
            "t.toml:3:1 relay.memroy",
            "t.toml:5:7 source.url",
            "t.toml:6:14 destination.x.stream",
            "t.toml:8:17 destination.x.ack_timeout",
        ]
    );
    let report = report.to_string();
    for part in ["5 faults", "did you mean relay.memory?", "is blank", "5 has no unit"] {
        assert!(report.contains(part), "{part} is not in:\n{report}");
    }
}

#[test]
fn syntax_errors_have_a_place() {
    assert_eq!(faults("[relay]\nname = \n"), ["t.toml:2:8 "]);
    assert_eq!(faults("[relay\nname = 'x'\n")[0], "t.toml:1:7 ");
    assert_eq!(faults("[relay]\nname = 'x'\nname = 'y'\n")[0], "t.toml:3:1 ");
}

#[test]
fn an_empty_file_lacks_what_is_required() {
    assert_eq!(faults(""), ["t.toml relay.name", "t.toml source.url", "t.toml destination"]);
}

#[test]
fn tables_and_keys_that_are_not_there() {
    let extra = "[relai]\nx = 1\n[sink.a]\n[destination.events.creat]\n[admin.listen]\n";
    let text = format!("name = 'x'\nrelay2 = 1\n{SMALL}{extra}");
    assert_eq!(
        faults(&text),
        [
            "t.toml:1:1 name",
            "t.toml:2:1 relay2",
            "t.toml:11:2 relai",
            "t.toml:13:2 sink",
            "t.toml:14:21 destination.events.creat",
            "t.toml:15:8 admin.listen",
        ]
    );
    assert_eq!(faults(&format!("{SMALL}[[log]]\n")), ["t.toml:9:3 log"]);
    let misplaced = parse(&format!("{SMALL}memory = '8MiB'\n")).unwrap_err().to_string();
    assert!(misplaced.contains("memory belongs in [relay]"), "{misplaced}");
}

#[test]
fn every_key_refuses_blank_and_foreign_types() {
    for spec in keys::ALL {
        let table = spec.section.path().replace("NAME", "events");
        for value in ["\"\"", "\" \"", "1.5", "2026-01-01", "[[]]", "[\"\"]", "{ a = 1 }"] {
            let line = format!("{table}.{} = {value}\n", spec.name);
            let others: String = SMALL
                .lines()
                .filter(|l| !l.starts_with(spec.name))
                .map(|l| format!("{l}\n"))
                .collect();
            let text = dotted(&others) + &line;
            assert!(parse(&text).is_err(), "{line} was accepted");
        }
    }
}

/// The same configuration with dotted keys, so that one can be appended to any table.
fn dotted(text: &str) -> String {
    let mut table = String::new();
    let mut out = String::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(heading) => table = heading.to_owned(),
            None => out.push_str(&format!("{table}.{line}\n")),
        }
    }
    out
}

#[test]
fn flag_over_environment_over_file() {
    let environment = [
        ("OUTBOXD_RELAY__NAME", "from-env"),
        ("OUTBOXD_DESTINATION__EVENTS__STREAM", "ENV"),
        ("OUTBOXD_DESTINATION__EVENTS__CREATE__REPLICAS", "3"),
        ("OUTBOXD_DESTINATION__AUDIT__STREAM", "AUDIT"),
        ("OUTBOXD_DESTINATION__AUDIT__SERVERS", "nats://a, nats://b"),
        ("OUTBOXD_DESTINATION__AUDIT__REQUIRED", "false"),
        ("OUTBOXD_LOG__LEVEL", "debug"),
        ("OUTBOXD_CONFIG", "elsewhere"),
        ("OUTBOXD_PG_BIN", "/usr/lib/postgresql/18/bin"),
        ("OUTBOXD_TEST_EVENTS", "1000"),
        ("OUTBOXD_SERVICE_HOST", "10.0.0.1"),
        ("OUTBOXD_PORT_7790_TCP", "tcp://10.0.0.1:7790"),
        ("HOME", "/root"),
    ];
    let loaded = load(SMALL, &environment, &["log.level=trace", "relay.memory=64MiB"]).unwrap();
    let config = &loaded.config;
    assert_eq!(config.relay.name, "from-env");
    assert_eq!(config.source.slot, "outboxd_from_env");
    assert_eq!(config.relay.memory_bytes, 64 << 20);
    assert_eq!(config.log.level, "trace");
    let names: Vec<_> = config.destinations.iter().map(|one| &*one.name).collect();
    assert_eq!(names, ["events", "audit"]);
    assert_eq!(config.destinations[0].stream, "ENV");
    assert_eq!(config.destinations[0].create.replicas, 3);
    assert_eq!(config.destinations[1].servers, ["nats://a", "nats://b"]);
    assert!(!config.destinations[1].required);
    let shown = show::toml(&loaded.shown);
    for part in ["# OUTBOXD_RELAY__NAME", "# --set log.level", "t.toml:7:11", "# from relay.name"] {
        assert!(shown.contains(part), "{part} is not in:\n{shown}");
    }
}

#[test]
fn faults_of_variables_and_flags_name_them() {
    let environment = [
        ("OUTBOXD_RELAY__MEMORY", "lots"),
        ("OUTBOXD_RELAY_NAME", "x"),
        ("OUTBOXD_SOURCE__ULR", "x"),
        ("OUTBOXD_ADMIN__LISTEN", " "),
    ];
    let report = load(SMALL, &environment, &["log.levle=x", "log.format=xml", "oops"]).unwrap_err();
    assert_eq!(
        told(&report),
        [
            "OUTBOXD_RELAY_NAME ",
            "OUTBOXD_SOURCE__ULR ",
            "OUTBOXD_RELAY__MEMORY relay.memory",
            "OUTBOXD_ADMIN__LISTEN admin.listen",
            "--set log.levle log.levle",
            "--set  ",
            "--set log.format log.format",
        ]
    );
    let report = report.to_string();
    for part in ["OUTBOXD_RELAY__NAME?", "OUTBOXD_SOURCE__URL?", "did you mean log.level?"] {
        assert!(report.contains(part), "{part} is not in:\n{report}");
    }
}

#[test]
fn no_secret_is_printed() {
    let loaded =
        load(SMALL, &[], &["source.replication_url=postgres://me:hunter2@db2/app"]).unwrap();
    assert!(loaded.config.source.url.expose_secret().contains("hunter2"));
    let shown = [
        format!("{loaded:?}"),
        format!("{:#?}", loaded.config),
        show::toml(&loaded.shown),
        show::json(&loaded.shown).to_string(),
    ];
    for text in shown {
        assert!(!text.contains("hunter2"), "{text}");
    }
    for (key, value) in [
        ("source.url", "postgres://me:hunter2@db:port:x/app"),
        ("source.url", "host=db password='hunter2"),
        ("source.url", "mysql://me:hunter2@db/app"),
        ("source.url", "postgres://me:hunter2@db/app?sslmode=hunter2"),
        ("source.urll", "postgres://me:hunter2@db/app"),
        ("destination.events.servers", "nats://me:hunter2@db"),
    ] {
        let report = load(SMALL, &[], &[&format!("{key}={value}")]);
        let Err(report) = report else { continue };
        assert!(!report.to_string().contains("hunter2"), "{report}");
    }
}

#[test]
fn what_is_shown_can_be_read_back() {
    let loaded = load(SMALL, &[("OUTBOXD_RELAY__RECEIPT_EVENTS", "500")], &[]).unwrap();
    let again = parse(&show::toml(&loaded.shown).replace("REDACTED", "hunter2")).unwrap();
    assert_eq!(format!("{again:?}"), format!("{:?}", loaded.config));
    assert_eq!(
        show::json(&loaded.shown)["relay.receipt_events"]["origin"]["variable"],
        "OUTBOXD_RELAY__RECEIPT_EVENTS"
    );
}

#[test]
fn one_complete_way_to_log_in() {
    let with = |lines: &str| faults(&format!("{SMALL}{lines}"));
    assert_eq!(with("user = 'u'\n"), ["t.toml:6:14 destination.events.password_file"]);
    assert_eq!(with("password_file = 'p'\n"), ["t.toml:6:14 destination.events.user"]);
    assert_eq!(with("cert_file = 'c'\n"), ["t.toml:6:14 destination.events.key_file"]);
    assert_eq!(
        with("creds_file = 'c'\nnkey_file = 'n'\ntoken_file = 't'\n"),
        ["t.toml:10:13 destination.events.nkey_file", "t.toml:11:14 destination.events.token_file"]
    );
    assert!(parse(&format!("{SMALL}user = 'u'\npassword_file = 'p'\n")).is_ok());
}

#[test]
fn destinations_that_share_a_stream_know_it() {
    let second = |lines: &str| {
        let text = format!("{SMALL}[destination.more]\n{lines}");
        let config = parse(&text).unwrap();
        config.destinations.iter().map(|one| one.shares_stream).collect::<Vec<_>>()
    };
    let same = "servers = ['nats://localhost:4222']\nstream = 'EVENTS'\n";
    assert_eq!(second(same), [true, true]);
    assert_eq!(second(&same.replace("EVENTS", "OTHER")), [false, false]);
    // One cluster has many spellings.
    for servers in ["nats://127.0.0.1:4222", "nats://localhost:4223", "tls://localhost"] {
        assert_eq!(second(&same.replace("nats://localhost:4222", servers)), [true, true]);
    }
    assert_eq!(second(&format!("{same}js_domain = 'hub'\n")), [true, true]);
    let third = "[destination.third]\nservers = ['nats://c']\nstream = 'OTHER'\n";
    assert_eq!(second(&format!("{same}{third}")), [true, true, false]);
}

#[test]
fn a_stream_is_ones_own_by_the_owners_word_alone() {
    let with = |lines: &str| faults(&format!("{SMALL}{lines}"));
    assert_eq!(with("pipeline = 'sequence'\n"), ["t.toml:9:12 destination.events.pipeline"]);
    let config = parse(&format!("{SMALL}pipeline = 'sequence'\nexclusive = true\n")).unwrap();
    let destination = &config.destinations[0];
    assert_eq!((destination.pipeline, destination.exclusive), (PipelineChoice::Sequence, true));
    let other = |stream: &str| {
        let table = "[destination.more]\nservers = ['nats://localhost:4222']";
        format!("exclusive = true\n{table}\nstream = '{stream}'\n")
    };
    assert_eq!(with(&other("EVENTS")), ["t.toml:9:13 destination.events.exclusive"]);
    assert!(parse(&format!("{SMALL}{}", other("OTHER"))).is_ok());
}

#[test]
fn destinations_have_names_of_their_own() {
    let table =
        |name: &str| format!("[destination.{name}]\nservers = ['nats://b']\nstream = 'B'\n");
    let twins = format!("{SMALL}{}{}", table("a-b"), table("a_b"));
    assert_eq!(faults(&twins), ["t.toml:12:14 destination.a_b"]);
    assert_eq!(faults(&format!("{SMALL}{}", table("'a__b'"))), ["t.toml:9:14 destination.a__b"]);
}

#[test]
fn columns_can_be_left_out_and_carry_one_thing() {
    let config = parse(&format!("{SMALL}[source.columns]\ntenant = false\nrun = 'order_id'\n"));
    let columns = config.unwrap().source.columns;
    assert_eq!((columns.tenant, &*columns.run), (None, "order_id"));
    assert_eq!(
        faults(&format!("{SMALL}[source.columns]\nkind = 'payload'\n")),
        ["t.toml:10:8 source.columns.kind"]
    );
    assert!(parse(&format!("{SMALL}[source.columns]\nrun = 'tenant'\n")).is_ok());
}

#[test]
fn bounds_are_kept() {
    for (line, good) in [
        ("relay.memory = '4MiB'", true),
        ("relay.memory = '4095KiB'", false),
        ("relay.memory = 8388608", true),
        ("relay.receipt_events = 0", false),
        ("relay.receipt_events = -1", false),
        ("relay.receipt_events = 99999999999999999999", false),
        ("relay.shutdown_timeout = '1h'", false),
        ("admin.listen = 'off'", true),
        ("admin.listen = 'localhost:1'", false),
        ("source.slot = 'Big'", false),
        ("source.table = 'event'", false),
        ("log.level = 'info,outboxd=debug'", true),
        ("log.level = 'a=b=c'", false),
        ("destination.events.create.max_age = '1m'", true),
        ("destination.events.create.duplicate_window = '0s'", false),
        ("destination.events.create.max_age = '1h'", true),
        ("destination.events.servers = []", false),
        ("destination.events.pipeline = 'fast'", false),
    ] {
        let (key, _) = line.split_once(" =").unwrap();
        let small: String = dotted(SMALL)
            .lines()
            .filter(|l| !l.starts_with(key))
            .map(|l| format!("{l}\n"))
            .collect();
        assert_eq!(parse(&format!("{small}{line}\n")).is_ok(), good, "{line}");
    }
}

#[test]
fn memory_bounds_what_is_in_flight() {
    let mut config = parse(SMALL).unwrap();
    let first = config.destinations[0].clone();
    assert_eq!((config.event_bytes(), config.max_in_flight(&first)), (24 << 20, 4_096));
    config.destinations.push(first.clone());
    assert_eq!(config.max_in_flight(&first), 2_048);
    config.destinations[0].max_in_flight = 7;
    assert_eq!(config.max_in_flight(&config.destinations[0]), 7);
}

#[test]
fn the_duplicate_window_fits_into_the_age() {
    let create =
        |lines: &str| load(&format!("{SMALL}[destination.events.create]\n{lines}"), &[], &[]);
    let window = |lines: &str| {
        create(lines).unwrap().config.destinations[0].create.duplicate_window.unwrap()
    };
    assert_eq!(window("max_age = '1m'\n"), Duration::from_secs(60));
    assert_eq!(window("max_age = '1h'\n"), Duration::from_secs(120));
    let shown = show::toml(&create("max_age = '1m'\n").unwrap().shown);
    assert!(
        shown.contains("duplicate_window = \"1m\"") && shown.contains("# from max_age"),
        "{shown}"
    );
    let both = create("max_age = '1m'\nduplicate_window = '2m'\n").unwrap_err().to_string();
    assert!(both.contains("is shorter than duplicate_window"), "{both}");
}

#[test]
fn the_file_can_be_named_by_a_variable() {
    let named = |value: &str| {
        let environment = vec![(OsString::from("OUTBOXD_CONFIG"), OsString::from(value))];
        Places { file: None, environment, settings: Vec::new() }
    };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("named.toml");
    std::fs::write(&file, SMALL).unwrap();
    let places = named(file.to_str().unwrap());
    assert!(places.exist());
    assert_eq!(places.load().unwrap().config.relay.name, "Orders.eu-1");
    for blank in ["", "  "] {
        assert!(named(blank).exist());
        assert_eq!(told(&named(blank).load().unwrap_err()), ["OUTBOXD_CONFIG "]);
    }
}
