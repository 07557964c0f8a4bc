//! Which fields updates and `/status` writes may change, and what the API allocates to services.

use serde_json::{Value, json};

use crate::server::{MAPS, MERGE, PODS, STRATEGIC, Server, next, pod};

const SERVICES: &str = "/api/v1/namespaces/default/services";

/// A table of merge patches to an object: URL, patch, and the status code.
async fn patches(server: &Server, rows: Vec<(String, Value, u16)>) {
    for (url, patch, code) in rows {
        let reply = server.patch(&url, MERGE, patch.clone()).await;
        assert_eq!(reply.code, code, "{url} {patch}: {}", reply.body);
    }
}

#[tokio::test]
async fn a_pods_status_is_validated() {
    let server = Server::new().await;
    let mut never = pod("never");
    never["spec"]["restartPolicy"] = json!("Never");
    server.ok("POST", PODS, &never).await;
    server.ok("POST", PODS, &pod("always")).await;
    let ended = json!({"status": {"containerStatuses": [{"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 0}}}]}});
    let mut again = ended.clone();
    again["status"]["containerStatuses"][0]["state"] = json!({"running": {}, "terminated": null});
    let status = |name: &str| format!("{PODS}/{name}/status");
    patches(
        &server,
        vec![
            (
                status("never"),
                json!({"metadata": {"labels": {"-": "x"}}, "status": {}}),
                200,
            ),
            (
                status("never"),
                json!({"status": {"podIP": "x", "podIPs": [{"ip": "x"}]}}),
                422,
            ),
            (
                status("never"),
                json!({"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.2"}]}}),
                422,
            ),
            (
                status("never"),
                json!({"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}}),
                200,
            ),
            (
                status("never"),
                json!({"status": {"nominatedNodeName": "N/x"}}),
                422,
            ),
            (status("never"), ended.clone(), 200),
            (status("never"), again.clone(), 422),
            (status("always"), ended, 200),
            (status("always"), again, 200),
        ],
    )
    .await;
    let body = server.ok("GET", &status("never"), &Value::Null).await;
    assert_eq!(body["status"]["qosClass"], "BestEffort");
}

#[tokio::test]
async fn a_pod_has_one_address_of_each_family() {
    let server = Server::new().await;
    server.ok("POST", PODS, &pod("never")).await;
    let status = |name: &str| format!("{PODS}/{name}/status");
    patches(
        &server,
        vec![
            (
                status("never"),
                json!({"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "10.0.0.2"}]}}),
                422,
            ),
            (
                status("never"),
                json!({"status": {"hostIP": "10.0.0.9", "hostIPs": [{"ip": "10.0.0.9"}, {"ip": "10.0.0.8"}]}}),
                422,
            ),
            (
                status("never"),
                json!({"status": {"hostIP": "10.0.0.9", "hostIPs": [{"ip": "10.0.0.9"}, {"ip": "fd00::9"}]}}),
                200,
            ),
            (
                status("never"),
                json!({"status": {"hostIP": null}}),
                422,
            ),
        ],
    )
    .await;
    // Lists of addresses are merged: changing an address requires a patch that deletes the old one.
    let merged = json!({"status": {"hostIP": "10.0.0.8", "hostIPs": [{"ip": "10.0.0.8"}, {"ip": "fd00::9"}]}});
    let mut taken_out = merged.clone();
    let list = taken_out["status"]["hostIPs"].as_array_mut().unwrap();
    list.push(json!({"ip": "10.0.0.9", "$patch": "delete"}));
    for (patch, code) in [(merged, 422), (taken_out, 200)] {
        let reply = server.patch(&status("never"), STRATEGIC, patch).await;
        assert_eq!(reply.code, code, "{}", reply.body);
    }
}

#[tokio::test]
async fn counts_phases_and_labels_are_validated_and_deleting_objects_get_no_finalizers() {
    let server = Server::new().await;
    let sets = "/apis/apps/v1/namespaces/default/replicasets";
    let labels = json!({"a": "1"});
    let set = json!({"metadata": {"name": "s"}, "spec": {"replicas": 1, "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod("x")["spec"]}}});
    server.ok("POST", sets, &set).await;
    let of_set = |patch: Value, code: u16| (format!("{sets}/s/status"), patch, code);
    let phase = |phase: &str| json!({"status": {"phase": phase}});
    let namespace = "/api/v1/namespaces/other/status";
    let more = json!({"metadata": {"finalizers": ["a.b/c", "d.e/f"]}});
    let rows = vec![
        of_set(json!({"status": {"replicas": -1}}), 422),
        of_set(json!({"status": {"replicas": 1, "readyReplicas": 2}}), 422),
        of_set(json!({"status": {"replicas": 1, "readyReplicas": 1}}), 200),
        // Labels of other kinds may be part of the patch, and are validated as labels.
        of_set(json!({"metadata": {"labels": {"-": "x"}}}), 422),
        (namespace.to_owned(), phase("Terminating"), 422),
        (namespace.to_owned(), phase("Active"), 200),
        of_set(json!({"metadata": {"finalizers": ["a.b/c"]}}), 200),
    ];
    patches(&server, rows).await;
    server
        .ok("DELETE", &format!("{sets}/s"), &Value::Null)
        .await;
    let rows = vec![
        of_set(more.clone(), 422),
        (format!("{sets}/s"), more, 422),
        of_set(json!({"metadata": {"finalizers": []}}), 200),
    ];
    patches(&server, rows).await;
    let gone = server.call("GET", &format!("{sets}/s"), &Value::Null).await;
    assert_eq!(gone.code, 404);
}

#[tokio::test]
async fn scheduling_gates_block_a_pod_until_they_are_removed() {
    let server = Server::new().await;
    let mut gated = pod("p");
    gated["spec"]["schedulingGates"] = json!([{"name": "a.b/one"}, {"name": "two"}]);
    let with_node = {
        let mut pod = gated.clone();
        pod["spec"]["nodeName"] = json!("n");
        server.call("POST", PODS, &pod).await
    };
    assert_eq!(with_node.code, 422, "{}", with_node.body);
    let stored = server.ok("POST", PODS, &gated).await;
    assert_eq!(
        stored["status"]["conditions"][0]["reason"],
        "SchedulingGated"
    );
    let (url, binding) = (format!("{PODS}/p"), json!({"target": {"name": "n"}}));
    let bound = server
        .call("POST", &format!("{url}/binding"), &binding)
        .await;
    assert_eq!(bound.code, 409, "{}", bound.body);
    let gates = |names: &[&str]| {
        let gates: Vec<Value> = names.iter().map(|n| json!({"name": n})).collect();
        json!({"spec": {"schedulingGates": gates}})
    };
    let affinity = |values: &[&str]| {
        let expressions: Vec<Value> = values
            .iter()
            .map(|v| json!({"key": "z", "operator": "NotIn", "values": [v]}))
            .collect();
        json!({"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": [{"matchExpressions": expressions}]}}}}})
    };
    let selector = |zone: Value| json!({"spec": {"nodeSelector": {"zone": zone}}});
    patches(
        &server,
        vec![
            (url.clone(), gates(&["a.b/one", "two", "three"]), 422),
            (url.clone(), selector(json!("x")), 200),
            (url.clone(), selector(json!("y")), 422),
            (url.clone(), selector(Value::Null), 422),
            (url.clone(), affinity(&["1"]), 200),
            (url.clone(), affinity(&["1", "2"]), 200),
            (url.clone(), affinity(&["2"]), 422),
            (url.clone(), json!({"spec": {"affinity": null}}), 422),
            (url.clone(), json!({"spec": {"hostNetwork": true}}), 422),
            (url.clone(), gates(&["two"]), 200),
            (url.clone(), json!({"spec": {"schedulingGates": null}}), 200),
            (url.clone(), affinity(&["1", "2", "3"]), 422),
            (
                url.clone(),
                json!({"spec": {"nodeSelector": {"more": "x"}}}),
                422,
            ),
            (url.clone(), gates(&["two"]), 422),
        ],
    )
    .await;
    server.ok("POST", &format!("{url}/binding"), &binding).await;
}

fn service(name: &str, kind: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"type": kind, "ports": [
        {"name": "a", "port": 80}, {"name": "b", "port": 81}]}})
}

fn node_ports(service: &Value) -> Vec<i64> {
    let ports = service["spec"]["ports"].as_array().unwrap();
    ports
        .iter()
        .filter_map(|p| p["nodePort"].as_i64())
        .collect()
}

#[tokio::test]
async fn services_have_the_fields_of_their_type() {
    let server = Server::new().await;
    let mut taken = vec![];
    // Concurrently, because two could choose the same.
    let names: Vec<String> = (0..10).map(|i| format!("s{i}")).collect();
    let made = names.iter().map(|name| {
        let server = &server;
        async move {
            server
                .ok("POST", SERVICES, &service(name, "NodePort"))
                .await
        }
    });
    for made in futures::future::join_all(made).await {
        taken.extend(node_ports(&made));
    }
    assert!(taken.iter().all(|p| (30_000..=32_767).contains(p)));
    let mut distinct = taken.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!((taken.len(), distinct.len()), (20, 20));

    let url = format!("{SERVICES}/s0");
    let before = server.ok("GET", &url, &Value::Null).await;
    let kept = server.ok("PUT", &url, &service("s0", "NodePort")).await;
    assert_eq!(
        node_ports(&kept),
        node_ports(&before),
        "a PUT keeps the node ports"
    );
    assert_eq!(kept["spec"]["clusterIP"], before["spec"]["clusterIP"]);
    let own = |port: i64| json!({"spec": {"ports": [{"name": "a", "port": 80, "nodePort": port}]}});
    patches(
        &server,
        vec![
            (url.clone(), own(80), 422),
            (url.clone(), own(taken[2]), 422),
            (url.clone(), own(30_001), 200),
            (url.clone(), json!({"spec": {"type": "ClusterIP"}}), 200),
            (url.clone(), own(30_001), 422),
        ],
    )
    .await;
    let plain = server.ok("GET", &url, &Value::Null).await;
    assert!(node_ports(&plain).is_empty());
    assert_eq!(plain["spec"].get("externalTrafficPolicy"), None);
    patches(&server, vec![(format!("{SERVICES}/s1"), own(30_001), 200)]).await;
}

#[tokio::test]
async fn a_service_gets_an_address_when_no_longer_external() {
    let server = Server::new().await;
    server
        .ok("POST", SERVICES, &service("s0", "NodePort"))
        .await;
    let url = format!("{SERVICES}/s0");
    let external = json!({"spec": {"type": "ExternalName", "externalName": "a.b"}});
    patches(
        &server,
        vec![
            (url.clone(), json!({"spec": {"type": "ExternalName"}}), 422),
            (url.clone(), external, 200),
        ],
    )
    .await;
    let away = server.ok("GET", &url, &Value::Null).await;
    assert_eq!(away["spec"].get("clusterIP"), None, "{away}");
    let back = server
        .patch(
            &url,
            MERGE,
            json!({"spec": {"type": "ClusterIP", "externalName": null}}),
        )
        .await;
    let address = back.body["spec"]["clusterIP"].as_str().unwrap().to_owned();
    assert!(address.starts_with("10.96."), "{}", back.body);
    assert_eq!(back.body["spec"]["clusterIPs"], json!([address]));
}

#[tokio::test]
async fn a_rollout_that_cannot_progress_is_refused() {
    let server = Server::new().await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    for (surge, unavailable, code) in [
        (json!(0), json!("0%"), 422),
        (json!("0%"), json!(1), 201),
        (json!(1), json!(0), 409),
    ] {
        let rolling = json!({"maxSurge": surge, "maxUnavailable": unavailable});
        let template = json!({"metadata": {"labels": {"a": "1"}}, "spec": pod("x")["spec"]});
        let deployment = json!({"metadata": {"name": "d"}, "spec": {"strategy": {"rollingUpdate": rolling},
            "selector": {"matchLabels": {"a": "1"}}, "template": template}});
        let reply = server.call("POST", deployments, &deployment).await;
        assert_eq!(reply.code, code, "{}", reply.body);
    }
}

#[tokio::test]
async fn a_bound_claim_does_not_shrink() {
    let server = Server::new().await;
    let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
    let class =
        json!({"metadata": {"name": "grows"}, "provisioner": "p", "allowVolumeExpansion": true});
    server
        .ok("POST", "/apis/storage.k8s.io/v1/storageclasses", &class)
        .await;
    let claim = json!({"metadata": {"name": "c"}, "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "v",
        "storageClassName": "grows", "resources": {"requests": {"storage": "2Gi"}}}});
    server.ok("POST", claims, &claim).await;
    let url = format!("{claims}/c");
    let size = |text: &str| json!({"spec": {"resources": {"requests": {"storage": text}}}});
    let bound = json!({"status": {"phase": "Bound", "capacity": {"storage": "2Gi"}}});
    patches(
        &server,
        vec![
            (url.clone(), size("3Gi"), 422),
            (
                format!("{url}/status"),
                json!({"status": {"capacity": {"storage": "-1"}}}),
                422,
            ),
            (format!("{url}/status"), bound, 200),
            (url.clone(), size("1Gi"), 422),
            (url.clone(), size("5Gi"), 200),
            // The expansion failed: the request may shrink, but not to or below the current capacity.
            (url.clone(), size("3Gi"), 200),
            (url.clone(), size("2Gi"), 422),
            (
                "/apis/storage.k8s.io/v1/storageclasses/grows".to_owned(),
                json!({"allowVolumeExpansion": false}),
                200,
            ),
            (url.clone(), size("9Gi"), 403),
            (
                url.clone(),
                json!({"spec": {"resources": {"limits": {"storage": "9Gi"}}}}),
                422,
            ),
            (
                url.clone(),
                json!({"spec": {"accessModes": ["ReadOnlyMany"]}}),
                422,
            ),
        ],
    )
    .await;
}

/// Every created object has a resource version from before the namespace's deletion: nothing is created
/// in a terminating namespace.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_created_in_a_terminating_namespace() {
    let server = std::sync::Arc::new(Server::new().await);
    let version = |object: &Value| {
        let text = object["metadata"]["resourceVersion"].as_str().unwrap();
        text.parse::<u64>().unwrap()
    };
    for round in 0..40 {
        let namespace = format!("/api/v1/namespaces/n{round}");
        let object = json!({"metadata": {"name": format!("n{round}")}});
        server.ok("POST", "/api/v1/namespaces", &object).await;
        let writers: Vec<_> = (0..8)
            .map(|i| {
                let (server, url) = (server.clone(), format!("{namespace}/configmaps"));
                tokio::spawn(async move {
                    let (mut newest, mut count) = (0, 0);
                    loop {
                        let map = json!({"metadata": {"name": format!("m{i}-{count}")}});
                        let reply = server.call("POST", &url, &map).await;
                        if reply.code != 201 {
                            assert_eq!(reply.code, 403, "{}", reply.body);
                            return newest;
                        }
                        newest = version(&reply.body);
                        count += 1;
                    }
                })
            })
            .collect();
        tokio::time::sleep(std::time::Duration::from_millis(3)).await;
        let ended = version(&server.ok("DELETE", &namespace, &Value::Null).await);
        for writer in writers {
            let newest = writer.await.unwrap();
            assert!(newest < ended, "{newest} was written after {ended}");
        }
    }
}

/// A client that does not read its watch is disconnected, and uses little memory until then.
#[tokio::test]
async fn a_watch_without_a_reader_is_closed() {
    let server = Server::new().await;
    let mut lines = server
        .watch(&format!("{MAPS}?watch=1&resourceVersion=1"))
        .await;
    for i in 0..60 {
        let map = json!({"metadata": {"name": format!("m{i}")}});
        server.ok("POST", MAPS, &map).await;
    }
    tokio::time::pause();
    tokio::time::sleep(std::time::Duration::from_secs(120)).await;
    let first = next(&mut lines).await;
    assert_eq!(first["object"]["metadata"]["name"], "m0");
    let mut more = 0;
    while lines.recv().await.is_some() {
        more += 1;
    }
    assert!(more < 20, "{more} lines were queued");
}
