//! The agent's own metrics, under the kubelet's names (`pkg/kubelet/metrics/metrics.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use kube::ResourceExt as _;
use tokio::time::Instant;

use holdfast_core::lock::lock;
use holdfast_core::node::shutdown::Times;
use holdfast_core::pod;
use holdfast_core::pod::resize::{Infeasible, RequestedChange};
use holdfast_core::serving::exposition::{Family, Page, Registry};
use holdfast_core::volume::selinux::{self, Admission, Admissions};

mod families;

pub use families::family;
use families::*;

/// The `image_size_in_bytes` label of an image's size.
fn size_class(bytes: u64) -> &'static str {
    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;
    let classes = [
        (10 * MB, "0-10MB"),
        (100 * MB, "10MB-100MB"),
        (500 * MB, "100MB-500MB"),
        (GB, "500MB-1GB"),
        (5 * GB, "1GB-5GB"),
        (10 * GB, "5GB-10GB"),
        (20 * GB, "10GB-20GB"),
        (30 * GB, "20GB-30GB"),
        (40 * GB, "30GB-40GB"),
        (60 * GB, "40GB-60GB"),
        (100 * GB, "60GB-100GB"),
    ];
    classes
        .into_iter()
        .find(|(most, _)| bytes <= *most)
        .map_or("GT100GB", |(_, name)| name)
}

/// Durations of a pod's start, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PodStart {
    /// Since the agent first observed the pod.
    pub seen: f64,
    /// Since the pod's creation.
    pub created: f64,
    /// The part spent on pulling images.
    pub images: f64,
    /// Whether the pod has persistent storage. The SLI leaves such pods out, as the time of storage is not the agent's.
    pub stateful: bool,
    /// Whether the pod has its own network namespace.
    pub network: bool,
}

/// A probe of a container, and its result.
#[derive(Debug, Clone, Copy)]
pub struct Probe<'a> {
    /// Container name, pod namespace, pod name, pod uid.
    pub of: [&'a str; 4],
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: &'a str,
    /// `successful`, `failed` or `unknown`.
    pub result: &'a str,
    /// The duration of the probe.
    pub took: Duration,
}

/// An operation on a volume.
#[derive(Debug, Clone, Copy)]
pub struct VolumeOperation<'a> {
    /// For example `volume_mount`.
    pub name: &'a str,
    /// The volume plugin; for CSI volumes the driver is included.
    pub plugin: &'a str,
    /// Whether an in-tree volume was migrated to a CSI driver.
    pub is_migrated: bool,
    /// Whether the operation failed.
    pub has_failed: bool,
    /// The duration of the operation.
    pub took: Duration,
}

/// The plugins of a pod's volumes, one entry for each volume.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodVolumes {
    /// Volumes that the pod needs; `N/A` for a volume whose plugin is not known yet.
    pub desired: Vec<String>,
    /// Volumes that are set up.
    pub actual: Vec<String>,
}

fn seconds(at: Timestamp) -> f64 {
    at.as_duration().as_secs_f64()
}

/// All metrics that are recorded as things happen.
#[derive(Debug, Default)]
pub struct Metrics {
    /// The volumes of pods, by pod uid.
    volumes: Mutex<BTreeMap<String, PodVolumes>>,
    /// The SELinux labels that pods require of volumes.
    labels: Mutex<Admissions>,
    /// Deleted pods with leftover directories, and how many of them failed to be removed.
    orphans: Mutex<(usize, usize)>,
    /// Seconds since 1970 of the first attempt to register the node, and of its success.
    registration: Mutex<(Option<f64>, Option<f64>)>,
    own: Mutex<Registry>,
    probes: Mutex<Registry>,
    /// The uids of pods with probes, by namespace and name.
    probed: Mutex<BTreeMap<(String, String), BTreeSet<String>>>,
    /// The start and end of the last, or current, shutdown of the machine.
    shutdown: Mutex<Times>,
}

impl Metrics {
    fn with(&self, work: impl FnOnce(&mut Registry)) {
        work(&mut lock(&self.own));
    }

