//! A node joins with a bootstrap token, obtains a client certificate, serves with a certificate that the test
//! approves, and renews expiring certificates. This runs against our own control plane and needs no runtime.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use support::Cluster;
use support::client::Administrator;
use support::real::ControlPlane;

const TOKEN: (&str, &str) = ("abcdef", "0123456789abcdef");

/// An agent that is killed when dropped.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As kubeadm starts it.
fn join(dir: &Path, port: u16, bootstrap: bool) -> Agent {
    let config = format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nrotateCertificates: true\nserverTLSBootstrap: true\nmakeIPTablesUtilChains: false\nevictionHard: {{}}\nport: {port}\nhealthzPort: 0\npodLogsDir: {}\n",
        dir.join("logs").display()
    );
    std::fs::write(dir.join("config.yaml"), config).unwrap();
    let at = |name: &str| dir.join(name).display().to_string();
    // The program behaves as its file name requires.
    let program = dir.join("kubelet");
    if !program.exists() {
        std::os::unix::fs::symlink(support::holdfast(), &program).unwrap();
    }
    let mut command = Command::new(program);
    if bootstrap {
        command.args(["--bootstrap-kubeconfig", &at("bootstrap.conf")]);
    }
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(dir.join("log"))
        .unwrap();
    command.args([
        "--kubeconfig",
        &at("kubelet.conf"),
        "--config",
        &at("config.yaml"),
        "--root-dir",
        &at("root"),
        "--device-plugin-dir",
        &at("root/device-plugins"),
    ]);
    command.args([
        "--hostname-override",
        "second",
        "--container-runtime-endpoint",
        &format!("unix://{}", at("nothing.sock")),
    ]);
    Agent(
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap(),
    )
}

