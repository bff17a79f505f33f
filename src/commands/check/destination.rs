//! The destinations' part of `outboxd check`.

use std::fmt::Write as _;
use std::time::Duration;

use super::unusable;
use crate::config::{DestinationConfig, PipelineChoice};
use crate::error::Kind;
use crate::finding::Finding;
use crate::publish::rehearsal;
use crate::publish::streams::{self, Broker, Inspection, Probe, StreamView};
use crate::relay::outcome::{Pipeline, StreamFacts};

/// Longest pause between two tries to publish one event: the back-off's limit.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Everything about one destination.
pub(super) async fn look(config: &DestinationConfig) -> Vec<Finding> {
    let object = format!("destination {}", config.name);
    let broker = match streams::connect(config).await {
        Ok(broker) => broker,
        Err(failure) => return vec![unusable("destination.connect", &object, &failure)],
    };
    let server = broker.server();
    let mut findings = vec![Finding::ok(
        "destination.connect",
        &object,
        format!("accepts us; nats-server {}", server.version),
    )];
    match broker.inspect().await {
        Ok(inspection) => {
            let publishable = inspection.usable.is_ok();
            findings.extend(stream(config, &inspection));
            if publishable {
                findings.push(permission(config, &broker).await);
                findings.extend(reading_back(config).await);
            }
        }
        Err(failure) => {
            let object = format!("stream {}", config.stream);
            findings.push(unusable("destination.stream", &object, &failure));
        }
    }
    findings
}

/// What was found there, judged. Pure.
fn stream(config: &DestinationConfig, inspection: &Inspection) -> Vec<Finding> {
    let object = format!("stream {}", config.stream);
    let mut findings = Vec::new();
    match &inspection.usable {
        Ok(facts) => {
            let found = format!(
                "stores what [destination.{}] publishes, up to {} bytes a message",
                config.name, facts.max_message_bytes
            );
            findings.push(Finding::ok("destination.stream", &object, found));
            findings.push(pipeline(config, facts, &object));
        }
        Err(failure) => findings.push(unusable("destination.stream", &object, failure)),
    }
    if let Some(view) = &inspection.stream {
        findings.push(retention(view, &object));
        findings.push(window(config, view, &object));
        findings.push(durability(view, &object));
        if inspection.usable.is_ok() && !view.covers_template {
            findings.push(Finding::warning(
                "destination.subjects",
                &object,
                format!(
                    "stores {}, and not all of {}",
                    view.subjects.join(", "),
                    config.subject.filter_subject()
                ),
                "check that it stores every kind in `kinds`: what no stream stores is sent again \
                 and again",
            ));
        }
    }
    findings
}

fn pipeline(config: &DestinationConfig, facts: &StreamFacts, object: &str) -> Finding {
    const ID: &str = "destination.pipeline";
    let found = format!("is fed by pipeline {}: {}", facts.pipeline.as_str(), facts.why);
    match (config.pipeline, facts.pipeline) {
        (PipelineChoice::Auto, Pipeline::PerRun) => Finding::warning(
            ID,
            object,
            found,
            "for order at full speed use nats-server 2.14 or newer, and allow_batched on the stream; \
             on older servers `exclusive = true` if nobody but this relay ever writes the stream",
        ),
        _ => Finding::ok(ID, object, found),
    }
}

/// After a crash the relay reads the stream to learn what is in it.
fn retention(view: &StreamView, object: &str) -> Finding {
    const ID: &str = "destination.retention";
    if view.retention == "limits" {
        return Finding::ok(ID, object, "keeps messages until a limit");
    }
    Finding::warning(
        ID,
        object,
        format!(
            "has retention {}: messages that are consumed can't be found again, and a restart after \
             the duplicate window may store copies",
            view.retention
        ),
        "use retention `limits`, and a second stream that sources this one for work queues",
    )
}

