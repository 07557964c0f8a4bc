//! Random changes to requests: every request is answered, and typed clients can decode all stored
//! objects. `HOLDFAST_FUZZ_SECONDS` is the time for each target (5), `HOLDFAST_SEED` the first seed.

use std::time::{Duration, Instant};

use holdfast_core::node::signing;
use serde_json::{Value, json};

use crate::server::{MAPS, MERGE, PODS, Reply, STRATEGIC, Server, pod};

/// Deterministic randomness (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % most.max(1) as u64).unwrap()
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// Calls `attempt` with new seeds until the time is over.
async fn fuzz(mut attempt: impl AsyncFnMut(&mut Random)) {
    let end = Instant::now() + Duration::from_secs(number("HOLDFAST_FUZZ_SECONDS", 5));
    let mut seed = number("HOLDFAST_SEED", 1);
    while Instant::now() < end {
        // Shown only if the test fails: this seed reproduces the failure.
        println!("HOLDFAST_SEED={seed}");
        attempt(&mut Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)).await;
        seed += 1;
    }
}

/// Changes, removes or duplicates a few bytes.
fn mutate_bytes(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(5) {
            0 if !bytes.is_empty() => bytes[at] = u8::try_from(random.below(256)).unwrap(),
            1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            2 => bytes.truncate(at),
            3 => {
                let part = bytes[at..].to_vec();
                bytes.extend(part.into_iter().take(64));
            }
            _ => bytes.insert(at, *random.of(b"0\xff\x80{}[],:\"")),
        }
    }
    bytes
}

fn odd(random: &mut Random) -> Value {
    let odd = [
        Value::Null,
        json!(-1),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e300),
        json!(300_000_000_000_i64),
        json!(""),
        json!("\u{0}/../%2f"),
        json!([]),
        json!([null]),
        json!({}),
        json!({"": null}),
        json!("9999999999999999999999Ei"),
        json!("9999-12-31T23:59:59Z"),
        json!(true),
    ];
    random.of(&odd).clone()
}

/// Replaces one value somewhere in an object with an unusual one, or adds a field.
fn mutate(random: &mut Random, value: &mut Value) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = random.of(&keys).clone();
            match random.below(6) {
                0 => drop(map.insert(key, odd(random))),
                1 => drop(map.remove(&key)),
                2 => drop(map.insert("extra".into(), odd(random))),
                _ => map
                    .get_mut(&key)
                    .into_iter()
                    .for_each(|v| mutate(random, v)),
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let at = random.below(items.len());
            mutate(random, &mut items[at]);
        }
        other => *other = odd(random),
    }
}

/// Checks that every stored object can be decoded as its type.
async fn readable(server: &Server) {
    let list = |url: &'static str| async move { server.ok("GET", url, &Value::Null).await };
    serde_json::from_value::<k8s_openapi::List<k8s_openapi::api::core::v1::Pod>>(
        list("/api/v1/pods").await,
    )
    .expect("pods");
    serde_json::from_value::<k8s_openapi::List<k8s_openapi::api::apps::v1::Deployment>>(
        list("/apis/apps/v1/deployments").await,
    )
    .expect("deployments");
    serde_json::from_value::<k8s_openapi::List<k8s_openapi::api::core::v1::ConfigMap>>(
        list("/api/v1/configmaps").await,
    )
    .expect("config maps");
}

/// Whether a request is answered properly: no 5xx, or a 500 that kube-apiserver also returns for the same mistake.
fn refused(reply: &Reply) -> bool {
    let message = reply.body["message"].to_string();
    let as_upstream = [
        "resourceVersion should not be set",
        "patch type",
        "merge key",
    ];
    reply.code < 500 || reply.code == 500 && as_upstream.iter().any(|words| message.contains(words))
}

