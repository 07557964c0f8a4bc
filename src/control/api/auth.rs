//! Authentication and the built-in authorisation rules.
//!
//! Users are authenticated by client certificate (CN is the user, O the groups),
//! service-account token or bootstrap token.
//! Authorisation is deny-by-default. `system:masters` has all permissions, a node those that a kubelet needs.
//! Authenticated users may use discovery, and everyone may read health and version. All other permissions derive from
//! RBAC ([`super::rbac`]). For nodes, [`super::graph`] also checks that the object is related to the node.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Value, json};

use super::error::ApiError;
use super::object::{list, text};
use super::resources::Resource;
use super::token::{ISSUER, LEGACY_CLAIMS, Tokens};
use crate::store::Store;
use holdfast_core::node::signing::subject;
use holdfast_https::Certificate;

/// The authenticated user of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The user name.
    pub name: String,
    /// The unique id, if the authenticator knows one.
    pub uid: String,
    /// The groups, including the implied ones.
    pub groups: Vec<String>,
    /// Further attributes that the authenticator adds (`authentication.kubernetes.io/…`).
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    fn authenticated(name: String, uid: String, mut groups: Vec<String>) -> User {
        groups.push("system:authenticated".into());
        User {
            name,
            uid,
            groups,
            extra: BTreeMap::new(),
        }
    }

    /// Whether the user is in `group`.
    #[must_use]
    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }

    /// The node whose agent this user is.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.name
            .strip_prefix("system:node:")
            .filter(|_| self.is_in("system:nodes"))
    }

    /// The user as `UserInfo` in the status of a review.
    #[must_use]
    pub fn info(&self) -> Value {
        let mut info = json!({"username": self.name, "groups": self.groups});
        if !self.uid.is_empty() {
            info["uid"] = self.uid.as_str().into();
        }
        if !self.extra.is_empty() {
            info["extra"] = json!(self.extra);
        }
        info
    }
}

/// The user of a trusted client certificate (DER).
#[must_use]
pub(crate) fn of_certificate(der: &[u8]) -> Option<User> {
    let (name, groups) = subject(der)?;
    Some(User::authenticated(name, String::new(), groups))
}

/// Determines the user from the certificate, else from the token. If the request presents credentials and all of them
/// are invalid, the request is rejected, not treated as anonymous (`pkg/kubeapiserver/authenticator/config.go`).
pub fn authenticate(
    certificate: Option<&Certificate>,
    authorization: Option<&str>,
    tokens: &Tokens,
    store: &Store,
) -> Result<User, ApiError> {
    let shown = certificate.map(|c| c.trusted_der().and_then(of_certificate));
    if let Some(Some(user)) = shown {
        return Ok(user);
    }
    let token = authorization.and_then(bearer);
    if let Some((user, _)) = token.and_then(|token| of_token(token, &[ISSUER], tokens, store)) {
        return Ok(user);
    }
    if shown.is_some() || token.is_some() {
        return Err(ApiError::new(401, "Unauthorized", "Unauthorized"));
    }
    Ok(User {
        name: "system:anonymous".into(),
        groups: vec!["system:unauthenticated".into()],
        ..User::default()
    })
}

/// The bearer token of an `Authorization` header; `None` for any other scheme.
fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, rest) = authorization.trim().split_once(' ')?;
    let token = rest.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// How long the token of a deleted object stays valid, in seconds. It allows for
/// clock skew (go-jose's `DefaultLeeway`).
const DELETED_LEEWAY: i64 = 60;

/// Reads a stored object. `None` if its uid differs, or if its deletion has been due for longer than the leeway.
fn get_valid(store: &Store, key: &str, uid: &str) -> Option<Value> {
    let object: Value = serde_json::from_slice(&store.get(key)?.value).ok()?;
    let before = super::object::later(jiff::Timestamp::now(), -DELETED_LEEWAY);
    let over = text(&object, &["metadata", "deletionTimestamp"])
        .is_some_and(|at| at.parse::<jiff::Timestamp>().map_or(true, |at| at < before));
    (super::object::uid(&object) == uid && !over).then_some(object)
}

