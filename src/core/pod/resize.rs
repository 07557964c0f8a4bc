//! Resizing pods that run (KEP-1287, KEP-5419): what is asked for, what the node
//! has granted, and what the runtime has. Pure.
//!
//! What was granted and carried out stands in the pod's status, so that an agent that has just started goes
//! on from there.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, Pod, PodStatus, ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Role;
use super::qos;
use crate::core::node::conditions::joined;
use crate::core::pod;
use crate::core::pod::cgroup::pod_bounds;
use crate::core::pod::cri_config::may_swap;
use crate::core::pod::resources::{Amounts, Side, amounts, of_container, of_pod, of_pod_level};
use crate::core::quantity::Quantity;

/// The reason of a resize that cannot be granted as long as the pod runs.
pub const INFEASIBLE: &str = "Infeasible";
/// The condition of a pod whose sizes are being brought to what was granted.
pub const IN_PROGRESS: &str = "PodResizeInProgress";

/// Why a resize cannot be granted as long as the pod runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Infeasible {
    /// The node has not so much, even if the pod were alone.
    Capacity,
    /// Processors that containers have for themselves stay theirs.
    CpuManager,
    /// So does memory that containers have for themselves.
    MemoryManager,
    /// A container's share of swap follows from its memory request, and stays as long as it runs.
    Swap,
}

impl Infeasible {
    /// As the metric of infeasible resizes has it.
    #[must_use]
    pub fn detail(self) -> &'static str {
        match self {
            Infeasible::Capacity => "insufficient_node_allocatable",
            Infeasible::CpuManager => "guaranteed_pod_cpu_manager_static_policy",
            Infeasible::MemoryManager => "guaranteed_pod_memory_manager_static_policy",
            Infeasible::Swap => "swap_limitation",
        }
    }
}

/// The resources that can change while a container runs.
const RESIZABLE: [&str; 2] = ["cpu", "memory"];

/// Whether a resource can change while a container runs.
#[must_use]
pub fn is_resizable(resource: &str) -> bool {
    RESIZABLE.contains(&resource)
}

/// CPU and memory of one container, or of the pod as a whole.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Size {
    /// What is set aside.
    pub requests: BTreeMap<String, Text>,
    /// What may not be exceeded.
    pub limits: BTreeMap<String, Text>,
}

/// The sizes of a pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sizes {
    /// What is set for the pod as a whole (KEP-2837).
    pub pod: Size,
    /// Those of its containers, by name; ephemeral ones have none.
    pub containers: BTreeMap<String, Size>,
}

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

    fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.limits.is_empty()
    }

    fn amount(map: &BTreeMap<String, Text>, name: &str) -> Option<Quantity> {
        map.get(name).and_then(|q| q.0.parse().ok())
    }

    fn is_same(&self, other: &Size) -> bool {
        !RESIZABLE.iter().any(|r| self.differs(other, r))
    }

    /// With the pod's limits where it has none of its own: what the container is given.
    fn with_limits_of(mut self, pod: &Size) -> Size {
        for (name, limit) in &pod.limits {
            let own = Self::amount(&self.limits, name).filter(|own| !own.is_zero());
            if own.is_none() {
                self.limits.insert(name.clone(), limit.clone());
            }
        }
        self
    }

    /// Whether a resource has another size, whatever its spelling.
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

/// The sizes that the spec asks for.
#[must_use]
pub fn desired(pod: &Pod) -> Sizes {
    let containers = pod::containers(pod).into_iter();
    let sized = containers.filter(|(role, _)| *role != Role::Ephemeral);
    Sizes {
        pod: Size::of(pod::spec(pod).resources.as_ref()),
        containers: sized
            .map(|(_, c)| (c.name.clone(), Size::of(c.resources.as_ref())))
            .collect(),
    }
}

/// The sizes that the runtime is to have: a container without a limit of its own has the pod's.
#[must_use]
pub fn wanted(pod: &Pod) -> Sizes {
    let Sizes { pod, containers } = desired(pod);
    let containers = containers
        .into_iter()
        .map(|(name, size)| (name, size.with_limits_of(&pod)))
        .collect();
    Sizes { pod, containers }
}

