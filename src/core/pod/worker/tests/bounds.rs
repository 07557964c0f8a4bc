//! Extreme values for every number and quantity of a pod, a Node, a claim and the node's configuration. If an apiserver
//! accepts them, they must not crash the agent.

use super::*;
use crate::node::admit::{self, NodeState};
use crate::node::capacity::{self, MachineSize};
use crate::node::eviction::Pressures;
use crate::node::ledger::Ledger;
use crate::node::shutdown::{Period, Periods, ShutdownSettings};
use crate::node::{cpus, hints, managers, memory, preempt, topology, used::Used};
use crate::pod::cri_config::{self, Prepared};
use crate::pod::memory_qos::{self, MemoryQos};
use crate::pod::probe::{self, Kind, Timing};
use crate::pod::resources::{self, Amounts, Side};
use crate::pod::{cgroup, dns, qos};
use crate::quantity::Quantity;
use crate::time;
use crate::volume::{claims, local_storage, payload};
use k8s_openapi::api::core::v1::{LifecycleHandler, Node, PersistentVolume, PersistentVolumeClaim};
use std::time::Duration;

/// 64-bit numbers.
const LONG: [i64; 12] = [
    i64::MIN,
    i64::MIN + 1,
    -1,
    0,
    1,
    30,
    i32::MAX as i64,
    u32::MAX as i64,
    250_000_000_000,
    1_000_000_000_000,
    i64::MAX - 1,
    i64::MAX,
];
/// 32-bit numbers.
const SHORT: [i32; 7] = [i32::MIN, -1, 0, 1, 30, i32::MAX - 1, i32::MAX];
const QUANTITIES: [&str; 13] = [
    "0",
    "1",
    "250m",
    "64Mi",
    "1e30",
    "-1e30",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "1Ei",
    "16Ei",
    "0.0000001",
    "1n",
];

/// Draws values, one after the other.
struct Draw<'a>(std::iter::Cycle<std::slice::Iter<'a, u8>>);

impl Draw<'_> {
    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        let place = self.0.next().map_or(0, |byte| usize::from(*byte));
        all[place % all.len()]
    }

    fn long(&mut self) -> i64 {
        self.of(&LONG)
    }

    fn short(&mut self) -> i32 {
        self.of(&SHORT)
    }

    fn quantity(&mut self) -> &'static str {
        self.of(&QUANTITIES)
    }

    fn amounts(&mut self) -> Value {
        json!({"cpu": self.quantity(), "memory": self.quantity(), "ephemeral-storage": self.quantity(),
            "hugepages-2Mi": self.quantity(), "example.com/thing": self.quantity()})
    }

    fn resources(&mut self) -> Value {
        json!({"requests": self.amounts(), "limits": self.amounts()})
    }

    fn probe(&mut self) -> Value {
        json!({"exec": {"command": ["true"]}, "initialDelaySeconds": self.short(), "periodSeconds": self.short(),
            "timeoutSeconds": self.short(), "successThreshold": self.short(), "failureThreshold": self.short(),
            "terminationGracePeriodSeconds": self.long()})
    }

    fn container(&mut self, name: &str) -> Value {
        json!({"name": name, "image": "i", "resources": self.resources(),
            "ports": [{"containerPort": self.short(), "hostPort": self.short()}],
            "startupProbe": self.probe(), "livenessProbe": self.probe(), "readinessProbe": self.probe(),
            "lifecycle": {"preStop": {"sleep": {"seconds": self.long()}}},
            "securityContext": {"runAsUser": self.long(), "runAsGroup": self.long()}})
    }

    fn spec(&mut self) -> Value {
        let mut sidecar = self.container("s");
        sidecar["restartPolicy"] = "Always".into();
        json!({"restartPolicy": self.of(&["Always", "OnFailure", "Never"]),
            "terminationGracePeriodSeconds": self.long(), "activeDeadlineSeconds": self.long(), "priority": self.short(),
            "overhead": self.amounts(), "resources": self.resources(),
            "securityContext": {"runAsUser": self.long(), "runAsGroup": self.long(), "fsGroup": self.long(),
                "supplementalGroups": [self.long(), self.long()]},
            "tolerations": [{"operator": "Exists", "tolerationSeconds": self.long()}],
            "volumes": [{"name": "e", "emptyDir": {"sizeLimit": self.quantity()}},
                {"name": "t", "projected": {"defaultMode": self.short(),
                    "sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": self.long()}}]}}],
            "initContainers": [sidecar, self.container("i")], "containers": [self.container("c")]})
    }
}

