//! The pods that this node has admitted, and their allocated resources, host ports and exclusive claims
//! (`pkg/kubelet/allocation`, `pkg/kubelet/preemption`). Pure; one actor owns it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::admit::{self, NodeResources, NodeState, Refusal};
use super::preempt;
use super::used::Used;
use crate::pod;
use crate::pod::lifecycle::Cause;
use crate::pod::lifecycle::Verdict;
use crate::pod::priority::is_critical;
use crate::pod::qos::{self, QosClass};
use crate::pod::resources::requests;
use crate::time;
use crate::volume::claims;

/// An admitted pod.
#[derive(Debug, Clone)]
struct Admitted {
    pod: Arc<Pod>,
    /// Whether the pod was evicted or preempted.
    evicted: bool,
    /// Deadline until which critical pods wait for this pod to terminate; `None` if none waits.
    wait_deadline: Option<Duration>,
    /// Whether the pod's resources are available to other pods already.
    requests_released: bool,
    /// Pending resize that waits for resources.
    resize: Option<PendingResize>,
    /// Claims that the pod uses exclusively, by namespace and name.
    claims: BTreeSet<(String, String)>,
}

/// A pending resize.
#[derive(Debug, Clone)]
struct PendingResize {
    /// The pod with the requested resources.
    pod: Arc<Pod>,
    /// Position in the queue of pending resizes.
    position: u64,
}

/// Result of an admission.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// The pod is admitted.
    Admitted,
    /// The pod is admitted after these pods have terminated. Each victim is returned only once; the caller must evict
    /// it now.
    AwaitingPreemption(Vec<Eviction>),
    /// The pod is rejected.
    Refused(Refusal),
}

/// A pod to evict.
#[derive(Debug, Clone, PartialEq)]
pub struct Eviction {
    /// The pod's uid.
    pub uid: String,
    /// The resource that is short, for metrics.
    pub signal: String,
    /// Reason and message for the pod's status and events.
    pub verdict: Verdict,
}

impl Eviction {
    /// Evicts a pod that exceeds its own limit of `signal`. The pod gets no condition DisruptionTarget, because it
    /// would exceed the limit on any node.
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

    /// Evicts a pod because of node pressure, with `grace` seconds to terminate.
    #[must_use]
    pub fn under_pressure(uid: &str, signal: &str, message: String, grace: i64) -> Eviction {
        let mut eviction = Eviction::over_limit(uid, signal, message.clone());
        eviction.verdict.disruption = Some(message);
        eviction.verdict.grace = Some(grace);
        eviction
    }
}

/// All admitted pods by uid, and the sums of their resources.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    pods: BTreeMap<String, Admitted>,
    used: Used,
}

/// Minimum time that a critical pod waits for a preempted pod.
const MIN_WAIT: Duration = Duration::from_secs(10);

/// Maximum time that a critical pod waits for this victim: one and a half grace periods, but at least ten seconds
/// (`killPodNow` in `pkg/kubelet/pod_workers.go`).
fn max_wait(victim: &Pod) -> Duration {
    let grace = time::span(pod::grace_seconds(victim));
    let half = Duration::from_secs(grace.as_secs() / 2);
    grace.saturating_add(half).max(MIN_WAIT)
}

impl Ledger {
    /// Updates the sums after a change of the pod.
    fn recount(&mut self, uid: &str) {
        match self.pods.get(uid).filter(|own| !own.requests_released) {
            Some(own) => self.used.set(uid, &own.pod),
            None => self.used.remove(uid),
        }
    }

