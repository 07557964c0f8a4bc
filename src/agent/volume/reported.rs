//! The volumes that the node's status reports in use (`pkg/kubelet/volumemanager/volume_manager.go`).

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::{Notify, watch};

/// How long a volume waits until the node's status reports it in use, or lists it as attached.
pub(super) const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// The unique names of volumes that are in use and that the node's status reports so.
#[derive(Default)]
pub(super) struct Reported {
    names: watch::Sender<BTreeSet<String>>,
    changed: Notify,
}

impl Reported {
    /// Sets the reported volumes.
    pub(super) fn set(&self, now: BTreeSet<String>) {
        self.names.send_if_modified(|names| {
            let changed = *names != now;
            *names = now;
            changed
        });
    }

    /// Removes other volumes, which are not in use any more. For the next pod they must be reported again: until then
    /// the controller may attach them to another node.
    pub(super) fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.names
            .send_modify(|names| names.retain(|name| keep(name)));
    }

    /// Requests a new status.
    pub(super) fn request_update(&self) {
        self.changed.notify_one();
    }

    /// Waits for a request of [`Reported::request_update`].
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Waits until the status reports a volume in use.
    pub(super) async fn wait_until_reported(&self, volume: &str) -> Result<(), String> {
        let mut names = self.names.subscribe();
        let says = names.wait_for(|names| names.contains(volume));
        match tokio::time::timeout(REPORT_TIMEOUT, says).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(format!(
                "the node's status does not report {volume} as in use yet"
            )),
        }
    }

    /// Watches the reported volumes.
    #[cfg(test)]
    pub(super) fn subscribe(&self) -> watch::Receiver<BTreeSet<String>> {
        self.names.subscribe()
    }
}
