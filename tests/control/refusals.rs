//! Rejections: code, reason and message.

use serde_json::{Value, json};

use crate::server::{MAPS, PODS, Server, pod};

#[tokio::test]
async fn refusals_have_the_right_code_reason_and_message() {
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

/// The resources of a whole pod and of its containers must match, at creation and after a resize.
#[tokio::test]
async fn pod_level_resources_are_no_less_than_the_containers() {
    let server = Server::new().await;
    let sized = |name: &str, whole: Value, one: Value| {
        let containers = json!([{"name": "a", "image": "i", "resources": one}, {"name": "b", "image": "i", "resources": one}]);
        json!({"metadata": {"name": name}, "spec": {"resources": whole, "containers": containers}})
    };
    let cpu = |side: &str, amount: &str| json!({side: {"cpu": amount}});
    let cases = [
        (
            cpu("requests", "1"),
            cpu("requests", "600m"),
            "spec.resources.requests[cpu]: Invalid value: \"1\": must be greater than or equal to aggregate container requests of 1200m",
        ),
        (
            cpu("limits", "1"),
            cpu("limits", "2"),
            "spec.containers[1].resources.limits[cpu]: Invalid value: \"2\": must be less than or equal to pod limits of 1",
        ),
        (
            json!({"requests": {"example.com/thing": "1"}}),
            json!({}),
            "spec.resources.requests[example.com/thing]",
        ),
    ];
    for (whole, one, expected) in cases {
        let body = sized("refused", whole, one);
        let reply = server.call("POST", PODS, &body).await;
        let message = reply.body["message"].as_str().unwrap_or_default();
        assert_eq!(
            (reply.code, message.contains(expected)),
            (422, true),
            "{message}"
        );
    }
    let fits = sized("fits", cpu("requests", "2"), cpu("requests", "500m"));
    server.ok("POST", PODS, &fits).await;
    let less = json!({"spec": {"resources": {"requests": {"cpu": "800m"}}}});
    let path = format!("{PODS}/fits/resize");
    let kind = "application/merge-patch+json";
    let reply = server.patch(&path, kind, less).await;
    let message = reply.body["message"].as_str().unwrap_or_default();
    let fits = message.contains("aggregate container requests of 1");
    assert_eq!((reply.code, fits), (422, true), "{message}");
}
