//! DELETE: grace period, finalizers and propagation (`staging/src/k8s.io/apiserver/pkg/registry/rest/delete.go`).

use serde_json::{Value, json};

use super::Api;
use super::auth::User;
use super::batch;
use super::change::bump_generation;
use super::error::{ApiError, FieldError};
use super::object;
use super::object::{is_deleting, list, meta, text};
use super::resources::Resource;
use super::restriction;
use super::route::Query;
use super::schema;
use super::write::{RETRIES, Stored, Written, is_finished};
use crate::store::{Expect, Record, WriteError};

/// Maximum grace period, in seconds. Some clients store the field as an int32.
pub(super) const MAX_GRACE: i64 = i32::MAX as i64;

impl Api {
    /// DELETE of one object.
    pub(super) async fn delete(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        name: &str,
        query: &Query,
        body: &Value,
        user: &User,
    ) -> Result<Written, ApiError> {
        let mut options = delete_options(query, body)?;
        let mut warnings = vec![];
        if resource.kind == "Job" && options.policy.is_none() {
            options.policy = Some("Orphan".into());
            warnings.push(batch::ORPHANS.to_owned());
        }
        refuse_own_namespace(resource, name)?;
        // The pod as stored after this request set its grace period to 0.
        let mut marked: Option<Record> = None;
        for _ in 0..RETRIES {
            let fetched = self.fetch(resource, namespace, name);
            if let Some(marked) = deleted_concurrently(&fetched, marked.as_ref()) {
                let answer = deleted_answer(resource, true, &Value::Null, marked, warnings);
                return Ok(answer);
            }
            let (record, old) = fetched?;
            if marked.is_none() {
                preconditions(resource, &old, body)?;
            }
            let kind = (resource, None);
            let write = restriction::Write::new(kind, (namespace, name), Some(&old), None);
            self.check_writer(user, &write)?;
            let mut new = old.clone();
            let is_deleted = mark_deleted(resource, &mut new, &options);
            let answer =
                |record| deleted_answer(resource, is_deleted, &old, record, warnings.clone());
            if options.dry_run {
                return Ok(answer(&record));
            }
            let key = resource.key(namespace, name);
            if is_deleted && resource.kind == "Pod" && new != old {
                let written = self.mark(resource, key, record.revision, new).await?;
                marked = written.or(marked);
                continue;
            }
            let done = if is_deleted {
                self.remove(resource, key, record.revision, new).await
            } else if new == old {
                Ok(record)
            } else {
                self.put(resource, key, Expect::Revision(record.revision), new)
                    .await
            };
            match done {
                Ok(record) => return Ok(answer(&record)),
                Err(WriteError::Conflict(_)) => {}
                Err(other) => return Err(ApiError::internal(other)),
            }
        }
        Err(ApiError::modified(resource.group, resource.plural, name))
    }

    /// Writes a pod's grace period of 0 as a separate revision, before the one that removes the pod. A kubelet
    /// reads the grace period from this revision. Upstream does the same (`updateForGracefulDeletionAndFinalizers`
    /// in `staging/src/k8s.io/apiserver/pkg/registry/generic/registry/store.go`). `None` if the pod was changed
    /// concurrently.
    async fn mark(
        &self,
        resource: &Resource,
        key: String,
        revision: u64,
        pod: Value,
    ) -> Result<Option<Record>, ApiError> {
        match self
            .put(resource, key, Expect::Revision(revision), pod)
            .await
        {
            Ok(record) => Ok(Some(record)),
            Err(WriteError::Conflict(_)) => Ok(None),
            Err(other) => Err(ApiError::internal(other)),
        }
    }

    /// DELETE of a collection: deletes every matching object with the same options.
    pub(super) async fn delete_collection(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        query: &Query,
        body: &Value,
        user: &User,
    ) -> Result<Written, ApiError> {
        if resource.kind == "Namespace" {
            return Err(ApiError::method_not_allowed());
        }
        let list = self
            .list(resource, namespace, query, &super::read::View::Plain)
            .await?;
        let parsed: Value = serde_json::from_slice(&list).map_err(ApiError::internal)?;
        for item in object::list(&parsed, &["items"]) {
            match self
                .delete(
                    resource,
                    object::namespace(item),
                    object::name(item),
                    query,
                    body,
                    user,
                )
                .await
            {
                Err(error) if error.code != 404 => return Err(error),
                _ => {}
            }
        }
        Ok(Written {
            code: 200,
            body: list,
            warnings: vec![],
            stored: None,
        })
    }
}

