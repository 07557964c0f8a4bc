//! Privilege escalation: tables of users and attempts, all of which must fail.

use holdfast_core::node::signing::CLIENT;
use serde_json::{Value, json};

use crate::server::{MAPS, PODS, Server, pod};

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const CSRS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

fn role(name: &str, rules: Value) -> Value {
    json!({"metadata": {"name": name}, "rules": rules})
}

fn binding(name: &str, kind: &str, role: &str, user: &str) -> Value {
    json!({"metadata": {"name": name}, "roleRef": {"kind": kind, "name": role}, "subjects": [{"kind": "User", "name": user}]})
}

/// With a namespace administrator, an editor and a viewer of `default`, and a user who may write cluster roles.
async fn server() -> Server {
    let server = Server::with_roles().await;
    let bindings = format!("{RBAC}/namespaces/default/rolebindings");
    for user in ["admin", "edit", "view"] {
        server
            .ok("POST", &bindings, &binding(user, "ClusterRole", user, user))
            .await;
    }
    let all = json!(["create", "get", "update", "patch"]);
    let writer = json!([{"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles", "clusterrolebindings"], "verbs": all}]);
    server
        .ok(
            "POST",
            &format!("{RBAC}/clusterroles"),
            &role("writer", writer),
        )
        .await;
    let bound = binding("writer", "ClusterRole", "writer", "writer");
    server
        .ok("POST", &format!("{RBAC}/clusterrolebindings"), &bound)
        .await;
    server
}

#[tokio::test]
async fn admin_edit_and_view_have_their_upstream_rights() {
    let server = server().await;
    let secrets = "/api/v1/namespaces/default/secrets";
    let roles = format!("{RBAC}/namespaces/default/roles");
    for (user, method, url, code) in [
        ("edit", "GET", PODS, 200),
        ("admin", "GET", PODS, 200),
        ("admin", "GET", secrets, 200),
        ("edit", "GET", secrets, 200),
        ("view", "GET", secrets, 403),
        ("view", "DELETE", MAPS, 403),
        ("edit", "DELETE", MAPS, 200),
        ("admin", "GET", roles.as_str(), 200),
        ("edit", "GET", roles.as_str(), 403),
        ("view", "GET", "/api/v1/namespaces/default", 200),
        ("view", "GET", "/api/v1/namespaces/other", 403),
        ("view", "GET", "/api/v1/namespaces", 403),
        ("admin", "GET", "/api/v1/nodes", 403),
    ] {
        let reply = server.call_as(user, &[], method, url, &Value::Null).await;
        assert_eq!(reply.code, code, "{user} {method} {url}: {}", reply.body);
    }
}

/// The body that a row of [`roles_allow_no_escalation`] names.
fn body(words: &str) -> Value {
    let rule = |group: &str, resource: &str, verbs: &[&str]| json!([{"apiGroups": [group], "resources": [resource], "verbs": verbs}]);
    let rules = |name: &str| match name {
        "nodes" => rule("", "nodes", &["get"]),
        "pods" => rule("", "pods", &["get", "list"]),
        "escalate" => rule("rbac.authorization.k8s.io", "roles", &["escalate", "bind"]),
        _ => rule("*", "*", &["*"]),
    };
    let gathers = json!({"clusterRoleSelectors": [{"matchLabels": {"mine": "1"}}]});
    match words.split(' ').collect::<Vec<_>>().as_slice() {
        ["role", name] => role("own", rules(name)),
        ["rules", name] => json!({"rules": rules(name)}),
        ["gathering", "role"] => json!({"metadata": {"name": "g"}, "aggregationRule": gathers}),
        ["gather"] => json!({"aggregationRule": gathers}),
        ["label"] => json!({"metadata": {"labels": {"x": "y"}}}),
        ["subject", name] => json!({"subjects": [{"kind": "User", "name": name}]}),
        [kind, name, user] => binding(&format!("{name}-{user}").to_lowercase(), kind, name, user),
        _ => panic!("{words}"),
    }
}

