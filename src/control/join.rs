//! What machines need to join the cluster: the settings of the nodes' ranges, `kube-public/cluster-info`, kubeadm's ConfigMaps, and
//! the roles that let a bootstrap token read them (`cmd/kubeadm/app/phases/bootstraptoken`, `uploadconfig`, `kubelet`).
//!
//! `kubeadm join` reads the same objects, so it works against this control plane as `holdfast join` does.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use base64::Engine as _;
use ipnet::IpNet;
use serde_json::{Value, json};

use super::api::{Answer, Api, Request};
use super::{Settings, master, post};
use holdfast_core::node::join::{CLUSTER_INFO, KUBECONFIG_KEY, NODE_GROUP};
use holdfast_core::node::pod_ranges::{DEFAULT_PREFIXES, PodRanges, RangeError};
use holdfast_core::version::KUBERNETES;

/// The address range of pods in all nodes, unless the administrator chooses another.
pub const CLUSTER_RANGE: &str = "10.244.0.0/16";

/// Default maximum time of a node without heartbeats, as in kube-controller-manager.
pub(crate) const DEFAULT_HEARTBEAT_GRACE: Duration = Duration::from_secs(50);

/// Settings for several nodes.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// The address ranges of all pods, one or two of different families.
    pub cluster_ranges: Vec<IpNet>,
    /// The prefix lengths of a node's IPv4 and IPv6 range.
    pub prefixes: (u8, u8),
    /// The name and the pod range of the node on this machine. The range is reserved for it, also outside of the cluster's ranges.
    pub own: Option<(String, IpNet)>,
    /// Further DNS names and addresses in the certificate of the API.
    pub certified: Vec<String>,
    /// Maximum time of a node without heartbeats; then its pods are not ready, and are evicted.
    pub heartbeat_grace: Duration,
}

impl Default for NodeSettings {
    fn default() -> NodeSettings {
        NodeSettings {
            cluster_ranges: CLUSTER_RANGE.parse().into_iter().collect(),
            prefixes: DEFAULT_PREFIXES,
            own: None,
            certified: vec![],
            heartbeat_grace: DEFAULT_HEARTBEAT_GRACE,
        }
    }
}

impl NodeSettings {
    /// The ranges of nodes, without any assigned one.
    pub(super) fn pod_ranges(&self) -> Result<PodRanges, RangeError> {
        let mut ranges = PodRanges::new(&self.cluster_ranges, self.prefixes)?;
        if let Some((node, range)) = &self.own {
            ranges.reserve(node, &[*range]);
        }
        Ok(ranges)
    }

    /// The further names and addresses in the certificate of the API.
    pub(super) fn certified(&self) -> (Vec<&str>, Vec<IpAddr>) {
        let (mut names, mut addresses) = (vec![], vec![]);
        for one in &self.certified {
            match one.parse() {
                Ok(address) => addresses.push(address),
                Err(_) => names.push(one.as_str()),
            }
        }
        (names, addresses)
    }
}

fn ranges(all: &[IpNet]) -> String {
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    all.join(",")
}

/// A kubeconfig with the server and its authority and without a user.
fn cluster_kubeconfig(settings: &Settings, ca: &str) -> String {
    let server = SocketAddr::new(settings.advertise, settings.port);
    let authority = base64::engine::general_purpose::STANDARD.encode(ca);
    let cluster =
        json!({"certificate-authority-data": authority, "server": format!("https://{server}")});
    json!({"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "", "cluster": cluster}],
        "contexts": null, "current-context": "", "preferences": {}, "users": null})
    .to_string()
}

/// The configuration of kubeadm's nodes: kubeadm's defaults, with certificates that this control plane signs.
fn kubelet_configuration(settings: &Settings) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true},
            "x509": {"clientCAFile": "/etc/kubernetes/pki/ca.crt"}},
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [settings.service_range.address(10)], "clusterDomain": "cluster.local",
        "healthzBindAddress": "127.0.0.1", "healthzPort": 10248,
        "rotateCertificates": true, "serverTLSBootstrap": true, "staticPodPath": "/etc/kubernetes/manifests",
    })
}