/// Verifies a service-account token: the signature, that it is issued for one of `audiences`, and that the account and
/// the bound object still exist. Returns the user and those of `audiences` that the token is issued for.
#[must_use]
pub(crate) fn of_token(
    token: &str,
    audiences: &[&str],
    tokens: &Tokens,
    store: &Store,
) -> Option<(User, Vec<String>)> {
    let ours = audiences.contains(&ISSUER);
    if let Some((id, secret)) = token
        .split_once('.')
        .filter(|(id, secret)| id.len() == 6 && secret.len() == 16)
    {
        // A bootstrap token is valid for this API only.
        let user = of_bootstrap(id, secret, store).filter(|_| ours)?;
        return Some((user, vec![ISSUER.into()]));
    }
    if let Some(claims) = tokens.verify_legacy(token) {
        let user = of_secret(token, &claims, store).filter(|_| ours)?;
        return Some((user, vec![ISSUER.into()]));
    }
    let claims = tokens.verify(token, audiences)?;
    let meant = match &claims["aud"] {
        Value::String(one) => vec![one.clone()],
        many => list(many, &[])
            .iter()
            .filter_map(|a| a.as_str().map(Into::into))
            .collect(),
    };
    let audiences: HashSet<&str> = audiences.iter().copied().collect();
    let meant: Vec<String> = meant
        .into_iter()
        .filter(|a: &String| audiences.contains(a.as_str()))
        .collect();
    Some((of_claims(&claims, store)?, meant))
}

fn of_account(namespace: &str, account: &str, uid: &str) -> User {
    User::authenticated(
        format!("system:serviceaccount:{namespace}:{account}"),
        uid.to_owned(),
        vec![
            "system:serviceaccounts".into(),
            format!("system:serviceaccounts:{namespace}"),
        ],
    )
}

/// The user of a TokenRequest token (`pkg/serviceaccount/claims.go`).
fn of_claims(claims: &Value, store: &Store) -> Option<User> {
    let private_claims = claims.get("kubernetes.io")?;
    let namespace = text(private_claims, &["namespace"])?;
    let account = text(private_claims, &["serviceaccount", "name"])?;
    let uid = text(private_claims, &["serviceaccount", "uid"])?;
    get_valid(
        store,
        &format!("serviceaccounts/{namespace}/{account}"),
        uid,
    )?;
    let named = |kind: &str| {
        let bound = private_claims.get(kind)?;
        Some((
            text(bound, &["name"])?,
            text(bound, &["uid"]).unwrap_or_default(),
        ))
    };
    if let Some((secret, uid)) = named("secret") {
        get_valid(store, &format!("secrets/{namespace}/{secret}"), uid)?;
    }
    let (pod, node) = (named("pod"), named("node"));
    match (pod, node) {
        (Some((pod, uid)), _) => drop(get_valid(store, &format!("pods/{namespace}/{pod}"), uid)?),
        // If the token is bound to a pod, its node claim is informational and not verified.
        (None, Some((node, uid))) => drop(get_valid(store, &format!("nodes/{node}"), uid)?),
        (None, None) => {}
    }
    let mut user = of_account(namespace, account, uid);
    for (kind, bound) in [("pod", pod), ("node", node)] {
        let Some((name, uid)) = bound else { continue };
        for (key, value) in [("name", name), ("uid", uid)] {
            if !value.is_empty() {
                let key = format!("authentication.kubernetes.io/{kind}-{key}");
                user.extra.insert(key, vec![value.to_owned()]);
            }
        }
    }
    if let Some(id) = text(claims, &["jti"]) {
        let key = "authentication.kubernetes.io/credential-id".to_owned();
        user.extra.insert(key, vec![format!("JTI={id}")]);
    }
    Some(user)
}

