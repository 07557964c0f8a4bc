//! `holdfast doctor`: collects the facts about machine, runtime and apiserver
//! that [`diagnose`] evaluates. Changes nothing.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::http;
use k8s_openapi::api::core::v1::Node;
use tokio::time::{Instant, timeout};

use super::node::credentials::Pair;
use super::node::{REGISTER_AGAIN_AFTER, credentials, machine, network};
use holdfast_config::Config;
use holdfast_core::node::conditions;
use holdfast_core::node::doctor::{
    ApiFacts, Certificate, Details, Disk, Facts, Finding, NetworkFacts, PodNetwork, Port,
    RuntimeFacts, diagnose, errors, parse_network,
};
use holdfast_core::node::signing;
use holdfast_cri::{CriClient, Runtime as _};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::connect_as;
use holdfast_kubeapi::failure::chain;
use holdfast_kubeapi::pace::Pace;
use holdfast_sys::clock::Clock;
use holdfast_sys::machine::{self as own, Room};
use holdfast_sys::{cgroup, file, netns, ports};

/// Timeout for an answer of the runtime or the apiserver.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Size limit for certificate and network configuration files, in bytes.
const MAX_FILE_SIZE: u64 = 1 << 20;

/// Runs all checks and returns the findings.
pub async fn run(config: &Config, clock: Clock) -> Vec<Finding> {
    let api = api(config, clock).await;
    diagnose(&Facts {
        configuration: ignored_fields(config),
        api,
        ports: listening(config)
            .into_iter()
            .map(|(field, address)| Port {
                field,
                address,
                holder: ports::holder(address),
            })
            .collect(),
        ..local(config, clock).await
    })
}

/// Runs the cheap local checks during startup, and logs each error that keeps pods from running. Covers only problems
/// that the agent does not report otherwise. Runs in the background; the start does not wait.
pub fn log_errors_at_startup(config: &Config) {
    let config = config.clone();
    tokio::spawn(async move {
        let findings = diagnose(&local(&config, Clock::system()).await);
        for finding in errors(&findings) {
            tracing::error!(
                subject = finding.subject,
                leads_to = finding.leads_to,
                remedy = finding.remedy,
                "doctor: {}",
                finding.found
            );
        }
    });
}

/// Collects facts about the machine and the runtime. Leaves out the
/// apiserver, and the ports, which the agent itself uses.
async fn local(config: &Config, clock: Clock) -> Facts {
    let report = runtime(config).await;
    let images = report
        .as_ref()
        .ok()
        .and_then(|report| report.images.clone());
    let network = report
        .as_ref()
        .ok()
        .and_then(|report| pod_network(&report.details));
    let runtime = report.map(|report| report.facts);
    let node_ips = network::addresses(config).await.unwrap_or_default();
    let resolver = network::try_resolver(config, &node_ips).map_err(|e| e.to_string());
    Facts {
        now: clock.now(),
        refusals: machine::refusals(config),
        configuration: vec![],
        kernel: own::kernel(),
        overlay: own::has_filesystem("overlay"),
        forwards: own::sysctl("net/ipv4/ip_forward") == "1",
        uplinks: own::uplinks(),
        bridge_filters: bridge_filters(),
        cgroup_v2: cgroup::is_v2(),
        controllers: cgroup::controllers(),
        wants_systemd: config.systemd_cgroups,
        runtime: Some((config.runtime_endpoint.clone(), runtime)),
        network,
        hidden_namespaces: hidden_namespaces(),
        api: None,
        ports: vec![],
        certificates: certificates(config),
        disks: disks(config, images.as_ref()),
        // With an empty `resolvConf`, pods get no name servers of the node.
        resolver: (!config.resolv_conf.is_empty()).then(|| (config.resolv_conf.clone(), resolver)),
    }
}

fn ignored_fields(config: &Config) -> Vec<String> {
    let ignored = config.not_honoured.iter();
    ignored
        .map(|field| format!("{field} is read but not honoured by this version"))
        .chain(config.unread.iter().cloned())
        .collect()
}

