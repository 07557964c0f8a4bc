//! Snapshots of the `Status` bodies of refusals, one request for each kind of refusal. The texts of kube-apiserver are
//! unchanged, because clients parse some of them.

use std::time::Duration;

use holdfast_control::api::{Answer, Request};
use holdfast_control::store::{Bytes, Store};
use serde_json::{Value, json};

use crate::server::{MAPS, PODS, Server, next, pod, request};

/// The refusals so far, as text.
#[derive(Default)]
struct Statuses(String);

impl Statuses {
    /// Adds a body. `masked` are values that differ between runs, with their names.
    fn add(&mut self, what: &str, body: &Value, masked: &[(&str, &str)]) {
        assert_eq!(
            (body["kind"].as_str(), body["status"].as_str()),
            (Some("Status"), Some("Failure")),
            "{what}: {body}"
        );
        let mut text = format!("# {what}\n{body:#}\n\n");
        for (value, name) in masked {
            text = text.replace(value, name);
        }
        self.0.push_str(&text);
    }

    /// Sends a request and adds the response.
    async fn send(
        &mut self,
        server: &Server,
        what: &str,
        request: Request,
        masked: &[(&str, &str)],
    ) {
        let reply = server.send(request).await;
        assert_eq!(
            reply.body["code"].as_u64(),
            Some(u64::from(reply.code)),
            "{what}: {}",
            reply.body
        );
        self.add(what, &reply.body, masked);
    }
}

/// A request as a user without any role.
fn of_eve(method: &str, url: &str) -> Request {
    let mut request = request(method, url, &Value::Null);
    request.user.name = "eve".into();
    request.user.groups = vec!["system:authenticated".into()];
    request
}

fn with_body(kind: &str, method: &str, body: &[u8]) -> Request {
    let url = match method {
        "PATCH" => format!("{MAPS}/a"),
        _ => MAPS.to_owned(),
    };
    Server::request(method, &url, kind, body.to_vec())
}

/// 400 and 422: requests that no server accepts.
#[tokio::test]
async fn invalid_requests() {
    let server = Server::new().await;
    let map = json!({"metadata": {"name": "a"}});
    server.ok("POST", MAPS, &map).await;
    let mut all = Statuses::default();
    let strict = json!({"metadata": {"name": "b"}, "dat": {}});
    let other = json!({"metadata": {"name": "b", "namespace": "other"}});
    let secret = json!({"kind": "Secret", "metadata": {"name": "b"}});
    let named = json!({"metadata": {"name": "A_b"}, "data": {"a/b": "1"}});
    let no_containers = json!({"metadata": {"name": "q"}, "spec": {"containers": []}});
    let strict_url = format!("{MAPS}?fieldValidation=Strict");
    for (what, url, body) in [
        ("an unknown field", strict_url.as_str(), strict),
        ("another namespace", MAPS, other),
        ("another kind", MAPS, secret),
        ("one invalid field", PODS, no_containers),
        ("several invalid fields", MAPS, named),
    ] {
        let request = request("POST", url, &body);
        all.send(&server, what, request, &[]).await;
    }
    for (what, query) in [
        ("a malformed selector", "labelSelector=a%20b"),
        ("a malformed limit", "limit=many"),
        ("a malformed revision", "resourceVersion=x"),
        ("a malformed continue token", "continue=x"),
        ("an option that needs another", "resourceVersionMatch=Exact"),
    ] {
        let request = request("GET", &format!("{MAPS}?{query}"), &Value::Null);
        all.send(&server, what, request, &[]).await;
    }
    let json = "application/json";
    let broken = with_body(json, "POST", b"{");
    all.send(&server, "a body that is not JSON", broken, &[])
        .await;
    let patch = br#"[{"op": "test", "path": "/metadata/name", "value": "b"}]"#;
    let patch = with_body("application/json-patch+json", "PATCH", patch);
    all.send(&server, "a JSON patch whose test fails", patch, &[])
        .await;
    insta::assert_snapshot!("invalid_requests", all.0);
}