fn window(config: &DestinationConfig, view: &StreamView, object: &str) -> Finding {
    const ID: &str = "destination.duplicate-window";
    let needed = config.ack_timeout + LONGEST_PAUSE;
    let found = format!("has a duplicate window of {:?}", view.duplicate_window);
    if view.duplicate_window >= needed {
        return Finding::ok(ID, object, found);
    }
    Finding::warning(
        ID,
        object,
        format!("{found}, shorter than the relay's longest retry of {needed:?}"),
        format!("set duplicate_window to {needed:?} or more, two minutes by default"),
    )
}

/// Whether a server syncs each message can't be asked over NATS.
fn durability(view: &StreamView, object: &str) -> Finding {
    const ID: &str = "destination.durability";
    if view.storage != "file" {
        return Finding::warning(
            ID,
            object,
            format!("is in {}: a restart of the server loses it", view.storage),
            "use storage `file`",
        );
    }
    if view.replicas > 1 {
        return Finding::ok(ID, object, format!("is on disk of {} servers", view.replicas));
    }
    Finding::warning(
        ID,
        object,
        "is on the disk of one server, which by default syncs it every two minutes: power loss may \
         take acknowledged messages",
        "use three replicas, or `sync_interval: always` in the server's jetstream section",
    )
}

async fn permission(config: &DestinationConfig, broker: &Broker) -> Finding {
    const ID: &str = "destination.permission";
    let object = format!("destination {}", config.name);
    match broker.probe().await {
        Ok(Probe::Allowed) => Finding::ok(ID, object, "may publish, and hears the answer"),
        Ok(Probe::Forbidden(words)) => {
            let remedy = Kind::BrokerPermission.remedy();
            Finding::failure(ID, object, format!("may not publish: {words}"), remedy)
        }
        Ok(Probe::NoStream(subject)) => Finding::failure(
            ID,
            object,
            format!("publishes to {subject}, which no stream stores"),
            Kind::StreamSubjects.remedy(),
        ),
        Ok(Probe::Silent) => Finding::failure(
            ID,
            object,
            "gets no answer to a publish",
            "check that the user may subscribe to its inbox, and the stream's leader",
        ),
        Err(failure) => unusable(ID, &object, &failure),
    }
}

