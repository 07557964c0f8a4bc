use super::*;
use crate::node::eviction::{Pressure, Pressures};
use crate::pod::resize::{INFEASIBLE, Infeasible};
use crate::pod::resources::Amounts;
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

const NOW: Duration = Duration::ZERO;

fn pod(uid: &str, priority: i32, cpu: &str) -> Arc<Pod> {
    let pod = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid},
        "spec": {"priority": priority, "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}],
                 "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}});
    Arc::new(serde_json::from_value(pod).expect("a pod"))
}

fn with_two_cpus<T>(work: impl FnOnce(&NodeState<'_>) -> T) -> T {
    let allocatable = Amounts::from([
        ("cpu".to_owned(), "2".parse().expect("a quantity")),
        ("pods".to_owned(), "10".parse().expect("a quantity")),
    ]);
    work(&NodeState {
        allocatable: &allocatable,
        node: &Node::default(),
        unsafe_sysctls: &[],
        kernel: "6.18",
        apparmor: false,
        strict_groups: false,
        pressures: &Pressures::new(),
        shutting_down: false,
    })
}

#[test]
fn a_critical_pod_preempts_each_victim_once_and_waits_for_its_termination() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        assert_eq!(
            ledger.admit(&pod("a", 0, "2"), node_state, NOW),
            Decision::Admitted
        );
        let plain = ledger.admit(&pod("b", 0, "1"), node_state, NOW);
        assert!(matches!(plain, Decision::Refused(r) if r.reason == "OutOfcpu"));
        let critical = pod("c", 2_000_000_000, "1");
        let Decision::AwaitingPreemption(first) = ledger.admit(&critical, node_state, NOW) else {
            panic!("expected a preemption");
        };
        assert_eq!(
            first.iter().map(|e| e.uid.as_str()).collect::<Vec<_>>(),
            ["a"]
        );
        assert_eq!(first[0].verdict.cause, Cause::Preempted);
        assert_eq!(
            ledger.admit(&critical, node_state, NOW),
            Decision::AwaitingPreemption(vec![]),
            "no victim is evicted twice"
        );
        ledger.release("a");
        assert_eq!(ledger.admit(&critical, node_state, NOW), Decision::Admitted);
    });
}

/// A victim with a grace period of 100 seconds does not stop: after 150 seconds the critical pod gets its resources, as
/// with the kubelet.
#[test]
fn a_critical_pod_waits_for_a_victim_one_and_a_half_grace_periods() {
    with_two_cpus(|node_state| {
        let at = Duration::from_secs;
        for (grace, wait) in [(100, 150), (1, 10), (0, 10), (i64::MAX, 3_221_225_470)] {
            let mut ledger = Ledger::default();
            let mut victim = (*pod("a", 0, "2")).clone();
            let spec = victim.spec.get_or_insert_default();
            spec.termination_grace_period_seconds = Some(grace);
            ledger.admit(&Arc::new(victim), node_state, at(0));
            assert_eq!(ledger.next_deadline(), None);
            let critical = pod("c", 2_000_000_000, "1");
            let first = ledger.admit(&critical, node_state, at(7));
            assert!(matches!(first, Decision::AwaitingPreemption(v) if v.len() == 1));
            // Another admission of the critical pod does not restart the wait.
            let again = ledger.admit(&critical, node_state, at(9));
            assert_eq!(again, Decision::AwaitingPreemption(vec![]));
            let due = at(7 + wait);
            assert_eq!(ledger.next_deadline(), Some(due), "{grace}");
            assert!(ledger.release_overdue(due - at(1)).is_empty());
            assert_eq!(ledger.release_overdue(due).len(), 1);
            assert_eq!(ledger.next_deadline(), None);
            assert_eq!(ledger.admit(&critical, node_state, due), Decision::Admitted);
        }
    });
}

