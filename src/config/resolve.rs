//! Resolves files and flags to the one value that the agent uses.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::allocatable::{own_cgroups, reserved};
use super::containers::{
    cgroup_driver, ids_per_pod, limited_swap, logs, max_back_off, quota_period, unsafe_sysctls,
};
use super::document::{Document, NOT_HONOURED, WITHOUT_EFFECT};
use super::eviction::eviction;
use super::fields::is_default;
use super::images::{credential_providers, image_rules, parallel_pulls, pull_quota, verification};
use super::values::{absolute, at_least_zero, invalid, pace, time, url};
use super::{Config, ConfigError, Overrides};
use super::{effective, logging, managers, serving, shutdown};
use holdfast_core::node::addresses;
use holdfast_core::node::collection::ContainerRules;
use holdfast_core::node::features::{self, SettingProblem};
use holdfast_core::node::offline::OfflineStart;
use holdfast_core::time::duration;

/// Returns the feature gates that were set without effect, with the reason; fails for one that cannot be set to its
/// value.
fn gates(set: Option<&BTreeMap<String, bool>>) -> Result<Vec<String>, ConfigError> {
    let mut ignored = vec![];
    for (name, value) in set.into_iter().flatten() {
        match features::check_setting(name, *value) {
            Some(SettingProblem::Refused(remedy)) => {
                return Err(invalid(&format!("featureGates.{name}"), value, &remedy));
            }
            Some(SettingProblem::Ignored(why)) => ignored.push(why),
            None => {}
        }
    }
    Ok(ignored)
}

/// Returns the top-level fields that were set and are not honoured.
fn not_honoured(document: &Document) -> Result<Vec<String>, ConfigError> {
    let mut unused = vec![];
    for (name, value) in &document.rest {
        if WITHOUT_EFFECT.iter().any(|(field, _)| field == name) {
            continue;
        }
        if !NOT_HONOURED.contains(&name.as_str()) {
            let remedy = "KubeletConfiguration v1beta1 has no such field; check its spelling";
            return Err(invalid(name, value, remedy));
        }
        if !is_default(name, value) {
            unused.push(name.clone());
        }
    }
    Ok(unused)
}

/// Returns the rate limit of events.
fn event_pace(document: &Document) -> Result<(f64, f64), ConfigError> {
    pace(
        ("eventRecordQPS", document.event_record_qps, 50),
        ("eventBurst", document.event_burst, 100),
    )
}

/// Returns the rate limit of requests to the apiserver; 0 means the default, as in the kubelet.
fn api_pace(document: &Document) -> Result<(f64, f64), ConfigError> {
    pace(
        ("kubeAPIQPS", document.kube_api_qps.filter(|q| *q != 0), 50),
        (
            "kubeAPIBurst",
            document.kube_api_burst.filter(|b| *b != 0),
            100,
        ),
    )
}

fn node_name(flags: &Overrides, hostname: &str) -> Result<String, ConfigError> {
    let given = flags.hostname.as_deref().unwrap_or(hostname);
    let name = given.trim().to_lowercase();
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    if name.is_empty() || name.len() > 253 || !name.chars().all(is_allowed) {
        let remedy = "use only lower-case letters, digits, '-' and '.'";
        return Err(invalid("--hostname-override", &name, remedy));
    }
    Ok(name)
}

/// Parses the addresses of `--node-ip`, and whether IPv6 is preferred. An unspecified address names only a family.
fn node_ips(flags: &Overrides) -> Result<(Vec<IpAddr>, bool), ConfigError> {
    let field = "--node-ip";
    let remedy = "use one IP address, or two of different families separated by a comma";
    let parse = |text: &str| {
        let ip: IpAddr = text
            .trim()
            .parse()
            .map_err(|_| invalid(field, text, remedy))?;
        match addresses::invalid_reason(ip) {
            Some(why) => Err(invalid(field, text, why)),
            None => Ok(ip),
        }
    };
    let texts = flags.node_ip.iter().flat_map(|t| t.split(','));
    let ips: Vec<IpAddr> = texts
        .filter(|t| !t.is_empty())
        .map(parse)
        .collect::<Result<_, _>>()?;
    if !addresses::is_one_or_dual_stack(&ips) {
        return Err(invalid(
            field,
            flags.node_ip.as_deref().unwrap_or_default(),
            remedy,
        ));
    }
    let prefers_ipv6 = ips.first().is_some_and(IpAddr::is_ipv6);
    let given = ips.into_iter().filter(|ip| !ip.is_unspecified());
    Ok((given.collect(), prefers_ipv6))
}

