//! TLS settings: our certificate and key, and the CAs that verify client certificates.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    ClientConfig, ConfigBuilder, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme, WantsVerifier,
};

use super::BoxError;

/// Minimum interval between two checks of the files; a handshake in between uses the current settings.
const RELOAD_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The files of the TLS settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Our certificate chain, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The CAs that verify client certificates, PEM; `None` if no client certificate is accepted.
    pub client_ca: Option<PathBuf>,
}

/// TLS versions and algorithms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Protocol {
    /// Only TLS 1.3; otherwise also 1.2.
    pub only_tls13: bool,
    /// The cipher suites of TLS 1.2, by name; empty for all.
    pub suites: Vec<String>,
    /// The key exchange groups, by their numbers in IANA's registry; empty for the library's choice.
    pub groups: Vec<u16>,
}

impl Protocol {
    fn builder(&self) -> Result<ConfigBuilder<ServerConfig, WantsVerifier>, BoxError> {
        let mut provider = rustls::crypto::aws_lc_rs::default_provider();
        let is_selected = |suite: &rustls::SupportedCipherSuite| {
            self.suites
                .iter()
                .any(|name| Some(name.as_str()) == suite.suite().as_str())
        };
        provider.cipher_suites.retain(|suite| {
            suite.tls13().is_some() || self.suites.is_empty() || is_selected(suite)
        });
        if !self.groups.is_empty() {
            // All groups of the library, not only its defaults, in its own order.
            provider.kx_groups = rustls::crypto::aws_lc_rs::ALL_KX_GROUPS.to_vec();
            provider
                .kx_groups
                .retain(|group| self.groups.contains(&u16::from(group.name())));
        }
        let versions: &[&rustls::SupportedProtocolVersion] = if self.only_tls13 {
            &[&rustls::version::TLS13]
        } else {
            &[&rustls::version::TLS13, &rustls::version::TLS12]
        };
        Ok(ServerConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(versions)?)
    }
}

/// Accepts any certificate for which the client has the key, as kubelet and apiserver do (Go's `RequestClientCert`).
/// Trust is checked after the handshake, so that a client with an untrusted certificate gets an HTTP response and not a
/// TLS alert.
#[derive(Debug)]
struct AnyClient(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for AnyClient {
    fn offer_client_auth(&self) -> bool {
        true
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// A certificate that a client has presented, and for which the client has the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    der: Vec<u8>,
    /// End of the trust, in seconds since 1970; `None` if the certificate is not trusted.
    until: Option<i64>,
}

impl Certificate {
    /// A certificate (DER) that is trusted until it expires.
    #[must_use]
    pub fn trusted(der: Vec<u8>) -> Certificate {
        let until = x509_parser::parse_x509_certificate(&der)
            .ok()
            .map(|(_, parsed)| parsed.validity().not_after.timestamp());
        Certificate { der, until }
    }

    /// A certificate (DER) that is not trusted.
    #[must_use]
    pub fn untrusted(der: Vec<u8>) -> Certificate {
        Certificate { der, until: None }
    }

    /// Returns the certificate (DER), if it is trusted and has not expired: a connection may last longer than a
    /// certificate.
    #[must_use]
    pub fn trusted_der(&self) -> Option<&[u8]> {
        let now = i64::try_from(UnixTime::now().as_secs()).unwrap_or(i64::MAX);
        self.until
            .is_some_and(|until| now <= until)
            .then_some(&self.der)
    }
}

/// The settings of a new connection, and the verifier of its client's certificate.
pub(super) struct Settings {
    pub(super) server: Arc<ServerConfig>,
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl Settings {
    /// Verifies the chain that a client has presented; `None` if it has presented none.
    pub(super) fn verify_client(
        &self,
        chain: Option<&[CertificateDer<'_>]>,
    ) -> Option<Certificate> {
        let (verifier, (own, others)) = (self.verifier.as_ref()?, chain?.split_first()?);
        let verified = verifier.verify_client_cert(own, others, UnixTime::now());
        if let Err(error) = &verified {
            tracing::debug!(%error, "verifying a client certificate failed");
        }
        let der = own.to_vec();
        Some(match verified {
            Ok(_) => Certificate::trusted(der),
            Err(_) => Certificate::untrusted(der),
        })
    }
}

type Stamp = [Option<SystemTime>; 3];

struct State {
    checked: Instant,
    stamp: Stamp,
    config: Arc<Settings>,
}

/// The current settings; those from files are reloaded when a file changes.
pub struct Tls {
    files: Option<(TlsFiles, Protocol)>,
    state: Mutex<State>,
}

fn roots(pem: &[u8]) -> Result<RootCertStore, BoxError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate?)?;
    }
    Ok(roots)
}

fn config(
    chain: &[u8],
    key: &[u8],
    client_ca: Option<&[u8]>,
    protocol: &Protocol,
) -> Result<Settings, BoxError> {
    let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(key)?;
    let builder = protocol.builder()?;
    let verifier = match client_ca.map(roots).transpose()? {
        Some(roots) => Some(WebPkiClientVerifier::builder(Arc::new(roots)).build()?),
        None => None,
    };
    let builder = match &verifier {
        Some(verifier) => {
            builder.with_client_cert_verifier(Arc::new(AnyClient(Arc::clone(verifier))))
        }
        None => builder.with_no_client_auth(),
    };
    let mut server = builder.with_single_cert(chain, key)?;
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Settings {
        server: Arc::new(server),
        verifier,
    })
}

