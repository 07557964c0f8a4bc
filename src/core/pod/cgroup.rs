//! The cgroups of pods: paths and values (`pkg/kubelet/cm/pod_container_manager_linux.go`). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::Role;
use super::cgroup_values::{Bound, CpuTime, Values};
use super::qos::{self, QosClass};
use super::resources::{
    Amounts, Side, huge_pages as huge_pages_of, of_container, of_containers, of_pod, of_pod_level,
};
use crate::pod;
use crate::pod::priority::is_critical;

/// The cgroup driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// The agent creates directories.
    Cgroupfs,
    /// systemd creates slices.
    Systemd,
}

/// The limits of a pod's cgroup. `None` means unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PodLimits {
    /// CPU weight in cgroup v1 shares.
    pub shares: u64,
    /// Microseconds of CPU time in each period.
    pub quota: Option<i64>,
    /// The length of a period in microseconds.
    pub period: u64,
    /// Memory limit in bytes.
    pub memory: Option<i64>,
    /// Maximum number of processes.
    pub pids: Option<i64>,
}

/// The default length of a CPU quota period in microseconds.
pub const PERIOD: u64 = 100_000;

/// Converts millicores to CPU shares.
#[must_use]
pub fn shares(milli: i64) -> u64 {
    u64::try_from(milli.saturating_mul(1024) / 1000)
        .unwrap_or(0)
        .clamp(2, 262_144)
}

/// Converts millicores to microseconds of CPU time per period.
#[must_use]
pub fn quota(milli: i64, period: u64) -> i64 {
    (milli.saturating_mul(i64::try_from(period).unwrap_or(i64::MAX)) / 1000).max(1000)
}

/// The path of a pod's cgroup below the root, in the driver's spelling. For systemd this is the name of the slice, as
/// the runtime expects it.
#[must_use]
pub fn pod_path(root: &str, driver: Driver, class: QosClass, uid: &str) -> String {
    let tier = match class {
        QosClass::Guaranteed => None,
        QosClass::Burstable => Some("burstable"),
        QosClass::BestEffort => Some("besteffort"),
    };
    match driver {
        Driver::Cgroupfs => {
            let root = root.trim_matches('/');
            let root = if root.is_empty() {
                String::new()
            } else {
                format!("/{root}")
            };
            let tier = tier.map_or(String::new(), |t| format!("/{t}"));
            format!("{root}/kubepods{tier}/pod{uid}")
        }
        Driver::Systemd => {
            let tier = tier.map_or(String::new(), |t| format!("-{t}"));
            format!(
                "{}{tier}-pod{}.slice",
                all_pods(root, driver).trim_end_matches(".slice"),
                uid.replace('-', "_")
            )
        }
    }
}

/// The name of the slice for the cgroup path `/a/b`.
#[must_use]
pub(crate) fn slice_of(root: &str) -> String {
    let parts: Vec<String> = root
        .split('/')
        .filter(|p| !p.is_empty())
        .map(|p| p.replace('-', "_"))
        .collect();
    format!("{}.slice", parts.join("-"))
}

/// The parent cgroup of all pods, in the driver's spelling.
#[must_use]
pub(crate) fn all_pods(root: &str, driver: Driver) -> String {
    let path = format!("{}/kubepods", root.trim_end_matches('/'));
    match driver {
        Driver::Cgroupfs => format!("/{}", path.trim_start_matches('/')),
        Driver::Systemd => slice_of(&path),
    }
}

/// The uid of the pod that a cgroup with this name belongs to. `None` if it is not a pod's cgroup.
#[must_use]
pub fn uid_of(name: &str, driver: Driver) -> Option<String> {
    match driver {
        Driver::Cgroupfs => Some(name.strip_prefix("pod")?.to_owned()),
        Driver::Systemd => {
            let (_, last) = name.strip_suffix(".slice")?.rsplit_once('-')?;
            Some(last.strip_prefix("pod")?.replace('_', "-"))
        }
    }
}