fn as_node(dir: &Path, arguments: &[&str]) -> String {
    let output = Command::new("kubectl")
        .arg("--kubeconfig")
        .arg(dir.join("kubelet.conf"))
        .args(arguments)
        .output()
        .unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Whether an agent's log contains the doctor's finding, with its remedy, that the runtime does not answer.
fn names_the_runtime(log: &str) -> bool {
    let mut lines = log.lines().filter(|line| line.contains("doctor: "));
    lines.any(|line| line.contains("nothing.sock does not answer") && line.contains("remedy"))
}

#[test]
fn a_node_joins_with_a_token_and_renews_its_certificates() {
    let cluster = Cluster::start("credentials", 47);
    let dir = tempfile::tempdir().unwrap();
    let (dir, pki) = (dir.path(), dir.path().join("root/pki"));
    let view = cluster.kubectl(&["config", "view", "--raw", "-o", "json"]);
    let view: serde_json::Value = serde_json::from_str(&view).unwrap();
    let there = &view["clusters"][0]["cluster"];
    let bootstrap = |secret: &str| {
        format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {there}}}]\nusers: [{{name: u, user: {{token: '{}.{secret}'}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n",
            TOKEN.0
        )
    };
    let log = || std::fs::read_to_string(dir.join("log")).unwrap_or_default();
    let _prepared = Prepared::new(&cluster);
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: bootstrap-token-{id}, namespace: kube-system}}\ntype: bootstrap.kubernetes.io/token\nstringData: {{token-id: '{id}', token-secret: '{secret}', usage-bootstrap-authentication: 'true', auth-extra-groups: 'system:bootstrappers:kubeadm:default-node-token'}}",
        id = TOKEN.0,
        secret = TOKEN.1
    ));
    // A wrong token is rejected; the agent logs this and keeps trying.
    std::fs::write(dir.join("bootstrap.conf"), bootstrap("ffffffffffffffff")).unwrap();
    let agent = join(dir, 17_999, true);
    cluster.wait("the agent to log the refusal", || {
        log().contains("the node's certificate failed") && log().contains("Unauthorized")
    });
    cluster.wait("the doctor's finding", || names_the_runtime(&log()));
    drop(agent);
    assert!(!dir.join("kubelet.conf").exists());

    std::fs::write(dir.join("bootstrap.conf"), bootstrap(TOKEN.1)).unwrap();
    let agent = join(dir, 17_999, true);
    let current = pki.join("kubelet-client-current.pem");
    cluster.wait("the first certificate", || {
        dir.join("kubelet.conf").exists() && current.exists()
    });
    cluster.wait("the first key to remain in the pair only", || {
        !pki.join("kubelet-client.key.tmp").exists()
    });
    let request = cluster.kubectl(&["get", "csr"]);
    assert!(
        request.contains("node-csr-")
            && request.contains("system:bootstrap:abcdef")
            && request.contains("Approved,Issued"),
        "{request}"
    );
    assert!(as_node(dir, &["auth", "whoami"]).contains("system:node:second"));
    // The node has only the rights of a node.
    assert!(as_node(dir, &["delete", "node", "--all"]).contains("forbidden"));
    assert!(
        as_node(
            dir,
            &[
                "get",
                "nodes",
                "--as",
                "kubernetes-admin",
                "--as-group",
                "system:masters"
            ]
        )
        .contains("cannot impersonate")
    );
    // An administrator may impersonate the node and then has only its rights.
    let as_second = |arguments: &[&str]| {
        let whom = ["--as", "system:node:second", "--as-group", "system:nodes"];
        let output = Command::new(support::holdfast())
            .args(["kubeconfig", "--name", &cluster.name])
            .output()
            .unwrap();
        std::fs::write(dir.join("admin.conf"), output.stdout).unwrap();
        let output = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(dir.join("admin.conf"))
            .args(whom)
            .args(arguments)
            .output()
            .unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    assert!(as_second(&["auth", "whoami"]).contains("system:node:second"));
    assert!(as_second(&["auth", "can-i", "delete", "nodes"]).contains("no"));
    assert!(as_second(&["delete", "node", "--all"]).contains("forbidden"));
    // The serving certificate waits for approval.
    let waiting = || serving_request(&cluster);
    cluster.wait("the request for a serving certificate", || {
        !waiting().is_empty()
    });
    assert!(!pki.join("kubelet-server-current.pem").exists());
    cluster.kubectl(&["certificate", "approve", &waiting()]);
    cluster.wait("the serving certificate", || {
        pki.join("kubelet-server-current.pem").exists()
    });
    drop(agent);
    if support::skip::needs_bundled("this test signs certificates that expire soon") {
        return;
    }

    // A certificate past nine tenths of its lifetime is renewed immediately, with its own credentials.
    let (key, now) = (
        rcgen::KeyPair::generate().unwrap(),
        jiff::Timestamp::now().as_second(),
    );
    let at = |second: i64| {
        rcgen::date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(second as u64)
    };
    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::OrganizationName, "system:nodes");
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "system:node:second");
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    (params.not_before, params.not_after) = (at(now - 10_000), at(now + 600));
    let read = |name: &str| {
        std::fs::read_to_string(cluster.data().join("control/pki").join(name)).unwrap()
    };
    let issuer = rcgen::Issuer::from_ca_cert_pem(
        &read("ca.crt"),
        rcgen::KeyPair::from_pem(&read("ca.key")).unwrap(),
    )
    .unwrap();
    let old = params.signed_by(&key, &issuer).unwrap().pem();
    let first: PathBuf = std::fs::read_link(&current).unwrap();
    std::fs::write(&first, format!("{old}{}", key.serialize_pem())).unwrap();
    // The name of a pair has a resolution of one second.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let agent = join(dir, 17_999, false);
    cluster.wait("the renewed certificate", || {
        std::fs::read_link(&current).unwrap() != first
    });
    assert!(as_node(dir, &["auth", "whoami"]).contains("system:node:second"));
    drop(agent);

    // An expired certificate is replaced by requesting a new one with the token.
    (params.not_before, params.not_after) = (at(now - 10_000), at(now - 60));
    let ended = params.signed_by(&key, &issuer).unwrap().pem();
    std::fs::write(
        std::fs::read_link(&current).unwrap(),
        format!("{ended}{}", key.serialize_pem()),
    )
    .unwrap();
    let second = std::fs::read_link(&current).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let agent = join(dir, 17_999, true);
    cluster.wait("another first certificate", || {
        std::fs::read_link(&current).unwrap() != second
            && log().matches("received its certificate").count() == 2
    });
    assert!(as_node(dir, &["auth", "whoami"]).contains("system:node:second"));
    drop(agent);
    assert!(!log().contains(TOKEN.1), "the token is not logged");
}

