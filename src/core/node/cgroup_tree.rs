//! The cgroups of the node above those of pods, and their values (`pkg/kubelet/cm/node_container_manager_linux.go`,
//! `pkg/kubelet/cm/qos_container_manager_linux.go`). Pure.
//!
//! ```text
//! /systemReservedCgroup, /kubeReservedCgroup   reserved amounts, where they are enforced
//! <cgroupRoot>/kubepods                        all pods: everything that is not reserved
//!                       guaranteed pods
//!                       /burstable             CPU shares: sum of the CPU requests of its pods
//!                       /besteffort            minimal CPU shares
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use crate::pod;
use crate::pod::cgroup::{Driver, all_pods, shares, slice_of};
use crate::pod::cgroup_values::{Bound, Values};
use crate::pod::memory_qos::{self, MemoryQos, Protection};
use crate::pod::qos::{self, QosClass};
use crate::pod::resources::{Amounts, Side, huge_pages, of_pod};
use crate::quantity::Quantity;

/// Resource name for reserved process ids in `systemReserved` and `kubeReserved`.
pub const PIDS: &str = "pid";

/// A cgroup of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Group {
    /// The cgroup of all pods (`kubepods`).
    Pods,
    /// The configured `cgroupRoot`, if pods have no cgroups of their own.
    Root,
    /// The cgroup of burstable pods, below [`Group::Pods`].
    Burstable,
    /// The cgroup of best-effort pods, below [`Group::Pods`].
    BestEffort,
    /// An existing cgroup that reserved amounts are enforced on, by its configured name.
    Reserved(String),
}

/// Reserved amounts that are enforced on a cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// The cgroup (`systemReservedCgroup`, `kubeReservedCgroup`).
    pub cgroup: String,
    /// The amounts (`systemReserved`, `kubeReserved`).
    pub amounts: Amounts,
    /// Whether only CPU shares are enforced, which cost other cgroups nothing while the reserved CPU is idle.
    pub compressible_only: bool,
}

/// Settings of the cgroup tree (`enforceNodeAllocatable`, `qosReserved`, `featureGates.MemoryQoS`).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rules {
    /// With `cgroupsPerQOS: false`, neither pods nor QoS classes have cgroups; the runtime chooses where containers
    /// run.
    pub flat: bool,
    /// Whether all pods together are limited to what is not reserved.
    pub limits_pods: bool,
    /// Enforced `systemReserved` amounts.
    pub system: Option<Reserved>,
    /// Enforced `kubeReserved` amounts.
    pub kube: Option<Reserved>,
    /// Percentage of memory requests of higher QoS classes that lower classes cannot use (`qosReserved`).
    pub qos_memory: Option<u8>,
    /// How memory is protected and throttled; `None` if MemoryQoS is off.
    pub memory: Option<MemoryQos>,
}

/// Resources of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supply {
    /// Capacity of the machine, including process ids.
    pub capacity: Amounts,
    /// Sum of `systemReserved` and `kubeReserved`.
    pub reserved: Amounts,
    /// Allocatable resources, which the scheduler assigns to pods.
    pub allocatable: Amounts,
}

impl Group {
    /// The cgroup's name in the notation of the driver; `root` is the parent of the cgroup of all pods.
    #[must_use]
    pub fn name(&self, root: &str, driver: Driver) -> String {
        let all = all_pods(root, driver);
        let tier = |name: &str| match driver {
            Driver::Cgroupfs => format!("{all}/{name}"),
            Driver::Systemd => format!("{}-{name}.slice", all.trim_end_matches(".slice")),
        };
        match self {
            Group::Pods => all,
            Group::Root => match (root.trim_matches('/'), driver) {
                ("", _) => "/".to_owned(),
                (root, Driver::Cgroupfs) => format!("/{root}"),
                (root, Driver::Systemd) => slice_of(root),
            },
            Group::Burstable => tier("burstable"),
            Group::BestEffort => tier("besteffort"),
            Group::Reserved(name) => match driver {
                Driver::Cgroupfs => format!("/{}", name.trim_matches('/')),
                // A slice's name includes the names of its parents.
                Driver::Systemd => {
                    let last = name.trim_end_matches('/').rsplit('/').next();
                    let last = last.unwrap_or_default();
                    format!("{}.slice", last.trim_end_matches(".slice"))
                }
            },
        }
    }
}

