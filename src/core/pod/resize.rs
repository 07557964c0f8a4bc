//! Resizing containers that run (KEP-1287; kubelet spec, 5.7 and 11.1): what is asked for, what the node
//! has granted, and what the runtime has. Pure.
//!
//! What was granted and carried out stands in the pod's status, so that an agent that has just started goes
//! on from there.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Role;
use crate::core::pod;
use crate::core::quantity::Quantity;

/// The reason of a resize that cannot be granted as long as the pod runs.
pub const INFEASIBLE: &str = "Infeasible";

/// The resources that can change while a container runs.
const RESIZABLE: [&str; 2] = ["cpu", "memory"];

/// One container's CPU and memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Size {
    /// What is set aside.
    pub requests: BTreeMap<String, Text>,
    /// What may not be exceeded.
    pub limits: BTreeMap<String, Text>,
}

/// The sizes of a pod's regular containers and sidecars, by name.
pub type Sizes = BTreeMap<String, Size>;

fn resizable(map: Option<&BTreeMap<String, Text>>) -> BTreeMap<String, Text> {
    map.into_iter()
        .flatten()
        .filter(|(name, _)| RESIZABLE.contains(&name.as_str()))
        .map(|(n, q)| (n.clone(), q.clone()))
        .collect()
}

impl Size {
    fn of(resources: Option<&ResourceRequirements>) -> Size {
        Size {
            requests: resizable(resources.and_then(|r| r.requests.as_ref())),
            limits: resizable(resources.and_then(|r| r.limits.as_ref())),
        }
    }

    fn amount(map: &BTreeMap<String, Text>, name: &str) -> Option<Quantity> {
        map.get(name).and_then(|q| q.0.parse().ok())
    }

    /// Whether a resource is another one in another size, whatever its spelling.
    fn differs(&self, other: &Size, name: &str) -> bool {
        Self::amount(&self.requests, name) != Self::amount(&other.requests, name)
            || Self::amount(&self.limits, name) != Self::amount(&other.limits, name)
    }

    /// The larger of both, resource by resource: what must fit while one becomes the other.
    fn larger(&self, other: &Size) -> Size {
        let larger = |a: &BTreeMap<String, Text>, b: &BTreeMap<String, Text>| {
            let pick = |name: &&str| match (Self::amount(a, name), Self::amount(b, name)) {
                (Some(x), Some(y)) => Some((
                    (*name).to_owned(),
                    if x >= y {
                        a[*name].clone()
                    } else {
                        b[*name].clone()
                    },
                )),
                // Without a limit on one side there is none meanwhile.
                _ => None,
            };
            RESIZABLE.iter().filter_map(pick).collect()
        };
        Size {
            requests: larger(&self.requests, &other.requests),
            limits: larger(&self.limits, &other.limits),
        }
    }
}

fn counts(role: Role) -> bool {
    matches!(role, Role::Regular | Role::Sidecar)
}

/// The sizes that the spec asks for.
#[must_use]
pub fn desired(pod: &Pod) -> Sizes {
    pod::containers(pod)
        .iter()
        .filter(|(role, _)| counts(*role))
        .map(|(_, c)| (c.name.clone(), Size::of(c.resources.as_ref())))
        .collect()
}

/// The sizes that the pod's status shows as carried out; what it does not show is as the spec has it.
#[must_use]
pub fn known(pod: &Pod) -> Sizes {
    let mut sizes = desired(pod);
    let status = pod.status.as_ref();
    let statuses = status
        .into_iter()
        .flat_map(|s| [&s.container_statuses, &s.init_container_statuses])
        .flatten()
        .flatten();
    for status in statuses.filter(|s| s.resources.is_some()) {
        if let Some(size) = sizes.get_mut(&status.name) {
            *size = Size::of(status.resources.as_ref());
        }
    }
    sizes
}

/// Whether two sets of sizes are the same in amount.
#[must_use]
pub fn same(a: &Sizes, b: &Sizes) -> bool {
    a.iter().all(|(name, size)| {
        b.get(name)
            .is_none_or(|other| !RESIZABLE.iter().any(|r| size.differs(other, r)))
    })
}

/// A change of a container's requests or limits that the spec asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// `cpu` or `memory`.
    pub resource: &'static str,
    /// `requests` or `limits`.
    pub of: &'static str,
    /// `add`, `remove`, `increase` or `decrease`.
    pub operation: &'static str,
}