/// The user of a Secret's token, if the Secret still contains this token (`pkg/serviceaccount/legacy.go`).
fn of_secret(token: &str, claims: &Value, store: &Store) -> Option<User> {
    use base64::Engine as _;
    let [namespace, name, account, uid] =
        LEGACY_CLAIMS.map(|key| text(claims, &[key]).filter(|v| !v.is_empty()));
    let (namespace, name, account, uid) = (namespace?, name?, account?, uid?);
    let secret: Value =
        serde_json::from_slice(&store.get(&format!("secrets/{namespace}/{name}"))?.value).ok()?;
    let held = base64::engine::general_purpose::STANDARD
        .decode(text(&secret, &["data", "token"])?)
        .ok()?;
    let same = aws_lc_rs::constant_time::verify_slices_are_equal(&held, token.as_bytes()).is_ok();
    let invalid =
        text(&secret, &["metadata", "labels", INVALID_SINCE]).is_some_and(|t| !t.is_empty());
    if !same || invalid || super::object::is_deleting(&secret) {
        return None;
    }
    let found = get_valid(
        store,
        &format!("serviceaccounts/{namespace}/{account}"),
        uid,
    )?;
    (!super::object::is_deleting(&found)).then(|| of_account(namespace, account, uid))
}

/// Label of a Secret whose token is no longer accepted.
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";

/// The user of a bootstrap token. The token is stored in a Secret of kube-system and can expire
/// (`plugin/pkg/auth/authenticator/token/bootstrap/bootstrap.go`).
fn of_bootstrap(id: &str, secret: &str, store: &Store) -> Option<User> {
    use base64::Engine as _;
    let plain = |text: &str| {
        text.bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
    };
    if !plain(id) || !plain(secret) {
        return None;
    }
    let record = store.get(&format!("secrets/kube-system/bootstrap-token-{id}"))?;
    let object: Value = serde_json::from_slice(&record.value).ok()?;
    let value = |key: &str| {
        let text = text(&object, &["data", key])?;
        String::from_utf8(
            base64::engine::general_purpose::STANDARD
                .decode(text)
                .ok()?,
        )
        .ok()
    };
    let kind = text(&object, &["type"]) == Some("bootstrap.kubernetes.io/token")
        && !super::object::is_deleting(&object);
    let known = value("token-secret")?;
    let same =
        aws_lc_rs::constant_time::verify_slices_are_equal(known.as_bytes(), secret.as_bytes())
            .is_ok();
    let alive = value("expiration").is_none_or(|at| {
        at.parse::<jiff::Timestamp>()
            .is_ok_and(|at| at > jiff::Timestamp::now())
    });
    let used_so = value("usage-bootstrap-authentication").as_deref() == Some("true");
    if !(kind && same && alive && used_so && value("token-id").as_deref() == Some(id)) {
        return None;
    }
    let mut groups = vec!["system:bootstrappers".to_owned()];
    let more = value("auth-extra-groups").unwrap_or_default();
    groups.extend(
        more.split(',')
            .filter(|g| g.starts_with("system:bootstrappers:"))
            .map(Into::into),
    );
    Some(User::authenticated(
        format!("system:bootstrap:{id}"),
        String::new(),
        groups,
    ))
}

/// The attributes of a request for authorisation.
#[derive(Debug, Default, Clone, Copy)]
pub struct Attributes<'a> {
    /// The verb, for instance `list`.
    pub verb: &'a str,
    /// The API group.
    pub group: &'a str,
    /// The plural name of the kind.
    pub resource: &'a str,
    /// The subresource, or empty.
    pub sub: &'a str,
    /// The namespace, or empty.
    pub namespace: &'a str,
    /// The name, or empty. For list, watch and deletecollection: the name that a field selector fixes.
    pub name: &'a str,
    /// The node that a field selector (`spec.nodeName`) fixes, or empty.
    pub on_node: &'a str,
}

