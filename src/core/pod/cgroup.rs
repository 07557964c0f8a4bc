//! The cgroups of pods: their place in the tree and their values (kubelet spec, chapter 7). Pure.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::Role;
use super::qos::{self, QosClass};
use super::resources::{Amounts, Side, of_container, of_containers, of_pod, of_pod_level};
use crate::core::pod;

/// Who makes cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// We do, as directories.
    Cgroupfs,
    /// systemd does, as slices.
    Systemd,
}

/// The limits of one pod's cgroup. Absent means unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PodLimits {
    /// CPU weight as v1 shares.
    pub shares: u64,
    /// Microseconds of CPU each period.
    pub quota: Option<i64>,
    /// The period in microseconds.
    pub period: u64,
    /// Bytes of memory.
    pub memory: Option<i64>,
    /// The number of processes.
    pub pids: Option<i64>,
}

/// The length of a CPU quota period in microseconds.
pub const PERIOD: u64 = 100_000;

/// CPU shares of thousandths of a CPU.
#[must_use]
pub fn shares(milli: i64) -> u64 {
    u64::try_from(milli.saturating_mul(1024) / 1000)
        .unwrap_or(0)
        .clamp(2, 262_144)
}

/// Microseconds a period of thousandths of a CPU.
#[must_use]
pub fn quota(milli: i64, period: u64) -> i64 {
    (milli.saturating_mul(i64::try_from(period).unwrap_or(i64::MAX)) / 1000).max(1000)
}

/// The cgroup v2 weight of v1 shares.
#[must_use]
pub fn weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// The path of a pod's cgroup under the root, in the driver's spelling. For systemd this is the name
/// of the slice, as the runtime wants it.
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

/// The slice of a cgroup of our own, `/a/b`.
#[must_use]
pub fn slice_of(root: &str) -> String {
    let parts: Vec<String> = root
        .split('/')
        .filter(|p| !p.is_empty())
        .map(|p| p.replace('-', "_"))
        .collect();
    format!("{}.slice", parts.join("-"))
}

/// The cgroup of all pods, in the driver's spelling.
#[must_use]
pub fn all_pods(root: &str, driver: Driver) -> String {
    let path = format!("{}/kubepods", root.trim_end_matches('/'));
    match driver {
        Driver::Cgroupfs => format!("/{}", path.trim_start_matches('/')),
        Driver::Systemd => slice_of(&path),
    }
}

/// Whose cgroup has this name, if it is a pod's.
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

/// A pod's limits as properties of its slice (systemd.resource-control(5)), in systemd's units: `u64::MAX` is unlimited.
#[must_use]
pub fn properties(limits: &PodLimits, unified: bool) -> Vec<(&'static str, u64)> {
    let max = |value: Option<i64>| {
        value
            .and_then(|v| u64::try_from(v).ok())
            .unwrap_or(u64::MAX)
    };
    // What one second may have, in microseconds; systemd knows no finer steps than a hundredth of a CPU.
    let second = limits
        .quota
        .and_then(|q| u64::try_from(q).ok())
        .map_or(u64::MAX, |quota| {
            let exact = quota.saturating_mul(1_000_000) / limits.period.max(1);
            exact.next_multiple_of(10_000)
        });
    let memory = if unified { "MemoryMax" } else { "MemoryLimit" };
    let pids = limits.pids.map(|_| ("TasksMax", max(limits.pids)));
    let all = [
        share_property(limits.shares, unified),
        ("CPUQuotaPerSecUSec", second),
        ("CPUQuotaPeriodUSec", limits.period),
        (memory, max(limits.memory)),
    ];
    all.into_iter().chain(pids).collect()
}

/// Where a cgroup of [`pod_path`] lies below the hierarchy's root, or one of its containers'.
#[must_use]
pub fn place(path: &str, container: Option<&str>) -> String {
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

/// The CPU weights of the tiers, as v1 shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierShares {
    /// Of all pods beside the rest of the machine.
    pub all: u64,
    /// Of the burstable ones beside the guaranteed ones.
    pub burstable: u64,
    /// Of the best-effort ones beside the guaranteed ones.
    pub best_effort: u64,
}

