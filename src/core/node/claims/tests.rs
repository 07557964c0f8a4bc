use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::health::{DEFAULT_VALIDITY, DeviceReport, DriversHealth};
use super::*;
use crate::pod::status::devices::{DeviceHealth, Health};

fn device(name: &str, requests: &[&str], cdi: &[&str]) -> Device {
    let list = |items: &[&str]| {
        let items: Vec<String> = items.iter().map(|i| (*i).to_owned()).collect();
        Some(items).filter(|i| !i.is_empty())
    };
    Device {
        pool_name: "here".into(),
        device_name: name.into(),
        request_names: list(requests),
        cdi_device_ids: list(cdi),
        ..Device::default()
    }
}

fn pod(value: Value) -> Pod {
    let mut pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": []}});
    json_patch::merge(&mut pod, &value);
    serde_json::from_value(pod).expect("a pod")
}

fn claim(status: Value) -> ResourceClaim {
    let owner =
        json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true});
    let metadata = json!({"name": "c", "namespace": "n", "uid": "cu", "ownerReferences": [owner]});
    let claim = json!({"metadata": metadata, "spec": {}, "status": status});
    serde_json::from_value(claim).expect("a claim")
}

fn wanted(name: &str, uid: &str, drivers: &[&str]) -> AllocatedClaim {
    AllocatedClaim {
        claim: ClaimId {
            namespace: "n".into(),
            name: name.into(),
            uid: uid.into(),
        },
        drivers: drivers.iter().map(|d| (*d).to_owned()).collect(),
    }
}

/// Results of drivers that prepared every claim in the request.
fn all_done(
    batches: &Batches,
    devices: &[Device],
) -> BTreeMap<String, Vec<(ClaimId, Vec<Device>)>> {
    let of = |(driver, claims): (&String, &Vec<ClaimId>)| {
        let claims = claims.iter().map(|c| (c.clone(), devices.to_vec()));
        (driver.clone(), claims.collect())
    };
    batches.iter().map(of).collect()
}

fn calls_of(started: Started) -> Batches {
    match started {
        Started::Call(batches) => batches,
        Started::Busy => panic!("the claims are busy"),
    }
}

/// Prepares claims successfully and returns the driver calls.
fn prepare(
    claims: &mut Claims,
    pod: &str,
    wanted: &[AllocatedClaim],
    devices: &[Device],
) -> Batches {
    let batches = calls_of(claims.prepare(pod, wanted).expect("no conflict"));
    claims.record_prepared(&batches, &all_done(&batches, devices));
    batches
}

fn names(batches: &Batches) -> Vec<String> {
    let of = |(driver, claims): (&String, &Vec<ClaimId>)| {
        let names: Vec<&str> = claims.iter().map(|c| c.name.as_str()).collect();
        format!("{driver}: {}", names.join(" "))
    };
    batches.iter().map(of).collect()
}

#[test]
fn a_pods_claims_are_named_in_its_spec_or_generated_for_it() {
    let spec = json!({"resourceClaims": [
        {"name": "a", "resourceClaimName": "shared"}, {"name": "b", "resourceClaimTemplateName": "t"},
        {"name": "again", "resourceClaimName": "shared"}, {"name": "none", "resourceClaimTemplateName": "t"}]});
    let early = pod(json!({"spec": spec}));
    assert!(has_claims(&early));
    let error = references(&early).expect_err("no claim yet");
    assert_eq!(
        error.to_string(),
        "pod \"n/p\": ResourceClaim not created yet"
    );
    let made = pod(json!({"spec": spec, "status": {
        "resourceClaimStatuses": [{"name": "b", "resourceClaimName": "p-b-x"}, {"name": "none"}],
        "extendedResourceClaimStatus": {"resourceClaimName": "extended", "requestMappings": []}}}));
    let found: Vec<(String, bool)> = references(&made)
        .expect("all claims exist")
        .into_iter()
        .map(|r| (r.name, r.own))
        .collect();
    let expected = [("shared", false), ("p-b-x", true), ("extended", false)];
    assert_eq!(found, expected.map(|(name, own)| (name.to_owned(), own)));
    assert!(!has_claims(&pod(json!({}))));
    assert_eq!(references(&pod(json!({}))), Ok(vec![]));
    let neither = pod(json!({"spec": {"resourceClaims": [{"name": "a"}]}}));
    assert!(matches!(
        references(&neither),
        Err(ClaimError::Unsupported { .. })
    ));
}

