//! TLS towards PostgreSQL: what libpq's sslmode promises, on rustls. Owns certificate files and
//! their checks; one configuration serves both connections.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::der::oid::ObjectIdentifier;

use super::dsn::{RootCertificates, SslMode, TlsSettings};
use crate::error::{Failure, Kind};

/// The client's side of TLS, ready to use; `None` inside when `sslmode=disable`.
pub(super) struct Tls {
    config: Option<Arc<ClientConfig>>,
    /// Start with the handshake, without asking for it.
    pub direct: bool,
}

fn fault(text: impl Into<String>) -> Failure {
    Failure::new(Kind::SourceTls, text)
}

impl Tls {
    /// Reads the certificate files. They are read for each connection, so that renewed ones count.
    pub(super) fn load(settings: &TlsSettings) -> Result<Tls, Failure> {
        let direct = settings.direct;
        if settings.mode == SslMode::Disable {
            return Ok(Tls { config: None, direct });
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Verifier::load(settings, &provider)?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| fault(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match client_certificate(settings)? {
            Some((chain, key)) => builder
                .with_client_auth_cert(chain, key)
                .map_err(|error| fault(format!("client certificate: {error}")))?,
            None => builder.with_no_client_auth(),
        };
        config.enable_sni = settings.sni;
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        Ok(Tls { config: Some(Arc::new(config)), direct })
    }

    /// Shakes hands.
    pub(super) async fn wrap(
        &self,
        tcp: TcpStream,
        host: &str,
    ) -> Result<TlsStream<TcpStream>, Failure> {
        let Some(config) = &self.config else { return Err(fault("TLS is off (sslmode=disable)")) };
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| fault(format!("`{host}` can't be the name in a certificate")))?;
        let stream = TlsConnector::from(Arc::clone(config))
            .connect(name, tcp)
            .await
            .map_err(|error| fault(format!("handshake: {error}")))?;
        if self.direct && stream.get_ref().1.alpn_protocol() != Some(b"postgresql") {
            return Err(fault("direct TLS, but the server did not agree on ALPN `postgresql`"));
        }
        Ok(stream)
    }
}

/// Certificate and key from sslcert/sslkey, or from libpq's default place when they are there.
fn client_certificate(
    settings: &TlsSettings,
) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>, Failure> {
    let (certificate, key) = match (&settings.client, &settings.default_client) {
        (Some(files), _) => files,
        (None, Some(files)) if files.0.exists() => files,
        (None, _) => return Ok(None),
    };
    let chain = certificates(certificate, "sslcert")?;
    check_key_permissions(key)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|error| {
        fault(format!("sslkey {}: {error} (PEM without pass phrase is read)", key.display()))
    })?;
    Ok(Some((chain, key)))
}

fn certificates(file: &Path, parameter: &str) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let name = || format!("{parameter} {}", file.display());
    let found = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| fault(format!("{}: {error}", name())))?;
    match found.is_empty() {
        true => Err(fault(format!("{}: no certificate in it", name()))),
        false => Ok(found),
    }
}

/// libpq's rule: nobody else may read the key, but a key of root's may be readable to its group.
#[cfg(unix)]
fn check_key_permissions(key: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let metadata = std::fs::metadata(key)
        .map_err(|error| fault(format!("sslkey {}: {error}", key.display())))?;
    let forbidden = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    match metadata.permissions().mode() & forbidden {
        0 => Ok(()),
        _ => Err(fault(format!(
            "sslkey {}: group or others may access it; its permissions should be 0600",
            key.display()
        ))),
    }
}

#[cfg(not(unix))]
fn check_key_permissions(_key: &Path) -> Result<(), Failure> {
    Ok(())
}

/// How much of the server's certificate is checked.
#[derive(Debug)]
struct Verifier {
    provider: Arc<CryptoProvider>,
    /// Absent: encrypt only.
    chain: Option<Arc<WebPkiServerVerifier>>,
    /// Certificates of the root file, for a server that presents one of them itself.
    roots: Vec<CertificateDer<'static>>,
    /// Must the name fit?
    name: bool,
}

