//! The bootstrap roles and bindings (`plugin/pkg/auth/authorizer/rbac/bootstrappolicy/policy.go`).

use serde_json::{Value, json};

use crate::api::object::{list, meta, text};

/// The user with which the apiserver calls the nodes' agents; it has no other permissions.
pub const NODE_CLIENT: &str = "kube-apiserver-kubelet-client";
/// The role of the service proxies, and their group.
const PROXY: &str = "holdfast:proxy";
const PROXIES: &str = "holdfast:proxies";
/// Annotation: `false` excludes a role or binding from reconciliation at start.
const AUTOUPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";

/// Reconciles a stored bootstrap role or binding. `None` if it is up to date or must not be
/// changed. Rules are replaced, so that permissions in excess of the current defaults are
/// removed. Additional subjects of a binding are kept.
#[must_use]
pub fn renewed(stored: &Value, ours: &Value) -> Option<Value> {
    let of = |object: &'_ Value, kind: &str, key: &str| {
        text(object, &["metadata", kind, key]).map(str::to_owned)
    };
    if of(stored, "labels", "kubernetes.io/bootstrapping").as_deref() != Some("rbac-defaults")
        || of(stored, "annotations", AUTOUPDATE).as_deref() == Some("false")
    {
        return None;
    }
    let mut new = stored.clone();
    if ours.get("aggregationRule").is_some() {
        new["aggregationRule"] = ours["aggregationRule"].clone();
    } else if ours.get("rules").is_some() {
        new["rules"] = ours["rules"].clone();
    }
    let mut subjects = list(stored, &["subjects"]).to_vec();
    for subject in list(ours, &["subjects"]) {
        if !subjects.contains(subject) {
            subjects.push(subject.clone());
        }
    }
    if !subjects.is_empty() {
        new["subjects"] = subjects.into();
    }
    for kind in ["labels", "annotations"] {
        let mut all = new["metadata"][kind].clone();
        json_patch::merge(&mut all, &ours["metadata"][kind]);
        meta(&mut new).insert(kind.into(), all);
    }
    (new != *stored).then_some(new)
}

/// The bootstrap roles and bindings: the plural of the kind, and the object.
#[must_use]
pub fn bootstrap() -> Vec<(&'static str, Value)> {
    let mut all = roles();
    all.extend(bindings());
    all.extend(proxy());
    all
}