    /// Adds `by` to a counter.
    pub fn count(&self, family: Family, labels: &[&str], by: u64) {
        self.with(|r| r.count(family, labels, by));
    }

    /// Adds an observation to a histogram.
    pub fn observe(&self, family: Family, bounds: &'static [f64], labels: &[&str], value: f64) {
        self.with(|r| r.observe(family, bounds, labels, value));
    }

    /// Records the durations of a pod's start.
    pub(crate) fn pod_started(&self, start: PodStart) {
        self.with(|r| {
            r.observe(POD_START, POD_STARTS, &[], start.seen);
            r.observe(POD_START_TOTAL, POD_STARTS, &[], start.created);
            let without_images = (start.created - start.images).max(0.0);
            if !start.stateful {
                r.observe(POD_START_SLI, POD_STARTS, &[], without_images);
            }
            if start.network && r.get(FIRST_NETWORK).is_none() {
                r.set(FIRST_NETWORK, without_images);
            }
        });
    }

    /// Records one sync of a pod worker.
    pub(crate) fn sync_completed(&self, operation: &str, took: Duration) {
        self.with(|r| r.observe(WORKER, USUAL, &[operation], took.as_secs_f64()));
    }

    /// Records the delay between computing a status and writing it to the API.
    pub(crate) fn status_written(&self, took: Duration) {
        self.with(|r| r.observe(STATUS, STATUSES, &[], took.as_secs_f64()));
    }

    /// Records the creation of a sandbox, or its failure if `refused`.
    pub fn sandbox(&self, handler: &str, own_users: bool, refused: bool, took: Duration) {
        self.with(|r| {
            if own_users {
                r.count(USER_NAMESPACES, &[], 1);
                r.count(USER_NAMESPACES_ERRORS, &[], u64::from(refused));
            }
            r.observe(SANDBOX, USUAL, &[handler], took.as_secs_f64());
            r.count(SANDBOX_ERRORS, &[handler], u64::from(refused));
            r.count(STARTED_PODS, &[], 1);
            r.count(STARTED_PODS_ERRORS, &[], u64::from(refused));
        });
    }

    /// Records a started container; `failed` is the error code of a failed start.
    pub(crate) fn container_started(&self, kind: &str, failed: Option<&str>) {
        self.with(|r| {
            r.count(STARTED, &[kind], 1);
            if let Some(code) = failed {
                r.count(STARTED_ERRORS, &[kind, code], 1);
            }
        });
    }

    /// Counts containers that are terminated in `now` but were not in `before`.
    pub(crate) fn containers_terminated(&self, before: Option<&PodStatus>, now: &PodStatus) {
        type List = fn(&PodStatus) -> &Option<Vec<ContainerStatus>>;
        let lists: [(&str, List); 3] = [
            ("init_container", |s| &s.init_container_statuses),
            ("container", |s| &s.container_statuses),
            ("ephemeral_container", |s| &s.ephemeral_container_statuses),
        ];
        let end = |c: &ContainerStatus| c.state.as_ref().and_then(|s| s.terminated.clone());
        for (kind, list) in lists {
            let had_ended = |name: &str| {
                let mut known = before.and_then(|b| list(b).as_ref()).into_iter().flatten();
                known.any(|c| c.name == name && end(c).is_some())
            };
            for container in list(now).iter().flatten() {
                if let Some(end) = end(container).filter(|_| !had_ended(&container.name)) {
                    let labels = [
                        kind,
                        &end.exit_code.to_string(),
                        end.reason.as_deref().unwrap_or_default(),
                    ];
                    self.with(|r| r.count(TERMINATED, &labels, 1));
                }
            }
        }
    }

    /// Counts requested changes of a container's resources.
    pub(crate) fn record_resize_request(&self, changes: &[RequestedChange]) {
        self.with(|r| {
            for change in changes {
                let labels = [change.resource, change.of, change.operation];
                r.count(RESIZES, &labels, 1);
            }
        });
    }

    /// Counts a deferred resize that was accepted.
    pub(crate) fn deferred_resize_accepted(&self, trigger: &str) {
        self.with(|r| r.count(DEFERRED_ACCEPTED, &[trigger], 1));
    }

