//! `outboxd check`: every precondition of source and destinations, each with its remedy. Changes
//! nothing; at a destination it makes what the relay makes, a reader that vanishes by itself.

mod destination;

use std::fmt::Write as _;

use futures_util::future::join_all;

use super::{Stopped, say};
use crate::config::Config;
use crate::error::Failure;
use crate::finding::{Finding, Severity, worst};
use crate::store::{facts, rules, settle};
use crate::wal::{connect_control, connect_standbys};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit code 0 when the relay can run (warnings included), 1 when it can't.

Examples:
  outboxd check
  outboxd check --json | jq '.findings[] | select(.severity != \"ok\")'
  outboxd check --print-permissions       what the relay's NATS user needs; opens nothing")]
pub struct Args {
    /// As JSON.
    #[arg(long)]
    pub json: bool,

    /// Print what the NATS user of each destination must be allowed, and check nothing.
    #[arg(long)]
    pub print_permissions: bool,
}

/// Runs it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    if args.print_permissions {
        say(&destination::permissions(&config.destinations, args.json))?;
        return Ok(());
    }
    let mut findings = source(config).await;
    for more in join_all(config.destinations.iter().map(destination::look)).await {
        findings.extend(more);
    }
    say(&if args.json { json(&findings) } else { text(&findings) })?;
    match worst(&findings) {
        Severity::Ok | Severity::Warning => Ok(()),
        Severity::Failure => Err(Stopped::Refused),
    }
}

/// The source; a database that can't be asked is a finding too.
async fn source(config: &Config) -> Vec<Finding> {
    let look = async {
        let (control, server) = connect_control(&config.source).await?;
        settle(&control.client).await?;
        Ok((facts::collect(&control.client, config).await?, server))
    };
    match look.await {
        Ok((facts, server)) => {
            let connected = format!("accepts role {}", facts.server.role);
            let mut findings = vec![Finding::ok("source.connect", "[source] url", connected)];
            findings.extend(rules::source(&facts, config, &server.system_identifier));
            findings.extend(standbys(config).await);
            findings
        }
        Err(failure) => vec![unusable("source.connect", "[source] url", &failure)],
    }
}

/// The standbys in the list of hosts.
async fn standbys(config: &Config) -> Vec<Finding> {
    const ID: &str = "source.standby";
    let source = &config.source;
    let hosts = match connect_standbys(source).await {
        Ok(hosts) => hosts,
        Err(failure) => return vec![unusable(ID, "[source] url", &failure)],
    };
    let mut findings = Vec::new();
    for (host, control) in hosts {
        let facts = match control {
            Ok(control) => facts::standby(&control.client, &source.slot).await,
            Err(failure) => Err(failure),
        };
        findings.extend(match facts {
            Ok(facts) => rules::standby(&facts, &host, &source.slot),
            Err(failure) => {
                let found = format!("can't be asked: {failure}");
                vec![Finding::warning(ID, format!("host {host}"), found, failure.kind.remedy())]
            }
        });
    }
    findings
}

/// A failure as a finding.
fn unusable(id: &'static str, object: &str, failure: &Failure) -> Finding {
    Finding::failure(id, object, failure, failure.kind.remedy())
}

fn count(findings: &[Finding], severity: Severity) -> usize {
    findings.iter().filter(|finding| finding.severity == severity).count()
}

fn json(findings: &[Finding]) -> String {
    let report = serde_json::json!({
        "ok": worst(findings) != Severity::Failure,
        "failures": count(findings, Severity::Failure),
        "warnings": count(findings, Severity::Warning),
        "findings": findings,
    });
    format!("{report:#}")
}

fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.id.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { id, severity, object, found, remedy } in findings {
        // Writing to a String can't fail. What the server said may hold anything.
        let line = format!("{:<8} {id:<width$}  {object} {found}", severity.as_str());
        writeln!(text, "{}", line.replace(char::is_control, " ")).unwrap_or_default();
        if !remedy.is_empty() {
            let line = format!("{:<8} {:<width$}  -> {remedy}", "", "");
            writeln!(text, "{}", line.replace(char::is_control, " ")).unwrap_or_default();
        }
    }
    let (failures, warnings) =
        (count(findings, Severity::Failure), count(findings, Severity::Warning));
    write!(text, "{} looked at: {failures} failures, {warnings} warnings", findings.len())
        .unwrap_or_default();
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_counts_and_names_remedies() {
        let findings = [
            Finding::ok("a.one", "thing", "is fine"),
            Finding::warning("b.other", "thing", "is\nodd", "look at it"),
            Finding::failure("c", "thing", "is broken", "mend it"),
        ];
        insta::assert_snapshot!(text(&findings), @r"
        ok       a.one    thing is fine
        warning  b.other  thing is odd
                          -> look at it
        failure  c        thing is broken
                          -> mend it
        3 looked at: 1 failures, 1 warnings
        ");
        let report: serde_json::Value = serde_json::from_str(&json(&findings)).unwrap();
        assert_eq!(report["ok"], false);
        assert_eq!(report["findings"][1]["severity"], "warning");
        assert_eq!(report["findings"][2]["remedy"], "mend it");
    }
}
