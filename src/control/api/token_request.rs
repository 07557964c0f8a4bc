//! TokenRequest: service-account tokens, bound to an object (`pkg/registry/core/serviceaccount/storage/token.go`).

use serde_json::{Value, json};

use super::Api;
use super::auth::{Attributes, User};
use super::error::{ApiError, FieldError};
use super::object::{self, at, list, text};
use super::read::render;
use super::resources::Resource;
use super::restriction::{self, RequestedToken};
use super::token::{Bound, ISSUER, Subject};
use super::write::Written;

/// Lifetimes from this value on are rejected, in seconds.
const MAX_SECONDS: i64 = (1 << 32) + 1;

/// Lifetime in seconds if the request names none.
const DEFAULT_SECONDS: i64 = 3600;

fn invalid(name: &str, error: FieldError) -> ApiError {
    ApiError::invalid("TokenRequest", "authentication.k8s.io", name, &[error])
}

/// The requested lifetime, in seconds.
fn seconds(request: &Value) -> Result<i64, ApiError> {
    let seconds = at(request, &["spec", "expirationSeconds"])
        .and_then(Value::as_i64)
        .unwrap_or(DEFAULT_SECONDS);
    let why = match seconds {
        ..600 => "may not specify a duration less than 10 minutes",
        MAX_SECONDS.. => "may not specify a duration larger than 2^32 seconds",
        _ => return Ok(seconds),
    };
    let error = FieldError::invalid("spec.expirationSeconds", &seconds.into(), why);
    Err(invalid("", error))
}

/// Checks that the request names the account of the path, or no account.
fn is_about(namespace: &str, name: &str, account: &Value, request: &Value) -> Result<(), ApiError> {
    for (key, is, what) in [
        (
            "name",
            name,
            "must match the service account name if specified",
        ),
        (
            "namespace",
            namespace,
            "must match the service account namespace if specified",
        ),
    ] {
        let requested = text(request, &["metadata", key]).unwrap_or_default();
        if !requested.is_empty() && requested != is {
            let error = FieldError::invalid(format!("metadata.{key}"), &requested.into(), what);
            return Err(invalid(name, error));
        }
    }
    let (requested, is) = (object::uid(request), object::uid(account));
    if !requested.is_empty() && requested != is {
        let why = format!(
            "the UID in the token request ({requested}) does not match the UID of the service account ({is})"
        );
        return Err(ApiError::conflict(
            "authentication.k8s.io",
            "TokenRequest",
            name,
            &why,
        ));
    }
    Ok(())
}

impl Api {
    /// The object to which the token is bound.
    fn bound_object(
        &self,
        namespace: &str,
        account: &str,
        reference: &Value,
    ) -> Result<Bound, ApiError> {
        let (version, kind) = (
            text(reference, &["apiVersion"]).unwrap_or_default(),
            text(reference, &["kind"]).unwrap_or_default(),
        );
        let resource = match kind {
            "Pod" | "Secret" | "Node" if !version.contains('/') => Resource::of_kind(kind),
            _ => None,
        };
        let resource = resource.ok_or_else(|| {
            let (group, version) = version.split_once('/').unwrap_or(("", version));
            ApiError::bad_request(format!(
                "cannot bind token to object of type {group}/{version}, Kind={kind}"
            ))
        })?;
        let name = text(reference, &["name"]).unwrap_or_default();
        let (_, found) = self.fetch(resource, resource.namespaced.then_some(namespace), name)?;
        if kind == "Pod" && text(&found, &["spec", "serviceAccountName"]) != Some(account) {
            return Err(ApiError::bad_request(format!(
                "cannot bind token for serviceaccount {account:?} to pod running with different serviceaccount name."
            )));
        }
        let (requested, is) = (
            text(reference, &["uid"]).unwrap_or_default(),
            object::uid(&found).to_owned(),
        );
        if !requested.is_empty() && requested != is {
            let why = format!(
                "the UID in the bound object reference ({requested}) does not match the UID in record. The object might have been deleted and then recreated"
            );
            return Err(ApiError::conflict("", kind, name, &why));
        }
        let own = (name.to_owned(), is);
        Ok(match kind {
            "Pod" => Bound::Pod(own, self.node_of(&found)),
            "Secret" => Bound::Secret(own),
            _ => Bound::Node(own),
        })
    }

