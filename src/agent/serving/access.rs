//! Authentication and authorization of requests (`pkg/kubelet/server/auth.go`). Requests are denied by default.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, Response, StatusCode};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use holdfast_config::Serving;
use holdfast_core::digest;
use holdfast_core::lock::lock;
use holdfast_core::node::signing::subject;
use holdfast_core::serving::RequiredPermission;
use holdfast_https::{Body, Peer, text};
use holdfast_kubeapi::reviews::{Identity, NodeAccess, Reviews};

/// Limit for entries of each cache.
const MAX_CACHE_ENTRIES: usize = 1024;
/// How long an invalid token is cached.
const INVALID_TOKEN_TTL: Duration = Duration::from_secs(10);
/// Limit for parallel token reviews. Access reviews do not count, so that invalid tokens cannot delay
/// clients with a certificate or a cached token.
const MAX_PARALLEL_REVIEWS: usize = 8;
/// Limit for tokens that wait for a review; further requests are rejected with 429.
const MAX_WAITING_REVIEWS: usize = 64;
/// How many waiting or reviewed tokens one address may have, so that a flood from one address does not block others.
const MAX_REVIEWS_PER_ADDRESS: usize = 16;

/// A cache whose entries expire.
struct ExpiringCache<K, V>(Mutex<HashMap<K, (Instant, V)>>);

impl<K: Hash + Eq, V: Clone> ExpiringCache<K, V> {
    fn new() -> ExpiringCache<K, V> {
        ExpiringCache(Mutex::default())
    }

    fn get(&self, key: &K) -> Option<V> {
        let known = lock(&self.0);
        known
            .get(key)
            .filter(|(until, _)| *until > Instant::now())
            .map(|(_, value)| value.clone())
    }

    fn put(&self, key: K, value: V, ttl: Duration) {
        let mut known = lock(&self.0);
        if known.len() >= MAX_CACHE_ENTRIES {
            known.retain(|_, (until, _)| *until > Instant::now());
        }
        if known.len() >= MAX_CACHE_ENTRIES {
            known.clear();
        }
        known.insert(key, (Instant::now() + ttl, value));
    }
}

/// Authenticates and authorizes requests.
pub struct Access {
    serving: Serving,
    node: String,
    reviews: Option<Arc<dyn Reviews>>,
    /// Identities by the digest of their token; tokens themselves are not stored.
    tokens: ExpiringCache<String, Identity>,
    /// Invalid tokens. A separate cache, so that a flood of them does not evict valid ones.
    invalid_tokens: ExpiringCache<String, ()>,
    decisions: ExpiringCache<(Identity, &'static str, &'static str), bool>,
    /// A permit is held during a token review.
    reviewing: Semaphore,
    /// A permit is held while a token waits for its review and during the review.
    waiting: Semaphore,
    /// The number of these permits by address.
    taken: Mutex<HashMap<IpAddr, usize>>,
}

/// A permit counted for an address.
struct AddressPermit<'a>(&'a Mutex<HashMap<IpAddr, usize>>, IpAddr);

impl<'a> AddressPermit<'a> {
    /// Counts a permit; `None` if the address has reached its limit.
    fn acquire(
        places: &'a Mutex<HashMap<IpAddr, usize>>,
        address: IpAddr,
    ) -> Option<AddressPermit<'a>> {
        let mut all = lock(places);
        let count = all.entry(address).or_default();
        (*count < MAX_REVIEWS_PER_ADDRESS).then(|| {
            *count += 1;
            AddressPermit(places, address)
        })
    }
}

impl Drop for AddressPermit<'_> {
    fn drop(&mut self) {
        let mut all = lock(self.0);
        if let Some(count) = all.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.1);
            }
        }
    }
}

/// The identity of a trusted client certificate (DER).
fn certificate_identity(der: &[u8]) -> Option<Identity> {
    let (name, mut groups) = subject(der)?;
    groups.push("system:authenticated".to_owned());
    Some(Identity {
        name,
        groups,
        ..Identity::default()
    })
}

/// The request's bearer token. Other kinds of credentials are ignored.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?.trim();
    let mut parts = value.splitn(3, ' ');
    let (scheme, token) = (parts.next()?, parts.next()?);
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn unauthorized() -> Response<Body> {
    text(StatusCode::UNAUTHORIZED, "Unauthorized")
}

impl Access {
    /// Creates the checks of a node. Without `reviews`, tokens are rejected, and access is
    /// denied if the configuration requires reviews.
    #[must_use]
    pub fn new(serving: Serving, node: &str, reviews: Option<Arc<dyn Reviews>>) -> Access {
        Access {
            serving,
            node: node.into(),
            reviews,
            tokens: ExpiringCache::new(),
            invalid_tokens: ExpiringCache::new(),
            decisions: ExpiringCache::new(),
            reviewing: Semaphore::new(MAX_PARALLEL_REVIEWS),
            waiting: Semaphore::new(MAX_PARALLEL_REVIEWS + MAX_WAITING_REVIEWS),
            taken: Mutex::default(),
        }
    }

