//! A TLS client that does not verify the server's certificate.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};

/// Accepts every certificate.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Returns the settings of a client that encrypts and verifies nothing: for servers whose certificates no known authority
/// signs, such as those in pods. The client has no certificate and offers no protocol (ALPN).
#[must_use]
pub fn unverified_client() -> ClientConfig {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ClientConfig::builder()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
        .with_no_client_auth()
}

#[cfg(test)]
mod tests {
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    #[tokio::test]
    async fn only_this_client_accepts_a_certificate_of_no_authority() {
        let made = || {
            let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
            (made.cert.pem(), made.signing_key.serialize_pem())
        };
        let (of_server, other) = (made(), made());
        let tls = crate::Tls::fixed(&of_server.0, &of_server.1, &other.0).expect("settings");
        let acceptor = TlsAcceptor::from(Arc::clone(&tls.current().server));
        let verifying = crate::client(&other.0, &other.1, &other.0).expect("settings");
        for (config, accepts) in [(unverified_client(), true), (verifying, false)] {
            let (near, far) = tokio::io::duplex(1 << 14);
            let name = ServerName::try_from("other").expect("a name");
            let connect = TlsConnector::from(Arc::new(config)).connect(name, near);
            let (connected, _) = tokio::join!(connect, acceptor.accept(far));
            assert_eq!(connected.is_ok(), accepts);
        }
    }
}