/// With a thousand pods: the cost of another pod does not depend on their number.
#[test]
fn requested_sums_match_the_admitted_pods() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        for uid in ["a", "b"] {
            ledger.admit(&pod(uid, 0, "1"), node_state, NOW);
        }
        let used = |ledger: &Ledger| ledger.used.by_others("", "cpu").milli();
        assert_eq!(used(&ledger), 2000);
        ledger.set_allocation(&pod("a", 0, "500m"));
        assert_eq!(used(&ledger), 1500);
        ledger.cancel_resize(&pod("b", 0, "250m"));
        assert_eq!(used(&ledger), 750);
        ledger.release_requests("a");
        ledger.set_allocation(&pod("a", 0, "2"));
        assert_eq!(used(&ledger), 250, "a stopped pod does not count");
        assert!(
            ledger
                .allocate_resize(&pod("b", 0, "2"), node_state.resources())
                .is_ok()
        );
        assert_eq!(used(&ledger), 2000);
        ledger.release("a");
        ledger.release("b");
        assert_eq!(ledger.used, Used::default());
    });
}

/// On a node with two CPUs, a critical pod lacks some. Columns: pods with CPUs, pods evicted before, CPUs of the
/// critical pod, expected victims.
#[test]
fn resources_of_terminating_pods_are_counted_before_preemption() {
    type Case = (
        &'static [(&'static str, &'static str)],
        &'static [&'static str],
        &'static str,
        &'static [&'static str],
    );
    const CASES: [Case; 5] = [
        (&[("a", "1"), ("b", "1")], &[], "1500m", &["b", "a"]),
        (&[("a", "1"), ("b", "1")], &["a"], "1", &[]),
        // b terminates and frees more than is missing; c alone would be the smallest sufficient victim.
        (&[("b", "1200m"), ("c", "800m")], &["b"], "800m", &[]),
        (&[("b", "1200m"), ("c", "800m")], &["b"], "1500m", &["c"]),
        (
            &[("a", "500m"), ("b", "500m"), ("c", "1")],
            &["a"],
            "1",
            &["b"],
        ),
    ];
    with_two_cpus(|node_state| {
        for (pods, evicted, requested, expected) in CASES {
            let mut ledger = Ledger::default();
            for (uid, cpu) in pods {
                assert_eq!(
                    ledger.admit(&pod(uid, 0, cpu), node_state, NOW),
                    Decision::Admitted
                );
            }
            for uid in evicted {
                assert!(ledger.evict(uid));
            }
            let critical = pod("critical", 2_000_000_000, requested);
            let names = |ledger: &mut Ledger| match ledger.admit(&critical, node_state, NOW) {
                Decision::AwaitingPreemption(victims) => {
                    Some(victims.into_iter().map(|e| e.uid).collect::<Vec<_>>())
                }
                _ => None,
            };
            let found = names(&mut ledger);
            assert_eq!(
                found.as_deref(),
                Some(&*expected.iter().map(|u| (*u).to_owned()).collect::<Vec<_>>()),
                "{evicted:?} {requested}"
            );
            // In whatever order the pods terminate, no further pod is preempted.
            for uid in evicted.iter().chain(expected) {
                if let Some(more) = names(&mut ledger) {
                    assert_eq!(more, [""; 0], "{uid}");
                }
                ledger.release(uid);
            }
            assert_eq!(ledger.admit(&critical, node_state, NOW), Decision::Admitted);
        }
    });
}

#[test]
fn a_node_under_pressure_keeps_its_pods_and_evicts_each_victim_once() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        assert_eq!(
            ledger.admit(&pod("a", 0, "0"), node_state, NOW),
            Decision::Admitted
        );
        let pressed = NodeState {
            pressures: &Pressures::from([Pressure::Disk]),
            ..*node_state
        };
        let late = ledger.admit(&pod("b", 0, "1"), &pressed, NOW);
        assert!(matches!(late, Decision::Refused(r) if r.reason == "Evicted"));
        assert_eq!(
            ledger.admit(&pod("a", 0, "0"), &pressed, NOW),
            Decision::Admitted
        );
        assert!(ledger.evict("a") && !ledger.evict("a") && !ledger.evict("b"));
        assert!(ledger.evict_again("a") && ledger.evict_again("a") && !ledger.evict_again("b"));
    });
}

