//! The certificates of a bundled cluster: one CA and the certificates it signs. Keys are ECDSA P-256.
//!
//! All files are in one directory: `ca.crt`, `ca.key`, `apiserver.{crt,key}`, `sa.{key,pub}` and a pair per client.
//! Existing files are reused, so that a restart keeps all identities.

use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType, SubjectPublicKeyInfo,
};

use holdfast_core::node::signing::{CsrRequest, check_issued, pem};

/// Why certificates cannot be created or read.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read or written.
    #[error("the certificate file {path} cannot be read or written: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A key or certificate is invalid.
    #[error(
        "certificates in {dir} cannot be created or used: {source}; if a file there is damaged, remove the directory and start again"
    )]
    Crypto {
        /// The directory.
        dir: PathBuf,
        /// The cause.
        source: rcgen::Error,
    },
    /// A newly signed certificate differs from its request; it is not returned.
    #[error("the signed certificate differs from the request: {0}; this is a bug")]
    Differs(String),
}

/// A directory of certificates with its CA.
pub struct Pki {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    /// The CA certificate, PEM.
    pub ca: String,
}

/// A certificate and its key, both PEM.
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// The private key.
    pub key: String,
}

const TEN_YEARS: i32 = 10;

impl Pki {
    /// Opens or creates the directory and its CA.
    pub fn open(dir: &Path) -> Result<Pki, PkiError> {
        std::fs::create_dir_all(dir).map_err(|source| PkiError::File {
            path: dir.into(),
            source,
        })?;
        let crypto = |source| PkiError::Crypto {
            dir: dir.into(),
            source,
        };
        let (cert_file, key_file) = (dir.join("ca.crt"), dir.join("ca.key"));
        if !cert_file.exists() || !key_file.exists() {
            let key = KeyPair::generate().map_err(crypto)?;
            let mut params = CertificateParams::new(Vec::<String>::new()).map_err(crypto)?;
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![
                KeyUsagePurpose::KeyCertSign,
                KeyUsagePurpose::CrlSign,
                KeyUsagePurpose::DigitalSignature,
            ];
            params
                .distinguished_name
                .push(DnType::CommonName, "holdfast-ca");
            validity(&mut params);
            let certificate = params.self_signed(&key).map_err(crypto)?;
            write(&key_file, &key.serialize_pem(), 0o600)?;
            write(&cert_file, &certificate.pem(), 0o644)?;
        }
        let ca = read(&cert_file)?;
        let key = KeyPair::from_pem(&read(&key_file)?).map_err(crypto)?;
        let issuer = Issuer::from_ca_cert_pem(&ca, key).map_err(crypto)?;
        Ok(Pki {
            dir: dir.into(),
            issuer,
            ca,
        })
    }