/// The statuses of the containers whose sizes have been told.
fn with_sizes(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let statuses = [&status.container_statuses, &status.init_container_statuses];
    let statuses = statuses.into_iter().flatten().flatten();
    statuses.filter(|status| status.resources.is_some())
}

/// The sizes that the pod's status shows as carried out; what it does not show is as the spec has it.
#[must_use]
pub fn known(pod: &Pod) -> Sizes {
    let mut sizes = desired(pod);
    let Some(status) = &pod.status else {
        return sizes;
    };
    let asked = sizes.pod.clone();
    if !asked.is_empty() {
        sizes.pod = known_of_pod(pod, status, &asked);
    }
    for status in with_sizes(status) {
        let Some(size) = sizes.containers.get_mut(&status.name) else {
            continue;
        };
        let mut shown = Size::of(status.resources.as_ref());
        // What it has from the pod is shown as its own.
        let own = &size.limits;
        shown
            .limits
            .retain(|name, _| own.contains_key(name) || !asked.limits.contains_key(name));
        let from_limit =
            |name: &String| !size.requests.contains_key(name) && asked.limits.contains_key(name);
        shown.requests.retain(|name, _| !from_limit(name));
        *size = shown;
    }
    sizes
}

/// The sizes that the runtime has, as the pod's status shows them.
#[must_use]
pub fn actuated(pod: &Pod) -> Sizes {
    wanted(&with(pod, &known(pod)))
}

/// What is shown of the whole pod has its overhead with it.
fn known_of_pod(pod: &Pod, status: &PodStatus, asked: &Size) -> Size {
    let overhead = pod::spec(pod).overhead.as_ref();
    let overhead = overhead.map(amounts).unwrap_or_default();
    let known = |asked: &BTreeMap<String, Text>, shown: Option<&BTreeMap<String, Text>>| {
        let one = |(name, asked): (&String, &Text)| {
            let shown: Option<Quantity> = shown.and_then(|s| s.get(name)?.0.parse().ok());
            let over = overhead.get(name).copied().unwrap_or_default();
            let has = shown.map(|shown| shown - over);
            let has = has.filter(|has| asked.0.parse() != Ok(*has));
            let text = has.map_or_else(|| asked.clone(), |has| Text(has.to_string()));
            (name.clone(), text)
        };
        asked.iter().map(one).collect()
    };
    let limits = status.resources.as_ref().and_then(|r| r.limits.as_ref());
    Size {
        requests: known(&asked.requests, status.allocated_resources.as_ref()),
        limits: known(&asked.limits, limits),
    }
}

/// Whether two sets of sizes are the same in amount.
#[must_use]
pub fn same(a: &Sizes, b: &Sizes) -> bool {
    a.pod.is_same(&b.pod)
        && a.containers.iter().all(|(name, size)| {
            let other = b.containers.get(name);
            other.is_none_or(|other| size.is_same(other))
        })
}

/// How far a pod is with its resize.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resizing {
    /// The sizes that the runtime has; a container has the pod's limits where it has none of its own.
    pub actuated: Sizes,
    /// Those that the pod's cgroup was made for; none before it is made.
    pub cgroup: Option<Sizes>,
    /// Why what the spec asks for is not granted: reason and message.
    pub pending: Option<(String, String)>,
    /// Why what was granted is not carried out.
    pub error: Option<String>,
    /// Sizes that containers may have as well as those in `actuated`, by name: an update to them was begun, and did not end
    /// well. What the runtime has made of it is known when a later update has.
    pub unsettled: BTreeMap<String, Size>,
    /// The same of the pod's cgroup.
    pub unsettled_cgroup: bool,
}

