//! What nobody in his senses would send.

use crate::server::{MERGE, PODS, STRATEGIC, Server};

/// Random bytes and paths are refused, never a 5xx that nobody meant and never a panic.
#[tokio::test]
async fn hostile_requests_get_an_answer() {
    let server = Server::new().await;
    let bodies: Vec<Vec<u8>> = vec![
        b"k8s\0".to_vec(),
        b"k8s\0\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"\"x\"".to_vec(),
        b"{\"metadata\":[]}".to_vec(),
        b"{\"metadata\":{\"name\":{}},\"spec\":1}".to_vec(),
        b"{\"spec\":{\"containers\":{}}}".to_vec(),
        vec![0xff; 100],
        format!("{}1{}", "[".repeat(5000), "]".repeat(5000)).into_bytes(),
    ];
    let types = [
        "application/json",
        "application/vnd.kubernetes.protobuf",
        "application/yaml",
        STRATEGIC,
        MERGE,
        "application/json-patch+json",
        "x",
    ];
    let paths = [
        PODS,
        "/apis/apps/v1/namespaces/default/deployments/d",
        "/apis/apps/v1/namespaces/default/deployments/d/scale",
        "/api/v1/namespaces/default/pods/p/binding",
        "/api/v1/nodes/n/status",
        "/api/v1/namespaces/%2e%2e/pods/..%2f..",
        "/apis/authentication.k8s.io/v1/tokenreviews",
    ];
    for body in &bodies {
        for content_type in types {
            for path in paths {
                for method in ["POST", "PUT", "PATCH", "DELETE", "TRACE"] {
                    let reply = server
                        .send(Server::request(method, path, content_type, body.clone()))
                        .await;
                    assert!(
                        (200..500).contains(&reply.code),
                        "{method} {path} {content_type} {:?}: {} {}",
                        String::from_utf8_lossy(&body[..body.len().min(60)]),
                        reply.code,
                        reply.body
                    );
                }
            }
        }
    }
}
