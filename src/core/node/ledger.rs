//! The pods that this node has admitted, and what they hold of what pods share: resources, ports,
//! claims of one pod alone (kubelet spec, chapter 11). Pure; one actor owns it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::admit::{self, Here, Refusal};
use super::preempt;
use crate::core::pod;
use crate::core::pod::lifecycle::Cause;
use crate::core::pod::qos::{self, QosClass};
use crate::core::pod::resources::requests;
use crate::core::pod::status::Verdict;
use crate::core::volume::claims;

/// An admitted pod.
#[derive(Debug, Clone)]
struct Admitted {
    pod: Arc<Pod>,
    /// It was told to end.
    evicted: bool,
    /// What it asked for may be given to others.
    uncounted: bool,
    /// It waits for room to grow.
    waits: Option<Waits>,
    /// Claims that it alone has: namespace and name.
    claims: BTreeSet<(String, String)>,
}

/// A pod that waits for room to grow.
#[derive(Debug, Clone)]
struct Waits {
    /// It with the sizes that it asks for.
    pod: Arc<Pod>,
    /// How many began to wait before it.
    place: u64,
}

/// What becomes of a pod that wants to run here.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// It is admitted.
    Admitted,
    /// It is admitted once these pods have ended; they are to be told now, each once.
    AwaitingPreemption(Vec<Eviction>),
    /// It is not admitted.
    Refused(Refusal),
}

/// A pod that is to end.
#[derive(Debug, Clone, PartialEq)]
pub struct Eviction {
    /// Its uid.
    pub uid: String,
    /// The resource that is short, for metrics.
    pub signal: String,
    /// Why, for its status and events.
    pub verdict: Verdict,
}

impl Eviction {
    /// Of a pod that uses more of `signal` than it may. It would do the same elsewhere.
    #[must_use]
    pub fn over_limit(uid: &str, signal: &str, message: String) -> Eviction {
        Eviction {
            uid: uid.to_owned(),
            signal: signal.to_owned(),
            verdict: Verdict {
                cause: Cause::Evicted,
                reason: "Evicted".into(),
                message,
                disruption: None,
                grace: Some(1),
            },
        }
    }

    /// Of a pod that goes because the node is short of something; it gets `grace` seconds to end.
    #[must_use]
    pub fn under_pressure(uid: &str, signal: &str, message: String, grace: i64) -> Eviction {
        let mut eviction = Eviction::over_limit(uid, signal, message.clone());
        eviction.verdict.disruption = Some(message);
        eviction.verdict.grace = Some(grace);
        eviction
    }
}

/// All admitted pods, by uid.
#[derive(Debug, Clone, Default)]
pub struct Ledger(BTreeMap<String, Admitted>);

impl Ledger {
    /// Admits a pod, or says why not. A pod that was admitted stays so until it is released. For a
    /// critical pod that lacks only resources others are to end.
    pub fn admit(&mut self, pod: &Arc<Pod>, here: &Here<'_>) -> Decision {
        let uid = pod::uid(pod).to_owned();
        if let Some(known) = self.0.get_mut(&uid) {
            known.pod = Arc::clone(pod);
            return Decision::Admitted;
        }
        let others = || {
            let active = self.0.values().filter(|admitted| !admitted.uncounted);
            active.map(|admitted| &*admitted.pod)
        };
        let Err(refusal) = admit::admit(pod, others(), here) else {
            let admitted = Admitted {
                pod: Arc::clone(pod),
                evicted: false,
                uncounted: false,
                waits: None,
                claims: BTreeSet::new(),
            };
            self.0.insert(uid, admitted);
            return Decision::Admitted;
        };
        if refusal.missing.is_empty() || !preempt::is_critical(pod) {
            return Decision::Refused(refusal);
        }
        // Those that were told to end before make room as well.
        let told = |evicted: bool| -> Vec<&Pod> {
            let active = self.0.values().filter(|admitted| !admitted.uncounted);
            let told = active.filter(|admitted| admitted.evicted == evicted);
            told.map(|admitted| &*admitted.pod).collect()
        };
        let missing = preempt::missing_after(&refusal.missing, &told(true));
        let Some(victims) = preempt::victims(pod, &told(false), &missing) else {
            return Decision::Refused(refusal);
        };
        let signal = refusal.reason.trim_start_matches("OutOf").to_owned();
        let evictions = victims.into_iter().filter_map(|uid| {
            self.0.get_mut(&uid)?.evicted = true;
            let signal = signal.clone();
            let verdict = preempted();
            Some(Eviction {
                uid,
                signal,
                verdict,
            })
        });
        Decision::AwaitingPreemption(evictions.collect())
    }

