//! The Node object: registration, status, lease (kubelet spec, chapter 12).

pub mod credentials;
pub mod ledger;
pub mod log_rotation;
pub mod standalone;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints,
    NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeSpec, NodeStatus,
    NodeSystemInfo,
};
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Context;
use super::Kind;
use crate::config::Config;
use crate::core::pod::resources::Amounts;
use crate::core::pod::worker::Network;
use crate::core::quantity::Quantity;
use crate::core::time::seconds;
use crate::cri::Features;
use crate::kubeapi::pods::ApiFailure;
use crate::sys::machine::Machine;

/// The Kubernetes version whose agent behaviour this is.
pub(super) const VERSION: &str = "v1.36.2+holdfast";
/// How often the runtime is asked while it is not ready, and when it is.
const POLL: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// What this agent can do that the scheduler and the API ask for: only what truly works.
const DECLARED: &[&str] = &[
    "ExtendWebSocketsToKubelet",
    "RestartAllContainersOnContainerExits",
];
/// An unchanged status is reported this often all the same.
const REPORT: Duration = Duration::from_secs(300);

/// The API's side of the node.
#[async_trait]
pub trait NodeApi: Send + Sync + 'static {
    /// The node, if it exists.
    async fn get(&self, name: &str) -> Result<Option<Node>, ApiFailure>;
    /// Creates it.
    async fn create(&self, node: &Node) -> Result<Node, ApiFailure>;
    /// Patches labels and annotations (merge).
    async fn patch(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure>;
    /// Patches its status (strategic merge).
    async fn patch_status(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure>;
    /// Makes the node's CSINode say which drivers there are.
    async fn report_drivers(
        &self,
        node: &Node,
        drivers: &[CSINodeDriver],
    ) -> Result<(), ApiFailure>;
    /// Creates or renews its lease.
    async fn renew(&self, lease: &Lease) -> Result<(), ApiFailure>;
}

/// The node's side of the API over kube.
pub struct KubeNodes(pub Client);

#[async_trait]
impl NodeApi for KubeNodes {
    async fn get(&self, name: &str) -> Result<Option<Node>, ApiFailure> {
        Ok(Api::<Node>::all(self.0.clone()).get_opt(name).await?)
    }

    async fn create(&self, node: &Node) -> Result<Node, ApiFailure> {
        Ok(Api::all(self.0.clone())
            .create(&PostParams::default(), node)
            .await?)
    }

    async fn patch(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure> {
        Ok(Api::<Node>::all(self.0.clone())
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await?)
    }

    async fn patch_status(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure> {
        Ok(Api::<Node>::all(self.0.clone())
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await?)
    }

    async fn report_drivers(
        &self,
        node: &Node,
        drivers: &[CSINodeDriver],
    ) -> Result<(), ApiFailure> {
        let api: Api<CSINode> = Api::all(self.0.clone());
        let name = node.name_any();
        let Some(mut known) = api.get_opt(&name).await? else {
            let owner =
                json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid()});
            let fresh = json!({"metadata": {"name": name, "ownerReferences": [owner]}, "spec": {"drivers": drivers}});
            let fresh: CSINode =
                serde_json::from_value(fresh).map_err(|e| ApiFailure::Other(e.to_string()))?;
            api.create(&PostParams::default(), &fresh).await?;
            return Ok(());
        };
        if known.spec.drivers != drivers {
            known.spec.drivers = drivers.to_vec();
            api.replace(&name, &PostParams::default(), &known).await?;
        }
        Ok(())
    }

    async fn renew(&self, lease: &Lease) -> Result<(), ApiFailure> {
        let api: Api<Lease> = Api::namespaced(self.0.clone(), "kube-node-lease");
        let name = lease.name_any();
        // A merge patch renews without reading first.
        match api
            .patch(
                &name,
                &PatchParams::default(),
                &Patch::Merge(&json!({"spec": lease.spec})),
            )
            .await
        {
            Err(error) if crate::kubeapi::client::code(&error) == Some(404) => {
                api.create(&PostParams::default(), lease).await?;
                Ok(())
            }
            other => Ok(other.map(|_| ())?),
        }
    }
}

/// What the machine has.
fn capacity(machine: &Machine, config: &Config) -> Amounts {
    Amounts::from([
        (
            "cpu".to_owned(),
            Quantity::from_units(i64::from(machine.cpus)),
        ),
        ("memory".to_owned(), Quantity::from_bytes(machine.memory)),
        (
            "ephemeral-storage".to_owned(),
            Quantity::from_bytes(machine.storage),
        ),
        ("pods".to_owned(), Quantity::from_units(config.max_pods)),
    ])
}

/// What pods may use: the capacity less what is set aside.
#[must_use]
pub fn allocatable(machine: &Machine, config: &Config) -> Amounts {
    let mut amounts = capacity(machine, config);
    for (name, amount) in &mut amounts {
        if let Some(reserved) = config.reserved.get(name) {
            *amount = (*amount - *reserved).max(Quantity::ZERO);
        }
    }
    amounts
}

fn texts(amounts: &Amounts) -> BTreeMap<String, Text> {
    amounts
        .iter()
        .map(|(name, amount)| (name.clone(), Text(amount.to_string())))
        .collect()
}

fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn labels(config: &Config) -> BTreeMap<String, String> {
    let mut labels = config.node_labels.clone();
    for (key, value) in [
        ("kubernetes.io/hostname", config.node_name.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch()),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", arch()),
    ] {
        labels.insert(key.into(), value.into());
    }
    labels
}

/// What the runtime said last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct RuntimeView {
    version: String,
    problem: Option<String>,
    network: Network,
    features: Features,
}

