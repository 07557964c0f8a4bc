//! What the node's status says of volumes in use (kubelet spec, 9.2).

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::{Notify, watch};

/// How long a volume waits until the node's status says that it is in use, or that it is attached.
pub(super) const REPORTING: Duration = Duration::from_secs(10);

/// The volumes that the node's status says are in use, of those that still are, as nodes name them.
#[derive(Default)]
pub(super) struct Reported {
    names: watch::Sender<BTreeSet<String>>,
    changed: Notify,
}

impl Reported {
    /// The node's status says this now.
    pub(super) fn set(&self, now: BTreeSet<String>) {
        self.names.send_if_modified(|names| {
            let changed = *names != now;
            *names = now;
            changed
        });
    }

    /// Others are not in use any more. For the next pod they are reported anew: until then the controller may have given them
    /// to another node.
    pub(super) fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.names
            .send_modify(|names| names.retain(|name| keep(name)));
    }

    /// The status is to say something else than it does.
    pub(super) fn outdated(&self) {
        self.changed.notify_one();
    }

    /// Returns when that has been said.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Waits until the status says that a volume is in use.
    pub(super) async fn lists(&self, volume: &str) -> Result<(), String> {
        let mut names = self.names.subscribe();
        let says = names.wait_for(|names| names.contains(volume));
        match tokio::time::timeout(REPORTING, says).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(format!(
                "the node's status does not say yet that {volume} is in use"
            )),
        }
    }

    /// What it says, for tests.
    #[cfg(test)]
    pub(super) fn subscribe(&self) -> watch::Receiver<BTreeSet<String>> {
        self.names.subscribe()
    }
}
