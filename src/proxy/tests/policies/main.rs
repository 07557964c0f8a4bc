//! Network policies with real traffic: a node that forwards between pods in network namespaces.
#![allow(clippy::unwrap_used)]

#[path = "../../../net/tests/kernel/namespace.rs"]
mod namespace;
#[path = "../../../../tests/support/skip.rs"]
mod skip;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde_json::{Value, json};

use holdfast_proxy::policies::PolicyPlane;
use namespace::Namespace;

/// How long a connection attempt waits. The kernel sends a lost packet again after a second.
const PATIENCE: Duration = Duration::from_millis(2500);
const PORTS: [u16; 2] = [8080, 8081];

/// A node and three pods, each with an address of both versions. Everything listens on two ports.
struct World {
    node: Namespace,
    pods: Vec<Namespace>,
    plane: PolicyPlane,
}

fn serve(namespace: &Namespace) {
    for port in PORTS {
        let any: IpAddr = [0; 16].into();
        let listener = namespace.inside(|| TcpListener::bind((any, port)).unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut stream = stream;
                    let mut byte = [0];
                    // Answers each byte, until the client closes its connection.
                    while stream
                        .read_exact(&mut byte)
                        .and_then(|()| stream.write_all(&byte))
                        .is_ok()
                    {}
                });
            }
        });
    }
}

fn address(pod: usize, v6: bool) -> IpAddr {
    match v6 {
        false => format!("10.233.{pod}.2").parse().unwrap(),
        true => format!("fd33:{pod}::2").parse().unwrap(),
    }
}

fn pod(number: usize, labels: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"labels": labels},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}]},
        "status": {"phase": "Running", "podIPs": [{"ip": address(number, false)}, {"ip": address(number, true)}]},
    }))
    .unwrap()
}

fn policy(spec: &Value) -> NetworkPolicy {
    serde_json::from_value(json!({"spec": spec})).unwrap()
}

/// A pod with a link to the node and servers.
fn attach(node: &Namespace, number: usize) -> Option<Namespace> {
    let pod = Namespace::new()?;
    let link = format!("pod{number}");
    node.connect(
        (&link, &format!("10.233.{number}.1/24")),
        &pod,
        ("eth0", &format!("10.233.{number}.2/24")),
    );
    node.ip(&[
        "address",
        "add",
        &format!("fd33:{number}::1/64"),
        "dev",
        &link,
        "nodad",
    ]);
    pod.ip(&[
        "address",
        "add",
        &format!("fd33:{number}::2/64"),
        "dev",
        "eth0",
        "nodad",
    ]);
    pod.ip(&[
        "-4",
        "route",
        "add",
        "default",
        "via",
        &format!("10.233.{number}.1"),
    ]);
    pod.ip(&[
        "-6",
        "route",
        "add",
        "default",
        "via",
        &format!("fd33:{number}::1"),
    ]);
    serve(&pod);
    Some(pod)
}

impl World {
    fn new() -> Option<World> {
        let node = Namespace::new()?;
        node.inside(|| {
            holdfast_net::sysctl::write("ipv4/ip_forward", "1").unwrap();
            holdfast_net::sysctl::write("ipv6/conf/all/forwarding", "1").unwrap();
        });
        let pods = (0..3)
            .map(|number| attach(&node, number))
            .collect::<Option<Vec<Namespace>>>()?;
        serve(&node);
        let plane = node.inside(|| PolicyPlane::open("hf-test", "n").unwrap());
        let mut world = World { node, pods, plane };
        // Neighbours answer as soon as the links are up.
        for from in 0..3 {
            let reaches = |to| {
                world
                    .connect(&world.pods[from], address(to, true), 8080)
                    .is_some()
            };
            let mut attempts = 0;
            while !(0..3).all(reaches) {
                attempts += 1;
                assert!(attempts < 20, "the pods do not reach each other");
            }
        }
        world
            .plane
            .set_namespace("x", Some([("ns".to_owned(), "x".to_owned())].into()));
        for number in 0..3 {
            let labels = json!({"pod": number.to_string()});
            world
                .plane
                .set_pod("x", &format!("pod{number}"), Some(&pod(number, &labels)));
        }
        Some(world)
    }

