//! The patch that updates a pod's status in the API. Pure.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodStatus};
use serde_json::{Value, json};

use super::end;
use crate::pod;
use crate::pod::actions::restarts_after;

/// The condition types that the agent owns. Other components own all others.
const OWN: &[&str] = &[
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
    "DisruptionTarget",
    "AllContainersRestarting",
    "PodResizePending",
    "PodResizeInProgress",
];
/// Condition types that are deleted when they no longer hold.
const PASSING: &[&str] = &["PodResizePending", "PodResizeInProgress"];

/// The object that a patch applies to. The apiserver rejects the patch for another object.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// The object's uid.
    pub uid: &'a str,
    /// The object's resourceVersion, if it is known. With it, the patch cannot overwrite a terminal phase of another
    /// client. Nor can a delayed patch overwrite a newer one. Upstream requires only the uid.
    pub version: Option<&'a str>,
}

/// The part of `wanted` that may overwrite the status in the API. If the API has a terminal status, that one is kept,
/// whichever client wrote it. A different terminal status gets its phase, reason and message; a non-terminal status is
/// not written at all. The kubelet reads the pod before each write too (`syncPod` in
/// `pkg/kubelet/status/status_manager.go`), but overwrites a terminal status.
///
/// A container that must not leave the terminated state keeps the status that the API has, because the apiserver would
/// reject the whole write.
#[must_use]
pub fn allowed<'a>(
    pod: &Pod,
    api: &PodStatus,
    wanted: &'a PodStatus,
) -> Option<Cow<'a, PodStatus>> {
    let mut wanted = without_overwriting_end(api, wanted)?;
    for earlier in final_exits(pod, api) {
        let leaves = |s: &ContainerStatus| s.name == earlier.name && end::exit(s).is_none();
        let lists = [&wanted.container_statuses, &wanted.init_container_statuses];
        if lists.into_iter().flatten().flatten().any(leaves) {
            end::restore(wanted.to_mut(), earlier);
        }
    }
    Some(wanted)
}

/// The statuses of terminated containers that an apiserver keeps in the terminated state
/// (`ValidateContainerStateTransition` and `ValidateInitContainerStateTransition` in
/// `pkg/apis/core/validation/validation.go`).
fn final_exits<'a>(pod: &Pod, api: &'a PodStatus) -> impl Iterator<Item = &'a ContainerStatus> {
    let spec = pod::spec(pod);
    let may_restart_all = pod::may_restart_all(pod);
    let lists = [&api.container_statuses, &api.init_container_statuses];
    lists.into_iter().flatten().flatten().filter(move |status| {
        let init = spec.init_containers.iter().flatten();
        let container = spec
            .containers
            .iter()
            .chain(init)
            .find(|c| c.name == status.name);
        let exited = end::exit(status).zip(container);
        !may_restart_all && exited.is_some_and(|(exit, c)| !restarts_after(pod, c, exit.exit_code))
    })
}

/// Without the rule for containers.
fn without_overwriting_end<'a>(
    api: &PodStatus,
    wanted: &'a PodStatus,
) -> Option<Cow<'a, PodStatus>> {
    let of = |status: &PodStatus| {
        let texts = [&status.phase, &status.reason, &status.message];
        texts.map(Clone::clone)
    };
    if !pod::is_final(api) || of(api) == of(wanted) {
        return Some(Cow::Borrowed(wanted));
    }
    if !pod::is_final(wanted) {
        return None;
    }
    let [phase, reason, message] = of(api);
    Some(Cow::Owned(PodStatus {
        phase,
        reason,
        message,
        ..wanted.clone()
    }))
}

