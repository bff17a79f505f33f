//! What `outboxd check` says about one precondition, whoever looked at it. No logic but the sum.

use serde::Serialize;
use std::fmt;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Works, with a risk or a loss that the operator should know.
    Warning,
    /// The relay can't run, or a promise doesn't hold.
    Failure,
}

impl Severity {
    /// Stable name, as in the JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::Ok => "ok",
            Severity::Warning => "warning",
            Severity::Failure => "failure",
        }
    }
}

/// One precondition, looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name of the precondition, e.g. `source.wal-level`.
    pub id: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at: names the setting, table, slot or stream.
    pub object: String,
    /// What was found there.
    pub found: String,
    /// What to do; empty when nothing needs doing.
    pub remedy: String,
}

impl Finding {
    /// As it should be.
    pub fn ok(id: &'static str, object: impl fmt::Display, found: impl fmt::Display) -> Finding {
        Finding::new(id, Severity::Ok, object, found, "")
    }

    /// A risk, with its remedy.
    pub fn warning(
        id: &'static str,
        object: impl fmt::Display,
        found: impl fmt::Display,
        remedy: impl fmt::Display,
    ) -> Finding {
        Finding::new(id, Severity::Warning, object, found, remedy)
    }

    /// An obstacle, with its remedy.
    pub fn failure(
        id: &'static str,
        object: impl fmt::Display,
        found: impl fmt::Display,
        remedy: impl fmt::Display,
    ) -> Finding {
        Finding::new(id, Severity::Failure, object, found, remedy)
    }

    fn new(
        id: &'static str,
        severity: Severity,
        object: impl fmt::Display,
        found: impl fmt::Display,
        remedy: impl fmt::Display,
    ) -> Finding {
        Finding {
            id,
            severity,
            object: object.to_string(),
            found: found.to_string(),
            remedy: remedy.to_string(),
        }
    }
}

/// The worst of them.
pub fn worst(findings: &[Finding]) -> Severity {
    findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
}
