//! Routes between nodes with real traffic: three "machines" (network namespaces) on a bridge in a fourth namespace, or two with a
//! router in between, each with a range of pods.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::net::IpAddr;
use std::process::Command;

use holdfast_core::node::routes::{Peer, Unrouted};
use holdfast_net::netns;
use holdfast_proxy::routes::{Applied, Routes};

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

/// Applies the routes in the node's namespace, as sysctls are those of the thread's.
fn apply(node: &Namespace, routes: &mut Routes, own: &str, peers: &[Peer]) -> Applied {
    node.inside(|| routes.apply(own, peers, &[])).unwrap()
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
    // Routes of others: of another cluster, of the administrator, and one with our protocol but another metric.
    let mut other_cluster = open(&nodes[0], "holdfast-other");
    let elsewhere = Peer {
        ranges: vec!["10.55.0.0/24".parse().unwrap()],
        ..peer(3)
    };
    let applied = apply(&nodes[0], &mut other_cluster, "node1", &[elsewhere]);
    assert_eq!((applied.changed, applied.routes), (1, 1));
    nodes[0].ip("route add 10.66.0.0/24 via 192.168.77.2");
    nodes[0].ip("route add 10.67.0.0/24 via 192.168.77.2 proto 72 metric 5");
    let before = foreign(&nodes[0]);
    assert_eq!(before.len(), 4, "{before:?}");

    assert!(!nodes[0].reaches("10.244.1.1", &nodes[1], "10.244.2.1"));
    for (n, node) in nodes.iter().enumerate() {
        let (own, mut routes) = (format!("node{}", n + 1), open(node, "holdfast"));
        let applied = apply(node, &mut routes, &own, &peers);
        assert_eq!((applied.changed, applied.routes), (2, 2), "{own}");
        assert_eq!(applied.unrouted, []);
        // The second time, nothing differs.
        assert_eq!(apply(node, &mut routes, &own, &peers).changed, 0);
    }
    for (a, b) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        let (from, to) = (format!("10.244.{}.1", a + 1), format!("10.244.{}.1", b + 1));
        assert!(nodes[a].reaches(&from, &nodes[b], &to), "{from} to {to}");
    }
    changes_are_followed(&nodes, peers);
    assert_eq!(foreign(&nodes[0]), before);
    assert_eq!(other_cluster.remove().unwrap(), 1);
}

/// A new process of node1 repairs a foreign deletion, follows changed Nodes, and removes its routes at the end.
fn changes_are_followed(nodes: &[Namespace], mut peers: Vec<Peer>) {
    nodes[0].ip("route del 10.244.2.0/24");
    let mut routes = open(&nodes[0], "holdfast");
    let applied = apply(&nodes[0], &mut routes, "node1", &peers);
    assert_eq!(applied.changed, 1);
    assert!(nodes[0].reaches("10.244.1.1", &nodes[1], "10.244.2.1"));

    // A node that gets another range, and one that claims this machine's address.
    peers[1].ranges = vec!["10.244.9.0/24".parse().unwrap()];
    peers[2].addresses = vec![IpAddr::from([192, 168, 77, 1])];
    let applied = apply(&nodes[0], &mut routes, "node1", &peers);
    assert_eq!((applied.changed, applied.routes), (3, 1));
    let unrouted = &applied.unrouted[..];
    assert!(matches!(unrouted, [Unrouted::NoAddress { node, .. }] if node == "node3"));
    let shown = nodes[0].ip("route show");
    let expected = "10.244.9.0/24 via 192.168.77.2 dev eth0 proto 72";
    assert!(shown.contains(expected), "{shown}");
    assert!(!shown.contains("10.244.2.0/24"), "{shown}");
    assert!(!shown.contains("10.244.3.0/24"), "{shown}");
    assert_eq!(routes.remove().unwrap(), 1);
}

/// Node `n` has the address 192.168.n.2 in a network of its own, with a router, and pods of both families.
fn machine_behind(router: &Namespace, n: u8) -> Namespace {
    let node = Namespace::new(&format!("behind{n}"));
    let port = format!("port{n}");
    router.ip(&format!(
        "link add {port} type veth peer name eth0 netns {}",
        node.name
    ));
    router.ip(&format!("address add 192.168.{n}.1/24 dev {port}"));
    router.ip(&format!("link set {port} up"));
    node.ip(&format!("address add 192.168.{n}.2/24 dev eth0"));
    node.ip("link set eth0 up");
    node.ip(&format!("route add default via 192.168.{n}.1"));
    node.ip("link add pods type bridge");
    node.ip(&format!("address add 10.244.{n}.1/24 dev pods"));
    node.ip(&format!("address add fd00:244:{n}::1/64 dev pods nodad"));
    node.ip("link set pods up");
    node
}

fn peer_behind(n: u8) -> Peer {
    let ranges = [format!("10.244.{n}.0/24"), format!("fd00:244:{n}::/64")];
    Peer {
        name: format!("node{n}"),
        ranges: ranges.map(|range| range.parse().unwrap()).into(),
        addresses: vec![IpAddr::from([192, 168, n, 2])],
    }
}