    /// Counts an infeasible resize: a resource manager forbids it, or the node is too small.
    pub(crate) fn resize_infeasible(&self, cause: Infeasible) {
        self.with(|r| r.count(INFEASIBLE, &[cause.detail()], 1));
    }

    /// Counts pods that were recreated with the same uid while the earlier pod was terminating.
    pub(crate) fn pods_restarted(&self, is_static: bool, count: u64) {
        let labels = [if is_static { "true" } else { "" }];
        self.with(|r| r.count(RESTARTED, &labels, count));
    }

    /// Counts pods that only the runtime has.
    pub(crate) fn pods_orphaned(&self, count: u64) {
        self.with(|r| r.count(ORPHANED, &[], count));
    }

    /// Records a resize of a pod's containers.
    pub fn resized(&self, done: bool, took: Duration) {
        let labels = [if done { "true" } else { "false" }];
        let took = took.as_secs_f64() * 1000.0;
        self.with(|r| r.observe(RESIZE_MS, RESIZING, &labels, took));
    }

    /// Counts image volumes that a container requires.
    pub(crate) fn image_volumes(&self, count: u64) {
        self.with(|r| r.count(IMAGE_VOLUMES, &[], count));
    }

    /// Counts image volumes of created containers.
    pub(crate) fn image_volumes_mounted(&self, count: u64) {
        self.with(|r| r.count(IMAGE_VOLUMES_MOUNTED, &[], count));
    }

    /// Records that the runtime does not report its cgroup driver.
    pub(crate) fn runtime_is_outdated(&self) {
        self.with(|r| r.add(LOSING_SUPPORT, &["1.37.0"], 1.0));
    }

    /// Counts HTTPS lifecycle hooks that were answered over plain HTTP.
    pub(crate) fn hook_in_plain_http(&self) {
        self.with(|r| r.count(HOOKS_IN_PLAIN_HTTP, &[], 1));
    }

    /// Counts `sleep` hooks that were cut short.
    pub(crate) fn sleep_hook_interrupted(&self) {
        self.with(|r| r.count(SLEEPS_CUT, &[], 1));
    }

    /// Counts failed renewals of the client certificate, or of the serving certificate.
    pub(crate) fn renewals_failed(&self, client: bool, by: u64) {
        let of = if client {
            CLIENT_RENEWALS
        } else {
            SERVER_RENEWALS
        };
        self.with(|r| r.count(of, &[], by));
    }

    /// Counts a request to version `v1alpha1` of the podresources API. The
    /// kubelet counts such requests in the total only.
    pub(crate) fn pod_resources_v1alpha1(&self) {
        let [all, ..] = POD_RESOURCES;
        self.with(|r| r.count(all, &["v1alpha1"], 1));
    }

    /// Counts a request to the podresources API; `verb` is `list`, `get` or `get_allocatable`.
    pub fn pod_resources(&self, verb: &str, found: bool) {
        self.with(|r| {
            for family in POD_RESOURCES {
                let of = family.name.rsplit_once("requests_").map(|(_, of)| of);
                if of == Some("total") || of == Some(verb) {
                    r.count(family, &["v1"], 1);
                }
            }
            r.count(POD_RESOURCES_ERRORS, &["v1"], u64::from(!found));
        });
    }

    /// Records the first attempt to register the node.
    pub(crate) fn node_registering(&self, now: Timestamp) {
        lock(&self.registration).0.get_or_insert(seconds(now));
    }

    /// Records the node's first registration; `machine` and `agent` are their start times.
    pub(crate) fn node_registered(&self, now: Timestamp, machine: Timestamp, agent: Timestamp) {
        let mut registration = lock(&self.registration);
        let (Some(tried), None) = *registration else {
            return;
        };
        registration.1 = Some(seconds(now));
        self.with(|r| {
            r.set(STARTUP_BEFORE, seconds(agent) - seconds(machine));
            r.set(STARTUP_TRIED, tried - seconds(agent));
            r.set(STARTUP_REGISTERED, seconds(now) - tried);
        });
    }

