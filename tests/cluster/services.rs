//! Services on a fresh cluster: `kubectl expose` answers by cluster IP, node port and name, whatever happens to the proxy, the
//! control plane and the rules.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::support::real::ControlPlane;
use crate::support::{self, Cluster};

/// A part of the demo's page.
const GREETING: &str = "Hello from";

/// The page at an address, from this machine.
fn get(address: &str) -> Option<String> {
    let address: SocketAddr = address.parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    stream
        .write_all(b"GET / HTTP/1.0\r\nHost: web\r\n\r\n")
        .ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    // Without rules, another machine of the network may answer.
    page.contains(GREETING).then_some(page)
}

/// The output of a command in a pod.
pub(crate) fn output_in_pod(cluster: &Cluster, pod: &str, command: &[&str]) -> String {
    let output = Command::new("kubectl")
        .arg("--kubeconfig")
        .arg(cluster.data().join("kubeconfig"))
        .args(["exec", pod, "--"])
        .args(command)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The page of a URL, from a pod. Debian's static busybox resolves names with `nslookup` only: its `wget` crashes.
pub(crate) fn get_in_pod(cluster: &Cluster, pod: &str, url: &str) -> Option<String> {
    let host = url.strip_prefix("http://").unwrap().trim_end_matches('/');
    let (host, port) = host.split_once(':').unwrap_or((host, "80"));
    let address = match host.parse::<std::net::IpAddr>() {
        Ok(address) => address.to_string(),
        Err(_) => {
            let answer = output_in_pod(cluster, pod, &["busybox", "nslookup", host]);
            let (_, answer) = answer.split_once(host)?;
            let line = answer.lines().find_map(|l| l.strip_prefix("Address: "))?;
            line.trim().to_owned()
        }
    };
    let script = format!(
        "printf 'GET / HTTP/1.0\\r\\nHost: web\\r\\n\\r\\n' | busybox nc -w 5 {address} {port}"
    );
    let page = output_in_pod(cluster, pod, &["busybox", "sh", "-c", &script]);
    page.contains(GREETING).then_some(page)
}

/// A service, as the API has it.
struct Exposed {
    cluster_ip: String,
    node_port: String,
}

/// Two pods behind a service `web` with a node port, and a pod `client`.
fn expose(cluster: &Cluster) -> Exposed {
    let image = support::busybox_alone(cluster, "test.local/client:1");
    cluster.kubectl(&[
        "create",
        "deployment",
        "web",
        "--image=holdfast.local/demo:1",
        "--replicas=2",
    ]);
    cluster.kubectl(&[
        "expose",
        "deployment",
        "web",
        "--port=80",
        "--type=NodePort",
    ]);
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: client}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000']}}]}}\n"
    ));
    cluster.wait("three running pods", || {
        let pods = cluster.pods();
        let ready = pods
            .iter()
            .filter(|pod| support::condition(pod, "Ready") == "True");
        ready.count() == 3
    });
    let service = cluster.object("/api/v1/namespaces/default/services/web");
    let spec = &service["spec"];
    let ip = spec["clusterIP"].as_str().unwrap();
    Exposed {
        cluster_ip: format!("{ip}:80"),
        node_port: format!(
            "{}:{}",
            cluster.node_address(),
            spec["ports"][0]["nodePort"]
        ),
    }
}