impl TierShares {
    /// Each tier's path in the driver's spelling, and its shares; outermost first.
    #[must_use]
    pub fn by_path(&self, root: &str, driver: Driver) -> [(String, u64); 3] {
        let all = all_pods(root, driver);
        let tier = |name: &str| match driver {
            Driver::Cgroupfs => format!("{all}/{name}"),
            Driver::Systemd => format!("{}-{name}.slice", all.trim_end_matches(".slice")),
        };
        [
            (all.clone(), self.all),
            (tier("burstable"), self.burstable),
            (tier("besteffort"), self.best_effort),
        ]
    }
}

/// What the tiers get: all pods what they may use of the node, burstable pods what they ask for together, best-effort pods
/// next to nothing (kubelet spec, 7.2). A guaranteed pod lies beside the last two with its own request.
#[must_use]
pub fn tier_shares(allocatable: &Amounts, pods: &[&Pod]) -> TierShares {
    let burstable = pods
        .iter()
        .filter(|p| qos::of(pod::spec(p)) == QosClass::Burstable);
    let asked = burstable.map(|p| {
        of_pod(p, Side::Requests)
            .get("cpu")
            .map_or(0, |q| q.milli())
    });
    TierShares {
        all: shares(allocatable.get("cpu").map_or(0, |q| q.milli())),
        burstable: shares(asked.fold(0, i64::saturating_add)),
        best_effort: shares(0),
    }
}

/// The property of a slice that gives it these shares.
#[must_use]
pub fn share_property(shares: u64, unified: bool) -> (&'static str, u64) {
    if unified {
        ("CPUWeight", weight(shares))
    } else {
        ("CPUShares", shares)
    }
}

/// The tiers above a pod, outermost first, in cgroupfs spelling.
#[must_use]
pub fn tiers(root: &str, class: QosClass) -> Vec<String> {
    let pod = pod_path(root, Driver::Cgroupfs, class, "x");
    let parts: Vec<&str> = pod.trim_start_matches('/').split('/').collect();
    (1..parts.len())
        .map(|n| format!("/{}", parts[..n].join("/")))
        .collect()
}

/// The values of a pod's cgroup. Without `period` no CPU quota is set.
#[must_use]
pub fn pod_limits(pod: &Pod, pids: Option<i64>, period: Option<u64>) -> PodLimits {
    let spec = pod::spec(pod);
    let class = qos::of(spec);
    let requests = of_pod(pod, Side::Requests);
    let limits = of_pod(pod, Side::Limits);
    let whole = of_pod_level(pod, Side::Limits);
    let everyone_has = |name: &str| {
        whole.contains_key(name)
            || pod::containers(pod)
                .iter()
                .filter(|(role, _)| *role != Role::Ephemeral)
                .all(|(_, c)| {
                    of_container(c, Side::Limits)
                        .get(name)
                        .is_some_and(|q| !q.is_zero())
                })
    };
    let milli = requests.get("cpu").map_or(0, |q| q.milli());
    let bounded = |name: &str| {
        (class != QosClass::BestEffort && everyone_has(name))
            .then(|| limits.get(name).copied())
            .flatten()
    };
    PodLimits {
        shares: if class == QosClass::BestEffort {
            2
        } else {
            shares(milli)
        },
        quota: bounded("cpu")
            .zip(period)
            .map(|(q, period)| quota(q.milli(), period)),
        period: period.unwrap_or(PERIOD),
        memory: bounded("memory").map(|q| q.units()),
        pids: pids.filter(|p| *p > 0),
    }
}

