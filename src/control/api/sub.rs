//! Subresources with rules of their own, and reviews (control-plane spec, 3.9 and 5.4).

use serde_json::{Value, json};

use super::Api;
use super::auth::{self, User};
use super::error::{ApiError, FieldError};
use super::object;
use super::object::{at, deleting, list, meta, text};
use super::patch;
use super::read::{View, render};
use super::resources::Resource;
use super::restriction;
use super::route::Query;
use super::table;
use super::token::{ISSUER, Subject};
use super::write::{Options, Written};
use crate::control::store::Bytes;

/// No token lasts so long, in seconds.
const MOST_SECONDS: i64 = (1 << 32) + 1;

fn success(code: u16) -> Written {
    let body = render(
        &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code}),
    );
    Written {
        code,
        body,
        warnings: vec![],
    }
}

impl Api {
    /// POST `pods/<name>/binding`: the scheduler's decision.
    pub(super) async fn bind(
        &self,
        namespace: &str,
        name: &str,
        binding: &Value,
    ) -> Result<Written, ApiError> {
        let pods = Resource::of_kind("Pod").ok_or_else(ApiError::no_such_resource)?;
        let node = text(binding, &["target", "name"]).filter(|n| !n.is_empty());
        let node = node.ok_or_else(|| {
            ApiError::invalid(
                "Binding",
                "",
                name,
                &[FieldError::required("target.name", "")],
            )
        })?;
        let refuse = |why: String| ApiError::conflict("", "pods/binding", name, &why);
        for _ in 0..super::write::RETRIES {
            let (record, old) = self.fetch(pods, Some(namespace), name)?;
            if let Some(uid) = text(binding, &["metadata", "uid"])
                .filter(|uid| !uid.is_empty() && *uid != object::uid(&old))
            {
                return Err(refuse(format!(
                    "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                    object::uid(&old)
                )));
            }
            if deleting(&old) {
                return Err(refuse(format!(
                    "pod {name} is being deleted, cannot be assigned to a host"
                )));
            }
            if let Some(taken) = text(&old, &["spec", "nodeName"]).filter(|n| !n.is_empty()) {
                return Err(refuse(format!(
                    "pod {name} is already assigned to node {taken:?}"
                )));
            }
            if !list(&old, &["spec", "schedulingGates"]).is_empty() {
                return Err(refuse(format!(
                    "pod {name} has non-empty .spec.schedulingGates"
                )));
            }
            match self
                .replace(
                    pods,
                    Some(namespace),
                    name,
                    record.revision,
                    bound(old, node),
                )
                .await
            {
                Ok(()) => return Ok(success(201)),
                Err(error) if error.code == 409 => {}
                Err(error) => return Err(error),
            }
        }
        Err(ApiError::modified("", "pods/binding", name))
    }

    /// POST `pods/<name>/eviction`: without disruption budgets this is a deletion.
    pub(super) async fn evict(
        &self,
        namespace: &str,
        name: &str,
        eviction: &Value,
    ) -> Result<Written, ApiError> {
        let pods = Resource::of_kind("Pod").ok_or_else(ApiError::no_such_resource)?;
        self.delete(
            pods,
            Some(namespace),
            name,
            &Query::default(),
            &eviction["deleteOptions"],
        )
        .await?;
        Ok(success(201))
    }

    /// `autoscaling/v1` Scale of a workload.
    pub(super) fn scale(
        &self,
        resource: &'static Resource,
        namespace: &str,
        name: &str,
        view: &View,
    ) -> Result<Bytes, ApiError> {
        let (_, object) = self.fetch(resource, Some(namespace), name)?;
        let scale = scale_of(&object);
        Ok(render(&match view {
            View::Plain => scale,
            View::Partial => table::partial(&scale),
            View::Table(include) => {
                table::of_scale(&scale, include.as_deref(), jiff::Timestamp::now())
            }
        }))
    }

    /// PUT or PATCH of a Scale: only the replicas change.
    pub(super) async fn set_scale(
        &self,
        resource: &'static Resource,
        namespace: &str,
        name: &str,
        body: &Value,
        format: Option<patch::Format>,
        options: &Options,
    ) -> Result<Written, ApiError> {
        let written = self
            .change(
                resource,
                Some(namespace),
                name,
                None,
                options,
                vec![],
                |old| {
                    let scale = match format {
                        Some(format) => patch::apply(format, &scale_of(old), body)?,
                        None => body.clone(),
                    };
                    let replicas = at(&scale, &["spec", "replicas"])
                        .map_or(Some(0), Value::as_i64)
                        .filter(|r| *r >= 0);
                    let replicas = replicas.ok_or_else(|| {
                        let error = FieldError::invalid(
                            "spec.replicas",
                            &scale["spec"]["replicas"],
                            "must be greater than or equal to 0",
                        );
                        ApiError::invalid("Scale", "autoscaling", name, &[error])
                    })?;
                    let mut new = old.clone();
                    new["spec"]["replicas"] = replicas.into();
                    // A version in the body is a precondition; none means any.
                    let named = body["metadata"].get("resourceVersion").cloned();
                    match named {
                        Some(version) => meta(&mut new).insert("resourceVersion".into(), version),
                        None => meta(&mut new).remove("resourceVersion"),
                    };
                    Ok(new)
                },
            )
            .await?;
        let object: Value = serde_json::from_slice(&written.body).map_err(ApiError::internal)?;
        Ok(Written {
            body: render(&scale_of(&object)),
            ..written
        })
    }

