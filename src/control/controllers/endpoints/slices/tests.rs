//! Cases of `staging/src/k8s.io/endpointslice/reconciler_test.go`, and properties.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn parsed<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).expect("an object")
}

fn service(spec: &Value) -> Service {
    let mut all = json!({"metadata": {"name": "s", "namespace": "n", "uid": "su", "labels": {"own": "label"}},
        "spec": {"clusterIP": "10.96.0.9", "ipFamilies": ["IPv4"], "selector": {"a": "b"},
            "ports": [{"name": "web", "port": 80, "protocol": "TCP", "targetPort": 8080}]}});
    json_patch::merge(&mut all["spec"], spec);
    parsed(all)
}

fn plain() -> Service {
    service(&json!({}))
}

/// Pod number `i`, ready, on node `n1`.
fn pod(i: usize) -> Arc<Pod> {
    changed_pod(i, &json!({}))
}

fn changed_pod(i: usize, more: &Value) -> Arc<Pod> {
    let ip = format!("10.0.{}.{}", i / 250, i % 250 + 1);
    let mut all = json!({"metadata": {"name": format!("p{i}"), "namespace": "n", "uid": format!("u{i}"), "labels": {"a": "b"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "ports": [{"name": "named", "containerPort": 8000 + i % 2}]}]},
        "status": {"podIP": ip, "podIPs": [{"ip": ip}, {"ip": format!("fd00::{:x}", i + 1)}],
            "conditions": [{"type": "Ready", "status": "True"}]}});
    json_patch::merge(&mut all, more);
    Arc::new(parsed(all))
}

fn zone_of(node: &str) -> Option<Option<String>> {
    match node {
        "n1" => Some(Some("z1".into())),
        "n2" => Some(None),
        _ => None,
    }
}

/// The slices of a service in a simulated API.
#[derive(Default, Clone)]
struct Api {
    slices: BTreeMap<String, Arc<EndpointSlice>>,
    created: usize,
}

impl Api {
    fn existing(&self) -> Vec<Arc<EndpointSlice>> {
        self.slices.values().cloned().collect()
    }

    /// Reconciles once. Returns how many slices were created, updated and deleted.
    fn reconcile(&mut self, service: &Service, pods: &[Arc<Pod>]) -> (usize, usize, usize) {
        let changes = plan(service, pods, &self.existing(), zone_of, None, None);
        let counts = (
            changes.create.len(),
            changes.update.len(),
            changes.delete.len(),
        );
        for deleted in changes.delete {
            self.slices.remove(&deleted.name_any()).expect("it exists");
        }
        for updated in changes.update {
            let old = self
                .slices
                .insert(updated.name_any(), Arc::new(updated.clone()));
            let old = old.expect("it exists");
            assert_eq!(old.address_type, updated.address_type, "it is immutable");
            assert!(!is_same(&old, &updated), "a write without a change");
        }
        for mut created in changes.create {
            self.created += 1;
            let prefix = created.metadata.generate_name.clone().expect("a prefix");
            let name = format!("{prefix}{:05}", self.created);
            created.metadata.name = Some(name.clone());
            self.slices.insert(name, Arc::new(created));
        }
        counts
    }

    /// The numbers of endpoints in the slices, ascending.
    fn sizes(&self) -> Vec<usize> {
        let sizes = self.slices.values().map(|s| endpoints(s).len());
        let mut sizes: Vec<usize> = sizes.collect();
        sizes.sort_unstable();
        sizes
    }
}

#[test]
fn slices_have_the_metadata_of_their_service() {
    let mut api = Api::default();
    assert_eq!(api.reconcile(&plain(), &[pod(0)]), (1, 0, 0));
    let slice = api.existing().remove(0);
    let labels = json!({"own": "label", SERVICE_NAME: "s", MANAGED_BY: CONTROLLER});
    assert_eq!(json!(slice.metadata.labels), labels);
    let owner = &slice.metadata.owner_references.as_ref().expect("owners")[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str()), ("Service", "su"));
    assert_eq!(owner.controller, Some(true));
    let ports = json!([{"name": "web", "port": 8080, "protocol": "TCP"}]);
    assert_eq!(json!(slice.ports), ports);
    // Labels of the service are copied; the reserved ones cannot be changed by it.
    let mut renamed = service(&json!({"clusterIP": "None"}));
    renamed.labels_mut().clear();
    renamed.labels_mut().insert(SERVICE_NAME.into(), "x".into());
    assert_eq!(api.reconcile(&renamed, &[pod(0)]), (0, 1, 0));
    let labels = json!({HEADLESS: "", SERVICE_NAME: "s", MANAGED_BY: CONTROLLER});
    assert_eq!(json!(api.existing()[0].metadata.labels), labels);
}