/// Rejects the deletion of a namespace that the cluster needs.
fn refuse_own_namespace(resource: &Resource, name: &str) -> Result<(), ApiError> {
    let own = ["default", "kube-system", "kube-public", "kube-node-lease"];
    match resource.kind == "Namespace" && own.contains(&name) {
        true => Err(ApiError::forbidden(format!(
            "namespaces {name:?} is forbidden: this namespace may not be deleted"
        ))),
        false => Ok(()),
    }
}

struct DeleteOptions {
    grace: Option<i64>,
    policy: Option<String>,
    dry_run: bool,
}

fn delete_options(query: &Query, body: &Value) -> Result<DeleteOptions, ApiError> {
    let invalid = |error| ApiError::invalid("DeleteOptions", "meta.k8s.io", "", &[error]);
    if let Some((path, is, expected)) = schema::check("v1", "DeleteOptions", body).mistyped {
        return Err(ApiError::bad_request(format!(
            "DeleteOptions cannot be handled: json: cannot unmarshal {is} into Go struct field DeleteOptions.{path} of type {expected}"
        )));
    }
    let requested = query.get("gracePeriodSeconds").map(|text| {
        text.parse::<i64>().map_err(|_| {
            ApiError::bad_request(format!(
                "gracePeriodSeconds: {text:?} is not a whole number of seconds"
            ))
        })
    });
    let grace = match body["gracePeriodSeconds"].as_i64() {
        Some(grace) => Some(grace),
        None => requested.transpose()?,
    };
    if let Some(grace) = grace.filter(|g| *g > MAX_GRACE) {
        return Err(invalid(FieldError::invalid(
            "gracePeriodSeconds",
            &grace.into(),
            &format!("must be less than or equal to {MAX_GRACE}"),
        )));
    }
    let policy = text(body, &["propagationPolicy"])
        .or(query.get("propagationPolicy"))
        .map(str::to_owned);
    let orphan = body["orphanDependents"]
        .as_bool()
        .or_else(|| query.get("orphanDependents").map(|o| o == "true"));
    let policy = policy.or(orphan.map(|o| if o { "Orphan" } else { "Background" }.into()));
    if let Some(policy) = policy.as_deref()
        && !["Foreground", "Background", "Orphan"].contains(&policy)
    {
        return Err(invalid(FieldError::unsupported(
            "propagationPolicy",
            policy,
            &["Foreground", "Background", "Orphan", "nil"],
        )));
    }
    let dry_run: Vec<&str> = list(body, &["dryRun"])
        .iter()
        .filter_map(Value::as_str)
        .chain(query.get("dryRun"))
        .collect();
    if let Some(other) = dry_run.iter().find(|d| **d != "All") {
        return Err(invalid(FieldError::unsupported("dryRun", other, &["All"])));
    }
    Ok(DeleteOptions {
        grace: grace.map(|g| if g < 0 { 1 } else { g }),
        policy,
        dry_run: !dry_run.is_empty(),
    })
}

fn preconditions(resource: &Resource, old: &Value, body: &Value) -> Result<(), ApiError> {
    let name = object::name(old);
    let refuse = |what: &str, wanted: &str, is: &str| {
        let why = format!(
            "the {what} in the precondition ({wanted}) does not match the {what} in record ({is}). The object might have been deleted and then recreated"
        );
        Err(ApiError::conflict("", resource.kind, name, &why))
    };
    if let Some(uid) = text(body, &["preconditions", "uid"]).filter(|uid| *uid != object::uid(old))
    {
        return refuse("UID", uid, object::uid(old));
    }
    let version = text(old, &["metadata", "resourceVersion"]).unwrap_or_default();
    if let Some(wanted) =
        text(body, &["preconditions", "resourceVersion"]).filter(|v| *v != version)
    {
        return refuse("ResourceVersion", wanted, version);
    }
    Ok(())
}

