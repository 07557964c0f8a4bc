//! The Node's status: computed in rounds, and patched if it has changed (`pkg/kubelet/kubelet_node_status.go`).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeDaemonEndpoints, NodeFeatures,
    NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeStatus, NodeSwapStatus, NodeSystemInfo,
};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::api::{NodeApi, within};
use super::own::REGISTER_AGAIN_AFTER;
use super::registration::{self, platform_patch};
use super::runtime::RuntimeView;
use super::{DeviceManager, OwnNode, deadline, limits, size};
use crate::events::{Events, Kind};
use crate::pod::table::PodTable;
use crate::serving::Unserved;
use crate::volume::AttachedDisks;
use crate::volume::csi::Csi;
use holdfast_core::backoff::Doubling;
use holdfast_core::node::addresses::{self, addresses};
use holdfast_core::node::capacity::{self, Extended};
use holdfast_core::node::conditions::{
    conditions, is_ready, joined, patch, report_after, transitions,
};
use holdfast_core::node::eviction::Pressures;
use holdfast_core::node::shutdown;
use holdfast_core::time::shown;
use holdfast_core::version::{REPORTED, arch};
use holdfast_cri::{Features, Handler};
use holdfast_kubeapi::pods::ApiFailure;
use holdfast_sys::machine::Machine;

/// The features that the agent declares to the scheduler and the API
/// (KEP-5328). Only fully implemented features are listed.
const DECLARED: &[&str] = &[
    "ExtendWebSocketsToKubelet",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];
/// How long the first status waits for the runtime's first status and its images.
const FIRST_STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the first status waits until the agent's HTTP API is served or has failed.
const SERVING_TIMEOUT: Duration = Duration::from_secs(2);
/// First back-off after a failed round; it doubles up to the interval between rounds.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// What other actors report for the status.
pub(crate) struct Reports {
    pub node_ips: watch::Sender<Vec<String>>,
    pub pressures: watch::Sender<Pressures>,
    pub shutting_down: watch::Sender<bool>,
    pub unserved: Arc<Unserved>,
    pub csi: Arc<Csi>,
    pub disks: Arc<AttachedDisks>,
    pub devices: Arc<DeviceManager>,
}

/// What the status loop uses.
pub(crate) struct Parts {
    pub registration: registration::Parts,
    pub node: Arc<OwnNode>,
    /// The names and addresses of the last status; before registration, those that it will have.
    pub node_addresses: watch::Sender<Vec<NodeAddress>>,
    pub events: Events,
    pub reports: Reports,
}

/// The variable inputs of a status.
#[derive(Debug)]
pub(super) struct Inputs {
    /// The runtime's state.
    pub view: watch::Receiver<RuntimeView>,
    /// The runtime's images; `None` until they have been listed.
    pub images: watch::Receiver<Option<Vec<ContainerImage>>>,
}

fn handlers(features: &Features) -> Vec<NodeRuntimeHandler> {
    let of = |h: &Handler| NodeRuntimeHandler {
        name: Some(h.name.clone()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(h.recursive_read_only),
            user_namespaces: Some(h.user_namespaces),
        }),
    };
    features.handlers.iter().map(of).collect()
}

fn system_info(machine: &Machine, runtime: &str) -> NodeSystemInfo {
    NodeSystemInfo {
        architecture: arch(std::env::consts::ARCH).into(),
        boot_id: machine.boot_id.clone(),
        container_runtime_version: runtime.to_owned(),
        kernel_version: machine.kernel.clone(),
        kubelet_version: REPORTED.into(),
        machine_id: machine.machine_id.clone(),
        operating_system: "linux".into(),
        os_image: machine.os_image.clone(),
        swap: machine
            .swap
            .filter(|bytes| *bytes > 0)
            .map(|bytes| NodeSwapStatus {
                capacity: i64::try_from(bytes).ok(),
            }),
        system_uuid: machine.system_uuid.clone(),
        ..NodeSystemInfo::default()
    }
}

