//! A byte stream to PostgreSQL: TCP, Unix socket, or TLS over TCP. Owns connecting and socket
//! options; knows no message of the protocol but the request for TLS.

use postgres_protocol::message::frontend;
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::client::TlsStream;

use super::dsn::{Endpoint, Target, TcpSettings};
use super::tls::{self, Tls};
use crate::error::{Failure, Kind};

/// An open connection.
#[derive(Debug)]
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// How to use TLS on one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encryption {
    None,
    IfOffered,
    Required,
}

impl Socket {
    /// Connects and, when asked, wraps the connection in TLS. The caller holds the deadline.
    pub(super) async fn open(
        target: &Target,
        settings: &TcpSettings,
        encryption: Encryption,
        tls: &Tls,
    ) -> Result<Socket, Failure> {
        let unreachable = |error: io::Error| {
            Failure::new(Kind::SourceUnreachable, format!("no connection: {error}"))
        };
        match &target.endpoint {
            Endpoint::Unix(_) => {
                let path = target.socket_path().unwrap_or_default();
                UnixStream::connect(path).await.map(Socket::Unix).map_err(unreachable)
            }
            Endpoint::Tcp { host, address } => {
                let tcp = match address {
                    Some(address) => TcpStream::connect((*address, target.port)).await,
                    None => TcpStream::connect((host.as_str(), target.port)).await,
                };
                let tcp = tcp.map_err(unreachable)?;
                set_options(&tcp, settings).map_err(unreachable)?;
                match encryption {
                    Encryption::None => Ok(Socket::Tcp(tcp)),
                    Encryption::IfOffered | Encryption::Required => {
                        encrypt(tcp, host, encryption, tls).await
                    }
                }
            }
        }
    }

    /// Nobody on the network can read along: a password may be sent as it is.
    pub(super) fn is_private(&self) -> bool {
        matches!(self, Socket::Unix(_) | Socket::Tls(_))
    }

    /// `tls-server-end-point` (RFC 5929) of this session.
    pub(super) fn server_end_point(&self) -> Option<Vec<u8>> {
        match self {
            Socket::Tls(stream) => {
                let certificates = stream.get_ref().1.peer_certificates()?;
                tls::server_end_point(certificates.first()?)
            }
            Socket::Unix(_) | Socket::Tcp(_) => None,
        }
    }
}

async fn encrypt(
    mut tcp: TcpStream,
    host: &str,
    encryption: Encryption,
    tls: &Tls,
) -> Result<Socket, Failure> {
    if !tls.direct {
        let broken = |error: io::Error| {
            Failure::new(Kind::SourceUnreachable, format!("asking for TLS: {error}"))
        };
        let mut request = bytes::BytesMut::new();
        frontend::ssl_request(&mut request);
        tcp.write_all(&request).await.map_err(broken)?;
        // One byte and no more: what follows an `S` must come through TLS.
        match (tcp.read_u8().await.map_err(broken)?, encryption) {
            (b'S', _) => {}
            (b'N', Encryption::IfOffered) => return Ok(Socket::Tcp(tcp)),
            (b'N', _) => {
                return Err(Failure::new(Kind::SourceTls, "the server does not offer TLS"));
            }
            (b'E', _) => {
                return Err(Failure::new(
                    Kind::SourceUnreachable,
                    "the server answered the request for TLS with an error",
                ));
            }
            _ => {
                return Err(Failure::new(Kind::SourceUnreachable, "this is no PostgreSQL server"));
            }
        }
    }
    tls.wrap(tcp, host).await.map(|stream| Socket::Tls(Box::new(stream)))
}

fn set_options(tcp: &TcpStream, settings: &TcpSettings) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    let socket = SockRef::from(tcp);
    if settings.keepalives {
        socket.set_tcp_keepalive(
            &TcpKeepalive::new()
                .with_time(settings.keepalives_idle)
                .with_interval(settings.keepalives_interval)
                .with_retries(settings.keepalives_count),
        )?;
    }
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(settings.user_timeout)?;
    Ok(())
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Socket::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
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
            Socket::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Socket::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Socket::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Socket::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Socket::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Socket::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Socket::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
