//! The order in which pods are evicted, and the messages and annotations of an eviction.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Amount, Resource, Settings, Threshold};
use crate::pod;
use crate::pod::priority::is_critical;
use crate::pod::resources::{Side, of_container, requests};
use crate::quantity::Quantity;
use crate::time;

/// Number of pods of a ranking that logs and annotations list.
const MAX_LISTED: usize = 5;
/// Annotation that holds the ranking.
const RANKING: &str = "ranking";

/// Usage of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerFigures {
    /// The container's name.
    pub name: String,
    /// Working set in bytes.
    pub memory: u64,
    /// Disk usage in bytes: writable layer and logs.
    pub disk: u64,
}

/// Usage of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodFigures {
    /// Working set in bytes.
    pub memory: u64,
    /// Number of processes and threads.
    pub processes: u64,
    /// Bytes used on the filesystem that is short.
    pub disk: u64,
    /// Inodes used on the filesystem that is short.
    pub inodes: u64,
    /// Usage of each container.
    pub containers: Vec<ContainerFigures>,
}

/// A pod that may be evicted.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The pod with its allocated resources.
    pub pod: Arc<Pod>,
    /// Usage of the pod.
    pub figures: PodFigures,
}

impl Candidate {
    fn usage(&self, resource: Resource) -> u64 {
        match resource {
            Resource::Memory => self.figures.memory,
            Resource::EphemeralStorage => self.figures.disk,
            Resource::Inodes => self.figures.inodes,
            Resource::Pids => self.figures.processes,
        }
    }

    /// The requested amount; inodes and process ids cannot be requested.
    fn request(&self, resource: Resource) -> Quantity {
        let all = requests(&self.pod);
        all.get(resource.name()).copied().unwrap_or(Quantity::ZERO)
    }

    fn priority(&self) -> i32 {
        pod::spec(&self.pod).priority.unwrap_or(0)
    }

    /// Usage above the request.
    fn excess(&self, resource: Resource) -> Quantity {
        resource.quantity(self.usage(resource)) - self.request(resource)
    }
}

/// Pods in the order of eviction: first those that exceed their requests, then by priority (lowest first), then by the
/// excess. Requests for process ids do not exist, so every pod exceeds them. Critical pods and pods without usage are
/// excluded.
#[must_use]
pub fn rank(resource: Resource, candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut ranked: Vec<Candidate> = candidates
        .into_iter()
        .filter(|c| c.usage(resource) > 0 && !is_critical(&c.pod))
        .collect();
    ranked.sort_by_cached_key(|candidate| {
        let excess = candidate.excess(resource);
        (
            excess <= Quantity::ZERO,
            candidate.priority(),
            Reverse(excess),
            pod::uid(&candidate.pod).to_owned(),
        )
    });
    ranked
}

/// The first pods of a ranking with their numbers, for logs and annotations.
#[must_use]
pub fn explain(resource: Resource, ranked: &[Candidate]) -> String {
    let one = |c: &Candidate| {
        let used = resource.quantity(c.usage(resource));
        let (name, requested, priority) =
            (pod::full_name(&c.pod), c.request(resource), c.priority());
        format!("{name} uses {used}, requested {requested}, priority {priority}")
    };
    let listed: Vec<String> = ranked.iter().take(MAX_LISTED).map(one).collect();
    match ranked.len().checked_sub(MAX_LISTED) {
        Some(more) if more > 0 => format!("{}; {more} more", listed.join("; ")),
        _ => listed.join("; "),
    }
}

/// The eviction message, in the kubelet's words.
#[must_use]
pub fn message(threshold: &Threshold, amount: Amount, victim: &Candidate) -> String {
    let resource = threshold.signal.resource();
    let name = resource.name();
    let (level, available) = (
        threshold.value.of(amount.capacity),
        resource.quantity(amount.available),
    );
    let mut text = format!(
        "The node was low on resource: {name}. Threshold quantity: {level}, available: {available}. "
    );
    let larger = |what: &str, used: Quantity, requested: Quantity| {
        format!(
            "{what} was using {used}, request is {requested}, has larger consumption of {name}. "
        )
    };
    let whole = pod::spec(&victim.pod).resources.as_ref();
    let whole = whole.and_then(|r| r.requests.as_ref()?.get(name));
    if let (Resource::Memory, Some(request)) = (resource, whole) {
        let pod = format!(
            "Pod {}",
            victim.pod.metadata.name.as_deref().unwrap_or_default()
        );
        let used = Quantity::from_bytes(victim.figures.memory);
        text += &larger(&pod, used, request.0.parse().unwrap_or_default());
    }
    for (name, used, requested) in offenders(resource, victim) {
        text += &larger(&format!("Container {name}"), used, requested);
    }
    text
}

