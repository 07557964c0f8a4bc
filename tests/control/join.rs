//! Joining: bootstrap tokens, `cluster-info`, pod ranges of nodes and certificates, against a whole control plane over TLS. The
//! requests are those of `holdfast join` and, in their order, those of `kubeadm join` (`cmd/kubeadm/app/cmd/join.go`,
//! `app/cmd/phases/join`).

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use holdfast::join::discovery::{Target, discover};
use holdfast::join::token;
use holdfast_control::join::NodeSettings;
use holdfast_core::node::join::{AuthorityHash, StoredToken, Token};
use holdfast_core::node::signing;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::{authority, code, connect};
use holdfast_kubeapi::signing::{CertificateRequest, obtain, obtain_for_new_key};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

/// A control plane on a port of its own.
struct Plane {
    port: u16,
    client: Client,
    runs: tokio::task::JoinHandle<anyhow::Result<()>>,
    dir: tempfile::TempDir,
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.runs.abort();
    }
}

impl Plane {
    async fn start(nodes: NodeSettings) -> Plane {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let port = {
            let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            socket.local_addr().unwrap().port()
        };
        let settings = holdfast_control::Settings {
            dir: dir.path().into(),
            bind: vec![],
            port,
            advertise: [127, 0, 0, 1].into(),
            service_range: "10.96.0.0/16".parse().unwrap(),
            nodes,
        };
        let runs = tokio::spawn(holdfast_control::run(settings));
        let kubeconfig = dir.path().join("controller-manager.kubeconfig");
        for _ in 0..600 {
            if let Ok(client) = connect(&kubeconfig).await
                && client.apiserver_version().await.is_ok()
            {
                return Plane {
                    port,
                    client,
                    runs,
                    dir,
                };
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the control plane does not respond");
    }

    fn admin(&self) -> PathBuf {
        self.dir.path().join("controller-manager.kubeconfig")
    }

    async fn authority(&self) -> Vec<u8> {
        authority(&self.admin()).await.unwrap()
    }

    async fn target(&self, token: &Token) -> Target {
        Target {
            server: format!("https://127.0.0.1:{}", self.port),
            token: token.clone(),
            hashes: AuthorityHash::of_certificates(&self.authority().await),
        }
    }

    /// A client with the user's part of a kubeconfig; `{}` is the anonymous user.
    async fn as_user(&self, name: &str, user: Value) -> Client {
        let ca = String::from_utf8(self.authority().await).unwrap();
        let ca = holdfast_core::node::join::encode_authority(&ca);
        let server = format!("https://127.0.0.1:{}", self.port);
        let text = json!({"apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "x", "cluster": {"server": server, "certificate-authority-data": ca}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "users": [{"name": "x", "user": user}]});
        let path = self.dir.path().join(format!("{name}.kubeconfig"));
        std::fs::write(&path, text.to_string()).unwrap();
        connect(&path).await.unwrap()
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    async fn create_node(&self, node: Value) -> Node {
        let node = serde_json::from_value(node).unwrap();
        self.nodes()
            .create(&PostParams::default(), &node)
            .await
            .unwrap()
    }

    /// Waits until a Node has ranges.
    async fn ranges(&self, name: &str) -> Vec<String> {
        wait(&format!("pod ranges of {name}"), async || {
            let node = self.nodes().get(name).await.ok()?;
            let spec = node.spec?;
            assert_eq!(
                spec.pod_cidr.as_ref(),
                spec.pod_cidrs.as_ref().and_then(|all| all.first())
            );
            spec.pod_cidrs.filter(|all| !all.is_empty())
        })
        .await
    }
}

async fn wait<T>(what: &str, find: impl AsyncFn() -> Option<T>) -> T {
    for _ in 0..600 {
        if let Some(found) = find().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("not in time: {what}");
}

fn node(name: &str) -> Value {
    json!({"metadata": {"name": name}})
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_get_ranges_and_keep_them() {
    let plane = Plane::start(NodeSettings {
        cluster_ranges: vec!["10.244.0.0/22".parse().unwrap()],
        own: Some(("own".into(), "10.244.0.0/24".parse().unwrap())),
        ..NodeSettings::default()
    })
    .await;
    // The first range is reserved for the control plane's machine, in any order of registration.
    plane.create_node(node("a")).await;
    assert_eq!(plane.ranges("a").await, ["10.244.1.0/24"]);
    plane.create_node(node("own")).await;
    assert_eq!(plane.ranges("own").await, ["10.244.0.0/24"]);
    // A range that a Node already has stays, and no other Node gets it.
    let present = json!({"podCIDR": "10.244.2.0/24", "podCIDRs": ["10.244.2.0/24"]});
    plane
        .create_node(json!({"metadata": {"name": "b"}, "spec": present}))
        .await;
    plane.create_node(node("c")).await;
    assert_eq!(plane.ranges("c").await, ["10.244.3.0/24"]);
    assert_eq!(plane.ranges("b").await, ["10.244.2.0/24"]);

    // No free range: an event on the Node with the remedy, and a range as soon as one is released.
    plane.create_node(node("d")).await;
    let events: Api<Event> = Api::namespaced(plane.client.clone(), "default");
    let event = wait("the event", async || {
        let all = events.list(&ListParams::default()).await.ok()?.items;
        all.into_iter()
            .find(|e| e.reason.as_deref() == Some("CIDRNotAvailable"))
    })
    .await;
    assert_eq!(event.involved_object.name.as_deref(), Some("d"));
    assert_eq!(event.type_.as_deref(), Some("Warning"));
    let message = event.message.unwrap();
    assert!(
        message.contains("10.244.0.0/22") && message.contains("--cluster-cidr"),
        "{message}"
    );
    plane
        .nodes()
        .delete("b", &DeleteParams::default())
        .await
        .unwrap();
    assert_eq!(plane.ranges("d").await, ["10.244.2.0/24"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_nodes_at_once_get_a_hundred_ranges() {
    let plane = Plane::start(NodeSettings {
        cluster_ranges: vec![
            "10.244.0.0/16".parse().unwrap(),
            "fd00::/48".parse().unwrap(),
        ],
        ..NodeSettings::default()
    })
    .await;
    let names: Vec<String> = (0..100).map(|n| format!("n{n}")).collect();
    futures::future::join_all(names.iter().map(|name| plane.create_node(node(name)))).await;
    let mut all = BTreeSet::new();
    for name in &names {
        let ranges = plane.ranges(name).await;
        assert_eq!(ranges.len(), 2, "{name}: {ranges:?}");
        assert!(
            ranges[0].ends_with(".0/24") && ranges[1].ends_with("/64"),
            "{ranges:?}"
        );
        all.extend(ranges);
    }
    assert_eq!(all.len(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_created_discovered_and_deleted() {
    let plane = Plane::start(NodeSettings::default()).await;
    let admin = plane.admin();
    let created = token::create(&admin, None, "1h", "for a test")
        .await
        .unwrap();
    let target = plane.target(&created).await;
    let found = discover(&target).await.unwrap();
    assert_eq!(found.server, target.server);
    assert_eq!(found.authority.as_bytes(), plane.authority().await);
    let command = token::join_command(&admin, &target.server, &created)
        .await
        .unwrap();
    let expected = format!(
        "holdfast join 127.0.0.1:{} --token {} --discovery-token-ca-cert-hash {}",
        plane.port,
        created.text(),
        target.hashes[0]
    );
    assert_eq!(command, expected);
    let again = token::create(&admin, Some(created.clone()), "0", "").await;
    assert!(again.unwrap_err().to_string().contains("token delete"));
    let table = token::list(&admin, false).await.unwrap();
    assert!(
        table.contains(&created.id) && table.contains("for a test"),
        "{table}"
    );
}

/// Checks that a discovery fails, with an error that has these parts.
async fn fails(target: &Target, parts: &[&str]) {
    let error = discover(target).await.unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_authority_or_token_is_refused_with_value_and_remedy() {
    let plane = Plane::start(NodeSettings::default()).await;
    let admin = plane.admin();
    let created = token::create(&admin, None, "1h", "").await.unwrap();
    let target = plane.target(&created).await;
    discover(&target).await.unwrap();
    // Another authority, another secret, an unknown token.
    let hash = format!("sha256:{}", "0".repeat(64));
    let other = Target {
        hashes: vec![AuthorityHash::parse(&hash).unwrap()],
        ..target.clone()
    };
    fails(
        &other,
        &[&hash, &target.hashes[0].to_string(), "--print-join"],
    )
    .await;
    let other = Target {
        token: Token::of(&created.id, "0000000000000000").unwrap(),
        ..target.clone()
    };
    fails(&other, &[&created.id, "wrong"]).await;

    // A deleted token is not signed any more.
    assert_eq!(
        token::delete(&admin, &created.text()).await.unwrap(),
        created.id
    );
    assert!(token::delete(&admin, &created.id).await.is_err());
    let infos: Api<ConfigMap> = Api::namespaced(plane.client.clone(), "kube-public");
    wait("the removal of the signature", async || {
        let data = infos.get("cluster-info").await.ok()?.data?;
        data.keys()
            .all(|key| !key.starts_with("jws-"))
            .then_some(())
    })
    .await;
    fails(
        &target,
        &[
            &created.id,
            "unknown to this cluster or has expired",
            "token create",
        ],
    )
    .await;

    // An expired token is deleted.
    let short = token::create(&admin, None, "1s", "").await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(plane.client.clone(), "kube-system");
    let name = format!("bootstrap-token-{}", short.id);
    wait("the deletion of the expired token", async || {
        secrets.get_opt(&name).await.ok()?.is_none().then_some(())
    })
    .await;
}

/// Requests a certificate, and returns it with its key as the user's part of a kubeconfig.
async fn certificate(
    client: &Client,
    signer: &'static str,
    user: &str,
    group: &str,
) -> Result<Value, String> {
    use base64::Engine as _;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let signer = (signer, &["digital signature", "client auth"][..]);
    let limit = Duration::from_secs(3);
    let issued = obtain_for_new_key(client, signer, (group, user), &[], limit).await?;
    let (certificate, key) = (encode(&issued.certificate), encode(&issued.key));
    Ok(json!({"client-certificate-data": certificate, "client-key-data": key}))
}

fn maps(client: &Client, namespace: &str) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), namespace)
}

/// The status of the response to a read of a ConfigMap.
async fn status(client: &Client, namespace: &str, name: &str) -> u16 {
    match maps(client, namespace).get(name).await {
        Ok(_) => 200,
        Err(error) => code(&error).unwrap(),
    }
}

/// The document in a ConfigMap of kube-system.
async fn document(client: &Client, name: &str, key: &str) -> Value {
    let map = maps(client, "kube-system").get(name).await.unwrap();
    serde_json::from_str(&map.data.unwrap()[key]).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_requests_of_kubeadm_join_are_answered() {
    let plane = Plane::start(NodeSettings::default()).await;
    let created = token::create(&plane.admin(), None, "1h", "").await.unwrap();
    discover(&plane.target(&created).await).await.unwrap();

    // Discovery: the anonymous user reads cluster-info, and nothing else.
    let anonymous = plane.as_user("anonymous", json!({})).await;
    assert_eq!(status(&anonymous, "kube-public", "cluster-info").await, 200);
    assert_eq!(status(&anonymous, "kube-public", "other").await, 403);
    assert_eq!(
        status(&anonymous, "kube-system", "kubeadm-config").await,
        403
    );
    let listed = maps(&anonymous, "kube-public")
        .list(&ListParams::default())
        .await;
    assert_eq!(code(&listed.err().unwrap()), Some(403));

    // Preflight: the token reads the configuration; kube-proxy's may be absent or forbidden.
    let bootstrap = plane
        .as_user("bootstrap", json!({"token": created.text()}))
        .await;
    for name in ["kubeadm-config", "kubelet-config"] {
        assert_eq!(status(&bootstrap, "kube-system", name).await, 200, "{name}");
    }
    assert_eq!(status(&bootstrap, "kube-system", "kube-proxy").await, 403);
    let cluster = document(&bootstrap, "kubeadm-config", "ClusterConfiguration").await;
    assert_eq!(cluster["apiVersion"], "kubeadm.k8s.io/v1beta4");
    assert_eq!(
        cluster["kubernetesVersion"],
        holdfast_core::version::KUBERNETES
    );
    assert_eq!(cluster["networking"]["podSubnet"], "10.244.0.0/16");
    let kubelet = document(&bootstrap, "kubelet-config", "kubelet").await;
    assert_eq!(kubelet["kind"], "KubeletConfiguration");
    assert_eq!(kubelet["clusterDNS"], json!(["10.96.0.10"]));
    assert_eq!(kubelet["serverTLSBootstrap"], true);

    start_kubelet(&plane, &bootstrap).await;
}

/// The requests of the phase `kubelet-start`: no Node of this name; then the kubelet requests its certificate, and registers.
async fn start_kubelet(plane: &Plane, bootstrap: &Client) {
    let nodes: Api<Node> = Api::all(bootstrap.clone());
    assert!(nodes.get_opt("worker").await.unwrap().is_none());
    let listed = nodes.list(&ListParams::default()).await;
    assert_eq!(code(&listed.err().unwrap()), Some(403));
    let secrets: Api<Secret> = Api::namespaced(bootstrap.clone(), "kube-system");
    assert_eq!(code(&secrets.get("x").await.unwrap_err()), Some(403));
    let user = "system:node:worker";
    let pair = certificate(bootstrap, signing::CLIENT, user, "system:nodes")
        .await
        .unwrap();
    let worker = plane.as_user("worker", pair).await;
    let object = serde_json::from_value(node("worker")).unwrap();
    let nodes: Api<Node> = Api::all(worker.clone());
    nodes.create(&PostParams::default(), &object).await.unwrap();
    assert_eq!(plane.ranges("worker").await, ["10.244.0.0/24"]);
    // The node reads both configurations at upgrades (`kubeadm upgrade node`).
    for name in ["kubeadm-config", "kubelet-config"] {
        assert_eq!(status(&worker, "kube-system", name).await, 200, "{name}");
    }
    // kubeadm annotates the Node with the runtime's socket.
    let patch = Patch::Merge(
        json!({"metadata": {"annotations": {"kubeadm.alpha.kubernetes.io/cri-socket": "unix:///x"}}}),
    );
    nodes
        .patch("worker", &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// A request for a serving certificate, with the names `names`.
fn serving_request(node: &str, names: &[&str]) -> CertificateRequest {
    let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
    let mut params = rcgen::CertificateParams::new(names).unwrap();
    let subject = &mut params.distinguished_name;
    subject.push(rcgen::DnType::OrganizationName, "system:nodes");
    subject.push(rcgen::DnType::CommonName, format!("system:node:{node}"));
    let key = rcgen::KeyPair::generate().unwrap();
    CertificateRequest {
        name: None,
        signer: signing::SERVING,
        usages: &["digital signature", "server auth"],
        request: params.serialize_request(&key).unwrap().pem().unwrap(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn serving_certificates_are_approved_when_their_names_belong_to_the_node() {
    let plane = Plane::start(NodeSettings::default()).await;
    let (clients, _) = two_nodes(&plane).await;
    let limit = Duration::from_secs(3);
    let fine = serving_request("one", &["one", "192.0.2.1"]);
    let pem = obtain(&clients[0], &fine, limit).await.unwrap();
    assert!(signing::covers_names(
        pem.as_bytes(),
        &["one".into(), "192.0.2.1".into()]
    ));
    // Another node's name or address stays for an operator.
    for names in [&["one", "192.0.2.2"][..], &["two"], &["192.0.2.3"]] {
        let result = obtain(&clients[0], &serving_request("one", names), limit).await;
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("kubectl certificate approve"),
            "{names:?}: {error}"
        );
    }
    // An address that the Node reports later.
    let late = serving_request("one", &["192.0.2.3"]);
    let (issued, ()) = tokio::join!(obtain(&clients[0], &late, Duration::from_secs(10)), async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        report(&clients[0], "one", &["192.0.2.1", "192.0.2.3"]).await;
    });
    issued.unwrap();
}

/// Two nodes with a client each, and the client of a bootstrap token.
async fn two_nodes(plane: &Plane) -> ([Client; 2], Client) {
    let created = token::create(&plane.admin(), None, "1h", "").await.unwrap();
    let user = json!({"token": created.text()});
    let bootstrap = plane.as_user("bootstrap", user).await;
    let mut clients = vec![];
    for (name, address) in [("one", "192.0.2.1"), ("two", "192.0.2.2")] {
        let user = format!("system:node:{name}");
        let pair = certificate(&bootstrap, signing::CLIENT, &user, "system:nodes").await;
        let client = plane.as_user(name, pair.unwrap()).await;
        let nodes: Api<Node> = Api::all(client.clone());
        let object = serde_json::from_value(node(name)).unwrap();
        nodes.create(&PostParams::default(), &object).await.unwrap();
        report(&client, name, &[address]).await;
        clients.push(client);
    }
    (clients.try_into().ok().unwrap(), bootstrap)
}

/// Reports the addresses of a node.
async fn report(client: &Client, name: &str, addresses: &[&str]) {
    let mut all = vec![json!({"type": "Hostname", "address": name})];
    all.extend(
        addresses
            .iter()
            .map(|a| json!({"type": "InternalIP", "address": a})),
    );
    let patch = Patch::Merge(json!({"status": {"addresses": all}}));
    let nodes: Api<Node> = Api::all(client.clone());
    let patched = nodes
        .patch_status(name, &PatchParams::default(), &patch)
        .await;
    patched.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gets_the_certificate_of_its_own_proxy() {
    let plane = Plane::start(NodeSettings::default()).await;
    let (clients, bootstrap) = two_nodes(&plane).await;
    // The service proxy of this node, not of another or an unknown one.
    let proxy = async |client: &Client, name: &str| {
        let user = format!("{}{name}", signing::PROXY_USER);
        certificate(client, signing::PROXY, &user, signing::PROXY_GROUP).await
    };
    assert!(proxy(&clients[0], "one").await.is_ok());
    for (client, name) in [(&clients[0], "two"), (&bootstrap, "one")] {
        assert!(proxy(client, name).await.is_err(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_description_is_signed_again_and_its_other_data_stays() {
    let plane = Plane::start(NodeSettings::default()).await;
    let stored = StoredToken::for_nodes(Token::parse("abcdef.0123456789abcdef").unwrap(), None, "");
    let secrets: Api<Secret> = Api::namespaced(plane.client.clone(), "kube-system");
    let secret: Secret = serde_json::from_value(stored.secret()).unwrap();
    let secret = secrets
        .create(&PostParams::default(), &secret)
        .await
        .unwrap();
    assert_eq!(secret.name_any(), "bootstrap-token-abcdef");
    let infos: Api<ConfigMap> = Api::namespaced(plane.client.clone(), "kube-public");
    let signed_is = async |content: &str| {
        let expected = stored.token.sign(content);
        wait("the signature", async || {
            let data = infos.get("cluster-info").await.ok()?.data?;
            (data.get("jws-kubeconfig-abcdef") == Some(&expected)).then_some(())
        })
        .await;
    };
    let patch = Patch::Merge(json!({"data": {"kubeconfig": "clusters: []", "own": "kept"}}));
    infos
        .patch("cluster-info", &PatchParams::default(), &patch)
        .await
        .unwrap();
    signed_is("clusters: []").await;
    let data = infos.get("cluster-info").await.unwrap().data.unwrap();
    assert_eq!(data["own"], "kept");
}
