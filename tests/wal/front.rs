//! Fronts that speak TLS, and the certificates for them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use ring::{digest, hmac, pbkdf2};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ServerConfig, WebPkiClientVerifier};
use tokio_rustls::rustls::{RootCertStore, crypto};

/// A certificate with its key.
#[derive(Clone)]
pub struct Issued {
    pub pem: String,
    pub key_pem: String,
    pub der: Vec<u8>,
}

impl Issued {
    /// As `openssl req -x509` makes it: an authority by itself.
    pub fn self_signed(names: &[&str], expired: bool) -> Issued {
        let key = KeyPair::generate().unwrap();
        let mut params = params(names);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        if expired {
            params.not_after = rcgen::date_time_ymd(2001, 1, 1);
        }
        let certificate = params.self_signed(&key).unwrap();
        Issued {
            pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            der: certificate.der().to_vec(),
        }
    }
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    CertificateParams::new(names).unwrap()
}

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Authority {
        let mut params = params(&[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    pub fn issue(&self, names: &[&str]) -> Issued {
        let key = KeyPair::generate().unwrap();
        let certificate = params(names).signed_by(&key, &self.0).unwrap();
        Issued {
            pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            der: certificate.der().to_vec(),
        }
    }
}

fn acceptor(issued: &Issued, clients: Option<&Authority>) -> TlsAcceptor {
    let provider = Arc::new(crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match clients {
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(authority.0.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
        None => builder.with_no_client_auth(),
    };
    let chain = vec![CertificateDer::from(issued.der.clone())];
    let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap();
    let mut config = builder.with_single_cert(chain, key).unwrap();
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// What becomes of a client that does not ask for TLS.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Plain {
    Allowed,
    /// As a `hostssl` line alone does.
    Rejected,
}

/// Takes TLS off and hands on to PostgreSQL.
pub struct Front {
    port: u16,
    sessions: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Front {
    pub async fn start(target: u16, issued: Issued) -> Front {
        Front::start_with(target, Some(issued), Plain::Allowed).await
    }

    pub async fn start_with(target: u16, issued: Option<Issued>, plain: Plain) -> Front {
        let acceptor = issued.map(|issued| acceptor(&issued, None));
        Front::run(target, acceptor, plain).await
    }

    pub async fn demanding_certificates(target: u16, issued: Issued, of: &Authority) -> Front {
        Front::run(target, Some(acceptor(&issued, Some(of))), Plain::Rejected).await
    }

    async fn run(target: u16, acceptor: Option<TlsAcceptor>, plain: Plain) -> Front {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let sessions = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&sessions);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (acceptor, counter) = (acceptor.clone(), Arc::clone(&counter));
                // A connection that breaks is the client's to report.
                tokio::spawn(async move {
                    drop(hand_on(client, target, acceptor, plain, &counter).await);
                });
            }
        });
        Front { port, sessions, task }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// TLS sessions so far.
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::SeqCst)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The request for TLS, or the byte with which TLS itself begins.
async fn wants_tls(client: &mut TcpStream) -> std::io::Result<Option<bool>> {
    let mut first = [0; 8];
    client.peek(&mut first).await?;
    if first[0] == 0x16 {
        return Ok(Some(true));
    }
    if first == [0, 0, 0, 8, 4, 210, 22, 47] {
        client.read_exact(&mut first).await?;
        return Ok(Some(false));
    }
    Ok(None)
}

async fn hand_on(
    mut client: TcpStream,
    target: u16,
    acceptor: Option<TlsAcceptor>,
    plain: Plain,
    sessions: &AtomicUsize,
) -> std::io::Result<()> {
    let mut server = TcpStream::connect(("127.0.0.1", target)).await?;
    match (wants_tls(&mut client).await?, acceptor) {
        (Some(direct), Some(acceptor)) => {
            if !direct {
                client.write_all(b"S").await?;
            }
            let mut client = acceptor.accept(client).await?;
            sessions.fetch_add(1, Ordering::SeqCst);
            copy_bidirectional(&mut client, &mut server).await?;
        }
        (Some(_), None) => {
            client.write_all(b"N").await?;
            copy_bidirectional(&mut client, &mut server).await?;
        }
        (None, _) if plain == Plain::Rejected => {
            client.read_u32().await?;
            client.write_all(&error("28000", "no pg_hba.conf entry, no encryption")).await?;
        }
        (None, _) => {
            copy_bidirectional(&mut client, &mut server).await?;
        }
    }
    Ok(())
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut message = vec![tag];
    message.extend_from_slice(&u32::try_from(body.len() + 4).unwrap().to_be_bytes());
    message.extend_from_slice(body);
    message
}

fn error(code: &str, text: &str) -> Vec<u8> {
    message(b'E', format!("SFATAL\0VFATAL\0C{code}\0M{text}\0\0").as_bytes())
}

/// The server's side of scram-sha-256 behind TLS; after the log-in it has nothing more to say.
pub struct Scram {
    port: u16,
    seen: Arc<Mutex<(String, Vec<u8>)>>,
    task: JoinHandle<()>,
}

impl Scram {
    pub async fn start(issued: Issued, password: &'static str, offers_binding: bool) -> Scram {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new((String::new(), Vec::new())));
        let notes = Arc::clone(&seen);
        let acceptor = acceptor(&issued, None);
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                if let Ok(Some(_)) = wants_tls(&mut client).await {
                    client.write_all(b"S").await.unwrap();
                    let client = acceptor.accept(client).await.unwrap();
                    // A client that leaves in the middle is what some tests are about.
                    drop(scram(client, password, offers_binding, &notes).await);
                }
            }
        });
        Scram { port, seen, task }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Mechanism and channel binding of the last log-in.
    pub fn seen(&self) -> (String, Vec<u8>) {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Scram {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn scram(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    password: &str,
    offers_binding: bool,
    seen: &Mutex<(String, Vec<u8>)>,
) -> std::io::Result<()> {
    let length = client.read_u32().await?;
    let mut startup = vec![0; usize::try_from(length - 4).unwrap()];
    client.read_exact(&mut startup).await?;

    let mut offer = 10_u32.to_be_bytes().to_vec();
    if offers_binding {
        offer.extend_from_slice(b"SCRAM-SHA-256-PLUS\0");
    }
    offer.extend_from_slice(b"SCRAM-SHA-256\0\0");
    client.write_all(&message(b'R', &offer)).await?;

    let first = read_password(&mut client).await?;
    let (mechanism, first) = first.split_once('\0').unwrap();
    let bare = &first[first.find("n=").unwrap()..];
    let nonce = format!("{}server", bare.split_once("r=").unwrap().1);
    let challenge = format!("r={nonce},s={},i=4096", BASE64.encode(b"salt"));
    let mut body = 11_u32.to_be_bytes().to_vec();
    body.extend_from_slice(challenge.as_bytes());
    client.write_all(&message(b'R', &body)).await?;

    let last = read_password(&mut client).await?;
    let (without_proof, _) = last.rsplit_once(",p=").unwrap();
    let binding = without_proof.strip_prefix("c=").unwrap().split_once(',').unwrap().0;
    *seen.lock().unwrap() = (mechanism.to_owned(), BASE64.decode(binding).unwrap());

    let mut salted = [0; digest::SHA256_OUTPUT_LEN];
    let rounds = std::num::NonZeroU32::new(4096).unwrap();
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, rounds, b"salt", password.as_bytes(), &mut salted);
    let sign = |key: &[u8], text: &[u8]| hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text);
    let server_key = sign(&salted, b"Server Key");
    let transcript = format!("{bare},{challenge},{without_proof}");
    let signature = sign(server_key.as_ref(), transcript.as_bytes());
    let mut body = 12_u32.to_be_bytes().to_vec();
    body.extend_from_slice(format!("v={}", BASE64.encode(signature)).as_bytes());
    client.write_all(&message(b'R', &body)).await?;

    client.write_all(&message(b'R', &0_u32.to_be_bytes())).await?;
    client.write_all(&message(b'K', &[0; 8])).await?;
    client.write_all(&message(b'Z', b"I")).await?;
    client.write_all(&error("XX000", "end of the script")).await?;
    // Until the client has read it and leaves.
    client.read_to_end(&mut Vec::new()).await.map(drop)
}

/// A SASL response: its text, in the first one with the mechanism in front and without lengths.
async fn read_password(client: &mut (impl AsyncRead + Unpin)) -> std::io::Result<String> {
    assert_eq!(client.read_u8().await?, b'p');
    let length = client.read_u32().await?;
    let mut body = vec![0; usize::try_from(length - 4).unwrap()];
    client.read_exact(&mut body).await?;
    match body.iter().position(|byte| *byte == 0) {
        Some(end) => {
            let mechanism = String::from_utf8(body[..end].to_vec()).unwrap();
            let data = String::from_utf8(body[end + 5..].to_vec()).unwrap();
            Ok(format!("{mechanism}\0{data}"))
        }
        None => Ok(String::from_utf8(body).unwrap()),
    }
}