impl Resizing {
    /// That of an agent before this one, as the pod's status tells it. What it was doing then may have been done or not, and
    /// a container that was started without being told has the size that was asked for at that time.
    #[must_use]
    pub fn adopted(pod: &Pod) -> Resizing {
        let status = pod.status.as_ref();
        let mut conditions = status.iter().flat_map(|s| s.conditions.iter().flatten());
        let is_under_way = conditions.any(|c| c.type_ == IN_PROGRESS && c.status == "True");
        let has_changed = status.is_some_and(|s| {
            s.observed_generation.is_some() && s.observed_generation != pod.metadata.generation
        });
        let is_told =
            |name: &String| status.is_some_and(|s| with_sizes(s).any(|c| c.name == *name));
        let mut unsettled = wanted(pod).containers;
        unsettled.retain(|name, _| is_under_way || (has_changed && !is_told(name)));
        Resizing {
            actuated: actuated(pod),
            unsettled,
            ..Resizing::default()
        }
    }

    /// Whether the pod's cgroup is still for other sizes than these.
    #[must_use]
    pub fn owes_cgroup(&self, wanted: &Sizes) -> bool {
        let is_other = |cgroup: &Sizes| self.unsettled_cgroup || !same(cgroup, wanted);
        self.cgroup.as_ref().is_some_and(is_other)
    }

    /// Whether something that runs, or the pod's cgroup, does not have these sizes yet.
    #[must_use]
    pub fn is_under_way(&self, wanted: &Sizes, runs: impl Fn(&str) -> bool) -> bool {
        let has = |(name, size): (&String, &Size)| {
            let actual = self.actuated.containers.get(name);
            let is_same = actual.is_none_or(|actual| actual.is_same(size));
            (is_same && !self.unsettled.contains_key(name)) || !runs(name)
        };
        !self.actuated.pod.is_same(&wanted.pod)
            || self.owes_cgroup(wanted)
            || !wanted.containers.iter().all(has)
    }

    /// Containers and the pod's cgroup are about to be brought to these sizes: until that has been done, they may have them
    /// or not.
    pub fn begins(&mut self, names: &[String], to: &Sizes) {
        for name in names {
            if let Some(size) = to.containers.get(name) {
                let before = self.unsettled.get(name);
                let largest = before.map_or_else(|| size.clone(), |before| before.larger(size));
                self.unsettled.insert(name.clone(), largest);
            }
        }
        self.unsettled_cgroup = true;
    }

    /// The most that containers may have now.
    #[must_use]
    pub fn at_most(&self) -> Sizes {
        let mut sizes = self.actuated.clone();
        for (name, size) in &self.unsettled {
            if let Some(actual) = sizes.containers.get_mut(name) {
                *actual = actual.larger(size);
            }
        }
        sizes
    }

    /// A container has its part of these sizes.
    pub fn has_container(&mut self, name: &str, sizes: &Sizes) {
        self.unsettled.remove(name);
        let size = sizes.containers.get_key_value(name);
        let size = size.map(|(name, size)| (name.clone(), size.clone()));
        self.actuated.containers.extend(size);
    }

    /// The pod's cgroup is made for these sizes.
    pub fn has_cgroup(&mut self, sizes: Sizes) {
        self.unsettled_cgroup = false;
        self.actuated.pod = sizes.pod.clone();
        self.cgroup = Some(sizes);
    }

