//! Node-pressure eviction (`pkg/kubelet/eviction`): signals, conditions, and the pods that a node under pressure
//! rejects. Pure.
//!
//! - `thresholds` parses the configuration.
//! - `watch` tracks which thresholds are met and for how long.
//! - `ranking` chooses the pod to evict and words the message.
//! - `terminating` limits the wait for evicted pods.

mod ranking;
mod terminating;
mod thresholds;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Taint};

use super::taints::tolerates;
use crate::pod;
use crate::pod::priority::is_critical;
use crate::pod::qos::{self, QosClass};
use crate::quantity::Quantity;

pub use ranking::{
    Candidate, ContainerFigures, PodFigures, annotations, explain, grace, message, rank,
};
pub use terminating::TerminatingPods;
pub(crate) use thresholds::reserved_by_thresholds;
pub use thresholds::{DEFAULT_HARD, IGNORED, Invalid, Threshold, ThresholdSettings, Value, parse};
pub use watch::{Assessment, Watch, growth_until_threshold, next_measurement};

/// Eviction signals, in the order in which they are relieved: memory first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    /// Memory capacity of the machine minus its working set, in bytes.
    MemoryAvailable,
    /// Memory limit of all pods minus their usage, in bytes.
    AllocatableMemoryAvailable,
    /// Available bytes on the filesystem with the root directory.
    NodeFsAvailable,
    /// Free inodes on the filesystem with the root directory.
    NodeFsInodesFree,
    /// Available bytes on the filesystem with images and containers.
    ImageFsAvailable,
    /// Free inodes on the filesystem with images and containers.
    ImageFsInodesFree,
    /// Available process ids.
    PidAvailable,
}

/// A resource that evicting a pod frees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// Bytes of memory.
    Memory,
    /// Bytes of disk.
    EphemeralStorage,
    /// Inodes.
    Inodes,
    /// Process ids.
    Pids,
}

/// A pressure condition of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    /// `MemoryPressure`.
    Memory,
    /// `DiskPressure`: too few bytes or inodes.
    Disk,
    /// `PIDPressure`.
    Pid,
}

/// Measured amount of a resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Total amount.
    pub capacity: u64,
    /// Available amount.
    pub available: u64,
}

/// Measured amounts; signals that could not be measured are absent.
pub type Observations = BTreeMap<Signal, Amount>;

/// The active pressure conditions.
pub type Pressures = BTreeSet<Pressure>;

/// Eviction settings of the configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The thresholds. If there are none, nothing is measured and no pod is evicted.
    pub thresholds: Vec<Threshold>,
    /// How long a condition stays active after it was last observed (`evictionPressureTransitionPeriod`).
    pub transition: Duration,
    /// Maximum grace period in seconds at soft thresholds (`evictionMaxPodGracePeriod`); if negative, the pod's own
    /// applies.
    pub max_pod_grace: i64,
}

impl Signal {
    /// All signals.
    pub const ALL: [Signal; 7] = [
        Signal::MemoryAvailable,
        Signal::AllocatableMemoryAvailable,
        Signal::NodeFsAvailable,
        Signal::NodeFsInodesFree,
        Signal::ImageFsAvailable,
        Signal::ImageFsInodesFree,
        Signal::PidAvailable,
    ];

    /// Name of the signal in configurations and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Signal::MemoryAvailable => "memory.available",
            Signal::AllocatableMemoryAvailable => "allocatableMemory.available",
            Signal::NodeFsAvailable => "nodefs.available",
            Signal::NodeFsInodesFree => "nodefs.inodesFree",
            Signal::ImageFsAvailable => "imagefs.available",
            Signal::ImageFsInodesFree => "imagefs.inodesFree",
            Signal::PidAvailable => "pid.available",
        }
    }

    /// The signal of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Signal> {
        Signal::ALL.into_iter().find(|s| s.name() == name)
    }

    /// The resource that is short when the signal is low.
    #[must_use]
    pub fn resource(self) -> Resource {
        match self {
            Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable => Resource::Memory,
            Signal::NodeFsAvailable | Signal::ImageFsAvailable => Resource::EphemeralStorage,
            Signal::NodeFsInodesFree | Signal::ImageFsInodesFree => Resource::Inodes,
            Signal::PidAvailable => Resource::Pids,
        }
    }

    /// Whether the signal is about the image filesystem.
    #[must_use]
    pub fn is_of_images(self) -> bool {
        matches!(self, Signal::ImageFsAvailable | Signal::ImageFsInodesFree)
    }

    /// The condition that is active when the signal is low.
    #[must_use]
    pub fn pressure(self) -> Pressure {
        match self.resource() {
            Resource::Memory => Pressure::Memory,
            Resource::EphemeralStorage | Resource::Inodes => Pressure::Disk,
            Resource::Pids => Pressure::Pid,
        }
    }
}