/// Network namespaces that are hidden below another mount; empty if the mount table is not readable.
pub(super) fn hidden_namespaces() -> Vec<PathBuf> {
    let hidden = netns::hidden(Path::new(netns::DIR));
    hidden.unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot read which network namespaces are hidden");
        vec![]
    })
}

/// `None` if there is no bridge or `br_netfilter` is not loaded: bridged traffic then bypasses iptables on purpose.
fn bridge_filters() -> Option<bool> {
    match own::sysctl("net/bridge/bridge-nf-call-iptables").as_str() {
        "" => None,
        value => Some(value == "1"),
    }
}

/// Facts about the runtime.
struct RuntimeReport {
    facts: RuntimeFacts,
    details: Details,
    /// The directory of the runtime's images, if reported.
    images: Option<PathBuf>,
}

async fn runtime(config: &Config) -> Result<RuntimeReport, String> {
    let client = super::assembly::runtime(config, None)?;
    let begun = Instant::now();
    let late = |_| format!("no answer within {} s", ANSWER_TIMEOUT.as_secs());
    let answer = timeout(ANSWER_TIMEOUT, client.status())
        .await
        .map_err(late)?;
    let status = answer.map_err(|e| e.to_string())?;
    let took = begun.elapsed();
    let answer = timeout(ANSWER_TIMEOUT, client.systemd_cgroups())
        .await
        .map_err(late)?;
    // Optional facts: not every runtime reports them, and checks on missing facts are skipped.
    let optional_facts = timeout(ANSWER_TIMEOUT, optional_facts(&client)).await;
    let (details, sandbox_image, images) = optional_facts.unwrap_or_default();
    let facts = RuntimeFacts {
        version: status.version,
        not_ready: status.not_ready,
        network_not_ready: status.network_not_ready,
        systemd_cgroups: answer.map_err(|e| e.to_string())?,
        handler_systemd: details.systemd,
        sandbox_image,
        took,
    };
    Ok(RuntimeReport {
        facts,
        details,
        images,
    })
}

/// The runtime's configuration, its sandbox image with whether the image is present, and the directory of its images.
async fn optional_facts(client: &CriClient) -> (Details, Option<(String, bool)>, Option<PathBuf>) {
    let details = Details::of(&client.configuration().await.unwrap_or_default());
    let mut sandbox_image = None;
    if let Some(name) = &details.sandbox_image
        && let Ok(image) = client.image(name).await
    {
        sandbox_image = Some((name.clone(), image.is_some()));
    }
    let images = client.image_filesystem().await.ok();
    let images = images.map(|images| images.mountpoint);
    (details, sandbox_image, images)
}

/// The CNI configuration and plugins on this machine; `None` if the runtime does not report its CNI directories.
fn pod_network(details: &Details) -> Option<NetworkFacts> {
    let conf_dir = details.conf_dir.clone()?;
    let is_configuration = |path: &PathBuf| {
        let extension = path.extension().and_then(|e| e.to_str());
        matches!(extension, Some("conf" | "conflist" | "json"))
    };
    let entries = std::fs::read_dir(&conf_dir).into_iter().flatten();
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let first = files.filter(is_configuration).min();
    let has = |kind: &String| details.bin_dirs.iter().any(|dir| dir.join(kind).exists());
    let first = first.map(|file| {
        let text = file::read_text(&file, MAX_FILE_SIZE).map_err(|e| e.to_string());
        let content = text.and_then(|text| parse_network(&text));
        let content = content.map(|(name, kinds)| {
            let known = kinds.into_iter().map(|kind| {
                let is_there = has(&kind);
                (kind, is_there)
            });
            (name, known.collect())
        });
        PodNetwork { file, content }
    });
    Some(NetworkFacts {
        conf_dir,
        bin_dirs: details.bin_dirs.clone(),
        first,
    })
}

