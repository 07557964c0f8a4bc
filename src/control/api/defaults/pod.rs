//! Defaults of pods and pod templates (`pkg/apis/core/v1/defaults.go`).

use serde_json::{Value, json};

use crate::api::object::{entry, meta, set_default, text};

/// The defaults of a pod template in `spec`.
pub(in crate::api) fn template(spec: &mut Value) {
    if let Some(template) = spec.get_mut("template").filter(|t| t.is_object()) {
        meta(template);
        pod_spec(entry(template, "spec"));
    }
}

/// The defaults of a pod's `spec`.
pub(super) fn pod_spec(spec: &mut serde_json::Map<String, Value>) {
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
    let policy = if holdfast_core::image::tag_is_latest(image) {
        "Always"
    } else {
        "IfNotPresent"
    };
    if text(container, &["imagePullPolicy"]).is_none_or(str::is_empty) {
        container["imagePullPolicy"] = policy.into();
    }
    set_default(
        container,
        "terminationMessagePath",
        json!("/dev/termination-log"),
    );
    set_default(container, "terminationMessagePolicy", json!("File"));
    set_default(container, "resources", json!({}));
    for port in container
        .get_mut("ports")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        set_default(port, "protocol", json!("TCP"));
        if host_network {
            let same = port["containerPort"].clone();
            set_default(port, "hostPort", same);
        }
    }
    for env in container
        .get_mut("env")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(field) = env.pointer_mut("/valueFrom/fieldRef") {
            set_default(field, "apiVersion", json!("v1"));
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
            set_default(probe, key, json!(value));
        }
        if let Some(http) = probe.get_mut("httpGet").filter(|h| h.is_object()) {
            set_default(http, "path", json!("/"));
            set_default(http, "scheme", json!("HTTP"));
        }
        if let Some(grpc) = probe.get_mut("grpc").filter(|g| g.is_object()) {
            set_default(grpc, "service", json!(""));
        }
    }
    for hook in ["postStart", "preStop"] {
        if let Some(http) = container.pointer_mut(&format!("/lifecycle/{hook}/httpGet")) {
            set_default(http, "path", json!("/"));
            set_default(http, "scheme", json!("HTTP"));
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
            set_default(source, "defaultMode", json!(420));
        }
    }
    if let Some(host) = map.get_mut("hostPath").filter(|s| s.is_object()) {
        set_default(host, "type", json!(""));
    }
    let field_refs = |items: Option<&mut Value>| {
        for item in items.and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(field) = item.get_mut("fieldRef").filter(|f| f.is_object()) {
                set_default(field, "apiVersion", json!("v1"));
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
            set_default(token, "expirationSeconds", json!(3600));
        }
        field_refs(source.pointer_mut("/downwardAPI/items"));
    }
}