impl Verifier {
    fn load(settings: &TlsSettings, provider: &Arc<CryptoProvider>) -> Result<Verifier, Failure> {
        let verify = settings.mode >= SslMode::VerifyCa;
        let roots = match &settings.roots {
            RootCertificates::File(file) => certificates(file, "sslrootcert")?,
            RootCertificates::Default(Some(file)) if file.exists() => {
                certificates(file, "sslrootcert")?
            }
            RootCertificates::Default(_) if !verify => Vec::new(),
            RootCertificates::Default(_) | RootCertificates::System => platform_roots()?,
        };
        // Like libpq, `require` and less check the chain too when there are roots to check with.
        let chain = match roots.is_empty() {
            true => None,
            false => Some(chain_verifier(&roots, provider)?),
        };
        let name = settings.mode == SslMode::VerifyFull;
        Ok(Verifier { provider: Arc::clone(provider), chain, roots, name })
    }
}

fn platform_roots() -> Result<Vec<CertificateDer<'static>>, Failure> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        let why: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
        return Err(fault(format!(
            "no trusted certificates on this system ({}): name a file with sslrootcert",
            if why.is_empty() { "none installed".to_owned() } else { why.join("; ") }
        )));
    }
    Ok(found.certs)
}

fn chain_verifier(
    roots: &[CertificateDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, Failure> {
    let mut store = RootCertStore::empty();
    let (usable, _) = store.add_parsable_certificates(roots.iter().cloned());
    if usable == 0 {
        return Err(fault("sslrootcert: none of its certificates can be used"));
    }
    WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider))
        .build()
        .map_err(|error| fault(format!("sslrootcert: {error}")))
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        use rustls::Error::InvalidCertificate;
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            // The name is looked at last: everything else is in order.
            Err(InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.name => Ok(ServerCertVerified::assertion()),
            // A self-signed certificate as its own root is common with PostgreSQL and fine with
            // OpenSSL; webpki wants authorities and servers to be different certificates.
            Err(error) if self.roots.iter().any(|root| root == certificate) => {
                check_period(certificate, now).ok_or(error)?;
                if self.name {
                    verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?;
                }
                Ok(ServerCertVerified::assertion())
            }
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn check_period(certificate: &CertificateDer<'_>, now: UnixTime) -> Option<()> {
    let validity = Certificate::from_der(certificate).ok()?.tbs_certificate.validity;
    let from = validity.not_before.to_unix_duration().as_secs();
    let until = validity.not_after.to_unix_duration().as_secs();
    (from..=until).contains(&now.as_secs()).then_some(())
}

/// Hash of the server's certificate, by the hash of its signature, MD5 and SHA-1 replaced by
/// SHA-256 (RFC 5929). `None` for signatures that name no hash of their own, such as Ed25519.
pub(super) fn server_end_point(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    const fn oid(text: &str) -> ObjectIdentifier {
        ObjectIdentifier::new_unwrap(text)
    }
    const SHA256: [ObjectIdentifier; 5] = [
        oid("1.2.840.113549.1.1.4"),  // md5WithRSAEncryption
        oid("1.2.840.113549.1.1.5"),  // sha1WithRSAEncryption
        oid("1.2.840.113549.1.1.11"), // sha256WithRSAEncryption
        oid("1.2.840.10045.4.1"),     // ecdsa-with-SHA1
        oid("1.2.840.10045.4.3.2"),   // ecdsa-with-SHA256
    ];
    const SHA384: [ObjectIdentifier; 2] =
        [oid("1.2.840.113549.1.1.12"), oid("1.2.840.10045.4.3.3")];
    const SHA512: [ObjectIdentifier; 2] =
        [oid("1.2.840.113549.1.1.13"), oid("1.2.840.10045.4.3.4")];

    let signature = Certificate::from_der(certificate).ok()?.signature_algorithm.oid;
    let algorithm = match signature {
        oid if SHA256.contains(&oid) => &ring::digest::SHA256,
        oid if SHA384.contains(&oid) => &ring::digest::SHA384,
        oid if SHA512.contains(&oid) => &ring::digest::SHA512,
        _ => return None,
    };
    Some(ring::digest::digest(algorithm, certificate).as_ref().to_vec())
}
