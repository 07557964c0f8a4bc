//! Which endpoints a port uses: `CategorizeEndpoints` and `topologyModeFromHints` in `pkg/proxy/topology.go`.

use super::endpoints::{EndpointFacts, PortEndpoint};
use super::node::NodeFacts;
use super::rules::Target;

/// The policies of a port on which the choice of endpoints depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Policies {
    /// `internalTrafficPolicy: Local`.
    pub is_internal_local: bool,
    /// `externalTrafficPolicy: Local`.
    pub is_external_local: bool,
    /// Whether the port accepts connections from outside of the cluster.
    pub is_external: bool,
}

impl Policies {
    /// Also with the external policy Local, pods and this node reach all endpoints through external addresses.
    fn uses_cluster(self) -> bool {
        !self.is_internal_local || self.is_external
    }

    fn uses_local(self) -> bool {
        self.is_internal_local || (self.is_external_local && self.is_external)
    }
}

/// The endpoints of a port, in the order of their targets.
#[derive(Debug, Default)]
pub(super) struct Chosen<'a> {
    /// The endpoints of the policy Cluster; empty if no traffic of the port has this policy.
    pub cluster: Vec<PortEndpoint<'a>>,
    /// The endpoints of the policy Local; empty if no traffic of the port has this policy.
    pub local: Vec<PortEndpoint<'a>>,
    /// Whether some node has a usable endpoint.
    pub has_any: bool,
}

/// By which hints endpoints are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    SameNode,
    SameZone,
    None,
}

fn node_hints(facts: &EndpointFacts) -> &[std::sync::Arc<str>] {
    facts.hints.as_deref().map_or(&[], |hints| &hints.nodes)
}

fn zone_hints(facts: &EndpointFacts) -> &[std::sync::Arc<str>] {
    facts.hints.as_deref().map_or(&[], |hints| &hints.zones)
}

fn has(names: &[std::sync::Arc<str>], wanted: &str) -> bool {
    names.iter().any(|name| name.as_ref() == wanted)
}

/// Hints count only if every ready endpoint has one, and one of them is for this node or zone: else some client would have no
/// endpoint.
fn mode(endpoints: &[PortEndpoint<'_>], node: &NodeFacts) -> Mode {
    let (mut all_nodes, mut all_zones) = (true, true);
    let (mut for_node, mut for_zone) = (false, false);
    for endpoint in endpoints.iter().filter(|e| e.facts.is_ready) {
        let (nodes, zones) = (node_hints(endpoint.facts), zone_hints(endpoint.facts));
        all_nodes &= !nodes.is_empty();
        all_zones &= !zones.is_empty();
        for_node |= has(nodes, &node.name);
        for_zone |= node.zone.as_deref().is_some_and(|zone| has(zones, zone));
    }
    match () {
        () if all_nodes && for_node => Mode::SameNode,
        () if all_zones && for_zone => Mode::SameZone,
        () => Mode::None,
    }
}

/// Chooses the endpoints of a port.
pub(super) fn choose<'a>(
    endpoints: &[PortEndpoint<'a>],
    policies: Policies,
    node: &NodeFacts,
) -> Chosen<'a> {
    let mut chosen = Chosen::default();
    let filter = |wanted: &dyn Fn(&EndpointFacts) -> bool| -> Vec<PortEndpoint<'a>> {
        let all = endpoints.iter().copied();
        all.filter(|e| wanted(e.facts)).collect()
    };
    // Terminating endpoints that still serve are better than none (KEP-1669).
    let is_last_resort = |facts: &EndpointFacts| facts.is_serving && facts.is_terminating;
    let is_local = |facts: &EndpointFacts| facts.node.as_deref() == Some(node.name.as_str());
    if policies.uses_cluster() {
        let zone = node.zone.as_deref().unwrap_or_default();
        let mode = mode(endpoints, node);
        chosen.cluster = filter(&|facts| {
            facts.is_ready
                && match mode {
                    Mode::SameNode => has(node_hints(facts), &node.name),
                    Mode::SameZone => has(zone_hints(facts), zone),
                    Mode::None => true,
                }
        });
        if chosen.cluster.is_empty() {
            chosen.cluster = filter(&is_last_resort);
        }
        chosen.has_any = !chosen.cluster.is_empty();
    }
    if policies.uses_local() {
        chosen.local = filter(&|facts| facts.is_ready && is_local(facts));
        if chosen.local.is_empty() {
            chosen.local = filter(&|facts| is_last_resort(facts) && is_local(facts));
        }
        chosen.has_any |= endpoints
            .iter()
            .any(|e| e.facts.is_ready || is_last_resort(e.facts));
    }
    chosen
}

/// The targets of endpoints.
pub(super) fn targets(endpoints: &[PortEndpoint<'_>]) -> Vec<Target> {
    endpoints.iter().map(|endpoint| endpoint.target).collect()
}
