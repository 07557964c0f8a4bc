use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::node::hints::{Hint, Provider as _, Subject};

const THING: &str = "example.com/thing";

/// Preferred NUMA nodes by container name.
type Affinities = BTreeMap<String, BTreeSet<i64>>;

impl Devices {
    /// Reserves devices for all containers of a pod, or for none; returns the calls to plugins that remain.
    fn reserve(&mut self, pod: &Pod, affinities: &Affinities) -> Result<Vec<Slot>, DeviceError> {
        let before = self.snapshot(pod::uid(pod));
        for (_, container) in pod::containers(pod) {
            let affinity = affinities.get(&container.name);
            if let Err(error) = self.reserve_container(pod, &container, affinity) {
                self.restore(pod::uid(pod), before);
                return Err(error);
            }
        }
        Ok(self.pending_calls(pod))
    }
}

fn pod(uid: &str, spec: &Value) -> Pod {
    let pod = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid}, "spec": spec});
    serde_json::from_value(pod).expect("a pod")
}

fn container(name: &str, things: usize) -> Value {
    json!({"name": name, "resources": {"limits": {THING: things.to_string()}}})
}

fn plain(uid: &str, things: usize) -> Pod {
    pod(uid, &json!({"containers": [container("c", things)]}))
}

fn slot(container: &str) -> Slot {
    Slot {
        container: container.into(),
        resource: THING.into(),
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

/// Devices by id: a `!` marks an unhealthy device, and digits at the end are its NUMA nodes.
fn described(names: &[&str]) -> BTreeMap<String, Device> {
    let device = |name: &&str| {
        let id = name.trim_end_matches('!');
        let device = Device {
            healthy: id == *name,
            numa: id
                .chars()
                .filter_map(|c| c.to_digit(10))
                .map(i64::from)
                .collect(),
        };
        (id.to_owned(), device)
    };
    names.iter().map(device).collect()
}

fn with(names: &[&str]) -> Devices {
    let mut devices = Devices::default();
    devices.register(THING, 1);
    devices.set_devices(THING, 1, described(names));
    devices
}

fn response(text: &str) -> ContainerAllocateResponse {
    ContainerAllocateResponse {
        envs: [("WHICH".to_owned(), text.to_owned())].into(),
        ..ContainerAllocateResponse::default()
    }
}

fn amounts_of(devices: &Devices) -> (i64, i64) {
    let (capacity, allocatable) = devices.amounts();
    (capacity[THING].units(), allocatable[THING].units())
}

#[test]
fn rejections_have_the_kubelets_messages() {
    let none = Affinities::new();
    let mut devices = with(&["a", "b", "c!"]);
    devices.reserve(&plain("first", 1), &none).expect("free");
    let error = devices.reserve(&plain("second", 2), &none);
    let refusal = error.expect_err("only one is free").refusal();
    assert_eq!(
        (refusal.reason.as_str(), refusal.message.as_str()),
        (
            "UnexpectedAdmissionError",
            "Allocate failed due to requested number of devices unavailable for example.com/thing. Requested: 2, Available: 1, which is unexpected"
        )
    );
    let shorted = Refusal {
        reason: format!("OutOf{THING}"),
        message: "m".into(),
        missing: Amounts::new(),
        infeasible: None,
    };
    assert_eq!(
        devices.as_device_rejection(&plain("second", 2), shorted),
        refusal
    );
    let cpu = Refusal {
        reason: "OutOfcpu".into(),
        ..refusal
    };
    assert_eq!(
        devices.as_device_rejection(&plain("second", 2), cpu.clone()),
        cpu
    );

    devices.disconnect(THING, 1, at(0));
    let error = devices.reserve(&plain("second", 1), &none);
    assert_eq!(error, Err(DeviceError::NoneHealthy(THING.into())));
    let changed = devices.reserve(&plain("first", 2), &none);
    assert!(matches!(
        changed,
        Err(DeviceError::Changed { allocated: 1, .. })
    ));
    // The allocation stays while the plugin is disconnected.
    assert_eq!(
        devices.reserve(&plain("first", 1), &none),
        Ok(vec![slot("c")])
    );
}

#[test]
fn a_pod_gets_all_its_devices_or_none() {
    let mut devices = with(&["a", "b"]);
    let two = json!({"containers": [container("one", 1), container("two", 2)]});
    assert!(
        devices
            .reserve(&pod("p", &two), &Affinities::new())
            .is_err()
    );
    assert_eq!(devices.free(THING).len(), 2);
    assert!(!devices.release("p"), "it has no devices");
    // Resources without a plugin, or provided by a claim, are ignored.
    let mut claimed = pod(
        "q",
        &json!({"containers": [{"name": "c", "resources": {"limits": {"example.com/other": "9", "cpu": "1"}}}]}),
    );
    assert_eq!(devices.reserve(&claimed, &Affinities::new()), Ok(vec![]));
    claimed.spec = plain("q", 9).spec;
    claimed.status = serde_json::from_value(
        json!({"extendedResourceClaimStatus": {"resourceClaimName": "x",
        "requestMappings": [{"containerName": "c", "resourceName": THING, "requestName": "r"}]}}),
    )
    .expect("a status");
    assert_eq!(devices.reserve(&claimed, &Affinities::new()), Ok(vec![]));
}

#[test]
fn init_containers_pass_on_their_devices_and_sidecars_keep_theirs() {
    let mut devices = with(&["a", "b", "c", "d"]);
    let mut sidecar = container("sidecar", 1);
    sidecar["restartPolicy"] = "Always".into();
    let spec = json!({"initContainers": [container("first", 2), container("second", 1), sidecar],
        "containers": [container("main", 1), container("other", 1)]});
    let reserved = devices.reserve(&pod("p", &spec), &Affinities::new());
    assert_eq!(reserved.expect("enough devices").len(), 5);
    let ids = |devices: &Devices, name: &str| devices.ids("p", &slot(name)).join(",");
    let all = |devices: &Devices| {
        ["first", "second", "sidecar", "main", "other"].map(|name| ids(devices, name))
    };
    assert_eq!(all(&devices), ["a,b", "a", "a", "b", "c"]);
    assert_eq!(devices.free(THING).len(), 1);

    // When the plugin's preference changes an init container's device, the containers that reuse it follow.
    let offer = devices
        .preference_request("p", &slot("first"))
        .expect("reserved");
    assert_eq!((offer.size, offer.must_include.len()), (2, 0));
    assert_eq!(offer.available.len(), 3, "{offer:?}");
    devices.apply_preference(
        "p",
        &slot("first"),
        &["d".into(), "nonsense".into(), "c".into()],
    );
    assert_eq!(all(&devices), ["a,d", "a", "a", "d", "c"]);
    assert!(devices.record_response("p", &slot("first"), response("x")));
    // Reused devices stay, and devices of other containers cannot be taken.
    devices.apply_preference("p", &slot("main"), &["b".into()]);
    devices.apply_preference("p", &slot("other"), &["a".into(), "b".into()]);
    assert_eq!(all(&devices), ["a,d", "a", "a", "d", "b"]);
    devices.release_pending("p");
    assert_eq!(all(&devices), ["a,d", "", "", "", ""]);
    assert!(devices.release("p"));
    assert_eq!(devices.free(THING).len(), 4);
}

#[test]
fn devices_on_the_preferred_numa_nodes_come_first() {
    let all = "a0,b1,c,d01,e1";
    for (node, wanted, expected, offered) in [
        (Some(1), 1, "b1", "b1,d01,e1"),
        // All near devices are mandatory; the plugin chooses the rest.
        (Some(1), 3, "b1,d01,e1", all),
        (Some(1), 4, "a0,b1,d01,e1", all),
        (Some(0), 1, "a0", "a0,d01"),
        (Some(7), 1, "a0", all),
        (None, 1, "a0", all),
    ] {
        let mut devices = with(&["a0", "b1", "c", "d01", "e1"]);
        let near = node.map(|node| ("c".to_owned(), BTreeSet::from([node])));
        let reserved = devices.reserve(&plain("p", wanted), &near.into_iter().collect());
        reserved.expect("enough devices");
        let offer = devices
            .preference_request("p", &slot("c"))
            .expect("reserved");
        let available: Vec<String> = offer.available.into_iter().collect();
        assert_eq!(
            (
                devices.ids("p", &slot("c")).join(","),
                available.join(",").as_str()
            ),
            (expected.to_owned(), offered),
            "{wanted} near {node:?}"
        );
    }
}

#[test]
fn hints_list_the_numa_nodes_that_suffice() {
    // A `+` marks a preferred hint.
    for (names, init, requested, expected) in [
        (vec!["a0", "b1"], 0, 1, "0+ 01 1+"),
        (vec!["a0", "b1"], 0, 2, "01+"),
        (vec!["a0", "b0", "c1"], 0, 2, "0+ 01"),
        // If all devices were healthy, one node would suffice; so no hint is preferred.
        (vec!["a0", "b0!", "c1"], 0, 2, "01"),
        (vec!["a0", "b1", "c"], 0, 3, ""),
        (vec!["a0"], 0, 2, ""),
        (vec!["a", "b"], 0, 1, "no difference"),
        (vec!["a01", "b1"], 0, 2, "01 1+"),
        // The init container has the first device, which is reused.
        (vec!["a0", "b1"], 1, 1, "0+ 01"),
        (vec!["a0", "b0", "c1"], 1, 2, "0+ 01"),
        // A NUMA node that the machine does not have.
        (vec!["a0", "b7"], 0, 1, "0+"),
    ] {
        let mut devices = with(&names);
        let spec = json!({"initContainers": [container("init", init)], "containers": [container("c", requested)]});
        let pod = pod("p", &spec);
        let containers = pod::containers(&pod);
        devices
            .reserve_container(&pod, &containers[0].1, None)
            .expect("free");
        let near = NearNodes {
            devices: &mut devices,
            nodes: &[0, 1].into(),
        };
        let hints = near.hints(Subject::Container(&pod, &containers[1].1));
        let text = |hint: &Hint| {
            let nodes = hint.nodes.unwrap_or_default().nodes();
            let nodes: String = nodes.iter().map(ToString::to_string).collect();
            format!("{nodes}{}", if hint.preferred { "+" } else { "" })
        };
        let shown = hints.get(THING).map(|hints| {
            let mut shown: Vec<String> = hints.iter().map(text).collect();
            shown.sort();
            shown.join(" ")
        });
        let shown = shown.unwrap_or_else(|| "no difference".into());
        assert_eq!(shown, expected, "{requested} of {names:?} after {init}");
    }
}

#[test]
fn a_resource_is_removed_five_minutes_after_its_plugin() {
    let mut devices = with(&["a", "b", "c!"]);
    assert_eq!(amounts_of(&devices), (3, 2));
    assert!(!devices.set_devices(THING, 1, described(&["a", "b", "c!"])));
    assert!(devices.set_devices(THING, 1, described(&["a!", "b", "c!"])));
    assert_eq!(amounts_of(&devices), (3, 1));
    devices.reserve(&plain("p", 1), &Affinities::new()).ok();
    assert!(devices.disconnect(THING, 1, at(100)));
    assert_eq!(amounts_of(&devices), (3, 0));
    // A pod that has a device is still admitted.
    assert_eq!(devices.allocatable_for("p")[THING].units(), 1);
    assert_eq!(devices.allocatable_for("q")[THING].units(), 0);
    assert_eq!(devices.next_expiry(), Some(at(400)));
    assert!(!devices.expire(at(399)));
    assert!(devices.expire(at(400)));
    assert_eq!(amounts_of(&devices), (0, 0));
    assert_eq!(devices.next_expiry(), None);

    devices.register(THING, 2);
    devices.set_devices(THING, 2, described(&["a"]));
    assert_eq!(amounts_of(&devices), (1, 1));
    // Calls for an outdated registration are ignored.
    assert!(!devices.set_devices(THING, 1, described(&[])));
    assert!(!devices.disconnect(THING, 1, at(500)));
    assert_eq!(amounts_of(&devices), (1, 1));
}

#[test]
fn a_restart_keeps_the_devices_of_containers() {
    let mut devices = with(&["a0", "b01", "c"]);
    devices
        .reserve(&plain("p", 2), &Affinities::new())
        .expect("free");
    assert!(devices.record_response("p", &slot("c"), response("two")));
    devices
        .reserve(&plain("unanswered", 1), &Affinities::new())
        .expect("free");

    let text = checkpoint::write(devices.checkpoint_data());
    let data = checkpoint::read(&text).expect("a checkpoint");
    let mut restarted = Devices::from_checkpoint(data, at(0));
    assert_eq!(restarted.devices_of("p", "c"), devices.devices_of("p", "c"));
    assert_eq!(restarted.config_of("p", "c"), devices.config_of("p", "c"));
    assert_eq!(restarted.config_of("p", "c").env[0].1, "two");
    assert!(restarted.devices_of("unanswered", "c").is_empty());
    assert_eq!(amounts_of(&restarted), (0, 0));
    assert_eq!(restarted.unlisted_resource("p", "c"), Some(THING));
    assert_eq!(
        restarted.reserve(&plain("p", 2), &Affinities::new()),
        Ok(vec![])
    );
    let refused = restarted.reserve(&plain("q", 1), &Affinities::new());
    assert_eq!(refused, Err(DeviceError::NoneHealthy(THING.into())));
    restarted.register(THING, 1);
    restarted.set_devices(THING, 1, described(&["a0", "b01", "c"]));
    assert_eq!(restarted.unlisted_resource("p", "c"), None);
    assert_eq!(restarted.free(THING), BTreeSet::from(["c".to_owned()]));
    assert!(restarted.retain(|uid| uid != "p"));
    assert_eq!(restarted.free(THING).len(), 3);
}

#[test]
fn responses_of_several_plugins_are_merged_and_the_first_wins() {
    use holdfast_proto::deviceplugin as pb;
    let mut devices = with(&["a"]);
    devices.register("example.com/other", 2);
    devices.set_devices("example.com/other", 2, described(&["x"]));
    let limits = json!({THING: "1", "example.com/other": "1"});
    let spec = json!({"containers": [{"name": "c", "resources": {"limits": limits}}]});
    let reserved = devices.reserve(&pod("p", &spec), &Affinities::new());
    for (slot, text) in reserved.expect("free").iter().zip(["first", "second"]) {
        let response = pb::ContainerAllocateResponse {
            envs: [
                ("SAME".to_owned(), text.to_owned()),
                (text.to_owned(), String::new()),
            ]
            .into(),
            mounts: vec![pb::Mount {
                container_path: "/m".into(),
                host_path: text.into(),
                read_only: true,
            }],
            devices: vec![pb::DeviceSpec {
                container_path: "/dev/m".into(),
                host_path: text.into(),
                permissions: "rw".into(),
            }],
            annotations: [("a".to_owned(), text.to_owned())].into(),
            cdi_devices: vec![pb::CdiDevice {
                name: "v/c=d".into(),
            }],
        };
        assert!(devices.record_response("p", slot, response));
    }
    let given = devices.config_of("p", "c");
    let same: Vec<_> = given.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(same, ["SAME=first", "first=", "second="]);
    assert_eq!(
        (given.mounts.len(), given.devices.len(), given.cdi.len()),
        (1, 1, 1)
    );
    assert!(given.mounts[0].readonly && given.mounts[0].host_path == "first");
    assert_eq!(given.annotations["a"], "first");
}

#[test]
fn resource_names_must_be_extended_ones() {
    for (name, expected) in [
        (THING, true),
        ("a/B_c.d-e", true),
        ("thing", false),
        ("kubernetes.io/thing", false),
        ("requests.example.com/thing", false),
        ("Example.com/thing", false),
        ("example.com/", false),
        ("example.com/a/b", false),
        ("example.com/-a", false),
    ] {
        assert_eq!(is_resource_name(name), expected, "{name}");
    }
}

#[derive(Debug, Clone)]
enum Change {
    List(Vec<Option<bool>>),
    Reserve(usize, [usize; 3], Option<i64>),
    Prefer(usize, Vec<usize>),
    Answer(usize),
    Abandon(usize),
    Release(usize),
    Lose,
    Restart,
}

fn change() -> impl Strategy<Value = Change> {
    let pod = 0..4usize;
    prop_oneof![
        3 => prop::collection::vec(prop::option::weighted(0.9, prop::bool::weighted(0.8)), 8)
            .prop_map(Change::List),
        6 => (pod.clone(), [0..3usize, 0..3, 0..3], prop::option::of(0..2i64))
            .prop_map(|(p, n, a)| Change::Reserve(p, n, a)),
        3 => (pod.clone(), prop::collection::vec(0..8usize, 0..4))
            .prop_map(|(p, ids)| Change::Prefer(p, ids)),
        3 => pod.clone().prop_map(Change::Answer),
        1 => pod.clone().prop_map(Change::Abandon),
        2 => pod.prop_map(Change::Release),
        1 => Just(Change::Lose),
        1 => Just(Change::Restart),
    ]
}

const NAMES: [&str; 3] = ["init", "one", "two"];

fn random_pod(uid: &str, [init, one, two]: [usize; 3]) -> Pod {
    let spec = json!({"initContainers": [container("init", init)], "containers": [container("one", one), container("two", two)]});
    pod(uid, &spec)
}

/// No device has two owners, except for an init container and a regular container of the same pod.
fn check_owners(devices: &Devices) {
    let mut owners: BTreeMap<String, (String, String)> = BTreeMap::new();
    for (uid, containers) in &devices.pods {
        for (name, allocations) in containers {
            for id in allocations[THING].devices.keys() {
                let Some((other, container)) =
                    owners.insert(id.clone(), (uid.clone(), name.clone()))
                else {
                    continue;
                };
                assert_eq!(&other, uid, "{id} is allocated to two pods");
                assert!(
                    (container == "init") != (name == "init"),
                    "{id}: {container} and {name}"
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn no_device_is_allocated_twice_or_while_unhealthy(changes in prop::collection::vec(change(), 1..40)) {
        let mut devices = Devices::default();
        let mut number = 0;
        for change in changes {
            match change {
                Change::List(states) => {
                    number += 1;
                    devices.register(THING, number);
                    let listed = states.iter().enumerate().filter_map(|(i, state)| {
                        let device = Device { healthy: (*state)?, numa: [i as i64 % 2].into() };
                        Some((format!("d{i}"), device))
                    });
                    devices.set_devices(THING, number, listed.collect());
                }
                Change::Reserve(p, sizes, affinity) => {
                    let uid = format!("p{p}");
                    let before = devices.clone();
                    let near = affinity.map(|node| BTreeSet::from([node]));
                    let affinities = near.into_iter().flat_map(|near| NAMES.map(|n| (n.to_owned(), near.clone()))).collect();
                    let healthy: BTreeSet<String> = before.healthy().into_iter().map(|(_, id, _)| id).collect();
                    let known = before.knows(THING);
                    match devices.reserve(&random_pod(&uid, sizes), &affinities) {
                        Err(_) => prop_assert_eq!(&devices.pods, &before.pods),
                        Ok(_) => for (name, size) in NAMES.iter().zip(sizes) {
                            let had = before.ids(&uid, &slot(name));
                            let has = devices.ids(&uid, &slot(name));
                            if size > 0 && known {
                                prop_assert_eq!(has.len(), size);
                            }
                            if had.is_empty() {
                                prop_assert!(has.iter().all(|id| healthy.contains(id)), "{:?} of {:?}", has, healthy);
                            }
                        },
                    }
                }
                Change::Prefer(p, ids) => {
                    let uid = format!("p{p}");
                    let preferred: Vec<String> = ids.iter().map(|i| format!("d{i}")).collect();
                    for name in NAMES {
                        let before = devices.ids(&uid, &slot(name));
                        devices.apply_preference(&uid, &slot(name), &preferred);
                        let after = devices.ids(&uid, &slot(name));
                        prop_assert_eq!(before.len(), after.len());
                        let healthy: BTreeSet<String> = devices.healthy().into_iter().map(|(_, id, _)| id).collect();
                        prop_assert!(after.iter().all(|id| before.contains(id) || healthy.contains(id)));
                    }
                }
                Change::Answer(p) => for name in NAMES {
                    devices.record_response(&format!("p{p}"), &slot(name), response("x"));
                },
                Change::Abandon(p) => devices.release_pending(&format!("p{p}")),
                Change::Release(p) => {
                    devices.release(&format!("p{p}"));
                }
                Change::Lose => {
                    devices.disconnect(THING, number, at(0));
                }
                Change::Restart => {
                    let text = checkpoint::write(devices.checkpoint_data());
                    devices = Devices::from_checkpoint(checkpoint::read(&text).expect("a checkpoint"), at(0));
                }
            }
            check_owners(&devices);
        }
    }
}

#[test]
fn device_health_follows_the_plugin() {
    use crate::pod::status::devices::Health;

    let mut devices = with(&["a", "b"]);
    let pod = plain("p", 1);
    devices
        .reserve(&pod, &Affinities::new())
        .expect("enough devices");
    assert_eq!(
        devices.health("p"),
        BTreeMap::new(),
        "reserved devices are not allocated yet"
    );
    assert!(devices.record_response("p", &slot("c"), response("a")));
    let of = |devices: &Devices| {
        let health = devices.health("p");
        assert_eq!(devices.health_of_all().get("p"), Some(&health));
        let own = &health["c"][THING];
        assert_eq!(own.len(), 1);
        own["a"].health
    };
    assert_eq!(of(&devices), Health::Healthy);
    assert_eq!(devices.health("other"), BTreeMap::new());
    assert!(devices.set_devices(THING, 1, described(&["a!", "b"])));
    assert_eq!(of(&devices), Health::Unhealthy);
    assert!(devices.set_devices(THING, 1, described(&["b"])));
    assert_eq!(
        of(&devices),
        Health::Unknown,
        "the plugin no longer lists it"
    );
    assert!(devices.set_devices(THING, 1, described(&["a!", "b!"])));
    // After the plugin reconnects, health is unknown until it lists its devices, even if the list is unchanged.
    assert!(devices.disconnect(THING, 1, at(0)));
    assert_eq!(of(&devices), Health::Unknown);
    devices.register(THING, 2);
    assert_eq!(of(&devices), Health::Unknown);
    assert!(
        devices.set_devices(THING, 2, described(&["a!", "b!"])),
        "the health has changed"
    );
    assert_eq!(of(&devices), Health::Unhealthy);
    // A new registration without a disconnect changes nothing.
    assert!(devices.set_devices(THING, 2, described(&["a", "b"])));
    devices.register(THING, 3);
    assert_eq!(of(&devices), Health::Healthy);
    // After a restart, allocations are known but health is not. If the plugin does not return, health becomes unknown.
    let mut restarted = Devices::from_checkpoint(devices.checkpoint_data(), at(10));
    assert_eq!(of(&restarted), Health::NotReported);
    let mut back = restarted.clone();
    back.register(THING, 1);
    assert_eq!(of(&back), Health::NotReported);
    back.set_devices(THING, 1, described(&["a"]));
    assert_eq!(of(&back), Health::Healthy);
    assert!(restarted.expire(at(10) + GRACE));
    assert_eq!(of(&restarted), Health::Unknown);
}
