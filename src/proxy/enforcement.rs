//! The thread that enforces network policies. Watches report changes; the thread writes all that have arrived as one transaction, and
//! audits the table at fixed times.
//!
//! A change is written at once, or after the short pause that follows the previous transaction, so a policy is enforced within
//! 100 ms of its arrival even if pods change all the time.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::runtime::watcher;

use holdfast_core::policies::PodFacts;
use holdfast_kubeapi::cache::{Changes, Key};
use holdfast_kubeapi::{Api, Cache};

use crate::caches::{Caches, unpack};
use crate::config::Config;
use crate::packed::Packed;
use crate::policies::PolicyPlane;
use crate::timetable::{Step, Timetable};

/// The maximum pause after a transaction. Usually the pause is as long as the transaction was, so that pods that change all the
/// time take half a processor at most.
const MAX_PAUSE: Duration = Duration::from_millis(40);
/// Maximum number of changes that are taken before the next step.
const MAX_TOGETHER: usize = 10_000;
/// The namespace and the labels by which policies allow traffic to the cluster's DNS, as kubeadm sets them.
const DNS: (&str, &str, [(&str, &str); 1]) = ("kube-system", "kube-dns", [("k8s-app", "kube-dns")]);

/// A change for the thread.
enum Change {
    Policy(Key, Option<Arc<NetworkPolicy>>),
    Pod(Key, Option<Arc<Packed<Pod>>>),
    Namespace(String, Option<Arc<Packed<Namespace>>>),
    /// The first complete lists have arrived. Before, an existing table stays as it is.
    Synced,
}

/// Opens the table and starts the thread. Returns its inbox.
fn start(config: &Config) -> Result<Sender<Change>, String> {
    let mut plane =
        PolicyPlane::open(&config.table, &config.node_name).map_err(|e| e.to_string())?;
    if !config.dns.is_empty() {
        plane.set_server(DNS.0, DNS.1, dns_server(&config.dns));
    }
    let (inbox, changes) = mpsc::channel();
    let interval = config.audit_interval;
    let thread = std::thread::Builder::new().name("policies".into());
    let work = move || work(&mut plane, &changes, interval);
    match thread.spawn(work) {
        Ok(_) => Ok(inbox),
        Err(error) => Err(format!(
            "the thread of network policies cannot be started: {error}"
        )),
    }
}

/// The DNS server of this process as policies see it: as a pod.
fn dns_server(addresses: &[IpAddr]) -> PodFacts {
    PodFacts {
        addresses: addresses.to_vec(),
        labels: DNS.2.map(|(key, value)| (key.into(), value.into())).into(),
        ..PodFacts::default()
    }
}

/// The rules of network policies in the kernel.
trait Rules {
    /// Takes a change. Nothing reaches the kernel before a commit or an audit.
    fn take(&mut self, change: Change);

    /// Writes the changes since the last commit as one transaction, or all rules after a failure.
    fn commit(&mut self) -> Result<(), String>;

    /// Commits, compares the rules in the kernel with the desired ones, and repairs them. Returns whether they differed.
    fn audit(&mut self) -> Result<bool, String>;
}

impl Rules for PolicyPlane {
    fn take(&mut self, change: Change) {
        match change {
            Change::Policy((namespace, name), policy) => {
                self.set_policy(&namespace, &name, policy.as_deref());
            }
            Change::Pod((namespace, name), packed) => {
                let pod = packed.and_then(|packed| unpack(&packed));
                self.set_pod(&namespace, &name, pod.as_ref());
            }
            Change::Namespace(name, namespace) => {
                let namespace = namespace.and_then(|packed| unpack(&packed));
                let labels = namespace.map(|n: Namespace| n.metadata.labels.unwrap_or_default());
                self.set_namespace(&name, labels);
            }
            Change::Synced => {}
        }
    }

    fn commit(&mut self) -> Result<(), String> {
        let committed = PolicyPlane::commit(self);
        committed.map(drop).map_err(|error| error.to_string())
    }

    fn audit(&mut self) -> Result<bool, String> {
        PolicyPlane::audit(self).map_err(|error| error.to_string())
    }
}

/// Logs a failure.
fn log_failure(error: &str, step: &'static str) {
    tracing::warn!(
        error,
        step,
        "writing or auditing the rules of network policies failed; retrying"
    );
}

