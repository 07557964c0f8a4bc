//! Routes between nodes with real traffic: three "machines" (network namespaces) on a bridge in a fourth namespace, each with a
//! range of pods.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::net::IpAddr;
use std::process::Command;

use holdfast_core::node::routes::{Peer, Unrouted};
use holdfast_net::netns;
use holdfast_proxy::routes::Routes;
use ipnet::IpNet;

#[path = "../../../tests/support/skip.rs"]
mod skip;

struct Namespace {
    name: String,
    file: File,
}

fn ip(arguments: &[&str]) -> String {
    let output = Command::new("ip").args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

impl Namespace {
    fn new(suffix: &str) -> Namespace {
        let name = format!("hfr-{}-{suffix}", std::process::id());
        ip(&["netns", "add", &name]);
        let file = File::open(format!("/run/netns/{name}")).unwrap();
        let namespace = Namespace { name, file };
        namespace.ip("link set lo up");
        namespace
    }

    fn ip(&self, arguments: &str) -> String {
        let mut all = vec!["-n", self.name.as_str()];
        all.extend(arguments.split_whitespace());
        ip(&all)
    }

    fn inside<T>(&self, work: impl FnOnce() -> T) -> T {
        netns::inside(&self.file, work).unwrap()
    }

    /// Sends one datagram from an address here to an address in another namespace. Returns whether it arrived.
    fn reaches(&self, from: &str, other: &Namespace, to: &str) -> bool {
        use std::net::UdpSocket;
        let receiver = other.inside(|| UdpSocket::bind((to, 7000)).unwrap());
        let wait = std::time::Duration::from_millis(500);
        receiver.set_read_timeout(Some(wait)).unwrap();
        let sender = self.inside(|| UdpSocket::bind((from, 0)).unwrap());
        let sent = sender.send_to(b"hello", (to, 7000)).is_ok();
        sent && receiver.recv(&mut [0; 16]).is_ok()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "delete", &self.name])
            .status();
    }
}

/// Node `n` has the address 192.168.77.n, and the pod 10.244.n.1 on a link of its own.
fn machine(lan: &Namespace, n: u8) -> Namespace {
    let node = Namespace::new(&format!("node{n}"));
    let port = format!("port{n}");
    lan.ip(&format!(
        "link add {port} type veth peer name eth0 netns {}",
        node.name
    ));
    lan.ip(&format!("link set {port} master lan up"));
    node.ip(&format!("address add 192.168.77.{n}/24 dev eth0"));
    node.ip("link set eth0 up");
    node.ip("link add pods type bridge");
    node.ip(&format!("address add 10.244.{n}.1/24 dev pods"));
    node.ip("link set pods up");
    node
}

fn peer(n: u8) -> Peer {
    Peer {
        name: format!("node{n}"),
        ranges: vec![format!("10.244.{n}.0/24").parse().unwrap()],
        addresses: vec![IpAddr::from([192, 168, 77, n])],
    }
}

/// The routes of a node that do not lead to pods of the cluster.
fn foreign(node: &Namespace) -> Vec<String> {
    let text = node.ip("route show");
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.retain(|line| !line.starts_with("10.244."));
    lines
}

fn open(node: &Namespace, table: &str) -> Routes {
    node.inside(|| Routes::open(table).unwrap())
}

#[test]
fn pods_of_three_machines_reach_each_other() {
    if skip::needs_root() {
        return;
    }
    let lan = Namespace::new("lan");
    lan.ip("link add lan type bridge");
    lan.ip("link set lan up");
    let nodes: Vec<Namespace> = (1..=3).map(|n| machine(&lan, n)).collect();
    let peers: Vec<Peer> = (1..=3).map(peer).collect();
    let cluster: Vec<IpNet> = vec!["10.244.0.0/16".parse().unwrap()];
    // Routes of others: of another cluster, of the administrator, and one with our protocol but another metric.
    let mut other_cluster = open(&nodes[0], "holdfast-other");
    let elsewhere = Peer {
        ranges: vec!["10.55.0.0/24".parse().unwrap()],
        ..peer(3)
    };
    let applied = other_cluster.apply("node1", &[elsewhere], &[]).unwrap();
    assert_eq!((applied.changed, applied.routes), (1, 1));
    nodes[0].ip("route add 10.66.0.0/24 via 192.168.77.2");
    nodes[0].ip("route add 10.67.0.0/24 via 192.168.77.2 proto 72 metric 5");
    let before = foreign(&nodes[0]);
    assert_eq!(before.len(), 4, "{before:?}");

    assert!(!nodes[0].reaches("10.244.1.1", &nodes[1], "10.244.2.1"));
    for (n, node) in nodes.iter().enumerate() {
        let (own, mut routes) = (format!("node{}", n + 1), open(node, "holdfast"));
        let applied = routes.apply(&own, &peers, &cluster).unwrap();
        assert_eq!((applied.changed, applied.routes), (2, 2), "{own}");
        assert_eq!(applied.unrouted, []);
        // The second time, nothing differs.
        assert_eq!(routes.apply(&own, &peers, &cluster).unwrap().changed, 0);
    }
    for (a, b) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        let (from, to) = (format!("10.244.{}.1", a + 1), format!("10.244.{}.1", b + 1));
        assert!(nodes[a].reaches(&from, &nodes[b], &to), "{from} to {to}");
    }
    changes_are_followed(&nodes, peers, &cluster);
    assert_eq!(foreign(&nodes[0]), before);
    assert_eq!(other_cluster.remove().unwrap(), 1);
}

/// A new process of node1 repairs a foreign deletion, follows changed Nodes, and removes its routes at the end.
fn changes_are_followed(nodes: &[Namespace], mut peers: Vec<Peer>, cluster: &[IpNet]) {
    nodes[0].ip("route del 10.244.2.0/24");
    let mut routes = open(&nodes[0], "holdfast");
    let applied = routes.apply("node1", &peers, cluster).unwrap();
    assert_eq!(applied.changed, 1);
    assert!(nodes[0].reaches("10.244.1.1", &nodes[1], "10.244.2.1"));

    // A node that gets another range, and one behind a router.
    peers[1].ranges = vec!["10.244.9.0/24".parse().unwrap()];
    peers[2].addresses = vec![IpAddr::from([172, 30, 0, 3])];
    let applied = routes.apply("node1", &peers, cluster).unwrap();
    assert_eq!((applied.changed, applied.routes), (3, 1));
    let unrouted = &applied.unrouted[..];
    assert!(matches!(unrouted, [Unrouted::BehindRouter { node, .. }] if node == "node3"));
    let shown = nodes[0].ip("route show");
    let expected = "10.244.9.0/24 via 192.168.77.2 dev eth0 proto 72";
    assert!(shown.contains(expected), "{shown}");
    assert!(!shown.contains("10.244.2.0/24"), "{shown}");
    assert!(!shown.contains("10.244.3.0/24"), "{shown}");
    assert_eq!(routes.remove().unwrap(), 1);
}
