//! Builds an [`Agent`] from its configuration, connected to the real runtime, apiserver and kernel.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::NodeAddress;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::Agent;
use super::Events;
use super::Images;
use super::Network;
use super::OwnNode;
use super::Parts;
use super::control_plane::{Connections, ControlPlane};
use super::metrics::VolumeOperation;
use super::node::{credentials, firewall, network};
use holdfast_config::Config;
use holdfast_core::node::addresses::{Sources, addresses};
use holdfast_core::node::cgroup_tree::Group;
use holdfast_core::pod::cgroup::Driver;
use holdfast_cri::{CriClient, Runtime};
use holdfast_host::cgroups::Cgroups;
use holdfast_host::linux::LinuxHost;
use holdfast_host::users;
use holdfast_sealed as sealed;
use holdfast_sys::clock::Clock;
use holdfast_sys::file;
use holdfast_sys::logind::Logind;
use holdfast_sys::machine::Machine;
use holdfast_sys::mount::{self, Sharing};
use holdfast_sys::netns;

/// Creates a client of the configured container runtime. Sends no request.
pub(super) fn runtime(
    config: &Config,
    report: Option<holdfast_cri::Report>,
) -> Result<CriClient, String> {
    let client = CriClient::new(
        &config.runtime_endpoint,
        config.runtime_timeout,
        report.clone(),
    )?;
    match &config.image_endpoint {
        Some(endpoint) => client.with_images_at(endpoint, report),
        None => Ok(client),
    }
}

