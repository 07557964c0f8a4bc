//! A snapshot of the tables of all kinds, as `kubectl get -o wide` prints them, followed by the definitions of the columns.

use std::sync::Arc;

use holdfast_control::api::resources::{RESOURCES, Resource};
use holdfast_control::store::{Attrs, Bytes, Change, Expect, Store, Write};
use serde_json::{Value, json};

use crate::server::Server;

const ACCEPT: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

/// A time before now, in a unit that stays the same during the test.
fn ago(minutes: i64) -> String {
    let then = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(minutes);
    let whole = jiff::Timestamp::from_second(then.as_second());
    whole.unwrap().to_string()
}

const DAY: i64 = 24 * 60;

/// Pods in the states that the column Status distinguishes.
fn pods() -> Vec<Value> {
    let of = |name: &str, spec: Value, status: Value| {
        let mut pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c"}, {"name": "d"}]}, "status": status});
        for (key, value) in spec.as_object().unwrap() {
            pod["spec"][key] = value.clone();
        }
        pod
    };
    let container = |state: Value| json!([{"name": "c", "ready": true, "restartCount": 0, "state": {"running": {}}}, {"name": "d", "ready": false, "restartCount": 3, "state": state, "lastState": {"terminated": {"exitCode": 1, "finishedAt": ago(30)}}}]);
    let waiting = |reason: &str| container(json!({"waiting": {"reason": reason}}));
    let init = json!({"initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}]});
    let mut terminating = of("terminating", json!({}), json!({"phase": "Running"}));
    terminating["metadata"]["deletionTimestamp"] = ago(1).into();
    vec![
        of(
            "completed",
            json!({"nodeName": "n1"}),
            json!({"phase": "Succeeded", "podIP": "10.244.0.7", "containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}),
        ),
        of(
            "crashing",
            json!({"nodeName": "n1"}),
            json!({"phase": "Running", "podIP": "10.244.0.8", "containerStatuses": waiting("CrashLoopBackOff")}),
        ),
        of(
            "evicted",
            json!({}),
            json!({"phase": "Failed", "reason": "Evicted"}),
        ),
        of(
            "gated",
            json!({}),
            json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}),
        ),
        of(
            "initializing",
            init.clone(),
            json!({"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"running": {}}}]}),
        ),
        of(
            "init-failed",
            init,
            json!({"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 2}}}]}),
        ),
        of(
            "pending",
            json!({}),
            json!({"phase": "Pending", "nominatedNodeName": "n2"}),
        ),
        of(
            "pulling",
            json!({"nodeName": "n1"}),
            json!({"phase": "Pending", "containerStatuses": waiting("ImagePullBackOff")}),
        ),
        terminating,
    ]
}

fn nodes() -> Vec<Value> {
    let info = json!({"kubeletVersion": "v1.36.0", "osImage": "Debian GNU/Linux 13 (trixie)", "kernelVersion": "6.12.0", "architecture": "amd64", "containerRuntimeVersion": "containerd://2.1.4"});
    let ready = |status: &str| json!([{"type": "Ready", "status": status}]);
    vec![
        json!({"metadata": {"name": "n1", "labels": {"node-role.kubernetes.io/control-plane": ""}}, "status": {"conditions": ready("True"), "nodeInfo": info, "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}, {"type": "ExternalIP", "address": "203.0.113.1"}]}}),
        json!({"metadata": {"name": "n2"}, "spec": {"unschedulable": true}, "status": {"conditions": ready("False"), "nodeInfo": info, "addresses": [{"type": "InternalIP", "address": "192.0.2.2"}]}}),
        json!({"metadata": {"name": "n3"}, "status": {"conditions": ready("Unknown"), "nodeInfo": info}}),
        json!({"metadata": {"name": "n4"}}),
    ]
}

fn services() -> Vec<Value> {
    let of = |name: &str, spec: Value| json!({"metadata": {"name": name}, "spec": spec});
    let ports = json!([{"port": 80, "protocol": "TCP", "nodePort": 30_080}, {"port": 53, "protocol": "UDP"}]);
    vec![
        of(
            "alias",
            json!({"type": "ExternalName", "externalName": "db.example"}),
        ),
        of(
            "balanced",
            json!({"type": "LoadBalancer", "clusterIP": "10.96.0.9", "ports": ports}),
        ),
        of(
            "headless",
            json!({"type": "ClusterIP", "clusterIP": "None", "externalIPs": ["203.0.113.9"], "selector": {"app": "web"}}),
        ),
        of(
            "web",
            json!({"type": "NodePort", "clusterIP": "10.96.0.8", "ports": ports, "selector": {"app": "web", "tier": "front"}}),
        ),
    ]
}

/// Objects that run pods.
fn workloads(kind: &str) -> Vec<Value> {
    let template = json!({"spec": {"containers": [{"name": "c", "image": "web:1"}, {"name": "log", "image": "log:2"}]}});
    let selector = json!({"matchLabels": {"app": "web"}});
    let spec = |more: Value| {
        let mut spec = json!({"selector": selector, "template": template});
        for (key, value) in more.as_object().unwrap() {
            spec[key] = value.clone();
        }
        spec
    };
    let named = |name: &str, spec: Value, status: Value| json!({"metadata": {"name": name}, "spec": spec, "status": status});
    match kind {
        "Deployment" => vec![named(
            "web",
            spec(json!({"replicas": 3})),
            json!({"replicas": 4, "readyReplicas": 2, "updatedReplicas": 1, "availableReplicas": 2}),
        )],
        "ReplicaSet" => vec![named(
            "web-1",
            spec(json!({"replicas": 3})),
            json!({"replicas": 3, "readyReplicas": 2}),
        )],
        "Job" => vec![
            named(
                "done",
                spec(json!({"completions": 2})),
                json!({"succeeded": 2, "startTime": "2026-11-20T12:00:00Z", "completionTime": "2026-11-20T12:02:05Z", "conditions": [{"type": "Complete", "status": "True"}]}),
            ),
            named(
                "running",
                spec(json!({"parallelism": 2})),
                json!({"startTime": ago(30)}),
            ),
            named(
                "suspended",
                spec(json!({"completions": 1, "suspend": true})),
                json!({"conditions": [{"type": "Suspended", "status": "True"}]}),
            ),
        ],
        _ => vec![named(
            "nightly",
            json!({"schedule": "0 3 * * *", "timeZone": "Europe/Berlin", "suspend": false, "jobTemplate": {"spec": spec(json!({}))}}),
            json!({"active": [{}], "lastScheduleTime": ago(5 * DAY)}),
        )],
    }
}

fn storage(kind: &str) -> Vec<Value> {
    match kind {
        "PersistentVolumeClaim" => vec![
            json!({"metadata": {"name": "bound"}, "spec": {"volumeName": "pv1", "storageClassName": "fast", "volumeMode": "Filesystem"}, "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce", "ReadOnlyMany"]}}),
            json!({"metadata": {"name": "pending"}, "spec": {"storageClassName": "fast", "volumeAttributesClassName": "gold", "volumeMode": "Block"}, "status": {"phase": "Pending"}}),
        ],
        "PersistentVolume" => vec![
            json!({"metadata": {"name": "pv1"}, "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany", "ReadWriteOncePod"], "persistentVolumeReclaimPolicy": "Delete", "claimRef": {"namespace": "default", "name": "bound"}, "storageClassName": "fast", "volumeMode": "Filesystem"}, "status": {"phase": "Bound"}}),
        ],
        "StorageClass" => vec![
            json!({"metadata": {"name": "fast", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}, "provisioner": "d.example", "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer", "allowVolumeExpansion": true}),
            json!({"metadata": {"name": "slow"}, "provisioner": "d.example"}),
        ],
        "CSIDriver" => vec![
            json!({"metadata": {"name": "d.example"}, "spec": {"attachRequired": true, "podInfoOnMount": false, "storageCapacity": true, "requiresRepublish": true, "tokenRequests": [{"audience": "a"}, {"audience": "b"}], "volumeLifecycleModes": ["Persistent", "Ephemeral"]}}),
        ],
        "CSINode" => vec![
            json!({"metadata": {"name": "n1"}, "spec": {"drivers": [{"name": "d.example"}, {"name": "e.example"}]}}),
        ],
        _ => vec![
            json!({"metadata": {"name": "csi-1"}, "spec": {"attacher": "d.example", "nodeName": "n1", "source": {"persistentVolumeName": "pv1"}}, "status": {"attached": true}}),
        ],
    }
}

fn certificates(kind: &str) -> Vec<Value> {
    match kind {
        "CertificateSigningRequest" => vec![
            json!({"metadata": {"name": "issued"}, "spec": {"signerName": "kubernetes.io/kubelet-serving", "username": "system:node:n1", "expirationSeconds": 86_400}, "status": {"certificate": "x", "conditions": [{"type": "Approved"}]}}),
            json!({"metadata": {"name": "pending"}, "spec": {"signerName": "kubernetes.io/kubelet-serving", "username": "system:node:n2"}}),
        ],
        "ClusterTrustBundle" => vec![
            json!({"metadata": {"name": "any"}, "spec": {}}),
            json!({"metadata": {"name": "signed"}, "spec": {"signerName": "s.example/ca"}}),
        ],
        _ => vec![
            json!({"metadata": {"name": "r"}, "spec": {"podName": "web-1", "serviceAccountName": "default", "nodeName": "n1", "signerName": "s.example/ca"}, "status": {"conditions": [{"type": "Issued"}]}}),
        ],
    }
}

fn networking(kind: &str) -> Vec<Value> {
    match kind {
        "Ingress" => vec![
            json!({"metadata": {"name": "any"}, "spec": {}, "status": {"loadBalancer": {}}}),
            json!({"metadata": {"name": "web"}, "spec": {"ingressClassName": "edge", "tls": [{}], "rules": [{"host": "a.example"}, {"host": "*.b.example"}, {}]},
                "status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.2"}, {"hostname": "lb.example"}, {"ip": "10.0.0.1"}]}}}),
        ],
        "IngressClass" => vec![
            json!({"metadata": {"name": "edge", "annotations": {"ingressclass.kubernetes.io/is-default-class": "true"}}, "spec": {"controller": "c.example/edge", "parameters": {"apiGroup": "c.example", "kind": "Parameters", "name": "p", "scope": "Cluster"}}}),
            json!({"metadata": {"name": "plain"}, "spec": {"controller": "c.example/edge"}}),
        ],
        "ServiceCIDR" => vec![
            json!({"metadata": {"name": "more"}, "spec": {"cidrs": ["10.97.0.0/16", "fd00::/112"]}}),
        ],
        _ => vec![
            json!({"metadata": {"name": "10.96.0.7"}, "spec": {"parentRef": {"resource": "services", "namespace": "default", "name": "web"}}}),
            json!({"metadata": {"name": "10.96.0.8"}, "spec": {"parentRef": {"group": "G.example", "resource": "things", "name": "a"}}}),
        ],
    }
}

fn events() -> Vec<Value> {
    vec![
        json!({"metadata": {"name": "pulled"}, "involvedObject": {"kind": "Pod", "name": "web-1", "fieldPath": "spec.containers{c}"}, "type": "Normal", "reason": "Pulled", "message": "Successfully pulled image", "source": {"component": "kubelet", "host": "n1"}, "firstTimestamp": ago(5 * DAY), "lastTimestamp": ago(30), "count": 7}),
        json!({"metadata": {"name": "scheduled"}, "involvedObject": {"kind": "Pod", "name": "web-1"}, "type": "Warning", "reason": "FailedScheduling", "message": "no node fits", "reportingComponent": "default-scheduler", "eventTime": ago(30)}),
    ]
}

/// The objects of a kind.
fn objects(kind: &str) -> Vec<Value> {
    let named = json!({"metadata": {"name": "a"}});
    let endpoints: Vec<Value> = (1..=5)
        .map(|i| json!({"ip": format!("10.244.0.{i}"), "addresses": [format!("10.244.0.{i}")]}))
        .collect();
    let binding = json!({"metadata": {"name": "a"}, "roleRef": {"kind": "ClusterRole", "name": "view"}, "subjects": [{"kind": "User", "name": "eve"}, {"kind": "Group", "name": "dev"}, {"kind": "ServiceAccount", "name": "default", "namespace": "other"}]});
    match kind {
        "Pod" => pods(),
        "Node" => nodes(),
        "Service" => services(),
        "Event" => events(),
        "Deployment" | "ReplicaSet" | "Job" | "CronJob" => workloads(kind),
        "PersistentVolumeClaim"
        | "PersistentVolume"
        | "StorageClass"
        | "CSIDriver"
        | "CSINode"
        | "VolumeAttachment" => storage(kind),
        "CertificateSigningRequest" | "ClusterTrustBundle" | "PodCertificateRequest" => {
            certificates(kind)
        }
        "Namespace" => vec![json!({"metadata": {"name": "a"}, "status": {"phase": "Active"}})],
        "ConfigMap" => vec![
            json!({"metadata": {"name": "a"}, "data": {"k": "v", "l": "w"}, "binaryData": {"m": ""}}),
        ],
        "Secret" => {
            vec![json!({"metadata": {"name": "a"}, "type": "Opaque", "data": {"k": "dg=="}})]
        }
        "RuntimeClass" => vec![json!({"metadata": {"name": "a"}, "handler": "runc"})],
        "PriorityClass" => vec![
            json!({"metadata": {"name": "a"}, "value": 1000, "globalDefault": true, "preemptionPolicy": "Never"}),
        ],
        "Lease" => vec![json!({"metadata": {"name": "a"}, "spec": {"holderIdentity": "n1"}})],
        "Endpoints" => vec![
            json!({"metadata": {"name": "a"}, "subsets": [{"addresses": endpoints, "ports": [{"port": 80}]}]}),
        ],
        "EndpointSlice" => vec![
            json!({"metadata": {"name": "a"}, "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 80}, {"port": 443}]}),
        ],
        "NetworkPolicy" => vec![
            json!({"metadata": {"name": "all"}, "spec": {"podSelector": {}}}),
            json!({"metadata": {"name": "web"}, "spec": {"podSelector": {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "In", "values": ["a", "b"]}]}}}),
        ],
        "Ingress" | "IngressClass" | "ServiceCIDR" | "IPAddress" => networking(kind),
        "RoleBinding" | "ClusterRoleBinding" => vec![binding],
        _ => vec![named],
    }
}

/// Writes an object without validation, so that it has any status.
async fn store(server: &Server, resource: &'static Resource, mut object: Value, created: &str) {
    object["kind"] = resource.kind.into();
    object["apiVersion"] = resource.api_version().into();
    object["metadata"]["creationTimestamp"] = created.into();
    let namespace = resource.namespaced.then_some("default");
    if let Some(namespace) = namespace {
        object["metadata"]["namespace"] = namespace.into();
    }
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    let write = Write {
        key: resource.key(namespace, &name),
        expect: Expect::Absent,
        requires: None,
        change: Change::Put,
        render: Box::new(move |_| Bytes::from(object.to_string())),
        attrs: Arc::new(Attrs::default()),
    };
    server.0.store().write(write).await.unwrap();
}

fn text(cell: &Value) -> String {
    cell.as_str()
        .map_or_else(|| cell.to_string(), str::to_owned)
}

/// The table as kubectl prints it, and the definitions of its columns.
fn printed(table: &Value) -> String {
    let columns = table["columnDefinitions"].as_array().unwrap();
    let header = columns.iter().map(|c| text(&c["name"]).to_uppercase());
    let mut rows: Vec<Vec<String>> = vec![header.collect()];
    for row in table["rows"].as_array().unwrap() {
        let cells = row["cells"].as_array().unwrap();
        assert_eq!(cells.len(), columns.len(), "{row}");
        rows.push(cells.iter().map(text).collect());
    }
    let widths: Vec<usize> = (0..columns.len())
        .map(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap())
        .collect();
    let mut printed = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths);
        let cells: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        printed.push_str(cells.join("   ").trim_end());
        printed.push('\n');
    }
    let definitions = columns.iter().map(|column| {
        let is_wide = column["priority"] != 0;
        let wide = if is_wide { " (wide)" } else { "" };
        format!("{}: {}{wide}", text(&column["name"]), text(&column["type"]))
    });
    let definitions: Vec<String> = definitions.collect();
    printed.push_str(&format!("columns: {}\n", definitions.join(", ")));
    printed
}

async fn get(server: &Server, url: &str) -> Value {
    let mut request = Server::request("GET", url, "", vec![]);
    request.accept = ACCEPT.into();
    let table = server.send(request).await.body;
    assert_eq!(table["kind"], "Table", "{url}: {table}");
    table
}

#[tokio::test]
async fn each_kind_has_a_table() {
    let server = Server::over(Store::in_memory());
    let created = ago(5 * DAY);
    let mut all = String::new();
    for resource in RESOURCES {
        for object in objects(resource.kind) {
            store(&server, resource, object, &created).await;
        }
        let root = if resource.group.is_empty() {
            "api"
        } else {
            "apis"
        };
        let (version, plural) = (resource.api_version(), resource.plural);
        let table = get(&server, &format!("/{root}/{version}/{plural}")).await;
        all.push_str(&format!("# {}\n{}\n", resource.kind, printed(&table)));
    }
    let scale = "/apis/apps/v1/namespaces/default/deployments/web/scale";
    let table = get(&server, scale).await;
    all.push_str(&format!("# Scale\n{}", printed(&table)));
    insta::assert_snapshot!("tables", all.replace(&created, "2026-11-20T12:00:00Z"));
}