/// Why the node is not ready, with all problems in the kubelet's order; `None` if it is ready.
fn problem(reports: &Reports, view: &RuntimeView) -> Option<String> {
    let shutting_down = *reports.shutting_down.borrow();
    let ending = shutting_down.then(|| shutdown::NOT_READY.to_owned());
    let mut problems = view.problems.clone();
    problems.extend(reports.csi.problem());
    problems.extend(ending);
    problems.extend(reports.unserved.problems());
    joined(&problems)
}

/// Notifies pods that wait until these volumes are reported in use.
fn set_reported(reports: &Reports, in_use: &[String]) {
    reports.csi.set_reported(in_use);
    reports.disks.set_reported(in_use);
}

/// The node's names and addresses after a round: the agent's own, or else those that the Node already has.
fn reported(own: Option<&Vec<NodeAddress>>, old: &NodeStatus) -> Vec<NodeAddress> {
    own.or(old.addresses.as_ref()).cloned().unwrap_or_default()
}

/// Computes the status; `old` is the Node's current status.
fn compute(parts: &Parts, inputs: &Inputs, old: &NodeStatus, extended: Extended) -> NodeStatus {
    let (config, view) = (&parts.registration.config, inputs.view.borrow().clone());
    let own = addresses(addresses::Sources {
        name: &config.node_name,
        ips: &parts.reports.node_ips.borrow(),
        given: config.has_node_ip,
        external: config.external_cloud,
        reported: old.addresses.as_deref().unwrap_or_default(),
    });
    let machine = size(&parts.registration.machine);
    let mut capacity = capacity::capacity(&machine, limits(config));
    let mut allocatable = capacity::allocatable(&machine, limits(config));
    let (devices, usable) = parts.reports.devices.amounts();
    capacity.extend(devices);
    allocatable.extend(usable);
    let mut in_use = parts.reports.disks.in_use();
    in_use.extend(parts.reports.csi.in_use());
    NodeStatus {
        addresses: own,
        capacity: Some(capacity::reported(
            &capacity,
            old.capacity.as_ref(),
            extended,
        )),
        allocatable: Some(capacity::reported(
            &allocatable,
            old.allocatable.as_ref(),
            extended,
        )),
        conditions: Some(conditions(
            problem(&parts.reports, &view).as_deref(),
            &parts.reports.pressures.borrow(),
            old.conditions.as_deref().unwrap_or_default(),
            parts.registration.clock.now(),
        )),
        images: inputs.images.borrow().clone(),
        // An empty list is written only to clear a non-empty one, as the patch keeps missing fields.
        volumes_in_use: Some(Vec::from_iter(in_use))
            .filter(|v| !v.is_empty() || old.volumes_in_use.iter().flatten().next().is_some()),
        daemon_endpoints: config.serving.enabled.then(|| NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint {
                port: i32::from(config.serving.main.port()),
            }),
        }),
        runtime_handlers: Some(handlers(&view.features)).filter(|h| !h.is_empty()),
        features: view.features.strict_groups.then_some(NodeFeatures {
            supplemental_groups_policy: Some(true),
        }),
        declared_features: Some(DECLARED.iter().map(|f| (*f).to_owned()).collect()),
        node_info: Some(system_info(&parts.registration.machine, &view.version)),
        ..NodeStatus::default()
    }
}

/// Whether the Node's status is from another agent, whose devices this agent does not have.
fn is_from_another_agent(status: &NodeStatus) -> bool {
    let version = status
        .node_info
        .as_ref()
        .map(|i| i.kubelet_version.as_str());
    version.is_some_and(|v| !v.is_empty() && !v.contains("+holdfast"))
}

/// The state across rounds.
struct Rounds<'a> {
    parts: &'a Parts,
    api: &'a dyn NodeApi,
    inputs: Inputs,
    /// The time of this agent's last report. The first round always reports, as in the kubelet.
    reported: Option<Instant>,
    /// The number of reports.
    reports: u64,
    extended: Extended,
}

