//! Service-account tokens: ES256 JWTs of TokenRequest and of Secrets.

use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde_json::{Value, json};

/// The issuer and audience of TokenRequest tokens.
pub(crate) const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// The issuer of tokens that are stored in Secrets.
const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";
/// The claims of tokens in Secrets: namespace, Secret, and the account's name and uid.
pub(crate) const LEGACY_CLAIMS: [&str; 4] = [
    "kubernetes.io/serviceaccount/namespace",
    "kubernetes.io/serviceaccount/secret.name",
    "kubernetes.io/serviceaccount/service-account.name",
    "kubernetes.io/serviceaccount/service-account.uid",
];

/// Signs and verifies tokens with one key pair.
pub struct Tokens {
    sign: EncodingKey,
    verify: DecodingKey,
    key_id: String,
}

/// The service account of a token.
pub struct Subject<'a> {
    /// The namespace.
    pub namespace: &'a str,
    /// The service account's name.
    pub account: &'a str,
    /// The service account's uid.
    pub uid: &'a str,
}

impl Subject<'_> {
    fn name(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.account)
    }
}

/// An object's name and uid.
pub(crate) type NameAndUid = (String, String);

/// The object whose deletion invalidates a token, in addition to its account.
pub enum Bound {
    /// No object.
    Nothing,
    /// A pod; its node is added as an informational claim.
    Pod(NameAndUid, Option<NameAndUid>),
    /// A Secret.
    Secret(NameAndUid),
    /// A node.
    Node(NameAndUid),
}

impl Tokens {
    /// Creates the signer from a PKCS#8 private key and its public key, both PEM.
    pub fn new(private_pem: &str, public_pem: &str) -> Result<Tokens, jsonwebtoken::errors::Error> {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, public_pem.as_bytes());
        use base64::Engine as _;
        Ok(Tokens {
            sign: EncodingKey::from_ec_pem(private_pem.as_bytes())?,
            verify: DecodingKey::from_ec_pem(public_pem.as_bytes())?,
            key_id: base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(digest),
        })
    }

    /// Signs a token that is valid for `seconds`. Also returns its expiry in seconds since 1970.
    pub fn issue(
        &self,
        subject: &Subject<'_>,
        bound: &Bound,
        audiences: &[String],
        seconds: i64,
        now: i64,
    ) -> Result<(String, i64), jsonwebtoken::errors::Error> {
        let reference = |(name, uid): &NameAndUid| {
            let mut object = json!({"name": name});
            if !uid.is_empty() {
                object["uid"] = uid.as_str().into();
            }
            object
        };
        let mut private_claims = json!({
            "namespace": subject.namespace,
            "serviceaccount": {"name": subject.account, "uid": subject.uid},
        });
        match bound {
            Bound::Nothing => {}
            Bound::Pod(pod, node) => {
                private_claims["pod"] = reference(pod);
                if let Some(node) = node {
                    private_claims["node"] = reference(node);
                }
            }
            Bound::Secret(secret) => private_claims["secret"] = reference(secret),
            Bound::Node(node) => private_claims["node"] = reference(node),
        }
        let expires = now.saturating_add(seconds);
        let claims = json!({
            "aud": audiences, "exp": expires, "iat": now, "nbf": now, "iss": ISSUER,
            "jti": super::object::new_uid(), "kubernetes.io": private_claims, "sub": subject.name(),
        });
        Ok((self.sign(&claims)?, expires))
    }

    /// Signs the token of a Secret of type `kubernetes.io/service-account-token`. The token does not expire and is
    /// valid while the Secret contains it (`pkg/serviceaccount/legacy.go`).
    pub(crate) fn issue_legacy(
        &self,
        subject: &Subject<'_>,
        secret: &str,
    ) -> Result<String, jsonwebtoken::errors::Error> {
        self.sign(&json!({
            "iss": LEGACY_ISSUER, "sub": subject.name(),
            LEGACY_CLAIMS[0]: subject.namespace, LEGACY_CLAIMS[1]: secret,
            LEGACY_CLAIMS[2]: subject.account, LEGACY_CLAIMS[3]: subject.uid,
        }))
    }

    fn sign(&self, claims: &Value) -> Result<String, jsonwebtoken::errors::Error> {
        let mut header = Header::new(Algorithm::ES256);
        header.typ = None;
        header.kid = Some(self.key_id.clone());
        jsonwebtoken::encode(&header, claims, &self.sign)
    }

    /// Verifies the signature of a Secret's token and returns its claims. The caller
    /// checks that the Secret still contains the token.
    #[must_use]
    pub(crate) fn verify_legacy(&self, token: &str) -> Option<Value> {
        let mut validation = Validation::new(Algorithm::ES256);
        validation.set_issuer(&[LEGACY_ISSUER]);
        validation.set_required_spec_claims(&["iss", "sub"]);
        validation.validate_exp = false;
        validation.validate_aud = false;
        jsonwebtoken::decode::<Value>(token, &self.verify, &validation)
            .ok()
            .map(|data| data.claims)
    }

    /// Verifies a token's signature, validity period and audience, and returns its claims.
    #[must_use]
    pub fn verify(&self, token: &str, audiences: &[&str]) -> Option<Value> {
        let mut validation = Validation::new(Algorithm::ES256);
        validation.set_issuer(&[ISSUER]);
        validation.set_audience(audiences);
        validation.validate_nbf = true;
        jsonwebtoken::decode::<Value>(token, &self.verify, &validation)
            .ok()
            .map(|data| data.claims)
    }
}
