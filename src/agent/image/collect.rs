//! Image garbage collection: removes unused images when the disk is full or the images are too old
//! (`pkg/kubelet/images/image_gc_manager.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::{Ages, Images};
use crate::events::{Events, Kind};
use crate::metrics::Metrics;
use crate::node::ledger::LedgerHandle;
use crate::pod::dead_containers;
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::image::canonical_name;
use holdfast_core::image::gc::{Filesystem, ImageOnNode, PlannedImage};
use holdfast_core::node::collection::{Decision, Failures, ImageDecision, RemovalReason, Report};
use holdfast_core::pod;
use holdfast_cri::{ImageInventory, Runtime, RuntimeError};
use holdfast_host::{HostError, PodHost};
use holdfast_sys::clock::Clock;

/// Why images could not be removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectError {
    /// Images cannot be listed.
    #[error("cannot list images: {0}")]
    Unlisted(RuntimeError),
    /// The filesystem of images cannot be measured.
    #[error("{0}")]
    Unmeasured(HostError),
    /// The filesystem reports a capacity of zero.
    #[error("invalid capacity 0 on image filesystem")]
    NoCapacity,
    /// Too little space could be freed.
    #[error("Insufficient free disk space on the node's image filesystem ({percent}% of {capacity} bytes used). Failed to free sufficient space by deleting unused images (freed {freed} bytes{}). Remove other data from the disk, or enlarge it.", Self::and(.failed.as_deref()))]
    TooLittle {
        /// The used part of the filesystem.
        percent: u64,
        /// The size of the filesystem in bytes.
        capacity: u64,
        /// The total size of the removed images in bytes.
        freed: u64,
        /// The last failed removal.
        failed: Option<Box<CollectError>>,
    },
    /// An image cannot be removed.
    #[error("image {id} cannot be removed: {why}")]
    Unremoved {
        /// The image's id.
        id: String,
        /// The runtime's error.
        why: RuntimeError,
    },
    /// Dead containers cannot be listed.
    #[error("{0}")]
    Containers(String),
}

impl CollectError {
    fn and(failed: Option<&CollectError>) -> String {
        failed.map(|e| format!("; {e}")).unwrap_or_default()
    }

    /// The reason of the event that reports every occurrence of this error.
    /// Other errors are reported only when they repeat.
    fn reason(&self) -> Option<&'static str> {
        match self {
            CollectError::NoCapacity => Some("InvalidDiskCapacity"),
            CollectError::TooLittle { .. } => Some("FreeDiskSpaceFailed"),
            CollectError::Unlisted(_)
            | CollectError::Unmeasured(_)
            | CollectError::Unremoved { .. }
            | CollectError::Containers(_) => None,
        }
    }
}

/// Interval between collections; it grows while no image can be removed.
const COLLECTION_INTERVAL: Doubling =
    Doubling::new(Duration::from_secs(300), Duration::from_secs(1200));

/// What the removal of images uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub host: Arc<dyn PodHost>,
    pub clock: Clock,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub ledger: LedgerHandle,
    pub images: Arc<Images>,
    /// The start time of this agent.
    pub started: Timestamp,
    pub dead_containers: Arc<dead_containers::Parts>,
}

/// Runs until the process exits.
pub async fn run(parts: Arc<Parts>) {
    let rules = &parts.config.image_rules;
    let (mut failures, mut pauses) = (0_u32, COLLECTION_INTERVAL);
    loop {
        if rules.enabled() {
            match pass(&parts).await {
                Ok(()) => {
                    failures = 0;
                    pauses.reset();
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(%error, failures, "removing some unused images failed");
                    // A single failure emits no event: the runtime may have just restarted.
                    let repeated = (failures > 1).then_some("ImageGCFailed");
                    for reason in error.reason().into_iter().chain(repeated) {
                        let (node, message) = (&parts.config.node_name, error.to_string());
                        let events = &parts.events;
                        events.node(node, Kind::Warning, reason, message);
                    }
                }
            }
        }
        let pause = match failures {
            0 => COLLECTION_INTERVAL.after(1),
            _ => pauses.pause(),
        };
        tokio::time::sleep(pause).await;
    }
}

/// The images of a pod, including those of image volumes. They count as used even between two instances of a container.
fn images_of(pod: &Pod) -> impl Iterator<Item = String> {
    let containers = pod::containers(pod)
        .into_iter()
        .filter_map(|(_, c)| c.image.clone());
    let volumes = pod::spec(pod)
        .volumes
        .iter()
        .flatten()
        .filter_map(|v| v.image.as_ref()?.reference.clone());
    let names: Vec<String> = containers.chain(volumes).collect();
    names.into_iter().filter_map(|name| canonical_name(&name))
}