async fn look(context: &Context, before: &RuntimeView) -> RuntimeView {
    match context.runtime.status().await {
        Err(error) => RuntimeView {
            version: before.version.clone(),
            problem: Some(format!("container runtime is down: {error}")),
            network: Network::NotReady("container runtime is down".into()),
            features: before.features.clone(),
        },
        Ok(status) => {
            let network = status
                .network_not_ready
                .map(|n| format!("container runtime network not ready: {n}"));
            let problems: Vec<String> = status
                .not_ready
                .into_iter()
                .chain(network.clone())
                .collect();
            let network = network.map_or(Network::Ready, Network::NotReady);
            let problem = match problems.as_slice() {
                [] => None,
                [one] => Some(one.clone()),
                many => Some(format!("[{}]", many.join(", "))),
            };
            RuntimeView {
                version: status.version,
                problem,
                network,
                features: status.features,
            }
        }
    }
}

fn conditions(
    problem: Option<&String>,
    old: &[NodeCondition],
    now: Timestamp,
) -> Vec<NodeCondition> {
    let now = seconds(now);
    let condition = |kind: &str, status: &str, reason: &str, message: String| {
        let before = old.iter().find(|c| c.type_ == kind && c.status == status);
        NodeCondition {
            type_: kind.into(),
            status: status.into(),
            reason: Some(reason.into()),
            message: Some(message),
            last_heartbeat_time: Some(now.clone()),
            last_transition_time: Some(
                before
                    .and_then(|c| c.last_transition_time.clone())
                    .unwrap_or_else(|| now.clone()),
            ),
        }
    };
    vec![
        condition(
            "MemoryPressure",
            "False",
            "KubeletHasSufficientMemory",
            "kubelet has sufficient memory available".into(),
        ),
        condition(
            "DiskPressure",
            "False",
            "KubeletHasNoDiskPressure",
            "kubelet has no disk pressure".into(),
        ),
        condition(
            "PIDPressure",
            "False",
            "KubeletHasSufficientPID",
            "kubelet has sufficient PID available".into(),
        ),
        match problem {
            None => condition(
                "Ready",
                "True",
                "KubeletReady",
                "kubelet is posting ready status".into(),
            ),
            Some(problem) => condition("Ready", "False", "KubeletNotReady", problem.clone()),
        },
    ]
}

async fn status(context: &Context, view: &RuntimeView, old: &NodeStatus) -> NodeStatus {
    let machine = &context.machine;
    let mut addresses: Vec<NodeAddress> = context
        .node_ips
        .iter()
        .map(|ip| NodeAddress {
            type_: "InternalIP".into(),
            address: ip.clone(),
        })
        .collect();
    addresses.push(NodeAddress {
        type_: "Hostname".into(),
        address: context.config.node_name.clone(),
    });
    let mut images = context.runtime.images().await.unwrap_or_default();
    images.sort_by_key(|i| std::cmp::Reverse(i.size));
    let most = usize::try_from(context.config.max_images).unwrap_or(usize::MAX);
    let images = images
        .into_iter()
        .take(most)
        .map(|i| ContainerImage {
            names: Some(i.names.into_iter().take(5).collect()),
            size_bytes: i64::try_from(i.size).ok(),
        })
        .collect();
    NodeStatus {
        addresses: Some(addresses),
        capacity: Some(texts(&capacity(machine, &context.config))),
        allocatable: Some(texts(&allocatable(machine, &context.config))),
        conditions: Some(conditions(
            view.problem.as_ref(),
            old.conditions.as_deref().unwrap_or_default(),
            context.clock.now(),
        )),
        images: Some(images),
        // An empty list is said only where another one stands: what is not said stays.
        volumes_in_use: Some(context.csi.in_use())
            .filter(|v| !v.is_empty() || old.volumes_in_use.iter().flatten().next().is_some()),
        daemon_endpoints: context.config.serving.enabled.then(|| NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint {
                port: i32::from(context.config.serving.main.port()),
            }),
        }),
        runtime_handlers: Some(handlers(&view.features)).filter(|h| !h.is_empty()),
        features: view.features.strict_groups.then_some(NodeFeatures {
            supplemental_groups_policy: Some(true),
        }),
        declared_features: Some(DECLARED.iter().map(|f| (*f).to_owned()).collect()),
        node_info: Some(NodeSystemInfo {
            architecture: arch().into(),
            boot_id: machine.boot_id.clone(),
            container_runtime_version: view.version.clone(),
            kernel_version: machine.kernel.clone(),
            kubelet_version: VERSION.into(),
            machine_id: machine.machine_id.clone(),
            operating_system: "linux".into(),
            os_image: machine.os_image.clone(),
            system_uuid: machine.system_uuid.clone(),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    }
}