/// The name of the second node's pending CSR for a serving certificate; empty if there is none.
fn serving_request(cluster: &Cluster) -> String {
    let list = cluster.kubectl(&["get", "csr", "-o", "json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let mut all = list["items"].as_array().unwrap().iter();
    let is_its = |spec: &serde_json::Value| {
        spec["signerName"] == "kubernetes.io/kubelet-serving"
            && spec["username"] == "system:node:second"
    };
    // A decided CSR may be an earlier test's.
    let found = all.find(|r| is_its(&r["spec"]) && r["status"]["conditions"].is_null());
    found.map_or(String::new(), |request| {
        request["metadata"]["name"].as_str().unwrap().to_owned()
    })
}

/// What kubeadm reads in the output of `kubelet --version`, as its regular expression takes it:
/// `^\s*Kubernetes v((0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)([-\w.+]*)?)\s*$`.
fn version_for_kubeadm(output: &str) -> Option<&str> {
    let version = output.trim().strip_prefix("Kubernetes v")?;
    let mut numbers = version.splitn(3, '.');
    let is_number = |text: &str| {
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        digits && (text == "0" || !text.starts_with('0') && !text.is_empty())
    };
    let (major, minor, patch) = (numbers.next()?, numbers.next()?, numbers.next()?);
    let end = patch
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(patch.len());
    let (patch, rest) = patch.split_at(end);
    let is_rest = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    let is_read = [major, minor, patch].into_iter().all(is_number) && rest.chars().all(is_rest);
    is_read.then_some(version)
}

/// A program's output, if it succeeds.
fn printed(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    output.status.success().then_some(text)
}

/// What kubeadm 1.36 expects on a node with a running kubelet, before an apiserver runs: the source
/// file, and the check of the directory of [`join`].
const KUBEADM_CHECKS: [(&str, fn(&Path) -> bool); 5] = [
    (
        "cmd/kubeadm/app/preflight/utils.go, GetKubeletVersion",
        |dir| {
            let output = printed(&dir.join("kubelet"), &["--version"]);
            output.as_deref().and_then(version_for_kubeadm) == Some("1.36.2")
        },
    ),
    ("component-base/version/verflag/verflag.go, true", |dir| {
        let output = printed(&dir.join("kubelet"), &["--version=true"]);
        output.as_deref() == Some("Kubernetes v1.36.2\n")
    }),
    ("component-base/version/verflag/verflag.go, raw", |dir| {
        let output = printed(&dir.join("kubelet"), &["--version=raw"]).unwrap_or_default();
        output.starts_with("version.Info{Major:\"1\", Minor:\"36\",")
            && output.contains("GitVersion:\"v1.36.2\"")
    }),
    (
        "cmd/kubeadm/app/cmd/phases/init/kubeletfinalize.go, the file",
        |dir| dir.join("root/pki/kubelet-client-current.pem").exists(),
    ),
    (
        "cmd/kubeadm/app/cmd/phases/init/kubeletfinalize.go, the pair that kubelet.conf refers to then",
        |dir| {
            let pair = std::fs::read_to_string(dir.join("root/pki/kubelet-client-current.pem"));
            pair.is_ok_and(|pair| {
                pair.contains("BEGIN CERTIFICATE") && pair.contains("PRIVATE KEY")
            })
        },
    ),
];

/// kubeadm's checks of a kubelet that `kubeadm init` has just started: without an apiserver, and here
/// without a runtime.
#[test]
fn kubeadm_finds_the_files_and_versions_it_checks() {
    use base64::Engine as _;
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["system:node:second".into()]).unwrap();
    let encoded = |pem: String| base64::engine::general_purpose::STANDARD.encode(pem);
    let user = serde_json::json!({"client-certificate-data": encoded(made.cert.pem()),
        "client-key-data": encoded(made.signing_key.serialize_pem())});
    let cluster =
        serde_json::json!({"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": true});
    let kubeconfig = serde_json::json!({"apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]});
    std::fs::write(dir.path().join("kubelet.conf"), kubeconfig.to_string()).unwrap();
    let agent = join(dir.path(), 17_996, false);
    let deadline = std::time::Instant::now() + support::condition_timeout();
    for (source, check) in KUBEADM_CHECKS {
        while !check(dir.path()) {
            let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
            assert!(std::time::Instant::now() < deadline, "{source}: {log}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    drop(agent);
    let own = support::holdfast();
    assert_eq!(
        printed(&own, &["agent", "--version"]).unwrap(),
        "Kubernetes v1.36.2\n"
    );
    let version = printed(&own, &["--version"]).unwrap();
    let commit = version
        .strip_prefix("holdfast 0.1.0 (")
        .and_then(|v| v.strip_suffix("), Kubernetes v1.36.2\n"));
    let commit = commit.unwrap_or_else(|| panic!("{version}"));
    let is_commit = commit.len() == 12 && commit.bytes().all(|b| b.is_ascii_hexdigit());
    assert!(is_commit || commit == "unknown", "{commit}");
    assert_eq!(
        printed(&dir.path().join("kubelet"), &["--version=v1.30.0"]),
        None
    );
    assert_eq!(version_for_kubeadm("kubelet 0.1.0"), None);
}

/// Name, role and group.
const BINDINGS: [(&str, &str, &str); 3] = [
    (
        "t-bootstrap",
        "system:node-bootstrapper",
        "system:bootstrappers:kubeadm:default-node-token",
    ),
    (
        "t-approve",
        "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
        "system:bootstrappers:kubeadm:default-node-token",
    ),
    (
        "t-renew",
        "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient",
        "system:nodes",
    ),
];

/// The bindings that let nodes request certificates in a real cluster, as kubeadm creates them; the
/// bundled control plane has them from its start. Dropping this removes them and the resulting objects,
/// as such a cluster outlives the test.
struct Prepared<'a>(&'a Cluster);

impl Prepared<'_> {
    fn new(cluster: &Cluster) -> Prepared<'_> {
        if let ControlPlane::Real(_) = cluster.control {
            for (name, role, group) in BINDINGS {
                let (role, group) = (format!("--clusterrole={role}"), format!("--group={group}"));
                cluster.kubectl(&["create", "clusterrolebinding", name, &role, &group]);
            }
        }
        // Leftovers of an interrupted test.
        while let name = serving_request(cluster)
            && !name.is_empty()
        {
            cluster.kubectl(&["delete", "csr", &name]);
        }
        Prepared(cluster)
    }
}

impl Drop for Prepared<'_> {
    fn drop(&mut self) {
        if let ControlPlane::Bundled = self.0.control {
            return;
        }
        let token = format!("bootstrap-token-{}", TOKEN.0);
        let names = BINDINGS.map(|(name, ..)| name);
        let bindings = [&["clusterrolebinding"], &names[..]].concat();
        for what in [
            &bindings[..],
            &["node", "second"],
            &["secret", &token, "-n", "kube-system"],
        ] {
            let delete = [&["delete", "--ignore-not-found"], what].concat();
            let _ = support::client::kubectl(self.0, &delete).output();
        }
    }
}

/// Creates the objects that `kubeadm init` leaves in a cluster for joining nodes. Returns the
/// configuration of their agents.
fn prepared(cluster: &Cluster, server: &str, containers: &Cluster) -> String {
    use base64::Engine as _;
    let ca = std::fs::read(cluster.data().join("control/pki/ca.crt")).unwrap();
    let ca = base64::engine::general_purpose::STANDARD.encode(ca);
    let info = format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: ''\n  cluster:\n    server: {server}\n    certificate-authority-data: {ca}\ncontexts: null\ncurrent-context: ''\nusers: null\n"
    );
    let config = format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nauthentication:\n  anonymous: {{enabled: false}}\n  webhook: {{cacheTTL: 0s, enabled: true}}\n  x509: {{clientCAFile: CA_FILE}}\nauthorization: {{mode: Webhook, webhook: {{cacheAuthorizedTTL: 0s, cacheUnauthorizedTTL: 0s}}}}\ncgroupDriver: cgroupfs\nclusterDNS: [10.96.0.10]\nclusterDomain: cluster.local\ncpuManagerReconcilePeriod: 0s\nevictionPressureTransitionPeriod: 0s\nfileCheckFrequency: 0s\nhealthzBindAddress: 127.0.0.1\nhealthzPort: 17997\nmakeIPTablesUtilChains: false\nhttpCheckFrequency: 0s\nimageMaximumGCAge: 0s\nimageMinimumGCAge: 0s\nlogging: {{flushFrequency: 0, options: {{json: {{infoBufferSize: '0'}}, text: {{infoBufferSize: '0'}}}}, verbosity: 0}}\nmemorySwap: {{}}\nfailSwapOn: false\nnodeStatusReportFrequency: 0s\nnodeStatusUpdateFrequency: 0s\nrotateCertificates: true\nserverTLSBootstrap: true\nruntimeRequestTimeout: 0s\nshutdownGracePeriod: 0s\nshutdownGracePeriodCriticalPods: 0s\nstreamingConnectionIdleTimeout: 0s\nsyncFrequency: 0s\nvolumeStatsAggPeriod: 0s\nport: 17998\nimageGCHighThresholdPercent: 100\nevictionHard: {{imagefs.available: 0%, nodefs.available: 0%}}\ncontainerRuntimeEndpoint: unix://{}\npodLogsDir: {}\ncgroupRoot: /holdfast-{}\n",
        containers.run_dir().join("containerd.sock").display(),
        containers.data().join("pods-logs").display(),
        containers.name
    );
    let map = |namespace: &str, name: &str, key: &str, text: &str| {
        serde_json::json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}, "data": {key: text}})
            .to_string()
    };
    let readable = |namespace: &str, name: &str, role: &str, subjects: serde_json::Value| {
        let rule = serde_json::json!({"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get"]});
        let group = "rbac.authorization.k8s.io";
        let of = serde_json::json!({"apiVersion": format!("{group}/v1"), "kind": "Role", "metadata": {"name": role, "namespace": namespace}, "rules": [rule]});
        let bound = serde_json::json!({"apiVersion": format!("{group}/v1"), "kind": "RoleBinding", "metadata": {"name": role, "namespace": namespace},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": role}, "subjects": subjects});
        format!("{of}\n---\n{bound}\n---\n")
    };
    let groups = serde_json::json!([{"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "system:bootstrappers:kubeadm:default-node-token"}]);
    let anybody = serde_json::json!([{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "system:anonymous"}]);
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: bootstrap-token-{id}, namespace: kube-system}}\ntype: bootstrap.kubernetes.io/token\nstringData: {{token-id: '{id}', token-secret: '{secret}', usage-bootstrap-authentication: 'true', usage-bootstrap-signing: 'true', auth-extra-groups: 'system:bootstrappers:kubeadm:default-node-token'}}\n---\n{}\n---\n{}\n---\n{}\n---\n{}{}{}",
        map("kube-public", "cluster-info", "kubeconfig", &info),
        map("kube-system", "kubelet-config", "kubelet", &config),
        map("kube-system", "kubeadm-config", "ClusterConfiguration", "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: v1.36.2\n"),
        readable("kube-public", "cluster-info", "kubeadm:bootstrap-signer-clusterinfo", anybody),
        readable("kube-system", "kubelet-config", "kubeadm:kubelet-config", groups.clone()),
        readable("kube-system", "kubeadm-config", "kubeadm:nodes-kubeadm-config", groups),
        id = TOKEN.0,
        secret = TOKEN.1
    ));
    server.to_owned()
}

