//! The process: it connects the caches, the thread of the data plane, the DNS server and the pages.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use holdfast_core::repeated::RepeatedFailures;
use holdfast_kubeapi::client::{self, ConnectError};
use holdfast_sys::clock::Clock;

use crate::caches::Caches;
use crate::config::Config;
use crate::events::{About, Emitted, Events};
use crate::metrics::Metrics;
use crate::pages::{self, Facts, Page, ServicePorts};
use crate::parts::{self, Dns};
use crate::plane::{self, Inbox, Pace, Records, Report};
use crate::policies::PolicyPlane;
use crate::{address, bridge, credentials, enforcement, routing};

/// Maximum number of reports that wait for this task.
const REPORTS: usize = 64;
/// Where the kernel lists links.
const LINKS: &str = "/sys/class/net";
/// The number of the process's free bytes above which they are returned to the system.
const MAX_FREE_BYTES: usize = 1 << 20;

/// Why the proxy cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// There is no client for the apiserver.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A server's address cannot be bound, and `bindAddressHardFail` is set.
    #[error(
        "the server of {page} cannot listen on {address}: {error}; stop what uses the port, or choose another address"
    )]
    Bind {
        /// The path of the page.
        page: &'static str,
        /// The address.
        address: SocketAddr,
        /// The cause.
        error: std::io::Error,
    },
    /// The DNS server's address cannot be added to this machine or removed from it.
    #[error("invalid --dns {address}: the kernel refuses the local route of the address: {error}")]
    Address {
        /// The address.
        address: IpAddr,
        /// The kernel's error.
        error: std::io::Error,
    },
    /// The DNS server ended.
    #[error("the DNS server cannot run: {0}")]
    Dns(String),
    /// The rules cannot be set up or removed.
    #[error("{0}")]
    Plane(String),
    /// The thread of the data plane cannot be started.
    #[error("the thread of the data plane cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Runs until `stop` is cancelled, and leaves all rules in place, as kube-proxy does: connections and the next start use them.
///
/// # Errors
///
/// The configuration does not fit the machine: see [`RunError`].
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), RunError> {
    log_fields(&config);
    if let Some(score) = config.oom_score_adj
        && let Err(error) = holdfast_sys::process::set_oom_score_adj(score)
    {
        tracing::warn!(%error, score, "setting oomScoreAdj failed");
    }
    let config = Arc::new(config);
    let client = client::connect(&config.kubeconfig).await?;
    let (inbox, metrics) = (Arc::<Inbox>::default(), Arc::<Metrics>::default());
    let facts = Arc::new(Facts::new(Arc::clone(&inbox), Arc::clone(&metrics)));
    let dns = Dns::new(&config);
    let name = &config.node_name;
    let caches = Caches::start(&client, name, dns.is_some(), &inbox, &metrics);
    tokio::spawn(holdfast_sys::service::keep_watchdog_fed());
    tokio::spawn(holdfast_sys::memory::release_free_memory(MAX_FREE_BYTES));
    let main = Main {
        config: Arc::clone(&config),
        facts: Arc::clone(&facts),
        caches: caches.clone(),
        events: Events::start(client.clone(), &config.node_name, Clock::system().now()),
        ports: ServicePorts::default(),
        failures: RepeatedFailures::default(),
    };
    let work = async {
        let reports = start_plane(&config, dns.clone(), caches.clone(), &inbox).await?;
        main.follow(reports, &inbox).await;
        Ok(())
    };
    let result = tokio::select! {
        biased;
        () = stop.cancelled() => Ok(()),
        result = serve_dns(&config, dns.as_ref(), stop.clone()) => result,
        result = serve_all_pages(&config, &facts) => result,
        result = Box::pin(enforce(&client, &config, &caches)) => result,
        result = keep_routes(&client, &config) => result,
        never = credentials::keep_renewed(&config) => match never {},
        result = Box::pin(work) => result,
    };
    holdfast_sys::service::stopping();
    inbox.stop();
    result
}

/// Removes the tables and the DNS addresses of a proxy that does not run any more.
///
/// # Errors
///
/// The kernel refuses.
pub fn cleanup(config: &Config) -> Result<(), RunError> {
    let removed = address::remove(&config.dns);
    parts::remove_plane(config).map_err(RunError::Plane)?;
    PolicyPlane::remove(&config.table).map_err(|e| RunError::Plane(e.to_string()))?;
    routing::remove(config).map_err(RunError::Plane)?;
    removed.map_err(|(address, error)| RunError::Address { address, error })
}