#[test]
fn a_claim_must_belong_to_the_pod_and_be_reserved_and_allocated() {
    let reserved = json!([{"resource": "pods", "name": "p", "uid": "u"}]);
    let allocation = json!({"devices": {"results": [
        {"request": "r", "driver": "a.example", "pool": "x", "device": "0"},
        {"request": "s", "driver": "b.example", "pool": "x", "device": "1"},
        {"request": "t", "driver": "a.example", "pool": "x", "device": "2"}]}});
    let own = Reference {
        name: "c".into(),
        own: true,
    };
    let (this, other) = (pod(json!({})), pod(json!({"metadata": {"uid": "v"}})));
    let whole = claim(json!({"reservedFor": reserved, "allocation": allocation}));
    let drivers = ["a.example", "b.example"];
    assert_eq!(
        check_claim(&this, &own, &whole),
        Ok(wanted("c", "cu", &drivers))
    );
    let error_of = |pod: &Pod, own: &Reference, claim: &ResourceClaim| {
        check_claim(pod, own, claim)
            .expect_err("a refusal")
            .to_string()
    };
    let shared = Reference {
        own: false,
        ..own.clone()
    };
    assert_eq!(
        error_of(&other, &own, &whole),
        "ResourceClaim n/c was not created for Pod n/p (Pod is not owner)"
    );
    assert_eq!(
        error_of(&other, &shared, &whole),
        "pod p (v) is not allowed to use ResourceClaim c (cu)"
    );
    assert_eq!(
        error_of(&this, &own, &claim(json!({"reservedFor": reserved}))),
        "ResourceClaim c: not allocated"
    );
}

#[test]
fn a_shared_claim_is_prepared_once_and_unprepared_after_its_last_pod() {
    let mut claims = Claims::default();
    let shared = wanted("shared", "1", &["d", "e"]);
    let own = wanted("own", "2", &["d"]);
    let both = [shared.clone(), own];
    let first = prepare(&mut claims, "p", &both, &[]);
    assert_eq!(names(&first), ["d: shared own", "e: shared"]);
    assert_eq!(
        names(&prepare(
            &mut claims,
            "q",
            std::slice::from_ref(&shared),
            &[]
        )),
        [""; 0]
    );
    // The sandbox is created again.
    assert_eq!(names(&prepare(&mut claims, "p", &both, &[])), [""; 0]);
    assert_eq!(
        claims.in_use(),
        BTreeMap::from([(String::new(), 2), ("d".into(), 2), ("e".into(), 1)])
    );

    let back = calls_of(claims.begin_unprepare("p"));
    assert_eq!(names(&back), ["d: own"]);
    claims.record_unprepared(&back, false);
    let back = calls_of(claims.begin_unprepare("p"));
    assert_eq!(names(&back), ["d: own"], "a failed call is repeated");
    claims.record_unprepared(&back, true);
    assert!(!claims.uses("p"));
    let back = calls_of(claims.begin_unprepare("q"));
    assert_eq!(names(&back), ["d: shared", "e: shared"]);
    claims.record_unprepared(&back, true);
    assert_eq!(claims, Claims::default());
    assert_eq!(calls_of(claims.begin_unprepare("q")), Batches::new());
}

