//! The task that lets the network's configuration follow the Node's pod range. A Node gets another range if it was deleted and
//! created again. `core::node::pod_network` decides; while pods have addresses of the earlier range, the Node gets an event.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use super::OwnNode;
use crate::events::{Events, Kind};
use holdfast_core::node::pod_network::{Facts, Step, ipv4_range, next_step};
use holdfast_host::pod_network::PodNetwork;
use holdfast_host::{HostError, blocking};

/// The reason of the event about a blocked change.
const REASON: &str = "PodRangeNotApplied";
/// Interval of the checks while the network differs from the Node's range, and once after a change, because a pod may have started
/// meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Pause between two steps of one change.
const STEP_PAUSE: Duration = Duration::from_millis(10);

/// The network on this machine.
#[async_trait]
pub(super) trait Network: Send + Sync {
    /// Reads the network's state.
    async fn facts(&self) -> Result<Facts, HostError>;
    /// Executes a step.
    async fn execute(&self, step: Step) -> Result<(), HostError>;
}

#[async_trait]
impl Network for PodNetwork {
    async fn facts(&self) -> Result<Facts, HostError> {
        let network = self.clone();
        blocking(move || Ok(PodNetwork::facts(&network)?)).await
    }

    async fn execute(&self, step: Step) -> Result<(), HostError> {
        let network = self.clone();
        let work = move || match step {
            Step::Write(range) => Ok(network.write(range)?),
            Step::RemoveGateways(addresses) => Ok(network.remove_gateways(&addresses)?),
            Step::Settled | Step::Blocked { .. } => Ok(()),
        };
        blocking(work).await
    }
}

/// What the task uses.
pub(crate) struct Parts {
    /// `None` if another program writes the configuration.
    pub network: Option<PodNetwork>,
    pub node: Arc<OwnNode>,
    pub events: Events,
    pub name: String,
}

/// Runs until the process exits, if the agent writes the configuration.
pub(super) async fn run(parts: &Parts) {
    if let Some(network) = &parts.network {
        let emit = |message: String| {
            tracing::warn!(message, "the network does not have the Node's pod range");
            let (name, kind) = (&parts.name, Kind::Warning);
            parts.events.node(name, kind, REASON, message);
        };
        keep(network, parts.node.subscribe(), emit).await;
    }
}

/// The text of the event.
fn blocked(wanted: Ipv4Net, address: IpAddr, leases: usize) -> String {
    format!(
        "spec.podCIDR of the Node is {wanted}, and {leases} pods of it have other addresses, such as {address}, to which other nodes have no route; delete these pods, or run `holdfast down` and `holdfast join` on the node: its network follows when no pod has an address"
    )
}

/// Remembers problems, so that each is reported once.
#[derive(Default)]
struct Reported {
    /// The range of the last event.
    range: Option<Ipv4Net>,
    /// The last failure.
    failure: Option<String>,
}

impl Reported {
    fn log(&mut self, error: &HostError) {
        let text = error.to_string();
        if self.failure.as_ref() != Some(&text) {
            tracing::warn!(%error, "changing the network to the Node's pod range failed; retrying");
            self.failure = Some(text);
        }
    }
}

