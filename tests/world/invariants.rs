//! Rules that every write of a pod's status must satisfy.

use super::*;

fn statuses(pod: &Value) -> impl Iterator<Item = &Value> {
    ["containerStatuses", "initContainerStatuses"]
        .into_iter()
        .flat_map(move |list| pod["status"][list].as_array().into_iter().flatten())
}

/// A container ID without the prefix of the runtime.
fn bare(id: &str) -> &str {
    id.split_once("://").map_or(id, |(_, id)| id)
}

/// The IDs of all containers in a status.
pub fn ids(pod: &Value) -> Vec<String> {
    let all = statuses(pod).flat_map(|s| {
        let ended = &s["lastState"]["terminated"];
        [&s["containerID"], &ended["containerID"]]
    });
    let all = all.filter_map(Value::as_str);
    all.map(|id| bare(id).to_owned()).collect()
}

fn condition<'a>(pod: &'a Value, kind: &str) -> Option<&'a str> {
    pod["status"]["conditions"]
        .as_array()?
        .iter()
        .find(|c| c["type"] == kind)?["status"]
        .as_str()
}

/// Whether the API accepts that a container leaves the terminated state (`ValidateContainerStateTransition` and
/// `ValidateInitContainerStateTransition` in `pkg/apis/core/validation/validation.go`).
fn may_restart(pod: &Value, name: &Value, exit_code: i64) -> bool {
    let containers = ["containers", "initContainers"]
        .into_iter()
        .flat_map(|list| pod["spec"][list].as_array().into_iter().flatten());
    let has_rules = |c: &Value| c["restartPolicyRules"].is_array();
    let own = containers.clone().find(|c| c["name"] == *name);
    let policy = own.and_then(|c| c["restartPolicy"].as_str());
    match policy.or_else(|| pod["spec"]["restartPolicy"].as_str()) {
        Some("Never") => containers.clone().any(has_rules),
        Some("OnFailure") => exit_code != 0 || containers.clone().any(has_rules),
        _ => true,
    }
}

/// The result of a status write.
pub struct After<'a> {
    pub pod: &'a Value,
    /// The IDs of the pod's running containers.
    pub live: &'a [String],
    /// No other client has written the terminal status: all of it is the agent's.
    pub is_ours: bool,
}

