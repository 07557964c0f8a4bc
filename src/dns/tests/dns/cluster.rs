//! Names of the cluster over both transports.

use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType;
use tokio::io::AsyncReadExt as _;
use tokio::net::UdpSocket;
use tokio::time::timeout;

use super::clients::{Server, data, query, receive, send, with_edns};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_answered_over_udp_and_tcp() {
    let server = Server::start(&[]).await;
    let answer = server.ask("WEB.default.svc.Cluster.local").await;
    assert_eq!(data(&answer), ["A 10.0.0.1"]);
    assert_eq!(
        answer.queries[0].name.to_ascii(),
        "WEB.default.svc.Cluster.local."
    );
    assert!(answer.edns.is_none());
    let mut stream = server.connect().await;
    // Several queries before the first response.
    let names = [
        "web.default.svc.cluster.local",
        "absent.default.svc.cluster.local",
        "large.default.svc.cluster.local",
    ];
    for name in names {
        send(
            &mut stream,
            &with_edns(query(name, RecordType::A), 1232)
                .to_vec()
                .unwrap(),
        )
        .await;
    }
    for (code, answers) in [
        (ResponseCode::NoError, 1),
        (ResponseCode::NXDomain, 0),
        (ResponseCode::NoError, 200),
    ] {
        let message = receive(&mut stream).await.unwrap();
        assert_eq!(
            (message.metadata.response_code, message.answers.len()),
            (code, answers)
        );
        assert!(message.edns.is_some());
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_answers_are_truncated_to_the_clients_size() {
    let server = Server::start(&[]).await;
    let large = query("large.default.svc.cluster.local", RecordType::A);
    let plain = server.ask_with(&large).await;
    assert!(
        plain.metadata.truncation && (20..31).contains(&plain.answers.len()),
        "{}",
        plain.answers.len()
    );
    let edns = server.ask_with(&with_edns(large, 4096)).await;
    assert!(
        edns.metadata.truncation && (60..80).contains(&edns.answers.len()),
        "{}",
        edns.answers.len()
    );
    assert!(edns.edns.is_some());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_are_answered_at_once() {
    let server = Server::start(&[]).await;
    server.zone.set_service("default", "web", None, &[]);
    let answer = server.ask("web.default.svc.cluster.local").await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_packets_do_not_disturb_other_queries() {
    let server = Server::start(&[]).await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(server.address).await.unwrap();
    let good = query("web.default.svc.cluster.local", RecordType::A)
        .to_vec()
        .unwrap();
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut packet = good.clone();
        change(&mut packet);
        packet
    };
    // A pointer to itself, and two pointers to each other.
    let to_itself = changed(&|p| p[12..14].copy_from_slice(&[0xc0, 12]));
    let circle = changed(&|p| p[12..16].copy_from_slice(&[0xc0, 14, 0xc0, 12]));
    let answered = [
        to_itself,
        circle,
        changed(&|p| p.truncate(20)),
        changed(&|p| p[5] = 9),
    ];
    let dropped = [
        vec![],
        vec![0],
        good[..11].to_vec(),
        changed(&|p| p[2] |= 0x80),
        vec![0xff; 4096],
    ];
    let mut buffer = [0; 600];
    for packet in &answered {
        socket.send(packet).await.unwrap();
        let length = timeout(Duration::from_secs(5), socket.recv(&mut buffer))
            .await
            .unwrap()
            .unwrap();
        let message = Message::from_vec(&buffer[..length]).unwrap();
        assert_eq!(message.metadata.response_code, ResponseCode::FormErr);
    }
    for packet in &dropped {
        socket.send(packet).await.unwrap();
    }
    // The next response is that of the next good query.
    socket.send(&good).await.unwrap();
    let length = timeout(Duration::from_secs(5), socket.recv(&mut buffer))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        data(&Message::from_vec(&buffer[..length]).unwrap()),
        ["A 10.0.0.1"]
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_few_connections_and_bad_framing_closes_one() {
    let server = Server::start(&[]).await;
    let good = query("web.default.svc.cluster.local", RecordType::A)
        .to_vec()
        .unwrap();
    let mut open = Vec::new();
    for _ in 0..16 {
        let mut stream = server.connect().await;
        send(&mut stream, &good).await;
        assert!(receive(&mut stream).await.is_some());
        open.push(stream);
    }
    let mut refused = server.connect().await;
    assert!(!matches!(refused.read_u8().await, Ok(1..)));
    // A message that is too long closes its connection, and another one may be opened.
    let mut long = open.pop().unwrap();
    send(&mut long, &vec![0; 5000]).await;
    assert!(receive(&mut long).await.is_none());
    loop {
        let mut stream = server.connect().await;
        send(&mut stream, &good).await;
        if receive(&mut stream).await.is_some() {
            break;
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_frees_its_address() {
    let server = Server::start(&[]).await;
    let address = server.address;
    server.stop().await;
    std::net::UdpSocket::bind(address).unwrap();
    Server::start_at(address, &[]).await.stop().await;
}