    /// Name and uid of a pod's node, as informational claims. The uid is empty if the node does not exist.
    fn node_of(&self, pod: &Value) -> Option<(String, String)> {
        let name = text(pod, &["spec", "nodeName"]).filter(|n| !n.is_empty())?;
        let node = self.stored(&format!("nodes/{name}"));
        let uid = node.as_ref().map(object::uid).unwrap_or_default();
        Some((name.to_owned(), uid.to_owned()))
    }

    fn stored(&self, key: &str) -> Option<Value> {
        serde_json::from_slice(&self.store.get(key)?.value).ok()
    }

    /// Checks that a node may have the requested token.
    fn check_nodes_token(
        &self,
        user: &User,
        node: &str,
        (namespace, account): (&str, &str),
        bound: Option<&Value>,
        audiences: &[String],
    ) -> Result<(), ApiError> {
        let name = bound.and_then(|b| text(b, &["name"])).unwrap_or_default();
        let pod = self.stored(&format!("pods/{namespace}/{name}"));
        let token = RequestedToken {
            account,
            bound,
            pod: pod.as_ref(),
            audiences,
        };
        let drivers = |source: &restriction::Source<'_>| self.token_audiences(namespace, source);
        // The audience takes the place of the resource, so that a role can allow it to nodes.
        let allowed = |audience: &str| {
            let attributes = Attributes {
                verb: "request-serviceaccounts-token-audience",
                resource: audience,
                namespace,
                name: account,
                ..Attributes::default()
            };
            self.rbac.allows(&self.store, user, &attributes)
        };
        restriction::check_token(node, &token, drivers, allowed)
    }

    /// POST `serviceaccounts/<name>/token`.
    pub(super) fn issue_token(
        &self,
        namespace: &str,
        account: &str,
        request: &Value,
        user: &User,
    ) -> Result<Written, ApiError> {
        let mut audiences: Vec<String> = list(request, &["spec", "audiences"])
            .iter()
            .filter_map(|a| a.as_str().map(Into::into))
            .collect();
        let bound = at(request, &["spec", "boundObjectRef"]);
        if let Some(node) = user.node() {
            self.check_nodes_token(user, node, (namespace, account), bound, &audiences)?;
        }
        let accounts =
            Resource::of_kind("ServiceAccount").ok_or_else(ApiError::no_such_resource)?;
        let (_, found) = self.fetch(accounts, Some(namespace), account)?;
        is_about(namespace, account, &found, request)?;
        let seconds = seconds(request)?;
        if audiences.is_empty() {
            audiences.push(ISSUER.into());
        }
        let to = match bound {
            Some(reference) => self.bound_object(namespace, account, reference)?,
            None => Bound::Nothing,
        };
        let subject = Subject {
            namespace,
            account,
            uid: object::uid(&found),
        };
        let (token, expires) = self
            .tokens
            .issue(
                &subject,
                &to,
                &audiences,
                seconds,
                jiff::Timestamp::now().as_second(),
            )
            .map_err(ApiError::internal)?;
        let expires = jiff::Timestamp::from_second(expires).map_err(ApiError::internal)?;
        let mut answer = json!({
            "kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": account, "namespace": namespace, "uid": subject.uid, "creationTimestamp": object::now()},
            "spec": {"audiences": audiences, "expirationSeconds": seconds},
            "status": {"token": token, "expirationTimestamp": object::stamp(expires)},
        });
        if let Some(bound) = bound {
            answer["spec"]["boundObjectRef"] = bound.clone();
        }
        Ok(Written {
            code: 201,
            body: render(&answer),
            warnings: vec![],
            stored: None,
        })
    }

    /// The audiences of a CSI driver's tokens. The driver is given by its name, or by a claim whose volume it serves.
    fn token_audiences(&self, namespace: &str, source: &restriction::Source<'_>) -> Vec<String> {
        let driver = match source {
            restriction::Source::Driver(name) => Some((*name).to_owned()),
            restriction::Source::Claim(name) => {
                let claim = self.stored(&format!("persistentvolumeclaims/{namespace}/{name}"));
                let volume = claim
                    .as_ref()
                    .and_then(|c| text(c, &["spec", "volumeName"]))
                    .and_then(|v| self.stored(&format!("persistentvolumes/{v}")));
                volume.and_then(|v| text(&v, &["spec", "csi", "driver"]).map(Into::into))
            }
        };
        let driver = driver.and_then(|name| self.stored(&format!("csidrivers/{name}")));
        driver
            .iter()
            .flat_map(|d| list(d, &["spec", "tokenRequests"]))
            .map(|r| text(r, &["audience"]).unwrap_or_default().to_owned())
            .collect()
    }
}