    /// Sets policies of the namespace x, named by their position.
    fn set(&mut self, specs: &[Value]) {
        for number in 0..5 {
            let object = specs.get(number).map(policy);
            self.plane
                .set_policy("x", &format!("policy{number}"), object.as_ref());
        }
        self.plane.commit().unwrap();
    }

    fn connect(&self, from: &Namespace, to: IpAddr, port: u16) -> Option<TcpStream> {
        from.inside(|| TcpStream::connect_timeout(&SocketAddr::from((to, port)), PATIENCE))
            .ok()
    }

    /// The connections that are established, as "01:8080", for both versions of IP, which must agree. All are tried at once,
    /// because each refused one takes the whole patience.
    fn reached(&self) -> Vec<String> {
        let pairs = (0..3).flat_map(|from| (0..3).map(move |to| (from, to)));
        let all: Vec<_> = pairs
            .flat_map(|(from, to)| PORTS.map(|port| (from, to, port)))
            .collect();
        let tried: Vec<[bool; 2]> = std::thread::scope(|scope| {
            let attempts: Vec<_> = all
                .iter()
                .map(|(from, to, port)| {
                    [false, true].map(|v6| {
                        let (pod, to) = (&self.pods[*from], address(*to, v6));
                        scope.spawn(move || self.connect(pod, to, *port).is_some())
                    })
                })
                .collect();
            let results = attempts
                .into_iter()
                .map(|both| both.map(|a| a.join().unwrap()));
            results.collect()
        });
        let mut reached = vec![];
        for ((from, to, port), [v4, v6]) in all.into_iter().zip(tried) {
            assert_eq!(
                v4, v6,
                "{from} to {to}:{port} differs between IPv4 and IPv6"
            );
            if v4 && from != to {
                reached.push(format!("{from}{to}:{port}"));
            }
        }
        reached
    }

    /// All connections between different pods but those that a pattern describes; `*` is anything.
    fn all_but(patterns: &[&str]) -> Vec<String> {
        let matches = |pattern: &str, text: &str| {
            let rest = pattern
                .chars()
                .zip(text.chars())
                .all(|(p, t)| p == '*' || p == t);
            rest && (pattern.len() == 2 || pattern.len() == text.len())
        };
        let pairs = (0..3)
            .flat_map(|from| (0..3).map(move |to| (from, to)))
            .filter(|(from, to)| from != to);
        let all = pairs.flat_map(|(from, to)| PORTS.map(|port| format!("{from}{to}:{port}")));
        all.filter(|text| !patterns.iter().any(|p| matches(p, text)))
            .collect()
    }
}

fn answers(stream: &mut TcpStream) -> bool {
    let mut byte = [7];
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
        .write_all(&byte)
        .and_then(|()| stream.read_exact(&mut byte))
        .is_ok()
}

