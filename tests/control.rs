//! The API's manners: what is asked in which way, and what the answer is. In process, without TLS; the
//! end-to-end tests have kubectl in front.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use holdfast::control::api::auth::User;
use holdfast::control::api::token::Tokens;
use holdfast::control::api::{Answer, Api, Query, Request};
use holdfast::control::pki::Pki;
use holdfast::control::store::Store;
use serde_json::{Value, json};
use tokio::sync::mpsc;

const STRATEGIC: &str = "application/strategic-merge-patch+json";
const MERGE: &str = "application/merge-patch+json";

struct Server(Api);

struct Reply {
    code: u16,
    body: Value,
    warnings: Vec<String>,
}

impl Server {
    async fn new() -> Server {
        let dir = tempfile::tempdir().unwrap();
        let (private, public) = Pki::open(dir.path()).unwrap().token_keys().unwrap();
        let server = Server(Api::new(
            Store::in_memory(),
            Tokens::new(&private, &public).unwrap(),
            "10.96.0.0/16".parse().unwrap(),
        ));
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

    fn request(method: &str, url: &str, content_type: &str, body: Vec<u8>) -> Request {
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

    async fn send(&self, request: Request) -> Reply {
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

    async fn call(&self, method: &str, url: &str, body: &Value) -> Reply {
        let body = if body.is_null() {
            vec![]
        } else {
            body.to_string().into_bytes()
        };
        self.send(Self::request(method, url, "application/json", body))
            .await
    }

    async fn ok(&self, method: &str, url: &str, body: &Value) -> Value {
        let reply = self.call(method, url, body).await;
        assert!(reply.code < 300, "{method} {url}: {}", reply.body);
        reply.body
    }

    async fn patch(&self, url: &str, kind: &str, patch: Value) -> Reply {
        self.send(Self::request(
            "PATCH",
            url,
            kind,
            patch.to_string().into_bytes(),
        ))
        .await
    }

    async fn watch(&self, url: &str) -> mpsc::Receiver<holdfast::control::store::Bytes> {
        match self.0.answer(Self::request("GET", url, "", vec![])).await {
            Answer::Watch(lines) => lines,
            Answer::Body { body, .. } => panic!("no watch: {}", String::from_utf8_lossy(&body)),
        }
    }
}

async fn next(lines: &mut mpsc::Receiver<holdfast::control::store::Bytes>) -> Value {
    let line = tokio::time::timeout(Duration::from_secs(5), lines.recv())
        .await
        .expect("an event in time")
        .expect("the watch goes on");
    assert!(line.ends_with(b"\n"));
    serde_json::from_slice(&line).unwrap()
}

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";

fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}})
}

