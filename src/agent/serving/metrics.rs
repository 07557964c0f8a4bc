//! `/metrics` and its subpaths: the kubelet's names, labels and units (`pkg/kubelet/metrics`).

use std::collections::BTreeMap;
use std::sync::Arc;

use hyper::Response;
use kube::ResourceExt as _;

use super::Refusal;
use super::figures::{self, ContainerFigures, PodFigures, Snapshot};
use super::{Server, page};
use crate::node::credentials::Pair;
use crate::node::ledger::LedgerHandle;
use crate::node::{ClaimManager, claim_metrics, manager_metrics};
use crate::pod::table::{Known, PodTable};
use crate::volume::figures::VolumeFigures;
use holdfast_core::node::features::FEATURES;
use holdfast_core::pod;
use holdfast_core::serving::cgroup_stats::{Depth, Usage};
use holdfast_core::serving::exposition::Page;
use holdfast_core::version;
use holdfast_https::Body;
use holdfast_sys::meter;

const NANO: f64 = 1e9;

/// Returns a subpath of `/metrics` by its name.
pub(super) async fn part(server: &Arc<Server>, name: &str) -> Result<Response<Body>, Refusal> {
    match name {
        "resource" => resource(server).await,
        "cadvisor" => super::cadvisor::cadvisor(server).await,
        "slis" => Ok(slis()),
        "probes" => Ok(probes(server)),
        _ => Ok(own(server).await),
    }
}

/// `/metrics/resource`, which autoscalers and `kubectl top` read.
async fn resource(server: &Arc<Server>) -> Result<Response<Body>, Refusal> {
    let mut out = Page::default();
    let snapshot = match figures::snapshot(server, Depth::Summary).await {
        Ok(snapshot) => snapshot,
        Err(error) => {
            tracing::debug!(%error, "cannot read the figures of containers");
            scrape_error(&mut out, 1.0);
            return Ok(page(out));
        }
    };
    let at = Some(snapshot.at.as_millisecond());
    type Get = fn(&Usage) -> f64;
    let families: [(&str, &str, &str, Get); 3] = [
        (
            "cpu_usage_seconds_total",
            "counter",
            "Cumulative cpu time consumed in core-seconds",
            |u| u.cpu as f64 / NANO,
        ),
        (
            "memory_working_set_bytes",
            "gauge",
            "Current working set in bytes",
            |u| u.working_set as f64,
        ),
        (
            "swap_usage_bytes",
            "gauge",
            "Current amount of swap used in bytes",
            |u| u.swap as f64,
        ),
    ];
    for (suffix, kind, help, get) in families {
        let name = format!("container_{suffix}");
        out.family(&name, kind, help);
        each_container(&snapshot, |_, c, labels| {
            _ = out.sample(&name, labels, get(&c.usage), at)
        });
        let name = format!("pod_{suffix}");
        out.family(&name, kind, help);
        for p in &snapshot.pods {
            let (pod, namespace) = (p.pod.name_any(), p.pod.namespace().unwrap_or_default());
            out.sample(
                &name,
                &[("namespace", &namespace), ("pod", &pod)],
                get(&p.usage),
                at,
            );
        }
    }
    settings_of_containers(&mut out, &snapshot);
    let machine = &snapshot.machine;
    for (name, kind, value) in [
        (
            "node_cpu_usage_seconds_total",
            "counter",
            machine.usage.cpu as f64 / NANO,
        ),
        (
            "node_memory_working_set_bytes",
            "gauge",
            machine.usage.working_set as f64,
        ),
        (
            "node_swap_usage_bytes",
            "gauge",
            machine.swap.0.saturating_sub(machine.swap.1) as f64,
        ),
    ] {
        out.family(name, kind, "Resources that the node uses")
            .sample(name, &[], value, at);
    }
    scrape_error(&mut out, 0.0);
    Ok(page(out))
}

/// Whether the measurement failed (1) or not (0). Its older name, `scrape_error`, is deprecated since 1.29 and hidden
/// (`pkg/kubelet/metrics/collectors/resource_metrics.go`); no other metric of the kubelet is deprecated in 1.36.
fn scrape_error(out: &mut Page, value: f64) {
    let help = "1 if there was an error while getting container metrics, 0 otherwise";
    out.single("resource_scrape_error", "gauge", help, &[], value);
}

