//! Pod admission, with the kubelet's order of checks, reasons and messages (`pkg/kubelet/lifecycle/predicate.go`,
//! `pkg/kubelet/allocation`). Pure.

use k8s_openapi::api::core::v1::{Node, Pod};

use super::capacity::is_extended;
use super::eviction::{self, Pressures};
use super::node_affinity;
use super::shutdown;
use super::taints::tolerates;
use super::used::{Used, resources_of};
use crate::pod;
use crate::pod::cri_config;
use crate::pod::resize::{self, INFEASIBLE, Infeasible};
use crate::pod::resources::{Amounts, requests};
use crate::pod::sysctl;
use crate::quantity::Quantity;

/// Why the node rejects a pod or a resize.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason in the pod's status and in the event.
    pub reason: String,
    /// The message, without the `Pod was rejected: ` prefix.
    pub message: String,
    /// The missing amounts, if the pod is rejected only for lack of resources; otherwise empty.
    pub missing: Amounts,
    /// For a resize that cannot be granted as long as the pod runs: the cause.
    pub infeasible: Option<Infeasible>,
}

/// Resources of this node that pods may use.
#[derive(Debug, Clone, Copy)]
pub struct NodeResources<'a> {
    /// The allocatable resources that this agent computed.
    pub allocatable: &'a Amounts,
    /// The Node with further extended resources. `None` for a resize, which does not change them.
    pub node: Option<&'a Node>,
}

/// State of this node that admission depends on.
pub struct NodeState<'a> {
    /// Resources that pods may use.
    pub allocatable: &'a Amounts,
    /// The Node object of this machine. Required: admission depends on its labels, taints and extended resources.
    pub node: &'a Node,
    /// Sysctls that `allowedUnsafeSysctls` permits in addition to the safe ones.
    pub unsafe_sysctls: &'a [String],
    /// The kernel's release.
    pub kernel: &'a str,
    /// Whether the kernel enforces AppArmor profiles.
    pub apparmor: bool,
    /// Whether the runtime supports `supplementalGroupsPolicy: Strict`.
    pub strict_groups: bool,
    /// Pressure conditions of the node.
    pub pressures: &'a Pressures,
    /// Whether the machine is being shut down.
    pub shutting_down: bool,
}

impl<'a> NodeState<'a> {
    /// Resources that pods may use.
    #[must_use]
    pub fn resources(&self) -> NodeResources<'a> {
        NodeResources {
            allocatable: self.allocatable,
            node: Some(self.node),
        }
    }
}

impl NodeResources<'_> {
    /// The allocatable amount of a resource. `None` for an extended resource that the Node does not list: the cluster
    /// or a claim (DRA) provides the resource, and admission does not check it. Other unknown resources count as zero.
    fn allocatable_of(&self, name: &str) -> Option<Quantity> {
        let own = self.allocatable.get(name).copied();
        if own.is_some() || !is_extended(name) {
            return Some(own.unwrap_or(Quantity::ZERO));
        }
        let status = self.node.and_then(|n| n.status.as_ref());
        let known = status.and_then(|s| s.allocatable.as_ref());
        let text = known.and_then(|a| a.get(name))?;
        Some(text.0.parse().unwrap_or(Quantity::ZERO))
    }
}

/// Reason for a pod whose node affinity or node selector does not match the node.
pub const NODE_AFFINITY: &str = "NodeAffinity";

pub(super) fn reject(reason: &str, message: impl Into<String>) -> Refusal {
    Refusal {
        reason: reason.into(),
        message: message.into(),
        missing: Amounts::new(),
        infeasible: None,
    }
}

/// Rejects a resize that cannot be granted as long as the pod runs.
pub(super) fn infeasible(cause: Infeasible, message: impl Into<String>) -> Refusal {
    Refusal {
        infeasible: Some(cause),
        ..reject(INFEASIBLE, message)
    }
}

/// Rejects a pod because resources could not be allocated after earlier checks found them available.
pub(super) fn unexpected_error(error: impl std::fmt::Display) -> Refusal {
    reject(
        "UnexpectedAdmissionError",
        format!("Allocate failed due to {error}, which is unexpected"),
    )
}

/// Checks the operating system and the supplemental groups policy that the pod requires.
fn check_kind(pod: &Pod, node_state: &NodeState<'_>) -> Result<(), Refusal> {
    let spec = pod::spec(pod);
    let selected = spec
        .node_selector
        .as_ref()
        .and_then(|s| s.get("kubernetes.io/os"));
    if selected.is_some_and(|os| os != "linux") {
        return Err(reject(
            "PodOSSelectorNodeLabelDoesNotMatch",
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        ));
    }
    if spec.os.as_ref().is_some_and(|os| os.name != "linux") {
        return Err(reject(
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ));
    }
    let policy = spec
        .security_context
        .as_ref()
        .and_then(|s| s.supplemental_groups_policy.as_deref());
    if policy == Some("Strict") && !node_state.strict_groups {
        return Err(reject(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        ));
    }
    Ok(())
}

