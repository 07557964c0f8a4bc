//! `holdfast join`: a node of a cluster whose control plane runs on another machine. containerd and the agent start as with
//! `holdfast up`; the agent requests its certificate with the bootstrap token. The network's configuration follows when the
//! control plane has assigned a pod range to the Node.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ipnet::{IpNet, Ipv4Net};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::Client;
use serde_json::{Value, json};

use super::process::Component;
use super::progress::Progress;
use super::settings::{Dirs, Joined, Settings};
use super::{
    components, containerd, leave, messages, no_runtime, not_started, proxy, ranges, require_root,
    start_agent, start_containerd, stop_restarts, wait_node,
};
use crate::join::discovery::{Discovered, Target, discover};
use crate::join::token::server_of;
use holdfast_control::pki::{Pair, kubeconfig};
use holdfast_core::node::join::{AuthorityHash, Token, encode_authority};
use holdfast_core::node::routes::pod_ranges;
use holdfast_core::node::signing;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::connect;
use holdfast_kubeapi::failure::chain;
use holdfast_kubeapi::signing::{Issued, obtain_for_new_key};

/// How long the agent may take to obtain its certificate.
const CERTIFICATE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the control plane may take to assign a pod range.
const RANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of the checks.
const POLL: Duration = Duration::from_millis(100);

/// The server of a kubeconfig for other machines: this machine's address in place of a loopback address.
///
/// # Errors
///
/// The kubeconfig cannot be used, or this machine has no other address.
pub async fn reachable_server(kubeconfig: &Path) -> anyhow::Result<String> {
    let server = server_of(kubeconfig)?;
    let url: hyper::Uri = server.parse().with_context(|| {
        format!(
            "the server {server:?} of {} is not a URL",
            kubeconfig.display()
        )
    })?;
    let host = url.host().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse();
    let is_local = host == "localhost" || address.is_ok_and(|a: IpAddr| a.is_loopback());
    if !is_local {
        return Ok(server);
    }
    let own = holdfast_sys::addresses::default_address().await;
    let own = own.with_context(|| {
        format!("the server {server} of {} is reachable only on this machine, which has no default route; pass its address with --server", kubeconfig.display())
    })?;
    let port = url.port_u16().unwrap_or(443);
    Ok(format!("https://{}", std::net::SocketAddr::new(own, port)))
}

/// The kubeconfig with which the agent requests its first certificate.
fn bootstrap_kubeconfig(cluster: &Discovered, token: &Token) -> String {
    let authority = encode_authority(&cluster.authority);
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bootstrap",
        "clusters": [{"name": "cluster", "cluster": {"server": cluster.server, "certificate-authority-data": authority}}],
        "contexts": [{"name": "bootstrap", "context": {"cluster": "cluster", "user": "bootstrap"}}],
        "users": [{"name": "bootstrap", "user": {"token": token.text()}}],
    });
    format!("{text:#}\n")
}

/// Refuses a machine that runs a control plane, or belongs to another cluster.
fn reject_other_clusters(dirs: &Dirs, name: &str, authority: Option<&str>) -> anyhow::Result<()> {
    if dirs.data.join("control").exists() {
        bail!(
            "invalid --name {name}: this machine has the control plane of the cluster {name}; choose another name, or remove the cluster with `holdfast down --purge --name {name}`"
        );
    }
    let known = fs::read(dirs.agent().join("pki/ca.crt")).unwrap_or_default();
    let known = AuthorityHash::of_certificates(&known);
    let Some(authority) = authority else {
        return Ok(());
    };
    let found = AuthorityHash::of_certificates(authority.as_bytes());
    if let Some(other) = known.iter().find(|hash| !found.contains(hash)) {
        bail!(
            "invalid --name {name}: this machine is a node of another cluster, with the authority {other}; choose another name, or leave that cluster with `holdfast down --purge --name {name}`"
        );
    }
    Ok(())
}

/// Verifies the cluster, and writes its authority and the kubeconfig with the token.
async fn prepare(settings: &Settings, target: &Target) -> anyhow::Result<()> {
    let cluster = discover(target).await?;
    reject_other_clusters(&settings.dirs, &settings.name, Some(&cluster.authority))?;
    let pki = settings.dirs.agent().join("pki");
    fs::create_dir_all(&pki).with_context(|| format!("{} cannot be created", pki.display()))?;
    holdfast_sys::file::replace(&pki.join("ca.crt"), cluster.authority.as_bytes())?;
    let text = bootstrap_kubeconfig(&cluster, &target.token);
    holdfast_sys::file::replace(&bootstrap_file(&settings.dirs), text.as_bytes())?;
    Ok(())
}

