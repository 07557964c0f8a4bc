//! Who may do what.

use holdfast::control::api::auth::User;
use serde_json::{Value, json};

use crate::server::{MERGE, PODS, Server, pod};

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

/// A request for a token that is bound to a pod, as agents send it.
async fn bound(server: &Server, pod: &str) -> Value {
    let found = server
        .call("GET", &format!("{PODS}/{pod}"), &Value::Null)
        .await;
    json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": found.body["metadata"]["uid"]}}})
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
            bound(&server, name).await,
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
        // A name without a namespace would be that name in all namespaces.
        (
            "GET",
            "/api/v1/secrets?fieldSelector=metadata.name%3Dmine",
            403,
        ),
        (
            "GET",
            "/api/v1/secrets?watch=1&fieldSelector=metadata.name%3Dmine",
            403,
        ),
        (
            "GET",
            "/apis/certificates.k8s.io/v1beta1/podcertificaterequests?fieldSelector=metadata.name%3Dmine",
            403,
        ),
        ("GET", "/api/v1/nodes", 403),
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