#[tokio::test]
async fn refusals_have_the_right_code_reason_and_words() {
    let server = Server::new().await;
    server
        .ok(
            "POST",
            MAPS,
            &json!({"metadata": {"name": "a"}, "immutable": true, "data": {"k": "v"}}),
        )
        .await;
    server.ok("POST", PODS, &pod("p")).await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let deployment = |labels: Value| json!({"metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": {"a": "1"}}, "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    let cases: Vec<(&str, String, Value, u16, &str, &str)> = vec![
        (
            "GET",
            format!("{MAPS}/nosuch"),
            Value::Null,
            404,
            "NotFound",
            "configmaps \"nosuch\" not found",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {"name": "a"}}),
            409,
            "AlreadyExists",
            "configmaps \"a\" already exists",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {}}),
            422,
            "Invalid",
            "name or generateName is required",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {"name": "A_b"}}),
            422,
            "Invalid",
            "RFC 1123 subdomain",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {"name": "b", "namespace": "other"}}),
            400,
            "BadRequest",
            "does not match the namespace sent on the request",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"kind": "Secret", "metadata": {"name": "b"}}),
            400,
            "BadRequest",
            "cannot be handled as a ConfigMap",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {"name": "b"}, "data": {"k": 1}}),
            400,
            "BadRequest",
            "cannot unmarshal number",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {"name": "b"}, "data": {"a/b": "1"}}),
            422,
            "Invalid",
            "data[a/b]",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {"name": "b", "resourceVersion": "1"}}),
            500,
            "",
            "resourceVersion should not be set",
        ),
        (
            "POST",
            format!("{MAPS}?fieldValidation=Strict"),
            json!({"metadata": {"name": "b"}, "dat": {}}),
            400,
            "BadRequest",
            "unknown field \"dat\"",
        ),
        (
            "POST",
            format!("{MAPS}?fieldValidation=Foo"),
            json!({"metadata": {"name": "b"}}),
            422,
            "Invalid",
            "supported values",
        ),
        (
            "POST",
            format!("{MAPS}?dryRun=Some"),
            json!({"metadata": {"name": "b"}}),
            422,
            "Invalid",
            "dryRun",
        ),
        (
            "POST",
            "/api/v1/namespaces/nosuch/configmaps".into(),
            json!({"metadata": {"name": "b"}}),
            404,
            "NotFound",
            "namespaces \"nosuch\" not found",
        ),
        (
            "POST",
            "/api/v1/configmaps".into(),
            json!({"metadata": {"name": "b"}}),
            405,
            "MethodNotAllowed",
            "does not allow this method",
        ),
        (
            "PUT",
            format!("{MAPS}/a"),
            json!({"metadata": {"name": "b"}}),
            400,
            "BadRequest",
            "does not match the name on the URL",
        ),
        (
            "PUT",
            format!("{MAPS}/a"),
            json!({"metadata": {"name": "a", "resourceVersion": "1"}}),
            409,
            "Conflict",
            "please apply your changes to the latest version",
        ),
        (
            "PUT",
            format!("{MAPS}/a"),
            json!({"metadata": {"name": "a"}, "data": {"k": "x"}, "immutable": true}),
            422,
            "Invalid",
            "immutable",
        ),
        (
            "PUT",
            format!("{MAPS}/zz"),
            json!({"metadata": {"name": "zz"}}),
            404,
            "NotFound",
            "not found",
        ),
        (
            "PUT",
            "/apis/coordination.k8s.io/v1/namespaces/default/leases/l".into(),
            json!({"metadata": {"name": "l"}}),
            201,
            "",
            "",
        ),
        (
            "PUT",
            "/apis/coordination.k8s.io/v1/namespaces/default/leases/l".into(),
            json!({"metadata": {"name": "l"}}),
            422,
            "Invalid",
            "must be specified for an update",
        ),
        (
            "DELETE",
            "/api/v1/namespaces/default".into(),
            Value::Null,
            403,
            "Forbidden",
            "may not be deleted",
        ),
        (
            "DELETE",
            "/api/v1/namespaces".into(),
            Value::Null,
            405,
            "MethodNotAllowed",
            "",
        ),
        (
            "DELETE",
            format!("{MAPS}/a"),
            json!({"preconditions": {"uid": "zz"}}),
            409,
            "Conflict",
            "UID in the precondition",
        ),
        (
            "DELETE",
            format!("{MAPS}/a"),
            json!({"propagationPolicy": "Foo"}),
            422,
            "Invalid",
            "propagationPolicy",
        ),
        (
            "GET",
            format!("{MAPS}?labelSelector=a%20b"),
            Value::Null,
            400,
            "BadRequest",
            "unable to parse requirement",
        ),
        (
            "GET",
            format!("{MAPS}?fieldSelector=data=x"),
            Value::Null,
            400,
            "BadRequest",
            "field label not supported: data",
        ),
        (
            "GET",
            format!("{MAPS}?resourceVersion=x"),
            Value::Null,
            400,
            "BadRequest",
            "invalid resource version",
        ),
        (
            "GET",
            format!("{MAPS}?resourceVersionMatch=Exact"),
            Value::Null,
            422,
            "Invalid",
            "resourceVersionMatch is forbidden unless",
        ),
        (
            "GET",
            format!("{MAPS}?watch=1&sendInitialEvents=true"),
            Value::Null,
            422,
            "Invalid",
            "NotOlderThan",
        ),
        (
            "GET",
            format!("{MAPS}?continue=nonsense"),
            Value::Null,
            400,
            "BadRequest",
            "continue key is not valid",
        ),
        (
            "GET",
            "/api/v1/widgets".into(),
            Value::Null,
            404,
            "NotFound",
            "could not find the requested resource",
        ),
        (
            "POST",
            format!("{PODS}/p/binding"),
            json!({"target": {}}),
            422,
            "Invalid",
            "target.name",
        ),
        (
            "POST",
            PODS.into(),
            json!({"metadata": {"name": "q"}, "spec": {"containers": []}}),
            422,
            "Invalid",
            "spec.containers: Required value",
        ),
        (
            "POST",
            PODS.into(),
            json!({"metadata": {"name": "q"}, "spec": {"serviceAccountName": "x", "containers": [{"name": "c", "image": "i"}]}}),
            403,
            "Forbidden",
            "serviceaccount \"x\" not found",
        ),
        (
            "PUT",
            format!("{PODS}/p"),
            json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i:2"}], "hostNetwork": true}}),
            422,
            "Invalid",
            "pod updates may not change fields",
        ),
        (
            "POST",
            deployments.into(),
            deployment(json!({"a": "2"})),
            422,
            "Invalid",
            "`selector` does not match template `labels`",
        ),
    ];
    for (method, url, body, code, reason, words) in cases {
        let reply = server.call(method, &url, &body).await;
        let message = reply.body["message"].as_str().unwrap_or_default();
        assert_eq!(reply.code, code, "{method} {url} {body}: {}", reply.body);
        assert_eq!(
            reply.body["reason"].as_str().unwrap_or_default(),
            reason,
            "{method} {url}"
        );
        assert!(
            message.contains(words),
            "{method} {url}: {message:?} lacks {words:?}"
        );
        if code >= 400 {
            assert_eq!(
                (reply.body["kind"].as_str(), reply.body["code"].as_u64()),
                (Some("Status"), Some(u64::from(code)))
            );
        }
    }
    let broken = server
        .send(Server::request(
            "POST",
            MAPS,
            "application/json",
            b"{".to_vec(),
        ))
        .await;
    assert_eq!(broken.code, 400);
    let media = server
        .send(Server::request("POST", MAPS, "text/csv", b"a".to_vec()))
        .await;
    assert_eq!(
        (media.code, media.body["reason"].as_str()),
        (415, Some("UnsupportedMediaType"))
    );
    let mut accept = Server::request("GET", MAPS, "", vec![]);
    accept.accept = "application/xml".into();
    assert_eq!(server.send(accept).await.code, 406);
    let apply = server
        .patch(
            &format!("{MAPS}/a"),
            "application/apply-patch+yaml",
            json!({}),
        )
        .await;
    assert_eq!(apply.code, 415);
}