    /// Containers have been brought to these sizes, and the pod's cgroup with them.
    pub fn carried_out(&mut self, names: &[String], to: Sizes) {
        for name in names {
            self.has_container(name, &to);
        }
        self.has_cgroup(to);
        self.error = None;
    }
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
    for (name, size) in &now.containers {
        let old = before.containers.get(name).unwrap_or(&none);
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
    if resources.is_none() && size.is_empty() {
        return;
    }
    let both = resources.get_or_insert_default();
    for (side, new) in [
        (&mut both.requests, &size.requests),
        (&mut both.limits, &size.limits),
    ] {
        let mut map = side.take().unwrap_or_default();
        map.retain(|name, _| !RESIZABLE.contains(&name.as_str()));
        map.extend(new.iter().map(|(n, q)| (n.clone(), q.clone())));
        // An empty map is not the same as none: a pod whose own is empty would be of another QoS class.
        *side = (!map.is_empty()).then_some(map);
    }
    resources.take_if(|both| *both == ResourceRequirements::default());
}

/// The pod with these sizes in place of those its spec asks for.
#[must_use]
pub fn with(pod: &Pod, sizes: &Sizes) -> Pod {
    let mut pod = pod.clone();
    if let Some(spec) = &mut pod.spec {
        put(&mut spec.resources, &sizes.pod);
        for container in spec
            .containers
            .iter_mut()
            .chain(spec.init_containers.iter_mut().flatten())
        {
            if let Some(size) = sizes.containers.get(&container.name) {
                put(&mut container.resources, size);
            }
        }
    }
    pod
}

/// The pod with the larger of both sizes: its cgroup while it is resized.
#[must_use]
pub fn with_larger(pod: &Pod, from: &Sizes, to: &Sizes) -> Pod {
    let larger = |name: &String, size: &Size| {
        from.containers
            .get(name)
            .map_or_else(|| size.clone(), |before| size.larger(before))
    };
    let larger = Sizes {
        pod: to.pod.larger(&from.pod),
        containers: to
            .containers
            .iter()
            .map(|(name, size)| (name.clone(), larger(name, size)))
            .collect(),
    };
    let larger = with(pod, &larger);
    let class = |pod: &Pod| qos::of(pod::spec(pod));
    // The cgroup of another class would be another one.
    if class(&larger) == class(pod) {
        larger
    } else {
        with(pod, to)
    }
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

/// Whether a container is restarted to have another size of a resource.
fn restarts_for(container: &Container, resource: &str) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|p| p.resource_name == resource && p.restart_policy == "RestartContainer")
}

/// Whether the memory request changes of a container that swaps, before or after, and is not restarted for it (kubelet's
/// `disallowResizeForSwappableContainers`). On a node that lets containers swap.
#[must_use]
pub fn moves_swap(now: &Pod, then: &Pod) -> bool {
    let (before, after) = (pod::containers(now), pod::containers(then));
    let request = |c: &Container| of_container(c, Side::Requests).get("memory").copied();
    let mut both = after.iter().filter_map(|(role, new)| {
        let old = before.iter().find(|(_, old)| old.name == new.name)?;
        (*role != Role::Ephemeral).then(|| (&*old.1, &**new))
    });
    both.any(|(old, new)| {
        request(old) != request(new)
            && !restarts_for(old, "memory")
            && (may_swap(now, old) || may_swap(then, new))
    })
}

/// What a running container needs to have what it is to have.
#[must_use]
pub fn change(container: &Container, wanted: &Sizes, resizing: &Resizing) -> Change {
    let of = |sizes: &'_ Sizes| sizes.containers.get(&container.name).cloned();
    let (Some(wanted), Some(actual)) = (of(wanted), of(&resizing.actuated)) else {
        return Change::None;
    };
    let changed: Vec<&str> = RESIZABLE
        .into_iter()
        .filter(|name| wanted.differs(&actual, name))
        .collect();
    let restarts = changed.iter().any(|name| restarts_for(container, name));
    let is_settled = !resizing.unsettled.contains_key(&container.name);
    match (changed.is_empty() && is_settled, restarts) {
        (true, _) => Change::None,
        (false, true) => Change::Restart,
        (false, false) => Change::Update,
    }
}

/// Whether a container's memory limit becomes smaller than the most that it may have, and to how many bytes.
#[must_use]
pub fn lowers_memory(name: &str, wanted: &Sizes, at_most: &Sizes) -> Option<i64> {
    let limit = |sizes: &Sizes| Size::amount(&sizes.containers.get(name)?.limits, "memory");
    let new = limit(wanted)?;
    let lowers = limit(at_most).is_none_or(|before| new < before);
    lowers.then(|| new.units())
}