/// The life of a pod: it starts, is probed, restarts, completes, is deleted, and is adopted by another agent.
fn live(draw: &mut Draw<'_>) {
    let spec = draw.spec();
    let mut run = Run::new(a_pod(spec.clone(), json!({})));
    run.settle();
    for (container, kind) in [
        ("c0", Kind::Liveness),
        ("c0", Kind::Startup),
        ("s0", Kind::Liveness),
    ] {
        let (id, result) = (container.to_owned(), false);
        run.input(Input::Probed { id, kind, result });
        run.settle();
        run.now += 400_000;
        run.input(Input::Tick);
        run.settle();
    }
    let grown = a_pod(
        draw.spec(),
        json!({"generation": 2, "resourceVersion": "2"}),
    );
    run.input(Input::Update(grown));
    run.settle();
    let by = SignedDuration::from_secs(draw.long());
    run.input(Input::ClockMoved(by));
    run.settle();
    let all: Vec<String> = run.runtime.live().map(|c| c.id.clone()).collect();
    all.iter().for_each(|id| run.exit(id, draw.short()));
    run.input(Input::Hint);
    run.settle();
    run = run.restarted();
    run.settle();
    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": draw.long(),
        "generation": 3, "resourceVersion": "3"});
    run.input(Input::Update(a_pod(spec.clone(), deleted.clone())));
    let mut again = Run::over(run.runtime.clone(), a_pod(spec, deleted));
    for run in [&mut run, &mut again] {
        run.settle();
        // Whatever its grace period: once the runtime has stopped the pod, nothing of it runs.
        assert!(run.runtime.live().next().is_none());
        assert!(run.begun.contains(&Key::Finalise), "{:?}", run.begun);
    }
}

/// Computes the configurations for the runtime, the cgroups and the volumes.
fn configure(pod: &Pod, draw: &mut Draw<'_>) {
    let mut node = cri_config::Node::new(Arc::new(dns::Resolver::default()));
    node.memory = draw.long().unsigned_abs();
    node.cpu_period = Some(draw.long().unsigned_abs());
    node.page_sizes = vec![2 << 20, draw.long().unsigned_abs()];
    let qos = MemoryQos {
        throttling: 0.9,
        reserves: true,
    };
    node.memory_qos = Some((qos, draw.long().unsigned_abs()));
    let _ = cri_config::sandbox(pod, draw.short().unsigned_abs(), &node);
    let _ = cri_config::sandbox_sizes(pod, &node);
    for (_, container) in pod::containers(pod) {
        let prepared = Prepared {
            attempt: draw.short().unsigned_abs(),
            image: "i",
            image_user: (Some(draw.long()), String::new()),
            env: vec![],
            mounts: vec![],
            devices: vec![],
            annotations: BTreeMap::new(),
            cdi: vec![],
            target: None,
            groups: vec![draw.long()],
        };
        let _ = cri_config::container(pod, &container, prepared, &node);
        let _ = memory_qos::of_one_container(pod, &container, qos, draw.long().unsigned_abs());
        for kind in Kind::ALL {
            let probe = kind.of(&container).expect("a probe");
            let (timing, _) = Timing::of(pod, &container.name, kind, probe);
            assert!(timing.period >= Duration::from_secs(1));
        }
        let hook: &LifecycleHandler = container
            .lifecycle
            .as_ref()
            .and_then(|l| l.pre_stop.as_ref())
            .expect("a hook");
        let hook = probe::hook(hook, &container, None).expect("a hook");
        assert!(matches!(hook, probe::Hook::Sleep(by) if by <= time::span(i64::MAX)));
    }
    for period in [None, Some(100_000), Some(draw.long().unsigned_abs())] {
        let values = cgroup::pod_values(pod, Some(draw.long()), period, &node.page_sizes);
        for unified in [true, false] {
            let _ = (values.settings(unified), values.properties(unified));
        }
        let _ = values.rounded_by_systemd();
    }
    let _ = (qos::of(pod::spec(pod)), memory_qos::of_pods(&[pod, pod]));
    let usage = local_storage::Usage {
        volumes: BTreeMap::from([("e".to_owned(), u64::MAX)]),
        containers: BTreeMap::from([("c".to_owned(), u64::MAX)]),
    };
    let _ = local_storage::limits(pod).exceeded(&usage);
    for volume in pod::spec(pod).volumes.iter().flatten() {
        let _ = payload::tokens(volume);
    }
}

