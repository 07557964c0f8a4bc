//! The pods that can be evicted, and the resources that each of them uses.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::Parts;
use super::measure::Part;
use crate::pod::table::Known;
use holdfast_core::node::eviction::{Candidate, ContainerFigures, PodFigures, Resource};
use holdfast_core::pod;
use holdfast_core::pod::priority::is_critical;
use holdfast_core::serving::cgroup_stats::{Depth, Usage};
use holdfast_core::volume::local_storage;
use holdfast_cri::Layer;
use holdfast_host::blocking;
use holdfast_sys::meter;

/// Timeout for measuring the disk usage of pods. Usage that cannot be measured in this time counts as zero.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit for parallel measurements of disk usage: each walks through directories in its own thread.
const MAX_PARALLEL_WALKS: usize = 8;
/// How long a walk occupies its slot: a filesystem that hangs must not block the measurement of other pods.
const WALK_SLOT_TIME: Duration = Duration::from_secs(5);

/// The pods that can be evicted, each with its object from the API. Includes terminating pods: their remaining grace
/// period may be longer than the node can wait.
async fn pods(parts: &Parts) -> Vec<(Arc<Pod>, Option<Known>)> {
    let known: HashMap<String, Known> = parts
        .table
        .borrow()
        .iter()
        .map(|k| (pod::uid(&k.pod).to_owned(), k.clone()))
        .collect();
    let all = parts.ledger.pods().await.into_iter();
    all.filter(|pod| !is_critical(pod))
        .map(|pod| {
            let known = known.get(pod::uid(&pod)).cloned();
            (pod, known)
        })
        .collect()
}

/// The names and ids of a pod's containers.
fn containers(known: &Known) -> Vec<(String, String)> {
    let Some(status) = &known.status_object().status else {
        return vec![];
    };
    let regular = status.container_statuses.iter().flatten();
    let init = status.init_container_statuses.iter().flatten();
    let id = |id: &String| id.rsplit_once('/').map(|(_, id)| id.to_owned());
    regular
        .chain(init)
        .filter_map(|c| Some((c.name.clone(), id(c.container_id.as_ref()?)?)))
        .collect()
}

/// Returns the pods that can be evicted, with their usage of the resource. For
/// disks, only the usage of one filesystem counts.
pub(super) async fn find(parts: &Parts, resource: Resource, part: Part) -> Vec<Candidate> {
    let pods = pods(parts).await;
    match resource {
        Resource::Memory | Resource::Pids => in_cgroups(parts, pods).await,
        Resource::EphemeralStorage | Resource::Inodes => on_disk(parts, pods, part).await,
    }
}

/// A pod, its cgroup if pods have one, and the names and cgroups of its containers.
type PodCgroups = (Arc<Pod>, Option<String>, Vec<(String, String)>);

/// Reads the pods' usage of memory and process ids. A pod whose cgroup does not exist uses nothing. If pods have no
/// cgroups, the usage is the sum of the pod's containers.
async fn in_cgroups(parts: &Parts, pods: Vec<(Arc<Pod>, Option<Known>)>) -> Vec<Candidate> {
    let place = |(pod, known): (Arc<Pod>, Option<Known>)| {
        let of = |id: Option<&str>| parts.host.cgroup_path(&pod, id);
        let containers = known.as_ref().map(containers).unwrap_or_default();
        let containers = containers
            .into_iter()
            .filter_map(|(name, id)| Some((name, of(Some(&id))?)));
        let (containers, whole) = (containers.collect(), of(None));
        (pod, whole, containers)
    };
    let places: Vec<PodCgroups> = pods.into_iter().map(place).collect();
    let read = |(pod, cgroup, containers): PodCgroups| {
        let usage = match &cgroup {
            Some(cgroup) => meter::cgroup(cgroup, Depth::Summary)?,
            None => {
                let cgroups = containers.iter();
                let cgroups = cgroups.filter_map(|(_, c)| meter::cgroup(c, Depth::Summary));
                Usage::total(&cgroups.collect::<Vec<_>>())
            }
        };
        let containers = containers.into_iter().filter_map(|(name, cgroup)| {
            Some(ContainerFigures {
                name,
                memory: meter::cgroup(&cgroup, Depth::Memory)?.working_set,
                disk: 0,
            })
        });
        let figures = PodFigures {
            memory: usage.working_set,
            processes: usage.threads,
            containers: containers.collect(),
            ..PodFigures::default()
        };
        Some(Candidate { pod, figures })
    };
    blocking(move || Ok(places.into_iter().filter_map(read).collect()))
        .await
        .unwrap_or_default()
}