    /// Records the node's readiness, once, and only if this agent created the Node object.
    pub fn node_ready(&self, now: Timestamp, machine: Timestamp) {
        let Some(registered) = lock(&self.registration).1 else {
            return;
        };
        self.with(|r| {
            if r.get(STARTUP).is_none() {
                r.set(STARTUP_READY, seconds(now) - registered);
                r.set(STARTUP, seconds(now) - seconds(machine));
            }
        });
    }

    /// Counts a pod that failed admission.
    pub fn rejected(&self, reason: &str) {
        self.with(|r| r.count(REJECTED, &[reason], 1));
    }

    /// Counts a pod that was preempted.
    pub fn preempted(&self, signal: &str) {
        self.with(|r| r.count(PREEMPTED, &[signal], 1));
    }

    /// Counts a pod that was evicted.
    pub fn evicted(&self, signal: &str) {
        self.with(|r| r.count(EVICTED, &[signal], 1));
    }

    /// Sets the times of the machine's last or current shutdown.
    pub fn shut_down(&self, times: Times) {
        *lock(&self.shutdown) = times;
    }

    /// The times of the machine's last shutdown, as far as they are known.
    pub fn shutdown(&self) -> Times {
        *lock(&self.shutdown)
    }

    /// Records the age of the measurements that an eviction was based on.
    pub(crate) fn eviction_decided(&self, signal: &str, age: Duration) {
        self.with(|r| r.observe(EVICTION_AGE, USUAL, &[signal], age.as_secs_f64()));
    }

    /// Records a pulled image; `bytes` is its size.
    pub fn pulled(&self, bytes: u64, took: Duration) {
        self.with(|r| r.observe(PULLED, PULLS, &[size_class(bytes)], took.as_secs_f64()));
    }

    /// Counts a removed image; `reason` is `space` or `age`.
    pub fn collected(&self, reason: &str) {
        self.with(|r| r.count(COLLECTED, &[reason], 1));
    }

    /// Records an operation on a volume.
    pub fn volume(&self, operation: VolumeOperation<'_>) {
        let status = match operation.has_failed {
            true => "fail-unknown",
            false => "success",
        };
        let migrated = match operation.is_migrated {
            true => "true",
            false => "false",
        };
        let labels = [migrated, operation.name, status, operation.plugin];
        self.with(|r| r.observe(STORAGE, STORING, &labels, operation.took.as_secs_f64()));
    }

    /// Records the time from a pod's first request for a volume until the volume is ready.
    pub(crate) fn volume_ready(&self, plugin: &str, took: Duration) {
        let labels = [plugin, "overall_volume_mount"];
        self.with(|r| r.observe(STORAGE_TOTAL, STORING, &labels, took.as_secs_f64()));
    }

    /// Records the volumes found on disk at startup, and how many of them could not be identified.
    pub fn reconstructed(&self, volumes: u64, unknown: u64) {
        self.with(|r| {
            r.count(RECONSTRUCTED, &[], volumes);
            r.count(RECONSTRUCTED_ERRORS, &[], unknown);
            r.count(FORCE_CLEANED, &[], 0);
            r.count(FORCE_CLEANED_ERRORS, &[], 0);
        });
    }

    /// Records unidentified volumes that were cleaned up for a deleted pod, or that failed to be.
    pub(crate) fn force_cleaned(&self, volumes: u64, has_failed: bool) {
        self.with(|r| {
            r.count(FORCE_CLEANED, &[], volumes);
            r.count(
                FORCE_CLEANED_ERRORS,
                &[],
                if has_failed { volumes } else { 0 },
            );
        });
    }

    /// Sets the number of deleted pods with leftover directories, and how many of them failed to be removed.
    pub fn orphans(&self, found: usize, failed: usize) {
        *lock(&self.orphans) = (found, failed);
    }

    /// The numbers of the last call of [`Metrics::orphans`].
    #[must_use]
    pub fn orphaned(&self) -> (usize, usize) {
        *lock(&self.orphans)
    }

