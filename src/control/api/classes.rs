//! Admission of pods by the classes they name (`plugin/pkg/admission/priority/admission.go`,
//! `plugin/pkg/admission/runtimeclass/admission.go`).

use serde_json::{Value, json};

use super::error::ApiError;
use super::object::{at, entry, list, text};
use super::resources::Resource;
use crate::store::Store;

/// Built-in priority classes: name, value, description.
pub const SYSTEM: [(&str, i64, &str); 2] = [
    (
        "system-node-critical",
        2_000_001_000,
        "For pods that must stay on their node, whatever happens.",
    ),
    (
        "system-cluster-critical",
        2_000_000_000,
        "For pods that the cluster needs, on whichever node.",
    ),
];

fn find(store: &Store, kind: &str, name: &str) -> Option<Value> {
    let resource = Resource::of_kind(kind)?;
    serde_json::from_slice(&store.get(&resource.key(None, name))?.value).ok()
}

/// The priority class of pods without `priorityClassName`.
fn global_default(store: &Store) -> Option<Value> {
    let resource = Resource::of_kind("PriorityClass")?;
    let classes = store
        .list(&resource.prefix(None))
        .0
        .into_iter()
        .filter_map(|(_, r)| serde_json::from_slice::<Value>(&r.value).ok());
    // If several classes are marked as the default, the one with the smallest value applies.
    classes
        .filter(|c| c["globalDefault"] == true)
        .min_by_key(|c| c["value"].as_i64())
}

/// Sets a new pod's priority and preemption policy.
pub fn priority(store: &Store, pod: &mut Value) -> Result<(), ApiError> {
    let name = super::object::name(pod).to_owned();
    let wanted = text(pod, &["spec", "priorityClassName"])
        .unwrap_or_default()
        .to_owned();
    let class = if wanted.is_empty() {
        global_default(store)
    } else {
        let system = SYSTEM
            .iter()
            .find(|(known, ..)| *known == wanted)
            .map(|(known, value, _)| json!({"metadata": {"name": known}, "value": value}));
        let missing = || {
            ApiError::forbidden(format!(
                "pods {name:?} is forbidden: no PriorityClass with name {wanted} was found"
            ))
        };
        Some(
            system
                .or_else(|| find(store, "PriorityClass", &wanted))
                .ok_or_else(missing)?,
        )
    };
    let value = class
        .as_ref()
        .and_then(|c| c["value"].as_i64())
        .unwrap_or(0);
    if let Some(own) = at(pod, &["spec", "priority"]).and_then(Value::as_i64)
        && own != value
    {
        return Err(ApiError::forbidden(format!(
            "pods {name:?} is forbidden: the integer value of priority ({own}) must not be provided in pod spec; priority admission controller computed {value} from the given PriorityClass name"
        )));
    }
    let spec = entry(pod, "spec");
    if let Some(class) = &class {
        spec.insert(
            "priorityClassName".into(),
            super::object::name(class).into(),
        );
    }
    spec.insert("priority".into(), value.into());
    let policy = class
        .as_ref()
        .and_then(|c| text(c, &["preemptionPolicy"]))
        .unwrap_or("PreemptLowerPriority")
        .to_owned();
    spec.entry("preemptionPolicy").or_insert(policy.into());
    Ok(())
}

/// Adds the overhead, node selector and tolerations of a new pod's RuntimeClass.
pub fn runtime(store: &Store, pod: &mut Value) -> Result<(), ApiError> {
    let name = super::object::name(pod).to_owned();
    let Some(wanted) = text(pod, &["spec", "runtimeClassName"])
        .filter(|n| !n.is_empty())
        .map(str::to_owned)
    else {
        return Ok(());
    };
    let refuse = |why: String| {
        ApiError::forbidden(format!("pods {name:?} is forbidden: pod rejected: {why}"))
    };
    let class = find(store, "RuntimeClass", &wanted)
        .ok_or_else(|| refuse(format!("RuntimeClass {wanted:?} not found")))?;
    let overhead = at(&class, &["overhead", "podFixed"]).cloned();
    let own = at(pod, &["spec", "overhead"]).cloned();
    if own.is_some() && own != overhead {
        return Err(refuse(
            "the pod's spec.overhead differs from overhead.podFixed of its RuntimeClass".into(),
        ));
    }
    if let Some(overhead) = overhead {
        pod["spec"]["overhead"] = overhead;
    }
    for (key, value) in at(&class, &["scheduling", "nodeSelector"])
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let selector = &mut pod["spec"]["nodeSelector"];
        if selector.get(key).is_some_and(|own| own != value) {
            return Err(refuse(format!(
                "conflict: runtimeClass.scheduling.nodeSelector[{key}] is {value}, the pod's is {}",
                selector[key]
            )));
        }
        selector[key] = value.clone();
    }
    let more: Vec<Value> = list(&class, &["scheduling", "tolerations"]).to_vec();
    if !more.is_empty() {
        let tolerations = entry(pod, "spec")
            .entry("tolerations")
            .or_insert_with(|| json!([]));
        if let Some(tolerations) = tolerations.as_array_mut() {
            tolerations.extend(more);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_without_classes_get_the_default_and_missing_ones_are_named() {
        let store = Store::in_memory();
        let pod = |spec: Value| json!({"metadata": {"name": "p"}, "spec": spec});
        let mut plain = pod(json!({}));
        priority(&store, &mut plain).expect("fine");
        assert_eq!(
            (
                &plain["spec"]["priority"],
                &plain["spec"]["preemptionPolicy"]
            ),
            (&json!(0), &json!("PreemptLowerPriority"))
        );
        let mut critical = pod(json!({"priorityClassName": "system-node-critical"}));
        priority(&store, &mut critical).expect("fine");
        assert_eq!(critical["spec"]["priority"], 2_000_001_000);
        for (spec, expected) in [
            (
                json!({"priorityClassName": "nosuch"}),
                "no PriorityClass with name nosuch",
            ),
            (json!({"priority": 7}), "must not be provided"),
        ] {
            assert!(
                priority(&store, &mut pod(spec)).is_err_and(|e| e.message.contains(expected)),
                "{expected}"
            );
        }
        assert!(
            runtime(&store, &mut pod(json!({"runtimeClassName": "nosuch"})))
                .is_err_and(|e| e.message.contains("RuntimeClass \"nosuch\" not found"))
        );
        runtime(&store, &mut pod(json!({}))).expect("a pod without a RuntimeClass is admitted");
    }
}