/// Writable layers, by pod and container.
type Layers = BTreeMap<(String, String), Layer>;

/// Runs `work` as soon as a slot is free. Releases the slot after [`WALK_SLOT_TIME`], even if `work` is still running.
async fn with_slot<T>(slots: &Semaphore, work: impl Future<Output = T>) -> T {
    // The semaphore is never closed.
    let slot = slots.acquire().await;
    let mut work = pin!(work);
    match tokio::time::timeout(WALK_SLOT_TIME, &mut work).await {
        Ok(done) => done,
        Err(_) => {
            drop(slot);
            work.await
        }
    }
}

/// Measures the pods' usage of a filesystem, [`MAX_PARALLEL_WALKS`] pods in parallel.
async fn on_disk(
    parts: &Parts,
    pods: Vec<(Arc<Pod>, Option<Known>)>,
    part: Part,
) -> Vec<Candidate> {
    let layers = match part {
        Part::Files => Layers::new(),
        Part::Whole | Part::Layers => parts.runtime.layers().await.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the containers' disk usage from the runtime");
            Layers::new()
        }),
    };
    let (slots, until) = (
        Semaphore::new(MAX_PARALLEL_WALKS),
        Instant::now() + MEASURE_TIMEOUT,
    );
    let counts = pods.into_iter().map(|(pod, _)| async {
        let counting = with_slot(&slots, measure_pod(parts, &pod, part, &layers));
        let figures = match tokio::time::timeout_at(until, counting).await {
            Ok(figures) => figures,
            Err(_) => {
                tracing::warn!(pod = pod::full_name(&pod), waited = ?MEASURE_TIMEOUT, "measuring the pod's disk usage timed out");
                PodFigures::default()
            }
        };
        Candidate { pod, figures }
    });
    join_all(counts).await
}

async fn measure_pod(parts: &Parts, pod: &Pod, part: Part, layers: &Layers) -> PodFigures {
    let mut figures = PodFigures::default();
    if part != Part::Layers {
        for volume in local_storage::volumes_on_disk(pod) {
            match parts.host.volume_usage(pod, &volume, u64::MAX).await {
                Ok(used) => {
                    figures.disk += used.bytes;
                    figures.inodes += used.inodes;
                }
                Err(error) => tracing::debug!(%error, volume, "measuring a volume failed"),
            }
        }
    }
    for (_, container) in pod::containers(pod) {
        let key = (pod::uid(pod).to_owned(), container.name.clone());
        let layer = layers.get(&key).cloned().unwrap_or_default();
        let logs = match part {
            Part::Layers => 0,
            _ => {
                let logs = parts.host.log_usage(pod, &container.name).await;
                logs.unwrap_or(0)
            }
        };
        figures.disk += layer.bytes + logs;
        figures.inodes += layer.inodes;
        figures.containers.push(ContainerFigures {
            name: container.name.clone(),
            memory: 0,
            disk: layer.bytes + logs,
        });
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// 100 pods, of which ten have a filesystem that hangs.
    #[tokio::test(start_paused = true)]
    async fn few_pods_are_measured_at_a_time_and_hanging_ones_do_not_block_the_others() {
        let (slots, now, most) = (
            Semaphore::new(MAX_PARALLEL_WALKS),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        let counts = (0..100).map(|pod| {
            let (now, most) = (&now, &most);
            let walk = async move {
                most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                let took = if pod < 10 {
                    Duration::MAX
                } else {
                    Duration::from_millis(50)
                };
                tokio::time::sleep(took).await;
                now.fetch_sub(1, Ordering::Relaxed);
            };
            tokio::time::timeout(MEASURE_TIMEOUT, with_slot(&slots, walk))
        });
        let counted = join_all(counts).await;
        let failed = counted.iter().filter(|count| count.is_err()).count();
        assert_eq!(failed, 10);
        // The pods that hang have released their slots.
        assert!(most.into_inner() <= MAX_PARALLEL_WALKS + 10);
    }
}
