//! From policies, pods and namespaces to the rules of a node's pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::networking::v1::{NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::facts::{Key, PodFacts, Policy, World};
use super::{Chain, Direction, Members, Ports, Rule, Ruleset, blocks};
use crate::network::{Family, Protocol};
use crate::{digest, selector};

/// A name of at most 40 characters; equal parts give equal names.
fn name(prefix: &str, parts: &[&str]) -> String {
    // Lengths separate the parts, so that ("ab", "c") and ("a", "bc") differ.
    let text: String = parts.iter().map(|p| format!("{}:{p}", p.len())).collect();
    let digest = digest::sha256(text.as_bytes());
    format!("{prefix}-{}", digest.get(..32).unwrap_or(&digest))
}

/// The pods that a peer selects.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Selection {
    /// The policy's namespace if only its pods count.
    own: Option<String>,
    /// The selector of namespaces and that of pods, as JSON: an order of selectors, which have none.
    selectors: [String; 2],
}

/// Plans the rules of one node.
struct Planner<'a> {
    world: &'a World,
    ruleset: Ruleset,
    /// The pods of each selection, so that each is computed once.
    selected: BTreeMap<Selection, Vec<&'a PodFacts>>,
}

impl World {
    /// The rules of the node's pods.
    #[must_use]
    pub fn ruleset(&self) -> Ruleset {
        ruleset(self)
    }
}

fn ruleset(world: &World) -> Ruleset {
    let mut planner = Planner {
        world,
        ruleset: Ruleset::default(),
        selected: BTreeMap::new(),
    };
    for direction in Direction::BOTH {
        planner.restrict(direction);
    }
    planner.ruleset
}

impl<'a> Planner<'a> {
    /// Plans the chains of all restricted pods of the node.
    fn restrict(&mut self, direction: Direction) {
        let mut in_namespace: BTreeMap<&str, Vec<(&Key, &Policy)>> = BTreeMap::new();
        for (key, policy) in &self.world.policies {
            if policy.restricts(direction) {
                in_namespace.entry(&key.0).or_default().push((key, policy));
            }
        }
        if in_namespace.is_empty() {
            return;
        }
        let world = self.world;
        for ((namespace, _), pod) in &world.pods {
            let Some(policies) = in_namespace.get(namespace.as_str()) else {
                continue;
            };
            if !pod.is_local || pod.addresses.is_empty() {
                continue;
            }
            let selects = |policy: &Policy| match &policy.0.pod_selector {
                Some(selector) => selector::matches(selector, &pod.labels),
                None => true,
            };
            let chains: Vec<String> = policies
                .iter()
                .filter(|(_, policy)| selects(policy))
                .map(|(key, policy)| self.policy_chain(direction, key, policy, pod))
                .collect();
            if chains.is_empty() {
                continue;
            }
            let chain = self.pod_chain(direction, &chains);
            for address in &pod.addresses {
                self.ruleset
                    .pods
                    .insert((direction, *address), chain.clone());
            }
        }
    }

    /// The chain of the pods with these policies.
    fn pod_chain(&mut self, direction: Direction, policies: &[String]) -> String {
        let parts: Vec<&str> = policies.iter().map(String::as_str).collect();
        let name = name("pod", &parts);
        self.ruleset.chains.entry(name.clone()).or_insert_with(|| {
            let jumps = policies.iter().cloned().map(Rule::Jump);
            Chain {
                direction,
                policy: String::new(),
                rules: jumps.chain([Rule::Drop]).collect(),
            }
        });
        name
    }

    /// The chain of a policy for a pod. Pods whose named ports have the same numbers share it.
    fn policy_chain(
        &mut self,
        direction: Direction,
        key: &Key,
        policy: &Policy,
        pod: &PodFacts,
    ) -> String {
        let resolved = match direction {
            Direction::Ingress => resolution(policy, pod),
            Direction::Egress => String::new(),
        };
        let kind = match direction {
            Direction::Ingress => "in",
            Direction::Egress => "out",
        };
        let name = name(kind, &[&key.0, &key.1, &resolved]);
        if !self.ruleset.chains.contains_key(&name) {
            let mut rules = vec![];
            match direction {
                Direction::Ingress => {
                    for rule in policy.0.ingress.iter().flatten() {
                        let (peers, ports) = (rule.from.as_deref(), rule.ports.as_deref());
                        self.allow_from(
                            &key.0,
                            peers.unwrap_or_default(),
                            ports.unwrap_or_default(),
                            pod,
                            &mut rules,
                        );
                    }
                }
                Direction::Egress => {
                    for rule in policy.0.egress.iter().flatten() {
                        let (peers, ports) = (rule.to.as_deref(), rule.ports.as_deref());
                        self.allow_to(
                            &key.0,
                            peers.unwrap_or_default(),
                            ports.unwrap_or_default(),
                            &mut rules,
                        );
                    }
                }
            }
            let policy = format!("{}/{}", key.0, key.1);
            self.ruleset.chains.insert(
                name.clone(),
                Chain {
                    direction,
                    policy,
                    rules,
                },
            );
        }
        name
    }

