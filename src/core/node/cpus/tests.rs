//! `takes.txt` has the output of the kubelet's own accumulator on various machines. Kinds of lines:
//!
//! - `machine NAME`
//! - `cores NODE SOCKET CACHE` with the threads of each core, for the machine above
//! - a case: how to choose, the number and the free CPUs, and the CPUs taken

mod tables;

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::cpuset::parse_list;
use crate::node::devices::Devices;
use crate::node::hints::{Alignment, Scope};
use crate::node::managers::{self, Checkpoints, Machine, Managers};
use crate::node::topology::Cpu;
use crate::pod::pinning::Pinning;
use crate::pod::resize::Infeasible;

fn set(text: &str) -> CpuSet {
    parse_list(text).expect("a list")
}

/// Adds the cores from a line `NODE SOCKET CACHE THREADS ...`.
fn add_cores(topology: &mut Topology, line: &str) {
    let mut words = line.split(' ');
    let mut number = || words.next().and_then(|w| w.parse().ok()).expect("a number");
    let (node, socket, cache) = (number(), number(), number());
    topology.nodes.entry(node).or_default();
    for threads in words {
        let threads = set(&threads.replace('+', ","));
        let core = *threads.first().expect("a thread");
        let cpu = Cpu {
            node,
            socket,
            core,
            cache,
        };
        topology
            .cpus
            .0
            .extend(threads.into_iter().map(|id| (id, cpu)));
    }
}

/// The machines of the file, each with its cases.
fn machines() -> Vec<(&'static str, Topology, Vec<&'static str>)> {
    let mut machines: Vec<(&str, Topology, Vec<&str>)> = vec![];
    for line in include_str!("takes.txt").lines() {
        if let Some(name) = line.strip_prefix("machine ") {
            machines.push((name, Topology::default(), vec![]));
            continue;
        }
        let (_, topology, takes) = machines.last_mut().expect("a machine");
        match line.strip_prefix("cores ") {
            Some(cores) => add_cores(topology, cores),
            None => takes.push(line),
        }
    }
    machines
}

#[test]
fn cpus_are_taken_in_the_kubelets_order() {
    let mut differences = vec![];
    for (name, topology, takes) in machines() {
        for line in takes {
            let (question, answer) = line.split_once(": ").expect("an answer");
            let (way, rest) = question.split_once(' ').expect("a manner");
            let (number, free) = rest.split_once(" of ").expect("a number");
            let way = match way.strip_prefix("nodes-") {
                Some(group) => TakeOptions {
                    numa_group_size: group.parse().ok(),
                    ..TakeOptions::default()
                },
                None => TakeOptions {
                    spread: way == "spread",
                    align_to_caches: way == "caches",
                    numa_group_size: None,
                },
            };
            let number = number.parse().expect("a number");
            let taken = accumulator::take(&topology, &set(free), number, way);
            let taken = taken.map_or("none".to_owned(), |taken| format_list(&taken));
            if taken != answer {
                differences.push(format!("{name}: {line}, but got {taken}"));
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

fn named(name: &str) -> Machine {
    let found = machines().into_iter().find(|(n, _, _)| *n == name);
    Machine {
        topology: Arc::new(found.expect("such a machine").1),
        ..Machine::default()
    }
}

fn pod(uid: &str, containers: &[(&str, &str)]) -> Pod {
    let mut spec = json!({"containers": [], "initContainers": []});
    for (kind, cpu) in containers {
        let amounts = json!({"cpu": cpu, "memory": "1Mi"});
        let (field, policy) = match *kind {
            "init" => ("initContainers", Value::Null),
            "sidecar" => ("initContainers", json!("Always")),
            _ => ("containers", Value::Null),
        };
        let list = spec[field].as_array_mut().expect("a list");
        let name = format!("{kind}-{}", list.len());
        list.push(json!({"name": name, "restartPolicy": policy,
            "resources": {"requests": amounts, "limits": amounts}}));
    }
    serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid}, "spec": spec}))
        .expect("a pod")
}

fn rules(options: Options, reserved: &str) -> managers::Rules {
    let reserved = set(reserved);
    managers::Rules {
        cpus: Some(Rules {
            options,
            reserved_milli: i64::try_from(reserved.len()).expect("few") * 1000,
            reserved: Some(reserved),
        }),
        ..managers::Rules::default()
    }
}

fn manager(machine: &str, options: Options, reserved: &str) -> Managers {
    let made = Managers::new(
        &rules(options, reserved),
        &named(machine),
        &Checkpoints::default(),
    );
    made.expect("managers")
}

