//! `allocations.txt` has the results of the kubelet's own memory manager on various machines, and its test cases at the
//! end. Kinds of lines, with sizes in Mi:
//!
//! - `machine`: memory, huge pages and reserved memory of each NUMA node
//! - a pod: for each container memory, huge pages and the nodes of the topology manager; then the hints for the pod and
//!   its containers, and the allocations or the error
//! - a released pod
//! - the state of the nodes after that: free memory and huge pages, number of blocks, group
//! - the checkpoint

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::checkpoint;
use super::*;
use crate::node::capacity::{Limits, MachineSize};
use crate::node::devices::Devices;
use crate::node::eviction::{DEFAULT_HARD, ThresholdSettings, parse};
use crate::node::hints::tests::hint;
use crate::node::hints::{self, Policy, Scope};
use crate::node::managers::{self, Checkpoints, Machine, Managers};
use crate::node::topology::MemoryNode;
use crate::pod::resize::Infeasible;
use crate::quantity::Quantity;

const MI: u64 = 1 << 20;
const HUGE: &str = "hugepages-2Mi";

fn bytes(mi: u64) -> Quantity {
    Quantity::from_bytes(mi * MI)
}

fn memory_node(memory: u64, huge: u64) -> MemoryNode {
    MemoryNode {
        memory: memory * MI,
        huge_pages: BTreeMap::from([(2 * MI, huge / 2)]),
        ..MemoryNode::default()
    }
}

fn reserved(mi: u64) -> BTreeMap<String, u64> {
    BTreeMap::from([("memory".to_owned(), mi * MI)])
}

/// Nodes with 100 Mi each, of which 10 Mi are reserved and 8 Mi are huge pages.
fn machine(nodes: u32) -> Machine {
    Machine {
        topology: Arc::new(Topology {
            nodes: (0..nodes).map(|id| (id, memory_node(100, 8))).collect(),
            ..Topology::default()
        }),
        set_aside: Amounts::from([("memory".to_owned(), bytes(u64::from(nodes) * 10))]),
    }
}

fn rules(nodes: u32, alignment: Option<(Policy, Scope)>) -> managers::Rules {
    managers::Rules {
        memory: Some(Rules {
            reserved: (0..nodes).map(|n| (n, reserved(10))).collect(),
        }),
        alignment: alignment.map(|(policy, scope)| hints::Rules {
            policy,
            scope,
            closest: false,
            max_nodes: 8,
        }),
        ..managers::Rules::default()
    }
}

fn start(nodes: u32, alignment: Option<(Policy, Scope)>) -> Managers {
    let made = Managers::new(
        &rules(nodes, alignment),
        &machine(nodes),
        &Checkpoints::default(),
    );
    made.expect("managers")
}

/// Containers by kind with Mi of memory; the second number is huge pages.
fn pod(uid: &str, containers: &[(&str, u64, u64)]) -> Pod {
    let mut spec = json!({"containers": [], "initContainers": []});
    for (index, (kind, memory, huge)) in containers.iter().enumerate() {
        let mut amounts = json!({"cpu": "100m", "memory": format!("{memory}Mi")});
        if *huge > 0 {
            amounts["hugepages-2Mi"] = format!("{huge}Mi").into();
        }
        let (field, policy) = match *kind {
            "init" => ("initContainers", Value::Null),
            "sidecar" => ("initContainers", json!("Always")),
            _ => ("containers", Value::Null),
        };
        let list = spec[field].as_array_mut().expect("a list");
        let name = format!("{kind}-{index}");
        list.push(json!({"name": name, "restartPolicy": policy,
            "resources": {"requests": amounts, "limits": amounts}}));
    }
    serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid}, "spec": spec}))
        .expect("a pod")
}

fn nodes(managers: &Managers, uid: &str) -> Vec<Vec<u32>> {
    let memory = managers.pinning().memory;
    let containers = memory.get(uid).into_iter().flatten();
    containers
        .map(|(_, nodes)| nodes.iter().copied().collect())
        .collect()
}

