//! Caches of what the rules and records depend on, by watch. Each change marks its service in the inbox; the thread of the
//! data plane then reads the service and its slices here.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher;

use holdfast_core::services::NodeFacts;
use holdfast_kubeapi::cache::{Key, key};
use holdfast_kubeapi::{Api, Cache, Index};

use crate::health::{Eligibility, eligibility};
use crate::metrics::Metrics;
use crate::packed::{Pack, Packed};
use crate::plane::{Inbox, Objects};

/// The label that hands a Service to another proxy (`v1.LabelServiceProxyName` in `pkg/proxy/apis`).
const OTHER_PROXY: &str = "!service.kubernetes.io/service-proxy-name";
/// The label of headless services and their slices (`v1.IsHeadlessService`), which have no rules.
const HEADLESS: &str = "!service.kubernetes.io/headless";
/// The label of a Node with its zone (`v1.LabelTopologyZone`).
const ZONE: &str = "topology.kubernetes.io/zone";

/// The caches. Clones share them.
#[derive(Clone)]
pub(crate) struct Caches {
    node_name: String,
    node: Cache<Node>,
    services: Cache<Packed<Service>>,
    slices: Cache<Packed<EndpointSlice>>,
    by_service: Index<Packed<EndpointSlice>>,
    namespaces: Option<Cache<Packed<Namespace>>>,
}

/// The value of the index: a namespace and a name have no slash.
fn index_value((namespace, service): (&str, &str)) -> String {
    format!("{namespace}/{service}")
}

/// The service of an object; `None` if it names none.
fn service_key<K: Pack>(object: &Packed<K>) -> Option<Key> {
    let (namespace, _) = key(object);
    let service = object.service.to_string();
    (!service.is_empty()).then_some((namespace, service))
}

impl Caches {
    /// Starts the watches. With `with_dns`, headless services and namespaces are watched, too.
    pub(crate) fn start(
        client: &kube::Client,
        node_name: &str,
        with_dns: bool,
        inbox: &Arc<Inbox>,
        metrics: &Arc<Metrics>,
    ) -> Caches {
        let labels = if with_dns {
            String::new()
        } else {
            format!("{HEADLESS},{OTHER_PROXY}")
        };
        let (all, selected) = (
            watcher::Config::default(),
            watcher::Config::default().labels(&labels),
        );
        let own = watcher::Config::default().fields(&format!("metadata.name={node_name}"));
        let namespaces = with_dns.then(|| Cache::start(Api::all(client.clone()), all));
        let caches = Caches::over(
            Cache::start(Api::all(client.clone()), own),
            Cache::start(Api::all(client.clone()), selected.clone()),
            Cache::start(Api::all(client.clone()), selected),
            namespaces,
            node_name,
        );
        caches.observe(inbox, metrics);
        caches
    }

    fn over(
        node: Cache<Node>,
        services: Cache<Packed<Service>>,
        slices: Cache<Packed<EndpointSlice>>,
        namespaces: Option<Cache<Packed<Namespace>>>,
        node_name: &str,
    ) -> Caches {
        // The index is the first observer of the slices, so it has a change before the inbox does.
        let by_service = Index::new(&slices, |slice: &Packed<EndpointSlice>| {
            let key = service_key(slice);
            let value = key.map(|(namespace, service)| index_value((&namespace, &service)));
            value.into_iter().collect()
        });
        Caches {
            node_name: node_name.to_owned(),
            node,
            services,
            slices,
            by_service,
            namespaces,
        }
    }