#[test]
fn ingress_is_restricted_by_pods_ports_and_blocks() {
    let Some(mut world) = World::new() else {
        return;
    };
    let zero = json!({"matchLabels": {"pod": "0"}});
    world.set(&[]);
    assert_eq!(world.reached(), World::all_but(&[]));

    world.set(&[json!({"podSelector": zero, "ingress": []})]);
    assert_eq!(world.reached(), World::all_but(&["*0"]));
    for v6 in [false, true] {
        assert!(
            world.connect(&world.node, address(0, v6), 8080).is_some(),
            "the node reaches its pods"
        );
    }

    let from_one = json!([{"podSelector": {"matchLabels": {"pod": "1"}}}]);
    world.set(&[
        json!({"podSelector": zero, "ingress": [{"from": from_one, "ports": [{"port": "web"}]}]}),
    ]);
    assert_eq!(world.reached(), World::all_but(&["20", "10:8081"]));

    // A pod becomes a peer by its label.
    world
        .plane
        .set_pod("x", "pod2", Some(&pod(2, &json!({"pod": "1"}))));
    assert!(world.plane.commit().unwrap());
    assert!(
        !world.plane.commit().unwrap(),
        "a second commit has nothing to do"
    );
    assert_eq!(world.reached(), World::all_but(&["*0:8081"]));

    let blocks = json!([{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.233.1.0/24"]}}, {"ipBlock": {"cidr": "::/0", "except": ["fd33:1::/64"]}}]);
    world.set(&[json!({"podSelector": zero, "ingress": [{"from": blocks, "ports": [{"port": 8081, "endPort": 9000}]}]})]);
    assert_eq!(world.reached(), World::all_but(&["10", "20:8080"]));
    world.set(&[]);
    assert_eq!(world.reached(), World::all_but(&[]));
}

#[test]
fn egress_is_restricted_also_to_the_node_but_not_for_established_connections() {
    let Some(mut world) = World::new() else {
        return;
    };
    let node_of = |pod: usize| -> IpAddr { format!("10.233.{pod}.1").parse().unwrap() };
    world.set(&[]);
    let mut before = world
        .connect(&world.pods[0], address(1, false), 8080)
        .unwrap();
    assert!(answers(&mut before));
    let allow_two = json!([{"to": [{"podSelector": {"matchLabels": {"pod": "2"}}}], "ports": [{"port": 8081}]}]);
    world.set(&[json!({"podSelector": {"matchLabels": {"pod": "0"}}, "policyTypes": ["Egress"], "egress": allow_two})]);
    assert_eq!(world.reached(), World::all_but(&["01", "02:8080"]));
    assert!(answers(&mut before), "an established connection continues");
    assert!(
        world.connect(&world.pods[0], node_of(0), 8080).is_none(),
        "the node is a destination"
    );
    assert!(world.connect(&world.pods[1], node_of(1), 8080).is_some());
    // A server on the node that policies select as a pod.
    let server = holdfast_core::policies::PodFacts {
        addresses: vec![node_of(0)],
        labels: [("pod".into(), "2".into())].into(),
        ..Default::default()
    };
    world.plane.set_server("x", "server", server);
    world.plane.commit().unwrap();
    assert!(world.connect(&world.pods[0], node_of(0), 8081).is_some());
    assert!(world.connect(&world.pods[0], node_of(0), 8080).is_none());
}

#[test]
fn the_table_is_repaired_replaced_after_a_restart_and_removed() {
    let Some(mut world) = World::new() else {
        return;
    };
    if namespace::needs_nft() {
        return;
    }
    let deny = json!({"podSelector": {"matchLabels": {"pod": "0"}}});
    world.node.nft(&["add", "table", "inet", "foreign"]);
    world.set(std::slice::from_ref(&deny));
    assert!(
        !world.plane.audit().unwrap(),
        "an unchanged table is as desired"
    );
    let table = "inet hf-test-policy";
    for change in [
        format!("delete table {table}"),
        "flush ruleset".to_owned(),
        format!("flush chain {table} ingress"),
        format!("delete element {table} ingress-pods-4 {{ 10.233.0.2 }}"),
    ] {
        world.node.nft(&[&change]);
        assert!(world.plane.audit().unwrap(), "{change} is found");
        assert_eq!(
            world.reached(),
            World::all_but(&["*0"]),
            "{change} is repaired"
        );
        assert!(!world.plane.audit().unwrap());
    }
    world.node.nft(&["add", "table", "inet", "foreign"]);

    // A process that starts again finds the table of the killed one.
    world.plane = world
        .node
        .inside(|| PolicyPlane::open("hf-test", "n").unwrap());
    assert_eq!(
        world.reached(),
        World::all_but(&["*0"]),
        "nothing is open before the first commit"
    );
    world
        .plane
        .set_pod("x", "pod1", Some(&pod(1, &json!({"pod": "1"}))));
    world.set(&[json!({"podSelector": {"matchLabels": {"pod": "1"}}})]);
    assert_eq!(world.reached(), World::all_but(&["*1"]));

    world
        .node
        .inside(|| PolicyPlane::remove("hf-test").unwrap());
    world
        .node
        .inside(|| PolicyPlane::remove("hf-test").unwrap());
    assert_eq!(
        world.node.nft(&["list", "tables"]).trim(),
        "table inet foreign"
    );
    assert_eq!(world.reached(), World::all_but(&[]));
}