    /// Allows the peers of an ingress rule.
    fn allow_from(
        &mut self,
        namespace: &str,
        peers: &[NetworkPolicyPeer],
        ports: &[NetworkPolicyPort],
        pod: &PodFacts,
        rules: &mut Vec<Rule>,
    ) {
        let resolve = |port: &NetworkPolicyPort| match (&port.port, numbers(port)) {
            (Some(IntOrString::String(name)), _) => named(pod, name, port),
            (_, ports) => ports.into_iter().collect(),
        };
        let resolved: Vec<Ports> = ports.iter().flat_map(resolve).collect();
        if !ports.is_empty() && resolved.is_empty() {
            return;
        }
        let ports = self.ports(resolved);
        self.allow(namespace, peers, ports.as_deref(), rules);
    }

    /// Allows the peers of an egress rule. A named port is that of the peer.
    fn allow_to(
        &mut self,
        namespace: &str,
        peers: &[NetworkPolicyPeer],
        ports: &[NetworkPolicyPort],
        rules: &mut Vec<Rule>,
    ) {
        let plain: Vec<Ports> = ports.iter().filter_map(numbers).collect();
        if ports.is_empty() || !plain.is_empty() {
            let set = self.ports(plain);
            self.allow(namespace, peers, set.as_deref(), rules);
        }
        for port in ports {
            if let Some(IntOrString::String(name)) = &port.port {
                self.allow_named(namespace, peers, name, port, rules);
            }
        }
    }

    /// Allows a named port of the pods among the peers. Pods with the same number share a rule.
    fn allow_named(
        &mut self,
        namespace: &str,
        peers: &[NetworkPolicyPeer],
        port_name: &str,
        port: &NetworkPolicyPort,
        rules: &mut Vec<Rule>,
    ) {
        let everywhere = NetworkPolicyPeer {
            namespace_selector: Some(LabelSelector::default()),
            ..NetworkPolicyPeer::default()
        };
        let all = [everywhere];
        for peer in if peers.is_empty() { &all } else { peers } {
            let Some(selection) = selection(namespace, peer) else {
                continue;
            };
            let mut by_port: BTreeMap<Ports, BTreeSet<IpAddr>> = BTreeMap::new();
            for pod in self.select(&selection, peer) {
                for ports in named(pod, port_name, port) {
                    by_port.entry(ports).or_default().extend(&pod.addresses);
                }
            }
            for (ports, addresses) in by_port {
                let number = format!("{}/{}", ports.protocol.name(), ports.first);
                let set = self.ports(vec![ports]);
                self.allow_pods(
                    &selection,
                    &[port_name, &number],
                    &addresses,
                    set.as_deref(),
                    rules,
                );
            }
        }
    }

    /// Allows peers with a set of ports, `None` for all protocols and ports.
    fn allow(
        &mut self,
        namespace: &str,
        peers: &[NetworkPolicyPeer],
        ports: Option<&str>,
        rules: &mut Vec<Rule>,
    ) {
        if peers.is_empty() {
            rules.push(Rule::Allow {
                peers: None,
                ports: ports.map(str::to_owned),
            });
            return;
        }
        let mut ranges = BTreeMap::from(Family::ALL.map(|family| (family, vec![])));
        for peer in peers {
            if let Some(block) = &peer.ip_block {
                let except = block.except.as_deref().unwrap_or_default();
                // The API rejects invalid blocks; they allow nothing.
                if let Some((family, more)) = blocks::block(&block.cidr, except) {
                    ranges.entry(family).or_default().extend(more);
                }
            } else if let Some(selection) = selection(namespace, peer) {
                let addresses = self
                    .select(&selection, peer)
                    .iter()
                    .flat_map(|pod| &pod.addresses)
                    .copied()
                    .collect();
                self.allow_pods(&selection, &[], &addresses, ports, rules);
            }
        }
        for (family, ranges) in ranges {
            let ranges = blocks::addresses(family, ranges);
            if ranges.is_empty() {
                continue;
            }
            let text = format!("{ranges:?}");
            let set = name("blocks", &[&text]);
            self.ruleset
                .sets
                .insert(set.clone(), Members::Blocks(family, ranges));
            rules.push(Rule::Allow {
                peers: Some((family, set)),
                ports: ports.map(str::to_owned),
            });
        }
    }