fn external_cloud(flags: &Overrides) -> Result<bool, ConfigError> {
    match flags.cloud_provider.as_deref() {
        None | Some("") => Ok(false),
        Some("external") => Ok(true),
        Some(other) => {
            let remedy = "use external: built-in cloud providers no longer exist";
            Err(invalid("--cloud-provider", other, remedy))
        }
    }
}

fn offline_start(flags: &Overrides) -> Result<OfflineStart, ConfigError> {
    match flags.offline_start.as_deref() {
        None => Ok(OfflineStart::default()),
        Some(text) => text
            .parse()
            .map_err(|remedy| invalid("--offline-start", text, remedy)),
    }
}

fn node_labels(flags: &Overrides) -> Result<BTreeMap<String, String>, ConfigError> {
    let pairs = flags.node_labels.iter().flat_map(|t| t.split(','));
    let parse = |pair: &str| match pair.split_once('=') {
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => {
            let remedy = "use key=value pairs separated by commas";
            Err(invalid("--node-labels", pair, remedy))
        }
    };
    pairs.filter(|p| !p.is_empty()).map(parse).collect()
}

/// Resolves the kubelet's flags for exited containers, which have no field.
fn dead_containers(flags: &Overrides) -> Result<ContainerRules, ConfigError> {
    let default = ContainerRules::default();
    let minimum_age = match flags.minimum_container_ttl_duration.as_deref() {
        None | Some("") => default.minimum_age,
        Some(text) => {
            let field = "--minimum-container-ttl-duration";
            let wrong = || invalid(field, text, "use a duration such as 1m30s");
            let age = duration(text).ok_or_else(wrong)?;
            age.try_into().map_err(|_| wrong())?
        }
    };
    let each = flags.maximum_dead_containers_per_container;
    Ok(ContainerRules {
        each: each.unwrap_or(default.each),
        all: flags.maximum_dead_containers.unwrap_or(default.all),
        minimum_age,
    })
}

fn max_pods(document: &Document, flags: &Overrides) -> Result<i64, ConfigError> {
    match flags.max_pods.or(document.max_pods).unwrap_or(110) {
        most if most < 0 => Err(invalid("maxPods", most, "use 0 or more")),
        most => Ok(most),
    }
}

fn lease_seconds(document: &Document) -> Result<i32, ConfigError> {
    match document.node_lease_duration_seconds.unwrap_or(40) {
        seconds if seconds <= 0 => Err(invalid(
            "nodeLeaseDurationSeconds",
            seconds,
            "use more than 0",
        )),
        seconds => Ok(seconds),
    }
}

fn node_status_update(document: &Document) -> Result<Duration, ConfigError> {
    let text = document.node_status_update_frequency.as_ref();
    time("nodeStatusUpdateFrequency", text, 10)
}

/// Returns how often an unchanged status is reported: if only `nodeStatusUpdateFrequency` is set, as often as it is
/// computed.
fn node_status_report(document: &Document) -> Result<Duration, ConfigError> {
    let field = "nodeStatusReportFrequency";
    let update = document.node_status_update_frequency.as_ref();
    match (&document.node_status_report_frequency, update) {
        (None, Some(_)) => time(field, update, 10),
        (report, _) => time(field, report.as_ref(), 300),
    }
}

fn oom_score_adj(document: &Document) -> Result<i32, ConfigError> {
    match document.oom_score_adj.unwrap_or(-999) {
        score if (-1000..=1000).contains(&score) => Ok(score),
        score => Err(invalid("oomScoreAdj", score, "use -1000 to 1000")),
    }
}

fn max_open_files(document: &Document) -> Result<u64, ConfigError> {
    let most = document
        .max_open_files
        .filter(|n| *n != 0)
        .unwrap_or(1_000_000);
    u64::try_from(most).map_err(|_| invalid("maxOpenFiles", most, "use 0 or more"))
}