    /// Sets the volumes of a pod.
    pub(crate) fn pod_has_volumes(&self, uid: &str, volumes: PodVolumes) {
        lock(&self.volumes).insert(uid.to_owned(), volumes);
    }

    /// Removes a pod whose volumes are released.
    pub(crate) fn pod_has_no_volumes(&self, uid: &str) {
        lock(&self.volumes).remove(uid);
        lock(&self.labels).forget(uid);
    }

    /// Counts a pod whose containers require different SELinux labels for one volume of this access mode.
    pub(crate) fn conflicting_labels(&self, access_mode: &str, is_error: bool) {
        let family = SELINUX_POD[usize::from(!is_error)];
        self.with(|r| r.add(family, &[access_mode], 1.0));
    }

    /// Records the SELinux label, or `None`, that a pod requires for a volume of this plugin and access mode. If all
    /// pods must use the volume with the same label, a different label is an error.
    pub(crate) fn label_admitted(
        &self,
        uid: &str,
        volume: &str,
        label: Option<&str>,
        [plugin, access_mode]: [&str; 2],
    ) -> Admission {
        let is_strict = access_mode == selinux::SINGLE_POD;
        let admission = lock(&self.labels).admit(volume, uid, label, is_strict);
        let family = match &admission {
            Admission::New if label.is_some() => SELINUX_ADMITTED,
            Admission::Conflict(_) => SELINUX_VOLUME[usize::from(!is_strict)],
            Admission::New | Admission::Same => return admission,
        };
        self.with(|r| r.add(family, &[plugin, access_mode], 1.0));
        admission
    }

    /// The number of volumes, by state and plugin.
    #[must_use]
    pub fn volumes(&self) -> BTreeMap<(&'static str, String), usize> {
        let mut all = BTreeMap::new();
        for pod in lock(&self.volumes).values() {
            let desired = pod.desired.iter().map(|p| ("desired_state_of_world", p));
            let actual = pod.actual.iter().map(|p| ("actual_state_of_world", p));
            for (state, plugin) in desired.chain(actual) {
                *all.entry((state, plugin.clone())).or_default() += 1;
            }
        }
        all
    }

    /// Records a call to a CSI driver; `code` is the gRPC status code.
    pub fn csi(&self, driver: &str, method: &str, code: &str, took: Duration) {
        let method = format!("/csi.v1.Node/{method}");
        let labels = [driver, code, &method, "false"];
        self.with(|r| r.observe(CSI, STORING, &labels, took.as_secs_f64()));
    }

    /// Counts a registration request of a device plugin.
    pub(crate) fn device_plugin_registered(&self, resource: &str) {
        self.with(|r| r.count(DEVICE_PLUGINS, &[resource], 1));
    }

    /// Records an `Allocate` call to a device plugin, successful or not.
    pub(crate) fn device_allocated(&self, resource: &str, took: Duration) {
        self.with(|r| r.observe(DEVICE_ALLOCATION, USUAL, &[resource], took.as_secs_f64()));
    }

    /// Records a request to the apiserver; `code` is `None` if there was no answer.
    pub(crate) fn api_request(&self, method: &str, host: &str, code: Option<u16>, took: Duration) {
        let code = code.map_or_else(|| "<error>".to_owned(), |c| c.to_string());
        self.with(|r| {
            r.count(CLIENT, &[&code, method, host], 1);
            let labels = [host, method];
            r.observe(CLIENT_SECONDS, REQUESTS, &labels, took.as_secs_f64());
        });
    }

    /// Counts a stream over a WebSocket.
    pub fn websocket(&self, what: &str) {
        self.with(|r| r.count(WEBSOCKETS, &[what], 1));
    }

    /// Records a step of a pod's life; `result` is `done`, `failed` or `dropped`.
    pub fn step(&self, step: &str, result: &str, took: Duration) {
        self.with(|r| r.observe(STEPS, STEP, &[step, result], took.as_secs_f64()));
    }