fn bootstrap_file(dirs: &Dirs) -> std::path::PathBuf {
    dirs.agent().join("bootstrap-kubeconfig")
}

fn node_file(dirs: &Dirs) -> std::path::PathBuf {
    dirs.agent().join("kubeconfig")
}

/// The DNS addresses and the domain in the cluster's `kubelet-config`.
fn dns(kubelet_config: &str) -> Option<(Vec<String>, String)> {
    let config: Value = serde_saphyr::from_str(kubelet_config).ok()?;
    let addresses = config["clusterDNS"].as_array().into_iter().flatten();
    let addresses = addresses.filter_map(|a| a.as_str().map(str::to_owned));
    let domain = config["clusterDomain"].as_str().filter(|d| !d.is_empty());
    Some((
        addresses.collect(),
        domain.unwrap_or("cluster.local").to_owned(),
    ))
}

/// Reads the cluster's settings for agents.
async fn kubelet_config(maps: &Api<ConfigMap>) -> anyhow::Result<(Vec<String>, String)> {
    let map = maps.get("kubelet-config").await.map_err(|e| {
        let remedy = match holdfast_kubeapi::client::code(&e) {
            Some(401) => "the credentials have expired; pass a new --token of `holdfast token create`",
            Some(_) => "restart the control plane, which writes it, or run `kubeadm init phase upload-config kubelet`",
            None => "check that the apiserver is reachable",
        };
        anyhow::anyhow!("kube-system/kubelet-config cannot be read: {}; {remedy}", chain(&e))
    })?;
    let text = map.data.as_ref().and_then(|data| data.get("kubelet"));
    text.and_then(|text| dns(text)).context(
        "the ConfigMap kube-system/kubelet-config has no valid key \"kubelet\"; restart the control plane, which writes it, or run `kubeadm init phase upload-config kubelet`",
    )
}

/// The ranges of services and of pods in kubeadm's `ClusterConfiguration`.
fn networking(configuration: &str) -> Option<(Vec<IpNet>, Vec<IpNet>)> {
    let config: Value = serde_saphyr::from_str(configuration).ok()?;
    let ranges = |field: &str| -> Option<Vec<IpNet>> {
        let text = config["networking"][field].as_str()?;
        text.split(',')
            .map(|range| range.trim().parse().ok())
            .collect()
    };
    Some((ranges("serviceSubnet")?, ranges("podSubnet")?))
}

/// Reads the cluster's ranges; `None` if the cluster does not publish them.
async fn cluster_ranges(maps: &Api<ConfigMap>) -> anyhow::Result<Option<(Vec<IpNet>, Vec<IpNet>)>> {
    let map = match maps.get("kubeadm-config").await {
        Ok(map) => map,
        Err(error) if matches!(holdfast_kubeapi::client::code(&error), Some(403 | 404)) => {
            return Ok(None);
        }
        Err(error) => bail!(
            "kube-system/kubeadm-config cannot be read: {}; check that the apiserver is reachable",
            chain(&error)
        ),
    };
    let text = map
        .data
        .as_ref()
        .and_then(|data| data.get("ClusterConfiguration"));
    Ok(text.and_then(|text| networking(text)))
}