fn free(managers: &Managers, resource: &str) -> Vec<u64> {
    let state = managers.memory().expect("static").state();
    let tables = state.nodes.values().map(|node| &node.tables[resource]);
    tables.map(|table| table.free / MI).collect()
}

#[test]
fn memory_comes_from_one_numa_node_or_one_group() {
    let mut managers = start(2, None);
    assert_eq!(free(&managers, "memory"), [82, 82]);
    managers
        .admit(&pod("a", &[("main", 50, 2)]), &mut Devices::default())
        .result
        .expect("given");
    assert_eq!(nodes(&managers, "a"), [[0]]);
    managers
        .admit(&pod("b", &[("main", 50, 0)]), &mut Devices::default())
        .result
        .expect("given");
    assert_eq!(
        nodes(&managers, "b"),
        [[1]],
        "the first node has too little left"
    );
    assert_eq!(
        (free(&managers, "memory"), free(&managers, HUGE)),
        (vec![32, 32], vec![6, 8])
    );
    let refusal = managers
        .admit(&pod("c", &[("main", 60, 0)]), &mut Devices::default())
        .result
        .expect_err("used nodes form no group");
    assert_eq!(refusal.reason, "UnexpectedAdmissionError");
    assert!(
        refusal
            .message
            .contains("no NUMA nodes with enough memory is available")
    );
    managers.release("a");
    managers.release("b");
    managers
        .admit(&pod("c", &[("main", 90, 0)]), &mut Devices::default())
        .result
        .expect("given");
    assert_eq!(
        (nodes(&managers, "c"), free(&managers, "memory")),
        (vec![vec![0, 1]], vec![0, 74])
    );
    managers
        .admit(&pod("d", &[("main", 10, 0)]), &mut Devices::default())
        .result
        .expect("from the group");
    assert_eq!(
        nodes(&managers, "d"),
        [[0, 1]],
        "the nodes are in a group now"
    );
    managers.release("c");
    managers.release("d");
    assert_eq!(free(&managers, "memory"), [82, 82]);
}

#[test]
fn only_guaranteed_pods_get_exclusive_memory() {
    let mut managers = start(2, None);
    let mut burstable = pod("e", &[("main", 10, 0)]);
    let spec = burstable.spec.as_mut().expect("a spec");
    spec.containers[0]
        .resources
        .as_mut()
        .expect("resources")
        .limits = None;
    managers
        .admit(&burstable, &mut Devices::default())
        .result
        .expect("no exclusive memory");
    assert!(nodes(&managers, "e").is_empty());
}

#[test]
fn memory_follows_the_topology_policy() {
    for (policy, size, fits) in [
        (Policy::SingleNode, 80, true),
        (Policy::SingleNode, 90, false),
        (Policy::Restricted, 90, true),
        (Policy::BestEffort, 90, true),
    ] {
        let mut managers = start(2, Some((policy, Scope::Container)));
        let result = managers
            .admit(&pod("a", &[("main", size, 0)]), &mut Devices::default())
            .result;
        assert_eq!(result.is_ok(), fits, "{policy:?} {size}: {result:?}");
    }
    let mut managers = start(2, Some((Policy::SingleNode, Scope::Pod)));
    let refusal = managers
        .admit(
            &pod("a", &[("main", 50, 0), ("main", 50, 0)]),
            &mut Devices::default(),
        )
        .result;
    assert_eq!(
        refusal.expect_err("it does not fit on one node").reason,
        "TopologyAffinityError"
    );
    managers
        .admit(
            &pod("a", &[("main", 40, 0), ("main", 40, 0)]),
            &mut Devices::default(),
        )
        .result
        .expect("given");
    assert_eq!(nodes(&managers, "a"), [[0], [0]]);
}

