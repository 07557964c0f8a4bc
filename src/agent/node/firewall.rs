//! The chains of iptables that kube-proxy and network plugins look for (`makeIPTablesUtilChains`).

use std::time::Duration;

use crate::host::iptables;

/// How often they are looked for.
const LOOK: Duration = Duration::from_secs(60);

/// Keeps the chains of iptables that others look for, until the process ends: a firewall that is loaded anew removes them.
/// A machine without iptables has nobody who needs them.
pub async fn keep_chains() {
    let mut last = Ok(false);
    loop {
        let made = iptables::ensure().await;
        match &made {
            Ok(true) => {
                tracing::info!("the iptables chains KUBE-IPTABLES-HINT and KUBE-FIREWALL were made")
            }
            Err(error) if last.as_ref().err() != Some(error) => {
                tracing::info!(
                    %error,
                    "the iptables chains for kube-proxy and network plugins cannot be made; it is tried every minute, unless makeIPTablesUtilChains is false"
                );
            }
            Ok(false) | Err(_) => {}
        }
        last = made;
        tokio::time::sleep(LOOK).await;
    }
}
