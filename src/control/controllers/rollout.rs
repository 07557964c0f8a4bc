//! Rolling updates of a Deployment: pure arithmetic over its ReplicaSets (`pkg/controller/deployment/rolling.go`).

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;
use serde_json::{Value, json};

/// Annotation with the revision number.
pub(crate) const REVISION: &str = "deployment.kubernetes.io/revision";
/// Label with the template's hash, which separates the pods of different templates.
pub const HASH: &str = "pod-template-hash";

/// A size change of one ReplicaSet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scale {
    /// The ReplicaSet's name.
    pub name: String,
    /// The current number of replicas.
    pub from: i32,
    /// The new number of replicas.
    pub to: i32,
}

/// The replicas in the spec of a set.
fn wanted(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|s| s.replicas).unwrap_or(1)
}

fn available(set: &ReplicaSet) -> i32 {
    set.status
        .as_ref()
        .and_then(|s| s.available_replicas)
        .unwrap_or(0)
}

fn number(
    set: &ReplicaSet,
    get: impl Fn(&k8s_openapi::api::apps::v1::ReplicaSetStatus) -> Option<i32>,
) -> i32 {
    set.status.as_ref().and_then(get).unwrap_or(0)
}

/// The revision annotation as a number.
#[must_use]
pub fn revision(set: &ReplicaSet) -> i64 {
    set.annotations()
        .get(REVISION)
        .and_then(|r| r.parse().ok())
        .unwrap_or(0)
}

fn resolve(value: Option<&IntOrString>, of: i32, round_up: bool) -> i32 {
    match value {
        Some(IntOrString::Int(n)) => *n,
        Some(IntOrString::String(text)) => {
            let percent: i32 = text.trim_end_matches('%').parse().unwrap_or(25);
            let scaled = i64::from(of) * i64::from(percent);
            let result = if round_up {
                (scaled + 99).div_euclid(100)
            } else {
                scaled.div_euclid(100)
            };
            i32::try_from(result).unwrap_or(of)
        }
        None => 0,
    }
}

/// The maximum number of surplus pods (`maxSurge`) and of missing pods (`maxUnavailable`) during a rollout.
#[must_use]
pub fn bounds(deployment: &Deployment) -> (i32, i32) {
    let Some(spec) = &deployment.spec else {
        return (1, 0);
    };
    let replicas = spec.replicas.unwrap_or(1);
    let strategy = spec.strategy.as_ref();
    if strategy.and_then(|s| s.type_.as_deref()) == Some("Recreate") {
        return (0, replicas);
    }
    let rolling = strategy.and_then(|s| s.rolling_update.as_ref());
    let surge = resolve(rolling.and_then(|r| r.max_surge.as_ref()), replicas, true);
    let mut unavailable = resolve(
        rolling.and_then(|r| r.max_unavailable.as_ref()),
        replicas,
        false,
    );
    if surge == 0 && unavailable == 0 {
        unavailable = 1;
    }
    (surge, unavailable.min(replicas))
}

/// A stable hash of a template, in an alphabet without vowels.
#[must_use]
pub(crate) fn template_hash(template: &Value, collisions: i32) -> String {
    let text = template.to_string();
    let mut hash = holdfast_core::digest::fnv32(text.bytes().chain(collisions.to_be_bytes()));
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut text = String::new();
    while text.len() < 9 {
        text.push(char::from(LETTERS[(hash % 27) as usize]));
        hash = (hash / 27) ^ hash.rotate_left(13);
    }
    text
}

/// The template without the hash label, for comparison.
#[must_use]
pub(crate) fn bare_template(
    template: Option<&k8s_openapi::api::core::v1::PodTemplateSpec>,
) -> Value {
    let mut value = serde_json::to_value(template).unwrap_or_default();
    if let Some(labels) = value
        .pointer_mut("/metadata/labels")
        .and_then(Value::as_object_mut)
    {
        labels.remove(HASH);
    }
    value
}