#[test]
fn invalid_memory_rules_are_reported() {
    let with = |change: &dyn Fn(&mut Reserved), nodes| {
        let mut rules = rules(2, None);
        change(&mut rules.memory.as_mut().expect("static").reserved);
        Managers::new(&rules, &machine(nodes), &Checkpoints::default()).expect_err("invalid rules")
    };
    for (error, expected) in [
        (
            with(&|_| {}, 1),
            "references a NUMA node 1 that does not exist on this machine",
        ),
        (
            with(&|r| _ = r.remove(&1), 2),
            "the total amount \"10Mi\" of type \"memory\" is not equal to the value \"20Mi\" determined by Node Allocatable feature",
        ),
        (
            with(&|r| _ = r.insert(0, reserved(95)), 2),
            "NUMA node 0 has 92Mi of memory, but 95Mi are to be reserved there",
        ),
        (
            with(
                &|r| _ = r.entry(0).or_default().insert(HUGE.into(), 2 * MI),
                2,
            ),
            "the total amount \"2Mi\" of type \"hugepages-2Mi\" is not equal to the value \"0\"",
        ),
    ] {
        assert!(error.contains(expected), "{error}");
        assert!(error.starts_with("reservedMemory: "), "{error}");
    }
    let none = Managers::new(
        &managers::Rules {
            memory: Some(Rules::default()),
            ..managers::Rules::default()
        },
        &Machine {
            set_aside: Amounts::new(),
            ..machine(1)
        },
        &Checkpoints::default(),
    );
    assert!(
        none.expect_err("nothing reserved")
            .contains("set reservedMemory")
    );
}

#[test]
fn memory_state_mismatches_are_reported() {
    let mut managers = start(2, None);
    managers
        .admit(
            &pod("a", &[("init", 20, 0), ("main", 50, 4)]),
            &mut Devices::default(),
        )
        .result
        .expect("given");
    let checkpoints = Checkpoints {
        memory: Some(managers.checkpoints()[0].1.clone()),
        ..Checkpoints::default()
    };
    let again = Managers::new(&rules(2, None), &machine(2), &checkpoints).expect("the same");
    assert_eq!(again.checkpoints(), managers.checkpoints());
    let with = |first, second| {
        let mut other = machine(2);
        other.topology = Arc::new(Topology {
            nodes: [(0, memory_node(first, 8)), (1, memory_node(second, 8))].into(),
            ..Topology::default()
        });
        other
    };
    // The memory of a virtual machine changes while it runs.
    for (first, second, free) in [
        (100, 90, [32, 72]),
        (110, 100, [42, 82]),
        (68, 300, [0, 282]),
    ] {
        let again = Managers::new(&rules(2, None), &with(first, second), &checkpoints);
        let again = again.expect("the containers' memory still exists");
        assert_eq!(self::free(&again, "memory"), free, "{first} {second}");
        let once_more = Checkpoints {
            memory: Some(again.checkpoints()[0].1.clone()),
            ..Checkpoints::default()
        };
        let back = Managers::new(&rules(2, None), &machine(2), &once_more).expect("as before");
        assert_eq!(back.checkpoints(), managers.checkpoints());
    }
    let none = managers::Rules::default();
    let mut other_reservation = rules(2, None);
    other_reservation.memory = Some(Rules {
        reserved: [(0, reserved(12)), (1, reserved(8))].into(),
    });
    for (rules, machine, expected) in [
        (rules(3, None), machine(3), "this machine has [0, 1, 2]"),
        (
            rules(2, None),
            with(67, 100),
            "NUMA node 0 had 104857600 bytes",
        ),
        (
            other_reservation,
            machine(2),
            "were reserved for the system",
        ),
        (none, machine(2), "memoryManagerPolicy: Static"),
    ] {
        let error = Managers::new(&rules, &machine, &checkpoints).expect_err(expected);
        assert!(
            error.contains(expected) && error.contains("memory_manager_state"),
            "{error}"
        );
    }
    // The tables count memory that no container has.
    let text = checkpoints.memory.clone().expect("one");
    let mut state = checkpoint::read(&text, "Static").expect("a state");
    state.allocations.clear();
    let checkpoints = Checkpoints {
        memory: Some(checkpoint::write("Static", &state)),
        ..Checkpoints::default()
    };
    let error = Managers::new(&rules(2, None), &machine(2), &checkpoints);
    let error = error.expect_err("memory without an owner");
    assert!(error.contains("do not add up"), "{error}");
}