fn given(managers: &Managers, uid: &str) -> Vec<(String, String)> {
    let pinning = managers.pinning();
    let containers = pinning.exclusive.get(uid).into_iter().flatten();
    containers
        .map(|(name, set)| (name.clone(), format_list(set)))
        .collect()
}

fn shared(managers: &Managers) -> String {
    managers
        .pinning()
        .shared
        .map(|set| format_list(&set))
        .unwrap_or_default()
}

#[test]
fn whole_cpus_stay_exclusive_until_their_pod_is_removed() {
    // Threads of a core: 0 and 4, 1 and 5, 2 and 6, 3 and 7.
    let mut managers = manager("laptop", Options::default(), "0");
    managers
        .admit(&pod("a", &[("main", "2")]), &mut Devices::default())
        .result
        .expect("given");
    assert_eq!(
        given(&managers, "a"),
        [("main-0".to_owned(), "1,5".to_owned())]
    );
    managers
        .admit(&pod("b", &[("main", "1500m")]), &mut Devices::default())
        .result
        .expect("shared");
    assert!(given(&managers, "b").is_empty());
    assert_eq!(shared(&managers), "0,2-4,6-7");
    managers
        .admit(&pod("a", &[("main", "2")]), &mut Devices::default())
        .result
        .expect("a repeated admission succeeds");
    let refusal = managers
        .admit(
            &pod("c", &[("main", "3"), ("main", "3")]),
            &mut Devices::default(),
        )
        .result
        .expect_err("too many");
    assert_eq!(
        (refusal.reason.as_str(), refusal.message.as_str()),
        (
            "UnexpectedAdmissionError",
            "Allocate failed due to not enough cpus available to satisfy request: requested=3, available=2, which is unexpected"
        )
    );
    assert!(given(&managers, "c").is_empty(), "all or nothing");
    assert!(managers.release("a") && !managers.release("a"));
    assert_eq!(shared(&managers), "0-7");
}

#[test]
fn init_containers_pass_on_their_cpus_and_sidecars_keep_theirs() {
    let mut managers = manager("laptop", Options::default(), "0");
    let containers = [
        ("init", "4"),
        ("sidecar", "1"),
        ("init", "2"),
        ("main", "2"),
    ];
    managers
        .admit(&pod("a", &containers), &mut Devices::default())
        .result
        .expect("given");
    let all = managers.pinning().exclusive["a"].clone();
    let own = |name: &str| all[name].clone();
    let together: CpuSet = all.values().flatten().copied().collect();
    assert_eq!(shared(&managers), format_list(&(&set("0-7") - &together)));
    let sidecar = own("sidecar-1");
    assert!(sidecar.is_disjoint(&own("main-0")) && sidecar.is_disjoint(&own("init-2")));
    assert!(own("main-0").is_subset(&own("init-0")));
    managers.release("a");
    assert_eq!(shared(&managers), "0-7");
}

#[test]
fn full_pcpus_only_rejects_partial_cores() {
    let options = Options {
        full_cores: true,
        ..Options::default()
    };
    let mut managers = manager("laptop", options, "0");
    for (number, expected) in [
        (
            "3",
            "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2",
        ),
        (
            "8",
            "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 6, requested CPUs = 8, CPUs per core = 2",
        ),
    ] {
        let refusal = managers
            .admit(&pod("a", &[("main", number)]), &mut Devices::default())
            .result
            .expect_err(number);
        assert_eq!(
            (refusal.reason.as_str(), refusal.message.as_str()),
            ("SMTAlignmentError", expected)
        );
    }
    managers
        .admit(&pod("a", &[("main", "6")]), &mut Devices::default())
        .result
        .expect("given");
    assert_eq!(shared(&managers), "0,4");
    // A container that has its cores keeps them, even if no others are free.
    managers
        .admit(&pod("a", &[("main", "6")]), &mut Devices::default())
        .result
        .expect("given");
}

#[test]
fn strictly_reserved_cpus_are_in_no_pool() {
    let options = Options {
        strict_reservation: true,
        ..Options::default()
    };
    let mut managers = manager("laptop", options, "0,4");
    assert_eq!(shared(&managers), "1-3,5-7");
    managers
        .admit(&pod("a", &[("main", "6")]), &mut Devices::default())
        .result
        .expect("given");
    let checkpoints = Checkpoints {
        cpus: Some(managers.checkpoints()[0].1.clone()),
        ..Checkpoints::default()
    };
    let again = Managers::new(&rules(options, "0,4"), &named("laptop"), &checkpoints);
    assert_eq!(again.expect("the same").pinning(), managers.pinning());
}

