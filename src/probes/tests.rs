use super::*;
use std::convert::Infallible;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;

const SECOND: Duration = Duration::from_secs(1);
/// Timeout of requests that are answered at once, unless the machine is busy.
const LONG: Duration = Duration::from_secs(30);

fn request(port: u16, path: &str) -> Http {
    Http {
        tls: false,
        host: "127.0.0.1".into(),
        port,
        path: path.into(),
        headers: vec![("User-Agent".into(), "kube-probe/1.36".into())],
    }
}

/// Starts a server whose answer depends on the path; returns its port.
async fn server() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let answer = |request: hyper::Request<hyper::body::Incoming>| async move {
                let agent = request.headers()["user-agent"]
                    .to_str()
                    .expect("text")
                    .to_owned();
                let (status, location, body) = match request.uri().path() {
                    "/ok" => (200, None, agent),
                    "/local" => (302, Some("/ok".to_owned()), String::new()),
                    "/loop" => (302, Some("/loop".to_owned()), String::new()),
                    "/away" => (302, Some("http://192.0.2.1/".to_owned()), "moved".into()),
                    "/nowhere" => (302, None, String::new()),
                    "/same" => (304, Some("/ok".to_owned()), String::new()),
                    "/long" => (200, None, "x".repeat(1 << 20)),
                    "/slow" => {
                        tokio::time::sleep(SECOND * 10).await;
                        (200, None, String::new())
                    }
                    _ => (503, None, "no".into()),
                };
                let mut response = hyper::Response::builder().status(status);
                if let Some(location) = location {
                    response = response.header("location", location);
                }
                Ok::<_, Infallible>(
                    response
                        .body(Full::<Bytes>::from(body))
                        .expect("a response"),
                )
            };
            tokio::spawn(async move {
                // Clients that disconnect early are part of the test.
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), hyper::service::service_fn(answer))
                    .await;
            });
        }
    });
    port
}

#[tokio::test]
async fn http_probes_follow_redirects_only_to_their_host_and_limit_the_body() {
    let port = server().await;
    let get = |path: &'static str| async move { Network.http(&request(port, path), LONG).await };
    assert_eq!(
        get("/ok").await,
        Ok(Reply {
            status: 200,
            body: "kube-probe/1.36".into()
        })
    );
    assert_eq!(get("/local").await.map(|r| r.status), Ok(200));
    assert_eq!(
        get("/away").await,
        Ok(Reply {
            status: 302,
            body: "moved".into()
        })
    );
    assert_eq!(get("/nowhere").await.map(|r| r.status), Ok(302));
    assert_eq!(get("/same").await.map(|r| r.status), Ok(304));
    assert_eq!(get("/nothing").await.map(|r| r.status), Ok(503));
    assert!(
        get("/long")
            .await
            .is_ok_and(|r| r.body.len() <= holdfast_core::pod::probe::OUTPUT_LIMIT)
    );
    assert!(
        get("/loop")
            .await
            .is_err_and(|e| e.to_string().contains("10 redirects"))
    );
    let slow = Network
        .http(&request(port, "/slow"), Duration::from_millis(100))
        .await;
    assert!(slow.is_err_and(|e| e.to_string().contains("deadline")));
    let tls = Http {
        tls: true,
        ..request(port, "/ok")
    };
    assert_eq!(Network.http(&tls, LONG).await, Err(HttpError::Plain));
}

#[tokio::test]
async fn connection_errors_have_the_kubelets_messages() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let port = listener.local_addr().expect("an address").port();
    assert_eq!(Network.tcp("127.0.0.1", port, LONG).await, Ok(()));
    // A port of this test at which no server listens. A closed port may stay open for a moment, because a child process
    // of another test has inherited it until exec.
    let closed = tokio::net::TcpSocket::new_v4().expect("a socket");
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    closed.bind(address).expect("a port");
    let port = closed.local_addr().expect("an address").port();
    assert_eq!(
        Network.tcp("127.0.0.1", port, LONG).await,
        Err(format!(
            "dial tcp 127.0.0.1:{port}: connect: connection refused"
        ))
    );
    let grpc = Network
        .grpc("127.0.0.1", port, "", LONG)
        .await
        .expect_err("refused");
    assert!(
        grpc.contains("failed to connect service") && grpc.contains("connection refused"),
        "{grpc}"
    );
    let not_grpc = Network
        .grpc("127.0.0.1", server().await, "", SECOND)
        .await
        .expect_err("not grpc");
    assert!(
        not_grpc.starts_with("error: ") || not_grpc.starts_with("timeout: "),
        "{not_grpc}"
    );
}

struct Healthy;

#[tonic::async_trait]
impl holdfast_proto::health::health_server::Health for Healthy {
    async fn check(
        &self,
        request: tonic::Request<holdfast_proto::health::HealthCheckRequest>,
    ) -> Result<tonic::Response<holdfast_proto::health::HealthCheckResponse>, tonic::Status> {
        let status = match request.into_inner().service.as_str() {
            "" => 1,
            "ill" => 2,
            other => return Err(tonic::Status::not_found(other.to_owned())),
        };
        Ok(tonic::Response::new(
            holdfast_proto::health::HealthCheckResponse { status },
        ))
    }
}

#[tokio::test]
async fn grpc_probes_request_the_health_of_the_service() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = hyper_util::service::TowerToHyperService::new(
                holdfast_proto::health::health_server::HealthServer::new(Healthy),
            );
            let serve =
                hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
            tokio::spawn(serve);
        }
    });
    let check =
        |service: &'static str| async move { Network.grpc("127.0.0.1", port, service, LONG).await };
    assert_eq!(check("").await, Ok(()));
    assert_eq!(
        check("ill").await,
        Err("service unhealthy (responded with \"NOT_SERVING\")".into())
    );
    assert!(check("none").await.is_err_and(|e| {
        e.starts_with("error: health rpc probe failed: rpc error: code = NotFound")
    }));
}
