//! How a machine joins a cluster: bootstrap tokens, and the verification of the cluster's authority (KEP-130,
//! `staging/src/k8s.io/cluster-bootstrap/token`, `cmd/kubeadm/app/discovery/token/token.go`). Pure.
//!
//! The machine knows a token and the hash of the authority's public key. Anyone can read `kube-public/cluster-info`; the machine
//! trusts its content only if a signature with the token's secret fits, and if the authority in it has the known key.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use aws_lc_rs::{constant_time, digest, hmac};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::{Value, json};

/// Namespace and name of the ConfigMap that describes the cluster to joining machines.
pub const CLUSTER_INFO: (&str, &str) = ("kube-public", "cluster-info");
/// The key of the ConfigMap with the kubeconfig that is signed.
pub const KUBECONFIG_KEY: &str = "kubeconfig";
/// The prefix of the keys with signatures; the token's id follows.
const SIGNATURE_PREFIX: &str = "jws-kubeconfig-";
/// The namespace of the Secrets with tokens.
pub const TOKEN_NAMESPACE: &str = "kube-system";
/// The prefix of the names of Secrets with tokens; the token's id follows.
pub const SECRET_PREFIX: &str = "bootstrap-token-";
/// The type of Secrets with tokens.
pub const SECRET_TYPE: &str = "bootstrap.kubernetes.io/token";
/// The group of machines that join with a token (kubeadm's `NodeBootstrapTokenAuthGroup`).
pub const NODE_GROUP: &str = "system:bootstrappers:kubeadm:default-node-token";
/// Key of a Secret: whether the token authenticates requests.
const AUTHENTICATES: &str = "usage-bootstrap-authentication";
/// Key of a Secret: whether the token signs `cluster-info`.
const SIGNS: &str = "usage-bootstrap-signing";

const ID_LENGTH: usize = 6;
const SECRET_LENGTH: usize = 16;
const CHARACTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// A bootstrap token.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The public part, six characters.
    pub id: String,
    /// The secret part, sixteen characters.
    secret: String,
}

/// Without the secret.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({})", self.id)
    }
}

impl Token {
    /// Parses `ID.SECRET`.
    ///
    /// # Errors
    ///
    /// The text has another form. The error has only the part before the first dot, because the rest may be a secret.
    pub fn parse(text: &str) -> Result<Token, JoinError> {
        let parts = text.split_once('.');
        let token = parts.and_then(|(id, secret)| Token::of(id, secret));
        token.ok_or_else(|| JoinError::Token(shown_id(text)))
    }

    /// A token of these parts, if both have the right characters and length.
    #[must_use]
    pub fn of(id: &str, secret: &str) -> Option<Token> {
        let fits = |text: &str, length| {
            text.len() == length && text.bytes().all(|b| CHARACTERS.contains(&b))
        };
        (fits(id, ID_LENGTH) && fits(secret, SECRET_LENGTH)).then(|| Token {
            id: id.to_owned(),
            secret: secret.to_owned(),
        })
    }

    /// A token of random bytes; `None` if there are too few. Bytes that would make some characters more likely are skipped.
    #[must_use]
    pub fn from_random(bytes: &[u8]) -> Option<Token> {
        // 252 is the largest multiple of 36 in a byte.
        let usable = bytes.iter().filter(|byte| **byte < 252);
        let characters = usable.filter_map(|byte| CHARACTERS.get(usize::from(byte % 36)));
        let text: String = characters.map(|c| char::from(*c)).collect();
        let (id, rest) = text.split_at_checked(ID_LENGTH)?;
        Token::of(id, rest.get(..SECRET_LENGTH)?)
    }

    /// The token as `ID.SECRET`.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{}.{}", self.id, self.secret)
    }

    /// The detached signature of a text: JWS compact serialization (RFC 7515) with HS256 and without the payload.
    #[must_use]
    pub fn sign(&self, content: &str) -> String {
        // The bytes of the header are part of the format: clients compare the whole signature (`jws.DetachedTokenIsValid`).
        let header = format!(r#"{{"alg":"HS256","kid":"{}"}}"#, self.id);
        let header = URL_SAFE_NO_PAD.encode(header);
        let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(content));
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.secret.as_bytes());
        let tag = URL_SAFE_NO_PAD.encode(hmac::sign(&key, signed.as_bytes()));
        format!("{header}..{tag}")
    }

    fn has_signed(&self, content: &str, signature: &str) -> bool {
        let expected = self.sign(content);
        constant_time::verify_slices_are_equal(expected.as_bytes(), signature.as_bytes()).is_ok()
    }
}