#[tokio::test]
async fn writes_keep_what_is_the_servers() {
    let server = Server::new().await;
    let made = server
        .ok(
            "POST",
            MAPS,
            &json!({"metadata": {"generateName": "g-", "uid": "mine", "creationTimestamp": "2001-01-01T00:00:00Z"}, "data": {"k": "1"}}),
        )
        .await;
    let name = made["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("g-") && name.len() == 7);
    assert_ne!(made["metadata"]["uid"], "mine");
    let url = format!("{MAPS}/{name}");
    let same = server.patch(&url, MERGE, json!({"data": {"k": "1"}})).await;
    assert_eq!(
        same.body["metadata"]["resourceVersion"], made["metadata"]["resourceVersion"],
        "nothing changed, nothing is written"
    );
    let dry = server
        .patch(
            &format!("{url}?dryRun=All"),
            MERGE,
            json!({"data": {"k": "2"}}),
        )
        .await;
    assert_eq!(dry.body["data"]["k"], "2");
    assert_eq!(server.ok("GET", &url, &Value::Null).await["data"]["k"], "1");
    let warned = server
        .patch(
            &format!("{url}?fieldValidation=Warn"),
            MERGE,
            json!({"data": {"k": "2"}}),
        )
        .await;
    assert_eq!((warned.code, warned.warnings.len()), (200, 0));
    let unknown = server
        .call(
            "POST",
            MAPS,
            &json!({"metadata": {"name": "w"}, "nosuch": 1}),
        )
        .await;
    assert_eq!(
        (unknown.code, unknown.warnings),
        (201, vec!["unknown field \"nosuch\"".to_owned()])
    );
    assert!(unknown.body.get("nosuch").is_none());
    let conflict = server
        .patch(&url, MERGE, json!({"metadata": {"uid": "zz"}}))
        .await;
    assert_eq!(conflict.code, 409);

    server.ok("POST", PODS, &pod("p")).await;
    let pod_url = format!("{PODS}/p");
    let stored = server.ok("GET", &pod_url, &Value::Null).await;
    assert_eq!(stored["spec"]["tolerations"].as_array().unwrap().len(), 2);
    assert_eq!(
        (
            stored["status"]["phase"].as_str(),
            stored["status"]["qosClass"].as_str(),
            stored["metadata"]["generation"].as_i64()
        ),
        (Some("Pending"), Some("BestEffort"), Some(1))
    );
    assert!(
        stored["spec"]["volumes"][0]["name"]
            .as_str()
            .unwrap()
            .starts_with("kube-api-access-")
    );
    server
        .patch(&pod_url, STRATEGIC, json!({"status": {"phase": "Running"}}))
        .await;
    assert_eq!(
        server.ok("GET", &pod_url, &Value::Null).await["status"]["phase"],
        "Pending",
        "status only through /status"
    );
    server
        .patch(
            &format!("{pod_url}/status"),
            STRATEGIC,
            json!({"metadata": {"labels": {"x": "y"}}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}}),
        )
        .await;
    let after = server.ok("GET", &pod_url, &Value::Null).await;
    assert_eq!(
        (
            after["status"]["phase"].as_str(),
            after["spec"].get("nodeName"),
            after["metadata"].get("labels")
        ),
        (Some("Running"), None, None)
    );
    server
        .patch(
            &pod_url,
            STRATEGIC,
            json!({"spec": {"containers": [{"name": "c", "image": "i:2"}]}}),
        )
        .await;
    assert_eq!(
        server.ok("GET", &pod_url, &Value::Null).await["metadata"]["generation"],
        2
    );

    server
        .ok(
            "POST",
            &format!("{pod_url}/binding"),
            &json!({"target": {"kind": "Node", "name": "n1"}}),
        )
        .await;
    let again = server
        .call(
            "POST",
            &format!("{pod_url}/binding"),
            &json!({"target": {"kind": "Node", "name": "n2"}}),
        )
        .await;
    assert_eq!(again.code, 409);
    assert!(
        again.body["message"]
            .as_str()
            .unwrap()
            .contains("already assigned to node \"n1\"")
    );

    let secret = server
        .ok(
            "POST",
            "/api/v1/namespaces/default/secrets",
            &json!({"metadata": {"name": "s"}, "stringData": {"p": "q"}}),
        )
        .await;
    assert_eq!(
        (
            secret["type"].as_str(),
            secret["data"]["p"].as_str(),
            secret.get("stringData")
        ),
        (Some("Opaque"), Some("cQ=="), None)
    );
    let service =
        |name: &str| json!({"metadata": {"name": name}, "spec": {"ports": [{"port": 80}]}});
    let services = "/api/v1/namespaces/default/services";
    let (a, b) = tokio::join!(
        async { server.ok("POST", services, &service("a")).await },
        async { server.ok("POST", services, &service("b")).await }
    );
    assert_ne!(a["spec"]["clusterIP"], b["spec"]["clusterIP"]);
}

