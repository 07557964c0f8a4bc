//! Subresources with special rules, and reviews (`pkg/registry/core/pod/storage`,
//! `pkg/registry/authorization`). Tokens are in `token_request`.

use serde_json::{Value, json};

use super::Api;
use super::auth::{self, User};
use super::error::{ApiError, FieldError};
use super::object;
use super::object::{at, is_deleting, list, meta, text};
use super::patch;
use super::read::{View, render};
use super::resources::{Resource, Sub};
use super::restriction::Write;
use super::route::Query;
use super::table;
use super::token::ISSUER;
use super::write::{Options, Written};
use crate::store::Bytes;

fn success(code: u16) -> Written {
    let body = render(
        &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code}),
    );
    Written {
        code,
        body,
        warnings: vec![],
        stored: None,
    }
}

/// Checks that the body of a subresource names the object of the path, or no object.
fn is_about(name: &str, kind: &str, body: &Value) -> Result<(), ApiError> {
    let own = object::name(body);
    if own.is_empty() || own == name {
        return Ok(());
    }
    Err(ApiError::bad_request(format!(
        "name in URL does not match name in {kind} object"
    )))
}

/// Checks that a pod can be bound by this Binding (`assignPod` in `pkg/registry/core/pod/storage/storage.go`).
fn bindable(name: &str, pod: &Value, binding: &Value) -> Result<(), String> {
    if let Some(uid) = text(binding, &["metadata", "uid"])
        .filter(|uid| !uid.is_empty() && *uid != object::uid(pod))
    {
        return Err(format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            object::uid(pod)
        ));
    }
    if is_deleting(pod) {
        return Err(format!(
            "pod {name} is being deleted, cannot be assigned to a host"
        ));
    }
    if let Some(taken) = text(pod, &["spec", "nodeName"]).filter(|n| !n.is_empty()) {
        return Err(format!("pod {name} is already assigned to node {taken:?}"));
    }
    if !list(pod, &["spec", "schedulingGates"]).is_empty() {
        return Err(format!("pod {name} has non-empty .spec.schedulingGates"));
    }
    Ok(())
}

impl Api {
    /// POST `pods/<name>/binding`: binds a pod to a node.
    pub(super) async fn bind(
        &self,
        namespace: &str,
        name: &str,
        binding: &Value,
        options: &Options<'_>,
    ) -> Result<Written, ApiError> {
        let pods = Resource::of_kind("Pod").ok_or_else(ApiError::no_such_resource)?;
        is_about(name, "Binding", binding)?;
        let node = text(binding, &["target", "name"]).filter(|n| !n.is_empty());
        let node = node.ok_or_else(|| {
            ApiError::invalid(
                "Binding",
                "",
                name,
                &[FieldError::required("target.name", "")],
            )
        })?;
        for _ in 0..super::write::RETRIES {
            let (record, old) = self.fetch(pods, Some(namespace), name)?;
            let kind = (pods, Some(Sub::Binding));
            let write = Write::new(kind, (Some(namespace), name), Some(&old), Some(binding));
            self.check_writer(options.user, &write)?;
            bindable(name, &old, binding)
                .map_err(|why| ApiError::conflict("", "pods/binding", name, &why))?;
            if options.dry_run {
                return Ok(success(201));
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

    /// POST `pods/<name>/eviction`. Disruption budgets are not implemented, so an eviction deletes the pod.
    pub(super) async fn evict(
        &self,
        namespace: &str,
        name: &str,
        mut eviction: Value,
        options: &Options<'_>,
    ) -> Result<Written, ApiError> {
        let pods = Resource::of_kind("Pod").ok_or_else(ApiError::no_such_resource)?;
        is_about(name, "Eviction", &eviction)?;
        let (_, old) = self.fetch(pods, Some(namespace), name)?;
        let kind = (pods, Some(Sub::Eviction));
        let write = Write::new(kind, (Some(namespace), name), Some(&old), Some(&eviction));
        self.check_writer(options.user, &write)?;
        let mut deletion = eviction
            .get_mut("deleteOptions")
            .map(Value::take)
            .unwrap_or_default();
        // The dry run of the query applies if the body has none (upstream's `propagateDryRun`).
        if options.dry_run && list(&deletion, &["dryRun"]).is_empty() {
            if deletion.is_null() {
                deletion = json!({});
            }
            object::put(&mut deletion, "dryRun", Some(&json!(["All"])));
        }
        let query = Query::default();
        self.delete(pods, Some(namespace), name, &query, &deletion, options.user)
            .await?;
        Ok(success(201))
    }

    /// The `autoscaling/v1` Scale of a workload.
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

    /// PUT or PATCH of a Scale: changes the replicas only.
    pub(super) async fn set_scale(
        &self,
        resource: &'static Resource,
        namespace: &str,
        name: &str,
        body: &Value,
        format: Option<patch::Format>,
        options: &Options<'_>,
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
                    // A resource version in the body is a precondition; without one, any version is accepted.
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

    /// Whether the request that a review describes is allowed.
    fn access(&self, user: &User, spec: &Value) -> bool {
        if let Some(path) = text(spec, &["nonResourceAttributes", "path"]) {
            return text(spec, &["nonResourceAttributes", "verb"]) == Some("get")
                && self.can_get_path(user, path);
        }
        let get = |key: &str| text(spec, &["resourceAttributes", key]).unwrap_or_default();
        let attributes = auth::Attributes {
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
        self.is_allowed(user, &attributes)
    }

    /// The status of a TokenReview: the token's user, if the token is issued for one of the requested audiences.
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
                let subject = if kind == "SelfSubjectAccessReview" {
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
                json!({"allowed": self.access(&subject, &request["spec"])})
            }
        };
        Ok(Written {
            code: 201,
            body: render(&answer),
            warnings: vec![],
            stored: None,
        })
    }
}

/// The pod after it is bound to `node`.
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