/// Whether the memory limit of the pod's cgroup becomes smaller, and to how many bytes.
#[must_use]
pub fn lowers_memory_of_pod(pod: &Pod, actuated: &Sizes) -> Option<i64> {
    let limit = |pod: &Pod| pod_bounds(pod).get("memory").map(|q| q.units());
    let new = limit(pod)?;
    let lowers = limit(&with(pod, actuated)).is_none_or(|before| new < before);
    lowers.then_some(new)
}

/// A memory limit that is to become smaller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowered {
    /// Whose: `pod`, or `container "…"`.
    pub of: String,
    /// The bytes that it is to be.
    pub limit: i64,
    /// The bytes that are used now; none where that is not known.
    pub used: Option<u64>,
}

/// Refuses limits that are not above what is used: the kernel would kill for them (kubelet's
/// `validateMemoryResizeAction`). The error names all of them.
pub fn check_lowered(all: &[Lowered]) -> Result<(), String> {
    let objection = |lowered: &Lowered| {
        let Lowered { of, limit, used } = lowered;
        match used {
            None => Some(format!("missing {of} memory usage")),
            Some(used) if i128::from(*used) >= i128::from(*limit) => Some(format!(
                "attempting to set {of} memory limit ({limit}) below current usage ({used})"
            )),
            Some(_) => None,
        }
    };
    let found: Vec<String> = all.iter().filter_map(objection).collect();
    match joined(&found) {
        None => Ok(()),
        Some(why) => Err(format!("cannot decrease memory limits: {why}")),
    }
}

/// A container's resources as its status tells them. The pod's limits stand beside those of its own; where it has none
/// of its own none is told, as by the kubelet.
#[must_use]
pub fn told(container: &Container, actuated: &Sizes) -> ResourceRequirements {
    let mut resources = container.resources.clone();
    if let Some(size) = actuated.containers.get(&container.name) {
        let mut size = size.clone();
        let has = |r: &ResourceRequirements| r.limits.as_ref().is_some_and(|l| !l.is_empty());
        if !resources.as_ref().is_some_and(has) {
            size.limits.clear();
        }
        put(&mut resources, &size);
    }
    let mut resources = resources.unwrap_or_default();
    resources.claims = None;
    resources
}

/// What the status tells of the pod as a whole: what is set aside for it, overhead included, and what its cgroup has.
#[must_use]
pub fn told_of_pod(
    pod: &Pod,
    wanted: &Sizes,
    actuated: &Sizes,
) -> (Option<BTreeMap<String, Text>>, Option<ResourceRequirements>) {
    let has = if same(actuated, wanted) {
        Cow::Borrowed(pod)
    } else {
        Cow::Owned(with(pod, actuated))
    };
    let whole = pod::spec(pod).resources.as_ref();
    let some = |map: BTreeMap<String, Text>| (!map.is_empty()).then_some(map);
    let texts = |amounts: Amounts, spelled: Option<&BTreeMap<String, Text>>| {
        let text = |(name, amount): (String, Quantity)| {
            let spelled = spelled.and_then(|s| s.get(&name));
            let spelled = spelled.filter(|text| text.0.parse() == Ok(amount));
            let text = spelled.cloned().unwrap_or_else(|| Text(amount.to_string()));
            (name, text)
        };
        some(amounts.into_iter().map(text).collect())
    };
    let requests = whole.and_then(|r| r.requests.as_ref());
    let limits = whole.and_then(|r| r.limits.as_ref());
    let allocated = texts(of_pod(pod, Side::Requests), requests);
    let mut own = of_pod(&has, Side::Requests);
    own.retain(|name, _| {
        RESIZABLE.contains(&name.as_str()) || requests.is_some_and(|r| r.contains_key(name))
    });
    let mut bounds = pod_bounds(&has);
    let pages = of_pod_level(&has, Side::Limits).into_iter();
    bounds.extend(pages.filter(|(name, _)| !RESIZABLE.contains(&name.as_str())));
    let resources = ResourceRequirements {
        requests: texts(own, requests),
        limits: texts(bounds, limits),
        claims: None,
    };
    let resources = Some(resources).filter(|r| *r != ResourceRequirements::default());
    (allocated, resources)
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
mod tests;
