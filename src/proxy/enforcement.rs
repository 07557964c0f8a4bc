//! The thread that enforces network policies. Watches report changes; the thread writes all that have arrived as one transaction, and
//! audits the table in between.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::runtime::watcher;

use holdfast_core::backoff::Doubling;
use holdfast_core::policies::PodFacts;
use holdfast_kubeapi::cache::{Changes, Key};
use holdfast_kubeapi::{Api, Cache};

use crate::caches::{Caches, unpack};
use crate::config::Config;
use crate::packed::Packed;
use crate::policies::PolicyPlane;

/// Delays before a failed transaction is repeated.
const RETRIES: Doubling = Doubling::new(Duration::from_millis(100), Duration::from_secs(5));
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

fn take(plane: &mut PolicyPlane, change: Change, is_synced: &mut bool) {
    match change {
        Change::Policy((namespace, name), policy) => {
            plane.set_policy(&namespace, &name, policy.as_deref());
        }
        Change::Pod((namespace, name), packed) => {
            let pod = packed.and_then(|packed| unpack(&packed));
            plane.set_pod(&namespace, &name, pod.as_ref());
        }
        Change::Namespace(name, namespace) => {
            let namespace = namespace.and_then(|packed| unpack(&packed));
            let labels = namespace.map(|n: Namespace| n.metadata.labels.unwrap_or_default());
            plane.set_namespace(&name, labels);
        }
        Change::Synced => *is_synced = true,
    }
}

/// Takes changes until the inbox is closed.
fn work(plane: &mut PolicyPlane, changes: &Receiver<Change>, interval: Duration) {
    let (mut is_synced, mut failures) = (false, 0);
    loop {
        let wait = match failures {
            0 => interval,
            failures => RETRIES.after(failures),
        };
        let mut is_audit = false;
        match changes.recv_timeout(wait) {
            Ok(change) => take(plane, change, &mut is_synced),
            Err(RecvTimeoutError::Timeout) => is_audit = true,
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for change in changes.try_iter() {
            take(plane, change, &mut is_synced);
        }
        if !is_synced {
            continue;
        }
        let result = match is_audit && failures == 0 {
            true => plane.audit().map(|repaired| {
                if repaired {
                    tracing::warn!(
                        "another program has changed the rules of network policies; repaired"
                    );
                }
            }),
            false => plane.commit().map(drop),
        };
        match result {
            Ok(()) => failures = 0,
            Err(error) => {
                failures = failures.saturating_add(1);
                tracing::warn!(%error, failures, "writing the rules of network policies failed; retrying");
            }
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