#[test]
fn reserved_memory_equals_what_node_allocatable_reserves() {
    let size = MachineSize {
        cpus: 4,
        memory: 8 << 30,
        storage: 0,
        huge_pages: vec![(2 << 20, 4)],
    };
    let none = BTreeMap::new();
    let thresholds = parse(ThresholdSettings {
        hard: &DEFAULT_HARD
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
        soft: &none,
        soft_grace: &none,
        min_reclaim: &none,
        pods_are_limited: true,
    });
    let thresholds = thresholds.expect("the defaults");
    let reserved = Amounts::from(
        [
            ("memory", "1Gi"),
            (HUGE, "2Mi"),
            ("hugepages-1Gi", "1Gi"),
            ("cpu", "1"),
        ]
        .map(|(name, text)| (name.to_owned(), text.parse().expect("a quantity"))),
    );
    let limits = Limits {
        pods: 110,
        pods_per_core: 0,
        ephemeral_storage: true,
        reserved: &reserved,
        thresholds: &thresholds,
    };
    let expected = [("memory", bytes(1024 + 100)), (HUGE, bytes(2))];
    let expected = expected.map(|(name, amount)| (name.to_owned(), amount));
    assert_eq!(set_aside(&size, limits), Amounts::from(expected));
}

#[test]
fn memory_of_running_containers_is_not_resized() {
    let managers = start(1, None);
    let (one, two) = (pod("a", &[("main", 10, 0)]), pod("a", &[("main", 20, 0)]));
    assert_eq!(managers.check_resize(&one, &one), Ok(()));
    let refusal = managers.check_resize(&one, &two).expect_err("a rejection");
    assert_eq!(
        (refusal.reason.as_str(), refusal.message.as_str()),
        (
            "Infeasible",
            "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\""
        )
    );
    assert_eq!(refusal.infeasible, Some(Infeasible::MemoryManager));
}

/// A single node of a group is not allocated alone: a node allocates alone or with one group.
#[test]
fn a_numa_node_of_a_group_allocates_only_with_the_group() {
    let mut memory = start(2, None).memory().expect("static").clone();
    let give = |memory: &mut Memory, uid: &str, size, nodes: &[u32]| {
        let pod = pod(uid, &[("main", size, 0)]);
        let hint = Hint {
            nodes: Some(NodeMask::of(nodes.iter().copied())),
            preferred: false,
        };
        memory.allocate(
            &pod,
            Role::Regular,
            &pod::containers(&pod)[0].1,
            hint,
            &mut vec![],
        )
    };
    give(&mut memory, "a", 90, &[0, 1]).expect("together");
    give(&mut memory, "b", 10, &[1]).expect("extended");
    assert_eq!(memory.blocks("b", "main-0").expect("some")[0].nodes, [0, 1]);
}

/// A container in the data: kind, memory, huge pages, and the nodes of the topology manager.
type Requested<'a> = (&'a str, u64, u64, Hint);

fn shown_hints(hints: &Hints) -> String {
    let Some(hints) = hints.get("memory") else {
        return "none".into();
    };
    let shown = hints.iter().map(|hint| {
        let nodes = hint.nodes.unwrap_or_default().nodes();
        let nodes: String = nodes.iter().map(u32::to_string).collect();
        format!("{nodes}{}", if hint.preferred { "+" } else { "-" })
    });
    shown.collect::<Vec<_>>().join(",")
}

