//! The relay's own messages, encoded before the clock starts: the bytes that its pipeline would
//! send, and how it would wait for answers.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use outboxd::sandbox::STREAM;
use serde_json::Value;

use crate::Result;
use crate::backlog::Backlog;
use crate::wire::Wire;

/// As the relay has it: messages in a batch, and messages per flow answer that it asks for.
const BATCH: u64 = 2_000;
const FLOW: u64 = 500;
/// Flow answers that may be outstanding.
const FLOWS: u64 = 2;
/// Single messages that the relay has unanswered at most with its default `memory`.
const WINDOW: u64 = 4_096;

const INBOX: &str = "bench-limit";
const ID: &str = "Nats-Msg-Id: ";
/// What `sequence` adds begins with this.
const FENCE: &str = "Nats-Expected-Last-";

/// A message that the relay published.
pub struct Template {
    subject: String,
    /// Up to the message id, and behind it.
    head: (Vec<u8>, Vec<u8>),
    payload: Vec<u8>,
}

/// Which answers the messages ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    /// Fast-ingest batches.
    Batch,
    /// Each by itself, with the sequence and the message that it expects before it, or without.
    Single { fenced: bool },
}

/// Messages ready to be written to a socket.
pub struct Frames {
    bytes: Vec<u8>,
    /// Where each one ends.
    ends: Vec<usize>,
    style: Style,
}

impl Template {
    /// The first message of the stream.
    pub async fn read(backlog: &Backlog) -> Result<Template> {
        let answer = backlog.ask(&format!("STREAM.MSG.GET.{STREAM}"), r#"{"seq":1}"#).await?;
        let text = |name: &str| {
            let value = answer.pointer(&format!("/message/{name}")).and_then(Value::as_str);
            value.ok_or_else(|| format!("message 1 has no {name}"))
        };
        let headers = String::from_utf8(STANDARD.decode(text("hdrs")?)?)?;
        let lines = headers.split_inclusive("\r\n").filter(|line| !line.starts_with(FENCE));
        let headers: String = lines.collect();
        let (before, rest) = headers.split_once(ID).ok_or("message 1 has no id")?;
        let (_, behind) = rest.split_once("\r\n").ok_or("message 1 has no end of its id")?;
        Ok(Template {
            subject: text("subject")?.to_owned(),
            head: (format!("{before}{ID}").into_bytes(), format!("\r\n{behind}").into_bytes()),
            payload: STANDARD.decode(text("data")?)?,
        })
    }
}

impl Frames {
    pub fn encode(template: &Template, pipeline: &str, events: u64) -> Frames {
        let style = match pipeline {
            "batch" => Style::Batch,
            "sequence" => Style::Single { fenced: true },
            _ => Style::Single { fenced: false },
        };
        let (before, behind) = &template.head;
        let one = before.len() + behind.len() + template.payload.len() + 200;
        let capacity = usize::try_from(events).unwrap_or(0).saturating_mul(one);
        let mut frames = Frames { bytes: Vec::with_capacity(capacity), ends: Vec::new(), style };
        // As long as the uuid of the relay's message.
        let id = |n: u64| uuid::Uuid::from_u128(n.into()).to_string();
        for n in 0..events {
            let mut head = [before.as_slice(), id(n).as_bytes()].concat();
            if style == (Style::Single { fenced: true }) {
                let mut lines = format!("\r\n{FENCE}Sequence: {n}");
                if let Some(one_before) = n.checked_sub(1) {
                    lines.push_str(&format!("\r\n{FENCE}Msg-Id: {}", id(one_before)));
                }
                head.extend_from_slice(lines.as_bytes());
            }
            head.extend_from_slice(behind);
            let reply = match style {
                Style::Batch => batch_reply(n, events),
                Style::Single { .. } => format!("{INBOX}.{n}"),
            };
            let total = head.len() + template.payload.len();
            let line = format!("HPUB {} {reply} {} {total}\r\n", template.subject, head.len());
            for part in [line.as_bytes(), &head, &template.payload, b"\r\n"] {
                frames.bytes.extend_from_slice(part);
            }
            frames.ends.push(frames.bytes.len());
        }
        frames
    }

    /// Sends all of them as the relay would, and calls `acked` with how many are acknowledged.
    pub fn publish(&self, port: u16, mut acked: impl FnMut(u64)) -> Result<()> {
        let mut wire = Wire::connect(port)?;
        wire.subscribe(&format!("{INBOX}.>"))?;
        let all = self.ends.len() as u64;
        match self.style {
            Style::Batch => {
                for first in (0..all).step_by(2_000) {
                    self.batch(&mut wire, first, BATCH.min(all - first))?;
                    acked((first + BATCH).min(all));
                }
            }
            Style::Single { .. } => {
                let (mut sent, mut answered) = (0, 0);
                while answered < all {
                    let until = (answered + WINDOW).min(all);
                    self.send(&mut wire, sent, until)?;
                    sent = until;
                    // Whatever else came with it is as good.
                    let mut answer = Some(wire.next()?);
                    while let Some(message) = answer.take() {
                        check(&message.payload)?;
                        answered += 1;
                        if answered < sent && answered % (WINDOW / 4) != 0 {
                            answer = Some(wire.next()?);
                        }
                    }
                    acked(answered);
                }
            }
        }
        Ok(())
    }

    /// One batch, from its first message to its acknowledgement.
    fn batch(&self, wire: &mut Wire, first: u64, count: u64) -> Result<()> {
        let (mut sent, mut flowed, mut window) = (0, 0, FLOW * FLOWS);
        loop {
            let until = (flowed + window).min(count).max(sent);
            self.send(wire, first + sent, first + until)?;
            sent = until;
            let answer = wire.next()?;
            let body = check(&answer.payload)?;
            let number = |name: &str| body.get(name).and_then(Value::as_u64);
            if body.get("type").and_then(Value::as_str) == Some("ack") {
                flowed = number("seq").unwrap_or(0).max(flowed);
                window = number("msgs").unwrap_or(FLOW).max(1) * FLOWS;
            } else if number("count").or_else(|| number("seq")) >= Some(count) {
                return Ok(());
            } else {
                return Err(format!("a batch of {count} ended with {body}").into());
            }
        }
    }

    fn send(&self, wire: &mut Wire, from: u64, until: u64) -> Result<()> {
        let place = |nth: u64| match usize::try_from(nth) {
            Ok(0) | Err(_) => 0,
            Ok(nth) => self.ends.get(nth - 1).copied().unwrap_or(0),
        };
        wire.send(self.bytes.get(place(from)..place(until)).unwrap_or_default())
    }
}

/// ADR-50: start, append, commit.
fn batch_reply(n: u64, events: u64) -> String {
    let (batch, seq) = (n / BATCH, n % BATCH + 1);
    let op = match (seq == BATCH || n + 1 == events, seq) {
        (true, _) => 2,
        (false, 1) => 0,
        (false, _) => 1,
    };
    format!("{INBOX}.{INBOX}-{batch}.{FLOW}.fail.{seq}.{op}.$FI")
}

fn check(payload: &[u8]) -> Result<Value> {
    let body: Value = serde_json::from_slice(payload)
        .map_err(|_| format!("an answer of JetStream: {}", String::from_utf8_lossy(payload)))?;
    match body.get("error") {
        Some(error) => Err(format!("JetStream: {error}").into()),
        None => Ok(body),
    }
}
