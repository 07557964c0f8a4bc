//! What pods inherit of the machine's network: its addresses, where `--node-ip` names none, and its resolver
//! configuration. Both may change, or come only after a boot, and are read again with every status of the node.

use std::sync::Arc;

use crate::agent::Context;
use crate::config::Config;
use crate::core::node::addresses::changed;
use crate::core::pod::dns::{Resolver, check_host};
use crate::host::blocking;
use crate::sys::{addresses, file};

/// The largest resolver configuration that is read.
const LIMIT: u64 = 64 << 10;

/// The node's addresses as they are now; none where the machine has none yet.
pub async fn addresses(config: &Config) -> Vec<String> {
    if !config.node_ips.is_empty() {
        return config.node_ips.iter().map(ToString::to_string).collect();
    }
    let own = addresses::read().await.preferred(config.prefers_ipv6);
    own.map(|a| a.to_string()).into_iter().collect()
}

/// Name resolution of pods, by the node's own (`resolvConf`). A file that cannot be read is an error.
pub fn try_resolver(config: &Config, node_ips: &[String]) -> Result<Resolver, String> {
    let own = if config.resolv_conf.is_empty() {
        // Nothing of the node's: its own address as the server, and the root alone to search.
        let is_ipv6 = node_ips.first().is_some_and(|ip| ip.contains(':'));
        let local = if is_ipv6 { "::1" } else { "127.0.0.1" };
        Resolver {
            servers: vec![local.into()],
            searches: vec![".".into()],
            ..Resolver::default()
        }
    } else {
        let text = file::read_text(config.resolv_conf.as_ref(), LIMIT);
        Resolver::parse(&text.map_err(|e| format!("resolvConf {}: {e}", config.resolv_conf))?)
    };
    Ok(Resolver {
        cluster_dns: config.cluster_dns.clone(),
        cluster_domain: config.cluster_domain.clone(),
        ..own
    })
}

/// The same for a start: without the file, pods have the cluster's servers alone until it is there.
pub fn resolver(config: &Config, node_ips: &[String]) -> Resolver {
    try_resolver(config, node_ips).unwrap_or_else(|error| {
        tracing::error!(
            error,
            "pods inherit no name resolution from the node; the file is tried again"
        );
        Resolver {
            cluster_dns: config.cluster_dns.clone(),
            cluster_domain: config.cluster_domain.clone(),
            ..Resolver::default()
        }
    })
}

/// Follows what changes, until the process ends. What cannot be read stays as it was.
pub async fn follow(context: Arc<Context>) {
    loop {
        tokio::time::sleep(context.config.node_status_update).await;
        let found = addresses(&context.config).await;
        context.node_ips.send_if_modified(|known| {
            let is_other = changed(known, &found);
            if is_other {
                tracing::info!(?known, ?found, "the node has other addresses");
                *known = found;
            }
            is_other
        });
        let shared = Arc::clone(&context);
        let read = blocking(move || {
            let ips = shared.node_ips.borrow().clone();
            try_resolver(&shared.config, &ips)
        });
        match read.await {
            Ok(found) if **context.resolver.borrow() != found => {
                if let Some(warning) = check_host(&found) {
                    let name = &context.config.node_name;
                    let reason = "CheckLimitsForResolvConf";
                    context
                        .events
                        .node(name, crate::agent::Kind::Warning, reason, warning);
                }
                context.resolver.send_replace(Arc::new(found));
                tracing::info!(
                    file = context.config.resolv_conf,
                    "the node's name resolution has changed: new sandboxes get it"
                );
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(error, "the node's name resolution stays as it was"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Overrides, load};

    #[test]
    fn a_resolver_configuration_that_is_away_is_told_from_an_empty_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut config = load(None, &Overrides::default(), "n").expect("a configuration");
        config.resolv_conf = dir.path().join("resolv.conf").display().to_string();
        config.cluster_dns = vec!["10.96.0.10".into()];
        assert!(try_resolver(&config, &[]).is_err_and(|e| e.contains("resolv.conf")));
        assert_eq!(resolver(&config, &[]).cluster_dns, ["10.96.0.10"]);
        std::fs::write(&config.resolv_conf, "nameserver 192.0.2.53\n").expect("written");
        let found = try_resolver(&config, &[]).expect("it is there now");
        assert_eq!(
            (found.servers, found.cluster_dns.len()),
            (vec!["192.0.2.53".to_owned()], 1)
        );
    }
}