/// Every path of RBAC by which a namespace's administrator or a writer of cluster roles could gain rights.
#[tokio::test]
async fn roles_allow_no_escalation() {
    let server = server().await;
    for (user, method, path, what, code) in [
        ("admin", "POST", "roles", "role nodes", 403),
        ("admin", "POST", "roles", "role escalate", 403),
        ("admin", "POST", "roles", "role everything", 403),
        ("admin", "POST", "roles", "role pods", 201),
        ("admin", "PATCH", "roles/own", "label", 200),
        ("admin", "PATCH", "roles/own", "rules everything", 403),
        (
            "admin",
            "POST",
            "rolebindings",
            "ClusterRole cluster-admin admin",
            403,
        ),
        (
            "admin",
            "POST",
            "rolebindings",
            "ClusterRole edit friend",
            201,
        ),
        (
            "admin",
            "POST",
            "rolebindings",
            "ClusterRole nosuch admin",
            403,
        ),
        ("admin", "POST", "rolebindings", "Role nosuch admin", 403),
        ("admin", "POST", "rolebindings", "Role own friend", 201),
        (
            "admin",
            "POST",
            "clusterrolebindings",
            "ClusterRole view admin",
            403,
        ),
        ("admin", "POST", "clusterroles", "role pods", 403),
        (
            "edit",
            "POST",
            "rolebindings",
            "ClusterRole view friend",
            403,
        ),
        ("writer", "POST", "clusterroles", "role everything", 403),
        ("writer", "POST", "clusterroles", "gathering role", 403),
        ("writer", "PATCH", "clusterroles/writer", "gather", 403),
        ("writer", "PATCH", "clusterroles/view", "label", 200),
        (
            "writer",
            "POST",
            "clusterrolebindings",
            "ClusterRole nosuch writer",
            403,
        ),
        (
            "writer",
            "POST",
            "clusterrolebindings",
            "ClusterRole cluster-admin writer",
            403,
        ),
        (
            "writer",
            "PATCH",
            "clusterrolebindings/cluster-admin",
            "subject writer",
            403,
        ),
        (
            "writer",
            "PATCH",
            "clusterrolebindings/cluster-admin",
            "label",
            200,
        ),
    ] {
        let url = if path.starts_with("cluster") {
            format!("{RBAC}/{path}")
        } else {
            format!("{RBAC}/namespaces/default/{path}")
        };
        let reply = server.call_as(user, &[], method, &url, &body(what)).await;
        assert_eq!(
            reply.code, code,
            "{user} {method} {path} {what}: {}",
            reply.body
        );
    }
}