fn shown_state(state: &State) -> String {
    let node = |node: &NodeState| {
        let free = |resource: &str| node.tables[resource].free / MI;
        let cells: String = node.cells.iter().map(u32::to_string).collect();
        let (memory, huge) = (free("memory"), free(HUGE));
        format!("{memory}/{huge}/{}/{cells}", node.assignments)
    };
    state.nodes.values().map(node).collect::<Vec<_>>().join(" ")
}

fn numbers(text: &str) -> Vec<u64> {
    let parts = text.split('/');
    parts.map(|n| n.parse().expect("a number")).collect()
}

fn memory_of(line: &str) -> Memory {
    let (mut topology, mut rules, mut all) = (Topology::default(), Rules::default(), 0);
    for (id, node) in (0..).zip(line.split(' ')) {
        let node = numbers(node);
        topology.nodes.insert(id, memory_node(node[0], node[1]));
        rules.reserved.insert(id, reserved(node[2]));
        all += node[2];
    }
    let set_aside = Amounts::from([("memory".to_owned(), bytes(all))]);
    Memory::new(&rules, &topology, &set_aside).expect("valid rules")
}

fn requested(text: &str) -> Vec<Requested<'_>> {
    let one = |text| -> Requested<'_> {
        let (amounts, nodes): (&str, &str) = str::split_once(text, '@').expect("nodes");
        let (kind, amounts) = amounts.split_once('/').expect("a kind");
        let amounts = numbers(amounts);
        (kind, amounts[0], amounts[1], hint(nodes))
    };
    text.split(' ').map(one).collect()
}

