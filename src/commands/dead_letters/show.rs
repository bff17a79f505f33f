//! `outboxd dead-letters show`: one letter with all that is needed to decide about it.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde::Serialize;

use super::{connect, json, plain};
use crate::commands::{Stopped, say};
use crate::config::Config;
use crate::event::Reason;
use crate::store::dead_letters::desk::{self, Change, Contents, Letter};

/// Bytes of the body that are shown.
const SHOWN_BYTES: usize = 4 << 10;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of the letter.
    #[arg(value_name = "ID")]
    id: i64,

    /// Write the body to this file, byte for byte.
    #[arg(long, value_name = "FILE")]
    payload: Option<PathBuf>,

    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// The body as far as it is shown.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Body {
    /// Its whole size.
    bytes: i64,
    /// `text` or `hex`.
    form: &'static str,
    /// The beginning.
    shown: String,
    /// Is that not all?
    cut: bool,
}

/// JSON of `show`.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    letter: &'a Letter,
    headers: Option<&'a str>,
    payload: Option<Body>,
    remedy: Option<&'static str>,
    history: &'a [Change],
}

/// Shows it.
pub async fn run(args: &Args, config: &Config) -> Result<(), Stopped> {
    let control = connect(config).await?;
    let wanted = if args.payload.is_some() { i32::MAX } else { to_i32(SHOWN_BYTES) };
    let relay = &config.relay.name;
    let Some(contents) = desk::show(&control.client, relay, args.id, wanted).await? else {
        eprint_refusal(&format!("there is no dead letter {} of relay {relay}", args.id))?;
        return Err(Stopped::Refused);
    };
    if let Some(file) = &args.payload {
        std::fs::write(file, contents.payload.as_deref().unwrap_or_default())?;
    }
    say(&if args.json { json(&shown(&contents)) } else { text(&contents) })?;
    Ok(())
}

fn to_i32(bytes: usize) -> i32 {
    i32::try_from(bytes).unwrap_or(i32::MAX)
}

/// On standard error, so that a program that reads JSON gets nothing else.
fn eprint_refusal(words: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    writeln!(std::io::stderr(), "error: {words}")
}

fn shown(contents: &Contents) -> Shown<'_> {
    let letter = &contents.letter;
    Shown {
        letter,
        headers: contents.headers.as_deref(),
        payload: contents
            .payload
            .as_deref()
            .zip(letter.payload_bytes)
            .map(|(head, bytes)| body(head, bytes)),
        remedy: Reason::named(&letter.reason).map(Reason::remedy),
        history: &contents.history,
    }
}

/// Text where it can be read as such, else hexadecimal digits.
fn body(head: &[u8], bytes: i64) -> Body {
    let head = head.get(..SHOWN_BYTES).unwrap_or(head);
    let cut = i64::try_from(head.len()).is_ok_and(|shown| shown < bytes);
    let text = match std::str::from_utf8(head) {
        Ok(text) => Some(text),
        // The cut may have gone through a character.
        Err(error) if cut && error.error_len().is_none() => {
            head.get(..error.valid_up_to()).and_then(|whole| std::str::from_utf8(whole).ok())
        }
        Err(_) => None,
    };
    let readable = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t');
    match text.filter(|text| text.chars().all(readable)) {
        Some(text) => Body { bytes, form: "text", shown: text.to_owned(), cut },
        None => {
            let shown = head.iter().map(|byte| format!("{byte:02x}")).collect();
            Body { bytes, form: "hex", shown, cut }
        }
    }
}

fn text(contents: &Contents) -> String {
    let letter = &contents.letter;
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut lines = vec![
        ("letter", format!("{}, {}", letter.id, letter.state.as_str())),
        ("destination", format!("{}, generation {}", letter.destination, letter.generation)),
        ("event", format!("seq {}, id {}", letter.seq, letter.event_id)),
        ("run", or_dash(letter.run_id.clone())),
        ("kind", letter.kind.clone()),
        ("tenant", or_dash(letter.tenant.clone())),
        ("version", or_dash(letter.version.map(|version| version.to_string()))),
        ("created", or_dash(letter.event_created_at.clone())),
        ("committed", committed(letter)),
        ("reason", format!("{}: {}", letter.reason, letter.detail)),
        ("server code", or_dash(letter.server_code.map(|code| code.to_string()))),
        ("attempts", letter.attempts.to_string()),
        ("buried", letter.buried_at.clone()),
    ];
    if letter.blocks_run {
        let now = if super::is_open(letter.state) { "waits" } else { "waited" };
        lines.push(("blocks run", format!("its run {now} behind this letter")));
    }
    if let Some(reason) = Reason::named(&letter.reason).filter(|_| super::is_open(letter.state)) {
        lines.push(("next", reason.remedy().to_owned()));
    }
    for Change { at, state, by, why } in &contents.history {
        lines.push(("history", format!("{at} {} by {by}: {why}", state.as_str())));
    }
    lines.push(("headers", or_dash(contents.headers.clone())));
    let mut text = String::new();
    for (name, value) in &lines {
        // Writing to a String can't fail.
        writeln!(text, "{name:<12} {}", plain(value)).unwrap_or_default();
    }
    text.push_str(&payload(shown(contents).payload));
    text
}

fn committed(letter: &Letter) -> String {
    let at = letter.committed_at.as_deref().unwrap_or("-");
    match (&letter.commit_lsn, letter.commit_index) {
        (Some(lsn), Some(index)) => format!("{at}, LSN {lsn}, index {index}"),
        (Some(lsn), None) => format!("{at}, LSN {lsn}"),
        (None, _) => format!("{at}, not seen in the WAL"),
    }
}

fn payload(body: Option<Body>) -> String {
    let Some(Body { bytes, form, shown, cut }) = body else {
        return "payload      none: a tombstone\n".to_owned();
    };
    let what = if form == "text" { "text" } else { "no readable text, in hexadecimal" };
    let note = if cut {
        format!("; the first {SHOWN_BYTES}, all with --payload FILE")
    } else {
        String::new()
    };
    format!("payload      {bytes} bytes, {what}{note}\n{}\n", shown.replace('\r', "\\r"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_text_where_it_can_be_read() {
        let text = |head: &[u8], bytes| {
            let Body { form, shown, cut, .. } = body(head, bytes);
            (form, shown, cut)
        };
        assert_eq!(text(b"{\"a\": 1}\n", 9), ("text", "{\"a\": 1}\n".to_owned(), false));
        assert_eq!(text(b"\x1b[2J", 4), ("hex", "1b5b324a".to_owned(), false));
        assert_eq!(text(b"\xff\x00", 2), ("hex", "ff00".to_owned(), false));
        let euros = "€".repeat(2_000);
        let (form, shown, cut) = text(euros.as_bytes(), 6_000);
        assert_eq!((form, shown.chars().count(), cut), ("text", SHOWN_BYTES / 3, true));
        assert!(payload(Some(body(euros.as_bytes(), 6_000))).contains("--payload FILE"));
        assert!(payload(None).contains("tombstone"));
    }
}
