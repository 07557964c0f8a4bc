//! Polls the container runtime for its status and images, and sets the runtime's pod CIDR.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerImage, Node};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Network, OwnNode};
use crate::pod::heartbeats::Heartbeats;
use holdfast_config::Config;
use holdfast_core::node::conditions::joined;
use holdfast_core::node::runtime_health::{RuntimeConditions, RuntimeHealth};
use holdfast_cri::{Features, Image, Runtime, RuntimeErrorKind};

/// Interval between status requests while the runtime is not ready, and while it is.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Timeout of a status request.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for listing all images.
const IMAGE_LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit for names of one image in the Node's status.
const MAX_IMAGE_NAMES: usize = 5;

/// The last known state of the runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RuntimeView {
    /// Whether a first status request has completed, successfully or not.
    pub polled: bool,
    /// For example `containerd://1.7.2`.
    pub version: String,
    /// Why the runtime keeps the node from being ready.
    pub problems: Vec<String>,
    /// The features that the runtime reports.
    pub features: Features,
}

fn publish<T: PartialEq>(channel: &watch::Sender<T>, value: T) {
    channel.send_if_modified(|known| {
        let changed = *known != value;
        *known = value;
        changed
    });
}

/// What the loops about the runtime use.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    /// The features that the runtime last reported.
    pub features: watch::Sender<Features>,
    pub heartbeats: Arc<Heartbeats>,
    pub node: Arc<OwnNode>,
}

/// Polls the runtime's status: every five seconds, or five times per second while the runtime is not ready.
pub(super) async fn poll(
    parts: &Parts,
    views: &watch::Sender<RuntimeView>,
    network: &watch::Sender<Network>,
) {
    let began = Instant::now();
    let mut health = RuntimeHealth::default();
    let mut view = RuntimeView::default();
    loop {
        match tokio::time::timeout(STATUS_TIMEOUT, parts.runtime.status()).await {
            Ok(Ok(status)) => {
                let not_ready = status.network_not_ready.as_ref();
                let reason = |why: &String| format!("container runtime network not ready: {why}");
                let state = not_ready.map_or(Network::Ready, |why| Network::NotReady(reason(why)));
                // Published first: pods that wait for the network need the features.
                publish(&parts.features, status.features.clone());
                publish(network, state);
                (view.version, view.features) = (status.version, status.features);
                let answer = RuntimeConditions {
                    runtime: status.not_ready,
                    network: status.network_not_ready,
                };
                health.record_status(began.elapsed(), answer);
            }
            Ok(Err(error)) => health.record_failure(error.to_string()),
            Err(_) => {
                health.record_failure(format!("no answer within {}s", STATUS_TIMEOUT.as_secs()))
            }
        }
        health.record_list(parts.heartbeats.since_listing());
        view.polled = true;
        view.problems = health.problems(began.elapsed());
        let unasked = *network.borrow() == Network::Unknown;
        if let Some(why) = health
            .down(began.elapsed())
            .or(joined(&view.problems).filter(|_| unasked))
        {
            publish(network, Network::NotReady(why));
        }
        publish(views, view.clone());
        let pause = if health.is_healthy() {
            POLL_INTERVALS.1
        } else {
            POLL_INTERVALS.0
        };
        tokio::time::sleep(pause).await;
    }
}

/// Lists images as often as the node's status is computed. After a failure, the last list stays valid.
pub(super) async fn images(parts: &Parts, images: &watch::Sender<Option<Vec<ContainerImage>>>) {
    let most = usize::try_from(parts.config.max_images).unwrap_or(usize::MAX);
    loop {
        match tokio::time::timeout(IMAGE_LIST_TIMEOUT, parts.runtime.images()).await {
            Ok(Ok(found)) => publish(images, Some(largest(found, most))),
            Ok(Err(error)) => tracing::debug!(%error, "cannot list the images"),
            Err(_) => tracing::debug!("listing the images timed out"),
        }
        tokio::time::sleep(parts.config.node_status_update).await;
    }
}