/// The managers of two NUMA nodes with four CPUs each.
fn managers() -> managers::Managers {
    let cpu = |id: u32| {
        let (node, socket, cache, core) = (id / 4, id / 4, id / 4, id);
        let cpu = topology::Cpu {
            node,
            socket,
            core,
            cache,
        };
        (id, cpu)
    };
    let node = topology::MemoryNode {
        memory: 100 << 20,
        ..topology::MemoryNode::default()
    };
    let mut topology = topology::Topology {
        nodes: BTreeMap::from([(0, node.clone()), (1, node)]),
        ..topology::Topology::default()
    };
    topology.cpus.0.extend((0..8).map(cpu));
    let rules = managers::Rules {
        cpus: Some(cpus::Rules {
            options: cpus::Options::default(),
            reserved_milli: 1000,
            reserved: None,
        }),
        memory: Some(memory::Rules {
            reserved: BTreeMap::from([(0, BTreeMap::from([("memory".to_owned(), 10 << 20)]))]),
        }),
        alignment: Some(hints::Rules {
            policy: hints::Policy::BestEffort,
            scope: hints::Scope::Container,
            closest: false,
            max_nodes: 8,
        }),
        ..managers::Rules::default()
    };
    let machine = managers::Machine {
        topology: Arc::new(topology),
        set_aside: Amounts::from([("memory".to_owned(), Quantity::from_bytes(10 << 20))]),
    };
    managers::Managers::new(&rules, &machine, &managers::Checkpoints::default()).expect("managers")
}

/// Computes the decisions of the node: admission, preemption, eviction, shutdown, and the sums.
fn admit(pod: &Arc<Pod>, draw: &mut Draw<'_>) {
    let node = json!({"status": {"allocatable": {"example.com/thing": draw.quantity()}}});
    let node: Node = serde_json::from_value(node).expect("a node");
    let reserved = resources::amounts(&serde_json::from_value(draw.amounts()).expect("amounts"));
    let machine = MachineSize {
        cpus: draw.short().unsigned_abs(),
        memory: draw.long().unsigned_abs(),
        storage: draw.long().unsigned_abs(),
        huge_pages: vec![(2 << 20, draw.long().unsigned_abs())],
    };
    let limits = capacity::Limits {
        pods: draw.long(),
        pods_per_core: draw.long(),
        ephemeral_storage: true,
        reserved: &reserved,
        thresholds: &[],
    };
    let allocatable = capacity::allocatable(&machine, limits);
    let node_state = NodeState {
        allocatable: &allocatable,
        node: &node,
        unsafe_sysctls: &[],
        kernel: "6.18",
        apparmor: true,
        strict_groups: true,
        pressures: &Pressures::new(),
        shutting_down: false,
    };
    let mut used = Used::default();
    used.set("other", pod);
    let (first, second) = (
        admit::admit(pod, &Used::default(), &node_state),
        admit::admit(pod, &used, &node_state),
    );
    if let Some(refusal) = first.err().or(second.err()) {
        let _ = preempt::choose_victims(pod, &[&**pod, &**pod], &refusal.missing);
    }
    let mut ledger = Ledger::default();
    let _ = ledger.admit(pod, &node_state, Duration::ZERO);
    let _ = ledger.allocate_resize(pod, node_state.resources());
    let _ = ledger.release_overdue(ledger.next_deadline().unwrap_or(Duration::MAX));
    let _ = managers().admit(pod, &mut crate::node::devices::Devices::default());
    shut_down(pod, draw);
    for side in [Side::Requests, Side::Limits] {
        for amount in resources::of_pod(pod, side).values() {
            let _ = (amount.units(), amount.milli(), amount.to_string());
        }
    }
}