/// The part of a token that may be shown: at most [`ID_LENGTH`] characters before the first dot.
fn shown_id(text: &str) -> String {
    let id = text.split('.').next().unwrap_or_default();
    id.chars().take(ID_LENGTH).collect()
}

/// SHA-256 of the public key (SubjectPublicKeyInfo) of a certificate authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthorityHash([u8; 32]);

impl AuthorityHash {
    /// Parses `sha256:` and 64 hexadecimal digits.
    ///
    /// # Errors
    ///
    /// The text has another form.
    pub fn parse(text: &str) -> Result<AuthorityHash, JoinError> {
        let digits = text.strip_prefix("sha256:").unwrap_or_default();
        let mut bytes = [0; 32];
        let is_hex = digits.len() == 64 && digits.bytes().all(|b| b.is_ascii_hexdigit());
        for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).unwrap_or_default();
            *byte = u8::from_str_radix(pair, 16).unwrap_or_default();
        }
        is_hex
            .then_some(AuthorityHash(bytes))
            .ok_or_else(|| JoinError::Hash(text.chars().take(100).collect()))
    }

    /// The hashes of all certificates in a PEM text.
    #[must_use]
    pub fn of_certificates(pem: &[u8]) -> Vec<AuthorityHash> {
        let all = certificates(pem);
        let hashes = all.iter().filter_map(|der| {
            let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
            let hash = digest::digest(&digest::SHA256, certificate.public_key().raw);
            Some(AuthorityHash(hash.as_ref().try_into().ok()?))
        });
        hashes.collect()
    }
}

impl fmt::Display for AuthorityHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The certificates (DER) in a PEM text. Other blocks are omitted.
#[must_use]
pub fn certificates(pem: &[u8]) -> Vec<Vec<u8>> {
    let blocks = x509_parser::pem::Pem::iter_from_buffer(pem).flatten();
    let certificates = blocks.filter(|block| block.label == "CERTIFICATE");
    certificates.map(|block| block.contents).collect()
}

/// A PEM text as a kubeconfig's `certificate-authority-data`.
#[must_use]
pub fn encode_authority(pem: &str) -> String {
    STANDARD.encode(pem)
}

/// The PEM text in a kubeconfig's `certificate-authority-data`; `None` if it is not base64 of a text.
#[must_use]
pub fn decode_authority(data: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(data.trim()).ok()?).ok()
}

/// A name or address for a certificate: an IP address, or a DNS name whose first label may be a `*`.
///
/// # Errors
///
/// The text is neither.
pub fn parse_certified_name(text: &str) -> Result<String, JoinError> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(address.to_string());
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    let host = text.strip_prefix("*.").unwrap_or(text);
    // A name of digits only is a malformed address.
    let is_name = host.len() <= 253
        && host.split('.').all(is_label)
        && host.bytes().any(|b| b.is_ascii_lowercase());
    is_name
        .then(|| text.to_owned())
        .ok_or_else(|| JoinError::CertifiedName(text.chars().take(260).collect()))
}

/// Why a machine does not join.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The token has the wrong form.
    #[error(
        "invalid --token \"{0}…\": not six characters, a dot and sixteen characters of a-z and 0-9; create one with `holdfast token create`"
    )]
    Token(String),
    /// The hash has the wrong form.
    #[error(
        "invalid --discovery-token-ca-cert-hash {0:?}: not \"sha256:\" and 64 hexadecimal digits; copy it from `holdfast token create --print-join`"
    )]
    Hash(String),
    /// A name for the API's certificate is invalid.
    #[error(
        "invalid --tls-san {0:?}: neither an IP address nor a DNS name in lower case; use the name or address with which clients reach the API"
    )]
    CertifiedName(String),
    /// The cluster's description has no kubeconfig.
    #[error(
        "the ConfigMap kube-public/cluster-info has no key \"kubeconfig\"; restart the control plane, which writes it, or repair it with `kubeadm init phase bootstrap-token`"
    )]
    NoKubeconfig,
    /// The token has signed nothing: it is unknown or has expired.
    #[error(
        "the bootstrap token {0:?} is unknown to this cluster or has expired (kube-public/cluster-info has no signature of it); create one with `holdfast token create --print-join`"
    )]
    NotSigned(String),
    /// The signature does not fit.
    #[error(
        "the signature of the bootstrap token {0:?} in kube-public/cluster-info is wrong: the token has another secret, or a program in between has changed the answer; check --token and the server's address"
    )]
    WrongSignature(String),
    /// The authority has another key.
    #[error(
        "the cluster's certificate authority has the hash {found}, which is none of --discovery-token-ca-cert-hash {expected}; check the server's address, and copy the hash from `holdfast token create --print-join`"
    )]
    OtherAuthority {
        /// The hashes of the authorities in the cluster's description.
        found: String,
        /// The hashes that the caller expects.
        expected: String,
    },
}

