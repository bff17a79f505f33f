//! What an error of PostgreSQL means to the relay: SQLSTATE → kind of failure. Pure.

use pgwire_replication::protocol::ErrorFields;

use crate::error::{Failure, Kind};

/// The parts of an error report that decide or explain.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Report<'a> {
    pub code: &'a str,
    pub message: &'a str,
    pub detail: Option<&'a str>,
    pub hint: Option<&'a str>,
    /// Name of the C function. Unlike the message it is the same in every language.
    pub routine: Option<&'a str>,
}

impl Report<'_> {
    pub(super) fn failure(&self) -> Failure {
        let mut text = self.message.to_owned();
        for more in [self.detail, self.hint].into_iter().flatten() {
            text.push_str("; ");
            text.push_str(more);
        }
        Failure {
            kind: self.kind(),
            detail: text,
            sqlstate: (!self.code.is_empty()).then(|| self.code.to_owned()),
        }
    }

    fn says(&self, word: &str) -> bool {
        [Some(self.message), self.detail].into_iter().flatten().any(|text| text.contains(word))
    }

    fn within(&self, routine: &str) -> bool {
        self.routine.is_some_and(|name| name.to_ascii_lowercase().contains(routine))
    }

    fn kind(&self) -> Kind {
        match self.code {
            "57P01" | "57P02" | "57P03" => Kind::SourceShutdown,
            // idle_session_timeout: we were silent, by the server's account.
            "57P05" => Kind::SourceSilent,
            "53300" | "53400" => Kind::SourceFull,
            "3D000" => Kind::SourceLogin,
            "42501" => Kind::Privilege,
            "25006" => Kind::SourceReadOnly,
            "55006" if self.within("slot") || self.says("slot") => Kind::SlotHeld,
            "42704" if self.within("slot") || self.says("replication slot") => Kind::SlotMissing,
            "42704" if self.within("publication") || self.says("publication") => {
                Kind::PublicationMissing
            }
            "55000" => self.prerequisite(),
            // A segment that is gone. The same code stands for any other missing file, for example
            // that of the output plugin.
            "58P01" if self.says("WAL segment") || self.within("segment") => Kind::SlotLost,
            "0A000" if self.within("createdecodingcontext") || self.says("physical") => {
                Kind::SlotForeign
            }
            "42P01" | "3F000" | "42883" => Kind::SchemaMissing,
            "42703" => Kind::TableShape,
            code if code.starts_with("28") => Kind::SourceLogin,
            code if code.starts_with("08") => Kind::SourceUnreachable,
            _ => Kind::Database,
        }
    }

    /// 55000, object not in prerequisite state: the words tell which object.
    fn prerequisite(&self) -> Kind {
        if self.says("wal_level") || self.within("checklogicaldecodingrequirements") {
            return Kind::WalLevel;
        }
        if self.says("not created in this database") || self.says("physical") {
            return Kind::SlotForeign;
        }
        if self.says("recovery") || self.says("standby") || self.says("synchronized from") {
            return Kind::SourceReadOnly;
        }
        let slot = self.within("slot") || self.within("createdecodingcontext");
        if slot || self.says("slot") { Kind::SlotLost } else { Kind::Database }
    }
}

/// An ErrorResponse of the replication connection.
pub(super) fn failure_of_response(payload: &[u8]) -> Failure {
    let fields = ErrorFields::parse(payload);
    Report {
        code: fields.code.as_deref().unwrap_or_default(),
        message: fields.message.as_deref().unwrap_or("the server reported an error without words"),
        detail: fields.detail.as_deref(),
        hint: fields.hint.as_deref(),
        routine: fields.routine.as_deref(),
    }
    .failure()
}

/// A notice that is a failure in disguise. Since PostgreSQL 18 a publication that does not exist at
/// the slot's position is only warned of, and its rows are passed over in silence.
pub(super) fn failure_of_notice(payload: &[u8]) -> Option<Failure> {
    let fields = ErrorFields::parse(payload);
    let skipped = fields.routine.as_deref() == Some("LoadPublications")
        || fields
            .message
            .as_deref()
            .is_some_and(|text| text.contains("skipped loading publication"));
    skipped.then(|| Failure { kind: Kind::PublicationMissing, ..failure_of_response(payload) })
}

