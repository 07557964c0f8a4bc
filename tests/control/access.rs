//! Authentication and authorisation.

use holdfast_control::api::auth::User;
use holdfast_https::Certificate;
use k8s_openapi::api::authentication::v1::TokenReview;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::jobs::Plane;
use crate::server::{PODS, Server, bytes, pod, request};

#[tokio::test]
async fn tokens_name_their_account_and_expire_with_their_pod() {
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
        .expect("a valid token");
    assert_eq!(user.name, "system:serviceaccount:default:default");
    let get_as = |user: &User, path: &str| {
        let mut request = Server::request("GET", path, "", vec![]);
        request.user = user.clone();
        request
    };
    assert_eq!(
        server.send(get_as(&user, PODS)).await.code,
        403,
        "an account may not read pods"
    );
    assert_eq!(server.send(get_as(&user, "/apis")).await.code, 200);
    let anonymous = server.0.authenticate(None, None).expect("anonymous");
    assert_eq!(server.send(get_as(&anonymous, "/readyz")).await.code, 200);
    assert_eq!(server.send(get_as(&anonymous, "/apis")).await.code, 403);
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
        .expect_err("the token expires with its pod");
    assert_eq!(refused.code, 401);
    assert!(
        server
            .0
            .authenticate(None, Some("Bearer nonsense"))
            .is_err()
    );
}