/// Whether pods, and this machine itself, reach the pods of node `to`, in both families.
fn all_reach(node: &Namespace, from: u8, other: &Namespace, to: u8) -> bool {
    let (v4, v6) = (format!("10.244.{to}.1"), format!("fd00:244:{to}::1"));
    node.reaches(&format!("10.244.{from}.1"), other, &v4)
        && node.reaches(&format!("fd00:244:{from}::1"), other, &v6)
        && node.reaches("0.0.0.0", other, &v4)
        && node.reaches("::", other, &v6)
}

#[test]
fn pods_behind_a_router_are_reached_through_a_tunnel() {
    if skip::needs_root() {
        return;
    }
    let router = Namespace::new("router");
    let forward = || holdfast_net::sysctl::write("ipv4/ip_forward", "1");
    router.inside(forward).unwrap();
    let nodes = [5, 6].map(|n| machine_behind(&router, n));
    // Node 7 does not answer.
    let mut peers = [5, 6, 7].map(peer_behind);
    let mut routes = [open(&nodes[0], "holdfast"), open(&nodes[1], "holdfast")];
    assert!(!all_reach(&nodes[0], 5, &nodes[1], 6));
    for ((own, node), routes) in ["node5", "node6"].into_iter().zip(&nodes).zip(&mut routes) {
        let applied = apply(node, routes, own, &peers);
        assert_eq!((applied.changed, applied.routes), (4, 4), "{own}");
        assert_eq!(apply(node, routes, own, &peers).changed, 0);
    }
    assert!(all_reach(&nodes[0], 5, &nodes[1], 6));
    assert!(all_reach(&nodes[1], 6, &nodes[0], 5));
    // This machine's own packets have a source to which the answer takes the tunnel. They fit into one packet of the network.
    let way = nodes[0].ip("route get 10.244.6.1");
    assert!(way.contains("dev holdfast-vxlan src 10.244.5.0"), "{way}");
    let link = nodes[0].ip("link show holdfast-vxlan");
    assert!(link.contains("mtu 1464"), "{link}");

    // Someone deletes the link; a node gets another address.
    nodes[0].ip("link delete holdfast-vxlan");
    assert_eq!(apply(&nodes[0], &mut routes[0], "node5", &peers).changed, 4);
    assert!(all_reach(&nodes[0], 5, &nodes[1], 6));
    nodes[1].ip("address add 192.168.6.3/24 dev eth0");
    nodes[1].ip("address delete 192.168.6.2/24 dev eth0");
    nodes[1].ip("address add 192.168.6.3/24 dev eth0");
    nodes[1].ip("route replace default via 192.168.6.1");
    peers[1].addresses = vec![IpAddr::from([192, 168, 6, 3])];
    assert_eq!(apply(&nodes[0], &mut routes[0], "node5", &peers).changed, 4);
    assert!(all_reach(&nodes[0], 5, &nodes[1], 6));
    let shown = nodes[0].ip("route show") + &nodes[0].ip("-6 route show");
    assert!(!shown.contains("192.168.6.2"), "{shown}");
    // A cluster in which only the other node takes the tunnel: its packets arrive, and answers have a direct route.
    let near = Peer {
        addresses: vec![IpAddr::from([192, 168, 5, 1])],
        ..peers[1].clone()
    };
    apply(
        &nodes[0],
        &mut routes[0],
        "node5",
        &[peers[0].clone(), near],
    );
    assert!(all_reach(&nodes[1], 6, &nodes[0], 5));
    apply(&nodes[0], &mut routes[0], "node5", &peers);
    clusters_share_the_link(&nodes[0], &mut routes[0], &peers);
}

/// The link stays while a cluster needs it. Each cluster's address goes with the cluster.
fn clusters_share_the_link(node: &Namespace, routes: &mut Routes, peers: &[Peer]) {
    let mut other = open(node, "holdfast-other");
    let range = |text: &str| vec![text.parse().unwrap()];
    let other_peers =
        [("node5", "10.55.5.0/24"), ("node6", "10.55.6.0/24")].map(|(name, own)| Peer {
            name: name.into(),
            ranges: range(own),
            addresses: peers[usize::from(name == "node6")].addresses.clone(),
        });
    let applied = apply(node, &mut other, "node5", &other_peers);
    assert_eq!((applied.changed, applied.routes), (1, 1));
    let addresses = || node.ip("address show holdfast-vxlan");
    assert!(addresses().contains("10.55.5.0/32") && addresses().contains("10.244.5.0/32"));
    assert_eq!(routes.remove().unwrap(), 4);
    assert!(addresses().contains("10.55.5.0/32") && !addresses().contains("10.244.5.0/32"));
    assert_eq!(other.remove().unwrap(), 1);
    assert!(!node.ip("link show").contains("holdfast-vxlan"));
}
