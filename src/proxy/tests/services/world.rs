//! A client, a node with the data plane, and endpoints on a bridge of the node.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use holdfast_core::network::Family;
use holdfast_core::services::NodeFacts;
use holdfast_proxy::services::{Committed, DataPlane, Settings};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value as Json, json};

use crate::namespace::Namespace;

/// How long a client waits for an answer that must come.
const LONG: Duration = Duration::from_secs(10);

/// The address of a kind in a family, with the last number.
pub fn address(family: Family, kind: &str, last: u8) -> IpAddr {
    let text = match (kind, family) {
        ("client", Family::V4) => format!("10.231.0.{last}"),
        ("client", Family::V6) => format!("fd31::{last}"),
        ("pod", Family::V4) => format!("10.244.0.{last}"),
        ("pod", Family::V6) => format!("fd44::{last}"),
        ("service", Family::V4) => format!("10.96.0.{last}"),
        ("outside", Family::V4) => format!("10.233.0.{last}"),
        ("outside", Family::V6) => format!("fd33::{last}"),
        (_, Family::V4) => format!("203.0.113.{last}"),
        ("service", Family::V6) => format!("fd96::{last}"),
        (_, Family::V6) => format!("fd03::{last}"),
    };
    text.parse().unwrap()
}

/// An answer: the number of the endpoint, and the client's address as the endpoint sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Answer {
    pub endpoint: u8,
    pub client: IpAddr,
}

fn parse(text: &str) -> Answer {
    let (endpoint, client) = text.trim().split_once(' ').unwrap();
    Answer {
        endpoint: endpoint.parse().unwrap(),
        client: client.parse().unwrap(),
    }
}

/// Answers on TCP port 8080 and UDP port 5353 of a namespace until the process exits. A TCP connection gets an answer to each
/// byte.
fn serve(namespace: &Namespace, any: IpAddr, number: u8) {
    let (listener, socket) = namespace.inside(|| {
        let listener = TcpListener::bind((any, 8080)).unwrap();
        (listener, UdpSocket::bind((any, 5353)).unwrap())
    });
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let client = stream.peer_addr().unwrap().ip();
                let mut byte = [0];
                while stream.read_exact(&mut byte).is_ok() {
                    let _ = stream.write_all(format!("{number} {client}\n").as_bytes());
                }
            });
        }
    });
    std::thread::spawn(move || {
        let mut byte = [0];
        while let Ok((_, client)) = socket.recv_from(&mut byte) {
            let _ = socket.send_to(format!("{number} {}\n", client.ip()).as_bytes(), client);
        }
    });
}

/// The length of networks, the option of `ip`, and the address that stands for all, in a family.
fn words(family: Family) -> (u8, &'static str, IpAddr) {
    match family {
        Family::V4 => (24, "-4", [0; 4].into()),
        Family::V6 => (64, "-6", [0; 16].into()),
    }
}

/// A pod on the bridge of the node, which answers with its number.
fn add_pod(node: &Namespace, family: Family, number: u8) -> Option<Namespace> {
    let (length, flag, any) = words(family);
    let pod = Namespace::new()?;
    let own = format!("{}/{length}", address(family, "pod", number));
    let (host, unused) = (format!("pod{number}"), format!("169.254.9.{number}/32"));
    node.connect((&host, &unused), &pod, ("eth0", &own));
    node.ip(&["link", "set", &host, "master", "bridge"]);
    // The bridge sends a translated packet to the link from which it came.
    node.ip(&[
        "link",
        "set",
        &host,
        "type",
        "bridge_slave",
        "hairpin",
        "on",
    ]);
    let gateway = address(family, "pod", 1).to_string();
    pod.ip(&[flag, "route", "add", "default", "via", &gateway]);
    serve(&pod, any, number);
    Some(pod)
}

pub struct World {
    pub client: Namespace,
    pub node: Namespace,
    /// The endpoint with the number 2 has the last byte 2, and so on.
    pub pods: Vec<Namespace>,
    pub family: Family,
    pub plane: Option<DataPlane>,
}

/// Adds an address (`10.9.1.1/24`) that is usable at once to a link.
fn add_address(namespace: &Namespace, address: &str, link: &str) {
    let mut add = vec!["address", "add", address, "dev", link];
    if address.contains(':') {
        add.push("nodad");
    }
    namespace.ip(&add);
}

/// The settings of the tests: the client is outside of the cluster.
pub fn settings() -> Settings {
    Settings {
        cluster_cidrs: vec![
            "10.244.0.0/16".parse().unwrap(),
            "fd44::/64".parse().unwrap(),
        ],
        service_cidrs: vec!["10.96.0.0/16".parse().unwrap()],
        ..Settings::new("holdfast-test")
    }
}