async fn api(config: &Config, clock: Clock) -> Option<Result<ApiFacts, String>> {
    let path = config.kubeconfig.as_deref()?;
    let bootstraps = config.bootstrap_kubeconfig.as_deref();
    // A node that has not joined yet requests its certificate with the bootstrap kubeconfig.
    let (path, own) = match bootstraps.filter(|_| !path.exists()) {
        Some(bootstraps) => (bootstraps, None),
        None => (path, credentials::own_pair(config)),
    };
    let answer = timeout(ANSWER_TIMEOUT, ask_api(path, own, &config.node_name, clock)).await;
    let answer =
        answer.unwrap_or_else(|_| Err(format!("nothing within {} s", ANSWER_TIMEOUT.as_secs())));
    Some(answer.map(|facts| ApiFacts {
        registers_after: config.register_node.then_some(REGISTER_AGAIN_AFTER),
        ..facts
    }))
}

async fn ask_api(
    kubeconfig: &Path,
    own: Option<PathBuf>,
    node: &str,
    clock: Clock,
) -> Result<ApiFacts, String> {
    let client = connect_as(kubeconfig, own, None, Pace::default()).await;
    let client = client.map_err(|e| e.to_string())?;
    let request = http::Request::get("/version").body(kube::client::Body::empty());
    let begun = Instant::now();
    let sent = client.send(request.map_err(|e| e.to_string())?).await;
    let answer = sent.map_err(|e| chain(&e))?;
    let took = begun.elapsed();
    let date = answer.headers().get(http::header::DATE);
    let theirs = date
        .and_then(|date| jiff::fmt::rfc2822::parse(date.to_str().ok()?).ok())
        .map(|zoned| zoned.timestamp());
    let clock = theirs.map(|theirs| theirs.duration_since(clock.now()));
    let found = Api::<Node>::all(client).get_opt(node).await;
    let found = found.map_err(|e| format!("cannot read the Node object: {}", chain(&e)))?;
    Ok(ApiFacts {
        took,
        clock,
        node_ready: found.map(|node| node.status.is_some_and(|s| conditions::is_ready(&s))),
        registers_after: None,
    })
}

fn listening(config: &Config) -> Vec<(&'static str, SocketAddr)> {
    let serving = &config.serving;
    let main = serving.enabled.then_some(("port", serving.main));
    let others = [
        ("readOnlyPort", serving.read_only),
        ("healthzPort", serving.healthz),
    ];
    let others = others
        .into_iter()
        .filter_map(|(field, address)| Some((field, address?)));
    main.into_iter().chain(others).collect()
}

fn certificates(config: &Config) -> Vec<Certificate> {
    let serving = match &config.serving.certificate {
        Some((certificate, _)) => certificate.clone(),
        None => Pair::serving(&config.cert_dir).current(),
    };
    let files = [
        ("client", Pair::client(&config.cert_dir).current()),
        ("serving", serving),
    ];
    let read =
        |path: &PathBuf| signing::lifetime(file::read_text(path, MAX_FILE_SIZE).ok()?.as_bytes());
    files
        .into_iter()
        .filter_map(|(purpose, path)| {
            let lifetime = read(&path)?;
            Some(Certificate {
                purpose,
                path,
                lifetime,
            })
        })
        .collect()
}

fn disks(config: &Config, images: Option<&PathBuf>) -> Vec<Disk> {
    let places = [("pods", &config.root_dir), ("logs", &config.pod_logs_dir)];
    let places = places
        .into_iter()
        .chain(images.map(|images| ("images", images)));
    let mut disks: Vec<Disk> = vec![];
    let mut rooms = vec![];
    for (purpose, path) in places {
        // Before the first start the directories do not exist; the nearest existing parent is on the same filesystem.
        let there = path.ancestors().find(|dir| dir.exists());
        let Some(room) = there.and_then(|dir| Room::of(dir).ok()) else {
            continue;
        };
        // Each filesystem is reported once.
        if rooms.contains(&room) {
            continue;
        }
        rooms.push(room);
        disks.push(Disk {
            purpose,
            path: path.clone(),
            capacity: room.capacity,
            available: room.available,
            inodes: room.inodes,
            inodes_free: room.inodes_free,
        });
    }
    disks
}