    /// Records a call to the runtime.
    pub fn runtime(&self, operation: &str, refused: bool, took: Duration) {
        self.with(|r| {
            r.count(RUNTIME_TOTAL, &[operation], 1);
            r.count(RUNTIME_ERRORS, &[operation], u64::from(refused));
            r.observe(RUNTIME_SECONDS, RUNTIME, &[operation], took.as_secs_f64());
        });
    }

    /// Records the first sync of a pod: its number of containers, and the seconds since the agent first observed it.
    pub(crate) fn first_sync(&self, containers: usize, after: f64) {
        self.with(|r| {
            r.observe(CONTAINERS, COUNTS, &[], containers as f64);
            r.observe(WORKER_START, USUAL, &[], after);
        });
    }

    /// Measures an operation on a pod's cgroup: `create`, `update` or `destroy`.
    pub async fn cgroup<T>(&self, operation: &str, work: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let done = work.await;
        let took = begun.elapsed().as_secs_f64();
        self.with(|r| r.observe(CGROUPS, USUAL, &[operation], took));
        done
    }

    /// Records a listing of the runtime's pods; `now` is in seconds since 1970.
    pub(crate) fn runtime_listed(&self, now: f64, took: Duration, since_last: Option<Duration>) {
        self.with(|r| {
            r.set(LISTED, now);
            r.observe(RELIST, USUAL, &[], took.as_secs_f64());
            if let Some(since) = since_last {
                r.observe(INTERVAL, USUAL, &[], since.as_secs_f64());
            }
        });
    }

    /// Counts an HTTP request, and counts it as in flight until the returned value is
    /// dropped. `server` is `readwrite` or `readonly`.
    pub fn http(
        self: &Arc<Self>,
        method: &'static str,
        path: &'static str,
        server: &'static str,
        long: bool,
    ) -> RequestInFlight {
        let long = if long { "true" } else { "false" };
        let labels = [method, path, server, long];
        self.with(|r| {
            r.count(HTTP, &labels, 1);
            r.add(HTTP_NOW, &labels, 1.0);
        });
        RequestInFlight {
            metrics: Arc::clone(self),
            labels,
            begun: Instant::now(),
        }
    }

    /// Records the result of a probe. The duration of a failed probe is not recorded, as in the kubelet.
    pub fn probed(&self, probe: Probe<'_>) {
        let [container, namespace, pod, uid] = probe.of;
        let labels = [container, namespace, pod, uid, probe.kind, probe.result];
        let mut probes = lock(&self.probes);
        probes.count(PROBES, &labels, 1);
        let key = (namespace.to_owned(), pod.to_owned());
        let mut probed = lock(&self.probed);
        probed.entry(key).or_default().insert(uid.to_owned());
        if probe.result != "failed" {
            let labels = [container, namespace, pod, probe.kind];
            probes.observe(PROBE_SECONDS, USUAL, &labels, probe.took.as_secs_f64());
        }
    }

    /// Removes the probe metrics of a deleted pod.
    pub fn remove_pod(&self, pod: &Pod) {
        let mut probes = lock(&self.probes);
        probes.remove_series(PROBES, &[("pod_uid", pod::uid(pod))]);
        let key = (pod.namespace().unwrap_or_default(), pod.name_any());
        let mut probed = lock(&self.probed);
        // Durations are keyed by name, without the uid, and a newer pod of the same name may use them.
        if let Some(uids) = probed.get_mut(&key) {
            uids.remove(pod::uid(pod));
            if !uids.is_empty() {
                return;
            }
        }
        probed.remove(&key);
        let of = [("namespace", key.0.as_str()), ("pod", &key.1)];
        probes.remove_series(PROBE_SECONDS, &of);
    }

    /// Writes the metrics of the agent, or those of probes.
    pub fn write(&self, probes: bool, page: &mut Page) {
        let of = if probes { &self.probes } else { &self.own };
        lock(of).write(page);
    }
}

