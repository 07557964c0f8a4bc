//! Tables for `kubectl get` (`pkg/printers/internalversion/printers.go`).

use std::collections::HashSet;

use serde_json::{Value, json};

use super::columns::{AGE, Column, NAME, age_of, pairs, workload};
use super::object::{at, list, text};
use super::resources::Resource;

fn columns(kind: &str) -> &'static [Column] {
    match kind {
        "Pod" => &[
            NAME,
            ("Ready", "string", 0),
            ("Status", "string", 0),
            ("Restarts", "string", 0),
            AGE,
            ("IP", "string", 1),
            ("Node", "string", 1),
            ("Nominated Node", "string", 1),
            ("Readiness Gates", "string", 1),
        ],
        "Node" => &[
            NAME,
            ("Status", "string", 0),
            ("Roles", "string", 0),
            AGE,
            ("Version", "string", 0),
            ("Internal-IP", "string", 1),
            ("External-IP", "string", 1),
            ("OS-Image", "string", 1),
            ("Kernel-Version", "string", 1),
            ("Container-Runtime", "string", 1),
        ],
        "Deployment" => &[
            NAME,
            ("Ready", "string", 0),
            ("Up-to-date", "string", 0),
            ("Available", "string", 0),
            AGE,
            ("Containers", "string", 1),
            ("Images", "string", 1),
            ("Selector", "string", 1),
        ],
        "ReplicaSet" => &[
            NAME,
            ("Desired", "integer", 0),
            ("Current", "integer", 0),
            ("Ready", "integer", 0),
            AGE,
            ("Containers", "string", 1),
            ("Images", "string", 1),
            ("Selector", "string", 1),
        ],
        "Service" => &[
            NAME,
            ("Type", "string", 0),
            ("Cluster-IP", "string", 0),
            ("External-IP", "string", 0),
            ("Port(s)", "string", 0),
            AGE,
            ("Selector", "string", 1),
        ],
        "Namespace" => &[NAME, ("Status", "string", 0), AGE],
        "ConfigMap" => &[NAME, ("Data", "string", 0), AGE],
        "Secret" => &[NAME, ("Type", "string", 0), ("Data", "string", 0), AGE],
        "ServiceAccount" => &[NAME, AGE],
        "RuntimeClass" => &[NAME, ("Handler", "string", 0), AGE],
        "PriorityClass" => &[
            NAME,
            ("Value", "integer", 0),
            ("Global-Default", "boolean", 0),
            AGE,
            ("PreemptionPolicy", "string", 0),
        ],
        "Lease" => &[NAME, ("Holder", "string", 0), AGE],
        "Endpoints" => &[NAME, ("Endpoints", "string", 0), AGE],
        "NetworkPolicy" => &[NAME, ("Pod-Selector", "string", 0), AGE],
        "EndpointSlice" => &[
            NAME,
            ("AddressType", "string", 0),
            ("Ports", "string", 0),
            ("Endpoints", "string", 0),
            AGE,
        ],
        "Event" => &[
            ("Last Seen", "string", 0),
            ("Type", "string", 0),
            ("Reason", "string", 0),
            ("Object", "string", 0),
            ("Subobject", "string", 1),
            ("Source", "string", 1),
            ("Message", "string", 0),
            ("First Seen", "string", 1),
            ("Count", "string", 1),
            ("Name", "string", 1),
        ],
        other => super::storage::columns(other)
            .or_else(|| super::certificates::columns(other))
            .or_else(|| super::rbac::columns(other))
            .or_else(|| super::batch::columns(other))
            .or_else(|| super::networking::columns(other))
            .unwrap_or(&[NAME, ("Created At", "date", 0)]),
    }
}

/// The column definitions of a kind.
#[must_use]
pub fn definitions(resource: &Resource) -> Value {
    columns(resource.kind).iter().map(definition).collect()
}

fn definition((name, kind, priority): &Column) -> Value {
    json!({"name": name, "type": kind, "format": if *name == "Name" { "name" } else { "" }, "description": name, "priority": priority})
}

