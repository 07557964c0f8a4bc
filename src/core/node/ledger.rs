//! The pods that this node has admitted, and what they hold of what pods share: resources, ports,
//! claims of one pod alone (kubelet spec, chapter 11). Pure; one actor owns it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::admit::{self, Here, Refusal, Room};
use super::preempt;
use super::used::Used;
use crate::core::pod;
use crate::core::pod::lifecycle::Cause;
use crate::core::pod::qos::{self, QosClass};
use crate::core::pod::resources::requests;
use crate::core::pod::status::Verdict;
use crate::core::time;
use crate::core::volume::claims;

/// An admitted pod.
#[derive(Debug, Clone)]
struct Admitted {
    pod: Arc<Pod>,
    /// It was told to end.
    evicted: bool,
    /// Until when a critical pod waits for its end; none where none does.
    awaited_until: Option<Duration>,
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

/// All admitted pods, by uid, and the sums of what those take that count.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    pods: BTreeMap<String, Admitted>,
    used: Used,
}

/// The shortest time that a critical pod waits for the end of a pod that makes room for it.
const MIN_WAIT: Duration = Duration::from_secs(10);

/// How long a critical pod waits for the end of this one: one and a half grace periods, and no less than ten seconds
/// (`killPodNow` in `pkg/kubelet/pod_workers.go`).
fn longest_wait(victim: &Pod) -> Duration {
    let grace = time::span(pod::grace_seconds(victim));
    let half = Duration::from_secs(grace.as_secs() / 2);
    grace.saturating_add(half).max(MIN_WAIT)
}

impl Ledger {
    /// The sums follow what a pod has now.
    fn recount(&mut self, uid: &str) {
        match self.pods.get(uid).filter(|own| !own.uncounted) {
            Some(own) => self.used.set(uid, &own.pod),
            None => self.used.remove(uid),
        }
    }