async fn wanted_by_pods(parts: &Parts) -> BTreeSet<String> {
    let pods = parts.ledger.pods().await;
    pods.iter().flat_map(|pod| images_of(pod)).collect()
}

fn present(stock: &ImageInventory, wanted: &BTreeSet<String>) -> Vec<ImageOnNode> {
    let used = |image: &holdfast_cri::Image| {
        let names = || image.names.iter().chain(std::iter::once(&image.id));
        names().any(|name| stock.in_use.contains(name) || wanted.contains(name))
    };
    let of = |image: &holdfast_cri::Image| ImageOnNode {
        id: image.id.clone(),
        size: image.size,
        pinned: image.pinned,
        used: used(image),
    };
    stock.images.iter().map(of).collect()
}

/// The observed images.
struct ObservedImages {
    images: Vec<ImageOnNode>,
    /// The runtime's answer.
    stock: ImageInventory,
    /// The time of the observation.
    at: Timestamp,
}

/// Lists the images, and records which are in use.
async fn observe_images(parts: &Parts, ages: &mut Ages) -> Result<ObservedImages, CollectError> {
    let stock = parts.runtime.image_inventory().await;
    let stock = stock.map_err(CollectError::Unlisted)?;
    let images = present(&stock, &wanted_by_pods(parts).await);
    let at = parts.clock.now();
    ages.record(&images, at);
    Ok(ObservedImages { images, stock, at })
}

/// Removes unused images until at least `wanted` bytes are freed, the least recently used first. Removes all of them if
/// this is not enough. Returns the freed bytes.
pub async fn make_room(parts: &Parts, wanted: u64) -> Result<u64, CollectError> {
    let mut ages = parts.images.ages.lock().await;
    let ObservedImages { images, at, .. } = observe_images(parts, &mut ages).await?;
    let unused = ages.unused(&images, parts.config.image_rules.minimum_age, at);
    let (freed, failed) =
        remove_until_freed(parts, &unused, wanted, "the node is short of disk space").await;
    match failed {
        Some(error) if freed == 0 => Err(error),
        _ => Ok(freed),
    }
}

/// The pods that use each image, by image name.
async fn pods_by_image(parts: &Parts) -> BTreeMap<String, Vec<String>> {
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pod in parts.ledger.pods().await {
        let (namespace, name) = (
            pod.metadata.namespace.clone().unwrap_or_default(),
            pod.metadata.name.clone().unwrap_or_default(),
        );
        for image in images_of(&pod) {
            let pods = users.entry(image).or_default();
            let pod = format!("pod {namespace}/{name}");
            if !pods.contains(&pod) {
                pods.push(pod);
            }
        }
    }
    users
}

/// Reports which images the rules would remove now, and why others stay.
pub async fn report(parts: &Parts) -> Result<Report, CollectError> {
    let mut ages = parts.images.ages.lock().await;
    plan_report(parts, &mut ages).await
}

/// Removes the images and containers of [`report`]. Returns the same report with the failures.
pub async fn collect(parts: &Parts) -> Result<Report, CollectError> {
    let mut ages = parts.images.ages.lock().await;
    let mut report = plan_report(parts, &mut ages).await?;
    for image in &report.images {
        let reason = match image.decision {
            Decision::Remove(RemovalReason::Age) => "age",
            Decision::Remove(_) => "space",
            Decision::Keep(_) => continue,
        };
        let why = image.decision.to_string();
        if let Err(error) = remove(parts, &image.id, image.bytes, (reason, &why)).await {
            tracing::warn!(%error, "removing an image failed");
            report.failures.insert(image.id.clone(), error.to_string());
        }
    }
    let (_, failures) = dead_containers::remove(&parts.dead_containers, &report.containers).await;
    report.failures.extend(failures);
    Ok(report)
}

async fn disk(parts: &Parts, stock: &ImageInventory) -> Result<Filesystem, CollectError> {
    let disk = parts.host.filesystem(&stock.mountpoint).await;
    disk.map_err(CollectError::Unmeasured)
}