fn bootstrap_kubeconfig(flags: &Overrides) -> Result<Option<PathBuf>, ConfigError> {
    match (&flags.bootstrap_kubeconfig, &flags.kubeconfig) {
        (Some(_), None) => {
            let remedy = "also set it: the agent writes the node's own credentials there";
            Err(invalid("--kubeconfig", "", remedy))
        }
        (path, _) => Ok(path.clone()),
    }
}

fn pod_logs_dir(document: &Document) -> Result<PathBuf, ConfigError> {
    let given = document.pod_logs_dir.as_deref();
    absolute("podLogsDir", given.unwrap_or("/var/log/pods").into())
}

fn headers(map: Option<BTreeMap<String, Vec<String>>>) -> Vec<(String, String)> {
    let one = |(name, values): (String, Vec<String>)| {
        values.into_iter().map(move |value| (name.clone(), value))
    };
    map.into_iter().flatten().flat_map(one).collect()
}

fn cluster_dns(document: &mut Document, flags: &Overrides) -> Vec<String> {
    let given = flags.cluster_dns.as_ref();
    let given = given.map(|t| t.split(',').map(Into::into).collect());
    given.or(document.cluster_dns.take()).unwrap_or_default()
}

fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|t| !t.is_empty())
}

/// Returns the root directory, and the directory of certificates.
fn directories(flags: &Overrides) -> (PathBuf, PathBuf) {
    let root = flags.root_dir.clone();
    let root = root.unwrap_or_else(|| "/var/lib/kubelet".into());
    let certificates = flags.cert_dir.clone();
    let certificates = certificates.unwrap_or_else(|| root.join("pki"));
    (root, certificates)
}

/// The kubelet's directory. Device plugins have this path built in and register there, whatever the root directory is.
const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins";

fn device_plugin_dir(flags: &Overrides) -> Result<PathBuf, ConfigError> {
    let given = flags.device_plugin_dir.clone();
    absolute(
        "--device-plugin-dir",
        given.unwrap_or_else(|| DEVICE_PLUGINS.into()),
    )
}