impl World {
    /// A node with two endpoints; `None` without root.
    pub fn new(family: Family) -> Option<World> {
        let (client, node) = (Namespace::new()?, Namespace::new()?);
        let (length, flag, _) = words(family);
        let with_length = |kind, last| format!("{}/{length}", address(family, kind, last));
        let near = with_length("client", 1);
        node.connect(
            ("client", &near),
            &client,
            ("eth0", &with_length("client", 2)),
        );
        let gateway = address(family, "client", 1).to_string();
        client.ip(&[flag, "route", "add", "default", "via", &gateway]);
        node.inside(|| {
            holdfast_net::sysctl::write("ipv4/ip_forward", "1").unwrap();
            holdfast_net::sysctl::write("ipv6/conf/all/forwarding", "1").unwrap();
        });
        // Untranslated packets to services would leave the node through another link than that of the client: the kernel limits
        // errors to a client that it also redirects.
        node.ip(&["link", "add", "outside", "type", "bridge"]);
        node.ip(&["link", "set", "outside", "up"]);
        let outside = with_length("outside", 1);
        add_address(&node, &outside, "outside");
        let next = address(family, "outside", 2).to_string();
        node.ip(&[flag, "route", "add", "default", "via", &next]);
        node.ip(&["link", "add", "bridge", "type", "bridge"]);
        let gateway = with_length("pod", 1);
        add_address(&node, &gateway, "bridge");
        node.ip(&["link", "set", "bridge", "up"]);
        let pods: Option<Vec<Namespace>> = (2..=3_u8)
            .map(|number| add_pod(&node, family, number))
            .collect();
        let mut world = World {
            client,
            node,
            pods: pods?,
            family,
            plane: None,
        };
        world.open(settings());
        Some(world)
    }

    /// Starts the data plane; an earlier one ends as if it was killed.
    pub fn open(&mut self, settings: Settings) {
        self.plane = None;
        let mut plane = self
            .node
            .inside(|| DataPlane::open(settings).map_err(|e| e.to_string()))
            .unwrap();
        plane.set_node(NodeFacts {
            name: "here".to_owned(),
            zone: None,
            addresses: vec![address(self.family, "client", 1)],
        });
        self.plane = Some(plane);
    }

    pub fn plane(&mut self) -> &mut DataPlane {
        self.plane.as_mut().unwrap()
    }

    pub fn set(&mut self, service: &Service, slices: &[Arc<EndpointSlice>]) {
        self.plane()
            .set_service("default", "web", Some(service), slices);
    }

    pub fn commit(&mut self) -> Committed {
        let World { node, plane, .. } = self;
        let plane = plane.as_mut().unwrap();
        node.inside(|| plane.commit().map_err(|e| e.to_string()))
            .unwrap()
    }

    pub fn audit(&mut self) -> Vec<String> {
        let World { node, plane, .. } = self;
        let plane = plane.as_mut().unwrap();
        let repaired = node.inside(|| plane.audit().map_err(|e| e.to_string()));
        repaired.unwrap().differences
    }

    /// The service `web` with TCP port 80 and UDP port 53 at the cluster address 20. `spec` changes it.
    pub fn service(&self, spec: Json) -> Service {
        let address = address(self.family, "service", 20);
        let mut object = json!({
            "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "type": "NodePort", "clusterIP": address, "clusterIPs": [address],
                "ports": [
                    {"name": "http", "port": 80, "nodePort": 30080, "protocol": "TCP"},
                    {"name": "dns", "port": 53, "nodePort": 30053, "protocol": "UDP"},
                ],
            },
        });
        for (name, value) in spec.as_object().unwrap() {
            object["spec"][name] = value.clone();
        }
        serde_json::from_value(object).unwrap()
    }

    /// A slice with endpoints on a node.
    pub fn slice(&self, node: &str, endpoints: &[u8]) -> Arc<EndpointSlice> {
        let endpoints: Vec<Json> = endpoints
            .iter()
            .map(
                |last| json!({"addresses": [address(self.family, "pod", *last)], "nodeName": node}),
            )
            .collect();
        let kind = match self.family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        let object = json!({
            "metadata": {"name": format!("web-{node}")}, "addressType": kind, "endpoints": endpoints,
            "ports": [
                {"name": "http", "port": 8080, "protocol": "TCP"},
                {"name": "dns", "port": 5353, "protocol": "UDP"},
            ],
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    /// Commits the service with endpoints on this node.
    pub fn set_up(&mut self, spec: Json, endpoints: &[u8]) -> Committed {
        let service = self.service(spec);
        let slice = self.slice("here", endpoints);
        self.set(&service, &[slice]);
        self.commit()
    }

    pub fn to(&self, kind: &str, last: u8, port: u16) -> SocketAddr {
        (address(self.family, kind, last), port).into()
    }
}

/// Opens a TCP connection from a namespace.
pub fn connect(from: &Namespace, to: SocketAddr, wait: Duration) -> io::Result<TcpStream> {
    let stream = from.inside(|| TcpStream::connect_timeout(&to, wait))?;
    stream.set_read_timeout(Some(LONG))?;
    Ok(stream)
}

/// The next answer of a TCP connection.
pub fn ask(stream: &mut TcpStream) -> io::Result<Answer> {
    stream.write_all(b"?")?;
    let mut text = String::new();
    let mut byte = [0];
    while byte[0] != b'\n' {
        stream.read_exact(&mut byte)?;
        text.push(char::from(byte[0]));
    }
    Ok(parse(&text))
}

/// An answer to a new TCP connection.
pub fn call(from: &Namespace, to: SocketAddr) -> io::Result<Answer> {
    ask(&mut connect(from, to, LONG)?)
}

/// A UDP socket of a namespace.
pub fn udp(from: &Namespace, to: SocketAddr) -> UdpSocket {
    let any: IpAddr = match to.ip() {
        IpAddr::V4(_) => [0; 4].into(),
        IpAddr::V6(_) => [0; 16].into(),
    };
    let socket = from.inside(|| UdpSocket::bind((any, 0)).unwrap());
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// An answer to a datagram.
pub fn datagram(socket: &UdpSocket) -> io::Result<Answer> {
    socket.send(b"?")?;
    let mut buffer = [0; 100];
    let length = socket.recv(&mut buffer)?;
    Ok(parse(std::str::from_utf8(&buffer[..length]).unwrap()))
}
