//! In-place resize of pods (KEP-1287, KEP-5419): the sizes that the spec requests, that the node has granted, and that
//! the runtime has. Pure.
//!
//! The pod's status holds the granted and the actuated sizes, so that a restarted agent continues from there.

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
use crate::node::conditions::joined;
use crate::pod;
use crate::pod::cgroup::pod_bounds;
use crate::pod::cri_config::may_swap;
use crate::pod::resources::{Amounts, Side, amounts, of_container, of_pod, of_pod_level};
use crate::quantity::Quantity;

/// The reason of a resize that the node cannot grant while the pod runs.
pub const INFEASIBLE: &str = "Infeasible";
/// The condition type of a pod whose granted sizes are being actuated.
pub const IN_PROGRESS: &str = "PodResizeInProgress";

/// Why the node cannot grant a resize while the pod runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Infeasible {
    /// The request exceeds the node's allocatable resources, even without other pods.
    Capacity,
    /// The exclusive CPUs of a container cannot change.
    CpuManager,
    /// The memory that is assigned to a container cannot change.
    MemoryManager,
    /// The swap limit of a running container follows from its memory request and cannot change.
    Swap,
}

impl Infeasible {
    /// The label value in the metric of infeasible resizes.
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

/// The resources that can be resized.
const RESIZABLE: [&str; 2] = ["cpu", "memory"];

/// Whether a resource can be resized.
#[must_use]
pub(crate) fn is_resizable(resource: &str) -> bool {
    RESIZABLE.contains(&resource)
}

/// CPU and memory of one container, or of the pod (pod-level resources).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Size {
    /// Requests by resource.
    pub requests: BTreeMap<String, Text>,
    /// Limits by resource.
    pub limits: BTreeMap<String, Text>,
}

/// The sizes of a pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sizes {
    /// Pod-level resources (KEP-2837).
    pub pod: Size,
    /// Sizes of containers, by name. Ephemeral containers have none.
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

    /// The size with the pod's limits where the container has no limit: what the container gets.
    fn with_limits_of(mut self, pod: &Size) -> Size {
        for (name, limit) in &pod.limits {
            let own = Self::amount(&self.limits, name).filter(|own| !own.is_zero());
            if own.is_none() {
                self.limits.insert(name.clone(), limit.clone());
            }
        }
        self
    }

    /// Whether the amounts of a resource differ. Spelling does not matter.
    fn differs(&self, other: &Size, name: &str) -> bool {
        Self::amount(&self.requests, name) != Self::amount(&other.requests, name)
            || Self::amount(&self.limits, name) != Self::amount(&other.limits, name)
    }

    /// The larger amount of each resource: what must fit while one size changes into the other.
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
                // If one side has no amount, the result has none: no limit means unlimited.
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

/// The sizes that the spec requests.
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

/// The sizes that the runtime should have: a container without a limit gets the pod's.
#[must_use]
pub fn wanted(pod: &Pod) -> Sizes {
    let Sizes { pod, containers } = desired(pod);
    let containers = containers
        .into_iter()
        .map(|(name, size)| (name, size.with_limits_of(&pod)))
        .collect();
    Sizes { pod, containers }
}

/// The statuses of the containers whose sizes are reported.
fn with_sizes(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let statuses = [&status.container_statuses, &status.init_container_statuses];
    let statuses = statuses.into_iter().flatten().flatten();
    statuses.filter(|status| status.resources.is_some())
}

/// The sizes that the pod's status reports as actuated. Sizes that the status lacks are those of the spec.
#[must_use]
pub fn known(pod: &Pod) -> Sizes {
    let mut sizes = desired(pod);
    let Some(status) = &pod.status else {
        return sizes;
    };
    let requested = sizes.pod.clone();
    if !requested.is_empty() {
        sizes.pod = known_of_pod(pod, status, &requested);
    }
    for status in with_sizes(status) {
        let Some(size) = sizes.containers.get_mut(&status.name) else {
            continue;
        };
        let mut shown = Size::of(status.resources.as_ref());
        // The status reports limits that come from the pod, and requests that follow from them, as the container's own.
        // Remove these.
        let own = &size.limits;
        shown
            .limits
            .retain(|name, _| own.contains_key(name) || !requested.limits.contains_key(name));
        let from_limit = |name: &String| {
            !size.requests.contains_key(name) && requested.limits.contains_key(name)
        };
        shown.requests.retain(|name, _| !from_limit(name));
        *size = shown;
    }
    sizes
}

/// The sizes that the runtime has according to the pod's status.
#[must_use]
pub fn actuated(pod: &Pod) -> Sizes {
    wanted(&with(pod, &known(pod)))
}