/// Waits until the agent has its certificate, and returns the node's client.
async fn wait_credentials(dirs: &Dirs, agent: &Component, started: bool) -> anyhow::Result<Client> {
    let (file, deadline) = (
        node_file(dirs),
        tokio::time::Instant::now() + CERTIFICATE_TIMEOUT,
    );
    loop {
        if file.exists() {
            return Ok(connect(&file).await?);
        }
        if agent.has_stopped_for_good(started) || tokio::time::Instant::now() > deadline {
            stop_restarts(agent, started)?;
            let why = "the control plane has not signed its certificate";
            return Err(not_started("the agent", agent, why));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// The IPv4 range of a Node's pods; `None` until the control plane has assigned ranges.
fn pod_range(node: &Node) -> anyhow::Result<Option<Ipv4Net>> {
    let ranges = pod_ranges(node);
    let v4 = ranges.iter().find_map(|range| match range {
        IpNet::V4(range) => Some(*range),
        IpNet::V6(_) => None,
    });
    if v4.is_none() && !ranges.is_empty() {
        bail!(
            "the Node has only the pod ranges {ranges:?}, and the bundled network needs an IPv4 range; use a cluster with an IPv4 range, or your own network with --containerd-endpoint"
        );
    }
    Ok(v4)
}

/// Waits until the control plane has assigned a range to the Node.
async fn wait_range(client: &Client, name: &str, agent: &Component) -> anyhow::Result<Ipv4Net> {
    let api: Api<Node> = Api::all(client.clone());
    let deadline = tokio::time::Instant::now() + RANGE_TIMEOUT;
    let mut why = messages::NOT_REGISTERED.to_owned();
    loop {
        match api.get_opt(name).await {
            Ok(Some(node)) => match pod_range(&node)? {
                Some(range) => return Ok(range),
                None => "the control plane has assigned no pod range: see the events of the Node, and whether its control plane allocates ranges (--allocate-node-cidrs)".clone_into(&mut why),
            },
            Ok(None) => {}
            Err(error) => why = chain(&error),
        }
        if tokio::time::Instant::now() > deadline {
            bail!(messages::not_ready(
                name,
                &why,
                &agent.log,
                &agent.log_tail()
            ));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// How long the control plane may take to sign the certificate of the service proxy.
const PROXY_TIMEOUT: Duration = Duration::from_secs(30);

/// Requests the certificate of this node's service proxy with the node's own credentials, and writes the proxy's kubeconfig. The
/// proxy has an identity of its own, because it may read services of all namespaces, and no Secrets.
async fn prepare_proxy(client: &Client, settings: &Settings) -> anyhow::Result<()> {
    let (dirs, node) = (&settings.dirs, &settings.node_name);
    let user = format!("{}{node}", signing::PROXY_USER);
    let subject = (signing::PROXY_GROUP, user.as_str());
    let issued =
        obtain_for_new_key(client, signing::PROXY_REQUEST, subject, &[], PROXY_TIMEOUT).await;
    let Issued { certificate, key } = issued.map_err(|e| {
        anyhow::anyhow!("the certificate of the service proxy was not issued: {e}; unless kube-proxy runs on this node, services do not work here until `holdfast join` has run again")
    })?;
    let authority = fs::read_to_string(dirs.agent().join("pki/ca.crt"))?;
    let server = server_of(&node_file(dirs))?;
    let text = kubeconfig(&server, &authority, &user, &Pair { certificate, key });
    holdfast_sys::file::replace(&dirs.proxy_kubeconfig(), text.as_bytes())?;
    Ok(())
}

/// Makes this machine a node of the cluster at `server`. Without a token, the node must have its certificate already.
///
/// # Errors
///
/// The cluster cannot be verified, or a component does not start. The error names the value and the remedy.
pub async fn join(
    mut settings: Settings,
    server: String,
    token: Option<Token>,
    hashes: Vec<AuthorityHash>,
) -> anyhow::Result<()> {
    require_root("join")?;
    let dirs = settings.dirs.clone();
    reject_other_clusters(&dirs, &settings.name, None)?;
    let mut progress = Progress::new();
    progress.step("cluster");
    for dir in [&dirs.data, &dirs.run, &dirs.logs, &dirs.agent()] {
        fs::create_dir_all(dir)
            .with_context(|| format!("the directory {} cannot be created", dir.display()))?;
    }
    fs::set_permissions(&dirs.data, fs::Permissions::from_mode(0o700))?;
    let credentials = match token {
        Some(token) => {
            anyhow::ensure!(
                !hashes.is_empty(),
                "--discovery-token-ca-cert-hash is required with --token: without it, this machine cannot recognise the cluster; `holdfast token create --print-join` prints both"
            );
            let target = Target {
                server,
                token,
                hashes,
            };
            prepare(&settings, &target).await?;
            bootstrap_file(&dirs)
        }
        None => node_file(&dirs),
    };
    anyhow::ensure!(
        credentials.exists(),
        "--token is required: this machine has no certificate of the cluster yet; `holdfast token create --print-join` on the machine of the control plane prints the command"
    );
    let maps = Api::namespaced(connect(&credentials).await?, "kube-system");
    let (cluster_dns, cluster_domain) = kubelet_config(&maps).await?;
    if let Some((service, cluster)) = cluster_ranges(&maps).await? {
        (settings.ranges.service, settings.ranges.cluster) = (service, cluster);
    }
    settings.join = Some(node_file(&dirs));
    settings.joined = Some(Joined {
        bootstrap: bootstrap_file(&dirs),
        cluster_dns,
        cluster_domain,
    });
    start(settings, progress).await
}

/// Starts containerd and the agent, and waits until the Node is Ready.
async fn start(mut settings: Settings, mut progress: Progress) -> anyhow::Result<()> {
    let components = components(&settings.dirs);
    let endpoint = settings.endpoint();
    let private = settings.containerd_endpoint.is_none();
    progress.step("containerd");
    if private {
        start_containerd(&settings, &components.containerd)?;
    }
    let alive = || !private || components.containerd.pid().is_some();
    let runtime = containerd::wait_ready(&endpoint, Duration::from_secs(30), alive)
        .await
        .map_err(|error| no_runtime(&components.containerd, private, &error))?;
    if !private {
        containerd::reject_foreign_pods(&endpoint, &settings.dirs.agent()).await?;
    }
    progress.step("bundled images");
    containerd::import_images(&settings, &endpoint)?;
    progress.step("agent");
    if private {
        containerd::write_template(&settings)?;
    }
    let started = start_agent(&settings, &components.agent, &endpoint)?;
    let client = wait_credentials(&settings.dirs, &components.agent, started).await?;
    leave::record(&settings.dirs, &settings.node_name)?;
    progress.step("pod range");
    let pods = wait_range(&client, &settings.node_name, &components.agent).await?;
    settings.ranges.pods = pods;
    ranges::record(&settings.dirs.data, &settings.ranges)?;
    // The agent changes the range of a network that has another one, when its pods allow it.
    if private && containerd::pod_range(&settings).is_none_or(|range| range == pods) {
        containerd::write_network(&settings)?;
    }
    progress.step("proxy");
    // Only the bundled control plane signs this certificate. Clusters of kubeadm run kube-proxy on their nodes.
    let unserved = match prepare_proxy(&client, &settings).await {
        Ok(()) => proxy::start(&settings, &components.proxy).map(|_| None)?,
        Err(error) => Some(error),
    };
    progress.step("node");
    let node = wait_node(&client, &settings.node_name, &components.agent, started).await?;
    leave::uncordon(&client, &settings.dirs, &node).await?;
    progress.done();
    let version = client.apiserver_version().await.map(|v| v.git_version);
    let version = version.unwrap_or_else(|_| "an unknown version".to_owned());
    println!(
        "{}",
        messages::running(&node, &runtime, &messages::joined(&version))
    );
    if let Some(error) = unserved {
        println!("warning: {error:#}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dns_of_the_cluster_is_read() {
        let of = |text: &str| dns(text);
        let two = "apiVersion: kubelet.config.k8s.io/v1beta1\nclusterDNS: [10.96.0.10, 'fd00::a']\nclusterDomain: example\n";
        let expected = vec!["10.96.0.10".to_owned(), "fd00::a".to_owned()];
        assert_eq!(of(two), Some((expected, "example".into())));
        for empty in ["{}", "clusterDNS: null", "clusterDNS: 7\nclusterDomain: ''"] {
            assert_eq!(of(empty), Some((vec![], "cluster.local".into())), "{empty}");
        }
        assert_eq!(of("a: b: c"), None);
    }

    #[test]
    fn the_first_ipv4_range_is_the_networks() {
        let of = |spec: Value| {
            let node = json!({"metadata": {"name": "n"}, "spec": spec});
            let node = serde_json::from_value(node).expect("a Node");
            pod_range(&node).map(|range| range.map(|r| r.to_string()))
        };
        assert_eq!(of(json!({})).expect("none yet"), None);
        let both = json!({"podCIDRs": ["fd00::/64", "10.244.3.0/24"]});
        assert_eq!(of(both).expect("a range").as_deref(), Some("10.244.3.0/24"));
        let error = of(json!({"podCIDRs": ["fd00::/64"]})).expect_err("no IPv4");
        assert!(error.to_string().contains("fd00::/64"), "{error}");
    }

    #[test]
    fn a_machine_of_another_cluster_is_refused() {
        let certificate = || {
            let key = rcgen::KeyPair::generate().expect("a key");
            let params = rcgen::CertificateParams::default();
            params.self_signed(&key).expect("a certificate").pem()
        };
        let (own, other) = (certificate(), certificate());
        let dir = tempfile::tempdir().expect("a directory");
        let dirs = Dirs {
            data: dir.path().join("data"),
            run: dir.path().join("run"),
            logs: dir.path().join("logs"),
        };
        let check = |authority: Option<&str>| reject_other_clusters(&dirs, "n", authority);
        assert!(check(None).is_ok() && check(Some(&own)).is_ok());
        fs::create_dir_all(dirs.agent().join("pki")).expect("a directory");
        fs::write(dirs.agent().join("pki/ca.crt"), &own).expect("written");
        assert!(check(None).is_ok() && check(Some(&own)).is_ok());
        let error = check(Some(&other))
            .expect_err("another cluster")
            .to_string();
        let hash = AuthorityHash::of_certificates(own.as_bytes())[0].to_string();
        assert!(
            error.contains(&hash) && error.contains("--purge"),
            "{error}"
        );
        fs::create_dir_all(dirs.data.join("control")).expect("a directory");
        assert!(check(None).is_err(), "the control plane is here");
    }
}
