//! A running server, and clients.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RecordType};
use holdfast_dns::{ServeError, Settings, Zone, serve};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longer than the server's own deadline.
const PATIENCE: Duration = Duration::from_secs(8);

pub struct Server {
    pub address: SocketAddr,
    pub zone: Zone,
    end: oneshot::Sender<()>,
    running: JoinHandle<Result<(), ServeError>>,
}

/// An address of this machine that nothing else uses, with port 0: a port that is free for UDP is also free for TCP, and
/// remains so.
pub fn own_address() -> SocketAddr {
    static GIVEN: AtomicU8 = AtomicU8::new(1);
    let last = GIVEN.fetch_add(1, Ordering::Relaxed);
    assert!(last < 255, "no address is left");
    let process = std::process::id().to_be_bytes();
    SocketAddr::from(([127, 128 | process[2], process[3], last], 0))
}

fn free_port() -> SocketAddr {
    let socket = std::net::UdpSocket::bind(own_address()).unwrap();
    socket.local_addr().unwrap()
}

/// A service, an external name, and a headless service with 200 endpoints.
fn zone() -> Zone {
    let zone = Zone::new("cluster.local");
    zone.set_namespace("default", true);
    for (name, spec) in [
        (
            "web",
            json!({"clusterIP": "10.0.0.1", "ports": [{"name": "http", "port": 80}]}),
        ),
        (
            "ext",
            json!({"type": "ExternalName", "externalName": "www.example"}),
        ),
    ] {
        let service = serde_json::from_value(json!({"spec": spec})).unwrap();
        zone.set_service("default", name, Some(&service), &[]);
    }
    let endpoints: Vec<_> = (1..=200)
        .map(|n| json!({"addresses": [format!("10.1.0.{n}")]}))
        .collect();
    let slice = serde_json::from_value(
        json!({"addressType": "IPv4", "metadata": {}, "endpoints": endpoints}),
    );
    let service = serde_json::from_value(json!({"spec": {"clusterIP": "None"}})).unwrap();
    zone.set_service(
        "default",
        "large",
        Some(&service),
        &[Arc::new(slice.unwrap())],
    );
    zone.set_synced();
    zone
}

impl Server {
    /// A server whose zone has the service `default/web` (10.0.0.1), and an external name `default/ext` for `www.example`.
    pub async fn start(upstreams: &[SocketAddr]) -> Server {
        Server::start_at(free_port(), upstreams).await
    }

    /// The server's address, for a loop, before the server runs.
    pub fn reserve() -> SocketAddr {
        free_port()
    }

    pub async fn start_at(address: SocketAddr, upstreams: &[SocketAddr]) -> Server {
        let zone = zone();
        let settings = Settings {
            addresses: vec![address],
            stub_domains: BTreeMap::from([(".".to_owned(), upstreams.to_vec())]),
            workers: 2,
            ..Settings::default()
        };
        let (end, ended) = oneshot::channel();
        let served = zone.clone();
        let running = tokio::spawn(async move {
            serve(settings, served, async {
                let _dropped = ended.await;
            })
            .await
        });
        let server = Server {
            address,
            zone,
            end,
            running,
        };
        // Ready when a cluster name is answered.
        loop {
            let ready = server
                .try_ask("web.default.svc.cluster.local", Duration::from_millis(100))
                .await;
            if ready.is_some() {
                return server;
            }
            assert!(!server.running.is_finished(), "the server ended");
        }
    }

    pub async fn stop(self) {
        self.end.send(()).unwrap();
        self.running.await.unwrap().unwrap();
    }

    pub async fn ask(&self, name: &str) -> Message {
        self.ask_from(
            Ipv4Addr::LOCALHOST.into(),
            &query(name, RecordType::A),
            PATIENCE,
        )
        .await
        .unwrap_or_else(|| panic!("no answer for {name}"))
    }

    async fn try_ask(&self, name: &str, patience: Duration) -> Option<Message> {
        self.ask_from(
            Ipv4Addr::LOCALHOST.into(),
            &query(name, RecordType::A),
            patience,
        )
        .await
    }

    pub async fn ask_with(&self, query: &Message) -> Message {
        self.ask_from(Ipv4Addr::LOCALHOST.into(), query, PATIENCE)
            .await
            .unwrap()
    }

    /// Sends a query from an address of the loopback network, as one of several clients.
    pub async fn ask_from(
        &self,
        client: IpAddr,
        query: &Message,
        patience: Duration,
    ) -> Option<Message> {
        let socket = UdpSocket::bind((client, 0)).await.unwrap();
        socket.connect(self.address).await.unwrap();
        socket.send(&query.to_vec().unwrap()).await.unwrap();
        let mut buffer = [0; 4096];
        // Before the server listens, the kernel reports that the port is closed.
        let length = timeout(patience, socket.recv(&mut buffer))
            .await
            .ok()?
            .ok()?;
        let message = Message::from_vec(&buffer[..length]).unwrap();
        assert_eq!(message.metadata.id, query.metadata.id);
        assert_eq!(message.metadata.message_type, MessageType::Response);
        Some(message)
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }
}

pub async fn send(stream: &mut TcpStream, message: &[u8]) {
    let mut framed = (message.len() as u16).to_be_bytes().to_vec();
    framed.extend(message);
    stream.write_all(&framed).await.unwrap();
}

pub async fn receive(stream: &mut TcpStream) -> Option<Message> {
    let length = timeout(PATIENCE, stream.read_u16()).await.unwrap().ok()?;
    let mut bytes = vec![0; usize::from(length)];
    stream.read_exact(&mut bytes).await.unwrap();
    Some(Message::from_vec(&bytes).unwrap())
}

pub fn query(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(4711, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(
        Name::from_ascii(format!("{name}.")).unwrap(),
        kind,
    ));
    message
}

pub fn with_edns(mut query: Message, payload: u16) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(payload);
    query.set_edns(edns);
    query
}

/// The answers as text, without owner and TTL.
pub fn data(message: &Message) -> Vec<String> {
    let answers = message.answers.iter();
    answers
        .map(|r| format!("{} {}", r.record_type(), r.data))
        .collect()
}