    /// Whether a pod that runs may have the sizes that its spec has; the refusal says what is missing.
    /// One that may not waits: see [`Ledger::waiting_to_grow`].
    pub fn grow(&mut self, pod: &Pod, here: &Here<'_>) -> Result<(), Refusal> {
        let uid = pod::uid(pod);
        if let Err(infeasible) = admit::check_capacity(pod, here) {
            // It goes on with what it has, and waits for nothing.
            if let Some(own) = self.0.get_mut(uid) {
                own.waits = None;
            }
            return Err(infeasible);
        }
        let others = self
            .0
            .iter()
            .filter(|(other, admitted)| other.as_str() != uid && !admitted.uncounted)
            .map(|(_, admitted)| &*admitted.pod);
        let result = admit::check_resources(pod, others, here);
        let places = self
            .0
            .values()
            .filter_map(|a| Some(a.waits.as_ref()?.place));
        let last = places.max().unwrap_or_default();
        if let Some(own) = self.0.get_mut(uid) {
            let pod = Arc::new(pod.clone());
            if result.is_ok() {
                (own.pod, own.waits) = (pod, None);
            } else {
                let place = own.waits.as_ref().map_or(last + 1, |w| w.place);
                own.waits = Some(Waits { pod, place });
            }
        }
        result
    }

    /// A pod asks for sizes, and has these: what it was given for others that it asked for before, and does not want any more,
    /// is not kept for it.
    pub fn book(&mut self, has: &Arc<Pod>) {
        if let Some(own) = self.0.get_mut(pod::uid(has)) {
            own.pod = Arc::clone(has);
        }
    }

    /// A pod has the sizes that its spec has, and asks for no others any more: it does not wait for them, and does not have
    /// them. Whether it had more than that.
    pub fn withdraw(&mut self, pod: &Arc<Pod>) -> bool {
        let Some(own) = self.0.get_mut(pod::uid(pod)) else {
            return false;
        };
        own.waits = None;
        let before = std::mem::replace(&mut own.pod, Arc::clone(pod));
        asks_for_more(pod, &before)
    }

    /// Who waits for room to grow, as they ask for it, in the order in which they get it: who asks for no more than it has,
    /// then by priority, guaranteed ones before others, and who has waited longest (KEP-1287).
    #[must_use]
    pub fn waiting_to_grow(&self) -> Vec<Arc<Pod>> {
        let waiting = self.0.values().filter_map(|a| Some((a, a.waits.as_ref()?)));
        let mut waiting: Vec<_> = waiting.collect();
        waiting.sort_by_key(|(admitted, waits)| {
            let spec = pod::spec(&waits.pod);
            (
                asks_for_more(&admitted.pod, &waits.pod),
                Reverse(spec.priority.unwrap_or_default()),
                qos::of(spec) != QosClass::Guaranteed,
                waits.place,
            )
        });
        waiting
            .into_iter()
            .map(|(_, w)| Arc::clone(&w.pod))
            .collect()
    }

    /// Whether a pod has a claim that only one may have at a time: nobody got it first, or has run with
    /// it since before this agent started. It has it until it is released.
    pub fn hold_alone(&mut self, uid: &str, namespace: &str, claim: &str) -> bool {
        let key = (namespace.to_owned(), claim.to_owned());
        let runs = |pod: &Pod| pod::phase(pod) == "Running";
        let other_has = |(other, admitted): (&String, &Admitted)| {
            other != uid
                && (admitted.claims.contains(&key)
                    || (runs(&admitted.pod) && claims::uses(&admitted.pod, namespace, claim)))
        };
        if self.0.iter().any(other_has) {
            return false;
        }
        let Some(own) = self.0.get_mut(uid) else {
            return false;
        };
        own.claims.insert(key);
        true
    }

    /// Whether a pod has a claim that only one may have at a time.
    #[must_use]
    pub fn holds_alone(&self, uid: &str) -> bool {
        self.0.get(uid).is_some_and(|own| !own.claims.is_empty())
    }

    /// A pod is to be told to end. Whether it is here and has not been told before.
    pub fn evict(&mut self, uid: &str) -> bool {
        match self.0.get_mut(uid) {
            Some(victim) => !std::mem::replace(&mut victim.evicted, true),
            None => false,
        }
    }

    /// A pod is to be told to end whatever it was told before: it may have less time now. Whether it is here.
    pub fn end(&mut self, uid: &str) -> bool {
        let pod = self.0.get_mut(uid);
        pod.map(|pod| pod.evicted = true).is_some()
    }

