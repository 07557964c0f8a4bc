//! The bundled minimal control plane: apiserver, scheduler and controllers in one process.
//!
//! It does not import the node agent, and the node agent does not import it: they communicate over HTTPS.

pub mod api;
pub mod controllers;
pub mod join;
pub mod pki;
mod ranges;
pub mod scheduler;
pub mod store;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt as _;
use serde_json::{Value, json};

use api::{Api, Request, token::Tokens};
pub use ranges::{Ranges, RangesError};
use store::Store;

/// Settings of the control plane.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The directory of the store and the certificates.
    pub dir: PathBuf,
    /// Addresses to listen on, in addition to those of [`Settings::addresses`].
    pub bind: Vec<IpAddr>,
    /// The port of the API; 0 chooses a free port.
    pub port: u16,
    /// The address at which nodes and pods reach the API.
    pub advertise: IpAddr,
    /// The ranges of cluster IPs.
    pub service_range: Ranges,
    /// Settings for several nodes.
    pub nodes: join::NodeSettings,
}

/// The names in the certificate of the API.
const SERVER_NAMES: [&str; 5] = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];

impl Settings {
    /// The addresses to listen on: loopback, the advertised address, and those of `bind`. An unspecified address
    /// replaces all addresses of its family; `::` replaces those of both.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let all = [IpAddr::from([127, 0, 0, 1]), self.advertise];
        let mut all: Vec<IpAddr> = all.into_iter().chain(self.bind.iter().copied()).collect();
        if let Some(any) = all.iter().find(|a| a.is_ipv6() && a.is_unspecified()) {
            return vec![*any];
        }
        if let Some(any) = all.iter().copied().find(IpAddr::is_unspecified) {
            all.retain(|a| a.is_ipv6() || *a == any);
        }
        let mut seen = std::collections::HashSet::new();
        all.retain(|a| seen.insert(*a));
        all
    }

    /// The names and addresses in the certificate of the API: those of the Service `kubernetes`, whose cluster IP is the
    /// first of the range, loopback, the advertised address, those of `bind`, and the administrator's.
    fn certified(&self) -> (Vec<&str>, Vec<IpAddr>) {
        let (own_names, own_addresses) = self.nodes.certified();
        let bound = self.bind.iter().copied().filter(|a| !a.is_unspecified());
        let addresses = [IpAddr::from([127, 0, 0, 1]), self.advertise]
            .into_iter()
            .chain(bound)
            .chain([self.service_range.address(1)])
            .chain(own_addresses)
            .collect();
        let names = SERVER_NAMES.into_iter().chain(own_names).collect();
        (names, addresses)
    }
}