/// Resume reads the stream at each start and reconnect.
async fn reading_back(config: &DestinationConfig) -> Vec<Finding> {
    const ID: &str = "destination.resume";
    let object = format!("destination {}", config.name);
    let mut findings = Vec::new();
    for step in rehearsal::rehearse(config).await {
        let Err(failure) = step.result else { continue };
        let remedy = failure.kind.remedy();
        findings.push(Finding::failure(
            ID,
            &object,
            format!("can't {}: {failure}", step.what),
            remedy,
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(ID, object, "may read back what it published"));
    }
    findings
}

/// What the NATS users must be allowed, in the form of nats-server's configuration or as JSON.
pub(super) fn permissions(destinations: &[DestinationConfig], as_json: bool) -> String {
    let needed = destinations.iter().map(|each| (each, streams::permissions(each)));
    if as_json {
        let each = needed.map(|(destination, needs)| {
            let value = serde_json::json!({
                "publish": needs.publish,
                "subscribe": needs.subscribe,
                "publish_for_init": needs.publish_for_init,
            });
            (destination.name.clone(), value)
        });
        return format!("{:#}", serde_json::Value::Object(each.collect()));
    }
    let list = |subjects: &[String]| {
        let quoted: Vec<String> = subjects.iter().map(|subject| format!("{subject:?}")).collect();
        quoted.join(", ")
    };
    let mut text = String::new();
    for (destination, needs) in needed {
        // Writing to a String can't fail.
        writeln!(
            text,
            "# destination {}; for `outboxd init --create-streams` also publish to {}\n\
             permissions: {{\n  publish: {{ allow: [{}] }}\n  subscribe: {{ allow: [{}] }}\n}}",
            destination.name,
            list(&needs.publish_for_init),
            list(&needs.publish),
            list(&needs.subscribe),
        )
        .unwrap_or_default();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::error::Failure;
    use crate::finding::Severity;
    use crate::publish::streams::ServerFacts;
    use crate::relay::outcome::Retention;

    fn config() -> Config {
        let text = "[relay]\nname = \"orders\"\n[source]\nurl = \"postgres://u@h/d\"\n\
                    [destination.events]\nservers = [\"nats://localhost:4222\"]\n\
                    stream = \"EVENTS\"\n";
        Config::parse("test", text).unwrap()
    }

    fn good() -> Inspection {
        Inspection {
            server: ServerFacts { version: "2.15.1".into(), max_payload: 1 << 20 },
            stream: Some(StreamView {
                subjects: vec!["events.>".into()],
                retention: "limits".into(),
                storage: "file".into(),
                discard: "old".into(),
                replicas: 3,
                duplicate_window: Duration::from_secs(120),
                max_message_bytes: 1 << 20,
                allow_batched: true,
                covers_template: true,
            }),
            usable: Ok(StreamFacts {
                stream: "EVENTS".into(),
                created: "x".into(),
                replicas: 3,
                retention: Retention::Limits,
                last_seq: 0,
                first_seq: 0,
                max_message_bytes: 1 << 20,
                max_payload_bytes: 1 << 20,
                duplicate_window: Duration::from_secs(120),
                server_version: "2.15.1".into(),
                pipeline: Pipeline::Batch,
                why: "it can".into(),
            }),
        }
    }

    fn bad(change: impl FnOnce(&mut Inspection)) -> Vec<(&'static str, Severity)> {
        let mut inspection = good();
        change(&mut inspection);
        let findings = stream(&config().destinations[0], &inspection);
        assert!(findings.iter().all(|f| (f.severity == Severity::Ok) == f.remedy.is_empty()));
        let bad = findings.iter().filter(|finding| finding.severity != Severity::Ok);
        bad.map(|finding| (finding.id, finding.severity)).collect()
    }

    fn view(change: impl FnOnce(&mut StreamView)) -> Vec<(&'static str, Severity)> {
        bad(|inspection| inspection.stream.as_mut().map(change).unwrap_or_default())
    }

    #[test]
    fn what_weakens_a_promise_is_a_warning() {
        let warning = |id| [(id, Severity::Warning)];
        assert_eq!(bad(|_| ()), []);
        assert_eq!(view(|v| v.retention = "workqueue".into()), warning("destination.retention"));
        assert_eq!(view(|v| v.storage = "memory".into()), warning("destination.durability"));
        assert_eq!(view(|v| v.replicas = 1), warning("destination.durability"));
        assert_eq!(view(|v| v.covers_template = false), warning("destination.subjects"));
        let short = view(|v| v.duplicate_window = Duration::from_secs(30));
        assert_eq!(short, warning("destination.duplicate-window"));
        let slow = bad(|i| i.usable.as_mut().unwrap().pipeline = Pipeline::PerRun);
        assert_eq!(slow, warning("destination.pipeline"));
    }

    #[test]
    fn what_stops_the_relay_is_a_failure() {
        let missing = bad(|inspection| {
            inspection.stream = None;
            inspection.usable = Err(Failure::new(Kind::StreamMissing, "no stream"));
        });
        assert_eq!(missing, [("destination.stream", Severity::Failure)]);
    }

    #[test]
    fn permissions_name_every_subject() {
        let text = permissions(&config().destinations, false);
        for subject in ["\"events.>\"", "\"$JS.API.STREAM.INFO.EVENTS\"", "\"_INBOX.>\""] {
            assert!(text.contains(subject), "{subject} is not in {text}");
        }
        let json: serde_json::Value =
            serde_json::from_str(&permissions(&config().destinations, true)).unwrap();
        assert_eq!(json["events"]["subscribe"][0], "_INBOX.>");
    }
}