/// The swap limit and the start time of containers.
fn settings_of_containers(out: &mut Page, snapshot: &Snapshot) {
    let at = Some(snapshot.at.as_millisecond());
    let name = "container_swap_limit_bytes";
    out.family(
        name,
        "gauge",
        "Current amount of the container swap limit in bytes",
    );
    each_container(snapshot, |_, c, labels| {
        if let Some(limit) = c.usage.swap_limit {
            out.sample(name, labels, limit as f64, at);
        }
    });
    let name = "container_start_time_seconds";
    out.family(
        name,
        "gauge",
        "Start time of the container since unix epoch in seconds",
    );
    each_container(snapshot, |_, c, labels| {
        if let Some(began) = c.started {
            out.sample(name, labels, began.as_millisecond() as f64 / 1000.0, at);
        }
    });
}

/// Calls `each` for each container, with its labels.
fn each_container(
    snapshot: &Snapshot,
    mut each: impl FnMut(&PodFigures, &ContainerFigures, &[(&str, &str)]),
) {
    for p in &snapshot.pods {
        let (pod, namespace) = (p.pod.name_any(), p.pod.namespace().unwrap_or_default());
        for c in &p.containers {
            each(
                p,
                c,
                &[
                    ("container", &c.name),
                    ("namespace", &namespace),
                    ("pod", &pod),
                ],
            );
        }
    }
}

/// `/metrics/slis`.
fn slis() -> Response<Body> {
    let mut out = Page::default();
    out.single(
        "kubernetes_healthcheck",
        "gauge",
        "This metric records the result of a single healthcheck.",
        &[("name", "ping"), ("type", "healthz")],
        1.0,
    );
    page(out)
}

/// `/metrics/probes`.
fn probes(server: &Arc<Server>) -> Response<Body> {
    let mut out = Page::default();
    server.parts.metrics.write(true, &mut out);
    page(out)
}

/// The actors whose state only `/metrics` contains.
pub(crate) struct Parts {
    pub ledger: LedgerHandle,
    pub claims: Arc<ClaimManager>,
}

/// The volumes of pods, and the node's resource managers.
async fn write_managers(out: &mut Page, parts: &super::Parts) {
    let name = "volume_manager_total_volumes";
    out.family(name, "gauge", "Number of volumes in Volume Manager");
    for ((state, plugin), count) in parts.metrics.volumes() {
        let labels = [("plugin_name", plugin.as_str()), ("state", state)];
        out.sample(name, &labels, count as f64, None);
    }
    manager_metrics::write(&parts.managers.ledger.managers().await, out);
    let rules = &parts.config.enforcement;
    if rules.memory.is_some() {
        let table = parts.table.borrow();
        let pods = table.iter().map(|known| &*known.pod);
        let alive: Vec<_> = pods.filter(|pod| !pod::is_terminal(pod)).collect();
        manager_metrics::write_protected(rules, &alive, out);
    }
    parts
        .managers
        .claims
        .read(|claims| claim_metrics::write(claims, out));
    let (orphans, failed) = parts.metrics.orphaned();
    out.single(
        "kubelet_orphan_pod_cleaned_volumes",
        "gauge",
        "The total number of orphaned Pods whose volumes were cleaned in the last periodic sweep.",
        &[],
        orphans as f64,
    );
    out.single(
        "kubelet_orphan_pod_cleaned_volumes_errors",
        "gauge",
        "The number of orphaned Pods whose volumes failed to be cleaned in the last periodic sweep.",
        &[],
        failed as f64,
    );
}

/// The running pods and containers, and the dead containers, as the runtime reports them.
async fn write_running(out: &mut Page, server: &Server) {
    let ended = server.parts.runtime.dead_containers();
    let ended = tokio::time::timeout(figures::RUNTIME_TIMEOUT, ended);
    let (running, ended) = tokio::join!(figures::running(server), ended);
    let running = match running {
        Ok(running) => running,
        Err(error) => return tracing::debug!(%error, "cannot list the running containers"),
    };
    let mut by_pod: BTreeMap<&str, usize> = BTreeMap::new();
    running
        .iter()
        .for_each(|c| *by_pod.entry(c.uid.as_str()).or_default() += 1);
    out.single(
        "kubelet_running_pods",
        "gauge",
        "Number of pods that have a running container.",
        &[],
        by_pod.len() as f64,
    );
    let name = "kubelet_running_containers";
    out.family(name, "gauge", "Number of containers by their state.");
    let ended = ended.ok().and_then(Result::ok).map(|ended| ended.len());
    for (state, count) in [("running", Some(running.len())), ("exited", ended)] {
        if let Some(count) = count {
            out.sample(name, &[("container_state", state)], count as f64, None);
        }
    }
}