/// The size changes of the next step; may be empty. `running_old` is set while pods of
/// old sets exist, for which a Recreate waits.
#[must_use]
pub fn step(
    deployment: &Deployment,
    new: Option<&ReplicaSet>,
    old: &[Arc<ReplicaSet>],
    running_old: bool,
) -> Vec<Scale> {
    let Some(spec) = &deployment.spec else {
        return vec![];
    };
    let replicas = spec.replicas.unwrap_or(1);
    let change = |set: &ReplicaSet, to: i32| Scale {
        name: set.name_any(),
        from: wanted(set),
        to,
    };
    let (surge, unavailable) = bounds(deployment);
    if spec.paused == Some(true) {
        // While paused, only the single active set is scaled.
        let mut active: Vec<&ReplicaSet> = old
            .iter()
            .map(|s| &**s)
            .chain(new)
            .filter(|s| wanted(s) > 0)
            .collect();
        active.sort_by_key(|s| revision(s));
        return match active.as_slice() {
            [only] if wanted(only) != replicas => vec![change(only, replicas)],
            _ => vec![],
        };
    }
    let Some(new) = new else { return vec![] };
    let old_total: i32 = old.iter().map(|s| wanted(s)).sum();
    if spec.strategy.as_ref().and_then(|s| s.type_.as_deref()) == Some("Recreate") {
        let down: Vec<Scale> = old
            .iter()
            .filter(|s| wanted(s) > 0)
            .map(|s| change(s, 0))
            .collect();
        if !down.is_empty() || running_old {
            return down;
        }
        return if wanted(new) == replicas {
            vec![]
        } else {
            vec![change(new, replicas)]
        };
    }
    if wanted(new) > replicas {
        return vec![change(new, replicas)];
    }
    let total = old_total + wanted(new);
    let room = replicas + surge - total;
    if wanted(new) < replicas && room > 0 {
        return vec![change(new, wanted(new) + room.min(replicas - wanted(new)))];
    }
    let minimum = replicas - unavailable;
    let mut spare = total - minimum - (wanted(new) - available(new));
    if old_total == 0 || spare <= 0 {
        return vec![];
    }
    let mut sets: Vec<&Arc<ReplicaSet>> = old.iter().filter(|s| wanted(s) > 0).collect();
    sets.sort_by_key(|s| revision(s));
    let mut sizes: Vec<i32> = sets.iter().map(|s| wanted(s)).collect();
    // Unavailable pods are scaled down first.
    for (set, size) in sets.iter().zip(&mut sizes) {
        let sick = (*size - available(set)).clamp(0, spare);
        *size -= sick;
        spare -= sick;
    }
    let all_available: i32 = old.iter().map(|s| available(s)).sum::<i32>() + available(new);
    let mut extra = (all_available - minimum).clamp(0, spare.max(0));
    for size in &mut sizes {
        let less = (*size).min(extra);
        *size -= less;
        extra -= less;
    }
    sets.iter()
        .zip(sizes)
        .filter(|(set, size)| wanted(set) != *size)
        .map(|(set, size)| change(set, size))
        .collect()
}

/// Whether a rollout has progressed to these numbers of total, updated and available replicas, and whether its progress
/// deadline has passed. A pod that becomes not ready is no progress (`DeploymentProgressing` in
/// `pkg/controller/deployment/util/deployment_util.go`).
fn progress(
    deployment: &Deployment,
    [total, updated, available]: [i32; 3],
    now: &str,
) -> (bool, bool) {
    let before = deployment.status.clone().unwrap_or_default();
    let stale = |total: i32, updated: i32| total.saturating_sub(updated);
    let had = |count: Option<i32>| count.unwrap_or(0);
    let progressed = updated > had(before.updated_replicas)
        || available > had(before.available_replicas)
        || stale(total, updated) < stale(had(before.replicas), had(before.updated_replicas));
    let spec = deployment.spec.as_ref();
    let deadline = spec
        .and_then(|s| s.progress_deadline_seconds)
        .unwrap_or(600);
    let conditions = before.conditions.unwrap_or_default();
    let progressing = conditions.iter().find(|c| c.type_ == "Progressing");
    let since = progressing.and_then(|c| c.last_update_time.as_ref());
    let late = match progressing.and_then(|c| c.reason.as_deref()) {
        // The deadline stays exceeded until the rollout progresses.
        Some("ProgressDeadlineExceeded") => true,
        Some("NewReplicaSetAvailable") => false,
        _ => since.is_some_and(|t| {
            now.parse::<jiff::Timestamp>()
                .is_ok_and(|now| now.as_second() - t.0.as_second() > i64::from(deadline))
        }),
    };
    (progressed, late)
}

