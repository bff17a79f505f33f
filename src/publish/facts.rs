//! What stream and server say about themselves, and what follows: may we publish there at all, in
//! which pipeline, and why in no faster one. Pure.

use serde::Deserialize;
use std::time::Duration;

use super::connect::ServerFacts;
use super::sequence::FENCE_BYTES;
use crate::config::{DestinationConfig, PipelineChoice};
use crate::error::{Failure, Kind};
use crate::relay::outcome::{Pipeline, Retention, StreamFacts};

/// First server with fast-ingest batches.
pub(super) const BATCH_SINCE: (u32, u32) = (2, 14);

/// The answer to STREAM.INFO, as far as it matters here.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct StreamInfo {
    pub(super) config: StreamConfig,
    pub(super) created: String,
    pub(super) state: StreamState,
}

/// A stream's configuration.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct StreamConfig {
    #[serde(default)]
    pub(super) subjects: Vec<String>,
    #[serde(default)]
    pub(super) retention: String,
    #[serde(default)]
    pub(super) storage: String,
    #[serde(default)]
    pub(super) discard: String,
    #[serde(default)]
    pub(super) max_msg_size: i64,
    #[serde(default)]
    pub(super) num_replicas: u16,
    #[serde(default)]
    pub(super) duplicate_window: i64,
    #[serde(default)]
    pub(super) sealed: bool,
    #[serde(default)]
    pub(super) no_ack: bool,
    #[serde(default)]
    pub(super) allow_batched: bool,
    #[serde(default)]
    pub(super) allow_msg_counter: bool,
    #[serde(default)]
    pub(super) sources: Vec<serde_json::Value>,
    #[serde(default)]
    pub(super) subject_delete_marker_ttl: i64,
    pub(super) mirror: Option<serde_json::Value>,
    pub(super) subject_transform: Option<serde_json::Value>,
}

/// How far a stream reaches.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct StreamState {
    #[serde(default)]
    pub(super) first_seq: u64,
    #[serde(default)]
    pub(super) last_seq: u64,
}

/// The facts, or why nothing can be published.
pub(super) fn facts(
    info: &StreamInfo,
    server: &ServerFacts,
    config: &DestinationConfig,
) -> Result<StreamFacts, Failure> {
    check(&info.config, config)?;
    let retention = Retention::of(&info.config.retention);
    let (pipeline, mut why) = choose(&info.config, server, config)?;
    if retention != Retention::Limits {
        why.push_str(&format!(
            "; retention {} lets messages go when they are consumed, so that a restart can't find \
             them, and after the duplicate window may store copies",
            info.config.retention
        ));
    }
    let nanos = u64::try_from(info.config.duplicate_window).unwrap_or(0);
    let fence = if pipeline == Pipeline::Sequence { FENCE_BYTES } else { 0 };
    Ok(StreamFacts {
        stream: config.stream.clone(),
        created: info.created.clone(),
        replicas: info.config.num_replicas.max(1),
        retention,
        last_seq: info.state.last_seq,
        first_seq: info.state.first_seq,
        max_message_bytes: max_message_bytes(&info.config, server).saturating_sub(fence),
        max_payload_bytes: server.max_payload.saturating_sub(fence),
        duplicate_window: Duration::from_nanos(nanos),
        server_version: server.version.clone(),
        pipeline,
        why,
    })
}

/// The smaller of the server's limit and the stream's.
pub(super) fn max_message_bytes(stream: &StreamConfig, server: &ServerFacts) -> usize {
    let of_stream = usize::try_from(stream.max_msg_size).unwrap_or(usize::MAX);
    server.max_payload.min(of_stream)
}

fn check(stream: &StreamConfig, config: &DestinationConfig) -> Result<(), Failure> {
    let name = &config.stream;
    let unfit = |kind, what: &str| Err(Failure::new(kind, format!("stream `{name}` {what}")));
    if stream.mirror.is_some() {
        return unfit(Kind::StreamUnfit, "is a mirror: it takes no messages of its own");
    }
    if stream.sealed {
        return unfit(Kind::StreamUnfit, "is sealed: it takes no more messages");
    }
    if stream.no_ack {
        return unfit(Kind::StreamUnfit, "has no_ack set: nothing tells what it stored");
    }
    if stream.allow_msg_counter {
        return unfit(Kind::StreamUnfit, "is a counter stream: it takes only increments");
    }
    if stream.subject_transform.is_some() {
        let what = "transforms subjects: messages can't be found again under the names they had";
        return unfit(Kind::StreamUnfit, what);
    }
    let filter = config.subject.filter_subject();
    // A destination that takes only some kinds may point at a stream that has only those subjects.
    let fits = match config.filter.kinds.is_empty() {
        true => stream.subjects.iter().any(|pattern| covers(pattern, &filter)),
        false => stream.subjects.iter().any(|pattern| overlaps(pattern, &filter)),
    };
    if !fits {
        let subjects = stream.subjects.join("`, `");
        let what = format!("stores `{subjects}`, and not all of `{filter}`");
        return unfit(Kind::StreamSubjects, &what);
    }
    Ok(())
}

