//! The conditions of a Node and the status patches to send (`pkg/kubelet/nodestatus/setters.go`,
//! `pkg/kubelet/kubelet_node_status.go`). Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};
use serde_json::{Value, json};

use super::eviction::{Pressure, Pressures};
use crate::time::seconds;

/// Pressure conditions, each with reason and message while False and while True.
const SHORTAGES: [(Pressure, [(&str, &str); 2]); 3] = [
    (
        Pressure::Memory,
        [
            (
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
            ),
            (
                "KubeletHasInsufficientMemory",
                "kubelet has insufficient memory available",
            ),
        ],
    ),
    (
        Pressure::Disk,
        [
            ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            ("KubeletHasDiskPressure", "kubelet has disk pressure"),
        ],
    ),
    (
        Pressure::Pid,
        [
            (
                "KubeletHasSufficientPID",
                "kubelet has sufficient PID available",
            ),
            (
                "KubeletHasInsufficientPID",
                "kubelet has insufficient PID available",
            ),
        ],
    ),
];

/// The current conditions. `not_ready` is why the node is not ready (`None` if it is ready), `pressures` are the active
/// ones, and `old` are the last reported conditions, whose transition times are kept.
#[must_use]
pub fn conditions(
    not_ready: Option<&str>,
    pressures: &Pressures,
    old: &[NodeCondition],
    now: Timestamp,
) -> Vec<NodeCondition> {
    let now = seconds(now);
    let condition = |kind: &str, status: &str, reason: &str, message: &str| {
        let before = old.iter().find(|c| c.type_ == kind && c.status == status);
        let since = before.and_then(|c| c.last_transition_time.clone());
        NodeCondition {
            type_: kind.into(),
            status: status.into(),
            reason: Some(reason.into()),
            message: Some(message.into()),
            last_heartbeat_time: Some(now.clone()),
            last_transition_time: Some(since.unwrap_or_else(|| now.clone())),
        }
    };
    let shortages = SHORTAGES.iter().map(|(pressure, [without, with])| {
        let kind = pressure.condition();
        match pressures.contains(pressure) {
            true => condition(kind, "True", with.0, with.1),
            false => condition(kind, "False", without.0, without.1),
        }
    });
    let ready = match not_ready {
        None => condition(
            "Ready",
            "True",
            "KubeletReady",
            "kubelet is posting ready status",
        ),
        Some(why) => condition("Ready", "False", "KubeletNotReady", why),
    };
    shortages.chain([ready]).collect()
}

/// Joins reasons for not being ready into one message: duplicates are removed, and several reasons are put in brackets,
/// as apimachinery's `Aggregate` does. `None` if there are no reasons.
#[must_use]
pub fn joined(problems: &[String]) -> Option<String> {
    let mut distinct: Vec<&str> = vec![];
    for problem in problems {
        if !distinct.contains(&problem.as_str()) {
            distinct.push(problem);
        }
    }
    match distinct.as_slice() {
        [] => None,
        [one] => Some((*one).to_owned()),
        many => Some(format!("[{}]", many.join(", "))),
    }
}

/// Changes of conditions between two statuses, as event reasons of the kubelet.
#[must_use]
pub fn transitions(old: &NodeStatus, new: &NodeStatus) -> Vec<String> {
    let find = |status: &NodeStatus, kind: &str| {
        let conditions = status.conditions.iter().flatten();
        let mut found = conditions.filter(|c| c.type_ == kind);
        found.next().cloned()
    };
    let mut reasons: Vec<String> = SHORTAGES
        .iter()
        .filter_map(|(pressure, _)| {
            let now = find(new, pressure.condition())?;
            let before = find(old, pressure.condition());
            let changed = match before {
                Some(before) => before.status != now.status,
                // For a new Node only active pressures are worth an event.
                None => now.status == "True",
            };
            let reason = now.reason.filter(|_| changed)?;
            Some(reason.replacen("Kubelet", "Node", 1))
        })
        .collect();
    if is_ready(old) != is_ready(new) {
        let reason = if is_ready(new) {
            "NodeReady"
        } else {
            "NodeNotReady"
        };
        reasons.push(reason.to_owned());
    }
    reasons
}

/// Whether a status has the condition Ready=True.
#[must_use]
pub fn is_ready(status: &NodeStatus) -> bool {
    let conditions = status.conditions.iter().flatten();
    let mut ready = conditions.filter(|c| c.type_ == "Ready");
    ready.any(|c| c.status == "True")
}

fn without_heartbeats(status: &NodeStatus) -> Value {
    let mut status = status.clone();
    for condition in status.conditions.iter_mut().flatten() {
        condition.last_heartbeat_time = None;
    }
    // A NodeStatus always serialises to JSON.
    serde_json::to_value(status).unwrap_or_default()
}

/// The strategic merge patch from one status to the next; `None` if only heartbeats differ. Fields missing in `new`
/// stay, except that resources missing in its capacity and allocatable are deleted.
#[must_use]
pub fn patch(old: &NodeStatus, new: &NodeStatus) -> Option<Value> {
    let (before, after) = (without_heartbeats(old), without_heartbeats(new));
    let mut fields = after.as_object().into_iter().flatten();
    if fields.all(|(key, value)| before.get(key) == Some(value)) {
        return None;
    }
    let mut status = serde_json::to_value(new).ok()?;
    // The API merges addresses by type, so a changed list needs an explicit replace directive.
    if after.get("addresses").is_some()
        && before.get("addresses") != after.get("addresses")
        && let Some(addresses) = status["addresses"].as_array_mut()
    {
        addresses.push(json!({"$patch": "replace"}));
    }
    for key in ["capacity", "allocatable"] {
        for name in before[key].as_object().into_iter().flat_map(|m| m.keys()) {
            if after[key].is_object() && after[key].get(name).is_none() {
                status[key][name] = Value::Null;
            }
        }
    }
    Some(json!({"status": status}))
}