#[tokio::test]
async fn roles_grant_their_rules_and_users_grant_only_what_they_have() {
    let server = Server::new().await;
    for (plural, object) in holdfast_control::api::rbac::bootstrap() {
        server
            .ok(
                "POST",
                &format!("/apis/rbac.authorization.k8s.io/v1/{plural}"),
                &object,
            )
            .await;
    }
    let alice = |method: &str, url: &str, body: &Value| {
        let mut request = Server::request(method, url, "application/json", bytes(body));
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
    // The aggregated role `view`, bound in this namespace only.
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
    // She may write roles, but may not grant rights that she does not have.
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
    // A grant is revoked immediately. The roleRef of a binding is immutable.
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
async fn a_node_reads_only_objects_of_its_pods() {
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
        let mut request = request(method, url, &body);
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
    // A node may write only its own objects (NodeRestriction).
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
        "a node creates only mirror pods"
    );
    for (method, url, code) in [
        (
            "GET",
            "/api/v1/namespaces/default/secrets?fieldSelector=metadata.name%3Dmine",
            200,
        ),
        ("GET", "/api/v1/namespaces/default/secrets", 403),
        ("GET", "/api/v1/secrets", 403),
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
    // After its last pod is deleted, the node may not read the objects that the pod referred to.
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

/// A request for a name without a namespace covers all namespaces. The node may not send it, even if
/// one of its pods refers to this name in one namespace.
#[tokio::test]
async fn a_node_cannot_read_a_name_in_all_namespaces() {
    let server = Server::new().await;
    let mut own = pod("p");
    own["spec"]["nodeName"] = json!("n1");
    own["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "mine"}}]);
    server.ok("POST", PODS, &own).await;
    let selector = "fieldSelector=metadata.name%3Dmine";
    for (path, code) in [
        (
            format!("/api/v1/namespaces/default/secrets?{selector}"),
            200,
        ),
        (format!("/api/v1/secrets?{selector}"), 403),
        (format!("/api/v1/secrets?watch=1&{selector}"), 403),
        (
            format!("/apis/certificates.k8s.io/v1beta1/podcertificaterequests?{selector}"),
            403,
        ),
    ] {
        let groups = &["system:nodes"];
        let reply = server
            .call_as("system:node:n1", groups, "GET", &path, &Value::Null)
            .await;
        assert_eq!(reply.code, code, "{path}: {}", reply.body);
    }
}

/// The user that a TokenReview returns for a token; `None` if the token is invalid.
async fn reviewed(plane: &Plane, token: &str) -> Option<String> {
    let api: kube::Api<TokenReview> = kube::Api::all(plane.client.clone());
    let review = json!({"metadata": {}, "spec": {"token": token}});
    let review = serde_json::from_value(review).unwrap();
    let answer = api.create(&PostParams::default(), &review).await.unwrap();
    answer.status?.user?.username
}

/// Waits for the token of a Secret, and checks the other fields that the controller sets.
async fn token_of(plane: &Plane, secrets: &kube::Api<Secret>, name: &str) -> String {
    let found = plane
        .wait("a token in the Secret", || async move {
            let found = secrets.get(name).await.unwrap();
            let data = found.data.clone().filter(|d| d.contains_key("token"));
            data.map(|data| (data, found))
        })
        .await;
    let (data, found) = found;
    let text = |key: &str| String::from_utf8(data[key].0.clone()).unwrap();
    assert_eq!(text("namespace"), "default");
    assert!(text("ca.crt").starts_with("-----BEGIN CERTIFICATE-----"));
    let annotations = found.metadata.annotations.unwrap();
    assert!(annotations.contains_key("kubernetes.io/service-account.uid"));
    text("token")
}

/// A Secret for tokens is filled. Its token is valid while the Secret contains it. The Secret is
/// deleted with its ServiceAccount.
#[tokio::test]
async fn a_secret_of_a_service_account_gets_its_token() {
    let plane = Plane::start().await;
    let account = |name: &str| json!({"metadata": {"name": name}});
    let secret = |name: &str, account: &str| json!({"metadata": {"name": name, "annotations": {"kubernetes.io/service-account.name": account}}, "type": "kubernetes.io/service-account-token"});
    for name in ["robot", "brief"] {
        plane.create::<ServiceAccount>(account(name)).await;
    }
    for (name, account) in [
        ("one", "robot"),
        ("two", "robot"),
        ("three", "brief"),
        ("orphan", "nobody"),
    ] {
        plane.create::<Secret>(secret(name, account)).await;
    }
    let secrets = plane.api::<Secret>();
    let filled = async |name: &str| token_of(&plane, &secrets, name).await;
    let (one, two, three) = (
        filled("one").await,
        filled("two").await,
        filled("three").await,
    );
    let robot = Some("system:serviceaccount:default:robot".to_owned());
    assert_eq!(
        (reviewed(&plane, &one).await, reviewed(&plane, &two).await),
        (robot.clone(), robot.clone())
    );
    secrets
        .delete("one", &DeleteParams::default())
        .await
        .unwrap();
    assert_eq!(
        (reviewed(&plane, &one).await, reviewed(&plane, &two).await),
        (None, robot)
    );
    // After the token is removed, the Secret gets a new one.
    let emptied = json!({"data": {"token": null}});
    secrets
        .patch("two", &PatchParams::default(), &Patch::Merge(emptied))
        .await
        .unwrap();
    filled("two").await;
    let accounts = plane.api::<ServiceAccount>();
    accounts
        .delete("brief", &DeleteParams::default())
        .await
        .unwrap();
    assert_eq!(reviewed(&plane, &three).await, None);
    for name in ["three", "orphan"] {
        let secrets = &secrets;
        plane
            .wait(
                "the deletion of a Secret without its account",
                || async move { secrets.get_opt(name).await.unwrap().is_none().then_some(()) },
            )
            .await;
    }
}

/// Tokens name the pod and its node, and become invalid a minute after their bound object is deleted.
#[tokio::test]
async fn tokens_are_bound_to_pods_secrets_and_nodes() {
    let server = Server::new().await;
    let null = Value::Null;
    let node = json!({"metadata": {"name": "n1"}});
    server.ok("POST", "/api/v1/nodes", &node).await;
    let secret = json!({"metadata": {"name": "s"}});
    let secrets = "/api/v1/namespaces/default/secrets";
    server.ok("POST", secrets, &secret).await;
    let mut own = pod("p");
    own["spec"]["nodeName"] = json!("n1");
    own["metadata"]["finalizers"] = json!(["a/b"]);
    server.ok("POST", PODS, &own).await;
    let url = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let token = async |kind: &str, name: &str| {
        let request =
            json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": kind, "name": name}}});
        let issued = server.ok("POST", url, &request).await;
        format!("Bearer {}", issued["status"]["token"].as_str().unwrap())
    };
    let authenticate = |token: &str| server.0.authenticate(None, Some(token)).ok();
    let (of_pod, of_secret, of_node) = (
        token("Pod", "p").await,
        token("Secret", "s").await,
        token("Node", "n1").await,
    );
    let extra = authenticate(&of_pod).expect("a valid token").extra;
    assert_eq!(extra["authentication.kubernetes.io/pod-name"], ["p"]);
    assert_eq!(extra["authentication.kubernetes.io/node-name"], ["n1"]);
    assert!(extra.contains_key("authentication.kubernetes.io/node-uid"));
    assert!(authenticate(&of_secret).is_some() && authenticate(&of_node).is_some());
    let config_map =
        json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "ConfigMap", "name": "m"}}});
    assert_eq!(server.call("POST", url, &config_map).await.code, 400);
    server.ok("DELETE", &format!("{secrets}/s"), &null).await;
    server.ok("DELETE", "/api/v1/nodes/n1", &null).await;
    assert!(authenticate(&of_secret).is_none() && authenticate(&of_node).is_none());
    // A pod's token outlives its node.
    assert!(authenticate(&of_pod).is_some());
    // The pod's deletion time is now, and a finalizer keeps the object: the token is valid for the leeway only.
    let deleted = server
        .ok("DELETE", &format!("{PODS}/p?gracePeriodSeconds=0"), &null)
        .await;
    assert!(authenticate(&of_pod).is_some());
    let before = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(70);
    let mut record = deleted;
    let time = before.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    record["metadata"]["deletionTimestamp"] = time.into();
    let key = "pods/default/p";
    let revision = server.0.store().get(key).unwrap().revision;
    let write = holdfast_control::store::Write {
        key: key.into(),
        expect: holdfast_control::store::Expect::Revision(revision),
        requires: None,
        change: holdfast_control::store::Change::Put,
        render: Box::new(move |_| record.to_string().into()),
        attrs: std::sync::Arc::default(),
    };
    server.0.store().write(write).await.unwrap();
    assert!(authenticate(&of_pod).is_none());
}