#[test]
fn a_claim_with_a_call_in_progress_is_busy_for_other_pods() {
    let mut claims = Claims::default();
    let shared = [wanted("shared", "1", &["d"])];
    let batches = calls_of(claims.prepare("p", &shared).expect("no conflict"));
    assert_eq!(claims.prepare("q", &shared), Ok(Started::Busy));
    assert_eq!(claims.begin_unprepare("p"), Started::Busy);
    assert!(!claims.uses("q"));
    claims.record_prepared(&batches, &BTreeMap::new());
    // The first pod's attempt failed; the second pod's attempt succeeds for both.
    assert_eq!(
        names(&prepare(&mut claims, "q", &shared, &[])),
        ["d: shared"]
    );
    assert_eq!(calls_of(claims.begin_unprepare("p")), Batches::new());
    let back = calls_of(claims.begin_unprepare("q"));
    assert_eq!(claims.prepare("r", &shared), Ok(Started::Busy));
    claims.record_unprepared(&back, true);

    let before = claims.clone();
    prepare(&mut claims, "p", &shared, &[]);
    let other = claims.prepare(
        "r",
        &[wanted("new", "3", &["d"]), wanted("shared", "2", &["d"])],
    );
    assert_eq!(
        other.expect_err("another claim").to_string(),
        "old ResourceClaim with same name shared and different UID 1 still exists (previous pod force-deleted?!)"
    );
    assert_eq!(claims.pods(), ["p".to_owned()].into());
    assert!(before.pods().is_empty());
}

#[test]
fn a_claim_without_devices_needs_no_driver() {
    let mut claims = Claims::default();
    let empty = [wanted("empty", "1", &[])];
    assert_eq!(prepare(&mut claims, "p", &empty, &[]), Batches::new());
    assert_eq!(calls_of(claims.begin_unprepare("p")), Batches::new());
    assert_eq!(claims, Claims::default());
}

#[test]
fn containers_get_the_devices_of_the_requests_that_they_name() {
    let pod = pod(json!({
        "spec": {"resourceClaims": [{"name": "a", "resourceClaimName": "one"}, {"name": "b", "resourceClaimName": "two"}],
            "containers": [
                {"name": "all", "resources": {"claims": [{"name": "a"}]}},
                {"name": "some", "resources": {"claims": [{"name": "a", "request": "r"}, {"name": "b"}]}},
                {"name": "extended"}, {"name": "none"}]},
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": "two",
            "requestMappings": [{"containerName": "extended", "resourceName": "example.com/x", "requestName": "x"}]}}}));
    let containers = &pod::spec(&pod).containers;
    let mut claims = Claims::default();
    let error = claims.cdi(&pod, &containers[0]).expect_err("not prepared");
    assert!(error.to_string().contains("n/one"), "{error}");
    let devices = [
        device("0", &["r"], &["v/c=0", "v/c=both"]),
        device("1", &["s"], &["v/c=1", "v/c=both"]),
        device("2", &[], &["v/c=every"]),
    ];
    prepare(&mut claims, "u", &[wanted("one", "1", &["d"])], &devices);
    let other = [
        device("x", &["x"], &["w/c=x"]),
        device("y", &["y"], &["w/c=y"]),
    ];
    prepare(&mut claims, "u", &[wanted("two", "2", &["d"])], &other);
    let cdi = |at: usize| {
        claims
            .cdi(&pod, &containers[at])
            .expect("prepared")
            .join(" ")
    };
    assert_eq!(cdi(0), "v/c=0 v/c=both v/c=1 v/c=every");
    assert_eq!(cdi(1), "v/c=0 v/c=both v/c=every w/c=x w/c=y");
    assert_eq!((cdi(2).as_str(), cdi(3).as_str()), ("w/c=x", ""));
    let found: Vec<(String, usize)> = claims
        .claims_of_container(&pod, &containers[1])
        .into_iter()
        .map(|(claim, drivers)| (claim.name, drivers["d"].len()))
        .collect();
    assert_eq!(found, [("one".to_owned(), 3), ("two".to_owned(), 2)]);
    assert!(claims.claims_of_container(&pod, &containers[3]).is_empty());
}

