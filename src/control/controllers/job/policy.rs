//! Pod failure policy and success policy of a job (KEP-3329, KEP-3998;
//! `pkg/controller/job/pod_failure_policy.go`, `success_policy.go`).

use k8s_openapi::api::batch::v1::{
    JobSpec, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyOnPodConditionsPattern,
};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use kube::ResourceExt as _;

use holdfast_core::indexes::Indexes;

/// The effect of a pod's failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Counts towards the failure limits; the default.
    Count,
    /// Does not count.
    Ignore,
    /// Fails the pod's index.
    FailIndex,
    /// Fails the job, for this reason.
    FailJob(String),
}

impl Verdict {
    /// Whether the failure is counted.
    pub(super) fn is_counted(&self) -> bool {
        *self != Verdict::Ignore
    }
}

/// Evaluates the failure policy for a failed pod; the first matching rule decides.
pub(super) fn verdict(spec: &JobSpec, pod: &Pod) -> Verdict {
    let rules = spec.pod_failure_policy.iter().flat_map(|p| &p.rules);
    for (i, rule) in rules.enumerate() {
        let namespace = pod.namespace().unwrap_or_default();
        let name = pod.name_any();
        let action = &rule.action;
        let why = if let Some(codes) = &rule.on_exit_codes {
            matching_container(pod, codes).map(|(container, code)| {
                format!("Container {container} for pod {namespace}/{name} failed with exit code {code} matching {action} rule at index {i}")
            })
        } else {
            matching_condition(pod, rule.on_pod_conditions.as_deref().unwrap_or_default()).map(|c| {
                format!(
                    "Pod {namespace}/{name} has condition {} matching {action} rule at index {i}",
                    c.type_
                )
            })
        };
        match (why, action.as_str()) {
            (Some(_), "Ignore") => return Verdict::Ignore,
            (Some(_), "FailIndex") => return Verdict::FailIndex,
            (Some(why), "FailJob") => return Verdict::FailJob(why),
            (Some(_), "Count") => return Verdict::Count,
            _ => {}
        }
    }
    Verdict::Count
}

/// The name and exit code of the terminated container that matches a rule.
fn matching_container<'a>(
    pod: &'a Pod,
    rule: &PodFailurePolicyOnExitCodesRequirement,
) -> Option<(&'a str, i32)> {
    let status = pod.status.as_ref()?;
    let matches = |container: &'a ContainerStatus| {
        let ended = container.state.as_ref()?.terminated.as_ref()?;
        let code = ended.exit_code;
        let named = rule.container_name.as_deref();
        let listed = rule.values.contains(&code);
        let matches = code != 0
            && named.is_none_or(|n| n == container.name)
            && match rule.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                _ => false,
            };
        matches.then_some((container.name.as_str(), code))
    };
    let containers = status.container_statuses.iter().flatten();
    let first = status.init_container_statuses.iter().flatten();
    containers.chain(first).find_map(matches)
}

fn matching_condition<'a>(
    pod: &'a Pod,
    patterns: &[PodFailurePolicyOnPodConditionsPattern],
) -> Option<&'a PodCondition> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    conditions.find(|c| {
        let status = |p: &PodFailurePolicyOnPodConditionsPattern| {
            p.status.as_deref().unwrap_or("True") == c.status
        };
        patterns.iter().any(|p| p.type_ == c.type_ && status(p))
    })
}

/// Why the succeeded indexes meet the success policy; `None` if they do not.
pub(super) fn enough(spec: &JobSpec, succeeded: &Indexes) -> Option<String> {
    if succeeded.is_empty() {
        return None;
    }
    let completions = spec.completions.unwrap_or(0);
    let rules = &spec.success_policy.as_ref()?.rules;
    let met = rules.iter().position(|rule| {
        let Some(wanted) = &rule.succeeded_indexes else {
            return rule.succeeded_count.is_some_and(|n| succeeded.total() >= n);
        };
        let wanted = Indexes::read(wanted, completions);
        let have = wanted.common(succeeded).total();
        !wanted.is_empty()
            && (have == wanted.total() || rule.succeeded_count.is_some_and(|n| have >= n))
    });
    met.map(|i| format!("Matched rules at index {i}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(value: Value) -> JobSpec {
        let mut spec = json!({"template": {}, "completions": 5});
        spec.as_object_mut()
            .expect("an object")
            .extend(value.as_object().expect("an object").clone());
        serde_json::from_value(spec).expect("a spec")
    }

    #[test]
    fn the_first_matching_rule_applies() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n"}, "status": {
            "conditions": [{"type": "DisruptionTarget", "status": "True"}],
            "initContainerStatuses": [{"name": "i", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": 0}}}],
            "containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": 42}}}]}}))
        .expect("a pod");
        let codes = |action: &str, operator: &str, values: &[i32], container: Option<&str>| json!({"action": action, "onExitCodes": {"operator": operator, "values": values, "containerName": container}});
        let condition = |action: &str, status: &str| json!({"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": status}]});
        let exit =
            "Container c for pod n/p failed with exit code 42 matching FailJob rule at index 0";
        let disrupted = "Pod n/p has condition DisruptionTarget matching FailJob rule at index 1";
        for (rules, expected) in [
            (json!([]), Verdict::Count),
            (
                json!([codes("FailJob", "In", &[1, 42], None)]),
                Verdict::FailJob(exit.into()),
            ),
            (
                json!([
                    codes("FailJob", "NotIn", &[42], None),
                    condition("FailJob", "True")
                ]),
                Verdict::FailJob(disrupted.into()),
            ),
            (
                json!([
                    codes("Ignore", "In", &[42], Some("i")),
                    codes("FailIndex", "NotIn", &[1], Some("c"))
                ]),
                Verdict::FailIndex,
            ),
            (
                json!([
                    condition("Ignore", "True"),
                    codes("FailJob", "In", &[42], None)
                ]),
                Verdict::Ignore,
            ),
            (json!([condition("Ignore", "False")]), Verdict::Count),
        ] {
            let spec = spec(json!({"podFailurePolicy": {"rules": rules}}));
            assert_eq!(verdict(&spec, &pod), expected, "{rules}");
        }
    }

    #[test]
    fn one_matching_success_rule_is_enough() {
        for (rules, succeeded, met) in [
            (json!([{"succeededCount": 2}]), "0", None),
            (json!([{"succeededCount": 2}]), "0,4", Some(0)),
            (json!([{"succeededIndexes": "1,3"}]), "1,2", None),
            (json!([{"succeededIndexes": "1,3"}]), "1-3", Some(0)),
            (
                json!([{"succeededIndexes": "0"}, {"succeededIndexes": "1-3", "succeededCount": 1}]),
                "3",
                Some(1),
            ),
            (json!([{"succeededIndexes": ""}]), "0-4", None),
        ] {
            let spec = spec(json!({"successPolicy": {"rules": rules}}));
            let expected = met.map(|i| format!("Matched rules at index {i}"));
            let is = enough(&spec, &Indexes::read(succeeded, 5));
            assert_eq!(is, expected, "{rules} {succeeded}");
        }
        assert_eq!(enough(&spec(json!({})), &Indexes::read("0-4", 5)), None);
    }
}