#[test]
fn a_service_without_endpoints_has_one_empty_slice() {
    let mut api = Api::default();
    assert_eq!(api.reconcile(&plain(), &[]), (1, 0, 0));
    assert_eq!(api.reconcile(&plain(), &[]), (0, 0, 0));
    // The placeholder becomes the first slice, and the last slice the placeholder.
    assert_eq!(api.reconcile(&plain(), &[pod(0)]), (0, 1, 0));
    assert_eq!(api.sizes(), [1]);
    assert_eq!(api.reconcile(&plain(), &[]), (0, 1, 0));
    assert_eq!(api.sizes(), [0]);
    // Without ports of its own, a headless service has one list of ports: the empty one.
    let headless = service(&json!({"clusterIP": "None", "ports": null}));
    assert_eq!(api.reconcile(&headless, &[pod(0)]), (0, 1, 0));
    assert_eq!(api.sizes(), [1]);
    let ended = changed_pod(0, &json!({"status": {"phase": "Failed"}}));
    assert_eq!(api.reconcile(&headless, &[ended]), (0, 1, 0));
    assert_eq!(api.sizes(), [0]);
}

#[test]
fn changes_cost_few_writes() {
    let mut api = Api::default();
    let pods: Vec<_> = (0..250).map(pod).collect();
    assert_eq!(api.reconcile(&plain(), &pods), (3, 0, 0));
    assert_eq!(api.sizes(), [50, 100, 100]);
    assert_eq!(api.reconcile(&plain(), &pods), (0, 0, 0));
    // A change of one pod is one update; an annotation is none.
    let mut unready = pods.clone();
    unready[3] = changed_pod(3, &json!({"status": {"conditions": []}}));
    assert_eq!(api.reconcile(&plain(), &unready), (0, 1, 0));
    unready[3] = changed_pod(
        3,
        &json!({"metadata": {"annotations": {"k": "v"}, "resourceVersion": "9"}, "status": {"conditions": []}}),
    );
    assert_eq!(api.reconcile(&plain(), &unready), (0, 0, 0));
    // New endpoints go to the slice with room.
    let more: Vec<_> = (0..290).map(pod).collect();
    assert_eq!(api.reconcile(&plain(), &more), (0, 2, 0));
    assert_eq!(api.sizes(), [90, 100, 100]);
    // Endpoints in excess of the room get a slice of their own, without a write to the others.
    let many: Vec<_> = (0..310).map(pod).collect();
    assert_eq!(api.reconcile(&plain(), &many), (1, 0, 0));
    assert_eq!(api.sizes(), [20, 90, 100, 100]);
    // A slice that changes anyway is filled first.
    let mut swapped = many.clone();
    swapped[0] = pod(400);
    assert_eq!(api.reconcile(&plain(), &swapped), (0, 1, 0));
    // No endpoint is left: one slice stays as the placeholder.
    assert_eq!(api.reconcile(&plain(), &[]), (0, 1, 3));
}

/// An annotation among 3,000 pods writes nothing, and a readiness one slice of 30.
#[test]
fn a_change_among_3000_pods_writes_one_slice_at_most() {
    let mut api = Api::default();
    let mut pods: Vec<_> = (0..3000).map(pod).collect();
    assert_eq!(api.reconcile(&plain(), &pods), (30, 0, 0));
    pods[1500] = changed_pod(1500, &json!({"metadata": {"annotations": {"k": "v"}}}));
    assert_eq!(api.reconcile(&plain(), &pods), (0, 0, 0));
    pods[1500] = changed_pod(1500, &json!({"status": {"conditions": []}}));
    assert_eq!(api.reconcile(&plain(), &pods), (0, 1, 0));
}

#[test]
fn ports_that_differ_by_pod_have_their_own_slices() {
    let named = service(
        &json!({"ports": [{"name": "web", "port": 80, "protocol": "TCP", "targetPort": "named"}]}),
    );
    let mut api = Api::default();
    let mut pods: Vec<_> = (0..4).map(pod).collect();
    pods.push(changed_pod(
        4,
        &json!({"spec": {"containers": [{"name": "c"}]}}),
    ));
    assert_eq!(api.reconcile(&named, &pods), (3, 0, 0));
    let shown = |slice: &Arc<EndpointSlice>| {
        let ports = slice.ports.iter().flatten().filter_map(|p| p.port);
        (ports.collect::<Vec<_>>(), endpoints(slice).len())
    };
    let mut shown: Vec<_> = api.existing().iter().map(shown).collect();
    shown.sort();
    assert_eq!(shown, [(vec![], 1), (vec![8000], 2), (vec![8001], 2)]);
}

#[test]
fn each_family_has_its_own_slices() {
    let dual = service(&json!({"ipFamilies": ["IPv4", "IPv6"]}));
    let mut api = Api::default();
    assert_eq!(api.reconcile(&dual, &[pod(0)]), (2, 0, 0));
    assert_eq!(api.reconcile(&plain(), &[pod(0)]), (0, 0, 1));
    assert_eq!(api.existing()[0].address_type, "IPv4");
    // The address type cannot be changed by an update.
    let other = service(&json!({"ipFamilies": ["IPv6"]}));
    assert_eq!(api.reconcile(&other, &[pod(0)]), (1, 0, 1));
}