/// Keeps the configuration until the channel of the Node is closed. `emit` is called when pods block a change.
async fn keep(
    network: &dyn Network,
    mut node: watch::Receiver<Option<Arc<Node>>>,
    emit: impl Fn(String),
) {
    let (mut reported, mut has_changed) = (Reported::default(), false);
    loop {
        let wanted = node.borrow_and_update().as_deref().and_then(ipv4_range);
        let decided = network.facts().await.map(|facts| next_step(wanted, &facts));
        let pause = match decided {
            Ok(Step::Settled) => {
                reported = Reported::default();
                std::mem::take(&mut has_changed).then_some(CHECK_INTERVAL)
            }
            Ok(Step::Blocked {
                wanted,
                address,
                leases,
            }) => {
                // The number of pods changes, and the reason stays.
                if reported.range.replace(wanted) != Some(wanted) {
                    emit(blocked(wanted, address, leases));
                }
                Some(CHECK_INTERVAL)
            }
            Ok(step) => {
                tracing::info!(?step, "changing the network to the Node's pod range");
                let executed = network.execute(step).await;
                has_changed |= executed.is_ok();
                Some(executed.map_or_else(
                    |error| {
                        reported.log(&error);
                        CHECK_INTERVAL
                    },
                    |()| STEP_PAUSE,
                ))
            }
            Err(error) => {
                reported.log(&error);
                Some(CHECK_INTERVAL)
            }
        };
        tokio::select! {
            biased;
            changed = node.changed() => if changed.is_err() {
                return;
            },
            () = tokio::time::sleep(pause.unwrap_or_default()), if pause.is_some() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use holdfast_core::lock::lock;
    use serde_json::json;

    use super::*;

    /// A network whose state the steps change. `failures` steps fail.
    #[derive(Default)]
    struct Fake {
        facts: Facts,
        failures: usize,
        steps: Vec<Step>,
    }

    #[async_trait]
    impl Network for Mutex<Fake> {
        async fn facts(&self) -> Result<Facts, HostError> {
            Ok(lock(self).facts.clone())
        }

        async fn execute(&self, step: Step) -> Result<(), HostError> {
            let mut fake = lock(self);
            if fake.failures > 0 {
                fake.failures -= 1;
                return Err("the disk is full".into());
            }
            match &step {
                Step::Write(range) => fake.facts.configured = Some(*range),
                Step::RemoveGateways(_) => fake.facts.gateways.clear(),
                other => panic!("{other:?} has no effect"),
            }
            fake.steps.push(step);
            Ok(())
        }
    }

    fn node(range: &str) -> Option<Arc<Node>> {
        let node = json!({"metadata": {"name": "n"}, "spec": {"podCIDR": range}});
        Some(Arc::new(serde_json::from_value(node).expect("a Node")))
    }

    #[tokio::test(start_paused = true)]
    async fn the_network_follows_the_node_when_no_pod_has_an_address() {
        let (network, events) = (Mutex::new(Fake::default()), Mutex::new(vec![]));
        let (nodes, seen) = watch::channel(None);
        let emit = |message| lock(&events).push(message);
        let wait = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
        let configured = || {
            lock(&network)
                .facts
                .configured
                .map(|range| range.to_string())
        };
        let story = async {
            wait(100).await;
            assert_eq!(configured(), None, "no range is assigned");
            lock(&network).failures = 2;
            nodes.send_replace(node("10.244.1.0/24"));
            wait(11).await;
            assert_eq!(configured().as_deref(), Some("10.244.1.0/24"));

            // The Node is another one, while pods run.
            let address = "10.244.1.2".parse().expect("an address");
            let gateway = "10.244.1.1/24".parse().expect("an address");
            lock(&network).facts.leases.push(address);
            lock(&network).facts.gateways.push(gateway);
            nodes.send_replace(node("10.244.3.0/24"));
            wait(103).await;
            assert_eq!(configured().as_deref(), Some("10.244.1.0/24"));
            assert_eq!(lock(&events).len(), 1, "{events:?}");
            lock(&network).facts.leases.clear();
            wait(6).await;
            assert_eq!(configured().as_deref(), Some("10.244.3.0/24"));
            let last = lock(&network).steps.pop();
            assert_eq!(last, Some(Step::RemoveGateways(vec![gateway])));

            // A pod that started during the change is noticed, and its end, too.
            lock(&network).facts.leases.push(address);
            wait(6).await;
            assert_eq!(lock(&events).len(), 2, "{events:?}");
            drop(nodes);
        };
        tokio::join!(keep(&network, seen, emit), story);
        let message = lock(&events).remove(0);
        for part in ["10.244.3.0/24", "10.244.1.2", "holdfast join"] {
            assert!(message.contains(part), "{message}");
        }
    }
}