    /// Authenticates a request. Returns the error response if this fails.
    async fn authenticate(
        &self,
        peer: &Peer,
        headers: &HeaderMap,
    ) -> Result<Identity, Response<Body>> {
        let shown = peer.certificate.as_deref();
        if let Some(identity) = shown
            .and_then(|c| c.trusted_der())
            .and_then(certificate_identity)
        {
            return Ok(identity);
        }
        // A request with an invalid token is rejected, not treated as anonymous.
        if let (true, Some(token)) = (self.serving.tokens, bearer(headers)) {
            return self.authenticate_token(peer, token).await;
        }
        // The same applies to an untrusted certificate if client certificates are configured.
        if self.serving.anonymous && shown.is_none() {
            return Ok(Identity {
                name: "system:anonymous".into(),
                groups: vec!["system:unauthenticated".into()],
                ..Identity::default()
            });
        }
        Err(unauthorized())
    }

    async fn authenticate_token(
        &self,
        peer: &Peer,
        token: &str,
    ) -> Result<Identity, Response<Body>> {
        let key = digest::sha256(token.as_bytes());
        let known = || match self.tokens.get(&key) {
            Some(identity) => Some(Some(identity)),
            None => self.invalid_tokens.get(&key).map(|()| None),
        };
        if let Some(known) = known() {
            return known.ok_or_else(unauthorized);
        }
        let Some(reviews) = &self.reviews else {
            return Err(unauthorized());
        };
        let busy = || {
            text(
                StatusCode::TOO_MANY_REQUESTS,
                "too many token reviews are in progress: try again later",
            )
        };
        let _address_permit =
            AddressPermit::acquire(&self.taken, peer.address.ip()).ok_or_else(busy)?;
        let _waiting = self.waiting.try_acquire().map_err(|_| busy())?;
        let _reviewing = self.reviewing.acquire().await.map_err(|_| busy())?;
        // Another request may have had the same token reviewed meanwhile.
        if let Some(known) = known() {
            return known.ok_or_else(unauthorized);
        }
        match reviews.authenticate(token).await {
            Ok(Some(found)) => {
                self.tokens.put(key, found.clone(), self.serving.token_ttl);
                Ok(found)
            }
            Ok(None) => {
                self.invalid_tokens.put(key, (), INVALID_TOKEN_TTL);
                Err(unauthorized())
            }
            Err(error) => {
                tracing::warn!(%error, "reviewing a token failed");
                Err(unauthorized())
            }
        }
    }

