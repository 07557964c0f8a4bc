//! Deletions: grace periods, finalizers and propagation.

use serde_json::{Value, json};

use crate::server::{MAPS, MERGE, PODS, Server, next, pod};

#[tokio::test]
async fn deletion_waits_for_grace_periods_and_finalizers() {
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
        "no finalizer is added to an object that is being deleted"
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
        "a pod without a node is deleted immediately"
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
    assert_eq!(grace(&longer), Some(20), "a grace period only shrinks");
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

/// As a kube-apiserver does: the last grace period of a pod is written before the pod is removed, so that the
/// node knows the grace period of its containers. A pod that is already marked is removed in one revision.
#[tokio::test]
async fn a_forced_deletion_writes_a_modification_and_a_deletion() {
    let server = Server::new().await;
    let mut pods = server.watch(&format!("{PODS}?watch=1")).await;
    let bound = |name: &str, finalizers: Value| {
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = json!("n");
        pod["metadata"]["finalizers"] = finalizers;
        pod
    };
    let force = json!({"gracePeriodSeconds": 0});
    let (marked, removed) = ("MODIFIED 0", "DELETED 0");
    for (name, finalizers, deletions, expected) in [
        ("forced", Value::Null, vec![&force], vec![marked, removed]),
        (
            "hurried",
            Value::Null,
            vec![&Value::Null, &force],
            vec!["MODIFIED 30", marked, removed],
        ),
        (
            "held",
            json!(["x.io/y"]),
            vec![&force, &force],
            vec![marked],
        ),
    ] {
        server.ok("POST", PODS, &bound(name, finalizers)).await;
        let url = format!("{PODS}/{name}");
        let mut answer = Value::Null;
        for body in deletions {
            answer = server.ok("DELETE", &url, body).await;
        }
        if name == "held" {
            let free = json!({"metadata": {"finalizers": null}});
            assert_eq!(server.patch(&url, MERGE, free).await.code, 200);
        }
        assert_eq!(
            answer["metadata"]["deletionGracePeriodSeconds"], 0,
            "{answer}"
        );
        assert_eq!(next(&mut pods).await["type"], "ADDED");
        let mut revisions = vec![];
        for expected in expected
            .into_iter()
            .chain((name == "held").then_some(removed))
        {
            let event = next(&mut pods).await;
            let metadata = &event["object"]["metadata"];
            let grace = &metadata["deletionGracePeriodSeconds"];
            let kind = event["type"].as_str().unwrap();
            assert_eq!(format!("{kind} {grace}"), expected, "{name}: {event}");
            assert!(metadata["deletionTimestamp"].is_string(), "{event}");
            assert_eq!(metadata["generation"], 2, "{event}");
            let revision = metadata["resourceVersion"].as_str().unwrap();
            revisions.push(revision.parse::<u64>().unwrap());
        }
        assert!(revisions.is_sorted_by(|a, b| a < b), "{revisions:?}");
    }
}

#[tokio::test]
async fn an_object_without_grace_period_is_deleted_in_one_revision() {
    let server = Server::new().await;
    let mut maps = server.watch(&format!("{MAPS}?watch=1")).await;
    let map = json!({"metadata": {"name": "m"}});
    server.ok("POST", MAPS, &map).await;
    let force = json!({"gracePeriodSeconds": 0});
    server.ok("DELETE", &format!("{MAPS}/m"), &force).await;
    for expected in ["ADDED", "DELETED"] {
        assert_eq!(next(&mut maps).await["type"], expected);
    }
}

/// No time in a request crashes the process or creates an undecodable object.
#[tokio::test]
async fn times_in_requests_are_bounded() {
    let server = Server::new().await;
    let bound = |name: &str| {
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = json!("n");
        pod
    };
    server.ok("POST", PODS, &bound("p")).await;
    let url = format!("{PODS}/p");
    for (query, body, code) in [
        ("gracePeriodSeconds=300000000000", Value::Null, 422),
        ("gracePeriodSeconds=9223372036854775807", Value::Null, 422),
        ("gracePeriodSeconds=99999999999999999999", Value::Null, 400),
        ("gracePeriodSeconds=soon", Value::Null, 400),
        ("", json!({"gracePeriodSeconds": 300_000_000_000_i64}), 422),
        ("", json!({"gracePeriodSeconds": "30"}), 400),
        (
            "",
            json!({"gracePeriodSeconds": i64::MIN, "dryRun": ["All"]}),
            200,
        ),
        ("", json!({"gracePeriodSeconds": i32::MAX}), 200),
        ("", json!({"gracePeriodSeconds": 7}), 200),
    ] {
        let reply = server
            .call("DELETE", &format!("{url}?{query}"), &body)
            .await;
        assert_eq!(reply.code, code, "{query} {body}: {}", reply.body);
    }
    let left = server.ok("GET", &url, &Value::Null).await;
    assert_eq!(left["metadata"]["deletionGracePeriodSeconds"], 7);
    let mut long = bound("long");
    long["spec"]["terminationGracePeriodSeconds"] = json!(300_000_000_000_i64);
    let refused = server.call("POST", PODS, &long).await;
    assert_eq!(refused.code, 422, "{}", refused.body);
    let token = "/api/v1/namespaces/default/serviceaccounts/default/token";
    for seconds in [i64::MAX, (1 << 32) + 1] {
        let spec = json!({"spec": {"expirationSeconds": seconds}});
        assert_eq!(server.call("POST", token, &spec).await.code, 422);
    }
    let mut watch = server
        .watch(&format!("{MAPS}?watch=1&timeoutSeconds={}", i64::MAX))
        .await;
    server
        .ok("POST", MAPS, &json!({"metadata": {"name": "seen"}}))
        .await;
    crate::server::next(&mut watch).await;
}

/// The garbage collector's finalizers are set only on kinds that it handles. All other objects are
/// removed immediately, whatever the policy.
#[tokio::test]
async fn foreground_deletion_completes() {
    let server = Server::new().await;
    let secrets = "/api/v1/namespaces/default/secrets";
    server.ok("POST", PODS, &pod("p")).await;
    for (collection, name) in [(MAPS, "m"), (secrets, "s")] {
        server
            .ok("POST", collection, &json!({"metadata": {"name": name}}))
            .await;
    }
    for (collection, name, policy) in [
        (MAPS, "m", "Foreground"),
        (secrets, "s", "Orphan"),
        (PODS, "p", "Foreground"),
    ] {
        let url = format!("{collection}/{name}");
        server
            .ok("DELETE", &url, &json!({"propagationPolicy": policy}))
            .await;
        assert_eq!(
            server.call("GET", &url, &Value::Null).await.code,
            404,
            "{url}"
        );
    }
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let template = json!({"metadata": {"labels": {"a": "1"}}, "spec": pod("x")["spec"]});
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": {"a": "1"}}, "template": template}});
    server.ok("POST", deployments, &deployment).await;
    let url = format!("{deployments}/d");
    let marked = server
        .ok("DELETE", &url, &json!({"propagationPolicy": "Foreground"}))
        .await;
    assert_eq!(
        marked["metadata"]["finalizers"],
        json!(["foregroundDeletion"])
    );
}
