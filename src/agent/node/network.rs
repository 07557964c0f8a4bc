//! The machine's addresses, if `--node-ip` specifies none, and its resolver configuration, which pods inherit. Both may
//! change or become available after a boot, so they are read again with every status of the node.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::OwnNode;
use crate::events::{Events, Kind};
use holdfast_config::Config;
use holdfast_core::node::addresses::{Origin, has_changed, origin};
use holdfast_core::pod::dns::{Resolver, check_host};
use holdfast_host::{HostError, blocking};
use holdfast_sys::failure::doing;
use holdfast_sys::{addresses, file};

/// Size limit of the resolver configuration, in bytes.
const MAX_FILE_SIZE: u64 = 64 << 10;

/// Timeout for resolving the node's name.
const NAME_LOOKUP_TIMEOUT: Duration = Duration::from_secs(3);

/// The node's current addresses, or why there are none.
pub async fn addresses(config: &Config) -> Result<Vec<String>, HostError> {
    let machine = addresses::read().await?;
    if !config.node_ips.is_empty() {
        return match machine.lacks(&config.node_ips) {
            Some(ip) => Err(format!(
                "--node-ip: this machine has no address {ip}; use one that `ip address` shows; the agent retries in case the address is added later"
            ).into()),
            None => Ok(config.node_ips.iter().map(ToString::to_string).collect()),
        };
    }
    let name = &config.node_name;
    let lookup = tokio::net::lookup_host((name.as_str(), 0));
    let resolved: Vec<IpAddr> = match tokio::time::timeout(NAME_LOOKUP_TIMEOUT, lookup).await {
        Ok(Ok(found)) => found.map(|socket| socket.ip()).collect(),
        _ => vec![],
    };
    let own = machine.of_node(name, &resolved, config.prefers_ipv6);
    let missing = || {
        HostError::failed(format!(
            "no address is known for the node: the name {name:?} resolves to no address of this machine, and no interface with a default route has an address; set --node-ip, or bring the network up"
        ))
    };
    own.map(|ip| vec![ip.to_string()]).ok_or_else(missing)
}

/// Like [`addresses()`], for startup: without an address, pods that need one wait until the node has one.
pub(crate) async fn first_addresses(config: &Config) -> Vec<String> {
    let external = config.external_cloud && config.kubeconfig.is_some();
    if origin(external, config.has_node_ip, None) == Origin::Unknown {
        return vec![];
    }
    addresses(config).await.unwrap_or_else(|error| {
        tracing::error!(%error, "the node has no address yet; retrying");
        vec![]
    })
}

/// The loopback address of each address family of the node, in the order of its addresses.
fn local_servers(node_ips: &[String]) -> Vec<String> {
    let local = |ip: &String| if ip.contains(':') { "::1" } else { "127.0.0.1" };
    let servers: Vec<String> = node_ips.iter().map(|ip| local(ip).into()).collect();
    match servers.is_empty() {
        true => vec!["127.0.0.1".into()],
        false => servers,
    }
}

/// The DNS settings of pods, derived from the node's resolver configuration
/// (`resolvConf`). Fails if the file cannot be read.
pub(crate) fn try_resolver(config: &Config, node_ips: &[String]) -> Result<Resolver, HostError> {
    let own = if config.resolv_conf.is_empty() {
        // Without a `resolvConf` pods get a name server on the same machine and the root as the only search domain.
        Resolver {
            servers: local_servers(node_ips),
            searches: vec![".".into()],
            ..Resolver::default()
        }
    } else {
        let text = file::read_text(config.resolv_conf.as_ref(), MAX_FILE_SIZE);
        let unread = doing(format!("resolvConf {}", config.resolv_conf));
        Resolver::parse(&text.map_err(unread)?)
    };
    Ok(Resolver {
        cluster_dns: config.cluster_dns.clone(),
        cluster_domain: config.cluster_domain.clone(),
        ..own
    })
}

/// Like [`try_resolver`], for startup: without the file, pods get only the
/// cluster's name servers until the file exists.
pub fn resolver(config: &Config, node_ips: &[String]) -> Resolver {
    try_resolver(config, node_ips).unwrap_or_else(|error| {
        tracing::error!(
            %error,
            "cannot read the node's DNS configuration, so pods do not inherit it; retrying"
        );
        Resolver {
            cluster_dns: config.cluster_dns.clone(),
            cluster_domain: config.cluster_domain.clone(),
            ..Resolver::default()
        }
    })
}

