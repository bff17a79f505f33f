//! Every way to log in, on a server that asks for it; and what is said when it does not work.

use crate::driver::destination;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use nkeys::KeyPair;
use outboxd::config::DestinationConfig;
use outboxd::error::Kind;
use outboxd::publish::streams;
use outboxd::sandbox::{Nats, NatsOptions};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa};
use std::path::{Path, PathBuf};

async fn server(config: String) -> Nats {
    let mut options = NatsOptions::default();
    options.config = config;
    Nats::start_with(options).await.unwrap()
}

fn file(dir: &Path, name: &str, content: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

/// Logs in and asks JetStream something.
async fn outcome(config: &DestinationConfig) -> Result<(), Kind> {
    let broker = streams::connect(config).await.map_err(|failure| failure.kind)?;
    let inspection = broker.inspect().await.map_err(|failure| failure.kind)?;
    assert!(inspection.stream.is_none());
    Ok(())
}

#[tokio::test]
async fn users_and_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let nats = server("authorization { user: relay, password: \"s3cret\" }".into()).await;
    let mut config = destination(vec![nats.url()]);
    assert_eq!(outcome(&config).await, Err(Kind::BrokerLogin));
    config.auth.user = Some("relay".into());
    config.auth.password_file = Some(file(dir.path(), "password", "wrong\n"));
    assert_eq!(outcome(&config).await, Err(Kind::BrokerLogin));
    config.auth.password_file = Some(file(dir.path(), "password", "s3cret\n"));
    assert_eq!(outcome(&config).await, Ok(()));
    let within = nats.url().replace("nats://", "nats://relay:s3cret@");
    assert_eq!(outcome(&destination(vec![within])).await, Ok(()));

    let nats = server("authorization { token: \"t0ken\" }".into()).await;
    let mut config = destination(vec![nats.url()]);
    config.auth.token_file = Some(file(dir.path(), "token", "t0ken\n"));
    assert_eq!(outcome(&config).await, Ok(()));
    let within = nats.url().replace("nats://", "nats://t0ken@");
    assert_eq!(outcome(&destination(vec![within])).await, Ok(()));
}

#[tokio::test]
async fn nkeys_sign_the_servers_challenge() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (KeyPair::new_user(), KeyPair::new_user());
    let users = format!("authorization {{ users: [ {{ nkey: {} }} ] }}", ours.public_key());
    let nats = server(users).await;
    let mut config = destination(vec![nats.url()]);
    config.auth.nkey_file = Some(file(dir.path(), "seed", &(ours.seed().unwrap() + "\n")));
    assert_eq!(outcome(&config).await, Ok(()));
    config.auth.nkey_file = Some(file(dir.path(), "seed", &other.seed().unwrap()));
    assert_eq!(outcome(&config).await, Err(Kind::BrokerLogin));
    config.auth.nkey_file = Some(file(dir.path(), "seed", "SUA-no-seed"));
    assert_eq!(outcome(&config).await, Err(Kind::BrokerLogin));
}

/// A token in the form of NATS, signed by `issuer`.
fn jwt(issuer: &KeyPair, subject: &KeyPair, nats: &str) -> String {
    let encode = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    let claims = format!(
        r#"{{"jti":"t","iat":1700000000,"iss":"{}","name":"t","sub":"{}","nats":{nats}}}"#,
        issuer.public_key(),
        subject.public_key()
    );
    let header = br#"{"typ":"JWT","alg":"ed25519-nkey"}"#;
    let signed = format!("{}.{}", encode(header), encode(claims.as_bytes()));
    let signature = encode(&issuer.sign(signed.as_bytes()).unwrap());
    format!("{signed}.{signature}")
}

#[tokio::test]
async fn a_credentials_file_has_all_that_is_needed() {
    let dir = tempfile::tempdir().unwrap();
    let (operator, user) = (KeyPair::new_operator(), KeyPair::new_user());
    let (account, system) = (KeyPair::new_account(), KeyPair::new_account());
    let all = r#""subs":-1,"data":-1,"payload":-1"#;
    let limits = |jetstream: i32| {
        let store = format!(
            r#""mem_storage":{jetstream},"disk_storage":{jetstream},"streams":-1,"consumer":-1"#
        );
        let more = r#""imports":-1,"exports":-1,"wildcards":true,"conn":-1,"leaf":-1"#;
        format!(r#"{{"limits":{{{all},{more},{store}}},"type":"account","version":2}}"#)
    };
    let config = format!(
        "operator: {}\nsystem_account: {}\nresolver: MEMORY\nresolver_preload {{\n {}: {}\n {}: {}\n}}",
        jwt(&operator, &operator, r#"{"type":"operator","version":2}"#),
        system.public_key(),
        system.public_key(),
        jwt(&operator, &system, &limits(0)),
        account.public_key(),
        jwt(&operator, &account, &limits(-1)),
    );
    let nats = server(config).await;
    let token = jwt(&account, &user, &format!(r#"{{{all},"type":"user","version":2}}"#));
    let credentials = |seed: &str| {
        format!(
            "-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n\
             ************************* IMPORTANT *************************\n\
             NKEY Seed printed below can be used to sign and prove identity.\n\n\
             -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )
    };
    let mut config = destination(vec![nats.url()]);
    let mut login = |seed: &str| {
        config.auth.creds_file = Some(file(dir.path(), "creds", &credentials(seed)));
        config.clone()
    };
    assert_eq!(outcome(&login(&user.seed().unwrap())).await, Ok(()));
    let other = KeyPair::new_user().seed().unwrap();
    assert_eq!(outcome(&login(&other)).await, Err(Kind::BrokerLogin));
}

#[tokio::test]
async fn certificates_of_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let issuer = || {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap()
    };
    let (ours, other) = (issuer(), issuer());
    let signed = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &ours).unwrap();
        (
            file(dir.path(), &format!("{name}.pem"), &certificate.pem()),
            file(dir.path(), &format!("{name}.key"), &key.serialize_pem()),
        )
    };
    let (server_cert, server_key) = signed("server");
    let (client_cert, client_key) = signed("client");
    let ca = file(dir.path(), "ca.pem", &ours.pem());
    let nats = server(format!(
        "tls {{ cert_file: {server_cert:?}, key_file: {server_key:?}, ca_file: {ca:?}, verify: true }}"
    ))
    .await;
    let mut config = destination(vec![nats.url()]);
    config.tls.ca_file = Some(file(dir.path(), "other.pem", &other.pem()));
    assert_eq!(outcome(&config).await, Err(Kind::BrokerTls), "another authority");
    config.tls.ca_file = Some(ca.clone());
    assert_eq!(outcome(&config).await, Err(Kind::BrokerTls), "no certificate of ours");
    config.tls.cert_file = Some(client_cert);
    config.tls.key_file = Some(client_key);
    assert_eq!(outcome(&config).await, Ok(()));
    config.servers = vec![nats.url().replace("nats://127.0.0.1", "tls://localhost")];
    assert_eq!(outcome(&config).await, Ok(()));

    let plain = Nats::start().await.unwrap();
    let mut config = destination(vec![plain.url()]);
    config.tls.required = true;
    assert!(outcome(&config).await.is_err(), "never in plain text");
}
