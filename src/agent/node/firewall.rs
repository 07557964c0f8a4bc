//! The iptables chains that kube-proxy and network plugins expect (`makeIPTablesUtilChains`).

use std::time::Duration;

use holdfast_host::iptables;

/// Interval between checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Recreates the chains until the process exits, as reloading a firewall removes them. On a
/// machine without iptables no chains are needed.
pub(crate) async fn keep_chains() {
    let mut last = Ok(false);
    loop {
        let made = iptables::ensure().await;
        match &made {
            Ok(true) => {
                tracing::info!("created the iptables chains KUBE-IPTABLES-HINT and KUBE-FIREWALL")
            }
            Err(error) if last.as_ref().err() != Some(error) => {
                tracing::info!(
                    %error,
                    "cannot create the iptables chains for kube-proxy and network plugins; retrying every minute; set makeIPTablesUtilChains to false if they are not needed"
                );
            }
            Ok(false) | Err(_) => {}
        }
        last = made;
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}