impl TlsFiles {
    fn stamp(&self) -> Stamp {
        let of = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
        [
            of(&self.certificate),
            of(&self.key),
            self.client_ca.as_deref().and_then(of),
        ]
    }

    fn load(&self, protocol: &Protocol) -> Result<Settings, BoxError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|e| format!("{} cannot be read: {e}", path.display()))
        };
        let client_ca = self.client_ca.as_deref().map(read).transpose()?;
        let loaded = config(
            &read(&self.certificate)?,
            &read(&self.key)?,
            client_ca.as_deref(),
            protocol,
        );
        loaded.map_err(|e| {
            format!(
                "{} and its key cannot be used: {e}",
                self.certificate.display()
            )
            .into()
        })
    }
}

impl Tls {
    /// Reads settings from files and follows the files' changes.
    pub fn follow(files: TlsFiles, protocol: Protocol) -> Result<Tls, BoxError> {
        let (stamp, config) = (files.stamp(), Arc::new(files.load(&protocol)?));
        Ok(Tls {
            files: Some((files, protocol)),
            state: Mutex::new(State {
                checked: Instant::now(),
                stamp,
                config,
            }),
        })
    }

    /// Creates settings from PEM texts, which do not change.
    pub fn fixed(chain: &str, key: &str, client_ca: &str) -> Result<Tls, BoxError> {
        let config = Arc::new(config(
            chain.as_bytes(),
            key.as_bytes(),
            Some(client_ca.as_bytes()),
            &Protocol::default(),
        )?);
        Ok(Tls {
            files: None,
            state: Mutex::new(State {
                checked: Instant::now(),
                stamp: [None; 3],
                config,
            }),
        })
    }

    /// Returns the current settings. If changed files cannot be used, the previous settings stay.
    pub(super) fn current(&self) -> Arc<Settings> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((files, protocol)) = self
            .files
            .as_ref()
            .filter(|_| state.checked.elapsed() >= RELOAD_CHECK_INTERVAL)
        else {
            return Arc::clone(&state.config);
        };
        state.checked = Instant::now();
        let stamp = files.stamp();
        if stamp != state.stamp {
            state.stamp = stamp;
            match files.load(protocol) {
                Ok(config) => {
                    state.config = Arc::new(config);
                    tracing::info!(certificate = %files.certificate.display(), "the serving certificate was reloaded");
                }
                Err(error) => tracing::error!(
                    error,
                    "the new serving certificate is invalid; keeping the old one"
                ),
            }
        }
        Arc::clone(&state.config)
    }
}

