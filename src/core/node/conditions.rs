//! The conditions of a Node (kubelet spec, 12.5), and what of a status is worth a patch (12.2). Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};
use serde_json::{Value, json};

use super::eviction::{Pressure, Pressures};
use crate::core::time::seconds;

/// The shortages of a node, each with the reason and message of its condition: while there is none, and while there is.
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

/// The conditions as of now. `not_ready` is why the node is not ready, if it is not; `pressures` is what it is short of;
/// `old` is what was reported before.
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

/// Several reasons why a node is not ready as one message: each once, in brackets where there are more (apimachinery's
/// `Aggregate`). None where there is no reason.
#[must_use]
pub fn joined(problems: &[String]) -> Option<String> {
    let mut told: Vec<&str> = vec![];
    for problem in problems {
        if !told.contains(&problem.as_str()) {
            told.push(problem);
        }
    }
    match told.as_slice() {
        [] => None,
        [one] => Some((*one).to_owned()),
        many => Some(format!("[{}]", many.join(", "))),
    }
}

/// What has become of the node's conditions between two statuses, as reasons of events; in the kubelet's words.
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
                // Only what is wrong is worth saying of a node that was not known.
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

/// Whether a status says that the node is ready.
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
    // A NodeStatus is plain data: it has a form as JSON.
    serde_json::to_value(status).unwrap_or_default()
}

/// The strategic merge patch from one status to the next; none where only heartbeats differ. What `new` leaves out
/// stays, except resources: those that `new` does not have go.
#[must_use]
pub fn patch(old: &NodeStatus, new: &NodeStatus) -> Option<Value> {
    let (before, after) = (without_heartbeats(old), without_heartbeats(new));
    let mut fields = after.as_object().into_iter().flatten();
    if fields.all(|(key, value)| before.get(key) == Some(value)) {
        return None;
    }
    let mut status = serde_json::to_value(new).ok()?;
    // Addresses are merged by type: a changed list must replace the old one.
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

/// When an unchanged status is reported again: `frequency`, and up to half of it more or less, so that nodes that
/// started together do not report together. `seed` is anything that differs from node to node and turn to turn.
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
    fn heartbeats_alone_are_not_reported_and_addresses_replace() {
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
    fn all_reasons_are_told_once() {
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
    fn shortages_are_conditions_and_their_changes_events() {
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
    fn resources_that_are_gone_are_deleted() {
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
    fn unchanged_reports_are_spread() {
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
