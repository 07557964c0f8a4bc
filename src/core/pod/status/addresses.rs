//! The addresses in a pod's status. Pure.

use super::Facts;
use crate::core::pod;

/// The node's addresses. If none are known, as after a start without network, those of the previous status.
pub(super) fn node_addresses(facts: &Facts<'_>) -> Vec<String> {
    if !facts.node_ips.is_empty() {
        return facts.node_ips.to_vec();
    }
    let before = facts.previous.host_ips.iter().flatten();
    before.map(|known| known.ip.clone()).collect()
}

/// The sandbox's addresses in a pod's status: one of each family, that of the node's family first. An apiserver rejects
/// two addresses of one family (`ValidatePodStatusUpdate` in `pkg/apis/core/validation/validation.go`).
#[must_use]
pub fn pod_ips(of_sandbox: &[String], node_ips: &[String]) -> Vec<String> {
    let is_v6 = |ip: &String| ip.contains(':');
    let first = node_ips.first().is_some_and(is_v6);
    let of = |family| of_sandbox.iter().find(|ip| is_v6(ip) == family);
    of(first).into_iter().chain(of(!first)).cloned().collect()
}

/// The pod's addresses: the node's on the host network, else the sandbox's. If the sandbox has none, those of the
/// previous status.
pub(super) fn addresses(facts: &Facts<'_>) -> Vec<String> {
    if pod::host_network(facts.pod) {
        return node_addresses(facts);
    }
    let sandbox = facts.observed.sandboxes.first();
    let ips = sandbox.map_or_else(Vec::new, |s| pod_ips(&s.ips, facts.node_ips));
    if !ips.is_empty() {
        return ips;
    }
    let before = facts.previous.pod_ips.iter().flatten();
    before.map(|i| i.ip.clone()).collect()
}
