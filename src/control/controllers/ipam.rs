//! The node IPAM controller: gives each Node a pod range of the cluster's range (`pkg/controller/nodeipam`).
//! `core::node::pod_ranges` decides. Ranges that a Node has are never changed; the ranges of a deleted Node are released.

use std::sync::{Arc, Mutex};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::runtime::{Keys, Next};
use super::{Caches, event, is_stale};
use holdfast_core::lock::lock;
use holdfast_core::node::pod_ranges::PodRanges;
use holdfast_core::node::routes::pod_ranges;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::failure::chain;

/// Number of concurrent writes.
const WORKERS: usize = 4;

/// The name of a Node that was created, deleted or replaced, or whose ranges have changed.
fn node_to_check(before: Option<&Node>, after: Option<&Node>) -> Option<String> {
    let identity = |node: &Node| (node.uid(), pod_ranges(node));
    (before.map(identity) != after.map(identity))
        .then(|| after.or(before).map(|node| node.name_any()))
        .flatten()
}

/// The patch that gives a Node its ranges. It applies only to the version that had none.
fn patch(node: &Node, ranges: &[IpNet]) -> Value {
    let all: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    json!({"metadata": {"resourceVersion": node.metadata.resource_version, "uid": node.metadata.uid},
        "spec": {"podCIDR": all.first(), "podCIDRs": all}})
}

/// Assigns a range to a Node without one. Returns what to do next, and the nodes that wait for a released range.
async fn reconcile(
    client: &Client,
    caches: &Caches,
    ranges: &Mutex<PodRanges>,
    name: &str,
) -> (Next, Vec<String>) {
    let Some(node) = caches.nodes.get("", name) else {
        return (Next::Done, lock(ranges).remove(name));
    };
    let present = pod_ranges(&node);
    if !present.is_empty() {
        lock(ranges).observe(name, &present);
        return (Next::Done, vec![]);
    }
    let assigned = lock(ranges).assign(name);
    let next = match assigned {
        Ok(assigned) => {
            let api: Api<Node> = Api::all(client.clone());
            let patch = Patch::Merge(patch(&node, &assigned));
            match api.patch(name, &PatchParams::default(), &patch).await {
                Ok(_) => Next::Done,
                Err(error) => {
                    if !is_stale(&error) {
                        tracing::warn!(error = %chain(&error), node = name, "writing a node's pod range failed, retrying");
                    }
                    Next::Retry
                }
            }
        }
        // The release of a range queues the node again.
        Err(exhausted) => {
            let message = format!("Node {name} has no pod range: {exhausted}");
            tracing::warn!(node = name, "{message}");
            let reason = "CIDRNotAvailable";
            event(
                client,
                &*node,
                "Node",
                "v1",
                "cidrAllocator",
                reason,
                message,
            )
            .await;
            Next::Done
        }
    };
    (next, vec![])
}

/// Runs until the process exits.
pub(super) async fn run(client: Client, caches: Caches, mut ranges: PodRanges) {
    // All existing ranges are known before the first one is assigned.
    for node in caches.nodes.list() {
        ranges.observe(&node.name_any(), &pod_ranges(&node));
    }
    let (keys, ranges) = (Keys::new(), Arc::new(Mutex::new(ranges)));
    keys.watch(&caches.nodes, node_to_check);
    keys.work(WORKERS, |name: String| {
        let (client, caches, keys, ranges) = (&client, &caches, &keys, &ranges);
        async move {
            let (next, waiting) = reconcile(client, caches, ranges, &name).await;
            for node in waiting {
                keys.add(node);
            }
            next
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(uid: &str, spec: Value, revision: &str) -> Node {
        serde_json::from_value(json!({"metadata": {"name": "n", "uid": uid, "resourceVersion": revision}, "spec": spec}))
            .expect("a Node")
    }

    #[test]
    fn only_changes_of_existence_and_ranges_are_reasons() {
        let range = json!({"podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24"]});
        let (plain, same, with) = (
            node("u", json!({}), "1"),
            node("u", json!({"unschedulable": true}), "2"),
            node("u", range.clone(), "3"),
        );
        let again = node("v", json!({}), "4");
        for (before, after, expected) in [
            (None, Some(&plain), true),
            (Some(&plain), Some(&same), false),
            (Some(&same), Some(&with), true),
            (Some(&plain), Some(&again), true),
            (Some(&with), None, true),
            (None, None, false),
        ] {
            let key = node_to_check(before, after);
            assert_eq!(key.as_deref(), expected.then_some("n"));
        }
        let all = ["10.244.0.0/24", "fd00::/64"].map(|r| r.parse().expect("a range"));
        assert_eq!(
            patch(&plain, &all),
            json!({"metadata": {"resourceVersion": "1", "uid": "u"}, "spec": {"podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24", "fd00::/64"]}})
        );
    }
}
