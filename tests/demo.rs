//! `outboxd demo` as a newcomer runs it: it ends with a verdict and the exit code that goes with it.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use assert_cmd::Command;
use assert_cmd::assert::Assert;

fn demo(change: impl FnOnce(&mut Command)) -> Assert {
    let mut command = Command::cargo_bin("outboxd").unwrap();
    command.args(["demo", "--events", "300", "--runs", "7"]);
    change(&mut command);
    command.assert()
}

fn last_line(ended: &Assert) -> String {
    let output = ended.get_output();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let line = text.lines().last().unwrap_or("").to_owned();
    assert!(line.starts_with("verdict: "), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    line
}

#[test]
fn the_demo_ends_with_a_good_verdict() {
    let line = last_line(&demo(|_| {}).success());
    for part in
        ["verdict: ok events=300 missing=0", "copies=0 order_violations=0", " p50=", " p99="]
    {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}

#[test]
fn a_demo_without_servers_has_a_verdict_too() {
    let nowhere = demo(|command| {
        command.env("OUTBOXD_NATS_SERVER", "/nonexistent/nats-server");
    });
    let ended = nowhere.code(1);
    assert!(last_line(&ended).starts_with("verdict: failed"));
    let error = String::from_utf8_lossy(&ended.get_output().stderr).into_owned();
    assert!(error.contains("OUTBOXD_NATS_SERVER"), "{error}");
}