#[test]
fn a_node_that_shuts_down_keeps_its_pods_and_admits_none() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        assert_eq!(
            ledger.admit(&pod("a", 0, "2"), node_state, NOW),
            Decision::Admitted
        );
        let closing = NodeState {
            shutting_down: true,
            ..*node_state
        };
        assert_eq!(
            ledger.admit(&pod("a", 0, "2"), &closing, NOW),
            Decision::Admitted
        );
        for (priority, cpu) in [(0, "0"), (2_000_000_000, "0")] {
            let refused = ledger.admit(&pod("b", priority, cpu), &closing, NOW);
            assert!(
                matches!(&refused, Decision::Refused(r) if r.reason == "NodeShutdown"
                    && r.message == "Pod was rejected as the node is shutting down."),
                "{refused:?}"
            );
        }
        // No pod is preempted for a pod that is rejected anyway.
        let critical = ledger.admit(&pod("c", 2_000_000_000, "2"), &closing, NOW);
        assert!(matches!(critical, Decision::Refused(r) if r.reason == "NodeShutdown"));
    });
}

#[test]
fn pods_that_wait_for_resources_get_them_in_order() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        let all = [("a", 0), ("b", 0), ("c", 1000), ("d", 0)];
        for (uid, priority) in all {
            let small = pod(uid, priority, "500m");
            assert_eq!(ledger.admit(&small, node_state, NOW), Decision::Admitted);
        }
        let waiting = |ledger: &Ledger| -> Vec<String> {
            let waiting = ledger.pending_resizes();
            waiting.iter().map(|p| pod::uid(p).to_owned()).collect()
        };
        for (uid, priority) in [("d", 0), ("c", 1000), ("b", 0), ("a", 0)] {
            assert!(
                ledger
                    .allocate_resize(&pod(uid, priority, "1500m"), node_state.resources())
                    .is_err()
            );
        }
        // A repeated request keeps its place.
        assert!(
            ledger
                .allocate_resize(&pod("d", 0, "1600m"), node_state.resources())
                .is_err()
        );
        assert_eq!(waiting(&ledger), ["c", "d", "b", "a"]);
        let pending = ledger.pending_resizes();
        assert_eq!(requests(&pending[1])["cpu"].milli(), 1600);
        assert!(ledger.release("c") && !ledger.release("c"));
        assert_eq!(waiting(&ledger), ["d", "b", "a"]);
        // A pod that gets its request, or requests no more than it has, leaves the queue.
        assert!(
            ledger
                .allocate_resize(&pod("b", 0, "1"), node_state.resources())
                .is_ok()
        );
        assert_eq!(waiting(&ledger), ["d", "a"]);
        assert!(requests_more(&pod("a", 0, "1"), &pod("a", 0, "1001m")));
        assert!(!requests_more(&pod("a", 0, "1"), &pod("a", 0, "1000m")));
    });
}

#[test]
fn a_resize_beyond_the_nodes_capacity_is_infeasible() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        let small = pod("a", 0, "500m");
        assert_eq!(ledger.admit(&small, node_state, NOW), Decision::Admitted);
        assert_eq!(
            ledger.admit(&pod("b", 0, "1"), node_state, NOW),
            Decision::Admitted
        );
        let refused = ledger
            .allocate_resize(&pod("a", 0, "1900m"), node_state.resources())
            .expect_err("full");
        assert_ne!(refused.reason, INFEASIBLE, "it waits until b is removed");
        assert_eq!(refused.infeasible, None);
        let refused = ledger
            .allocate_resize(&pod("a", 0, "3"), node_state.resources())
            .expect_err("too much");
        assert_eq!(refused.reason, INFEASIBLE);
        assert_eq!(refused.infeasible, Some(Infeasible::Capacity));
        assert_eq!(
            refused.message,
            "Node didn't have enough capacity: cpu, requested: 3000, capacity: 2000"
        );
        assert_eq!(
            ledger.pending_resizes(),
            [],
            "its earlier request is withdrawn"
        );
    });
}

