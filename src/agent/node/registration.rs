//! Registers the Node object: its labels, annotations and taints (`pkg/kubelet/kubelet_node_status.go`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeStatus, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use serde_json::{Map, Value, json};

use super::api::{NodeApi, within};
use super::deadline;
use crate::metrics::Metrics;
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::node::addresses::PROVIDED;
use holdfast_core::version::arch;
use holdfast_kubeapi::pods::ApiFailure;
use holdfast_sys::clock::Clock;
use holdfast_sys::machine::Machine;

/// Back-off between attempts to register.
const REGISTRATION_BACKOFF: Doubling =
    Doubling::new(Duration::from_millis(100), Duration::from_secs(7));
/// Annotation for the attach/detach controller: it attaches the node's volumes.
const CONTROLLER_ATTACH_ANNOTATION: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// Labels that describe the platform. The agent restores them whenever they are changed.
fn platform_labels() -> [(&'static str, &'static str); 4] {
    [
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch(std::env::consts::ARCH)),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", arch(std::env::consts::ARCH)),
    ]
}

fn labels(config: &Config) -> BTreeMap<String, String> {
    let mut labels = config.node_labels.clone();
    labels.insert("kubernetes.io/hostname".into(), config.node_name.clone());
    let platform = platform_labels();
    labels.extend(platform.map(|(key, value)| (key.to_owned(), value.to_owned())));
    labels
}

/// Labels of the machine, which are also set on an existing Node. Other labels
/// belong to the administrator once the Node exists.
const RECONCILED: [&str; 11] = [
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
];

/// The addresses of `--node-ip`, as an annotation for the cloud controller.
fn provided_ips(config: &Config) -> Option<String> {
    let ips: Vec<String> = config.node_ips.iter().map(ToString::to_string).collect();
    (config.external_cloud && !ips.is_empty()).then(|| ips.join(","))
}

fn taints(config: &Config) -> Vec<Taint> {
    let mut taints = config.register_with_taints.clone();
    if config.external_cloud {
        taints.push(Taint {
            key: "node.cloudprovider.kubernetes.io/uninitialized".into(),
            value: Some("true".into()),
            effect: "NoSchedule".into(),
            time_added: None,
        });
    }
    taints
}

/// The Node object as this agent creates it.
pub(super) fn new_node(config: &Config, status: NodeStatus) -> Node {
    let attach = [(CONTROLLER_ATTACH_ANNOTATION, "true".to_owned())];
    let annotations = attach
        .into_iter()
        .chain(provided_ips(config).map(|ips| (PROVIDED, ips)));
    let annotations = annotations.map(|(key, value)| (key.to_owned(), value));
    let taints = taints(config);
    Node {
        metadata: ObjectMeta {
            name: Some(config.node_name.clone()),
            labels: Some(labels(config)),
            annotations: Some(annotations.collect()),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: config.provider_id.clone(),
            taints: (!taints.is_empty()).then_some(taints),
            ..NodeSpec::default()
        }),
        status: Some(status),
    }
}

/// The merge patch that restores a Node's own labels and annotations; `None` if they are correct.
fn metadata_patch(config: &Config, found: &Node) -> Option<Value> {
    let labels: BTreeMap<String, Option<String>> = labels(config)
        .into_iter()
        .filter(|(key, _)| RECONCILED.contains(&key.as_str()))
        .map(|(key, value)| (key, Some(value).filter(|value| !value.is_empty())))
        .filter(|(key, value)| found.labels().get(key) != value.as_ref())
        .collect();
    let mut annotations = Map::new();
    let attach = Some("true".to_owned());
    for (key, wanted) in [
        (CONTROLLER_ATTACH_ANNOTATION, attach),
        (PROVIDED, provided_ips(config)),
    ] {
        if found.annotations().get(key) != wanted.as_ref() {
            annotations.insert(key.to_owned(), wanted.into());
        }
    }
    let mut metadata = Map::new();
    if !labels.is_empty() {
        metadata.insert("labels".into(), json!(labels));
    }
    if !annotations.is_empty() {
        metadata.insert("annotations".into(), annotations.into());
    }
    (!metadata.is_empty()).then(|| json!({"metadata": metadata}))
}

/// The merge patch that restores changed platform labels; `None` if they are correct.
pub(super) fn platform_patch(node: &Node) -> Option<Value> {
    let wrong: BTreeMap<&str, &str> = platform_labels()
        .into_iter()
        .filter(|(key, value)| node.labels().get(*key).map(String::as_str) != Some(value))
        .collect();
    (!wrong.is_empty()).then(|| json!({"metadata": {"labels": wrong}}))
}

/// What the registration uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub clock: Clock,
    pub machine: Arc<Machine>,
    pub metrics: Arc<Metrics>,
    /// The start time of this agent.
    pub started: Timestamp,
}