/// How ready the kernel is to kill a container's processes (kubelet spec, 6.8). `memory` is the node's, in bytes.
#[must_use]
pub fn oom_score_adj(pod: &Pod, container: &Container, memory: u64) -> i64 {
    let spec = pod::spec(pod);
    if spec.priority.is_some_and(|p| p >= 2_000_001_000) {
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
            let running = spec.containers.len()
                + spec
                    .init_containers
                    .iter()
                    .flatten()
                    .filter(|c| pod::is_sidecar(c))
                    .count();
            let claimed = of_containers(pod, Side::Requests)
                .get("memory")
                .map_or(0, |q| q.units());
            let unclaimed = of_pod_level(pod, Side::Requests)
                .get("memory")
                .map_or(0, |q| q.units() - claimed)
                .max(0);
            let extra = unclaimed / i64::try_from(running.max(1)).unwrap_or(1);
            let score = |request: i64| {
                let share = 1000_i128 * i128::from(request + extra) / i128::from(memory.max(1));
                i64::try_from((1000 - share).clamp(3, 999)).unwrap_or(999)
            };
            // A sidecar outlives what it serves.
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
    fn cgroups_lie_where_their_driver_puts_them() {
        assert_eq!(place("/kubepods/podu", None), "/kubepods/podu");
        assert_eq!(place("/kubepods/podu", Some("id")), "/kubepods/podu/id");
        assert_eq!(
            place("kubepods-burstable-podu_1.slice", Some("id")),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu_1.slice/cri-containerd-id.scope"
        );
    }

    #[test]
    fn paths_follow_driver_and_class() {
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
        assert_eq!(
            tiers("/t", QosClass::Burstable),
            ["/t", "/t/kubepods", "/t/kubepods/burstable"]
        );
    }

    #[test]
    fn no_tier_outweighs_what_its_pods_ask_for() {
        let pod = |requests: Value, limits: Value| -> Pod {
            let container =
                json!({"name": "c", "resources": {"requests": requests, "limits": limits}});
            serde_json::from_value(json!({"spec": {"containers": [container]}})).expect("a pod")
        };
        let small = json!({"cpu": "100m", "memory": "1Mi"});
        let guaranteed = pod(small.clone(), small);
        let burstable = pod(json!({"cpu": "500m"}), json!({}));
        let best_effort = pod(json!({}), json!({}));
        let allocatable = Amounts::from([("cpu".to_owned(), "3500m".parse().expect("a quantity"))]);
        let pods = [
            &guaranteed,
            &burstable,
            &burstable,
            &best_effort,
            &best_effort,
        ];
        let tiers = tier_shares(&allocatable, &pods);
        assert_eq!(
            (tiers.all, tiers.burstable, tiers.best_effort),
            (3584, 1024, 2)
        );
        // However many best-effort pods there are, together they weigh less than the smallest guaranteed one.
        assert!(tiers.best_effort < pod_limits(&guaranteed, None, None).shares);
        assert_eq!(tier_shares(&allocatable, &[]).burstable, 2);
        for (root, driver, expected) in [
            (
                "/t",
                Driver::Cgroupfs,
                [
                    "/t/kubepods",
                    "/t/kubepods/burstable",
                    "/t/kubepods/besteffort",
                ],
            ),
            (
                "/",
                Driver::Systemd,
                [
                    "kubepods.slice",
                    "kubepods-burstable.slice",
                    "kubepods-besteffort.slice",
                ],
            ),
        ] {
            assert_eq!(tiers.by_path(root, driver).map(|(path, _)| path), expected);
        }
    }

    #[test]
    fn systemd_is_told_limits_in_its_units() {
        let limits = PodLimits {
            shares: 1024,
            quota: Some(12_345),
            period: 100_000,
            memory: Some(1 << 20),
            pids: Some(7),
        };
        assert_eq!(
            properties(&limits, true),
            [
                ("CPUWeight", 39),
                ("CPUQuotaPerSecUSec", 130_000),
                ("CPUQuotaPeriodUSec", 100_000),
                ("MemoryMax", 1 << 20),
                ("TasksMax", 7)
            ]
        );
        let open = PodLimits {
            shares: 2,
            quota: None,
            period: 100_000,
            memory: None,
            pids: None,
        };
        assert_eq!(
            properties(&open, false),
            [
                ("CPUShares", 2),
                ("CPUQuotaPerSecUSec", u64::MAX),
                ("CPUQuotaPeriodUSec", 100_000),
                ("MemoryLimit", u64::MAX)
            ],
            "what was limited before is not any more"
        );
    }

    #[test]
    fn a_limit_counts_only_if_every_container_has_one() {
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
    fn limits_of_the_pod_as_a_whole_bound_its_cgroup() {
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
    fn the_kernel_kills_those_first_that_asked_for_least() {
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
        // 300 of the pod's 400 are nobody's: each of two containers has half of them.
        assert_eq!(
            scores(
                json!({"resources": {"requests": {"memory": "400"}}, "containers": [asks("a", "100"), {"name": "b"}]})
            ),
            [750, 850]
        );
    }

    #[test]
    fn conversions_keep_their_bounds() {
        assert_eq!(
            [shares(0), shares(1000), shares(i64::MAX)],
            [2, 1024, 262_144]
        );
        assert_eq!([weight(2), weight(1024), weight(262_144)], [1, 39, 10_000]);
        assert_eq!([quota(1, PERIOD), quota(1500, PERIOD)], [1000, 150_000]);
    }
}
