//! Lists, watches and discovery.

use std::time::Duration;

use holdfast_control::api::Answer;
use holdfast_control::store::Store;
use holdfast_core::version::REPORTED;
use serde_json::{Value, json};

use crate::server::{MAPS, MERGE, Server, next};

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
        "the second page is from the same snapshot"
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
        "limit is ignored at resourceVersion=0"
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

/// The store retains changes by number only, not by age, so that many changes evict the oldest.
#[tokio::test]
async fn watches_see_changes_according_to_their_selector() {
    let server = Server::new_over(Store::in_memory_for(Duration::ZERO)).await;
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
            assert!(revision > last, "revisions grow, also with deletions");
            last = revision;
        }
    }
    let mut everything = server.watch("/api/v1/configmaps?watch=1").await;
    assert_eq!(
        next(&mut everything).await["object"]["metadata"]["name"],
        "foreign"
    );
    let mut short = server.watch(&format!("{MAPS}?watch=1&resourceVersion={since}&fieldSelector=metadata.name=none&timeoutSeconds=1")).await;
    let ended = tokio::time::timeout(Duration::from_secs(30), short.recv())
        .await
        .expect("the watch ends in time");
    assert!(ended.is_none(), "the watch ends without an event");
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
async fn discovery_lists_resources_in_both_forms() {
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

/// The cells of the first row of a Table.
async fn cells(server: &Server, url: &str) -> Value {
    let mut request = Server::request("GET", url, "", vec![]);
    request.accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json".into();
    let table = server.send(request).await.body;
    let (columns, cells) = (&table["columnDefinitions"], &table["rows"][0]["cells"]);
    assert_eq!(
        columns.as_array().map(Vec::len),
        cells.as_array().map(Vec::len),
        "{url}: {table}"
    );
    cells.clone()
}

#[tokio::test]
async fn tables_show_external_addresses_bindings_and_scales() {
    let server = Server::new().await;
    let services = "/api/v1/namespaces/default/services";
    let port = json!([{"port": 80}]);
    for (name, spec, expected) in [
        ("a", json!({"ports": port}), "<none>"),
        (
            "b",
            json!({"ports": port, "externalIPs": ["192.0.2.1", "192.0.2.2"]}),
            "192.0.2.1,192.0.2.2",
        ),
        (
            "c",
            json!({"ports": port, "type": "LoadBalancer"}),
            "<pending>",
        ),
        (
            "d",
            json!({"type": "ExternalName", "externalName": "a.example"}),
            "a.example",
        ),
    ] {
        let service = json!({"metadata": {"name": name}, "spec": spec});
        server.ok("POST", services, &service).await;
        let shown = cells(&server, &format!("{services}/{name}")).await;
        assert_eq!(shown[3], expected, "{name}");
    }
    let given = json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}, {"hostname": "b.example"}]}}});
    let status = format!("{services}/c/status");
    assert_eq!(server.patch(&status, MERGE, given).await.code, 200);
    let shown = cells(&server, &format!("{services}/c")).await;
    assert_eq!(shown[3], "192.0.2.9,b.example");

    let bindings = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings";
    let binding = json!({"metadata": {"name": "b"}, "roleRef": {"kind": "Role", "name": "r"}, "subjects": [
        {"kind": "User", "name": "u"}, {"kind": "User", "name": "v"}, {"kind": "ServiceAccount", "name": "s", "namespace": "n"}]});
    server.ok("POST", bindings, &binding).await;
    let shown = cells(&server, &format!("{bindings}/b")).await;
    assert_eq!(
        (&shown[1], &shown[3], &shown[4], &shown[5]),
        (&json!("Role/r"), &json!("u, v"), &json!(""), &json!("n/s"))
    );

    let sets = "/apis/apps/v1/namespaces/default/replicasets";
    let set = json!({"metadata": {"name": "s"}, "spec": {"replicas": 3, "selector": {"matchLabels": {"a": "1"}},
        "template": {"metadata": {"labels": {"a": "1"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    server.ok("POST", sets, &set).await;
    let shown = cells(&server, &format!("{sets}/s/scale")).await;
    assert_eq!(
        (&shown[0], &shown[1], &shown[2]),
        (&json!("s"), &json!(3), &json!(0))
    );
}

/// kubectl requests this document before it sends a `List`, and fails without it.
#[tokio::test]
async fn the_older_openapi_document_is_served() {
    let server = Server::new().await;
    let kind = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf";
    let mut request = Server::request("GET", "/openapi/v2", "", vec![]);
    request.accept = kind.into();
    let Answer::Body { code, body, .. } = server.0.answer(request).await else {
        panic!("answered with a watch");
    };
    // Field 1 is the version of the format; field 2 is `info` with title and version.
    let head = b"\n\x032.0\x12\x1c\n\x08Holdfast\x12\x10";
    let expected = [&head[..], REPORTED.as_bytes()].concat();
    assert_eq!(code, 200);
    assert_eq!(body, expected);
    let document = server.ok("GET", "/openapi/v2", &Value::Null).await;
    assert_eq!(document["swagger"], "2.0");
}

/// An object that leaves a selector is sent as it was before. A timeout of 0 is no timeout.
#[tokio::test]
async fn an_object_that_leaves_a_selector_is_sent_as_it_was() {
    let server = Server::new().await;
    let map = json!({"metadata": {"name": "a", "labels": {"l": "1"}}, "data": {"k": "old"}});
    let made = server.ok("POST", MAPS, &map).await;
    let since = made["metadata"]["resourceVersion"].as_str().unwrap();
    let mut lines = server
        .watch(&format!(
            "{MAPS}?watch=1&timeoutSeconds=0&resourceVersion={since}&labelSelector=l=1"
        ))
        .await;
    let change = json!({"metadata": {"labels": {"l": "2"}}, "data": {"k": "new"}});
    let changed = server.patch(&format!("{MAPS}/a"), MERGE, change).await;
    let event = next(&mut lines).await;
    assert_eq!(event["type"], "DELETED");
    assert_eq!(
        (
            &event["object"]["data"]["k"],
            &event["object"]["metadata"]["labels"]["l"]
        ),
        (&json!("old"), &json!("1"))
    );
    assert_eq!(
        event["object"]["metadata"]["resourceVersion"], changed.body["metadata"]["resourceVersion"],
        "the event has the revision of the change"
    );
}

#[tokio::test]
async fn invalid_options_are_refused() {
    let server = Server::new().await;
    for (query, code) in [
        ("resourceVersion=1&resourceVersionMatch=Bogus", 422),
        ("resourceVersion=0&resourceVersionMatch=Exact", 422),
        ("resourceVersion=x", 400),
        ("limit=x", 400),
        ("limit=-1", 200),
        ("sendInitialEvents=false", 422),
        ("watch=1&resourceVersionMatch=NotOlderThan", 422),
        ("watch=1&timeoutSeconds=x", 400),
    ] {
        let reply = server
            .call("GET", &format!("{MAPS}?{query}"), &Value::Null)
            .await;
        assert_eq!(reply.code, code, "{query}: {}", reply.body);
    }
}

/// A watch from now shows later changes, and a watch from a future revision fails.
#[tokio::test]
async fn a_watch_begins_at_its_resource_version() {
    let server = Server::new().await;
    let map = |name: &str| json!({"metadata": {"name": name}});
    server.ok("POST", MAPS, &map("before")).await;
    let mut now = vec![];
    for revision in ["", "&resourceVersion=0"] {
        let url = format!(
            "{MAPS}?watch=1&sendInitialEvents=false&resourceVersionMatch=NotOlderThan{revision}"
        );
        now.push(server.watch(&url).await);
    }
    server.ok("POST", MAPS, &map("after")).await;
    for lines in &mut now {
        let event = next(lines).await;
        assert_eq!(event["object"]["metadata"]["name"], "after");
    }
    let mut future = server
        .watch(&format!("{MAPS}?watch=1&resourceVersion=99999999"))
        .await;
    let event = next(&mut future).await;
    assert_eq!(
        (
            &event["type"],
            &event["object"]["code"],
            &event["object"]["reason"]
        ),
        (&json!("ERROR"), &json!(504), &json!("Timeout"))
    );
    let message = event["object"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("Timeout: Too large resource version: 99999999, current: "),
        "{message}"
    );
}