/// An invalid bearer token is rejected if no other credential is valid. Another scheme is not a credential.
#[tokio::test]
async fn only_presented_bearer_tokens_are_rejected() {
    let server = Server::new().await;
    let authenticate = |header: &str| {
        let user = server.0.authenticate(None, Some(header));
        user.map(|u| u.name).map_err(|e| e.code)
    };
    assert_eq!(authenticate("Bearer nonsense"), Err(401));
    assert_eq!(authenticate("bearer nonsense"), Err(401));
    for none in ["", "Bearer", "Bearer ", "Basic YTpi"] {
        assert_eq!(
            authenticate(none),
            Ok("system:anonymous".into()),
            "{none:?}"
        );
    }
    // The certificate is checked first. If it is not trusted, the token is checked.
    let mut params = rcgen::CertificateParams::default();
    let name = &mut params.distinguished_name;
    name.push(rcgen::DnType::CommonName, "jane");
    let key = rcgen::KeyPair::generate().unwrap();
    let der = params.self_signed(&key).unwrap().der().to_vec();
    let url = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let issued = server.ok("POST", url, &json!({})).await;
    let good = format!("Bearer {}", issued["status"]["token"].as_str().unwrap());
    let (trusted, untrusted) = (
        Certificate::trusted(der.clone()),
        Certificate::untrusted(der),
    );
    let account = "system:serviceaccount:default:default";
    for (certificate, header, expected) in [
        (&trusted, None, Ok("jane")),
        (&trusted, Some("Bearer nonsense"), Ok("jane")),
        (&trusted, Some(good.as_str()), Ok("jane")),
        (&untrusted, Some(good.as_str()), Ok(account)),
        (&untrusted, Some("Bearer nonsense"), Err(401)),
        (&untrusted, None, Err(401)),
    ] {
        let user = server.0.authenticate(Some(certificate), header);
        let found = user.map(|u| u.name).map_err(|e| e.code);
        assert_eq!(found, expected.map(str::to_owned), "{header:?}");
    }
}
