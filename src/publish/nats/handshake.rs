//! From an address to a connection that is logged in. Owns sockets and TLS.

use async_nats::{ServerAddr, ServerInfo};
use bytes::BytesMut;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::wire::{self, Op};
use crate::config::{DestinationConfig, NatsTls};
use crate::error::{Failure, Kind};
use crate::publish::connect::ServerFacts;
use crate::publish::login::{introduction, is_about_login, shown};

/// Deadline of TCP, TLS and login together, for each address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A byte stream to a server.
#[derive(Debug)]
pub(super) enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Socket {
    /// What is below TLS.
    pub(super) fn tcp(&self) -> &TcpStream {
        match self {
            Socket::Plain(stream) => stream,
            Socket::Tls(stream) => stream.get_ref().0,
        }
    }
}

/// A connection that may be used.
pub(super) struct Opened {
    pub(super) socket: Socket,
    /// Read, and not yet looked at.
    pub(super) unread: BytesMut,
    pub(super) facts: ServerFacts,
}

/// Tries the addresses that the server's name stands for.
pub(super) async fn open(config: &DestinationConfig, server: &str) -> Result<Opened, Failure> {
    let unreachable = |error: io::Error| {
        Failure::new(Kind::BrokerUnreachable, format!("{}: {error}", shown(server)))
    };
    let address: ServerAddr = server.parse().map_err(unreachable)?;
    let sockets = timeout(CONNECT_TIMEOUT, address.socket_addrs()).await;
    let sockets: Vec<SocketAddr> = sockets
        .unwrap_or_else(|_| Err(io::Error::other("its name is not resolved in time")))
        .map_err(unreachable)?
        .collect();
    // One of several servers behind a name may refuse what the others take.
    let mut last = io::Error::other("its name stands for no address");
    let mut refused = None;
    for socket in sockets {
        let attempt = Attempt { config, address: &address, server };
        match timeout(CONNECT_TIMEOUT, attempt.open(socket)).await {
            Ok(Ok(opened)) => return Ok(opened),
            Ok(Err(Trouble::Refused(failure))) => refused = Some(failure),
            Ok(Err(Trouble::Unreachable(error))) => last = error,
            Err(_) => last = io::Error::other(format!("no login within {CONNECT_TIMEOUT:?}")),
        }
    }
    Err(refused.unwrap_or_else(|| unreachable(last)))
}

/// Why an attempt failed. What TLS or the login say is told before what the network says.
enum Trouble {
    Unreachable(io::Error),
    Refused(Failure),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        Trouble::Unreachable(error)
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble::Refused(failure)
    }
}

struct Attempt<'a> {
    config: &'a DestinationConfig,
    address: &'a ServerAddr,
    server: &'a str,
}

impl Attempt<'_> {
    async fn open(&self, to: SocketAddr) -> Result<Opened, Trouble> {
        let tcp = TcpStream::connect(to).await?;
        tcp.set_nodelay(true)?;
        let (mut socket, mut unread) = (Socket::Plain(tcp), BytesMut::new());
        let mut info: Box<ServerInfo> = match self.next(&mut socket, &mut unread).await? {
            Op::Info(info) => info,
            Op::Complaint(words) => return Err(self.complaint(&words)),
            Op::Deliver(..) | Op::Ping | Op::Pong | Op::Fine => {
                return Err(io::Error::other("the server does not say who it is").into());
            }
        };
        let encrypted = self.config.tls.required || self.address.tls_required();
        if encrypted || info.tls_required {
            if !unread.is_empty() {
                return Err(io::Error::other("more than was asked for came before TLS").into());
            }
            socket = self.encrypt(socket).await?;
        }
        let introduction = introduction(self.config, self.address, &info)?;
        let json = serde_json::to_string(&introduction).map_err(io::Error::other)?;
        socket.write_all(format!("CONNECT {json}\r\nPING\r\n").as_bytes()).await?;
        socket.flush().await.map_err(|error| self.refusal(error))?;
        loop {
            match self.next(&mut socket, &mut unread).await? {
                Op::Pong => break,
                Op::Info(newer) => info = newer,
                Op::Complaint(words) => return Err(self.complaint(&words)),
                Op::Ping => socket.write_all(wire::PONG).await?,
                Op::Fine | Op::Deliver(..) => {}
            }
        }
        Ok(Opened { socket, unread, facts: ServerFacts::of(&info) })
    }

    async fn next(&self, socket: &mut Socket, unread: &mut BytesMut) -> Result<Op, Trouble> {
        loop {
            if let Some(op) = wire::take(unread).map_err(io::Error::other)? {
                return Ok(op);
            }
            let read = socket.read_buf(unread).await.map_err(|error| self.refusal(error))?;
            if read == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
    }

    async fn encrypt(&self, socket: Socket) -> Result<Socket, Trouble> {
        let Socket::Plain(tcp) = socket else { return Ok(socket) };
        let client = client_config(&self.config.tls).map_err(|error| self.about_tls(&error))?;
        let name = ServerName::try_from(self.address.host().to_owned())
            .map_err(|error| self.about_tls(&error))?;
        let stream = TlsConnector::from(Arc::new(client)).connect(name, tcp).await;
        stream.map(|stream| Socket::Tls(Box::new(stream))).map_err(|error| self.refusal(error))
    }

    /// With TLS 1.3 a client learns that its certificate is refused when it reads.
    fn refusal(&self, error: io::Error) -> Trouble {
        match error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) {
            true => self.about_tls(&error),
            false => error.into(),
        }
    }

    fn about_tls(&self, error: &dyn std::fmt::Display) -> Trouble {
        Failure::new(Kind::BrokerTls, format!("{}: {error}", shown(self.server))).into()
    }

    fn complaint(&self, words: &str) -> Trouble {
        let detail = format!("{}: {words}", shown(self.server));
        match is_about_login(words) {
            true => Failure::new(Kind::BrokerLogin, detail).into(),
            false => io::Error::other(words.to_owned()).into(),
        }
    }
}

/// The certificates to trust, those of the system unless a file names others, and our own.
fn client_config(tls: &NatsTls) -> io::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match &tls.ca_file {
        Some(file) => {
            for certificate in certificates(file)? {
                roots.add(certificate).map_err(|error| unusable(file, error))?;
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            if let (true, Some(error)) = (found.certs.is_empty(), found.errors.first()) {
                return Err(io::Error::other(format!("no certificates of the system: {error}")));
            }
            roots.add_parsable_certificates(found.certs);
        }
    }
    let builder = ClientConfig::builder().with_root_certificates(roots);
    let (Some(certificate), Some(key)) = (&tls.cert_file, &tls.key_file) else {
        return Ok(builder.with_no_client_auth());
    };
    let own = certificates(certificate)?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, error))?;
    builder.with_client_auth_cert(own, secret).map_err(|error| unusable(certificate, error))
}

fn certificates(file: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if found.is_empty() => Err(unusable(file, "there is no certificate in it")),
        read => read.map_err(|error| unusable(file, error)),
    }
}

fn unusable(file: &Path, error: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("{}: {error}", file.display()))
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Socket::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Socket::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Socket::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Socket::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