#[test]
fn a_drivers_response_must_match_the_requested_claims() {
    let requested = [wanted("a", "1", &[]).claim, wanted("b", "2", &[]).claim];
    let answers = |list: &[(&str, Result<u8, &str>)]| {
        let answer = |(uid, answer): &(&str, Result<u8, &str>)| {
            ((*uid).to_owned(), answer.map_err(ToOwned::to_owned))
        };
        check_response("Call", &requested, list.iter().map(answer).collect())
    };
    let results = answers(&[("1", Ok(1)), ("2", Ok(2))]).expect("all");
    assert_eq!(
        results,
        [(requested[0].clone(), 1), (requested[1].clone(), 2)]
    );
    for (list, message) in [
        (vec![("1", Ok(1))], "Call skipped 1 ResourceClaims"),
        (
            vec![("1", Ok(1)), ("2", Err("no"))],
            "Call failed for ResourceClaim b: no",
        ),
        (
            vec![("3", Ok(1))],
            "Call returned result for unknown claim UID 3",
        ),
    ] {
        assert_eq!(answers(&list).expect_err("a failure").to_string(), message);
    }
}

/// Format of the kubelet's structures (1.36, `pkg/kubelet/cm/dra/state`): Go writes absent lists as `null` and set
/// values as empty objects.
const FILE: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"1\",\"ClaimName\":\"one\",\"Namespace\":\"n\",\"PodUIDs\":{\"u\":{}},\"DriverState\":{\"d.example\":{\"Devices\":[{\"PoolName\":\"here\",\"DeviceName\":\"0\",\"ShareID\":null,\"RequestNames\":[\"r\"],\"CDIDeviceIDs\":[\"v/c=0\"]}]},\"e.example\":{\"Devices\":null}}}]}","Checksum":CHECKSUM}"#;

fn file() -> String {
    let data: Value = serde_json::from_str(&FILE.replace("CHECKSUM", "0")).expect("JSON");
    let data = data["Data"].as_str().expect("text");
    FILE.replace(
        "CHECKSUM",
        &crate::digest::crc32(data.as_bytes()).to_string(),
    )
}

#[test]
fn the_kubelets_checkpoint_format_round_trips() {
    let text = file();
    let mut claims = checkpoint::read(&text).expect("a checkpoint");
    assert_eq!(checkpoint::write(&claims), text);
    assert_eq!(claims.pods(), ["u".to_owned()].into());
    // The containers of the pod in the checkpoint have their devices; for another pod the claim is prepared again.
    let both = [wanted("one", "1", &["d.example", "e.example"])];
    let batches = prepare(&mut claims, "v", &both, &[]);
    assert_eq!(names(&batches), ["d.example: one", "e.example: one"]);
    let empty = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":null}","Checksum":CHECKSUM}"#;
    let data = r#"{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":null}"#;
    let checksum = crate::digest::crc32(data.as_bytes()).to_string();
    let empty = checkpoint::read(&empty.replace("CHECKSUM", &checksum)).expect("none");
    assert_eq!(empty, Claims::default());
}

#[test]
fn a_modified_or_truncated_checkpoint_is_rejected() {
    let text = file();
    let changed = checkpoint::read(&text.replace("v/c=0", "v/c=1")).expect_err("a change");
    assert!(matches!(
        changed,
        checkpoint::CheckpointError::Checksum { .. }
    ));
    let cut = checkpoint::read(&text[..100]).expect_err("a truncated checkpoint");
    assert!(matches!(cut, checkpoint::CheckpointError::Malformed(_)));
}

/// A step: a pod's claims are prepared or unprepared, a call in progress completes, or the agent restarts.
#[derive(Debug, Clone)]
enum Event {
    Prepare(usize, BTreeSet<usize>),
    Unprepare(usize),
    Complete(usize, bool),
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..3usize, prop::collection::btree_set(0..3usize, 1..3)).prop_map(|(p, c)| Event::Prepare(p, c)),
        3 => (0..3usize).prop_map(Event::Unprepare),
        6 => (any::<usize>(), any::<bool>()).prop_map(|(at, ok)| Event::Complete(at, ok)),
        1 => Just(Event::Restart),
    ]
}

enum Call {
    Prepare(usize, BTreeSet<usize>, Batches),
    Unprepare(usize, Batches),
}

