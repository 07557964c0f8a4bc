//! A second machine joins a cluster of `holdfast up` with `holdfast join`: a network namespace with an address of its own, and its
//! own containerd and agent.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::process::{Command, Output};
use std::time::Duration;

use holdfast_control::pki::{Pair, kubeconfig};
use holdfast_core::node::signing;
use support::{Cluster, command_with_timeout, holdfast};

/// The network of the test, between the first machine (.1) and the second (.2).
const NETWORK: &str = "198.18.83";

fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {errors}");
}

/// The second machine. Its cluster's data and its namespace are removed on drop.
struct Machine {
    name: String,
}

impl Machine {
    fn new() -> Machine {
        let machine = Machine {
            name: "t-joined".to_owned(),
        };
        // An interrupted run leaves its machine behind.
        machine.remove();
        let name = &machine.name;
        ip(&format!("netns add {name}"));
        ip(&format!(
            "link add hf-joined type veth peer name eth0 netns {name}"
        ));
        ip(&format!("address add {NETWORK}.1/24 dev hf-joined"));
        ip("link set hf-joined up");
        ip(&format!("-n {name} address add {NETWORK}.2/24 dev eth0"));
        ip(&format!("-n {name} link set eth0 up"));
        ip(&format!("-n {name} link set lo up"));
        ip(&format!("-n {name} route add default via {NETWORK}.1"));
        machine
    }

    /// Runs `holdfast` on the second machine. Only the network is another one: `ip netns exec` would hide the cgroups.
    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = command_with_timeout("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name));
        command.arg(holdfast()).args(arguments).output().unwrap()
    }

    fn remove(&self) {
        if std::path::Path::new("/run/netns").join(&self.name).exists() {
            self.run(&["down", "--purge", "--name", &self.name]);
            let _ = Command::new("ip")
                .args(["netns", "delete", &self.name])
                .output();
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("HOLDFAST_KEEP").is_some() {
            return;
        }
        self.remove();
    }
}

fn text(output: &Output) -> String {
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    of(&output.stdout) + &of(&output.stderr)
}

#[test]
fn a_second_machine_joins_with_a_token() {
    if support::skip::needs_bundled("bootstrap tokens of `holdfast token`") {
        return;
    }
    let mut cluster = Cluster::new("joining", 83);
    cluster.ranges = Some(["10.183.0.0/16", "10.183.83.0/24"]);
    let cluster = cluster.started();
    let machine = Machine::new();
    let server = format!("{}:{}", cluster.node_address(), 16_400 + 83);
    let create = [
        "token",
        "create",
        "--print-join",
        "--server",
        &server,
        "--ttl",
        "1h",
    ];
    let command = cluster.holdfast(&create);
    let words: Vec<&str> = command.split_whitespace().skip(1).collect();
    let more = ["--name", machine.name.as_str(), "--node-name", "second"];

    // Without a token, the machine has no credentials; with another hash, it does not trust the cluster.
    let output = machine.run(&[&words[..2], &more].concat());
    assert!(text(&output).contains("--token is required"), "{output:?}");
    let wrong = format!("sha256:{}", "0".repeat(64));
    let mut other = words.clone();
    *other.last_mut().unwrap() = &wrong;
    let output = machine.run(&[&other[..], &more].concat());
    let expected = ["has the hash", *words.last().unwrap(), &wrong];
    let printed = text(&output);
    assert!(
        expected.iter().all(|part| printed.contains(part)),
        "{printed}"
    );

    let output = machine.run(&[&words[..], &more].concat());
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("node second is Ready"), "{output:?}");
    the_second_node_runs_pods(&cluster, &machine);
    the_proxy_renews_its_certificate(&cluster, &machine);

    // The token is not needed any more.
    cluster.holdfast(&["token", "delete", words[3]]);
    let output = machine.run(&[&words[..2], &more].concat());
    assert!(output.status.success(), "{}", text(&output));
}

