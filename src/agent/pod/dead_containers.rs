//! Removes exited containers by age and number (upstream's `pkg/kubelet/kuberuntime/kuberuntime_gc.go`). Workers remove
//! replaced instances as they go; this task enforces the node's limits independently of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::watch;

use crate::events::{Events, Kind};
use crate::pod::table::PodTable;
use holdfast_config::Config;
use holdfast_core::node::collection::{
    ContainerDecision, DeadContainer, Decision, Failures, PodState, decide_containers,
};
use holdfast_core::pod;
use holdfast_cri::Runtime;
use holdfast_host::PodHost;
use holdfast_sys::clock::Clock;

/// Interval between collections.
const PERIOD: Duration = Duration::from_secs(60);

/// What the removal of dead containers uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub host: Arc<dyn PodHost>,
    pub clock: Clock,
    pub events: Events,
    pub table: watch::Receiver<PodTable>,
}

/// Runs until the process exits.
pub async fn run(parts: Arc<Parts>) {
    let mut failing = false;
    loop {
        tokio::time::sleep(PERIOD).await;
        match find_and_remove(&parts, false).await {
            Ok((_, failures)) if failures.is_empty() => failing = false,
            result => {
                let all = |(_, failures): (usize, Failures)| {
                    failures.into_values().collect::<Vec<_>>().join("; ")
                };
                let error = result.map_or_else(|error| error, all);
                tracing::warn!(error, "removing some dead containers failed");
                // A single failure emits no event: the runtime may have just restarted.
                if std::mem::replace(&mut failing, true) {
                    let name = &parts.config.node_name;
                    let events = &parts.events;
                    events.node(name, Kind::Warning, "ContainerGCFailed", error);
                }
            }
        }
    }
}

/// Decides about each exited container. `disk_pressure` is whether the node is short of disk.
pub async fn find(parts: &Parts, disk_pressure: bool) -> Result<Vec<ContainerDecision>, String> {
    let dead = parts.runtime.dead_containers().await;
    let dead = dead.map_err(|e| format!("containers cannot be listed: {e}"))?;
    let known: HashMap<String, bool> = parts
        .table
        .borrow()
        .iter()
        .map(|known| {
            let uid = pod::uid(&known.pod).to_owned();
            (uid, pod::is_terminal(known.status_object()))
        })
        .collect();
    let pod_state = |uid: &str| match known.get(uid) {
        None => PodState::Unknown,
        Some(true) => PodState::Finished,
        Some(false) => PodState::Alive,
    };
    let rules = parts.config.dead_containers;
    let now = parts.clock.now();
    Ok(decide_containers(
        dead,
        rules,
        pod_state,
        disk_pressure,
        now,
    ))
}

/// Removes the chosen containers with their logs. Returns how many, and the failures.
pub async fn remove(parts: &Parts, decisions: &[ContainerDecision]) -> (usize, Failures) {
    let going = decisions
        .iter()
        .filter(|f| matches!(f.decision, Decision::Remove(_)));
    let (mut removed, mut failures) = (0, Failures::new());
    for ContainerDecision {
        container,
        decision,
    } in going
    {
        let DeadContainer {
            id,
            namespace,
            pod,
            uid,
            name,
            attempt,
            ..
        } = container;
        if let Err(error) = parts.runtime.remove_container(id).await {
            let why = format!("container {id} cannot be removed: {error}");
            failures.insert(id.clone(), why);
            continue;
        }
        removed += 1;
        tracing::info!(
            namespace,
            pod,
            container = name,
            attempt,
            "removed a dead container: {decision}"
        );
        let owner = Pod {
            metadata: ObjectMeta {
                namespace: Some(namespace.clone()),
                name: Some(pod.clone()),
                uid: Some(uid.clone()),
                ..ObjectMeta::default()
            },
            ..Pod::default()
        };
        let logs = parts.host.remove_instance(&owner, name, *attempt, id);
        if let Err(error) = logs.await {
            let why = format!("the logs of container {id} cannot be removed: {error}");
            failures.insert(id.clone(), why);
        }
    }
    (removed, failures)
}

/// Decides and removes. Returns the same as [`remove`].
pub(crate) async fn find_and_remove(
    parts: &Parts,
    disk_pressure: bool,
) -> Result<(usize, Failures), String> {
    let decisions = find(parts, disk_pressure).await?;
    Ok(remove(parts, &decisions).await)
}