    /// Issues the serving certificate of `user` for these names and addresses. It is reissued
    /// at each start, because they may have changed.
    pub fn serving(
        &self,
        user: &str,
        names: &[&str],
        addresses: &[IpAddr],
    ) -> Result<Pair, PkiError> {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let mut params = CertificateParams::new(names).map_err(|e| self.crypto(e))?;
        params
            .subject_alt_names
            .extend(addresses.iter().map(|a| SanType::IpAddress(*a)));
        params.distinguished_name.push(DnType::CommonName, user);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    /// A client certificate, stored in `<file>.crt` and `<file>.key`.
    pub fn client(&self, file: &str, user: &str, groups: &[&str]) -> Result<Pair, PkiError> {
        let (cert_file, key_file) = (
            self.dir.join(format!("{file}.crt")),
            self.dir.join(format!("{file}.key")),
        );
        if cert_file.exists() && key_file.exists() {
            return Ok(Pair {
                certificate: read(&cert_file)?,
                key: read(&key_file)?,
            });
        }
        let mut params =
            CertificateParams::new(Vec::<String>::new()).map_err(|e| self.crypto(e))?;
        params.distinguished_name.push(DnType::CommonName, user);
        for group in groups {
            params
                .distinguished_name
                .push(DnType::OrganizationName, *group);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let pair = self.sign(params)?;
        write(&key_file, &pair.key, 0o600)?;
        write(&cert_file, &pair.certificate, 0o644)?;
        Ok(pair)
    }

    /// The key pair for service-account tokens: private and public key, PEM.
    pub fn token_keys(&self) -> Result<(String, String), PkiError> {
        let file = self.dir.join("sa.key");
        if !file.exists() {
            let key = KeyPair::generate().map_err(|e| self.crypto(e))?;
            write(&file, &key.serialize_pem(), 0o600)?;
        }
        let private = read(&file)?;
        let key = KeyPair::from_pem(&private).map_err(|e| self.crypto(e))?;
        let public = pem("PUBLIC KEY", &key.subject_public_key_info());
        write(&self.dir.join("sa.pub"), &public, 0o644)?;
        Ok((private, public))
    }

    /// Signs a certificate request with a lifetime in seconds. The key usages are fixed, not taken from the request.
    /// Returns PEM, after comparing the certificate with the request.
    pub(crate) fn sign_request(
        &self,
        csr: &CsrRequest,
        client: bool,
        seconds: i64,
    ) -> Result<String, PkiError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, csr.organization.as_str());
        params
            .distinguished_name
            .push(DnType::CommonName, csr.name.as_str());
        for name in &csr.dns {
            let name = name.as_str().try_into().map_err(|e| self.crypto(e))?;
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        params
            .subject_alt_names
            .extend(csr.addresses.iter().map(|a| SanType::IpAddress(*a)));
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        params.extended_key_usages = vec![if client {
            ExtendedKeyUsagePurpose::ClientAuth
        } else {
            ExtendedKeyUsagePurpose::ServerAuth
        }];
        let now = jiff::Timestamp::now().as_second();
        let at = |second: i64| {
            rcgen::date_time_ymd(1970, 1, 1)
                + Duration::from_secs(u64::try_from(second).unwrap_or(0))
        };
        let seconds = seconds.clamp(0, i64::from(i32::MAX));
        // The validity begins five minutes earlier, because clocks differ.
        (params.not_before, params.not_after) = (at(now - 300), at(now + seconds));
        let key = SubjectPublicKeyInfo::from_der(&csr.key).map_err(|e| self.crypto(e))?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(|e| self.crypto(e))?;
        check_issued(certificate.der(), csr, client).map_err(PkiError::Differs)?;
        Ok(certificate.pem())
    }

    fn sign(&self, mut params: CertificateParams) -> Result<Pair, PkiError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        validity(&mut params);
        let key = KeyPair::generate().map_err(|e| self.crypto(e))?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(|e| self.crypto(e))?;
        Ok(Pair {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    fn crypto(&self, source: rcgen::Error) -> PkiError {
        PkiError::Crypto {
            dir: self.dir.clone(),
            source,
        }
    }
}

fn validity(params: &mut CertificateParams) {
    let today = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
    let day = |offset: i32| {
        rcgen::date_time_ymd(
            i32::from(today.year()) + offset,
            u8::try_from(today.month()).unwrap_or(1),
            1,
        )
    };
    params.not_before = day(0);
    params.not_after = day(TEN_YEARS);
}

fn read(path: &Path) -> Result<String, PkiError> {
    std::fs::read_to_string(path).map_err(|source| PkiError::File {
        path: path.into(),
        source,
    })
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), PkiError> {
    let result = (|| {
        let temporary = path.with_extension("tmp");
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    })();
    result.map_err(|source| PkiError::File {
        path: path.into(),
        source,
    })
}

/// Builds a kubeconfig with embedded credentials.
#[must_use]
pub fn kubeconfig(server: &str, ca: &str, user: &str, pair: &Pair) -> String {
    use base64::Engine as _;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: holdfast\n  cluster:\n    server: {server}\n    certificate-authority-data: {}\nusers:\n- name: {user}\n  user:\n    client-certificate-data: {}\n    client-key-data: {}\ncontexts:\n- name: holdfast\n  context:\n    cluster: holdfast\n    user: {user}\ncurrent-context: holdfast\n",
        encode(ca),
        encode(&pair.certificate),
        encode(&pair.key)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::node::signing::parse_request;

    #[test]
    fn a_signed_certificate_equals_its_request() {
        let dir = tempfile::tempdir().expect("a directory");
        let pki = Pki::open(dir.path()).expect("a CA");
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec!["n".to_owned()]).expect("names");
        params
            .distinguished_name
            .push(DnType::OrganizationName, "system:nodes");
        params
            .distinguished_name
            .push(DnType::CommonName, "system:node:n");
        let request = params.serialize_request(&key).expect("a request");
        let csr = parse_request(request.der()).expect("plain");
        let pem = pki
            .sign_request(&csr, false, 600)
            .expect("signed and compared");
        let (_, block) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).expect("PEM");
        let differs = |change: &dyn Fn(&mut holdfast_core::node::signing::CsrRequest), client| {
            let mut other = csr.clone();
            change(&mut other);
            check_issued(&block.contents, &other, client).is_err()
        };
        assert!(!differs(&|_| {}, false));
        assert!(
            differs(&|_| {}, true),
            "a server's certificate is not a client's"
        );
        assert!(differs(&|a| a.name = "system:node:m".into(), false));
        assert!(differs(
            &|a| a.organization = "system:masters".into(),
            false
        ));
        assert!(differs(&|a| a.dns.clear(), false));
        assert!(differs(&|a| a.key = vec![], false));
        assert!(pki.sign_request(&csr, true, i64::MAX).is_ok());
    }
}