/// Whether the built-in rules allow the request. The caller also checks RBAC and, for nodes, the graph.
#[must_use]
pub fn is_allowed(user: &User, attributes: &Attributes<'_>) -> bool {
    if user.is_in("system:masters") {
        return true;
    }
    if user.is_in("system:authenticated")
        && attributes.verb == "create"
        && matches!(
            (attributes.group, attributes.resource),
            ("authorization.k8s.io", "selfsubjectaccessreviews")
                | ("authentication.k8s.io", "selfsubjectreviews")
        )
    {
        return true;
    }
    user.node()
        .is_some_and(|node| is_node_allowed(node, attributes))
}

/// The requests that a node's agent is allowed (upstream's `NodeRules` and node authoriser). The
/// graph restricts the objects, admission the content.
fn is_node_allowed(node: &str, attributes: &Attributes<'_>) -> bool {
    let read = matches!(attributes.verb, "get" | "list" | "watch");
    let change = matches!(attributes.verb, "update" | "patch");
    match (attributes.resource, attributes.sub) {
        ("nodes", "") => {
            attributes.verb == "create" || ((read || change) && attributes.name == node)
        }
        ("nodes", "status") => change && attributes.name == node,
        ("pods", "") => match attributes.verb {
            "list" | "watch" => attributes.on_node == node,
            verb => matches!(verb, "get" | "create" | "delete"),
        },
        ("pods" | "persistentvolumeclaims", "status") => change,
        ("pods", "eviction") | ("serviceaccounts", "token") => attributes.verb == "create",
        ("configmaps" | "secrets" | "services", "") => read,
        ("csidrivers" | "runtimeclasses" | "clustertrustbundles", "") => read,
        ("serviceaccounts" | "endpoints", "") => attributes.verb == "get",
        ("persistentvolumes" | "persistentvolumeclaims", "") => attributes.verb == "get",
        ("volumeattachments" | "resourceclaims", "") => attributes.verb == "get",
        ("certificatesigningrequests", "") => read || attributes.verb == "create",
        ("podcertificaterequests", "") => match attributes.verb {
            "list" | "watch" => attributes.on_node == node,
            verb => matches!(verb, "get" | "create"),
        },
        ("resourceslices", "") => {
            attributes.verb == "deletecollection" && attributes.on_node == node
        }
        ("csinodes", "") => {
            attributes.verb == "create"
                || (attributes.name == node
                    && (change || matches!(attributes.verb, "get" | "delete")))
        }
        ("events", "") => attributes.verb == "create" || change,
        ("leases", "") => {
            attributes.namespace == "kube-node-lease"
                && (attributes.verb == "create"
                    || (attributes.name == node
                        && (change || matches!(attributes.verb, "get" | "delete"))))
        }
        ("tokenreviews", "") => {
            attributes.verb == "create" && attributes.group == "authentication.k8s.io"
        }
        ("subjectaccessreviews", "") => {
            attributes.verb == "create" && attributes.group == "authorization.k8s.io"
        }
        _ => false,
    }
}

/// Whether `user` may GET a path outside the object API.
#[must_use]
pub(crate) fn can_get_path(user: &User, path: &str) -> bool {
    let public = ["/healthz", "/livez", "/readyz", "/version"];
    public
        .iter()
        .any(|p| path == *p || path.starts_with(&format!("{p}/")))
        || user.is_in("system:masters")
        || (user.is_in("system:authenticated")
            && (path.is_empty()
                || ["/api", "/apis", "/openapi"]
                    .iter()
                    .any(|p| path == *p || path.starts_with(&format!("{p}/")))))
}

/// The 403 response, in upstream's wording.
#[must_use]
pub(crate) fn forbidden_error(user: &User, attributes: &Attributes<'_>) -> ApiError {
    let what = if attributes.sub.is_empty() {
        attributes.resource.to_owned()
    } else {
        format!("{}/{}", attributes.resource, attributes.sub)
    };
    let group = if attributes.group.is_empty() {
        String::new()
    } else {
        format!(".{}", attributes.group)
    };
    let target = if attributes.name.is_empty() {
        format!("{}{group}", attributes.resource)
    } else {
        format!("{}{group} {:?}", attributes.resource, attributes.name)
    };
    let scope = if attributes.namespace.is_empty() {
        "at the cluster scope".into()
    } else {
        format!("in the namespace {:?}", attributes.namespace)
    };
    ApiError::forbidden(format!(
        "{target} is forbidden: User {:?} cannot {} resource {what:?} in API group {:?} {scope}",
        user.name, attributes.verb, attributes.group
    ))
}