fn handlers(features: &Features) -> Vec<NodeRuntimeHandler> {
    let of = |h: &crate::cri::Handler| NodeRuntimeHandler {
        name: Some(h.name.clone()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(h.recursive_read_only),
            user_namespaces: Some(h.user_namespaces),
        }),
    };
    features.handlers.iter().map(of).collect()
}

/// The patch from one status to the next; heartbeats alone are no difference.
fn patch(old: &NodeStatus, new: &NodeStatus) -> Option<Value> {
    let still = |status: &NodeStatus| {
        let mut status = status.clone();
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_heartbeat_time = None;
        }
        serde_json::to_value(status).unwrap_or_default()
    };
    let (before, after) = (still(old), still(new));
    let same = after
        .as_object()
        .into_iter()
        .flatten()
        .all(|(key, value)| before.get(key) == Some(value));
    if same {
        return None;
    }
    let mut status = serde_json::to_value(new).ok()?;
    // Addresses are merged by type: a changed list must replace the old one.
    if before.get("addresses") != after.get("addresses")
        && let Some(addresses) = status["addresses"].as_array_mut()
    {
        addresses.push(json!({"$patch": "replace"}));
    }
    Some(json!({"status": status}))
}

async fn register(
    context: &Context,
    api: &dyn NodeApi,
    view: &RuntimeView,
) -> Result<Node, ApiFailure> {
    let config = &context.config;
    if let Some(found) = api.get(&config.node_name).await? {
        let missing: BTreeMap<_, _> = labels(config)
            .into_iter()
            .filter(|(k, v)| found.labels().get(k) != Some(v))
            .collect();
        if missing.is_empty() {
            return Ok(found);
        }
        return api
            .patch(&config.node_name, &json!({"metadata": {"labels": missing}}))
            .await;
    }
    if !config.register_node {
        return Err(ApiFailure::NotFound(format!(
            "the node {:?} does not exist and --register-node is false",
            config.node_name
        )));
    }
    let node = Node {
        metadata: ObjectMeta {
            name: Some(config.node_name.clone()),
            labels: Some(labels(config)),
            annotations: Some(
                [(
                    "volumes.kubernetes.io/controller-managed-attach-detach".to_owned(),
                    "true".to_owned(),
                )]
                .into(),
            ),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: config.provider_id.clone(),
            taints: (!config.register_with_taints.is_empty())
                .then(|| config.register_with_taints.clone()),
            ..NodeSpec::default()
        }),
        status: Some(status(context, view, &NodeStatus::default()).await),
    };
    match api.create(&node).await {
        Err(ApiFailure::AlreadyExists(_)) => api
            .get(&config.node_name)
            .await?
            .ok_or_else(|| ApiFailure::Other("the node vanished while it was registered".into())),
        other => other,
    }
}