#[test]
fn a_checkpoint_is_restored_or_rejected_with_the_remedy() {
    let mut managers = manager("laptop", Options::default(), "0");
    managers
        .admit(&pod("a", &[("main", "2")]), &mut Devices::default())
        .result
        .expect("given");
    let checkpoints = Checkpoints {
        cpus: Some(managers.checkpoints()[0].1.clone()),
        ..Checkpoints::default()
    };
    let with = |rules: &managers::Rules, machine: &str| {
        Managers::new(rules, &named(machine), &checkpoints)
    };
    let same = with(&rules(Options::default(), "0"), "laptop").expect("the same");
    assert_eq!(same.pinning(), managers.pinning());
    let strict = Options {
        strict_reservation: true,
        ..Options::default()
    };
    for (rules, machine, expected) in [
        (
            rules(Options::default(), "1"),
            "laptop",
            "not all of the reserved CPUs 1",
        ),
        (rules(strict, "0"), "laptop", "strictly reserved"),
        (
            rules(Options::default(), "0"),
            "one socket with a cache for four cores",
            "this machine has 0-31",
        ),
        (
            managers::Rules::default(),
            "laptop",
            "cpuManagerPolicy: static",
        ),
    ] {
        let error = with(&rules, machine).expect_err(expected);
        assert!(error.contains(expected), "{error}");
        assert!(
            error.contains("cpu_manager_state") && error.contains("remove the file"),
            "{error}"
        );
    }
}

#[test]
fn cpus_of_running_containers_are_not_resized() {
    let managers = manager("laptop", Options::default(), "0");
    let (one, two) = (pod("a", &[("main", "1")]), pod("a", &[("main", "2")]));
    assert_eq!(managers.check_resize(&one, &one), Ok(()));
    let refusal = managers.check_resize(&one, &two).expect_err("a rejection");
    assert_eq!(refusal.reason, "Infeasible");
    let detail = refusal.infeasible.map(Infeasible::detail);
    assert_eq!(detail, Some("guaranteed_pod_cpu_manager_static_policy"));
    assert!(refusal.message.contains("CPU Manager policy \"static\""));
    assert_eq!(Managers::default().check_resize(&one, &two), Ok(()));
}

fn aligned(policy: Policy, scope: Scope, options: Options) -> Managers {
    let alignment = crate::node::hints::Rules {
        policy,
        scope,
        closest: false,
        max_nodes: 8,
    };
    let rules = managers::Rules {
        alignment: Some(alignment),
        ..rules(options, "0")
    };
    let machine = named("two sockets, two nodes each");
    Managers::new(&rules, &machine, &Checkpoints::default()).expect("managers")
}

/// Ten CPUs per NUMA node.
#[test]
fn pods_that_do_not_fit_numa_nodes_are_rejected_as_the_policy_requires() {
    let none = Options::default();
    for (policy, scope, containers, fits) in [
        (Policy::SingleNode, Scope::Container, vec!["10", "10"], true),
        (Policy::SingleNode, Scope::Pod, vec!["5", "5"], true),
        (Policy::SingleNode, Scope::Pod, vec!["10", "10"], false),
        (Policy::SingleNode, Scope::Container, vec!["11"], false),
        (Policy::Restricted, Scope::Container, vec!["11"], true),
        (Policy::Restricted, Scope::Pod, vec!["10", "10"], true),
        (Policy::BestEffort, Scope::Container, vec!["11"], true),
    ] {
        let mut managers = aligned(policy, scope, none);
        let containers: Vec<(&str, &str)> = containers.into_iter().map(|c| ("main", c)).collect();
        let result = managers
            .admit(&pod("a", &containers), &mut Devices::default())
            .result;
        assert_eq!(result.is_ok(), fits, "{policy:?} {scope:?} {containers:?}");
        if let Err(refusal) = result {
            assert_eq!(
                (refusal.reason.as_str(), refusal.message.as_str()),
                (
                    "TopologyAffinityError",
                    "Resources cannot be allocated with Topology locality"
                )
            );
        }
    }
    // Nine of ten CPUs are in use on each node: the restricted policy rejects a pod that would be split, and best
    // effort splits it.
    for (policy, fits) in [(Policy::Restricted, false), (Policy::BestEffort, true)] {
        let mut managers = aligned(policy, Scope::Container, none);
        for uid in ["a", "b", "c", "d"] {
            managers
                .admit(&pod(uid, &[("main", "9")]), &mut Devices::default())
                .result
                .expect("given");
        }
        assert_eq!(
            managers
                .admit(&pod("e", &[("main", "2")]), &mut Devices::default())
                .result
                .is_ok(),
            fits
        );
    }
}

