//! Evicts pods that exceed their limits of local ephemeral storage (`pkg/kubelet/eviction`, `localStorageEviction`).
//! Only pods with limits are measured, each in its own task; `core::volume::usage_schedule` decides when.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::node::ledger::LedgerHandle;
use holdfast_config::Config;
use holdfast_core::node::ledger::Eviction;
use holdfast_core::pod::{self, priority};
use holdfast_core::volume::local_storage::{self, Limits, Usage};
use holdfast_core::volume::usage_schedule::{PERIOD, UsageSchedule};
use holdfast_cri::{Layer, Runtime};
use holdfast_host::{HostError, PodHost};

/// Writable layers, by pod and container.
type Layers = BTreeMap<(String, String), Layer>;

/// What the check of disk limits uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub host: Arc<dyn PodHost>,
    pub ledger: LedgerHandle,
}

/// Runs until the process exits. Without `localStorageCapacityIsolation` there are no limits.
pub async fn run(parts: Arc<Parts>) {
    if !parts.config.ephemeral_storage {
        return std::future::pending().await;
    }
    let (epoch, mut schedule) = (Instant::now(), UsageSchedule::default());
    let mut walks: JoinSet<String> = JoinSet::new();
    loop {
        let round_ends = Instant::now() + PERIOD;
        let limited = limited(&parts).await;
        let layers = Arc::new(layers(&parts, &limited).await);
        loop {
            for uid in schedule.begin(limited.keys().map(String::as_str), epoch.elapsed()) {
                let (pod, limits) = limited[&uid].clone();
                let (parts, layers) = (Arc::clone(&parts), Arc::clone(&layers));
                walks.spawn(async move {
                    check(&parts, &pod, &limits, &layers).await;
                    uid
                });
            }
            tokio::select! {
                biased;
                Some(ended) = walks.join_next() => {
                    // A panic terminates the process.
                    if let Ok(uid) = ended {
                        schedule.record_end(&uid, epoch.elapsed());
                    }
                }
                () = tokio::time::sleep_until(round_ends) => break,
            }
        }
    }
}

/// The pods with limits, by uid. Critical pods are never evicted.
async fn limited(parts: &Parts) -> BTreeMap<String, (Arc<Pod>, Limits)> {
    let pods = parts.ledger.pods().await.into_iter();
    let pods = pods.filter(|pod| !priority::is_critical(pod));
    pods.map(|pod| {
        let limits = local_storage::limits(&pod);
        (pod::uid(&pod).to_owned(), (pod, limits))
    })
    .filter(|(_, (_, limits))| !limits.is_empty())
    .collect()
}

/// The writable layers of containers, if a limit includes them.
async fn layers(parts: &Parts, limited: &BTreeMap<String, (Arc<Pod>, Limits)>) -> Layers {
    let mut limits = limited.values().map(|(_, limits)| limits);
    if !limits.any(Limits::needs_container_usage) {
        return Layers::new();
    }
    let layers = parts.runtime.layers().await;
    layers.unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot read the containers' disk usage from the runtime");
        Layers::new()
    })
}

/// Measures a pod's usage, and evicts the pod if a limit is exceeded.
async fn check(parts: &Parts, pod: &Pod, limits: &Limits, layers: &Layers) {
    match usage(parts, pod, limits, layers).await {
        Ok(usage) => {
            if let Some((signal, message)) = limits.exceeded(&usage) {
                tracing::warn!(pod = %pod::full_name(pod), message, "evicting the pod");
                let eviction = Eviction::over_limit(pod::uid(pod), signal, message);
                parts.ledger.evict(eviction).await;
            }
        }
        Err(error) => {
            tracing::warn!(%error, pod = %pod::full_name(pod), "measuring the pod's disk usage failed")
        }
    }
}

/// Measures the pod's local ephemeral storage.
async fn usage(
    parts: &Parts,
    pod: &Pod,
    limits: &Limits,
    layers: &Layers,
) -> Result<Usage, HostError> {
    let mut usage = Usage::default();
    for volume in local_storage::volumes_on_disk(pod) {
        if limits.volumes.contains_key(&volume) || limits.pod.is_some() {
            let used = parts
                .host
                .volume_usage(pod, &volume, limits.measure_limit(&volume))
                .await?;
            usage.volumes.insert(volume, used.bytes);
        }
    }
    if limits.needs_container_usage() {
        for (_, container) in pod::containers(pod) {
            let layer = layers
                .get(&(pod::uid(pod).to_owned(), container.name.clone()))
                .map_or(0, |layer| layer.bytes);
            let logs = parts.host.log_usage(pod, &container.name).await?;
            usage
                .containers
                .insert(container.name.clone(), layer + logs);
        }
    }
    Ok(usage)
}