/// Names the fields of the configuration that have no effect.
fn log_fields(config: &Config) {
    if !config.unknown.is_empty() {
        let fields = config.unknown.join(", ");
        tracing::warn!(
            fields,
            "KubeProxyConfiguration v1alpha1 has no such fields; check their spelling"
        );
    }
    if !config.ignored.is_empty() {
        let fields = config.ignored.join(", ");
        tracing::warn!(
            fields,
            "these fields of the configuration have no effect here"
        );
    }
    tracing::info!(
        node = config.node_name,
        table = config.table,
        dns = ?config.dns,
        "starting the proxy"
    );
}

/// Adds the DNS addresses and answers queries. Never returns without DNS.
async fn serve_dns(
    config: &Config,
    dns: Option<&Dns>,
    stop: CancellationToken,
) -> Result<(), RunError> {
    let Some(dns) = dns else {
        return std::future::pending().await;
    };
    let added = address::add(&config.dns);
    added.map_err(|(address, error)| RunError::Address { address, error })?;
    dns.serve(config, stop).await.map_err(RunError::Dns)
}

/// Enforces network policies if that is configured. Returns only with an error.
async fn enforce(client: &kube::Client, config: &Config, caches: &Caches) -> Result<(), RunError> {
    match config.policy {
        true => enforcement::run(client, config, caches)
            .await
            .map_err(RunError::Plane),
        false => std::future::pending().await,
    }
}

/// Keeps the routes to other nodes if that is configured. Returns only with an error.
async fn keep_routes(client: &kube::Client, config: &Config) -> Result<(), RunError> {
    match config.routes {
        true => routing::run(client, config).await.map_err(RunError::Plane),
        false => std::future::pending().await,
    }
}

/// Serves both pages. Returns only with an error.
async fn serve_all_pages(config: &Config, facts: &Arc<Facts>) -> Result<(), RunError> {
    let hard = config.bind_hard_fail;
    let (health, metrics) = tokio::join!(
        serve_at(config.healthz, ("/healthz", pages::HEALTH), hard, facts),
        serve_at(config.metrics, ("/metrics", pages::METRICS), hard, facts),
    );
    health.and(metrics)
}

