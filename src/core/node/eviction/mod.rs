//! Node-pressure eviction: what is measured, what it stands for, and which pods a node under pressure does not take
//! (kubelet spec, 11 and 12.7; kubelet's `pkg/kubelet/eviction`). Pure.
//!
//! `thresholds` reads the configuration, `watch` says which thresholds are met and for how long, `ranking` which pod
//! goes and what is said about it, `ending` how long it is waited for.

mod ending;
mod ranking;
mod thresholds;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Taint};

use super::preempt::is_critical;
use super::taints::tolerates;
use crate::core::pod;
use crate::core::pod::qos::{self, QosClass};
use crate::core::quantity::Quantity;

pub use ending::Ending;
pub use ranking::{
    Candidate, ContainerFigures, PodFigures, annotations, explain, grace, message, rank,
};
pub use thresholds::{
    DEFAULT_HARD, IGNORED, Invalid, Statements, Threshold, Value, parse, set_aside,
};
pub use watch::{Assessment, Watch, next_look, notice_after};

/// What may run short. In the order in which shortages are relieved: memory first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    /// Bytes of the machine's memory, less its working set.
    MemoryAvailable,
    /// Bytes of the memory that all pods may have together, less what they use.
    AllocatableMemoryAvailable,
    /// Bytes of the filesystem with the root directory.
    NodeFsAvailable,
    /// Its inodes.
    NodeFsInodesFree,
    /// Bytes of the filesystem with the images and containers.
    ImageFsAvailable,
    /// Its inodes.
    ImageFsInodesFree,
    /// Process ids.
    PidAvailable,
}

/// What a pod could give back.
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

/// A condition of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    /// Memory is short.
    Memory,
    /// The disk or its inodes are.
    Disk,
    /// Process ids are.
    Pid,
}

/// How much there is of something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// All of it.
    pub capacity: u64,
    /// What is left.
    pub available: u64,
}

/// What was measured. A signal that could not be is not there.
pub type Observations = BTreeMap<Signal, Amount>;

/// The conditions that hold.
pub type Pressures = BTreeSet<Pressure>;

/// What the configuration says.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The thresholds; without any, nothing is measured and nobody evicted.
    pub thresholds: Vec<Threshold>,
    /// How long a condition holds after it was last observed (`evictionPressureTransitionPeriod`).
    pub transition: Duration,
    /// The most seconds that a pod gets to end at a soft threshold; below 0 its own grace period counts.
    pub max_pod_grace: i64,
}

impl Signal {
    /// All of them.
    pub const ALL: [Signal; 7] = [
        Signal::MemoryAvailable,
        Signal::AllocatableMemoryAvailable,
        Signal::NodeFsAvailable,
        Signal::NodeFsInodesFree,
        Signal::ImageFsAvailable,
        Signal::ImageFsInodesFree,
        Signal::PidAvailable,
    ];

    /// As configurations and metrics name it.
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

    /// What is short when it is low.
    #[must_use]
    pub fn resource(self) -> Resource {
        match self {
            Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable => Resource::Memory,
            Signal::NodeFsAvailable | Signal::ImageFsAvailable => Resource::EphemeralStorage,
            Signal::NodeFsInodesFree | Signal::ImageFsInodesFree => Resource::Inodes,
            Signal::PidAvailable => Resource::Pids,
        }
    }

    /// Whether it is about the filesystem with the images.
    #[must_use]
    pub fn is_of_images(self) -> bool {
        matches!(self, Signal::ImageFsAvailable | Signal::ImageFsInodesFree)
    }

    /// The condition that the node has when it is low.
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
    /// These with some of the thresholds only.
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
    /// As messages and events name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Resource::Memory => "memory",
            Resource::EphemeralStorage => "ephemeral-storage",
            Resource::Inodes => "inodes",
            Resource::Pids => "pids",
        }
    }

    /// So much of it, as it is written: bytes with binary suffixes, numbers with decimal ones.
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

/// Why a node with these conditions does not take a pod; none if it does. Critical pods are taken in any case, and under
/// memory pressure all but those that ask for nothing. A pod that has been here before keeps its place: this agent may
/// have been started again.
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
    fn pods_are_refused_by_what_is_short_and_what_they_ask_for() {
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
            ("runs here already", &runs, true, true),
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
    fn signals_have_the_names_of_the_format() {
        for signal in Signal::ALL {
            assert_eq!(Signal::named(signal.name()), Some(signal));
        }
        assert_eq!(Signal::named("memory"), None);
    }
}