/// 401 and 403: who the user is, and what the user may do.
#[tokio::test]
async fn denied_requests() {
    let server = Server::with_roles().await;
    let mut all = Statuses::default();
    let denied = server.0.authenticate(None, Some("Bearer x"));
    let status = denied.expect_err("no token of this cluster").status();
    all.add("an invalid token", &status, &[]);
    let anonymous = {
        let mut request = of_eve("GET", MAPS);
        request.user.name = "system:anonymous".into();
        request.user.groups = vec!["system:unauthenticated".into()];
        request
    };
    let account = json!({"metadata": {"name": "q"}, "spec": {"serviceAccountName": "x", "containers": [{"name": "c", "image": "i"}]}});
    for (what, request) in [
        ("an anonymous list", anonymous),
        ("a list without a role", of_eve("GET", MAPS)),
        (
            "a get without a role",
            of_eve("GET", &format!("{PODS}/p/log")),
        ),
        ("a cluster-wide kind", of_eve("DELETE", "/api/v1/nodes/n")),
        (
            "a kind with a group",
            of_eve("PATCH", "/apis/apps/v1/namespaces/default/deployments/d"),
        ),
        ("a path that is no resource", of_eve("GET", "/metrics")),
        (
            "a namespace that must exist",
            request("DELETE", "/api/v1/namespaces/default", &Value::Null),
        ),
        (
            "a pod that admission rejects",
            request("POST", PODS, &account),
        ),
    ] {
        all.send(&server, what, request, &[]).await;
    }
    insta::assert_snapshot!("denied_requests", all.0);
}

/// 404, 405, 406 and 415: what the server does not have or accept.
#[tokio::test]
async fn unsupported_requests() {
    let server = Server::new().await;
    let mut all = Statuses::default();
    let map = json!({"metadata": {"name": "a"}});
    let mut accepts_xml = request("GET", MAPS, &Value::Null);
    accepts_xml.accept = "application/xml".into();
    let null = Value::Null;
    let deployment = "/apis/apps/v1/namespaces/default/deployments/nosuch";
    for (what, request) in [
        (
            "a missing object",
            request("GET", &format!("{MAPS}/nosuch"), &null),
        ),
        (
            "a missing object with a group",
            request("GET", deployment, &null),
        ),
        (
            "a missing namespace",
            request("POST", "/api/v1/namespaces/nosuch/configmaps", &map),
        ),
        ("a missing kind", request("GET", "/api/v1/widgets", &null)),
        ("a missing version", request("GET", "/apis/apps/v9", &null)),
        (
            "a method without a name",
            request("POST", "/api/v1/configmaps", &map),
        ),
        (
            "a method of a path that is no resource",
            request("POST", "/version", &null),
        ),
        ("a response that is not JSON", accepts_xml),
        (
            "a body of another type",
            with_body("text/csv", "POST", b"a"),
        ),
        (
            "a patch of another type",
            with_body("application/json", "PATCH", b"{}"),
        ),
        (
            "server-side apply",
            with_body("application/apply-patch+yaml", "PATCH", b"{}"),
        ),
    ] {
        all.send(&server, what, request, &[]).await;
    }
    insta::assert_snapshot!("unsupported_requests", all.0);
}

/// 409 and 500: objects that another request has changed.
#[tokio::test]
async fn conflicting_requests() {
    let server = Server::new().await;
    let mut all = Statuses::default();
    let named = |version: &str| json!({"metadata": {"name": "a", "resourceVersion": version}});
    let created = server.ok("POST", MAPS, &named("")).await;
    let uid = created["metadata"]["uid"].as_str().unwrap();
    let precondition = json!({"preconditions": {"uid": "11111111-2222-4333-8444-555555555555"}});
    let one = format!("{MAPS}/a");
    for (what, method, url, body) in [
        ("a name that exists", "POST", MAPS, named("")),
        (
            "an object that has changed",
            "PUT",
            one.as_str(),
            named("1"),
        ),
        ("another uid", "DELETE", one.as_str(), precondition),
        ("a new object with a revision", "POST", MAPS, named("1")),
    ] {
        let request = request(method, url, &body);
        all.send(&server, what, request, &[(uid, "UID")]).await;
    }
    insta::assert_snapshot!("conflicting_requests", all.0);
}