/// Returns the settings of a client with a certificate (PEM) that trusts a CA (PEM). The client uses HTTP/1.1, because
/// its requests may leave HTTP.
pub fn client(chain: &str, key: &str, ca: &str) -> Result<ClientConfig, BoxError> {
    let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
    let mut config = ClientConfig::builder()
        .with_root_certificates(roots(ca.as_bytes())?)
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_certificate_files_are_reloaded_and_invalid_ones_ignored() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = TlsFiles {
            certificate: dir.path().join("c"),
            key: dir.path().join("k"),
            client_ca: None,
        };
        let write = || {
            let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
            std::fs::write(&files.certificate, made.cert.pem()).expect("written");
            std::fs::write(&files.key, made.signing_key.serialize_pem()).expect("written");
        };
        assert!(
            Tls::follow(files.clone(), Protocol::default())
                .is_err_and(|e| e.to_string().contains("cannot be read"))
        );
        write();
        let tls = Tls::follow(files.clone(), Protocol::default()).expect("fine");
        let first = tls.current();
        let allow_reload = || tls.state.lock().expect("the state").checked -= RELOAD_CHECK_INTERVAL;
        std::fs::write(&files.key, "nonsense").expect("written");
        allow_reload();
        assert!(
            Arc::ptr_eq(&first, &tls.current()),
            "the old certificate stays in use"
        );
        write();
        allow_reload();
        assert!(!Arc::ptr_eq(&first, &tls.current()));
    }

    /// A certificate authority, and clients' certificates that it has signed.
    struct Authority(rcgen::CertifiedIssuer<'static, rcgen::KeyPair>);

    impl Authority {
        fn new() -> Authority {
            let mut params = rcgen::CertificateParams::default();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            let key = rcgen::KeyPair::generate().expect("a key");
            Authority(rcgen::CertifiedIssuer::self_signed(params, key).expect("an authority"))
        }

        /// A certificate and its key, PEM, that expires in this year.
        fn client(&self, year: i32) -> (String, String) {
            let key = rcgen::KeyPair::generate().expect("a key");
            let mut params = rcgen::CertificateParams::default();
            params.not_after = rcgen::date_time_ymd(year, 1, 1);
            params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
            let signed = params.signed_by(&key, &self.0).expect("a certificate");
            (signed.pem(), key.serialize_pem())
        }
    }

    #[tokio::test]
    async fn a_client_certificate_is_verified_after_the_handshake() {
        let (ours, other) = (Authority::new(), Authority::new());
        let served = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
        let (chain, key) = (served.cert.pem(), served.signing_key.serialize_pem());
        let ca = ours.0.pem();
        let settings = Tls::fixed(&chain, &key, &ca).expect("fine").current();
        for (certificate, holds) in [
            (Some(ours.client(4000)), Some(true)),
            (Some(ours.client(2000)), Some(false)),
            (Some(other.client(4000)), Some(false)),
            (None, None),
        ] {
            let client = match &certificate {
                Some((own, key)) => client(own, key, &chain).expect("a client"),
                None => ClientConfig::builder()
                    .with_root_certificates(roots(chain.as_bytes()).expect("roots"))
                    .with_no_client_auth(),
            };
            let (near, far) = tokio::io::duplex(1 << 16);
            let acceptor = tokio_rustls::TlsAcceptor::from(Arc::clone(&settings.server));
            let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
            let name = rustls::pki_types::ServerName::try_from("a").expect("a name");
            let (server, client) =
                tokio::join!(acceptor.accept(near), connector.connect(name, far));
            let server = server.expect("no alert");
            client.expect("no alert");
            let shown = settings.verify_client(server.get_ref().1.peer_certificates());
            assert_eq!(shown.map(|c| c.trusted_der().is_some()), holds);
        }
    }

    #[test]
    fn a_certificate_is_valid_until_its_expiry() {
        let (pem, _) = Authority::new().client(2000);
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
        let mut certificate = Certificate::trusted(der.to_vec());
        assert_eq!(
            certificate.trusted_der(),
            None,
            "the certificate has expired"
        );
        certificate.until = Some(i64::MAX);
        assert!(certificate.trusted_der().is_some());
    }

    #[test]
    fn the_configured_versions_suites_and_groups_are_used() {
        let of = |only_tls13: bool, suites: &[&str], groups: &[u16]| {
            let protocol = Protocol {
                only_tls13,
                suites: suites.iter().map(|s| (*s).into()).collect(),
                groups: groups.to_vec(),
            };
            let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
            let config = config(
                made.cert.pem().as_bytes(),
                made.signing_key.serialize_pem().as_bytes(),
                None,
                &protocol,
            )
            .expect("a configuration")
            .server;
            let tls12 = config
                .crypto_provider()
                .cipher_suites
                .iter()
                .filter(|s| s.tls13().is_none())
                .count();
            let groups = &config.crypto_provider().kx_groups;
            let groups: Vec<u16> = groups.iter().map(|g| g.name().into()).collect();
            (tls12, groups)
        };
        let one = &["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"];
        assert_eq!(of(false, one, &[]).0, 1);
        assert_eq!(of(false, &[], &[]).0, 6);
        assert_eq!(of(false, &[], &[24, 4587]).1, [24, 4587]);
        assert!(of(false, &[], &[]).1.contains(&29));
    }
}
