//! Writes and deletions.

use serde_json::{Value, json};

use crate::server::{MAPS, MERGE, PODS, STRATEGIC, Server, bytes, pod};

/// `kubectl patch` names no fieldValidation; the response warns of dropped fields.
#[tokio::test]
async fn a_patch_with_an_unknown_field_returns_a_warning() {
    let server = Server::new().await;
    let map = json!({"metadata": {"name": "warned"}});
    server.ok("POST", MAPS, &map).await;
    let url = format!("{MAPS}/warned");
    let dropped = server.patch(&url, MERGE, json!({"nosuch": 1})).await;
    assert_eq!(
        (dropped.code, dropped.warnings),
        (200, vec!["unknown field \"nosuch\"".to_owned()])
    );
}

#[tokio::test]
async fn writes_keep_the_servers_fields() {
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
        "a patch without a change writes nothing"
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
        "only /status changes the status"
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

/// A dry run returns the same response as the write and stores nothing, through every path.
#[tokio::test]
async fn a_dry_run_stores_nothing() {
    let server = Server::new().await;
    server.ok("POST", PODS, &pod("p")).await;
    let mut bound = pod("bound");
    bound["spec"]["nodeName"] = json!("n");
    bound["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "2"}});
    server.ok("POST", PODS, &bound).await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": {"a": "1"}},
        "template": {"metadata": {"labels": {"a": "1"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    server.ok("POST", deployments, &deployment).await;
    let namespace = "/api/v1/namespaces/other";
    let map = json!({"metadata": {"name": "m"}});
    server.ok("POST", MAPS, &map).await;
    let before = server.0.store().revision();
    let debug = json!({"spec": {"ephemeralContainers": [{"name": "e", "image": "i"}]}});
    let size =
        json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}});
    let eviction = json!({"metadata": {"name": "bound"}});
    for (method, url, body) in [
        (
            "POST",
            MAPS.to_owned(),
            json!({"metadata": {"name": "new"}}),
        ),
        (
            "PUT",
            format!("{MAPS}/m"),
            json!({"metadata": {"name": "m"}, "data": {"a": "b"}}),
        ),
        ("PATCH", format!("{MAPS}/m"), json!({"data": {"a": "b"}})),
        ("DELETE", format!("{MAPS}/m"), Value::Null),
        ("DELETE", MAPS.to_owned(), Value::Null),
        ("DELETE", namespace.to_owned(), Value::Null),
        (
            "PUT",
            format!("{namespace}/finalize"),
            json!({"metadata": {"name": "other"}, "spec": {"finalizers": ["a/b"]}}),
        ),
        (
            "POST",
            format!("{PODS}/p/binding"),
            json!({"target": {"name": "n"}}),
        ),
        ("POST", format!("{PODS}/bound/eviction"), eviction),
        (
            "PATCH",
            format!("{PODS}/bound/status"),
            json!({"status": {"phase": "Running"}}),
        ),
        ("PATCH", format!("{PODS}/bound/ephemeralcontainers"), debug),
        ("PATCH", format!("{PODS}/bound/resize"), size),
        (
            "PATCH",
            format!("{deployments}/d/scale"),
            json!({"spec": {"replicas": 5}}),
        ),
        (
            "PATCH",
            format!("{deployments}/d/status"),
            json!({"status": {"replicas": 5}}),
        ),
        (
            "POST",
            "/api/v1/namespaces/default/serviceaccounts/default/token".to_owned(),
            json!({}),
        ),
    ] {
        let kind = if method == "PATCH" {
            STRATEGIC
        } else {
            "application/json"
        };
        let bytes = bytes(&body);
        let dry = Server::request(method, &format!("{url}?dryRun=All"), kind, bytes.clone());
        let dry = server.send(dry).await;
        assert!(dry.code < 300, "{method} {url}: {}", dry.body);
        assert_eq!(
            server.0.store().revision(),
            before,
            "{method} {url} stored something"
        );
        let bad = Server::request(method, &format!("{url}?dryRun=Some"), kind, bytes);
        assert_eq!(server.send(bad).await.code, 422, "{method} {url}");
    }
}

/// An eviction's dry run may be in its body, and the name in a body must match the path.
#[tokio::test]
async fn an_eviction_checks_its_name_and_dry_run() {
    let server = Server::new().await;
    for name in ["p", "bound"] {
        server.ok("POST", PODS, &pod(name)).await;
    }
    let before = server.0.store().revision();
    let eviction = json!({"metadata": {"name": "bound"}});
    let mut dry = eviction.clone();
    dry["deleteOptions"] = json!({"dryRun": ["All"]});
    let url = format!("{PODS}/bound/eviction");
    server.ok("POST", &url, &dry).await;
    assert_eq!(server.0.store().revision(), before);
    let other = json!({"metadata": {"name": "other"}});
    for sub in ["binding", "eviction"] {
        let reply = server
            .call("POST", &format!("{PODS}/p/{sub}"), &other)
            .await;
        assert_eq!(reply.code, 400, "{sub}: {}", reply.body);
    }
    server.ok("POST", &url, &eviction).await;
    assert!(server.0.store().revision() > before);
}

#[tokio::test]
async fn patches_cannot_rename_or_use_an_old_version() {
    let server = Server::new().await;
    let map = json!({"metadata": {"name": "a"}, "data": {"k": "1"}});
    let old = server.ok("POST", MAPS, &map).await;
    let url = format!("{MAPS}/a");
    let renamed = server
        .patch(&url, MERGE, json!({"metadata": {"name": "b"}}))
        .await;
    assert_eq!(renamed.code, 400, "{}", renamed.body);
    server.patch(&url, MERGE, json!({"data": {"k": "2"}})).await;
    let version = old["metadata"]["resourceVersion"].clone();
    let operations = |version: &Value| {
        json!([{"op": "replace", "path": "/metadata/resourceVersion", "value": version},
            {"op": "replace", "path": "/data/k", "value": "3"}])
    };
    let kind = "application/json-patch+json";
    let late = server.patch(&url, kind, operations(&version)).await;
    assert_eq!(late.code, 409, "the patch names an old version");
    let now = server.ok("GET", &url, &Value::Null).await["metadata"]["resourceVersion"].clone();
    let fine = server.patch(&url, kind, operations(&now)).await;
    assert_eq!((fine.code, &fine.body["data"]["k"]), (200, &json!("3")));
}

/// Values that typed clients cannot decode are never stored.
#[tokio::test]
async fn nulls_and_numbers_out_of_range_are_not_stored() {
    let server = Server::new().await;
    let map = json!({"metadata": {"name": "a", "labels": null}, "data": {"k": null}});
    let stored = server.ok("POST", MAPS, &map).await;
    assert_eq!(
        (&stored["data"], stored["metadata"].get("labels")),
        (&json!({"k": ""}), None)
    );
    let mut odd = pod("p");
    odd["spec"]["priority"] = json!(300_000_000_000_i64);
    let refused = server.call("POST", PODS, &odd).await;
    assert_eq!(refused.code, 400, "{}", refused.body);
    let large = json!({"data": {"k": "x".repeat(2 << 20)}});
    let grows = server.patch(&format!("{MAPS}/a"), MERGE, large).await;
    assert_eq!(grows.code, 422, "a ConfigMap has at most 1 MiB");
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let deployment = json!({"metadata": {"name": "a"}, "spec": {"selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    server.ok("POST", deployments, &deployment).await;
    let with = |name: &str| {
        let env = json!([{"name": name, "value": "x".repeat(2 << 20)}]);
        json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "env": env}]}}}})
    };
    let url = format!("{deployments}/a");
    let strategic = "application/strategic-merge-patch+json";
    let grows = server.patch(&url, strategic, with("A")).await;
    assert_eq!(grows.code, 200);
    let refused = server.patch(&url, strategic, with("B")).await;
    assert_eq!(
        refused.code, 413,
        "many patches cannot exceed the limit of a body"
    );
}