/// Runs the control plane until the process exits.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    let pki = pki::Pki::open(&settings.dir.join("pki"))?;
    let ranges = settings.nodes.pod_ranges()?;
    let (names, addresses) = settings.certified();
    let serving = pki.serving("kube-apiserver", &names, &addresses)?;
    let (private, public) = pki.token_keys()?;
    let store = Store::open(&settings.dir.join("store.redb"), api::object::index)?;
    // A client certificate without other permissions than to call agents: it is presented
    // to any address that a node's status names.
    let own = pki.client("node-client", api::rbac::NODE_CLIENT, &[])?;
    let broken = |e: holdfast_https::BoxError| anyhow::anyhow!("setting up TLS failed: {e}");
    let (service_range, api_port) = (settings.service_range.clone(), settings.port);
    let is_ours = move |address: SocketAddr| {
        // An address belongs to this machine if it can be bound.
        (address.port() == api_port && std::net::UdpSocket::bind((address.ip(), 0)).is_ok())
            || service_range.contains(address.ip())
    };
    let nodes =
        api::nodes::Nodes::new(&own.certificate, &own.key, &pki.ca, is_ours).map_err(broken)?;
    let api = Api::new(
        store,
        Tokens::new(&private, &public)?,
        settings.service_range.clone(),
    )
    .with_nodes(nodes);
    bootstrap(&api, &settings).await?;
    join::bootstrap(&api, &settings, &pki.ca).await?;

    let tls =
        holdfast_https::Tls::fixed(&serving.certificate, &serving.key, &pki.ca).map_err(broken)?;
    let listen = settings.addresses();
    let listeners = holdfast_https::Listeners::bind(&listen, settings.port).map_err(|(address, e)| {
        anyhow::anyhow!("the API cannot listen on {address}: {e}; stop what uses the port, or choose another with --api-port")
    })?;
    let port = listeners.port().unwrap_or(settings.port);

    let dir = settings.dir.as_path();
    let client = own_client(&pki, dir, port, "controller-manager").await?;
    // The scheduler has a user of its own, so that the records of requests name it.
    let scheduler_client = own_client(&pki, dir, port, "scheduler").await?;
    let ca = pki.ca.clone();
    let caches = controllers::Caches::start(&client);
    let sign: controllers::Sign = std::sync::Arc::new(move |asked, client, seconds| {
        pki.sign_request(asked, client, seconds)
            .map_err(|e| e.to_string())
    });
    let tokens = api.tokens();
    let sign_token: controllers::SignToken = std::sync::Arc::new(move |subject, secret| {
        tokens
            .issue_legacy(subject, secret)
            .map_err(|e| e.to_string())
    });
    let directories = (
        settings.dir.join("volumes"),
        holdfast_sys::machine::hostname(),
    );
    tracing::info!(?listen, port, "the control plane is serving");

    // One task per part, so that long work of one does not delay others. A panic stops
    // the process (`https::abort_on_panic`).
    let mut parts = Parts::new();
    let server = api::server::serve(api.clone(), listeners, tls);
    parts.spawn(run_named("the API server", server));
    let scheduler = scheduler::run(scheduler_client, caches.clone());
    parts.spawn(run_named("the scheduler", scheduler));
    let signers = (sign, sign_token);
    let nodes = (ranges, settings.nodes.heartbeat_grace);
    let controllers = controllers::run(client, caches, ca, Some(directories), signers, nodes);
    parts.spawn(run_named("the controllers", controllers));
    parts.spawn(run_named("the event clean-up", expire_events(api)));
    let release = holdfast_sys::memory::release_free_memory(MAX_FREE_BYTES);
    parts.spawn(run_named("the release of memory", release));
    Err(wait_for_exit(parts).await)
}

/// A client of a part of the control plane, which may do everything, with the user `system:kube-PART`.
async fn own_client(
    pki: &pki::Pki,
    dir: &std::path::Path,
    port: u16,
    part: &str,
) -> anyhow::Result<kube::Client> {
    let user = format!("system:kube-{part}");
    let pair = pki.client(part, &user, &["system:masters"])?;
    let kubeconfig = dir.join(format!("{part}.kubeconfig"));
    let server = format!("https://127.0.0.1:{port}");
    let text = pki::kubeconfig(&server, &pki.ca, part, &pair);
    holdfast_sys::file::replace(&kubeconfig, text.as_bytes())?;
    Ok(holdfast_kubeapi::client::connect(&kubeconfig).await?)
}

/// The number of free bytes above which they are returned to the system.
const MAX_FREE_BYTES: usize = 16 << 20;

/// Tasks that run until the process exits; each returns its name.
type Parts = tokio::task::JoinSet<&'static str>;