    /// Admits a pod, or says why not. An admitted pod stays admitted until it is released. If a critical pod lacks only
    /// resources, other pods are preempted, and each is waited for up to its deadline. `now` is a duration since an
    /// arbitrary fixed moment.
    pub fn admit(&mut self, pod: &Arc<Pod>, node_state: &NodeState<'_>, now: Duration) -> Decision {
        let uid = pod::uid(pod).to_owned();
        if let Some(known) = self.pods.get_mut(&uid) {
            known.pod = Arc::clone(pod);
            self.recount(&uid);
            return Decision::Admitted;
        }
        let Err(refusal) = admit::admit(pod, &self.used, node_state) else {
            let admitted = Admitted {
                pod: Arc::clone(pod),
                evicted: false,
                wait_deadline: None,
                requests_released: false,
                resize: None,
                claims: BTreeSet::new(),
            };
            self.pods.insert(uid.clone(), admitted);
            self.recount(&uid);
            return Decision::Admitted;
        };
        if refusal.missing.is_empty() || !is_critical(pod) {
            return Decision::Refused(refusal);
        }
        // Pods that were evicted earlier also free resources.
        let pods_by_eviction = |evicted: bool| -> Vec<&Pod> {
            let active = self
                .pods
                .values()
                .filter(|admitted| !admitted.requests_released);
            let matching = active.filter(|admitted| admitted.evicted == evicted);
            matching.map(|admitted| &*admitted.pod).collect()
        };
        let missing = preempt::missing_after(&refusal.missing, &pods_by_eviction(true));
        let Some(victims) = preempt::choose_victims(pod, &pods_by_eviction(false), &missing) else {
            return Decision::Refused(refusal);
        };
        let signal = refusal.reason.trim_start_matches("OutOf").to_owned();
        let chosen: BTreeSet<&String> = victims.iter().collect();
        for (uid, admitted) in &mut self.pods {
            let ends = admitted.evicted || chosen.contains(uid);
            if ends && !admitted.requests_released {
                let until = now.saturating_add(max_wait(&admitted.pod));
                admitted.wait_deadline.get_or_insert(until);
            }
        }
        let evictions = victims.into_iter().filter_map(|uid| {
            self.pods.get_mut(&uid)?.evicted = true;
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

    /// The earliest deadline of a preempted pod; `None` if critical pods wait for none.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let counted = self
            .pods
            .values()
            .filter(|admitted| !admitted.requests_released);
        counted.filter_map(|admitted| admitted.wait_deadline).min()
    }

    /// Clears all deadlines: no critical pod waits any longer.
    pub fn clear_deadlines(&mut self) {
        for admitted in self.pods.values_mut() {
            admitted.wait_deadline = None;
        }
    }

    /// Removes pods past their deadline from the accounts, as if they had terminated, and returns them. The kubelet
    /// also admits the critical pod at that moment.
    pub fn release_overdue(&mut self, now: Duration) -> Vec<Arc<Pod>> {
        let is_over = |own: &Admitted| own.wait_deadline.is_some_and(|until| until <= now);
        let overdue = self.pods.values();
        let overdue: Vec<Arc<Pod>> = overdue
            .filter(|own| !own.requests_released && is_over(own))
            .map(|own| Arc::clone(&own.pod))
            .collect();
        for pod in &overdue {
            self.release_requests(pod::uid(pod));
        }
        overdue
    }

    /// Allocates the resources of a resized pod. On error the pod keeps its allocation; if resources are only missing
    /// now, the resize is queued, see [`Ledger::pending_resizes`].
    pub fn allocate_resize(
        &mut self,
        pod: &Pod,
        resources: NodeResources<'_>,
    ) -> Result<(), Refusal> {
        let uid = pod::uid(pod);
        if let Err(infeasible) = admit::check_capacity(pod, resources) {
            // The pod keeps its allocation, and nothing is queued.
            if let Some(own) = self.pods.get_mut(uid) {
                own.resize = None;
            }
            return Err(infeasible);
        }
        let result = admit::check_resources(pod, &self.used, resources);
        let positions = self
            .pods
            .values()
            .filter_map(|a| Some(a.resize.as_ref()?.position));
        let last = positions.max().unwrap_or_default();
        if let Some(own) = self.pods.get_mut(uid) {
            let pod = Arc::new(pod.clone());
            if result.is_ok() {
                (own.pod, own.resize) = (pod, None);
                self.recount(uid);
            } else {
                let position = own
                    .resize
                    .as_ref()
                    .map_or(last.saturating_add(1), |w| w.position);
                own.resize = Some(PendingResize { pod, position });
            }
        }
        result
    }

    /// Sets a pod's allocation to the sizes it has now. Amounts that were allocated for an earlier, abandoned resize
    /// request are released.
    pub fn set_allocation(&mut self, has: &Arc<Pod>) {
        if let Some(own) = self.pods.get_mut(pod::uid(has)) {
            own.pod = Arc::clone(has);
            self.recount(pod::uid(has));
        }
    }

    /// Cancels a pod's resize: the pod leaves the queue, and its allocation returns to these sizes. Returns whether
    /// more was allocated before.
    pub fn cancel_resize(&mut self, pod: &Arc<Pod>) -> bool {
        let Some(own) = self.pods.get_mut(pod::uid(pod)) else {
            return false;
        };
        own.resize = None;
        let before = std::mem::replace(&mut own.pod, Arc::clone(pod));
        self.recount(pod::uid(pod));
        requests_more(pod, &before)
    }

    /// The queued resizes in the order in which they are granted (KEP-1287). Resizes that request no more than the pod
    /// has come first. Then priority, QoS class (Guaranteed first) and the longest wait decide.
    #[must_use]
    pub fn pending_resizes(&self) -> Vec<Arc<Pod>> {
        let waiting = self
            .pods
            .values()
            .filter_map(|a| Some((a, a.resize.as_ref()?)));
        let mut waiting: Vec<_> = waiting.collect();
        waiting.sort_by_key(|(admitted, resize)| {
            let spec = pod::spec(&resize.pod);
            (
                requests_more(&admitted.pod, &resize.pod),
                Reverse(spec.priority.unwrap_or_default()),
                qos::of(spec) != QosClass::Guaranteed,
                resize.position,
            )
        });
        waiting
            .into_iter()
            .map(|(_, w)| Arc::clone(&w.pod))
            .collect()
    }

    /// Acquires a claim that only one pod may use at a time (ReadWriteOncePod), until the pod is released. Fails if
    /// another pod has acquired it, or has been running with it since before this agent started.
    pub fn acquire_exclusive_claim(&mut self, uid: &str, namespace: &str, claim: &str) -> bool {
        let key = (namespace.to_owned(), claim.to_owned());
        let runs = |pod: &Pod| pod::phase(pod) == "Running";
        let other_has = |(other, admitted): (&String, &Admitted)| {
            other != uid
                && (admitted.claims.contains(&key)
                    || (runs(&admitted.pod) && claims::uses(&admitted.pod, namespace, claim)))
        };
        if self.pods.iter().any(other_has) {
            return false;
        }
        let Some(own) = self.pods.get_mut(uid) else {
            return false;
        };
        own.claims.insert(key);
        true
    }

    /// Whether a pod has acquired an exclusive claim.
    #[must_use]
    pub fn has_exclusive_claim(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|own| !own.claims.is_empty())
    }

    /// Marks a pod as evicted; returns whether it is admitted and was not marked before.
    pub fn evict(&mut self, uid: &str) -> bool {
        match self.pods.get_mut(uid) {
            Some(victim) => !std::mem::replace(&mut victim.evicted, true),
            None => false,
        }
    }

    /// Marks a pod as evicted even if it was before, because its grace period may be shorter now. Returns whether the
    /// pod is admitted.
    pub fn evict_again(&mut self, uid: &str) -> bool {
        let pod = self.pods.get_mut(uid);
        pod.map(|pod| pod.evicted = true).is_some()
    }

    /// Removes a pod from the accounts: its containers have stopped, or no source lists it. The scheduler reuses its
    /// resources as soon as the API shows that.
    pub fn release_requests(&mut self, uid: &str) {
        if let Some(own) = self.pods.get_mut(uid) {
            own.requests_released = true;
            self.recount(uid);
        }
    }

    /// Removes a pod that holds no resources any more; returns whether it was admitted.
    pub fn release(&mut self, uid: &str) -> bool {
        self.used.remove(uid);
        self.pods.remove(uid).is_some()
    }

    /// An admitted pod with its allocated resources.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<Arc<Pod>> {
        Some(Arc::clone(&self.pods.get(uid)?.pod))
    }

    /// All admitted pods.
    #[must_use]
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        self.pods.values().map(|a| Arc::clone(&a.pod)).collect()
    }
}

/// Whether a pod requests more of any resource than it has.
#[must_use]
pub fn requests_more(has: &Pod, requested: &Pod) -> bool {
    let has = requests(has);
    requests(requested)
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
mod tests;
