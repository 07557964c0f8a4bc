//! A second machine joins a cluster of `holdfast up` with `holdfast join`: a network namespace with an address of its own, and its
//! own containerd and agent.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::time::Duration;

use holdfast_control::pki::{Pair, kubeconfig};
use holdfast_core::node::signing;
use support::{Cluster, command_with_timeout};

use crate::machine::{Machine, Network, join_words, text};

#[test]
fn a_second_machine_joins_with_a_token() {
    if support::skip::needs_bundled("bootstrap tokens of `holdfast token`") {
        return;
    }
    let mut cluster = Cluster::new("joining", 83);
    cluster.ranges = Some(["10.183.0.0/16", "10.183.83.0/24"]);
    let cluster = cluster.started();
    let network = Network::new(83);
    let machine = Machine::new(&network, "joined", 2);
    let words = join_words(&cluster);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
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
    the_network_follows_the_node(&cluster, &machine);

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

/// The Node is deleted and created again, with another range: the network has it when the pod of the earlier range was deleted.
fn the_network_follows_the_node(cluster: &Cluster, machine: &Machine) {
    let on_second = serde_json::json!({"nodeName": "second", "terminationGracePeriodSeconds": 0});
    support::pod(cluster, "earlier", &on_second);
    let running = |name: &str| {
        cluster.wait("a running pod on the second node", || {
            cluster.pod(name)["status"]["phase"] == "Running"
        });
        cluster.pod(name)["status"]["podIP"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert!(running("earlier").starts_with("10.183.0."));
    let file = machine.data().join("cni/net.d/10-holdfast.conflist");
    let network = || std::fs::read_to_string(&file).unwrap();
    let second = cluster.object("/api/v1/nodes/second");
    let mut moved =
        serde_json::json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "second"}});
    moved["metadata"]["labels"] = second["metadata"]["labels"].clone();
    moved["spec"] = serde_json::json!({"podCIDR": "10.183.7.0/24", "podCIDRs": ["10.183.7.0/24"]});
    // The pod stays, although its Node is deleted for a moment: the agent still runs it.
    cluster.kubectl(&["delete", "node", "second"]);
    cluster.apply(&moved.to_string());
    let message = "the event PodRangeNotApplied";
    cluster.wait(message, || {
        let events = cluster.kubectl(&["get", "events", "-A", "-o", "json"]);
        events.contains("PodRangeNotApplied") && events.contains("10.183.7.0/24")
    });
    assert!(network().contains("10.183.0.0/24"), "{}", network());
    cluster.kubectl(&["delete", "pod", "earlier", "--ignore-not-found"]);
    cluster.wait("the network of the new range", || {
        network().contains("10.183.7.0/24")
    });
    cluster.wait("the second node is ready", || {
        support::condition(&cluster.object("/api/v1/nodes/second"), "Ready") == "True"
    });
    support::pod(cluster, "later", &on_second);
    assert!(running("later").starts_with("10.183.7."));
    cluster.kubectl(&["delete", "pod", "later"]);
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
    let data = machine.data();
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
    let recorded = std::fs::read_to_string(machine.run_dir().join("proxy.pid")).unwrap();
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
        let mut nft = machine.command("nft");
        let rules = nft.args(["list", "table", "ip", &table]).output();
        text(&rules.unwrap()).contains(&address)
    });
    cluster.kubectl(&["delete", "service", "later"]);
}

/// `down` on a joined machine: its pods move, nothing of them is left, and a further `join` uses the node again. An administrator's
/// kubeconfig removes the Node. Without the API, the machine stops nevertheless.
#[test]
fn a_machine_leaves_its_cluster() {
    if support::skip::needs_bundled("bootstrap tokens of `holdfast token`") {
        return;
    }
    let mut cluster = Cluster::new("leaving", 70);
    cluster.ranges = Some(["10.180.0.0/16", "10.180.80.0/24"]);
    let cluster = cluster.started();
    let network = Network::new(70);
    let machine = Machine::new(&network, "leaving-2", 2);
    // Before the second node joins, this is the first one's.
    let address = cluster.node_address();
    let words = join_words(&cluster);
    machine.join(&words, "second", &[]);
    let image = "--image=holdfast.local/demo:1";
    cluster.kubectl(&["create", "deployment", "web", image, "--replicas=2"]);
    cluster.kubectl(&["rollout", "status", "deployment/web"]);
    assert!(nodes_of_pods(&cluster).contains(&"second".to_owned()));

    let down = ["down", "--name", &machine.name];
    let output = machine.run(&down);
    let printed = text(&output);
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("kubectl delete node second"), "{printed}");
    assert!(!printed.contains("not evicted"), "{printed}");
    let second = cluster.object("/api/v1/nodes/second");
    assert_eq!(second["spec"]["unschedulable"], true);
    cluster.wait("the pods on the first node", || {
        let pods = cluster.pods();
        let ready = pods
            .iter()
            .filter(|p| support::condition(p, "Ready") == "True");
        ready.count() == 2 && !nodes_of_pods(&cluster).contains(&"second".to_owned())
    });
    nothing_is_left(&machine);

    // The node keeps its certificate, and is used again.
    machine.join(&words[..2], "second", &[]);
    let second = cluster.object("/api/v1/nodes/second");
    assert!(second["spec"]["unschedulable"].is_null(), "{second}");

    // The administrator's kubeconfig names 127.0.0.1, which is another machine there.
    let remote = tempfile::NamedTempFile::new().unwrap();
    let local = std::fs::read_to_string(cluster.data().join("kubeconfig")).unwrap();
    let local = local.replace("127.0.0.1", &address);
    std::fs::write(remote.path(), local).unwrap();
    let admin = ["--kubeconfig", remote.path().to_str().unwrap()];
    let printed = text(&machine.run(&[&down[..], &admin].concat()));
    assert!(printed.contains("Node second was removed"), "{printed}");
    let nodes = cluster.object("/api/v1/nodes");
    assert_eq!(nodes["items"].as_array().unwrap().len(), 1, "{nodes}");

    machine.join(&words[..2], "second", &[]);
    it_stops_without_the_api(&machine);
}

fn it_stops_without_the_api(machine: &Machine) {
    machine.unplug();
    let output = machine.run(&["down", "--name", &machine.name]);
    let printed = text(&output);
    assert!(output.status.success(), "{printed}");
    assert!(
        printed.contains("pods of node second were not evicted"),
        "{printed}"
    );
    assert!(printed.contains("kubectl delete node second"), "{printed}");
}

/// A stopped machine has no routes, links and rules of its node.
fn nothing_is_left(machine: &Machine) {
    for (program, arguments) in [
        ("ip", "route show proto 72"),
        ("ip", "-o link show type bridge"),
        ("ip", "-o link show type dummy"),
    ] {
        let output = machine.command(program).args(arguments.split(' ')).output();
        let left = text(&output.unwrap());
        assert!(left.is_empty(), "{program} {arguments}: {left}");
    }

    // The table of masquerading is shared by all networks of a machine and stays, without rules of this one.
    let rules = machine.command("nft").args(["list", "ruleset"]).output();
    let rules = text(&rules.unwrap());
    assert!(
        !rules.contains("10.180.") && !rules.contains("holdfast"),
        "{rules}"
    );
}

fn nodes_of_pods(cluster: &Cluster) -> Vec<String> {
    let pods = cluster.pods();
    let nodes = pods.iter().filter_map(|p| p["spec"]["nodeName"].as_str());
    nodes.map(str::to_owned).collect()
}