/// What the update of addresses and DNS settings uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub events: Events,
    pub node: Arc<OwnNode>,
    /// The node's current IP addresses.
    pub node_ips: watch::Sender<Vec<String>>,
    /// DNS settings for pods, derived from the node's current resolver configuration.
    pub resolver: watch::Sender<Arc<Resolver>>,
}

/// The current addresses of pods on the host network: those of the Node if a cloud controller sets them.
async fn host_addresses(parts: &Parts) -> Result<Vec<String>, HostError> {
    let config = &parts.config;
    let external = config.external_cloud && parts.node.api().is_some();
    let node = parts.node.borrow().clone();
    let reported = node.as_ref().map(|node| {
        let status = node.status.as_ref();
        status
            .and_then(|s| s.addresses.as_deref())
            .unwrap_or_default()
    });
    match origin(external, config.has_node_ip, reported) {
        Origin::Node(ips) => Ok(ips),
        Origin::Machine => addresses(config).await,
        Origin::Unknown => Ok(vec![]),
    }
}

/// Updates the addresses and the DNS settings until the process exits. After a failure, the last value stays valid.
pub async fn run(parts: Arc<Parts>) {
    let (mut complaint, mut node) = (None, parts.node.subscribe());
    let is_external = parts.config.external_cloud;
    loop {
        tokio::select! {
            biased;
            Ok(()) = node.changed(), if is_external => {}
            () = tokio::time::sleep(parts.config.node_status_update) => {}
        }
        let answer = host_addresses(&parts).await;
        let error = answer.as_ref().err().cloned();
        if let Some(error) = error.as_ref().filter(|_| complaint != error) {
            tracing::warn!(%error, "cannot determine the node's addresses; keeping the last known ones");
        }
        complaint = error;
        let found = answer.unwrap_or_default();
        parts.node_ips.send_if_modified(|known| {
            let is_other = has_changed(known, &found);
            if is_other {
                tracing::info!(?known, ?found, "the node's addresses changed");
                *known = found;
            }
            is_other
        });
        let shared = Arc::clone(&parts);
        let read = blocking(move || {
            let ips = shared.node_ips.borrow().clone();
            try_resolver(&shared.config, &ips)
        });
        match read.await {
            Ok(found) if **parts.resolver.borrow() != found => {
                if let Some(warning) = check_host(&found) {
                    let name = &parts.config.node_name;
                    let reason = "CheckLimitsForResolvConf";
                    parts.events.node(name, Kind::Warning, reason, warning);
                }
                parts.resolver.send_replace(Arc::new(found));
                tracing::info!(
                    file = parts.config.resolv_conf,
                    "the node's DNS configuration changed; new sandboxes use it"
                );
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "cannot read the node's DNS configuration; keeping the last known one")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_config::{Overrides, load};

    #[test]
    fn a_missing_resolver_configuration_is_an_error_and_not_empty() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut config = load(None, &Overrides::default(), "n").expect("a configuration");
        config.resolv_conf = dir.path().join("resolv.conf").display().to_string();
        config.cluster_dns = vec!["10.96.0.10".into()];
        assert!(try_resolver(&config, &[]).is_err_and(|e| e.message.contains("resolv.conf")));
        assert_eq!(resolver(&config, &[]).cluster_dns, ["10.96.0.10"]);
        std::fs::write(&config.resolv_conf, "nameserver 192.0.2.53\n").expect("written");
        let found = try_resolver(&config, &[]).expect("the file exists");
        assert_eq!(
            (found.servers, found.cluster_dns.len()),
            (vec!["192.0.2.53".to_owned()], 1)
        );
    }

    #[test]
    fn without_a_file_the_name_server_is_local_in_each_address_family_of_the_node() {
        for (node_ips, expected) in [
            (vec![], vec!["127.0.0.1"]),
            (vec!["192.0.2.1"], vec!["127.0.0.1"]),
            (vec!["2001:db8::1"], vec!["::1"]),
            (vec!["2001:db8::1", "192.0.2.1"], vec!["::1", "127.0.0.1"]),
        ] {
            let node_ips: Vec<String> = node_ips.into_iter().map(str::to_owned).collect();
            assert_eq!(local_servers(&node_ips), expected, "{node_ips:?}");
        }
    }
}
