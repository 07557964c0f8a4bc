//! The service proxy of a cluster: its identity, its process, and what it leaves in the kernel.

use anyhow::Context as _;
use holdfast_control::pki::{self, Pki};
use holdfast_core::node::signing;

use super::process::Component;
use super::ranges::Ranges;
use super::settings::Settings;
use super::{DOMAIN, messages};

/// Writes the proxy's kubeconfig for the bundled control plane, with a certificate of its authority.
pub(super) fn prepare(settings: &Settings) -> anyhow::Result<()> {
    let pki = Pki::open(&settings.dirs.data.join("control/pki"))?;
    let node = &settings.node_name;
    let user = format!("{}{node}", signing::PROXY_USER);
    let pair = pki.client(&format!("proxy-{node}"), &user, &[signing::PROXY_GROUP])?;
    let server = format!("https://127.0.0.1:{}", settings.api_port);
    let text = pki::kubeconfig(&server, &pki.ca, &user, &pair);
    holdfast_sys::file::replace(&settings.dirs.proxy_kubeconfig(), text.as_bytes())?;
    Ok(())
}

/// Starts the proxy with its kubeconfig, unless it runs. Returns whether it was started.
pub(super) fn start(settings: &Settings, component: &Component) -> anyhow::Result<bool> {
    if component.runs_supervised() {
        return Ok(false);
    }
    let [healthz, metrics] = settings.proxy_pages();
    let node = &settings.node_name;
    let mut arguments = vec![
        "proxy".to_owned(),
        format!(
            "--kubeconfig={}",
            settings.dirs.proxy_kubeconfig().display()
        ),
        format!("--hostname-override={node}"),
        format!("--table={}", settings.table()),
        "--policy".to_owned(),
        "--routes".to_owned(),
        format!("--cluster-domain={DOMAIN}"),
        format!("--cluster-cidr={}", Ranges::flag(&settings.ranges.cluster)),
        format!("--service-cidr={}", Ranges::flag(&settings.ranges.service)),
        format!("--bridge={}", settings.bridge),
        format!("--healthz-bind-address={healthz}"),
        format!("--metrics-bind-address={metrics}"),
    ];
    let dns = settings.ranges.dns();
    // The proxy of the control plane's machine has a certificate for ten years.
    let node = settings.join.iter();
    arguments.extend(node.map(|file| format!("--node-kubeconfig={}", file.display())));
    arguments.extend(dns.map(|address| format!("--dns={address}")));
    component.start_supervised(&std::env::current_exe()?, &arguments)
}

/// Removes the tables and the DNS address of the cluster's proxy, which does not run any more. `ranges` are the recorded ones:
/// without a record, the address may be another cluster's.
pub(super) fn remove(settings: &Settings, ranges: Option<&Ranges>) -> anyhow::Result<()> {
    let dns = ranges.and_then(Ranges::dns);
    let overrides = holdfast_proxy::Overrides {
        table: settings.table(),
        dns: dns.map(|address| address.to_string()),
        cluster_domain: DOMAIN.into(),
        ..holdfast_proxy::Overrides::default()
    };
    let config = holdfast_proxy::Config::for_cleanup(&overrides)?;
    holdfast_proxy::cleanup(&config).context(messages::NOT_REMOVED)
}