/// The thread's state.
struct Work<'a> {
    rules: &'a mut dyn Rules,
    times: Timetable,
    /// Whether the first complete lists have arrived.
    is_synced: bool,
    /// Whether changes were taken that are not committed.
    has_changes: bool,
}

impl Work<'_> {
    fn take(&mut self, change: Change) {
        self.is_synced |= matches!(change, Change::Synced);
        self.rules.take(change);
        self.has_changes = true;
    }

    fn commit(&mut self) {
        let begun = Instant::now();
        let committed = self.rules.commit();
        let now = Instant::now();
        match committed {
            Ok(()) => {
                self.has_changes = false;
                self.times
                    .written(now, now.duration_since(begun).min(MAX_PAUSE));
            }
            Err(error) => {
                log_failure(&error, "commit");
                self.times.write_failed(now);
            }
        }
    }

    fn audit(&mut self) {
        let audited = self.rules.audit();
        let now = Instant::now();
        match audited {
            Ok(repaired) => {
                if repaired {
                    tracing::warn!(
                        "another program has changed the rules of network policies; repaired"
                    );
                }
                self.has_changes = false;
                self.times.audited(now);
            }
            Err(error) => {
                log_failure(&error, "audit");
                self.times.audit_failed(now);
            }
        }
    }
}

/// Works until the inbox is closed.
fn work(rules: &mut dyn Rules, changes: &Receiver<Change>, audit_interval: Duration) {
    let mut work = Work {
        rules,
        times: Timetable::new(Instant::now(), audit_interval),
        is_synced: false,
        has_changes: false,
    };
    loop {
        let now = Instant::now();
        let step = match work.is_synced {
            true => work.times.step(now, work.has_changes),
            // Rules of half a list would break connections to the other half.
            false => Step::Wait(now + audit_interval),
        };
        match step {
            Step::Write => work.commit(),
            Step::Audit => work.audit(),
            Step::Wait(until) => match changes.recv_timeout(until.saturating_duration_since(now)) {
                Ok(change) => work.take(change),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            },
        }
        // The changes that arrived meanwhile belong to the next transaction.
        for change in changes.try_iter().take(MAX_TOGETHER) {
            work.take(change);
        }
    }
}

/// Sends the changes of a cache.
fn send<K>(
    inbox: &Sender<Change>,
    changes: Changes<K>,
    change: impl Fn(Key, Option<Arc<K>>) -> Change,
) -> bool {
    let mut all = changes.into_iter();
    all.all(|(key, changed)| inbox.send(change(key, changed.now)).is_ok())
}

/// Enforces network policies. Returns only with an error. DNS and policies share the watch of namespaces in `caches`.
pub(crate) async fn run(
    client: &kube::Client,
    config: &Config,
    caches: &Caches,
) -> Result<(), String> {
    let inbox = start(config)?;
    let all = watcher::Config::default;
    let policies = Cache::<NetworkPolicy>::start(Api::all(client.clone()), all());
    let pods = Cache::<Packed<Pod>>::start(Api::all(client.clone()), all());
    let namespaces = caches.namespaces();
    let namespaces = namespaces.unwrap_or_else(|| Cache::start(Api::all(client.clone()), all()));
    let (mut policies, mut pods, mut namespaces) = (
        policies.read_changes(),
        pods.read_changes(),
        namespaces.read_changes(),
    );
    let of_namespace = |(_, name): Key, namespace| Change::Namespace(name, namespace);
    // The first result of each reader is the complete list.
    let (first, second, third) = tokio::join!(namespaces.next(), pods.next(), policies.next());
    let mut is_open = send(&inbox, first, of_namespace)
        && send(&inbox, second, Change::Pod)
        && send(&inbox, third, Change::Policy)
        && inbox.send(Change::Synced).is_ok();
    while is_open {
        is_open = tokio::select! {
            changes = policies.next() => send(&inbox, changes, Change::Policy),
            changes = pods.next() => send(&inbox, changes, Change::Pod),
            changes = namespaces.next() => send(&inbox, changes, of_namespace),
        };
    }
    Err("the thread of network policies ended".to_owned())
}

#[cfg(test)]
#[path = "enforcement_tests.rs"]
mod tests;
