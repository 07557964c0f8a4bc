//! Address reservations of the bundled host-local plugin.

use std::io;
use std::time::Duration;

use holdfast_cni::ipam::audit::{Finding, Request, State, repair};
use tokio::sync::oneshot;

use holdfast_core::node::leases::Attachments;

/// A released address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// The network.
    pub network: String,
    /// The address.
    pub address: String,
    /// The sandbox that held it.
    pub sandbox: String,
    /// Why no pod can use it any more.
    pub why: String,
}

impl From<Finding> for Released {
    fn from(finding: Finding) -> Released {
        Released {
            network: finding.network,
            address: finding.address.to_string(),
            sandbox: finding.container,
            why: match finding.state {
                State::Leaked(why) => why,
                _ => String::new(),
            },
        }
    }
}

fn repair_all(attachments: &Attachments, min_age: Duration) -> io::Result<Vec<Released>> {
    let mut released = vec![];
    for network in &attachments.networks {
        let request = Request {
            data_dir: network.data_dir.clone(),
            min_age,
            ..Request::default()
        };
        let found = repair(&request, &network.name, &attachments.sandboxes);
        let found = found.map_err(|error| io::Error::other(error.to_string()))?;
        released.extend(found.into_iter().map(Released::from));
    }
    Ok(released)
}

/// Releases the addresses of sandboxes that the runtime no longer
/// has, unless they were reserved less than `min_age` ago.
///
/// # Errors
///
/// A store cannot be read or changed. Addresses that were already released stay released.
pub async fn release_orphaned(
    attachments: Attachments,
    min_age: Duration,
) -> io::Result<Vec<Released>> {
    let (answer, answered) = oneshot::channel();
    // On a separate thread, because it enters network namespaces,
    // and because a hanging plugin may hold the lock of a store.
    let work = move || {
        // The receiver is dropped only when the agent stops.
        _ = answer.send(repair_all(&attachments, min_age));
    };
    std::thread::Builder::new()
        .name("leases".into())
        .spawn(work)?;
    answered
        .await
        .unwrap_or_else(|_| Err(io::Error::other("the thread that reads leases stopped")))
}