/// What two specs of a pod ask for differently.
#[must_use]
pub fn asked(before: &Pod, now: &Pod) -> Vec<Asked> {
    let (before, now) = (desired(before), desired(now));
    let none = Size::default();
    let mut all = vec![];
    for (name, size) in &now {
        let old = before.get(name).unwrap_or(&none);
        for (of, old, new) in [
            ("requests", &old.requests, &size.requests),
            ("limits", &old.limits, &size.limits),
        ] {
            for resource in RESIZABLE {
                let amounts = (Size::amount(old, resource), Size::amount(new, resource));
                let operation = match amounts {
                    (None, Some(_)) => "add",
                    (Some(_), None) => "remove",
                    (Some(old), Some(new)) if new > old => "increase",
                    (Some(old), Some(new)) if new < old => "decrease",
                    _ => continue,
                };
                all.push(Asked {
                    resource,
                    of,
                    operation,
                });
            }
        }
    }
    all
}

fn put(resources: &mut Option<ResourceRequirements>, size: &Size) {
    if resources.is_none() && size.requests.is_empty() && size.limits.is_empty() {
        return;
    }
    let resources = resources.get_or_insert_default();
    for (side, new) in [
        (&mut resources.requests, &size.requests),
        (&mut resources.limits, &size.limits),
    ] {
        let map = side.get_or_insert_default();
        map.retain(|name, _| !RESIZABLE.contains(&name.as_str()));
        map.extend(new.iter().map(|(n, q)| (n.clone(), q.clone())));
    }
}

/// The pod with these sizes in place of those its spec asks for.
#[must_use]
pub fn with(pod: &Pod, sizes: &Sizes) -> Pod {
    let mut pod = pod.clone();
    if let Some(spec) = &mut pod.spec {
        for container in spec
            .containers
            .iter_mut()
            .chain(spec.init_containers.iter_mut().flatten())
        {
            if let Some(size) = sizes.get(&container.name) {
                put(&mut container.resources, size);
            }
        }
    }
    pod
}

/// The pod with the larger of both sizes: its cgroup while it is resized.
#[must_use]
pub fn with_larger(pod: &Pod, from: &Sizes, to: &Sizes) -> Pod {
    let larger = to
        .iter()
        .map(|(name, size)| {
            (
                name.clone(),
                from.get(name)
                    .map_or_else(|| size.clone(), |before| size.larger(before)),
            )
        })
        .collect();
    with(pod, &larger)
}

/// What a container needs so that the runtime has its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// An update while it runs.
    Update,
    /// A restart: its resize policy says so.
    Restart,
}

/// What a running container needs. The pod has the sizes that were granted.
#[must_use]
pub fn change(container: &Container, actuated: &Sizes) -> Change {
    let (granted, Some(actual)) = (
        Size::of(container.resources.as_ref()),
        actuated.get(&container.name),
    ) else {
        return Change::None;
    };
    let changed: Vec<&str> = RESIZABLE
        .into_iter()
        .filter(|name| granted.differs(actual, name))
        .collect();
    let restarts = |name: &&str| {
        container
            .resize_policy
            .iter()
            .flatten()
            .any(|p| p.resource_name == **name && p.restart_policy == "RestartContainer")
    };
    match (changed.is_empty(), changed.iter().any(restarts)) {
        (true, _) => Change::None,
        (false, true) => Change::Restart,
        (false, false) => Change::Update,
    }
}

/// Whether the memory limit becomes smaller, and to how many bytes.
#[must_use]
pub fn lowers_memory(container: &Container, actuated: &Sizes) -> Option<i64> {
    let granted = Size::of(container.resources.as_ref());
    let new = Size::amount(&granted.limits, "memory")?;
    let before = Size::amount(&actuated.get(&container.name)?.limits, "memory")?;
    (new < before).then(|| new.units())
}

