//! Service-account tokens: ES256 JWTs as TokenRequest gives them out (control-plane spec, 5.4).

use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde_json::{Value, json};

/// The issuer and audience of all tokens.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// Signs and verifies tokens with one key.
pub struct Tokens {
    sign: EncodingKey,
    verify: DecodingKey,
    key_id: String,
}

/// What a token is made for.
pub struct Subject<'a> {
    /// The namespace.
    pub namespace: &'a str,
    /// The service account's name.
    pub account: &'a str,
    /// The service account's uid.
    pub uid: &'a str,
    /// The pod it is bound to: name and uid.
    pub pod: Option<(&'a str, &'a str)>,
    /// The audiences.
    pub audiences: Vec<String>,
    /// The lifetime in seconds.
    pub seconds: i64,
}

impl Tokens {
    /// From a PKCS#8 private key and its public key, both PEM.
    pub fn new(private_pem: &str, public_pem: &str) -> Result<Tokens, jsonwebtoken::errors::Error> {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, public_pem.as_bytes());
        use base64::Engine as _;
        Ok(Tokens {
            sign: EncodingKey::from_ec_pem(private_pem.as_bytes())?,
            verify: DecodingKey::from_ec_pem(public_pem.as_bytes())?,
            key_id: base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(digest),
        })
    }

    /// Signs a token; also returns when it expires, in seconds since 1970.
    pub fn issue(
        &self,
        subject: &Subject<'_>,
        now: i64,
    ) -> Result<(String, i64), jsonwebtoken::errors::Error> {
        let mut about = json!({
            "namespace": subject.namespace,
            "serviceaccount": {"name": subject.account, "uid": subject.uid},
        });
        if let Some((name, uid)) = subject.pod {
            about["pod"] = json!({"name": name, "uid": uid});
        }
        let expires = now.saturating_add(subject.seconds);
        let claims = json!({
            "aud": subject.audiences, "exp": expires, "iat": now, "nbf": now, "iss": ISSUER,
            "jti": super::object::new_uid(), "kubernetes.io": about,
            "sub": format!("system:serviceaccount:{}:{}", subject.namespace, subject.account),
        });
        let mut header = Header::new(Algorithm::ES256);
        header.typ = None;
        header.kid = Some(self.key_id.clone());
        Ok((jsonwebtoken::encode(&header, &claims, &self.sign)?, expires))
    }

    /// The claims of a token that is signed by us, in time and meant for one of `audiences`.
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