/// The volumes of claims that were measured. Starts no measurement.
fn volumes(out: &mut Page, server: &Server) {
    let volumes = server.figures.known_volumes();
    for (name, help, get) in [
        (
            "kubelet_volume_stats_capacity_bytes",
            "Capacity in bytes of the volume",
            (|v| v.bytes.1) as fn(&VolumeFigures) -> u64,
        ),
        (
            "kubelet_volume_stats_available_bytes",
            "Number of available bytes in the volume",
            |v| v.bytes.2,
        ),
        (
            "kubelet_volume_stats_used_bytes",
            "Number of used bytes in the volume",
            |v| v.bytes.0,
        ),
        (
            "kubelet_volume_stats_inodes",
            "Maximum number of inodes in the volume",
            |v| v.inodes.1,
        ),
        (
            "kubelet_volume_stats_inodes_free",
            "Number of free inodes in the volume",
            |v| v.inodes.2,
        ),
        (
            "kubelet_volume_stats_inodes_used",
            "Number of used inodes in the volume",
            |v| v.inodes.0,
        ),
    ] {
        out.family(name, "gauge", help);
        for volume in &volumes {
            let claim = volume.claim.as_deref().unwrap_or_default();
            out.sample(
                name,
                &[
                    ("namespace", &volume.namespace),
                    ("persistentvolumeclaim", claim),
                ],
                get(volume) as f64,
                None,
            );
        }
    }
    abnormal(out, &volumes);
}

/// The health of volumes, as CSI drivers report it.
fn abnormal(out: &mut Page, volumes: &[VolumeFigures]) {
    let name = "kubelet_volume_stats_health_status_abnormal";
    out.family(
        name,
        "gauge",
        "Abnormal volume health status. The count is either 1 or 0. 1 indicates the volume is unhealthy, 0 indicates volume is healthy",
    );
    for volume in volumes {
        if let (Some(claim), Some(abnormal)) = (&volume.claim, volume.abnormal) {
            let labels = [
                ("namespace", volume.namespace.as_str()),
                ("persistentvolumeclaim", claim),
            ];
            out.sample(name, &labels, f64::from(u8::from(abnormal)), None);
        }
    }
}

/// The measured sizes of containers' logs in bytes. Starts no measurement.
fn logs(out: &mut Page, server: &Server) {
    let name = "kubelet_container_log_filesystem_used_bytes";
    out.family(
        name,
        "gauge",
        "Bytes used by the container's logs on the filesystem.",
    );
    for known in server.parts.table.borrow().iter() {
        let uid = pod::uid(&known.pod);
        let (namespace, pod) = (
            known.pod.namespace().unwrap_or_default(),
            known.pod.name_any(),
        );
        for (container, bytes) in server.figures.known_logs(uid) {
            let labels = [
                ("container", container.as_str()),
                ("namespace", &namespace),
                ("pod", &pod),
                ("uid", uid),
            ];
            out.sample(name, &labels, bytes as f64, None);
        }
    }
}

/// The pods of this node.
fn write_pods(out: &mut Page, table: &PodTable) {
    write_desired_pods(out, table);
    working_pods(out, table);
    resizes(out, table);
}

/// The pods assigned to this node.
fn write_desired_pods(out: &mut Page, table: &PodTable) {
    let statics = table.iter().filter(|k| pod::is_static(&k.pod)).count();
    let name = "kubelet_desired_pods";
    out.family(
        name,
        "gauge",
        "The number of pods the kubelet is being instructed to run.",
    );
    out.sample(
        name,
        &[("static", "")],
        (table.iter().count() - statics) as f64,
        None,
    )
    .sample(name, &[("static", "true")], statics as f64, None);
    let mirrors = table
        .iter()
        .filter(|k| pod::is_static(&k.pod) && k.object.is_some())
        .count();
    out.single(
        "kubelet_mirror_pods",
        "gauge",
        "The number of mirror pods the kubelet will try to create.",
        &[],
        mirrors as f64,
    );
    let guests = table
        .iter()
        .map(|k| {
            pod::spec(&k.pod)
                .ephemeral_containers
                .as_ref()
                .map_or(0, Vec::len)
        })
        .sum::<usize>();
    out.single(
        "kubelet_managed_ephemeral_containers",
        "gauge",
        "Current number of ephemeral containers in pods.",
        &[],
        guests as f64,
    );
    let active = table
        .iter()
        .filter(|k| !pod::is_terminal(k.status_object()))
        .count();
    out.single(
        "kubelet_active_pods",
        "gauge",
        "The number of pods the kubelet considers active.",
        &[],
        active as f64,
    );
}

