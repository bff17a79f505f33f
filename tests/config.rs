//! The binary and its configuration: every fault at once with its place, exit codes, nothing
//! opened, the documentation in step.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

use std::net::TcpListener;
use std::path::Path;

use assert_cmd::Command;
use outboxd::error::{Fate, Kind};
use outboxd::event::{Reason, WayOut};

const SMALL: &str = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://me:hunter2@db/app\"\n\
                     [destination.events]\nservers = [\"nats://localhost:4222\"]\nstream = \"E\"\n";

/// The program in an empty directory, without variables of ours.
fn outboxd(directory: &Path) -> Command {
    let mut command = Command::cargo_bin("outboxd").unwrap();
    command.current_dir(directory);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("OUTBOXD_") || text.starts_with("PG") {
            command.env_remove(name);
        }
    }
    command
}

fn directory(config: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("outboxd.toml"), config).unwrap();
    directory
}

fn error_of(command: &mut Command, code: i32) -> String {
    let output = command.assert().code(code).get_output().clone();
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn three_faults_are_reported_with_their_lines() {
    let text =
        SMALL.replace("orders", "or ders").replace("stream", "straem") + "pipeline = \"x\"\n";
    let directory = directory(&text);
    let error = error_of(outboxd(directory.path()).args(["config", "show"]), 78);
    for part in [
        "4 faults",
        "outboxd.toml:2:8: relay.name",
        "outboxd.toml:7:1: destination.events.straem",
        "did you mean destination.events.stream?",
        "outboxd.toml:5:14: destination.events.stream: is missing",
        "outboxd.toml:8:12: destination.events.pipeline",
    ] {
        assert!(error.contains(part), "{part} is not in:\n{error}");
    }
}

#[test]
fn nothing_is_opened_with_an_invalid_configuration() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let text = SMALL.replace("@db", &format!("@127.0.0.1:{port}")) + "[admin]\nlisten = \"x\"\n";
    let directory = directory(&text.replace("localhost:4222", &format!("127.0.0.1:{port}")));
    let verbs = ["schema", "init", "deinit", "check", "run", "status"];
    let longer = [vec!["config", "show"], vec!["dead-letters", "list"]];
    for arguments in verbs.map(|verb| vec![verb]).into_iter().chain(longer) {
        let error = error_of(outboxd(directory.path()).args(&arguments), 78);
        assert!(error.contains("outboxd.toml:9:10: admin.listen"), "{arguments:?}: {error}");
    }
    let nobody = listener.accept().unwrap_err();
    assert_eq!(nobody.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_syntax_error_has_its_place() {
    let directory = directory("[relay]\nname = \n");
    let error = error_of(outboxd(directory.path()).args(["config", "show"]), 78);
    assert!(error.contains("outboxd.toml:2:8: not TOML"), "{error}");
}

#[test]
fn a_missing_file_is_told() {
    let empty = tempfile::tempdir().unwrap();
    let error = error_of(outboxd(empty.path()).args(["config", "show"]), 78);
    assert!(error.contains("outboxd.toml: there is no such file"), "{error}");
    let error = error_of(outboxd(empty.path()).args(["-c", "x.toml", "config", "show"]), 78);
    assert!(error.contains("x.toml: can't be read"), "{error}");
}

#[test]
fn a_variable_of_libpq_is_blamed_by_its_name() {
    let directory = directory(SMALL);
    for (variable, value, wrong) in [
        ("PGSSLMODE", "foo", "PGSSLMODE: expected one of disable"),
        ("PGSERVICE", "app", "PGSERVICE: service files are not read"),
    ] {
        let mut command = outboxd(directory.path());
        command.env(variable, value).args(["--set", "source.replication_url=host=db user=u"]);
        let error = error_of(command.args(["config", "show"]), 78);
        assert!(error.contains("has a fault") && error.contains(wrong), "{error}");
    }
}

#[test]
fn a_blank_name_of_the_file_is_a_fault() {
    let directory = directory(SMALL);
    let mut command = outboxd(directory.path());
    let error = error_of(command.env("OUTBOXD_CONFIG", "").args(["config", "show"]), 78);
    assert!(error.contains("OUTBOXD_CONFIG: is blank"), "{error}");
}

#[test]
fn wrong_usage_is_exit_2() {
    let empty = tempfile::tempdir().unwrap();
    for arguments in [&["frobnicate"][..], &[], &["config", "show", "--yaml"], &["-c", ""]] {
        error_of(outboxd(empty.path()).args(arguments), 2);
    }
}

#[test]
fn the_environment_alone_can_configure_and_flags_go_over_it() {
    let empty = tempfile::tempdir().unwrap();
    let mut command = outboxd(empty.path());
    command
        .env("OUTBOXD_RELAY__NAME", "orders")
        .env("OUTBOXD_SOURCE__URL", "postgres://me:hunter2@db/app")
        .env("OUTBOXD_DESTINATION__EVENTS__SERVERS", "nats://a")
        .env("OUTBOXD_DESTINATION__EVENTS__STREAM", "E")
        .args(["--set", "log.level=debug", "config", "show", "--json"]);
    let output = command.assert().success().get_output().clone();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains("hunter2"), "{text}");
    let shown: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(shown["relay.name"]["origin"]["variable"], "OUTBOXD_RELAY__NAME");
    assert_eq!(shown["log.level"]["value"], "debug");
    assert_eq!(shown["destination.events.servers"]["value"][0], "nats://a");
}

#[test]
fn help_teaches_and_completions_complete() {
    let empty = tempfile::tempdir().unwrap();
    let help = outboxd(empty.path()).arg("--help").assert().success().get_output().clone();
    let help = String::from_utf8(help.stdout).unwrap();
    for part in ["Getting started", "Exit codes", "78", "OUTBOXD_RELAY__NAME"] {
        assert!(help.contains(part), "{part} is not in:\n{help}");
    }
    let script = outboxd(empty.path()).args(["completions", "bash"]).assert().success();
    assert!(String::from_utf8_lossy(&script.get_output().stdout).contains("_outboxd"));
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let empty = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("outboxd"));
    command.current_dir(empty.path()).args(["config", "reference"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command.stdout(writer).stderr(std::process::Stdio::piped()).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

/// Puts the right text between the marks of a page, or with `UPDATE_DOCS=1` demands it there.
fn in_step(page: &str, (start, end): (&str, &str), right: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = text.split_once(start).unwrap();
    let (written, tail) = rest.split_once(end).unwrap();
    let right = format!("\n\n{right}\n");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{start}{right}{end}{tail}")).unwrap();
    } else {
        assert!(written == right, "run `UPDATE_DOCS=1 cargo test --test config` and commit it");
    }
}

#[test]
fn the_documentation_of_keys_is_in_step() {
    let marks = ("<!-- reference: begin -->", "<!-- reference: end -->");
    in_step("docs/configuration.md", marks, &outboxd::config::reference::markdown());
}

#[test]
fn the_documentation_of_the_plan_is_in_step() {
    let marks = ("<!-- plan: begin -->", "<!-- plan: end -->");
    in_step("docs/how-it-works.md", marks, outboxd::run::plan::table().trim_end());
}

/// What an entry of a table means is said once, where it is declared.
fn meaning(table: &str, code: &str) -> String {
    let code = format!(" \"{code}\" ");
    let lines: Vec<&str> = table.lines().map(str::trim).collect();
    let declared = lines.iter().position(|line| line.contains(&code)).unwrap();
    let mut words: Vec<&str> = lines[..declared]
        .iter()
        .rev()
        .map_while(|line| line.strip_prefix("///").map(str::trim))
        .collect();
    words.reverse();
    assert!(!words.is_empty(), "{code} has no meaning");
    words.join(" ")
}

#[test]
fn the_documentation_of_errors_is_in_step() {
    let table = include_str!("../src/error.rs");
    let mut text = String::new();
    for kind in Kind::ALL {
        let fate = match kind.fate() {
            Fate::Transient => "transient",
            Fate::Wait => "wait",
            Fate::Setup => "setup",
            Fate::Refuse => "refuse",
        };
        let (code, remedy) = (kind.code(), kind.remedy());
        let meaning = meaning(table, code);
        text += &format!("### {code}\n\n{meaning}\n\nFate: **{fate}**. Remedy: {remedy}.\n\n");
    }
    in_step("docs/errors.md", ("<!-- kinds: begin -->", "<!-- kinds: end -->"), text.trim_end());
}

#[test]
fn the_documentation_of_reasons_is_in_step() {
    let table = include_str!("../src/event.rs");
    let mut text = String::new();
    for reason in Reason::ALL {
        let way_out = match reason.way_out() {
            WayOut::Redrive => "can be redriven",
            WayOut::Rewrite => "can't be redriven",
        };
        let (code, remedy) = (reason.as_str(), reason.remedy());
        let meaning = meaning(table, code);
        text += &format!(
            "### {code}\n\n{meaning}\n\nFate: **dead letter**, {way_out}. Remedy: {remedy}.\n\n"
        );
    }
    in_step(
        "docs/errors.md",
        ("<!-- reasons: begin -->", "<!-- reasons: end -->"),
        text.trim_end(),
    );
}