/// Computes the phases of a node shutdown for the pod.
fn shut_down(pod: &Arc<Pod>, draw: &mut Draw<'_>) {
    let periods = (0..3).map(|_| Period {
        priority: draw.short(),
        shutdown_grace_period_seconds: draw.long(),
    });
    let settings = ShutdownSettings {
        all: Duration::ZERO,
        critical: Duration::ZERO,
        by_priority: periods.collect(),
    };
    if let Ok(periods) = Periods::new(&settings) {
        for phase in periods.phases(vec![Arc::clone(pod)]) {
            let verdict = phase.verdict(pod, phase.period);
            assert!(
                verdict
                    .grace
                    .is_some_and(|grace| grace <= time::MAX_SECONDS)
            );
        }
        let _ = periods.total();
    }
}

/// Computes the expansion of a claim and its volume.
fn grow(draw: &mut Draw<'_>) {
    let sizes = |draw: &mut Draw<'_>| json!({"storage": draw.quantity()});
    let claim = json!({"metadata": {"name": "c", "namespace": "n"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": sizes(draw)}},
        "status": {"capacity": sizes(draw), "allocatedResources": sizes(draw)}});
    let volume = json!({"metadata": {"name": "v"}, "spec": {"accessModes": ["ReadWriteOnce"], "capacity": sizes(draw)}});
    let claim: PersistentVolumeClaim = serde_json::from_value(claim).expect("a claim");
    let volume: PersistentVolume = serde_json::from_value(volume).expect("a volume");
    let _ = (
        claims::pending_expansion(&volume, &claim),
        claims::satisfies(&volume, &claim),
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_number_that_the_api_accepts_panics_the_agent(draws in proptest::collection::vec(any::<u8>(), 97..151)) {
        let mut draw = Draw(draws.iter().cycle());
        live(&mut draw);
        let update = a_pod(draw.spec(), json!({}));
        configure(&update.pod, &mut draw);
        admit(&update.pod, &mut draw);
        grow(&mut draw);
    }
}

/// With `{terminationGracePeriodSeconds: 1000000000000, restartPolicy: Never, command: ["true"]}` the agent once
/// panicked at the pod's completion.
#[test]
fn a_pod_with_an_endless_grace_period_completes_and_is_deleted() {
    for grace in LONG {
        let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": grace,
            "containers": [{"name": "c", "image": "i", "command": ["true"]}]});
        let mut run = Run::new(a_pod(spec.clone(), json!({})));
        run.settle();
        run.exit("c0", 0);
        run.input(Input::Hint);
        run.settle();
        assert_eq!(run.phase(), "Succeeded", "{grace}");
        let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": grace,
            "resourceVersion": "2"});
        run.input(Input::Update(a_pod(spec, deleted)));
        run.settle();
        assert!(run.begun.contains(&Key::Finalise), "{grace}");
    }
}