    /// The pod that a token is to be bound to; none if it is bound to nothing.
    fn bound_pod(
        &self,
        namespace: &str,
        account: &str,
        bound: Option<&Value>,
    ) -> Result<Option<Value>, ApiError> {
        Ok(match bound {
            None => None,
            Some(bound) if text(bound, &["kind"]) == Some("Pod") => {
                let pods = Resource::of_kind("Pod").ok_or_else(ApiError::no_such_resource)?;
                let name = text(bound, &["name"]).unwrap_or_default();
                let (_, pod) = self.fetch(pods, Some(namespace), name)?;
                if text(&pod, &["spec", "serviceAccountName"]) != Some(account) {
                    return Err(ApiError::bad_request(format!(
                        "cannot bind token for serviceaccount {account:?} to pod running with different serviceaccount name."
                    )));
                }
                if let Some(uid) = text(bound, &["uid"]).filter(|uid| *uid != object::uid(&pod)) {
                    let why = format!(
                        "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
                    );
                    return Err(ApiError::conflict("", "Pod", name, &why));
                }
                Some(pod)
            }
            Some(bound) => {
                let error = FieldError::unsupported(
                    "spec.boundObjectRef.kind",
                    text(bound, &["kind"]).unwrap_or_default(),
                    &["Pod"],
                );
                return Err(ApiError::invalid(
                    "TokenRequest",
                    "authentication.k8s.io",
                    account,
                    &[error],
                ));
            }
        })
    }

