//! What policies depend on: the relevant part of pods, namespaces and policies.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicySpec};

use super::Direction;
use crate::network::Protocol;

/// Namespace and name.
pub(super) type Key = (String, String);
/// Labels of an object.
pub(super) type Labels = BTreeMap<String, String>;

/// What policies depend on of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Its addresses; empty for pods on the host's network and for ended pods, whose addresses may belong to other pods.
    pub addresses: Vec<IpAddr>,
    /// Its labels.
    pub labels: Labels,
    /// The protocols and numbers of its named ports.
    pub ports: BTreeMap<String, Vec<(Protocol, u16)>>,
    /// Whether this node restricts its traffic.
    pub is_local: bool,
}

impl PodFacts {
    /// The facts of a pod, as the node `node` sees it.
    #[must_use]
    pub fn of(pod: &Pod, node: &str) -> PodFacts {
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let phase = status.and_then(|s| s.phase.as_deref());
        let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
        let on_host = spec.and_then(|s| s.host_network) == Some(true);
        let mut facts = PodFacts {
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            is_local: spec.and_then(|s| s.node_name.as_deref()) == Some(node),
            ..PodFacts::default()
        };
        if has_ended || on_host {
            return facts;
        }
        let several = status.and_then(|s| s.pod_ips.as_ref());
        let one = status.and_then(|s| s.pod_ip.as_ref());
        let texts = several.into_iter().flatten().map(|ip| &ip.ip).chain(one);
        facts.addresses = texts.filter_map(|text| text.parse().ok()).collect();
        facts.addresses.sort_unstable();
        facts.addresses.dedup();
        // A restartable init container is a sidecar, and its ports count (KEP-753).
        let sidecars = spec.and_then(|s| s.init_containers.as_ref());
        let sidecars = sidecars.into_iter().flatten();
        let sidecars = sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always"));
        let containers = spec.into_iter().flat_map(|s| &s.containers);
        for port in containers
            .chain(sidecars)
            .flat_map(|c| c.ports.iter().flatten())
        {
            let number = u16::try_from(port.container_port).ok();
            if let (Some(name), Some(number), Some(protocol)) = (
                &port.name,
                number,
                Protocol::parse(port.protocol.as_deref()),
            ) {
                facts
                    .ports
                    .entry(name.clone())
                    .or_default()
                    .push((protocol, number));
            }
        }
        facts
    }
}

/// A policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy(pub(super) NetworkPolicySpec);

impl Policy {
    /// The policy of an object. A missing spec selects all pods of the namespace and allows no ingress.
    #[must_use]
    pub fn of(object: &NetworkPolicy) -> Policy {
        Policy(object.spec.clone().unwrap_or_default())
    }

    /// Whether the policy restricts this direction. Without `policyTypes`, it always restricts ingress, and egress if it has
    /// egress rules.
    pub(super) fn restricts(&self, direction: Direction) -> bool {
        match &self.0.policy_types {
            Some(types) if !types.is_empty() => {
                let name = match direction {
                    Direction::Ingress => "Ingress",
                    Direction::Egress => "Egress",
                };
                types.iter().any(|t| t == name)
            }
            _ => match direction {
                Direction::Ingress => true,
                Direction::Egress => self
                    .0
                    .egress
                    .as_ref()
                    .is_some_and(|rules| !rules.is_empty()),
            },
        }
    }
}

/// All that the node's rules depend on.
#[derive(Debug, Clone, Default)]
pub struct World {
    pub(super) policies: BTreeMap<Key, Policy>,
    pub(super) pods: BTreeMap<Key, PodFacts>,
    pub(super) namespaces: BTreeMap<String, Labels>,
}

/// Sets or removes an entry. Returns whether that changed anything.
fn set<K: Ord, V: PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> bool {
    match value {
        Some(value) if map.get(&key) == Some(&value) => false,
        Some(value) => {
            map.insert(key, value);
            true
        }
        None => map.remove(&key).is_some(),
    }
}

impl World {
    /// Sets a policy, or removes a deleted one. Returns whether the ruleset may change.
    pub fn set_policy(&mut self, namespace: &str, name: &str, policy: Option<Policy>) -> bool {
        set(&mut self.policies, (namespace.into(), name.into()), policy)
    }

    /// Sets a pod, or removes a deleted one. Returns whether the ruleset may change. Besides pods of the API, the
    /// cluster's DNS server is a pod here, so that policies that allow traffic to its labels work as with a DNS server in pods.
    pub fn set_pod(&mut self, namespace: &str, name: &str, pod: Option<PodFacts>) -> bool {
        // Without policies, pods need no rules.
        set(&mut self.pods, (namespace.into(), name.into()), pod) && !self.policies.is_empty()
    }

    /// Sets the labels of a namespace, or removes a deleted one. Returns whether the ruleset may change.
    pub fn set_namespace(&mut self, name: &str, labels: Option<Labels>) -> bool {
        set(&mut self.namespaces, name.into(), labels) && !self.policies.is_empty()
    }
}
