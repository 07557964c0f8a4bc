//! The resource managers: CPU manager, memory manager and device manager, with the topology manager that aligns their
//! allocations (`pkg/kubelet/cm`). Pure; the ledger's actor owns them.
//!
//! Admission is all or nothing: if one manager rejects a pod, the others revert what they allocated for it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::admit::{Refusal, infeasible};
use super::cpus::{self, Cpus, checkpoint as cpu_checkpoint};
use super::devices::{Devices, NearNodes, Slot};
use super::hints::{self, Alignment, Count, Hint, Hints, NodeMask, Provider, Scope, Subject};
use super::memory::{self, Memory, checkpoint as memory_checkpoint};
use super::topology::Topology;
use crate::pod::pinning::Pinning;
use crate::pod::qos::{self, QosClass};
use crate::pod::resize::Infeasible;
use crate::pod::resources::{Amounts, Side, of_container};
use crate::pod::{self, Role};

/// Configuration of the managers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// `cpuManagerPolicy: static`, and its options.
    pub cpus: Option<cpus::Rules>,
    /// `memoryManagerPolicy: Static`.
    pub memory: Option<memory::Rules>,
    /// `topologyManagerPolicy`, unless it is `none`.
    pub alignment: Option<hints::Rules>,
    /// How often the CPU and memory sets of containers are reapplied (`cpuManagerReconcilePeriod`).
    pub reconcile: Duration,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            cpus: None,
            memory: None,
            alignment: None,
            reconcile: Duration::from_secs(10),
        }
    }
}

impl Rules {
    /// Whether containers are pinned to CPUs or memory nodes.
    #[must_use]
    pub fn pins_containers(&self) -> bool {
        self.cpus.is_some() || self.memory.is_some()
    }
}

/// Checkpoint files of an earlier run; `None` if a file does not exist.
#[derive(Debug, Clone, Default)]
pub struct Checkpoints {
    /// `cpu_manager_state`.
    pub cpus: Option<String>,
    /// `memory_manager_state`.
    pub memory: Option<String>,
}

/// The machine whose resources are managed.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// CPUs and NUMA nodes.
    pub topology: Arc<Topology>,
    /// Memory and huge pages that are reserved from pods ([`memory::set_aside`]).
    pub set_aside: Amounts,
}

/// All managers. By default none is active.
#[derive(Debug, Clone, Default)]
pub struct Managers {
    /// The machine's NUMA nodes.
    nodes: BTreeSet<i64>,
    alignment: Option<Alignment>,
    cpus: Option<Cpus>,
    memory: Option<Memory>,
}

/// Result of a pod's admission.
#[derive(Debug)]
pub struct Admission {
    /// The device allocations that still need a call to their plugin, or why the pod is rejected.
    pub result: Result<Vec<Slot>, Refusal>,
    /// Events for metrics, also if the pod is rejected.
    pub counts: Vec<Count>,
}

/// The error for a checkpoint that does not fit.
fn unusable(file: &str, why: &str) -> String {
    format!(
        "{file} cannot be restored: {why}; drain this node, remove the file and restart the agent"
    )
}

impl Managers {
    /// Creates the managers for this machine and restores the checkpoints.
    ///
    /// # Errors
    ///
    /// The rules do not fit the machine, or a checkpoint fits neither. The message names the field or file and the
    /// remedy.
    pub fn new(
        rules: &Rules,
        machine: &Machine,
        checkpoints: &Checkpoints,
    ) -> Result<Managers, String> {
        let topology = &machine.topology;
        if topology.nodes.keys().any(|node| *node >= NodeMask::NODES) {
            return Err(format!(
                "this machine has NUMA nodes with numbers of {} and more, which are not supported: set the CPU, memory and topology manager's policies to none",
                NodeMask::NODES
            ));
        }
        let alignment = rules.alignment.map(|r| Alignment::new(r, topology));
        Ok(Managers {
            nodes: topology.nodes.keys().copied().map(i64::from).collect(),
            alignment: alignment.transpose()?,
            cpus: cpus(rules, topology, checkpoints.cpus.as_deref())?,
            memory: memory(rules, machine, checkpoints.memory.as_deref())?,
        })
    }