    /// Marks the services of all changes in the inbox.
    fn observe(&self, inbox: &Arc<Inbox>, metrics: &Arc<Metrics>) {
        let (to, counted) = (Arc::clone(inbox), Arc::clone(metrics));
        self.services.observe(move |before, after| {
            counted.service_changed();
            let changed = after.or(before).and_then(|object| service_key(object));
            if let Some(key) = changed {
                to.service_changed(key, None);
            }
        });
        let (to, counted) = (Arc::clone(inbox), Arc::clone(metrics));
        self.slices.observe(move |before, after| {
            counted.slice_changed();
            // A slice may get another service's label.
            let keys = [before, after].map(|object| object.and_then(|o| service_key(o)));
            let trigger = after.and_then(|o| o.trigger);
            let trigger = trigger.filter(|t| before.and_then(|o| o.trigger) != Some(*t));
            let [before, after] = keys;
            if let Some(key) = before.filter(|key| Some(key) != after.as_ref()) {
                to.service_changed(key, None);
            }
            if let Some(key) = after {
                to.service_changed(key, trigger);
            }
        });
        if let Some(namespaces) = &self.namespaces {
            let to = Arc::clone(inbox);
            namespaces.observe(move |before, after| {
                if before.is_some() != after.is_some()
                    && let Some(object) = after.or(before)
                {
                    to.namespace_changed(key(&**object).1);
                }
            });
        }
        let (to, name) = (Arc::clone(inbox), self.node_name.clone());
        self.node.observe(move |before, after| {
            if facts(&name, before.map(|n| &**n)) != facts(&name, after.map(|n| &**n)) {
                to.node_changed();
            }
        });
    }

    /// Waits for the first complete lists of what the rules need.
    pub(crate) async fn synced(&self) {
        self.services.synced().await;
        self.slices.synced().await;
        self.node.synced().await;
    }

    /// Waits for the first complete list of namespaces, if DNS needs them.
    pub(crate) async fn namespaces_synced(&self) {
        if let Some(namespaces) = &self.namespaces {
            namespaces.synced().await;
        }
    }

    /// The namespaces, if DNS needs them.
    pub(crate) fn namespaces(&self) -> Option<Cache<Packed<Namespace>>> {
        self.namespaces.clone()
    }

    /// Whether the Node can receive traffic of load balancers.
    pub(crate) fn eligibility(&self) -> Eligibility {
        eligibility(self.node.get("", &self.node_name).as_deref())
    }

    /// A receiver that is notified of changes of the Node.
    pub(crate) fn node_changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.node.changes()
    }
}

impl Objects for Caches {
    fn node(&self) -> NodeFacts {
        facts(
            &self.node_name,
            self.node.get("", &self.node_name).as_deref(),
        )
    }

    fn service(&self, (namespace, name): &Key) -> (Option<Service>, Vec<Arc<EndpointSlice>>) {
        let service = self.services.get(namespace, name);
        let service = service.and_then(|packed| unpack(&packed));
        let slices = self.by_service.get(&index_value((namespace, name)));
        let slices = slices.iter().filter_map(|packed| unpack(packed));
        (service, slices.map(Arc::new).collect())
    }

    fn has_namespace(&self, name: &str) -> bool {
        let namespaces = self.namespaces.as_ref();
        namespaces.is_some_and(|all| all.get("", name).is_some())
    }
}

/// Decodes an object, which was encoded here.
pub(crate) fn unpack<K: Pack>(packed: &Packed<K>) -> Option<K> {
    match packed.unpack() {
        Ok(object) => Some(object),
        Err(error) => {
            let (namespace, name) = key(packed);
            tracing::warn!(%error, namespace, name, "decoding an object of the cache failed; ignoring the object");
            None
        }
    }
}

/// The facts of a Node, which may not exist yet. Of each family, the first internal address counts, or else the first external
/// one (`GetNodeHostIPs` in `pkg/util/node/node.go`).
fn facts(name: &str, node: Option<&Node>) -> NodeFacts {
    let labels = node.and_then(|node| node.metadata.labels.as_ref());
    let status = node.and_then(|node| node.status.as_ref());
    let listed = status.and_then(|status| status.addresses.as_ref());
    let mut addresses: Vec<IpAddr> = vec![];
    for kind in ["InternalIP", "ExternalIP"] {
        let of_kind = listed.into_iter().flatten().filter(|a| a.type_ == kind);
        for address in of_kind.filter_map(|a| a.address.parse::<IpAddr>().ok()) {
            let is_known = |known: &IpAddr| known.is_ipv4() == address.is_ipv4();
            if !addresses.iter().any(is_known) {
                addresses.push(address);
            }
        }
    }
    NodeFacts {
        name: name.to_owned(),
        zone: labels.and_then(|labels| labels.get(ZONE)).cloned(),
        addresses,
    }
}

#[cfg(test)]
#[path = "caches_tests.rs"]
mod tests;
