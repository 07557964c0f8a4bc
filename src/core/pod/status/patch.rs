//! Bringing the status in the API up to the one that is wanted. Pure.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{PodCondition, PodStatus};
use serde_json::{Value, json};

use crate::core::pod;

/// The condition types that are ours; all others belong to somebody else.
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
/// Those of them that are there only while they hold.
const PASSING: &[&str] = &["PodResizePending", "PodResizeInProgress"];

/// The object that a patch is for; another one refuses it.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// Its uid.
    pub uid: &'a str,
    /// Its resourceVersion, if known. The patch must not replace a terminal phase that another client has written. A patch that
    /// is delayed on its way must not replace a newer one either (upstream demands the uid alone).
    pub version: Option<&'a str>,
}

/// What of `wanted` may be written over a status that the API has. A pod's end stays as it was told first, whoever has told
/// it: another end is told with that phase, reason and message, and what was wanted before the end was known is not
/// written at all. The kubelet reads the pod before each write, too (`syncPod` in `status_manager.go`), but writes over an
/// end that it finds there.
#[must_use]
pub fn allowed<'a>(api: &PodStatus, wanted: &'a PodStatus) -> Option<Cow<'a, PodStatus>> {
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

/// The strategic merge patch that turns what the API has into `wanted`; `None` if nothing differs.
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
    // Others tell why a pod is to go, too: what they have told is theirs, and may be newer there.
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
            // What is absent now must not survive the merge.
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

/// Whether the API says the same: it answers with empty objects where nothing was written (`lastState`), and drops
/// those that were (`resources.limits`).
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let both = |key| same(a.get(key).unwrap_or(&NULL), b.get(key).unwrap_or(&NULL));
            a.keys().chain(b.keys()).all(both)
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        // Nothing, beside something that may be empty.
        (Value::Null, other) | (other, Value::Null) => match other {
            Value::Object(fields) => fields.values().all(|field| same(field, &NULL)),
            Value::Array(items) => items.is_empty(),
            other => other.is_null(),
        },
        (a, b) => a == b,
    }
}

/// A field that is not there.
static NULL: Value = Value::Null;

/// The changes to a list of addresses, and its order. Lists of addresses are merged by address: one that is not deleted
/// stays beside those that take its place, and the apiserver refuses two of one family (422).
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

/// A status without the generation that it was observed at: what is worth telling at once.
#[must_use]
pub fn substance(status: &PodStatus) -> PodStatus {
    let mut status = PodStatus {
        observed_generation: None,
        ..status.clone()
    };
    for condition in status.conditions.iter_mut().flatten() {
        condition.observed_generation = None;
    }
    status
}