/// A field selector counts for authorisation only where it restricts the request.
#[tokio::test]
async fn a_selector_in_the_query_grants_no_rights() {
    let server = Server::with_roles().await;
    let one = json!([{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine"], "verbs": ["create", "list", "deletecollection"]}]);
    let roles = format!("{RBAC}/namespaces/default");
    server
        .ok("POST", &format!("{roles}/roles"), &role("one", one))
        .await;
    let bound = binding("one", "Role", "one", "u");
    server
        .ok("POST", &format!("{roles}/rolebindings"), &bound)
        .await;
    for (method, query, code) in [
        ("GET", "fieldSelector=metadata.name%3Dmine", 200),
        ("GET", "fieldSelector=metadata.name%3Dother", 403),
        ("GET", "", 403),
        ("POST", "fieldSelector=metadata.name%3Dmine", 403),
        ("DELETE", "fieldSelector=metadata.name%3Dmine", 200),
        ("DELETE", "", 403),
    ] {
        let body = json!({"metadata": {"name": "other"}});
        let body = if method == "POST" { body } else { Value::Null };
        let reply = server
            .call_as("u", &[], method, &format!("{MAPS}?{query}"), &body)
            .await;
        assert_eq!(reply.code, code, "{method} {query}");
    }
}

fn request(usages: &[&str]) -> Value {
    use base64::Engine as _;
    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::OrganizationName, "system:nodes");
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "system:node:n");
    let pem = params
        .serialize_request(&rcgen::KeyPair::generate().unwrap())
        .unwrap()
        .pem()
        .unwrap();
    json!({"metadata": {"name": "r"}, "spec": {"signerName": CLIENT, "usages": usages,
        "request": base64::engine::general_purpose::STANDARD.encode(pem)}})
}

/// Approving a request requires `approve` on its signer, issuing requires `sign`. A status write cannot approve.
#[tokio::test]
async fn certificate_requests_need_rights_on_their_signer() {
    let server = Server::with_roles().await;
    let requests = |verbs: &[&str], resource: &str| json!({"apiGroups": ["certificates.k8s.io"], "resources": [resource], "verbs": verbs});
    let signers = |verb: &str, name: &str| json!({"apiGroups": ["certificates.k8s.io"], "resources": ["signers"], "resourceNames": [name], "verbs": [verb]});
    let write = ["get", "update", "patch"];
    for (user, rules) in [
        (
            "weak",
            json!([
                requests(&write, "certificatesigningrequests/approval"),
                requests(&write, "certificatesigningrequests/status")
            ]),
        ),
        (
            "approver",
            json!([
                requests(&write, "certificatesigningrequests/approval"),
                signers("approve", "kubernetes.io/*")
            ]),
        ),
        (
            "signer",
            json!([
                requests(&write, "certificatesigningrequests/status"),
                signers("sign", CLIENT)
            ]),
        ),
    ] {
        server
            .ok("POST", &format!("{RBAC}/clusterroles"), &role(user, rules))
            .await;
        let bound = binding(user, "ClusterRole", user, user);
        server
            .ok("POST", &format!("{RBAC}/clusterrolebindings"), &bound)
            .await;
    }
    server
        .ok(
            "POST",
            CSRS,
            &request(&["digital signature", "client auth"]),
        )
        .await;
    let decision = json!({"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "x", "message": ""}]}});
    let issue = json!({"status": {"certificate": "YQ=="}});
    for (user, sub, body, code) in [
        ("weak", "approval", &decision, 403),
        ("weak", "status", &issue, 403),
        ("approver", "status", &issue, 403),
        ("signer", "approval", &decision, 403),
        // A status write preserves the approval.
        ("signer", "status", &decision, 200),
    ] {
        let reply = server
            .call_as(user, &[], "PATCH", &format!("{CSRS}/r/{sub}"), body)
            .await;
        assert_eq!(reply.code, code, "{user} {sub}: {}", reply.body);
    }
    let conditions = |object: Value| {
        object["status"]["conditions"]
            .as_array()
            .map_or(0, Vec::len)
    };
    assert_eq!(
        conditions(server.ok("GET", &format!("{CSRS}/r"), &Value::Null).await),
        0
    );
    for (user, sub, body) in [
        ("approver", "approval", &decision),
        ("signer", "status", &issue),
    ] {
        let reply = server
            .call_as(user, &[], "PATCH", &format!("{CSRS}/r/{sub}"), body)
            .await;
        assert_eq!(reply.code, 200, "{user} {sub}: {}", reply.body);
    }
    assert_eq!(
        conditions(server.ok("GET", &format!("{CSRS}/r"), &Value::Null).await),
        1
    );
}

#[tokio::test]
async fn reviews_check_their_group_and_tokens_their_audience() {
    let server = Server::with_roles().await;
    let bound = binding("delegates", "ClusterRole", "system:auth-delegator", "d");
    server
        .ok("POST", &format!("{RBAC}/clusterrolebindings"), &bound)
        .await;
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
    let url = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let issue = |audiences: Value| {
        let server = &server;
        async move {
            let request_body = json!({"spec": {"audiences": audiences}});
            let token = server.ok("POST", url, &request_body).await;
            token["status"]["token"].as_str().unwrap().to_owned()
        }
    };
    let (vault, ours) = (
        issue(json!(["vault", "other"])).await,
        issue(json!([])).await,
    );
    for (token, audiences, known, meant) in [
        (
            &ours,
            json!([]),
            true,
            json!(["https://kubernetes.default.svc.cluster.local"]),
        ),
        (&vault, json!([]), false, Value::Null),
        (&vault, json!(["vault", "third"]), true, json!(["vault"])),
        (&ours, json!(["vault"]), false, Value::Null),
    ] {
        let request_body = json!({"spec": {"token": token, "audiences": audiences}});
        let review = server
            .call_as("d", &[], "POST", reviews, &request_body)
            .await;
        assert_eq!(review.code, 201, "{}", review.body);
        let status = &review.body["status"];
        assert_eq!(
            (status["authenticated"] == true, &status["audiences"]),
            (known, &meant),
            "{audiences}"
        );
    }
    assert!(
        server
            .0
            .authenticate(None, Some(&format!("Bearer {vault}")))
            .is_err(),
        "a token for another audience is not accepted"
    );
    let request_body = json!({"spec": {"token": ours}});
    let unauthorized = server
        .call_as("x", &[], "POST", reviews, &request_body)
        .await;
    assert_eq!(unauthorized.code, 403);
}

/// Every verb on every kind, with the credentials of a node, of a bootstrap token and of a service proxy: everything that
/// is not listed is forbidden.
#[tokio::test]
async fn nodes_bootstrap_tokens_and_proxies_have_few_rights() {
    let server = Server::with_roles().await;
    for (name, node) in [("mine", "n1"), ("theirs", "n2")] {
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = json!(node);
        server.ok("POST", PODS, &pod).await;
    }
    let index = server.ok("GET", "/apis", &Value::Null).await;
    let mut versions = vec!["/api/v1".to_owned()];
    for group in index["groups"].as_array().unwrap() {
        for version in group["versions"].as_array().unwrap() {
            let version = version["groupVersion"].as_str().unwrap();
            versions.push(format!("/apis/{version}"));
        }
    }
    let mut allowed: [Vec<String>; 3] = Default::default();
    let users = [
        ("system:node:n1", "system:nodes"),
        ("system:bootstrap:abcdef", "system:bootstrappers"),
        ("system:holdfast:proxy:n1", "holdfast:proxies"),
    ];
    for version in &versions {
        let list = server.ok("GET", version, &Value::Null).await;
        for resource in list["resources"].as_array().unwrap() {
            let full = resource["name"].as_str().unwrap();
            let (plural, sub) = full.split_once('/').unwrap_or((full, ""));
            let namespace = if resource["namespaced"] == true {
                "/namespaces/other"
            } else {
                ""
            };
            let collection = format!("{version}{namespace}/{plural}");
            let object = format!(
                "{collection}/theirs{}{sub}",
                if sub.is_empty() { "" } else { "/" }
            );
            for (method, url) in [
                ("GET", &collection),
                ("POST", &collection),
                ("DELETE", &collection),
                ("GET", &object),
                ("PUT", &object),
                ("PATCH", &object),
                ("DELETE", &object),
                ("POST", &object),
            ] {
                if url == &collection && !sub.is_empty() {
                    continue;
                }
                for (i, (name, group)) in users.iter().enumerate() {
                    let reply = server
                        .call_as(name, &[group], method, url, &json!({}))
                        .await;
                    let nothing_there = reply.body["message"]
                        .to_string()
                        .contains("could not find the requested resource");
                    if !matches!(reply.code, 403 | 405) && !nothing_there {
                        let what = if url == &collection { "all" } else { "one" };
                        allowed[i].push(format!("{method} {what} {full}"));
                    }
                }
            }
        }
    }
    let golden = include_str!("may.txt");
    let mut shown = String::new();
    for ((name, _), list) in users.iter().zip(&mut allowed) {
        list.sort();
        list.dedup();
        shown.push_str(&format!("{name}\n"));
        for line in list {
            shown.push_str(&format!("  {line}\n"));
        }
    }
    assert_eq!(shown, golden, "the rights differ from control/may.txt");
    for (url, code) in [
        (format!("{PODS}/mine"), 200),
        (format!("{PODS}/theirs"), 403),
        (PODS.to_owned(), 403),
        (format!("{PODS}?fieldSelector=spec.nodeName%3Dn1"), 200),
        (format!("{PODS}?fieldSelector=spec.nodeName%3Dn2"), 403),
        ("/api/v1/nodes".to_owned(), 403),
        (
            "/api/v1/nodes?fieldSelector=metadata.name%3Dn1".to_owned(),
            200,
        ),
    ] {
        let reply = server
            .call_as(
                "system:node:n1",
                &["system:nodes"],
                "GET",
                &url,
                &Value::Null,
            )
            .await;
        assert_eq!(reply.code, code, "{url}: {}", reply.body);
    }
}

const NODE: (&str, &[&str]) = ("system:node:n1", &["system:nodes"]);

/// A mirror pod grants its node nothing: the node cannot create one with a reference, and references of
/// an existing one do not count.
#[tokio::test]
async fn a_mirror_pod_grants_no_secret() {
    let server = Server::with_roles().await;
    let secret = json!({"metadata": {"name": "treasure"}, "data": {"k": "dg=="}});
    let secrets = "/api/v1/namespaces/default/secrets";
    server.ok("POST", secrets, &secret).await;
    let node = json!({"metadata": {"name": "n1"}});
    let node = server.ok("POST", "/api/v1/nodes", &node).await;
    let mirror = |name: &str, env: Value| {
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": node["metadata"]["uid"], "controller": true});
        json!({"metadata": {"name": name, "annotations": {"kubernetes.io/config.mirror": "h"}, "ownerReferences": [owner]},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i", "env": env}]}})
    };
    let reference =
        json!([{"name": "X", "valueFrom": {"secretKeyRef": {"name": "treasure", "key": "k"}}}]);
    let (name, groups) = NODE;
    let made = server
        .call_as(name, groups, "POST", PODS, &mirror("p", json!([])))
        .await;
    assert_eq!(made.code, 201, "{}", made.body);
    let refused = server
        .call_as(name, groups, "POST", PODS, &mirror("q", reference.clone()))
        .await;
    assert_eq!(
        (refused.code, refused.body["message"].as_str()),
        (
            403,
            Some("pods \"q\" is forbidden: node \"n1\" can not create pods that reference secrets")
        )
    );
    server.ok("POST", PODS, &mirror("r", reference)).await;
    for url in [
        format!("{secrets}/treasure"),
        format!("{secrets}?fieldSelector=metadata.name%3Dtreasure"),
        "/api/v1/namespaces/default/serviceaccounts/default".to_owned(),
    ] {
        let read = server
            .call_as(name, groups, "GET", &url, &Value::Null)
            .await;
        assert_eq!(read.code, 403, "{url}: {}", read.body);
    }
}

/// Status writes of a node, below its own objects, grant it nothing either (CVE-2025-4563).
#[tokio::test]
async fn a_nodes_status_writes_grant_nothing() {
    let server = Server::with_roles().await;
    let claim = json!({"metadata": {"name": "c"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
    let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
    server.ok("POST", claims, &claim).await;
    let mut own = pod("p");
    own["spec"]["nodeName"] = json!("n1");
    own["spec"]["resourceClaims"] = json!([{"name": "r", "resourceClaimTemplateName": "t"}]);
    own["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
    server.ok("POST", PODS, &own).await;
    let slice = json!({"metadata": {"name": "s"}, "spec": {"nodeName": "n2", "driver": "d", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}}});
    server
        .ok("POST", "/apis/resource.k8s.io/v1/resourceslices", &slice)
        .await;
    let (name, groups) = NODE;
    let (pod, claim) = (format!("{PODS}/p/status"), format!("{claims}/c/status"));
    for (url, body, code) in [
        (&pod, json!({"status": {"phase": "Running"}}), 200),
        (
            &pod,
            json!({"status": {"resourceClaimStatuses": [{"name": "r", "resourceClaimName": "stolen"}]}}),
            403,
        ),
        (
            &pod,
            json!({"status": {"extendedResourceClaimStatus": {"resourceClaimName": "stolen", "requestMappings": []}}}),
            403,
        ),
        (
            &claim,
            json!({"status": {"capacity": {"storage": "2Mi"}}}),
            200,
        ),
        (&claim, json!({"metadata": {"labels": {"a": "b"}}}), 403),
        (
            &claim,
            json!({"metadata": {"annotations": {"a": "b"}}}),
            403,
        ),
        (&claim, json!({"metadata": {"finalizers": ["a/b"]}}), 403),
        (&claim, json!({"metadata": {"finalizers": null}}), 403),
        (&claim, json!({"status": {"phase": "Lost"}}), 403),
    ] {
        let reply = server.call_as(name, groups, "PATCH", url, &body).await;
        assert_eq!(reply.code, code, "{url} {body}: {}", reply.body);
    }
    let mut request = request(&["digital signature", "client auth"]);
    let stolen = server.call_as(name, groups, "POST", CSRS, &request).await;
    assert_eq!(
        stolen.code, 403,
        "the request names another node: {}",
        stolen.body
    );
    request["metadata"]["name"] = json!("own");
    let own = server
        .call_as("system:node:n", groups, "POST", CSRS, &request)
        .await;
    assert_eq!(own.code, 201, "{}", own.body);
}

/// An update that creates an object requires the right to create.
#[tokio::test]
async fn an_update_needs_the_right_to_create() {
    let server = Server::with_roles().await;
    let allow_verbs = |verbs: &[&str]| json!([{"apiGroups": ["", "coordination.k8s.io"], "resources": ["services", "endpoints", "events", "leases"], "verbs": verbs}]);
    let roles = format!("{RBAC}/namespaces/default");
    for (user, verbs) in [
        ("updates", &["update"][..]),
        ("creates", &["update", "create"]),
    ] {
        server
            .ok(
                "POST",
                &format!("{roles}/roles"),
                &role(user, allow_verbs(verbs)),
            )
            .await;
        let bound = binding(user, "Role", user, user);
        server
            .ok("POST", &format!("{roles}/rolebindings"), &bound)
            .await;
    }
    let core = "/api/v1/namespaces/default";
    for (url, more) in [
        (
            format!("{core}/services/x"),
            json!({"spec": {"ports": [{"port": 80}]}}),
        ),
        (format!("{core}/endpoints/x"), json!({})),
        (
            format!("{core}/events/x"),
            json!({"involvedObject": {"namespace": "default"}}),
        ),
        (
            "/apis/coordination.k8s.io/v1/namespaces/default/leases/x".to_owned(),
            json!({"spec": {}}),
        ),
    ] {
        let mut body = json!({"metadata": {"name": "x"}});
        json_patch::merge(&mut body, &more);
        let refused = server.call_as("updates", &[], "PUT", &url, &body).await;
        assert_eq!(refused.code, 403, "{url}: {}", refused.body);
        let why = refused.body["message"].as_str().unwrap();
        assert!(
            why.contains("User \"updates\" cannot create resource"),
            "{why}"
        );
        let made = server.call_as("creates", &[], "PUT", &url, &body).await;
        assert_eq!(made.code, 201, "{url}: {}", made.body);
        body["metadata"]["resourceVersion"] = made.body["metadata"]["resourceVersion"].clone();
        let changed = server.call_as("updates", &[], "PUT", &url, &body).await;
        assert_eq!(changed.code, 200, "{url}: {}", changed.body);
    }
}

/// The node proxy presents its certificate to any address in a Node's status. The certificate may call
/// agents and grants nothing on this API.
#[tokio::test]
async fn the_front_proxys_certificate_is_not_accepted() {
    let server = Server::with_roles().await;
    let proxy = holdfast_control::api::rbac::NODE_CLIENT;
    for (method, url, code) in [
        ("GET", "/api/v1/secrets", 403),
        ("PUT", "/api/v1/nodes/n/status", 403),
        ("GET", PODS, 403),
        ("DELETE", "/api/v1/nodes/n", 403),
        (
            "POST",
            "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            403,
        ),
    ] {
        let reply = server.call_as(proxy, &[], method, url, &json!({})).await;
        assert_eq!(reply.code, code, "{method} {url}: {}", reply.body);
    }
}