#[test]
fn a_withdrawn_resize_allocates_nothing() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        let small = pod("a", 0, "500m");
        assert_eq!(ledger.admit(&small, node_state, NOW), Decision::Admitted);
        let other = pod("b", 0, "1");
        assert_eq!(ledger.admit(&other, node_state, NOW), Decision::Admitted);
        let large = pod("a", 0, "1500m");
        assert!(
            ledger
                .allocate_resize(&large, node_state.resources())
                .is_err()
        );
        assert!(!ledger.cancel_resize(&small), "it was not granted");
        assert_eq!(ledger.pending_resizes(), []);
        ledger.release("b");
        // The resources are granted just before the resize is cancelled.
        assert!(
            ledger
                .allocate_resize(&large, node_state.resources())
                .is_ok()
        );
        assert!(
            ledger.cancel_resize(&small),
            "its resources are free for others"
        );
        assert_eq!(
            ledger.admit(&pod("c", 0, "1500m"), node_state, NOW),
            Decision::Admitted
        );
        assert!(!ledger.cancel_resize(&pod("gone", 0, "1")));
        assert_eq!(ledger.pod("gone"), None);
    });
}

/// A pod was granted a size that its spec no longer requests, and its present request does not fit.
#[test]
fn a_granted_size_that_is_no_longer_requested_is_released() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        let small = pod("a", 0, "200m");
        assert_eq!(ledger.admit(&small, node_state, NOW), Decision::Admitted);
        let other = pod("b", 0, "500m");
        assert_eq!(ledger.admit(&other, node_state, NOW), Decision::Admitted);
        assert!(
            ledger
                .allocate_resize(&pod("a", 0, "1500m"), node_state.resources())
                .is_ok()
        );
        let wanted = pod("b", 0, "1");
        assert!(
            ledger
                .allocate_resize(&wanted, node_state.resources())
                .is_err()
        );
        ledger.set_allocation(&small);
        assert!(
            ledger
                .allocate_resize(&pod("a", 0, "1900m"), node_state.resources())
                .is_err()
        );
        assert_eq!(ledger.pod("a"), Some(small));
        assert!(
            ledger
                .allocate_resize(&wanted, node_state.resources())
                .is_ok()
        );
    });
}

#[test]
fn a_stopped_pods_resources_are_free_before_it_is_removed() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        assert_eq!(
            ledger.admit(&pod("a", 0, "2"), node_state, NOW),
            Decision::Admitted
        );
        assert!(ledger.acquire_exclusive_claim("a", "n", "data"));
        let next = pod("b", 0, "2");
        assert!(matches!(
            ledger.admit(&next, node_state, NOW),
            Decision::Refused(_)
        ));
        ledger.release_requests("a");
        assert_eq!(ledger.admit(&next, node_state, NOW), Decision::Admitted);
        assert!(
            !ledger.acquire_exclusive_claim("b", "n", "data"),
            "its volumes are still mounted"
        );
        // A stopped pod is not preempted.
        let critical = ledger.admit(&pod("c", 2_000_000_000, "2"), node_state, NOW);
        let Decision::AwaitingPreemption(evictions) = critical else {
            panic!("expected a preemption");
        };
        assert_eq!(evictions.iter().map(|e| &*e.uid).collect::<Vec<_>>(), ["b"]);
        ledger.release_requests("b");
        let critical = ledger.admit(&pod("c", 2_000_000_000, "2"), node_state, NOW);
        assert_eq!(critical, Decision::Admitted);
    });
}

#[test]
fn an_exclusive_claim_is_free_once_its_pod_is_released() {
    with_two_cpus(|node_state| {
        let mut ledger = Ledger::default();
        for uid in ["a", "b"] {
            ledger.admit(&pod(uid, 0, "100m"), node_state, NOW);
        }
        assert!(ledger.acquire_exclusive_claim("a", "n", "data"));
        assert!(
            ledger.acquire_exclusive_claim("a", "n", "data"),
            "its pod keeps it"
        );
        assert!(ledger.has_exclusive_claim("a") && !ledger.has_exclusive_claim("b"));
        assert!(!ledger.acquire_exclusive_claim("b", "n", "data"));
        ledger.release("a");
        assert!(ledger.acquire_exclusive_claim("b", "n", "data"));
        assert!(!ledger.acquire_exclusive_claim("gone", "n", "other"));
    });
}