impl Rules {
    /// The cgroups that reserved amounts are enforced on.
    pub fn reserved(&self) -> impl Iterator<Item = &Reserved> {
        self.system.iter().chain(&self.kube)
    }
}

fn units(amounts: &Amounts, name: &str) -> Option<u64> {
    let amount = amounts.get(name)?.units();
    u64::try_from(amount).ok().filter(|amount| *amount > 0)
}

fn milli(amounts: &Amounts, name: &str) -> i64 {
    amounts.get(name).map_or(0, |q| q.milli())
}

/// Sum of an amount over the requests of all pods of a class.
fn sum_of_requests(pods: &[&Pod], class: QosClass, of: impl Fn(&Amounts) -> i64) -> i64 {
    let own = pods.iter().filter(|p| qos::of(pod::spec(p)) == class);
    let each = own.map(|p| of(&of_pod(p, Side::Requests)));
    each.fold(0, i64::saturating_add)
}

fn of_all_pods(supply: &Supply, rules: &Rules) -> Values {
    let mut usable = supply.capacity.clone();
    if rules.limits_pods {
        for (name, amount) in &mut usable {
            let reserved = supply.reserved.get(name).copied().unwrap_or_default();
            *amount = (*amount - reserved).max(Quantity::ZERO);
        }
    }
    let memory = units(&usable, "memory").filter(|_| rules.limits_pods);
    Values {
        shares: Some(shares(milli(&usable, "cpu"))),
        cpu: None,
        memory: Some(memory.map_or(Bound::Unlimited, Bound::At)),
        pids: units(&usable, PIDS).map(Bound::At),
        memory_min: None,
        memory_low: None,
        huge_pages: huge_pages(&usable)
            .map(|(size, bytes)| (size, Bound::At(bytes)))
            .collect(),
    }
}

/// Memory limits of the burstable and the best-effort cgroup: allocatable memory minus the configured share of the
/// requests of higher classes. `None` without `qosReserved`.
fn memory_of_classes(supply: &Supply, rules: &Rules, pods: &[&Pod]) -> Option<(u64, u64)> {
    let percent = i64::from(rules.qos_memory?);
    let all = i64::try_from(units(&supply.allocatable, "memory")?).ok()?;
    let memory = |amounts: &Amounts| amounts.get("memory").map_or(0, |q| q.units());
    let kept = |class| sum_of_requests(pods, class, memory).saturating_mul(percent) / 100;
    let burstable = all.saturating_sub(kept(QosClass::Guaranteed));
    let best_effort = burstable.saturating_sub(kept(QosClass::Burstable));
    let bytes = |n: i64| u64::try_from(n).unwrap_or(0);
    Some((bytes(burstable), bytes(best_effort)))
}

fn of_reserved(reserved: &Reserved, rules: &Rules) -> Values {
    let amounts = &reserved.amounts;
    let cpu = Values {
        shares: amounts.get("cpu").map(|q| shares(q.milli())),
        ..Values::default()
    };
    if reserved.compressible_only {
        return cpu;
    }
    let memory = units(amounts, "memory");
    Values {
        memory: memory.map(Bound::At),
        memory_min: memory.filter(|_| rules.memory.is_some()),
        pids: units(amounts, PIDS).map(Bound::At),
        huge_pages: huge_pages(amounts)
            .map(|(size, bytes)| (size, Bound::At(bytes)))
            .collect(),
        ..cpu
    }
}

/// Replaces each admitted pod by its allocated version, so that a pending resize does not count. A pod that is not
/// admitted yet is returned as is, because its cgroup is about to be created.
#[must_use]
pub fn with_allocated_resources(wanted: Vec<Arc<Pod>>, admitted: &[Arc<Pod>]) -> Vec<Arc<Pod>> {
    let allocated = admitted.iter().map(|pod| (pod::uid(pod), pod));
    let allocated: BTreeMap<&str, &Arc<Pod>> = allocated.collect();
    let of = |pod: Arc<Pod>| match allocated.get(pod::uid(&pod)) {
        Some(allocated) => Arc::clone(allocated),
        None => pod,
    };
    wanted.into_iter().map(of).collect()
}