/// The pod-level size in the status. The status includes the overhead, which is subtracted here.
fn known_of_pod(pod: &Pod, status: &PodStatus, requested: &Size) -> Size {
    let overhead = pod::spec(pod).overhead.as_ref();
    let overhead = overhead.map(amounts).unwrap_or_default();
    let known = |requested: &BTreeMap<String, Text>, shown: Option<&BTreeMap<String, Text>>| {
        let one = |(name, requested): (&String, &Text)| {
            let shown: Option<Quantity> = shown.and_then(|s| s.get(name)?.0.parse().ok());
            let over = overhead.get(name).copied().unwrap_or_default();
            let has = shown.map(|shown| shown - over);
            let has = has.filter(|has| requested.0.parse() != Ok(*has));
            let text = has.map_or_else(|| requested.clone(), |has| Text(has.to_string()));
            (name.clone(), text)
        };
        requested.iter().map(one).collect()
    };
    let limits = status.resources.as_ref().and_then(|r| r.limits.as_ref());
    Size {
        requests: known(&requested.requests, status.allocated_resources.as_ref()),
        limits: known(&requested.limits, limits),
    }
}

/// Whether two sets of sizes have equal amounts.
#[must_use]
pub fn same(a: &Sizes, b: &Sizes) -> bool {
    a.pod.is_same(&b.pod)
        && a.containers.iter().all(|(name, size)| {
            let other = b.containers.get(name);
            other.is_none_or(|other| size.is_same(other))
        })
}

/// The progress of a pod's resize.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resizing {
    /// The sizes that the runtime has. A container without a limit has the pod's.
    pub actuated: Sizes,
    /// The sizes that the pod's cgroup was created for or updated to. `None` before it is created.
    pub cgroup: Option<Sizes>,
    /// Why the requested sizes are not granted: reason and message.
    pub pending: Option<(String, String)>,
    /// Why actuating the granted sizes failed.
    pub error: Option<String>,
    /// Sizes that containers may have instead of those in `actuated`, by name: an update to them did not succeed. The
    /// container's size is unknown until an update succeeds.
    pub unsettled: BTreeMap<String, Size>,
    /// Whether the same applies to the pod's cgroup.
    pub unsettled_cgroup: bool,
}

impl Resizing {
    /// The progress that an earlier agent left, according to the pod's status. A resize that it had in progress may
    /// have been actuated or not. A container that was started but not reported has the size that the spec requested at
    /// that time.
    #[must_use]
    pub fn adopted(pod: &Pod) -> Resizing {
        let status = pod.status.as_ref();
        let mut conditions = status.iter().flat_map(|s| s.conditions.iter().flatten());
        let is_under_way = conditions.any(|c| c.type_ == IN_PROGRESS && c.status == "True");
        let has_changed = status.is_some_and(|s| {
            s.observed_generation.is_some() && s.observed_generation != pod.metadata.generation
        });
        let is_reported =
            |name: &String| status.is_some_and(|s| with_sizes(s).any(|c| c.name == *name));
        let mut unsettled = wanted(pod).containers;
        unsettled.retain(|name, _| is_under_way || (has_changed && !is_reported(name)));
        Resizing {
            actuated: actuated(pod),
            unsettled,
            ..Resizing::default()
        }
    }

    /// Whether the pod's cgroup has other sizes than these.
    #[must_use]
    pub fn needs_cgroup_resize(&self, wanted: &Sizes) -> bool {
        let is_other = |cgroup: &Sizes| self.unsettled_cgroup || !same(cgroup, wanted);
        self.cgroup.as_ref().is_some_and(is_other)
    }

    /// Whether a running container or the pod's cgroup does not have these sizes yet.
    #[must_use]
    pub fn is_under_way(&self, wanted: &Sizes, runs: impl Fn(&str) -> bool) -> bool {
        let has = |(name, size): (&String, &Size)| {
            let actual = self.actuated.containers.get(name);
            let is_same = actual.is_none_or(|actual| actual.is_same(size));
            (is_same && !self.unsettled.contains_key(name)) || !runs(name)
        };
        !self.actuated.pod.is_same(&wanted.pod)
            || self.needs_cgroup_resize(wanted)
            || !wanted.containers.iter().all(has)
    }

    /// Records that an update of containers and the pod's cgroup to these sizes begins. Until it succeeds, they may
    /// have the old or the new sizes.
    pub(crate) fn begin_update(&mut self, names: &[String], to: &Sizes) {
        for name in names {
            if let Some(size) = to.containers.get(name) {
                let before = self.unsettled.get(name);
                let largest = before.map_or_else(|| size.clone(), |before| before.larger(size));
                self.unsettled.insert(name.clone(), largest);
            }
        }
        self.unsettled_cgroup = true;
    }