    /// From now on a pod counts for no admission: nothing of it runs any more, or it is in no source any more. The scheduler
    /// gives away what it had as soon as the API shows that.
    pub fn uncount(&mut self, uid: &str) {
        if let Some(own) = self.0.get_mut(uid) {
            own.uncounted = true;
        }
    }

    /// Forgets a pod that holds nothing any more. Whether it was here.
    pub fn release(&mut self, uid: &str) -> bool {
        self.0.remove(uid).is_some()
    }

    /// An admitted pod, as it was last granted its sizes.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<Arc<Pod>> {
        Some(Arc::clone(&self.0.get(uid)?.pod))
    }

    /// The admitted pods.
    #[must_use]
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        self.0.values().map(|a| Arc::clone(&a.pod)).collect()
    }
}

/// Whether a pod asks for more of anything than it has.
#[must_use]
pub fn asks_for_more(has: &Pod, asks: &Pod) -> bool {
    let has = requests(has);
    requests(asks)
        .iter()
        .any(|(name, amount)| *amount > has.get(name).copied().unwrap_or_default())
}

fn preempted() -> Verdict {
    Verdict {
        cause: Cause::Preempted,
        reason: "Preempting".into(),
        message: "Preempted in order to admit critical pod".into(),
        disruption: Some("Pod was preempted by Kubelet to accommodate a critical pod.".into()),
        grace: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::node::eviction::{Pressure, Pressures};
    use crate::core::pod::resize::{INFEASIBLE, Infeasible};
    use crate::core::pod::resources::Amounts;
    use serde_json::json;

    fn pod(uid: &str, priority: i32, cpu: &str) -> Arc<Pod> {
        let pod = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid},
            "spec": {"priority": priority, "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}],
                     "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}});
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    fn with_two_cpus<T>(work: impl FnOnce(&Here<'_>) -> T) -> T {
        let allocatable = Amounts::from([
            ("cpu".to_owned(), "2".parse().expect("a quantity")),
            ("pods".to_owned(), "10".parse().expect("a quantity")),
        ]);
        work(&Here {
            allocatable: &allocatable,
            node: None,
            unsafe_sysctls: &[],
            kernel: "6.18",
            apparmor: false,
            strict_groups: false,
            pressures: &Pressures::new(),
            shutting_down: false,
        })
    }

    #[test]
    fn a_critical_pod_preempts_each_victim_once_and_waits_for_its_end() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            assert_eq!(ledger.admit(&pod("a", 0, "2"), here), Decision::Admitted);
            let plain = ledger.admit(&pod("b", 0, "1"), here);
            assert!(matches!(plain, Decision::Refused(r) if r.reason == "OutOfcpu"));
            let critical = pod("c", 2_000_000_000, "1");
            let Decision::AwaitingPreemption(first) = ledger.admit(&critical, here) else {
                panic!("others have to make room");
            };
            assert_eq!(
                first.iter().map(|e| e.uid.as_str()).collect::<Vec<_>>(),
                ["a"]
            );
            assert_eq!(first[0].verdict.cause, Cause::Preempted);
            assert_eq!(
                ledger.admit(&critical, here),
                Decision::AwaitingPreemption(vec![]),
                "nobody is told twice"
            );
            ledger.release("a");
            assert_eq!(ledger.admit(&critical, here), Decision::Admitted);
        });
    }

    /// On a node with two CPUs a critical pod misses some; those that were told before are named, then those that are told.
    #[test]
    fn what_those_that_end_already_free_is_not_taken_from_others() {
        type Case = (
            &'static [(&'static str, &'static str)],
            &'static [&'static str],
            &'static str,
            &'static [&'static str],
        );
        const CASES: [Case; 5] = [
            (&[("a", "1"), ("b", "1")], &[], "1500m", &["b", "a"]),
            (&[("a", "1"), ("b", "1")], &["a"], "1", &[]),
            // b ends and frees more than is missing; c alone would be the smallest that is enough.
            (&[("b", "1200m"), ("c", "800m")], &["b"], "800m", &[]),
            (&[("b", "1200m"), ("c", "800m")], &["b"], "1500m", &["c"]),
            (
                &[("a", "500m"), ("b", "500m"), ("c", "1")],
                &["a"],
                "1",
                &["b"],
            ),
        ];
        with_two_cpus(|here| {
            for (pods, told, asks, expected) in CASES {
                let mut ledger = Ledger::default();
                for (uid, cpu) in pods {
                    assert_eq!(ledger.admit(&pod(uid, 0, cpu), here), Decision::Admitted);
                }
                for uid in told {
                    assert!(ledger.evict(uid));
                }
                let critical = pod("critical", 2_000_000_000, asks);
                let names = |ledger: &mut Ledger| match ledger.admit(&critical, here) {
                    Decision::AwaitingPreemption(victims) => {
                        Some(victims.into_iter().map(|e| e.uid).collect::<Vec<_>>())
                    }
                    _ => None,
                };
                let found = names(&mut ledger);
                assert_eq!(
                    found.as_deref(),
                    Some(&*expected.iter().map(|u| (*u).to_owned()).collect::<Vec<_>>()),
                    "{told:?} {asks}"
                );
                // Whoever ends first: nobody else has to go.
                for uid in told.iter().chain(expected) {
                    if let Some(more) = names(&mut ledger) {
                        assert_eq!(more, [""; 0], "{uid}");
                    }
                    ledger.release(uid);
                }
                assert_eq!(ledger.admit(&critical, here), Decision::Admitted);
            }
        });
    }

    #[test]
    fn a_node_under_pressure_keeps_whom_it_has_and_tells_each_victim_once() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            assert_eq!(ledger.admit(&pod("a", 0, "0"), here), Decision::Admitted);
            let pressed = Here {
                pressures: &Pressures::from([Pressure::Disk]),
                ..*here
            };
            let late = ledger.admit(&pod("b", 0, "1"), &pressed);
            assert!(matches!(late, Decision::Refused(r) if r.reason == "Evicted"));
            assert_eq!(
                ledger.admit(&pod("a", 0, "0"), &pressed),
                Decision::Admitted
            );
            assert!(ledger.evict("a") && !ledger.evict("a") && !ledger.evict("b"));
            assert!(ledger.end("a") && ledger.end("a") && !ledger.end("b"));
        });
    }

    #[test]
    fn a_node_that_shuts_down_keeps_whom_it_has_and_takes_nobody() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            assert_eq!(ledger.admit(&pod("a", 0, "2"), here), Decision::Admitted);
            let closing = Here {
                shutting_down: true,
                ..*here
            };
            assert_eq!(
                ledger.admit(&pod("a", 0, "2"), &closing),
                Decision::Admitted
            );
            for (priority, cpu) in [(0, "0"), (2_000_000_000, "0")] {
                let refused = ledger.admit(&pod("b", priority, cpu), &closing);
                assert!(
                    matches!(&refused, Decision::Refused(r) if r.reason == "NodeShutdown"
                        && r.message == "Pod was rejected as the node is shutting down."),
                    "{refused:?}"
                );
            }
            // Nobody is preempted for a pod that is refused anyway.
            let critical = ledger.admit(&pod("c", 2_000_000_000, "2"), &closing);
            assert!(matches!(critical, Decision::Refused(r) if r.reason == "NodeShutdown"));
        });
    }

    #[test]
    fn whoever_waits_for_room_gets_it_in_turn() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            let all = [("a", 0), ("b", 0), ("c", 1000), ("d", 0)];
            for (uid, priority) in all {
                let small = pod(uid, priority, "500m");
                assert_eq!(ledger.admit(&small, here), Decision::Admitted);
            }
            let waiting = |ledger: &Ledger| -> Vec<String> {
                let waiting = ledger.waiting_to_grow();
                waiting.iter().map(|p| pod::uid(p).to_owned()).collect()
            };
            for (uid, priority) in [("d", 0), ("c", 1000), ("b", 0), ("a", 0)] {
                assert!(ledger.grow(&pod(uid, priority, "1500m"), here).is_err());
            }
            // Who asks again keeps its place.
            assert!(ledger.grow(&pod("d", 0, "1600m"), here).is_err());
            assert_eq!(waiting(&ledger), ["c", "d", "b", "a"]);
            let asked = ledger.waiting_to_grow();
            assert_eq!(requests(&asked[1])["cpu"].milli(), 1600);
            assert!(ledger.release("c") && !ledger.release("c"));
            assert_eq!(waiting(&ledger), ["d", "b", "a"]);
            // One that has got it, or asks for no more than it has, does not wait behind the others.
            assert!(ledger.grow(&pod("b", 0, "1"), here).is_ok());
            assert_eq!(waiting(&ledger), ["d", "a"]);
            assert!(asks_for_more(&pod("a", 0, "1"), &pod("a", 0, "1001m")));
            assert!(!asks_for_more(&pod("a", 0, "1"), &pod("a", 0, "1000m")));
        });
    }

    #[test]
    fn a_resize_to_more_than_the_node_has_waits_for_nothing() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            let small = pod("a", 0, "500m");
            assert_eq!(ledger.admit(&small, here), Decision::Admitted);
            assert_eq!(ledger.admit(&pod("b", 0, "1"), here), Decision::Admitted);
            let refused = ledger.grow(&pod("a", 0, "1900m"), here).expect_err("full");
            assert_ne!(refused.reason, INFEASIBLE, "it waits for b to go");
            assert_eq!(refused.infeasible, None);
            let refused = ledger.grow(&pod("a", 0, "3"), here).expect_err("too much");
            assert_eq!(refused.reason, INFEASIBLE);
            assert_eq!(refused.infeasible, Some(Infeasible::Capacity));
            assert_eq!(
                refused.message,
                "Node didn't have enough capacity: cpu, requested: 3000, capacity: 2000"
            );
            assert_eq!(ledger.waiting_to_grow(), [], "nor for what it asked before");
        });
    }

    #[test]
    fn a_resize_that_is_taken_back_gets_no_room_and_leaves_none_booked() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            let small = pod("a", 0, "500m");
            assert_eq!(ledger.admit(&small, here), Decision::Admitted);
            let other = pod("b", 0, "1");
            assert_eq!(ledger.admit(&other, here), Decision::Admitted);
            let large = pod("a", 0, "1500m");
            assert!(ledger.grow(&large, here).is_err());
            assert!(!ledger.withdraw(&small), "it did not have it");
            assert_eq!(ledger.waiting_to_grow(), []);
            ledger.release("b");
            // It got the room in the moment in which it was taken back.
            assert!(ledger.grow(&large, here).is_ok());
            assert!(ledger.withdraw(&small), "that room is free for others");
            assert_eq!(
                ledger.admit(&pod("c", 0, "1500m"), here),
                Decision::Admitted
            );
            assert!(!ledger.withdraw(&pod("gone", 0, "1")));
            assert_eq!(ledger.pod("gone"), None);
        });
    }

    /// It got room for a size that its spec asks for no more, and there is none for the one that it asks for now.
    #[test]
    fn room_for_a_size_that_is_not_wanted_any_more_is_not_kept() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            let small = pod("a", 0, "200m");
            assert_eq!(ledger.admit(&small, here), Decision::Admitted);
            let other = pod("b", 0, "500m");
            assert_eq!(ledger.admit(&other, here), Decision::Admitted);
            assert!(ledger.grow(&pod("a", 0, "1500m"), here).is_ok());
            let wanted = pod("b", 0, "1");
            assert!(ledger.grow(&wanted, here).is_err());
            ledger.book(&small);
            assert!(ledger.grow(&pod("a", 0, "1900m"), here).is_err());
            assert_eq!(ledger.pod("a"), Some(small));
            assert!(ledger.grow(&wanted, here).is_ok());
        });
    }

    #[test]
    fn what_has_stopped_makes_room_before_it_is_forgotten() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            assert_eq!(ledger.admit(&pod("a", 0, "2"), here), Decision::Admitted);
            assert!(ledger.hold_alone("a", "n", "data"));
            let next = pod("b", 0, "2");
            assert!(matches!(ledger.admit(&next, here), Decision::Refused(_)));
            ledger.uncount("a");
            assert_eq!(ledger.admit(&next, here), Decision::Admitted);
            assert!(
                !ledger.hold_alone("b", "n", "data"),
                "its volumes are there"
            );
            // Nobody is preempted who has stopped.
            let critical = ledger.admit(&pod("c", 2_000_000_000, "2"), here);
            let Decision::AwaitingPreemption(evictions) = critical else {
                panic!("it waits for one");
            };
            assert_eq!(evictions.iter().map(|e| &*e.uid).collect::<Vec<_>>(), ["b"]);
            ledger.uncount("b");
            let critical = ledger.admit(&pod("c", 2_000_000_000, "2"), here);
            assert_eq!(critical, Decision::Admitted);
        });
    }

    #[test]
    fn a_claim_of_one_pod_alone_passes_on_when_its_pod_is_released() {
        with_two_cpus(|here| {
            let mut ledger = Ledger::default();
            for uid in ["a", "b"] {
                ledger.admit(&pod(uid, 0, "100m"), here);
            }
            assert!(ledger.hold_alone("a", "n", "data"));
            assert!(ledger.hold_alone("a", "n", "data"), "it keeps it");
            assert!(ledger.holds_alone("a") && !ledger.holds_alone("b"));
            assert!(!ledger.hold_alone("b", "n", "data"));
            ledger.release("a");
            assert!(ledger.hold_alone("b", "n", "data"));
            assert!(!ledger.hold_alone("gone", "n", "other"));
        });
    }
}
