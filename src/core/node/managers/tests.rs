use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::node::cpus::Options;
use crate::node::devices::Device;
use crate::node::hints::Policy;
use crate::node::topology::{Cpu, MemoryNode};

const THING: &str = "example.com/thing";
const MI: u64 = 1 << 20;

/// Two nodes with four CPUs and 100 Mi each.
fn topology() -> Arc<Topology> {
    let cpu = |id: u32| {
        let (node, socket, cache) = (id / 4, id / 4, id / 4);
        let cpu = Cpu {
            node,
            socket,
            core: id,
            cache,
        };
        (id, cpu)
    };
    let memory = MemoryNode {
        memory: 100 * MI,
        ..MemoryNode::default()
    };
    let mut topology = Topology {
        nodes: BTreeMap::from([(0, memory.clone()), (1, memory)]),
        ..Topology::default()
    };
    topology.cpus.0.extend((0..8).map(cpu));
    Arc::new(topology)
}

/// Managers with static policies; one CPU and 10 Mi of the first node are reserved.
fn managers(policy: Option<Policy>, scope: Scope, options: Options) -> Managers {
    let reserved = BTreeMap::from([("memory".to_owned(), 10 * MI)]);
    let rules = Rules {
        cpus: Some(cpus::Rules {
            options,
            reserved_milli: 1000,
            reserved: Some([0].into()),
        }),
        memory: Some(memory::Rules {
            reserved: BTreeMap::from([(0, reserved)]),
        }),
        alignment: policy.map(|policy| hints::Rules {
            policy,
            scope,
            closest: false,
            max_nodes: 8,
        }),
        ..Rules::default()
    };
    let machine = Machine {
        topology: topology(),
        set_aside: Amounts::from([("memory".to_owned(), "10Mi".parse().expect("a quantity"))]),
    };
    Managers::new(&rules, &machine, &Checkpoints::default()).expect("valid rules")
}

/// Devices by id; the digit is the NUMA node.
fn devices(names: &[&str]) -> Devices {
    let device = |name: &&str| {
        let numa = name.chars().filter_map(|c| c.to_digit(10));
        let device = Device {
            healthy: true,
            numa: numa.map(i64::from).collect(),
        };
        ((*name).to_owned(), device)
    };
    let mut devices = Devices::default();
    devices.register(THING, 1);
    devices.set_devices(THING, 1, names.iter().map(device).collect());
    devices
}

/// A Guaranteed pod, with the CPUs and things of each container.
fn pod(uid: &str, containers: &[(&str, usize)]) -> Pod {
    let container = |(index, (cpu, things)): (usize, &(&str, usize))| {
        let mut amounts = json!({"cpu": cpu, "memory": "10Mi"});
        if *things > 0 {
            amounts[THING] = things.to_string().into();
        }
        json!({"name": format!("c{index}"), "resources": {"requests": amounts, "limits": amounts}})
    };
    let containers: Vec<Value> = containers.iter().enumerate().map(container).collect();
    serde_json::from_value(
        json!({"metadata": {"name": uid, "uid": uid}, "spec": {"containers": containers}}),
    )
    .expect("a pod")
}

fn ids(devices: &Devices, uid: &str) -> Vec<String> {
    let containers = ["c0", "c1"].into_iter();
    let rows = containers.flat_map(|c| devices.devices_of(uid, c));
    rows.map(|(_, id, _)| id).collect()
}

/// The NUMA nodes of a pod's CPUs, memory and devices.
fn nodes(managers: &Managers, devices: &Devices, uid: &str) -> String {
    let pinning = managers.pinning();
    let cpus = pinning.exclusive.get(uid).into_iter().flatten();
    let cpus = cpus.flat_map(|(_, set)| set).map(|cpu| cpu / 4);
    let cpus: BTreeSet<u32> = cpus.collect();
    let memory = pinning.memory.get(uid).into_iter().flatten();
    let memory: BTreeSet<u32> = memory.flat_map(|(_, set)| set).copied().collect();
    format!(
        "cpus {cpus:?} memory {memory:?} devices {:?}",
        ids(devices, uid)
    )
}

fn reason(admission: &Admission) -> &str {
    let refusal = admission.result.as_ref().err();
    refusal.map_or("admitted", |refusal| refusal.reason.as_str())
}

