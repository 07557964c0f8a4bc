//! A name server whose replies a test chooses.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hickory_proto::op::Message;
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};

use super::clients::own_address;

/// What the upstream does with its `n`th datagram (from 0): each reply after a delay.
pub type Behaviour = dyn Fn(&Message, usize) -> Vec<(Duration, Message)> + Send + Sync;

pub struct Upstream {
    pub address: SocketAddr,
    datagrams: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
}

impl Upstream {
    /// Starts at an address of its own. Over TCP, every question gets the whole reply at once.
    pub async fn start(behaviour: Box<Behaviour>) -> Upstream {
        let socket = Arc::new(UdpSocket::bind(own_address()).await.unwrap());
        let address = socket.local_addr().unwrap();
        let listener = TcpListener::bind(address).await.unwrap();
        let datagrams = Arc::new(AtomicUsize::new(0));
        let connections = Arc::new(AtomicUsize::new(0));
        let upstream = Upstream {
            address,
            datagrams: datagrams.clone(),
            connections: connections.clone(),
        };
        tokio::spawn(async move {
            let mut buffer = [0; 2000];
            loop {
                let (length, peer) = socket.recv_from(&mut buffer).await.unwrap();
                let query = Message::from_vec(&buffer[..length]).unwrap();
                // The server's check for forwarding loops is not a query of a client.
                if query.queries[0].query_type == hickory_proto::rr::RecordType::HINFO {
                    continue;
                }
                let nth = datagrams.fetch_add(1, Ordering::SeqCst);
                for (delay, reply) in behaviour(&query, nth) {
                    let socket = socket.clone();
                    tokio::spawn(async move {
                        tokio::time::sleep(delay).await;
                        socket
                            .send_to(&reply.to_vec().unwrap(), peer)
                            .await
                            .unwrap();
                    });
                }
            }
        });
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections.fetch_add(1, Ordering::SeqCst);
                let length = stream.read_u16().await.unwrap();
                let mut query = vec![0; usize::from(length)];
                stream.read_exact(&mut query).await.unwrap();
                let reply = many(&Message::from_vec(&query).unwrap(), 100)
                    .to_vec()
                    .unwrap();
                stream.write_u16(reply.len() as u16).await.unwrap();
                stream.write_all(&reply).await.unwrap();
            }
        });
        upstream
    }

    /// An upstream that answers each question with an address.
    pub async fn good() -> Upstream {
        Upstream::start(Box::new(|query, _| vec![(Duration::ZERO, address(query))])).await
    }

    /// An upstream that never replies.
    pub async fn silent() -> Upstream {
        Upstream::start(Box::new(|_, _| Vec::new())).await
    }

    pub fn datagrams(&self) -> usize {
        self.datagrams.load(Ordering::SeqCst)
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

/// A reply without records.
pub fn empty(query: &Message) -> Message {
    let mut reply = Message::response(query.metadata.id, query.metadata.op_code);
    reply.metadata.recursion_available = true;
    reply.add_queries(query.queries.clone());
    reply
}

/// A reply with 192.0.2.1.
pub fn address(query: &Message) -> Message {
    many(query, 1)
}

/// A reply with `count` addresses, from 192.0.2.1.
pub fn many(query: &Message, count: u8) -> Message {
    let mut reply = empty(query);
    let name = reply.queries[0].name.clone();
    for n in 1..=count {
        let data = RData::A(A::new(192, 0, 2, n));
        reply.add_answer(Record::from_rdata(name.clone(), 300, data));
    }
    reply
}
