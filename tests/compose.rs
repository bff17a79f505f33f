//! docker-compose.yml against what it relies on: the configuration's keys, the files of this
//! directory, and rules of safety. Nothing here runs a container.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panic")]

use std::ffi::OsString;
use std::path::Path;

use outboxd::config::Places;
use serde_norway::Value;

fn compose() -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docker-compose.yml");
    let mut compose: Value =
        serde_norway::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    compose.apply_merge().unwrap();
    compose
}

fn services(compose: &Value) -> Vec<(&str, &Value)> {
    let services = compose["services"].as_mapping().unwrap();
    services.iter().map(|(name, service)| (name.as_str().unwrap(), service)).collect()
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_sequence().unwrap().iter().map(|item| item.as_str().unwrap()).collect()
}

#[test]
fn the_services_start_one_after_the_other() {
    let compose = compose();
    let names: Vec<&str> = services(&compose).iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["postgres", "nats", "init", "outboxd"]);
    let condition = |service: &str, on: &str| {
        compose["services"][service]["depends_on"][on]["condition"].as_str().unwrap().to_owned()
    };
    assert_eq!(condition("init", "postgres"), "service_healthy");
    assert_eq!(condition("init", "nats"), "service_healthy");
    assert_eq!(condition("outboxd", "init"), "service_completed_successfully");
    for (name, service) in services(&compose) {
        // `init` ends: it is waited for, not watched.
        assert!(name == "init" || service["healthcheck"]["test"].is_sequence(), "{name}");
    }
    let health = strings(&compose["services"]["outboxd"]["healthcheck"]["test"]);
    assert_eq!(health, ["CMD", "outboxd", "status", "--check"]);
    let command = strings(&compose["services"]["postgres"]["command"]).join(" ");
    assert!(command.contains("wal_level=logical"), "{command}");
    let command = strings(&compose["services"]["nats"]["command"]).join(" ");
    assert!(command.contains("--jetstream"), "{command}");
}

#[test]
fn the_variables_make_a_valid_configuration() {
    let compose = compose();
    for name in ["init", "outboxd"] {
        let variables = compose["services"][name]["environment"].as_mapping().unwrap();
        let environment: Vec<(OsString, OsString)> = variables
            .iter()
            .map(|(name, value)| (name.as_str().unwrap().into(), value.as_str().unwrap().into()))
            .collect();
        assert!(environment.iter().all(|(name, _)| name.to_str().unwrap().starts_with("OUTBOXD_")));
        let places = Places { file: None, environment, settings: Vec::new() };
        let config = places.load().unwrap().config;
        assert_eq!(config.relay.name, "orders");
        let stream: Vec<&str> =
            config.destinations.iter().map(|each| each.stream.as_str()).collect();
        assert_eq!(stream, ["EVENTS"]);
        // The container's port that is handed out is the one that the relay listens on.
        let port = config.admin.listen.unwrap().port();
        assert_eq!(
            strings(&compose["services"]["outboxd"]["ports"]),
            [format!("127.0.0.1:{port}:{port}")]
        );
    }
}

#[test]
fn ports_are_on_loopback_and_images_have_versions() {
    let compose = compose();
    let mut images = Vec::new();
    for (name, service) in services(&compose) {
        if !service["ports"].is_null() {
            for port in strings(&service["ports"]) {
                assert!(port.starts_with("127.0.0.1:"), "{name} hands out {port}");
            }
        }
        images.push(service["image"].as_str().unwrap().to_owned());
    }
    let file = compose["services"]["outboxd"]["build"]["dockerfile_inline"].as_str().unwrap();
    let bases = file.lines().filter_map(|line| line.strip_prefix("FROM "));
    images.extend(bases.map(|base| base.split(' ').next().unwrap().to_owned()));
    assert_eq!(images.len(), 6);
    for image in images {
        let (_, tag) = image.split_once(':').unwrap_or_else(|| panic!("{image} has no version"));
        assert_ne!(tag, "latest", "{image}");
    }
    assert_eq!(
        compose["services"]["outboxd"]["image"].as_str().unwrap(),
        concat!("outboxd:", env!("CARGO_PKG_VERSION"))
    );
}