/// Rejects a pod whose AppArmor profile cannot be enforced, so that the pod does not run unconfined.
fn check_apparmor(pod: &Pod, node_state: &NodeState<'_>) -> Result<(), Refusal> {
    // Pods that already run were checked before.
    if pod::phase(pod) != "Pending" {
        return Ok(());
    }
    match cri_config::apparmor_refusal(pod, node_state.apparmor) {
        None => Ok(()),
        Some(why) => Err(reject(
            "AppArmor",
            format!("Cannot enforce AppArmor: {why}"),
        )),
    }
}

/// Decides whether the node admits a pod. `used` has the resources of the pods that are already admitted.
pub fn admit(pod: &Pod, used: &Used, node_state: &NodeState<'_>) -> Result<(), Refusal> {
    // The kubelet checks for shutdown last. Here the check comes first, so that no other pod is preempted for a pod
    // that cannot be admitted anyway.
    if node_state.shutting_down {
        return Err(reject(shutdown::REJECTED, shutdown::REJECTED_MESSAGE));
    }
    if let Some(message) = eviction::refusal(node_state.pressures, pod) {
        return Err(reject("Evicted", message));
    }
    if let Some(message) = sysctl::refusal(pod, node_state.unsafe_sysctls, node_state.kernel) {
        return Err(reject("SysctlForbidden", message));
    }
    check_kind(pod, node_state)?;
    check_resources(pod, used, node_state.resources())?;
    check_placement(pod, used, node_state)?;
    check_apparmor(pod, node_state)
}

/// An amount as in the messages of the kubelet: CPU in millicores, others in their unit.
fn amount_in_message(resource: &str, amount: Quantity) -> i64 {
    match resource {
        "cpu" => amount.milli(),
        _ => amount.units(),
    }
}

/// Checks that a resize does not change the swap limits of running containers. `swaps` is whether the node lets
/// containers swap.
pub fn check_swap(now: &Pod, then: &Pod, swaps: bool) -> Result<(), Refusal> {
    if swaps && resize::moves_swap(now, then) {
        let message = "In-place resize of containers with swap is not supported.";
        return Err(infeasible(Infeasible::Swap, message));
    }
    Ok(())
}

/// Checks that the node could hold the resized pod if no other pod were on it. If not, the resize is infeasible and not
/// merely deferred.
pub(crate) fn check_capacity(pod: &Pod, resources: NodeResources<'_>) -> Result<(), Refusal> {
    for (name, amount) in requests(pod) {
        let capacity = resources.allocatable_of(&name).filter(|has| amount > *has);
        if let Some(capacity) = capacity.filter(|_| resize::is_resizable(&name)) {
            let (requested, has) = (
                amount_in_message(&name, amount),
                amount_in_message(&name, capacity),
            );
            let message = format!(
                "Node didn't have enough capacity: {name}, requested: {requested}, capacity: {has}"
            );
            return Err(infeasible(Infeasible::Capacity, message));
        }
    }
    Ok(())
}

/// Checks that the node has the resources that a pod requests. The error lists the missing amounts.
pub(crate) fn check_resources(
    pod: &Pod,
    used: &Used,
    resources: NodeResources<'_>,
) -> Result<(), Refusal> {
    let mut refusal: Option<Refusal> = None;
    let wanted = resources_of(pod);
    // The kubelet checks the number of pods first.
    let order = wanted
        .iter()
        .filter(|(n, _)| *n == "pods")
        .chain(wanted.iter().filter(|(n, _)| *n != "pods"));
    for (name, amount) in order {
        let Some(capacity) = resources.allocatable_of(name) else {
            continue;
        };
        let taken = used.by_others(pod::uid(pod), name);
        if amount.is_zero() || taken + *amount <= capacity {
            continue;
        }
        let number = |q: Quantity| amount_in_message(name, q);
        let (requested, used, capacity_shown) = (number(*amount), number(taken), number(capacity));
        let first = refusal.get_or_insert_with(|| {
            let message = format!("Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity_shown}");
            reject(&format!("OutOf{name}"), message)
        });
        first
            .missing
            .insert(name.clone(), taken + *amount - capacity);
    }
    refusal.map_or(Ok(()), Err)
}