/// The ClusterConfiguration that `kubeadm join` reads before it starts.
fn cluster_configuration(settings: &Settings) -> Value {
    let server = SocketAddr::new(settings.advertise, settings.port);
    json!({
        "apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "ClusterConfiguration", "clusterName": "kubernetes",
        "controlPlaneEndpoint": server.to_string(), "kubernetesVersion": KUBERNETES,
        "networking": {"dnsDomain": "cluster.local", "podSubnet": ranges(&settings.nodes.cluster_ranges),
            "serviceSubnet": settings.service_range.to_string()},
    })
}

/// The ConfigMaps: namespace, name and data.
fn config_maps(settings: &Settings, ca: &str) -> [(&'static str, &'static str, Value); 3] {
    let (namespace, name) = CLUSTER_INFO;
    let kubelet = kubelet_configuration(settings).to_string();
    let cluster = cluster_configuration(settings).to_string();
    [
        (
            namespace,
            name,
            json!({KUBECONFIG_KEY: cluster_kubeconfig(settings, ca)}),
        ),
        ("kube-system", "kubelet-config", json!({"kubelet": kubelet})),
        (
            "kube-system",
            "kubeadm-config",
            json!({"ClusterConfiguration": cluster}),
        ),
    ]
}

/// The roles and bindings, each with the path of its kind.
fn roles() -> Vec<(String, Value)> {
    let group = "rbac.authorization.k8s.io";
    let subject = |kind: &str, name: &str| json!({"kind": kind, "name": name, "apiGroup": group});
    let nodes = || {
        [
            subject("Group", NODE_GROUP),
            subject("Group", "system:nodes"),
        ]
    };
    let mut all = vec![];
    let (public, info) = CLUSTER_INFO;
    for (namespace, name, map, subjects) in [
        (
            public,
            "kubeadm:bootstrap-signer-clusterinfo",
            info,
            vec![subject("User", "system:anonymous")],
        ),
        (
            "kube-system",
            "kubeadm:kubelet-config",
            "kubelet-config",
            nodes().to_vec(),
        ),
        (
            "kube-system",
            "kubeadm:nodes-kubeadm-config",
            "kubeadm-config",
            nodes().to_vec(),
        ),
    ] {
        let path = |plural: &str| format!("/apis/{group}/v1/namespaces/{namespace}/{plural}");
        let rule = json!({"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [map], "verbs": ["get"]});
        let role = json!({"metadata": {"name": name}, "rules": [rule]});
        let binding = json!({"metadata": {"name": name}, "subjects": subjects,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name}});
        all.extend([(path("roles"), role), (path("rolebindings"), binding)]);
    }
    // `kubeadm join` checks that no Node of its name is Ready.
    let name = "kubeadm:get-nodes";
    let rule = json!({"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]});
    let binding = json!({"metadata": {"name": name}, "subjects": [subject("Group", NODE_GROUP)],
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name}});
    let path = |plural: &str| format!("/apis/{group}/v1/{plural}");
    all.push((
        path("clusterroles"),
        json!({"metadata": {"name": name}, "rules": [rule]}),
    ));
    all.push((path("clusterrolebindings"), binding));
    all
}

/// Creates the objects, and updates the data that the settings determine. Other data, such as signatures, stays.
pub(super) async fn bootstrap(api: &Api, settings: &Settings, ca: &str) -> anyhow::Result<()> {
    for (path, object) in roles() {
        post(api, &path, &object).await?;
    }
    for (namespace, name, data) in config_maps(settings, ca) {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps");
        let stored = api.store().get(&format!("configmaps/{namespace}/{name}"));
        let Some(stored) = stored else {
            post(
                api,
                &path,
                &json!({"metadata": {"name": name}, "data": data}),
            )
            .await?;
            continue;
        };
        let stored: Value = serde_json::from_slice(&stored.value)?;
        let is_same = |(key, value): (&String, &Value)| stored["data"].get(key) == Some(value);
        if data
            .as_object()
            .is_some_and(|data| data.iter().all(is_same))
        {
            continue;
        }
        let request = Request {
            method: "PATCH".into(),
            path: format!("{path}/{name}"),
            content_type: "application/merge-patch+json".into(),
            body: json!({"data": data}).to_string().into(),
            user: master(),
            ..Request::default()
        };
        if let Answer::Body { code, body, .. } = api.answer(request).await
            && code != 200
        {
            let why = String::from_utf8_lossy(&body);
            anyhow::bail!(
                "the API rejected a change of the ConfigMap {namespace}/{name} with {code}: {why}"
            );
        }
    }
    Ok(())
}