/// Sets the deletion fields; returns true if the object can be removed immediately.
fn mark_deleted(resource: &Resource, object: &mut Value, options: &DeleteOptions) -> bool {
    let was_deleting = is_deleting(object);
    let policy = options.policy.as_deref().filter(|_| !was_deleting);
    // Only the garbage collector removes these finalizers, and only from kinds whose dependents it tracks.
    if let Some(policy) = policy.filter(|_| resource.has_dependents()) {
        let mut finalizers: Vec<Value> = list(object, &["metadata", "finalizers"]).to_vec();
        finalizers.retain(|f| f != "orphan" && f != "foregroundDeletion");
        match policy {
            "Orphan" => finalizers.push("orphan".into()),
            "Foreground" => finalizers.push("foregroundDeletion".into()),
            _ => {}
        }
        if finalizers.is_empty() {
            meta(object).remove("finalizers");
        } else {
            meta(object).insert("finalizers".into(), finalizers.into());
        }
    }
    let is_pod = resource.kind == "Pod";
    let time = jiff::Timestamp::now();
    if was_deleting {
        let old_grace = object["metadata"]["deletionGracePeriodSeconds"]
            .as_i64()
            .unwrap_or(0);
        // A repeated DELETE can only shorten the grace period, and only if it names one (`BeforeDelete` in
        // `staging/src/k8s.io/apiserver/pkg/registry/rest/delete.go`).
        let requested = if is_pod { options.grace } else { Some(0) };
        if let Some(grace) = requested.filter(|grace| *grace < old_grace) {
            let old: Option<jiff::Timestamp> =
                text(object, &["metadata", "deletionTimestamp"]).and_then(|t| t.parse().ok());
            let new = object::later(old.unwrap_or(time), grace.saturating_sub(old_grace));
            let (new, grace) = if new < time && grace != 0 {
                (object::later(time, 1), 1)
            } else {
                (new, grace)
            };
            meta(object).insert("deletionTimestamp".into(), object::stamp(new).into());
            meta(object).insert("deletionGracePeriodSeconds".into(), grace.into());
        }
    } else {
        let grace = if is_pod {
            pod_grace(object, options.grace)
        } else {
            0
        };
        let at = object::later(time, grace);
        meta(object).insert("deletionTimestamp".into(), object::stamp(at).into());
        meta(object).insert("deletionGracePeriodSeconds".into(), grace.into());
        bump_generation(object);
        if resource.kind == "Namespace" {
            object["status"]["phase"] = "Terminating".into();
        }
    }
    is_finished(resource, object)
}

/// A pod's grace period in seconds: 0 if the pod is not bound to a node or is in a terminal phase.
fn pod_grace(pod: &Value, requested: Option<i64>) -> i64 {
    let unassigned = text(pod, &["spec", "nodeName"])
        .unwrap_or_default()
        .is_empty();
    if unassigned
        || matches!(
            text(pod, &["status", "phase"]),
            Some("Succeeded" | "Failed")
        )
    {
        return 0;
    }
    requested
        .unwrap_or_else(|| {
            pod["spec"]["terminationGracePeriodSeconds"]
                .as_i64()
                .unwrap_or(30)
        })
        .clamp(0, MAX_GRACE)
}

/// The marked pod, if a concurrent request has removed it: the name no longer exists, or has another uid.
fn deleted_concurrently<'a>(
    fetched: &Result<(Record, Value), ApiError>,
    marked: Option<&'a Record>,
) -> Option<&'a Record> {
    let marked = marked?;
    let is_gone = match fetched {
        Ok((_, found)) => {
            let own: Option<Value> = serde_json::from_slice(&marked.value).ok();
            own.is_some_and(|own| object::uid(&own) != object::uid(found))
        }
        Err(error) => error.code == 404,
    };
    is_gone.then_some(marked)
}

fn deleted_answer(
    resource: &Resource,
    is_deleted: bool,
    old: &Value,
    record: &Record,
    warnings: Vec<String>,
) -> Written {
    let body = if is_deleted && !resource.returns_deleted {
        let mut details =
            json!({"name": object::name(old), "kind": resource.plural, "uid": object::uid(old)});
        if !resource.group.is_empty() {
            details["group"] = resource.group.into();
        }
        super::read::render(
            &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}),
        )
    } else {
        record.value.clone()
    };
    Written {
        code: 200,
        body,
        warnings,
        // A concurrent request has deleted an object that is no longer known.
        stored: (!old.is_null()).then(|| Stored::of(old, record)),
    }
}
