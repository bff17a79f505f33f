//! What a server answers to a publish, read from its JSON. Pure.

use serde::Deserialize;

/// One answer of the server to a message on its reply subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// Flow control of a batch: everything up to `seq` is behind, answers come every `every`.
    Flow {
        /// Batch sequence.
        seq: u64,
        /// Messages per flow answer from now on.
        every: u64,
    },
    /// The batch has a gap and ends; its acknowledgement follows.
    Gap,
    /// One message of a batch is refused and the batch ends; its acknowledgement follows.
    Err {
        /// Batch sequence of the refused message.
        seq: u64,
        /// Why.
        error: ServerError,
    },
    /// Acknowledgement of one message, or of a whole batch.
    PubAck {
        /// Stream sequence of the last message stored.
        seq: u64,
        /// Messages of the batch that are stored; 1 for a message outside a batch.
        count: u64,
        /// Stored before already.
        duplicate: bool,
    },
    /// Refusal of the message whose reply subject this came on.
    Refused(ServerError),
    /// No server listens on the subject (status 503).
    NoResponders,
    /// Something else; it settles nothing.
    Unreadable,
}

/// An error as JetStream reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(super) struct ServerError {
    /// HTTP-like class.
    #[serde(default)]
    pub(super) code: u64,
    /// The stable number, 10000 and above.
    #[serde(default)]
    pub(super) err_code: u64,
    /// The server's words.
    #[serde(default)]
    pub(super) description: String,
    /// Not JetStream's word but the connection's: the message came to no stream.
    #[serde(skip)]
    pub(super) undelivered: bool,
}

impl ServerError {
    /// Why a message came to no stream.
    pub(super) fn undelivered(description: String) -> ServerError {
        ServerError { description, undelivered: true, ..ServerError::default() }
    }

    /// Nobody listens on the message's subject (status 503).
    pub(super) fn nobody_listens(subject: &str) -> ServerError {
        let what = "no stream stores it, or the stream has no leader";
        ServerError::undelivered(format!("nobody listens on subject `{subject}`: {what}"))
    }
}

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.description, self.err_code)
    }
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    seq: u64,
    #[serde(default)]
    msgs: u64,
    error: Option<ServerError>,
    stream: Option<String>,
    #[serde(default)]
    duplicate: bool,
    count: Option<u64>,
}

impl Reply {
    /// Reads a reply's body.
    pub(super) fn parse(body: &[u8]) -> Reply {
        if let Some(seq) = plain(body) {
            return Reply::PubAck { seq, count: 1, duplicate: false };
        }
        let Ok(raw) = serde_json::from_slice::<Raw>(body) else {
            return Reply::Unreadable;
        };
        match (raw.kind.as_deref(), raw.error) {
            (Some("ack"), _) => Reply::Flow { seq: raw.seq, every: raw.msgs },
            (Some("gap"), _) => Reply::Gap,
            (Some("err"), error) => Reply::Err { seq: raw.seq, error: error.unwrap_or_default() },
            (_, Some(error)) => Reply::Refused(error),
            (None, None) if raw.stream.is_some() => Reply::PubAck {
                seq: raw.seq,
                count: raw.count.unwrap_or(1),
                duplicate: raw.duplicate,
            },
            (_, None) => Reply::Unreadable,
        }
    }
}

/// The stream sequence of an acknowledgement as servers write it for one message that is stored:
/// `{"stream":"EVENTS","seq":12}`, with or without `,"domain":"hub"`. Anything else is JSON.
fn plain(body: &[u8]) -> Option<u64> {
    let rest = body.strip_prefix(br#"{"stream":""#)?;
    let rest = behind_name(rest)?;
    let rest = match rest.strip_prefix(br#","domain":""#) {
        Some(domain) => behind_name(domain)?,
        None => rest,
    };
    let digits = rest.strip_prefix(br#","seq":"#)?.strip_suffix(b"}")?;
    let canonical = matches!(digits, [b'0'] | [b'1'..=b'9', ..]) && digits.len() < 20;
    let number = |value: u64, digit: &u8| {
        digit.is_ascii_digit().then(|| value * 10 + u64::from(digit - b'0'))
    };
    if canonical { digits.iter().try_fold(0, number) } else { None }
}

/// What follows the quote at the end of a name in which nothing is escaped.
fn behind_name(text: &[u8]) -> Option<&[u8]> {
    let end = text.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..=31 | 128..))?;
    text.get(end..)?.strip_prefix(b"\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_json(body: &str) -> Option<u64> {
        let raw: Raw = serde_json::from_str(body).ok()?;
        let one = raw.kind.is_none() && raw.error.is_none() && raw.count.is_none();
        (one && !raw.duplicate && raw.stream.is_some()).then_some(raw.seq)
    }

    proptest! {
        /// What the short way reads is what JSON says; it may leave things to JSON.
        #[test]
        fn the_short_way_reads_no_other_thing_than_json(
            stream in "[A-Za-z0-9_\"\\\\-]{0,6}",
            seq in "[0-9]{1,21}|-1|1.5|",
            more in r#"(,"domain":"[a-z\\"]{0,3}")?"#,
            tail in r#"(,"duplicate": ?true|,"count":2|,"seq":3| )?"#,
        ) {
            let body = format!(r#"{{"stream":"{stream}"{more},"seq":{seq}{tail}}}"#);
            if let Some(seq) = plain(body.as_bytes()) {
                prop_assert_eq!(by_json(&body), Some(seq), "{}", body);
            }
        }

        #[test]
        fn plain_acknowledgements_take_the_short_way(seq in 0..u64::MAX / 2) {
            for body in [
                format!(r#"{{"stream":"EVENTS","seq":{seq}}}"#),
                format!(r#"{{"stream":"E-1","domain":"hub","seq":{seq}}}"#),
            ] {
                prop_assert_eq!(plain(body.as_bytes()), Some(seq));
            }
        }
    }

    #[test]
    fn every_form_is_read() {
        let error = ServerError {
            code: 400,
            err_code: 10054,
            description: "message size exceeds maximum allowed".into(),
            undelivered: false,
        };
        for (body, expected) in [
            (r#"{"type":"ack","seq":500,"msgs":250}"#, Reply::Flow { seq: 500, every: 250 }),
            (r#"{"type":"gap","last_seq":3,"seq":5}"#, Reply::Gap),
            (
                r#"{"type":"err","seq":4,"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"}}"#,
                Reply::Err { seq: 4, error: error.clone() },
            ),
            (
                r#"{"stream":"S","seq":12,"batch":"b","count":7}"#,
                Reply::PubAck { seq: 12, count: 7, duplicate: false },
            ),
            (
                r#"{"stream":"S","seq":12,"duplicate": true}"#,
                Reply::PubAck { seq: 12, count: 1, duplicate: true },
            ),
            (
                r#"{"stream":"S","domain":"d","seq":12}"#,
                Reply::PubAck { seq: 12, count: 1, duplicate: false },
            ),
            (
                r#"{"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"},"stream":"S","seq":0}"#,
                Reply::Refused(error),
            ),
            ("", Reply::Unreadable),
            ("+OK", Reply::Unreadable),
            ("{}", Reply::Unreadable),
            (r#"{"type":"new","seq":1}"#, Reply::Unreadable),
        ] {
            assert_eq!(Reply::parse(body.as_bytes()), expected, "{body}");
        }
    }
}