/// The largest images in the format of the Node's status: digests before tags, and at most [`MAX_IMAGE_NAMES`] names
/// each.
fn largest(mut images: Vec<Image>, most: usize) -> Vec<ContainerImage> {
    images.sort_by(|a, b| b.size.cmp(&a.size).then_with(|| a.id.cmp(&b.id)));
    let reported = |mut image: Image| {
        image.names.sort_by_key(|name| !name.contains('@'));
        image.names.truncate(MAX_IMAGE_NAMES);
        ContainerImage {
            // The API drops an empty list, so an empty list would differ from the stored status in every round.
            names: (!image.names.is_empty()).then_some(image.names),
            size_bytes: i64::try_from(image.size).ok(),
        }
    };
    images.into_iter().take(most).map(reported).collect()
}

fn pod_cidrs(node: &Node) -> Option<String> {
    let spec = node.spec.as_ref()?;
    let several = spec.pod_cidrs.as_ref().map(|all| all.join(","));
    several
        .filter(|all| !all.is_empty())
        .or_else(|| spec.pod_cidr.clone())
        .filter(|one| !one.is_empty())
}

/// Sets the runtime's pod CIDR when it changes: some runtimes generate their CNI configuration from it.
pub(super) async fn pod_addresses(parts: &Parts) {
    let mut node = parts.node.subscribe();
    let mut reported: Option<String> = None;
    loop {
        let wanted = match &parts.node.api() {
            Some(_) => node.borrow_and_update().as_deref().and_then(pod_cidrs),
            None => parts.config.pod_cidr.clone(),
        };
        let mut again = None;
        if let Some(cidrs) = wanted.filter(|w| reported.as_ref() != Some(w)) {
            match parts.runtime.set_pod_cidrs(&cidrs).await {
                Err(error) if error.kind != RuntimeErrorKind::Unimplemented => {
                    tracing::warn!(%error, cidrs, "setting the runtime's pod CIDR failed; retrying");
                    again = Some(POLL_INTERVALS.1);
                }
                _ => {
                    tracing::info!(cidrs, "set the runtime's pod CIDR");
                    reported = Some(cidrs);
                }
            }
        }
        tokio::select! {
            biased;
            Ok(()) = node.changed() => {}
            () = tokio::time::sleep(again.unwrap_or(Duration::MAX)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_images_are_reported_with_digests_first() {
        let image = |id: &str, size: u64, names: &[&str]| Image {
            id: id.into(),
            names: names.iter().map(|n| (*n).into()).collect(),
            size,
            ..Image::default()
        };
        let all = vec![
            image("a", 1, &["a:1"]),
            image("b", 3, &["b:1", "b:2", "b:3", "b:4", "b:5", "b@sha256:0"]),
            image("c", 2, &["c:1"]),
        ];
        let reported = largest(all, 2);
        let names: Vec<Vec<String>> = reported.into_iter().filter_map(|i| i.names).collect();
        assert_eq!(names[0], ["b@sha256:0", "b:1", "b:2", "b:3", "b:4"]);
        assert_eq!(
            (names.len(), names[1].as_slice()),
            (2, &["c:1".to_owned()][..])
        );
    }

    #[test]
    fn pod_cidrs_are_joined_by_commas() {
        let node = |spec: serde_json::Value| -> Node {
            serde_json::from_value(serde_json::json!({"metadata": {}, "spec": spec}))
                .expect("a node")
        };
        for (spec, expected) in [
            (serde_json::json!({}), None),
            (
                serde_json::json!({"podCIDR": "10.0.0.0/24"}),
                Some("10.0.0.0/24"),
            ),
            (
                serde_json::json!({"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24", "fd00::/64"]}),
                Some("10.0.0.0/24,fd00::/64"),
            ),
        ] {
            assert_eq!(pod_cidrs(&node(spec)).as_deref(), expected);
        }
    }
}