impl Settings {
    /// A copy with only the thresholds of some resources.
    #[must_use]
    pub fn of(&self, is_among: impl Fn(Resource) -> bool) -> Settings {
        let thresholds = self.thresholds.iter();
        let own = thresholds.filter(|t| is_among(t.signal.resource()));
        Settings {
            thresholds: own.copied().collect(),
            ..self.clone()
        }
    }
}

impl Resource {
    /// Name of the resource in messages and events.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Resource::Memory => "memory",
            Resource::EphemeralStorage => "ephemeral-storage",
            Resource::Inodes => "inodes",
            Resource::Pids => "pids",
        }
    }

    /// Formats an amount: bytes with binary suffixes, counts with decimal ones.
    #[must_use]
    pub fn quantity(self, amount: u64) -> Quantity {
        match self {
            Resource::Memory | Resource::EphemeralStorage => Quantity::from_bytes(amount),
            Resource::Inodes | Resource::Pids => {
                Quantity::from_units(i64::try_from(amount).unwrap_or(i64::MAX))
            }
        }
    }
}

impl Pressure {
    /// The condition's type.
    #[must_use]
    pub fn condition(self) -> &'static str {
        match self {
            Pressure::Memory => "MemoryPressure",
            Pressure::Disk => "DiskPressure",
            Pressure::Pid => "PIDPressure",
        }
    }
}

/// Why a node with these conditions rejects a pod; `None` if it does not. Critical pods are always accepted. Under
/// memory pressure alone, only best-effort pods without a matching toleration are rejected. A pod with a start time is
/// accepted, because it was admitted before a restart of this agent.
#[must_use]
pub fn refusal(pressures: &Pressures, pod: &Pod) -> Option<String> {
    let has_been_here = pod.status.as_ref().is_some_and(|s| s.start_time.is_some());
    if pressures.is_empty() || has_been_here || is_critical(pod) {
        return None;
    }
    if pressures.iter().all(|p| *p == Pressure::Memory) {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".into(),
            effect: "NoSchedule".into(),
            ..Taint::default()
        };
        let spec = pod::spec(pod);
        let tolerations = spec.tolerations.as_deref().unwrap_or_default();
        if qos::of(spec) != QosClass::BestEffort || tolerates(tolerations, &taint) {
            return None;
        }
    }
    let names: Vec<&str> = pressures.iter().map(|p| p.condition()).collect();
    Some(format!("The node had condition: [{}]. ", names.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pods_are_rejected_by_node_pressure_and_qos_class() {
        let pod = |value: serde_json::Value| -> Pod {
            let mut pod =
                json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}});
            json_patch::merge(&mut pod, &value);
            serde_json::from_value(pod).expect("a pod")
        };
        let best_effort = pod(json!({}));
        let burstable = pod(
            json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}}),
        );
        let critical = pod(json!({"spec": {"priority": 2_000_000_000}}));
        let tolerant = pod(
            json!({"spec": {"tolerations": [{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists"}]}}),
        );
        let runs = pod(json!({"status": {"startTime": "2026-01-01T00:00:00Z"}}));
        let memory = Pressures::from([Pressure::Memory]);
        let both = Pressures::from([Pressure::Disk, Pressure::Memory]);
        for (name, pod, under_memory, under_both) in [
            ("best effort", &best_effort, false, false),
            ("burstable", &burstable, true, false),
            ("critical", &critical, true, true),
            ("tolerant", &tolerant, true, false),
            ("already running", &runs, true, true),
        ] {
            assert_eq!(refusal(&Pressures::new(), pod), None, "{name}");
            assert_eq!(refusal(&memory, pod).is_none(), under_memory, "{name}");
            assert_eq!(refusal(&both, pod).is_none(), under_both, "{name}");
        }
        assert_eq!(
            refusal(&both, &best_effort).as_deref(),
            Some("The node had condition: [MemoryPressure DiskPressure]. ")
        );
    }

    #[test]
    fn eviction_signals_have_upstreams_names() {
        for signal in Signal::ALL {
            assert_eq!(Signal::named(signal.name()), Some(signal));
        }
        assert_eq!(Signal::named("memory"), None);
    }
}