async fn run_named(name: &'static str, work: impl Future<Output = ()>) -> &'static str {
    work.await;
    name
}

/// Waits until a part returns, which is always an error; the other parts are cancelled.
async fn wait_for_exit(mut parts: Parts) -> anyhow::Error {
    match parts.join_next().await {
        Some(Ok(name)) => anyhow::anyhow!("{name} stopped"),
        Some(Err(error)) => anyhow::anyhow!("a part of the control plane stopped: {error}"),
        None => anyhow::anyhow!("the control plane has no parts"),
    }
}

fn master() -> api::auth::User {
    api::auth::User {
        name: "system:apiserver".into(),
        groups: vec!["system:masters".into()],
        ..api::auth::User::default()
    }
}

/// Creates an object unless it exists.
async fn post(api: &Api, path: &str, body: &Value) -> anyhow::Result<()> {
    send(api, "POST", path, body, 409).await
}

/// Writes an object; `fine` is another response code that counts as success.
async fn send(api: &Api, method: &str, path: &str, body: &Value, fine: u16) -> anyhow::Result<()> {
    let request = Request {
        method: method.into(),
        path: path.into(),
        body: body.to_string().into(),
        user: master(),
        ..Request::default()
    };
    match api.answer(request).await {
        api::Answer::Body { code, .. } if code == 201 || code == fine => Ok(()),
        api::Answer::Body { code, body, .. } => anyhow::bail!(
            "the API rejected a bootstrap object with {code}: {}",
            String::from_utf8_lossy(&body)
        ),
        api::Answer::Watch(_) => {
            anyhow::bail!("the API answered the request for a bootstrap object with a watch")
        }
    }
}

/// Creates the objects that every cluster has.
async fn bootstrap(api: &Api, settings: &Settings) -> anyhow::Result<()> {
    for namespace in ["default", "kube-system", "kube-public", "kube-node-lease"] {
        post(
            api,
            "/api/v1/namespaces",
            &json!({"metadata": {"name": namespace}}),
        )
        .await?;
    }
    for (name, value, description) in api::classes::SYSTEM {
        post(
            api,
            "/apis/scheduling.k8s.io/v1/priorityclasses",
            &json!({"metadata": {"name": name}, "value": value, "description": description}),
        )
        .await?;
    }
    for (plural, object) in api::rbac::bootstrap() {
        let path = format!("/apis/rbac.authorization.k8s.io/v1/{plural}");
        post(api, &path, &object).await?;
        let name = api::object::name(&object);
        let stored = api.store().get(&format!("{plural}/{name}"));
        let stored: Option<Value> = stored.and_then(|r| serde_json::from_slice(&r.value).ok());
        if let Some(renewed) = stored.and_then(|stored| api::rbac::renewed(&stored, &object)) {
            send(api, "PUT", &format!("{path}/{name}"), &renewed, 200).await?;
        }
    }
    // The default class provisions a directory on this machine when a pod needs the claim.
    let class = json!({"metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": controllers::DIRECTORY, "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer"});
    post(api, "/apis/storage.k8s.io/v1/storageclasses", &class).await?;
    default_range(api, settings).await?;
    for (namespace, service) in services(settings) {
        let name = api::object::name(&service).to_owned();
        let key = format!("services/{namespace}/{name}");
        if api.store().get(&key).is_none() {
            let path = format!("/api/v1/namespaces/{namespace}/services");
            match post(api, &path, &service).await {
                // A cluster that was set up by an earlier version may use the address for another service.
                Err(error) if name == "kube-dns" => {
                    let address = settings.service_range.address(10);
                    tracing::error!(%error, %address, "creating the Service kube-system/kube-dns failed: pods have no cluster DNS until the address is free");
                }
                result => result?,
            }
        }
    }
    endpoints(api, settings).await
}

/// Writes the ServiceCIDR with the ranges of cluster IPs (KEP-1880). Its ranges are immutable, so it is written again if the
/// cluster starts with others.
async fn default_range(api: &Api, settings: &Settings) -> anyhow::Result<()> {
    let cidrs: Vec<String> = settings
        .service_range
        .iter()
        .map(|r| r.to_string())
        .collect();
    let path = "/apis/networking.k8s.io/v1/servicecidrs";
    let name = api::networking::DEFAULT_RANGE;
    let read = || {
        let stored = api.store().get(&format!("servicecidrs/{name}"))?;
        serde_json::from_slice::<Value>(&stored.value).ok()
    };
    if read().is_some_and(|stored| stored["spec"]["cidrs"] != json!(cidrs)) {
        send(api, "DELETE", &format!("{path}/{name}"), &json!({}), 200).await?;
    }
    post(
        api,
        path,
        &json!({"metadata": {"name": name}, "spec": {"cidrs": cidrs}}),
    )
    .await?;
    let Some(mut stored) = read() else {
        return Ok(());
    };
    if api::object::list(&stored, &["status", "conditions"]).is_empty() {
        stored["status"] = json!({"conditions": [{"type": "Ready", "status": "True", "reason": "",
            "message": "Kubernetes default Service CIDR is ready", "lastTransitionTime": api::object::now()}]});
        send(api, "PUT", &format!("{path}/{name}/status"), &stored, 200).await?;
    }
    Ok(())
}

/// The services that every cluster has, with their namespaces: the API, and the DNS. The latter has no selector: the service
/// proxy of each node answers at its address.
fn services(settings: &Settings) -> [(&'static str, Value); 2] {
    let address = |position| settings.service_range.address(position);
    let api = json!({"metadata": {"name": "kubernetes", "labels": {"component": "apiserver", "provider": "kubernetes"}},
        "spec": {"clusterIP": address(1), "ports": [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": settings.port}]}});
    let labels = json!({"k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS"});
    let dns = json!({"metadata": {"name": "kube-dns", "labels": labels}, "spec": {"clusterIP": address(10), "ports": [
        {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 53}, {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": 53}]}});
    [("default", api), ("kube-system", dns)]
}

/// Writes the endpoints of the `kubernetes` service. The address may have changed since the last start.
async fn endpoints(api: &Api, settings: &Settings) -> anyhow::Result<()> {
    let family = if settings.advertise.is_ipv4() {
        "IPv4"
    } else {
        "IPv6"
    };
    // A loopback address is not reachable from pods, so the service then has no endpoints.
    let advertised: Vec<_> = Some(settings.advertise)
        .filter(|address| !address.is_loopback())
        .into_iter()
        .collect();
    let ports = || {
        let port = json!({"name": "https", "port": settings.port, "protocol": "TCP"});
        advertised.iter().map(|_| port.clone()).collect::<Vec<_>>()
    };
    let subsets = advertised
        .iter()
        .map(|ip| json!({"addresses": [{"ip": ip}], "ports": ports()}));
    let endpoints = advertised
        .iter()
        .map(|ip| json!({"addresses": [ip], "conditions": {"ready": true}}));
    let core = json!({"metadata": {"name": "kubernetes", "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}},
        "subsets": subsets.collect::<Vec<_>>()});
    let slice = json!({"metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": family, "ports": ports(), "endpoints": endpoints.collect::<Vec<_>>()});
    for (group, plural, object) in [
        ("/api/v1", "endpoints", core),
        ("/apis/discovery.k8s.io/v1", "endpointslices", slice),
    ] {
        let path = format!("{group}/namespaces/default/{plural}");
        if api
            .store()
            .get(&format!("{plural}/default/kubernetes"))
            .is_none()
        {
            post(api, &path, &object).await?;
        } else {
            send(api, "PUT", &format!("{path}/kubernetes"), &object, 200).await?;
        }
    }
    Ok(())
}

/// Maximum number and age of events. The number is limited because clients may create any number of events.
const EVENTS: (usize, Duration) = (5000, Duration::from_secs(3600));

/// Deletes events beyond the limits of [`EVENTS`], oldest first.
async fn expire_events(api: Api) {
    loop {
        tokio::time::sleep(Duration::from_secs(30)).await;
        let age = jiff::SignedDuration::from_secs(EVENTS.1.as_secs().cast_signed());
        let before = api::object::stamp(jiff::Timestamp::now() - age);
        let (events, _) = api.store().list("events/");
        // Parses all events on a separate thread, so that no runtime worker is blocked.
        let parse = move || surplus_events(events, EVENTS.0, &before);
        let Ok(surplus) = tokio::task::spawn_blocking(parse).await else {
            continue;
        };
        let removals = surplus.into_iter().map(|(namespace, name)| {
            api.answer(Request {
                method: "DELETE".into(),
                path: format!("/api/v1/namespaces/{namespace}/events/{name}"),
                user: master(),
                ..Request::default()
            })
        });
        // Concurrent deletions share a disk sync.
        futures::stream::iter(removals)
            .buffer_unordered(32)
            .for_each(|_| std::future::ready(()))
            .await;
    }
}

/// Namespace and name of the events last seen before `before`, and of the oldest ones beyond `most`.
fn surplus_events(
    events: Vec<(std::sync::Arc<str>, store::Record)>,
    most: usize,
    before: &str,
) -> Vec<(String, String)> {
    let mut all: Vec<(String, String, String)> = vec![];
    for (_, record) in events {
        let Ok(event) = serde_json::from_slice::<Value>(&record.value) else {
            continue;
        };
        let last = ["lastTimestamp", "eventTime"]
            .iter()
            .find_map(|k| api::object::text(&event, &[k]))
            .or(api::object::text(
                &event,
                &["metadata", "creationTimestamp"],
            ));
        all.push((
            last.unwrap_or_default().to_owned(),
            api::object::namespace(&event)
                .unwrap_or("default")
                .to_owned(),
            api::object::name(&event).to_owned(),
        ));
    }
    all.sort();
    let beyond = all.len().saturating_sub(most);
    let old = all.partition_point(|(last, ..)| last.as_str() < before);
    all.truncate(beyond.max(old));
    all.into_iter()
        .map(|(_, namespace, name)| (namespace, name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_listens_on_the_configured_addresses() {
        let of = |advertise: &str, bind: &[&str]| {
            let settings = Settings {
                dir: PathBuf::new(),
                bind: bind
                    .iter()
                    .map(|a| a.parse().expect("an address"))
                    .collect(),
                port: 0,
                advertise: advertise.parse().expect("an address"),
                service_range: "10.96.0.0/16".parse().expect("a range"),
                nodes: join::NodeSettings::default(),
            };
            let all = settings.addresses();
            all.iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(of("127.0.0.1", &[]), "127.0.0.1");
        assert_eq!(of("192.0.2.1", &[]), "127.0.0.1 192.0.2.1");
        assert_eq!(
            of("192.0.2.1", &["192.0.2.2"]),
            "127.0.0.1 192.0.2.1 192.0.2.2"
        );
        assert_eq!(of("192.0.2.1", &["0.0.0.0", "fd00::1"]), "0.0.0.0 fd00::1");
        assert_eq!(of("192.0.2.1", &["0.0.0.0", "::"]), "::");
        assert_eq!(of("fd00::1", &[]), "127.0.0.1 fd00::1");
    }

    #[test]
    fn expired_events_are_deleted_and_the_oldest_above_the_limit() {
        let event = |minute: u32| {
            let object = json!({"metadata": {"name": format!("e{minute}"), "namespace": "n"},
                "lastTimestamp": format!("2026-01-01T00:{minute:02}:00Z")});
            let record = store::Record {
                value: object.to_string().into(),
                attrs: std::sync::Arc::default(),
                revision: 1,
            };
            (format!("events/n/e{minute}").into(), record)
        };
        let gone = |most, before: &str| {
            let events = [4, 1, 3, 2, 5].map(event).to_vec();
            let surplus = surplus_events(events, most, before);
            surplus
                .into_iter()
                .map(|(_, name)| name)
                .collect::<Vec<_>>()
        };
        assert!(gone(5, "2026-01-01T00:01:00Z").is_empty());
        assert_eq!(gone(5, "2026-01-01T00:03:00Z"), ["e1", "e2"]);
        assert_eq!(gone(2, "2026-01-01T00:01:30Z"), ["e1", "e2", "e3"]);
    }
}