/// The pods assigned to this node, by lifecycle.
fn working_pods(out: &mut Page, table: &PodTable) {
    let name = "kubelet_working_pods";
    out.family(
        name,
        "gauge",
        "Number of pods that the node works on, by their lifecycle.",
    );
    for lifecycle in ["sync", "terminating", "terminated"] {
        for is_static in [false, true] {
            let of = |known: &&Known| {
                (lifecycle_of(known), pod::is_static(&known.pod)) == (lifecycle, is_static)
            };
            let labels = [
                ("config", "desired"),
                ("lifecycle", lifecycle),
                ("static", if is_static { "true" } else { "" }),
            ];
            let count = table.iter().filter(of).count();
            out.sample(name, &labels, count as f64, None);
        }
    }
}

/// Pending and running resizes of pods.
fn resizes(out: &mut Page, table: &PodTable) {
    let resizes = |kind: &str, reason: Option<&str>| {
        let has = |known: &&Known| {
            let status = known.status_object().status.as_ref();
            let mut conditions = status
                .into_iter()
                .flat_map(|s| s.conditions.iter().flatten());
            conditions.any(|c| {
                c.type_ == kind && reason.is_none_or(|reason| c.reason.as_deref() == Some(reason))
            })
        };
        table.iter().filter(has).count() as f64
    };
    let name = "kubelet_pod_pending_resizes";
    out.family(name, "gauge", "Number of pending resizes for pods.");
    for (reason, shown) in [("Deferred", "deferred"), ("Infeasible", "infeasible")] {
        let count = resizes("PodResizePending", Some(reason));
        out.sample(name, &[("reason", shown)], count, None);
    }
    out.single(
        "kubelet_pod_in_progress_resizes",
        "gauge",
        "Number of in-progress resizes for pods.",
        &[],
        resizes("PodResizeInProgress", None),
    );
}

/// The lifecycle of a pod, in the kubelet's words.
fn lifecycle_of(known: &Known) -> &'static str {
    if pod::is_terminal(known.status_object()) {
        "terminated"
    } else if known.pod.metadata.deletion_timestamp.is_some() {
        "terminating"
    } else {
        "sync"
    }
}

/// `/metrics`: the agent itself.
async fn own(server: &Arc<Server>) -> Response<Body> {
    let (parts, mut out) = (&server.parts, Page::default());
    meter::write_process(&mut out);
    for (name, pair) in [
        (
            "kubelet_certificate_manager_client_ttl_seconds",
            Pair::client(&parts.config.cert_dir),
        ),
        (
            "kubelet_certificate_manager_server_ttl_seconds",
            Pair::serving(&parts.config.cert_dir),
        ),
    ] {
        if let Some((_, ends)) = pair.lifetime() {
            let left = ends.duration_since(parts.clock.now()).as_secs_f64();
            out.single(
                name,
                "gauge",
                "Seconds until the certificate expires; negative if it has expired.",
                &[],
                left,
            );
        }
    }
    let shutdown = parts.metrics.shutdown();
    for (name, help, time) in [
        (
            "kubelet_graceful_shutdown_start_time_seconds",
            "Last graceful shutdown start time since unix epoch in seconds",
            shutdown.start,
        ),
        (
            "kubelet_graceful_shutdown_end_time_seconds",
            "Last graceful shutdown end time since unix epoch in seconds",
            shutdown.end,
        ),
    ] {
        let value = time.map_or(0.0, |time| time.as_second() as f64);
        out.single(name, "gauge", help, &[], value);
    }
    let name = "kubernetes_feature_enabled";
    out.family(
        name,
        "gauge",
        "This metric records the data about the stage and enablement of a k8s feature.",
    );
    for feature in FEATURES {
        out.sample(
            name,
            &[("name", feature.name), ("stage", feature.stage.label())],
            f64::from(u8::from(feature.is_enabled(&parts.config.feature_gates))),
            None,
        );
    }
    let labels = [
        ("git_version", version::REPORTED),
        ("major", version::MAJOR),
        ("minor", version::MINOR),
        ("platform", "linux"),
    ];
    out.single(
        "kubernetes_build_info",
        "gauge",
        "A metric with a constant '1' value labeled by what was built.",
        &labels,
        1.0,
    );
    out.single(
        "kubelet_node_name",
        "gauge",
        "The node's name. The count is always 1.",
        &[("node", &parts.config.node_name)],
        1.0,
    );
    out.single(
        "kubelet_cgroup_version",
        "gauge",
        "The version of cgroups on the node.",
        &[],
        if parts.machine.cgroup_v2 { 2.0 } else { 1.0 },
    );
    write_pods(&mut out, &parts.table.borrow());
    write_managers(&mut out, parts).await;
    write_running(&mut out, server).await;
    volumes(&mut out, server);
    logs(&mut out, server);
    parts.metrics.write(false, &mut out);
    page(out)
}