impl Rounds<'_> {
    fn is_report_due(&self) -> bool {
        let seed = format!(
            "{}/{}",
            self.parts.registration.config.node_name, self.reports
        );
        let frequency = self.parts.registration.config.node_status_report;
        let after = report_after(frequency, seed.as_bytes());
        self.reported.is_none_or(|at| at.elapsed() >= after)
    }

    /// Runs one round: patches the differences to the Node object.
    async fn round(&mut self, node: &Node) -> Result<(), ApiFailure> {
        let (parts, limit) = (self.parts, deadline(&self.parts.registration.config));
        let name = &parts.registration.config.node_name;
        if let Some(patch) = platform_patch(node) {
            tracing::warn!(
                node = name,
                "another client changed the platform labels; restoring them"
            );
            parts
                .node
                .observe(within(limit, self.api.patch(name, &patch)).await?);
        }
        let old = node.status.clone().unwrap_or_default();
        let new = compute(parts, &self.inputs, &old, self.extended);
        let addresses = reported(new.addresses.as_ref(), &old);
        parts.node_addresses.send_if_modified(|known| {
            let is_other = *known != addresses;
            *known = addresses;
            is_other
        });
        let in_use = new.volumes_in_use.as_deref().unwrap_or_default();
        let patch = match patch(&old, &new) {
            Some(patch) => patch,
            None if self.is_report_due() => json!({"status": {"conditions": new.conditions}}),
            None => {
                set_reported(&parts.reports, in_use);
                return Ok(());
            }
        };
        let written = within(limit, self.api.patch_status(name, &patch)).await?;
        parts.node.observe(written);
        set_reported(&parts.reports, in_use);
        self.reported = Some(Instant::now());
        self.reports += 1;
        if is_ready(&new) {
            let (now, booted) = (
                parts.registration.clock.now(),
                parts.registration.machine.booted,
            );
            parts.registration.metrics.node_ready(now, booted);
        }
        for reason in transitions(&old, &new) {
            let message = format!("Node {name} status is now: {reason}");
            parts.events.node(name, Kind::Normal, &reason, message);
        }
        Ok(())
    }
}

/// Emits events about the start of the agent, and about a reboot since the Node's last status.
fn emit_start_events(parts: &Parts, before: &NodeStatus) {
    let name = &parts.registration.config.node_name;
    parts
        .events
        .node(name, Kind::Normal, "Starting", "Starting kubelet.");
    let boot = &parts.registration.machine.boot_id;
    let known = before.node_info.as_ref().map(|i| &i.boot_id);
    if known.is_some_and(|known| !known.is_empty() && known != boot) {
        let message = format!("Node {name} has been rebooted, boot id: {boot}");
        parts.events.node(name, Kind::Warning, "Rebooted", message);
    }
}

/// Waits until the Node object has been missing for a minute, and no pod without an API object is left. Before
/// that the scheduler must not send pods here: the missing pods may run elsewhere already.
async fn wait_until_missing(parts: &Parts, table: &mut watch::Receiver<PodTable>) {
    if !parts.registration.config.register_node {
        return std::future::pending().await;
    }
    tokio::time::sleep(REGISTER_AGAIN_AFTER).await;
    let has_left = |table: &PodTable| table.complete && !table.has_leaving();
    // The dispatcher lives as long as the process.
    if table.wait_for(has_left).await.is_err() {
        return std::future::pending().await;
    }
    let (node, missing_for) = (
        &parts.registration.config.node_name,
        shown(REGISTER_AGAIN_AFTER),
    );
    tracing::info!(
        node,
        missing_for,
        "the Node object is missing: the agent registers the node again with its configured labels and taints"
    );
}