/// Containers that exceed their requests: name, usage, request.
fn offenders(resource: Resource, victim: &Candidate) -> Vec<(String, Quantity, Quantity)> {
    let of = |container: &Container| {
        let figures = &victim.figures.containers;
        let found = figures.iter().find(|f| f.name == container.name)?;
        let used = match resource {
            Resource::Memory => Quantity::from_bytes(found.memory),
            Resource::EphemeralStorage => Quantity::from_bytes(found.disk),
            Resource::Inodes | Resource::Pids => return None,
        };
        let requested = of_container(container, Side::Requests);
        let requested = requested.get(resource.name()).copied();
        let requested = requested.unwrap_or(Quantity::ZERO);
        (used > requested).then(|| (container.name.clone(), used, requested))
    };
    let containers = pod::containers(&victim.pod);
    containers.iter().filter_map(|(_, c)| of(c)).collect()
}

/// Annotations of the eviction event: the kubelet's keys, plus the ranking that selected the pod.
#[must_use]
pub fn annotations(
    resource: Resource,
    victim: &Candidate,
    ranked: &[Candidate],
) -> BTreeMap<String, String> {
    let offenders = offenders(resource, victim);
    let list = |texts: Vec<String>| texts.join(",");
    let names = offenders.iter().map(|(name, ..)| name.clone());
    let used = offenders.iter().map(|(_, used, _)| used.to_string());
    let mut all = BTreeMap::from([
        ("offending_containers".to_owned(), list(names.collect())),
        (
            "offending_containers_usage".to_owned(),
            list(used.collect()),
        ),
        ("starved_resource".to_owned(), resource.name().to_owned()),
        (RANKING.to_owned(), explain(resource, ranked)),
    ]);
    let whole = pod::spec(&victim.pod).resources.as_ref();
    let whole = whole.and_then(|r| r.requests.as_ref()?.get(resource.name()));
    if let (Resource::Memory, Some(_)) = (resource, whole) {
        let name = victim.pod.metadata.name.clone().unwrap_or_default();
        let used = Quantity::from_bytes(victim.figures.memory);
        all.insert("offending_pod".to_owned(), name);
        all.insert("offending_pod_usage".to_owned(), used.to_string());
    }
    all
}