/// The Table of an `autoscaling/v1` Scale.
#[must_use]
pub(crate) fn of_scale(scale: &Value, include: Option<&str>, now: jiff::Timestamp) -> Value {
    let columns: [Column; 4] = [
        NAME,
        ("Desired", "integer", 0),
        ("Available", "integer", 0),
        AGE,
    ];
    let columns: Vec<Value> = columns.iter().map(definition).collect();
    let cells = [
        Value::from(super::object::name(scale)),
        scale["spec"]["replicas"].clone(),
        scale["status"]["replicas"].clone(),
        age_of(text(scale, &["metadata", "creationTimestamp"]), now).into(),
    ];
    json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]},
        "columnDefinitions": columns, "rows": [{"cells": cells, "object": embedded(scale, include)}]})
}

/// The object that a row contains.
fn embedded(object: &Value, include: Option<&str>) -> Value {
    match include {
        Some("None") => Value::Null,
        Some("Object") => object.clone(),
        _ => partial(object),
    }
}

/// Builds one row. `include` is the `includeObject` parameter.
#[must_use]
pub fn row(
    resource: &Resource,
    object: &Value,
    include: Option<&str>,
    now: jiff::Timestamp,
) -> Value {
    let mut row =
        json!({"cells": cells(resource.kind, object, now), "object": embedded(object, include)});
    if let Some(phase @ ("Succeeded" | "Failed")) = (resource.kind == "Pod")
        .then(|| text(object, &["status", "phase"]))
        .flatten()
    {
        row["conditions"] = json!([{"type": "Completed", "status": "True", "reason": phase}]);
    }
    row
}

