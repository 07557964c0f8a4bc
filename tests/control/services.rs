//! Services: addresses and ports that the API allocates, and the endpoints that the controllers write.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::StreamExt as _;
use holdfast_control::store::Store;
use k8s_openapi::api::core::v1::{Endpoints, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{
    DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::jobs::Plane;
use crate::server::{MERGE, Server};

const SERVICES: &str = "/api/v1/namespaces/default/services";

fn service(name: &str, more: Value) -> Value {
    let mut service = json!({"metadata": {"name": name}, "spec": {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}});
    for (key, value) in more.as_object().unwrap() {
        service["spec"][key] = value.clone();
    }
    service
}

/// Type, policy, families and the number of addresses of a service.
fn families(service: &Value) -> String {
    let spec = &service["spec"];
    let words = |key: &str| {
        let all = spec[key].as_array().into_iter().flatten();
        all.filter_map(Value::as_str).collect::<Vec<_>>()
    };
    let ips = words("clusterIPs");
    if let Some(first) = ips.first() {
        assert_eq!(spec["clusterIP"], *first);
    }
    let policy = spec["ipFamilyPolicy"].as_str().unwrap_or_default();
    format!("{policy} {} {}", words("ipFamilies").join("+"), ips.len())
}

#[tokio::test]
async fn services_have_one_or_two_families() {
    let ranges = "10.96.0.0/16,fd00:10:96::/108";
    let server = Server::with_ranges(Store::in_memory(), ranges)
        .prepared()
        .await;
    let policy = |policy: &str| json!({"ipFamilyPolicy": policy});
    for (name, more, expected) in [
        ("one", json!({}), "SingleStack IPv4 1"),
        ("six", json!({"ipFamilies": ["IPv6"]}), "SingleStack IPv6 1"),
        (
            "two",
            policy("RequireDualStack"),
            "RequireDualStack IPv4+IPv6 2",
        ),
        (
            "own",
            json!({"ipFamilyPolicy": "PreferDualStack", "clusterIP": "10.96.0.77"}),
            "PreferDualStack IPv4+IPv6 2",
        ),
        ("none", json!({"clusterIP": "None"}), "SingleStack IPv4 1"),
    ] {
        let made = server.ok("POST", SERVICES, &service(name, more)).await;
        assert_eq!(families(&made), expected, "{name}");
    }
    // An update adds the second family, and releases it on request only.
    for (patch, code, expected) in [
        (
            policy("PreferDualStack"),
            200,
            "PreferDualStack IPv4+IPv6 2",
        ),
        (json!({"ipFamilies": ["IPv4"]}), 422, ""),
        (json!({"clusterIPs": ["10.96.0.1"]}), 422, ""),
        (policy("SingleStack"), 200, "SingleStack IPv4 1"),
        (json!({"ipFamilies": ["IPv6"]}), 422, ""),
    ] {
        let url = format!("{SERVICES}/one");
        let reply = server.patch(&url, MERGE, json!({"spec": patch})).await;
        assert_eq!(reply.code, code, "{patch}: {}", reply.body);
        if code == 200 {
            assert_eq!(families(&reply.body), expected, "{patch}");
        }
    }
    let taken = service("again", json!({"clusterIP": "10.96.0.77"}));
    let reply = server.call("POST", SERVICES, &taken).await;
    let why = "failed to allocate IP 10.96.0.77: provided IP is already allocated";
    assert_eq!(reply.code, 422);
    assert!(
        reply.body["message"].as_str().unwrap().contains(why),
        "{}",
        reply.body
    );
    server
        .ok("DELETE", &format!("{SERVICES}/own"), &Value::Null)
        .await;
    server.ok("POST", SERVICES, &taken).await;
}

/// Concurrent writes get different values, also after a restart of the API.
#[tokio::test]
async fn no_value_is_allocated_twice() {
    let store = Store::in_memory();
    let mut servers = vec![Server::new_over(store.clone()).await];
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for round in 0..3 {
        let server = servers.last().unwrap();
        let made = (0..50).map(|i| async move {
            let balanced = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local"});
            let one = service(&format!("s{round}-{i}"), balanced);
            server.ok("POST", SERVICES, &one).await
        });
        for made in futures::future::join_all(made).await {
            let spec = &made["spec"];
            for value in [
                &spec["clusterIP"],
                &spec["ports"][0]["nodePort"],
                &spec["healthCheckNodePort"],
            ] {
                assert!(!value.is_null(), "{made}");
                assert!(seen.insert(value.to_string()), "{value} twice");
            }
        }
        servers.push(Server::over(store.clone()));
    }
    // Ports with the same number share a node port.
    let both = json!({"type": "NodePort", "ports": [{"name": "u", "port": 53, "protocol": "UDP"}, {"name": "t", "port": 53}]});
    let made = servers[3].ok("POST", SERVICES, &service("dns", both)).await;
    let ports = &made["spec"]["ports"];
    assert_eq!(ports[0]["nodePort"], ports[1]["nodePort"]);
    assert!(ports[0]["nodePort"].is_number());
    // The health check port cannot be changed, and is released with the type.
    let url = format!("{SERVICES}/s0-0");
    for (patch, code) in [
        (json!({"healthCheckNodePort": 30_000}), 422),
        (json!({"type": "ClusterIP"}), 200),
    ] {
        let reply = servers[3].patch(&url, MERGE, json!({"spec": patch})).await;
        assert_eq!(reply.code, code, "{patch}: {}", reply.body);
    }
    let plain = servers[3].ok("GET", &url, &Value::Null).await;
    for key in [
        "healthCheckNodePort",
        "externalTrafficPolicy",
        "allocateLoadBalancerNodePorts",
    ] {
        assert_eq!(plain["spec"].get(key), None, "{plain}");
    }
}

async fn node(plane: &Plane, name: &str, zone: &str) {
    let nodes: Api<Node> = Api::all(plane.client.clone());
    let labels = json!({"topology.kubernetes.io/zone": zone});
    let node = json!({"metadata": {"name": name, "labels": labels}});
    let node = serde_json::from_value(node).unwrap();
    nodes.create(&PostParams::default(), &node).await.unwrap();
}

async fn pod(plane: &Plane, name: &str, ip: &str) {
    let pod = json!({"metadata": {"name": name, "labels": {"app": "web"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i:1"}]}});
    plane.create::<Pod>(pod).await;
    ready(plane, name, ip, true).await;
}

async fn ready(plane: &Plane, name: &str, ip: &str, ready: bool) {
    let status = if ready { "True" } else { "False" };
    let status = json!({"phase": "Running", "hostIP": "192.0.2.1", "hostIPs": [{"ip": "192.0.2.1"}], "podIP": ip, "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": status, "lastTransitionTime": jiff::Timestamp::now().to_string()}]});
    let patch = Patch::Merge(json!({"status": status}));
    let pods = plane.api::<Pod>();
    pods.patch_status(name, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

async fn slices(plane: &Plane, service: &str) -> Vec<EndpointSlice> {
    let of = ListParams::default().labels(&format!("kubernetes.io/service-name={service}"));
    plane.api::<EndpointSlice>().list(&of).await.unwrap().items
}

/// The endpoints of a service as `pod=ready`.
fn shown(slices: &[EndpointSlice]) -> String {
    let all = slices.iter().flat_map(|s| s.endpoints.iter().flatten());
    let one = |e: &k8s_openapi::api::discovery::v1::Endpoint| {
        let target = e.target_ref.as_ref().and_then(|t| t.name.clone());
        let name = target.unwrap_or_else(|| e.addresses[0].clone());
        let ready = e.conditions.as_ref().and_then(|c| c.ready);
        format!("{name}={}", ready.unwrap_or_default())
    };
    let mut all: Vec<String> = all.map(one).collect();
    all.sort();
    all.join(" ")
}

async fn wait_for(plane: &Plane, service: &str, expected: &str) -> Vec<EndpointSlice> {
    let what = format!("{service}: {expected:?}");
    plane
        .wait(&what, || async {
            let slices = slices(plane, service).await;
            (!slices.is_empty() && shown(&slices) == expected).then_some(slices)
        })
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_follow_pods_and_services() {
    let plane = Plane::start().await;
    node(&plane, "n1", "z1").await;
    plane
        .create::<Service>(service(
            "web",
            json!({"trafficDistribution": "PreferClose"}),
        ))
        .await;
    wait_for(&plane, "web", "").await;
    pod(&plane, "a", "10.244.0.5").await;
    pod(&plane, "b", "10.244.0.6").await;
    let found = wait_for(&plane, "web", "a=true b=true").await;
    assert_eq!(found.len(), 1);
    let slice = json!(found[0]);
    assert_eq!(
        slice["ports"],
        json!([{"name": "http", "port": 8080, "protocol": "TCP"}])
    );
    let endpoint = &slice["endpoints"][0];
    assert_eq!(
        (&endpoint["nodeName"], &endpoint["zone"]),
        (&json!("n1"), &json!("z1"))
    );
    assert_eq!(endpoint["hints"], json!({"forZones": [{"name": "z1"}]}));
    let core = plane.api::<Endpoints>().get("web").await.unwrap();
    assert_eq!(
        json!(core.subsets)[0]["ports"],
        json!([{"name": "http", "port": 8080, "protocol": "TCP"}])
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_are_written_only_for_changes_of_endpoints() {
    let plane = Plane::start().await;
    node(&plane, "n1", "z1").await;
    plane.create::<Service>(service("web", json!({}))).await;
    pod(&plane, "a", "10.244.0.5").await;
    pod(&plane, "b", "10.244.0.6").await;
    wait_for(&plane, "web", "a=true b=true").await;
    // An annotation writes nothing: the only change of the slice is the one of the readiness after it.
    let api = plane.api::<EndpointSlice>();
    let version = api
        .list(&ListParams::default())
        .await
        .unwrap()
        .metadata
        .resource_version
        .unwrap();
    let mut changes = api
        .watch(&WatchParams::default(), &version)
        .await
        .unwrap()
        .boxed();
    let note = Patch::Merge(json!({"metadata": {"annotations": {"k": "v"}}}));
    plane
        .api::<Pod>()
        .patch("a", &PatchParams::default(), &note)
        .await
        .unwrap();
    ready(&plane, "a", "10.244.0.5", false).await;
    let change = tokio::time::timeout(Duration::from_secs(30), changes.next()).await;
    match change.unwrap().unwrap().unwrap() {
        WatchEvent::Modified(slice) => assert_eq!(shown(&[slice]), "a=false b=true"),
        other => panic!("{other:?}"),
    }
    drop(changes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_slices_and_changed_zones_are_repaired() {
    let plane = Plane::start().await;
    node(&plane, "n1", "z1").await;
    plane.create::<Service>(service("web", json!({}))).await;
    pod(&plane, "a", "10.244.0.5").await;
    let found = wait_for(&plane, "web", "a=true").await;
    // A change of the zone and a lost slice are repaired.
    let zone = Patch::Merge(json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "z2"}}}));
    let nodes: Api<Node> = Api::all(plane.client.clone());
    nodes
        .patch("n1", &PatchParams::default(), &zone)
        .await
        .unwrap();
    plane
        .wait("the new zone", || async {
            let slices = slices(&plane, "web").await;
            (json!(slices)[0]["endpoints"][0]["zone"] == "z2").then_some(())
        })
        .await;
    let api = plane.api::<EndpointSlice>();
    api.delete(&found[0].name_any(), &DeleteParams::default())
        .await
        .unwrap();
    wait_for(&plane, "web", "a=true").await;
    plane
        .api::<Service>()
        .delete("web", &DeleteParams::default())
        .await
        .unwrap();
    plane
        .wait("the end of the endpoints", || async {
            let core = plane.api::<Endpoints>().get_opt("web").await.unwrap();
            (slices(&plane, "web").await.is_empty() && core.is_none()).then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_that_users_make_are_mirrored() {
    let plane = Plane::start().await;
    plane
        .create::<Service>(service("custom", json!({"selector": null})))
        .await;
    let made = json!({"metadata": {"name": "custom"}, "subsets": [{"addresses": [{"ip": "192.0.2.7"}], "ports": [{"name": "http", "port": 8080}]}]});
    plane.create::<Endpoints>(made).await;
    let found = wait_for(&plane, "custom", "192.0.2.7=true").await;
    let manager = &found[0].labels()["endpointslice.kubernetes.io/managed-by"];
    assert_eq!(manager, "endpointslicemirroring-controller.k8s.io");
    let core = plane.api::<Endpoints>();
    core.delete("custom", &DeleteParams::default())
        .await
        .unwrap();
    plane
        .wait("the end of the mirrored slice", || async {
            slices(&plane, "custom").await.is_empty().then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_has_services_for_its_api_and_its_dns() {
    let plane = Plane::start().await;
    let of = |namespace: &str| Api::<Service>::namespaced(plane.client.clone(), namespace);
    let api = of("default").get("kubernetes").await.unwrap();
    let dns = of("kube-system").get("kube-dns").await.unwrap();
    let address = |service: &Service| service.spec.clone().unwrap().cluster_ip.unwrap();
    assert_eq!(
        (address(&api).as_str(), address(&dns).as_str()),
        ("10.96.0.1", "10.96.0.10")
    );
    let spec = json!(dns.spec);
    let ports = json!([{"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 53}, {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": 53}]);
    assert_eq!((&spec["ports"], spec.get("selector")), (&ports, None));
    assert_eq!(dns.labels()["k8s-app"], "kube-dns");
    let slice = plane
        .api::<EndpointSlice>()
        .get("kubernetes")
        .await
        .unwrap();
    assert_eq!(slice.address_type, "IPv4");
}