#[test]
fn cpus_memory_and_devices_of_a_container_are_on_one_numa_node() {
    for scope in [Scope::Container, Scope::Pod] {
        let mut managers = managers(Some(Policy::SingleNode), scope, Options::default());
        let mut devices = devices(&["a1", "b1"]);
        let admission = managers.admit(&pod("p", &[("1", 1)]), &mut devices);
        let slot = Slot {
            container: "c0".into(),
            resource: THING.into(),
        };
        assert_eq!(
            admission.result,
            Ok(vec![slot]),
            "its plugin must be called"
        );
        assert_eq!(
            nodes(&managers, &devices, "p"),
            r#"cpus {1} memory {1} devices ["a1"]"#
        );
        // Without devices, the first node is best.
        let plain = managers.admit(&pod("q", &[("1", 0)]), &mut devices);
        assert_eq!(plain.result, Ok(vec![]));
        assert_eq!(
            nodes(&managers, &devices, "q"),
            "cpus {0} memory {0} devices []"
        );
        // One device is free, but too few CPUs on its node.
        let (before, devices_before) = (managers.checkpoints(), ids(&devices, "p"));
        let refused = managers.admit(&pod("r", &[("4", 1)]), &mut devices);
        assert_eq!(reason(&refused), "TopologyAffinityError");
        assert_eq!(managers.checkpoints(), before);
        assert_eq!(
            (ids(&devices, "r"), ids(&devices, "p")),
            (vec![], devices_before)
        );
    }
}

#[test]
fn the_devices_of_a_whole_pod_are_on_one_numa_node() {
    for (names, fits) in [
        (["a0", "b1", "c1"], true),
        // Each container alone could get a device, but the pod cannot.
        (["a0", "b1", "c"], false),
    ] {
        let mut managers = managers(Some(Policy::SingleNode), Scope::Pod, Options::default());
        let mut devices = devices(&names);
        let admission = managers.admit(&pod("p", &[("1", 1), ("1", 1)]), &mut devices);
        assert_eq!(admission.result.is_ok(), fits, "{names:?}: {admission:?}");
        if fits {
            assert_eq!(
                nodes(&managers, &devices, "p"),
                r#"cpus {1} memory {1} devices ["b1", "c1"]"#
            );
            // As after a restart of the agent: the pod gets what it already has.
            let again = managers.admit(&pod("p", &[("1", 1), ("1", 1)]), &mut devices);
            assert_eq!(reason(&again), "admitted");
        }
    }
}

#[test]
fn a_pod_gets_all_its_resources_or_none() {
    let mut managers = managers(None, Scope::Container, Options::default());
    let mut devices = devices(&["a0", "b1"]);
    let before = managers.checkpoints();
    // The first container fits; the second requests too many CPUs or devices.
    for containers in [[("2", 1), ("6", 0)], [("2", 1), ("1", 2)]] {
        let admission = managers.admit(&pod("p", &containers), &mut devices);
        assert_eq!(reason(&admission), "UnexpectedAdmissionError");
        assert_eq!(managers.checkpoints(), before);
        assert!(ids(&devices, "p").is_empty());
    }
    // Devices are rejected before CPUs are checked, as in the kubelet.
    let both = managers.admit(&pod("p", &[("9", 3)]), &mut devices);
    let refusal = both.result.expect_err("too many CPUs and devices");
    assert!(
        refusal
            .message
            .contains("requested number of devices unavailable"),
        "{refusal:?}"
    );
}

fn counted(policy: Option<Policy>, scope: Scope, containers: &[(&str, usize)], expected: &[Count]) {
    let options = Options {
        full_cores: true,
        ..Options::default()
    };
    let mut managers = managers(policy, scope, options);
    let admission = managers.admit(&pod("p", containers), &mut devices(&["a0", "b1"]));
    let mut counts = admission.counts;
    counts.sort();
    assert_eq!(counts, expected, "{containers:?}");
}

#[test]
fn allocations_of_containers_are_counted() {
    use Count::{
        Alignment, CpuPinning, CpuPinningError, MemoryPinning, NoWholeCores, OneCache, WholeCores,
    };
    for (cpus, things, expected) in [
        (
            "1",
            0,
            vec![CpuPinning, WholeCores, OneCache, MemoryPinning],
        ),
        ("5", 0, vec![CpuPinning, WholeCores, MemoryPinning]),
        ("100m", 0, vec![MemoryPinning]),
        ("8", 0, vec![CpuPinning, CpuPinningError, NoWholeCores]),
        ("1", 3, vec![]),
    ] {
        let expected = [vec![Alignment], expected].concat();
        counted(None, Scope::Container, &[(cpus, things)], &expected);
    }
}

#[test]
fn aligned_allocations_are_counted() {
    use Count::{Alignment, AlignmentError, MemoryPinning, NoNode, OneNode};
    let single = Some(Policy::SingleNode);
    let one = Scope::Container;
    let refused = [
        Alignment,
        AlignmentError,
        OneNode(one),
        NoNode(one),
        MemoryPinning,
    ];
    counted(single, one, &[("100m", 0), ("5", 0)], &refused);
    let all = [Alignment, OneNode(Scope::Pod), MemoryPinning, MemoryPinning];
    counted(single, Scope::Pod, &[("100m", 0), ("200m", 0)], &all);
    // A policy that accepts more than one node guarantees nothing.
    let refused = [Alignment, AlignmentError];
    counted(Some(Policy::Restricted), one, &[("8", 0)], &refused);
}