fn corpus() -> Vec<(&'static str, Value)> {
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let mut full = pod("p");
    full["spec"]["tolerations"] =
        json!([{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}]);
    full["spec"]["terminationGracePeriodSeconds"] = json!(1);
    full["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
    full["spec"]["containers"][0]["livenessProbe"] = json!({"httpGet": {"port": 80}});
    full["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {"sizeLimit": "1Mi"}}]);
    let template = json!({"metadata": {"labels": {"a": "1"}}, "spec": pod("x")["spec"]});
    vec![
        (PODS, full),
        (
            MAPS,
            json!({"metadata": {"name": "m", "labels": {"a": "b"}}, "data": {"k": "v"}, "binaryData": {"b": "YQ=="}}),
        ),
        (
            deployments,
            json!({"metadata": {"name": "d"}, "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "1"}}, "template": template,
            "strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}}}}),
        ),
    ]
}

#[tokio::test]
async fn mutated_objects_are_refused_or_readable() {
    let server = Server::new().await;
    fuzz(async |random| {
        let (url, mut object) = random.of(&corpus()).clone();
        for _ in 0..=random.below(3) {
            mutate(random, &mut object);
        }
        let name = object["metadata"]["name"]
            .as_str()
            .unwrap_or("x")
            .to_owned();
        let reply = server.call("POST", url, &object).await;
        assert!(refused(&reply), "{object}: {}", reply.body);
        if reply.code == 201 {
            readable(&server).await;
            let grace = odd(random);
            let own = format!("{url}/{name}");
            let deleted = server
                .call("DELETE", &own, &json!({"gracePeriodSeconds": grace}))
                .await;
            assert!(deleted.code < 500, "{grace}: {}", deleted.body);
            server
                .call("DELETE", &own, &json!({"gracePeriodSeconds": 0}))
                .await;
        }
    })
    .await;
}

#[tokio::test]
async fn mutated_patches_are_refused_or_readable() {
    let server = Server::new().await;
    for (url, object) in corpus() {
        server.ok("POST", url, &object).await;
    }
    fuzz(async |random| {
        let (url, mut object) = random.of(&corpus()).clone();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let (kind, patch) = match random.below(3) {
            0 => {
                let paths = ["", "/spec", "/metadata", "/metadata/labels", "/spec/containers/0", "/spec/containers/-", "/data/k", "/x/y"];
                let mut operation = || json!({"op": random.of(&["add", "remove", "replace", "move", "copy", "test"]), "from": random.of(&paths), "path": random.of(&paths), "value": odd(random)});
                ("application/json-patch+json", json!([operation(), operation(), operation()]))
            }
            other => {
                mutate(random, &mut object);
                (if other == 1 { MERGE } else { STRATEGIC }, object)
            }
        };
        let reply = server.patch(&format!("{url}/{name}"), kind, patch.clone()).await;
        assert!(refused(&reply), "{patch}: {}", reply.body);
        if reply.code == 200 {
            readable(&server).await;
        }
    })
    .await;
}

#[tokio::test]
async fn mutated_bytes_and_queries_get_a_response() {
    let server = Server::new().await;
    let mut envelope = b"k8s\0".to_vec();
    // A TypeMeta (v1, Pod), and a pod with a name and a label.
    envelope.extend(b"\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x17\x0a\x15\x0a\x01p\x5a\x06\x0a\x01a\x12\x01b\x62\x08\x0a\x02cc\x12\x02dd");
    let json = corpus()[0].1.to_string().into_bytes();
    let bodies = [
        ("application/vnd.kubernetes.protobuf", envelope),
        ("application/json", json.clone()),
        ("application/yaml", json),
    ];
    let queries = [
        "labelSelector=a in (b,c),!d,e notin (f)&fieldSelector=metadata.name=x",
        "watch=true&timeoutSeconds=1&resourceVersion=1&allowWatchBookmarks=true",
        "limit=2&continue=eyJydiI6MX0&resourceVersionMatch=Exact",
        "gracePeriodSeconds=1&propagationPolicy=Foreground&dryRun=All",
    ];
    fuzz(async |random| {
        let (kind, body) = random.of(&bodies);
        let mut request = Server::request("POST", PODS, kind, mutate_bytes(random, body));
        let reply = server.send(request).await;
        assert!(refused(&reply), "{}", reply.body);
        let query = random.of(&queries).as_bytes();
        let query = mutate_bytes(random, query);
        let url = format!("{MAPS}?{}", String::from_utf8_lossy(&query));
        request = Server::request(["GET", "DELETE"][random.below(2)], &url, "", vec![]);
        if let holdfast_control::api::Answer::Body { code, body, .. } =
            server.0.answer(request).await
        {
            assert!(
                code < 500 || code == 504,
                "{url}: {}",
                String::from_utf8_lossy(&body)
            );
        }
    })
    .await;
}

#[tokio::test]
async fn mutated_credentials_are_refused() {
    let server = Server::new().await;
    let url = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let token = server.ok("POST", url, &json!({"spec": {}})).await["status"]["token"]
        .as_str()
        .unwrap()
        .to_owned();
    let mut params = rcgen::CertificateParams::new(vec!["n".to_owned()]).unwrap();
    params
        .distinguished_name
        .push(rcgen::DnType::OrganizationName, "system:nodes");
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "system:node:n");
    let key = rcgen::KeyPair::generate().unwrap();
    let request = params.serialize_request(&key).unwrap().der().to_vec();
    let certificate = params.self_signed(&key).unwrap().der().to_vec();
    fuzz(async |random| {
        let other = String::from_utf8_lossy(&mutate_bytes(random, token.as_bytes())).into_owned();
        if other != token {
            let user = server
                .0
                .authenticate(None, Some(&format!("Bearer {other}")));
            // A request without a token is anonymous, which is no error.
            let known = user.is_ok_and(|u| !u.is_in("system:unauthenticated"));
            assert!(!known, "{other}");
        }
        // Parsing must never panic.
        let _ = signing::parse_request(&mutate_bytes(random, &request));
        let _ = signing::subject(&mutate_bytes(random, &certificate));
    })
    .await;
}