async fn plan_report(parts: &Parts, ages: &mut Ages) -> Result<Report, CollectError> {
    let ObservedImages { images, stock, at } = observe_images(parts, ages).await?;
    let disk = disk(parts, &stock).await?;
    let rules = &parts.config.image_rules;
    let plan = ages.plan(&images, rules, disk, parts.started, at);
    let users = pods_by_image(parts).await;
    let names = |id: &str| {
        let image = stock.images.iter().find(|i| i.id == *id);
        image.map(|i| i.names.clone()).unwrap_or_default()
    };
    let by = |image: &ImageOnNode| {
        let pods = names(&image.id).into_iter();
        let pods = pods.filter_map(|name| users.get(&name)).flatten().cloned();
        match pods.collect::<BTreeSet<String>>() {
            none if none.is_empty() => {
                vec!["an exited container, or one that this agent does not manage".to_owned()]
            }
            pods => pods.into_iter().collect(),
        }
    };
    let judged = ages.decisions(&images, &plan, rules.minimum_age, at, by);
    let containers = dead_containers::find(&parts.dead_containers, false).await;
    let going = |judged: &&PlannedImage| matches!(judged.decision, Decision::Remove(_));
    Ok(Report {
        node: parts.config.node_name.clone(),
        at,
        filesystem: stock.mountpoint.display().to_string(),
        capacity_bytes: disk.capacity,
        available_bytes: disk.available,
        high_percent: rules.high,
        low_percent: rules.low,
        wanted_bytes: plan.wanted,
        frees_bytes: judged.iter().filter(going).map(|j| j.image.size).sum(),
        images: judged
            .into_iter()
            .map(|judged| ImageDecision {
                names: names(&judged.image.id),
                id: judged.image.id,
                bytes: judged.image.size,
                last_used: judged.last_used,
                decision: judged.decision,
            })
            .collect(),
        containers: containers.map_err(CollectError::Containers)?,
        failures: Failures::new(),
    })
}

async fn pass(parts: &Parts) -> Result<(), CollectError> {
    let mut ages = parts.images.ages.lock().await;
    let ObservedImages { images, stock, at } = observe_images(parts, &mut ages).await?;
    let disk = disk(parts, &stock).await?;
    if disk.capacity == 0 {
        return Err(CollectError::NoCapacity);
    }
    let plan = ages.plan(&images, &parts.config.image_rules, disk, parts.started, at);
    let mut failed = None;
    for image in &plan.aged {
        if let Err(error) = remove(
            parts,
            &image.id,
            image.size,
            ("age", "unused for longer than imageMaximumGCAge"),
        )
        .await
        {
            failed = Some(error);
        }
    }
    let why = "disk usage is above imageGCHighThresholdPercent";
    let (freed, unfreed) = remove_until_freed(parts, &plan.candidates, plan.wanted, why).await;
    if freed < plan.wanted {
        return Err(CollectError::TooLittle {
            percent: disk.percent(),
            capacity: disk.capacity,
            freed,
            failed: unfreed.map(Box::new),
        });
    }
    unfreed.or(failed).map_or(Ok(()), Err)
}

/// Removes images in order, until at least `wanted` bytes are freed. Returns the freed bytes and the last failure.
async fn remove_until_freed(
    parts: &Parts,
    images: &[ImageOnNode],
    wanted: u64,
    why: &str,
) -> (u64, Option<CollectError>) {
    let (mut freed, mut failed) = (0, None);
    for image in images {
        if freed >= wanted {
            break;
        }
        match remove(parts, &image.id, image.size, ("space", why)).await {
            Ok(()) => freed += image.size,
            Err(error) => failed = Some(error),
        }
    }
    (freed, failed)
}

async fn remove(
    parts: &Parts,
    id: &str,
    bytes: u64,
    (reason, why): (&str, &str),
) -> Result<(), CollectError> {
    let removed = parts.runtime.remove_image(id).await;
    removed.map_err(|why| CollectError::Unremoved {
        id: id.to_owned(),
        why,
    })?;
    parts.metrics.collected(reason);
    tracing::info!(image = id, bytes, "removed an image: {why}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_freed_space_names_the_failed_removal_and_has_its_own_reason() {
        let unremoved = CollectError::Unremoved {
            id: "sha256:1".into(),
            why: RuntimeError {
                kind: holdfast_cri::RuntimeErrorKind::Failed,
                code: None,
                message: "read-only file system".into(),
            },
        };
        assert_eq!(unremoved.reason(), None);
        let failed = unremoved.to_string();
        let error = |failed| CollectError::TooLittle {
            percent: 91,
            capacity: 1000,
            freed: 10,
            failed,
        };
        let error_with_cause = error(Some(Box::new(unremoved)));
        assert!(
            error_with_cause.to_string().contains(&failed),
            "{error_with_cause}"
        );
        assert_eq!(error_with_cause.reason(), Some("FreeDiskSpaceFailed"));
        assert!(error(None).to_string().contains("(freed 10 bytes)."));
        assert_eq!(
            CollectError::NoCapacity.reason(),
            Some("InvalidDiskCapacity")
        );
    }
}