/// The kubeconfig in `cluster-info`, after the token's signature was verified.
///
/// # Errors
///
/// The kubeconfig or the signature is missing, or the signature is wrong.
pub fn verified_kubeconfig<'a>(info: &'a ConfigMap, token: &Token) -> Result<&'a str, JoinError> {
    let data = |key: &str| info.data.as_ref().and_then(|data| data.get(key));
    let kubeconfig = data(KUBECONFIG_KEY).filter(|text| !text.is_empty());
    let kubeconfig = kubeconfig.ok_or(JoinError::NoKubeconfig)?;
    let signature = data(&format!("{SIGNATURE_PREFIX}{}", token.id));
    let signature = signature.ok_or_else(|| JoinError::NotSigned(token.id.clone()))?;
    match token.has_signed(kubeconfig, signature) {
        true => Ok(kubeconfig),
        false => Err(JoinError::WrongSignature(token.id.clone())),
    }
}

/// Checks that one of the certificates in a PEM text has an expected key (`pubkeypin.Set.CheckAny`).
///
/// # Errors
///
/// None has.
pub fn check_authority(pem: &[u8], expected: &[AuthorityHash]) -> Result<(), JoinError> {
    let found = AuthorityHash::of_certificates(pem);
    if found.iter().any(|hash| expected.contains(hash)) {
        return Ok(());
    }
    let text = |all: &[AuthorityHash]| match all {
        [] => "(none)".to_owned(),
        all => all
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", "),
    };
    Err(JoinError::OtherAuthority {
        found: text(&found),
        expected: text(expected),
    })
}

/// A bootstrap token as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredToken {
    /// The token.
    pub token: Token,
    /// When it expires; `None` if it does not.
    pub expires: Option<Timestamp>,
    /// For people.
    pub description: String,
    /// Whether it authenticates requests.
    pub authenticates: bool,
    /// Whether it signs `cluster-info`.
    pub signs: bool,
    /// The groups of its user, separated by commas.
    pub groups: String,
}

impl StoredToken {
    /// A token for machines that join, as `kubeadm token create` makes it.
    #[must_use]
    pub fn for_nodes(token: Token, expires: Option<Timestamp>, description: &str) -> StoredToken {
        StoredToken {
            token,
            expires,
            description: description.to_owned(),
            authenticates: true,
            signs: true,
            groups: NODE_GROUP.to_owned(),
        }
    }

    /// Reads a Secret. `None` if it is not a complete token: the type, the name, the id and the secret must fit, and an
    /// expiration must be a time (`cluster-bootstrap/util/secrets`).
    #[must_use]
    pub fn read(secret: &Secret) -> Option<StoredToken> {
        let data = secret.data.as_ref()?;
        let text = |key: &str| std::str::from_utf8(&data.get(key)?.0).ok();
        let token = Token::of(text("token-id")?, text("token-secret")?)?;
        let is_named =
            secret.metadata.name.as_deref()?.strip_prefix(SECRET_PREFIX) == Some(&*token.id);
        if secret.type_.as_deref() != Some(SECRET_TYPE) || !is_named {
            return None;
        }
        let expires = match text("expiration").filter(|at| !at.is_empty()) {
            Some(at) => Some(at.parse().ok()?),
            None => None,
        };
        Some(StoredToken {
            expires,
            description: text("description").unwrap_or_default().to_owned(),
            authenticates: text(AUTHENTICATES) == Some("true"),
            signs: text(SIGNS) == Some("true"),
            groups: text("auth-extra-groups").unwrap_or_default().to_owned(),
            token,
        })
    }

