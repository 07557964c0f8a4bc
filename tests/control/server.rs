//! An API in this process, called by an administrator.

use std::time::Duration;

use holdfast_control::api::auth::User;
use holdfast_control::api::token::Tokens;
use holdfast_control::api::watch::Line;
use holdfast_control::api::{Answer, Api, Query, Request};
use holdfast_control::pki::Pki;
use holdfast_control::store::Store;
use serde_json::{Value, json};
use tokio::sync::mpsc;

pub const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub const MERGE: &str = "application/merge-patch+json";

/// The JSON text of a request's body; nothing for `null`.
pub fn bytes(body: &Value) -> Vec<u8> {
    if body.is_null() {
        vec![]
    } else {
        body.to_string().into_bytes()
    }
}

/// An administrator's request with a JSON body, or without one for `null`; a PATCH is a merge patch.
pub fn request(method: &str, url: &str, body: &Value) -> Request {
    let kind = if method == "PATCH" {
        MERGE
    } else {
        "application/json"
    };
    Server::request(method, url, kind, bytes(body))
}

pub struct Server(pub Api);

pub struct Reply {
    pub code: u16,
    pub body: Value,
    pub warnings: Vec<String>,
}

impl Server {
    /// The API over a store, without preparation.
    pub fn over(store: Store) -> Server {
        Self::with_ranges(store, "10.96.0.0/16")
    }

    /// The same with these ranges of cluster IPs.
    pub fn with_ranges(store: Store, ranges: &str) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let (private, public) = Pki::open(dir.path()).unwrap().token_keys().unwrap();
        Server(Api::new(
            store,
            Tokens::new(&private, &public).unwrap(),
            ranges.parse().unwrap(),
        ))
    }

    pub async fn new() -> Server {
        Self::new_over(Store::in_memory()).await
    }

    /// Over an empty store, in which it creates two namespaces.
    pub async fn new_over(store: Store) -> Server {
        let server = Self::over(store);
        server.prepared().await
    }

    /// Creates two namespaces.
    pub async fn prepared(self) -> Server {
        let server = self;
        for namespace in ["default", "other"] {
            server
                .ok(
                    "POST",
                    "/api/v1/namespaces",
                    &json!({"metadata": {"name": namespace}}),
                )
                .await;
            server
                .ok(
                    "POST",
                    &format!("/api/v1/namespaces/{namespace}/serviceaccounts"),
                    &json!({"metadata": {"name": "default"}}),
                )
                .await;
        }
        server
    }

    pub fn request(method: &str, url: &str, content_type: &str, body: Vec<u8>) -> Request {
        let (path, query) = url.split_once('?').unwrap_or((url, ""));
        Request {
            method: method.into(),
            path: path.into(),
            query: Query::parse(query),
            content_type: content_type.into(),
            body: body.into(),
            user: User {
                name: "admin".into(),
                groups: vec!["system:masters".into(), "system:authenticated".into()],
                ..Default::default()
            },
            ..Request::default()
        }
    }

    pub async fn send(&self, request: Request) -> Reply {
        match self.0.answer(request).await {
            Answer::Body {
                code,
                body,
                warnings,
                ..
            } => Reply {
                code,
                body: serde_json::from_slice(&body).unwrap_or_default(),
                warnings,
            },
            Answer::Watch(_) => panic!("answered with a watch"),
        }
    }

    pub async fn call(&self, method: &str, url: &str, body: &Value) -> Reply {
        self.send(Self::request(method, url, "application/json", bytes(body)))
            .await
    }

    pub async fn ok(&self, method: &str, url: &str, body: &Value) -> Value {
        let reply = self.call(method, url, body).await;
        assert!(reply.code < 300, "{method} {url}: {}", reply.body);
        reply.body
    }

    /// The same as another user, in these groups and in `system:authenticated`; a PATCH is a merge patch.
    pub async fn call_as(
        &self,
        name: &str,
        groups: &[&str],
        method: &str,
        url: &str,
        body: &Value,
    ) -> Reply {
        let mut request = request(method, url, body);
        request.user = User {
            name: name.into(),
            groups: groups
                .iter()
                .chain(&["system:authenticated"])
                .map(|g| (*g).to_owned())
                .collect(),
            ..Default::default()
        };
        self.send(request).await
    }

    /// With the bootstrap roles and bindings of every cluster.
    pub async fn with_roles() -> Server {
        let server = Self::new().await;
        for (plural, object) in holdfast_control::api::rbac::bootstrap() {
            let url = format!("/apis/rbac.authorization.k8s.io/v1/{plural}");
            server.ok("POST", &url, &object).await;
        }
        server
    }

    pub async fn patch(&self, url: &str, kind: &str, patch: Value) -> Reply {
        self.send(Self::request(
            "PATCH",
            url,
            kind,
            patch.to_string().into_bytes(),
        ))
        .await
    }

    pub async fn watch(&self, url: &str) -> mpsc::Receiver<Line> {
        match self.0.answer(Self::request("GET", url, "", vec![])).await {
            Answer::Watch(lines) => lines,
            Answer::Body { body, .. } => panic!("no watch: {}", String::from_utf8_lossy(&body)),
        }
    }
}

pub async fn next(lines: &mut mpsc::Receiver<Line>) -> Value {
    let line = tokio::time::timeout(Duration::from_secs(30), lines.recv())
        .await
        .expect("an event in time")
        .expect("the watch goes on")
        .bytes();
    assert!(line.ends_with(b"\n"));
    serde_json::from_slice(&line).unwrap()
}

pub const MAPS: &str = "/api/v1/namespaces/default/configmaps";
pub const PODS: &str = "/api/v1/namespaces/default/pods";

pub fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}})
}