/// Checks a status write and returns the rules that it violates.
pub fn of_status(before: &Value, after: &After, probed: &BTreeSet<String>) -> Vec<String> {
    let (is_ours, live, after) = (after.is_ours, after.live, after.pod);
    let mut broken = vec![];
    let mut rule = |holds: bool, what: String| {
        if !holds {
            broken.push(what);
        }
    };
    let (old, new) = (&before["status"], &after["status"]);
    let phase = new["phase"].as_str().unwrap_or_default();
    let generation = |s: &Value| s["observedGeneration"].as_i64().unwrap_or(0);
    rule(
        ["Pending", "Running", "Succeeded", "Failed"].contains(&phase),
        format!("unknown phase {phase:?}"),
    );
    // If init containers run again in a new sandbox, the pod is Pending again, as with the kubelet.
    let has_init = after["spec"]["initContainers"]
        .as_array()
        .is_some_and(|i| !i.is_empty());
    rule(
        has_init || !(old["phase"] == "Running" && phase == "Pending"),
        format!("the phase went back from Running to Pending: {old} {new}"),
    );
    rule(
        generation(new) >= generation(old),
        "the observed generation went back".into(),
    );
    rule(
        old["startTime"].is_null() || old["startTime"] == new["startTime"],
        "the start time changed".into(),
    );
    rule(
        old["qosClass"].is_null() || old["qosClass"] == new["qosClass"],
        "the QoS class changed".into(),
    );
    rule(
        new["podIP"].is_null() || new["podIPs"][0]["ip"] == new["podIP"],
        "podIP is not the first of podIPs".into(),
    );
    rule(
        old["podIP"].is_null() || !new["podIP"].is_null(),
        "the pod's address was removed".into(),
    );
    rule(
        condition(after, "Ready") != Some("True")
            || condition(after, "ContainersReady") == Some("True"),
        "the pod is ready, but its containers are not".into(),
    );
    rule(
        condition(before, "Initialized") != Some("True")
            || condition(after, "Initialized") == Some("True"),
        "the pod is no longer initialised".into(),
    );
    rule(
        condition(after, "PodScheduled") == Some("True")
            || condition(after, "PodScheduled").is_none(),
        "PodScheduled is not True".into(),
    );
    let ended = ["Succeeded", "Failed"].contains(&phase) && is_ours;
    rule(
        !ended || condition(after, "Ready") != Some("True"),
        "the phase is terminal, but the pod is ready".into(),
    );
    rule(
        !ended || live.is_empty(),
        format!("the phase is {phase} while {live:?} run: {old} {new}"),
    );
    let ids: Vec<&str> = statuses(after).filter_map(|s| s["name"].as_str()).collect();
    rule(
        ids.iter().collect::<BTreeSet<_>>().len() == ids.len(),
        "a container has two statuses".into(),
    );
    for status in statuses(after) {
        // A sidecar restarts until the pod has stopped.
        let inits = after["spec"]["initContainers"]
            .as_array()
            .into_iter()
            .flatten();
        let is_sidecar = inits
            .filter(|c| c["restartPolicy"] == "Always")
            .any(|c| c["name"] == status["name"]);
        let waits = status["state"]["waiting"].is_object();
        let has_run = status["lastState"]["terminated"].is_object();
        if ended && waits && has_run && !is_sidecar {
            broken.push(format!(
                "{phase}, but a container waits to run again: {status}"
            ));
        }
        let earlier = statuses(before).find(|s| s["name"] == status["name"]);
        broken.extend(of_container(after, status, earlier, probed));
    }
    broken
}

/// Checks the status of one container.
fn of_container(
    pod: &Value,
    status: &Value,
    earlier: Option<&Value>,
    probed: &BTreeSet<String>,
) -> Vec<String> {
    let mut broken = vec![];
    let mut rule = |holds: bool, what: String| {
        if !holds {
            broken.push(what);
        }
    };
    let name = &status["name"];
    let states = status["state"].as_object().map_or(0, serde_json::Map::len);
    rule(states <= 1, format!("{name} is in {states} states"));
    let id = bare(status["containerID"].as_str().unwrap_or_default());
    let running = status["state"]["running"].is_object();
    rule(
        status["ready"] != true || running || status["state"]["terminated"]["exitCode"] == 0,
        format!("{name} is ready, but not running"),
    );
    rule(
        !running || !id.is_empty(),
        format!("{name} runs without an id"),
    );
    let probes = pod["spec"]["containers"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|c| c["name"] == *name)
        .is_some_and(|c| c["readinessProbe"].is_object());
    rule(
        !(probes && running && status["ready"] == true) || probed.contains(id),
        format!("{name} is ready, although no probe of {id} has succeeded"),
    );
    let Some(earlier) = earlier else {
        return broken;
    };
    let state = |s: &Value| s["state"]["terminated"]["exitCode"].as_i64();
    rule(
        state(status).is_some() || state(earlier).is_none_or(|code| may_restart(pod, name, code)),
        format!("the API rejects that {name} is no longer terminated: {earlier} {status}"),
    );
    let count = |s: &Value| s["restartCount"].as_i64().unwrap_or(0);
    rule(
        count(status) >= count(earlier),
        format!("the restart count of {name} went back: {earlier} {status}"),
    );
    let same = status["containerID"].is_string() && status["containerID"] == earlier["containerID"];
    rule(
        !(same && earlier["state"]["terminated"].is_object() && running),
        format!("{name} runs again with the id of its terminated instance"),
    );
    rule(
        !(same && earlier["state"]["terminated"].is_object()) || count(status) == count(earlier),
        format!("{name} was counted twice"),
    );
    broken
}
