//! Preemption for critical pods: chooses the victims (`pkg/kubelet/preemption/preemption.go`). Pure.

use k8s_openapi::api::core::v1::Pod;

use super::used::resources_of;
use crate::pod;
use crate::pod::priority::is_critical;
use crate::pod::qos::{self, QosClass};
use crate::pod::resources::Amounts;
use crate::quantity::Quantity;

fn is_preemptable(victim: &Pod, for_pod: &Pod) -> bool {
    let priority = |p: &Pod| pod::spec(p).priority.unwrap_or(0);
    !pod::is_static(victim) && (!is_critical(victim) || priority(victim) < priority(for_pod))
}

fn class(pod: &Pod) -> u8 {
    match qos::of(pod::spec(pod)) {
        QosClass::BestEffort => 0,
        QosClass::Burstable => 1,
        QosClass::Guaranteed => 2,
    }
}

/// The amounts still missing after these pods have terminated.
#[must_use]
pub(crate) fn missing_after(missing: &Amounts, terminating: &[&Pod]) -> Amounts {
    let remaining = terminating
        .iter()
        .fold(missing.clone(), |mut remaining, pod| {
            let freed = resources_of(pod);
            for (name, need) in &mut remaining {
                *need = *need - of(&freed, name);
            }
            remaining
        });
    remaining
        .into_iter()
        .filter(|(_, need)| *need > Quantity::ZERO)
        .collect()
}

/// Uids of the pods to preempt so that `missing` becomes available; `None` if that is impossible. Prefers lower QoS
/// classes, then fewer pods, then smaller ones, and never includes a pod that is not needed.
#[must_use]
pub(crate) fn choose_victims(
    for_pod: &Pod,
    others: &[&Pod],
    missing: &Amounts,
) -> Option<Vec<String>> {
    let wanted = missing;
    let mut candidates: Vec<(&Pod, Amounts)> = others
        .iter()
        .filter(|p| is_preemptable(p, for_pod))
        .map(|p| (*p, resources_of(p)))
        .collect();
    let mut chosen: Vec<&Pod> = vec![];
    let mut missing = missing_after(missing, &[]);
    for limit in 0..=2 {
        while !missing.is_empty() {
            // Prefers the pod that frees the largest share of what is missing, then the smallest pod.
            let share = |amounts: &Amounts| -> i64 {
                missing
                    .iter()
                    .map(|(name, need)| {
                        let freed = of(amounts, name).min(*need).milli().saturating_mul(1000);
                        freed.checked_div(need.milli()).unwrap_or(freed)
                    })
                    .fold(0, i64::saturating_add)
            };
            let size = |amounts: &Amounts| -> i64 {
                missing
                    .keys()
                    .map(|name| of(amounts, name).milli())
                    .fold(0, i64::saturating_add)
            };
            let best = candidates
                .iter()
                .enumerate()
                .filter(|(_, (p, amounts))| class(p) <= limit && share(amounts) > 0)
                .max_by_key(|(_, (_, amounts))| (share(amounts), std::cmp::Reverse(size(amounts))))
                .map(|(at, _)| at);
            let Some(at) = best else { break };
            let (pod, _) = candidates.remove(at);
            missing = missing_after(&missing, &[pod]);
            chosen.push(pod);
        }
    }
    if !missing.is_empty() {
        return None;
    }
    // If a pod of a higher class had to be added, some pods of lower classes may no longer be needed.
    for at in (0..chosen.len()).rev() {
        let mut fewer = chosen.clone();
        fewer.remove(at);
        if missing_after(wanted, &fewer).is_empty() {
            chosen = fewer;
        }
    }
    Some(chosen.iter().map(|p| pod::uid(p).to_owned()).collect())
}

fn of(amounts: &Amounts, name: &str) -> Quantity {
    amounts.get(name).copied().unwrap_or(Quantity::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::priority::CRITICAL;
    use serde_json::json;

    fn pod(uid: &str, cpu: &str, limit: bool, priority: i32) -> Pod {
        let resources = if limit {
            json!({"requests": {"cpu": cpu, "memory": "1"}, "limits": {"cpu": cpu, "memory": "1"}})
        } else {
            json!({"requests": {"cpu": cpu}})
        };
        let resources = if cpu == "0" { json!({}) } else { resources };
        serde_json::from_value(
            json!({"metadata": {"name": uid, "uid": uid}, "spec": {"priority": priority, "containers": [{"name": "c", "resources": resources}]}}),
        )
        .expect("a pod")
    }

    #[test]
    fn the_fewest_and_least_important_pods_are_preempted() {
        let critical = pod("c", "1", false, CRITICAL);
        let (small, large, best, guaranteed) = (
            pod("small", "300m", false, 0),
            pod("large", "2", false, 0),
            pod("best", "0", false, 0),
            pod("guaranteed", "1", true, 0),
        );
        let missing = |cpu: &str, pods: i64| {
            Amounts::from([
                ("cpu".to_owned(), cpu.parse().expect("q")),
                ("pods".to_owned(), Quantity::from_units(pods)),
            ])
        };
        let cases: [(Vec<&Pod>, Amounts, Option<Vec<&str>>); 7] = [
            (
                vec![&small, &large, &guaranteed],
                missing("200m", 0),
                Some(vec!["small"]),
            ),
            (
                vec![&small, &large, &guaranteed],
                missing("1", 0),
                Some(vec!["large"]),
            ),
            (
                vec![&small, &guaranteed],
                missing("1", 0),
                Some(vec!["guaranteed"]),
            ),
            (
                vec![&small, &guaranteed],
                missing("1100m", 0),
                Some(vec!["small", "guaranteed"]),
            ),
            (vec![&best, &small], missing("0", 1), Some(vec!["best"])),
            (vec![&small], missing("1", 0), None),
            (vec![&critical], missing("1", 0), None),
        ];
        for (others, missing, expected) in cases {
            let found = choose_victims(&critical, &others, &missing);
            assert_eq!(
                found,
                expected.map(|e| e.into_iter().map(str::to_owned).collect::<Vec<_>>()),
                "{missing:?}"
            );
        }
    }
}