/// When to report an unchanged status again: `frequency` plus or minus up to half of it, so that nodes that started
/// together do not report together. `seed` must differ between nodes and between rounds.
#[must_use]
pub fn report_after(frequency: Duration, seed: &[u8]) -> Duration {
    // FNV-1a, 32 bits.
    let hash = seed.iter().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    let share = frequency.as_secs_f64() * f64::from(hash) / f64::from(u32::MAX);
    let share = Duration::try_from_secs_f64(share).unwrap_or(frequency);
    let half = frequency.checked_div(2).unwrap_or_default();
    half.saturating_add(share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::NodeAddress;

    fn status(not_ready: Option<&str>, at: i64, ip: &str, old: &NodeStatus) -> NodeStatus {
        let now = Timestamp::from_second(at).expect("a time");
        let old = old.conditions.as_deref().unwrap_or_default();
        NodeStatus {
            conditions: Some(conditions(not_ready, &Pressures::new(), old, now)),
            addresses: Some(vec![NodeAddress {
                type_: "InternalIP".into(),
                address: ip.into(),
            }]),
            ..NodeStatus::default()
        }
    }

    #[test]
    fn heartbeats_alone_are_no_change_and_addresses_are_replaced() {
        let first = status(None, 1, "192.0.2.1", &NodeStatus::default());
        assert!(is_ready(&first));
        let later = status(None, 60, "192.0.2.1", &first);
        assert_eq!(patch(&first, &later), None);
        let down = status(Some("down"), 61, "192.0.2.1", &first);
        assert!(!is_ready(&down));
        assert!(
            patch(&first, &down)
                .is_some_and(|p| p["status"]["conditions"][3]["reason"] == "KubeletNotReady")
        );
        let moved = status(None, 62, "192.0.2.2", &first);
        assert_eq!(
            patch(&first, &moved).expect("a patch")["status"]["addresses"][1],
            json!({"$patch": "replace"})
        );
    }

    #[test]
    fn each_not_ready_reason_is_listed_once() {
        for (problems, expected) in [
            (&[][..], None),
            (&["a"], Some("a")),
            (&["a", "a"], Some("a")),
            (&["b", "a", "b"], Some("[b, a]")),
        ] {
            let problems: Vec<String> = problems.iter().map(|p| (*p).to_owned()).collect();
            assert_eq!(joined(&problems).as_deref(), expected, "{problems:?}");
        }
    }

    #[test]
    fn pressure_sets_conditions_and_its_changes_emit_events() {
        let of = |pressures: &[Pressure], old: &NodeStatus| {
            let known = old.conditions.as_deref().unwrap_or_default();
            let pressures = pressures.iter().copied().collect();
            NodeStatus {
                conditions: Some(conditions(None, &pressures, known, Timestamp::UNIX_EPOCH)),
                ..NodeStatus::default()
            }
        };
        let none = of(&[], &NodeStatus::default());
        assert_eq!(transitions(&NodeStatus::default(), &none), ["NodeReady"]);
        let short = of(&[Pressure::Memory, Pressure::Disk], &none);
        let found: Vec<(&str, Option<&str>)> = short
            .conditions
            .iter()
            .flatten()
            .map(|c| (c.status.as_str(), c.reason.as_deref()))
            .collect();
        assert_eq!(
            found,
            [
                ("True", Some("KubeletHasInsufficientMemory")),
                ("True", Some("KubeletHasDiskPressure")),
                ("False", Some("KubeletHasSufficientPID")),
                ("True", Some("KubeletReady")),
            ]
        );
        assert_eq!(
            transitions(&none, &short),
            ["NodeHasInsufficientMemory", "NodeHasDiskPressure"]
        );
        let better = of(&[Pressure::Disk], &short);
        assert_eq!(transitions(&short, &better), ["NodeHasSufficientMemory"]);
        assert_eq!(transitions(&better, &better), Vec::<String>::new());
    }

    #[test]
    fn removed_resources_are_deleted_from_the_status() {
        let of = |value: Value| -> NodeStatus { serde_json::from_value(value).expect("a status") };
        let old = of(json!({"capacity": {"cpu": "2", "hugepages-2Mi": "1Gi"}}));
        let new = of(json!({"capacity": {"cpu": "2"}}));
        assert_eq!(
            patch(&old, &new),
            Some(json!({"status": {"capacity": {"cpu": "2", "hugepages-2Mi": null}}}))
        );
        assert_eq!(patch(&old, &old), None);
    }

    #[test]
    fn status_reports_without_changes_are_jittered() {
        let five = Duration::from_secs(300);
        let times: Vec<Duration> = (0..100_u32)
            .map(|n| report_after(five, format!("node-{n}").as_bytes()))
            .collect();
        assert!(times.iter().all(|t| (five / 2..=five * 3 / 2).contains(t)));
        let early = times.iter().filter(|t| **t < five).count();
        assert!(
            (20..80).contains(&early),
            "{early} of 100 before the middle"
        );
    }
}
