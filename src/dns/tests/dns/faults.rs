//! Upstreams that fail, and clients that flood.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{Name, RecordType};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use super::clients::{Server, data, query};
use super::upstream::{Upstream, address, empty, many};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_packet_is_repeated() {
    let lossy = Upstream::start(Box::new(|query, nth| match nth {
        0 => Vec::new(),
        _ => vec![(Duration::ZERO, address(query))],
    }))
    .await;
    let server = Server::start(&[lossy.address]).await;
    assert_eq!(data(&server.ask("www.example").await), ["A 192.0.2.1"]);
    assert_eq!(lossy.datagrams(), 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_upstream_is_replaced_and_then_avoided() {
    let (silent, good) = (Upstream::silent().await, Upstream::good().await);
    let server = Server::start(&[silent.address, good.address]).await;
    assert_eq!(data(&server.ask("a.example").await), ["A 192.0.2.1"]);
    assert_eq!((silent.datagrams(), good.datagrams()), (1, 1));
    assert_eq!(data(&server.ask("b.example").await), ["A 192.0.2.1"]);
    assert_eq!((silent.datagrams(), good.datagrams()), (1, 2));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_that_fails_is_replaced_at_once() {
    let failing = Upstream::start(Box::new(|query, _| {
        let mut reply = empty(query);
        reply.metadata.response_code = ResponseCode::ServFail;
        vec![(Duration::ZERO, reply)]
    }))
    .await;
    let good = Upstream::good().await;
    // Nothing listens at the first address.
    let closed: SocketAddr = Server::reserve();
    let server = Server::start(&[closed, failing.address, good.address]).await;
    assert_eq!(data(&server.ask("www.example").await), ["A 192.0.2.1"]);
    assert_eq!((failing.datagrams(), good.datagrams()), (1, 1));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_reply_is_used_although_the_query_was_repeated() {
    let slow = Upstream::start(Box::new(|query, nth| match nth {
        0 => vec![(Duration::from_millis(900), address(query))],
        _ => Vec::new(),
    }))
    .await;
    let server = Server::start(&[slow.address]).await;
    assert_eq!(data(&server.ask("www.example").await), ["A 192.0.2.1"]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_replies_are_ignored() {
    let upstream = Upstream::start(Box::new(|query, _| {
        let mut wrong_id = many(query, 3);
        wrong_id.metadata.id = query.metadata.id.wrapping_add(1);
        let mut other = many(query, 3);
        other.queries[0].name = Name::from_ascii("evil.example.").unwrap();
        let mut kind = many(query, 3);
        kind.queries[0].query_type = RecordType::AAAA;
        let at = |n: u64| Duration::from_millis(50 * n);
        vec![
            (at(0), wrong_id),
            (at(1), other),
            (at(2), kind),
            (at(4), address(query)),
        ]
    }))
    .await;
    let server = Server::start(&[upstream.address]).await;
    assert_eq!(data(&server.ask("www.example").await), ["A 192.0.2.1"]);
    assert_eq!(upstream.datagrams(), 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_replies_are_served_while_the_upstream_is_silent() {
    let is_silent = Arc::new(AtomicBool::new(false));
    let silent = is_silent.clone();
    let upstream = Upstream::start(Box::new(move |query, _| {
        if silent.load(Ordering::SeqCst) {
            return Vec::new();
        }
        let mut reply = address(query);
        // The shortest lifetime.
        reply.answers[0].ttl = 1;
        vec![(Duration::ZERO, reply)]
    }))
    .await;
    let server = Server::start(&[upstream.address]).await;
    server.ask("www.example").await;
    is_silent.store(true, Ordering::SeqCst);
    // Until the reply has expired, the upstream gets no query.
    while upstream.datagrams() == 1 {
        assert_eq!(data(&server.ask("www.example").await), ["A 192.0.2.1"]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let stale = server.ask("www.example").await;
    assert_eq!(
        (data(&stale), stale.answers[0].ttl),
        (vec!["A 192.0.2.1".to_owned()], 30)
    );
    let failed = server.ask("other.example").await;
    assert_eq!(failed.metadata.response_code, ResponseCode::ServFail);
    // After the refresh has failed, no query waits.
    let start = Instant::now();
    assert_eq!(data(&server.ask("www.example").await), ["A 192.0.2.1"]);
    assert!(start.elapsed() < Duration::from_secs(1));
    is_silent.store(false, Ordering::SeqCst);
    let deadline = Instant::now() + Duration::from_secs(30);
    while server.ask("www.example").await.answers[0].ttl == 30 {
        assert!(Instant::now() < deadline, "the reply is never refreshed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    server.stop().await;
}

/// Another client gets answers soon.
async fn others_are_answered(server: &Server, n: usize) {
    let client: IpAddr = Ipv4Addr::new(127, 0, 0, 3).into();
    let start = Instant::now();
    for name in [
        format!("good{n}.example"),
        "web.default.svc.cluster.local".to_owned(),
    ] {
        let query = query(&name, RecordType::A);
        let answer = server
            .ask_from(client, &query, Duration::from_secs(8))
            .await
            .unwrap();
        assert_eq!(
            answer.metadata.response_code,
            ResponseCode::NoError,
            "{name}"
        );
    }
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_random_names_does_not_delay_other_clients() {
    let upstream = Upstream::start(Box::new(|query, _| {
        // Random names are never answered, as those of a slow domain.
        let is_random = query.queries[0].name.to_ascii().starts_with("random");
        if is_random {
            Vec::new()
        } else {
            vec![(Duration::ZERO, address(query))]
        }
    }))
    .await;
    let server = Server::start(&[upstream.address]).await;
    let flood = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    flood.connect(server.address).await.unwrap();
    let mut refused = 0;
    let mut buffer = [0; 600];
    for n in 0..2000 {
        let packet = query(&format!("random{n}.example"), RecordType::A)
            .to_vec()
            .unwrap();
        flood.send(&packet).await.unwrap();
        while flood.try_recv(&mut buffer).is_ok() {
            refused += 1;
        }
        if n % 100 == 99 {
            others_are_answered(&server, n).await;
        }
    }
    while refused < 1000 {
        let received = timeout(Duration::from_secs(8), flood.recv(&mut buffer)).await;
        received
            .expect("fewer than 1000 of 2000 random names were refused")
            .unwrap();
        refused += 1;
    }
    // The limit, with some repeats.
    assert!(
        upstream.datagrams() < 1500,
        "{} queries reached the upstream",
        upstream.datagrams()
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forwarding_loop_is_detected() {
    let address = Server::reserve();
    // An upstream that forwards everything to the server, as a node's own resolver might.
    let relay = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let relay_address = relay.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2000];
        loop {
            let Ok((length, peer)) = relay.recv_from(&mut buffer).await else {
                continue;
            };
            let packet = buffer[..length].to_vec();
            let relay = relay.clone();
            tokio::spawn(async move {
                let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
                socket.send_to(&packet, address).await.unwrap();
                let mut reply = [0; 2000];
                if let Ok(length) = socket.recv(&mut reply).await {
                    let _closed = relay.send_to(&reply[..length], peer).await;
                }
            });
        }
    });
    let server = Server::start_at(address, &[relay_address]).await;
    // The first question may wait for itself; its probe finds the loop.
    server.ask("first.example").await;
    let start = Instant::now();
    let answer = server.ask("second.example").await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(
        data(&server.ask("web.default.svc.cluster.local").await),
        ["A 10.0.0.1"]
    );
    server.stop().await;
}