    /// The order is the kubelet's, so device errors are reported first.
    fn providers<'a>(&'a mut self, devices: &'a mut NearNodes<'_>) -> Vec<&'a mut dyn Provider> {
        let cpus = self.cpus.iter_mut().map(|c| c as &mut dyn Provider);
        let memory = self.memory.iter_mut().map(|m| m as &mut dyn Provider);
        let devices: &mut dyn Provider = devices;
        [devices].into_iter().chain(cpus).chain(memory).collect()
    }

    fn collect_hints(&mut self, devices: &mut NearNodes<'_>, subject: Subject<'_>) -> Vec<Hints> {
        let providers = self.providers(devices);
        providers.iter().map(|p| p.hints(subject)).collect()
    }

    /// Allocates a pod's resources; existing allocations are kept. On error all allocations are as before.
    pub fn admit(&mut self, pod: &Pod, devices: &mut Devices) -> Admission {
        let uid = pod::uid(pod);
        let cpus = self.cpus.as_ref().map(|c| c.snapshot(uid));
        let memory = self.memory.as_ref().map(|m| m.snapshot(uid));
        let devices_before = devices.snapshot(uid);
        let mut counts = vec![Count::Alignment];
        let result = self.allocate(pod, devices, &mut counts);
        let result = match result {
            Ok(()) => Ok(devices.pending_calls(pod)),
            Err(refusal) => {
                if let (Some(own), Some(before)) = (&mut self.cpus, cpus) {
                    own.restore(uid, before);
                }
                if let (Some(own), Some(before)) = (&mut self.memory, memory) {
                    own.restore(uid, before);
                }
                devices.restore(uid, devices_before);
                Err(refusal)
            }
        };
        if result.is_err() && self.alignment.is_some() {
            counts.push(Count::AlignmentError);
        }
        Admission { result, counts }
    }

    fn allocate(
        &mut self,
        pod: &Pod,
        devices: &mut Devices,
        counts: &mut Vec<Count>,
    ) -> Result<(), Refusal> {
        let (alignment, nodes) = (self.alignment.clone(), self.nodes.clone());
        let mut devices = NearNodes {
            devices,
            nodes: &nodes,
        };
        let aligned = |scope| alignment.as_ref().filter(|a| a.scope() == scope);
        let mut affinity = Hint::default();
        if let Some(alignment) = aligned(Scope::Pod) {
            let all_hints = self.collect_hints(&mut devices, Subject::Pod(pod));
            affinity = merged(alignment, &all_hints, counts)?;
        }
        for (role, container) in pod::containers(pod) {
            if role == Role::Ephemeral {
                continue;
            }
            if let Some(alignment) = aligned(Scope::Container) {
                let all_hints =
                    self.collect_hints(&mut devices, Subject::Container(pod, &container));
                affinity = merged(alignment, &all_hints, counts)?;
            }
            for provider in self.providers(&mut devices) {
                provider.allocate(pod, role, &container, affinity, counts)?;
            }
            let on_one = aligned(Scope::Container).filter(|a| a.is_guaranteed());
            counts.extend(on_one.map(|a| Count::OneNode(a.scope())));
        }
        let on_one = aligned(Scope::Pod).filter(|a| a.is_guaranteed());
        counts.extend(on_one.map(|a| Count::OneNode(a.scope())));
        Ok(())
    }

    /// Whether a pod has exclusive CPUs or memory.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.cpus.as_ref().is_some_and(|c| c.has(uid))
            || self.memory.as_ref().is_some_and(|m| m.has(uid))
    }

    /// Releases a pod's allocations; returns whether it had any.
    pub fn release(&mut self, uid: &str) -> bool {
        let cpus = self.cpus.as_mut().is_some_and(|c| c.release(uid));
        let memory = self.memory.as_mut().is_some_and(|m| m.release(uid));
        cpus || memory
    }

    /// Whether the managers permit a resize of a running pod. Exclusive CPUs and memory cannot change while containers
    /// run.
    pub fn check_resize(&self, now: &Pod, then: &Pod) -> Result<(), Refusal> {
        let changes = |resource: &str| {
            let of = |pod: &Pod| -> Vec<_> {
                let containers = pod::containers(pod);
                let request = containers.iter().map(|(_, c)| {
                    let amounts = of_container(c, Side::Requests);
                    (c.name.clone(), amounts.get(resource).map(|q| q.milli()))
                });
                request.collect()
            };
            of(now) != of(then)
        };
        if qos::of(pod::spec(then)) != QosClass::Guaranteed {
            return Ok(());
        }
        let refusal = |cause: Infeasible, manager: &str| {
            let message = format!("Resize is infeasible for Guaranteed Pods alongside {manager}");
            Err(infeasible(cause, message))
        };
        if self.cpus.is_some() && changes("cpu") {
            return refusal(Infeasible::CpuManager, "CPU Manager policy \"static\"");
        }
        if self.memory.is_some() && changes("memory") {
            return refusal(
                Infeasible::MemoryManager,
                "Memory Manager policy \"Static\"",
            );
        }
        Ok(())
    }

    /// CPUs and NUMA nodes that containers are pinned to.
    #[must_use]
    pub fn pinning(&self) -> Pinning {
        let cpus = self.cpus.as_ref().map(Cpus::state);
        Pinning {
            shared: cpus.map(|state| state.shared.clone()),
            exclusive: cpus
                .map(|state| state.exclusive.clone())
                .unwrap_or_default(),
            memory: self.memory.as_ref().map(Memory::nodes).unwrap_or_default(),
        }
    }

    /// Whether the topology manager has a policy.
    #[must_use]
    pub fn aligns(&self) -> bool {
        self.alignment.is_some()
    }

    /// The CPU manager, if it is active.
    #[must_use]
    pub fn cpus(&self) -> Option<&Cpus> {
        self.cpus.as_ref()
    }

    /// The memory manager, if it is active.
    #[must_use]
    pub fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }

    /// The current content of the checkpoint files.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<(&'static str, String)> {
        let cpus = self.cpus.iter().map(|cpus| {
            let text = cpu_checkpoint::write("static", cpus.state());
            (cpu_checkpoint::FILE, text)
        });
        let memory = self.memory.iter().map(|memory| {
            let text = memory_checkpoint::write("Static", memory.state());
            (memory_checkpoint::FILE, text)
        });
        cpus.chain(memory).collect()
    }
}