    /// The Secret with this token.
    #[must_use]
    pub fn secret(&self) -> Value {
        let mut data = json!({
            "token-id": STANDARD.encode(&self.token.id),
            "token-secret": STANDARD.encode(&self.token.secret),
        });
        let mut put = |key: &str, value: &str| {
            if !value.is_empty() {
                data[key] = STANDARD.encode(value).into();
            }
        };
        put("description", &self.description);
        put("auth-extra-groups", &self.groups);
        for (key, is_set) in [(AUTHENTICATES, self.authenticates), (SIGNS, self.signs)] {
            put(key, if is_set { "true" } else { "" });
        }
        if let Some(at) = self.expires {
            let whole = Timestamp::from_second(at.as_second()).unwrap_or(at);
            put("expiration", &whole.to_string());
        }
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": SECRET_TYPE, "data": data,
            "metadata": {"name": format!("{SECRET_PREFIX}{}", self.token.id), "namespace": TOKEN_NAMESPACE},
        })
    }

    /// Whether the token has expired.
    #[must_use]
    pub fn has_expired(&self, now: Timestamp) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }
}

/// The changes that bring the signatures of `cluster-info` up to date: the value of each key, or `None` to remove it. Signatures
/// of tokens that were deleted or have expired are removed (`pkg/controller/bootstrap/bootstrapsigner.go`).
#[must_use]
pub fn signature_changes(
    info: &ConfigMap,
    tokens: &[StoredToken],
    now: Timestamp,
) -> BTreeMap<String, Option<String>> {
    let empty = BTreeMap::new();
    let data = info.data.as_ref().unwrap_or(&empty);
    let Some(content) = data.get(KUBECONFIG_KEY) else {
        return BTreeMap::new();
    };
    let signing = tokens.iter().filter(|t| t.signs && !t.has_expired(now));
    let desired: BTreeMap<String, String> = signing
        .map(|t| {
            let key = format!("{SIGNATURE_PREFIX}{}", t.token.id);
            (key, t.token.sign(content))
        })
        .collect();
    let stale = data
        .keys()
        .filter(|key| key.starts_with(SIGNATURE_PREFIX) && !desired.contains_key(*key));
    let mut changes: BTreeMap<_, _> = stale.map(|key| (key.clone(), None)).collect();
    for (key, value) in desired {
        if data.get(&key) != Some(&value) {
            changes.insert(key, Some(value));
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn token(id: &str) -> Token {
        Token::of(id, SECRET).expect("a token")
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn info(data: Value) -> ConfigMap {
        serde_json::from_value(json!({"metadata": {"name": "cluster-info"}, "data": data}))
            .expect("a ConfigMap")
    }

    #[test]
    fn tokens_have_one_form_and_errors_do_not_show_secrets() {
        for text in ["abcdef.0123456789abcdef", "000000.zzzzzzzzzzzzzzzz"] {
            assert_eq!(Token::parse(text).expect("a token").text(), text);
        }
        for text in [
            "",
            ".",
            "abcdef",
            "abcdef.",
            "abcdef.0123456789abcde",
            "abcdef.0123456789abcdef0",
            "Abcdef.0123456789abcdef",
            "abcde.0123456789abcdef",
            "abcdef.0123456789abcde\u{e9}",
            "abcdef.0123456789.bcdef",
            "0123456789abcdef.abcdef",
        ] {
            let error = Token::parse(text).expect_err(text).to_string();
            assert!(!error.contains("0123456789"), "{error}");
        }
        assert_eq!(format!("{:?}", token("abcdef")), "Token(abcdef)");
    }

    #[test]
    fn every_character_is_equally_likely() {
        let all: Vec<u8> = (0..=u8::MAX).collect();
        let mut counts = [0; 36];
        for window in all.windows(22) {
            if let Some(token) = Token::from_random(window) {
                for c in token.text().bytes().filter(|c| *c != b'.') {
                    counts[CHARACTERS.iter().position(|k| *k == c).expect("known")] += 1;
                }
            }
        }
        assert_eq!(Token::from_random(&[255; 100]), None);
        assert_eq!(Token::from_random(&[0; 21]), None);
        assert_eq!(
            Token::from_random(&[0; 22]).map(|t| t.text()).as_deref(),
            Some("000000.0000000000000000")
        );
        // Bytes from 0 to 251 in turn: each character seven times per position, apart from the ends.
        let (least, most) = (counts.iter().min(), counts.iter().max());
        assert!(
            most.zip(least)
                .is_some_and(|(most, least)| most - least <= 22),
            "{counts:?}"
        );
    }

    /// The test vector of `staging/src/k8s.io/cluster-bootstrap/token/jws/jws_test.go`.
    #[test]
    fn signatures_are_those_of_upstream() {
        let token = Token {
            id: "joshua".into(),
            secret: "my voice is my passcode".into(),
        };
        assert_eq!(
            token.sign("Hello from the other side. I must have called a thousand times."),
            "eyJhbGciOiJIUzI1NiIsImtpZCI6Impvc2h1YSJ9..VShe2taLd-YTrmWuRkcL_8QTNDHYxQIEBsAYYiIj1_8"
        );
    }

    #[test]
    fn hashes_are_parsed_and_shown() {
        let digits = "0f".repeat(32);
        let text = format!("sha256:{digits}");
        assert_eq!(
            AuthorityHash::parse(&text).expect("a hash").to_string(),
            text
        );
        let upper = format!("sha256:{}", "0F".repeat(32));
        assert_eq!(AuthorityHash::parse(&upper), AuthorityHash::parse(&text));
        for bad in [
            String::new(),
            digits.clone(),
            format!("sha1:{digits}"),
            format!("{text}0"),
            format!("sha256:{}", "+f".repeat(32)),
            format!("sha256:{}", "é".repeat(32)),
        ] {
            assert!(AuthorityHash::parse(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn certified_names_are_addresses_or_dns_names() {
        let long = format!("{}.example", "a".repeat(63));
        for (text, expected) in [
            ("192.0.2.1", Some("192.0.2.1")),
            ("2001:DB8::0:1", Some("2001:db8::1")),
            ("api", Some("api")),
            ("api.example", Some("api.example")),
            ("*.example", Some("*.example")),
            ("9.example", Some("9.example")),
            (&long, Some(&long)),
            ("", None),
            ("192.0.2.256", None),
            ("192.0.2.1:6443", None),
            ("https://api.example", None),
            ("API.example", None),
            ("api..example", None),
            ("api.example.", None),
            ("-api", None),
            ("a*.example", None),
            ("*", None),
            ("a\0b", None),
            (&"a".repeat(64), None),
            (&"a.".repeat(127), None),
        ] {
            assert_eq!(
                parse_certified_name(text).ok().as_deref(),
                expected,
                "{text}"
            );
        }
    }

    #[test]
    fn only_the_expected_authority_is_accepted() {
        let certificate = || {
            let key = rcgen::KeyPair::generate().expect("a key");
            let params = rcgen::CertificateParams::default();
            params.self_signed(&key).expect("a certificate").pem()
        };
        let (one, other) = (certificate(), certificate());
        let hashes = AuthorityHash::of_certificates(one.as_bytes());
        assert_eq!(hashes.len(), 1);
        assert_eq!(check_authority(one.as_bytes(), &hashes), Ok(()));
        // Any certificate of a bundle may fit.
        let bundle = format!("{other}{one}");
        assert_eq!(check_authority(bundle.as_bytes(), &hashes), Ok(()));
        for pem in [other.as_str(), "", "no PEM"] {
            let error = check_authority(pem.as_bytes(), &hashes).expect_err("another key");
            assert!(
                error.to_string().contains(&hashes[0].to_string()),
                "{error}"
            );
        }
        assert!(check_authority(one.as_bytes(), &[]).is_err());
    }

    #[test]
    fn a_description_is_trusted_only_with_the_tokens_signature() {
        let (ours, content) = (token("abcdef"), "clusters: []");
        let signed = ours.sign(content);
        let other = token("uvwxyz").sign(content);
        for (data, expected) in [
            (
                json!({"kubeconfig": content, "jws-kubeconfig-abcdef": signed}),
                Ok(content),
            ),
            (
                json!({"jws-kubeconfig-abcdef": signed}),
                Err(JoinError::NoKubeconfig),
            ),
            (
                json!({"kubeconfig": "", "jws-kubeconfig-abcdef": signed}),
                Err(JoinError::NoKubeconfig),
            ),
            (json!({}), Err(JoinError::NoKubeconfig)),
            (
                json!({"kubeconfig": content, "jws-kubeconfig-uvwxyz": other}),
                Err(JoinError::NotSigned("abcdef".into())),
            ),
            (
                json!({"kubeconfig": content, "jws-kubeconfig-abcdef": other}),
                Err(JoinError::WrongSignature("abcdef".into())),
            ),
            (
                json!({"kubeconfig": content, "jws-kubeconfig-abcdef": ""}),
                Err(JoinError::WrongSignature("abcdef".into())),
            ),
            (
                json!({"kubeconfig": format!("{content} "), "jws-kubeconfig-abcdef": signed}),
                Err(JoinError::WrongSignature("abcdef".into())),
            ),
        ] {
            assert_eq!(
                verified_kubeconfig(&info(data.clone()), &ours),
                expected,
                "{data}"
            );
        }
    }

    #[test]
    fn signatures_follow_the_tokens() {
        let content = "clusters: []";
        let stored = |id: &str, expires: Option<i64>, signs: bool| StoredToken {
            signs,
            ..StoredToken::for_nodes(token(id), expires.map(at), "")
        };
        let tokens = [
            stored("aaaaaa", None, true),
            stored("bbbbbb", Some(100), true),
            stored("cccccc", None, false),
        ];
        let (a, b) = (tokens[0].token.sign(content), tokens[1].token.sign(content));
        let (key_a, key_b) = ("jws-kubeconfig-aaaaaa", "jws-kubeconfig-bbbbbb");
        let both = json!({"kubeconfig": content, key_a: a, key_b: b});
        for (data, now, expected) in [
            (
                json!({"kubeconfig": content}),
                99,
                json!({key_a: a, key_b: b}),
            ),
            (both.clone(), 99, json!({})),
            (both.clone(), 100, json!({key_b: null})),
            (
                json!({"kubeconfig": "other", key_a: a, "jws-kubeconfig-dddddd": "x", "own": "kept"}),
                100,
                json!({key_a: tokens[0].token.sign("other"), "jws-kubeconfig-dddddd": null}),
            ),
            (
                json!({"kubeconfig": content, key_a: a, "jws-kubeconfig-cccccc": "x"}),
                100,
                json!({"jws-kubeconfig-cccccc": null}),
            ),
            // Nothing to sign.
            (json!({"jws-kubeconfig-dddddd": "x"}), 0, json!({})),
        ] {
            let changes = signature_changes(&info(data.clone()), &tokens, at(now));
            assert_eq!(json!(changes), expected, "{data} at {now}");
        }
    }

    #[test]
    fn only_complete_secrets_are_tokens() {
        let fine = StoredToken::for_nodes(token("abcdef"), Some(at(1000)), "for a test").secret();
        let read = |secret: &Value| {
            StoredToken::read(&serde_json::from_value(secret.clone()).expect("a Secret"))
        };
        let known = read(&fine).expect("a token");
        assert!(known.authenticates && known.signs && known.groups == NODE_GROUP);
        assert!(!known.has_expired(at(999)) && known.has_expired(at(1000)));
        for change in [
            json!({"type": "Opaque"}),
            json!({"metadata": {"name": "bootstrap-token-uvwxyz"}}),
            json!({"metadata": {"name": "abcdef"}}),
            json!({"data": {"token-secret": null}}),
            json!({"data": {"token-secret": STANDARD.encode("short")}}),
            json!({"data": {"token-id": STANDARD.encode([0xff; 6])}}),
            json!({"data": {"expiration": STANDARD.encode("tomorrow")}}),
            json!({"data": null}),
        ] {
            let mut changed = fine.clone();
            json_patch::merge(&mut changed, &change);
            assert_eq!(read(&changed), None, "{change}");
        }
    }

    proptest! {
        /// A token that is written to a Secret is read back.
        #[test]
        fn secrets_are_read_back(
            random in proptest::collection::vec(0..252_u8, 22),
            second in proptest::option::of(0..4_000_000_000_i64),
            description in "[a-zA-Z0-9 ]{0,40}",
            authenticates: bool,
            signs: bool,
        ) {
            let token = Token::from_random(&random).expect("a token");
            let stored = StoredToken {
                authenticates,
                signs,
                ..StoredToken::for_nodes(token, second.map(at), &description)
            };
            let secret = serde_json::from_value(stored.secret()).expect("a Secret");
            prop_assert_eq!(StoredToken::read(&secret), Some(stored));
        }

        /// No text is a reason to panic.
        #[test]
        fn any_text_is_parsed(text in ".*", bytes: Vec<u8>) {
            let _ = Token::parse(&text);
            let _ = AuthorityHash::parse(&text);
            let _ = Token::from_random(&bytes);
            let _ = check_authority(&bytes, &[]);
        }
    }
}