/// The `PartialObjectMetadata` of an object.
#[must_use]
pub fn partial(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

fn cells(kind: &str, object: &Value, now: jiff::Timestamp) -> Vec<Value> {
    let name = super::object::name(object);
    let age = age_of(text(object, &["metadata", "creationTimestamp"]), now);
    let or = |value: Option<&str>, other: &str| {
        Value::from(value.filter(|v| !v.is_empty()).unwrap_or(other))
    };
    let count = |path: &[&str]| at(object, path).and_then(Value::as_i64).unwrap_or(0);
    match kind {
        "Pod" => pod(object, &age, now),
        "Node" => node(object, &age),
        "Job" => super::batch::cells(object, &age, now),
        "CronJob" => super::batch::cron_cells(object, &age, now),
        "Deployment" => {
            let ready = format!(
                "{}/{}",
                count(&["status", "readyReplicas"]),
                count(&["spec", "replicas"])
            );
            let (containers, images, selector) = workload(object);
            vec![
                name.into(),
                ready.into(),
                count(&["status", "updatedReplicas"]).into(),
                count(&["status", "availableReplicas"]).into(),
                age.into(),
                containers,
                images,
                selector,
            ]
        }
        "ReplicaSet" => {
            let (containers, images, selector) = workload(object);
            vec![
                name.into(),
                count(&["spec", "replicas"]).into(),
                count(&["status", "replicas"]).into(),
                count(&["status", "readyReplicas"]).into(),
                age.into(),
                containers,
                images,
                selector,
            ]
        }
        "Service" => {
            let kind = text(object, &["spec", "type"]).unwrap_or("ClusterIP");
            let ports: Vec<String> = list(object, &["spec", "ports"])
                .iter()
                .map(|p| {
                    let node = p["nodePort"]
                        .as_i64()
                        .filter(|n| *n > 0)
                        .map_or(String::new(), |n| format!(":{n}"));
                    format!(
                        "{}{node}/{}",
                        p["port"],
                        p["protocol"].as_str().unwrap_or("TCP")
                    )
                })
                .collect();
            let ports = if ports.is_empty() {
                "<none>".into()
            } else {
                ports.join(",")
            };
            vec![
                name.into(),
                kind.into(),
                or(text(object, &["spec", "clusterIP"]), "<none>"),
                external(object, kind).into(),
                ports.into(),
                age.into(),
                pairs(at(object, &["spec", "selector"])).into(),
            ]
        }
        "Namespace" => vec![
            name.into(),
            or(text(object, &["status", "phase"]), ""),
            age.into(),
        ],
        "ConfigMap" => {
            let keys = [&object["data"], &object["binaryData"]]
                .iter()
                .filter_map(|d| d.as_object())
                .map(serde_json::Map::len)
                .sum::<usize>();
            vec![name.into(), keys.into(), age.into()]
        }
        "Secret" => {
            let keys = object["data"].as_object().map_or(0, serde_json::Map::len);
            vec![
                name.into(),
                or(text(object, &["type"]), ""),
                keys.into(),
                age.into(),
            ]
        }
        "ServiceAccount" => vec![name.into(), age.into()],
        "RuntimeClass" => vec![name.into(), or(text(object, &["handler"]), ""), age.into()],
        "PriorityClass" => vec![
            name.into(),
            object["value"].clone(),
            (object["globalDefault"] == true).into(),
            age.into(),
            or(text(object, &["preemptionPolicy"]), "PreemptLowerPriority"),
        ],
        "Lease" => vec![
            name.into(),
            or(text(object, &["spec", "holderIdentity"]), ""),
            age.into(),
        ],
        "Endpoints" => vec![name.into(), endpoints(object).into(), age.into()],
        "EndpointSlice" => slice(object, &age),
        "NetworkPolicy" => {
            let selector = at(object, &["spec", "podSelector"]);
            vec![
                name.into(),
                super::policies::selector(selector).into(),
                age.into(),
            ]
        }
        "Event" => event(object, now),
        other if super::storage::columns(other).is_some() => {
            super::storage::cells(other, object, &age)
        }
        other if super::networking::columns(other).is_some() => {
            super::networking::cells(other, object, &age)
        }
        other if super::rbac::columns(other).is_some() => super::rbac::cells(other, object, &age),
        other if super::certificates::columns(other).is_some() => {
            super::certificates::cells(other, object, &age)
        }
        _ => vec![name.into(), object["metadata"]["creationTimestamp"].clone()],
    }
}

fn endpoints(object: &Value) -> String {
    let mut all: Vec<String> = vec![];
    for subset in list(object, &["subsets"]) {
        for address in list(subset, &["addresses"]) {
            let ip = address["ip"].as_str().unwrap_or_default();
            let ports = list(subset, &["ports"]).iter();
            let ports = ports.filter_map(|port| port["port"].as_i64());
            all.extend(ports.map(|port| format!("{ip}:{port}")));
        }
    }
    shorten(&all)
}

fn slice(object: &Value, age: &str) -> Vec<Value> {
    let unset = |all: &[String]| match all {
        [] => "<unset>".to_owned(),
        all => shorten(all),
    };
    let ports = list(object, &["ports"]).iter();
    let ports = ports.map(|port| match port["port"].as_i64() {
        Some(number) => number.to_string(),
        None => text(port, &["name"]).unwrap_or("*").to_owned(),
    });
    let ends = list(object, &["endpoints"]).iter();
    let ends = ends.filter_map(|e| e["addresses"][0].as_str().map(Into::into));
    vec![
        super::object::name(object).into(),
        text(object, &["addressType"]).unwrap_or_default().into(),
        unset(&ports.collect::<Vec<_>>()).into(),
        unset(&ends.collect::<Vec<_>>()).into(),
        age.into(),
    ]
}

/// The external addresses of a service.
fn external(service: &Value, kind: &str) -> String {
    if kind == "ExternalName" {
        return text(service, &["spec", "externalName"])
            .unwrap_or_default()
            .to_owned();
    }
    let given = list(service, &["status", "loadBalancer", "ingress"]).iter();
    let given = given.filter_map(|i| text(i, &["ip"]).or(text(i, &["hostname"])));
    let own = list(service, &["spec", "externalIPs"]).iter();
    let own = own.filter_map(Value::as_str);
    let balanced = kind == "LoadBalancer";
    let all: Vec<&str> = given.filter(|_| balanced).chain(own).collect();
    match (all.is_empty(), balanced) {
        (false, _) => all.join(","),
        (true, true) => "<pending>".into(),
        (true, false) => "<none>".into(),
    }
}

fn shorten(items: &[String]) -> String {
    match items.len() {
        0 => "<none>".into(),
        n if n > 3 => format!("{} + {} more...", items[..3].join(","), n - 3),
        _ => items.join(","),
    }
}

fn event(object: &Value, now: jiff::Timestamp) -> Vec<Value> {
    let first = text(object, &["firstTimestamp"]).or(text(object, &["eventTime"]));
    let last = text(object, &["series", "lastObservedTime"])
        .or(text(object, &["lastTimestamp"]))
        .or(first);
    let involved = format!(
        "{}/{}",
        text(object, &["involvedObject", "kind"])
            .unwrap_or_default()
            .to_lowercase(),
        text(object, &["involvedObject", "name"]).unwrap_or_default()
    );
    let source = text(object, &["source", "component"])
        .or(text(object, &["reportingComponent"]))
        .unwrap_or_default();
    let source = match text(object, &["source", "host"]) {
        Some(host) => format!("{source}, {host}"),
        None => source.to_owned(),
    };
    vec![
        age_of(last, now).into(),
        object["type"].clone(),
        object["reason"].clone(),
        involved.into(),
        text(object, &["involvedObject", "fieldPath"])
            .unwrap_or_default()
            .into(),
        source.into(),
        text(object, &["message"]).unwrap_or_default().trim().into(),
        age_of(first, now).into(),
        at(object, &["count"]).cloned().unwrap_or(json!(1)),
        super::object::name(object).into(),
    ]
}

fn node(object: &Value, age: &str) -> Vec<Value> {
    let ready = list(object, &["status", "conditions"])
        .iter()
        .find(|c| c["type"] == "Ready");
    let mut status = match ready.and_then(|c| c["status"].as_str()) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".into(),
        None => "Unknown".into(),
    };
    if object["spec"]["unschedulable"] == true {
        status.push_str(",SchedulingDisabled");
    }
    let labels = at(object, &["metadata", "labels"]).and_then(Value::as_object);
    let roles: Vec<&str> = labels
        .into_iter()
        .flat_map(|l| l.keys())
        .filter_map(|k| k.strip_prefix("node-role.kubernetes.io/"))
        .collect();
    let roles = if roles.is_empty() {
        "<none>".into()
    } else {
        roles.join(",")
    };
    let address = |kind: &str| {
        let found = list(object, &["status", "addresses"])
            .iter()
            .find(|a| a["type"] == kind);
        found
            .and_then(|a| a["address"].as_str())
            .unwrap_or("<none>")
    };
    let info = |key: &str| text(object, &["status", "nodeInfo", key]).unwrap_or("<unknown>");
    vec![
        super::object::name(object).into(),
        status.into(),
        roles.into(),
        age.into(),
        info("kubeletVersion").into(),
        address("InternalIP").into(),
        address("ExternalIP").into(),
        info("osImage").into(),
        format!("{} ({})", info("kernelVersion"), info("architecture")).into(),
        info("containerRuntimeVersion").into(),
    ]
}