/// The path of a pod's cgroup ([`pod_path`]), or of one of its containers' cgroups, below the root of the hierarchy.
#[must_use]
pub fn hierarchy_path(path: &str, container: Option<&str>) -> String {
    let Some(name) = path.strip_suffix(".slice") else {
        return container.map_or_else(|| path.to_owned(), |id| format!("{path}/{id}"));
    };
    // systemd nests slices by the dashes in their names.
    let parts: Vec<&str> = name.split('-').collect();
    let slices: Vec<String> = (1..=parts.len())
        .map(|n| format!("{}.slice", parts[..n].join("-")))
        .collect();
    let scope = container
        .map(|id| format!("/cri-containerd-{id}.scope"))
        .unwrap_or_default();
    format!("/{}{scope}", slices.join("/"))
}

/// The id of the container that a cgroup belongs to. Runtimes name these cgroups `<id>`, `crio-<id>` or
/// `cri-containerd-<id>.scope`.
#[must_use]
pub fn container_of(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = name.rsplit('-').next()?;
    let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    (id.len() == 64 && id.bytes().all(is_hex)).then_some(id)
}

/// The CPU and memory limits of a pod's cgroup: those of the pod, else the sum of its containers' limits if every
/// container has one.
#[must_use]
pub(crate) fn pod_bounds(pod: &Pod) -> Amounts {
    if qos::of(pod::spec(pod)) == QosClass::BestEffort {
        return Amounts::new();
    }
    let mut limits = of_pod(pod, Side::Limits);
    let whole = of_pod_level(pod, Side::Limits);
    let containers = pod::containers(pod);
    let has = |container: &Container, name: &str| {
        let limits = of_container(container, Side::Limits);
        limits.get(name).is_some_and(|q| !q.is_zero())
    };
    let everyone_has = |name: &str| {
        let mut sized = containers.iter().filter(|(r, _)| *r != Role::Ephemeral);
        whole.contains_key(name) || sized.all(|(_, c)| has(c, name))
    };
    limits.retain(|name, _| matches!(name.as_str(), "cpu" | "memory") && everyone_has(name));
    limits
}

/// The limits of a pod's cgroup. Without `period` there is no CPU quota.
#[must_use]
pub(crate) fn pod_limits(pod: &Pod, pids: Option<i64>, period: Option<u64>) -> PodLimits {
    let requests = of_pod(pod, Side::Requests);
    let bounds = pod_bounds(pod);
    let milli = requests.get("cpu").map_or(0, |q| q.milli());
    PodLimits {
        shares: if qos::of(pod::spec(pod)) == QosClass::BestEffort {
            2
        } else {
            shares(milli)
        },
        quota: bounds
            .get("cpu")
            .zip(period)
            .map(|(q, period)| quota(q.milli(), period)),
        period: period.unwrap_or(PERIOD),
        memory: bounds.get("memory").map(|q| q.units()),
        pids: pids.filter(|p| *p > 0),
    }
}

/// The values of a pod's cgroup. For each huge page size in `page_sizes` (in bytes), the limit is the pod's request, or
/// 0.
#[must_use]
pub fn pod_values(pod: &Pod, pids: Option<i64>, period: Option<u64>, page_sizes: &[u64]) -> Values {
    let limits = pod_limits(pod, pids, period);
    let number = |value: i64| u64::try_from(value).unwrap_or(0);
    let mut huge_pages: BTreeMap<u64, u64> = page_sizes.iter().map(|size| (*size, 0)).collect();
    huge_pages.extend(huge_pages_of(&of_pod(pod, Side::Requests)));
    let huge_pages = huge_pages.into_iter();
    Values {
        shares: Some(limits.shares),
        cpu: Some(CpuTime {
            quota: limits.quota.map(number),
            period: limits.period,
        }),
        memory: Some(
            limits
                .memory
                .map_or(Bound::Unlimited, |m| Bound::At(number(m))),
        ),
        pids: limits.pids.map(|p| Bound::At(number(p))),
        memory_min: None,
        memory_low: None,
        huge_pages: huge_pages.map(|(s, b)| (s, Bound::At(b))).collect(),
    }
}

/// Whether the pod is node-critical. Static pods are detected by their priority class name, as they may have no
/// priority.
fn is_node_critical(pod: &Pod) -> bool {
    let class = pod::spec(pod).priority_class_name.as_deref();
    class == Some("system-node-critical") && is_critical(pod)
}