/// The failure behind an error of the control connection.
pub fn failure_of(error: &tokio_postgres::Error) -> Failure {
    if let Some(db) = error.as_db_error() {
        return Report {
            code: db.code().code(),
            message: db.message(),
            detail: db.detail(),
            hint: db.hint(),
            routine: db.routine(),
        }
        .failure();
    }
    let cause = std::error::Error::source(error);
    let kind = match error.is_closed() || cause.is_some_and(|cause| cause.is::<std::io::Error>()) {
        true => Kind::SourceUnreachable,
        false => Kind::Database,
    };
    let detail = match cause {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    };
    Failure::new(kind, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(code: &str, message: &str, routine: &str) -> Kind {
        Report { code, message, routine: Some(routine), ..Report::default() }.failure().kind
    }

    #[test]
    fn codes_and_their_kinds() {
        let table = [
            ("57P01", "terminating connection", "ProcessInterrupts", Kind::SourceShutdown),
            ("57P05", "terminating connection due to idle-session timeout", "", Kind::SourceSilent),
            ("57P03", "the database system is starting up", "", Kind::SourceShutdown),
            ("57014", "canceling statement", "ProcessInterrupts", Kind::Database),
            ("53300", "sorry, too many clients already", "", Kind::SourceFull),
            ("53400", "all replication slots are in use", "", Kind::SourceFull),
            ("28P01", "password authentication failed", "auth_failed", Kind::SourceLogin),
            ("28000", "no pg_hba.conf entry", "ClientAuthentication", Kind::SourceLogin),
            ("3D000", "database \"x\" does not exist", "InitPostgres", Kind::SourceLogin),
            ("42501", "permission denied to start WAL sender", "InitPostgres", Kind::Privilege),
            ("25006", "cannot execute INSERT", "", Kind::SourceReadOnly),
            ("55006", "slot \"s\" is active for PID 1", "ReplicationSlotAcquire", Kind::SlotHeld),
            ("42704", "Slot gibt es nicht", "ReplicationSlotAcquire", Kind::SlotMissing),
            ("42704", "publication \"p\" does not exist", "", Kind::PublicationMissing),
            ("42704", "Publikation", "get_publication_oid", Kind::PublicationMissing),
            ("42704", "type \"x\" does not exist", "typenameType", Kind::Database),
            (
                "55000",
                "logical decoding requires \"wal_level\" >= \"logical\"",
                "CheckLogicalDecodingRequirements",
                Kind::WalLevel,
            ),
            (
                "55000",
                "can no longer access replication slot \"s\"",
                "ReplicationSlotAcquire",
                Kind::SlotLost,
            ),
            (
                "55000",
                "can no longer get changes from replication slot \"s\"",
                "CreateDecodingContext",
                Kind::SlotLost,
            ),
            (
                "55000",
                "replication slot \"s\" was not created in this database",
                "CreateDecodingContext",
                Kind::SlotForeign,
            ),
            ("55000", "some other object", "elsewhere", Kind::Database),
            ("55000", "cannot use physical replication slot", "", Kind::SlotForeign),
            (
                "0A000",
                "cannot use physical replication slot for logical decoding",
                "CreateDecodingContext",
                Kind::SlotForeign,
            ),
            (
                "58P01",
                "requested WAL segment 000000010000000000000001 has already been removed",
                "logical_segment_open",
                Kind::SlotLost,
            ),
            ("58P01", "could not access file \"pgoutput\"", "", Kind::Database),
            ("42P01", "relation \"outbox.receipt\" does not exist", "", Kind::SchemaMissing),
            ("08006", "connection failure", "", Kind::SourceUnreachable),
            ("XX000", "internal", "", Kind::Database),
            ("", "", "", Kind::Database),
        ];
        for (code, message, routine, expected) in table {
            assert_eq!(kind(code, message, routine), expected, "{code} {message}");
        }
    }

    #[test]
    fn a_skipped_publication_is_a_failure_and_other_notices_are_none() {
        let skipped = b"SWARNING\0C55000\0Mskipped loading publication \"p\"\0\0";
        let failure = failure_of_notice(skipped).unwrap();
        assert_eq!(failure.kind, Kind::PublicationMissing);
        let localized = b"SWARNUNG\0C55000\0Mx\0RLoadPublications\0\0";
        assert_eq!(failure_of_notice(localized).unwrap().kind, Kind::PublicationMissing);
        assert_eq!(failure_of_notice(b"SNOTICE\0C00000\0Mhello\0\0"), None);
    }

    #[test]
    fn an_error_response_keeps_code_and_words() {
        let failure = failure_of_response(b"SFATAL\0C28P01\0Mno entry\0Hask\0\0");
        assert_eq!(failure.kind, Kind::SourceLogin);
        assert_eq!(failure.sqlstate.as_deref(), Some("28P01"));
        assert_eq!(failure.detail, "no entry; ask");
        for cut in [&b""[..], b"S", b"SFATAL", b"\0", b"C\xff\0M"] {
            assert_eq!(failure_of_response(cut).kind, Kind::Database);
        }
    }
}