    /// The largest sizes that containers may have now.
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

    /// Records that a container has its part of these sizes.
    pub(crate) fn set_container(&mut self, name: &str, sizes: &Sizes) {
        self.unsettled.remove(name);
        let size = sizes.containers.get_key_value(name);
        let size = size.map(|(name, size)| (name.clone(), size.clone()));
        self.actuated.containers.extend(size);
    }

    /// Records that the pod's cgroup has these sizes.
    pub(crate) fn set_cgroup(&mut self, sizes: Sizes) {
        self.unsettled_cgroup = false;
        self.actuated.pod = sizes.pod.clone();
        self.cgroup = Some(sizes);
    }

    /// Records that containers and the pod's cgroup were updated to these sizes.
    pub(crate) fn complete_update(&mut self, names: &[String], to: Sizes) {
        for name in names {
            self.set_container(name, &to);
        }
        self.set_cgroup(to);
        self.error = None;
    }
}

/// A requested change of a container's requests or limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestedChange {
    /// `cpu` or `memory`.
    pub resource: &'static str,
    /// `requests` or `limits`.
    pub of: &'static str,
    /// `add`, `remove`, `increase` or `decrease`.
    pub operation: &'static str,
}

/// The changes of requests and limits between two specs of a pod.
#[must_use]
pub fn requested_changes(before: &Pod, now: &Pod) -> Vec<RequestedChange> {
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
                all.push(RequestedChange {
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
        // An empty map differs from none: pod-level resources that are empty would change the pod's QoS class.
        *side = (!map.is_empty()).then_some(map);
    }
    resources.take_if(|both| *both == ResourceRequirements::default());
}

/// The pod with these sizes in place of the requested ones.
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

/// The pod with the larger amounts of both sizes, which its cgroup gets while it is resized.
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
    // A pod of another QoS class has another cgroup.
    if class(&larger) == class(pod) {
        larger
    } else {
        with(pod, to)
    }
}

/// What a container needs to get its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// An update while it runs.
    Update,
    /// A restart, which its resize policy demands.
    Restart,
}

/// Whether the container must be restarted to resize a resource.
fn restarts_for(container: &Container, resource: &str) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|p| p.resource_name == resource && p.restart_policy == "RestartContainer")
}

/// Whether the memory request of a container changes that uses swap before or after, and that is not restarted for the
/// change (`disallowResizeForSwappableContainers` in `pkg/kubelet/allocation/handlers.go`). Applies to nodes where
/// containers may use swap.
#[must_use]
pub(crate) fn moves_swap(now: &Pod, then: &Pod) -> bool {
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

/// What a running container needs to get its wanted size.
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

/// The new memory limit of a container in bytes, if it is lower than the largest limit that the container may have now.
#[must_use]
pub fn lowered_memory_limit(name: &str, wanted: &Sizes, at_most: &Sizes) -> Option<i64> {
    let limit = |sizes: &Sizes| Size::amount(&sizes.containers.get(name)?.limits, "memory");
    let new = limit(wanted)?;
    let lowers = limit(at_most).is_none_or(|before| new < before);
    lowers.then(|| new.units())
}

/// The new memory limit of the pod's cgroup in bytes, if it is lower than the current one.
#[must_use]
pub fn lowered_pod_memory_limit(pod: &Pod, actuated: &Sizes) -> Option<i64> {
    let limit = |pod: &Pod| pod_bounds(pod).get("memory").map(|q| q.units());
    let new = limit(pod)?;
    let lowers = limit(&with(pod, actuated)).is_none_or(|before| new < before);
    lowers.then_some(new)
}

/// A memory limit that is to be lowered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowered {
    /// The owner of the limit: `pod`, or `container "…"`.
    pub of: String,
    /// The new limit in bytes.
    pub limit: i64,
    /// Current usage in bytes. `None` if it is unknown.
    pub used: Option<u64>,
}

/// Rejects limits that are not above the current usage, as the kernel would kill processes
/// (`validateMemoryResizeAction` in `pkg/kubelet/kuberuntime/kuberuntime_manager.go`). The error names all of them.
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

/// A container's resources in its status. If the container has limits, the pod's limits are added. If it has none, the
/// status has none, as with the kubelet.
#[must_use]
pub(crate) fn reported_resources(container: &Container, actuated: &Sizes) -> ResourceRequirements {
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

/// Pod-level `allocatedResources` and `resources` of the status: the requests that are allocated, with the overhead,
/// and the amounts of the pod's cgroup.
#[must_use]
pub(crate) fn published_of_pod(
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

/// The details at the end of resize events, as JSON.
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