/// The `oom_score_adj` of a container's processes (`pkg/kubelet/qos/policy.go`). `memory` is the node's memory in
/// bytes.
#[must_use]
pub fn oom_score_adj(pod: &Pod, container: &Container, memory: u64) -> i64 {
    let spec = pod::spec(pod);
    if is_node_critical(pod) {
        return -997;
    }
    match qos::of(spec) {
        QosClass::Guaranteed => -997,
        QosClass::BestEffort => 1000,
        QosClass::Burstable => {
            let request = |c: &Container| {
                of_container(c, Side::Requests)
                    .get("memory")
                    .map_or(0, |q| q.units())
            };
            let init = spec.init_containers.iter().flatten();
            let sidecars = init.filter(|c| pod::is_sidecar(c));
            let running = spec.containers.iter().chain(sidecars).count();
            let claimed = of_containers(pod, Side::Requests)
                .get("memory")
                .map_or(0, |q| q.units());
            let unclaimed = of_pod_level(pod, Side::Requests)
                .get("memory")
                .map_or(0, |q| q.units().saturating_sub(claimed))
                .max(0);
            let containers = i64::try_from(running).unwrap_or(i64::MAX);
            let extra = unclaimed.checked_div(containers).unwrap_or(unclaimed);
            let score = |request: i64| {
                let share = 1000_i128.saturating_mul(request.saturating_add(extra).into());
                let share = share.checked_div(memory.into()).unwrap_or(share);
                i64::try_from(1000_i128.saturating_sub(share).clamp(3, 999)).unwrap_or(999)
            };
            // A sidecar must not be killed before the containers that it serves.
            let served = spec
                .containers
                .iter()
                .map(request)
                .min()
                .filter(|_| pod::is_sidecar(container));
            served
                .map_or(i64::MAX, score)
                .min(score(request(container)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn cgroup_paths_follow_the_driver() {
        assert_eq!(hierarchy_path("/kubepods/podu", None), "/kubepods/podu");
        assert_eq!(
            hierarchy_path("/kubepods/podu", Some("id")),
            "/kubepods/podu/id"
        );
        assert_eq!(
            hierarchy_path("kubepods-burstable-podu_1.slice", Some("id")),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu_1.slice/cri-containerd-id.scope"
        );
    }

    #[test]
    fn a_containers_cgroup_is_recognised_by_its_name() {
        let id = "0123456789abcdef".repeat(4);
        for name in [
            id.clone(),
            format!("crio-{id}"),
            format!("cri-containerd-{id}.scope"),
        ] {
            assert_eq!(container_of(&name), Some(id.as_str()), "{name}");
        }
        for name in [
            "user.slice",
            "",
            &id[1..],
            &format!("{id}.mount"),
            &id.to_uppercase(),
        ] {
            assert_eq!(container_of(name), None, "{name}");
        }
    }

    #[test]
    fn pod_cgroup_paths_follow_driver_and_qos_class() {
        let uid = "1-2";
        assert_eq!(
            pod_path("/", Driver::Cgroupfs, QosClass::Guaranteed, uid),
            "/kubepods/pod1-2"
        );
        assert_eq!(
            pod_path("/test", Driver::Cgroupfs, QosClass::BestEffort, uid),
            "/test/kubepods/besteffort/pod1-2"
        );
        assert_eq!(
            pod_path("/", Driver::Systemd, QosClass::Burstable, uid),
            "kubepods-burstable-pod1_2.slice"
        );
        assert_eq!(
            pod_path("/own-1", Driver::Systemd, QosClass::Guaranteed, uid),
            "own_1-kubepods-pod1_2.slice"
        );
        assert_eq!(
            [
                all_pods("/", Driver::Cgroupfs),
                all_pods("/t", Driver::Systemd)
            ],
            ["/kubepods", "t-kubepods.slice"]
        );
        for (driver, name, expected) in [
            (Driver::Cgroupfs, "pod1-2", Some("1-2")),
            (Driver::Cgroupfs, "burstable", None),
            (
                Driver::Systemd,
                "t-kubepods-burstable-pod1_2.slice",
                Some("1-2"),
            ),
            (Driver::Systemd, "kubepods-burstable.slice", None),
        ] {
            assert_eq!(uid_of(name, driver).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn a_pod_gets_exactly_the_huge_pages_that_it_requests() {
        let container = json!({"name": "c", "resources": {"limits": {"cpu": "1", "memory": "1Mi", "hugepages-2Mi": "4Mi"},
            "requests": {"cpu": "1", "memory": "1Mi", "hugepages-2Mi": "4Mi"}}});
        let pod: Pod =
            serde_json::from_value(json!({"spec": {"containers": [container]}})).expect("a pod");
        let values = pod_values(&pod, Some(100), Some(PERIOD), &[2 << 20, 1 << 30]);
        let huge: Vec<_> = values.huge_pages.into_iter().collect();
        assert_eq!(
            huge,
            [(2 << 20, Bound::At(4 << 20)), (1 << 30, Bound::At(0))]
        );
        assert_eq!(values.pids, Some(Bound::At(100)));
        let time = |period| {
            let values = pod_values(&pod, None, period, &[]);
            values.cpu.and_then(|cpu| cpu.quota)
        };
        assert_eq!((time(Some(PERIOD)), time(None)), (Some(100_000), None));
    }

    #[test]
    fn the_pod_cgroup_is_limited_only_if_every_container_has_a_limit() {
        let limits = |containers: Value| {
            pod_limits(
                &serde_json::from_value(json!({"spec": {"containers": containers}}))
                    .expect("a pod"),
                Some(0),
                Some(PERIOD),
            )
        };
        let none = limits(json!([{"name": "a"}]));
        assert_eq!(
            (none.shares, none.quota, none.memory, none.pids),
            (2, None, None, None)
        );
        let one = limits(
            json!([{"name": "a", "resources": {"limits": {"cpu": "500m", "memory": "1Mi"}, "requests": {"cpu": "250m"}}}, {"name": "b", "resources": {"limits": {"cpu": "500m"}}}]),
        );
        assert_eq!(
            (one.shares, one.quota, one.memory),
            (256, Some(100_000), None)
        );
    }

    #[test]
    fn pod_level_limits_bound_the_pod_cgroup() {
        let pod: Pod =
            serde_json::from_value(json!({"spec": {"resources": {"limits": {"cpu": "1", "memory": "1Mi"}}, "containers": [{"name": "a"}]}}))
                .expect("a pod");
        let limits = pod_limits(&pod, None, Some(PERIOD));
        assert_eq!(
            (limits.shares, limits.quota, limits.memory),
            (1024, Some(100_000), Some(1 << 20))
        );
    }

    #[test]
    fn critical_pods_are_oom_killed_last() {
        let score = |source: &str, class: &str, priority: Option<i32>| {
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"annotations": {"kubernetes.io/config.source": source}},
                "spec": {"priorityClassName": class, "priority": priority, "containers": [{"name": "a"}]},
            }))
            .expect("a pod");
            oom_score_adj(&pod, &pod::spec(&pod).containers[0], 1000)
        };
        for (source, class, priority, expected) in [
            ("file", "system-node-critical", None, -997),
            ("api", "system-node-critical", Some(2_000_001_000), -997),
            ("api", "system-cluster-critical", Some(2_000_000_000), 1000),
            ("file", "", None, 1000),
        ] {
            let found = score(source, class, priority);
            assert_eq!(found, expected, "{source} {class} {priority:?}");
        }
    }

    #[test]
    fn containers_with_smaller_requests_are_oom_killed_first() {
        let scores = |spec: Value| -> Vec<i64> {
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            pod::containers(&pod)
                .iter()
                .map(|(_, c)| oom_score_adj(&pod, c, 1000))
                .collect()
        };
        let asks = |name: &str, memory: &str| json!({"name": name, "resources": {"requests": {"memory": memory}}});
        assert_eq!(
            scores(json!({"containers": [asks("a", "100"), asks("b", "500")]})),
            [900, 500]
        );
        let mut sidecar = asks("s", "10");
        sidecar["restartPolicy"] = "Always".into();
        assert_eq!(
            scores(json!({"initContainers": [sidecar], "containers": [asks("a", "100")]})),
            [900, 900]
        );
        // 300 of the pod's 400 belong to no container: each of the two containers gets half of them.
        assert_eq!(
            scores(
                json!({"resources": {"requests": {"memory": "400"}}, "containers": [asks("a", "100"), {"name": "b"}]})
            ),
            [750, 850]
        );
    }

    #[test]
    fn cpu_conversions_stay_within_kernel_bounds() {
        assert_eq!(
            [shares(0), shares(1000), shares(i64::MAX)],
            [2, 1024, 262_144]
        );
        assert_eq!([quota(1, PERIOD), quota(1500, PERIOD)], [1000, 150_000]);
    }
}