fn choose(
    stream: &StreamConfig,
    server: &ServerFacts,
    config: &DestinationConfig,
) -> Result<(Pipeline, String), Failure> {
    let unfit = |obstacle| Err(Failure::new(Kind::StreamPipeline, obstacle));
    let asked = || "the configuration asks for it".to_owned();
    let no_batch = || no_batch(stream, server, config);
    match config.pipeline {
        PipelineChoice::PerRun => Ok((Pipeline::PerRun, asked())),
        PipelineChoice::Batch => match no_batch() {
            None => Ok((Pipeline::Batch, takes_batches(server))),
            Some(obstacle) => unfit(obstacle),
        },
        PipelineChoice::Sequence => match no_sequence(stream, config) {
            None => Ok((Pipeline::Sequence, asked())),
            Some(obstacle) => unfit(obstacle),
        },
        PipelineChoice::Auto => {
            let Some(obstacle) = no_batch() else {
                return Ok((Pipeline::Batch, takes_batches(server)));
            };
            // Nothing but the owner's word says that nobody else writes a stream.
            if !config.exclusive {
                return Ok((Pipeline::PerRun, obstacle));
            }
            Ok(match no_sequence(stream, config) {
                None => {
                    (Pipeline::Sequence, format!("{obstacle}; the stream is this relay's alone"))
                }
                Some(other) => (Pipeline::PerRun, format!("{obstacle}; {other}")),
            })
        }
    }
}

fn takes_batches(server: &ServerFacts) -> String {
    format!("the server is {} and takes batches", server.version)
}

/// Is the server older, as far as is known?
fn is_before(server: &ServerFacts, since: (u32, u32)) -> bool {
    version(&server.version).is_none_or(|version| version < since)
}

fn no_batch(
    stream: &StreamConfig,
    server: &ServerFacts,
    config: &DestinationConfig,
) -> Option<String> {
    if is_before(server, BATCH_SINCE) {
        let (major, minor) = BATCH_SINCE;
        let version = &server.version;
        return Some(format!(
            "batches need nats-server {major}.{minor} or newer, this is {version}"
        ));
    }
    if !stream.allow_batched {
        return Some(format!("stream `{}` does not have allow_batched set", config.stream));
    }
    if stream.num_replicas > 1 && Retention::of(&stream.retention) != Retention::Limits {
        let what = "a batch on several replicas is proven by its last message, which consumers of";
        return Some(format!("{what} retention {} may have taken by then", stream.retention));
    }
    None
}

fn no_sequence(stream: &StreamConfig, config: &DestinationConfig) -> Option<String> {
    let name = &config.stream;
    if !config.exclusive {
        return Some("`sequence` needs `exclusive = true`".to_owned());
    }
    if !stream.sources.is_empty() {
        return Some(format!("`sequence` is not for stream `{name}`, which sources another one"));
    }
    if stream.subject_delete_marker_ttl > 0 {
        let what = "whose server stores markers of its own (subject_delete_marker_ttl)";
        return Some(format!("`sequence` is not for stream `{name}`, {what}"));
    }
    if Retention::of(&stream.retention) != Retention::Limits {
        // Each duplicate ends what is under way.
        let what = "where what is stored can't be found again, and is sent again";
        return Some(format!("`sequence` is not for retention {}, {what}", stream.retention));
    }
    if stream.num_replicas > 1 {
        let what = "there a message that is refused can let the one behind it pass";
        return Some(format!("`sequence` is for streams of one replica: {what}"));
    }
    None
}

/// Major and minor number.
pub(super) fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.trim_start_matches('v').split('.');
    let major = parts.next()?.parse().ok()?;
    Some((major, parts.next()?.parse().ok()?))
}

/// Does the first pattern match every subject that the second one matches?
pub(super) fn covers(pattern: &str, narrower: &str) -> bool {
    let mut narrow = narrower.split('.');
    for token in pattern.split('.') {
        match (token, narrow.next()) {
            (">", Some(_)) => return true,
            ("*", Some(other)) if other != ">" => {}
            (token, Some(other)) if token == other => {}
            _ => return false,
        }
    }
    narrow.next().is_none()
}

/// Is there a subject that both patterns match?
fn overlaps(one: &str, other: &str) -> bool {
    let mut others = other.split('.');
    for token in one.split('.') {
        match (token, others.next()) {
            (_, None) => return false,
            (">", _) | (_, Some(">")) => return true,
            (token, Some(other)) if token == other || token == "*" || other == "*" => {}
            _ => return false,
        }
    }
    others.next().is_none()
}

/// Does the same configuration still hold? Where the stream ends does not matter for that.
pub(super) fn same_apart_from_state(one: &StreamFacts, other: &StreamFacts) -> bool {
    let StreamFacts { last_seq, first_seq, .. } = *one;
    *one == StreamFacts { last_seq, first_seq, ..other.clone() }
}

#[cfg(test)]
pub(super) mod tests;
