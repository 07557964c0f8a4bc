//! The defaults that the apiserver stores (`pkg/apis/core/v1/defaults.go` and its siblings).

use serde_json::{Map, Value, json};

use super::object::{at, entry, meta, text};

/// Sets a field that is absent, null or empty.
pub(super) fn default(object: &mut Value, key: &str, value: Value) {
    if object.get(key).is_none_or(|v| v.is_null() || *v == "") {
        object[key] = value;
    }
}

/// Fills in the defaults of `kind`.
pub fn apply(kind: &str, object: &mut Value) {
    match kind {
        "Pod" => {
            pod_spec(entry(object, "spec"));
            let spec = &mut object["spec"];
            default(spec, "enableServiceLinks", json!(true));
            requests_from_limits(spec);
            whole_requests(spec);
            let qos = crate::core::pod::qos::of_json(spec);
            let status = entry(object, "status");
            status.entry("phase").or_insert(json!("Pending"));
            status.entry("qosClass").or_insert(json!(qos));
            container_states(status);
        }
        "Deployment" => {
            let spec = &mut object["spec"];
            default(spec, "replicas", json!(1));
            default(spec, "revisionHistoryLimit", json!(10));
            default(spec, "progressDeadlineSeconds", json!(600));
            let strategy = entry(spec, "strategy");
            let kind = strategy
                .entry("type")
                .or_insert(json!("RollingUpdate"))
                .clone();
            if kind == "RollingUpdate" {
                let rolling = strategy.entry("rollingUpdate").or_insert(json!({}));
                default(rolling, "maxUnavailable", json!("25%"));
                default(rolling, "maxSurge", json!("25%"));
            }
            template(spec);
        }
        "ReplicaSet" => {
            let spec = &mut object["spec"];
            default(spec, "replicas", json!(1));
            template(spec);
        }
        "Service" => service(&mut object["spec"]),
        "Secret" => {
            default(object, "type", json!("Opaque"));
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
            default(object, "source", json!({}));
            default(object, "reportingComponent", json!(""));
            default(object, "reportingInstance", json!(""));
        }
        other => {
            super::storage::defaults(other, object);
            super::rbac::defaults(other, object);
            super::batch::defaults(other, object);
        }
    }
}

pub(super) fn template(spec: &mut Value) {
    if let Some(template) = spec.get_mut("template").filter(|t| t.is_object()) {
        meta(template);
        pod_spec(entry(template, "spec"));
    }
}

fn pod_spec(spec: &mut serde_json::Map<String, Value>) {
    for (key, value) in [
        ("restartPolicy", json!("Always")),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("securityContext", json!({})),
    ] {
        let slot = spec.entry(key).or_insert(Value::Null);
        if slot.is_null() || *slot == "" {
            *slot = value;
        }
    }
    let host_network = spec.get("hostNetwork") == Some(&json!(true));
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for item in spec
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            container(item, host_network && list == "containers");
        }
    }
    for volume in spec
        .get_mut("volumes")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        volume_source(volume);
    }
}

fn container(container: &mut Value, host_network: bool) {
    if !container.is_object() {
        return;
    }
    let image = text(container, &["image"]).unwrap_or_default();
    let policy = if crate::core::image::tag_is_latest(image) {
        "Always"
    } else {
        "IfNotPresent"
    };
    if text(container, &["imagePullPolicy"]).is_none_or(str::is_empty) {
        container["imagePullPolicy"] = policy.into();
    }
    default(
        container,
        "terminationMessagePath",
        json!("/dev/termination-log"),
    );
    default(container, "terminationMessagePolicy", json!("File"));
    default(container, "resources", json!({}));
    for port in container
        .get_mut("ports")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        default(port, "protocol", json!("TCP"));
        if host_network {
            let same = port["containerPort"].clone();
            default(port, "hostPort", same);
        }
    }
    for env in container
        .get_mut("env")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(field) = env.pointer_mut("/valueFrom/fieldRef") {
            default(field, "apiVersion", json!("v1"));
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let Some(probe) = container.get_mut(probe).filter(|p| p.is_object()) else {
            continue;
        };
        for (key, value) in [
            ("timeoutSeconds", 1),
            ("periodSeconds", 10),
            ("successThreshold", 1),
            ("failureThreshold", 3),
        ] {
            // Upstream's types do not distinguish 0 from absence.
            if probe[key] == 0 {
                probe[key] = Value::Null;
            }
            default(probe, key, json!(value));
        }
        if let Some(http) = probe.get_mut("httpGet").filter(|h| h.is_object()) {
            default(http, "path", json!("/"));
            default(http, "scheme", json!("HTTP"));
        }
        if let Some(grpc) = probe.get_mut("grpc").filter(|g| g.is_object()) {
            default(grpc, "service", json!(""));
        }
    }
    for hook in ["postStart", "preStop"] {
        if let Some(http) = container.pointer_mut(&format!("/lifecycle/{hook}/httpGet")) {
            default(http, "path", json!("/"));
            default(http, "scheme", json!("HTTP"));
        }
    }
}

fn volume_source(volume: &mut Value) {
    let Some(map) = volume.as_object_mut() else {
        return;
    };
    if map.keys().all(|k| k == "name") {
        map.insert("emptyDir".into(), json!({}));
    }
    for kind in ["secret", "configMap", "downwardAPI", "projected"] {
        if let Some(source) = map.get_mut(kind).filter(|s| s.is_object()) {
            default(source, "defaultMode", json!(420));
        }
    }
    if let Some(host) = map.get_mut("hostPath").filter(|s| s.is_object()) {
        default(host, "type", json!(""));
    }
    let field_refs = |items: Option<&mut Value>| {
        for item in items.and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(field) = item.get_mut("fieldRef").filter(|f| f.is_object()) {
                default(field, "apiVersion", json!("v1"));
            }
        }
    };
    field_refs(map.get_mut("downwardAPI").and_then(|d| d.get_mut("items")));
    let sources = map
        .get_mut("projected")
        .and_then(|p| p.get_mut("sources"))
        .and_then(Value::as_array_mut);
    for source in sources.into_iter().flatten() {
        if let Some(token) = source
            .get_mut("serviceAccountToken")
            .filter(|t| t.is_object())
        {
            default(token, "expirationSeconds", json!(3600));
        }
        field_refs(source.pointer_mut("/downwardAPI/items"));
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
    use crate::core::pod::resources::{Side, of_pod_level};
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

fn service(spec: &mut Value) {
    default(spec, "type", json!("ClusterIP"));
    default(spec, "sessionAffinity", json!("None"));
    if spec["type"] != "ExternalName" {
        default(spec, "internalTrafficPolicy", json!("Cluster"));
        default(spec, "ipFamilyPolicy", json!("SingleStack"));
        default(spec, "ipFamilies", json!(["IPv4"]));
    }
    if spec["type"] == "NodePort" || spec["type"] == "LoadBalancer" {
        default(spec, "externalTrafficPolicy", json!("Cluster"));
    }
    for port in spec
        .get_mut("ports")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        default(port, "protocol", json!("TCP"));
        let same = port["port"].clone();
        let target = &port["targetPort"];
        if target.is_null() || *target == 0 || *target == "" {
            port["targetPort"] = same;
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