    /// POST `serviceaccounts/<name>/token`.
    pub(super) fn issue_token(
        &self,
        namespace: &str,
        account: &str,
        request: &Value,
        user: &User,
    ) -> Result<Written, ApiError> {
        let accounts =
            Resource::of_kind("ServiceAccount").ok_or_else(ApiError::no_such_resource)?;
        let (_, found) = self.fetch(accounts, Some(namespace), account)?;
        let seconds = at(request, &["spec", "expirationSeconds"])
            .and_then(Value::as_i64)
            .unwrap_or(3600);
        let refused = match seconds {
            ..600 => Some("may not specify a duration less than 10 minutes"),
            MOST_SECONDS.. => Some("may not specify a duration larger than 2^32 seconds"),
            _ => None,
        };
        if let Some(why) = refused {
            let error = FieldError::invalid("spec.expirationSeconds", &seconds.into(), why);
            return Err(ApiError::invalid(
                "TokenRequest",
                "authentication.k8s.io",
                account,
                &[error],
            ));
        }
        let mut audiences: Vec<String> = list(request, &["spec", "audiences"])
            .iter()
            .filter_map(|a| a.as_str().map(Into::into))
            .collect();
        if audiences.is_empty() {
            audiences.push(ISSUER.into());
        }
        let bound = at(request, &["spec", "boundObjectRef"]);
        let pod = self.bound_pod(namespace, account, bound)?;
        if let Some(node) = user.node() {
            let drivers = |source: restriction::Source<'_>| self.token_audiences(namespace, source);
            restriction::check_token(node, account, pod.as_ref(), &audiences, drivers)?;
        }
        let subject = Subject {
            namespace,
            account,
            uid: object::uid(&found),
            pod: pod
                .as_ref()
                .map(|pod| (object::name(pod), object::uid(pod))),
            audiences: audiences.clone(),
            seconds,
        };
        let (token, expires) = self
            .tokens
            .issue(&subject, jiff::Timestamp::now().as_second())
            .map_err(ApiError::internal)?;
        let expires = jiff::Timestamp::from_second(expires).map_err(ApiError::internal)?;
        let mut answer = json!({
            "kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": account, "namespace": namespace, "creationTimestamp": object::now()},
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
        })
    }

    /// The audiences of which a storage driver gets tokens: the driver of a volume of a pod, given by its name or by the
    /// claim that the volume is bound to.
    fn token_audiences(&self, namespace: &str, source: restriction::Source<'_>) -> Vec<String> {
        let read = |key: String| -> Option<Value> {
            serde_json::from_slice(&self.store.get(&key)?.value).ok()
        };
        let driver = match source {
            restriction::Source::Driver(name) => Some(name.to_owned()),
            restriction::Source::Claim(name) => {
                let claim = read(format!("persistentvolumeclaims/{namespace}/{name}"));
                let volume = claim
                    .as_ref()
                    .and_then(|c| text(c, &["spec", "volumeName"]))
                    .and_then(|v| read(format!("persistentvolumes/{v}")));
                volume.and_then(|v| text(&v, &["spec", "csi", "driver"]).map(Into::into))
            }
        };
        let driver = driver.and_then(|name| read(format!("csidrivers/{name}")));
        driver
            .iter()
            .flat_map(|d| list(d, &["spec", "tokenRequests"]))
            .map(|r| match text(r, &["audience"]) {
                None | Some("") => ISSUER.to_owned(),
                Some(audience) => audience.to_owned(),
            })
            .collect()
    }

    /// Whether a user may do what a review asks about.
    fn access(&self, user: &User, spec: &Value) -> bool {
        if let Some(path) = text(spec, &["nonResourceAttributes", "path"]) {
            return text(spec, &["nonResourceAttributes", "verb"]) == Some("get")
                && self.may_get(user, path);
        }
        let get = |key: &str| text(spec, &["resourceAttributes", key]).unwrap_or_default();
        let ask = auth::Ask {
            verb: get("verb"),
            group: get("group"),
            resource: get("resource"),
            sub: get("subresource"),
            namespace: get("namespace"),
            name: get("name"),
            on_node: list(
                spec,
                &["resourceAttributes", "fieldSelector", "requirements"],
            )
            .iter()
            .find(|r| r["key"] == "spec.nodeName" && r["operator"] == "In")
            .and_then(|r| match list(r, &["values"]) {
                [one] => one.as_str(),
                _ => None,
            })
            .unwrap_or_default(),
        };
        self.may(user, &ask)
    }

    /// The status of a TokenReview: whose token it is, if it is meant for one of the audiences that are asked for.
    fn token_review(&self, request: &Value) -> Value {
        let mut audiences: Vec<&str> = list(request, &["spec", "audiences"])
            .iter()
            .filter_map(Value::as_str)
            .collect();
        if audiences.is_empty() {
            audiences.push(ISSUER);
        }
        let token = text(request, &["spec", "token"]).unwrap_or_default();
        match auth::of_token(token, &audiences, &self.tokens, &self.store) {
            Some((user, meant)) => {
                json!({"authenticated": true, "user": user.info(), "audiences": meant})
            }
            None => json!({"user": {}, "error": "invalid bearer token"}),
        }
    }

    /// POST of a review.
    pub(super) fn review(
        &self,
        kind: &str,
        user: &User,
        request: &Value,
    ) -> Result<Written, ApiError> {
        let group = if kind.ends_with("AccessReview") {
            "authorization.k8s.io/v1"
        } else {
            "authentication.k8s.io/v1"
        };
        let mut answer =
            json!({"kind": kind, "apiVersion": group, "metadata": {}, "spec": request["spec"]});
        answer["status"] = match kind {
            "SelfSubjectReview" => json!({"userInfo": user.info()}),
            "TokenReview" => self.token_review(request),
            _ => {
                let about = if kind == "SelfSubjectAccessReview" {
                    user.clone()
                } else {
                    let groups = list(request, &["spec", "groups"])
                        .iter()
                        .filter_map(|g| g.as_str().map(Into::into))
                        .collect();
                    User {
                        name: text(request, &["spec", "user"]).unwrap_or_default().into(),
                        groups,
                        ..User::default()
                    }
                };
                json!({"allowed": self.access(&about, &request["spec"])})
            }
        };
        Ok(Written {
            code: 201,
            body: render(&answer),
            warnings: vec![],
        })
    }
}

/// The pod as it is once `node` has been chosen.
fn bound(mut pod: Value, node: &str) -> Value {
    pod["spec"]["nodeName"] = node.into();
    let status = object::entry(&mut pod, "status");
    status.remove("nominatedNodeName");
    let conditions = status.entry("conditions").or_insert_with(|| json!([]));
    if let Some(conditions) = conditions.as_array_mut() {
        conditions.retain(|c| c["type"] != "PodScheduled");
        conditions.push(json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": object::now()}));
    }
    pod
}

fn scale_of(object: &Value) -> Value {
    let selector: Vec<String> = at(object, &["spec", "selector", "matchLabels"])
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(k, v)| format!("{k}={}", v.as_str().unwrap_or_default()))
        .collect();
    let metadata = &object["metadata"];
    json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1",
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"],
                     "resourceVersion": metadata["resourceVersion"], "creationTimestamp": metadata["creationTimestamp"]},
        "spec": {"replicas": object["spec"]["replicas"]},
        "status": {"replicas": object["status"]["replicas"].as_i64().unwrap_or(0), "selector": selector.join(",")},
    })
}
