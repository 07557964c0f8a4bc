//! Renews the node's Lease, which is the node's heartbeat (KEP-589). Waits for no other task.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use kube::ResourceExt as _;

use super::api::within;
use super::{OwnNode, deadline};
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_sys::clock::Clock;

/// Back-off after a failed renewal.
const PAUSES: Doubling = Doubling::new(Duration::from_millis(200), Duration::from_secs(7));

/// What the lease's renewal uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub clock: Clock,
    pub node: Arc<OwnNode>,
}

/// Renews the lease four times in its duration, while the Node object exists.
pub(super) async fn run(parts: &Parts) {
    let Some(api) = parts.node.api() else {
        return std::future::pending().await;
    };
    let duration = u64::try_from(parts.config.lease_seconds).unwrap_or(40);
    let period = Duration::from_secs(duration) / 4;
    let mut pauses = PAUSES;
    loop {
        let node = parts.node.wait_until_present().await;
        match within(deadline(&parts.config), api.renew(&lease(parts, &node))).await {
            Ok(()) => {
                pauses.reset();
                tokio::time::sleep(period).await;
            }
            Err(error) => {
                tracing::warn!(%error, "renewing the node's lease failed; retrying");
                tokio::time::sleep(pauses.pause()).await;
            }
        }
    }
}

fn lease(parts: &Parts, node: &Node) -> Lease {
    let name = &parts.config.node_name;
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
            lease_duration_seconds: Some(parts.config.lease_seconds),
            renew_time: Some(MicroTime(parts.clock.now())),
            ..LeaseSpec::default()
        }),
    }
}