#[test]
fn slices_of_a_deleted_service_are_replaced() {
    let mut api = Api::default();
    api.reconcile(&plain(), &[pod(0)]);
    let mut again = plain();
    again.metadata.uid = Some("other".into());
    assert_eq!(api.reconcile(&again, &[pod(0)]), (1, 0, 1));
    again.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        jiff::Timestamp::UNIX_EPOCH,
    ));
    assert_eq!(Api::default().reconcile(&again, &[pod(0)]), (0, 0, 0));
}

#[test]
fn pods_on_missing_nodes_are_published_only_on_request() {
    let lost = changed_pod(0, &json!({"spec": {"nodeName": "gone"}}));
    let mut api = Api::default();
    api.reconcile(&plain(), &[Arc::clone(&lost), pod(1)]);
    assert_eq!(api.sizes(), [1]);
    let publish = service(&json!({"publishNotReadyAddresses": true}));
    assert_eq!(api.reconcile(&publish, &[lost, pod(1)]), (0, 1, 0));
    let zones = |slice: &EndpointSlice| {
        let zones = endpoints(slice).iter().map(|e| e.zone.clone());
        zones.collect::<Vec<_>>()
    };
    let mut found = zones(&api.existing()[0]);
    found.sort();
    assert_eq!(found, [None, Some("z1".into())]);
}

#[test]
fn the_trigger_time_is_set_and_removed() {
    let time: jiff::Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let changes = plan(&plain(), &[pod(0)], &[], zone_of, None, Some(time));
    let mut slice = changes.create[0].clone();
    assert_eq!(slice.annotations()[TRIGGER_TIME], "2026-01-01T00:00:00Z");
    slice.metadata.name = Some("x".into());
    let existing = [Arc::new(slice)];
    let changes = plan(&plain(), &[pod(1)], &existing, zone_of, None, None);
    assert_eq!(changes.update[0].annotations().get(TRIGGER_TIME), None);
}

#[test]
fn hints_follow_the_capacities_of_zones() {
    let node = |zone: &str| {
        parsed(
            json!({"metadata": {"name": zone, "labels": {"topology.kubernetes.io/zone": zone}},
            "status": {"allocatable": {"cpu": "1"}, "conditions": [{"type": "Ready", "status": "True"}]}}),
        )
    };
    let nodes = [node("z1"), node("z2")];
    let capacities = Capacities::of(nodes.iter()).expect("two zones");
    let pods = [pod(0), pod(1)];
    let hints = |slice: &EndpointSlice| {
        let hints = endpoints(slice).iter().map(|e| e.hints.clone());
        let zones = hints.map(|h| h?.for_zones.map(|zones| zones[0].name.clone()));
        let mut zones: Vec<Option<String>> = zones.collect();
        zones.sort();
        zones
    };
    let changes = plan(&plain(), &pods, &[], zone_of, Some(&capacities), None);
    let mut slice = changes.create[0].clone();
    assert_eq!(hints(&slice), [Some("z1".into()), Some("z2".into())]);
    slice.metadata.name = Some("x".into());
    let existing = [Arc::new(slice)];
    let again = plan(&plain(), &pods, &existing, zone_of, Some(&capacities), None);
    assert!(again.update.is_empty(), "{again:?}");
    // A zone has lost its nodes.
    let changes = plan(&plain(), &pods, &existing, zone_of, None, None);
    assert_eq!(hints(&changes.update[0]), [None, None]);
}

proptest! {
    /// After any sequence of pods, the slices hold exactly the endpoints of the last pods, no slice is too large, and a
    /// second reconciliation writes nothing.
    #[test]
    fn slices_hold_the_endpoints_of_the_pods(
        steps in proptest::collection::vec(proptest::collection::btree_set(0..400usize, 0..300), 1..6),
        named in any::<bool>(),
        dual in any::<bool>(),
    ) {
        let target = if named { json!("named") } else { json!(8080) };
        let families = if dual { json!(["IPv4", "IPv6"]) } else { json!(["IPv4"]) };
        let service = service(&json!({"ipFamilies": families,
            "ports": [{"name": "web", "port": 80, "protocol": "TCP", "targetPort": target}]}));
        let mut api = Api::default();
        for step in steps {
            let pods: Vec<_> = step.iter().map(|i| pod(*i)).collect();
            api.reconcile(&service, &pods);
            for family in families.as_array().expect("a list") {
                let mut names: Vec<String> = api
                    .existing()
                    .iter()
                    .filter(|s| *family == s.address_type)
                    .flat_map(|s| endpoints(s).to_vec())
                    .filter_map(|e| e.target_ref?.name)
                    .collect();
                names.sort();
                let mut expected: Vec<String> = step.iter().map(|i| format!("p{i}")).collect();
                expected.sort();
                prop_assert_eq!(names, expected);
            }
            prop_assert!(api.sizes().iter().all(|size| *size <= MAX_ENDPOINTS));
            prop_assert_eq!(api.reconcile(&service, &pods), (0, 0, 0));
        }
    }
}
