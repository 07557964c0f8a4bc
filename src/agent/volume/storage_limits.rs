//! Pods that use more of the node's disk than they may are ended (kubelet spec, 12.7). Only pods with limits are
//! looked at; what they use is counted in the background, one pod after the other, and never for longer than a
//! small share of the time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use crate::agent::Context;
use crate::core::node::ledger::Eviction;
use crate::core::volume::local_storage::{self, Limits, Usage};
use crate::core::{node::preempt, pod};
use crate::cri::Layer;

/// How often it is looked, so that a pod over its limit is evicted within five seconds. What containers have written is as
/// new as the runtime's own count (containerd: every 10 s, `stats_collect_period`).
const PERIOD: Duration = Duration::from_secs(4);
/// Counting takes at most this share of the time: one part in so many.
const SHARE: u32 = 20;

/// Runs until the process ends. Without `localStorageCapacityIsolation` there are no such limits.
pub async fn run(context: Arc<Context>) {
    if !context.config.ephemeral_storage {
        return std::future::pending().await;
    }
    loop {
        let begun = Instant::now();
        pass(&context).await;
        tokio::time::sleep(PERIOD.max(begun.elapsed() * SHARE)).await;
    }
}

async fn pass(context: &Context) {
    // Critical pods are never evicted.
    let pods = context
        .ledger
        .pods()
        .await
        .into_iter()
        .filter(|pod| !preempt::is_critical(pod));
    let limited: Vec<(Arc<Pod>, Limits)> = pods
        .map(|pod| (Arc::clone(&pod), local_storage::limits(&pod)))
        .filter(|(_, limits)| !limits.is_empty())
        .collect();
    if limited.is_empty() {
        return;
    }
    let layers = if limited.iter().any(|(_, limits)| limits.counts_containers()) {
        match context.runtime.layers().await {
            Ok(layers) => layers,
            Err(error) => {
                tracing::debug!(%error, "the runtime does not say what containers have written");
                BTreeMap::new()
            }
        }
    } else {
        BTreeMap::new()
    };
    for (pod, limits) in limited {
        match usage(context, &pod, &limits, &layers).await {
            Ok(usage) => {
                if let Some((signal, message)) = limits.exceeded(&usage) {
                    tracing::warn!(pod = %pod::full_name(&pod), message, "the pod is evicted");
                    let eviction = Eviction::over_limit(pod::uid(&pod), signal, message);
                    context.ledger.evict(eviction).await;
                }
            }
            Err(error) => {
                tracing::warn!(error, pod = %pod::full_name(&pod), "what the pod uses of the disk cannot be counted")
            }
        }
    }
}

/// What a pod uses. `layers` has the writable layers, by pod and container.
async fn usage(
    context: &Context,
    pod: &Pod,
    limits: &Limits,
    layers: &BTreeMap<(String, String), Layer>,
) -> Result<Usage, String> {
    let mut usage = Usage::default();
    for volume in local_storage::counted(pod) {
        if limits.volumes.contains_key(&volume) || limits.pod.is_some() {
            let used = context
                .host
                .volume_usage(pod, &volume, limits.enough(&volume))
                .await?;
            usage.volumes.insert(volume, used.bytes);
        }
    }
    if limits.counts_containers() {
        for (_, container) in pod::containers(pod) {
            let layer = layers
                .get(&(pod::uid(pod).to_owned(), container.name.clone()))
                .map_or(0, |layer| layer.bytes);
            let logs = context.host.log_usage(pod, &container.name).await?;
            usage
                .containers
                .insert(container.name.clone(), layer + logs);
        }
    }
    Ok(usage)
}