/// Allocates a pod's memory; returns the result in the format of the data.
fn answer(memory: &mut Memory, uid: &str, requested: &[Requested<'_>]) -> String {
    let containers: Vec<(&str, u64, u64)> = requested.iter().map(|a| (a.0, a.1, a.2)).collect();
    let pod = pod(uid, &containers);
    let mut answer = format!("pod {}", shown_hints(&memory.hints(Subject::Pod(&pod))));
    for ((role, container), (.., affinity)) in pod::containers(&pod).iter().zip(requested) {
        let hints = memory.hints(Subject::Container(&pod, container));
        answer += &format!(" {}", shown_hints(&hints));
        if let Err(refusal) = memory.allocate(&pod, *role, container, *affinity, &mut vec![]) {
            memory.release(uid);
            let why = refusal.message.strip_prefix("Allocate failed due to ");
            let why = why.and_then(|why| why.strip_suffix(", which is unexpected"));
            return format!("{answer} ! {}", why.expect("the kubelet's message"));
        }
    }
    answer += " =";
    for (_, container) in pod::containers(&pod) {
        let of = |resource: &str| {
            let mut blocks = memory.blocks(uid, &container.name).into_iter().flatten();
            blocks
                .find(|b| b.resource == resource)
                .map_or(0, |b| b.size)
                / MI
        };
        answer += &format!(" {}/{}", of("memory"), of(HUGE));
    }
    answer
}

#[test]
fn memory_is_allocated_as_by_the_kubelet() {
    let mut memory = memory_of("100/0/1");
    for line in include_str!("allocations.txt").lines() {
        let (question, expected) = line.split_once(": ").unwrap_or((line, ""));
        let (word, rest) = question.split_once(' ').unwrap_or((question, ""));
        match (word, rest) {
            ("machine", nodes) => memory = memory_of(nodes),
            ("checkpoint", _) => {
                let text = line.trim_start_matches("checkpoint ");
                let mut state = checkpoint::read(text, "Static").expect("a state");
                assert_eq!(checkpoint::write("Static", &state), text);
                for blocks in state
                    .allocations
                    .values_mut()
                    .flat_map(BTreeMap::values_mut)
                {
                    blocks.sort_by(|a, b| a.resource.cmp(&b.resource));
                }
                assert_eq!(&state, memory.state());
            }
            ("state", _) => assert_eq!(shown_state(memory.state()), expected),
            (uid, "gone") => {
                assert!(memory.release(uid));
                assert_eq!(shown_state(memory.state()), expected, "{line}");
            }
            (uid, containers) => {
                assert_eq!(
                    answer(&mut memory, uid, &requested(containers)),
                    expected,
                    "{line}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Allocated and free memory add up on each node and in total, a restart changes nothing, and after all pods are
    /// released everything is free.
    #[test]
    fn allocated_and_free_memory_add_up(
        number in 1_u32..5,
        policy in 0_u8..4,
        happenings in prop::collection::vec((0_u8..6, prop::bool::weighted(0.7), 0_u64..120, 1_u64..120, 0_u64..5), 1..30),
    ) {
        let alignment = [None, Some(Policy::BestEffort), Some(Policy::Restricted), Some(Policy::SingleNode)][usize::from(policy)];
        let rules = rules(number, alignment.map(|p| (p, Scope::Container)));
        let mut managers = start(number, alignment.map(|p| (p, Scope::Container)));
        let untouched = managers.checkpoints();
        for (uid, comes, init, regular, huge) in happenings {
            let uid = uid.to_string();
            let before = managers.checkpoints();
            if !comes {
                managers.release(&uid);
            } else if managers.admit(&pod(&uid, &[("init", init.max(1), 0), ("sidecar", 5, 0), ("main", regular, huge * 2)]), &mut Devices::default()).result.is_err() {
                prop_assert_eq!(&before, &managers.checkpoints());
            }
            let state = managers.memory().expect("static").state().clone();
            for resource in ["memory", HUGE] {
                for node in state.nodes.values() {
                    let table = &node.tables[resource];
                    prop_assert_eq!(table.free + table.reserved, table.allocatable);
                }
                let reserved: u64 = state.nodes.values().map(|n| n.tables[resource].reserved).sum();
                let blocks = state.allocations.values().flat_map(BTreeMap::values).flatten();
                let given: u64 = blocks.filter(|b| b.resource == resource).map(|b| b.size).sum();
                prop_assert_eq!(reserved, given, "{}", resource);
            }
            let checkpoints = Checkpoints { memory: Some(managers.checkpoints()[0].1.clone()), ..Checkpoints::default() };
            let again = Managers::new(&rules, &machine(number), &checkpoints);
            prop_assert_eq!(again.map(|m| m.checkpoints()), Ok(managers.checkpoints()));
        }
        for uid in 0..6 {
            managers.release(&uid.to_string());
        }
        prop_assert_eq!(managers.checkpoints(), untouched);
    }

    /// With any affinity, no node is in two groups, and a restart finds a consistent state.
    #[test]
    fn no_numa_node_is_in_two_groups(
        number in 1_u32..5,
        happenings in prop::collection::vec((0_u8..6, 1_u64..150, 0_u64..3, 0_u32..16, any::<bool>()), 1..30),
    ) {
        let fresh = start(number, None).memory().expect("static").clone();
        let mut memory = fresh.clone();
        for (uid, size, huge, nodes, preferred) in happenings {
            let pod = pod(&uid.to_string(), &[("main", size, huge * 2)]);
            let nodes: Vec<u32> = (0..number).filter(|n| nodes & (1 << n) != 0).collect();
            let hint = Hint { nodes: (!nodes.is_empty()).then(|| NodeMask::of(nodes)), preferred };
            if size % 3 == 0 {
                memory.release(pod::uid(&pod));
            } else {
                let container = &pod.spec.as_ref().expect("a spec").containers[0];
                memory.allocate(&pod, Role::Regular, container, hint, &mut vec![]).ok();
            }
            for (id, node) in &memory.state().nodes {
                prop_assert!(node.cells.contains(id));
                for other in &node.cells {
                    prop_assert_eq!(&memory.state().nodes[other].cells, &node.cells);
                }
            }
            let mut again = fresh.clone();
            prop_assert_eq!(again.load(memory.state().clone()), Ok(()));
        }
    }
}