fn pod(object: &Value, age: &str, now: jiff::Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    let sidecars = list(spec, &["initContainers"])
        .iter()
        .filter(|c| c["restartPolicy"] == "Always")
        .filter_map(|c| c["name"].as_str());
    let sidecars: HashSet<&str> = sidecars.collect();
    let statuses = list(object, &["status", "containerStatuses"]);
    let init = list(object, &["status", "initContainerStatuses"]);
    let is_sidecar = |s: &&Value| s["name"].as_str().is_some_and(|n| sidecars.contains(n));
    let counted: Vec<&Value> = statuses
        .iter()
        .chain(init.iter().filter(is_sidecar))
        .collect();
    let ready = counted.iter().filter(|s| s["ready"] == true).count();
    let total = list(spec, &["containers"]).len() + sidecars.len();
    let restarts: i64 = counted
        .iter()
        .filter_map(|s| s["restartCount"].as_i64())
        .sum();
    let last = counted
        .iter()
        .filter_map(|s| text(s, &["lastState", "terminated", "finishedAt"]))
        .max();
    let restarts = match last {
        Some(at) if restarts > 0 => format!("{restarts} ({} ago)", age_of(Some(at), now)),
        _ => restarts.to_string(),
    };
    let or_none = |path: &[&str]| {
        text(object, path)
            .filter(|t| !t.is_empty())
            .unwrap_or("<none>")
    };
    vec![
        super::object::name(object).into(),
        format!("{ready}/{total}").into(),
        pod_status(object, &sidecars).into(),
        restarts.into(),
        age.into(),
        or_none(&["status", "podIP"]).into(),
        or_none(&["spec", "nodeName"]).into(),
        or_none(&["status", "nominatedNodeName"]).into(),
        "<none>".into(),
    ]
}