/// The role of the service proxies and its binding. A proxy reads what services, DNS and network policies are made of, and
/// emits events. It reads neither Secrets nor ConfigMaps.
fn proxy() -> [(&'static str, Value); 2] {
    let metadata =
        json!({"name": PROXY, "labels": labels(&json!({})), "annotations": {AUTOUPDATE: "true"}});
    let read = ["list", "watch"];
    let rules = json!([
        {"apiGroups": [""], "resources": ["services", "nodes", "namespaces", "pods"], "verbs": read},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": read},
        {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": read},
        {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}]);
    let subjects = json!([{"kind": "Group", "name": PROXIES, "apiGroup": super::GROUP}]);
    let role = json!({"apiGroup": super::GROUP, "kind": "ClusterRole", "name": PROXY});
    [
        (
            "clusterroles",
            json!({"metadata": metadata, "rules": rules}),
        ),
        (
            "clusterrolebindings",
            json!({"metadata": metadata, "subjects": subjects, "roleRef": role}),
        ),
    ]
}

fn labels(more: &Value) -> Value {
    let mut labels = json!({"kubernetes.io/bootstrapping": "rbac-defaults"});
    json_patch::merge(&mut labels, more);
    labels
}

fn bindings() -> Vec<(&'static str, Value)> {
    let kept = json!({AUTOUPDATE: "true"});
    let bind = |name: &str, groups: &[&str]| {
        let subjects: Vec<Value> = groups
            .iter()
            .map(|g| json!({"kind": "Group", "name": g, "apiGroup": "rbac.authorization.k8s.io"}))
            .collect();
        (
            "clusterrolebindings",
            json!({"metadata": {"name": name, "labels": labels(&json!({})), "annotations": kept}, "subjects": subjects,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}}),
        )
    };
    vec![
        bind("cluster-admin", &["system:masters"]),
        bind("system:basic-user", &["system:authenticated"]),
        bind("system:discovery", &["system:authenticated"]),
        bind(
            "system:public-info-viewer",
            &["system:authenticated", "system:unauthenticated"],
        ),
        bind("system:monitoring", &["system:monitoring"]),
        bind("system:node-bootstrapper", &["system:bootstrappers"]),
        (
            "clusterrolebindings",
            json!({"metadata": {"name": NODE_CLIENT, "labels": labels(&json!({})), "annotations": kept},
                "subjects": [{"kind": "User", "name": NODE_CLIENT, "apiGroup": super::GROUP}],
                "roleRef": {"apiGroup": super::GROUP, "kind": "ClusterRole", "name": "system:kubelet-api-admin"}}),
        ),
    ]
}

/// The resources of batch/v1, with their subresources.
const JOBS: [&str; 4] = ["cronjobs", "cronjobs/status", "jobs", "jobs/status"];

fn roles() -> Vec<(&'static str, Value)> {
    let kept = json!({AUTOUPDATE: "true"});
    let role = |name: &str, more: Value, rules: Value| {
        (
            "clusterroles",
            json!({"metadata": {"name": name, "labels": labels(&more), "annotations": kept}, "rules": rules}),
        )
    };
    let gather = |name: &str, label: &str| {
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{label}");
        let more = if name == "admin" {
            json!({})
        } else {
            json!({format!("rbac.authorization.k8s.io/aggregate-to-{}", if name == "view" { "edit" } else { "admin" }): "true"})
        };
        (
            "clusterroles",
            json!({"metadata": {"name": name, "labels": labels(&more), "annotations": kept}, "rules": [],
            "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {label: "true"}}]}}),
        )
    };
    let read = json!(["get", "list", "watch"]);
    let write = json!(["create", "delete", "deletecollection", "patch", "update"]);
    let plain = json!([
        "configmaps",
        "endpoints",
        "events",
        "persistentvolumeclaims",
        "pods",
        "pods/log",
        "pods/status",
        "serviceaccounts",
        "services",
        "namespaces"
    ]);
    let workloads = json!([
        "deployments",
        "deployments/scale",
        "deployments/status",
        "replicasets",
        "replicasets/scale",
        "replicasets/status"
    ]);
    let to = |role: &str| json!({format!("rbac.authorization.k8s.io/aggregate-to-{role}"): "true"});
    vec![
        role(
            "cluster-admin",
            json!({}),
            json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}, {"nonResourceURLs": ["*"], "verbs": ["*"]}]),
        ),
        gather("admin", "admin"),
        gather("edit", "edit"),
        gather("view", "view"),
        role(
            "system:aggregate-to-view",
            to("view"),
            json!([
            {"apiGroups": [""], "resources": plain, "verbs": read}, {"apiGroups": ["apps"], "resources": workloads, "verbs": read}, {"apiGroups": ["batch"], "resources": JOBS, "verbs": read},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": read}, {"apiGroups": ["networking.k8s.io"], "resources": ["ingresses", "ingresses/status", "networkpolicies"], "verbs": read}]),
        ),
        role(
            "system:aggregate-to-edit",
            json!({"rbac.authorization.k8s.io/aggregate-to-edit": "true", "rbac.authorization.k8s.io/aggregate-to-admin": "true"}),
            json!([
            {"apiGroups": [""], "resources": ["secrets"], "verbs": read}, {"apiGroups": [""], "resources": ["secrets", "configmaps", "events", "persistentvolumeclaims", "pods", "serviceaccounts", "services"], "verbs": write},
            {"apiGroups": [""], "resources": ["pods/exec", "pods/attach", "pods/portforward", "pods/eviction", "serviceaccounts/token"], "verbs": ["create", "get"]}, {"apiGroups": [""], "resources": ["pods/proxy", "services/proxy"], "verbs": ["create", "delete", "get", "patch", "update"]},
            {"apiGroups": ["apps"], "resources": workloads, "verbs": write}, {"apiGroups": ["batch"], "resources": JOBS, "verbs": write}, {"apiGroups": ["networking.k8s.io"], "resources": ["ingresses", "networkpolicies"], "verbs": write}]),
        ),
        role(
            "system:aggregate-to-admin",
            to("admin"),
            json!([
            {"apiGroups": [""], "resources": ["secrets"], "verbs": read}, {"apiGroups": [""], "resources": plain, "verbs": read}, {"apiGroups": ["apps"], "resources": workloads, "verbs": read}, {"apiGroups": ["batch"], "resources": JOBS, "verbs": read},
            {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"], "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]}]),
        ),
        role(
            "system:basic-user",
            json!({}),
            json!([
            {"apiGroups": ["authorization.k8s.io"], "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"], "verbs": ["create"]},
            {"apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"], "verbs": ["create"]}]),
        ),
        role(
            "system:discovery",
            json!({}),
            json!([{"nonResourceURLs": ["/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz", "/version", "/version/"], "verbs": ["get"]}]),
        ),
        role(
            "system:public-info-viewer",
            json!({}),
            json!([{"nonResourceURLs": ["/healthz", "/livez", "/readyz", "/version", "/version/"], "verbs": ["get"]}]),
        ),
        role(
            "system:monitoring",
            json!({}),
            json!([{"nonResourceURLs": ["/healthz", "/healthz/*", "/livez", "/livez/*", "/metrics", "/metrics/slis", "/readyz", "/readyz/*"], "verbs": ["get"]}]),
        ),
        role(
            "system:node-bootstrapper",
            json!({}),
            json!([{"apiGroups": ["certificates.k8s.io"], "resources": ["certificatesigningrequests"], "verbs": ["create", "get", "list", "watch"]}]),
        ),
        role(
            "system:auth-delegator",
            json!({}),
            json!([
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}, {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]}]),
        ),
        role(
            "system:kubelet-api-admin",
            json!({}),
            json!([
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "proxy"]}, {"apiGroups": [""], "resources": ["nodes/proxy", "nodes/log", "nodes/metrics", "nodes/stats", "nodes/healthz", "nodes/pods", "nodes/configz"], "verbs": ["*"]}]),
        ),
    ]
}
