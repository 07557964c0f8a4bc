//! The addresses in a pod's status. Pure.

use super::Facts;
use crate::pod;
use crate::pod::addresses::pod_ips;

/// The node's addresses. If none are known, as after a start without network, those of the previous status.
pub(super) fn node_addresses(facts: &Facts<'_>) -> Vec<String> {
    if !facts.node_ips.is_empty() {
        return facts.node_ips.to_vec();
    }
    let before = facts.previous.host_ips.iter().flatten();
    before.map(|known| known.ip.clone()).collect()
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