#[tokio::test]
async fn deletion_waits_for_grace_and_finalizers() {
    let server = Server::new().await;
    let gone = server
        .ok("POST", MAPS, &json!({"metadata": {"name": "a"}}))
        .await;
    let answer = server
        .ok(
            "DELETE",
            &format!("{MAPS}/a"),
            &json!({"propagationPolicy": "Background"}),
        )
        .await;
    assert_eq!(
        (answer["status"].as_str(), &answer["details"]["uid"]),
        (Some("Success"), &gone["metadata"]["uid"])
    );
    server
        .ok(
            "POST",
            MAPS,
            &json!({"metadata": {"name": "f", "finalizers": ["x.io/y"]}}),
        )
        .await;
    let marked = server
        .ok("DELETE", &format!("{MAPS}/f"), &Value::Null)
        .await;
    assert!(marked["metadata"]["deletionTimestamp"].is_string());
    let more = server
        .patch(
            &format!("{MAPS}/f"),
            MERGE,
            json!({"metadata": {"finalizers": ["x.io/y", "x.io/z"]}}),
        )
        .await;
    assert_eq!(
        more.code, 422,
        "no finalizer is added to what is being deleted"
    );
    server
        .patch(
            &format!("{MAPS}/f"),
            MERGE,
            json!({"metadata": {"finalizers": null}}),
        )
        .await;
    assert_eq!(
        server
            .call("GET", &format!("{MAPS}/f"), &Value::Null)
            .await
            .code,
        404
    );

    server.ok("POST", PODS, &pod("unbound")).await;
    server
        .ok("DELETE", &format!("{PODS}/unbound"), &Value::Null)
        .await;
    assert_eq!(
        server
            .call("GET", &format!("{PODS}/unbound"), &Value::Null)
            .await
            .code,
        404,
        "nobody waits for a pod without a node"
    );
    server.ok("POST", PODS, &pod("p")).await;
    server
        .ok(
            "POST",
            &format!("{PODS}/p/binding"),
            &json!({"target": {"kind": "Node", "name": "n"}}),
        )
        .await;
    let grace = |o: &Value| o["metadata"]["deletionGracePeriodSeconds"].as_i64();
    let first = server
        .ok(
            "DELETE",
            &format!("{PODS}/p"),
            &json!({"gracePeriodSeconds": 20}),
        )
        .await;
    assert_eq!(
        (grace(&first), first["metadata"]["generation"].as_i64()),
        (Some(20), Some(2))
    );
    let longer = server
        .ok(
            "DELETE",
            &format!("{PODS}/p"),
            &json!({"gracePeriodSeconds": 60}),
        )
        .await;
    assert_eq!(grace(&longer), Some(20), "grace only shrinks");
    let shorter = server
        .ok(
            "DELETE",
            &format!("{PODS}/p"),
            &json!({"gracePeriodSeconds": 5}),
        )
        .await;
    assert_eq!(grace(&shorter), Some(5));
    let uid = shorter["metadata"]["uid"].clone();
    server
        .ok(
            "DELETE",
            &format!("{PODS}/p"),
            &json!({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}),
        )
        .await;
    assert_eq!(
        server
            .call("GET", &format!("{PODS}/p"), &Value::Null)
            .await
            .code,
        404
    );
    for name in ["x", "y"] {
        server
            .ok(
                "POST",
                MAPS,
                &json!({"metadata": {"name": name, "labels": {"l": name}}}),
            )
            .await;
    }
    let list = server
        .ok("DELETE", &format!("{MAPS}?labelSelector=l=x"), &Value::Null)
        .await;
    assert_eq!(
        (
            list["kind"].as_str(),
            list["items"].as_array().unwrap().len()
        ),
        (Some("ConfigMapList"), 1)
    );
    assert_eq!(
        server.ok("GET", MAPS, &Value::Null).await["items"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

#[tokio::test]
async fn lists_page_from_one_snapshot() {
    let server = Server::new().await;
    for i in 0..5 {
        server
            .ok(
                "POST",
                MAPS,
                &json!({"metadata": {"name": format!("m{i}")}}),
            )
            .await;
    }
    let names = |list: &Value| {
        list["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|i| i["metadata"]["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let first = server
        .ok("GET", &format!("{MAPS}?limit=2"), &Value::Null)
        .await;
    assert_eq!(
        (
            names(&first),
            first["metadata"]["remainingItemCount"].as_i64()
        ),
        (vec!["m0".into(), "m1".into()], Some(3))
    );
    server
        .ok("DELETE", &format!("{MAPS}/m2"), &Value::Null)
        .await;
    server
        .ok("POST", MAPS, &json!({"metadata": {"name": "m9"}}))
        .await;
    let token = first["metadata"]["continue"].as_str().unwrap();
    let rest = server
        .ok("GET", &format!("{MAPS}?continue={token}"), &Value::Null)
        .await;
    assert_eq!(
        names(&rest),
        ["m2", "m3", "m4"],
        "the second page is from the same moment"
    );
    assert_eq!(
        rest["metadata"]["resourceVersion"],
        first["metadata"]["resourceVersion"]
    );
    let any = server
        .ok(
            "GET",
            &format!("{MAPS}?limit=1&resourceVersion=0"),
            &Value::Null,
        )
        .await;
    assert_eq!(
        names(&any).len(),
        5,
        "limit does not count at resourceVersion=0"
    );
    let mut table = Server::request("GET", &format!("{MAPS}?limit=500"), "", vec![]);
    table.accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json".into();
    let table = server.send(table).await.body;
    assert_eq!(
        (
            table["kind"].as_str(),
            table["columnDefinitions"][1]["name"].as_str(),
            table["rows"][0]["cells"][0].as_str()
        ),
        (Some("Table"), Some("Data"), Some("m0"))
    );
    let future = server
        .call(
            "GET",
            &format!("{MAPS}?resourceVersion=999999&resourceVersionMatch=NotOlderThan"),
            &Value::Null,
        )
        .await;
    assert_eq!(
        (future.code, future.body["reason"].as_str()),
        (504, Some("Timeout"))
    );
}

#[tokio::test]
async fn watches_see_every_change_as_their_selector_does() {
    let server = Server::new().await;
    server
        .ok(
            "POST",
            MAPS,
            &json!({"metadata": {"name": "a", "labels": {"l": "1"}}}),
        )
        .await;
    let mut initial = server
        .watch(&format!("{MAPS}?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&labelSelector=l=1"))
        .await;
    let added = next(&mut initial).await;
    assert_eq!(
        (
            added["type"].as_str(),
            added["object"]["metadata"]["name"].as_str()
        ),
        (Some("ADDED"), Some("a"))
    );
    let bookmark = next(&mut initial).await;
    assert_eq!(
        (
            bookmark["type"].as_str(),
            bookmark["object"]["kind"].as_str(),
            bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"].as_str()
        ),
        (Some("BOOKMARK"), Some("ConfigMap"), Some("true"))
    );
    let since = bookmark["object"]["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned();

    server
        .patch(&format!("{MAPS}/a"), MERGE, json!({"data": {"x": "1"}}))
        .await;
    server
        .patch(
            &format!("{MAPS}/a"),
            MERGE,
            json!({"metadata": {"labels": {"l": "2"}}}),
        )
        .await;
    server
        .patch(
            &format!("{MAPS}/a"),
            MERGE,
            json!({"metadata": {"labels": {"l": "1"}}}),
        )
        .await;
    server
        .ok("POST", MAPS, &json!({"metadata": {"name": "foreign"}}))
        .await;
    server
        .ok("DELETE", &format!("{MAPS}/a"), &Value::Null)
        .await;
    let mut later = server
        .watch(&format!(
            "{MAPS}?watch=1&resourceVersion={since}&labelSelector=l=1"
        ))
        .await;
    for lines in [&mut initial, &mut later] {
        let mut last = 0;
        for expected in ["MODIFIED", "DELETED", "ADDED", "DELETED"] {
            let event = next(lines).await;
            assert_eq!(event["type"], expected, "{event}");
            let revision: u64 = event["object"]["metadata"]["resourceVersion"]
                .as_str()
                .unwrap()
                .parse()
                .unwrap();
            assert!(revision > last, "revisions grow, a deletion's too");
            last = revision;
        }
    }
    let mut everything = server.watch("/api/v1/configmaps?watch=1").await;
    assert_eq!(
        next(&mut everything).await["object"]["metadata"]["name"],
        "foreign"
    );
    let mut short = server.watch(&format!("{MAPS}?watch=1&resourceVersion={since}&fieldSelector=metadata.name=none&timeoutSeconds=1")).await;
    let ended = tokio::time::timeout(Duration::from_secs(5), short.recv())
        .await
        .expect("it ends in time");
    assert!(ended.is_none(), "without an event");
    for i in 0..9000 {
        server
            .ok(
                "POST",
                MAPS,
                &json!({"metadata": {"name": format!("n{i}")}}),
            )
            .await;
    }
    let mut old = server
        .watch(&format!("{MAPS}?watch=1&resourceVersion={since}"))
        .await;
    let error = next(&mut old).await;
    assert_eq!(
        (
            error["type"].as_str(),
            error["object"]["code"].as_u64(),
            error["object"]["reason"].as_str()
        ),
        (Some("ERROR"), Some(410), Some("Expired"))
    );
}

#[tokio::test]
async fn tokens_name_their_account_and_die_with_it() {
    let server = Server::new().await;
    server.ok("POST", PODS, &pod("p")).await;
    let url = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let bound =
        json!({"spec": {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "p"}}});
    let token = server.ok("POST", url, &bound).await["status"]["token"]
        .as_str()
        .unwrap()
        .to_owned();
    let user = server
        .0
        .authenticate(None, Some(&format!("Bearer {token}")))
        .expect("a good token");
    assert_eq!(user.name, "system:serviceaccount:default:default");
    let may = |user: &User, path: &str| {
        let mut request = Server::request("GET", path, "", vec![]);
        request.user = user.clone();
        request
    };
    assert_eq!(
        server.send(may(&user, PODS)).await.code,
        403,
        "an account may not read pods"
    );
    assert_eq!(server.send(may(&user, "/apis")).await.code, 200);
    let nobody = server.0.authenticate(None, None).expect("anonymous");
    assert_eq!(server.send(may(&nobody, "/readyz")).await.code, 200);
    assert_eq!(server.send(may(&nobody, "/apis")).await.code, 403);
    assert_eq!(
        server
            .call("POST", url, &json!({"spec": {"expirationSeconds": 5}}))
            .await
            .code,
        422
    );
    server
        .ok("DELETE", &format!("{PODS}/p"), &Value::Null)
        .await;
    let refused = server
        .0
        .authenticate(None, Some(&format!("Bearer {token}")))
        .expect_err("the pod is gone");
    assert_eq!(refused.code, 401);
    assert!(
        server
            .0
            .authenticate(None, Some("Bearer nonsense"))
            .is_err()
    );
}

#[tokio::test]
async fn discovery_tells_what_there_is_in_both_forms() {
    let server = Server::new().await;
    let list = server.ok("GET", "/apis/apps/v1", &Value::Null).await;
    let names: Vec<&str> = list["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "deployments",
            "deployments/status",
            "deployments/scale",
            "replicasets",
            "replicasets/status",
            "replicasets/scale"
        ]
    );
    let mut aggregated = Server::request("GET", "/apis", "", vec![]);
    aggregated.accept =
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
            .into();
    let aggregated = server.send(aggregated).await.body;
    assert_eq!(
        (
            aggregated["kind"].as_str(),
            aggregated["items"][0]["metadata"]["name"].as_str()
        ),
        (Some("APIGroupDiscoveryList"), Some("apps"))
    );
    let index = server.ok("GET", "/openapi/v3", &Value::Null).await;
    let path = index["paths"]["apis/apps/v1"]["serverRelativeURL"]
        .as_str()
        .unwrap()
        .to_owned();
    let document = server.ok("GET", &path, &Value::Null).await;
    assert!(
        document["paths"]
            .as_object()
            .unwrap()
            .values()
            .any(|p| p["patch"]["x-kubernetes-group-version-kind"]["kind"] == "Deployment")
    );
    for path in ["/api", "/apis", "/apis/apps", "/api/v1", "/version/", "/"] {
        server.ok("GET", path, &Value::Null).await;
    }
}

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

#[tokio::test]
async fn roles_give_what_they_say_and_nobody_gives_more_than_they_have() {
    let server = Server::new().await;
    for (plural, object) in holdfast::control::api::rbac::bootstrap() {
        server
            .ok(
                "POST",
                &format!("/apis/rbac.authorization.k8s.io/v1/{plural}"),
                &object,
            )
            .await;
    }
    let alice = |method: &str, url: &str, body: &Value| {
        let body = if body.is_null() {
            vec![]
        } else {
            body.to_string().into_bytes()
        };
        let mut request = Server::request(method, url, "application/json", body);
        request.user = User {
            name: "alice".into(),
            groups: vec!["devs".into(), "system:authenticated".into()],
            ..Default::default()
        };
        server.send(request)
    };
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let role = |name: &str, rules: Value| json!({"metadata": {"name": name}, "rules": rules});
    let binding = |kind: &str, role: &str, subject: Value| json!({"metadata": {"name": role}, "roleRef": {"kind": kind, "name": role}, "subjects": [subject]});
    let group = json!({"kind": "Group", "name": "devs"});
    assert_eq!(
        alice("GET", "/api/v1/namespaces/default/pods", &Value::Null)
            .await
            .code,
        403
    );
    server
        .ok(
            "POST",
            &format!("{rbac}/namespaces/default/rolebindings"),
            &binding("ClusterRole", "view", group.clone()),
        )
        .await;
    // What `view` gathers, in this namespace alone.
    for (method, url, code) in [
        ("GET", "/api/v1/namespaces/default/pods", 200),
        ("GET", "/apis/apps/v1/namespaces/default/deployments", 200),
        ("GET", "/api/v1/namespaces/default/secrets", 403),
        ("GET", "/api/v1/namespaces/other/pods", 403),
        ("GET", "/api/v1/pods", 403),
        ("DELETE", "/api/v1/namespaces/default/pods/p", 403),
        ("GET", "/metrics", 403),
    ] {
        assert_eq!(
            alice(method, url, &Value::Null).await.code,
            code,
            "{method} {url}"
        );
    }
    // She may write roles, but not give what she has not.
    let writer = role(
        "writer",
        json!([{"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"], "verbs": ["create", "update", "patch"]}]),
    );
    server
        .ok("POST", &format!("{rbac}/namespaces/default/roles"), &writer)
        .await;
    server
        .ok(
            "POST",
            &format!("{rbac}/namespaces/default/rolebindings"),
            &binding("Role", "writer", group),
        )
        .await;
    let roles = format!("{rbac}/namespaces/default/roles");
    let secrets = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]);
    let refused = alice("POST", &roles, &role("thief", secrets.clone())).await;
    assert_eq!(refused.code, 403);
    let why = refused.body["message"].as_str().unwrap();
    assert!(
        why.contains("is attempting to grant RBAC permissions not currently held")
            && why.contains("Resources:[\"secrets\"]"),
        "{why}"
    );
    assert_eq!(
        alice(
            "POST",
            &roles,
            &role(
                "reader",
                json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}])
            )
        )
        .await
        .code,
        201
    );
    server.ok("POST", &roles, &role("keeper", secrets)).await;
    let own = json!({"kind": "User", "name": "alice"});
    let bindings = format!("{rbac}/namespaces/default/rolebindings");
    assert_eq!(
        alice("POST", &bindings, &binding("Role", "keeper", own.clone()))
            .await
            .code,
        403
    );
    assert_eq!(
        alice(
            "POST",
            &bindings,
            &binding("ClusterRole", "cluster-admin", own.clone())
        )
        .await
        .code,
        403
    );
    assert_eq!(
        alice("POST", &bindings, &binding("Role", "reader", own))
            .await
            .code,
        201
    );
    // What was given is taken back at once; what a binding binds does not change.
    let mut other = binding("ClusterRole", "edit", json!({"kind": "User", "name": "x"}));
    other["metadata"]["name"] = json!("view");
    let changed = server
        .call("PUT", &format!("{bindings}/view"), &other)
        .await;
    assert_eq!(changed.code, 422, "{}", changed.body);
    let review = json!({"spec": {"user": "alice", "groups": ["devs"], "resourceAttributes": {"verb": "list", "resource": "pods", "namespace": "default"}}});
    let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    assert_eq!(
        server.ok("POST", reviews, &review).await["status"]["allowed"],
        true
    );
    server
        .ok("DELETE", &format!("{bindings}/view"), &Value::Null)
        .await;
    assert_eq!(
        server.ok("POST", reviews, &review).await["status"]["allowed"],
        false
    );
    assert_eq!(
        alice("GET", "/api/v1/namespaces/default/pods", &Value::Null)
            .await
            .code,
        403
    );
}

