//! Rules that join several keys. Pure.

use super::given::Scope;
use super::keys::{self, Section, Spec};
use super::read::Reader;
use super::{ColumnMap, DestinationConfig, PipelineChoice};

/// Longest name of a slot or publication, bytes.
const NAME_MAX: usize = 63;

/// Default name of slot and publication. Relays whose names differ only in replaced characters
/// would get one slot: `slot-held` tells, and `[source] slot` helps.
pub(super) fn object_name(relay: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    "outboxd_".chars().chain(relay.chars().map(plain)).take(NAME_MAX).collect()
}

/// At most one way to log in, and each complete.
pub(super) fn credentials(reader: &mut Reader, scope: Scope) {
    let given = |reader: &Reader, spec: &Spec| reader.is_given(scope, spec);
    let (user, password) = (&keys::USER.spec, &keys::PASSWORD_FILE.spec);
    match (given(reader, user), given(reader, password)) {
        (true, false) => reader.missing(scope, password, "a file with user's password".to_owned()),
        (false, true) => reader.missing(scope, user, "the user of password_file".to_owned()),
        (true, true) | (false, false) => {}
    }
    let ways = [&keys::CREDS_FILE.spec, &keys::NKEY_FILE.spec, user, &keys::TOKEN_FILE.spec];
    let used: Vec<_> = ways.into_iter().filter(|spec| given(reader, spec)).collect();
    if let [first, others @ ..] = used.as_slice() {
        for other in others {
            let wrong = format!("is a second way to log in beside {}", first.name);
            reader.wrong(scope, other, &wrong, "one of creds_file, nkey_file, user, token_file");
        }
    }
    let (cert, key) = (&keys::CERT_FILE.spec, &keys::KEY_FILE.spec);
    match (given(reader, cert), given(reader, key)) {
        (true, false) => reader.missing(scope, key, "the key of cert_file".to_owned()),
        (false, true) => reader.missing(scope, cert, "the certificate of key_file".to_owned()),
        (true, true) | (false, false) => {}
    }
}

/// A column carries one thing. `marks`: the relay writes into one.
pub(super) fn columns(reader: &mut Reader, scope: Scope, map: &ColumnMap, marks: bool) {
    let all = [
        (&keys::COLUMN_SEQ.spec, Some(&map.seq)),
        (&keys::COLUMN_ID.spec, Some(&map.id)),
        (&keys::COLUMN_RUN.spec, Some(&map.run)),
        (&keys::COLUMN_KIND.spec, Some(&map.kind)),
        (&keys::COLUMN_PAYLOAD.spec, Some(&map.payload)),
        (&keys::COLUMN_TENANT.spec, map.tenant.as_ref()),
        (&keys::COLUMN_VERSION.spec, map.version.as_ref()),
        (&keys::COLUMN_HEADERS.spec, map.headers.as_ref()),
        (&keys::COLUMN_CREATED_AT.spec, map.created_at.as_ref()),
        (&keys::COLUMN_PUBLISHED_AT.spec, marks.then_some(&map.published_at)),
    ];
    // `id` and `run` may be read from the columns of others: a table may be ordered by tenant, or
    // identify its rows by `seq`.
    let alone = |spec: &Spec| !matches!(spec.name, "id" | "run");
    for (at, (spec, column)) in all.iter().enumerate() {
        let twin = |(other, name): &&(&Spec, Option<&String>)| alone(other) && name == column;
        let Some((twin, _)) = all.iter().take(at).find(twin) else { continue };
        if column.is_some() && alone(spec) {
            let wrong = format!("names the column that {} has", twin.name);
            let at_fault = if reader.is_given(scope, spec) { spec } else { twin };
            reader.wrong(scope, at_fault, &wrong, "another column, or false");
        }
    }
}

/// Only the owner can know that nobody else writes a stream.
pub(super) fn exclusive(
    reader: &mut Reader,
    scope: Scope,
    pipeline: Option<PipelineChoice>,
    exclusive: Option<bool>,
) {
    if pipeline == Some(PipelineChoice::Sequence) && exclusive == Some(false) {
        let wrong = "is for a stream that this destination alone writes";
        let right = "exclusive = true beside it if that is so, or another pipeline";
        reader.wrong(scope, &keys::PIPELINE.spec, wrong, right);
    }
}

/// A stream that two destinations write is none's alone.
pub(super) fn alone(reader: &mut Reader, destinations: &[DestinationConfig]) {
    for (at, one) in destinations.iter().enumerate().filter(|(_, one)| one.exclusive) {
        let twin = destinations.iter().find(|other| one.name != other.name && one.is_beside(other));
        if let Some(twin) = twin {
            let scope = Scope { section: Section::Destination, destination: Some(at) };
            let wrong = format!("is not so: destination {} writes the stream, too", twin.name);
            reader.wrong(scope, &keys::EXCLUSIVE.spec, &wrong, "false, or another stream");
        }
    }
}

/// Destinations that may write one stream: its dedupe window would swallow the second message of an
/// event, so their ids get the destination's name. Only the stream's name is compared: one cluster
/// can be written as another host, port or order of servers, and be reached with and without
/// `js_domain`. A name too many in an id does no harm; one too few loses messages.
pub(super) fn share_streams(destinations: &mut [DestinationConfig]) {
    let streams: Vec<String> = destinations.iter().map(|one| one.stream.clone()).collect();
    for one in destinations {
        one.shares_stream = streams.iter().filter(|stream| **stream == one.stream).count() > 1;
    }
}