fn pod_status(object: &Value, sidecars: &HashSet<&str>) -> String {
    let phase = text(object, &["status", "phase"]).unwrap_or("Unknown");
    let own = text(object, &["status", "reason"]).filter(|r| !r.is_empty());
    let mut shown = own.unwrap_or(phase).to_owned();
    let condition = |kind: &str| {
        list(object, &["status", "conditions"])
            .iter()
            .find(|c| c["type"] == kind)
    };
    if condition("PodScheduled").is_some_and(|c| c["reason"] == "SchedulingGated") {
        shown = "SchedulingGated".into();
    }
    let exit = |terminated: &Value| match (
        terminated["reason"].as_str().filter(|r| !r.is_empty()),
        terminated["signal"].as_i64().filter(|s| *s > 0),
    ) {
        (Some(reason), _) => reason.to_owned(),
        (None, Some(signal)) => format!("Signal:{signal}"),
        (None, None) => format!("ExitCode:{}", terminated["exitCode"]),
    };
    let init = list(object, &["status", "initContainerStatuses"]);
    let total = list(object, &["spec", "initContainers"]).len();
    let mut initializing = false;
    for (i, status) in init.iter().enumerate() {
        let state = &status["state"];
        let sidecar = status["name"]
            .as_str()
            .is_some_and(|n| sidecars.contains(n));
        if state["terminated"]["exitCode"] == 0 || (sidecar && status["started"] == true) {
            continue;
        }
        shown = if state["terminated"].is_object() {
            format!("Init:{}", exit(&state["terminated"]))
        } else {
            match text(state, &["waiting", "reason"]) {
                Some(reason) if !reason.is_empty() && reason != "PodInitializing" => {
                    format!("Init:{reason}")
                }
                _ => format!("Init:{i}/{total}"),
            }
        };
        initializing = true;
        break;
    }
    if !initializing || condition("Initialized").is_some_and(|c| c["status"] == "True") {
        let mut running = false;
        for status in list(object, &["status", "containerStatuses"]).iter().rev() {
            let state = &status["state"];
            if let Some(reason) = text(state, &["waiting", "reason"]).filter(|r| !r.is_empty()) {
                shown = reason.to_owned();
            } else if state["terminated"].is_object() {
                shown = exit(&state["terminated"]);
            } else if status["ready"] == true && state["running"].is_object() {
                running = true;
            }
        }
        if shown == "Completed" && running {
            let ready = condition("Ready").is_some_and(|c| c["status"] == "True");
            shown = if ready { "Running" } else { "NotReady" }.into();
        }
    }
    if super::object::is_deleting(object) && !matches!(phase, "Succeeded" | "Failed") {
        shown = if own == Some("NodeLost") {
            "Unknown"
        } else {
            "Terminating"
        }
        .into();
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_formatted_like_kubectls() {
        let now: jiff::Timestamp = "2026-11-20T12:00:00Z".parse().expect("a time");
        let ago = |s: i64| {
            age_of(
                Some(&(now - jiff::SignedDuration::from_secs(s)).to_string()),
                now,
            )
        };
        let cases = [
            (0, "0s"),
            (119, "119s"),
            (125, "2m5s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (12_000, "3h20m"),
            (86_400, "24h"),
            (180_000, "2d2h"),
            (864_000, "10d"),
        ];
        for (seconds, text) in cases {
            assert_eq!(ago(seconds), text);
        }
        assert_eq!(age_of(None, now), "<unknown>");
    }

    #[test]
    fn a_pods_status_column_equals_kubectls() {
        let cases = [
            (json!({"status": {"phase": "Pending"}}), "Pending"),
            (
                json!({"status": {"phase": "Running", "containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}}),
                "CrashLoopBackOff",
            ),
            (
                json!({"spec": {"initContainers": [{"name": "i"}]}, "status": {"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"running": {}}}]}}),
                "Init:0/1",
            ),
            (
                json!({"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Running"}}),
                "Terminating",
            ),
            (
                json!({"status": {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}}),
                "Completed",
            ),
            (
                json!({"status": {"phase": "Failed", "reason": "Evicted"}}),
                "Evicted",
            ),
        ];
        for (pod, expected) in cases {
            assert_eq!(pod_status(&pod, &HashSet::new()), expected, "{pod}");
        }
    }
}