/// The request of `WaitForKubelet` (`cmd/kubeadm/app/util/apiclient/wait.go`).
fn is_healthy() -> bool {
    let mut curl = Command::new("curl");
    curl.args(["-s", "http://127.0.0.1:17997/healthz"]);
    curl.output().unwrap().stdout == b"ok"
}

#[test]
fn a_node_joins_with_the_files_of_kubeadm() {
    if support::skip::needs_bundled("the test creates the objects of kubeadm init") {
        return;
    }
    let (cluster, other) = (Cluster::start("joined", 52), Cluster::start("joiner", 53));
    // Only the containerd of the second cluster keeps running: its machine is the joining node.
    let image = support::busybox(&other);
    for part in ["agent", "control-plane"] {
        other.kill(part);
    }
    let server = prepared(
        &cluster,
        &format!("https://127.0.0.1:{}", 16_400 + cluster.number),
        &other,
    );
    let dir = tempfile::tempdir().unwrap();
    let (etc, lib) = (
        dir.path().join("etc/kubernetes"),
        dir.path().join("var/lib/kubelet"),
    );
    std::fs::create_dir_all(etc.join("pki")).unwrap();
    std::fs::create_dir_all(&lib).unwrap();

    // Anonymous discovery returns the CA. Then the configuration is read with the token.
    let get = |path: &str, more: &[&str]| -> serde_json::Value {
        let output = Command::new("curl")
            .arg("-sk")
            .args(more)
            .arg(format!("{server}/api/v1/namespaces/{path}"))
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let bearer = format!("Authorization: Bearer {}.{}", TOKEN.0, TOKEN.1);
    assert_eq!(
        get("kube-system/configmaps/kubelet-config", &[])["code"],
        403,
        "anonymous users cannot read kubelet-config"
    );
    let info = get("kube-public/configmaps/cluster-info", &[]);
    let info: serde_json::Value =
        serde_saphyr::from_str(info["data"]["kubeconfig"].as_str().unwrap()).unwrap();
    let shared = &info["clusters"][0]["cluster"];
    let ca = {
        use base64::Engine as _;
        base64::engine::general_purpose::STANDARD
            .decode(shared["certificate-authority-data"].as_str().unwrap())
            .unwrap()
    };
    std::fs::write(etc.join("pki/ca.crt"), ca).unwrap();
    assert!(get("kube-system/configmaps/kubeadm-config", &["-H", &bearer])["data"]["ClusterConfiguration"].is_string());
    let config = get("kube-system/configmaps/kubelet-config", &["-H", &bearer]);
    let config = config["data"]["kubelet"]
        .as_str()
        .unwrap()
        .replace("CA_FILE", &etc.join("pki/ca.crt").display().to_string());
    std::fs::write(lib.join("config.yaml"), config).unwrap();
    let bootstrap = serde_json::json!({"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "kubernetes", "cluster": shared}], "current-context": "tls-bootstrap-token-user@kubernetes",
        "contexts": [{"name": "tls-bootstrap-token-user@kubernetes", "context": {"cluster": "kubernetes", "user": "tls-bootstrap-token-user"}}],
        "users": [{"name": "tls-bootstrap-token-user", "user": {"token": format!("{}.{}", TOKEN.0, TOKEN.1)}}]});
    std::fs::write(etc.join("bootstrap-kubelet.conf"), bootstrap.to_string()).unwrap();
    let address = cluster.node_address();
    let environment = format!(
        "KUBELET_KUBEADM_ARGS=\"--node-ip={address} --hostname-override=second --pod-infra-container-image=registry.k8s.io/pause:3.10.1\"\n"
    );
    std::fs::write(lib.join("kubeadm-flags.env"), environment).unwrap();

    // The command line of the systemd unit, with this test's paths.
    let program = dir.path().join("kubelet");
    std::os::unix::fs::symlink(support::holdfast(), &program).unwrap();
    let flags = std::fs::read_to_string(lib.join("kubeadm-flags.env")).unwrap();
    let flags = flags
        .trim()
        .trim_start_matches("KUBELET_KUBEADM_ARGS=")
        .trim_matches('"')
        .to_owned();
    let log = std::fs::File::create(dir.path().join("log")).unwrap();
    let mut command = Command::new(program);
    command.arg(format!(
        "--bootstrap-kubeconfig={}",
        etc.join("bootstrap-kubelet.conf").display()
    ));
    command.arg(format!(
        "--kubeconfig={}",
        etc.join("kubelet.conf").display()
    ));
    command.arg(format!("--config={}", lib.join("config.yaml").display()));
    command
        .args(flags.split(' '))
        .arg(format!("--root-dir={}", lib.display()))
        .arg(format!(
            "--device-plugin-dir={}",
            lib.join("device-plugins").display()
        ));
    let agent = Agent(
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap(),
    );
    let log = || std::fs::read_to_string(dir.path().join("log")).unwrap_or_default();
    cluster.wait("kubeadm's health check", is_healthy);
    let ready = || {
        let path = r#"jsonpath={.items[?(@.metadata.name=="second")].status.conditions[?(@.type=="Ready")].status}"#;
        cluster.kubectl(&["get", "nodes", "-o", path]) == "True"
    };
    cluster.wait("the node to join", || {
        ready() || {
            std::thread::sleep(std::time::Duration::from_millis(200));
            false
        }
    });
    // The serving certificate waits for approval; then commands reach the node's pods.
    let waiting = || serving_request(&cluster);
    cluster.wait("the request for a serving certificate", || {
        !waiting().is_empty()
    });
    cluster.kubectl(&["certificate", "approve", &waiting()]);
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: there}}\nspec: {{nodeName: second, terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, 'echo hello; sleep 10000']}}]}}\n"
    ));
    cluster.wait("the node's pod to be ready", || {
        support::condition(&cluster.pod("there"), "Ready") == "True"
    });
    let logs = || {
        Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(cluster.data().join("kubeconfig"))
            .args(["logs", "there"])
            .output()
            .unwrap()
    };
    cluster.wait("the pod's log", || {
        String::from_utf8_lossy(&logs().stdout) == "hello\n"
    });
    assert_eq!(
        cluster.kubectl(&["exec", "there", "--", "busybox", "echo", "reached"]),
        "reached\n"
    );
    cluster.kubectl(&["delete", "pod", "there"]);
    assert!(!log().contains(TOKEN.1), "the token is not logged");
    assert!(!log().contains("logging.options"), "kubeadm sets this");
    drop(agent);
    holdfast_sys::mount::unmount_all(&lib).unwrap();
}