impl Call {
    fn of(&self, pod: usize) -> bool {
        let (Call::Prepare(own, ..) | Call::Unprepare(own, _)) = self;
        *own == pod
    }

    fn claims(&self) -> impl Iterator<Item = &ClaimId> {
        let (Call::Prepare(_, _, batches) | Call::Unprepare(_, batches)) = self;
        batches.values().flatten()
    }
}

#[derive(Default)]
struct World {
    claims: Claims,
    calls: Vec<Call>,
    /// Claims that the driver has prepared.
    prepared: BTreeSet<String>,
    /// The claims that each pod was reported as prepared.
    ready: BTreeMap<usize, BTreeSet<usize>>,
}

impl World {
    fn apply(&mut self, event: Event) {
        match event {
            Event::Prepare(pod, its) => {
                let name = |claim: &usize| wanted(&claim.to_string(), &claim.to_string(), &["d"]);
                let list: Vec<AllocatedClaim> = its.iter().map(name).collect();
                if self.ready.contains_key(&pod) || self.calls.iter().any(|c| c.of(pod)) {
                    return;
                }
                let started = self.claims.prepare(&pod.to_string(), &list);
                if let Started::Call(batches) = started.expect("one uid per name") {
                    self.calls.push(Call::Prepare(pod, its, batches));
                }
            }
            Event::Unprepare(pod) if self.calls.iter().any(|c| c.of(pod)) => {}
            Event::Unprepare(pod) => {
                if let Started::Call(batches) = self.claims.begin_unprepare(&pod.to_string()) {
                    self.ready.remove(&pod);
                    self.calls.push(Call::Unprepare(pod, batches));
                }
            }
            Event::Complete(..) if self.calls.is_empty() => {}
            Event::Complete(at, ok) => {
                let call = self.calls.remove(at % self.calls.len());
                self.complete(call, ok);
            }
            Event::Restart => {
                // Calls in progress at the restart may have succeeded at the driver.
                let interrupted = self.calls.drain(..);
                let interrupted = interrupted.filter(|call| matches!(call, Call::Prepare(..)));
                for call in interrupted {
                    self.prepared.extend(call.claims().map(|c| c.name.clone()));
                }
                self.claims = checkpoint::read(&checkpoint::write(&self.claims))
                    .expect("the agent's own checkpoint");
            }
        }
    }

    fn complete(&mut self, call: Call, ok: bool) {
        match call {
            Call::Prepare(pod, its, batches) => {
                let prepared_names = batches.values().flatten().map(|c| c.name.clone());
                self.prepared.extend(prepared_names);
                let done = all_done(&batches, &[]);
                self.claims
                    .record_prepared(&batches, &if ok { done } else { BTreeMap::new() });
                if ok {
                    self.ready.insert(pod, its);
                }
            }
            Call::Unprepare(_, batches) => {
                let released = batches.values().flatten().filter(|_| ok);
                released.for_each(|claim| _ = self.prepared.remove(&claim.name));
                self.claims.record_unprepared(&batches, ok);
            }
        }
    }
}

proptest! {
    /// For every sequence of events: no claim is prepared and unprepared concurrently. A claim stays prepared at its
    /// driver until the last of its pods releases it. When all pods have terminated, drivers have nothing left.
    #[test]
    fn drivers_keep_prepared_exactly_the_claims_in_use(events in prop::collection::vec(event(), 0..60)) {
        let mut world = World::default();
        for event in events {
            world.apply(event);
            for claim in world.ready.values().flatten() {
                prop_assert!(world.prepared.contains(&claim.to_string()), "claim {claim} was unprepared while a pod uses it");
            }
            let mut busy = BTreeSet::new();
            for claim in world.calls.iter().flat_map(Call::claims) {
                prop_assert!(busy.insert(claim.clone()), "two concurrent calls for {claim:?}");
            }
        }
        while let Some(call) = world.calls.pop() {
            world.complete(call, true);
        }
        for pod in world.claims.pods() {
            let batches = calls_of(world.claims.begin_unprepare(&pod));
            world.complete(Call::Unprepare(0, batches), true);
        }
        prop_assert!(world.prepared.is_empty(), "still prepared at the driver: {:?}", world.prepared);
        prop_assert_eq!(world.claims, Claims::default());
    }
}