/// The text that events of a resize end with.
#[must_use]
pub fn described(pod: &Pod, error: Option<&str>) -> String {
    let list = |containers: &[Container]| -> Vec<Value> {
        containers
            .iter()
            .map(|c| json!({"name": c.name, "resources": c.resources}))
            .collect()
    };
    let spec = pod::spec(pod);
    let mut text =
        json!({"containers": list(&spec.containers), "generation": pod.metadata.generation});
    if let Some(init) = spec.init_containers.as_ref().filter(|i| !i.is_empty()) {
        text["initContainers"] = list(init).into();
    }
    if let Some(error) = error {
        text["error"] = error.into();
    }
    text.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(cpu: &str, memory: &str, policy: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"generation": 2}, "spec": {"containers": [
            {"name": "a", "resizePolicy": policy, "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory, "example.com/x": "1"}}},
        ]}}))
        .expect("a pod")
    }

    #[test]
    fn what_is_asked_for_is_told_by_resource() {
        let before = pod("1", "64Mi", json!([]));
        let of = |now: &Pod| -> Vec<String> {
            let asked = asked(&before, now);
            let shown = |a: &Asked| format!("{} {} {}", a.operation, a.resource, a.of);
            asked.iter().map(shown).collect()
        };
        assert_eq!(of(&pod("1000m", "65536Ki", json!([]))), [""; 0]);
        assert_eq!(
            of(&pod("2", "32Mi", json!([]))),
            [
                "increase cpu requests",
                "decrease memory requests",
                "decrease memory limits"
            ]
        );
        let mut none = before.clone();
        none.spec.as_mut().expect("a spec").containers[0].resources = None;
        assert_eq!(
            of(&none),
            [
                "remove cpu requests",
                "remove memory requests",
                "remove memory limits"
            ]
        );
        assert_eq!(asked(&none, &before)[0].operation, "add");
    }

    #[test]
    fn sizes_are_compared_by_amount_and_changed_as_their_policy_says() {
        let restart = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        let before = desired(&pod("1", "64Mi", json!([])));
        for (cpu, memory, policy, expected) in [
            ("1000m", "65536Ki", json!([]), Change::None),
            ("2", "64Mi", json!([]), Change::Update),
            ("1", "128Mi", json!([]), Change::Update),
            ("1", "128Mi", restart.clone(), Change::Restart),
            ("2", "64Mi", restart, Change::Update),
        ] {
            let granted = pod(cpu, memory, policy);
            assert_eq!(
                change(&pod::spec(&granted).containers[0], &before),
                expected,
                "{cpu} {memory}"
            );
            assert_eq!(same(&desired(&granted), &before), expected == Change::None);
        }
        let smaller = pod("1", "32Mi", json!([]));
        assert_eq!(
            lowers_memory(&pod::spec(&smaller).containers[0], &before),
            Some(32 << 20)
        );
        assert_eq!(
            lowers_memory(
                &pod::spec(&pod("1", "65Mi", json!([]))).containers[0],
                &before
            ),
            None
        );
    }

    #[test]
    fn granted_sizes_replace_desired_ones_and_leave_the_rest() {
        let asked = pod("4", "1Gi", json!([]));
        let granted = with(&asked, &desired(&pod("1", "64Mi", json!([]))));
        let resources = pod::spec(&granted).containers[0]
            .resources
            .clone()
            .expect("resources");
        assert_eq!(resources.requests.expect("requests")["cpu"].0, "1");
        assert_eq!(resources.limits.expect("limits")["example.com/x"].0, "1");
        let larger = with_larger(
            &asked,
            &desired(&pod("8", "64Mi", json!([]))),
            &desired(&asked),
        );
        let resources = pod::spec(&larger).containers[0]
            .resources
            .clone()
            .expect("resources");
        assert_eq!(
            (
                resources.requests.as_ref().expect("requests")["cpu"]
                    .0
                    .as_str(),
                resources.limits.expect("limits")["memory"].0.as_str()
            ),
            ("8", "1Gi")
        );
        assert!(described(&asked, Some("why")).contains("\"error\":\"why\""));
    }

    #[test]
    fn what_the_status_shows_is_where_a_fresh_agent_goes_on() {
        let mut asked = pod("4", "1Gi", json!([]));
        asked.status =
            serde_json::from_value(json!({"containerStatuses": [{"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "resources": {"requests": {"cpu": "1", "memory": "64Mi"}, "limits": {"memory": "64Mi"}}}]}))
            .expect("a status");
        assert!(same(&known(&asked), &desired(&pod("1", "64Mi", json!([])))));
    }
}