fn check_placement(pod: &Pod, used: &Used, node_state: &NodeState<'_>) -> Result<(), Refusal> {
    if !node_affinity::pod_matches(pod, node_state.node) {
        return Err(reject(
            NODE_AFFINITY,
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ));
    }
    if used.ports_clash(pod::uid(pod), pod) {
        return Err(reject(
            "NodePorts",
            "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports",
        ));
    }
    let spec = node_state.node.spec.as_ref();
    let taints = spec.and_then(|s| s.taints.as_deref()).unwrap_or_default();
    let tolerations = pod::spec(pod).tolerations.as_deref().unwrap_or_default();
    if !pod::is_static(pod)
        && taints
            .iter()
            .filter(|t| t.effect == "NoExecute")
            .any(|t| !tolerates(tolerations, t))
    {
        return Err(reject(
            "TaintToleration",
            "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::{Arc, LazyLock};

    fn pod(extra: Value) -> Pod {
        let mut base = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "500m"}}, "ports": [{"containerPort": 80, "hostPort": 80}]}]}});
        json_patch::merge(&mut base, &extra);
        serde_json::from_value(base).expect("a pod")
    }

    fn used<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> Used {
        let mut used = Used::default();
        for (place, pod) in pods.into_iter().enumerate() {
            used.set(&place.to_string(), &Arc::new(pod.clone()));
        }
        used
    }

    fn node_state<'a>(allocatable: &'a Amounts, node: Option<&'a Node>) -> NodeState<'a> {
        static NONE: Pressures = Pressures::new();
        static PLAIN: LazyLock<Node> = LazyLock::new(Node::default);
        NodeState {
            allocatable,
            node: node.unwrap_or(&PLAIN),
            unsafe_sysctls: &[],
            kernel: "6.1",
            apparmor: false,
            strict_groups: false,
            pressures: &NONE,
            shutting_down: false,
        }
    }

    #[test]
    fn memory_requests_of_swapping_containers_cannot_be_resized() {
        let with = |memory: &str| {
            pod(
                json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"memory": memory}}}]}}),
            )
        };
        let (now, then) = (with("32Mi"), with("64Mi"));
        assert_eq!(check_swap(&now, &then, false), Ok(()));
        assert_eq!(check_swap(&now, &now, true), Ok(()));
        let refusal = check_swap(&now, &then, true).expect_err("a refusal");
        assert_eq!(
            refusal.infeasible.map(Infeasible::detail),
            Some("swap_limitation")
        );
        assert_eq!(
            (refusal.reason.as_str(), refusal.message.as_str()),
            (
                INFEASIBLE,
                "In-place resize of containers with swap is not supported."
            )
        );
    }

    #[test]
    fn extended_resources_and_huge_pages_are_checked_against_the_node() {
        let node: Node = serde_json::from_value(
            json!({"metadata": {}, "status": {"allocatable": {"example.com/gpu": "0", "example.com/lane": "2"}}}),
        )
        .expect("a node");
        let allocatable = Amounts::from([
            ("pods".to_owned(), Quantity::from_units(10)),
            ("hugepages-2Mi".to_owned(), Quantity::from_bytes(4 << 20)),
        ]);
        let node_state = node_state(&allocatable, Some(&node));
        for (resource, amount, fits) in [
            ("example.com/gpu", "1", false),
            ("example.com/lane", "2", true),
            ("example.com/lane", "3", false),
            // The Node does not list this resource: the cluster or a claim provides it.
            ("example.com/licence", "1", true),
            ("hugepages-2Mi", "4Mi", true),
            ("hugepages-2Mi", "6Mi", false),
            ("hugepages-1Gi", "1Gi", false),
            ("kubernetes.io/other", "1", false),
            ("ephemeral-storage", "1", false),
        ] {
            let container = json!({"name": "c", "resources": {"requests": {resource: amount}}});
            let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [container]}}))
                .expect("a pod");
            let result = check_resources(&pod, &Used::default(), node_state.resources());
            assert_eq!(result.is_ok(), fits, "{amount} of {resource}: {result:?}");
            let reason = format!("OutOf{resource}");
            assert!(result.err().is_none_or(|r| r.reason == reason));
        }
    }

    #[test]
    fn devices_of_a_claim_are_not_requested_from_a_plugin() {
        let gpu = "example.com/gpu";
        let amounts = Amounts::from([
            ("pods".to_owned(), Quantity::from_units(10)),
            (gpu.to_owned(), Quantity::from_units(1)),
            ("cpu".to_owned(), Quantity::from_units(1)),
        ]);
        let gone: Node =
            serde_json::from_value(json!({"status": {"allocatable": {gpu: "0"}}})).expect("a node");
        let no_gpus = Amounts::from([("pods".to_owned(), Quantity::from_units(10))]);
        let wants = |claimed: &[&str]| -> Pod {
            let container = |name: &str| json!({"name": name, "resources": {"requests": {gpu: "1"}, "limits": {gpu: "1"}}});
            let mapping = |name: &&str| json!({"containerName": name, "resourceName": gpu, "requestName": "r"});
            let mappings: Vec<Value> = claimed.iter().map(mapping).collect();
            let mut pod = json!({"spec": {"containers": [container("a")], "initContainers": [container("i")]}});
            if !claimed.is_empty() {
                pod["status"] = json!({"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": mappings}});
            }
            serde_json::from_value(pod).expect("a pod")
        };
        let (plain, half, claimed) = (wants(&[]), wants(&["a"]), wants(&["a", "i"]));
        let fits = |pod: &Pod, others: &[&Pod], node_state: &NodeState<'_>| {
            check_resources(pod, &used(others.iter().copied()), node_state.resources()).is_ok()
        };
        let (with_plugin, without) = (
            node_state(&amounts, None),
            node_state(&no_gpus, Some(&gone)),
        );
        for (pod, others, with, without_plugin) in [
            (&plain, vec![], true, false),
            (&claimed, vec![], true, true),
            // A device plugin provides the init container's resource.
            (&half, vec![], true, false),
            (&plain, vec![&claimed, &claimed], true, false),
            (&plain, vec![&half], false, false),
            (&claimed, vec![&plain], true, true),
        ] {
            assert_eq!(fits(pod, &others, &with_plugin), with, "{pod:?}");
            assert_eq!(fits(pod, &others, &without), without_plugin, "{pod:?}");
        }
        assert_eq!(resources_of(&claimed).get(gpu), None);
    }

    #[test]
    fn rejections_name_the_insufficient_resource() {
        let node: Node =
            serde_json::from_value(json!({"metadata": {"labels": {"a": "1"}}, "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}}))
                .expect("a node");
        let allocatable = |cpu: &str, pods: &str| {
            Amounts::from([
                ("cpu".into(), cpu.parse().expect("q")),
                ("pods".into(), pods.parse().expect("q")),
            ])
        };
        let other = pod(json!({}));
        let free = pod(json!({"spec": {"containers": [{"name": "c"}]}}));
        let big = allocatable("4", "10");
        let cases = [
            (
                pod(json!({})),
                vec![],
                allocatable("100m", "10"),
                None,
                Some((
                    "OutOfcpu",
                    "Node didn't have enough resource: cpu, requested: 500, used: 0, capacity: 100",
                )),
            ),
            (
                pod(json!({})),
                vec![&other],
                allocatable("4", "1"),
                None,
                Some(("OutOfpods", "requested: 1, used: 1, capacity: 1")),
            ),
            (
                pod(json!({})),
                vec![&other],
                big.clone(),
                None,
                Some(("NodePorts", "free ports")),
            ),
            (
                pod(json!({"spec": {"nodeSelector": {"a": "2"}}})),
                vec![],
                big.clone(),
                Some(&node),
                Some(("NodeAffinity", "affinity")),
            ),
            (
                pod(json!({})),
                vec![],
                big.clone(),
                Some(&node),
                Some(("TaintToleration", "taints")),
            ),
            (
                pod(json!({"spec": {"tolerations": [{"operator": "Exists"}]}})),
                vec![&free],
                big.clone(),
                Some(&node),
                None,
            ),
            (
                pod(json!({"spec": {"os": {"name": "windows"}}})),
                vec![],
                big.clone(),
                None,
                Some(("PodOSNotSupported", "OS field")),
            ),
            (
                pod(json!({"spec": {"nodeSelector": {"kubernetes.io/os": "windows"}}})),
                vec![],
                big.clone(),
                None,
                Some(("PodOSSelectorNodeLabelDoesNotMatch", "label doesn't match")),
            ),
            (
                pod(json!({"spec": {"securityContext": {"supplementalGroupsPolicy": "Strict"}}})),
                vec![],
                big.clone(),
                None,
                Some(("SupplementalGroupsPolicyNotSupported", "Strict")),
            ),
            (
                pod(
                    json!({"spec": {"securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}}}),
                ),
                vec![],
                big.clone(),
                None,
                Some(("AppArmor", "not enabled on the host")),
            ),
            (
                pod(
                    json!({"spec": {"securityContext": {"sysctls": [{"name": "vm.swappiness", "value": "1"}]}}}),
                ),
                vec![],
                big.clone(),
                None,
                Some(("SysctlForbidden", "\"vm.swappiness\" not allowlisted")),
            ),
        ];
        for (pod, others, allocatable, node, expected) in cases {
            let node_state = node_state(&allocatable, node);
            let result = admit(&pod, &used(others), &node_state);
            match expected {
                None => assert_eq!(result, Ok(())),
                Some((reason, text)) => {
                    let refusal = result.expect_err(reason);
                    assert!(
                        refusal.reason == reason && refusal.message.contains(text),
                        "{refusal:?}"
                    );
                }
            }
        }
    }
}