#[tokio::test]
async fn a_node_sees_what_its_pods_refer_to_and_nothing_else() {
    let server = Server::new().await;
    for name in ["mine", "other", "theirs"] {
        server
            .ok(
                "POST",
                "/api/v1/namespaces/default/secrets",
                &json!({"metadata": {"name": name}}),
            )
            .await;
        server
            .ok(
                "POST",
                "/api/v1/namespaces/default/serviceaccounts",
                &json!({"metadata": {"name": name}}),
            )
            .await;
        let claim = json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
        server
            .ok(
                "POST",
                "/api/v1/namespaces/default/persistentvolumeclaims",
                &claim,
            )
            .await;
        let volume = json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Mi"}, "claimRef": {"namespace": "default", "name": name},
            "csi": {"driver": "d", "volumeHandle": name, "nodePublishSecretRef": {"namespace": "other", "name": format!("of-{name}")}}}});
        server
            .ok("POST", "/api/v1/persistentvolumes", &volume)
            .await;
        server
            .ok(
                "POST",
                "/api/v1/namespaces/other/secrets",
                &json!({"metadata": {"name": format!("of-{name}")}}),
            )
            .await;
    }
    for (name, node) in [("mine", "n1"), ("theirs", "n2")] {
        let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": node, "serviceAccountName": name, "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "a", "secret": {"secretName": name}}, {"name": "b", "persistentVolumeClaim": {"claimName": name}}]}});
        server
            .ok("POST", "/api/v1/namespaces/default/pods", &pod)
            .await;
    }
    let node = |method: &str, url: &str, body: Value| {
        let body = if body.is_null() {
            vec![]
        } else {
            body.to_string().into_bytes()
        };
        let mut request = Server::request(
            method,
            url,
            if method == "PATCH" {
                MERGE
            } else {
                "application/json"
            },
            body,
        );
        request.user = User {
            name: "system:node:n1".into(),
            groups: vec!["system:nodes".into(), "system:authenticated".into()],
            ..Default::default()
        };
        server.send(request)
    };
    let bound = |pod: &str| json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod}}});
    for (name, code) in [("mine", 200), ("theirs", 403), ("other", 403)] {
        for path in [
            format!("namespaces/default/secrets/{name}"),
            format!("namespaces/other/secrets/of-{name}"),
            format!("namespaces/default/serviceaccounts/{name}"),
            format!("namespaces/default/persistentvolumeclaims/{name}"),
            format!("persistentvolumes/{name}"),
        ] {
            assert_eq!(
                node("GET", &format!("/api/v1/{path}"), Value::Null)
                    .await
                    .code,
                code,
                "{path}"
            );
        }
        let token = node(
            "POST",
            &format!("/api/v1/namespaces/default/serviceaccounts/{name}/token"),
            bound(name),
        )
        .await;
        assert_eq!(token.code, if code == 200 { 201 } else { code }, "{name}");
    }
    // What it writes is its own (NodeRestriction).
    let unbound = node(
        "POST",
        "/api/v1/namespaces/default/serviceaccounts/mine/token",
        json!({"spec": {}}),
    )
    .await;
    assert!(
        unbound.code == 403 && unbound.body.to_string().contains("not bound to a pod"),
        "{}",
        unbound.body
    );
    let label = |key: &str| json!({"metadata": {"labels": {key: "x"}}});
    assert_eq!(
        node("POST", "/api/v1/nodes", json!({"metadata": {"name": "n1"}}))
            .await
            .code,
        201
    );
    assert_eq!(
        node("POST", "/api/v1/nodes", json!({"metadata": {"name": "n2"}}))
            .await
            .code,
        403
    );
    assert_eq!(
        node("PATCH", "/api/v1/nodes/n1", label("pool")).await.code,
        200
    );
    assert_eq!(
        node(
            "PATCH",
            "/api/v1/nodes/n1",
            label("node-restriction.kubernetes.io/pool")
        )
        .await
        .code,
        403
    );
    assert_eq!(
        node(
            "PATCH",
            "/api/v1/nodes/n1",
            json!({"spec": {"taints": [{"key": "t", "effect": "NoSchedule"}]}})
        )
        .await
        .code,
        403
    );
    assert_eq!(
        node(
            "POST",
            "/api/v1/namespaces/default/pods",
            json!({"metadata": {"name": "own"}, "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}})
        )
        .await
        .code,
        403,
        "only mirrors"
    );
    for (method, url, code) in [
        (
            "GET",
            "/api/v1/namespaces/default/secrets?fieldSelector=metadata.name%3Dmine",
            200,
        ),
        ("GET", "/api/v1/namespaces/default/secrets", 403),
        ("GET", "/api/v1/secrets", 403),
        ("GET", "/api/v1/nodes", 200),
        ("PATCH", "/api/v1/namespaces/default/pods/mine/status", 200),
        (
            "PATCH",
            "/api/v1/namespaces/default/pods/theirs/status",
            403,
        ),
        ("DELETE", "/api/v1/namespaces/default/pods/theirs", 403),
        ("DELETE", "/api/v1/namespaces/default/pods/nobody", 404),
    ] {
        let body = if method == "PATCH" {
            json!({"status": {"reason": "x"}})
        } else {
            Value::Null
        };
        assert_eq!(node(method, url, body).await.code, code, "{method} {url}");
    }
    // With its last pod the node loses sight of what the pod referred to.
    server
        .ok(
            "DELETE",
            "/api/v1/namespaces/default/pods/mine?gracePeriodSeconds=0",
            &Value::Null,
        )
        .await;
    assert_eq!(
        node(
            "GET",
            "/api/v1/namespaces/default/secrets/mine",
            Value::Null
        )
        .await
        .code,
        403
    );
}