/// 410 and 504: revisions that the server no longer has, or does not have yet.
#[tokio::test]
async fn revisions() {
    let server = Server::new_over(Store::in_memory_for(Duration::ZERO)).await;
    // More than the store keeps of old changes.
    for i in 0..4 {
        let name = format!("large-{i}");
        let large = json!({"metadata": {"name": name}, "data": {"k": "x".repeat(1_000_000)}});
        server.ok("POST", MAPS, &large).await;
    }
    let mut all = Statuses::default();
    let token = base64_url(br#"{"rv":1,"start":"configmaps/default/a"}"#);
    for (what, query) in [
        ("a list of an old revision", "resourceVersion=1".to_owned()),
        ("a page of an old list", format!("continue={token}")),
    ] {
        let url = format!("{MAPS}?limit=1&{query}");
        let request = request("GET", &url, &Value::Null);
        all.send(&server, what, request, &[]).await;
    }
    let watch = format!("{MAPS}?watch=1&resourceVersion=1");
    let event = next(&mut server.watch(&watch).await).await;
    assert_eq!(event["type"], "ERROR");
    let status = &event["object"];
    let message = status["message"].as_str().unwrap();
    let (_, oldest) = message.split_once(" (").unwrap();
    let masked = [(oldest, "OLDEST)")];
    all.add("a watch of an old revision", status, &masked);

    // The server waits for the revision for some seconds.
    tokio::time::pause();
    let now = format!("current: {}", server.0.store().revision());
    let future = format!("{MAPS}?resourceVersion=999999&resourceVersionMatch=NotOlderThan");
    let future = request("GET", &future, &Value::Null);
    let masked = [(now.as_str(), "current: NOW")];
    all.send(&server, "a future revision", future, &masked)
        .await;
    insta::assert_snapshot!("revisions", all.0);
}

fn base64_url(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes)
}

/// 413 and 429: limits of one request, and of all requests of a user.
#[tokio::test(flavor = "multi_thread")]
async fn excessive_requests() {
    let server = Server::new().await;
    server
        .ok("POST", MAPS, &json!({"metadata": {"name": "a"}}))
        .await;
    let mut all = Statuses::default();
    let operation = json!({"op": "add", "path": "/data", "value": {}});
    let operations = Value::from(vec![operation; 10_001]).to_string();
    let kind = "application/json-patch+json";
    let patch = with_body(kind, "PATCH", operations.as_bytes());
    all.send(&server, "a JSON patch with many operations", patch, &[])
        .await;
    let growing = json!([
        {"op": "add", "path": "/data", "value": {"k0": "x".repeat(1_000_000)}},
        {"op": "copy", "from": "/data/k0", "path": "/data/k1"},
        {"op": "copy", "from": "/data/k0", "path": "/data/k2"},
        {"op": "copy", "from": "/data/k0", "path": "/data/k3"},
        {"op": "copy", "from": "/data/k0", "path": "/data/k4"},
    ]);
    let patch = with_body(kind, "PATCH", growing.to_string().as_bytes());
    all.send(&server, "a JSON patch that copies much", patch, &[])
        .await;
    let mut large = pod("large");
    large["spec"]["containers"][0]["args"] = json!(["x".repeat(3 << 20)]);
    let large = request("POST", PODS, &large);
    all.send(&server, "a large object", large, &[]).await;
    // One of them waits or runs, and the others exceed the limit for waiting bodies.
    let body = Bytes::from(vec![b' '; 33 << 20]);
    let requests = (0..4).map(|_| {
        let mut request = with_body("application/json", "POST", b"");
        request.body = body.clone();
        server.0.answer_offloaded(request)
    });
    let refused = futures::future::join_all(requests)
        .await
        .into_iter()
        .find_map(|answer| match answer {
            Answer::Body {
                code: 429, body, ..
            } => Some(body),
            _ => None,
        });
    let refused = serde_json::from_slice(&refused.expect("one is refused")).unwrap();
    all.add("large requests of one user", &refused, &[]);
    insta::assert_snapshot!("excessive_requests", all.0);
}