/// Creates the Node object.
async fn create(parts: &Parts, api: &dyn NodeApi, status: NodeStatus) -> Result<Node, ApiFailure> {
    let node = new_node(&parts.config, status);
    parts.metrics.node_registering(parts.clock.now());
    let made = within(deadline(&parts.config), api.create(&node)).await?;
    let (now, booted) = (parts.clock.now(), parts.machine.booted);
    parts.metrics.node_registered(now, booted, parts.started);
    Ok(made)
}

/// Returns the Node object, and creates it if it does not exist. Taints are set at creation only.
async fn try_register(
    parts: &Parts,
    api: &dyn NodeApi,
    status: NodeStatus,
) -> Result<Node, ApiFailure> {
    let (config, limit) = (&parts.config, deadline(&parts.config));
    let name = &config.node_name;
    let found = match within(limit, api.get(name)).await? {
        Some(found) => found,
        None if !config.register_node => {
            return Err(ApiFailure::NotFound(format!(
                "the node {name:?} does not exist and --register-node is false"
            )));
        }
        None => match create(parts, api, status).await {
            // A node without the permission to create its Node may have one that another client created.
            Err(refusal @ (ApiFailure::AlreadyExists(_) | ApiFailure::Forbidden(_))) => {
                within(limit, api.get(name)).await?.ok_or(refusal)?
            }
            other => return other,
        },
    };
    match metadata_patch(config, &found) {
        None => Ok(found),
        Some(patch) => within(limit, api.patch(name, &patch)).await,
    }
}

/// Registers the node, with back-off until it succeeds. `status` computes the first status.
pub(super) async fn register(
    parts: &Parts,
    api: &dyn NodeApi,
    status: impl Fn() -> NodeStatus,
) -> Node {
    let mut pauses = REGISTRATION_BACKOFF;
    loop {
        match try_register(parts, api, status()).await {
            Ok(node) => return node,
            Err(error) if pauses.is_first() => {
                tracing::error!(%error, node = parts.config.node_name, "registering the node failed; retrying");
            }
            Err(error) => tracing::debug!(%error, "registering the node failed; retrying"),
        }
        tokio::time::sleep(pauses.pause()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_config::{Overrides, load};

    fn config(flags: Overrides) -> Config {
        load(None, &flags, "n").expect("a configuration")
    }

    #[test]
    fn an_external_cloud_provider_gets_a_taint_and_the_address() {
        let with = Overrides {
            cloud_provider: Some("external".into()),
            node_ip: Some("192.0.2.1,2001:db8::1".into()),
            ..Overrides::default()
        };
        let node = new_node(&config(with), NodeStatus::default());
        let taints = node.spec.as_ref().and_then(|s| s.taints.clone());
        let taint = &taints.expect("a taint")[0];
        assert_eq!(taint.key, "node.cloudprovider.kubernetes.io/uninitialized");
        assert_eq!(node.annotations()[PROVIDED], "192.0.2.1,2001:db8::1");
        let without = new_node(&config(Overrides::default()), NodeStatus::default());
        assert!(without.spec.as_ref().is_some_and(|s| s.taints.is_none()));
        assert!(!without.annotations().contains_key(PROVIDED));
    }

    #[test]
    fn custom_labels_of_the_flag_are_not_restored_on_an_existing_node() {
        let zone = "topology.kubernetes.io/zone";
        let with = |labels: &str| {
            config(Overrides {
                node_labels: Some(labels.into()),
                ..Overrides::default()
            })
        };
        let mut node = new_node(
            &with("tier=a,topology.kubernetes.io/zone=z1"),
            NodeStatus::default(),
        );
        assert_eq!(node.labels()["tier"], "a");
        assert_eq!(node.labels()[zone], "z1");
        node.labels_mut().insert("tier".into(), "b".into());
        assert_eq!(
            metadata_patch(
                &with("tier=a,other=c,topology.kubernetes.io/zone=z2"),
                &node
            ),
            Some(json!({"metadata": {"labels": {zone: "z2"}}}))
        );
        assert_eq!(
            metadata_patch(&with("topology.kubernetes.io/zone="), &node),
            Some(json!({"metadata": {"labels": {zone: null}}}))
        );
    }

    #[test]
    fn changed_labels_and_annotations_are_restored() {
        let config = config(Overrides::default());
        let mut node = new_node(&config, NodeStatus::default());
        assert_eq!(metadata_patch(&config, &node), None);
        assert_eq!(platform_patch(&node), None);
        node.labels_mut()
            .insert("kubernetes.io/os".into(), "plan9".into());
        node.annotations_mut()
            .insert(PROVIDED.into(), "192.0.2.9".into());
        let patch = metadata_patch(&config, &node).expect("a patch");
        assert_eq!(
            patch,
            json!({"metadata": {"labels": {"kubernetes.io/os": "linux"}, "annotations": {PROVIDED: null}}})
        );
        assert_eq!(
            platform_patch(&node),
            Some(json!({"metadata": {"labels": {"kubernetes.io/os": "linux"}}}))
        );
    }
}