/// A claim with two devices, and its driver's health reports. The container refers to one device alone and to both.
struct HealthFixture {
    claims: Claims,
    drivers: DriversHealth,
}

impl HealthFixture {
    fn shown(&self, now: u64) -> Vec<String> {
        let claims_of =
            json!([{"name": "mine", "request": "a"}, {"name": "mine"}, {"name": "none"}]);
        let pod = pod(
            json!({"spec": {"resourceClaims": [{"name": "mine", "resourceClaimName": "shared"}],
            "containers": [{"name": "c", "resources": {"claims": claims_of}}, {"name": "without"}]}}),
        );
        let now = Duration::from_secs(now);
        let health = self.claims.health(&pod, &self.drivers, now);
        assert!(health.keys().all(|container| container == "c"));
        let of = |(name, devices): (&String, &BTreeMap<String, DeviceHealth>)| {
            let device = |(id, d): (&String, &DeviceHealth)| {
                let message = d.message.as_deref().unwrap_or_default();
                format!("{id}={:?}{message}", d.health)
            };
            let devices: Vec<String> = devices.iter().map(device).collect();
            format!("{name} {}", devices.join(" "))
        };
        health.get("c").into_iter().flatten().map(of).collect()
    }

    /// A report at a time in seconds: each device with health, message, and validity in seconds.
    fn report(&mut self, now: u64, devices: &[(&str, Health, &str, i64)]) {
        let report = |(name, health, message, seconds): &(&str, Health, &str, i64)| DeviceReport {
            pool: "here".into(),
            device: (*name).into(),
            health: *health,
            message: (*message).into(),
            seconds: *seconds,
        };
        let devices = devices.iter().map(report).collect();
        self.drivers.record("d", devices, Duration::from_secs(now));
    }
}

#[test]
fn a_claims_device_health_is_what_its_driver_reported_last() {
    let mut fixture = HealthFixture {
        claims: Claims::default(),
        drivers: DriversHealth::default(),
    };
    assert!(fixture.shown(0).is_empty(), "not prepared");
    let devices = [
        device("one", &["a"], &["k=one", "k=more"]),
        device("two", &["b"], &[]),
    ];
    let shared = [wanted("shared", "su", &["d"])];
    prepare(&mut fixture.claims, "u", &shared, &devices);
    let both = |one: &str, two: &str| {
        let all = format!("claim:mine d/here/two={two} k=one={one}");
        vec![all, format!("claim:mine/a k=one={one}")]
    };
    assert_eq!(fixture.shown(0), both("NotReported", "NotReported"));
    assert_eq!(
        fixture.shown(DEFAULT_VALIDITY.as_secs()),
        both("Unknown", "Unknown")
    );

    let first = [
        ("one", Health::Unhealthy, " hot", 0),
        ("two", Health::Healthy, "", 90),
    ];
    fixture.report(100, &first);
    assert_eq!(fixture.shown(129), both("Unhealthy hot", "Healthy"));
    let next = fixture.drivers.next_expiry(Duration::from_secs(100));
    assert_eq!(next, Some(Duration::from_secs(130)));
    assert_eq!(fixture.shown(130), both("Unknown", "Healthy"));
    // A device that the report omits keeps its health until that expires; a negative validity means the default.
    fixture.report(140, &[("one", Health::Healthy, "", -1)]);
    assert_eq!(fixture.shown(169), both("Healthy", "Healthy"));
    assert_eq!(fixture.shown(190), both("Unknown", "Unknown"));
    fixture.report(200, &[("one", Health::Healthy, &"ü".repeat(1025), 0)]);
    let cut = format!("Healthy{}...", "ü".repeat(1021));
    assert_eq!(fixture.shown(201), both(&cut, "Unknown"));
    let by_pod = fixture
        .claims
        .health_by_pod(&fixture.drivers, Duration::from_secs(201));
    assert_eq!(by_pod["u"].len(), 2);
}
