//! Names outside of the cluster, with upstreams that work.

use std::time::{Duration, Instant};

use futures_lite::join_all;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;

use super::clients::{Server, data, query, with_edns};
use super::upstream::{Upstream, address, empty, many};

/// Concurrency without another dependency.
mod futures_lite {
    use std::future::Future;

    pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
        let mut pinned: Vec<_> = futures.into_iter().map(Box::pin).collect();
        let mut outputs: Vec<Option<F::Output>> = pinned.iter().map(|_| None).collect();
        std::future::poll_fn(|context| {
            for (future, output) in pinned.iter_mut().zip(&mut outputs) {
                if output.is_none()
                    && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
                {
                    *output = Some(value);
                }
            }
            if outputs.iter().all(Option::is_some) {
                std::task::Poll::Ready(())
            } else {
                std::task::Poll::Pending
            }
        })
        .await;
        outputs.into_iter().flatten().collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_are_cached_and_identical_questions_joined() {
    let slow = Upstream::start(Box::new(|query, _| {
        vec![(Duration::from_millis(200), address(query))]
    }))
    .await;
    let server = Server::start(&[slow.address]).await;
    let answers = join_all((0..50).map(|_| server.ask("www.example"))).await;
    assert!(answers.iter().all(|a| data(a) == ["A 192.0.2.1"]));
    assert_eq!(slow.datagrams(), 1);
    let cached = server.ask("WWW.example").await;
    assert_eq!(
        (slow.datagrams(), data(&cached)),
        (1, vec!["A 192.0.2.1".to_owned()])
    );
    assert!((1..=30).contains(&cached.answers[0].ttl));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn external_names_are_completed() {
    let upstream = Upstream::good().await;
    let server = Server::start(&[upstream.address]).await;
    let answer = server.ask("ext.default.svc.cluster.local").await;
    assert_eq!(data(&answer), ["CNAME www.example.", "A 192.0.2.1"]);
    assert!(answer.answers.iter().all(|r| r.ttl <= 30));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_external_name_has_the_code_of_its_target() {
    let upstream = Upstream::start(Box::new(|query, _| {
        let mut reply = empty(query);
        reply.metadata.response_code = ResponseCode::NXDomain;
        vec![(Duration::ZERO, reply)]
    }))
    .await;
    let server = Server::start(&[upstream.address]).await;
    let answer = server.ask("ext.default.svc.cluster.local").await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
    assert_eq!(data(&answer), ["CNAME www.example."]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_replies_are_requested_over_tcp() {
    let upstream = Upstream::start(Box::new(|query, _| {
        let mut reply = empty(query);
        reply.metadata.truncation = true;
        vec![(Duration::ZERO, reply)]
    }))
    .await;
    let server = Server::start(&[upstream.address]).await;
    let answer = server
        .ask_with(&with_edns(query("www.example", RecordType::A), 1232))
        .await;
    assert_eq!(upstream.connections(), 1);
    assert!(
        answer.metadata.truncation && answer.answers.len() > 50,
        "{}",
        answer.answers.len()
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_without_edns_are_queried_without_it() {
    let upstream = Upstream::start(Box::new(|query, _| {
        let mut reply = empty(query);
        reply.metadata.response_code = ResponseCode::FormErr;
        if query.edns.is_none() {
            reply = many(query, 2);
        }
        vec![(Duration::ZERO, reply)]
    }))
    .await;
    let server = Server::start(&[upstream.address]).await;
    assert_eq!(server.ask("www.example").await.answers.len(), 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_and_queries_without_recursion_are_not_forwarded() {
    let upstream = Upstream::good().await;
    let server = Server::start(&[upstream.address]).await;
    let any = server
        .ask_with(&query("www.example", RecordType::ANY))
        .await;
    assert_eq!(any.answers.len(), 1);
    assert_eq!(any.answers[0].record_type(), RecordType::HINFO);
    let mut plain = query("www.example", RecordType::A);
    plain.metadata.recursion_desired = false;
    let refused = server.ask_with(&plain).await;
    assert_eq!(refused.metadata.response_code, ResponseCode::Refused);
    let transfer = server
        .ask_with(&query("cluster.local", RecordType::AXFR))
        .await;
    assert_eq!(transfer.metadata.response_code, ResponseCode::Refused);
    assert_eq!(upstream.datagrams(), 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_upstreams_the_error_is_immediate() {
    let server = Server::start(&[]).await;
    let start = Instant::now();
    let answer = server.ask("www.example").await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    assert!(start.elapsed() < Duration::from_secs(3));
    server.stop().await;
}