/// The best nodes for all resources. Counts pods that cannot be aligned to one node.
fn merged(
    alignment: &Alignment,
    all_hints: &[Hints],
    counts: &mut Vec<Count>,
) -> Result<Hint, Refusal> {
    let merged = alignment.merge(all_hints);
    if merged.is_err() && alignment.is_guaranteed() {
        counts.push(Count::NoNode(alignment.scope()));
    }
    merged
}

fn cpus(
    rules: &Rules,
    topology: &Arc<Topology>,
    checkpoint: Option<&str>,
) -> Result<Option<Cpus>, String> {
    let unusable = |why: String| unusable(cpu_checkpoint::FILE, &why);
    let policy = if rules.cpus.is_some() {
        "static"
    } else {
        "none"
    };
    let state = checkpoint.map(|text| cpu_checkpoint::read(text, policy));
    let state = state.transpose().map_err(unusable)?;
    let Some(own) = &rules.cpus else {
        return Ok(None);
    };
    let alignment = rules.alignment.map(|a| a.policy);
    let mut cpus = Cpus::new(own, alignment, Arc::clone(topology))?;
    cpus.load(state.unwrap_or_default()).map_err(unusable)?;
    Ok(Some(cpus))
}

fn memory(
    rules: &Rules,
    machine: &Machine,
    checkpoint: Option<&str>,
) -> Result<Option<Memory>, String> {
    let unusable = |why: String| unusable(memory_checkpoint::FILE, &why);
    let policy = if rules.memory.is_some() {
        "Static"
    } else {
        "None"
    };
    let state = checkpoint.map(|text| memory_checkpoint::read(text, policy));
    let state = state.transpose().map_err(unusable)?;
    let Some(own) = &rules.memory else {
        return Ok(None);
    };
    let mut memory = Memory::new(own, &machine.topology, &machine.set_aside)?;
    memory.load(state.unwrap_or_default()).map_err(unusable)?;
    Ok(Some(memory))
}

#[cfg(test)]
mod tests;