/// Registers the node and keeps its status up to date. A round runs every `nodeStatusUpdateFrequency`, and whenever one
/// of these changes: the runtime's state, the machine's addresses, pressures, devices, whether the agent's HTTP API is
/// served, shutdown, or a volume's use.
pub(super) async fn run(parts: &Parts, mut inputs: Inputs, mut table: watch::Receiver<PodTable>) {
    let Some(api) = parts.node.api() else {
        return std::future::pending().await;
    };
    // Otherwise an incomplete first status would be followed by a second one immediately.
    let known = async {
        let _ = inputs.view.wait_for(|view| view.polled).await;
        let _ = inputs.images.wait_for(Option::is_some).await;
    };
    // A node is not ready before its API is served, which takes a moment.
    let tried = tokio::time::timeout(SERVING_TIMEOUT, parts.reports.unserved.wait_until_tried());
    let _ = tokio::join!(tokio::time::timeout(FIRST_STATUS_TIMEOUT, known), tried);
    let first = || compute(parts, &inputs, &NodeStatus::default(), Extended::Kept);
    let node = registration::register(&parts.registration, &*api, first).await;
    let before = node.status.clone().unwrap_or_default();
    emit_start_events(parts, &before);
    let another = is_from_another_agent(&before);
    parts.node.observe(node);
    // A node that was ready must not become unready only because its CSINode is not written yet.
    let _ = tokio::time::timeout(FIRST_STATUS_TIMEOUT, parts.reports.csi.wait_until_ready()).await;
    let (mut view, mut ips) = (inputs.view.clone(), parts.reports.node_ips.subscribe());
    let mut pressures = parts.reports.pressures.subscribe();
    let mut shutting_down = parts.reports.shutting_down.subscribe();
    let mut unserved = parts.reports.unserved.changes();
    let mut devices = parts.reports.devices.changes();
    let mut rounds = Rounds {
        parts,
        api: &*api,
        inputs,
        reported: None,
        reports: 0,
        extended: if another {
            Extended::Zeroed
        } else {
            Extended::Kept
        },
    };
    let update = parts.registration.config.node_status_update;
    let mut pauses = Doubling::new(RETRY_PAUSE, update);
    loop {
        let node = tokio::select! {
            biased;
            node = parts.node.wait_until_present() => node,
            () = wait_until_missing(parts, &mut table) => {
                let (inputs, extended) = (&rounds.inputs, Extended::Kept);
                let status = || compute(parts, inputs, &NodeStatus::default(), extended);
                let node = registration::register(&parts.registration, &*api, status).await;
                parts.node.observe(node);
                continue;
            }
        };
        view.mark_unchanged();
        ips.mark_unchanged();
        pressures.mark_unchanged();
        shutting_down.mark_unchanged();
        unserved.mark_unchanged();
        devices.mark_unchanged();
        let wait = match rounds.round(&node).await {
            Ok(()) => {
                rounds.extended = Extended::Kept;
                pauses.reset();
                update
            }
            Err(ApiFailure::NotFound(_)) => {
                parts.node.mark_absent();
                continue;
            }
            Err(error) => {
                if pauses.is_first() {
                    tracing::error!(%error, node = parts.registration.config.node_name, "updating the Node object failed; retrying");
                }
                // The cached Node may be outdated.
                parts.node.refresh().await;
                pauses.pause()
            }
        };
        tokio::select! {
            biased;
            Ok(()) = view.changed() => {}
            Ok(()) = ips.changed() => {}
            Ok(()) = pressures.changed() => {}
            Ok(()) = shutting_down.changed() => {}
            Ok(()) = unserved.changed() => {}
            Ok(()) = devices.changed() => {}
            // Pods wait for this report.
            () = parts.reports.csi.in_use_changed() => {}
            () = parts.reports.disks.in_use_changed() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_own_addresses_keeps_the_reported_ones() {
        let of = |address: &str| NodeAddress {
            type_: "InternalIP".into(),
            address: address.into(),
        };
        let old = NodeStatus {
            addresses: Some(vec![of("198.51.100.1")]),
            ..NodeStatus::default()
        };
        let own = vec![of("192.0.2.1")];
        assert_eq!(reported(Some(&own), &old), own);
        assert_eq!(reported(None, &old), [of("198.51.100.1")]);
        assert_eq!(reported(None, &NodeStatus::default()), []);
    }

    #[test]
    fn devices_of_another_agent_are_recognised_by_its_version() {
        for (version, expected) in [("v1.36.2", true), (REPORTED, false), ("", false)] {
            let info = json!({"nodeInfo": {"architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
                "kubeletVersion": version, "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": ""}});
            let status: NodeStatus = serde_json::from_value(info).expect("a status");
            assert_eq!(is_from_another_agent(&status), expected, "{version}");
        }
        assert!(!is_from_another_agent(&NodeStatus::default()));
    }
}