/// Runs until the process ends: watches the runtime, keeps the Node object and its lease.
pub async fn run(
    context: Arc<Context>,
    api: Option<Arc<dyn NodeApi>>,
    network: watch::Sender<Network>,
    announce: watch::Sender<Option<Arc<Node>>>,
) {
    let mut view = RuntimeView {
        problem: Some("container runtime status check may not have completed yet".into()),
        ..RuntimeView::default()
    };
    let mut node: Option<Node> = None;
    let mut reported = Instant::now();
    let mut next_lease = Instant::now();
    let mut next_status = Instant::now();
    let mut failing = false;
    loop {
        let new = look(&context, &view).await;
        let changed = new != view;
        view = new;
        context.features.send_if_modified(|old| {
            let differs = *old != view.features;
            old.clone_from(&view.features);
            differs
        });
        network.send_if_modified(|old| {
            let differs = *old != view.network;
            old.clone_from(&view.network);
            differs
        });
        if let Some(api) = &api {
            let result = tend(
                &context,
                &**api,
                &view,
                &mut node,
                changed || Instant::now() >= next_status,
                &mut reported,
            )
            .await;
            if Instant::now() >= next_status {
                next_status = Instant::now() + context.config.node_status_update;
            }
            match result {
                Ok(()) => failing = false,
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::error!(%error, node = context.config.node_name, "the Node object cannot be kept up to date; it is tried again");
                    }
                }
            }
            announce.send_if_modified(|old| {
                let differs = old.as_ref().map(|o| o.resource_version())
                    != node.as_ref().map(|n| n.resource_version());
                if differs {
                    *old = node.clone().map(Arc::new);
                }
                differs
            });
            if let (Some(node), true) = (&node, Instant::now() >= next_lease) {
                match api.renew(&lease(&context, node)).await {
                    Ok(()) => {
                        next_lease = Instant::now()
                            + Duration::from_secs(
                                u64::try_from(context.config.lease_seconds).unwrap_or(40),
                            ) / 4
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the node's lease cannot be renewed; it is tried again")
                    }
                }
            }
        }
        let settled = view.problem.is_none() && (api.is_none() || node.is_some());
        tokio::select! {
            () = tokio::time::sleep(if settled { POLL.1 } else { POLL.0 }) => {}
            // Pods wait for it to be said.
            () = context.csi.in_use_changed() => next_status = Instant::now(),
        }
    }
}

async fn tend(
    context: &Context,
    api: &dyn NodeApi,
    view: &RuntimeView,
    node: &mut Option<Node>,
    due: bool,
    reported: &mut Instant,
) -> Result<(), ApiFailure> {
    let name = &context.config.node_name;
    if node.is_none() {
        *node = Some(register(context, api, view).await?);
        context
            .events
            .node(name, Kind::Normal, "Starting", "Starting kubelet.");
    } else if !due {
        return Ok(());
    }
    let Some(current) = node.as_ref() else {
        return Ok(());
    };
    let old = current.status.clone().unwrap_or_default();
    let new = status(context, view, &old).await;
    let patch = match patch(&old, &new) {
        Some(patch) => patch,
        None if reported.elapsed() >= REPORT => json!({"status": {"conditions": new.conditions}}),
        None => return Ok(()),
    };
    let ready = |s: &NodeStatus| {
        s.conditions
            .iter()
            .flatten()
            .find(|c| c.type_ == "Ready")
            .map(|c| c.status.clone())
    };
    match api.patch_status(name, &patch).await {
        Ok(written) => {
            if ready(&old) != ready(&new) {
                let reason = if ready(&new).as_deref() == Some("True") {
                    "NodeReady"
                } else {
                    "NodeNotReady"
                };
                context.events.node(
                    name,
                    Kind::Normal,
                    reason,
                    format!("Node {name} status is now: {reason}"),
                );
            }
            *node = Some(written);
            *reported = Instant::now();
            Ok(())
        }
        Err(ApiFailure::NotFound(why)) => {
            // Somebody deleted the node: it is registered anew.
            *node = None;
            Err(ApiFailure::NotFound(why))
        }
        Err(error) => Err(error),
    }
}

fn lease(context: &Context, node: &Node) -> Lease {
    let name = &context.config.node_name;
    Lease {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some("kube-node-lease".into()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Node".into(),
                name: name.clone(),
                uid: node.uid().unwrap_or_default(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(name.clone()),
            lease_duration_seconds: Some(context.config.lease_seconds),
            renew_time: Some(MicroTime(context.clock.now())),
            ..LeaseSpec::default()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_alone_are_not_reported_and_addresses_replace() {
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        let status =
            |problem: Option<&String>, s: i64, ip: &str, old: &[NodeCondition]| NodeStatus {
                conditions: Some(conditions(problem, old, at(s))),
                addresses: Some(vec![NodeAddress {
                    type_: "InternalIP".into(),
                    address: ip.into(),
                }]),
                ..NodeStatus::default()
            };
        let first = status(None, 1, "192.0.2.1", &[]);
        let later = status(
            None,
            60,
            "192.0.2.1",
            first.conditions.as_deref().unwrap_or_default(),
        );
        assert_eq!(patch(&first, &later), None);
        let down = status(
            Some(&"down".to_owned()),
            61,
            "192.0.2.1",
            first.conditions.as_deref().unwrap_or_default(),
        );
        assert!(
            patch(&first, &down)
                .is_some_and(|p| p["status"]["conditions"][3]["reason"] == "KubeletNotReady")
        );
        let moved = status(
            None,
            62,
            "192.0.2.2",
            first.conditions.as_deref().unwrap_or_default(),
        );
        assert_eq!(
            patch(&first, &moved).expect("a patch")["status"]["addresses"][1],
            json!({"$patch": "replace"})
        );
    }
}