/// The strategic merge patch from the status in the API to `wanted`. `None` if nothing differs.
#[must_use]
pub fn patch(target: Target<'_>, api: &PodStatus, wanted: &PodStatus) -> Option<Value> {
    let (old, new) = (
        serde_json::to_value(api).ok()?,
        serde_json::to_value(wanted).ok()?,
    );
    let mut changes = serde_json::Map::new();
    for (key, value) in new.as_object()? {
        if key == "conditions" {
            continue;
        }
        if old.get(key).is_some_and(|old| same(old, value)) {
            continue;
        }
        if ["podIPs", "hostIPs"].contains(&key.as_str()) {
            let (list, order) = addresses(old.get(key), value);
            changes.insert(format!("$setElementOrder/{key}"), order);
            changes.insert(key.clone(), list);
        } else {
            changes.insert(key.clone(), value.clone());
        }
    }
    for key in [
        "reason",
        "message",
        "initContainerStatuses",
        "ephemeralContainerStatuses",
    ] {
        if old.get(key).is_some() && new.get(key).is_none() {
            changes.insert(key.into(), Value::Null);
        }
    }
    let of = |status: &PodStatus, kind: &str| {
        status
            .conditions
            .iter()
            .flatten()
            .find(|c| c.type_ == kind)
            .cloned()
    };
    // Other components also set `DisruptionTarget`. Their condition belongs to them, and may be newer in the API.
    let is_own = |c: &PodCondition| {
        c.type_ != "DisruptionTarget" || c.reason.as_deref() == Some("TerminationByKubelet")
    };
    let conditions: Vec<PodCondition> = OWN
        .iter()
        .filter_map(|kind| {
            of(wanted, kind).filter(|c| is_own(c) && of(api, kind).as_ref() != Some(c))
        })
        .collect();
    let conditions: Vec<Value> = conditions
        .iter()
        .filter_map(|c| serde_json::to_value(c).ok())
        .map(|mut c| {
            // Fields that are absent now must be deleted by the merge.
            for key in ["reason", "message"] {
                if c.get(key).is_none() {
                    c[key] = Value::Null;
                }
            }
            c
        })
        .collect();
    let over = PASSING
        .iter()
        .filter(|kind| of(api, kind).is_some() && of(wanted, kind).is_none());
    let conditions: Vec<Value> = conditions
        .into_iter()
        .chain(over.map(|kind| json!({"type": kind, "$patch": "delete"})))
        .collect();
    if !conditions.is_empty() {
        let order: Vec<Value> = wanted
            .conditions
            .iter()
            .flatten()
            .map(|c| json!({"type": c.type_}))
            .collect();
        changes.insert("$setElementOrder/conditions".into(), order.into());
        changes.insert("conditions".into(), conditions.into());
    }
    let mut metadata = json!({"uid": target.uid});
    if let Some(version) = target.version {
        metadata["resourceVersion"] = version.into();
    }
    (!changes.is_empty()).then(|| json!({"metadata": metadata, "status": changes}))
}

/// Whether two values are equal for the API. It returns empty objects where nothing was written (`lastState`), and
/// drops empty objects that were written (`resources.limits`).
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let both = |key| same(a.get(key).unwrap_or(&NULL), b.get(key).unwrap_or(&NULL));
            a.keys().chain(b.keys()).all(both)
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        // An absent value equals an empty one.
        (Value::Null, other) | (other, Value::Null) => match other {
            Value::Object(fields) => fields.values().all(|field| same(field, &NULL)),
            Value::Array(items) => items.is_empty(),
            other => other.is_null(),
        },
        (a, b) => a == b,
    }
}

/// An absent field.
static NULL: Value = Value::Null;

/// The patch of a list of addresses, and its order. The merge key is the address, so an address that is not deleted
/// remains next to its replacement. The apiserver rejects two addresses of one family (422).
fn addresses(old: Option<&Value>, new: &Value) -> (Value, Value) {
    let of = |list: Option<&Value>| -> Vec<Value> {
        let items = list.and_then(Value::as_array).into_iter().flatten();
        items.map(|item| item["ip"].clone()).collect()
    };
    let (old, new) = (of(old), of(Some(new)));
    let gone = old.iter().filter(|ip| !new.contains(ip));
    let order: Vec<Value> = new.iter().map(|ip| json!({"ip": ip})).collect();
    let deleted = gone.map(|ip| json!({"ip": ip, "$patch": "delete"}));
    let list: Vec<Value> = order.iter().cloned().chain(deleted).collect();
    (list.into(), order.into())
}

/// The status without observed generations. Only a change of the rest is published immediately.
#[must_use]
pub(crate) fn substance(status: &PodStatus) -> PodStatus {
    let mut status = PodStatus {
        observed_generation: None,
        ..status.clone()
    };
    for condition in status.conditions.iter_mut().flatten() {
        condition.observed_generation = None;
    }
    status
}

#[cfg(test)]
mod tests;
