//! Mutating admission: the fields that the apiserver adds on creation (upstream `plugin/pkg/admission`).

use serde_json::{Value, json};

use super::classes;
use super::error::ApiError;
use super::object::{at, entry, list, text};
use super::resources::Resource;
use crate::store::Store;

/// Checks that objects can be created in a namespace. Returns the namespace's key and revision: the result is valid
/// while the namespace has this revision.
pub fn namespace(
    store: &Store,
    resource: &Resource,
    namespace: &str,
    name: &str,
) -> Result<(String, u64), ApiError> {
    let key = format!("namespaces/{namespace}");
    let record = store
        .get(&key)
        .ok_or_else(|| ApiError::not_found("", "namespaces", namespace))?;
    let object: Value = serde_json::from_slice(&record.value).map_err(ApiError::internal)?;
    if super::object::is_deleting(&object) {
        let mut error = ApiError::forbidden(format!(
            "{} {name:?} is forbidden: unable to create new content in namespace {namespace} because it is being terminated",
            resource.plural
        ));
        error.details = json!({"name": name, "kind": resource.plural, "causes": [{"reason": "NamespaceTerminating",
            "message": format!("namespace {namespace} is being terminated"), "field": "metadata.namespace"}]});
        return Err(error);
    }
    Ok((key, record.revision))
}

/// Pods: service account, token volume, priority, default tolerations. Waits up to one second for the namespace's
/// `default` account, which a controller creates.
pub async fn pod(store: &Store, namespace: &str, pod: &mut Value) -> Result<(), ApiError> {
    tolerations(&mut pod["spec"]);
    gated(pod);
    classes::runtime(store, pod)?;
    classes::priority(store, pod)?;
    if at(
        pod,
        &["metadata", "annotations", "kubernetes.io/config.mirror"],
    )
    .is_some()
    {
        return Ok(());
    }
    let name = super::object::name(pod).to_owned();
    let spec = entry(pod, "spec");
    // `serviceAccount` is the deprecated name of the field (`pkg/apis/core/v1/conversion.go`).
    let account = ["serviceAccountName", "serviceAccount"]
        .iter()
        .filter_map(|key| spec.get(*key).and_then(Value::as_str))
        .find(|account| !account.is_empty());
    let account = account.unwrap_or("default").to_owned();
    spec.insert("serviceAccountName".into(), account.as_str().into());
    spec.insert("serviceAccount".into(), account.as_str().into());
    let key = format!("serviceaccounts/{namespace}/{account}");
    let mut found = store.get(&key);
    for _ in 0..20 {
        if found.is_some() || account != "default" {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        found = store.get(&key);
    }
    let Some(found) = found else {
        return Err(ApiError::forbidden(format!(
            "pods {name:?} is forbidden: error looking up service account {namespace}/{account}: serviceaccount {account:?} not found"
        )));
    };
    let found: Value = serde_json::from_slice(&found.value).map_err(ApiError::internal)?;
    if list(pod, &["spec", "imagePullSecrets"]).is_empty()
        && let Some(secrets) = at(&found, &["imagePullSecrets"])
    {
        pod["spec"]["imagePullSecrets"] = secrets.clone();
    }
    let wanted = |object: &Value, path: &[&str]| at(object, path).and_then(Value::as_bool);
    let mount = wanted(pod, &["spec", "automountServiceAccountToken"])
        .or(wanted(&found, &["automountServiceAccountToken"]));
    if mount.unwrap_or(true) {
        token_volume(&mut pod["spec"]);
    }
    Ok(())
}

/// Sets the condition `PodScheduled` of a pod with scheduling gates to `SchedulingGated`.
fn gated(pod: &mut Value) {
    if list(pod, &["spec", "schedulingGates"]).is_empty() {
        return;
    }
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates", "lastProbeTime": null,
        "lastTransitionTime": super::object::now()});
    entry(pod, "status").insert("conditions".into(), json!([condition]));
}

const TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

fn token_volume(spec: &mut Value) {
    let name = format!("kube-api-access-{}", super::object::name_suffix());
    let mut used = false;
    for kind in ["containers", "initContainers"] {
        for container in spec
            .get_mut(kind)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            if list(container, &["volumeMounts"])
                .iter()
                .any(|m| m["mountPath"] == TOKEN_PATH)
            {
                continue;
            }
            let mounts = container
                .as_object_mut()
                .map(|c| c.entry("volumeMounts").or_insert_with(|| json!([])));
            if let Some(mounts) = mounts.and_then(Value::as_array_mut) {
                mounts.push(json!({"name": name, "readOnly": true, "mountPath": TOKEN_PATH}));
                used = true;
            }
        }
    }
    if !used {
        return;
    }
    let volume = json!({"name": name, "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
    ]}});
    let volumes = spec
        .as_object_mut()
        .map(|s| s.entry("volumes").or_insert_with(|| json!([])));
    if let Some(volumes) = volumes.and_then(Value::as_array_mut) {
        volumes.push(volume);
    }
}

fn tolerations(spec: &mut Value) {
    for key in [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ] {
        let covered = list(spec, &["tolerations"]).iter().any(|t| {
            (t["key"] == key || text(t, &["key"]).is_none_or(str::is_empty))
                && matches!(text(t, &["effect"]), None | Some("" | "NoExecute"))
        });
        if covered {
            continue;
        }
        let list = entry_list(spec, "tolerations");
        list.push(json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}));
    }
}

fn entry_list<'a>(object: &'a mut Value, key: &str) -> &'a mut Vec<Value> {
    let slot = &mut object[key];
    if !slot.is_array() {
        *slot = json!([]);
    }
    slot.as_array_mut().expect("made a list just above")
}