/// Builds the attributes of a request for a stored kind.
#[must_use]
pub(crate) fn attributes_of<'a>(
    verb: &'a str,
    resource: &'a Resource,
    sub: &'a str,
    namespace: &'a str,
    name: &'a str,
) -> Attributes<'a> {
    Attributes {
        verb,
        group: resource.group,
        resource: resource.plural,
        sub,
        // A namespace counts as an object within itself, so that a role in it can grant access to it.
        namespace: if resource.kind == "Namespace" && namespace.is_empty() {
            name
        } else {
            namespace
        },
        name,
        on_node: "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_without_a_matching_rule_are_denied() {
        let user = |name: &str, groups: &[&str]| User {
            name: name.into(),
            groups: groups.iter().map(|g| (*g).into()).collect(),
            ..User::default()
        };
        let master = user("admin", &["system:masters", "system:authenticated"]);
        let node = user("system:node:n1", &["system:nodes", "system:authenticated"]);
        let account = user(
            "system:serviceaccount:default:default",
            &["system:serviceaccounts", "system:authenticated"],
        );
        let anonymous = user("system:anonymous", &["system:unauthenticated"]);
        let pods = Resource::find("", "v1", "pods").expect("pods");
        let nodes = Resource::find("", "v1", "nodes").expect("nodes");
        let leases = Resource::find("coordination.k8s.io", "v1", "leases").expect("leases");
        let cases = [
            (&master, attributes_of("delete", nodes, "", "", "n1"), true),
            (
                &node,
                attributes_of("patch", nodes, "status", "", "n1"),
                true,
            ),
            (
                &node,
                attributes_of("patch", nodes, "status", "", "n2"),
                false,
            ),
            (&node, attributes_of("delete", nodes, "", "", "n1"), false),
            (
                &node,
                attributes_of("update", leases, "", "kube-node-lease", "n1"),
                true,
            ),
            (
                &node,
                attributes_of("update", leases, "", "kube-node-lease", "n2"),
                false,
            ),
            (
                &account,
                attributes_of("list", pods, "", "default", ""),
                false,
            ),
            (
                &anonymous,
                attributes_of("list", pods, "", "default", ""),
                false,
            ),
            (&node, attributes_of("get", nodes, "", "", "n1"), true),
            (&node, attributes_of("get", nodes, "", "", "n2"), false),
            (&node, attributes_of("list", nodes, "", "", ""), false),
            (&node, attributes_of("list", nodes, "", "", "n1"), true),
            (&node, attributes_of("list", pods, "", "", ""), false),
            (
                &node,
                Attributes {
                    on_node: "n1",
                    ..attributes_of("watch", pods, "", "", "")
                },
                true,
            ),
            (
                &node,
                Attributes {
                    on_node: "n2",
                    ..attributes_of("watch", pods, "", "", "")
                },
                false,
            ),
            (
                &node,
                attributes_of("deletecollection", leases, "", "kube-node-lease", "n1"),
                false,
            ),
        ];
        for (user, attributes, expected) in cases {
            assert_eq!(
                is_allowed(user, &attributes),
                expected,
                "{} {attributes:?}",
                user.name
            );
        }
        for (user, path, expected) in [
            (&anonymous, "/readyz", true),
            (&anonymous, "/apis", false),
            (&account, "/apis", true),
            (&account, "/metrics", false),
            (&anonymous, "/versionx", false),
        ] {
            assert_eq!(can_get_path(user, path), expected, "{} {path}", user.name);
        }
    }
}
