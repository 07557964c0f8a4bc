//! Ingresses, their classes, and the objects of service addresses.

use serde_json::{Value, json};

use crate::server::{MERGE, Server};

const CLASSES: &str = "/apis/networking.k8s.io/v1/ingressclasses";
const INGRESSES: &str = "/apis/networking.k8s.io/v1/namespaces/default/ingresses";

fn ingress(name: &str, more: &Value) -> Value {
    let backend = json!({"service": {"name": "web", "port": {"number": 80}}});
    let paths = json!([{"path": "/", "pathType": "Prefix", "backend": backend}]);
    let mut ingress = json!({"metadata": {"name": name}, "spec": {"rules": [{"host": "a.example", "http": {"paths": paths}}]}});
    json_patch::merge(&mut ingress, more);
    ingress
}

#[tokio::test]
async fn ingresses_get_the_default_class() {
    let server = Server::new().await;
    let create = async |name: &str, more: Value| {
        let created = server.ok("POST", INGRESSES, &ingress(name, &more)).await;
        created["spec"]["ingressClassName"].clone()
    };
    assert_eq!(create("none", json!({})).await, Value::Null);
    let annotations = json!({"ingressclass.kubernetes.io/is-default-class": "true"});
    for (name, annotations) in [("edge", annotations), ("other", json!({}))] {
        let class = json!({"metadata": {"name": name, "annotations": annotations}, "spec": {"controller": "c.example/edge"}});
        server.ok("POST", CLASSES, &class).await;
    }
    assert_eq!(create("default", json!({})).await, "edge");
    let named = json!({"spec": {"ingressClassName": "other"}});
    assert_eq!(create("named", named).await, "other");
    let annotated = json!({"metadata": {"annotations": {"kubernetes.io/ingress.class": "old"}}});
    assert_eq!(create("annotated", annotated).await, Value::Null);
}

#[tokio::test]
async fn an_ingress_controller_writes_addresses() {
    let server = Server::new().await;
    let created = server
        .ok("POST", INGRESSES, &ingress("web", &json!({})))
        .await;
    assert_eq!(created["metadata"]["generation"], 1);
    assert_eq!(created["status"], json!({"loadBalancer": {}}));
    let url = format!("{INGRESSES}/web/status");
    let status = |point: Value| json!({"status": {"loadBalancer": {"ingress": [point]}}});
    let refused = server
        .patch(&url, MERGE, status(json!({"ip": "nowhere"})))
        .await;
    assert_eq!(refused.code, 422, "{:?}", refused.body);
    let point = json!({"ip": "10.0.0.1", "ports": [{"port": 80, "protocol": "TCP"}]});
    let written = server.patch(&url, MERGE, status(point.clone())).await;
    assert_eq!(written.code, 200, "{:?}", written.body);
    let stored = server
        .ok("GET", &format!("{INGRESSES}/web"), &Value::Null)
        .await;
    assert_eq!(stored["status"]["loadBalancer"]["ingress"][0], point);
    assert_eq!(stored["metadata"]["generation"], 1);
}

#[tokio::test]
async fn ranges_and_addresses_without_effect_cause_warnings() {
    let server = Server::new().await;
    let group = "/apis/networking.k8s.io/v1";
    let parent = json!({"resource": "services", "namespace": "default", "name": "web"});
    for (plural, name, spec) in [
        ("servicecidrs", "more", json!({"cidrs": ["10.97.0.0/24"]})),
        ("ipaddresses", "10.97.0.7", json!({"parentRef": parent})),
    ] {
        let object = json!({"metadata": {"name": name}, "spec": spec});
        let created = server
            .call("POST", &format!("{group}/{plural}"), &object)
            .await;
        assert_eq!(created.code, 201, "{:?}", created.body);
        let [warning] = &created.warnings[..] else {
            panic!("{:?}", created.warnings);
        };
        assert!(warning.contains("stored but not enforced"), "{warning}");
    }
    let name = json!({"metadata": {"name": "web"}, "spec": {"parentRef": parent}});
    let refused = server
        .call("POST", &format!("{group}/ipaddresses"), &name)
        .await;
    assert_eq!(refused.code, 422, "{:?}", refused.body);
}