#[test]
fn too_many_numa_nodes_are_rejected() {
    let rules = crate::node::hints::Rules {
        policy: Policy::BestEffort,
        scope: Scope::Pod,
        closest: false,
        max_nodes: 7,
    };
    let machine = named("two sockets, four nodes each, no SMT");
    let error = Alignment::new(rules, &machine.topology).expect_err("eight nodes");
    assert!(error.contains("max-allowable-numa-nodes"), "{error}");
}

/// Sequences of steps: admit a pod with CPU requests, or release the pod.
fn happenings() -> impl Strategy<Value = Vec<(u8, bool, usize, usize)>> {
    let one = (0_u8..8, prop::bool::weighted(0.7), 0_usize..7, 0_usize..5);
    prop::collection::vec(one, 1..40)
}

/// Every usable CPU is shared or exclusive to one pod, and containers that run concurrently share no exclusive CPU.
fn check(pinning: &Pinning, reserved: &CpuSet, expected: &CpuSet) -> Result<(), TestCaseError> {
    let mut seen = pinning.shared.clone().expect("a pool");
    prop_assert_eq!(reserved.is_subset(&seen), reserved.is_subset(expected));
    for containers in pinning.exclusive.values() {
        let own: CpuSet = containers.values().flatten().copied().collect();
        prop_assert!(own.is_disjoint(&seen) && own.is_disjoint(reserved));
        let lasting = containers
            .iter()
            .filter(|(name, _)| !name.starts_with("init"));
        let lasting: Vec<u32> = lasting.flat_map(|(_, set)| set).copied().collect();
        let different: CpuSet = lasting.iter().copied().collect();
        prop_assert_eq!(different.len(), lasting.len());
        seen.extend(own);
    }
    prop_assert_eq!(&seen, expected);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// No CPU is allocated twice or lost, the reserved CPUs stay shared, every admitted container gets what it
    /// requests, and a restart changes nothing.
    #[test]
    fn every_cpu_is_shared_or_exclusive(
        machine in 0_usize..14,
        bits in 0_u8..32,
        policy in 0_u8..4,
        pod_scope: bool,
        happenings in happenings(),
    ) {
        let (_, topology, _) = machines().swap_remove(machine);
        let machine = Machine { topology: Arc::new(topology), ..Machine::default() };
        let all = machine.topology.cpus.all();
        let bit = |n: u8| bits & (1 << n) != 0;
        let options = Options {
            full_cores: bit(0),
            across_nodes: bit(1),
            by_socket: bit(2) && policy != 3,
            strict_reservation: bit(3),
            by_cache: bit(4) && !bit(1),
            across_cores: false,
        };
        let alignment = [None, Some(Policy::BestEffort), Some(Policy::Restricted), Some(Policy::SingleNode)][usize::from(policy)];
        let mut rules = rules(options, &all.first().expect("a processor").to_string());
        rules.alignment = alignment.map(|policy| crate::node::hints::Rules {
            policy,
            scope: if pod_scope { Scope::Pod } else { Scope::Container },
            closest: false,
            max_nodes: 8,
        });
        let Ok(mut managers) = Managers::new(&rules, &machine, &Checkpoints::default()) else {
            // `align-by-socket` is invalid on some machines.
            prop_assert!(options.by_socket);
            return Ok(());
        };
        let reserved = rules.cpus.as_ref().and_then(|c| c.reserved.clone()).expect("one");
        for (uid, comes, regular, init) in happenings {
            let uid = uid.to_string();
            if comes {
                let (init, regular) = (init.to_string(), regular.to_string());
                let pod = pod(&uid, &[("init", &init), ("sidecar", "1"), ("main", &regular), ("main", "500m")]);
                let known = managers.pinning().exclusive.contains_key(&uid);
                let before = managers.pinning();
                let admitted = managers.admit(&pod, &mut Devices::default()).result;
                if admitted.is_err() || known {
                    prop_assert_eq!(&before, &managers.pinning(), "{:?}", admitted);
                } else {
                    for (_, container) in pod::containers(&pod) {
                        let own = managers.pinning().exclusive.get(&uid).and_then(|c| c.get(&container.name)).map_or(0, CpuSet::len);
                        prop_assert_eq!(own, wanted(&pod, &container));
                    }
                }
            } else {
                managers.release(&uid);
            }
            let pinning = managers.pinning();
            let expected = if options.strict_reservation { &all - &reserved } else { all.clone() };
            check(&pinning, &reserved, &expected)?;
            let checkpoints = Checkpoints { cpus: Some(managers.checkpoints()[0].1.clone()), ..Checkpoints::default() };
            let again = Managers::new(&rules, &machine, &checkpoints);
            prop_assert_eq!(again.map(|m| m.pinning()), Ok(pinning));
        }
    }
}