    async fn authorize(&self, who: &Identity, needs: &RequiredPermission) -> Result<bool, String> {
        if !self.serving.reviews {
            return Ok(true);
        }
        let Some(reviews) = &self.reviews else {
            return Ok(false);
        };
        for subresource in needs.subresources {
            let key = (who.clone(), needs.verb, *subresource);
            let allowed = match self.decisions.get(&key) {
                Some(known) => known,
                None => {
                    let ask = NodeAccess {
                        verb: needs.verb,
                        node: &self.node,
                        subresource,
                    };
                    let allowed = reviews
                        .authorize(who, &ask)
                        .await
                        .map_err(|e| e.to_string())?;
                    let (yes, no) = self.serving.review_ttl;
                    self.decisions
                        .put(key, allowed, if allowed { yes } else { no });
                    allowed
                }
            };
            if allowed {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Authenticates and authorizes a request. Returns the error response if the request is denied.
    pub async fn check(
        &self,
        peer: &Peer,
        headers: &HeaderMap,
        needs: &RequiredPermission,
    ) -> Result<(), Response<Body>> {
        let who = self.authenticate(peer, headers).await?;
        match self.authorize(&who, needs).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                let (verb, subresources) = (needs.verb, needs.subresources.join(" "));
                let why = format!(
                    "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{subresources}])",
                    who.name
                );
                Err(text(StatusCode::FORBIDDEN, why))
            }
            Err(error) => {
                tracing::warn!(error, user = who.name, "authorizing a request failed");
                Err(text(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "Authorization error: the apiserver did not answer",
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::serving::required_permission;
    use holdfast_https::Certificate;
    use holdfast_kubeapi::pods::ApiFailure;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Reviews that accept one token and let its owner read metrics.
    #[derive(Default)]
    struct Fixed {
        requests: AtomicUsize,
    }

    #[async_trait::async_trait]
    impl Reviews for Fixed {
        async fn authenticate(&self, token: &str) -> Result<Option<Identity>, ApiFailure> {
            self.requests.fetch_add(1, Ordering::Relaxed);
            match token {
                "good" => Ok(Some(Identity {
                    name: "reader".into(),
                    ..Identity::default()
                })),
                "down" => Err(ApiFailure::Other("gone".into())),
                slow if slow.starts_with("slow") => std::future::pending().await,
                _ => Ok(None),
            }
        }

        async fn authorize(
            &self,
            who: &Identity,
            ask: &NodeAccess<'_>,
        ) -> Result<bool, ApiFailure> {
            self.requests.fetch_add(1, Ordering::Relaxed);
            let all = who.groups.iter().any(|g| g == "masters");
            Ok(all || (who.name == "reader" && ask.subresource == "metrics" && ask.verb == "get"))
        }
    }

    fn serving(text: &str) -> Serving {
        let path = tempfile::NamedTempFile::new().expect("a file");
        let text = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{text}"
        );
        std::fs::write(path.path(), text).expect("written");
        holdfast_config::load(
            Some(path.path()),
            &holdfast_config::Overrides::default(),
            "n",
        )
        .expect("a configuration")
        .serving
    }

    fn peer(certificate: Option<(&str, &str)>) -> Peer {
        let certificate = certificate.map(|(name, group)| {
            let mut params = rcgen::CertificateParams::default();
            params
                .distinguished_name
                .push(rcgen::DnType::CommonName, name);
            params
                .distinguished_name
                .push(rcgen::DnType::OrganizationName, group);
            let key = rcgen::KeyPair::generate().expect("a key");
            let signed = params.self_signed(&key).expect("a certificate");
            Arc::new(Certificate::trusted(signed.der().to_vec()))
        });
        Peer {
            address: ([127, 0, 0, 1], 1).into(),
            certificate,
        }
    }

    async fn code(
        access: &Access,
        peer: &Peer,
        token: Option<&str>,
        method: &str,
        path: &str,
    ) -> u16 {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            headers.insert(
                AUTHORIZATION,
                format!("Bearer {token}").parse().expect("a header"),
            );
        }
        access
            .check(peer, &headers, &required_permission(method, path))
            .await
            .map_or_else(|r| r.status().as_u16(), |()| 200)
    }

    #[tokio::test]
    async fn every_identity_has_only_its_own_permissions() {
        let access = Access::new(serving(""), "n", Some(Arc::new(Fixed::default())));
        let (nobody, admin, user) = (
            peer(None),
            peer(Some(("admin", "masters"))),
            peer(Some(("user", "users"))),
        );
        for (who, token, method, path, expected) in [
            (&nobody, None, "GET", "/healthz", 401),
            (&nobody, Some("good"), "GET", "/metrics", 200),
            (&nobody, Some("good"), "POST", "/metrics", 403),
            (&nobody, Some("good"), "GET", "/pods", 403),
            (&nobody, Some("good"), "GET", "/exec/n/p/c", 403),
            (&nobody, Some("bad"), "GET", "/metrics", 401),
            (&nobody, Some("down"), "GET", "/metrics", 401),
            (&admin, None, "GET", "/pods", 200),
            (&admin, None, "GET", "/exec/n/p/c", 200),
            (&admin, None, "GET", "/nobody/thought/of/it", 200),
            (&user, None, "GET", "/pods", 403),
            (&user, None, "GET", "/nobody/thought/of/it", 403),
        ] {
            assert_eq!(
                code(&access, who, token, method, path).await,
                expected,
                "{token:?} {method} {path}"
            );
        }
    }

    #[tokio::test]
    async fn an_untrusted_certificate_is_rejected_unless_a_valid_token_is_sent() {
        let untrusted = Peer {
            certificate: Some(Arc::new(Certificate::untrusted(vec![]))),
            ..peer(None)
        };
        let open =
            "authentication: {anonymous: {enabled: true}}\nauthorization: {mode: AlwaysAllow}";
        for (text, who, token, expected) in [
            ("", &untrusted, None, 401),
            ("", &untrusted, Some("good"), 200),
            ("", &untrusted, Some("bad"), 401),
            (open, &untrusted, None, 401),
            (open, &peer(None), None, 200),
        ] {
            let access = Access::new(serving(text), "n", Some(Arc::new(Fixed::default())));
            let code = code(&access, who, token, "GET", "/metrics").await;
            assert_eq!(code, expected, "{text} {token:?}");
        }
    }

    #[tokio::test]
    async fn a_flood_of_tokens_is_rejected_and_delays_no_other_client() {
        let fixed = Arc::new(Fixed::default());
        let reviews = Arc::clone(&fixed) as Arc<dyn Reviews>;
        let access = Access::new(serving(""), "n", Some(reviews));
        let (nobody, admin) = (peer(None), peer(Some(("admin", "masters"))));
        assert_eq!(
            code(&access, &nobody, Some("good"), "GET", "/metrics").await,
            200
        );
        // Invalid tokens do not evict valid ones.
        for n in 0..2 * MAX_CACHE_ENTRIES {
            let wrong = format!("wrong{n}");
            let answer = code(&access, &nobody, Some(&wrong), "GET", "/metrics").await;
            assert_eq!(answer, 401);
        }
        let requests = || fixed.requests.load(Ordering::Relaxed);
        let before = requests();
        let answer = code(&access, &nobody, Some("good"), "GET", "/metrics").await;
        assert_eq!((answer, requests()), (200, before));

        let tokens: Vec<String> = (0..MAX_PARALLEL_REVIEWS + MAX_WAITING_REVIEWS)
            .map(|n| format!("slow{n}"))
            .collect();
        let from = |n: usize| Peer {
            address: ([192, 0, 2, u8::try_from(n).expect("small")], 1).into(),
            certificate: None,
        };
        let peers: Vec<Peer> = (0..tokens.len())
            .map(|n| from(n / MAX_REVIEWS_PER_ADDRESS))
            .collect();
        let begin = |n: usize| code(&access, &peers[n], Some(&tokens[n]), "GET", "/metrics");
        let mut one = std::pin::pin!(futures::future::join_all(
            (0..MAX_REVIEWS_PER_ADDRESS).map(begin)
        ));
        assert!(futures::poll!(one.as_mut()).is_pending());
        // The first address has reached its limit; other addresses are not affected.
        for (address, expected) in [(0, 429), (1, 401)] {
            let other = from(address);
            let new = code(&access, &other, Some("down"), "GET", "/metrics");
            let mut new = std::pin::pin!(new);
            match expected {
                429 => assert_eq!(new.await, 429),
                // Waits until a review in progress completes.
                _ => assert!(futures::poll!(new.as_mut()).is_pending()),
            }
        }
        let rest = (MAX_REVIEWS_PER_ADDRESS..tokens.len()).map(begin);
        let mut flood = std::pin::pin!(futures::future::join_all(rest));
        assert!(futures::poll!(flood.as_mut()).is_pending());
        assert_eq!(
            code(&access, &nobody, Some("new"), "GET", "/metrics").await,
            429
        );
        for (who, token) in [(&admin, None), (&nobody, Some("good"))] {
            let path = "/metrics";
            assert_eq!(code(&access, who, token, "GET", path).await, 200);
        }
        assert_eq!(code(&access, &admin, None, "GET", "/pods").await, 200);
    }

    #[test]
    fn bearer_tokens_are_parsed() {
        for (value, expected) in [
            ("Bearer t", Some("t")),
            ("bearer t", Some("t")),
            (" BEARER t ", Some("t")),
            ("Bearer t more", Some("t")),
            ("Bearer", None),
            ("Bearer  t", None),
            ("Basic t", None),
            ("Bearert", None),
            ("", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().expect("a header"));
            assert_eq!(bearer(&headers), expected, "{value:?}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }

    #[tokio::test]
    async fn settings_control_access_and_answers_are_cached() {
        let nobody = peer(None);
        let open = Access::new(
            serving(
                "authentication: {anonymous: {enabled: true}}\nauthorization: {mode: AlwaysAllow}",
            ),
            "n",
            None,
        );
        assert_eq!(code(&open, &nobody, None, "GET", "/pods").await, 200);
        let alone = Access::new(
            serving("authentication: {anonymous: {enabled: true}}"),
            "n",
            None,
        );
        assert_eq!(
            code(&alone, &nobody, None, "GET", "/pods").await,
            403,
            "without an apiserver, nothing is allowed"
        );
        let without = Access::new(
            serving("authentication: {webhook: {enabled: false}}"),
            "n",
            Some(Arc::new(Fixed::default())),
        );
        assert_eq!(
            code(&without, &nobody, Some("good"), "GET", "/metrics").await,
            401
        );
        let unreviewed = Access::new(
            serving(
                "authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}",
            ),
            "n",
            Some(Arc::new(Fixed::default())),
        );
        assert_eq!(
            code(&unreviewed, &nobody, Some("any"), "GET", "/pods").await,
            200,
            "without token reviews, no token is invalid"
        );
        let fixed = Arc::new(Fixed::default());
        let access = Access::new(
            serving(""),
            "n",
            Some(Arc::clone(&fixed) as Arc<dyn Reviews>),
        );
        for _ in 0..5 {
            assert_eq!(
                code(&access, &nobody, Some("good"), "GET", "/metrics").await,
                200
            );
            assert_eq!(
                code(&access, &nobody, Some("bad"), "GET", "/metrics").await,
                401
            );
        }
        assert_eq!(fixed.requests.load(Ordering::Relaxed), 3, "one review each");
    }
}