/// The network has the Node's range, and the certificate of the agent's API is signed by the cluster.
fn the_second_node_runs_pods(cluster: &Cluster, machine: &Machine) {
    let range = cluster.kubectl(&["get", "node", "second", "-o", "jsonpath={.spec.podCIDR}"]);
    assert_eq!(range, "10.183.0.0/24");
    let all = ["get", "nodes", "-o", "jsonpath={.items[*].spec.podCIDR}"];
    let all = cluster.kubectl(&all);
    assert!(all.split(' ').any(|r| r == "10.183.83.0/24"), "{all}");
    let data = std::path::Path::new("/var/lib").join(format!("holdfast-{}", machine.name));
    let network = std::fs::read_to_string(data.join("cni/net.d/10-holdfast.conflist")).unwrap();
    assert!(network.contains(&range), "{network}");
    let config = std::fs::read_to_string(data.join("agent/config.json")).unwrap();
    let dns = cluster.object("/api/v1/namespaces/kube-system/services/kube-dns");
    let dns = dns["spec"]["clusterIP"].as_str().unwrap();
    assert!(config.contains(dns), "{config}");
    assert!(data.join("proxy.kubeconfig").exists());
    support::pod(cluster, "there", &serde_json::json!({"nodeName": "second"}));
    cluster.wait("the pod on the second node", || {
        cluster.pod("there")["status"]["phase"] == "Running"
    });
    let address = cluster.pod("there")["status"]["podIP"].clone();
    let address = address.as_str().unwrap();
    assert!(address.starts_with("10.183.0."), "{address}");
    // kubectl reads the log through the API, which verifies the agent's certificate.
    cluster.wait("the agent's serving certificate", || {
        let path = "/api/v1/nodes/second/proxy/healthz";
        let mut kubectl = command_with_timeout("kubectl");
        kubectl
            .arg("--kubeconfig")
            .arg(cluster.data().join("kubeconfig"));
        let output = kubectl.args(["get", "--raw", path]).output().unwrap();
        output.status.success()
    });
    cluster.kubectl(&["delete", "pod", "there"]);
}

/// A certificate of the proxy that expires soon, signed by the cluster.
fn expiring(cluster: &Cluster, seconds: i64) -> Pair {
    let now = jiff::Timestamp::now().as_second();
    let at = |second: i64| {
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(u64::try_from(second).unwrap())
    };
    let mut params = rcgen::CertificateParams::default();
    let subject = &mut params.distinguished_name;
    subject.push(rcgen::DnType::OrganizationName, signing::PROXY_GROUP);
    let user = format!("{}second", signing::PROXY_USER);
    subject.push(rcgen::DnType::CommonName, user);
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    (params.not_before, params.not_after) = (at(now - 10_000), at(now + seconds));
    let pki = cluster.data().join("control/pki");
    let read = |name: &str| std::fs::read_to_string(pki.join(name)).unwrap();
    let authority = rcgen::KeyPair::from_pem(&read("ca.key")).unwrap();
    let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca.crt"), authority).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    Pair {
        certificate: params.signed_by(&key, &issuer).unwrap().pem(),
        key: key.serialize_pem(),
    }
}

/// The proxy replaces a certificate that expires soon, and follows changes after its end.
fn the_proxy_renews_its_certificate(cluster: &Cluster, machine: &Machine) {
    const SECONDS: i64 = 20;
    let data = std::path::Path::new("/var/lib").join(format!("holdfast-{}", machine.name));
    let file = data.join("proxy.kubeconfig");
    let before = std::fs::read_to_string(&file).unwrap();
    let server = before
        .lines()
        .find_map(|l| l.trim().strip_prefix("server: "));
    let authority = std::fs::read_to_string(data.join("agent/pki/ca.crt")).unwrap();
    let pair = expiring(cluster, SECONDS);
    let ends = std::time::Instant::now() + Duration::from_secs(SECONDS as u64);
    let short = kubeconfig(server.unwrap(), &authority, "proxy", &pair);
    std::fs::write(&file, &short).unwrap();
    // The supervisor starts the proxy again, which checks the certificate at its start.
    let run = std::path::Path::new("/run").join(format!("holdfast-{}", machine.name));
    let recorded = std::fs::read_to_string(run.join("proxy.pid")).unwrap();
    let pid: i32 = recorded.split(' ').next().unwrap().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
    let log = || std::fs::read_to_string(data.join("logs/proxy.log")).unwrap_or_default();
    cluster.wait("the renewal of the proxy's certificate", || {
        log().contains("the proxy's client certificate was renewed")
    });
    let after = std::fs::read_to_string(&file).unwrap();
    assert!(after != short && after != before, "{}", log());
    let in_time = std::time::Instant::now() < ends;
    assert!(in_time, "the certificate has expired before the renewal");
    // The first certificate is of no use any more.
    std::thread::sleep(ends.saturating_duration_since(std::time::Instant::now()));
    cluster.kubectl(&["create", "service", "clusterip", "later", "--tcp=80"]);
    let service = cluster.object("/api/v1/namespaces/default/services/later");
    let address = service["spec"]["clusterIP"].as_str().unwrap().to_owned();
    let table = format!("holdfast-{}", machine.name);
    cluster.wait("the rules of a later service", || {
        let mut nft = command_with_timeout("nsenter");
        nft.arg(format!("--net=/run/netns/{}", machine.name));
        let rules = nft.args(["nft", "list", "table", "ip", &table]).output();
        text(&rules.unwrap()).contains(&address)
    });
    cluster.kubectl(&["delete", "service", "later"]);
}
