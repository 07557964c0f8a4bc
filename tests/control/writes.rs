//! Writes and deletions.

use serde_json::{Value, json};

use crate::server::{MAPS, MERGE, PODS, STRATEGIC, Server, pod};

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