    /// Allows pods of a selection. `which` distinguishes parts of the selection.
    fn allow_pods(
        &mut self,
        selection: &Selection,
        which: &[&str],
        addresses: &BTreeSet<IpAddr>,
        ports: Option<&str>,
        rules: &mut Vec<Rule>,
    ) {
        for family in Family::ALL {
            let of_family = addresses
                .iter()
                .filter(|a| Family::of(**a) == family)
                .copied()
                .collect();
            let own = selection
                .own
                .as_ref()
                .map_or_else(String::new, |own| format!("in {own}"));
            let [namespaces, pods] = &selection.selectors;
            let mut parts = vec![own.as_str(), namespaces, pods];
            parts.extend(which);
            let prefix = match family {
                Family::V4 => "pods4",
                Family::V6 => "pods6",
            };
            let set = name(prefix, &parts);
            self.ruleset
                .sets
                .insert(set.clone(), Members::Pods(family, of_family));
            rules.push(Rule::Allow {
                peers: Some((family, set)),
                ports: ports.map(str::to_owned),
            });
        }
    }

    /// The set of these ports; `None` without ports, which allows all.
    fn ports(&mut self, ports: Vec<Ports>) -> Option<String> {
        if ports.is_empty() {
            return None;
        }
        let ports = blocks::ports(ports);
        let text = format!("{ports:?}");
        let set = name("ports", &[&text]);
        self.ruleset.sets.insert(set.clone(), Members::Ports(ports));
        Some(set)
    }

    /// The pods of a selection.
    fn select(&mut self, selection: &Selection, peer: &NetworkPolicyPeer) -> Vec<&'a PodFacts> {
        if let Some(pods) = self.selected.get(selection) {
            return pods.clone();
        }
        let world = self.world;
        let in_namespace = |namespace: &str| match (&selection.own, &peer.namespace_selector) {
            (Some(own), _) => own == namespace,
            (None, Some(selector)) => world
                .namespaces
                .get(namespace)
                .is_some_and(|labels| selector::matches(selector, labels)),
            (None, None) => false,
        };
        let namespaces: BTreeSet<&str> = world
            .pods
            .keys()
            .map(|(namespace, _)| namespace.as_str())
            .collect();
        let namespaces: BTreeSet<&str> =
            namespaces.into_iter().filter(|n| in_namespace(n)).collect();
        let is_selected = |pod: &PodFacts| {
            peer.pod_selector
                .as_ref()
                .is_none_or(|s| selector::matches(s, &pod.labels))
        };
        let pods: Vec<&PodFacts> = world
            .pods
            .iter()
            .filter(|((namespace, _), pod)| {
                namespaces.contains(namespace.as_str()) && is_selected(pod)
            })
            .map(|(_, pod)| pod)
            .collect();
        self.selected.insert(selection.clone(), pods.clone());
        pods
    }
}

/// What a peer selects; `None` for a peer that selects no pods.
fn selection(namespace: &str, peer: &NetworkPolicyPeer) -> Option<Selection> {
    if peer.namespace_selector.is_none() && peer.pod_selector.is_none() {
        return None;
    }
    let text = |selector: &Option<LabelSelector>| {
        // Selectors have no values that JSON lacks.
        selector.as_ref().map_or_else(String::new, |s| {
            serde_json::to_string(s).unwrap_or_default()
        })
    };
    let own = peer
        .namespace_selector
        .is_none()
        .then(|| namespace.to_owned());
    Some(Selection {
        own,
        selectors: [text(&peer.namespace_selector), text(&peer.pod_selector)],
    })
}

/// The ports of an entry with a number, or with a protocol only; `None` for names and for values that the API rejects.
fn numbers(port: &NetworkPolicyPort) -> Option<Ports> {
    let protocol = Protocol::parse(port.protocol.as_deref())?;
    let (first, last) = match &port.port {
        None => (0, u16::MAX),
        Some(IntOrString::Int(number)) => {
            let first = u16::try_from(*number).ok()?;
            let last = port
                .end_port
                .map_or(Some(first), |end| u16::try_from(end).ok())?;
            (first, last)
        }
        Some(IntOrString::String(_)) => return None,
    };
    (first <= last).then_some(Ports {
        protocol,
        first,
        last,
    })
}

/// The numbers of a pod's named port with the protocol of an entry.
fn named(pod: &PodFacts, name: &str, port: &NetworkPolicyPort) -> Vec<Ports> {
    let Some(wanted) = Protocol::parse(port.protocol.as_deref()) else {
        return vec![];
    };
    let all = pod.ports.get(name).into_iter().flatten();
    let of_protocol = all.filter(|(protocol, _)| *protocol == wanted);
    of_protocol
        .map(|(protocol, number)| Ports {
            protocol: *protocol,
            first: *number,
            last: *number,
        })
        .collect()
}

/// The numbers that the named ports of a policy's ingress rules have in a pod, as a text to compare.
fn resolution(policy: &Policy, pod: &PodFacts) -> String {
    let ports = policy
        .0
        .ingress
        .iter()
        .flatten()
        .flat_map(|rule| rule.ports.iter().flatten());
    let mut text = String::new();
    for port in ports {
        if let Some(IntOrString::String(name)) = &port.port {
            text.push_str(&format!("{:?};", named(pod, name, port)));
        }
    }
    text
}