/// The time until the progress deadline passes; `None` if it has passed, or the rollout is complete.
#[must_use]
pub(crate) fn time_to_deadline(deployment: &Deployment, now: Timestamp) -> Option<Duration> {
    let deadline = deployment.spec.as_ref()?.progress_deadline_seconds;
    let conditions = deployment.status.as_ref()?.conditions.as_ref()?;
    let progressing = conditions.iter().find(|c| c.type_ == "Progressing")?;
    if progressing.reason.as_deref() == Some("NewReplicaSetAvailable") {
        return None;
    }
    let passed = now.as_second() - progressing.last_update_time.as_ref()?.0.as_second();
    let left = i64::from(deadline.unwrap_or(600)).saturating_sub(passed);
    // The deadline passes when the full second after it begins.
    let left = u64::try_from(left).ok()?.saturating_add(1);
    Some(Duration::from_secs(left))
}

/// The status of a deployment. Conditions that do not change keep their times.
#[must_use]
pub fn status(
    deployment: &Deployment,
    new: Option<&ReplicaSet>,
    old: &[Arc<ReplicaSet>],
    now: &str,
) -> Value {
    let all: Vec<&ReplicaSet> = old.iter().map(|s| &**s).chain(new).collect();
    let sum = |get: fn(&k8s_openapi::api::apps::v1::ReplicaSetStatus) -> Option<i32>| {
        all.iter()
            .map(|s| number(s, get))
            .fold(0, i32::saturating_add)
    };
    let spec = deployment.spec.clone().unwrap_or_default();
    let wanted_replicas = spec.replicas.unwrap_or(1);
    let (total, ready, avail) = (
        sum(|s| Some(s.replicas)),
        sum(|s| s.ready_replicas),
        sum(|s| s.available_replicas),
    );
    let updated = new.map_or(0, |s| number(s, |s| Some(s.replicas)));
    let old_conditions = deployment
        .status
        .as_ref()
        .and_then(|s| s.conditions.clone())
        .unwrap_or_default();
    let condition = |kind: &str, value: &str, reason: &str, message: String, progressed: bool| {
        let before = old_conditions.iter().find(|c| c.type_ == kind);
        let time = |t: Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>| {
            t.map_or_else(|| now.to_owned(), |t| crate::api::object::stamp(t.0))
        };
        let transition = before
            .filter(|c| c.status == value)
            .map_or_else(|| now.to_owned(), |c| time(c.last_transition_time.as_ref()));
        let same = before
            .filter(|c| c.status == value && c.reason.as_deref() == Some(reason) && !progressed);
        let update = same.map_or_else(|| now.to_owned(), |c| time(c.last_update_time.as_ref()));
        json!({"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": transition, "lastUpdateTime": update})
    };
    let (_, unavailable) = bounds(deployment);
    let has_minimum = avail >= wanted_replicas - unavailable;
    let (value, reason, does) = match has_minimum {
        true => ("True", "MinimumReplicasAvailable", "has"),
        false => ("False", "MinimumReplicasUnavailable", "does not have"),
    };
    let message = format!("Deployment {does} minimum availability.");
    let available = condition("Available", value, reason, message, false);
    let complete =
        updated == wanted_replicas && total == wanted_replicas && avail == wanted_replicas;
    let (progressed, late) = progress(deployment, [total, updated, avail], now);
    let of_set = |does: &str| {
        let name = new.map(|set| set.name_any()).unwrap_or_default();
        format!("ReplicaSet {name:?} {does}.")
    };
    let (value, reason, message) = if spec.paused == Some(true) {
        let message = "Deployment is paused".to_owned();
        ("Unknown", "DeploymentPaused", message)
    } else if new.is_none() {
        let message = "Creating a new replica set".to_owned();
        ("True", "NewReplicaSetCreated", message)
    } else if complete {
        let message = of_set("has successfully progressed");
        ("True", "NewReplicaSetAvailable", message)
    } else if late && !progressed {
        let message = of_set("has timed out progressing");
        ("False", "ProgressDeadlineExceeded", message)
    } else {
        ("True", "ReplicaSetUpdated", of_set("is progressing"))
    };
    let moved = progressed && reason == "ReplicaSetUpdated";
    let progressing = condition("Progressing", value, reason, message, moved);
    let conditions = [available, progressing];
    json!({
        "observedGeneration": deployment.metadata.generation, "replicas": total, "updatedReplicas": updated, "readyReplicas": ready,
        "availableReplicas": avail, "unavailableReplicas": (all.iter().map(|s| wanted(s)).sum::<i32>() - avail).max(0), "conditions": conditions,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(replicas: i32, surge: Value, unavailable: Value) -> Deployment {
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"replicas": replicas, "selector": {}, "template": {},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}}}))
        .expect("a deployment")
    }

    fn set(name: &str, revision: i64, wanted: i32, available: i32) -> Arc<ReplicaSet> {
        Arc::new(
            serde_json::from_value(json!({"metadata": {"name": name, "annotations": {REVISION: revision.to_string()}},
                "spec": {"replicas": wanted, "selector": {}}, "status": {"replicas": wanted, "availableReplicas": available}}))
            .expect("a set"),
        )
    }

    #[test]
    fn a_rollout_past_its_progress_deadline_stays_failed_until_it_progresses() {
        let mut d = deployment(3, json!(1), json!(0));
        let reason = |status: &Value| {
            status["conditions"][1]["reason"]
                .as_str()
                .map(str::to_owned)
        };
        let mut seen = vec![];
        let mut waits = vec![];
        for (now, available) in [
            ("2026-01-01T00:00:00Z", 1),
            ("2026-01-01T00:05:00Z", 0),
            ("2026-01-01T00:10:10Z", 0),
            ("2026-01-01T00:10:20Z", 0),
            ("2026-01-01T00:10:30Z", 1),
        ] {
            let written = status(&d, Some(&set("n", 1, 2, available)), &[], now);
            seen.push(reason(&written).unwrap_or_default());
            d.status = Some(serde_json::from_value(written).expect("a status"));
            let left = time_to_deadline(&d, now.parse().expect("a time"));
            waits.push(left.map(|left| left.as_secs()));
        }
        assert_eq!(
            seen,
            [
                "ReplicaSetUpdated",
                "ReplicaSetUpdated",
                "ProgressDeadlineExceeded",
                "ProgressDeadlineExceeded",
                "ReplicaSetUpdated"
            ]
        );
        assert_eq!(waits[..2], [Some(601), Some(301)]);
        assert_eq!(waits[2], Some(601), "the failure starts a new period");
    }

    #[test]
    fn max_surge_rounds_up_and_max_unavailable_rounds_down() {
        assert_eq!(bounds(&deployment(3, json!("25%"), json!("25%"))), (1, 0));
        assert_eq!(bounds(&deployment(10, json!("25%"), json!("25%"))), (3, 2));
        assert_eq!(bounds(&deployment(2, json!(0), json!(0))), (0, 1));
    }

    #[test]
    fn a_rollout_respects_surge_and_unavailability_and_finishes() {
        for (replicas, surge, unavailable) in
            [(3, 1, 0), (5, 2, 2), (1, 1, 0), (4, 0, 1), (10, 3, 2)]
        {
            let d = deployment(replicas, json!(surge), json!(unavailable));
            let (mut new, mut old) = (0, replicas);
            let mut steps = 0;
            loop {
                // Every pod becomes available before the next step.
                let plan = step(
                    &d,
                    Some(&set("n", 2, new, new)),
                    &[set("o", 1, old, old)],
                    true,
                );
                if plan.is_empty() {
                    break;
                }
                for scale in plan {
                    if scale.name == "n" {
                        new = scale.to
                    } else {
                        old = scale.to
                    }
                }
                assert!(
                    new + old <= replicas + surge,
                    "{replicas} {surge} {unavailable}: {new}+{old}"
                );
                assert!(new + old >= replicas - unavailable);
                steps += 1;
                assert!(steps < 50, "the rollout does not finish");
            }
            assert_eq!((new, old), (replicas, 0));
        }
    }

    #[test]
    fn old_pods_are_kept_while_new_ones_are_unavailable() {
        let d = deployment(3, json!(1), json!(0));
        assert_eq!(
            step(&d, Some(&set("n", 2, 1, 0)), &[set("o", 1, 3, 3)], true),
            []
        );
        let sick = step(&d, Some(&set("n", 2, 1, 0)), &[set("o", 1, 3, 1)], true);
        assert_eq!(sick, [], "minimum availability is not yet reached");
    }
}