/// The nftables tables of a cluster.
fn tables(cluster: &Cluster) -> Vec<String> {
    let output = Command::new("nft")
        .args(["list", "tables"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let name = format!(" holdfast-{}", cluster.name);
    let ours = text.lines().filter(|line| line.ends_with(&name));
    ours.map(str::to_owned).collect()
}

#[test]
fn an_exposed_deployment_answers() {
    let cluster = Cluster::new("services", 84);
    if !matches!(cluster.control, ControlPlane::Bundled) {
        return;
    }
    let cluster = cluster.started();
    let web = expose(&cluster);
    for address in [&web.cluster_ip, &web.node_port] {
        cluster.wait(&format!("an answer at {address}"), || {
            get(address).is_some()
        });
    }
    let ip = format!("http://{}/", web.cluster_ip);
    for url in [&*ip, "http://web/", "http://web.default.svc.cluster.local/"] {
        cluster.wait(&format!("an answer of {url} in a pod"), || {
            get_in_pod(&cluster, "client", url).is_some()
        });
    }
    // Both pods answer, also to a pod on their own bridge.
    let mut seen = std::collections::BTreeSet::new();
    cluster.wait("answers of both pods", || {
        seen.extend(get_in_pod(&cluster, "client", &ip));
        seen.len() == 2
    });
    let events = cluster.events("client");
    assert!(!events.contains("MissingClusterDNS"), "{events}");
    the_apiserver_forwards_to_pods(&cluster);
    unused_addresses_are_dropped(&cluster);
    deleted_rules_are_repaired(&cluster, &web);
    services_outlive_the_control_plane(&cluster, &web);
    cluster.down();
    assert_eq!(tables(&cluster), Vec::<String>::new());
    assert_eq!(get(&web.cluster_ip), None);
}

/// `services/proxy` and `pods/proxy`, by the names that upstream's clients write.
fn the_apiserver_forwards_to_pods(cluster: &Cluster) {
    let pods = cluster.pods();
    let web = pods.iter().map(|pod| pod["metadata"]["name"].as_str());
    let web = web.flatten().find(|name| name.starts_with("web")).unwrap();
    for place in [
        "services/web",
        "services/web:80",
        "services/http:web:80",
        &format!("pods/{web}:80"),
    ] {
        let path = format!("/api/v1/namespaces/default/{place}/proxy/");
        let page = cluster.kubectl(&["get", "--raw", &path]);
        assert!(page.contains(GREETING), "{path}: {page}");
    }
}

/// The proxy knows the cluster's range. (What its rule does to packets is tested in `src/proxy/tests/services`.)
fn unused_addresses_are_dropped(cluster: &Cluster) {
    let table = format!("holdfast-{}", cluster.name);
    let output = Command::new("nft")
        .args(["list", "chain", "ip", &table, "filter-output"])
        .output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let rule = text.lines().find(|l| l.contains("@service-networks"));
    assert!(rule.is_some_and(|rule| rule.contains("drop")), "{text}");
}

/// Another program deletes a table of the cluster.
fn deleted_rules_are_repaired(cluster: &Cluster, web: &Exposed) {
    let table = format!("holdfast-{}", cluster.name);
    let deleted = Command::new("nft")
        .args(["delete", "table", "ip", &table])
        .status();
    assert!(deleted.unwrap().success());
    cluster.wait("the repair", || get(&web.cluster_ip).is_some());
    let is_repair = |event: &Value| {
        event["reason"] == "ServiceRulesRepaired" && event["involvedObject"]["kind"] == "Node"
    };
    cluster.wait("an event on the Node", || {
        let events = cluster.object("/api/v1/namespaces/default/events");
        events["items"].as_array().unwrap().iter().any(is_repair)
    });
}

/// The proxy is killed, and restarts without a control plane.
fn services_outlive_the_control_plane(cluster: &Cluster, web: &Exposed) {
    cluster.kill("control-plane");
    assert!(get(&web.cluster_ip).is_some(), "{}", cluster.log("proxy"));
    cluster.kill("proxy");
    assert!(get(&web.cluster_ip).is_some(), "without a proxy");
    cluster.up();
    let status = cluster.holdfast(&["up", "status"]);
    assert!(
        status.contains("proxy") && !status.contains("does not run"),
        "{status}"
    );
    cluster.wait("an answer by name", || {
        get_in_pod(cluster, "client", "http://web/").is_some()
    });
}

/// Two clusters have services of one name, in ranges of their own.
#[test]
fn two_clusters_do_not_disturb_each_other() {
    let first = Cluster::new("services-a", 86);
    if !matches!(first.control, ControlPlane::Bundled) {
        return;
    }
    let (first, second) = (first.started(), Cluster::start("services-b", 90));
    let webs = [expose(&first), expose(&second)];
    let [a, b] = &webs;
    assert_ne!(a.cluster_ip, b.cluster_ip);
    for (cluster, web) in [(&first, a), (&second, b)] {
        cluster.wait("an answer", || get(&web.cluster_ip).is_some());
        cluster.wait("an answer by name", || {
            get_in_pod(cluster, "client", "http://web/").is_some()
        });
        let range = "jsonpath={.spec.cidrs[0]} {.status.conditions[0].status}";
        let range = cluster.kubectl(&["get", "servicecidr", "kubernetes", "-o", range]);
        let (range, ready) = range.split_once(' ').unwrap();
        let range: ipnet::IpNet = range.parse().unwrap();
        let address: SocketAddr = web.cluster_ip.parse().unwrap();
        assert!(range.contains(&address.ip()), "{range} {address}");
        assert_eq!(ready, "True");
    }
    second.down();
    assert_eq!(get(&b.cluster_ip), None);
    assert!(tables(&second).is_empty());
    assert!(get(&a.cluster_ip).is_some());
    let by_name = get_in_pod(&first, "client", "http://web/");
    assert!(by_name.is_some(), "{}", first.log("proxy"));
}
