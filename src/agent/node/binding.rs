//! Binds containers to the CPUs and NUMA nodes that the managers have assigned to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use holdfast_proto::cri as pb;
use tokio::sync::watch;

use super::ledger::LedgerHandle;
use crate::pod::table::PodTable;
use holdfast_config::Config;
use holdfast_core::cpuset::format_list;
use holdfast_core::pod::pinning::Pinning;
use holdfast_cri::{RunningContainer, Runtime};

/// What the binding of containers uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub ledger: LedgerHandle,
}

/// Binds containers to their CPUs and NUMA nodes, whenever assignments change and every `cpuManagerReconcilePeriod`.
/// Also releases assignments of pods that no longer exist.
pub async fn run(parts: Parts, table: watch::Receiver<PodTable>) {
    if !parts.config.managers.pins_containers() {
        return std::future::pending().await;
    }
    let mut pinning = parts.ledger.pinning();
    let mut binder = Binder::default();
    loop {
        let _now = pinning.borrow_and_update();
        drop(_now);
        binder.reconcile(&parts, &table).await;
        tokio::select! {
            biased;
            Ok(()) = pinning.changed() => {}
            () = tokio::time::sleep(parts.config.managers.reconcile) => {}
        }
    }
}

/// The CPUs and NUMA nodes that a container is bound to, as lists; an empty list is no restriction.
#[derive(Default, Clone, PartialEq, Eq)]
struct Binding {
    cpus: String,
    nodes: String,
}

impl Binding {
    fn of(pinning: &Pinning, container: &RunningContainer) -> Binding {
        let (uid, name) = (&container.uid, &container.name);
        Binding {
            cpus: pinning.cpus(uid, name).map(format_list).unwrap_or_default(),
            nodes: pinning
                .memory_nodes(uid, name)
                .map(format_list)
                .unwrap_or_default(),
        }
    }
}

/// The last binding of each container, by its id.
#[derive(Default)]
struct Binder {
    bound: BTreeMap<String, Binding>,
    failing: bool,
}

impl Binder {
    async fn reconcile(&mut self, parts: &Parts, table: &watch::Receiver<PodTable>) {
        let result = match parts.runtime.running().await {
            Ok(running) => {
                release_stale(parts, table, &running).await;
                self.bind(parts, &running).await
            }
            Err(error) => Err(error.to_string()),
        };
        match result {
            Ok(()) => self.failing = false,
            Err(error) if !std::mem::replace(&mut self.failing, true) => tracing::warn!(
                error,
                "binding containers to their CPUs and NUMA nodes failed; retrying"
            ),
            Err(_) => {}
        }
    }

    async fn bind(&mut self, parts: &Parts, running: &[RunningContainer]) -> Result<(), String> {
        self.bound
            .retain(|id, _| running.iter().any(|c| c.id == *id));
        let mut result = Ok(());
        for container in running {
            let now = Arc::clone(&parts.ledger.pinning().borrow());
            let wanted = Binding::of(&now, container);
            if *self.bound.get(&container.id).unwrap_or(&Binding::default()) == wanted {
                continue;
            }
            let resources = pb::LinuxContainerResources {
                cpuset_cpus: wanted.cpus.clone(),
                cpuset_mems: wanted.nodes.clone(),
                ..pb::LinuxContainerResources::default()
            };
            let bound = parts.runtime.update_container(&container.id, resources);
            match bound.await {
                Ok(()) => _ = self.bound.insert(container.id.clone(), wanted),
                Err(error) => {
                    let (pod, name) = (&container.pod, &container.name);
                    result = Err(format!("container {name} of pod {pod}: {error}"));
                }
            }
        }
        result
    }
}

/// Releases assignments of pods that were deleted while no agent was running.
async fn release_stale(
    parts: &Parts,
    table: &watch::Receiver<PodTable>,
    running: &[RunningContainer],
) {
    let pinning = Arc::clone(&parts.ledger.pinning().borrow());
    let stale: BTreeSet<String> = {
        let table = table.borrow();
        let runs = |uid: &str| running.iter().any(|c| c.uid == uid);
        let deleted = pinning
            .pods()
            .filter(|uid| table.complete && !table.has(uid) && !runs(uid));
        deleted.map(Into::into).collect()
    };
    for uid in stale {
        tracing::info!(
            pod = uid,
            "the pod was deleted: releasing its exclusive resources"
        );
        parts.ledger.release(&uid);
    }
}
