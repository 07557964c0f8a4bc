//! The defaults that the apiserver stores (`pkg/apis/core/v1/defaults.go` and its siblings).

use serde_json::{Map, Value, json};

use super::object::{at, entry, meta, set_default};

pub(super) mod pod;

use pod::{pod_spec, template};

/// Fills in the defaults of `kind`.
pub fn apply(kind: &str, object: &mut Value) {
    match kind {
        "Pod" => {
            pod_spec(entry(object, "spec"));
            let spec = &mut object["spec"];
            set_default(spec, "enableServiceLinks", json!(true));
            requests_from_limits(spec);
            whole_requests(spec);
            let qos = holdfast_core::pod::qos::of_json(spec);
            let status = entry(object, "status");
            status.entry("phase").or_insert(json!("Pending"));
            status.entry("qosClass").or_insert(json!(qos));
            container_states(status);
        }
        "Deployment" => {
            let spec = &mut object["spec"];
            set_default(spec, "replicas", json!(1));
            set_default(spec, "revisionHistoryLimit", json!(10));
            set_default(spec, "progressDeadlineSeconds", json!(600));
            let strategy = entry(spec, "strategy");
            let kind = strategy
                .entry("type")
                .or_insert(json!("RollingUpdate"))
                .clone();
            if kind == "RollingUpdate" {
                let rolling = strategy.entry("rollingUpdate").or_insert(json!({}));
                set_default(rolling, "maxUnavailable", json!("25%"));
                set_default(rolling, "maxSurge", json!("25%"));
            }
            template(spec);
        }
        "ReplicaSet" => {
            let spec = &mut object["spec"];
            set_default(spec, "replicas", json!(1));
            template(spec);
        }
        "Service" => super::services::defaults(object),
        "NetworkPolicy" => super::policies::defaults(&mut object["spec"]),
        "EndpointSlice" | "Endpoints" => protocols(object),
        "Secret" => {
            set_default(object, "type", json!("Opaque"));
            fold_string_data(object);
        }
        "Namespace" => {
            let name = super::object::name(object).to_owned();
            let labels = meta(object).entry("labels").or_insert(json!({}));
            labels["kubernetes.io/metadata.name"] = name.into();
            if at(object, &["spec", "finalizers"]).is_none()
                && at(object, &["metadata", "deletionTimestamp"]).is_none()
            {
                entry(object, "spec").insert("finalizers".into(), json!(["kubernetes"]));
            }
            entry(object, "status")
                .entry("phase")
                .or_insert(json!("Active"));
        }
        "Node" => {
            if let Some(capacity) = at(object, &["status", "capacity"]).cloned() {
                entry(object, "status")
                    .entry("allocatable")
                    .or_insert(capacity);
            }
        }
        "Event" => {
            for key in ["eventTime", "firstTimestamp", "lastTimestamp"] {
                if object.get(key).is_none() {
                    object[key] = Value::Null;
                }
            }
            set_default(object, "source", json!({}));
            set_default(object, "reportingComponent", json!(""));
            set_default(object, "reportingInstance", json!(""));
        }
        other => {
            super::storage::defaults(other, object);
            super::networking::defaults(other, object);
            super::rbac::defaults(other, object);
            super::batch::defaults(other, object);
        }
    }
}

/// Adds the container states `state` and `lastState`, empty if unknown: upstream's types always serialise them.
fn container_states(status: &mut Map<String, Value>) {
    for list in [
        "containerStatuses",
        "initContainerStatuses",
        "ephemeralContainerStatuses",
    ] {
        let containers = status.get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            let Some(container) = container.as_object_mut() else {
                continue;
            };
            for state in ["state", "lastState"] {
                container.entry(state).or_insert(json!({}));
            }
        }
    }
}

/// Copies requests from limits. This applies to pods only: in templates it would change the template hash.
fn requests_from_limits(spec: &mut Value) {
    for list in ["containers", "initContainers"] {
        for container in spec
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let Some(limits) = at(container, &["resources", "limits"])
                .and_then(Value::as_object)
                .cloned()
            else {
                continue;
            };
            let requests = entry(entry_value(container, "resources"), "requests");
            for (name, quantity) in limits {
                requests.entry(name).or_insert(quantity);
            }
        }
    }
}

/// Defaults pod-level requests to the sum of the containers' requests, else to the pod-level limit.
fn whole_requests(spec: &mut Value) {
    use holdfast_core::pod::resources::{Side, of_pod_level};
    let Some(limits) = at(spec, &["resources", "limits"])
        .and_then(Value::as_object)
        .cloned()
    else {
        return;
    };
    let Ok(pod) = serde_json::from_value(json!({"spec": spec})) else {
        return;
    };
    let whole = of_pod_level(&pod, Side::Requests);
    let requests = entry(entry_value(spec, "resources"), "requests");
    for (name, limit) in limits {
        let request = whole
            .get(&name)
            .map_or(limit, |quantity| quantity.to_string().into());
        requests.entry(name).or_insert(request);
    }
}

fn entry_value<'a>(object: &'a mut Value, key: &str) -> &'a mut Value {
    entry(object, key);
    &mut object[key]
}

/// The default protocol of the ports of Endpoints, and the default name and protocol of those of a slice
/// (`pkg/apis/discovery/v1/defaults.go`).
fn protocols(object: &mut Value) {
    let is_slice = object["kind"] == "EndpointSlice";
    let subsets = object.get_mut("subsets").and_then(Value::as_array_mut);
    let mut holders: Vec<&mut Value> = match subsets {
        Some(subsets) => subsets.iter_mut().collect(),
        None => vec![object],
    };
    let lists = holders
        .iter_mut()
        .filter_map(|holder| holder.get_mut("ports"));
    let ports = lists.filter_map(Value::as_array_mut).flatten();
    for port in ports.filter(|port| port.is_object()) {
        set_default(port, "protocol", json!("TCP"));
        if is_slice {
            set_default(port, "name", json!(""));
        }
    }
}

/// `stringData` is write-only: its values are stored base64-encoded in `data`.
fn fold_string_data(secret: &mut Value) {
    use base64::Engine as _;
    let Some(Value::Object(plain)) = secret.as_object_mut().and_then(|s| s.remove("stringData"))
    else {
        return;
    };
    let data = entry(secret, "data");
    for (key, value) in plain {
        let encoded =
            base64::engine::general_purpose::STANDARD.encode(value.as_str().unwrap_or_default());
        data.insert(key, encoded.into());
    }
}