/// Serves one page. An address in use is tried again, unless failing to bind is fatal.
async fn serve_at(
    address: Option<SocketAddr>,
    (name, page): (&'static str, Page),
    is_fatal: bool,
    facts: &Arc<Facts>,
) -> Result<(), RunError> {
    let Some(address) = address else {
        return std::future::pending().await;
    };
    let mut is_first = true;
    loop {
        match pages::bind(address) {
            Ok(listeners) => pages::serve_pages(listeners, Arc::clone(facts), page).await,
            Err(error) if is_fatal => {
                return Err(RunError::Bind {
                    page: name,
                    address,
                    error,
                });
            }
            Err(error) => {
                if std::mem::take(&mut is_first) {
                    tracing::warn!(%error, %address, page = name, "listening failed; retrying every 5 s");
                }
                tokio::time::sleep(pages::REBIND_INTERVAL).await;
            }
        }
    }
}

/// Opens the data plane in a thread of its own. Returns the thread's reports.
async fn start_plane(
    config: &Arc<Config>,
    dns: Option<Dns>,
    caches: Caches,
    inbox: &Arc<Inbox>,
) -> Result<mpsc::Receiver<Report>, RunError> {
    let (reports, received) = mpsc::channel(REPORTS);
    let (opened, is_open) = oneshot::channel();
    let (config, inbox) = (Arc::clone(config), Arc::clone(inbox));
    let thread = std::thread::Builder::new().name("plane".into());
    let work = move || {
        let mut plane = match parts::open_plane(&config) {
            Ok(plane) => plane,
            Err(why) => {
                // The process ends, unless it is ending already.
                let _ = opened.send(Err(why));
                return;
            }
        };
        let _ = opened.send(Ok(()));
        let pace = Pace {
            min_sync_period: config.min_sync_period,
            audit_interval: config.audit_interval,
        };
        let records = dns.as_ref().map(|dns| dns as &dyn Records);
        let prepare = || prepare_bridge(config.bridge.as_deref());
        let report = |report| reports.blocking_send(report).is_ok();
        let hooks: (&dyn Fn(), &dyn Fn(Report) -> bool) = (&prepare, &report);
        plane::work(&mut *plane, records, &caches, &inbox, pace, hooks);
    };
    thread.spawn(work).map_err(RunError::Thread)?;
    match is_open.await {
        Ok(Ok(())) => Ok(received),
        Ok(Err(why)) => Err(RunError::Plane(why)),
        Err(_) => Err(RunError::Plane("the data plane ended at its start".into())),
    }
}

/// Lets traffic within the bridge of this node's pods pass the rules.
fn prepare_bridge(bridge: Option<&str>) {
    if let Some(bridge) = bridge
        && let Err(error) = bridge::pass_through_rules(Path::new(LINKS), bridge)
    {
        tracing::warn!(%error, bridge, "setting the bridge's nf_call_iptables failed; services do not work between pods of this node");
    }
}

/// The task that receives the thread's reports.
struct Main {
    config: Arc<Config>,
    facts: Arc<Facts>,
    caches: Caches,
    events: Events,
    ports: ServicePorts,
    failures: RepeatedFailures<&'static str>,
}

impl Main {
    /// Follows reports and changes of the Node. Returns when the thread has exited.
    async fn follow(mut self, mut reports: mpsc::Receiver<Report>, inbox: &Inbox) {
        let mut node = self.caches.node_changes();
        let lists = self.caches.clone();
        let mut synced = Box::pin(async move { lists.synced().await });
        let lists = self.caches.clone();
        let mut named = Box::pin(async move { lists.namespaces_synced().await });
        let (mut is_synced, mut is_named, mut is_ready) = (false, false, false);
        loop {
            tokio::select! {
                biased;
                report = reports.recv() => match report {
                    Some(report) => {
                        let committed = matches!(report, Report::Committed { .. });
                        self.take(report);
                        if committed && !std::mem::replace(&mut is_ready, true) {
                            tracing::info!("the services are served");
                            holdfast_sys::service::ready();
                        }
                    }
                    None => return,
                },
                () = &mut synced, if !is_synced => {
                    is_synced = true;
                    inbox.set_synced();
                }
                () = &mut named, if !is_named => {
                    is_named = true;
                    inbox.set_has_namespaces();
                }
                changed = node.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.facts.set_eligibility(self.caches.eligibility());
                }
            }
        }
    }

    fn take(&mut self, report: Report) {
        let now = Clock::system().now();
        match report {
            Report::Committed {
                took,
                triggers,
                health_checks,
            } => {
                self.failures.clear(&"commit");
                self.facts.committed(now);
                self.facts.metrics.committed(took, &triggers, now);
                for unopened in self.ports.set(health_checks, &self.facts) {
                    self.warn_of_port(&unopened);
                }
            }
            Report::Failed(why) => {
                self.facts.metrics.failed();
                if let Some(unlogged) = self.failures.record("commit", &why, now) {
                    tracing::warn!(
                        why,
                        unlogged,
                        "changing the rules of services failed; retrying"
                    );
                }
            }
            Report::FlowsLeft(why) => {
                if let Some(unlogged) = self.failures.record("flows", &why, now) {
                    tracing::warn!(
                        why,
                        unlogged,
                        "deleting outdated flows of UDP from connection tracking failed, so clients may send to removed endpoints; retrying"
                    );
                }
            }
            Report::Repaired(what) => {
                self.facts.metrics.repaired();
                tracing::warn!(
                    what,
                    "another program has changed the rules of services; repaired"
                );
                let message = format!(
                    "Another program has changed the rules of services in the table {}; repaired: {what}",
                    self.config.table
                );
                self.events.warn(Emitted {
                    about: About::Node(self.config.node_name.clone()),
                    reason: "ServiceRulesRepaired",
                    message,
                    at: now,
                });
            }
        }
    }

    fn warn_of_port(&mut self, unopened: &pages::Unopened) {
        let now = Clock::system().now();
        let pages::Unopened { check, why } = unopened;
        let (namespace, name, port) = (&check.namespace, &check.name, check.port);
        let node = &self.config.node_name;
        if self
            .failures
            .record("port", &format!("{namespace}/{name}"), now)
            .is_none()
        {
            return;
        }
        tracing::warn!(
            namespace,
            name,
            port,
            why,
            "opening a health check port failed; retrying with the next change"
        );
        let message = format!(
            "node {node} failed to start healthcheck \"{namespace}/{name}\" on port {port}: {why}"
        );
        self.events.warn(Emitted {
            about: About::Service(namespace.clone(), name.clone()),
            reason: "FailedToStartServiceHealthcheck",
            message,
            at: now,
        });
    }
}
