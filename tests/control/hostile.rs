//! Requests that no reasonable client sends.

use std::time::Duration;

use holdfast_control::api::{Answer, Request};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::server::{MAPS, MERGE, PODS, STRATEGIC, Server};

/// Random bytes and paths are rejected, never with an unintended 5xx and never with a panic.
#[tokio::test]
async fn hostile_requests_get_a_response() {
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

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const SERVICES: &str = "/api/v1/namespaces/default/services";

/// An object that exists before a request, and the request: user, method, URL and body. In a URL `NAME`
/// is the object's name.
struct Case {
    existing: Option<(&'static str, Value)>,
    user: &'static str,
    method: &'static str,
    url: String,
    kind: &'static str,
    body: Value,
}

impl Case {
    fn new(method: &'static str, url: impl Into<String>, body: Value) -> Case {
        Case {
            existing: None,
            user: "root",
            method,
            url: url.into(),
            kind: if method == "PATCH" {
                STRATEGIC
            } else {
                "application/json"
            },
            body,
        }
    }

    fn of(self, url: &'static str, object: Value) -> Case {
        Case {
            existing: Some((url, object)),
            ..self
        }
    }
}

fn words(kind: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{kind}{i:06}")).collect()
}

fn list(count: usize, item: impl Fn(usize) -> Value) -> Value {
    (0..count).map(item).collect()
}

fn rules(words: impl Fn(&str) -> Vec<String>) -> Value {
    json!([{"verbs": words("v"), "apiGroups": words("g"), "resources": words("r"), "resourceNames": words("n")}])
}

fn pod_of(spec: Value) -> Value {
    let mut pod = json!({"metadata": {"name": "NAME"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    for (key, value) in spec.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    pod
}

/// Writes of lists that are merged, compared or checked element by element.
fn writes(n: usize) -> Vec<(&'static str, Case)> {
    let role = |rules: Value| Case {
        user: "admin",
        ..Case::new(
            "POST",
            format!("{RBAC}/namespaces/default/roles"),
            json!({"metadata": {"name": "r"}, "rules": rules}),
        )
    };
    let finalizers = |kind: &str| json!({"metadata": {"name": "NAME", "finalizers": words(&format!("e.com/{kind}"), n)}});
    let env = |kind: &str| json!({"spec": {"containers": [{"name": "c", "image": "i", "env": list(n, |i| json!({"name": format!("{kind}{i}"), "value": "x"}))}]}});
    let mut with_env = env("a");
    with_env["metadata"] = json!({"name": "NAME"});
    let ports = |from: usize| {
        json!({"metadata": {"name": "NAME"},
        "spec": {"selector": {"a": "b"}, "ports": list(n, |i| json!({"name": format!("p{i}"), "port": from + i}))}})
    };
    let tolerations = |kind: &str| json!({"tolerations": list(n, |i| json!({"key": format!("{kind}{i}"), "operator": "Exists"}))});
    let statuses = |state: Value| {
        json!({"containerStatuses": list(n, |i| json!({"name": format!("c{i}"), "ready": false, "restartCount": 0, "image": "i", "imageID": "i", "state": state})),
        "podIPs": list(n, |i| json!({"ip": format!("x{i}")}))})
    };
    let append = list(
        n,
        |i| json!({"op": "add", "path": "/data/k", "value": i.to_string()}),
    );
    vec![
        ("a role of repeated words", role(rules(|_| vec!["get".into(); n / 10]))),
        ("a role of words that are not held", role(rules(|kind| words(kind, n)))),
        ("a role of many rules", role(list(n, |i| json!({"verbs": ["get"], "apiGroups": [""], "resources": [format!("r{i}")]})))),
        ("finalizers", Case::new("PATCH", format!("{MAPS}/NAME?dryRun=All"), finalizers("b")).of(MAPS, finalizers("a"))),
        ("a keyed list", Case::new("PATCH", format!("{PODS}/NAME?dryRun=All"), env("b")).of(PODS, with_env)),
        ("ports of a service", Case::new("PATCH", format!("{SERVICES}/NAME?dryRun=All"), ports(2)).of(SERVICES, ports(1))),
        ("tolerations", Case::new("PATCH", format!("{PODS}/NAME?dryRun=All"), json!({"spec": tolerations("b")})).of(PODS, pod_of(tolerations("a")))),
        ("a pod's status", Case::new("PATCH", format!("{PODS}/NAME/status?dryRun=All"), json!({"status": statuses(json!({"running": {}}))})).of(PODS, pod_of(json!({})))),
        ("ephemeral containers", Case::new("PATCH", format!("{PODS}/NAME/ephemeralcontainers?dryRun=All"),
            json!({"spec": {"ephemeralContainers": list(n, |i| json!({"name": format!("e{i}"), "image": "i", "targetContainerName": "c"}))}})).of(PODS, pod_of(json!({})))),
        ("operations", Case { kind: "application/json-patch+json", ..Case::new("PATCH", format!("{MAPS}/NAME?dryRun=All"), append) }
            .of(MAPS, json!({"metadata": {"name": "NAME"}, "data": {"k": "v"}}))),
        ("keys of a merge", Case { kind: MERGE, ..Case::new("PATCH", format!("{MAPS}/NAME?dryRun=All"),
            json!({"data": words("k", n).into_iter().map(|k| (k, json!("v"))).collect::<serde_json::Map<_, _>>()})) }
            .of(MAPS, json!({"metadata": {"name": "NAME"}}))),
        ("mistakes", Case::new("POST", MAPS, json!({"metadata": {"name": "m",
            "labels": words("a/b/", n).into_iter().map(|k| (k, json!("/"))).collect::<serde_json::Map<_, _>>()}}))),
        ("unknown fields", Case::new("POST", format!("{MAPS}?fieldValidation=Ignore&dryRun=All"), Value::Object(words("x", n).into_iter().map(|k| (k, json!(1)))
            .chain([("metadata".to_owned(), json!({"name": "u"}))]).collect()))),
    ]
}

/// Reads with long lists in their options.
fn reads(n: usize) -> Vec<(&'static str, Case)> {
    let sidecars = list(
        n,
        |i| json!({"name": format!("s{i}"), "image": "i", "restartPolicy": "Always"}),
    );
    let values = words("v", n).join(",");
    vec![
        (
            "values of a selector",
            Case::new(
                "GET",
                format!("{PODS}?labelSelector=a in ({values})"),
                Value::Null,
            ),
        ),
        (
            "a table of sidecars",
            Case::new("GET", format!("{PODS}/NAME"), Value::Null)
                .of(PODS, pod_of(json!({"initContainers": sidecars}))),
        ),
        (
            "groups of a review",
            Case::new(
                "POST",
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                json!({"spec": {"user": "u", "groups": words("g", n),
            "resourceAttributes": {"verb": "get", "resource": "pods"}}}),
            ),
        ),
        (
            "audiences of a review",
            Case::new(
                "POST",
                "/apis/authentication.k8s.io/v1/tokenreviews",
                json!({"spec": {"token": "a.b.c", "audiences": words("a", n)}}),
            ),
        ),
    ]
}

impl Server {
    /// The CPU time that a request takes on this thread (the smaller of two attempts), and the status code.
    async fn cost(&self, case: Case, name: &str) -> (Duration, u16) {
        if let Some((url, object)) = &case.existing {
            let object = object.to_string().replace("NAME", name);
            let reply = self
                .send(Server::request(
                    "POST",
                    url,
                    "application/json",
                    object.into_bytes(),
                ))
                .await;
            assert_eq!(reply.code, 201, "{}", reply.body);
        }
        let (mut least, mut code) = (Duration::MAX, 0);
        for _ in 0..2 {
            let body = match &case.body {
                Value::Null => vec![],
                body => body.to_string().replace("NAME", name).into_bytes(),
            };
            let url = case.url.replace("NAME", name);
            let mut request = Server::request(case.method, &url, case.kind, body);
            request.accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json".into();
            if case.user != "root" {
                request.user.name = case.user.into();
                request.user.groups = vec!["system:authenticated".into()];
            }
            let time = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
            let begun = time();
            let Answer::Body { code: is, .. } = self.0.answer(request).await else {
                panic!("answered with a watch");
            };
            least = least.min(time() - begun);
            code = is;
        }
        (least, code)
    }
}

/// A list that is eight times as long takes about eight times as long, not 64 times. Regression: four
/// lists of 38 repeated words (38⁴ combinations) took four seconds, and so did 20,000 finalizers.
#[tokio::test]
async fn the_cost_of_a_list_is_linear_in_its_length() {
    const LONG: usize = 8;
    let server = Server::with_roles().await;
    let binding = json!({"metadata": {"name": "admin"}, "roleRef": {"kind": "ClusterRole", "name": "admin"},
        "subjects": [{"kind": "User", "name": "admin"}]});
    server
        .ok(
            "POST",
            &format!("{RBAC}/namespaces/default/rolebindings"),
            &binding,
        )
        .await;
    let all = |n| writes(n).into_iter().chain(reads(n));
    for (i, ((what, few), (_, many))) in all(300).zip(all(300 * LONG)).enumerate() {
        let (short, first) = server.cost(few, &format!("few-{i}")).await;
        let (long, second) = server.cost(many, &format!("many-{i}")).await;
        assert!(first < 500 && second < 500, "{what}: {first} {second}");
        // Constant costs make the ratio smaller than eight, noise makes it larger.
        let bound = short * 24 + Duration::from_millis(50);
        assert!(
            long < bound,
            "{what}: {short:?}, and {long:?} for {LONG} times as much"
        );
    }
}

/// Complete requests that once blocked the whole server: each is answered, and the message names the
/// limit if there is one.
#[tokio::test]
async fn requests_that_cost_too_much_get_the_limit() {
    let server = Server::new().await;
    let map = json!({"metadata": {"name": "m"}});
    server.ok("POST", MAPS, &map).await;
    let numbers = json!({"op": "add", "path": "/x", "value": vec![1; 200_000]});
    let insert = |_| json!({"op": "add", "path": "/x/0", "value": 0});
    let operations: Value = std::iter::once(numbers)
        .chain((0..9_999).map(insert))
        .collect();
    let reply = server
        .patch(
            &format!("{MAPS}/m"),
            "application/json-patch+json",
            operations,
        )
        .await;
    assert_eq!(reply.code, 413, "{}", reply.body);
    let message = reply.body["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("list elements, the limit is 8000000"),
        "{message}"
    );
}

/// A slow request runs on its own thread, so that the only worker stays responsive.
#[tokio::test]
async fn a_large_request_does_not_block_a_worker() {
    let server = Server::new().await;
    let data: serde_json::Map<_, _> = words("k", 30_000)
        .into_iter()
        .map(|k| (k, json!("value")))
        .collect();
    let map = json!({"metadata": {"name": "m"}, "data": data}).to_string();
    let request = |body: &str| {
        Server::request(
            "POST",
            &format!("{MAPS}?dryRun=All"),
            "application/json",
            body.as_bytes().to_vec(),
        )
    };
    // How often the worker can do other work until a request is answered.
    let count_yields = async |answer: &mut (dyn Future<Output = Answer> + Unpin)| {
        let mut count = 0_u64;
        let code = loop {
            tokio::select! {
                biased;
                answer = &mut *answer => match answer {
                    Answer::Body { code, .. } => break code,
                    Answer::Watch(_) => panic!("answered with a watch"),
                },
                () = tokio::task::yield_now() => count += 1,
            }
        };
        (code, count)
    };
    let direct = |request: Request| Box::pin(server.0.answer(request));
    let offloaded = |request: Request| Box::pin(server.0.answer_offloaded(request));
    assert_eq!(
        count_yields(&mut direct(request(&map))).await,
        (201, 0),
        "the small request for comparison"
    );
    let (code, count) = count_yields(&mut offloaded(request(&map))).await;
    assert!(code == 201 && count > 10, "{code}, {count} turns");
    // A small one is answered immediately.
    let small = json!({"metadata": {"name": "small"}}).to_string();
    assert_eq!(
        count_yields(&mut offloaded(request(&small))).await,
        (201, 0)
    );
}