    /// Admits a pod, or says why not. A pod that was admitted stays so until it is released. For a
    /// critical pod that lacks only resources others are to end, each within a bounded time from `now`, which is counted
    /// from any fixed moment.
    pub fn admit(&mut self, pod: &Arc<Pod>, here: &Here<'_>, now: Duration) -> Decision {
        let uid = pod::uid(pod).to_owned();
        if let Some(known) = self.pods.get_mut(&uid) {
            known.pod = Arc::clone(pod);
            self.recount(&uid);
            return Decision::Admitted;
        }
        let Err(refusal) = admit::admit(pod, &self.used, here) else {
            let admitted = Admitted {
                pod: Arc::clone(pod),
                evicted: false,
                awaited_until: None,
                uncounted: false,
                waits: None,
                claims: BTreeSet::new(),
            };
            self.pods.insert(uid.clone(), admitted);
            self.recount(&uid);
            return Decision::Admitted;
        };
        if refusal.missing.is_empty() || !preempt::is_critical(pod) {
            return Decision::Refused(refusal);
        }
        // Those that were told to end before make room as well.
        let told = |evicted: bool| -> Vec<&Pod> {
            let active = self.pods.values().filter(|admitted| !admitted.uncounted);
            let told = active.filter(|admitted| admitted.evicted == evicted);
            told.map(|admitted| &*admitted.pod).collect()
        };
        let missing = preempt::missing_after(&refusal.missing, &told(true));
        let Some(victims) = preempt::victims(pod, &told(false), &missing) else {
            return Decision::Refused(refusal);
        };
        let signal = refusal.reason.trim_start_matches("OutOf").to_owned();
        let chosen: BTreeSet<&String> = victims.iter().collect();
        for (uid, admitted) in &mut self.pods {
            let ends = admitted.evicted || chosen.contains(uid);
            if ends && !admitted.uncounted {
                let until = now.saturating_add(longest_wait(&admitted.pod));
                admitted.awaited_until.get_or_insert(until);
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

    /// When the next pod has been awaited for as long as critical pods wait; none where they wait for none.
    #[must_use]
    pub fn next_overdue(&self) -> Option<Duration> {
        let counted = self.pods.values().filter(|admitted| !admitted.uncounted);
        counted.filter_map(|admitted| admitted.awaited_until).min()
    }

    /// No critical pod waits any longer.
    pub fn await_none(&mut self) {
        for admitted in self.pods.values_mut() {
            admitted.awaited_until = None;
        }
    }

    /// Pods that critical pods do not wait for any longer. From now on they count for no admission, as if they had ended:
    /// the kubelet admits the critical pod then, too.
    pub fn give_up_overdue(&mut self, now: Duration) -> Vec<Arc<Pod>> {
        let is_over = |own: &Admitted| own.awaited_until.is_some_and(|until| until <= now);
        let overdue = self.pods.values();
        let overdue: Vec<Arc<Pod>> = overdue
            .filter(|own| !own.uncounted && is_over(own))
            .map(|own| Arc::clone(&own.pod))
            .collect();
        for pod in &overdue {
            self.uncount(pod::uid(pod));
        }
        overdue
    }

    /// Whether a pod that runs may have the sizes that its spec has; the refusal says what is missing.
    /// One that may not waits: see [`Ledger::waiting_to_grow`].
    pub fn grow(&mut self, pod: &Pod, room: Room<'_>) -> Result<(), Refusal> {
        let uid = pod::uid(pod);
        if let Err(infeasible) = admit::check_capacity(pod, room) {
            // It goes on with what it has, and waits for nothing.
            if let Some(own) = self.pods.get_mut(uid) {
                own.waits = None;
            }
            return Err(infeasible);
        }
        let result = admit::check_resources(pod, &self.used, room);
        let places = self
            .pods
            .values()
            .filter_map(|a| Some(a.waits.as_ref()?.place));
        let last = places.max().unwrap_or_default();
        if let Some(own) = self.pods.get_mut(uid) {
            let pod = Arc::new(pod.clone());
            if result.is_ok() {
                (own.pod, own.waits) = (pod, None);
                self.recount(uid);
            } else {
                let place = own
                    .waits
                    .as_ref()
                    .map_or(last.saturating_add(1), |w| w.place);
                own.waits = Some(Waits { pod, place });
            }
        }
        result
    }

    /// A pod asks for sizes, and has these: what it was given for others that it asked for before, and does not want any more,
    /// is not kept for it.
    pub fn book(&mut self, has: &Arc<Pod>) {
        if let Some(own) = self.pods.get_mut(pod::uid(has)) {
            own.pod = Arc::clone(has);
            self.recount(pod::uid(has));
        }
    }

    /// A pod has the sizes that its spec has, and asks for no others any more: it does not wait for them, and does not have
    /// them. Whether it had more than that.
    pub fn withdraw(&mut self, pod: &Arc<Pod>) -> bool {
        let Some(own) = self.pods.get_mut(pod::uid(pod)) else {
            return false;
        };
        own.waits = None;
        let before = std::mem::replace(&mut own.pod, Arc::clone(pod));
        self.recount(pod::uid(pod));
        asks_for_more(pod, &before)
    }

    /// Who waits for room to grow, as they ask for it, in the order in which they get it: who asks for no more than it has,
    /// then by priority, guaranteed ones before others, and who has waited longest (KEP-1287).
    #[must_use]
    pub fn waiting_to_grow(&self) -> Vec<Arc<Pod>> {
        let waiting = self
            .pods
            .values()
            .filter_map(|a| Some((a, a.waits.as_ref()?)));
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
        if self.pods.iter().any(other_has) {
            return false;
        }
        let Some(own) = self.pods.get_mut(uid) else {
            return false;
        };
        own.claims.insert(key);
        true
    }

    /// Whether a pod has a claim that only one may have at a time.
    #[must_use]
    pub fn holds_alone(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|own| !own.claims.is_empty())
    }

    /// A pod is to be told to end. Whether it is here and has not been told before.
    pub fn evict(&mut self, uid: &str) -> bool {
        match self.pods.get_mut(uid) {
            Some(victim) => !std::mem::replace(&mut victim.evicted, true),
            None => false,
        }
    }

    /// A pod is to be told to end whatever it was told before: it may have less time now. Whether it is here.
    pub fn end(&mut self, uid: &str) -> bool {
        let pod = self.pods.get_mut(uid);
        pod.map(|pod| pod.evicted = true).is_some()
    }

    /// From now on a pod counts for no admission: nothing of it runs any more, or it is in no source any more. The scheduler
    /// gives away what it had as soon as the API shows that.
    pub fn uncount(&mut self, uid: &str) {
        if let Some(own) = self.pods.get_mut(uid) {
            own.uncounted = true;
            self.recount(uid);
        }
    }

    /// Forgets a pod that holds nothing any more. Whether it was here.
    pub fn release(&mut self, uid: &str) -> bool {
        self.used.remove(uid);
        self.pods.remove(uid).is_some()
    }

    /// An admitted pod, as it was last granted its sizes.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<Arc<Pod>> {
        Some(Arc::clone(&self.pods.get(uid)?.pod))
    }

    /// The admitted pods.
    #[must_use]
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        self.pods.values().map(|a| Arc::clone(&a.pod)).collect()
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
mod tests;
