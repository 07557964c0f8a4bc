//! Flags of `holdfast proxy`. Where kube-proxy has the flag, the name is kube-proxy's (`cmd/kube-proxy/app/options.go`).

use std::path::PathBuf;

use clap::Args;

/// Flags of the service proxy.
#[derive(Args, Debug, Clone)]
pub struct ProxyFlags {
    /// A KubeProxyConfiguration file (kubeproxy.config.k8s.io/v1alpha1); flags override it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The kubeconfig for the apiserver.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig of this node's agent. With its credentials, the proxy renews the client certificate in --kubeconfig before
    /// the certificate expires. The control plane must be that of `holdfast up` [default: the certificate is not renewed].
    #[arg(long, value_name = "FILE")]
    pub node_kubeconfig: Option<PathBuf>,
    /// The node's name [default: the host name].
    #[arg(long, value_name = "NAME")]
    pub hostname_override: Option<String>,
    /// The name of the nftables tables with the rules; each cluster on this machine needs its own.
    #[arg(long, value_name = "NAME", default_value = "holdfast")]
    pub table: String,
    /// Answer DNS queries at this IP address of the service range, or at two separated by a comma. Each becomes an address of
    /// this machine [default: no DNS].
    #[arg(long, value_name = "IPS")]
    pub dns: Option<String>,
    /// The cluster's domain.
    #[arg(long, value_name = "DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: String,
    /// The address range of the cluster's pods, or two separated by a comma. Connections from elsewhere to cluster IPs are
    /// masqueraded.
    #[arg(long, value_name = "RANGES")]
    pub cluster_cidr: Option<String>,
    /// The address range of the cluster's services, or two separated by a comma. Connections to unused addresses in it are
    /// dropped.
    #[arg(long, value_name = "RANGES")]
    pub service_cidr: Option<String>,
    /// The bridge of this node's pods, if pods of one bridge are to reach each other by service: its frames then pass the
    /// rules.
    #[arg(long, value_name = "BRIDGE")]
    pub bridge: Option<String>,
    /// Enforce network policies. Only one program on a node may do so.
    #[arg(long)]
    pub policy: bool,
    /// Keep routes to the pods of other nodes. The nodes must share a network, and no network plugin may do the same.
    #[arg(long)]
    pub routes: bool,
    /// The address and port of /healthz and /livez; empty for none [default: 0.0.0.0:10256].
    #[arg(long, value_name = "ADDRESS")]
    pub healthz_bind_address: Option<String>,
    /// The address and port of /metrics; empty for none [default: 127.0.0.1:10249].
    #[arg(long, value_name = "ADDRESS")]
    pub metrics_bind_address: Option<String>,
    /// Remove the rules, the routes and the addresses of --dns from this machine, and exit.
    #[arg(long)]
    pub cleanup: bool,
    /// Log verbosity: 0 to 2 for information, 4 for debugging, higher for tracing.
    #[arg(short = 'v', long = "v", default_value_t = 0, value_name = "LEVEL")]
    pub verbosity: u8,
}

impl ProxyFlags {
    /// The flags as overrides of a configuration file.
    #[must_use]
    pub fn overrides(&self) -> holdfast_proxy::Overrides {
        holdfast_proxy::Overrides {
            kubeconfig: self.kubeconfig.clone(),
            node_kubeconfig: self.node_kubeconfig.clone(),
            hostname: self.hostname_override.clone(),
            table: self.table.clone(),
            dns: self.dns.clone(),
            cluster_domain: self.cluster_domain.clone(),
            cluster_cidr: self.cluster_cidr.clone(),
            service_cidr: self.service_cidr.clone(),
            bridge: self.bridge.clone(),
            policy: self.policy,
            routes: self.routes,
            healthz: self.healthz_bind_address.clone(),
            metrics: self.metrics_bind_address.clone(),
        }
    }
}