/// Resolves the merged file; flags override it. `hostname` is the machine's own name.
pub(super) fn resolve(
    mut d: Document,
    flags: &Overrides,
    hostname: &str,
) -> Result<Config, ConfigError> {
    let mut unused = not_honoured(&d)?;
    let (logging, ignored) = logging::resolve(&d.logging, flags.verbosity)?;
    let (serving, unspoken) = serving::resolve(&d.serving, d.kind.is_some())?;
    let (eviction, enforcement, inert) = eviction(&mut d)?;
    unused.extend(ignored.into_iter().chain(unspoken).chain(inert));
    unused.extend(gates(d.feature_gates.as_ref())?);
    let (node_ips, prefers_ipv6) = node_ips(flags)?;
    let every = |field, text: &Option<String>, default| time(field, text.as_ref(), default);
    let (root_dir, cert_dir) = directories(flags);
    let endpoint = flags.runtime_endpoint.clone();
    let endpoint = non_empty(endpoint.or(d.container_runtime_endpoint.take()));
    let static_pod_path = non_empty(d.static_pod_path.take()).map(Into::into);
    let resolv_conf = d.resolv_conf.take();
    let cgroup_root = flags.cgroup_root.clone().or(d.cgroup_root.take());
    let domain = flags.cluster_domain.clone().or(d.cluster_domain.take());
    Ok(Config {
        node_name: node_name(flags, hostname)?,
        node_ips,
        prefers_ipv6,
        has_node_ip: flags.node_ip.iter().any(|ips| !ips.is_empty()),
        external_cloud: external_cloud(flags)?,
        kubeconfig: flags.kubeconfig.clone(),
        bootstrap_kubeconfig: bootstrap_kubeconfig(flags)?,
        rotate_certificates: d.rotate_certificates.unwrap_or(false),
        cert_dir,
        feature_gates: d.feature_gates.clone().unwrap_or_default(),
        device_plugin_dir: device_plugin_dir(flags)?,
        pod_network_template: flags.pod_network_template.clone(),
        root_dir: absolute("--root-dir", root_dir)?,
        node_labels: node_labels(flags)?,
        register_node: flags.register_node.or(d.register_node).unwrap_or(true),
        register_with_taints: d.register_with_taints.take().unwrap_or_default(),
        provider_id: non_empty(d.provider_id.take()),
        runtime_endpoint: endpoint
            .unwrap_or_else(|| "unix:///run/containerd/containerd.sock".into()),
        image_endpoint: non_empty(d.image_service_endpoint.take()),
        runtime_timeout: every("runtimeRequestTimeout", &d.runtime_request_timeout, 120)?,
        static_pod_path: flags.static_pod_path.clone().or(static_pod_path),
        static_pod_url: url("staticPodURL", non_empty(d.static_pod_url.take()))?,
        static_pod_url_header: headers(d.static_pod_url_header.take()),
        http_check: every("httpCheckFrequency", &d.http_check_frequency, 20)?,
        file_check: every("fileCheckFrequency", &d.file_check_frequency, 20)?,
        pod_logs_dir: pod_logs_dir(&d)?,
        sync_frequency: every("syncFrequency", &d.sync_frequency, 60)?,
        cluster_dns: cluster_dns(&mut d, flags),
        cluster_domain: domain.unwrap_or_default(),
        resolv_conf: resolv_conf.unwrap_or_else(|| "/etc/resolv.conf".into()),
        node_status_update: node_status_update(&d)?,
        node_status_report: node_status_report(&d)?,
        lease_seconds: lease_seconds(&d)?,
        max_images: d.node_status_max_images.unwrap_or(50),
        own_cgroups: own_cgroups(&d, cgroup_root.as_deref())?,
        cgroup_root: non_empty(cgroup_root).unwrap_or_else(|| "/".into()),
        systemd_cgroups: cgroup_driver(d.cgroup_driver.as_deref())?,
        max_pods: max_pods(&d, flags)?,
        pods_per_core: at_least_zero("podsPerCore", d.pods_per_core, 0)?.into(),
        pod_cidr: non_empty(d.pod_cidr.take()),
        ephemeral_storage: d.local_storage_capacity_isolation.unwrap_or(true),
        oom_score_adj: oom_score_adj(&d)?,
        max_open_files: max_open_files(&d)?,
        refuses_swap: d.fail_swap_on.unwrap_or(true),
        refuses_cgroup_v1: d.fail_cgroup_v1.unwrap_or(false),
        protects_kernel: d.protect_kernel_defaults.unwrap_or(false),
        pod_pids: d.pod_pids_limit.filter(|p| *p > 0),
        parallel_pulls: parallel_pulls(d.serialize_image_pulls, d.max_parallel_image_pulls)?,
        managers: managers::resolve(&d, &reserved(&d)?)?,
        reserved: reserved(&d)?,
        enforcement,
        seccomp_default: d.seccomp_default.unwrap_or(false),
        limited_swap: limited_swap(d.memory_swap.take())?,
        ids_per_pod: ids_per_pod(d.user_namespaces.take())?,
        image_rules: image_rules(&d)?,
        dead_containers: dead_containers(flags)?,
        eviction,
        shutdown: shutdown::periods(&d)?,
        max_backoff: max_back_off(d.crash_loop_back_off.take())?,
        pull_quota: pull_quota(&d)?,
        pull_verification: verification(&mut d)?,
        credential_providers: credential_providers(flags)?,
        credential_programs: flags.credential_programs.clone(),
        offline_start: offline_start(flags)?,
        cpu_period: quota_period(d.cpu_cfs_quota, d.cpu_cfs_quota_period.as_ref())?,
        single_process_oom_kill: d.single_process_oom_kill.unwrap_or(false),
        unsafe_sysctls: unsafe_sysctls(d.allowed_unsafe_sysctls.take().unwrap_or_default())?,
        logs: logs(&d)?,
        event_pace: event_pace(&d)?,
        iptables_chains: d.make_iptables_util_chains.unwrap_or(true),
        api_pace: api_pace(&d)?,
        effective: effective::of(&d.raw),
        serving,
        logging,
        not_honoured: unused,
        unread: vec![],
    })
}