/// The memory that is protected for pods; `None` if MemoryQoS is off.
#[must_use]
pub fn protection(rules: &Rules, pods: &[&Pod]) -> Option<Protection> {
    Some(match rules.memory?.reserves {
        true => memory_qos::of_pods(pods),
        false => Protection::default(),
    })
}

/// The cgroups and their values for these pods, parents first. The CPU shares of the burstable cgroup are the sum of
/// its pods' requests. Guaranteed pods are siblings of that cgroup with shares by their own requests, and best-effort
/// pods together have minimal shares. If pods have no cgroups (`cgroupsPerQOS: false`), only `cgroupRoot` gets the
/// machine's CPU shares, because a new cgroup has few.
#[must_use]
pub fn tree(supply: &Supply, rules: &Rules, pods: &[&Pod]) -> Vec<(Group, Values)> {
    let limits = memory_of_classes(supply, rules, pods);
    let class = |shares, memory: Option<u64>| Values {
        shares: Some(shares),
        memory: Some(memory.map_or(Bound::Unlimited, Bound::At)),
        huge_pages: huge_pages(&supply.capacity)
            .map(|(size, _)| (size, Bound::Unlimited))
            .collect::<BTreeMap<_, _>>(),
        ..Values::default()
    };
    let burstable = sum_of_requests(pods, QosClass::Burstable, |amounts| milli(amounts, "cpu"));
    let reserved = rules
        .reserved()
        .map(|r| (Group::Reserved(r.cgroup.clone()), of_reserved(r, rules)));
    if rules.flat {
        let root = (Group::Root, of_all_pods(supply, rules));
        return [root].into_iter().chain(reserved).collect();
    }
    let protected = protection(rules, pods);
    let own = [
        (
            Group::Pods,
            Values {
                // The kernel limits a cgroup's protection to that of its ancestors.
                memory_min: protected.map(|all| all.min.saturating_add(all.low)),
                ..of_all_pods(supply, rules)
            },
        ),
        (
            Group::Burstable,
            Values {
                memory_low: protected.map(|all| all.low),
                ..class(shares(burstable), limits.map(|l| l.0))
            },
        ),
        (Group::BestEffort, class(shares(0), limits.map(|l| l.1))),
    ];
    own.into_iter().chain(reserved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::cgroup::pod_limits;
    use serde_json::{Value, json};

    fn amounts(pairs: &[(&str, &str)]) -> Amounts {
        let pairs = pairs.iter();
        pairs
            .map(|(name, text)| ((*name).into(), text.parse().expect("a quantity")))
            .collect()
    }

    fn pod(requests: Value, limits: Value) -> Pod {
        let container = json!({"name": "c", "resources": {"requests": requests, "limits": limits}});
        serde_json::from_value(json!({"spec": {"containers": [container]}})).expect("a pod")
    }

    fn supply() -> Supply {
        Supply {
            capacity: amounts(&[
                ("cpu", "4"),
                ("memory", "8Gi"),
                ("pid", "32768"),
                ("hugepages-2Mi", "1Gi"),
                ("hugepages-1Gi", "0"),
            ]),
            reserved: amounts(&[("cpu", "500m"), ("memory", "1Gi"), ("pid", "1000")]),
            allocatable: amounts(&[("cpu", "3500m"), ("memory", "5Gi")]),
        }
    }

    fn of(tree: &[(Group, Values)], group: &Group) -> Values {
        let found = tree.iter().find(|(g, _)| g == group);
        found
            .map(|(_, values)| values.clone())
            .expect("a group of the tree")
    }

    #[test]
    fn cpu_weight_of_a_qos_class_is_the_sum_of_its_pods_requests() {
        let small = json!({"cpu": "100m", "memory": "1Mi"});
        let guaranteed = pod(small.clone(), small);
        let burstable = pod(json!({"cpu": "500m"}), json!({}));
        let best_effort = pod(json!({}), json!({}));
        let pods = [
            &guaranteed,
            &burstable,
            &burstable,
            &best_effort,
            &best_effort,
        ];
        let rules = Rules {
            limits_pods: true,
            ..Rules::default()
        };
        let all = tree(&supply(), &rules, &pods);
        let shares = |group| of(&all, &group).shares;
        assert_eq!(shares(Group::Pods), Some(3584));
        assert_eq!(shares(Group::Burstable), Some(1024));
        assert_eq!(shares(Group::BestEffort), Some(2));
        // All best-effort pods together have fewer shares than the smallest guaranteed pod.
        assert!(shares(Group::BestEffort) < Some(pod_limits(&guaranteed, None, None).shares));
        assert_eq!(
            of(&tree(&supply(), &rules, &[]), &Group::Burstable).shares,
            Some(2)
        );
    }

    /// A pod with two CPUs requests 64, which is not granted yet: its shares are unchanged. The shares include a pod
    /// that is not admitted yet, because its cgroup is about to be created.
    #[test]
    fn a_resize_that_is_not_granted_changes_no_cpu_weight() {
        let sized = |uid: &str, cpu: &str| {
            let mut pod = pod(json!({"cpu": cpu}), json!({}));
            pod.metadata.uid = Some(uid.to_owned());
            Arc::new(pod)
        };
        let wanted = vec![sized("grows", "64"), sized("new", "1")];
        for (admitted, cpus) in [
            (vec![sized("grows", "2"), sized("gone", "8")], 3),
            (vec![sized("grows", "64")], 65),
            (vec![], 65),
        ] {
            let pods = with_allocated_resources(wanted.clone(), &admitted);
            let pods: Vec<&Pod> = pods.iter().map(|p| &**p).collect();
            let all = tree(&supply(), &Rules::default(), &pods);
            let found = of(&all, &Group::Burstable).shares;
            assert_eq!(found, Some(cpus * 1024), "{admitted:?}");
        }
    }

    #[test]
    fn without_qos_cgroups_only_the_root_has_values() {
        let reserved = Reserved {
            cgroup: "/system".into(),
            amounts: amounts(&[("cpu", "1")]),
            compressible_only: false,
        };
        let rules = Rules {
            flat: true,
            system: Some(reserved),
            ..Rules::default()
        };
        let all = tree(&supply(), &rules, &[]);
        let groups: Vec<&Group> = all.iter().map(|(group, _)| group).collect();
        assert_eq!(
            groups,
            [&Group::Root, &Group::Reserved("/system".to_owned())]
        );
        let root = of(&all, &Group::Root);
        assert_eq!((root.shares, root.memory_min), (Some(4096), None));
        for (root, driver, expected) in [
            ("/", Driver::Cgroupfs, "/"),
            ("/", Driver::Systemd, "/"),
            ("/a/b", Driver::Cgroupfs, "/a/b"),
            ("/a/b", Driver::Systemd, "a-b.slice"),
        ] {
            assert_eq!(
                Group::Root.name(root, driver),
                expected,
                "{root} {driver:?}"
            );
        }
    }

    #[test]
    fn all_pods_together_get_what_is_not_reserved() {
        let enforced = Rules {
            limits_pods: true,
            ..Rules::default()
        };
        for (rules, shares, memory, pids) in [
            (enforced, 3584, Bound::At(7 << 30), 31_768),
            (Rules::default(), 4096, Bound::Unlimited, 32_768),
        ] {
            let all = tree(&supply(), &rules, &[]);
            let pods = of(&all, &Group::Pods);
            assert_eq!(
                (pods.shares, pods.memory, pods.pids),
                (Some(shares), Some(memory), Some(Bound::At(pids)))
            );
            let huge: Vec<_> = pods.huge_pages.into_iter().collect();
            assert_eq!(
                huge,
                [(2 << 20, Bound::At(1 << 30)), (1 << 30, Bound::At(0))],
                "at most the existing ones"
            );
            let tier = of(&all, &Group::BestEffort);
            assert_eq!(tier.memory, Some(Bound::Unlimited));
            assert!(tier.huge_pages.values().all(|b| *b == Bound::Unlimited));
        }
    }

    #[test]
    fn memory_requests_of_higher_qos_classes_limit_lower_ones() {
        let sizes = json!({"cpu": "1", "memory": "1Gi"});
        let guaranteed = pod(sizes.clone(), sizes);
        let burstable = pod(json!({"memory": "2Gi"}), json!({}));
        for (percent, expected) in [
            (None, [Bound::Unlimited; 2]),
            (Some(0), [Bound::At(5 << 30); 2]),
            (Some(50), [Bound::At(9 << 29), Bound::At(7 << 29)]),
            (Some(100), [Bound::At(4 << 30), Bound::At(2 << 30)]),
        ] {
            let rules = Rules {
                qos_memory: percent,
                ..Rules::default()
            };
            let all = tree(&supply(), &rules, &[&guaranteed, &burstable]);
            let found = [Group::Burstable, Group::BestEffort].map(|g| of(&all, &g).memory);
            assert_eq!(found, expected.map(Some), "{percent:?}");
        }
    }

    #[test]
    fn memory_is_protected_if_configured() {
        let sizes = json!({"cpu": "1", "memory": "1Gi"});
        let guaranteed = pod(sizes.clone(), sizes);
        let burstable = pod(json!({"memory": "2Gi"}), json!({}));
        let qos = |reserves| MemoryQos {
            throttling: 0.9,
            reserves,
        };
        for (memory, expected) in [
            (None, (None, None, None)),
            (Some(qos(false)), (Some(0), Some(0), Some(1 << 30))),
            (
                Some(qos(true)),
                (Some(3 << 30), Some(2 << 30), Some(1 << 30)),
            ),
        ] {
            let system = Reserved {
                cgroup: "/s".into(),
                amounts: amounts(&[("memory", "1Gi")]),
                compressible_only: false,
            };
            let rules = Rules {
                memory,
                system: Some(system),
                ..Rules::default()
            };
            let all = tree(&supply(), &rules, &[&guaranteed, &burstable]);
            let found = (
                of(&all, &Group::Pods).memory_min,
                of(&all, &Group::Burstable).memory_low,
                of(&all, &Group::Reserved("/s".into())).memory_min,
            );
            assert_eq!(found, expected, "{memory:?}");
            let (pods, burstable) = (of(&all, &Group::Pods), of(&all, &Group::Burstable));
            assert_eq!((pods.memory_low, burstable.memory_min), (None, None));
        }
    }

    #[test]
    fn reservations_are_enforced_on_the_configured_cgroups() {
        let reserved = |cgroup: &str, compressible_only| Reserved {
            cgroup: cgroup.into(),
            amounts: amounts(&[("cpu", "500m"), ("memory", "1Gi"), ("pid", "1000")]),
            compressible_only,
        };
        let rules = Rules {
            system: Some(reserved("/system.slice", false)),
            kube: Some(reserved("/kube", true)),
            ..Rules::default()
        };
        let all = tree(&supply(), &rules, &[]);
        let cpu = Values {
            shares: Some(512),
            ..Values::default()
        };
        assert_eq!(of(&all, &Group::Reserved("/kube".into())), cpu);
        assert_eq!(
            of(&all, &Group::Reserved("/system.slice".into())),
            Values {
                memory: Some(Bound::At(1 << 30)),
                pids: Some(Bound::At(1000)),
                ..cpu
            }
        );
    }

    #[test]
    fn cgroup_names_follow_the_cgroup_driver() {
        for (group, in_files, in_systemd) in [
            (Group::Pods, "/t/kubepods", "t-kubepods.slice"),
            (
                Group::Burstable,
                "/t/kubepods/burstable",
                "t-kubepods-burstable.slice",
            ),
            (
                Group::BestEffort,
                "/t/kubepods/besteffort",
                "t-kubepods-besteffort.slice",
            ),
            (
                Group::Reserved("system.slice".into()),
                "/system.slice",
                "system.slice",
            ),
            (
                Group::Reserved("/a.slice/a-b.slice".into()),
                "/a.slice/a-b.slice",
                "a-b.slice",
            ),
            (Group::Reserved("/kube".into()), "/kube", "kube.slice"),
        ] {
            assert_eq!(group.name("/t", Driver::Cgroupfs), in_files);
            assert_eq!(group.name("/t", Driver::Systemd), in_systemd);
        }
    }
}