/// `up --join` makes a machine a node of another cluster; tests use real control planes in this way.
#[test]
fn up_starts_a_node_of_another_control_plane() {
    if support::skip::needs_bundled("the test has two nodes") {
        return;
    }
    let first = Cluster::start("first", 78);
    let mut second = Cluster::new("another", 79);
    second.control = ControlPlane::Real(first.data().join("kubeconfig"));
    let second = second.started();
    assert_eq!(second.node_name(), "t-another");
    let output = second.up();
    assert!(
        output.contains("node t-another is Ready")
            && output.contains("in a cluster of Kubernetes v1."),
        "{output}"
    );
    assert!(!second.run_dir().join("control-plane.pid").exists());
    let there = serde_json::json!({"nodeName": second.node_name()});
    support::pod(&second, "there", &there);
    second.wait("the node's pod to be ready", || {
        support::condition(&second.pod("there"), "Ready") == "True"
    });
    // The agent accepts clients whose certificate the cluster's CA has signed.
    let (admin, _files) = Administrator::of(&second).for_curl();
    let pods = Command::new("curl")
        .arg("-sk")
        .args(admin)
        .arg(format!(
            "https://{}:{}/pods",
            second.node_address(),
            second.agent_port()
        ))
        .output()
        .unwrap();
    let pods = String::from_utf8(pods.stdout).unwrap();
    assert!(pods.contains("\"name\":\"there\""), "{pods}");
    second.kubectl(&["delete", "pod", "there"]);
    // The API removes a pod without a grace period before its container has exited.
    second.wait("no leftovers of the pod", || second.leftovers().is_empty());
    drop(second);
    let left = first.kubectl(&["get", "nodes,namespaces,csr", "-o", "name"]);
    assert!(!left.contains("t-another"), "{left}");
}
