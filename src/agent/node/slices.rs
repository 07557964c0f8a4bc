//! Deletes ResourceSlices of unavailable drivers, so that no pod is assigned devices that no driver can
//! prepare (KEP-4381; `pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go`). When the agent starts, all slices
//! of this node are deleted, as running drivers publish theirs again. Later, a driver's slices are deleted
//! after the driver was unreachable for [`GRACE`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::api::within;
use super::{ClaimManager, NodeApi, OwnNode};
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_kubeapi::pods::ApiFailure;

/// How long a driver may be unreachable, as in the kubelet: an upgrade of the driver may take as long.
const GRACE: Duration = Duration::from_secs(30);
/// Interval between checks of the drivers' sockets: a driver that is killed leaves its sockets behind.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Back-off after a failed deletion.
const RETRY: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(300));
/// Timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A scheduled deletion.
struct Deletion {
    at: Instant,
    retry: Doubling,
}

/// Scheduled deletions by driver; `None` stands for the slices of all drivers.
#[derive(Default)]
struct Deletions {
    due: BTreeMap<Option<String>, Deletion>,
    /// Drivers whose slices were deleted since they were last reachable.
    done: BTreeSet<String>,
}

impl Deletions {
    fn add(&mut self, driver: Option<String>, at: Instant) {
        self.due
            .entry(driver)
            .or_insert(Deletion { at, retry: RETRY });
    }

    /// Records whether a driver is reachable.
    fn record_reachability(&mut self, driver: &str, usable: bool, now: Instant) {
        if usable {
            self.done.remove(driver);
            self.due.remove(&Some(driver.to_owned()));
        } else if !self.done.contains(driver) {
            self.add(Some(driver.to_owned()), now + GRACE);
        }
    }

    /// Executes the deletions that are due.
    async fn execute_due(&mut self, api: &dyn NodeApi, node: &str) {
        let now = Instant::now();
        let mut done = vec![];
        for (driver, due) in self.due.iter_mut().filter(|(_, due)| due.at <= now) {
            let deleted = within(REQUEST_TIMEOUT, api.delete_slices(node, driver.as_deref())).await;
            match deleted {
                Ok(()) => {
                    tracing::debug!(?driver, "deleted ResourceSlices of this node");
                    done.push(driver.clone());
                }
                // The apiserver does not serve dynamic resource allocation.
                Err(ApiFailure::NotFound(_)) => done.push(driver.clone()),
                Err(error) => {
                    tracing::debug!(%error, ?driver, "deleting ResourceSlices failed; retrying");
                    due.at = Instant::now() + due.retry.pause();
                }
            }
        }
        for driver in done {
            self.due.remove(&driver);
            self.done.extend(driver);
        }
    }

    fn next(&self) -> Option<Duration> {
        let next = self.due.values().map(|due| due.at).min();
        next.map(|at| at.saturating_duration_since(Instant::now()))
    }
}

/// Runs until the process exits.
pub async fn run(config: Arc<Config>, node: Arc<OwnNode>, claims: Arc<ClaimManager>) {
    let Some(api) = node.api() else {
        return std::future::pending().await;
    };
    let _node = node.wait_until_present().await;
    let mut registered = claims.registered();
    let mut known = BTreeSet::new();
    let mut deletions = Deletions::default();
    deletions.add(None, Instant::now());
    loop {
        known.extend(registered.borrow_and_update().iter().cloned());
        for driver in &known {
            let usable = claims.is_usable(driver).await;
            deletions.record_reachability(driver, usable, Instant::now());
        }
        deletions.execute_due(&*api, &config.node_name).await;
        known.retain(|driver| {
            !deletions.done.contains(driver) || registered.borrow().contains(driver)
        });
        let probe_in = (!known.is_empty()).then_some(PROBE_INTERVAL);
        let wait = [probe_in, deletions.next()].into_iter().flatten().min();
        tokio::select! {
            biased;
            Ok(()) = registered.changed() => {}
            () = tokio::time::sleep(wait.unwrap_or(Duration::MAX)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slices_of_an_absent_driver_are_deleted_once() {
        let mut deletions = Deletions::default();
        let begin = Instant::now();
        let after = |seconds| begin + Duration::from_secs(seconds);
        let due = |deletions: &Deletions| deletions.due.values().map(|due| due.at).min();
        deletions.record_reachability("d", true, begin);
        assert_eq!(due(&deletions), None);
        deletions.record_reachability("d", false, after(1));
        deletions.record_reachability("d", false, after(11));
        assert_eq!(
            due(&deletions),
            Some(after(31)),
            "from when the driver disconnected"
        );
        deletions.record_reachability("d", true, after(21));
        assert_eq!(due(&deletions), None, "an upgrade");

        deletions.record_reachability("d", false, after(40));
        deletions.due.clear();
        deletions.done.insert("d".into());
        deletions.record_reachability("d", false, after(50));
        assert_eq!(due(&deletions), None, "the slices are already deleted");
        deletions.record_reachability("d", true, after(60));
        deletions.record_reachability("d", false, after(70));
        assert_eq!(
            due(&deletions),
            Some(after(100)),
            "the driver had registered again"
        );
    }
}