/// Grace period of an eviction in seconds.
#[must_use]
pub fn grace(settings: &Settings, threshold: &Threshold, pod: &Pod) -> i64 {
    let own = pod::spec(pod).termination_grace_period_seconds;
    let own = time::bounded(own.unwrap_or(30));
    match settings.max_pod_grace {
        _ if threshold.is_hard() => 1,
        most if most < 0 => own,
        most => most.min(own),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Signal, Value};
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::time::Duration;

    const MIB: u64 = 1 << 20;

    fn candidate(name: &str, priority: i32, request: &str, used: u64) -> Candidate {
        let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"priority": priority,
            "containers": [{"name": "c", "resources": {"requests": {"memory": request, "ephemeral-storage": request}}}]}});
        Candidate {
            pod: Arc::new(serde_json::from_value(pod).expect("a pod")),
            figures: PodFigures {
                memory: used * MIB,
                disk: used * MIB,
                inodes: used,
                processes: used,
                containers: vec![ContainerFigures {
                    name: "c".into(),
                    memory: used * MIB,
                    disk: used * MIB,
                }],
            },
        }
    }

    fn names(ranked: &[Candidate]) -> Vec<&str> {
        ranked.iter().map(|c| pod::uid(&c.pod)).collect()
    }

    #[test]
    fn pods_are_ranked_by_excess_priority_and_usage() {
        let all = || {
            vec![
                candidate("guaranteed-like", 0, "500Mi", 400),
                candidate("modest", -10, "100Mi", 90),
                candidate("important", 1000, "0", 900),
                candidate("small", 0, "0", 50),
                candidate("large", 0, "100Mi", 300),
                candidate("critical", 2_000_000_000, "0", 5000),
                candidate("idle", 0, "0", 0),
            ]
        };
        let by_request = ["large", "small", "important", "modest", "guaranteed-like"];
        for resource in [Resource::Memory, Resource::EphemeralStorage] {
            assert_eq!(names(&rank(resource, all())), by_request, "{resource:?}");
        }
        let by_priority = ["modest", "guaranteed-like", "large", "small", "important"];
        for resource in [Resource::Inodes, Resource::Pids] {
            assert_eq!(names(&rank(resource, all())), by_priority, "{resource:?}");
        }
        let listed = explain(Resource::Memory, &rank(Resource::Memory, all()));
        assert!(
            listed
                .starts_with("large_n uses 300Mi, requested 100Mi, priority 0; small_n uses 50Mi"),
            "{listed}"
        );
    }

    #[test]
    fn eviction_annotations_name_the_offending_containers() {
        let ranked = [
            candidate("hog", 0, "100Mi", 1024),
            candidate("b", 0, "0", 5),
        ];
        let found = annotations(Resource::Memory, &ranked[0], &ranked);
        let of = |key: &str| found.get(key).map(String::as_str);
        assert_eq!(of("offending_containers"), Some("c"));
        assert_eq!(of("offending_containers_usage"), Some("1Gi"));
        assert_eq!(of("starved_resource"), Some("memory"));
        assert_eq!(of("offending_pod"), None);
        assert_eq!(
            of("ranking"),
            Some(explain(Resource::Memory, &ranked).as_str())
        );
        let pids = annotations(Resource::Pids, &ranked[0], &ranked);
        assert_eq!(pids["offending_containers"], "");
    }

    fn threshold(signal: Signal, grace: u64) -> Threshold {
        Threshold {
            signal,
            value: Value::Share(0.25),
            grace: Duration::from_secs(grace),
            min_reclaim: None,
        }
    }

    #[test]
    fn eviction_messages_are_the_kubelets() {
        let amount = Amount {
            capacity: 400 * MIB,
            available: 50 * MIB,
        };
        let hog = candidate("hog", 0, "100Mi", 1024);
        let message_of = |signal| message(&threshold(signal, 0), amount, &hog);
        assert_eq!(
            message_of(Signal::MemoryAvailable),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. Container c was using 1Gi, request is 100Mi, has larger consumption of memory. "
        );
        assert!(message_of(Signal::ImageFsAvailable).ends_with(
            "Container c was using 1Gi, request is 100Mi, has larger consumption of ephemeral-storage. "
        ));
        let few = Amount {
            capacity: 32768,
            available: 1000,
        };
        assert_eq!(
            message(&threshold(Signal::PidAvailable, 0), few, &hog),
            "The node was low on resource: pids. Threshold quantity: 8Ki, available: 1k. "
        );
        let mut whole = hog.clone();
        let mut pod = (*whole.pod).clone();
        let resources = json!({"requests": {"memory": "2Gi"}});
        if let Some(spec) = &mut pod.spec {
            spec.resources = serde_json::from_value(resources).expect("resources");
        }
        whole.pod = Arc::new(pod);
        let text = message(&threshold(Signal::MemoryAvailable, 0), amount, &whole);
        assert!(
            text.contains("Pod hog was using 1Gi, request is 2Gi, has larger"),
            "{text}"
        );
    }

    #[test]
    fn only_soft_thresholds_grant_a_grace_period() {
        let settings = |max_pod_grace| Settings {
            thresholds: vec![],
            transition: Duration::ZERO,
            max_pod_grace,
        };
        let mut pod = (*candidate("p", 0, "0", 1).pod).clone();
        let soft = threshold(Signal::MemoryAvailable, 30);
        for (most, own, expected) in [
            (0, None, 0),
            (60, None, 30),
            (60, Some(90), 60),
            (-1, Some(90), 90),
        ] {
            if let Some(spec) = &mut pod.spec {
                spec.termination_grace_period_seconds = own;
            }
            assert_eq!(
                grace(&settings(most), &soft, &pod),
                expected,
                "{most}, {own:?}"
            );
            assert_eq!(
                grace(
                    &settings(most),
                    &threshold(Signal::MemoryAvailable, 0),
                    &pod
                ),
                1
            );
        }
    }

    proptest! {
        /// No pod within its request is evicted before a pod that exceeds its own, and critical pods are never evicted.
        #[test]
        fn requests_protect_from_eviction(pods in proptest::collection::vec((-5_i32..5, 0_u64..200, 0_u64..200), 0..20)) {
            let all: Vec<Candidate> = pods.iter().enumerate()
                .map(|(n, (priority, request, used))| candidate(&format!("p{n}"), *priority, &format!("{request}Mi"), *used))
                .chain([candidate("critical", 2_000_000_000, "0", 1)])
                .collect();
            let ranked = rank(Resource::Memory, all.clone());
            prop_assert_eq!(ranked.len(), pods.iter().filter(|(_, _, used)| *used > 0).count());
            let over: Vec<bool> = ranked.iter().map(|c| c.excess(Resource::Memory) > Quantity::ZERO).collect();
            prop_assert!(over.is_sorted_by(|a, b| a >= b));
            for pair in ranked.windows(2) {
                let key = |c: &Candidate| (c.excess(Resource::Memory) <= Quantity::ZERO, c.priority());
                prop_assert!(key(&pair[0]) <= key(&pair[1]));
            }
            let mut reversed = all;
            reversed.reverse();
            prop_assert_eq!(rank(Resource::Memory, reversed), ranked, "the order of observation does not matter");
        }
    }
}