/// An HTTP request in flight.
#[derive(Debug)]
pub struct RequestInFlight {
    metrics: Arc<Metrics>,
    labels: [&'static str; 4],
    begun: Instant,
}

impl Drop for RequestInFlight {
    fn drop(&mut self) {
        self.metrics.with(|r| {
            r.add(HTTP_NOW, &self.labels, -1.0);
            let took = self.begun.elapsed().as_secs_f64();
            r.observe(HTTP_SECONDS, USUAL, &self.labels, took);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(metrics: &Metrics) -> String {
        let mut page = Page::default();
        metrics.write(false, &mut page);
        page.into_string()
    }

    #[test]
    fn the_termination_of_a_container_is_counted_once() {
        let status = |state: serde_json::Value| -> PodStatus {
            let containers = serde_json::json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}]});
            serde_json::from_value(containers).expect("a status")
        };
        let ended = serde_json::json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
        let (runs, ended) = (status(serde_json::json!({"running": {}})), status(ended));
        let metrics = Metrics::default();
        metrics.containers_terminated(None, &runs);
        assert!(!written(&metrics).contains("terminated_containers"));
        for before in [&runs, &ended, &ended] {
            metrics.containers_terminated(Some(before), &ended);
        }
        let line = "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"137\",reason=\"OOMKilled\"} 1\n";
        assert!(written(&metrics).contains(line), "{}", written(&metrics));
    }

    #[test]
    fn startup_durations_are_recorded_once_and_only_for_a_new_node() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let metrics = Metrics::default();
        metrics.node_ready(at(50), at(10));
        assert!(!written(&metrics).contains("node_startup"));
        metrics.node_registering(at(30));
        metrics.node_registering(at(33));
        metrics.node_registered(at(35), at(10), at(28));
        metrics.node_ready(at(42), at(10));
        metrics.node_ready(at(99), at(10));
        let text = written(&metrics);
        for (part, seconds) in [
            ("pre_kubelet_", 18),
            ("pre_registration_", 2),
            ("registration_", 5),
            ("post_registration_", 7),
            ("", 32),
        ] {
            let line = format!("kubelet_node_startup_{part}duration_seconds {seconds}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }

    #[test]
    fn a_request_is_in_flight_until_it_is_answered() {
        let metrics = Arc::new(Metrics::default());
        let now = |count: u8| {
            format!(
                "kubelet_http_inflight_requests{{method=\"GET\",path=\"pods\",server_type=\"readwrite\",long_running=\"false\"}} {count}\n"
            )
        };
        let answering = metrics.http("GET", "pods", "readwrite", false);
        assert!(written(&metrics).contains(&now(1)), "{}", written(&metrics));
        drop(answering);
        assert!(written(&metrics).contains(&now(0)));
    }

    #[test]
    fn a_deleted_pod_leaves_the_probe_metrics_of_a_newer_pod_of_its_name() {
        let metrics = Metrics::default();
        let pod = |uid: &str| -> Pod {
            let metadata = serde_json::json!({"namespace": "n", "name": "p", "uid": uid});
            serde_json::from_value(serde_json::json!({ "metadata": metadata })).expect("a pod")
        };
        let probed = |uid: &str| {
            metrics.probed(Probe {
                of: ["c", "n", "p", uid],
                kind: "Liveness",
                result: "successful",
                took: Duration::from_millis(3),
            });
        };
        let count = || {
            let mut page = Page::default();
            metrics.write(true, &mut page);
            let text = page.into_string();
            let line = text
                .lines()
                .find(|l| l.starts_with("prober_probe_duration_seconds_count"));
            line.and_then(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
        };
        probed("old");
        probed("new");
        metrics.remove_pod(&pod("old"));
        assert_eq!(count(), Some(2), "a newer pod of this name is probed");
        probed("new");
        assert_eq!(count(), Some(3));
        metrics.remove_pod(&pod("new"));
        assert_eq!(count(), None);
        // The removal of a pod without probes changes nothing.
        probed("third");
        metrics.remove_pod(&pod("fourth"));
        assert_eq!(count(), Some(1));
    }

    #[test]
    fn images_have_size_classes() {
        let classes = [0, 10 << 20, (10 << 20) + 1, 2 << 30, 200 << 30].map(size_class);
        assert_eq!(
            classes,
            ["0-10MB", "0-10MB", "10MB-100MB", "1GB-5GB", "GT100GB"]
        );
    }
}
