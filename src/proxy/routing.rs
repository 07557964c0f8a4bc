//! The task that keeps the routes to the pods of other nodes.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher;

use holdfast_core::node::routes::Peer;
use holdfast_kubeapi::{Api, Cache};

use crate::config::Config;
use crate::routes::Routes;

/// The time between the arrival of a change and the next reading of all nodes: heartbeats change Nodes all the time.
const PAUSE: Duration = Duration::from_millis(200);

/// Keeps the routes. Returns only with an error.
pub(crate) async fn run(client: &kube::Client, config: &Config) -> Result<(), String> {
    let nodes = Cache::<Node>::start(Api::all(client.clone()), watcher::Config::default());
    let mut routes =
        Routes::open(&config.table).map_err(|e| format!("routes cannot be read: {e}"))?;
    let mut changes = nodes.changes();
    nodes.synced().await;
    let (mut applied, mut unrouted): (Option<Vec<Peer>>, _) = (None, vec![]);
    loop {
        changes.mark_unchanged();
        let peers: Vec<Peer> = nodes.list().iter().map(|node| Peer::of(node)).collect();
        let is_audit = applied.as_ref() == Some(&peers);
        // A few netlink calls, each of microseconds.
        match routes.apply(&config.node_name, &peers, &config.cluster_cidrs) {
            Ok(result) => {
                if result.changed > 0 {
                    tracing::info!(
                        changed = result.changed,
                        routes = result.routes,
                        is_audit,
                        "changed the routes to other nodes"
                    );
                }
                if result.unrouted != unrouted {
                    for node in &result.unrouted {
                        tracing::warn!(%node, "a node's pods cannot be reached");
                    }
                    unrouted = result.unrouted;
                }
                applied = Some(peers);
            }
            Err(error) => {
                tracing::warn!(%error, "changing the routes to other nodes failed; retrying");
                applied = None;
            }
        }
        // A change of ranges or addresses, or the next audit.
        let audit = tokio::time::sleep(config.audit_interval);
        tokio::pin!(audit);
        loop {
            tokio::select! {
                () = &mut audit => break,
                changed = changes.changed() => {
                    if changed.is_err() {
                        return Err("the watch of nodes ended".to_owned());
                    }
                    tokio::time::sleep(PAUSE).await;
                    changes.mark_unchanged();
                    let peers: Vec<Peer> = nodes.list().iter().map(|node| Peer::of(node)).collect();
                    if applied.as_ref() != Some(&peers) {
                        break;
                    }
                }
            }
        }
    }
}

/// Deletes the routes of this cluster.
pub(crate) fn remove(config: &Config) -> Result<(), String> {
    let removed = Routes::open(&config.table).and_then(|mut routes| routes.remove());
    removed
        .map(drop)
        .map_err(|e| format!("the routes to other nodes cannot be removed: {e}"))
}
