//! Streams that can and can't be published to, and the pipeline that follows from each.

use super::*;
use crate::config::{Filter, NatsAuth, NatsTls, StreamCreate};
use crate::message::Template;

pub(in crate::publish) fn destination(subject: &str) -> DestinationConfig {
    DestinationConfig {
        name: "events".into(),
        servers: vec!["nats://localhost".into()],
        stream: "EVENTS".into(),
        subject: Template::parse(subject).unwrap(),
        filter: Filter::default(),
        required: true,
        pipeline: PipelineChoice::Auto,
        exclusive: false,
        on_dead_letter: crate::config::OnDeadLetter::Continue,
        ack_timeout: Duration::from_secs(5),
        max_in_flight: 100,
        shares_stream: false,
        auth: NatsAuth::default(),
        tls: NatsTls::default(),
        inbox_prefix: None,
        js_domain: None,
        create: StreamCreate::default(),
    }
}

fn info(config: &str) -> StreamInfo {
    let text = format!(
        r#"{{"type":"io.nats.jetstream.api.v1.stream_info_response",
            "config":{{"name":"EVENTS","subjects":["events.>"],"num_replicas":3,
            "max_msg_size":-1,"duplicate_window":120000000000 {config}}},
            "created":"2026-01-02T03:04:05.6Z","state":{{"first_seq":4,"last_seq":9}},
            "cluster":{{"leader":"a"}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn server(version: &str) -> ServerFacts {
    ServerFacts { version: version.into(), max_payload: 1_048_576 }
}

#[test]
fn facts_are_read_from_the_servers_json() {
    let info = info(r#","allow_batched":true"#);
    let facts = facts(&info, &server("2.15.1"), &destination("events.{kind}")).unwrap();
    assert_eq!((facts.first_seq, facts.last_seq, facts.replicas), (4, 9, 3));
    assert_eq!(facts.created, "2026-01-02T03:04:05.6Z");
    assert_eq!(facts.duplicate_window, Duration::from_secs(120));
    assert_eq!((facts.max_message_bytes, facts.pipeline), (1_048_576, Pipeline::Batch));
}

#[test]
fn the_smaller_limit_counts() {
    let mut info = info("");
    for (limit, bytes) in [(-1, 1_048_576), (1000, 1000), (2_000_000, 1_048_576)] {
        info.config.max_msg_size = limit;
        let facts = facts(&info, &server("2.15.1"), &destination("events.{kind}")).unwrap();
        assert_eq!(facts.max_message_bytes, bytes);
    }
}

#[test]
fn the_pipeline_is_the_fastest_possible_and_says_why_no_faster() {
    let mut config = destination("events.{kind}");
    let batched = info(r#","allow_batched":true"#);
    let plain = info("");
    for (choice, info, version, pipeline) in [
        (PipelineChoice::Auto, &batched, "2.15.1", Some(Pipeline::Batch)),
        (PipelineChoice::Auto, &batched, "2.14.0-RC.1", Some(Pipeline::Batch)),
        (PipelineChoice::Auto, &batched, "2.10.25", Some(Pipeline::PerRun)),
        (PipelineChoice::Auto, &batched, "unknown", Some(Pipeline::PerRun)),
        (PipelineChoice::Auto, &plain, "2.15.1", Some(Pipeline::PerRun)),
        (PipelineChoice::PerRun, &batched, "2.15.1", Some(Pipeline::PerRun)),
        (PipelineChoice::Batch, &batched, "2.15.1", Some(Pipeline::Batch)),
        (PipelineChoice::Batch, &plain, "2.15.1", None),
        (PipelineChoice::Batch, &batched, "2.12.9", None),
    ] {
        config.pipeline = choice;
        match (facts(info, &server(version), &config), pipeline) {
            (Ok(facts), Some(pipeline)) => {
                assert_eq!(facts.pipeline, pipeline, "{choice:?} {version}");
                assert!(!facts.why.is_empty());
            }
            (Err(failure), None) => assert_eq!(failure.kind, Kind::StreamPipeline),
            (result, _) => panic!("{choice:?} {version}: {result:?}"),
        }
    }
}

#[test]
fn sequence_is_for_streams_that_are_ours_alone() {
    use Pipeline::{Batch, PerRun, Sequence};
    let info = |more: &str, replicas: u16| {
        let mut info = info(&format!(r#","retention":"limits"{more}"#));
        info.config.num_replicas = replicas;
        info
    };
    let with = |more: &str, replicas: u16, version: &str, choice, exclusive| {
        let config =
            DestinationConfig { pipeline: choice, exclusive, ..destination("events.{kind}") };
        facts(&info(more, replicas), &server(version), &config)
    };
    let auto = |more: &str, replicas: u16, version: &str, exclusive| {
        let facts = with(more, replicas, version, PipelineChoice::Auto, exclusive).unwrap();
        (facts.pipeline, facts.why)
    };
    for (more, replicas, version, exclusive, pipeline) in [
        ("", 1, "2.10.26", true, Sequence),
        ("", 1, "2.10.26", false, PerRun),
        ("", 3, "2.12.8", true, PerRun),
        ("", 1, "2.15.1", true, Sequence),
        (r#","allow_batched":true"#, 1, "2.15.1", true, Batch),
        (r#","sources":[{"name":"X"}]"#, 1, "2.12.8", true, PerRun),
        (r#","subject_delete_marker_ttl":60000000000"#, 1, "2.12.8", true, PerRun),
    ] {
        let (chosen, why) = auto(more, replicas, version, exclusive);
        assert_eq!(chosen, pipeline, "{more} {replicas} {version} {exclusive}: {why}");
        let asked = with(more, replicas, version, PipelineChoice::Sequence, exclusive);
        match asked {
            Ok(facts) => assert!(facts.pipeline == Sequence && pipeline != PerRun, "{why}"),
            Err(failure) => {
                assert_eq!((failure.kind, pipeline), (Kind::StreamPipeline, PerRun), "{failure}");
            }
        }
    }
    let (_, why) = auto("", 3, "2.12.8", true);
    assert!(why.contains("one replica") && why.contains("2.14 or newer"), "{why}");
    let mut work_queue = info("", 1);
    work_queue.config.retention = "workqueue".to_owned();
    let config = DestinationConfig { exclusive: true, ..destination("events.{kind}") };
    let chosen = facts(&work_queue, &server("2.12.8"), &config).unwrap();
    assert_eq!(chosen.pipeline, PerRun, "{}", chosen.why);
}

#[test]
fn a_message_leaves_room_for_what_sequence_adds() {
    let mut config = destination("events.{kind}");
    config.exclusive = true;
    let mut info = info("");
    info.config.num_replicas = 1;
    let facts = facts(&info, &server("2.10.26"), &config).unwrap();
    assert_eq!(facts.max_message_bytes, 1_048_576 - FENCE_BYTES);
    assert_eq!(facts.max_payload_bytes, 1_048_576 - FENCE_BYTES);
}

#[test]
fn streams_that_cannot_serve_are_refused() {
    for (config, kind) in [
        (r#","mirror":{"name":"X"}"#, Kind::StreamUnfit),
        (r#","sealed":true"#, Kind::StreamUnfit),
        (r#","no_ack":true"#, Kind::StreamUnfit),
        (r#","allow_msg_counter":true"#, Kind::StreamUnfit),
        (r#","subject_transform":{"src":">","dest":"x.>"}"#, Kind::StreamUnfit),
    ] {
        let result = facts(&info(config), &server("2.15.1"), &destination("events.{kind}"));
        assert_eq!(result.map_err(|failure| failure.kind), Err(kind), "{config}");
    }
}

#[test]
fn the_streams_subjects_must_cover_the_template() {
    let fits = |subjects: &[&str], kinds: &[&str]| {
        let mut info = info("");
        info.config.subjects = subjects.iter().map(|&subject| subject.to_owned()).collect();
        let mut config = destination("events.{kind}");
        config.filter.kinds = kinds.iter().map(|&kind| kind.to_owned()).collect();
        facts(&info, &server("2.15.1"), &config).is_ok()
    };
    assert!(fits(&["events.>"], &[]) && fits(&["x", ">"], &[]));
    assert!(!fits(&["events.*"], &[]) && !fits(&["events.a", "events.b"], &[]) && !fits(&[], &[]));
    assert!(fits(&["events.a", "events.b"], &["a", "b"]));
    assert!(!fits(&["orders.>"], &["a"]));
}

#[test]
fn patterns_cover_and_overlap() {
    for (pattern, narrower, covering, overlapping) in [
        ("a.>", "a.*.>", true, true),
        ("a.*", "a.b", true, true),
        ("a.b", "a.*", false, true),
        ("a.*", "a.>", false, true),
        ("a.b", "a.b.c", false, false),
        ("a.b.c", "a.b", false, false),
        ("a.>", "a", false, false),
        ("*.b", "a.*", false, true),
        ("*.b", "a.c", false, false),
        (">", "a.b", true, true),
    ] {
        assert_eq!(covers(pattern, narrower), covering, "{pattern} covers {narrower}");
        assert_eq!(overlaps(pattern, narrower), overlapping, "{pattern} overlaps {narrower}");
        assert_eq!(overlaps(narrower, pattern), overlapping, "{narrower} overlaps {pattern}");
    }
}

#[test]
fn only_the_configuration_makes_another_stream() {
    let config = destination("events.{kind}");
    let before = facts(&info(""), &server("2.15.1"), &config).unwrap();
    let mut later = before.clone();
    later.last_seq += 5;
    assert!(same_apart_from_state(&before, &later));
    later.replicas = 1;
    assert!(!same_apart_from_state(&before, &later));
}