/// Retries until the runtime answers, then returns the cgroup driver that the runtime reports. A runtime that does not
/// report its driver leaves the choice to the configuration (KEP-4033); a metric then announces that Kubernetes will stop
/// supporting the runtime.
async fn driver(runtime: &dyn Runtime, config: &Config, metrics: &super::Metrics) -> Driver {
    let mut is_logged = false;
    loop {
        match runtime.systemd_cgroups().await {
            Ok(answer) => {
                if answer.is_none() {
                    metrics.runtime_is_outdated();
                }
                return if answer.unwrap_or(config.systemd_cgroups) {
                    Driver::Systemd
                } else {
                    Driver::Cgroupfs
                };
            }
            Err(error) => {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::error!(%error, endpoint = config.runtime_endpoint, "the container runtime does not answer; is it running? retrying");
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// Creates the directories that other programs expect to exist: CSI drivers mount `plugins` and `plugins_registry`.
fn create_directories(config: &Config) -> anyhow::Result<()> {
    for dir in [
        config.root_dir.clone(),
        config.root_dir.join("pods"),
        config.pod_logs_dir.clone(),
    ] {
        let mut builder = std::fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o750).create(&dir);
        made.with_context(|| format!("cannot create the directory {}", dir.display()))?;
    }
    for name in ["plugins", "plugins_registry"] {
        let dir = config.root_dir.join(name);
        let made = file::make_for_plugins(&dir);
        made.with_context(|| format!("cannot create the directory {}", dir.display()))?;
    }
    Ok(())
}

/// The names and addresses for the Node object, as far as the agent determines them without a cloud provider.
fn initial_addresses(config: &Config, ips: &[String]) -> Vec<NodeAddress> {
    let own = addresses(Sources {
        name: &config.node_name,
        ips,
        given: config.has_node_ip,
        external: config.external_cloud,
        reported: &[],
    });
    own.unwrap_or_default()
}

/// Makes volume mounts propagate to containers that use `mountPropagation`, as the kubelet does. Runs after the checks
/// that can fail, so that a failed start leaves no mount.
fn share_mounts(config: &Config) {
    let (root, without) = (
        config.root_dir.display(),
        "containers that use mountPropagation Bidirectional below it do not start",
    );
    match mount::share(&config.root_dir) {
        Ok(Sharing::Shared) => {}
        Ok(Sharing::Occupied) => tracing::warn!(
            "mounts below {root} are not visible in other mount namespaces, and {without}: volumes of an earlier agent are mounted there; drain the node and restart the agent"
        ),
        Err(error) => tracing::warn!(
            %error,
            "mounts below {root} cannot propagate to other mount namespaces, and {without}; run `mount --make-rshared` on the mount point of its filesystem"
        ),
    }
}

/// Shares the mounts of volumes and of network namespaces with other mount namespaces.
async fn share_mounts_and_namespaces(config: &Config, runtime: &dyn Runtime) {
    share_mounts(config);
    share_namespaces(runtime).await;
}

/// Limit for listing the runtime's sandboxes.
const SANDBOXES_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes the directory of network namespaces a shared mount, as `ip netns add` does. Only while the node has no
/// sandbox: the new mount would hide the namespaces of running pods, and the runtime could no longer stop them.
async fn share_namespaces(runtime: &dyn Runtime) {
    let listed = tokio::time::timeout(SANDBOXES_TIMEOUT, runtime.attachments()).await;
    if !matches!(listed, Ok(Ok(found)) if found.sandboxes.is_empty()) {
        return;
    }
    match netns::share(Path::new(netns::DIR)) {
        Ok(Sharing::Shared) => {}
        Ok(Sharing::Occupied) => {
            tracing::debug!("{} already contains network namespaces", netns::DIR)
        }
        Err(error) => tracing::warn!(
            %error,
            "cannot make {} a shared mount: the first `ip netns add` will hide the namespaces of running pods",
            netns::DIR
        ),
    }
}

/// Returns the cgroup layout for the driver. Fails if a cgroup of `systemReserved`
/// or `kubeReserved` enforcement does not exist.
fn cgroups(config: &Config, driver: Driver) -> anyhow::Result<Cgroups> {
    let cgroups = Cgroups::new(&config.cgroup_root, driver);
    let cgroups = match config.enforcement.flat {
        true => cgroups.without_pods(),
        false => cgroups,
    };
    for reserved in config.enforcement.reserved() {
        let name = &reserved.cgroup;
        if !cgroups.has(&Group::Reserved(name.clone())) {
            anyhow::bail!(
                "the cgroup {name:?} does not exist, but enforceNodeAllocatable requires it: create it before the agent starts, or correct systemReservedCgroup and kubeReservedCgroup"
            );
        }
    }
    Ok(cgroups)
}

/// Creates the metrics, with the series that must exist with a value of 0.
fn metrics() -> Arc<super::Metrics> {
    let metrics = super::Metrics::default();
    metrics.pods_orphaned(0);
    metrics.pods_restarted(false, 0);
    metrics.pods_restarted(true, 0);
    Arc::new(metrics)
}

/// Creates the host side of pods for the configured directories and cgroup driver.
fn host(
    config: &Config,
    driver: Driver,
    metrics: &Arc<super::Metrics>,
) -> anyhow::Result<LinuxHost> {
    let mut host = LinuxHost::new(
        &config.root_dir,
        config.pod_logs_dir.clone(),
        cgroups(config, driver)?,
        config.pod_pids,
        config.cpu_period,
    );
    host.users = users::pool(config.ids_per_pod, config.max_pods)?;
    host.reserves_memory = config.enforcement.memory.is_some_and(|m| m.reserves);
    let counted = Arc::clone(metrics);
    host.on_ownership_change = Some(Arc::new(move |plugin, took, has_failed| {
        counted.volume(VolumeOperation {
            name: "volume_apply_access_control",
            plugin,
            is_migrated: false,
            has_failed,
            took,
        });
    }));
    Ok(host)
}

/// Logs configuration fields that were read but have no effect.
fn warn_unread_fields(config: &Config) {
    for what in &config.unread {
        tracing::warn!(
            what,
            "strict decoding of the configuration would reject this"
        );
    }
    for field in &config.not_honoured {
        tracing::warn!(
            field,
            "this field of the configuration is read but not honoured by this version"
        );
    }
}

/// Builds the agent. Waits for the runtime; errors are those of configuration, credentials and this machine.
pub async fn build(config: Config) -> anyhow::Result<Agent> {
    super::node::machine::prepare(&config)?;
    warn_unread_fields(&config);
    create_directories(&config)?;
    let managers = super::node::managers::start(&config)?;
    let metrics = metrics();
    let counted = Arc::clone(&metrics);
    let report: holdfast_cri::Report =
        Arc::new(move |operation, refused, took| counted.runtime(operation, refused, took));
    let runtime: Arc<dyn Runtime> =
        Arc::new(runtime(&config, Some(report)).map_err(anyhow::Error::msg)?);
    let clock = Clock::system();
    let is_due = credentials::prepare(&config, clock).await?;
    let keeper = match &config.kubeconfig {
        Some(_) => {
            let credentials = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
            let dir = config.root_dir.join("sealed");
            sealed::start(&dir, credentials.as_deref(), config.offline_start, clock)?
        }
        None => None,
    };
    let connections = match &config.kubeconfig {
        Some(path) => Some(Connections::open(&config, path, &metrics, keeper.as_ref()).await?),
        None => None,
    };
    let reviews = connections.as_ref().map(|all| Arc::clone(&all.reviews));
    // Started before the wait for the runtime, so that the certificate cannot expire meanwhile.
    let rotated = connections.as_ref().filter(|_| config.rotate_certificates);
    let renewal = rotated.map(|Connections { client, .. }| {
        let kept = credentials::Renewed::client(&config, is_due);
        let keep = credentials::renew_when_due(kept, client.clone(), clock, Arc::clone(&metrics));
        AbortOnDropHandle::new(tokio::spawn(keep))
    });
    let node_ips = watch::channel(network::first_addresses(&config).await).0;
    let node_addresses = watch::channel(initial_addresses(&config, &node_ips.borrow())).0;
    if config.serving.asks_for_certificate
        && let Some(Connections { client, .. }) = &connections
    {
        let kept = credentials::Renewed::serving(&config, node_addresses.subscribe());
        let (client, metrics) = (client.clone(), Arc::clone(&metrics));
        tokio::spawn(credentials::renew_when_due(kept, client, clock, metrics));
    }
    let driver = driver(&*runtime, &config, &metrics).await;
    share_mounts_and_namespaces(&config, &*runtime).await;
    let host = host(&config, driver, &metrics)?;
    let machine = Machine::read(&config.root_dir);
    let resolver = network::resolver(&config, &node_ips.borrow());
    let ControlPlane { api, pods, nodes } = match connections {
        Some(connections) => ControlPlane::new(connections, &config.node_name, keeper.as_ref()),
        None => ControlPlane::none(),
    };
    let (ledger, requests) = super::node::ledger::channel(managers);
    let (network, network_state) = watch::channel(Network::Unknown);
    let starts = super::Starts::for_processors(machine.cpus);
    let (pace, idle_gate) = (config.event_pace, starts.idle_gate());
    let events = Events::start(Arc::clone(&api), &config.node_name, clock, pace, idle_gate);
    if let Some(warning) = holdfast_core::pod::dns::check_host(&resolver) {
        events.node(
            &config.node_name,
            super::Kind::Warning,
            "CheckLimitsForResolvConf",
            warning,
        );
    }
    let images = Images::configured(&config)?;
    let claims = super::ClaimManager::new(&config.root_dir)?;
    let parts = Parts {
        runtime,
        api,
        host: Arc::new(host),
        clock,
        events,
        images: Arc::new(images),
        starts: Arc::new(starts),
        machine: Arc::new(machine),
        node_ips,
        node_addresses,
        resolver: watch::channel(Arc::new(resolver)).0,
        network: network_state,
        node: Arc::new(OwnNode::new(&config, nodes)),
        ledger,
        metrics,
        dialer: Arc::new(holdfast_probes::Network),
        journals: Arc::default(),
        csi: Arc::new(super::Csi::new(&config.root_dir)),
        disks: Arc::new(super::AttachedDisks::new(&config.root_dir)),
        devices: Arc::new(super::DeviceManager::new(
            &config.device_plugin_dir,
            clock.now(),
        )),
        claims: Arc::new(claims),
        started: clock.now(),
        config: Arc::new(config),
    };
    tokio::spawn(network::run(Arc::new(parts.network())));
    if parts.config.iptables_chains {
        tokio::spawn(firewall::keep_chains());
    }
    Ok(Agent {
        statics: super::pod::sources::start(parts.sources()),
        ledger: requests,
        parts,
        reviews,
        serves: true,
        pods,
        keeper,
        network,
        kernel_log: Some(holdfast_sys::kmsg::DEVICE.into()),
        announcer: Some(Arc::new(Logind::system())),
        renewal,
    })
}
