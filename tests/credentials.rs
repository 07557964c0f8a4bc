//! A node comes with a bootstrap token, gets a certificate, serves with one that somebody approves, and renews what is due;
//! against our own control plane. No runtime is needed for that, and none is there.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use support::Cluster;

const TOKEN: (&str, &str) = ("abcdef", "0123456789abcdef");

/// An agent that is ended with the test.
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
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nrotateCertificates: true\nserverTLSBootstrap: true\nport: {port}\nhealthzPort: 0\npodLogsDir: {}\n",
        dir.join("logs").display()
    );
    std::fs::write(dir.join("config.yaml"), config).unwrap();
    let at = |name: &str| dir.join(name).display().to_string();
    // The program decides by its name what it is.
    let program = dir.join("kubelet");
    if !program.exists() {
        std::os::unix::fs::symlink(support::holdfast(), &program).unwrap();
    }
    let mut command = Command::new(program);
    if bootstrap {
        command.args(["--bootstrap-kubeconfig", &at("bootstrap.conf")]);
    }
    let log = std::fs::OpenOptions::new().create(true).append(true).open(dir.join("log")).unwrap();
    command.args(["--kubeconfig", &at("kubelet.conf"), "--config", &at("config.yaml"), "--root-dir", &at("root")]);
    command.args(["--hostname-override", "second", "--container-runtime-endpoint", &format!("unix://{}", at("nothing.sock"))]);
    Agent(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
}

fn as_node(dir: &Path, arguments: &[&str]) -> String {
    let output = Command::new("kubectl").arg("--kubeconfig").arg(dir.join("kubelet.conf")).args(arguments).output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn a_node_joins_with_a_token_and_renews_its_certificates() {
    let cluster = Cluster::start("credentials", 47);
    let dir = tempfile::tempdir().unwrap();
    let (dir, pki) = (dir.path(), dir.path().join("root/pki"));
    let server = format!("https://127.0.0.1:{}", 16_400 + cluster.number);
    let ca = cluster.data().join("control/pki/ca.crt").display().to_string();
    let bootstrap = |secret: &str| {
        format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: '{server}', certificate-authority: {ca}}}}}]\nusers: [{{name: u, user: {{token: '{}.{secret}'}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n",
            TOKEN.0
        )
    };
    let log = || std::fs::read_to_string(dir.join("log")).unwrap_or_default();
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: bootstrap-token-{id}, namespace: kube-system}}\ntype: bootstrap.kubernetes.io/token\nstringData: {{token-id: '{id}', token-secret: '{secret}', usage-bootstrap-authentication: 'true', auth-extra-groups: 'system:bootstrappers:kubeadm:default-node-token'}}",
        id = TOKEN.0,
        secret = TOKEN.1
    ));
    // A token that is wrong opens nothing, and the agent says so and goes on trying.
    std::fs::write(dir.join("bootstrap.conf"), bootstrap("ffffffffffffffff")).unwrap();
    let agent = join(dir, 17_999, true);
    cluster.wait("the refusal", || log().contains("the node has no certificate yet") && log().contains("Unauthorized"));
    drop(agent);
    assert!(!dir.join("kubelet.conf").exists());

    std::fs::write(dir.join("bootstrap.conf"), bootstrap(TOKEN.1)).unwrap();
    let agent = join(dir, 17_999, true);
    let current = pki.join("kubelet-client-current.pem");
    cluster.wait("the certificate", || dir.join("kubelet.conf").exists() && current.exists());
    assert!(!pki.join("kubelet-client.key.tmp").exists(), "the first key is in the pair now");
    let request = cluster.kubectl(&["get", "csr"]);
    assert!(request.contains("node-csr-") && request.contains("system:bootstrap:abcdef") && request.contains("Approved,Issued"), "{request}");
    assert!(as_node(dir, &["auth", "whoami"]).contains("system:node:second"));
    // It is a node and nothing more.
    assert!(as_node(dir, &["delete", "node", "--all"]).contains("forbidden"));
    assert!(as_node(dir, &["get", "nodes", "--as", "kubernetes-admin", "--as-group", "system:masters"]).contains("cannot impersonate resource"));
    // Who may, acts as it, with just its rights.
    let as_second = |arguments: &[&str]| {
        let whom = ["--as", "system:node:second", "--as-group", "system:nodes"];
        let output = Command::new(support::holdfast()).args(["kubeconfig", "--name", &cluster.name]).output().unwrap();
        std::fs::write(dir.join("admin.conf"), output.stdout).unwrap();
        let output = Command::new("kubectl").arg("--kubeconfig").arg(dir.join("admin.conf")).args(whom).args(arguments).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    assert!(as_second(&["auth", "whoami"]).contains("system:node:second"));
    assert!(as_second(&["auth", "can-i", "delete", "nodes"]).contains("no"));
    assert!(as_second(&["delete", "node", "--all"]).contains("forbidden"));
    // The serving certificate waits for somebody who approves it.
    let waiting = || {
        cluster.kubectl(&["get", "csr", "-o", "jsonpath={range .items[?(@.spec.signerName=='kubernetes.io/kubelet-serving')]}{.metadata.name}{end}"])
    };
    cluster.wait("the request for a serving certificate", || !waiting().is_empty());
    assert!(!pki.join("kubelet-server-current.pem").exists());
    cluster.kubectl(&["certificate", "approve", &waiting()]);
    cluster.wait("the serving certificate", || pki.join("kubelet-server-current.pem").exists());
    drop(agent);

    // What is past nine tenths of its life is renewed at once, by what it is.
    let (key, now) = (rcgen::KeyPair::generate().unwrap(), jiff::Timestamp::now().as_second());
    let at = |second: i64| rcgen::date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(second as u64);
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(rcgen::DnType::CommonName, "system:node:second");
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    (params.not_before, params.not_after) = (at(now - 10_000), at(now + 600));
    let read = |name: &str| std::fs::read_to_string(cluster.data().join("control/pki").join(name)).unwrap();
    let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca.crt"), rcgen::KeyPair::from_pem(&read("ca.key")).unwrap()).unwrap();
    let old = params.signed_by(&key, &issuer).unwrap().pem();
    let first: PathBuf = std::fs::read_link(&current).unwrap();
    std::fs::write(&first, format!("{old}{}", key.serialize_pem())).unwrap();
    // Pairs are named by the second.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let agent = join(dir, 17_999, false);
    cluster.wait("the renewal", || std::fs::read_link(&current).unwrap() != first);
    assert!(as_node(dir, &["auth", "whoami"]).contains("system:node:second"));
    drop(agent);

    // One that has ended is asked for anew with the token.
    (params.not_before, params.not_after) = (at(now - 10_000), at(now - 60));
    let ended = params.signed_by(&key, &issuer).unwrap().pem();
    std::fs::write(std::fs::read_link(&current).unwrap(), format!("{ended}{}", key.serialize_pem())).unwrap();
    let second = std::fs::read_link(&current).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let agent = join(dir, 17_999, true);
    cluster.wait("another first certificate", || {
        std::fs::read_link(&current).unwrap() != second && log().matches("the node has a certificate").count() == 2
    });
    assert!(as_node(dir, &["auth", "whoami"]).contains("system:node:second"));
    drop(agent);
    assert!(!log().contains(TOKEN.1), "the token is nobody's business");
}
