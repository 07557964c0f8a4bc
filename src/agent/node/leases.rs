//! Releases addresses of failed sandboxes. If a plugin of the chain or the network's configuration is missing, the
//! runtime cannot complete DEL: libcni stops at the first plugin that fails, and the lease of host-local stays.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::timeout;

use holdfast_core::node::leases::Attachments;
use holdfast_cri::Runtime;
use holdfast_host::leases::release_orphaned;

/// Interval between checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(300);
/// Timeout for requests to the runtime.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a runtime may take to remove a sandbox after the deadline of `RunPodSandbox`.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs until the process exits. No other task waits for this.
pub(super) async fn run(runtime: &dyn Runtime, call_timeout: Duration) {
    // The client's deadline for RunPodSandbox is twice that of other calls, and the listing may
    // be older than the check by [`ANSWER_TIMEOUT`].
    let min_age = call_timeout * 2 + CLEANUP_TIMEOUT + ANSWER_TIMEOUT;
    let mut networks = BTreeSet::new();
    loop {
        match timeout(ANSWER_TIMEOUT, runtime.attachments()).await {
            Ok(Ok(found)) => {
                // Networks whose configuration was removed still have leases.
                networks.extend(found.networks);
                let all = Attachments {
                    networks: networks.clone(),
                    ..found
                };
                release(all, min_age).await;
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "cannot list the runtime's networks; retrying")
            }
            Err(_) => tracing::debug!("listing the runtime's networks timed out; retrying"),
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

async fn release(attachments: Attachments, min_age: Duration) {
    if attachments.networks.is_empty() {
        return;
    }
    match release_orphaned(attachments, min_age).await {
        Ok(released) => {
            for lease in released {
                tracing::info!(
                    network = lease.network,
                    address = lease.address,
                    sandbox = lease.sandbox,
                    why = lease.why,
                    "released the address of a sandbox that the runtime no longer has"
                );
            }
        }
        Err(error) => tracing::warn!(%error, "cannot check the leases of pod addresses; retrying"),
    }
}
